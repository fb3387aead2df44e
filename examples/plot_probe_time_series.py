"""
A certified probe of time series
================================

Two classes of series differ in a short motif at an unknown time: a rise that jumps back, or a fall that does. Windows
of the series are the tokens. Their mean has no trace of the motif, and weightings that depend on the content of windows
find it. The explanation shows when it was.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import LogisticRegression

from convexformer import ConvexProbeClassifierCV
from convexformer.preprocessing import MeanPooling, QueryPooling, TokenGates
from convexformer.probes import Generation

# %%
# Noise of 128 steps with a motif of 9 steps. Each window has 12 steps and starts 2 steps after the one before.
rng = np.random.default_rng(0)
n_steps, width = 128, 12
rise = 2.5 * np.linspace(-1, 1, 9)
y = np.tile(["fall", "rise"], 700)
series = rng.normal(size=(len(y), n_steps))
starts = rng.integers(10, 110, size=len(y))
for signal, label, start in zip(series, y, starts, strict=True):
    signal[start : start + 9] += rise if label == "rise" else rise[::-1]
X = np.lib.stride_tricks.sliding_window_view(series, width, axis=1)[:, ::2]
train, test = slice(0, 600), slice(600, None)
print(f"{X.shape[1]} windows of {X.shape[2]} steps in each series")

# %%
# Linear models see nothing, be it of the mean window or of the whole series: the motif may be anywhere.
for name, features in {"mean window": X.mean(axis=1), "whole series": series}.items():
    logistic = LogisticRegression(C=0.01).fit(features[train], y[train])
    print(f"{name} and logistic regression: accuracy {logistic.score(features[test], y[test]):.3f}")

# %%
# Queries that are windows of the training series find the motif. Random gates do not, since each gate opens for half of
# all noise. Gates that are generated do, starting from the mean alone. The dual point of each solution says how much a
# gate would help, and the best gates of a local search are added. The certificate is exact for the weightings that
# there are. It says nothing of those that the search did not find.
options = {"alphas": 5, "eps": 0.03, "cv": 3, "tol": 1e-3, "random_state": 0}
models = {
    "128 queries": ConvexProbeClassifierCV(dictionary=[MeanPooling(), QueryPooling(128)], **options),
    "128 random gates": ConvexProbeClassifierCV(dictionary=[MeanPooling(), TokenGates(128)], **options),
    "16 generated gates": ConvexProbeClassifierCV(
        dictionary=MeanPooling(), generate=Generation(16, kinds=["gates"]), **options
    ),
}
for name, model in models.items():
    model.fit(X[train], y[train])
    print(f"{name}: accuracy {model.score(X[test], y[test]):.3f}, {model.certificate_}")
print(f"generated gates: {models['16 generated gates'].generation_.end}")

# %%
# What each window adds to the score of ``rise``, at the middle of the window, above the signal. The motif is between
# the dotted lines. The first series of each class that is classified rightly is drawn.
probe = models["128 queries"]
explanation = probe.explain(X[test])
scores, predicted = probe.decision_function(X[test]), probe.predict(X[test])
print(f"largest difference of sum and score: {np.abs(explanation.scores - scores).max():.1e}")
times = 2 * np.arange(X.shape[1]) + (width - 1) / 2
figure, axes = plt.subplots(2, 1, figsize=(9, 6), layout="constrained", sharex=True)
for ax, label in zip(axes, ("rise", "fall"), strict=True):
    sample = np.flatnonzero((y[test] == label) & (predicted == label))[0]
    explanation.plot_series(
        sample, series=series[test][sample], times=times, title=f"{label}, score {scores[sample]:.1f}", ax=ax
    )
    for edge in starts[test][sample] + np.array([0, 8]):
        ax.axvline(edge, color="black", linestyle=":")
plt.show()

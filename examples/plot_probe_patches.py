"""
A certified probe of image patches
==================================

Images become patches, and a probe pools the patches. Where a patch is in the image matters for some tasks and not for
others. Digits are a task in which it matters: this example shows that a dictionary that looks at content alone does
not suffice, and two ways to let it look at positions.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

from convexformer import ConvexProbeClassifierCV
from convexformer.datasets import load_digit_tokens
from convexformer.preprocessing import RelativePositions

# %%
# Images of 8 x 8 pixels as 16 patches of 2 x 2 pixels, row by row.
X, y = load_digit_tokens()
order = np.random.default_rng(0).permutation(len(X))
X, y = X[order], y[order]
train, test = slice(0, 900), slice(900, None)


def logistic(features):
    """Accuracy of logistic regression, its regularisation chosen by cross-validation."""
    search = GridSearchCV(LogisticRegression(max_iter=3000), {"C": [0.1, 1.0, 10.0, 100.0]}, cv=3)
    return search.fit(features[train], y[train]).score(features[test], y[test])


print(f"mean of the patches and logistic regression: accuracy {logistic(X.mean(axis=1)):.3f}")
print(f"all pixels and logistic regression: accuracy {logistic(X.reshape(len(X), -1)):.3f}")

# %%
# **Content alone.** The default dictionary says which kinds of patches an image has and not where. That is far better
# than the mean and not enough for digits.
#
# **Positions alone.** ``RelativePositions`` picks the patch at each place. The pooled tokens are the patches
# themselves, so the model is linear in the pixels.
#
# **Content and position.** When each patch also holds its row and its column, the weightings of the default dictionary
# depend on both.
place = np.zeros((16, 8))
place[np.arange(16), np.arange(16) // 4] = 1.0
place[np.arange(16), 4 + np.arange(16) % 4] = 1.0
placed = np.concatenate([X, np.broadcast_to(place, (len(X), 16, 8))], axis=2)
cases = {
    "content alone": (X, "auto"),
    "positions alone": (X, RelativePositions(range(16))),
    "content and position": (placed, "auto"),
}
accuracies = {}
for name, (tokens, dictionary) in cases.items():
    options = {"alphas": 4, "eps": 0.01, "cv": 2, "tol": 1e-3, "penalty": "nuclear", "random_state": 0}
    probe = ConvexProbeClassifierCV(dictionary=dictionary, **options).fit(tokens[train], y[train])
    accuracies[name] = probe.score(tokens[test], y[test])
    print(f"{name}: accuracy {accuracies[name]:.3f}, relative gap {probe.certificate_.relative_gap:.0e}")
print(probe.certificate_)

# %%
# What each patch adds to the score of a digit, for the probe with content and position. The same image is shown for
# two digits: the one that it is, and the one with the next largest score.
explanation = probe.explain(placed[test])
scores = probe.decision_function(placed[test])
print(f"largest difference of sum and score: {np.abs(explanation.scores - scores).max():.1e}")
figure, axes = plt.subplots(2, 2, figsize=(9, 7), layout="constrained")
for row, digit in zip(axes, (3, 9), strict=True):
    sample = np.flatnonzero(y[test] == digit)[0]
    image = 1 - X[test][sample].reshape(4, 4, 2, 2).transpose(0, 2, 1, 3).reshape(8, 8)
    second, first = np.argsort(scores[sample])[-2:]
    for ax, output in zip(row, (first, second), strict=True):
        title = f"a {digit}: score {scores[sample, output]:.1f} of {output}"
        explanation.plot_patches(sample, (4, 4), output, image=image, title=title, ax=ax)
plt.show()

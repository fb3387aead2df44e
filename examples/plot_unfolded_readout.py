"""
An unfolded transformer with a certified readout
================================================

The layers of an unfolded transformer each lower an energy. Training them is not convex. With the layers fixed, training
the readout is: the tokens of the last layer are a data set for the convex program, whose optimum replaces the readout
that Adam found.
"""

import matplotlib.pyplot as plt
import numpy as np

from convexformer import UnfoldedTransformerClassifier
from convexformer.datasets import load_documentation_sentences, make_word_vectors

# %%
# Which package does a sentence describe? Sentences and word vectors need no download.
sentences, labels = load_documentation_sentences(packages=["numpy", "sklearn"])
X = make_word_vectors(sentences, 24).embed(sentences[:1500], n_tokens=16)
X *= 2 / np.sqrt(np.square(X[(X != 0).any(-1)]).sum(-1).mean())  # tokens of norm 2 on the average
y = labels[:1500]
train, test = slice(0, 1000), slice(1000, None)

# %%
# ``fit`` trains layers and readout by Adam, then solves the readout to a certificate.
model = UnfoldedTransformerClassifier(alpha=1e-3, n_layers=6, n_steps=100, lr=3e-3, batch_size=100, random_state=0)
model.fit(X[train], y[train])
gap = model.optimality_gap_
print(f"objective: Adam {gap.objective:.4f}, certified readout {gap.certificate.primal:.4f}, bound {gap.bound:.4f}")
print(f"accuracy: training {model.score(X[train], y[train]):.2f}, test {model.score(X[test], y[test]):.2f}")
trained = UnfoldedTransformerClassifier(**model.get_params() | {"refit_readout": False}).fit(X[train], y[train])
print(f"accuracy with the readout of Adam: test {trained.score(X[test], y[test]):.2f}")

# %%
# The layers are proximal gradient steps, so no sentence can raise the energy, seen in training or not.
report = model.descent_report(X[test])
print(report)

# %%
# On the left Adam ends above the certified optimum of the readout on the same layers. On the right each box holds the
# middle half of the unseen sentences, and the line in it is the median.
figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
history = model.history_
axes[0].plot(history.steps, history.objective, label="layers and readout by Adam")
axes[0].axhline(gap.certificate.primal, color="C1", label="certified readout, same layers")
axes[0].set(xlabel="step", ylabel="training objective", title="Training, and the certified optimum of the readout")
axes[0].legend()
course = report.course[1:]  # before the first layer tokens have negative entries, which the ReLU forbids
axes[1].boxplot((course / np.abs(course[:1])).T, showfliers=False)
axes[1].set(
    xlabel="layer", ylabel="energy over the size of that after layer 1", title="Energies of unseen sentences never rise"
)
plt.show()

"""
Layers that must each lower the loss
====================================

An unrolled transformer is trained so that every layer lowers the loss of the one before by a share. All layers then
have usable outputs, and a sample may leave early. In the convex case, one readout of fixed layers, the multipliers of
the training can be checked against the exact ones.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

from convexformer import DescentConstrainedClassifier
from convexformer.constrained import DescentConstraints, PrimalDual, exact_readout, exit_curve
from convexformer.datasets import load_documentation_sentences, make_word_vectors

# %%
# Which package does a sentence describe? Three ways to train the same network. A layer's constraint, its loss less
# ``1 - alpha`` times the loss before, should be at most 0. ``feasible_`` says whether all are, within a standard error.
sentences, labels = load_documentation_sentences(packages=["numpy", "sklearn"])
X = make_word_vectors(sentences, 24).embed(sentences[:1200], n_tokens=16)
y = labels[:1200]
names = {"constrained": "constrained", "last": "last layer alone", "sum": "deep supervision"}
models = {}
for objective, name in names.items():
    model = DescentConstrainedClassifier(
        alpha=0.03, n_layers=3, objective=objective, n_epochs=30, dual_lr=0.1, random_state=0
    )
    models[name] = model.fit(X[:800], y[:800])
    losses, report = ", ".join(f"{loss:.3f}" for loss in model.layer_losses_), model.report_
    worst = report.violations.argmax()
    largest = f"{report.violations[worst]:+.3f} ± {report.standard_errors[worst]:.3f}"
    print(f"{name}: losses of the layers {losses}; largest constraint {largest}; feasible: {model.feasible_}")

# %%
# The convex case: three fixed layers, one readout. Primal-dual training reaches the exact multiplier.
rng = np.random.default_rng(0)
first = rng.normal(size=(60, 3))
features, target = np.stack([first, 2 * first, 3 * first]), first @ [1.0, -1.0, 0.5] + 0.3 * rng.normal(size=60)
constraints, decay = DescentConstraints(alpha=0.1, c_ref=0.5), 0.2
exact = exact_readout(features, target, constraints, decay=decay)
print(f"exact: multipliers {np.round(exact.duals, 3)}, objective {exact.objective:.4f}, bound {exact.bound:.4f}")


def layer_losses(model, batch):
    """Half the squared error of every layer under the readout."""
    layers, targets = batch
    return 0.5 * (model(layers.transpose(0, 1))[..., 0] - targets).square()


readout = nn.Linear(3, 1, bias=False).double()
nn.init.zeros_(readout.weight)
plain = {"optimizer": "sgd", "dual_optimizer": "sgd", "lr": 0.02, "dual_lr": 0.2, "warmup_epochs": 0}
trainer = PrimalDual(readout, layer_losses, alpha=0.1, c_ref=0.5, weight_decay=decay, batch_size=60, **plain)
history = trainer.fit([torch.as_tensor(features).transpose(0, 1), torch.as_tensor(target)], n_epochs=600)
print(f"primal-dual: multipliers {np.round(trainer.duals_.numpy(), 3)}")

# %%
# The constrained network lowers the held-out loss in every layer. Trained by its last layer alone, the network has a
# loss near log 2 = 0.69 before that layer, which is the loss of a guess. With deep supervision, the sum of the losses
# of all layers, the last layer raises the loss, by about a standard error. On the right the multiplier of the first
# layer settles at its exact value.
figure, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
for name, model in models.items():
    layers = 1 + np.arange(3)
    index = np.searchsorted(model.classes_, y[800:])
    axes[0].plot(layers, model.layer_losses_, "o-", label=name)
    axes[1].plot(layers, exit_curve(model.layer_outputs(X[800:]), index), "o-", label=name)
axes[0].set(title="held-out loss of each layer", xlabel="layer", ylabel="loss")
axes[1].set(title="accuracy when all leave after a layer", xlabel="layers run", ylabel="accuracy on unseen sentences")
for axis in axes[:2]:
    axis.set_xticks([1, 2, 3])
axes[1].legend()
axes[2].plot(np.array(history.duals)[:, 0], label="primal-dual training")
axes[2].axhline(exact.duals[0], color="black", linestyle="--", label="exact")
axes[2].set(title="convex case: multiplier of the first layer", xlabel="epoch", ylabel="multiplier")
axes[2].legend()
plt.show()

"""
Heads and the tokens they use
=============================

A solution of the convex program *is* an attention network. This example recovers its heads, checks that they cost and
predict exactly what the program says, and compares the two forms of weight decay: the l1 form, in which every output
has heads of its own, and the standard one (nuclear), in which outputs share them.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

from convexformer import ConvexAttentionRegressor, Heads

# %%
# Six outputs that all read the same two directions, one at token 2 and one at token 5.
rng = np.random.default_rng(0)
X = rng.normal(size=(300, 8, 6))
mix = rng.normal(size=(2, 6))
y = np.stack([X[:, 2] @ rng.normal(size=6), X[:, 5] @ rng.normal(size=6)], axis=1) @ mix
y += 0.1 * rng.normal(size=y.shape)

# %%
# Each head attends to tokens with ``w1``, reads a direction ``w2`` and writes to the outputs with ``w3``.
models = {
    "l1 output decay": ConvexAttentionRegressor(alpha=0.1, penalty="group_l2", tol=1e-8).fit(X, y),
    "standard decay": ConvexAttentionRegressor(alpha=0.1, penalty="nuclear", tol=1e-8).fit(X, y),
}
for name, model in models.items():
    heads = model.heads_
    print(f"{name}: {len(heads)} heads on tokens {np.flatnonzero(model.token_norms_)}")
    print(f"  objective of the program {model.certificate_.primal:.12f}")
    print(f"  objective of the network {heads.objective(X, y):.12f}")

# %%
# Both find the right tokens. With standard decay two heads serve all six outputs. In the l1 form every output has heads
# of its own, at most one for each token.
figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
largest = max(np.abs(model.heads_.w3).max() for model in models.values())
for ax, (name, model) in zip(axes, models.items(), strict=True):
    image = ax.imshow(model.heads_.w3, cmap="RdBu", vmin=-largest, vmax=largest, aspect="auto")
    ax.set(xlabel="output", ylabel="head", title=f"{name}: output weights w3")
    ax.set_yticks(range(len(model.heads_)))
figure.colorbar(image, ax=axes, label="weight")

# %%
# The heads are an ordinary torch module, to be trained further or built into a larger model.
network = models["standard decay"].heads_.to_torch()
difference = network(torch.as_tensor(X)).detach().numpy() - models["standard decay"].predict(X)
print(f"largest difference between module and estimator: {np.abs(difference).max():.1e}")
again = Heads.from_torch(network, alpha=0.1, penalty="nuclear")
print(f"back from torch: {again}, objective {again.objective(X, y):.12f}")

# %%
# When one direction is useful at several tokens, heads that differ in their token alone merge into one head with soft
# attention, at the same cost. Tokens of width 1 (two-dimensional ``X``) are the plainest case: all positive weights of
# an output merge.
flat = ConvexAttentionRegressor(alpha=0.05, tol=1e-8).fit(X[:, :, 0], X[:, :, 0] @ np.arange(8.0))
print(f"{len(flat.heads_)} heads, merged: {len(flat.heads_.merge())}")
print("attention of the merged head:", flat.heads_.merge().w1.round(2))
plt.show()

"""
Which tokens does each position read?
=====================================

Targets can be sequences: a row of outputs for each position. Trained to a certified global optimum, the network says
which tokens each position reads. The example compares two classes of networks, heads that read for one row each and
heads with row-stochastic attention, and a network of the second class that is trained by Adam.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

from convexformer import ConvexSequenceRegressor, SequenceHeads, optimality_gap
from convexformer.nn import SequenceAttention, train
from convexformer.solvers import Status

# %%
# A teacher that mixes six tokens by one row-stochastic matrix: each position looks at itself and at the one before.
rng = np.random.default_rng(0)
n_tokens, n_features = 6, 3
mixing = 0.3 * np.eye(n_tokens) + 0.7 * np.eye(n_tokens, k=-1)
mixing[0] = np.eye(n_tokens)[0]
X = rng.normal(size=(200, n_tokens, n_features))
Y = (mixing @ X @ [1.0, -1.0, 0.5])[..., None] + 0.2 * rng.normal(size=(200, n_tokens, 1))

# %%
# Each class has its own convex program, so each has a certificate of its own. The maps are read off the heads.
models = {form: ConvexSequenceRegressor(alpha=0.1, form=form).fit(X, Y) for form in ("single_row", "stochastic")}
maps = {"teacher": mixing}
for form, model in models.items():
    assert model.status_ is Status.CONVERGED
    print(f"{form:>10}: {model.certificate_}, {len(model.heads_)} heads, R2 {model.score(X, Y):.3f}")
    maps[form] = model.attention_map_ / model.attention_map_.sum(axis=1, keepdims=True)

# %%
# A network of the second class, trained by Adam: how far is it from its global optimum? The bound is certified, and it
# is exact as the network has at least as many heads as the optimum needs.
network = SequenceAttention(n_tokens, n_features, n_heads=8)
train(network, *(torch.as_tensor(part, dtype=torch.float32) for part in (X, Y)), alpha=0.1, lr=0.03, n_steps=300)
print(optimality_gap(network, X.astype("float32"), Y, alpha=0.1))
maps["Adam"] = SequenceHeads.from_torch(network, alpha=0.1).attention_map()

# %%
# The maps side by side: rows are target positions, columns the tokens that they read. Each row sums to 1. Both
# certified networks read the tokens that the teacher reads. The network trained by Adam also reads others a little.
figure, axes = plt.subplots(1, len(maps), figsize=(3.2 * len(maps), 3.4), layout="constrained", sharey=True)
for ax, (name, values) in zip(axes, maps.items(), strict=True):
    image = ax.imshow(values, cmap="Blues", vmin=0, vmax=1)
    ax.set(title=name, xlabel="token read", ylabel="target position")
figure.colorbar(image, ax=list(axes), label="share of the attention")
plt.show()

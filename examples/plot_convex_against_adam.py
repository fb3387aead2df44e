"""
Convex against Adam on the same network
=======================================

One objective is minimised in two ways: by the certified convex solver, and by Adam on the heads from several random
starts. The bound is certified, so the distance of each trained network from the global optimum is known. Networks with
too few heads cannot reach the bound.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

from convexformer import ConvexAttention, ConvexAttentionRegressor
from convexformer.nn import train

# %%
# A problem whose solution needs several heads: three tokens, two features, two outputs, standard weight decay.
rng = np.random.default_rng(1)
X = rng.normal(size=(60, 3, 2))
y = np.stack([X[:, 0, 0] + X[:, 1, 1] - X[:, 2, 0], X[:, 0, 1] - X[:, 1, 0] + X[:, 2, 1]], axis=1)
alpha = 0.05
model = ConvexAttentionRegressor(alpha=alpha, penalty="nuclear", tol=1e-10).fit(X, y)
bound = model.certificate_.dual
print(f"certified optimum {bound:.8f} with {len(model.heads_)} heads")

# %%
# Train networks of 1, 2 and 12 heads from three random starts each. None gets below the bound; with enough heads the
# best comes close, with one head none can.
tokens, targets = torch.as_tensor(X), torch.as_tensor(y)
curves = {}
for n_heads in (1, 2, 12):
    for seed in range(3):
        network = ConvexAttention(3, 2, 2, n_heads=n_heads, seed=seed).double()
        history = train(network, tokens, targets, alpha=alpha, penalty="nuclear", lr=0.05, n_steps=1000)
        curves[n_heads, seed] = np.array(history.objective)
    best = min(curves[n_heads, seed][-1] for seed in range(3))
    print(f"{n_heads:2d} heads: best of 3 {best:.8f}, above the bound by {best - bound:.1e}")
    assert best >= bound

# %%
# The distance from the global optimum during training. A flat curve alone does not show how far a network is from the
# optimum.
figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
for (n_heads, seed), objective in curves.items():
    label = f"{n_heads} head{'s' if n_heads > 1 else ''}" if seed == 0 else None
    axes.semilogy(objective - bound, color=f"C{(1, 2, 12).index(n_heads)}", label=label, alpha=0.8)
axes.set(
    xlabel="Adam step", ylabel="objective - certified bound", title="How far trained networks are from their optimum"
)
axes.legend()
plt.show()

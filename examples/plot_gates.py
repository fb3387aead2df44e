"""
Gates
=====

Attention alone is linear in the tokens. Fixed gates, ``1[u1' X u2 >= 0]``, let the network treat samples differently,
and the program stays convex. Here the sign of one token decides how another is read, which no linear model can do.
"""

import matplotlib.pyplot as plt
import numpy as np

from convexformer import ConvexAttentionRegressor, Gates, GaussianGates, SparseGates

# %%
# The target is feature 0 of token 1, but negated whenever feature 0 of token 0 is negative: a product of signs.
rng = np.random.default_rng(0)
X = rng.normal(size=(800, 4, 2))
y = np.sign(X[:, 0, 0]) * X[:, 1, 0]
train, test = slice(0, 500), slice(500, None)

# %%
# A network without gates learns nothing here. The certificate shows that the class of networks is the reason, not the
# training. Random gates help where there are enough of them. Sparse gates read a single coordinate each, so few of them
# suffice.
scores = {}
counts = (4, 16, 64)
linear = ConvexAttentionRegressor(alpha=0.005).fit(X[train], y[train])
print(f"no gates: R2 {linear.score(X[test], y[test]):.2f}, relative gap {linear.certificate_.relative_gap:.0e}")
kinds = {"gaussian": GaussianGates, "sparse": lambda n_gates: SparseGates(n_gates, n_nonzero=1)}
for kind, source in kinds.items():
    for n_gates in counts:
        model = ConvexAttentionRegressor(
            alpha=0.005, activation="gated_relu", gates=source(n_gates), random_state=0, tol=1e-3
        ).fit(X[train], y[train])
        scores[kind, n_gates] = model.score(X[test], y[test])
        gap = model.certificate_.relative_gap
        print(f"{kind}, {n_gates} gates: R2 {scores[kind, n_gates]:.2f}, relative gap {gap:.0e}")

# %%
# Gates can also be given. The one that opens on a positive token 0 and its opposite are all that is needed.
u1 = [[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]
u2 = [[1.0, 0], [1.0, 0]]
given = ConvexAttentionRegressor(alpha=0.005, activation="gated_relu", gates=Gates(u1, u2)).fit(X[train], y[train])
print(f"two given gates: R2 {given.score(X[test], y[test]):.2f} with {len(given.heads_)} heads")
for gate, token, w2, w3 in zip(
    given.heads_.gate_index, given.heads_.w1.argmax(1), given.heads_.w2, given.heads_.w3, strict=True
):
    print(f"  gate {gate}, token {token}: reads {np.round(w2 * w3, 2)}")

# %%
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for kind in kinds:
    axes.plot(counts, [scores[kind, n_gates] for n_gates in counts], "o-", label=f"{kind} gates")
axes.axhline(linear.score(X[test], y[test]), color="gray", linestyle=":", label="no gates")
axes.axhline(given.score(X[test], y[test]), color="black", linestyle="--", label="the two right gates, given")
axes.set(xscale="log", xlabel="number of gates", ylabel="R2 on unseen data")
axes.set_xticks(counts, counts)
axes.minorticks_off()
axes.set(title="Reading a token according to the sign of another", ylim=(-0.1, 1.05))
axes.legend()
plt.show()

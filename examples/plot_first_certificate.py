"""
A first certificate
===================

Training by gradients ends with a loss curve that no longer falls, and without a bound on what is left. A fit of this
package ends with a certificate: a lower bound that the objective of *no* network of the class falls below, however it
is trained. This example fits attention heads to data whose coefficients are known, and shows the two numbers of the
certificate.
"""

import matplotlib.pyplot as plt
import numpy as np

from convexformer import ConvexAttentionRegressor
from convexformer.plot import plot_path

# %%
# Sequences of 12 tokens with 5 features each. The target depends on two positions only: token 3 and token 8.
rng = np.random.default_rng(0)
X = rng.normal(size=(200, 12, 5))
y = X[:, 3] @ [1.0, -2.0, 0.5, 0.0, 0.0] + X[:, 8] @ [0.0, 0.0, 1.0, 1.0, -1.0] + 0.1 * rng.normal(size=200)

# %%
# ``alpha`` weighs the decay of the heads against the mean loss. The certificate has a *primal* value, the training
# objective of the network that was found, and a *dual* value, the bound. The global optimum lies between the two.
model = ConvexAttentionRegressor(alpha=0.1, tol=1e-10).fit(X, y)
certificate = model.certificate_
print(f"objective of this network : {certificate.primal:.12f}")
print(f"no network gets below     : {certificate.dual:.12f}")
print(f"so at most this much off  : {certificate.gap:.1e}")

# %%
# A certificate does not rely on the solver: ``certify`` reads a point and the program, and nothing else. A poor point,
# here that of a single gradient step, gets a large gap.
poor = ConvexAttentionRegressor(alpha=0.1, solver="fista", callback=lambda progress: True).fit(X, y)
print(f"relative gap after one step: {poor.certificate_.relative_gap:.2f}")

# %%
# The history of a solver has both numbers. The objective approaches the optimum from above and the bound from below.
# The default solver computes few certificates. FISTA computes certificates at regular intervals and reaches the same
# optimum.
history = ConvexAttentionRegressor(alpha=0.1, tol=1e-10, solver="fista").fit(X, y).history_
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
left.plot(history.iteration, history.primal, "o-", label="objective (primal)")
left.plot(history.iteration, history.dual, "o-", label="certified bound (dual)")
left.set(xlabel="iteration", ylabel="value", title="Objective and certified bound", ylim=(0, None))
left.legend()
right.semilogy(history.iteration, np.maximum(history.relative_gap, 1e-16), "o-")
right.set(xlabel="iteration", ylabel="relative gap", title="Relative gap")
for ax in (left, right):
    ax.set_xticks(history.iteration)

# %%
# Only the two positions that matter carry any weight; all others are exactly zero.
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.bar(np.arange(12), model.token_norms_)
axes.set(xlabel="token position", ylabel="penalty carried", title="Tokens used by the certified network")

# %%
# A path shows which tokens enter as ``alpha`` falls. The dashed line is the ``alpha`` above.
plot_path(ConvexAttentionRegressor().path(X, y), alpha=model.alpha, title="Penalty carried by each token")
plt.show()

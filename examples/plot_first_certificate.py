"""
A first certificate
===================

Training a network usually ends with a loss curve that has gone flat, and with hope. Here it ends with a proof: a lower
bound that *no* network of the class can beat, however it is trained. This example fits attention heads to data whose
true answer is known, and looks at the two numbers that make the proof.
"""

import matplotlib.pyplot as plt
import numpy as np

from convexformer import ConvexAttentionRegressor

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
# The proof does not take the solver's word: ``certify`` needs nothing but a point and the program. Hand it a wrong
# point and it says so.
spoiled = ConvexAttentionRegressor(alpha=0.1, max_iter=1, callback=lambda progress: True).fit(X, y)
print(f"relative gap after one step: {spoiled.certificate_.relative_gap:.2f}")

# %%
# The solver's history shows both numbers closing in on the optimum from above and below. The default solver certifies
# as rarely as it can; FISTA does so at regular intervals from the first step on, and comes to the same optimum.
history = ConvexAttentionRegressor(alpha=0.1, tol=1e-10, solver="fista").fit(X, y).history_
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
left.plot(history.iteration, history.primal, "o-", label="objective (primal)")
left.plot(history.iteration, history.dual, "o-", label="certified bound (dual)")
left.set(xlabel="iteration", ylabel="value", title="The optimum is squeezed", ylim=(0, None))
left.legend()
right.semilogy(history.iteration, np.maximum(history.relative_gap, 1e-16), "o-")
right.set(xlabel="iteration", ylabel="relative gap", title="The proof gets sharper")
for ax in (left, right):
    ax.set_xticks(history.iteration)

# %%
# Only the two positions that matter carry any weight; all others are exactly zero.
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.bar(np.arange(12), model.token_norms_)
axes.set(xlabel="token position", ylabel="penalty carried", title="Tokens used by the certified network")
plt.show()

"""
Modular division, learnt by a convex program
============================================

Half of the table of a / b modulo a prime is for training, the other half for testing. Networks trained by gradients fit
the training rows first and answer the others much later, which is known as grokking. Each network of this example is
the certified global optimum of its class, so its errors are due to the class and not to the training. The example shows
what a class needs to divide, and what the heads of the solution compute.
"""

import matplotlib.pyplot as plt
import numpy as np

from convexformer import ConvexAttentionClassifier, FourierGates, GaussianGates
from convexformer.datasets import make_modular_arithmetic

# %%
# Division is subtraction of discrete logarithms, log(a / b) = log a - log b modulo p - 1. With ``encoding="fourier"`` a
# residue is a point on five circles, cos and sin of (2 pi k log a) / (p - 1) for five frequencies k, and a mark for 0.
p = 31
data = make_modular_arithmetic(p, "/", encoding="fourier", random_state=0)
print(f"{data}, frequencies {data.frequencies}; guessing is right in {1 / p:.1%}")


def fit(alpha, data=data, **options):
    """The certified network with standard weight decay, unless the options say otherwise, without a bias."""
    model = ConvexAttentionClassifier(alpha, **{"penalty": "nuclear", "fit_intercept": False, "tol": 1e-3, **options})
    return model.fit(data.X_train, data.y_train)


def accuracy(model, data=data):
    return model.score(data.X_test, data.y_test)


# %%
# **Attention alone cannot divide.** It is additive in the tokens: the score of a quotient y is f_y(a) + g_y(b). But in
# the whole table each quotient comes once with every b and, 0 aside, once with every a, so neither operand by itself
# says anything about y. What is learnt is which rows happened to be shown, in either encoding, and the certificate
# proves that no network of the class has a lower objective: it is the class that fails, not its training.
for encoding in ("one_hot", "fourier"):
    encoded = make_modular_arithmetic(p, "/", encoding=encoding, random_state=0)
    linear = fit(1e-3, encoded)
    shown, unseen = linear.score(encoded.X_train, encoded.y_train), accuracy(linear, encoded)
    gap = linear.certificate_.relative_gap
    print(f"no gates, {encoding}: accuracy {unseen:.1%} (rows shown: {shown:.1%}), relative gap {gap:.0e}")

# %%
# **Gates multiply.** A gate on a lets a head read b for some a only, and the first harmonic of the gate's square wave
# times a wave of b holds cos(k (log a - log b)). For this the gate should look at one frequency. Three gates per
# frequency and operand, at phases a third of a circle apart, are enough here; two, a quarter apart, make the cosine and
# the sine, but with more of the square waves' other harmonics. Gaussian gates mix the frequencies, and many more are
# needed.
counts = (10, 20, 30, 60)
kinds = {"one frequency each": FourierGates, "gaussian": GaussianGates}
by_count = {kind: [] for kind in kinds}
for kind, source in kinds.items():
    for n_gates in counts:
        model = fit(6e-4, activation="gated_relu", gates=source(n_gates), random_state=0)
        by_count[kind].append(accuracy(model))
        print(f"{n_gates} gates, {kind}: accuracy {by_count[kind][-1]:.1%}")

# %%
# **Outputs must share features.** Standard weight decay (nuclear) lets one head write to all quotients. With the l1
# decay of the outputs (group_l2) every quotient has heads of its own, learnt from its fifteen rows or so: these are
# fitted, and little is learnt about the others. Less decay hardly helps.
penalties = {"nuclear": "standard decay (nuclear)", "group_l2": "l1 output decay (group_l2)"}
by_alpha = {penalty: [] for penalty in penalties}
for penalty in penalties:
    for alpha in (2e-2, 1e-2, 4e-3):
        options = {"activation": "gated_relu", "gates": FourierGates(30), "random_state": 0, "tol": 1e-2}
        model = fit(alpha, penalty=penalty, **options)
        by_alpha[penalty].append((alpha / model.alpha_max_, accuracy(model)))
        print(
            f"{penalty}, {by_alpha[penalty][-1][0]:.2f} alpha_max: accuracy {accuracy(model):.1%}, rows shown "
            f"{model.score(data.X_train, data.y_train):.1%}, {len(model.heads_)} heads"
        )

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
for kind, values in by_count.items():
    left.plot(counts, values, "o-", label=kind)
left.axhline(accuracy(linear), color="gray", linestyle=":", label="no gates")
left.set(xscale="log", xlabel="number of gates", ylabel="accuracy on unseen rows", title="Gates, standard decay")
left.set_xticks(counts, counts)
left.minorticks_off()
for penalty, points in by_alpha.items():
    right.plot(*zip(*points, strict=True), "o-", label=penalties[penalty])
right.set(xscale="log", xlabel="alpha / alpha_max", ylim=(0, 1.05), title="Decay, 30 gates of one frequency each")
right.set_xticks((0.1, 0.2, 0.5), (0.1, 0.2, 0.5))
right.minorticks_off()
for ax in (left, right):
    ax.legend(loc="center right")

# %%
# **The solution.** Every row of the unseen half is right, and there is a proof that the network is the optimum.
model = fit(5e-4, activation="gated_relu", gates=FourierGates(30), random_state=0, tol=1e-4)
heads = model.heads_
print(f"accuracy {accuracy(model):.1%} with {heads}")
print(model.certificate_)
print(f"objective of the network, from its heads: {heads.objective(data.X_train, data.y_train):.12f}")

# %%
# **What the heads do.** In the order of discrete logarithms, 1, g, g^2 and so on, what a head reads from a residue and
# what it writes to a quotient are waves. ``share`` is how much of such a wave has the frequency of the head's gate.
residues = [pow(data.primitive_root, exponent, p) for exponent in range(p - 1)]
tokens = np.zeros((p, data.X_train.shape[2]))
tokens[data.operands_train.ravel()] = data.X_train.reshape(-1, tokens.shape[1])
read, written = heads.w2 @ tokens[residues].T, heads.w3[:, residues]
gate_token = abs(heads.gates.u1).argmax(1)[heads.gate_index]
gate_frequency = np.array(data.frequencies)[abs(heads.gates.u2).argmax(1) // 2][heads.gate_index]


def share(waves):
    power = abs(np.fft.rfft(waves)) ** 2
    return power[np.arange(len(waves)), gate_frequency] / power.sum(1)


dividing = heads.w1.argmax(1) != gate_token
print(f"{dividing.sum()} heads read the operand that their gate does not look at:")
print(f"  what they read is {share(read)[dividing].min():.0%} or more of the gate's frequency")
print(f"  what they write {share(written)[dividing].min():.0%} or more")
zero = heads.w3[~dividing, 0] ** 2 / (heads.w3[~dividing] ** 2).sum(1)
print(f"the other {len(zero)} write to the quotient 0 ({zero.min():.0%} or more): they see whether a is 0")

# %%
# Gates on a of two frequencies, and the two heads behind each: nearly a cosine and a sine, in what they read and in
# what they write. Over the three phases of the gate they add up to about cos(k (log a - log b - log y)), which is
# largest at y = a / b.
figure, axes = plt.subplots(2, 3, figsize=(11, 5.5), layout="constrained", sharex=True, sharey="col")
for row, frequency in zip(axes, (1, 2), strict=True):
    chosen = heads.gate_index[dividing & (gate_frequency == frequency) & (gate_token == 0)][0]
    behind = dividing & (heads.gate_index == chosen)
    row[0].step(range(p - 1), tokens[residues] @ heads.gates.u2[chosen] >= 0, where="mid", color="black")
    row[1].plot(read[behind].T, ".-")
    row[2].plot(written[behind].T, ".-")
    row[0].set(ylabel=f"frequency {frequency}", yticks=(0, 1), yticklabels=("closed", "open"))
    row[1].set(ylabel="w2 on b")
    row[2].set(ylabel="w3")
titles = {"a": "gate on a", "b": "read from b", "y": "written to y"}
for column, (name, title) in zip(axes.T, titles.items(), strict=True):
    column[0].set(title=title)
    column[1].set(xlabel=f"log {name}, to the base {data.primitive_root}")
plt.show()

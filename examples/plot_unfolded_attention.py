"""
From an energy to attention
===========================

A concave function ``rho`` of half the squared distance of two tokens makes an energy. A step that lowers the energy
moves every token towards a weighted mean of the tokens, and the weights are ``rho'``: that is attention. For
``-exp(-z)`` it is softmax attention with key weights.
"""

import matplotlib.pyplot as plt
import torch

from convexformer.unfolded import EnergyAttention, InteractionEnergy, get_rho

# %%
# The slope of ``rho`` at half the squared distance is the weight that two tokens give to each other. Near tokens weigh
# more, since a concave function has a falling slope.
names = {"exp": "$-e^{-z}$ (softmax)", "log1": r"$\log(z + 1)$", "log2": r"$\log(z + 2)$"}
z, distance = torch.linspace(0, 4, 101), torch.linspace(0, 3, 101)

# %%
# Three groups of tokens in the plane. Each step of attention lowers the energy of its own ``rho``.
generator = torch.Generator().manual_seed(0)
centres = torch.tensor([[0.0, 0.0], [2.5, 0.3], [1.0, 2.2]])
tokens = torch.cat([centre + 0.45 * torch.randn(8, 2, generator=generator) for centre in centres]).double()
paths, energies = {}, {}
for name in names:
    attention = EnergyAttention(name, step=0.5)
    states = [tokens]
    for _ in range(12):
        states.append(attention(states[-1]))
    paths[name] = torch.stack(states)
    energies[name] = attention.energy().value(paths[name])
    falls = bool((energies[name].diff() <= 0).all())
    print(f"{name}: energy {energies[name][0]:.2f} to {energies[name][-1]:.2f}, falls in every step: {falls}")

# %%
# The key weights :math:`e^{-|y_v|^2/2}` are part of the step. Softmax attention without them draws all tokens towards
# the longest one, and can raise the energy.
energy = InteractionEnergy("exp")
four = torch.tensor([[-0.5], [0.0], [0.5], [6.0]], dtype=torch.float64)
right = EnergyAttention("exp")(four)
wrong = torch.softmax(four @ four.T, -1) @ four
print(f"energy {energy.value(four):.3f}, with key weights {energy.value(right):.3f}, without {energy.value(wrong):.3f}")

# %%
figure, axes = plt.subplots(1, 4, figsize=(15, 3.8), layout="constrained")
for name, label in names.items():
    axes[0].plot(z, get_rho(name).value(z), label=label)
    axes[1].plot(distance, get_rho(name).derivative(distance**2 / 2), label=label)
    axes[3].plot(energies[name] - energies[name][-1], label=label)
axes[0].set(title="1. the function", xlabel="half the squared distance $z$", ylabel=r"$\rho(z)$")
axes[1].set(title="2. its slope is the attention", xlabel="distance of two tokens", ylabel=r"weight $\rho'(z)$")
for i in range(len(tokens)):
    axes[2].plot(*paths["exp"][:, i].T, ".-", color=f"C{i // 8}", markersize=3, linewidth=0.8)
axes[2].scatter(*tokens.T, s=24, c=[f"C{i // 8}" for i in range(len(tokens))])
axes[2].set(title="3. softmax attention moves the tokens", xlabel="first feature", ylabel="second feature")
axes[3].set(title="4. every step lowers the energy", xlabel="step", ylabel="energy above the last")
for axis in axes[[0, 1, 3]]:
    axis.legend()
plt.show()

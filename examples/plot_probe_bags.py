"""
A certified probe of bags
=========================

In multiple-instance learning a sample is a bag of instances, such as the tiles of a slide, and a bag is positive when
it holds at least one instance of some kind. The mean of a bag of 30 hardly shows one of them. Weightings that depend on
the content of instances do.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import LogisticRegression

from convexformer import ConvexProbeClassifierCV
from convexformer.preprocessing import MeanPooling, QueryPooling, TokenGates
from convexformer.probes import Generation

# %%
# Bags of 5 to 30 instances of width 8. Positive bags hold one or two of the kind. Bags are a list of arrays, whose
# lengths differ.
rng = np.random.default_rng(0)
kind = np.array([1.5, -1.5, 1.5, 0, 0, 0, 0, 0])


def make_bags(n_bags):
    """Bags, their labels, and which of their instances are of the kind."""
    labels = np.tile(["negative", "positive"], n_bags // 2)
    bags = [rng.normal(size=(rng.integers(5, 31), 8)) for _ in labels]
    marks = [np.zeros(len(bag), dtype=bool) for bag in bags]
    for bag, mark, label in zip(bags, marks, labels, strict=True):
        if label == "positive":
            mark[rng.choice(len(bag), rng.integers(1, 3), replace=False)] = True
            bag[mark] = kind + 0.3 * rng.normal(size=(mark.sum(), 8))
    return bags, labels, marks


bags, y, _ = make_bags(400)
bags_test, y_test, marks_test = make_bags(1000)

# %%
# Means and maxima of the features, with logistic regression.
scores = {}
for name, pool in {"mean": np.mean, "maximum": np.max}.items():
    pooled, pooled_test = (np.array([pool(bag, axis=0) for bag in some]) for some in (bags, bags_test))
    scores[f"{name} and logistic regression"] = LogisticRegression().fit(pooled, y).score(pooled_test, y_test)

# %%
# Certified probes with different dictionaries, each with the mean as a part. ``Generation`` adds the weightings whose
# dual constraint the solution violates most. The mean alone shows that the gain is that of the dictionary.
options = {"alphas": 6, "eps": 0.02, "cv": 3, "tol": 1e-3, "random_state": 0}
models = {
    "mean alone": ConvexProbeClassifierCV(dictionary=MeanPooling(), **options),
    "mean and 128 gates": ConvexProbeClassifierCV(dictionary=[MeanPooling(), TokenGates(128)], **options),
    "mean and 128 queries": ConvexProbeClassifierCV(dictionary=[MeanPooling(), QueryPooling(128)], **options),
    "mean and 32 generated": ConvexProbeClassifierCV(dictionary=MeanPooling(), generate=Generation(32), **options),
}
for name, model in models.items():
    scores[name] = model.fit(bags, y).score(bags_test, y_test)
    used = np.count_nonzero(model.weighting_norms_)
    print(f"{name}: {model.certificate_}, {used} weightings used")
for name, accuracy in scores.items():
    print(f"{name}: accuracy {accuracy:.3f}")

# %%
# The explanation says which instances make a bag positive. It was fitted to labels of bags alone. On the left, all
# instances of the unseen positive bags; on the right, one bag.
explanation = models["mean and 128 queries"].explain(bags_test)
positive = np.flatnonzero(y_test == "positive")
values = np.concatenate([explanation.of(bag) for bag in positive])
marks = np.concatenate([marks_test[bag] for bag in positive])
highest = np.mean([marks_test[bag][explanation.of(bag).argmax()] for bag in positive])
print(f"the instance that adds most is of the kind in {highest:.0%} of the positive bags")
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
edges = np.linspace(values.min(), values.max(), 40)
for mark, name in ((False, "other instances"), (True, "instances of the kind")):
    left.hist(values[marks == mark], edges, density=True, alpha=0.6, label=name)
left.set(xlabel="contribution to the score", ylabel="density", title="Instances of unseen positive bags")
left.legend()
bag = positive[0]
colors = np.where(marks_test[bag], "tab:orange", "tab:blue")
right.bar(np.arange(len(colors)), explanation.of(bag), color=colors)
right.axhline(0, color="black", linewidth=0.5)
right.set(xlabel="instance", ylabel="contribution to the score", title="One bag, the kind in orange")
plt.show()

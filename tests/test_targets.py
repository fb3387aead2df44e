"""Targets: codes of classes and labels, and what outputs say of them."""

import re

import numpy as np
import pytest
import torch
from scipy.special import expit

from convexformer.targets import ClassTargets, MultilabelTargets, RealTargets, class_targets
from convexformer_solvers import get_loss

rng = np.random.default_rng(0)
CASES = [(loss, count) for loss in ("logistic", "squared_hinge", "softmax") for count in (2, 3, 4)]


def targets_of(loss, count):
    return ClassTargets(np.array(["a", "b", "c", "d"][:count]), get_loss(loss))


@pytest.mark.parametrize(("loss", "count"), CASES)
def test_codes_of_labels_are_outputs_that_predict_them(loss, count):
    targets = targets_of(loss, count)
    y = rng.choice(targets.classes, 30)
    encoded = torch.as_tensor(targets.encode(y))
    targets.loss.check_target(encoded)
    assert encoded.shape == (30, 1 if targets.single else count)
    np.testing.assert_array_equal(targets.labels(encoded), y)
    np.testing.assert_array_equal(targets.encode(y[:, None]), encoded)
    assert targets.single == (count == 2 and loss != "softmax")


@pytest.mark.parametrize(("loss", "count"), CASES)
def test_ties_go_to_the_first_class(loss, count):
    targets = targets_of(loss, count)
    assert targets.labels(torch.zeros(3, 1 if targets.single else count)).tolist() == ["a"] * 3


@pytest.mark.parametrize(("loss", "count"), [case for case in CASES if case[0] != "squared_hinge"])
def test_probabilities_sum_to_one_and_are_largest_at_the_label(loss, count):
    targets = targets_of(loss, count)
    outputs = torch.as_tensor(rng.normal(size=(50, 1 if targets.single else count)))
    found, scores = targets.probabilities(outputs), targets.scores(outputs)
    torch.testing.assert_close(found.sum(1), torch.ones(50, dtype=torch.float64))
    np.testing.assert_array_equal(targets.classes[found.argmax(1)], targets.labels(outputs))
    expected = (found[:, 1:] / found[:, :1]).log() if count == 2 else outputs  # the odds are those of the score
    torch.testing.assert_close(scores, expected)


def test_small_probabilities_have_their_digits():
    margins = np.array([[-40.0], [40.0]])
    found = targets_of("logistic", 2).probabilities(torch.as_tensor(margins)).numpy()
    np.testing.assert_allclose(found, expit(np.hstack([-margins, margins])), rtol=1e-14)


def test_labels_of_several_are_predicted_by_their_codes_and_ties_are_none():
    targets = MultilabelTargets(3, get_loss("logistic"))
    y = rng.integers(0, 2, size=(20, 3))
    encoded = targets.encode(y)
    np.testing.assert_array_equal(targets.labels(torch.as_tensor(encoded)), y)
    assert not targets.labels(torch.zeros(2, 3)).any()
    targets.check_part(encoded)
    encoded[:, 1] = encoded[0, 1]
    with pytest.raises(ValueError, match=r"one of them alone in the columns \[1\]"):
        targets.check_part(encoded)


def test_single_values_are_no_targets():
    for targets in (RealTargets(), targets_of("logistic", 2)):
        with pytest.raises(ValueError, match=r"got (the single value )?1$"):
            targets.encode(1)


@pytest.mark.parametrize("class_weight", ["balanced", {0: 1.0, 1: 2.0, 2: 4.0}])
def test_weights_of_classes_are_those_of_the_samples_that_count(class_weight):
    y, weight = np.arange(30) % 3, rng.uniform(0.5, 2, 30)
    weight[y == 1] = 0.0
    found = class_targets(y, get_loss("softmax"), class_weight, weight)
    counted = class_targets(y[weight > 0], get_loss("softmax"), class_weight, weight[weight > 0])
    assert found.class_weight.max() < 1
    np.testing.assert_allclose(
        found.class_weight[[0, 2]] / found.class_weight[0], counted.class_weight / counted.class_weight[0]
    )
    assert (found.class_weight[1] == 0) == (class_weight == "balanced")


@pytest.mark.parametrize("labels", [[False, True], ["no", "yes"], [0, 1]])
def test_classes_without_a_weight_are_named_as_the_labels_are(labels):
    y = np.array(labels * 3)
    with pytest.raises(ValueError, match=re.escape(f"cannot be used: the classes {labels} are not in class_weight")):
        class_targets(y, get_loss("softmax"), {"other": 2.0}, None)
    found = class_targets(y, get_loss("softmax"), {labels[1]: 2.0}, None).class_weight
    assert found[1] == 2 * found[0]


def test_text_of_numbers_may_have_the_weights_of_these_numbers():
    found = class_targets(np.array(["0", "1"] * 3), get_loss("softmax"), {0: 1.0, 1: 2.0}, None).class_weight
    assert found[1] == 2 * found[0]

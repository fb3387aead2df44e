"""Early exit compared with a loop over samples and layers."""

import numpy as np
import pytest
import torch

from convexformer.constrained.early_exit import early_exit, exit_curve, exit_tradeoff

LAYERS, N, CLASSES = 4, 30, 3
THRESHOLDS = (0.0, 0.5, 0.7, 0.9, 0.99, 1.0)


def problem(seed=0):
    rng = np.random.default_rng(seed)
    scale = np.linspace(0.5, 3, LAYERS)[:, None, None]
    return scale * rng.normal(size=(LAYERS, N, CLASSES)), rng.integers(CLASSES, size=N)


def loop(logits, threshold):
    predictions, used = [], []
    for sample in range(logits.shape[1]):
        for layer in range(len(logits)):
            weights = np.exp(logits[layer, sample])
            if weights.max() / weights.sum() >= threshold or layer == len(logits) - 1:
                predictions.append(logits[layer, sample].argmax())
                used.append(layer + 1)
                break
    return np.array(predictions), np.array(used)


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_first_sure_layer(threshold):
    logits, _ = problem()
    for found, wanted in zip(early_exit(logits, threshold), loop(logits, threshold), strict=True):
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, wanted)


def test_ends_of_the_thresholds():
    logits, _ = problem()
    assert (early_exit(logits, 0)[1] == 1).all()
    assert (early_exit(logits, 1)[1] == LAYERS).all()
    sharp = torch.tensor([[[30.0, 0.0]], [[0.0, 30.0]]])  # softmax in float32 is 1
    assert early_exit(sharp, 1.0)[1].tolist() == [2]


def test_infinite_logits_are_sure():
    infinite = np.array([[[np.inf, 0.0], [0.0, -np.inf], [np.inf, np.inf]], np.zeros((3, 2))])
    for threshold, used in ((0.0, [1, 1, 1]), (0.5, [1, 1, 1]), (1.0, [1, 1, 2])):
        assert early_exit(infinite, threshold)[1].tolist() == used


def test_logits_that_are_all_minus_infinity_are_as_sure_as_equal_ones():
    without = [[[-np.inf, -np.inf]], [[0.0, 0.0]]]
    assert [early_exit(without, threshold)[1].item() for threshold in (0.0, 0.5, 0.6)] == [1, 1, 2]


def test_curve_and_tradeoff():
    logits, y = problem()
    np.testing.assert_allclose(exit_curve(logits, y), (logits.argmax(-1) == y).mean(1))
    tradeoff = exit_tradeoff(logits, y, THRESHOLDS)
    for threshold, layers, accuracy in zip(THRESHOLDS, *tradeoff, strict=True):
        predictions, used = loop(logits, threshold)
        assert layers == pytest.approx(used.mean())
        assert accuracy == pytest.approx((predictions == y).mean())
    curve = exit_curve(logits, y)
    assert [tradeoff.accuracy[0], tradeoff.accuracy[-1]] == [curve[0], curve[-1]]
    assert (np.diff(tradeoff.layers) >= 0).all()


def test_tensors_stay_tensors():
    logits, y = problem()
    tensor = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
    results = (exit_curve(tensor, y), *early_exit(tensor, 0.7), *exit_tradeoff(tensor, torch.tensor(y), [0.7]))
    arrays = (exit_curve(logits, y), *early_exit(logits, 0.7), *exit_tradeoff(logits, y, np.array([0.7])))
    for result, array in zip(results, arrays, strict=True):
        assert torch.is_tensor(result)
        assert not result.requires_grad
        np.testing.assert_allclose(result.numpy(), array)
    assert results[1].dtype == results[2].dtype == torch.int64


def test_shares_and_means_are_in_double():
    tradeoff = exit_tradeoff(torch.tensor(problem()[0]).float(), problem()[1], [0.7])
    assert tradeoff.layers.dtype == tradeoff.accuracy.dtype == torch.float64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda z, y: exit_curve(z[0], y), "layer_outputs must have shape"),
        (lambda z, y: exit_curve(z[:, :, :1], y), "two or more classes"),
        (lambda z, y: exit_curve(z[:, :0], y[:0]), r"layer_outputs must have shape .* got \(4, 0, 3\)"),
        (lambda z, y: exit_curve(z[:0], y), r"layer_outputs must have shape .* got \(0, 30, 3\)"),
        (lambda z, y: exit_curve(z, torch.tensor(y + 0j)), "y must hold classes as integers, got torch.complex128"),
        (lambda z, y: exit_curve(z * np.nan, y), "layer_outputs must not hold NaN"),
        (lambda z, y: exit_curve(np.where(z == z.max(), np.nan, z), y), "layer_outputs must not hold NaN"),
        (lambda z, y: exit_curve(z, y[1:]), "y must have shape"),
        (lambda z, y: exit_curve(z, y.astype(float)), "y must hold classes as integers"),
        (lambda z, y: exit_curve(z, y.astype(str)), r"got labels; np.searchsorted\(model.classes_, y\) makes"),
        (lambda z, y: early_exit(z, 1.1), "threshold must be between 0 and 1, got 1.1"),
        (lambda z, y: early_exit(z, "high"), "threshold must be between 0 and 1"),
        (lambda z, y: exit_tradeoff(z, y, 0.5), "thresholds must have shape"),
        (lambda z, y: exit_tradeoff(z, y, []), "thresholds must have shape"),
        (lambda z, y: exit_tradeoff(z, y, ["high"]), "thresholds must hold numbers"),
        (lambda z, y: exit_curve(z, np.ma.array(y, mask=True)), "^y "),
        (lambda z, y: exit_tradeoff(z, y, [0.5, -0.1]), "thresholds must be between 0 and 1, got -0.1"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(*problem())


@pytest.mark.parametrize("classes", [[0, 3], [-1, 0]])
def test_classes_that_there_are_not_are_refused(classes):
    with pytest.raises(ValueError, match="y must hold classes from 0 to 2"):
        exit_curve(torch.zeros(2, 2, 3), classes)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint64", "bool"])
def test_classes_may_be_unsigned(dtype):
    assert exit_curve([[[0.0, 1.0], [0.0, 1.0]]], np.array([0, 1], dtype)).tolist() == [0.5]

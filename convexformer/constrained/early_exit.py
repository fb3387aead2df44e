"""Early exit: what a network predicts when each sample leaves at the first layer that is sure of it ([K])."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from convexformer.validation import as_tensor
from convexformer_solvers.validation import is_real


class ExitTradeoff(NamedTuple):
    """What early exit costs and saves at each of several thresholds.

    Attributes
    ----------
    layers : ndarray or Tensor of shape (n_thresholds,)
        Layers used by a sample, on average.
    accuracy : ndarray or Tensor of shape (n_thresholds,)
        Share of samples whose prediction is right.

    Examples
    --------
    The least threshold at which 90% are right, and what it saves of two layers:

    >>> outputs = [[[0.1, 0.0], [3.0, 0.0]], [[0.0, 2.0], [0.0, 2.0]]]
    >>> thresholds = np.array([0.0, 0.9, 1.0])
    >>> tradeoff = exit_tradeoff(outputs, [1, 0], thresholds)
    >>> good = tradeoff.accuracy >= 0.9
    >>> float(thresholds[good][0]), float(tradeoff.layers[good][0])
    (0.9, 1.5)
    """

    layers: Any
    accuracy: Any


def exit_curve(layer_outputs: Tensor | ArrayLike, y: Tensor | ArrayLike) -> Any:
    """Accuracy of each layer, were it the last.

    Parameters
    ----------
    layer_outputs : Tensor or array-like of shape (n_layers, N, n_classes)
        Logits of every layer.
    y : Tensor or array-like of int of shape (N,)
        Classes, from 0.

    Returns
    -------
    ndarray or Tensor of shape (n_layers,)
        In float64; a tensor on the device of the logits where these are one.

    Raises
    ------
    ValueError
        If an argument is not as described.

    Examples
    --------
    >>> exit_curve([[[2.0, 1.0], [3.0, 0.0]], [[2.0, 1.0], [0.0, 1.0]]], [0, 1])
    array([0.5, 1. ])
    """
    logits = _logits(layer_outputs)
    accuracy = (logits.argmax(-1) == _classes(y, logits)).double().mean(1)
    return _like(accuracy, layer_outputs)


def early_exit(layer_outputs: Tensor | ArrayLike, threshold: float) -> tuple[Any, Any]:
    r"""Predictions of the first layer that is sure enough, and how many layers that took.

    Sample ``i`` leaves after layer

    .. math:: \min \{ l : \max_k \mathrm{softmax}(\Phi_l(x_i))_k \ge \text{threshold} \},

    or after the last where there is none.

    Parameters
    ----------
    layer_outputs : Tensor or array-like of shape (n_layers, N, n_classes)
        Logits of every layer.
    threshold : float
        Confidence from 0, at which all samples leave after the first layer, to 1, at which most use all layers.

    Returns
    -------
    predictions : ndarray or Tensor of int of shape (N,)
        Classes, from 0.
    layers_used : ndarray or Tensor of int of shape (N,)
        From 1 to ``n_layers``.

    Raises
    ------
    ValueError
        If an argument is not as described.

    Notes
    -----
    Confidences are computed in float64, so that those of float32 logits do not round up to 1.

    Examples
    --------
    >>> outputs = [[[0.1, 0.0], [3.0, 0.0]], [[0.0, 2.0], [0.0, 2.0]]]
    >>> early_exit(outputs, 0.9)
    (array([1, 0]), array([2, 1]))
    """
    logits = _logits(layer_outputs)
    predictions, used = _exits(logits, _confidences(logits), _check_threshold("threshold", threshold))
    return _like(predictions, layer_outputs), _like(used, layer_outputs)


def exit_tradeoff(
    layer_outputs: Tensor | ArrayLike, y: Tensor | ArrayLike, thresholds: Tensor | ArrayLike
) -> ExitTradeoff:
    """Mean number of layers used and accuracy of early exit, at several thresholds.

    Parameters
    ----------
    layer_outputs : Tensor or array-like of shape (n_layers, N, n_classes)
        Logits of every layer.
    y : Tensor or array-like of int of shape (N,)
        Classes, from 0.
    thresholds : Tensor or array-like of shape (n_thresholds,)
        As of ``early_exit``, in any order.

    Returns
    -------
    ExitTradeoff
        In float64; tensors on the device of the logits where these are one.

    Raises
    ------
    ValueError
        If an argument is not as described.

    Examples
    --------
    >>> outputs = [[[0.1, 0.0], [3.0, 0.0]], [[0.0, 2.0], [0.0, 2.0]]]
    >>> layers, accuracy = exit_tradeoff(outputs, [1, 0], [0.0, 0.9, 1.0])
    >>> layers, accuracy
    (array([1. , 1.5, 2. ]), array([0.5, 1. , 0.5]))
    """
    logits = _logits(layer_outputs)
    classes, confidences = _classes(y, logits), _confidences(logits)
    levels = as_tensor(thresholds, name="thresholds")
    if levels.ndim != 1 or len(levels) == 0:
        raise ValueError(f"thresholds must have shape (n_thresholds,), got {tuple(levels.shape)}")
    exits = [_exits(logits, confidences, _check_threshold("thresholds", level)) for level in levels.tolist()]
    layers = torch.stack([used.double().mean() for _, used in exits])
    accuracy = torch.stack([(predictions == classes).double().mean() for predictions, _ in exits])
    return ExitTradeoff(_like(layers, layer_outputs), _like(accuracy, layer_outputs))


def _exits(logits: Tensor, confidences: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    sure = confidences >= threshold
    sure[-1] = True
    first = sure.to(torch.uint8).argmax(0)
    predictions = logits.argmax(-1).gather(0, first[None])[0]
    return predictions, first + 1


def _confidences(logits: Tensor) -> Tensor:
    # Logits less the largest are no number where that is infinite and they are equal to it.
    below = (logits.double() - logits.amax(-1, keepdim=True)).nan_to_num(0.0, neginf=-torch.inf)
    return torch.softmax(below, -1).amax(-1)


def _logits(layer_outputs: Any) -> Tensor:
    logits = as_tensor(layer_outputs, name="layer_outputs").detach()
    if logits.ndim != 3 or logits.shape[-1] < 2 or 0 in logits.shape:
        raise ValueError(
            f"layer_outputs must have shape (n_layers, n_samples, n_classes) with two or more classes, "
            f"got {tuple(logits.shape)}"
        )
    if bool(logits.isnan().any()):
        raise ValueError("layer_outputs must not hold NaN")
    return logits


def _classes(y: Any, logits: Tensor) -> Tensor:
    if not torch.is_tensor(y) and np.asarray(y).dtype.kind in "OSU":
        raise ValueError(
            "y must hold classes as integers from 0, got labels; np.searchsorted(model.classes_, y) makes them of the "
            "labels of an estimator"
        )
    classes = as_tensor(y, logits.device, name="y")
    if classes.shape != logits.shape[1:2]:
        raise ValueError(f"y must have shape ({logits.shape[1]},), a class per sample, got {tuple(classes.shape)}")
    if classes.is_floating_point() or classes.is_complex():
        raise ValueError(f"y must hold classes as integers, got {classes.dtype}")
    classes = classes.long()  # torch compares no unsigned integers of more than 8 bits
    first, last = (int(bound) for bound in torch.aminmax(classes))
    if first < 0 or last >= logits.shape[2]:
        raise ValueError(f"y must hold classes from 0 to {logits.shape[2] - 1}, got {first} to {last}")
    return classes


def _check_threshold(name: str, threshold: Any) -> float:
    if not (is_real(threshold) and 0 <= threshold <= 1):
        raise ValueError(f"{name} must be between 0 and 1, got {threshold!r}")
    return float(threshold)


def _like(result: Tensor, given: Any) -> Tensor | NDArray[Any]:
    """A tensor where the logits were one, else an array."""
    return result if torch.is_tensor(given) else result.numpy(force=True)

"""Activations of the teacher as standardised data of one random split."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convexformer.datasets import Activations

_TRAIN, _VALIDATION = 0.6, 0.2


class Part(NamedTuple):
    """Samples and their targets.

    Attributes
    ----------
    tokens : ndarray of shape (N, n, d)
        Inputs, float32.
    y : ndarray of shape (N, c) or (N, n, c)
        Targets at one position or at all, float64.
    """

    tokens: NDArray[np.float32]
    y: NDArray[np.float64]

    def tensors(self, device: str | None) -> tuple[Tensor, Tensor]:
        """Both in float32 on a device."""
        return torch.as_tensor(self.tokens, device=device), torch.as_tensor(self.y, dtype=torch.float32, device=device)


class Split(NamedTuple):
    """Training, validation and test samples, standardised by the training ones.

    Attributes
    ----------
    train, validation, test : Part
        The samples; no sentence is in two of them.
    train_index : ndarray of int
        Positions of the training samples in the data.
    variance_kept : float
        Share of the variance of the training targets in the directions kept.
    """

    train: Part
    validation: Part
    test: Part
    train_index: NDArray[np.int64]
    variance_kept: float


def split_activations(data: Activations, *, position: int | None, n_outputs: int | None, seed: int) -> Split:
    """Split sentences at random and standardise: features by one number, targets centred, projected and scaled by one.

    Parameters
    ----------
    data : Activations
        Of the teacher.
    position : int or None
        Token whose output is the target; None: all of them, each centred by itself.
    n_outputs : int or None
        Principal directions of the training targets that are kept; None: targets stay in their own coordinates.
    seed : int
        Draws the split.

    Returns
    -------
    Split

    Raises
    ------
    ValueError
        If there are fewer outputs than are to be kept, or the targets of a part do not vary.
    """
    order = np.random.default_rng(seed).permutation(len(data))
    ends = [round(_TRAIN * len(data)), round((_TRAIN + _VALIDATION) * len(data))]
    rows = np.split(order, ends)
    outputs = (data.outputs if position is None else data.outputs[:, position]).astype(np.float64)
    for part, index in zip(("training", "validation", "test"), rows, strict=True):
        if not np.ptp(outputs[index], axis=0).any():
            raise ValueError(
                f"the teacher's outputs are the same for all {part} sentences of seed {seed}; pass more or other "
                "sentences"
            )
    targets = outputs - outputs[rows[0]].mean(axis=0)
    targets, kept = _project(targets, rows[0], n_outputs)
    spread = np.sqrt(np.mean(targets[rows[0]] ** 2))
    tokens = data.inputs / np.sqrt(np.mean(data.inputs[rows[0]].astype(np.float64) ** 2)).astype(np.float32)
    train, validation, test = (Part(tokens[index], targets[index] / spread) for index in rows)
    return Split(train, validation, test, rows[0], kept)


def _project(
    targets: NDArray[np.float64], train: NDArray[np.int64], n_outputs: int | None
) -> tuple[NDArray[np.float64], float]:
    """Coordinates along the first principal directions of the training rows, and their share of the variance."""
    width = targets.shape[-1]
    if n_outputs is None:
        return targets, 1.0
    if n_outputs > width:
        raise ValueError(f"n_outputs={n_outputs} is more than the {width} outputs of the teacher")
    flat = targets[train].reshape(-1, width)
    variances, directions = np.linalg.eigh(flat.T @ flat)  # increasing
    share = float(variances[-n_outputs:].sum() / variances.sum())
    return targets @ directions[:, ::-1][:, :n_outputs], share


def r2_and_error(predictions: NDArray, targets: NDArray) -> tuple[float, float]:
    """Variance-weighted R2, and squared error relative to that of the mean of the training targets, which is zero."""
    squared = float(np.sum((predictions - targets) ** 2))
    about_mean = float(np.sum((targets - targets.mean(axis=0)) ** 2))
    return 1 - squared / about_mean, squared / float(np.sum(targets**2))

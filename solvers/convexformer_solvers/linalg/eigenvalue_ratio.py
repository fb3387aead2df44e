"""Correlation of a program's features, as the largest over the mean eigenvalue of a Gram matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from convexformer_solvers.linear_maps.base import LinearMap, even_rows, mirrored
from convexformer_solvers.program import Program

from .ridge import SMALL_SIDE


def some_samples_tell(program: Program) -> bool:
    """Whether decisions may go by some samples: not on few features, where repeated samples are to equal weights."""
    return math.prod(program.map.feature_shape) > SMALL_SIDE


def sample_kernel(linear_map: LinearMap, at_most: int) -> Tensor:
    """``A A'`` of so many samples at even distances, or of all where they are fewer; float64."""
    some = linear_map.rows(even_rows(linear_map.n_samples, at_most, linear_map.device))
    return mirrored(some.full_kernel(torch.float64))


def eigenvalue_ratio(program: Program) -> float:
    r"""Largest eigenvalue over the mean one, in units of what that is for independent features of one size.

    The unit is :math:`(1 + \sqrt{\min(n, p) / \max(n, p)})^2` for ``n`` samples and ``p`` features. The ratio of 64
    samples is about 1 for independent features, 1.5 and more where gates share them, and 10 to 40 for tokens of text;
    infinite where it overflows, NaN where it is zero or the rows of the map are no samples.
    """
    return program.remembered("eigenvalue_ratio", lambda: _eigenvalue_ratio(program))


def _eigenvalue_ratio(program: Program) -> float:
    linear_map = program.map
    if not linear_map.rows_are_samples:
        return math.nan
    kernel = sample_kernel(linear_map, 64)
    if program.fit_intercept:
        kernel = kernel - kernel.mean(0) - (kernel.mean(0) - kernel.mean())[:, None]
    if not bool(torch.isfinite(kernel).all()):
        return math.inf
    fewer, more = sorted((len(kernel), math.prod(linear_map.feature_shape)))
    mean = float(kernel.trace()) / fewer
    largest = float(torch.linalg.eigvalsh(kernel)[-1])
    return largest / ((1 + math.sqrt(fewer / more)) ** 2 * mean) if mean > 0 else math.nan

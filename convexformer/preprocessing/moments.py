"""Means and squares over samples, which are those of several parts of them joined."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Weighted means of values over samples, and sums of squares about them, in float64.

    Attributes
    ----------
    total : float
        Sum of the weights.
    mean : Tensor
        Of each value.
    square : Tensor
        Weighted sums of the squared distances from the mean.
    n_values : int
        Values of positive weight.

    Examples
    --------
    >>> parts = [Moments.of(torch.tensor([[1.0], [3.0]])), Moments.of(torch.tensor([[5.0]]))]
    >>> Moments.joined(parts)
    Moments(total=3.0, mean=tensor([3.], dtype=torch.float64), square=tensor([8.], dtype=torch.float64), n_values=3)
    """

    total: float
    mean: Tensor
    square: Tensor
    n_values: int

    @classmethod
    def of(cls, values: Tensor, weight: Tensor | None = None) -> Moments:
        """Those of values ``(N, ...)`` with weights ``(N,)``, by default ones; what has none does not count."""
        values = values.double()
        weight = values.new_ones(len(values)) if weight is None else weight.to(values)
        if not bool((weight > 0).all()):  # squares of what does not count may be infinite
            values, weight = values[weight > 0], weight[weight > 0]
        total = float(weight.sum())
        if total == 0.0:
            return cls(0.0, torch.zeros(()), torch.zeros(()), 0)
        first = values[0]  # from which means of equal values have no rounding
        mean = first + torch.tensordot(weight, values - first, 1) / total
        return cls(total, mean, torch.tensordot(weight, (values - mean).square(), 1), len(weight))

    @classmethod
    def joined(cls, parts: Iterable[Moments]) -> Moments:
        """Those of all parts together."""
        return reduce(_both, parts, cls(0.0, torch.zeros(()), torch.zeros(()), 0))

    @property
    def scale(self) -> Tensor:
        """Standard deviations; 1 where all values are equal but for rounding, as in scikit-learn."""
        variance, eps = self.square / self.total, torch.finfo(torch.float64).eps
        if not bool(torch.isfinite(variance).all()):
            raise ValueError("squares of X are too large for torch.float64; scale the features to about one")
        return torch.where(variance > (self.n_values * eps * self.mean).square(), variance, 1.0).sqrt()


def _both(first: Moments, second: Moments) -> Moments:
    """Chan's update of means and squares."""
    if 0.0 in (first.total, second.total):
        return first if second.total == 0.0 else second
    total, step = first.total + second.total, second.mean - first.mean
    mean = first.mean + step * (second.total / total)
    square = first.square + second.square + step.square() * (first.total * second.total / total)
    return Moments(total, mean, square, first.n_values + second.n_values)

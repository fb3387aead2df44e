"""Huber's loss without kinks in its slope."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Loss


@dataclass(frozen=True)
class SmoothedHuber(Loss):
    r"""Huber's loss with the slope :math:`\frac12 \sqrt{(r + \delta)^2 + w^2} - \frac12 \sqrt{(r - \delta)^2 + w^2}`.

    Its slope is of the size of Huber's at most, and it lies below that loss by at most :math:`\delta w`. It has a
    curvature everywhere, also where Huber's loss is linear.

    Parameters
    ----------
    delta : float
        That of the Huber loss.
    width : float
        Distance from a kink at which the slope is still off, in units of ``y``.

    Examples
    --------
    >>> SmoothedHuber(1.0, 1e-9).value(torch.tensor([[0.5], [3.0]], dtype=torch.float64), torch.zeros(2, 1))
    tensor([0.1250, 2.5000], dtype=torch.float64)
    """

    of_residual = smooth_curvature = True
    delta: float
    width: float

    @property
    def smoothness(self) -> float:
        return self.delta / math.hypot(self.delta, self.width)

    # Differences of roots and of logarithms are written as quotients: they would cancel far from the kinks.

    def value(self, pred: Tensor, y: Tensor) -> Tensor:
        residual, above, below = self._roots(pred, y)
        total, delta, width = above + below, self.delta, self.width
        beyond = residual >= delta
        ratio = 2 * delta * (1 + 2 * residual / total) / torch.where(beyond, residual - delta + below, total)
        within = torch.asinh((residual + delta) / width) + torch.asinh((delta - residual) / width)
        logarithm = torch.where(beyond, torch.log1p(ratio), within)
        value = 0.25 * (delta * (4 * residual.square() / total + total) + width**2 * logarithm)
        return (value - 0.5 * (delta * math.hypot(delta, width) + width**2 * math.asinh(delta / width))).sum(1)

    def gradient(self, pred: Tensor, y: Tensor) -> Tensor:
        _, above, below = self._roots(pred, y)
        return 2 * self.delta * (pred - y) / (above + below)

    def hessian_product(self, pred: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        residual, above, below = self._roots(pred, y)
        left, right = (residual + self.delta) / above, (residual - self.delta) / below
        shares = 4 * self.delta * (residual / above / below) * (self.width / above) * (self.width / below)
        return 0.5 * direction * torch.where(residual > self.delta, shares / (left + right), left - right)

    def unsmoothed(self, pred: Tensor, y: Tensor) -> Tensor:
        return y + self.gradient(pred, y)

    def _roots(self, pred: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sizes of the residuals, and the two roots, the one of sums first."""
        residual = (pred - y).abs()
        width = torch.full_like(residual, self.width)
        return residual, torch.hypot(residual + self.delta, width), torch.hypot(residual - self.delta, width)

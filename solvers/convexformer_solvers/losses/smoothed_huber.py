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
    """

    of_residual = smooth_curvature = True
    delta: float  # that of the Huber loss
    width: float  # distance from a kink at which the slope is still off, in units of ``y``

    smoothness = property(lambda self: self.delta / math.hypot(self.delta, self.width))

    # Differences of squares, of roots and of logarithms are written as quotients: they would cancel far from the kinks.

    def value(self, pred: Tensor, y: Tensor) -> Tensor:
        delta, width = self.delta, self.width
        residual, above, below = self._roots(pred, y)
        slope, both = 2 * delta * residual / (above + below), above * below
        excess = residual.square() + width**2 - delta**2
        beyond = math.sqrt(2) * delta * width / (both + excess).sqrt()
        root = torch.where(excess > 0, beyond, (0.5 * (both - excess)).sqrt())
        return (slope * residual - self._conjugate(slope, root)).sum(1)

    def gradient(self, pred: Tensor, y: Tensor) -> Tensor:
        _, above, below = self._roots(pred, y)
        return (2 * self.delta * (pred - y) / (above + below)).clamp(-self.delta, self.delta)

    def hessian_product(self, pred: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        residual, above, below = self._roots(pred, y)
        left, right = (residual + self.delta) / above, (residual - self.delta) / below
        shares = 4 * self.delta * (residual / above / below) * (self.width / above) * (self.width / below)
        return 0.5 * direction * torch.where(residual > self.delta, shares / (left + right), left - right)

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        size = u.abs()
        root = ((self.delta - size) * (self.delta + size)).sqrt()
        return torch.where(size <= self.delta, self._conjugate(size, root) + u * y, math.inf).sum(1)

    def _conjugate(self, slope: Tensor, root: Tensor) -> Tensor:
        """That of targets of zero at sizes of slopes, with the roots of what their squares leave of delta's."""
        delta, width = self.delta, self.width
        tall, slanted, share = math.hypot(delta, width), torch.hypot(root, torch.full_like(root, width)), slope / delta
        of_roots = share * slope * (tall + root * (root / tall)) / (1 + (root / delta) * (slanted / tall))
        return 0.5 * (of_roots + width**2 * torch.asinh(share * slope / (slanted + (root / delta) * tall)))

    def unsmoothed(self, pred: Tensor, y: Tensor) -> Tensor:
        return y + self.gradient(pred, y)

    def _roots(self, pred: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sizes of the residuals, and the two roots, the one of sums first."""
        residual = (pred - y).abs()
        width = torch.full_like(residual, self.width)
        return residual, torch.hypot(residual + self.delta, width), torch.hypot(residual - self.delta, width)

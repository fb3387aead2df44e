"""Best constants to add to predictions, by damped Newton steps on a mean loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .base import Loss

_STEPS = 100
# Slope over the mean size of its terms, and curvature over its largest, beneath which they are rounding, in eps.
_ROUNDING = 8.0
_DECREASE = 0.25
_SHORTEST_STEP = 1e-8
# Differences in an intercept from which on exponentials of the predictions are taken anew.
_FARTHEST = 20.0
# Slope over that of the step before up to which the Hessian of that serves again.
_WORTH_KEEPING = 0.1


class LossAtIntercepts:
    """A weighted mean loss as a function of an intercept ``b`` that is added to the predictions of all samples.

    Parameters
    ----------
    loss : Loss
        The loss.
    pred : Tensor of shape (N, c)
        Predictions.
    y : Tensor of shape (N, c)
        Targets.
    weight : Tensor of shape (N,)
        Weights, summing to 1.
    """

    def __init__(self, loss: Loss, pred: Tensor, y: Tensor, weight: Tensor) -> None:
        self.loss, self.pred, self.y, self.weight = loss, pred, y, weight

    @property
    def largest(self) -> float:
        """Weighted mean of each sample's largest prediction."""
        return float(self.weight @ self.pred.abs().amax(1))

    def value_of_zero(self) -> float:
        """Mean loss of predictions that are zero."""
        return float(self.weight @ self.loss.value(torch.zeros_like(self.pred), self.y))

    def value(self, b: Tensor) -> float:
        """Mean loss."""
        return float((self.weight * self.loss.value(self.pred + b, self.y)).sum())

    def slope(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient in ``b`` and, of each entry, the sum of the sizes of its terms; both of shape ``(c,)``."""
        per_sample = self.loss.gradient(self.pred + b, self.y)
        return self.weight @ per_sample, self.weight @ per_sample.abs()

    def direction(self, b: Tensor, slope: Tensor) -> Tensor:
        """Newton direction; zero along directions in which the loss is flat."""
        hessian = self.loss.mean_hessian(self.pred + b, self.y, self.weight)
        if not self.loss.output_separable:
            return _pseudoinverse(hessian, min(self.loss.smoothness, 1.0))(-slope)
        curvature = hessian.diagonal()
        return torch.where(curvature > 0, -slope / curvature, 0.0)


class SoftmaxAtIntercepts(LossAtIntercepts):
    """The same for the softmax cross-entropy, whose exponentials of the predictions serve all intercepts.

    With them at hand a value is a product of an ``(N, c)`` matrix with a vector, a gradient another, and a Hessian one
    product of ``c`` columns.
    """

    _origin: Tensor  # intercept that the exponentials contain: the first one asked for, until others are far from it

    def __init__(self, loss: Loss, pred: Tensor, y: Tensor, weight: Tensor) -> None:
        super().__init__(loss, pred, y, weight)
        self._mean_target = weight @ y
        self._mean_product = float(weight @ (y * pred).sum(1))
        self._at: Tensor | None = None  # intercept of the sums that are known
        self._size = math.inf  # of the last slope
        self._inverse: Callable[[Tensor], Tensor] | None = None  # of the Hessian at an earlier intercept

    def value_of_zero(self) -> float:
        return math.log(self.pred.shape[1])

    def _take_exponentials(self, origin: Tensor) -> None:
        """Exponentials of the predictions with an intercept, over the largest of each sample."""
        shifted = self.pred + origin
        self._origin, self._largest_pred = origin, shifted.amax(1)
        self._exponential = shifted.sub_(self._largest_pred[:, None]).exp_()

    def _sums(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of the exponentials, and their sums over the classes, at an intercept."""
        if b is not self._at:
            if self._at is None or not float((b - self._origin).abs().max()) <= _FARTHEST:
                self._take_exponentials(b)
            factor = (b - self._origin).exp()
            self._at, self._known = b, (factor, self._exponential @ factor)
        return self._known

    def value(self, b: Tensor) -> float:
        _, total = self._sums(b)
        return float(self.weight @ (self._largest_pred + total.log()) - self._mean_target @ b) - self._mean_product

    def slope(self, b: Tensor) -> tuple[Tensor, Tensor]:
        factor, total = self._sums(b)
        mean = factor * ((self.weight / total) @ self._exponential)
        return mean - self._mean_target, mean + self._mean_target

    def direction(self, b: Tensor, slope: Tensor) -> Tensor:
        size = float(slope.abs().max())
        if self._inverse is None or not size <= _WORTH_KEEPING * self._size:
            factor, total = self._sums(b)
            scaled = (self.weight.sqrt() / total)[:, None] * self._exponential
            hessian = -(factor[:, None] * factor) * (scaled.T @ scaled)
            hessian.diagonal().add_(slope + self._mean_target)
            self._inverse = _pseudoinverse(hessian, min(self.loss.smoothness, 1.0))
        self._size = size
        return self._inverse(-slope)


def best_intercept(at: LossAtIntercepts, start: Tensor | None = None) -> Tensor:
    """Minimiser of a mean loss over intercepts, shape ``(c,)``.

    Parameters
    ----------
    at : LossAtIntercepts
        The mean loss.
    start : Tensor of shape (c,), optional
        A first guess that saves steps.

    Returns
    -------
    Tensor
    """
    rounding = _ROUNDING * torch.finfo(at.pred.dtype).eps
    # Far from the predictions a loss is flat or steep, and Newton steps from there are useless.
    guesses = [torch.zeros_like(at.pred[0]) if start is None else start, -(at.weight @ at.pred)]
    value, b = min(((at.value(guess), guess) for guess in guesses), key=lambda pair: pair[0])
    negligible = torch.finfo(at.pred.dtype).eps ** 2 * at.value_of_zero()
    largest = at.largest
    slope, size = at.slope(b)
    for _ in range(_STEPS):
        # An output whose best constant is at infinity (an absent class) is done once its slope is beneath notice.
        done = bool((slope.abs() <= rounding * size.clamp(min=rounding * float(size.max()))).all())
        if done or value <= negligible:
            break
        direction = at.direction(b, slope)
        decrease = -float(slope @ direction)
        step, candidate = 1.0, b + direction
        new = at.value(candidate)
        # A small loss may be a difference of terms as large as the predictions: their rounding hides its decrease.
        visible = decrease > rounding * (abs(value) + largest + float(b.abs().max()))
        while visible and step > _SHORTEST_STEP and not new <= value - _DECREASE * step * decrease:
            step *= 0.5
            candidate = b + step * direction
            new = at.value(candidate)
        if visible and not new < value:
            break
        new_slope, size = at.slope(candidate)
        # Once rounding hides the decrease of the value, only the slope tells whether a step is worth it.
        if not visible and not float(new_slope.abs().max()) < 0.5 * float(slope.abs().max()):
            break
        b, value, slope = candidate, new, new_slope
    return b


def _pseudoinverse(hessian: Tensor, scale: float) -> Callable[[Tensor], Tensor]:
    """Inverse of a positive semidefinite matrix, zero in directions that are flat but for rounding."""
    if not bool(torch.isfinite(hessian).all()):  # that of predictions beyond the range of their precision
        return torch.zeros_like
    curvature, basis = torch.linalg.eigh(hessian)
    flat = _ROUNDING * torch.finfo(hessian.dtype).eps * max(float(curvature[-1]), scale)
    inverse = torch.where(curvature > flat, 1 / curvature.clamp(min=flat), 0.0)
    return lambda right: basis @ (inverse * (basis.T @ right))

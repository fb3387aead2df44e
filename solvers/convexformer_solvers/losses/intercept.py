"""Optimal intercepts of a mean loss by Newton's method with step halving (Boyd and Vandenberghe 2004, section 9.5)."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .base import Loss


class LossAtIntercepts:
    """A weighted mean loss as a function of an intercept ``b``, shape (c,), added to the predictions of all samples."""

    def __init__(self, loss: Loss, pred: Tensor, y: Tensor, weight: Tensor) -> None:
        self.loss, self.pred, self.y, self.weight = loss, pred, y, weight
        self._size = 0.0  # of the last slope
        self._hessian: Tensor  # the last one that was inverted
        self._inverse: Tensor

    @cached_property
    def reach(self) -> float:
        """Length of a step at most: twice the largest residual, or 1 if more where the loss couples the outputs."""
        return max(2 * float((self.pred - self.y).abs().max()), 0.0 if self.loss.output_separable else 1.0)

    @cached_property
    def unit(self) -> float:
        """Size of the slopes at predictions that are zero."""
        return float((self.weight @ self.loss.gradient(torch.zeros_like(self.pred), self.y).abs()).max())

    def value(self, b: Tensor) -> float:
        """Mean loss."""
        return float(self.weight @ self.loss.value(self.pred + b, self.y))

    def slope(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient in ``b`` and, of each entry, the sum of the sizes of its terms; both of shape ``(c,)``."""
        per_sample = self.loss.gradient(self.pred + b, self.y)
        return self.weight @ per_sample, self.weight @ per_sample.abs()

    def hessian(self, b: Tensor, slope: Tensor) -> Tensor:
        """Hessian in ``b``, shape ``(c, c)``, where the gradient is `slope`."""
        return self.loss.mean_hessian(self.pred + b, self.y, self.weight)

    def direction(self, b: Tensor, slope: Tensor) -> Tensor:
        """Newton direction, bounded where the loss is linear; zero where it is flat but for rounding."""
        if self.loss.output_separable:
            step = -slope / self.hessian(b, slope).diagonal()
            return step.nan_to_num(0.0, self.reach, -self.reach).clamp(-self.reach, self.reach)
        size = float(slope.abs().max())
        if not 100 * size <= self._size:  # as long as each step gains two digits the last Hessian serves
            self._hessian = self.hessian(b, slope)
            self._inverse = _pseudoinverse(self._hessian, min(self.loss.smoothness, 1.0))
        self._size = size
        if self.loss.shift_invariant:  # rounding over rounding would be a long step of all outputs alike
            step = -(self._inverse @ (slope - slope.mean()))
        else:
            step = -(self._inverse @ slope)
            linear = slope + self._hessian @ step  # the part in directions without curvature
            if float(linear.abs().max()) > math.sqrt(torch.finfo(b.dtype).eps) * size:
                step = step - linear * (self.reach / linear.abs().max())
        longest = float(step.abs().max())
        return step * min(1.0, self.reach / longest) if longest > 1 else step


class SoftmaxAtIntercepts(LossAtIntercepts):
    """The same for the softmax cross-entropy, whose exponentials of the predictions serve all intercepts."""

    unit = 1.0

    def __init__(self, loss: Loss, pred: Tensor, y: Tensor, weight: Tensor) -> None:
        super().__init__(loss, pred, y, weight)
        self.mean_target = weight @ y
        self._mean_product = float(weight @ (y * pred).sum(1))
        # A quarter of the range of exponentials: beyond, those of other classes could vanish beside one.
        self._farthest = math.log(torch.finfo(pred.dtype).max) / 4
        self._at: Tensor | None = None  # intercept of the sums that are known
        self._origin = torch.full_like(pred[0], math.inf)  # intercept that the exponentials contain

    def _sums(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of the exponentials, and their sums over the classes, at an intercept."""
        if b is not self._at:
            if not float((b - self._origin).abs().max()) <= self._farthest:
                shifted = self.pred + b
                self._origin, self._largest = b, shifted.amax(1)
                self._exponential = shifted.sub_(self._largest[:, None]).exp_()
            factor = (b - self._origin).exp()
            self._at, self._known = b, (factor, self._exponential @ factor)
        return self._known

    def value(self, b: Tensor) -> float:
        total = self._sums(b)[1]
        return float(self.weight @ (self._largest + total.log()) - self.mean_target @ b) - self._mean_product

    def slope(self, b: Tensor) -> tuple[Tensor, Tensor]:
        factor, total = self._sums(b)
        mean = factor * ((self.weight / total) @ self._exponential)
        return mean - self.mean_target, mean + self.mean_target

    def hessian(self, b: Tensor, slope: Tensor) -> Tensor:
        factor, total = self._sums(b)
        scaled = (self.weight.sqrt() / total)[:, None] * self._exponential
        result = -(factor[:, None] * factor) * (scaled.T @ scaled)
        result.diagonal().add_(slope + self.mean_target)
        return result


def best_intercept(at: LossAtIntercepts, start: Tensor | None = None) -> Tensor:
    """Minimiser of a mean loss over intercepts, shape ``(c,)``; a good `start` saves steps."""
    b, slope = _newton(at, start)
    negligible = math.sqrt(torch.finfo(b.dtype).eps) * at.unit
    if at.loss.output_separable or not (float(slope.abs().max()) > negligible and at.reach < math.inf):
        return b
    # Predictions far apart leave no curvature where there is a slope; the minimiser of nearer ones leads to theirs.
    b = torch.zeros_like(b)
    for shrinking in reversed(range(math.ceil(math.log2(at.reach)))):
        b = _newton(type(at)(at.loss, at.pred / 2.0**shrinking, at.y, at.weight), 2 * b)[0]
    return b


def _newton(at: LossAtIntercepts, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where Newton's method ends, as a rule at the minimiser, and the slope there."""
    eps = torch.finfo(at.pred.dtype).eps
    # Far from the predictions a loss is flat or steep, and Newton steps from there are useless.
    guesses = [at.pred.new_zeros(at.pred.shape[1]) if start is None else start, -(at.weight @ at.pred)]
    b = min(guesses, key=at.value)
    slope, size = at.slope(b)
    negligible, largest = 8 * eps * at.unit, float(at.weight @ at.pred.abs().amax(1))
    # A slope that falls by the factor e each step, as that of an absent class, is negligible after two thirds of these.
    for _ in range(math.ceil(-3 * math.log(eps))):
        if bool((slope.abs() <= 8 * eps * size.clamp(min=negligible)).all()):
            break
        step, near = at.direction(b, slope), math.sqrt(eps) * (largest + float(b.abs().max()))
        for _ in range(math.ceil(-math.log2(eps))):
            candidate, unit = b + step, step / step.abs().max()
            new_slope, new_size = at.slope(candidate)
            decrease, rise = -slope * unit, new_slope * unit
            if not at.loss.output_separable:
                decrease, rise = decrease.sum(), rise.sum()
            halved = float(new_slope.abs().max()) < 0.5 * float(slope.abs().max())
            if not float(decrease.sum()) > 0 or not (halved or float(step.abs().max()) > near):  # all but rounding
                return b, slope
            too_far = ~(rise <= 0.5 * decrease)  # along the step the slope has risen beyond half of its size
            if not bool(too_far.any()):
                break
            step = torch.where(too_far, 0.5 * step, step)
        else:
            return b, slope
        b, slope, size = candidate, new_slope, new_size
    return b, slope


def _pseudoinverse(hessian: Tensor, scale: float) -> Tensor:
    """Inverse of a positive semidefinite matrix, zero in directions that are flat but for rounding."""
    if not bool(torch.isfinite(hessian).all()):  # that of predictions beyond the range of their precision
        return torch.zeros_like(hessian)
    curvature, basis = torch.linalg.eigh(hessian)
    flat = 8 * torch.finfo(hessian.dtype).eps * max(float(curvature[-1]), scale)
    return (basis * torch.where(curvature > flat, 1 / curvature.clamp(min=flat), 0.0)) @ basis.T

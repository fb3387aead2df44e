"""Losses of numbers: squared, Huber, Poisson."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import xlogy
from torch import Tensor

from convexformer_solvers.rounding import EPS
from convexformer_solvers.validation import is_real

from .base import Loss
from .smoothed_huber import SmoothedHuber


@dataclass(frozen=True)
class Squared(Loss):
    r"""Squared loss :math:`\frac12 \sum_l (f_l - y_l)^2`, as in scikit-learn's ``Lasso``.

    Examples
    --------
    >>> Squared().value(torch.tensor([[3.0]]), torch.tensor([[1.0]]))
    tensor([2.])
    """

    quadratic = of_residual = smooth_curvature = True
    smoothness = 1.0

    def value(self, pred: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (pred - y).square().sum(1)

    def gradient(self, pred: Tensor, y: Tensor) -> Tensor:
        return pred - y

    def hessian_product(self, pred: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        return direction

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        return (0.5 * u.square() + u * y).sum(1)

    def expression(self, pred: Any, y: Any, weight: Any) -> Any:
        import cvxpy as cp

        return 0.5 * cp.sum_squares(cp.multiply(np.sqrt(weight)[:, None], pred - y))

    def best_dual_scale(self, theta: Tensor, y: Tensor, weight: Tensor, limit: Tensor) -> Tensor:
        # The bound is a concave parabola in the scale: take its vertex, cut to the feasible range.
        along, square = weight @ (theta * y), weight @ theta.square()
        if limit.ndim == 0:
            along, square = along.sum(), square.sum()
        return torch.minimum(torch.where(square > 0, along / square, 0.0).clamp(min=0.0), limit)

    def best_intercept(self, pred: Tensor, y: Tensor, weight: Tensor, start: Tensor | None = None) -> Tensor:
        return weight @ (y - pred)


@dataclass(frozen=True)
class Huber(Loss):
    r"""Huber loss: :math:`\frac12 r^2` for :math:`|r| \le \delta`, else :math:`\delta |r| - \frac12 \delta^2`.

    Parameters
    ----------
    delta : float, default=1.35
        Residual at which the loss turns linear, in units of ``y``; 1.35 keeps 95% efficiency on unit Gaussian noise.

    Raises
    ------
    ValueError
        If `delta` is not positive and finite.

    Examples
    --------
    >>> Huber(delta=1.0).value(torch.tensor([[0.5], [3.0]]), torch.zeros(2, 1))
    tensor([0.1250, 2.5000])
    """

    of_residual = True
    smoothness = 1.0
    delta: float = 1.35

    def __post_init__(self) -> None:
        if not (is_real(self.delta) and self.delta > 0 and math.isfinite(self.delta)):
            raise ValueError(f"delta must be positive and finite, got {self.delta!r}")

    def value(self, pred: Tensor, y: Tensor) -> Tensor:
        residual = (pred - y).abs()
        inner = residual.clamp(max=self.delta)
        return (inner * (residual - 0.5 * inner)).sum(1)

    def gradient(self, pred: Tensor, y: Tensor) -> Tensor:
        return (pred - y).clamp(-self.delta, self.delta)

    def hessian_product(self, pred: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        return direction * ((pred - y).abs() <= self.delta)

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        return torch.where(u.abs() <= self.delta, 0.5 * u.square() + u * y, math.inf).sum(1)

    def tail_length(self, pred: Tensor, y: Tensor, weight: Tensor) -> float:
        return max(1.0, float(_medians((pred - y).abs(), weight).max()) / self.delta)

    def widened(self, y: Tensor, slope: Tensor, width: float) -> tuple[Loss, Tensor]:
        return Huber(width * self.delta), y - (width - 1) * slope

    def smoothed(self, cost: float) -> Loss:
        return SmoothedHuber(self.delta, cost / self.delta)

    def expression(self, pred: Any, y: Any, weight: Any) -> Any:
        import cvxpy as cp

        threshold: Any = self.delta  # cvxpy annotates an int and takes any number
        return 0.5 * cp.sum(cp.multiply(weight[:, None], cp.huber(pred - y, threshold)))

    def best_intercept(self, pred: Tensor, y: Tensor, weight: Tensor, start: Tensor | None = None) -> Tensor:
        # The slope is piecewise linear and increasing, with a kink where a residual enters or leaves the quadratic
        # part: interpolate between the kinks where it crosses zero, as Newton steps can stall there. In float64: beside
        # large residuals float32 loses the two kinks of a sample in one number.
        weight, residual = weight.double(), y.double() - pred.double()
        origin, twice = residual.new_zeros(residual.shape[1]), 2 * self.delta
        if float(residual.abs().max()) > self.delta / math.sqrt(EPS):  # beside which delta may be rounding
            # The best one is within delta of a median, and samples beyond twice that pull alike.
            origin = _medians(residual, weight)[0]
            residual = (residual - origin).clamp(-twice, twice)
        kinks, order = torch.cat([residual - self.delta, residual + self.delta]).sort(dim=0)
        rates = torch.cat([weight, -weight])[order].cumsum(0)
        slopes = (rates[:-1] * kinks.diff(dim=0)).cumsum(0) - self.delta
        slopes = torch.cat([torch.full_like(kinks[:1], -self.delta), slopes])
        last = ((slopes <= 0).sum(0, keepdim=True) - 1).clamp(max=len(kinks) - 2)
        kink, slope, rate = (values.gather(0, last)[0] for values in (kinks, slopes, rates))
        best = torch.where(rate > 0, kink - slope / rate, kink).clamp(residual.amin(0), residual.amax(0))
        # A Newton step takes away most of the rounding of the kinks, that of delta, beside which targets may be small.
        excess = best - residual
        slope, rate = weight @ excess.clamp(-self.delta, self.delta), weight @ (excess.abs() <= self.delta).double()
        return (origin + (best - torch.where(rate > 0, slope / rate, 0.0))).to(pred)


def _medians(values: Tensor, weight: Tensor) -> Tensor:
    """Weighted medians of columns, shape ``(1, c)``."""
    values, order = values.sort(dim=0)
    below = weight[order].cumsum(0) < 0.5 - torch.finfo(weight.dtype).eps * len(weight)
    return values.gather(0, below.sum(0, keepdim=True))


@dataclass(frozen=True)
class Poisson(Loss):
    r"""Poisson half-deviance with log link :math:`\sum_l e^{f_l} - y_l f_l + y_l \log y_l - y_l` for counts ``y >= 0``.

    Its curvature has no bound, so solvers need a step search. The terms in ``y`` alone make the best value 0.

    Examples
    --------
    >>> Poisson().value(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [2.0]])).round(decimals=4)
    tensor([0.0000, 0.1046])
    """

    smooth_curvature = True
    smoothness = math.inf

    def magnitude(self, y: Tensor) -> Tensor:
        return (1 + y + torch.xlogy(y, y).abs()).sum(1)

    def mean(self, pred: Tensor) -> Tensor:
        return pred.exp()

    def check_target(self, y: Tensor) -> None:
        if bool((y < 0).any()):
            raise ValueError(f"targets of the Poisson loss must be non-negative, got {float(y.min())}")
        if bool((y.sum(0) == 0).any()):
            raise ValueError("targets of the Poisson loss must have a positive sum in every output")

    def example_target(self, n_samples: int, n_outputs: int, generator: torch.Generator) -> Tensor:
        return super().example_target(n_samples, n_outputs, generator).exp().round()

    def value(self, pred: Tensor, y: Tensor) -> Tensor:
        return (pred.exp() - y * pred + torch.xlogy(y, y) - y).sum(1)

    def gradient(self, pred: Tensor, y: Tensor) -> Tensor:
        return pred.exp() - y

    def hessian_product(self, pred: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        return pred.exp() * direction

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        s = (u + y).clamp(min=0)
        return torch.where(u + y >= 0, torch.xlogy(s, s) - s - torch.xlogy(y, y) + y, math.inf).sum(1)

    def expression(self, pred: Any, y: Any, weight: Any) -> Any:
        import cvxpy as cp

        constant = np.sum(weight[:, None] * (xlogy(y, y) - y))
        return cp.sum(cp.multiply(weight[:, None], cp.exp(pred) - cp.multiply(y, pred))) + constant

    def best_intercept(self, pred: Tensor, y: Tensor, weight: Tensor, start: Tensor | None = None) -> Tensor:
        return torch.log(weight @ y) - torch.logsumexp(pred + torch.log(weight)[:, None], 0)

"""Losses: value, gradient, conjugate, curvature and cvxpy expression, per sample.

Predictions and targets are ``(N, c)`` arrays. A loss is jointly convex in the ``c`` predictions of a sample; the
program takes its weighted mean over samples. A new loss is one class and one line of ``LOSSES``;
``check_loss`` tests it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus


class Loss(ABC):
    """A convex loss ``l(f, y)`` of the predictions ``f`` of one sample.

    Attributes
    ----------
    separable : bool
        Whether the loss is a sum over outputs.
    targets : {"real", "sign", "simplex"}
        What a row of ``y`` is: real numbers (or counts), -1 and 1 per output, or class probabilities.
    probabilistic : bool
        Whether ``mean`` gives class probabilities.
    quadratic : bool
        Whether the loss is half the squared distance of prediction and target.
    of_residual : bool
        Whether the loss is a function of the prediction minus the target.
    shift_invariant : bool
        Whether the same number added to all outputs changes nothing.
    smooth_curvature : bool
        Whether the second derivatives are continuous; solvers that cannot tell take it that they are not.
    smoothness : float
        Largest eigenvalue of the Hessian in ``f`` over all ``f`` and ``y``; inf when unbounded.
    """

    separable: ClassVar[bool] = True
    targets: ClassVar[Literal["real", "sign", "simplex"]] = "real"
    probabilistic: ClassVar[bool] = False
    quadratic: ClassVar[bool] = False
    of_residual: ClassVar[bool] = False
    shift_invariant: ClassVar[bool] = False
    smooth_curvature: ClassVar[bool] = False

    @property
    @abstractmethod
    def smoothness(self) -> float:
        """Largest curvature of the loss; inf when there is no bound."""

    @abstractmethod
    def value(self, pred: Tensor, y: Tensor) -> Tensor:
        """Loss of each sample, shape ``(N,)``."""

    @abstractmethod
    def gradient(self, pred: Tensor, y: Tensor) -> Tensor:
        """Gradient in the predictions, shape ``(N, c)``."""

    @abstractmethod
    def hessian_product(self, pred: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        """Hessian of each sample times ``direction``, shape ``(N, c)``."""

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        """Convex conjugate ``sup_f <u, f> - l(f, y)`` of each sample, shape ``(N,)``; inf outside its domain.

        The default is nan: a loss without a conjugate has no certificate, and its gap is nan, never 0.
        """
        return u.new_full((u.shape[0],), math.nan)

    def magnitude(self, y: Tensor) -> Tensor:
        """Size of the terms whose difference a sample's loss is, shape ``(N,)``; eps times it is rounding."""
        return self.value(torch.zeros_like(y), y)

    def mean(self, pred: Tensor) -> Tensor:
        """Mean of the targets that predictions stand for (the inverse link), shape ``(N, c)``."""
        return pred

    def check_target(self, y: Tensor) -> None:  # noqa: B027 - real numbers need no check
        """Raise ``ValueError`` when ``y`` is not a target of this loss."""

    def example_target(self, n_samples: int, n_outputs: int, generator: torch.Generator) -> Tensor:
        """Random float64 targets of this loss, which ``checks`` and the tests try it on."""
        return torch.randn((n_samples, n_outputs), generator=generator, dtype=torch.float64)

    def expression(self, pred: Any, y: Any, weight: Any) -> Any:
        """cvxpy expression of ``sum_i weight_i l(pred_i, y_i)``; ``pred`` is a cvxpy variable of shape ``(N, c)``."""
        raise NotImplementedError(f"{type(self).__name__} has no method 'expression', which the solver 'exact' needs")

    def hessian_parts(self, pred: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Parts ``d`` and ``v`` of shape ``(N, c)`` of each sample's Hessian ``diag(d) - v v'``.

        The second is None where the Hessian is diagonal. Optional for a loss that couples the outputs: None, the
        default there, makes solvers take the Hessian column by column.
        """
        return (self.hessian_product(pred, y, torch.ones_like(pred)), None) if self.separable else None

    def mean_hessian(self, pred: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """``(c, c)`` Hessian of the weighted loss in an intercept shared by all samples."""
        if self.separable:
            return torch.diag(weight @ self.hessian_product(pred, y, torch.ones_like(pred)))
        columns = []
        for k in range(pred.shape[1]):
            direction = torch.zeros_like(pred)
            direction[:, k] = 1.0
            columns.append(weight @ self.hessian_product(pred, y, direction))
        return torch.stack(columns)

    def best_dual_scale(self, theta: Tensor, y: Tensor, weight: Tensor, limit: Tensor) -> Tensor:
        """Scale of ``theta`` within ``[0, limit]`` that serves the dual bound best.

        `limit` has shape ``(c,)`` when outputs may be scaled apart and ``()`` otherwise. The default is the largest
        scale at most 1, which keeps every point between zero and ``theta`` in the conjugate's domain.
        """
        return limit.clamp(max=1.0)

    def best_intercept(self, pred: Tensor, y: Tensor, weight: Tensor, start: Tensor | None = None) -> Tensor:
        """Minimiser over ``b`` of ``sum_i weight_i l(pred_i + b, y_i)``, shape ``(c,)``, by damped Newton steps.

        The weights sum to 1. `start` is a first guess that saves steps.
        """
        rounding = 8 * torch.finfo(pred.dtype).eps
        # Far from the predictions a loss is flat or steep, and Newton steps from there are useless.
        guesses = [-(weight @ pred)] + ([torch.zeros_like(pred[0])] if start is None else [start])
        value, b = min(
            ((float((weight * self.value(pred + guess, y)).sum()), guess) for guess in guesses),
            key=lambda pair: pair[0],
        )
        negligible = torch.finfo(pred.dtype).eps ** 2 * float((weight * self.value(torch.zeros_like(pred), y)).sum())
        per_sample = self.gradient(pred + b, y)
        for _ in range(100):
            slope = weight @ per_sample
            size = weight @ per_sample.abs()
            # An output whose best constant is at infinity (an absent class) is done once its slope is beneath notice.
            done = bool((slope.abs() <= rounding * size.clamp(min=rounding * float(size.max()))).all())
            if done or value <= negligible:
                break
            direction = self._newton_direction(pred + b, y, weight, slope)
            decrease = -float(slope @ direction)
            step, candidate = 1.0, b + direction
            new = float((weight * self.value(pred + candidate, y)).sum())
            # A small loss may be a difference of terms as large as the predictions: their rounding hides its decrease.
            terms = float(weight @ (pred + b).abs().amax(1))
            visible = decrease > rounding * (abs(value) + terms)
            while visible and step > 1e-8 and not new <= value - 0.25 * step * decrease:
                step *= 0.5
                candidate = b + step * direction
                new = float((weight * self.value(pred + candidate, y)).sum())
            if visible and not new < value:
                break
            new_per_sample = self.gradient(pred + candidate, y)
            # Once rounding hides the decrease of the value, only the slope tells whether a step is worth it.
            if not visible and not float((weight @ new_per_sample).abs().max()) < 0.5 * float(slope.abs().max()):
                break
            b, value, per_sample = candidate, new, new_per_sample
        return b

    def _newton_direction(self, pred: Tensor, y: Tensor, weight: Tensor, slope: Tensor) -> Tensor:
        """Newton direction of an intercept; zero along directions in which the loss is flat."""
        hessian = self.mean_hessian(pred, y, weight)
        if self.separable:
            curvature = hessian.diagonal()
            return torch.where(curvature > 0, -slope / curvature, 0.0)
        curvature, basis = torch.linalg.eigh(hessian)
        # Curvature beneath the rounding of its terms belongs to a flat direction.
        flat = 8 * torch.finfo(pred.dtype).eps * max(float(curvature[-1]), min(self.smoothness, 1.0))
        along = basis.T @ slope
        return -basis @ torch.where(curvature > flat, along / curvature.clamp(min=flat), 0.0)


@dataclass(frozen=True)
class Squared(Loss):
    r"""Squared loss :math:`\frac12 \sum_l (f_l - y_l)^2`, as in scikit-learn's ``Lasso``.

    Examples
    --------
    >>> import torch
    >>> Squared().value(torch.tensor([[3.0]]), torch.tensor([[1.0]]))
    tensor([2.])
    """

    quadratic = True
    of_residual = True
    smooth_curvature = True

    @property
    def smoothness(self) -> float:
        return 1.0

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
        import numpy as np

        return 0.5 * cp.sum_squares(cp.multiply(np.sqrt(weight)[:, None], pred - y))

    def best_dual_scale(self, theta: Tensor, y: Tensor, weight: Tensor, limit: Tensor) -> Tensor:
        # The bound is a concave parabola in the scale: take its vertex, cut to the feasible range.
        along, square = weight @ (theta * y), weight @ theta.square()
        if limit.ndim == 0:
            along, square = along.sum(), square.sum()
        best = torch.where(square > 0, along / square, torch.zeros_like(square))
        return torch.minimum(best.clamp(min=0.0), limit)

    def best_intercept(self, pred: Tensor, y: Tensor, weight: Tensor, start: Tensor | None = None) -> Tensor:
        return weight @ (y - pred)


@dataclass(frozen=True)
class Huber(Loss):
    r"""Huber loss: :math:`\frac12 r^2` for :math:`|r| \le \delta`, else :math:`\delta |r| - \frac12 \delta^2`.

    Parameters
    ----------
    delta : float, default=1.35
        Residual at which the loss turns linear, in units of ``y``; 1.35 keeps 95% efficiency on unit Gaussian noise.
    """

    of_residual = True

    delta: float = 1.35

    def __post_init__(self) -> None:
        if not (self.delta > 0 and math.isfinite(self.delta)):
            raise ValueError(f"delta must be positive and finite, got {self.delta!r}")

    @property
    def smoothness(self) -> float:
        return 1.0

    def value(self, pred: Tensor, y: Tensor) -> Tensor:
        residual = (pred - y).abs()
        inner = residual.clamp(max=self.delta)
        return (inner * (residual - 0.5 * inner)).sum(1)

    def gradient(self, pred: Tensor, y: Tensor) -> Tensor:
        return (pred - y).clamp(-self.delta, self.delta)

    def hessian_product(self, pred: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        return direction * ((pred - y).abs() <= self.delta)

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        finite = 0.5 * u.square() + u * y
        return torch.where(u.abs() <= self.delta, finite, math.inf).sum(1)

    def expression(self, pred: Any, y: Any, weight: Any) -> Any:
        import cvxpy as cp

        threshold: Any = self.delta  # cvxpy annotates an int and takes any number
        return 0.5 * cp.sum(cp.multiply(weight[:, None], cp.huber(pred - y, threshold)))

    def best_intercept(self, pred: Tensor, y: Tensor, weight: Tensor, start: Tensor | None = None) -> Tensor:
        # The slope is piecewise linear and increasing, with a kink where a residual enters or leaves the quadratic
        # part: walk the kinks in order and interpolate where it crosses zero. Newton steps can stall between them.
        residual = y - pred
        kinks, order = torch.cat([residual - self.delta, residual + self.delta]).sort(dim=0)
        rates = torch.cat([weight, -weight])[order].cumsum(0)
        slopes = (rates[:-1] * kinks.diff(dim=0)).cumsum(0) - self.delta
        slopes = torch.cat([torch.full_like(kinks[:1], -self.delta), slopes])
        last = ((slopes <= 0).sum(0, keepdim=True) - 1).clamp(max=len(kinks) - 2)
        kink, slope, rate = (values.gather(0, last)[0] for values in (kinks, slopes, rates))
        return torch.where(rate > 0, kink - slope / rate, kink)


class _SignLoss(Loss):
    """A loss of the margins ``y_l f_l`` for targets -1 and 1."""

    targets = "sign"

    def check_target(self, y: Tensor) -> None:
        if not bool((y.abs() == 1).all()):
            found = f"values in [{float(y.min())}, {float(y.max())}]"
            raise ValueError(f"targets of the {type(self).__name__} loss must be -1 or 1, got {found}")

    def example_target(self, n_samples: int, n_outputs: int, generator: torch.Generator) -> Tensor:
        return torch.where(super().example_target(n_samples, n_outputs, generator) > 0, 1.0, -1.0).double()


@dataclass(frozen=True)
class Logistic(_SignLoss):
    r"""Logistic loss :math:`\sum_l \log(1 + e^{-y_l f_l})` for targets -1 and 1."""

    probabilistic = True
    smooth_curvature = True

    @property
    def smoothness(self) -> float:
        return 0.25

    def mean(self, pred: Tensor) -> Tensor:
        return torch.sigmoid(pred)

    def value(self, pred: Tensor, y: Tensor) -> Tensor:
        return softplus(-y * pred, threshold=50.0).sum(1)

    def gradient(self, pred: Tensor, y: Tensor) -> Tensor:
        return -y * torch.sigmoid(-y * pred)

    def hessian_product(self, pred: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        return torch.sigmoid(pred) * torch.sigmoid(-pred) * direction

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        t = -u * y
        inside = (t >= 0) & (t <= 1)
        t = t.clamp(0, 1)
        return torch.where(inside, torch.xlogy(t, t) + torch.special.xlog1py(1 - t, -t), math.inf).sum(1)

    def expression(self, pred: Any, y: Any, weight: Any) -> Any:
        import cvxpy as cp

        return cp.sum(cp.multiply(weight[:, None], cp.logistic(-cp.multiply(y, pred))))


@dataclass(frozen=True)
class SquaredHinge(_SignLoss):
    r"""Squared hinge loss :math:`\sum_l \max(0, 1 - y_l f_l)^2` for targets -1 and 1, as in ``LinearSVC``."""

    @property
    def smoothness(self) -> float:
        return 2.0

    def value(self, pred: Tensor, y: Tensor) -> Tensor:
        return (1 - y * pred).clamp(min=0).square().sum(1)

    def gradient(self, pred: Tensor, y: Tensor) -> Tensor:
        return -2 * y * (1 - y * pred).clamp(min=0)

    def hessian_product(self, pred: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        return 2 * (y * pred < 1) * direction

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        t = -u * y
        return torch.where(t >= 0, 0.25 * t.square() - t, math.inf).sum(1)

    def expression(self, pred: Any, y: Any, weight: Any) -> Any:
        import cvxpy as cp

        return cp.sum(cp.multiply(weight[:, None], cp.square(cp.pos(1 - cp.multiply(y, pred)))))


@dataclass(frozen=True)
class Softmax(Loss):
    r"""Softmax cross-entropy :math:`\log \sum_l e^{f_l} - \langle y, f \rangle` for rows ``y`` in the unit simplex."""

    separable = False
    shift_invariant = True
    smooth_curvature = True
    targets = "simplex"
    probabilistic = True

    @property
    def smoothness(self) -> float:
        return 0.5

    def mean(self, pred: Tensor) -> Tensor:
        return torch.softmax(pred, 1)

    def check_target(self, y: Tensor) -> None:
        if y.shape[1] < 2:
            raise ValueError("targets of the softmax loss need at least two columns, one per class")
        # The conjugate, always taken in float64, is finite only for exact sums; looser rows would have infinite gaps.
        slack = 1e-11 if y.dtype == torch.float64 else 1e-5
        if bool((y < 0).any()) or bool(((y.sum(1) - 1).abs() > slack).any()):
            raise ValueError(
                "targets of the softmax loss must be class probabilities whose rows sum to 1; normalise them in float64"
            )

    def example_target(self, n_samples: int, n_outputs: int, generator: torch.Generator) -> Tensor:
        scores = super().example_target(n_samples, n_outputs, generator)
        return torch.nn.functional.one_hot(scores.argmax(1), n_outputs).double()

    def value(self, pred: Tensor, y: Tensor) -> Tensor:
        return torch.logsumexp(pred, 1) - (y * pred).sum(1)

    def gradient(self, pred: Tensor, y: Tensor) -> Tensor:
        return torch.softmax(pred, 1) - y

    def hessian_product(self, pred: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        probability = torch.softmax(pred, 1)
        weighted = probability * direction
        return weighted - probability * weighted.sum(1, keepdim=True)

    def hessian_parts(self, pred: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        probability = torch.softmax(pred, 1)
        return probability, probability

    def mean_hessian(self, pred: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        probability = torch.softmax(pred, 1)
        weighted = weight[:, None] * probability
        return torch.diag(weighted.sum(0)) - weighted.T @ probability

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        s = u + y
        # s - u is y in exact arithmetic, so the sum of s is 1 wherever u comes from a gradient; allow its rounding.
        inside = (s >= -1e-15).all(1) & ((s.sum(1) - 1).abs() <= 1e-10)
        s = s.clamp(min=0)
        return torch.where(inside, torch.xlogy(s, s).sum(1), math.inf)

    def expression(self, pred: Any, y: Any, weight: Any) -> Any:
        import cvxpy as cp

        return weight @ (cp.log_sum_exp(pred, axis=1) - cp.sum(cp.multiply(y, pred), axis=1))


@dataclass(frozen=True)
class Poisson(Loss):
    r"""Poisson half-deviance with log link :math:`\sum_l e^{f_l} - y_l f_l + y_l \log y_l - y_l` for counts ``y >= 0``.

    Its curvature has no bound, so solvers need a step search. The terms in ``y`` alone make the best value 0.
    """

    smooth_curvature = True

    @property
    def smoothness(self) -> float:
        return math.inf

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
        s = u + y
        inside = s >= 0
        s = s.clamp(min=0)
        return torch.where(inside, torch.xlogy(s, s) - s - torch.xlogy(y, y) + y, math.inf).sum(1)

    def expression(self, pred: Any, y: Any, weight: Any) -> Any:
        import cvxpy as cp
        import numpy as np
        from scipy.special import xlogy

        constant = np.sum(weight[:, None] * (xlogy(y, y) - y))
        return cp.sum(cp.multiply(weight[:, None], cp.exp(pred) - cp.multiply(y, pred))) + constant

    def best_intercept(self, pred: Tensor, y: Tensor, weight: Tensor, start: Tensor | None = None) -> Tensor:
        return torch.log(weight @ y) - torch.logsumexp(pred + torch.log(weight)[:, None], 0)


LOSSES: dict[str, type[Loss]] = {
    "squared": Squared,
    "huber": Huber,
    "logistic": Logistic,
    "squared_hinge": SquaredHinge,
    "softmax": Softmax,
    "poisson": Poisson,
}


def get_loss(loss: str | Loss) -> Loss:
    """The loss of a registered name, or the instance itself.

    Parameters
    ----------
    loss : str or Loss
        A key of ``LOSSES`` or an instance, for example ``Huber(delta=0.5)``.

    Returns
    -------
    Loss

    Raises
    ------
    ValueError
        If the name is unknown.

    Examples
    --------
    >>> get_loss("squared")
    Squared()
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str) and loss in LOSSES:
        return LOSSES[loss]()
    raise ValueError(f"loss must be one of {sorted(LOSSES)} or a Loss instance, got {loss!r}")

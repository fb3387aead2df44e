r"""The convex program that every solver takes and every certificate speaks of.

.. math:: \min_{Z, b} \; P(Z, b) = \sum_i p_i \, l((A Z)_i + b, y_i) + \alpha \, \Omega(Z),
          \qquad p_i = w_i / \sum_j w_j

and its dual, with one row :math:`\theta_i` per sample:

.. math:: \max_\theta \; D(\theta) = -\sum_i p_i \, l^*(-\theta_i, y_i)
          \quad \text{s.t.} \quad \Omega^\circ(A^\top \mathrm{diag}(p)\, \theta) \le \alpha,
          \quad \sum_i p_i \theta_i = 0 \;\text{(with an intercept)}.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from .linear_maps.base import LinearMap, Slopes, even_rows
from .losses.base import Loss
from .penalties.base import Penalty
from .rounding import EPS
from .validation import PRECISIONS, check_kind, check_tensor, is_real

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class LossSlopes(Slopes):
    """Minus the weighted gradients of the samples' losses at predictions to which an intercept is added."""

    of_samples = ("y", "weight")
    loss: Loss
    y: Tensor  # (N, c)
    weight: Tensor  # (N,)
    intercept: Tensor  # (c,)
    with_weight: bool = False  # whether the weights are a last column

    def at(self, pred: Tensor) -> Tensor:
        """Values ``(N, c)``, or ``(N, c + 1)``, of predictions without the intercept; zeros where the weight is.

        They are computed in the precision of the targets, and rounded to that of the predictions.
        """
        weight = self.weight[:, None]
        slopes = torch.where(weight > 0, -weight * self.loss.gradient(pred + self.intercept, self.y), 0.0)
        return (torch.cat([slopes, weight], dim=1) if self.with_weight else slopes).to(pred.dtype)


def _without_alpha(compute: Callable[[Any], _T]) -> _T:
    """A property that does not depend on ``alpha``: computed once for all programs that differ in that alone."""

    def remembered(program: Program) -> _T:
        return program.remembered(compute.__name__, lambda: compute(program))

    return property(remembered, doc=compute.__doc__)  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)  # tensors have no single truth value
class Program:
    r"""Penalised mean-loss program over a linear map; immutable.

    Parameters
    ----------
    map : LinearMap
        Coefficients to predictions.
    y : Tensor of shape (N, c)
        Targets as the loss wants them (classes one-hot or as -1 and 1).
    loss : Loss
        Convex in the predictions of each sample.
    penalty : Penalty
        Norm of the coefficients.
    alpha : float
        Weight of the penalty against the **mean** loss; positive.
    sample_weight : Tensor of shape (N,), optional
        Non-negative :math:`w`; only ratios matter. Default: equal weights.
    fit_intercept : bool, default=False
        Whether an unpenalised constant per output is part of the model.

    Raises
    ------
    TypeError
        If one of the parts is not of its kind.
    ValueError
        If shapes, weights, targets or ``alpha`` are not as above.

    Examples
    --------
    >>> import torch
    >>> from convexformer_solvers import DenseMap, GroupL2, Program, Squared
    >>> A = DenseMap(torch.eye(3, dtype=torch.float64)[:, :, None])
    >>> program = Program(A, torch.tensor([[3.0], [0.0], [0.0]], dtype=torch.float64), Squared(), GroupL2(), alpha=0.5)
    >>> program
    Program(DenseMap of 3 samples, coefficients (3, 1, 1), Squared(), GroupL2(), alpha=0.5, fit_intercept=False)
    >>> program.alpha_max
    1.0
    """

    map: LinearMap
    y: Tensor
    loss: Loss
    penalty: Penalty
    alpha: float
    sample_weight: Tensor | None = None
    fit_intercept: bool = False
    _known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_kind("map", self.map, LinearMap, "DenseMap(X)")
        check_kind("loss", self.loss, Loss, "get_loss('squared')")
        check_kind("penalty", self.penalty, Penalty, "get_penalty('group_l2')")
        check_alpha(self.alpha)
        if self.fit_intercept not in (True, False):
            raise ValueError(f"fit_intercept must be True or False, got {self.fit_intercept!r}")
        object.__setattr__(self, "alpha", float(self.alpha))
        object.__setattr__(self, "fit_intercept", bool(self.fit_intercept))
        self._check_arrays()
        object.__setattr__(self, "y", self.map.placed(self.y))
        self.loss.check_target(self.y)
        if self.sample_weight is not None:
            object.__setattr__(self, "sample_weight", self.map.placed(self.sample_weight))
            # Samples of positive weight must make a program by themselves: zero counts alone have no best constant.
            self.loss.check_target(self.y[self.sample_weight > 0])

    def __repr__(self) -> str:
        """Sizes in place of the data, which may fill pages."""
        kind, weighted = type(self.map).__name__, "" if self.sample_weight is None else "weighted "
        return (
            f"Program({kind} of {self.map.n_samples} {weighted}samples, coefficients {self.coef_shape}, {self.loss!r}, "
            f"{self.penalty!r}, alpha={self.alpha:.6g}, fit_intercept={self.fit_intercept})"
        )

    def _check_arrays(self) -> None:
        y, weight, n = self.y, self.sample_weight, self.map.n_samples
        for name, part in {"y": y, **({} if weight is None else {"sample_weight": weight})}.items():
            check_tensor(name, part)
            if part.device != self.map.device:
                raise ValueError(f"{name} must be on the device of the map, {self.map.device}, got {part.device}")
        if y.ndim != 2 or y.shape[0] != n or y.shape[1] == 0:
            raise ValueError(f"y must have shape ({n}, n_outputs) with at least one output, got {tuple(y.shape)}")
        if 0 in (shape := (n, *self.map.feature_shape)):
            raise ValueError(f"map must have at least one sample, block and feature, got shape {shape}")
        for name, dtype in (("y", y.dtype), ("map", self.map.dtype)):
            if dtype not in PRECISIONS.values():
                raise ValueError(f"{name} must hold float32 or float64 numbers, got {dtype}; convert it with .double()")
        if not bool(torch.isfinite(y).all()):
            raise ValueError(f"y must be finite in {y.dtype}, got NaN or infinite values")
        if weight is not None and weight.shape != (n,):
            raise ValueError(f"sample_weight must have shape ({n},), got {tuple(weight.shape)}")
        if weight is not None and weight.is_complex():
            raise ValueError(f"sample_weight must hold real numbers, got {weight.dtype}")
        least, most = (1.0, 1.0) if weight is None else (float(weight.min()), float(weight.max()))
        if not (least >= 0 and 0 < most < math.inf):
            found = f"numbers from {least} to {most}"
            raise ValueError(f"sample_weight must be finite and non-negative, with a positive sum, got {found}")

    @property
    def coef_shape(self) -> tuple[int, ...]:
        """Shape of a coefficient array, ``(*block_shape, d, c)``."""
        return (*self.map.feature_shape, self.y.shape[1])

    @property
    def outputs_separate(self) -> bool:
        """Whether the program is one independent program per output."""
        return self.loss.output_separable and self.penalty.output_separable

    @property
    def n_parts(self) -> int:
        """Number of independent programs of equal shares of the outputs that add up to the program."""
        return self.penalty.of_part(self.y.shape[1])[0] if self.loss.output_separable else 1

    def part(self, number: int) -> Program:
        """One of the ``n_parts`` programs that add up to this one; itself where there is no other."""
        if self.n_parts == 1:
            return self
        n_parts, penalty = self.penalty.of_part(self.y.shape[1])
        return self._changed({}, y=self.y.chunk(n_parts, dim=1)[number], penalty=penalty)

    @_without_alpha
    def weight(self) -> Tensor:
        """Weights ``p`` of the samples, summing to 1, in the precision of ``y``."""
        if self.sample_weight is None:
            return self.y.new_full((self.map.n_samples,), 1.0 / self.map.n_samples)
        weight = self.sample_weight.double()
        weight = weight / weight.max()  # so that the sum of huge weights cannot overflow
        return (weight / weight.sum()).to(self.y)

    @_without_alpha
    def counted(self) -> Tensor | None:
        """Which samples have a positive weight, shape (N,); None where all have."""
        counted = self.weight > 0
        return None if bool(counted.all()) else counted

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Program:
        """The same program in another precision or on another device; itself where nothing changes."""
        y = self.loss.target_in(self.y.to(device=device or self.y.device), dtype or self.y.dtype)
        new_map = self.map.to(dtype, device)
        if y is self.y and new_map is self.map:
            return self
        weight = None if self.sample_weight is None else self.sample_weight.to(y.device)
        result = dataclasses.replace(self, map=new_map, y=y, sample_weight=weight)
        if new_map is self.map and self.y.dtype == torch.float64:
            result.remembered("_exact", lambda: self)  # so that what costs a pass over the data is computed once
        return result

    def with_float64_targets(self) -> Program:
        """The same program with targets and weights in float64; the map converts its rows as it reads them."""
        return self if self.y.dtype == torch.float64 else self._exact.with_alpha(self.alpha)

    @_without_alpha
    def _exact(self) -> Program:
        return dataclasses.replace(self, y=self.loss.target_in(self.y, torch.float64))

    def with_alpha(self, alpha: float) -> Program:
        """The same program with another positive `alpha`; all that does not depend on it is computed once."""
        check_alpha(alpha)
        return self._changed(self._known, alpha=float(alpha))

    def with_map(self, linear_map: LinearMap) -> Program:
        """The same program on other features of its samples; what does not depend on features is kept."""
        of_samples = ("weight", "counted", "null_intercept")
        kept = {name: value for name, value in self._known.items() if name in of_samples}
        return self._changed(kept, map=linear_map)

    def _changed(self, known: dict[str, Any], **changes: Any) -> Program:
        """A copy with changes that need no check, and with what is known of it."""
        result = copy.copy(self)
        for name, value in (changes | {"_known": known}).items():
            object.__setattr__(result, name, value)
        return result

    def with_penalty(self, penalty: Penalty) -> Program:
        """The same program with another penalty."""
        return self._replaced(lambda y: y, penalty=penalty)

    def _replaced(self, of_targets: Callable[[Tensor], Tensor], **changes: Any) -> Program:
        """A checked copy with changes, with what becomes of the targets: those in float64, where known, keep digits."""
        result = dataclasses.replace(self, y=of_targets(self.y), **changes)
        if "_exact" in self._known:
            result.remembered("_exact", lambda: dataclasses.replace(result, y=of_targets(self._exact.y)))
        return result

    def remembered(self, name: str, compute: Callable[[], _T]) -> _T:
        """What `compute` gives, once for all programs that differ in ``alpha`` alone; a reduction may have given it."""
        if name not in self._known:
            self._known[name] = compute()
        return self._known[name]

    def smoothed(self, cost: float) -> Program:
        """The program with a smoothed loss, lower by `cost` at most in the mean; itself where the loss has no kinks."""
        loss = self.loss.smoothed(cost / self.y.shape[1])
        return self if loss is self.loss else dataclasses.replace(self, loss=loss)

    def rows(self, index: Tensor) -> Program:
        """The program on some samples, by position; ``ValueError`` where these make none, as counts of zero."""
        weight = None if self.sample_weight is None else self.sample_weight[index]
        return self._replaced(lambda y: y[index], map=self.map.rows(index), sample_weight=weight)

    def drop_zero_weights(self) -> Program:
        """The same program without its samples of weight zero."""
        return self if self.counted is None else self.rows(self.counted.nonzero()[:, 0])

    def loss_value(self, pred: Tensor) -> Tensor:
        """Mean loss of predictions of shape (N, c), intercept included; a scalar."""
        return self.mean(self.loss.value(pred, self.y))

    def mean(self, values: Tensor) -> Tensor:
        """Weighted mean of values of shape (N,); a sample of weight zero does not count, be its value infinite."""
        return self.of_counted(self.weight * values).sum()

    def of_counted(self, values: Tensor) -> Tensor:
        """Values of the samples, shape (N,) or (N, k), with zeros in place of those, even infinite, of weight zero."""
        if (counted := self.counted) is None:
            return values
        return torch.where(counted if values.ndim == 1 else counted[:, None], values, 0.0)

    def weighted_adjoint(self, theta: Tensor) -> Tensor:
        """``A' diag(p) theta``, shape ``(*feature_shape, k)``, of k values of each sample, shape (N, k)."""
        return self.map.rmatvec(self.of_counted(self.weight[:, None] * theta))

    pull_back = weighted_adjoint  # its former name

    def slopes(self, intercept: Tensor, with_weight: bool = False) -> LossSlopes:
        """Minus the slopes of the mean loss, for ``LinearMap.slopes_pass``, with an intercept of shape (c,)."""
        return LossSlopes(self.loss, self.y, self.weight, intercept, with_weight)

    def best_intercept(self, pred: Tensor, start: Tensor | None = None) -> Tensor:
        """Best constant per output, shape (c,), of predictions without one, from a guess `start`; or zeros."""
        if not self.fit_intercept:
            return pred.new_zeros(pred.shape[1])
        return self.loss.best_intercept(self.of_counted(pred), self.y, self.weight, start)

    def constant_pred(self, intercept: Tensor) -> Tensor:
        """Predictions of an intercept of shape (c,) alone, shape (N, c)."""
        return self.map.placed(intercept.expand_as(self.y))

    def lipschitz(self, pred: Tensor, power_steps: int = 6) -> float:
        """Estimate of the Lipschitz constant of the mean loss's gradient in the coefficients; 1 for data of zeros.

        With an intercept the loss is minimised over it. Where the loss has no bound on its curvature, that at `pred`,
        of shape (N, c), stands in. A power step costs two products; six give about one digit from below.
        """
        smoothness = self.loss.smoothness
        if not math.isfinite(smoothness):
            curvature = self.loss.hessian_product(pred, self.y, torch.ones_like(pred))
            smoothness = float(curvature[self.weight > 0].amax())
        return smoothness * self.map.squared_norm(self.weight, center=self.fit_intercept, n_steps=power_steps) or 1.0

    def primal(self, coef: Tensor, intercept: Tensor | None = None) -> Tensor:
        """Objective at coefficients and an intercept, by default zeros; a scalar."""
        pred = self.map.matvec(coef)
        return self.objective(coef, pred if intercept is None else pred + intercept)

    def objective(self, coef: Tensor, pred: Tensor) -> Tensor:
        """Objective of coefficients whose predictions, intercept included, are known; a scalar."""
        return self.loss_value(pred) + self.alpha * self.penalty.value(coef)

    def dual(self, theta: Tensor) -> Tensor:
        """Dual objective at a point of shape (N, c), **whether feasible or not**; -inf where the conjugate is inf."""
        return -self.mean(self.loss.conjugate(-theta, self.y))

    @_without_alpha
    def null_intercept(self) -> Tensor:
        """Intercept of the best constant model, shape ``(c,)``."""
        exact = self.with_float64_targets()  # in float32 it may be far off on many samples
        if exact is not self:
            return exact.null_intercept.to(self.y)
        return self.best_intercept(torch.zeros_like(self.y))

    @_without_alpha
    def null_value(self) -> float:
        """Objective of the best constant model: the reference of relative gaps.

        Where it is rounding, as for a constant ``y``, a share of the terms of the loss takes its place.
        """
        exact = self.with_float64_targets()
        constant = float(exact.loss_value(exact.constant_pred(exact.null_intercept)))
        size = float(exact.mean(self.loss.magnitude(exact.y)))
        odd, none = size < torch.finfo(torch.float64).tiny or size == math.inf, exact.y.new_zeros(exact.y.shape[1])
        if odd and bool(exact.slopes(none).at(torch.zeros_like(exact.y)).any()):  # with a slope no loss is zero
            raise out_of_range(exact.y.dtype)
        # A mean of N terms is off by some of their roundings, far below 1e4 of them; or by those of targets, squared.
        rounding = float(exact.loss_value((1 + 1e4 * EPS) * exact.y)) if self.loss.of_residual else 1e4 * EPS * size
        # A relative gap of 1e-4 is then a hundred roundings of the terms in the precision of the data.
        least = 0.0 if constant > rounding else 1e6 * torch.finfo(self.map.dtype).eps * size
        return max(constant, least)

    @property
    def tail_length(self) -> float:
        """``loss.tail_length`` at the best constant model: how far the targets lie beyond the loss's quadratic part."""
        return self.loss.tail_length(self.constant_pred(self.null_intercept), self.y, self.weight)

    @property
    def null_dual_point(self) -> Tensor:
        """Minus the gradient of each sample's loss at the best constant model, shape ``(N, c)``."""
        return -self.loss.gradient(self.constant_pred(self.null_intercept), self.y)

    @property
    def null_correlation(self) -> Tensor:
        """``A' diag(p)`` times the constant model's dual point, shape ``coef_shape``, float64; kept if small."""
        exact = self.with_float64_targets()
        if math.prod(self.coef_shape) > self.map.n_stored:
            return exact.weighted_adjoint(exact.null_dual_point)
        return exact.remembered("null_correlation", exact._null_correlation)

    def _null_correlation(self) -> Tensor:
        theta = self.null_dual_point
        if self.map.in_memory or not (self.fit_intercept and self.loss.quadratic):
            return self.weighted_adjoint(theta)
        products = self.weighted_adjoint(torch.cat([theta, torch.ones_like(theta[:, :1])], dim=1))
        self.remembered("feature_means", lambda: products[..., -1])  # in the same pass
        return products[..., :-1]

    @_without_alpha
    def feature_means(self) -> Tensor:
        """Weighted means of the features, of shape ``feature_shape``, in the precision of ``y``."""
        return self.map.rmatvec(self.weight[:, None])[..., 0]

    @property
    def block_means(self) -> Tensor | None:
        """What an intercept takes from the features: ``feature_means`` as ``(n_blocks, d)``; None without one."""
        return self.feature_means.reshape(-1, self.coef_shape[-2]) if self.fit_intercept else None

    @_without_alpha
    def null_dual_norms(self) -> Tensor:
        """Dual norm of each group at the best constant model, as from ``group_dual_norms``; float64."""
        return self.penalty.group_dual_norms_in_any_units(self.null_correlation)

    @_without_alpha
    def alpha_max(self) -> float:
        """Smallest ``alpha`` whose solution is zero; zero where nothing but the intercept can lower the loss."""
        exact = self.with_float64_targets()
        if exact is not self:
            return exact.alpha_max
        self.penalty.check_shape(self.coef_shape)
        found, theta = float(self.null_dual_norms.amax()), self.null_dual_point
        if not math.isfinite(found):
            self.map.check_finite()
        # It may be what rounding leaves of samples that cancel, as an intercept makes constant ones.
        mean = float((self.weight @ theta).abs().max()) if self.fit_intercept else 0.0  # zero but for rounding
        rounding = mean + EPS * float(self.mean(theta.abs().amax(1)))
        # Sums of products are off by less than eight roundings of one.
        bound = 8 * math.sqrt(math.prod(self.coef_shape[-2:])) * rounding
        counted = (self.weight > 0).nonzero()[:, 0]
        some = counted[even_rows(len(counted), math.isqrt(len(counted)), counted.device)]
        # Some samples tell, without a pass over all: their largest entry is at most that of all.
        return 0.0 if found <= bound * self.map.rows(some).largest() else found


def out_of_range(dtype: torch.dtype) -> ValueError:
    """The error where squares underflow or overflow."""
    return ValueError(
        f"squares of the data or the targets are too small or too large for {dtype}; scale the features (and alpha "
        "with them) or the targets to about one"
    )


def check_alpha(alpha: float) -> None:
    """Raise ``ValueError`` unless ``alpha`` is a positive finite number: at zero the dual has no interior."""
    if not is_real(alpha):
        raise ValueError(f"alpha must be a positive finite number, got {alpha!r}")
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"alpha must be positive and finite (without decay there is no certificate), got {alpha!r}")

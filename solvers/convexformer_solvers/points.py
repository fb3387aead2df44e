"""Primal-dual points of a program, and the estimate of their duality gap."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .program import Program


class Point(NamedTuple):
    """A primal point, with a dual point where the solver has one to offer.

    Attributes
    ----------
    coef : Tensor of shape ``program.coef_shape``
        Coefficients; never changed in place once a solver has returned them.
    intercept : Tensor of shape (c,) or None
        Zeros when the program has none. None: the best one for `coef`.
    dual : Tensor of shape (N, c) or None
        A candidate for ``certify``, feasible or not. None: minus the gradient of the loss at `pred`, if there is one.
    pred : Tensor of shape (N, c) or None
        Predictions, intercept included, that give the dual point; not necessarily those of `coef`.
    fitted, correlation : Tensor of shape (N, c) or None, Tensor of shape ``program.coef_shape`` or None
        Predictions of `coef`, intercept included; ``A' diag(p)`` times the dual point, possibly rounded.
    """

    coef: Tensor
    intercept: Tensor | None = None
    dual: Tensor | None = None
    pred: Tensor | None = None
    fitted: Tensor | None = None
    correlation: Tensor | None = None

    def with_changed(self, names: Iterable[str], change: Callable[[Tensor], Tensor]) -> Point:
        """The point with these of its parts changed, where it has them."""
        return self._replace(**{name: change(part) for name in names if (part := getattr(self, name)) is not None})

    def in_precision(self, dtype: torch.dtype) -> Point:
        """The point with all of its parts in a precision."""
        return self.with_changed(self._fields, lambda part: part.to(dtype))


def null_point(program: Program) -> Point:
    """The best constant model."""
    return Point(program.y.new_zeros(program.coef_shape), program.null_intercept)


def own_predictions(program: Program, coef: Tensor) -> Tensor:
    """Predictions of coefficients with the best intercept, shape ``(N, c)``; blocks of zeros cost nothing."""
    pred = program.map.sparse_matvec(coef)
    return pred + program.best_intercept(pred)


def point_at(program: Program, coef: Tensor, pred: Tensor | None = None) -> Point:
    """The point of coefficients, and of other predictions where there are any; costs a product or two."""
    coef = coef.to(program.y)
    if pred is None and not bool(coef.any()):
        constant = program.null_intercept.expand_as(program.y)
        return Point(coef, pred=constant, fitted=constant, correlation=program.null_correlation.to(coef))
    fitted = own_predictions(program, coef)
    return with_own_correlation(program, Point(coef, pred=fitted if pred is None else pred.to(fitted), fitted=fitted))


def dual_of(program: Program, point: Point) -> Tensor:
    """Minus the gradient of each sample's loss at the predictions behind the dual point, shape ``(N, c)``."""
    assert point.pred is not None
    return -program.loss.gradient(point.pred, program.y)


def with_own_correlation(program: Program, point: Point) -> Point:
    """The point with the correlation of its dual point; costs one product."""
    return point._replace(correlation=program.weighted_adjoint(dual_of(program, point)))


def with_own_predictions(program: Program, point: Point) -> Point:
    """The point with its own predictions and their correlation, of one pass where its intercept is known."""
    intercept = point.intercept
    if intercept is None and program.fit_intercept:
        return point_at(program, point.coef)
    intercept = program.null_intercept if intercept is None else intercept
    fitted, correlation = program.map.slopes_pass(point.coef, program.slopes(intercept))
    fitted = fitted + intercept
    return point._replace(pred=fitted, fitted=fitted, correlation=correlation)


def objective(program: Program, point: Point) -> float:
    """Objective of the coefficients."""
    assert point.fitted is not None
    return float(program.objective(point.coef, point.fitted))


def gap_estimate(program: Program, point: Point) -> float:
    """Duality gap without centring of the dual point or a product with the data; negative where that is inaccurate."""
    return objective(program, point) - dual_estimate(program, point)


def dual_estimate(program: Program, point: Point) -> float:
    """Dual objective of the dual point, scaled by its correlation until it is feasible, as ``gap_estimate`` has it."""
    assert point.correlation is not None
    if program.outputs_separate:
        norms = program.penalty.group_dual_norms(point.correlation)
        largest = norms.reshape(-1, norms.shape[-1]).amax(0)
    else:
        parts, penalty = point.correlation.chunk(program.n_parts, dim=-1), program.part(0).penalty
        largest = torch.cat([penalty.group_dual_norms(part).amax().expand(part.shape[-1]) for part in parts])
    scale = torch.where(largest > program.alpha, program.alpha / largest, 1.0)
    return float(program.dual(scale * dual_of(program, point)))


def as_start(program: Program, point: Point) -> tuple[Tensor, Tensor | None]:
    """Coefficients to start from, and predictions unless they are worse than the best constant ones."""
    coef, pred = point.coef.to(program.y), None if point.pred is None else point.pred.to(program.y)
    usable = pred is not None and float(program.loss_value(pred)) <= program.null_value
    return coef, pred if usable else None


def completed(program: Program, point: Point) -> Point:
    """The point with an intercept and a dual point, coefficients and intercept in the precision of the program."""
    exact = program.with_float64_targets()
    coef, intercept, dual = point.coef.to(program.y), point.intercept, point.dual
    if intercept is None:
        free = program.fit_intercept
        intercept = exact.best_intercept(exact.map.sparse_matvec(coef.to(exact.y))) if free else program.null_intercept
    if dual is None and point.pred is not None:
        dual = dual_of(exact, point._replace(pred=point.pred.to(exact.y)))
    return point._replace(coef=coef, intercept=intercept.to(program.y), dual=dual)

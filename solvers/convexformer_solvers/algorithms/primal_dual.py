"""Common ground of the solvers that carry a primal and a dual point side by side."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.linear_maps.base import LinearMap
from convexformer_solvers.program import Program

from .base import Point, Solver


class _Points(NamedTuple):
    program: Program
    coef: Tensor
    fitted: Tensor
    pred: Tensor
    correlation: Tensor


class Iterate(_Points):
    """A primal point, and predictions that need not be its own and stand for a dual point.

    Attributes
    ----------
    program : Program
        The program on its samples of positive weight, with float64 targets.
    coef : Tensor of shape ``program.coef_shape``
        The primal point.
    fitted : Tensor of shape (N, c)
        Its predictions, intercept included.
    pred : Tensor of shape (N, c)
        Predictions at which minus the gradient of each sample's loss is the dual point.
    correlation : Tensor of shape ``program.coef_shape``
        ``A' diag(p)`` times that dual point, or nearly so.
    """

    @classmethod
    def at(cls, program: Program, coef: Tensor, pred: Tensor | None) -> Iterate:
        """The iterate of coefficients, and of other predictions where there are any; costs a product or two."""
        coef = coef.to(program.y)
        fitted = own_predictions(program, coef)
        return cls(program, coef, fitted, fitted if pred is None else pred, coef).with_own_ascent()

    def dual_point(self) -> Tensor:
        """Minus the gradient of each sample's loss, shape ``(N, c)``."""
        return -self.program.loss.gradient(self.pred, self.program.y)

    def with_own_ascent(self) -> Iterate:
        """The same with `correlation` computed from the dual point; costs one product."""
        return self._replace(correlation=self.program.weighted_adjoint(self.dual_point()))

    def moved(self, program: Program, offset: Tensor) -> Iterate:
        """The same of an equivalent program whose predictions are higher by `offset`, of shape ``(c,)``."""
        return self._replace(program=program, fitted=self.fitted + offset, pred=self.pred + offset)

    def with_map(self, linear_map: LinearMap) -> Iterate:
        """The same with products by another map, whose predictions may differ by what an intercept gives back."""
        return self._replace(program=dataclasses.replace(self.program, map=linear_map))

    @cached_property
    def objective(self) -> float:
        """Objective of the primal point."""
        return float(self.program.objective(self.coef, self.fitted))

    @cached_property
    def gap_estimate(self) -> float:
        """Duality gap but for the centring of the dual point; costs no product with the data."""
        program = self.program
        norms = program.penalty.group_dual_norms(self.correlation)
        largest = norms.reshape(-1, norms.shape[-1]).amax(0) if program.outputs_separate else norms.amax()
        scale = torch.where(largest > program.alpha, program.alpha / largest, 1.0)
        return self.objective - float(program.dual(scale * self.dual_point()))


class PrimalDualSolver(Solver):
    """A solver that can start from, and can be asked for, an ``Iterate``.

    That is what lets solvers hand over to each other without losing either point. Works in float64 on data of any
    precision. States have the attribute ``gap``, the rough gap.

    Attributes
    ----------
    halving_steps : int
        Steps in which the rough gap halves when all is well.
    """

    halving_steps: ClassVar[int] = 10

    @abstractmethod
    def init_at(self, program: Program, coef: Tensor, pred: Tensor | None, previous: Any = None) -> Any:
        """State at coefficients and predictions that need not belong together.

        Parameters
        ----------
        program : Program
            The program.
        coef : Tensor of shape ``program.coef_shape``
            The primal point.
        pred : Tensor of shape (N, c) or None
            Predictions, intercept included, for the samples of positive weight; they say which dual point to start
            from. None: those of `coef`.
        previous : state, optional
            A state of a program that differs in ``alpha``, targets and loss alone; what it has computed of the map and
            the weights is taken over.
        """

    @abstractmethod
    def iterate(self, state: Any) -> Iterate:
        """Both points of a state."""

    def rounded_iterate(self, state: Any) -> Iterate:
        """The same with a map whose products may have the precision of the iterations; cheaper where that is single."""
        return self.iterate(state)

    def handed_over(self, state: Any) -> Iterate:
        """Both points for another solver to go on from, where this one is given up."""
        return self.iterate(state)

    def estimated_gap(self, state: Any) -> float:
        return state.gap

    def init(self, program: Program, start: Point) -> Any:
        return self.init_again(program, start, None)

    def init_again(self, program: Program, start: Point, previous: Any) -> Any:
        pred = start.pred
        if pred is not None:
            # Predictions on the way to somewhere may be far off; worse than the best constant ones are no start.
            far_off = float(program.loss_value(pred)) > program.null_value
            pred = None if far_off else pred[program.weight > 0].double()
        return self.init_at(program, start.coef, pred, previous)

    def point(self, program: Program, state: Any) -> Point:
        return _point_of(program, self.iterate(state))

    def handover(self, program: Program, state: Any) -> Point:
        return _point_of(program, self.handed_over(state))


def _point_of(program: Program, iterate: Iterate) -> Point:
    exact, dtype = program.with_float64_targets(), program.y.dtype
    coef = iterate.coef.to(dtype)
    intercept = program.null_intercept
    if program.fit_intercept:
        intercept = exact.best_intercept(exact.map.sparse_matvec(coef.to(exact.y)))
    counts = program.weight > 0
    dual, pred = torch.zeros_like(exact.y), torch.zeros_like(exact.y)
    dual[counts], pred[counts] = iterate.dual_point(), iterate.pred
    return Point(coef, intercept.to(dtype), dual, pred)


def own_predictions(program: Program, coef: Tensor) -> Tensor:
    """Predictions of coefficients with the best intercept, shape ``(N, c)``; blocks of zeros cost nothing."""
    pred = program.map.sparse_matvec(coef)
    return pred + program.best_intercept(pred)

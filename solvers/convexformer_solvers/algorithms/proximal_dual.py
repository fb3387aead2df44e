"""Proximal steps in the dual of a loss that is linear for most samples, as Huber's for targets in large units."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.program import Program

from .primal_dual import Iterate, PrimalDualSolver

# The gap over the best constant model's objective to which the first step is solved, and that of the others as a share
# of what the step before left; and iterations on one step at most.
_FIRST_TOL = 1e-2
_SHARE = 0.03
_PATIENCE = 200
# A step that leaves more than this of the smallest gap so far is followed by one whose quadratic part is narrower: its
# width less one by this factor. Narrow ones converge in fewer steps, but each may take alternating directions long.
_ENOUGH = 0.9
_NARROWER = 0.85


class _State(NamedTuple):
    exact: Program  # samples of positive weight, float64 targets
    step: Program  # that of the proximal step
    inner: Any
    width: float  # of the step's quadratic part, in units of the loss's own
    tol: float  # gap over the best constant model's objective to which the step is solved
    iteration: int = 0  # of this step
    ended: Iterate | None = None  # the exact program's iterate at the end of the last step
    gap: float = math.inf  # rough gap of that, where the last iteration ended a step
    least_gap: float = math.inf  # of the steps before


class ProximalDual(PrimalDualSolver):
    r"""Another solver on a sequence of programs whose loss has a wider quadratic part each.

    Where nearly all residuals of Huber's loss are in its linear parts it has hardly any curvature, and no quadratic
    stands for it. A proximal step in its dual, :math:`u_{k+1} = \arg\max_u D(u) - \frac{w_k - 1}2 \|u - u_k\|^2`,
    is a program with Huber's loss again, of :math:`w_k` times the width, and targets moved by :math:`(w_k - 1) u_k`.
    The first width holds half of the residuals of the best constant model; it shrinks where steps of that width no
    longer help.

    Needs a loss with ``widened``.

    Parameters
    ----------
    inner : PrimalDualSolver
        The solver of the proximal steps.

    Examples
    --------
    >>> from convexformer_solvers import Admm
    >>> ProximalDual(Admm()).name
    'proximal_dual(admm)'
    """

    requires_of_loss = ("widened",)

    def __init__(self, inner: PrimalDualSolver) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return f"proximal_dual({self.inner.name})"

    def unmet_requirement(self, program: Program) -> str | None:
        return super().unmet_requirement(program) or self.inner.unmet_requirement(program)

    def init_at(self, program: Program, coef: Tensor, pred: Tensor | None, previous: _State | None = None) -> _State:
        exact = program.drop_zero_weights().with_float64_targets()
        width = exact.tail_length
        inner = None if previous is None else previous.inner
        return _State(exact, *self._next_step(exact, width, coef, pred, inner), width, _FIRST_TOL)

    def _next_step(
        self, exact: Program, width: float, coef: Tensor, pred: Tensor | None, previous: Any
    ) -> tuple[Program, Any]:
        """Program of a proximal step and the inner solver's state at its start."""
        # Without a dual point from zero slopes, as those of own predictions may be at the ends of their range.
        slope = torch.zeros_like(exact.y) if pred is None else exact.loss.gradient(pred, exact.y)
        loss, targets = exact.loss.widened(exact.y, slope, width)
        step = dataclasses.replace(exact, y=targets, loss=loss, alpha=width * exact.alpha)
        pred = None if pred is None else targets + width * (pred - exact.y)
        return step, self.inner.init_at(step, coef, pred, previous)

    def step(self, program: Program, state: _State) -> _State:
        if state.ended is not None:
            state = self._after_step(state, state.ended)
        inner, iteration = self.inner.step(state.step, state.inner), state.iteration + 1
        state = state._replace(inner=inner, iteration=iteration)
        near = abs(self.inner.estimated_gap(inner)) <= state.tol * state.step.null_value
        if near or iteration == _PATIENCE or self.inner.finished(inner):
            ended = self._in_exact(state)
            return state._replace(ended=ended, gap=ended.gap_estimate)
        return state

    def _after_step(self, state: _State, ended: Iterate) -> _State:
        gap = state.gap if state.gap > 0 else math.inf  # below zero it is none
        enough = gap <= _ENOUGH * state.least_gap
        width = state.width if enough else 1 + _NARROWER * (state.width - 1)
        tol = min(_FIRST_TOL, _SHARE * gap / state.exact.null_value)
        step, inner = self._next_step(state.exact, width, ended.coef, ended.pred, state.inner)
        return _State(state.exact, step, inner, width, tol, least_gap=min(gap, state.least_gap))

    def _in_exact(self, state: _State) -> Iterate:
        """The iterate of the inner solver as one of the exact program."""
        exact, iterate = state.exact, self.inner.iterate(state.inner)
        pred = exact.y + (iterate.pred - state.step.y) / state.width
        return Iterate(exact, iterate.coef, iterate.fitted, pred, iterate.correlation / state.width)

    def iterate(self, state: _State) -> Iterate:
        return self._in_exact(state) if state.ended is None else state.ended

    def activity(self, state: _State) -> str:
        return f"{self.inner.activity(state.inner)}, {state.width:.3g} times as wide"

"""Proximal point method in the dual (Rockafellar 1976) for losses that are linear for most samples, as Huber's."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.points import Point, as_start, gap_estimate
from convexformer_solvers.program import Program

from .base import PrimalDualSolver
from .stage import Running, Stage, begun, stepped


@dataclasses.dataclass(frozen=True)
class ProximalDualConfig:
    """Accuracy and widths of proximal steps.

    Parameters
    ----------
    share : float, default=0.03
        Gap to which a step is solved, over that of the last; the first to a third of it over the null objective.
    narrower : float, default=0.85
        Factor on the width, less one, after a step that leaves over nine tenths of the gap.
    """

    share: float = 0.03
    narrower: float = 0.85


class _State(NamedTuple):
    inner: Running  # on the program of the proximal step
    width: float  # of the step's quadratic part, in units of the loss's own
    tol: float  # gap over the best constant model's objective to which the step is solved
    ended: Point | None = None  # of the program itself, at the end of the last step
    gap: float = math.inf  # its estimate
    least_gap: float = math.inf  # of the steps before


class ProximalDual(PrimalDualSolver):
    r"""Proximal steps in the dual, each solved by another algorithm as a program with a wider quadratic part.

    Where nearly all residuals of Huber's loss are in its linear parts it has hardly any curvature. A proximal step in
    its dual, :math:`u_{k+1} = \arg\max_u D(u) - \frac{w_k - 1}2 \|u - u_k\|^2`, is a program with Huber's loss of
    :math:`w_k` times the width and targets moved by :math:`(w_k - 1) u_k`. The first width holds half of the residuals
    of the best constant model; it shrinks where steps lower the gap no more. The stage `inner` solves the steps; the
    ``init_again`` of its algorithm gets the state of the last one, which differs in targets and width, too.
    """

    requires_of_loss = ("widened",)
    name = property(lambda self: f"proximal_dual({self.inner.algorithm.name})")

    def __init__(self, inner: Stage, config: ProximalDualConfig | None = None) -> None:
        self.inner, self.config = inner, config or ProximalDualConfig()

    def unmet_requirement(self, program: Program) -> str | None:
        return super().unmet_requirement(program) or self.inner.algorithm.unmet_requirement(program)

    def init_again(self, program: Program, start: Point, previous: _State | None) -> _State:
        inner = self._next_step(program, program.tail_length, *as_start(program, start), previous)
        return _State(inner, program.tail_length, self.config.share / 3)

    def _next_step(
        self, program: Program, width: float, coef: Tensor, pred: Tensor | None, previous: _State | None
    ) -> Running:
        """The inner stage at the start of a proximal step."""
        # Without a dual point from zero: slopes of own predictions may be at the ends of their range.
        slope = torch.zeros_like(program.y) if pred is None else program.loss.gradient(pred, program.y)
        loss, targets = program.loss.widened(program.y, slope, width)
        step = dataclasses.replace(program, y=targets, loss=loss, alpha=width * program.alpha)
        pred = None if pred is None else targets + width * (pred - program.y)
        return begun(self.inner, step, Point(coef, pred=pred), known=previous and previous.inner.inner)

    def step(self, program: Program, state: _State) -> _State:
        if state.ended is not None:
            state = self._after_step(program, state, state.ended)
        inner = stepped(state.inner)
        near = inner.gap is not None and abs(inner.gap) <= state.tol * inner.chain.original.null_value
        if near or inner.stage.algorithm.finished(inner.inner):
            ended = self._of_program(program, inner, state.width)
            return state._replace(inner=inner, ended=ended, gap=gap_estimate(program, ended))
        return state._replace(inner=inner)

    def _after_step(self, program: Program, state: _State, ended: Point) -> _State:
        gap = state.gap if state.gap > 0 else math.inf  # below zero it is rounding
        enough = gap <= 0.9 * state.least_gap
        width = state.width if enough else 1 + self.config.narrower * (state.width - 1)
        tol = min(self.config.share / 3, self.config.share * gap / program.null_value)
        inner = self._next_step(program, width, ended.coef, ended.pred, state)
        return _State(inner, width, tol, least_gap=min(gap, state.least_gap))

    @staticmethod
    def _of_program(program: Program, inner: Running, width: float) -> Point:
        """The point of the inner algorithm as one of the program itself."""
        point = inner.result()
        assert point.pred is not None
        assert point.correlation is not None
        pred = program.y + (point.pred - inner.chain.original.y) / width
        return point._replace(pred=pred, correlation=point.correlation / width)

    def point(self, program: Program, state: _State) -> Point:
        return state.ended or self._of_program(program, state.inner, state.width)

    def knows_gap(self, state: _State) -> bool:
        return state.ended is not None

    def activity(self, state: _State) -> str:
        return f"{state.inner.activity()}, {state.width:.3g} times as wide"

"""Programs without data: solvers that are asked for a gap rather than for a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from convexformer_solvers.algorithms.base import Solver
from convexformer_solvers.points import Point, gap_estimate, point_at
from convexformer_solvers.program import Program
from convexformer_solvers.rounding import SUM


@dataclass(frozen=True)
class BatchConfig:
    """Numbers of ``Batched``.

    Parameters
    ----------
    factor : float, default=0.2
        Share of the gap before to which a step lowers it.
    steps : int, default=500
        Steps of the solver in one of these at most.
    """

    factor: float = 0.2
    steps: int = 500


class _State(NamedTuple):
    inner: Any
    point: Point
    gap: float
    finished: bool = False


class Batched(Solver):
    """Another solver in steps that each lower the gap by a factor, for programs whose products are cheap.

    The gap is that of the coefficients and of the dual point of their own predictions, exact but for rounding: where a
    certificate costs far more than a step, there is one when it will succeed.

    Examples
    --------
    >>> from convexformer_solvers import Fista, check_solver
    >>> check_solver(Batched(Fista()))
    """

    reductions = property(lambda self: self.solver.reductions)
    name = property(lambda self: f"batched({self.solver.name})")

    def __init__(self, solver: Solver, config: BatchConfig | None = None) -> None:
        self.solver, self.config = solver, config or BatchConfig()

    def unmet_requirement(self, program: Program) -> str | None:
        return self.solver.unmet_requirement(program)

    def init(self, program: Program, start: Point) -> _State:
        return _with_gap(program, _State(self.solver.init(program, start), start, math.inf))

    def init_again(self, program: Program, start: Point, previous: _State) -> _State:
        return _with_gap(program, _State(self.solver.init_again(program, start, previous.inner), start, math.inf))

    def step(self, program: Program, state: _State) -> _State:
        return self.until(program, state, self.config.factor * abs(state.gap))

    def until(self, program: Program, state: _State, goal: float) -> _State:
        """The state after steps to a gap or to what rounding leaves of it, or after as many as there are at most."""
        for _ in range(self.config.steps):
            before, inner = state.gap, self.solver.step(program, state.inner)
            finished = self.solver.finished(inner)
            state = _with_gap(program, _State(inner, self.solver.point(program, inner), math.inf, finished))
            if finished or abs(state.gap) <= goal or abs(before) <= abs(state.gap) <= SUM * program.null_value:
                break
        return state

    def point(self, program: Program, state: _State) -> Point:
        return state.point

    def gap_estimate(self, program: Program, state: _State) -> float:
        return state.gap

    def finished(self, state: _State) -> bool:
        return state.finished

    def activity(self, state: _State) -> str:
        return self.solver.activity(state.inner)


def _with_gap(program: Program, state: _State) -> _State:
    exact = program.with_float64_targets()
    return state._replace(gap=gap_estimate(exact, point_at(exact, state.point.coef.to(exact.y))))

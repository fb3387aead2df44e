"""The default solver: the stages of a plan, each from the point of the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from convexformer_solvers.algorithms.base import Solver
from convexformer_solvers.algorithms.stage import Running, Stage, begun, begun_again, carried, goes_on, stepped
from convexformer_solvers.algorithms.working_set import WorkingSet
from convexformer_solvers.points import Point, completed, null_point
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.weights import Targets
from convexformer_solvers.validation import check_kind

from .config import AutoConfig
from .plan import plan

MakePlan = Callable[[Program, bool, AutoConfig], Sequence[Stage]]


class _State(NamedTuple):
    running: Running
    later: tuple[Stage, ...]
    outgrown: bool = False  # whether a working set has been given up
    best: tuple[float, Point] | None = None  # the end of an earlier stage, by objective; None before there is one
    ends: tuple[Point, ...] = ()  # of all earlier stages


class Auto(Solver):
    """The stages of ``plan``, each from the end of the one before.

    Where that is worse than the best constant model, a stage starts from the best end of those before it, or that
    model. The plan depends on the program and on the machine's rates, never on how long a run takes, so that runs can
    be repeated.

    Parameters
    ----------
    config : AutoConfig, optional
        Numbers that the plan goes by. Default: those of ``AutoConfig``.
    make_plan : callable, default=plan
        Called with a program, whether the start is the solution at another ``alpha`` of a path, and `config`; returns
        the stages. One of your own may put stages before or after those of ``plan``.

    Examples
    --------
    >>> Auto().name
    'auto'
    """

    name = "auto"
    reductions = (Targets(),)

    def __init__(self, config: AutoConfig | None = None, *, make_plan: MakePlan = plan) -> None:
        self.config, self.make_plan = config or AutoConfig(), make_plan
        check_kind("config", self.config, AutoConfig, "AutoConfig()")

    def _plan(self, program: Program, warm: bool) -> tuple[Stage, ...]:
        made = self.make_plan(program, warm, self.config)
        stages = tuple(made) if isinstance(made, Iterable) else ()
        if not stages or not all(isinstance(stage, Stage) for stage in stages):
            raise TypeError(f"make_plan must return at least one Stage, and nothing else, got {stages or made!r}")
        return stages

    def init(self, program: Program, start: Point) -> _State:
        first, *later = self._plan(program, warm=False)
        return _State(begun(first, program, start), tuple(later))

    def init_again(self, program: Program, start: Point, previous: _State) -> _State:
        stages = self._plan(program, warm=True)
        if previous.outgrown:
            stages = tuple(stage for stage in stages if not isinstance(stage.algorithm, WorkingSet))
        before, known = previous.running, previous.running.stage
        kind = type(known.algorithm), known.algorithm.name, known.reductions
        for place, stage in enumerate(stages):
            if (type(stage.algorithm), stage.algorithm.name, stage.reductions) == kind:
                running = begun_again(stage, program, start, before)
                return _State(running, stages[place + 1 :], previous.outgrown)
        return _State(begun(stages[0], program, start), stages[1:], previous.outgrown)

    def step(self, program: Program, state: _State) -> _State:
        if state.later and state.running.is_over:
            state = _next(program, state)
        try:
            return state._replace(running=stepped(state.running))
        except torch.linalg.LinAlgError:  # of numbers that are too large
            if not state.later:
                raise
            return _next(program, state)

    def point(self, program: Program, state: _State) -> Point:
        return state.running.result()

    def gap_estimate(self, program: Program, state: _State) -> float | None:
        return state.running.gap

    def earlier_points(self, state: _State) -> tuple[Point, ...]:
        return state.ends

    def activity(self, state: _State) -> str:
        return f"{self.name}: {state.running.activity()}"

    def finished(self, state: _State) -> bool:
        return not state.later and state.running.is_over


def _next(program: Program, state: _State) -> _State:
    """The next stage, from where this one stopped."""
    before, (stage, *later) = state.running, state.later
    if later and goes_on(stage, before) and before.n_steps >= stage.max_steps:
        stage, *later = later
    try:
        return _begun(program, stage, tuple(later), state)
    except torch.linalg.LinAlgError:  # of numbers that are too large
        if not later:
            raise
        return _next(program, state._replace(later=tuple(later)))


def _begun(program: Program, stage: Stage, later: tuple[Stage, ...], state: _State) -> _State:
    """A stage at its first step."""
    before = state.running
    if goes_on(stage, before) and before.best is not None:
        return state._replace(running=carried(stage, program, before), later=later)
    algorithm = before.stage.algorithm
    outgrown = state.outgrown or (isinstance(algorithm, WorkingSet) and not algorithm.is_exact(before.inner))
    start = completed(program, before.result())
    value = float(program.primal(start.coef, start.intercept))
    lowest, best = state.best or (program.null_value, null_point(program))
    if value <= lowest:
        lowest, best = value, start
    ends = (*state.ends, start)
    if not value <= program.null_value:  # an algorithm that is given up may have diverged
        start = best
    return _State(begun(stage, program, start, before), later, outgrown, (lowest, best), ends)

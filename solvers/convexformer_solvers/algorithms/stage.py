"""Stages: an algorithm on a reduced program, with a polish of its points and a rule for when to give it up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from convexformer_solvers.points import Point, gap_estimate
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.base import Chain, Reduction
from convexformer_solvers.rounding import SINGLE
from convexformer_solvers.validation import check_kind

from .base import PrimalDualSolver, Solver
from .polish import PolishConfig, polished


@dataclass(frozen=True)
class Patience:
    """When an algorithm that no longer gets anywhere is given up: where its gap does not halve in time.

    Parameters
    ----------
    steps : int, default=30
        Steps within which the estimated gap must halve.
    share : float, default=0.25
        The same as a share of the steps so far, where that is more.
    grace : float, default=0
        Work, in steps on all blocks, for which this does not count, as other algorithms would take as long to begin.
        The first estimate must have halved in half of that.
    """

    steps: int = 30
    share: float = 0.25
    grace: float = 0.0


@dataclass(frozen=True)
class Stage:
    """One stage of a plan.

    Parameters
    ----------
    algorithm : Solver
        What runs.
    why : str
        Why it is in the plan, for those who read it.
    max_steps : float, default=inf
        Steps at most.
    reductions : tuple of Reduction, optional
        What is made of the program first. Default: the ``reductions`` of the algorithm.
    polish : PolishConfig, optional
        When points of a ``PrimalDualSolver`` are polished. Default: never.
    patience : Patience, optional
        When a ``PrimalDualSolver`` is given up. Default: when it is finished, or its steps are over.
    carries : bool, default=False
        Whether it goes on from the state in which the same algorithm, in the stage before, last reached a goal of its
        `patience`. The steps of that stage count. The algorithm needs a method ``carried_on``, as that of ``Admm``.

    Raises
    ------
    TypeError
        If ``algorithm`` is no solver, or not one that ``polish``, ``patience`` or ``carries`` is for.

    Examples
    --------
    >>> from convexformer_solvers import Auto, Fista, plan
    >>> first = Stage(Fista(), "to begin with", max_steps=50)
    >>> solver = Auto(make_plan=lambda program, warm, config: (first, *plan(program, warm, config)))
    """

    algorithm: Solver
    why: str
    max_steps: float = math.inf
    reductions: tuple[Reduction, ...] = None  # type: ignore[assignment]  # until __post_init__
    polish: PolishConfig | None = None
    patience: Patience | None = None
    carries: bool = False

    def __post_init__(self) -> None:
        check_kind("algorithm", self.algorithm, Solver, "Fista()")
        if self.polish or self.patience:
            check_kind("algorithm of a stage with polish or patience", self.algorithm, PrimalDualSolver, "Admm()")
        if self.carries and not hasattr(self.algorithm, "carried_on"):
            raise TypeError(f"algorithm of a stage that carries must define carried_on, got {self.algorithm!r}")
        if self.reductions is None:
            object.__setattr__(self, "reductions", tuple(self.algorithm.reductions))


class Polishing(NamedTuple):
    """Book-keeping of the polishes of a stage."""

    next: int = 0  # step of the next one, at the earliest
    wait: int = 0  # steps from one to the next, at least
    near: float = 0.0  # gap over the best constant model's objective from which on they come
    helps: bool = False  # whether the last one halved the gap
    n_polishes: int = 0
    smallest: float = math.inf  # gap of a polished point


class Running(NamedTuple):
    """A stage with the state of its algorithm."""

    stage: Stage
    chain: Chain  # the program, and what the reductions have made of it
    inner: Any  # the algorithm's state on the reduced program
    n_steps: int = 0
    gap: float | None = None  # estimate at the last step; infinite: none there, None: the algorithm has none
    point: Point | None = None  # the polished one of the last step, of the chain's program in double precision
    polishing: Polishing = Polishing()
    best: Any = None  # state of the algorithm that last reached a goal
    goal: float = math.inf  # gap of which half is the next goal
    until: float = math.inf  # step until which that must be reached

    def activity(self) -> str:
        """What is going on, in a few words."""
        precision = str(self.chain.program.map.dtype).removeprefix("torch.")
        polish = ", polished" if self.point is not None else ""
        return f"{self.stage.algorithm.activity(self.inner)} in {precision}{polish}"

    @property
    def is_over(self) -> bool:
        """Whether the next stage has its turn."""
        out_of_steps = self.n_steps >= min(self.stage.max_steps, self.until)
        return out_of_steps or self.stage.algorithm.finished(self.inner)

    def result(self) -> Point:
        """The point so far, of the stage's own program."""
        if self.point is not None:
            return self.chain.in_double.invert(self.point)
        return self.chain.invert(self.stage.algorithm.point(self.chain.program, self.inner))


def begun(stage: Stage, program: Program, start: Point, before: Running | None = None, known: Any = None) -> Running:
    """The stage at a starting point, with what the stage `before` has made of the program.

    `known` is a state for ``init_again``: that of ``Solver.on_other_blocks``, or of the last step of ``ProximalDual``.
    """
    return _started(stage, Chain.of(program, stage.reductions, None if before is None else before.chain), start, known)


def goes_on(stage: Stage, before: Running) -> bool:
    """Whether a stage carries a state of the stage before, which is that of another algorithm where this is another."""
    return stage.carries and type(stage.algorithm) is type(before.stage.algorithm)


def carried(stage: Stage, program: Program, before: Running) -> Running:
    """The stage from the state of the same algorithm in the stage before."""
    chain = Chain.of(program, stage.reductions, before.chain)
    inner = stage.algorithm.carried_on(chain.program, before.best)  # type: ignore[attr-defined]
    return before._replace(stage=stage, chain=chain, inner=inner, point=None, best=None, until=math.inf)


def begun_again(stage: Stage, program: Program, start: Point, previous: Running) -> Running:
    """The stage at another alpha, from what it knows of the last one."""
    return _started(stage, previous.chain.with_alpha(program.alpha), start, previous.inner, previous)


def _started(stage: Stage, chain: Chain, start: Point, known: Any, previous: Running | None = None) -> Running:
    """A stage on the easiest program of a chain, and when its points are polished first."""
    algorithm, config, first = stage.algorithm, stage.polish, chain.restrict(start)
    inner = algorithm.init(chain.program, first) if known is None else algorithm.init_again(chain.program, first, known)
    if config is None:
        return Running(stage, chain, inner)
    # Near alpha_max few steps suffice, and a polish tells rounding from zero.
    at, wait = config.wait if bool(start.coef.any()) else min(2, config.wait), config.wait
    if previous is None:
        return Running(stage, chain, inner, polishing=Polishing(at, wait, config.near))
    before = previous.polishing
    if before.n_polishes > 0:
        wait = max(1, wait // 2)
        at = min(max(wait, previous.n_steps - (before.n_polishes == 1)), 2 * config.wait)
    return Running(stage, chain, inner, polishing=Polishing(at, wait, config.near_on_paths, before.helps))


def stepped(state: Running) -> Running:
    """The stage after one step of its algorithm, with a polish where one is due."""
    stage, program = state.stage, state.chain.program
    inner, n_steps = stage.algorithm.step(program, state.inner), state.n_steps + 1
    state = state._replace(inner=inner, n_steps=n_steps, point=None)
    if not isinstance(stage.algorithm, PrimalDualSolver):
        return state._replace(gap=stage.algorithm.gap_estimate(program, inner))
    # Where polishes help, nothing ends before the next.
    asks = n_steps >= state.polishing.next or not state.polishing.helps
    watches = stage.patience is not None and n_steps % (stage.polish.wait if stage.polish else 1) == 0
    gap = _gap(state) if asks or watches else math.inf
    state = _polished(state._replace(gap=gap)) if asks else state._replace(gap=math.inf)
    return _watched(state, state.gap if asks and state.gap is not None else gap)


def _watched(state: Running, gap: float) -> Running:
    """The state with the next goal where the last one has been reached; its time is over where nothing is a number."""
    patience, n_steps = state.stage.patience, state.n_steps
    if patience is None or gap == math.inf:
        return state
    if math.isnan(gap):
        return state._replace(until=n_steps)
    if abs(gap) > 0.5 * state.goal:
        return state
    grace = patience.grace if state.goal < math.inf else 0.5 * patience.grace
    until = max(n_steps + max(patience.steps, patience.share * n_steps), grace)
    return state._replace(best=state.inner, goal=abs(gap), until=until)


def _gap(state: Running) -> float:
    """Estimate of the gap, in double precision."""
    algorithm, chain = state.stage.algorithm, state.chain
    assert isinstance(algorithm, PrimalDualSolver)
    if chain.program.y.dtype == torch.float64 or not algorithm.knows_gap(state.inner):
        return algorithm.gap_estimate(chain.program, state.inner)
    point = chain.point_in_double(algorithm.point(chain.program, state.inner))
    return gap_estimate(chain.in_double.program, point)


def _polished(state: Running) -> Running:
    """The state with a polished point where one is due and has the smaller gap."""
    config, record, gap = state.stage.polish, state.polishing, state.gap
    assert gap is not None
    program = state.chain.in_double.program
    if config is None or state.n_steps < record.next or not abs(gap) <= record.near * program.null_value:
        return state
    point = state.chain.point_in_double(state.stage.algorithm.point(state.chain.program, state.inner))
    # Products in single precision are enough until points are polished to what it tells apart.
    is_rough = record.smallest > SINGLE * program.null_value
    polishable = state.chain.rounded if is_rough else program
    better = polished(polishable, point, max(config.patience, 2 * config.share * state.n_steps))
    found = math.inf if better is None else abs(gap_estimate(program, better))
    # A gap below zero is that of a correlation that is not the dual point's; polished points have their own.
    before = gap if gap > 0 else math.inf
    wait, helps = max(record.wait, math.ceil(config.share * state.n_steps)), found < 0.5 * before
    if found < before:
        state = state._replace(point=better, gap=found)
    following, smallest = state.n_steps + (wait if helps else 2 * wait), min(record.smallest, found)
    n_polishes = record.n_polishes + 1
    record = record._replace(next=following, helps=helps, n_polishes=n_polishes, smallest=smallest)
    return state._replace(polishing=record)

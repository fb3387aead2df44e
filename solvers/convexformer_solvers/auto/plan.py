"""The default solver: picks algorithms by what the program is and changes them by how it goes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from convexformer_solvers.algorithms.admm.iteration import Admm
from convexformer_solvers.algorithms.admm_newton import AdmmNewton, admm_work
from convexformer_solvers.algorithms.base import Point, Solver, null_point
from convexformer_solvers.algorithms.block_descent import BlockDescent
from convexformer_solvers.algorithms.constant import Constant
from convexformer_solvers.algorithms.first_steps import FirstSteps, nearly_independent
from convexformer_solvers.algorithms.fista import Fista
from convexformer_solvers.algorithms.polish import Polished
from convexformer_solvers.algorithms.proximal_dual import ProximalDual
from convexformer_solvers.algorithms.semismooth_newton import SemismoothNewton
from convexformer_solvers.algorithms.smoothing_newton import SmoothingNewton
from convexformer_solvers.algorithms.working_set import WorkingSet
from convexformer_solvers.linalg.eigenvalue_ratio import some_samples_tell
from convexformer_solvers.linalg.smoothing_systems import block_numbers, newton_work
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.center import Centered
from convexformer_solvers.reductions.precision import MixedPrecision

# Side of the largest matrix to factorise beside the data.
_LARGEST_SIDE = 12_000
# Alternating steps, with Newton steps among them, before other solvers have their turn: on a separable loss, on the
# squared loss, and on a cross-entropy with and without a Newton method.
_FIRST_STEPS = 150
_FIRST_STEPS_QUADRATIC = 400
_FIRST_STEPS_COUPLED = 250
_FIRST_STEPS_ALONE = 400
# Accelerated gradient steps after that, on a cross-entropy.
_FISTA_STEPS = 400
# The last on a loss of unbounded curvature, and the Newton steps that follow.
_FISTA_STEPS_BEFORE_NEWTON = 150
_NEWTON_STEPS = 100
# Turns that gradient and alternating steps take after that, before the last: the latter stand still where curvatures
# jump and the regularisation is weak, or groups differ widely in size, the former where features are correlated.
_TURNS = ((400, 400), (1000, 2000))
# Smaller side of the data of one output up to which Newton steps are among them, outputs being solved one by one.
_SMALL_NEWTON_SIDE = 2000
# Steps that ``SmoothingNewton`` takes, about, and at most.
_SMOOTHING_STEPS = 25
_MOST_SMOOTHING_STEPS = 100
# Alternating steps in the time of which these must be done; those that come before at most; and those that do where
# that is no longer: a number, as that must not change as samples are repeated, which is to be the same as weights.
_SMOOTHING_PATIENCE = 2000
_MOST_BEFORE_SMOOTHING = 400
_BEFORE_QUICK_SMOOTHING = 75
# Steps of a long first stage, after that, before another turn.
_BETWEEN_SMOOTHING = 725
# The same before the last stage, which goes on without end; and the steps of that which come before in any case.
_LATE_SMOOTHING_PATIENCE = 20_000
_BEFORE_LATE_SMOOTHING = 1000
# Numbers that its matrices of blocks hold at most.
_MOST_NUMBERS = 2**24
# What the calls of an alternating step take, and those of one of its own for each output that is separate, as work.
_CALLS = 2.0**24
_SMOOTHING_CALLS = 2.0**25
# From this length of the loss's linear parts on, of which nothing but proximal steps makes much; and steps of those.
_LONG_TAILS = 60.0
_PROXIMAL_STEPS = 3000
# A working set pays where the Gram matrix of all features takes as long as so many products with the data.
_PRODUCTS = 60
# So many of them at least make other first steps worth a look at how independent the features are.
_PRODUCTS_BEFORE = 20


# The solvers of all plans; each knows its own states by being the same object. A polish takes as long as two to four
# iterations in single precision, and those between two leave it more to do.
_CONSTANT, _FIRST, _FISTA, _BLOCKS = Constant(), FirstSteps(), Fista(), Centered(BlockDescent())
_NEWTON, _SMOOTHING = Centered(SemismoothNewton()), Centered(SmoothingNewton())
_ALTERNATING = Polished(Centered(AdmmNewton(MixedPrecision())), least_wait=4)
_PROXIMAL = ProximalDual(_ALTERNATING)
# A set's columns are few, and centred in a copy; with the squared loss its Gram matrix is all that is kept of them.
_GROWING_SET = Polished(Centered(WorkingSet(Polished(Centered(AdmmNewton(MixedPrecision()))))))
_GROWING_SET_QUADRATIC = Polished(Centered(WorkingSet(Polished(AdmmNewton(Admm())))))
# Those that end where they do not pay.
_SELF_ENDING = (_FIRST, _BLOCKS, _GROWING_SET, _GROWING_SET_QUADRATIC)


class _Stage(NamedTuple):
    solver: Solver
    n_steps: float  # at most
    on_working_set: bool = False
    afresh: bool = False  # from the best constant model rather than the point of the stage before


class _State(NamedTuple):
    stage: _Stage
    inner: Any
    later: tuple[_Stage, ...]
    steps_left: float
    outgrown: bool  # whether a working set has become too wide

    @property
    def solver(self) -> Solver:
        return self.stage.solver


class Auto(Solver):
    """A plan of solvers, each of which starts from the point that the one before hands over.

    ===================================  ==============================================================================
    program                              stages
    ===================================  ==============================================================================
    ``alpha`` from ``alpha_max`` on      the best constant model
    features nearly independent          ``FirstSteps``, where these end before a Gram matrix is formed and factorised,
                                         or on a cross-entropy; gated ones and others of slightly uneven sizes too,
                                         where the regularisation is strong
    squared loss, costly Gram matrix     a growing working set of blocks: ``BlockDescent`` with one output and the
                                         group-l2 penalty, else ``Admm``; until the set is too wide
    other separable losses on a path     ``Admm`` on a working set
    both sides of the data too large     ``Fista``
    Huber's loss, targets far away       ``ProximalDual``
    cross-entropy                        ``Admm`` with ``SupportNewton`` for 250 steps and 400 steps of ``Fista``; with
                                         other penalties than group-l2 400 alternating steps, on more than 500
                                         correlated features
    then, and everything else            turns of growing length: ``Admm`` with ``SemismoothNewton``, these alone, on
                                         small data, and ``Fista``
    unbounded curvature                  150 steps of ``Fista``, and Newton steps and ``Fista`` in turns
    penalties that are no sum of blocks  ``Fista``
    small and medium-sized data          ``SmoothingNewton`` after the first of these, of which 75 steps are enough
                                         where it takes little time, or before the last where it takes long
    ===================================  ==============================================================================

    ``Admm`` stands for alternating directions in ``MixedPrecision``, which do not mind correlated features and serve
    every penalty, all outputs and gates at once, with Newton steps once the solution is near and the support narrow
    (``AdmmNewton``), and iterates that are ``Polished`` with the group-l2 penalty. On small data, and where means
    dominate, these and Newton steps alone take features ``Centered``. A stage starts from the point of the one before
    where that is better than the best constant model.

    The plan depends on the program and the iterates alone, never on a clock, so that runs can be repeated.

    Examples
    --------
    >>> Auto().name
    'auto'
    """

    @property
    def name(self) -> str:
        return "auto"

    def init(self, program: Program, start: Point) -> _State:
        return _started(_plan(program, warm=False), program, start)

    def init_again(self, program: Program, start: Point, previous: _State) -> _State:
        plan = _plan(program, warm=True)
        if previous.solver is _SMOOTHING:
            plan = _with_smoothing_at_once(program, plan, previous)
        if previous.outgrown:
            plan = tuple(stage for stage in plan if not stage.on_working_set)
        if plan[0].solver is not previous.solver:
            return _started(plan, program, start, previous.outgrown)
        inner = plan[0].solver.init_again(program, start, previous.inner)
        return _State(plan[0], inner, plan[1:], plan[0].n_steps, previous.outgrown)

    def step(self, program: Program, state: _State) -> _State:
        if state.later and (state.steps_left == 0 or state.solver.finished(state.inner)):
            state = _next(program, state)
        try:
            inner = state.solver.step(program, state.inner)
        except torch.linalg.LinAlgError:  # of numbers that are too large
            if not state.later:
                raise
            return _next(program, state)
        return state._replace(inner=inner, steps_left=state.steps_left - 1)

    def point(self, program: Program, state: _State) -> Point:
        return state.solver.point(program, state.inner)

    def estimated_gap(self, state: _State) -> float | None:
        return state.solver.estimated_gap(state.inner)

    def activity(self, state: _State) -> str:
        return f"{self.name}: {state.solver.activity(state.inner)}"

    def finished(self, state: _State) -> bool:
        return not state.later and state.solver.finished(state.inner)


def _with_smoothing_at_once(program: Program, plan: tuple[_Stage, ...], previous: _State) -> tuple[_Stage, ...]:
    """The plan, from ``SmoothingNewton`` on where that took less time than the steps before it, which may fail."""
    before = tuple(takewhile(lambda stage: stage.solver is not _SMOOTHING, plan))
    n_before = sum(stage.n_steps for stage in before if stage.solver not in _SELF_ENDING)
    n_taken = previous.stage.n_steps - previous.steps_left
    as_steps = n_taken * _steps_in_the_time_of_smoothing(program) / _SMOOTHING_STEPS
    return (plan[len(before) :] or plan) if as_steps <= n_before else plan


def _started(plan: tuple[_Stage, ...], program: Program, start: Point, outgrown: bool = False) -> _State:
    return _State(plan[0], plan[0].solver.init(program, start), plan[1:], plan[0].n_steps, outgrown)


def _next(program: Program, state: _State) -> _State:
    """The next stage, from where this one stopped."""
    outgrown = state.outgrown or state.stage.on_working_set
    return _started(state.later, program, _handed_over(program, state), outgrown)


def _handed_over(program: Program, state: _State) -> Point:
    """Where the next stage starts: from the best constant model where it asks for that or nothing better is known."""
    if state.later[0].afresh:
        return null_point(program)
    point = state.solver.handover(program, state.inner)
    # A solver that is given up may have diverged.
    better = float(program.primal(point.coef, point.intercept)) <= program.null_value
    return point if better else null_point(program)


def _plan(program: Program, warm: bool) -> tuple[_Stage, ...]:
    """The stages for a program; `warm`: from the solution of another alpha."""
    constant = [_Stage(_CONSTANT, math.inf)] if program.alpha >= program.alpha_max else []
    return *constant, *_with_smoothing(program, _below_alpha_max(program, warm))


def _below_alpha_max(program: Program, warm: bool) -> Iterator[_Stage]:
    """The stages for a program whose solution is not zero."""
    if not math.isfinite(program.loss.smoothness):
        yield from _unbounded_curvature(program)
    elif not program.penalty.block_separable:  # the size of groups says nothing of a good rho
        yield _Stage(_FISTA, math.inf)
    elif _factorises(program) and program.tail_length > _LONG_TAILS:
        yield _Stage(_PROXIMAL, _PROXIMAL_STEPS)
        yield from _in_turns(program)
    else:
        first = _first_on_separable if program.loss.output_separable else _first_on_coupled
        yield from first(program, warm)
        yield from _in_turns(program) if _factorises(program) else [_Stage(_FISTA, math.inf)]


def _factorises(program: Program) -> bool:
    """Whether the Gram matrix on the smaller side of the data may be factorised."""
    return program.map.smaller_side <= _LARGEST_SIDE


def _unbounded_curvature(program: Program) -> Iterator[_Stage]:
    """Accelerated gradient steps, and Newton steps from there where they apply."""
    if _NEWTON.unmet_requirement(program) is None and program.map.n_samples <= _LARGEST_SIDE:
        newton = _Stage(_NEWTON, _NEWTON_STEPS)
        yield _Stage(_FISTA, _FISTA_STEPS_BEFORE_NEWTON)
        yield newton
        for n_steps, _ in _TURNS:
            yield _Stage(_FISTA, n_steps)
            yield newton
    yield _Stage(_FISTA, math.inf)


def _first_on_coupled(program: Program, warm: bool) -> Iterator[_Stage]:
    """First steps on a loss that couples the outputs: by how much the features are correlated."""
    has_newton = program.penalty.euclidean
    looks = some_samples_tell(program) and not (warm and has_newton)
    quick = looks and nearly_independent(program)
    if _factorises(program):
        if quick and not warm:
            yield _Stage(_FIRST, math.inf)
        if has_newton:
            yield _Stage(_ALTERNATING, _FIRST_STEPS_COUPLED)
        elif looks and not quick:
            yield _Stage(_ALTERNATING, _FIRST_STEPS_ALONE)
    yield _Stage(_FISTA, _FISTA_STEPS)


def _first_on_separable(program: Program, warm: bool) -> Iterator[_Stage]:
    """First steps on a loss of each output by itself: gradient steps where these are quick, then a working set."""
    if not warm and _products_of_gram(program) > _PRODUCTS_BEFORE and nearly_independent(program):
        yield _Stage(_FIRST, math.inf)
    yield from _working_set(program, warm)


def _working_set(program: Program, warm: bool) -> Iterator[_Stage]:
    """A growing set of blocks, where the Gram matrix of all features is costly, and along paths."""
    quadratic = program.loss.quadratic
    costly = quadratic and _products_of_gram(program) > _PRODUCTS
    if costly and _BLOCKS.unmet_requirement(program) is None:
        yield _Stage(_BLOCKS, math.inf, on_working_set=True)
    elif costly or warm:
        # Other losses form the Gram matrix of the set again with each curvature.
        growing, n_steps = (_GROWING_SET_QUADRATIC, math.inf) if quadratic else (_GROWING_SET, _FIRST_STEPS)
        yield _Stage(growing, n_steps, on_working_set=True)


def _with_smoothing(program: Program, stages: Iterable[_Stage]) -> Iterator[_Stage]:
    """The stages, and ``SmoothingNewton`` after the first, which is cut short where that takes little time.

    Where it takes long it comes before the last.
    """
    steps_in_its_time = _steps_in_the_time_of_smoothing(program)
    if _SMOOTHING_PATIENCE < steps_in_its_time <= _LATE_SMOOTHING_PATIENCE:
        yield from _with_late_smoothing(tuple(stages))
        return
    pays = steps_in_its_time <= _SMOOTHING_PATIENCE
    most = _BEFORE_QUICK_SMOOTHING if steps_in_its_time <= _MOST_BEFORE_SMOOTHING else _MOST_BEFORE_SMOOTHING
    for stage in stages:
        if not pays or stage.solver in _SELF_ENDING:
            yield stage
            continue
        n_steps = min(stage.n_steps, most)
        yield stage._replace(n_steps=n_steps)
        yield _Stage(_SMOOTHING, _MOST_SMOOTHING_STEPS)
        rest = stage.n_steps - n_steps
        if rest > _BETWEEN_SMOOTHING:  # from so far, and no nearer, there may be no other end
            yield stage._replace(n_steps=_BETWEEN_SMOOTHING)
            yield _Stage(_SMOOTHING, _MOST_SMOOTHING_STEPS)
            rest -= _BETWEEN_SMOOTHING
        if rest > 0:
            yield stage._replace(n_steps=rest)
        pays = False


def _with_late_smoothing(stages: tuple[_Stage, ...]) -> Iterator[_Stage]:
    """The stages, and ``SmoothingNewton`` before the last, of which a part comes before where there is no other."""
    *before, last = stages
    yield from before
    if all(stage.solver in _SELF_ENDING for stage in before):
        yield last._replace(n_steps=_BEFORE_LATE_SMOOTHING)
    yield _Stage(_SMOOTHING, _MOST_SMOOTHING_STEPS)
    yield last


def _steps_in_the_time_of_smoothing(program: Program) -> float:
    """Alternating steps that take as long as those of ``SmoothingNewton``; inf where it does not apply."""
    if _SMOOTHING.unmet_requirement(program) is not None or block_numbers(program) > _MOST_NUMBERS:
        return math.inf
    n_parts = program.y.shape[1] if program.outputs_separate else 1
    work = _SMOOTHING_STEPS * (newton_work(program) + n_parts * _SMOOTHING_CALLS)
    return work / (admm_work(program) + _CALLS)


def _products_of_gram(program: Program) -> float:
    """Products with the data in the time of which the Gram matrix of all features is formed."""
    return program.map.gram_work() / program.map.product_work(program.y.shape[1])


def _in_turns(program: Program) -> Iterator[_Stage]:
    """Alternating and accelerated gradient steps, and Newton steps where they apply and cost little."""
    work = program.map.smaller_side**3 * program.y.shape[1]
    takes_newton_steps = _NEWTON.unmet_requirement(program) is None and work <= _SMALL_NEWTON_SIDE**3
    yield _Stage(_ALTERNATING, _FIRST_STEPS_QUADRATIC if program.loss.quadratic else _FIRST_STEPS)
    if takes_newton_steps:  # where curvatures jump, points of other solvers that are not near lead it astray
        yield _Stage(_NEWTON, _NEWTON_STEPS, afresh=True)
    for n_gradient_steps, n_steps in _TURNS:
        yield _Stage(_FISTA, n_gradient_steps)
        if takes_newton_steps:
            yield _Stage(_NEWTON, _NEWTON_STEPS)
        yield _Stage(_ALTERNATING, n_steps)
    yield _Stage(_FISTA, math.inf)

"""The default solver: picks algorithms by what the program is and changes them by how it goes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from .admm import Admm
from .admm_newton import AdmmNewton
from .block_descent import BlockDescent, applies
from .constant import Constant
from .first_steps import FirstSteps, nearly_independent
from .fista import Fista
from .mixed_precision import MixedPrecision
from .polish import Polished
from .program import Program
from .proximal_dual import ProximalDual
from .semismooth import SemismoothNewton, newton_applies
from .solver import Point, Solver, null_point
from .spread import some_samples_tell
from .working_set import WorkingSet

# Side of the largest matrix to factorise beside the data.
_LARGEST_SIDE = 12_000
# Steps on a loss that is not quadratic before other solvers take over: alternating ones with Newton steps, the same on
# a cross-entropy, with and without a Newton method, and accelerated gradient steps.
_FIRST_STEPS = 150
_FIRST_STEPS_COUPLED = 250
_FIRST_STEPS_QUADRATIC = 400
_FIRST_STEPS_ALONE = 400
_FISTA_STEPS = 400
# The last on a loss of unbounded curvature, and the Newton steps that follow.
_FISTA_STEPS_BEFORE_NEWTON = 150
_NEWTON_STEPS = 40
# Turns that gradient and alternating steps take after that on a loss that is not quadratic, before the last: the latter
# stand still where curvatures jump and the regularisation is weak, the former where features are correlated.
_TURNS = ((400, 400), (1000, 2000))
# Smaller side of the data of one output up to which Newton steps are among them, outputs being solved one by one.
_SMALL_NEWTON_SIDE = 2000
# From this length of the loss's linear parts on, of which nothing but proximal steps makes much; and steps of those.
_LONG_TAILS = 60.0
_PROXIMAL_STEPS = 3000
# A working set pays where the Gram matrix of all features takes as long as so many products with the data.
_PRODUCTS = 60
# So many of them at least make other first steps worth a look at how independent the features are.
_PRODUCTS_BEFORE = 20


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

    - Losses of bounded curvature and penalties that are a sum over blocks, from ``alpha_max`` on: the best constant
      model.
    - A separable loss of bounded curvature and data whose smaller side can be factorised: ``Admm``, whose iterations
      do not mind correlated features and serve every penalty, all outputs and gates at once, in ``MixedPrecision``;
      finished by ``SemismoothNewton`` once the rough gap is below 3e-2 of the reference and the support is narrow.
      With the group-l2 penalty its iterates are ``Polished``.
    - The same where the features are nearly independent and their Gram matrix takes a while: ``FirstSteps`` before.
    - The squared loss where the Gram matrix of all features would be costly: on a growing working set of blocks first,
      whose Gram matrix takes the place of the samples; with one output and the group-l2 penalty by ``BlockDescent``,
      until the set gets too wide, else by the same solvers. Along a path every separable loss starts each
      alpha on a working set, until an alpha outgrows it.
    - A cross-entropy whose features are not much correlated starts with ``FirstSteps``.
    - A cross-entropy is finished by ``SupportNewton`` instead. Where that has not ended the matter within 250 steps:
      400 steps of ``Fista``, and the above from its point on. With other penalties than group-l2, for which there is
      no Newton method, 400 alternating steps come first on more than 500 features, unless these are nearly independent.
    - On losses that are not quadratic all of these have a limited number of steps, after which gradient steps, Newton
      steps where they apply to small data, first from scratch, and alternating ones take turns of growing length. A
      turn starts from the point of the one before where that is better than the best constant model.
    - Else, and with penalties that are no sum over blocks, ``Fista``; for losses of unbounded curvature 150 steps of
      it, and Newton steps from there.

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
        if previous.outgrown:
            plan = tuple(stage for stage in plan if not stage.on_working_set)
        if plan[0].solver.name != previous.solver.name:
            return _started(plan, program, start, previous.outgrown)
        inner = plan[0].solver.init_again(program, start, previous.inner)
        return _State(plan[0], inner, plan[1:], plan[0].n_steps, previous.outgrown)

    def step(self, program: Program, state: _State) -> _State:
        if state.later and (state.steps_left == 0 or state.solver.finished(state.inner)):
            outgrown = state.outgrown or state.stage.on_working_set
            state = _started(state.later, program, _handed_over(program, state), outgrown)
        return state._replace(inner=state.solver.step(program, state.inner), steps_left=state.steps_left - 1)

    def point(self, program: Program, state: _State) -> Point:
        return state.solver.point(program, state.inner)

    def estimated_gap(self, state: _State) -> float | None:
        return state.solver.estimated_gap(state.inner)

    def activity(self, state: _State) -> str:
        return f"{self.name}: {state.solver.activity(state.inner)}"

    def finished(self, state: _State) -> bool:
        return not state.later and state.solver.finished(state.inner)


def _started(plan: tuple[_Stage, ...], program: Program, start: Point, outgrown: bool = False) -> _State:
    return _State(plan[0], plan[0].solver.init(program, start), plan[1:], plan[0].n_steps, outgrown)


def _handed_over(program: Program, state: _State) -> Point:
    """Where the next stage starts: from the best constant model where it asks for that or nothing better is known."""
    if state.later[0].afresh:
        return null_point(program)
    point = state.solver.handover(program, state.inner)
    # A solver that is given up may have diverged.
    better = float(program.primal(point.coef, point.intercept)) <= program.null_value
    return point if better else null_point(program)


def _polished_admm() -> Polished:
    # A polish takes as long as two to four iterations in single precision, and those between two leave it more to do.
    return Polished(AdmmNewton(MixedPrecision()), least_wait=4)


def _plan(program: Program, warm: bool) -> tuple[_Stage, ...]:
    forever = math.inf
    if not math.isfinite(program.loss.smoothness):
        if not newton_applies(program) or program.map.n_samples > _LARGEST_SIDE:
            return (_Stage(Fista(), forever),)
        newton = _Stage(SemismoothNewton(), _NEWTON_STEPS)
        turns = (stage for n_steps, _ in _TURNS for stage in (_Stage(Fista(), n_steps), newton))
        return _Stage(Fista(), _FISTA_STEPS_BEFORE_NEWTON), newton, *turns, _Stage(Fista(), forever)
    if not program.penalty.by_block:  # the size of groups says nothing of a good rho
        return (_Stage(Fista(), forever),)
    plan = []
    if program.alpha >= program.alpha_max:
        plan.append(_Stage(Constant(), forever))
    small = program.map.smaller_side <= _LARGEST_SIDE
    if small and program.tail_length > _LONG_TAILS:
        return *plan, _Stage(ProximalDual(_polished_admm()), _PROXIMAL_STEPS), *_in_turns(program)
    if not program.loss.separable:
        has_newton = program.penalty.euclidean
        looks = some_samples_tell(program) and not (warm and has_newton)
        quick = looks and nearly_independent(program)
        if quick and small and not warm:
            plan.append(_Stage(FirstSteps(), forever))
        if small and has_newton:
            plan.append(_Stage(_polished_admm(), _FIRST_STEPS_COUPLED))
        elif small and looks and not quick:
            plan.append(_Stage(_polished_admm(), _FIRST_STEPS_ALONE))
        plan.append(_Stage(Fista(), _FISTA_STEPS))
    n_products = program.map.gram_work() / program.map.product_work(program.y.shape[1])
    if program.loss.separable and not warm and n_products > _PRODUCTS_BEFORE and nearly_independent(program):
        plan.append(_Stage(FirstSteps(), forever))
    costly = n_products > _PRODUCTS and program.loss.quadratic
    if costly and applies(program):
        plan.append(_Stage(BlockDescent(), forever, on_working_set=True))
    elif costly or (warm and program.loss.separable):
        # Other losses form the Gram matrix of the set again with each curvature.
        first, n_steps = (Admm(), forever) if program.loss.quadratic else (MixedPrecision(), _FIRST_STEPS)
        plan.append(_Stage(Polished(WorkingSet(Polished(AdmmNewton(first)))), n_steps, on_working_set=True))
    if not small:
        plan.append(_Stage(Fista(), forever))
    else:
        plan.extend(_in_turns(program))
    return tuple(plan)


def _in_turns(program: Program) -> Iterator[_Stage]:
    """Alternating and accelerated gradient steps, and Newton steps where they apply and cost little."""
    work = program.map.smaller_side**3 * program.y.shape[1]
    takes_newton_steps = newton_applies(program) and work <= _SMALL_NEWTON_SIDE**3
    yield _Stage(_polished_admm(), _FIRST_STEPS_QUADRATIC if program.loss.quadratic else _FIRST_STEPS)
    if takes_newton_steps:  # where curvatures jump, points of other solvers that are not near lead it astray
        yield _Stage(SemismoothNewton(), _NEWTON_STEPS, afresh=True)
    for n_gradient_steps, n_steps in _TURNS:
        yield _Stage(Fista(), n_gradient_steps)
        if takes_newton_steps:
            yield _Stage(SemismoothNewton(), _NEWTON_STEPS)
        yield _Stage(_polished_admm(), n_steps)
    yield _Stage(Fista(), math.inf)

"""Alternating directions that Newton steps finish."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from convexformer_solvers.linalg.newton_systems import solved_in_support
from convexformer_solvers.linalg.ridge import SMALL_SIDE
from convexformer_solvers.linear_maps.base import WORK_OF_A_READ
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.precision import MixedPrecision

from .admm.iteration import Admm
from .primal_dual import Iterate, PrimalDualSolver
from .semismooth_newton import SemismoothNewton
from .support_newton import SupportNewton

# Rough gap over the best constant model's objective below which ``SemismoothNewton`` is worth trying.
_NEAR = 3e-2
# Steps of alternating directions that one of its steps may cost, few as polished ones converge as fast; as a share of
# those so far, as ten steps mostly suffice, where the data are not small and its matrices no larger than a Gram matrix
# in single precision; and how many after that many iterations.
_PATIENCE = 0.5
_GROWING = 0.1
_NARROW = 0.4
_LATE = 150
_LATE_PATIENCE = 40.0
# Work of one of its steps, in floating-point operations, that is hardly more than its calls. A few of them end what may
# take alternating directions a hundred steps: on losses that are not quadratic they are tried after so many.
_SLIGHT_NEWTON_WORK = 2.0**24
_SLIGHT_AFTER = 8
# Products with the data in such a step: of its line search, and of conjugate gradients where there are any.
_SEARCH_PRODUCTS = 3
_ITERATION_PRODUCTS = 20
# ``SupportNewton`` is tried when the number of active groups has changed less than this over so many iterations, and
# for the first time after so many; any Newton step after so many where the start is that of a path.
_STEADY = 0.05
_LOOK_EVERY = 10
_FIRST_LOOK = 5
_WARM_LOOK = 40
# Gap of a Newton step, beside that of alternating directions, from which these go on where Newton steps are given up.
_FAR_BETTER = 0.1
# Numbers that its factors may hold, unless the data hold more; and its work, in floating-point operations, that hardly
# takes longer than the calls of an alternating step.
_FACTOR_SIZE = 2**24
_SLIGHT_WORK = 2.0**26


class _Phase(NamedTuple):
    """Newton steps since they took over."""

    solver: PrimalDualSolver
    inner: Any
    gaps: tuple[float, ...]  # rough ones, from the start on

    def after_step(self, program: Program) -> _Phase:
        inner = self.solver.step(program, self.inner)
        return _Phase(self.solver, inner, (*self.gaps, inner.gap))

    @property
    def stuck(self) -> bool:
        """Whether the steps have come to rest or do not halve the gap in time."""
        sizes = [
            abs(gap) for gap in self.gaps
        ]  # one far below zero is that of an correlation that is not the dual point's
        recent = sizes[-self.solver.halving_steps :]
        slow = len(sizes) > len(recent) and 2 * min(recent) > min(sizes[: -len(recent)])
        return slow or self.solver.finished(self.inner)


class _State(NamedTuple):
    admm: Any  # at rest while Newton steps are taken
    iteration: int = 0  # of alternating directions
    n_active: tuple[int, int] = (0, 0)  # groups when last looked at, and the time before
    newton: _Phase | None = None
    known: Any = None  # the last state of Newton steps: what it has computed of the data serves again
    n_failures: int = 0
    not_before: int = 1  # iteration until which Newton steps are not tried again

    @property
    def gap(self) -> float:
        return self.admm.gap if self.newton is None else self.newton.gaps[-1]


class AdmmNewton(PrimalDualSolver):
    """``Admm``, and Newton steps from its point on once that is near; for other penalties than group-l2 ``Admm`` alone.

    Separable losses are finished by ``SemismoothNewton``, once the rough gap is below 3e-2 of the reference and one of
    its steps costs no more than half an alternating one, a tenth of those so far, or, after 150 iterations, forty; on a
    loss that is not quadratic one that costs next to nothing is taken from the eighth iteration on.
    Others are finished by ``SupportNewton``, once the number of active groups is steady and one of its steps costs next
    to nothing or no more than a tenth of those so far. Where Newton steps stall, or do not halve the gap in time,
    alternating directions go on, from their own last point if that is not far worse. Newton steps are tried again after
    twenty iterations, and after twice as many each further time; along a path not before forty.

    Parameters
    ----------
    first : Admm or MixedPrecision, default=Admm()
        The alternating directions.

    Examples
    --------
    >>> AdmmNewton().name
    'admm_newton'
    """

    def __init__(self, first: Admm | MixedPrecision | None = None) -> None:
        self.first = first or Admm()

    @property
    def name(self) -> str:
        return "admm_newton"

    def unmet_requirement(self, program: Program) -> str | None:
        return self.first.unmet_requirement(program)

    def init_at(self, program: Program, coef: Tensor, pred: Tensor | None, previous: _State | None = None) -> _State:
        if previous is None:
            return _State(self.first.init_at(program, coef, pred))
        admm = self.first.init_at(program, coef, pred, previous.admm)
        n_active = _n_active(program, admm.coef)
        return _State(admm, n_active=(n_active, n_active), known=previous.known, not_before=_WARM_LOOK)

    def step(self, program: Program, state: _State) -> _State:
        if state.newton is not None:
            if not state.newton.stuck:
                return state._replace(newton=state.newton.after_step(program))
            state = self._handed_back(program, state)
        newton = _newton_that_pays(program, state) if state.iteration >= state.not_before else None
        if newton is not None:
            iterate = self.iterate(state)
            inner = newton.init_at(program, iterate.coef, iterate.pred, state.known)
            phase = _Phase(newton, inner, (inner.gap,)).after_step(program)
            return state._replace(newton=phase, known=phase.inner)
        admm, iteration = self.first.step(program, state.admm), state.iteration + 1
        if _looks_at(iteration):
            state = state._replace(n_active=(_n_active(program, admm.coef), state.n_active[0]))
        return state._replace(admm=admm, iteration=iteration)

    def _handed_back(self, program: Program, state: _State) -> _State:
        """Alternating directions again, from where they stopped or, where that is far better, from the last step."""
        if state.gap < _FAR_BETTER * abs(state.admm.gap):
            iterate = self.iterate(state)
            state = state._replace(admm=self.first.init_at(program, iterate.coef, iterate.pred, state.admm))
        n_failures = state.n_failures + 1
        not_before = state.iteration + _LOOK_EVERY * 2**n_failures
        return state._replace(newton=None, n_failures=n_failures, not_before=not_before)

    def iterate(self, state: _State) -> Iterate:
        solver, inner = self._current(state)
        return solver.iterate(inner)

    def rounded_iterate(self, state: _State) -> Iterate:
        solver, inner = self._current(state)
        return solver.rounded_iterate(inner)

    def activity(self, state: _State) -> str:
        solver, inner = self._current(state)
        return solver.activity(inner)

    def _current(self, state: _State) -> tuple[PrimalDualSolver, Any]:
        return (self.first, state.admm) if state.newton is None else (state.newton.solver, state.newton.inner)


def _newton_that_pays(program: Program, state: _State) -> PrimalDualSolver | None:
    if not program.penalty.euclidean:
        return None
    if program.loss.output_separable:
        return SemismoothNewton() if _semismooth_pays(program, state) else None
    return SupportNewton() if _support_newton_pays(program, state) else None


def _semismooth_pays(program: Program, state: _State) -> bool:
    if not 0 <= state.gap <= _NEAR * program.null_value:
        return False
    work = _newton_work(program, state.admm.coef)
    slight = work <= _SLIGHT_NEWTON_WORK and state.iteration >= _SLIGHT_AFTER
    if slight and not program.loss.quadratic:
        return True
    patience, side = _PATIENCE, program.map.smaller_side
    if state.iteration >= _LATE:
        patience = _LATE_PATIENCE
    elif side > SMALL_SIDE and max(_widths(program, state.admm.coef)) <= _NARROW * side:
        patience = max(_PATIENCE, _GROWING * state.iteration)
    return work <= patience * admm_work(program)


def admm_work(program: Program) -> float:
    """Work of one step of alternating directions."""
    n_outputs = program.y.shape[1]
    solves = program.map.smaller_side**2 * max(2.0 * n_outputs, WORK_OF_A_READ)
    return 2 * program.map.product_work(n_outputs) + solves


def _newton_work(program: Program, coef: Tensor) -> float:
    """Work of one step of ``SemismoothNewton``, which takes one output after the other."""
    linear_map, product = program.map, program.map.product_work(1)
    n_samples, n_features = linear_map.n_samples, math.prod(linear_map.feature_shape)
    total = 0.0
    for width in _widths(program, coef):
        if solved_in_support(width, n_samples):
            gram = 0 if program.loss.quadratic else n_samples * width**2
            total += gram + width**3 / 3 + _SEARCH_PRODUCTS * product
        else:
            kernel = linear_map.gram_work() * width / n_features
            total += kernel + n_samples**3 / 3 + (_SEARCH_PRODUCTS + _ITERATION_PRODUCTS) * product
    return total


def _looks_at(iteration: int) -> bool:
    return iteration % _LOOK_EVERY == 0 or iteration == _FIRST_LOOK


def _support_newton_pays(program: Program, state: _State) -> bool:
    now, before = state.n_active
    if not _looks_at(state.iteration) or now == 0 or abs(now - before) > _STEADY * now:
        return False
    widths, n_samples = _widths(program, state.admm.coef), program.map.n_samples
    squares = sum(width**2 for width in widths)
    if squares > max(_FACTOR_SIZE, n_samples * math.prod(program.map.feature_shape)):
        return False
    # Both sides but for the slight work grow with the samples: repeated ones are to be the same as weights.
    product = program.map.product_work(len(widths))
    work = n_samples * squares + (_SEARCH_PRODUCTS + _ITERATION_PRODUCTS) * product
    return work <= max(_SLIGHT_WORK, _GROWING * state.iteration * 2 * product)


def _n_active(program: Program, coef: Tensor) -> int:
    return int((program.penalty.group_values(coef) > 0).sum())


def _widths(program: Program, coef: Tensor) -> list[int]:
    """Columns of the support, per output."""
    active = program.penalty.group_values(coef) > 0
    counts = active.reshape(-1, active.shape[-1]).sum(0).tolist()
    return [count * program.coef_shape[-2] for count in counts]

"""Alternating directions in single precision as long as that leads on, then in double precision."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.algorithms.admm.iteration import Admm
from convexformer_solvers.algorithms.primal_dual import Iterate, PrimalDualSolver
from convexformer_solvers.linear_maps.cast import RoundedMap
from convexformer_solvers.program import Program

from .center import centered

# Iterations from one look at the rough gap to the next.
_LOOK_EVERY = 4
# Iterations, at least and as a share of those so far, within which it must halve.
_PATIENCE = 30
_SHARE = 0.25
# Rough gap, in units of the smallest one, beyond which rounding has led astray.
_ASTRAY = 100.0
# Distance from ``alpha_max``, relative, within which rounding in float32 may decide whether the solution is zero.
_AT_ALPHA_MAX = 1e-5
# Numbers of which a copy in single precision is made: 256 MB.
_LARGEST_COPY = 2**26
# Squares of the data and the targets within this range of 1 are safe, sums of products of two squares included.
_RANGE = 1e15


class MixedPrecision(PrimalDualSolver):
    """``Admm`` in float32 until its rough gap no longer halves in time, and in float64 from there.

    Iterations in float32 take half the time, or less where the data are float32 and float64 would have to convert
    them. Their points are about as good as rounding to seven digits lets them be: ``Polished`` makes that a gap
    of second order. Data in float64 are copied, up to 67 million numbers; larger ones are solved in float64 from the
    start, and so are small ones, where there is no time to gain, and programs whose solution is zero.

    Parameters
    ----------
    smallest : int, default=2**18
        Numbers that data, coefficients or Gram matrix hold at least where float32 is used: two megabytes in float64.

    Examples
    --------
    >>> MixedPrecision().name
    'admm'
    """

    _single, _double = Admm(torch.float32), Admm()

    def __init__(self, smallest: int = 2**18) -> None:
        self.smallest = smallest

    @property
    def name(self) -> str:
        return self._double.name

    def unmet_requirement(self, program: Program) -> str | None:
        return self._double.unmet_requirement(program)

    def init_at(self, program: Program, coef: Tensor, pred: Tensor | None, previous: _State | None = None) -> _State:
        exact = program.drop_zero_weights().with_float64_targets()
        if previous is not None and previous.at_zero:
            previous = None
        if previous is not None:
            offset, solver = exact.target_shift, previous.solver
            single = dataclasses.replace(exact, map=previous.single.map, y=exact.y - offset)
        else:
            size = max(exact.map.n_stored, coef.numel(), exact.map.smaller_side**2)
            found = for_single(exact) if size >= self.smallest else None
            single, offset = found or (exact, torch.zeros_like(exact.null_intercept))
            solver = self._double if found is None else self._single
        if solver is self._single and not bool(coef.any()) and exact.alpha >= (1 - _AT_ALPHA_MAX) * exact.alpha_max:
            return self._all_in_double(exact, coef, pred)  # rounding would leave groups that are not zero
        if solver is self._double:
            inner = solver.init_at(exact, coef, pred, None if previous is None else previous.inner)
        else:
            pred = None if pred is None else pred - offset
            inner = solver.init_at(single, coef, pred, None if previous is None else previous.inner)
        return _State(exact, single, offset, solver, inner, inner)

    def _all_in_double(self, exact: Program, coef: Tensor, pred: Tensor | None) -> _State:
        inner = self._double.init_at(exact, coef, pred)
        return _State(exact, exact, torch.zeros_like(exact.null_intercept), self._double, inner, inner, at_zero=True)

    def step(self, program: Program, state: _State) -> _State:
        if state.is_single and state.iteration >= state.until:
            state = self._in_double(state)
        inner, iteration = state.solver.step(program, state.inner), state.iteration + 1
        if not state.is_single:
            return state._replace(inner=inner, iteration=iteration)
        looks = iteration % _LOOK_EVERY == 0
        if not _is_finite(inner) or (looks and not math.isfinite(inner.gap)):
            state = self._in_double(state)
            inner = state.solver.step(program, state.inner)
        state = state._replace(inner=inner, iteration=iteration)
        if looks and abs(inner.gap) <= 0.5 * state.goal:
            until = iteration + max(_PATIENCE, math.ceil(_SHARE * iteration))
            state = state._replace(best=inner, goal=abs(inner.gap), until=until)
        return state

    def _in_double(self, state: _State) -> _State:
        astray = not abs(state.inner.gap) <= _ASTRAY * state.goal
        inner = self._double.carried_on(state.exact, state.best if astray else state.inner, state.offset)
        return state._replace(solver=self._double, inner=inner, best=inner)

    def iterate(self, state: _State) -> Iterate:
        iterate = state.solver.iterate(state.inner)
        if not state.is_single:
            return iterate
        return iterate.moved(state.exact, state.offset)

    def rounded_iterate(self, state: _State) -> Iterate:
        iterate = self.iterate(state)
        if not state.is_single:
            return iterate
        return iterate.with_map(RoundedMap(state.single.map))

    def activity(self, state: _State) -> str:
        return f"{self.name} in {'single' if state.is_single else 'double'} precision"


class _State(NamedTuple):
    exact: Program  # samples of positive weight, float64 targets
    single: Program  # what the iterations in float32 solve
    offset: Tensor  # by how much its predictions are lower, (c,)
    solver: Admm
    inner: Any
    best: Any  # the inner state that last reached a goal
    at_zero: bool = False  # in double precision for this alpha alone, as its solution may be zero
    iteration: int = 0
    goal: float = math.inf  # rough gap of which half is the next goal
    until: int = _PATIENCE  # iteration until which it must be reached

    @property
    def gap(self) -> float:
        return self.inner.gap

    @property
    def coef(self) -> Tensor:
        return self.inner.coef

    @property
    def is_single(self) -> bool:
        return self.solver.dtype != torch.float64


def _is_finite(inner: Any) -> bool:
    """Whether neither point of an inner state has left the range of its precision."""
    return math.isfinite(float(inner.coef.sum()) + float(inner.fitted.sum()))


def for_single(program: Program) -> tuple[Program, Tensor] | None:
    """An equivalent program that loses few digits in float32, and by how much its predictions are lower.

    Its map is in float32 where it may be copied; its targets are not.

    With an intercept the features can be centred, where they are copied anyway, and the targets of a regression. None
    where the data are too large for a copy and not in float32, or where their squares leave its range.
    """
    if program.map.n_stored <= _LARGEST_COPY:
        result, offset = centered(program, torch.float32)
    elif program.map.dtype == torch.float32:
        offset = program.target_shift
        result = dataclasses.replace(program, y=program.y - offset)
    else:
        return None
    entry, slope = result.map.largest(), float(result.null_dual_point.abs().max())
    within = all(1 / _RANGE < size < _RANGE for size in (entry**2, slope, slope * entry**2))
    return (result, offset) if within else None

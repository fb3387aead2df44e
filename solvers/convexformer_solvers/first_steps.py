"""Accelerated gradient steps first, where the features are so little correlated that these lead quickly on."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .fista import Fista
from .mixed_precision import for_single
from .operators import WORK_OF_A_READ
from .polish import NEAR_ROUNDING, polished
from .primal_dual import Iterate, PrimalDualSolver
from .program import Program
from .rounded_map import RoundedMap
from .solver import Point
from .spread import spread

# Steps between looks at the rough gap, at least and as a share of those so far, and looks within which it must halve
# in the end.
_LOOK_EVERY = 5
_SHARE = 0.25
_LOOKS = 2
# Gap over the best constant model's objective below which a polish is worth its cost.
_NEAR = 8e-3
# Iterations that alternating directions take, beside the Gram matrix and its factor; and where outputs are coupled.
_OTHER_ITERATIONS = 20
_OTHER_ITERATIONS_COUPLED = 100
# Spread of the features up to which these steps are tried; and up to which, as with gated independent ones, where the
# median dual norm of a group at the best constant model is not more than so many alpha: with its root iterations grow.
# The same where outputs are coupled, which these do not mind: polished, and with other penalties than group-l2.
_LARGEST_SPREAD = 1.15
_LARGEST_SPREAD_MEDIAN = 1.7
_LARGEST_MEDIAN = 6.0
_LARGEST_SPREAD_COUPLED = 2.0
_LARGEST_SPREAD_COUPLED_ALONE = 1.5


class _Greedy(Fista):
    """``Fista`` with all of the last move as momentum, until that points uphill.

    Liang, Luo and Schönlieb, "Improving FISTA: faster, smarter and greedier", SIAM J. Sci. Comput. 44 (2022), whose
    steps are longer, too. What keeps theirs from diverging is not needed where such steps are given up for others.
    """

    @staticmethod
    def _next_momentum(t: float) -> tuple[float, float]:
        return 2.0, float(t > 1)


class FirstSteps(PrimalDualSolver):
    """``Fista`` in float32, with more momentum, as long as it may end sooner than other solvers.

    Those form a Gram matrix and its factor first. Finished where their time is over and the rough gap no longer halves
    within two looks, or where it has not halved after half of that time. Iterates that it looks at are polished. See
    ``nearly_independent`` for when to try it.

    Examples
    --------
    >>> FirstSteps().name
    'fista'
    """

    _fista = _Greedy(power_steps=2)

    @property
    def name(self) -> str:
        return self._fista.name

    def init_at(self, program: Program, coef: Tensor, pred: Tensor | None, previous: _State | None = None) -> _State:
        exact = program.counted().with_float64_targets()
        single, offset = for_single(exact) or (exact, torch.zeros_like(exact.null_intercept))
        if single is not exact:
            single = single.to(torch.float32)
        inner = self._fista.init(single, Point(coef.to(single.y), single.null_intercept))
        return _State(exact, single, offset, inner, _steps_of_other_solvers(exact))

    def step(self, program: Program, state: _State) -> _State:
        iteration, inner = state.iteration + 1, self._fista.step(state.single, state.inner)
        state = state._replace(inner=inner, iteration=iteration, looked_at=None)
        if iteration < state.next_look and not inner.finished:
            return state
        iterate = self.iterate(state)
        gap = abs(iterate.rough_gap)
        if gap <= _NEAR * program.null_value:
            better = polished(self._rounded(state, iterate))
            if better is not None and abs(better.rough_gap) < gap:
                iterate, gap = better, abs(better.rough_gap)
        gaps = (*state.gaps, gap)
        falls = len(gaps) <= _LOOKS or gap <= 0.5 * gaps[-1 - _LOOKS]
        slow = iteration >= 0.5 * state.n_steps and gap > 0.5 * gaps[0]
        given_up = (not falls and iteration >= state.n_steps) or slow or not math.isfinite(gap)
        next_look = iteration + max(_LOOK_EVERY, math.ceil(_SHARE * iteration))
        return state._replace(looked_at=iterate, gaps=gaps, next_look=next_look, finished=given_up or inner.finished)

    def iterate(self, state: _State) -> Iterate:
        if state.looked_at is not None:
            return state.looked_at
        inner, exact = state.inner, state.exact
        pred = inner.pred + inner.intercept
        ascent = state.single.pull_back(-state.single.loss.gradient(pred, state.single.y))
        pred = pred.to(exact.y) + state.offset
        return Iterate(exact, inner.coef.to(exact.y), pred, pred, ascent.to(exact.y))

    @staticmethod
    def _rounded(state: _State, iterate: Iterate) -> Iterate:
        """The same with products in single precision, as long as that is precise enough for a polish."""
        if min(state.gaps, default=math.inf) <= NEAR_ROUNDING * state.exact.null_value:
            return iterate
        return iterate.with_map(RoundedMap(state.single.map))

    def finished(self, state: _State) -> bool:
        return state.finished


class _State(NamedTuple):
    exact: Program  # samples of positive weight, float64 targets
    single: Program  # what the steps solve
    offset: Tensor  # by how much its predictions are lower, (c,)
    inner: Any
    n_steps: float  # that take as long as other solvers
    iteration: int = 0
    looked_at: Iterate | None = None  # if that of the last step was, perhaps polished
    gaps: tuple[float, ...] = ()  # rough ones at all looks
    next_look: int = _LOOK_EVERY
    finished: bool = False

    @property
    def gap(self) -> float:
        return math.inf if self.looked_at is None else self.gaps[-1]


def _steps_of_other_solvers(program: Program) -> float:
    """Steps, of two products each, in the time that alternating directions take from scratch."""
    linear_map = program.map
    product = linear_map.product_work(program.y.shape[1])
    iterations = _OTHER_ITERATIONS if program.loss.separable else _OTHER_ITERATIONS_COUPLED
    solve = WORK_OF_A_READ * linear_map.smaller_side**2
    start = linear_map.gram_work() + linear_map.smaller_side**3 / 3
    return (start + iterations * (2 * product + solve)) / (2 * product)


def nearly_independent(program: Program) -> bool:
    """Whether the features are so nearly independent, for this ``alpha``, that first-order steps converge quickly.

    Parameters
    ----------
    program : Program
        With samples in any order.

    Returns
    -------
    bool
    """
    found = spread(program)
    if not program.loss.separable:
        polishes = program.penalty.euclidean
        return found <= (_LARGEST_SPREAD_COUPLED if polishes else _LARGEST_SPREAD_COUPLED_ALONE)
    if program.loss.quadratic or not _LARGEST_SPREAD < found <= _LARGEST_SPREAD_MEDIAN:
        return found <= _LARGEST_SPREAD
    norms = program.penalty.group_dual_norms(program.pull_back(program.null_dual_point))
    return float(norms.median()) <= _LARGEST_MEDIAN * program.alpha

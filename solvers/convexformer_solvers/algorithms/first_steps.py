"""Accelerated gradient steps first, where the features are so little correlated that these lead quickly on."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.linalg.eigenvalue_ratio import spread
from convexformer_solvers.linear_maps.base import WORK_OF_A_READ, nonzero_blocks
from convexformer_solvers.linear_maps.cast import RoundedMap
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.blocks import Part, RestrictedPart, WholePart, largest_dual_norms
from convexformer_solvers.reductions.precision import for_single

from .base import Point
from .fista import Fista
from .polish import NEAR_ROUNDING, polished
from .primal_dual import Iterate, PrimalDualSolver, own_predictions

# Steps between looks at the rough gap, at least and as a share of those so far, and looks within which it must halve
# in the end.
_LOOK_EVERY = 5
_SHARE = 0.25
_LOOKS = 2
# Columns of a first set, over the number of samples.
_FIRST = 1.0
# Numbers of data that a product reads in the time of its call.
_SLIGHT_PRODUCT = 2**21
# Share of all blocks that a first set holds at least and at most, and beyond which a later one is not worth it, nor
# beyond that share of the work of a step.
_LEAST_FIRST = 1 / 16
_LARGEST_FIRST = 0.15
_LARGEST_SHARE = 0.6
_LARGEST_SHARE_OF_WORK = 0.85
# Growth of the set at a look, as a share of the active blocks.
_GROWTH = 0.5
# Dual norm over alpha of blocks that join it in any case, from the second look on.
_FAR = 2.0
# Dual norm over alpha above which an inactive block stays, and share of the set below which the others are dropped.
_NEAR_ALPHA = 0.9
_WORTH_DROPPING = 0.7
# Gap over the best constant model's objective below which a polish is worth its cost.
_NEAR = 5e-3
# Iterations that alternating directions take, beside the Gram matrix and its factor; and where outputs are coupled.
_OTHER_ITERATIONS = 20
_OTHER_ITERATIONS_COUPLED = 100
# Spread of the features up to which these steps are tried; and up to which, as with gated independent ones, where the
# median dual norm of a group at the best constant model is not more than so many alpha. Steps of all blocks that these
# take with the squared loss, and uneven ones with others too, over the root of that median. The largest spread where
# outputs are coupled, which these do not mind: polished, and with other penalties than group-l2.
_LARGEST_SPREAD = 1.15
_LARGEST_SPREAD_UNEVEN = 1.7
_LARGEST_MEDIAN = 9.0
_STEPS = 8.0
_STEPS_UNEVEN = 16.0
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

    Where there are seven times as many features as samples, steps see a set of blocks alone: at first those of the
    largest dual norm, with as many columns as there are samples or, on small data, up to a seventh of all. At each
    look, which sees all blocks, others that violate the dual constraint join it, half as many as are active or all that
    do by far, and those drop out that are neither active nor about to be. Once it holds more than three fifths of all
    blocks these take its place.

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
        exact = program.drop_zero_weights().with_float64_targets()
        single, offset = for_single(exact) or (exact, torch.zeros_like(exact.null_intercept))
        if single is not exact:
            single = single.to(torch.float32)
        start = coef.to(single.y)
        part = _first_part(single, start)
        inner = self._fista.init(part.program, Point(part.on_blocks(start), single.null_intercept))
        return _State(exact, single, offset, part, inner, _steps_of_other_solvers(exact))

    def step(self, program: Program, state: _State) -> _State:
        iteration, inner = state.iteration + 1, self._fista.step(state.part.program, state.inner)
        state = state._replace(inner=inner, iteration=iteration, work=state.work + _share(state.part), looked_at=None)
        if iteration < state.next_look and not inner.finished:
            return state
        iterate = self.iterate(state)
        correlation, gap = iterate.correlation, abs(iterate.gap_estimate)
        if gap <= _NEAR * program.null_value:
            better = polished(self._rounded(state, iterate))
            if better is not None and abs(better.gap_estimate) < gap:
                iterate, gap = better, abs(better.gap_estimate)
        gaps = (*state.gaps, gap)
        falls = len(gaps) <= _LOOKS or gap <= 0.5 * gaps[-1 - _LOOKS]
        slow = state.work >= 0.5 * state.n_steps and gap > 0.5 * gaps[0]
        given_up = (not falls and state.work >= state.n_steps) or slow or not math.isfinite(gap)
        next_look = iteration + max(_LOOK_EVERY, math.ceil(_SHARE * iteration))
        state = state._replace(looked_at=iterate, gaps=gaps, next_look=next_look)
        if given_up:
            return state._replace(finished=True)
        regrouped = _regrouped(state, correlation)
        return regrouped._replace(finished=inner.finished and regrouped.part is state.part)

    def iterate(self, state: _State) -> Iterate:
        if state.looked_at is not None:
            return state.looked_at
        inner, exact = state.inner, state.exact
        pred = inner.pred + inner.intercept
        correlation = state.single.weighted_adjoint(-state.single.loss.gradient(pred, state.single.y))
        pred = pred.to(exact.y) + state.offset
        return Iterate(exact, state.part.on_all(inner.coef).to(exact.y), pred, pred, correlation.to(exact.y))

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
    part: Part  # blocks whose coefficients may not be zero, in the steps
    inner: Any
    n_steps: float  # of all blocks, that take as long as other solvers
    iteration: int = 0
    work: float = 0.0  # so far, in steps of all blocks
    looked_at: Iterate | None = None  # if that of the last step was, perhaps polished
    gaps: tuple[float, ...] = ()  # rough ones at all looks
    next_look: int = _LOOK_EVERY
    finished: bool = False

    @property
    def gap(self) -> float:
        return math.inf if self.looked_at is None else self.gaps[-1]


def _first_part(program: Program, coef: Tensor) -> Part:
    """The blocks to start with: active ones, and those of the largest dual norm; or all of them."""
    active = nonzero_blocks(coef)
    size = max(_first_size(program), int(active.sum()))
    if size > _LARGEST_FIRST * len(active):
        return WholePart(program)
    fitted = own_predictions(program, coef)
    norms = largest_dual_norms(program, program.weighted_adjoint(-program.loss.gradient(fitted, program.y)))
    norms[active] = math.inf
    return _part(program, norms.topk(size).indices.sort().values)


def _first_size(program: Program) -> int:
    """Blocks of the first set; more than these where products with them take no longer than their calls."""
    n_blocks, width, n_samples = math.prod(program.coef_shape[:-2]), program.coef_shape[-2], program.map.n_samples
    least = max(_FIRST * n_samples / width, _LEAST_FIRST * n_blocks)
    slight = min(_SLIGHT_PRODUCT / (n_samples * width), _LARGEST_FIRST * n_blocks)
    return max(math.ceil(least), math.floor(slight))


def _part(program: Program, blocks: Tensor) -> Part:
    """The part of some blocks, or of all where that costs little more."""
    if len(blocks) > _LARGEST_SHARE * math.prod(program.coef_shape[:-2]):
        return WholePart(program)
    part = RestrictedPart(program, blocks)
    return part if _share(part) <= _LARGEST_SHARE_OF_WORK else WholePart(program)


def _regrouped(state: _State, correlation: Tensor) -> _State:
    """The state on the blocks that matter by its correlation: active ones, and others that violate, worst first."""
    part, inner, program = state.part, state.inner, state.single
    if isinstance(part, WholePart):
        return state
    coef, previous = part.on_all(inner.coef), part.on_all(inner.previous)
    norms = largest_dual_norms(program, correlation)
    active = nonzero_blocks(coef) | nonzero_blocks(previous)
    known = torch.zeros_like(active)
    known[part.blocks] = True
    kept = known & (active | (norms > _NEAR_ALPHA * program.alpha))
    n_kept, n_violating = int(kept.sum()), int((~known & (norms > program.alpha)).sum())
    if n_violating == 0 and (n_kept == 0 or n_kept > _WORTH_DROPPING * len(part.blocks)):
        return state
    norms[known] = -math.inf
    room = max(_first_size(program) - n_kept, math.ceil(_GROWTH * int(active.sum())), 1)
    if len(state.gaps) > 1:  # at the first look the set is far from solved
        room = max(room, int((norms > _FAR * program.alpha).sum()))
    kept[norms.topk(min(n_violating, room)).indices] = True
    new = _part(program, kept.nonzero()[:, 0])
    inner = inner._replace(coef=new.on_blocks(coef), previous=new.on_blocks(previous))
    gaps = state.gaps[-1:] if isinstance(new, WholePart) else state.gaps  # those of the set say little of what follows
    return state._replace(part=new, inner=inner, gaps=gaps)


def _share(part: Part) -> float:
    """Work of a step on a part over that of one on all blocks."""
    n_outputs = part.whole.y.shape[1]
    return min(part.program.map.product_work(n_outputs) / part.whole.map.product_work(n_outputs), 1.0)


def _steps_of_other_solvers(program: Program) -> float:
    """Steps, of two products each, in the time that alternating directions take from scratch."""
    linear_map = program.map
    product = linear_map.product_work(program.y.shape[1])
    iterations = _OTHER_ITERATIONS if program.loss.output_separable else _OTHER_ITERATIONS_COUPLED
    solve = WORK_OF_A_READ * linear_map.smaller_side**2
    start = linear_map.gram_work() + linear_map.smaller_side**3 / 3
    return (start + iterations * (2 * product + solve)) / (2 * product)


def nearly_independent(program: Program) -> bool:
    """Whether the features are so nearly independent, for this ``alpha``, that first-order steps end soonest.

    Parameters
    ----------
    program : Program
        With samples in any order.

    Returns
    -------
    bool
    """
    found = spread(program)
    if not program.loss.output_separable:
        polishes = program.penalty.euclidean
        return found <= (_LARGEST_SPREAD_COUPLED if polishes else _LARGEST_SPREAD_COUPLED_ALONE)
    if not found <= _LARGEST_SPREAD_UNEVEN:
        return False
    even = found <= _LARGEST_SPREAD
    if even and not program.loss.quadratic:
        return True
    median = float(program.null_dual_norms.median()) / program.alpha
    n_steps = (_STEPS if even else _STEPS_UNEVEN) * math.sqrt(median)
    return n_steps <= _steps_of_other_solvers(program) and (even or median <= _LARGEST_MEDIAN)

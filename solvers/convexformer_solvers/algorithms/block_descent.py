"""Exact block descent on a growing set of blocks, in the Gram matrix of their columns."""

from __future__ import annotations

import math
import threading
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController
from torch import Tensor

from convexformer_solvers.linalg.gram import SupportGram
from convexformer_solvers.linear_maps.base import nonzero_blocks
from convexformer_solvers.program import Program

from .primal_dual import Iterate, PrimalDualSolver

# The set is solved until its gap is this share of that over all blocks at the last look.
_DECREASE = 0.1
# Blocks are added where the gap over all blocks is this far above that of the set.
_WORTH_GROWING = 4.0
# Columns of the widest set over the number of samples, and in all.
_WIDEST = 1.0
_LARGEST_WIDTH = 6000
# Columns of the active blocks, over the number of samples, from which the next alpha of a path is left to others.
_WIDEST_START = 0.35
# After the first solve of a set blocks of such a dual norm, in units of alpha, will be active. Too many are more than a
# set may have; or 2.5 times as many with a smaller dual norm, unless less than half of the set is active.
_VERY_FAR, _FAR = 4.0, 2.0
_FAR_BLOCKS = 2.5
_FAR_ACTIVE = 0.5
# Sweeps from one polish to the next, to an extrapolation, and after which a set is given up.
_POLISH_EVERY = 3
_EXTRAPOLATE_EVERY = 6
_MOST_SWEEPS = 200
# Steps to the size of a block, and their accuracy.
_SIZE_STEPS = 50
_SIZE_ACCURACY = 1e-3
_REGULARISATION = 1e-12
# Looks within which the gap must halve. A set that has just grown is spared that as long as its Gram matrix takes less
# than this share of the work for that of all features.
_LOOKS = 3
_CHEAP = 0.5
# Numbers that data hold at least where products are computed in single precision, and the smallest square there.
_LARGE = 2**18
_SMALLEST = 1e-30


class _OneBlasThread:
    """Numpy's BLAS on one thread, for products with a block, which are too small for more.

    Its idle threads would keep torch's from their cores. The limit is one of the process: threads that are in it at the
    same time share it, as the last one of them takes it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_inside = 0

    @cached_property
    def _libraries(self) -> Any:
        return ThreadpoolController()  # looks for the loaded libraries

    def __enter__(self) -> None:
        with self._lock:
            if self._n_inside == 0:
                self._limit = self._libraries.limit(limits=1, user_api="blas")
            self._n_inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._n_inside -= 1
            if self._n_inside == 0:
                self._limit.restore_original_limits()


_numpy_on_one_thread = _OneBlasThread()


class _Point(NamedTuple):
    """Coefficients of the set and the gradient of its loss with the opposite sign, both of shape ``(p,)``."""

    coef: NDArray
    correlation: NDArray


class GramProgram:
    r"""The program on some blocks with the squared loss and one output, known by products of their columns alone.

    .. math:: \tfrac12 (s - 2 q' z + z' G z) + \alpha \sum_g \|z_g\|_2

    Parameters
    ----------
    gram : ndarray of shape (p, p)
        Products ``G`` of the columns with each other, averaged over the samples.
    target : ndarray of shape (p,)
        Products ``q`` of the columns with the targets.
    square : float
        Mean square ``s`` of the targets.
    width : int
        Columns of a block.
    alpha : float
        Weight of the penalty.
    known : GramProgram, optional
        The same program on the first of these blocks.
    """

    def __init__(
        self,
        gram: NDArray,
        target: NDArray,
        square: float,
        width: int,
        alpha: float,
        known: GramProgram | None = None,
    ) -> None:
        self.gram, self.target, self.square, self.width, self.alpha = gram, target, square, width, alpha
        self._blocks = [slice(first, first + width) for first in range(0, len(target), width)]
        self._eigen: list[tuple[NDArray, NDArray]] = [] if known is None else list(known._eigen)
        with _numpy_on_one_thread:
            for block in self._blocks[len(self._eigen) :]:
                self._eigen.append(np.linalg.eigh(gram[block, block]))

    def with_alpha(self, alpha: float) -> GramProgram:
        """The same program with another weight of the penalty."""
        return GramProgram(self.gram, self.target, self.square, self.width, alpha, self)

    def corrected(self, point: _Point, correlation: NDArray) -> GramProgram:
        """The same program with the targets' products such that `point` has an `correlation` that is known better.

        What rounding of the Gram matrix does to a solution then goes by the distance from that point.
        """
        target = self.target + (correlation - point.correlation)
        return GramProgram(self.gram, target, self.square, self.width, self.alpha, self)

    def at(self, coef: NDArray) -> _Point:
        """The point of some coefficients."""
        return _Point(coef, self.target - self.gram @ coef)

    def norms(self, values: NDArray) -> NDArray:
        """Norm of each block."""
        return np.linalg.norm(values.reshape(-1, self.width), axis=1)

    def primal(self, point: _Point) -> float:
        """Objective of the coefficients."""
        unexplained = self.square - point.coef @ (self.target + point.correlation)
        return float(0.5 * unexplained + self.alpha * self.norms(point.coef).sum())

    def dual(self, point: _Point) -> float:
        """Dual objective of the residuals, scaled until they are feasible."""
        scale = self.alpha / max(self.alpha, self.norms(point.correlation).max())
        unexplained = self.square - point.coef @ (self.target + point.correlation)
        return float(scale * (self.square - point.coef @ self.target) - 0.5 * scale**2 * unexplained)

    def solved(self, coef: NDArray, goal: float) -> tuple[_Point, _Point, float]:
        """Primal and dual point from some coefficients on, and their gap, which misses the goal after many sweeps."""
        point, recent = self.at(coef.copy()), []
        for sweep in range(1, _MOST_SWEEPS + 1):
            self._sweep(point)
            recent.append(_Point(point.coef.copy(), point.correlation.copy()))
            if sweep % _EXTRAPOLATE_EVERY == 0:
                point, recent = self._extrapolated(point, recent), []
            if sweep % _POLISH_EVERY == 0:
                candidates = [point, *self._polished(point)]
                primal, dual = min(candidates, key=self.primal), max(candidates, key=self.dual)
                gap = self.primal(primal) - self.dual(dual)
                if gap <= goal:
                    break
        return primal, dual, gap

    def _sweep(self, point: _Point) -> None:
        """Minimise over one block after the other, in place."""
        for block, (spectrum, basis) in zip(self._blocks, self._eigen, strict=True):
            old, correlation = point.coef[block], point.correlation[block]
            size = math.sqrt(old @ old)
            if size == 0 and correlation @ correlation <= self.alpha**2:
                continue
            new = basis @ _minimiser(spectrum, (correlation + self.gram[block, block] @ old) @ basis, self.alpha, size)
            move = new - old
            point.coef[block] = new
            point.correlation[:] -= move @ self.gram[block]

    def _extrapolated(self, point: _Point, recent: list[_Point]) -> _Point:
        """Anderson's combination of recent points, where it lowers the objective."""
        coefs, correlations = (np.stack(part) for part in zip(*recent, strict=True))
        moves = np.diff(coefs, axis=0)
        weights = _solved(moves @ moves.T, np.ones(len(moves)))
        if not weights.sum() > 0:
            return point
        weights /= weights.sum()
        better = _Point(weights @ coefs[1:], weights @ correlations[1:])
        return better if self.primal(better) < self.primal(point) else point

    def _polished(self, point: _Point) -> list[_Point]:
        """The primal point with best sizes, and the dual point moved to norms of alpha, on the active blocks."""
        active = self.norms(point.coef).nonzero()[0]
        if len(active) == 0:
            return []
        blocks = [self._blocks[position] for position in active]
        units = np.zeros((len(active), len(self.target)))
        for unit, block in zip(units, blocks, strict=True):
            unit[block] = point.correlation[block] / np.linalg.norm(point.correlation[block])
        images = np.stack([unit[block] @ self.gram[block] for unit, block in zip(units, blocks, strict=True)])
        system = images @ units.T
        sizes = np.maximum(_solved(system, units @ self.target - self.alpha), 0)
        primal = _Point(sizes @ units, self.target - sizes @ images)
        move = _solved(system, self.norms(point.correlation)[active] - self.alpha)
        dual = _Point(point.coef + move @ units, point.correlation - move @ images)
        return [primal, dual]


def _solved(system: NDArray, right: NDArray) -> NDArray:
    """Solution of a slightly regularised positive semidefinite system; zero where that is all zero."""
    scale = np.trace(system)
    if not scale > 0:
        return np.zeros_like(right)
    return np.linalg.solve(system + _REGULARISATION * scale * np.eye(len(system)), right)


def _minimiser(spectrum: NDArray, slope: NDArray, alpha: float, size: float) -> NDArray:
    """Minimiser of ``z' diag(spectrum) z / 2 - slope' z + alpha |z|``; `size` is a guess of its norm.

    Newton steps on the inverse of the norm that the stationary point would have in units of its size: they converge
    from any side.
    """
    squares = slope * slope
    if slope @ slope <= alpha**2:
        return np.zeros_like(slope)
    for _ in range(_SIZE_STEPS):
        inverse = 1 / (spectrum * size + alpha)
        terms = squares * inverse
        total = terms @ inverse
        terms *= inverse * inverse
        bend = terms @ spectrum
        if bend <= 0:  # the block carries no quadratic: nothing but rounding
            break
        step = (1 - total**-0.5) * total / bend * total**0.5
        size = max(size + step, 0.0)
        if abs(step) <= _SIZE_ACCURACY * size:
            break
    return slope * (size / (spectrum * size + alpha))


class _State(NamedTuple):
    first: Iterate  # where it began
    whole: Iterate
    gap: float  # its rough gap
    gram: SupportGram
    pulled: Tensor  # products of the columns with the targets, which an intercept centres; like the coefficients
    blocks: Tensor  # of the set, in the order in which they came
    inner: GramProgram | None = None  # None: no blocks yet
    gaps: tuple[float, ...] = ()  # at all looks
    n_looks: int = 0
    to_grow: bool = False
    finished: bool = False
    misleads: bool = False  # whether its first set was one of many


class BlockDescent(PrimalDualSolver):
    """Exact minimisation over one block after the other, on the blocks that violate the dual constraint most.

    For the squared loss, the group-l2 penalty and one output. A step solves the program on a set of blocks, given by
    the Gram matrix of their columns, to a tenth of the gap over all blocks, and looks at all blocks, which takes two
    products with the data. Those that violate the dual constraint most join the set; none ever leaves it, so that the
    Gram matrix is only extended; along a path each alpha goes on with the set of the one before. The blocks of the
    set are minimised over in turn, in their eigenbases; the sweeps are extrapolated and polished. On large data that
    Gram matrix is computed in single precision; each look corrects what its rounding does to the gradient.

    Finished at a gap of zero; once the set would be wider than the number of samples; where after a solve more blocks
    than a set may have exceed alpha four times, or 2.5 times as many twice while half of the set is active; where
    sweeps take too long; and where the gap over all blocks has not halved in three looks, unless the set has grown and
    its Gram matrix has taken less than half of the work of that of all features. Along a path also where the active
    blocks are wider than 0.35 times the number of samples. The sweeps run on the CPU.

    Parameters
    ----------
    width : int, default=128
        Columns by which the set grows, or half of those of the active blocks where that is more; at least one block,
        and none but those that violate.

    Examples
    --------
    >>> BlockDescent().name
    'block_descent'
    """

    def __init__(self, width: int = 128) -> None:
        self.width = width

    @property
    def name(self) -> str:
        return "block_descent"

    def unmet_requirement(self, program: Program) -> str | None:
        n_outputs = program.y.shape[1]
        if not (program.loss.quadratic and program.penalty.euclidean and n_outputs == 1):
            return (
                f"the squared loss, the group-l2 penalty and one output, not {program.loss!r}, {program.penalty!r} "
                f"and {n_outputs} outputs"
            )
        return super().unmet_requirement(program)

    def init_at(self, program: Program, coef: Tensor, pred: Tensor | None, previous: _State | None = None) -> _State:
        program = program.drop_zero_weights().with_float64_targets()
        whole = Iterate.at(program, coef, pred)
        coef, gap = whole.coef, whole.gap_estimate
        support = nonzero_blocks(coef).nonzero()[:, 0]
        if previous is None:
            pulled = program.weighted_adjoint(program.y - program.null_intercept)
            return self._grown(_State(whole, whole, gap, _support_gram(program), pulled, support), at_least=1)
        blocks = torch.cat([previous.blocks, support[~torch.isin(support, previous.blocks)]])
        state = _State(whole, whole, gap, previous.gram, previous.pulled, blocks, previous.inner)
        wide = len(support) * coef.shape[-2] > _WIDEST_START * len(program.y)
        return state._replace(finished=True) if wide else self._grown(state, at_least=1)

    def step(self, program: Program, state: _State) -> _State:
        n_before = len(state.blocks)
        if state.to_grow:  # not earlier: the solve might have ended with the look
            state = self._grown(state)
        if state.finished:
            return state
        assert state.inner is not None
        coef = self._on_set(state, state.whole.coef).flatten().cpu().numpy()
        with _numpy_on_one_thread:
            primal, dual, gap = state.inner.solved(coef, _DECREASE * state.gap)
        whole = self._of_all(state, primal, dual)
        inner = state.inner.corrected(dual, self._on_set(state, whole.correlation).flatten().cpu().numpy())
        new_gap = whole.gap_estimate
        gaps = (*(state.gaps or (state.gap,)), new_gap)
        falls = len(gaps) <= _LOOKS or new_gap <= 0.5 * gaps[-1 - _LOOKS]
        promising = falls or (len(state.blocks) > n_before and _cheap(state))
        return state._replace(
            whole=whole,
            gap=new_gap,
            inner=inner,
            n_looks=state.n_looks + 1,
            to_grow=new_gap > _WORTH_GROWING * gap,
            gaps=gaps,
            finished=gap > _DECREASE * state.gap or not promising or not new_gap > 0,
        )

    def _grown(self, state: _State, at_least: int = 0) -> _State:
        """The state with the worst violating blocks in its set; finished where they are too many."""
        program = state.whole.program
        norms = program.penalty.group_dual_norms(state.whole.correlation).flatten()
        norms[state.blocks] = 0.0
        d, n_active = program.coef_shape[-2], int((self._on_set(state, state.whole.coef) != 0).any(dim=1).sum())
        wanted = max(self.width // d, n_active // 2, 1)
        size = max(min(wanted, int((norms > program.alpha).sum())), at_least - len(state.blocks), 0)
        if size == 0 and state.inner is not None and len(state.inner.target) == len(state.blocks) * d:
            return state._replace(inner=state.inner.with_alpha(program.alpha), to_grow=False)
        limit = min(_WIDEST * len(program.y), _LARGEST_WIDTH) / d
        very_far, far = (int((norms > factor * program.alpha).sum()) for factor in (_VERY_FAR, _FAR))
        hopeless = very_far > limit or (far > _FAR_BLOCKS * limit and n_active >= _FAR_ACTIVE * len(state.blocks))
        if len(state.blocks) + size > limit or (state.n_looks > 0 and hopeless):
            return state._replace(finished=True, to_grow=False, misleads=state.n_looks == 1)
        return self._of_set(state, torch.cat([state.blocks, norms.topk(size).indices]))

    def _of_set(self, state: _State, blocks: Tensor) -> _State:
        """The state with the program on some blocks, those of its set first; finished where their products overflow."""
        program, inner = state.whole.program, state.inner
        target, gram = state.pulled.reshape(-1, *state.pulled.shape[-2:])[blocks].flatten(), state.gram
        matrix = gram.of(blocks, program.weight, copy=False)
        if gram.single and not _in_range_of_single(matrix, target):
            gram = SupportGram(gram.map, gram.center)
            matrix = gram.of(blocks, program.weight, copy=False)
        largest = matrix.diagonal()  # no product of two columns is larger than both of their squares
        if not bool(torch.isfinite(largest).all()):
            return state._replace(finished=True, to_grow=False)
        products = target.cpu().numpy()
        if inner is not None:
            products[: len(inner.target)] = inner.target  # corrected
        square = float(program.mean((program.y - program.null_intercept).square().sum(1)))
        inner = GramProgram(matrix.cpu().numpy(), products, square, program.coef_shape[-2], program.alpha, inner)
        return state._replace(blocks=blocks, gram=gram, inner=inner, to_grow=False)

    def _on_set(self, state: _State, coef: Tensor) -> Tensor:
        return coef.reshape(-1, *coef.shape[-2:])[state.blocks]

    def _of_all(self, state: _State, primal: _Point, dual: _Point) -> Iterate:
        """The iterate of the whole program that two points of the set stand for."""
        program = state.whole.program
        both = torch.as_tensor(np.stack([primal.coef, dual.coef], axis=1)).to(program.y)
        both = both.view(len(state.blocks), -1, 2)
        pred = program.map.matvec_blocks(state.blocks, both)
        if program.fit_intercept:
            pred = pred + program.weight @ (program.y - pred)
        coef = torch.zeros_like(state.whole.coef)
        coef.view(-1, *coef.shape[-2:])[state.blocks] = both[..., :1]
        return Iterate(program, coef, pred[:, :1], pred[:, 1:], coef).with_own_ascent()

    def iterate(self, state: _State) -> Iterate:
        return state.whole

    def handed_over(self, state: _State) -> Iterate:
        # The first of many sets leaves a few blocks that are far too large, which misleads what goes by their size.
        return state.first if state.misleads else state.whole

    def activity(self, state: _State) -> str:
        n_blocks = math.prod(state.whole.coef.shape[:-2])
        return f"{self.name} on {len(state.blocks)} of {n_blocks} blocks"

    def finished(self, state: _State) -> bool:
        return state.finished


def _support_gram(program: Program) -> SupportGram:
    """Gram matrices of a program's columns, which an intercept centres."""
    means = program.map.rmatvec(program.weight[:, None])[..., 0].flatten(0, -2) if program.fit_intercept else None
    return SupportGram(program.map, means, single=program.map.n_stored >= _LARGE)


def _in_range_of_single(gram: Tensor, target: Tensor) -> bool:
    """Whether squares of the columns that matter are numbers of single precision."""
    squares = gram.diagonal()
    return bool(((squares > _SMALLEST) & (squares < 1 / _SMALLEST) | (target == 0)).all())


def _cheap(state: _State) -> bool:
    """Whether the Gram matrix of the set has taken little of the work of that of all features."""
    linear_map = state.whole.program.map
    work = 2.0 * linear_map.n_samples * (len(state.blocks) * linear_map.feature_shape[-1]) ** 2
    return work <= _CHEAP * linear_map.gram_work()

"""Another algorithm on a growing set of blocks, checked against all blocks now and then."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.linalg.gram import SupportGram
from convexformer_solvers.linear_maps.base import nonzero_blocks
from convexformer_solvers.points import (
    Point,
    as_start,
    gap_estimate,
    own_predictions,
    point_at,
    with_own_correlation,
    with_own_predictions,
)
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.base import Reduction
from convexformer_solvers.reductions.blocks import Compress, Restrict
from convexformer_solvers.reductions.precision import squares_fit_single
from convexformer_solvers.rounding import SUM

from .base import PrimalDualSolver
from .stage import Patience, Running, Stage, begun, stepped


@dataclass(frozen=True)
class WorkingSetConfig:
    """How a working set is chosen, grows and is given up.

    Parameters
    ----------
    columns : int, default=128
        Columns of the first set; one block where that has more.
    growth : float, default=0.5
        Blocks that join a set, as a share of its active ones.
    decrease : float, default=0.2
        Gap of the set over that of all blocks, at the last check of these, at which all blocks are checked again. The
        set changes if it is below the root of that then. Blocks leave a set whose dual norms are by more below
        ``alpha``.
    wait : int, default=50
        Steps from one check to the next at most, or ``Patience.share`` of those so far where that is more.
    widest : float, default=inf
        Columns of the widest set over the number of samples, or over that of all columns where these are fewer or may
        take its place.
    largest_width : float, default=inf
        Columns of the widest set: some matrices of that side are held.
    single : bool, default=False
        Whether Gram matrices are computed in single precision, and corrected at each check.
    far : float, default=4
        Factor by which dual norms fall and sets grow, after the first check. Blocks whose dual norm is above this times
        ``alpha`` will be active. In sets of which this times the width is too much, so will all blocks of the set and
        all that violate the dual constraint, unless these have become fewer, by `decrease` since the first check.
    form : {"samples", "root", "gram"}, default="gram"
        What the inner algorithm sees with the squared loss: the samples, a root of the Gram matrix in their place where
        there are fewer columns than samples, or the samples with a Gram matrix, which may be in single precision and
        whose blocks never leave, as ``BlockDescent`` needs.
    ends_in_all : bool, default=False
        Whether all blocks take the place of a set that would be too wide; else the algorithm is finished then.
    block_steps : float, default=inf
        Blocks of the sets, summed over the steps, after which the algorithm is finished.
    """

    columns: int = 128
    growth: float = 0.5
    decrease: float = 0.2
    wait: int = 50
    widest: float = math.inf
    largest_width: float = math.inf
    single: bool = False
    far: float = 4.0
    form: Literal["samples", "root", "gram"] = "gram"
    ends_in_all: bool = False
    block_steps: float = math.inf


class _State(NamedTuple):
    first: Point  # where it began
    whole: Point  # of all blocks, at their last check
    gap: float  # its estimated gap
    gram: SupportGram
    blocks: Tensor  # of the set
    rounding: float  # gap below which nothing but rounding is left
    inner: Running | None = None  # None: too many blocks
    n_steps: int = 0
    block_steps: int = 0  # blocks of the sets, summed over the steps
    checked_at: int = 0  # step of the last check; 0 before the first
    n_sets: int = 0
    n_wanted: int = 0  # blocks of the set and that violate the dual constraint, at the first check; 0 before
    to_change: bool = False


class WorkingSet(PrimalDualSolver):
    """Another algorithm on the blocks that violate the dual constraint most; finished when there are too many of them.

    The set starts with the blocks of the largest dual norm. The stage `inner` works on it until the gap of the set is
    well below that of all blocks. Then half as many others as are active join it, those of the largest dual norm. With
    the squared loss the algorithm may see the Gram matrix of the set in place of the samples, which is only extended,
    along a path, too. The algorithm is finished once the set would be too wide, or that many blocks will be active, or
    its steps have been too many.
    """

    name = property(lambda self: f"working_set({self.inner.algorithm.name})")

    def __init__(self, inner: Stage, config: WorkingSetConfig | None = None) -> None:
        self.inner, self.config = inner, config or WorkingSetConfig()

    def unmet_requirement(self, program: Program) -> str | None:
        return self.inner.algorithm.unmet_requirement(program)

    def init_again(self, program: Program, start: Point, previous: _State | None) -> _State:
        whole = point_at(program, *as_start(program, start))
        blocks, known = nonzero_blocks(whole.coef).nonzero()[:, 0], None
        if previous is None:
            is_single = self.config.single and squares_fit_single(program)
            gram = SupportGram(program.map, program.block_means, single=is_single)
        else:
            gram, known = previous.gram, previous.inner
            blocks = torch.cat([previous.blocks, blocks[~torch.isin(blocks, previous.blocks)]])
        gap, rounding = gap_estimate(program, whole), SUM * program.null_value
        return self._changed(program, _State(whole, whole, gap, gram, blocks, rounding), known)

    def step(self, program: Program, state: _State) -> _State:
        state = state._replace(n_steps=state.n_steps + 1)
        if state.to_change:  # not earlier: the solve might have ended with the check
            state = self._changed(program, state, state.inner)
        if state.inner is None:
            return state
        inner = stepped(state.inner)
        state = state._replace(inner=inner, block_steps=state.block_steps + len(state.blocks))
        waited = state.n_steps - state.checked_at >= max(self.config.wait, Patience.share * state.checked_at)
        # A gap below zero is that of a dual point whose mean is not zero: it tells by its size.
        wanted = max(self.config.decrease * abs(state.gap), state.rounding)
        solved = inner.gap is not None and abs(inner.gap) <= wanted
        if not (waited or solved or inner.stage.algorithm.finished(inner.inner)):
            return state
        whole = _of_all_blocks(program, inner)
        gap = gap_estimate(program, whole)
        # All gaps fall while the set is solved: a share that is nearly as small says the same.
        to_change = inner.gap is None or abs(inner.gap) < math.sqrt(self.config.decrease) * gap
        return state._replace(whole=whole, gap=gap, checked_at=state.n_steps, to_change=to_change)

    def _changed(self, program: Program, state: _State, inner: Running | None) -> _State:
        """The state on the set that the last check asks for."""
        blocks, n_wanted = self._chosen(program, state)
        state = state._replace(to_change=False)
        if state.checked_at and not state.n_wanted:
            state = state._replace(n_wanted=n_wanted)
        if blocks is None:
            # The first of many sets leaves a few blocks that are far too large, which misleads what goes by their size.
            return state._replace(inner=None, whole=state.first if state.n_sets == 1 else state.whole)
        if inner is not None and torch.equal(blocks, state.blocks):
            if state.checked_at and self.config.form != "gram":
                return state
            reductions = inner.stage.reductions  # so that the program is kept, with all that is known of it
        else:
            reductions = self._reductions(program, state, blocks)
        stage = dataclasses.replace(self.inner, reductions=reductions)
        known = None
        if inner is not None:
            known = stage.algorithm.on_other_blocks(inner.inner, lambda coef: _moved(coef, state, blocks))
        # A check's own correlation is that of the inner algorithm's dual point; that of a path's next start is not.
        start = state.whole if known is None or state.checked_at else state.whole._replace(correlation=None)
        inner = begun(stage, program, start, inner, known)
        return state._replace(blocks=blocks, inner=inner, n_sets=state.n_sets + 1)

    def _chosen(self, program: Program, state: _State) -> tuple[Tensor | None, int]:
        """The set with the blocks that violate the dual constraint most, or None; how many are of it or violate."""
        config, width = self.config, program.coef_shape[-2]
        assert state.whole.correlation is not None
        norms = program.penalty.group_dual_norms(_by_block(state.whole.correlation))
        norms = norms.reshape(len(norms), -1).amax(1) / program.alpha
        active, blocks, n_blocks = nonzero_blocks(state.whole.coef), state.blocks, len(norms)
        # A Gram matrix is only extended; else blocks leave that are neither active nor about to be.
        stay = blocks if config.form == "gram" else blocks[active[blocks] | (norms[blocks] > 1 - config.decrease)]
        norms[blocks] = 0.0
        n_violating = int((norms > 1).sum())
        n_wanted = len(stay) + n_violating
        widest = min(config.widest * min(program.map.n_samples, n_blocks * width), config.largest_width) / width
        limit = config.widest * n_blocks if config.ends_in_all else widest
        room = math.ceil(config.growth * int(active.sum())) if state.checked_at else config.columns // width
        size = max(min(max(room, 1), n_violating), 1 - len(stay))
        is_settled = config.far * len(stay) > limit and n_wanted > (1 - config.decrease) * state.n_wanted > 0
        n_expected = n_wanted if is_settled else int((norms > config.far).sum())
        if len(stay) + size <= limit and not (state.checked_at and n_expected > limit):
            return torch.cat([stay, norms.topk(size).indices]), n_wanted
        return torch.arange(n_blocks, device=norms.device) if config.ends_in_all else None, n_wanted

    def _reductions(self, program: Program, state: _State, blocks: Tensor) -> tuple[Reduction, ...]:
        """What makes the program that of some blocks."""
        form, others = self.config.form, self.inner.reductions
        if self.config.ends_in_all and len(blocks) == math.prod(program.coef_shape[:-2]):
            return others
        wide = len(blocks) * program.coef_shape[-2] >= len(program.y)
        if form == "samples" or not program.loss.quadratic or (form == "root" and wide):
            return (Restrict(blocks), *others)
        gram, means = state.gram.of(blocks, program.weight, copy=False), state.gram.center
        if form == "gram":
            return (Restrict(blocks, gram), *others)
        # The dual point of the best constant model is the targets without their means.
        target = _by_block(program.null_correlation)[blocks].flatten(0, 1)
        return (Compress(blocks, gram, target, None if means is None else means[blocks].flatten()), *others)

    def point(self, program: Program, state: _State) -> Point:
        if state.inner is None or state.n_steps == state.checked_at:
            point = state.whole
        else:
            point = _of_all_blocks(program, state.inner)
        # Of data that are not in memory a certificate finds predictions and dual point in one pass.
        return point if program.map.in_memory else Point(point.coef, point.intercept)

    def knows_gap(self, state: _State) -> bool:
        return state.n_steps == state.checked_at

    def gap_estimate(self, program: Program, state: _State) -> float:
        return state.gap if self.knows_gap(state) else math.inf

    def activity(self, state: _State) -> str:
        if state.inner is None:
            return "working set outgrown"
        n_blocks = math.prod(state.whole.coef.shape[:-2])
        return f"{state.inner.activity()} on {len(state.blocks)} of {n_blocks} blocks"

    def finished(self, state: _State) -> bool:
        return state.inner is None or state.block_steps >= self.config.block_steps or self.is_exact(state)

    def is_exact(self, state: _State) -> bool:
        """Whether its steps have left nothing but rounding of the gap."""
        return state.n_steps > 0 and abs(state.gap) <= state.rounding


def _by_block(coef: Tensor) -> Tensor:
    return coef.reshape(-1, *coef.shape[-2:])


def _moved(coef: Tensor, state: _State, blocks: Tensor) -> Tensor:
    """Coefficients of a set, or of its first blocks, on other blocks."""
    of_set = _by_block(coef)
    of_all = coef.new_zeros((math.prod(state.whole.coef.shape[:-2]), *coef.shape[-2:]))
    return of_all.index_copy_(0, state.blocks[: len(of_set)].to(coef.device), of_set)[blocks.to(coef.device)]


def _of_all_blocks(program: Program, inner: Running) -> Point:
    """The inner algorithm's point, with its own predictions where it has no dual point, and the correlation of all."""
    point = inner.result()
    if point.pred is None and not program.map.in_memory:
        return with_own_predictions(program, point)
    if point.pred is None or point.fitted is None:
        fitted = point.fitted if point.fitted is not None else own_predictions(program, point.coef)
        point = point._replace(pred=fitted, fitted=fitted)
    return with_own_correlation(program, point)

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
)
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.base import Reduction
from convexformer_solvers.reductions.blocks import Compress, Restrict
from convexformer_solvers.reductions.precision import squares_fit_single

from .base import PrimalDualSolver
from .stage import Running, Stage, begun, stepped

# Gap over the best constant model's objective that is the rounding of the sums in it.
_ROUNDING = 1e-13


@dataclass(frozen=True)
class WorkingSetConfig:
    """How a working set is chosen, grows and is given up.

    Parameters
    ----------
    first_columns : int, default=128
        Columns of the first set; one block where that has more.
    more_columns : int, default=128
        Columns that join a set at least; one block where that has more.
    growth : float, default=0.5
        What joins a set, as a share of its active blocks, where that is more.
    decrease : float, default=0.1
        Gap of the set over that of all blocks at the last look, at which all blocks are looked at again.
    wait : int, default=50
        Steps from one look to the next at most, or a quarter of those so far where that is more.
    worth_changing : float, default=4
        Gap of all blocks over that of the set from which on the set changes.
    widest : float, default=1
        Columns of the widest set over the number of samples, or over that of all columns where these are fewer.
    widest_start : float, default=0.35
        Columns of the active blocks over the number of samples from which on the next alpha of a path has no set.
    largest_width : int, default=6000
        Columns of the widest set: some matrices of that side are held.
    least_single : int, default=2**18
        Numbers of data from which on Gram matrices are computed in single precision, and corrected at each look.
    far : float, default=4
        Dual norm, in units of ``alpha``, of blocks that will be active, after the first look.
    form : {"samples", "root", "gram"}, default="gram"
        What the inner algorithm sees with the squared loss: the samples, a root of the Gram matrix in their place where
        there are fewer columns than samples, or the samples with a Gram matrix, which may be in single precision.
    ends_in_all : bool, default=False
        Whether all blocks take the place of a set that would be too wide; else the algorithm is finished then. Sets
        that may end so are of samples, not of a Gram matrix, and lose blocks that are neither active nor about to be.
    """

    first_columns: int = 128
    more_columns: int = 128
    growth: float = 0.5
    decrease: float = 0.1
    wait: int = 50
    worth_changing: float = 4.0
    widest: float = 1.0
    widest_start: float = 0.35
    largest_width: int = 6000
    least_single: int = 2**18
    far: float = 4.0
    form: Literal["samples", "root", "gram"] = "gram"
    ends_in_all: bool = False


class _State(NamedTuple):
    first: Point  # where it began
    whole: Point  # of all blocks, when they were last looked at
    gap: float  # its estimated gap
    gram: SupportGram
    blocks: Tensor  # of the set
    rounding: float  # gap below which nothing but rounding is left
    inner: Running | None = None  # None: too many blocks
    n_steps: int = 0
    looked_at: int = 0
    gaps: tuple[float, ...] = ()  # at all looks
    to_change: bool = False


class WorkingSet(PrimalDualSolver):
    """Another algorithm on the blocks that violate the dual constraint most; finished when there are too many of them.

    The set starts with the blocks of the largest dual norm. The inner algorithm works on it until the gap of the set is
    well below that over all blocks. Then half as many others as are active join it, the worst violating ones first.
    With the squared loss and fewer columns than samples it sees the Gram matrix of the set in place of the samples
    (``Compress``), which is only extended; along a path each alpha goes on with that. Once the set would be wider than
    it pays, or as many blocks as that violate by far, there is no point in it.

    Parameters
    ----------
    inner : Stage
        The algorithm of the set, with its polish.
    config : WorkingSetConfig, optional
        How the set grows. Default: that of ``WorkingSetConfig``.

    Examples
    --------
    >>> from convexformer_solvers import Admm
    >>> from convexformer_solvers.algorithms.stage import Stage
    >>> WorkingSet(Stage(Admm(), "an example")).name
    'working_set(admm)'
    """

    def __init__(self, inner: Stage, config: WorkingSetConfig | None = None) -> None:
        self.inner, self.config = inner, config or WorkingSetConfig()

    @property
    def name(self) -> str:
        return f"working_set({self.inner.algorithm.name})"

    def unmet_requirement(self, program: Program) -> str | None:
        return self.inner.algorithm.unmet_requirement(program)

    def init_again(self, program: Program, start: Point, previous: _State | None) -> _State:
        whole = point_at(program, *as_start(program, start))
        blocks = nonzero_blocks(whole.coef).nonzero()[:, 0]
        if previous is None:
            is_large = self.config.form == "gram" and program.map.n_stored >= self.config.least_single
            is_single = is_large and squares_fit_single(program)
            gram = SupportGram(program.map, _column_means(program), single=is_single)
        else:
            gram = previous.gram
            blocks = torch.cat([previous.blocks, blocks[~torch.isin(blocks, previous.blocks)]])
        state = _State(whole, whole, gap_estimate(program, whole), gram, blocks, _ROUNDING * program.null_value)
        wide = int(nonzero_blocks(whole.coef).sum()) * program.coef_shape[-2] > self.config.widest_start * len(
            program.y
        )
        if previous is not None and wide and not self.config.ends_in_all:
            return state
        return self._changed(program, state, None if previous is None else previous.inner)

    def step(self, program: Program, state: _State) -> _State:
        state = state._replace(n_steps=state.n_steps + 1)
        if state.to_change:  # not earlier: the solve might have ended with the look
            state = self._changed(program, state, state.inner)
        if state.inner is None:
            return state
        state = state._replace(inner=stepped(state.inner))
        return self._looked(program, state) if self._is_due(state) else state

    def _is_due(self, state: _State) -> bool:
        """Whether to look at all blocks."""
        inner = state.inner
        assert inner is not None
        waited = state.n_steps - state.looked_at >= max(self.config.wait, 0.25 * state.looked_at)
        # A gap below zero is that of a dual point whose mean is not zero: it tells by its size.
        solved = inner.gap is not None and abs(inner.gap) <= self.config.decrease * abs(state.gap)
        return waited or solved or inner.stage.algorithm.finished(inner.inner)

    def _looked(self, program: Program, state: _State) -> _State:
        """The state after a look at all blocks."""
        inner = state.inner
        assert inner is not None
        whole = with_own_correlation(program, _with_predictions(program, inner.result()))
        gap = gap_estimate(program, whole)
        worth_it = inner.gap is None or gap > self.config.worth_changing * abs(inner.gap)
        return state._replace(
            whole=whole,
            gap=gap,
            looked_at=state.n_steps,
            gaps=(*state.gaps, gap),
            to_change=worth_it,
        )

    def _changed(self, program: Program, state: _State, inner: Running | None) -> _State:
        """The state on the set that the last look asks for."""
        blocks = self._chosen(program, state)
        state = state._replace(to_change=False)
        if blocks is None:
            # The first of many sets leaves a few blocks that are far too large, which misleads what goes by their size.
            return state._replace(inner=None, whole=state.first if len(state.gaps) == 1 else state.whole)
        stage, known = dataclasses.replace(self.inner, reductions=self._reductions(program, state, blocks)), None
        if inner is not None and state.gaps and self.config.form != "gram" and torch.equal(blocks, state.blocks):
            return state
        if inner is not None and stage.algorithm.takes_other_blocks:
            known = inner.inner
        # A look's own correlation is that of the inner algorithm's dual point; that of a path's next start is not.
        start = state.whole._replace(correlation=None) if known is not None and not state.gaps else state.whole
        return state._replace(blocks=blocks, inner=begun(stage, program, start, known=known))

    def _reductions(self, program: Program, state: _State, blocks: Tensor) -> tuple[Reduction, ...]:
        """What makes the program that of some blocks."""
        form, others = self.config.form, self.inner.reductions
        if self.config.ends_in_all and len(blocks) == math.prod(program.coef_shape[:-2]):
            return others
        if form == "samples" or not program.loss.quadratic:
            return (Restrict(blocks), *others)
        if form == "root" and len(blocks) * program.coef_shape[-2] >= len(program.y):
            return (Restrict(blocks), *others)
        gram, means = state.gram.of(blocks, program.weight, copy=False), state.gram.center
        if form == "gram":
            return (Restrict(blocks, gram), *others)
        # The dual point of the best constant model is the targets without their means.
        target = _by_block(program.null_correlation)[blocks].flatten(0, 1)
        return (Compress(blocks, gram, target, None if means is None else means[blocks].flatten()), *others)

    def _chosen(self, program: Program, state: _State) -> Tensor | None:
        """The set with the blocks that violate the dual constraint most; None where there are too many."""
        config, alpha, width = self.config, program.alpha, program.coef_shape[-2]
        assert state.whole.correlation is not None
        norms, active = largest_dual_norms(program, state.whole.correlation), nonzero_blocks(state.whole.coef)
        blocks, n_active, n_blocks = state.blocks, int(active.sum()), len(norms)
        if config.ends_in_all:
            return self._of_some_or_all(state, alpha, norms, active)
        known = torch.zeros_like(active)
        known[blocks] = True
        n_violating, n_far = (int((~known & (norms > factor * alpha)).sum()) for factor in (1.0, config.far))
        columns = config.more_columns if state.gaps else config.first_columns
        room = max(columns // width, math.ceil(config.growth * n_active), 1)
        if config.form == "gram":  # which is only extended
            size = len(blocks) + max(min(room, n_violating), 1 - len(blocks))
            norms[known] = math.inf
        else:
            size = max(min(n_active + room, int((active | known).sum()) + n_violating), 1)
            norms[known] = norms[known].clamp(min=alpha)
            norms[active] = math.inf
        limit = config.widest * min(program.map.n_samples, n_blocks * width) / width
        limit = min(limit, config.largest_width / width)
        stands_still = len(state.gaps) > 3 and state.gap > 0.5 * state.gaps[-4] and size > config.widest_start * limit
        hopeless = len(state.gaps) > 0 and n_far > limit
        if size > limit or hopeless or stands_still:
            return None
        chosen = norms.topk(size).indices
        return torch.cat([blocks, chosen[~known[chosen]]]) if config.form == "gram" else chosen.sort().values

    def _of_some_or_all(self, state: _State, alpha: float, norms: Tensor, active: Tensor) -> Tensor:
        """A set that loses blocks, too: those that are neither active nor about to be; all of them in the end."""
        config, n_blocks, blocks = self.config, len(norms), state.blocks
        stays = blocks[active[blocks] | (norms[blocks] > 0.9 * alpha)]
        norms = norms.index_fill(0, blocks, 0.0)
        n_violating, n_far = int((norms > alpha).sum()), int((norms > config.far * alpha).sum())
        first = config.first_columns // state.whole.coef.shape[-2]
        if not state.gaps:
            size = min(first, n_blocks)
        elif n_violating == 0 and len(stays) > 0.7 * len(blocks):
            return blocks
        else:
            room = max(first - len(stays), math.ceil(config.growth * int(active.sum())), 1)
            size = min(max(room, n_far if len(state.gaps) > 1 else 0), n_violating)
        chosen = torch.cat([stays, norms.topk(size).indices])
        if len(chosen) > config.widest * n_blocks:
            return torch.arange(n_blocks, device=norms.device)
        return chosen.sort().values

    def point(self, program: Program, state: _State) -> Point:
        if state.inner is None or state.n_steps == state.looked_at:
            return state.whole
        return with_own_correlation(program, _with_predictions(program, state.inner.result()))

    def knows_gap(self, state: _State) -> bool:
        return state.n_steps == state.looked_at

    def activity(self, state: _State) -> str:
        if state.inner is None:
            return "working set outgrown"
        n_blocks = math.prod(state.whole.coef.shape[:-2])
        return f"{state.inner.activity()} on {len(state.blocks)} of {n_blocks} blocks"

    def finished(self, state: _State) -> bool:
        # Below the last limit nothing but rounding is left of the gap.
        return state.inner is None or abs(state.gap) <= state.rounding


def _by_block(coef: Tensor) -> Tensor:
    return coef.reshape(-1, *coef.shape[-2:])


def _column_means(program: Program) -> Tensor | None:
    """Weighted means of the columns, ``(n_blocks, d)``, which an intercept takes away."""
    if not program.fit_intercept:
        return None
    return program.map.rmatvec(program.weight[:, None])[..., 0].reshape(-1, program.coef_shape[-2])


def _with_predictions(program: Program, point: Point) -> Point:
    """The point with the predictions that it lacks, where its algorithm has no dual point: its own."""
    if point.pred is not None and point.fitted is not None:
        return point
    fitted = point.fitted if point.fitted is not None else own_predictions(program, point.coef)
    return point._replace(pred=fitted, fitted=fitted)


def largest_dual_norms(program: Program, coef: Tensor) -> Tensor:
    """Largest dual norm of each block's groups, shape ``(n_blocks,)``."""
    norms = program.penalty.group_dual_norms(_by_block(coef))
    return norms.reshape(len(norms), -1).amax(1)

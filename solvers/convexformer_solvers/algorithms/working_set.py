"""A solver on a growing set of blocks, checked against all blocks now and then."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.linalg.gram import SupportGram
from convexformer_solvers.linear_maps.base import nonzero_blocks
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.blocks import CompressedPart, Part, RestrictedPart, largest_dual_norms

from .primal_dual import Iterate, PrimalDualSolver

# The set is solved until its rough gap is this far below that over all blocks; then all blocks are looked at.
_INNER_DECREASE = 0.3
_LONGEST_WAIT = 50
# The set changes where the gap over all blocks is this far above its own, and has then so many blocks per active one.
_WORTH_CHANGING = 4.0
_GROWTH = 1.5
# Columns of the widest set over the number of samples: beyond, all samples serve as well and once and for all.
_WIDEST = 0.6
# Columns of the widest set: five matrices of that side are held.
_LARGEST_WIDTH = 6000
# Share of active blocks above which a wide set is given up.
_CROWDED = 0.9
# Dual norm of a block, in units of alpha, that says that it will be active. This counts after one look at all blocks
# for so many products with the data that the Gram matrix of all features costs.
_FAR = 2.0
_PRODUCTS_PER_LOOK = 100.0


class _State(NamedTuple):
    whole: Iterate  # of all blocks, when they were last looked at
    gap: float  # its rough gap
    gram: SupportGram
    part: Part | None  # None: too many blocks
    inner: Any
    iteration: int = 0
    looked_at: int = 0
    n_looks: int = 0
    to_change: bool = False


class WorkingSet(PrimalDualSolver):
    """Another solver on the blocks that violate the dual constraint most; finished when there are too many of them.

    The set starts with the blocks of the largest dual norm. The inner solver works on it until the rough gap of the
    set is well below that over all blocks. Then it becomes the active blocks and, the worst violating ones first,
    half as many others. With the squared loss and fewer columns than samples the inner solver sees their Gram matrix
    in place of the samples, see ``CompressedPart``. Once the set would be wider than three fifths of the number of
    samples, than half of all columns, or than 6000 columns, there is no point in it.

    Parameters
    ----------
    inner : PrimalDualSolver
        The solver of the set.
    first_width : int, default=500
        Columns of the first set, or of one block where that has more.

    Examples
    --------
    >>> from convexformer_solvers import Admm
    >>> WorkingSet(Admm()).name
    'working_set(admm)'
    """

    def __init__(self, inner: PrimalDualSolver, first_width: int = 500) -> None:
        self.inner, self.first_width = inner, first_width

    @property
    def name(self) -> str:
        return f"working_set({self.inner.name})"

    def unmet_requirement(self, program: Program) -> str | None:
        return self.inner.unmet_requirement(program)

    def init_at(self, program: Program, coef: Tensor, pred: Tensor | None, previous: _State | None = None) -> _State:
        program = program.drop_zero_weights().with_float64_targets()
        whole = Iterate.at(program, coef, pred)
        gram = SupportGram(program.map) if previous is None else previous.gram
        state = _State(whole, whole.gap_estimate, gram, None, None)
        none = torch.zeros(0, dtype=torch.int64, device=whole.coef.device)
        return self._on(state, _chosen(whole, none, self.first_width))

    def _on(self, state: _State, blocks: Tensor | None) -> _State:
        """The state with its inner solver started on some blocks."""
        if blocks is None:
            return state._replace(part=None, inner=None)
        whole = state.whole
        compresses = whole.program.loss.quadratic and len(blocks) * whole.coef.shape[-2] < len(whole.pred)
        part = (
            CompressedPart(whole.program, blocks, state.gram) if compresses else RestrictedPart(whole.program, blocks)
        )
        inner = self.inner.init_at(part.program, part.on_blocks(whole.coef), part.pred_of(whole))
        return state._replace(part=part, inner=inner)

    def step(self, program: Program, state: _State) -> _State:
        state = state._replace(iteration=state.iteration + 1)
        if state.to_change:  # not earlier: the solve might have ended with the look
            state = self._changed(state)
        if state.part is None:
            return state
        state = state._replace(inner=self.inner.step(state.part.program, state.inner))
        # A rough gap below zero is that of a dual point whose mean is not zero: it tells by its size.
        near = abs(state.inner.gap) <= _INNER_DECREASE * abs(state.gap) or self.inner.finished(state.inner)
        return self._look(state) if near or state.iteration - state.looked_at >= _LONGEST_WAIT else state

    def _look(self, state: _State) -> _State:
        """Look at all blocks, and see whether others violate the dual constraint by what matters."""
        assert state.part is not None
        whole = self.iterate(state).with_own_ascent()
        gap = whole.gap_estimate
        return state._replace(
            whole=whole,
            gap=gap,
            looked_at=state.iteration,
            n_looks=state.n_looks + 1,
            to_change=gap > _WORTH_CHANGING * state.inner.gap,
        )

    def _changed(self, state: _State) -> _State:
        """The state on the set that the last look asks for."""
        assert state.part is not None
        whole, known, linear_map = state.whole, state.part.blocks, state.whole.program.map
        n_products = linear_map.gram_work() / linear_map.product_work(whole.pred.shape[1])
        blocks = _chosen(whole, known, self.first_width, hopeful=state.n_looks < n_products / _PRODUCTS_PER_LOOK)
        state = state._replace(to_change=False)
        return state if blocks is not None and torch.equal(blocks, known) else self._on(state, blocks)

    def iterate(self, state: _State) -> Iterate:
        if state.part is None or state.iteration == state.looked_at:
            return state.whole
        return state.part.iterate_of(self.inner.iterate(state.inner))

    def estimated_gap(self, state: _State) -> float:
        return state.gap if state.iteration == state.looked_at else math.inf

    def activity(self, state: _State) -> str:
        if state.part is None:
            return "working set outgrown"
        n_blocks = math.prod(state.whole.coef.shape[:-2])
        return f"{self.inner.activity(state.inner)} on {len(state.part.blocks)} of {n_blocks} blocks"

    def finished(self, state: _State) -> bool:
        return state.part is None


def _chosen(whole: Iterate, known: Tensor, first_width: int, hopeful: bool = True) -> Tensor | None:
    """The active blocks and the worst violating ones, increasing; None where they are too many.

    Blocks of the known set come before others that do not violate. Without hope those that violate by far count as
    active ones to come.
    """
    program = whole.program
    scores, active = largest_dual_norms(program, whole.correlation), nonzero_blocks(whole.coef)
    violation, eligible = scores.clone(), scores > program.alpha
    eligible[known] = True
    scores[known] = scores[known].clamp(min=program.alpha)
    scores[active] = math.inf
    width, n_active = program.coef_shape[-2], int(active.sum())
    wanted = max(math.ceil(_GROWTH * n_active), first_width // width)
    size = max(min(wanted, int((eligible | active).sum())), 1)
    limit = min(_WIDEST * program.map.n_samples / width, 0.5 * len(scores), _LARGEST_WIDTH / width)
    # Where next to all of the set is active, or far too many others violate by far, there is no end in sight.
    crowded = n_active > _CROWDED * len(known) > 0 and size > 0.5 * limit
    far_off = not hopeful and int((active | (violation > _FAR * program.alpha)).sum()) > limit
    if size > limit or crowded or far_off:
        return None
    return scores.topk(size).indices.sort().values

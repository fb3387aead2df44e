"""Features without their means, which an intercept gives back, for solvers that these cost steps."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.algorithms.primal_dual import Iterate, PrimalDualSolver
from convexformer_solvers.linalg.eigenvalue_ratio import sample_kernel
from convexformer_solvers.program import Program

# Numbers of data of which a copy costs next to nothing, two megabytes in float64; and at most, where the sum of squares
# of some samples is so many times that about their means.
_SMALL_COPY = 2**18
_LARGEST_COPY = 2**26
_DOMINATED = 1e8
_SAMPLES = 16


class Centered(PrimalDualSolver):
    """Another solver on data whose features, and targets of a regression, have no means.

    Where there is an intercept the programs are the same but for constant predictions. Products of features whose
    means are far larger than their spread lose the digits in which they differ, and a Gram matrix is theirs alone.
    Data of more than 262,144 numbers are left as they are unless their means are ten thousand times their spread, and
    those of more than 67 million in any case, as are maps that cannot be centred.

    Parameters
    ----------
    inner : PrimalDualSolver
        The solver.

    Examples
    --------
    >>> from convexformer_solvers import Admm
    >>> Centered(Admm()).name
    'admm'
    """

    def __init__(self, inner: PrimalDualSolver) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    def unmet_requirement(self, program: Program) -> str | None:
        return self.inner.unmet_requirement(program)

    def init_at(self, program: Program, coef: Tensor, pred: Tensor | None, previous: _State | None = None) -> _State:
        exact = program.drop_zero_weights().with_float64_targets()
        applies = _pays(exact) if previous is None else previous.applies
        if not applies:
            own, offset = exact, torch.zeros_like(exact.null_intercept)
        elif previous is None:
            own, offset = centered(exact, torch.float64)
        elif exact.loss == previous.exact.loss and torch.equal(exact.y, previous.exact.y):
            own, offset = previous.own.with_alpha(exact.alpha), previous.offset  # knows what does not depend on alpha
        else:
            offset = exact.target_shift
            own = dataclasses.replace(exact, map=previous.own.map, y=exact.y - offset)
        pred = None if pred is None else pred - offset
        inner = self.inner.init_at(own, coef, pred, None if previous is None else previous.inner)
        return _State(exact, own, offset, applies, inner)

    def step(self, program: Program, state: _State) -> _State:
        return state._replace(inner=self.inner.step(state.own, state.inner))

    def iterate(self, state: _State) -> Iterate:
        return self.inner.iterate(state.inner).moved(state.exact, state.offset)

    def handed_over(self, state: _State) -> Iterate:
        return self.inner.handed_over(state.inner).moved(state.exact, state.offset)

    def rounded_iterate(self, state: _State) -> Iterate:
        iterate = self.inner.rounded_iterate(state.inner)
        return iterate.moved(state.exact, state.offset).with_map(iterate.program.map)

    def estimated_gap(self, state: _State) -> float:
        return self.inner.estimated_gap(state.inner)

    def activity(self, state: _State) -> str:
        return self.inner.activity(state.inner)

    def finished(self, state: _State) -> bool:
        return self.inner.finished(state.inner)


class _State(NamedTuple):
    exact: Program  # samples of positive weight, float64 targets
    own: Program  # what the inner solver solves
    offset: Tensor  # by how much its predictions are lower, (c,)
    applies: bool  # whether that and the features are shifted
    inner: Any

    @property
    def gap(self) -> float:
        return self.inner.gap


def _pays(program: Program) -> bool:
    """Whether a copy costs next to nothing, or means leave too few digits to what differs."""
    linear_map = program.map
    if not program.fit_intercept or linear_map.n_stored > _LARGEST_COPY or not linear_map.rows_are_samples:
        return False
    if linear_map.n_stored <= _SMALL_COPY:
        return True
    kernel = sample_kernel(linear_map, _SAMPLES)
    total = float(kernel.trace())
    return total > _DOMINATED * abs(total - float(kernel.mean()) * len(kernel))


def centered(program: Program, dtype: torch.dtype) -> tuple[Program, Tensor]:
    """An equivalent program whose features and targets have no means where there is an intercept.

    Parameters
    ----------
    program : Program
        With samples of positive weight.
    dtype : torch.dtype
        Precision of its map.

    Returns
    -------
    program : Program
    offset : Tensor of shape (c,)
        By how much its predictions are lower.
    """
    linear_map, offset = program.map, program.target_shift
    if program.fit_intercept:
        linear_map = linear_map.centered(program.weight, dtype)
    return dataclasses.replace(program, map=linear_map.to(dtype), y=program.y - offset), offset

"""Alternating directions that Newton steps finish."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .admm import Admm
from .penalties import GroupL2
from .primal_dual import Iterate, PrimalDualSolver
from .program import Program
from .ridge import SMALL_SIDE
from .semismooth import SemismoothNewton

# Rough gap over the best constant model's objective below which Newton steps are worth trying.
_NEAR = 3e-2
# Columns of the support per sample up to which they are tried so early; wider ones after so many iterations.
_NARROW = 0.75
_PATIENCE = 150
# Newton steps that have not ended the matter by then hand back.
_NEWTON_STEPS = 40


class _State(NamedTuple):
    solver: PrimalDualSolver
    inner: Any
    iteration: int = 0
    newton_steps: int = 0
    resting: Any = None  # the state of alternating directions when Newton steps took over
    newton_failed: bool = False

    @property
    def gap(self) -> float:
        return self.inner.gap


class AdmmNewton(PrimalDualSolver):
    """``Admm``, and ``SemismoothNewton`` from its point on once that is near.

    Newton steps are taken where penalty and loss separate over outputs, the rough gap is below 3e-2 of the reference
    and the support is narrower than three quarters of the samples, or after 150 iterations. Where they stall in
    rounding, or forty of them have not ended the matter, alternating directions go on from where they stopped, for
    good.

    Examples
    --------
    >>> AdmmNewton().name
    'admm_newton'
    """

    @property
    def name(self) -> str:
        return "admm_newton"

    def init_at(self, program: Program, coef: Tensor, pred: Tensor | None) -> _State:
        admm = Admm()
        return _State(admm, admm.init_at(program, coef, pred))

    def step(self, program: Program, state: _State) -> _State:
        if state.resting is not None and _newton_failed(state):
            state = _State(Admm(), state.resting, state.iteration, newton_failed=True)
        elif _newton_pays(program, state):
            newton, iterate = SemismoothNewton(), self.iterate(state)
            inner = newton.init_at(program, iterate.coef, iterate.pred)
            state = _State(newton, inner, state.iteration, resting=state.inner)
        return state._replace(
            inner=state.solver.step(program, state.inner),
            iteration=state.iteration + 1,
            newton_steps=state.newton_steps + 1,
        )

    def iterate(self, state: _State) -> Iterate:
        return state.solver.iterate(state.inner)

    def due(self, state: _State, iteration: int) -> bool:
        return state.solver.due(state.inner, iteration)


def _newton_failed(state: _State) -> bool:
    return state.solver.finished(state.inner) or state.newton_steps >= _NEWTON_STEPS


def _newton_pays(program: Program, state: _State) -> bool:
    applies = isinstance(program.penalty, GroupL2) and program.outputs_separate
    if state.newton_failed or state.resting is not None or not applies:
        return False
    if not 0 <= state.gap <= _NEAR * program.null_value:
        return False
    sizes = program.penalty.group_dual_norms(state.inner.coef)
    widest = int((sizes > 0).reshape(-1, sizes.shape[-1]).sum(0).max()) * program.coef_shape[-2]
    return widest <= max(_NARROW * program.map.n_samples, SMALL_SIDE) or state.iteration >= _PATIENCE

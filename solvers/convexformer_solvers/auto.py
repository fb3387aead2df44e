"""The default solver: picks an algorithm by what the program is and changes it by how it goes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .admm import Admm
from .fista import Fista
from .penalties import GroupL2
from .program import Program
from .ridge import SMALL_SIDE
from .semismooth import SemismoothNewton
from .solver import Point, Solver

# Side of the largest matrix to factorise beside the data.
_LARGEST_SIDE = 12_000
# Rough relative gap below which Newton steps are worth trying.
_NEAR = 1e-2
# Alternating directions that have not ended the matter by then leave it to Newton steps even in the samples.
_PATIENCE = 150
# Accelerated gradient steps on a cross-entropy before alternating directions take over.
_FISTA_STEPS = 400
# Newton steps that have not ended the matter by then hand back.
_NEWTON_STEPS = 40


class _State(NamedTuple):
    solver: Solver
    inner: Any
    iteration: int
    newton_steps: int = 0
    resting: tuple[Solver, Any] | None = None  # the first solver as it was when Newton steps took over
    newton_failed: bool = False


class Auto(Solver):
    """Alternating directions first, Newton steps in the support once near; accelerated gradients for the largest data.

    - A separable loss of bounded curvature and data whose smaller side can be factorised: ``Admm``. Its iterations do
      not mind correlated features and serve every penalty, all outputs and gates at once.
    - A cross-entropy: ``Fista``, and ``Admm`` from its point on where 400 steps have not ended the matter.
    - Once the rough gap is below 1e-2 of the reference and the support is narrower than the samples are many
      (or after 150 iterations): ``SemismoothNewton``, where penalty and loss separate over outputs.
    - Else ``Fista``, and for losses of unbounded curvature Newton steps from there.
    - Where Newton steps stall in rounding, or forty of them have not ended the matter, the first solver takes over
      again, for good.

    The choice depends on the program and the iterates alone, never on a clock, so that runs can be repeated.

    Examples
    --------
    >>> Auto().name
    'auto'
    """

    @property
    def name(self) -> str:
        return "auto"

    def init(self, program: Program, start: Point) -> _State:
        solver = _first_solver(program)
        return _State(solver, solver.init(program, start), 0)

    def step(self, program: Program, state: _State) -> _State:
        if state.resting is not None and _newton_failed(state):
            state = _State(*state.resting, state.iteration, newton_failed=True)
        elif isinstance(state.solver, Fista) and state.iteration == _FISTA_STEPS and _admm_applies(program):
            admm = Admm()
            state = _State(admm, admm.init(program, self.point(program, state)), state.iteration)
        elif _newton_pays(program, state):
            newton = SemismoothNewton()
            if isinstance(state.solver, Admm):
                inner = newton.init_at(program, state.inner.coef, state.inner.fitted)
            else:
                inner = newton.init_at(program, state.inner.coef, None)
            state = _State(newton, inner, state.iteration, resting=(state.solver, state.inner))
        return state._replace(
            inner=state.solver.step(program, state.inner),
            iteration=state.iteration + 1,
            newton_steps=state.newton_steps + 1,
        )

    def point(self, program: Program, state: _State) -> Point:
        return state.solver.point(program, state.inner)

    def due(self, state: _State, iteration: int) -> bool:
        return state.solver.due(state.inner, iteration)

    def finished(self, state: _State) -> bool:
        return not isinstance(state.solver, SemismoothNewton) and state.solver.finished(state.inner)


def _first_solver(program: Program) -> Solver:
    return Admm() if program.loss.separable and _admm_applies(program) else Fista()


def _admm_applies(program: Program) -> bool:
    side = min(program.map.n_samples, math.prod(program.map.feature_shape))
    return math.isfinite(program.loss.smoothness) and side <= _LARGEST_SIDE


def _newton_failed(state: _State) -> bool:
    return state.solver.finished(state.inner) or state.newton_steps >= _NEWTON_STEPS


def _newton_pays(program: Program, state: _State) -> bool:
    if state.newton_failed or isinstance(state.solver, SemismoothNewton) or not _newton_applies(program):
        return False
    if isinstance(state.solver, Fista):
        return state.iteration == _PATIENCE and program.map.n_samples <= _LARGEST_SIDE
    inner = state.inner
    if not 0 <= inner.gap <= _NEAR * program.null_value:
        return False
    sizes = program.penalty.group_dual_norms(inner.coef)
    widest = int((sizes > 0).reshape(-1, sizes.shape[-1]).sum(0).max()) * program.coef_shape[-2]
    return widest <= max(0.5 * program.map.n_samples, SMALL_SIDE) or state.iteration >= _PATIENCE


def _newton_applies(program: Program) -> bool:
    return isinstance(program.penalty, GroupL2) and program.outputs_separate

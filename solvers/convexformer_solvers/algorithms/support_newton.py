"""Newton's method on the objective itself, in the active groups, for losses that couple the outputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.linalg.coupled_systems import BlockTerms, CoupledSystem
from convexformer_solvers.linalg.hessian import Curvature
from convexformer_solvers.linalg.line_search import accepted_step
from convexformer_solvers.program import Program

from .primal_dual import Iterate, PrimalDualSolver, own_predictions

# Share of the penalty's curvature across a group that stands for curvature along it where the same move in all outputs
# would else meet none at all; it goes with the relative gap below the second number.
_RADIAL = 3e-3
_RADIAL_FULL = 1e-3
# Violation of a group at zero, in units of what the active ones lack of stationarity, with which it stays there.
_TOLERATED = 0.3


class _State(NamedTuple):
    iterate: Iterate  # its predictions are its own
    system: CoupledSystem
    gap: float
    iteration: int = 0
    finished: bool = False


class SupportNewton(PrimalDualSolver):
    r"""Newton steps in the groups that are not zero, with a search along each step for a smaller objective.

    The penalty's Hessian on an active group is :math:`\alpha (I - u u^\top) / \|z\|` with ``u = z / |z|``. A group
    whose step would carry it across zero is sent to zero; a group at zero that violates its dual constraint takes a
    proximal gradient step at the same time. Where all this leads nowhere, a proximal gradient step of all groups is
    tried. Fast once the support is nearly right, so this is a finisher.

    Needs the group-l2 penalty and a loss that is twice differentiable.

    Examples
    --------
    >>> SupportNewton().name
    'support_newton'
    """

    halving_steps = 4

    @property
    def name(self) -> str:
        return "support_newton"

    def unmet_requirement(self, program: Program) -> str | None:
        if not program.penalty.euclidean:
            return f"the group-l2 penalty, not {program.penalty!r}"
        return super().unmet_requirement(program)

    def init_at(self, program: Program, coef: Tensor, pred: Tensor | None, previous: _State | None = None) -> _State:
        program = program.drop_zero_weights().with_float64_targets()
        coef = coef.to(program.y)
        iterate = _at(program, coef, own_predictions(program, coef))
        system = CoupledSystem(program.map, program.fit_intercept) if previous is None else previous.system
        return _State(iterate, system, iterate.gap_estimate)

    def step(self, program: Program, state: _State) -> _State:
        state = state._replace(iteration=state.iteration + 1)
        for direction in (_newton_direction, _gradient_direction):
            try:
                move, intercept_move = direction(state)
            except torch.linalg.LinAlgError:  # the system overflows
                continue
            image = state.iterate.program.map.matvec(move) + intercept_move
            step = _search(state.iterate, move, image)
            if step is not None:
                return _moved(state, step, move, image)
        return state._replace(finished=True)

    def iterate(self, state: _State) -> Iterate:
        return state.iterate

    def finished(self, state: _State) -> bool:
        return state.finished


def _at(program: Program, coef: Tensor, pred: Tensor) -> Iterate:
    return Iterate(program, coef, pred, pred, coef).with_own_ascent()


def _flat(coef: Tensor) -> Tensor:
    return coef.reshape(-1, *coef.shape[-2:])


def _moved(state: _State, step: float, move: Tensor, image: Tensor) -> _State:
    before = state.iterate
    iterate = _at(before.program, before.coef + step * move, before.pred + step * image)
    return state._replace(iterate=iterate, gap=iterate.gap_estimate)


def _newton_direction(state: _State) -> tuple[Tensor, Tensor]:
    """Move of coefficients and intercepts: Newton's in the active groups, into or out of the support elsewhere."""
    iterate, system = state.iterate, state.system
    program = iterate.program
    coef, correlation = _flat(iterate.coef), _flat(iterate.correlation)
    norms = torch.linalg.vector_norm(coef, dim=1)
    active = norms > 0
    units = torch.where(active[:, None], coef / norms.clamp(min=1e-300)[:, None], 0.0)
    scale = torch.where(active, program.alpha / norms.clamp(min=1e-300), 0.0)
    curvature = Curvature(program, iterate.pred)
    radial = _RADIAL * min(1.0, abs(state.gap) / (_RADIAL_FULL * program.null_value)) * curvature.common_is_free
    terms = BlockTerms(active, scale, (radial - 1) * scale, units, 0.0)
    downhill = correlation - program.alpha * units
    intercept_ascent = (program.weight @ iterate.dual_point())[None]
    rows = system.solve(terms, curvature, torch.cat([downhill.flatten(0, 1), intercept_ascent]))
    move = rows[:-1].reshape(coef.shape)
    crosses = active & (((coef + move) * coef).sum(1) <= 0)
    move = torch.where(crosses[:, None], -coef, move)
    # What the active groups lack may be the cause of as large a violation elsewhere, which then goes by itself.
    unexplained = torch.linalg.vector_norm(torch.where(active[:, None], downhill, 0.0), dim=1).amax()
    entering = _entering(program, curvature, correlation, active, _TOLERATED * unexplained)
    return (move + entering).reshape(iterate.coef.shape), rows[-1]


def _entering(program: Program, curvature: Curvature, correlation: Tensor, active: Tensor, tolerated: Tensor) -> Tensor:
    """Proximal gradient step of the groups at zero that violate their dual constraint by more than is tolerated."""
    norms = torch.linalg.vector_norm(correlation, dim=1)
    violating = ~active & (norms > program.alpha + tolerated)
    if not bool(violating.any()):
        return torch.zeros_like(correlation)
    shrunk = torch.where(violating[:, None], (1 - program.alpha / norms)[:, None] * correlation, 0.0)
    return shrunk * _best_length(program, curvature, shrunk)


def _gradient_direction(state: _State) -> tuple[Tensor, Tensor]:
    """Move of a proximal gradient step: it always leads downhill."""
    iterate = state.iterate
    program = iterate.program
    length = _best_length(program, Curvature(program, iterate.pred), iterate.correlation)
    target = program.penalty.prox(iterate.coef + length * iterate.correlation, length * program.alpha)
    return target - iterate.coef, target.new_zeros(target.shape[-1])


def _best_length(program: Program, curvature: Curvature, direction: Tensor) -> float:
    """Length of the step along a gradient that minimises the quadratic model of the loss."""
    image = program.map.matvec(direction.reshape(program.coef_shape))
    bend = float((image * curvature.product(image)).sum())
    return float(direction.square().sum()) / bend if bend > 0 else 1.0


def _search(iterate: Iterate, move: Tensor, image: Tensor) -> float | None:
    """Step that lowers the objective enough."""
    program = iterate.program

    def objective(step: float) -> float:
        penalty = program.penalty.value(iterate.coef + step * move)
        return float(program.loss_value(iterate.pred + step * image) + program.alpha * penalty)

    slope = -float(program.mean((iterate.dual_point() * image).sum(1)))
    slope += program.alpha * float(program.penalty.value(iterate.coef + move) - program.penalty.value(iterate.coef))
    return accepted_step(objective, slope)

"""Newton's method on ever less smoothed objectives, for every loss and each penalty with a smoothed form."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .curvature import Curvature
from .line_search import longest_step
from .primal_dual import Iterate, PrimalDualSolver, own_predictions
from .program import Program
from .smoothing_systems import Features, System, solved

# The next width, over the last; it comes once the squared length of a step, in the metric of its Hessian, is below this
# share of what the smoothing may cost, or after so many steps.
_NARROWER = 0.1
_NEAR_ENOUGH = 0.05
_MAX_STEPS = 30
# What the smoothing may cost, over the best constant model's objective, below which there is nothing to gain.
_SMALLEST_COST = 1e-15
# From this length of the loss's linear parts on they need a curvature that is not their own.
_LONG_TAILS = 15.0


class _Part(NamedTuple):
    """Outputs that are solved together: all, or one where they are separate."""

    program: Program
    features: Features
    coef: Tensor  # of the smoothed objective
    pred: Tensor  # (N, c)
    ascent: Tensor  # of the columns less their means, from minus the loss's slopes there
    slopes: Tensor  # the weighted mean of minus these, (c,)
    width: float  # of the smoothing
    n_steps: int = 0  # at this width
    cut_short: bool = False  # whether the last step was
    finished: bool = False


class _State(NamedTuple):
    parts: tuple[_Part, ...]
    program: Program  # samples of positive weight, float64 targets
    length: float  # of a gradient step of the loss
    gap: float = math.inf
    iteration: int = 0


class SmoothingNewton(PrimalDualSolver):
    r"""Newton steps on the mean loss plus a smoothed penalty, whose width shrinks to a tenth as each program is solved.

    For widths :math:`\epsilon` on their way to zero the programs are

    .. math:: \min_{Z, b} \frac1N \sum_i l(A_i Z + b, y_i) + \alpha \sum_j \sqrt{s_j(Z)^2 + \epsilon^2}

    with the lengths, or the singular values, :math:`s_j` of the penalty's groups. Each costs :math:`\alpha \epsilon`
    at most for each of these, and its solution is inside the dual constraint, so that the gap there is no larger.
    Twenty to sixty steps in all reach eight digits, be tokens correlated, the regularisation weak or the loss's
    curvature one that jumps. Exact zeros come from a proximal step, which is taken at each iterate for its own sake.

    Linear systems are solved in all features, or in all samples where that costs less; of all outputs at once where
    penalty or loss couples them. Their memory and time grow with the square and the cube of that side, so this is for
    up to some thousands.

    Needs a penalty with ``smoothed_value`` and ``smoothed_derivatives``.

    Examples
    --------
    >>> SmoothingNewton().name
    'smoothing_newton'
    """

    requires_of_penalty = ("smoothed_value", "smoothed_derivatives")

    @property
    def name(self) -> str:
        return "smoothing_newton"

    def init_at(self, program: Program, coef: Tensor, pred: Tensor | None, previous: _State | None = None) -> _State:
        program = program.counted().with_float64_targets()
        coef = coef.to(program.y)
        features = Features(program) if previous is None else previous.parts[0].features
        start = own_predictions(program, coef)
        parts = tuple(_first(program, features, coef, start, outputs) for outputs in _solved_together(program))
        return self._with_gap(_State(parts, program, 1 / program.lipschitz(start)))

    def step(self, program: Program, state: _State) -> _State:
        parts = tuple(part if part.finished else _newton_step(part) for part in state.parts)
        return self._with_gap(state._replace(parts=parts, iteration=state.iteration + 1))

    def _with_gap(self, state: _State) -> _State:
        return state._replace(gap=self.iterate(state).rough_gap)

    def iterate(self, state: _State) -> Iterate:
        coef = torch.cat([_with_zeros(part, state.length) for part in state.parts], dim=-1)
        pred = torch.cat([part.pred for part in state.parts], dim=1)
        ascent = torch.cat([part.ascent for part in state.parts], dim=-1)
        return Iterate(state.program, coef, own_predictions(state.program, coef), pred, ascent)

    def finished(self, state: _State) -> bool:
        return all(part.finished for part in state.parts)


def _solved_together(program: Program) -> list[slice]:
    n_outputs = program.y.shape[1]
    return [slice(k, k + 1) for k in range(n_outputs)] if program.outputs_separate else [slice(n_outputs)]


def _first(program: Program, features: Features, coef: Tensor, pred: Tensor, outputs: slice) -> _Part:
    own = dataclasses.replace(program, y=program.y[:, outputs])
    coef, pred = coef[..., outputs], pred[:, outputs]
    part = _at(_Part(own, features, coef, pred, coef, pred[0], 1.0))
    gap = min(Iterate(own, coef, pred, pred, part.ascent).rough_gap, own.null_value)
    return part._replace(width=max(gap, _SMALLEST_COST * own.null_value) / _cost_of_width(own))


def _at(part: _Part) -> _Part:
    """The part with what follows from its predictions."""
    program = part.program
    theta = -program.weight[:, None] * program.loss.gradient(part.pred, program.y)
    return part._replace(ascent=part.features.adjoint(theta), slopes=theta.sum(0))


def _cost_of_width(program: Program) -> float:
    """What the smoothing costs at most, over its width."""
    zero = torch.zeros(program.coef_shape, dtype=torch.float64, device=program.y.device)
    return program.alpha * float(program.penalty.smoothed_value(zero, 1.0))


def _newton_step(part: _Part) -> _Part:
    """One Newton step, and a smaller width where the objective is solved."""
    try:
        move, image, squared_length = _direction(part)
    except torch.linalg.LinAlgError:  # the system overflows
        return part._replace(finished=True)
    step = _searched(part, move, image, squared_length)
    cost = part.width * _cost_of_width(part.program)
    part = part._replace(n_steps=part.n_steps + 1, cut_short=step != 1.0)
    if step is not None:
        part = _at(part._replace(coef=part.coef + step * move, pred=part.pred + step * image))
    if step is None or squared_length <= _NEAR_ENOUGH * cost or part.n_steps > _MAX_STEPS:
        finished = cost <= _SMALLEST_COST * part.program.null_value
        part = part._replace(width=_NARROWER * part.width, n_steps=0, finished=finished)
    return part


def _direction(part: _Part) -> tuple[Tensor, Tensor, float]:
    """Moves of coefficients and predictions, and the squared length in the metric of the Hessian."""
    program, coef = part.program, part.coef
    gradient, blocks = program.penalty.smoothed_derivatives(coef, part.width)
    sizes = torch.linalg.vector_norm(coef.reshape(len(blocks), -1), dim=1)
    scales = program.alpha / torch.hypot(sizes, sizes.new_tensor(part.width))
    downhill = part.ascent - program.alpha * gradient
    # Where most samples are on linear parts, of which Newton steps see nothing, others alternate with them.
    hardly_curved = part.cut_short and program.tail_length > _LONG_TAILS
    curvature = Curvature(program, part.pred, towards_target=hardly_curved)
    system = System(curvature, program.alpha * blocks, scales, downhill, part.slopes)
    move, intercept_move = solved(program, part.features, system)
    image = part.features.forward(move) + intercept_move
    return move, image, float((move * downhill).sum() + intercept_move @ part.slopes)


def _searched(part: _Part, move: Tensor, image: Tensor, squared_length: float) -> float | None:
    """Longest step that lowers the smoothed objective enough."""
    program = part.program

    def objective(step: float) -> float:
        penalty = program.penalty.smoothed_value(part.coef + step * move, part.width)
        return float(program.loss_value(part.pred + step * image) + program.alpha * penalty)

    return longest_step(objective, -squared_length)


def _with_zeros(part: _Part, least_length: float) -> Tensor:
    """The coefficients after a proximal step, whose length suits the active groups if there are any."""
    program = part.program
    total = float(program.penalty.value(part.coef))
    typical = float(part.coef.square().sum()) / total / program.alpha if total > 0 else 0.0
    length = max(typical, least_length)
    return program.penalty.prox(part.coef + length * part.ascent, length * program.alpha)

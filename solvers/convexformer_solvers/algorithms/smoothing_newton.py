"""Newton's method on ever less smoothed objectives (Qi, Sun and Zhou 2000), for penalties with a smoothed form."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.linalg.hessian import Curvature
from convexformer_solvers.linalg.line_search import backtracking
from convexformer_solvers.linalg.newton_systems import Features, System, solved
from convexformer_solvers.points import Point, as_start, gap_estimate, objective, own_predictions, point_at
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.center import Center
from convexformer_solvers.reductions.weights import Targets
from convexformer_solvers.rounding import EPS, SUM

from .base import PrimalDualSolver


@dataclasses.dataclass(frozen=True)
class SmoothingConfig:
    """Numbers of ``SmoothingNewton``.

    Parameters
    ----------
    narrower : float, default=0.1
        The next width of the smoothing, over the last.
    near_enough : float, default=0.05
        The next width comes once the squared length of a step, in the metric of its Hessian, is below this share of
        what the smoothing costs at most.
    widest : float, default=10
        The first width at most, in units of a gradient step from zero.
    """

    narrower: float = 0.1
    near_enough: float = 0.05
    widest: float = 10.0


class _Part(NamedTuple):
    """Outputs that are solved together: those of one part of the program, as of ``Program.part``."""

    program: Program
    smooth: Program  # with the smoothed loss
    features: Features
    unit_cost: float  # cost of smoothing at most, over its width: of the penalty, and as much again of the loss
    coef: Tensor  # of the smoothed objective
    pred: Tensor  # (N, c)
    correlation: Tensor  # of the columns less their means, from minus the smoothed loss's slopes there
    slopes: Tensor  # the weighted mean of minus these, (c,)
    width: float  # of the smoothing
    finished: bool = False


class _State(NamedTuple):
    parts: tuple[_Part, ...]
    length: float  # of a gradient step of the loss
    point: Point


class SmoothingNewton(PrimalDualSolver):
    r"""Newton steps on the mean loss plus a smoothed penalty, whose width shrinks to a tenth as each program is solved.

    For widths :math:`\epsilon` that tend to zero the programs are

    .. math:: \min_{Z, b} \frac1N \sum_i l_\epsilon(A_i Z + b, y_i) + \alpha \sum_j \sqrt{s_j(Z)^2 + \epsilon^2}

    with the lengths, or the singular values, :math:`s_j` of the penalty's groups. The smoothing costs
    :math:`\alpha \epsilon` at most for each, and so does its solution, which is dual feasible. Twenty to sixty steps
    reach eight digits, also for correlated tokens and weak regularisation. Where no step along a Newton direction
    lowers an objective that is not solved, the system is damped, because the Hessian of a smoothed norm is almost zero
    along a group much longer than the width. Points are those after a proximal step, which gives exact zeros, or those
    before it where these are better.

    The loss :math:`l_\epsilon` is ``Loss.smoothed`` at the cost of the penalty's smoothing, :math:`l` itself for most:
    Huber's loss with a threshold far below the residuals has hardly any curvature of its own.

    Linear systems are solved in the features or in the samples, whichever costs less: memory and time grow with the
    square and the cube of that side. The penalty must have ``smoothed_value`` and ``smoothed_derivatives``.

    Parameters
    ----------
    config : SmoothingConfig, optional
        How the width shrinks. Default: ``SmoothingConfig()``.

    Examples
    --------
    >>> SmoothingNewton().name
    'smoothing_newton'
    """

    name = "smoothing_newton"
    reductions = (Targets(), Center())
    requires_of_penalty = ("smoothed_value", "smoothed_derivatives")

    def __init__(self, config: SmoothingConfig | None = None) -> None:
        self.config = config or SmoothingConfig()

    def unmet_requirement(self, program: Program) -> str | None:
        return super().unmet_requirement(program.part(0))

    def init_again(self, program: Program, start: Point, previous: _State | None) -> _State:
        point = point_at(program, as_start(program, start)[0])
        assert point.correlation is not None
        if program.penalty.dual_norm(point.correlation) < 0.5 * program.alpha:  # a flat loss: no short step leads back
            point = point_at(program, torch.zeros_like(point.coef))
        coef, pred = point.coef, point.pred
        assert pred is not None
        features = Features(program) if previous is None else previous.parts[0].features
        length, n_parts = 1 / program.lipschitz(pred), program.n_parts
        starts = enumerate(zip(coef.chunk(n_parts, dim=-1), pred.chunk(n_parts, dim=1), strict=True))
        parts = tuple(_first(program.part(k), features, *start, length, self.config) for k, start in starts)
        return _State(parts, length, _point(program, parts, length))

    def step(self, program: Program, state: _State) -> _State:
        parts = tuple(part if part.finished else _newton_step(part, self.config) for part in state.parts)
        return _State(parts, state.length, _point(program, parts, state.length))

    def point(self, program: Program, state: _State) -> Point:
        return state.point

    def finished(self, state: _State) -> bool:
        return all(part.finished for part in state.parts)


def _point(program: Program, parts: tuple[_Part, ...], length: float) -> Point:
    """The point after a proximal step, whose length suits the active groups if there are any, or before, if better."""
    coefs = []
    for part in parts:
        total = float(part.program.penalty.value(part.coef))
        typical = float(part.coef.square().sum()) / total / program.alpha if total > 0 else 0.0
        step = max(typical, length)
        coefs.append(part.program.penalty.prox(part.coef + step * part.correlation, step * program.alpha))
    coef = torch.cat(coefs, dim=-1)
    pred = torch.cat([part.smooth.loss.unsmoothed(part.pred, part.program.y) for part in parts], dim=1)
    correlation = torch.cat([part.correlation for part in parts], dim=-1)
    shrunk = Point(coef, pred=pred, fitted=own_predictions(program, coef), correlation=correlation)
    coef, fitted = torch.cat([part.coef for part in parts], dim=-1), torch.cat([part.pred for part in parts], dim=1)
    plain = shrunk._replace(coef=coef, fitted=fitted)
    # By rounding alone, coefficients near zero may have the lower objective.
    is_better = objective(program, plain) < objective(program, shrunk) - SUM * program.null_value
    return plain if is_better else shrunk


def _first(
    own: Program, features: Features, coef: Tensor, pred: Tensor, length: float, config: SmoothingConfig
) -> _Part:
    correlation, slopes = _downhill(own, features, pred)
    unit_cost = own.alpha * float(own.penalty.smoothed_value(torch.zeros_like(coef), 1.0))
    gap = min(own.null_value, gap_estimate(own, Point(coef, pred=pred, fitted=pred, correlation=correlation)))
    width, smooth = gap / unit_cost, own.loss.smoothed(gap / own.y.shape[1])
    if smooth is not own.loss:
        length *= own.loss.smoothness / smooth.smoothness
    if own.alpha_max > 0:  # at most some gradient steps from zero: where alpha is small costs say little
        width = min(width, config.widest * length * own.alpha_max)
    # Where the loss is zero from the start nothing has a size but a gradient step.
    width = max(width, EPS * own.null_value / unit_cost) or length * own.alpha
    return _smoothed(_Part(own, own, features, unit_cost, coef, pred, correlation, slopes, width), width)


def _smoothed(part: _Part, width: float) -> _Part:
    """The part with another width of the smoothing."""
    smooth = part.program.smoothed(width * part.unit_cost)
    if smooth is part.program:
        return part._replace(width=width)
    correlation, slopes = _downhill(smooth, part.features, part.pred)
    return part._replace(smooth=smooth, width=width, correlation=correlation, slopes=slopes)


def _downhill(program: Program, features: Features, pred: Tensor) -> tuple[Tensor, Tensor]:
    """Minus the slopes of the mean loss in coefficients and intercepts."""
    theta = -program.weight[:, None] * program.loss.gradient(pred, program.y)
    return features.adjoint(theta), theta.sum(0)


def _newton_step(part: _Part, config: SmoothingConfig) -> _Part:
    """One Newton step, and a smaller width where the objective is solved."""
    cost = part.width * part.unit_cost
    near = config.near_enough * cost
    try:
        found, squared_length = _search(part, damping=0.0)
        if found is None and not 0 <= squared_length <= near:  # lengths far beyond the width have hardly any curvature
            found, squared_length = _search(part, damping=1.0)
    except torch.linalg.LinAlgError:  # the system overflows
        return part._replace(finished=True)
    if found is not None:
        coef, pred = found
        correlation, slopes = _downhill(part.smooth, part.features, pred)
        part = part._replace(coef=coef, pred=pred, correlation=correlation, slopes=slopes)
        if squared_length > near:
            return part
    if cost <= EPS * part.program.null_value:
        return part._replace(finished=True)
    return _smoothed(part, config.narrower * part.width)


def _search(part: _Part, damping: float) -> tuple[tuple[Tensor, Tensor] | None, float]:
    """Coefficients and predictions of a lower objective along a Newton direction, and its squared length."""
    program = part.smooth
    move, image, squared_length = _direction(part, damping)

    def trial(step: float) -> tuple[Tensor, Tensor]:
        return part.coef + step * move, part.pred + step * image

    def value(end: tuple[Tensor, Tensor]) -> float:
        return float(program.loss_value(end[1]) + program.alpha * program.penalty.smoothed_value(end[0], part.width))

    found = backtracking(trial, value, value((part.coef, part.pred)), -squared_length)
    return None if found is None else found[1], squared_length


def _direction(part: _Part, damping: float) -> tuple[Tensor, Tensor, float]:
    """Moves of coefficients and predictions, and the squared length in the metric of the damped Hessian."""
    program, coef = part.smooth, part.coef
    gradient, blocks = program.penalty.smoothed_derivatives(coef, part.width)
    sizes = torch.linalg.vector_norm(coef.reshape(len(blocks), -1), dim=1)
    scales = program.alpha / torch.hypot(sizes, sizes.new_tensor(part.width))
    downhill = part.correlation - program.alpha * gradient
    blocks = program.alpha * blocks
    blocks.diagonal(dim1=1, dim2=2).add_(damping * scales[:, None])
    system = System(Curvature(program, part.pred), blocks, scales, downhill, part.slopes)
    move, intercept_move = solved(program, part.features, system)
    image = part.features.forward(move) + intercept_move
    return move, image, float((move * downhill).sum() + intercept_move @ part.slopes)

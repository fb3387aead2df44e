"""Semismooth Newton augmented Lagrangian method (Li, Sun and Toh 2018) for group-l2 programs with separable losses."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.linalg.line_search import backtracking
from convexformer_solvers.linalg.newton_systems import NewtonSystem, ProxJacobian
from convexformer_solvers.points import Point, as_start, own_predictions
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.center import Center
from convexformer_solvers.reductions.weights import Targets
from convexformer_solvers.rounding import EPS

from .base import PrimalDualSolver


@dataclasses.dataclass(frozen=True)
class SemismoothConfig:
    """Numbers of ``SemismoothNewton``.

    Parameters
    ----------
    sigma_scale : float, default=5
        Size to which a proximal step lets a violating group grow, over the median active one; and how many times
        shorter steps become where a line search fails.
    sigma_growth : float, default=9
        Growth of the steps, over the square of the Newton steps that the last subproblem took.
    inner_accuracy : float, default=0.3
        Residual of a solved subproblem over the move of the proximal point.
    """

    sigma_scale: float = 5.0
    sigma_growth: float = 9.0
    inner_accuracy: float = 0.3


class _Iterate(NamedTuple):
    """One output's iterate; its program has a single output and weights that are all positive."""

    program: Program
    config: SemismoothConfig
    system: NewtonSystem
    center: Tensor  # proximal point Z_c, (*feature_shape, 1)
    center_intercept: Tensor  # (1,)
    sigma: float
    pred: Tensor  # v, (N, 1)
    theta: Tensor  # minus the gradient of each sample's loss at v, (N, 1)
    correlation: Tensor  # A' diag(p) theta, (*feature_shape, 1)
    coef: Tensor  # prox(Z_c + sigma correlation)
    intercept: Tensor
    merit: float
    residual: Tensor  # A coef + intercept - v, (N, 1)
    inner_steps: int = 0  # Newton steps since the proximal point moved
    shortening: float = 1.0  # factor by which sigma had to fall

    @property
    def finished(self) -> bool:
        return self.shortening < math.sqrt(EPS)


_State = tuple[_Iterate, ...]  # one per output


class SemismoothNewton(PrimalDualSolver):
    r"""Proximal point method whose subproblems are solved by semismooth Newton steps in the predictions.

    Around the proximal point :math:`Z_c` the subproblem's optimum is the root :math:`v` of

    .. math:: A Z(v) - v = 0, \qquad
              Z(v) = \mathrm{prox}_{\sigma\alpha}(Z_c - \sigma A^\top \mathrm{diag}(p)\, l'(v, y)),

    which is the stationarity of its dual, written in predictions so that no iterate leaves the domain of the loss's
    conjugate. Newton systems are solved in the support or in the samples, whichever is smaller: memory and time grow
    with the square and the cube of that side. Ten to thirty steps reach high accuracy, up to two hundred where the
    loss's curvature jumps. The penalty must be the group-l2 one, the loss separable.

    Parameters
    ----------
    config : SemismoothConfig, optional
        Lengths and accuracy of proximal steps. Default: ``SemismoothConfig()``.

    Examples
    --------
    >>> SemismoothNewton().name
    'semismooth_newton'
    """

    name = "semismooth_newton"
    reductions = (Targets(), Center())  # else the intercept's proximal term is large beside all others

    def __init__(self, config: SemismoothConfig | None = None) -> None:
        self.config = config or SemismoothConfig()

    def unmet_requirement(self, program: Program) -> str | None:
        if not (program.penalty.euclidean and program.outputs_separate):
            return f"the group-l2 penalty and a separable loss, not {program.penalty!r} and {program.loss!r}"
        return super().unmet_requirement(program)

    def init_again(self, program: Program, start: Point, previous: _State | None) -> _State:
        coef, pred = as_start(program, start)
        if pred is None:
            pred = own_predictions(program, coef)
        system = previous[0].system if previous else NewtonSystem(program.map, _intercept_scale(program))
        parts = zip(program.y.split(1, 1), coef.split(1, -1), pred.split(1, 1), strict=True)
        programs = ((dataclasses.replace(program, y=y), center, v) for y, center, v in parts)
        return tuple(_first_iterate(*part, self.config, system) for part in programs)

    def step(self, program: Program, state: _State) -> _State:
        return tuple(s if s.finished else _newton_step(s) for s in state)

    def point(self, program: Program, state: _State) -> Point:
        parts = zip(*((s.coef, s.correlation, s.pred, s.residual) for s in state), strict=True)
        coef, correlation, pred, residual = (torch.cat(part, dim=-1) for part in parts)
        return Point(coef, pred=pred, fitted=pred + residual, correlation=correlation)

    def finished(self, state: _State) -> bool:
        return all(s.finished for s in state)


def _first_iterate(
    program: Program, center: Tensor, pred: Tensor, config: SemismoothConfig, system: NewtonSystem
) -> _Iterate:
    fitted = program.map.matvec(center)
    intercept = program.best_intercept(fitted)
    theta = -program.loss.gradient(pred, program.y)
    around = (program, config, system, center, intercept, 1.0)
    iterate = _Iterate(*around, pred, theta, program.weighted_adjoint(theta), center, intercept, 0.0, pred - fitted)
    sigma = _sensible_sigma(iterate)
    if not 0 < sigma < math.inf:  # of squares that are too large or too small
        raise torch.linalg.LinAlgError(f"its first system has sigma {sigma}")
    return _with_residual(_proximal(iterate._replace(sigma=sigma)))


def _intercept_scale(program: Program) -> float:
    """Mean square of a feature, the unit of which the intercept's proximal term has; zero where there is none."""
    if not program.fit_intercept:
        return 0.0
    return float(program.map.weighted_squares(program.weight)) / math.prod(program.map.feature_shape) or 1.0


def _sensible_sigma(iterate: _Iterate) -> float:
    """A sigma at which groups that violate their dual constraint grow no larger than the active ones are."""
    program, scale = iterate.program, iterate.config.sigma_scale
    sizes = program.penalty.group_values(iterate.coef)
    sizes = sizes[sizes > 0]
    if len(sizes) == 0:
        return scale / program.lipschitz(iterate.pred)
    violation = float(program.penalty.dual_norm(iterate.correlation)) - program.alpha
    return scale * float(sizes.median()) / max(violation, program.alpha / scale**2)


def _at(iterate: _Iterate, pred: Tensor) -> _Iterate:
    """The iterate at other predictions ``v``."""
    theta = -iterate.program.loss.gradient(pred, iterate.program.y)
    return _proximal(iterate._replace(pred=pred, theta=theta, correlation=iterate.program.weighted_adjoint(theta)))


def _proximal(iterate: _Iterate) -> _Iterate:
    """Recompute coefficients, intercept and merit from predictions, proximal point and sigma.

    The merit is the dual of the subproblem, up to sign, with the conjugate at ``l'(v)`` as ``v l'(v) - l(v)``.
    """
    program, sigma, theta = iterate.program, iterate.sigma, iterate.theta
    coef = program.penalty.prox(iterate.center + sigma * iterate.correlation, sigma * program.alpha)
    intercept, quadratic = iterate.center_intercept, coef.square().sum()
    if program.fit_intercept:
        scale = iterate.system.intercept_scale
        intercept = intercept + sigma * scale * (program.weight @ theta)
        quadratic = quadratic + intercept.square().sum() / scale
    conjugate = -(iterate.pred * theta).sum(1) - program.loss.value(iterate.pred, program.y)
    merit = float(program.mean(conjugate)) + float(quadratic) / (2 * sigma)
    return iterate._replace(coef=coef, intercept=intercept, merit=merit)


def _with_residual(iterate: _Iterate) -> _Iterate:
    fitted = iterate.program.map.sparse_matvec(iterate.coef) + iterate.intercept
    return iterate._replace(residual=fitted - iterate.pred)


def _newton_step(iterate: _Iterate) -> _Iterate:
    """One Newton step, after moving the proximal point where the subproblem is solved."""
    if iterate.inner_steps > 0 and _solved(iterate):
        grown = iterate.sigma * (1 + iterate.config.sigma_growth / iterate.inner_steps**2)
        sigma = max(grown, iterate.shortening * _sensible_sigma(iterate))
        moved = iterate._replace(center=iterate.coef, center_intercept=iterate.intercept, sigma=sigma, inner_steps=0)
        iterate = _with_residual(_proximal(moved))
    found = _searched(iterate)
    if not iterate.program.loss.smooth_curvature and (found is None or found[0] < 1):
        other = _searched(_with_linear_parts_solved(iterate), linear_parts_move=False)
        if found is None or (other is not None and other[1].merit < found[1].merit):
            found = other
    if found is None:  # the same subproblem with a smaller sigma, from its proximal point
        pred, scale = iterate.program.map.matvec(iterate.center) + iterate.center_intercept, iterate.config.sigma_scale
        shorter = iterate._replace(sigma=iterate.sigma / scale, inner_steps=0, shortening=iterate.shortening / scale)
        return _with_residual(_at(shorter, pred))
    return _with_residual(found[1])._replace(inner_steps=iterate.inner_steps + 1)


def _solved(iterate: _Iterate) -> bool:
    """Whether the subproblem's residual is small beside the move of the proximal point that it causes."""
    size = math.sqrt(float(iterate.program.weight @ iterate.residual.square()[:, 0]))
    move = (iterate.coef - iterate.center).square().sum()
    if iterate.program.fit_intercept:
        move = move + (iterate.intercept - iterate.center_intercept).square().sum() / iterate.system.intercept_scale
    return size <= iterate.config.inner_accuracy * math.sqrt(float(move) / iterate.sigma)


def _searched(iterate: _Iterate, linear_parts_move: bool = True) -> tuple[float, _Iterate] | None:
    """Length and end of a Newton step; none where rounding hides any decrease, as sigma is too large for the data."""
    program, residual = iterate.program, iterate.residual[:, 0]
    curvature = program.weight * _curvature(program, iterate.pred)[:, 0]
    try:
        direction = iterate.system.solve(_jacobian(iterate), iterate.sigma, curvature, residual)
    except torch.linalg.LinAlgError:  # the system overflows
        return None
    if not linear_parts_move:
        direction = torch.where(curvature > 0, direction, 0.0)
    slope = -float((residual * curvature) @ direction)
    if not bool(torch.isfinite(direction).all()):
        return None

    def trial(step: float) -> _Iterate:
        return _at(iterate, iterate.pred + step * direction[:, None])

    return backtracking(trial, lambda end: end.merit, iterate.merit, slope)


def _with_linear_parts_solved(iterate: _Iterate) -> _Iterate:
    """The iterate whose samples on linear parts of the loss have the predictions of the coefficients.

    Those that would leave their linear part end next to its end, where ``_curvature`` counts them as curved.
    """
    loss, y, pred = iterate.program.loss, iterate.program.y, iterate.pred
    fitted = pred + iterate.residual
    linear = loss.hessian_product(pred, y, torch.ones_like(pred)) == 0
    slope, goal = loss.gradient(pred, y), torch.where(linear, fitted, pred)
    stays, beyond = loss.gradient(goal, y) == slope, goal
    for _ in range(round(-math.log2(EPS))):
        middle = 0.5 * (pred + beyond)
        same = loss.gradient(middle, y) == slope
        pred, beyond = torch.where(same, middle, pred), torch.where(same, beyond, middle)
    new = torch.where(stays, goal, pred)
    return iterate._replace(pred=new, residual=fitted - new)


def _curvature(program: Program, pred: Tensor) -> Tensor:
    """Curvature of each sample's loss; the largest about its prediction where it jumps, so that no step meets more."""
    loss, ones = program.loss, torch.ones_like(pred)
    curvature = loss.hessian_product(pred, program.y, ones)
    if loss.smooth_curvature or loss.quadratic:
        return curvature
    near = math.sqrt(EPS) * (1 + pred.abs())
    for shift in (near, -near):
        curvature = torch.maximum(curvature, loss.hessian_product(pred + shift, program.y, ones))
    return curvature


def _jacobian(iterate: _Iterate) -> ProxJacobian:
    threshold = iterate.sigma * iterate.program.alpha
    shifted = (iterate.center + iterate.sigma * iterate.correlation)[..., 0].flatten(0, -2)
    norms = torch.linalg.vector_norm(shifted, dim=1)
    active = (norms > threshold).nonzero()[:, 0]
    return ProxJacobian(active, 1 - threshold / norms[active], shifted[active] / norms[active][:, None])

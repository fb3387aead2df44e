"""Semismooth Newton augmented Lagrangian on the dual, for group-l2 programs with separable losses."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .penalties import GroupL2
from .program import Program
from .solver import Point, Solver

# Active columns per sample below which the Newton system is solved in the support instead of the samples.
_SUPPORT_RATIO = 0.9
# A subproblem is solved once its residual is this far below the move of the proximal point that it causes.
_INNER_ACCURACY = 0.03
_SIGMA_GROWTH = 10.0
_MAX_INNER_STEPS = 30


class _OutputState(NamedTuple):
    """One output's iterate; its program has a single output and weights that are all positive."""

    program: Program
    center: Tensor  # proximal point Z, (*feature_shape, 1)
    center_intercept: Tensor  # (1,)
    theta: Tensor  # dual iterate, (N, 1)
    ascent: Tensor  # A' diag(p) theta, (*feature_shape, 1)
    sigma: float
    inner_steps: int  # Newton steps since the proximal point moved
    finished: bool


class _State(NamedTuple):
    outputs: tuple[_OutputState, ...]
    kept: Tensor  # positions of the samples with positive weight


class SemismoothNewton(Solver):
    r"""Augmented Lagrangian method on the dual whose subproblems are solved by semismooth Newton steps.

    The subproblem around the proximal point :math:`Z` is

    .. math:: \min_\theta \; \sum_i p_i l^*(-\theta_i, y_i)
              + \frac{1}{2\sigma} \| \mathrm{prox}_{\sigma\alpha}(Z + \sigma A^\top \mathrm{diag}(p)\, \theta) \|^2 ,

    its Newton system is solved in the samples (N x N, the gated kernel formed without the gated design) or in the
    support, whichever is smaller. Some ten to forty steps reach high accuracy even where tokens are correlated and
    the regularisation is weak. Outputs are solved one by one. Memory and time per step grow with the square and the
    cube of the number of samples, so this is for up to some thousands of them.

    Needs the group-l2 penalty, a separable loss with ``conjugate_derivatives`` (squared, logistic, Poisson) and
    float64.

    Examples
    --------
    >>> SemismoothNewton().name
    'semismooth_newton'
    """

    requires_of_loss = ("conjugate_derivatives",)
    check_interval = 1

    @property
    def name(self) -> str:
        return "semismooth_newton"

    def init(self, program: Program, start: Point) -> _State:
        if not isinstance(program.penalty, GroupL2) or not program.outputs_separate:
            raise TypeError(f"solver {self.name!r} needs the group-l2 penalty and a separable loss")
        if program.y.dtype != torch.float64:
            raise TypeError(f"solver {self.name!r} works in float64; solve with dtype='float64'")
        kept = (program.weight > 0).nonzero()[:, 0]
        counted = program if len(kept) == len(program.weight) else program.rows(kept)
        columns = range(program.y.shape[1])
        return _State(tuple(self._start_output(counted, start, column) for column in columns), kept)

    def step(self, program: Program, state: _State) -> _State:
        return state._replace(outputs=tuple(s if s.finished else self._newton_step(s) for s in state.outputs))

    def point(self, program: Program, state: _State) -> Point:
        coef = torch.cat([_primal(s)[0] for s in state.outputs], dim=-1)
        dual = torch.zeros_like(program.y)
        dual[state.kept] = torch.cat([s.theta for s in state.outputs], dim=1)
        return Point(coef, program.best_intercept(program.map.matvec(coef)), dual)

    def finished(self, state: _State) -> bool:
        return all(s.finished for s in state.outputs)

    @staticmethod
    def _start_output(program: Program, start: Point, column: int) -> _OutputState:
        single = dataclasses.replace(program, y=program.y[:, [column]])
        center = start.coef[..., [column]]
        pred = single.map.matvec(center)
        intercept = single.best_intercept(pred)
        theta = -single.loss.gradient(pred + intercept, single.y)
        sigma = 10.0 / single.lipschitz(pred + intercept)
        return _OutputState(single, center, intercept, theta, single.pull_back(theta), sigma, 0, False)

    def _newton_step(self, state: _OutputState) -> _OutputState:
        """One Newton step, after moving the proximal point where the subproblem is solved."""
        program, p = state.program, state.program.weight
        coef, intercept = _primal(state)
        residual, curvature = _residual(state, coef, intercept)
        size = math.sqrt(float(p @ residual.square()[:, 0]))
        move = float((coef - state.center).square().sum() + (intercept - state.center_intercept).square().sum())
        solved = size <= _INNER_ACCURACY * math.sqrt(move / state.sigma) or state.inner_steps >= _MAX_INNER_STEPS
        if solved and state.inner_steps > 0:
            state = state._replace(
                center=coef, center_intercept=intercept, sigma=state.sigma * _SIGMA_GROWTH, inner_steps=0
            )
            coef, intercept = _primal(state)
            residual, curvature = _residual(state, coef, intercept)
        direction = _newton_direction(state, residual, curvature)
        return _line_search(state, residual, direction, program.pull_back(direction))


def _shifted(state: _OutputState) -> Tensor:
    return state.center + state.sigma * state.ascent


def _primal(state: _OutputState) -> tuple[Tensor, Tensor]:
    """The primal point that belongs to the dual iterate."""
    program = state.program
    coef = program.penalty.prox(_shifted(state), state.sigma * program.alpha)
    if not program.fit_intercept:
        return coef, state.center_intercept
    return coef, state.center_intercept + state.sigma * (program.weight @ state.theta)


def _residual(state: _OutputState, coef: Tensor, intercept: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the subproblem over ``p``, and the curvature of the conjugate, both ``(N, 1)``."""
    program = state.program
    slope, curvature = program.loss.conjugate_derivatives(-state.theta, program.y)
    return program.map.matvec(coef) + intercept - slope, curvature


def _subproblem(state: _OutputState) -> float:
    coef, intercept = _primal(state)
    quadratic = coef.square().sum()
    if state.program.fit_intercept:
        quadratic = quadratic + intercept.square().sum()
    return float(quadratic) / (2 * state.sigma) - float(state.program.dual(state.theta))


def _newton_direction(state: _OutputState, residual: Tensor, curvature: Tensor) -> Tensor:
    r"""Solve :math:`(\mathrm{diag}(h) + \sigma\, \sqrt p\, (A J A^\top + 1 1^\top) \sqrt p)\, x = -\sqrt p\, r`.

    ``J`` is the Jacobian of the prox: per active group ``a I + (1 - a) u u'`` with the unit vector ``u`` and the
    shrinkage ``a``.
    """
    program, sigma = state.program, state.sigma
    shifted = _shifted(state)[..., 0]
    norms = torch.linalg.vector_norm(shifted, dim=-1)
    active = (norms > sigma * program.alpha).reshape(-1).nonzero()[:, 0]
    norms = norms.reshape(-1)[active]
    units = shifted.reshape(-1, shifted.shape[-1])[active] / norms[:, None]
    shrinkage = 1 - sigma * program.alpha / norms
    root = program.weight.sqrt()
    h, target = curvature[:, 0], -root * residual[:, 0]
    if active.numel() * units.shape[1] <= _SUPPORT_RATIO * len(root):
        columns = program.map.columns(active)  # (N, m, d)
        along = (columns * units).sum(-1, keepdim=True)
        inner = shrinkage.sqrt()[:, None]
        factor = (columns * inner + along * (units * (1 - inner))).flatten(1)
        if program.fit_intercept:
            factor = torch.cat([factor, torch.ones_like(factor[:, :1])], dim=1)
        factor = factor * root[:, None]
        system = factor.T @ (factor / h[:, None])
        system.diagonal().add_(1 / sigma)
        reduced = torch.cholesky_solve((factor.T @ (target / h))[:, None], torch.linalg.cholesky(system))[:, 0]
        solution = (target - factor @ reduced) / h
    else:
        kernel = program.map.kernel(active, shrinkage, units)
        if program.fit_intercept:
            kernel += 1.0
        kernel *= sigma * root[:, None]
        kernel *= root
        kernel.diagonal().add_(h)
        solution = torch.cholesky_solve(target[:, None], torch.linalg.cholesky(kernel))[:, 0]
    return (solution / root)[:, None]


def _line_search(state: _OutputState, residual: Tensor, direction: Tensor, ascent: Tensor) -> _OutputState:
    """Armijo steps; where rounding hides any decrease the state is marked finished."""
    program = state.program
    before = _subproblem(state)
    slope = float(program.weight @ (residual * direction)[:, 0])
    rounding = 1e-14 * abs(before)
    step = 1.0
    while step > 1e-9:
        candidate = state._replace(
            theta=state.theta + step * direction,
            ascent=state.ascent + step * ascent,
            inner_steps=state.inner_steps + 1,
        )
        if _subproblem(candidate) <= before + 1e-4 * step * slope + rounding:
            return candidate
        step *= 0.5
    return state._replace(finished=True)

"""Accelerated proximal gradient, restart and step search (Beck and Teboulle 2009; O'Donoghue and Candès 2015)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.points import Point
from convexformer_solvers.program import Program
from convexformer_solvers.validation import check_counts

from .base import Solver


class _State(NamedTuple):
    coef: Tensor
    previous: Tensor
    pred: Tensor  # A coef
    pred_previous: Tensor
    intercept: Tensor
    momentum: float  # Nesterov's t
    lipschitz: float
    finished: bool


class Fista(Solver):
    """Accelerated proximal gradient (FISTA) for every loss and penalty, on any device and in any precision.

    Each iteration reads the data twice (once per product) and minimises over the intercept exactly. Momentum restarts
    when it points uphill. The step follows the curvature met on the way: it grows while the quadratic model
    overestimates and shrinks when the model fails.

    Parameters
    ----------
    power_steps : int, default=6
        Steps of the power iteration, two products each, that the first step size comes from.

    Raises
    ------
    ValueError
        If ``power_steps`` is no positive integer.

    Examples
    --------
    >>> Fista().name
    'fista'
    """

    name = "fista"
    # Step growth per iteration while the curvature met is below the current estimate, and its cut on a failed model.
    _growth = 0.9
    _cut = 1.5

    power_steps = 6  # for subclasses with an __init__ of their own, too

    def __init__(self, power_steps: int = 6) -> None:
        check_counts(power_steps=power_steps)
        self.power_steps = int(power_steps)

    def init(self, program: Program, start: Point, lipschitz: float | None = None) -> _State:
        coef = start.coef.to(program.y)
        if start.fitted is None or start.intercept is None:
            pred = program.map.sparse_matvec(coef)
        else:
            pred = (start.fitted - start.intercept).to(program.y)
        intercept = program.best_intercept(pred, start.intercept if program.fit_intercept else None)
        lipschitz = lipschitz or program.lipschitz(pred + intercept, self.power_steps)
        return _State(coef, coef, pred, pred, intercept, 1.0, lipschitz, False)

    def step(self, program: Program, state: _State) -> _State:
        t, weight = self._next_momentum(state.momentum)
        coef = torch.lerp(state.previous, state.coef, 1 + weight)
        pred = torch.lerp(state.pred_previous, state.pred, 1 + weight)
        new, new_pred, intercept, lipschitz = self._prox_step(program, state, coef, pred)

        move = new - coef
        # Without momentum a step below rounding cannot lead anywhere; with it, restart first.
        rounding = torch.finfo(new.dtype).eps * float(torch.linalg.vector_norm(new))
        stuck = float(torch.linalg.vector_norm(move)) <= rounding
        uphill = float(move.mul_(new - state.coef).sum()) < 0
        return _State(
            coef=new,
            previous=state.coef,
            pred=new_pred,
            pred_previous=state.pred,
            intercept=intercept,
            momentum=1.0 if uphill or stuck else t,
            lipschitz=lipschitz,
            finished=stuck and state.momentum == 1.0,
        )

    def _next_momentum(self, t: float) -> tuple[float, float]:
        """Nesterov's t after another one, which is 1 at a start, and the weight of the last move."""
        following = 0.5 * (1 + math.sqrt(1 + 4 * t**2))
        return following, (t - 1) / following

    def point(self, program: Program, state: _State) -> Point:
        return Point(state.coef, state.intercept, fitted=state.pred + state.intercept)

    def finished(self, state: _State) -> bool:
        return state.finished

    def _prox_step(
        self, program: Program, state: _State, coef: Tensor, pred: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """Proximal step from ``coef`` whose quadratic model holds: end, its predictions and intercept, inverse step."""
        intercept = program.best_intercept(pred, state.intercept)
        theta = -program.loss.gradient(pred + intercept, program.y)
        if program.fit_intercept:  # rounding of the intercept would be multiplied by the means of the features
            theta -= program.weight @ program.of_counted(theta)
        correlation = program.weighted_adjoint(theta)
        lipschitz = state.lipschitz
        while True:
            new = program.penalty.prox(torch.add(coef, correlation, alpha=1 / lipschitz), program.alpha / lipschitz)
            new_pred = program.map.matvec(new)
            new_intercept = program.best_intercept(new_pred, intercept)
            square = float((new - coef).square_().sum())
            if square == 0.0:
                return new, new_pred, new_intercept, lipschitz
            move = new_pred - pred + (new_intercept - intercept)
            curvature = 2 * self._excess(program, pred + intercept, move, theta) / square
            if curvature <= lipschitz * (1 + 1e-4):
                shrink = self._growth if curvature < lipschitz / self._cut else 1.0
                return new, new_pred, new_intercept, lipschitz * shrink
            lipschitz *= self._cut
            if not lipschitz < state.lipschitz / torch.finfo(coef.dtype).eps ** 2:
                # No step however short has a finite loss that the model bounds: stay.
                return state.coef, state.pred, state.intercept, state.lipschitz

    @staticmethod
    def _excess(program: Program, pred: Tensor, move: Tensor, theta: Tensor) -> float:
        """Excess of the mean loss over its tangent at ``pred`` after a move in predictions."""
        if not program.loss.quadratic:
            before, after = float(program.loss_value(pred)), float(program.loss_value(pred + move))
            excess = after - before + float(program.mean((theta * move).sum(1)))
            # A small loss may be a difference of terms as large as the predictions.
            terms = float(program.mean(pred.abs().amax(1)))
            rounding = torch.finfo(pred.dtype).eps * (abs(before) + abs(after) + terms)
            if excess > 1e4 * rounding or not math.isfinite(excess):
                return excess
            # The difference is mostly rounding, but the move is then so small that the second order tells all.
        product = program.loss.hessian_product(pred, program.y, move)
        return 0.5 * float(program.mean((move * product).sum(1)))


class GreedyFista(Fista):
    """FISTA whose momentum is all of the last move until that points uphill (Liang, Luo and Schoenlieb 2022).

    It takes fewer steps where features are hardly correlated, and there is no bound on them.
    """

    name = "greedy_fista"

    def init_again(self, program: Program, start: Point, previous: _State) -> _State:
        """With the last move and its momentum, where the start is the point of the state before."""
        state, coef = self.init(program, start, previous.lipschitz), previous.coef.view_as(start.coef)
        if not torch.equal(state.coef, coef):
            return state
        before = previous.previous.view_as(coef)
        pred_before = program.map.sparse_matvec(before)
        return state._replace(previous=before, pred_previous=pred_before, momentum=previous.momentum)

    def on_other_blocks(self, state: _State, moved: Callable[[Tensor], Tensor]) -> _State:
        coef, previous = moved(state.coef), moved(state.previous)
        if len(coef) > 2 * math.prod(state.coef.shape[:-2]):  # most blocks have no last move
            return state._replace(coef=coef, previous=coef, momentum=1.0)
        return state._replace(coef=coef, previous=previous)

    def _next_momentum(self, t: float) -> tuple[float, float]:
        return 2.0, float(t > 1)

"""What passes over the data tell of points, and of their combinations without another pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.linalg.line_search import backtracking
from convexformer_solvers.points import Point, dual_estimate
from convexformer_solvers.program import Program
from convexformer_solvers.rounding import CANCELLED, DIFFERENCE, EPS

from .metric import Metric


class Linear(NamedTuple):
    """What is linear in the coefficients and the intercept of a point, the slopes where the loss is quadratic."""

    coef: Tensor
    intercept: Tensor
    pred: Tensor  # A coef
    correlation: Tensor  # A' diag(p) theta
    slope: Tensor  # sum of diag(p) theta, (c,)

    def plus(self, moves: Sequence[Linear], shares: Tensor) -> Linear:
        """The sum with shares of moves."""
        result = self
        for move, share in zip(moves, shares.tolist(), strict=True):
            result = Linear(*(part + share * change for part, change in zip(result, move, strict=True)))
        return result

    def move_to(self, other: Linear) -> Linear:
        """The difference to another point, with coefficients as large as the larger ones; zeros where it is none."""
        moved = Linear(*(there - here for here, there in zip(self, other, strict=True)))
        length, *sizes = (float(torch.linalg.vector_norm(coef)) for coef in (moved.coef, self.coef, other.coef))
        factor = max(sizes) / length if length > CANCELLED * max(sizes) else 0.0
        return Linear(*(factor * part for part in moved))


class Read(NamedTuple):
    """A point that a pass has told of, or a combination of such points."""

    at: Linear
    value: float  # objective
    gap: float  # of the point that was read
    size: float  # mean of the absolute products of slopes and predictions, or the objective at zero if that is more


def read(program: Program, coef: Tensor, intercept: Tensor, single: bool, metric: Metric | None = None) -> Read:
    """A pass over the data at a point, rounded where it is in single precision; none at the best constant model.

    A metric centres the dual point of the gap.
    """
    slopes = program.slopes(intercept)
    if not bool(coef.any()) and torch.equal(intercept, program.null_intercept):
        pred, correlation = torch.zeros_like(program.y), program.null_correlation  # as a rule known from alpha_max
    else:
        coef = coef.float() if single else coef
        passed = program.map.slopes_pass(coef, slopes)
        coef, pred, correlation = (part.to(program.y) for part in (coef, *passed))
    of_samples = slopes.at(pred)
    slope = of_samples.sum(0)
    value = float(program.objective(coef, pred + intercept))
    # Large means of the features multiply what the slopes leave of an intercept that is not quite the best.
    centred = correlation if metric is None else metric.reduced(correlation, slope)
    dual = dual_estimate(program, Point(coef, pred=pred + intercept, correlation=centred))
    size = max(float((of_samples * pred).abs().sum()), program.null_value)
    return Read(Linear(coef, intercept, pred, correlation, slope), value, value - dual, size)


def best_combination(program: Program, first: Read, others: Sequence[Read], share: float) -> Read:
    """The affine combination of points of least objective, by Newton steps from the first of them, without the data.

    Steps end where one lowers the objective by less than a share of what all have.
    """
    moves, best = [start.at.move_to(end.at) for start, end in pairwise((*others, first))], first
    while True:
        way, slope = _newton_direction(program, best.at, moves)
        found = backtracking(partial(_moved, program, best, moves, way), attrgetter("value"), best.value, slope)
        if found is None:
            return best
        before, best = best, found[1]
        if before.value - best.value <= share * (first.value - best.value):
            return best


def _moved(program: Program, start: Read, moves: Sequence[Linear], way: Tensor, step: float) -> Read:
    """The end of a step, and its objective."""
    at = start.at.plus(moves, step * way)
    return start._replace(at=at, value=float(program.objective(at.coef, at.pred + at.intercept)))


def _newton_direction(program: Program, at: Linear, moves: Sequence[Linear]) -> tuple[Tensor, float]:
    """Newton's direction and the derivative along it; zeros where the objective is infinite nearby."""
    steps = DIFFERENCE * torch.eye(len(moves), dtype=torch.float64)
    ahead, behind = ([_slopes(program, at.plus(moves, sign * step), moves) for step in steps] for sign in (1, -1))
    slope, second = _slopes(program, at, moves), (torch.stack(ahead) - torch.stack(behind)) / (2 * DIFFERENCE)
    if not bool(torch.isfinite(second).all()):
        return torch.zeros_like(slope), 0.0
    way = -torch.linalg.pinv(second + second.T, rtol=math.sqrt(EPS), hermitian=True) @ (2 * slope)
    return way, float(slope @ way)


def _slopes(program: Program, at: Linear, moves: Sequence[Linear]) -> Tensor:
    """Derivatives of the objective along moves, those of the penalty by differences."""
    of_samples, penalty = program.slopes(at.intercept).at(at.pred), program.penalty.value
    result = []
    for move in moves:
        rise = float(penalty(at.coef + DIFFERENCE * move.coef) - penalty(at.coef - DIFFERENCE * move.coef))
        of_loss = -float((of_samples * (move.pred + move.intercept)).sum())
        result.append(of_loss + program.alpha * rise / (2 * DIFFERENCE))
    return torch.tensor(result, dtype=torch.float64)

"""Accelerated proximal gradient in a variable metric: one pass over the data for each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.algorithms.base import Solver
from convexformer_solvers.linalg.hessian import curvature_bound
from convexformer_solvers.points import Point, dual_estimate
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.weights import Targets
from convexformer_solvers.rounding import EPS, SINGLE, SUM

from .metric import Metric, Metrics, Part
from .model import Model


@dataclass(frozen=True)
class MetricConfig:
    """Numbers that ``MetricGradient`` goes by.

    Parameters
    ----------
    renew_at : tuple of int, default=(2, 5, 12, 30)
        Steps after which the metric is formed anew, with the curvatures at the predictions reached, if ever.
    alike : float, default=0.1
        Mean relative change of the curvatures below which the metric stays.
    least_curvature : float, default=0.001
        Curvature of a sample's loss at least, as a share of its bound.
    growth : float, default=1.5
        Factor of the model's curvature after a step that raised the objective; its root after one that met far less.
    accuracy : float, default=0.01
        Gap to which the model is minimised at first, over that of the program; its factor after a raised objective.
    """

    renew_at: tuple[int, ...] = (2, 5, 12, 30)
    alike: float = 0.1
    least_curvature: float = 0.001
    growth: float = 1.5
    accuracy: float = 0.01


class _Read(NamedTuple):
    """What a pass over the data has told of a point."""

    coef: Tensor
    intercept: Tensor
    pred: Tensor  # A coef
    correlation: Tensor  # A' diag(p) theta
    slope: Tensor  # sum of diag(p) theta, (c,); zeros without an intercept
    value: float  # objective
    gap: float
    size: float  # mean of the absolute products of slopes and predictions, or the objective at zero if that is more


class _State(NamedTuple):
    metric: Metric
    read: _Read
    coef: Tensor  # that minimises the model there
    intercept: Tensor
    next: tuple[Tensor, Tensor]  # coefficients and intercept of the next pass
    curvature: float = 1.0  # of the model, in units of the metric
    momentum: float = 1.0  # Nesterov's t
    accuracy: float = 1.0  # gap of the model's minimum, over that of the program
    single: bool = False  # whether passes are in single precision
    iteration: int = 0
    finished: bool = False


class MetricGradient(Solver):
    r"""Variable-metric proximal gradient steps, accelerated, for data of which passes are what counts.

    A step minimises, without the data, the model

    .. math:: \langle \nabla f(Y), Z - Y \rangle + \tfrac L2 \|Z - Y\|_H^2 + \alpha \, \Omega(Z),
              \qquad H = A^\top \mathrm{diag}(p \, q) A

    of a proximal Newton method (Lee, Sun and Saunders 2014), with a bound ``q`` of the curvature of each sample's loss,
    whose metric ``H`` is formed anew few times. Nesterov's momentum makes up for what it is off by, and restarts when
    it points uphill. ``L`` follows the curvature met on the way.

    Data in float32 are multiplied in that precision until it says too little. The gap of the point that was read is
    that of its own dual point, so that certificates are taken where they will succeed.

    Needs a loss with finite ``smoothness``. Memory: some matrices of the size of ``H``, and predictions.

    Parameters
    ----------
    metrics : Metrics
        How ``H`` is formed, and its model minimised: ``GramMetrics``, or ``LowRankMetrics`` for many features.
    config : MetricConfig, optional
        Numbers that it goes by. Default: those of ``MetricConfig``.

    Examples
    --------
    >>> from convexformer_solvers import Auto, check_solver
    >>> from convexformer_solvers.algorithms.few_passes import Batched, GramMetrics
    >>> check_solver(MetricGradient(GramMetrics(Batched(Auto()))))
    """

    reductions = (Targets(),)

    def __init__(self, metrics: Metrics, config: MetricConfig | None = None) -> None:
        self.metrics, self.config = metrics, config or MetricConfig()

    @property
    def name(self) -> str:
        return f"metric_gradient({self.metrics.name})"

    def unmet_requirement(self, program: Program) -> str | None:
        if not math.isfinite(program.loss.smoothness):
            return f"a loss with finite smoothness, which {program.loss!r} has not"
        return super().unmet_requirement(program)

    def init(self, program: Program, start: Point) -> _State:
        coef = start.coef.to(program.y)
        intercept = program.null_intercept if start.intercept is None else start.intercept.to(program.y)
        single = program.map.dtype == torch.float32
        read = _read(program, coef, intercept, single)
        metric = self.metrics.of(program, self._curvatures(program, read.pred + intercept))
        following, accuracy = (coef, intercept), self.config.accuracy
        state = _State(metric, read, coef, intercept, following, accuracy=accuracy, single=single)
        return self._minimised(program, state)

    def init_again(self, program: Program, start: Point, previous: _State) -> _State:
        single = program.map.dtype == torch.float32
        read = _read(program, start.coef.to(program.y), previous.intercept, single, previous.metric)
        start_state = previous._replace(read=read, coef=read.coef, intercept=read.intercept, momentum=1.0, iteration=0)
        return self._minimised(program, start_state._replace(single=single, finished=False))

    def step(self, program: Program, state: _State) -> _State:
        before, config = state.read, self.config
        read = _read(program, *state.next, state.single, state.metric)
        state = state._replace(iteration=state.iteration + 1)
        if state.single and _says_too_little(state, read):
            best = read if read.value <= before.value else before
            read = _read(program, best.coef, best.intercept, False, state.metric)
            return self._minimised(program, state._replace(read=read, momentum=1.0, single=False))
        met = self._curvature_met(state.metric, before, read)
        grown = max(state.curvature, met)
        if not read.value <= before.value + SUM * abs(before.value):
            # Without momentum the model was no bound; with it, the momentum led too far.
            if state.momentum == 1.0:
                grown = max(config.growth * state.curvature, met)
            finer = config.accuracy * state.accuracy  # or the minimum was too rough for so small a descent
            return self._minimised(program, state._replace(momentum=1.0, curvature=grown, accuracy=finer))
        if state.iteration in config.renew_at:
            local = self._curvatures(program, read.pred + read.intercept)
            if not self._alike(program, local, state.metric.local):
                metric = self.metrics.of(program, local)
                return self._minimised(program, state._replace(metric=metric, read=read, momentum=1.0, curvature=1.0))
        if self.metrics.adapts and met < state.curvature / config.growth:
            grown = state.curvature / math.sqrt(config.growth)
        return self._minimised(program, state._replace(read=read, curvature=grown))

    def _minimised(self, program: Program, state: _State) -> _State:
        """The state with the minimiser of its model, and the point of the next pass."""
        read = state.read
        minima = [self._minimum(program, state, part) for part in state.metric.parts]
        coef, intercept = (torch.cat(parts, dim=-1) for parts in zip(*minima, strict=True))
        t = 0.5 + math.hypot(0.5, state.momentum)
        ahead = state.metric.square(coef - state.coef, intercept - state.intercept)
        back = state.metric.square(read.coef - state.coef, read.intercept - state.intercept)
        from_read = state.metric.square(coef - read.coef, intercept - read.intercept)
        uphill = ahead + from_read < back  # twice the inner product of the step and the last move is negative
        share = 0.0 if uphill else (state.momentum - 1) / t
        following = torch.lerp(state.coef, coef, 1 + share), torch.lerp(state.intercept, intercept, 1 + share)
        length = float(torch.linalg.vector_norm(coef - read.coef))
        stuck = length <= EPS * float(torch.linalg.vector_norm(coef))
        return state._replace(
            coef=coef,
            intercept=intercept,
            next=following,
            momentum=1.0 if uphill else t,
            finished=stuck and state.momentum == 1.0,
        )

    def _minimum(self, program: Program, state: _State, part: Part) -> tuple[Tensor, Tensor]:
        """Coefficients and intercept of a part's outputs that minimise the model."""
        read, length = state.read, state.curvature
        start, slope = part.flat(read.coef), part.of_intercept(read.slope)
        pull = (part.flat(read.correlation) - part.cross @ part.inverse @ slope) / length
        share = min(abs(read.gap) / program.null_value, 1.0) if program.null_value > 0 else 1.0
        goal = part.matrix.goal(share, state.accuracy) * program.null_value / length
        shape = (*part.feature_shape, start.shape[1])
        product, before = part.matrix.product(start) + pull, part.flat(state.coef)
        penalty = program.penalty.for_outputs(start.shape[1])
        flat = part.matrix.minimum(Model(penalty, program.alpha / length, shape, product, before, goal))
        shift = part.inverse @ (slope / length - part.cross.T @ (flat - start))
        return part.shaped(flat, read.coef), read.intercept[part.outputs] + shift.flatten()

    def _curvatures(self, program: Program, pred: Tensor) -> Tensor:
        """Second derivatives of each sample's loss that the metric takes, shape ``(N, n)``.

        These are all of a coupled loss's, those of each output, or one bound for all outputs that the penalty couples.
        """
        loss, n_outputs, largest = program.loss, pred.shape[1], program.loss.smoothness
        least = self.config.least_curvature * largest
        if not program.penalty.output_separable or n_outputs == 1 or loss.quadratic:
            return curvature_bound(loss, pred, program.y)[:, None].clamp(least, largest)
        if loss.output_separable:
            return loss.hessian_product(pred, program.y, torch.ones_like(pred)).clamp(least, largest)
        units = torch.eye(n_outputs).to(pred)
        columns = [loss.hessian_product(pred, program.y, unit.expand_as(pred)) + least * unit for unit in units]
        return torch.cat([column[:, place:] for place, column in enumerate(columns)], dim=1)

    def _alike(self, program: Program, found: Tensor, other: Tensor) -> bool:
        change = program.weight @ (found - other).abs()
        return float(change.sum()) <= self.config.alike * float((program.weight @ other.abs()).sum())

    @staticmethod
    def _curvature_met(metric: Metric, before: _Read, after: _Read) -> float:
        """Curvature of the loss between two points, in units of the metric; zero where these are the same."""
        move, shift = after.coef - before.coef, after.intercept - before.intercept
        square = metric.square(move, shift)
        bend = float(((before.correlation - after.correlation) * move).sum())
        bend += float(((before.slope - after.slope) * shift).sum())
        return bend / square if square > 0 else 0.0

    def point(self, program: Program, state: _State) -> Point:
        read = state.read
        # A result in float32 has rounded coefficients, whose own dual point says no more than that.
        rounds = program.map.dtype == torch.float32 and abs(read.gap) <= SINGLE * program.null_value
        return Point(state.coef, state.intercept, pred=read.pred + read.intercept if rounds else None)

    def gap_estimate(self, program: Program, state: _State) -> float:
        return state.read.gap

    def finished(self, state: _State) -> bool:
        return state.finished


def _says_too_little(state: _State, read: _Read) -> bool:
    """Whether what a pass in single precision says of a point may be rounding."""
    if abs(read.gap) <= SINGLE * read.size:
        return True
    rise = (read.value - state.read.value) / read.size
    rounding = torch.finfo(torch.float32).eps / math.sqrt(len(read.pred))  # of a mean of so many
    # Momentum may lead too far, the minimum of a model does not but for rounding and where the model is no bound.
    return -rounding <= rise <= (SINGLE if state.momentum == 1.0 else rounding)


def _read(program: Program, coef: Tensor, intercept: Tensor, single: bool, metric: Metric | None = None) -> _Read:
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
    slope = of_samples.sum(0) * program.fit_intercept
    value = float(program.objective(coef, pred + intercept))
    # Large means of the features multiply what the slopes leave of an intercept that is not quite the best.
    centred = correlation if metric is None else metric.reduced(correlation, slope)
    dual = dual_estimate(program, Point(coef, pred=pred + intercept, correlation=centred))
    size = max(float((of_samples * pred).abs().sum()), program.null_value)
    return _Read(coef, intercept, pred, correlation, slope, value, value - dual, size)

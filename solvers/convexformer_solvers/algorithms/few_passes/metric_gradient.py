"""Accelerated proximal gradient in a variable metric: one pass over the data for each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.algorithms.base import Solver
from convexformer_solvers.algorithms.smoothing_newton import SmoothingConfig
from convexformer_solvers.linalg.hessian import curvature_bounds
from convexformer_solvers.losses.base import hessian_columns
from convexformer_solvers.points import Point, gap_estimate
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.weights import Targets
from convexformer_solvers.rounding import EPS, SINGLE, SUM

from .metric import Metric, Metrics, Part, outputs_apart
from .model import Model
from .read import Linear, Read, best_combination, read


@dataclass(frozen=True)
class MetricConfig:
    """Numbers that ``MetricGradient`` goes by.

    Parameters
    ----------
    renew_at : tuple of int, default=(2, 5, 12, 30)
        Steps after which the metric is formed anew, with the curvatures at the points reached, if these are others.
        In the second half, counted over all alphas of a path, also if it can be closer to the same ones.
    alike : float, default=0.1
        Mean relative change of the curvatures below which they are the same.
    least_curvature : float, default=0.001
        Curvature of a sample's loss at least, as a share of its bound or, if it has none, of the mean.
    growth : float, default=1.5
        Factor of the model's curvature after a step that raised the objective; its root after one that met far less.
    accuracy : float, default=0.01
        Gap to which the model is minimised at first, over that of the program; its factor after a raised objective.
        Share of the descent below which another step towards the best combination of points is left out.
    """

    renew_at: tuple[int, ...] = (2, 5, 12, 30)
    alike: float = 0.1
    least_curvature: float = 0.001
    growth: float = 1.5
    accuracy: float = 0.01


class _State(NamedTuple):
    smooth: Program  # with the smoothed loss
    cost: float  # by which smoothing lowers the objective at most; it shrinks once the gap is as small
    metric: Metric
    read: Read
    base: Read  # where the model is
    past: tuple[Read, ...]  # bases before it
    coef: Tensor  # that minimises the model
    intercept: Tensor
    curvature: float = 1.0  # of the model, in units of the metric
    accuracy: float = 1.0  # gap of the model's minimum, over that of the program
    single: bool = False  # whether passes are in single precision
    iteration: int = 0
    iterations_before: int = 0  # of other alphas
    finished: bool = False


class MetricGradient(Solver):
    r"""Variable-metric proximal gradient steps, accelerated, for data of which passes are what counts.

    A step minimises, without the data, the model

    .. math:: \langle \nabla f(Y), Z - Y \rangle + \tfrac L2 \|Z - Y\|_H^2 + \alpha \, \Omega(Z),
              \qquad H = A^\top \mathrm{diag}(p \, q) A

    of a proximal Newton method (Lee, Sun and Saunders 2014), with a bound ``q`` of the curvature of each sample's loss,
    whose metric ``H`` is formed anew few times. ``L`` follows the curvature met on the way.

    What the metric is off by, conjugate gradients make up for (Knyazev 2001, who calls such steps locally optimal):
    ``Y`` is the affine combination of least objective of the point that was read last and of the last two ``Y``. It is
    found without the data, as predictions are combined like coefficients. So are slopes, which is exact for the
    squared loss; for others, past points are dropped where a step raises the objective.

    Huber's loss has hardly any curvature where the residuals are far above its threshold. There steps are on
    ``Loss.smoothed`` at a cost that is a tenth of the last one each time the gap is as small.

    Data in float32 are multiplied in that precision until it says too little. The gap of the point that was read is
    that of its own dual point, so that certificates are taken where they will succeed.

    Needs a loss with finite ``smoothness``, or with continuous second derivatives: then ``q`` is that at the points
    reached, and ``Y`` takes a second pass. Memory: some matrices of the size of ``H``, and predictions.

    Parameters
    ----------
    metrics : Metrics
        How ``H`` is formed, and its model minimised: ``GramMetrics``, or ``LowRankMetrics`` for many features.
    config : MetricConfig, optional
        Numbers that it goes by. Default: those of ``MetricConfig``.
    """

    reductions = (Targets(),)
    name = property(lambda self: f"metric_gradient({self.metrics.name})")

    def __init__(self, metrics: Metrics, config: MetricConfig | None = None) -> None:
        self.metrics, self.config = metrics, config or MetricConfig()

    def unmet_requirement(self, program: Program) -> str | None:
        if not (math.isfinite(program.loss.smoothness) or program.loss.smooth_curvature):
            return f"a loss with finite smoothness or continuous second derivatives, which {program.loss!r} has not"
        return super().unmet_requirement(program)

    def init(self, program: Program, start: Point) -> _State:
        coef = start.coef.to(program.y)
        intercept = program.null_intercept if start.intercept is None else start.intercept.to(program.y)
        single = program.map.dtype == torch.float32
        found = read(program, coef, intercept, single)
        cost, accuracy = self._cost(program, found), self.config.accuracy
        smooth = program.smoothed(cost) if cost > 0 else program
        metric = self.metrics.of(smooth, self._curvatures(smooth, found.at.pred + found.at.intercept))
        state = _State(smooth, cost, metric, found, found, (), coef, intercept, accuracy=accuracy, single=single)
        return self._minimised(smooth, state)

    def init_again(self, program: Program, start: Point, previous: _State) -> _State:
        single, smooth = program.map.dtype == torch.float32, previous.smooth.with_alpha(program.alpha)
        intercept = previous.intercept if start.intercept is None else start.intercept.to(program.y)
        found = read(smooth, start.coef.to(program.y), intercept, single, previous.metric)
        cost = abs(found.gap) if previous.cost > 0 else self._cost(program, found)
        before = previous.iterations_before + previous.iteration
        again = previous._replace(smooth=smooth, cost=cost, read=found, base=found, past=(), single=single)
        return self._minimised(smooth, again._replace(iteration=0, iterations_before=before, finished=False))

    def _cost(self, program: Program, found: Read) -> float:
        """Cost of smoothing the loss at a start, or zero where residuals are not far out."""
        cost = abs(found.gap)
        return cost if program.smoothed(cost).loss.smoothness < self.config.alike * program.loss.smoothness else 0.0

    def step(self, program: Program, state: _State) -> _State:
        is_near = 0 < abs(state.read.gap) <= state.cost
        if is_near:
            cost = SmoothingConfig.narrower * state.cost
            state = state._replace(smooth=program.smoothed(cost), cost=cost)
        program = state.smooth
        found = read(program, state.coef, state.intercept, state.single, state.metric)
        state = state._replace(iteration=state.iteration + 1)
        if state.single and self._says_too_little(state, found):
            state = state._replace(single=False)
            best = _read_again(program, state, min(found, state.read, key=lambda each: each.value))
            return self._minimised(program, state._replace(read=best, base=best, past=()))
        if is_near:  # what is known of other points is of another loss
            state = state._replace(read=found, base=found, past=())
            return self._minimised(program, self._renewed(program, state, changed=True))
        based = self._by_combined_slopes if math.isfinite(program.loss.smoothness) else self._by_read_slopes
        return self._minimised(program, self._renewed(program, based(program, state, found)))

    def _by_combined_slopes(self, program: Program, state: _State, found: Read) -> _State:
        """The state with the next base, whose slopes are combined."""
        config, base, past = self.config, state.base, state.past
        met = self._curvature_met(state.metric, base.at, found.at)
        if not found.value <= base.value + SUM * abs(base.value):
            # The model was no bound, or the slopes of its base were too far from those of the loss.
            best = min(found, state.read, key=lambda each: each.value)
            if not past:
                finer = config.accuracy * state.accuracy  # or the minimum was too rough for so small a descent
                state = state._replace(curvature=max(config.growth * state.curvature, met), accuracy=finer)
            return state._replace(read=best, base=best, past=())
        exact = not past or program.loss.quadratic  # whether the slopes of the base are those of the loss there
        curvature = max(state.curvature, met) if exact else state.curvature
        if met < curvature / config.growth:
            curvature /= math.sqrt(config.growth)
        following, past = self._combined(program, state, found)
        if following is not found and found.value - following.value <= SUM * abs(found.value):
            # Errors of combinations of combinations would soon be as large.
            following = _read_again(program, state, following)
        return state._replace(read=found, base=following, past=past, curvature=curvature)

    def _by_read_slopes(self, program: Program, state: _State, found: Read) -> _State:
        """The state with the next base, which takes a pass of its own.

        Where curvatures have no bound the minimum of a model may be far too far: then there is a line search.
        """
        config, base = self.config, state.base
        if found.value <= base.value + SUM * abs(base.value):
            best, past = self._combined(program, state, found)
        else:
            best, past = best_combination(program, base, (found,), config.accuracy), ()
            if not state.past:  # the minimum was too rough, or the model's curvature is too small
                finer, grown = config.accuracy * state.accuracy, config.growth * state.curvature
                state = state._replace(curvature=grown, accuracy=finer)
        if best is not base and best is not found:
            best = _read_again(program, state, best)
        return state._replace(read=best, base=best, past=past)

    def _combined(self, program: Program, state: _State, found: Read) -> tuple[Read, tuple[Read, ...]]:
        """The best combination of a point that was read and of bases, and these; the point alone for rounding."""
        past = (*state.past, state.base)[-2:]
        best = best_combination(program, found, past, self.config.accuracy)
        return (best, past) if found.value - best.value > 4 * EPS * abs(found.value) else (found, ())

    def _renewed(self, program: Program, state: _State, changed: bool = False) -> _State:
        """The state with a metric of the curvatures at its base, where it is time or they changed, and it is closer."""
        span, n_steps = state.metric.span, state.iterations_before + state.iteration
        places = self.config.renew_at
        improves = span is not None and n_steps in places[len(places) // 2 :]
        if not improves and not changed and state.iteration not in places:
            return state
        local = self._curvatures(program, state.base.at.pred + state.base.at.intercept)
        if not improves and self._alike(program, local, state.metric.local):
            return state
        return state._replace(metric=self.metrics.of(program, local, span), curvature=1.0)

    def _minimised(self, program: Program, state: _State) -> _State:
        """The state with the minimiser of its model."""
        minima = [self._minimum(program, state, part) for part in state.metric.parts]
        coef, intercept = (torch.cat(parts, dim=-1) for parts in zip(*minima, strict=True))
        length = float(torch.linalg.vector_norm(coef - state.base.at.coef))
        stuck = length <= EPS * float(torch.linalg.vector_norm(coef))
        ends = not state.past and not 0 < abs(state.read.gap) <= state.cost
        return state._replace(coef=coef, intercept=intercept, finished=stuck and ends)

    def _minimum(self, program: Program, state: _State, part: Part) -> tuple[Tensor, Tensor]:
        """Coefficients and intercept of a part's outputs that minimise the model."""
        at, length = state.base.at, state.curvature
        start, slope = part.flat(at.coef), part.of_intercept(at.slope)
        pull = (part.flat(at.correlation) - part.cross @ part.inverse @ slope) / length
        share = min(abs(state.read.gap) / program.null_value, 1.0) if program.null_value > 0 else 1.0
        goal = part.matrix.goal(share, state.accuracy) * program.null_value / length
        shape = (*part.feature_shape, start.shape[1])
        product, before = part.matrix.product(start) + pull, part.flat(state.coef)
        penalty = program.penalty.for_outputs(start.shape[1])
        flat = part.matrix.minimum(Model(penalty, program.alpha / length, shape, product, before, goal))
        shift = part.inverse @ (slope / length - part.cross.T @ (flat - start))
        return part.shaped(flat), at.intercept[part.outputs] + shift.flatten()

    def _curvatures(self, program: Program, pred: Tensor) -> Tensor:
        """Second derivatives of each sample's loss that the metric takes, shape ``(N, n)``.

        These are all of a coupled loss's, a bound for each output, or one for all outputs (``outputs_apart``).
        """
        loss, n_outputs, largest = program.loss, pred.shape[1], program.loss.smoothness
        joined = self.metrics.joins_outputs
        bounds = curvature_bounds(loss, pred, program.y)
        size = largest if math.isfinite(largest) else float(program.mean(bounds.amax(1)))
        least = self.config.least_curvature * size
        if outputs_apart(program, joined) == 1:
            return bounds.amax(1, keepdim=True).clamp(least, largest)
        if loss.output_separable or not joined:
            return bounds.clamp(least, largest)
        units, columns = torch.eye(n_outputs).to(pred), hessian_columns(loss, pred, program.y)
        # The sums are of what is kept alone: slices of whole columns would hold these in memory.
        return torch.cat([column[:, i:] + least * units[i, i:] for i, column in enumerate(columns)], dim=1)

    def _alike(self, program: Program, found: Tensor, other: Tensor) -> bool:
        change = program.weight @ (found - other).abs()
        return float(change.sum()) <= self.config.alike * float((program.weight @ other.abs()).sum())

    def _says_too_little(self, state: _State, found: Read) -> bool:
        """Whether what a pass in single precision says of a point may be rounding."""
        rise, size = found.value - state.base.value, found.size
        rounding = torch.finfo(torch.float32).eps / math.sqrt(len(found.at.pred))  # of a mean of so many
        if abs(found.gap) <= SINGLE * size or abs(rise) <= rounding * size:
            return True
        if state.past or not 0 < rise <= SINGLE * size:  # slopes of combinations may lead too far
            return False
        # Unless the loss has more curvature than its model, whose minimum then is too far, it is rounding.
        return self._curvature_met(state.metric, state.base.at, found.at) <= state.curvature

    @staticmethod
    def _curvature_met(metric: Metric, before: Linear, after: Linear) -> float:
        """Curvature of the loss between two points, in units of the metric; zero where these are the same."""
        move, shift = after.coef - before.coef, after.intercept - before.intercept
        square = metric.square(move, shift)
        bend = float(((before.correlation - after.correlation) * move).sum())
        bend += float(((before.slope - after.slope) * shift).sum())
        return bend / square if square > 0 else 0.0

    def point(self, program: Program, state: _State) -> Point:
        found = state.read
        if state.cost > 0:
            return self._unsmoothed(program, state)
        # A result in float32 has rounded coefficients, whose own dual point says no more than that.
        rounds = program.map.dtype == torch.float32 and abs(found.gap) <= SINGLE * program.null_value
        return Point(state.coef, state.intercept, pred=found.at.pred + found.at.intercept if rounds else None)

    def gap_estimate(self, program: Program, state: _State) -> float:
        return state.read.gap if state.cost == 0 else gap_estimate(program, self._unsmoothed(program, state))

    def _unsmoothed(self, program: Program, state: _State) -> Point:
        """The point that was read, with the dual point of the smoothed loss."""
        at = state.read.at
        pred, correlation = at.pred + at.intercept, state.metric.reduced(at.correlation, at.slope)
        own = state.smooth.loss.unsmoothed(pred, program.y)
        return Point(at.coef, at.intercept, pred=own, fitted=pred, correlation=correlation)

    def finished(self, state: _State) -> bool:
        return state.finished


def _read_again(program: Program, state: _State, point: Read) -> Read:
    """A pass over the data at a point that a pass in another precision or a combination has told of."""
    return read(program, point.at.coef, point.at.intercept, state.single, state.metric)

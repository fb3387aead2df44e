"""Alternating direction method of multipliers (ADMM) with a cached factorisation (Boyd et al. 2011, section 4.2)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from convexformer_solvers.algorithms.base import PrimalDualSolver
from convexformer_solvers.linalg.anderson import Anderson
from convexformer_solvers.linalg.eigenvalue_ratio import eigenvalue_ratio, some_samples_tell
from convexformer_solvers.linalg.hessian import curvature_bounds
from convexformer_solvers.linalg.ridge import ridge_system
from convexformer_solvers.points import Point, as_start
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.precision import Cast
from convexformer_solvers.reductions.weights import Targets
from convexformer_solvers.validation import as_dtype

from .config import AdmmConfig
from .rho import GroupSizeStepRule, balancing_rho, first_rho, largest_rho, rule_from_scratch, serves_as_well, within
from .state import Cache, End, Start, State


class Admm(PrimalDualSolver):
    r"""Over-relaxed alternating directions in the metric of the data, majorised where the loss is not quadratic.

    The splitting is ``W = Z``: ``W`` carries the loss, replaced by a quadratic around the last predictions whose
    curvature follows that of each sample, ``Z`` the penalty. An update of ``W`` is a ridge problem whose Gram matrix,
    on the smaller side of the data, is formed once; where it costs no product with the data, up to ten of them lead to
    the proximal step of the loss itself. ``rho`` follows the size of the groups, then the curvatures that moves show.
    The iterates are accelerated (``Anderson``), and extrapolated from alpha to alpha of a path.

    Needs a loss with finite ``smoothness`` and a penalty that is a sum over blocks. Memory: the square of that side.

    Parameters
    ----------
    dtype : torch.dtype or {'float32', 'float64'}, default=torch.float64
        Precision of the iterations; that of the points which they give is float64 in any case. Data in another
        precision are copied where it is float32, and converted as they are read where it is float64.
    config : AdmmConfig, optional
        Numbers that it goes by. Default: those of ``AdmmConfig``.

    Raises
    ------
    ValueError
        If ``dtype`` is no precision.

    Examples
    --------
    >>> Admm().name
    'admm'
    """

    name = "admm"

    def __init__(self, dtype: torch.dtype | str = torch.float64, config: AdmmConfig | None = None) -> None:
        self.dtype, self.config = as_dtype(dtype), config or AdmmConfig()
        self.reductions = (Targets(),) if self.dtype == torch.float64 else (Targets(), Cast(self.dtype))

    def unmet_requirement(self, program: Program) -> str | None:
        if not math.isfinite(program.loss.smoothness):
            return f"a loss with finite smoothness, which {program.loss!r} has not"
        if not program.penalty.block_separable:  # the rule for rho goes by the size of groups
            return f"a penalty that is a sum over blocks, not {program.penalty!r}"
        return super().unmet_requirement(program)

    def init_again(self, program: Program, start: Point, previous: State | None) -> State:
        coef, pred = as_start(program, start)
        if previous is None:
            loss, config, first = program.loss, self.config, Start.at(program, coef, pred)
            # Where curvatures jump, extrapolations across the jumps lead astray.
            acceleration = Anderson(config.memory * loss.smooth_curvature, program.outputs_separate)
            largest = largest_rho(program, first.correlation)
            cache = Cache(ridge_system(program.map, program.fit_intercept), acceleration, largest)
            ratio_tells = some_samples_tell(program) and loss.output_separable and loss.smooth_curvature
            ratio = eigenvalue_ratio(program) if ratio_tells else math.nan
            rule, local = rule_from_scratch(program, ratio, config), _local_curvature(program, first.pred, config)
            rho = rule.rho(program, coef, largest) or first_rho(program, first.correlation, largest, ratio, config)
            cache.system.factorise(program.weight * local, rho)
            return State.at(program, cache, first, local, rho, rule)
        # Coefficients alone are a start that somebody gave.
        ahead = _ahead(program, previous) if pred is not None else None
        return self._on_path(program, ahead or Start.at(program, coef, pred), previous)

    def _on_path(self, program: Program, start: Start | End, previous: State) -> State:
        """The state at the start of a path's next alpha."""
        config, cache = self.config, previous.cache
        coupled = not program.loss.output_separable
        rule = GroupSizeStepRule(config.near_threshold if coupled else config.threshold)
        if previous.rule.measured and not coupled:
            rule = previous.rule
        largest = cache.largest_rho
        rho = rule.rho(program, start.coef, largest) or first_rho(program, start.correlation, largest, math.nan, config)
        if isinstance(start, End):  # near the one before; groups so small that they ask for the largest tell less
            rho = previous.rho if rho >= largest else within(previous.rho, rho, config.refactor**2)
        local, margin = _local_curvature(program, start.pred, config), 1.0
        if _alike(program, local, previous.local, config):
            local, margin = previous.local, previous.margin
        weight, system = program.weight * margin * local, cache.system
        if not (torch.equal(weight, system.weight) and serves_as_well(rho, system.rho, config.refactor)):
            system.factorise(weight, rho)
        cache.acceleration.forget()
        state = State.at(program, cache, start, local, system.rho, rule)
        # As after some iterations, so that rho is first set anew before long.
        return state._replace(
            margin=margin, iteration=min(config.adapt_at, default=0) // 2, before=_end_of(program, previous)
        )

    def carried_on(self, program: Program, state: State) -> State:
        """The state of iterations in another precision, for iterations on this program."""
        parts: dict[str, Any] = {
            name: part.to(program.y) for name, part in state._asdict().items() if isinstance(part, Tensor)
        }
        acceleration = Anderson(state.cache.acceleration.memory, program.outputs_separate)
        system = ridge_system(program.map, program.fit_intercept)
        system.factorise(program.weight * state.margin * parts["local"], state.rho)
        parts |= {f"fitted_{name}": program.map.matvec(parts[name]) for name in ("coef", "multiplier")}
        return state._replace(cache=Cache(system, acceleration, state.cache.largest_rho), mark=None, **parts)

    def step(self, program: Program, state: State) -> State:
        state = self._iterated(program, state._replace(iteration=state.iteration + 1))
        if state.iteration + self.config.memory // 2 in self.config.adapt_at[1:]:
            state = state._replace(mark=state.sides)
        return self._adapted(program, state)

    def point(self, program: Program, state: State) -> Point:
        fitted = _with_intercept(program, state.fitted_coef, state.pred)
        return Point(state.coef, pred=state.pred, fitted=fitted, correlation=state.correlation)

    def _iterated(self, program: Program, state: State) -> State:
        rho, (system, acceleration, _) = state.rho, state.cache
        center, fitted_center = state.coef - state.multiplier, state.fitted_coef - state.fitted_multiplier
        state, pred = self._loss_step(program, state, center, fitted_center)
        smooth = system.solution()
        relaxed = torch.lerp(state.coef, smooth, self.config.over_relaxation)
        relaxed_fitted = torch.lerp(state.fitted_coef, pred, self.config.over_relaxation)
        # Z and U are functions of their sum, and A of each: all follows from the acceleration of the sum.
        plain = (relaxed + state.multiplier, relaxed_fitted + state.fitted_multiplier, pred)
        total, fitted_total, expansion = acceleration.next(state.coef + state.multiplier, plain)
        coef = program.penalty.prox(total, program.alpha / rho)
        fitted_coef = program.map.matvec(coef)
        if acceleration.largest_weights > self.config.bold:
            fitted = _with_intercept(program, fitted_coef, pred)
            if not float(program.objective(coef, fitted)) <= program.null_value:
                total, fitted_total, expansion = plain
                coef = program.penalty.prox(total, program.alpha / rho)
                fitted_coef = program.map.matvec(coef)
        return state._replace(
            smooth=smooth,
            correlation=rho * (smooth - center),
            pred=pred,
            expansion=expansion,
            coef=coef,
            fitted_coef=fitted_coef,
            multiplier=total - coef,
            fitted_multiplier=fitted_total - fitted_coef,
        )

    def _loss_step(self, program: Program, state: State, center: Tensor, fitted_center: Tensor) -> tuple[State, Tensor]:
        """The state with the curvature that was observed, and predictions of the proximal step on the loss.

        That is one ridge problem with quadratics that touch the loss at the last predictions; where it takes no
        product with the data, others follow with quadratics at the predictions that the one before gave, extrapolated.
        Where the curvature jumps only those count that lower the objective of the proximal step.
        """
        loss, system, expansion = program.loss, state.cache.system, state.expansion
        root = system.weight.sqrt()[:, None]
        acceleration = Anderson(self.config.memory // 2 + 1, columns_apart=False)
        n_left, smallest, best = self.config.loss_steps if system.fits_without_products else 1, math.inf, None
        guarded = n_left > 1 and not loss.smooth_curvature
        while True:
            gradient = loss.gradient(expansion, program.y)
            step = expansion - gradient / state.curvature[:, None] - fitted_center
            fitted = system.fit(fitted_center + _without_common_shift(program, step), center, fitted_center)
            if loss.quadratic:  # then so is what touches it
                return state, fitted
            move = _without_common_shift(program, fitted - expansion)
            state = _with_observed_curvature(program, state, move, loss.gradient(fitted, program.y) - gradient)
            n_left -= 1
            if guarded:
                value = float(program.loss_value(fitted)) + 0.5 * state.rho * system.squared_move(fitted, fitted_center)
                if best is None or value <= smallest:
                    smallest, best = value, (fitted, system.last)
                else:
                    fitted, system.last = best
                    if n_left == 0 or acceleration.largest_weights == 0:  # the quadratics are too flat
                        return state, fitted
                    acceleration.forget()
                    expansion = fitted
                    continue
            if n_left == 0:
                return state, fitted
            in_all = root * _without_common_shift(program, fitted - state.pred)
            if float((root * move).square().sum()) <= self.config.loss_accuracy**2 * float(in_all.square().sum()):
                return state, fitted
            _, expansion = acceleration.next(root * expansion, (root * fitted, fitted))

    def _adapted(self, program: Program, state: State) -> State:
        """Set the curvature by what was observed, and rho; the multiplier times rho stays."""
        config, rho, local, margin = self.config, state.rho, state.local, state.margin
        exceeded = state.observed_mean > margin * math.sqrt(config.safety)
        if not (exceeded or state.iteration in config.adapt_at):
            return state
        if exceeded:  # by few samples, mostly, as those that a move takes to where the loss is curved
            local = torch.maximum(local, config.safety / margin * state.observed_curvature)
        checks = state.iteration in _apart(config.adapt_at) and not program.loss.quadratic
        if checks:
            new_local = _local_curvature(program, state.pred, config)
            wanted = min(1.0, max(config.least_margin, config.safety * state.observed_mean))
            if not _alike(program, new_local, local, config) or margin > config.refactor * wanted:
                local, margin = new_local, wanted
        if state.iteration in config.adapt_at:
            state = self._with_better_rho(program, state)
        if local is not state.local or (margin, state.rho) != (state.margin, rho):
            state.cache.system.factorise(program.weight * margin * local, state.rho)
            state.cache.acceleration.forget()
        if exceeded or checks:
            state = state._replace(observed_mean=0.0, observed_curvature=torch.zeros_like(local))
        scale = rho / state.rho
        return state._replace(
            local=local,
            margin=margin,
            multiplier=scale * state.multiplier,
            fitted_multiplier=scale * state.fitted_multiplier,
        )

    def _with_better_rho(self, program: Program, state: State) -> State:
        """The state with another rho where that is worth its cost, by the moves since the mark or the size of groups.

        What moves say of rho they say of the rule by size, for later iterations and the next alpha of a path.
        """
        config, mark, state = self.config, state.mark, state._replace(mark=None)
        # A gap below zero is that of a correlation that is not the dual point's: then moves are not those of the loss.
        by_moves = balancing_rho(mark, state.sides) if mark and self.gap_estimate(program, state) >= 0 else None
        if by_moves is None:
            wanted, rule = state.rule.rho(program, state.coef, state.cache.largest_rho), state.rule
            if wanted == state.cache.largest_rho and state.before is not None:
                return state  # groups that small tell less than a path
        else:
            wanted = within(state.rho, by_moves, config.largest_change)
            rule = GroupSizeStepRule.giving(program, state.coef, wanted) or state.rule
        if wanted is None or serves_as_well(state.rho, wanted, config.refactor):
            return state
        return state._replace(rho=wanted, rule=rule)


def _with_intercept(program: Program, fitted_coef: Tensor, pred: Tensor) -> Tensor:
    """Predictions of coefficients with the intercept that gives them the mean of others, if there is one."""
    return fitted_coef + program.weight @ (pred - fitted_coef) * program.fit_intercept


def _end_of(program: Program, previous: State) -> End | None:
    """The end of the alpha before that of a program; None where there is none to extrapolate from."""
    if not program.loss.smooth_curvature:  # across jumps of the curvature this leads astray
        return None
    if previous.alpha == program.alpha:
        return previous.before
    before = program.with_alpha(previous.alpha)
    # A gap below zero is that of a correlation that is not the dual point's, and then U is not that of Z either.
    if not Admm().gap_estimate(before, previous) >= -1e-5 * program.null_value:
        return None
    return End(previous.alpha, previous.coef, previous.rho * previous.multiplier, previous.pred)


def _ahead(program: Program, previous: State) -> End | None:
    """Where the last two alphas lead the one of a program; None where they lead nowhere."""
    end = _end_of(program, previous) if previous.alpha != program.alpha else None
    return None if end is None or previous.before is None else end.ahead(previous.before, program.alpha)


def _apart(iterations: tuple[int, ...]) -> list[int]:
    """Those of some iterations that are at least twice the last of them: lower curvatures take some to show jumps."""
    kept = list(iterations[:1])
    for iteration in iterations:
        if iteration >= 2 * kept[-1]:
            kept.append(iteration)
    return kept


def _without_common_shift(program: Program, move: Tensor) -> Tensor:
    """A move in predictions without the same number in all outputs, where the loss does not go by that."""
    return move - move.mean(1, keepdim=True) if program.loss.shift_invariant else move


def _local_curvature(program: Program, pred: Tensor, config: AdmmConfig) -> Tensor:
    """Bound of the curvature of each sample's loss at its prediction, kept away from zero, shape ``(N,)``."""
    largest = program.loss.smoothness
    return curvature_bounds(program.loss, pred, program.y).amax(1).clamp(config.least_curvature * largest, largest)


def _with_observed_curvature(program: Program, state: State, move: Tensor, change: Tensor) -> State:
    """The state after a move in predictions that changed the gradient by so much."""
    square, bend = move.square().sum(1), (move * change).sum(1)
    in_all = float(program.mean(state.local * square))
    if not in_all > 0:
        return state
    tells = square > 1e-6 * program.mean(square)  # shorter moves are rounding
    each = torch.maximum(state.observed_curvature, torch.where(tells, bend / square, 0.0))
    mean = max(state.observed_mean, float(program.mean(bend)) / in_all)
    return state._replace(observed_mean=mean, observed_curvature=each)


def _alike(program: Program, local: Tensor, other: Tensor, config: AdmmConfig) -> bool:
    """Whether one bound of the samples' curvatures serves as well as another."""
    return float(program.mean((local / other - 1).abs())) <= config.curvature_change

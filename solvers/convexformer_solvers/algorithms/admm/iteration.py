"""Alternating directions with a cached factorisation, for any penalty and any loss of bounded curvature."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from convexformer_solvers.algorithms.primal_dual import Iterate, PrimalDualSolver
from convexformer_solvers.linalg.anderson import Anderson
from convexformer_solvers.linalg.hessian import curvature_bound
from convexformer_solvers.linalg.ridge import RidgeSystem, ridge_system
from convexformer_solvers.program import Program
from convexformer_solvers.validation import as_dtype

from .rho import (
    WORTH_REFACTORING,
    GroupRule,
    balancing_rho,
    first_rho,
    largest_rho,
    rule_for_groups,
    serves_as_well,
    spread_that_tells,
)
from .state import End, Known, Start, State

_OVER_RELAXATION = 1.7
# Differences that the acceleration keeps, at most and at least, and the numbers that they may hold in all unless the
# least hold more: 4 GB in single precision. The rounding that it may cause, in units of its root.
_MEMORY = 8
_LEAST_MEMORY = 2
_LARGEST_MEMORY = 2**30
_LARGEST_GROWTH = 1e-2
# Sum of the coefficients' sizes from which on an extrapolation is looked at before it is taken.
_BOLD = 3.0
# Iterations after which rho is set anew, after the first by the size of groups, later by the moves of the last few.
_RHO_AT = (5, 15, 25, 40, 70, 100, 200, 400, 800)
_MOVES = 4
# Factor by which moves may change rho at once: those that are rounding, or meet no curvature, tell nothing of it.
_LARGEST_CHANGE = 30.0
# The same from one alpha of a path to the next: what is extrapolated of U counts in Z by one over rho.
_LARGEST_WARM_CHANGE = 4.0
# How much larger it is where the iterations begin anew, as points had become far worse than the best constant model.
_RAISE = 10.0
# Those of them after which the samples' curvatures are set anew, unless they would change less than this on average.
# Single ones that are too low show in the curvature that is met.
_CURVATURE_AT = (5, 15, 40, 100, 200, 400, 800)
_CURVATURE_CHANGE = 0.2
# Iterations that a start from another state counts for, so that rho is first set anew after three.
_WARM = 2
# Bounds of the curvature that stands for a sample's loss, beside the loss's own; of what may exceed it; and of what
# margin moves without any curvature, as in the linear part of Huber's loss, may leave.
_LEAST_CURVATURE = 0.02
_TOLERATED = 1.1
_SAFETY = 1.3
_LEAST_MARGIN = 0.1
# Ridge problems within one proximal step on a loss that is not quadratic, at most; the differences that their
# acceleration keeps; and the move of the last in units of that of all.
_LOSS_STEPS = 10
_LOSS_MEMORY = 5
_LOSS_ACCURACY = 0.1
# Work of a product with the data, in floating-point operations, that takes no longer than its call.
_SLIGHT_PRODUCT = 2.0**22
# Squared move of a sample, in units of all samples' mean, from which on it tells a curvature.
_LEAST_MOVE = 1e-6


class Admm(PrimalDualSolver):
    r"""Over-relaxed alternating directions in the metric of the data, majorised where the loss is not quadratic.

    The splitting is ``W = Z``: ``W`` carries the loss, replaced by a quadratic around the last predictions whose
    curvature follows that of each sample, ``Z`` the penalty. Each update of ``W`` is a ridge problem whose Gram
    matrix, on the cheaper side of the data, is formed once and serves all outputs; ``rho`` follows the size of the
    groups and, from the fifteenth iteration on, the curvatures that moves meet in the loss and in the penalty.
    Correlated features cost nothing extra: the metric takes them out. On the side of the samples up to ten such
    problems, which cost no product with the data there, take the quadratics to the proximal step of the loss itself.
    Per iteration two products with the data and two triangular solves for each problem. Along a path each alpha starts
    where the line through the ends of the last two leads, as far as the curvature of the loss does not jump.

    Needs a loss with finite ``smoothness`` and a penalty that is a sum over blocks. Memory: the square of the
    side that is taken, for Gram matrix and factor together.

    Parameters
    ----------
    dtype : torch.dtype or {'float32', 'float64'}, default=torch.float64
        Precision of the iterations; that of the points which they give is float64 in any case. Data in another
        precision are copied where it is float32, and converted as they are read where it is float64.

    Raises
    ------
    ValueError
        If ``dtype`` is no precision.

    Examples
    --------
    >>> Admm().name
    'admm'
    """

    def __init__(self, dtype: torch.dtype | str = torch.float64) -> None:
        self.dtype = as_dtype(dtype)

    @property
    def name(self) -> str:
        return "admm"

    def unmet_requirement(self, program: Program) -> str | None:
        if not math.isfinite(program.loss.smoothness):
            return f"a loss with finite smoothness, which {program.loss!r} has not"
        if not program.penalty.block_separable:  # the rule for rho goes by the size of groups
            return f"a penalty that is a sum over blocks, not {program.penalty!r}"
        return super().unmet_requirement(program)

    def init_at(self, program: Program, coef: Tensor, pred: Tensor | None, previous: State | None = None) -> State:
        exact = program.drop_zero_weights().with_float64_targets()
        program = self._in_own_precision(exact, previous)
        # Coefficients alone are a start that somebody gave.
        ahead = previous.ahead(exact) if previous is not None and pred is not None else None
        start = ahead or Start.at(program, coef, pred)
        known = _known(program, start.correlation) if previous is None else previous.known
        found = spread_that_tells(program, warm=previous is not None)
        rule = rule_for_groups(program, found, warm=previous is not None)
        if previous is not None and previous.rule.measured and program.loss.output_separable:
            rule = previous.rule
        before = previous.rho if previous is not None and ahead is not None else None
        rho = _starting_rho(program, start, rule, known.largest_rho, found, before)
        local, margin = _local_curvature(program, start.fitted), 1.0
        if previous is not None and _alike(program, local, previous.local):
            local, margin = previous.local, previous.margin
        rho = _factorised(known, program.weight * margin * local, rho, may_keep=previous is not None)
        state = State.at(exact, program, known, start, local, rho, rule)
        if previous is None:
            return state._replace(margin=margin)
        end = previous.end_before(exact)
        return state._replace(margin=margin, iteration=_WARM, before=end)

    def _in_own_precision(self, exact: Program, previous: State | None) -> Program:
        if previous is None:
            return exact if self.dtype == torch.float64 else exact.to(self.dtype)
        return dataclasses.replace(exact, map=previous.program.map, y=exact.loss.target_in(exact.y, self.dtype))

    def step(self, program: Program, state: State) -> State:
        state = _iterate(state._replace(iteration=state.iteration + 1))
        if state.iteration + _MOVES in _RHO_AT[1:]:
            state = state._replace(mark=state.sides())
        return _begun_anew(state) if _has_diverged(state) else _adapted(state)

    def carried_on(self, exact: Program, state: State, offset: Tensor) -> State:
        """The state of iterations in another precision, for iterations in this one.

        Parameters
        ----------
        exact : Program
            The program, on its samples of positive weight; that of the state may differ by constant predictions.
        state : state
            The state to go on from.
        offset : Tensor of shape (c,)
            What has been taken from the predictions of the state's program.
        """
        coef, multiplier, local = (part.to(exact.y) for part in (state.coef, state.multiplier, state.local))
        fitted, expansion = (part.to(exact.y) + offset for part in (state.fitted, state.expansion))
        memory = state.known.acceleration.memory
        known = Known(
            ridge_system(exact.map, exact.fit_intercept, not exact.loss.quadratic),
            Anderson(memory, exact.outputs_separate),
            state.known.largest_rho,
        )
        known.system.factorise(exact.weight * state.margin * local, state.rho)
        return state._replace(
            exact=exact,
            program=exact,
            known=known,
            local=local,
            smooth=state.smooth.to(exact.y),
            correlation=state.correlation.to(exact.y),
            fitted=fitted,
            expansion=expansion,
            coef=coef,
            fitted_coef=exact.map.matvec(coef),
            multiplier=multiplier,
            fitted_multiplier=exact.map.matvec(multiplier),
            mark=None,
            before=None,  # of a program with other targets
        )

    def iterate(self, state: State) -> Iterate:
        return state.iterate()


def _known(program: Program, correlation: Tensor) -> Known:
    largest_memory = max(_LARGEST_MEMORY // (2 * max(1, correlation.numel())), _LEAST_MEMORY)
    # Where curvatures jump, extrapolations across the jumps lead astray.
    memory = min(_MEMORY, largest_memory) if program.loss.smooth_curvature else 0
    return Known(
        ridge_system(program.map, program.fit_intercept, not program.loss.quadratic),
        Anderson(memory, program.outputs_separate),
        largest_rho(program, correlation),
    )


def _starting_rho(
    program: Program, start: Start | End, rule: GroupRule, largest: float, found: float, before: float | None
) -> float:
    """The rho for the groups of a start; where that is extrapolated, near the one before."""
    rho = rule.rho(program, start.coef, largest) or first_rho(program, start.correlation, found, largest)
    if before is None:
        return rho
    return _near(before, rho, _LARGEST_WARM_CHANGE) if rho < largest else before  # groups that small tell less


def _factorised(known: Known, weight: Tensor, rho: float, may_keep: bool = False) -> float:
    """Set the weights and rho of the ridge problems; the rho, which is that of their last factor where it serves."""
    system, acceleration = known.system, known.acceleration
    if may_keep and torch.equal(weight, system.weight) and serves_as_well(rho, system.rho):
        acceleration.restart()
    else:
        system.factorise(weight, rho)
        acceleration.forget()
    return system.rho


def _iterate(state: State) -> State:
    program, rho, (system, acceleration, _) = state.program, state.rho, state.known
    center, fitted_center = state.coef - state.multiplier, state.fitted_coef - state.fitted_multiplier
    state, fitted = _loss_step(state, center, fitted_center)
    smooth = system.solution()
    relaxed = torch.lerp(state.coef, smooth, _OVER_RELAXATION)
    relaxed_fitted = torch.lerp(state.fitted_coef, fitted, _OVER_RELAXATION)
    # Z and U are functions of their sum, and A of each: all follows from the acceleration of the sum.
    plain = (relaxed + state.multiplier, relaxed_fitted + state.fitted_multiplier, fitted)
    total, fitted_total, expansion = acceleration.next(state.coef + state.multiplier, plain)
    if acceleration.rounding_growth > _LARGEST_GROWTH / math.sqrt(torch.finfo(total.dtype).eps):
        fitted_total = program.map.matvec(total)
        acceleration.rounding_growth = 1.0
    coef = program.penalty.prox(total, program.alpha / rho)
    fitted_coef = program.map.matvec(coef)
    if acceleration.largest_weights > _BOLD and _is_worse_than_constant(program, coef, fitted_coef):
        total, fitted_total, expansion = plain
        coef = program.penalty.prox(total, program.alpha / rho)
        fitted_coef = program.map.matvec(coef)
    return state._replace(
        smooth=smooth,
        correlation=rho * (smooth - center),
        fitted=fitted,
        expansion=expansion,
        coef=coef,
        fitted_coef=fitted_coef,
        multiplier=total - coef,
        fitted_multiplier=fitted_total - fitted_coef,
    )


def _is_worse_than_constant(program: Program, coef: Tensor, fitted_coef: Tensor) -> bool:
    """Whether coefficients with their predictions are worse than the best constant model."""
    pred = fitted_coef + program.best_intercept(fitted_coef)
    return not float(program.objective(coef, pred)) <= program.null_value


def _loss_step(state: State, center: Tensor, fitted_center: Tensor) -> tuple[State, Tensor]:
    """The state with the curvature that was met, and predictions of the proximal step on the loss.

    That is one ridge problem with quadratics that touch the loss at the last predictions; where it costs no product
    with the data, or one that takes next to no time, others follow with quadratics at the predictions that the one
    before gave.
    """
    program, system, expansion = state.program, state.known.system, state.expansion
    root = system.weight.sqrt()[:, None]
    acceleration = Anderson(_LOSS_MEMORY, columns_apart=False)
    n_left = _LOSS_STEPS if _fits_are_cheap(program, system) else 1
    while True:
        gradient = program.loss.gradient(expansion, program.y)
        step = expansion - gradient / state.curvature[:, None] - fitted_center
        fitted = system.fit(fitted_center + _felt(program, step), center, fitted_center)
        if program.loss.quadratic:  # then so is what touches it
            return state._replace(met=1.0), fitted
        move = _felt(program, fitted - expansion)
        state = _with_curvature_met(state, move, program.loss.gradient(fitted, program.y) - gradient)
        n_left -= 1
        if n_left == 0:
            return state, fitted
        in_all = root * _felt(program, fitted - state.fitted)
        if float((root * move).square().sum()) <= _LOSS_ACCURACY**2 * float(in_all.square().sum()):
            return state, fitted
        _, expansion = acceleration.next(root * expansion, (root * fitted, fitted))


def _fits_are_cheap(program: Program, system: RidgeSystem) -> bool:
    """Whether to take more than one ridge problem for a step on the loss."""
    slight = program.map.product_work(program.y.shape[1]) <= _SLIGHT_PRODUCT
    return system.fits_without_products or (program.loss.smooth_curvature and slight)


def _felt(program: Program, move: Tensor) -> Tensor:
    """What the loss feels of a move in predictions: not the same number in all outputs, where it is shift-invariant."""
    return move - move.mean(1, keepdim=True) if program.loss.shift_invariant else move


def _local_curvature(program: Program, pred: Tensor) -> Tensor:
    """Bound of the curvature of each sample's loss at its prediction, kept away from zero, shape ``(N,)``."""
    loss = program.loss
    bound = curvature_bound(loss, pred, program.y)
    return bound.clamp(min=_LEAST_CURVATURE * loss.smoothness, max=loss.smoothness)


def _with_curvature_met(state: State, move: Tensor, change: Tensor) -> State:
    """The state after a move in predictions that changed the gradient by so much."""
    square, bend = move.square().sum(1), (move * change).sum(1)
    program, in_all = state.program, float(state.program.mean(state.local * square))
    if not in_all > 0:
        return state
    met = float(program.mean(bend)) / in_all
    secant = torch.where(square > _LEAST_MOVE * program.mean(square), bend / square, 0.0)
    return state._replace(met=max(state.met, met), secant=torch.maximum(state.secant, secant))


def _adapted(state: State) -> State:
    """Set the curvature by what was met, and rho; the multiplier times rho stays."""
    program, rho, local, margin = state.program, state.rho, state.local, state.margin
    exceeded = state.met > margin * _TOLERATED
    if not (exceeded or state.iteration in _RHO_AT):
        return state
    if exceeded:  # by few samples, mostly, as those that a move takes to where the loss is curved
        local = torch.maximum(local, _SAFETY / margin * state.secant)
    if looks := state.iteration in _CURVATURE_AT:
        new_local = _local_curvature(program, state.fitted)
        wanted = min(1.0, max(_LEAST_MARGIN, _SAFETY * state.met))
        if not _alike(program, new_local, local) or margin > WORTH_REFACTORING * wanted:
            local, margin = new_local, wanted
    if state.iteration in _RHO_AT:
        state = _with_better_rho(state)
    if local is not state.local or (margin, state.rho) != (state.margin, rho):
        _factorised(state.known, program.weight * margin * local, state.rho)
    if exceeded or looks:
        state = state._replace(met=0.0, secant=torch.zeros_like(local))
    scale = rho / state.rho
    return state._replace(
        local=local,
        margin=margin,
        multiplier=scale * state.multiplier,
        fitted_multiplier=scale * state.fitted_multiplier,
    )


def _has_diverged(state: State) -> bool:
    """Whether points are far worse than the best constant model, once moves can tell of rho."""
    return state.iteration in _RHO_AT and state.mark is not None and not state.gap <= state.exact.null_value


def _begun_anew(state: State) -> State:
    """The state at the best constant model, with a larger rho."""
    program = state.program
    rho = min(_RAISE * state.rho, state.known.largest_rho)
    fitted = program.null_intercept.expand_as(state.fitted)
    local, coef = _local_curvature(program, fitted), torch.zeros_like(state.coef)
    _factorised(state.known, program.weight * local, rho)
    start = Start(coef, torch.zeros_like(fitted), fitted, program.weighted_adjoint(program.null_dual_point))
    new = State.at(state.exact, program, state.known, start, local, rho, state.rule)
    return new._replace(iteration=state.iteration)


def _with_better_rho(state: State) -> State:
    """The state with another rho where that is worth its cost, by the moves since the mark or the size of groups.

    What moves say of rho they say of the rule by size, for later iterations and the next alpha of a path.
    """
    program, largest = state.program, state.known.largest_rho
    # A gap below zero is that of an correlation that is not the dual point's: then moves are not those of the loss.
    by_moves = balancing_rho(state.mark, state.sides()) if state.mark is not None and state.gap >= 0 else None
    state = state._replace(mark=None)
    if by_moves is not None:
        wanted = _near(state.rho, by_moves, _LARGEST_CHANGE)
        if serves_as_well(state.rho, wanted):
            return state
        return state._replace(rho=wanted, rule=GroupRule.giving(program, state.coef, wanted) or state.rule)
    by_size = state.rule.rho(program, state.coef, largest)
    tells_less = by_size == largest and state.before is not None  # groups that small tell less than a path
    return state if by_size is None or tells_less or serves_as_well(state.rho, by_size) else state._replace(rho=by_size)


def _near(rho: float, wanted: float, factor: float) -> float:
    """The wanted rho, or what is nearest to it within a factor of another."""
    return min(max(wanted, rho / factor), rho * factor)


def _alike(program: Program, local: Tensor, other: Tensor) -> bool:
    """Whether one bound of the samples' curvatures serves as well as another."""
    return local.shape == other.shape and float(program.mean((local / other - 1).abs())) <= _CURVATURE_CHANGE

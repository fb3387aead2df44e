"""Primal and dual points made consistent on the active groups.

Near an optimum the duality gap is mostly of two kinds: the price of scaling a dual point until its largest dual norm is
``alpha``, where one group that exceeds by a thousandth costs a thousandth of the penalty; and the sizes of the active
groups, which converge long after their directions. Both follow from one system with one unknown per active group, and
what is left is of second order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.linalg.hessian import Curvature
from convexformer_solvers.linear_maps.base import weighted_gram
from convexformer_solvers.penalties.base import ActiveGroups
from convexformer_solvers.program import Program

from .primal_dual import Iterate, PrimalDualSolver

# Moves of the dual point, with the system of the first.
_MOVES = 2
# Gap of a polished point, in units of what it would be without scaling its dual point, from which on a second polish is
# worth its cost.
_SCALING_COSTS = 3.0
# Gap over the best constant model's objective below which a polish is worth its cost, from scratch and along paths.
_NEAR = 3e-3
_NEAR_ALONG_PATHS = 2e-2
# Iterations from one polish to the next as a share of those so far; twice that where a polish has not halved the gap.
_SHARE = 0.125
_WORTH_POLISHING = 0.5
# Gap over the best constant model's objective from which on products in single precision say too little.
NEAR_ROUNDING = 1e-5
_REGULARISATION = 1e-10
_ROUNDING = 1e-14
# Products with the data in the time of which a polish must be possible; later those of the iterations between two.
_PATIENCE = 8.0


class Polished(PrimalDualSolver):
    """Another solver, whose iterates are polished now and then; it goes on from its own.

    Along a path the first polish comes after as many iterations as the alpha before took, one fewer where that had
    one polish alone, and at most twice `least_wait`; others come after half as many iterations as otherwise. Products
    have the precision of the iterations until a polished gap is below 1e-5 of the reference. After a polish that has
    halved the gap nothing is said of it until the next.

    Parameters
    ----------
    inner : PrimalDualSolver
        The solver.
    least_wait : int, default=2
        Iterations at least from one polish to the next, about as many as cost as much as a polish: two of two products
        each in the precision of the polish.

    Examples
    --------
    >>> from convexformer_solvers import Admm
    >>> Polished(Admm()).name
    'polished(admm)'
    """

    def __init__(self, inner: PrimalDualSolver, least_wait: int = 2) -> None:
        self.inner, self.least_wait = inner, least_wait

    @property
    def name(self) -> str:
        return f"polished({self.inner.name})"

    def unmet_requirement(self, program: Program) -> str | None:
        return self.inner.unmet_requirement(program)

    def init_at(self, program: Program, coef: Tensor, pred: Tensor | None, previous: Any = None) -> _State:
        inner = self.inner.init_at(program, coef, pred, None if previous is None else previous.inner)
        # Near alpha_max few iterations suffice, and a polish tells rounding from zero.
        first, wait = self.least_wait if bool(coef.any()) else min(2, self.least_wait), self.least_wait
        if previous is not None and previous.n_polishes > 0:
            wait = max(1, wait // 2)
            first = min(max(wait, previous.iteration - (previous.n_polishes == 1)), 2 * self.least_wait)
        near = _NEAR if previous is None else _NEAR_ALONG_PATHS
        return _State(inner, None, math.inf, first, wait, near, helps=previous is not None and previous.helps)

    def step(self, program: Program, state: _State) -> _State:
        inner, iteration = self.inner.step(program, state.inner), state.iteration + 1
        # Where polishes help, nothing ends before the next.
        gap = math.inf if state.helps and iteration < state.next_polish else self.inner.estimated_gap(inner)
        state = state._replace(inner=inner, polished=None, gap=gap, iteration=iteration)
        if iteration < state.next_polish or not abs(state.gap) <= state.near * program.null_value:
            return state
        rounded = state.smallest > NEAR_ROUNDING * program.null_value
        iterate = self.inner.rounded_iterate(inner) if rounded else self.inner.iterate(inner)
        better = polished(iterate, max(_PATIENCE, 2 * _SHARE * iteration))
        gap = math.inf if better is None else abs(better.gap_estimate)
        # A rough gap below zero is that of an correlation that is not the dual point's; polished points have their own.
        before = state.gap if state.gap > 0 else math.inf
        wait, helps = max(state.wait, math.ceil(_SHARE * iteration)), gap < _WORTH_POLISHING * before
        if not helps:
            wait *= 2
        if gap < before:
            state = state._replace(polished=better, gap=gap)
        smallest = min(state.smallest, gap)
        return state._replace(
            next_polish=iteration + wait, n_polishes=state.n_polishes + 1, helps=helps, smallest=smallest
        )

    def iterate(self, state: _State) -> Iterate:
        return self.inner.iterate(state.inner) if state.polished is None else state.polished

    def activity(self, state: _State) -> str:
        return self.inner.activity(state.inner) + (", polished" if state.polished is not None else "")

    def finished(self, state: _State) -> bool:
        return self.inner.finished(state.inner)


class _State(NamedTuple):
    inner: Any
    polished: Iterate | None  # of the last step, if it was polished
    gap: float
    next_polish: int
    wait: int  # iterations from one polish to the next, at least
    near: float  # gap over the best constant model's objective from which on polishes come
    helps: bool  # whether the last polish halved the gap
    iteration: int = 0
    n_polishes: int = 0
    smallest: float = math.inf  # gap of a polished point


def polished(iterate: Iterate, patience: float = _PATIENCE) -> Iterate | None:
    r"""The iterate with sizes of its active groups that suit its dual point, and with a dual point that suits them.

    Let :math:`u_j` be the gradients of the active groups' dual norms, :math:`a_j = A u_j` their images, :math:`H` the
    Hessian of the mean loss at the predictions :math:`v` that stand for the dual point, and :math:`S = (a_i' H a_j)`.

    - The dual point moves along :math:`v + \sum_j \lambda_j a_j` with :math:`S \lambda` equal to the excess of each
      dual norm over ``alpha``, which takes all of them to ``alpha`` but for second order. It stays in the domain of
      the conjugate.
    - The primal point is :math:`\sum_j t_j u_j` with the :math:`t_j` that minimise the second-order model of the
      objective at :math:`v`, negative ones set to zero, where that lowers the objective.

    The move may take the dual norms of other groups above ``alpha``. Where scaling for them is most of the gap, all
    of this is done once more, with these among the active ones.

    Parameters
    ----------
    iterate : Iterate
        Where to start.
    patience : float, default=8
        Products with the data in the time of which this must be possible.

    Returns
    -------
    Iterate or None
        None where there are no or too many active groups, or where the penalty does not say which they are.
    """
    program = iterate.program
    groups = _groups_that_pay(iterate, patience)
    if groups is not None and not program.loss.quadratic:
        iterate = iterate.with_own_ascent()
        groups = _groups_that_pay(iterate, patience)  # far from the optimum these may be many more
    if groups is None:
        return None
    result = _made_consistent(iterate, groups)
    active = _active_groups(result)
    if active is None or not _scaling_costs_most(result) or _many_others(result, groups, active):
        return result
    better = _made_consistent(result, active)
    return better if better.gap_estimate < result.gap_estimate else result


def _made_consistent(iterate: Iterate, groups: ActiveGroups) -> Iterate:
    """Both points, and the own correlation, by one system of the active groups' images."""
    images = _Images(iterate.program, groups)
    solve, excess = images.system(iterate.pred), images.excess(iterate, images.dual_norms(iterate.correlation))
    explained = images.products(Curvature(iterate.program, iterate.pred).product(iterate.pred))
    move, size = solve(torch.stack([excess, excess + explained], dim=1)).T
    result = images.better_primal(iterate, size)
    for _ in range(_MOVES - 1):
        result = images.moved(result, move)
        move = solve(images.excess(result, images.dual_norms_at(result))[:, None])[:, 0]
    return images.moved(result, move).with_own_ascent()


def _scaling_costs_most(iterate: Iterate) -> bool:
    """Whether scaling the dual point until it is feasible makes most of the gap."""
    without = iterate.objective - float(iterate.program.dual(iterate.dual_point()))
    return iterate.gap_estimate > _SCALING_COSTS * abs(without)


def _many_others(iterate: Iterate, known: ActiveGroups, active: ActiveGroups) -> bool:
    """Whether as many groups have become active as were known, as may be far from the optimum."""
    n_outputs = iterate.program.y.shape[1]
    places = [groups.block * n_outputs + groups.output for groups in (active, known)]
    return len(active.block) - int(torch.isin(*places).sum()) >= len(known.block)


def _active_groups(iterate: Iterate) -> ActiveGroups | None:
    program = iterate.program
    return program.penalty.active_groups(iterate.correlation, iterate.coef, program.alpha)


def _groups_that_pay(iterate: Iterate, patience: float) -> ActiveGroups | None:
    """The active groups if there are any, and few enough for a system of them, one per output where these are separate.

    The number of samples does not matter: repeated ones are to be the same as weights.
    """
    program = iterate.program
    groups = _active_groups(iterate)
    if groups is None:
        return None
    n_samples, n_outputs = program.y.shape
    counts = groups.output.bincount(minlength=n_outputs).tolist()
    sides = counts if program.outputs_separate else [sum(counts)]
    work = 2.0 * n_samples * (sum(side**2 for side in sides) + sum(counts) * program.coef_shape[-2])
    return groups if 0 < work <= patience * program.map.product_work(n_outputs) else None


class _Images:
    """Images of the active groups' units, and of the intercepts, which come last.

    Parameters
    ----------
    program : Program
        The program.
    groups : ActiveGroups
        The groups.
    """

    def __init__(self, program: Program, groups: ActiveGroups) -> None:
        self.program, self.groups = program, groups
        output, n_outputs = groups.output, program.y.shape[1]
        self.images = program.map.along(groups.block, groups.unit)  # (m, N)
        if program.fit_intercept:
            self.images = torch.cat([self.images, self.images.new_ones((n_outputs, self.images.shape[1]))])
            output = torch.cat([output, torch.arange(n_outputs, device=output.device)])
        self.output = output
        # With one output no copies are made of its images.
        several = [(output == k).nonzero()[:, 0] for k in range(n_outputs)] if n_outputs > 1 else None
        self.of_output: Sequence[Tensor | slice] = several or [slice(None)]

    def dual_norms(self, correlation: Tensor) -> Tensor:
        """Dual norms of the active groups, from the correlation of all."""
        norms = self.program.penalty.group_dual_norms(correlation)
        return norms.reshape(-1, norms.shape[-1])[self.groups.block, self.groups.output]

    def dual_norms_at(self, iterate: Iterate) -> Tensor:
        """The same at the dual point; where the blocks of active groups are few, these alone are read."""
        program, theta = self.program, iterate.dual_point()
        distinct, position = self.groups.block.unique(return_inverse=True)
        if not program.map.few(len(distinct)):
            return self.dual_norms(program.weighted_adjoint(theta))
        correlation = program.map.rmatvec_blocks(distinct, program.weight[:, None] * theta)
        return program.penalty.group_dual_norms(correlation)[position, self.groups.output]

    def excess(self, iterate: Iterate, norms: Tensor) -> Tensor:
        """By how much these dual norms exceed ``alpha``, and the means of the dual point zero."""
        program, excess = self.program, norms - self.program.alpha
        return torch.cat([excess, program.weight @ iterate.dual_point()]) if program.fit_intercept else excess

    def products(self, values: Tensor) -> Tensor:
        """Products of the images with values of shape ``(N, c)``, shape ``(m,)``."""
        result = values.new_empty(len(self.images))
        for mine, column in zip(self.of_output, values.T, strict=True):
            result[mine] = self.images[mine] @ column
        return result

    def combined(self, weights: Tensor) -> Tensor:
        """Weighted sum of the images, shape ``(N, c)``."""
        return torch.stack([weights[mine] @ self.images[mine] for mine in self.of_output], dim=1)

    def better_primal(self, iterate: Iterate, size: Tensor) -> Iterate:
        """The iterate with groups of these sizes, none of them negative, if that lowers the objective."""
        block, output, unit = self.groups
        size = size.clone()
        size[: len(block)].clamp_(min=0)
        coef = torch.zeros_like(iterate.coef)
        coef.view(-1, *coef.shape[-2:])[block, :, output] = size[: len(block), None] * unit
        better = iterate._replace(coef=coef, fitted=self.combined(size))
        if not better.objective < (1 - _ROUNDING) * self.program.null_value:  # sizes that are nothing but rounding
            constant = self.program.null_intercept.expand_as(iterate.fitted)
            better = iterate._replace(coef=torch.zeros_like(coef), fitted=constant)
        return better if better.objective <= (1 + _ROUNDING) * iterate.objective else iterate

    def moved(self, iterate: Iterate, move: Tensor) -> Iterate:
        """The iterate with its dual point's predictions moved along the images; its correlation is not."""
        return iterate._replace(pred=iterate.pred + self.combined(move))

    def system(self, pred: Tensor) -> Callable[[Tensor], Tensor]:
        """Solver of systems with the products of the images in the Hessian of the loss at some predictions."""
        images, curvature = self.images, Curvature(self.program, pred)
        if curvature.diagonal_is_all:
            together, systems = self.of_output, []
            for mine, weight in zip(self.of_output, curvature.diagonal().T, strict=True):
                systems.append(weighted_gram(images[mine].T, weight))
        else:
            together, systems = [slice(None)], [curvature.gram(images, self.output)]
        factors = [_factor(system) for system in systems]

        def solve(right: Tensor) -> Tensor:
            result = torch.zeros_like(right)
            for mine, (inverse, factor) in zip(together, factors, strict=True):
                result[mine] = inverse * torch.cholesky_solve(inverse * right[mine], factor)
            return result

        return solve


def _factor(system: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse scale and Cholesky factor of a scaled and regularised positive semidefinite system."""
    root = system.diagonal().sqrt()
    inverse = torch.where(root > 0, 1 / root, 0.0)[:, None]
    scaled = inverse * system * inverse.T
    scaled.diagonal().add_(_REGULARISATION)
    factor, failed = torch.linalg.cholesky_ex(scaled)
    if bool(failed):  # no step at all
        return torch.zeros_like(inverse), torch.eye(len(system)).to(system)
    return inverse, factor

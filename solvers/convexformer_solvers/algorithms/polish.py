"""Primal and dual points made consistent on the active groups.

Near an optimum most of the duality gap comes from scaling the dual point until its largest dual norm is ``alpha``, and
from the sizes of the active groups, which converge long after their directions. One system with one unknown per active
group removes both but for second order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from convexformer_solvers.linalg.hessian import Curvature
from convexformer_solvers.penalties.base import ActiveGroups
from convexformer_solvers.points import Point, dual_of, gap_estimate, objective, with_own_correlation
from convexformer_solvers.program import Program


@dataclass(frozen=True)
class PolishConfig:
    """When points are polished; the algorithm goes on from its own.

    Parameters
    ----------
    near : float, default=3e-3
        Gap over the best constant model's objective from which on a polish is worth its cost.
    near_on_paths : float, default=2e-2
        The same along a path, whose alphas start nearer.
    wait : int, default=2
        Steps at least from one polish to the next: about as many as cost as much as a polish.
    share : float, default=0.125
        The same as a share of the steps so far, where that is more; twice that where a polish has not halved the gap.
    patience : float, default=8
        Products with the data in the time of which a polish must be possible.
    """

    near: float = 3e-3
    near_on_paths: float = 2e-2
    wait: int = 2
    share: float = 0.125
    patience: float = 8.0


def polished(program: Program, point: Point, patience: float = PolishConfig.patience) -> Point | None:
    r"""The point with sizes of its active groups that suit its dual point, and with a dual point that suits them.

    With the gradients :math:`u_j` of the active groups' dual norms, their images :math:`a_j = A u_j`, the Hessian
    :math:`H` of the mean loss at the predictions :math:`v` behind the dual point and :math:`S = (a_i' H a_j)`, the dual
    point moves along :math:`v + \sum_j \lambda_j a_j` where :math:`S \lambda` is the excess of each dual norm over
    ``alpha``, which takes all of them there but for second order. The primal point is :math:`\sum_j t_j u_j` where the
    :math:`t_j` minimise the second-order model of the objective at :math:`v`, negative ones set to zero.

    All of this is done once more where scaling for other groups is then most of the gap. `patience` counts the products
    with the data in the time of which this must be possible; None where there are no or too many active groups.
    """
    groups = _groups_that_pay(program, point, patience)
    if groups is not None and not program.loss.quadratic:
        point = with_own_correlation(program, point)
        groups = _groups_that_pay(program, point, patience)  # far from the optimum these may be many more
    if groups is None:
        return None
    result = _made_consistent(program, point, groups)
    assert result.correlation is not None
    active = program.penalty.active_groups(result.correlation, result.coef, program.alpha)
    without_scaling = objective(program, result) - float(program.dual(dual_of(program, result)))
    if active is None or not gap_estimate(program, result) > 3 * abs(without_scaling):
        return result
    places = [some.block * program.y.shape[1] + some.output for some in (active, groups)]
    if len(active.block) - int(torch.isin(*places).sum()) >= len(groups.block):  # as may be far from the optimum
        return result
    better = _made_consistent(program, result, active)
    return better if gap_estimate(program, better) < gap_estimate(program, result) else result


def _made_consistent(program: Program, point: Point, groups: ActiveGroups) -> Point:
    """Both points, and the own correlation, by one system of the active groups' images."""
    assert point.pred is not None
    assert point.correlation is not None
    images, hessian = _Images(program, groups), Curvature(program, point.pred)
    solve, excess = images.system(hessian), images.excess(point, images.dual_norms(point.correlation))
    explained = images.products(hessian.product(point.pred))
    move, size = solve(torch.stack([excess, excess + explained], dim=1)).T
    result = images.moved(images.better_primal(point, size), move)
    move = solve(images.excess(result, images.dual_norms_at(result))[:, None])[:, 0]
    return with_own_correlation(program, images.moved(result, move))


def _groups_that_pay(program: Program, point: Point, patience: float) -> ActiveGroups | None:
    """The active groups if there are any, and few enough for a system of them, one per separate output."""
    assert point.correlation is not None
    groups = program.penalty.active_groups(point.correlation, point.coef, program.alpha)
    if groups is None:
        return None
    n_samples, n_outputs = program.y.shape
    counts = groups.output.bincount(minlength=n_outputs).tolist()
    sides = counts if program.outputs_separate else [sum(counts)]
    work = 2.0 * n_samples * (sum(side**2 for side in sides) + sum(counts) * program.coef_shape[-2])
    return groups if 0 < work <= patience * program.map.product_work(n_outputs) else None


class _Images:
    """Images of the active groups' units, and of the intercepts, which come last."""

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

    def dual_norms_at(self, point: Point) -> Tensor:
        """The same at the dual point; where the blocks of active groups are few, these alone are read."""
        program, theta = self.program, dual_of(self.program, point)
        distinct, position = self.groups.block.unique(return_inverse=True)
        if not program.map.few(len(distinct)):
            return self.dual_norms(program.weighted_adjoint(theta))
        correlation = program.map.rmatvec_blocks(distinct, program.weight[:, None] * theta)
        return program.penalty.group_dual_norms(correlation)[position, self.groups.output]

    def excess(self, point: Point, norms: Tensor) -> Tensor:
        """By how much these dual norms exceed ``alpha``, and the means of the dual point zero."""
        program, excess = self.program, norms - self.program.alpha
        return torch.cat([excess, program.weight @ dual_of(program, point)]) if program.fit_intercept else excess

    def products(self, values: Tensor) -> Tensor:
        """Products of the images with values of shape ``(N, c)``, shape ``(m,)``."""
        result = values.new_empty(len(self.images))
        for mine, column in zip(self.of_output, values.T, strict=True):
            result[mine] = self.images[mine] @ column
        return result

    def combined(self, weights: Tensor) -> Tensor:
        """Weighted sum of the images, shape ``(N, c)``."""
        return torch.stack([weights[mine] @ self.images[mine] for mine in self.of_output], dim=1)

    def better_primal(self, point: Point, size: Tensor) -> Point:
        """The point with groups of these sizes, none of them negative, if that lowers the objective."""
        program, (block, output, unit) = self.program, self.groups
        size = size.clone()
        size[: len(block)].clamp_(min=0)
        coef = torch.zeros_like(point.coef)
        coef.view(-1, *coef.shape[-2:])[block, :, output] = size[: len(block), None] * unit
        better = point._replace(coef=coef, fitted=self.combined(size))
        rounding = 32 * torch.finfo(coef.dtype).eps
        value = objective(program, better)
        if not value < (1 - rounding) * program.null_value:  # sizes that are nothing but rounding
            better = better._replace(coef=torch.zeros_like(coef), fitted=program.constant_pred(program.null_intercept))
            value = objective(program, better)
        return better if value <= (1 + rounding) * objective(program, point) else point

    def moved(self, point: Point, move: Tensor) -> Point:
        """The point with its dual point's predictions moved along the images; its correlation is not."""
        assert point.pred is not None
        return point._replace(pred=point.pred + self.combined(move))

    def system(self, curvature: Curvature) -> Callable[[Tensor], Tensor]:
        """Solver of systems with the products of the images in a Hessian of the loss."""
        images = self.images
        if curvature.diagonal_is_all:
            pairs = zip(self.of_output, curvature.diagonal().T, strict=True)
            gram = self.program.map.weighted_gram
            together, systems = self.of_output, [gram(images[mine].T, weight) for mine, weight in pairs]
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
    scaled.diagonal().add_(1e-10)  # it may be singular
    factor, failed = torch.linalg.cholesky_ex(scaled)
    if bool(failed):  # no step at all
        return torch.zeros_like(inverse), torch.eye(len(system)).to(system)
    return inverse, factor

r"""Linear systems of Newton steps, solved in the features or in the samples, whichever costs less.

``NewtonSystem`` solves those of semismooth Newton steps on the dual of a proximal step, ``solved`` those of Newton
steps on a loss plus a smoothed penalty.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, combinations_with_replacement
from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.linear_maps.base import LinearMap, mirrored, row_chunks
from convexformer_solvers.program import Program
from convexformer_solvers.rounding import EPS

from .cholesky import cholesky
from .gram import SupportGram, add_to_blocks, bordered
from .hessian import Curvature
from .ridge import SMALL_SIDE


class ProxJacobian(NamedTuple):
    """Jacobian of the prox of a sum of group norms: ``s_b I + (1 - s_b) u_b u_b'`` on active groups, else zero."""

    blocks: Tensor  # (m,), active groups as positions in the flattened block axes, increasing
    shrinkage: Tensor  # (m,), the s_b within (0, 1]
    units: Tensor  # (m, d), the unit vectors u_b

    def inverse(self) -> Tensor:
        """Inverses on the active groups, shape ``(m, d, d)``."""
        outer, inverse_scale = self.units[:, :, None] * self.units[:, None, :], 1 / self.shrinkage[:, None, None]
        return inverse_scale * torch.eye(self.units.shape[1]).to(outer) + (1 - inverse_scale) * outer


class NewtonSystem:
    r"""Solver of the systems :math:`(I + \sigma \, (A J A^\top + s \, 1 1^\top) \, D) \, x = r` in predictions.

    ``D`` holds the curvatures of the weighted loss, ``J`` is the Jacobian of the prox; the term ``s 1 1'`` stands for
    the intercept, whose ``s`` has the unit of a squared feature and is zero where there is none. The smaller of the
    sides of the active columns and of the samples is factorised, in float64. While ``D`` stays the same the Gram matrix
    of the groups met so far is kept.
    """

    def __init__(self, linear_map: LinearMap, intercept_scale: float) -> None:
        self.map, self.intercept_scale, self.fit_intercept = linear_map, intercept_scale, intercept_scale > 0
        self._gram = SupportGram(linear_map)

    def solve(self, jacobian: ProxJacobian, sigma: float, curvature: Tensor, target: Tensor) -> Tensor:
        """The ``x`` for ``J``, a positive ``sigma``, the diagonal of ``D`` and ``r``, all vectors of shape ``(N,)``."""
        n_columns = jacobian.units.numel() + self.fit_intercept
        if n_columns == 0:
            return target
        if len(jacobian.blocks) == 0:  # the intercept alone
            return target - (curvature @ target) / (curvature.sum() + 1 / (sigma * self.intercept_scale))
        if n_columns > max(len(target), SMALL_SIDE if self.map.in_memory else 0):
            return self._in_samples(jacobian, sigma, curvature, target)
        if self.map.in_memory:
            return self._in_support(jacobian, sigma, curvature, target)
        # One pass for the columns, of which all products follow.
        copy = NewtonSystem(self.map.restricted(jacobian.blocks), self.intercept_scale)
        blocks = torch.arange(len(jacobian.blocks), device=jacobian.blocks.device)
        return copy._in_support(jacobian._replace(blocks=blocks), sigma, curvature, target)

    def _in_support(self, jacobian: ProxJacobian, sigma: float, curvature: Tensor, target: Tensor) -> Tensor:
        """By ``x = r - A_S q`` with ``(J^-1 / sigma + A_S' D A_S) q = A_S' D r``."""
        blocks = jacobian.blocks
        system = self._gram.of(blocks, curvature)
        add_to_blocks(system, jacobian.inverse() / sigma)
        right = self._adjoint(blocks, curvature * target)
        if self.fit_intercept:
            border = self._adjoint(blocks, curvature)
            border[-1] += 1 / (sigma * self.intercept_scale)
            system = bordered(system, border)
        solution = torch.cholesky_solve(right[:, None], cholesky(system))
        coef = solution[: jacobian.units.numel()].view(*jacobian.units.shape, 1)
        image = self.map.matvec_blocks(blocks, coef)[:, 0]
        return target - image - solution[-1] if self.fit_intercept else target - image

    def _adjoint(self, blocks: Tensor, values: Tensor) -> Tensor:
        """``A_S' values``, with the intercept's entry last."""
        result = self.map.rmatvec_blocks(blocks, values[:, None]).flatten()
        return torch.cat([result, values.sum()[None]]) if self.fit_intercept else result

    def _in_samples(self, jacobian: ProxJacobian, sigma: float, curvature: Tensor, target: Tensor) -> Tensor:
        """By ``x = r - sigma K h z`` with ``(I + sigma h K h) z = h r``, ``h = sqrt(D)``, ``K = A J A' + s 1 1'``."""
        kernel, root = mirrored(self.map.kernel(*jacobian)), curvature.sqrt()
        kernel += self.intercept_scale
        system = kernel * (sigma * root[:, None]) * root
        system.diagonal().add_(1.0)
        solution = torch.cholesky_solve((root * target)[:, None], cholesky(system))[:, 0]
        return target - sigma * (kernel @ (root * solution))


class System(NamedTuple):
    r"""System of a Newton step on a loss plus a smoothed penalty.

    With the Hessian ``H`` of the mean loss in predictions and one positive definite matrix per block, ``M``, it is

    .. math:: (M + A^\top H A) \, q + A^\top H 1 \, b = g, \qquad 1^\top H (A q + 1 b) = g_0

    for a move ``q`` of the coefficients and one ``b`` of the intercepts, where there are any.
    """

    curvature: Curvature  # H
    blocks: Tensor  # M, (n_blocks, d * c, d * c), coefficients of a block in the order of memory
    scales: Tensor  # (n_blocks,), about the largest eigenvalues of M
    right: Tensor  # g, (*block_shape, d, c)
    intercept_right: Tensor  # g_0, (c,)


class Features:
    """The ``A``: columns of a program with float64 targets, less their weighted means where there is an intercept."""

    def __init__(self, program: Program) -> None:
        self.map, self.fit_intercept = program.map, program.fit_intercept
        self._shape = program.map.feature_shape
        self._blocks = torch.arange(math.prod(self._shape[:-1]), device=program.y.device)
        self.means = program.block_means
        self._gram = SupportGram(program.map, self.means)

    def forward(self, coef: Tensor) -> Tensor:
        """Predictions ``(N, c)`` of coefficients ``(*block_shape, d, c)``."""
        pred = self.map.matvec(coef)
        return pred if self.means is None else pred - self.means.flatten() @ coef.reshape(-1, coef.shape[-1])

    def adjoint(self, values: Tensor) -> Tensor:
        """Its adjoint."""
        result = self.map.rmatvec(values)
        return result if self.means is None else result - self.means.reshape(*self._shape, 1) * values.sum(0)

    def bordered_gram(self, weight: Tensor) -> Tensor:
        """Weighted products of all columns and, last, of ones, where there is an intercept."""
        gram = self._gram.of(self._blocks, weight, copy=False)
        if not self.fit_intercept:
            return gram
        return bordered(gram, torch.cat([self.adjoint(weight[:, None]).flatten(), weight.sum()[None]]))

    def kernel(self, blocks: Tensor) -> Tensor:
        """``A M A'`` of a symmetric matrix ``(n_blocks, d, c, d, c)``, shape ``(N, c, N, c)``."""
        n_samples, d, n_outputs = self.map.n_samples, *blocks.shape[1:3]
        result = blocks.new_zeros((n_samples, n_outputs, n_samples, n_outputs))
        for some in row_chunks(len(blocks), n_samples * d, blocks.device):
            columns = self.map.columns(self._blocks[some]).to(blocks)
            columns = columns if self.means is None else columns - self.means[some]
            for other, k in combinations_with_replacement(range(n_outputs), 2):
                weighted = torch.einsum("ibd,bde->ibe", columns, blocks[some, :, k, :, other])
                result[:, k, :, other] += weighted.flatten(1) @ columns.flatten(1).T
        for other, k in combinations(range(n_outputs), 2):
            result[:, other, :, k] = result[:, k, :, other].T
        return result


def newton_work(program: Program) -> float:
    """Floating-point operations of one step's systems, roughly."""
    return min(_works(program))


def _works(program: Program) -> tuple[float, float]:
    """The same in the features and in the samples."""
    n_samples, n_features, c = program.map.n_samples, math.prod(program.map.feature_shape), program.y.shape[1]
    n_parts = program.n_parts
    c //= n_parts  # outputs of each system
    n_products = c * (c + 1) / 2
    n_grams = c if program.loss.output_separable else n_products
    in_features = n_grams * n_samples * n_features**2 + (n_features * c) ** 3 / 3
    inverses = n_features * c * (program.coef_shape[-2] * c) ** 2
    in_samples = 2 * n_products * n_samples**2 * n_features + inverses + float(n_samples * c) ** 3
    return n_parts * in_features, n_parts * in_samples


def solved(program: Program, features: Features, system: System) -> tuple[Tensor, Tensor]:
    """The moves ``q`` and ``b``, in the features or in the samples, whichever costs less."""
    in_features, in_samples = _works(program)
    return (solved_in_samples if in_samples < in_features else solved_in_features)(features, system)


def solved_in_features(features: Features, system: System) -> tuple[Tensor, Tensor]:
    """As `solved`, by a Cholesky factor of the side of all features, intercepts and outputs."""
    right, size = system.right, system.right.numel()
    matrix = _loss_hessian(features, system)
    add_to_blocks(matrix[:size, :size], system.blocks)
    # Scaled to a diagonal of one; the loss may not depend on all intercepts.
    scale = matrix.diagonal().sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    matrix /= scale[:, None]
    matrix /= scale
    matrix.diagonal()[size:] += 2**12 * EPS
    target = torch.cat([right.flatten(), system.intercept_right])[: len(scale)]  # all, or without the intercepts
    solution = torch.cholesky_solve((target / scale)[:, None], cholesky(matrix))[:, 0] / scale
    intercept = solution[size:] if features.fit_intercept else torch.zeros_like(system.intercept_right)
    return solution[:size].reshape(right.shape), intercept


def _loss_hessian(features: Features, system: System) -> Tensor:
    """Hessian of the mean loss in coefficients and intercepts, outputs innermost; a new tensor."""
    n_outputs = len(system.intercept_right)
    n_rows = system.right.numel() // n_outputs + features.fit_intercept
    result = system.right.new_zeros((n_rows, n_outputs, n_rows, n_outputs))
    if system.curvature.diagonal_is_all:
        for k, weight in enumerate(system.curvature.diagonal().T):
            result[:, k, :, k] = features.bordered_gram(weight)
    else:
        for k, column in enumerate(system.curvature.columns()):
            for other in range(k + 1):
                result[:, k, :, other] = result[:, other, :, k] = features.bordered_gram(column[:, other])
    return result.view(n_rows * n_outputs, -1)


def solved_in_samples(features: Features, system: System) -> tuple[Tensor, Tensor]:
    """As `solved`, by a factor of the side of all samples and outputs, with ``M`` raised a little and then refined.

    Slopes ``w = H (A q + 1 b)`` have ``(I + H K) w = H (A M^-1 g + 1 b)`` with ``K = A M^-1 A'``, and ``1' w = g_0``.
    """
    hessian = features.map.gathered(system.curvature.matrices())  # (N, c, c)
    solve = _solver_in_samples(features, system, hessian)
    move, intercept = solve(system.right, system.intercept_right)
    for _ in range(2):  # cancellation leaves few digits where M is small
        slopes = (hessian @ (features.forward(move) + intercept)[..., None])[..., 0]
        left = (system.blocks @ move.reshape(*system.blocks.shape[:2], 1)).reshape(move.shape)
        rest = system.right - left - features.adjoint(slopes)
        more, more_intercept = solve(rest, system.intercept_right - slopes.sum(0))
        move, intercept = move + more, intercept + more_intercept
    return move, intercept


def _solver_in_samples(features: Features, system: System, hessian: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """Function from right sides to moves, up to rounding and what ``M`` is raised by."""
    d, n_outputs = system.right.shape[-2:]
    raised = system.blocks.clone()
    raised.diagonal(dim1=1, dim2=2).add_(math.sqrt(EPS) * system.scales[:, None])
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(raised))
    kernel = features.kernel(inverse.view(-1, d, n_outputs, d, n_outputs))
    matrix = torch.einsum("ikl,iljm->ikjm", hessian, kernel).reshape(len(hessian) * n_outputs, -1)
    matrix.diagonal().add_(1.0)
    factor = torch.linalg.lu_factor_ex(matrix)[:2]  # where it is singular but for rounding the moves are not finite
    # H 1, a column per intercept
    responses = torch.linalg.lu_solve(*factor, hessian.reshape(-1, n_outputs)).view(hessian.shape)
    border = responses.sum(0)
    border.diagonal().add_(2**12 * EPS * hessian.diagonal(dim1=1, dim2=2).sum(0).max())

    def scaled(coef: Tensor) -> Tensor:
        return (inverse @ coef.reshape(*inverse.shape[:2], 1)).reshape(coef.shape)

    def solve(right: Tensor, intercept_right: Tensor) -> tuple[Tensor, Tensor]:
        start = (hessian @ features.forward(scaled(right))[..., None]).reshape(-1, 1)
        slopes = torch.linalg.lu_solve(*factor, start).view(len(hessian), n_outputs)
        intercept = torch.zeros_like(intercept_right)
        if features.fit_intercept:
            intercept = torch.linalg.solve(border, intercept_right - slopes.sum(0))
            slopes = slopes + responses @ intercept
        return scaled(right - features.adjoint(slopes)), intercept

    return solve

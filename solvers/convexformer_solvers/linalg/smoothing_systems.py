r"""Newton systems of a loss plus a smoothed penalty, solved in the features or in the samples.

With the Hessian ``H`` of the mean loss in predictions and one positive definite matrix per block, ``M``, each is

.. math:: (M + A^\top H A) \, q + A^\top H 1 \, b = g, \qquad 1^\top H (A q + 1 b) = g_0

for a move ``q`` of the coefficients and one ``b`` of the intercepts, where there are any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.program import Program

from .cholesky import cholesky
from .gram import SupportGram, add_to_blocks, bordered
from .hessian import Curvature

# What is added to the diagonal of intercepts, in its units: there are some that the loss does not feel.
_RIDGE = 1e-12
# Steps that give solutions in the samples their digits.
_REFINEMENTS = 2
# What is added in the samples to the blocks' diagonals, over their scales: inverses of less would hide all else.
_BLOCK_RIDGE = 1e-7
# Work of the inverse of a block, over the cube of its side: small matrices take long for what they are.
_WORK_OF_AN_INVERSE = 8.0
# Numbers of the columns that are read at once.
_CHUNK = 2**22


class System(NamedTuple):
    """One system.

    Attributes
    ----------
    curvature : Curvature
        The ``H``.
    blocks : Tensor of shape (n_blocks, d * c, d * c)
        The ``M``, coefficients of a block in the order of memory.
    scales : Tensor of shape (n_blocks,)
        Curvature of the penalty across the coefficients of each block, from which that along them may be far below.
    right : Tensor of shape (*block_shape, d, c)
        The ``g``.
    intercept_right : Tensor of shape (c,)
        The ``g_0``; of no meaning where there is no intercept.
    """

    curvature: Curvature
    blocks: Tensor
    scales: Tensor
    right: Tensor
    intercept_right: Tensor


class Features:
    """The ``A``: a program's columns, less their weighted means where there is an intercept that makes up for them.

    Parameters
    ----------
    program : Program
        The program, with float64 targets.
    """

    def __init__(self, program: Program) -> None:
        self.map, self.fit_intercept = program.map, program.fit_intercept
        self._shape = program.map.feature_shape
        self._blocks = torch.arange(math.prod(self._shape[:-1]), device=program.y.device)
        self.means: Tensor | None = None  # (n_blocks, d)
        if program.fit_intercept:
            self.means = program.map.rmatvec(program.weight[:, None]).reshape(-1, self._shape[-1])
        self._gram = SupportGram(program.map, self.means)

    def forward(self, coef: Tensor) -> Tensor:
        """Predictions ``(N, c)`` of coefficients ``(*block_shape, d, c)``."""
        pred = self.map.matvec(coef)
        if self.means is None:
            return pred
        return pred - self.means.flatten() @ coef.reshape(-1, coef.shape[-1])

    def adjoint(self, values: Tensor) -> Tensor:
        """Its adjoint."""
        result = self.map.rmatvec(values)
        if self.means is None:
            return result
        return result - self.means.reshape(*self._shape, 1) * values.sum(0)

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
        for some in self._blocks.split(max(1, _CHUNK // (n_samples * d))):
            columns = self.map.columns(some).to(blocks)
            if self.means is not None:
                columns = columns - self.means[some]
            for k in range(n_outputs):
                for other in range(k + 1):
                    weighted = torch.einsum("ibd,bde->ibe", columns, blocks[some, :, k, :, other])
                    result[:, k, :, other] += weighted.flatten(1) @ columns.flatten(1).T
        for k in range(n_outputs):
            for other in range(k):
                result[:, other, :, k] = result[:, k, :, other].T
        return result


def newton_work(program: Program) -> float:
    """Floating-point operations of one step's systems, roughly."""
    return min(_work_in_features(program), _work_in_samples(program))


def block_numbers(program: Program) -> int:
    """Numbers that the blocks of ``M`` hold, of outputs that are solved together."""
    outputs = 1 if program.outputs_separate else program.y.shape[1]
    return math.prod(program.map.feature_shape) * outputs * program.map.feature_shape[-1] * outputs


def solved(program: Program, features: Features, system: System) -> tuple[Tensor, Tensor]:
    """The moves of coefficients and intercepts, in the features or in the samples, whichever costs less.

    Parameters
    ----------
    program : Program
        The program.
    features : Features
        Its columns.
    system : System
        The system.

    Returns
    -------
    tuple of Tensor
        The ``q`` and ``b``.
    """
    in_samples = _work_in_samples(program) < _work_in_features(program)
    return (solved_in_samples if in_samples else solved_in_features)(features, system)


def _sizes(program: Program) -> tuple[float, float, int, int]:
    """Samples, features, outputs that are solved together, and how many times that is done."""
    n_outputs = program.y.shape[1]
    n_parts = n_outputs if program.outputs_separate else 1
    return float(program.map.n_samples), float(math.prod(program.map.feature_shape)), n_outputs // n_parts, n_parts


def _work_in_features(program: Program) -> float:
    n_samples, n_features, n_outputs, n_parts = _sizes(program)
    n_grams = n_outputs if program.loss.output_separable else n_outputs * (n_outputs + 1) / 2
    return n_parts * (n_grams * n_samples * n_features**2 + (n_features * n_outputs) ** 3 / 3)


def _work_in_samples(program: Program) -> float:
    n_samples, n_features, n_outputs, n_parts = _sizes(program)
    n_kernels = n_outputs * (n_outputs + 1) / 2
    inverses = _WORK_OF_AN_INVERSE * n_features * n_outputs * (program.coef_shape[-2] * n_outputs) ** 2
    return n_parts * (2 * n_kernels * n_samples**2 * n_features + inverses + (n_samples * n_outputs) ** 3)


def solved_in_features(features: Features, system: System) -> tuple[Tensor, Tensor]:
    """As `solved`, by a Cholesky factor of the side of all features, intercepts and outputs."""
    right, size = system.right, system.right.numel()
    matrix = _loss_hessian(features, system)
    add_to_blocks(matrix[:size, :size], system.blocks)
    # In units in which the diagonal is one rounding is the same for all, and so is what intercepts are given.
    scale = matrix.diagonal().sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    matrix /= scale[:, None]
    matrix /= scale
    matrix.diagonal()[size:] += _RIDGE
    target = right.flatten()
    if features.fit_intercept:
        target = torch.cat([target, system.intercept_right])
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
    solve = _solver_in_samples(features, system)
    move, intercept = solve(system.right, system.intercept_right)
    hessian = system.curvature.matrices()
    for _ in range(_REFINEMENTS):  # cancellation leaves few digits where M is small
        slopes = (hessian @ (features.forward(move) + intercept)[..., None])[..., 0]
        left = (system.blocks @ move.reshape(*system.blocks.shape[:2], 1)).reshape(move.shape)
        rest = system.right - left - features.adjoint(slopes)
        more, more_intercept = solve(rest, system.intercept_right - slopes.sum(0))
        move, intercept = move + more, intercept + more_intercept
    return move, intercept


def _solver_in_samples(features: Features, system: System) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Function that gives the moves of right sides, but for what ``M`` is raised by and rounding."""
    d, n_outputs = system.right.shape[-2:]
    inverse = _raised_inverses(system)

    def scaled(coef: Tensor) -> Tensor:
        return (inverse @ coef.reshape(*inverse.shape[:2], 1)).reshape(coef.shape)

    hessian = system.curvature.matrices()  # (N, c, c)
    kernel = features.kernel(inverse.view(-1, d, n_outputs, d, n_outputs))
    matrix = torch.einsum("ikl,iljm->ikjm", hessian, kernel).reshape(len(hessian) * n_outputs, -1)
    matrix.diagonal().add_(1.0)
    factor, pivots = torch.linalg.lu_factor(matrix)
    # H 1, a column per intercept
    responses = torch.linalg.lu_solve(factor, pivots, hessian.reshape(-1, n_outputs)).view(hessian.shape)
    border = responses.sum(0)
    border.diagonal().add_(_RIDGE * hessian.diagonal(dim1=1, dim2=2).sum(0).max())

    def solve(right: Tensor, intercept_right: Tensor) -> tuple[Tensor, Tensor]:
        start = (hessian @ features.forward(scaled(right))[..., None]).reshape(-1, 1)
        slopes = torch.linalg.lu_solve(factor, pivots, start).view(len(hessian), n_outputs)
        intercept = torch.zeros_like(intercept_right)
        if features.fit_intercept:
            intercept = torch.linalg.solve(border, intercept_right - slopes.sum(0))
            slopes = slopes + responses @ intercept
        return scaled(right - features.adjoint(slopes)), intercept

    return solve


def _raised_inverses(system: System) -> Tensor:
    """Inverses of the blocks of ``M``."""
    raised = system.blocks.clone()
    raised.diagonal(dim1=1, dim2=2).add_(_BLOCK_RIDGE * system.scales[:, None])
    return torch.cholesky_inverse(torch.linalg.cholesky(raised))

"""Programs on some of the blocks of a larger one, and what their iterates mean for all samples."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from convexformer_solvers.algorithms.primal_dual import Iterate
from convexformer_solvers.linalg.cholesky import CholeskySolver, cholesky
from convexformer_solvers.linalg.gram import SupportGram, select_blocks
from convexformer_solvers.linear_maps.dense import DenseMap
from convexformer_solvers.program import Program


class Part:
    """A program equivalent to a larger one with all other blocks at zero; on the same samples, unless a subclass says.

    Parameters
    ----------
    whole : Program
        The larger program.
    blocks : Tensor of shape (m,)
        Blocks of the part, as increasing positions in the flattened block axes.

    Attributes
    ----------
    program : Program
        Blocks ``(m, d)``.
    """

    program: Program

    def __init__(self, whole: Program, blocks: Tensor) -> None:
        self.whole, self.blocks = whole, blocks

    def pred_of(self, iterate: Iterate) -> Tensor:
        """Predictions of the part's samples whose dual point has the correlation of an iterate of the whole."""
        return iterate.pred

    def iterate_of(self, iterate: Iterate) -> Iterate:
        """The iterate of the whole that one of the part stands for; the correlation of others is zero."""
        return iterate._replace(
            program=self.whole, coef=self.on_all(iterate.coef), correlation=self.on_all(iterate.correlation)
        )

    def on_blocks(self, coef: Tensor) -> Tensor:
        """The blocks of an array of coefficients of the whole."""
        return coef.reshape(-1, *coef.shape[-2:])[self.blocks]

    def on_all(self, coef: Tensor) -> Tensor:
        """Coefficients of the whole, zero elsewhere."""
        result = coef.new_zeros(self.whole.coef_shape)
        result.view(-1, *coef.shape[-2:])[self.blocks] = coef
        return result


class WholePart(Part):
    """All blocks; coefficients keep their shape."""

    def __init__(self, whole: Program) -> None:
        n_blocks = math.prod(whole.coef_shape[:-2])
        super().__init__(whole, torch.arange(n_blocks, device=whole.y.device))
        self.program = whole

    def on_blocks(self, coef: Tensor) -> Tensor:
        return coef

    def on_all(self, coef: Tensor) -> Tensor:
        return coef


class RestrictedPart(Part):
    """The same samples, with the map of the blocks alone, for any loss."""

    def __init__(self, whole: Program, blocks: Tensor) -> None:
        super().__init__(whole, blocks)
        self.program = dataclasses.replace(whole, map=whole.map.restricted(blocks))


class CompressedPart(Part):
    r"""One sample more than features, for the squared loss and fewer features than samples.

    With the weighted and centred Gram matrix of the blocks, ``G = R'R``, and their products with the targets ``q``,
    the loss is :math:`\frac12 \|R z - R^{-\top} q\|^2` plus a constant: ``R`` takes the place of the data. One more
    sample, which no feature reaches, holds the constant, so that all values are those of the whole program. The
    intercept is gone with the means. Nothing grows with the number of samples but the work for ``G``.
    """

    def __init__(self, whole: Program, blocks: Tensor, gram: SupportGram) -> None:
        super().__init__(whole, blocks)
        matrix, weight = gram.of(blocks, whole.weight), whole.weight[:, None]
        self._mean = whole.weight @ whole.y * whole.fit_intercept
        self._column_means = torch.zeros_like(matrix[0])
        if whole.fit_intercept:
            self._column_means = whole.map.rmatvec_blocks(blocks, weight).flatten()
            matrix -= self._column_means[:, None] * self._column_means
        targets = whole.y - self._mean
        self._root = CholeskySolver(cholesky(matrix).T)  # R' R
        self._scale = math.sqrt(len(matrix) + 1)  # the program of the part averages over its samples
        pulled = self._to_samples(whole.map.rmatvec_blocks(blocks, weight * targets))
        unexplained = whole.weight @ targets.square() - (pulled / self._scale).square().sum(0)
        constant = self._scale * unexplained.clamp(min=0).sqrt()
        data = torch.cat([self._scale * self._root.upper, torch.zeros_like(matrix[:1])])
        small_map = _RootMap(data.view(len(data), len(blocks), -1), matrix)
        y = torch.cat([pulled, constant[None]])
        self.program = dataclasses.replace(whole, map=small_map, y=y, sample_weight=None, fit_intercept=False)

    def _to_samples(self, correlation: Tensor) -> Tensor:
        """Values of the samples behind features, whose adjoint is given as ``(m, d, c)``."""
        flat = correlation.reshape(-1, correlation.shape[-1])
        return self._scale * self._root.solve_lower(flat)

    def pred_of(self, iterate: Iterate) -> Tensor:
        theta = self._to_samples(self.on_blocks(iterate.correlation))
        return torch.cat([self.program.y[:-1] - theta, torch.zeros_like(theta[:1])])

    def iterate_of(self, iterate: Iterate) -> Iterate:
        behind = self._root.solve_upper(iterate.pred[:-1] / self._scale)
        both = torch.cat([iterate.coef, behind.view_as(iterate.coef)], dim=-1)
        pred = self.whole.map.matvec_blocks(self.blocks, both)
        pred = pred + (self._mean.repeat(2) - self._column_means @ both.flatten(0, 1))
        fitted, pred = pred.tensor_split(2, dim=1)
        return Iterate(self.whole, self.on_all(iterate.coef), fitted, pred, self.on_all(iterate.correlation))


class _RootMap(DenseMap):
    """Map of a triangular root, whose Gram matrix under the mean over its rows is known."""

    rows_are_samples = False

    def __init__(self, data: Tensor, gram: Tensor) -> None:
        super().__init__(data)
        self._known_gram = gram

    def gram(self, left: Tensor, right: Tensor, weight: Tensor, center: Tensor | None = None) -> Tensor:
        if center is not None or bool((weight != weight[0]).any()):
            return super().gram(left, right, weight, center)
        chosen = select_blocks(self._known_gram, left, right, self.feature_shape[-1])
        return chosen.mul_(weight[0] * self.n_samples)


def largest_dual_norms(program: Program, coef: Tensor) -> Tensor:
    """Largest dual norm of each block's groups, shape ``(n_blocks,)``."""
    norms = program.penalty.group_dual_norms(coef.reshape(-1, *coef.shape[-2:]))
    return norms.amax(-1) if program.penalty.output_separable else norms

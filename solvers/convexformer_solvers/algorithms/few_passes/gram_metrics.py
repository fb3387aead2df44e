"""Metrics of Gram matrices of all features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from convexformer_solvers.linear_maps.base import LinearMap, even_rows
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.moments import lost_to_means
from convexformer_solvers.rounding import EPS, SUM

from .batched import Batched
from .metric import Metric, Metrics, Part, in_single, one_by_one
from .model import Gram


@dataclass(frozen=True)
class GramMetrics(Metrics):
    """Gram matrices, of evenly spaced samples. Those of all outputs take one pass over these.

    Parameters
    ----------
    solver : Batched
        What minimises the models: programs of the squared loss over a map in memory.
    sample : int, default=20
        Samples of which the Gram matrix is formed, over the number of features; of all, if these are fewer.
    """

    joins_outputs: ClassVar[bool] = True
    solver: Batched
    sample: int = 20
    name = property(lambda self: self.solver.solver.name)

    def of(self, program: Program, local: Tensor, span: Tensor | None = None) -> Metric:
        linear_map, weight = program.map, program.weight[:, None] * local
        n_wanted = self.sample * math.prod(linear_map.feature_shape)
        if n_wanted < linear_map.n_samples:
            index = even_rows(linear_map.n_samples, n_wanted, local.device)
            linear_map, weight = linear_map.rows(index), weight[index] / program.weight[index].sum()
        gram, sums, totals, center = _moments(linear_map, weight, program.fit_intercept)
        joint = len(gram) > 1 and not program.loss.output_separable
        places = _pairs(program.y.shape[1] if joint else 1, local.device)
        parts = one_by_one(1 if joint else len(gram))
        each = ((rows, gram[rows][places], sums[rows][places], totals[rows][places]) for rows in parts)
        return Metric(local, tuple(_part(program, self.solver, center, *own) for own in each))


def _pairs(k: int, device: torch.device) -> Tensor:
    """Position, among those of two outputs in the order of rows, of each pair of k outputs, shape ``(k, k)``."""
    result, (i, j) = torch.empty((k, k), dtype=torch.int64, device=device), torch.triu_indices(k, k, device=device)
    result[i, j] = result[j, i] = torch.arange(len(i), device=device)
    return result


def _moments(linear_map: LinearMap, weight: Tensor, free: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gram matrices ``(m, p, p)``, sums of the features ``(m, p)`` and of the weights in each column of ``(N, m)``.

    Gram matrices are of the features less the last part, of shape ``(p,)``: zeros, or the means of the first column
    where these are so large that what a `free` intercept leaves of squares has lost more than half of its digits.
    """
    ones, single, totals = torch.ones_like(weight[:, :1]), linear_map.dtype == torch.float32, weight.sum(0)
    gram, sums = linear_map.moments(weight, ones, single)
    if single:
        in_range = all(in_single(each.diagonal().abs()) for each in gram)
        if not in_range or lost_to_means(*_squares(gram, sums, totals), torch.finfo(torch.float32).eps):
            gram, sums = linear_map.moments(weight, ones)
    squares, centered = _squares(gram, sums, totals)
    genuine = torch.where(centered > SUM * squares, squares, 0.0)  # the rest is constant but for rounding
    if not (free and lost_to_means(genuine, centered, EPS)):
        return gram, sums[..., 0], totals, torch.zeros_like(sums[0, :, 0])
    center = sums[0, :, 0] / totals[0]
    of_blocks = center.view(-1, linear_map.feature_shape[-1])
    gram = torch.stack([linear_map.full_gram(column, of_blocks) for column in weight.T])
    return gram, sums[..., 0], totals, center


def _squares(gram: Tensor, sums: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sums of squares of the features, times those of the weights, and what is left of them about means."""
    squares = gram.diagonal(dim1=1, dim2=2).abs() * totals[:, None].abs()
    return squares, squares - sums[..., 0].square()


def _part(
    program: Program, solver: Batched, center: Tensor, outputs: slice, gram: Tensor, cross: Tensor, core: Tensor
) -> Part:
    """The part of k outputs, of the moments of each pair of them: ``(k, k, p, p)``, ``(k, k, p)`` and ``(k, k)``.

    Gram matrices are of the features less a center ``(p,)``, sums of the features.
    """
    (*blocks, width), k, core = program.map.feature_shape, len(core), core * program.fit_intercept
    n_blocks = math.prod(blocks)
    # The features of an output's block stand side by side.
    about = cross - core[..., None] * center
    cross, about = (
        torch.einsum("ijbd->bidj", each.view(k, k, n_blocks, width)).reshape(-1, k) for each in (cross, about)
    )
    by_block = gram.view(k, k, n_blocks, width, n_blocks, width)
    gram = torch.einsum("ijbdae->bidaje", by_block).reshape(len(cross), -1)
    inverse = torch.linalg.pinv(core, hermitian=True)
    shape = (*blocks, k, width) if k > 1 else (*blocks, width)
    matrix = Gram(gram - about @ inverse @ about.T, shape, solver)
    return Part(outputs, k > 1, shape, matrix, cross, core, inverse)

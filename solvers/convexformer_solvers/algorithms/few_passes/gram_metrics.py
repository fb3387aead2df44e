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
        gram, sums, totals = _moments(linear_map, weight)
        joint = len(gram) > 1 and not program.loss.output_separable
        places = _pairs(program.y.shape[1] if joint else 1, local.device)
        parts = one_by_one(1 if joint else len(gram))
        each = ((rows, gram[rows][places], sums[rows][places], totals[rows][places]) for rows in parts)
        return Metric(local, tuple(_part(program, self.solver, *own) for own in each))


def _pairs(k: int, device: torch.device) -> Tensor:
    """Position, among those of two outputs in the order of rows, of each pair of k outputs, shape ``(k, k)``."""
    result, (i, j) = torch.empty((k, k), dtype=torch.int64, device=device), torch.triu_indices(k, k, device=device)
    result[i, j] = result[j, i] = torch.arange(len(i), device=device)
    return result


def _moments(linear_map: LinearMap, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gram matrices ``(m, p, p)``, sums of the features ``(m, p)`` and of the weights in each column of ``(N, m)``."""
    ones, single, totals = torch.ones_like(weight[:, :1]), linear_map.dtype == torch.float32, weight.sum(0)
    gram, sums = linear_map.moments(weight, ones, single)
    found = zip(gram, sums[..., 0], totals, strict=True)
    if single and any(_loses_digits(each.diagonal().abs(), own, float(total.abs())) for each, own, total in found):
        gram, sums = linear_map.moments(weight, ones)
    return gram, sums[..., 0], totals


def _loses_digits(squares: Tensor, sums: Tensor, total: float) -> bool:
    """Whether weighted sums of squares overflow or underflow in float32, or lose their digits to large means."""
    if not in_single(squares):
        return True
    return lost_to_means(squares * total, squares * total - sums.square(), torch.finfo(torch.float32).eps)


def _part(program: Program, solver: Batched, outputs: slice, gram: Tensor, cross: Tensor, core: Tensor) -> Part:
    """The part of k outputs, of the moments of each pair of them: ``(k, k, p, p)``, ``(k, k, p)`` and ``(k, k)``."""
    (*blocks, width), k, core = program.map.feature_shape, len(core), core * program.fit_intercept
    n_blocks = math.prod(blocks)
    # The features of an output's block stand side by side.
    cross = torch.einsum("ijbd->bidj", cross.view(k, k, n_blocks, width)).reshape(-1, k)
    by_block = gram.view(k, k, n_blocks, width, n_blocks, width)
    gram = torch.einsum("ijbdae->bidaje", by_block).reshape(len(cross), -1)
    inverse = torch.linalg.pinv(core, hermitian=True)
    shape = (*blocks, k, width) if k > 1 else (*blocks, width)
    matrix = Gram(gram - cross @ inverse @ cross.T, shape, solver)
    return Part(outputs, k > 1, shape, matrix, cross, core, inverse)

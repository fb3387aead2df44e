"""Metrics of variable-metric steps: Gram matrices of all features, or a few of their directions, without intercept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.linear_maps.base import LinearMap, even_rows
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.moments import lost_to_means

from .batched import Batched
from .low_rank import LowRank
from .model import Gram


class Part(NamedTuple):
    """Metric of some outputs, with the intercept eliminated.

    Coefficients are a matrix ``(p, k)`` of k outputs with one Gram matrix, or a vector where outputs are coupled.
    """

    outputs: slice
    joint: bool  # whether the outputs are coupled
    feature_shape: tuple[int, ...]  # of a column of coefficients: (*block_shape, d), or (*block_shape, c, d)
    matrix: Gram | LowRank  # (p, p) or (c p, c p)
    cross: Tensor  # of the features with the intercepts, (p, 1) or (c p, c)
    core: Tensor  # of the intercepts, (1, 1) or (c, c); zeros without an intercept
    inverse: Tensor  # its pseudo-inverse

    def flat(self, coef: Tensor) -> Tensor:
        """The outputs' coefficients as a matrix or a vector."""
        chosen = coef[..., self.outputs]
        return chosen.movedim(-1, -2).reshape(-1, 1) if self.joint else chosen.flatten(0, -2)

    def shaped(self, flat: Tensor, like: Tensor) -> Tensor:
        """The outputs' coefficients of a matrix or a vector, in the shape of `like`."""
        *blocks, width, k = like[..., self.outputs].shape
        return flat.view(*blocks, k, width).movedim(-1, -2) if self.joint else flat.view(*blocks, width, k)

    def of_intercept(self, values: Tensor) -> Tensor:
        """Values of the outputs, as many rows as the intercepts have in the metric."""
        return values[self.outputs].view(self.core.shape[0], -1)

    def square(self, coef: Tensor, intercept: Tensor) -> float:
        """Squared norm of a move."""
        flat = self.flat(coef)
        rest = self.of_intercept(intercept) + self.inverse @ self.cross.T @ flat
        return float((flat * self.matrix.product(flat)).sum() + (rest * (self.core @ rest)).sum())


class Metric(NamedTuple):
    """Where outputs are penalised apart, each has its own part."""

    local: Tensor  # second derivatives of each sample's loss that it is made of
    parts: tuple[Part, ...]

    def reduced(self, correlation: Tensor, slope: Tensor) -> Tensor:
        """Correlation of a dual point whose sum `slope` has been taken from the samples in proportion to `local`."""
        moved = (part.cross @ part.inverse @ part.of_intercept(slope) for part in self.parts)
        shaped = [part.shaped(each, correlation) for part, each in zip(self.parts, moved, strict=True)]
        return correlation - torch.cat(shaped, dim=-1)

    def square(self, coef: Tensor, intercept: Tensor) -> float:
        """Squared norm of a move."""
        return sum(part.square(coef, intercept) for part in self.parts)


class _Moments(NamedTuple):
    """Moments of the features in some weights."""

    gram: Tensor  # (p, p)
    sums: Tensor  # (p,)
    total: Tensor  # of the weights


def metric_of(program: Program, local: Tensor, sample: int, solver: Batched) -> Metric:
    """The metric of curvatures ``(N, n)``, of all outputs, of each or of pairs of them.

    Its Gram matrices are of evenly spaced samples, `sample` times as many as features. Each costs a pass over these.
    """
    linear_map, weight = program.map, program.weight[:, None] * local
    n_wanted = sample * math.prod(linear_map.feature_shape)
    if n_wanted < linear_map.n_samples:
        index = even_rows(linear_map.n_samples, n_wanted, local.device)
        linear_map, weight = linear_map.rows(index), weight[index] / program.weight[index].sum()
    moments, n = [_moments(linear_map, each) for each in weight.T], local.shape[1]
    if n == 1 or program.loss.output_separable:
        outputs = [slice(None)] if n == 1 else [slice(place, place + 1) for place in range(n)]
        parts = [_part(program, [each], 1, of, solver) for each, of in zip(moments, outputs, strict=True)]
    else:
        parts = [_part(program, moments, program.y.shape[1], slice(None), solver)]
    return Metric(local, tuple(parts))


@dataclasses.dataclass(frozen=True)
class _CurvatureSlopes:
    """Weighted second derivatives of each sample's loss times predictions of c outputs, and by themselves."""

    local: Tensor  # (N, n), as in ``Metric``
    weight: Tensor  # (N,)
    c: int

    def matrices(self) -> Tensor:
        """Second derivatives between the outputs times the weights, ``(N, c, c)``."""
        weighted, c = self.weight[:, None] * self.local, self.c
        if weighted.shape[1] == c:
            return torch.diag_embed(weighted)
        result = weighted.new_empty((len(weighted), c, c))
        for place, (i, j) in enumerate(combinations_with_replacement(range(c), 2)):
            result[:, i, j] = result[:, j, i] = weighted[:, place]
        return result

    def at(self, pred: Tensor) -> Tensor:
        """Values ``(N, c r + c c)`` of predictions ``(N, c r)``."""
        matrices = self.matrices()
        return torch.cat([(matrices @ pred.reshape(len(pred), self.c, -1)).flatten(1), matrices.flatten(1)], dim=1)

    def rows(self, index: Tensor | slice) -> _CurvatureSlopes:
        """Those of some samples."""
        return dataclasses.replace(self, local=self.local[index], weight=self.weight[index])

    def to(self, device: torch.device) -> _CurvatureSlopes:
        """The same on another device."""
        return dataclasses.replace(self, local=self.local.to(device), weight=self.weight.to(device))


def low_rank_metric_of(program: Program, local: Tensor, rank: int) -> Metric:
    """The metric of curvatures ``(N, n)`` from the products of its Gram matrix with random directions.

    One pass over the data gives these products, as many as the rank. Outputs that differ in curvature have one matrix.
    """
    (*blocks, width), k = program.map.feature_shape, 1 if local.shape[1] == 1 else program.y.shape[1]
    shape = (*blocks, k, width) if k > 1 else (*blocks, width)
    rank = min(rank, math.prod(shape))
    normal = torch.randn((math.prod(shape), rank), generator=torch.Generator().manual_seed(0), dtype=local.dtype)
    directions = torch.linalg.qr(normal.to(local.device)).Q
    coef = directions.reshape(-1, k, width, rank).transpose(1, 2).reshape(*blocks, width, k * rank)
    back = program.map.slopes_pass(coef, _CurvatureSlopes(local, program.weight, k))[1]
    parts = (part.reshape(-1, width, k, part.shape[-1] // k) for part in back.split([k * rank, k * k], dim=-1))
    product, cross = (part.transpose(1, 2).reshape(len(directions), -1) for part in parts)
    total = _CurvatureSlopes((program.weight @ local)[None], torch.ones_like(local[0, :1]), k)
    core = total.matrices()[0] * program.fit_intercept
    inverse = torch.linalg.pinv(core, hermitian=True)
    product -= cross @ inverse @ (cross.T @ directions)
    return Metric(local, (Part(slice(None), k > 1, shape, LowRank(product, directions), cross, core, inverse),))


def _moments(linear_map: LinearMap, weight: Tensor) -> _Moments:
    ones, single, weight = torch.ones_like(weight)[:, None], linear_map.dtype == torch.float32, weight.contiguous()
    gram, sums = linear_map.moments(weight, ones, single)
    if single and _loses_digits(gram.diagonal().abs(), sums[:, 0], float(weight.sum().abs())):
        gram, sums = linear_map.moments(weight, ones)
    return _Moments(gram, sums[:, 0], weight.sum())


def _loses_digits(squares: Tensor, sums: Tensor, total: float) -> bool:
    """Whether weighted sums of squares overflow or underflow in float32, or lose their digits to large means."""
    single = torch.finfo(torch.float32)
    if not single.tiny / single.eps <= float(squares.amax()) < math.inf:
        return True
    return lost_to_means(squares * total, squares * total - sums.square(), single.eps)


def _part(program: Program, moments: Sequence[_Moments], k: int, outputs: slice, solver: Batched) -> Part:
    """The part of k outputs, of the moments of each pair of them."""
    *blocks, width = program.map.feature_shape
    n_blocks, first = math.prod(blocks), moments[0].gram
    gram, cross = first.new_empty((k, k, *first.shape)), first.new_empty((k, k, len(first)))
    core = first.new_empty((k, k))
    for (i, j), of_pair in zip(combinations_with_replacement(range(k), 2), moments, strict=True):
        gram[i, j] = gram[j, i] = of_pair.gram
        cross[i, j] = cross[j, i] = of_pair.sums
        core[i, j] = core[j, i] = of_pair.total * program.fit_intercept
    # The features of an output's block stand side by side.
    cross = torch.einsum("ijbd->bidj", cross.view(k, k, n_blocks, width)).reshape(-1, k)
    by_block = gram.view(k, k, n_blocks, width, n_blocks, width)
    gram = torch.einsum("ijbdae->bidaje", by_block).reshape(len(cross), -1)
    inverse = torch.linalg.pinv(core, hermitian=True)
    shape = (*blocks, k, width) if k > 1 else (*blocks, width)
    matrix = Gram(gram - cross @ inverse @ cross.T, shape, solver)
    return Part(outputs, k > 1, shape, matrix, cross, core, inverse)

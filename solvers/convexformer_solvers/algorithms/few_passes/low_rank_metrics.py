"""Metrics of low rank, from products of Gram matrices with random directions."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from convexformer_solvers.draws import standard_normal
from convexformer_solvers.linear_maps.base import LinearMap, Slopes, even_rows
from convexformer_solvers.program import Program

from .low_rank import LowRank
from .metric import Metric, Metrics, Part, in_single, one_by_one


@dataclasses.dataclass(frozen=True)
class LowRankMetrics(Metrics):
    """Metrics of a rank plus a multiple of the identity, of all samples, where Gram matrices are too large or costly.

    Each takes a pass over the data, with as many columns of coefficients as the rank. Its directions are random at
    first, then products with the metric before, as in an iteration of subspaces. Outputs have matrices of their own, of
    the same directions. Where the loss couples outputs, the curvature of each is a bound. A matrix of all outputs would
    have the curvatures of pairs, and a lower rank in the same time.
    """

    joins_outputs: ClassVar[bool] = False
    rank: int  # that of the Gram matrix where this is smaller
    name = property(lambda self: f"rank {self.rank}")

    def of(self, program: Program, local: Tensor, span: Tensor | None = None) -> Metric:
        n_features = math.prod(program.map.feature_shape)
        span = _random(n_features, self.rank, local) if span is None else span
        directions = torch.linalg.qr(span).Q
        parts = self._parts(program, local, directions)
        if len(directions) <= self.rank:
            return Metric(local, parts)  # of all directions: there is none closer
        # Products of Gram matrices themselves would lead to larger multiples of the identity, and so to shorter steps.
        span = torch.zeros_like(directions)
        for part in parts:
            span += part.matrix.product(directions)
        return Metric(local, parts, span)

    def _parts(self, program: Program, local: Tensor, directions: Tensor) -> tuple[Part, ...]:
        """Matrices of the outputs, or one of all, from products with directions ``(p, r)``."""
        shape, n_matrices = program.map.feature_shape, local.shape[1]
        coef = directions.view(*shape, -1)
        # Large means of the features would take the digits of the products: most of them is subtracted in between.
        some = program.map.rows(even_rows(len(program.y), self.rank, coef.device))
        offset = some.matvec(coef).mean(0) * program.fit_intercept
        slopes = _CurvatureSlopes(program.weight[:, None] * local, offset)
        pred, back = _products(program.map, coef, slopes)
        core = (program.weight @ local * program.fit_intercept).view(-1, 1, 1)
        inverse = torch.linalg.pinv(core, hermitian=True)
        sums = slopes.sums(pred)[:, None]  # (m, 1, r)
        columns = back.to(local).flatten(0, -2).split([sums.numel(), n_matrices], dim=1)
        products, crosses = (each.unflatten(1, (n_matrices, -1)).unbind(1) for each in columns)

        def part(place: int, outputs: slice) -> Part:
            product, cross = products[place], crosses[place]
            rounding = torch.finfo(back.dtype).eps * float(torch.linalg.matrix_norm(product))
            matrix = LowRank(product - cross @ inverse[place] @ sums[place], directions, rounding)
            return Part(outputs, False, shape, matrix, cross, core[place], inverse[place])

        return tuple(part(place, outputs) for place, outputs in enumerate(one_by_one(n_matrices)))


def _random(n_features: int, rank: int, like: Tensor) -> Tensor:
    """Directions at random, as many as the rank or the features."""
    generator, shape = torch.Generator().manual_seed(0), (n_features, min(rank, n_features))
    return standard_normal(shape, generator, like.dtype).to(like.device)


def _products(linear_map: LinearMap, coef: Tensor, slopes: _CurvatureSlopes) -> tuple[Tensor, Tensor]:
    """Both products of a pass, in the precision of the data unless these are out of the range of its squares."""
    if linear_map.dtype == torch.float32:
        pred, back = linear_map.slopes_pass(coef.float(), slopes)
        if in_single(back[..., : coef.shape[-1]].abs()):
            return pred, back
    return linear_map.slopes_pass(coef, slopes)


@dataclasses.dataclass(frozen=True, eq=False)
class _CurvatureSlopes(Slopes):
    """Weighted second derivatives of each sample's loss, of m outputs, times predictions, and by themselves."""

    of_samples = ("weighted",)
    weighted: Tensor  # (N, m)
    offset: Tensor  # that is taken from the predictions, (r,)

    def at(self, pred: Tensor) -> Tensor:
        """Values ``(N, m r + m)`` of predictions ``(N, r)``, in their precision."""
        weighted, moved = self.weighted.to(pred.dtype), pred - self.offset.to(pred.dtype)
        return torch.cat([(weighted[:, :, None] * moved[:, None]).flatten(1), weighted], dim=1)

    def sums(self, pred: Tensor) -> Tensor:
        """Sums over the samples of the products with predictions ``(N, r)``, ``(m, r)``."""
        few = math.isqrt(len(self.offset))  # at a time, as all in another precision would take more than predictions
        parts = zip(pred.split(few, 1), self.offset.to(pred.dtype).split(few), strict=True)
        return torch.cat([self.weighted.T @ (part - mean).to(self.weighted) for part, mean in parts], dim=1)

"""Metrics of low rank, from products of Gram matrices with random directions."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from convexformer_solvers.linear_maps.base import LinearMap, Slopes, even_rows
from convexformer_solvers.program import Program

from .low_rank import LowRank
from .metric import Metric, Metrics, Part, in_single, joins_outputs, one_by_one, pairs


@dataclasses.dataclass(frozen=True)
class LowRankMetrics(Metrics):
    """Metrics of a rank plus a multiple of the identity, of all samples, where Gram matrices are too large or costly.

    Each takes a pass over the data, with as many columns of coefficients as the rank. Its directions are random at
    first, then products with the metric before, as in an iteration of subspaces. Outputs that the loss does not couple
    have matrices of their own, of the same directions.
    """

    rank: int  # that of the Gram matrix where this is smaller
    name = property(lambda self: f"rank {self.rank}")

    def of(self, program: Program, local: Tensor, span: Tensor | None = None) -> Metric:
        n_features = math.prod(program.map.feature_shape)
        n_features *= program.y.shape[1] if joins_outputs(program, local) else 1
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
        """Matrices of the outputs, apart or joint as the directions are, from products with these."""
        *blocks, width = program.map.feature_shape
        k = len(directions) // math.prod(program.map.feature_shape)
        joint, shape = k > 1, (*blocks, k, width) if k > 1 else (*blocks, width)
        coef = directions.reshape(-1, k, width, directions.shape[1]).transpose(1, 2).reshape(*blocks, width, -1)
        # Large means of the features would take the digits of the products: most of them is subtracted in between.
        some = program.map.rows(even_rows(len(program.y), self.rank, coef.device))
        offset = some.matvec(coef).mean(0).view(k, -1) * program.fit_intercept
        slopes = _CurvatureSlopes(local, program.weight, offset)
        pred, back = _products(program.map, coef, slopes)
        core = slopes.total() * program.fit_intercept  # (m, k)
        sums = slopes.sums(pred)  # (m, r)
        columns = back.to(local).reshape(-1, width, back.shape[-1]).split([sums.numel(), core.numel()], dim=-1)

        def part(rows: slice) -> Part:
            chosen = (of_rows.unflatten(-1, (len(core), -1))[..., rows, :] for of_rows in columns)
            product, cross = (each.transpose(1, 2).flatten(0, 2) for each in chosen)
            inverse = torch.linalg.pinv(core[rows], hermitian=True)
            rounding = torch.finfo(back.dtype).eps * float(torch.linalg.matrix_norm(product))
            matrix = LowRank(product - cross @ inverse @ sums[rows], directions, rounding)
            return Part(rows, joint, shape, matrix, cross, core[rows], inverse)

        return tuple(part(rows) for rows in one_by_one(1 if joint else len(core)))


def _random(n_features: int, rank: int, like: Tensor) -> Tensor:
    """Directions at random, as many as the rank or the features."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn((n_features, min(rank, n_features)), generator=generator, dtype=like.dtype).to(like.device)


def _products(linear_map: LinearMap, coef: Tensor, slopes: _CurvatureSlopes) -> tuple[Tensor, Tensor]:
    """Both products of a pass, in the precision of the data unless these are out of the range of its squares."""
    if linear_map.dtype == torch.float32:
        pred, back = linear_map.slopes_pass(coef.float(), slopes)
        if in_single(back[..., : coef.shape[-1]].abs()):
            return pred, back
    return linear_map.slopes_pass(coef, slopes)


@dataclasses.dataclass(frozen=True, eq=False)
class _CurvatureSlopes(Slopes):
    """Weighted second derivatives of each sample's loss times predictions of c outputs, and by themselves."""

    of_samples = ("local", "weight")
    local: Tensor  # (N, n), as in ``Metric``
    weight: Tensor  # (N,)
    offset: Tensor  # that is taken from the predictions, (c, r)

    def matrices(self, dtype: torch.dtype) -> Tensor:
        """Second derivatives times the weights, ``(N, m, c)``: of m outputs apart where c is one, else between c."""
        return self._as_matrices((self.weight[:, None] * self.local).to(dtype))

    def total(self) -> Tensor:
        """Sum of ``matrices`` over the samples, ``(m, c)``."""
        return self._as_matrices((self.weight @ self.local)[None])[0]

    def _as_matrices(self, weighted: Tensor) -> Tensor:
        c = len(self.offset)
        return weighted[:, :, None] if c == 1 else weighted[:, pairs(c, weighted.device)]

    def at(self, pred: Tensor) -> Tensor:
        """Values ``(N, m r + m c)`` of predictions ``(N, c r)``, in their precision."""
        matrices = self.matrices(pred.dtype)
        products = matrices @ (pred.reshape(-1, *self.offset.shape) - self.offset.to(pred.dtype))
        return torch.cat([products.flatten(1), matrices.flatten(1)], dim=1)

    def sums(self, pred: Tensor) -> Tensor:
        """Sums over the samples of the products with predictions ``(N, c r)``, ``(m, r)``."""
        matrices, offset = self.matrices(pred.dtype), self.offset.to(pred.dtype)
        few = math.isqrt(offset.shape[1])  # at a time, as products of all would take the memory of the predictions
        parts = zip(pred.reshape(-1, *offset.shape).split(few, 2), offset.split(few, 1), strict=True)
        return torch.cat([(matrices @ (part - mean)).sum(0, dtype=self.local.dtype) for part, mean in parts], dim=1)

"""Metrics of low rank, from products of Gram matrices with random directions."""

from __future__ import annotations

import dataclasses
import math
from itertools import combinations_with_replacement
from typing import ClassVar

import torch
from torch import Tensor

from convexformer_solvers.linear_maps.base import LinearMap, even_rows
from convexformer_solvers.program import Program

from .low_rank import LowRank
from .metric import Metric, Metrics, Part, in_single


@dataclasses.dataclass(frozen=True)
class LowRankMetrics(Metrics):
    """Metrics of a rank plus a multiple of the identity, of all samples, for features too many for Gram matrices.

    Each takes a pass over the data, with as many columns of coefficients as the rank. Outputs that differ in curvature
    have one matrix. The model's curvature only grows: these metrics are further off than Gram matrices, and momentum
    needs a curvature that does not change.

    Parameters
    ----------
    rank : int
        That of the Gram matrix where this is smaller.
    """

    rank: int
    adapts: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"rank {self.rank}"

    def of(self, program: Program, local: Tensor) -> Metric:
        (*blocks, width), k = program.map.feature_shape, 1 if local.shape[1] == 1 else program.y.shape[1]
        shape = (*blocks, k, width) if k > 1 else (*blocks, width)
        rank = min(self.rank, math.prod(shape))
        normal = torch.randn((math.prod(shape), rank), generator=torch.Generator().manual_seed(0), dtype=local.dtype)
        directions = torch.linalg.qr(normal.to(local.device)).Q
        coef = directions.reshape(-1, k, width, rank).transpose(1, 2).reshape(*blocks, width, k * rank)
        # Large means of the features would take the digits of the products: most of them is subtracted in between.
        some = program.map.rows(even_rows(len(program.y), rank, coef.device))
        offset = some.matvec(coef).mean(0).view(k, rank) * program.fit_intercept
        slopes = _CurvatureSlopes(local, program.weight, offset)
        pred, back = _products(program.map, coef, slopes)
        parts = back.to(local).split([k * rank, k * k], dim=-1)
        product, cross = (
            part.reshape(-1, width, k, part.shape[-1] // k).transpose(1, 2).flatten(0, 2) for part in parts
        )
        rounding = torch.finfo(back.dtype).eps * float(torch.linalg.matrix_norm(product))
        total = _CurvatureSlopes((program.weight @ local)[None], torch.ones_like(local[0, :1]), offset)
        core = total.matrices()[0] * program.fit_intercept
        inverse = torch.linalg.pinv(core, hermitian=True)
        product -= cross @ inverse @ slopes.of_outputs(pred).sum(0, dtype=core.dtype)
        matrix = LowRank(product, directions, rounding)
        return Metric(local, (Part(slice(None), k > 1, shape, matrix, cross, core, inverse),))


def _products(linear_map: LinearMap, coef: Tensor, slopes: _CurvatureSlopes) -> tuple[Tensor, Tensor]:
    """Both products of a pass, in the precision of the data unless these are out of the range of its squares."""
    if linear_map.dtype == torch.float32:
        pred, back = linear_map.slopes_pass(coef.float(), slopes)
        if in_single(back[..., : coef.shape[-1]].abs()):
            return pred, back
    return linear_map.slopes_pass(coef, slopes)


@dataclasses.dataclass(frozen=True)
class _CurvatureSlopes:
    """Weighted second derivatives of each sample's loss times predictions of c outputs, and by themselves."""

    local: Tensor  # (N, n), as in ``Metric``
    weight: Tensor  # (N,)
    offset: Tensor  # that is taken from the predictions, (c, r)

    def matrices(self) -> Tensor:
        """Second derivatives between the outputs times the weights, ``(N, c, c)``."""
        weighted, c = self.weight[:, None] * self.local, len(self.offset)
        if weighted.shape[1] == c:
            return torch.diag_embed(weighted)
        result = weighted.new_empty((len(weighted), c, c))
        for place, (i, j) in enumerate(combinations_with_replacement(range(c), 2)):
            result[:, i, j] = result[:, j, i] = weighted[:, place]
        return result

    def of_outputs(self, pred: Tensor) -> Tensor:
        """Values ``(N, c, r)`` of predictions ``(N, c r)``, in their precision."""
        less = pred.reshape(-1, *self.offset.shape) - self.offset.to(pred.dtype)
        return self.matrices().to(pred.dtype) @ less

    def at(self, pred: Tensor) -> Tensor:
        """Values ``(N, c r + c c)`` of predictions ``(N, c r)``, in their precision."""
        return torch.cat([self.of_outputs(pred).flatten(1), self.matrices().to(pred.dtype).flatten(1)], dim=1)

    def rows(self, index: Tensor | slice) -> _CurvatureSlopes:
        """Those of some samples."""
        return dataclasses.replace(self, local=self.local[index], weight=self.weight[index])

    def to(self, device: torch.device) -> _CurvatureSlopes:
        """The same on another device."""
        local, weight, offset = (part.to(device) for part in (self.local, self.weight, self.offset))
        return dataclasses.replace(self, local=local, weight=weight, offset=offset)

"""Anderson acceleration of fixed-point iterations (Walker and Ni 2011)."""

from __future__ import annotations

import torch
from torch import Tensor

from convexformer_solvers.linear_maps.base import row_chunks


class Anderson:
    r"""Anderson's extrapolation of ``x -> F(x)`` from its last moves.

    With residuals :math:`g_k = F(x_k) - x_k` the next point is :math:`F(x_k) - \sum_j \gamma_j \Delta F_j`, where the
    coefficients minimise :math:`\|g_k - \sum_j \gamma_j \Delta g_j\|` over the last `memory` differences, for each
    column by itself where the map keeps `columns_apart`.
    """

    def __init__(self, memory: int, columns_apart: bool) -> None:
        self.memory, self.columns_apart = memory, columns_apart
        self.forget()

    def forget(self) -> None:
        """Drop all differences: the map is another one, or the iteration goes on from elsewhere."""
        self._n_differences = 0
        self._last: tuple[Tensor, ...] | None = None  # residual and what F gave
        self.largest_weights = 0.0  # largest sum of a column's absolute coefficients in the last extrapolation

    def next(self, start: Tensor, end: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The extrapolation, given ``x`` and in `end` ``F(x)`` and linear images of it, all with the same last axis."""
        if self.memory == 0:
            return end
        ends = tuple(self._columns(part) for part in end)
        residual = ends[0] - self._columns(start)
        if self._last is not None:
            self._remember([new - old for new, old in zip((residual, *ends), self._last, strict=True)])
        self._last = residual, *ends
        return tuple(part.view_as(like) for part, like in zip(self._extrapolated(residual, ends), end, strict=True))

    def _columns(self, values: Tensor) -> Tensor:
        return values.reshape(-1, values.shape[-1] if self.columns_apart else 1)

    def _remember(self, changes: list[Tensor]) -> None:
        """Put the differences of the residual and of what F gave in the place of the oldest."""
        if self._n_differences == 0:
            self._residuals, *self._ends = (part.new_zeros((self.memory, *part.shape)) for part in changes)
            self._products = changes[0].new_zeros((changes[0].shape[1], self.memory, self.memory))
        place = self._n_differences % self.memory
        self._n_differences += 1
        for kept, part in zip((self._residuals, *self._ends), changes, strict=True):
            kept[place] = part
        self._products[:, place] = self._products[:, :, place] = self._against(changes[0])

    def _against(self, residual: Tensor) -> Tensor:
        """Products of the kept differences with a residual, shape ``(columns, memory)``."""
        n_columns = residual.shape[1]
        if n_columns == 1:
            return torch.einsum("mpc,pc->cm", self._residuals, residual)
        # Ten times faster than a batch of products, whose innermost index would jump from row to row.
        products = residual.new_zeros((self.memory, n_columns))
        for rows in row_chunks(len(residual), n_columns, residual.device):
            part = residual[rows]
            for product, kept in zip(products, self._residuals[: self._n_differences], strict=False):
                product += (kept[rows] * part).sum(0)
        return products.T

    def _extrapolated(self, residual: Tensor, ends: tuple[Tensor, ...]) -> list[Tensor]:
        if self._n_differences < 2:
            return list(ends)
        # Of unit length small late differences count beside large early ones; places still empty stay zero.
        lengths = self._products.diagonal(dim1=1, dim2=2).sqrt()
        inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
        system = inverse[:, :, None] * self._products * inverse[:, None, :]
        system.diagonal(dim1=1, dim2=2).add_(1e-4)  # far less saves no iterations and lets rounding grow
        factor, failed = torch.linalg.cholesky_ex(system)
        right = inverse * self._against(residual)
        weights = inverse * torch.cholesky_solve(right[..., None], factor)[..., 0]
        size = weights.abs().sum(1)
        usable = (failed == 0) & torch.isfinite(size)
        weights = torch.where(usable[:, None], weights, 0.0)
        self.largest_weights = float(torch.where(usable, size, 0.0).max())
        return [self._moved_back(part, kept, weights) for part, kept in zip(ends, self._ends, strict=True)]

    def _moved_back(self, end: Tensor, kept: Tensor, weights: Tensor) -> Tensor:
        """The array less the sum of its kept differences with weights ``(columns, memory)``."""
        if end.shape[1] == 1:
            return end - torch.einsum("mpc,cm->pc", kept, weights)
        result = end.clone()
        for difference, weight in zip(kept[: self._n_differences], weights.T, strict=False):
            result.addcmul_(difference, weight, value=-1)
        return result

"""The linear map of gated heads, which never forms its design."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from convexformer_solvers.validation import check_tensor

from .base import as_rows, bands, row_chunks, tall_chunks
from .dense import DenseMap
from .derived import DerivedMap


class GatedMap(DerivedMap[DenseMap]):
    """Gated map ``coef -> sum_g mask[i, g] sum_b <X_i[b], coef[g, b]>``; the gated design is never materialised.

    With ``A_g = diag(mask[:, g]) A`` all that is stored is ``X`` and the masks (paper [C], Thm 3).

    Parameters
    ----------
    data : Tensor of shape (N, *block_shape, d)
        One block array per sample. Not copied, but for what ``DenseMap`` says.
    masks : Tensor of shape (N, h), bool
        Which samples each of the ``h`` gates lets through.

    Raises
    ------
    TypeError
        If one of them is no tensor.
    ValueError
        If their shapes do not fit, or ``masks`` is not bool.

    Examples
    --------
    >>> A = GatedMap(torch.ones(5, 3, 2), torch.ones(5, 4, dtype=torch.bool))
    >>> A.feature_shape
    (4, 3, 2)
    """

    feature_shape = property(lambda self: (self.masks.shape[1], *self.base.feature_shape))
    _width = property(lambda self: math.prod(self.base.feature_shape))  # numbers of a sample

    def __init__(self, data: Tensor, masks: Tensor) -> None:
        super().__init__(DenseMap(data))
        self.masks = checked_masks(masks, len(data))

    def _chunks(self, n_outputs: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
        """Row slices with the data of those rows and their masks ``(height, h)``; bounds every temporary.

        Last come rows of the design, ``(height, h p)``, where they are cheaper than the outputs of all gates.
        """
        rows_matrix, n_gates, narrow = self.base.as_matrix(), self.masks.shape[1], self._width < n_outputs
        tall = tall_chunks(self.n_samples, n_gates * self._width, self.device)
        width, n_sums = self._width, n_gates * n_outputs
        least = 2 * n_sums * width // (n_sums + width)  # or sums would be read and written more often than all else
        low = row_chunks(self.n_samples, max(width, n_sums), self.device, max(1, least))
        for rows in tall if narrow else low:
            data, mask = rows_matrix[rows].to(dtype), self.masks[rows].to(dtype)  # bool times number takes longer
            yield rows, data, mask, (mask[:, :, None] * data[:, None, :]).flatten(1) if narrow else None

    def matvec(self, coef: Tensor) -> Tensor:
        n_gates, n_outputs = self.masks.shape[1], coef.shape[-1]
        result = coef.new_empty((self.n_samples, n_outputs))
        columns = coef.reshape(n_gates, -1, n_outputs)
        rows_of_coef = columns.transpose(1, 2).flatten(0, 1)  # (h c, p): one product serves every gate and output
        for rows, data, mask, design in self._chunks(n_outputs, coef.dtype):
            if design is not None:
                torch.mm(design, columns.flatten(0, 1), out=result[rows])
            else:
                by_gate = (rows_of_coef @ data.T).view(n_gates, n_outputs, -1)
                result[rows] = by_gate.mul_(mask.T[:, None]).sum(0).T
        return result

    def rmatvec(self, values: Tensor) -> Tensor:
        n_gates, n_outputs, narrow = self.masks.shape[1], values.shape[1], self._width < values.shape[1]
        sides = (self._width, n_outputs) if narrow else (n_outputs, self._width)
        result = values.new_zeros((n_gates * sides[0], sides[1]))
        for rows, data, mask, design in self._chunks(n_outputs, values.dtype):
            if design is not None:
                result.addmm_(design.T, values[rows])
            else:
                result.addmm_((mask.T[:, None] * as_rows(values[rows])).flatten(0, 1), data)
        if not narrow:
            result = result.view(n_gates, n_outputs, -1).transpose(1, 2)
        return result.reshape(*self.feature_shape, n_outputs)

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> GatedMap:
        dense = self.base.to(dtype, device)
        masks = self.masks.to(device=device)
        return self if dense is self.base and masks is self.masks else GatedMap(dense.data, masks)

    def rows(self, index: Tensor | slice) -> GatedMap:
        return GatedMap(self.base.rows(index).data, self.masks[index])

    def matvec_blocks(self, blocks: Tensor, coef: Tensor) -> Tensor:
        return self.restricted(blocks).matvec(coef) if self.few(len(blocks)) else super().matvec_blocks(blocks, coef)

    def rmatvec_blocks(self, blocks: Tensor, values: Tensor) -> Tensor:
        few = self.few(len(blocks))
        return self.restricted(blocks).rmatvec(values) if few else super().rmatvec_blocks(blocks, values)

    def restricted(self, blocks: Tensor) -> GatedPart:
        return GatedPart(self, blocks)

    def columns(self, blocks: Tensor) -> Tensor:
        gate, block = self.split(blocks)
        mask = self.masks[:, gate, None].to(self.dtype)  # products with numbers are five times faster
        return self.base.columns(block).mul_(mask)

    def along(self, blocks: Tensor, units: Tensor) -> Tensor:
        result = units.new_empty((len(blocks), self.n_samples))
        for data, mask, here in self._by_dense_block(blocks, units.dtype):
            result[here] = (units[here] @ data.T).mul_(mask.T)
        return result

    def weighted_squares(self, weight: Tensor) -> Tensor:
        return self.base.weighted_squares(weight * self.masks.sum(1))

    def kernel(self, blocks: Tensor, scale: Tensor, units: Tensor) -> Tensor:
        # For each dense block k the gates share X_k: sum_g s D_g X_k X_k' D_g = (X_k X_k') o (M diag(s) M').
        result = scale.new_zeros((self.n_samples, self.n_samples))
        for data, mask, here in self._by_dense_block(blocks, scale.dtype):
            scaled, uneven = mask * scale[here], scale[here] != 1  # where it is 1 the units do not matter
            along = mask[:, uneven] * (data @ units[here][uneven].T)
            scaled_along = along * (1 - scale[here][uneven])
            for rows in bands(self.n_samples, self.device):
                product = (scaled[rows] @ mask[: rows.stop].T).mul_(data[rows] @ data[: rows.stop].T)
                result[rows, : rows.stop] += product.addmm_(scaled_along[rows], along[: rows.stop].T)
        return result

    def full_kernel(self, dtype: torch.dtype) -> Tensor:
        return gated_kernel(self.base.full_kernel(dtype), self.masks)

    def product_work(self, n_outputs: int) -> float:
        # The data are read once for all gates; what each gate makes of them, or of their products, is written and read.
        of_sample = self._width * n_outputs + self.rates.work_of_a_read * min(self._width, n_outputs)
        return max(2.0 * self.masks.numel() * of_sample, self.base.product_work(n_outputs))

    def gram_work(self) -> float:
        by_kernel = float(self.n_samples**2) * (self._width + self._n_blocks)  # the gates share the data's kernel
        return min(super().gram_work(), by_kernel)

    def _by_dense_block(self, blocks: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each dense block among `blocks` its data ``(N, d)``, its gates' masks, and which of `blocks` they are."""
        gate, block = self.split(blocks)
        for k in block.unique().tolist():
            here = (block == k).nonzero()[:, 0]
            yield self.base.by_block()[:, k].to(dtype), self.masks[:, gate[here]].to(dtype), here

    def split(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and position in the dense blocks of flattened positions."""
        return blocks // self.base._n_blocks, blocks % self.base._n_blocks


def gated_kernel(kernel: Tensor, masks: Tensor) -> Tensor:
    """``A A'`` of the gated map in place of that of its data, in lower triangles: every gate sees all of the data."""
    mask = masks.to(kernel.dtype)
    for rows in bands(len(kernel), kernel.device):  # (X X') o (M M')
        kernel[rows, : rows.stop] *= mask[rows] @ mask[: rows.stop].T
    return kernel


def checked_masks(masks: Tensor, n_samples: int) -> Tensor:
    """Masks of gates for so many samples; ``TypeError`` or ``ValueError`` of others."""
    check_tensor("masks", masks)
    if masks.ndim != 2 or len(masks) != n_samples or masks.dtype != torch.bool:
        got = f"{masks.dtype} of shape {tuple(masks.shape)}"
        raise ValueError(f"masks must be a bool array of shape ({n_samples}, n_gates), got {got}")
    return masks


class GatedPart(DerivedMap[GatedMap]):
    """Some `blocks` of a gated map, ``(m, d)``, without a copy; a dense block is multiplied for its gates alone."""

    feature_shape = property(lambda self: (len(self.blocks), self.base.feature_shape[-1]))

    def __init__(self, base: GatedMap, blocks: Tensor) -> None:
        super().__init__(base)
        self.blocks = blocks
        gate, dense_block = base.split(blocks)
        self._order = dense_block.argsort(stable=True)
        self._masks = base.masks.T[gate[self._order]].to(base.dtype)  # as numbers, (m, N), by dense block
        ends = dense_block.bincount(minlength=base.base.by_block().shape[1]).cumsum(0).tolist()
        parts = enumerate(zip([0, *ends], ends, strict=False))
        self._gates_of = [(k, first, end) for k, (first, end) in parts if first < end]

    def _chunks(self, n_outputs: int, dtype: torch.dtype) -> Iterator[tuple[slice, Iterator[Any], Tensor]]:
        """Row slices with, by dense block, the rows of each product and the data ``(height, d)``; and their masks."""
        data, width = self.base.base.by_block(), len(self.blocks) * n_outputs
        chunks = tall_chunks if self.device.type == "cpu" else row_chunks
        for rows in chunks(self.n_samples, width, self.device):
            parts = ((slice(n_outputs * a, n_outputs * b), data[rows, k].to(dtype)) for k, a, b in self._gates_of)
            yield rows, parts, self._masks[:, None, rows].to(dtype)

    def matvec(self, coef: Tensor) -> Tensor:
        n_blocks, _, n_outputs = coef.shape
        rows_of_coef = coef.transpose(1, 2)[self._order].flatten(0, 1)  # (m c, d)
        result = coef.new_empty((self.n_samples, n_outputs))
        for rows, parts, masks in self._chunks(n_outputs, coef.dtype):
            by_block = coef.new_empty((n_blocks, n_outputs, masks.shape[2]))
            for mine, data in parts:
                torch.mm(rows_of_coef[mine], data.T, out=by_block.flatten(0, 1)[mine])
            result[rows] = by_block.mul_(masks).sum(0).T
        return result

    def rmatvec(self, values: Tensor) -> Tensor:
        n_outputs = values.shape[1]
        by_block = values.new_zeros((len(self.blocks) * n_outputs, self.feature_shape[-1]))
        for rows, parts, masks in self._chunks(n_outputs, values.dtype):
            by_output = (masks * as_rows(values[rows])).flatten(0, 1)
            for mine, data in parts:
                by_block[mine].addmm_(by_output[mine], data)
        result = values.new_empty((*self.feature_shape, n_outputs))
        result[self._order] = by_block.view(len(self.blocks), n_outputs, self.feature_shape[-1]).transpose(1, 2)
        return result

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> GatedPart:
        base = self.base.to(dtype, device)
        return self if base is self.base else GatedPart(base, self.blocks.to(base.device))

    def centered(self, weight: Tensor, dtype: torch.dtype) -> DenseMap:
        return DenseMap(self.base.columns(self.blocks)).centered(weight, dtype)

    def rows(self, index: Tensor | slice) -> GatedPart:
        return GatedPart(self.base.rows(index), self.blocks)

    def columns(self, blocks: Tensor) -> Tensor:
        return self.base.columns(self.blocks[blocks])

    def along(self, blocks: Tensor, units: Tensor) -> Tensor:
        return self.base.along(self.blocks[blocks], units)

    def kernel(self, blocks: Tensor, scale: Tensor, units: Tensor) -> Tensor:
        return self.base.kernel(self.blocks[blocks], scale, units)

    def product_work(self, n_outputs: int) -> float:
        by_block = float(self.n_samples * len(self.blocks) * n_outputs)
        operations = 2 * by_block * (self.feature_shape[-1] + self.rates.work_of_a_read)
        return max(operations, self.base.base.product_work(n_outputs)) + self.rates.work_of_a_call * len(self._gates_of)

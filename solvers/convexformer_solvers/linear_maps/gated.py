"""The linear map of gated heads, which never forms its design."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from convexformer_solvers.validation import check_tensor

from .base import as_rows, row_chunks, tall_chunks
from .dense import DenseMap
from .derived import DerivedMap

# Calls in the time that a product with the gates of one dense block takes to begin.
_CALLS = 5


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
    >>> import torch
    >>> from convexformer_solvers import GatedMap
    >>> A = GatedMap(torch.ones(5, 3, 2), torch.ones(5, 4, dtype=torch.bool))
    >>> A.feature_shape
    (4, 3, 2)
    """

    def __init__(self, data: Tensor, masks: Tensor) -> None:
        dense = DenseMap(data)
        check_tensor("masks", masks)
        if masks.ndim != 2 or masks.shape[0] != data.shape[0] or masks.dtype != torch.bool:
            raise ValueError(
                f"masks must be a bool array of shape ({data.shape[0]}, n_gates), "
                f"got {masks.dtype} of shape {tuple(masks.shape)}"
            )
        super().__init__(dense)
        self.masks = masks

    @property
    def feature_shape(self) -> tuple[int, ...]:
        return (self.masks.shape[1], *self.base.feature_shape)

    def _chunks(self, n_outputs: int) -> Iterator[tuple[slice, Tensor]]:
        """Row slices with the data of those rows; bounds every temporary of both products."""
        rows_matrix = self.base.as_matrix()
        widest = max(rows_matrix.shape[1], self.masks.shape[1] * n_outputs)
        for rows in row_chunks(self.n_samples, widest, self.device):
            yield rows, rows_matrix[rows]

    def _narrow(self, n_outputs: int) -> bool:
        """Whether a sample has fewer numbers than outputs, so that its gated copies are cheaper than its outputs."""
        return math.prod(self.base.feature_shape) < n_outputs

    def _gated_chunks(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Row slices with those rows of the design, a chunk at a time."""
        rows_matrix = self.base.as_matrix()
        for rows in tall_chunks(self.n_samples, math.prod(self.feature_shape)):
            data, mask = rows_matrix[rows].to(dtype), self.masks[rows].to(dtype)
            yield rows, (mask[:, :, None] * data[:, None, :]).flatten(1)

    def matvec(self, coef: Tensor) -> Tensor:
        n_gates, n_outputs = self.masks.shape[1], coef.shape[-1]
        if self._narrow(n_outputs):
            result = coef.new_empty((self.n_samples, n_outputs))
            for rows, gated in self._gated_chunks(coef.dtype):
                torch.mm(gated, coef.reshape(-1, n_outputs), out=result[rows])
            return result
        # (h, p, c) -> (h c, p): one product serves every gate and output.
        rows_of_coef = coef.reshape(n_gates, -1, n_outputs).transpose(1, 2).reshape(n_gates * n_outputs, -1)
        result = coef.new_empty((self.n_samples, n_outputs))
        for rows, data in self._chunks(n_outputs):
            by_gate = (rows_of_coef @ data.to(coef.dtype).T).view(n_gates, n_outputs, -1)
            by_gate *= self.masks[rows].T[:, None].to(coef.dtype)  # products with numbers are five times faster
            result[rows] = by_gate.sum(0).T
        return result

    def rmatvec(self, values: Tensor) -> Tensor:
        n_gates, n_outputs = self.masks.shape[1], values.shape[1]
        if self._narrow(n_outputs):
            result = values.new_zeros((math.prod(self.feature_shape), n_outputs))
            for rows, gated in self._gated_chunks(values.dtype):
                result.addmm_(gated.T, values[rows])
            return result.reshape(*self.feature_shape, n_outputs)
        result = values.new_zeros((n_gates * n_outputs, math.prod(self.base.feature_shape)))
        for rows, data in self._chunks(n_outputs):
            by_gate = self.masks[rows].T[:, None].to(values.dtype) * as_rows(values[rows])
            result.addmm_(by_gate.reshape(n_gates * n_outputs, -1), data.to(values.dtype))
        return result.view(n_gates, n_outputs, -1).transpose(1, 2).reshape(*self.feature_shape, n_outputs)

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> GatedMap:
        dense = self.base.to(dtype, device)
        masks = self.masks.to(device=device or self.masks.device)
        return self if dense is self.base and masks is self.masks else GatedMap(dense.data, masks)

    def rows(self, index: Tensor | slice) -> GatedMap:
        return GatedMap(self.base.rows(index).data, self.masks[index])

    def matvec_blocks(self, blocks: Tensor, coef: Tensor) -> Tensor:
        result = coef.new_zeros((self.n_samples, coef.shape[-1]))
        for data, mask, here in self._by_dense_block(blocks, coef.dtype):
            gates_last = coef[here].permute(1, 2, 0)  # (d, c, gates)
            by_gate = (data @ gates_last.flatten(1)).view(-1, *gates_last.shape[1:])
            result += torch.einsum("icg,ig->ic", by_gate, mask)
        return result

    def rmatvec_blocks(self, blocks: Tensor, values: Tensor) -> Tensor:
        result = values.new_zeros((len(blocks), self.feature_shape[-1], values.shape[1]))
        for data, mask, here in self._by_dense_block(blocks, values.dtype):
            by_gate = (mask[:, :, None] * values[:, None, :]).flatten(1)
            result[here] = (data.T @ by_gate).view(-1, mask.shape[1], values.shape[1]).transpose(0, 1)
        return result

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

    def kernel(self, blocks: Tensor, scale: Tensor, units: Tensor) -> Tensor:
        # For each dense block k the gates share X_k: sum_g s D_g X_k X_k' D_g = (X_k X_k') o (M diag(s) M').
        result = scale.new_zeros((self.n_samples, self.n_samples))
        for data, mask, here in self._by_dense_block(blocks, scale.dtype):
            scaled, uneven = mask * scale[here], scale[here] != 1  # where it is 1 the units do not matter
            along = mask[:, uneven] * (data @ units[here][uneven].T)
            scaled_along = along * (1 - scale[here][uneven])
            height = max(128, -(-self.n_samples // 16))
            for start in range(0, self.n_samples, height):
                rows, upto = slice(start, start + height), min(start + height, self.n_samples)
                product = (scaled[rows] @ mask[:upto].T).mul_(data[rows] @ data[:upto].T)
                result[rows, :upto] += product.addmm_(scaled_along[rows], along[:upto].T)
        return result

    def full_kernel(self, dtype: torch.dtype) -> Tensor:
        # Every gate sees all of the data: A A' = (X X') o (M M').
        result, mask = self.base.full_kernel(dtype), self.masks.to(dtype)
        for rows in tall_chunks(self.n_samples, self.n_samples):
            result[rows, : rows.stop] *= mask[rows] @ mask[: rows.stop].T
        return result

    def product_work(self, n_outputs: int) -> float:
        # The data are read once for all gates; what each gate makes of them, or of their products, is written and read.
        width = math.prod(self.base.feature_shape)
        by_gate = self.n_samples * self.masks.shape[1] * min(width, n_outputs)
        operations = 2.0 * self.n_samples * self.masks.shape[1] * width * n_outputs
        return max(operations + 2 * self.rates.work_of_a_read * by_gate, self.base.product_work(n_outputs))

    def gram_work(self) -> float:
        # The gates share the data's kernel.
        by_kernel = float(self.n_samples**2) * (self.base.as_matrix().shape[1] + math.prod(self.feature_shape[:-1]))
        return min(super().gram_work(), by_kernel)

    def _by_dense_block(self, blocks: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each dense block among `blocks` its data ``(N, d)``, its gates' masks, and which of `blocks` they are."""
        gate, block = self.split(blocks)
        data = self.base.data.reshape(self.n_samples, -1, self.feature_shape[-1])
        for k in block.unique().tolist():
            here = (block == k).nonzero()[:, 0]
            yield data[:, k].to(dtype), self.masks[:, gate[here]].to(dtype), here

    def split(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and position in the dense blocks of flattened positions."""
        n_dense = math.prod(self.base.feature_shape[:-1])
        return blocks // n_dense, blocks % n_dense

    def as_matrix(self) -> Tensor:
        rows = self.base.as_matrix()
        return (self.masks[:, :, None] * rows[:, None, :]).reshape(self.n_samples, -1)


class GatedPart(DerivedMap[GatedMap]):
    """Some blocks of a gated map, with feature shape ``(m, d)``; of their columns no copy is made.

    Each dense block is multiplied for its own gates alone.

    Parameters
    ----------
    base : GatedMap
        The whole map.
    blocks : Tensor of shape (m,)
        Positions in its flattened block axes.

    Examples
    --------
    >>> import torch
    >>> from convexformer_solvers import GatedMap
    >>> A = GatedMap(torch.ones(5, 3, 2), torch.ones(5, 4, dtype=torch.bool))
    >>> A.restricted(torch.tensor([0, 7])).feature_shape
    (2, 2)
    """

    def __init__(self, base: GatedMap, blocks: Tensor) -> None:
        super().__init__(base)
        self.blocks = blocks
        gate, dense_block = base.split(blocks)
        self._order = dense_block.argsort(stable=True)
        # As numbers, which products of this part alone are worth; (m, N), by dense block.
        self._masks = base.masks.T[gate[self._order]].to(base.dtype)
        n_dense = base.base.data.shape[1:-1].numel()
        ends = dense_block.bincount(minlength=n_dense).cumsum(0).tolist()
        parts = [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]
        self._gates_of = [(k, part) for k, part in enumerate(parts) if part.start < part.stop]

    @property
    def feature_shape(self) -> tuple[int, ...]:
        return (len(self.blocks), self.base.feature_shape[-1])

    def _chunks(self, n_outputs: int) -> Iterator[tuple[slice, Tensor]]:
        """Row slices with the data of those rows, ``(n_dense, height, d)``; bounds the temporary of both products."""
        data = self.base.base.data.reshape(self.n_samples, -1, self.feature_shape[-1])
        width = len(self.blocks) * n_outputs
        on_cpu = self.device.type == "cpu"
        for rows in tall_chunks(self.n_samples, width) if on_cpu else row_chunks(self.n_samples, width, self.device):
            yield rows, data[rows].transpose(0, 1)

    def matvec(self, coef: Tensor) -> Tensor:
        n_outputs = coef.shape[-1]
        rows_of_coef = coef.transpose(1, 2)[self._order].flatten(0, 1)  # (m c, d)
        result = coef.new_empty((self.n_samples, n_outputs))
        for rows, data in self._chunks(n_outputs):
            by_block = coef.new_empty((len(rows_of_coef), data.shape[1]))
            for k, part in self._gates_of:
                mine = slice(part.start * n_outputs, part.stop * n_outputs)
                torch.mm(rows_of_coef[mine], data[k].to(coef.dtype).T, out=by_block[mine])
            by_output = by_block.view(len(self.blocks), n_outputs, -1)
            result[rows] = by_output.mul_(self._masks[:, None, rows].to(coef.dtype)).sum(0).T
        return result

    def rmatvec(self, values: Tensor) -> Tensor:
        n_outputs = values.shape[1]
        by_block = values.new_zeros((len(self.blocks) * n_outputs, self.feature_shape[-1]))
        for rows, data in self._chunks(n_outputs):
            by_output = (self._masks[:, None, rows].to(values.dtype) * as_rows(values[rows])).flatten(0, 1)
            for k, part in self._gates_of:
                mine = slice(part.start * n_outputs, part.stop * n_outputs)
                by_block[mine].addmm_(by_output[mine], data[k].to(values.dtype))
        result = values.new_empty((*self.feature_shape, n_outputs))
        result[self._order] = by_block.view(len(self.blocks), n_outputs, -1).transpose(1, 2)
        return result

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> GatedPart:
        base = self.base.to(dtype, device)
        return self if base is self.base else GatedPart(base, self.blocks.to(base.device))

    def centered(self, weight: Tensor, dtype: torch.dtype) -> DenseMap:
        return DenseMap(self.base.columns(self.blocks)).centered(weight, dtype)

    def rows(self, index: Tensor | slice) -> GatedPart:
        return GatedPart(self.base.rows(index), self.blocks)

    def as_matrix(self) -> Tensor:
        return self.base.columns(self.blocks).flatten(1)

    def columns(self, blocks: Tensor) -> Tensor:
        return self.base.columns(self.blocks[blocks])

    def along(self, blocks: Tensor, units: Tensor) -> Tensor:
        return self.base.along(self.blocks[blocks], units)

    def kernel(self, blocks: Tensor, scale: Tensor, units: Tensor) -> Tensor:
        return self.base.kernel(self.blocks[blocks], scale, units)

    def product_work(self, n_outputs: int) -> float:
        by_block = float(self.n_samples * len(self.blocks) * n_outputs)
        operations = 2 * by_block * self.feature_shape[-1] + 2 * self.rates.work_of_a_read * by_block
        calls = _CALLS * self.rates.work_of_a_call * len(self._gates_of)
        return max(operations, self.base.base.product_work(n_outputs)) + calls

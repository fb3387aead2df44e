"""The linear map of data that are held as one array."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from convexformer_solvers.validation import check_tensor

from .base import _CHUNK_ELEMENTS, LinearMap, _add_lower_product, _slices, as_rows, row_chunks

# Bytes of data, of one row and of one sample's values from which on one thread computes adjoints from few rows at a
# time in half to five sixths of the time; and how many these are: as many as outputs, at least and at most so many.
_LARGE = 2**26
_LONG_ROW = 2**13
_SEVERAL_OUTPUTS = 2**6
_FEWEST_ROWS, _MOST_ROWS = 32, 128


class DenseMap(LinearMap):
    """Dense map ``coef -> sum_b <X_i[b], coef[b]>`` held as one array.

    Parameters
    ----------
    data : Tensor of shape (N, *block_shape, d)
        One block array per sample; at least two-dimensional. Copied only where the numbers of a sample do not lie one
        after the other in memory.

    Raises
    ------
    TypeError
        If ``data`` is no tensor.
    ValueError
        If it has fewer than two dimensions.

    Examples
    --------
    >>> import torch
    >>> from convexformer_solvers import DenseMap
    >>> A = DenseMap(torch.ones(5, 3, 2))
    >>> A.matvec(torch.ones(3, 2, 1)).shape
    torch.Size([5, 1])
    """

    def __init__(self, data: Tensor) -> None:
        check_tensor("data", data)
        if data.ndim < 2:
            raise ValueError(
                f"data must have at least two dimensions (samples, ..., features), got shape {tuple(data.shape)}"
            )
        self._rows = data.flatten(1)
        self.data = self._rows.view(data.shape)  # not a second copy where the rows are one

    @property
    def n_samples(self) -> int:
        return self.data.shape[0]

    @property
    def feature_shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    def largest(self) -> float:
        smallest, largest = torch.aminmax(self.data)
        return max(-float(smallest), float(largest))

    def matvec(self, coef: Tensor) -> Tensor:
        columns = as_rows(coef.reshape(-1, coef.shape[-1]))
        if coef.dtype == self.dtype:
            return as_rows(columns @ self._rows.T)
        result = coef.new_empty((self.n_samples, coef.shape[-1]))
        for rows in row_chunks(self.n_samples, self._rows.shape[1], self.device):
            result[rows] = (columns @ self._rows[rows].to(coef.dtype).T).T
        return result

    def rmatvec(self, values: Tensor) -> Tensor:
        columns = as_rows(values)
        chunks = self._adjoint_chunks(len(columns), values.dtype)
        if chunks is None:
            result = columns @ self._rows
        else:
            result = values.new_zeros((len(columns), self._rows.shape[1]))
            for rows in chunks:
                result.addmm_(columns[:, rows], self._rows[rows].to(values.dtype))
        return as_rows(result).reshape(*self.feature_shape, -1)

    def _adjoint_chunks(self, n_outputs: int, dtype: torch.dtype) -> Iterator[slice] | None:
        """Chunks of the rows that an adjoint is computed by; None where all at once is as fast."""
        n_samples, width = self._rows.shape
        if dtype != self.dtype:  # each is converted
            return row_chunks(n_samples, width, self.device)
        size, on_one_thread = dtype.itemsize, self.device.type == "cpu" and torch.get_num_threads() == 1
        large = n_samples * width * size >= _LARGE and width * size >= _LONG_ROW
        several = n_outputs * size >= _SEVERAL_OUTPUTS and n_outputs <= _MOST_ROWS
        return _slices(n_samples, max(_FEWEST_ROWS, n_outputs)) if on_one_thread and large and several else None

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> DenseMap:
        data = self.data.to(dtype=dtype or self.dtype, device=device or self.device)
        return self if data is self.data else DenseMap(data)

    def centered(self, weight: Tensor, dtype: torch.dtype) -> DenseMap:
        mean = self.rmatvec(weight[:, None]).flatten()
        result = torch.empty_like(self._rows, dtype=dtype)
        for rows in row_chunks(self.n_samples, self._rows.shape[1], self.device):
            result[rows] = self._rows[rows] - mean
        return DenseMap(result.view_as(self.data))

    def rows(self, index: Tensor | slice) -> DenseMap:
        return DenseMap(self.data[index] if isinstance(index, slice) else self.data.index_select(0, index))

    def _blocks(self) -> Tensor:
        return self.data.reshape(self.n_samples, -1, self.data.shape[-1])

    def matvec_blocks(self, blocks: Tensor, coef: Tensor) -> Tensor:
        if not self.few(len(blocks)):
            return super().matvec_blocks(blocks, coef)
        result = coef.new_zeros((coef.shape[-1], self.n_samples))
        for position, part in zip(blocks.tolist(), coef, strict=True):
            result.addmm_(as_rows(part), self._blocks()[:, position].to(coef.dtype).T)
        return as_rows(result)

    def rmatvec_blocks(self, blocks: Tensor, values: Tensor) -> Tensor:
        if len(blocks) == 0 or not self.few(len(blocks)):
            return super().rmatvec_blocks(blocks, values)
        columns = as_rows(values)
        parts = [columns @ self._blocks()[:, position].to(values.dtype) for position in blocks.tolist()]
        return torch.stack(parts).mT.contiguous()

    def along(self, blocks: Tensor, units: Tensor) -> Tensor:
        result, data = units.new_empty((len(blocks), self.n_samples)), self._blocks()
        distinct, counts = blocks.unique_consecutive(return_counts=True)
        of_block = counts.tolist()
        for block, unit, part in zip(distinct.tolist(), units.split(of_block), result.split(of_block), strict=True):
            columns = data[:, block].to(units.dtype)
            if len(unit) == 1:
                torch.mv(columns, unit[0], out=part[0])
            else:
                torch.mm(unit, columns.T, out=part)
        return result

    def columns(self, blocks: Tensor) -> Tensor:
        return self._blocks().index_select(1, blocks)  # faster than by an index

    def full_kernel(self, dtype: torch.dtype) -> Tensor:
        result = self._rows.new_zeros((self.n_samples, self.n_samples), dtype=dtype)
        width = self._rows.shape[1] if dtype == self.dtype else max(1, _CHUNK_ELEMENTS // self.n_samples)
        for columns in self._rows.split(width, dim=1):
            columns = columns.to(dtype)
            _add_lower_product(result, columns, columns.T)
        return result

    def as_matrix(self) -> Tensor:
        return self._rows

"""The linear map of data that are held as one array."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from convexformer_solvers.validation import check_tensor

from .base import LinearMap, _tall, add_lower_product, as_rows, row_chunks, widened
from .config import CONFIG


class DenseMap(LinearMap):
    """Dense map ``coef -> sum_b <X_i[b], coef[b]>`` held as one array.

    Parameters
    ----------
    data : Tensor of shape (N, *block_shape, d)
        One block array per sample; copied only where the numbers of a sample do not lie one after the other in memory.

    Raises
    ------
    TypeError
        If ``data`` is no tensor.
    ValueError
        If it has fewer than two dimensions.

    Examples
    --------
    >>> A = DenseMap(torch.ones(5, 3, 2))
    >>> A.matvec(torch.ones(3, 2, 1)).shape
    torch.Size([5, 1])
    """

    n_samples = property(lambda self: self.data.shape[0])
    feature_shape = property(lambda self: tuple(self.data.shape[1:]))
    dtype = property(lambda self: self.data.dtype)
    device = property(lambda self: self.data.device)

    def __init__(self, data: Tensor) -> None:
        check_tensor("data", data)
        if data.ndim < 2:
            raise ValueError(f"data must have at least two dimensions (samples, ...), got shape {tuple(data.shape)}")
        self._rows = data.flatten(1)
        self.data = self._rows.view(data.shape)  # not a second copy where the rows are one

    def largest(self) -> float:
        if not self.data.numel():  # of the samples that are asked for, another rank may have all
            return 0.0
        smallest, largest = torch.aminmax(self.data)
        return max(-float(smallest), float(largest))

    def weighted_squares(self, weight: Tensor) -> Tensor:
        total = weight.new_zeros(())
        for rows in self._chunks(weight.dtype):
            squares = self._rows[rows].to(weight.dtype).square().sum(1)
            total += torch.where(weight[rows] > 0, weight[rows] * squares, 0.0).sum()
        return total

    def _chunks(self, dtype: torch.dtype, n_columns: int = 1) -> Iterator[slice]:
        # A quarter of the bytes of a temporary in float64 for each thread: rows that are read twice stay in its cache.
        # With fewer than twice as many rows as columns the sums would be read and written more often than the rows.
        n_threads = torch.get_num_threads() if self.device.type == "cpu" else 1
        width, least = self._rows.shape[1] * dtype.itemsize // (2 * n_threads), 2 * n_columns
        return row_chunks(self.n_samples, width, self.device, least)

    def matvec(self, coef: Tensor) -> Tensor:
        columns = coef.reshape(-1, coef.shape[-1])
        n_columns = columns.shape[1]
        few = 1 < n_columns < 4  # as rows they take half of the time on some processors, and about the same on others
        if coef.dtype == self.dtype:
            # Small data do not wait for the rates of the machine to be measured.
            small = self._rows.numel() < CONFIG.temporary
            turns = few or (n_columns > 1 and not small and self.rates.turns_columns)
            return as_rows(as_rows(columns) @ self._rows.T) if turns else self._rows @ columns
        if few:
            turned, result = as_rows(columns), coef.new_empty((n_columns, self.n_samples))
            for rows in self._chunks(coef.dtype, n_columns):
                torch.mm(turned, self._rows[rows].to(coef.dtype).T, out=result[:, rows])
            return as_rows(result)
        result = coef.new_empty((self.n_samples, n_columns))
        for rows in self._chunks(coef.dtype, n_columns):
            torch.mm(self._rows[rows].to(coef.dtype), columns, out=result[rows])
        return result

    def rmatvec(self, values: Tensor) -> Tensor:
        columns = as_rows(values)
        # On one thread products of a few rows at a time take half of the time, except with a single column.
        whole = len(columns) == 1 or self.device.type != "cpu" or torch.get_num_threads() > 1
        if whole and values.dtype == self.dtype:
            return as_rows(columns @ self._rows).reshape(*self.feature_shape, -1)
        result = values.new_zeros((len(columns), self._rows.shape[1]))
        for rows in self._chunks(values.dtype, len(columns)):
            result.addmm_(columns[:, rows], self._rows[rows].to(values.dtype))
        return as_rows(result).reshape(*self.feature_shape, -1)

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> DenseMap:
        data = self.data.to(dtype=dtype or self.dtype, device=device or self.device)
        return self if data is self.data else DenseMap(data)

    def centered(self, weight: Tensor, dtype: torch.dtype) -> DenseMap:
        return self.shifted(self.rmatvec(weight[:, None])[..., 0], dtype)

    def shifted(self, mean: Tensor, dtype: torch.dtype) -> DenseMap:
        mean = mean.flatten()
        result = torch.empty_like(self._rows, dtype=dtype)
        for rows in self._chunks(dtype):
            result[rows] = self._rows[rows] - mean
        return DenseMap(result.view_as(self.data))

    def rows(self, index: Tensor | slice) -> DenseMap:
        return DenseMap(self.data[index] if isinstance(index, slice) else self.data.index_select(0, index))

    def gated(self, masks: Tensor) -> LinearMap:
        from .gated import GatedMap

        return GatedMap(self.data, masks)

    def widened(self, features: Tensor) -> DenseMap:
        return DenseMap(widened(self.data, features))

    def by_block(self) -> Tensor:
        """View of the data with one block axis, shape ``(N, n_blocks, d)``."""
        return self.data.reshape(self.n_samples, self._n_blocks, self.data.shape[-1])

    def _block(self, position: int) -> Tensor:
        return self.by_block()[:, position]

    def columns(self, blocks: Tensor) -> Tensor:
        return self.by_block().index_select(1, blocks)  # faster than by an index

    def full_kernel(self, dtype: torch.dtype) -> Tensor:
        result = self._rows.new_zeros((self.n_samples, self.n_samples), dtype=dtype)
        width = self._rows.shape[1] if dtype == self.dtype else _tall(self.n_samples, self.device)
        for columns in self._rows.split(max(1, width), dim=1):
            columns = columns.to(dtype)
            add_lower_product(result, columns, columns.T)
        return result

    def as_matrix(self) -> Tensor:
        return self._rows

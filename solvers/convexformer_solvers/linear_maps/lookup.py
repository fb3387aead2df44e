"""The gated map of samples whose blocks are rows of small tables, as symbols are of embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.rates import Rates
from convexformer_solvers.validation import check_tensor

from .base import even_rows
from .config import CONFIG
from .gated import GatedMap


class _Position(NamedTuple):
    """Samples by the row of the table that one of their blocks is, as many places for each; places left are of none."""

    order: Tensor  # (V, m), samples of each row, the number of samples for none
    slots: Tensor  # (N,), where in the flattened order each sample stands
    masks: Tensor  # (V, m, h)


class TableMap(GatedMap):
    r"""Gated map of samples made of table rows, ``X_i[b] = tables[b, symbols[i, b]]``.

    The same map as ``GatedMap(X, masks)``, in fewer operations: a row times the coefficients of a gate is computed
    once for all the samples that have it. With ``V`` rows per table the products take about
    ``2 h c B (V d + N)`` operations in place of ``2 h c B d N``.

    Parameters
    ----------
    tables : Tensor of shape (B, V, d)
        The rows that block ``b`` can be.
    symbols : Tensor of shape (N, B), int64
        Which row each block of each sample is.
    masks : Tensor of shape (N, h), bool
        Which samples each of the ``h`` gates lets through.

    Raises
    ------
    TypeError
        If one of them is no tensor.
    ValueError
        If the shapes do not fit, or a symbol is no row of its table.

    Examples
    --------
    >>> A = TableMap(torch.eye(2)[None], torch.tensor([[0], [1], [1]]), torch.ones(3, 1, dtype=torch.bool))
    >>> A.matvec(torch.tensor([3.0, 5.0]).reshape(1, 1, 2, 1)).ravel()
    tensor([3., 5., 5.])
    """

    def __init__(self, tables: Tensor, symbols: Tensor, masks: Tensor) -> None:
        check_tensor("tables", tables)
        check_tensor("symbols", symbols)
        if tables.ndim != 3:
            raise ValueError(f"tables must have shape (n_blocks, n_rows, n_features), got {tuple(tables.shape)}")
        if symbols.ndim != 2 or symbols.shape[1] != len(tables) or symbols.dtype != torch.int64:
            got = f"{symbols.dtype} of shape {tuple(symbols.shape)}"
            raise ValueError(f"symbols must be int64 of shape (n_samples, {len(tables)}), got {got}")
        if not bool(((symbols >= 0) & (symbols < tables.shape[1])).all()):
            raise ValueError(f"symbols must be below the number of rows of a table, {tables.shape[1]}")
        blocks = torch.arange(len(tables), device=tables.device)
        super().__init__(tables[blocks, symbols], masks)
        self.tables, self.symbols = tables, symbols
        self._positions = [_grouped(of_block, tables.shape[1], masks) for of_block in symbols.T]

    @classmethod
    def where_it_pays(cls, data: Tensor, masks: Tensor, n_outputs: int) -> GatedMap:
        """The gated map of data ``(N, B, d)`` for products of so many outputs, with tables where that is less work."""
        plain = GatedMap(data, masks)
        if (found := _tables(data)) is None:
            return plain
        tables, symbols = found
        # Before it is built: where some rows are frequent and many are rare it takes far more memory than the data.
        heights = [int(of_block.bincount().max()) for of_block in symbols.T]
        work = _product_work(tables, heights, masks, n_outputs, plain.rates)
        return cls(tables, symbols, masks) if work < plain.product_work(n_outputs) else plain

    def few(self, n_blocks: int) -> bool:
        return False  # one by one they would be read as a ``GatedMap`` reads them

    def rows(self, index: Tensor | slice) -> GatedMap:
        # Slices are read once, as chunks: finding where the symbols stand in each would take longer.
        if isinstance(index, slice):
            return super().rows(index)
        return TableMap(self.tables, self.symbols[index], self.masks[index])

    def matvec(self, coef: Tensor) -> Tensor:
        n_gates, n_outputs = self.masks.shape[1], coef.shape[-1]
        result = coef.new_zeros((self.n_samples, n_outputs))
        for block, (table, position) in enumerate(zip(self.tables, self._positions, strict=True)):
            columns = coef[:, block].transpose(0, 1).reshape(-1, n_gates * n_outputs)  # (d, h c)
            by_row = (table.to(coef.dtype) @ columns).view(-1, n_gates, n_outputs)  # (V, h, c)
            by_slot = torch.bmm(position.masks.to(coef.dtype), by_row)  # (V, m, c)
            result += by_slot.view(-1, n_outputs)[position.slots]
        return result

    def rmatvec(self, values: Tensor) -> Tensor:
        return torch.stack([self._coef_part(block, sums) for block, sums in self._sums_by_row(values)], 1)

    def table_gradient(self, coef: Tensor, values: Tensor) -> Tensor:
        """Gradient of ``sum(values * (A coef))`` with respect to the tables, the masks held; shape ``(B, V, d)``."""
        return torch.stack([_table_part(coef[:, block], sums) for block, sums in self._sums_by_row(values)])

    def gradients(self, coef: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """``rmatvec(values)`` and ``table_gradient(coef, values)``, whose sums over samples are the same."""
        parts = [(self._coef_part(b, sums), _table_part(coef[:, b], sums)) for b, sums in self._sums_by_row(values)]
        of_coef, of_tables = zip(*parts, strict=True)
        return torch.stack(of_coef, 1), torch.stack(of_tables)

    def _sums_by_row(self, values: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each block and the sums ``(V, h, c)`` of `values` over the samples that have a row and pass a gate."""
        padded = torch.cat([values, values.new_zeros((1, values.shape[1]))])
        for block, position in enumerate(self._positions):
            yield block, torch.bmm(position.masks.to(values.dtype).mT, padded[position.order])

    def _coef_part(self, block: int, sums: Tensor) -> Tensor:
        """Part ``(h, d, c)`` of the adjoint that belongs to a block."""
        product = self.tables[block].to(sums.dtype).T @ sums.flatten(1)  # (d, h c)
        return product.view(-1, *sums.shape[1:]).transpose(0, 1)

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> TableMap:
        tables = self.tables.to(device=device, dtype=dtype)
        return self if tables is self.tables else TableMap(tables, self.symbols.to(device), self.masks.to(device))

    def product_work(self, n_outputs: int) -> float:
        heights = [position.order.shape[1] for position in self._positions]
        return _product_work(self.tables, heights, self.masks, n_outputs, self.rates)


def _product_work(tables: Tensor, heights: list[int], masks: Tensor, n_outputs: int, rates: Rates) -> float:
    """Work of a product with tables of which a row occurs so many times at most, one number for each table."""
    _, n_rows, d = tables.shape
    n_samples, n_gates = masks.shape
    operations = sum(2.0 * n_rows * n_gates * n_outputs * (d + height) for height in heights)
    reads = sum(n_rows * n_gates * (n_outputs + height) + n_samples * n_outputs for height in heights)
    return operations + 2 * rates.work_of_a_read * reads


def _table_part(coef: Tensor, sums: Tensor) -> Tensor:
    """Gradient ``(V, d)`` with respect to a table, from the coefficients ``(h, d, c)`` of its block."""
    return sums.flatten(1) @ coef.transpose(1, 2).flatten(0, 1)  # (V, h c) by (h c, d)


def _grouped(symbols: Tensor, n_rows: int, masks: Tensor) -> _Position:
    n_samples, place = len(symbols), torch.arange(len(symbols), device=symbols.device)
    counts, by_symbol = symbols.bincount(minlength=n_rows), symbols.argsort(stable=True)
    height, before = int(counts.max()), counts.cumsum(0) - counts  # samples of smaller symbols
    slots = torch.empty_like(symbols)
    slots[by_symbol] = symbols[by_symbol] * height + place - before[symbols[by_symbol]]
    order = symbols.new_full((n_rows * height,), n_samples).index_put_((slots,), place).view(n_rows, height)
    return _Position(order, slots, torch.cat([masks, masks.new_zeros((1, masks.shape[1]))])[order])


def _tables(data: Tensor) -> tuple[Tensor, Tensor] | None:
    """Tables and symbols that the data are made of, if there are few different rows at each position."""
    if len(data) < CONFIG.trial:
        return None
    trial = data[even_rows(len(data), CONFIG.trial, data.device)]
    if any(len(rows.unique(dim=0)) > CONFIG.trial // 2 for rows in trial.unbind(1)):
        return None
    found = [rows.unique(dim=0, return_inverse=True) for rows in data.unbind(1)]
    tables = torch.nn.utils.rnn.pad_sequence([rows for rows, _ in found], batch_first=True)
    return tables, torch.stack([symbols for _, symbols in found], 1)

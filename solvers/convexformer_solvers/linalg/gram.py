"""Gram matrices of varying sets of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from convexformer_solvers.linear_maps.base import LinearMap


def select_blocks(gram: Tensor, rows: Tensor, columns: Tensor, width: int) -> Tensor:
    """Rows and columns of some blocks of a matrix of square blocks of a width; a copy of shape ``(m w, k w)``."""
    # Whole rows first, then runs of `width`: four times faster than indexing single columns.
    n_columns = gram.shape[1]
    chosen = gram.view(-1, width, n_columns).index_select(0, rows)
    chosen = chosen.view(len(rows) * width, n_columns // width, width).index_select(1, columns)
    return chosen.view(len(rows) * width, len(columns) * width)


def add_to_blocks(gram: Tensor, blocks: Tensor) -> None:
    """Add matrices ``(n_blocks, width, width)`` to the diagonal blocks of a matrix, in place."""
    n_blocks, width = blocks.shape[:2]
    gram.view(n_blocks, width, n_blocks, width).diagonal(dim1=0, dim2=2).add_(blocks.permute(1, 2, 0))


def bordered(gram: Tensor, border: Tensor) -> Tensor:
    """A symmetric matrix with one more row and column, whose last entry is the corner; a copy."""
    return torch.cat([torch.cat([gram, border[:-1, None]], 1), border[None]])


class SupportGram:
    """Weighted Gram matrices ``A_S' D A_S`` of varying supports; kept and extended while the weights stay the same.

    `center`, shape ``(n_blocks, d)``, is taken from the columns first. With `single` products are in single precision.
    """

    def __init__(self, linear_map: LinearMap, center: Tensor | None = None, single: bool = False) -> None:
        self.map, self.center, self.single = linear_map, center, single
        self._weight: Tensor | None = None

    def of(self, blocks: Tensor, weight: Tensor, copy: bool = True) -> Tensor:
        """Gram matrix of some groups, shape ``(m d, m d)``; without `copy` only to read, as it may be the one kept."""
        known = self._extended(blocks, weight)
        if torch.equal(blocks, self._known):
            return known.clone() if copy else known
        order = self._known.argsort()
        where = order[torch.searchsorted(self._known[order], blocks)]
        return select_blocks(known, where, where, self.map.feature_shape[-1])

    def _extended(self, blocks: Tensor, weight: Tensor) -> Tensor:
        """Gram matrix of all known groups, to which others of these are added."""
        d = self.map.feature_shape[-1]
        if self._weight is None or not torch.equal(self._weight, weight):
            self._weight, self._known = weight, blocks
            self._store = self._products(blocks, blocks, weight).to(weight)
        new = blocks[~torch.isin(blocks, self._known)]
        old, size = len(self._known) * d, (len(self._known) + len(new)) * d
        if len(new):
            if size > len(self._store):  # part by part, so that there are never more than two; with room for more
                store = self._store.new_empty((max(size, old + old // 4),) * 2)
                store[:old, :old] = self._store[:old, :old]
                self._store = store
            known = torch.cat([self._known, new])
            if self.map.in_memory:
                self._store[:old, old:size] = self._products(self._known, new, weight)
                self._store[old:size, old:size] = self._products(new, new, weight)
            else:
                self._store[:size, old:size] = self._products(known, new, weight)  # in one pass
            self._store[old:size, :old] = self._store[:old, old:size].T
            self._known = known
        return self._store[:size, :size]

    def _products(self, left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
        return self.map.gram(left, right, weight.float() if self.single else weight, self.center)

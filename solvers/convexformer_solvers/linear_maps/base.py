"""Linear maps from block coefficients to predictions.

A coefficient array has shape ``(*block_shape, d, c)``: any number of leading block axes, then ``d`` features and
``c`` outputs. A linear map of ``N`` samples takes it to an ``(N, c)`` array of predictions. Nothing here knows what a
block means.

Every product is computed **in the precision of its argument**: a float64 coefficient array times a float32 map gives a
float64 result, with the map's rows converted chunk by chunk. This is what lets a certificate be computed in float64
without a float64 copy of the data.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from convexformer_solvers.rates import Rates, machine_rates

# Elements of one temporary: 8 MiB in float64, large enough for full matrix-product speed; of larger ones the allocator
# gives the memory back each time, and getting it anew costs more than the product.
_CHUNK_ELEMENTS = 2**20
# Elements of one temporary in a product with few columns: on a CPU it should stay in the cache.
_PRODUCT_ELEMENTS = 2**18
_PRODUCT_ELEMENTS_OF_DEVICE = 2**24
# Rows at least in a chunk of a product along the rows.
_LEAST_HEIGHT = 512
# Blocks are read one by one where that takes less time: a column takes so many times as long as one of all, and each
# block as long as so many columns more.
_COLUMN_ALONE = 2
_BLOCK_ALONE = 16


class LinearMap(ABC):
    """Linear map ``A``: coefficients ``(*block_shape, d, c)`` to predictions ``(N, c)``.

    Subclasses give sizes, precision and device, the two products, some rows or columns, the matrix, its Gram matrix of
    the samples and copies elsewhere; all else is derived from them. ``check_map`` in ``checks`` tests a new one.
    """

    # Whether a few rows say what the others are like.
    rows_are_samples: ClassVar[bool] = True

    @property
    @abstractmethod
    def n_samples(self) -> int:
        """Number of samples ``N``."""

    @property
    @abstractmethod
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of one output's coefficients, ``(*block_shape, d)``."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Precision in which the data are held."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device on which the data are held."""

    @property
    def n_stored(self) -> int:
        """Numbers that the map holds in the precision `dtype`."""
        return self.n_samples * math.prod(self.feature_shape)

    @property
    def rates(self) -> Rates:
        """The rates of the machine in the precision of the data."""
        return machine_rates(self.dtype, self.device)

    @property
    def smaller_side(self) -> int:
        """Side of the Gram matrix of all features or, where that is smaller, of all samples."""
        return min(self.n_samples, math.prod(self.feature_shape))

    def largest(self) -> float:
        """Largest absolute value of an entry, or a bound of it."""
        blocks = torch.arange(math.prod(self.feature_shape[:-1]), device=self.device)[:, None]
        return max((float(self.columns(block).abs().max()) for block in blocks), default=0.0)

    def check_finite(self) -> None:
        """Raise ``ValueError`` where an entry is not finite."""
        if not math.isfinite(self.largest()):
            raise ValueError("the data of the map must be finite, got NaN or infinite values")

    @abstractmethod
    def matvec(self, coef: Tensor) -> Tensor:
        """Predictions ``A coef``, shape ``(N, c)``, for ``coef`` of shape ``(*feature_shape, c)``."""

    @abstractmethod
    def rmatvec(self, values: Tensor) -> Tensor:
        """Adjoint ``A' values``, shape ``(*feature_shape, c)``, for ``values`` of shape ``(N, c)``."""

    @abstractmethod
    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> LinearMap:
        """The same map held in another precision or on another device (itself when nothing changes)."""

    def centered(self, weight: Tensor, dtype: torch.dtype) -> LinearMap:
        """A copy in a precision, whose columns have mean zero under weights that sum to 1; itself where it has none."""
        return self

    @abstractmethod
    def rows(self, index: Tensor | slice) -> LinearMap:
        """The map of some of the samples, given by their positions or as a slice (which copies nothing)."""

    def some_rows(self, at_most: int) -> LinearMap:
        """The map of some of the samples, from the first to the last at even distances; of all where they are few."""
        return self.rows(even_rows(self.n_samples, min(at_most, self.n_samples), self.device))

    @abstractmethod
    def as_matrix(self) -> Tensor:
        """The ``(N, prod(feature_shape))`` matrix. Only for exact solvers at small scale."""

    @abstractmethod
    def columns(self, blocks: Tensor) -> Tensor:
        """Columns of some blocks, shape ``(N, n_blocks, d)``; `blocks` are positions in the flattened block axes."""

    def kernel(self, blocks: Tensor, scale: Tensor, units: Tensor) -> Tensor:
        """``(N, N)`` matrix ``sum_b A_b (s_b I + (1 - s_b) u_b u_b') A_b'`` over some blocks.

        `blocks` and `scale`, the ``s_b``, have shape (n_blocks,), `units`, the unit vectors ``u_b``, (n_blocks, d). The
        result is in the precision of `scale`; only its lower triangle counts, the rest is not defined.
        """
        result = scale.new_zeros((self.n_samples, self.n_samples))
        per_chunk = max(1, _CHUNK_ELEMENTS // (self.n_samples * units.shape[1]))
        for part in torch.arange(len(blocks), device=blocks.device).split(per_chunk):
            columns = self.columns(blocks[part]).to(scale.dtype)
            along = torch.einsum("ibd,bd->ib", columns, units[part])
            inner = (columns * scale[part].sqrt()[:, None]).flatten(1)
            _add_lower_product(result, inner, inner.T)
            _add_lower_product(result, along * (1 - scale[part]), along.T)
        return result

    def full_kernel(self, dtype: torch.dtype) -> Tensor:
        """``(N, N)`` matrix ``A A'``, of which only the lower triangle counts; a new tensor of a precision."""
        n_blocks, d = math.prod(self.feature_shape[:-1]), self.feature_shape[-1]
        ones = torch.ones(n_blocks, dtype=dtype, device=self.device)
        return self.kernel(torch.arange(n_blocks, device=self.device), ones, ones.new_zeros((n_blocks, d)))

    def matvec_blocks(self, blocks: Tensor, coef: Tensor) -> Tensor:
        """Predictions ``(N, c)`` of coefficients ``(n_blocks, d, c)`` on some blocks, zero elsewhere."""
        full = coef.new_zeros((math.prod(self.feature_shape[:-1]), *coef.shape[1:]))
        full[blocks] = coef
        return self.matvec(full.reshape(*self.feature_shape, coef.shape[-1]))

    def few(self, n_blocks: int) -> bool:
        """Whether products with so many blocks take less time one by one than those with all blocks together."""
        n_all, d = math.prod(self.feature_shape[:-1]), self.feature_shape[-1]
        return _COLUMN_ALONE * n_blocks * (d + _BLOCK_ALONE) <= n_all * d

    def sparse_matvec(self, coef: Tensor) -> Tensor:
        """``matvec``; blocks of zeros cost nothing where the others are ``few``."""
        blocks = coef.reshape(-1, *coef.shape[-2:])
        support = nonzero_blocks(coef).nonzero()[:, 0]
        return self.matvec_blocks(support, blocks[support]) if self.few(len(support)) else self.matvec(coef)

    def rmatvec_blocks(self, blocks: Tensor, values: Tensor) -> Tensor:
        """Part ``(n_blocks, d, c)`` of the adjoint of ``values`` of shape ``(N, c)`` that belongs to some blocks."""
        return self.rmatvec(values).reshape(-1, self.feature_shape[-1], values.shape[1])[blocks]

    def along(self, blocks: Tensor, units: Tensor) -> Tensor:
        """Predictions of each of some blocks by itself, shape ``(n_blocks, N)``, in the precision of `units`.

        `blocks` do not decrease and may repeat; `units`, of shape (n_blocks, d), are the coefficients of each.
        """
        result = units.new_empty((len(blocks), self.n_samples))
        distinct, counts = blocks.unique_consecutive(return_counts=True)
        of_block = counts.tolist()
        for block, unit, part in zip(distinct, units.split(of_block), result.split(of_block), strict=True):
            part.copy_(self.matvec_blocks(block[None], unit.T[None]).T)
        return result

    def restricted(self, blocks: Tensor) -> LinearMap:
        """The map of some blocks alone, with feature shape ``(n_blocks, d)``; copies the columns that it holds."""
        from .dense import DenseMap

        return DenseMap(self.columns(blocks))

    def product_work(self, n_outputs: int) -> float:
        """Work of one product with coefficients or values of so many outputs, in the unit of ``gram_work``.

        For few outputs it is the reading of the data that takes the time.
        """
        return self.n_samples * math.prod(self.feature_shape) * max(2.0 * n_outputs, self.rates.work_of_a_read)

    def gram_work(self) -> float:
        """Floating-point operations of half of the Gram matrix of all features, on the smaller side, roughly."""
        return float(self.n_samples * math.prod(self.feature_shape) * self.smaller_side)

    def gram(self, left: Tensor, right: Tensor, weight: Tensor, center: Tensor | None = None) -> Tensor:
        """``A_left' diag(weight) A_right`` of some blocks' columns, shape ``(n_left d, n_right d)``.

        Rows are read in chunks, so that no copy of the columns is made; computed in the precision of `weight`. With a
        `center` of shape ``(n_blocks, d)`` for all blocks its numbers are taken from the columns first.
        """
        d = self.feature_shape[-1]
        result = weight.new_zeros((len(left) * d, len(right) * d))
        same = left is right

        def columns(part: LinearMap, blocks: Tensor) -> Tensor:
            found = part.columns(blocks)
            return (found if center is None else found - center[blocks].to(found)).to(weight.dtype).flatten(1)

        for rows in tall_chunks(self.n_samples, max(result.shape)):
            part = self.rows(rows)
            if part.n_stored <= part.n_samples * max(result.shape):  # less to convert than their columns
                part = part.to(weight.dtype)
            those = columns(part, left)
            weighted = (those if same else columns(part, right)) * weight[rows, None]
            if same:
                _add_lower_product(result, those.T, weighted)
            else:
                result.addmm_(those.T, weighted)
        return mirrored(result) if same else result

    def squared_norm(self, weight: Tensor, center: bool = False, n_steps: int = 20) -> float:
        """Largest eigenvalue of ``A' diag(weight) A``, estimated from below by power iteration.

        With `center` the weighted mean over samples is subtracted from the columns of ``A``; the weights then sum to 1.
        Twenty steps give about two digits, enough for a first step size that a step search corrects.
        """
        generator = torch.Generator().manual_seed(0)
        vector = torch.randn((*self.feature_shape, 1), generator=generator, dtype=weight.dtype).to(weight.device)
        value = 0.0
        for _ in range(n_steps):
            norm = float(torch.linalg.vector_norm(vector))
            if norm == 0.0 or not math.isfinite(norm):
                break
            values = self.matvec(vector / norm)
            if center:
                values = values - weight @ values
            vector = self.rmatvec(weight[:, None] * values)
            value = float(torch.linalg.vector_norm(vector))
        return value


def nonzero_blocks(coef: Tensor) -> Tensor:
    """Which blocks of coefficients are not all zero, shape ``(n_blocks,)``.

    Examples
    --------
    >>> nonzero_blocks(torch.tensor([[[0.0], [2.0]], [[0.0], [0.0]]]))
    tensor([ True, False])
    """
    return coef.reshape(-1, *coef.shape[-2:]).flatten(1).any(dim=1)


def as_rows(columns: Tensor) -> Tensor:
    """The transpose of a few columns, each number beside the next of its column.

    On CPUs a product of large data with few columns is two to four times as fast as that of such rows.
    """
    return columns.T.contiguous()


def row_chunks(n_rows: int, n_columns: int, device: torch.device) -> Iterator[slice]:
    """Chunks of the rows for a product with few columns."""
    elements = _PRODUCT_ELEMENTS if device.type == "cpu" else _PRODUCT_ELEMENTS_OF_DEVICE
    return _slices(n_rows, max(1, elements // max(1, n_columns)))


def tall_chunks(n_rows: int, n_columns: int) -> Iterator[slice]:
    """Smaller chunks, but tall enough for full speed of products along the rows."""
    return _slices(n_rows, max(_LEAST_HEIGHT, _CHUNK_ELEMENTS // max(1, n_columns)))


def _slices(n_rows: int, height: int) -> Iterator[slice]:
    return (slice(start, min(start + height, n_rows)) for start in range(0, n_rows, height))


def even_rows(n_rows: int, n_chosen: int, device: torch.device) -> Tensor:
    """Positions of some rows, from the first to the last at even distances."""
    return torch.arange(n_chosen, device=device) * (n_rows - 1) // max(1, n_chosen - 1)


def weighted_gram(columns: Tensor, weight: Tensor) -> Tensor:
    """``columns' diag(weight) columns`` for ``(N, m)`` columns, of which no copy is made."""
    result = columns.new_zeros((columns.shape[1], columns.shape[1]))
    for rows in tall_chunks(*columns.shape):
        part = columns[rows]
        _add_lower_product(result, part.T, part * weight[rows, None])
    return mirrored(result)


def _add_lower_product(result: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right``, known to be symmetric, to the lower triangle of ``result``; the rest is not defined."""
    size = result.shape[0]
    height = max(128, -(-size // 8))
    for start in range(0, size, height):
        rows = slice(start, min(start + height, size))
        result[rows, : rows.stop].addmm_(left[rows], right[:, : rows.stop])


def mirrored(lower: Tensor) -> Tensor:
    """Symmetric matrix of a lower triangle, in its place."""
    size = lower.shape[0]
    height = max(256, -(-size // 8))
    for start in range(0, size, height):
        rows, below = slice(start, start + height), slice(min(start + height, size), size)
        corner = lower[rows, rows]
        corner.copy_(corner.tril() + corner.tril(-1).T)
        lower[rows, below] = lower[below, rows].T
    return lower

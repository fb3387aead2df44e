"""Linear maps from block coefficients to predictions.

Every product is computed in the precision of its argument: float64 coefficients times a float32 map give a float64
result, with the data converted a few rows at a time. A certificate in float64 needs no float64 copy of the data.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Self

import torch
from torch import Tensor

from convexformer_solvers.draws import standard_normal
from convexformer_solvers.rates import Rates, machine_rates

from .config import CONFIG
from .parts import InParts
from .source import Traffic


@dataclasses.dataclass(frozen=True, eq=False)
class Slopes(ABC):
    """Weighted slopes of a loss, of which other processes and chunks of data have their own part."""

    of_samples: ClassVar[tuple[str, ...]]  # fields with a row for each sample

    @abstractmethod
    def at(self, pred: Tensor) -> Tensor:
        """Values ``(N, k)`` of predictions ``(N, c)``, each sample's of its own predictions alone."""

    def rows(self, index: Tensor | slice) -> Self:
        """Those of some samples."""
        return dataclasses.replace(self, **{name: getattr(self, name)[index] for name in self.of_samples})

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        tensors = {name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return dataclasses.replace(self, **tensors)


class LinearMap(InParts, ABC):
    """Linear map ``A``: coefficients ``(*block_shape, d, c)`` to predictions ``(N, c)``.

    Here ``N`` is the number of samples, ``d`` that of features and ``c`` that of outputs; there are any number of
    leading block axes, whose positions flattened are the `blocks` of the methods, of shape (n_blocks,). ``coef`` has
    shape ``(*feature_shape, c)`` and ``values`` shape ``(N, c)``.

    Subclasses define the abstract methods; all else is derived from them. ``check_map`` tests a new one.
    """

    rows_are_samples: ClassVar[bool] = True  # whether a few rows say what the others are like
    in_memory: ClassVar[bool] = True  # whether there is room for copies of the columns
    memory_limit: int | None = None  # bytes that algorithms may take for matrices of their own; None: no limit
    _n_blocks = property(lambda self: math.prod(self.feature_shape[:-1]))

    def __len__(self) -> int:
        return self.n_samples

    @property
    def shape(self) -> tuple[int, ...]:
        """``(N, *feature_shape)``."""
        return (self.n_samples, *self.feature_shape)

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

    @abstractmethod
    def matvec(self, coef: Tensor) -> Tensor:
        """Predictions ``A coef``, shape ``(N, c)``."""

    @abstractmethod
    def rmatvec(self, values: Tensor) -> Tensor:
        """Adjoint ``A' values``, shape ``(*feature_shape, c)``."""

    @abstractmethod
    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> LinearMap:
        """The same map held in another precision or on another device (itself when nothing changes)."""

    @abstractmethod
    def rows(self, index: Tensor | slice) -> LinearMap:
        """The map of some of the samples, given by their positions or as a slice (which copies nothing)."""

    @abstractmethod
    def columns(self, blocks: Tensor) -> Tensor:
        """Columns of some blocks, shape ``(N, n_blocks, d)``."""

    def gated(self, masks: Tensor) -> LinearMap:
        """The map whose samples pass the gates that `masks`, bool of shape ``(N, h)``, lets them through."""
        raise NotImplementedError(f"{type(self).__name__} has no gated form")

    def widened(self, features: Tensor) -> LinearMap:
        """The map whose samples have further `features`, of shape ``(N, e)``, the same in every block."""
        raise NotImplementedError(f"{type(self).__name__} has no wider form")

    def as_matrix(self) -> Tensor:
        """The ``(N, prod(feature_shape))`` matrix. Only for exact solvers at small scale."""
        return self.columns(torch.arange(self._n_blocks, device=self.device)).flatten(1)

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

    def _block(self, position: int) -> Tensor:
        """Columns of one block, shape ``(N, d)``, as a view where there is one."""
        return self.columns(torch.tensor([position]).to(self.device))[:, 0]

    def largest(self) -> float:
        """Largest absolute value of an entry, or a bound of it."""
        # Not the maximum of Python, which NaN does not always win.
        of_blocks = [float(self._block(block).abs().max()) for block in range(self._n_blocks)]
        return float(torch.tensor([0.0, *of_blocks], dtype=torch.float64).max())

    def check_finite(self) -> None:
        """Raise ``ValueError`` where an entry is not finite."""
        if not math.isfinite(self.largest()):
            raise ValueError("the data of the map must be finite, got NaN or infinite values")

    def centered(self, weight: Tensor, dtype: torch.dtype) -> LinearMap:
        """A copy in a precision, whose columns have mean zero under weights that sum to 1; itself where it has none."""
        return self

    def shifted(self, mean: Tensor, dtype: torch.dtype) -> LinearMap:
        """A copy in a precision, less a sample `mean` of shape ``feature_shape``; itself where it has none."""
        return self

    def kernel(self, blocks: Tensor, scale: Tensor, units: Tensor) -> Tensor:
        """Lower triangle of ``sum_b A_b (s_b I + (1 - s_b) u_b u_b') A_b'``, shape ``(N, N)``, over some blocks.

        `scale`, the ``s_b``, has shape (n_blocks,) and the result's precision; `units`, unit vectors, (n_blocks, d).
        """
        result = scale.new_zeros((self.n_samples, self.n_samples))
        per_chunk = max(1, _tall(self.n_samples, self.device) // units.shape[1])
        per_chunk = per_chunk if self.in_memory else self.blocks_of_a_pass
        for some, scales, directions in zip(*(part.split(per_chunk) for part in (blocks, scale, units)), strict=True):
            columns = self.columns(some).to(scale.dtype)
            inner = (columns * scales.sqrt()[:, None]).flatten(1)
            add_lower_product(result, inner, inner.T)
            if bool((scales != 1).any()):  # where it is 1 the units do not matter
                along = torch.einsum("ibd,bd->ib", columns, directions)
                add_lower_product(result, along * (1 - scales), along.T)
        return result

    def full_kernel(self, dtype: torch.dtype) -> Tensor:
        """``(N, N)`` matrix ``A A'``, of which only the lower triangle is defined; a new tensor of a precision."""
        blocks = torch.arange(self._n_blocks, device=self.device)
        ones = torch.ones(self._n_blocks, dtype=dtype, device=self.device)
        return self.kernel(blocks, ones, ones.new_zeros((self._n_blocks, self.feature_shape[-1])))

    @property
    def blocks_of_a_pass(self) -> int:
        """Blocks whose columns ``kernel`` reads in a pass: in float64 an eighth of the limit of memory."""
        numbers = CONFIG.chunk if self.memory_limit is None else self.memory_limit // 64
        return max(1, numbers // (self.n_samples * self.feature_shape[-1]))

    def matvec_blocks(self, blocks: Tensor, coef: Tensor) -> Tensor:
        """Predictions ``(N, c)`` of coefficients ``(n_blocks, d, c)`` on some blocks, zero elsewhere."""
        if not self.few(len(blocks)):
            full = coef.new_zeros((self._n_blocks, *coef.shape[1:]))
            full[blocks] = coef
            return self.matvec(full.reshape(*self.feature_shape, coef.shape[-1]))
        result = coef.new_zeros((coef.shape[-1], self.n_samples))
        for block, part in zip(blocks.tolist(), coef, strict=True):
            result.addmm_(as_rows(part), self._block(block).to(coef.dtype).T)
        return as_rows(result)

    def rmatvec_blocks(self, blocks: Tensor, values: Tensor) -> Tensor:
        """Part ``(n_blocks, d, c)`` of the adjoint that belongs to some blocks."""
        if len(blocks) == 0 or not self.few(len(blocks)):
            return self.rmatvec(values).reshape(-1, self.feature_shape[-1], values.shape[1])[blocks]
        columns = as_rows(values)
        return torch.stack([columns @ self._block(k).to(values.dtype) for k in blocks.tolist()]).mT.contiguous()

    def few(self, n_blocks: int) -> bool:
        """Whether products with so many blocks take less time one by one than those with all blocks together."""
        d = self.feature_shape[-1]
        return self.in_memory and 2 * n_blocks * (d + CONFIG.line) <= self._n_blocks * d

    def sparse_matvec(self, coef: Tensor) -> Tensor:
        """``matvec``; blocks of zeros cost nothing where the others are ``few``."""
        support = nonzero_blocks(coef).nonzero()[:, 0]
        blocks = coef.reshape(-1, *coef.shape[-2:])[support]
        return self.matvec_blocks(support, blocks) if self.few(len(support)) else self.matvec(coef)

    def along(self, blocks: Tensor, units: Tensor) -> Tensor:
        """Predictions ``(n_blocks, N)`` of each block, in non-decreasing order, by coefficients ``(n_blocks, d)``."""
        result = units.new_empty((len(blocks), self.n_samples))
        distinct, counts = (part.tolist() for part in blocks.unique_consecutive(return_counts=True))
        for block, unit, part in zip(distinct, units.split(counts), result.split(counts), strict=True):
            torch.mm(unit, self._block(block).to(units.dtype).T, out=part)
        return result

    def along_rows(self, blocks: Tensor, units: Tensor) -> Tensor:
        """The transpose of ``along``."""
        return self.along(blocks, units).T

    def weighted_gram(self, columns: Tensor, weight: Tensor) -> Tensor:
        """``columns' diag(weight) columns`` of some ``(N, m)`` columns, of which no copy is made."""
        result = columns.new_zeros((columns.shape[1], columns.shape[1]))
        for rows in tall_chunks(len(columns), columns.shape[1], columns.device):
            part = columns[rows]
            add_lower_product(result, part.T, part * weight[rows, None])
        return mirrored(result)

    def restricted(self, blocks: Tensor) -> LinearMap:
        """The map of some blocks alone, with feature shape ``(n_blocks, d)``; copies the columns that it holds."""
        from .dense import DenseMap

        return DenseMap(self.columns(blocks))

    def product_work(self, n_outputs: int) -> float:
        """Work of one product with so many outputs, in the unit of ``gram_work``; of few it is that of reading."""
        return self.n_samples * math.prod(self.feature_shape) * max(2.0 * n_outputs, self.rates.work_of_a_read)

    def passes_of_gram(self, n_outputs: int) -> float:
        """Passes over large files in the time of which the Gram matrix of all features is formed; else zero."""
        return 0.0

    def gram_work(self) -> float:
        """Floating-point operations of half of the Gram matrix of all features, on the smaller side, roughly."""
        return float(self.n_samples * math.prod(self.feature_shape) * self.smaller_side)

    def gram(self, left: Tensor, right: Tensor, weight: Tensor, center: Tensor | None = None) -> Tensor:
        """``A_left' diag(weight) A_right``, shape ``(n_left d, n_right d)``, without a copy of the columns.

        A `center` of shape ``(n_blocks, d)``, for all blocks, is subtracted from the columns first.
        """
        d = self.feature_shape[-1]
        result = weight.new_zeros((len(left) * d, len(right) * d))
        self.add_gram(result, left, right, weight, center)
        return mirrored(result) if left is right else result

    def full_gram(self, weight: Tensor, center: Tensor | None = None) -> Tensor:
        """``gram`` of all blocks with themselves."""
        blocks = torch.arange(self._n_blocks, device=self.device)
        return self.gram(blocks, blocks, weight, center)

    def add_gram(
        self, result: Tensor, left: Tensor, right: Tensor, weight: Tensor, center: Tensor | None = None
    ) -> None:
        """Add ``gram`` to a matrix in place, the lower triangle alone where `left` is `right`."""

        def columns(part: LinearMap, blocks: Tensor) -> Tensor:
            found = part.columns(blocks)
            if center is not None:  # in the higher precision, in which large means keep their digits
                found = found - center[blocks].to(found.device, torch.promote_types(found.dtype, weight.dtype))
            return found.to(weight.dtype).flatten(1)

        for rows in tall_chunks(self.n_samples, max(result.shape), self.device):
            part = self.rows(rows)
            if part.n_stored <= part.n_samples * max(result.shape):  # less to convert than their columns
                part = part.to(weight.dtype)
            those = columns(part, left)
            if left is right:
                add_lower_product(result, those.T, those * weight[rows, None])
            else:
                result.addmm_(those.T, columns(part, right) * weight[rows, None])

    def nonnegative(self, coef: Tensor) -> Tensor:
        """Where ``A coef`` is not negative, shape ``(N, c)``, bool: masks of the gates with these directions."""
        return self.matvec(coef) >= 0

    def traffic(self) -> Traffic | None:
        """What has been read of data on a disk, by this map and all of the same source; None of data in memory."""
        return None

    def slopes_pass(self, coef: Tensor, slopes: Slopes) -> tuple[Tensor, Tensor]:
        """``A coef`` and ``A'`` times the slopes there; data on a disk are read once for both."""
        pred = self.matvec(coef)
        return pred, self.rmatvec(slopes.at(pred))

    def moments(self, weight: Tensor, right: Tensor, single: bool = False) -> tuple[Tensor, Tensor]:
        """``A' diag(weight) A``, shape ``(p, p)`` for ``p`` features, and ``A' diag(weight) right``, shape ``(p, k)``.

        In the precision of `weight`, of shape (N,); `right` has shape (N, k). With `single` products of the Gram matrix
        are in float32, and sums of those of some rows in that precision. Data on a disk are read once for both, also
        for several weights of each sample, of shape (N, m): results then have these m first.
        """
        if weight.ndim == 2:
            each = [self.moments(own, right, single) for own in weight.T.contiguous()]
            return torch.stack([gram for gram, _ in each]), torch.stack([product for _, product in each])
        product = self.rmatvec(weight[:, None] * right).flatten(0, -2)
        if not single:
            return self.full_gram(weight), product
        gram, blocks = weight.new_zeros((len(product), len(product))), torch.arange(self._n_blocks, device=self.device)
        for rows in tall_chunks(self.n_samples, len(gram), self.device):
            of_rows = torch.zeros_like(gram, dtype=torch.float32)
            self.rows(rows).add_gram(of_rows, blocks, blocks, weight[rows].float())
            gram += of_rows
        return mirrored(gram), product

    def weighted_squares(self, weight: Tensor) -> Tensor:
        """Sum of the squared entries, each times the weight of its sample, as a tensor without dimensions.

        A sample of weight zero does not count, be its squares infinite.
        """
        squares = (self._block(block).to(weight.dtype).square().sum(1) for block in range(self._n_blocks))
        return sum((torch.where(weight > 0, weight * each, 0.0).sum() for each in squares), weight.new_zeros(()))

    def squared_norm(self, weight: Tensor, center: bool = False, n_steps: int = 20) -> float:
        """Largest eigenvalue of ``A' diag(weight) A`` by power iteration, from below; `center` centres the columns.

        Of data that are not in memory it is that of some samples.
        """
        if not self.in_memory:  # each step would be two passes: who starts with it follows the curvature that is met
            at_most = CONFIG.chunk * self.n_samples // max(1, self.n_stored)
            index = even_rows(self.n_samples, max(1, at_most), self.device)
            share = weight[index]
            if len(index) < self.n_samples and bool(share.any()):
                share = share * float(weight.sum() / share.sum())
                return self.rows(index).squared_norm(share, center, n_steps)
        generator = torch.Generator().manual_seed(0)
        vector = standard_normal((*self.feature_shape, 1), generator, weight.dtype).to(weight.device)
        value = 0.0
        for _ in range(n_steps):
            norm = float(torch.linalg.vector_norm(vector))
            if norm == 0.0 or not math.isfinite(norm):
                break
            values = self.matvec(vector / norm)
            values = values - weight @ values if center else values
            vector = self.rmatvec(weight[:, None] * values)
            value = float(torch.linalg.vector_norm(vector))
        return value


def widened(data: Tensor, features: Tensor) -> Tensor:
    """Samples ``(N, *block_shape, d)`` with further features, of shape ``(N, e)``, the same in every block."""
    of_blocks = features.to(data)[(slice(None), *(None,) * (data.ndim - 2))]
    return torch.cat([data, of_blocks.expand(*data.shape[:-1], -1)], -1)


def nonzero_blocks(coef: Tensor) -> Tensor:
    """Which blocks of coefficients are not all zero, shape ``(n_blocks,)``."""
    return coef.reshape(-1, *coef.shape[-2:]).flatten(1).any(dim=1)


def as_rows(columns: Tensor) -> Tensor:
    """The transpose of a few columns, one number of a column beside the next in memory."""
    return columns.T.contiguous()


def row_chunks(n_rows: int, n_columns: int, device: torch.device, least: int = 1) -> Iterator[slice]:
    """Chunks of the rows, of so many at least, for a product with few columns."""
    return slices(n_rows, max(least, CONFIG.limit(device) // max(1, n_columns)))


def tall_chunks(n_rows: int, n_columns: int, device: torch.device) -> Iterator[slice]:
    """Chunks tall enough for full speed of products along the rows."""
    return slices(n_rows, _tall(n_columns, device))


def _tall(n_columns: int, device: torch.device) -> int:
    limit = CONFIG.limit(device)
    return max(math.isqrt(limit), 4 * limit // max(1, n_columns))


def slices(n_rows: int, height: int) -> Iterator[slice]:
    """Rows in chunks of a height."""
    return (slice(start, min(start + height, n_rows)) for start in range(0, n_rows, height))


def bands(size: int, device: torch.device) -> Iterator[slice]:
    """Low chunks of the rows of a triangle, which leave out most of what is above the diagonal."""
    tallest = math.isqrt(CONFIG.limit(device)) // 2  # lower ones take up to twice the time with some instruction sets
    return slices(size, max(1, min(max(size // 4, tallest // 4), tallest)))


def even_rows(n_rows: int, at_most: int, device: torch.device) -> Tensor:
    """Positions of some rows, from the first to the last at even distances."""
    n_chosen = min(at_most, n_rows)
    return torch.arange(n_chosen, device=device) * (n_rows - 1) // max(1, n_chosen - 1)


def add_lower_product(result: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right``, known to be symmetric, to the lower triangle of ``result``; the rest is not defined."""
    for rows in bands(len(result), result.device):
        result[rows, : rows.stop].addmm_(left[rows], right[:, : rows.stop])


def mirrored(lower: Tensor) -> Tensor:
    """Symmetric matrix of a lower triangle, in its place."""
    for rows in tall_chunks(len(lower), len(lower), lower.device):
        corner = lower[rows, rows]
        corner.copy_(corner.tril() + corner.tril(-1).T)
        lower[rows, rows.stop :] = lower[rows.stop :, rows].T
    return lower

"""Linear maps whose data are those of another map: in rounded products, with signs, with a block of zeros."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .base import LinearMap, Slopes
from .source import Traffic

_Base = TypeVar("_Base", bound=LinearMap)


class DerivedMap(LinearMap, Generic[_Base]):
    """Another map `base` but for its products and what else a subclass defines; the data are not copied.

    A subclass with other entries than those of `base`, but for signs and zeros, also defines ``columns``, of which Gram
    matrices are formed, and ``largest``; one whose ``__init__`` takes more than `base` defines ``to`` and ``rows``.
    ``slopes_pass`` and ``moments`` are two passes over a disk unless it defines them.
    """

    n_samples = property(lambda self: self.base.n_samples)
    feature_shape = property(lambda self: self.base.feature_shape)
    dtype = property(lambda self: self.base.dtype)
    device = property(lambda self: self.base.device)
    n_stored = property(lambda self: self.base.n_stored)
    in_memory = property(lambda self: self.base.in_memory)

    def __init__(self, base: _Base) -> None:
        self.base, self.memory_limit = base, base.memory_limit

    def columns(self, blocks: Tensor) -> Tensor:
        return self.base.columns(blocks)

    def largest(self) -> float:
        return self.base.largest()

    def weighted_gram(self, columns: Tensor, weight: Tensor) -> Tensor:
        return self.base.weighted_gram(columns, weight)

    def placed(self, values: Tensor) -> Tensor:
        return self.base.placed(values)

    def gathered(self, values: Tensor) -> Tensor:
        return self.base.gathered(values)

    def product_work(self, n_outputs: int) -> float:
        return self.base.product_work(n_outputs)

    def passes_of_gram(self, n_outputs: int) -> float:
        return self.base.passes_of_gram(n_outputs)

    def traffic(self) -> Traffic | None:
        return self.base.traffic()

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> LinearMap:
        base: Any = self.base.to(dtype, device)
        return self if base is self.base else type(self)(base)

    def rows(self, index: Tensor | slice) -> LinearMap:
        base: Any = self.base.rows(index)
        return type(self)(base)


class RoundedMap(DerivedMap[LinearMap]):
    """Another map with products in the precision of its data, whatever that of their argument and of their result."""

    def matvec(self, coef: Tensor) -> Tensor:
        return self.base.matvec(coef.to(self.dtype)).to(coef.dtype)

    def rmatvec(self, values: Tensor) -> Tensor:
        return self.base.rmatvec(values.to(self.dtype)).to(values.dtype)

    def matvec_blocks(self, blocks: Tensor, coef: Tensor) -> Tensor:
        return self.base.matvec_blocks(blocks, coef.to(self.dtype)).to(coef.dtype)

    def rmatvec_blocks(self, blocks: Tensor, values: Tensor) -> Tensor:
        return self.base.rmatvec_blocks(blocks, values.to(self.dtype)).to(values.dtype)

    def along(self, blocks: Tensor, units: Tensor) -> Tensor:
        return self.base.along(blocks, units.to(self.dtype)).to(units.dtype)

    def kernel(self, blocks: Tensor, scale: Tensor, units: Tensor) -> Tensor:
        return self.base.kernel(blocks, scale.to(self.dtype), units.to(self.dtype)).to(scale.dtype)


class MixedMap(DerivedMap[LinearMap]):
    """Another map in float64 beside a copy in float32, which has the products of arguments in that precision."""

    dtype = torch.float32

    def __init__(self, base: LinearMap) -> None:
        super().__init__(base)
        self._of = {torch.float64: base, torch.float32: base.to(torch.float32)}

    def matvec(self, coef: Tensor) -> Tensor:
        return self._of[coef.dtype].matvec(coef)

    def rmatvec(self, values: Tensor) -> Tensor:
        return self._of[values.dtype].rmatvec(values)

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> LinearMap:
        return self._of[dtype or self.dtype].to(device=device)

    def rows(self, index: Tensor | slice) -> LinearMap:
        return self.base.rows(index)


class SignedMap(DerivedMap[LinearMap]):
    """The map ``coef -> A coef[0] - A coef[1]`` of another map ``A``: non-negative coefficients stand for any.

    Parameters
    ----------
    base : LinearMap
        The map ``A``.

    Examples
    --------
    >>> from convexformer_solvers import DenseMap
    >>> A = SignedMap(DenseMap(torch.ones(5, 3, 2)))
    >>> A.feature_shape
    (2, 3, 2)
    >>> A.matvec(torch.stack([torch.ones(3, 2, 1), 0.5 * torch.ones(3, 2, 1)]))[0]
    tensor([3.])
    """

    feature_shape = property(lambda self: (2, *self.base.feature_shape))

    def matvec(self, coef: Tensor) -> Tensor:
        return self.base.matvec(coef[0] - coef[1])

    def rmatvec(self, values: Tensor) -> Tensor:
        return self._of_both_signs(self.base.rmatvec(values))

    @staticmethod
    def _of_both_signs(values: Tensor) -> Tensor:
        return torch.stack([values, -values])

    def slopes_pass(self, coef: Tensor, slopes: Slopes) -> tuple[Tensor, Tensor]:
        pred, back = self.base.slopes_pass(coef[0] - coef[1], slopes)
        return pred, self._of_both_signs(back)

    def moments(self, weight: Tensor, right: Tensor, single: bool = False) -> tuple[Tensor, Tensor]:
        gram, product = self.base.moments(weight, right, single)
        return torch.kron(gram.new_tensor([[1, -1], [-1, 1]]), gram), torch.cat([product, -product], dim=-2)

    def columns(self, blocks: Tensor) -> Tensor:
        n_blocks = self._n_blocks // 2
        sign = 1 - 2 * (blocks >= n_blocks).to(self.dtype)
        return self.base.columns(blocks % n_blocks) * sign[:, None]


class PaddedMap(DerivedMap[LinearMap]):
    """The map of another map, of one block axis, whose samples have a further block of zeros, the last."""

    feature_shape = property(lambda self: (self.base.feature_shape[0] + 1, self.base.feature_shape[1]))

    def matvec(self, coef: Tensor) -> Tensor:
        return self.base.matvec(coef[:-1])

    def rmatvec(self, values: Tensor) -> Tensor:
        return self._padded(self.base.rmatvec(values))

    @staticmethod
    def _padded(values: Tensor) -> Tensor:
        return torch.cat([values, torch.zeros_like(values[:1])])

    def slopes_pass(self, coef: Tensor, slopes: Slopes) -> tuple[Tensor, Tensor]:
        pred, back = self.base.slopes_pass(coef[:-1], slopes)
        return pred, self._padded(back)

    def moments(self, weight: Tensor, right: Tensor, single: bool = False) -> tuple[Tensor, Tensor]:
        gram, product = self.base.moments(weight, right, single)
        d = self.feature_shape[-1]
        pad = torch.nn.functional.pad
        return pad(gram, (0, d, 0, d)), pad(product, (0, 0, 0, d))

    def columns(self, blocks: Tensor) -> Tensor:
        real = blocks < self.base.feature_shape[0]
        shape = (self.n_samples, len(blocks), self.feature_shape[-1])
        result = torch.zeros(shape, dtype=self.dtype, device=self.device)
        result[:, real] = self.base.columns(blocks[real])
        return result

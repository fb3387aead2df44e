"""Linear maps whose data are those of another map: in rounded products, with signs."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .base import LinearMap

_Base = TypeVar("_Base", bound=LinearMap)


class DerivedMap(LinearMap, Generic[_Base]):
    """Another map `base` but for what a subclass defines; its data are neither copied nor doubled."""

    n_samples = property(lambda self: self.base.n_samples)
    feature_shape = property(lambda self: self.base.feature_shape)
    dtype = property(lambda self: self.base.dtype)
    device = property(lambda self: self.base.device)
    n_stored = property(lambda self: self.base.n_stored)

    def __init__(self, base: _Base) -> None:
        self.base = base

    def matvec(self, coef: Tensor) -> Tensor:
        return self.base.matvec(coef)

    def rmatvec(self, values: Tensor) -> Tensor:
        return self.base.rmatvec(values)

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

    def few(self, n_blocks: int) -> bool:
        return self.base.few(n_blocks)

    def product_work(self, n_outputs: int) -> float:
        return self.base.product_work(n_outputs)


class SignedMap(DerivedMap[LinearMap]):
    """The map ``coef -> A coef[0] - A coef[1]`` of another map ``A``: non-negative coefficients stand for any.

    Parameters
    ----------
    unsigned : LinearMap
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

    def __init__(self, unsigned: LinearMap) -> None:
        super().__init__(unsigned)

    def matvec(self, coef: Tensor) -> Tensor:
        return self.base.matvec(coef[0] - coef[1])

    def rmatvec(self, values: Tensor) -> Tensor:
        result = self.base.rmatvec(values).expand(2, *self.base.feature_shape, -1).clone()
        result[1].neg_()
        return result

    def centered(self, weight: Tensor, dtype: torch.dtype) -> LinearMap:
        return SignedMap(self.base.centered(weight, dtype))

    def columns(self, blocks: Tensor) -> Tensor:
        n_blocks = self._n_blocks // 2
        sign = 1 - 2 * (blocks >= n_blocks).to(self.dtype)
        return self.base.columns(blocks % n_blocks) * sign[:, None]

    def kernel(self, blocks: Tensor, scale: Tensor, units: Tensor) -> Tensor:
        return self.base.kernel(blocks % (self._n_blocks // 2), scale, units)

    def full_kernel(self, dtype: torch.dtype) -> Tensor:
        return self.base.full_kernel(dtype).mul_(2)

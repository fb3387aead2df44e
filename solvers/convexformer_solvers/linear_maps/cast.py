"""A linear map whose products are rounded to the precision of its data."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import LinearMap
from .derived import DerivedMap


class RoundedMap(DerivedMap[LinearMap]):
    """Another map with products in the precision of its data, whatever that of their argument and of their result.

    Half the time of products that convert float32 data, for whom six digits of float64 numbers will do.

    Parameters
    ----------
    base : LinearMap
        The other map; its data are not copied.

    Examples
    --------
    >>> import torch
    >>> from convexformer_solvers import DenseMap
    >>> A = RoundedMap(DenseMap(torch.tensor([[[1.0]], [[3.0]]])))
    >>> A.matvec(torch.tensor([[[1 / 3]]], dtype=torch.float64)).flatten()
    tensor([0.3333, 1.0000], dtype=torch.float64)
    """

    def matvec(self, coef: Tensor) -> Tensor:
        return self.base.matvec(coef.to(self.dtype)).to(coef.dtype)

    def rmatvec(self, values: Tensor) -> Tensor:
        return self.base.rmatvec(values.to(self.dtype)).to(values.dtype)

    def matvec_blocks(self, blocks: Tensor, coef: Tensor) -> Tensor:
        return self.base.matvec_blocks(blocks, coef.to(self.dtype)).to(coef.dtype)

    def rmatvec_blocks(self, blocks: Tensor, values: Tensor) -> Tensor:
        return self.base.rmatvec_blocks(blocks, values.to(self.dtype)).to(values.dtype)

    def few(self, n_blocks: int) -> bool:
        return self.base.few(n_blocks)

    def along(self, blocks: Tensor, units: Tensor) -> Tensor:
        return self.base.along(blocks, units.to(self.dtype)).to(units.dtype)

    def kernel(self, blocks: Tensor, scale: Tensor, units: Tensor) -> Tensor:
        return self.base.kernel(blocks, scale.to(self.dtype), units.to(self.dtype)).to(scale.dtype)

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> RoundedMap:
        base = self.base.to(dtype, device)
        return self if base is self.base else RoundedMap(base)

    def rows(self, index: Tensor | slice) -> RoundedMap:
        return RoundedMap(self.base.rows(index))

    def as_matrix(self) -> Tensor:
        return self.base.as_matrix()

    def columns(self, blocks: Tensor) -> Tensor:
        return self.base.columns(blocks)

    def product_work(self, n_outputs: int) -> float:
        return self.base.product_work(n_outputs)

    def gram_work(self) -> float:
        return self.base.gram_work()

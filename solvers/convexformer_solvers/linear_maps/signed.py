"""A linear map of differences: non-negative coefficients that come in pairs, one added and one subtracted."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .base import LinearMap
from .derived import DerivedMap


class SignedMap(DerivedMap[LinearMap]):
    """The map ``coef -> A coef[0] - A coef[1]`` of another map ``A``; its data are neither copied nor doubled.

    Parameters
    ----------
    unsigned : LinearMap
        The map ``A``.

    Examples
    --------
    >>> import torch
    >>> from convexformer_solvers import DenseMap, SignedMap
    >>> A = SignedMap(DenseMap(torch.ones(5, 3, 2)))
    >>> A.feature_shape
    (2, 3, 2)
    >>> A.matvec(torch.stack([torch.ones(3, 2, 1), 0.5 * torch.ones(3, 2, 1)]))[0]
    tensor([3.])
    """

    def __init__(self, unsigned: LinearMap) -> None:
        super().__init__(unsigned)

    @property
    def feature_shape(self) -> tuple[int, ...]:
        return (2, *self.base.feature_shape)

    def matvec(self, coef: Tensor) -> Tensor:
        return self.base.matvec(coef[0] - coef[1])

    def rmatvec(self, values: Tensor) -> Tensor:
        positive = self.base.rmatvec(values)
        result = positive.new_empty((2, *positive.shape))
        result[0] = positive
        torch.neg(positive, out=result[1])
        return result

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> SignedMap:
        base = self.base.to(dtype, device)
        return self if base is self.base else SignedMap(base)

    def centered(self, weight: Tensor, dtype: torch.dtype) -> SignedMap:
        return SignedMap(self.base.centered(weight, dtype))

    def rows(self, index: Tensor | slice) -> SignedMap:
        return SignedMap(self.base.rows(index))

    def columns(self, blocks: Tensor) -> Tensor:
        block, sign = self._unsigned_blocks(blocks)
        return self.base.columns(block) * sign[:, None].to(self.dtype)

    def kernel(self, blocks: Tensor, scale: Tensor, units: Tensor) -> Tensor:
        return self.base.kernel(self._unsigned_blocks(blocks)[0], scale, units)

    def full_kernel(self, dtype: torch.dtype) -> Tensor:
        return self.base.full_kernel(dtype).mul_(2)

    def as_matrix(self) -> Tensor:
        matrix = self.base.as_matrix()
        return torch.cat([matrix, -matrix], dim=1)

    def _unsigned_blocks(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of the blocks in the other map, and their signs."""
        n_blocks = math.prod(self.base.feature_shape[:-1])
        return blocks % n_blocks, 1 - 2 * (blocks >= n_blocks).long()

"""Common ground of the linear maps whose data are those of another map."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from .base import LinearMap

_Base = TypeVar("_Base", bound=LinearMap)


class DerivedMap(LinearMap, Generic[_Base]):
    """A map with the samples, the precision and the numbers of another one, which it neither copies nor doubles.

    Subclasses give the two products, and whatever else is not that of the base.

    Parameters
    ----------
    base : LinearMap
        The other map.
    """

    def __init__(self, base: _Base) -> None:
        self.base = base

    @property
    def n_samples(self) -> int:
        return self.base.n_samples

    @property
    def feature_shape(self) -> tuple[int, ...]:
        return self.base.feature_shape

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def n_stored(self) -> int:
        return self.base.n_stored

    def largest(self) -> float:
        return self.base.largest()

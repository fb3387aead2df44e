"""Functions of samples that are in one part, or in one part on each process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

_T = TypeVar("_T")


class InParts:
    """A container of samples, as a linear map, on whose parts functions are called: here on itself, as its one part.

    Of samples that are spread over processes each part is that of a process, to which functions are pickled.
    """

    def each_part(self, function: Callable[..., _T], own: dict[str, Any] | None = None, **common: Any) -> list[_T]:
        """What a function gives of each part, with arguments that all parts get.

        Arguments in `own` are tensors with a row for each sample, of which a part gets those of its samples.
        """
        return [function(self, **(own or {}), **common)]

    def rows_made(self, function: Callable[..., Tensor], **common: Any) -> Tensor:
        """The rows that a function makes of each part, one for each sample, in the order of the samples."""
        return function(self, **common)

    def map_made(self, function: Callable[..., _T], **common: Any) -> _T:
        """The linear map that a function makes of all parts."""
        return function(self, **common)

    def placed(self, values: Tensor) -> Tensor:
        """Values with a row for each sample, where the samples are."""
        return values

    def gathered(self, values: Tensor) -> Tensor:
        """Values with a row for each sample, in one place."""
        return values

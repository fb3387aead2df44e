"""Where the samples of a streamed map come from: anything of which some rows can be read."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Source(ABC):
    """Samples on a disk, or made anew for each pass, of which a map reads some rows at a time.

    Examples
    --------
    >>> class Squares(Source):
    ...     shape, dtype = (100, 1, 2), torch.float32
    ...     def read(self, rows):
    ...         return torch.arange(100.0)[rows, None, None].expand(-1, 1, 2).square()
    >>> Squares().read(slice(2, 4)).shape, Squares().place(3)
    (torch.Size([2, 1, 2]), 'sample 3')
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """``(N, *block_shape, d)``."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Precision in which the samples are stored, of floating-point numbers or integers."""

    @abstractmethod
    def read(self, rows: slice) -> Tensor:
        """Samples from ``rows.start`` up to ``rows.stop``, on the CPU, in the precision of storage.

        Called from one thread at a time. Passes begin at the first row and go on to the last. The result may share
        memory with the file, and is not written to.
        """

    def place(self, row: int) -> str:
        """Where a sample is, for messages: by default its position, of a shard the name and the row in it."""
        return f"sample {row}"

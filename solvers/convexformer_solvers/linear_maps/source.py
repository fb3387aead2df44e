"""Where the samples of a streamed map come from, anything of which some rows can be read, and what has been read."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from itertools import pairwise

import torch
from torch import Tensor


@dataclasses.dataclass
class Traffic:
    """What has been read of a source, by a map and all that were made of it.

    Attributes
    ----------
    total_bytes, read_bytes : int
        Bytes of the source in the precision of storage, and bytes that have been read.
    read_seconds, waited_seconds : float
        Seconds of reading and conversion, and those in which products waited for them.
    passes, bytes_per_second : float
        Bytes read over those of the source, and over the seconds of reading. Seconds of ranks are added, so that theirs
        is the mean rate of a rank.
    is_finite : bool
        Whether a whole pass has found no number that is not finite.

    Examples
    --------
    >>> traffic = Traffic(total_bytes=1000, read_bytes=2500, read_seconds=0.5)
    >>> traffic.passes, traffic.bytes_per_second
    (2.5, 5000.0)
    """

    total_bytes: int
    read_bytes: int = 0
    read_seconds: float = 0.0
    waited_seconds: float = 0.0
    is_finite: bool = dataclasses.field(default=False, repr=False)

    @property
    def passes(self) -> float:
        """Bytes read over those of the source."""
        return self.read_bytes / max(1, self.total_bytes)

    @property
    def bytes_per_second(self) -> float:
        """Bytes read over the seconds of reading and conversion; nan before the first."""
        return self.read_bytes / self.read_seconds if self.read_seconds else math.nan

    def __add__(self, other: Traffic) -> Traffic:
        """That of two sources, as of two ranks; seconds are added."""
        total, read = self.total_bytes + other.total_bytes, self.read_bytes + other.read_bytes
        seconds, waited = self.read_seconds + other.read_seconds, self.waited_seconds + other.waited_seconds
        return Traffic(total, read, seconds, waited)


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

    def take(self, places: Tensor) -> Tensor:
        """Samples at sorted positions, each as often as it is there; a new tensor.

        By default what ``read`` gives of all between the first and the last where at least half of them are wanted,
        else of one run of rows after the other. A source that reaches single rows faster defines its own.
        """
        first, end = int(places[0]), int(places[-1]) + 1
        if end - first <= 2 * len(places):
            return self.read(slice(first, end))[places - first]
        distinct = places.unique_consecutive()
        edges = [0, *((distinct.diff() > 1).nonzero()[:, 0] + 1).tolist(), len(distinct)]
        runs = (slice(int(distinct[a]), int(distinct[b - 1]) + 1) for a, b in pairwise(edges))
        found = torch.cat([self.read(run).clone() for run in runs])  # views would keep all that was read in memory
        return found if len(distinct) == len(places) else found[torch.searchsorted(distinct, places)]

    @property
    def is_mapped(self) -> bool:
        """Whether samples are mapped from files to memory, in which the system may keep them; by default not."""
        return False

    def place(self, row: int) -> str:
        """Where a sample is, for messages: by default its position, of a shard the name and the row in it."""
        return f"sample {row}"

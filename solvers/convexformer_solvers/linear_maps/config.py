"""The sizes that the products of linear maps go by."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MapConfig:
    """Numbers that linear maps go by.

    Parameters
    ----------
    temporary : int, default=2**18
        Numbers of a temporary on a CPU, which then stays in the cache: 2 MiB in float64. Fewer mean more calls. In
        products along the rows it has four times as many, or as many rows as a square of so many numbers.
    temporary_on_device : int, default=2**24
        The same on an accelerator, where calls take longer: 128 MiB in float64.
    chunk : int, default=2**23
        Numbers that are read from a disk at once, and of samples that are kept in memory when they are picked from a
        map of data on a disk: 32 MiB in float32. Fewer mean more calls, more leave the cache. For an accelerator it is
        four of its temporaries, as in products along the rows: 256 MiB in float32.
    line : int, default=16
        Numbers that the memory delivers together. Blocks are read one by one where that takes half the time of reading
        all of them, each of them as long as if it had so many numbers more.
    trial : int, default=256
        Samples that are compared before all are searched for repeated rows; half of them must be repeated.
    """

    temporary: int = 2**18
    temporary_on_device: int = 2**24
    chunk: int = 2**23
    line: int = 16
    trial: int = 256

    def limit(self, device: torch.device) -> int:
        """Numbers of a temporary on a device."""
        return self.temporary if device.type == "cpu" else self.temporary_on_device

    def read_at_once(self, device: torch.device) -> int:
        """Numbers that are read from a disk at once for a device."""
        return self.chunk if device.type == "cpu" else 4 * self.temporary_on_device


CONFIG = MapConfig()

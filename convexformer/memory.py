"""Memory that data may take: the limit that users set, and what there is."""

from __future__ import annotations

import torch

from convexformer_solvers.memory import as_bytes, free_memory

_UNKNOWN = 2**33  # bytes that count as free where the system does not say


def limit_of(memory_limit: int | str | None, device: torch.device) -> int:
    """The limit that users set, in bytes, or a quarter of what is free on the device.

    Examples
    --------
    >>> limit_of("1 kB", torch.device("cpu"))
    1000
    """
    return as_bytes(memory_limit) or (free_memory(device) or _UNKNOWN) // 4


def check_room(n_bytes: int, n_weightings: int, device: torch.device) -> None:
    """Raise ``ValueError`` where pooled tokens of so many bytes do not fit into the free memory.

    Examples
    --------
    >>> check_room(2**60, 128, torch.device("cpu"))
    Traceback (most recent call last):
    ...
    ValueError: the pooled tokens of 128 weightings take 1.15e+09 GB, and ... GB are free; set memory_limit ...
    """
    free = free_memory(device)
    if free is not None and n_bytes > free:
        raise ValueError(
            f"the pooled tokens of {n_weightings} weightings take {n_bytes / 1e9:.3g} GB, and {free / 1e9:.3g} GB are "
            "free; set memory_limit so that they are held in a file, or take a smaller dictionary"
        )

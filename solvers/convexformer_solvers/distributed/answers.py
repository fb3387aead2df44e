"""What the ranks answer to a command, and what rank 0 makes of their answers."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ranks import Ranks, packed, unpacked

_HEAD = struct.Struct("<q")  # the number in front of an answer


def _stacked(parts: Sequence[Any]) -> Tensor:
    return torch.stack([torch.as_tensor(part, dtype=getattr(part, "dtype", torch.float64)) for part in parts])


# What becomes of the results of all ranks; those of other names stay on their ranks.
_JOINED: dict[str, Callable[[list[Any]], Any]] = {
    "sum": lambda parts: sum(parts[1:], parts[0]),
    "max": lambda parts: _stacked(parts).amax(0),
    "min": lambda parts: _stacked(parts).amin(0),
    "list": list,
    "rows": list,
}


class Failed(NamedTuple):
    """The error of a rank."""

    error: BaseException
    of_values: bool  # whether it left the rank without some values


class Answer(NamedTuple):
    """What a rank has of a command."""

    combine: tuple[str, ...] = ()  # what becomes of each result
    results: tuple[Any, ...] = ()
    heights: Sequence[int] = ()  # samples of each rank
    data: bytes = b""  # results that rank 0 gets, as a message; empty where they are more than a frame has room for
    n_bytes: int = -1  # of such a message; -1 where there is an error
    failed: Failed | None = None

    @classmethod
    def of(cls, combine: tuple[str, ...], found: Any, heights: Sequence[int], room: int) -> Answer:
        """The answer that has what a method returned."""
        results = found if isinstance(found, tuple) else (found,)
        sent = [part for how, part in zip(combine, results, strict=True) if how in _JOINED]
        n_numbers = sum(part.nbytes for part in sent if isinstance(part, Tensor))
        data = packed(sent) if n_numbers < room else b""
        return cls(combine, results, heights, data, len(data) or n_numbers + mmap.PAGESIZE)

    def frame(self, length: int) -> bytes:
        """A message of some length: the number of bytes, and so many if there is room for them."""
        whole = _HEAD.pack(self.n_bytes) + self.data
        return (whole if len(whole) <= length else whole[: _HEAD.size]).ljust(length, b"\0")

    def collected(self, ranks: Ranks) -> list[Any]:
        """The results of all ranks, on rank 0, by a message for each of them."""
        return [self._collected(ranks, *pair) for pair in zip(self.combine, self.results, strict=True)]

    def _collected(self, ranks: Ranks, how: str, part: Any) -> Any:
        if how == "sum":
            return ranks.reduced(part)
        if how == "rows":
            return ranks.rows(part, self.heights)
        found = ranks.gather(part) if how in _JOINED else None
        return part if found is None else _JOINED[how](found)

    def joined(self, frames: Sequence[bytes]) -> list[Any]:
        """The results of all ranks, on rank 0, from their frames."""
        others = [iter(unpacked(frame[_HEAD.size :])) for frame in frames[1:]]

        def joined(how: str, own: Any) -> Any:
            if how not in _JOINED:
                return own
            parts = [next(other) for other in others]
            return _JOINED[how]([own, *(part.to(own.device) if isinstance(own, Tensor) else part for part in parts)])

        return [joined(*pair) for pair in zip(self.combine, self.results, strict=True)]


def sizes_in(frames: Sequence[bytes]) -> list[int]:
    """Bytes that each frame needs, with the number in front; a negative number where there is an error."""
    sizes = [_HEAD.unpack_from(frame)[0] for frame in frames]
    return [size + _HEAD.size if size >= 0 else size for size in sizes]

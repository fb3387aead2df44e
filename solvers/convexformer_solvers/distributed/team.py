"""Commands of rank 0, which all ranks carry out on maps and values of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

import torch

from convexformer_solvers.linear_maps.base import LinearMap

from .operations import Operation
from .ranks import Ranks, interrupts_held, interrupts_ignored, packed, plain, unpacked


class Command(NamedTuple):
    """What the ranks do with something of theirs, after operations on values of theirs."""

    method: str
    name: int  # of what has the method
    combine: tuple[str, ...]  # what becomes of each result
    common: Any  # arguments that all ranks have; packed in a message, with names for values of the ranks
    heights: tuple[int, ...] = ()  # samples of each rank
    target: int = 0  # name of what is kept of the results
    has_own: bool = False  # whether each rank has arguments of its own
    before: tuple[Operation | int, ...] = ()  # operations, and names that are needed no more


class End(NamedTuple):
    """The end of the work of rank 0: its result, packed, or error."""

    result: bytes = b""
    error: BaseException | None = None


class _Failed(NamedTuple):
    """The error of a rank, as the others get it."""

    error: BaseException
    of_values: bool  # whether values of the ranks are not what they should be


class _Reported(Exception):
    """An error that rank 0 raises for all."""


class Team:
    """The maps and values of this rank by name, and the commands that all ranks carry out together.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    local : LinearMap
        The map of this rank's samples, whose name is 0.
    """

    def __init__(self, ranks: Ranks, local: LinearMap) -> None:
        self.ranks, self.local = ranks, local
        self.parts: dict[int, Any] = {0: local}
        self._names = count(1)
        self._lost: BaseException | None = None  # the error that left the ranks without some values
        self._noted: list[Operation | int] = []
        self._forgotten: list[int] = []

    # Rank 0

    def new_name(self) -> int:
        return next(self._names)

    def forget(self, name: int) -> None:
        """Let the ranks drop what has a name, after all that has been noted."""
        self._forgotten.append(name)  # without the lock, as it may be called within any other method

    def note(self, operation: Operation) -> None:
        """Have an operation carried out before the next command."""
        with self.ranks.lock:
            self._note_forgotten()
            self._noted.append(operation)

    def _note_forgotten(self) -> None:
        while self._forgotten:
            self._noted.append(self._forgotten.pop())

    def keeps(self, n_samples: int) -> bool:
        """Whether ranks work on values of so many samples by themselves."""
        return n_samples >= self.ranks.least_samples

    def lead(self, command: Command, own: Sequence[dict[str, Any]] | None = None) -> Any:
        """Carry out a command and return what has been combined."""
        with self.ranks.lock, interrupts_held():
            if self._lost is not None:
                raise RuntimeError(f"the ranks cannot go on: {self._lost}") from self._lost
            common = packed(command.common, _name_of)
            messages = None if own is None else [packed(part) for part in own]
            self._note_forgotten()
            command = command._replace(common=common, before=tuple(self._noted), has_own=own is not None)
            self._noted = []
            self.ranks.broadcast(command)
            if messages is not None:
                self.ranks.scatter(messages)
            return self._carry_out(command, {} if own is None else own[0])

    def end(self, result: bytes = b"", error: BaseException | None = None) -> None:
        """Tell the others that the work of rank 0 is done."""
        with self.ranks.lock, interrupts_held():
            self._lost = RuntimeError("their common work has ended")
            self.ranks.broadcast(End(result, error))

    # All ranks

    def follow(self) -> Any:
        """Carry out the commands of rank 0 until its work is done; its result is returned, or its error raised."""
        with interrupts_ignored():
            while True:
                command = self.ranks.broadcast()
                if isinstance(command, End):
                    break
                own = unpacked(self.ranks.scatter()) if command.has_own else {}
                with suppress(_Reported):
                    self._carry_out(command, own)
        if command.error is not None:
            raise command.error
        return unpacked(command.result)

    def _carry_out(self, command: Command, own: dict[str, Any]) -> Any:
        failed: _Failed | None = None
        results: list[Any] = []
        at_values = True
        try:
            for step in command.before:
                if isinstance(step, Operation):
                    step.run(self.parts, self.ranks.rank, self.local.device)
                else:
                    del self.parts[step]
            at_values = False
            here = self.parts[command.name]
            common = unpacked(command.common, self.parts.__getitem__)
            arguments = {name: _on(value, here.device) for name, value in (common | own).items()}
            found = getattr(here, command.method)(**arguments)
            pairs = zip(command.combine, found if isinstance(found, tuple) else (found,), strict=True)
            results = [packed(part) if how == "list" else part for how, part in pairs]
        except Exception as error:
            failed = _Failed(plain(error), at_values)
        self._agree(failed)
        combined = [self._combined(*pair, command) for pair in zip(command.combine, results, strict=True)]
        return combined[0] if len(combined) == 1 else tuple(combined)

    def _agree(self, failed: _Failed | None) -> None:
        """Raise the error of the first rank that has one, on rank 0; the others go on to listen."""
        any_failed = torch.tensor([failed is not None], dtype=torch.int32)
        self.ranks.all_sum(any_failed)
        if not bool(any_failed):
            return
        rank, first = next(pair for pair in enumerate(self.ranks.all(failed)) if pair[1] is not None)
        if self.ranks.rank != 0:
            raise _Reported
        error = type(first.error)(f"rank {rank}: {first.error}")
        if first.of_values:
            self._lost = error
        raise error

    def _combined(self, how: str, part: Any, command: Command) -> Any:
        if how == "sum":
            return self.ranks.reduced(part)
        if how in ("max", "min"):  # not by a reduction of gloo, which loses NaN
            found = self.ranks.gather(
                part if isinstance(part, torch.Tensor) else torch.tensor(part, dtype=torch.float64)
            )
            return None if found is None else getattr(torch.stack(found), f"a{how}")(0)
        if how == "keep":
            self.parts[command.target] = part.contiguous() if isinstance(part, torch.Tensor) else part
            return part
        if how == "none":
            return None
        if how == "list":
            found = self.ranks.gather_messages(part)
            return None if found is None else [unpacked(data) for data in found]
        return self.ranks.rows(part, command.heights)


def _on(value: Any, device: torch.device) -> Any:
    """A tensor, or slopes, of a message on the device of what takes it."""
    return value.to(device=device) if hasattr(value, "to") else value


def _name_of(value: Any) -> int | None:
    return getattr(value, "name_on_ranks", None) if isinstance(value, torch.Tensor) else None

"""Commands of rank 0, which all ranks carry out on maps and values of their own."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from timeit import repeat
from typing import Any, NamedTuple, NoReturn, cast

import torch

from convexformer_solvers.linear_maps.base import LinearMap

from .answers import Answer, Failed, sizes_in
from .operations import Operation, Plan
from .ranks import Ranks, interrupts_held, interrupts_ignored, named, packed, plain, unpacked


class Command(NamedTuple):
    """What the ranks do with something of theirs, after operations on values of theirs."""

    method: str
    name: int  # of what has the method
    combine: tuple[str, ...]  # what becomes of each result
    common: Any  # arguments that all ranks have; packed in a message, with names for values of the ranks
    heights: tuple[int, ...] = ()  # samples of each rank
    target: int = 0  # name of what is kept of the results
    sizes: tuple[int, ...] = ()  # bytes of each rank's own arguments, if any
    before: tuple[Operation | int, ...] = ()  # operations, and names that are needed no more
    room: int = mmap.PAGESIZE  # bytes of a rank's answer


class End(NamedTuple):
    """The end of the work of rank 0: its result, packed, or error."""

    result: bytes = b""
    error: BaseException | None = None


class Ask(NamedTuple):
    """What answers to the last command had no room for: the errors, or else the results."""

    errors: bool


class Team:
    """The maps and values of this rank by name, and the commands that all ranks carry out together.

    The map of this rank's samples, `local`, has the name 0.
    """

    def __init__(self, ranks: Ranks, local: LinearMap) -> None:
        self.ranks, self.local = ranks, local
        self.parts: dict[int, Any] = {0: local}
        self.plans: dict[Any, Plan | None] = {}  # of operations on values of the samples
        self._names = count(1)
        self._lost: BaseException | None = None  # the error that left the ranks without some values
        self._noted: list[Operation | int] = []
        self._rooms: dict[str, int] = {}  # bytes of a rank's answer, by method
        self._answer = Answer()
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

    def measure(self) -> None:
        """Measure the seconds of a command, and by it ``least_samples``, unless they are known."""
        ranks = self.ranks
        if not ranks.command_seconds:
            command = Command("__len__", 0, ("list",), {})
            ranks.command_seconds = min(repeat(lambda: self.lead(command), number=1))
        if ranks.least_samples is None:
            ranks.least_samples = int(ranks.command_seconds * ranks.rate / torch.float64.itemsize)

    def lead(self, command: Command, own: Sequence[dict[str, Any]] | None = None) -> Any:
        """Carry out a command and return what has been combined."""
        with self.ranks.lock, interrupts_held():
            if self._lost is not None:
                raise RuntimeError(f"the ranks cannot go on: {self._lost}") from self._lost
            common = packed(command.common, _name_of)
            messages = None if own is None else [packed(part) for part in own]
            self._note_forgotten()
            sizes = tuple(len(data) for data in messages or ())
            room = self._rooms.get(command.method, mmap.PAGESIZE)
            command = command._replace(common=common, sizes=sizes, before=tuple(self._noted), room=room)
            self._noted = []
            self.ranks.broadcast(command)
            if messages is not None:
                self.ranks.scatter(sizes, messages)
            frames = self._carry_out(command, lambda: {} if own is None else own[0])
            return self._joined(command, cast(list[bytes], frames))

    def _joined(self, command: Command, frames: list[bytes]) -> Any:
        """What has been combined of the answers of all ranks."""
        sizes = sizes_in(frames)
        if min(sizes) < 0:
            if "keep" in command.combine:
                self.forget(command.target)
            self._raise_first(self._asked(Ask(errors=True)))
        if max(sizes) <= command.room:
            joined = self._answer.joined(frames)
        else:
            if max(sizes) <= self.ranks.longest_frame:
                self._rooms[command.method] = max(sizes)
            joined = self._asked(Ask(errors=False))
        return joined[0] if len(joined) == 1 else tuple(joined)

    def _asked(self, ask: Ask) -> list[Any]:
        self.ranks.broadcast(ask)
        return cast(list[Any], self._tell(ask))

    def _raise_first(self, of_ranks: list[Failed | None]) -> NoReturn:
        errors = [(rank, failed) for rank, failed in enumerate(of_ranks) if failed is not None]
        rank, first = errors[0]
        error = named(rank, first.error)
        if any(failed.of_values for _, failed in errors):
            self._lost = error
        raise error

    def end(self, result: bytes = b"", error: BaseException | None = None) -> None:
        """Tell the others that the work of rank 0 is done."""
        with self.ranks.lock, interrupts_held():
            self._lost = RuntimeError("their common work has ended")
            self.ranks.broadcast(End(result, error))

    # All ranks

    def follow(self) -> Any:
        """Carry out the commands of rank 0 until its work is done; its result is returned, or its error raised."""
        with interrupts_ignored():
            while not isinstance(command := self.ranks.broadcast(), End):
                if isinstance(command, Ask):
                    self._tell(command)
                else:
                    own = packed({}) if not command.sizes else self.ranks.scatter(command.sizes)
                    self._carry_out(command, partial(unpacked, own))
        if command.error is not None:
            raise command.error
        return unpacked(command.result)

    def _carry_out(self, command: Command, own: Callable[[], dict[str, Any]]) -> list[bytes] | None:
        """Carry out a command and answer; rank 0 gets the frames of all answers."""
        at_values = True
        try:
            for step in command.before:
                if isinstance(step, Operation):
                    step.run(self.parts, self.ranks.rank, self.local.device)
                else:
                    self.parts.pop(step, None)
            at_values = False
            here = self.parts[command.name]
            given = unpacked(command.common, self.parts.__getitem__) | own()
            for name, value in given.items():
                if hasattr(value, "to"):  # a tensor, or slopes
                    given[name] = value.to(device=here.device)
            found = getattr(here, command.method)(**given)
            self._answer = Answer.of(command.combine, found, command.heights, command.room)
            for how, part in zip(self._answer.combine, self._answer.results, strict=True):
                if how == "keep":
                    self.parts[command.target] = part.contiguous() if isinstance(part, torch.Tensor) else part
        except Exception as error:
            self._answer = Answer(failed=Failed(plain(error), at_values))
        return self.ranks.gather_frames(self._answer.frame(command.room))

    def _tell(self, ask: Ask) -> list[Any] | None:
        """Answer what the last frame had no room for, and drop it."""
        answer, self._answer = self._answer, Answer()
        return self.ranks.gather(answer.failed) if ask.errors else answer.collected(self.ranks)


def _name_of(value: Any) -> int | None:
    return getattr(value, "name_on_ranks", None) if isinstance(value, torch.Tensor) else None

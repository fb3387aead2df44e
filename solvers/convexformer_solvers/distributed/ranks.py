"""Messages between rank 0, which runs an algorithm, and the other ranks, which multiply for it.

Rank 0 alone decides: the others get commands, so no rank can stop, branch or round differently from the rest.
"""

from __future__ import annotations

import atexit
import io
import mmap
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from timeit import repeat
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .config import DistributedConfig
from .heartbeat import Heartbeats, RankError

_current: Ranks | None = None


def ranks(config: DistributedConfig | None = None) -> Ranks | None:
    """The ranks of the default process group; None where there is none, it has one rank, or rank 0 leads the others.

    Parameters
    ----------
    config : DistributedConfig, optional
        Counts in the first call of a group. Default: that of ``DistributedConfig``.

    Returns
    -------
    Ranks or None

    Examples
    --------
    >>> ranks() is None  # one process, without torchrun
    True
    """
    global _current
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    if _current is not None and _current.busy:
        return None
    if _current is None or _current.world is not dist.group.WORLD:
        _current = Ranks(config or DistributedConfig())
    return _current


@atexit.register
def _forget() -> None:
    """Wait for gloo's threads: one that frees a tensor when the interpreter has ended would abort the process."""
    global _current
    if _current is not None and not _current.heartbeats.failed:
        _current.end()
        _current = None


class Ranks:
    """Collective operations of all ranks, that end with an error where one of them has died."""

    def __init__(self, config: DistributedConfig) -> None:
        self.config, self.world = config, dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.lock = threading.RLock()
        described: list[Any] = [None] * self.size
        here = socket.gethostname()
        # Other hosts reach rank 0 at the address that ``torchrun`` gave.
        store = os.environ.get("MASTER_ADDR") or here
        dist.all_gather_object(described, (f"rank {self.rank} (process {os.getpid()} on {here})", here, store))
        self.names, hosts, stores = (list(part) for part in zip(*described, strict=True))
        host = "127.0.0.1" if len(set(hosts)) == 1 else stores[0]
        address: list[Any] = [None]
        if self.rank == 0:
            self.heartbeats = Heartbeats(0, self.names, None, config)
            address = [(host, self.heartbeats.port)]
        dist.broadcast_object_list(address, src=0)
        if self.rank != 0:
            self.heartbeats = Heartbeats(self.rank, self.names, address[0], config)
        # Waiting ends by signs of life, as a pass over the data may take hours.
        self._group = self._watched(lambda: dist.new_group(backend="gloo", timeout=timedelta(days=30)))
        self.rate = 0.0  # bytes per second of a sum over the ranks; 0 until it is measured
        self.command_seconds = 0.0  # of a command without arguments; a team measures it on rank 0
        self.least_samples = config.least_samples
        self.longest_frame = mmap.PAGESIZE  # bytes that take as long as one more message
        self.busy = False  # whether rank 0 runs an algorithm, for which the others multiply

    def _watched(self, run: Callable[[], Any]) -> Any:
        """What `run` gives, which may wait for ranks that have died."""
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(run()), daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(self.config.heartbeat)
            self.heartbeats.check()
        if not found:
            raise self.heartbeats.broken(RuntimeError("no connection"))
        return found[0]

    def end(self) -> None:
        """Give up the group of the messages, whose threads end with it."""
        if self.world is dist.group.WORLD:
            dist.destroy_process_group(self._group)
        self.world = self._group = None

    def wait(self, start: Callable[[], Any], ended: Callable[[Any, float], bool] | None = None) -> None:
        """Start a collective operation and wait for its end; ``RankError`` where a rank has died."""
        ended = ended or _ended
        try:
            if self.heartbeats.failed:  # the next message of the others belongs to the work that has failed
                self.heartbeats.check(at_once=True)
            work = start()
            while not ended(work, self.config.heartbeat):
                self.heartbeats.check()
        except RankError:
            raise
        except KeyboardInterrupt:  # the others wait for a message that does not come
            self.heartbeats.failure(f"{self.names[self.rank]} was interrupted")
            raise
        except RuntimeError as error:
            raise self.heartbeats.broken(error) from error

    # Objects

    def broadcast(self, value: Any = None) -> Any:
        """An object of rank 0, on all ranks."""
        room = mmap.PAGESIZE - 8  # bytes of the first message after their number; more take a second one
        data = packed(value) if self.rank == 0 else b""
        first = _padded(len(data).to_bytes(8, "little") + data[:room], mmap.PAGESIZE)
        self.wait(lambda: dist.broadcast(first, 0, group=self._group, async_op=True))
        length, parts = int.from_bytes(first[:8].numpy().tobytes(), "little"), [first[8:]]
        if length > room:
            parts.append(_padded(data[room:], length - room))
            self.wait(lambda: dist.broadcast(parts[1], 0, group=self._group, async_op=True))
        return value if self.rank == 0 else unpacked(b"".join(part.numpy().tobytes() for part in parts))

    def scatter(self, sizes: Sequence[int], messages: Sequence[bytes] | None = None) -> bytes:
        """Each rank's message, of known bytes, of a list on rank 0."""
        height = max(sizes)
        mine = torch.empty(height, dtype=torch.uint8)
        parts = None if messages is None else [_padded(data, height) for data in messages]
        self.wait(lambda: dist.scatter(mine, parts, 0, group=self._group, async_op=True))
        return mine.numpy().tobytes()[: sizes[self.rank]] if messages is None else messages[0]

    def gather(self, value: Any) -> list[Any] | None:
        """The objects of all ranks, on rank 0."""
        data = packed(value)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        self.all_sum(sizes)
        found = self.gather_frames(data.ljust(int(sizes.max()), b"\0"))  # whose pickle ends before the zeros
        return None if found is None else [unpacked(frame) for frame in found]

    def gather_frames(self, frame: bytes) -> list[bytes] | None:
        """The frames of all ranks, which are of equal length, on rank 0: one message of each rank, by no other."""
        mine = _padded(frame, len(frame))
        found = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == 0 else None
        self.wait(lambda: dist.gather(mine, found, 0, group=self._group, async_op=True))
        return None if found is None else [part.numpy().tobytes() for part in found]

    def all(self, value: Any) -> list[Any]:
        """The objects of all ranks, on all of them."""
        return self.broadcast(self.gather(value))

    # Tensors

    def all_sum(self, values: Tensor) -> None:
        """Sum over the ranks of a tensor on the CPU, in place."""
        self.wait(lambda: dist.all_reduce(values, group=self._group, async_op=True))

    def reduced(self, values: Tensor) -> Tensor:
        """Sum over the ranks; only that of rank 0 counts. By nccl where tensors are on GPUs."""
        if values.device.type == "cuda" and dist.is_nccl_available() and "nccl" in str(dist.get_backend()):
            self.wait(lambda: dist.reduce(values, 0, async_op=True), _ended_on_gpu)
            return values
        on_cpu = values.detach().cpu().contiguous()
        self.wait(lambda: dist.reduce(on_cpu, 0, group=self._group, async_op=True))
        return on_cpu.to(values.device)

    def rows(self, values: Tensor, heights: Sequence[int]) -> list[Tensor] | None:
        """The rows of all ranks, of which each has so many, on rank 0."""
        mine = values.detach().cpu().contiguous()
        kind = mine.dtype
        mine = mine.view(torch.uint8) if kind == torch.bool else mine
        padded = mine.new_zeros((max(heights), *mine.shape[1:]))
        padded[: len(mine)] = mine
        found = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        self.wait(lambda: dist.gather(padded, found, 0, group=self._group, async_op=True))
        if found is None:
            return None
        parts = [part[:height] for part, height in zip(found, heights, strict=True)]
        return [part.view(kind).to(values.device) for part in parts]

    def measure(self) -> None:
        """Measure ``rate`` and ``longest_frame`` in the first call; all ranks take part."""
        if self.rate:
            return
        small, large = torch.zeros(1), torch.zeros(2**20)
        self.all_sum(small)
        latency = min(repeat(lambda: self.all_sum(small), number=1))
        whole = min(repeat(lambda: self.reduced(large), number=1))
        self.rate = large.numel() * large.element_size() / max(whole - latency, latency)
        self.longest_frame = max(mmap.PAGESIZE, int(self.rate * latency / max(1, 2 * self.size - 2)))


def _ended(work: Any, seconds: float) -> bool:
    """Whether a collective operation of gloo ends within some seconds; its error where it has one."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises its error; without one it has ended since the time ran out
    return True


def _ended_on_gpu(work: Any, seconds: float) -> bool:
    """The same of nccl, which would end all of them where one is waited for in vain."""
    end = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > end:
            return False
        time.sleep(seconds / 2_000)
    work.wait()
    return True


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C waits for the end of what must not end in between, as a message that the other ranks take part in."""
    pressed: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, lambda *args: pressed.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            before(*pressed[0])


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ctrl-C is for rank 0, which tells the others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, so that they come back on the CPU, and the names of some objects in their place."""

    def __init__(self, buffer: io.BytesIO, name_of: Callable[[Any], Any] | None) -> None:
        super().__init__(buffer, protocol=5)
        self._name_of = name_of

    def persistent_id(self, obj: Any) -> Any:
        return None if self._name_of is None else self._name_of(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Parameter):
            return nn.Parameter, (obj.detach(), obj.requires_grad)
        if isinstance(obj, Tensor):
            return _as_tensor, (obj.numpy(force=True),)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Puts objects in the place of their names."""

    def __init__(self, data: bytes, named: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._named = named

    def persistent_load(self, pid: Any) -> Any:
        assert self._named is not None
        return self._named(pid)


def _as_tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def packed(value: Any, name_of: Callable[[Any], Any] | None = None) -> bytes:
    """An object as a message; `name_of` gives the names of objects that are sent by name, and None of others."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, name_of).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            "what other ranks get must be picklable, such as arrays, estimators and functions at the top of a module; "
            f"got: {error}"
        ) from error
    return buffer.getvalue()


def unpacked(data: bytes, named: Callable[[Any], Any] | None = None) -> Any:
    """The object of a message; `named` gives objects by their names."""
    return _Unpickler(data, named).load()


def plain(error: BaseException) -> BaseException:
    """An error as other ranks raise it: of the first kind of Python that it is of and that a message makes.

    The message is its only argument.
    """
    message = error.args[0] if len(error.args) == 1 and isinstance(error.args[0], str) else str(error)
    for kind in type(error).__mro__:
        if kind.__module__ == "builtins" and kind not in (Exception, BaseException):
            with suppress(TypeError):
                return kind(message)
    return RuntimeError(f"{type(error).__name__}: {message}")


def named(rank: int, error: BaseException) -> BaseException:
    """A plain error of a rank, with the rank in its message."""
    return type(error)(f"rank {rank}: {error.args[0]}")


def _padded(data: bytes, height: int) -> Tensor:
    return torch.frombuffer(bytearray(data.ljust(height, b"\0")), dtype=torch.uint8)

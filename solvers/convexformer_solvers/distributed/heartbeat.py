"""Signs of life of the ranks of a process group, by which one that has died is named."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from .config import DistributedConfig

_LEFT = "left"


class RankError(RuntimeError):
    """A rank of the process group has died, does not answer or has failed; the message says which."""


class Heartbeats:
    """Counters that the ranks raise in a store, which rank 0 makes; others have its `address`.

    Messages call the ranks by their `names`.
    """

    def __init__(self, rank: int, names: list[str], address: tuple[str, int] | None, config: DistributedConfig) -> None:
        self.rank, self.names, self.config = rank, names, config
        host, port = address or ("0.0.0.0", 0)
        wait = timedelta(seconds=config.timeout)
        self._store = dist.TCPStore(host, port, is_master=rank == 0, timeout=wait, wait_for_workers=False)
        self.port = self._store.port
        if rank == 0:  # before the others begin, as one may end before its first sign of life
            for other in range(len(names)):
                self._store.set(str(other), "")
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._looked, self._stopped, self.failed = 0.0, threading.Event(), False
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")
        self._thread.start()
        atexit.register(self.leave)

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store has gone with rank 0, which those who wait notice
            for beat in itertools.count():
                self._store.set(str(self.rank), str(beat))
                if self._stopped.wait(self.config.heartbeat):
                    return

    def leave(self) -> None:
        """Tell the others that this rank ends without a fault; after a fault, end without waiting for them."""
        if self.failed:
            if self.rank == 0:  # whose store goes with it, and the others are to read there what has failed
                time.sleep(2.5 * self.config.heartbeat)
            # Threads of gloo wait for a rank that does not answer, and a normal end waits for those threads.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        self._stopped.set()
        self._thread.join()
        with suppress(RuntimeError):
            self._store.set(str(self.rank), _LEFT)

    def check(self, at_once: bool = False) -> None:
        """Raise ``RankError`` where a rank has failed or shows no sign of life; looks once in a while."""
        now = time.monotonic()
        if not at_once and now - self._looked < self.config.heartbeat:
            return
        self._looked = now
        try:
            if self._store.check(["failure"]):
                raise RankError(self._store.get("failure").decode())
            counts = self._counts()
        except RuntimeError as error:
            self.failed = True
            if isinstance(error, RankError):
                raise
            raise RankError(f"{self.names[0]} has ended or does not answer: {_first_line(error)}") from error
        for rank, count in counts.items():
            last, since = self._seen.setdefault(rank, (count, now))
            if count != last:
                self._seen[rank] = count, now
            elif count != _LEFT.encode() and now - since > self.config.timeout:
                raise self.failure(f"{self.names[rank]} has shown no sign of life for {self.config.timeout:.0f} s")

    def failure(self, message: str) -> RankError:
        """The error of this message, of which the others are told."""
        with suppress(RuntimeError):
            self._store.set("failure", message)
        self.failed = True
        return RankError(message)

    def dead(self) -> list[int]:
        """Ranks that show no sign of life now: two looks at the counters."""
        first = self._counts()
        time.sleep(2.5 * self.config.heartbeat)
        second = self._counts()
        return [rank for rank, count in second.items() if rank != self.rank and count == first.get(rank)]

    def _counts(self) -> dict[int, bytes]:
        return dict(enumerate(self._store.multi_get([str(rank) for rank in range(len(self.names))])))

    def broken(self, error: Exception) -> RankError:
        """The error where a connection has failed: which rank has ended, if that can be found."""
        try:
            self.check(at_once=True)
            dead = self.dead()
            self.check(at_once=True)
        except RankError as known:
            return known
        except RuntimeError:
            dead = [0]
        culprits = " and ".join(self.names[rank] for rank in dead) or "a rank"
        return self.failure(f"{culprits} has ended or does not answer, and its samples with it: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    """What an error says, without the addresses that follow."""
    return str(error).partition("\n")[0]

"""The numbers by which ranks wait for each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DistributedConfig:
    """Numbers of the communication between ranks.

    Parameters
    ----------
    timeout : float, default=60
        Seconds without a sign of life after which a rank counts as dead. A closed connection is noticed at once.
    heartbeat : float, default=1
        Seconds between two signs of life of a rank, and between two looks at those of the others.
    shortest_wait, longest_wait : float, default=2e-5 and 5e-4
        Seconds between two looks at whether a message has come, at first and at last.
    frame : int, default=4096
        Bytes of the first message of a command; what is longer takes a second message.
    """

    timeout: float = 60.0
    heartbeat: float = 1.0
    shortest_wait: float = 2e-5
    longest_wait: float = 5e-4
    frame: int = 4096

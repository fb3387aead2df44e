"""Wall time of work that devices do on their own."""

from __future__ import annotations

import time

import torch


def finish_work(device: torch.device | str) -> None:
    """Wait until a device has done what it was given; the CPU always has.

    Parameters
    ----------
    device : torch.device or str
        The device. Those whose torch module has no ``synchronize`` are taken to be done.
    """
    device = torch.device(device)
    synchronize = getattr(getattr(torch, device.type, None), "synchronize", None)
    if device.type != "cpu" and synchronize is not None:
        synchronize(device)


class Stopwatch:
    """Wall time spent in its ``with`` blocks, work that a device has still to do included.

    Parameters
    ----------
    device : torch.device
        Where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        finish_work(self.device)
        self.seconds += time.perf_counter() - self._began

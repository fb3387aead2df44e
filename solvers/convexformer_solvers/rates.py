"""How fast this machine multiplies matrices and reads memory, by which algorithms are chosen."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second, in one precision.

    Attributes
    ----------
    product : float
        Floating-point operations of a product of large matrices.
    read : float
        Numbers read in a product of a matrix, larger than the caches, with one column.
    calls : float
        Calls of a small operation.
    """

    product: float
    read: float
    calls: float

    @property
    def work_of_a_read(self) -> float:
        """Floating-point operations of large products in the time in which a number is read from memory."""
        return self.product / self.read

    @property
    def work_of_a_call(self) -> float:
        """Floating-point operations of large products in the time of a call."""
        return self.product / self.calls


def machine_rates(dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Rates:
    """The rates of this machine at the present number of threads, timed once a process in some milliseconds.

    Each is rounded to a power of the root of two, so that two runs on one machine decide alike as a rule.

    Parameters
    ----------
    dtype : torch.dtype, default=torch.float64
        Precision of the products.
    device : torch.device or str, default="cpu"
        Where they are computed.

    Returns
    -------
    Rates

    Examples
    --------
    >>> machine_rates().work_of_a_read > 1
    True
    """
    return _measured(dtype, str(device), torch.get_num_threads())


@functools.cache
def _measured(dtype: torch.dtype, device: str, n_threads: int) -> Rates:
    with torch.no_grad():
        square = torch.ones((384, 384), dtype=dtype, device=device)
        product = 2 * 384**3 / _seconds(lambda: square @ square)
        matrix = torch.ones((2**11, 2**11), dtype=dtype, device=device)
        column = torch.ones(2**11, dtype=dtype, device=device)
        read = matrix.numel() / _seconds(lambda: matrix @ column)
        number = torch.ones(1, dtype=dtype, device=device)
        calls = 1 / _seconds(lambda: number + number)
    return Rates(*(2 ** (round(2 * math.log2(rate)) / 2) for rate in (product, read, calls)))


def _seconds(run: Callable[[], torch.Tensor]) -> float:
    """The shortest of some runs: what else the machine does only adds to the others."""
    best = math.inf
    for _ in range(4):
        began = time.perf_counter()
        result = run()
        if result.device.type != "cpu":
            result.flatten()[0].item()  # which waits for the device
        best = min(best, time.perf_counter() - began)
    return best

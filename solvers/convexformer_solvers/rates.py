"""Arithmetic and memory throughput of this machine (roofline model), by which algorithms are chosen."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Seconds of products before the first that counts: some processors take 15 ms to reach the full rate of wide vectors.
WARM_UP = 0.03


@dataclass(frozen=True)
class Rates:
    """Operations per second in one precision."""

    product: float  # floating-point operations of a product of large matrices
    read: float  # numbers read in a product of a matrix of 2,048 rows and columns with one column; large caches hold it
    calls: float  # calls of a small operation
    # Whether products of data with several columns take less time as those of contiguous rows with the transpose.
    turns_columns: bool = False

    @property
    def work_of_a_read(self) -> float:
        """Floating-point operations of large products in the time of reading a number."""
        return self.product / self.read

    @property
    def work_of_a_call(self) -> float:
        """Floating-point operations of large products in the time of a call."""
        return self.product / self.calls


def machine_rates(dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Rates:
    """The rates in a precision on a device at the present number of threads, timed once a process in milliseconds.

    Each is rounded to a power of the root of two, so that two runs on one machine decide alike as a rule.
    """
    return _measured(dtype, str(device), torch.get_num_threads())


@functools.cache
def _measured(dtype: torch.dtype, device: str, n_threads: int) -> Rates:
    with torch.no_grad():
        number, square, large = (torch.ones((n, n), dtype=dtype, device=device) for n in (1, 384, 2**11))
        began = time.perf_counter()
        while time.perf_counter() - began < WARM_UP:
            square @ square
        call = _seconds(lambda: number + number)
        square, of_product = _longer_than_calls(lambda square: square @ square, square, call)
        large, of_read = _longer_than_calls(lambda large: large @ large[0], large, call)
        columns = large[:, :8].contiguous()
        turned = _seconds(lambda: (columns.T.contiguous() @ large.T).T.contiguous())
        turns_columns = turned < _seconds(lambda: large @ columns)
    found = (2 * len(square) ** 3 / of_product, large.numel() / of_read, 1 / call)
    product, read, calls = (2 ** (round(2 * math.log2(rate)) / 2) for rate in found)
    return Rates(product, read, calls, turns_columns)


def _longer_than_calls(run: Callable[[Tensor], Tensor], ones: Tensor, call: float) -> tuple[Tensor, float]:
    """A square of ones, doubled until a run with it takes longer than several calls, and seconds of the run."""
    while (seconds := _seconds(functools.partial(run, ones))) < 8 * call:  # as on an accelerator
        ones = ones.new_ones((2 * len(ones),) * 2)
    return ones, seconds


def _seconds(run: Callable[[], Tensor]) -> float:
    """The shortest of some runs, as other processes only lengthen them; on an accelerator of some batches of runs."""
    best = math.inf
    for _ in range(4):
        began, n_runs = time.perf_counter(), 1
        result = run()
        if result.device.type != "cpu":  # calls do not wait for each other there
            n_runs = 16
            for _ in range(n_runs - 1):
                result = run()
            result.flatten()[0].item()  # which waits for the device
        best = min(best, (time.perf_counter() - began) / n_runs)
    return best

"""The processes that ``torchrun`` starts, of which the first prints and writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta


@contextmanager
def process_group(device: str | None) -> Iterator[tuple[int, str | None]]:
    """The rank of this process in the group that ``torchrun`` has started, and its device; rank 0 without one.

    On ``"cuda"`` each process of a host has a device of its own.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0, device
        return
    import torch
    import torch.distributed as dist

    from convexformer_solvers.distributed import DistributedConfig

    on_cuda = device is not None and torch.device(device).type == "cuda"
    if on_cuda:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=DistributedConfig().timeout)
    dist.init_process_group("nccl" if on_cuda else "gloo", timeout=timeout)
    try:
        yield dist.get_rank(), device
    finally:
        dist.destroy_process_group()

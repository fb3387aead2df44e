"""The processes that ``torchrun`` starts, of which the first prints and writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from .inputs import CommandError


def n_processes() -> int:
    """How many processes ``torchrun`` has started."""
    from convexformer.storage.shards import of_torchrun

    return of_torchrun("WORLD_SIZE", 1)


def check_one_process(command: str) -> None:
    """Raise where ``torchrun`` has started several processes, each of which would do all of the work."""
    if n_processes() > 1:
        raise CommandError(
            f"{command} runs in one process; start it without torchrun, or unset the variable WORLD_SIZE"
        )


def own_device(device: str | None) -> str | None:
    """The device of this process: on ``"cuda"`` each process that ``torchrun`` starts on a host has one of its own."""
    if device != "cuda" or n_processes() == 1:
        return device
    if "LOCAL_RANK" not in os.environ:
        raise CommandError(
            "--device cuda needs the variable LOCAL_RANK, which torchrun sets; start the processes with torchrun, or "
            "give each its device, such as --device cuda:0"
        )
    return f"cuda:{os.environ['LOCAL_RANK']}"


@contextmanager
def process_group(device: str | None) -> Iterator[tuple[int, str | None]]:
    """The rank of this process in the group that ``torchrun`` has started, and its device; rank 0 without one."""
    if n_processes() == 1:
        yield 0, device
        return
    import torch
    import torch.distributed as dist

    from convexformer_solvers.distributed import DistributedConfig

    device = own_device(device)
    on_cuda = device is not None and torch.device(device).type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=DistributedConfig().timeout)
    dist.init_process_group("nccl" if on_cuda else "gloo", timeout=timeout)
    try:
        yield dist.get_rank(), device
    finally:
        dist.destroy_process_group()

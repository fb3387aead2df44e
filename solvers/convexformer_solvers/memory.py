"""Memory that is free on a device, and limits on what may be taken of it."""

from __future__ import annotations

import mmap
import os
import re
from contextlib import suppress
from fractions import Fraction
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(?:(?:([kmgt])(i)?)?b)?", re.IGNORECASE)


def as_bytes(memory_limit: Any) -> int | None:
    """A limit of memory as a number of bytes; None stays.

    Text may have a unit: B, kB, MB, GB and TB, powers of 1000, or KiB, MiB, GiB and TiB, powers of 1024. Upper and
    lower case are the same.

    Raises
    ------
    ValueError
        If it is neither None nor a positive integer nor text of such a number.

    Examples
    --------
    >>> as_bytes(4096), as_bytes("500 MB"), as_bytes("1.5 GiB")
    (4096, 500000000, 1610612736)
    """
    if memory_limit is None:
        return None
    text = str(memory_limit).strip() if isinstance(memory_limit, (str, Integral)) else ""
    size = _SIZE.fullmatch(text)
    number, prefix, binary = ("0", None, None) if size is None else size.groups()
    n_bytes = int(Fraction(number) * (1024 if binary else 1000) ** " kmgt".index((prefix or " ").lower()))
    if n_bytes < 1:
        raise ValueError(
            f"memory_limit must be None or a positive number of bytes, got {memory_limit!r}; text of a number may have "
            "a unit, such as '500 MB' or '2 GiB'"
        )
    return n_bytes


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where the system does not say.

    On the CPU no more than the control groups of Linux leave to the process, as those of a container or of a job.

    Examples
    --------
    >>> free = free_memory(torch.device("cpu"))
    >>> free is None or free > 0
    True
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    of_machine = _free_on_machine()
    return min((*_left_by_groups(), *([] if of_machine is None else [of_machine])), default=None)


def _free_on_machine() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return 1024 * int(line.split()[1])
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _left_by_groups(process: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Bytes that each control group of the process with a limit leaves to it, at least a page."""
    left: list[int] = []
    with suppress(OSError):
        for line in process.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):  # version 1
                top, files = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            elif not controllers:  # version 2
                top, files = root, ("memory.max", "memory.current", "")
            else:
                continue
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):  # in a container the group itself may be seen as the top alone
                left.extend(_left_by_group(folder, *files))
                if folder == top:
                    break
    return left


def _left_by_group(folder: Path, limit: str, usage: str, prefix: str) -> list[int]:
    """Bytes that a control group leaves, where it has a limit; what it keeps of files on a disk can be given up."""
    try:
        most, used = (int((folder / name).read_text()) for name in (limit, usage))
        entries = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # not there, or "max", which is none
        return []
    of_files = sum(int(entries.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return [max(mmap.PAGESIZE, most - used + of_files)]

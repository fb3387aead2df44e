"""What figures were measured on."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "scipy", "cvxpy", "clarabel", "scs", "adelie", "celer", "skglm", "group-lasso")
# What fixes the threads of every library, where it is set before they are imported.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def machine(threads: int) -> dict[str, Any]:
    """Commit, date, command, processor, cores, threads and versions, for the file that holds the figures."""
    return {
        "commit": commit(Path(__file__).parents[2]),
        "date": datetime.date.today().isoformat(),
        "command": [" ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])],
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "versions": {package: found for package in PACKAGES if (found := _version(package))},
    }


def add_figures(output: Path, name: str, threads: int, figures: Any) -> None:
    """Add figures under a name to a JSON file, with what they were measured on."""
    before = json.loads(output.read_text()) if output.exists() else {}
    about = {**machine(threads), "figures": figures}
    output.write_text(json.dumps({**before, name: about}, indent=1) + "\n")


def forget(files: Iterable[Path]) -> None:
    """Take files out of the page cache."""
    os.sync()
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def memory(kind: str) -> int:
    """Bytes of a kind of memory of this process: RssAnon is what it holds, RssFile what it shares with files.

    VmHWM is the most that was resident so far; unlike ``ru_maxrss`` it does not start at the parent's memory.
    """
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found.group(1))


def commit(root: Path) -> str:
    """Short name of the commit of a checkout, with a plus sign where files differ from it."""
    described = ("git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=7", "--dirty=+")
    return subprocess.run(described, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def processor() -> str:
    """Name of the processor and its widest vector instructions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    known = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in known.items()}
    flags = fields.get("flags", "").split()
    vectors = next((name for name in ("avx512f", "avx2", "avx") if name in flags), "")
    return f"{fields.get('model name', platform.machine())} {vectors}".strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

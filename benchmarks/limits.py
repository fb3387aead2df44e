"""Seconds of import and demo beside the limits that they must keep. Run: python benchmarks/limits.py."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

RUNS = 5


def seconds(arguments: list[str], folder: str) -> float:
    """Wall time of one process from start to exit."""
    began = time.perf_counter()
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment, cwd=folder)
    return time.perf_counter() - began


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        bare = ["-c", "pass"]
        everything = "import convexformer as c; c.ConvexAttentionRegressor, c.ConvexAttention, c.attention_program"
        rows = {"import convexformer": (["-c", "import convexformer"], 2.0, RUNS)}
        rows["import and touch an estimator and a module"] = (["-c", everything], None, RUNS)
        rows["convexformer demo"] = (["-m", "convexformer", "demo", "--quiet", "--out", f"{folder}/demo"], 120.0, 1)
        print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
        print(f"{'what':45s} {'seconds (median)':>17s} {'limit':>6s}")
        for name, (arguments, limit, runs) in rows.items():
            if runs > 1:
                seconds(arguments, folder)  # warm the file cache
            taken = [seconds(arguments, folder) for _ in range(runs)]
            start = statistics.median(seconds(bare, folder) for _ in range(runs)) if runs > 1 else 0.0
            print(f"{name:45s} {statistics.median(taken) - start:17.2f} {limit or '-':>6}")


if __name__ == "__main__":
    main()

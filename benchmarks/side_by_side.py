"""Two checkouts of this project side by side in one run: seconds, iterations and what each leaves unsolved.

Run: python benchmarks/side_by_side.py --other ../cf94d43 --cells A B --sweep --output data/side_by_side.json

Each has one process, and they take turns on every program. The file is brought up to date after each program, and a
later call with the same file goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOLERANCES = (1e-4, 1e-6)


def worker() -> None:
    """Solve the programs named on standard input, one line of JSON each, with the checkout on the path."""
    import signal
    import warnings

    import torch

    from convexformer_solvers import (
        Auto,
        DenseMap,
        GatedMap,
        Program,
        SolverInterrupted,
        get_loss,
        get_penalty,
        solve,
        solve_path,
    )

    def out_of_time(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, out_of_time)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        job = json.loads(line)
        parts = torch.load(job["file"], weights_only=True)
        linear_map = GatedMap(parts["data"], parts["masks"]) if "masks" in parts else DenseMap(parts["data"])
        loss, penalty = get_loss(parts["loss"]), get_penalty(parts["penalty"])
        program = Program(linear_map, parts["y"], loss, penalty, parts["alpha"], fit_intercept=parts["intercept"])
        before = _memory("VmRSS", afresh=True)
        signal.setitimer(signal.ITIMER_REAL, job["limit"])
        try:
            if job["path"]:
                results = solve_path(program, Auto(), tol=TOLERANCES[0]).results
            else:
                results = [solve(program, Auto(), tol=TOLERANCES[1], max_iter=10**6)]
        except SolverInterrupted as interruption:
            results = [interruption.result]
        except KeyboardInterrupt:
            results = []
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        memory = (_memory("VmHWM") - before) / 1024
        print(json.dumps({**_told(results), "megabytes": round(memory, 1)}), flush=True)


def _memory(name: str, afresh: bool = False) -> int:
    """Kilobytes that are resident, or were at most since this was last asked `afresh`."""
    if afresh:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def _told(results: list[Any]) -> dict[str, Any]:
    """What is kept of a solve, or of a path."""
    if not results:
        return {"n_iter": 0, "seconds": None, "gap": None}
    told = {
        "n_iter": sum(result.n_iter for result in results),
        "seconds": sum(result.seconds for result in results),
        "gap": max(result.certificate.relative_gap for result in results),
    }
    if len(results) == 1:
        history = results[0].history
        for tol in TOLERANCES:
            reached = [s for s, gap in zip(history.seconds, history.relative_gap, strict=True) if gap <= tol]
            told[f"{tol:g}"] = reached[0] if reached else None
    return told


class Checkout:
    """A process that solves programs with one checkout."""

    def __init__(self, root: Path, threads: int) -> None:
        from benchmark_utils.machine import THREAD_VARIABLES

        fixed = dict.fromkeys(THREAD_VARIABLES, str(threads))
        environment = {**os.environ, **fixed, "PYTHONPATH": str(root / "solvers")}
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--worker"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True, cwd="/")

    def solved(self, **job: Any) -> dict[str, Any]:
        """What it says of one program."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def problems(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Any]]:
    """Names and programs of all that is to be solved."""
    from benchmark_utils.cells import simulate
    from benchmark_utils.sweep import sweep

    for cell in options.cells:
        for design in options.designs:
            for seed in options.seeds:
                instance = None
                for ratio in options.ratios:
                    name = {"family": "cells", "cell": cell, "design": design, "seed": seed, "ratio": ratio}
                    if name not in options.done:
                        instance = instance or simulate(cell, design, seed)
                        yield name, instance.program(ratio)
    for case in sweep() if options.sweep else ():
        name = {"family": case.family, "name": case.name}
        if name not in options.done:
            yield name, case.program


def save(program: Any, file: Path) -> None:
    """Write a program for the processes of the checkouts."""
    import torch
    from benchmark_utils.instance import loss_name, penalty_name

    masks = getattr(program.map, "masks", None)
    data = program.map.data if masks is None else program.map.base.data
    parts = {
        "data": data,
        "y": program.y,
        "loss": loss_name(program),
        "penalty": penalty_name(program),
        "alpha": program.alpha,
        "intercept": program.fit_intercept,
    }
    torch.save(parts if masks is None else {**parts, "masks": masks}, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required=True, help="folder of the other checkout")
    parser.add_argument("--cells", nargs="*", default=list("ABCDEF"))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.01])
    parser.add_argument("--designs", nargs="+", default=["correlated", "iid"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--sweep", action="store_true", help="the random sweep, too")
    parser.add_argument("--path", action="store_true", help="paths of thirty alphas in place of single ones")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of one solve")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    from benchmark_utils.machine import commit, machine  # not of the workers, which are started elsewhere

    records = json.loads(options.output.read_text())["records"] if options.output.exists() else []
    options.done = [record["problem"] for record in records]
    measured = {**machine(options.threads), "other": commit(options.other), "repeats": options.repeats}
    checkouts = {"old": Checkout(options.other, options.threads), "new": Checkout(HERE.parent, options.threads)}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as folder:
        file = Path(folder) / "program.pt"
        for name, program in problems(options):
            save(program, file)
            runs: dict[str, list[dict[str, Any]]] = {side: [] for side in checkouts}
            for repeat in range(options.repeats):
                for side in list(checkouts)[:: 1 if repeat % 2 else -1]:
                    job = {"file": str(file), "limit": options.limit, "path": options.path}
                    runs[side].append(checkouts[side].solved(**job))
            records.append({"problem": name, **runs})
            options.output.write_text(json.dumps({**measured, "records": records}))
            print(describe(records[-1]), flush=True)
    print(summary(records))


def seconds(runs: list[dict[str, Any]], key: str = "seconds") -> float:
    """Median of the seconds of some runs, infinite where most have not got there."""
    return statistics.median(float("inf") if run.get(key) is None else run[key] for run in runs)


def megabytes(runs: list[dict[str, Any]]) -> float:
    """Smallest peak memory of some runs: the first holds what libraries load."""
    return min(run["megabytes"] for run in runs)


def ratio(record: dict[str, Any]) -> float:
    """Seconds of the new over those of the old checkout; one where neither gets there."""
    new, old = (seconds(record[side], "1e-06" if "1e-06" in record[side][0] else "seconds") for side in ("new", "old"))
    return 1.0 if new == old else new / old


def describe(record: dict[str, Any]) -> str:
    """A line of one program."""
    parts = [" ".join(str(part) for part in record["problem"].values())]
    parts += [f"{side} {seconds(record[side]):.3f} s in {record[side][0]['n_iter']}" for side in ("old", "new")]
    return ", ".join([*parts, f"ratio {ratio(record):.2f}"])


def summary(records: list[dict[str, Any]]) -> str:
    """Median and largest ratio, and what one of both leaves unsolved, by family."""
    lines = []
    for family in dict.fromkeys(record["problem"]["family"] for record in records):
        own = [record for record in records if record["problem"]["family"] == family]
        ratios = sorted(ratio(record) for record in own)
        total = {side: sum(min(seconds(record[side]), 60.0) for record in own) for side in ("old", "new")}
        above = sum(value > 1.15 for value in ratios)
        lost = [describe(record) for record in own if ratio(record) == float("inf")]
        lines.append(
            f"{family}: {len(own)} programs, median ratio {statistics.median(ratios):.2f}, largest {ratios[-1]:.2f}, "
            f"{above} above 1.15, {total['old']:.1f} to {total['new']:.1f} s, unsolved now: {lost or 'none'}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    worker() if sys.argv[1:2] == ["--worker"] else main()

"""Peak memory of a fit beyond its data, on the cells with a memory limit. Run: python benchmarks/memory.py."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from benchmark_utils.cells import CELLS, simulate
from benchmark_utils.instance import Instance
from benchmark_utils.machine import THREAD_VARIABLES, machine, memory

LIMITED = ("E", "F", "G")
RATIOS = (0.1, 0.01)
TOLERANCE = 1e-6
FLOAT_BYTES = 8


def limit(cell: str, scale: float) -> float:
    """Bytes allowed: a quarter of the materialised gated design, or half of X without gates."""
    shape = CELLS[cell]
    data = FLOAT_BYTES * round(shape.n_samples * scale) * shape.n_tokens * shape.n_features
    return data * shape.n_gates / 4 if shape.n_gates else data / 2


def resident() -> int:
    """Bytes resident now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def generate(cell: str, seed: int, scale: float, folder: Path) -> None:
    """Write an instance; in a process of its own, so that nobody measures its temporaries."""
    simulate(cell, seed=seed, scale=scale).save(folder)


def fit(folder: Path, solver: str, ratio: float, seconds: float) -> dict[str, float]:
    """Fit to the tolerance, or for that many seconds, and report memory beyond what was there with the data built."""
    from convexformer_solvers import get_solver, solve

    algorithm = get_solver(solver)
    instance = Instance.load(folder)
    before = resident()
    # alpha_max is part of the fit: a user needs it too. Arrays are shared with the instance, not copied.
    program = instance.program(ratio)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = solve(
            program, algorithm, tol=TOLERANCE, max_iter=10**9, callback=lambda progress: progress.seconds > seconds
        )
    gap = result.certificate.relative_gap
    # A peak from before the fit would hide that of the fit: it must not be there.
    return {"bytes": memory("VmHWM") - before, "gap": gap, "seconds": result.seconds}


def measured(*arguments: object) -> str:
    """Output of this script with arguments, in a fresh process with one thread."""
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="+", choices=LIMITED, default=list(LIMITED))
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS))
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of samples")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of one fit")
    parser.add_argument("--output", type=Path, help="file for the figures")
    options = parser.parse_args()
    records = []
    print("| cell | ratio | MB beyond the data | limit | gap | seconds |\n|---|---|---|---|---|---|")
    for cell in options.cells:
        allowed = limit(cell, options.scale)
        with tempfile.TemporaryDirectory() as folder:
            measured("generate", cell, options.seed, options.scale, folder)
            for ratio in options.ratios:
                found = json.loads(measured("fit", folder, options.solver, ratio, options.seconds))
                verdict = "kept" if found["bytes"] <= allowed else "EXCEEDED"
                print(
                    f"| {cell} | {ratio:g} | {found['bytes'] / 2**20:.0f} | {allowed / 2**20:.0f} {verdict} "
                    f"| {found['gap']:.1e} | {found['seconds']:.2g} |",
                    flush=True,
                )
                records.append({"cell": cell, "ratio": ratio, "limit": allowed, **found})
    if options.output:
        options.output.write_text(json.dumps({**machine(1), "records": records}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["generate"]:
        generate(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
    elif sys.argv[1:2] == ["fit"]:
        print(json.dumps(fit(Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]), float(sys.argv[5]))))
    else:
        main()

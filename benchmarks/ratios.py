"""What a path costs beside its last alpha, and a nuclear program beside its group-l2 one.

Run: python benchmarks/ratios.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from benchmark_utils.cells import CELLS, simulate

from convexformer_solvers import GroupNuclear, Program, alpha_grid, get_solver, solve, solve_path

PATH_LIMIT = 3.0
PATH_TOLERANCE = 1e-4
NUCLEAR_LIMIT = 5.0
NUCLEAR_TOLERANCE = 1e-5
RATIOS = (0.1, 0.01)


def seconds_of(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each of several runs, which take turns."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, found in zip(runs, times, strict=True):
            began = time.perf_counter()
            run()
            found.append(time.perf_counter() - began)
    return [statistics.median(found) for found in times]


def row(what: str, base: float, other: float, limit: float) -> None:
    verdict = "kept" if other <= limit * base else "EXCEEDED"
    print(f"| {what} | {base:.2g} | {other:.2g} | {other / base:.1f} | {limit:g} {verdict} |", flush=True)


def path(name: str, program: Program, repeats: int) -> None:
    """Thirty alphas down to a hundredth of alpha_max, beside the last of them from scratch."""
    grid, solver = alpha_grid(program.alpha_max), get_solver("auto")
    last = program.with_alpha(grid[-1])
    alone, whole = seconds_of(
        [
            lambda: solve(last, solver, tol=PATH_TOLERANCE),
            lambda: solve_path(program, solver, grid, tol=PATH_TOLERANCE),
        ],
        repeats,
    )
    row(f"{name}, path / last alpha", alone, whole, PATH_LIMIT)


def nuclear(name: str, program: Program, ratio: float, repeats: int) -> None:
    """The same data under both penalties, each at a fraction of its own alpha_max."""
    both = [program, dataclasses.replace(program, penalty=GroupNuclear())]
    both = [each.with_alpha(ratio * each.alpha_max) for each in both]
    runs = [lambda each=each: solve(each, get_solver("auto"), tol=NUCLEAR_TOLERANCE) for each in both]
    row(f"{name}, {ratio:g}, nuclear / group-l2", *seconds_of(runs, repeats), NUCLEAR_LIMIT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--paths", nargs="*", choices=list(CELLS), default=["A", "B", "C", "D", "E", "F"])
    parser.add_argument("--nuclear", nargs="*", choices=list(CELLS), default=["C", "D"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of samples")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| what | seconds | seconds | ratio | limit |\n|---|---|---|---|---|")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in dict.fromkeys([*options.paths, *options.nuclear]):
            program = simulate(name, seed=options.seed, scale=options.scale).program(0.1)
            solve(program, get_solver("auto"), tol=PATH_TOLERANCE, max_iter=3)
            if name in options.paths:
                path(name, program, options.repeats)
            for ratio in RATIOS if name in options.nuclear else ():
                nuclear(name, program, ratio, options.repeats)


if __name__ == "__main__":
    main()

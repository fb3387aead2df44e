"""What a program with the nuclear penalty costs beside its group-l2 one. Run: python benchmarks/nuclear.py."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
import warnings

import torch
from benchmark_utils.cells import CELLS, simulate

from convexformer_solvers import GroupNuclear, get_solver, solve

LIMIT = 5.0
TOLERANCE = 1e-5
RATIOS = (0.1, 0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="*", choices=list(CELLS), default=["C", "D"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    print("| cell | ratio | group-l2, seconds | nuclear, seconds | ratio | limit |\n|---|---|---|---|---|---|")
    for name in options.cells:
        program = simulate(name, seed=options.seed).program(0.1)
        for ratio in RATIOS:
            both = [program, dataclasses.replace(program, penalty=GroupNuclear())]
            both = [each.with_alpha(ratio * each.alpha_max) for each in both]
            times: list[list[float]] = [[], []]
            for _ in range(options.repeats + 1):  # the first pair is not timed
                for each, found in zip(both, times, strict=True):
                    began = time.perf_counter()
                    solve(each, get_solver("auto"), tol=TOLERANCE)
                    found.append(time.perf_counter() - began)
            base, other = (statistics.median(found[1:]) for found in times)
            verdict = "kept" if other <= LIMIT * base else "EXCEEDED"
            print(f"| {name} | {ratio:g} | {base:.2g} | {other:.2g} | {other / base:.1f} | {LIMIT:g} {verdict} |")


if __name__ == "__main__":
    main()

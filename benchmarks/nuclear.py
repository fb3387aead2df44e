"""What a program with the nuclear penalty costs beside its group-l2 one. Run: python benchmarks/nuclear.py."""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from functools import partial

import torch
from benchmark_utils.cells import CELLS, simulate
from benchmark_utils.turns import median_seconds

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
            runs = {str(each.penalty): partial(solve, each, get_solver("auto"), tol=TOLERANCE) for each in both}
            base, other = median_seconds(runs, options.repeats, n_untimed=1).values()
            verdict = "kept" if other <= LIMIT * base else "EXCEEDED"
            print(f"| {name} | {ratio:g} | {base:.2g} | {other:.2g} | {other / base:.1f} | {LIMIT:g} {verdict} |")


if __name__ == "__main__":
    main()

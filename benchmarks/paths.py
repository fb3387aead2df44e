"""Paths of thirty alphas to one certified gap: ours, adelie's and skglm's.

Run: python benchmarks/paths.py --output benchmarks/data/paths.json

A package's path is repeated with tighter tolerances until the largest gap of all alphas, certified here in float64,
is small enough; the seconds are those of that run alone. Each contender has one process, which is ended at the limit.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

TOLERANCE = 1e-4


def ours(instance: Any, grid: list[float]) -> Iterator[Callable[[], Any]]:
    from convexformer_solvers import get_solver, solve_path

    def run() -> Any:
        results = solve_path(instance.program(0.1), get_solver("auto"), grid, tol=TOLERANCE).results
        return [(result.coef, result.certificate.dual_point) for result in results]

    yield run


def _points(outputs: Iterable[Any]) -> list[Any]:
    """Points without dual ones, of the coefficients (n_alphas, n_columns) of each output."""
    return [(coef, None) for coef in np.stack(list(outputs), axis=-1)]


def adelie(instance: Any, grid: list[float]) -> Iterator[Callable[[], Any]]:
    from solvers.adelie import Solver

    solver = Solver()
    solver.set_objective(instance.program(0.1), instance)
    solver.path = np.array(grid)
    for tol in Solver.rungs:
        yield lambda tol=tol: _points(solver.path_of(glm, tol) for glm in solver.glms)


def skglm(instance: Any, grid: list[float]) -> Iterator[Callable[[], Any]]:
    from skglm.penalties import WeightedGroupL2
    from skglm.solvers import GroupBCD
    from solvers.skglm import Solver

    program, solver = instance.program(0.1), Solver()
    solver.set_objective(program)
    solver.warm_up()
    indices, pointers = solver.penalty.grp_indices, solver.penalty.grp_ptr

    def run(tol: float) -> Any:
        columns = []
        for y in solver.y.T:
            coef, coefs = np.zeros(solver.X.shape[1]), []
            for alpha in grid:
                penalty = WeightedGroupL2(alpha, np.ones(len(pointers) - 1), pointers, indices)
                inner = GroupBCD(max_iter=10_000, max_epochs=10_000, tol=tol * alpha)
                coef = inner.solve(solver.X, y, solver.datafit, penalty, coef.copy(), solver.X @ coef)[0]
                coefs.append(coef)
            columns.append(np.array(coefs))
        return _points(columns)

    for tol in Solver.rungs:
        yield lambda tol=tol: run(tol)


CONTENDERS = {"ours": ours, "adelie": adelie, "skglm": skglm}


def largest_gap(instance: Any, grid: list[float], points: list[Any]) -> float:
    """Largest certified gap of all alphas; a dual point is a hint, which is made feasible and valued like any other."""
    import torch

    from convexformer_solvers import certify

    program = instance.program(0.1)
    gaps = []
    for alpha, (coef, dual) in zip(grid, points, strict=True):
        here = program.with_alpha(alpha)
        coef = torch.as_tensor(np.ascontiguousarray(coef)).reshape(here.coef_shape)
        gaps.append(certify(here, coef, coef.new_zeros(coef.shape[-1]), dual).relative_gap)
    return max(gaps)


def contend(name: str, folder: Path, repeats: int, pipe: Any) -> None:
    """Send the seconds and the largest gap of each run; the best setting is repeated."""
    from benchmark_utils.instance import Instance

    from convexformer_solvers import alpha_grid

    warnings.simplefilter("ignore")
    instance = Instance.load(folder)
    grid = alpha_grid(instance.program(1.0).alpha_max)
    for run in CONTENDERS[name](instance, grid):
        gap = math.inf
        for _ in range(repeats):
            began = time.perf_counter()
            points = run()
            seconds = time.perf_counter() - began
            gap = largest_gap(instance, grid, points)
            pipe.send((seconds, gap))
            if gap > TOLERANCE:
                break
        if gap <= TOLERANCE:
            return


def result_of(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of the runs that reach the tolerance, or None, and the smallest largest gap within the limit."""
    context = multiprocessing.get_context("spawn")
    ear, mouth = context.Pipe(duplex=False)
    process = context.Process(target=contend, args=(name, folder, options.repeats, mouth))
    process.start()
    mouth.close()
    runs, end = [], time.monotonic() + options.limit
    while ear.poll(max(end - time.monotonic(), 0)):
        try:
            runs.append(ear.recv())
        except EOFError:
            break
    process.kill()
    process.join()
    reached = [seconds for seconds, gap in runs if gap <= TOLERANCE]
    return {
        "seconds": float(np.median(reached)) if reached else None,
        "gap": min((gap for _, gap in runs), default=None),
    }


def main() -> None:
    import tempfile

    from benchmark_utils.cells import simulate
    from benchmark_utils.machine import THREAD_VARIABLES, machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=list("ABCDEF"))
    parser.add_argument("--designs", nargs="+", default=["correlated", "iid"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of all runs of a contender")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(options.threads)))
    records = []
    for cell in options.cells:
        for design in options.designs:
            for seed in options.seeds:
                with tempfile.TemporaryDirectory() as folder:
                    instance = simulate(cell, design, seed)
                    instance.save(Path(folder))
                    for name in options.contenders:
                        if name != "ours" and instance.loss not in ("squared", "logistic"):
                            continue
                        found = result_of(name, Path(folder), options)
                        records.append({"cell": cell, "design": design, "seed": seed, "contender": name, **found})
                        print(records[-1], flush=True)
                        contents = {**machine(options.threads), "limit": options.limit, "records": records}
                        options.output.write_text(json.dumps(contents))


if __name__ == "__main__":
    main()

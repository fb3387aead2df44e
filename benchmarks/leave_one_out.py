"""What each piece of the default solver brings: seconds and iterations without it.

Run: python benchmarks/leave_one_out.py --sweep --output benchmarks/data/leave_one_out.json

Every piece is left out by a change of the plan's stages or of a number. Pieces take turns on every program; the file is
brought up to date after each, and a later call with the same file goes on.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmark_utils.machine import machine
from side_by_side import TOLERANCES, problems

from convexformer_solvers import Auto, AutoConfig, Program, SolverInterrupted, Stage, plan, solve
from convexformer_solvers.algorithms.admm import Admm, AdmmConfig
from convexformer_solvers.algorithms.block_descent import BlockDescent
from convexformer_solvers.algorithms.fista import GreedyFista
from convexformer_solvers.algorithms.semismooth_newton import SemismoothNewton
from convexformer_solvers.reductions.center import Center
from convexformer_solvers.reductions.precision import SinglePrecision

Change = Callable[[Stage], "Stage | None"]


def auto(change: Change = lambda stage: stage, **numbers: float) -> Auto:
    """The default solver with other numbers, and with its stages changed, inner ones too; None leaves one out."""

    def make_plan(program: Program, warm: bool, config: AutoConfig) -> Sequence[Stage]:
        changed = (_changed(stage, change) for stage in plan(program, warm, config))
        return [stage for stage in changed if stage is not None]

    return Auto(AutoConfig(**numbers), make_plan=make_plan)


def _changed(stage: Stage, change: Change) -> Stage | None:
    if isinstance(inner := getattr(stage.algorithm, "inner", None), Stage):
        inner, algorithm = _changed(inner, change), copy.copy(stage.algorithm)
        if inner is None:
            return None
        algorithm.inner = inner
        stage = dataclasses.replace(stage, algorithm=algorithm)
    return change(stage)


def without(kind: type) -> Change:
    """Leaves out the stages of an algorithm, also those that have it inside."""
    return lambda stage: None if type(stage.algorithm) is kind else stage


def without_reduction(kind: type) -> Change:
    """Leaves out a reduction."""
    return lambda stage: dataclasses.replace(
        stage, reductions=tuple(part for part in stage.reductions if not isinstance(part, kind))
    )


def admm(**numbers: Any) -> Change:
    """Gives alternating directions other numbers."""
    other = Admm(config=AdmmConfig(**numbers))
    return lambda stage: dataclasses.replace(stage, algorithm=other) if type(stage.algorithm) is Admm else stage


def _without_sets(stage: Stage) -> Stage | None:
    inner = getattr(stage.algorithm, "inner", None)
    is_set = stage.algorithm.name.startswith("working_set")
    return None if is_set and not isinstance(inner.algorithm, GreedyFista) else stage


usual = AdmmConfig()
PIECES: dict[str, Auto] = {
    "none": Auto(),
    "greedy gradient steps": auto(without(GreedyFista)),
    "working sets": auto(_without_sets),
    "block descent": auto(without(BlockDescent)),
    "alternating directions": auto(without(Admm)),
    "Newton steps on smoothed objectives": auto(newton_share=math.inf),
    "semismooth Newton steps": auto(without(SemismoothNewton)),
    "proximal steps in the dual": auto(long_tails=math.inf),
    "polish": auto(lambda stage: dataclasses.replace(stage, polish=None)),
    "single precision": auto(without_reduction(SinglePrecision)),
    "centring": auto(without_reduction(Center)),
    "acceleration of ADMM": auto(admm(memory=0)),
    "check of bold extrapolations": auto(admm(bold=math.inf)),
    "rho set anew": auto(admm(adapt_at=())),
    "first rho by correlation": auto(
        admm(independent_threshold=usual.threshold, correlated_threshold=usual.threshold, independent=0.0)
    ),
    "several ridge problems a step": auto(admm(loss_steps=1)),
}


def told(program: Program, solver: Auto, limit: float) -> dict[str, Any]:
    """Iterations, gap and seconds to each tolerance of a solve."""
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        result = solve(dataclasses.replace(program), solver, tol=TOLERANCES[-1], max_iter=10**6)
    except SolverInterrupted as interruption:
        result = interruption.result
    except Exception as error:  # a piece that something cannot do without
        return {"n_iter": 0, "gap": None, "error": type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    history, found = result.history, {"n_iter": result.n_iter, "gap": result.certificate.relative_gap}
    for tol in TOLERANCES:
        reached = [s for s, gap in zip(history.seconds, history.relative_gap, strict=True) if gap <= tol]
        found[f"{tol:g}"] = round(reached[0], 5) if reached else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", default=list("ABCDEF"))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.01])
    parser.add_argument("--designs", nargs="+", default=["correlated", "iid"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--sweep", action="store_true", help="the random sweep, too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=5.0, help="seconds of one solve, or ten times those with all")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")

    def out_of_time(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, out_of_time)
    records = json.loads(options.output.read_text())["records"] if options.output.exists() else []
    options.done = [record["problem"] for record in records]
    measured = machine(options.threads)
    for name, program in problems(options):
        told(program, PIECES["none"], options.limit)  # so that nothing is computed for the first time below
        found: dict[str, Any] = {}
        for piece, solver in PIECES.items():
            whole = found.get("none", {}).get(f"{TOLERANCES[-1]:g}") or 0.0
            found[piece] = told(program, solver, max(options.limit, 10 * whole))
        records.append({"problem": name, "without": found})
        print(name, found["none"], flush=True)
        options.output.write_text(json.dumps({**measured, "records": records}))


if __name__ == "__main__":
    main()

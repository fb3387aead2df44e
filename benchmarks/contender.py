"""One contender on one instance, in a process of its own; started by run.py, which receives its events.

Events are dictionaries: ``skip`` with a reason; ``ready`` before the first timed run; ``begin`` with the rung and
``end`` with the points of the run around every timed run; ``failed`` with the first line of an error.
"""

from __future__ import annotations

import importlib.util
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmark_utils.instance import Instance
from benchmark_utils.ladder import LadderSolver
from benchmark_utils.machine import memory

HERE = Path(__file__).resolve().parent
# A ladder ends once its runs together took so many limits: what is left of it would take longer still.
LADDER_LIMITS = 1.5


def load(path: Path) -> ModuleType:
    """The module of one file of this benchmark; other solvers, and what they import, stay unloaded."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes; 0 where the system does not tell."""
    return memory("VmHWM") if Path("/proc/self/status").exists() else 0


class Contest:
    """Runs the ladder of one contender and reports it."""

    def __init__(self, job: dict[str, Any], events: Connection) -> None:
        self.job, self.events = job, events

    def report(self, event: str, **values: Any) -> None:
        self.events.send({"event": event, **values})

    def run(self) -> None:
        try:
            solver_class = load(HERE / "solvers" / f"{self.job['file']}.py").Solver
        except ImportError as error:
            return self.report("skip", reason=f"not importable: {error}")
        try:
            self.climb(solver_class.get_instance(**self.job["parameters"]))
        except Exception as error:
            # A peer may fail in any way; the table says so and the others go on.
            self.report("failed", reason=f"{type(error).__name__}: {error}".splitlines()[0])
        return None

    def climb(self, solver: LadderSolver) -> None:
        """Prepare untimed, then run from loose to tight until the target or the limit is reached."""
        objective = load(HERE / "objective.py").Objective.get_instance(ratio=self.job["ratio"], dtype=self.job["dtype"])
        objective.set_data(instance=Instance.load(Path(self.job["folder"])))
        problem = objective.get_objective()
        skip, reason = solver.skip(**problem)
        if skip:
            return self.report("skip", reason=reason)
        solver.limit = self.job["limit"]
        solver.set_objective(**problem)
        solver.warm_up()
        self.report("ready", watches_clock=solver.watches_clock)
        total = 0.0
        for rung in solver.rungs:
            seconds, gap = self.timed_run(solver, objective, rung)
            total += seconds
            if gap <= self.job["target"] or seconds > self.job["limit"] or total > LADDER_LIMITS * self.job["limit"]:
                break
        return None

    def timed_run(self, solver: LadderSolver, objective: Any, rung: float) -> tuple[float, float]:
        """One complete run from scratch; its seconds and the certified gap of its answer."""
        self.report("begin", rung=rung)
        began = time.perf_counter()
        solver.run(rung)
        seconds = time.perf_counter() - began
        found = objective.evaluate_result(**solver.get_result())
        points = [*solver.history, (seconds, found["value"], found["relative_gap"])]
        self.report("end", rung=rung, seconds=seconds, points=points, memory=peak_memory())
        return seconds, found["relative_gap"]


def contend(job: dict[str, Any], events: Connection) -> None:
    """Entry point of the process."""
    # Some packages print; nobody reads that.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    Contest(job, events).run()

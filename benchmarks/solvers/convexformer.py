"""The solvers of this package."""

from __future__ import annotations

import math
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmark_utils.ladder import LadderSolver
from sklearn.exceptions import ConvergenceWarning

from convexformer_solvers import LOSSES, Program, SolverInterrupted, get_solver, solve


class Solver(LadderSolver):
    """One of our solvers by its registered name; its seconds include its certificates."""

    name = "convexformer"
    parameters = {"solver": ["auto", "fista"]}  # noqa: RUF012 - benchopt's form
    rungs = (1e-2, 1e-4, 1e-6)
    losses = tuple(LOSSES)
    watches_clock = True

    def skip(self, program: Program, **data: Any) -> tuple[bool, str | None]:
        try:
            get_solver(self.solver)
        except ValueError as error:
            return True, str(error)
        return super().skip(program)

    def set_objective(self, program: Program, **data: Any) -> None:
        self.program = program

    def warm_up(self) -> None:
        """One iteration, so that lazily loaded modules and BLAS are ready, as they are for the compiled packages."""
        self._solve(tol=0.0, max_iter=1)

    def run(self, stop_val: float) -> None:
        try:
            with ctrl_c_after(self.limit):
                result = self._solve(self.on_ladder(stop_val))
        except SolverInterrupted as interruption:
            result = interruption.result
        except KeyboardInterrupt:  # before the solver was there to catch it
            result = self._solve(tol=math.inf, max_iter=1)
        self.coef, self.dual = result.coef, result.certificate.dual_point
        history = result.history
        self.history = list(zip(history.seconds, history.primal, history.relative_gap, strict=True))

    def get_result(self) -> dict[str, Any]:
        return {"coef": self.coef, "dual": self.dual}

    def _solve(self, tol: float, max_iter: int = 10**9) -> Any:
        with warnings.catch_warnings():
            # Whether it converged is what the objective measures.
            warnings.simplefilter("ignore", ConvergenceWarning)
            return solve(self.program, get_solver(self.solver), tol=tol, max_iter=max_iter)


@contextmanager
def ctrl_c_after(seconds: float) -> Iterator[None]:
    """Press Ctrl-C after some seconds; a callback that looks at the clock would have more certificates made."""
    if math.isinf(seconds):
        yield
        return

    def press(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

"""The solvers of this package."""

from __future__ import annotations

import warnings
from typing import Any

from benchmark_utils.ladder import LadderSolver
from sklearn.exceptions import ConvergenceWarning

from convexformer_solvers import LOSSES, Program, get_solver, solve
from convexformer_solvers.result import Progress


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
        self._solve(tol=0.0, limit=0.0)

    def run(self, stop_val: float) -> None:
        result = self._solve(self.on_ladder(stop_val), self.limit)
        self.coef, self.dual = result.coef, result.certificate.dual_point
        history = result.history
        self.history = list(zip(history.seconds, history.primal, history.relative_gap, strict=True))

    def get_result(self) -> dict[str, Any]:
        return {"coef": self.coef, "dual": self.dual}

    def _solve(self, tol: float, limit: float) -> Any:
        def out_of_time(progress: Progress) -> bool:
            return progress.seconds > limit

        with warnings.catch_warnings():
            # Whether it converged is what the objective measures.
            warnings.simplefilter("ignore", ConvergenceWarning)
            return solve(self.program, get_solver(self.solver), tol=tol, max_iter=10**9, callback=out_of_time)

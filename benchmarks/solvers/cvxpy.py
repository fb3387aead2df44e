"""cvxpy with a conic solver: expresses every cell, on the materialised design."""

from __future__ import annotations

import math
import warnings
from typing import Any

import cvxpy as cp
import numpy as np
from benchmark_utils.ladder import LadderSolver

from convexformer_solvers import LOSSES, Program

TOLERANCES = {
    "CLARABEL": ("tol_gap_abs", "tol_gap_rel", "tol_feas"),
    "SCS": ("eps_abs", "eps_rel"),
}


class Solver(LadderSolver):
    """CLARABEL (interior point) or SCS (splitting) through cvxpy; its compilation to cones is timed."""

    name = "cvxpy"
    parameters = {"solver": ["CLARABEL", "SCS"]}  # noqa: RUF012 - benchopt's form
    requirements = ["pip::cvxpy"]  # noqa: RUF012
    losses = tuple(LOSSES)
    rungs = (1e-3, 1e-5, 1e-7, 1e-9)

    def set_objective(self, program: Program, **data: Any) -> None:
        self.program = program
        matrix = program.map.as_matrix().double().numpy()
        y, weight = program.y.double().numpy(), program.weight.double().numpy()
        self.variable = cp.Variable((matrix.shape[1], y.shape[1]))
        n_blocks = math.prod(program.map.feature_shape[:-1])
        decay = program.alpha * program.penalty.expression(self.variable, n_blocks)
        self.objective = cp.Minimize(program.loss.expression(matrix @ self.variable, y, weight) + decay)

    def run(self, stop_val: float) -> None:
        options = dict.fromkeys(TOLERANCES[self.solver], self.on_ladder(stop_val))
        if self.solver == "SCS":
            options["max_iters"] = 10**7
        # A fresh problem: cvxpy would reuse the compilation of an old one.
        problem = cp.Problem(self.objective)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Solution may be inaccurate")
            problem.solve(solver=self.solver, **options)
        self.coef = np.asarray(self.variable.value)

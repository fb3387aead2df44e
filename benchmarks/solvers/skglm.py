"""skglm: block coordinate descent with working sets and Anderson acceleration, compiled by numba."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from benchmark_utils.instance import design_matrix, loss_name
from benchmark_utils.ladder import LadderSolver
from numpy.typing import NDArray
from skglm.datafits import LogisticGroup, QuadraticGroup
from skglm.penalties import WeightedGroupL2
from skglm.solvers import GroupBCD
from skglm.utils.data import grp_converter
from sklearn.exceptions import ConvergenceWarning

from convexformer_solvers import Program

DATAFITS = {"squared": QuadraticGroup, "logistic": LogisticGroup}


class Solver(LadderSolver):
    """``skglm``'s ``GroupBCD`` on the materialised design, one call per output; compilation is not timed."""

    name = "skglm"
    requirements = ["pip::skglm"]  # noqa: RUF012 - benchopt's form
    losses = tuple(DATAFITS)
    # Its tolerance bounds the distance of a group's gradient to the subdifferential: in units of alpha here.
    rungs = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)

    def skip(self, program: Program, **data: Any) -> tuple[bool, str | None]:
        if program.map.dtype != torch.float64:
            return True, "skglm 0.5 does not compile its group penalty for float32"
        return super().skip(program)

    def set_objective(self, program: Program, **data: Any) -> None:
        self.program = program
        self.X = design_matrix(program)
        self.y = np.asfortranarray(program.y.numpy())
        indices, pointers = grp_converter(program.map.feature_shape[-1], self.X.shape[1])
        self.datafit = DATAFITS[loss_name(program)](pointers, indices)
        self.penalty = WeightedGroupL2(program.alpha, np.ones(len(pointers) - 1), pointers, indices)

    def warm_up(self) -> None:
        """Compile on the problem itself, in one outer iteration of one epoch."""
        self._fit(self.y[:, 0], GroupBCD(max_iter=1, max_epochs=1, tol=0.0))

    def run(self, stop_val: float) -> None:
        tol = self.on_ladder(stop_val) * self.program.alpha
        solver = GroupBCD(max_iter=10_000, max_epochs=10_000, tol=tol)
        self.coef = np.stack([self._fit(column, solver) for column in self.y.T], axis=1)

    def _fit(self, y: NDArray, solver: GroupBCD) -> NDArray:
        with warnings.catch_warnings():
            # Whether it converged is what the objective measures.
            warnings.simplefilter("ignore", ConvergenceWarning)
            return solver.solve(self.X, y, self.datafit, self.penalty)[0]

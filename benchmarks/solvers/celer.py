"""celer: working sets with dual extrapolation, squared loss only for groups."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from benchmark_utils.instance import design_matrix
from benchmark_utils.ladder import LadderSolver
from celer import GroupLasso
from sklearn.exceptions import ConvergenceWarning

from convexformer_solvers import Program


class Solver(LadderSolver):
    """``celer.GroupLasso`` on the materialised design, one call per output."""

    name = "celer"
    requirements = ["pip::celer"]  # noqa: RUF012 - benchopt's form
    # Its tolerance is a gap over |y|^2 / N, half of our relative gap: the rungs aim a little below 1e-4 and 1e-6.
    rungs = (1e-2, 1e-3, 4e-5, 4e-6, 4e-7, 1e-7)

    def set_objective(self, program: Program, **data: Any) -> None:
        self.program = program
        self.X = design_matrix(program)
        self.y = np.asfortranarray(program.y.numpy())

    def run(self, stop_val: float) -> None:
        model = GroupLasso(
            groups=self.program.map.feature_shape[-1],
            alpha=self.program.alpha,
            max_iter=1000,
            tol=self.on_ladder(stop_val),
            fit_intercept=False,
        )
        with warnings.catch_warnings():
            # Whether it converged is what the objective measures.
            warnings.simplefilter("ignore", ConvergenceWarning)
            self.coef = np.stack([model.fit(self.X, column).coef_ for column in self.y.T], axis=1)

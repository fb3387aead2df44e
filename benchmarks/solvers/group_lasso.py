"""group-lasso (yngvem): FISTA in numpy."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from benchmark_utils.instance import design_matrix, loss_name
from benchmark_utils.ladder import LadderSolver
from group_lasso import GroupLasso, LogisticGroupLasso
from numpy.typing import NDArray

from convexformer_solvers import Program


class Solver(LadderSolver):
    """``GroupLasso`` or ``LogisticGroupLasso``, one call per output.

    Its steps halve the gradient of the loss but not the penalty, so that it solves ours at half our alpha. The logistic
    form is a softmax over two columns that share a group: its optimum has opposite columns, whose difference z has norm
    sqrt(2) times that of the pair, and takes alpha / sqrt(2).
    """

    name = "group-lasso"
    requirements = ["pip::group-lasso"]  # noqa: RUF012 - benchopt's form
    losses = ("squared", "logistic")
    # Relative change of an iterate.
    rungs = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9)

    def set_objective(self, program: Program, **data: Any) -> None:
        self.program = program
        self.X = design_matrix(program)
        width = program.map.feature_shape[-1]
        self.groups = np.repeat(np.arange(self.X.shape[1] // width), width)

    def run(self, stop_val: float) -> None:
        tol = self.on_ladder(stop_val)
        fit = self._fit_squared if loss_name(self.program) == "squared" else self._fit_logistic
        with warnings.catch_warnings():
            # Whether it converged is what the objective measures.
            warnings.simplefilter("ignore")
            self.coef = np.stack([fit(column, tol) for column in self.program.y.numpy().T], axis=1)

    def _fit_squared(self, y: NDArray, tol: float) -> NDArray:
        return GroupLasso(group_reg=self.program.alpha / 2, **self._options(tol)).fit(self.X, y).coef_[:, 0]

    def _fit_logistic(self, y: NDArray, tol: float) -> NDArray:
        model = LogisticGroupLasso(group_reg=self.program.alpha / math.sqrt(2), **self._options(tol))
        coef = model.fit(self.X, y > 0).coef_
        return coef[:, 1] - coef[:, 0]

    def _options(self, tol: float) -> dict[str, Any]:
        return {
            "groups": self.groups,
            "l1_reg": 0.0,
            "scale_reg": "none",
            "fit_intercept": False,
            "n_iter": 10**7,
            "tol": tol,
            "supress_warning": True,
            "random_state": 0,
        }

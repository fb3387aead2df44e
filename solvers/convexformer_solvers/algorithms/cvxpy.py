"""Solution by a general conic solver through cvxpy (Diamond and Boyd 2016), for small programs."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convexformer_solvers.points import Point
from convexformer_solvers.program import Program
from convexformer_solvers.result import SolverUnavailableError

from .base import Solver
from .fista import Fista


class Exact(Solver):
    """Any solver that cvxpy knows, on the full matrix of the map.

    One proximal gradient step, where it lowers the objective, makes the small groups of an interior point zero.

    Parameters
    ----------
    cvxpy_solver : str, default="CLARABEL"
        Name of an installed solver, in any case. ``"MOSEK"`` needs ``pip install mosek`` and a licence.
    **options
        Passed to ``cvxpy.Problem.solve``, for example ``max_iter=500``.

    Raises
    ------
    ValueError
        If ``cvxpy_solver`` is no name.
    SolverUnavailableError, RuntimeError
        When run, if the solver is not installed or has no licence; if it ends without a solution.

    Examples
    --------
    >>> Exact("clarabel").cvxpy_solver
    'CLARABEL'
    """

    requires_of_loss = ("expression",)
    requires_of_penalty = ("expression",)
    name = property(lambda self: "exact" if self.cvxpy_solver == "CLARABEL" else self.cvxpy_solver.lower())

    def __init__(self, cvxpy_solver: str = "CLARABEL", **options: Any) -> None:
        if not isinstance(cvxpy_solver, str):
            raise ValueError(f"cvxpy_solver must be the name of a solver of cvxpy, as 'CLARABEL', got {cvxpy_solver!r}")
        self.cvxpy_solver = cvxpy_solver.upper()
        self.options = options

    def __repr__(self) -> str:
        options = "".join(f", {key}={value!r}" for key, value in self.options.items())
        return f"Exact({self.cvxpy_solver!r}{options})"

    def init(self, program: Program, start: Point) -> Point:
        import cvxpy as cp

        installed = cp.installed_solvers()
        if self.cvxpy_solver not in installed:
            hint = "pip install 'convexformer[mosek]'" if self.cvxpy_solver == "MOSEK" else "see cvxpy's documentation"
            found = f"is not installed ({hint}); installed are {sorted(installed)}"
            raise SolverUnavailableError(f"solver {self.cvxpy_solver!r} {found}")
        return Point(start.coef, start.intercept)

    def step(self, program: Program, state: Point) -> Point:
        import cvxpy as cp

        matrix = program.map.as_matrix().double().numpy(force=True)
        y, weight = program.with_float64_targets().y.numpy(force=True), program.weight.double().numpy(force=True)
        n_blocks = math.prod(program.map.feature_shape[:-1])
        coef, pred = cp.Variable((matrix.shape[1], y.shape[1])), cp.Variable(y.shape)
        intercept = cp.Variable((1, y.shape[1])) if program.fit_intercept else None
        constant = 0 if intercept is None else np.ones((len(y), 1)) @ intercept
        link = pred == matrix @ coef + constant  # the multiplier of this constraint is a dual point
        decay = program.alpha * program.penalty.expression(coef, n_blocks)
        objective = cp.Minimize(program.loss.expression(pred, y, weight) + decay)
        self._solve(cp.Problem(objective, [link, *program.penalty.constraints(coef, n_blocks)]))

        solution = torch.as_tensor(coef.value).to(program.y).reshape(program.coef_shape)
        multiplier = torch.as_tensor(link.dual_value).to(program.y).reshape(program.y.shape)
        theta = torch.where(program.weight[:, None] > 0, multiplier / program.weight[:, None], 0.0)
        start = None if intercept is None else torch.as_tensor(intercept.value).to(program.y)[0]
        return Point(*_polish(program, solution, start), theta)

    def point(self, program: Program, state: Point) -> Point:
        return state

    def finished(self, state: Point) -> bool:
        return True

    def _solve(self, problem: Any) -> None:
        import cvxpy as cp

        try:
            with warnings.catch_warnings():
                # The certificate says how accurate the solution is.
                warnings.filterwarnings("ignore", message="Solution may be inaccurate")
                problem.solve(solver=self.cvxpy_solver, **self.options)
        except Exception as error:
            if "license" in str(error).lower():
                raise SolverUnavailableError(
                    f"solver {self.cvxpy_solver!r} is installed but found no licence ({error}). Put the licence file "
                    "where the solver looks for it (MOSEK: ~/mosek/mosek.lic or the variable MOSEKLM_LICENSE_FILE; "
                    "academic licences are free), or use solver='exact', which needs none."
                ) from error
            if isinstance(error, cp.SolverError):
                unfit = "cannot solve this problem" in str(error)
                remedy = "; take one for cones, such as 'CLARABEL' or 'SCS'" if unfit else ""
                raise RuntimeError(f"solver {self.cvxpy_solver!r} failed: {error}{remedy}") from error
            raise
        if problem.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
            raise RuntimeError(
                f"solver {self.cvxpy_solver!r} ended without a solution: {problem.status}. Every program has one; "
                "bring features and targets to about one (and alpha with them), or use solver='auto'"
            )


def _polish(program: Program, coef: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """One proximal gradient step, taken only where it lowers the objective."""
    before = Fista().init(program, Point(coef, start))
    states = (Fista().step(program, before), before)
    best = min(states, key=lambda state: float(program.objective(state.coef, state.pred + state.intercept)))
    return best.coef, best.intercept

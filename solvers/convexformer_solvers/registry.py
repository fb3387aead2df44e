"""Solvers by name. A new one is a class in a file of its own and a line of ``SOLVERS``; ``check_solver`` tests it."""

from __future__ import annotations

from .algorithms.admm import Admm
from .algorithms.base import Solver
from .algorithms.column_generation import ColumnGeneration
from .algorithms.cvxpy import Exact
from .algorithms.fista import Fista
from .algorithms.semismooth_newton import SemismoothNewton
from .algorithms.smoothing_newton import SmoothingNewton
from .auto import Auto
from .validation import shown

SOLVERS: dict[str, type[Solver]] = {
    "admm": Admm,
    "auto": Auto,
    "column_generation": ColumnGeneration,
    "exact": Exact,
    "fista": Fista,
    "semismooth_newton": SemismoothNewton,
    "smoothing_newton": SmoothingNewton,
}


def get_solver(solver: str | Solver) -> Solver:
    """The solver of a registered name, a cvxpy solver by its name, or the instance itself.

    Parameters
    ----------
    solver : str or Solver
        A key of ``SOLVERS``; the name of a solver that cvxpy knows, in any case (``"mosek"`` is ``Exact("MOSEK")``);
        or an instance.

    Returns
    -------
    Solver

    Raises
    ------
    ValueError
        If nobody knows the name.

    Examples
    --------
    >>> get_solver("scs")
    Exact('SCS')
    """
    if isinstance(solver, Solver):
        return solver
    if isinstance(solver, str):
        if solver in SOLVERS:
            return SOLVERS[solver]()
        from cvxpy.settings import SOLVERS as CVXPY_SOLVERS

        if solver.upper() in CVXPY_SOLVERS:
            return Exact(solver)
    wanted = f"one of {sorted(SOLVERS)}, the name of a solver of cvxpy, or a Solver instance"
    raise ValueError(f"solver must be {wanted}, got {shown(solver)}")

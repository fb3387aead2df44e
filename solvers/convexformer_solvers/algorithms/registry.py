"""Names of the solvers, with their classes or where these are, to be loaded when first asked for."""

from __future__ import annotations

from importlib import import_module

from convexformer_solvers.validation import shown

from .base import Solver

SOLVERS: dict[str, str | type[Solver]] = {
    "admm": "convexformer_solvers.algorithms.admm:Admm",
    "auto": "convexformer_solvers.auto:Auto",
    "column_generation": "convexformer_solvers.algorithms.column_generation:ColumnGeneration",
    "exact": "convexformer_solvers.algorithms.cvxpy:Exact",
    "fista": "convexformer_solvers.algorithms.fista:Fista",
    "semismooth_newton": "convexformer_solvers.algorithms.semismooth_newton:SemismoothNewton",
    "smoothing_newton": "convexformer_solvers.algorithms.smoothing_newton:SmoothingNewton",
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
            entry = SOLVERS[solver]
            if isinstance(entry, str):
                module, _, attribute = entry.partition(":")
                entry = getattr(import_module(module), attribute)
            return entry()
        from cvxpy.settings import SOLVERS as CVXPY_SOLVERS

        if solver.upper() in CVXPY_SOLVERS:
            from .cvxpy import Exact

            return Exact(solver)
    wanted = f"one of {sorted(SOLVERS)}, the name of a solver of cvxpy, or a Solver instance"
    raise ValueError(f"solver must be {wanted}, got {shown(solver)}")

"""Regularisation paths: solutions along a decreasing grid of ``alpha``, each started from the one before."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from .algorithms.base import Solver
from .io.checkpoint import PathFile
from .points import Point
from .program import Program
from .result import Interrupted, Progress, SolverInterrupted, SolverResult
from .solve import Callback, Options, reduced, solve_on, starting_point
from .validation import as_dtype, check_counts, is_real, says_stop


@dataclass(frozen=True, eq=False)  # tensors have no single truth value
class Path:
    """Certified solutions along a grid.

    Attributes
    ----------
    alphas, results : list of float, list of SolverResult
        The grid, decreasing, and the solution of each alpha.
    no_coefs : Tensor of shape (0, ...)
        The ``coefs`` of a path without any results.
    """

    alphas: list[float]
    results: list[SolverResult] = field(repr=False)
    no_coefs: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)

    def __repr__(self) -> str:
        if not self.alphas:
            return "Path(no alphas)"
        grid = f"{len(self.alphas)} alphas from {self.alphas[0]:.3g} to {self.alphas[-1]:.3g}"
        return f"Path({grid}, gaps at most {max(self.gaps):.1e})"

    @property
    def coefs(self) -> Tensor:
        """Coefficients, shape ``(n_alphas, *coef_shape)``; the first axis is empty where nothing was finished."""
        return torch.stack([result.coef for result in self.results]) if self.results else self.no_coefs

    @property
    def gaps(self) -> list[float]:
        """Certified relative gaps."""
        return [result.certificate.relative_gap for result in self.results]


class PathInterrupted(Interrupted):
    """Raised on Ctrl-C during a path; `path` holds the alphas finished so far."""

    def __init__(self, path: Path, n_alphas: int, resume: str | os.PathLike[str] | None) -> None:
        how = "a call with resume='path.npz', the name of a file, keeps them on disk and can be continued"
        if resume is not None:
            how = f"repeat the call with resume={os.fspath(resume)!r} to continue"
        super().__init__(f"interrupted after {len(path.alphas)} of {n_alphas} alphas; {how}")
        self.path: Any = path  # estimators put theirs in its place


def alpha_grid(alpha_max: float, n_alphas: int = 30, eps: float = 1e-2) -> list[float]:
    """Geometric grid from ``alpha_max`` down to ``eps * alpha_max``.

    Parameters
    ----------
    alpha_max : float
        Smallest alpha whose solution is zero. Where it is 0 the grid starts at 1, as every alpha gives zero.
    n_alphas, eps : int, default=30, float, default=1e-2
        Length of the grid, and ratio of its last to its first alpha, below 1.

    Returns
    -------
    list of float

    Raises
    ------
    ValueError
        If an argument is out of range.

    Examples
    --------
    >>> alpha_grid(100.0, n_alphas=3)
    [100.0, 10.0, 1.0]
    """
    if not (is_real(alpha_max) and math.isfinite(alpha_max) and alpha_max >= 0):
        raise ValueError(f"alpha_max must be finite and not negative, got {alpha_max!r}")
    check_counts(n_alphas=n_alphas)
    if not (is_real(eps) and 0 < eps < 1):
        raise ValueError(f"eps must lie strictly between 0 and 1, got {eps!r}")
    first = float(alpha_max) if alpha_max > 0 else 1.0
    return [float(alpha) for alpha in np.geomspace(first, eps * first, int(n_alphas))]


def solve_path(
    program: Program,
    solver: Solver,
    alphas: Sequence[float] | None = None,
    *,
    tol: float = 1e-4,
    resume: str | os.PathLike[str] | None = None,
    verbose: bool = False,
    callback: Callback | None = None,
    start: tuple[Tensor, Tensor] | None = None,
    max_iter: int = 10_000,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> Path:
    """Solve a program for every alpha of a decreasing grid, each warm-started from the one before.

    Parameters
    ----------
    program, solver : Program, Solver
        The program, whatever its ``alpha``, and the algorithm.
    alphas : sequence of float, optional
        The grid; sorted to decrease. Default: ``alpha_grid(program.alpha_max)``.
    resume : str or path-like, optional
        An ``.npz`` file that is written after each alpha and on Ctrl-C. A later call with the same file, program and
        grid, whatever the solver and options, certifies its points again and continues from those not within ``tol``.
    tol, verbose, callback, start, max_iter, dtype, device
        As in ``solve``, for each alpha; ``start`` is that of the first, and one progress bar shows all.

    Returns
    -------
    Path
        A result from the file has the iterations and seconds of the run that found it, and one certificate as history.

    Raises
    ------
    PathInterrupted
        On Ctrl-C; a ``KeyboardInterrupt`` whose ``path`` holds what was finished.
    TypeError, ValueError
        As in ``solve``, and if the file of ``resume`` is of another program or grid; the message says what differs.

    Examples
    --------
    >>> import torch
    >>> from convexformer_solvers import DenseMap, Fista, GroupL2, Program, Squared
    >>> A = DenseMap(torch.eye(2, dtype=torch.float64)[:, :, None])
    >>> program = Program(A, torch.tensor([[3.0], [0.0]], dtype=torch.float64), Squared(), GroupL2(), alpha=1.0)
    >>> solve_path(program, Fista(), [1.5, 0.5], tol=1e-10).coefs[:, 0].flatten()
    tensor([0., 2.], dtype=torch.float64)
    """
    with torch.no_grad():
        grid = _grid(program, alphas)
    precision = as_dtype(dtype, program.map.dtype)
    results: list[SolverResult] = []
    options: dict[str, Any] = {"tol": tol, "resume": resume, "verbose": verbose, "callback": callback, "start": start}
    try:
        results.extend(
            iterate_path(program, solver, grid, max_iter=max_iter, dtype=precision, device=device, **options)
        )
        return Path(grid, results)
    except KeyboardInterrupt as interruption:
        no_coefs = torch.empty((0, *program.coef_shape), dtype=precision, device=device or program.map.device)
        raise PathInterrupted(Path(grid[: len(results)], results, no_coefs), len(grid), resume) from interruption


def iterate_path(
    program: Program,
    solver: Solver,
    alphas: Sequence[float] | None = None,
    *,
    tol: float = 1e-4,
    resume: str | os.PathLike[str] | None = None,
    verbose: bool = False,
    callback: Callback | None = None,
    start: tuple[Tensor, Tensor] | None = None,
    max_iter: int = 10_000,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> Iterator[SolverResult]:
    """The results of ``solve_path`` one at a time, for what would not fit into memory together.

    Parameters
    ----------
    program, solver, alphas, tol, resume, verbose, callback, start, max_iter, dtype, device
        As in ``solve_path``. With `resume` all points are held, as the file is written whole.

    Yields
    ------
    SolverResult
        In the order of the grid. The last two points and the solver's state are kept, to start the next alpha from.

    Raises
    ------
    SolverInterrupted, TypeError, ValueError
        On Ctrl-C, with the unfinished point in the file of ``resume``; the others as in ``solve_path``.

    Examples
    --------
    >>> import torch
    >>> from convexformer_solvers import DenseMap, Fista, GroupL2, Program, Squared
    >>> A = DenseMap(torch.eye(2, dtype=torch.float64)[:, :, None])
    >>> program = Program(A, torch.tensor([[3.0], [0.0]], dtype=torch.float64), Squared(), GroupL2(), alpha=1.0)
    >>> [round(result.certificate.primal, 6) for result in iterate_path(program, Fista(), [1.5, 0.5], tol=1e-10)]
    [2.25, 1.25]
    """
    options, (reference, chain) = Options(tol, max_iter, callback, verbose), reduced(program, solver, dtype, device)
    given = starting_point(chain.original, start)
    with torch.no_grad():
        grid = _grid(program, alphas)
        file = None if resume is None else PathFile(resume, program, grid)

    def results() -> Iterator[SolverResult]:
        solved: list[tuple[float, Point]] = []  # the last two alphas, with the last points of the solver
        point, state, name = given, None, f"path, {solver.name}"
        with tqdm(total=len(grid), disable=not verbose, desc=name, unit="alpha", miniters=0) as bar:

            def shown(progress: Progress) -> bool:
                bar.set_postfix_str(f"gap {progress.certificate.relative_gap:.1e}", refresh=False)
                bar.update(0)  # draws the bar, if the last time is long enough ago
                return says_stop(callback, progress)

            of_each = replace(options, callback=shown if verbose or callback is not None else None, verbose=False)
            for index, alpha in enumerate(grid):
                here, reduced_here = reference.with_alpha(alpha), chain.with_alpha(alpha)
                result = None if file is None else file.load(index, here, reduced_here.original.map.dtype)
                if result is not None and result.certificate.relative_gap <= tol:
                    solved, state = [], None
                else:
                    stored = None if result is None else Point(result.coef, result.intercept)
                    first = stored or _extrapolated(solved, alpha) or point
                    try:
                        # The point before costs less at a smaller alpha; where the others lead may cost more.
                        known = [] if point is None or first is point else [point]
                        result, end, state = solve_on(here, reduced_here, solver, of_each, first, state, known)
                    except SolverInterrupted as interruption:
                        result = interruption.result
                        raise
                    finally:
                        if file is not None and result is not None:
                            file.save(index, result)
                    solved = [*solved[-1:], (alpha, end)]
                point = Point(result.coef, result.intercept)
                bar.update()
                yield result

    return results()


def check_grid(alphas: Any) -> list[float]:
    """A grid of alphas as a list of floats in the order given; ``ValueError`` unless all are positive and finite."""
    try:
        grid = np.asarray(alphas)
        valid = grid.dtype.kind in "iuf" and grid.ndim == 1 and grid.size > 0
        valid = valid and bool(np.isfinite(grid).all() and (grid > 0).all())
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ValueError(f"alphas must be a list of at least one positive finite number, got {alphas!r}")
    return [float(alpha) for alpha in grid]


def _grid(program: Program, alphas: Sequence[float] | None) -> list[float]:
    return alpha_grid(program.alpha_max) if alphas is None else sorted(check_grid(alphas), reverse=True)


def _extrapolated(solved: list[tuple[float, Point]], alpha: float) -> Point | None:
    """Linear extrapolation in ``alpha`` of two points, exact between the kinks of a lasso; or the one, if any."""
    if not solved:
        return None
    (first, before), (last, end) = solved[0], solved[-1]
    if first == last or before.pred is None or end.pred is None:
        return end
    assert before.intercept is not None
    assert end.intercept is not None
    parts = ((before.coef, end.coef), (before.intercept, end.intercept), (before.pred, end.pred))
    coef, intercept, pred = (torch.lerp(*ends, 1 + (alpha - last) / (last - first)) for ends in parts)
    return Point(coef, intercept, pred=pred)

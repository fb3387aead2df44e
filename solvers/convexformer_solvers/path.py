"""Solutions along a decreasing grid of ``alpha``, each started from the one before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .program import Program
from .result import SolverInterrupted, SolverResult
from .solver import Solver, solve


@dataclass(frozen=True)
class Path:
    """Certified solutions along a grid.

    Attributes
    ----------
    alphas : list of float
        The grid, decreasing.
    results : list of SolverResult
        One per alpha.
    """

    alphas: list[float]
    results: list[SolverResult] = field(repr=False)

    @property
    def coefs(self) -> Tensor:
        """Coefficients, shape ``(n_alphas, *coef_shape)``."""
        return torch.stack([result.coef for result in self.results])

    @property
    def gaps(self) -> list[float]:
        """Certified relative gaps."""
        return [result.certificate.relative_gap for result in self.results]


class PathInterrupted(KeyboardInterrupt):
    """Raised on Ctrl-C during a path; `path` holds the alphas finished so far."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"interrupted after {len(path.alphas)} alphas")
        self.path = path


def alpha_grid(alpha_max: float, n_alphas: int = 30, eps: float = 1e-2) -> list[float]:
    """Geometric grid from ``alpha_max`` down to ``eps * alpha_max``.

    Parameters
    ----------
    alpha_max : float
        Smallest alpha whose solution is zero. Where it is 0 every alpha gives zero, and the grid starts at 1.
    n_alphas : int, default=30
        Length of the grid.
    eps : float, default=1e-2
        Ratio of the last to the first alpha, below 1.

    Returns
    -------
    list of float

    Raises
    ------
    ValueError
        If ``alpha_max``, ``n_alphas`` or ``eps`` is out of range.

    Examples
    --------
    >>> alpha_grid(1.0, n_alphas=3)
    [1.0, 0.1, 0.01]
    """
    if not math.isfinite(alpha_max):
        raise ValueError(f"alpha_max must be finite, got {alpha_max!r}")
    if n_alphas < 1:
        raise ValueError(f"n_alphas must be at least 1, got {n_alphas!r}")
    if not 0 < eps < 1:
        raise ValueError(f"eps must lie strictly between 0 and 1, got {eps!r}")
    first = alpha_max if alpha_max > 0 else 1.0
    return [float(alpha) for alpha in np.geomspace(first, eps * first, n_alphas)]


def solve_path(program: Program, solver: Solver, alphas: Sequence[float] | None = None, **options: Any) -> Path:
    """Solve a program for every alpha of a decreasing grid, each warm-started from the one before.

    Parameters
    ----------
    program : Program
        Its own ``alpha`` is ignored.
    solver : Solver
        The algorithm.
    alphas : sequence of float, optional
        The grid; sorted to decrease. Default: ``alpha_grid(program.alpha_max)``.
    **options
        Passed to ``solve``.

    Returns
    -------
    Path

    Raises
    ------
    PathInterrupted
        On Ctrl-C; a ``KeyboardInterrupt`` whose ``path`` holds what was finished.

    Examples
    --------
    >>> import torch
    >>> from convexformer_solvers import DenseMap, Fista, GroupL2, Program, Squared
    >>> A = DenseMap(torch.eye(2, dtype=torch.float64)[:, :, None])
    >>> program = Program(A, torch.tensor([[3.0], [0.0]], dtype=torch.float64), Squared(), GroupL2(), alpha=1.0)
    >>> solve_path(program, Fista(), [1.5, 0.5], tol=1e-10).coefs[:, 0].flatten()
    tensor([0., 2.], dtype=torch.float64)
    """
    grid = alpha_grid(program.alpha_max) if alphas is None else sorted((float(alpha) for alpha in alphas), reverse=True)
    results: list[SolverResult] = []
    start: tuple[Tensor, Tensor] | None = options.pop("start", None)
    for alpha in grid:
        try:
            result = solve(program.with_alpha(alpha), solver, start=start, **options)
        except SolverInterrupted as interruption:
            raise PathInterrupted(Path(grid[: len(results)], results)) from interruption
        start = (result.coef, result.intercept)
        results.append(result)
    return Path(grid, results)

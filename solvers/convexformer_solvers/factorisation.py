"""Cholesky factors of matrices that rounding may have robbed of their definiteness, and solves with few right sides."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def cholesky(matrix: Tensor) -> Tensor:
    """Lower Cholesky factor of a positive semidefinite matrix, of which only the lower triangle counts.

    Where rounding hides a positive eigenvalue the diagonal of `matrix` is raised, **in place**, by as little as helps,
    from the rounding of its largest entry on.

    Parameters
    ----------
    matrix : Tensor of shape (n, n)
        Finite.

    Returns
    -------
    Tensor of shape (n, n)

    Raises
    ------
    ValueError
        If the matrix is not finite.

    Examples
    --------
    >>> cholesky(torch.tensor([[4.0, 0.0], [2.0, 5.0]]))
    tensor([[2., 0.],
            [1., 2.]])
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not bool(failed):
        return factor
    jitter = _first_jitter(matrix)
    while bool(failed):
        matrix.diagonal().add_(jitter)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        jitter *= 10
    return factor


def cholesky_in_place(make: Callable[[], Tensor]) -> Tensor:
    """``cholesky`` of a matrix made by a function, within the memory of that matrix.

    Parameters
    ----------
    make : callable
        Returns the matrix; called again each time that its diagonal has to be raised.

    Returns
    -------
    Tensor of shape (n, n)

    Raises
    ------
    ValueError
        If the matrix is not finite.

    Examples
    --------
    >>> cholesky_in_place(lambda: torch.tensor([[4.0, 2.0], [2.0, 5.0]]))
    tensor([[2., 0.],
            [1., 2.]])
    """
    factor, failed = _factorised_in_place(make())
    if not failed:
        return factor
    del factor
    matrix = make()
    raised = _first_jitter(matrix)
    while True:
        matrix.diagonal().add_(raised)
        factor, failed = _factorised_in_place(matrix)
        if not failed:
            return factor
        matrix = make()
        raised *= 10


def _factorised_in_place(matrix: Tensor) -> tuple[Tensor, bool]:
    """Lower factor of a matrix of which only the lower triangle counts, and whether that failed."""
    failed = torch.zeros((), dtype=torch.int32, device=matrix.device)
    # It works column by column, hence on the transpose.
    torch.linalg.cholesky_ex(matrix.mT, upper=True, out=(matrix.mT, failed))
    return matrix, bool(failed)


def _first_jitter(matrix: Tensor) -> float:
    """Ten times the rounding of a matrix's largest entry."""
    if not bool(torch.isfinite(matrix.tril()).all()):
        raise ValueError("matrix must be finite")
    return 10 * torch.finfo(matrix.dtype).eps * max(float(matrix.diagonal().abs().max()), 1e-300)


# Side of the diagonal blocks whose inverses are kept.
_BLOCK = 256


class CholeskySolver:
    """Solver of many systems with one positive semidefinite matrix and few right sides each.

    The inverses of the factor's diagonal blocks are kept: all else is matrix products, which read the factor once per
    substitution. ``torch.cholesky_solve`` takes seven times longer for one right side and 4000 unknowns.

    Parameters
    ----------
    lower : Tensor of shape (n, n)
        The Cholesky factor.

    Examples
    --------
    >>> factor = cholesky(torch.tensor([[4.0, 0.0], [2.0, 5.0]]))
    >>> CholeskySolver(factor).solve(torch.tensor([[8.0], [8.0]])).flatten()
    tensor([1.5000, 1.0000])
    """

    def __init__(self, lower: Tensor) -> None:
        self.lower = lower
        blocks = [slice(start, start + _BLOCK) for start in range(0, len(lower), _BLOCK)]
        identity = torch.eye(min(_BLOCK, len(lower)), dtype=lower.dtype, device=lower.device)
        self._inverses = []
        for block in blocks:
            corner = self.lower[block, block]
            unit = identity[: len(corner), : len(corner)]
            self._inverses.append((block, torch.linalg.solve_triangular(corner, unit, upper=False)))

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the factor."""
        return self.lower.dtype

    def solve(self, right: Tensor) -> Tensor:
        """Solution of the system, of the shape ``(n, k)`` of the right side."""
        return self.solve_upper(self.solve_lower(right))

    def solve_lower(self, right: Tensor) -> Tensor:
        """Solution of the system with the lower factor ``L``."""
        solution = right.clone()
        for block, inverse in self._inverses:
            if block.start:
                solution[block].addmm_(self.lower[block, : block.start], solution[: block.start], alpha=-1)
            solution[block] = inverse @ solution[block]
        return solution

    def solve_upper(self, right: Tensor) -> Tensor:
        """Solution of the system with ``L'``."""
        solution = right.clone()
        for block, inverse in reversed(self._inverses):
            if block.stop < len(solution):
                solution[block].addmm_(self.lower[block.stop :, block].T, solution[block.stop :], alpha=-1)
            solution[block] = inverse.T @ solution[block]
        return solution

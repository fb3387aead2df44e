"""Cholesky factors of matrices that are positive semidefinite up to rounding, and solves with few right sides."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from convexformer_solvers.linear_maps.base import as_rows, slices


def cholesky(matrix: Tensor) -> Tensor:
    """Lower Cholesky factor of a positive semidefinite matrix, of which only the lower triangle counts.

    Where rounding makes an eigenvalue negative the diagonal of `matrix` is raised, **in place**, by ten times the
    rounding of its largest entry, or more. ``torch.linalg.LinAlgError`` is raised where the matrix is not finite.
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    jitter = _jitter([matrix.tril()]) if bool(failed) else 0.0
    while bool(failed):
        matrix.diagonal().add_(jitter)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        jitter *= 10
    return factor


def _jitter(parts: Iterable[Tensor]) -> float:
    """Ten times the rounding of a matrix's largest diagonal entry, in any of its parts; raises where not finite."""
    largest, eps = 1e-300, 0.0
    for part in parts:
        if not bool(torch.isfinite(part).all()):
            raise torch.linalg.LinAlgError("matrix must be finite")
        largest, eps = max(largest, float(part.diagonal().abs().max())), torch.finfo(part.dtype).eps
    return 10 * eps * largest


class CholeskySolver:
    """Solver of many systems with one matrix ``L L'``, given `upper` ``= L'``, and few right sides ``(n, k)`` each.

    The inverses of the diagonal blocks of ``L`` are kept; of `upper` only the part above them is read. With one right
    side and 4000 unknowns ``torch.cholesky_solve`` takes seven times as long.
    """

    def __init__(self, upper: Tensor, inverses: list[Tensor] | None = None) -> None:
        self.upper, self.dtype = upper, upper.dtype
        blocks = diagonal_blocks(len(upper))
        if inverses is None:
            inverses = [_inverse_of_lower(upper[block, block].T) for block in blocks]
        self._blocks = list(zip(blocks, inverses, strict=True))

    def solve(self, right: Tensor) -> Tensor:
        return self.solve_upper(self.solve_lower(right))

    def solve_lower(self, right: Tensor) -> Tensor:
        """Solution of the system with the lower factor ``L``."""
        solution = right.T.clone(memory_format=torch.contiguous_format)
        for block, inverse in self._blocks:
            before, above = solution[:, : block.start], self.upper[: block.start, block]
            solution[:, block] = torch.addmm(solution[:, block], before, above, alpha=-1) @ inverse.T
        return as_rows(solution)

    def solve_upper(self, right: Tensor) -> Tensor:
        """Solution of the system with ``L'``."""
        solution = right.T.clone(memory_format=torch.contiguous_format)
        for block, inverse in reversed(self._blocks):
            after, above = solution[:, block.stop :], self.upper[block, block.stop :].T
            solution[:, block] = torch.addmm(solution[:, block], after, above, alpha=-1) @ inverse
        return as_rows(solution)


def factorised_above(matrix: Tensor, entries: Callable[[slice], Tensor], raised: float = 0.0) -> CholeskySolver:
    """Factorise a matrix made from the lower triangle of another and a raised diagonal, in the memory of that one.

    The factor overwrites what stands above the diagonal blocks of `matrix`, shape ``(n, n)``; its lower triangle stays
    as it is and can serve again. `entries` gives the matrix to factorise in the rows of a diagonal block and from the
    first of these columns on, as a new tensor. The diagonal and errors are raised as in ``cholesky``.
    """
    inverses = _inverses_of_factor(matrix, entries, raised)
    jitter = _jitter(map(entries, diagonal_blocks(len(matrix)))) if inverses is None else 0.0
    while inverses is None:
        inverses = _inverses_of_factor(matrix, entries, raised + jitter)
        jitter *= 10
    return CholeskySolver(matrix, inverses)


def lower_rows(matrix: Tensor, rows: slice) -> Tensor:
    """Rows of a symmetric matrix, from the first of the same columns on, read from its lower triangle; a copy."""
    result = matrix[rows.start :, rows].T.clone()
    corner = matrix[rows, rows]
    result[:, : len(corner)] = corner.tril() + corner.tril(-1).T
    return result


def _inverses_of_factor(matrix: Tensor, entries: Callable[[slice], Tensor], raised: float) -> list[Tensor] | None:
    """Write the factor above the diagonal blocks and return their inverses; None where there is no factor."""
    inverses = []
    for block in diagonal_blocks(len(matrix)):
        rows = entries(block)
        rows.diagonal().add_(raised)
        rows.addmm_(matrix[: block.start, block].T, matrix[: block.start, block.start :], alpha=-1)
        factor, failed = torch.linalg.cholesky_ex(rows[:, : len(rows)])
        if bool(failed):
            return None
        inverses.append(_inverse_of_lower(factor))
        matrix[block, block.stop :] = inverses[-1] @ rows[:, len(rows) :]
    return inverses


def diagonal_blocks(size: int) -> list[slice]:
    """Rows of the diagonal blocks whose inverses are kept: wide ones take long to invert, narrow ones many calls."""
    return list(slices(size, 256))


def _inverse_of_lower(lower: Tensor) -> Tensor:
    identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower, identity, upper=False)

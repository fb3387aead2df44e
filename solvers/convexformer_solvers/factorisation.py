"""Cholesky factors of matrices that rounding may have robbed of their definiteness."""

from __future__ import annotations

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
    if not bool(torch.isfinite(matrix.tril()).all()):
        raise ValueError("matrix must be finite")
    jitter = 10 * torch.finfo(matrix.dtype).eps * max(float(matrix.diagonal().abs().max()), 1e-300)
    while bool(failed):
        matrix.diagonal().add_(jitter)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        jitter *= 10
    return factor

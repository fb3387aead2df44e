"""Matrices of low rank plus a multiple of the identity, as metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.linalg.line_search import backtracking
from convexformer_solvers.rounding import EPS

from .model import Model


class _At(NamedTuple):
    """What the coordinates ``w`` of a model's dual say."""

    w: Tensor  # (r, k)
    shifted: Tensor  # (q - V w) / t, (p, k)
    coef: Tensor  # its prox, (p, k)
    residual: Tensor  # V' coef - w, (r, k)
    merit: float

    @property
    def gap(self) -> float:
        """The model's duality gap."""
        return 0.5 * float(self.residual.square().sum())


class LowRank:
    r"""The matrix ``V V' + t I``: the approximation of a positive semidefinite one by its product with directions.

    Both have shape (p, r), and the directions are orthonormal; `rounding` is the size of the product's, if it is more
    than that of float64.

    It has the largest eigenvalues of the Nystrom approximation (Tropp et al. 2017, algorithm 3), and the smallest of
    these for all others. A model is minimised in its dual, which has one variable for each column of ``V`` and output
    (Becker, Fadili and Ochs 2019). With :math:`z(w) = \mathrm{prox}_{\alpha \Omega / t}((q - V w) / t)` that is the
    root of ``V' z(w) - w``, half of whose square is the model's duality gap.

    Examples
    --------
    >>> matrix = torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64))
    >>> directions = torch.eye(4, 3, dtype=torch.float64)
    >>> low_rank = LowRank(matrix @ directions, directions)
    >>> torch.allclose(low_rank.product(torch.eye(4).double()), matrix)  # the smallest one stands for the fourth
    True
    """

    def __init__(self, product: Tensor, directions: Tensor, rounding: float = 0.0) -> None:
        rounding = max(rounding, EPS * float(torch.linalg.matrix_norm(product)))
        shift = math.sqrt(len(product)) * rounding or EPS
        shifted = product + shift * directions
        inner = directions.T @ shifted
        inner = 0.5 * (inner + inner.T)
        lower, failed = torch.linalg.cholesky_ex(inner)
        if int(failed):  # of few samples with large means, where rounding may be more than the shift
            values, vectors = torch.linalg.eigh(inner)
            root = (vectors / values.clamp(min=shift).sqrt()).T @ shifted.T
        else:
            root = torch.linalg.solve_triangular(lower, shifted.T, upper=False)
        values, vectors = torch.linalg.eigh(root @ root.T)
        # Minima of models in metrics that are closer to singular take thousands of steps.
        self.ridge = max(float(values[0]) - shift, math.sqrt(math.sqrt(EPS)) * float(values[-1]))
        self.values = (values - shift - self.ridge).clamp(min=0)
        self.factor = root.T @ (vectors * (self.values / values).sqrt())

    def product(self, flat: Tensor) -> Tensor:
        """Product of the matrix with ``(p, k)``."""
        return (self.factor @ (self.factor.T @ flat)).add_(flat, alpha=self.ridge)

    def goal(self, share: float, accuracy: float) -> float:
        """Gap of a model's minimum for a gap of the program, both over its value at zero.

        With the square: the program's gap is linear in the distance to the solution, a model's is quadratic.
        """
        return accuracy * share**2

    def minimum(self, model: Model) -> Tensor:
        """Semismooth Newton steps on the dual, whose systems are solved by conjugate gradients."""
        at = self._at(model, self.factor.T @ model.start)
        while at.gap > model.goal:
            following = self._newton_step(model, at)
            if following is None:
                break
            at = following
        while at.gap > model.goal:  # the gap has digits where differences of the merit have none
            following = self._at(model, at.w + self._newton_direction(model, at))
            if not following.gap <= 0.5 * at.gap:
                break
            at = following
        return at.coef

    def _newton_step(self, model: Model, at: _At) -> _At | None:
        """The end of a step that lowers the merit by more than rounding; None where there is none."""
        way = self._newton_direction(model, at)

        def trial(length: float) -> _At:
            return self._at(model, at.w + length * way)

        found = backtracking(trial, lambda end: end.merit, at.merit, -float((way * at.residual).sum()))
        return found[1] if found is not None and found[1].merit < at.merit - EPS * abs(at.merit) else None

    def _at(self, model: Model, w: Tensor) -> _At:
        shifted = (model.product - self.factor @ w) / self.ridge
        coef = model.prox(shifted, self.ridge)
        envelope = self.ridge * float((shifted * coef).sum() - 0.5 * coef.square().sum()) - model.value(coef)
        return _At(w, shifted, coef, self.factor.T @ coef - w, 0.5 * float(w.square().sum()) + envelope)

    def _newton_direction(self, model: Model, at: _At) -> Tensor:
        """Solution of the system of the dual's second derivatives, by differences of the prox of nonzero blocks."""
        rows, prox = model.nonzero(at.coef)
        if not len(rows):
            return at.residual
        factor, shifted, coef = self.factor[rows], at.shifted[rows], at.coef[rows]
        size = math.sqrt(EPS) * float(torch.linalg.vector_norm(shifted))

        def product(way: Tensor) -> Tensor:
            move = factor @ way
            length = size / max(float(torch.linalg.vector_norm(move)), EPS * size)
            change = (coef - prox(shifted - length * move, self.ridge)) / length
            return way + factor.T @ change / self.ridge

        share = len(rows) / len(at.coef)
        return _conjugate_gradients(product, at.residual, 1 + share * self.values[:, None] / self.ridge)


def _conjugate_gradients(product: Callable[[Tensor], Tensor], right: Tensor, diagonal: Tensor) -> Tensor:
    """Solution of a positive definite system to a tenth of its right-hand side, with a diagonal preconditioner."""
    x, residual = torch.zeros_like(right), right
    way = residual / diagonal
    square = (residual * way).sum()
    goal = 0.1 * torch.linalg.vector_norm(right)
    for _ in range(right.numel()):
        if torch.linalg.vector_norm(residual) <= goal:
            break
        image = product(way)
        step = square / (way * image).sum()
        x, residual = x + step * way, residual - step * image
        scaled = residual / diagonal
        before, square = square, (residual * scaled).sum()
        way = scaled + square / before * way
    return x

"""The quadratic models that variable-metric steps minimise, without the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.linear_maps.base import nonzero_blocks
from convexformer_solvers.losses.regression import Squared
from convexformer_solvers.penalties.base import Penalty
from convexformer_solvers.points import Point
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.moments import GramRoot
from convexformer_solvers.rounding import EPS

from .batched import Batched


class Model(NamedTuple):
    """The minimum over coefficients ``z`` of ``z' H z / 2 - q' z + alpha * penalty(z)``, with ``H`` a metric."""

    penalty: Penalty
    alpha: float
    shape: tuple[int, ...]  # (*block_shape, d, k), of coefficients
    product: Tensor  # the q, (p, k)
    start: Tensor  # (p, k)
    goal: float  # gap to which it is minimised

    def value(self, flat: Tensor) -> float:
        """Penalty of coefficients ``(p, k)``, times alpha."""
        return self.alpha * float(self.penalty.value(flat.reshape(self.shape)))

    def prox(self, flat: Tensor, curvature: float) -> Tensor:
        """Minimiser of the penalty and of half a curvature times the squared distance from ``(p, k)``."""
        return self.penalty.prox(flat.reshape(self.shape), self.alpha / curvature).reshape(flat.shape)

    def nonzero(self, flat: Tensor) -> tuple[Tensor, Callable[[Tensor, float], Tensor]]:
        """Positions of the features of blocks that are not zero, and the prox of these alone."""
        positions, (*_, width, k) = torch.arange(len(flat), device=flat.device), self.shape
        if not self.penalty.block_separable:
            return positions, self.prox
        blocks = nonzero_blocks(flat.reshape(self.shape))
        return positions.view(-1, width)[blocks].flatten(), self._replace(shape=(int(blocks.sum()), width, k)).prox


class Gram:
    """A Gram matrix as a metric; models are programs of the squared loss, which a solver solves."""

    def __init__(self, gram: Tensor, feature_shape: tuple[int, ...], solver: Batched) -> None:
        self._gram, self._root, self._solver = gram, GramRoot(gram, feature_shape), solver

    def product(self, flat: Tensor) -> Tensor:
        """Product of the matrix with ``(p, k)``."""
        return self._gram @ flat

    def goal(self, share: float, accuracy: float) -> float:
        """Gap of a model's minimum for a gap of the program, both over its value at zero.

        In proportion, as each step of the solver costs; gaps are rounded differences.
        """
        return max(accuracy * share, EPS)

    def minimum(self, model: Model) -> Tensor:
        """Steps of the solver to the model's goal."""
        y = self._root.targets(model.product)
        program = Program(self._root.map, y, Squared(), model.penalty, model.alpha)
        inner = self._solver.init(program, Point(model.start.view(model.shape)))
        inner = self._solver.until(program, inner, model.goal)
        return self._solver.point(program, inner).coef.reshape(model.start.shape)

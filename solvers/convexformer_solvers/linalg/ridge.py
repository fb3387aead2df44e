r"""Ridge regressions over one linear map, with one Gram matrix for all of them.

.. math:: \min_{W, b} \; \tfrac12 \sum_i q_i \|(A W)_i + b - t_i\|^2 + \tfrac\rho2 \|W - V\|^2

for changing targets ``t`` and centres ``V`` and, at times, other weights ``q`` and ``rho``. The intercept ``b`` is
optional.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from convexformer_solvers.linear_maps.base import LinearMap

from .cholesky import CholeskySolver, diagonal_blocks, factorised_above, lower_rows

# Up to this many features systems are solved in the features, where a repeated sample is the same as a weight of two;
# from ten times as many on in single precision.
SMALL_SIDE = 500


class RidgeSystem(ABC):
    """Solver of ridge problems; ``ridge_system`` picks the side.

    All arithmetic is in the precision of the weights. Targets and fits have the shape ``(N, c)``, centres and
    solutions the shape ``(*feature_shape, c)``.
    """

    fits_without_products: ClassVar[bool] = False  # whether `fit` takes no product with the data

    def __init__(self, linear_map: LinearMap, fit_intercept: bool) -> None:
        self.map, self.fit_intercept = linear_map, fit_intercept
        self._inverse: CholeskySolver | None = None

    def factorise(self, weight: Tensor, rho: float) -> None:
        """Take positive weights ``q`` of shape ``(N,)`` and another ``rho``; costs one Cholesky factorisation."""
        self._inverse = None  # the factor stands above the Gram matrix
        self.weight, self.rho = weight, rho
        matrix = self._gram()
        self._inverse = factorised_above(matrix, self._entries(matrix), rho)

    @abstractmethod
    def fit(self, target: Tensor, center: Tensor, fitted_center: Tensor) -> Tensor:
        """Fit ``A W + b`` of the solution for ``t``, ``V`` and ``A V``, which the caller has."""

    last: Any  # what the last fit leaves for its solution; that of an earlier fit may take its place

    @abstractmethod
    def solution(self) -> Tensor:
        """The ``W`` of the last fit."""

    def squared_move(self, fitted: Tensor, fitted_center: Tensor) -> float:
        """``|W - V|^2`` of the last fit, where it has taken no product with the data."""
        raise NotImplementedError

    @abstractmethod
    def _gram(self) -> Tensor:
        """A matrix that is kept, whose lower triangle determines the Gram matrix."""

    def _entries(self, matrix: Tensor) -> Callable[[slice], Tensor]:
        """Rows of the weighted and centred Gram matrix, from the first of the same columns on, as new tensors."""
        return lambda rows: lower_rows(matrix, rows)

    def _solved(self, right: Tensor) -> Tensor:
        assert self._inverse is not None
        return self._inverse.solve(right.to(self._inverse.dtype)).to(right.dtype)

    def _mean(self, values: Tensor) -> Tensor:
        return self.weight @ values / self.weight.sum()

    def _centered(self, values: Tensor) -> Tensor:
        return values - self._mean(values) if self.fit_intercept else values


class RidgeInSamples(RidgeSystem):
    """Through the ``N x N`` matrix of the samples; gated designs are never formed."""

    fits_without_products = True
    _kernel: Tensor | None = None
    last: tuple[Tensor, Tensor]  # centre of the last fit, and weighted residual over rho

    def fit(self, target: Tensor, center: Tensor, fitted_center: Tensor) -> Tensor:
        root = self.weight.sqrt()[:, None]
        scaled = self._solved(root * self._centered(target - fitted_center))
        if self.fit_intercept:
            # Rounding leaves a mean, which large means of the features multiply.
            scaled = scaled - root * (root.T @ scaled / self.weight.sum())
        self.last = center, root * scaled
        return target - self.rho * scaled / root

    def solution(self) -> Tensor:
        center, multiplier = self.last
        return center + self.map.rmatvec(multiplier)

    def squared_move(self, fitted: Tensor, fitted_center: Tensor) -> float:
        return float((self.last[1] * (fitted - fitted_center)).sum())  # W - V = A' m, and m has no mean

    def _gram(self) -> Tensor:
        if self._kernel is None:
            self._kernel = self.map.full_kernel(self.weight.dtype)
        return self._kernel

    def _entries(self, matrix: Tensor) -> Callable[[slice], Tensor]:
        weight = self.map.gathered(self.weight)
        # Mean over all samples of each sample's row, which the intercept subtracts.
        root, mean, share = weight.sqrt(), torch.zeros_like(weight), weight / weight.sum()
        for rows in diagonal_blocks(len(root)) if self.fit_intercept else ():
            part = lower_rows(matrix, rows)
            mean[rows.start :] += share[rows] @ part
            mean[rows] += part[:, len(part) :] @ share[rows.stop :]
        common = self._mean(mean)

        def entries(rows: slice) -> Tensor:
            right = slice(rows.start, None)
            centered = lower_rows(matrix, rows).sub_(mean[rows, None] - common).sub_(mean[right])
            return centered.mul_(root[rows, None]).mul_(root[right])

        return entries


class RidgeInFeatures(RidgeSystem):
    """Through the ``p x p`` matrix of the features.

    A large one is in single precision: each solve refines the move of the last, so that the factor's error falls.
    """

    largest_double: ClassVar[int] = 10 * SMALL_SIDE  # side of the largest matrix in double precision

    _weighted: tuple[Tensor, Tensor] | None = None  # weights and their Gram matrix
    _before: tuple[Tensor, Tensor] | None = None  # the last solution minus its centre, and its fit
    last: Tensor  # solution of the last fit

    def fit(self, target: Tensor, center: Tensor, fitted_center: Tensor) -> Tensor:
        move, fitted_move = self._before or (torch.zeros_like(center), torch.zeros_like(fitted_center))
        residual = self._centered(target - fitted_center - fitted_move)
        right = self.map.rmatvec(self.weight[:, None] * residual).sub_(move, alpha=self.rho)
        correction = self._solved(right.reshape(-1, right.shape[-1]))
        self.last = center + move + correction.view_as(center)
        fitted = self.map.matvec(self.last)
        self._before = self.last - center, fitted - fitted_center
        return fitted + self._mean(target - fitted) if self.fit_intercept else fitted

    def solution(self) -> Tensor:
        return self.last

    def _gram(self) -> Tensor:
        if self._weighted is None or not torch.equal(self._weighted[0], self.weight):
            self._weighted = None  # its memory is needed
            large = math.prod(self.map.feature_shape) > self.largest_double
            matrix = self.map.full_gram(self.weight.float() if large else self.weight)
            if self.fit_intercept:
                total = self.map.rmatvec(self.weight[:, None]).flatten().to(matrix)
                matrix.addr_(total, total, alpha=-1 / float(self.weight.sum()))
            self._weighted = self.weight, matrix
        return self._weighted[1]


def ridge_system(linear_map: LinearMap, fit_intercept: bool) -> RidgeSystem:
    """The ridge system on the smaller side of the map, or in the features where these are few."""
    n_features = math.prod(linear_map.feature_shape)
    in_samples = n_features > SMALL_SIDE and linear_map.n_samples < n_features
    side: type[RidgeSystem] = RidgeInSamples if in_samples else RidgeInFeatures
    return side(linear_map, fit_intercept)

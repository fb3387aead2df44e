r"""Many ridge problems over one linear map, with the Gram matrix on the smaller side formed once.

.. math:: \min_{W, b} \; \tfrac12 \sum_i q_i \|(A W)_i + b - t_i\|^2 + \tfrac\rho2 \|W - V\|^2

for changing targets ``t`` and centres ``V`` and, now and then, other weights ``q`` and ``rho``. The intercept ``b`` is
optional.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .factorisation import cholesky
from .operators import LinearMap

# Up to this many features their side is taken: there a repeated sample is the same as a weight of two.
SMALL_SIDE = 500


class RidgeSystem(ABC):
    """Solver of ridge problems; ``ridge_system`` picks the side.

    Parameters
    ----------
    linear_map : LinearMap
        The map ``A``; all arithmetic is in the precision of the weights.
    fit_intercept : bool
        Whether ``b`` is there.
    """

    def __init__(self, linear_map: LinearMap, fit_intercept: bool) -> None:
        self.map, self.fit_intercept = linear_map, fit_intercept

    def factorise(self, weight: Tensor, rho: float) -> None:
        """Take positive weights ``q`` of shape ``(N,)`` and another ``rho``; costs one Cholesky factorisation."""
        self.weight, self.rho = weight, rho
        matrix = self._gram()
        matrix.diagonal().add_(rho)
        self._factor = cholesky(matrix)

    @abstractmethod
    def solve(self, target: Tensor, center: Tensor, fitted_center: Tensor) -> tuple[Tensor, Tensor]:
        """Solution and its fit.

        Parameters
        ----------
        target : Tensor of shape (N, c)
            The ``t``.
        center : Tensor of shape (*feature_shape, c)
            The ``V``.
        fitted_center : Tensor of shape (N, c)
            ``A V``, which the caller has.

        Returns
        -------
        coef : Tensor of shape (*feature_shape, c)
            The ``W``.
        fitted : Tensor of shape (N, c)
            ``A W + b``.
        """

    @abstractmethod
    def _gram(self) -> Tensor:
        """A copy of the weighted and centred Gram matrix; only its lower triangle counts."""

    def _mean(self, values: Tensor) -> Tensor:
        return self.weight @ values / self.weight.sum()

    def _centered(self, values: Tensor) -> Tensor:
        return values - self._mean(values) if self.fit_intercept else values


class RidgeInSamples(RidgeSystem):
    """Through the ``N x N`` matrix of the samples; gated designs are never formed."""

    _kernel: Tensor | None = None

    def solve(self, target: Tensor, center: Tensor, fitted_center: Tensor) -> tuple[Tensor, Tensor]:
        root = self.weight.sqrt()[:, None]
        residual = self._centered(target - fitted_center)
        scaled = torch.cholesky_solve(root * residual, self._factor)
        coef = center + self.map.rmatvec(root * scaled)
        # The system itself says what the fit is, so that no product is needed.
        return coef, target - self.rho * scaled / root

    def _gram(self) -> Tensor:
        if self._kernel is None:
            n_groups, d = math.prod(self.map.feature_shape[:-1]), self.map.feature_shape[-1]
            blocks = torch.arange(n_groups, device=self.weight.device)
            ones, zeros = self.weight.new_ones(n_groups), self.weight.new_zeros((n_groups, d))
            self._kernel = self.map.kernel(blocks, ones, zeros)
        root = self.weight.sqrt()
        if not self.fit_intercept:
            return self._kernel * root[:, None] * root
        mean = self._mean(self._kernel.tril()) + self._kernel.tril(-1) @ (self.weight / self.weight.sum())
        return (self._kernel - (mean - self._mean(mean)) - mean[:, None]) * root[:, None] * root


class RidgeInFeatures(RidgeSystem):
    """Through the ``p x p`` matrix of the features."""

    _weighted: tuple[Tensor, Tensor] | None = None  # weights and their Gram matrix

    def solve(self, target: Tensor, center: Tensor, fitted_center: Tensor) -> tuple[Tensor, Tensor]:
        residual = self._centered(target - fitted_center)
        right = self.map.rmatvec(self.weight[:, None] * residual)
        move = torch.cholesky_solve(right.reshape(-1, right.shape[-1]), self._factor)
        coef = center + move.reshape(center.shape)
        fitted = self.map.matvec(coef)
        return coef, fitted + self._mean(target - fitted) if self.fit_intercept else fitted

    def _gram(self) -> Tensor:
        if self._weighted is None or not torch.equal(self._weighted[0], self.weight):
            blocks = torch.arange(math.prod(self.map.feature_shape[:-1]), device=self.weight.device)
            matrix = self.map.gram(blocks, blocks, self.weight)
            if self.fit_intercept:
                total = self.map.rmatvec(self.weight[:, None]).flatten()
                matrix -= total[:, None] * total / self.weight.sum()
            self._weighted = self.weight, matrix
        return self._weighted[1].clone()


def ridge_system(linear_map: LinearMap, fit_intercept: bool) -> RidgeSystem:
    """The ridge system on the smaller side of the map."""
    n_features = math.prod(linear_map.feature_shape)
    in_samples = linear_map.n_samples < n_features and n_features > SMALL_SIDE
    side: type[RidgeSystem] = RidgeInSamples if in_samples else RidgeInFeatures
    return side(linear_map, fit_intercept)

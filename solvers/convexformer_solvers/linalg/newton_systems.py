r"""The linear systems of semismooth Newton steps, solved in the samples or in the support, whichever is smaller.

With the curvatures ``D`` of the weighted loss, the Jacobian ``J`` of the prox and a proximal weight ``sigma`` each
system is

.. math:: (I + \sigma \, (A J A^\top + 1 1^\top) \, D) \, x = r

for a vector ``x`` of predictions; the term ``1 1'`` stands for the intercept and is left out without one. Nothing here
depends on how the system came about.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.linear_maps.base import LinearMap

from .cholesky import CholeskySolver, cholesky, factorised_above, lower_rows
from .gram import SupportGram, add_to_blocks, bordered
from .ridge import SMALL_SIDE

# Active columns per sample below which the system is solved in the support instead of the samples.
_SUPPORT_RATIO = 0.9
# Relative residual of conjugate gradients: each Newton step then takes two digits off the error at most.
_ACCURACY = 1e-2
# Iterations that an outdated preconditioner may take before a new one is worth its factorisation.
_REUSE_LIMIT = 12
_FRESH_LIMIT = 200


class ProxJacobian(NamedTuple):
    """Jacobian of the prox of a sum of group norms: ``s_b I + (1 - s_b) u_b u_b'`` on active groups, else zero.

    Attributes
    ----------
    blocks : Tensor of shape (m,), int64
        Active groups, as positions in the flattened block axes; increasing.
    shrinkage : Tensor of shape (m,)
        The ``s_b``, within (0, 1].
    units : Tensor of shape (m, d)
        The unit vectors ``u_b``.
    """

    blocks: Tensor
    shrinkage: Tensor
    units: Tensor

    def apply(self, coef: Tensor) -> Tensor:
        """Product with coefficients of the active groups, shape ``(m, d)``."""
        along = (coef * self.units).sum(1, keepdim=True)
        scale = self.shrinkage[:, None]
        return scale * coef + (1 - scale) * along * self.units

    def inverse(self) -> Tensor:
        """Inverses of the active groups' Jacobians, shape ``(m, d, d)``."""
        outer = self.units[:, :, None] * self.units[:, None, :]
        inverse_scale = 1 / self.shrinkage[:, None, None]
        identity = torch.eye(self.units.shape[1], dtype=outer.dtype, device=outer.device)
        return inverse_scale * identity + (1 - inverse_scale) * outer


def solved_in_support(n_columns: int, n_samples: int) -> bool:
    """Whether systems with so many active columns are solved in the support."""
    return n_columns <= max(_SUPPORT_RATIO * n_samples, SMALL_SIDE)


class NewtonSystem:
    """Solver of one program's Newton systems; keeps what consecutive systems share.

    Where the curvatures do not change from step to step the Gram matrix of the groups met so far is kept, so that a
    step in the support costs one factorisation of the support's size. In the samples the factorisation of an earlier
    kernel preconditions conjugate gradients until it is too old.

    Parameters
    ----------
    linear_map : LinearMap
        The map ``A``; products are computed in float64 whatever its precision.
    fit_intercept : bool
        Whether the term ``1 1'`` is there.
    gram : SupportGram, optional
        Gram matrices shared with the systems of other outputs.
    """

    def __init__(self, linear_map: LinearMap, fit_intercept: bool, gram: SupportGram | None = None) -> None:
        self.map, self.fit_intercept = linear_map, fit_intercept
        self._gram = gram or SupportGram(linear_map)
        self._factor: CholeskySolver | None = None

    def solve(self, jacobian: ProxJacobian, sigma: float, curvature: Tensor, target: Tensor) -> Tensor:
        """The ``x`` of the system.

        Parameters
        ----------
        jacobian : ProxJacobian
            The ``J``.
        sigma : float
            Positive.
        curvature : Tensor of shape (N,)
            Diagonal of ``D``, non-negative.
        target : Tensor of shape (N,)
            The ``r``.

        Returns
        -------
        Tensor of shape (N,)
            Exact, or, in the samples, to a relative residual of 1e-2.
        """
        n_columns = jacobian.units.numel() + self.fit_intercept
        if n_columns == 0:
            return target
        if solved_in_support(n_columns, len(target)):
            return self._solve_in_support(jacobian, sigma, curvature, target)
        return self._solve_in_samples(jacobian, sigma, curvature, target)

    # In the support: x = r - A_S q with (J^-1 / sigma + A_S' D A_S) q = A_S' D r

    def _solve_in_support(self, jacobian: ProxJacobian, sigma: float, curvature: Tensor, target: Tensor) -> Tensor:
        blocks = jacobian.blocks
        system = self._gram.of(blocks, curvature)
        add_to_blocks(system, jacobian.inverse() / sigma)
        if self.fit_intercept:
            border = self._adjoint(blocks, curvature)
            border[-1] += 1 / sigma
            system = bordered(system, border)
        right = self._adjoint(blocks, curvature * target)
        solution = factorised_above(system, lambda rows: lower_rows(system, rows)).solve(right[:, None])[:, 0]
        return target - self._forward(blocks, solution)

    def _adjoint(self, blocks: Tensor, values: Tensor) -> Tensor:
        """``A_S' values``, with the intercept's entry last."""
        result = self.map.rmatvec_blocks(blocks, values[:, None]).flatten()
        return torch.cat([result, values.sum()[None]]) if self.fit_intercept else result

    def _forward(self, blocks: Tensor, solution: Tensor) -> Tensor:
        constant = solution[-1] if self.fit_intercept else 0.0
        coef = solution[: len(solution) - self.fit_intercept].view(len(blocks), self.map.feature_shape[-1], 1)
        return self.map.matvec_blocks(blocks, coef)[:, 0] + constant

    # In the samples: x = r - sigma K h z with (I + sigma h K h) z = h r and h = sqrt(D), K = A J A' + 1 1'

    def _solve_in_samples(self, jacobian: ProxJacobian, sigma: float, curvature: Tensor, target: Tensor) -> Tensor:
        root = curvature.sqrt()
        solution = _Conjugate(root * target)
        if self._factor is not None:
            self._iterate(solution, jacobian, sigma, root, _REUSE_LIMIT)
        if not solution.done:
            self._factor = self._factorise(jacobian, sigma, root)
            solution.restart()
            self._iterate(solution, jacobian, sigma, root, _FRESH_LIMIT)
        # Only where a sample has no curvature does the image tell: elsewhere it is a difference of large numbers.
        curved = root > 1e-10 * root.max()
        return torch.where(curved, solution.value / torch.where(curved, root, 1.0), target - solution.image)

    def _factorise(self, jacobian: ProxJacobian, sigma: float, root: Tensor) -> CholeskySolver:
        """Cholesky factor of ``I + sigma h K h``; in float32 on the way, as it only preconditions."""
        single = torch.float32
        kernel = self.map.kernel(jacobian.blocks, jacobian.shrinkage.to(single), jacobian.units.to(single))
        if self.fit_intercept:
            kernel += 1.0
        kernel *= (sigma * root).to(single)[:, None]
        kernel *= root.to(single)
        kernel.diagonal().add_(1.0)
        return CholeskySolver(cholesky(kernel).T)

    def _iterate(self, state: _Conjugate, jacobian: ProxJacobian, sigma: float, root: Tensor, limit: int) -> None:
        for _ in range(limit):
            if state.done:
                return
            direction = state.direction(self._precondition(state.residual))
            state.advance(direction, sigma * self._kernel_product(jacobian, root * direction), root)

    def _precondition(self, residual: Tensor) -> Tensor:
        assert self._factor is not None
        size = residual.abs().max()  # single precision has no numbers for residuals of the smallest curvatures
        return size * self._factor.solve((residual / size).to(self._factor.dtype)[:, None])[:, 0].to(residual.dtype)

    def _kernel_product(self, jacobian: ProxJacobian, values: Tensor) -> Tensor:
        coef = jacobian.apply(self.map.rmatvec_blocks(jacobian.blocks, values[:, None])[..., 0])
        result = self.map.matvec_blocks(jacobian.blocks, coef[..., None])[:, 0]
        return result + values.sum() if self.fit_intercept else result


class _Conjugate:
    """Preconditioned conjugate gradients on ``I + h M h`` from zero, keeping ``M h z`` beside the solution ``z``."""

    def __init__(self, target: Tensor) -> None:
        self.residual = target
        self.value = torch.zeros_like(target)
        self.image = torch.zeros_like(target)
        self._goal = _ACCURACY * float(torch.linalg.vector_norm(target))
        self.restart()

    def restart(self) -> None:
        """Forget the search direction: the preconditioner changes."""
        self._direction: Tensor | None = None
        self._product = 0.0

    @property
    def done(self) -> bool:
        return float(torch.linalg.vector_norm(self.residual)) <= self._goal

    def direction(self, preconditioned: Tensor) -> Tensor:
        product = float(self.residual @ preconditioned)
        if self._direction is None:
            self._direction = preconditioned
        else:
            self._direction = preconditioned + (product / self._product) * self._direction
        self._product = product
        return self._direction

    def advance(self, direction: Tensor, image: Tensor, root: Tensor) -> None:
        applied = direction + root * image
        step = self._product / float(direction @ applied)
        self.residual = self.residual - step * applied
        self.value = self.value + step * direction
        self.image = self.image + step * image

r"""Linear systems of Newton steps over the active groups of several outputs at once.

With the weighted Hessian ``H`` of the loss in predictions, the columns ``A_S`` of the active groups and a symmetric
positive semidefinite block per group, ``C``, each system is

.. math:: (C + A_S^\top H A_S) \, q = b .

Conjugate gradients solve it. The same with the diagonal of ``H``, one Cholesky factor per output, preconditions; for
separable losses that is the system itself, and one iteration is enough. Cross-entropy does not feel the same move in
all outputs, of which that diagonal knows nothing: there ``C`` alone, summed over the outputs, is the system, and its
inverse is added. Without it hundreds of iterations take the place of five. Intercepts are one more row of features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .curvature import Curvature
from .factorisation import cholesky
from .gram import SupportGram, add_to_blocks, bordered
from .operators import LinearMap

# Decrease of the residual, in the norm of the preconditioner.
_ACCURACY = 0.1
_MAX_ITERATIONS = 200
# Iterations that an outdated preconditioner may take before a new one is worth its factorisations.
_REUSE_LIMIT = 10


class BlockTerms(NamedTuple):
    """The ``C``: ``scale I + along u u'`` per group, and a number for the intercepts.

    Attributes
    ----------
    active : Tensor of shape (n_blocks, c), bool
        The active groups; the other arrays are of no meaning elsewhere.
    scale, along : Tensor of shape (n_blocks, c)
        The two factors.
    units : Tensor of shape (n_blocks, d, c)
        The unit vectors ``u``.
    intercept : float
        What stands for the block of each intercept.
    """

    active: Tensor
    scale: Tensor
    along: Tensor
    units: Tensor
    intercept: float

    def apply(self, coef: Tensor) -> Tensor:
        """Product with coefficients ``(n_blocks, d, c)`` that are zero where not active."""
        inner = (coef * self.units).sum(1)
        return self.scale[:, None] * coef + (self.along * inner)[:, None] * self.units

    def of_output(self, output: int) -> tuple[Tensor, Tensor]:
        """Active blocks of one output and their matrices ``(m, d, d)``."""
        blocks = self.active[:, output].nonzero()[:, 0]
        units = self.units[blocks, :, output]
        identity = torch.eye(units.shape[1], dtype=units.dtype, device=units.device)
        outer = self.along[blocks, output, None, None] * units[:, :, None] * units[:, None, :]
        return blocks, self.scale[blocks, output, None, None] * identity + outer


class CoupledSystem:
    """Solver of the systems of one program; keeps the preconditioner while it serves.

    Arrays over features have one row per feature and, last, the row of the intercepts.

    Parameters
    ----------
    linear_map : LinearMap
        The map ``A``.
    fit_intercept : bool
        Whether there are intercepts.
    """

    def __init__(self, linear_map: LinearMap, fit_intercept: bool) -> None:
        self.map, self.fit_intercept = linear_map, fit_intercept
        self._gram = SupportGram(linear_map)
        self._mask: Tensor | None = None
        self._factors: list[tuple[Tensor, Tensor]] = []  # rows and their Cholesky factor, per output
        self._common: tuple[Tensor, Tensor] | None = None
        self._n_iterations = 0  # of the last solve

    def forward(self, rows: Tensor) -> Tensor:
        """Predictions ``(N, c)`` of features and intercepts."""
        return self.map.matvec(rows[:-1].reshape(*self.map.feature_shape, -1)) + rows[-1]

    def adjoint(self, values: Tensor) -> Tensor:
        """Adjoint of ``forward``."""
        features = self.map.rmatvec(values).reshape(-1, values.shape[1])
        return torch.cat([features, values.sum(0, keepdim=True)])

    def solve(self, terms: BlockTerms, curvature: Curvature, right: Tensor) -> Tensor:
        """The ``q``, to a relative residual of .1.

        Parameters
        ----------
        terms : BlockTerms
            The ``C``.
        curvature : Curvature
            The ``H``.
        right : Tensor of shape (n_features + 1, c)
            The ``b``; its rows outside the active groups do not count.

        Returns
        -------
        Tensor of shape (n_features + 1, c)
            Zero outside the active groups.
        """
        mask = self._rows_of(terms.active)
        changed = self._mask is None or not torch.equal(mask, self._mask)
        if changed or self._n_iterations > _REUSE_LIMIT or curvature.diagonal_is_all:
            self._mask = mask
            self._factorise(terms, curvature)
        residual, solution = right * mask, torch.zeros_like(right)
        preconditioned = self._precondition(residual)
        direction, product = preconditioned, float((residual * preconditioned).sum())
        goal = _ACCURACY**2 * product
        for iteration in range(_MAX_ITERATIONS):
            self._n_iterations = iteration
            if not product > goal:
                break
            image = self._apply(terms, curvature, direction) * mask
            bend = float((direction * image).sum())
            if not bend > 0:  # rounding: the rest of the residual is out of reach
                break
            step = product / bend
            solution, residual = solution + step * direction, residual - step * image
            preconditioned = self._precondition(residual)
            product, previous = float((residual * preconditioned).sum()), product
            direction = preconditioned + (product / previous) * direction
        return solution

    def _rows_of(self, active: Tensor) -> Tensor:
        rows = active.repeat_interleave(self.map.feature_shape[-1], dim=0)
        return torch.cat([rows, torch.full_like(rows[:1], self.fit_intercept)])

    def _apply(self, terms: BlockTerms, curvature: Curvature, rows: Tensor) -> Tensor:
        blocks = rows[:-1].reshape(-1, self.map.feature_shape[-1], rows.shape[1])
        own = torch.cat([terms.apply(blocks).flatten(0, 1), terms.intercept * rows[-1:]])
        return own + self.adjoint(curvature.product(self.forward(rows)))

    def _factorise(self, terms: BlockTerms, curvature: Curvature) -> None:
        assert self._mask is not None
        diagonal, self._factors = curvature.diagonal(), []
        self._common = _common_part(terms) if curvature.common_is_free else None
        for output in range(diagonal.shape[1]):
            (blocks, own), weight = terms.of_output(output), diagonal[:, output].contiguous()
            system = self._gram.of(blocks, weight)
            add_to_blocks(system, own)
            if self.fit_intercept:
                column = self.map.rmatvec_blocks(blocks, weight[:, None]).flatten()
                system = bordered(system, torch.cat([column, (weight.sum() + terms.intercept)[None]]))
            self._factors.append((self._mask[:, output].nonzero()[:, 0], cholesky(system)))

    def _precondition(self, residual: Tensor) -> Tensor:
        result = torch.zeros_like(residual)
        for output, (rows, factor) in enumerate(self._factors):
            if len(rows):
                result[rows, output] = torch.cholesky_solve(residual[rows, output][:, None], factor)[:, 0]
        if self._common is not None:
            blocks, factors = self._common
            by_block = (-1, self.map.feature_shape[-1], residual.shape[1])
            totals = residual[:-1].view(by_block)[blocks].sum(-1, keepdim=True)
            result[:-1].view(by_block)[blocks] += torch.cholesky_solve(totals, factors)
        return result


def _common_part(terms: BlockTerms) -> tuple[Tensor, Tensor] | None:
    """Blocks that are active in all outputs and the Cholesky factors of the sums of their ``C`` over outputs."""
    blocks = terms.active.all(1).nonzero()[:, 0]
    if len(blocks) == 0:
        return None
    units = terms.units[blocks]
    identity = torch.eye(units.shape[1], dtype=units.dtype, device=units.device)
    along = torch.einsum("kdc,kec,kc->kde", units, units, terms.along[blocks])
    factors, failed = torch.linalg.cholesky_ex(terms.scale[blocks].sum(1)[:, None, None] * identity + along)
    kept = (failed == 0).nonzero()[:, 0]
    return blocks[kept], factors[kept]

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

from convexformer_solvers.linear_maps.base import LinearMap

from .cholesky import CholeskySolver, cholesky
from .gram import SupportGram, add_to_blocks, bordered
from .hessian import Curvature

# Decrease of the residual, in the norm of the preconditioner.
_ACCURACY = 0.1
_MAX_ITERATIONS = 200
# Iterations that an outdated preconditioner may take before a new one is worth its factorisations.
_REUSE_LIMIT = 15


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
        self._factored: Tensor | None = None  # the groups that were active then
        self._factors: list[tuple[Tensor, CholeskySolver]] = []  # rows and their Cholesky factor, per output
        self._added: tuple[Tensor, Tensor, Tensor] | None = None  # blocks, outputs and factors of other groups
        self._common: tuple[Tensor, Tensor] | None = None

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
        right = right * self._rows_of(terms.active)
        self._common = _common_part(terms) if curvature.common_is_free else None
        if self._factored is not None and not curvature.diagonal_is_all:
            self._adopt(terms, curvature)
            solution, found = self._iterated(terms, curvature, right, _REUSE_LIMIT)
            if found:
                return solution
        self._factorise(terms, curvature)
        return self._iterated(terms, curvature, right, _MAX_ITERATIONS)[0]

    def _iterated(self, terms: BlockTerms, curvature: Curvature, right: Tensor, limit: int) -> tuple[Tensor, bool]:
        """Solution by conjugate gradients, and whether it was found within a limit of iterations."""
        mask, residual, solution = self._rows_of(terms.active), right, torch.zeros_like(right)
        preconditioned = self._precondition(residual) * mask
        direction, product = preconditioned, float((residual * preconditioned).sum())
        goal = _ACCURACY**2 * product
        for _ in range(limit):
            if not product > goal:
                return solution, True
            image = self._apply(terms, curvature, direction) * mask
            bend = float((direction * image).sum())
            if not bend > 0:  # rounding: the rest of the residual is out of reach
                return solution, True
            step = product / bend
            solution, residual = solution + step * direction, residual - step * image
            preconditioned = self._precondition(residual) * mask
            product, previous = float((residual * preconditioned).sum()), product
            direction = preconditioned + (product / previous) * direction
        return solution, False

    def _rows_of(self, active: Tensor) -> Tensor:
        rows = active.repeat_interleave(self.map.feature_shape[-1], dim=0)
        return torch.cat([rows, torch.full_like(rows[:1], self.fit_intercept)])

    def _apply(self, terms: BlockTerms, curvature: Curvature, rows: Tensor) -> Tensor:
        blocks = rows[:-1].reshape(-1, self.map.feature_shape[-1], rows.shape[1])
        own = torch.cat([terms.apply(blocks).flatten(0, 1), terms.intercept * rows[-1:]])
        return own + self.adjoint(curvature.product(self.forward(rows)))

    def _factorise(self, terms: BlockTerms, curvature: Curvature) -> None:
        """One Cholesky factor per output."""
        self._factored, self._factors, self._added = terms.active, [], None
        rows, diagonal = self._rows_of(terms.active), curvature.diagonal()
        for output in range(diagonal.shape[1]):
            (blocks, own), weight = terms.of_output(output), diagonal[:, output].contiguous()
            system = self._gram.of(blocks, weight)
            add_to_blocks(system, own)
            if self.fit_intercept:
                column = self.map.rmatvec_blocks(blocks, weight[:, None]).flatten()
                system = bordered(system, torch.cat([column, (weight.sum() + terms.intercept)[None]]))
            self._factors.append((rows[:, output].nonzero()[:, 0], CholeskySolver(cholesky(system).T)))

    def _adopt(self, terms: BlockTerms, curvature: Curvature) -> None:
        """Give groups that have become active since the factorisation a factor each."""
        assert self._factored is not None
        self._added, new = None, terms.active & ~self._factored
        if not bool(new.any()):
            return
        diagonal, parts = curvature.diagonal(), []
        for output in range(new.shape[1]):
            blocks, own = terms._replace(active=new).of_output(output)
            columns = self.map.columns(blocks).to(diagonal.dtype)
            parts.append(torch.einsum("nbd,n,nbe->bde", columns, diagonal[:, output], columns) + own)
        # In the order of the outputs, as in the transposed mask.
        outputs, blocks = new.T.nonzero(as_tuple=True)
        factors, failed = torch.linalg.cholesky_ex(torch.cat(parts))
        kept = failed == 0
        self._added = blocks[kept], outputs[kept], factors[kept]

    def _precondition(self, residual: Tensor) -> Tensor:
        result = torch.zeros_like(residual)
        for output, (rows, factor) in enumerate(self._factors):
            if len(rows):
                result[rows, output] = factor.solve(residual[rows, output][:, None])[:, 0]
        if self._added is not None:
            blocks, outputs, factors = self._added
            by_block = (-1, self.map.feature_shape[-1], residual.shape[1])
            part = residual[:-1].view(by_block)[blocks, :, outputs]
            result[:-1].view(by_block)[blocks, :, outputs] = torch.cholesky_solve(part[..., None], factors)[..., 0]
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

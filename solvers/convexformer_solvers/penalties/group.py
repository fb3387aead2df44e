"""Sums of norms over blocks: group norms and nuclear norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from .base import ActiveGroups, Atoms, Factors, Penalty, SmoothedDerivatives


@dataclass(frozen=True)
class GroupL2(Penalty):
    r"""Group norm :math:`\sum_{b, l} \|z_{b, :, l}\|_2` over features, per block and output.

    Equals the decay :math:`\frac12(\|w_2\|_2^2 + \|w_3\|_1^2)` of the heads (paper [C], Thms 1 and 2).

    Examples
    --------
    >>> GroupL2().value(torch.tensor([[[3.0], [4.0]]]))
    tensor(5.)
    """

    output_separable: ClassVar[bool] = True
    euclidean: ClassVar[bool] = True

    def group_values(self, coef: Tensor) -> Tensor:
        # Sums of squares of several outputs, which lie innermost, are faster; but roots have no gradient at zero.
        if coef.shape[-1] == 1 or coef.requires_grad:
            return torch.linalg.vector_norm(coef, dim=-2)
        return coef.square().sum(-2).sqrt()

    group_dual_norms = group_values

    def prox(self, coef: Tensor, step: float) -> Tensor:
        norms = self.group_values(coef)[..., None, :]
        return coef * torch.where(norms > step, 1 - step / norms, 0.0)

    def smoothed_value(self, coef: Tensor, width: float) -> Tensor:
        return torch.hypot(self.group_values(coef), coef.new_tensor(width)).sum()

    def smoothed_derivatives(self, coef: Tensor, width: float) -> SmoothedDerivatives:
        columns = coef.reshape(-1, *coef.shape[-2:]).transpose(1, 2)  # one group a row
        n_blocks, c, d = columns.shape
        smoothed = torch.hypot(torch.linalg.vector_norm(columns, dim=2), coef.new_tensor(width))[..., None]
        units = columns / smoothed
        identity = torch.eye(d, dtype=coef.dtype, device=coef.device)
        bends = (identity - units[..., None] * units[..., None, :]) / smoothed[..., None]
        hessian = coef.new_zeros((n_blocks, d, c, d, c))
        hessian.diagonal(dim1=2, dim2=4).copy_(bends.permute(0, 2, 3, 1))
        gradient = units.transpose(1, 2).reshape(coef.shape)
        return SmoothedDerivatives(gradient, hessian.view(n_blocks, d * c, d * c))

    def active_groups(self, correlation: Tensor, coef: Tensor, alpha: float) -> ActiveGroups:
        correlation, coef = (part.reshape(-1, *part.shape[-2:]) for part in (correlation, coef))
        norms = self.group_dual_norms(correlation)
        tight = (norms > alpha) | ((self.group_values(coef) > 0) & (norms > 0))
        block, output = tight.nonzero(as_tuple=True)
        return ActiveGroups(block, output, correlation[block, :, output] / norms[block, output][:, None])

    def violating_atoms(self, correlation: Tensor, alpha: float) -> Atoms:
        columns = correlation.transpose(-1, -2).flatten(0, -2)  # one group a row
        norms = torch.linalg.vector_norm(columns, dim=1)
        positions = torch.arange(correlation.numel(), device=correlation.device).view(correlation.shape)
        violating = norms > alpha
        index = positions.transpose(-1, -2).flatten(0, -2)[violating]
        return Atoms(index, columns[violating] / norms[violating][:, None], norms[violating] / alpha - 1)

    def factorize(self, coef: Tensor) -> Factors:
        norms = self.group_values_in_any_units(coef)
        index = norms.nonzero()
        kept = norms[tuple(index.T)][:, None]
        left = coef.transpose(-1, -2)[tuple(index.T)] / kept * kept.sqrt()  # tiny groups keep their direction
        return Factors(index[:, :-1], left, kept.sqrt() * torch.nn.functional.one_hot(index[:, -1], coef.shape[-1]))

    def right_norm(self, right: Tensor) -> Tensor:
        return torch.linalg.vector_norm(right, ord=1, dim=1)

    def expression(self, coef: Any, n_blocks: int) -> Any:
        import cvxpy as cp

        groups = cp.reshape(coef, (coef.shape[0] // n_blocks, n_blocks * coef.shape[1]), order="F")
        return cp.sum(cp.norm(groups, 2, axis=0))


@dataclass(frozen=True)
class GroupNuclear(Penalty):
    r"""Nuclear norm :math:`\sum_b \|Z_b\|_*` of each block :math:`Z_b \in R^{d \times c}`.

    Equals the weight decay :math:`\frac12(\|w_2\|_2^2 + \|w_3\|_2^2)` of the heads, which lets outputs share features.

    Examples
    --------
    >>> GroupNuclear().value(torch.eye(2)[None])
    tensor(2.)
    """

    def for_outputs(self, n_outputs: int) -> Penalty:
        return GroupL2() if n_outputs == 1 else self  # the one singular value of a column is its length

    def group_values(self, coef: Tensor) -> Tensor:
        if coef.device.type == "cpu":
            return torch.linalg.svdvals(coef).sum(-1)
        # No basis gives less, and that of the eigenvectors of a square as much, but for rounding. A GPU takes several
        # times as long for singular values.
        gram, tall = _smaller_gram(coef)
        lengths = torch.linalg.vector_norm(tall @ torch.linalg.eigh(gram).eigenvectors, dim=-2)
        return lengths.sum(-1).to(coef.dtype)

    def group_dual_norms(self, coef: Tensor) -> Tensor:
        if coef.shape[-1] == 1:  # to the digit the norm of for_outputs, so that alpha_max is the same
            return GroupL2().group_dual_norms(coef)[..., 0]
        if coef.device.type == "cpu":
            return torch.linalg.svdvals(coef)[..., 0]
        # A square keeps the digits of the largest singular value.
        return torch.linalg.eigvalsh(_smaller_gram(coef)[0])[..., -1].clamp(min=0).sqrt().to(coef.dtype)

    def prox(self, coef: Tensor, step: float) -> Tensor:
        """The minimiser, whose singular values are off by about 1e-10 of the step or a rounding of the largest."""
        # Eigenvectors of the smaller Gram side: batched, and up to three times as fast as singular vectors.
        gram, tall = _smaller_gram(coef)
        squares, basis = torch.linalg.eigh(gram)
        values = squares.clamp(min=0).sqrt()
        scale = torch.where(values > step, 1 - step / values, 0.0)
        shrunk = (tall @ basis * scale[..., None, :]) @ basis.transpose(-1, -2)
        # Squares lose what is below the root of a rounding, and values near the step so many of their digits; data in
        # single precision have lost them already.
        eps = torch.finfo(torch.float64).eps
        wide_range = values[..., -1] > step * torch.finfo(coef.dtype).eps / eps ** (6 / 5)
        if bool(wide_range.any()):
            u, s, vh = torch.linalg.svd(tall[wide_range], full_matrices=False)
            shrunk[wide_range] = (u * (s - step).clamp(min=0)[..., None, :]) @ vh
        return (shrunk if shrunk.shape == coef.shape else shrunk.transpose(-1, -2)).to(coef.dtype)

    def smoothed_value(self, coef: Tensor, width: float) -> Tensor:
        return torch.hypot(torch.linalg.svdvals(coef), coef.new_tensor(width)).sum()

    def smoothed_derivatives(self, coef: Tensor, width: float) -> SmoothedDerivatives:
        n_blocks, d, c = coef.shape[:-2].numel(), *coef.shape[-2:]
        u, values, vh = torch.linalg.svd(coef.reshape(n_blocks, d, c), full_matrices=True)
        smoothed, rank = torch.hypot(values, coef.new_tensor(width)), values.shape[1]
        gradient = (u[:, :, :rank] * (values / smoothed)[:, None]) @ vh[:, :rank]
        symmetric, skew = _bends(values, smoothed, width, (d, c))
        # Of a change u_i v_j' the Hessian makes as much of itself and of u_j v_i', where there is such a one.
        basis = u.transpose(1, 2)[:, :, None, :, None] * vh[:, None, :, None, :]
        bent = (0.5 * (symmetric + skew))[..., None, None] * basis
        square = slice(None), slice(rank), slice(rank)
        bent[square] += (0.5 * (symmetric - skew))[square][..., None, None] * basis[square].transpose(1, 2)
        basis, bent = basis.reshape(n_blocks, d * c, d * c), bent.reshape(n_blocks, d * c, d * c)
        return SmoothedDerivatives(gradient.reshape(coef.shape), basis.transpose(1, 2) @ bent)

    def violating_atoms(self, correlation: Tensor, alpha: float) -> Atoms:
        u, s, vh = torch.linalg.svd(correlation.reshape(-1, *correlation.shape[-2:]), full_matrices=False)
        violating = s[:, 0] > alpha
        index = torch.arange(correlation.numel(), device=correlation.device).view(len(s), -1)[violating]
        return Atoms(index, (u[violating, :, :1] * vh[violating, :1]).flatten(1), s[violating, 0] / alpha - 1)

    def factorize(self, coef: Tensor) -> Factors:
        u, s, vh = torch.linalg.svd(coef, full_matrices=False)
        index = (s > s[..., :1] * max(coef.shape[-2:]) * torch.finfo(coef.dtype).eps).nonzero()
        where = tuple(index.T)
        root = s[where].sqrt()[:, None]
        return Factors(index[:, :-1], root * u.transpose(-1, -2)[where], root * vh[where])

    def right_norm(self, right: Tensor) -> Tensor:
        return torch.linalg.vector_norm(right, dim=1)

    def expression(self, coef: Any, n_blocks: int) -> Any:
        import cvxpy as cp

        d = coef.shape[0] // n_blocks
        return sum(cp.normNuc(coef[b * d : (b + 1) * d]) for b in range(n_blocks))


def _smaller_gram(coef: Tensor) -> tuple[Tensor, Tensor]:
    """Gram matrices in float64 of each block's shorter side, and the blocks with that side last."""
    tall = (coef.transpose(-1, -2) if coef.shape[-1] > coef.shape[-2] else coef).double()
    return tall.transpose(-1, -2) @ tall, tall


def _bends(values: Tensor, smoothed: Tensor, width: float, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Curvature along symmetric and skew changes in the basis of singular vectors, ``(n_blocks, d, c)`` each.

    With ``f(s) = sqrt(s^2 + width^2)`` they are ``(f'(s) - f'(t)) / (s - t)`` and ``(f'(s) + f'(t)) / (s + t)``.
    """
    s, t = (pad(values, (0, side - values.shape[1])) for side in shape)
    f, g = (pad(smoothed, (0, side - values.shape[1]), value=width) for side in shape)
    s, f, t, g = s[:, :, None], f[:, :, None], t[:, None, :], g[:, None, :]
    slopes, total = s / f + t / g, s + t  # ratios first: products of four numbers leave the range of floats
    both_zero = total == 0
    symmetric = torch.where(both_zero, 1 / width, (width / f) * (width / g) * (total / f / slopes / g))
    return symmetric, torch.where(both_zero, 1 / width, slopes / total)

"""Penalties: value, prox, dual norm, rank-one factors and cvxpy expression.

A penalty is a norm on coefficient arrays ``(*block_shape, d, c)``, summed over blocks. It holds no ``alpha``: that
belongs to the program. Each is the gauge of rank-one blocks ``u v'`` with ``|u|_2 <= 1`` and ``v`` in the unit ball of
a norm on outputs, which is what maps a solution back to network weights: ``factorize`` splits a block into balanced
pairs ``(u, v)``, and ``factor_cost`` is the weight decay of such pairs. A new penalty is one class and one line of
``PENALTIES``; ``check_penalty`` tests it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

# Largest singular value over the step of a prox in float64 beyond which squares of singular values are too inaccurate.
_LARGEST_OVER_STEP = 1e3


class Factors(NamedTuple):
    """Rank-one pieces of a coefficient array: ``coef[block[j]] = sum of outer(left[j], right[j])``.

    Attributes
    ----------
    block : Tensor of shape (m, n_block_axes), int64
        Index of the block that each piece belongs to.
    left : Tensor of shape (m, d)
        Feature factors.
    right : Tensor of shape (m, c)
        Output factors.
    """

    block: Tensor
    left: Tensor
    right: Tensor


class ActiveGroups(NamedTuple):
    """Groups, each of one block and one output, with the gradients of their dual norms.

    Attributes
    ----------
    block : Tensor of shape (m,), int64
        Positions in the flattened block axes, not decreasing.
    output : Tensor of shape (m,), int64
        Outputs.
    unit : Tensor of shape (m, d)
        Gradient of each group's dual norm.
    """

    block: Tensor
    output: Tensor
    unit: Tensor


class Atoms(NamedTuple):
    """Extreme points of the unit ball of a penalty, by their nonzero coefficients.

    Attributes
    ----------
    position : Tensor of shape (m, n_nonzero), int64
        Where in the flattened coefficient array.
    value : Tensor of shape (m, n_nonzero)
        The coefficients there.
    excess : Tensor of shape (m,)
        Inner product of each with the array that they were searched for, over ``alpha``, less 1.
    """

    position: Tensor
    value: Tensor
    excess: Tensor


class Penalty(ABC):
    """A norm of coefficient arrays, as a rule a sum over blocks.

    Attributes
    ----------
    by_block : bool
        Whether the norm is a sum over blocks, so that some of them can be left out.
    separable : bool
        Whether the norm is also a sum over outputs.
    euclidean : bool
        Whether it is the sum of the Euclidean norms of each output's coefficients in each block: Newton steps and block
        descent are written for that.
    """

    by_block: ClassVar[bool] = True
    separable: ClassVar[bool] = False
    euclidean: ClassVar[bool] = False

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Check that the penalty is one of coefficients of a shape, as by default it is of all.

        Parameters
        ----------
        shape : tuple of int
            ``(*block_shape, d, c)``.

        Raises
        ------
        ValueError
            If it is not; the message says which shapes are right.
        """
        return

    def for_outputs(self, n_outputs: int) -> Penalty:
        """The same norm for so many outputs as another penalty, where solvers can do more with that.

        Parameters
        ----------
        n_outputs : int
            The ``c``.

        Returns
        -------
        Penalty
            By default this one.
        """
        return self

    @abstractmethod
    def group_values(self, coef: Tensor) -> Tensor:
        """Norm of each group; their sum is the penalty.

        Parameters
        ----------
        coef : Tensor of shape ``(*block_shape, d, c)``
            Coefficients.

        Returns
        -------
        Tensor
            Shape ``(*block_shape, c)`` when `separable`, else as the penalty has its groups.
        """

    @abstractmethod
    def group_dual_norms(self, coef: Tensor) -> Tensor:
        """Dual norm of each group; their largest is the dual norm.

        Parameters
        ----------
        coef : Tensor of shape ``(*block_shape, d, c)``
            An array of the shape of coefficients.

        Returns
        -------
        Tensor
            As from ``group_values``; outputs are the last axis when `separable`.
        """

    @abstractmethod
    def prox(self, coef: Tensor, step: float) -> Tensor:
        """Minimiser over ``z`` of ``step * penalty(z) + |z - coef|^2 / 2``.

        Parameters
        ----------
        coef : Tensor of shape ``(*block_shape, d, c)``
            Coefficients; left as they are.
        step : float
            Not negative.

        Returns
        -------
        Tensor
            Of the shape and precision of `coef`, with exact zeros.
        """

    def factorize(self, coef: Tensor) -> Factors:
        """Balanced rank-one pieces whose ``factor_cost`` sums to the penalty (paper [C], Prop. 1).

        Parameters
        ----------
        coef : Tensor of shape ``(*block_shape, d, c)``
            Coefficients.

        Returns
        -------
        Factors

        Raises
        ------
        NotImplementedError
            If the penalty is no sum over blocks with such pieces.
        """
        raise NotImplementedError(f"{type(self).__name__} is not a sum over blocks with rank-one pieces")

    @abstractmethod
    def right_norm(self, right: Tensor) -> Tensor:
        """Norm of output factors.

        Parameters
        ----------
        right : Tensor of shape (m, c)
            One factor a row.

        Returns
        -------
        Tensor of shape (m,)
        """

    def expression(self, coef: Any, n_blocks: int) -> Any:
        """The penalty for cvxpy, which the solver ``exact`` needs.

        Parameters
        ----------
        coef : cvxpy expression of shape ``(n_blocks * d, c)``
            Coefficients, blocks stacked.
        n_blocks : int
            Number of blocks.

        Returns
        -------
        cvxpy expression
            A convex scalar.

        Raises
        ------
        NotImplementedError
            If the penalty has none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method 'expression', which the solver 'exact' needs")

    def constraints(self, coef: Any, n_blocks: int) -> list[Any]:
        """cvxpy constraints that hold wherever the penalty is finite.

        Parameters
        ----------
        coef, n_blocks
            As in ``expression``.

        Returns
        -------
        list of cvxpy constraints
            By default none.
        """
        return []

    def violating_atoms(self, ascent: Tensor, alpha: float) -> Atoms:
        """Extreme points of the unit ball whose inner product with `ascent` exceeds `alpha`, the best of each group.

        Parameters
        ----------
        ascent : Tensor of shape ``(*block_shape, d, c)``
            ``A' diag(p) theta`` of a dual point.
        alpha : float
            Bound of the dual norm.

        Returns
        -------
        Atoms

        Raises
        ------
        NotImplementedError
            If the penalty has no such search.
        """
        raise NotImplementedError(f"{type(self).__name__} has no search for the atom that violates most")

    def active_groups(self, ascent: Tensor, coef: Tensor, alpha: float) -> ActiveGroups | None:
        """Groups whose dual norm is ``alpha`` at the optimum as far as one can tell from points near it.

        Parameters
        ----------
        ascent : Tensor of shape ``(*block_shape, d, c)``
            ``A' diag(p) theta`` of a dual point; groups that violate its constraint count as active.
        coef : Tensor of shape ``(*block_shape, d, c)``
            A primal point; its groups that are not zero count as active.
        alpha : float
            Bound of the dual norm.

        Returns
        -------
        ActiveGroups or None
            None, the default, where groups are not of one block and one output each or are not written down; then
            points cannot be polished.
        """
        return None

    def value(self, coef: Tensor) -> Tensor:
        """The penalty, the sum of its groups' norms.

        Parameters
        ----------
        coef : Tensor of shape ``(*block_shape, d, c)``
            Coefficients.

        Returns
        -------
        Tensor
            A scalar.
        """
        return self.group_values(coef).sum()

    def dual_norm(self, coef: Tensor) -> Tensor:
        """Largest ``<coef, z>`` over ``penalty(z) <= 1``, in any units.

        Parameters
        ----------
        coef : Tensor of shape ``(*block_shape, d, c)``
            An array of the shape of coefficients.

        Returns
        -------
        Tensor
            A scalar.
        """
        return self.group_dual_norms_in_any_units(coef).amax()

    def group_dual_norms_in_any_units(self, coef: Tensor) -> Tensor:
        """``group_dual_norms`` of arrays whose squares may be too small or too large for their precision.

        Each output in units of its own, powers of two, so that nothing is rounded.

        Parameters
        ----------
        coef : Tensor of shape ``(*block_shape, d, c)``
            An array of the shape of coefficients.

        Returns
        -------
        Tensor
            As from ``group_dual_norms``.
        """
        sizes = coef.abs().reshape(-1, coef.shape[-1]).amax(0)
        if not self.separable:
            sizes = sizes.amax(0, keepdim=True)
        limits = torch.finfo(coef.dtype)
        small, large = limits.tiny ** (1 / 3), limits.max ** (1 / 3)
        odd = (sizes > 0) & (sizes < small) | (sizes > large) & torch.isfinite(sizes)
        if not bool(odd.any()):
            return self.group_dual_norms(coef)
        largest = math.floor(math.log2(limits.max)) - 4  # the inverse of such a power is a normal number
        exponents = torch.frexp(sizes)[1].clamp(-largest, largest)
        unit = torch.where(odd, torch.exp2(exponents.to(coef)), 1.0)
        return self.group_dual_norms(coef / unit) * unit

    def factor_cost(self, left: Tensor, right: Tensor) -> Tensor:
        """Weight decay ``(|left|_2^2 + right_norm(right)^2) / 2`` of each pair.

        At least the penalty of ``outer(left, right)``, with equality when the pair is balanced.

        Parameters
        ----------
        left : Tensor of shape (m, d)
            Feature factors.
        right : Tensor of shape (m, c)
            Output factors.

        Returns
        -------
        Tensor of shape (m,)
        """
        return 0.5 * (left.square().sum(1) + self.right_norm(right).square())


@dataclass(frozen=True)
class GroupL2(Penalty):
    r"""Group norm :math:`\sum_{b, l} \|z_{b, :, l}\|_2` over features, per block and output.

    Equals the decay :math:`\frac12(\|w_2\|_2^2 + \|w_3\|_1^2)` of the heads (paper [C], Thms 1 and 2).

    Examples
    --------
    >>> import torch
    >>> GroupL2().value(torch.tensor([[[3.0], [4.0]]]))
    tensor(5.)
    """

    separable: ClassVar[bool] = True
    euclidean: ClassVar[bool] = True

    def group_values(self, coef: Tensor) -> Tensor:
        # Several outputs lie innermost: there sums of squares are mostly several times as fast. Roots have no gradient
        # at zero.
        if coef.shape[-1] == 1 or coef.requires_grad:
            return torch.linalg.vector_norm(coef, dim=-2)
        return coef.square().sum(-2).sqrt()

    def group_dual_norms(self, coef: Tensor) -> Tensor:
        return self.group_values(coef)

    def prox(self, coef: Tensor, step: float) -> Tensor:
        norms = self.group_values(coef)[..., None, :]
        return coef * torch.where(norms > step, 1 - step / norms, 0.0)

    def active_groups(self, ascent: Tensor, coef: Tensor, alpha: float) -> ActiveGroups:
        ascent, coef = (part.reshape(-1, *part.shape[-2:]) for part in (ascent, coef))
        norms = self.group_dual_norms(ascent)
        tight = (norms > alpha) | ((self.group_values(coef) > 0) & (norms > 0))
        block, output = tight.nonzero(as_tuple=True)
        return ActiveGroups(block, output, ascent[block, :, output] / norms[block, output][:, None])

    def violating_atoms(self, ascent: Tensor, alpha: float) -> Atoms:
        columns = ascent.transpose(-1, -2).flatten(0, -2)  # one group a row
        norms = torch.linalg.vector_norm(columns, dim=1)
        violating = norms > alpha
        positions = torch.arange(ascent.numel(), device=ascent.device).view(ascent.shape).transpose(-1, -2)
        index = positions.flatten(0, -2)[violating]
        return Atoms(index, columns[violating] / norms[violating][:, None], norms[violating] / alpha - 1)

    def factorize(self, coef: Tensor) -> Factors:
        norms = self.group_values(coef)
        index = norms.nonzero()
        block, output = index[:, :-1], index[:, -1]
        kept = norms[tuple(index.T)]
        root = kept.sqrt()
        # Divide before taking the root out, so that tiny groups keep their direction.
        left = coef.transpose(-1, -2)[tuple(index.T)] / kept[:, None] * root[:, None]
        right = root[:, None] * torch.nn.functional.one_hot(output, coef.shape[-1])
        return Factors(block, left, right)

    def right_norm(self, right: Tensor) -> Tensor:
        return torch.linalg.vector_norm(right, ord=1, dim=1)

    def expression(self, coef: Any, n_blocks: int) -> Any:
        import cvxpy as cp

        groups = cp.reshape(coef, (coef.shape[0] // n_blocks, n_blocks * coef.shape[1]), order="F")
        return cp.sum(cp.norm(groups, 2, axis=0))


@dataclass(frozen=True)
class GroupNuclear(Penalty):
    r"""Nuclear norm :math:`\sum_b \|Z_b\|_*` of each block :math:`Z_b \in R^{d \times c}`.

    Equals the standard weight decay :math:`\frac12(\|w_2\|_2^2 + \|w_3\|_2^2)` of the heads, which lets outputs share
    features.

    Examples
    --------
    >>> import torch
    >>> GroupNuclear().value(torch.eye(2)[None])
    tensor(2.)
    """

    def for_outputs(self, n_outputs: int) -> Penalty:
        return GroupL2() if n_outputs == 1 else self  # the one singular value of a column is its length

    def group_values(self, coef: Tensor) -> Tensor:
        return torch.linalg.svdvals(coef).sum(-1)

    def group_dual_norms(self, coef: Tensor) -> Tensor:
        if coef.shape[-1] == 1:  # to the digit the norm of for_outputs, so that alpha_max is the same
            return GroupL2().group_dual_norms(coef)[..., 0]
        return torch.linalg.svdvals(coef)[..., 0]

    def prox(self, coef: Tensor, step: float) -> Tensor:
        """The minimiser, whose singular values are off by about 1e-10 of the step or a rounding of the largest."""
        wide = coef.shape[-1] > coef.shape[-2]
        tall = (coef.transpose(-1, -2) if wide else coef).double()
        # Eigenvectors of the smaller Gram side: batched, and up to three times as fast as singular vectors.
        squares, basis = torch.linalg.eigh(tall.transpose(-1, -2) @ tall)
        values = squares.clamp(min=0).sqrt()
        scale = torch.where(values > step, 1 - step / values, 0.0)
        shrunk = (tall @ basis * scale[..., None, :]) @ basis.transpose(-1, -2)
        # Squares lose what is below the root of a rounding; data in single precision have lost it already.
        least = step * _LARGEST_OVER_STEP * torch.finfo(coef.dtype).eps / torch.finfo(torch.float64).eps
        wide_range = values[..., -1] > least
        if bool(wide_range.any()):
            u, s, vh = torch.linalg.svd(tall[wide_range], full_matrices=False)
            shrunk[wide_range] = (u * (s - step).clamp(min=0)[..., None, :]) @ vh
        return (shrunk.transpose(-1, -2) if wide else shrunk).to(coef.dtype)

    def violating_atoms(self, ascent: Tensor, alpha: float) -> Atoms:
        u, s, vh = torch.linalg.svd(ascent.reshape(-1, *ascent.shape[-2:]), full_matrices=False)
        norms = s[:, 0]
        violating = norms > alpha
        outer = u[violating, :, :1] * vh[violating, :1]
        index = torch.arange(ascent.numel(), device=ascent.device).view(len(norms), -1)[violating]
        return Atoms(index, outer.flatten(1), norms[violating] / alpha - 1)

    def factorize(self, coef: Tensor) -> Factors:
        u, s, vh = torch.linalg.svd(coef, full_matrices=False)
        rounding = s[..., :1] * max(coef.shape[-2:]) * torch.finfo(coef.dtype).eps
        index = (s > rounding).nonzero()
        where = tuple(index.T)
        root = s[where].sqrt()[:, None]
        return Factors(index[:, :-1], root * u.transpose(-1, -2)[where], root * vh[where])

    def right_norm(self, right: Tensor) -> Tensor:
        return torch.linalg.vector_norm(right, dim=1)

    def expression(self, coef: Any, n_blocks: int) -> Any:
        import cvxpy as cp

        d = coef.shape[0] // n_blocks
        return sum(cp.normNuc(coef[b * d : (b + 1) * d]) for b in range(n_blocks))


PENALTIES: dict[str, type[Penalty]] = {"group_l2": GroupL2, "nuclear": GroupNuclear}


def get_penalty(penalty: str | Penalty) -> Penalty:
    """The penalty of a registered name, or the instance itself.

    Parameters
    ----------
    penalty : str or Penalty
        A key of ``PENALTIES`` or an instance.

    Returns
    -------
    Penalty

    Raises
    ------
    ValueError
        If the name is unknown.

    Examples
    --------
    >>> get_penalty("group_l2")
    GroupL2()
    """
    if isinstance(penalty, Penalty):
        return penalty
    if isinstance(penalty, str) and penalty in PENALTIES:
        return PENALTIES[penalty]()
    raise ValueError(f"penalty must be one of {sorted(PENALTIES)} or a Penalty instance, got {penalty!r}")

"""The interface of a penalty: a norm of coefficient arrays ``(*block_shape, d, c)``, as a rule summed over blocks.

One that is the decay of heads is the gauge of rank-one blocks ``u v'`` with ``|u|_2 <= 1`` and ``v`` in the unit ball
of a norm on outputs: ``factorize`` splits a block into balanced pairs ``(u, v)``, whose decay is ``factor_cost``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.validation import take_former_names


class Factors(NamedTuple):
    """Rank-one pieces of a coefficient array: ``coef[block[j]] = sum of outer(left[j], right[j])``.

    Attributes
    ----------
    block : Tensor of shape (m, n_block_axes), int64
        Index of the block that each piece belongs to.
    left, right : Tensor of shape (m, d) and (m, c)
        Feature factors and output factors.

    Examples
    --------
    >>> from convexformer_solvers import GroupL2
    >>> block, left, right = GroupL2().factorize(torch.tensor([[[3.0], [4.0]]]))
    >>> bool(torch.allclose(left.T @ right, torch.tensor([[3.0], [4.0]])))
    True
    """

    block: Tensor
    left: Tensor
    right: Tensor


class ActiveGroups(NamedTuple):
    """Groups, each of one block and one output, with the gradients of their dual norms."""

    block: Tensor  # (m,), int64, positions in the flattened block axes, not decreasing
    output: Tensor  # (m,), int64
    unit: Tensor  # (m, d), gradient of each group's dual norm


class Atoms(NamedTuple):
    """Extreme points of the unit ball of a penalty, by their nonzero coefficients.

    Attributes
    ----------
    position, value : Tensor of shape (m, n_nonzero)
        Where in the flattened coefficient array, int64, and the coefficients there.
    excess : Tensor of shape (m,)
        Inner product of each with the array that they were searched for, over ``alpha``, less 1.
    """

    position: Tensor
    value: Tensor
    excess: Tensor


class SmoothedDerivatives(NamedTuple):
    """First and second derivatives of a smoothed penalty."""

    gradient: Tensor  # (*block_shape, d, c), inside the unit ball of the dual norm
    hessian: Tensor  # (n_blocks, d * c, d * c), positive definite; coefficients of a block in the order of memory


class Penalty(ABC):
    """A norm of coefficient arrays, as a rule a sum over blocks.

    A new penalty defines ``group_values``, ``group_dual_norms`` and ``prox``, and ``right_norm`` and ``factorize`` for
    estimators, which map solutions to heads; the rest has defaults, some of which raise ``NotImplementedError``.
    ``check_penalty`` tests it. In all methods ``coef`` and ``correlation`` (``A' diag(p) theta`` of a dual point
    ``theta``) are tensors of shape ``(*block_shape, d, c)``, which stay as they are.

    Attributes
    ----------
    block_separable : bool
        Whether the norm is a sum over blocks, so that some of them can be left out.
    output_separable : bool
        Whether the norm is also a sum over outputs, the same for each of them.
    euclidean : bool
        Whether it is the sum of the Euclidean norms of each output's coefficients in each block: Newton steps and block
        descent are written for that.

    Examples
    --------
    The Euclidean norm of each block as a whole:

    >>> from convexformer_solvers import Penalty, check_penalty
    >>> class BlockL2(Penalty):
    ...     def group_values(self, coef):
    ...         return torch.linalg.vector_norm(coef, dim=(-2, -1))
    ...     group_dual_norms = group_values
    ...     def prox(self, coef, step):
    ...         norms = self.group_values(coef)[..., None, None]
    ...         return coef * torch.where(norms > step, 1 - step / norms, 0.0)
    >>> check_penalty(BlockL2())
    """

    block_separable: ClassVar[bool] = True
    output_separable: ClassVar[bool] = False
    euclidean: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        take_former_names(cls, separable="output_separable", by_block="block_separable")

    @abstractmethod
    def group_values(self, coef: Tensor) -> Tensor:
        """Norm of each group, ``(*block_shape, c)`` if `output_separable`, else mostly ``block_shape``; they add up."""

    @abstractmethod
    def group_dual_norms(self, coef: Tensor) -> Tensor:
        """Dual norm of each group, in the shape of ``group_values``; their largest is the dual norm."""

    @abstractmethod
    def prox(self, coef: Tensor, step: float) -> Tensor:
        """Minimiser over ``z`` of ``step * penalty(z) + |z - coef|^2 / 2``, with exact zeros; `step` is at least 0."""

    def right_norm(self, right: Tensor) -> Tensor:
        """Norm of each output factor, shape (m,), of factors of shape (m, c), for ``factor_cost``."""
        raise NotImplementedError(f"{type(self).__name__} is not the decay of heads with a norm of output weights")

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise ``ValueError`` unless the penalty is one of coefficients of this shape, as by default it is of all."""
        return

    def for_outputs(self, n_outputs: int) -> Penalty:
        """A penalty that is this norm for so many outputs and lets solvers do more; by default this one itself."""
        return self

    def of_part(self, n_outputs: int) -> tuple[int, Penalty]:
        """Number of equal parts of so many outputs whose norms add up to this one, and the norm of each part."""
        return n_outputs if self.output_separable else 1, self

    def defines(self, method: str) -> bool:
        """Whether this penalty has the optional method of that name, as ``'expression'``, and not ``Penalty``'s."""
        return getattr(type(self), method, None) is not getattr(Penalty, method, None)

    def factorize(self, coef: Tensor) -> Factors:
        """Balanced rank-one pieces whose ``factor_cost`` sums to the penalty (paper [C], Prop. 1)."""
        raise NotImplementedError(f"{type(self).__name__} is not a sum over blocks with rank-one pieces")

    def expression(self, coef: Any, n_blocks: int) -> Any:
        """The penalty of a cvxpy expression of shape ``(n_blocks * d, c)``, the blocks stacked, for ``exact``."""
        raise NotImplementedError(f"{type(self).__name__} has no method 'expression', which the solver 'exact' needs")

    def constraints(self, coef: Any, n_blocks: int) -> list[Any]:
        """cvxpy constraints, by default none, that hold wherever the penalty of ``expression`` is finite."""
        return []

    def violating_atoms(self, correlation: Tensor, alpha: float) -> Atoms:
        """Extreme points of the unit ball whose product with `correlation` exceeds `alpha`, the best of each group."""
        raise NotImplementedError(f"{type(self).__name__} has no search for the atom that violates most")

    def smoothed_value(self, coef: Tensor, width: float) -> Tensor:
        """A twice differentiable convex bound, whose excess is largest at zero, there in proportion to `width` > 0."""
        raise NotImplementedError(f"{type(self).__name__} has no smoothed form")

    def smoothed_derivatives(self, coef: Tensor, width: float) -> SmoothedDerivatives:
        """Derivatives of ``smoothed_value``."""
        raise NotImplementedError(f"{type(self).__name__} has no smoothed form")

    def active_groups(self, correlation: Tensor, coef: Tensor, alpha: float) -> ActiveGroups | None:
        """Groups that violate their constraint at `correlation` and nonzero groups of `coef`, near the optimum.

        None, the default, is for groups that are not of one block and one output each: points are not polished.
        """
        return None

    def value(self, coef: Tensor) -> Tensor:
        """The penalty, the sum of its groups' norms, a scalar, in any units."""
        return self.group_values_in_any_units(coef).sum()

    def dual_norm(self, coef: Tensor) -> Tensor:
        """Largest ``<coef, z>`` over ``penalty(z) <= 1``, a scalar, in any units."""
        return self.group_dual_norms_in_any_units(coef).amax()

    def group_values_in_any_units(self, coef: Tensor) -> Tensor:
        """``group_values`` where squares may leave the range."""
        return self._in_any_units(self.group_values, coef)

    def group_dual_norms_in_any_units(self, coef: Tensor) -> Tensor:
        """``group_dual_norms`` where squares may leave the range."""
        return self._in_any_units(self.group_dual_norms, coef)

    def _in_any_units(self, norms: Callable[[Tensor], Tensor], coef: Tensor) -> Tensor:
        """Norms of groups where squares may leave the range, each output in a unit, without rounding."""
        sizes = coef.abs().reshape(-1, coef.shape[-1]).amax(0)
        if not self.output_separable:
            sizes = sizes.amax(0, keepdim=True)
            if not bool(torch.isfinite(sizes).all()):  # whose singular values are refused
                return norms(torch.zeros_like(coef)) + sizes
        limits = torch.finfo(coef.dtype)
        small, large = limits.tiny ** (1 / 3), limits.max ** (1 / 3)
        odd = [0 < size < small or large < size < math.inf for size in sizes.tolist()]
        if not any(odd):
            return norms(coef)
        largest = math.floor(math.log2(limits.max)) - 4  # the inverse of such a power is a normal number
        exponents = torch.frexp(sizes)[1].clamp(-largest, largest)
        unit = torch.where(torch.tensor(odd).to(coef.device), torch.exp2(exponents.to(coef)), 1.0)
        return norms(coef / unit) * unit

    def factor_cost(self, left: Tensor, right: Tensor) -> Tensor:
        """Weight decay ``(|left|_2^2 + right_norm(right)^2) / 2`` of each pair; the penalty of balanced ones."""
        return 0.5 * (left.square().sum(1) + self.right_norm(right).square())

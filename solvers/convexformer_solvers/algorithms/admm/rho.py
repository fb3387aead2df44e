"""The rho of alternating directions: the first one, the one for the size of groups, and the one by recent moves."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from convexformer_solvers.program import Program, out_of_range

from .config import AdmmConfig


class Sides(NamedTuple):
    """Both sides of the splitting at some iteration, with the gradients that they balance there."""

    smooth: Tensor
    correlation: Tensor
    coef: Tensor
    subgradient: Tensor  # rho U


class GroupSizeStepRule(NamedTuple):
    """The rho that makes the prox's threshold so many times the size of a typical active group.

    That is the median one at first. Where moves have said what rho is, the rule only carries it to other sizes, by
    their average weighted by the sizes themselves, which does not jump where many small groups come in.
    """

    threshold: float  # alpha / rho over that size
    measured: bool = False  # whether moves have said what it is

    @classmethod
    def giving(cls, program: Program, coef: Tensor, rho: float) -> GroupSizeStepRule | None:
        """The rule that gives this rho at some coefficients; None without active groups of a finite size."""
        size = _average_of_sum(program.penalty.group_dual_norms(coef))
        return cls(program.alpha / (rho * size), measured=True) if 0 < size < math.inf else None

    def rho(self, program: Program, coef: Tensor, largest: float) -> float | None:
        """The rho, up to a largest one; None without active groups of a finite size."""
        sizes = program.penalty.group_dual_norms(coef)
        if self.measured:
            size = _average_of_sum(sizes)
        else:  # those that would ask for far more than the largest are rounding
            sizes = sizes[sizes > 0.01 * program.alpha / (self.threshold * largest)]
            size = float(sizes.median()) if len(sizes) else 0.0
        return min(program.alpha / (self.threshold * size), largest) if 0 < size < math.inf else None


def _average_of_sum(sizes: Tensor) -> float:
    """Average size, weighted by the sizes themselves; zero where all are."""
    sizes = sizes.double()  # as their squares leave the range of single precision
    total = float(sizes.sum())
    return float(sizes.square().sum()) / total if total > 0 else 0.0


def balancing_rho(before: Sides, after: Sides) -> float | None:
    """Geometric mean of the curvatures that moves have met in the loss and in the penalty; None where nothing moved.

    Either is the size of a change of the gradient over that of the move: the geometric mean of the inverses of the two
    spectral step sizes of Xu, Figueiredo and Goldstein (AISTATS 2017).
    """
    move, change, shift, pull = (float((new - old).norm()) for new, old in zip(after, before, strict=True))
    if not (move > 0 and shift > 0):
        return None
    square = change / move * pull / shift
    return math.sqrt(square) if 0 < square < math.inf else None


def within(rho: float, wanted: float, factor: float) -> float:
    """The wanted rho, or what is nearest to it within a factor of another."""
    return min(max(wanted, rho / factor), rho * factor)


def serves_as_well(rho: float, other: float, factor: float) -> bool:
    """Whether one rho is within a factor of another."""
    return max(rho / other, other / rho) <= factor


def rule_from_scratch(program: Program, ratio: float, config: AdmmConfig) -> GroupSizeStepRule:
    """The rule before moves have told, by how correlated the features are: their ``eigenvalue_ratio``, or NaN."""
    if ratio > config.correlated:
        return GroupSizeStepRule(config.correlated_threshold)
    independent = ratio <= config.independent and program.loss.quadratic
    return GroupSizeStepRule(config.independent_threshold if independent else config.threshold)


def first_rho(program: Program, correlation: Tensor, largest: float, ratio: float, config: AdmmConfig) -> float:
    """A share of the rho for the groups of the first proximal step: they grow where features are correlated.

    Where that step is none, the largest, as one has no unit.
    """
    direction = program.penalty.prox(correlation, program.alpha)
    slope = float((correlation * direction).sum())
    step = slope / _bend(program, direction) if slope > 0 else 0.0
    rule = GroupSizeStepRule(config.threshold)
    share = config.first_share * (2 if ratio <= config.independent and program.loss.quadratic else 1)
    rho = share * (rule.rho(program, step * direction, largest) or 0.0)
    if rho > 0:
        return rho
    return largest if math.isfinite(largest) else 1.0


def largest_rho(program: Program, correlation: Tensor) -> float:
    """About the curvature of the loss in the coefficients; inf where nothing leads anywhere."""
    if not bool(correlation.any()):
        return math.inf
    # Where the start fits so well that squares of its own underflow, those of the best constant model count.
    for of_start in (True, False):
        direction = correlation if of_start else program.null_correlation.to(correlation)
        square, bend = float(direction.square().sum()), _bend(program, direction)
        if 0 < square < math.inf and 0 < bend < math.inf:
            return bend / square
    program.map.check_finite()
    raise out_of_range(correlation.dtype)


def _bend(program: Program, direction: Tensor) -> float:
    """Bound of the loss's second derivative along a direction in the coefficients."""
    image = program.map.matvec(direction)
    return program.loss.smoothness * float(program.mean(image.square().sum(1)))

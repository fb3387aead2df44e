"""The rho of alternating directions: the first one, the one for the size of groups, and the one that moves tell."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from convexformer_solvers.linalg.eigenvalue_ratio import some_samples_tell, spread
from convexformer_solvers.program import Program

# The prox's threshold alpha / rho against the median norm of an active group; and for losses that couple the outputs
# where the start is that of another state, near the optimum: there a number stands for each sample's matrix of
# curvatures, and is too large in most directions.
_THRESHOLD = 1 / 0.3
_NEAR_THRESHOLD = 1.5
# The same from scratch, for losses of each output by itself whose curvature does not jump and more than a few features,
# in units of the root of their spread: the more correlated they are, the longer groups grow. At least, where the loss
# is quadratic, else as above; and at most. Sets rho from its first adaptation on; before, groups are too far from what
# they will be.
_THRESHOLD_OF_SPREAD = 1.6
_LEAST_THRESHOLD = 2.0
_LARGEST_THRESHOLD = 5.0
_ROUNDING = 1e-2
# The first rho, in units of that for the groups of the first proximal step; with the squared loss times the spread.
_FIRST_SHARE = 0.25
_FIRST_SHARE_OF_SPREAD = 0.8
_LARGEST_FIRST_SHARE = 0.55
# Factor by which rho would have to change for other factors to be worth their cost; below it is left alone.
WORTH_REFACTORING = 2.2


class Sides(NamedTuple):
    """Both sides of the splitting at some iteration, with the gradients that they balance there."""

    smooth: Tensor
    correlation: Tensor
    coef: Tensor
    pull: Tensor  # rho U


class GroupRule(NamedTuple):
    """The rho that makes the prox's threshold so many times the size of a typical active group.

    That is the median one at first: it shrinks with many small groups, which ask for a larger rho. Where moves have
    said what rho is, the rule only carries it to other sizes, by their average weighted by the sizes themselves, which
    does not jump where many small groups come in.
    """

    threshold: float  # alpha / rho over that size
    measured: bool = False  # whether moves have said what it is

    @classmethod
    def giving(cls, program: Program, coef: Tensor, rho: float) -> GroupRule | None:
        """The rule that gives this rho at some coefficients; None without active groups of a finite size."""
        size = _average_of_sum(program.penalty.group_dual_norms(coef))
        return cls(program.alpha / (rho * size), measured=True) if 0 < size < math.inf else None

    def rho(self, program: Program, coef: Tensor, largest: float) -> float | None:
        """The rho, up to a largest one; None without active groups of a finite size."""
        sizes = program.penalty.group_dual_norms(coef)
        if self.measured:
            size = _average_of_sum(sizes)
        else:  # those that would ask for far more than the largest are rounding
            sizes = sizes[sizes > _ROUNDING * program.alpha / (self.threshold * largest)]
            size = float(sizes.median()) if len(sizes) else 0.0
        return min(program.alpha / (self.threshold * size), largest) if 0 < size < math.inf else None


def _average_of_sum(sizes: Tensor) -> float:
    """Average size, weighted by the sizes themselves; zero where all are."""
    sizes = sizes.double()  # as their squares leave the range of single precision
    total = float(sizes.sum())
    return float(sizes.square().sum()) / total if total > 0 else 0.0


def balancing_rho(before: Sides, after: Sides) -> float | None:
    """Geometric mean of the curvatures that moves have met in the loss and in the penalty; None where nothing moved.

    Either is the size of a change of the gradient over that of the move, which is the geometric mean of the inverses of
    the two spectral step sizes of Xu, Figueiredo and Goldstein, "Adaptive ADMM with spectral penalty parameter
    selection" (AISTATS 2017).
    """
    move, change, shift, pull = (float((new - old).norm()) for new, old in zip(after, before, strict=True))
    if not (move > 0 and shift > 0):
        return None
    square = change / move * pull / shift
    return math.sqrt(square) if 0 < square < math.inf else None


def serves_as_well(rho: float, other: float) -> bool:
    """Whether one rho serves as well as another."""
    return max(rho / other, other / rho) <= WORTH_REFACTORING


def spread_that_tells(program: Program, warm: bool) -> float:
    """Spread of the features where the first rho and the prox's threshold go by it, NaN elsewhere."""
    loss = program.loss
    looks = some_samples_tell(program) and loss.output_separable and loss.smooth_curvature and not warm
    return spread(program) if looks else math.nan


def rule_for_groups(program: Program, found: float, warm: bool) -> GroupRule:
    """The rule before moves have told: by the spread that was found, or NaN."""
    if warm and not program.loss.output_separable:
        return GroupRule(_NEAR_THRESHOLD)
    if math.isnan(found):
        return GroupRule(_THRESHOLD)
    least = _LEAST_THRESHOLD if program.loss.quadratic else _THRESHOLD
    return GroupRule(min(_LARGEST_THRESHOLD, max(least, _THRESHOLD_OF_SPREAD * math.sqrt(found))))


def first_rho(program: Program, correlation: Tensor, found: float, largest: float) -> float:
    """A share of the rho for the groups of the first proximal step: they grow where features are correlated.

    Where that step is none, the largest, as one has no unit.
    """
    direction = program.penalty.prox(correlation, program.alpha)
    slope = float((correlation * direction).sum())
    step = slope / _bend(program, direction) if slope > 0 else 0.0
    rho = _first_share(program, found) * (GroupRule(_THRESHOLD).rho(program, step * direction, largest) or 0.0)
    if rho > 0:
        return rho
    return largest if math.isfinite(largest) else 1.0


def _first_share(program: Program, found: float) -> float:
    """A quarter; more for squares of features that are hardly correlated, where no other rho is then needed."""
    if not program.loss.quadratic or math.isnan(found):
        return _FIRST_SHARE
    return min(max(_FIRST_SHARE, _FIRST_SHARE_OF_SPREAD / found), _LARGEST_FIRST_SHARE)


def largest_rho(program: Program, correlation: Tensor) -> float:
    """About the curvature of the loss in the coefficients; inf where nothing leads anywhere."""
    if not bool(correlation.any()):
        return math.inf
    square, bend = float(correlation.square().sum()), _bend(program, correlation)
    if not (0 < square < math.inf and 0 < bend < math.inf):
        program.map.check_finite()
        raise ValueError(
            f"squares of the data or the targets are too small or too large for {correlation.dtype}; scale the "
            "features (and alpha with them) or the targets to about one"
        )
    return bend / square


def _bend(program: Program, direction: Tensor) -> float:
    """Bound of the loss's second derivative along a direction in the coefficients."""
    image = program.map.matvec(direction)
    return program.loss.smoothness * float(program.mean(image.square().sum(1)))

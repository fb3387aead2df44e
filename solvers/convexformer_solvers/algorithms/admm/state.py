"""What an iteration of alternating directions leaves, and what the next alpha of a path starts from."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.algorithms.primal_dual import Iterate
from convexformer_solvers.linalg.anderson import Anderson
from convexformer_solvers.linalg.ridge import RidgeSystem
from convexformer_solvers.program import Program

from .rho import GroupRule, Sides

# Rough gap of an end, over the best constant model's objective, up to which the next alpha is extrapolated from it:
# Newton steps may have ended that alpha while these iterations were at rest; and how far below zero it may be.
_NEAR = 3e-2
_ROUNDING = 1e-5


class Known(NamedTuple):
    """What has been computed of the data; shared by all states of a solve or a path, and kept for the latest."""

    system: RidgeSystem
    acceleration: Anderson  # of Z + U
    largest_rho: float  # about the curvature of the loss; beyond that rho only slows down


class Split(NamedTuple):
    """Both sides of the splitting, to begin with."""

    coef: Tensor  # Z
    fitted_coef: Tensor  # A Z
    multiplier: Tensor  # U
    fitted_multiplier: Tensor  # A U


class Start(NamedTuple):
    """Coefficients, and predictions that need not be theirs and stand for a dual point."""

    coef: Tensor
    fitted_coef: Tensor  # A coef
    fitted: Tensor  # of the dual point, intercept included
    correlation: Tensor  # A' diag(p) times that dual point

    @classmethod
    def at(cls, program: Program, coef: Tensor, pred: Tensor | None) -> Start:
        """That of coefficients and other predictions, where there are any; costs two products."""
        coef = coef.to(program.y)
        fitted_coef = program.map.matvec(coef)
        fitted = fitted_coef + program.best_intercept(fitted_coef) if pred is None else pred.to(program.y)
        return cls(coef, fitted_coef, fitted, program.weighted_adjoint(-program.loss.gradient(fitted, program.y)))

    def split(self, program: Program, rho: float) -> Split:
        # The multiplier of the optimum is the correlation direction, which there is within the dual ball.
        multiplier = (self.correlation - program.penalty.prox(self.correlation, program.alpha)) / rho
        return Split(self.coef, self.fitted_coef, multiplier, program.map.matvec(multiplier))


class End(NamedTuple):
    """Where the solve of an alpha ended, or where two ends lead.

    Their own points are extrapolated, not polished ones: these are better, but not where the iterations come to rest.
    From there the first iteration leads back to a gap many times as large, and it takes five to make up for that.
    """

    alpha: float
    coef: Tensor  # Z
    correlation: Tensor  # rho U: alpha times a subgradient of the penalty at Z
    fitted: Tensor  # A W + b

    def ahead(self, before: End, alpha: float) -> End:
        """Linear extrapolation in `alpha` from the end before through this one, no further than they are apart."""
        weight = 1 + min(1.0, (alpha - self.alpha) / (self.alpha - before.alpha))
        parts = (torch.lerp(old.to(new), new, weight) for old, new in zip(before[1:], self[1:], strict=True))
        return End(alpha, *parts)

    def split(self, program: Program, rho: float) -> Split:
        total = self.coef + self.correlation / rho
        coef = program.penalty.prox(total, program.alpha / rho)
        multiplier = total - coef
        # One product for both: the data are read once.
        images = program.map.matvec(torch.cat([coef, multiplier], dim=-1))
        fitted_coef, fitted_multiplier = images.split(coef.shape[-1], dim=-1)
        return Split(coef, fitted_coef, multiplier, fitted_multiplier)


class _Fields(NamedTuple):
    exact: Program  # samples of positive weight, float64 targets
    program: Program  # the same in the precision of the iterations
    known: Known
    rho: float
    rule: GroupRule  # for rho by the size of groups
    local: Tensor  # curvature of each sample's loss when it was last looked at, (N,)
    margin: float  # curvature of the quadratic that stands for the loss, in units of the local one
    met: float  # largest mean curvature met along the moves since then, in the same units
    secant: Tensor  # largest one of each sample along those moves, (N,)
    smooth: Tensor  # W, which carries the loss
    correlation: Tensor  # A' diag(p) theta of the dual point that W gives
    fitted: Tensor  # A W + b, (N, c)
    expansion: Tensor  # where the quadratics touch the samples' losses, (N, c)
    coef: Tensor  # Z, which carries the penalty
    fitted_coef: Tensor  # A Z
    multiplier: Tensor  # scaled dual U of W = Z
    fitted_multiplier: Tensor  # A U
    iteration: int = 0
    mark: Sides | None = None  # a few iterations before rho is set anew
    before: End | None = None  # of the alpha before on a path


class State(_Fields):
    """What an iteration leaves; its gap is computed where somebody asks, and once."""

    @classmethod
    def at(
        cls,
        exact: Program,
        program: Program,
        known: Known,
        start: Start | End,
        local: Tensor,
        rho: float,
        rule: GroupRule,
    ) -> State:
        """The state to begin with."""
        split = start.split(program, rho)
        return cls(
            exact=exact,
            program=program,
            known=known,
            rho=rho,
            rule=rule,
            local=local,
            margin=1.0,
            met=0.0,
            secant=torch.zeros_like(local),
            smooth=split.coef,
            correlation=start.correlation,
            fitted=start.fitted,
            expansion=start.fitted,
            coef=split.coef,
            fitted_coef=split.fitted_coef,
            multiplier=split.multiplier,
            fitted_multiplier=split.fitted_multiplier,
        )

    @property
    def curvature(self) -> Tensor:
        """Curvature of the quadratics that stand for the samples' losses, (N,)."""
        return self.margin * self.local

    def iterate(self) -> Iterate:
        """Both points in float64."""
        exact = self.exact
        coef, fitted_coef, fitted, correlation = (
            part.to(exact.y) for part in (self.coef, self.fitted_coef, self.fitted, self.correlation)
        )
        intercept = exact.weight @ (fitted - fitted_coef) * exact.fit_intercept
        return Iterate(exact, coef, fitted_coef + intercept, fitted, correlation)

    @cached_property
    def gap(self) -> float:
        """The rough gap."""
        return self.iterate().gap_estimate

    def sides(self) -> Sides:
        """Both sides, for what moves tell of rho."""
        return Sides(self.smooth, self.correlation, self.coef, self.rho * self.multiplier)

    def end_before(self, exact: Program) -> End | None:
        """The end of the alpha before that of a program; None where there is none to extrapolate from."""
        same = self.exact.loss == exact.loss and torch.equal(self.exact.y, exact.y)
        if not (same and exact.loss.smooth_curvature):  # across jumps of the curvature this leads astray
            return None
        if self.program.alpha == exact.alpha:
            return self.before
        # A gap below zero is that of an correlation that is not the dual point's, and then U is not that of Z either.
        if not -_ROUNDING <= self.gap / exact.null_value <= _NEAR:
            return None
        return End(self.program.alpha, self.coef, self.rho * self.multiplier, self.fitted)

    def ahead(self, exact: Program) -> End | None:
        """Where the last two alphas lead the one of a program; None where they lead nowhere."""
        end = self.end_before(exact) if self.program.alpha != exact.alpha else None
        return None if end is None or self.before is None else end.ahead(self.before, exact.alpha)

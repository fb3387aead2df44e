"""What an iteration of alternating directions leaves, and what the next alpha of a path starts from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.linalg.anderson import Anderson
from convexformer_solvers.linalg.ridge import RidgeSystem
from convexformer_solvers.program import Program

from .rho import GroupSizeStepRule, Sides


class Cache(NamedTuple):
    """What has been computed of the data; shared by all states of a solve or a path, and kept for the latest."""

    system: RidgeSystem
    acceleration: Anderson  # of Z + U
    largest_rho: float  # about the curvature of the loss; beyond that rho only slows down


class Start(NamedTuple):
    """Coefficients, and predictions that need not be theirs and stand for a dual point."""

    coef: Tensor
    fitted_coef: Tensor  # A coef
    pred: Tensor  # behind the dual point, intercept included
    correlation: Tensor  # A' diag(p) times that dual point

    @classmethod
    def at(cls, program: Program, coef: Tensor, pred: Tensor | None) -> Start:
        """That of coefficients and other predictions, where there are any; costs two products."""
        if pred is None and not bool(coef.any()):
            constant, correlation = program.constant_pred(program.null_intercept), program.null_correlation.to(coef)
            return cls(coef, torch.zeros_like(program.y), constant, correlation)
        fitted_coef = program.map.matvec(coef)
        pred = fitted_coef + program.best_intercept(fitted_coef) if pred is None else pred
        return cls(coef, fitted_coef, pred, program.weighted_adjoint(-program.loss.gradient(pred, program.y)))

    def split(self, program: Program, rho: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``Z``, ``A Z``, ``U`` and ``A U`` to begin with."""
        # The multiplier of the optimum is the correlation, which there is within the dual ball.
        multiplier = (self.correlation - program.penalty.prox(self.correlation, program.alpha)) / rho
        return self.coef, self.fitted_coef, multiplier, program.map.matvec(multiplier)


class End(NamedTuple):
    """Where the solve of an alpha ended, or where two ends lead.

    The iterations' own points are extrapolated, not polished ones: these are better, but not where the iterations come
    to rest. From there the first iteration leads back to a gap many times as large.
    """

    alpha: float
    coef: Tensor  # Z
    correlation: Tensor  # rho U: alpha times a subgradient of the penalty at Z
    pred: Tensor  # A W + b

    def ahead(self, before: End, alpha: float) -> End:
        """Linear extrapolation in `alpha` from the end before through this one, no further than they are apart."""
        weight = 1 + min(1.0, (alpha - self.alpha) / (self.alpha - before.alpha))
        parts = (torch.lerp(old.to(new), new, weight) for old, new in zip(before[1:], self[1:], strict=True))
        return End(alpha, *parts)

    def split(self, program: Program, rho: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``Z``, ``A Z``, ``U`` and ``A U`` to begin with."""
        total = self.coef + self.correlation / rho
        coef = program.penalty.prox(total, program.alpha / rho)
        multiplier = total - coef
        # One product for both: the data are read once.
        images = program.map.matvec(torch.cat([coef, multiplier], dim=-1))
        fitted_coef, fitted_multiplier = images.split(coef.shape[-1], dim=-1)
        return coef, fitted_coef, multiplier, fitted_multiplier


class State(NamedTuple):
    """What an iteration leaves."""

    alpha: float
    cache: Cache
    rho: float
    rule: GroupSizeStepRule  # for rho by the size of groups
    local: Tensor  # curvature of each sample's loss when it was last looked at, (N,)
    observed_curvature: Tensor  # largest one of each sample observed along moves since then, (N,)
    smooth: Tensor  # W, which carries the loss
    correlation: Tensor  # A' diag(p) theta of the dual point that W gives
    pred: Tensor  # A W + b, (N, c), behind the dual point
    expansion: Tensor  # where the quadratics touch the samples' losses, (N, c)
    coef: Tensor  # Z, which carries the penalty
    fitted_coef: Tensor  # A Z
    multiplier: Tensor  # scaled dual U of W = Z
    fitted_multiplier: Tensor  # A U
    margin: float = 1.0  # curvature of the quadratic that stands for the loss, in units of the local one
    observed_mean: float = 0.0  # largest mean curvature observed along those moves, in the same units
    iteration: int = 0
    mark: Sides | None = None  # a few iterations before rho is set anew
    before: End | None = None  # of the alpha before on a path

    @classmethod
    def at(
        cls, program: Program, cache: Cache, start: Start | End, local: Tensor, rho: float, rule: GroupSizeStepRule
    ) -> State:
        """The state to begin with."""
        coef, fitted_coef, multiplier, fitted_multiplier = start.split(program, rho)
        return cls(
            alpha=program.alpha,
            cache=cache,
            rho=rho,
            rule=rule,
            local=local,
            observed_curvature=torch.zeros_like(local),
            smooth=coef,
            correlation=start.correlation,
            pred=start.pred,
            expansion=start.pred,
            coef=coef,
            fitted_coef=fitted_coef,
            multiplier=multiplier,
            fitted_multiplier=fitted_multiplier,
        )

    @property
    def curvature(self) -> Tensor:
        """Curvature of the quadratics that stand for the samples' losses, (N,)."""
        return self.margin * self.local

    @property
    def sides(self) -> Sides:
        """Both sides, for what moves tell of rho."""
        return Sides(self.smooth, self.correlation, self.coef, self.rho * self.multiplier)

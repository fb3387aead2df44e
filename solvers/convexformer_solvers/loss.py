"""What a loss is: value, gradient, conjugate, curvature and cvxpy expression, per sample.

Predictions and targets are ``(N, c)`` arrays. A loss is jointly convex in the ``c`` predictions of a sample; the
program takes its weighted mean over samples.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .intercepts import LossAtIntercepts, best_intercept


class Loss(ABC):
    """A convex loss ``l(f, y)`` of the predictions ``f`` of one sample.

    Attributes
    ----------
    separable : bool
        Whether the loss is a sum over outputs.
    targets : {"real", "sign", "simplex"}
        What a row of ``y`` is: real numbers (or counts), -1 and 1 per output, or class probabilities.
    probabilistic : bool
        Whether ``mean`` gives class probabilities.
    quadratic : bool
        Whether the loss is half the squared distance of prediction and target.
    of_residual : bool
        Whether the loss is a function of the prediction minus the target.
    shift_invariant : bool
        Whether the same number added to all outputs changes nothing.
    smooth_curvature : bool
        Whether the second derivatives are continuous; solvers that cannot tell take it that they are not.
    smoothness : float
        Largest eigenvalue of the Hessian in ``f`` over all ``f`` and ``y``; inf when unbounded.
    """

    separable: ClassVar[bool] = True
    targets: ClassVar[Literal["real", "sign", "simplex"]] = "real"
    probabilistic: ClassVar[bool] = False
    quadratic: ClassVar[bool] = False
    of_residual: ClassVar[bool] = False
    shift_invariant: ClassVar[bool] = False
    smooth_curvature: ClassVar[bool] = False

    @property
    @abstractmethod
    def smoothness(self) -> float:
        """Largest curvature of the loss; inf when there is no bound."""

    @abstractmethod
    def value(self, pred: Tensor, y: Tensor) -> Tensor:
        """Loss of each sample, shape ``(N,)``, never negative."""

    @abstractmethod
    def gradient(self, pred: Tensor, y: Tensor) -> Tensor:
        """Gradient in the predictions, shape ``(N, c)``."""

    @abstractmethod
    def hessian_product(self, pred: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        """Hessian of each sample times ``direction``, shape ``(N, c)``."""

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        """Convex conjugate ``sup_f <u, f> - l(f, y)`` of each sample, shape ``(N,)``; inf outside its domain.

        The default is nan: a loss without a conjugate has no certificate, and its gap is nan, never 0.
        """
        return u.new_full((u.shape[0],), math.nan)

    def magnitude(self, y: Tensor) -> Tensor:
        """Size of the terms whose difference a sample's loss is, shape ``(N,)``; eps times it is rounding."""
        return self.value(torch.zeros_like(y), y)

    def mean(self, pred: Tensor) -> Tensor:
        """Mean of the targets that predictions stand for (the inverse link), shape ``(N, c)``."""
        return pred

    def check_target(self, y: Tensor) -> None:  # noqa: B027 - real numbers need no check
        """Raise ``ValueError`` when ``y`` is not a target of this loss."""

    def target_in(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """The targets in another precision, within what ``check_target`` asks for there."""
        return y.to(dtype)

    def example_target(self, n_samples: int, n_outputs: int, generator: torch.Generator) -> Tensor:
        """Random float64 targets of this loss, which ``checks`` and the tests try it on."""
        return torch.randn((n_samples, n_outputs), generator=generator, dtype=torch.float64)

    def expression(self, pred: Any, y: Any, weight: Any) -> Any:
        """cvxpy expression of ``sum_i weight_i l(pred_i, y_i)``; ``pred`` is a cvxpy variable of shape ``(N, c)``."""
        raise NotImplementedError(f"{type(self).__name__} has no method 'expression', which the solver 'exact' needs")

    def hessian_parts(self, pred: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Parts ``d`` and ``v`` of shape ``(N, c)`` of each sample's Hessian ``diag(d) - v v'``.

        The second is None where the Hessian is diagonal. Optional for a loss that couples the outputs: None, the
        default there, makes solvers take the Hessian column by column.
        """
        return (self.hessian_product(pred, y, torch.ones_like(pred)), None) if self.separable else None

    def mean_hessian(self, pred: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """``(c, c)`` Hessian of the weighted loss in an intercept shared by all samples."""
        if self.separable:
            return torch.diag(weight @ self.hessian_product(pred, y, torch.ones_like(pred)))
        columns = []
        for k in range(pred.shape[1]):
            direction = torch.zeros_like(pred)
            direction[:, k] = 1.0
            columns.append(weight @ self.hessian_product(pred, y, direction))
        return torch.stack(columns)

    def tail_length(self, pred: Tensor, y: Tensor, weight: Tensor) -> float:
        """How many times as wide a quadratic part around zero must be to hold half of the samples, 1 where it does.

        Half of them by their weights, which sum to 1.

        Losses without linear parts need not define it; for those with, ``widened`` is the other half.
        """
        return 1.0

    def widened(self, y: Tensor, slope: Tensor, width: float) -> tuple[Loss, Tensor]:
        r"""Loss and targets of a proximal step in the dual, which widen the quadratic part to `width` times itself.

        One over `width` times the loss is, up to a constant, :math:`\max_u u'f - l^*(u) - \frac{w - 1}2 \|u - v\|^2`
        with the slopes ``v``, of shape ``(N, c)``; ``w`` is the width.
        """
        raise NotImplementedError(f"{self!r} has no linear parts")

    def best_dual_scale(self, theta: Tensor, y: Tensor, weight: Tensor, limit: Tensor) -> Tensor:
        """Scale of ``theta`` within ``[0, limit]`` that serves the dual bound best.

        `limit` has shape ``(c,)`` when outputs may be scaled apart and ``()`` otherwise. The default is the largest
        scale at most 1, which keeps every point between zero and ``theta`` in the conjugate's domain.
        """
        return limit.clamp(max=1.0)

    def best_intercept(self, pred: Tensor, y: Tensor, weight: Tensor, start: Tensor | None = None) -> Tensor:
        """Minimiser over ``b`` of ``sum_i weight_i l(pred_i + b, y_i)``, shape ``(c,)``, by damped Newton steps.

        The weights sum to 1. `start` is a first guess that saves steps.
        """
        return best_intercept(LossAtIntercepts(self, pred, y, weight), start)

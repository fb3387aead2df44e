"""What a loss is: value, gradient, conjugate, curvature and cvxpy expression, per sample.

Predictions and targets are ``(N, c)`` arrays. A loss is jointly convex in the ``c`` predictions of a sample; the
program takes its weighted mean over samples.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from convexformer_solvers.draws import standard_normal
from convexformer_solvers.validation import take_former_names

from .intercept import LossAtIntercepts, best_intercept


class Loss(ABC):
    """A convex, differentiable loss ``l(f, y)`` of the predictions ``f`` of one sample.

    A new loss defines ``smoothness``, ``value``, ``gradient`` and ``hessian_product``, and ``conjugate`` to have
    certificates; the rest has defaults. ``check_loss`` tests it. In all methods ``pred`` (predictions), ``y``
    (targets), ``u`` (slopes) and ``direction`` are tensors of shape ``(N, c)``, one row per sample, in one precision,
    and ``weight`` is a tensor of shape ``(N,)`` that sums to 1.

    Attributes
    ----------
    output_separable : bool
        Whether the loss is a sum over outputs, of the same function for each of them.
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

    Examples
    --------
    The squared loss times two, which every solver of smooth losses takes from here:

    >>> from convexformer_solvers import Loss, check_loss
    >>> class TwiceSquared(Loss):
    ...     smoothness, of_residual, smooth_curvature = 2.0, True, True
    ...     def value(self, pred, y):
    ...         return (pred - y).square().sum(1)
    ...     def gradient(self, pred, y):
    ...         return 2 * (pred - y)
    ...     def hessian_product(self, pred, y, direction):
    ...         return 2 * direction
    ...     def conjugate(self, u, y):
    ...         return (u.square() / 4 + u * y).sum(1)
    >>> check_loss(TwiceSquared())
    """

    output_separable: ClassVar[bool] = True
    targets: ClassVar[Literal["real", "sign", "simplex"]] = "real"
    probabilistic: ClassVar[bool] = False
    quadratic: ClassVar[bool] = False
    of_residual: ClassVar[bool] = False
    shift_invariant: ClassVar[bool] = False
    smooth_curvature: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        take_former_names(cls, separable="output_separable")

    @property
    @abstractmethod
    def smoothness(self) -> float:
        """Largest curvature of the loss; inf when there is no bound."""

    @abstractmethod
    def value(self, pred: Tensor, y: Tensor) -> Tensor:
        """Loss of each sample, shape (N,), never negative."""

    @abstractmethod
    def gradient(self, pred: Tensor, y: Tensor) -> Tensor:
        """Gradient of each sample's loss in its predictions, shape (N, c)."""

    @abstractmethod
    def hessian_product(self, pred: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        """Hessian of each sample's loss times a direction of its own, shape (N, c)."""

    def defines(self, method: str) -> bool:
        """Whether this loss has the optional method of that name, as ``'conjugate'``, and not the one of ``Loss``."""
        return getattr(type(self), method, None) is not getattr(Loss, method, None)

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        """Convex conjugate ``sup_f <u, f> - l(f, y)`` of each sample's loss, shape (N,), by default nan as is the gap.

        It is inf outside its domain, which holds every point between zero and a gradient.
        """
        return u.new_full((u.shape[0],), math.nan)

    def magnitude(self, y: Tensor) -> Tensor:
        """Size of the terms whose difference a sample's loss is, shape (N,): eps times it is rounding."""
        return self.value(torch.zeros_like(y), y)

    def mean(self, pred: Tensor) -> Tensor:
        """Mean target of predictions (the inverse link), shape (N, c): probabilities of classes; by default `pred`."""
        return pred

    def check_target(self, y: Tensor) -> None:  # noqa: B027 - real numbers need no check
        """Raise ``ValueError`` when ``y``, finite numbers, is not a target of this loss."""

    def target_in(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """The targets in another precision, within what ``check_target`` asks for there."""
        return y.to(dtype)

    def example_target(self, n_samples: int, n_outputs: int, generator: torch.Generator) -> Tensor:
        """Random float64 targets of that shape and kind, on which ``check_loss`` and the tests try the loss."""
        scores = standard_normal((n_samples, n_outputs), generator, torch.float64)
        if self.targets == "sign":
            return 2.0 * (scores > 0).double() - 1.0
        return (
            torch.nn.functional.one_hot(scores.argmax(1), n_outputs).double() if self.targets == "simplex" else scores
        )

    def expression(self, pred: Any, y: Any, weight: Any) -> Any:
        """cvxpy expression of ``sum_i weight_i l(pred_i, y_i)`` for ``"exact"``; `y` and `weight` are arrays."""
        raise NotImplementedError(f"{type(self).__name__} has no method 'expression', which the solver 'exact' needs")

    def hessian_parts(self, pred: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Parts ``d`` and ``v``, both of shape (N, c), of each sample's Hessian ``diag(d) - v v'``.

        ``v`` is None where that is diagonal. For coupled outputs the default is None: solvers go column by column.
        """
        return (self.hessian_product(pred, y, torch.ones_like(pred)), None) if self.output_separable else None

    def mean_hessian(self, pred: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Hessian of the weighted loss in an intercept shared by all samples, shape (c, c)."""
        if (parts := self.hessian_parts(pred, y)) is not None:
            diagonal, root = parts
            result = torch.diag(weight @ diagonal)
            return result if root is None else result - (weight[:, None] * root).T @ root
        return torch.stack([weight @ column for column in hessian_columns(self, pred, y)])

    def tail_length(self, pred: Tensor, y: Tensor, weight: Tensor) -> float:
        """Factor, at least 1, by which a quadratic part is widened to hold half of the samples; with ``widened``."""
        return 1.0

    def widened(self, y: Tensor, slope: Tensor, width: float) -> tuple[Loss, Tensor]:
        r"""Loss and targets, shape (N, c), of a proximal step in the dual: the quadratic part is `width` times as wide.

        One over `width` times the loss is, up to a constant, :math:`\max_u u'f - l^*(u) - \frac{w - 1}2 \|u - v\|^2`
        with the slopes ``v`` of shape (N, c) and the width ``w``, at least 1. ``NotImplementedError`` by default.
        """
        raise NotImplementedError(f"{self!r} has no linear parts")

    def smoothed(self, cost: float) -> Loss:
        """A loss below this one by at most `cost` for each prediction, whose slopes have no kinks; by default this.

        It has a conjugate as this one has, and less ``smoothness`` the more it is smoothed.
        """
        return self

    def unsmoothed(self, pred: Tensor, y: Tensor) -> Tensor:
        """Predictions, shape (N, c), at which the loss that gave this one by ``smoothed`` has this one's slopes."""
        return pred

    def best_dual_scale(self, theta: Tensor, y: Tensor, weight: Tensor, limit: Tensor) -> Tensor:
        """Scale within ``[0, limit]`` of a dual point `theta` of shape (N, c) that serves the dual bound best.

        `limit`, the largest feasible scale, perhaps inf, has shape (c,) where outputs may be scaled apart, else ().
        The default, at most 1, keeps the point in the conjugate's domain. Certificates cut it to ``[0, limit]``.
        """
        return limit.clamp(max=1.0)

    def best_intercept(self, pred: Tensor, y: Tensor, weight: Tensor, start: Tensor | None = None) -> Tensor:
        """Minimiser over ``b``, shape (c,), of ``sum_i weight_i l(pred_i + b, y_i)``, from `start` on."""
        return best_intercept(LossAtIntercepts(self, pred, y, weight), start)


def hessian_columns(loss: Loss, pred: Tensor, y: Tensor) -> Iterator[Tensor]:
    """Columns of each sample's Hessian, shape ``(N, c)``, one output after the other."""
    for unit in torch.eye(pred.shape[1]).to(pred):
        yield loss.hessian_product(pred, y, unit.expand_as(pred))

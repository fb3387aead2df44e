"""Losses of class labels: logistic, squared hinge, softmax cross-entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .base import Loss
from .intercept import SoftmaxAtIntercepts, best_intercept


class _SignLoss(Loss):
    """A loss of the margins ``y_l f_l`` for targets -1 and 1."""

    targets = "sign"

    def check_target(self, y: Tensor) -> None:
        if not bool((y.abs() == 1).all()):
            found = f"values in [{float(y.min())}, {float(y.max())}]; 2 * y - 1 makes them of 0 and 1"
            raise ValueError(f"targets of the {type(self).__name__} loss must be -1 or 1, got {found}")


@dataclass(frozen=True)
class Logistic(_SignLoss):
    r"""Logistic loss :math:`\sum_l \log(1 + e^{-y_l f_l})` for targets -1 and 1.

    Examples
    --------
    >>> Logistic().value(torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [1.0]]))
    tensor([0.6931, 0.1269])
    """

    probabilistic = smooth_curvature = True
    smoothness = 0.25

    def mean(self, pred: Tensor) -> Tensor:
        return torch.sigmoid(pred)

    def value(self, pred: Tensor, y: Tensor) -> Tensor:
        return softplus(-y * pred, threshold=50.0).sum(1)

    def gradient(self, pred: Tensor, y: Tensor) -> Tensor:
        return -y * torch.sigmoid(-y * pred)

    def hessian_product(self, pred: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        return torch.sigmoid(pred) * torch.sigmoid(-pred) * direction

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        t = (-u * y).clamp(0, 1)
        entropy = torch.xlogy(t, t) + torch.special.xlog1py(1 - t, -t)
        return torch.where(t == -u * y, entropy, math.inf).sum(1)

    def expression(self, pred: Any, y: Any, weight: Any) -> Any:
        import cvxpy as cp

        return cp.sum(cp.multiply(weight[:, None], cp.logistic(-cp.multiply(y, pred))))


@dataclass(frozen=True)
class SquaredHinge(_SignLoss):
    r"""Squared hinge loss :math:`\sum_l \max(0, 1 - y_l f_l)^2` for targets -1 and 1, as in ``LinearSVC``.

    Examples
    --------
    >>> SquaredHinge().value(torch.tensor([[0.5], [2.0]]), torch.tensor([[1.0], [1.0]]))
    tensor([0.2500, 0.0000])
    """

    smoothness = 2.0

    def value(self, pred: Tensor, y: Tensor) -> Tensor:
        return (1 - y * pred).clamp(min=0).square().sum(1)

    def gradient(self, pred: Tensor, y: Tensor) -> Tensor:
        return -2 * y * (1 - y * pred).clamp(min=0)

    def hessian_product(self, pred: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        return 2 * (y * pred < 1) * direction

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        t = -u * y
        return torch.where(t >= 0, 0.25 * t.square() - t, math.inf).sum(1)

    def expression(self, pred: Any, y: Any, weight: Any) -> Any:
        import cvxpy as cp

        return cp.sum(cp.multiply(weight[:, None], cp.square(cp.pos(1 - cp.multiply(y, pred)))))


@dataclass(frozen=True)
class Softmax(Loss):
    r"""Softmax cross-entropy :math:`\log \sum_l e^{f_l} - \langle y, f \rangle` for rows ``y`` in the unit simplex.

    Rows in float32 may miss the simplex by their rounding: certificates are of the rows over their sums in float64.

    Examples
    --------
    >>> Softmax().value(torch.tensor([[0.0, 2.0]]), torch.tensor([[0.0, 1.0]]))
    tensor([0.1269])
    """

    output_separable = False
    shift_invariant = smooth_curvature = probabilistic = True
    targets = "simplex"
    smoothness = 0.5

    def mean(self, pred: Tensor) -> Tensor:
        return _softmax(pred)

    def check_target(self, y: Tensor) -> None:
        if y.shape[1] < 2:
            what = "two columns, one per class; of labels 0, 1, ... y = np.eye(n_classes)[labels] makes them"
            raise ValueError(f"targets of the softmax loss need at least {what}")
        # The conjugate, always taken in float64, is finite only for exact sums; looser rows would have infinite gaps.
        slack = 1e-11 if y.dtype == torch.float64 else 1e-5
        if bool((y < 0).any()) or bool(((y.sum(1) - 1).abs() > slack).any()):
            what = "class probabilities whose rows sum to 1; normalise them in float64"
            raise ValueError(f"targets of the softmax loss must be {what}")

    def target_in(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        target = y.to(dtype)  # rows in single precision sum to 1 but for its rounding
        return target if y.dtype == dtype else target / target.sum(1, keepdim=True)

    def value(self, pred: Tensor, y: Tensor) -> Tensor:
        return torch.logsumexp(pred, 1) - (y * pred).sum(1)

    def gradient(self, pred: Tensor, y: Tensor) -> Tensor:
        return _softmax(pred) - y

    def hessian_product(self, pred: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        probability = _softmax(pred)
        weighted = probability * direction
        return weighted - probability * weighted.sum(1, keepdim=True)

    def hessian_parts(self, pred: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        probability = _softmax(pred)
        return probability, probability

    def best_intercept(self, pred: Tensor, y: Tensor, weight: Tensor, start: Tensor | None = None) -> Tensor:
        at = SoftmaxAtIntercepts(self, pred, y, weight)
        best = best_intercept(at, start)
        if at.value(best) > math.sqrt(torch.finfo(pred.dtype).eps):
            return best
        # So small a loss is a matter of rounding beside those exponentials, but not sample by sample.
        best = super().best_intercept(pred, y, weight, best)
        # Classes without any sample get no probability; Newton steps end at its rounding.
        above = torch.log_softmax(pred + best, 1).amax(0) - 2 * math.log(torch.finfo(pred.dtype).eps)
        return best - torch.where(at.mean_target > 0, 0.0, above.clamp(min=0))

    def conjugate(self, u: Tensor, y: Tensor) -> Tensor:
        s = u + y
        # s - u is y in exact arithmetic, so the sum of s is 1 wherever u comes from a gradient; allow its rounding.
        inside = (s >= -1e-15).all(1) & ((s.sum(1) - 1).abs() <= 1e-10)
        s = s.clamp(min=0)
        return torch.where(inside, torch.xlogy(s, s).sum(1), math.inf)

    def expression(self, pred: Any, y: Any, weight: Any) -> Any:
        import cvxpy as cp

        return weight @ (cp.log_sum_exp(pred, axis=1) - cp.sum(cp.multiply(y, pred), axis=1))


def _softmax(pred: Tensor) -> Tensor:
    """Probabilities of the outputs, shape ``(N, c)``; of few classes in a tenth of the time of ``torch.softmax``."""
    exponential = (pred - pred.amax(1, keepdim=True)).exp_()
    return exponential / exponential.sum(1, keepdim=True)

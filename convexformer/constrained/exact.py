"""The convex case of descent-constrained training, solved exactly: one readout on the fixed outputs of layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from convexformer.validation import as_tensor, check_finite, check_positive
from convexformer_solvers import Loss, get_loss
from convexformer_solvers.validation import check_kind

from .constraints import DescentConstraints


@dataclass(frozen=True, eq=False)
class ExactReadout:
    r"""The optimal readout under descent constraints, with a certificate.

    Attributes
    ----------
    weight : ndarray of shape (d, c)
        The readout ``W``.
    duals : ndarray of shape (n_layers,)
        Multipliers of the constraints, non-negative.
    losses : ndarray of shape (n_layers,)
        Mean losses of the layers under the readout.
    constraints : ndarray of shape (n_layers,)
        Values of the constraints, positive where one is violated by the accuracy of the solver.
    objective : float
        Loss of the last layer plus decay.
    bound : float
        Lower bound of the objective of every feasible readout, computed in float64 from ``duals`` alone: the Lagrangian
        is strongly convex in ``W``, so that its least value is at most :math:`|\nabla|^2 / (2 \mu)` below it, with a
        smaller :math:`\mu` where constraints are convex up to rounding alone; minus infinity where none is positive.

    Examples
    --------
    >>> first = np.random.default_rng(0).normal(size=(50, 3))
    >>> features, y = np.stack([first, 2 * first]), first @ [1.0, -1.0, 0.5]
    >>> readout = exact_readout(features, y, DescentConstraints(alpha=0.1, c_ref=0.2), decay=0.1)
    >>> readout.weight.shape, bool((readout.constraints <= 1e-6).all()), readout.gap < 1e-6
    ((3, 1), True, True)
    >>> (readout.duals > 1e-3).tolist(), (readout.losses <= 0.2 + 1e-6).tolist()  # the first constraint binds
    ([True, False], [True, True])
    """

    weight: NDArray[np.float64] = field(repr=False)
    duals: NDArray[np.float64]
    losses: NDArray[np.float64]
    constraints: NDArray[np.float64]
    objective: float
    bound: float

    @property
    def gap(self) -> float:
        """``objective - bound``: the readout is at most so far from the optimum, except for violated constraints."""
        return self.objective - self.bound


def exact_readout(
    features: ArrayLike | Tensor,
    y: ArrayLike | Tensor,
    constraints: DescentConstraints,
    *,
    decay: float,
    reference: ArrayLike | Tensor | None = None,
    loss: str | Loss = "squared",
) -> ExactReadout:
    r"""Solve for one linear readout of all layers, the layers being fixed.

    .. math:: \min_W \; \ell_L(W) + \tfrac \mu 2 |W|_F^2 \quad \text{subject to} \quad
              \ell_1(W) \le c_{\mathrm{ref}}, \;\; \ell_l(W) \le (1 - \alpha) r_{l-1}

    with the mean loss :math:`\ell_l` of :math:`F_l W`. With given ``reference`` losses ``r`` this is convex for every
    convex loss: it is what training with ``stop_gradient=True`` settles at, where ``r`` are the losses there. Without,
    :math:`r_{l-1} = \ell_{l-1}(W)`, a difference of convex functions, which is convex for the squared loss where each
    :math:`F_l^\top F_l - (1 - \alpha) F_{l-1}^\top F_{l-1}` is positive semidefinite; else this is refused.

    Parameters
    ----------
    features : array-like of shape (n_layers, N, d)
        Outputs ``F`` of the layers. A bias is a column of ones.
    y : array-like of shape (N,) or (N, c)
        Targets as the loss takes them: numbers, -1 and 1, or one-hot rows.
    constraints : DescentConstraints
        ``alpha`` and ``c_ref``.
    decay : float
        ``mu``, positive.
    reference : array-like of shape (n_layers,), optional
        ``r``; the last is not used. Default: the losses of the readout itself.
    loss : str or Loss, default="squared"
        Half the squared distance by default.

    Returns
    -------
    ExactReadout

    Raises
    ------
    TypeError
        If ``constraints`` are of another kind.
    ValueError
        If an argument is not as described, the problem is not convex, or no readout is feasible.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> first = rng.normal(size=(50, 3))
    >>> features = np.stack([first, 2 * first])
    >>> y = first @ [1.0, -1.0, 0.5]
    >>> loose = exact_readout(features, y, DescentConstraints(alpha=0.1, c_ref=10.0), decay=0.1)
    >>> tight = exact_readout(features, y, DescentConstraints(alpha=0.1, c_ref=0.2), decay=0.1)
    >>> bool(loose.duals[0] < 1e-6), bool(tight.duals[0] > 0.1), tight.gap < 1e-6
    (True, True, True)
    """
    layers = as_tensor(features, dtype=torch.float64, name="features").numpy(force=True)
    targets = as_tensor(y, dtype=torch.float64, name="y").numpy(force=True)
    targets = targets[:, None] if targets.ndim == 1 else targets
    if layers.ndim != 3 or len(layers) < 2 or 0 in layers.shape:
        raise ValueError(
            f"features must have shape (n_layers, N, d) with two layers or more, a sample and a feature, got "
            f"{layers.shape}"
        )
    if len(targets) != layers.shape[1]:
        raise ValueError(f"y must have one row per sample, {layers.shape[1]}, got {len(targets)}")
    for name, values in (("features", layers), ("y", targets)):
        check_finite(name, torch.as_tensor(values))
    check_positive(decay=decay)
    check_kind("constraints", constraints, DescentConstraints, "DescentConstraints(c_ref=1.0)")
    problem = _Readout(layers, targets, constraints, decay, get_loss(loss), reference)
    problem.loss.check_target(torch.as_tensor(targets))
    weight, duals = problem.solve()
    return problem.certified(weight, duals)


@dataclass(eq=False, repr=False)
class _Readout:
    """The problem, for cvxpy and for the certificate."""

    layers: NDArray[np.float64]
    targets: NDArray[np.float64]
    constraints: DescentConstraints
    decay: float
    loss: Loss
    reference: Any

    def __post_init__(self) -> None:
        if self.reference is None:
            self._check_convex()
            return
        self.reference = as_tensor(self.reference, dtype=torch.float64, name="reference").detach().cpu()
        if self.reference.shape != (len(self.layers),):
            raise ValueError(f"reference must have shape ({len(self.layers)},), got {tuple(self.reference.shape)}")
        check_finite("reference", self.reference)

    def _check_convex(self) -> None:
        if not self.loss.quadratic:
            raise ValueError(
                f"reference must be given for loss={self.loss!r}: without it the constraints are differences of "
                "convex functions, which are known to be convex for the squared loss alone"
            )
        for number in range(1, len(self.layers)):
            least = np.linalg.eigvalsh(self._difference(number))
            if least[0] < -1e-10 * max(abs(least[0]), abs(least[-1])):
                raise ValueError(
                    f"features make no convex problem: the loss of layer {number + 1} less "
                    f"{1 - self.constraints.alpha:g} times that of layer {number} has curvature {least[0]:.3g}; give "
                    "reference losses"
                )

    def _difference(self, number: int) -> NDArray[np.float64]:
        """Hessian of the constraint of a layer, for one output of the squared loss."""
        here, before = self.layers[number], self.layers[number - 1]
        count = self.layers.shape[1]
        return (here.T @ here - (1 - self.constraints.alpha) * before.T @ before) / count

    def solve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Readout and multipliers by cvxpy."""
        import cvxpy as cp

        weight = cp.Variable((self.layers.shape[2], self.targets.shape[1]))
        losses = [self._mean_loss(features @ weight) for features in self.layers]
        bounds = [self._constraint(number, weight, losses) <= 0 for number in range(len(losses))]
        objective = losses[-1] + self.decay / 2 * cp.sum_squares(weight)
        problem = cp.Problem(cp.Minimize(objective), bounds)
        problem.solve(solver=cp.CLARABEL)
        if weight.value is None:
            raise ValueError(
                f"constraints cannot be met by any readout ({problem.status}): use a smaller alpha, a larger c_ref, or "
                "other features"
            )
        return weight.value, np.maximum([np.sum(bound.dual_value) for bound in bounds], 0)

    def _mean_loss(self, predictions: Any) -> Any:
        return self.loss.expression(predictions, self.targets, np.full(len(self.targets), 1 / len(self.targets)))

    def _constraint(self, number: int, weight: Any, losses: list[Any]) -> Any:
        """Value of a constraint as an expression that cvxpy knows to be convex."""
        import cvxpy as cp

        c = self.constraints
        if number == 0:
            return losses[0] - c.first_bound
        if self.reference is not None:
            return losses[number] - (1 - c.alpha) * float(self.reference[number - 1])
        here, before, count = self.layers[number], self.layers[number - 1], len(self.targets)
        linear = (here.T @ self.targets - (1 - c.alpha) * before.T @ self.targets) / count
        values, vectors = np.linalg.eigh(self._difference(number))
        root = vectors * np.sqrt(np.maximum(values, 0))
        constant = c.alpha * np.square(self.targets).sum() / (2 * count)
        return cp.sum_squares(root.T @ weight) / 2 - cp.sum(cp.multiply(linear, weight)) + constant

    def _values(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Losses of the layers, and values of the constraints."""
        targets = torch.as_tensor(self.targets)
        losses = torch.stack(
            [self.loss.value(torch.as_tensor(features) @ weight, targets).mean() for features in self.layers]
        )
        values = self.constraints.values(losses)
        if self.reference is not None:
            limits = (1 - self.constraints.alpha) * self.reference[:-1]
            values = torch.cat([values[:1], losses[1:] - limits])
        return losses, values

    def certified(self, weight: NDArray[np.float64], duals: NDArray[np.float64]) -> ExactReadout:
        """The readout with the bound that its multipliers prove."""
        variable = torch.tensor(weight, requires_grad=True)
        losses, values = self._values(variable)
        objective = losses[-1] + self.decay / 2 * variable.square().sum()
        lagrangian = objective + (torch.as_tensor(duals) * values).sum()
        (gradient,) = torch.autograd.grad(lagrangian, variable)
        modulus = self._modulus(duals)
        below = gradient.square().sum().item() / (2 * modulus) if modulus > 0 else np.inf
        numbers = objective.item(), lagrangian.item() - below
        return ExactReadout(weight, duals, losses.detach().numpy(), values.detach().numpy(), *numbers)

    def _modulus(self, duals: NDArray[np.float64]) -> float:
        """A modulus of strong convexity of the Lagrangian: the decay, less what constraints may curve downwards."""
        if self.reference is not None:
            return self.decay
        count, width = self.layers.shape[1:]
        squares = np.square(self.layers).sum((1, 2)) / count
        rounding = (count + width) * np.finfo(np.float64).eps * (squares[1:] + squares[:-1])
        least = [np.linalg.eigvalsh(self._difference(number))[0] for number in range(1, len(self.layers))]
        return self.decay + float(duals[1:] @ np.minimum(least - rounding, 0))

"""What constrained training leaves behind: its course, and whether the constraints hold."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convexformer_solvers.result import Interrupted
from convexformer_solvers.validation import check_tensor, warn_caller

from .constraints import DescentConstraints


class InfeasibleWarning(UserWarning):
    """The constraints do not hold at the end of training; the message says by how much and what to change.

    Examples
    --------
    Losses of at least 1 cannot come below 0.5:

    >>> import warnings
    >>> from convexformer.constrained import PrimalDual
    >>> model = torch.nn.ParameterList([torch.ones(1)])
    >>> trainer = PrimalDual(model, lambda model, batch: 1 + torch.stack([model[0] ** 2, model[0] ** 2]), c_ref=0.5)
    >>> with warnings.catch_warnings(action="error", category=InfeasibleWarning):
    ...     try:
    ...         history = trainer.fit([torch.zeros(1)], n_epochs=3)
    ...     except InfeasibleWarning as warning:
    ...         print(warning)
    the constraints do not hold: that of layer 1 is violated by ..., with alpha=0.1 and c_ref=0.5; train for more ...
    >>> trainer.feasible_
    False
    """


class NonFiniteLossError(ArithmeticError):
    """A loss became infinite or nan; the model has the weights chosen so far.

    Examples
    --------
    >>> from convexformer.constrained import PrimalDual
    >>> model = torch.nn.ParameterList([torch.ones(1)])
    >>> trainer = PrimalDual(model, lambda model, batch: model[0] * batch[0].expand(2, 1), c_ref=1.0)
    >>> try:
    ...     history = trainer.fit([torch.tensor([float("inf")])], n_epochs=3)
    ... except NonFiniteLossError as error:
    ...     print(error)
    the loss of layer 1 became infinite or nan in step 0; the model has the weights chosen so far. Try a smaller lr ...
    """


class ConstrainedTrainingInterrupted(Interrupted):
    """Raised on Ctrl-C during ``PrimalDual.fit``; a further ``fit`` goes on after the last finished epoch.

    Attributes
    ----------
    history : ConstrainedHistory
        Of the epochs that were finished.

    Examples
    --------
    Here a callback stands for Ctrl-C:

    >>> from convexformer.constrained import PrimalDual
    >>> def press_ctrl_c(trainer):
    ...     raise KeyboardInterrupt
    >>> model = torch.nn.ParameterList([torch.ones(1)])
    >>> trainer = PrimalDual(model, lambda model, batch: torch.stack([model[0] ** 2, model[0] ** 2 / 2]), c_ref=2.0)
    >>> try:
    ...     history = trainer.fit([torch.zeros(1)], n_epochs=3, callback=press_ctrl_c)
    ... except ConstrainedTrainingInterrupted as interrupt:
    ...     history = interrupt.history
    >>> len(history.losses), len(trainer.fit([torch.zeros(1)], n_epochs=3).losses)  # which goes on
    (1, 3)
    """

    def __init__(self, history: ConstrainedHistory) -> None:
        super().__init__(
            f"interrupted after {len(history.losses)} epochs; the model has the weights chosen so far, .history holds "
            "what led there, and a further fit goes on after the last finished epoch"
        )
        self.history = history


@dataclass
class ConstrainedHistory:
    """Course of constrained training, one entry for each epoch.

    Attributes
    ----------
    losses : list of list of float
        Mean training losses of the layers, over the batches of the epoch.
    constraints : list of list of float
        Values ``g`` of the constraints, likewise.
    duals, slacks, net_weights : list of list of float
        Multipliers, slacks of resilience, and factors of the losses in the Lagrangian, at the end of the epoch.
    validation : list of list of float
        Mean validation losses of the layers; empty without validation data.
    violations, standard_errors : list of list of float
        Values ``g`` less the slacks on the validation data, and their standard errors.
    feasible : list of bool
        Whether the constraints held on the validation data.
    seconds : list of float
        Wall time of the epochs' steps.

    Examples
    --------
    >>> ConstrainedHistory(losses=[[2.0, 1.0], [1.0, 0.5]])
    ConstrainedHistory(2 epochs, last training losses [1, 0.5])
    """

    losses: list[list[float]] = field(default_factory=list)
    constraints: list[list[float]] = field(default_factory=list)
    duals: list[list[float]] = field(default_factory=list)
    slacks: list[list[float]] = field(default_factory=list)
    net_weights: list[list[float]] = field(default_factory=list)
    validation: list[list[float]] = field(default_factory=list)
    violations: list[list[float]] = field(default_factory=list)
    standard_errors: list[list[float]] = field(default_factory=list)
    feasible: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __repr__(self) -> str:
        if not self.losses:
            return "ConstrainedHistory(no epochs)"
        last = ", ".join(f"{loss:.4g}" for loss in self.losses[-1])
        return f"ConstrainedHistory({len(self.losses)} epochs, last training losses [{last}])"

    def as_dict(self) -> dict[str, Any]:
        """All entries as lists, which JSON and checkpoints hold."""
        return {each.name: list(getattr(self, each.name)) for each in fields(self)}


@dataclass(frozen=True, eq=False)
class FeasibilityReport:
    r"""Whether the constraints hold on samples.

    Attributes
    ----------
    losses : ndarray of shape (n_layers,)
        Mean losses of the layers.
    violations : ndarray of shape (n_layers,)
        Values of the constraints less their slacks; a constraint holds where this is not positive.
    standard_errors : ndarray of shape (n_layers,)
        Of ``violations``, over samples.
    feasible : bool
        Whether no violation is larger than so many of its standard errors.
    mean_ratio, median_ratio, descending_share : float
        Of the ratios :math:`\ell_l / \ell_{l-1}` of single samples over layers: mean, median, and the share below 1.

    Examples
    --------
    >>> losses = torch.tensor([[1.0, 2.0, 3.0], [0.5, 1.0, 2.0]])
    >>> report = FeasibilityReport.of(losses, DescentConstraints(alpha=0.2, c_ref=3.0))
    >>> report.feasible, round(report.mean_ratio, 2), report.descending_share
    (True, 0.56, 1.0)
    """

    losses: NDArray[np.float64]
    violations: NDArray[np.float64]
    standard_errors: NDArray[np.float64]
    feasible: bool
    mean_ratio: float
    median_ratio: float
    descending_share: float

    @classmethod
    def of(
        cls,
        losses: Tensor,
        constraints: DescentConstraints,
        slacks: Tensor | None = None,
        n_errors: float = 1.0,
    ) -> FeasibilityReport:
        """The report of losses of samples.

        Parameters
        ----------
        losses : Tensor of shape (n_layers, n_samples)
            Losses of each layer and sample.
        constraints : DescentConstraints
            The constraints.
        slacks : Tensor of shape (n_layers,), optional
            By how much each may be violated. Default: 0.
        n_errors : float, default=1.0
            Standard errors by which the mean of a constraint that holds may lie above its slack.

        Returns
        -------
        FeasibilityReport

        Raises
        ------
        TypeError
            If `slacks` is no tensor.
        ValueError
            If `slacks` is of another shape, or there are not two layers or more.
        """
        if slacks is not None:
            check_tensor("slacks", slacks)
            if slacks.shape != losses.shape[:1]:
                raise ValueError(f"slacks must have shape ({len(losses)},), one a layer, got {tuple(slacks.shape)}")
        losses = losses.detach().double().cpu()
        values = constraints.values(losses)
        violations = values.mean(1) - (0 if slacks is None else slacks.detach().double().cpu())
        count = losses.shape[1]
        errors = values.std(1) / count**0.5 if count > 1 else torch.zeros(len(losses), dtype=torch.float64)
        before = losses[:-1]
        ratios = (losses[1:] / before)[before > 0]
        return cls(
            losses.mean(1).numpy(),
            violations.numpy(),
            errors.numpy(),
            bool((violations <= n_errors * errors).all()),
            float(ratios.mean()),
            float(np.median(ratios.numpy())) if len(ratios) else float("nan"),
            float((ratios < 1).double().mean()),
        )

    def __str__(self) -> str:
        rows = [
            f"layer {i}: loss {loss:.4g}, constraint {violation:+.3g} ± {error:.2g}"
            for i, (loss, violation, error) in enumerate(
                zip(self.losses, self.violations, self.standard_errors, strict=True), start=1
            )
        ]
        return "\n".join(["feasible" if self.feasible else "infeasible", *rows])


def warn_infeasible(report: FeasibilityReport, constraints: DescentConstraints, n_errors: float) -> None:
    """Warn that the constraints do not hold, and name one that does not."""
    layer = int(np.argmax(report.violations - n_errors * report.standard_errors))
    warn_caller(
        f"the constraints do not hold: that of layer {layer + 1} is violated by {report.violations[layer]:.3g} "
        f"(standard error {report.standard_errors[layer]:.2g}), with alpha={constraints.alpha} and "
        f"c_ref={constraints.c_ref}; train for more epochs, ask for less by a smaller alpha or a larger c_ref, or "
        "allow slacks by resilience",
        InfeasibleWarning,
    )

"""Primal-dual training under descent constraints ([K] Algorithm 1)."""

from __future__ import annotations

import copy
import math
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from convexformer.nn.modules.base import seeded
from convexformer.validation import check_flag, check_positive, is_integer
from convexformer_solvers.io.npz import replacing
from convexformer_solvers.validation import check_callback, check_counts, is_real

from .constraints import DescentConstraints
from .data import Data, Samples, as_dataset, batch_of, batches
from .reports import (
    ConstrainedHistory,
    ConstrainedTrainingInterrupted,
    FeasibilityReport,
    InfeasibleWarning,
    NonFiniteLossError,
)

LayerLosses = Callable[[nn.Module, Any], Tensor]

_OPTIMIZERS: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
_CHOICES = {
    "objective": ("constrained", "last", "sum"),
    "slack_update": ("decay", "explicit"),
    "dual_optimizer": ("adam", "sgd"),
    "dual_update": ("step", "epoch"),
    "optimizer": tuple(_OPTIMIZERS),
}


class _Best(NamedTuple):
    """The best weights so far, by validation: their worth, of which less is better, and the slacks of their epoch."""

    infeasible: bool
    loss: float
    model: dict[str, Tensor]
    slacks: Tensor


class PrimalDual:
    r"""Train a network of layers so that each of them must lower the loss.

    .. math:: \min_\theta \; \ell_L \quad \text{subject to} \quad \ell_1 \le c_{\mathrm{ref}}, \;\;
              \ell_l \le (1 - \alpha) \ell_{l-1}, \; l = 2, \dots, L

    for the mean losses of the layers' outputs ([K] problem P). Weights descend the Lagrangian
    :math:`\ell_L + \sum_l \lambda_l g_l`, multipliers ascend it and stay non-negative. With **resilience** ``b`` each
    constraint may be violated by a slack at a price: :math:`g_l \le u_l` at the cost :math:`\tfrac b2 |u|^2`, of which
    :math:`u = \lambda / b` is the best.

    Nothing here is convex or certified; ``convexformer.constrained.exact_readout`` solves the convex case exactly.

    Parameters
    ----------
    model : Module
        Any torch module.
    layer_losses : callable
        ``layer_losses(model, batch)`` returns the losses of every layer and sample, a tensor of shape
        ``(n_layers, n_samples_of_batch)`` with gradients. A batch is a tuple of tensors, or what a ``Dataset`` collates
        to. Random numbers that it draws from torch's global generator are the same in every run of the same seed.
    alpha : float, default=0.1
        Share by which each layer must lower the loss.
    c_ref : float
        Loss that the first layer must come below.
    objective : {"constrained", "last", "sum"}, default="constrained"
        What the weights minimise: the Lagrangian; the loss of the last layer alone, as usual; or the sum of the losses
        of all layers (deep supervision). The latter two have no multipliers and are the rivals of the first.
    resilience : float, optional
        Price ``b`` of slacks, positive; the smaller, the more violation is allowed. Default: none, hard constraints.
    slack_update : {"decay", "explicit"}, default="decay"
        With resilience: slacks at their best value, which makes the ascent :math:`g - \lambda / b`; or slacks that
        descend :math:`\tfrac b2 |u|^2 - \lambda^\top u` by steps of `dual_lr` themselves. The fixed point is the same.
    reset_slacks : bool, default=False
        Whether explicit slacks begin each epoch at zero, as [K] has it for video.
    dual_lr : float, default=1e-2
        Step of the multipliers.
    dual_optimizer : {"adam", "sgd"}, default="adam"
        Of the multipliers; the decay of resilience is part of the gradient.
    dual_update : {"step", "epoch"}, default="step"
        When multipliers move: after each batch by its constraints, or after each epoch by their mean over it.
    warmup_epochs : int, default=1
        Epochs at first in which the multipliers stay at zero.
    stop_gradient : bool, default=False
        Whether the loss that a layer is compared with counts as a number. Otherwise the net weight of a layer's loss
        may be negative and training then raises that loss; ``history.net_weights`` tells.
    first_factor : bool, default=False
        Whether the bound of the first layer is ``(1 - alpha) * c_ref``.
    optimizer : {"adam", "adamw", "sgd"}, default="adam"
        Of the weights.
    lr, weight_decay : float, default=1e-3 and 0.0
        Its learning rate and decay.
    batch_size : int, default=32
        Samples of a batch; the last of an epoch may have fewer.
    n_errors : float, default=1.0
        Standard errors by which the mean of a constraint may lie above zero on validation data and still count as
        feasible.
    seed : int, default=0
        Of the order of the samples and of random numbers in the steps.

    Attributes
    ----------
    duals_, slacks_ : Tensor of shape (n_layers,)
        Multipliers and slacks.
    history_ : ConstrainedHistory
        Course of training.
    report_ : FeasibilityReport
        Of the weights that the model ended with, on the validation data or else the training data.
    feasible_ : bool
        Whether the constraints hold there.

    Raises
    ------
    TypeError
        If the model is no module or ``layer_losses`` cannot be called.
    ValueError
        If an argument is not as described; the message names it.

    Examples
    --------
    >>> model = nn.ParameterList([nn.Parameter(torch.zeros(1))])
    >>> def layer_losses(model, batch):  # x^2 must come below 1; the loss of the second layer is (x - 2)^2 / 4
    ...     (x,) = model
    ...     return torch.stack([x**2, (x - 2) ** 2 / 4])
    >>> plain = {"optimizer": "sgd", "lr": 0.1, "dual_optimizer": "sgd", "dual_lr": 0.1}
    >>> trainer = PrimalDual(model, layer_losses, c_ref=1.0, **plain)
    >>> history = trainer.fit([torch.zeros(1)], n_epochs=400)
    >>> round(model[0].item(), 2), round(trainer.duals_[0].item(), 2), trainer.feasible_
    (1.0, 0.25, True)
    """

    def __init__(
        self,
        model: nn.Module,
        layer_losses: LayerLosses,
        *,
        alpha: float = 0.1,
        c_ref: float,
        objective: Literal["constrained", "last", "sum"] = "constrained",
        resilience: float | None = None,
        slack_update: Literal["decay", "explicit"] = "decay",
        reset_slacks: bool = False,
        dual_lr: float = 1e-2,
        dual_optimizer: Literal["adam", "sgd"] = "adam",
        dual_update: Literal["step", "epoch"] = "step",
        warmup_epochs: int = 1,
        stop_gradient: bool = False,
        first_factor: bool = False,
        optimizer: Literal["adam", "adamw", "sgd"] = "adam",
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        batch_size: int = 32,
        n_errors: float = 1.0,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch Module, got {type(model).__name__}")
        if not callable(layer_losses):
            raise TypeError(f"layer_losses must be a function of a model and a batch, got {layer_losses!r}")
        self.model, self.layer_losses = model, layer_losses
        self.constraints = DescentConstraints(alpha=alpha, c_ref=c_ref, first_factor=first_factor)
        self.objective, self.resilience, self.slack_update = objective, resilience, slack_update
        self.reset_slacks = check_flag(reset_slacks, "reset_slacks")
        self.stop_gradient = check_flag(stop_gradient, "stop_gradient")
        self.dual_lr, self.dual_optimizer, self.dual_update = dual_lr, dual_optimizer, dual_update
        self.warmup_epochs, self.batch_size, self.n_errors, self.seed = warmup_epochs, batch_size, n_errors, seed
        self._options: dict[str, Any] = {
            "alpha": alpha,
            "c_ref": c_ref,
            "first_factor": self.constraints.first_factor,
            "objective": objective,
            "slack_update": slack_update,
            "dual_optimizer": dual_optimizer,
            "dual_update": dual_update,
            "optimizer": optimizer,
            "resilience": resilience,
            "reset_slacks": self.reset_slacks,
            "dual_lr": dual_lr,
            "warmup_epochs": warmup_epochs,
            "stop_gradient": self.stop_gradient,
            "lr": lr,
            "weight_decay": weight_decay,
            "batch_size": batch_size,
            "seed": seed,
        }
        _check_options(**self._options, n_errors=n_errors)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        self._weights = _OPTIMIZERS[optimizer](trained, lr=lr, weight_decay=weight_decay)
        self.history_ = ConstrainedHistory()
        self._step = 0
        self._duals: nn.Parameter | None = None  # made when the first losses say how many layers there are
        self._best: _Best | None = None
        self._snapshot: dict[str, Any] | None = None

    @property
    def duals_(self) -> Tensor:
        """Multipliers, of shape ``(n_layers,)``."""
        return self._dual_state()[0].detach().clone()

    @property
    def slacks_(self) -> Tensor:
        """Slacks of resilience, of shape ``(n_layers,)``; zero without."""
        duals, slacks = self._dual_state()
        if self.resilience is not None and self.slack_update == "decay":
            return duals.detach() / self.resilience
        return slacks.clone()

    def _dual_state(self) -> tuple[Tensor, Tensor]:
        if self._duals is None:
            raise AttributeError("there are no multipliers before the first step of fit")
        return self._duals, self._slacks

    # Training

    def fit(
        self,
        data: Data,
        *,
        n_epochs: int,
        validation: Data | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        callback: Callable[[PrimalDual], bool | None] | None = None,
        verbose: bool = False,
    ) -> ConstrainedHistory:
        r"""Train up to a number of epochs, those of earlier calls and of the checkpoint included.

        With validation data the model ends with the weights, at the end of an epoch, of least loss of the last layer
        among those that were feasible; where none was, of least total violation. With resilience it ends with those of
        the least :math:`\ell_L + \tfrac b2 |\max(g, 0)|^2`. Without validation data it ends with the last ones.

        Parameters
        ----------
        data : sequence of Tensor, or Dataset
            Training samples: tensors with samples along the first axis, or a map-style dataset.
        n_epochs : int
            Epochs in all.
        validation : sequence of Tensor, or Dataset, optional
            Held-out samples, on which feasibility is judged.
        checkpoint : path-like, optional
            File to which the whole state goes after each epoch, and from which it comes first where it exists. A run
            that was broken off and goes on gives, on the CPU, bit for bit what it would have given without the break.
        callback : callable, optional
            Called with the trainer after each epoch; returning True ends training.
        verbose : bool, default=False
            Whether to show a progress bar over epochs.

        Returns
        -------
        ConstrainedHistory

        Raises
        ------
        ValueError
            If an argument is not as described, losses are not of shape ``(n_layers, n_samples)`` with two layers or
            more, their number changes, or the checkpoint is one of other options.
        NonFiniteLossError
            If a training loss is infinite or nan. The model has the weights chosen so far, and a further ``fit`` goes
            on after the last finished epoch.
        ConstrainedTrainingInterrupted
            On Ctrl-C; a ``KeyboardInterrupt``. After a finished epoch the model has the weights chosen so far, and
            ``report_`` is of them.

        Warns
        -----
        InfeasibleWarning
            If the constraints do not hold at the end.
        """
        check_counts(n_epochs=n_epochs)
        check_callback(callback, "a PrimalDual")
        verbose = check_flag(verbose, "verbose")
        training = as_dataset(data, "data")
        held_out = None if validation is None else as_dataset(validation, "validation")
        judged = training if held_out is None else held_out
        path = None if checkpoint is None else Path(checkpoint)
        if path is not None and path.exists():
            self.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
        elif self._snapshot is not None:
            self.load_state_dict(self._snapshot)
        else:
            self._snapshot = self.state_dict()
        try:
            with tqdm(total=n_epochs, initial=len(self.history_.losses), disable=not verbose, unit="epoch") as bar:
                while len(self.history_.losses) < n_epochs:
                    self._run_epoch(training, held_out)
                    self._snapshot = self.state_dict()
                    if path is not None:
                        with replacing(path) as partial:
                            torch.save(self._snapshot, partial)
                    bar.set_postfix(loss=f"{self.history_.losses[-1][-1]:.3e}", refresh=False)
                    bar.update()
                    if callback is not None and callback(self):
                        break
        except KeyboardInterrupt as interruption:
            self._restore()
            if self.history_.losses:
                self._judge(judged)
            raise ConstrainedTrainingInterrupted(self.history_) from interruption
        except NonFiniteLossError:
            self._restore()
            raise
        self._load_best()
        self._judge(judged)
        self._warn_where_infeasible()
        return self.history_

    def _run_epoch(self, training: Samples, held_out: Samples | None) -> None:
        """All batches of an epoch, its record, and its weights where they are the best so far."""
        epoch = len(self.history_.losses)
        if self.reset_slacks and self._duals is not None:
            self._slacks.zero_()
        sums: Tensor | None = None
        began = time.perf_counter()
        count = len(training)
        for index in batches(count, self.batch_size, (self.seed, epoch)):
            losses = self._take_step(batch_of(training, index), ascends=epoch >= self.warmup_epochs)
            sums = len(index) * losses if sums is None else sums + len(index) * losses
        assert sums is not None
        mean = sums / count
        if self.dual_update == "epoch" and epoch >= self.warmup_epochs and self.objective == "constrained":
            self._ascend(self.constraints.values(mean))
        self._record(mean, time.perf_counter() - began)
        if held_out is not None:
            self._look(held_out)

    def _take_step(self, batch: Any, *, ascends: bool) -> Tensor:
        """A step of the weights and, where multipliers move with every batch, of these; the mean losses before it."""
        self.model.train()
        with seeded((self.seed << 32) + self._step):
            losses = self._checked_losses(batch).mean(1)
        self._weights.zero_grad()
        self._value(losses).backward()
        self._weights.step()
        self._step += 1
        losses = losses.detach()
        if ascends and self.dual_update == "step" and self.objective == "constrained":
            self._ascend(self.constraints.values(losses))
        return losses

    def _checked_losses(self, batch: Any) -> Tensor:
        """Losses of layers and samples, which must be finite."""
        losses = self.layer_losses(self.model, batch)
        if not torch.is_tensor(losses) or losses.ndim != 2 or len(losses) < 2:
            found = f"shape {tuple(losses.shape)}" if torch.is_tensor(losses) else type(losses).__name__
            raise ValueError(
                f"layer_losses must return a tensor of shape (n_layers, n_samples) with two layers or more, got {found}"
            )
        if self._duals is None:
            self._make_duals(len(losses), losses)
        if len(losses) != len(self._dual_state()[0]):
            raise ValueError(
                f"layer_losses must return the losses of {len(self._dual_state()[0])} layers as before, "
                f"got {len(losses)}"
            )
        if not bool(torch.isfinite(losses).all()):
            layer = int((~torch.isfinite(losses)).any(1).nonzero()[0]) + 1
            raise NonFiniteLossError(
                f"the loss of layer {layer} became infinite or nan in step {self._step}; the model has the weights "
                "chosen so far. Try a smaller lr or dual_lr, or stop_gradient=True"
            )
        return losses

    def _make_duals(self, n_layers: int, like: Tensor) -> None:
        self._duals = nn.Parameter(like.new_zeros(n_layers))
        self._slacks = like.new_zeros(n_layers)
        self._dual_steps = _OPTIMIZERS[self.dual_optimizer]([self._duals], lr=self.dual_lr, maximize=True)

    def _value(self, losses: Tensor) -> Tensor:
        """What the weights minimise."""
        if self.objective == "constrained":
            duals = self._dual_state()[0].detach()
            return self.constraints.lagrangian(losses, duals, stop_gradient=self.stop_gradient)
        return losses[-1] if self.objective == "last" else losses.sum()

    @torch.no_grad()
    def _ascend(self, values: Tensor) -> None:
        """Move multipliers, and explicit slacks, by the values of the constraints."""
        duals, slacks = self._dual_state()
        gradient = values.detach() - slacks
        if self.resilience is not None and self.slack_update == "decay":
            gradient = gradient - duals / self.resilience
        elif self.resilience is not None:
            slacks.sub_(self.dual_lr * (self.resilience * slacks - duals)).clamp_(min=0)
        duals.grad = gradient
        self._dual_steps.step()
        duals.clamp_(min=0)

    # Records and choice

    def _record(self, losses: Tensor, seconds: float) -> None:
        history = self.history_
        history.constraints.append(self.constraints.values(losses).tolist())
        history.duals.append(self.duals_.tolist())
        history.slacks.append(self.slacks_.tolist())
        history.net_weights.append(self._net_weights().tolist())
        history.seconds.append(seconds)
        history.losses.append(losses.tolist())

    def _net_weights(self) -> Tensor:
        """Factors of the losses in what the weights minimise."""
        if self.objective == "sum":
            return torch.ones_like(self.duals_)
        return self.constraints.net_weights(self.duals_, stop_gradient=self.stop_gradient)

    def _look(self, held_out: Samples) -> None:
        """Judge the weights on held-out samples and keep them where they are the best so far."""
        report = self.evaluate(held_out)
        history = self.history_
        history.validation.append(report.losses.tolist())
        history.violations.append(report.violations.tolist())
        history.standard_errors.append(report.standard_errors.tolist())
        history.feasible.append(report.feasible)
        infeasible, loss = self._worth(report)
        if self._best is None or (infeasible, loss) < (self._best.infeasible, self._best.loss):
            self._best = _Best(infeasible, loss, copy.deepcopy(self.model.state_dict()), self.slacks_)

    def _worth(self, report: FeasibilityReport) -> tuple[bool, float]:
        """What weights are chosen by, less being better: those that are infeasible come last."""
        infeasible, value = False, float(report.losses[-1])
        if self.objective == "constrained" and self.resilience is not None:
            excess = np.maximum(report.violations + self.slacks_.double().cpu().numpy(), 0)
            value += self.resilience / 2 * float(np.square(excess).sum())
        elif self.objective == "constrained" and not report.feasible:
            infeasible, value = True, float(np.maximum(report.violations, 0).sum())
        return infeasible, value if math.isfinite(value) else math.inf

    @torch.no_grad()
    def layer_losses_of(self, data: Data) -> Tensor:
        """Losses of every layer and sample, in evaluation mode.

        Parameters
        ----------
        data : sequence of Tensor, or Dataset
            The samples.

        Returns
        -------
        Tensor of shape (n_layers, n_samples)
            On the CPU.
        """
        dataset = as_dataset(data, "data")
        training = self.model.training
        self.model.eval()
        try:
            with seeded(self.seed):
                parts = [
                    self.layer_losses(self.model, batch_of(dataset, index)).cpu()
                    for index in torch.arange(len(dataset)).split(self.batch_size)
                ]
        finally:
            self.model.train(training)
        return torch.cat(parts, 1)

    def evaluate(self, data: Data, slacks: Tensor | None = None) -> FeasibilityReport:
        """Whether the constraints hold on samples, in evaluation mode.

        Parameters
        ----------
        data : sequence of Tensor, or Dataset
            The samples.
        slacks : Tensor of shape (n_layers,), optional
            By how much each constraint may be violated. Default: the slacks of now.

        Returns
        -------
        FeasibilityReport
        """
        if slacks is None and self._duals is not None:
            slacks = self.slacks_
        return FeasibilityReport.of(self.layer_losses_of(data), self.constraints, slacks, self.n_errors)

    def _judge(self, data: Samples) -> None:
        """Report on the weights that the model ended with, under the slacks of their epoch."""
        self.report_ = self.evaluate(data, None if self._best is None else self._best.slacks)
        self.feasible_ = self.report_.feasible

    def _warn_where_infeasible(self) -> None:
        if self.objective == "constrained" and not self.feasible_:
            layer = int(np.argmax(self.report_.violations))
            warnings.warn(
                f"the constraints do not hold: that of layer {layer + 1} is violated by "
                f"{self.report_.violations[layer]:.3g} (standard error {self.report_.standard_errors[layer]:.2g}), "
                f"with alpha={self.constraints.alpha} and c_ref={self.constraints.c_ref}; train for more epochs, ask "
                "for less by a smaller alpha or a larger c_ref, or allow slacks by resilience",
                InfeasibleWarning,
                stacklevel=3,
            )

    def _load_best(self) -> None:
        if self._best is not None:
            self.model.load_state_dict(self._best.model)

    def _restore(self) -> None:
        """Go back to the last finished epoch, and give the model the weights chosen so far."""
        assert self._snapshot is not None
        self.load_state_dict(self._snapshot)
        self._load_best()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Everything that training goes on from, as ``torch.load(..., weights_only=True)`` reads it.

        Returns
        -------
        dict
            Copies: later steps do not change it.
        """
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "weights": self._weights.state_dict(),
            "step": self._step,
            "duals": None,
            "options": self._options,
            "best": None if self._best is None else self._best._asdict(),
        }
        if self._duals is not None:
            state["duals"] = {
                "duals": self._duals.detach(),
                "slacks": self._slacks,
                "optimizer": self._dual_steps.state_dict(),
            }
        return copy.deepcopy(state) | {"history": self.history_.as_dict()}  # entries of the past are never changed

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of a trainer of the same model and options.

        Parameters
        ----------
        state : dict
            What ``state_dict`` returned.

        Raises
        ------
        ValueError
            If it is that of a trainer of other options; the message names the first that differs.
        """
        for name, value in self._options.items():
            if state["options"].get(name) != value:
                raise ValueError(
                    f"the state is of a trainer with {name}={state['options'].get(name)!r}, not {value!r}; give "
                    "another checkpoint, or the same options"
                )
        self.history_ = ConstrainedHistory(**{name: list(entries) for name, entries in state["history"].items()})
        state = copy.deepcopy({name: part for name, part in state.items() if name != "history"})
        self.model.load_state_dict(state["model"])
        self._weights.load_state_dict(state["weights"])
        self._step = state["step"]
        self._best = None if state["best"] is None else _Best(**state["best"])
        self._duals = None
        if state["duals"] is not None:
            duals = state["duals"]["duals"]
            self._make_duals(len(duals), duals.to(next(self.model.parameters()).device))
            with torch.no_grad():
                self._dual_state()[0].copy_(duals)
            self._slacks = state["duals"]["slacks"].to(self._dual_state()[0].device)
            self._dual_steps.load_state_dict(state["duals"]["optimizer"])


def _check_options(**options: Any) -> None:
    """Raise ``ValueError`` naming the first option that is not as described; constraints check their own."""
    for name, known in _CHOICES.items():
        if options[name] not in known:
            raise ValueError(f"{name} must be one of {known}, got {options[name]!r}")
    check_positive(dual_lr=options["dual_lr"], lr=options["lr"])
    for name in ("weight_decay", "n_errors"):
        if not (is_real(options[name]) and 0 <= options[name] < math.inf):
            raise ValueError(f"{name} must be a finite number from 0, got {options[name]!r}")
    resilience, seed = options["resilience"], options["seed"]
    if resilience is not None and not (is_real(resilience) and 0 < resilience < math.inf):
        raise ValueError(f"resilience must be a positive finite number or None, got {resilience!r}")
    if options["reset_slacks"] and (resilience is None or options["slack_update"] != "explicit"):
        raise ValueError("reset_slacks must be False without resilience and slack_update='explicit', got True")
    if not is_integer(options["warmup_epochs"], 0):
        raise ValueError(f"warmup_epochs must be an integer from 0, got {options['warmup_epochs']!r}")
    if not is_integer(seed, 0) or seed >= 2**31:
        raise ValueError(f"seed must be an integer from 0 and below 2**31, got {seed!r}")
    check_counts(batch_size=options["batch_size"])

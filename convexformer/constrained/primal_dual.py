"""Primal-dual training under descent constraints ([K] Algorithm 1)."""

from __future__ import annotations

import copy
import os
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from convexformer.nn.modules.base import check_not_half, seeded
from convexformer.validation import check_flag
from convexformer_solvers.io.npz import replacing
from convexformer_solvers.validation import check_callback, check_counts, says_stop

from .constraints import DescentConstraints
from .data import Data, LayerLosses, Samples, as_dataset, batch_of, batches, check_layer_losses
from .multipliers import Multipliers
from .options import OPTIMIZERS, check_options
from .reports import (
    ConstrainedHistory,
    ConstrainedTrainingInterrupted,
    FeasibilityReport,
    NonFiniteLossError,
    warn_infeasible,
)
from .selection import BestEpoch, rank


@dataclass(eq=False, repr=False)
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
        Any torch module; in float16 only with both optimisers "sgd".
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
        of all layers (deep supervision). The latter two have no multipliers and are baselines.
    resilience : float, optional
        Price ``b`` of slacks, positive; the smaller, the more violation is allowed. Default: none, hard constraints.
    slack_update : {"decay", "explicit"}, default="decay"
        With resilience: slacks at their best value, which makes the ascent :math:`g - \lambda / b`; or slacks that
        descend :math:`\tfrac b2 |u|^2 - \lambda^\top u` by steps of `dual_lr` themselves, for which
        ``b * dual_lr`` must be below 2. The fixed point is the same.
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
        feasible. Where the standard error is 0, as of a single sample, the constraint must hold exactly.
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

    model: nn.Module
    layer_losses: LayerLosses
    _: KW_ONLY
    alpha: float = 0.1
    c_ref: float
    objective: Literal["constrained", "last", "sum"] = "constrained"
    resilience: float | None = None
    slack_update: Literal["decay", "explicit"] = "decay"
    reset_slacks: bool = False
    dual_lr: float = 1e-2
    dual_optimizer: Literal["adam", "sgd"] = "adam"
    dual_update: Literal["step", "epoch"] = "step"
    warmup_epochs: int = 1
    stop_gradient: bool = False
    first_factor: bool = False
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    batch_size: int = 32
    n_errors: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"model must be a torch Module, got {type(self.model).__name__}")
        if not callable(self.layer_losses):
            raise TypeError(f"layer_losses must be a function of a model and a batch, got {self.layer_losses!r}")
        self.constraints = DescentConstraints(alpha=self.alpha, c_ref=self.c_ref, first_factor=self.first_factor)
        self.reset_slacks = check_flag(self.reset_slacks, "reset_slacks")
        self.stop_gradient = check_flag(self.stop_gradient, "stop_gradient")
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, np.generic):  # which neither Tensor.split nor a checkpoint takes
                setattr(self, each.name, value.item())
        options = {each.name: getattr(self, each.name) for each in fields(self) if each.kw_only}
        check_options(**options)
        self._options = {name: value for name, value in options.items() if name != "n_errors"}  # those of a state
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        if not trained:
            raise ValueError(
                "model must have weights to train, but has none or all are frozen by requires_grad_(False)"
            )
        if {self.optimizer, self.dual_optimizer} != {"sgd"}:
            check_not_half("model", trained)
        self._weights = OPTIMIZERS[self.optimizer](trained, lr=self.lr, weight_decay=self.weight_decay)
        self.history_ = ConstrainedHistory()
        self._step = 0
        self._multipliers: Multipliers | None = None  # made when the first losses say how many layers there are
        self._best: BestEpoch | None = None
        self._snapshot: dict[str, Any] | None = None

    @property
    def duals_(self) -> Tensor:
        """Multipliers, of shape ``(n_layers,)``."""
        return self._known_multipliers().values.detach().clone()

    @property
    def slacks_(self) -> Tensor:
        """Slacks of resilience, of shape ``(n_layers,)``; zero without."""
        return self._known_multipliers().slacks

    def _known_multipliers(self) -> Multipliers:
        if self._multipliers is None:
            raise AttributeError("there are no multipliers before the first step of fit")
        return self._multipliers

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

        A further call goes on from the weights, multipliers and optimisers of the last finished epoch, also where the
        weights of the model were changed since. A new ``PrimalDual`` starts from the weights that the model has.

        With validation data the model ends with the weights, at the end of an epoch, of least loss of the last layer
        among those that were feasible; where none was, of least total violation. With resilience it ends with those of
        the least :math:`\ell_L + \tfrac b2 |\max(g, 0)|^2`, feasible or not. The objectives ``"last"`` and ``"sum"``
        take those of least :math:`\ell_L`. Without validation data it ends with the last ones.

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
            The data are not part of it: give the same.
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
            more, their number changes, or the checkpoint is one of other options or none.
        FileNotFoundError
            If the folder of the checkpoint is not there.
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
        self._resume(path)
        done = len(self.history_.losses)
        with self._restoring(judged), tqdm(total=n_epochs, initial=done, disable=not verbose, unit="epoch") as bar:
            while len(self.history_.losses) < n_epochs:
                self._run_epoch(training, held_out)
                self._save(path)
                bar.set_postfix(loss=f"{self.history_.losses[-1][-1]:.3e}", refresh=False)
                bar.update()
                if says_stop(callback, self):
                    break
        self._load_best()
        self._judge(judged)
        if self.objective == "constrained" and not self.feasible_:
            warn_infeasible(self.report_, self.constraints, self.n_errors)
        return self.history_

    def _run_epoch(self, training: Samples, held_out: Samples | None) -> None:
        """All batches of an epoch, its record, and its weights where they are the best so far."""
        epoch = len(self.history_.losses)
        ascent = self.dual_update if self.objective == "constrained" and epoch >= self.warmup_epochs else None
        began = time.perf_counter()
        if self.reset_slacks and self._multipliers is not None:
            self._multipliers.reset_slacks()
        total: Any = 0
        for index in batches(len(training), self.batch_size, (self.seed, epoch)):
            losses = self._take_step(batch_of(training, index), len(index), ascends=ascent == "step")
            total = total + len(index) * losses
        mean = total / len(training)
        if ascent == "epoch":
            self._ascend(mean)
        self._record(mean, time.perf_counter() - began)
        if held_out is not None:
            self._validate(held_out)

    @torch.enable_grad()
    def _take_step(self, batch: Any, n_samples: int, *, ascends: bool) -> Tensor:
        """A step of the weights, and of the multipliers if these ascend; the mean losses of the layers before it."""
        self.model.train()
        # Torch's generator of the CPU reads 32 bits of a seed.
        with seeded(int(np.random.SeedSequence((self.seed, self._step)).generate_state(1)[0])):
            losses = self.layer_losses(self.model, batch)
        n_layers = None if self._multipliers is None else len(self._multipliers.values)
        check_layer_losses(losses, n_layers, n_samples, self._step)
        if not losses.requires_grad:
            raise ValueError(
                "layer_losses must return losses with gradients in the weights, got none; compute them by the model, "
                "without detach() and outside of torch.no_grad()"
            )
        if self._multipliers is None:
            self._multipliers = self._new_multipliers(losses)
        mean = losses.mean(1)
        self._weights.zero_grad()
        self._value(mean).backward()
        self._weights.step()
        self._step += 1
        if ascends:
            self._ascend(mean.detach())
        return mean.detach()

    def _new_multipliers(self, like: Tensor) -> Multipliers:
        return Multipliers(like, self.resilience, self.slack_update, self.dual_optimizer, self.dual_lr)

    def _value(self, losses: Tensor) -> Tensor:
        """What the weights minimise."""
        if self.objective == "constrained":
            return self.constraints.lagrangian(losses, self.duals_, stop_gradient=self.stop_gradient)
        return losses[-1] if self.objective == "last" else losses.sum()

    def _net_weights(self) -> Tensor:
        """Factors of the losses in what the weights minimise."""
        if self.objective == "sum":
            return torch.ones_like(self.duals_)
        return self.constraints.net_weights(self.duals_, stop_gradient=self.stop_gradient)

    def _ascend(self, losses: Tensor) -> None:
        """Move the multipliers by the constraints on mean losses."""
        self._known_multipliers().ascend(self.constraints.values(losses))

    # Records and choice

    def _record(self, losses: Tensor, seconds: float) -> None:
        history = self.history_
        history.constraints.append(self.constraints.values(losses).tolist())
        history.duals.append(self.duals_.tolist())
        history.slacks.append(self.slacks_.tolist())
        history.net_weights.append(self._net_weights().tolist())
        history.seconds.append(seconds)
        history.losses.append(losses.tolist())

    def _validate(self, held_out: Samples) -> None:
        """Judge the weights on held-out samples and keep them where they are the best so far."""
        report, history = self.evaluate(held_out), self.history_
        history.validation.append(report.losses.tolist())
        history.violations.append(report.violations.tolist())
        history.standard_errors.append(report.standard_errors.tolist())
        history.feasible.append(report.feasible)
        found = rank(report, self.slacks_, objective=self.objective, resilience=self.resilience)
        if self._best is None or found < self._best[:2]:
            self._best = BestEpoch(*found, copy.deepcopy(self.model.state_dict()), self.slacks_)

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
            By how much each constraint may be violated. Default: the current slacks.

        Returns
        -------
        FeasibilityReport

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described.
        """
        if slacks is None and self._multipliers is not None:
            slacks = self.slacks_
        return FeasibilityReport.of(self.layer_losses_of(data), self.constraints, slacks, self.n_errors)

    def _judge(self, data: Samples) -> None:
        """Report on the weights that the model ended with, under the slacks of their epoch."""
        self.report_ = self.evaluate(data, None if self._best is None else self._best.slacks)
        self.feasible_ = self.report_.feasible

    def _load_best(self) -> None:
        if self._best is not None:
            self.model.load_state_dict(self._best.model)

    # State and checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything that training goes on from, as ``torch.load(..., weights_only=True)`` reads it.

        Returns
        -------
        dict
            Copies: later steps do not change it.
        """
        state = {
            "model": self.model.state_dict(),
            "weights": self._weights.state_dict(),
            "step": self._step,
            "duals": None if self._multipliers is None else self._multipliers.state_dict(),
        }
        unchanging = {  # entries of the past, and the weights that were the best
            "options": dict(self._options),
            "best": None if self._best is None else self._best._asdict(),
            "history": self.history_.as_dict(),
        }
        return copy.deepcopy(state) | unchanging

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
        self._best = None if state["best"] is None else BestEpoch(**state["best"])
        self._multipliers = None
        if state["duals"] is not None:
            like = state["duals"]["duals"].to(next(self.model.parameters()).device)
            self._multipliers = self._new_multipliers(like)
            self._multipliers.load_state_dict(state["duals"])

    def _save(self, path: Path | None) -> None:
        """Keep the state of a finished epoch in memory and in the checkpoint."""
        self._snapshot = self.state_dict()
        if path is not None:
            with replacing(path) as partial:
                torch.save(self._snapshot, partial)

    def _resume(self, path: Path | None) -> None:
        """Start from the checkpoint where there is one, or else from the last finished epoch."""
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"checkpoint must be in a folder that exists, got {str(path)!r}")
        if path is not None and path.exists():
            state, before = _read_state(path), self.state_dict()
            try:
                self.load_state_dict(state)
            except Exception as error:  # of entries that are not there, or are of another model
                self.load_state_dict(before)
                raise ValueError(f"checkpoint={str(path)!r} cannot be continued: {error}") from error
        elif self._snapshot is not None:
            self.load_state_dict(self._snapshot)
        self._snapshot = self.state_dict()

    @contextmanager
    def _restoring(self, judged: Samples) -> Iterator[None]:
        """On Ctrl-C and an infinite loss: back to the last finished epoch, the model with the weights chosen so far."""
        try:
            yield
        except NonFiniteLossError:
            self._restore()
            raise
        except KeyboardInterrupt as interruption:
            self._restore()
            if self.history_.losses:
                self._judge(judged)
            raise ConstrainedTrainingInterrupted(self.history_) from interruption

    def _restore(self) -> None:
        assert self._snapshot is not None
        self.load_state_dict(self._snapshot)
        self._load_best()


def _read_state(path: Path) -> dict[str, Any]:
    """The state of a checkpoint."""
    state: Any = None
    with open(path, "rb") as file, suppress(Exception):  # zipfile and torch do not check what they read
        state = torch.load(_checked(file), weights_only=True, map_location="cpu")
    if not isinstance(state, dict) or "options" not in state:
        raise ValueError(
            f"checkpoint must be a file that fit wrote, and {str(path)!r} is none, or is damaged; give another name"
        )
    return state


def _checked(file: BinaryIO) -> BytesIO:
    """A copy of an archive, whose checksums zipfile compares and torch does not.

    ``testzip`` would not do: torch also reads headers beside each entry, which have no checksum and are written anew.
    """
    copied = BytesIO()
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(copied, "w") as checked:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:  # which torch does not write, and may be far larger
                raise ValueError(f"{entry.filename} is compressed")
            checked.writestr(entry.filename, archive.read(entry))
    copied.seek(0)
    return copied

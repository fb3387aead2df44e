"""One training run with one learning rate and one weight decay."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convexformer._integers import check_counts, check_optional_counts, is_integer
from convexformer._stopwatch import Stopwatch
from convexformer_solvers import Loss, Penalty
from convexformer_solvers.arguments import is_real

from .base import AttentionNetwork, sample_losses
from .history import End, TrainingHistory

OPTIMIZERS: dict[str, type[torch.optim.Adam] | type[torch.optim.AdamW]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, int], torch.optim.lr_scheduler.LRScheduler]] = {
    "cosine": torch.optim.lr_scheduler.CosineAnnealingLR,
    "constant": lambda optimizer, n_steps: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
}


@dataclass(frozen=True)
class Data:
    """Samples as ``forward`` takes them, targets, and weights of mean 1 where there are weights."""

    inputs: tuple[Tensor, ...]
    y: Tensor
    weight: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    def rows(self, index: Tensor) -> Data:
        """Some of the samples."""
        weight = None if self.weight is None else self.weight[index]
        return Data(tuple(part[index] for part in self.inputs), self.y[index], weight)

    def batches(self, size: int, seed: int) -> Iterator[Data]:
        """Endless minibatches of equal size; each pass over the samples is in a new order and drops the remainder."""
        generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device draws the same batches
        while True:
            order = torch.randperm(len(self), generator=generator)[: len(self) // size * size]
            yield from (self.rows(index.to(self.y.device)) for index in order.split(size))


@dataclass(frozen=True)
class Settings:
    """What all combinations of a search share; the arguments of ``train``."""

    loss: Loss
    penalty: Penalty | None
    alpha: float
    optimizer: str
    betas: tuple[float, float]
    schedule: str
    n_steps: int
    look_every: int | None
    batch_size: int | None
    patience: int | None
    seconds: float
    seed: int
    callback: Callable[[int, float], bool | None] | None

    def __post_init__(self) -> None:
        if not (is_real(self.alpha) and 0 <= self.alpha < math.inf):
            raise ValueError(f"alpha must be a number of at least 0, got {self.alpha!r}")
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {sorted(known)}, got {getattr(self, name)!r}")
        pair = np.asarray(self.betas)
        if pair.shape != (2,) or pair.dtype.kind not in "iuf" or not ((pair >= 0) & (pair < 1)).all():
            raise ValueError(f"betas must be two numbers of at least 0 and below 1, got {self.betas!r}")
        object.__setattr__(self, "betas", (float(pair[0]), float(pair[1])))
        check_counts(n_steps=self.n_steps)
        check_optional_counts(look_every=self.look_every, batch_size=self.batch_size, patience=self.patience)
        if not is_integer(self.seed):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        if not (is_real(self.seconds) and self.seconds > 0):
            raise ValueError(f"seconds must be positive or None, got {self.seconds!r}")
        if self.callback is not None and not callable(self.callback):
            raise TypeError(f"callback must be callable with the steps done and the objective, got {self.callback!r}")

    @property
    def interval(self) -> int:
        """Steps between evaluations; by default there are at most 100 of them and the last."""
        return math.ceil(self.n_steps / 100) if self.look_every is None else self.look_every


def weights_of(network: AttentionNetwork) -> list[Tensor]:
    """Copy of the parameters."""
    return [parameter.detach().clone() for parameter in network.parameters()]


@torch.no_grad()
def load_weights(network: AttentionNetwork, weights: list[Tensor]) -> None:
    """Put copied parameters back."""
    for parameter, values in zip(network.parameters(), weights, strict=True):
        parameter.copy_(values)


class Trial:
    """Training of a network from the weights that it has."""

    def __init__(
        self,
        network: AttentionNetwork,
        data: Data,
        held_out: Data | None,
        settings: Settings,
        lr: float,
        weight_decay: float,
        bar: Any,
    ) -> None:
        self.network, self.data, self.held_out, self.settings, self.bar = network, data, held_out, settings, bar
        kind = OPTIMIZERS[settings.optimizer]
        self.optimizer = kind(network.parameters(), lr=lr, betas=settings.betas, weight_decay=weight_decay)
        self.schedule = SCHEDULES[settings.schedule](self.optimizer, settings.n_steps)
        self.stopwatch = Stopwatch(data.y.device)
        self.history = TrainingHistory(lr=lr, weight_decay=weight_decay)
        self.best_weights, self.best_step, self.best_validation = weights_of(network), 0, math.inf
        self.looks_without_progress = 0

    def run(self) -> TrainingHistory:
        """Train; the network ends with the weights of ``kept_step``, also after Ctrl-C."""
        try:
            step, ended_by = self._take_steps()
            if ended_by != "diverged":
                self._record_last(step)
        except KeyboardInterrupt:
            finite = all(bool(torch.isfinite(parameter).all()) for parameter in self.network.parameters())
            self._settle(-1, diverged=not finite)
            raise
        self.history.ended_by = ended_by if math.isfinite(self.history.objective[-1]) else "diverged"
        self._settle(step, diverged=self.history.ended_by == "diverged")
        return self.history

    def _take_steps(self) -> tuple[int, End]:
        """Number of steps done and what ended them."""
        settings = self.settings
        full = settings.batch_size is None
        batches = itertools.repeat(self.data) if full else self.data.batches(settings.batch_size or 1, settings.seed)
        for step in range(settings.n_steps):
            if self.stopwatch.seconds >= settings.seconds:
                return step, "seconds"
            with self.stopwatch:
                self.optimizer.zero_grad()
                batch = next(batches)
                value = self._mean_loss(batch) + self._decay()
                objective = value.item()
            if not math.isfinite(objective):
                self._record(step, objective)
                return step, "diverged"
            reason = self._look(step, objective if full else None)
            if reason is not None:
                return step, reason
            with self.stopwatch:
                value.backward()
                self.optimizer.step()
                self.schedule.step()
            self.bar.update()
        return settings.n_steps, "n_steps"

    def _decay(self) -> Tensor:
        return self.settings.alpha * self.network.decay(self.settings.penalty)

    def _mean_loss(self, data: Data) -> Tensor:
        losses = sample_losses(self.network(*data.inputs), data.y, self.settings.loss)
        return losses.mean() if data.weight is None else (losses * data.weight).mean()

    @torch.no_grad()
    def _mean_loss_of_all(self, data: Data) -> Tensor:
        """Mean loss, taken over parts no larger than what a step takes."""
        at_once = self.settings.batch_size or len(self.data)
        if len(data) <= at_once:
            return self._mean_loss(data)
        parts = [data.rows(index) for index in torch.arange(len(data), device=data.y.device).split(at_once)]
        return torch.stack([self._mean_loss(part) * len(part) for part in parts]).sum() / len(data)

    @torch.no_grad()
    def _objective_of_all(self) -> float:
        return (self._mean_loss_of_all(self.data) + self._decay()).item()

    def _look(self, step: int, objective: float | None) -> End | None:
        """Record what is due before a step; what ends training, if anything does."""
        due = step % self.settings.interval == 0
        if objective is None and due:
            objective = self._objective_of_all()
        if objective is not None:
            self._record(step, objective)
            if self.settings.callback is not None and bool(self.settings.callback(step, objective)):
                return "callback"
        if due:
            self.bar.set_postfix(objective=f"{objective:.3e}", refresh=False)
            self._validate(step)
        patience = self.settings.patience
        return "patience" if patience is not None and self.looks_without_progress >= patience else None

    def _record(self, step: int, objective: float) -> None:
        self.history.steps.append(step)
        self.history.objective.append(objective)
        self.history.seconds.append(self.stopwatch.seconds)

    def _validate(self, step: int) -> None:
        """Record the loss on held-out data and remember the weights if it is the least so far."""
        if self.held_out is None:
            return
        value = self._mean_loss_of_all(self.held_out).item()
        self.history.validation_steps.append(step)
        self.history.validation.append(value)
        if self.settings.patience is None:
            return
        if value < self.best_validation:
            self.best_weights, self.best_step, self.best_validation = weights_of(self.network), step, value
            self.looks_without_progress = 0
        else:
            self.looks_without_progress += 1

    def _record_last(self, step: int) -> None:
        """Record the weights that training ended with, as far as that has not been done."""
        if step not in self.history.steps[-1:]:
            self._record(step, self._objective_of_all())
        if step not in self.history.validation_steps[-1:]:
            self._validate(step)

    def _settle(self, step: int, *, diverged: bool) -> None:
        """Load the weights to keep: the best by validation with patience, the initial ones after a divergence."""
        goes_back = diverged or self.settings.patience is not None
        if goes_back:
            load_weights(self.network, self.best_weights)
        self.history.kept_step = self.best_step if goes_back else step

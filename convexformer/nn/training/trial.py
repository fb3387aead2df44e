"""One training run with one learning rate and one weight decay."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from convexformer.nn.modules.base import AttentionNetwork, check_decay_weight, check_seed, sample_losses
from convexformer.nn.training.learning_rates import SCHEDULES
from convexformer.nn.training.stopwatch import Stopwatch
from convexformer.validation import check_one_of, check_optional_counts
from convexformer_solvers import Loss, Penalty
from convexformer_solvers.validation import check_callback, check_counts, is_real, says_stop

from .history import End, TrainingHistory

OPTIMIZERS: dict[str, type[torch.optim.Adam] | type[torch.optim.AdamW]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True)
class Data:
    """Samples as ``forward`` takes them, targets, and positive weights of mean 1 where there are weights."""

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
            order = torch.randperm(len(self), generator=generator, device=generator.device)[: len(self) // size * size]
            yield from (self.rows(index.to(self.y.device)) for index in order.split(int(size)))


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
        check_decay_weight(self.alpha)
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            check_one_of(sorted(known), **{name: getattr(self, name)})
        pair = np.asarray(self.betas)
        if pair.shape != (2,) or pair.dtype.kind not in "iuf" or not ((pair >= 0) & (pair < 1)).all():
            raise ValueError(f"betas must be two numbers of at least 0 and below 1, got {self.betas!r}")
        object.__setattr__(self, "betas", (float(pair[0]), float(pair[1])))
        check_counts(n_steps=self.n_steps)
        check_optional_counts(look_every=self.look_every, batch_size=self.batch_size, patience=self.patience)
        object.__setattr__(self, "seed", check_seed(self.seed))
        if not (is_real(self.seconds) and self.seconds > 0):
            raise ValueError(f"seconds must be positive or None, got {self.seconds!r}")
        check_callback(self.callback, "the steps done and the objective")


def weights_of(network: AttentionNetwork) -> list[Tensor]:
    """Copy of the parameters."""
    return [parameter.detach().clone() for parameter in network.parameters()]


@torch.no_grad()
def load_weights(network: AttentionNetwork, weights: list[Tensor]) -> None:
    """Put copied parameters back."""
    for parameter, values in zip(network.parameters(), weights, strict=True):
        parameter.copy_(values)


class Record(NamedTuple):
    """An entry of the course, taken down as one: Ctrl-C cannot leave a part of it."""

    step: int
    objective: float
    seconds: float


class Look(NamedTuple):
    """Weights of a step at which all that was due was recorded."""

    step: int
    weights: list[Tensor]
    validation: float = math.inf


@dataclass(eq=False, repr=False)
class Trial:
    """Training of a network from given weights."""

    network: AttentionNetwork
    data: Data
    held_out: Data | None
    settings: Settings
    start: list[Tensor]
    lr: float
    weight_decay: float
    bar: Any

    def __post_init__(self) -> None:
        settings, count = self.settings, len(self.data)
        # Samples of weight zero have been left out of the data.
        self.batch_size = count if settings.batch_size is None else min(settings.batch_size, count)
        # A look takes all samples: without minibatches as many as a step.
        self.look_every = settings.look_every or max(math.ceil(settings.n_steps / 100), count // self.batch_size)
        self.stopwatch = Stopwatch(self.data.y.device)
        self.step = 0
        self.records: list[Record] = []
        self.validations: list[tuple[int, float]] = []
        self.look = Look(0, self.start)  # the last one or, with patience, the best by validation
        self.looks_without_progress = 0
        self.kept: Look | None = None
        self.ended_by: End | None = None

    def run(self) -> None:
        """Train, and keep the weights that training is to end with."""
        load_weights(self.network, self.start)
        ended_by = self._take_steps()
        if ended_by != "diverged":
            self._record_last()
        self._end(ended_by)

    def break_off(self) -> None:
        """End after Ctrl-C, with the weights that there are or, after another one, with those of the last look."""
        if self.ended_by is not None:
            return
        try:
            if self.step == 0:  # it may have come before the first weights were loaded
                load_weights(self.network, self.start)
            self._record_last()
            self._end("interrupted")
        except KeyboardInterrupt:
            has_looked = self.records and (self.held_out is None or self.validations)
            if has_looked:
                self.kept, self.ended_by = self.look, "interrupted"

    @property
    def weights(self) -> list[Tensor]:
        """Those that a training that has ended is to leave; empty where they were let go."""
        assert self.kept is not None
        return self.kept.weights

    def let_weights_go(self) -> None:
        """Keep the history of a training that has ended, without weights."""
        assert self.kept is not None
        self.kept = self.look = Look(self.kept.step, [])

    @property
    def history(self) -> TrainingHistory:
        """Course and end of a training that has ended."""
        assert self.kept is not None
        assert self.ended_by is not None
        return TrainingHistory(
            steps=[record.step for record in self.records],
            objective=[record.objective for record in self.records],
            seconds=[record.seconds for record in self.records],
            validation_steps=[step for step, _ in self.validations],
            validation=[value for _, value in self.validations],
            lr=self.lr,
            weight_decay=self.weight_decay,
            ended_by=self.ended_by,
            kept_step=self.kept.step,
        )

    @torch.enable_grad()
    def _take_steps(self) -> End:
        """Train until something ends it; what did."""
        settings = self.settings
        kind = OPTIMIZERS[settings.optimizer]
        optimizer = kind(self.network.parameters(), lr=self.lr, betas=settings.betas, weight_decay=self.weight_decay)
        schedule = SCHEDULES[settings.schedule](optimizer, settings.n_steps)
        full = settings.batch_size is None
        batches = itertools.repeat(self.data) if full else self.data.batches(self.batch_size, settings.seed)
        while self.step < settings.n_steps:
            if self.stopwatch.seconds >= settings.seconds:
                return "seconds"
            with self.stopwatch:
                optimizer.zero_grad()
                value = self._mean_loss(next(batches)) + self._decay()
                objective = value.item()
            if not math.isfinite(objective):
                self._record(objective)
                return "diverged"
            reason = self._look(objective if full else None)
            if reason is not None:
                return reason
            with self.stopwatch:
                value.backward()
                self.step += 1  # first: after Ctrl-C in the midst of it the weights are no longer those recorded
                optimizer.step()
                schedule.step()
            self.bar.update()
        return "n_steps"

    def _decay(self) -> Tensor:
        return self.settings.alpha * self.network.decay(self.settings.penalty)

    def _mean_loss(self, data: Data) -> Tensor:
        losses = sample_losses(self.network(*data.inputs), data.y, self.settings.loss)
        return losses.mean() if data.weight is None else (losses * data.weight).mean()

    @torch.no_grad()
    def _mean_loss_of_all(self, data: Data) -> Tensor:
        """Mean loss, taken over parts no larger than what a step takes."""
        if len(data) <= self.batch_size:
            return self._mean_loss(data)
        parts = [
            data.rows(index) for index in torch.arange(len(data), device=data.y.device).split(int(self.batch_size))
        ]
        return torch.stack([self._mean_loss(part) * len(part) for part in parts]).sum() / len(data)

    @torch.no_grad()
    def _objective_of_all(self) -> float:
        return (self._mean_loss_of_all(self.data) + self._decay()).item()

    def _look(self, objective: float | None) -> End | None:
        """Record what is due before a step; what ends training, if anything does."""
        due = self.step % self.look_every == 0
        if objective is None and due:
            objective = self._objective_of_all()
        if objective is not None:
            self._record(objective)
            if says_stop(self.settings.callback, self.step, objective):
                return "callback"
        if due:
            self.bar.set_postfix(objective=f"{objective:.3e}", refresh=False)
            self._complete_look()
        patience = self.settings.patience
        return "patience" if patience is not None and self.looks_without_progress >= patience else None

    def _record(self, objective: float) -> None:
        self.records.append(Record(self.step, objective, self.stopwatch.seconds))

    def _complete_look(self) -> None:
        """Record the loss on held-out data, where there are some, and remember the weights to fall back on."""
        value = math.nan
        if self.held_out is not None:
            value = self._mean_loss_of_all(self.held_out).item()
            self.validations.append((self.step, value))
        if self.settings.patience is None or value < self.look.validation:
            self.look = Look(self.step, weights_of(self.network), value)
            self.looks_without_progress = 0
        else:
            self.looks_without_progress += 1

    def _record_last(self) -> None:
        """Record the weights that training ended with, as far as that has not been done."""
        if not self.records or self.records[-1].step != self.step:
            self._record(self._objective_of_all())
        if not self.validations or self.validations[-1][0] != self.step:
            self._complete_look()

    def _end(self, ended_by: End) -> None:
        """Keep the weights that there are, the best by validation with patience, the first ones after a divergence."""
        diverged = not math.isfinite(self.records[-1].objective)
        if self.settings.patience is not None:
            self.kept = self.look
        else:
            self.kept = Look(0, self.start) if diverged else Look(self.step, weights_of(self.network))
        self.ended_by = "diverged" if diverged else ended_by

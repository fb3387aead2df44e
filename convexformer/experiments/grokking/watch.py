"""Accuracies and losses of a model while it is trained, and when they passed a threshold."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convexformer.nn.modules.embedding import SymbolNetwork
from convexformer.nn.training.stopwatch import finish_work

from .data import Split

_AT_ONCE = 2048


class Look(NamedTuple):
    """State of a model at one time.

    Attributes
    ----------
    step : int
        Steps of what is learned: of all weights, or of the embeddings where a head is solved for them.
    seconds : float
        Wall time of training, looks not counted.
    head_steps, gradient_evaluations : int
        Steps of the head, and gradients taken, each over one batch.
    train_loss, test_loss : float
        Mean cross-entropy in nats, without any decay.
    train_accuracy, test_accuracy : float
        Share of rows whose largest output is that of the label.
    """

    step: int
    seconds: float
    head_steps: int
    gradient_evaluations: int
    train_loss: float
    test_loss: float
    train_accuracy: float
    test_accuracy: float


COURSE = Look._fields


class Watch:
    """What a method shows itself to while it trains.

    Parameters
    ----------
    split : Split
        The data.
    n_steps : int
        Steps at most.
    look_every : int
        Steps between looks.
    threshold : float, default=0.99
        The accuracy to reach.
    run_on : float, default=1.0
        Training is to end after this many times the steps that the test accuracy took to reach it.

    Examples
    --------
    >>> from convexformer.experiments.grokking.data import make_split
    >>> split = make_split(5, seed=0)
    >>> watch = Watch(split, n_steps=10, look_every=1)
    >>> def right():
    ...     return tuple(torch.nn.functional.one_hot(part.labels, 5).float() for part in (split.train, split.test))
    >>> watch.look(right, step=0), watch.step_of("test_accuracy")
    (True, 0)
    """

    def __init__(
        self, split: Split, n_steps: int, look_every: int, threshold: float = 0.99, run_on: float = 1.0
    ) -> None:
        self.split, self.n_steps, self.look_every = split, n_steps, look_every
        self.threshold, self.run_on = threshold, run_on
        self.looks: list[Look] = []
        self._began, self._looking = time.perf_counter(), 0.0

    def due(self, step: int) -> bool:
        """Whether a look is due after this many steps."""
        return step % self.look_every == 0

    @torch.no_grad()
    def look(
        self,
        outputs: Callable[[], tuple[Tensor, Tensor]],
        *,
        step: int,
        head_steps: int | None = None,
        gradient_evaluations: int | None = None,
    ) -> bool:
        """Record a look.

        Parameters
        ----------
        outputs : callable
            Gives the outputs on the rows to train on and on those to test on, shape ``(N, p)``.
        step : int
            Steps done.
        head_steps, gradient_evaluations : int, optional
            As in ``Look``. Default: as many as steps.

        Returns
        -------
        bool
            Whether training is to end: the test accuracy has been reached, long enough ago, or a loss is not finite.
        """
        if self.split.device is not None:
            finish_work(self.split.device)
        began = time.perf_counter()
        train, test = outputs()
        seen = Look(
            step,
            began - self._began - self._looking,
            step if head_steps is None else head_steps,
            step if gradient_evaluations is None else gradient_evaluations,
            *(_loss(out, part.labels) for out, part in ((train, self.split.train), (test, self.split.test))),
            *(_accuracy(out, part.labels) for out, part in ((train, self.split.train), (test, self.split.test))),
        )
        finite = math.isfinite(seen.train_loss) and math.isfinite(seen.test_loss)
        if finite:
            self.looks.append(seen)
        self._looking += time.perf_counter() - began
        reached = self.step_of("test_accuracy")
        return not finite or (reached is not None and step >= self.run_on * reached)

    def correct_seconds(self, steps: list[int], seconds: list[float]) -> None:
        """Put in the seconds that the training itself measured, where it knows better than the watch."""
        known = dict(zip(steps, seconds, strict=True))
        self.looks = [look._replace(seconds=known.get(look.step, look.seconds)) for look in self.looks]

    def first(self, name: str) -> Look | None:
        """The first look at which an accuracy, ``"train_accuracy"`` or ``"test_accuracy"``, is reached."""
        return next((look for look in self.looks if getattr(look, name) >= self.threshold), None)

    def step_of(self, name: str) -> int | None:
        """Its steps."""
        found = self.first(name)
        return None if found is None else found.step

    def course(self) -> dict[str, list[Any]]:
        """The looks as lists by name, rounded to what a figure can show."""
        columns = {name: [getattr(look, name) for look in self.looks] for name in COURSE}
        return {
            name: [float(f"{value:.6g}") if isinstance(value, float) else value for value in values]
            for name, values in columns.items()
        }


def network_outputs(network: SymbolNetwork, split: Split) -> Callable[[], tuple[Tensor, Tensor]]:
    """Function that gives the outputs of a network as it then is, a few rows at a time."""

    def of(symbols: Tensor) -> Tensor:
        return torch.cat([network(rows) for rows in symbols.split(_AT_ONCE)])

    return lambda: (of(split.train.symbols), of(split.test.symbols))


def _loss(outputs: Tensor, labels: Tensor) -> float:
    return torch.nn.functional.cross_entropy(outputs, labels).item()


def _accuracy(outputs: Tensor, labels: Tensor) -> float:
    return (outputs.argmax(1) == labels).double().mean().item()

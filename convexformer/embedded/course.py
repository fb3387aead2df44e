"""What both ways of training an embedding share: how it moves, and how they are followed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from convexformer.nn.training.learning_rates import SCHEDULES
from convexformer.validation import check_one_of, check_positive
from convexformer_solvers.validation import check_callback, says_stop

from .problem import EmbeddedProblem, along_sphere, random_tables, unit_rows
from .state import EmbeddedState, EmbeddingInterrupted

Callback = Callable[[EmbeddedState], bool | None]


# A step moves the entries of a table by at most about the learning rate with Adam and by a fifth of it with Muon.
OPTIMIZERS: dict[str, Callable[[list[Tensor], float], torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "muon": lambda tables, lr: torch.optim.Muon(
        tables, lr, weight_decay=0.0, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    ),
}


class MovingTables:
    """An embedding that an optimiser moves, its rows on the unit sphere; the one that it begins with is left alone."""

    def __init__(
        self,
        problem: EmbeddedProblem,
        tables: Tensor | None,
        seed: int,
        optimizer: str,
        lr: float,
        schedule: str,
        n_steps: int,
    ) -> None:
        check_one_of(sorted(OPTIMIZERS), optimizer=optimizer)
        check_one_of(sorted(SCHEDULES), schedule=schedule)
        check_positive(lr=lr)
        if tables is not None:
            problem.check_tables(tables)
            if not bool(tables.any(-1).all()):
                raise ValueError("tables must have no row of zeros, which cannot be scaled to length one")
        self.now = random_tables(problem, seed) if tables is None else unit_rows(tables.detach().to(problem.target))
        self._parts = list(self.now.unbind())  # views: one table per token, as Muon's matrices are
        self._optimizer = OPTIMIZERS[optimizer](self._parts, lr)
        self._schedule = SCHEDULES[schedule](self._optimizer, n_steps)

    def move(self, gradient: Tensor) -> None:
        """Take a step, in place."""
        for part, slope in zip(self._parts, along_sphere(self.now, gradient), strict=True):
            part.grad = slope
        self._optimizer.step()
        self._schedule.step()
        self.now.copy_(unit_rows(self.now))


def follow(
    start: EmbeddedState,
    states: Iterable[EmbeddedState],
    callback: Callback | None,
    is_look: Callable[[int], bool] = lambda step: True,
) -> EmbeddedState:
    """The last of the states of a training, one for each step, which the callback at a look and Ctrl-C may end."""
    check_callback(callback, "an EmbeddedState")
    state = start
    try:
        for state in states:
            if is_look(state.step) and says_stop(callback, state):
                break
    except KeyboardInterrupt as interrupt:
        raise EmbeddingInterrupted(state) from interrupt
    return state

"""What both ways of training an embedding share: how it moves, and how they are followed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .problem import EmbeddedProblem, along_sphere, random_tables, unit_rows
from .state import EmbeddedState, EmbeddingInterrupted

Callback = Callable[[EmbeddedState], bool | None]


class MovingTables:
    """An embedding that moves by Adam, its rows on the unit sphere; the one that it begins with is left alone."""

    def __init__(self, problem: EmbeddedProblem, tables: Tensor | None, seed: int, lr: float) -> None:
        self.now = random_tables(problem, seed) if tables is None else unit_rows(tables.to(problem.target))
        self._optimizer = torch.optim.Adam([self.now], lr=lr)

    def move(self, gradient: Tensor) -> None:
        """Take a step, in place."""
        self.now.grad = along_sphere(self.now, gradient)
        self._optimizer.step()
        self.now.copy_(unit_rows(self.now))


def follow(start: EmbeddedState, states: Iterable[EmbeddedState], callback: Callback | None) -> EmbeddedState:
    """The last of the states of a training, which the callback and Ctrl-C may end."""
    state = start
    try:
        for state in states:
            if callback is not None and callback(state) is True:
                break
    except KeyboardInterrupt as interrupt:
        raise EmbeddingInterrupted(state) from interrupt
    return state

"""What a column generation of weightings has found so far, for the file from which a later call goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convexformer.nn.modules.probe import TokenPooler

from .generate import WeightingRound

_SOLUTION = ("coef", "intercept", "dual")


@dataclass(frozen=True)
class Growth:
    """Weightings that were added to a dictionary, the solution with them, and where the search stands.

    Attributes
    ----------
    added : TokenPooler
        The weightings, with their factors.
    solution : tuple of Tensor
        Coefficients, intercept and dual point.
    rounds : list of WeightingRound
        The rounds so far.
    stream : RandomState
        Random numbers of the search.
    """

    added: TokenPooler
    solution: tuple[Tensor, Tensor, Tensor]
    rounds: list[WeightingRound]
    stream: np.random.RandomState

    @classmethod
    def of(
        cls,
        pooler: TokenPooler,
        first: TokenPooler,
        solution: tuple[Tensor, Tensor, Tensor],
        rounds: list[WeightingRound],
        stream: np.random.RandomState,
    ) -> Growth:
        """That of a dictionary that was `first`."""
        factors = None if pooler.factors is None else pooler.factors[first.n_weightings :]
        added = TokenPooler(pooler.weightings[len(first.weightings) :], factors=factors)
        return cls(added, solution, rounds, stream)

    def saved(self) -> tuple[dict[str, Any], dict[str, NDArray]]:
        """Entries for JSON and arrays."""
        state = self.stream.get_state(legacy=False)
        entries = {"parts": self.added.described(), "rounds": self.rounds, "stream": state}
        solution = dict(zip(_SOLUTION, self.solution, strict=True))
        arrays = self.added.state_dict() | solution
        return entries, {name: tensor.numpy(force=True) for name, tensor in arrays.items()}

    @classmethod
    def loaded(cls, entries: dict[str, Any], arrays: dict[str, NDArray]) -> Growth:
        """That of ``saved``.

        Raises
        ------
        KeyError, TypeError, ValueError
            If entries or arrays are damaged.
        """
        added = TokenPooler.rebuilt(entries["parts"], arrays)
        coef, intercept, dual = (torch.as_tensor(arrays[name]) for name in _SOLUTION)
        rounds = [WeightingRound(*found) for found in entries["rounds"]]
        stream = np.random.RandomState()
        stream.set_state(entries["stream"])
        return cls(added, (coef, intercept, dual), rounds, stream)

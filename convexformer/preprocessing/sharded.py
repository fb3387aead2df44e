"""Samples of tokens that are spread over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from convexformer_solvers.distributed import Sharded

from .sequences import RaggedSequences, TokenSequences


class ShardedSequences(Sharded, TokenSequences):
    """Samples of which each rank has its own, as ``TokenSequences``.

    Tokens stay on their ranks; those that are asked for by ``padded`` come to rank 0.
    """

    def __init__(self, layout: Any, name: int, local: TokenSequences) -> None:
        super().__init__(layout, name, local)
        self.n_features, self.dtype, self.device = local.n_features, local.dtype, local.device
        self.lengths = self.rows_made(attrgetter("lengths"))

    @staticmethod
    def alike(local: TokenSequences) -> dict[str, Any]:
        return {"width of tokens": local.n_features, "precision": local.dtype}

    def padded(self, rows: slice) -> tuple[Tensor, Tensor]:
        some = self.rows(rows)
        found: dict[int, Tensor] = {}
        for places, tokens in zip(some.layout.places, some.each_part(_tokens_of), strict=True):
            found |= zip(torch.arange(len(some))[places].tolist(), tokens, strict=True)
        return RaggedSequences([found[i].to(self.device) for i in range(len(some))]).padded(slice(None))

    def to(self, device: torch.device) -> ShardedSequences:
        device = torch.device(device)
        return self if device == self.device else self._derived("to", device=device)

    def changed(self, tokens: Tensor) -> Tensor:
        return self.local.changed(tokens)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ShardedSequences:
        return self._derived("mapped", change=change)


def _tokens_of(samples: TokenSequences) -> list[Tensor]:
    """The tokens ``(length, d)`` of each sample."""
    return [part[real] for _, tokens, mask in samples.chunks() for part, real in zip(tokens, mask, strict=True)]

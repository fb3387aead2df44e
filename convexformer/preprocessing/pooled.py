"""The linear maps of programs on pooled tokens, and what is asked of each process's part of the samples."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from convexformer.memory import check_room
from convexformer.nn.modules.probe import TokenPooler
from convexformer.programs.temporary_file import StoredMap, file_tensor
from convexformer.validation import predictions
from convexformer_solvers import DenseMap
from convexformer_solvers.linear_maps.base import slices

from .moments import Moments
from .pooling import pooled, pooled_chunks
from .sequences import CONFIG, TokenSequences


def pooled_map(samples: TokenSequences, pooler: TokenPooler, memory_limit: int | None) -> DenseMap:
    """The map of pooled tokens, in memory or, where they take more bytes than the limit, in a file.

    ``ValueError`` if there is no room for them.
    """
    shape = (len(samples), pooler.n_weightings, samples.n_features)
    size = torch.Size(shape).numel() * samples.dtype.itemsize
    if memory_limit is None or size <= memory_limit:
        check_room(size, pooler.n_weightings, samples.device)
        return DenseMap(pooled(pooler, samples))
    if samples.device.type != "cpu":
        raise ValueError(
            f"memory_limit={memory_limit} is less than the {size} bytes of pooled tokens, which would go to a "
            "file, and with a file products are computed on the CPU; set device='cpu' or raise memory_limit"
        )
    return StoredMap(pooled(pooler, samples, file_tensor(shape, samples.dtype)), memory_limit)


def block_moments(linear_map: DenseMap, weight: Tensor | None = None) -> Moments:
    """Moments of the data of a map over its samples, with weights ``(N,)``."""
    return Moments.joined(
        Moments.of(linear_map.data[rows], None if weight is None else weight[rows]) for rows in _slices(linear_map.data)
    )


def scale_blocks(linear_map: DenseMap, factors: Tensor) -> None:
    """Multiply the data of each block of a map, in place, by a factor."""
    for rows in _slices(linear_map.data):
        linear_map.data[rows] *= factors.to(linear_map.data)[:, None]


def pooled_predictions(samples: TokenSequences, pooler: TokenPooler, coef: Tensor, intercept: Tensor) -> Tensor:
    """Outputs ``(N, c)`` of the pooled tokens, of which a chunk is held at a time."""
    coef, intercept = coef.to(samples.device), intercept.to(samples.device)
    outputs = torch.empty((len(samples), coef.shape[-1]), dtype=samples.dtype, device=samples.device)
    for rows, part in pooled_chunks(pooler, samples):
        outputs[rows] = predictions(DenseMap(part), coef, intercept, samples.dtype)
    return outputs


def _slices(tokens: Tensor) -> Iterator[slice]:
    """A few samples at a time, which bounds several copies in float64."""
    size = max(1, CONFIG.limit(tokens.device) // (8 * tokens[0].numel()))
    return slices(len(tokens), size)

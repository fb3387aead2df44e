"""Samples of programs: arrays, linear maps, and data on a disk."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from convexformer.memory import limit_of
from convexformer.storage import Source, open_source
from convexformer.validation import check_program_tokens
from convexformer_solvers import LinearMap
from convexformer_solvers.linear_maps.config import CONFIG
from convexformer_solvers.linear_maps.streamed import StreamedMap

COPIES = 2  # of samples that are read into memory: as they are, and as a solver needs them
_CHUNKS = 128  # bytes of the limit for each number of a chunk: three chunks, converted, leave most of it to others


def program_samples(X: Any) -> Tensor | LinearMap:
    """Checked samples of a program: a tensor of shape (N, n, d), or their map.

    The map is the one that was given, or that of data on a disk for whose copies a quarter of the free memory has no
    room. Errors are those of ``check_program_tokens`` and ``open_source``.

    Examples
    --------
    >>> from convexformer.storage import Chunks
    >>> program_samples(Chunks([np.zeros((2, 4, 3)), np.ones((1, 4, 3))])).shape
    torch.Size([3, 4, 3])
    """
    if isinstance(X, LinearMap):
        return X
    source, device = open_source(X), torch.device("cpu")
    return check_program_tokens(X) if source is None else samples_of_source(X, source, limit_of(None, device), device)


def samples_of_source(
    X: Any, source: Source, limit: int, device: torch.device, n_copies: int = COPIES, part: slice | None = None
) -> Tensor | StreamedMap:
    """Samples of what ``open_source`` made of ``X``, or a part of them: in memory if copies fit the limit, in bytes."""
    chunk = min(CONFIG.read_at_once(device), max(1, limit // _CHUNKS))
    streamed = StreamedMap(source, device=device, part=part, chunk=chunk, memory_limit=limit)
    if n_copies * streamed.n_stored * streamed.dtype.itemsize > limit:
        return streamed
    # The system keeps in memory what it can of a memory map. Integers are converted as those of other files.
    if isinstance(X, np.memmap) and part is None and X.dtype.kind == "f":
        return check_program_tokens(np.asarray(X))
    return streamed.tensor()

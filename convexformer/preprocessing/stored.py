"""Samples of tokens on a disk, which are read when they are needed."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convexformer.storage import open_source
from convexformer.storage.opening import array_of, named_array, without_name
from convexformer.storage.sources import n_dims
from convexformer.validation import as_tensor, mask_of
from convexformer_solvers import Source, Traffic
from convexformer_solvers.validation import warn_caller

from .sequences import PaddedSequences, TokenSequences, working_precision


class StoredSequences(TokenSequences):
    """Samples of a source, of one token each where two dimensions are stored.

    Parameters
    ----------
    source : Source
        The tokens.
    mask : Tensor of bool of shape (len(index), n), optional
        Which of them are real. Default: all.
    index : Tensor of int64, optional
        Positions of the samples in the source. Default: all, in order.
    device : torch.device, optional
        Where tokens are moved to once they are read. Default: the CPU.
    traffic : Traffic, optional
        What has been read of the source, which is brought up to date. Default: nothing yet.
    """

    longest = property(lambda self: self._sample[0])  # which is read, whether real or not

    def __init__(
        self,
        source: Source,
        mask: Tensor | None = None,
        index: Tensor | None = None,
        device: Any = "cpu",
        traffic: Traffic | None = None,
    ) -> None:
        self._stored, self.device = source, torch.device(device)
        self._index = torch.arange(source.shape[0]) if index is None else index.cpu()
        self._mask = None if mask is None else mask.to(self.device)
        # A source gives vectors as columns of width 1.
        self._sample = (1, source.shape[1]) if n_dims(source) == 2 else source.shape[1:]
        self.n_features = self._sample[1]
        longest = torch.full((len(self._index),), self.longest, dtype=torch.int64, device=self.device)
        self.lengths = longest if self._mask is None else self._mask.sum(1)
        self.dtype = working_precision(source.dtype)
        n_bytes = len(self._index) * math.prod(source.shape[1:]) * source.dtype.itemsize
        self._traffic = Traffic(n_bytes) if traffic is None else traffic

    def padded(self, rows: slice) -> tuple[Tensor, Tensor]:
        tokens = self._read(self._index[rows]).to(self.device, self.dtype)
        return PaddedSequences(tokens, None if self._mask is None else self._mask[rows]).padded(slice(None))

    def _read(self, places: Tensor) -> Tensor:
        """Tokens at some positions, read in their order in the file."""
        began = time.perf_counter()
        ordered, order = places.sort(stable=True)
        tokens = self._stored.take(ordered)
        found, seconds = tokens[order.argsort()].reshape(-1, *self._sample), time.perf_counter() - began
        self._traffic.read_bytes += tokens.nbytes
        self._traffic.read_seconds += seconds
        self._traffic.waited_seconds += seconds  # nothing is read ahead
        return found

    def rows(self, index: Tensor) -> StoredSequences:
        mask = None if self._mask is None else self._mask[index]
        return StoredSequences(self._stored, mask, self._index[index.cpu()], self.device, self._traffic)

    def to(self, device: torch.device) -> StoredSequences:
        device = torch.device(device)
        if device == self.device:
            return self
        return StoredSequences(self._stored, self._mask, self._index, device, self._traffic)

    def traffic(self) -> Traffic:
        return dataclasses.replace(self._traffic)

    def place(self, sample: int) -> str:
        return self._stored.place(int(self._index[sample]))


def real_tokens(X: tuple[Any, Any]) -> Any:
    """The lengths or the mask of a pair, read where it names a path."""
    return array_of(X[1], "X[1]", "lengths")


def stored_sequences(X: Any, part: slice | None = None) -> StoredSequences | None:
    """Samples that ``X``, or the first entry of a pair, names on a disk, with lengths or a mask; None of others.

    Those of a `part` may have the lengths or the mask of all samples.
    """
    pair = isinstance(X, tuple) and len(X) == 2
    given = X[0] if pair else X
    # A memory map is an array as it is, but for integers, all of which would be converted at once.
    is_array = isinstance(given, np.ndarray) and not (given.dtype.kind in "iu" and given.ndim == 3)
    source = None if is_array else open_source(given)
    if source is None:
        return None
    if len(source.shape) != 3:
        raise ValueError(f"X, a source, must have shape (n_samples, n_tokens, n_features), got {source.shape}")
    if pair and n_dims(source) == 2:
        raise ValueError(
            "X[0] must have shape (n_samples, n_tokens, n_features), as X[1] says which of its tokens are real, got "
            f"{source.shape[:2]}; give samples of one token without X[1]"
        )
    index = torch.arange(source.shape[0])[part or slice(None)]
    if not pair:
        _tell_unread(X, source)
        return StoredSequences(source, index=index)
    real = as_tensor(real_tokens(X), name="X[1]")
    if real.ndim > 0 and len(real) == source.shape[0]:
        real = real[index]
    return StoredSequences(source, mask_of(real, len(index), source.shape[1], torch.device("cpu")), index)


def _tell_unread(X: Any, source: Source) -> None:
    """Warn of lengths, or of a mask, beside samples of which some tokens then count that are not real."""
    if not isinstance(X, (str, os.PathLike)) or n_dims(source) == 2:
        return
    path, (n_samples, n_tokens, _) = without_name(os.fspath(X))[0], source.shape
    for name, least, shape in (("lengths", n_tokens, (n_samples,)), ("mask", 1, (n_samples, n_tokens))):
        try:
            found = named_array(path, name)
        except ValueError:  # of what cannot be read, and so is no array of numbers
            continue
        if found is not None and found.shape == shape and found.dtype.kind in "biuf" and (found < least).any():
            warn_caller(
                f"X={os.fspath(X)!r} stands for tokens alone, and all of them count as real; for those of the {name} "
                f"beside them give a pair as X, ({os.fspath(X)!r}, {f'{path}:{name}'!r})",
                UserWarning,
            )

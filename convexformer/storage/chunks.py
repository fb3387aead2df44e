"""Samples that come in chunks, such as those made anew for each pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convexformer.validation import as_tensor, check_optional_counts
from convexformer_solvers.linear_maps.source import Source

from .files import token_shape, torch_dtype


class Chunks(Source):
    """Samples that a function gives in chunks, in the same order each time that it is called.

    Parameters
    ----------
    make : callable or sequence of arrays
        Returns, each time it is called, an iterator over arrays or tensors of shape (rows, n_tokens, n_features) or
        (rows, n_tokens). Chunks may have different numbers of rows. Those of a function are copied, so that it may
        fill one array again and again.
    n_samples : int, optional
        Number of rows of all chunks. Default: they are counted in a first pass.

    Raises
    ------
    TypeError
        If `make` is an iterator, which can be run through only once, or returns something else than an iterator.
    ValueError
        If there is no sample, or chunks differ in width or precision. While reading: if the chunks hold another number
        of samples than the first time.

    Examples
    --------
    >>> def make():
    ...     for seed in range(3):
    ...         yield np.random.default_rng(seed).normal(size=(4, 5, 2)).astype(np.float32)
    >>> source = Chunks(make)
    >>> source.shape, source.dtype
    ((12, 5, 2), torch.float32)
    >>> source.read(slice(3, 6)).shape
    torch.Size([3, 5, 2])
    """

    fingerprint = None
    n_dims = 3  # of the chunks: 2 where their columns are tokens of width 1
    shape = property(lambda self: (self._n_samples, *self._sample[0]))
    dtype = property(lambda self: self._sample[1])

    def __init__(self, make: Callable[[], Iterable[Any]] | Sequence[Any], n_samples: int | None = None) -> None:
        if not callable(make) and (not isinstance(make, Sequence) or isinstance(make, (str, bytes))):
            raise TypeError(
                "make must be a callable that returns a new iterator each time, or a list of arrays, got "
                f"{type(make).__name__}; an iterator can be run through only once, so give the function that makes it"
            )
        check_optional_counts(n_samples=n_samples)
        self._make = make
        self._sample: tuple[tuple[int, ...], torch.dtype] | None = None
        self._restart()
        while (n_samples is None or not self._end) and self._advance():
            pass
        if not self._end:
            raise ValueError("make must give at least one sample, got none")
        self._n_samples = self._end if n_samples is None else int(n_samples)

    def read(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self._n_samples)
        # Rows of the last chunk can still be had.
        if self._chunks is None or start < self._end - len(self._last):
            self._restart()
        parts = []
        while True:
            begin = self._end - len(self._last)
            part = self._last[max(start - begin, 0) : max(stop - begin, 0)]
            if len(part):
                parts.append(part)
            if self._end >= stop:
                break
            if not self._advance():
                raise self._other_number(f"{self._end}")
        if stop == self._n_samples and (self._end > stop or self._advance()):
            raise self._other_number(f"{self._end} or more")
        return parts[0] if len(parts) == 1 else torch.cat(parts or [self._last[:0]])

    def _restart(self) -> None:
        made: Any = self._make() if callable(self._make) else self._make
        try:
            self._chunks: Iterator[Any] | None = iter(made)
        except TypeError as error:
            got = type(made).__name__
            raise TypeError(f"make must return an iterator over arrays each time, got {got}") from error
        if callable(self._make) and getattr(made, "ndim", None) in (2, 3):  # as many as samples in one array have
            raise TypeError(
                f"make must return an iterator over arrays each time, got one array of shape {tuple(made.shape)}, of "
                "which each sample would be a chunk; return [X]"
            )
        self._number = -1
        self._end = 0
        self._last = torch.empty(0)

    def _advance(self) -> bool:
        """Take the next chunk that has rows; False when there is none."""
        chunks, self._chunks = self._chunks, None  # an error in the middle makes the next pass begin anew
        if chunks is None:
            return False
        for chunk in chunks:
            self._number += 1
            values = self._checked(chunk)
            if len(values):
                self._last, self._end, self._chunks = values, self._end + len(values), chunks
                return True
        return False

    def _checked(self, chunk: Any) -> Tensor:
        place = f"chunk {self._number} of make"
        values = chunk if torch.is_tensor(chunk) else np.asarray(chunk)
        dtype = torch_dtype(values.dtype, place)
        shape = token_shape((max(len(values), 1) if values.ndim else 1, *values.shape[1:]), place)
        sample = (shape[1:], dtype)
        self.n_dims = min(self.n_dims, values.ndim)
        if self._sample is None:
            self._sample = sample
        if sample != self._sample:
            raise ValueError(
                f"{place} has samples of shape {sample[0]} in {sample[1]}, but those before have {self._sample[0]} in "
                f"{self._sample[1]}; all must agree"
            )
        result = as_tensor(values).detach().cpu().reshape(len(values), *sample[0])
        # A function may fill one array again and again, while rows of it that were read are still needed.
        return result.clone() if callable(self._make) else result

    def _other_number(self, got: str) -> ValueError:
        self._chunks = None
        return ValueError(
            f"make must give {self._n_samples} samples each time that it is called, got {got}; it must return a new "
            "iterator over the same chunks, and n_samples, if given, must be their number"
        )

"""Sources of samples in files, arrays and tables, one by one or joined."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convexformer.validation import as_tensor
from convexformer_solvers.linear_maps.source import Source

from .files import FileArray, changed, token_shape, torch_dtype


class _Described(Source):
    """A source whose shape and precision are known from the start."""

    n_dims: int  # of what is stored: 2 where its columns are tokens of width 1
    _shape: tuple[int, ...]
    _dtype: torch.dtype
    shape = property(lambda self: self._shape)
    dtype = property(lambda self: self._dtype)


class FileSource(_Described):
    """Samples in one file, of which rows are read by their position in it."""

    is_mapped = property(lambda self: True)

    def __init__(self, array: FileArray) -> None:
        self._array, self.n_dims = array, len(array.shape)
        self._shape, self._dtype = token_shape(array.shape, array.place), array.dtype

    @property
    def fingerprint(self) -> str:
        """Changes when the file does."""
        return hash_of(self._array.fingerprint)

    def read(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self._shape[0])
        return self._array.read(start, stop).reshape(-1, *self._shape[1:])

    def take(self, places: Tensor) -> Tensor:
        return self._array.take(places).reshape(-1, *self._shape[1:])


class ArraySource(_Described):
    """Samples in an array of another package, of which slices can be taken; messages call it by its `place`.

    `find` returns the array, and is called again after unpickling; `identify` returns what changes when the samples do.
    Of an array that `is_watched` each read compares that with what it was at first.
    """

    def __init__(
        self,
        find: Callable[[], Any],
        place: str,
        identify: Callable[[], str] | None = None,
        is_watched: bool = False,
    ) -> None:
        self._find, self._identify, self._place = find, identify, place
        self._opened = self.fingerprint if is_watched else None
        self._array = array = find()
        self._shape = token_shape(array.shape or (), place)  # an empty data set of HDF5 has none
        self.n_dims, self._dtype = len(array.shape), torch_dtype(array.dtype, place)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_array": None}

    @property
    def fingerprint(self) -> str | None:
        """Changes when the file or folder does; None if it is not known."""
        return None if self._identify is None else self._identify()

    def read(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self._shape[0])
        if self._opened is not None and self.fingerprint != self._opened:
            raise changed(self._place)
        if self._array is None:
            self._array = self._find()
        return as_tensor(np.array(self._array[start:stop])).reshape(-1, *self._shape[1:])


class ColumnSource(_Described):
    """Samples in a column of a ``datasets.Dataset``, whose cells are lists or lists of lists of numbers, or arrays."""

    def __init__(self, table: Any, column: str) -> None:
        self._column, place = column, f"column {column!r} of X"
        if not len(table):
            raise ValueError(f"{place} must have at least one sample, got none")
        feature = table.features[column]
        while hasattr(feature, "feature"):
            feature = feature.feature
        try:
            kind = np.dtype(feature.dtype)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{place} must hold lists of numbers, got {table.features[column]}") from error
        self._dtype = torch_dtype(kind, place)
        # Its arrays of numpy would be float32, whatever is stored.
        self._table = table.select_columns(column).with_format("arrow")
        self._cell = self._cells(0, 1).shape[1:]
        self.n_dims = 1 + len(self._cell)
        self._shape = token_shape((len(table), *self._cell), place)

    @property
    def fingerprint(self) -> str | None:
        """That of the package, which is of the selected column."""
        return getattr(self._table, "_fingerprint", None)

    def read(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self._shape[0])
        if start >= stop:
            return torch.empty((0, *self._shape[1:]), dtype=self._dtype)
        return as_tensor(self._cells(start, stop)).reshape(-1, *self._shape[1:])

    def _cells(self, start: int, stop: int) -> NDArray:
        try:
            parts = [_numbers(chunk) for chunk in self._table[start:stop][self._column].chunks if len(chunk)]
            others = [part.shape[1:] for part in parts if start and part.shape[1:] != self._cell]
            if others:
                raise ValueError(f"got {others[0]}")
            return np.concatenate(parts)
        except ValueError as error:
            wanted = f"the shape of row 0, {self._cell}," if start else "one shape"
            raise ValueError(
                f"rows {start} to {stop - 1} of column {self._column!r} of X must have {wanted} and no missing values: "
                f"{error}"
            ) from error


def _numbers(values: Any) -> NDArray:
    """Nested lists of Arrow as an array."""
    shape = [len(values)]
    while True:
        values = getattr(values, "storage", values)
        if values.null_count:
            raise ValueError("there are missing ones")
        if not hasattr(values, "value_lengths"):
            return values.to_numpy(zero_copy_only=False).reshape(shape)
        lengths = np.unique(values.value_lengths().to_numpy(zero_copy_only=False))
        if len(lengths) != 1:
            remedy = "; a probe takes samples of several lengths in memory, dataset['X'][:]" if len(shape) == 1 else ""
            raise ValueError(f"got lengths {lengths.tolist()}{remedy}")
        shape.append(int(lengths[0]))
        values = values.flatten()


class ShardSource(Source):
    """Several sources one after the other.

    Parameters
    ----------
    sources : sequence of Source
        Their samples must agree in shape and precision.
    names : sequence of str
        What messages call them.
    fingerprint : str, optional
        What changes when the samples do. Default: that of all parts.

    Raises
    ------
    ValueError
        If there are none, or they differ.

    Examples
    --------
    >>> from convexformer.storage import Chunks
    >>> parts = [Chunks([np.zeros((2, 1, 3))]), Chunks([np.ones((4, 1, 3))])]
    >>> source = ShardSource(parts, ["zeros", "ones"])
    >>> source.read(slice(1, 4))[:, 0, 0], source.place(3)
    (tensor([0., 1., 1.], dtype=torch.float64), "row 1 of shard 'ones'")
    """

    is_mapped = property(lambda self: all(source.is_mapped for source in self._sources))
    shape = property(lambda self: (self._starts[-1], *self._sources[0].shape[1:]))
    dtype = property(lambda self: self._sources[0].dtype)

    def __init__(self, sources: Sequence[Source], names: Sequence[str], fingerprint: str | None = None) -> None:
        if not sources:
            raise ValueError("sources must hold at least one source, got none")
        first = (sources[0].shape[1:], sources[0].dtype)
        for name, source in zip(names, sources, strict=True):
            if (source.shape[1:], source.dtype) != first:
                raise ValueError(
                    f"shards must agree: {names[0]!r} has samples of shape {first[0]} in {first[1]}, {name!r} of "
                    f"{source.shape[1:]} in {source.dtype}"
                )
        self._sources, self._names = list(sources), list(names)
        self._starts = [0, *accumulate(source.shape[0] for source in sources)]
        self._fingerprint = fingerprint

    @cached_property
    def n_dims(self) -> int:
        """Dimensions of the samples as the shards store them; ``ValueError`` where these differ."""
        found = [n_dims(source) for source in self._sources]
        for name, of_source in zip(self._names, found, strict=True):
            if of_source != found[0]:
                raise ValueError(
                    f"shards must agree: {self._names[0]!r} has {found[0]} dimensions, {name!r} {of_source}"
                )
        return found[0]

    @property
    def fingerprint(self) -> str | None:
        """Changes when a shard does; None if that of a part is not known."""
        if self._fingerprint is not None:
            return self._fingerprint
        parts = [getattr(source, "fingerprint", None) for source in self._sources]
        return None if None in parts else hash_of(parts)

    def read(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self._starts[-1])
        parts = []
        shard = bisect_right(self._starts, start) - 1
        while start < stop:
            begin, end = self._starts[shard], min(stop, self._starts[shard + 1])
            parts.append(self._sources[shard].read(slice(start - begin, end - begin)))
            start, shard = end, shard + 1
        if not parts:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def take(self, places: Tensor) -> Tensor:
        shards = torch.bucketize(places, torch.tensor(self._starts[1:-1]), right=True)
        parts = [
            self._sources[shard].take(places[shards == shard] - self._starts[shard])
            for shard in shards.unique_consecutive().tolist()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def place(self, row: int) -> str:
        shard = bisect_right(self._starts, row) - 1
        return f"row {row - self._starts[shard]} of shard {self._names[shard]!r}"


def n_dims(source: Source) -> int:
    """Dimensions of the samples that a source reads, as they are stored."""
    return getattr(source, "n_dims", len(source.shape))


def hash_of(parts: list[Any]) -> str:
    """A text that differs where the parts do."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

"""Sequences of token embeddings that were computed before, read from files."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convexformer.optional import required
from convexformer_solvers.io.npz import read_arrays

Sequences = NDArray[np.floating] | tuple[NDArray[np.floating], NDArray[np.integer]] | list[NDArray[np.floating]]
Entries = Mapping[str, Callable[[], NDArray]]

_DESCRIBING = ("lengths", "offsets")
_MASKS = ("mask", "attention_mask")


@dataclass(frozen=True, eq=False, repr=False)
class Embeddings:
    """Sequences of token embeddings, and labels of the sequences.

    Parameters
    ----------
    sequences : ndarray, pair of ndarrays, or list of ndarrays
        The sequences in a form that the estimators take: an array of shape (N, n_tokens, d); the pair of such an array
        and the `lengths` of the sequences in it; or a list of N arrays of shape (length, d).
    labels : ndarray of shape (N,) or (N, n_outputs), or None
        Labels or targets of the sequences; None when none were asked for.

    Examples
    --------
    >>> example = Embeddings([np.zeros((3, 4), np.float16), np.zeros((1, 4), np.float16)], np.array(["yes", "no"]))
    >>> example
    Embeddings(2 sequences, 1 to 3 tokens, 4 features, float16, with labels)
    >>> example.lengths.tolist()
    [3, 1]
    """

    sequences: Sequences
    labels: NDArray | None = None

    @property
    def lengths(self) -> NDArray[np.integer]:
        """Tokens of each sequence, of shape (N,)."""
        if isinstance(self.sequences, tuple):
            return self.sequences[1]
        return np.array([len(sequence) for sequence in self.sequences])

    def __len__(self) -> int:
        return len(self.sequences[0]) if isinstance(self.sequences, tuple) else len(self.sequences)

    def __repr__(self) -> str:
        array = self.sequences[0] if isinstance(self.sequences, (tuple, list)) else self.sequences
        lengths = self.lengths
        extra = "" if self.labels is None else ", with labels"
        return (
            f"Embeddings({len(self)} sequences, {lengths.min()} to {lengths.max()} tokens, "
            f"{array.shape[-1]} features, {array.dtype}{extra})"
        )


def load_embeddings(
    path: str | os.PathLike[str], *, tokens: str | None = None, labels: str | None = None
) -> Embeddings:
    """Read sequences of token embeddings, computed before by any encoder, from a file.

    No file is ever unpickled, so a file from elsewhere cannot run code.

    Parameters
    ----------
    path : str or path-like
        One of these kinds, by the end of its name:

        - ``.npz`` of NumPy, or ``.safetensors``: an array of shape (N, n_tokens, d), with an entry ``lengths`` of shape
          (N,) when sequences end earlier, which a mask in its place does not say; or an array of shape (total, d) that
          has all sequences one after the other, with an entry ``lengths`` of shape (N,), or an entry ``offsets`` of
          shape (N + 1,) with the row at which each sequence begins and, last, ``total``.
        - ``.parquet``: a column whose cells are lists of tokens, each of them a list of d floats. This needs the extra
          ``parquet``.
    tokens : str, optional
        Name of the entry or column with the embeddings. Default: the only one that is an array of floats with two or
        three axes, or a column of lists of lists of floats. To find it every entry of an archive is read, so name it
        when the file has other large ones.
    labels : str, optional
        Name of the entry or column with labels or targets, one for each sequence. Default: none are read.

    Returns
    -------
    Embeddings
        An array of three axes is returned as it is, in a pair with its ``lengths`` when it has some. The other forms
        become lists of arrays. Numbers keep the precision in which they are stored, float16 too. Only bfloat16, which
        NumPy does not have, becomes float32; this changes no number.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ModuleNotFoundError
        If the package for this kind of file is absent.
    ValueError, TypeError
        If an argument or the file is not as described, or a sequence has no token.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> flat = np.arange(8, dtype=np.float16).reshape(4, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "embeddings.npz"
    ...     np.savez(path, flat=flat, lengths=[3, 1], y=["yes", "no"])
    ...     data = load_embeddings(path, labels="y")
    >>> data
    Embeddings(2 sequences, 1 to 3 tokens, 2 features, float16, with labels)
    >>> [sequence.shape for sequence in data.sequences], data.labels.tolist()
    ([(3, 2), (1, 2)], ['yes', 'no'])

    The kind of file must be known:

    >>> load_embeddings("embeddings.pkl")
    Traceback (most recent call last):
    ...
    ValueError: path must end in .npz, .safetensors or .parquet, got 'embeddings.pkl'
    """
    file = _check_path(path)
    for name, value in (("tokens", tokens), ("labels", labels)):
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name} must be None or the name of an entry of the file, got {type(value).__name__}")
    if file.suffix == ".parquet":
        sequences, found = _read_parquet(file, tokens, labels)
    else:
        with (_open_npz if file.suffix == ".npz" else _open_safetensors)(file) as entries:
            sequences, found = _read_entries(entries, file, tokens, labels)
    data = Embeddings(sequences, found)
    if len(data) == 0:
        raise ValueError(f"{file} must hold at least one sequence, got none")
    if data.lengths.min() < 1:
        raise ValueError(f"{file}: sequence {int(data.lengths.argmin())} has no tokens; leave it out of the file")
    if found is not None and (found.ndim == 0 or len(found) != len(data)):
        raise ValueError(f"labels={labels!r} must have one row for each of {len(data)} sequences, got {found.shape}")
    return data


def _check_path(path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be the path of a file, got {type(path).__name__}")
    file = Path(path)
    if file.suffix not in (".npz", ".safetensors", ".parquet"):
        raise ValueError(f"path must end in .npz, .safetensors or .parquet, got {os.fspath(path)!r}")
    if not file.is_file():
        raise FileNotFoundError(f"path={os.fspath(path)!r} is no file")
    return file


# Archives of arrays


class _NoEmbeddingsError(ValueError):
    """Of an entry that is whole, but no array, or one of Python objects or of numbers unknown to NumPy."""


def _read_entries(
    entries: Entries, file: Path, tokens: str | None, labels: str | None
) -> tuple[Sequences, NDArray | None]:
    """Sequences and labels of an archive."""
    for argument, name in (("tokens", tokens), ("labels", labels)):
        if name is not None and name not in entries:
            raise ValueError(f"{argument}={name!r} is no entry of {file}, which has {sorted(entries)}")
    if tokens is None:
        tokens, array = _only_candidate(entries, file, labels)
    else:
        array = entries[tokens]()
    if array.ndim not in (2, 3) or array.shape[-1] == 0 or not np.issubdtype(array.dtype, np.floating):
        raise ValueError(
            f"entry {tokens!r} of {file} must hold floats in shape (N, n_tokens, d) or (total, d), got {array.dtype} "
            f"in shape {array.shape}"
        )
    described = {name: entries[name]() for name in _DESCRIBING if name in entries}
    unread = [name for name in _MASKS if name in entries and name not in (tokens, labels)]
    if unread and not described:
        raise ValueError(
            f"{file} has an entry {unread[0]!r}, which is not read; where real tokens come first, store "
            f"lengths={unread[0]}.sum(1) in its place, else give estimators the pair of embeddings and mask"
        )
    return _sequences(array, described, file), None if labels is None else entries[labels]()


def _only_candidate(entries: Entries, file: Path, labels: str | None) -> tuple[str, NDArray]:
    """The only entry that can be embeddings, with its name."""
    found: dict[str, NDArray] = {}
    for name in sorted(set(entries) - {labels, *_DESCRIBING}):
        try:
            array = entries[name]()
        except _NoEmbeddingsError:
            continue
        if array.ndim in (2, 3) and np.issubdtype(array.dtype, np.floating):
            found[name] = array
    if len(found) != 1:
        raise ValueError(
            f"{file} must hold one array of floats with two or three axes, got {sorted(found) or 'none'} among "
            f"{sorted(entries)}; name the embeddings with tokens="
        )
    return found.popitem()


def _sequences(array: NDArray, described: dict[str, NDArray], file: Path) -> Sequences:
    """The form in which estimators take the array, by the entries that describe it."""
    if len(described) == 2:
        raise ValueError(f"{file} has entries 'lengths' and 'offsets'; keep one of them")
    for name, values in described.items():
        if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
            raise ValueError(
                f"entry {name!r} of {file} must hold integers on one axis, got {values.dtype} in shape {values.shape}"
            )
    if array.ndim == 3:
        return _padded(array, described, file)
    if not described:
        raise ValueError(
            f"{file} has an array of shape {array.shape}, so it must have an entry 'lengths' or 'offsets' that says "
            "which rows belong to which sequence; for one vector a sample, give estimators the array itself"
        )
    ends = _ends(described, len(array), file)
    return np.split(array, ends[:-1]) if len(ends) else []


def _padded(array: NDArray, described: dict[str, NDArray], file: Path) -> Sequences:
    if "offsets" in described:
        raise ValueError(f"{file} has 'offsets' for an array of shape {array.shape}, which needs 'lengths' or nothing")
    lengths = described.get("lengths")
    if lengths is None:
        return array
    if len(lengths) != len(array) or (lengths < 0).any() or (lengths > array.shape[1]).any():
        span = f" from {lengths.min()} to {lengths.max()}" if len(lengths) else ""
        raise ValueError(
            f"entry 'lengths' of {file} must hold {len(array)} integers from 1 to {array.shape[1]}, got "
            f"{len(lengths)}{span}"
        )
    return array, lengths.astype(np.int64)


def _ends(described: dict[str, NDArray], total: int, file: Path) -> NDArray[np.int64]:
    """The row after the last one of each sequence."""
    if "lengths" in described:
        lengths = described["lengths"].astype(np.int64)
        if (lengths < 0).any() or lengths.sum() != total:
            raise ValueError(
                f"entry 'lengths' of {file} must hold positive integers whose sum is the number of rows, {total}, got "
                f"a sum of {lengths.sum()}"
            )
        return np.cumsum(lengths)
    offsets = described["offsets"].astype(np.int64)
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != total or (np.diff(offsets) < 0).any():
        raise ValueError(
            f"entry 'offsets' of {file} must rise from 0 to the number of rows, {total}, with one more entry than "
            f"there are sequences, got {len(offsets)} from {offsets[:1].tolist()} to {offsets[-1:].tolist()}"
        )
    return offsets[1:]


@contextmanager
def _open_npz(file: Path) -> Iterator[Entries]:
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
    except (ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"{file} is damaged or no archive of NumPy; write it with numpy.savez") from error
    yield {name: partial(_read_npz, name, file) for name in names}


def _read_npz(name: str, file: Path) -> NDArray:
    try:
        array = read_arrays(file, [name])[name]
    except (KeyError, ValueError) as error:
        if str(error).startswith("Object arrays"):
            raise _NoEmbeddingsError(
                f"entry {name!r} of {file} cannot be read. Arrays of Python objects are refused, as they can run code; "
                "store embeddings as one array of floats with 'lengths', and labels as numbers or text"
            ) from error
        # numpy's advice to trust the pickles of a file is not ours
        reason = "it has no header of NumPy" if "allow_pickle" in str(error) else error
        raise ValueError(f"entry {name!r} of {file} is damaged: {reason}") from error
    if not isinstance(array, np.ndarray):
        raise _NoEmbeddingsError(f"entry {name!r} of {file} is no array of NumPy")
    return array


@contextmanager
def _open_safetensors(file: Path) -> Iterator[Entries]:
    safetensors = _need("safetensors", "bert")
    try:
        opened = safetensors.safe_open(file, framework="pt")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is damaged or no file of safetensors: {error}") from error
    with opened as archive:
        yield {name: partial(_read_safetensors, archive, name, file) for name in archive.keys()}  # noqa: SIM118


def _read_safetensors(archive: Any, name: str, file: Path) -> NDArray:
    tensor = archive.get_tensor(name)
    if str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()
    try:
        return tensor.numpy()
    except TypeError as error:
        raise _NoEmbeddingsError(f"entry {name!r} of {file} holds {tensor.dtype}, which NumPy does not have") from error


# Tables


def _read_parquet(file: Path, tokens: str | None, labels: str | None) -> tuple[Sequences, NDArray | None]:
    """Sequences and labels of a table."""
    arrow, parquet = _need("pyarrow", "parquet"), _need("pyarrow.parquet", "parquet")
    with _undamaged(arrow, file):
        table = parquet.ParquetFile(file)
    with table:
        schema = table.schema_arrow
        for argument, name in (("tokens", tokens), ("labels", labels)):
            if name is not None and name not in schema.names:
                raise ValueError(f"{argument}={name!r} is no column of {file}, which has {schema.names}")
        nested = [field.name for field in schema if _is_nested(arrow.types, field.type) and field.name != labels]
        if tokens is None and len(nested) != 1:
            raise ValueError(
                f"{file} must hold one column of lists of lists of floats, got {nested or 'none'} among "
                f"{schema.names}; name the embeddings with tokens="
            )
        name = nested[0] if tokens is None else tokens
        kind = schema.field(name).type
        if not _is_nested(arrow.types, kind):
            vectors = _is_list(arrow.types, kind) and arrow.types.is_floating(kind.value_type)
            remedy = f"; for one vector a sample, give estimators np.stack(pandas.read_parquet(path)[{name!r}])"
            raise ValueError(
                f"column {name!r} of {file} must hold lists of lists of floats, got {kind}{remedy if vectors else ''}"
            )
        with _undamaged(arrow, file):
            columns = table.read(columns=[name] if labels is None else [name, labels])
    parts = [part for chunk in columns[name].chunks if len(chunk) for part in _split(chunk, name, file)]
    if len({part.shape[1] for part in parts if len(part)}) > 1:
        raise ValueError(f"column {name!r} of {file} must hold tokens of one width")
    return parts, None if labels is None else _labels(arrow, columns[labels], labels, file)


@contextmanager
def _undamaged(arrow: Any, file: Path) -> Iterator[None]:
    """Errors of Arrow about what a file holds, some of them ``OSError`` without a number, become ``ValueError``."""
    try:
        yield
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise ValueError(f"{file} is damaged or no file of Parquet: {error}") from error


def _is_nested(types: Any, kind: Any) -> bool:
    """Whether a type of Arrow, or what it is stored as, like ``datasets.Array2D``, is lists of lists of floats."""
    kind = getattr(kind, "storage_type", kind)
    return _is_list(types, kind) and _is_list(types, kind.value_type) and types.is_floating(kind.value_type.value_type)


def _is_list(types: Any, kind: Any) -> bool:
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _split(chunk: Any, name: str, file: Path) -> list[NDArray]:
    """Sequences of a part of a column."""
    chunk = getattr(chunk, "storage", chunk)
    rows = chunk.flatten()
    numbers = rows.flatten()
    if chunk.null_count or rows.null_count or numbers.null_count:
        raise ValueError(f"column {name!r} of {file} must not have missing values")
    widths = np.unique(rows.value_lengths().to_numpy(zero_copy_only=False))
    if len(widths) != 1 or widths[0] == 0:
        raise ValueError(
            f"column {name!r} of {file} must hold tokens of one width, 1 or more, got widths {widths.tolist()}"
        )
    # A copy, as the memory of Arrow cannot be written to.
    flat = np.array(numbers.to_numpy(zero_copy_only=False)).reshape(-1, int(widths[0]))
    return np.split(flat, np.cumsum(chunk.value_lengths().to_numpy(zero_copy_only=False))[:-1])


def _labels(arrow: Any, column: Any, name: str, file: Path) -> NDArray:
    if column.null_count:
        raise ValueError(f"labels={name!r} has {column.null_count} missing values in {file}")
    if arrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if arrow.types.is_string(column.type) or arrow.types.is_large_string(column.type):
        return np.array(column.to_pylist(), dtype=np.str_)
    values = np.array(column.to_numpy())
    if values.dtype == object:
        raise ValueError(f"labels={name!r} of {file} must hold numbers or text, got {column.type}")
    return values


def _need(module: str, extra: str) -> Any:
    return required(module, "files of this kind", module.partition(".")[0], f"'convexformer[{extra}]'")

"""Which source reads what users pass for ``X``: paths, folders of shards, and objects of other packages."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convexformer.optional import required
from convexformer.validation import without_tensor
from convexformer_solvers.io.npz import read_array as read_npy
from convexformer_solvers.io.npz import read_arrays
from convexformer_solvers.linear_maps.source import Source

from .files import RESERVED, SUFFIXES, FileArray, choose, find_array, read_header, state_of, stored, torch_dtype
from .manifest import MANIFEST, read_array, read_manifest, shard_arrays
from .sources import ArraySource, ColumnSource, FileSource, ShardSource, hash_of

_HDF5 = (".h5", ".hdf5")
FILE_SUFFIXES = (*SUFFIXES, *_HDF5)


def open_source(X: Any) -> Source | None:
    """A source of the samples that an argument names, to be read some rows at a time.

    Parameters
    ----------
    X : path-like, array on a disk, or Source
        One of these:

        - the path of a ``.npy``, ``.npz``, ``.safetensors``, ``.h5`` or ``.hdf5`` file, or of a ``.zarr`` folder;
        - the path of a folder of shards, written by `write_shards`, or of ``.npy``, ``.npz`` and ``.safetensors`` files
          that are not hidden, which are read one after the other in the order of their names;
        - the path of a folder that ``datasets.Dataset.save_to_disk`` wrote, whose columns are its arrays;
        - an ``np.memmap``, an array of zarr, a data set of h5py;
        - a column of a ``datasets.Dataset``, or a data set with one column;
        - a `Source`, such as `Chunks`.

        In a file or folder with several arrays, one is named after a colon: ``"data.npz:X"``. Default: the only one,
        or the one called ``X``; in a folder of shards the one that its manifest names.

    Returns
    -------
    Source or None
        Its samples have the shape (n_tokens, d), with d = 1 when there are two dimensions. None for anything else, for
        example an array in memory.

    Raises
    ------
    FileNotFoundError
        If there is nothing at a path.
    ModuleNotFoundError
        If the package for a kind of file is absent.
    ValueError
        If a file is damaged, truncated or compressed, holds something else than floats and integers, or shards differ,
        or an object holds several arrays.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "data.npy")
    ...     np.save(path, np.arange(12, dtype=np.float16).reshape(3, 2, 2))
    ...     source = open_source(path)
    ...     source.shape, source.dtype, source.read(slice(1, 2))
    ((3, 2, 2), torch.float16, tensor([[[4., 5.], [6., 7.]]], dtype=torch.float16))
    >>> open_source(np.ones((3, 2))) is None
    True
    """
    if isinstance(X, Source):
        return X
    if isinstance(X, (str, os.PathLike)):
        return _open_path(os.fspath(X))
    if isinstance(X, np.memmap):
        return _open_memmap(X)
    package, name = type(X).__module__.partition(".")[0], type(X).__name__
    kind = f"{package}.{name}"
    if package == "zarr" and hasattr(X, "dtype"):
        return ArraySource(partial(_given, X), "X")
    if kind == "h5py.Dataset":
        return ArraySource(partial(_given, X), "X", partial(_of_file, X.file.filename, X.name))
    if kind == "datasets.Dataset":
        if len(X.column_names) != 1:
            raise ValueError(f"X must have one column, got {X.column_names}; pass one of them, as in X['name']")
        return ColumnSource(X, X.column_names[0])
    if kind == "datasets.Column":
        return ColumnSource(X.source, X.column_name)
    if kind.startswith("datasets.Iterable"):
        raise ValueError(
            "X must tell its number of samples; give Chunks(make), where make returns chunks of this stream"
        )
    if isinstance(X, Mapping) or kind == "zarr.Group":
        raise ValueError(f"X must be one array, got a {name} of {list(X)}; pass one of its arrays, as in X['name']")
    return None


def without_name(path: str) -> tuple[str, str | None]:
    """A path, and the name of an array behind it after a colon."""
    file, _, name = path.rpartition(":")
    return (file, name) if not os.path.exists(path) and os.path.exists(file) else (path, None)


def _open_path(path: str) -> Source:
    path, name = without_name(path)
    place = f"X={path!r}"
    kind = Path(path).suffix
    if not os.path.exists(path):
        raise FileNotFoundError(f"{place} is no file and no folder")
    path = os.fspath(Path(path).absolute())  # the working directory may change before the samples are read
    if kind == ".zarr":
        return ArraySource(partial(_find_zarr, path, name, place), place, partial(_of_folder, path, name))
    if kind in _HDF5 and not os.path.isdir(path):
        find = partial(_find_hdf5, path, name, place)
        return ArraySource(find, place, partial(_of_file, path, name), is_watched=True)
    if os.path.isdir(path):
        return _open_folder(path, name, place)
    if kind not in SUFFIXES:
        raise ValueError(f"{place} must be a folder or end in {', '.join((*SUFFIXES, *_HDF5))} or .zarr")
    return FileSource(find_array(path, name, place))


def _open_folder(folder: str, name: str | None, place: str) -> Source:
    if (table := _saved_table(folder, place)) is not None:
        return ColumnSource(table, choose(table.column_names, name, place))
    manifest = Path(folder) / MANIFEST
    if manifest.exists():
        arrays = shard_arrays(folder, name, place)
        fingerprint: str | None = hashlib.sha256(manifest.read_bytes() + repr(name).encode()).hexdigest()
    else:
        files = _shard_files(folder)
        if not files:
            raise ValueError(f"{place} must hold {', '.join(SUFFIXES)} files, or be a .zarr folder; it has none")
        _refuse_unfinished(folder, files, place)
        arrays = [find_array(os.path.join(folder, file), name, f"shard {file!r} of {place}") for file in files]
        fingerprint = None
    names = [os.path.basename(array.path) for array in arrays]
    return ShardSource([FileSource(array) for array in arrays], names, fingerprint)


def _shard_files(folder: str) -> list[str]:
    """Names of the files of a folder without a manifest, in their order."""
    return sorted(filter(_is_shard, os.listdir(folder)))


def _is_shard(file: str) -> bool:
    """Whether a name is that of a shard; a hidden file, as macOS writes beside each, is none."""
    return file.endswith(SUFFIXES) and not file.startswith(".")


def would_be_shard(file: Path, path: Path) -> bool:
    """Whether a file, once written, is read among the shards of the folder of a path, which no manifest lists."""
    folder = Path(without_name(os.fspath(path))[0])
    is_listed = folder.suffix == ".zarr" or any((folder / name).exists() for name in (MANIFEST, "dataset_info.json"))
    is_read = _is_shard(file.name) and folder.is_dir() and not is_listed
    return is_read and file.absolute().parent.resolve() == folder.resolve()


def _saved_table(folder: str, place: str) -> Any:
    """What ``datasets.Dataset.save_to_disk`` wrote to a folder; None where it wrote nothing."""
    if (Path(folder) / "dataset_dict.json").exists():
        parts = sorted(part.name for part in os.scandir(folder) if part.is_dir())
        raise ValueError(f"{place} must hold one data set, got {parts}; give the folder of one, such as {parts[0]!r}")
    return _need("datasets").load_from_disk(folder) if (Path(folder) / "dataset_info.json").exists() else None


def _refuse_unfinished(folder: str, files: list[str], place: str) -> None:
    for file in files:
        if file.endswith(".safetensors"):
            header, _ = read_header(os.path.join(folder, file), f"shard {file!r} of {place}")
            if "convexformer" in (header.get(RESERVED) or {}):
                raise ValueError(
                    f"{place} has shards but no {MANIFEST}, so not all are written; the call that writes them goes on"
                )


def _open_memmap(X: np.memmap) -> Source | None:
    """The file of a memory map, read without the map where its rows lie one after the other."""
    memory = X._mmap  # type: ignore[attr-defined]
    if memory is None or X.dtype == bool:  # computed from one, and in memory; a file of numbers has no booleans
        return None
    if X.filename is None or X.mode == "c" or not X.flags.c_contiguous or X.dtype.hasobject:
        return ArraySource(partial(_given, X), "X")
    # The offset of a view is that of its parent, so addresses tell where it lies.
    begin = np.frombuffer(memory, np.uint8).ctypes.data
    mapped_from = X.offset - X.offset % mmap.ALLOCATIONGRANULARITY
    offset = mapped_from + X.ctypes.data - begin
    place, is_writable = f"X, a memory map of {os.fspath(X.filename)!r},", X.mode != "r"
    return FileSource(FileArray(os.fspath(X.filename), place, offset, X.shape, torch_dtype(X.dtype, "X"), is_writable))


def array_of(values: Any, argument: str, name: str | None = None) -> Any:
    """The whole array that a path names after a colon, by default `name` or `argument`; anything else as it is."""
    if not isinstance(values, (str, os.PathLike)):
        return values
    path, after_colon = without_name(os.fspath(values))
    place, name, kind = f"{argument}={os.fspath(values)!r}", after_colon or name or argument, Path(path).suffix
    if not os.path.exists(path):
        of = f"{argument} must hold a number per sample, or a label, or be the path of an array"
        raise ValueError(f"{of}; there is no file and no folder {os.fspath(values)!r}")
    try:
        if kind == ".npy" and after_colon is None:
            return read_npy(path)
        found = named_array(path, name)
    except ValueError as error:  # numpy's advice to trust the pickles of a file is not ours
        reason = "it holds Python objects" if "allow_pickle" in str(error) else error
        raise ValueError(f"{place} cannot be read: {reason}") from error
    if found is None or found.dtype.hasobject:  # text of HDF5 would be bytes
        raise ValueError(f"{place} holds no array {name!r} that can be read from there; give the array itself")
    return found


def named_array(path: str, name: str) -> NDArray | None:
    """An array of a file or folder, whole; None where there is none of that name."""
    kind, place = Path(path).suffix, repr(path)
    if kind == ".npz":
        entry = read_arrays(path, [name]).get(name)
        return entry if isinstance(entry, np.ndarray) else None  # other files in it are bytes
    if os.path.isdir(path) and kind != ".zarr":
        return _named_in_folder(path, name, place)
    if kind == ".safetensors":
        header, begin = read_header(path, place)
        found = stored(path, header, begin, name, place) if name in header else None
        return None if found is None else without_tensor(found.read(0, found.shape[0]), name)
    if kind != ".zarr" and kind not in _HDF5:
        return None
    file = _need("zarr").open(path, mode="r") if kind == ".zarr" else _open_hdf5(path, place)
    found = None if hasattr(file, "dtype") else file.get(name)
    return np.asarray(found) if hasattr(found, "dtype") else None  # a group would be the names of what it holds


def _named_in_folder(folder: str, name: str, place: str) -> NDArray | None:
    if (table := _saved_table(folder, place)) is not None:
        return np.asarray(table.with_format(None)[name][:]) if name in table.column_names else None
    if (Path(folder) / MANIFEST).exists():
        return without_tensor(read_array(folder, name), name) if name in read_manifest(folder)["arrays"] else None
    files = _shard_files(folder)
    _refuse_unfinished(folder, files, place)
    found = [named_array(os.path.join(folder, file), name) for file in files]
    parts = [part for part in found if part is not None]
    return np.concatenate(parts) if parts else None


def _find_zarr(path: str, name: str | None, place: str) -> Any:
    found = _need("zarr").open(path, mode="r")
    if hasattr(found, "dtype"):
        if name is not None:
            raise ValueError(f"{place} holds one array without a name; leave out ':{name}'")
        return found
    if name is not None and "/" in name and hasattr(found.get(name), "dtype"):
        return found[name]
    return found[choose([key for key, _ in found.arrays()], name, place)]


def _find_hdf5(path: str, name: str | None, place: str) -> Any:
    h5py, file = _need("h5py"), _open_hdf5(path, place)
    names: list[str] = []
    file.visititems(lambda key, item: names.append(key) if isinstance(item, h5py.Dataset) else None)
    return file[choose(names, None if name is None else name.strip("/"), place)]


def _open_hdf5(path: str, place: str) -> Any:
    try:
        return _need("h5py").File(path, "r")
    except OSError as error:
        raise ValueError(f"{place} is truncated, damaged or no file of HDF5: {error}") from error


def _given(X: Any) -> Any:
    return X


def _need(package: str) -> Any:
    return required(package, "files of this kind", "'convexformer[disk]'")


def _of_file(path: str, name: str | None) -> str:
    return hash_of([os.path.basename(path), *state_of(os.stat(path)), name])


def _of_folder(path: str, name: str | None) -> str:
    files = [file for file in sorted(Path(path).rglob("*")) if file.is_file()]
    return hash_of([name, *([str(file.relative_to(path)), *state_of(file.stat())] for file in files)])

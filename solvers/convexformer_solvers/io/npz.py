"""Archives of numpy arrays (``.npz``) with a JSON header, without pickles, replaced only once written in full."""

from __future__ import annotations

import errno
import json
import os
import uuid
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from convexformer_solvers.distributed.ranks import interrupts_held
from convexformer_solvers.memory import free_memory


def write_archive(
    path: str | os.PathLike[str], content: str, header: Mapping[str, Any], arrays: Mapping[str, NDArray]
) -> None:
    """Write arrays without objects and a header for JSON to a file; an old one stays until the new one is whole.

    `content` says what the file holds, for example ``"convexformer model"``. Ctrl-C waits until the file is written.
    ``TypeError`` if header or arrays hold something else.

    Examples
    --------
    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = os.path.join(folder, "x.npz")
    ...     write_archive(file, "example", {"n": 3}, {"x": np.arange(3)})
    ...     read_archive(file, "example")
    ({'n': 3}, {'x': array([0, 1, 2])})
    """
    text = json.dumps({**header, "content": content}, default=plain)
    objects = [name for name, array in arrays.items() if array.dtype.hasobject]
    if objects:
        raise TypeError(f"arrays must hold numbers or text, not objects; {objects} hold objects")
    # numpy, interrupted as it writes, raises an error of its own in the place of Ctrl-C
    with interrupts_held(), replacing(Path(path)) as partial, open(partial, "wb") as file:
        np.savez(file, header=np.array(text), **arrays)  # type: ignore[arg-type]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, whose file takes the place of an old one at the end; after an error nothing has changed."""
    if path.exists() and not (path.is_file() or path.is_dir()):  # such as /dev/null, for a superuser
        raise OSError(f"{str(path)!r} is a device or pipe, which a file would replace; give the name of a file")
    target = Path(os.path.realpath(path))  # a link stays one
    # A name of its own, as another process may write there, too.
    partial = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield partial
        os.replace(partial, target)
    except OSError as error:
        if error.filename is not None:
            raise
        # that of a full disk names no file
        raise OSError(f"{str(path)!r} cannot be written, what was there is unchanged: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def read_archive(path: str | os.PathLike[str], content: str) -> tuple[dict[str, Any], dict[str, NDArray]]:
    """Header and arrays that ``write_archive`` wrote; ``ValueError`` if the file is damaged or of other content."""
    try:
        arrays = read_arrays(path)
        header = parsed(str(arrays.pop("header", "null")))
    except ValueError as error:
        # numpy's advice to trust the pickles of a file is not ours
        reason = "it holds no plain arrays" if "allow_pickle" in str(error) else error
        raise ValueError(f"{path} is not a saved {content}, or is damaged: {reason}") from error
    other = header.pop("content", None) if isinstance(header, dict) else None
    if other != content:
        holds = f"a saved {other}" if isinstance(other, str) else f"{len(arrays)} arrays, {', '.join(arrays)}"
        raise ValueError(f"{path} is not a saved {content}; it holds {holds:.200}")
    return header, arrays


def parsed(text: str | bytes) -> Any:
    """What a text in JSON says; ``ValueError`` if it is none, or is nested deeper than Python reads."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error


def read_arrays(path: str | os.PathLike[str], names: Collection[str] | None = None) -> dict[str, NDArray]:
    """Plain arrays of an ``.npz`` file, by default all; ``ValueError`` where it is damaged or of another kind."""
    with _loaded(path) as loaded:
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array")
        return {name: _whole(loaded, name) for name in loaded.files if names is None or name in names}


def _whole(archive: Any, name: str) -> NDArray:
    """An entry that ends with its array: only at the end of an entry does zipfile compare the checksum."""
    entry = archive.zip.getinfo(f"{name}.npy" if f"{name}.npy" in archive.zip.namelist() else name)
    if entry.compress_type != zipfile.ZIP_STORED:  # which may be far larger than the file
        free = free_memory(torch.device("cpu"))
        if free is not None and entry.file_size > free:
            raise ValueError(f"{name!r} takes {entry.file_size / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free")
    with archive.zip.open(entry) as file:
        _check_size(file, entry.file_size, is_exact=True)
    return archive[name]


def _check_size(file: IO[bytes], actual: int, *, is_exact: bool) -> None:
    """Raise ``ValueError`` unless an array that begins here has as many bytes as it should, or at least so many."""
    begins = file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX
    file.seek(0)
    if not begins:
        return
    shape, _, dtype = npy_header(file)
    size = file.tell() + prod(shape) * dtype.itemsize
    if not dtype.hasobject and (actual < size or (is_exact and actual > size)):
        raise ValueError(f"Failed to read an array, which by its header takes {size} bytes: there are {actual}")
    file.seek(0)


def npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether in Fortran order, and type of an array of NumPy that begins where the file stands."""
    major, _ = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    if min(shape, default=0) < 0:
        raise ValueError(f"its shape must have no negative numbers, got {shape}")
    return shape, is_fortran, dtype


def read_array(path: str | os.PathLike[str]) -> NDArray:
    """The plain array of an ``.npy`` file; ``ValueError`` where it is damaged or of another kind."""
    with _loaded(path) as loaded:
        if not isinstance(loaded, np.ndarray):
            raise ValueError("it is an archive of arrays")
        return loaded


@contextmanager
def _loaded(path: str | os.PathLike[str]) -> Iterator[Any]:
    """What numpy finds in a file; its errors about what the file holds become ``ValueError``."""
    with open(path, "rb") as raw:  # numpy leaves a damaged file open
        try:
            _check_size(raw, os.fstat(raw.fileno()).st_size, is_exact=False)  # before numpy asks for the memory
            yield np.load(raw, allow_pickle=False)
        except OSError as error:
            # A damaged offset is invalid; what looks like damaged data of bzip2 has no number.
            if error.errno not in (errno.EINVAL, None):
                raise
            raise ValueError(str(error)) from error
        except (MemoryError, ValueError):
            raise
        except Exception as error:  # numpy and zipfile do not check what they read: errors of any type
            raise ValueError(f"{type(error).__name__}: {error}") from error


def plain(value: Any) -> Any:
    """Numpy values and paths as JSON has them; the ``default`` of ``json.dumps``."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(type(value).__name__)

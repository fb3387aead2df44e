"""Files of arrays with a JSON header: no pickles, replaced only when everything has been written."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Names of arrays that messages show.
_SHOWN = 8


def write_archive(
    path: str | os.PathLike[str], content: str, header: Mapping[str, Any], arrays: Mapping[str, NDArray]
) -> None:
    """Write arrays and a header to an ``.npz`` file; an old file of that name stays whole until the new one is.

    Ctrl-C takes effect once the file is written.

    Parameters
    ----------
    path : str or path-like
        The file.
    content : str
        What the file holds, for example ``"convexformer model"``; ``read_archive`` asks for the same.
    header : mapping
        Whatever JSON holds, numpy numbers and paths.
    arrays : mapping of str to ndarray
        Plain arrays of any shape, under names other than ``"header"``.

    Raises
    ------
    TypeError
        If the header holds something that JSON cannot, or an array holds objects.
    OSError
        If the file cannot be written.

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
    with _interrupts_held_back(), replacing(Path(path)) as partial, open(partial, "wb") as file:
        np.savez(file, header=np.array(text), **arrays)  # type: ignore[arg-type]


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let Ctrl-C wait for the end: numpy, interrupted as it writes, hides that behind an error of its own."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *arrived: waiting.append(arrived))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if waiting:
        handler(*waiting[0])


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, whose file takes the place of an old one once written; where that fails nothing changes."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_archive(path: str | os.PathLike[str], content: str) -> tuple[dict[str, Any], dict[str, NDArray]]:
    """Read what ``write_archive`` wrote.

    Parameters
    ----------
    path : str or path-like
        The file.
    content : str
        What the file must hold.

    Returns
    -------
    header : dict
    arrays : dict of str to ndarray

    Raises
    ------
    ValueError
        If the file is of another kind, or damaged.
    OSError
        If the file cannot be read.
    """
    try:
        arrays = read_arrays(path)
        found = sorted(arrays)
        header = json.loads(str(arrays.pop("header")))
    except KeyError as error:
        raise ValueError(f"{path} is not a saved {content}; it holds {_some(found)}") from error
    except ValueError as error:
        # numpy's advice to trust the pickles of a file is not ours
        reason = "it holds no plain arrays" if "allow_pickle" in str(error) else error
        raise ValueError(f"{path} is not a saved {content}, or is damaged: {reason}") from error
    other = header.pop("content", None) if isinstance(header, dict) else None
    if other != content:
        holds = f"a saved {other}" if isinstance(other, str) else _some(found)
        raise ValueError(f"{path} is not a saved {content}; it holds {holds}")
    return header, arrays


def _some(names: list[str]) -> str:
    """The first of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{names[:_SHOWN]}{more}"


def read_arrays(path: str | os.PathLike[str]) -> dict[str, NDArray]:
    """Plain arrays of an ``.npz`` file; ``ValueError`` where it is damaged or of another kind."""
    # Opened here: numpy leaves a damaged file open.
    with open(path, "rb") as raw:
        try:
            loaded = np.load(raw, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            return dict(loaded)
        except OSError as error:
            # A damaged offset lies before the beginning; what looks like damaged data of bzip2 has no number.
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

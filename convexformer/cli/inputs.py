"""What users of the command line give: seeds, files and folders."""

from __future__ import annotations

import argparse
import mmap
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np


class CommandError(Exception):
    """A mistake in what the user asked for; shown without a traceback.

    Examples
    --------
    ``main`` prints the message and returns 1. Who calls a command by itself catches it:

    >>> from convexformer.cli import build_parser
    >>> options = build_parser().parse_args(["fit", "not_there.npz"])
    >>> try:
    ...     report = options.run(options)
    ... except CommandError as error:
    ...     print(error)
    no file at not_there.npz
    """


def seed(text: str) -> int:
    """A seed as numpy takes it."""
    value = int(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to {2**32 - 1}, got {value}")
    return value


def memory(text: str) -> int:
    """A memory limit, of at least a page: a smaller number is meant in another unit than bytes."""
    value = int(text)
    if value < mmap.PAGESIZE:
        raise argparse.ArgumentTypeError(
            f"must be in bytes, such as 4000000000, and at least a page of memory, {mmap.PAGESIZE}, got {value}"
        )
    return value


def check_target(path: Path, *inputs: Path | None) -> None:
    """Raise unless a file that is none of the inputs can be written there."""
    if any(other is not None and _is_same(path, file_of(other)) for other in inputs):
        raise CommandError(f"{path} is read here and would be replaced; give another name to write to")
    if path.is_dir():
        raise CommandError(f"{path} is a folder; give the name of a file")
    if path.exists() and not path.is_file():
        raise CommandError(f"{path} is a device or pipe, which a file would replace; give the name of a file")
    if not path.parent.is_dir():
        raise CommandError(f"no folder at {path.parent}; make it first or give another name than {path}")
    if not os.access(path.parent, os.W_OK):
        raise CommandError(f"{path.parent} cannot be written to; give another name than {path}")


def file_of(path: Path) -> Path:
    """The file or folder of a path that may name an array in it after a colon."""
    file = os.fspath(path).rpartition(":")[0]
    return Path(file) if file and not path.exists() else path


def _is_same(path: Path, other: Path) -> bool:
    """Whether two paths name one file, which need not exist."""
    if path.exists() and other.exists():
        return path.samefile(other)
    return path.resolve() == other.resolve()


def check_folder(path: Path) -> None:
    """Raise unless there is such a folder, which can be written to, or one can be made."""
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not there.is_dir():
        raise CommandError(f"{there} is a file; give the name of a folder with --out")
    if not os.access(there, os.W_OK):
        raise CommandError(f"{there} cannot be written to; give another folder with --out")


def load_arrays(path: Path, wanted: tuple[str, ...], names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """The arrays of a file, among them those wanted; by default all."""
    arrays = _read_arrays(path, names)
    missing = [name for name in wanted if name not in arrays]
    if missing:
        found = sorted(_read_arrays(path))
        raise CommandError(f"{path} must hold the arrays {list(wanted)}; missing: {missing}, found: {found}")
    return arrays


def _read_arrays(path: Path, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """The arrays of a file, or those of the names that it holds."""
    if not path.exists():
        raise CommandError(f"no file at {path}")
    from convexformer_solvers.io.npz import read_arrays

    try:
        return read_arrays(path, names)
    except (OSError, ValueError) as error:
        raise CommandError(_why_unreadable(path, str(error), names)) from error


_PER_SAMPLE = ("y", "sample_weight", "lengths")  # arrays of a file besides the samples


def load_data(path: Path, targets: Path | None, in_memory: bool) -> tuple[Any, dict[str, Any]]:
    """The samples of a file or folder, and the other arrays: ``y``, and ``sample_weight`` where there is one.

    A file with both is read into memory if it may be. Samples of all else are the path, from which they are read as
    they are needed; their targets are in a file, or in a folder of shards as the array ``y``.
    """
    file = file_of(path)
    if targets is None and in_memory and file == path and not path.is_dir():
        try:
            arrays = load_arrays(path, ("X", "y"))
        except CommandError as error:
            if not _is_of_samples(path):
                raise
            raise CommandError(f"{error}; to read X from {path}, give a file with y: --targets y.npy") from error
        return arrays.pop("X"), arrays
    if not file.exists():
        raise CommandError(f"no file or folder at {file}")
    if targets is not None:
        return os.fspath(path), _load_targets(targets)
    if file.is_dir():
        return os.fspath(path), _load_shard_targets(file)
    if file.suffix == ".npz":
        arrays = _read_arrays(file, _PER_SAMPLE)
        if "y" in arrays:
            return os.fspath(path), arrays
    raise CommandError(f"{path} holds no targets; give a file with them: --targets y.npy")


def _load_targets(path: Path) -> dict[str, Any]:
    if path.suffix != ".npy":
        if path.is_file() and path.suffix != ".npz" and not zipfile.is_zipfile(path):
            makes_one = f"np.save({path.with_suffix('.npy').name!r}, y)"
            raise CommandError(f"--targets must be an .npy or .npz file, got {path}; {makes_one} makes one")
        return load_arrays(path, ("y",))
    if not path.exists():
        raise CommandError(f"no file at {path}")
    from convexformer_solvers.io.npz import read_array

    try:
        return {"y": read_array(path)}
    except (OSError, ValueError) as error:
        # numpy's advice to trust the pickles of a file is not ours
        makes_one = f"np.save({path.name!r}, y.astype(float)) makes one, for labels y.astype(str)"
        reason = makes_one if "allow_pickle" in str(error) else error
        raise CommandError(f"{path} is not an .npy file of numbers or text: {reason}") from error


def _load_shard_targets(folder: Path) -> dict[str, Any]:
    arrays = _shard_arrays(folder, "y", "sample_weight")
    if "y" not in arrays:
        raise CommandError(
            f"{folder} holds no array y; give a file with the targets: --targets y.npy, or write the shards with "
            "write_shards(folder, lambda rows: {'X': ..., 'y': ...}, ...)"
        )
    return arrays


def _shard_arrays(folder: Path, *wanted: str) -> dict[str, Any]:
    """Those of the wanted arrays that a folder of shards holds."""
    from convexformer.storage import read_array, read_manifest

    names = read_manifest(folder)["arrays"] if (folder / "manifest.json").exists() else {}
    return {name: read_array(folder, name).numpy() for name in wanted if name in names}


def load_samples(path: Path, targets: Path | None, in_memory: bool) -> dict[str, Any]:
    """The arrays of an .npz file; of all else the path, as the samples ``X``, with the targets of a folder of shards.

    Targets and weights are those of the file `targets` where it is given.

    Samples of a path are read as they are needed, also those of an .npz file that may not be read into memory.
    """
    file, own = file_of(path), ("y", "sample_weight") if targets is None else ()
    arrays = {} if targets is None else _load_targets(targets)
    if file.is_dir():
        return arrays | {"X": os.fspath(path), **_shard_arrays(file, *own)}
    if file != path or (file.suffix == ".npz" and not in_memory):
        return arrays | {
            "X": os.fspath(path),
            **(_read_arrays(file, (*own, "lengths")) if file.suffix == ".npz" else {}),
        }
    if _is_of_samples(path):
        return arrays | {"X": os.fspath(path)}
    return arrays | load_arrays(path, ("X",), None if targets is None else ("X", "lengths"))


def _is_of_samples(path: Path) -> bool:
    """Whether there is a file of which samples alone are read."""
    from convexformer.storage.opening import FILE_SUFFIXES

    return path.is_file() and path.suffix in FILE_SUFFIXES and path.suffix != ".npz"


def samples_of(arrays: dict[str, Any], path: Path, is_probe: bool) -> Any:
    """The samples of a file or folder: ``X``, with the lengths of the samples for a probe where there are any."""
    path, lengths = file_of(path), arrays.get("lengths")
    if lengths is None and (is_probe or not _holds_activations(path)):  # which are zero beyond their lengths
        lengths = _lengths_in(path)
    if lengths is None:
        return arrays["X"]
    if not is_probe:
        raise CommandError(f"{path} holds lengths, which probes read (fit --probe); for others fill X up with zeros")
    return arrays["X"], lengths


def _holds_activations(path: Path) -> bool:
    """Whether a path is a folder that ``convexformer activations`` has written."""
    from convexformer.datasets._activations import KIND
    from convexformer.storage import read_manifest

    return (path / "manifest.json").exists() and read_manifest(path)["info"].get("kind") == KIND


def _lengths_in(path: Path) -> Any:
    """The lengths of samples that a file or folder holds; None where it holds none."""
    from convexformer.storage.files import SUFFIXES
    from convexformer.storage.opening import named_array

    if path.suffix == ".npz":
        return _read_arrays(path, ("lengths",)).get("lengths")
    if not path.is_dir() or path.suffix == ".zarr":
        return named_array(os.fspath(path), "lengths")
    if (path / "manifest.json").exists():
        return _shard_arrays(path, "lengths").get("lengths")
    shards = [_lengths_in(file) for file in sorted(path.iterdir()) if file.suffix in SUFFIXES]
    present = [lengths for lengths in shards if lengths is not None]
    return np.concatenate(present) if present else None


def _why_unreadable(path: Path, reason: str, names: tuple[str, ...] | None) -> str:
    """Why a file of arrays cannot be read, and what to do, without numpy's advice to trust its pickles."""
    if "allow_pickle" not in reason:
        return f"{path} is not an .npz file of plain arrays: {reason}"
    if not zipfile.is_zipfile(path):
        name = path.with_suffix(".npz").name  # numpy would append it to any other
        return f"{path} is not an .npz file of plain arrays; np.savez({name!r}, X=X, y=y) makes one"
    objects = _arrays_of_objects(path, names)
    return (
        f"{path}: the arrays {objects} hold objects, which are not read; save text as {objects[0]}.astype(str) and "
        f"numbers as {objects[0]}.astype(float)"
    )


def _arrays_of_objects(path: Path, names: tuple[str, ...] | None) -> list[str]:
    objects = []
    with np.load(path, allow_pickle=False) as archive:
        for name in archive.files if names is None else names:
            try:
                archive.get(name)
            except ValueError:
                objects.append(name)
    return objects

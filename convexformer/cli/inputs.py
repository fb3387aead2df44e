"""What users of the command line give: seeds, files and folders."""

from __future__ import annotations

import argparse
import mmap
import os
import warnings
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
    from convexformer_solvers.memory import as_bytes

    try:
        value = as_bytes(text)
    except ValueError:
        value = None
    if value is None or value < mmap.PAGESIZE:
        raise argparse.ArgumentTypeError(
            f"must be in bytes, such as 4000000000, or have a unit, such as 500MB or 2GiB, and be at least a page of "
            f"memory, {mmap.PAGESIZE} bytes, got {text!r}"
        )
    return value


def named_path(text: str) -> Path:
    """A path; no text, as of a variable that is not set, would be the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("must be a path, got an empty text")
    return Path(text)


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


def check_no_shard(path: Path, *inputs: Path | None) -> None:
    """Raise where a file that is written there would be read among the shards of an input."""
    from convexformer.storage.opening import would_be_shard

    for other in inputs:
        if other is not None and would_be_shard(path, other):
            raise CommandError(f"{path} would be read as one of the shards of {other}; give a name in another folder")


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


TARGETS = (
    ".npy of y; or .npz or another file or folder with y, and maybe sample_weight and, for a probe, lengths or "
    "mask, which DATA may hold, too; FILE:NAME is y of another name"
)
_OWN = ("y", "sample_weight")  # of a file or folder besides the samples
_REAL = ("lengths", "mask")  # say which tokens are real
_PER_SAMPLE = (*_OWN, *_REAL)  # of the file of --targets


def load_data(path: Path, targets: Path | None, in_memory: bool) -> tuple[Any, dict[str, Any]]:
    """The samples of a file or folder, and the other arrays: ``y``, and ``sample_weight`` where there is one.

    A file with both is read into memory if it may be. Samples of all else are the path, from which they are read as
    they are needed; their targets are in a file, or beside the samples as the array ``y``.
    """
    file = file_of(path)
    if targets is None and in_memory and _is_file_of_numpy(path):
        try:
            arrays = _known(load_arrays(path, ("X", "y")), path)
        except CommandError as error:
            if not (path.suffix == ".npy" and path.is_file()):
                raise
            raise CommandError(f"{error}; to read X from {path}, give a file with y: --targets y.npy") from error
        return arrays.pop("X"), arrays
    if not file.exists():
        raise CommandError(f"no file or folder at {file}")
    arrays = _arrays_in(file, *_OWN) if targets is None else _load_targets(targets)
    if "y" in arrays:
        return os.fspath(path), arrays
    remedy = "give a file with them: --targets y.npy"
    if file.is_dir():
        remedy += ", or write the shards with write_shards(folder, lambda rows: {'X': ..., 'y': ...}, ...)"
    raise CommandError(f"{path} holds no targets y; {remedy}")


def _load_targets(path: Path) -> dict[str, Any]:
    """The targets that a path names, and what its file or folder holds besides of each sample."""
    file = file_of(path)
    if not file.exists():
        raise CommandError(f"no file at {path}")
    if not _is_file_of_numpy(path):
        name = "y" if file == path else os.fspath(path).rpartition(":")[2]
        if (y := _array_in(file, name)) is None:
            raise CommandError(
                f"--targets={os.fspath(path)!r} holds no array {name!r} of numbers or text; give an .npy file of y, or "
                f"{file}:NAME with the name of one that it holds"
            )
        return _arrays_in(file, *_PER_SAMPLE) | {"y": y}
    if path.suffix != ".npy":
        if path.suffix != ".npz" and not zipfile.is_zipfile(path):
            makes_one = f"np.save({path.with_suffix('.npy').name!r}, y)"
            raise CommandError(
                f"--targets must be an .npy or .npz file, or another kind of DATA, got {path}; {makes_one} makes one"
            )
        return load_arrays(path, ("y",), _PER_SAMPLE)
    from convexformer_solvers.io.npz import read_array

    try:
        return {"y": read_array(path)}
    except (OSError, ValueError) as error:
        # numpy's advice to trust the pickles of a file is not ours
        makes_one = f"np.save({path.name!r}, y.astype(float)) makes one, for labels y.astype(str)"
        reason = makes_one if "allow_pickle" in str(error) else error
        raise CommandError(f"{path} is not an .npy file of numbers or text: {reason}") from error


def load_samples(path: Path, targets: Path | None, in_memory: bool) -> dict[str, Any]:
    """The arrays of an .npz file; of all else the path, as the samples ``X``, with the targets beside them.

    Targets and weights are those of the file `targets` where it is given.

    Samples of a path are read as they are needed, also those of an .npz file that may not be read into memory.
    """
    file, own = file_of(path), _OWN if targets is None else ()
    arrays = {} if targets is None else _load_targets(targets)
    if file.is_dir() or _has_names(file) or (file.suffix == ".npz" and (file != path or not in_memory)):
        return arrays | {"X": os.fspath(path), **_arrays_in(file, *own)}
    if file != path or (path.suffix == ".npy" and path.is_file()):
        return arrays | {"X": os.fspath(path)}
    return arrays | _known(load_arrays(path, ("X",), None if targets is None else ("X", *_REAL)), path)


def _known(arrays: dict[str, Any], path: Path) -> dict[str, Any]:
    """Those arrays whose names say what they are for, with a warning of others, as of a mask of another name."""
    known = ("X", *_PER_SAMPLE)
    if others := sorted(set(arrays) - set(known)):
        warnings.warn(f"the arrays {others} of {path} are not used; those used are {list(known)}", stacklevel=2)
    return {name: array for name, array in arrays.items() if name in known}


def _is_file_of_numpy(path: Path) -> bool:
    """Whether a path is no folder, no name in a file and no file of safetensors or HDF5; nothing need be there."""
    return file_of(path) == path and not path.is_dir() and not _has_names(path)


def _has_names(path: Path) -> bool:
    """Whether there is a file of safetensors or HDF5, whose arrays have names."""
    from convexformer.storage.opening import FILE_SUFFIXES

    return path.is_file() and path.suffix in FILE_SUFFIXES and path.suffix not in (".npy", ".npz")


def samples_of(arrays: dict[str, Any], path: Path, targets: Path | None, is_probe: bool) -> Any:
    """The samples of a file or folder: ``X``, with their lengths or their mask for a probe where there is one."""
    real: dict[str, Any] = {}
    _check_texts(file_of(path), arrays.get("y"), targets)
    for name in _REAL:
        place, found = file_of(path), None
        if is_probe or _activations(place) is None:  # which are zero beyond their lengths
            found = _array_in(place, name)
        if found is None and (found := arrays.get(name)) is not None:
            place = file_of(targets or path)
        if found is not None:
            if not is_probe:
                raise CommandError(
                    f"{place} holds {name}, which probes read (fit --probe); for others fill X up with zeros"
                )
            real[name] = found
    if len(real) == len(_REAL) and not _is_mask_of(**real):
        raise CommandError(f"lengths and mask of {path} say that other tokens are real; leave one of the two out")
    return (arrays["X"], next(iter(real.values()))) if real else arrays["X"]


def _is_mask_of(lengths: Any, mask: Any) -> bool:
    """Whether a mask is that of the first tokens, as many as the lengths."""
    lengths, mask = np.asarray(lengths), np.asarray(mask)
    return mask.ndim == 2 and np.array_equal(np.arange(mask.shape[1]) < lengths.reshape(-1, 1), mask)


def _check_texts(path: Path, y: Any, targets: Path | None) -> None:
    """Raise where targets are of all texts, of which ``convexformer activations --short drop`` has left some out."""
    manifest = None if y is None else _activations(path)
    if manifest is None:
        return
    n_texts, n_samples = manifest["info"]["n_sentences"], manifest["n_samples"]
    if n_samples < n_texts and np.shape(y)[:1] == (n_texts,):
        raise CommandError(
            f"{targets} holds targets of all {n_texts} texts, of which {path} has {n_samples}; take those of its array "
            f"index: y[read_array({os.fspath(path)!r}, 'index')], with read_array of convexformer.storage"
        )


def _activations(path: Path) -> dict[str, Any] | None:
    """The manifest of a folder that ``convexformer activations`` has written; None of another path."""
    from convexformer.datasets._activations import KIND
    from convexformer.storage import read_manifest

    manifest = read_manifest(path) if (path / "manifest.json").exists() else None
    return manifest if manifest is not None and manifest["info"].get("kind") == KIND else None


def _arrays_in(path: Path, *names: str) -> dict[str, Any]:
    """Those of some arrays that a file or folder holds."""
    return {name: found for name in names if (found := _array_in(path, name)) is not None}


def _array_in(path: Path, name: str) -> Any:
    """An array of numbers or text that a file or folder holds; None where it holds none of that name."""
    from convexformer.storage.opening import named_array

    if path.suffix == ".npz" and path.is_file():
        return _read_arrays(path, (name,)).get(name)
    found = named_array(os.fspath(path), name)
    if found is not None and found.dtype.hasobject:  # text of HDF5 would be bytes
        raise CommandError(
            f"the array {name!r} of {path} holds text or objects, which are not read from there; store numbers "
            "without missing values, and labels in an .npy file for --targets: np.save('y.npy', y.astype(str))"
        )
    return found


def _why_unreadable(path: Path, reason: str, names: tuple[str, ...] | None) -> str:
    """Why a file of arrays cannot be read, and what to do, without numpy's advice to trust its pickles."""
    if "allow_pickle" not in reason:
        return f"{path} is not an .npz file of plain arrays: {reason}"
    with open(path, "rb") as file:
        is_archive = file.read(2) == b"PK"  # numpy, too, goes by the first bytes
    if not is_archive:
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

"""The manifest of a folder of shards, and the arrays that it lists."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from convexformer_solvers.io.npz import parsed

from .files import FileArray, checked, choose, read_header, stored

MANIFEST = "manifest.json"
FORMAT, VERSION = "convexformer shards", 1
_ENTRIES = {"n_samples": int, "arrays": dict, "default": str, "info": dict, "shards": list}


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a folder of shards.

    Parameters
    ----------
    folder : path-like
        A folder that `write_shards` finished.

    Returns
    -------
    dict
        ``n_samples``; ``arrays``, with the type and the shape of a sample for each name; ``default``, the array that is
        read when none is named; ``info``; and ``shards``, with name, rows, bytes and hash of each.

    Raises
    ------
    FileNotFoundError
        If there is no such folder, or it has no manifest.
    ValueError
        If the manifest is damaged or of another kind.

    Examples
    --------
    >>> import tempfile
    >>> from convexformer.storage import write_shards
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = write_shards(folder, lambda rows: {"X": torch.ones(4, 2)}, 4, shard_rows=4)
    ...     read_manifest(folder)["arrays"]
    {'X': {'dtype': 'F32', 'shape': [2]}}
    """
    path = Path(folder) / MANIFEST
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{os.fspath(folder)!r} has no {MANIFEST}, as there is no such folder")
    if not path.exists():
        raise FileNotFoundError(
            f"{os.fspath(folder)!r} has no {MANIFEST}; if its writing was stopped, the same call goes on and writes it"
        )
    try:
        manifest = parsed(path.read_bytes())
        kind, version = manifest["format"], manifest["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{os.fspath(path)!r} is damaged or no manifest of shards: {error!r}") from error
    if (kind, version) != (FORMAT, VERSION):
        raise ValueError(f"{os.fspath(path)!r} must be of {FORMAT!r} version {VERSION}, got {kind!r} {version}")
    with checked(repr(os.fspath(path))):
        for name, kind in _ENTRIES.items():
            if not isinstance(manifest[name], kind):
                raise TypeError(f"{name} must be a {kind.__name__}, got {manifest[name]!r}")
        n_rows = sum(shard["rows"] for shard in manifest["shards"])
        if n_rows != manifest["n_samples"]:
            raise LookupError(f"it lists shards of {n_rows} samples, and n_samples is {manifest['n_samples']}")
    return manifest


def shard_arrays(folder: str | os.PathLike[str], name: str | None, place: str) -> list[FileArray]:
    """The array of a name in each shard of a folder with a manifest, which they are compared with."""
    manifest = read_manifest(folder)
    with checked(place):
        name = choose(manifest["arrays"], manifest["default"] if name is None else name, place)
        wanted = manifest["arrays"][name]
        found = []
        for shard in manifest["shards"]:
            path, where = os.path.join(folder, shard["name"]), f"shard {shard['name']!r} of {place}"
            if not os.path.isfile(path):
                raise FileNotFoundError(f"{where} is missing, though {MANIFEST} lists it")
            with checked(where):
                header, begin = read_header(path, where)
                entry = header.get(name, {"dtype": "nothing", "shape": [0]})
                actual = {"dtype": entry["dtype"], "shape": entry["shape"][1:]}
                if (actual, entry["shape"][0]) != (wanted, shard["rows"]):
                    raise ValueError(
                        f"{where} does not match {MANIFEST}: array {name!r} must have {shard['rows']} rows of shape "
                        f"{wanted['shape']} in {wanted['dtype']}, got {entry['shape'][0]} of {actual['shape']} in "
                        f"{actual['dtype']}"
                    )
                found.append(stored(path, header, begin, name, where))
        return found


def read_array(folder: str | os.PathLike[str], name: str | None = None) -> Tensor:
    """Read an array of all shards into memory, such as the targets that belong to the samples.

    Parameters
    ----------
    folder : path-like
        A folder that `write_shards` finished.
    name : str, optional
        Which array. Default: that which the manifest names.

    Returns
    -------
    Tensor
        In the shape and precision in which it was written.

    Raises
    ------
    FileNotFoundError
        If manifest or shards are missing.
    ValueError
        If there is no such array, or a shard does not match the manifest or is truncated.

    Examples
    --------
    >>> import tempfile
    >>> from convexformer.storage import write_shards
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     arrays = {"X": torch.ones(4, 2), "y": torch.arange(4)}
    ...     done = write_shards(folder, lambda rows: {k: v[rows] for k, v in arrays.items()}, 4, shard_rows=3)
    ...     read_array(folder, "y")
    tensor([0, 1, 2, 3])
    """
    parts = shard_arrays(folder, name, repr(os.fspath(folder)))
    return torch.cat([part.read(0, part.shape[0]) for part in parts])


def verify_shards(folder: str | os.PathLike[str]) -> None:
    """Read all shards and compare the hashes of their numbers with the manifest.

    Opening a folder compares names, sizes, shapes and precisions alone.

    Parameters
    ----------
    folder : path-like
        A folder that `write_shards` finished.

    Raises
    ------
    FileNotFoundError
        If manifest or shards are missing.
    ValueError
        If a shard is not that of the manifest.

    Examples
    --------
    >>> import tempfile
    >>> from convexformer.storage import write_shards
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = write_shards(folder, lambda rows: {"X": torch.ones(4, 2)}, 4, shard_rows=4)
    ...     verify_shards(folder)
    """
    place = repr(os.fspath(folder))
    shard_arrays(folder, None, place)
    with checked(place):
        for shard in read_manifest(folder)["shards"]:
            path = os.path.join(folder, shard["name"])
            _, begin = read_header(path, place)
            with open(path, "rb") as file:
                file.seek(begin)
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != shard["sha256"]:
                raise ValueError(
                    f"shard {shard['name']!r} of {place} is damaged: its numbers have the SHA-256 {found}, not "
                    f"{shard['sha256']} as in {MANIFEST}"
                )

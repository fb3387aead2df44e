"""Folders of shards, written by one process or several, with a manifest when all are there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from convexformer.validation import as_tensor, is_integer
from convexformer_solvers.io.npz import parsed, replacing
from convexformer_solvers.validation import check_counts, shown

from .files import RESERVED, checked, encode_header, extent, layout, read_header, torch_dtype
from .manifest import FORMAT, MANIFEST, VERSION


class ShardWriter:
    """Writes samples to a folder of shards, each a file of safetensors, and last a manifest.

    Shards that are there already are kept, so that a run which was killed goes on where it stopped. Several processes
    may write to the same folder. Of ``workers`` processes, the one with number ``worker`` writes each shard whose
    number has the remainder ``worker`` after division by ``workers``. Files are written under names of their own and
    renamed when they are whole.

    Parameters
    ----------
    folder : path-like
        Where to write. It is made if it is absent.
    n_samples : int
        Samples of all shards.
    shard_rows : int
        Samples of each shard but the last.
    info : dict, optional
        What else to put into the manifest, in terms of JSON, for example the name of an encoder. Shards that were
        written with other `info` are not kept but refused.
    default : str, default="X"
        Name of the array that is read when none is asked for.
    worker, workers : int, optional
        Number of this process, from 0, and number of all. Default: the variables ``RANK`` and ``WORLD_SIZE`` that
        ``torchrun`` sets; without them 0 and 1.

    Raises
    ------
    ValueError, TypeError
        If an argument is not as described, or the folder holds shards of another run.

    See Also
    --------
    write_shards : Does all this for a function that computes the samples.

    Examples
    --------
    >>> import tempfile
    >>> X = torch.arange(10.0).reshape(5, 1, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = ShardWriter(folder, 5, 2, info={"made by": "arange"})
    ...     for shard, rows in writer.pending():
    ...         writer.write(shard, {"X": X[rows]})
    ...     finished = writer.finish()
    >>> finished
    True
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        n_samples: int,
        shard_rows: int,
        *,
        info: Mapping[str, Any] | None = None,
        default: str = "X",
        worker: int | None = None,
        workers: int | None = None,
    ) -> None:
        workers = of_torchrun("WORLD_SIZE", 1) if workers is None else workers
        of_variable = " from the variable RANK" if worker is None else ""
        worker = of_torchrun("RANK", 0) if worker is None else worker
        check_counts(n_samples=n_samples, shard_rows=shard_rows, workers=workers)
        if not is_integer(worker, 0) or worker >= workers:
            raise ValueError(
                f"worker must be an integer from 0 to workers - 1 = {workers - 1}, got {worker!r}{of_variable}"
            )
        if not isinstance(default, str):
            raise TypeError(f"default must be the name of an array, got {shown(default)}")
        n_samples, shard_rows = int(n_samples), int(shard_rows)  # JSON has no integers of numpy
        self.folder = Path(folder)
        self.n_samples, self.shard_rows, self.n_shards = n_samples, shard_rows, -(-n_samples // shard_rows)
        self.worker, self.workers = worker, workers
        try:
            self._about = {"default": default, "info": dict(info or {})}
            plan = {"format": FORMAT, "version": VERSION, "rows": [n_samples, shard_rows], **self._about}
            self._run = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
        except (TypeError, ValueError) as error:
            raise TypeError(f"info must hold what JSON has, such as text and numbers, by name: {error}") from error
        self.folder.mkdir(parents=True, exist_ok=True)

    def name(self, shard: int) -> str:
        """Name of the file of a shard."""
        return f"part-{shard:05d}.safetensors"

    def rows(self, shard: int) -> slice:
        """Samples of a shard."""
        return slice(shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.n_samples))

    def describe(self, shard: int) -> str:
        """Name and samples of a shard, for messages."""
        rows = self.rows(shard)
        return f"shard {self.name(shard)!r} (samples {rows.start} to {rows.stop - 1})"

    def pending(self) -> Iterator[tuple[int, slice]]:
        """Numbers and samples of the shards that this worker has still to write."""
        for shard in range(self.worker, self.n_shards, self.workers):
            if self._finished(shard) is None:
                yield shard, self.rows(shard)

    def write(self, shard: int, arrays: Mapping[str, Any]) -> None:
        """Write a shard whose arrays by name have one row for each of its samples.

        Raises
        ------
        TypeError
            If `arrays` are not arrays by name.
        ValueError
            If an array has another number of rows or holds no numbers, or has a name that is no text or reserved.
        """
        rows = self.rows(shard)
        if not isinstance(arrays, Mapping):
            raise TypeError(
                f"arrays must be a dict of arrays by name, such as {{'X': ...}}, got {type(arrays).__name__}"
            )
        tensors: dict[str, Tensor] = {}
        for name, values in arrays.items():
            if not isinstance(name, str) or name == RESERVED:
                raise ValueError(f"arrays must have names that are text other than {RESERVED!r}, got {name!r}")
            place = f"array {name!r} of {self.describe(shard)}"
            values = values if torch.is_tensor(values) else as_tensor(values, name=place)
            torch_dtype(values.dtype, place)
            if len(values) != rows.stop - rows.start:
                raise ValueError(f"{place} must have {rows.stop - rows.start} rows, got {len(values)}")
            tensors[name] = values.detach().cpu().contiguous()
        if self._about["default"] not in tensors:
            raise ValueError(f"{self.describe(shard)} must have an array {self._about['default']!r}, got {[*tensors]}")
        entries, parts = layout(tensors)
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        note = json.dumps({"run": self._run, "sha256": digest.hexdigest()})
        self._put(self.name(shard), [encode_header(entries, note), *parts])

    def finish(self) -> bool:
        """Write the manifest if all shards are there; returns whether they are.

        Raises
        ------
        ValueError
            If the shards differ in arrays, or these in the shape of a sample or in precision.
        """
        found: list[dict[str, Any]] = []
        for shard in range(self.n_shards):
            entry = self._finished(shard)
            if entry is None:
                return False
            if found and entry["arrays"] != found[0]["arrays"]:
                raise ValueError(
                    f"shards must agree: {self.name(0)!r} has {found[0]['arrays']}, {self.name(shard)!r} has "
                    f"{entry['arrays']}"
                )
            found.append(entry)
        shards = [{key: value for key, value in entry.items() if key != "arrays"} for entry in found]
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "n_samples": self.n_samples,
            "arrays": found[0]["arrays"],
            **self._about,
            "shards": shards,
        }
        self._put(MANIFEST, [json.dumps(manifest, indent=1, sort_keys=True).encode()])
        for leftover in self.folder.glob("*.partial"):  # of processes that were killed; every shard is whole by now
            with suppress(OSError):
                leftover.unlink()
        return True

    def _finished(self, shard: int) -> dict[str, Any] | None:
        """The entry of a shard in the manifest; None if it has still to be written."""
        path = self.folder / self.name(shard)
        if not path.exists():
            return None
        try:
            header, begin = read_header(path, repr(path.name))
        except ValueError:
            return None
        try:
            note = parsed(header.pop(RESERVED)["convexformer"])
            is_of_run = note["run"] == self._run
        except (KeyError, TypeError, ValueError):
            is_of_run = False
        if not is_of_run:
            raise ValueError(
                f"folder={os.fspath(self.folder)!r} has a shard {path.name!r} that was written with other data or "
                "settings; give another folder, or delete this one"
            )
        with checked(self.describe(shard)):
            n_bytes = begin + max(extent(entry, self.describe(shard))[2] for entry in header.values())
            if path.stat().st_size != n_bytes:
                return None
            rows = self.rows(shard)
            arrays = {name: {"dtype": entry["dtype"], "shape": entry["shape"][1:]} for name, entry in header.items()}
            n_rows = rows.stop - rows.start
            return {"name": path.name, "rows": n_rows, "bytes": n_bytes, "sha256": note["sha256"], "arrays": arrays}

    def _put(self, name: str, parts: list[Any]) -> None:
        """Write a file under a name of its own, then give it its name."""
        path = self.folder / name
        try:
            with replacing(path) as partial, open(partial, "xb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
        except FileNotFoundError:
            # Another process found the shard finished, and removed what seemed to be left over.
            if not path.exists():
                raise


def of_torchrun(name: str, least: int) -> int:
    """A variable that ``torchrun`` sets, `least` where it is not set; ``ValueError`` unless it is such an integer."""
    given = os.environ.get(name, str(least))
    if not given.isdecimal() or int(given) < least:
        raise ValueError(
            f"the variable {name} must be an integer of at least {least}, as torchrun sets it, got {given!r}; unset it "
            "for one process"
        )
    return int(given)


def write_shards(
    folder: str | os.PathLike[str],
    compute: Callable[[slice], Mapping[str, Any]],
    n_samples: int,
    *,
    shard_rows: int,
    info: Mapping[str, Any] | None = None,
    default: str = "X",
    worker: int | None = None,
    workers: int | None = None,
) -> bool:
    """Compute samples shard by shard and write them to a folder; a run that was stopped goes on.

    Parameters
    ----------
    folder : path-like
        Where to write. It is made if it is absent.
    compute : callable
        From a slice of the samples to arrays by name, each with one row for every sample.
    n_samples, shard_rows, info, default, worker, workers
        As in `ShardWriter`.

    Returns
    -------
    bool
        Whether all shards, those of other workers too, are finished and the manifest is written.

    Raises
    ------
    RuntimeError
        If `compute` fails or what it returns cannot be written. The message names the shard and its samples.
    ValueError, TypeError
        If another argument is not as described, or the folder holds shards of another run.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_shards(folder, lambda rows: {"X": torch.arange(10.0)[rows, None]}, 10, shard_rows=4)
    ...     sorted(os.listdir(folder))
    True
    ['manifest.json', 'part-00000.safetensors', 'part-00001.safetensors', 'part-00002.safetensors']
    """
    if not callable(compute):
        raise TypeError(f"compute must be callable with a slice of the samples, got {type(compute).__name__}")
    writer = ShardWriter(folder, n_samples, shard_rows, info=info, default=default, worker=worker, workers=workers)
    for shard, rows in writer.pending():
        try:
            writer.write(shard, compute(rows))
        except Exception as error:
            raise RuntimeError(
                f"{writer.describe(shard)} failed in worker {writer.worker} of {writer.workers}: {error}; finished "
                "shards are kept, and the same call goes on"
            ) from error
    return writer.finish()

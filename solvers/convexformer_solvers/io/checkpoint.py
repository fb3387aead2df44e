"""Checkpoint of a path of solutions: a fingerprint of the program and the points found so far."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convexformer_solvers.certificate import certify
from convexformer_solvers.draws import standard_normal
from convexformer_solvers.program import Program
from convexformer_solvers.result import History, Progress, SolverResult, Status

from .npz import read_archive, write_archive

_FORMAT = 1
_KEPT = "kept."
_ADDED = ("value of the loss", "value of the penalty")  # which files of former versions have not
_RUN: dict[str, tuple[type, ...]] = {"n_iter": (int,), "seconds": (int, float), "solver": (str,)}


class PathFile:
    """Points of a path in a file, which is written anew whenever one is added.

    The file `resume` is read where it exists, with ``ValueError`` unless it is of the same program, whatever its
    ``alpha``, and grid of alphas. Certificates of its points are computed again.

    Attributes
    ----------
    kept : pair of dict, or None
        Entries for JSON and arrays that ``keep`` has stored besides.
    """

    kept: tuple[dict[str, Any], dict[str, NDArray]] | None = None

    def __init__(self, resume: str | os.PathLike[str], program: Program, grid: Sequence[float]) -> None:
        try:
            self.path = Path(resume)
        except TypeError as error:
            raise ValueError(f"resume must be None or the path of a file, got {resume!r}") from error
        if "\0" in str(self.path):
            raise ValueError(f"resume must be a path without null characters, got {resume!r}")
        if self.path.is_dir() or not self.path.parent.is_dir():
            found = "a folder" if self.path.is_dir() else "a folder that is not there"
            raise ValueError(f"resume must be the path of a file in an existing folder, got {found}: {str(resume)!r}")
        self._file = self.path.absolute()  # the working folder may change before the next is written
        self._fingerprint = fingerprint(program, grid)
        self._keys = {str(index) for index in range(len(grid))}
        self._points: dict[int, dict[str, NDArray]] = {}
        self._runs: dict[int, dict[str, Any]] = {}
        if self.path.exists():
            self._read()

    def load(self, index: int, program: Program, dtype: torch.dtype) -> SolverResult | None:
        """The stored point of one alpha, if any, in a precision, certified again for the program at that alpha."""
        if index not in self._points:
            return None
        n_iter, seconds, solver = (self._runs[index][name] for name in _RUN)
        stored, history, device = self._points[index], History(), program.map.device
        try:
            if any(part.dtype.kind != "f" for part in stored.values()):
                raise ValueError("its arrays must be of floating-point numbers")
            parts = {name: torch.as_tensor(part, device=device) for name, part in stored.items()}
            coef, intercept = parts["coef"].to(dtype), parts["intercept"].to(dtype)
            certificate = certify(program, coef, intercept, parts.get("dual"))
        except (ValueError, KeyError, TypeError) as error:
            raise self.refused(f"its point for alpha={program.alpha} cannot be used ({error})") from error
        history.append(n_iter, seconds, certificate)
        return SolverResult(coef, intercept, certificate, Status.CONVERGED, n_iter, seconds, history, solver)

    def save(self, index: int, result: SolverResult) -> None:
        """Store the point of one alpha."""
        parts = {"coef": result.coef, "intercept": result.intercept, "dual": result.certificate.dual_point}
        self._put(index, parts, {name: getattr(result, name) for name in _RUN})

    def save_progress(self, index: int, progress: Progress) -> None:
        """Store the best point so far of one alpha whose solve goes on."""
        parts: dict[str, Tensor | None] = {"coef": progress.coef, "intercept": progress.intercept}
        self._put(index, parts, {"n_iter": progress.iteration, "seconds": progress.seconds, "solver": "unfinished"})

    def keep(self, entries: dict[str, Any], arrays: dict[str, NDArray]) -> None:
        """Store entries for JSON and arrays besides, in place of those that were."""
        self.kept = entries, arrays
        self._write()

    def _put(self, index: int, parts: dict[str, Tensor | None], run: dict[str, Any]) -> None:
        self._points[index] = {name: part.numpy(force=True) for name, part in parts.items() if part is not None}
        self._runs[index] = run
        self._write()

    def _write(self) -> None:
        header = {"format": _FORMAT, "program": self._fingerprint, "runs": self._runs}
        arrays = {f"{name}_{i}": part for i, parts in self._points.items() for name, part in parts.items()}
        if self.kept is not None:
            header["kept"] = self.kept[0]
            arrays |= {f"{_KEPT}{name}": array for name, array in self.kept[1].items()}
        write_archive(self._file, "path", header, arrays)

    def _read(self) -> None:
        try:
            header, arrays = read_archive(self.path, "path")
        except ValueError as error:
            message = f"resume: {error}. Give what an earlier call wrote, or a path where there is nothing yet"
            raise ValueError(message) from error
        if header.get("format") != _FORMAT:
            raise self.refused("it was saved by another version")
        saved, runs = header.get("program"), header.get("runs")
        if not (isinstance(saved, dict) and isinstance(runs, dict)):
            raise self.refused("it is damaged; its header says nothing of a program and its points")
        differences = [
            _difference(name, saved.get(name), value)
            for name, value in self._fingerprint.items()
            if not _same(saved.get(name, value if name in _ADDED else None), value)
        ]
        if differences:
            raise self.refused(f"it was saved for another program; these differ: {', '.join(differences)}")
        for key, run in runs.items():
            of_solve = isinstance(run, dict) and all(isinstance(run.get(name), kinds) for name, kinds in _RUN.items())
            if not of_solve or key not in self._keys:
                raise self.refused(f"it is damaged; its header has an entry of no point of the grid, {key}: {run}")
            self._runs[int(key)], names = run, ("coef", "intercept", "dual")
            self._points[int(key)] = {name: arrays[f"{name}_{key}"] for name in names if f"{name}_{key}" in arrays}
        if "kept" in header:
            kept = {name.removeprefix(_KEPT): part for name, part in arrays.items() if name.startswith(_KEPT)}
            self.kept = header["kept"], kept

    def refused(self, reason: str) -> ValueError:
        """The error that a call cannot go on from the file."""
        remedy = "Repeat the call that wrote it, or give a path where there is nothing yet"
        return ValueError(f"resume={str(self.path)!r} cannot be continued: {reason}. {remedy}")


def fingerprint(program: Program, grid: Sequence[float]) -> dict[str, Any]:
    """Shapes, names and checksums that tell a program, whatever its ``alpha``, and a grid of alphas from others."""
    generator = torch.Generator().manual_seed(0)
    vector = standard_normal((*program.map.feature_shape, 1), generator, torch.float64)

    def described(part: Any) -> str:
        return repr(part) if dataclasses.is_dataclass(part) else type(part).__qualname__

    scores = program.map.matvec(vector.to(program.map.device))
    coef = standard_normal(program.coef_shape, generator, torch.float64).to(scores.device)
    pred = scores / scores.abs().amax().clamp(min=1) * coef.reshape(-1, coef.shape[-1])[0]  # where losses are finite
    return {
        "coef_shape": list(program.coef_shape),
        "n_samples": program.map.n_samples,
        "loss": described(program.loss),
        "penalty": described(program.penalty),
        "fit_intercept": program.fit_intercept,
        "y": _checksum(program.y),
        "sample_weight": _checksum(program.weight),
        "X": _checksum(scores),
        "alpha_max": program.alpha_max,
        "alphas": list(grid),
        "value of the loss": [float(program.loss_value(pred))],
        "value of the penalty": [float(program.penalty.value(coef))],
    }


def _checksum(values: Tensor) -> list[float]:
    """Norm of an array and a random projection of each column, which differ between machines by rounding."""
    rows = values.detach().double().cpu().reshape(len(values), -1)
    generator = torch.Generator().manual_seed(1)
    direction = standard_normal((len(rows),), generator, torch.float64)
    return [float(torch.linalg.vector_norm(rows)), *(direction @ rows).tolist()]


def _difference(name: str, saved: Any, now: Any) -> str:
    """What messages call an entry that differs; a grid of one alpha is that of a fit."""
    if name == "alphas" and isinstance(saved, list) and len(saved) == len(now) == 1:
        return f"alpha ({saved[0]} in the file, {now[0]} now)"
    return f"{name} ({saved} in the file, {now} now)" if isinstance(now, (str, int)) else name


def _same(saved: Any, now: Any) -> bool:
    """Whether two values are equal, numbers up to the rounding of sums on another machine."""
    if type(saved) is not type(now) or isinstance(now, (str, int)):
        return bool(saved == now)
    try:
        numbers = np.asarray(saved, dtype=float)
    except (TypeError, ValueError):  # a damaged file
        return False
    finite = np.abs(now)[np.isfinite(now)]
    rounding = math.sqrt(np.finfo(float).eps) * finite.max(initial=0.0)
    return numbers.shape == np.shape(now) and np.allclose(numbers, now, rtol=0, atol=rounding, equal_nan=True)

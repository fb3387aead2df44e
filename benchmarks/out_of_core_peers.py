"""Data on a disk beside other packages. Run: python benchmarks/out_of_core_peers.py --n-shards 10 --output FILE.

Samples of the kind of ``out_of_core.py``, as shards and once more by columns for adelie: 820 MB for each shard. Models
have no intercept. A fit is a process of its own and starts with none of the data in the page cache; a package is run at
tighter settings until its coefficients have the gap. dask-ml has no group norm: its ADMM is given one as a
``Regularizer``, and is run with its own l1 norm at the same share of that norm's alpha_max. Its ``proximal_grad`` is
left out: its line search compares losses without the penalty and ends beside the optimum.
A test of two minutes: --n-shards 2 --samples-per-shard 5000.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import out_of_core
import torch
from benchmark_utils.machine import THREAD_VARIABLES, add_figures, forget, memory
from out_of_core import RATIO, TOLERANCE
from probe_memory import Watch

import convexformer
from convexformer.storage import open_source
from convexformer_solvers import GroupL2, Program, StreamedMap, certify, get_loss

LIMIT_SHARE = 4  # the data are that many times as large as our memory limit
STEPS = 7  # alphas of adelie's path over one decade, as in solvers/adelie.py
DASK_ROWS = 25_000  # samples of a dask chunk: 100 MB, which its products convert to float64
THREADS = os.cpu_count() or 1
PACKAGES = {"ours": "convexformer", "adelie": "adelie", "dask-ml": "dask_ml", "dask-ml l1": "dask_ml"}
# Settings from loose to tight: tolerances of each package on what it watches.
RUNGS = {
    "ours": (TOLERANCE,),
    "adelie": (1e-4, 1e-5, 1e-6, 1e-8, 1e-10, 1e-12, 1e-14),
    "dask-ml": (1e-2, 1e-3, 1e-4, 1e-5),
    "dask-ml l1": (1e-3,),
}


def program(folder: Path, task: str, alpha: float = 1.0) -> Program:
    """The program with the group norm, over the streamed shards."""
    source, y = open_source(str(folder / "shards")), np.load(folder / "scores.npz")["y"]
    assert source is not None
    y, loss = (y, "squared") if task == "regression" else (np.where(y > 0, 1.0, -1.0), "logistic")
    return Program(StreamedMap(source), torch.as_tensor(y)[:, None], get_loss(loss), GroupL2(), alpha)


def ours(folder: Path, at_alpha: Program, regression: bool, tol: float) -> Callable[[], np.ndarray]:
    kind = convexformer.ConvexAttentionRegressor if regression else convexformer.ConvexAttentionClassifier
    limit = (folder / "columns.npy").stat().st_size // LIMIT_SHARE
    model = kind(alpha=at_alpha.alpha, tol=tol, memory_limit=limit, fit_intercept=False)
    return lambda: model.fit(str(folder / "shards"), at_alpha.y[:, 0].numpy()).coef_


def adelie(folder: Path, at_alpha: Program, regression: bool, tol: float) -> Callable[[], np.ndarray]:
    """A path to alpha over the memory-mapped columns, with the settings of ``solvers/adelie.py``."""
    import adelie

    y, alpha = at_alpha.y[:, 0].numpy().astype(np.float32), at_alpha.alpha
    glm = adelie.glm.gaussian(y, dtype=np.float32) if regression else adelie.glm.binomial((y + 1) / 2, dtype=np.float32)
    groups = np.arange(0, np.prod(at_alpha.map.feature_shape), at_alpha.map.feature_shape[-1])
    options: dict[str, Any] = {"groups": groups, "penalty": np.ones(len(groups)), "intercept": False}
    options |= {"lmda_path": np.geomspace(alpha / RATIO, alpha, STEPS), "tol": tol, "irls_tol": tol, "newton_tol": 1e-6}
    options |= {"max_iters": 10**6, "early_exit": False, "progress_bar": False, "n_threads": THREADS}

    def run() -> np.ndarray:
        X = np.load(folder / "columns.npy", mmap_mode="r")
        matrix = adelie.matrix.dense(X, method="naive", n_threads=THREADS)
        return adelie.grpnet(matrix, glm, **options).betas.toarray()[-1]

    return run


def dask_ml(folder: Path, at_alpha: Program, regression: bool, tol: float, l1: bool) -> Callable[[], np.ndarray]:
    """ADMM on a dask array of the shards. Its losses are sums, and the squared one is not halved."""
    import dask.array as da
    from dask_glm.regularizers import Regularizer
    from dask_ml.linear_model import LinearRegression, LogisticRegression

    class Groups(Regularizer):
        def proximal_operator(self, beta: np.ndarray, t: float) -> np.ndarray:
            blocks = beta.reshape(at_alpha.map.feature_shape)
            norms = np.linalg.norm(blocks, axis=1, keepdims=True)
            return (blocks * np.maximum(1 - t / np.maximum(norms, 1e-300), 0)).ravel()

    parts = [np.load(file, mmap_mode="r") for file in sorted((folder / "shards").iterdir())]
    X = da.concatenate([da.from_array(part.reshape(len(part), -1), (DASK_ROWS, -1), name=False) for part in parts])
    y, alpha = at_alpha.y[:, 0].numpy(), at_alpha.alpha
    if l1:
        slopes = at_alpha.weighted_adjoint(at_alpha.y if regression else at_alpha.y / 2)
        alpha = RATIO * float(slopes.abs().max())
    # The curvature of a chunk's loss: at their 1 nothing moves.
    options = {"normalize": False, "rho": X.chunks[0][0] * (2 if regression else 0.25), "abstol": tol / 100}
    model = (LinearRegression if regression else LogisticRegression)(
        penalty="l1" if l1 else Groups(),
        C=1 / (len(y) * alpha * (2 if regression else 1)),
        max_iter=1000,
        fit_intercept=False,
        solver_kwargs={**options, "reltol": tol},
    )
    labels = da.from_array(y if regression else (y + 1) / 2, X.chunks[0])
    return lambda: np.asarray(model.fit(X, labels).coef_)


class Peaks(Watch):
    """The largest memory held, and mapped from files, while a fit runs."""

    def run(self) -> None:
        self.mapped = 0
        while not self.done.wait(0.01):
            self.peak, self.mapped = max(self.peak, memory("RssAnon")), max(self.mapped, memory("RssFile"))


def fit(folder: Path, task: str, alpha: float, name: str, tol: float) -> dict[str, Any]:
    """A fit, the memory beyond what was there before, and what its coefficients are worth."""
    at_alpha, regression = program(folder, task, alpha), task == "regression"
    starts = {"ours": ours, "adelie": adelie}
    given, l1 = (folder, at_alpha, regression, tol), name.endswith("l1")
    start = starts[name](*given) if name in starts else dask_ml(*given, l1)
    forget(folder.rglob("*.npy"))
    held, mapped, watch = memory("RssAnon"), memory("RssFile"), Peaks()
    watch.start()
    began = time.perf_counter()
    coef = start().reshape(-1)
    seconds = time.perf_counter() - began
    watch.done.set()
    watch.join()

    def score(X: np.ndarray, y: np.ndarray) -> float:
        pred = X.reshape(len(X), -1) @ coef
        return 1 - np.mean((y - pred) ** 2) / np.var(y) if regression else np.mean((pred > 0) == y)

    found = {"setting": tol, "seconds": seconds, "held_bytes": watch.peak - held, "mapped_bytes": watch.mapped - mapped}
    found["score"] = out_of_core._score(SimpleNamespace(score=score), task)
    point = torch.as_tensor(coef, dtype=torch.float64).view(at_alpha.coef_shape)
    return found if l1 else {**found, "gap": certify(at_alpha, point).relative_gap}


def write(folder: Path, n_shards: int) -> None:
    """Write the shards, and the same samples by columns."""
    (folder / "shards").mkdir()
    out_of_core.write(folder / "shards", n_shards)
    n_rows, n_tokens, width = out_of_core.SHARD
    shape = (n_rows * n_shards, n_tokens * width)
    columns = np.lib.format.open_memmap(folder / "columns.npy", "w+", np.float32, shape, fortran_order=True)
    for number, file in enumerate(sorted((folder / "shards").iterdir())):
        columns[number * n_rows : (number + 1) * n_rows] = np.load(file).reshape(n_rows, -1)


def runs(folder: Path, task: str, alpha: float, name: str, limit: float) -> Iterator[dict[str, Any]]:
    """Fits from loose to tight settings until one has the gap."""
    if find_spec(PACKAGES[name]) is None:
        yield {"skipped": "not installed"}
        return
    # dask multiplies its chunks in threads, the others multiply with threads.
    threads = dict.fromkeys(THREAD_VARIABLES, str(1 if name.startswith("dask") else THREADS))
    options: dict[str, Any] = {"capture_output": True, "text": True, "env": {**os.environ, **threads}}
    for tol in RUNGS[name]:
        command = [sys.executable, __file__, "_fit", str(folder), task, repr(alpha), name, repr(tol)]
        try:
            found = json.loads(subprocess.run(command, check=True, timeout=limit, **options).stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            found = {"setting": tol, "stopped_after": limit}
        except subprocess.CalledProcessError as error:
            found = {"setting": tol, "failed": error.stderr.strip().splitlines()[-1:]}
        yield found
        if found.get("gap", 0) <= TOLERANCE:  # or it has none
            return


def compare(folder: Path, n_shards: int, limit: float) -> dict[str, Any]:
    """All fits to data that are written here."""
    write(folder, n_shards)
    records: dict[str, Any] = {"n_shards": n_shards, "data_bytes": (folder / "columns.npy").stat().st_size}
    records["installed"] = {one.name: one.version for one in distributions() if "dask" in one.name}
    for task in ("regression", "classification"):
        alpha_max, records[task] = program(folder, task).alpha_max, {}
        for name in RUNGS:
            records[task][name] = []
            for found in runs(folder, task, RATIO * alpha_max, name, limit):
                records[task][name].append(found)
                print(task, name, json.dumps(found), flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n-shards", type=int, default=10)
    parser.add_argument("--samples-per-shard", type=int, default=out_of_core.SHARD[0])
    parser.add_argument("--limit", type=float, default=1800, help="seconds of a fit with its imports and certificate")
    parser.add_argument("--folder", type=Path, help="folder for the data (default: that of the system)")
    parser.add_argument("--output", type=Path, help="JSON file to which the figures are added")
    options = parser.parse_args()
    out_of_core.SHARD = (options.samples_per_shard, *out_of_core.SHARD[1:])
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = compare(Path(folder), options.n_shards, options.limit)
    if options.output:
        add_figures(options.output, "peers", THREADS, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["_fit"]:
        place, task, at, package, setting = sys.argv[2:]
        print(json.dumps(fit(Path(place), task, float(at), package, float(setting))))
    else:
        main()

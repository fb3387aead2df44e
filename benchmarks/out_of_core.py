"""Data larger than memory, and many processes. Run: python benchmarks/out_of_core.py WHAT --output FILE.

``large`` writes 41 GB of samples to shards and fits a regression and a classification to them. ``wide`` fits both to
samples of 16,384 features in a file, beside gradient steps, ``held`` to 13,000 samples of 13,312 features in memory,
whose Gram matrix is too large to be formed. ``pass`` compares a product on a file in the page cache with one in
memory. ``ranks`` times cell G on one and two processes of one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from benchmark_utils.machine import THREAD_VARIABLES, add_figures, forget
from benchmark_utils.turns import median_seconds
from probe_memory import Watch, memory
from sklearn.exceptions import ConvergenceWarning

SHARD = (100_000, 16, 64)
N_SHARDS = 100
LIMIT = 4 * 2**30
RATIO = 0.1
TOLERANCE = 1e-4
REPEATS = 3  # of fits to cell G
PRODUCTS = 6  # that are timed
WIDE = (5_000, 64, 256)
HELD = (13_000, 52, 256)
WIDE_LIMIT = 10**8
WIDE_SECONDS = 100


def coefficients() -> np.ndarray:
    """True coefficients: four tokens count."""
    coef = np.zeros(SHARD[1:], np.float32)
    coef[[2, 5, 6, 11]] = np.random.default_rng(0).standard_normal((4, SHARD[2]))
    return coef


def noisy_scores(X: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Scores of samples, half of whose variance is noise."""
    coef = coefficients()
    return np.tensordot(X, coef, 2) + np.linalg.norm(coef) * draw.standard_normal(len(X))


def shards(n_shards: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Samples and scores: a pool of normal draws, whose tokens have another order and signs in each shard."""
    pool = np.random.default_rng(1).standard_normal(SHARD, dtype=np.float32)
    for number in range(n_shards):
        draw = np.random.default_rng([2, number])
        X = pool[:, draw.permutation(SHARD[1])]
        X *= draw.choice(np.float32([-1, 1]), size=SHARD[1:])
        yield X, noisy_scores(X, draw)


def write(folder: Path, n_shards: int) -> float:
    """Write the shards and their scores; bytes per second."""
    scores, began = [], time.perf_counter()
    for number, (X, part) in enumerate(shards(n_shards)):
        np.save(folder / f"part-{number:05}.npy", X)
        scores.append(part)
    os.sync()
    seconds = time.perf_counter() - began
    np.savez(folder.parent / "scores.npz", y=np.concatenate(scores))
    return n_shards * 4 * np.prod(SHARD) / seconds


def disk_rate(folder: Path) -> float:
    """Bytes per second of reading the first shards one after the other, none of them in the page cache."""
    files = sorted(folder.glob("*.npy"))[:10]
    forget(files)
    began, buffer = time.perf_counter(), bytearray(2**24)
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return sum(file.stat().st_size for file in files) / (time.perf_counter() - began)


def targets(folder: Path, task: str) -> np.ndarray:
    """Targets of all shards."""
    scores = np.load(folder.parent / "scores.npz")["y"]
    return scores if task == "regression" else scores > 0


def fit_large(folder: Path, task: str) -> dict[str, Any]:
    """A fit to the shards within the limit: seconds, passes, bytes and memory beyond what was there before."""
    import convexformer

    y = targets(folder, task)
    name = "ConvexAttentionRegressor" if task == "regression" else "ConvexAttentionClassifier"
    before, watch = memory("RssAnon"), Watch()
    watch.start()
    few = np.load(folder / "part-00000.npy", mmap_mode="r")[:20_000]
    alpha = RATIO * getattr(convexformer, name)(alpha=1.0).fit(np.array(few), y[: len(few)]).alpha_max_
    began = time.perf_counter()
    model = getattr(convexformer, name)(alpha=alpha, tol=TOLERANCE, memory_limit=LIMIT)
    model.fit(str(folder), y)
    seconds = time.perf_counter() - began
    watch.done.set()
    watch.join()
    traffic = model.traffic_
    return {
        "task": task,
        "seconds": seconds,
        "gap": model.certificate_.relative_gap,
        "n_iter": model.n_iter_,
        "passes": traffic.passes,
        "bytes": traffic.read_bytes,
        "read_rate": traffic.bytes_per_second,
        "waited_seconds": traffic.waited_seconds,
        "held_bytes": watch.peak - before,
        "alpha_ratio": model.alpha / model.alpha_max_,
        "tokens": int(np.count_nonzero(model.token_norms_)),
        "score": _score(model, task),
    }


def fit_sgd(folder: Path, task: str) -> dict[str, Any]:
    """One pass of scikit-learn's stochastic gradients over the same shards: no certificate and no groups."""
    from sklearn.linear_model import SGDClassifier, SGDRegressor

    y = targets(folder, task)
    model = SGDRegressor() if task == "regression" else SGDClassifier(loss="log_loss")
    began, start = time.perf_counter(), 0
    for file in sorted(folder.glob("*.npy")):
        X = np.load(file).reshape(SHARD[0], -1)
        known = {} if task == "regression" else {"classes": [False, True]}
        model.partial_fit(X, y[start : start + len(X)], **known)
        start += len(X)
    seconds = time.perf_counter() - began
    return {"task": task, "seconds": seconds, "score": _score(model, task, flat=True)}


def _score(model: Any, task: str, flat: bool = False) -> float:
    """Score on samples that no fit has seen."""
    draw = np.random.default_rng(3)
    X = draw.standard_normal((20_000, *SHARD[1:]), dtype=np.float32)
    scores = noisy_scores(X, draw)
    return float(model.score(X.reshape(len(X), -1) if flat else X, scores if task == "regression" else scores > 0))


def large(folder: Path, n_shards: int) -> dict[str, Any]:
    """The fits to data larger than memory, each in a process of its own."""
    path = folder / "shards"
    path.mkdir(exist_ok=True)
    written = write(path, n_shards) if not any(path.iterdir()) else None
    records: dict[str, Any] = {
        "n_shards": n_shards,
        "write_rate": written,
        "disk_rate": disk_rate(path),
        "limit": LIMIT,
    }
    for kind in ("large", "sgd"):
        records[kind] = []
        for task in ("regression", "classification"):
            done = subprocess.run(
                [sys.executable, __file__, f"_{kind}", str(path), task], check=True, stdout=subprocess.PIPE, text=True
            )
            records[kind].append(json.loads(done.stdout.splitlines()[-1]))
            print(json.dumps(records), flush=True)
    return records


def write_wide(folder: Path, shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """A file of samples whose tokens depend on each other and decay in variance, and targets of four tokens."""
    n_samples, n_tokens, width = shape
    draw, scores = np.random.default_rng(0), []
    coef = draw.standard_normal((4, width), dtype=np.float32)
    rotation = np.linalg.qr(draw.standard_normal((width, width)))[0].astype(np.float32)
    scale = np.arange(1, width + 1, dtype=np.float32) ** -0.5
    file = np.lib.format.open_memmap(folder / "wide.npy", "w+", np.float16, shape)
    for start in range(0, n_samples, 500):
        X = draw.standard_normal((500, n_tokens, width), dtype=np.float32)
        for token in range(1, n_tokens):
            X[:, token] = 0.5 * X[:, token - 1] + np.sqrt(0.75) * X[:, token]
        X = ((X + draw.standard_normal((500, 1, width), dtype=np.float32)) * scale) @ rotation
        score = np.tensordot(X[:, [2, 5, 6, 50]], coef, 2)
        scores.append(score / score.std() + draw.standard_normal(500))
        file[start : start + 500] = X
    file.flush()
    y = np.concatenate(scores)
    return {"regression": y, "classification": y > 0}


def wide(folder: Path, shape: tuple[int, int, int], limit: int | None) -> dict[str, Any]:
    """Fits to samples of more features than there is room for in Gram matrices, beside gradient steps.

    They are in a file, for a `limit` of memory, or in memory in float32.
    """
    import convexformer

    targets, path = write_wide(folder, shape), str(folder / "wide.npy")
    X = path if limit else np.load(path).astype(np.float32)
    models = {"regression": "ConvexAttentionRegressor", "classification": "ConvexAttentionClassifier"}
    found: dict[str, Any] = {"shape": shape, "limit": limit, "stopped_after": WIDE_SECONDS, "fits": []}
    warnings.simplefilter("ignore", ConvergenceWarning)  # of those that are stopped
    for task, name in models.items():
        make = getattr(convexformer, name)
        alpha_max = make(alpha=1e9, memory_limit=limit).fit(X, targets[task]).alpha_max_
        for ratio in (0.1, 0.01):
            for solver in ("auto", "fista"):
                began = time.perf_counter()

                def late(state: Any, began: float = began) -> bool:
                    return time.perf_counter() - began > WIDE_SECONDS

                model = make(alpha=ratio * alpha_max, tol=TOLERANCE, solver=solver, memory_limit=limit)
                model.set_params(max_iter=10**6, callback=late).fit(X, targets[task])
                record = {
                    "task": task,
                    "ratio": ratio,
                    "solver": solver,
                    "seconds": time.perf_counter() - began,
                    "passes": model.traffic_.passes if limit else None,
                    "n_iter": model.n_iter_,
                    "gap": model.certificate_.relative_gap,
                    "tokens": int(np.count_nonzero(model.token_norms_)),
                }
                print(json.dumps(record), flush=True)
                found["fits"].append(record)
    return found


def one_pass(folder: Path) -> dict[str, Any]:
    """Seconds of products with 2 GB in memory and in the page cache, side by side, one thread."""
    import torch

    from convexformer.storage import open_source
    from convexformer_solvers import DenseMap, StreamedMap

    torch.set_num_threads(1)
    X = np.random.default_rng(0).standard_normal((250_000, 2048), dtype=np.float32)
    np.save(folder / "X.npy", X)
    maps = {
        "memory": DenseMap(torch.from_numpy(X)[:, :, None]),
        "disk": StreamedMap(open_source(str(folder / "X.npy"))),
    }
    result = {}
    for dtype in (torch.float32, torch.float64):
        coef, values = torch.ones((2048, 1, 1), dtype=dtype), torch.ones((len(X), 1), dtype=dtype)
        for name, product in {
            "matvec": lambda linear_map, coef=coef: linear_map.matvec(coef),
            "rmatvec": lambda linear_map, values=values: linear_map.rmatvec(values),
        }.items():
            runs = {kind: lambda m=m, product=product: product(m) for kind, m in maps.items()}
            found = median_seconds(runs, PRODUCTS, n_untimed=1)
            result[f"{name}, {str(dtype).removeprefix('torch.')}"] = found
    return result


def cell_g(repeats: int) -> dict[str, Any]:
    """Seconds of fits to cell G on this rank's share of the samples, and of products with the whole share of a rank."""
    import torch
    import torch.distributed as dist
    from benchmark_utils.cells import DESIGNS, simulate

    from convexformer_solvers import DenseMap, GroupL2, Program, Squared, get_solver, on_all_ranks, ranks, solve

    torch.set_num_threads(1)
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size > 1:
        dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for design in DESIGNS:
        instance = simulate("G", design)
        data, y = torch.as_tensor(instance.X), torch.as_tensor(instance.y).reshape(len(instance.y), -1)
        rows = slice(rank * len(data) // size, (rank + 1) * len(data) // size)
        local = DenseMap(data[rows].clone())
        del data, instance

        def work(linear_map: Any, y: Any = y) -> dict[str, Any]:
            here: dict[str, Any] = {}
            coef = torch.ones((*linear_map.feature_shape, 1), dtype=torch.float64)
            linear_map.matvec(coef)
            both = {"product": lambda: linear_map.rmatvec(linear_map.matvec(coef))}
            here |= median_seconds(both, PRODUCTS, n_untimed=1)
            program = Program(linear_map, y, Squared(), GroupL2(), 1.0)
            for ratio in (0.1, 0.01):
                at_alpha = program.with_alpha(ratio * program.alpha_max)
                seconds = [solve(at_alpha, get_solver("auto"), tol=TOLERANCE).seconds for _ in range(repeats)]
                here[str(ratio)] = statistics.median(seconds)
            return here

        found[design] = on_all_ranks(local, work, ranks())
    return found if rank == 0 else {}


def on_ranks() -> dict[str, Any]:
    """Cell G on one and on two processes."""
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}
    found = {}
    for n_ranks in (1, 2):
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks)]
        command = [sys.executable] if n_ranks == 1 else start
        done = subprocess.run(
            [*command, __file__, "_cell_g"], check=True, stdout=subprocess.PIPE, text=True, env=environment
        )
        found[str(n_ranks)] = json.loads([line for line in done.stdout.splitlines() if line.startswith('{"')][-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("large", "wide", "held", "pass", "ranks"))
    parser.add_argument("--folder", type=Path, help="folder for the data (default: that of the system)")
    parser.add_argument("--n-shards", type=int, default=N_SHARDS, help="of 410 MB each")
    parser.add_argument("--output", type=Path, help="JSON file to which the figures are added")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runs = {
            "large": lambda: large(folder, options.n_shards),
            "wide": lambda: wide(folder, WIDE, WIDE_LIMIT),
            "held": lambda: wide(folder, HELD, None),
            "pass": lambda: one_pass(folder),
            "ranks": on_ranks,
        }
        found = runs[options.what]()
    print(json.dumps(found, indent=1))
    if options.output:
        threads = os.cpu_count() if options.what in ("large", "wide", "held") else 1
        add_figures(options.output, options.what, threads or 1, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["_large"]:
        print(json.dumps(fit_large(Path(sys.argv[2]), sys.argv[3])))
    elif sys.argv[1:2] == ["_sgd"]:
        print(json.dumps(fit_sgd(Path(sys.argv[2]), sys.argv[3])))
    elif sys.argv[1:2] == ["_cell_g"]:
        if found := cell_g(REPEATS):
            print(json.dumps(found))
    else:
        main()

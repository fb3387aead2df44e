"""Fits on an accelerator. Run: python benchmarks/accelerator.py rates large cells --output FILE.

``rates`` are those of copies on the device and to it, and of products. ``large`` fits a large data set on the device,
from its memory and from a file in the page cache. ``cells`` fits C and D with ten times their samples on the CPU and on
the device.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmark_utils.cells import simulate
from benchmark_utils.machine import add_figures

from convexformer import ConvexAttentionClassifier, ConvexAttentionRegressor
from convexformer.nn.training.stopwatch import finish_work
from convexformer.storage import open_source
from convexformer_solvers import DenseMap, GroupL2, Logistic, Program, Squared, get_solver, solve

SAMPLE = (128, 64)  # tokens and width
ACTIVE = 13  # tokens that the targets depend on
ROWS = 8192  # samples that are written at once
WRITERS = 8  # threads
RATIOS = (0.1, 0.01)  # alpha over alpha_max
CELLS = ("C", "D")
SCALE = 10  # of the samples of a cell
TOLERANCE = 1e-4  # relative duality gap
REPEATS = 3
ESTIMATORS = {"squared": ConvexAttentionRegressor, "logistic": ConvexAttentionClassifier}


def seconds(device: str, run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call with the work that it leaves to the device, and its result."""
    finish_work(device)
    began = time.perf_counter()
    result = run()
    finish_work(device)
    return time.perf_counter() - began, result


def shortest(device: str, run: Callable[[], Any]) -> float:
    """Shortest seconds of some calls after a first one."""
    run()
    return min(seconds(device, run)[0] for _ in range(REPEATS))


def rates(device: str, side: int) -> dict[str, float]:
    """Bytes per second of copies, the read and the written ones on the device, and operations of products."""
    there = torch.ones((4 * side, side), device=device)
    here, other = torch.ones((4 * side, side)), torch.empty_like(there)
    here = here.pin_memory() if there.is_cuda else here
    found = {
        "copy": 2 * there.nbytes / shortest(device, lambda: other.copy_(there)),
        "to_device": here.nbytes / shortest(device, lambda: other.copy_(here, non_blocking=True)),
    }
    for dtype in (torch.float32, torch.float64):
        square = torch.ones((side, side), dtype=dtype, device=device)
        found[str(dtype).removeprefix("torch.")] = 2 * side**3 / shortest(device, lambda square=square: square @ square)
    return found


def fit_of_cell(program: Program, device: str) -> dict[str, Any]:
    """The last of two fits of a program on a device."""
    linear_map, y = program.map.to(device=device), program.y.to(device)
    for _ in range(2):
        again = Program(linear_map, y, program.loss, program.penalty, program.alpha)
        taken, result = seconds(device, lambda again=again: solve(again, get_solver("auto"), tol=TOLERANCE))
    certificate = result.certificate
    gap, primal = certificate.relative_gap, certificate.primal
    return {"seconds": taken, "n_iter": result.n_iter, "gap": gap, "primal": primal, "dual": certificate.dual}


def cells(device: str, scale: float) -> list[dict[str, Any]]:
    """The cells on the CPU and on the device."""
    found = []
    for cell in CELLS:
        instance = simulate(cell, scale=scale)
        for ratio in RATIOS:
            program = instance.program(ratio)
            fits = {place: fit_of_cell(program, place) for place in dict.fromkeys(("cpu", device))}
            found.append({"cell": cell, "scale": scale, "ratio": ratio, "fits": fits})
            print(json.dumps(found[-1]), flush=True)
    return found


def large_data(n_samples: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Independent features in float32 and scores, half of whose variance is noise."""
    stream = torch.Generator(device).manual_seed(0)
    X = torch.randn((n_samples, *SAMPLE), generator=stream, device=device)
    coef = torch.zeros(SAMPLE, device=device)
    coef[:: SAMPLE[0] // ACTIVE] = torch.randn(coef[:: SAMPLE[0] // ACTIVE].shape, generator=stream, device=device)
    scores = X.flatten(1) @ coef.flatten()
    return X, scores + scores.std() * torch.randn(n_samples, generator=stream, device=device)


def write(file: Path, X: torch.Tensor) -> float:
    """Write the samples to a file of numpy's format; seconds."""
    began = time.perf_counter()
    array = np.lib.format.open_memmap(file, "w+", np.float32, tuple(X.shape))

    def put(start: int) -> None:
        array[start : start + ROWS] = X[start : start + ROWS].cpu().numpy()

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(put, range(0, len(X), ROWS)))
    return time.perf_counter() - began


def read_rate(file: Path, device: str) -> float:
    """Bytes per second of reading all of a file, a quarter of a gigabyte at a time, to memory that the device reads."""
    source = open_source(str(file))
    buffer = torch.empty((ROWS, *SAMPLE), pin_memory=torch.device(device).type == "cuda")

    def read() -> None:
        for start in range(0, source.shape[0], ROWS):
            found = source.read(slice(start, min(start + ROWS, source.shape[0])))
            buffer[: len(found)].copy_(found)

    return 4 * math.prod(source.shape) / shortest("cpu", read)


def fit_of_large(name: str, X: Any, y: Any, alpha: float, device: str, **options: Any) -> dict[str, Any]:
    """A fit by an estimator, with what it read and the largest memory that it took on the device."""
    on_cuda = torch.device(device).type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_cuda else 0
    model = ESTIMATORS[name](alpha=alpha, tol=TOLERANCE, device=device, **options)
    taken, _ = seconds(device, lambda: model.fit(X, y))
    certificate, traffic = model.certificate_, model.traffic_
    told = {
        "seconds": taken,
        "n_iter": model.n_iter_,
        "gap": certificate.relative_gap,
        "primal": certificate.primal,
        "dual": certificate.dual,
        "tokens": int(np.count_nonzero(np.asarray(model.token_norms_))),
        "bytes_on_device": torch.cuda.max_memory_allocated(device) - before if on_cuda else None,
    }
    if traffic is not None:
        told |= {
            "passes": traffic.passes,
            "bytes": traffic.read_bytes,
            "read_rate": traffic.bytes_per_second,
            "waited_seconds": traffic.waited_seconds,
        }
    return told


def large(n_samples: int, device: str, limit: int, folder: Path) -> dict[str, Any]:
    """Fits to the large data from the memory of the device and from a file."""
    X, scores = large_data(n_samples, device)
    targets = {"squared": scores, "logistic": scores.sign()}
    found: dict[str, Any] = {"n_samples": n_samples, "sample": SAMPLE, "bytes": X.nbytes, "memory_limit": limit}
    alphas = {}
    for name, loss in (("squared", Squared()), ("logistic", Logistic())):
        program = Program(DenseMap(X), targets[name][:, None], loss, GroupL2(), 1.0, fit_intercept=True)
        alphas[name] = RATIOS[0] * program.alpha_max
    del program
    found["memory"] = {name: fit_of_large(name, X, targets[name], alphas[name], device) for name in ESTIMATORS}
    print(json.dumps(found["memory"]), flush=True)
    file = folder / "X.npy"
    found["write_seconds"] = write(file, X)
    del X
    found["read"] = read_rate(file, device)
    print(json.dumps({name: found[name] for name in ("write_seconds", "read")}), flush=True)
    found["disk"] = {}
    for name in ESTIMATORS:
        y = targets[name].cpu().numpy()
        found["disk"][name] = fit_of_large(name, str(file), y, alphas[name], device, memory_limit=limit)
        print(json.dumps(found["disk"][name]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("rates", "large", "cells"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--side", type=int, default=8192, help="of the matrices by which rates are measured")
    parser.add_argument("--samples", type=int, default=1_000_000, help="of the large data, 32 KiB each")
    parser.add_argument("--limit", type=float, default=16.0, help="memory_limit of fits to the file, in GiB")
    parser.add_argument("--folder", type=Path, help="for the file; default: that of temporary files")
    parser.add_argument("--scale", type=float, default=SCALE, help="samples of the cells over their usual number")
    parser.add_argument("--output", type=Path, help="JSON file to which the figures are added, part by part")
    options = parser.parse_args()
    warnings.simplefilter("error")
    device = options.device
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device
    limit = int(options.limit * 2**30)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure = {
            "rates": lambda: rates(device, options.side),
            "large": lambda: large(options.samples, device, limit, Path(folder)),
            "cells": lambda: cells(device, options.scale),
        }
        for part in options.parts:
            found = {"device": name, "found": measure[part]()}
            print(json.dumps(found), flush=True)
            if options.output:
                add_figures(options.output, part, torch.get_num_threads(), found)


if __name__ == "__main__":
    main()

"""Memory and seconds of probes whose pooled tokens are large. Run: python benchmarks/probe_memory.py."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmark_utils.machine import THREAD_VARIABLES, machine, memory

SHAPE = (100_000, 64, 384)
N_WEIGHTINGS = 128
LIMIT = 2**30
TOLERANCE = 1e-3
RATIO = 0.05  # of the alpha_max of 200 samples, whose own is larger than that of all
CHUNK = 1000


class Watch(threading.Thread):
    """The largest memory of a kind while a fit runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.done = 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.01):
            self.peak = max(self.peak, memory("RssAnon"))


def generate(folder: Path, n_samples: int) -> None:
    """Write tokens in half precision, and labels that are not a function of the mean token."""
    _, n_tokens, width = SHAPE
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(width)
    shape = (n_samples, n_tokens, width)
    tokens = np.lib.format.open_memmap(folder / "X.npy", "w+", np.float16, shape)
    scores = np.empty(n_samples)
    for start in range(0, n_samples, CHUNK):
        part = rng.standard_normal((min(CHUNK, n_samples - start), n_tokens, width), dtype=np.float32)
        tokens[start : start + CHUNK] = part
        scores[start : start + CHUNK] = np.maximum(part @ weight, 0).mean(1)
    tokens.flush()
    np.save(folder / "y.npy", scores > np.median(scores))


def fit(folder: Path, limit: int | None) -> dict[str, Any]:
    """Fit to the tolerance and report memory beyond what was there before."""
    from convexformer import ConvexProbeClassifier
    from convexformer.preprocessing import MeanPooling, QueryPooling, TokenGates

    X, y = np.load(folder / "X.npy", mmap_mode="r"), np.load(folder / "y.npy")
    dictionary = [MeanPooling(), QueryPooling(N_WEIGHTINGS - 32), TokenGates(31)]
    options: dict[str, Any] = {"dictionary": dictionary, "tol": TOLERANCE, "random_state": 0}
    few = np.linspace(0, len(y) - 1, 200).astype(int)
    alpha = RATIO * ConvexProbeClassifier(0.05, **options).fit(X[few], y[few]).alpha_max_
    before, watch = memory("RssAnon"), Watch()
    watch.start()
    began = time.perf_counter()
    model = ConvexProbeClassifier(alpha, memory_limit=limit, **options).fit(X, y)
    seconds = time.perf_counter() - began
    watch.done.set()
    watch.join()
    return {
        "seconds": seconds,
        "bytes": watch.peak - before,
        "gap": model.certificate_.relative_gap,
        "n_iter": model.n_iter_,
        "alpha_ratio": alpha / model.alpha_max_,
        "n_weightings_used": int(np.count_nonzero(model.weighting_norms_)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n-samples", type=int, nargs="+", default=[10_000, SHAPE[0]])
    parser.add_argument("--folder", type=Path, help="folder for data and temporary files (default: that of the system)")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    records = []
    print("| samples | limit, GB | pooled tokens, GB | held, GB | seconds | gap | iterations |")
    print("|---|---|---|---|---|---|---|")
    for n_samples in options.n_samples:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), "TMPDIR": folder}
            command = [sys.executable, __file__]
            subprocess.run([*command, "generate", folder, str(n_samples)], check=True, env=environment)
            pooled = 4 * n_samples * N_WEIGHTINGS * SHAPE[2]
            for limit in (None, LIMIT) if pooled < 2**33 else (LIMIT,):
                done = subprocess.run(
                    [*command, "fit", folder, str(limit)], check=True, env=environment, capture_output=True, text=True
                )
                found = json.loads(done.stdout)
                records.append({"n_samples": n_samples, "limit": limit, "pooled_bytes": pooled, **found})
                shown = "-" if limit is None else f"{limit / 1e9:.2g}"
                sizes = f"{pooled / 1e9:.3g} | {found['bytes'] / 1e9:.3g}"
                rest = f"{found['seconds']:.0f} | {found['gap']:.1e} | {found['n_iter']}"
                print(f"| {n_samples} | {shown} | {sizes} | {rest} |", flush=True)
    if options.output:
        options.output.write_text(json.dumps({**machine(1), "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["generate"]:
        generate(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1:2] == ["fit"]:
        print(json.dumps(fit(Path(sys.argv[2]), None if sys.argv[3] == "None" else int(sys.argv[3]))))
    else:
        main()

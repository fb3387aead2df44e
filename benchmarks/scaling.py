"""Weak scaling with one and two processes, and a cost model. Run: python benchmarks/scaling.py --output FILE.

Each rank has one thread and as many samples as the others. The model adds up seconds that are measured outside of the
timed fits: those of each product and message, times their number in a fit of one process, and those of rank 0 outside
of them, in that same fit. Its seconds stand beside the measured ones. Those of more ranks are a prediction, which
nothing was measured against. What is assumed:

- a fit takes the same commands on all numbers of ranks; those of two processes are recorded and modelled, too;
- each product of two processes takes as long as the slower of two at once, which share the memory of the machine;
- outside of commands, operations on tensors with an axis of all samples grow with their number, and each number that
  they write in a new tensor takes longer in longer ones, as that of `a + 1` does; the rest does not grow;
- gloo: a broadcast is a tree, of log2 R hops; a sum over the ranks is a ring, of R - 1 hops, and as many back where all
  ranks get it; scatter and gather take one hop for each other rank;
- more than two ranks are on machines of their own, with the rates of one process. Their messages take what they take
  here, more hops as gloo's smallest ones, and the bytes at the rate of the network besides.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import mmap
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmark_utils.machine import THREAD_VARIABLES, add_figures
from torch.utils._python_dispatch import TorchDispatchMode

from convexformer_solvers import DenseMap, GroupL2, Logistic, Program, Squared, get_solver, solve
from convexformer_solvers.distributed import DistributedConfig, Ranks, on_all_ranks, ranks, sharded

SAMPLE = (32, 16)  # tokens and width
SAMPLES = 60_000  # of each rank: 246 MB in float64
ACTIVE = 4  # tokens that the targets depend on
CORRELATION = 0.8  # of two tokens in the correlated design
DESIGNS = ("iid", "correlated")
RATIOS = (0.1, 0.01)  # alpha over alpha_max
TOLERANCE = 1e-4  # relative duality gap
PREDICTED = (8, 32, 128, 512)  # ranks
NETWORK = 1.25e9  # bytes per second: 10 Gbit/s
REPEATS = 15  # of micro-benchmarks
PAUSE = 0.005  # seconds between commands, in which the other ranks reach their longest interval of polling


def local_data(n_samples: int, rank: int, design: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples and scores of a rank; half of the scores' variance is noise, whose size is that of all ranks."""
    common = torch.Generator().manual_seed(0)
    coef = torch.zeros(SAMPLE, dtype=torch.float64)
    coef[torch.randperm(SAMPLE[0], generator=common)[:ACTIVE]] = torch.randn(
        ACTIVE, SAMPLE[1], generator=common, dtype=torch.float64
    )
    own, shared = torch.Generator().manual_seed(1 + rank), CORRELATION if design == "correlated" else 0.0
    X = torch.randn(n_samples, *SAMPLE, generator=own, dtype=torch.float64).mul_(math.sqrt(1 - shared))
    X += math.sqrt(shared) * torch.randn(n_samples, 1, SAMPLE[1], generator=own, dtype=torch.float64)
    variance = (1 - shared) * coef.square().sum() + shared * coef.sum(0).square().sum()
    noise = variance.sqrt() * torch.randn(n_samples, generator=own, dtype=torch.float64)
    return X, torch.tensordot(X, coef, 2) + noise


def programs(linear_map: Any, scores: torch.Tensor) -> Iterator[tuple[str, Callable[[], Program]]]:
    """Name and maker of each program."""
    for loss, y in ((Squared(), scores), (Logistic(), scores.sign())):
        alpha_max = Program(linear_map, y[:, None], loss, GroupL2(), 1.0).alpha_max
        for ratio in RATIOS:
            arguments = (linear_map, y[:, None], loss, GroupL2(), ratio * alpha_max)
            yield f"{type(loss).__name__}, {ratio}", functools.partial(Program, *arguments)


def timed(program: Program) -> tuple[float, Any]:
    """Seconds and result of a fit, of a program that knows nothing of the data yet."""
    began = time.perf_counter()
    result = solve(program, get_solver("auto"), tol=TOLERANCE)
    return time.perf_counter() - began, result


def timed_fits(linear_map: Any, scores: torch.Tensor, repeats: int) -> dict[str, Any]:
    """Median seconds of each fit after a first one, iterations and gap."""
    found = {}
    for name, make in programs(linear_map, scores):
        seconds, results = zip(*(timed(make()) for _ in range(repeats + 1)), strict=True)
        gap = results[-1].certificate.relative_gap
        found[name] = {"seconds": statistics.median(seconds[1:]), "n_iter": results[-1].n_iter, "relative_gap": gap}
    return found


# Counts of a fit


class Recorder(TorchDispatchMode):
    """Counts the commands of rank 0 by kind, which is the product, the precision and the shape of all arguments.

    As a mode it also adds up, of operations outside of commands on tensors with an axis of all samples, the seconds and
    the float64 numbers that they write in new tensors.
    """

    def __init__(self, n_samples: int, kinds: dict[str, Any]) -> None:
        super().__init__()
        self.n_samples, self.kinds, self.in_command = n_samples, kinds, False
        self.counts: Counter[str] = Counter()
        self.command_seconds = self.sample_seconds = self.written = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        found = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - began
        tensors = [part for part in (*args, found) if isinstance(part, torch.Tensor)]
        if not self.in_command and any(self.n_samples in part.shape for part in tensors):
            self.sample_seconds += seconds
            places = [part.untyped_storage().data_ptr() for part in tensors]
            self.written += n_bytes(found) / 8 if places and places[-1] not in places[:-1] else 0
        return found

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        original = sharded._Team.lead

        def lead(team: Any, command: Any, own: Any = None) -> Any:
            here, mine = team.maps[command.handle], None if own is None else own[0]
            self.in_command, began = True, time.perf_counter()
            found = original(team, command, own)
            self.note(here, command, mine, found)
            self.command_seconds += time.perf_counter() - began
            self.in_command = False
            return found

        sharded._Team.lead = lead  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            sharded._Team.lead = original  # type: ignore[method-assign]

    def note(self, here: DenseMap, command: Any, own: dict[str, Any] | None, found: Any) -> None:
        """Count a command; of a new kind keep the arguments, bytes read and sent, and flops of a Gram matrix."""
        arguments = command.common | (own or {})
        words = [f"{list(v.shape)} {v.dtype}" if isinstance(v, torch.Tensor) else v for v in arguments.values()]
        kind = " ".join(map(str, (command.method, list(here.shape), here.dtype, *words))).replace("torch.", "")
        self.counts[kind] += 1
        some = "blocks" in arguments
        p = len(arguments["blocks"]) * here.feature_shape[-1] if some else math.prod(here.feature_shape)
        parts = dict(zip(command.combine, found if len(command.combine) > 1 else (found,), strict=True))
        rows, total = parts.get("rows", parts.get("columns")), parts.get("sum")
        about = {
            "read": here.n_samples * p * here.dtype.itemsize,
            "flops": here.n_samples * n_bytes(total) // 8 if command.method == "gram" else 0,  # of a half
            "broadcast": sum(map(n_bytes, command.common.values())),
            "scatter": None if own is None else sum(map(n_bytes, own.values())),
            "reduce": n_bytes(total) if "sum" in parts else 8 if "max" in parts else None,
            "gather": None if rows is None else n_bytes(rows[0]),
        }
        product = {"method": command.method, "dtype": here.dtype, "shape": here.shape, "arguments": arguments}
        self.kinds.setdefault(kind, {**product, "about": about})


def n_bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def counted_fits(linear_map: Any, scores: torch.Tensor, kinds: dict[str, Any]) -> dict[str, Any]:
    """Commands of each fit by kind, and seconds of rank 0 outside of them: all, and those on all samples."""
    found = {}
    for name, make in programs(linear_map, scores):
        plain, mode = Recorder(len(scores), kinds), Recorder(len(scores), kinds)
        with plain.recording():
            outside = timed(make())[0] - plain.command_seconds
        with mode.recording(), mode:
            timed(make())
        on_samples = min(outside, mode.sample_seconds)
        found[name] = {"counts": dict(plain.counts), "outside_seconds": outside, "sample_seconds": on_samples}
        found[name] |= {"written": mode.written, "command_seconds": plain.command_seconds}
    return found


# Rates, outside of fits


def median_seconds(run: Callable[[], Any], together: bool = False, pause: float = 0.0) -> float:
    """Median seconds of a call, after a pause; `together`, all ranks make it at once and the slowest counts."""
    seconds = torch.zeros(REPEATS + 1, dtype=torch.float64)
    for repeat in range(len(seconds)):
        if together:
            dist.barrier()
        began = time.perf_counter()
        while time.perf_counter() < began + pause:
            pass
        began = time.perf_counter()
        run()
        seconds[repeat] = time.perf_counter() - began
    if together:
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds[1:].median())


def product_seconds(kinds: dict[str, Any]) -> dict[str, float]:
    """Seconds of each kind of product on random data, on all ranks at once."""
    found, maps = {}, {}
    for name, kind in sorted(kinds.items(), key=lambda item: str((item[1]["shape"], item[1]["dtype"]))):
        key = kind["shape"], kind["dtype"]
        if key not in maps:
            maps = {key: DenseMap(torch.randn(key[0], dtype=key[1]))}
        found[name] = median_seconds(functools.partial(getattr(maps[key], kind["method"]), **kind["arguments"]), True)
    return found


def message_rates(n_samples: int) -> dict[str, float]:
    """Seconds of commands and per byte: products of two ranks on small data, less those on one rank's part."""

    def seconds(*shape: int) -> tuple[float, float]:
        local = DenseMap(torch.zeros(shape, dtype=torch.float64))
        coef, values = torch.zeros((*shape[1:], 1)).double(), torch.zeros((shape[0], 1)).double()
        two = torch.cat([values, values])

        def work(both: Any) -> tuple[float, float]:
            forward = median_seconds(lambda: both.matvec(coef), pause=PAUSE) - median_seconds(
                lambda: local.matvec(coef)
            )
            back = median_seconds(lambda: both.rmatvec(two), pause=PAUSE) - median_seconds(
                lambda: local.rmatvec(values)
            )
            return forward, back

        return on_all_ranks(local, work, ranks())

    p, number = math.prod(SAMPLE) ** 2, torch.zeros(1)  # numbers of a Gram matrix
    (plain, with_values), tall, wide = seconds(1, 1, 1), seconds(n_samples, 1, 1), seconds(1, p, 1)
    return {
        "command": plain,
        "command_with_values": with_values,
        "hop": median_seconds(lambda: dist.all_reduce(number)) / 2,
        "gather": max(0.0, tall[0] - plain) / (8 * n_samples),
        "scatter": max(0.0, tall[1] - with_values) / (8 * n_samples),
        "broadcast": max(0.0, wide[0] - plain) / (8 * p),
        "reduce": max(0.0, wide[1] - with_values) / (8 * p),
    }


def vector_seconds(n_samples: int) -> dict[str, float]:
    """Seconds of each number of a new vector with one for each sample of so many ranks."""
    vectors = {size: torch.ones(size * n_samples, dtype=torch.float64) for size in (1, 2, *PREDICTED)}
    return {str(size): median_seconds(lambda a=a: a + 1) / len(a) for size, a in vectors.items()}  # type: ignore[misc]


def process(n_samples: int, design: str, repeats: int, folder: Path) -> None:
    """Measure on this rank; rank 0 writes what it found. Two processes take the products of one, too."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    data, own_scores = local_data(n_samples, rank, design)
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, own_scores)
    scores, local = torch.cat(parts), DenseMap(data)
    kinds: dict[str, Any] = {} if size == 1 else pickle.loads((folder / "kinds").read_bytes())
    fits = on_all_ranks(local, lambda A: timed_fits(A, scores, repeats), ranks())
    team = ranks() or Ranks(DistributedConfig())
    counted = on_all_ranks(local, lambda A: counted_fits(A, scores, kinds), team)
    del local, data
    shared = [kinds]
    dist.broadcast_object_list(shared)
    found: dict[str, Any] = {"fits": {name: fit | counted[name] for name, fit in fits.items()}}
    found["kinds"] = {name: kind["about"] for name, kind in shared[0].items()}
    found["products"] = product_seconds(shared[0])
    if size == 1:
        (folder / "kinds").write_bytes(pickle.dumps(kinds))
        found["vectors"] = vector_seconds(n_samples)
    else:
        found["messages"] = message_rates(n_samples)
    if rank == 0:
        (folder / str(size)).write_text(json.dumps(found))


# The model


def hops(about: dict[str, Any], size: int) -> float:
    """Messages of a command that follow each other; the ranks agree by a sum over all that none has failed."""
    tree, others = math.log2(size), size - 1
    n_trees = 1 + (about["broadcast"] >= mmap.PAGESIZE) + (about["scatter"] is not None)
    n_rings = 2 + sum(about[name] is not None for name in ("scatter", "gather", "reduce"))
    return n_trees * tree + n_rings * others


def message_seconds(about: dict[str, Any], rates: dict[str, float], size: int, network: float) -> float:
    """Seconds of the messages of a command."""
    latency = rates["command" if about["scatter"] is None else "command_with_values"]
    latency += (hops(about, size) - hops(about, 2)) * rates["hop"]
    times = {"broadcast": math.log2(size), "scatter": size - 1, "gather": size - 1, "reduce": 2 * (size - 1) / size}
    return latency + sum(n * (about[name] or 0) * (rates[name] + 1 / network) for name, n in times.items())


def predicted(
    fit: dict[str, Any], counts: dict[str, int], runs: dict[int, Any], size: int, network: float = math.inf
) -> dict[str, float]:
    """Seconds of a fit in one process and of its commands on so many ranks, by part."""
    of_rates, vectors, messages = runs[2 if size == 2 else 1]["products"], runs[1]["vectors"], 0.0
    if size > 1:
        abouts, rates = runs[2]["kinds"], runs[2]["messages"]
        messages = sum(n * message_seconds(abouts[kind], rates, size, network) for kind, n in counts.items())
    parts = {
        "products": sum(n * of_rates[kind] for kind, n in counts.items()),
        "messages": messages,
        "rank_0_on_samples": size * (fit["sample_seconds"] + fit["written"] * (vectors[str(size)] - vectors["1"])),
        "rank_0_else": fit["outside_seconds"] - fit["sample_seconds"],
    }
    return {"seconds": sum(parts.values()), **parts}


def compared(name: str, runs: dict[int, Any], network: float) -> dict[str, Any]:
    """Measured and modelled seconds of a fit."""
    one, two = (runs[size]["fits"][name] for size in (1, 2))
    model = {size: predicted(one, one["counts"], runs, size) for size in (1, 2)}
    more = {size: predicted(one, one["counts"], runs, size, network) for size in PREDICTED}
    of_two = predicted(one, two["counts"], runs, 2)
    abouts = runs[1]["kinds"]
    return {
        "measured": {1: one["seconds"], 2: two["seconds"]},
        "model": model,
        "model_over_measured": {1: model[1]["seconds"] / one["seconds"], 2: model[2]["seconds"] / two["seconds"]},
        "with_the_commands_of_two_processes": {**of_two, "over_measured": of_two["seconds"] / two["seconds"]},
        "efficiency": one["seconds"] / two["seconds"],
        "model_efficiency": model[1]["seconds"] / model[2]["seconds"],
        "prediction": {R: {**p, "efficiency": model[1]["seconds"] / p["seconds"]} for R, p in more.items()},
        "command_seconds_in_the_fit": {1: one["command_seconds"], 2: two["command_seconds"]},
        "n_iter": {1: one["n_iter"], 2: two["n_iter"]},
        "relative_gap": {1: one["relative_gap"], 2: two["relative_gap"]},
        "counts": {1: one["counts"], 2: two["counts"]},
        "read_bytes": sum(n * abouts[kind]["read"] for kind, n in one["counts"].items()),
        "gram_flops": sum(n * abouts[kind]["flops"] for kind, n in one["counts"].items()),
    }


def measure(samples: int, repeats: int, network: float) -> dict[str, Any]:
    """Both numbers of processes on each design, with the model's seconds."""
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}
    found: dict[str, Any] = {"samples_of_a_rank": samples, "sample": SAMPLE, "network": network}
    for design in DESIGNS:
        runs = {}
        with tempfile.TemporaryDirectory() as folder:
            for size in (1, 2):
                start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
                work = [__file__, "_process", str(samples), design, str(repeats), folder]
                subprocess.run([*start, *work], check=True, env=environment)
                runs[size] = json.loads((Path(folder) / str(size)).read_text())
        seconds = {size: run["products"] for size, run in runs.items()}
        products = {
            kind: {**about, "seconds": {size: found_here.get(kind) for size, found_here in seconds.items()}}
            for kind, about in runs[2]["kinds"].items()
        }
        rates = {"products": products, "messages": runs[2]["messages"], "vectors": runs[1]["vectors"]}
        found[design] = {"fits": {name: compared(name, runs, network) for name in runs[1]["fits"]}, "rates": rates}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each rank, 4096 bytes each")
    parser.add_argument("--repeats", type=int, default=5, help="of each fit")
    parser.add_argument("--network", type=float, default=NETWORK, help="bytes per second of the predictions")
    parser.add_argument("--output", type=Path, help="JSON file to which the figures are added")
    options = parser.parse_args()
    found = measure(options.samples, options.repeats, options.network)
    print(json.dumps(found, indent=1))
    if options.output:
        add_figures(options.output, "scaling", 1, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["_process"]:
        process(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()

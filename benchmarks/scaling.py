"""Weak scaling with one and two processes, and a cost model. Run: python benchmarks/scaling.py --output FILE.

Each rank has one thread and as many samples as the others, and works on the vectors of its samples. The model adds up
seconds that are measured outside of the timed fits: those of each product and message, times their number in a fit,
and two that are measured in a fit of as many ranks: those of the operations on a rank's vectors, and those of rank 0
outside of commands. Its seconds stand beside the measured ones. Those of more ranks are a prediction, which nothing was
measured against. What is assumed:

- a fit takes the same commands on all numbers of ranks; those of two processes are recorded and modelled, too;
- each product of two processes takes as long as the slower of two at once, which share the memory of the machine;
- operations on a rank's vectors and the work of rank 0 outside of commands do not grow with the number of ranks;
- gloo: a broadcast is a tree, of log2 R hops; rank 0 takes the ranks' answers one after the other, each in the seconds
  that one of eight processes takes here, which share two cores; sums that are too long for an answer are a ring, of
  R - 1 hops;
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

from convexformer_solvers import DenseMap, GroupL2, Logistic, Program, Squared, get_solver, solve
from convexformer_solvers.distributed import DistributedConfig, Ranks, on_all_ranks, ranks
from convexformer_solvers.distributed.operations import Operation
from convexformer_solvers.distributed.ranks import packed
from convexformer_solvers.distributed.team import Team
from convexformer_solvers.linear_maps.base import LinearMap

SAMPLE = (32, 16)  # tokens and width
SAMPLES = 120_000  # of each rank: 492 MB in float64
ACTIVE = 4  # tokens that the targets depend on
CORRELATION = 0.8  # of two tokens in the correlated design
DESIGNS = ("iid", "correlated")
RATIOS = (0.1, 0.01)  # alpha over alpha_max
TOLERANCE = 1e-4  # relative duality gap
PREDICTED = (8, 32, 128, 512)  # ranks
NETWORK = 1.25e9  # bytes per second: 10 Gbit/s
REPEATS = 15  # of micro-benchmarks
SENDERS = (2, 8)  # processes whose answers are timed
PAUSE = 0.005  # seconds between commands, in which the other ranks come to wait


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


class Recorder:
    """Counts the commands of rank 0 by kind: the product, the precision and the shape of all arguments.

    A command without a product counts as ``"values"``. Seconds of commands and of the operations in them are added up.
    """

    def __init__(self, kinds: dict[str, Any]) -> None:
        self.kinds = kinds
        self.counts: Counter[str] = Counter()
        self.command_seconds = self.operation_seconds = 0.0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        of_lead, of_run = Team.lead, Operation.run

        def lead(team: Team, command: Any, own: Any = None) -> Any:
            here, n_bytes = team.parts.get(command.name), len(packed(team._noted))
            began = time.perf_counter()
            found = of_lead(team, command, own)
            self.command_seconds += time.perf_counter() - began
            self.note(here, command, n_bytes, found)
            return found

        def run(operation: Operation, *arguments: Any) -> None:
            began = time.perf_counter()
            of_run(operation, *arguments)
            self.operation_seconds += time.perf_counter() - began

        Team.lead, Operation.run = lead, run  # type: ignore[method-assign]
        try:
            yield
        finally:
            Team.lead, Operation.run = of_lead, of_run  # type: ignore[method-assign]

    def note(self, here: Any, command: Any, n_bytes: int, found: Any) -> None:
        """Count a command; of a new kind keep the arguments, bytes read and sent, and flops of a Gram matrix."""
        is_product = isinstance(here, LinearMap) and command.method not in ("placed", "rows", "traffic", "largest")
        arguments = command.common if is_product else {}
        words = [f"{list(v.shape)} {v.dtype}" if isinstance(v, torch.Tensor) else v for v in arguments.values()]
        place = [command.method, list(here.shape), here.dtype] if is_product else ["values", n_bytes // mmap.PAGESIZE]
        kind = " ".join(map(str, (*place, *words))).replace("torch.", "")
        self.counts[kind] += 1
        parts = dict(zip(command.combine, found if len(command.combine) > 1 else (found,), strict=True))
        total = parts.get("sum")
        about = {"read": 0, "flops": 0, "broadcast": n_bytes, "reduce": size_of(total) if "sum" in parts else None}
        product = None
        if is_product:
            p = (
                len(arguments["blocks"]) * here.feature_shape[-1]
                if "blocks" in arguments
                else math.prod(here.shape[1:])
            )
            about["read"] = here.n_samples * p * here.dtype.itemsize
            about["flops"] = here.n_samples * size_of(total) // 8 if command.method == "gram" else 0  # of a half
            about["broadcast"] += sum(map(size_of, arguments.values()))
            own = {name: of_one_rank(value, here.n_samples) for name, value in arguments.items()}
            product = {"method": command.method, "dtype": here.dtype, "shape": here.shape, "arguments": own}
        self.kinds.setdefault(kind, {"product": product, "about": about})


def of_one_rank(value: Any, n_samples: int) -> Any:
    """An argument as a rank gets it: of values on the ranks, others of the shape of its part."""
    if not hasattr(value, "sample_layout"):
        return value
    return torch.randn((n_samples, *value.shape[1:]), dtype=value.dtype)


def size_of(value: Any) -> int:
    """Bytes of a tensor in a message; none of those that stay on the ranks."""
    if not isinstance(value, torch.Tensor) or hasattr(value, "sample_layout"):
        return 0
    return value.numel() * value.element_size()


def counted_fits(linear_map: Any, scores: torch.Tensor, kinds: dict[str, Any]) -> dict[str, Any]:
    """Commands of each fit by kind, and seconds of it, of operations on a rank and outside of commands."""
    found = {}
    for name, make in programs(linear_map, scores):
        recorder = Recorder(kinds)
        with recorder.recording():
            seconds = timed(make())[0]
        outside = seconds - recorder.command_seconds
        seconds = {"outside_seconds": outside, "operation_seconds": recorder.operation_seconds}
        found[name] = {"counts": dict(recorder.counts), **seconds}
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
    products = {name: kind["product"] for name, kind in kinds.items() if kind["product"] is not None}
    found, maps = {}, {}
    for name, product in sorted(products.items(), key=lambda item: str((item[1]["shape"], item[1]["dtype"]))):
        key = product["shape"], product["dtype"]
        if key not in maps:
            maps = {key: DenseMap(torch.randn(key[0], dtype=key[1]))}
        run = functools.partial(getattr(maps[key], product["method"]), **product["arguments"])
        found[name] = median_seconds(run, True)
    return found


def message_rates() -> dict[str, float]:
    """Seconds of commands and per byte: products of two ranks on small data, less those on one rank's part."""

    def seconds(p: int) -> tuple[float, float]:
        local = DenseMap(torch.zeros((1, p, 1), dtype=torch.float64))
        coef, values = torch.zeros((p, 1, 1)).double(), torch.zeros((1, 1)).double()

        def work(both: Any) -> tuple[float, float]:
            two = both.placed(torch.cat([values, values]))
            forward = median_seconds(lambda: both.matvec(coef), pause=PAUSE)
            back = median_seconds(lambda: both.rmatvec(two), pause=PAUSE)
            of_local = median_seconds(lambda: local.matvec(coef)), median_seconds(lambda: local.rmatvec(values))
            return forward - of_local[0], back - of_local[1]

        return on_all_ranks(local, work, ranks())

    p, number = math.prod(SAMPLE) ** 2, torch.zeros(1)  # numbers of a Gram matrix
    (forward, back), (wide, wide_back) = seconds(1), seconds(p)
    return {
        "command": forward,
        "hop": median_seconds(lambda: dist.all_reduce(number)) / 2,
        "broadcast": max(0.0, wide - forward) / (8 * p),
        "reduce": max(0.0, wide_back - back) / (8 * p),
    }


def answers_process(folder: Path) -> None:
    """Write the seconds in which rank 0 gets a page of each rank, which all wait for it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size, page = dist.get_rank(), dist.get_world_size(), torch.zeros(mmap.PAGESIZE, dtype=torch.uint8)
    pages = [torch.empty_like(page) for _ in range(size)] if rank == 0 else None
    seconds = median_seconds(lambda: dist.gather(page, pages), pause=PAUSE if rank == 0 else 0.0)
    if rank == 0:
        (folder / f"answers_{size}").write_text(json.dumps(seconds))
    dist.destroy_process_group()


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
    config = DistributedConfig(least_samples=1)
    team = ranks(config) or Ranks(config)
    fits = on_all_ranks(local, lambda A: timed_fits(A, scores, repeats), team)
    plain = timed_fits(local, scores, repeats) if size == 1 else {}
    counted = on_all_ranks(local, lambda A: counted_fits(A, scores, kinds), team)
    del local, data
    shared = [kinds]
    dist.broadcast_object_list(shared)
    found: dict[str, Any] = {"fits": {name: fit | counted[name] for name, fit in fits.items()}, "plain": plain}
    found["kinds"] = {name: kind["about"] for name, kind in shared[0].items()}
    found["products"] = product_seconds(shared[0])
    if size == 1:
        (folder / "kinds").write_bytes(pickle.dumps(kinds))
    else:
        found["messages"] = message_rates()
    if rank == 0:
        (folder / str(size)).write_text(json.dumps(found))


# The model


def message_seconds(about: dict[str, Any], rates: dict[str, float], size: int, network: float) -> float:
    """Seconds of the messages of a command: a broadcast, answers, and for a long sum another broadcast and the sum."""
    n_bytes, of_a_byte = about["reduce"] or 0, rates["reduce"] + 1 / network
    is_long = n_bytes > mmap.PAGESIZE and n_bytes * of_a_byte > rates["hop"]

    def hops(size: int) -> float:
        n_trees = 1 + (about["broadcast"] >= mmap.PAGESIZE) + is_long
        return n_trees * math.log2(size) + is_long * (size - 1)

    latency = rates["command"] + (hops(size) - hops(2)) * rates["hop"] + (size - 2) * rates["answer"]
    there = math.log2(size) * about["broadcast"] * (rates["broadcast"] + 1 / network)
    return latency + there + (2 * (size - 1) / size if is_long else size - 1) * n_bytes * of_a_byte


def predicted(
    fit: dict[str, Any], counts: dict[str, int], runs: dict[int, Any], size: int, network: float = math.inf
) -> dict[str, float]:
    """Seconds of a fit and of its commands on so many ranks, by part."""
    of_rates, messages = runs[2 if size == 2 else 1]["products"], 0.0
    if size > 1:
        abouts, rates = runs[2]["kinds"], runs[2]["messages"]
        messages = sum(n * message_seconds(abouts[kind], rates, size, network) for kind, n in counts.items())
    parts = {
        "products": sum(n * of_rates.get(kind, 0.0) for kind, n in counts.items()),
        "messages": messages,
        "vectors": fit["operation_seconds"],
        "rank_0_else": fit["outside_seconds"],
    }
    return {"seconds": sum(parts.values()), **parts}


def compared(name: str, runs: dict[int, Any], network: float) -> dict[str, Any]:
    """Measured and modelled seconds of a fit."""
    one, two = (runs[size]["fits"][name] for size in (1, 2))
    model = {1: predicted(one, one["counts"], runs, 1), 2: predicted(two, one["counts"], runs, 2)}
    more = {size: predicted(one, one["counts"], runs, size, network) for size in PREDICTED}
    of_two = predicted(two, two["counts"], runs, 2)
    abouts, plain = runs[1]["kinds"], runs[1]["plain"][name]["seconds"]
    return {
        "plain": plain,
        "measured": {1: one["seconds"], 2: two["seconds"]},
        "model": model,
        "model_over_measured": {1: model[1]["seconds"] / one["seconds"], 2: model[2]["seconds"] / two["seconds"]},
        "with_the_commands_of_two_processes": {**of_two, "over_measured": of_two["seconds"] / two["seconds"]},
        "efficiency": plain / two["seconds"],
        "prediction": {R: {**p, "efficiency": plain / p["seconds"]} for R, p in more.items()},
        "n_iter": {1: one["n_iter"], 2: two["n_iter"]},
        "relative_gap": {1: one["relative_gap"], 2: two["relative_gap"]},
        "counts": {1: one["counts"], 2: two["counts"]},
        "read_bytes": sum(n * abouts[kind]["read"] for kind, n in one["counts"].items()),
        "gram_flops": sum(n * abouts[kind]["flops"] for kind, n in one["counts"].items()),
    }


def start(size: int, *arguments: str) -> None:
    """Run this script on so many ranks with one thread each."""
    ranks_of = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}
    subprocess.run([*ranks_of, __file__, *arguments], check=True, env=environment)


def measure(samples: int, repeats: int, network: float) -> dict[str, Any]:
    """Both numbers of processes on each design, with the model's seconds."""
    found: dict[str, Any] = {"samples_of_a_rank": samples, "sample": SAMPLE, "network": network}
    for design in DESIGNS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for size in (1, 2):
                start(size, "_process", str(samples), design, str(repeats), name)
            for size in SENDERS:
                start(size, "_answers", name)
            runs = {size: json.loads((folder / str(size)).read_text()) for size in (1, 2)}
            few, many = (json.loads((folder / f"answers_{size}").read_text()) for size in SENDERS)
        runs[2]["messages"]["answer"] = max(0.0, many - few) / (SENDERS[1] - SENDERS[0])
        seconds = {size: run["products"] for size, run in runs.items()}
        products = {
            kind: {**about, "seconds": {size: found_here.get(kind) for size, found_here in seconds.items()}}
            for kind, about in runs[2]["kinds"].items()
        }
        rates = {"products": products, "messages": runs[2]["messages"]}
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
    elif sys.argv[1:2] == ["_answers"]:
        answers_process(Path(sys.argv[2]))
    else:
        main()

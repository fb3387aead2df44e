"""Contenders side by side: seconds against certified gap, one process each, at a fixed number of threads.

Run: python benchmarks/run.py --quick
     python benchmarks/run.py --cells A B --ratios .1 .01 --both --repeats 5 --output results
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmark_utils.cells import CELLS
from benchmark_utils.machine import THREAD_VARIABLES, machine
from benchmark_utils.report import TARGETS, Problem, Record, details, draw, scores, skips, summary
from contender import HERE, contend, load

# Name in the tables, file under solvers/, parameters.
CONTENDERS: dict[str, tuple[str, dict[str, str]]] = {
    "adelie": ("adelie", {}),
    "celer": ("celer", {}),
    "skglm": ("skglm", {}),
    "group-lasso": ("group_lasso", {}),
    "pyscnn": ("pyscnn", {}),
    "clarabel": ("cvxpy", {"solver": "CLARABEL"}),
    "scs": ("cvxpy", {"solver": "SCS"}),
    "adam": ("adam", {}),
}
# Name in the tables, file under datasets/, parameters.
REAL: dict[str, tuple[str, dict[str, str]]] = {
    "digits": ("digits", {}),
    "japanese_vowels": ("japanese_vowels", {}),
    "bert": ("bert", {}),
    "sentences": ("sentences", {}),
    "sentences_logistic": ("sentences", {"loss": "logistic"}),
    "sentences_softmax": ("sentences", {"loss": "softmax"}),
}
EVERYONE = ["auto", "fista", *CONTENDERS]
# The peers that are best somewhere; the others never are within a quick limit.
QUICK_SOLVERS = ["auto", "adelie", "skglm", "celer", "fista"]
QUICK = {"ratios": [0.1], "seeds": [0], "repeats": 1, "limit": 2.5, "budget": 230.0}
FULL = {"ratios": [0.1, 0.01], "seeds": [0], "repeats": 5, "limit": 30.0, "budget": float("inf")}
# Factors on the number of samples of a quick run.
QUICK_SCALES = {"A": 0.5, "B": 0.5, "C": 0.1, "D": 0.2, "E": 0.25, "F": 0.25, "G": 0.05}
# Loading, converting and compiling are not timed, but must end.
PREPARATION_SECONDS = 120.0


class Data(NamedTuple):
    """An instance on disk, with what the table calls it."""

    name: str
    design: str
    seed: int
    folder: Path


def datasets(options: argparse.Namespace, scratch: Path) -> Iterator[Data]:
    """Each chosen data set in turn, generated once and saved for the processes of the contenders."""
    for name in options.cells:
        file, fixed = REAL.get(name, ("cells", {}))
        dataset_class = load(HERE / "datasets" / f"{file}.py").Dataset
        designs = options.designs if name in CELLS else ["real"]
        for design in designs:
            for seed in options.seeds if name in CELLS else [0]:
                scale = options.scale or (QUICK_SCALES.get(name, 1.0) if options.quick else 1.0)
                parameters = {"cell": name, "design": design, "seed": seed, "scale": scale}
                folder = scratch / f"{name}-{design}-{seed}"
                try:
                    data = dataset_class.get_instance(**(parameters if name in CELLS else fixed)).get_data()
                except (ImportError, OSError) as error:
                    print(f"{name} skipped: {str(error).splitlines()[0]}", file=sys.stderr)
                    continue
                data["instance"].save(folder)
                del data
                yield Data(name, design, seed, folder)
                for path in folder.iterdir():
                    path.unlink()


def compete(options: argparse.Namespace, scratch: Path) -> Iterator[Record]:
    """Records of all contenders, interleaved over the repeats so that a busy moment hits them alike."""
    began = time.monotonic()
    for data in datasets(options, scratch):
        # Every cell has its share of the budget, and what earlier ones left; ours always runs.
        deadline = began + options.budget * (options.cells.index(data.name) + 1) / len(options.cells)
        for ratio in options.ratios:
            for repeat in range(options.repeats):
                shift = repeat % len(options.solvers)
                for name in options.solvers[shift:] + options.solvers[:shift]:
                    record = Record(Problem(data.name, ratio, data.design), data.seed, repeat, name)
                    if time.monotonic() > deadline and name != options.ours:
                        record.status, record.reason = (
                            "skipped",
                            f"its share of the budget of {options.budget:g} s was spent",
                        )
                    else:
                        run_contender(record, data.folder, options)
                    yield record


def run_contender(record: Record, folder: Path, options: argparse.Namespace) -> None:
    """Run one contender in a fresh process and fill its record; ends it at the limit."""
    file, parameters = CONTENDERS.get(record.contender, ("convexformer", {"solver": record.contender}))
    job = {
        "file": file,
        "parameters": parameters,
        "folder": str(folder),
        "ratio": record.problem.ratio,
        "dtype": options.dtype,
        "limit": options.limit,
        "target": TARGETS[-1],
    }
    processes = multiprocessing.get_context("forkserver")
    events, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=contend, args=(job, sender), daemon=True)
    process.start()
    sender.close()
    try:
        listen(events, record, options.limit)
    finally:
        process.kill()
        process.join()


def listen(events: Connection, record: Record, limit: float) -> None:
    """Take in events until the process ends or a run exceeds the limit."""
    patience, allowed, phase = PREPARATION_SECONDS, limit, "preparing"
    while True:
        if not events.poll(patience):
            record.status, record.reason = "stopped", f"stopped after {patience:.3g} s of {phase}"
            return
        try:
            event = events.recv()
        except EOFError:
            if phase not in ("end", "skip", "failed"):
                record.status, record.reason = "failed", f"its process died during {phase}"
            return
        kind = event["event"]
        if kind == "ready":
            # Who watches the clock itself keeps its curve: it may still certify its last point.
            allowed = 2 * limit + 5 if event["watches_clock"] else limit + 0.5
        patience, phase = (allowed, f"rung {event['rung']:g}") if kind == "begin" else (PREPARATION_SECONDS, kind)
        absorb(record, event)


def absorb(record: Record, event: dict[str, Any]) -> None:
    """Enter one event into the record."""
    if event["event"] == "end":
        record.points += event["points"]
        record.memory = event["memory"]
    elif event["event"] in ("skip", "failed"):
        record.status = "skipped" if event["event"] == "skip" else "failed"
        record.reason = event["reason"]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="reduced cells and limits: under five minutes")
    parser.add_argument("--cells", nargs="+", choices=[*CELLS, *REAL], default=list(CELLS))
    parser.add_argument("--ratios", nargs="+", type=float, help="alpha over the smallest alpha with a zero solution")
    design = parser.add_mutually_exclusive_group()
    for name, value in {"iid": ["iid"], "correlated": ["correlated"], "both": ["correlated", "iid"]}.items():
        design.add_argument(f"--{name}", dest="designs", action="store_const", const=value)
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--solvers", nargs="+", help=f"default: {' '.join(EVERYONE)}; or any of our registered names")
    parser.add_argument("--ours", default="auto", help="the contender that the others are compared with")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, help="seconds of one run of one contender")
    parser.add_argument("--budget", type=float, help="seconds after which no further contender starts")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--scale", type=float, help="factor on the number of samples of the simulated cells")
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument("--output", type=Path, default=Path("benchmark-results"))
    parser.set_defaults(designs=["correlated"])
    options = parser.parse_args(arguments)
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.solvers is None:
        everyone = QUICK_SOLVERS if options.quick else EVERYONE
        options.solvers = [options.ours, *(name for name in everyone if name not in (options.ours, "auto"))]
    return options


def start_server(threads: int) -> None:
    """Start the process that contenders are forked from: threads fixed, only what all of them share imported.

    Contenders then start in milliseconds with clean memory, and no peer's import reaches another's process.
    """
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    # The server does not take over sys.path.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["contender", "convexformer_solvers", "convexformer_solvers.solve"])


def main() -> None:
    options = parse()
    start_server(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    records = []
    with tempfile.TemporaryDirectory() as scratch:
        for record in compete(options, Path(scratch)):
            records.append(record)
            place = f"{record.problem.dataset} {record.problem.ratio:g} {record.problem.design}"
            gap = f"gap {record.best_gap(options.limit):.1e}" if record.points else ""
            print(f"{place} {record.contender}: {record.status} {gap} {record.reason}", file=sys.stderr, flush=True)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    contents = {
        "settings": settings,
        **machine(options.threads),
        "records": [dataclasses.asdict(record) for record in records],
    }
    (options.output / "results.json").write_text(json.dumps(contents, indent=1))
    table = scores(records, options.limit)
    texts = [summary(table, options.ours, options.limit), details(table), skips(records)]
    (options.output / "results.md").write_text("\n\n".join(texts) + "\n")
    print("\n\n".join(texts))
    draw(records, options.output)


if __name__ == "__main__":
    main()

"""``convexformer activations``: activations of a pretrained encoder in shards on a disk."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
from typing import Any

from .inputs import CommandError, check_folder, named_path
from .output import GOES_ON, HelpFormatter, as_lines
from .processes import own_device

# Options that are arguments of ``ActivationShards`` by the same name.
_SETTINGS = ("model", "layer", "n_tokens", "site", "short", "dtype", "shard_rows", "batch_size", "attention")


def add_command(commands: Any, common: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    command = commands.add_parser(
        "activations",
        parents=[common],
        help="run texts through a pretrained encoder and store activations of layers in shards",
        description="Store what enters and leaves layers of a pretrained encoder. A call that was interrupted goes "
        "on. Under torchrun each process writes a part of the shards.",
        formatter_class=HelpFormatter,
    )
    command.add_argument("texts", help="text file in UTF-8 with one text a line, or 'documentation'")
    command.add_argument("--model", help="folder or name; default: all-MiniLM-L6-v2")
    command.add_argument(
        "--layer", type=_layers, default=2, help="layer of the encoder, from 0; several as 0,2,5, or all, in one pass"
    )
    command.add_argument("--out", type=named_path, required=True, help="folder for the shards")
    command.add_argument("--n-tokens", type=int, default=32, help="tokens of a text; the first ones are used")
    command.add_argument("--site", choices=("attention", "layer"), default="attention", help="where outputs are taken")
    command.add_argument("--attention", action="store_true", help="store the attention maps too")
    command.add_argument("--shard-rows", type=int, default=2048, help="texts of each shard")
    command.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="precision of storage")
    command.add_argument("--workers", type=int, default=1, help="processes on this machine")
    command.add_argument("--batch-size", type=int, default=32, help="texts that the encoder runs at once")
    command.add_argument(
        "--short",
        choices=("pad", "drop", "error"),
        default="error",
        help="what to do with texts of fewer tokens: fill them up, leave them out or stop",
    )
    command.add_argument("--device", help="cpu or cuda; default: cpu")
    command.set_defaults(run=_run)


def _layers(text: str) -> int | list[int] | str:
    """A layer, several with commas between them, or all."""
    if text == "all":
        return text
    try:
        layers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, several as 0,2,5, or all, got {text!r}") from None
    return layers if len(layers) > 1 else layers[0]


def _run(options: argparse.Namespace) -> dict[str, Any]:
    check_folder(options.out)
    if options.workers < 1:
        raise CommandError(f"--workers must be 1 or more, got {options.workers}")
    if options.workers > 1 and "WORLD_SIZE" in os.environ:
        raise CommandError("--workers is not for torchrun, which starts the processes itself; leave it out")
    from convexformer.datasets._activation_shards import ActivationShards

    settings = {name: getattr(options, name) for name in _SETTINGS}
    settings |= {"folder": options.out, "sentences": options.texts, "device": own_device(options.device)}
    job = ActivationShards(**settings)
    verbose = not (options.quiet or options.json)
    try:
        if options.workers == 1:
            finished = job.write(verbose=verbose)
        else:
            finished = _run_workers(job, settings, options.workers, verbose)
    except KeyboardInterrupt:
        print(GOES_ON.format(options.out), file=sys.stderr)
        raise
    report = {
        "shards": str(options.out),
        "samples": len(job.index),
        **{name: job.info[name] for name in ("n_tokens", "encoder", "layer", "site", "dtype", "fingerprint")},
        "finished": finished,
    }
    if not finished:
        n = len(job.unfinished())
        report["remark"] = f"shards that are left to other processes, the last of which finishes: {n}"
    report["text"] = as_lines(report)
    return report


def _run_workers(job: Any, settings: dict[str, Any], workers: int, verbose: bool) -> bool:
    """Let processes write the shards; whether all are written."""
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    import torch

    job.unfinished()  # mistakes in the input show here, before processes start
    threads = max(1, torch.get_num_threads() // workers)
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # a copy of this process would hang in the threads of torch
    with ProcessPoolExecutor(workers, context, initializer=_start, initargs=(threads,)) as pool:
        parts = [pool.submit(_write, settings, worker, workers, verbose and not worker) for worker in range(workers)]
        try:
            finished = [part.result() for part in parts]
        except KeyboardInterrupt:
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()  # a shard has its name only when it is whole
            raise
        except BrokenProcessPool as error:
            first, *others = job.unfinished() or ["none"]
            raise RuntimeError(
                f"a worker ended without a message, as when it is killed for want of memory; unfinished: {first} and "
                f"{len(others)} more; the same command goes on"
            ) from error
    return any(finished)  # by whichever worker was the last


def _start(threads: int) -> None:
    """Prepare a process, which its parent ends after Ctrl-C."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up, which a terminated process does not
    torch.set_num_threads(threads)


def _write(settings: dict[str, Any], worker: int, workers: int, verbose: bool) -> bool:
    from convexformer.datasets._activation_shards import ActivationShards

    return ActivationShards(**settings).write(worker, workers, verbose)

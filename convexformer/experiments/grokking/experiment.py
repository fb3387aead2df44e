"""The experiment on grokking (paper [C], Figs 4 to 7): steps that methods take to learn division modulo p."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from convexformer.experiments.common import Unit, begin_report, finish_report, report_path, run_units, thinned, versions
from convexformer.validation import check_device

from .data import describe_table, make_split
from .figures import draw_figures
from .methods import Method, chosen_methods
from .report import remark, skipped, summarise
from .settings import GrokkingSettings
from .watch import COURSE, Look, Watch

FILE = "grokking.json"
TUNING_SEED = 1000
# In place of a look that there is none of: at what was never reached, and where a run ended before any.
_NEVER = Look._make([None] * len(COURSE))
_BEFORE = _NEVER._replace(step=0, seconds=0.0)


def run_grokking(
    folder: str | os.PathLike[str],
    settings: GrokkingSettings | None = None,
    *,
    n_seeds: int = 3,
    methods: Sequence[str] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train all methods on tables of division, tuned ones with equal budgets, for several seeds, and draw.

    Every seed draws a split of the table, initial weights, gates and minibatches. What is finished, a pair of the
    grid or a seed of a method, is on disk at once; a later call with the same settings goes on with what is missing.

    Parameters
    ----------
    folder : path-like
        Where ``grokking.json`` and the figures go; made when absent.
    settings : GrokkingSettings, optional
        Default: the full setting, which takes hours on a CPU.
    n_seeds : int, default=3
        Seeds 0, 1, ...
    methods : sequence of str, optional
        Beginnings of names of methods; the others are not run, but stay in the report where they are in it.
        Default: all.
    quiet : bool, default=False
        Whether to hide the progress bar.

    Returns
    -------
    dict
        What the JSON file holds: ``settings``, ``data``, ``tables``, ``remark``, ``skipped``, ``trials`` of the search,
        ``runs`` with the course of each method and seed, ``medians`` over seeds, and ``figures``.

    Raises
    ------
    ValueError
        If the folder holds results of other settings, or an argument is not as described.
    ModuleNotFoundError
        If matplotlib is not installed.
    KeyboardInterrupt
        On Ctrl-C. What was finished is on disk.

    Examples
    --------
    The smallest table, and of the methods the fully convex one:

    >>> import tempfile
    >>> settings = GrokkingSettings.small(moduli=(5,), n_gates=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = run_grokking(folder, settings, n_seeds=1, methods=["fully"], quiet=True)
    >>> row = report["medians"][0]
    >>> row["method"], row["n_seeds"], row["relative_gap"] <= settings.tol
    ('fully convex', 1, True)
    """
    settings = GrokkingSettings() if settings is None else settings
    check_device(settings.device, torch.device("cpu"))
    chosen = chosen_methods(settings, None if methods is None else list(methods))
    path = report_path(folder, FILE, n_seeds)
    report = begin_report(path, _fresh(settings, chosen), ("trials", "runs"))
    run_units(path, report, list(_units(settings, chosen, n_seeds, report)), quiet=quiet)
    report |= summarise(report["runs"])
    return finish_report(path, report, draw_figures)


def _fresh(settings: GrokkingSettings, methods: Sequence[Method]) -> dict[str, Any]:
    """The report of no run."""
    return {
        "settings": settings.as_json(),
        "data": {"operation": "/", "tuning_seed": TUNING_SEED},
        "tables": [describe_table(p, settings.fraction) for p in settings.moduli],
        "remark": remark(settings),
        "skipped": skipped(settings.moduli, methods),
        "versions": versions(),
        "trials": [],
        "runs": [],
    }


def _units(
    settings: GrokkingSettings, methods: Sequence[Method], n_seeds: int, report: dict[str, Any]
) -> Iterator[Unit]:
    """Of each method on each table the pairs of the grid, where it is tuned, and then the seeds with the best one."""
    for p in settings.moduli:
        for method in methods:
            if not method.applies(p):
                continue
            key, title = {"p": p, "method": method.name}, f"p = {p}, {method.name}"
            for pair in settings.grid if method.tuned else ():
                own = key | {"learning_rate": pair[0], "weight_decay": pair[1]}
                run = partial(_trial, p, method, pair, settings, report)
                yield Unit("trials", f"{title}, tuning {TUNING_SEED}", own, run)
            for seed in range(n_seeds):
                run = partial(_run, p, method, seed, settings, report)
                yield Unit("runs", f"{title}, seed {seed}", key | {"seed": seed}, run)


def _run(p: int, method: Method, seed: int, settings: GrokkingSettings, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with the best pair of the report."""
    split = make_split(p, seed, settings.fraction, settings.device)
    trials = trials_of(report, p, method.name)
    choice = best_pair(trials) if method.tuned else None
    watch = Watch(split, getattr(settings, method.limit), settings.look_every, settings.threshold, settings.run_on)
    extra = method.train(split, settings, seed, choice, watch)
    run = {
        "p": p,
        "method": method.name,
        "family": method.family,
        "seed": seed,
        **milestones(watch),
        "convex": method.convex,
        "n_layers": method.n_layers,
        "tuning_pairs": len(trials),
        "tuning_steps": sum(trial["steps"] for trial in trials),
        "tuning_seconds": sum(trial["seconds"] for trial in trials),
        "n_steps": watch.looks[-1].step if method.convex else watch.n_steps,  # a solver ends by itself
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "curve": thinned(watch.course(), COURSE),
    }
    return [run | extra]


def _trial(
    p: int, method: Method, pair: tuple[float, float], settings: GrokkingSettings, report: dict[str, Any]
) -> list[dict[str, Any]]:
    """Try a pair, for no more steps than the best one needed: with more it could not become the best."""
    split = make_split(p, TUNING_SEED, settings.fraction, settings.device)
    earlier = trials_of(report, p, method.name)
    needed = [trial["test_step"] for trial in earlier if trial["test_step"] is not None]
    n_steps = max(1, min([settings.tuning_steps, *needed]))  # the best one may have needed none
    watch = Watch(split, n_steps, settings.look_every, settings.threshold)
    method.train(split, settings, TUNING_SEED, pair, watch)
    last = watch.looks[-1] if watch.looks else _BEFORE
    trial = {
        "p": p,
        "method": method.name,
        "learning_rate": pair[0],
        "weight_decay": pair[1],
        "test_step": watch.step_of("test_accuracy"),
        "best_test_accuracy": max((look.test_accuracy for look in watch.looks), default=0.0),
        "steps": last.step,
        "seconds": last.seconds,
    }
    return [trial]


def trials_of(report: dict[str, Any], p: int, method: str) -> list[dict[str, Any]]:
    """The pairs that were tried for a method."""
    return [trial for trial in report["trials"] if (trial["p"], trial["method"]) == (p, method)]


def best_pair(trials: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The pair with the fewest steps to the test accuracy; where none got there, that of the best accuracy.

    Parameters
    ----------
    trials : sequence of dict
        All pairs of one method.

    Returns
    -------
    learning_rate, weight_decay

    Examples
    --------
    >>> slow = {"learning_rate": 0.1, "weight_decay": 0.0, "test_step": None, "best_test_accuracy": 0.9}
    >>> best_pair([slow, slow | {"learning_rate": 0.2, "test_step": 80, "best_test_accuracy": 0.99}])
    (0.2, 0.0)
    """
    best = min(
        trials,
        key=lambda trial: (
            float("inf") if trial["test_step"] is None else trial["test_step"],
            -trial["best_test_accuracy"],
        ),
    )
    return best["learning_rate"], best["weight_decay"]


def milestones(watch: Watch) -> dict[str, Any]:
    """When a run reached its accuracies, what held then, and how it ended.

    Parameters
    ----------
    watch : Watch
        After training.

    Returns
    -------
    dict
        Steps are None where never reached; ``delay`` is from the training to the test accuracy.
    """
    train, test = (watch.first(name) or _NEVER for name in ("train_accuracy", "test_accuracy"))
    last = watch.looks[-1] if watch.looks else _BEFORE
    return {
        "train_step": train.step,
        "test_step": test.step,
        "delay": None if _NEVER in (train, test) else test.step - train.step,
        "test_seconds": test.seconds,
        "test_head_steps": test.head_steps,
        "test_gradient_evaluations": test.gradient_evaluations,
        "test_loss_then": test.test_loss,
        "steps": last.step,
        "seconds": last.seconds,
        "final_train_accuracy": last.train_accuracy,
        "final_test_accuracy": last.test_accuracy,
        "final_test_loss": last.test_loss,
    }

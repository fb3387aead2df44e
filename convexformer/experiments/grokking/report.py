"""The experiment's numbers as text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from convexformer.experiments.common import Column, closing, counted, grouped, shown
from convexformer.experiments.tables import format_rows

from .methods import Method
from .settings import GrokkingSettings

# Where these are None, the run never got there: more than any number.
_REACHED = ("train_step", "test_step", "delay", "test_seconds", "test_head_steps", "test_gradient_evaluations")
_OTHER = (
    "test_loss_then",
    "final_test_accuracy",
    "final_test_loss",
    "tuning_pairs",
    "tuning_steps",
    "tuning_seconds",
    "certified_steps",
    "certified_seconds",
    "learning_rate",
    "weight_decay",
    "batch_size",
    "parameters",
    "n_steps",
)


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over seeds of every method and modulus, runs that never got there counting as the slowest.

    Of certified gaps it is the largest.

    Parameters
    ----------
    runs : sequence of dict
        Finished runs.

    Returns
    -------
    dict
        ``medians``, a list of rows; what the median run never reached is None.

    Examples
    --------
    >>> runs = [{"p": 5, "method": "m", "seed": seed, "test_step": step} for seed, step in enumerate([3, None, 9])]
    >>> row = summarise(runs)["medians"][0]
    >>> row["test_step"], row["n_seeds"], row["n_reached"], row["delay"]
    (9, 3, 2, None)
    """
    return {"medians": [_median_row(group) for group in grouped(runs, ("p", "method")).values()]}


def _median_row(group: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        name: group[0].get(name) for name in ("p", "method", "family", "n_layers", "convex", "structure")
    }
    row |= {"n_seeds": len(group), "n_reached": sum(run["test_step"] is not None for run in group)}
    row["n_diverged"] = sum(map(_has_diverged, group))
    for name in _REACHED:
        middle = median(math.inf if run.get(name) is None else run[name] for run in group)
        row[name] = middle if math.isfinite(middle) else None
    for name in _OTHER:
        values = [run[name] for run in group if run.get(name) is not None]
        row[name] = median(values) if values else None
    gaps = [run["relative_gap"] for run in group if run.get("relative_gap") is not None]
    return row | {"relative_gap": max(gaps, default=None)}


def _has_diverged(run: dict[str, Any]) -> bool:
    """Whether a loss that is not finite ended a run; otherwise gradients end early at their goal alone."""
    ended_early = run.get("steps", math.inf) < run.get("n_steps", math.inf)
    return run["test_step"] is None and not run.get("convex") and ended_early


def _or_more(name: str) -> Callable[[dict[str, Any]], str]:
    """A number of steps, or ``>N`` where it was not reached in N of them; never, where a program was solved by then."""

    def cell(row: dict[str, Any]) -> str:
        if row[name] is not None:
            return f"{row[name]:.0f}"
        return "never" if row["convex"] else f">{row['n_steps']:.0f}"

    return cell


def _delay(row: dict[str, Any]) -> str:
    if row["delay"] is None:
        return "-" if row["train_step"] is None or row["convex"] else f">{row['n_steps'] - row['train_step']:.0f}"
    return f"{row['delay']:.0f}"


_COLUMNS: tuple[Column, ...] = (
    ("p", ">", shown("p", "d")),
    ("method", "<", shown("method", "")),
    ("train steps", ">", _or_more("train_step")),
    ("test steps", ">", _or_more("test_step")),
    ("delay", ">", _delay),
    ("seeds", ">", lambda row: f"{row['n_reached']}/{row['n_seeds']}"),
    ("head steps", ">", shown("test_head_steps", ".0f")),
    ("gradients", ">", shown("test_gradient_evaluations", ".0f")),
    ("rows each", ">", shown("batch_size", ".0f")),
    ("s", ">", shown("test_seconds", ".1f")),
    ("test loss then", ">", shown("test_loss_then", ".3f")),
    ("last test accuracy", ">", shown("final_test_accuracy", ".2%")),
    ("last test loss", ">", shown("final_test_loss", ".3f")),
    ("rate", ">", shown("learning_rate", "g")),
    ("decay", ">", shown("weight_decay", "g")),
    ("tuning steps", ">", shown("tuning_steps", ".0f")),
    ("certified gap", ">", shown("relative_gap", ".0e")),
    ("certified after s", ">", shown("certified_seconds", ".1f")),
)


def format_grokking(report: dict[str, Any]) -> str:
    """Table of medians, what was skipped, what structure the convex programs were given, and the remark.

    Parameters
    ----------
    report : dict
        As ``run_grokking`` returns it.

    Returns
    -------
    str

    Examples
    --------
    The text of a report that has no runs yet:

    >>> report = {"medians": [], "tables": [], "skipped": [], "remark": "What it means.", "figures": ["steps_p97.png"]}
    >>> print(format_grokking(report))
    medians over 0 seeds
    p  method  train steps  test steps  delay ...
    --...
    What it means.
    figures: steps_p97.png
    """
    most = max((row["n_seeds"] for row in report["medians"]), default=0)
    parts = [f"medians over {counted(most, 'seed')}", format_rows(report["medians"], _COLUMNS), ""]
    parts += [_table(table) for table in report["tables"]]
    parts += [f"skipped: {reason}" for reason in report["skipped"]]
    for row in report["medians"]:
        if row["n_diverged"]:
            seeds = counted(row["n_diverged"], "seed")
            parts.append(f"diverged in {seeds}: {row['method']}, p = {row['p']}; shown is what came before")
    for row in report["medians"]:
        if row["structure"] is not None:
            parts.append(_filled(f"given to '{row['method']}', p = {row['p']}: {row['structure']}"))
    return "\n".join([*parts, *closing(report)])


def _filled(text: str) -> str:
    return textwrap.fill(text, 120)


def _table(table: dict[str, Any]) -> str:
    text = f"table p = {table['p']}: {table['rows']} rows, {table['training_rows']} to train on"
    if table["divisors"]:
        text += (
            f"; divisors coprime to {table['p']} ({', '.join(map(str, table['divisors']))}), one label for each pair; "
            f"on the table of the usual recipe no model could have more than {table['usual_ceiling']:.1%}"
        )
    return _filled(text)


def skipped(moduli: Sequence[int], methods: Sequence[Method]) -> list[str]:
    """Methods that cannot be used for a modulus, with the reason.

    Parameters
    ----------
    moduli : sequence of int
        The moduli.
    methods : sequence of Method
        The methods.

    Returns
    -------
    list of str
    """
    return [
        f"{method.name}, p = {p}: its tokens are waves over discrete logarithms, which need a prime"
        for p in moduli
        for method in methods
        if not method.applies(p)
    ]


def remark(settings: GrokkingSettings) -> str:
    """What the numbers mean and how large the search of every side was.

    Parameters
    ----------
    settings : GrokkingSettings
        The settings.

    Returns
    -------
    str
    """
    rates, decays = (
        "{" + ", ".join(f"{value:g}" for value in grid) + "}" for grid in (settings.learning_rates, settings.decays)
    )
    return (
        f"Division a / b modulo p, {settings.fraction:.0%} of the table to train on, the rest to test on; a seed draws "
        "split, initial weights, gates and minibatches. Steps are those of the optimiser, or iterations of the convex "
        f"solver; they are counted to the first look, every {settings.look_every} steps (10 iterations, at first "
        f"fewer), with an accuracy of {settings.threshold:.0%}. A convex program is looked at on the way; the last "
        "test accuracy and loss are those of its solution, which may be worse. '>N': not reached in N steps; 'never': "
        "the solved program does not; such seeds count as the slowest in medians. delay = steps from that training "
        "to that test accuracy. test loss then = that of the seeds that got there, alone. gradients = gradients taken "
        "until then, each over so many rows ('rows each'); s = seconds of training until then, looks not counted, on "
        "whatever machine and beside whatever else ran. Loss: mean cross-entropy in nats. A run ends after "
        f"{settings.run_on:g} times the steps to that test accuracy, but variable projection, looked at every "
        f"{settings.projection_look_every} steps of its embedding, after all its steps. Search: every tuned method "
        f"tries all {len(settings.grid)} pairs of learning rate {rates} and decay {decays}, {settings.tuning_steps} "
        "steps each (fewer once a pair could no longer be the best), on a split of its own (seed 1000), and takes "
        "the pair with the fewest steps to that test accuracy, else the best accuracy: the same statistic that is "
        "reported, to the same advantage of all; a validation part would have taken rows from training, to which "
        "grokking is sensitive. Sizes were not searched. AdamW with betas .9 and .98, constant rate, batches of at "
        f"most {settings.batch_size}. The untuned transformer has rate 1e-3 and no decay and is given "
        f"{settings.untuned_steps} steps. 'convex attention' is not convex as a whole: embeddings and layers are "
        f"trained together. Of the certified programs alpha = {settings.alpha_ratio:g} alpha_max, not searched, "
        "nuclear penalty, softmax loss, no intercept; certified gap: of every program that was solved, of "
        "all seeds, the largest."
    )

"""The experiment's numbers as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from convexformer.experiments.common import Column, closing, counted, medians, shown, with_seeds
from convexformer.experiments.tables import format_rows

from .maps import SMOOTHING, SOFTMAX
from .settings import StudentTeacherSettings


def _range(row: dict[str, Any]) -> str:
    return "{:.3f} to {:.3f}".format(*row["test_r2_range"]) if row.get("test_r2_range") else "-"


_COLUMNS: tuple[Column, ...] = (
    ("model", "<", shown("model", "")),
    ("method", "<", shown("method", "")),
    ("objective", ">", shown("objective", ".5f")),
    ("ratio", ">", shown("ratio", ".4f")),
    ("above bound", ">", shown("excess", ".1e")),
    ("choice s", ">", shown("choice_seconds", ".2f")),
    ("fit s", ">", shown("fit_seconds", ".2f")),
    ("steps", ">", shown("steps", ".0f")),
    ("heads", ">", shown("heads", ".0f")),
    ("tokens", ">", shown("tokens", ".0f")),
    ("test R2", ">", shown("test_r2", ".3f")),
    ("over seeds", ">", _range),
    ("test error", ">", shown("test_error", ".3f")),
)

_MAP_COLUMNS: tuple[Column, ...] = (
    ("map", "<", shown("student", "")),
    ("correlation", ">", shown("pearson", ".3f")),
    ("off diagonal", ">", shown("pearson_off_diagonal", ".3f")),
    ("KL", ">", shown("kl", ".3f")),
    ("without first: correlation", ">", shown("pearson_without_first", ".3f")),
    ("off diagonal", ">", shown("pearson_off_diagonal_without_first", ".3f")),
    ("KL", ">", shown("kl_without_first", ".3f")),
    ("positions", ">", shown("positions", ".1f")),
    ("test R2", ">", shown("test_r2", ".3f")),
)


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over seeds.

    Parameters
    ----------
    runs : sequence of dict
        Finished seeds.

    Returns
    -------
    dict
        ``medians`` of the students and ``map_medians`` of the attention maps.
    """
    return {
        "medians": medians([row for run in runs for row in run["rows"]], ("model", "method"), ("test_r2",)),
        # Seeds of earlier versions have no such number.
        "map_medians": medians([{"positions": None} | row for run in runs for row in run["map_rows"]], ("student",)),
    }


def format_student_teacher(report: dict[str, Any]) -> str:
    """Tables, what was skipped, and the remark.

    Parameters
    ----------
    report : dict
        As ``run_student_teacher`` returns it.

    Returns
    -------
    str

    Examples
    --------
    The text of a report that has no runs yet:

    >>> report = {name: [] for name in ("runs", "medians", "map_medians", "skipped", "figures")}
    >>> print(format_student_teacher(report | {"remark": "What it means."}))
    medians over 0 seeds
    model  method  objective  ratio  above bound ...
    --...
    What it means.
    figures:
    """
    n_seeds = len(report["runs"])
    parts = [f"medians over {counted(n_seeds, 'seed')}", format_rows(report["medians"], _COLUMNS)]
    if report["map_medians"]:
        parts += ["", "attention map against the teacher's", format_rows(report["map_medians"], _MAP_COLUMNS)]
    diverged = _diverged(report["runs"])
    if diverged:
        parts += ["", f"diverged with every learning rate and left out of the medians: {', '.join(diverged)}"]
    return "\n".join([*parts, "", *(f"skipped: {reason}" for reason in report["skipped"]), *closing(report)])


def _diverged(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What diverged, with the number of seeds."""
    names = [f"{row['model']} by {row['method']}" for run in runs for row in run["rows"] if row["test_r2"] is None]
    names += [f"map of {SOFTMAX}" for run in runs if run["maps"] and SOFTMAX not in run["maps"]]
    return with_seeds(names)


def remark(settings: StudentTeacherSettings) -> str:
    """What the numbers mean and how large the search of every side was.

    Parameters
    ----------
    settings : StudentTeacherSettings
        The settings.

    Returns
    -------
    str
    """
    outputs = "all outputs" if settings.n_outputs is None else f"{settings.n_outputs} principal directions"
    given = settings.learning_rates, settings.softmax_learning_rates
    rates, softmax_rates = (counted(len(each), "learning rate") for each in given)
    return (
        f"{settings.n_sentences} sentences (60% training, 20% validation, 20% test, another split per seed) x "
        f"{settings.n_tokens} tokens, no padding; target: {outputs} of what {settings.site} of layer {settings.layer} "
        f"puts out at position {settings.target_position}, centred and scaled by one number. objective = mean half "
        "squared error + alpha * decay; above bound = objective - certified lower bound of that class: no network of "
        "it, however trained, gets below; ratio = objective / objective of the certified solution. Search on "
        f"validation sentences: convex {settings.n_alphas} alphas; Adam on its networks {rates} at "
        f"the same alpha, as many heads as the certified solution, {settings.n_steps} full-batch steps each, or for "
        f"each rate the seconds of the convex fit, chosen by objective; softmax attention "
        f"({settings.softmax_heads} heads of width {settings.softmax_head_width}) {softmax_rates} x "
        f"{len(settings.softmax_alphas)} alphas per output, {settings.n_steps} steps each and the best step; ridge "
        f"{len(settings.ridge_alphas)} weights. choice s = seconds of that search without the final fit. The objective "
        "of softmax attention is of another class and not to be compared. R2 weights outputs by variance; test error = "
        "squared error / squared error of the training mean. Maps: rows scaled to sum 1, uniform where a student reads "
        "nothing, mean attention of the teacher "
        "over heads and training sentences; KL from the teacher to the map mixed with "
        f"{SMOOTHING:.0%} of the uniform one, mean over rows; 'off diagonal' leaves out what each position reads from "
        "itself; 'without first' leaves out the first position ([CLS] in BERT), nearly the same vector in all "
        "sentences, so that reading it adds little but a constant, which the convex student has as a bias; positions = "
        "exponential of the entropy of a row, mean over rows: as many positions, evenly read, would have it."
    )

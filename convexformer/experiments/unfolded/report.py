"""The numbers of the experiment on unfolded transformers as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from convexformer.experiments.common import (
    Column,
    closing,
    counted,
    grouped,
    mean_and_error,
    shown,
    shown_with_error,
    with_seeds,
)
from convexformer.experiments.tables import format_rows

from .aim import PRINTED_STEP
from .descent import WEIGHTS, summarise_descent
from .settings import UnfoldedSettings

_NUMBERS = ("accuracy", "certified_accuracy", "seconds", "n_parameters")
_CURVES = ("depth", "noise")


def summarise(report: dict[str, Any]) -> dict[str, Any]:
    """Means over seeds with their standard errors, and shares of rises.

    Parameters
    ----------
    report : dict
        With rows of all parts.

    Returns
    -------
    dict
        ``aim``, ``descent`` and ``classification``.
    """
    return {
        "aim": _summarise_aim(report["aim"]),
        "descent": summarise_descent(report["descent"]),
        "classification": _summarise_classification(report["classification"]),
    }


def _summarise_aim(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How often iterations are outside of the theorem's hypothesis, and where they rise, over seeds."""
    marked = [row | {"printed": row["step"] == PRINTED_STEP} for row in rows]
    return [
        {
            "nonnegative": nonnegative,
            "printed": printed,
            "allowed": all(row["step"] * row["lipschitz_h"] <= 1 + 1e-12 for row in group),
            "step": float(np.median([row["step"] for row in group])),
            "n_iterations": sum(row["n_iterations"] for row in group),
            **{name: sum(row[name] for row in group) for name in ("n_outside", "n_rises_inside", "n_rises_outside")},
        }
        for (nonnegative, printed), group in grouped(marked, ("nonnegative", "printed")).items()
    ]


def _summarise_classification(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    summary = []
    ended = [row for row in rows if "diverged" not in row]
    for (corpus, method), group in grouped(ended, ("corpus", "method")).items():
        entry: dict[str, Any] = {"corpus": corpus, "method": method, "n_seeds": len(group)}
        for name in (*_NUMBERS, *_CURVES):
            if group[0][name] is not None:
                entry[name], entry[f"{name}_error"] = mean_and_error([row[name] for row in group])
        summary.append(entry)
    return summary


def _share(row: dict[str, Any]) -> str:
    low, high = row["share_range"]
    return f"{row['share']:.0%} ({low:.0%} to {high:.0%})"


_AIM_COLUMNS: tuple[Column, ...] = (
    ("algorithm", "<", lambda row: "2 (ReLU)" if row["nonnegative"] else "1"),
    ("step", ">", shown("step", ".4f")),
    ("as printed", "<", lambda row: "yes" if row["printed"] else "no"),
    ("at most 1/L", "<", lambda row: "yes" if row["allowed"] else "no"),
    ("iterations", ">", shown("n_iterations", "d")),
    ("outside the hypothesis", ">", shown("n_outside", "d")),
    ("rises outside", ">", shown("n_rises_outside", "d")),
    ("rises inside", ">", shown("n_rises_inside", "d")),
)
_DESCENT_COLUMNS: tuple[Column, ...] = (
    ("corpus", "<", shown("corpus", "")),
    ("weights", "<", shown("weights", "")),
    ("anchored", "<", lambda row: "yes" if row["anchored"] else "no"),
    ("layer", "<", shown("variant", "")),
    ("promised", "<", lambda row: "yes" if row["guaranteed"] else "no"),
    ("sentences with a rise", ">", _share),
)
_CLASSIFICATION_COLUMNS: tuple[Column, ...] = (
    ("corpus", "<", shown("corpus", "")),
    ("network", "<", shown("method", "")),
    ("parameters", ">", shown("n_parameters", ".0f")),
    ("accuracy, %", ">", shown_with_error("accuracy", ".1f", 100)),
    ("certified readout, %", ">", shown_with_error("certified_accuracy", ".1f", 100)),
    ("seconds", ">", shown("seconds", ".0f")),
)


def format_unfolded(report: dict[str, Any]) -> str:
    """Tables and the remark.

    Parameters
    ----------
    report : dict
        As ``run_unfolded`` returns it.

    Returns
    -------
    str

    Examples
    --------
    The text of a report that has no runs yet:

    >>> summaries = {"aim": [], "descent": [], "classification": []}
    >>> report = {"aim": [], "descent": [], "classification": [], "summaries": summaries}
    >>> report |= {"remark": "What it means.", "figures": []}
    >>> print(format_unfolded(report))
    0 seeds
    <BLANKLINE>
    alternating inexact minimisation of two quadratics
    ...
    What it means.
    figures:
    """
    summaries, n_seeds = report["summaries"], len({row["seed"] for row in report["aim"]})
    parts = [
        f"{counted(n_seeds, 'seed')}",
        "",
        "alternating inexact minimisation of two quadratics",
        format_rows(summaries["aim"], _AIM_COLUMNS),
        "",
        "energies of test sentences: median share over seeds (range)",
        format_rows(summaries["descent"], _DESCENT_COLUMNS),
        "",
        "text classification: mean over seeds ± standard error",
        format_rows(summaries["classification"], _CLASSIFICATION_COLUMNS),
        "",
        *(f"diverged and left out: {name}" for name in _diverged(report)),
        *closing(report),
    ]
    return "\n".join(parts)


def _diverged(report: dict[str, Any]) -> list[str]:
    """Trainings that diverged, with the number of seeds."""
    names = [f"{row['corpus']}, {row['method']}" for row in report["classification"] if "diverged" in row]
    for (corpus, _), rows in grouped(report["descent"], ("corpus", "seed")).items():
        if WEIGHTS[1] not in {row["weights"] for row in rows}:
            names.append(f"{corpus}, energies under {WEIGHTS[1]} weights")
    return with_seeds(names)


def remark(settings: UnfoldedSettings) -> str:
    """What the numbers mean and how large the search of every network was.

    Parameters
    ----------
    settings : UnfoldedSettings
        The settings.

    Returns
    -------
    str
    """
    rates = counted(len(settings.learning_rates), "learning rate")
    return (
        f"Energies: {settings.n_shown} test sentences, {settings.n_layers} layers of shared weights, initial or "
        f"trained with layers of eq. (20) to classify; damped layers have steps of {settings.step}. Without an anchor "
        "all tokens become equal within a few layers and nearly every layer lowers its energy, also those with an "
        "error, so that only the anchored energies, B = X, can tell a right layer from a wrong one. A rise is one of "
        "more than 1e-10 of the energy, in float64; a layer with an error is measured by the energy that it was meant "
        "to lower. "
        f"Classification: {settings.n_sentences} sentences, 60% training, 20% validation, 20% test, another split for "
        f"each seed; all networks have the same mean pooling and readout, nearly as many parameters, and the same "
        f"search: {rates} x {settings.n_steps} steps of AdamW, batches of "
        f"{settings.batch_size}, the weights of least validation loss. Unfolded networks have {settings.train_layers} "
        "layers of shared weights and of the width of the vectors; the standard transformer has one layer, narrower as "
        "it has more weights a layer, which tokens pass once or, looped, as often as those of the unfolded ones. "
        "Vectors that are made of a corpus, and the scale of tokens, are made of all of its sentences without their "
        "labels. Certified readout: the convex program on the "
        f"tokens of the last layer, solved to a relative gap of 1e-3, its alpha chosen out of "
        f"{len(settings.alphas)} by validation accuracy. Seconds: of the search."
    )

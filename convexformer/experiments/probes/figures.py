"""Figures of the experiment on probes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from convexformer import plot
from convexformer.experiments.common import draw_means, legend_below, plain_log

from .methods import ATTENTIVE, CERTIFIED, CERTIFIED_MEAN, FIRST, LARGEST, MEAN

# Colours of Okabe and Ito, told apart by all; methods without one are left out of the curves.
_COLOURS = {
    MEAN: "black",
    FIRST: "#999999",
    LARGEST: "#56B4E9",
    "attentive probe, 1 query": "#F0E442",
    ATTENTIVE: "#E69F00",
    "gated attention pooling (ABMIL)": "#CC79A7",
    CERTIFIED_MEAN: "#009E73",
    CERTIFIED: "#D55E00",
    "certified, mean and generated": "#0072B2",
}
_COLUMNS = 3
_ASIDE = 1.02  # methods stand beside one another, as those of equal accuracy would hide each other


def draw_figures(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw accuracies by budgets, and accuracies against seconds.

    Parameters
    ----------
    report : dict
        With ``summaries``.
    folder : Path
        Where the PNG files go.

    Returns
    -------
    list of Path
    """
    paths = [folder / "accuracy.png", folder / "seconds.png"]
    names = [one["name"] for one in report["data"]["datasets_read"]]
    _draw(
        report["summaries"],
        names,
        _draw_budgets,
        "Accuracy on test samples by labels, methods side by side: mean over seeds, bars are standard errors",
        paths[0],
    )
    title = "Accuracy against the seconds of the whole search, all labels: mean over seeds"
    _draw(report["summaries"], names, _draw_seconds, title, paths[1])
    return paths


def _draw(summary: list[dict[str, Any]], names: list[str], panel: Any, title: str, path: Path) -> None:
    """One panel for each data set, and one legend below."""
    n_columns = min(_COLUMNS, len(names))
    n_rows = math.ceil(len(names) / n_columns)
    figure, axes = plot.new_figure(n_rows, n_columns, figsize=(max(9, 5 * n_columns), 4.2 * n_rows + 1))
    figure.suptitle(title)
    for ax, name in zip(axes, names, strict=False):
        panel(ax, [row for row in summary if row["data"] == name])
        ax.set(title=name, ylabel="accuracy")
        ax.grid(alpha=0.3)
    for ax in axes[len(names) :]:
        ax.set_axis_off()
    legend_below(figure, axes, ncols=3, fontsize=9)
    plot.save_figure(figure, path)


def _draw_budgets(ax: Any, rows: list[dict[str, Any]]) -> None:
    ax.set(xscale="log", xlabel="labels")
    for number, (method, colour) in enumerate(_COLOURS.items()):
        aside = _ASIDE ** (number - len(_COLOURS) // 2)
        own = sorted((row for row in rows if row["method"] == method), key=lambda row: row["n_labels"])
        if own:
            means: dict[str, Any] = {"method": method, "accuracy": [row["accuracy"] for row in own]}
            means["accuracy_error"] = [row["accuracy_error"] or 0.0 for row in own]
            draw_means(ax, [aside * row["n_labels"] for row in own], means, "accuracy", colour)
    ticks = sorted({row["n_labels"] for row in rows})
    ax.set_xticks(ticks, labels=ticks, minor=False)
    ax.minorticks_off()


def _draw_seconds(ax: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["budget"] is None and row["method"] in _COLOURS:
            ax.scatter(row["seconds"], row["accuracy"], color=_COLOURS[row["method"]], label=row["method"])
    ax.set(xscale="log", xlabel="seconds")
    plain_log(ax.xaxis, (1, 3))
    ax.tick_params(axis="x", labelsize="small")

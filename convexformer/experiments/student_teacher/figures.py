"""Figures of the student-teacher experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from convexformer import plot
from convexformer.experiments.common import counted

from .baselines import RIDGE, SOFTMAX
from .convex_students import CERTIFIED, CLASSES, TUNED
from .maps import CONVEX, TEACHER, without_first
from .maps import SOFTMAX as SOFTMAX_MAP

_COLOURS = {kind.name: f"C{number}" for number, kind in enumerate(CLASSES)}


def draw_figures(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw objective and test score against seconds, and the attention maps.

    Parameters
    ----------
    report : dict
        With ``runs`` and ``medians``.
    folder : Path
        Where the PNG files go.

    Returns
    -------
    list of Path
    """
    paths = [folder / "objective.png", folder / "test_score.png"]
    _draw_objective(report["runs"], paths[0])
    _draw_scores(report, paths[1])
    if report["map_medians"]:
        paths.append(folder / "attention_maps.png")
        _draw_maps(report, paths[-1])
    return paths


def _curves(runs: list[dict[str, Any]], model: str, method: str) -> list[dict[str, Any]]:
    """The curves of one model, seed by seed."""
    return [curve for run in runs for curve in run["curves"] if (curve["model"], curve["method"]) == (model, method)]


def _draw_objective(runs: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plot.new_figure(1, len(CLASSES), figsize=(5.2 * len(CLASSES), 4.4))
    figure.suptitle(f"Training objective above the certified lower bound of its class, {counted(len(runs), 'seed')}")
    for ax, kind in zip(axes, CLASSES, strict=True):
        curves = {
            f"{title}:{seed}": (curve["seconds"], curve["excess"])
            for method, title in ((CERTIFIED, CERTIFIED), (TUNED, "Adam, best learning rate"))
            for seed, curve in enumerate(_curves(runs, kind.name, method))
        }
        plot.plot_convergence(curves, bound=0.0, title=kind.name, ax=ax)
    plot.save_figure(figure, path)


def _draw_scores(report: dict[str, Any], path: Path) -> None:
    runs = report["runs"]
    figure, axes = plot.new_figure(1, 2, figsize=(13, 6.2))
    figure.suptitle(f"R2 on test sentences while the chosen model is trained, {counted(len(runs), 'seed')}")
    scores = []
    for ax, title in zip(axes, ("attention shared by all sentences", "softmax attention and ridge"), strict=True):
        ax.set(xscale="log", xlabel="seconds", ylabel="R2 on test sentences", title=title)
        ax.grid(alpha=0.3)
    for kind in CLASSES:
        for method, style in ((CERTIFIED, "-"), (TUNED, ":")):
            label = f"{kind.name}: {'convex' if method == CERTIFIED else 'Adam'}"
            scores += _draw_runs(axes[0], _curves(runs, kind.name, method), label, _COLOURS[kind.name], style)
    methods = dict.fromkeys(row["method"] for row in report["medians"] if row["model"] == SOFTMAX)
    for number, method in enumerate(methods, start=len(CLASSES)):
        scores += _draw_runs(axes[1], _curves(runs, SOFTMAX, method), f"softmax: {method}", f"C{number}", "-")
    for row in report["medians"]:
        if row["model"] == RIDGE or (row["method"] == CERTIFIED and not row["model"].startswith("gated")):
            style = "--" if row["model"] == RIDGE else "-."
            name = f"ridge on {row['method']}" if row["model"] == RIDGE else f"certified {row['model']}"
            colour = _COLOURS.get(row["model"], "black" if row["method"] == "all tokens" else "grey")
            axes[1].axhline(row["test_r2"], linestyle=style, color=colour, label=f"{name} (median)")
            scores.append(row["test_r2"])
    for ax in axes:
        # Networks start far below zero, which would leave no room for the differences at the end.
        ax.set_ylim(max(-0.1, min(scores) - 0.05), max(scores) + 0.03)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=2, fontsize=8)
    plot.save_figure(figure, path)


def _draw_runs(ax: Any, curves: list[dict[str, Any]], label: str, colour: str, style: str) -> list[float]:
    """Draw a line per seed; all scores."""
    for number, curve in enumerate(curves):
        seconds = np.maximum(curve["test_seconds"], 1e-3)
        ax.plot(seconds, curve["test_r2"], style, color=colour, label=None if number else label, alpha=0.8)
    return [score for curve in curves for score in curve["test_r2"]]


def _draw_maps(report: dict[str, Any], path: Path) -> None:
    titles = {
        TEACHER: "teacher: softmax attention,\nmean over heads and sentences",
        CONVEX: "convex student, certified:\nweight of each position",
        SOFTMAX_MAP: "softmax student:\nmean over heads and sentences",
    }
    runs = report["runs"]
    maps = {name: [run["maps"][name] for run in runs if name in run["maps"]] for name in titles}
    means = {name: np.mean(found, axis=0) for name, found in maps.items() if found}
    figure, axes = plot.new_figure(2, len(means), figsize=(5.2 * len(means), 9.2))
    seeds = counted(len(runs), "seed")
    figure.suptitle(
        f"What the output at each position reads from each position, mean of {seeds}\n"
        "above: all positions; below: among all but the first ([CLS] in BERT), rows scaled to sum 1 again"
    )
    for above, below, (name, mean) in zip(axes[: len(means)], axes[len(means) :], means.items(), strict=True):
        plot.plot_attention_map(mean, title=titles[name], ax=above)
        plot.plot_attention_map(without_first(mean), first=1, title=titles[name], ax=below)
    plot.save_figure(figure, path)

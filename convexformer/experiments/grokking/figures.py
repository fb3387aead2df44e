"""Figures of the experiment on grokking."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convexformer import plot
from convexformer.experiments.common import counted, grouped

_POINTS = 200
_FEW = 4  # looks, of which each is marked
_LEAST = {"step": 1.0, "seconds": 1e-2}  # where a logarithmic axis begins; what is earlier is drawn there
_LABELS = {"step": "steps (or solver iterations)", "seconds": "seconds of training"}


def draw_figures(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw accuracy and loss against steps and seconds for each modulus, and the steps to the threshold and the delay.

    Parameters
    ----------
    report : dict
        With ``runs`` and ``settings``.
    folder : Path
        Where the PNG files go.

    Returns
    -------
    list of Path
    """
    paths = []
    for p in dict.fromkeys(run["p"] for run in report["runs"]):
        runs = [run for run in report["runs"] if run["p"] == p]
        for kind in ("accuracy", "loss"):
            paths.append(folder / f"{kind}_p{p}.png")
            _draw_courses(runs, kind, report["settings"], p, paths[-1])
        paths.append(folder / f"steps_p{p}.png")
        _draw_steps(runs, report["settings"], p, paths[-1])
    return paths


def _seeds(runs: Sequence[dict[str, Any]]) -> str:
    return counted(len({run["seed"] for run in runs}), "seed")


def _draw_courses(runs: list[dict[str, Any]], kind: str, settings: dict[str, Any], p: int, path: Path) -> None:
    families = grouped(runs, ["family"])
    figure, axes = plot.new_figure(2, len(families), figsize=(4.6 * len(families), 8.6))
    what = "share of rows answered rightly" if kind == "accuracy" else "mean cross-entropy"
    title = (
        f"Division: {kind} ({what}) while methods train on {settings['fraction']:.0%} of the table modulo {p}. Solid: "
        f"rows not trained on (test); dashed: rows trained on. Line: median of {_seeds(runs)}; band: all of them; a "
        "run that has ended keeps its last value."
    )
    figure.suptitle(textwrap.fill(title, width=42 * len(families)))
    for column, ((family,), members) in enumerate(families.items()):
        for row, axis in enumerate(("step", "seconds")):
            ax = axes[row * len(families) + column]
            ax.set(xscale="log", xlabel=_LABELS[axis], title=family)
            ax.grid(alpha=0.3)
            if kind == "accuracy":
                ax.set(ylabel="accuracy", ylim=(-0.03, 1.03))
                ax.axhline(settings["threshold"], color="grey", linewidth=0.8, linestyle=":")
            else:
                ax.set(yscale="log", ylabel="mean cross-entropy (nats)")
            for number, group in enumerate(grouped(members, ["method"]).values()):
                _draw_band(ax, group, axis, f"test_{kind}", f"C{number}", "-")
                _draw_band(ax, group, axis, f"train_{kind}", f"C{number}", "--")
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=9)
    for panels in (axes[: len(families)], axes[len(families) :]):
        _share_limits(panels, kind)
    plot.save_figure(figure, path)


def _share_limits(row: Sequence[Any], kind: str) -> None:
    """Give the panels of a row the same axes, so that families can be compared."""
    for ax in row:
        ax.set_xlim(min(other.get_xlim()[0] for other in row), max(other.get_xlim()[1] for other in row))
        if kind == "loss":
            ax.set_ylim(min(other.get_ylim()[0] for other in row), max(other.get_ylim()[1] for other in row))


def _draw_band(ax: Any, group: list[dict[str, Any]], axis: str, name: str, colour: str, style: str) -> None:
    curves = [run["curve"] for run in group if run["curve"][axis]]
    if not curves:
        return
    where, values = _on_one_grid(curves, axis, name)
    is_test = name.startswith("test")
    label = group[0]["method"] if is_test else None
    ax.plot(where, np.median(values, axis=0), style, color=colour, label=label, linewidth=1.8 if is_test else 1.1)
    if max(len(curve[axis]) for curve in curves) <= _FEW:
        for curve in curves:
            ax.plot(
                curve[axis], curve[name], "o", color=colour, markersize=4, markerfacecolor=colour if is_test else "w"
            )
    ax.fill_between(where, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.2 if is_test else 0.1)


def _on_one_grid(
    curves: Sequence[dict[str, Any]], axis: str, name: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Positions, even in the logarithm, and the values of each curve there."""
    positions = [np.maximum(curve[axis], _LEAST[axis]) for curve in curves]
    first, last = min(x[0] for x in positions), max(x[-1] for x in positions)
    where = np.geomspace(first, max(last, first * 1.01), _POINTS)
    values = [np.interp(np.log(where), np.log(x), curve[name]) for x, curve in zip(positions, curves, strict=True)]
    return where, np.stack(values)


def _draw_steps(runs: list[dict[str, Any]], settings: dict[str, Any], p: int, path: Path) -> None:
    methods = grouped(runs, ["method"])
    figure, (left, right) = plot.new_figure(1, 2, figsize=(13, 1.6 + 0.42 * len(methods)))
    figure.suptitle(
        f"Division modulo {p}: how long methods take to answer {settings['threshold']:.0%} of the rows not trained on\n"
        f"bar: median of {_seeds(runs)}; dot: a seed; hollow triangle: not reached by that seed in so many steps "
        "(solvers: when solved)"
    )
    for place, group in enumerate(methods.values()):
        ends = [(run["test_step"], run["n_steps"]) for run in group]
        _draw_seeds(left, place, ends, [run["test_step"] for run in group], "C0")
        fitted = [run for run in group if run["train_step"] is not None]
        gaps = [(run["delay"], run["n_steps"] - run["train_step"]) for run in fitted if _has_delay(run)]
        _draw_seeds(right, place, gaps, [run["delay"] for run in group], "C1")
    names, share = [method for (method,) in methods], f"{settings['threshold']:.0%}"
    left.set(xscale="log", xlabel=_LABELS["step"], title=f"steps to {share} test accuracy")
    right.set(xlabel=_LABELS["step"], title=f"delay: from {share} training to {share} test accuracy")
    right.set_xscale("symlog", linthresh=10)
    right.set_xlim(left=-1)
    left.set_yticks(range(len(names)), names)
    right.set_yticks(range(len(names)), [])
    for ax in (left, right):
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.grid(alpha=0.3, axis="x")
    plot.save_figure(figure, path)


def _has_delay(run: dict[str, Any]) -> bool:
    """Whether there is a delay, even one of unknown length; a solved program that fails has none."""
    return run["delay"] is not None or not run["convex"]


def _draw_seeds(ax: Any, place: int, ends: list[tuple[int | None, int]], of_all: list[int | None], colour: str) -> None:
    """A dot per seed, a triangle at the last step of one that never got there, and a bar at the median of all seeds."""
    middle = median(math.inf if step is None else step for step in of_all)
    if math.isfinite(middle):
        ax.vlines(middle, place - 0.36, place + 0.36, color=colour, alpha=0.4, linewidth=5)
    for number, (step, limit) in enumerate(ends):
        height = place + 0.18 * (number - (len(ends) - 1) / 2)
        if step is None:
            ax.plot(limit, height, ">", color=colour, markerfacecolor="white")
        else:
            ax.plot(step, height, "o", color=colour, markersize=5)

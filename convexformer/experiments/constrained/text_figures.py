"""Figures of the experiment on text."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from convexformer import plot
from convexformer.experiments.common import draw_means

from .common import METHODS
from .text_report import has_diverged

# Of Okabe and Ito, told apart by all.
COLOURS = dict(zip([method.name for method in METHODS], ("#0072B2", "black", "#D55E00"), strict=True))


def draw_figures(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw accuracy by noise, losses and accuracies of layers, and early exit.

    Parameters
    ----------
    report : dict
        With ``summaries``, ``ablation`` and ``settings``.
    folder : Path
        Where the PNG files go.

    Returns
    -------
    list of Path
    """
    drawn = (
        {"noise": _draw_noise, "layers": _draw_layers, "early_exit": _draw_early_exit} if report["summaries"] else {}
    )
    paths = []
    for name, draw in {**drawn, "ablation": _draw_ablation}.items():
        paths.append(folder / f"{name}.png")
        draw(report, paths[-1])
    return paths


def _places(report: dict[str, Any]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["corpus"], row["model"]) for row in report["summaries"]))


def _rows(report: dict[str, Any], corpus: str, model: str, noise: float) -> list[dict[str, Any]]:
    """Summaries of all methods at one place."""
    return [row for row in report["summaries"] if (row["corpus"], row["model"], row["noise"]) == (corpus, model, noise)]


def _add_legend(axes: Any) -> None:
    """A legend in the first axes where something is drawn."""
    for ax in axes:
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8)
            return


def _grid(report: dict[str, Any], title: str) -> tuple[Any, list[tuple[Any, list[dict[str, Any]]]]]:
    """Axes by corpus and model (rows) and training noise (columns), each with the summaries of its place."""
    places, noises = _places(report), report["settings"]["train_noises"]
    figure, axes = plot.new_figure(len(places), len(noises), figsize=(4.6 * len(noises), 3.2 * len(places)))
    figure.suptitle(f"{title}: mean over seeds, standard error")
    panels = []
    for ax, ((corpus, model), noise) in zip(axes, product(places, noises), strict=True):
        ax.set_title(f"{corpus}\n{model}, trained with noise {noise:g}")
        ax.grid(alpha=0.3)
        panels.append((ax, _rows(report, corpus, model, noise)))
    return figure, panels


def _draw_noise(report: dict[str, Any], path: Path) -> None:
    figure, panels = _grid(report, "Accuracy under noise on embeddings")
    for ax, rows in panels:
        for row in rows:
            draw_means(ax, report["settings"]["test_noises"], row, "accuracies", COLOURS[row["method"]])
        ax.set(xlabel="noise at test time", ylabel="accuracy")
    _add_legend(ax for ax, _ in panels)
    plot.save_figure(figure, path)


def _draw_layers(report: dict[str, Any], path: Path) -> None:
    figure, panels = _grid(report, "Mean validation loss of each layer")
    for ax, rows in panels:
        for row in rows:
            draw_means(ax, 1 + np.arange(len(row["layer_losses"])), row, "layer_losses", COLOURS[row["method"]])
        ax.set(xlabel="layer", ylabel="loss")
        ax.locator_params(axis="x", integer=True)
    _add_legend(ax for ax, _ in panels)
    plot.save_figure(figure, path)


def _draw_early_exit(report: dict[str, Any], path: Path) -> None:
    places, noise = _places(report), report["settings"]["train_noises"][0]
    figure, axes = plot.new_figure(len(places), 2, figsize=(10, 3.2 * len(places)))
    figure.suptitle(
        f"Early exit, trained with noise {noise:g}: mean over seeds.\n"
        "Left: all sentences leave after a layer. Right: each leaves when its prediction is confident"
    )
    for i, (corpus, model) in enumerate(places):
        left, right = axes[2 * i], axes[2 * i + 1]
        for row in _rows(report, corpus, model, noise):
            colour = COLOURS[row["method"]]
            draw_means(left, 1 + np.arange(len(row["by_layer"])), row, "by_layer", colour)
            right.plot(row["exit_layers"], row["exit_accuracies"], "o-", color=colour, label=row["method"])
        left.set(title=f"{corpus}, {model}", xlabel="layers run", ylabel="accuracy")
        left.locator_params(axis="x", integer=True)
        right.set(title=f"{corpus}, {model}", xlabel="mean number of layers run", ylabel="accuracy")
        for ax in (left, right):
            ax.grid(alpha=0.3)
    _add_legend(axes)
    plot.save_figure(figure, path)


def _draw_ablation(report: dict[str, Any], path: Path) -> None:
    figure, axes = plot.new_figure(1, 2, figsize=(10, 4))
    figure.suptitle("Ablation of constrained training, one seed: filled markers are feasible")
    prices = list(dict.fromkeys(row["price"] for row in report["ablation"]))
    for ax, position, title in ((axes[0], 0, "without noise"), (axes[1], -1, "with the most noise")):
        for number, price in enumerate(prices):
            rows = [row for row in report["ablation"] if row["price"] == price and not has_diverged(row)]
            label = "hard constraints" if price is None else f"price of slacks {price:g}"
            values = [row["accuracies"][position] for row in rows]
            ax.plot([row["alpha"] for row in rows], values, color=f"C{number}", label=label)
            for row, value in zip(rows, values, strict=True):
                fill = f"C{number}" if row["feasible"] else "white"
                ax.plot(row["alpha"], value, "o", color=f"C{number}", markerfacecolor=fill)
        ax.set(title=f"accuracy {title}", xlabel="alpha: share by which layers must lower the loss", ylabel="accuracy")
        ax.grid(alpha=0.3)
    _add_legend(axes)
    plot.save_figure(figure, path)

"""Figures of the experiment on unfolded transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from convexformer import plot
from convexformer.experiments.common import draw_means, legend_below

from .aim import draw_aim, draw_regions
from .classification import METHODS
from .descent import WEIGHTS
from .variants import VARIANTS

_COLOURS = dict(
    zip([method.name for method in METHODS], ("#0072B2", "#E69F00", "#D55E00", "black", "#CC79A7"), strict=True)
)


def draw_figures(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw regions, descent on quadratics, energies layer by layer, and accuracies.

    Parameters
    ----------
    report : dict
        With rows of all parts and ``summaries``.
    folder : Path
        Where the PNG files go.

    Returns
    -------
    list of Path
    """
    paths = [folder / "regions.png", folder / "quadratics.png"]
    draw_regions(paths[0])
    draw_aim({"runs": [row for row in report["aim"] if row["seed"] == 0]}, paths[1])
    corpora = [corpus["name"] for corpus in report["data"]["corpora_read"]]
    for number, corpus in enumerate(corpora, start=1):
        for weights in WEIGHTS:
            rows = [row for row in report["descent"] if (row["corpus"], row["weights"]) == (corpus, weights)]
            if rows:
                paths.append(folder / f"energies_{number}_{weights.lower()}.png")
                _draw_energies(rows, corpus, weights, paths[-1])
    paths.append(folder / "classification.png")
    _draw_classification(report, corpora, paths[-1])
    return paths


def _draw_energies(rows: list[dict[str, Any]], corpus: str, weights: str, path: Path) -> None:
    """Box plots of energies by layer, of the first seed, above those of anchored energies."""
    first = min(row["seed"] for row in rows)
    figure, axes = plot.new_figure(2, len(VARIANTS), figsize=(3.1 * len(VARIANTS), 7.6))
    figure.suptitle(
        f"Energy of sentences ({corpus}) after each layer, relative to that after the first: (E - E1) / |E1|. "
        f"{weights.capitalize()} weights of seed {first}.\nBoxes: quartiles, whiskers: 5 and 95%. Above: tokens are "
        "free to become equal, which hides errors. Below: tokens are held near to the input, which shows them."
    )
    for anchored in (False, True):
        for column, variant in enumerate(VARIANTS):
            ax = axes[anchored * len(VARIANTS) + column]
            (row,) = (
                row for row in rows if (row["variant"], row["anchored"], row["seed"]) == (variant.name, anchored, first)
            )
            _draw_boxes(ax, row)
            ax.set_title(f"{variant.name}\nrises in {row['share']:.0%} of the sentences", fontsize=9)
            ax.set_xlabel("layer")
        axes[anchored * len(VARIANTS)].set_ylabel("anchored: B = X" if anchored else "not anchored: B = 0", fontsize=11)
    plot.save_figure(figure, path)


def _draw_boxes(ax: Any, row: dict[str, Any]) -> None:
    colour = "#D55E00" if row["share"] > 0 else "#0072B2"
    names = ("whislo", "q1", "med", "q3", "whishi")
    boxes = [dict(zip(names, quantiles, strict=True)) for quantiles in row["quantiles"]]
    line, box = {"color": colour}, {"facecolor": "white", "edgecolor": colour}
    ax.bxp(
        boxes,
        positions=np.arange(1, len(boxes) + 1),
        showfliers=False,
        patch_artist=True,
        widths=0.6,
        boxprops=box,
        medianprops=line,
        whiskerprops=line,
        capprops=line,
        manage_ticks=False,
    )
    if max(max(quantiles) for quantiles in row["quantiles"]) > 10:
        ax.set_yscale("symlog")
    ax.set_xlim(0.3, len(boxes) + 0.7)
    ax.locator_params(axis="x", integer=True)
    ax.grid(alpha=0.3)


def _draw_classification(report: dict[str, Any], corpora: list[str], path: Path) -> None:
    """Accuracy by layers at test time and by noise, one row for each corpus."""
    settings, summary = report["settings"], report["summaries"]["classification"]
    figure, axes = plot.new_figure(len(corpora), 2, figsize=(12, 4.2 * len(corpora)))
    figure.suptitle("Accuracy on test sentences: mean over seeds, bars are standard errors")
    for row, corpus in enumerate(corpora):
        by_depth, by_noise = axes[2 * row], axes[2 * row + 1]
        for entry in (entry for entry in summary if entry["corpus"] == corpus):
            colour = _COLOURS[entry["method"]]
            if "depth" in entry:
                draw_means(by_depth, settings["depths"], entry, "depth", colour)
            draw_means(by_noise, settings["noises"], entry, "noise", colour)
        by_depth.axvline(settings["train_layers"], color="gray", linestyle=":", label="layers in training")
        by_depth.set(xscale="log", xlabel="layers at test time", ylabel="accuracy", title=corpus)
        by_depth.set_xticks(settings["depths"], labels=settings["depths"], minor=False)
        by_depth.minorticks_off()
        by_noise.set(xlabel="noise on features, relative to their standard deviation", ylabel="accuracy", title=corpus)
        for ax in (by_depth, by_noise):
            ax.grid(alpha=0.3)
    legend_below(figure, axes[:2], ncols=3, fontsize=9)
    plot.save_figure(figure, path)

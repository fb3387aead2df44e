"""Figures of constrained denoising of video."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from convexformer import plot
from convexformer.experiments.common import draw_means, legend_below, plain_log

from .common import METHODS

_COLOURS = dict(zip([method.name for method in METHODS], ("#0072B2", "#D55E00", "#009E73"), strict=True))
_MARKERS = dict(zip([method.name for method in METHODS], "os^", strict=True))
_LINES = ("-", "--", ":", "-.")


def draw_figures(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw errors by noise and by layer, the course of training, reconstructions, and the ablation.

    Parameters
    ----------
    report : dict
        With ``runs``, ``ablation`` and ``summaries``.
    folder : Path
        Where the PNG files go.

    Returns
    -------
    list of Path
    """
    names = ["rmse_by_noise", "rmse_by_layer", "training"]
    paths = [folder / f"{name}.png" for name in names]
    for draw, path in zip((_draw_noise, _draw_layers, _draw_training), paths, strict=True):
        draw(report, path)
    if _draw_examples(report, folder, folder / "reconstructions.png"):
        paths.append(folder / "reconstructions.png")
    if any(not row["diverged"] for row in report["ablation"]):
        paths.append(folder / "ablation.png")
        _draw_ablation(report["ablation"], paths[-1])
    return paths


def _grid(report: dict[str, Any], title: str) -> tuple[Any, list[tuple[Any, list[dict[str, Any]]]]]:
    """Axes for each model, depth and training noise, with the rows of the summary: a column for each noise."""
    rows = report["summaries"]["methods"]
    noises = sorted({row["noise"] for row in rows})
    models = list(dict.fromkeys((row["model"], row["depth"]) for row in rows))
    shape = (len(models), len(noises)) if len(noises) > 1 else (1, len(models))
    width = max(4.2 * shape[1], 7)
    figure, axes = plot.new_figure(*shape, figsize=(width, 3.1 * shape[0] + 1.2))
    figure.suptitle(_wrapped(title, width))
    places = []
    cells = [(noise, model, depth) for model, depth in models for noise in noises]
    for ax, cell in zip(axes, cells, strict=True):
        ax.set_title(f"{cell[1]}, {cell[2]} layers, training noise {cell[0]:g}", fontsize=10)
        ax.grid(alpha=0.3)
        places.append((ax, [row for row in rows if (row["noise"], row["model"], row["depth"]) == cell]))
    return figure, places


def _wrapped(title: str, width: float) -> str:
    """A title in lines that fit into so many inches."""
    return textwrap.fill(title, int(10 * width))


def _finish(figure: Any, places: list[tuple[Any, Any]], path: Path) -> None:
    """One legend for all axes, and the file."""
    legend_below(figure, [ax for ax, _ in places])
    plot.save_figure(figure, path)


def _curve(ax: Any, x: Any, row: dict[str, Any], name: str) -> None:
    draw_means(ax, x, row, name, _COLOURS[row["method"]], _MARKERS[row["method"]])


def _draw_noise(report: dict[str, Any], path: Path) -> None:
    test_noises = report["settings"]["test_noises"]
    figure, places = _grid(
        report, "Error of the last layer on test frames by the noise on them: mean over seeds ± standard error"
    )
    for ax, rows in places:
        for row in rows:
            if row["rmse"] is not None:
                _curve(ax, test_noises, row, "rmse")
        ax.plot(test_noises, [255 * noise for noise in test_noises], color="gray", linestyle=":", label="noisy input")
        ax.set(xlabel="noise on test pixels in [0, 1]", ylabel="RMSE, scale of 0 to 255")
        ax.set_ylim(0, max(60.0, 1.1 * max((max(row["rmse"]) for row in rows if row["rmse"]), default=0.0)))
    _finish(figure, places, path)


def _draw_layers(report: dict[str, Any], path: Path) -> None:
    settings = report["settings"]
    figure, places = _grid(
        report,
        "Error of every layer on test frames with the noise of training: mean over seeds ± standard error. "
        "Constraints ask the first layer to be below the gray line and each layer to be below the one before.",
    )
    for ax, rows in places:
        bound = 255 * max(rows[0]["noise"], settings["least_noise"]) * settings["c_ref"] ** 0.5
        for row in rows:
            if row["layer_rmse"] is not None:
                _curve(ax, np.arange(1, row["depth"] + 1), row, "layer_rmse")
        ax.axhline(bound, color="gray", linestyle=":", label="bound of the first layer")
        ax.set(xlabel="layer", ylabel="RMSE, scale of 0 to 255", yscale="log")
        ax.set_xticks(np.arange(1, rows[0]["depth"] + 1))
        plain_log(ax.yaxis, (1, 2, 3, 5))
    _finish(figure, places, path)


def _draw_training(report: dict[str, Any], path: Path) -> None:
    """Whether losses have settled: the validation loss of the last layer by epoch, of seed 0."""
    figure, places = _grid(
        report,
        "Validation loss of the last layer by epoch, seed 0, the run that the search chose (1 is the noisy input)",
    )
    runs = [row for row in report["runs"] if row["seed"] == 0 and not row["diverged"]]
    for ax, rows in places:
        cell = (rows[0]["noise"], rows[0]["model"], rows[0]["depth"])
        for run in (run for run in runs if (run["noise"], run["model"], run["depth"]) == cell):
            epochs = np.arange(1, len(run["training_curve"]) + 1)
            ax.plot(epochs, run["training_curve"], color=_COLOURS[run["method"]], label=run["method"])
        ax.set(xlabel="epoch", ylabel="loss", yscale="log")
        plain_log(ax.yaxis, (1, 2, 3, 5))
    _finish(figure, places, path)


def _draw_examples(report: dict[str, Any], folder: Path, path: Path) -> bool:
    """A test frame: clean, noisy, and what the methods make of it; False where no file of reconstructions is there."""
    from .video import EXAMPLES, example_name  # that module imports this one

    settings = report["settings"]
    noise = max(settings["noises"])
    models = list(dict.fromkeys((row["model"], row["depth"]) for row in report["runs"]))
    found = []
    for model, depth in models:
        files = [folder / EXAMPLES / example_name(noise, model, depth, method.name) for method in METHODS]
        if all(file.exists() for file in files):
            found.append((model, depth, [np.load(file) for file in files]))
    if not found:
        return False
    columns = len(METHODS) + 2
    figure, axes = plot.new_figure(len(found), columns, figsize=(2.5 * columns, 2.7 * len(found) + 0.7))
    title = f"A test frame with noise {max(settings['test_noises']):g}, trained with noise {noise:g}, seed 0; "
    figure.suptitle(_wrapped(title + "pixels and their RMSE are clipped to what can be shown", 2.5 * columns))
    for number, (model, depth, frames) in enumerate(found):
        clean, noisy = frames[0][:2].astype(float)
        shown = [("clean", clean), ("noisy", noisy)]
        shown += [(method.name, frame[2].astype(float)) for method, frame in zip(METHODS, frames, strict=True)]
        for column, (title, picture) in enumerate(shown):
            ax = axes[number * columns + column]
            ax.imshow(picture, cmap="gray", vmin=0, vmax=255)
            rmse = float(np.sqrt(np.mean((picture - clean) ** 2)))
            ax.set_title(title if column == 0 else f"{title}\nRMSE {rmse:.1f}", fontsize=10)
            ax.set(xticks=[], yticks=[])
        axes[number * columns].set_ylabel(f"{model}, {depth} layers")
    plot.save_figure(figure, path)
    return True


def _draw_ablation(rows: list[dict[str, Any]], path: Path) -> None:
    """Error and share of layers that descend by alpha and by resilience."""
    finished = [row for row in rows if not row["diverged"]]
    first = finished[0]
    figure, axes = plot.new_figure(1, 2, figsize=(11, 4.4))
    figure.suptitle(
        f"Constrained training of {first['model']}, {first['depth']} layers, training noise {first['noise']:g}, seed 0"
    )
    resiliences = list(dict.fromkeys(row["resilience"] for row in finished))
    for number, resilience in enumerate(resiliences):
        chosen = [row for row in finished if row["resilience"] == resilience]
        label = "no slacks" if resilience is None else f"resilience {resilience:g}"
        line: dict[str, Any] = {"marker": "o", "linestyle": _LINES[number % len(_LINES)], "label": label}
        alphas = [row["alpha"] for row in chosen]
        axes[0].plot(alphas, [row["mean_rmse"] for row in chosen], **line)
        axes[1].plot(alphas, [100 * row["test_descending_share"] for row in chosen], **line)
    axes[0].set(ylabel="RMSE of the last layer, mean over test noises", title="Error")
    axes[1].set(ylabel="% of pairs of neighbouring layers", title="Layers that descend on test frames", ylim=(-5, 105))
    for ax in axes:
        ax.set_xlabel("alpha: share by which each layer must lower the loss")
        ax.set_xticks(sorted({row["alpha"] for row in finished}))
        ax.grid(alpha=0.3)
    axes[0].legend()
    plot.save_figure(figure, path)

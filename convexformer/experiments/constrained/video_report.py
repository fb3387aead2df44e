"""The numbers of constrained denoising of video as text."""

from __future__ import annotations

from typing import Any

import numpy as np

from convexformer.experiments.common import Column, closing, counted, mean_and_error, shown, shown_with_error
from convexformer.experiments.tables import format_rows

from .common import METHODS, paired_difference
from .video_settings import ConstrainedVideoSettings

_REFERENCE = "unconstrained"
_CELL = ("noise", "model", "depth")
_MEANS = ("mean_rmse", "rmse", "layer_rmse", "test_descending_share")
_SIGNIFICANT = 0.05


def summarise(report: dict[str, Any]) -> dict[str, Any]:
    """Means over seeds, differences to unconstrained training, costs, and how often it is better.

    Parameters
    ----------
    report : dict
        With ``runs``.

    Returns
    -------
    dict
        ``methods``, a row for each method of each model, depth and noise; ``wins``, a row for each other method.
    """
    cells: dict[tuple[Any, ...], dict[str, dict[int, dict[str, Any]]]] = {}
    for row in report["runs"]:
        methods = cells.setdefault(tuple(row[name] for name in _CELL), {})
        runs = methods.setdefault(row["method"], {})
        if not row["diverged"]:
            runs[row["seed"]] = row
    rows = []
    for cell, methods in cells.items():
        reference = methods.get(_REFERENCE, {})
        rows += [
            dict(zip(_CELL, cell, strict=True)) | {"method": method} | _summary(runs, reference)
            for method, runs in methods.items()
        ]
    return {"methods": rows, "wins": _wins(rows)}


def _summary(runs: dict[int, dict[str, Any]], reference: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """One method against the reference, seed by seed; None where no run came to an end."""
    summary: dict[str, Any] = {"n_seeds": len(runs), "n_feasible": sum(row["feasible"] for row in runs.values())}
    for name in _MEANS:
        values = [row[name] for row in runs.values()]
        summary[name], summary[f"{name}_error"] = mean_and_error(values) if values else (None, None)
    both = sorted(runs.keys() & reference.keys())
    compared = both and runs is not reference
    summary |= (
        paired_difference([runs[i]["mean_rmse"] for i in both], [reference[i]["mean_rmse"] for i in both])
        if compared
        else {"difference": None, "error": None, "p": None}
    )
    seconds = _median([row["seconds_per_step"] for row in runs.values()])
    before = _median([row["seconds_per_step"] for row in reference.values()])
    overhead = None if seconds is None or before is None else seconds / before
    return summary | {"seconds_per_step": seconds, "overhead": overhead}


def _median(values: list[float]) -> float | None:
    return float(np.median(values)) if values else None


def _wins(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How often the other methods have less error, over models, depths and noises."""
    wins = []
    for method in (method.name for method in METHODS if method.name != _REFERENCE):
        compared = [row for row in rows if row["method"] == method and row["difference"] is not None]
        certain = [row for row in compared if row["p"] is not None and row["p"] < _SIGNIFICANT]
        overheads = [row["overhead"] for row in compared]
        wins.append(
            {
                "method": method,
                "n_compared": len(compared),
                "n_better": sum(row["difference"] < 0 for row in compared),
                "n_certainly_better": sum(row["difference"] < 0 for row in certain),
                "n_certainly_worse": sum(row["difference"] > 0 for row in certain),
                "overhead": _median(overheads),
            }
        )
    return wins


def _feasible(row: dict[str, Any]) -> str:
    return f"{row['n_feasible']}/{row['n_seeds']}" if row["method"] == METHODS[0].name else "-"


_COLUMNS: tuple[Column, ...] = (
    ("noise", ">", shown("noise", "g")),
    ("model", "<", shown("model", "")),
    ("depth", ">", shown("depth", "d")),
    ("method", "<", shown("method", "")),
    ("RMSE", ">", shown_with_error("mean_rmse", ".2f")),
    ("against unconstrained", ">", shown_with_error("difference", "+.2f", error="error")),
    ("p", ">", shown("p", ".3f")),
    ("layers that descend, %", ">", shown("test_descending_share", ".0f", 100)),
    ("feasible", ">", _feasible),
    ("ms per step", ">", shown("seconds_per_step", ".1f", 1000)),
)
_WIN_COLUMNS: tuple[Column, ...] = (
    ("method", "<", shown("method", "")),
    ("compared", ">", shown("n_compared", "d")),
    ("less error than unconstrained", ">", shown("n_better", "d")),
    (f"with p < {_SIGNIFICANT}", ">", shown("n_certainly_better", "d")),
    (f"more error with p < {_SIGNIFICANT}", ">", shown("n_certainly_worse", "d")),
    ("time per step, relative", ">", shown("overhead", ".2f")),
)
_ABLATION_COLUMNS: tuple[Column, ...] = (
    ("alpha", ">", shown("alpha", "g")),
    ("resilience", ">", lambda row: "none" if row["resilience"] is None else f"{row['resilience']:g}"),
    ("RMSE", ">", lambda row: "diverged" if row["diverged"] else f"{row['mean_rmse']:.2f}"),
    (
        "layers that descend, %",
        ">",
        lambda row: "-" if row["diverged"] else f"{100 * row['test_descending_share']:.0f}",
    ),
    ("feasible", "<", lambda row: "-" if row["diverged"] else "yes" if row["feasible"] else "no"),
)


def format_constrained_video(report: dict[str, Any]) -> str:
    """Tables and the remark.

    Parameters
    ----------
    report : dict
        As ``run_constrained_video`` returns it.

    Returns
    -------
    str

    Examples
    --------
    The text of a report that has no runs yet:

    >>> report = {"runs": [], "summaries": {"methods": [], "wins": []}, "ablation": [], "skipped": {}, "figures": []}
    >>> report["settings"] = {"test_noises": [0.0, 0.2]}
    >>> print(format_constrained_video(report | {"remark": "What it means."}))
    0 seeds: mean over seeds ± standard error
    <BLANKLINE>
    noise  model  depth  method  RMSE ...
    What it means.
    figures:
    """
    summaries = report["summaries"]
    diverged = [row for row in report["runs"] if row["diverged"]]
    parts = [
        f"{counted(len({row['seed'] for row in report['runs']}), 'seed')}: mean over seeds ± standard error",
        "",
        format_rows(summaries["methods"], _COLUMNS),
        _beside_input(summaries["methods"], report["settings"]["test_noises"]),
        "",
        format_rows(summaries["wins"], _WIN_COLUMNS),
        "",
    ]
    if report["ablation"]:
        first = report["ablation"][0]
        parts += [
            f"constrained training of {first['model']}, {first['depth']} layers, noise {first['noise']}, seed 0",
            format_rows(report["ablation"], _ABLATION_COLUMNS),
            "",
        ]
    parts += [f"{name} is left out: {reason}" for name, reason in report["skipped"].items()]
    if diverged:
        parts.append(f"{counted(len(diverged), 'run')} diverged and left out of the means and of what is feasible")
    return "\n".join([*parts, *closing(report)])


def _beside_input(rows: list[dict[str, Any]], test_noises: list[float]) -> str:
    """The error that noise of these sizes has in expectation, and which denoisers have no less."""
    noisy = 255 * float(np.mean(test_noises))
    worse = [
        f"{row['model']}, {row['depth']} layers, noise {row['noise']:g}, {row['method']}"
        for row in rows
        if row["mean_rmse"] is not None and row["mean_rmse"] >= noisy
    ]
    return f"RMSE of the noisy frames themselves: {noisy:.2f} in expectation; no less have " + (
        "; ".join(worse) or "none"
    )


def remark(settings: ConstrainedVideoSettings) -> str:
    """What the numbers mean and how large the search of every method was.

    Parameters
    ----------
    settings : ConstrainedVideoSettings
        The settings.

    Returns
    -------
    str
    """
    tried = len(settings.search.pairs(METHODS[0]))
    searched = "by each seed" if settings.search_every_seed else "by seed 0 for all seeds"
    grid = f"{min(settings.test_noises):g} to {max(settings.test_noises):g}"
    return (
        f"Frames of {settings.size} x {settings.size} in patches of {settings.patch_size} x {settings.patch_size}; the "
        "first 60% in time train, the next 20% choose, the last 20% test. Noise: standard deviation on training "
        f"pixels in [0, 1]. RMSE: on the scale of 0 to 255, mean over {len(settings.test_noises)} noises of the test "
        f"frames from {grid}. Loss of a layer: mean squared error over the pixels of a frame, in units of the squared "
        f"training noise, of at least {settings.least_noise}; the first layer must come below {settings.c_ref}, and 1 "
        f"is the noisy input. Search: {tried} pairs for every method, chosen {searched} by validation loss of the "
        f"last layer, {settings.n_epochs} epochs each. p: two-sided paired t-test over seeds, not corrected for the "
        "number of comparisons. Layers that descend: pairs of neighbouring layers whose later one has less loss, over "
        "test frames. Feasible: seeds whose constraints hold on validation frames, up to slacks and a standard error."
    )

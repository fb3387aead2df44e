"""The numbers of the experiment on probes as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convexformer.experiments.common import Column, closing, counted, grouped, mean_and_error, shown, shown_with_error
from convexformer.experiments.tables import format_rows

from .methods import ATTENTIVE, CERTIFIED, MEAN

_NORMAL = 1.96  # quantile of 97.5%
_AVERAGED = ("accuracy", "auroc", "seconds", "n_heads", "n_weightings", "n_dictionary")
_REFERENCES = {"mean": MEAN, "attentive": ATTENTIVE}


def packed(flags: NDArray[np.bool_]) -> str:
    """Flags in few letters.

    Examples
    --------
    >>> packed(np.array([True, False, True])), unpacked("a0", 3).tolist()
    ('a0', [True, False, True])
    """
    return np.packbits(flags).tobytes().hex()


def unpacked(text: str, count: int) -> NDArray[np.bool_]:
    """Flags of ``packed``."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), dtype=np.uint8), count=count).astype(bool)


def paired_interval(
    differences: Sequence[NDArray[np.floating]], samples: Sequence[NDArray[np.integer]]
) -> dict[str, float]:
    r"""Mean difference of two methods with its interval of 95%, pooled over seeds.

    Seeds share test samples, and the samples of a seed share a training part, so that the variance is clustered both
    ways (Cameron, Gelbach and Miller, 2011): with the residuals :math:`e_{is}` of sample i and seed s,

    .. math:: M^2 V = \sum_i \Big( \sum_s e_{is} \Big)^2
              + \max\Big(0, \; \sum_s \Big( \sum_i e_{is} \Big)^2 - \sum_{is} e_{is}^2 \Big)

    The interval is that of a normal distribution: with few seeds that differ it is too short.

    Parameters
    ----------
    differences : sequence of ndarray
        Of each seed, the differences on its test samples.
    samples : sequence of ndarray of int
        Which samples those are.

    Returns
    -------
    dict
        ``difference``, ``low`` and ``high``.

    Examples
    --------
    >>> one, which = np.array([1.0, 0.0, 0.0, 0.0]), np.arange(4)
    >>> found = paired_interval([one, one], [which, which])  # the second seed says nothing new
    >>> found == paired_interval([one], [which])
    True
    """
    values = np.concatenate(differences)
    mean = float(values.mean())
    residuals = values - mean
    by_sample = np.bincount(np.concatenate(samples), weights=residuals)
    by_seed = [part.sum() - len(part) * mean for part in differences]
    between = max(0.0, float(np.square(by_seed).sum() - np.square(residuals).sum()))
    error = math.sqrt(np.square(by_sample).sum() + between) / len(values)
    return {"difference": mean, "low": mean - _NORMAL * error, "high": mean + _NORMAL * error}


def summarise(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Means over seeds, and differences to the mean with logistic regression and to the attentive probe.

    Parameters
    ----------
    report : dict
        With rows of all parts.

    Returns
    -------
    list of dict
        One for each data set, budget and method, in the order in which they were run; seeds in which a training
        diverged with all pairs of learning rate and decay are left out.
    """
    sizes = {one["name"]: one["n_samples"] for one in report["data"]["datasets_read"]}
    tests = {
        (row["data"], row["seed"]): np.flatnonzero(unpacked(row["test"], sizes[row["data"]]))
        for row in report["splits"]
    }
    ended = [row for row in report["results"] if "diverged" not in row["chosen"]]
    groups = grouped(ended, ("data", "budget", "method"))
    summary = []
    for (name, budget, method), rows in groups.items():
        entry = {"data": name, "budget": budget, "method": method, "n_seeds": len(rows)}
        entry["n_labels"] = rows[0]["n_labels"]
        for number in _AVERAGED:
            is_there = rows[0][number] is not None
            pair = mean_and_error([row[number] for row in rows]) if is_there else (None, None)
            entry[number], entry[f"{number}_error"] = pair
        gaps = [row["relative_gap"] for row in rows if row["relative_gap"] is not None]
        entry["relative_gap"] = max(gaps, default=None)
        for key, reference in _REFERENCES.items():
            entry[f"to_{key}"] = _difference(rows, groups.get((name, budget, reference), []), tests)
        summary.append(entry)
    return summary


def _difference(
    rows: list[dict[str, Any]], others: list[dict[str, Any]], tests: dict[tuple[str, int], NDArray[np.int64]]
) -> dict[str, float] | None:
    """The interval of the difference in accuracy over the seeds that both methods have; None to itself."""
    by_seed = {row["seed"]: row for row in others}
    pairs = [(row, by_seed[row["seed"]]) for row in rows if row["seed"] in by_seed]
    if not pairs or pairs[0][0] is pairs[0][1]:
        return None
    samples = [tests[row["data"], row["seed"]] for row, _ in pairs]
    differences = [
        unpacked(row["hits"], len(which)).astype(float) - unpacked(other["hits"], len(which))
        for (row, other), which in zip(pairs, samples, strict=True)
    ]
    return paired_interval(differences, samples)


def _interval(name: str) -> Callable[[dict[str, Any]], str]:
    def show(row: dict[str, Any]) -> str:
        found = row[name]
        if found is None:
            return "-"
        return f"{100 * found['difference']:+.1f} ({100 * found['low']:+.1f} to {100 * found['high']:+.1f})"

    return show


def _used(row: dict[str, Any]) -> str:
    return "-" if row["n_dictionary"] is None else f"{row['n_weightings']:.0f} of {row['n_dictionary']:.0f}"


_COLUMNS: tuple[Column, ...] = (
    ("data", "<", shown("data", "")),
    ("labels", ">", shown("n_labels", "d")),
    ("method", "<", shown("method", "")),
    ("accuracy, %", ">", shown_with_error("accuracy", ".1f", 100)),
    ("AUROC, %", ">", shown_with_error("auroc", ".1f", 100)),
    ("to mean + LR", ">", _interval("to_mean")),
    ("to 8 queries", ">", _interval("to_attentive")),
    ("seconds", ">", shown("seconds", ".1f")),
    ("gap", ">", shown("relative_gap", ".0e")),
    ("heads", ">", shown("n_heads", ".0f")),
    ("weightings", ">", _used),
)


def format_probes(report: dict[str, Any]) -> str:
    """The table and the remark.

    Parameters
    ----------
    report : dict
        As ``run_probes`` returns it.

    Returns
    -------
    str

    Examples
    --------
    The text of a report that has no runs yet:

    >>> print(format_probes({"splits": [], "summaries": [], "remark": "What it means.", "figures": []}))
    0 seeds; accuracies with standard errors, differences in points with intervals of 95%
    <BLANKLINE>
    data  labels  method  accuracy, %  AUROC, %  to mean + LR ...
    What it means.
    figures:
    """
    n_seeds = len({row["seed"] for row in report["splits"]})
    parts = [
        f"{counted(n_seeds, 'seed')}; accuracies with standard errors, differences in points with intervals of 95%",
        "",
        format_rows(report["summaries"], _COLUMNS),
        "",
        *closing(report),
    ]
    return "\n".join(parts)


def remark(report: dict[str, Any]) -> str:
    """How the numbers came about, and where a certified probe helps and where the mean suffices, by these numbers.

    Parameters
    ----------
    report : dict
        With ``settings``, ``summaries``, ``results`` and ``left_out``.

    Returns
    -------
    str
    """
    summary = report["summaries"]
    sentences = [
        _rules(report["settings"]),
        _verdict(summary, "mean", "the mean with logistic regression"),
        _where(summary),
        _verdict(summary, "attentive", "the softmax attentive probe of 8 queries"),
        _speed(summary),
        *(f"Left out: {reason}." for reason in [*report["left_out"], *_diverged(report["results"])]),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _diverged(results: list[dict[str, Any]]) -> list[str]:
    """Trainings that diverged, with the number of seeds."""
    rows = [row for row in results if "diverged" in row["chosen"]]
    return [
        f"{method} on {data} with {n_labels} labels, which diverged with every learning rate in "
        f"{counted(len(group), 'seed')}"
        for (method, data, n_labels), group in grouped(rows, ("method", "data", "n_labels")).items()
    ]


def _rules(settings: dict[str, Any]) -> str:
    n_trained = len(settings["learning_rates"]) * len(settings["weight_decays"])
    return (
        f"Every method sees the same tokens, standardised, and chooses by the log loss on the same "
        f"{settings['validation_share']:.0%} of the labels; none is fitted again with them. Logistic regression: "
        f"{len(settings['inverse_decays'])} values of C. Gradients: {n_trained} pairs of learning rate and decay of "
        f"AdamW, ended early. Certified: at most {settings['n_alphas']} alphas down to {settings['eps']:g} of the "
        f"largest, ended early, to a relative gap of {settings['tol']:g}; the dictionary is made of the samples to fit "
        "alone. Seconds: of the whole search. Intervals: paired over test samples, clustered by sample and by seed; "
        "too short where few seeds differ."
    )


def _cells(summary: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Rows of the certified probe with its automatic dictionary that can be compared."""
    return [row for row in summary if row["method"] == CERTIFIED and row[f"to_{key}"] is not None]


def _verdict(summary: list[dict[str, Any]], key: str, other: str) -> str:
    cells = [row[f"to_{key}"] for row in _cells(summary, key)]
    if not cells:
        return ""
    better, worse = sum(cell["low"] > 0 for cell in cells), sum(cell["high"] < 0 for cell in cells)
    average = 100 * float(np.mean([cell["difference"] for cell in cells]))
    return (
        f"Against {other}, the certified probe with the automatic dictionary is {average:+.1f} points on average over "
        f"{counted(len(cells), 'pair')} of data set and budget: better in {better} and worse in {worse} of them by "
        "intervals without zero."
    )


def _where(summary: list[dict[str, Any]]) -> str:
    """Where it helps, and where the mean suffices."""
    groups: dict[str, list[str]] = {"helps": [], "suffices": [], "hurts": []}
    for row in _cells(summary, "mean"):
        cell = row["to_mean"]
        verdict = "helps" if cell["low"] > 0 else "hurts" if cell["high"] < 0 else "suffices"
        groups[verdict].append(f"{row['data']} with {row['n_labels']} labels")
    texts = {
        "helps": "It helps on {}.",
        "suffices": "The mean suffices, by intervals that hold zero, on {}.",
        "hurts": "It hurts on {}.",
    }
    return " ".join(texts[name].format(", ".join(places)) for name, places in groups.items() if places)


def _speed(summary: list[dict[str, Any]]) -> str:
    seconds = {(row["data"], row["budget"], row["method"]): row["seconds"] for row in summary}
    ratios = [
        row["seconds"] / seconds[row["data"], row["budget"], ATTENTIVE]
        for row in _cells(summary, "attentive")
        if seconds[row["data"], row["budget"], ATTENTIVE] > 0
    ]
    if not ratios:
        return ""
    return (
        f"Its search takes {float(np.median(ratios)):.2g} times the seconds of that probe's in the median, from "
        f"{min(ratios):.2g} to {max(ratios):.2g}."
    )

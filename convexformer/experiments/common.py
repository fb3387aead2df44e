"""What all experiments share: their report on disk, going on with it seed by seed, medians over seeds."""

from __future__ import annotations

import json
import os
import platform
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sklearn
import torch
from scipy import stats
from tqdm.auto import tqdm

import convexformer
from convexformer import plot
from convexformer.experiments.settings import ExperimentSettings
from convexformer_solvers.io.npz import parsed, replacing
from convexformer_solvers.validation import check_counts

Column = tuple[str, str, Callable[[dict[str, Any]], str]]


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Replace a file at once, so that an interrupt leaves the old one or the new one.

    Parameters
    ----------
    path : Path
        The file.
    report : mapping
        Of what JSON can hold.

    Raises
    ------
    ValueError
        If a number is infinite or nan.
    """
    with replacing(path) as partial:
        partial.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


def report_path(folder: str | os.PathLike[str], name: str, n_seeds: int) -> Path:
    """Path of a report in its folder, which is made when absent.

    Parameters
    ----------
    folder : path-like
        The folder.
    name : str
        Name of the file.
    n_seeds : int
        Number of seeds, which is checked.

    Returns
    -------
    Path

    Raises
    ------
    ValueError
        If `n_seeds` is not a positive integer.
    ModuleNotFoundError
        If matplotlib is not installed, which would show only when all is done.
    """
    plot.require_matplotlib()
    check_counts(n_seeds=n_seeds)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def new_report(
    settings: ExperimentSettings, data: dict[str, Any], parts: Sequence[str], **others: Any
) -> dict[str, Any]:
    """The report of no run, on this machine.

    Parameters
    ----------
    settings : ExperimentSettings
        What it is run with.
    data : dict
        What tells its data from others.
    parts : sequence of str
        Entries to which runs add their rows.
    **others
        What else it says before there are runs.

    Returns
    -------
    dict
    """
    return {
        "settings": settings.as_json(),
        "data": data,
        **others,
        "versions": versions(),
        "threads": torch.get_num_threads(),
        **{part: [] for part in parts},
    }


def begin_report(path: Path, fresh: dict[str, Any], kept: Sequence[str] = ("runs",)) -> dict[str, Any]:
    """Begin a report, or go on with that of the file, which must be of the same settings and data.

    Parameters
    ----------
    path : Path
        File of the report; need not be there.
    fresh : dict
        The report of no seed: ``settings`` and ``data`` as they read back from JSON, ``runs``, which is empty, and
        what else belongs to it.
    kept : sequence of str, default=("runs",)
        Entries that are those of the file, where there is one.

    Returns
    -------
    dict
        `fresh` with the runs, or what else is `kept`, of the file.

    Raises
    ------
    ValueError
        If the file is no such report, or one of other settings or data.
    """
    if not path.exists():
        return fresh
    found = _read_report(path, kept, ("settings", "data"))
    before, results = {**found["settings"], **found["data"]}, {name: found[name] for name in kept}
    for name, value in {**fresh["settings"], **fresh["data"]}.items():
        if before.get(name) != value:
            raise ValueError(
                f"{path} holds results with {name}={before.get(name)!r}, not {value!r}; choose another folder, "
                "or delete that file"
            )
    return fresh | results


def _read_report(path: Path, rows: Sequence[str], dicts: Sequence[str] = ()) -> dict[str, Any]:
    """A report with lists of rows, and dicts, of those names; ``ValueError`` if the file holds another thing."""
    try:
        found = parsed(path.read_bytes())
        for name in rows:
            if not (isinstance(found[name], list) and all(isinstance(row, dict) for row in found[name])):
                raise TypeError(f"{name} must be a list of dicts, got {found[name]!r:.200}")
        for name in dicts:
            if not isinstance(found[name], dict):
                raise TypeError(f"{name} must be a dict, got {found[name]!r:.200}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a report of this experiment ({error!r}); choose another folder") from error
    return found


class Unit(NamedTuple):
    """What is run at once and then on disk.

    Attributes
    ----------
    part : str
        Entry of the report to whose rows those of the unit are added.
    title : str
        What the progress bar shows.
    key : dict
        Entries that tell its rows from those of others.
    run : callable
        Returns its rows.
    """

    part: str
    title: str
    key: dict[str, Any]
    run: Callable[[], list[dict[str, Any]]]

    def is_done(self, report: dict[str, Any]) -> bool:
        """Whether its rows are in a report."""
        return any(self.key.items() <= row.items() for row in report[self.part])


def run_units(path: Path, report: dict[str, Any], units: Sequence[Unit], *, quiet: bool) -> None:
    """Run the units that a report lacks, and write it after each of them.

    Parameters
    ----------
    path : Path
        File of the report.
    report : dict
        As ``begin_report`` returns it; changed in place.
    units : sequence of Unit
        All of them.
    quiet : bool
        Whether to hide the progress bar.

    Raises
    ------
    ValueError
        If two units have one key, so that the rows of the one would pass for those of the other.

    Examples
    --------
    >>> report = {"rows": [{"seed": 0}]}
    >>> unit = Unit("rows", "seed 0", {"seed": 0}, lambda: [])
    >>> run_units(Path("not_written.json"), report, [unit], quiet=True)
    """
    seen: set[tuple[Any, ...]] = set()
    for unit in units:
        place = (unit.part, *unit.key.items())
        if place in seen:
            raise ValueError(
                f"settings must give each value once, and files of different names; two runs have {unit.key}"
            )
        seen.add(place)
    with tqdm(total=len(units), initial=sum(unit.is_done(report) for unit in units), disable=quiet, unit="run") as bar:
        for unit in units:
            if not unit.is_done(report):
                bar.set_description(unit.title)
                report[unit.part] += unit.run()
                write_json(path, report)
                bar.update()


def finish_report(
    path: Path, report: dict[str, Any], draw_figures: Callable[[dict[str, Any], Path], list[Path]]
) -> dict[str, Any]:
    """Draw the figures of a report beside it and write it, with their paths as ``figures``; returns it.

    Parameters
    ----------
    path : Path
        File of the report.
    report : dict
        All but the figures; changed in place.
    draw_figures : callable
        From the report and a folder to the paths of the figures that it has drawn there.

    Returns
    -------
    dict
    """
    report["figures"] = [str(figure) for figure in draw_figures(report, path.parent)]
    write_json(path, report)
    return report


def finished_seeds(path: str | os.PathLike[str]) -> list[int]:
    """Seeds whose numbers are in a report.

    Parameters
    ----------
    path : path-like
        File of the report; need not be there.

    Returns
    -------
    list of int

    Raises
    ------
    ValueError
        If the file is no report.

    Examples
    --------
    >>> finished_seeds("convexformer-student-teacher/not_there.json")
    []
    """
    path = Path(path)
    return [run["seed"] for run in _read_report(path, ["runs"])["runs"]] if path.exists() else []


def versions() -> dict[str, str]:
    """Versions that numbers may depend on; an experiment may be gone on with under others.

    Returns
    -------
    dict
        By the name of the package, and of Python.
    """
    return {
        "convexformer": convexformer.__version__,
        "torch": torch.__version__,
        "scikit-learn": sklearn.__version__,
        "python": platform.python_version(),
    }


def thinned(curve: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A curve with 101 points at most, evenly in the logarithm of their number, the first and the last among them.

    Parameters
    ----------
    curve : dict
        With lists of equal length.
    names : sequence of str
        Which entries those are; all others are kept.

    Returns
    -------
    dict

    Examples
    --------
    >>> thin = thinned({"step": list(range(1000)), "lr": 0.1}, ["step"])
    >>> len(thin["step"]), thin["step"][-3:], thin["lr"]
    (76, [870, 932, 999], 0.1)
    """
    count = len(curve[names[0]])
    kept = sorted({round(count ** (i / 100)) - 1 for i in range(101)}) if count else []
    return curve | {name: [curve[name][i] for i in kept] for name in names}


def grouped(rows: Iterable[dict[str, Any]], keys: Sequence[str]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows by their entries of some keys, in the order of first appearance.

    Examples
    --------
    >>> grouped([{"p": 5, "seed": 0}, {"p": 5, "seed": 1}], ["p"])
    {(5,): [{'p': 5, 'seed': 0}, {'p': 5, 'seed': 1}]}
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def medians(rows: Sequence[dict[str, Any]], keys: Sequence[str], ranges: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Medians over seeds of all numbers, and the ranges of some.

    Parameters
    ----------
    rows : sequence of dict
        Rows of all seeds.
    keys : sequence of str
        Entries that say which rows belong together.
    ranges : sequence of str, default=()
        Entries whose least and largest numbers are wanted as well.

    Returns
    -------
    list of dict
        In the order of first appearance, with ``n_seeds`` and, of an entry ``x`` of `ranges`, ``x_range``.
    """
    return [
        dict(zip(keys, names, strict=True)) | _median(group, {*keys, "seed"}, ranges) | {"n_seeds": len(group)}
        for names, group in grouped(rows, keys).items()
    ]


def _median(group: list[dict[str, Any]], left_out: set[str], ranges: Sequence[str]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for name in (name for name in group[0] if name not in left_out):
        values = [row[name] for row in group if row[name] is not None]
        summary[name] = float(np.median(values)) if values else None
        if name in ranges and values:
            summary[f"{name}_range"] = [min(values), max(values)]
    return summary


def mean_and_error(values: Sequence[Any]) -> tuple[Any, Any]:
    """Mean over seeds and its standard error, of numbers or of lists of them; no error with fewer than two seeds.

    Examples
    --------
    >>> mean_and_error([[1.0, 2.0], [3.0, 2.0]])
    ([2.0, 2.0], [1.0, 0.0])
    """
    array = np.asarray(values, dtype=float)
    error = stats.sem(array, axis=0).tolist() if len(array) > 1 else None
    return array.mean(0).tolist(), error


def counted(number: int, noun: str) -> str:
    """A number with its noun, which has an s unless it is one.

    Examples
    --------
    >>> counted(1, "seed"), counted(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{number} {noun}" + "s" * (number != 1)


def with_seeds(names: Sequence[str]) -> list[str]:
    """Names, each once, with the number of seeds that gave it.

    Examples
    --------
    >>> with_seeds(["ridge", "softmax", "ridge"])
    ['ridge (2 seeds)', 'softmax (1 seed)']
    """
    return [f"{name} ({counted(names.count(name), 'seed')})" for name in dict.fromkeys(names)]


def closing(report: dict[str, Any]) -> list[str]:
    """The last lines of a report as text: its remark and its figures."""
    return [textwrap.fill(report["remark"], 120), "figures: " + ", ".join(report["figures"])]


def shown(name: str, form: str, factor: float = 1) -> Callable[[dict[str, Any]], str]:
    """Function that shows an entry of a row in a format, a number times a factor, and a dash where it does not apply.

    Examples
    --------
    >>> shown("ratio", ".2f")({"ratio": 1.0}), shown("ratio", ".2f")({"ratio": None})
    ('1.00', '-')
    """
    return lambda row: "-" if row[name] is None else f"{factor * row[name]:{form}}"


def shown_with_error(
    name: str, form: str, factor: float = 1.0, error: str | None = None
) -> Callable[[dict[str, Any]], str]:
    """Function that shows a mean with its standard error, where there is one, and a dash where it does not apply.

    Parameters
    ----------
    name : str
        Entry of a row that holds the mean.
    form : str
        Format of both; a sign is for the mean alone.
    factor : float, default=1.0
        What both are multiplied by, as 100 for per cent.
    error : str, optional
        Entry that holds the error. Default: `name` with ``_error``.

    Examples
    --------
    >>> show = shown_with_error("share", "+.1f", 100)
    >>> show({"share": 0.5, "share_error": 0.01}), show({"share": 0.5, "share_error": None})
    ('+50.0 ± 1.0', '+50.0')
    """
    error = f"{name}_error" if error is None else error

    def show(row: dict[str, Any]) -> str:
        if row[name] is None:
            return "-"
        mean = f"{factor * row[name]:{form}}"
        return mean if row[error] is None else f"{mean} ± {factor * row[error]:{form.removeprefix('+')}}"

    return show


def draw_means(ax: Any, x: Any, row: dict[str, Any], name: str, colour: str, marker: str = "o") -> None:
    """Draw the means over seeds of a method with their standard errors.

    Parameters
    ----------
    ax : matplotlib Axes
        Where.
    x : array-like
        Positions.
    row : dict
        Of a summary: its entry `name` and ``name_error``, and ``method``, which is the label.
    name : str
        Entry with a mean for each position.
    colour, marker : str
        Of the line.
    """
    look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "capsize": 3}
    ax.errorbar(x, row[name], yerr=row[f"{name}_error"], label=row["method"], **look)


def legend_below(figure: Any, axes: Iterable[Any], **options: Any) -> None:
    """Draw one legend of several axes below a figure, with each label once.

    Parameters
    ----------
    figure : matplotlib Figure
        The figure.
    axes : iterable of matplotlib Axes
        Those whose lines are named.
    **options
        Of ``figure.legend``; by default all entries stand beside one another.
    """
    entries = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", **{"ncols": len(entries)} | options)


def plain_log(axis: Any, subs: Sequence[int]) -> None:
    """Numbers such as 20 and 50 rather than powers of ten at a logarithmic axis.

    Parameters
    ----------
    axis : matplotlib Axis
        Such as ``ax.xaxis``.
    subs : sequence of int
        Multiples of powers of ten that have a number where there are several; others are those of a linear axis.
    """
    plt = plot.require_matplotlib()
    axis.set_major_locator(plt.LogLocator(subs=subs))
    axis.set_major_formatter(plt.FormatStrFormatter("%g"))
    axis.set_minor_formatter(plt.NullFormatter())

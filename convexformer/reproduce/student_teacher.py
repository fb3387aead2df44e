"""The student-teacher experiment (paper [C], Figs 2 and 3): students of one attention layer of a pretrained encoder."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sklearn
import torch
from tqdm.auto import tqdm

import convexformer
from convexformer import plot
from convexformer.datasets import Activations, load_attention_activations

from .baselines import DECAYS, fit_group_lasso, fit_ridge, missing_group_lasso, train_softmax
from .convex_students import CLASSES, Solved, solve_class, train_class
from .data import split_activations
from .figures import draw_figures
from .maps import compare_maps
from .report import remark, summarise
from .rows import Curve, Row
from .settings import StudentTeacherSettings

FILE = "student_teacher.json"
_KEPT_POINTS = 100


def run_student_teacher(
    folder: str | os.PathLike[str],
    settings: StudentTeacherSettings | None = None,
    *,
    n_seeds: int = 3,
    cache: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train all students of a teacher's layer for several seeds, compare them, and draw.

    Every seed draws a split into training, validation and test sentences, initial weights and gates. Its numbers are
    on disk as soon as it is finished; a later call with the same settings goes on with the seeds that are missing.

    Parameters
    ----------
    folder : path-like
        Where ``student_teacher.json`` and the figures go; made when absent.
    settings : StudentTeacherSettings, optional
        Default: the full setting, meant for a GPU.
    n_seeds : int, default=3
        Seeds 0, 1, ...
    cache : path-like, optional
        Folder for the teacher's activations. Default: ``activations`` inside `folder`.
    quiet : bool, default=False
        Whether to hide progress bars.

    Returns
    -------
    dict
        What the JSON file holds: ``settings``, ``data``, ``remark``, ``skipped``, ``runs`` with versions, rows, curves
        and maps of each seed, ``medians`` and ``map_medians`` over seeds, and ``figures``.

    Raises
    ------
    ValueError
        If the folder holds results of other settings or sentences, or a setting does not fit the teacher.
    OSError, ModuleNotFoundError
        If teacher, sentences or an extra is missing; see ``load_attention_activations``.
    KeyboardInterrupt
        On Ctrl-C. Finished seeds are on disk.
    """
    plot.require_matplotlib()
    settings = StudentTeacherSettings() if settings is None else settings
    if isinstance(n_seeds, bool) or not isinstance(n_seeds, int) or n_seeds < 1:
        raise ValueError(f"n_seeds must be a positive integer, got {n_seeds!r}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = _load(settings, folder / "activations" if cache is None else cache, quiet)
    report = _begin(folder / FILE, settings, data)
    finished = {run["seed"] for run in report["runs"]}
    stages = len(CLASSES) * 2 + len(DECAYS) + 2
    with tqdm(total=n_seeds * stages, disable=quiet, unit="model") as bar:
        for seed in range(n_seeds):
            if seed in finished:
                bar.update(stages)
                continue
            report["runs"].append(_run_seed(data, settings, seed, bar))
            report["runs"].sort(key=lambda run: run["seed"])
            _write(folder / FILE, report | summarise(report["runs"]))
    report |= summarise(report["runs"])
    report["figures"] = [str(path) for path in draw_figures(report, folder)]
    _write(folder / FILE, report)
    return report


def finished_seeds(folder: str | os.PathLike[str]) -> list[int]:
    """Seeds whose numbers are in a folder.

    Parameters
    ----------
    folder : path-like
        As given to ``run_student_teacher``.

    Returns
    -------
    list of int
    """
    path = Path(folder) / FILE
    return [run["seed"] for run in json.loads(path.read_text())["runs"]] if path.exists() else []


def _load(settings: StudentTeacherSettings, cache: str | os.PathLike[str], quiet: bool) -> Activations:
    return load_attention_activations(
        settings.sentences,
        model=settings.model,
        layer=settings.layer,
        n_tokens=settings.n_tokens,
        site=settings.site,
        n_sentences=settings.n_sentences,
        short="drop",
        cache=cache,
        device=settings.device,
        verbose=not quiet,
    )


def _begin(path: Path, settings: StudentTeacherSettings, data: Activations) -> dict[str, Any]:
    """The report so far: that of the file, if there is one, which must be of the same settings and sentences."""
    fresh: dict[str, Any] = {
        "settings": settings.as_json(),
        "data": {
            "n_sentences": len(data),
            "n_features": data.inputs.shape[2],
            "padding": "none: shorter sentences are left out, longer ones cut",
            "tokens_sha256": hashlib.sha256(json.dumps(data.tokens).encode()).hexdigest(),
        },
        "remark": remark(settings),
        "skipped": _skipped(data),
        "runs": [],
    }
    if not path.exists():
        return fresh
    try:
        found = json.loads(path.read_text())
        before = {**found["settings"], **found["data"]}
        runs = found["runs"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a report of this experiment ({error!r}); choose another folder") from error
    now = {**fresh["settings"], **fresh["data"]}
    for name, value in now.items():
        if before.get(name) != value:
            raise ValueError(
                f"{path} holds results with {name}={before.get(name)!r}, not {value!r}; choose another folder, "
                "or delete that file"
            )
    return fresh | {"runs": runs}


def _skipped(data: Activations) -> list[str]:
    reasons = [missing_group_lasso()]
    if data.attention is None:
        reasons.append(f"attention maps: model {data.model!r} gives no attention weights")
    return [reason for reason in reasons if reason is not None]


def _run_seed(data: Activations, settings: StudentTeacherSettings, seed: int, bar: Any) -> dict[str, Any]:
    """Rows, curves and maps of one seed."""

    def staged(title: str, work: Callable[..., Any], *arguments: Any) -> Any:
        bar.set_description(f"seed {seed}: {title}")
        result = work(*arguments)
        bar.update()
        return result

    split = split_activations(data, position=settings.target_position, n_outputs=settings.n_outputs, seed=seed)
    rows: list[Row] = []
    curves: list[Curve] = []
    for kind in CLASSES:
        solved: Solved = staged(f"{kind.name}, convex", solve_class, kind, split, settings, seed)
        networks, courses = staged(f"{kind.name}, Adam", train_class, kind, solved, split, settings, seed)
        rows += [solved.row, *networks]
        curves += [solved.curve, *courses]
        if kind is CLASSES[0] and missing_group_lasso() is None:
            rows.append(fit_group_lasso(solved, split, settings))
    softmax = [staged(f"softmax, decay on {on}", train_softmax, on, split, settings, seed) for on in DECAYS]
    rows += [row for row, _, _ in softmax]
    curves += [curve for _, curve, _ in softmax]
    rows += staged("ridge", lambda: [fit_ridge(own, split, settings, seed) for own in (False, True)])
    run: dict[str, Any] = {
        "seed": seed,
        "versions": _versions(),
        "threads": torch.get_num_threads(),
        "variance_kept": split.variance_kept,
        "rows": [row.as_json() for row in rows],
        "curves": [_thinned(curve.as_json()) for curve in curves],
        "map_rows": [],
        "maps": {},
    }
    if data.attention is not None:
        sequences = split_activations(data, position=None, n_outputs=settings.map_outputs, seed=seed)
        choice = max((choice for _, _, choice in softmax), key=lambda choice: choice.validation_r2)
        teacher = data.attention[sequences.train_index]
        run["map_rows"], run["maps"] = staged("maps", compare_maps, teacher, choice, sequences, settings, seed)
    else:
        bar.update()
    return run


def _versions() -> dict[str, str]:
    """Versions that numbers may depend on; an experiment may be gone on with under others."""
    return {
        "convexformer": convexformer.__version__,
        "torch": torch.__version__,
        "scikit-learn": sklearn.__version__,
        "python": platform.python_version(),
    }


def _thinned(curve: dict[str, Any]) -> dict[str, Any]:
    """At most so many points of the objective, more of them early, with the first and the last."""
    count = len(curve["seconds"])
    kept = sorted({round(count ** (i / _KEPT_POINTS)) - 1 for i in range(_KEPT_POINTS + 1)}) if count else []
    return curve | {name: [curve[name][i] for i in kept] for name in ("seconds", "excess")}


def _write(path: Path, report: dict[str, Any]) -> None:
    """Replace the file at once, so that an interrupt leaves the old one or the new one."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    os.replace(partial, path)

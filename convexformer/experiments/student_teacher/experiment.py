"""The student-teacher experiment (paper [C], Figs 2 and 3): students of one attention layer of a pretrained encoder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

from convexformer.datasets import Activations, load_attention_activations
from convexformer.datasets._teacher import Teacher
from convexformer.experiments.common import Unit, begin_report, finish_report, report_path, run_units, thinned, versions

from .baselines import DECAYS, fit_group_lasso, fit_ridge, missing_group_lasso, train_softmax
from .convex_students import CLASSES, Solved, solve_class, train_class
from .data import split_activations
from .figures import draw_figures
from .maps import compare_maps
from .report import remark, summarise
from .rows import Curve, Row
from .settings import StudentTeacherSettings

FILE = "student_teacher.json"


def run_student_teacher(
    folder: str | os.PathLike[str],
    settings: StudentTeacherSettings | None = None,
    *,
    n_seeds: int = 3,
    cache: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    r"""Train all students of a teacher's layer for several seeds, compare them, and draw.

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

    Examples
    --------
    A tiny random encoder as the teacher:

    >>> import tempfile
    >>> from pathlib import Path
    >>> import transformers
    >>> _ = torch.manual_seed(0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sizes = dict(vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    ...     transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(folder)
    ...     words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "yes", "no"]
    ...     _ = Path(folder, "vocab.txt").write_text("\n".join(words))
    ...     _ = Path(folder, "sentences.txt").write_text("\n".join(["yes no no yes", "no yes yes", "yes yes"] * 10))
    ...     settings = StudentTeacherSettings.small(
    ...         model=folder, layer=0, sentences=f"{folder}/sentences.txt", n_sentences=20, n_tokens=4, n_outputs=2,
    ...         n_gates=2, n_alphas=2, n_steps=2, learning_rates=(0.01,), softmax_learning_rates=(0.01,),
    ...     )
    ...     report = run_student_teacher(folder, settings, n_seeds=1, quiet=True)
    >>> gaps = [row["excess"] for row in report["runs"][0]["rows"] if row["excess"] is not None]
    >>> min(gaps) > -1e-9  # above the certified bound of their class
    True
    """
    settings = StudentTeacherSettings() if settings is None else settings
    path = report_path(folder, FILE, n_seeds)
    data = _load(settings, path.parent / "activations" if cache is None else cache, quiet)
    report = begin_report(path, _fresh(settings, data))
    stages = len(CLASSES) * 2 + len(DECAYS) + 2
    done = stages * sum(run["seed"] < n_seeds for run in report["runs"])
    with tqdm(total=n_seeds * stages, initial=done, disable=quiet, unit="model") as bar:
        units = [
            Unit("runs", f"seed {seed}", {"seed": seed}, partial(_run_seed, data, settings, bar, seed))
            for seed in range(n_seeds)
        ]
        run_units(path, report, units, quiet=True)  # the bar counts models
    report["runs"].sort(key=lambda run: run["seed"])
    report |= summarise(report["runs"])
    return finish_report(path, report, draw_figures)


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


def _fresh(settings: StudentTeacherSettings, data: Activations) -> dict[str, Any]:
    """The report of no seed."""
    chosen = {}
    if settings.model is not None:  # the default never changes
        teacher = Teacher(settings.model, settings.layer, settings.site, torch.device("cpu"))
        chosen["model_fingerprint"] = teacher.fingerprint()
    return {
        "settings": settings.as_json(),
        "data": {
            "n_sentences": len(data),
            "n_features": data.inputs.shape[2],
            "padding": "none: shorter sentences are left out, longer ones cut",
            "tokens_sha256": hashlib.sha256(json.dumps(data.tokens).encode()).hexdigest(),
            **chosen,
        },
        "remark": remark(settings),
        "skipped": _skipped(data),
        "runs": [],
    }


def _skipped(data: Activations) -> list[str]:
    reasons = [missing_group_lasso()]
    if data.attention is None:
        reasons.append(f"attention maps: model {data.model!r} gives no attention weights")
    return [reason for reason in reasons if reason is not None]


def _run_seed(data: Activations, settings: StudentTeacherSettings, bar: Any, seed: int) -> list[dict[str, Any]]:
    """One run: rows, curves and maps of a seed."""

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
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "variance_kept": split.variance_kept,
        "rows": [asdict(row) for row in rows],
        "curves": [thinned(asdict(curve), ("seconds", "excess")) for curve in curves],
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
    return [run]

"""The experiment on unfolded transformers: regions, energies layer by layer, accuracy ([U] Figs 1-6)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from convexformer.experiments.common import Unit, begin_report, finish_report, new_report, report_path, run_units
from convexformer.experiments.corpora import Corpus, load_corpus
from convexformer.validation import check_device

from .aim import compare_steps
from .classification import METHODS, Method, classify
from .descent import measure_descent
from .figures import draw_figures
from .report import remark, summarise
from .settings import UnfoldedSettings

FILE = "unfolded.json"
_PARTS = ("aim", "descent", "classification")


def run_unfolded(
    folder: str | os.PathLike[str],
    settings: UnfoldedSettings | None = None,
    *,
    n_seeds: int = 3,
    quiet: bool = False,
) -> dict[str, Any]:
    r"""Measure where unfolded transformers descend and how accurate they are, for several seeds, and draw.

    Every seed draws a split, initial weights and minibatches. What is finished is on disk at once; a later call with
    the same settings goes on with what is missing.

    Parameters
    ----------
    folder : path-like
        Where ``unfolded.json`` and the figures go; made when absent.
    settings : UnfoldedSettings, optional
        Default: the full setting, an hour or two on two cores.
    n_seeds : int, default=3
        Seeds 0, 1, ...
    quiet : bool, default=False
        Whether to hide the progress bar.

    Returns
    -------
    dict
        What the JSON file holds: ``settings``, ``data``, ``remark``, ``versions``, rows of ``aim``, ``descent`` and
        ``classification`` of each seed, ``summaries`` over seeds, and ``figures``.

    Raises
    ------
    ValueError
        If the folder holds results of other settings or sentences, or an argument is not as described.
    FileNotFoundError
        If a corpus or the word vectors are not there.
    ModuleNotFoundError
        If matplotlib is not installed.
    KeyboardInterrupt
        On Ctrl-C. What was finished is on disk.

    Examples
    --------
    Few short sentences for one step:

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = [f"{label}\t{label} is a short sentence {i}" for i in range(10) for label in ("this", "that")]
    ...     _ = Path(folder, "sentences.tsv").write_text("\n".join(rows))
    ...     settings = UnfoldedSettings.small(
    ...         corpora=(f"{folder}/sentences.tsv",), n_sentences=20, n_features=4, n_layers=2, n_shown=2, n_steps=1,
    ...         learning_rates=(0.01,), alphas=(0.01,), depths=(2,), noises=(0.0,), aim_tokens=5, aim_iterations=2,
    ...     )
    ...     report = run_unfolded(folder, settings, n_seeds=1, quiet=True)
    >>> max(row["share"] for row in report["descent"] if row["guaranteed"])  # sentences whose energy rose
    0.0
    """
    settings = UnfoldedSettings() if settings is None else settings
    check_device(settings.device, torch.device("cpu"))
    path = report_path(folder, FILE, n_seeds)
    corpora = [load_corpus(source, settings) for source in settings.corpora]
    report = begin_report(path, _fresh(settings, corpora), _PARTS)
    units = list(_units(settings, corpora, n_seeds))
    run_units(path, report, units, quiet=quiet)
    report["summaries"] = summarise(report)
    return finish_report(path, report, draw_figures)


def _fresh(settings: UnfoldedSettings, corpora: list[Corpus]) -> dict[str, Any]:
    """The report of no run."""
    data = [
        {
            "name": corpus.name,
            "classes": corpus.classes,
            "n_sentences": len(corpus.labels),
            "n_features": corpus.tokens.shape[2],
            "sha256": corpus.sha256,
        }
        for corpus in corpora
    ]
    return new_report(settings, {"corpora_read": data}, _PARTS, remark=remark(settings))


def _units(settings: UnfoldedSettings, corpora: list[Corpus], n_seeds: int) -> Iterator[Unit]:
    """All that is to be run, one seed after the other."""
    for seed in range(n_seeds):
        key: dict[str, Any] = {"seed": seed}
        yield Unit("aim", f"seed {seed}: quadratics", key, partial(_quadratics, settings, seed))
        for corpus in corpora:
            key = {"seed": seed, "corpus": corpus.name}
            yield Unit(
                "descent",
                f"seed {seed}, {corpus.name}: energies",
                key,
                partial(measure_descent, corpus, settings, seed),
            )
            for method in METHODS:
                yield Unit(
                    "classification",
                    f"seed {seed}, {corpus.name}: {method.name}",
                    key | {"method": method.name},
                    partial(_classification, corpus, method, settings, seed),
                )


def _quadratics(settings: UnfoldedSettings, seed: int) -> list[dict[str, Any]]:
    report = compare_steps(settings.aim_tokens, settings.aim_features, settings.aim_iterations, seed)
    return report["runs"]


def _classification(corpus: Corpus, method: Method, settings: UnfoldedSettings, seed: int) -> list[dict[str, Any]]:
    return [classify(corpus, method, settings, seed)]

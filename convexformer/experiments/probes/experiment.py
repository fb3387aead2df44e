"""The experiment on probes: every method on every data set and budget of labels, for several splits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from convexformer.experiments.common import Unit, begin_report, finish_report, new_report, report_path, run_units

from .data import ProbeData, Split, load_all
from .figures import draw_figures
from .methods import Method, methods_of, quietly
from .report import packed, remark, summarise
from .settings import ProbesSettings

FILE = "probes.json"
_PARTS = ("splits", "results")


def run_probes(
    folder: str | os.PathLike[str],
    settings: ProbesSettings | None = None,
    *,
    n_seeds: int = 3,
    quiet: bool = False,
) -> dict[str, Any]:
    """Compare certified probes with probes that are in use, for several splits and budgets of labels, and draw.

    What is finished is on disk at once; a later call with the same settings goes on with what is missing.

    Parameters
    ----------
    folder : path-like
        Where ``probes.json``, the figures and the activations of texts go; made when absent.
    settings : ProbesSettings, optional
        Default: the full setting, hours on two cores.
    n_seeds : int, default=3
        Seeds 0, 1, ..., each of which has a split of its own.
    quiet : bool, default=False
        Whether to hide the progress bar.

    Returns
    -------
    dict
        What the JSON file holds: ``settings``, ``data``, ``versions``, ``threads``, ``splits`` with the test samples of
        each seed, ``results`` with a row for each method, budget, data set and seed, ``summaries`` over seeds,
        ``remark`` and ``figures``.

    Raises
    ------
    ValueError
        If the folder holds results of other settings or samples, or an argument is not as described.
    FileNotFoundError
        If a file of a data set is not there.
    ModuleNotFoundError
        If matplotlib, or the package of a data set that was asked for, is not installed.
    KeyboardInterrupt
        On Ctrl-C. What was finished is on disk.

    Examples
    --------
    Few samples of noise and next to no training:

    >>> import tempfile
    >>> rng = np.random.default_rng(0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/bags.npz", X=rng.normal(size=(40, 3, 2)), y=np.arange(40) % 2)
    ...     settings = ProbesSettings.small(
    ...         datasets=(f"{folder}/bags.npz",), n_samples=40, budgets=(20,), learning_rates=(0.01,),
    ...         weight_decays=(0.01,), n_epochs=1, least_steps=1, n_alphas=2, generated=1, queries=(2,),
    ...     )
    ...     report = run_probes(folder, settings, n_seeds=1, quiet=True)
    >>> gaps = [row["relative_gap"] for row in report["results"] if row["relative_gap"] is not None]
    >>> len(gaps), max(gaps) <= settings.tol
    (9, True)
    """
    settings = ProbesSettings() if settings is None else settings
    path = report_path(folder, FILE, n_seeds)
    data, left_out = load_all(settings, path.parent / "activations")
    report = begin_report(path, _fresh(settings, data), _PARTS)
    report["left_out"] = left_out
    run_units(path, report, list(_units(settings, data, n_seeds)), quiet=quiet)
    report["summaries"] = summarise(report)
    report["remark"] = remark(report)
    return finish_report(path, report, draw_figures)


def _fresh(settings: ProbesSettings, data: list[ProbeData]) -> dict[str, Any]:
    """The report of no run."""
    found = [
        {
            "name": one.name,
            "classes": one.classes,
            "n_samples": len(one.labels),
            "n_features": one.samples[0].shape[1],
            "longest": max(map(len, one.samples)),
            "sha256": one.sha256,
        }
        for one in data
    ]
    return new_report(settings, {"datasets_read": found}, _PARTS)


def _units(settings: ProbesSettings, data: list[ProbeData], n_seeds: int) -> Iterator[Unit]:
    """All that is to be run, one seed after the other."""

    @lru_cache(maxsize=1)  # the methods of a split come one after the other
    def split_of(number: int, size: int | None, seed: int) -> Split:
        return data[number].split(size, seed, settings)

    for seed in range(n_seeds):
        for number, one in enumerate(data):
            key: dict[str, Any] = {"data": one.name, "seed": seed}
            yield Unit("splits", f"seed {seed}, {one.name}: split", key, partial(_test_samples, one, seed, settings))
            for size in one.training_sizes(settings):
                for method in methods_of(one, size, settings):
                    own = key | {"budget": size, "method": method.name}
                    title = f"seed {seed}, {one.name}, {size or 'all'} labels: {method.name}"
                    split = partial(split_of, number, size, seed)
                    yield Unit("results", title, own, partial(_measured, own, method, split, settings))


def _test_samples(data: ProbeData, seed: int, settings: ProbesSettings) -> list[dict[str, Any]]:
    test = np.zeros(len(data.labels), dtype=bool)
    test[data.test_index(seed, settings)] = True
    return [{"data": data.name, "seed": seed, "test": packed(test)}]


def _measured(
    key: dict[str, Any], method: Method, split_of: Callable[[], Split], settings: ProbesSettings
) -> list[dict[str, Any]]:
    """Search with a method and measure what it chose on the test samples."""
    split = split_of()
    begin = time.perf_counter()
    found = quietly(lambda: method.search(split, settings, key["seed"]))
    seconds = time.perf_counter() - begin
    probabilities = found.predict(split.test)
    hits = probabilities.argmax(1) == split.test.labels
    row = {
        "n_labels": len(split.fit.labels) + len(split.validation.labels),
        "accuracy": float(hits.mean()),
        "auroc": area_under_curves(split.test.labels, probabilities),
        "validation_loss": found.loss,
        "seconds": seconds,
        **{name: found.numbers.get(name) for name in ("relative_gap", "n_heads", "n_weightings", "n_dictionary")},
        "chosen": found.chosen,
        "hits": packed(hits),
    }
    return [key | row]


def area_under_curves(labels: NDArray[np.int64], probabilities: NDArray[np.floating]) -> float:
    """Area under the curve of true against false positives; the mean over classes, each against the rest.

    Parameters
    ----------
    labels : ndarray of int of shape (N,)
        The classes.
    probabilities : ndarray of shape (N, n_classes)
        Of two classes the area is the same for either.

    Returns
    -------
    float

    Examples
    --------
    >>> area_under_curves(np.array([0, 1, 1]), np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]))
    1.0
    """
    present = np.unique(labels)
    return float(np.mean([roc_auc_score(labels == label, probabilities[:, label]) for label in present]))

"""Descent-constrained training on text ([K], section 5): accuracy under noise, layers' losses, early exit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from scipy.integrate import trapezoid
from torch import Tensor

from convexformer.constrained import NonFiniteLossError, exit_curve, exit_tradeoff
from convexformer.experiments.common import Unit, begin_report, finish_report, new_report, report_path, run_units
from convexformer.experiments.corpora import Corpus, deviation_of, load_corpus, with_noise
from convexformer.unfolded import padding_mask
from convexformer.validation import check_device

from .common import METHODS, PARTS, Method, Task, search, train_once
from .text_figures import draw_figures
from .text_models import Encoder, encoder_task, find_encoder, states_of, unrolled_task
from .text_report import remark, summarise
from .text_settings import ConstrainedTextSettings

FILE = "constrained_text.json"
ENCODER = "frozen encoder"
_TEST_SEED = 10**6  # seeds of training and validation are far below


Inputs = tuple[Tensor, ...]
Prepared = tuple[Task, list[Inputs], Tensor]


class _Cell(NamedTuple):
    """What is trained by all methods: a model on a corpus with a noise, for a seed."""

    corpus: Corpus
    depth: int | None  # None: the encoder
    noise: float
    seed: int

    @property
    def model(self) -> str:
        return ENCODER if self.depth is None else f"UT, {self.depth} layers"

    @property
    def key(self) -> dict[str, Any]:
        return {"corpus": self.corpus.name, "model": self.model, "noise": self.noise, "seed": self.seed}


def run_constrained_text(
    folder: str | os.PathLike[str],
    settings: ConstrainedTextSettings | None = None,
    *,
    n_seeds: int = 3,
    quiet: bool = False,
) -> dict[str, Any]:
    r"""Train models of text under descent constraints and without, for several seeds, and draw.

    Every seed draws a split, initial weights, noise and the order of sentences. What is finished is on disk at once; a
    later call with the same settings goes on with what is missing.

    Parameters
    ----------
    folder : path-like
        Where ``constrained_text.json`` and the figures go; made when absent.
    settings : ConstrainedTextSettings, optional
        Default: the full setting, hours on two cores.
    n_seeds : int, default=3
        Seeds 0, 1, ...
    quiet : bool, default=False
        Whether to hide the progress bar.

    Returns
    -------
    dict
        What the JSON file holds: ``settings``, ``data``, ``remark``, ``skipped``, ``versions``, ``runs`` of each seed,
        ``ablation``, ``summaries`` over seeds, ``differences`` between methods, and ``figures``. Of a run whose losses
        became infinite with all options, it holds that message, ``diverged``, in place of numbers.

    Raises
    ------
    ValueError
        If the folder holds results of other settings or sentences, or an argument is not as described.
    FileNotFoundError, ModuleNotFoundError
        If a corpus, word vectors, the encoder or matplotlib is not there.
    KeyboardInterrupt
        On Ctrl-C. What was finished is on disk.

    Examples
    --------
    Few short sentences for one epoch:

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = [f"{label}\t{label} is a short sentence {i}" for i in range(10) for label in ("this", "that")]
    ...     _ = Path(folder, "sentences.tsv").write_text("\n".join(rows))
    ...     settings = ConstrainedTextSettings.small(
    ...         corpora=(f"{folder}/sentences.tsv",), n_sentences=20, n_features=4, depths=(2,), train_noises=(0.0,),
    ...         n_epochs=1, ablation_alphas=(0.1,), ablation_prices=(None,),
    ...     )
    ...     report = run_constrained_text(folder, settings, n_seeds=1, quiet=True)
    >>> [row["method"] for row in report["runs"]]
    ['constrained', 'unconstrained', 'deep supervision']
    """
    settings = ConstrainedTextSettings() if settings is None else settings
    check_device(settings.device, torch.device("cpu"))
    path = report_path(folder, FILE, n_seeds)
    corpora = [load_corpus(source, settings) for source in settings.corpora]
    encoder, missing = find_encoder(settings)
    report = begin_report(path, _fresh(settings, corpora, encoder, missing), PARTS)
    units = list(_units(settings, corpora, encoder, n_seeds))
    run_units(path, report, units, quiet=quiet)
    report |= summarise(report["runs"])
    return finish_report(path, report, draw_figures)


def _fresh(
    settings: ConstrainedTextSettings, corpora: list[Corpus], encoder: Encoder | None, missing: str | None
) -> dict[str, Any]:
    """The report of no run."""
    # The default encoder never changes.
    chosen = {} if encoder is None or settings.encoder is None else {"encoder_fingerprint": encoder.fingerprint()}
    data = [
        {"name": corpus.name, "classes": corpus.classes, "n_sentences": len(corpus.labels), "sha256": corpus.sha256}
        for corpus in corpora
    ]
    skipped = [] if missing is None else [missing]
    return new_report(settings, {"corpora_read": data, **chosen}, PARTS, remark=remark(settings), skipped=skipped)


def _units(
    settings: ConstrainedTextSettings, corpora: list[Corpus], encoder: Encoder | None, n_seeds: int
) -> Iterator[Unit]:
    """All that is to be run: the ablation, then one seed after the other."""

    @lru_cache(maxsize=1)  # the methods follow one another on a cell, and an encoder is slow
    def prepared(cell: _Cell) -> Prepared:
        return _prepared(cell, settings, encoder)

    middle = settings.train_noises[len(settings.train_noises) // 2]
    first = _Cell(corpora[0], min(settings.depths), middle, 0)
    for alpha, price in product(settings.ablation_alphas, settings.ablation_prices):
        key = {"alpha": alpha, "price": price}
        title = f"ablation, alpha {alpha:g}, " + ("no slacks" if price is None else f"price of slacks {price:g}")
        yield Unit("ablation", title, key, partial(_ablate, first, settings, prepared, alpha, price))
    depths = [*settings.depths, *([] if encoder is None else [None])]
    for seed, corpus, depth, noise in product(range(n_seeds), corpora, depths, settings.train_noises):
        cell = _Cell(corpus, depth, noise, seed)
        for method in METHODS:
            key = cell.key | {"method": method.name}
            title = f"seed {seed}, {corpus.name}, {cell.model}, noise {noise:g}: {method.name}"
            yield Unit("runs", title, key, partial(_run, cell, method, settings, prepared))


def _run(
    cell: _Cell, method: Method, settings: ConstrainedTextSettings, prepared: Callable[[_Cell], Prepared]
) -> list[dict[str, Any]]:
    """Search, and measure the best run."""
    task, tests, labels = prepared(cell)
    row = cell.key | {"method": method.name}
    try:
        trained = search(task, method, settings.search, cell.seed)
    except NonFiniteLossError as error:
        return [row | {"diverged": str(error)}]
    return [row | trained.as_json() | _measured(trained.trainer.model, tests, labels, settings)]


def _ablate(
    cell: _Cell,
    settings: ConstrainedTextSettings,
    prepared: Callable[[_Cell], Prepared],
    alpha: float,
    price: float | None,
) -> list[dict[str, Any]]:
    """One constrained run of the ablation, with the last of the learning rates."""
    task, tests, labels = prepared(cell)
    pair = (settings.learning_rates[-1], alpha)
    row: dict[str, Any] = {"alpha": alpha, "price": price}
    try:
        trainer = train_once(task, METHODS[0], pair, cell.seed, resilience=price)
    except NonFiniteLossError as error:
        return [row | {"diverged": str(error)}]
    row |= {"feasible": trainer.feasible_, "layer_losses": trainer.report_.losses.tolist()}
    return [row | _measured(trainer.model, tests, labels, settings)]


def _prepared(cell: _Cell, settings: ConstrainedTextSettings, encoder: Encoder | None) -> Prepared:
    """The task, the inputs of the model at each test noise, and the labels of the test sentences."""
    parts = [part.to(settings.device) for part in cell.corpus.split(cell.seed)]
    training, validation, test = parts
    if cell.depth is not None:
        present, deviation = padding_mask(test.tokens), deviation_of(training.tokens)
        tests: list[Inputs] = [
            (with_noise(test.tokens, present, noise * deviation, _test_noise(cell.seed)), present)
            for noise in settings.test_noises
        ]
        return unrolled_task(parts, cell.depth, cell.noise, settings), tests, test.labels
    assert encoder is not None
    index = cell.corpus.split_index(cell.seed)
    copies = settings.noise_copies if cell.noise else 1
    # Seeds of the noise: those of the copies, then that of validation.
    seeds = [1 + cell.seed * (copies + 1) + copy for copy in range(copies + 1)]
    states = [states_of(encoder, cell.corpus, index[0], cell.noise, seed, settings) for seed in seeds[:-1]]
    held_out = states_of(encoder, cell.corpus, index[1], cell.noise, seeds[-1], settings)
    y = torch.cat([training.y.cpu()] * copies)
    task = encoder_task((torch.cat(states), held_out), (y, validation.y.cpu()), settings)
    tests = [
        (states_of(encoder, cell.corpus, index[2], noise, _TEST_SEED + cell.seed, settings),)
        for noise in settings.test_noises
    ]
    return task, tests, test.labels.cpu()


def _test_noise(seed: int) -> torch.Generator:
    """Of noise on test sentences, which training and validation do not draw."""
    return torch.Generator().manual_seed(_TEST_SEED + seed)


@torch.no_grad()
def _measured(model: Any, tests: list[Inputs], labels: Tensor, settings: ConstrainedTextSettings) -> dict[str, Any]:
    """Accuracies by noise and their area, by layer without noise, and when sentences leave early."""
    model.eval()
    outputs = [model.layer_outputs(*inputs).cpu() for inputs in tests]
    targets = labels.cpu()
    accuracies = [float((scores[-1].argmax(1) == targets).double().mean()) for scores in outputs]
    tradeoff = exit_tradeoff(outputs[0], targets, settings.thresholds)
    return {
        "accuracies": accuracies,
        "area": float(trapezoid(accuracies, settings.test_noises)),
        "by_layer": [float(value) for value in exit_curve(outputs[0], targets)],
        "exit_layers": [float(value) for value in tradeoff.layers],
        "exit_accuracies": [float(value) for value in tradeoff.accuracy],
    }

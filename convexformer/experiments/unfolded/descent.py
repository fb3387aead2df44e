"""Energies of sentences layer by layer ([U] Figs 5 and 6), with and without an anchor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from convexformer.experiments.common import medians
from convexformer.experiments.corpora import Corpus
from convexformer.nn import train
from convexformer.unfolded import UnfoldedNetwork, UnfoldedTransformer, descent_report, padding_mask

from .settings import UnfoldedSettings
from .variants import VARIANTS

WEIGHTS = ("Xavier", "trained")
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def measure_descent(corpus: Corpus, settings: UnfoldedSettings, seed: int) -> list[dict[str, Any]]:
    """Energies of test sentences in all kinds of layers, under initial and under trained weights.

    The weights are those of one network: its initial ones, drawn as by Xavier, and those after training it with layers
    of eq. (20) to classify the sentences, which are left out where that diverged.

    Parameters
    ----------
    corpus : Corpus
        The sentences.
    settings : UnfoldedSettings
        Sizes, and the training.
    seed : int
        Of the split and the weights.

    Returns
    -------
    list of dict
        For each of the weights, without and with an anchor, and each kind of layer: ``share`` of the sentences whose
        energy rises in any layer, ``rises`` per layer, ``guaranteed``, and ``quantiles`` of the energies after each
        layer relative to that after the first.
    """
    training, _, test = (part.to(settings.device) for part in corpus.split(seed))
    tokens = test.tokens[: settings.n_shown]
    rows = []
    for weights, source in _sources(training, settings, seed).items():
        for anchored in (False, True):
            for variant in VARIANTS:
                network = variant.transformer(source, anchored=anchored, step=settings.step)
                report = descent_report(network, tokens, padding_mask(tokens))
                rows.append(
                    {
                        "corpus": corpus.name,
                        "seed": seed,
                        "weights": weights,
                        "anchored": anchored,
                        "variant": variant.name,
                        "share": report.share,
                        "rises": report.rose.sum(1).tolist(),
                        "guaranteed": report.guaranteed and variant.mutant is None,
                        "quantiles": _relative_quantiles(report.course[1:]),
                    }
                )
    return rows


def _sources(training: Any, settings: UnfoldedSettings, seed: int) -> dict[str, UnfoldedTransformer]:
    """Transformers with initial weights and, unless training diverges, with trained ones."""
    _, n_tokens, n_features = training.tokens.shape
    network = UnfoldedNetwork(
        n_tokens, n_features, training.y.shape[1], n_layers=settings.n_layers, mode="aim", seed=seed
    ).to(settings.device)
    initial = UnfoldedTransformer(n_features, settings.n_layers, "aim").to(settings.device)
    initial.load_state_dict(network.transformer.state_dict())
    history = train(
        network,
        training.tokens,
        training.y,
        loss="softmax",
        alpha=0.0,
        lr=settings.learning_rates[-1],
        n_steps=settings.n_steps,
        look_every=settings.look_every,
        batch_size=min(settings.batch_size, len(training.y)),
        seed=seed,
    )
    found = dict(zip(WEIGHTS, (initial, network.transformer), strict=True))
    return {WEIGHTS[0]: initial} if history.diverged else found


def _relative_quantiles(course: NDArray[np.float64]) -> list[list[float]]:
    """Quantiles over sentences of the energies, less that after the first layer and in units of its size."""
    relative = (course - course[:1]) / np.abs(course[:1])
    return np.quantile(relative, QUANTILES, axis=1).T.tolist()


def summarise_descent(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Share of sentences with a rise over seeds, for each kind of layer.

    Parameters
    ----------
    rows : list of dict
        Those of all seeds, as ``measure_descent`` returns them.

    Returns
    -------
    list of dict
        With ``share``, its median, and ``share_range``.
    """
    keys = ("corpus", "weights", "anchored", "variant", "guaranteed")
    return medians([{name: row[name] for name in (*keys, "share")} for row in rows], keys, ("share",))

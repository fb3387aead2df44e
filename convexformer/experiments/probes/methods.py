"""Probes of frozen tokens, each with a search on the same validation part."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from torch import Tensor, nn

from convexformer import ConvexProbeClassifier
from convexformer.nn import AttentionNetwork, AttentiveProbe, ProbeNetwork, train
from convexformer.preprocessing import MaxPooling, MeanPooling, QueryPooling
from convexformer.preprocessing.dictionary import default_dictionary
from convexformer.probes import Generation
from convexformer_solvers import alpha_grid, get_solver, iterate_path

from .data import Part, ProbeData, Split
from .networks import GatedAttentionPooling
from .settings import ProbesSettings

MAJORITY = "majority class"
MEAN = "mean, logistic regression"
FIRST = "first token, logistic regression"
LARGEST = "maximum, logistic regression"
ATTENTIVE = "attentive probe, 8 queries"
CERTIFIED_MEAN = "certified, mean"
CERTIFIED = "certified, automatic dictionary"
_CHUNK = 256  # samples that a network reads at once


class Found(NamedTuple):
    """What a search chose.

    Attributes
    ----------
    predict : callable
        From a part to probabilities of shape (N, n_classes).
    loss : float
        Log loss on the validation part.
    numbers : dict
        What tables show besides: ``relative_gap``, ``n_heads``, ``n_weightings`` and ``n_dictionary``.
    chosen : dict
        What was chosen, or only that training ``diverged`` with all pairs.
    """

    predict: Callable[[Part], NDArray[np.floating]]
    loss: float
    numbers: dict[str, Any]
    chosen: dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A probe with its search.

    Attributes
    ----------
    name : str
        What tables and figures call it.
    search : callable
        From a split, the settings and a seed to what was chosen.
    applies : callable
        From a data set and a number of labels, None for all, to whether it has this method.
    """

    name: str
    search: Callable[[Split, ProbesSettings, int], Found]
    applies: Callable[[ProbeData, int | None], bool] = lambda data, size: True


def methods_of(data: ProbeData, size: int | None, settings: ProbesSettings) -> list[Method]:
    """The methods that a data set has for a number of labels, None for all.

    Examples
    --------
    >>> data = ProbeData("digits", [], np.array([]), ["0", "1"], has_first=False, sha256="")
    >>> names = [method.name for method in methods_of(data, None, ProbesSettings(queries=(16,)))]
    >>> names[0], names[-1], any("first" in name for name in names)
    ('majority class', 'certified, mean and 16 queries', False)
    """
    return [method for method in [*_METHODS, *_ablation(settings)] if method.applies(data, size)]


def quietly(search: Callable[[], Found]) -> Found:
    """Run a search without warnings of solvers that ended early: logistic regression, and gaps that tables show."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return search()


def validation_loss(probabilities: NDArray[np.floating], part: Part) -> float:
    """Log loss on a part."""
    return float(log_loss(part.labels, probabilities, labels=np.arange(probabilities.shape[1])))


def _aligned(probabilities: NDArray, classes: NDArray, n_classes: int) -> NDArray:
    """Columns for all classes, those that were not seen to fit among them, each row with sum one."""
    whole = np.full((len(probabilities), n_classes), np.finfo(np.float32).eps)
    whole[:, classes] += probabilities
    return whole / whole.sum(1, keepdims=True)


# Without learning of the tokens' weights


def _majority(split: Split, settings: ProbesSettings, seed: int) -> Found:
    shares = np.bincount(split.fit.labels, minlength=split.n_classes)[None] / len(split.fit.labels)

    def predict(part: Part) -> NDArray:
        return np.repeat(_aligned(shares, np.arange(split.n_classes), split.n_classes), len(part.labels), axis=0)

    return Found(predict, validation_loss(predict(split.validation), split.validation), {}, {})


def _mean(part: Part) -> Tensor:
    return part.tokens.sum(1) / part.mask.sum(1, keepdim=True)


def _first(part: Part) -> Tensor:
    return part.tokens[:, 0]


def _largest(part: Part) -> Tensor:
    return part.tokens.masked_fill(~part.mask[..., None], -math.inf).amax(1)


def _regression(pool: Callable[[Part], Tensor], split: Split, settings: ProbesSettings, seed: int) -> Found:
    """Logistic regression on one pooled token."""
    fit, validation = (pool(part).numpy() for part in (split.fit, split.validation))
    found: list[Found] = []
    for inverse in settings.inverse_decays:
        model = LogisticRegression(C=inverse, max_iter=1000).fit(fit, split.fit.labels)

        def predict_rows(rows: NDArray, model: LogisticRegression = model) -> NDArray:
            return _aligned(model.predict_proba(rows), model.classes_, split.n_classes)

        def predict(part: Part, of_rows: Callable[[NDArray], NDArray] = predict_rows) -> NDArray:
            return of_rows(pool(part).numpy())

        loss = validation_loss(predict_rows(validation), split.validation)
        found.append(Found(predict, loss, {}, {"C": inverse}))
    return min(found, key=lambda one: one.loss)


# Trained by gradients


def _trained(
    make: Callable[[int, int, int], AttentionNetwork], split: Split, settings: ProbesSettings, seed: int
) -> Found:
    """A network by AdamW, with the weights of least validation loss of all pairs of learning rate and decay."""
    fit, validation = split.fit, split.validation
    network = make(fit.tokens.shape[2], split.n_classes, seed)
    batch = min(settings.batch_size, len(fit.labels))
    n_steps = max(settings.least_steps, settings.n_epochs * math.ceil(len(fit.labels) / batch))
    one_hot = torch.eye(split.n_classes)
    history = train(
        network,
        fit.samples,
        one_hot[fit.labels],
        loss="softmax",
        alpha=0.0,
        optimizer="adamw",
        lr=settings.learning_rates,
        weight_decay=settings.weight_decays,
        n_steps=n_steps,
        look_every=max(1, n_steps // settings.n_looks),
        batch_size=batch,
        validation=(validation.samples, one_hot[validation.labels]),
        patience=settings.patience,
        seed=seed,
    )

    def predict(part: Part) -> NDArray:
        return torch.softmax(_in_chunks(network, part).double(), 1).numpy()

    chosen = {"learning_rate": history.lr, "weight_decay": history.weight_decay, "steps": history.kept_step}
    if history.diverged:
        chosen = {"diverged": True}
    return Found(predict, validation_loss(predict(validation), validation), {}, chosen)


@torch.no_grad()
def _in_chunks(network: nn.Module, part: Part) -> Tensor:
    """Scores of the samples of a part, a few at a time."""
    starts = range(0, len(part.labels), _CHUNK)
    return torch.cat([network(*(array[i : i + _CHUNK] for array in part.samples)) for i in starts])


def _attentive(n_queries: int, n_features: int, n_outputs: int, seed: int) -> AttentionNetwork:
    """With readouts that begin at zero: random ones make the first scores noise, which few labels do not unlearn."""
    probe = AttentiveProbe(n_features, n_outputs, n_queries, seed=seed)
    nn.init.zeros_(probe.outputs)
    return probe


def _gated(n_features: int, n_outputs: int, seed: int) -> AttentionNetwork:
    pooling = GatedAttentionPooling(n_features, n_outputs, seed=seed)
    nn.init.zeros_(pooling.readout.weight)
    return pooling


# Certified


def _probabilities(scores: NDArray | Tensor, classes: NDArray, n_classes: int) -> NDArray:
    """Of scores of a classifier: one column is that of the second of two classes."""
    columns = torch.as_tensor(scores).double()
    if columns.shape[1] == 1:
        columns = torch.cat([torch.zeros_like(columns), columns], 1)
    return _aligned(torch.softmax(columns, 1).numpy(), classes, n_classes)


class _Point(NamedTuple):
    """A solution of a path that is chosen by its validation loss."""

    loss: float
    alpha: float
    result: Any


def _certified(dictionary: Any, penalty: str, split: Split, settings: ProbesSettings, seed: int) -> Found:
    """A path of alphas on one dictionary, which ends where the validation loss no longer falls."""
    # Any alpha this large gives the zero solution, and with it the dictionary and its pooled tokens.
    model = _probe(dictionary, penalty, settings, seed, alpha=1 / torch.finfo(torch.float32).eps)
    model.fit(split.fit.samples, split.fit.labels)
    pooled_fit, pooled_validation = (
        torch.as_tensor(model.pool(part.samples)) for part in (split.fit, split.validation)
    )
    program = model.heads_.program(pooled_fit, split.fit.labels)
    # The first, alpha_max, gives the constant model and is left out.
    grid = alpha_grid(float(program.alpha_max), settings.n_alphas + 1, settings.eps)[1:]
    best = _best_of_path(
        iterate_path(program, get_solver("auto"), grid, tol=settings.tol),
        grid,
        lambda result: validation_loss(
            _probabilities(
                pooled_validation.flatten(1) @ result.coef.flatten(0, 1) + result.intercept,
                model.classes_,
                split.n_classes,
            ),
            split.validation,
        ),
        settings.path_patience,
    )
    coef, bias = best.result.coef, best.result.intercept
    network = ProbeNetwork(model.pooler_, coef, bias)
    numbers = {
        "relative_gap": float(best.result.certificate.relative_gap),
        "n_heads": len(model.heads_.with_coef(coef, bias)),
        "n_weightings": int(coef.flatten(1).any(1).sum()),
        "n_dictionary": len(coef),
    }

    def predict(part: Part) -> NDArray:
        return _probabilities(_in_chunks(network, part), model.classes_, split.n_classes)

    return Found(predict, best.loss, numbers, {"alpha": best.alpha, "alpha_max": float(program.alpha_max)})


def _best_of_path(results: Iterable[Any], grid: list[float], loss_of: Callable[[Any], float], patience: int) -> _Point:
    best, worse = _Point(math.inf, math.nan, None), 0
    for alpha, result in zip(grid, results, strict=False):
        point = _Point(loss_of(result), alpha, result)
        best, worse = (point, 0) if point.loss < best.loss else (best, worse + 1)
        if worse >= patience:
            break
    return best


def _generated(dictionary: Any, split: Split, settings: ProbesSettings, seed: int) -> Found:
    """A dictionary with generated weightings, around the alpha that the dictionary alone would have."""
    alone = _certified(dictionary, "group_l2", split, settings, seed)
    generation = Generation(
        max_new=settings.generated,
        per_round=min(settings.generated_at_once, settings.generated),
        n_samples=settings.generation_samples,
        n_steps=settings.generation_steps,
    )
    found: list[Found] = []
    for factor in settings.generation_factors:
        alpha = factor * alone.chosen["alpha"]
        model = _probe(dictionary, "group_l2", settings, seed, alpha=alpha, generate=generation)
        model.fit(split.fit.samples, split.fit.labels)

        def predict(part: Part, model: ConvexProbeClassifier = model) -> NDArray:
            return _aligned(model.predict_proba(part.samples), model.classes_, split.n_classes)

        numbers = {
            "relative_gap": float(model.certificate_.relative_gap),
            "n_heads": len(model.heads_),
            "n_weightings": int(np.count_nonzero(model.weighting_norms_)),
            "n_dictionary": len(model.weighting_norms_),
        }
        loss = validation_loss(predict(split.validation), split.validation)
        found.append(Found(predict, loss, numbers, {"alpha": alpha}))
    return min(found, key=lambda one: one.loss)


def _probe(dictionary: Any, penalty: str, settings: ProbesSettings, seed: int, **options: Any) -> ConvexProbeClassifier:
    return ConvexProbeClassifier(dictionary=dictionary, penalty=penalty, tol=settings.tol, random_state=seed, **options)


def _ablation(settings: ProbesSettings) -> list[Method]:
    """Dictionaries of the mean and some queries."""
    return [
        Method(
            f"certified, mean and {count} queries",
            partial(_certified, [MeanPooling(), QueryPooling(count)], "group_l2"),
            lambda data, size: size is None,
        )
        for count in settings.queries
    ]


_METHODS = (
    Method(MAJORITY, _majority),
    Method(MEAN, partial(_regression, _mean)),
    Method(FIRST, partial(_regression, _first), lambda data, size: data.has_first),
    Method(LARGEST, partial(_regression, _largest)),
    Method("attentive probe, 1 query", partial(_trained, partial(_attentive, 1))),
    Method(ATTENTIVE, partial(_trained, partial(_attentive, 8))),
    Method("gated attention pooling (ABMIL)", partial(_trained, _gated)),
    Method(CERTIFIED_MEAN, partial(_certified, [MeanPooling()], "group_l2")),
    Method(CERTIFIED, partial(_certified, "auto", "group_l2")),
    Method(f"{CERTIFIED} and maximum", partial(_certified, [default_dictionary(longest=2), MaxPooling()], "group_l2")),
    Method(f"{CERTIFIED}, nuclear", partial(_certified, "auto", "nuclear"), lambda data, size: len(data.classes) > 2),
    Method("certified, mean and generated", partial(_generated, [MeanPooling()])),
)

"""Text classification by unfolded layers, beside a standard transformer of equal size and equal search."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from convexformer.experiments.corpora import Corpus, Part, deviation_of, with_noise
from convexformer.heads import optimality_gap
from convexformer.nn import train
from convexformer.nn.modules.base import seeded
from convexformer.unfolded import UnfoldedNetwork

from .settings import UnfoldedSettings

STANDARD = "standard transformer, one layer"
LOOPED = "standard transformer, looped"
N_HEADS = 32  # of the readouts, for all networks alike


class StandardEncoder(nn.Module):
    """Pre-norm softmax transformer between two linear maps, of a number of parameters that is asked for.

    Parameters
    ----------
    n_features : int
        Width of the data.
    n_parameters : int
        Parameters to come nearest to: the width is chosen for it.
    seed : int
        Of the initial weights.
    n_passes : int, default=1
        How often tokens go through the layer, whose weights are then shared, as in the unfolded networks.

    Examples
    --------
    >>> encoder = StandardEncoder(50, 5000, seed=0)
    >>> sum(weight.numel() for weight in encoder.parameters())
    4694
    >>> encoder(torch.zeros(2, 3, 50), torch.ones(2, 3, dtype=torch.bool)).shape
    torch.Size([2, 3, 50])
    """

    def __init__(self, n_features: int, n_parameters: int, seed: int, n_passes: int = 1) -> None:
        super().__init__()
        self.n_passes = n_passes
        # Two maps n_features x w with bias, attention 4 w^2 + 4 w, feed-forward of hidden width 2 w, three norms.
        sizes = {w: 2 * n_features * w + w + n_features + 8 * w**2 + 13 * w for w in range(2, 2 * n_features, 2)}
        width = min(sizes, key=lambda w: abs(sizes[w] - n_parameters))
        with seeded(seed):
            self.enter = nn.Linear(n_features, width)
            self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            self.norm = nn.LayerNorm(width)
            self.leave = nn.Linear(width, n_features)

    def forward(self, tokens: Tensor, present: Tensor | None = None, *, n_layers: int | None = None) -> Tensor:
        """Tokens after the passes; padding comes out as zero rows."""
        hidden, hidden_padding = self.enter(tokens), None if present is None else ~present
        for _ in range(self.n_passes):
            hidden = self.layer(hidden, src_key_padding_mask=hidden_padding)
        out: Tensor = self.leave(self.norm(hidden))
        return out if present is None else out * present[..., None]


@dataclass(frozen=True)
class Method:
    """A network to be trained.

    Attributes
    ----------
    name : str
        What tables and figures call it.
    make : callable
        From an input of shape ``(n_tokens, n_features, n_outputs)``, the layers and a seed to a network.
    deepens : bool
        Whether it may be run with another number of layers than it was trained with.
    """

    name: str
    make: Callable[[tuple[int, int, int], int, int], UnfoldedNetwork]
    deepens: bool


def _unfolded(**options: Any) -> Callable[[tuple[int, int, int], int, int], UnfoldedNetwork]:
    def make(shape: tuple[int, int, int], n_layers: int, seed: int) -> UnfoldedNetwork:
        return UnfoldedNetwork(*shape, n_heads=N_HEADS, n_layers=n_layers, anchored=True, seed=seed, **options)

    return make


def _standard(looped: bool, shape: tuple[int, int, int], n_layers: int, seed: int) -> UnfoldedNetwork:
    """A network with the same readout whose layers are those of a standard transformer."""
    network = _unfolded(mode="aim")(shape, n_layers, seed)
    count = sum(weight.numel() for weight in network.transformer.parameters())
    passes = n_layers if looped else 1
    network.transformer = StandardEncoder(shape[1], count, seed, passes)  # type: ignore[assignment]
    return network


METHODS = (
    Method("unfolded, joint step (guaranteed)", _unfolded(mode="joint"), deepens=True),
    Method("unfolded, alternating, eigenvalues limited", _unfolded(mode="aim"), deepens=True),
    Method("unfolded, alternating, free", _unfolded(mode="aim", eigenvalue_limit=None), deepens=True),
    Method(STANDARD, partial(_standard, False), deepens=False),
    Method(LOOPED, partial(_standard, True), deepens=False),
)


def classify(corpus: Corpus, method: Method, settings: UnfoldedSettings, seed: int) -> dict[str, Any]:
    """Train a network with the best of the learning rates and measure it.

    Parameters
    ----------
    corpus : Corpus
        The sentences.
    method : Method
        The network.
    settings : UnfoldedSettings
        Sizes and search.
    seed : int
        Of the split, the initial weights and the batches.

    Returns
    -------
    dict
        ``accuracy`` on test sentences, ``seconds`` of the search, ``n_parameters``, ``certified_accuracy`` with the
        readout replaced by its certified optimum, and its figures, accuracies by ``depth`` and by ``noise``; of a
        network that diverged with every learning rate, ``diverged`` in place of these.
    """
    training, validation, test = (part.to(settings.device) for part in corpus.split(seed))
    shape = (training.tokens.shape[1], training.tokens.shape[2], training.y.shape[1])
    network = method.make(shape, settings.train_layers, seed).to(settings.device)
    begin = time.perf_counter()
    history = train(
        network,
        training.tokens,
        training.y,
        loss="softmax",
        alpha=0.0,
        optimizer="adamw",
        lr=settings.learning_rates,
        weight_decay=settings.weight_decay,
        n_steps=settings.n_steps,
        look_every=settings.look_every,
        batch_size=min(settings.batch_size, len(training.y)),
        validation=(validation.tokens, validation.y),
        patience=settings.n_steps,  # keeps the best weights by validation without ending early
        seed=seed,
    )
    row = {
        "corpus": corpus.name,
        "method": method.name,
        "seed": seed,
        "n_parameters": sum(weight.numel() for weight in network.parameters()),
        "seconds": time.perf_counter() - begin,
    }
    if history.diverged:
        return row | {"diverged": True}
    row |= {
        "learning_rate": history.lr,
        "accuracy": _accuracy(network, test.tokens, test),
        "validation_loss": history.final_validation,
        "depth": _by_depth(network, test, settings) if method.deepens else None,
        "noise": _by_noise(network, test, settings, seed),
    }
    return row | _certified_readout(network, training, validation, test, settings)


@torch.no_grad()
def _accuracy(network: UnfoldedNetwork, tokens: Tensor, part: Part, n_layers: int | None = None) -> float:
    present = network.prepared(part.tokens)[1]  # noise hides what is padding
    scores = network.readout(network.features(tokens, present, n_layers=n_layers))
    return float((scores.argmax(1) == part.labels).double().mean())


def _by_depth(network: UnfoldedNetwork, test: Part, settings: UnfoldedSettings) -> list[float]:
    """Accuracies with other numbers of layers than in training, under the same readout."""
    return [_accuracy(network, test.tokens, test, n_layers=depth) for depth in settings.depths]


def _by_noise(network: UnfoldedNetwork, test: Part, settings: UnfoldedSettings, seed: int) -> list[float]:
    """Accuracies on noisy tokens."""
    present, deviation = network.prepared(test.tokens)[1], deviation_of(test.tokens)
    noisy = [
        with_noise(test.tokens, present, level * deviation, torch.Generator().manual_seed(seed))
        for level in settings.noises
    ]
    return [_accuracy(network, tokens, test) for tokens in noisy]


def _certified_readout(
    network: UnfoldedNetwork, training: Part, validation: Part, test: Part, settings: UnfoldedSettings
) -> dict[str, Any]:
    """The readout's certified optimum on the tokens of the last layer, with ``alpha`` chosen on validation sentences.

    The objective of the trained readout, which was trained without decay, is taken at the same ``alpha``.
    """
    with torch.no_grad():
        features = [network.features(part.tokens).cpu() for part in (training, validation, test)]
    best: dict[str, Any] = {"certified_validation": -1.0}
    readout = network.readout.cpu()
    for alpha in settings.alphas:
        gap = optimality_gap(readout, features[0], training.y.cpu(), alpha, loss="softmax", tol=1e-3)
        refit = gap.refit.to_torch().to(features[0])
        with torch.no_grad():
            hits = [
                float((refit(x).argmax(1) == part.labels.cpu()).double().mean())
                for x, part in zip(features[1:], (validation, test), strict=True)
            ]
        if hits[0] > best["certified_validation"]:
            best = {
                "certified_validation": hits[0],
                "certified_accuracy": hits[1],
                "alpha": alpha,
                "readout_objective": gap.objective,
                "certified_objective": gap.certificate.primal,
                "certified_bound": gap.bound,
            }
    return best

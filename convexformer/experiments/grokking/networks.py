"""Methods that train a whole network on symbols by AdamW; none of them is convex."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from convexformer.nn import (
    DeepConvexTransformer,
    EmbeddedNetwork,
    EmbeddingMLP,
    SoftmaxTransformer,
    TokenEmbedding,
    train,
)
from convexformer.nn.modules.embedding import SymbolNetwork

from .data import Split
from .settings import GrokkingSettings
from .watch import Watch, network_outputs

Build = Callable[[Split, GrokkingSettings, int], SymbolNetwork]
Trainer = Callable[[Split, GrokkingSettings, int, "tuple[float, float] | None", Watch], "dict[str, Any]"]

UNTUNED = (1e-3, 0.0)


def adamw(build: Build) -> Trainer:
    """Method that trains a network end to end.

    Parameters
    ----------
    build : callable
        From split, settings and seed to the network with its initial weights.

    Returns
    -------
    callable
        As ``Method.train``; without a pair of learning rate and decay it takes that of the untuned row.
    """
    return partial(_train, build)


def _train(
    build: Build,
    split: Split,
    settings: GrokkingSettings,
    seed: int,
    choice: tuple[float, float] | None,
    watch: Watch,
) -> dict[str, Any]:
    network = build(split, settings, seed).to(split.device)
    outputs = network_outputs(network, split)
    rate, decay = UNTUNED if choice is None else choice
    n_rows = len(split.train.symbols)
    history = train(
        network,
        split.train.symbols,
        split.targets,
        loss="softmax",
        alpha=0.0,
        optimizer="adamw",
        lr=rate,
        weight_decay=decay,
        betas=(0.9, 0.98),
        schedule="constant",
        n_steps=watch.n_steps,
        look_every=watch.look_every,
        batch_size=None if n_rows <= settings.batch_size else settings.batch_size,
        seed=seed,
        callback=lambda step, _: watch.look(outputs, step=step) if watch.due(step) else None,
    )
    if history.ended_by == "n_steps":
        watch.look(outputs, step=watch.n_steps)
    watch.correct_seconds(history.steps, history.seconds)
    return {
        "learning_rate": rate,
        "weight_decay": decay,
        "batch_size": min(n_rows, settings.batch_size),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
    }


def transformer(n_layers: int) -> Build:
    """Pre-norm transformer with learned embeddings and so many layers."""
    return lambda split, settings, seed: SoftmaxTransformer(
        split.p, 2, split.p, n_layers, settings.transformer_width, settings.transformer_heads, seed=seed
    )


def mlp(activation: Literal["relu", "quadratic"]) -> Build:
    """One hidden layer on learned embeddings."""
    return lambda split, settings, seed: EmbeddingMLP(
        split.p, 2, split.p, settings.embedding_width, settings.n_hidden, activation, seed=seed
    )


def convex_attention(n_layers: int) -> Build:
    """Gated convex attention on learned embeddings, all layers trained together (paper [C], section 4)."""

    def build(split: Split, settings: GrokkingSettings, seed: int) -> SymbolNetwork:
        width = settings.embedding_width
        head = DeepConvexTransformer(2, width, split.p, n_layers=n_layers, n_heads=settings.n_heads, seed=seed)
        return EmbeddedNetwork(TokenEmbedding(split.p, 2, width, seed=seed), head)

    return build

"""The ``convexformer demo`` command: three certified fits on digits beside the same networks trained by Adam."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import train_test_split

from convexformer import plot
from convexformer.datasets import load_digit_tokens
from convexformer.estimators.attention import ConvexAttentionClassifier, ConvexAttentionRegressor
from convexformer.estimators.base import ConvexAttentionBase
from convexformer.heads.attention import Heads
from convexformer.nn import ConvexAttention, TrainingHistory, train
from convexformer_solvers import Certificate

from .tables import format_rows

ADAM_SEEDS = (0, 1, 2)
ADAM_STEPS = 1000
ADAM_LEARNING_RATE = 0.05


@dataclass(frozen=True)
class Row:
    """One line of the demo's table.

    Attributes
    ----------
    problem, method : str
        What was solved and how.
    objective : float
        Training objective reached, weight decay included.
    dual_bound : float
        Certified lower bound on the global optimum of the problem.
    relative_gap : float
        ``(objective - dual_bound)`` over the objective of the best constant model.
    iterations : int
        Iterations or optimiser steps.
    seconds : float
        Wall time.
    heads, nonzero_tokens : int
        Size of the network, and token positions that it uses.
    train_score, test_score : float
        Accuracy, or R2 for the regression.
    """

    problem: str
    method: str
    objective: float
    dual_bound: float
    relative_gap: float
    iterations: int
    seconds: float
    heads: int
    nonzero_tokens: int
    train_score: float
    test_score: float


@dataclass(frozen=True)
class _Split:
    train_tokens: NDArray
    test_tokens: NDArray
    train_y: NDArray
    test_y: NDArray


_COLUMNS: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    ("problem", "<", lambda row: row.problem),
    ("method", "<", lambda row: row.method),
    ("objective", ">", lambda row: f"{row.objective:.6f}"),
    ("dual bound", ">", lambda row: f"{row.dual_bound:.6f}"),
    ("relative gap", ">", lambda row: f"{row.relative_gap:.1e}"),
    ("iterations", ">", lambda row: str(row.iterations)),
    ("seconds", ">", lambda row: f"{row.seconds:.1f}"),
    ("heads", ">", lambda row: str(row.heads)),
    ("tokens", ">", lambda row: str(row.nonzero_tokens)),
    ("train", ">", lambda row: f"{row.train_score:.3f}"),
    ("test", ">", lambda row: f"{row.test_score:.3f}"),
)


def _problems(seed: int) -> dict[str, ConvexAttentionBase]:
    options: dict[str, Any] = {"tol": 1e-4, "penalty": "nuclear", "random_state": seed}
    return {
        "classify, no gates": ConvexAttentionClassifier(alpha=0.002, **options),
        "classify, gated": ConvexAttentionClassifier(alpha=0.001, activation="gated_relu", n_gates=32, **options),
        "regress the digit": ConvexAttentionRegressor(alpha=0.05, **options),
    }


def run_demo(folder: Path, *, seed: int = 0, quiet: bool = False) -> list[Row]:
    """Fit, compare with Adam and draw; the figures go to ``folder``.

    Parameters
    ----------
    folder : Path
        Where ``token_map.png`` and ``convergence.png`` are written; made when absent.
    seed : int, default=0
        Seed of the split into training and test digits, and of the gates.
    quiet : bool, default=False
        Whether to hide progress bars.

    Returns
    -------
    list of Row
    """
    plot.require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    tokens, labels = load_digit_tokens()
    split = _Split(*train_test_split(tokens, labels, test_size=0.25, random_state=seed, stratify=labels))
    rows: list[Row] = []
    curves: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    models = _problems(seed)
    for name, model in models.items():
        if not quiet:
            print(f"\n{name}", file=sys.stderr)
        model.set_params(verbose=not quiet).fit(split.train_tokens, split.train_y)
        found = {"iterations": model.n_iter_, "seconds": model.history_.seconds[-1]}
        rows.append(_row(name, "convex, certified", model.heads_, model, split, **found))
        curves[name] = {"convex, certified": (model.history_.seconds, model.history_.primal)}
        for adam_seed in ADAM_SEEDS:
            heads, history = _train_same_network(model, split, adam_seed, quiet)
            found = {"iterations": ADAM_STEPS, "seconds": history.seconds[-1]}
            rows.append(_row(name, f"Adam, seed {adam_seed}", heads, model, split, **found))
            curves[name][f"Adam, {len(ADAM_SEEDS)} seeds: {adam_seed}"] = (history.seconds, history.objective)
    _draw_token_maps(models, folder / "token_map.png")
    _draw_convergence(models, curves, folder / "convergence.png")
    return rows


def format_table(rows: list[Row]) -> str:
    """Lay rows out as a text table.

    Parameters
    ----------
    rows : list of Row
        The lines.

    Returns
    -------
    str
    """
    return format_rows(rows, _COLUMNS)


def rows_as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Rows as plain dictionaries."""
    return [asdict(row) for row in rows]


def _score(model: ConvexAttentionBase, outputs: NDArray, y: NDArray) -> float:
    """Accuracy or R2 of raw outputs."""
    if isinstance(model, ConvexAttentionClassifier):
        return float(accuracy_score(y, model.classes_[outputs.argmax(1)]))
    return float(r2_score(y, outputs[:, 0]))


def _row(name: str, method: str, heads: Heads, model: ConvexAttentionBase, split: _Split, **figures: Any) -> Row:
    """A row for any network; its objective is recomputed from its heads in float64."""
    objective = heads.objective(split.train_tokens, split.train_y)
    reached = Certificate(objective, model.certificate_.dual, model.certificate_.reference)
    return Row(
        problem=name,
        method=method,
        objective=objective,
        dual_bound=reached.dual,
        relative_gap=reached.relative_gap,
        heads=len(heads),
        nonzero_tokens=int(heads.w1.any(axis=0).sum()) if len(heads) else 0,
        train_score=_score(model, heads.predict(split.train_tokens), split.train_y),
        test_score=_score(model, heads.predict(split.test_tokens), split.test_y),
        **figures,
    )


def _train_same_network(
    model: ConvexAttentionBase, split: _Split, seed: int, quiet: bool
) -> tuple[Heads, TrainingHistory]:
    """Adam on a network with the heads and gates of the certified solution, from random weights, in float32."""
    heads = model.heads_
    shape = (heads.w1.shape[1], heads.w2.shape[1], heads.w3.shape[1], len(heads))
    network = ConvexAttention(*shape, gates=heads.gates, gate_index=heads.gate_index, seed=seed)
    trained_for: dict[str, Any] = {"alpha": model.alpha, "loss": model.loss_, "penalty": model.penalty_}
    history = train(
        network,
        torch.as_tensor(split.train_tokens, dtype=torch.float32),
        torch.as_tensor(heads.targets.encode(split.train_y), dtype=torch.float32),
        **trained_for,
        lr=ADAM_LEARNING_RATE,
        n_steps=ADAM_STEPS,
        verbose=not quiet,
    )
    return Heads.from_torch(network, **trained_for, targets=heads.targets), history


def _draw_token_maps(models: dict[str, ConvexAttentionBase], path: Path) -> None:
    figure, axes = plot.new_figure(1, len(models), figsize=(5.2 * len(models), 4.4))
    figure.suptitle("Which patches of the digit the certified network reads")
    for ax, (name, model) in zip(axes, models.items(), strict=True):
        side = int(np.sqrt(model.n_tokens_in_))
        plot.plot_token_norms(model.token_norms_, shape=(side, side), title=name, ax=ax)
    plot.save_figure(figure, path)


def _draw_convergence(models: dict[str, ConvexAttentionBase], curves: dict[str, Any], path: Path) -> None:
    figure, axes = plot.new_figure(1, len(models), figsize=(5.2 * len(models), 4.4))
    figure.suptitle("Training objective above the certified lower bound on its global optimum")
    for ax, (name, model) in zip(axes, models.items(), strict=True):
        plot.plot_convergence(curves[name], bound=model.certificate_.dual, title=name, ax=ax)
    plot.save_figure(figure, path)

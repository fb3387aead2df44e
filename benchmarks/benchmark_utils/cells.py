"""The simulated cells A to G: regression and classification on token arrays as correlated as text embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from convexformer_solvers import DenseMap, GatedMap, LinearMap

from .instance import Instance

TOKEN_CORRELATION = 0.8
TOPIC_VARIANCE = 0.3
COMMON_MEAN = 0.3
NOISE = 0.5


@dataclass(frozen=True)
class Cell:
    """Shape and loss of one cell."""

    n_samples: int
    n_tokens: int
    n_features: int
    n_outputs: int
    n_gates: int
    loss: str


CELLS = {
    "A": Cell(2000, 64, 64, 1, 0, "squared"),
    "B": Cell(500, 256, 32, 1, 0, "squared"),
    "C": Cell(4000, 32, 128, 16, 0, "squared"),
    "D": Cell(3000, 16, 32, 10, 0, "softmax"),
    "E": Cell(2000, 8, 32, 1, 100, "squared"),
    "F": Cell(2000, 8, 32, 1, 100, "logistic"),
    "G": Cell(20000, 128, 64, 1, 0, "squared"),
}
DESIGNS = ("correlated", "iid")


def simulate(cell: str, design: str = "correlated", seed: int = 0, scale: float = 1.0) -> Instance:
    """One seeded instance of a cell.

    Parameters
    ----------
    cell : str
        A key of ``CELLS``.
    design : {"correlated", "iid"}
        Whether tokens are as correlated as text embeddings or independent standard normal.
    seed : int
        Seed of everything random.
    scale : float
        Factor on the number of samples; below 1 for quick runs.
    """
    shape = CELLS[cell]
    n_samples = round(shape.n_samples * scale)
    rng = np.random.default_rng(seed)
    draw = correlated_tokens if design == "correlated" else independent_tokens
    X = draw(rng, n_samples, shape.n_tokens, shape.n_features)
    masks = rank_one_gates(rng, X, shape.n_gates) if shape.n_gates else None
    f = standardised(predictions(X, masks, sparse_coef(rng, shape)))
    return Instance(X, masks, targets(f + NOISE * rng.normal(size=f.shape), shape.loss), shape.loss)


def independent_tokens(rng: np.random.Generator, n_samples: int, n_tokens: int, n_features: int) -> NDArray:
    """Standard normal tokens."""
    return rng.normal(size=(n_samples, n_tokens, n_features))


def correlated_tokens(rng: np.random.Generator, n_samples: int, n_tokens: int, n_features: int) -> NDArray:
    """Tokens as text embeddings have them.

    AR(1) along the tokens, a topic shared by all tokens of a sample, a rotated power-law spectrum, a common mean.
    """
    X = rng.normal(size=(n_samples, n_tokens, n_features))
    for k in range(1, n_tokens):
        X[:, k] *= np.sqrt(1 - TOKEN_CORRELATION**2)
        X[:, k] += TOKEN_CORRELATION * X[:, k - 1]
    X *= np.sqrt(1 - TOPIC_VARIANCE)
    X += np.sqrt(TOPIC_VARIANCE) * rng.normal(size=(n_samples, 1, n_features))
    rotation = np.linalg.qr(rng.normal(size=(n_features, n_features)))[0]
    X = X @ ((1 + np.arange(n_features))[:, None] ** -0.5 * rotation)
    X += COMMON_MEAN * rng.normal(size=n_features)
    return X


def rank_one_gates(rng: np.random.Generator, X: NDArray, n_gates: int) -> NDArray[np.bool_]:
    """Gate patterns ``1{u' X_i v >= 0}`` of random ``u`` and ``v``, shape ``(N, n_gates)``."""
    u = rng.normal(size=(n_gates, X.shape[1]))
    v = rng.normal(size=(n_gates, X.shape[2]))
    return np.einsum("hk,ikd,hd->ih", u, X, v, optimize=True) >= 0


def sparse_coef(rng: np.random.Generator, shape: Cell) -> NDArray:
    """True coefficients: a tenth of the tokens active; with gates, ten groups drawn with replacement."""
    tokens, block = shape.n_tokens, (shape.n_features, shape.n_outputs)
    if not shape.n_gates:
        coef = np.zeros((tokens, *block))
        active = max(2, tokens // 10)
        coef[rng.choice(tokens, active, replace=False)] = rng.normal(size=(active, *block))
        return coef
    coef = np.zeros((shape.n_gates, tokens, *block))
    for _ in range(10):
        coef[rng.integers(shape.n_gates), rng.integers(tokens)] = rng.normal(size=block)
    return coef


def predictions(X: NDArray, masks: NDArray[np.bool_] | None, coef: NDArray) -> NDArray:
    """Predictions of coefficients, shape ``(N, c)``."""
    data = torch.as_tensor(X)
    linear_map: LinearMap = DenseMap(data) if masks is None else GatedMap(data, torch.as_tensor(masks))
    return linear_map.matvec(torch.as_tensor(coef)).numpy()


def standardised(f: NDArray) -> NDArray:
    """Columns with mean 0 and standard deviation 1."""
    return (f - f.mean(0)) / f.std(0)


def targets(f: NDArray, loss: str) -> NDArray:
    """Targets of a loss from noisy scores: themselves, their signs, or their largest column one-hot."""
    if loss == "squared":
        return f
    if loss == "logistic":
        return np.where(f >= 0, 1.0, -1.0)
    return np.eye(f.shape[1])[f.argmax(1)]

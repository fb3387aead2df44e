"""Fixed gates of the gated-ReLU layer and the sources that make them (paper [C], Thm 3).

A gate lets sample ``X`` through when ``u1' X u2 >= 0``. Gates are drawn or given before training and stored with the
model, so that new data meet the same gates. Training a true ReLU is not covered by the theory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from convexformer_solvers import DenseMap


@dataclass(frozen=True, eq=False, init=False)
class Gates:
    """A set of ``h`` fixed gates ``1[u1' X u2 >= 0]``.

    Parameters
    ----------
    u1 : ndarray of shape (h, n_tokens)
        Token directions.
    u2 : ndarray of shape (h, n_features)
        Feature directions.

    Raises
    ------
    ValueError
        If the arrays are not two-dimensional, finite and of equal length.

    Examples
    --------
    >>> gates = Gates([[1.0, 0.0]], [[0.0, 1.0]])
    >>> gates.masks(torch.tensor([[[5.0, 1.0], [0.0, 0.0]], [[5.0, -1.0], [0.0, 0.0]]]))
    tensor([[ True],
            [False]])
    """

    u1: NDArray[np.float64]
    u2: NDArray[np.float64]

    def __init__(self, u1: ArrayLike, u2: ArrayLike) -> None:
        for name, values in (("u1", u1), ("u2", u2)):
            array = np.asarray(values, dtype=np.float64)
            if array.ndim != 2 or array.size == 0 or not np.isfinite(array).all():
                raise ValueError(
                    f"gates: {name} must be a finite array of shape (n_gates, ...), got shape {array.shape}"
                )
            object.__setattr__(self, name, array)
        if len(self.u1) != len(self.u2):
            raise ValueError(f"gates: u1 and u2 must have equal length, got {len(self.u1)} and {len(self.u2)}")

    def __len__(self) -> int:
        return len(self.u1)

    def masks(self, tokens: Tensor) -> Tensor:
        """Which samples each gate lets through.

        Parameters
        ----------
        tokens : Tensor of shape (N, n_tokens, n_features)
            The samples, in any precision; the products are formed in float64.

        Returns
        -------
        Tensor of shape (N, h), bool
        """
        u1, u2 = (torch.as_tensor(u, device=tokens.device) for u in (self.u1, self.u2))
        directions = torch.einsum("hk,hd->kdh", u1, u2)
        return DenseMap(tokens).matvec(directions) >= 0

    def select(self, index: NDArray[np.int64]) -> Gates:
        """The gates at the given positions."""
        return Gates(self.u1[index], self.u2[index])

    def distinct(self, masks: Tensor, sample_weight: Tensor | None = None) -> NDArray[np.int64]:
        """Positions of the gates that differ on a training set: all-closed gates dropped, duplicates merged.

        Parameters
        ----------
        masks : Tensor of shape (N, h), bool
            Masks of the training samples.
        sample_weight : Tensor of shape (N,), optional
            Samples of weight zero do not count.

        Returns
        -------
        ndarray of shape (n_distinct,)
            Increasing positions.

        Raises
        ------
        ValueError
            If no gate lets any sample through.
        """
        counted = masks if sample_weight is None else masks[sample_weight > 0]
        patterns = counted.cpu().numpy()
        _, first = np.unique(np.packbits(patterns, axis=0), axis=1, return_index=True)
        kept = np.sort(first)
        kept = kept[patterns[:, kept].any(axis=0)]
        if len(kept) == 0:
            raise ValueError("gates: no gate lets any training sample through; use more gates or other directions")
        return kept


class GateSource(ABC):
    """Something that makes gates for data of a given shape."""

    @abstractmethod
    def make(self, n_tokens: int, n_features: int, random_state: np.random.RandomState) -> Gates:
        """Make gates; random sources draw from ``random_state`` alone."""


def _check_n_gates(n_gates: int) -> None:
    if not isinstance(n_gates, (int, np.integer)) or isinstance(n_gates, bool) or n_gates < 1:
        raise ValueError(f"n_gates must be a positive integer, got {n_gates!r}")


@dataclass(frozen=True)
class GaussianGates(GateSource):
    """Gates with independent standard normal directions.

    Parameters
    ----------
    n_gates : int
        Number of gates.
    """

    n_gates: int

    def __post_init__(self) -> None:
        _check_n_gates(self.n_gates)

    def make(self, n_tokens: int, n_features: int, random_state: np.random.RandomState) -> Gates:
        shapes = ((self.n_gates, n_tokens), (self.n_gates, n_features))
        return Gates(*(random_state.standard_normal(shape) for shape in shapes))


@dataclass(frozen=True)
class SparseGates(GateSource):
    """Gates that look at few tokens and few features: normal directions with all but a few coordinates zero.

    Parameters
    ----------
    n_gates : int
        Number of gates.
    n_nonzero : int, default=2
        Nonzero coordinates of each direction; cut to the number of tokens or features where that is smaller.
    """

    n_gates: int
    n_nonzero: int = 2

    def __post_init__(self) -> None:
        _check_n_gates(self.n_gates)
        if self.n_nonzero < 1:
            raise ValueError(f"n_nonzero must be at least 1, got {self.n_nonzero!r}")

    def make(self, n_tokens: int, n_features: int, random_state: np.random.RandomState) -> Gates:
        def directions(width: int) -> NDArray[np.float64]:
            values = random_state.standard_normal((self.n_gates, width))
            rank = random_state.uniform(size=values.shape).argsort(axis=1).argsort(axis=1)
            return np.where(rank < self.n_nonzero, values, 0.0)

        return Gates(directions(n_tokens), directions(n_features))


@dataclass(frozen=True)
class GivenGates(GateSource):
    """Gates that the user gives.

    Parameters
    ----------
    gates : Gates
        The gates; their widths must match the data.
    """

    gates: Gates

    def make(self, n_tokens: int, n_features: int, random_state: np.random.RandomState) -> Gates:
        widths = (self.gates.u1.shape[1], self.gates.u2.shape[1])
        if widths != (n_tokens, n_features):
            raise ValueError(
                f"gates: directions must have widths (n_tokens, n_features) = ({n_tokens}, {n_features}), got {widths}"
            )
        return self.gates


GATE_SOURCES: dict[str, type[GaussianGates] | type[SparseGates]] = {"gaussian": GaussianGates, "sparse": SparseGates}


def get_gate_source(gates: str | GateSource | Gates | tuple[ArrayLike, ArrayLike], n_gates: int) -> GateSource:
    """The gate source that a user's parameters mean.

    Parameters
    ----------
    gates : str, GateSource, Gates or pair of arrays
        A key of ``GATE_SOURCES``, a source, gates, or ``(u1, u2)`` of shapes ``(h, n_tokens)`` and ``(h, n_features)``.
    n_gates : int
        Number of gates to draw where `gates` is a name.

    Returns
    -------
    GateSource

    Raises
    ------
    ValueError
        If ``gates`` is none of these or ``n_gates`` is not a positive integer.

    Examples
    --------
    >>> get_gate_source("gaussian", 8)
    GaussianGates(n_gates=8)
    """
    if isinstance(gates, GateSource):
        return gates
    if isinstance(gates, Gates):
        return GivenGates(gates)
    if isinstance(gates, str) and gates in GATE_SOURCES:
        return GATE_SOURCES[gates](n_gates)
    if isinstance(gates, (tuple, list)) and len(gates) == 2:
        return GivenGates(Gates(*gates))
    raise ValueError(
        f"gates must be one of {sorted(GATE_SOURCES)}, a pair of arrays (u1, u2), Gates or a GateSource, got {gates!r}"
    )

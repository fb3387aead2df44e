"""Sources of gates that are drawn, given, read off the data or taken from a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convexformer.validation import is_integer, is_one_of
from convexformer_solvers.memory import free_memory
from convexformer_solvers.validation import check_counts, check_kind

from .base import Gates, GateSource, TrainingData


@dataclass(frozen=True)
class GaussianGates(GateSource):
    """Gates with independent standard normal directions.

    Parameters
    ----------
    n_gates : int
        Number of gates.

    Raises
    ------
    ValueError
        If ``n_gates`` is not a positive integer.

    Examples
    --------
    >>> data = TrainingData(torch.zeros(100, 4, 3))  # of which the shape of a sample alone counts
    >>> GaussianGates(8).make(data, np.random.RandomState(0))
    Gates(8 gates, 4 tokens, 3 features)
    """

    n_gates: int

    def __post_init__(self) -> None:
        check_counts(n_gates=self.n_gates)

    def make(self, data: TrainingData, random_state: np.random.RandomState) -> Gates:
        _check_room(self.n_gates, data)
        return Gates(*(random_state.standard_normal((self.n_gates, width)) for width in data.token_shape))


@dataclass(frozen=True)
class SparseGates(GateSource):
    """Gates that look at few tokens and few features: normal directions with all but a few coordinates zero.

    Parameters
    ----------
    n_gates : int
        Number of gates.
    n_nonzero : int, default=2
        Nonzero coordinates of each direction; cut to the number of tokens or features where that is smaller.

    Raises
    ------
    ValueError
        If a parameter is not a positive integer.

    Examples
    --------
    >>> data = TrainingData(torch.zeros(100, 4, 3))
    >>> gates = SparseGates(5, n_nonzero=1).make(data, np.random.RandomState(0))
    >>> (gates.u1 != 0).sum(1), (gates.u2 != 0).sum(1)  # each looks at one feature of one token
    (array([1, 1, 1, 1, 1]), array([1, 1, 1, 1, 1]))
    """

    n_gates: int
    n_nonzero: int = 2

    def __post_init__(self) -> None:
        check_counts(n_gates=self.n_gates, n_nonzero=self.n_nonzero)

    def make(self, data: TrainingData, random_state: np.random.RandomState) -> Gates:
        _check_room(self.n_gates, data)

        def directions(width: int) -> NDArray[np.float64]:
            values = random_state.standard_normal((self.n_gates, width))
            rank = random_state.uniform(size=values.shape).argsort(axis=1).argsort(axis=1)
            return np.where(rank < self.n_nonzero, values, 0.0)

        return Gates(*(directions(width) for width in data.token_shape))


@dataclass(frozen=True)
class FourierGates(GateSource):
    r"""Gates that look at one frequency each, for tokens that are points on circles.

    Features come in pairs of columns, ``(2f, 2f + 1) = (cos, sin)`` of the frequency ``f``. A gate's feature direction
    is :math:`(\cos\varphi, \sin\varphi)` on one pair and zero elsewhere. Frequencies, and with ``"one"`` the tokens,
    take turns, so that each has its share of the gates; the phases :math:`\varphi` of a share of :math:`m` gates are
    :math:`\varphi_0 + \pi j (1 + 1/m)` with a random :math:`\varphi_0`: their boundaries are evenly spread, and their
    sides alternate. An odd :math:`m` spreads those evenly too.

    Let two tokens stand for :math:`a, b` at angular frequency :math:`\omega`. A gate on the first alone is a square
    wave whose first harmonic is :math:`\tfrac{2}{\pi} \cos(\omega a - \varphi)`; what it lets through of the other is
    any :math:`\cos(\omega b - \psi)`. So such gates span :math:`\cos(\omega (a \pm b))` and
    :math:`\sin(\omega (a \pm b))`, which modular addition, subtraction and (on discrete logarithms) division need.
    A gate on both tokens with signs is that of :math:`\cos(\omega a - \varphi) \pm \cos(\omega b - \varphi)`, a wave
    in :math:`a + b` times one in :math:`a - b`, of which the second has no free phase: good for sums, poor for
    differences. Gates that mix frequencies spread what they know of one over products of all.

    Parameters
    ----------
    n_gates : int
        Number of gates.
    frequencies : sequence of int, optional
        Which pairs of columns. Default: all pairs; an odd last column is in none. Give them where some columns are no
        waves.
    token_weights : {"one", "signs"}, default="one"
        Token directions: a single token, or a random sign for every token, with weights that fall from 1.1 to 0.9 over
        the tokens, so that tokens that are equal do not cancel.

    Raises
    ------
    ValueError
        If a parameter is not as described, or the data do not have the columns.

    Examples
    --------
    >>> angle = torch.linspace(0, 6, 10)
    >>> tokens = torch.stack([angle.cos(), angle.sin(), (2 * angle).cos(), (2 * angle).sin()], 1)[:, None]
    >>> gates = FourierGates(6).make(TrainingData(tokens), np.random.RandomState(0))
    >>> (gates.u2 != 0).astype(int)[:2]
    array([[1, 1, 0, 0],
           [0, 0, 1, 1]])
    """

    n_gates: int
    frequencies: Sequence[int] | None = None
    token_weights: str = "one"

    def __post_init__(self) -> None:
        check_counts(n_gates=self.n_gates)
        chosen = self.frequencies
        if chosen is not None and not (np.ndim(chosen) == 1 and len(chosen) and all(is_integer(f) for f in chosen)):
            raise ValueError(f"frequencies must be a sequence of integers with at least one, got {chosen!r}")
        if not is_one_of(self.token_weights, ("one", "signs")):
            raise ValueError(f"token_weights must be 'one' or 'signs', got {self.token_weights!r}")

    def make(self, data: TrainingData, random_state: np.random.RandomState) -> Gates:
        _check_room(self.n_gates, data)
        n_tokens, n_features = data.token_shape
        pairs = self._pairs(n_features)
        n_cells = len(pairs) * (n_tokens if self.token_weights == "one" else 1)
        turn, cell = np.divmod(np.arange(self.n_gates), n_cells)
        token, pair = cell // len(pairs), pairs[cell % len(pairs)]
        first = random_state.uniform(0, 2 * np.pi, size=n_cells)
        # Half a turn more at each step: at plain ones an even number would have every boundary twice.
        phase = first[cell] + np.pi * turn * (1 + 1 / np.bincount(cell, minlength=n_cells)[cell])
        u2 = np.zeros((self.n_gates, n_features))
        u2[np.arange(self.n_gates), 2 * pair] = np.cos(phase)
        u2[np.arange(self.n_gates), 2 * pair + 1] = np.sin(phase)
        if self.token_weights == "one":
            return Gates(np.eye(n_tokens)[token], u2)
        signs = random_state.choice([-1.0, 1.0], size=(self.n_gates, n_tokens))
        # With equal weights a gate of opposite signs would be on its boundary wherever the tokens are equal.
        return Gates(signs * np.linspace(1.1, 0.9, n_tokens), u2)

    def _pairs(self, n_features: int) -> NDArray[np.int64]:
        """The frequencies, as positions of pairs of columns."""
        if n_features < 2:
            raise ValueError(f"gates: a frequency needs two features (cos, sin), got X with n_features={n_features}")
        pairs = np.arange(n_features // 2) if self.frequencies is None else np.array(self.frequencies, dtype=np.int64)
        if pairs.min() < 0 or pairs.max() >= n_features // 2:
            raise ValueError(
                f"frequencies must be positions of the {n_features // 2} pairs of features, got {pairs.tolist()}"
            )
        return pairs


@dataclass(frozen=True)
class DifferenceGates(GateSource):
    r"""Gates that tell two random training samples apart.

    For a pair :math:`X_i \ne X_j` the best rank-one direction of :math:`X_i - X_j`, by its singular vectors, is turned
    as little as needed for the pair to lie at equal distance on either side of the gate:
    :math:`u_1^\top X_i u_2 = - u_1^\top X_j u_2 > 0`. Gates have no offset, so without the turn the boundary would pass
    through the origin and rarely between the two. Only where no turn can do so, as for samples that are multiples of
    each other, the direction is left as it is and the gate may see both alike.

    Parameters
    ----------
    n_gates : int
        Number of gates, each of a pair of its own, drawn with replacement. Samples of weight zero take no part.

    Raises
    ------
    ValueError
        If ``n_gates`` is not a positive integer, or there are no two samples that differ.

    Examples
    --------
    >>> X = torch.as_tensor(np.random.default_rng(0).normal(size=(2, 4, 3)) + 5)  # both far from the origin
    >>> gates = DifferenceGates(1).make(TrainingData(X), np.random.RandomState(0))
    >>> gates.masks(X).sum().item()
    1
    """

    n_gates: int

    needs_data: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_counts(n_gates=self.n_gates)

    def make(self, data: TrainingData, random_state: np.random.RandomState) -> Gates:
        _check_room(self.n_gates, data)
        samples = torch.unique(data.counted_tokens(), dim=0)
        if len(samples) < 2:
            raise ValueError("gates: two training samples that differ are needed, but all are the same")
        first = random_state.randint(len(samples), size=self.n_gates)
        second = (first + random_state.randint(1, len(samples), size=self.n_gates)) % len(samples)
        pairs = (samples[torch.as_tensor(index, device=samples.device)] for index in (first, second))
        return Gates(*separating_directions(*pairs))


def separating_directions(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Directions ``u1``, ``u2`` of gates with ``u1' first u2 = -u1' second u2 > 0``, see ``DifferenceGates``.

    Parameters
    ----------
    first, second : Tensor of shape (m, n_tokens, n_features)
        Pairs of samples.

    Returns
    -------
    u1, u2 : Tensor of shape (m, n_tokens) and (m, n_features), float64
    """
    difference, middle = first.double() - second.double(), (first.double() + second.double()) / 2
    left, _, right = torch.linalg.svd(difference, full_matrices=False)
    u1, u2 = left[:, :, 0], right[:, 0]
    other_u1 = _without(_times(difference, u2), _times(middle, u2))
    other_u2 = _without(_times(difference.mT, u1), _times(middle.mT, u1))
    # Each is how far apart the pair lies along the direction when one factor has been turned.
    along_tokens, along_features = (torch.linalg.vector_norm(u, dim=1) for u in (other_u1, other_u2))
    size = torch.linalg.vector_norm(first.double(), dim=(1, 2)) + torch.linalg.vector_norm(second.double(), dim=(1, 2))
    turned = (torch.maximum(along_tokens, along_features) > 1e-9 * size)[:, None]
    turn_tokens = (along_tokens >= along_features)[:, None]
    return torch.where(turned & turn_tokens, other_u1, u1), torch.where(turned & ~turn_tokens, other_u2, u2)


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors[:, :, None])[:, :, 0]


def _without(vectors: Tensor, directions: Tensor) -> Tensor:
    """The part of each vector that is orthogonal to its direction."""
    units = torch.nn.functional.normalize(directions, dim=1, eps=1e-300)
    for _ in range(2):  # once more, for what rounding left
        vectors = vectors - (vectors * units).sum(1, keepdim=True) * units
    return vectors


def _check_room(n_gates: int, data: TrainingData) -> None:
    """Raise ``ValueError`` where the directions of so many gates do not fit into the free memory."""
    free, of_one = free_memory(torch.device("cpu")), np.dtype(np.float64).itemsize * sum(data.token_shape)
    if free is not None and n_gates * of_one > free:
        raise ValueError(
            f"n_gates must be at most {free // of_one}, whose directions fit into the free memory, got {n_gates!r}"
        )


@dataclass(frozen=True)
class GivenGates(GateSource):
    """Gates that the user gives.

    Parameters
    ----------
    gates : Gates
        The gates; their widths must match the data.

    Raises
    ------
    ValueError
        When gates are made, if their widths are not those of the data.

    Examples
    --------
    >>> from convexformer import ConvexAttentionRegressor
    >>> X = np.random.default_rng(0).normal(size=(60, 2, 3))
    >>> y = np.where(X[:, 0, 0] >= 0, X[:, 1, 0], 0.0)  # token 1 is read where feature 0 of token 0 is positive
    >>> given = GivenGates(Gates(u1=[[1.0, 0.0]], u2=[[1.0, 0.0, 0.0]]))
    >>> model = ConvexAttentionRegressor(alpha=0.001, activation="gated_relu", gates=given).fit(X, y)
    >>> model.score(X, y) > 0.99
    True
    """

    gates: Gates

    def __post_init__(self) -> None:
        check_kind("gates", self.gates, Gates, "Gates(u1, u2)")

    def make(self, data: TrainingData, random_state: np.random.RandomState) -> Gates:
        return _fitting(self.gates, data)


@dataclass(frozen=True)
class NetworkGates(GateSource):
    r"""Gates of a trained network.

    Of a network :math:`f(X) = b + \sum_j \max(0, w_{1j}^\top X w_{2j}) \, w_{3j}` they are :math:`(w_{1j}, w_{2j})`.
    The convex program with them has a point with the outputs of the network, ``Z_jk = w1_jk w2_j w3_j'``, so its
    certified optimum shows what the network could still gain without other gates.

    Parameters
    ----------
    network : torch.nn.Module
        A module with a method ``gate_directions()`` that returns ``(u1, u2)`` of shapes ``(h, n_tokens)`` and
        ``(h, n_features)`` as arrays or tensors, or with ``Gates`` as its attribute ``gates``, as ``ConvexAttention``.
        Read when gates are made, so that they are those of the weights at that time.

    Raises
    ------
    TypeError
        If the network has neither.
    ValueError
        If the widths do not match the data.

    Examples
    --------
    >>> from convexformer import ConvexAttention
    >>> network = ConvexAttention(3, 2, 1, n_heads=2, gates=Gates(np.eye(2, 3), np.eye(2)))
    >>> len(NetworkGates(network).make(TrainingData(torch.zeros(10, 3, 2)), np.random.RandomState(0)))
    2
    """

    network: Any

    def __post_init__(self) -> None:
        if not callable(getattr(self.network, "gate_directions", None)) and self._own_gates() is None:
            raise TypeError(
                "network must have a method gate_directions() that returns (u1, u2), or Gates as attribute 'gates', "
                f"got {type(self.network).__name__} with neither"
            )

    def make(self, data: TrainingData, random_state: np.random.RandomState) -> Gates:
        gates = self._own_gates() or Gates(*self.network.gate_directions())
        return _fitting(gates, data)

    def _own_gates(self) -> Gates | None:
        gates = getattr(self.network, "gates", None)
        return gates if isinstance(gates, Gates) else None


def _fitting(gates: Gates, data: TrainingData) -> Gates:
    """The gates, once their widths are found to be those of the data."""
    widths = (gates.u1.shape[1], gates.u2.shape[1])
    wanted = data.token_shape
    if widths != wanted:
        raise ValueError(f"gates: directions must have widths (n_tokens, n_features) = {wanted}, got {widths}")
    return gates

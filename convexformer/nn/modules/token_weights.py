"""Fixed weightings of the tokens of a sample that depend on what the tokens hold."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from convexformer.validation import as_tensor, check_finite, check_one_of, check_positive, is_integer

from .base import as_arguments

ORIGINS = ("start", "end", "marked")


class TokenWeights(nn.Module, ABC):
    r"""A dictionary of :math:`h` fixed weightings :math:`a_j(X) \in R^n` of the tokens of a sample.

    A weighting turns the tokens :math:`x_1, \dots, x_n` of a sample into one, :math:`T_j(X) = \sum_k a_j(X)_k x_k`.
    A new kind is a subclass with `n_weightings` and ``forward``, its arrays being buffers that are named as its
    arguments, and one line of ``TOKEN_WEIGHTS`` where it is to be saved. One whose weights differ between the features
    has the method ``by_feature``, too.

    Examples
    --------
    >>> class LastToken(TokenWeights):
    ...     n_weightings = 1
    ...     def forward(self, tokens, mask):
    ...         last = mask.long().cumsum(1) == mask.sum(1, keepdim=True)
    ...         return (last & mask)[:, None].to(tokens.dtype)
    >>> LastToken()(torch.zeros(1, 3, 2), torch.tensor([[True, True, False]]))
    tensor([[[0., 1., 0.]]])
    """

    arrays: ClassVar[tuple[str, ...]] = ()  # arguments that are buffers

    n_weightings: int

    @abstractmethod
    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Weights of the tokens.

        Parameters
        ----------
        tokens : Tensor of shape (B, n, d)
            Samples, filled up to a common number of tokens.
        mask : Tensor of bool of shape (B, n)
            Which tokens are real, at least one of each sample.

        Returns
        -------
        Tensor of shape (B, h, n)
            Zero for tokens that are not real.
        """

    def by_feature(self, tokens: Tensor, mask: Tensor) -> Tensor | None:
        r"""Weights :math:`a_j(X)_{kl}` of each feature by itself, where :math:`T_j(X)_l = \sum_k a_j(X)_{kl} x_{kl}`.

        Parameters
        ----------
        tokens, mask
            As of ``forward``.

        Returns
        -------
        Tensor of shape (B, h, n, d) or None
            None, the default, where all features have the weights of ``forward``. Otherwise ``forward`` gives their
            means over the features.
        """
        return None

    def settings(self) -> dict[str, Any]:
        """Arguments that are no arrays, as JSON holds them."""
        return {}

    def flattened(self) -> list[TokenWeights]:
        """The kinds that it is made of; by default itself alone."""
        return [self]

    def widths(self) -> set[int]:
        """Widths of tokens that its arrays are for; none where it takes any."""
        return {array.shape[1] for array in (getattr(self, name) for name in self.arrays) if array.ndim == 2}

    def extra_repr(self) -> str:
        return as_arguments(n_weightings=self.n_weightings, **self.settings())

    def _keep(self, **arrays: ArrayLike | Tensor) -> None:
        """Buffers of finite float64 numbers, copied; the first has a row for each weighting."""
        for name, values in arrays.items():
            tensor = as_tensor(values, name=name).detach().to(torch.float64, copy=True)
            check_finite(name, tensor)
            self.register_buffer(name, tensor)
        first = next(iter(arrays))
        rows: Tensor = getattr(self, first)
        if rows.ndim != 2 or 0 in rows.shape:
            raise ValueError(f"{first} must have shape (n_weightings, n_features), got {tuple(rows.shape)}")
        self.n_weightings = len(rows)


class MeanWeights(TokenWeights):
    r"""The mean of all tokens: :math:`a(X)_k = 1 / n`.

    Examples
    --------
    >>> MeanWeights()(torch.zeros(1, 3, 2), torch.tensor([[True, True, False]]))
    tensor([[[0.5000, 0.5000, 0.0000]]])
    """

    n_weightings = 1

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return (_shares(tokens, mask)[:, None] * mask[:, None]).to(tokens.dtype)


class MaxWeights(TokenWeights):
    r"""The largest value of each feature: :math:`a(X)_{kl} = 1[k = \mathrm{argmax}_m \, x_{ml}]`.

    The pooled token is :math:`T(X)_l = \max_k x_{kl}`. The first of equal values counts.
    ``forward`` gives the share of features whose largest value a token has.

    Examples
    --------
    >>> tokens = torch.tensor([[[3.0, 0.0, 1.0], [1.0, 2.0, 4.0]]])
    >>> MaxWeights()(tokens, torch.ones(1, 2, dtype=torch.bool))
    tensor([[[0.3333, 0.6667]]])
    """

    n_weightings = 1

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.by_feature(tokens, mask).mean(-1)

    def by_feature(self, tokens: Tensor, mask: Tensor) -> Tensor:
        largest = tokens.masked_fill(~mask[..., None], -math.inf).argmax(1, keepdim=True)
        return torch.zeros_like(tokens).scatter(1, largest, 1.0)[:, None]


class GateWeights(TokenWeights):
    r"""Means over the tokens on one side of a hyperplane: :math:`a_j(X)_k = 1[u_j^\top x_k \ge t_j] / n`.

    The convex program on these is that of a two-layer gated-ReLU network that is applied to each token and averaged
    (Ergen and Pilanci, "Implicit convex regularizers of CNN architectures", ICLR 2021).

    Parameters
    ----------
    directions : array-like of shape (h, d)
        The normals :math:`u_j`.
    thresholds : array-like of shape (h,)
        The :math:`t_j`.

    Raises
    ------
    ValueError
        If the arrays are not of these shapes, or not finite.

    Examples
    --------
    >>> GateWeights([[1.0]], [0.5])(torch.tensor([[[1.0], [0.0]]]), torch.ones(1, 2, dtype=torch.bool))
    tensor([[[0.5000, 0.0000]]])
    """

    arrays = ("directions", "thresholds")
    directions: Tensor
    thresholds: Tensor

    def __init__(self, directions: ArrayLike | Tensor, thresholds: ArrayLike | Tensor) -> None:
        super().__init__()
        self._keep(directions=directions, thresholds=thresholds)
        if self.thresholds.shape != self.directions.shape[:1]:
            raise ValueError(
                f"thresholds must have shape ({len(self.directions)},), one per direction, "
                f"got {tuple(self.thresholds.shape)}"
            )

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        sides = tokens @ self.directions.to(tokens.dtype).mT
        opened = (sides >= self.thresholds.to(tokens.dtype)) & mask[..., None]
        return opened.mT * _shares(tokens, mask)[:, None]


class QueryWeights(TokenWeights):
    r"""Softmax attention of fixed queries: :math:`a_j(X) = \mathrm{softmax}_k(q_j^\top x_k / \tau)`.

    Parameters
    ----------
    queries : array-like of shape (h, d)
        The :math:`q_j`.
    temperature : float
        The :math:`\tau`; positive.

    Raises
    ------
    ValueError
        If an argument is not as described.

    Examples
    --------
    >>> QueryWeights([[1.0]], temperature=1.0)(torch.zeros(1, 2, 1), torch.tensor([[True, False]]))
    tensor([[[1., 0.]]])
    """

    arrays = ("queries",)
    queries: Tensor

    def __init__(self, queries: ArrayLike | Tensor, temperature: float) -> None:
        super().__init__()
        self._keep(queries=queries)
        check_positive(temperature=temperature)
        self.temperature = float(temperature)

    def settings(self) -> dict[str, Any]:
        return {"temperature": self.temperature}

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        scores = (tokens @ self.queries.to(tokens.dtype).mT).mT / self.temperature
        return torch.softmax(scores.masked_fill(~mask[:, None], -math.inf), -1)


class PrototypeWeights(TokenWeights):
    r"""Means over the tokens of soft clusters.

    .. math:: a_j(X)_k = \frac{1}{n} \, \mathrm{softmax}_j \Big( -\frac{\|x_k - c_j\|_2^2}{2 \tau} \Big)

    Parameters
    ----------
    centers : array-like of shape (h, d)
        The prototypes :math:`c_j`.
    temperature : float
        The :math:`\tau`, in the unit of a squared distance; positive.

    Raises
    ------
    ValueError
        If an argument is not as described.

    Examples
    --------
    >>> weights = PrototypeWeights([[0.0], [10.0]], temperature=1.0)
    >>> weights(torch.tensor([[[0.0], [10.0]]]), torch.ones(1, 2, dtype=torch.bool))
    tensor([[[5.0000e-01, 9.6437e-23],
             [9.6437e-23, 5.0000e-01]]])
    """

    arrays = ("centers",)
    centers: Tensor

    def __init__(self, centers: ArrayLike | Tensor, temperature: float) -> None:
        super().__init__()
        self._keep(centers=centers)
        check_positive(temperature=temperature)
        self.temperature = float(temperature)

    def settings(self) -> dict[str, Any]:
        return {"temperature": self.temperature}

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        centers = self.centers.to(tokens.dtype)
        # The squared norm of a token is the same for all prototypes.
        closeness = (tokens @ centers.mT - centers.square().sum(1) / 2) / self.temperature
        shares = torch.softmax(closeness, -1) * _shares(tokens, mask)[..., None]
        return (shares * mask[..., None]).mT


class PositionWeights(TokenWeights):
    r"""Single tokens at fixed distances from the start, the end or a marked token.

    A weighting is 1 on its token, and zero everywhere where a sample has no token there.

    Parameters
    ----------
    offsets : sequence of int
        Distances from the origin. From the end, 0 is the last token and -1 the one before.
    origin : {"start", "end", "marked"}, default="start"
        What distances are counted from.
    mark : int, optional
        With ``origin="marked"``, the feature that marks: the token in which it is largest, the first of equals.

    Raises
    ------
    ValueError
        If an argument is not as described.

    Examples
    --------
    >>> weights = PositionWeights([0, -1], "end")
    >>> weights(torch.zeros(1, 3, 1), torch.tensor([[True, True, False]]))
    tensor([[[0., 1., 0.],
             [1., 0., 0.]]])
    """

    def __init__(self, offsets: Any, origin: str = "start", mark: int | None = None) -> None:
        super().__init__()
        listed = list(offsets) if isinstance(offsets, Iterable) else []
        if not listed or not all(is_integer(offset) for offset in listed):
            raise ValueError(f"offsets must be a sequence of integers with at least one, got {offsets!r}")
        if max(map(abs, map(int, listed))) > sys.maxsize:
            raise ValueError(f"offsets must lie between {-sys.maxsize} and {sys.maxsize}, got {offsets!r}")
        check_one_of(ORIGINS, origin=origin)
        if not (is_integer(mark, 0) if origin == "marked" else mark is None):
            raise ValueError(
                f"mark must be the position of a feature with origin='marked' and None otherwise, got {mark!r} with "
                f"origin={origin!r}"
            )
        self.offsets, self.origin = [int(offset) for offset in listed], origin
        self.mark = None if mark is None else int(mark)
        self.n_weightings = len(self.offsets)

    def settings(self) -> dict[str, Any]:
        return {"offsets": self.offsets, "origin": self.origin, "mark": self.mark}

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        place = mask.long().cumsum(1) - 1  # of each real token among those of its sample
        if self.origin == "start":
            origin = torch.zeros_like(place[:, :1])
        elif self.origin == "end":
            origin = mask.long().sum(1, keepdim=True) - 1
        else:
            marks = tokens[..., self.mark].masked_fill(~mask, -math.inf)
            origin = place.gather(1, marks.argmax(1, keepdim=True))
        wanted = origin + place.new_tensor(self.offsets)
        return ((place[:, None] == wanted[..., None]) & mask[:, None]).to(tokens.dtype)


class JoinedWeights(TokenWeights):
    """Weightings of several kinds, one after the other.

    Parameters
    ----------
    parts : sequence of TokenWeights
        The kinds.

    Raises
    ------
    ValueError
        If there are none.

    Examples
    --------
    >>> JoinedWeights([MeanWeights(), GateWeights([[1.0]], [0.5])]).n_weightings
    2
    """

    def __init__(self, parts: Sequence[TokenWeights]) -> None:
        super().__init__()
        if not len(parts):
            raise ValueError("parts must hold at least one TokenWeights, got none")
        self.parts = nn.ModuleList(flat for part in parts for flat in part.flattened())
        self.n_weightings = sum(part.n_weightings for part in self.flattened())

    def flattened(self) -> list[TokenWeights]:
        return cast("list[TokenWeights]", list(self.parts))

    def widths(self) -> set[int]:
        return set().union(*(part.widths() for part in self.flattened()))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return torch.cat([part(tokens, mask) for part in self.parts], 1)

    def each_by_feature(self, tokens: Tensor, mask: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The weights of each feature by itself, of parts that have such, and which weightings they are of."""
        first = 0
        for part in self.flattened():
            if (weights := part.by_feature(tokens, mask)) is not None:
                yield slice(first, first + part.n_weightings), weights
            first += part.n_weightings


def _shares(tokens: Tensor, mask: Tensor) -> Tensor:
    """One over the number of real tokens of each sample, shape ``(B, 1)``."""
    return 1 / mask.sum(1, keepdim=True).to(tokens.dtype)


TOKEN_WEIGHTS: dict[str, type[TokenWeights]] = {
    cls.__name__: cls for cls in (MeanWeights, MaxWeights, GateWeights, QueryWeights, PrototypeWeights, PositionWeights)
}

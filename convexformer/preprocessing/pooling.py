"""Transformers from tokens to tokens: standardising, and pooling by a dictionary of weightings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.cluster import MiniBatchKMeans
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from convexformer.nn.modules.base import copied_to
from convexformer.nn.modules.probe import TokenPooler
from convexformer.nn.modules.token_weights import (
    GateWeights,
    JoinedWeights,
    MaxWeights,
    MeanWeights,
    PositionWeights,
    PrototypeWeights,
    QueryWeights,
    TokenWeights,
)
from convexformer.validation import Result, all_finite, check_stream, check_weight, is_one_of, result_of
from convexformer_solvers.validation import check_counts

from .checking import check_sequences
from .moments import Moments
from .sequences import CONFIG, TokenSequences, draw_tokens


class _OfTokens(TransformerMixin, BaseEstimator):
    """What all transformers of token sequences share."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.no_validation = False
        return tags


class TokenPooling(_OfTokens):
    r"""Samples of any number of tokens as :math:`h` tokens, each a weighted sum.

    .. math:: T_j(X) = \sum_k a_j(X)_k \, x_k, \qquad j = 1, \dots, h

    A subclass says which weightings :math:`a_j` it makes, by the method ``make_weights``. Poolings compose by
    ``PoolingUnion`` and are parts of the ``dictionary`` of a probe. Samples are read in chunks, and no array of
    samples, tokens and weightings is held.

    Examples
    --------
    >>> class FirstToken(TokenPooling):
    ...     def make_weights(self, samples, random_state, sample_weight=None):
    ...         return PositionWeights([0])
    >>> FirstToken().fit_transform([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]])
    array([[[1., 2.]],
    <BLANKLINE>
           [[5., 6.]]])
    """

    def make_weights(
        self, samples: TokenSequences, random_state: np.random.RandomState, sample_weight: NDArray | None = None
    ) -> TokenWeights:
        """The weightings for some training samples.

        Parameters
        ----------
        samples : TokenSequences
            The samples.
        random_state : RandomState
            What random draws come from.
        sample_weight : ndarray of shape (N,), optional
            Non-negative; samples of weight zero must not count.

        Returns
        -------
        TokenWeights
        """
        raise NotImplementedError

    def fit(self, X: Any, y: Any = None, sample_weight: ArrayLike | None = None) -> Self:
        """Make the weightings.

        Parameters
        ----------
        X : array-like or pair
            Samples: an array of shape (n_samples, n_tokens, n_features), a list of arrays of shapes
            (length, n_features), a pair of an array and `lengths` or a boolean `mask`, a masked array, or a nested
            tensor. An array of shape (n_samples, n_features) is samples of one token. What ``open_source`` takes, as a
            path, stands for an array on a disk; `lengths` and `mask` may be paths, too.
        y : None
            Unused.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative; samples of weight zero do not count.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            If ``X`` or a parameter is not as described.
        """
        samples = check_sequences(self, X, reset=True)
        weight = check_weight(sample_weight, len(samples))
        self.weights_ = weights_by(self, samples, None, weight)
        return self

    def transform(self, X: Any) -> Result:
        """Pool samples.

        Parameters
        ----------
        X : array-like or pair
            As in ``fit``.

        Returns
        -------
        ndarray of shape (n_samples, n_weightings, n_features)
            In the precision of ``X``; float32 for half precision.
        """
        check_is_fitted(self, "weights_")  # a fit that fails may have set others
        samples = check_sequences(self, X, reset=False)
        return result_of(pooled(TokenPooler([self.weights_]), samples), X)


def weights_by(pooling: TokenPooling, samples: TokenSequences, default: Any, weight: NDArray | None) -> TokenWeights:
    """What a pooling makes; its own `random_state` goes before the default."""
    own = getattr(pooling, "random_state", None)
    return pooling.make_weights(samples, check_stream(default if own is None else own), weight)


def pooled_chunks(
    pooler: TokenPooler, samples: TokenSequences, weights: bool = False
) -> Iterator[tuple[slice, Tensor]]:
    """Pooled tokens ``(B, h, d)``, or weights ``(B, h, n)``, of a few samples at a time, and which samples they are."""
    if any(part.device != samples.device for part in (*pooler.parameters(), *pooler.buffers())):
        pooler = copied_to(pooler, samples.device)
    for rows, tokens, mask in samples.chunks(pooler.n_weightings):
        with torch.no_grad():
            part = pooler.joined(*pooler.prepared(tokens, mask)) if weights else pooler(tokens, mask)
        if not all_finite(part):
            raise ValueError("X is too large for its pooled tokens to be finite; scale the features to about one")
        yield rows, part


def pooled(pooler: TokenPooler, samples: TokenSequences, out: Tensor | None = None) -> Tensor:
    """Pooled tokens ``(N, h, d)`` of samples, computed in chunks; written to `out` where it is given."""
    if out is None:
        shape = (len(samples), pooler.n_weightings, samples.n_features)
        out = torch.empty(shape, dtype=samples.dtype, device=samples.device)
    for rows, part in pooled_chunks(pooler, samples):
        out[rows] = part
    return out


def weights_of(pooler: TokenPooler, samples: TokenSequences) -> Tensor:
    """Weights ``(N, h, n)`` of the tokens of samples, the factors left out, computed in chunks."""
    shape = (len(samples), pooler.n_weightings, samples.n_columns)
    found = torch.zeros(shape, dtype=samples.dtype, device=samples.device)
    for rows, part in pooled_chunks(pooler, samples, weights=True):
        found[rows, :, : part.shape[2]] = part  # columns without a real token may have been left out
    return found


class MeanPooling(TokenPooling):
    r"""The mean of the tokens: :math:`a(X)_k = 1 / n`.

    Examples
    --------
    >>> MeanPooling().fit_transform([[[1.0], [3.0]], [[5.0]]])[:, 0, 0]
    array([2., 5.])
    """

    def make_weights(
        self, samples: TokenSequences, random_state: np.random.RandomState, sample_weight: NDArray | None = None
    ) -> MeanWeights:
        return MeanWeights()


class MaxPooling(TokenPooling):
    r"""The largest value of each feature over the tokens: :math:`T(X)_l = \max_k x_{kl}`.

    Attributes
    ----------
    weights_ : MaxWeights
        The weighting.
    n_features_in_ : int
        Features per token.

    Examples
    --------
    >>> MaxPooling().fit_transform([[[1.0, 5.0], [3.0, 4.0]], [[2.0, 0.0]]])[:, 0]
    array([[3., 5.],
           [2., 0.]])
    """

    def make_weights(
        self, samples: TokenSequences, random_state: np.random.RandomState, sample_weight: NDArray | None = None
    ) -> MaxWeights:
        return MaxWeights()


class TokenGates(TokenPooling):
    r"""Means over the tokens on one side of hyperplanes: :math:`a_j(X)_k = 1[u_j^\top x_k \ge t_j] / n`.

    The convex program on these is exactly that of a two-layer gated-ReLU network that is applied to each token and
    averaged (Ergen and Pilanci, "Implicit convex regularizers of CNN architectures", ICLR 2021).

    Parameters
    ----------
    n_gates : int, default=64
        Gates.
    source : {"random", "pairs"}, default="random"
        Where hyperplanes come from. ``"random"``: standard normal directions through the mean of all tokens.
        ``"pairs"``: the planes half-way between two tokens of the training samples.
    random_state : int, RandomState or None, default=None
        Draws directions and tokens.

    Attributes
    ----------
    weights_ : GateWeights
        The hyperplanes.
    n_features_in_ : int
        Features per token.

    Raises
    ------
    ValueError
        In ``fit``, if a parameter is not as described, or ``"pairs"`` finds fewer than two different tokens.

    Notes
    -----
    Gates are computed in the precision of the tokens. A token on the very boundary may be on either side.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(20, 5, 3))
    >>> TokenGates(8, random_state=0).fit_transform(X).shape
    (20, 8, 3)
    """

    def __init__(self, n_gates: int = 64, source: str = "random", random_state: Any = None) -> None:
        self.n_gates = n_gates
        self.source = source
        self.random_state = random_state

    def make_weights(
        self, samples: TokenSequences, random_state: np.random.RandomState, sample_weight: NDArray | None = None
    ) -> GateWeights:
        check_counts(n_gates=self.n_gates)
        if not is_one_of(self.source, ("random", "pairs")):
            raise ValueError(f"source must be 'random' or 'pairs', got {self.source!r}")
        if self.source == "random":
            directions = random_state.standard_normal((self.n_gates, samples.n_features))
            mean = moments(samples, sample_weight).mean.numpy(force=True)
            return GateWeights(directions, directions @ mean)
        return _gates_between(draw_tokens(samples, 2 * self.n_gates, _seed(random_state), sample_weight))


def _gates_between(tokens: Tensor) -> GateWeights:
    """Planes half-way between the first and the second half of some tokens."""
    n_gates = len(tokens) // 2
    if n_gates == 0:
        raise ValueError("source='pairs' needs at least two different tokens, got one sample's; use source='random'")
    first, second = tokens[:n_gates].double(), tokens[n_gates : 2 * n_gates].double()
    directions = first - second
    return GateWeights(directions, (directions * (first + second)).sum(1) / 2)


class QueryPooling(TokenPooling):
    r"""Softmax attention of fixed queries: :math:`a_j(X) = \mathrm{softmax}_k(q_j^\top x_k / \tau)`.

    The convex program on these is that of a multi-head attentive probe whose queries come from a dictionary.

    Parameters
    ----------
    n_queries : int, default=64
        Queries, at most: where they are tokens, fewer where there are not so many different ones.
    source : {"tokens", "prototypes", "random"}, default="tokens"
        ``"tokens"``: tokens of the training samples, each different one as likely. ``"prototypes"``: centres of
        k-means of tokens. ``"random"``: standard normal vectors.
    temperature : float, optional
        The :math:`\tau`; smaller is sharper. Default: ``query_temperature(n_features)``, a quarter of the square root
        of the number of features.
    random_state : int, RandomState or None, default=None
        Draws the queries.

    Attributes
    ----------
    weights_ : QueryWeights
        The queries.
    n_features_in_ : int
        Features per token.

    Raises
    ------
    ValueError
        In ``fit``, if a parameter is not as described.

    Notes
    -----
    Which tokens are drawn follows from `random_state` and from their numbers as they were given. The order of the
    samples does not change the draw, nor does single in place of double precision. Other units do: the same data in
    other units have other queries.

    Examples
    --------
    >>> X = [np.ones((3, 2)), np.zeros((5, 2))]  # samples of 3 and of 5 tokens
    >>> QueryPooling(4, source="random", random_state=0).fit_transform(X).shape
    (2, 4, 2)
    """

    def __init__(
        self, n_queries: int = 64, source: str = "tokens", temperature: float | None = None, random_state: Any = None
    ) -> None:
        self.n_queries = n_queries
        self.source = source
        self.temperature = temperature
        self.random_state = random_state

    def make_weights(
        self, samples: TokenSequences, random_state: np.random.RandomState, sample_weight: NDArray | None = None
    ) -> QueryWeights:
        check_counts(n_queries=self.n_queries)
        if not is_one_of(self.source, ("tokens", "prototypes", "random")):
            raise ValueError(f"source must be 'tokens', 'prototypes' or 'random', got {self.source!r}")
        queries: NDArray | Tensor
        if self.source == "tokens":
            queries = draw_tokens(samples, self.n_queries, _seed(random_state), sample_weight)
        elif self.source == "prototypes":
            queries = _prototypes(samples, self.n_queries, random_state, sample_weight)
        else:
            queries = random_state.standard_normal((self.n_queries, samples.n_features))
        default = query_temperature(samples.n_features)
        return QueryWeights(queries, default if self.temperature is None else self.temperature)


class PrototypePooling(TokenPooling):
    r"""Means over the tokens of soft clusters.

    .. math:: a_j(X)_k = \frac{1}{n} \, \mathrm{softmax}_j \Big( -\frac{\|x_k - c_j\|_2^2}{2 \tau} \Big)

    with :math:`c_j` the centres of k-means.

    Parameters
    ----------
    n_prototypes : int, default=32
        Clusters, at most: fewer where there are not so many different tokens.
    temperature : float, optional
        The :math:`\tau`, in the unit of a squared distance; smaller is harder. Default: twice the square root of the
        number of features.
    random_state : int, RandomState or None, default=None
        Draws the tokens for k-means and its first centres.

    Attributes
    ----------
    weights_ : PrototypeWeights
        The prototypes.
    n_features_in_ : int
        Features per token.

    Raises
    ------
    ValueError
        In ``fit``, if a parameter is not as described.

    Examples
    --------
    >>> X = np.repeat([[[0.0, 0.0], [9.0, 9.0]]], 4, axis=0) + np.random.default_rng(0).normal(size=(4, 2, 2))
    >>> PrototypePooling(2, random_state=0).fit_transform(X).shape
    (4, 2, 2)
    """

    def __init__(self, n_prototypes: int = 32, temperature: float | None = None, random_state: Any = None) -> None:
        self.n_prototypes = n_prototypes
        self.temperature = temperature
        self.random_state = random_state

    def make_weights(
        self, samples: TokenSequences, random_state: np.random.RandomState, sample_weight: NDArray | None = None
    ) -> PrototypeWeights:
        check_counts(n_prototypes=self.n_prototypes)
        centers = _prototypes(samples, self.n_prototypes, random_state, sample_weight)
        default = 2.0 * math.sqrt(samples.n_features)
        return PrototypeWeights(centers, default if self.temperature is None else self.temperature)


class RelativePositions(TokenPooling):
    """Single tokens at fixed distances from the start, the end or a marked token of each sample.

    Parameters
    ----------
    offsets : sequence of int, default=(0,)
        Distances, one weighting each. From the end, 0 is the last token and -1 the one before. A sample without a token
        there has zeros.
    origin : {"start", "end", "marked"}, default="start"
        What distances are counted from. ``"start"`` with offset 0 is ``[CLS]`` where an encoder has it first.
    mark : int, optional
        With ``origin="marked"``, the feature that marks a token, such as the subject or a mask: the token in which the
        feature is largest. A column of zeros and a one serves.

    Attributes
    ----------
    weights_ : PositionWeights
        The weightings.
    n_features_in_ : int
        Features per token.

    Raises
    ------
    ValueError
        In ``fit``, if a parameter is not as described.

    Examples
    --------
    >>> RelativePositions([0, -1], "end").fit_transform([[[1.0], [2.0], [3.0]], [[4.0]]])[:, :, 0]
    array([[3., 2.],
           [4., 0.]])
    """

    def __init__(self, offsets: Sequence[int] = (0,), origin: str = "start", mark: int | None = None) -> None:
        self.offsets = offsets
        self.origin = origin
        self.mark = mark

    def make_weights(
        self, samples: TokenSequences, random_state: np.random.RandomState, sample_weight: NDArray | None = None
    ) -> PositionWeights:
        weights = PositionWeights(self.offsets, self.origin, self.mark)
        if self.mark is not None and self.mark >= samples.n_features:
            raise ValueError(f"mark must be below the {samples.n_features} features, got {self.mark}")
        return weights


class PoolingUnion(TokenPooling):
    """The weightings of several poolings, one after the other.

    Parameters
    ----------
    parts : sequence of TokenPooling
        The poolings. Those without a `random_state` of their own draw from that of the union, in their order.
    random_state : int, RandomState or None, default=None
        What draws come from.

    Attributes
    ----------
    weights_ : JoinedWeights
        The weightings.
    n_features_in_ : int
        Features per token.

    Raises
    ------
    ValueError
        In ``fit``, if ``parts`` is no sequence of poolings.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(20, 5, 3))
    >>> PoolingUnion([MeanPooling(), TokenGates(8)], random_state=0).fit_transform(X).shape
    (20, 9, 3)
    """

    def __init__(self, parts: Sequence[TokenPooling], random_state: Any = None) -> None:
        self.parts = parts
        self.random_state = random_state

    def make_weights(
        self, samples: TokenSequences, random_state: np.random.RandomState, sample_weight: NDArray | None = None
    ) -> JoinedWeights:
        is_list = isinstance(self.parts, (list, tuple)) and len(self.parts) > 0
        if not is_list or not all(isinstance(part, TokenPooling) for part in self.parts):
            raise ValueError(f"parts must be a list of poolings such as TokenGates(64), got {self.parts!r}")
        return JoinedWeights([weights_by(part, samples, random_state, sample_weight) for part in self.parts])


class TokenStandardizer(_OfTokens):
    """Tokens with mean zero and variance one of each feature, over all tokens of the training samples.

    Attributes
    ----------
    mean_, scale_ : ndarray of shape (n_features,)
        Of each feature; the scale of one that is constant is 1.
    n_features_in_ : int
        Features per token.

    Examples
    --------
    >>> TokenStandardizer().fit_transform([[[0.0], [4.0]], [[2.0]]])
    [array([[-1.22474487],
           [ 1.22474487]]), array([[0.]])]
    """

    def fit(self, X: Any, y: Any = None, sample_weight: ArrayLike | None = None) -> Self:
        """Compute means and scales, in one pass over chunks.

        Parameters
        ----------
        X : array-like or pair
            Samples, as in ``TokenPooling.fit``.
        y : None
            Unused.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative weights, of each token of a sample.

        Returns
        -------
        self
        """
        samples = check_sequences(self, X, reset=True)
        weight = check_weight(sample_weight, len(samples))
        found = moments(samples, weight)
        self.mean_, self.scale_ = found.mean.numpy(force=True), scale_of(samples, found, weight).numpy(force=True)
        return self

    def transform(self, X: Any) -> Result | list[Result]:
        """Standardise tokens.

        Parameters
        ----------
        X : array-like or pair
            As in ``fit``.

        Returns
        -------
        ndarray of shape (n_samples, n_tokens, n_features) or list of ndarray of shapes (length, n_features)
            An array where all samples have as many tokens; padding is left out.
        """
        check_is_fitted(self, "mean_")
        samples = check_sequences(self, X, reset=False)
        pooler = TokenPooler([MeanWeights()], self.mean_, self.scale_)
        found: list[Any] = [
            result_of(sample[real], X)
            for _, tokens, mask in samples.mapped(pooler.standardized).chunks()
            for sample, real in zip(tokens, mask, strict=True)
        ]
        same = len(set(samples.lengths.tolist())) == 1
        return found if not same else torch.stack(found) if torch.is_tensor(found[0]) else np.stack(found)


def moments(samples: TokenSequences, sample_weight: NDArray | None = None) -> Moments:
    """Moments of the features of all tokens, each with the weight of its sample."""
    own = None if sample_weight is None else {"weight": torch.as_tensor(sample_weight, device=samples.device)}
    return Moments.joined(samples.each_part(_moments_of_part, own))


def scale_of(samples: TokenSequences, found: Moments, sample_weight: NDArray | None = None) -> Tensor:
    """Standard deviations of the features; 1 for constant ones, but an error where all squares round to zero."""
    is_zero = samples.dtype == torch.float64 and not bool(found.square.any()) and bool(found.mean.abs().max() < 1.0)
    if is_zero and bool(moments(samples.mapped(_enlarged), sample_weight).square.any()):
        raise ValueError("squares of X are too small for torch.float64; scale the features to about one")
    return found.scale


def _enlarged(tokens: Tensor) -> Tensor:
    """Tokens in a unit in which the smallest numbers of float64 have squares."""
    return tokens / math.sqrt(torch.finfo(torch.float64).tiny)


def _moments_of_part(samples: TokenSequences, weight: Tensor | None = None) -> Moments:
    return Moments.joined(
        Moments.of(tokens[mask], None if weight is None else weight[rows, None].expand_as(mask)[mask])
        for rows, tokens, mask in samples.chunks()
    )


def _prototypes(
    samples: TokenSequences, count: int, random_state: np.random.RandomState, sample_weight: NDArray | None
) -> NDArray:
    """Centres of k-means of some tokens, at most one for each different token."""
    tokens = draw_tokens(samples, CONFIG.tokens_per_center * count, _seed(random_state), sample_weight)
    array = tokens.double().numpy(force=True)
    clusters = MiniBatchKMeans(min(count, len(array)), n_init=1, random_state=_seed(random_state))
    return clusters.fit(array).cluster_centers_


def query_temperature(n_features: int) -> float:
    """Default temperature of queries that are tokens: a quarter of the square root of the number of features.

    The scores of standardised tokens spread by about that root. At the root itself, as in transformers, attention is
    nearly uniform and queries are nearly alike.

    Examples
    --------
    >>> query_temperature(384)
    4.898979485566356
    """
    return math.sqrt(n_features) / 4


def _seed(random_state: np.random.RandomState) -> int:
    return int(random_state.randint(2**31 - 1))

"""Dictionaries of weightings of tokens, made for training samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convexformer.nn.modules.probe import TokenPooler
from convexformer.nn.modules.token_weights import MeanWeights
from convexformer.validation import check_stream

from .pooling import MeanPooling, PoolingUnion, QueryPooling, TokenGates, TokenPooling, moments
from .sequences import TokenSequences


def default_dictionary(longest: int) -> PoolingUnion:
    """What ``dictionary="auto"`` is: the mean, 128 queries and 32 gates.

    Of samples of one token each it is the mean alone, as there is nothing to pool: the probe is a linear model.

    Parameters
    ----------
    longest : int
        Tokens of the longest sample.

    Returns
    -------
    PoolingUnion

    Examples
    --------
    >>> [type(part).__name__ for part in default_dictionary(longest=8).parts]
    ['MeanPooling', 'QueryPooling', 'TokenGates']
    """
    return PoolingUnion([MeanPooling()] + ([QueryPooling(128), TokenGates(32)] if longest > 1 else []))


def get_dictionary(dictionary: Any, longest: int) -> TokenPooling:
    """The pooling that a parameter ``dictionary`` means.

    Parameters
    ----------
    dictionary : "auto", TokenPooling or list of them
        The parameter; a list is the ``PoolingUnion`` of its entries.
    longest : int
        Tokens of the longest sample.

    Returns
    -------
    TokenPooling

    Raises
    ------
    ValueError
        If it is none of these.

    Examples
    --------
    >>> get_dictionary([MeanPooling(), TokenGates(8)], longest=5)
    PoolingUnion(parts=[MeanPooling(), TokenGates(n_gates=8)])
    """
    if isinstance(dictionary, str) and dictionary == "auto":
        return default_dictionary(longest)
    if isinstance(dictionary, TokenPooling):
        return dictionary
    is_list = isinstance(dictionary, (list, tuple)) and len(dictionary) > 0
    if is_list and all(isinstance(part, TokenPooling) for part in dictionary):
        return PoolingUnion(dictionary)
    raise ValueError(
        f"dictionary must be 'auto', a pooling such as TokenGates(64), or a list of poolings, got {dictionary!r}"
    )


def make_pooler(
    dictionary: TokenPooling,
    samples: TokenSequences,
    *,
    standardize: bool,
    random_state: np.random.RandomState,
    sample_weight: NDArray[np.float64] | None = None,
) -> TokenPooler:
    """A dictionary for training samples, its factors still left out.

    Parameters
    ----------
    dictionary : TokenPooling
        What makes the weightings.
    samples : TokenSequences
        The samples.
    standardize : bool
        Whether tokens are standardised first.
    random_state : RandomState
        What draws come from, without a `random_state` of the dictionary's own.
    sample_weight : ndarray of shape (N,), optional
        Non-negative.

    Returns
    -------
    TokenPooler
    """
    mean = scale = None
    if standardize:
        found = moments(samples, sample_weight)
        mean, scale = found.mean_, found.scale_
        samples = samples.mapped(TokenPooler([MeanWeights()], mean, scale).to(samples.device).standardized)
    own = getattr(dictionary, "random_state", None)
    weights = dictionary.make_weights(samples, random_state if own is None else check_stream(own), sample_weight)
    return TokenPooler([weights], mean, scale)


def factors_of(chunks: Iterable[tuple[slice, Tensor]], sample_weight: Tensor | None) -> Tensor:
    r"""Factors that give the pooled tokens of each weighting variance one, the mean over features.

    .. math:: f_j = \Big( \frac{1}{d} \sum_l \mathrm{Var}_i \, T_j(X_i)_l \Big)^{-1/2}

    Parameters
    ----------
    chunks : iterable of (slice, Tensor of shape (B, h, d))
        Pooled tokens of a few samples at a time.
    sample_weight : Tensor of shape (N,), optional
        Non-negative.

    Returns
    -------
    Tensor of shape (h,)
        In float64; 1 where the pooled tokens are constant.

    Examples
    --------
    >>> pooled = torch.tensor([[[2.0]], [[-2.0]]])
    >>> factors_of([(slice(0, 1), pooled[:1]), (slice(1, 2), pooled[1:])], None)
    tensor([0.5000], dtype=torch.float64)
    """
    total, mean, square = 0.0, torch.zeros(()), torch.zeros(())
    for rows, part in chunks:
        values = part.double()
        weight = values.new_ones(len(values)) if sample_weight is None else sample_weight[rows].to(values)
        size = float(weight.sum())
        if size == 0.0:
            continue
        own = torch.einsum("i,ihd->hd", weight, values) / size
        spread = torch.einsum("i,ihd->h", weight, (values - own).square())
        if total == 0.0:
            total, mean, square = size, own, spread
            continue
        step = own - mean  # Chan's update of means and squares
        square = square + spread + step.square().sum(1) * (total * size / (total + size))
        mean = mean + step * (size / (total + size))
        total += size
    variance = square / total / mean.shape[1]
    rounding = torch.finfo(torch.float32).eps * mean.square().mean(1)  # tokens may be of single precision
    return torch.where(variance > rounding, variance, 1.0).rsqrt()

"""Dictionaries of weightings of tokens, made for training samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convexformer.nn.modules.probe import TokenPooler
from convexformer.nn.modules.token_weights import MeanWeights
from convexformer_solvers.validation import shown

from .moments import Moments
from .pooling import MeanPooling, PoolingUnion, QueryPooling, TokenGates, TokenPooling, moments, scale_of, weights_by
from .sequences import TokenSequences


def default_dictionary(longest: int) -> PoolingUnion:
    """What ``dictionary="auto"`` is: the mean, 128 queries and 32 gates.

    Where the `longest` sample has one token it is the mean alone, as there is nothing to pool: the probe is a linear
    model.

    Examples
    --------
    >>> [type(part).__name__ for part in default_dictionary(longest=8).parts]
    ['MeanPooling', 'QueryPooling', 'TokenGates']
    """
    return PoolingUnion([MeanPooling()] + ([QueryPooling(128), TokenGates(32)] if longest > 1 else []))


def get_dictionary(dictionary: Any, longest: int) -> TokenPooling:
    """The pooling that a parameter ``dictionary`` means, for samples of which the `longest` has so many tokens.

    That is ``"auto"``, a pooling, or a list that stands for the ``PoolingUnion`` of its entries; ``ValueError`` if it
    is none of these.

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
        f"dictionary must be 'auto', a pooling such as TokenGates(64), or a list of poolings, got {shown(dictionary)}"
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

    With `standardize` tokens are standardised first. Draws come from `random_state`, unless the dictionary has its own.
    """
    mean = scale = None
    if standardize:
        found = moments(samples, sample_weight)
        mean, scale = found.mean, scale_of(samples, found, sample_weight)
        samples = samples.mapped(TokenPooler([MeanWeights()], mean, scale).standardized)
    return TokenPooler([weights_by(dictionary, samples, random_state, sample_weight)], mean, scale)


def factors_of(moments: Moments) -> Tensor:
    r"""Factors that give the pooled tokens of each weighting variance one, the mean over features.

    .. math:: f_j = \Big( \frac{1}{d} \sum_l \mathrm{Var}_i \, T_j(X_i)_l \Big)^{-1/2}

    Of the moments of pooled tokens ``(h, d)`` they have shape (h,), in float64; 1 where the pooled tokens are constant.

    Examples
    --------
    >>> factors_of(Moments.of(torch.tensor([[[2.0]], [[-2.0]]])))
    tensor([0.5000], dtype=torch.float64)
    """
    variance = (moments.square / moments.total).mean(1)
    rounding = torch.finfo(torch.float32).eps * moments.mean.square().mean(1)  # tokens may be of single precision
    return torch.where(variance > rounding, variance, 1.0).rsqrt()

"""Checks of samples of tokens, and what of all that users pass they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import validate_data
from torch import Tensor

from convexformer.validation import (
    FLOATS,
    HALF,
    all_finite,
    as_floats,
    as_tensor,
    check_not_empty,
    forget_names,
    mask_of,
    naming,
    refuse_dates,
    refuse_masked,
)

from .sequences import PaddedSequences, RaggedSequences, TokenSequences
from .stored import real_tokens, stored_sequences


def check_sequences(estimator: Any, X: Any, reset: bool, part: slice | None = None) -> TokenSequences:
    """Check samples of any number of tokens; the result shares the memory of ``X`` where possible.

    ``X`` is one of: an array of shape (N, n, d); a list of arrays of shapes (length, d); a pair of an array of shape
    (N, n, d) and the `lengths` of the samples, integers of shape (N,), or a `mask` of shape (N, n) that is True, or 1,
    where a token is real, or the path of one of the two; a masked array of numpy; a nested tensor of torch. An array of
    shape (N, d) is samples of one token each. What ``open_source`` takes, as a path, stands for an array of either
    shape, or a `part` of it; it is read in chunks. ``TokenSequences`` have been checked and are taken as they are.
    ``numpy.longdouble`` is converted to float64.

    ``n_features_in_`` of the estimator is set when `reset`, as in a fit, and compared otherwise. ``ValueError`` if
    ``X`` is none of these, a sample has no token, widths differ, or a token that is real is not finite; other errors
    are those of ``open_source``.
    """
    if isinstance(X, TokenSequences):
        return X
    stored = stored_sequences(X, part)
    samples = _as_sequences(estimator, X, reset) if stored is None else stored
    if len(samples) == 0 or samples.n_features == 0:
        raise ValueError(
            f"X must have at least one sample and one feature, got {len(samples)} samples of {samples.n_features} "
            "features"
        )
    if reset:
        estimator.n_features_in_ = samples.n_features
        if not hasattr(X, "columns"):  # as a data frame has, with their names
            forget_names(estimator)
    elif samples.n_features != estimator.n_features_in_:
        raise ValueError(
            f"X has {samples.n_features} features, but {type(estimator).__name__} is expecting "
            f"{estimator.n_features_in_} features as input"
        )
    empty = (samples.lengths == 0).nonzero()
    if len(empty):
        raise ValueError(
            f"{samples.place(int(empty[0]))} has no token that is real; each sample must have at least one, so leave "
            "such out"
        )
    _check_finite(samples)
    return samples


def choose_samples(X: Any, index: NDArray[np.int64]) -> Any:
    """Some of the samples, of the kind of all; ``TokenSequences`` of samples on a disk.

    Examples
    --------
    >>> choose_samples((np.zeros((3, 2, 1)), [2, 1, 2]), np.array([1]))
    (array([[[0.],
            [0.]]]), array([1]))
    """
    samples = X if isinstance(X, TokenSequences) else stored_sequences(X)
    if samples is not None:
        return samples.rows(torch.from_numpy(index))
    if _is_pair(X):
        parts = X[0], real_tokens(X)
        return tuple(part[index] if torch.is_tensor(part) else np.asarray(part)[index] for part in parts)
    if torch.is_tensor(X) and X.is_nested:
        return [X[int(i)] for i in index]
    return X[index] if torch.is_tensor(X) or isinstance(X, np.ma.MaskedArray) else _safe_indexing(X, index)


def _as_sequences(estimator: Any, X: Any, reset: bool) -> TokenSequences:
    if _is_pair(X):
        tokens = _tensor(X[0], "X[0]")
        return PaddedSequences(tokens, mask_of(real_tokens(X), len(tokens), tokens.shape[1], tokens.device))
    if isinstance(X, np.ma.MaskedArray):
        return _numpy_masked(X)
    if torch.is_tensor(X) and X.is_nested:
        X = list(X.unbind())
    if getattr(getattr(X, "dtype", None), "kind", None) == "O" and X.ndim == 1:
        X = list(X)
    if isinstance(X, (list, tuple)) and any(_n_dims(sample) >= 2 for sample in X):
        return _ragged(X)
    if getattr(X, "ndim", 0) == 3:  # as it is, be it a memory map in half precision
        tokens = _tensor(X, "X")
        check_not_empty("X", tokens.shape)
        return PaddedSequences(tokens)
    return PaddedSequences(_single_tokens(estimator, X, reset))


def _is_pair(X: Any) -> bool:
    """Whether ``X`` is an array of samples with lengths or a mask, not two samples."""
    if not (isinstance(X, tuple) and len(X) == 2):
        return False
    try:
        return np.ndim(X[0]) == 3
    except ValueError as error:
        raise ValueError(
            "X[0] must be one array of shape (n_samples, n_tokens, n_features), as X[1] says which of its tokens are "
            f"real; samples of different lengths are a list without lengths: {error}"
        ) from error


def _single_tokens(estimator: Any, X: Any, reset: bool) -> Tensor:
    """Samples of one token each, of two-dimensional data that scikit-learn's checks take."""
    if getattr(X, "ndim", 2) > 3:
        raise ValueError(f"X must have 2 or 3 dimensions (samples[, tokens], features), got {X.ndim}")
    if torch.is_tensor(X) and X.ndim == 2:
        return _tensor(X, "X")[:, None]
    refuse_masked(X, "X")  # in a list
    with naming("X"):
        X = np.asarray(X) if isinstance(X, (list, tuple)) else X
        refuse_dates(X, "X")
        array = validate_data(estimator, X, dtype=FLOATS, reset=reset)
    return as_tensor(array)[:, None]


def _tensor(X: Any, name: str) -> Tensor:
    """An array of real numbers as a tensor; half precision stays, and longdouble becomes float64 as in scikit-learn."""
    if isinstance(X, np.ndarray) and X.dtype == np.longdouble:
        X = X.astype(np.float64)
    tensor = as_tensor(X, name=name).detach()
    if tensor.is_complex():
        raise ValueError(f"{name} must hold real numbers, got {tensor.dtype}")
    return tensor if tensor.dtype in HALF else as_floats(tensor)


def _numpy_masked(X: np.ma.MaskedArray) -> PaddedSequences:
    hidden = np.ma.getmaskarray(X)
    if X.ndim != 3:
        raise ValueError(f"X, a masked array, must have shape (n_samples, n_tokens, n_features), got {X.shape}")
    if (hidden.any(2) != hidden.all(2)).any():
        raise ValueError("X, a masked array, must mask whole tokens; it masks some features of a token alone")
    return PaddedSequences(_tensor(X.data, "X"), torch.as_tensor(~hidden.any(2)))


def _n_dims(sample: Any) -> int:
    try:
        return int(np.ndim(sample))
    except ValueError as error:
        raise ValueError(f"X must hold samples of shape (length, n_features): {error}") from error


def _ragged(X: Sequence[ArrayLike | Tensor]) -> RaggedSequences:
    samples = [_tensor(sample, f"X[{i}]") for i, sample in enumerate(X)]
    for i, sample in enumerate(samples):
        if sample.ndim != 2:
            raise ValueError(
                f"X[{i}] must have shape (length, n_features), got {tuple(sample.shape)}; a pair of an array and "
                "lengths or a mask is a tuple"
            )
        if sample.shape[1] != samples[0].shape[1]:
            raise ValueError(f"X[{i}] has tokens of width {sample.shape[1]}, but X[0] of {samples[0].shape[1]}")
        if sample.device != samples[0].device:
            raise ValueError(
                f"X must hold samples on one device, got X[{i}] on {sample.device} and X[0] on {samples[0].device}"
            )
    common = reduce(torch.promote_types, {sample.dtype for sample in samples})
    return RaggedSequences([sample.to(common) for sample in samples])


def _check_finite(samples: TokenSequences) -> None:
    for rows, tokens, _ in samples.chunks():
        if not all_finite(tokens):
            sample = rows.start + int((~torch.isfinite(tokens)).flatten(1).any(1).nonzero()[0])
            raise ValueError(f"Input X contains NaN or infinity, in a token of {samples.place(sample)}")

"""From what users have to arrays of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from convexformer.validation import check_real, is_integer, without_tensor


def pad_sequences(sequences: Sequence[ArrayLike], n_tokens: int | None = None) -> NDArray[np.floating]:
    """Stack sequences of differing lengths into one array, short ones filled up with zero rows.

    A zero row adds nothing to any prediction, so padding changes no linear model; a gate may be moved by longer data.

    Parameters
    ----------
    sequences : sequence of array-like of shape (length, n_features)
        One array per sample.
    n_tokens : int, optional
        Tokens per sample in the result. Default: the longest length. Longer sequences are an error, never cut.

    Returns
    -------
    ndarray of shape (n_samples, n_tokens, n_features)
        In the common floating dtype of the sequences.

    Raises
    ------
    ValueError
        If a sequence is not two-dimensional, widths differ, or one is longer than ``n_tokens``.

    Examples
    --------
    >>> pad_sequences([[[1.0], [2.0]], [[3.0]]])[:, :, 0]
    array([[1., 2.],
           [3., 0.]])
    """
    given = [without_tensor(sequence, f"sequences[{i}]") for i, sequence in enumerate(sequences)]
    try:
        arrays = [np.asarray(sequence) for sequence in given]
    except ValueError as error:
        raise ValueError(f"sequences must each be an array of shape (length, n_features): {error}") from error
    if not arrays:
        raise ValueError("sequences must hold at least one sequence, got none")
    for i, array in enumerate(arrays):
        if array.ndim != 2:
            raise ValueError(f"sequences[{i}] must have shape (length, n_features), got {array.shape}")
    widths = {array.shape[1] for array in arrays}
    if len(widths) != 1:
        raise ValueError(f"sequences must all have the same number of features, got {sorted(widths)}")
    lengths = np.array([len(array) for array in arrays])
    longest = int(lengths.max())
    if n_tokens is None:
        n_tokens = longest
    elif not is_integer(n_tokens):
        raise ValueError(f"n_tokens must be an integer or None, got {n_tokens!r}")
    elif longest > n_tokens:
        raise ValueError(f"n_tokens={n_tokens} is less than the longest sequence, {longest}; cut or split it yourself")
    rows = np.concatenate(arrays)
    check_real("sequences", rows)
    try:
        padded = np.zeros((len(arrays), n_tokens, widths.pop()), dtype=_float_type(rows))
    except ValueError as error:
        raise ValueError(f"n_tokens must be small enough for an array to hold so many, got {n_tokens}") from error
    padded[np.arange(n_tokens) < lengths[:, None]] = rows
    return padded


def image_patches(images: ArrayLike, patch_size: int) -> NDArray[np.floating]:
    """Cut images into square patches, one token each, row by row.

    Parameters
    ----------
    images : array-like of shape (n_samples, height, width)
        Grey images; integers become float64. Of several channels cut each by itself and join the patches along axis 2.
    patch_size : int
        Side of a patch in pixels; divides height and width.

    Returns
    -------
    ndarray of shape (n_samples, n_patches, patch_size ** 2)

    Raises
    ------
    ValueError
        If the images are not three-dimensional or the patch does not divide them.

    Examples
    --------
    >>> image_patches(np.arange(16.0).reshape(1, 4, 4), 2)[0]
    array([[ 0.,  1.,  4.,  5.],
           [ 2.,  3.,  6.,  7.],
           [ 8.,  9., 12., 13.],
           [10., 11., 14., 15.]])
    """
    try:
        array = np.asarray(without_tensor(images, "images"))
    except ValueError as error:
        raise ValueError(f"images must be an array of shape (n_samples, height, width): {error}") from error
    if array.ndim != 3 or 0 in array.shape:
        raise ValueError(
            f"images must have shape (n_samples, height, width), with at least one of each, got {array.shape}; of "
            "several channels cut each by itself and join the patches along axis 2"
        )
    check_real("images", array)
    n, height, width = array.shape
    if not is_integer(patch_size, 1) or height % patch_size or width % patch_size:
        raise ValueError(f"patch_size must be an integer that divides {height} x {width} images, got {patch_size!r}")
    tiles = array.reshape(n, height // patch_size, patch_size, width // patch_size, patch_size)
    return tiles.transpose(0, 1, 3, 2, 4).reshape(n, -1, patch_size**2).astype(_float_type(array), copy=False)


def _float_type(array: NDArray) -> np.dtype:
    """The precision of an array, float64 for integers."""
    return array.dtype if np.issubdtype(array.dtype, np.floating) else np.dtype(np.float64)

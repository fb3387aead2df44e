"""scikit-learn's digits as sequences of patches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from convexformer.preprocessing import image_patches


def load_digit_tokens(patch_size: int = 2) -> tuple[NDArray[np.floating], NDArray[np.integer]]:
    """Load the 8 x 8 digits of scikit-learn, each as a sequence of square patches read row by row.

    Parameters
    ----------
    patch_size : {1, 2, 4, 8}, default=2
        Side of a patch; 2 gives 16 tokens of width 4.

    Returns
    -------
    tokens : ndarray of shape (1797, n_tokens, patch_size ** 2)
        Grey values scaled to between 0 and 1.
    labels : ndarray of shape (1797,)
        Digits 0 to 9.

    Examples
    --------
    >>> tokens, labels = load_digit_tokens()
    >>> tokens.shape, labels[:3]
    ((1797, 16, 4), array([0, 1, 2]))
    """
    digits = load_digits()
    return image_patches(digits.images / 16.0, patch_size), digits.target

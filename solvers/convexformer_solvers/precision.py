"""Precisions by their names."""

from __future__ import annotations

from typing import Any

import torch

PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


def as_dtype(dtype: Any) -> torch.dtype:
    """The precision of a name, or the one given.

    Parameters
    ----------
    dtype : torch.dtype or str
        ``"float32"``, ``"float64"``, with or without ``"torch."``, or a floating-point type of torch.

    Returns
    -------
    torch.dtype

    Raises
    ------
    ValueError
        If it is neither.

    Examples
    --------
    >>> as_dtype("float64")
    torch.float64
    """
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    if isinstance(dtype, str) and dtype.removeprefix("torch.") in PRECISIONS:
        return PRECISIONS[dtype.removeprefix("torch.")]
    raise ValueError(f"dtype must be 'float32', 'float64' or a floating-point type of torch, got {dtype!r}")

"""Attention weights in the unit simplex, and the free parameters that optimisers change instead of them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from convexformer.validation import is_one_of

Simplex = Literal["softmax", "projection"]


def project_to_simplex(rows: Tensor) -> Tensor:
    """Euclidean projection of each row on the unit simplex; differentiable almost everywhere.

    Parameters
    ----------
    rows : Tensor of shape (..., n)
        Any numbers.

    Returns
    -------
    Tensor of shape (..., n)
        Non-negative rows that sum to 1; rows of the simplex come back unchanged. A row whose largest
        number is not finite becomes NaN.

    Examples
    --------
    >>> project_to_simplex(torch.tensor([[2.0, 0.0], [0.25, 0.75]]))
    tensor([[1.0000, 0.0000],
            [0.2500, 0.7500]])
    """
    rows = rows - rows.detach().amax(-1, keepdim=True)  # a common shift changes nothing, and large numbers lose the 1
    ordered = rows.sort(dim=-1, descending=True).values
    counts = torch.arange(1, rows.shape[-1] + 1, device=rows.device, dtype=rows.dtype)
    excess = ordered.cumsum(-1) - 1
    support = (ordered * counts > excess).sum(-1, keepdim=True).clamp(min=1)
    threshold = excess.gather(-1, support - 1) / support
    return (rows - threshold).clamp(min=0)


def into_simplex(free: Tensor, simplex: Simplex) -> Tensor:
    """Rows of the simplex that free parameters stand for.

    Parameters
    ----------
    free : Tensor of shape (..., n)
        Free parameters.
    simplex : {"softmax", "projection"}
        Softmax has gradients everywhere but never an exact zero; the Euclidean projection has exact zeros and no
        gradient outside its support.

    Returns
    -------
    Tensor of shape (..., n)

    Examples
    --------
    >>> into_simplex(torch.tensor([0.0, 0.0]), "softmax")
    tensor([0.5000, 0.5000])
    """
    return torch.softmax(free, -1) if simplex == "softmax" else project_to_simplex(free)


def first_free(logits: Tensor, simplex: Simplex) -> Tensor:
    """Free parameters that stand for the softmax of ``logits`` in either form.

    Parameters
    ----------
    logits : Tensor of shape (..., n)
        Any numbers.
    simplex : {"softmax", "projection"}
        As in ``into_simplex``. The projection starts on the simplex, where every token has a gradient.

    Returns
    -------
    Tensor of shape (..., n)

    Raises
    ------
    ValueError
        If ``simplex`` is neither.

    Examples
    --------
    >>> first_free(torch.zeros(2), "projection")
    tensor([0.5000, 0.5000])
    """
    if not is_one_of(simplex, ("softmax", "projection")):
        raise ValueError(f"simplex must be 'softmax' or 'projection', got {simplex!r}")
    return logits if simplex == "softmax" else torch.softmax(logits, -1)

"""Which tokens of a sample interact: complete or given undirected graphs, and padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convexformer_solvers.validation import check_tensor


def check_graph(graph: Any) -> Tensor | None:
    """A graph as a boolean matrix without self-loops, or None for the complete graph.

    Parameters
    ----------
    graph : Tensor of bool of shape (n, n), or None
        True for pairs of tokens that interact. The diagonal is ignored: whether a token attends to itself follows from
        the mode of the attention.

    Returns
    -------
    Tensor or None

    Raises
    ------
    TypeError
        If `graph` is no boolean tensor.
    ValueError
        If it is no square matrix, or is not symmetric, as causal masks are not.

    Examples
    --------
    >>> check_graph(torch.ones(2, 2, dtype=torch.bool))
    tensor([[False,  True],
            [ True, False]])
    """
    if graph is None:
        return None
    if not torch.is_tensor(graph) or graph.dtype != torch.bool:
        raise TypeError(f"graph must be a boolean tensor or None, got {getattr(graph, 'dtype', type(graph).__name__)}")
    if graph.ndim != 2 or graph.shape[0] != graph.shape[1]:
        raise ValueError(f"graph must have shape (n_tokens, n_tokens), got {tuple(graph.shape)}")
    if not torch.equal(graph, graph.mT):
        raise ValueError(
            "graph must be symmetric: an energy of pairs of tokens has undirected edges, so a causal or otherwise "
            "directed mask has no such energy and no theorem of descent applies; give graph | graph.T"
        )
    return graph & ~torch.eye(len(graph), dtype=torch.bool, device=graph.device)


def check_floats(name: str, values: Any) -> None:
    """Raise an error unless the argument of that name is a tensor of floating-point numbers."""
    check_tensor(name, values)
    if not values.is_floating_point():
        raise ValueError(f"{name} must hold floating-point numbers, such as float64, got {values.dtype}")


def check_last_sizes(name: str, values: Any, n_tokens: int | None = None, n_features: int | None = None) -> None:
    """Raise an error unless the argument of that name holds tokens of such sizes; those that are None may be any.

    Examples
    --------
    >>> check_last_sizes("anchor", torch.zeros(2, 5, 4), 5, 4)
    >>> check_last_sizes("anchor", torch.zeros(2, 5, 4), n_features=3)
    Traceback (most recent call last):
        ...
    ValueError: anchor must have shape (..., n_tokens, 3), got (2, 5, 4)
    """
    check_floats(name, values)
    sizes = {"n_tokens": n_tokens, "n_features": n_features}
    fits = (size in (None, found) for size, found in zip(sizes.values(), values.shape[-2:], strict=False))
    if values.ndim < 2 or not all(fits):
        wanted = ", ".join(size if known is None else str(known) for size, known in sizes.items())
        raise ValueError(f"{name} must have shape (..., {wanted}), got {tuple(values.shape)}")


def check_attention_mask(mask: Any, shape: tuple[int, ...]) -> Tensor | None:
    """A padding mask as a boolean tensor, or None where no sample is padded.

    Parameters
    ----------
    mask : Tensor of shape (..., n), or None
        True or 1 for tokens, False or 0 for padding, as the attention masks of Hugging Face tokenizers.
    shape : tuple of int
        That of the tokens, ``(..., n, d)``.

    Returns
    -------
    Tensor of bool or None

    Raises
    ------
    TypeError
        If the mask is no tensor.
    ValueError
        If it is not of that shape, holds anything but 0 and 1, or a sample has no token. ``torch.compile`` and
        ``torch.export`` leave out what depends on entries.

    Examples
    --------
    >>> check_attention_mask(torch.tensor([[1, 1, 0]]), (1, 3, 5))
    tensor([[ True,  True, False]])
    """
    if mask is None:
        return None
    if not torch.is_tensor(mask):
        raise TypeError(f"attention_mask must be a tensor or None, got {type(mask).__name__}")
    if mask.shape != shape[:-1]:
        raise ValueError(
            f"attention_mask must have shape {tuple(shape[:-1])}, one entry per token, got {tuple(mask.shape)}; "
            "a mask of pairs of tokens is the argument graph"
        )
    present = mask.bool()
    if torch.compiler.is_compiling():  # a graph knows no entries
        return present
    if not bool((present == mask).all()):
        raise ValueError("attention_mask must hold 0 and 1, or False and True, alone")
    if not bool(present.any(-1).all()):
        raise ValueError("attention_mask must leave at least one token of every sample")
    return present


def without_padding(tokens: Tensor, present: Tensor | None) -> Tensor:
    """Tokens with zero rows for padding, whatever it holds.

    Examples
    --------
    >>> without_padding(torch.tensor([[1.0], [float("nan")]]), torch.tensor([True, False])).T
    tensor([[1., 0.]])
    """
    return tokens if present is None else tokens.masked_fill(~present[..., None], 0)


def neighbours(tokens: Tensor, graph: Tensor | None, present: Tensor | None) -> Tensor:
    """Pairs of different tokens that interact, as a boolean tensor that broadcasts to ``(..., n, n)``.

    Examples
    --------
    >>> neighbours(torch.zeros(2, 1), None, None)
    tensor([[False,  True],
            [ True, False]])
    """
    n = tokens.shape[-2]
    if graph is None:
        pairs = ~torch.eye(n, dtype=torch.bool, device=tokens.device)
    elif graph.shape != (n, n):
        raise ValueError(f"graph must be that of {n} tokens, got one of {len(graph)}")
    else:
        pairs = graph
    return pairs if present is None else pairs & present[..., :, None] & present[..., None, :]


def centred(tokens: Tensor, present: Tensor | None) -> Tensor:
    """Tokens less their mean; padding is left out of it, and zero.

    Examples
    --------
    >>> centred(torch.tensor([[1.0], [3.0], [float("nan")]]), torch.tensor([True, True, False])).T
    tensor([[-1.,  1.,  0.]])
    """
    check_floats("tokens", tokens)
    if present is None:
        return tokens - tokens.mean(-2, keepdim=True)
    count = present.sum(-1)[..., None, None].clamp_min(1)
    return without_padding(tokens - without_padding(tokens, present).sum(-2, keepdim=True) / count, present)


def half_squared_distances(tokens: Tensor, present: Tensor | None = None) -> Tensor:
    """Half the squared distances of all pairs of tokens, ``(..., n, n)``; those of padding mean nothing.

    Tokens are centred first, so that a common shift costs no digits.

    Examples
    --------
    >>> half_squared_distances(torch.tensor([[1.0], [3.0]]))
    tensor([[0., 2.],
            [2., 0.]])
    """
    tokens = centred(tokens, present)
    products = tokens @ tokens.mT
    squares = products.diagonal(dim1=-2, dim2=-1) / 2
    return (squares[..., :, None] + squares[..., None, :] - products).clamp_min(0)

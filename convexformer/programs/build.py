"""The one place where the convex programs of attention networks are put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from convexformer_solvers import DenseMap, LinearMap, Loss, Penalty, Program, TableMap

if TYPE_CHECKING:  # gates are generated with programs
    from convexformer.gates.base import Gates


def attention_map(
    tokens: Tensor | LinearMap, gates: Gates | None = None, masks: Tensor | None = None, n_outputs: int = 1
) -> LinearMap:
    """Linear map from coefficients to the outputs of the network; the gated design is never materialised.

    Where gated tokens repeat between samples, as symbols do, what they share is computed once.

    Parameters
    ----------
    tokens : Tensor of shape (N, n_tokens, n_features) or LinearMap
        The samples, or the map without gates of those that are not in one tensor.
    gates : Gates, optional
        Fixed gates. Default: none.
    masks : Tensor of shape (N, h), bool, optional
        Which samples each of the ``h`` gates lets through. Default: those of `gates`.
    n_outputs : int, default=1
        Outputs ``c`` of the products to come, by which the way to compute them is chosen; all give the same.

    Returns
    -------
    LinearMap
        With ``feature_shape`` ``(n_tokens, n_features)``, or ``(h, n_tokens, n_features)`` with gates.

    Raises
    ------
    ValueError
        If the widths of `gates` are not those of the tokens.

    Examples
    --------
    >>> import torch
    >>> from convexformer.gates import Gates
    >>> tokens = torch.randn(40, 5, 3)
    >>> gated = attention_map(tokens, Gates(torch.randn(8, 5), torch.randn(8, 3)))
    >>> gated.feature_shape, gated.matvec(torch.zeros(8, 5, 3, 2)).shape
    ((8, 5, 3), torch.Size([40, 2]))
    """
    if masks is None and gates is not None:
        masks = gates.masks(tokens)
    if isinstance(tokens, LinearMap):
        return tokens if masks is None else tokens.gated(masks)
    return DenseMap(tokens) if masks is None else TableMap.where_it_pays(tokens, masks, n_outputs)


def build_program(
    tokens: Tensor | LinearMap,
    target: Tensor,
    loss: Loss,
    penalty: Penalty,
    alpha: float,
    sample_weight: Tensor | None,
    fit_intercept: bool,
    masks: Tensor | None = None,
) -> Program:
    """The program of a network, from parts that have been checked; its formula is in ``attention_program``.

    Parameters
    ----------
    tokens : Tensor of shape (N, n_tokens, n_features) or LinearMap
        The samples, as in ``attention_map``.
    target : Tensor of shape (N, c)
        Targets as the loss wants them.
    loss, penalty : Loss, Penalty
        The parts.
    alpha : float
        Weight of the penalty.
    sample_weight : Tensor of shape (N,) or None
        Weights.
    fit_intercept : bool
        Whether there is a bias.
    masks : Tensor of shape (N, h), bool, optional
        Masks of the gates.

    Returns
    -------
    Program
    """
    linear_map = attention_map(tokens, masks=masks, n_outputs=target.shape[-1])
    return Program(linear_map, target, loss, penalty, alpha, sample_weight, fit_intercept)

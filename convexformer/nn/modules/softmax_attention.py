"""The usual softmax self-attention layer, the baseline of the convex forms."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from convexformer.validation import check_flag, check_one_of, check_positive, is_integer, is_one_of
from convexformer_solvers import Penalty
from convexformer_solvers.validation import check_counts

from .base import AttentionNetwork, as_arguments, check_tokens_for, normal_draws

Position = int | Literal["mean"] | None
DecayOn = Literal["all", "values", "none"]

_DECAYED = {"all": ("wq", "wk", "wv", "wo"), "values": ("wv", "wo"), "none": ()}


class SoftmaxAttention(AttentionNetwork):
    r"""Softmax self-attention with several heads (paper [C], eq. 3).

    .. math:: F(X) = b + \sum_h \mathrm{softmax}\big(s \, X W_{qh} W_{kh}^\top X^\top\big) X W_{vh} W_{oh}

    **A different model** from ``ConvexAttention``: how tokens are mixed depends on the input, whereas there one
    attention vector serves all samples. No bound of the convex programs applies to it; compare losses on held-out
    data. Zero rows that pad a sample take part in the attention.

    Parameters
    ----------
    n_features, n_outputs : int
        Shape of the data: ``d`` and ``c``, which is 1 by default. Samples may have any number of tokens.
    n_heads : int, default=4
        Number of heads.
    head_width : int, optional
        Columns of ``Wq``, ``Wk`` and ``Wv`` of each head. Default: ``n_features // n_heads``, at least 1, as usual in
        transformers.
    position : int, "mean" or None, default=None
        Rows of the output that are predicted. None: all, predictions of shape ``(N, n, c)``. A position: that row
        alone, ``(N, c)``, no other query being computed; negative ones count from the last token. ``"mean"``: the
        mean over rows, ``(N, c)``.
    decay_on : {"all", "values", "none"}, default="all"
        Weights that have decay: all four as in [C], ``Wv`` and ``Wo`` only, or none.
    scale : float, optional
        Factor ``s`` of the scores. Default: ``1 / sqrt(head_width)``, which keeps scores of order one at the initial
        weights whatever the width; eq. (3) prints none, which is ``1.0``. The factor changes no set of functions, but
        what decay on ``Wq`` and ``Wk`` costs.
    bias : bool, default=True
        Whether there is a bias per output, shared by all rows, without decay.
    seed : int, default=0
        Seed of the initial weights.

    Raises
    ------
    ValueError
        If a size is not a positive integer, or ``position``, ``decay_on`` or ``scale`` is none of the above.

    Examples
    --------
    >>> tokens = torch.zeros(5, 4, 6)
    >>> SoftmaxAttention(6, 2, n_heads=3)(tokens).shape
    torch.Size([5, 4, 2])
    >>> network = SoftmaxAttention(6, 2, n_heads=3, position=0)
    >>> network(tokens).shape, network.attention(tokens).shape
    (torch.Size([5, 2]), torch.Size([5, 3, 1, 4]))
    """

    def __init__(
        self,
        n_features: int,
        n_outputs: int = 1,
        n_heads: int = 4,
        head_width: int | None = None,
        position: Position = None,
        decay_on: DecayOn = "all",
        scale: float | None = None,
        bias: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_counts(n_features=n_features, n_outputs=n_outputs, n_heads=n_heads)
        head_width = max(1, n_features // n_heads) if head_width is None else head_width
        check_counts(head_width=head_width)
        check_one_of(sorted(_DECAYED), decay_on=decay_on)
        check_position(position)
        check_flag(bias, "bias")
        if scale is not None:
            check_positive(scale=scale)
        normal = normal_draws(seed)
        self.position = position
        self.decay_on = decay_on
        self.scale = 1 / math.sqrt(head_width) if scale is None else scale
        into_head = (n_heads, n_features, head_width)
        self.wq = nn.Parameter(normal(*into_head) / math.sqrt(n_features))  # (H, d, w)
        self.wk = nn.Parameter(normal(*into_head) / math.sqrt(n_features))  # (H, d, w)
        self.wv = nn.Parameter(normal(*into_head) / math.sqrt(n_features))  # (H, d, w)
        self.wo = nn.Parameter(normal(n_heads, head_width, n_outputs) / math.sqrt(n_heads * head_width))  # (H, w, c)
        self.bias = nn.Parameter(torch.zeros(n_outputs)) if bias else None  # (c,)

    def extra_repr(self) -> str:
        """Sizes and choices, as ``repr`` of the module shows them."""
        n_heads, n_features, head_width = self.wq.shape
        return as_arguments(
            n_features=n_features,
            n_outputs=self.wo.shape[2],
            n_heads=n_heads,
            head_width=head_width,
            position=self.position,
            decay_on=self.decay_on,
            scale=None if self.scale == 1 / math.sqrt(head_width) else self.scale,
            bias=self.bias is not None,
        )

    def attention(self, tokens: Tensor) -> Tensor:
        """Attention weights; rows are in the simplex.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples.

        Returns
        -------
        Tensor of shape (N, n_heads, n, n) or (N, n_heads, 1, n)
            Queries by keys: every query for ``position=None``, one row otherwise, that of the position or the mean
            over rows.

        Raises
        ------
        ValueError
            If the samples have no token at ``position``, or features of another number.
        """
        check_tokens_for(self.wq, tokens, None, self.wq.shape[1])
        queries = torch.einsum("iqd,hdw->ihqw", self._queried(tokens), self.wq)
        if queries.shape[2] == 1:  # through the features takes fewer products than keys of all tokens
            scores = torch.einsum("ihqd,ikd->ihqk", torch.einsum("ihqw,hdw->ihqd", queries, self.wk), tokens)
        else:
            scores = queries @ torch.einsum("ikd,hdw->ihkw", tokens, self.wk).transpose(-1, -2)
        weights = torch.softmax(self.scale * scores, -1)
        return weights.mean(2, keepdim=True) if self.position == "mean" else weights

    def _queried(self, tokens: Tensor) -> Tensor:
        """Tokens whose queries are needed."""
        if not is_integer(self.position):
            return tokens
        if not -tokens.shape[1] <= self.position < tokens.shape[1]:
            raise ValueError(f"position must be one of the {tokens.shape[1]} tokens, got {self.position}")
        return tokens[:, self.position, None]

    def forward(self, tokens: Tensor) -> Tensor:
        """Predictions.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples.

        Returns
        -------
        Tensor of shape (N, n, c) or (N, c)
            As ``position`` says.

        Raises
        ------
        ValueError
            If the samples have no token at ``position``.
        """
        weights = self.attention(tokens)
        if weights.shape[2] == 1:  # one row: mixing tokens first takes fewer products than values of all tokens
            mixed = torch.einsum("ihqd,hdw->ihqw", torch.einsum("ihqk,ikd->ihqd", weights, tokens), self.wv)
        else:
            mixed = weights @ torch.einsum("ikd,hdw->ihkw", tokens, self.wv)  # (N, H, n, w)
        pred = mixed.transpose(1, 2).flatten(2) @ self.wo.flatten(0, 1)  # (N, n or 1, c)
        pred = pred if self.position is None else pred[:, 0]
        return pred if self.bias is None else pred + self.bias

    def decay(self, penalty: str | Penalty | None = None) -> Tensor:
        """Half the sum of squares of the weights that ``decay_on`` names.

        Parameters
        ----------
        penalty : str or Penalty, optional
            Ignored: the decay is this network's own. Taken so that all networks train by the same call.

        Returns
        -------
        Tensor
            A scalar with gradients.
        """
        decayed = [getattr(self, name).square().sum() for name in _DECAYED[self.decay_on]]
        return 0.5 * torch.stack(decayed).sum() if decayed else self.wv.new_zeros(())


def check_position(position: Position) -> None:
    """Raise ``ValueError`` when ``position`` is no position, "mean" or None."""
    if not (position is None or is_one_of(position, ("mean",)) or is_integer(position)):
        raise ValueError(f"position must be an integer, 'mean' or None, got {position!r}")

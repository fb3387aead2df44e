"""Unfolded transformers with a readout of convex-attention heads, as networks that ``train`` trains."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from convexformer.nn import AttentionNetwork, ConvexAttention
from convexformer.nn.modules.base import draw_seed, seeded_parts
from convexformer.validation import check_one_of
from convexformer_solvers import Penalty
from convexformer_solvers.validation import check_counts, check_tensor

from .layers import UnfoldedTransformer

Pooling = Literal["mean", "tokens"]
POOLINGS = ("mean", "tokens")


def padding_mask(tokens: Tensor) -> Tensor:
    """Which tokens are real: all up to the last that is not zero, and at least the first.

    Parameters
    ----------
    tokens : Tensor of shape (N, n, d)
        Samples that are filled up with zero rows, as by ``pad_sequences``.

    Returns
    -------
    Tensor of bool of shape (N, n)

    Raises
    ------
    TypeError
        If `tokens` is no tensor.
    ValueError
        If it has another number of dimensions.

    Examples
    --------
    >>> import torch
    >>> padding_mask(torch.tensor([[[1.0], [0.0], [2.0], [0.0]]]))
    tensor([[ True,  True,  True, False]])
    """
    check_tensor("tokens", tokens)
    if tokens.ndim != 3:
        raise ValueError(f"tokens must have shape (n_samples, n_tokens, n_features), got {tuple(tokens.shape)}")
    nonzero = (tokens != 0).any(-1)
    present = nonzero.flip(1).cummax(1).values.flip(1)
    present[:, 0] = True
    return present


class UnfoldedNetwork(AttentionNetwork):
    r"""An unfolded transformer whose last tokens are read by convex-attention heads.

    .. math:: f(X) = \mathrm{readout}\big(Y^{(L)}\big), \qquad Y^{(0)} = X \;\text{ or }\; X V + 1 v^\top

    The readout is a ``ConvexAttention`` on the last tokens, or on their mean. With the layers fixed, training it is
    a convex program: ``optimality_gap(network.readout, network.features(X), y, alpha=...)`` says how far it is from its
    global optimum and gives that optimum.

    Parameters
    ----------
    n_tokens, n_features, n_outputs : int
        Shape of the data; `n_outputs` is 1 by default.
    width : int, optional
        Width of the tokens in the layers, to which a linear map with bias takes the input. Default: that of the data,
        without a map.
    pooling : {"mean", "tokens"}, default="mean"
        What the readout sees: the mean over tokens, padding left out, which does not depend on their order; or all
        tokens by position.
    n_heads : int, default=32
        Heads of the readout.
    padded : bool, default=True
        Whether zero rows after the last nonzero token of a sample are padding.
    seed : int, default=0
        Of all initial weights.
    **options
        Arguments of ``UnfoldedTransformer``: `n_layers`, `mode`, `shared`, `anchored` and those of its layers.

    Attributes
    ----------
    transformer : UnfoldedTransformer
        The layers.
    readout : ConvexAttention
        The heads; to be replaced by others of the same sizes but their number.

    Raises
    ------
    ValueError
        If an argument is not as described.

    Examples
    --------
    >>> import torch
    >>> network = UnfoldedNetwork(5, 4, 2, n_layers=3, mode="joint", anchored=True)
    >>> network(torch.rand(3, 5, 4)).shape, network.features(torch.rand(3, 5, 4)).shape
    (torch.Size([3, 2]), torch.Size([3, 1, 4]))
    """

    def __init__(
        self,
        n_tokens: int,
        n_features: int,
        n_outputs: int = 1,
        *,
        width: int | None = None,
        pooling: Pooling = "mean",
        n_heads: int = 32,
        padded: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        check_counts(n_tokens=n_tokens, n_features=n_features, n_outputs=n_outputs, n_heads=n_heads)
        check_one_of(POOLINGS, pooling=pooling)
        self.embedding: nn.Linear | None = None
        with seeded_parts(self, seed):
            if width is not None:
                check_counts(width=width)
                self.embedding = nn.Linear(n_features, width)
            inner, read = n_features if width is None else width, 1 if pooling == "mean" else n_tokens
            self.transformer = UnfoldedTransformer(inner, seed=draw_seed(), **options)
            self.readout = ConvexAttention(read, inner, n_outputs, n_heads, seed=draw_seed())
        self.pooling, self.padded = pooling, padded

    def prepared(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Tokens and, where they may be padded, which of them are real."""
        return (tokens, padding_mask(tokens)) if self.padded else (tokens,)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Tokens as the layers get them.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples.

        Returns
        -------
        Tensor of shape (N, n, width)
        """
        return tokens if self.embedding is None else self.embedding(tokens)

    def features(self, tokens: Tensor, attention_mask: Tensor | None = None, *, n_layers: int | None = None) -> Tensor:
        """What the readout sees: a data set of tokens for the convex programs.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples.
        attention_mask : Tensor of shape (N, n), optional
            1 for tokens, 0 for padding. Default: as ``prepared`` finds.
        n_layers : int, optional
            Layers to run, as in ``UnfoldedTransformer.forward``.

        Returns
        -------
        Tensor of shape (N, 1, width) or (N, n, width)
        """
        if attention_mask is None and self.padded:
            attention_mask = padding_mask(tokens)
        last = self.transformer(self.embedded(tokens), attention_mask, n_layers=n_layers)
        if self.pooling == "tokens":
            return last
        count = last.shape[1] if attention_mask is None else attention_mask.sum(1)[:, None, None]
        return last.sum(1, keepdim=True) / count

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Predictions.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples.
        attention_mask : Tensor of shape (N, n), optional
            1 for tokens, 0 for padding. Default: as ``prepared`` finds.

        Returns
        -------
        Tensor of shape (N, c)
        """
        return self.readout(self.features(tokens, attention_mask))

    def decay(self, penalty: str | Penalty | None = None) -> Tensor:
        """Weight decay of the readout, as of ``ConvexAttention``; the layers have none."""
        return self.readout.decay(penalty)

"""The usual transformer on symbols, a baseline of the convex forms."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from convexformer.validation import check_one_of
from convexformer_solvers.validation import check_counts

from .base import draw_seed, seeded_parts
from .embedding import SymbolNetwork, TokenEmbedding


class SoftmaxTransformer(SymbolNetwork):
    r"""Transformer with softmax attention, pre-norm layers and learned embeddings, as grokking is studied with.

    **Not a convex form**: no certificate applies to it. Each of its layers is
    ``torch.nn.TransformerEncoderLayer(norm_first=True, dropout=0)``

    .. math:: X \leftarrow X + \mathrm{attention}(\mathrm{norm}(X)), \qquad
              X \leftarrow X + \mathrm{feedforward}(\mathrm{norm}(X))

    on tokens that are the embedding of the symbol plus that of the position; a last norm and a linear map with bias
    read out. Every token attends to every other, there being nothing to hide: of a layer whose last position is read,
    a causal mask would change nothing.

    Parameters
    ----------
    n_symbols, n_tokens, n_outputs : int
        Symbols ``V``, symbols per sample ``n`` and outputs ``c``.
    n_layers : int, default=1
        Number of layers.
    width : int, default=128
        Width of the tokens, a multiple of ``n_heads``.
    n_heads : int, default=4
        Attention heads of each layer.
    hidden_width : int, optional
        Hidden width of the feed-forward parts. Default: ``4 * width``, as usual.
    activation : {"relu", "gelu"}, default="relu"
        Of the feed-forward parts.
    readout : {"last", "mean"}, default="last"
        What is read: the last token, as in models that predict the next one, or the mean over tokens.
    seed : int, default=0
        Of the initial weights: distributed as in ``TokenEmbedding`` for symbols and positions, as torch's own for
        the rest. The global generators of torch are neither used nor changed.

    Raises
    ------
    ValueError
        If a size is not a positive integer, ``width`` is no multiple of ``n_heads``, or ``activation`` or ``readout``
        is none of the above.

    References
    ----------
    Power, Burda, Edwards, Babuschkin, Misra, "Grokking: generalization beyond overfitting on small algorithmic
    datasets", 2022.

    Examples
    --------
    >>> network = SoftmaxTransformer(n_symbols=97, n_tokens=2, n_outputs=97)
    >>> network(torch.tensor([[3, 5], [96, 1]])).shape
    torch.Size([2, 97])
    """

    def __init__(
        self,
        n_symbols: int,
        n_tokens: int,
        n_outputs: int,
        n_layers: int = 1,
        width: int = 128,
        n_heads: int = 4,
        hidden_width: int | None = None,
        activation: Literal["relu", "gelu"] = "relu",
        readout: Literal["last", "mean"] = "last",
        seed: int = 0,
    ) -> None:
        super().__init__()
        hidden_width = 4 * width if hidden_width is None else hidden_width
        check_counts(n_outputs=n_outputs, n_layers=n_layers, width=width, n_heads=n_heads, hidden_width=hidden_width)
        if width % n_heads:
            raise ValueError(f"width must be a multiple of n_heads={n_heads}, got {width}")
        check_one_of(("relu", "gelu"), activation=activation)
        check_one_of(("last", "mean"), readout=readout)
        self.readout = readout
        with seeded_parts(self, seed):
            self.embedding = TokenEmbedding(n_symbols, n_tokens, width, shared=True, seed=draw_seed())
            self.position = nn.Parameter(torch.randn(n_tokens, width) / math.sqrt(width))  # (n, d)
            layers = [
                nn.TransformerEncoderLayer(
                    width, n_heads, hidden_width, dropout=0.0, activation=activation, batch_first=True, norm_first=True
                )
                for _ in range(n_layers)
            ]
            self.layers = nn.Sequential(*layers, nn.LayerNorm(width))
            self.output = nn.Linear(width, n_outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predictions.

        Parameters
        ----------
        tokens : Tensor of shape (N, n)
            Symbols.

        Returns
        -------
        Tensor of shape (N, c)
        """
        mixed = self.layers(self.embedding(tokens) + self.position)
        return self.output(mixed[:, -1] if self.readout == "last" else torch.mean(mixed, 1))

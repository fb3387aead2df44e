"""A plain network without attention on symbols, a baseline of the convex forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from convexformer.validation import check_one_of
from convexformer_solvers.validation import check_counts

from .base import draw_seed, seeded_parts
from .embedding import SymbolNetwork, TokenEmbedding

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "quadratic": torch.square}


class EmbeddingMLP(SymbolNetwork):
    r"""One hidden layer on the tokens of a sample side by side, these being learned.

    .. math:: f(x) = b + W_2 \, \sigma\big(c + W_1 [E_1(x_1), \dots, E_n(x_n)]\big)

    **Not a convex form**: no certificate applies to it.

    Parameters
    ----------
    n_symbols, n_tokens, n_outputs : int
        Symbols ``V``, symbols per sample ``n`` and outputs ``c``.
    width : int, default=32
        Width of the tokens.
    n_hidden : int, default=128
        Hidden units.
    activation : {"relu", "quadratic"}, default="relu"
        :math:`\sigma`: the positive part or the square. Products of tokens, as of waves whose phases add, are sums of
        squares.
    shared : bool, default=False
        Whether one table of tokens serves all positions.
    seed : int, default=0
        Of the initial weights: distributed as in ``TokenEmbedding`` and ``torch.nn.Linear``. The global generators of
        torch are neither used nor changed.

    Raises
    ------
    ValueError
        If a size is not a positive integer or ``activation`` is none of the above.

    Examples
    --------
    >>> EmbeddingMLP(n_symbols=97, n_tokens=2, n_outputs=97, activation="quadratic")(torch.tensor([[3, 5]])).shape
    torch.Size([1, 97])
    """

    def __init__(
        self,
        n_symbols: int,
        n_tokens: int,
        n_outputs: int,
        width: int = 32,
        n_hidden: int = 128,
        activation: Literal["relu", "quadratic"] = "relu",
        shared: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_counts(n_outputs=n_outputs, n_hidden=n_hidden)
        check_one_of(tuple(_ACTIVATIONS), activation=activation)
        self.activation = activation
        with seeded_parts(self, seed):
            self.embedding = TokenEmbedding(n_symbols, n_tokens, width, shared, seed=draw_seed())
            self.hidden = nn.Linear(n_tokens * width, n_hidden)
            self.output = nn.Linear(n_hidden, n_outputs)

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
        hidden = self.hidden(self.embedding(tokens).flatten(1))
        return self.output(_ACTIVATIONS[self.activation](hidden))

"""Symbols as samples: learned tables of tokens, and networks that have one in front."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from convexformer.validation import check_flag
from convexformer_solvers import Penalty
from convexformer_solvers.validation import check_counts, check_tensor

from .base import AttentionNetwork, as_arguments, normal_draws


class TokenEmbedding(nn.Module):
    """Learned tables that give each symbol a token.

    Parameters
    ----------
    n_symbols : int
        Number of symbols ``V``; they are the integers from 0 to ``V - 1``.
    n_tokens : int
        Symbols per sample ``n``.
    width : int
        Width ``d`` of a token.
    shared : bool, default=False
        Whether one table serves all positions. By default each has its own, so that the position of a symbol is known
        to what follows.
    seed : int, default=0
        Of the initial weights: independent normal numbers of variance ``1 / width``, so that the expected square of a
        token's norm is 1 at any width.

    Attributes
    ----------
    weight : Parameter of shape (n, V, d), or (V, d) where shared
        The tables.

    Raises
    ------
    ValueError
        If a size is not a positive integer.

    Examples
    --------
    >>> TokenEmbedding(n_symbols=97, n_tokens=2, width=8)(torch.tensor([[0, 96], [5, 5]])).shape
    torch.Size([2, 2, 8])
    >>> TokenEmbedding(n_symbols=97, n_tokens=2, width=8)
    TokenEmbedding(n_symbols=97, n_tokens=2, width=8, shared=False)
    """

    def __init__(self, n_symbols: int, n_tokens: int, width: int, shared: bool = False, seed: int = 0) -> None:
        super().__init__()
        check_counts(n_symbols=n_symbols, n_tokens=n_tokens, width=width)
        check_flag(shared, "shared")
        self.n_symbols, self.n_tokens, self.shared = n_symbols, n_tokens, shared
        tables = () if shared else (n_tokens,)
        self.weight = nn.Parameter(normal_draws(seed)(*tables, n_symbols, width) / math.sqrt(width))

    def extra_repr(self) -> str:
        """Sizes and choices, as ``repr`` of the module shows them."""
        width = self.weight.shape[-1]
        return as_arguments(n_symbols=self.n_symbols, n_tokens=self.n_tokens, width=width, shared=self.shared)

    def check(self, symbols: Tensor, name: str = "symbols") -> None:
        """Refuse all but symbols.

        Parameters
        ----------
        symbols : Tensor of shape (N, n)
            Integers of any type, on the device of the tables.
        name : str, default="symbols"
            What messages call them.

        Raises
        ------
        ValueError
            If they are of another shape, type or device, or not all of them are symbols. ``torch.compile`` and
            ``torch.export`` leave out the latter.
        """
        check_tensor(name, symbols)
        if symbols.ndim != 2 or symbols.shape[1] != self.n_tokens:
            raise ValueError(f"{name} must have shape (n_samples, {self.n_tokens}), got {tuple(symbols.shape)}")
        if symbols.is_floating_point() or symbols.is_complex() or symbols.dtype == torch.bool:
            raise ValueError(f"{name} must be integers, the symbols, got {symbols.dtype}")
        if symbols.device != self.weight.device:
            raise ValueError(f"{name} must be on {self.weight.device} like the network, got {symbols.device}")
        if torch.compiler.is_compiling():  # a graph knows no entries
            return
        values = symbols.long()
        wrong = values[(values < 0) | (values >= self.n_symbols)]
        if len(wrong):
            raise ValueError(f"{name} must be at least 0 and below n_symbols={self.n_symbols}, got {wrong[0].item()}")

    def forward(self, symbols: Tensor) -> Tensor:
        """Tokens of samples.

        Parameters
        ----------
        symbols : Tensor of shape (N, n)
            Integers below ``n_symbols``.

        Returns
        -------
        Tensor of shape (N, n, d)

        Raises
        ------
        ValueError
            As ``check`` does.
        """
        self.check(symbols)
        rows = symbols.long()
        if not self.shared:
            rows = rows + self.n_symbols * torch.arange(self.n_tokens, device=rows.device)
        return nn.functional.embedding(rows, self.weight.flatten(0, -2))


class SymbolNetwork(AttentionNetwork):
    """A network whose samples are symbols, integers of shape ``(N, n)``, and have learned tokens.

    Attributes
    ----------
    embedding : TokenEmbedding
        The tables, which a subclass sets.

    Examples
    --------
    >>> from convexformer.nn import EmbeddingMLP
    >>> isinstance(EmbeddingMLP(n_symbols=5, n_tokens=2, n_outputs=5), SymbolNetwork)
    True
    """

    embedding: TokenEmbedding

    def check_samples(self, samples: Tensor, name: str = "tokens") -> None:
        """Refuse all but symbols, at least one sample of them; the parameters are those of ``AttentionNetwork``."""
        self.embedding.check(samples, name)
        if len(samples) == 0:
            raise ValueError(f"{name} must hold at least one sample, got none")

    def decay(self, penalty: str | Penalty | None = None) -> Tensor:
        """Half the sum of squares of all matrices, embeddings included; biases and scales of norms have none.

        Parameters
        ----------
        penalty : str or Penalty, optional
            Ignored: the decay is this network's own. Taken so that all networks train by the same call.

        Returns
        -------
        Tensor
            A scalar with gradients.
        """
        return 0.5 * torch.stack([weight.square().sum() for weight in self.parameters() if weight.ndim > 1]).sum()


class EmbeddedNetwork(SymbolNetwork):
    r"""Any network of tokens with an embedding in front, both trained together.

    **Not convex** in the embedding, whatever the network: no certificate of a convex program applies to the pair. For
    a fixed embedding those of the network hold.

    Parameters
    ----------
    embedding : TokenEmbedding
        From symbols to tokens.
    network : AttentionNetwork
        From these tokens to predictions. Gates are evaluated on the tokens of the moment and pass no gradient.

    Examples
    --------
    >>> from convexformer.nn import ReluAttention
    >>> network = EmbeddedNetwork(TokenEmbedding(7, 2, width=3), ReluAttention(2, 3, 7))
    >>> network(torch.tensor([[0, 6]])).shape
    torch.Size([1, 7])
    """

    def __init__(self, embedding: TokenEmbedding, network: AttentionNetwork) -> None:
        super().__init__()
        self.embedding, self.network = embedding, network

    def forward(self, tokens: Tensor) -> Tensor:
        """Predictions.

        Parameters
        ----------
        tokens : Tensor of shape (N, n)
            Symbols.

        Returns
        -------
        Tensor
            As of ``network``.
        """
        return self.network(self.embedding(tokens))

    def decay(self, penalty: str | Penalty | None = None) -> Tensor:
        """Decay of the network plus half the sum of squares of the embedding.

        Without the latter the decay of a homogeneous network could be made as small as one likes by larger tokens.

        Parameters
        ----------
        penalty : str or Penalty, optional
            As of ``network``.

        Returns
        -------
        Tensor
            A scalar with gradients.
        """
        return self.network.decay(penalty) + 0.5 * self.embedding.weight.square().sum()

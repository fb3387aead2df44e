"""Probes that are trained by gradients: they see a token's mask as its last feature."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from convexformer.nn import AttentionNetwork
from convexformer.nn.modules.base import seeded
from convexformer_solvers import Penalty


class GatedAttentionPooling(nn.Module):
    r"""Gated attention pooling of multiple-instance learning, and a linear readout (Ilse et al., ICML 2018, eq. 9).

    .. math:: f(X) = b + O \sum_k \mathrm{softmax}_k \big( w^\top (\tanh(V x_k) \odot \sigma(U x_k)) \big) \, x_k

    Parameters
    ----------
    n_features, n_outputs : int
        Shape of the data.
    width : int, default=128
        Rows of ``V`` and ``U``, that of the source.
    seed : int, default=0
        Of the initial weights.

    Examples
    --------
    >>> pooling = GatedAttentionPooling(6, 2)
    >>> pooling(torch.zeros(5, 4, 6), torch.ones(5, 4, dtype=torch.bool)).shape
    torch.Size([5, 2])
    """

    def __init__(self, n_features: int, n_outputs: int, width: int = 128, seed: int = 0) -> None:
        super().__init__()
        with seeded(seed):
            self.signal = nn.Linear(n_features, width)
            self.gate = nn.Linear(n_features, width)
            self.score = nn.Linear(width, 1)
            self.readout = nn.Linear(n_features, n_outputs)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Scores ``(N, c)`` of samples; padding has no weight."""
        scores = self.score(torch.tanh(self.signal(tokens)) * torch.sigmoid(self.gate(tokens)))[..., 0]
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), 1)
        scores_of_samples: Tensor = self.readout((weights[:, None] @ tokens)[:, 0])
        return scores_of_samples


class MaskedNetwork(AttentionNetwork):
    """A network of tokens and a mask in the form that ``train`` takes, which has samples in one array.

    Parameters
    ----------
    core : Module
        From tokens ``(N, n, d)`` and a mask ``(N, n)`` to scores.

    Examples
    --------
    >>> network = MaskedNetwork(GatedAttentionPooling(6, 2))
    >>> tokens, mask = torch.randn(5, 4, 6), torch.arange(4) < torch.tensor([[4], [2], [1], [3], [4]])
    >>> samples = network.joined(tokens, mask)
    >>> samples.shape, network(*network.prepared(samples)).shape
    (torch.Size([5, 4, 7]), torch.Size([5, 2]))
    """

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    @staticmethod
    def joined(tokens: Tensor, mask: Tensor) -> Tensor:
        """Samples ``(N, n, d + 1)`` of tokens, zero where none is, with their mask as the last feature."""
        return torch.cat([tokens.masked_fill(~mask[..., None], 0.0), mask[..., None].to(tokens.dtype)], -1)

    def prepared(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return tokens[..., :-1], tokens[..., -1] > 0

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        """Scores ``(N, c)``."""
        scores: Tensor = self.core(tokens, mask)
        return scores

    def decay(self, penalty: str | Penalty | None = None) -> Tensor:
        """Nothing: the decay is that of AdamW."""
        return next(self.parameters()).new_zeros(())

"""Probes that are trained by gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from convexformer.nn import AttentionNetwork
from convexformer.nn.modules.base import seeded
from convexformer_solvers import Penalty


class GatedAttentionPooling(AttentionNetwork):
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

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        """Scores ``(N, c)`` of samples; padding has no weight."""
        scores = self.score(torch.tanh(self.signal(tokens)) * torch.sigmoid(self.gate(tokens)))[..., 0]
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), 1)
        return self.readout((weights[:, None] @ tokens)[:, 0])

    def decay(self, penalty: str | Penalty | None = None) -> Tensor:
        """Nothing: the decay is that of AdamW."""
        return next(self.parameters()).new_zeros(())

"""Heads that map a sequence to a sequence, their attention shared by all samples."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from convexformer.validation import as_tensor
from convexformer_solvers import Penalty, get_penalty
from convexformer_solvers.validation import check_counts

from .base import check_tokens_for
from .simplex import Simplex
from .simplex_heads import SimplexHeads


class SequenceAttention(SimplexHeads):
    r"""The non-convex network of convex-attention heads for sequence targets (paper [C], Thm A.1).

    .. math:: F(X) = B + \sum_j W_{1j} X w_{2j} w_{3j}^\top, \qquad
              W_{1j} \in R^{T \times n} \text{ with rows in } \Delta^n, \; w_{2j} \in R^d, \; w_{3j} \in R^c

    Every sample is mixed by the same ``W1``. With the default decay and enough heads, ``2 d c`` are, the globally
    optimal objective is the optimum of the exact convex program for sequence targets, whose variables are
    non-negative matrices of equal row sums. With the decay of a named penalty no equivalent convex program is
    known: minimising it is NP-hard in general.

    Parameters
    ----------
    n_tokens, n_features, n_outputs : int
        Shape of the data: ``n``, ``d`` and ``c`` numbers per target position, 1 by default.
    n_heads : int, default=16
        Number of heads ``m``.
    n_targets : int, optional
        Target positions ``T``. Default: ``n_tokens``, one per token.
    simplex : {"softmax", "projection"}, default="softmax"
        How the free parameter of each row of ``w1`` is mapped into the simplex, as in ``ConvexAttention``.
    bias : bool, default=True
        Whether there is a bias per target position and output, without decay.
    seed : int, default=0
        Seed of the initial weights.

    Raises
    ------
    ValueError
        If a size is not a positive integer or ``simplex`` is unknown.

    Examples
    --------
    >>> network = SequenceAttention(4, 3, 2, n_heads=8)
    >>> network(torch.zeros(5, 4, 3)).shape
    torch.Size([5, 4, 2])
    """

    def __init__(
        self,
        n_tokens: int,
        n_features: int,
        n_outputs: int = 1,
        n_heads: int = 16,
        n_targets: int | None = None,
        simplex: Simplex = "softmax",
        bias: bool = True,
        seed: int = 0,
    ) -> None:
        n_targets = n_tokens if n_targets is None else n_targets
        check_counts(n_tokens=n_tokens, n_targets=n_targets)
        super().__init__((n_targets, n_tokens), n_features, n_outputs, n_heads, simplex, bias, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predictions.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples.

        Returns
        -------
        Tensor of shape (N, T, c)
        """
        pred = self.mixed(tokens) @ self.w3
        return pred if self.bias is None else pred + self.bias

    def mixed(self, tokens: Tensor) -> Tensor:
        """What each head reads of the tokens, mixed for each target.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples.

        Returns
        -------
        Tensor of shape (N, T, m)

        Raises
        ------
        ValueError
            If the tokens are of another shape, precision or device than the network's.
        """
        check_tokens_for(self.w1_free, tokens, self.w1_free.shape[2], self.w2.shape[1])
        return torch.einsum("jtk,ikj->itj", self.w1, tokens @ self.w2.T)

    def decay(self, penalty: str | Penalty | None = None) -> Tensor:
        r"""Weight decay of all heads.

        Parameters
        ----------
        penalty : str or Penalty, optional
            Default: :math:`\frac12 \sum_j (\|w_{2j}\|_1^2 + \|w_{3j}\|_1^2)`, that of the exact convex program. A
            named penalty gives the decay that ``ConvexAttention`` has under it, with the l2 norm of ``w2``.

        Returns
        -------
        Tensor
            A scalar with gradients.
        """
        if penalty is not None:
            return get_penalty(penalty).factor_cost(self.w2, self.w3).sum()
        return 0.5 * sum(torch.linalg.vector_norm(w, ord=1, dim=1).square().sum() for w in (self.w2, self.w3))


def sequence_network_from_heads(w1: np.ndarray, w2: np.ndarray, w3: np.ndarray, bias: np.ndarray) -> SequenceAttention:
    """A network with exactly these weights, its attention in the projection form that has exact zeros.

    Parameters
    ----------
    w1, w2, w3 : ndarray of shapes (m, T, n), (m, d), (m, c)
        Weights of the heads.
    bias : ndarray of shape (T, c)
        Bias.

    Returns
    -------
    SequenceAttention
        In the precision of ``w2``. Without any heads it has one whose weights are zero.

    Raises
    ------
    ValueError
        If shapes disagree.

    Examples
    --------
    >>> w1, w2, w3 = np.array([[[0.0, 1.0], [1.0, 0.0]]]), np.array([[1.0, 0.0, 0.0]]), np.ones((1, 1))
    >>> network = sequence_network_from_heads(w1, w2, w3, np.zeros((2, 1)))
    >>> X = torch.randn(5, 2, 3, dtype=torch.float64)
    >>> bool(torch.allclose(network(X)[..., 0], X[:, [1, 0], 0]))  # the head swaps two tokens
    True
    """
    if len(w1) == 0:
        w1 = np.full((1, *w1.shape[1:]), 1 / w1.shape[2])
        w2, w3 = np.zeros((1, w2.shape[1]), w2.dtype), np.zeros((1, w3.shape[1]), w3.dtype)
    shape = (w1.shape[2], w2.shape[1], w3.shape[1], len(w1), w1.shape[1])
    network = SequenceAttention(*shape, simplex="projection").to(as_tensor(w2).dtype)
    network.set_weights(w1, w2, w3, bias)
    return network

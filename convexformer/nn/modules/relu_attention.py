"""Heads of convex attention followed by a true ReLU: what the gated programs fix the gates of."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convexformer.validation import as_floats

from .simplex import Simplex
from .simplex_heads import SimplexHeads


class ReluAttention(SimplexHeads):
    r"""Heads of convex attention with a ReLU, their gates trained with the weights; paper [C], Thm 3, fixes them.

    .. math:: f(X) = b + \sum_j \mathrm{relu}(w_{1j}^\top X w_{2j}) \, w_{3j}, \qquad
              w_{1j} \in \Delta^n, \; w_{2j} \in R^d, \; w_{3j} \in R^c

    **Not covered by the convex programs.** A head is the gated head of ``ConvexAttention`` whose gate
    :math:`1[w_{1j}^\top X w_{2j} \ge 0]` is its own, so at the weights of the moment this is a feasible point of the
    gated program with the gates of ``gate_directions``: the certified optimum of *that* program, with these gates
    fixed, is at most this network's objective. It is no lower bound for other weights.

    Parameters
    ----------
    n_tokens, n_features, n_outputs : int
        Shape of the data: ``n``, ``d`` and ``c``, which is 1 by default.
    n_heads : int, default=16
        Number of heads ``m``.
    simplex : {"softmax", "projection"}, default="softmax"
        How the free parameter of ``w1`` is mapped into the simplex, as in ``ConvexAttention``.
    bias : bool, default=True
        Whether there is a bias per output, without decay.
    seed : int, default=0
        Seed of the initial weights.

    Raises
    ------
    ValueError
        If a size is not a positive integer or ``simplex`` is unknown.

    Examples
    --------
    >>> network = ReluAttention(4, 3, 2, n_heads=8)
    >>> u1, u2 = network.gate_directions()
    >>> network(torch.zeros(5, 4, 3)).shape, u1.shape, u2.shape
    (torch.Size([5, 2]), (8, 4), (8, 3))
    """

    def __init__(
        self,
        n_tokens: int,
        n_features: int,
        n_outputs: int = 1,
        n_heads: int = 16,
        simplex: Simplex = "softmax",
        bias: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__((n_tokens,), n_features, n_outputs, n_heads, simplex, bias, seed)

    def gate_directions(self) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
        """Directions ``u1, u2`` of the gates that the network has now, as ``Gates`` takes them.

        Returns
        -------
        u1 : ndarray of shape (m, n)
            Token directions: a copy of ``w1``.
        u2 : ndarray of shape (m, d)
            Feature directions: a copy of ``w2``.
        """
        u1, u2 = (as_floats(weight).numpy(force=True).copy() for weight in (self.w1, self.w2))
        return u1, u2

    def forward(self, tokens: Tensor) -> Tensor:
        """Predictions.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples.

        Returns
        -------
        Tensor of shape (N, c)
        """
        pred = torch.relu(self._pooled(tokens)) @ self.w3  # (N, c)
        return pred if self.bias is None else pred + self.bias

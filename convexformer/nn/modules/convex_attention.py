"""Heads whose attention over tokens is a weight vector: the network that the convex programs solve."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from convexformer.gates import Gates
from convexformer.gates.base import as_gate_index
from convexformer.validation import as_tensor

from .base import GatedModule
from .simplex import Simplex
from .simplex_heads import SimplexHeads


class ConvexAttention(GatedModule, SimplexHeads):
    r"""The non-convex network of convex-attention heads, trainable with any optimiser (paper [C], eqs. 4-6 and 9).

    .. math:: f(X) = b + \sum_j g_j(X) \; (w_{1j}^\top X w_{2j}) \, w_{3j}, \qquad
              w_{1j} \in \Delta^n, \; w_{2j} \in R^d, \; w_{3j} \in R^c

    with :math:`g_j = 1`, or with a fixed gate :math:`g_j(X) = 1[u_{1}^\top X u_{2} \ge 0]`. With enough heads its
    globally optimal objective equals the optimum of the convex program; with too few it can only be larger.

    Parameters
    ----------
    n_tokens, n_features, n_outputs : int
        Shape of the data: ``n``, ``d`` and ``c``, which is 1 by default.
    n_heads : int, default=16
        Number of heads ``m``.
    gates : Gates, optional
        Fixed gates. Default: none, every head sees every sample.
    gate_index : array-like of shape (n_heads,), optional
        Gate of each head. Default: heads are spread evenly over the gates.
    simplex : {"softmax", "projection"}, default="softmax"
        How the free parameter of ``w1`` is mapped into the simplex. Softmax has gradients everywhere but never an
        exact zero; the Euclidean projection has exact zeros and no gradient outside its support.
    bias : bool, default=True
        Whether there is a bias per output, without decay.
    seed : int, default=0
        Seed of the initial weights.

    Examples
    --------
    >>> network = ConvexAttention(4, 3, 2, n_heads=8)
    >>> network(torch.zeros(5, 4, 3)).shape
    torch.Size([5, 2])
    >>> network
    ConvexAttention(n_tokens=4, n_features=3, n_outputs=2, n_heads=8, simplex='softmax', bias=True)
    """

    def __init__(
        self,
        n_tokens: int,
        n_features: int,
        n_outputs: int = 1,
        n_heads: int = 16,
        gates: Gates | None = None,
        gate_index: ArrayLike | None = None,
        simplex: Simplex = "softmax",
        bias: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__((n_tokens,), n_features, n_outputs, n_heads, simplex, bias, seed)
        if not (gates is None or isinstance(gates, Gates)):
            raise TypeError(f"gates must be None or Gates(u1, u2), got {gates!r}")
        if gates is not None and (gates.u1.shape[1], gates.u2.shape[1]) != (n_tokens, n_features):
            raise ValueError(
                f"gates must have directions of shapes (n_gates, {n_tokens}) and (n_gates, {n_features}), "
                f"got {gates.u1.shape} and {gates.u2.shape}"
            )
        self.gates = gates
        n_gates = 1 if gates is None else len(gates)
        index = np.arange(n_heads) % n_gates if gate_index is None else as_gate_index(gate_index)
        if index.shape != (n_heads,) or not ((index >= 0) & (index < n_gates)).all():
            raise ValueError(f"gate_index must be {n_heads} positions below {n_gates}, got shape {index.shape}")
        self.gate_index: Tensor
        # A copy: loading a state dict writes into it.
        self.register_buffer("gate_index", torch.tensor(index, dtype=torch.int64))  # (m,)

    def get_extra_state(self) -> dict[str, Any]:
        """Gates, and how free parameters read, for ``state_dict``."""
        return {**SimplexHeads.get_extra_state(self), **GatedModule.get_extra_state(self)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The same from a ``state_dict``."""
        SimplexHeads.set_extra_state(self, state)
        GatedModule.set_extra_state(self, state)

    def extra_repr(self) -> str:
        gates = "" if self.gates is None else f", gates: {len(self.gates)}"
        return super().extra_repr() + gates

    def forward(self, tokens: Tensor, masks: Tensor | None = None) -> Tensor:
        """Predictions.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples.
        masks : Tensor of shape (N, h), optional
            Masks of the gates on these samples, where they have been computed before.

        Returns
        -------
        Tensor of shape (N, c)

        Raises
        ------
        ValueError
            If the tokens are of another shape, precision or device than the network's, or ``masks`` of another shape.
        """
        pooled = self._pooled(tokens)
        if self.gates is not None:
            pooled = pooled * self.masks_of(tokens, masks)[:, self.gate_index]
        elif masks is not None:
            raise ValueError("masks are those of gates, which this network does not have; give None")
        pred = pooled @ self.w3  # (N, c)
        return pred if self.bias is None else pred + self.bias

    def prepared(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Tokens and, with gates, their masks."""
        return (tokens,) if self.gates is None else (tokens, self.gates.masks(tokens))


def network_from_heads(
    w1: np.ndarray,
    w2: np.ndarray,
    w3: np.ndarray,
    bias: np.ndarray,
    gates: Gates | None = None,
    gate_index: np.ndarray | None = None,
) -> ConvexAttention:
    """A network with exactly these weights, its attention in the projection form that has exact zeros.

    Parameters
    ----------
    w1, w2, w3 : ndarray of shapes (m, n), (m, d), (m, c)
        Weights of the heads.
    bias : ndarray of shape (c,)
        Bias.
    gates : Gates, optional
        The gates. Default: none.
    gate_index : ndarray of shape (m,), optional
        Gate of each head, only with `gates`.

    Returns
    -------
    ConvexAttention
        In the precision of ``w2``. Without any heads it has one whose weights are zero.

    Raises
    ------
    ValueError
        If shapes disagree, or ``gate_index`` is out of range.

    Examples
    --------
    >>> w1, w2, w3 = np.array([[0.0, 1.0]]), np.array([[2.0, 0.0, 0.0]]), np.array([[0.5]])
    >>> network = network_from_heads(w1, w2, w3, np.zeros(1))
    >>> X = torch.randn(5, 2, 3, dtype=torch.float64)
    >>> bool(torch.allclose(network(X)[:, 0], X[:, 1, 0]))  # the head reads feature 0 of token 1
    True
    """
    if len(w1) == 0:
        w1, gate_index = np.eye(1, w1.shape[1], dtype=w1.dtype), np.zeros(1, dtype=np.int64)
        w2, w3 = np.zeros((1, w2.shape[1]), w2.dtype), np.zeros((1, w3.shape[1]), w3.dtype)
    dtype = as_tensor(w2).dtype
    shape = (w1.shape[1], w2.shape[1], w3.shape[1], len(w1))
    network = ConvexAttention(*shape, gates=gates, gate_index=gate_index, simplex="projection").to(dtype)
    network.set_weights(w1, w2, w3, bias)
    return network

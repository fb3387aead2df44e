"""What heads share whose attention over tokens is a weight vector, the same for all samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from convexformer.validation import as_floats, as_tensor, check_flag
from convexformer_solvers import Penalty, get_penalty
from convexformer_solvers.validation import check_counts

from .base import AttentionNetwork, as_arguments, check_tokens_for, normal_draws
from .simplex import Simplex, first_free, into_simplex


class SimplexHeads(AttentionNetwork):
    """Weights of heads with attention in the simplex, drawn from a seed, and their decay; a subclass gives ``forward``.

    Parameters
    ----------
    attention_shape : tuple of int
        Shape of one head's attention ``w1``, whose last axis is in the simplex: ``(n,)``, or ``(T, n)`` with a row for
        each target position. The bias has the leading axes too.
    n_features, n_outputs, n_heads : int
        ``d``, ``c`` and ``m``.
    simplex : {"softmax", "projection"}
        How the free parameter of ``w1`` is mapped into the simplex.
    bias : bool
        Whether there is a bias, without decay.
    seed : int
        Seed of the initial weights.

    Raises
    ------
    ValueError
        If a size is not a positive integer or ``simplex`` is unknown.
    """

    def __init__(
        self,
        attention_shape: tuple[int, ...],
        n_features: int,
        n_outputs: int,
        n_heads: int,
        simplex: Simplex,
        bias: bool,
        seed: int,
    ) -> None:
        super().__init__()
        check_flag(bias, "bias")
        check_counts(n_tokens=attention_shape[-1], n_features=n_features, n_outputs=n_outputs, n_heads=n_heads)
        normal = normal_draws(seed)
        self.simplex = simplex
        self.w1_free = nn.Parameter(first_free(normal(n_heads, *attention_shape), simplex))  # (m, n) or (m, T, n)
        self.w2 = nn.Parameter(normal(n_heads, n_features) / math.sqrt(n_features))  # (m, d)
        self.w3 = nn.Parameter(normal(n_heads, n_outputs) / math.sqrt(n_heads))  # (m, c)
        self.bias = nn.Parameter(torch.zeros(*attention_shape[:-1], n_outputs)) if bias else None  # (c,) or (T, c)

    @property
    def w1(self) -> Tensor:
        """Attention over tokens of each head, in the simplex, shape ``(m, n)`` or ``(m, T, n)``."""
        return into_simplex(self.w1_free, self.simplex)

    def _pooled(self, tokens: Tensor) -> Tensor:
        """What each head with one row of attention reads from checked tokens, ``w1' X w2``, shape ``(N, m)``."""
        check_tokens_for(self.w2, tokens, self.w1_free.shape[1], self.w2.shape[1])
        directions = (self.w1[:, :, None] * self.w2[:, None, :]).flatten(1)  # (m, n d)
        return tokens.flatten(1) @ directions.T

    def get_extra_state(self) -> dict[str, Any]:
        """How free parameters read, for ``state_dict``: without it ``w1_free`` means something else."""
        return {"simplex": self.simplex}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The same from a ``state_dict``."""
        self.simplex = state["simplex"]

    def extra_repr(self) -> str:
        """Sizes and choices, as ``repr`` of the module shows them."""
        heads, *targets, tokens = self.w1_free.shape
        return as_arguments(
            n_tokens=tokens,
            n_features=self.w2.shape[1],
            n_outputs=self.w3.shape[1],
            n_heads=heads,
            **({"n_targets": targets[0]} if targets else {}),
            simplex=self.simplex,
            bias=self.bias is not None,
        )

    def decay(self, penalty: str | Penalty | None = None) -> Tensor:
        """Weight decay of all heads, ``sum_j (|w2_j|_2^2 + |w3_j|^2) / 2``.

        Parameters
        ----------
        penalty : str or Penalty, optional
            The norm of ``w3`` is l1 for ``"group_l2"``, the default, and l2 for ``"nuclear"``.

        Returns
        -------
        Tensor
            A scalar with gradients.
        """
        return get_penalty("group_l2" if penalty is None else penalty).factor_cost(self.w2, self.w3).sum()

    def set_weights(self, w1: Any, w2: Any, w3: Any, bias: Any) -> None:
        """Take these weights, arrays of the shapes of the parameters; for ``simplex="projection"`` and with a bias."""
        if self.simplex != "projection" or self.bias is None:
            found = f"simplex={self.simplex!r}, bias={self.bias is not None}"
            raise ValueError(f"set_weights needs a network of simplex='projection' and bias=True, got {found}")
        weights = {"w1": (self.w1_free, w1), "w2": (self.w2, w2), "w3": (self.w3, w3), "bias": (self.bias, bias)}
        with torch.no_grad():
            for name, (parameter, given) in weights.items():
                values = as_tensor(given, name=name)
                if values.shape != parameter.shape:  # copy_ would repeat a single row
                    raise ValueError(f"{name} must have shape {tuple(parameter.shape)}, got {tuple(values.shape)}")
                parameter.copy_(values)


def weights_of(network: SimplexHeads) -> tuple[NDArray[np.floating], ...]:
    """Attention, values, outputs and bias of heads as arrays, zeros where there is no bias; float32 for half precision.

    In half precision the attention of a head would not sum to 1.
    """
    w1 = into_simplex(as_floats(network.w1_free), network.simplex)
    bias = w1.new_zeros((*w1.shape[1:-1], network.w3.shape[1])) if network.bias is None else network.bias
    weights = (w1, *(as_floats(part) for part in (network.w2, network.w3, bias)))
    return tuple(part.numpy(force=True) for part in weights)

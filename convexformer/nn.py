"""Torch modules: the non-convex network whose training the convex programs solve, and plain training of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from tqdm.auto import tqdm

from convexformer_solvers import Loss, Penalty, get_loss, get_penalty

from .gates import Gates

Simplex = Literal["softmax", "projection"]


def project_to_simplex(rows: Tensor) -> Tensor:
    """Euclidean projection of each row on the unit simplex; differentiable almost everywhere.

    Parameters
    ----------
    rows : Tensor of shape (m, n)
        Any numbers.

    Returns
    -------
    Tensor of shape (m, n)
        Non-negative rows that sum to 1; rows of the simplex come back unchanged.

    Examples
    --------
    >>> project_to_simplex(torch.tensor([[2.0, 0.0], [0.25, 0.75]]))
    tensor([[1.0000, 0.0000],
            [0.2500, 0.7500]])
    """
    ordered = rows.sort(dim=1, descending=True).values
    counts = torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=rows.dtype)
    excess = ordered.cumsum(1) - 1
    support = (ordered * counts > excess).sum(1, keepdim=True)
    threshold = excess.gather(1, support - 1) / support
    return (rows - threshold).clamp(min=0)


class ConvexAttention(nn.Module):
    r"""The non-convex network of convex-attention heads, trainable with any optimiser (paper [C], eqs. 4-6 and 9).

    .. math:: f(X) = b + \sum_j g_j(X) \; (w_{1j}^\top X w_{2j}) \, w_{3j}, \qquad
              w_{1j} \in \Delta^n, \; w_{2j} \in R^d, \; w_{3j} \in R^c

    with :math:`g_j = 1`, or with a fixed gate :math:`g_j(X) = 1[u_{1}^\top X u_{2} \ge 0]`. With enough heads its
    globally optimal objective equals the optimum of the convex program; with too few it can only be larger.

    Parameters
    ----------
    n_tokens, n_features, n_outputs : int
        Shape of the data: ``n``, ``d`` and ``c``.
    n_heads : int
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
        super().__init__()
        if simplex not in ("softmax", "projection"):
            raise ValueError(f"simplex must be 'softmax' or 'projection', got {simplex!r}")
        if n_heads < 1:
            raise ValueError(f"n_heads must be at least 1, got {n_heads!r}")
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.get_default_dtype())

        self.simplex = simplex
        self.gates = gates
        # The projection starts on the simplex, where every token has a gradient.
        logits = normal(n_heads, n_tokens)
        self.w1_free = nn.Parameter(logits if simplex == "softmax" else torch.softmax(logits, 1))  # (m, n)
        self.w2 = nn.Parameter(normal(n_heads, n_features) / math.sqrt(n_features))  # (m, d)
        self.w3 = nn.Parameter(normal(n_heads, n_outputs) / math.sqrt(n_heads))  # (m, c)
        self.bias = nn.Parameter(torch.zeros(n_outputs)) if bias else None  # (c,)
        n_gates = 1 if gates is None else len(gates)
        index = torch.arange(n_heads) % n_gates if gate_index is None else torch.as_tensor(np.asarray(gate_index))
        if index.shape != (n_heads,) or not bool(((index >= 0) & (index < n_gates)).all()):
            raise ValueError(f"gate_index must be {n_heads} positions below {n_gates}, got shape {tuple(index.shape)}")
        self.gate_index: Tensor
        self.register_buffer("gate_index", index)  # (m,)

    def get_extra_state(self) -> dict[str, Tensor]:
        """Gates for ``state_dict``; they are no parameters, but without them the weights mean nothing."""
        return (
            {} if self.gates is None else {"u1": torch.as_tensor(self.gates.u1), "u2": torch.as_tensor(self.gates.u2)}
        )

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Gates from a ``state_dict``."""
        self.gates = Gates(state["u1"].numpy(), state["u2"].numpy()) if state else None

    @property
    def w1(self) -> Tensor:
        """Attention over tokens of each head, in the simplex, shape ``(m, n)``."""
        return torch.softmax(self.w1_free, 1) if self.simplex == "softmax" else project_to_simplex(self.w1_free)

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
        """
        directions = (self.w1[:, :, None] * self.w2[:, None, :]).flatten(1)  # (m, n d)
        pooled = tokens.flatten(1) @ directions.T  # (N, m)
        if self.gates is not None:
            masks = self.gates.masks(tokens) if masks is None else masks
            pooled = pooled * masks[:, self.gate_index]
        pred = pooled @ self.w3  # (N, c)
        return pred if self.bias is None else pred + self.bias

    def decay(self, penalty: str | Penalty = "group_l2") -> Tensor:
        """Weight decay of all heads, ``sum_j (|w2_j|_2^2 + |w3_j|^2) / 2``.

        The norm of ``w3`` is l1 for ``"group_l2"`` and l2 for ``"nuclear"``.
        """
        return get_penalty(penalty).factor_cost(self.w2, self.w3).sum()

    def objective(
        self,
        tokens: Tensor,
        y: Tensor,
        *,
        loss: str | Loss = "squared",
        penalty: str | Penalty = "group_l2",
        alpha: float,
        sample_weight: Tensor | None = None,
        masks: Tensor | None = None,
    ) -> Tensor:
        """Mean loss plus ``alpha`` times the decay: never below the certified dual bound of the convex program.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples.
        y : Tensor of shape (N, c)
            Targets of the loss.
        loss, penalty, alpha : str or Loss, str or Penalty, float
            As in the program.
        sample_weight : Tensor of shape (N,), optional
            Weights; only ratios matter.
        masks : Tensor of shape (N, h), optional
            As in ``forward``.

        Returns
        -------
        Tensor
            A scalar with gradients.
        """
        losses = get_loss(loss).value(self(tokens, masks), y)
        mean = losses.mean() if sample_weight is None else (losses * sample_weight).sum() / sample_weight.sum()
        return mean + alpha * self.decay(penalty)


@dataclass
class TrainingHistory:
    """Objective of a network before every step of its training, and the seconds since the start."""

    objective: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def train(
    network: ConvexAttention,
    tokens: Tensor,
    y: Tensor,
    *,
    loss: str | Loss = "squared",
    penalty: str | Penalty = "group_l2",
    alpha: float,
    sample_weight: Tensor | None = None,
    lr: float = 1e-2,
    n_steps: int = 1000,
    callback: Callable[[int, float], bool | None] | None = None,
    verbose: bool = False,
) -> TrainingHistory:
    """Train a network in place by Adam on the full batch, its learning rate falling to zero along a cosine.

    The objective is ``ConvexAttention.objective``, decay included, so that it can be compared with a certificate.

    Parameters
    ----------
    network : ConvexAttention
        Changed in place.
    tokens : Tensor of shape (N, n, d)
        The samples, in the precision of the network.
    y : Tensor of shape (N, c)
        Targets of the loss.
    loss, penalty, alpha, sample_weight
        As in ``ConvexAttention.objective``.
    lr : float, default=1e-2
        First learning rate.
    n_steps : int, default=1000
        Number of steps.
    callback : callable, optional
        Called with the step and the objective; returning True stops.
    verbose : bool, default=False
        Whether to show a progress bar.

    Returns
    -------
    TrainingHistory
        One entry per step and one for the final weights.

    Examples
    --------
    >>> tokens, y = torch.ones(4, 2, 3), torch.ones(4, 1)
    >>> history = train(ConvexAttention(2, 3, 1, n_heads=4), tokens, y, alpha=0.01, n_steps=50)
    >>> history.objective[-1] < history.objective[0]
    True
    """
    loss, penalty = get_loss(loss), get_penalty(penalty)
    masks = None if network.gates is None else network.gates.masks(tokens)
    optimizer = torch.optim.Adam(network.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    history = TrainingHistory()
    began = time.perf_counter()

    def objective() -> Tensor:
        return network.objective(
            tokens, y, loss=loss, penalty=penalty, alpha=alpha, sample_weight=sample_weight, masks=masks
        )

    for step in tqdm(range(n_steps), disable=not verbose, desc="adam"):
        optimizer.zero_grad()
        value = objective()
        history.objective.append(value.item())
        history.seconds.append(time.perf_counter() - began)
        if callback is not None and callback(step, history.objective[-1]) is True:
            return history
        value.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        history.objective.append(objective().item())
    history.seconds.append(time.perf_counter() - began)
    return history


def network_from_heads(
    w1: np.ndarray, w2: np.ndarray, w3: np.ndarray, bias: np.ndarray, gates: Gates | None, gate_index: np.ndarray
) -> ConvexAttention:
    """A network with exactly these weights, its attention in the projection form that has exact zeros.

    Parameters
    ----------
    w1, w2, w3 : ndarray of shapes (m, n), (m, d), (m, c)
        Weights of the heads.
    bias : ndarray of shape (c,)
        Bias.
    gates : Gates or None
        The gates.
    gate_index : ndarray of shape (m,)
        Gate of each head.

    Returns
    -------
    ConvexAttention
        In the precision of ``w2``. Without any heads it has one whose weights are zero.
    """
    if len(w1) == 0:
        w1, gate_index = np.eye(1, w1.shape[1], dtype=w1.dtype), np.zeros(1, dtype=np.int64)
        w2, w3 = np.zeros((1, w2.shape[1]), w2.dtype), np.zeros((1, w3.shape[1]), w3.dtype)
    dtype = torch.as_tensor(w2).dtype
    shape = (w1.shape[1], w2.shape[1], w3.shape[1], len(w1))
    network = ConvexAttention(*shape, gates=gates, gate_index=gate_index, simplex="projection").to(dtype)
    assert network.bias is not None
    with torch.no_grad():
        for parameter, values in ((network.w1_free, w1), (network.w2, w2), (network.w3, w3), (network.bias, bias)):
            parameter.copy_(torch.as_tensor(values))
    return network

"""Attention that descends an interaction energy ([U] section 3)."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from convexformer.validation import check_flag, check_one_of, check_positive

from .energies import Energy, InteractionEnergy, SquaredDistance
from .graphs import (
    centred,
    check_attention_mask,
    check_graph,
    check_last_sizes,
    half_squared_distances,
    neighbours,
    without_padding,
)
from .rho import Exponential, Rho, get_rho

Mode = Literal["softmax", "jacobi"]
MODES = ("softmax", "jacobi")


class DescentWarning(UserWarning):
    """A theorem that promises descent of an energy does not apply; the message says which and what would be right.

    Examples
    --------
    >>> with warnings.catch_warnings(action="error", category=DescentWarning):
    ...     try:
    ...         attention = EnergyAttention("exp", mode="jacobi", step=1.5)
    ...     except DescentWarning as warning:
    ...         print(warning)
    step=1.5 is longer than the steps up to 1 for which [U] Theorem 3.1, as corrected, promises that mode='jacobi' ...
    """


class EnergyAttention(nn.Module):
    r"""One step of attention, which lowers the interaction energy of :math:`\rho`.

    With :math:`\gamma_{uv} = \rho'(\tfrac12 |\tilde y_u - \tilde y_v|^2)`, :math:`\tilde Y = Y W` and step ``a``,

    ``mode="softmax"`` averages over a token and its neighbours, itself with weight :math:`\rho'(0)` ([U] eq. 10):

    .. math:: y_u^+ = (1 - a) y_u
              + a \frac{\sum_{v \in N(u) \cup u} \gamma_{uv} y_v}{\sum_{v \in N(u) \cup u} \gamma_{uv}},

    which is a preconditioned gradient step of :math:`E_1(YW)` without a regulariser. For ``rho="exp"`` the weights are
    :math:`\mathrm{softmax}_v(\tilde y_u^\top \tilde y_v - |\tilde y_v|^2 / 2)`: softmax attention with the key weights
    :math:`b_v = e^{-|\tilde y_v|^2/2}`.

    ``mode="jacobi"`` is the damped Jacobi step of :math:`E_1(YW) + \tfrac w2 |YW - BW|^2`:

    .. math:: y_u^+ = (1 - a) y_u
              + a \frac{\sum_{v \in N(u)} \gamma_{uv} y_v + w b_u}{\sum_{v \in N(u)} \gamma_{uv} + w}.

    Equation (10) is printed in [U] for that regularised energy too. It does not descend it: of the tokens 5, 8, 8, 8
    of width 1 it raises the energy from 105.467 to 105.677.

    Parameters
    ----------
    rho : {"exp", "log1", "log2"} or Rho, default="exp"
        The function.
    mode : {"softmax", "jacobi"}, default="softmax"
        Which step, and so which energy.
    step : float, default=1.0
        ``a``, positive. Steps up to 1 descend for every :math:`\rho` and graph; in mode ``"softmax"`` on the complete
        graph those below 2, where :math:`\rho'` is a positive definite kernel, as of all named functions.
    weight : float, default=1.0
        ``w`` of mode ``"jacobi"``, positive.
    graph : Tensor of bool of shape (n, n), optional
        Symmetric: which tokens attend to each other. Default: all.
    fused : bool, default=True
        Whether softmax attention goes through ``torch.nn.functional.scaled_dot_product_attention``, which forms no
        matrix of all pairs. False: the explicit form, which all other cases have in any case.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described: a :math:`\rho` that is not concave or decreases, a directed graph.

    Warns
    -----
    DescentWarning
        If the step is longer than those that descend.

    Examples
    --------
    >>> tokens = torch.tensor([[5.0], [8.0], [8.0], [8.0]])
    >>> attention = EnergyAttention("exp", mode="jacobi")
    >>> attention(tokens).T
    tensor([[0.2580, 5.3321, 5.3321, 5.3321]])
    >>> energy = attention.energy()
    >>> energy.value(tokens).item() > energy.value(attention(tokens)).item()
    True
    """

    graph: Tensor | None

    def __init__(
        self,
        rho: str | Rho = "exp",
        mode: Mode = "softmax",
        *,
        step: float = 1.0,
        weight: float = 1.0,
        graph: Tensor | None = None,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.rho = get_rho(rho)
        check_one_of(MODES, **{"attention mode": mode})
        check_positive(step=step, weight=weight)
        self.mode, self.step, self.weight = mode, step, weight
        self.register_buffer("graph", check_graph(graph), persistent=False)
        self.fused = check_flag(fused, "fused")
        if not self.descends:
            warnings.warn(
                f"step={step} is longer than the steps up to 1 for which [U] Theorem 3.1, as corrected, promises that "
                f"mode={mode!r} descends its energy"
                + (", or below 2 on this complete graph" if self._may_go_to_two else ""),
                DescentWarning,
                stacklevel=2,
            )

    @property
    def _may_go_to_two(self) -> bool:
        return self.mode == "softmax" and self.graph is None and self.rho.positive_definite

    @property
    def descends(self) -> bool:
        """Whether theory promises that no step raises the energy."""
        return self.step <= 1 or (self._may_go_to_two and self.step < 2)

    def extra_repr(self) -> str:
        """The arguments, as ``repr`` of the module shows them."""
        return f"rho={self.rho}, mode={self.mode!r}, step={self.step}, weight={self.weight}"

    def energy(self, anchor: Tensor | None = None, attention_mask: Any = None) -> Energy:
        """What a step lowers, as an energy of the tokens :math:`YW`; ``.of(W)`` of it is that of ``Y``.

        Parameters
        ----------
        anchor : Tensor of shape (..., n, d), optional
            ``BW`` of mode ``"jacobi"``. Default: 0.
        attention_mask : Tensor of shape (..., n), optional
            As in ``forward``.

        Returns
        -------
        Energy
        """
        interaction = InteractionEnergy(attention_mask=attention_mask)
        interaction.rho, interaction.graph = self.rho, self.graph  # checked already, which a graph of torch cannot do
        if self.mode == "softmax":
            return interaction
        return interaction + SquaredDistance(anchor, self.weight, attention_mask)

    def forward(
        self,
        tokens: Tensor,
        *,
        projected: Tensor | None = None,
        anchor: Tensor | None = None,
        attention_mask: Any = None,
    ) -> Tensor:
        """Tokens after one step.

        Parameters
        ----------
        tokens : Tensor of shape (..., n, d)
            ``Y``.
        projected : Tensor of shape (..., n, k), optional
            ``YW``, by whose distances the tokens attend. Default: the tokens themselves.
        anchor : Tensor of shape (..., n, d), optional
            ``B`` of mode ``"jacobi"``. Default: 0.
        attention_mask : Tensor of shape (..., n), optional
            1 for tokens, 0 for padding, to which nothing attends; padding comes out as it went in. Default: no padding.

        Returns
        -------
        Tensor of shape (..., n, d)

        Raises
        ------
        TypeError
            If an argument is no tensor.
        ValueError
            If a shape is another one, or an anchor is given in mode ``"softmax"``, whose energy has none.
        """
        check_last_sizes("tokens", tokens)
        if projected is not None:
            check_last_sizes("projected", projected, tokens.shape[-2])
        if anchor is not None and self.mode == "softmax":
            raise ValueError(
                "anchor must be None in mode='softmax', whose energy has no regulariser; use mode='jacobi'"
            )
        if anchor is not None:
            check_last_sizes("anchor", anchor, *tokens.shape[-2:])
        present = check_attention_mask(attention_mask, tuple(tokens.shape))
        values, keys = (without_padding(part, present) for part in (tokens, tokens if projected is None else projected))
        fused = self.fused and self.mode == "softmax" and self.graph is None and isinstance(self.rho, Exponential)
        averages = _fused(keys, values, present) if fused else self._explicit(keys, values, anchor, present)
        moved = averages if self.step == 1 else torch.lerp(values, averages, self.step)
        return moved if present is None else torch.where(present[..., None], moved, tokens)

    def _explicit(self, keys: Tensor, tokens: Tensor, anchor: Tensor | None, present: Tensor | None) -> Tensor:
        """Weighted averages, through the matrix of all pairs."""
        pairs = neighbours(tokens, self.graph, present)
        if self.mode == "softmax":
            pairs = pairs | torch.eye(tokens.shape[-2], dtype=torch.bool, device=tokens.device)
        gamma = self.rho.derivative(half_squared_distances(keys, present)) * pairs
        total, degree = gamma @ tokens, gamma.sum(-1, keepdim=True)
        if self.mode == "softmax":
            return total / degree
        pull = total if anchor is None else total + self.weight * anchor
        return pull / (degree + self.weight)


def _fused(keys: Tensor, values: Tensor, present: Tensor | None) -> Tensor:
    """Softmax attention with key weights: the bias of a key is a further coordinate, of which queries have 1."""
    keys = centred(keys, present)  # a common shift changes no weight, and would cost digits
    bias = -keys.square().sum(-1, keepdim=True) / 2
    queries = torch.cat([keys, torch.ones_like(bias)], -1)
    keys = torch.cat([keys, bias], -1)
    pairs = (*keys.shape[:-2], 1, keys.shape[-2], keys.shape[-2])
    mask = None if present is None else present[..., None, None, :].expand(pairs)
    query, key, value = (part.unsqueeze(-3) for part in (queries, keys, values))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0).squeeze(-3)

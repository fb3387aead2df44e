"""Attentive probes: learned queries whose softmax attention pools the tokens of a sample."""

from __future__ import annotations

import math
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from convexformer.validation import as_floats, as_tensor, check_flag, check_positive
from convexformer_solvers import Penalty, get_penalty
from convexformer_solvers.validation import check_counts

from .base import AttentionNetwork, as_arguments, check_tokens_for, masked, normal_draws


class AttentiveProbe(AttentionNetwork):
    r"""A multi-head attentive probe: softmax attention of learned queries, then a linear readout of each.

    .. math:: f(X) = b + \sum_j \Big( \sum_k \mathrm{softmax}_k \Big( \frac{q_j^\top x_k}{\tau} \Big) \, x_k^\top
              \Big) V_j O_j, \qquad V_j \in R^{d \times r}, \; O_j \in R^{r \times c}

    For given queries the function is linear in the :math:`Z_j = V_j O_j`, and training them with weight decay is
    equivalent to the nuclear program on the tokens that the queries pool; see ``convexformer.probes.refit_probe``.

    Parameters
    ----------
    n_features, n_outputs : int
        Shape of the data: ``d`` and ``c``, which is 1 by default. Samples may have any number of tokens.
    n_queries : int, default=1
        Queries.
    rank : int, optional
        The :math:`r`. Default: the smaller one of ``d`` and ``c``, with which :math:`Z_j` is any matrix.
    temperature : float, optional
        The :math:`\tau`. Default: the square root of ``n_features``.
    bias : bool, default=True
        Whether there is a bias per output, without decay.
    seed : int, default=0
        Seed of the initial weights.

    Examples
    --------
    >>> probe = AttentiveProbe(6, 2, n_queries=3)
    >>> tokens, mask = torch.zeros(5, 4, 6), torch.ones(5, 4, dtype=torch.bool)
    >>> probe(tokens, mask).shape, probe.attention(tokens, mask).shape
    (torch.Size([5, 2]), torch.Size([5, 3, 4]))
    """

    def __init__(
        self,
        n_features: int,
        n_outputs: int = 1,
        n_queries: int = 1,
        rank: int | None = None,
        temperature: float | None = None,
        bias: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_counts(n_features=n_features, n_outputs=n_outputs, n_queries=n_queries)
        rank = min(n_features, n_outputs) if rank is None else rank
        check_counts(rank=rank)
        check_flag(bias, "bias")
        self.temperature = math.sqrt(n_features) if temperature is None else temperature
        check_positive(temperature=self.temperature)
        normal = normal_draws(seed)
        self.queries = nn.Parameter(normal(n_queries, n_features))  # (h, d)
        self.values = nn.Parameter(normal(n_queries, n_features, rank) / math.sqrt(n_features))  # (h, d, r)
        self.outputs = nn.Parameter(normal(n_queries, rank, n_outputs) / math.sqrt(n_queries * rank))  # (h, r, c)
        self.bias = nn.Parameter(torch.zeros(n_outputs)) if bias else None  # (c,)

    def extra_repr(self) -> str:
        """Sizes, as ``repr`` of the module shows them."""
        n_queries, n_features, rank = self.values.shape
        return as_arguments(
            n_features=n_features,
            n_outputs=self.outputs.shape[2],
            n_queries=n_queries,
            rank=rank,
            bias=self.bias is not None,
        )

    def attention(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Weights of the tokens; rows are in the simplex.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples.
        mask : Tensor of bool of shape (N, n), optional
            Which tokens are real. Default: all.

        Returns
        -------
        Tensor of shape (N, n_queries, n)
            Those of a sample without a real token are equal.

        Raises
        ------
        ValueError
            As ``forward`` does.
        """
        return self._weights(*self._real(tokens, mask))

    def _real(self, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What ``masked`` gives; tokens as they are without a mask."""
        check_tokens_for(self.values, tokens, None, self.values.shape[1])
        return (tokens, None) if mask is None else masked(tokens, mask)

    def _weights(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        scores = self.queries @ tokens.mT / self.temperature
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -math.inf)
        return torch.softmax(scores, -1)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Predictions.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples.
        mask : Tensor of bool of shape (N, n), optional
            Which tokens are real. Default: all.

        Returns
        -------
        Tensor of shape (N, c)
            The bias, or zero, for a sample without a real token, which ``train`` refuses.

        Raises
        ------
        ValueError
            If the tokens are of another shape, precision or device than the network's.
        """
        tokens, mask = self._real(tokens, mask)
        pooled = self._weights(tokens, mask) @ tokens  # (N, h, d)
        pred = torch.einsum("ihd,hdc->ic", pooled, self.coef())
        return pred if self.bias is None else pred + self.bias

    def coef(self) -> Tensor:
        """The matrices ``Z_j`` that read what each query pools, shape ``(n_queries, d, c)``."""
        return self.values @ self.outputs

    def decay(self, penalty: str | Penalty | None = None) -> Tensor:
        """Weight decay of values and outputs; queries and bias have none.

        Parameters
        ----------
        penalty : str or Penalty, optional
            Default, and ``"nuclear"``: half the sum of squares of values and outputs. ``"group_l2"``: with the l1 norm
            of the rows of the outputs in place of the l2 norm.

        Returns
        -------
        Tensor
            A scalar with gradients.
        """
        left = self.values.transpose(1, 2).flatten(0, 1)  # one row per head
        return (
            get_penalty("nuclear" if penalty is None else penalty).factor_cost(left, self.outputs.flatten(0, 1)).sum()
        )

    @classmethod
    def from_coef(
        cls,
        queries: ArrayLike | Tensor,
        coef: ArrayLike | Tensor,
        bias: ArrayLike | Tensor | None = None,
        temperature: float | None = None,
        penalty: str | Penalty = "nuclear",
    ) -> AttentiveProbe:
        """A probe with given queries and readouts, its values and outputs balanced, so that its decay is least.

        Parameters
        ----------
        queries : array-like of shape (h, d)
            The queries.
        coef : array-like of shape (h, d, c)
            The matrices ``Z_j``.
        bias : array-like of shape (c,), optional
            Default: no bias.
        temperature : float, optional
            As of the class.
        penalty : str or Penalty, default="nuclear"
            Which decay is least, as in `decay`.

        Returns
        -------
        AttentiveProbe
            In the precision of `coef`, of the default rank; of rank ``c`` for a penalty that is a sum over outputs.

        Examples
        --------
        >>> probe = AttentiveProbe.from_coef(torch.zeros(1, 2), torch.tensor([[[3.0], [4.0]]]))
        >>> round(probe.decay().item(), 5)
        5.0
        """
        matrices = as_tensor(coef, name="coef").detach()
        matrices = matrices if matrices.is_floating_point() else matrices.double()
        rows = as_tensor(queries, name="queries").detach().to(matrices)
        if matrices.ndim != 3 or rows.shape != matrices.shape[:2]:
            raise ValueError(
                "coef must have shape (n_queries, n_features, n_outputs) and queries (n_queries, n_features), got "
                f"{tuple(matrices.shape)} and {tuple(rows.shape)}"
            )
        h, d, c = matrices.shape
        norm = get_penalty(penalty)
        rank = c if norm.output_separable else None
        probe = cls(d, c, h, rank, temperature=temperature, bias=bias is not None).to(matrices)
        block, left, right = norm.factorize(as_floats(matrices))
        with torch.no_grad():
            probe.queries.copy_(rows)
            probe.values.zero_()
            probe.outputs.zero_()
            for j in range(h):
                pieces = (block[:, 0] == j).nonzero()[:, 0]
                probe.values[j, :, : len(pieces)] = left[pieces].T
                probe.outputs[j, : len(pieces)] = right[pieces]
            if probe.bias is not None:
                probe.bias.copy_(as_tensor(bias, name="bias").to(matrices))
        return probe

    @classmethod
    def from_multihead(cls, attention: nn.MultiheadAttention, query: Tensor, readout: nn.Linear) -> AttentiveProbe:
        r"""The attentive probe that cross-attention of learned query tokens with a linear readout is.

        A head ``i`` of ``attention`` with the query token :math:`t` gives the effective query
        :math:`W_{K_i}^\top (W_{Q_i} t + b_{Q_i})` at the temperature of the square root of its width, and the readout
        :math:`W_{V_i}^\top W_{O_i}^\top W^\top`. Biases of keys change no softmax; those of values and outputs become
        part of the bias.

        Parameters
        ----------
        attention : MultiheadAttention
            With ``batch_first`` or without, and keys and values of the width of its queries; without ``add_bias_kv``,
            ``add_zero_attn`` and dropout.
        query : Tensor of shape (m, e) or (1, m, e)
            The learned query tokens, whose outputs are averaged before the readout.
        readout : Linear
            From the width ``e`` to the outputs, directly behind the attention.

        Returns
        -------
        AttentiveProbe
            With ``m`` times as many queries as `attention` has heads: the same function of tokens and mask.

        Raises
        ------
        ValueError
            If `attention` has one of the options above.

        Examples
        --------
        >>> attention = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> query, readout, tokens = torch.randn(1, 8), nn.Linear(8, 3), torch.randn(5, 4, 8)
        >>> expected = readout(attention(query.expand(5, 1, 8), tokens, tokens)[0][:, 0])
        >>> probe = AttentiveProbe.from_multihead(attention, query, readout)
        >>> len(probe.queries), bool(torch.allclose(probe(tokens), expected, atol=1e-5))
        (2, True)
        """
        if attention.bias_k is not None or attention.add_zero_attn or not attention._qkv_same_embed_dim:
            raise ValueError(
                "attention must have no bias_k, no add_zero_attn, and one width for queries, keys and values"
            )
        if attention.dropout:
            raise ValueError(f"attention must have dropout=0, got {attention.dropout}")
        with torch.no_grad():
            tokens = query.reshape(-1, query.shape[-1])  # (m, e)
            count, heads = len(tokens), attention.num_heads
            projections = attention.in_proj_weight.unflatten(0, (3, heads, -1))  # (3, H, w, e)
            biases = projections.new_zeros(3, heads, projections.shape[2])
            if attention.in_proj_bias is not None:
                biases = attention.in_proj_bias.view(3, heads, -1)
            wq, wk, wv = projections
            seeds = torch.einsum("hwe,me->mhw", wq, tokens) + biases[0]
            queries = torch.einsum("mhw,hwe->mhe", seeds, wk).flatten(0, 1)
            out = attention.out_proj.weight.unflatten(1, (heads, -1))  # (e, H, w)
            read = torch.einsum("ce,ehw->hwc", readout.weight, out) / count
            coef = torch.einsum("hwe,hwc->hec", wv, read).repeat(count, 1, 1)
            bias: Tensor = count * torch.einsum("hw,hwc->c", biases[2], read)
            if attention.out_proj.bias is not None:
                bias = bias + readout.weight @ attention.out_proj.bias
            if readout.bias is not None:
                bias = bias + readout.bias
        return cls.from_coef(queries, coef, bias, temperature=math.sqrt(projections.shape[2]))


def attentive_reading(module: Any) -> AttentiveProbe:
    """The attentive probe that a module is or, by its method ``as_attentive_probe``, says that it is.

    Parameters
    ----------
    module : AttentiveProbe or Module
        A module of another class defines ``as_attentive_probe()``, for example with ``AttentiveProbe.from_coef`` or
        ``AttentiveProbe.from_multihead``.

    Returns
    -------
    AttentiveProbe

    Raises
    ------
    TypeError
        If the module is neither.

    Examples
    --------
    >>> probe = AttentiveProbe(3)
    >>> attentive_reading(probe) is probe
    True
    """
    if isinstance(module, AttentiveProbe):
        return module
    say = getattr(module, "as_attentive_probe", None)
    found = say() if callable(say) else None
    if not isinstance(found, AttentiveProbe):
        raise TypeError(
            f"module must be an AttentiveProbe or have a method as_attentive_probe that returns one, got "
            f"{type(module).__name__}; AttentiveProbe.from_coef and from_multihead make one"
        )
    return found

"""Stacked layers of gated convex attention, trained end to end."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from convexformer.gates import Gates, TrainingData, get_gate_source
from convexformer.validation import check_flag, is_integer
from convexformer_solvers import Penalty
from convexformer_solvers.validation import check_counts

from .base import AttentionNetwork, GatedModule
from .convex_attention import ConvexAttention
from .sequence_attention import SequenceAttention
from .simplex import Simplex


class DeepConvexTransformer(AttentionNetwork):
    r"""Layers of gated convex attention one after another (paper [C], section 4), trained end to end.

    **Not convex as a whole, and without a certificate.** The name is that of its parts, heads of convex attention with
    fixed gates: to train the last layer on fixed inputs is a convex program, to train all of them together is not, and
    may end anywhere. ``GreedyConvexTransformerClassifier`` trains layer by layer with a certificate for each.

    All layers but the last map tokens to tokens, the last one to outputs, both with fixed gates :math:`g_j`:

    .. math:: X \leftarrow X + \sum_j g_j(X) \, W_{1j} X w_{2j} w_{3j}^\top, \qquad
              f(X) = b + \sum_j g_j(X) \, (w_{1j}^\top X w_{2j}) \, w_{3j}

    with the rows of :math:`W_{1j} \in R^{n \times n}` and :math:`w_{1j}` in the simplex. Gates are evaluated on the
    inputs that a layer has at the moment and pass no gradient. With one layer this is ``ConvexAttention``.

    Parameters
    ----------
    n_tokens, n_features, n_outputs : int
        Shape of the data: ``n``, ``d`` and ``c``, which is 1 by default. Samples are tokens; for symbols put an
        embedding in front, ``EmbeddedNetwork(TokenEmbedding(...), DeepConvexTransformer(...))``.
    n_layers : int, default=2
        Number of layers ``L``.
    n_heads : int, default=16
        Heads of each layer, spread evenly over its gates.
    gates : {"gaussian", "sparse", "fourier"}, pair of arrays, Gates or GateSource, default="gaussian"
        Where the gates of each layer come from; given ones serve every layer. Sources that read data (``needs_data``)
        have none to read here: give the gates that they make, ``source.make(TrainingData(X), random_state)``.
    n_gates : int, optional
        Gates to draw for each layer, where they are drawn. Default: ``n_heads``, so that each head has its own.
    residual : bool, default=True
        Whether a layer adds to its tokens or replaces them. The last has nothing to add to.
    simplex : {"softmax", "projection"}, default="softmax"
        As in ``ConvexAttention``.
    bias : bool, default=True
        Whether there is a bias per output, without decay.
    seed : int, default=0
        Of the gates and the initial weights, both drawn layer by layer.

    Raises
    ------
    ValueError
        If a size is not a positive integer, ``gates`` or ``simplex`` is none of the above, or the source of the gates
        reads data.

    Examples
    --------
    >>> network = DeepConvexTransformer(4, 3, 2, n_layers=3)
    >>> network(torch.zeros(5, 4, 3)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self,
        n_tokens: int,
        n_features: int,
        n_outputs: int = 1,
        n_layers: int = 2,
        n_heads: int = 16,
        gates: Any = "gaussian",
        n_gates: int | None = None,
        residual: bool = True,
        simplex: Simplex = "softmax",
        bias: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_counts(n_tokens=n_tokens, n_features=n_features, n_outputs=n_outputs, n_layers=n_layers, n_heads=n_heads)
        if not (is_integer(seed, 0) and seed < 2**32):
            raise ValueError(f"seed must be an integer from 0 to 4294967295, got {seed!r}")
        self.residual = check_flag(residual, "residual")
        source = get_gate_source(gates, n_heads if n_gates is None else n_gates)
        if source.needs_data:
            raise ValueError(
                f"gates={gates!r} are made from training data, which there are none of when a network is built; give "
                "gates that are made beforehand, Gates or a pair of arrays, or draw them, for example 'gaussian'"
            )
        rng = np.random.RandomState(seed)
        shape = (n_tokens, n_features)
        data = TrainingData(torch.empty(1, *shape, device="meta"))  # a shape without values, so that none can be read
        draws = [(source.make(data, rng), int(rng.randint(2**31))) for _ in range(n_layers)]
        self.blocks = nn.ModuleList([_Block(*shape, n_heads, made, simplex, number) for made, number in draws[:-1]])
        made, number = draws[-1]
        self.last = ConvexAttention(*shape, n_outputs, n_heads, made, simplex=simplex, bias=bias, seed=number)

    def forward(self, tokens: Tensor, masks: Tensor | None = None) -> Tensor:
        """Predictions.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples.
        masks : Tensor of shape (N, h), optional
            Masks of the first layer's gates on these samples, where they have been computed before.

        Returns
        -------
        Tensor of shape (N, c)
        """
        for block in self.blocks:
            change = block(tokens, masks)
            tokens, masks = tokens + change if self.residual else change, None
        return self.last(tokens, masks)

    def prepared(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Tokens and the masks of the first layer's gates; those of the others change with the weights."""
        gates = [*self.blocks, self.last][0].gates
        return (tokens, gates.masks(tokens))

    def decay(self, penalty: str | Penalty | None = None) -> Tensor:
        """Weight decay of the heads of all layers, ``sum_j (|w2_j|_2^2 + |w3_j|^2) / 2``.

        Parameters
        ----------
        penalty : str or Penalty, optional
            The norm of ``w3`` is l1 for ``"group_l2"``, the default as of ``ConvexAttention``, and l2 for
            ``"nuclear"``, which lets outputs share features.

        Returns
        -------
        Tensor
            A scalar with gradients.
        """
        penalty = "group_l2" if penalty is None else penalty
        heads: list[Any] = [block.heads for block in self.blocks]
        return sum((part.decay(penalty) for part in heads), start=self.last.decay(penalty))


class _Block(GatedModule):
    """Gated heads that map tokens to tokens."""

    def __init__(self, n_tokens: int, n_features: int, n_heads: int, gates: Gates, simplex: Simplex, seed: int) -> None:
        super().__init__()
        self.gates = gates
        self.heads = SequenceAttention(
            n_tokens, n_features, n_features, n_heads, simplex=simplex, bias=False, seed=seed
        )
        self.gate_index: Tensor
        self.register_buffer("gate_index", torch.arange(n_heads) % len(gates))  # (m,)

    def forward(self, tokens: Tensor, masks: Tensor | None = None) -> Tensor:
        mixed = self.heads.mixed(tokens)
        return (mixed * self.masks_of(tokens, masks)[:, None, self.gate_index]) @ self.heads.w3

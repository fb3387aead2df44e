"""Layers of a transformer as steps that lower an energy ([U] sections 3 to 5)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from convexformer.nn.modules.base import check_like, seeded, seeded_parts
from convexformer.validation import check_flag, check_one_of, check_positive
from convexformer_solvers.validation import check_counts

from .attention import DescentWarning, EnergyAttention
from .attention import Mode as AttentionMode
from .energies import Energy, FeedForwardEnergy, NonNegative
from .graphs import check_attention_mask, check_last_sizes, without_padding
from .parametrizations import SymmetricEigenvalues, computed_once
from .rho import Rho

LayerMode = Literal["aim", "joint"]
MODES = ("aim", "joint")


class Guarantee(NamedTuple):
    """Whether theory promises that a layer never raises its energy, and why.

    Attributes
    ----------
    holds : bool
        Whether it does.
    reason : str
        The theorem, or the hypothesis that is not met.

    Examples
    --------
    >>> UnfoldedLayer(4, mode="joint").guarantee()
    Guarantee(holds=True, reason='a proximal gradient step under a majoriser never raises the energy')
    >>> UnfoldedLayer(4, mode="aim").guarantee().holds
    False
    """

    holds: bool
    reason: str


class UnfoldedOutput(NamedTuple):
    """Tokens of an unfolded transformer, with what its layers did to the energy.

    Attributes
    ----------
    tokens : Tensor of shape (..., n, d)
        After the last layer.
    energies : Tensor of shape (n_layers, 2, ...) or None
        Of each sample before and after each layer, by the energy of that layer. Infinite before the first layer for
        tokens with negative entries, which the ReLU forbids.
    states : Tensor of shape (n_layers + 1, ..., n, d) or None
        Tokens before the first layer and after each.

    Examples
    --------
    >>> network = UnfoldedTransformer(4, n_layers=3, mode="joint")
    >>> output = network(torch.rand(2, 5, 4), return_energies=True)
    >>> before, after = output.energies.unbind(1)  # of each layer and sample
    >>> before.shape, bool((after <= before).all()), output.states is None
    (torch.Size([3, 2]), True, True)
    """

    tokens: Tensor
    energies: Tensor | None = None
    states: Tensor | None = None


class UnfoldedLayer(nn.Module):
    r"""Attention, a linear map and a ReLU, made to lower one energy ([U] eq. 20).

    .. math:: E(Y) = E_1(Y W_a) + E_2(Y) + \varphi(Y)

    with the interaction energy :math:`E_1` of ``EnergyAttention``, the quadratic :math:`E_2` of ``FeedForwardEnergy``
    with weight :math:`W_f` and anchor :math:`B`, and the indicator :math:`\varphi` of ``Y >= 0``.

    ``mode="aim"`` alternates an inexact step of each part:

    .. math:: U = \mathrm{attention}(Y), \qquad Y^+ = \mathrm{ReLU}\big(U - a_2 \nabla E_2(U)\big).

    With both steps 1 and no anchor it is :math:`\mathrm{ReLU}(\mathrm{softmax}_b(Y W_a W_a^\top Y^\top) Y W)` with
    :math:`W = -\mathrm{sym}(W_f)`. It may raise the energy: [U] Corollary 4.5 is about scalar steps.

    ``mode="joint"`` is one proximal gradient step of the whole energy,

    .. math:: Y^+ = \mathrm{ReLU}\big(Y - \nabla (E_1(\cdot W_a) + E_2)(Y) / L(Y)\big),

    where ``L`` bounds the curvature of the majoriser at the tokens of the sample. It never raises the energy.

    Parameters
    ----------
    n_features : int
        Width ``d`` of the tokens.
    mode : {"aim", "joint"}, default="aim"
        As above.
    rho : {"exp", "log1", "log2"} or Rho, default="exp"
        Function of the interaction energy.
    attention : {"softmax", "jacobi"}, default="softmax"
        Mode of the attention: ``"jacobi"`` adds :math:`\tfrac12 |Y W_a - B W_a|^2` to :math:`E_1`.
    attention_step, feedforward_step : float, default=1.0
        Steps :math:`a_1` and :math:`a_2` of mode ``"aim"``; the default is that of eq. (20). Mode ``"joint"`` takes its
        step from the bound.
    eigenvalue_limit : float or None, default=0.95
        Bound of the absolute eigenvalues of :math:`\mathrm{sym}(W_f)`, kept during training by
        ``SymmetricEigenvalues``; below 1 the energy is bounded below. None: :math:`W_f` is free.
    graph : Tensor of bool of shape (n, n), optional
        Symmetric: which tokens attend to each other. Default: all.

    Attributes
    ----------
    attention_weight : Parameter of shape (d, d)
        :math:`W_a`, drawn as by Xavier from torch's global generator.
    feedforward_weight : Tensor of shape (d, d)
        :math:`W_f`, drawn likewise, as the parametrisation makes it.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Warns
    -----
    DescentWarning
        If `eigenvalue_limit` is 1 or more: the energy of the feed-forward part may be unbounded below, and no theorem
        of [U] section 4 applies.

    Examples
    --------
    >>> layer = UnfoldedLayer(3, mode="joint")
    >>> tokens = torch.rand(2, 5, 3)
    >>> energy = layer.energy()
    >>> bool((energy.value(layer(tokens)) <= energy.value(tokens)).all())
    True
    """

    def __init__(
        self,
        n_features: int,
        mode: LayerMode = "aim",
        *,
        rho: str | Rho = "exp",
        attention: AttentionMode = "softmax",
        attention_step: float = 1.0,
        feedforward_step: float = 1.0,
        eigenvalue_limit: float | None = 0.95,
        graph: Tensor | None = None,
    ) -> None:
        super().__init__()
        self._arguments = (
            (n_features, mode),
            {
                "rho": rho,
                "attention": attention,
                "attention_step": attention_step,
                "feedforward_step": feedforward_step,
                "eigenvalue_limit": eigenvalue_limit,
                "graph": graph,
            },
        )
        check_counts(n_features=n_features)
        check_one_of(MODES, mode=mode)
        check_positive(feedforward_step=feedforward_step)
        self.mode, self.feedforward_step = mode, feedforward_step
        self.attention = EnergyAttention(rho, attention, step=attention_step, graph=graph)
        self.attention_weight = nn.Parameter(nn.init.xavier_normal_(torch.empty(n_features, n_features)))
        self.feedforward_weight = nn.Parameter(nn.init.xavier_normal_(torch.empty(n_features, n_features)))
        if eigenvalue_limit is not None:
            check_positive(eigenvalue_limit=eigenvalue_limit)
            parametrize.register_parametrization(self, "feedforward_weight", SymmetricEigenvalues(eigenvalue_limit))
            if eigenvalue_limit >= 1:
                warnings.warn(
                    f"eigenvalue_limit={eigenvalue_limit} lets I + sym(Wf) have eigenvalues of zero or below: the "
                    "energy of the feed-forward part need not be bounded below, and [U] Theorem 4.1 does not apply; "
                    "use a limit below 1",
                    DescentWarning,
                    stacklevel=2,
                )

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not parametrize.is_parametrized(self):
            return super().__reduce_ex__(protocol)
        # A parametrised module cannot be pickled as other objects are: its class is made when it is parametrised.
        kind = parametrize.type_before_parametrizations(self)
        sizes, options = self._arguments
        frozen = [name for name, parameter in self.named_parameters() if not parameter.requires_grad]
        # What may have been set, or moved to a device, since the layer was made.
        set_since = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        set_since["attention"] = self.attention
        return _rebuilt, (kind, sizes, options, self.state_dict(), self.training, frozen, set_since)

    def extra_repr(self) -> str:
        """The arguments that are no modules, as ``repr`` of the module shows them."""
        return f"n_features={len(self.attention_weight)}, mode={self.mode!r}, feedforward_step={self.feedforward_step}"

    def forward(self, tokens: Tensor, *, anchor: Tensor | None = None, attention_mask: Any = None) -> Tensor:
        """Tokens after the layer.

        Parameters
        ----------
        tokens : Tensor of shape (..., n, d)
            ``Y``.
        anchor : Tensor of shape (..., n, d), optional
            ``B``. Default: 0.
        attention_mask : Tensor of shape (..., n), optional
            1 for tokens, 0 for padding, which comes out as zero rows. Default: no padding.

        Returns
        -------
        Tensor of shape (..., n, d)
            Without negative entries.

        Raises
        ------
        TypeError
            If an argument is no tensor.
        ValueError
            If a shape is not as described.
        """
        check_last_sizes("tokens", tokens, n_features=len(self.attention_weight))
        if anchor is not None:
            check_last_sizes("anchor", anchor, *tokens.shape[-2:])
        present = check_attention_mask(attention_mask, tuple(tokens.shape))
        tokens = without_padding(tokens, present)
        moved = self._alternate(tokens, anchor, present) if self.mode == "aim" else self._step(tokens, anchor, present)
        moved = NonNegative().prox(moved)
        return without_padding(moved, present)

    def _alternate(self, tokens: Tensor, anchor: Tensor | None, present: Tensor | None) -> Tensor:
        """An attention step, then a gradient step of the feed-forward part."""
        mixed = self.attention(
            tokens,
            projected=tokens @ self.attention_weight,
            anchor=anchor if self.attention.mode == "jacobi" else None,
            attention_mask=present,
        )
        a, weight = self.feedforward_step, self.feedforward_weight
        pulled = (1 - a) * mixed - a * (mixed @ ((weight + weight.mT) / 2))
        return pulled if anchor is None else pulled + a * anchor

    def _step(self, tokens: Tensor, anchor: Tensor | None, present: Tensor | None) -> Tensor:
        """A gradient step of the differentiable part of the energy, of the length that its curvature allows."""
        gradient, curvature = self.smooth_energy(anchor, present).gradient_and_lipschitz(tokens)
        curvature = curvature.clamp_min(torch.finfo(tokens.dtype).eps)  # 0 for a linear energy
        return tokens - gradient / curvature[..., None, None]

    def smooth_energy(self, anchor: Tensor | None = None, attention_mask: Any = None) -> Energy:
        """The differentiable part of the energy, :math:`E_1(Y W_a) + E_2(Y)`.

        Parameters
        ----------
        anchor : Tensor of shape (..., n, d), optional
            ``B``. Default: 0.
        attention_mask : Tensor of shape (..., n), optional
            As in ``forward``; rows of padding must be zero, in the anchor too.

        Returns
        -------
        Energy
        """
        if anchor is not None:
            check_last_sizes("anchor", anchor, n_features=len(self.attention_weight))
        projected = None if anchor is None else anchor @ self.attention_weight
        interaction = self.attention.energy(projected, attention_mask).of(self.attention_weight)
        return interaction + FeedForwardEnergy(self.feedforward_weight, anchor)

    def energy(self, anchor: Tensor | None = None, attention_mask: Any = None) -> LayerEnergy:
        """The energy of the layer, infinite where tokens have negative entries; arguments as of ``smooth_energy``."""
        return LayerEnergy(self.smooth_energy(anchor, attention_mask))

    def guarantee(self) -> Guarantee:
        """Whether theory promises that this layer, with its current weights, never raises its energy.

        Returns
        -------
        Guarantee
        """
        if self.mode == "aim":
            return Guarantee(
                False,
                "mode='aim' preconditions each row of tokens, and [U] Theorem 4.1 and Corollary 4.5 are about scalar "
                "steps: the energy may rise; mode='joint' never raises it",
            )
        weight = self.feedforward_weight.detach().double()
        if torch.linalg.eigvalsh((weight + weight.mT) / 2)[0] <= -1:
            return Guarantee(
                True,
                "a proximal gradient step under a majoriser never raises the energy, but I + sym(Wf) is not positive "
                "definite, so the energy may have no lower bound; set eigenvalue_limit below 1",
            )
        return Guarantee(True, "a proximal gradient step under a majoriser never raises the energy")


def _rebuilt(
    kind: type[UnfoldedLayer],
    sizes: tuple[Any, ...],
    options: dict[str, Any],
    state: dict[str, Any],
    training: bool,
    frozen: Sequence[str] = (),
    set_since: Mapping[str, Any] | None = None,
) -> UnfoldedLayer:
    """The layer that was pickled."""
    with warnings.catch_warnings(), seeded(0):  # it warned when it was made, and its weights are given
        warnings.simplefilter("ignore", DescentWarning)
        layer = kind(*sizes, **options)
    layer.load_state_dict(state, assign=True)
    for name, value in (set_since or {}).items():
        setattr(layer, name, value)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return layer.train(training)


class LayerEnergy:
    """A differentiable energy on tokens without negative entries, infinite elsewhere.

    Parameters
    ----------
    smooth : Energy
        The differentiable part.

    Examples
    --------
    >>> energy = UnfoldedLayer(2).energy()
    >>> energy.value(-torch.ones(3, 2))
    tensor(inf, grad_fn=...)
    """

    def __init__(self, smooth: Energy) -> None:
        self.smooth, self.constraint = smooth, NonNegative()

    def value(self, tokens: Tensor) -> Tensor:
        """Energy of each sample, of shape ``(...)``."""
        return self.smooth.value(tokens) + self.constraint.value(tokens)


class UnfoldedTransformer(nn.Module):
    r"""Transformer whose layers are steps that lower an energy.

    Parameters
    ----------
    n_features : int
        Width of the tokens.
    n_layers : int, default=6
        Number of layers.
    mode : {"aim", "joint"}, default="aim"
        As of ``UnfoldedLayer``.
    shared : bool, default=True
        Whether all layers have the same weights, and so lower one energy; a network may then be run with more layers
        than it was trained with. False: each layer has weights and an energy of its own.
    anchored : bool, default=False
        Whether the input is the anchor ``B`` of every layer, so that tokens stay near to it. Without, ``B = 0``, and
        tokens soon become equal: the energy then falls for almost any layer, also for one that is wrong.
    seed : int, default=0
        Of the initial weights; torch's global generators are neither used nor changed.
    **layer_options
        Arguments of ``UnfoldedLayer``: `rho`, `attention`, `attention_step`, `feedforward_step`, `eigenvalue_limit`,
        `graph`.

    Attributes
    ----------
    layers : ModuleList of UnfoldedLayer
        One for shared weights, ``n_layers`` otherwise.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Examples
    --------
    >>> network = UnfoldedTransformer(4, n_layers=3, mode="joint", anchored=True)
    >>> output = network(torch.rand(2, 5, 4), return_energies=True, return_states=True)
    >>> output.tokens.shape, output.energies.shape, output.states.shape
    (torch.Size([2, 5, 4]), torch.Size([3, 2, 2]), torch.Size([4, 2, 5, 4]))
    >>> bool((output.energies[:, 1] <= output.energies[:, 0]).all())
    True
    """

    def __init__(
        self,
        n_features: int,
        n_layers: int = 6,
        mode: LayerMode = "aim",
        *,
        shared: bool = True,
        anchored: bool = False,
        seed: int = 0,
        **layer_options: Any,
    ) -> None:
        super().__init__()
        check_counts(n_layers=n_layers)
        self.n_layers = n_layers
        self.shared, self.anchored = check_flag(shared, "shared"), check_flag(anchored, "anchored")
        with seeded_parts(self, seed):
            count = 1 if self.shared else n_layers
            self.layers = nn.ModuleList(UnfoldedLayer(n_features, mode, **layer_options) for _ in range(count))

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Any = None,
        *,
        n_layers: int | None = None,
        return_energies: bool = False,
        return_states: bool = False,
    ) -> Tensor | UnfoldedOutput:
        """Tokens after all layers.

        Parameters
        ----------
        tokens : Tensor of shape (..., n, d)
            The samples, in the precision and on the device of the weights.
        attention_mask : Tensor of shape (..., n), optional
            1 for tokens, 0 for padding. Default: no padding.
        n_layers : int, optional
            Layers to run. Default: those of the network. More than those need shared weights.
        return_energies, return_states : bool, default=False
            Whether to return energies before and after each layer, and the tokens of all layers.

        Returns
        -------
        Tensor of shape (..., n, d), or UnfoldedOutput where energies or states are asked for

        Raises
        ------
        ValueError
            If a shape or `n_layers` is not as described.
        """
        weight = next(self.parameters())
        check_like(weight, tokens, "tokens")
        check_last_sizes("tokens", tokens, n_features=len(weight))
        present = check_attention_mask(attention_mask, tuple(tokens.shape))
        tokens = without_padding(tokens, present)
        anchor = tokens if self.anchored else None
        states, energies = [tokens], []
        with computed_once():
            for layer in self.running_layers(n_layers):
                states.append(layer(states[-1], anchor=anchor, attention_mask=present))
                if return_energies:
                    value = layer.energy(anchor, present).value
                    energies.append(torch.stack([value(states[-2]), value(states[-1])]))
                if not return_states:
                    del states[0]
        if not (return_energies or return_states):
            return states[-1]
        return UnfoldedOutput(
            states[-1],
            torch.stack(energies) if return_energies else None,
            torch.stack(states) if return_states else None,
        )

    def running_layers(self, n_layers: int | None = None) -> list[UnfoldedLayer]:
        """The layers that ``forward`` runs, in order; one several times where weights are shared.

        Parameters
        ----------
        n_layers : int, optional
            As in ``forward``.

        Returns
        -------
        list of UnfoldedLayer
        """
        count = self.n_layers if n_layers is None else n_layers
        check_counts(n_layers=count)
        if self.shared:
            return [self.layers[0]] * count  # type: ignore[list-item]
        if count > self.n_layers:
            raise ValueError(f"n_layers must be at most {self.n_layers} for layers of their own weights, got {count}")
        return list(self.layers[:count])  # type: ignore[arg-type]

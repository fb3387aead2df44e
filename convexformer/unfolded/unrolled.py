"""Unrolled networks whose every layer puts out an estimate, as descent-constrained training needs ([K])."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convexformer.nn.modules.base import as_arguments, check_tokens_for, seeded, seeded_parts
from convexformer.validation import check_flag, check_one_of, check_positive
from convexformer_solvers.validation import check_counts, check_tensor

from .graphs import check_attention_mask, without_padding
from .parametrizations import decomposable

Dictionary = Literal["dct", "random"]
DICTIONARIES = ("dct", "random")
Start = Literal["zero", "analysis"]
STARTS = ("zero", "analysis")


def frame_patches(frames: Tensor, patch_size: int) -> Tensor:
    """Cut grey frames into square patches, one token each, row by row.

    Parameters
    ----------
    frames : Tensor of shape (..., height, width)
        The frames; gradients flow through.
    patch_size : int
        Side of a patch in pixels; divides height and width.

    Returns
    -------
    Tensor of shape (..., n_patches, patch_size ** 2)

    Raises
    ------
    TypeError
        If `frames` is no tensor; ``convexformer.image_patches`` cuts arrays.
    ValueError
        If frames have fewer than two dimensions or the patch does not divide them.

    See Also
    --------
    frames_from_patches : The inverse.

    Examples
    --------
    >>> frame_patches(torch.arange(16.0).reshape(4, 4), 2)
    tensor([[ 0.,  1.,  4.,  5.],
            [ 2.,  3.,  6.,  7.],
            [ 8.,  9., 12., 13.],
            [10., 11., 14., 15.]])
    """
    check_tensor("frames", frames)
    if frames.ndim < 2:
        raise ValueError(f"frames must have shape (..., height, width), got {tuple(frames.shape)}")
    height, width = frames.shape[-2:]
    rows, columns = _patch_grid(height, width, patch_size)
    tiles = frames.reshape(*frames.shape[:-2], rows, patch_size, columns, patch_size)
    return tiles.transpose(-3, -2).reshape(*frames.shape[:-2], rows * columns, patch_size**2)


def frames_from_patches(patches: Tensor, shape: Sequence[int], patch_size: int) -> Tensor:
    """Put the patches of ``frame_patches`` together again.

    Parameters
    ----------
    patches : Tensor of shape (..., n_patches, patch_size ** 2)
        Patches, row by row.
    shape : tuple of two ints
        Height and width of a frame.
    patch_size : int
        Side of a patch in pixels; divides height and width.

    Returns
    -------
    Tensor of shape (..., height, width)

    Raises
    ------
    TypeError
        If `patches` is no tensor.
    ValueError
        If `shape` is not as described, the patch does not divide it, or patches are not those of such frames.

    Examples
    --------
    >>> frames = torch.rand(3, 4, 6)
    >>> torch.equal(frames_from_patches(frame_patches(frames, 2), (4, 6), 2), frames)
    True
    """
    check_tensor("patches", patches)
    if np.shape(shape) != (2,):
        raise ValueError(f"shape must be (height, width), got {shape!r}")
    height, width = shape
    check_counts(height=height, width=width)
    rows, columns = _patch_grid(height, width, patch_size)
    if patches.ndim < 2 or patches.shape[-2:] != (rows * columns, patch_size**2):
        wanted = f"(..., {rows * columns}, {patch_size**2})"
        raise ValueError(f"patches must have shape {wanted} for frames of {tuple(shape)}, got {tuple(patches.shape)}")
    tiles = patches.reshape(*patches.shape[:-2], rows, columns, patch_size, patch_size)
    return tiles.transpose(-3, -2).reshape(*patches.shape[:-2], height, width)


def _patch_grid(height: int, width: int, patch_size: int) -> tuple[int, int]:
    check_counts(patch_size=patch_size)
    if height % patch_size or width % patch_size:
        raise ValueError(f"patch_size must divide {height} x {width} frames, got {patch_size}")
    return height // patch_size, width // patch_size


def overcomplete_dct(n_features: int, n_atoms: int) -> Tensor:
    r"""Dictionary of sampled cosines, of unit norm.

    Of signals of length ``d`` it is

    .. math:: D_{ij} \propto \cos\big(\pi (i + \tfrac12) j / m\big), \qquad i < d, \; j < m,

    the first ``d`` samples of the cosines of a discrete cosine transform of length ``m``: for ``m = d`` the orthogonal
    transform, and for ``m = 2 d`` a tight frame. Where both sizes are squares tokens are taken for square patches, and
    the dictionary is the Kronecker product of that of rows and of columns.

    Parameters
    ----------
    n_features : int
        Length ``d`` of an atom.
    n_atoms : int
        Number ``m`` of atoms, at least `n_features`.

    Returns
    -------
    Tensor of shape (n_features, n_atoms)
        In torch's default precision.

    Raises
    ------
    ValueError
        If an argument is not as described.

    Examples
    --------
    >>> D = overcomplete_dct(16, 64)
    >>> torch.allclose(D @ D.T, 4 * torch.eye(16), atol=1e-5), torch.allclose(D.norm(dim=0), torch.ones(64))
    (True, True)
    """
    check_counts(n_features=n_features, n_atoms=n_atoms)
    if n_atoms < n_features:
        raise ValueError(f"n_atoms must be at least n_features={n_features}, got {n_atoms}")
    sides = math.isqrt(n_features), math.isqrt(n_atoms)
    if sides[0] ** 2 == n_features and sides[1] ** 2 == n_atoms:
        cosines = _cosines(*sides)
        atoms = torch.kron(cosines, cosines)
    else:
        atoms = _cosines(n_features, n_atoms)
    return F.normalize(atoms, dim=0).to(torch.get_default_dtype())


def _cosines(length: int, count: int) -> Tensor:
    places = torch.arange(length, dtype=torch.float64) + 0.5
    return torch.cos(torch.pi / count * places[:, None] * torch.arange(count, dtype=torch.float64))


def soft_threshold(values: Tensor, threshold: Tensor | float) -> Tensor:
    """Shrink numbers towards zero by a threshold, the proximal map of ``threshold * |values|``.

    Parameters
    ----------
    values : Tensor
        The numbers.
    threshold : Tensor or float
        At least 0, of a shape that broadcasts; gradients flow through it too.

    Returns
    -------
    Tensor

    Examples
    --------
    >>> soft_threshold(torch.tensor([-3.0, 0.5, 2.0]), 1.0)
    tensor([-2.,  0.,  1.])
    """
    return values.sign() * (values.abs() - threshold).clamp_min(0)


def tied_attention(tokens: Tensor, keys: Tensor, present: Tensor | None = None) -> Tensor:
    r"""Softmax attention whose queries are its keys, :math:`\mathrm{softmax}(K K^\top) Y`.

    Parameters
    ----------
    tokens : Tensor of shape (..., n, d)
        ``Y``, which attention averages.
    keys : Tensor of shape (..., n, k)
        ``K``.
    present : Tensor of bool of shape (..., n), optional
        False for padding, to which no token attends. Default: no padding.

    Returns
    -------
    Tensor of shape (..., n, d)

    Examples
    --------
    >>> tied_attention(torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1))
    tensor([[2.],
            [2.]])
    """
    logits = keys @ keys.mT
    if present is not None:
        logits = logits.masked_fill(~present[..., None, :], -torch.inf)
    return torch.softmax(logits, -1) @ tokens


class UnrolledNetwork(nn.Module, ABC):
    """A network whose layers each put out an estimate of the same thing.

    A subclass gives ``states``, what its layers compute, and ``decode``, the estimate that is made of a state.

    Attributes
    ----------
    n_features, n_layers : int
        Width of the tokens, and number of layers.
    shared : bool
        Whether layers have weights in common.

    Examples
    --------
    >>> isinstance(UnrolledTransformer(4, 2), UnrolledNetwork)
    True
    """

    def __init__(self, n_features: int, n_layers: int, shared: bool) -> None:
        super().__init__()
        check_counts(n_features=n_features, n_layers=n_layers)
        self.n_features, self.n_layers, self.shared = n_features, n_layers, check_flag(shared, "shared")

    @abstractmethod
    def states(self, tokens: Tensor, present: Tensor | None = None) -> Iterator[Tensor]:
        """Yield the state after each layer, computed when it is asked for.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples, padding zero.
        present : Tensor of bool of shape (N, n), optional
            False for padding. Default: no padding.

        Yields
        ------
        Tensor of shape (N, n, ...)
        """

    @abstractmethod
    def decode(self, state: Tensor, layer: int) -> Tensor:
        """The estimate that is made of the state after a layer.

        Parameters
        ----------
        state : Tensor of shape (N, n, ...)
            As ``states`` yields it.
        layer : int
            Its layer, from 0.

        Returns
        -------
        Tensor of shape (N, n, d)
        """

    def layer_outputs(self, tokens: Tensor, attention_mask: Any = None, *, max_layers: int | None = None) -> Tensor:
        r"""What every layer puts out, :math:`\Phi_1, \dots, \Phi_L` in the constraints.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples.
        attention_mask : Tensor of shape (N, n), optional
            1 for tokens, 0 for padding. Default: no padding.
        max_layers : int, optional
            Layers to run. Default: all.

        Returns
        -------
        Tensor of shape (n_layers, N, n, d)
            With zero rows for padding; the first dimension has `max_layers` entries where that is given.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described.
        """
        states, present = self._running(tokens, attention_mask, max_layers)
        return torch.stack([self._estimate(state, layer, present) for layer, state in enumerate(states)])

    def forward(self, tokens: Tensor, attention_mask: Any = None, *, max_layers: int | None = None) -> Tensor:
        """What the last layer puts out.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples, in the precision and on the device of the weights.
        attention_mask : Tensor of shape (N, n), optional
            1 for tokens, 0 for padding, to which no token attends. Default: no padding.
        max_layers : int, optional
            Stop after so many layers and return what the last of these puts out. Default: all layers.

        Returns
        -------
        Tensor of shape (N, n, d)
            With zero rows for padding.

        Raises
        ------
        TypeError
            If `tokens` or the mask is no tensor.
        ValueError
            If a shape, precision, device or `max_layers` is not as described.
        """
        states, present = self._running(tokens, attention_mask, max_layers)
        layer = (self.n_layers if max_layers is None else max_layers) - 1
        return self._estimate(deque(states, maxlen=1).pop(), layer, present)

    def _running(self, tokens: Tensor, mask: Any, max_layers: int | None) -> tuple[Iterator[Tensor], Tensor | None]:
        """The states of so many layers, and the checked mask."""
        check_tokens_for(next(self.parameters()), tokens, None, self.n_features)
        count = self.n_layers if max_layers is None else max_layers
        check_counts(max_layers=count)
        if count > self.n_layers:
            raise ValueError(f"max_layers must be at most n_layers={self.n_layers}, got {count}")
        present = check_attention_mask(mask, tuple(tokens.shape))
        return islice(self.states(without_padding(tokens, present), present), count), present

    def _estimate(self, state: Tensor, layer: int, present: Tensor | None) -> Tensor:
        return without_padding(self.decode(state, layer), present)

    def _weights_of(self, layer: int) -> int:
        """Index of the weights of a layer."""
        return 0 if self.shared else layer


class UnrolledTransformer(UnrolledNetwork):
    r"""Layers of tied softmax attention, a symmetric linear map and a residual connection (UT in [K], after [U]).

    .. math::

        Z_l = \mathrm{softmax}(Y_l W_l W_l^\top Y_l^\top) Y_l, \qquad
        Y_{l+1} = \mathrm{ReLU}(Z_l S_l + Y_l), \qquad S_l = (V_l + V_l^\top) / 2,

    with the softmax over the tokens that are attended to. Each :math:`Y_l` with :math:`l \ge 1` is what its layer puts
    out: an estimate of the clean tokens where the input is noisy ones, or tokens for a readout. The ReLU makes it
    non-negative, as pixels are. The residual connection adds the tokens that enter the layer rather than
    :math:`Z_l`, so that a layer with :math:`S_l = 0` leaves pixels as they are.

    Parameters
    ----------
    n_features : int
        Width ``d`` of the tokens: pixels of a patch (see ``frame_patches``), or features of a token of a sequence.
    n_layers : int, default=3
        Number of layers; the smallest depth of [K], which also takes 5, 7 and 9.
    shared : bool, default=False
        Whether all layers have the same weights. Own weights give every constraint of [K] something to act on.
    seed : int, default=0
        Of the initial weights; torch's global generators are neither used nor changed.

    Attributes
    ----------
    attention_weight : Parameter of shape (n_layers, d, d)
        :math:`W_l`, drawn as by Xavier; one matrix, of shape (1, d, d), where weights are shared.
    feedforward_weight : Parameter of shape (n_layers, d, d)
        :math:`V_l`, likewise.

    Raises
    ------
    ValueError
        If an argument is not as described.

    See Also
    --------
    UnfoldedTransformer : Layers of [U] that lower an energy by their construction rather than by training.

    Examples
    --------
    >>> network = UnrolledTransformer(16, n_layers=3)
    >>> noisy = frame_patches(torch.rand(2, 8, 8), 4)
    >>> outputs = network.layer_outputs(noisy)
    >>> outputs.shape
    torch.Size([3, 2, 4, 16])
    >>> torch.equal(network(noisy), outputs[-1]), torch.equal(network(noisy, max_layers=1), outputs[0])
    (True, True)
    """

    def __init__(self, n_features: int, n_layers: int = 3, *, shared: bool = False, seed: int = 0) -> None:
        super().__init__(n_features, n_layers, shared)
        count = 1 if self.shared else n_layers
        with seeded_parts(self, seed):
            self.attention_weight, self.feedforward_weight = (
                nn.Parameter(
                    torch.stack([nn.init.xavier_normal_(torch.empty(n_features, n_features)) for _ in range(count)])
                )
                for _ in range(2)
            )

    def extra_repr(self) -> str:
        """The arguments, as ``repr`` of the module shows them."""
        return as_arguments(n_features=self.n_features, n_layers=self.n_layers, shared=self.shared)

    def states(self, tokens: Tensor, present: Tensor | None = None) -> Iterator[Tensor]:
        symmetric = (self.feedforward_weight + self.feedforward_weight.mT) / 2
        for layer in range(self.n_layers):
            part = self._weights_of(layer)
            mixed = tied_attention(tokens, tokens @ self.attention_weight[part], present)
            tokens = torch.relu(mixed @ symmetric[part] + tokens)
            yield tokens

    def decode(self, state: Tensor, layer: int) -> Tensor:
        return state


class DUST(UnrolledNetwork):
    r"""Sparse coding by unrolled iterative soft thresholding, with attention between codes (DUST in [K]).

    Tokens ``x`` have sparse codes ``h`` in an overcomplete dictionary ``D``, the solutions of a lasso,

    .. math:: \min_h \tfrac12 |x - D h|^2 + \lambda |h|_1.

    A layer lets the codes ``H`` of a sample, one per token, attend to one another, and then takes an ISTA step,

    .. math::

        \tilde H = \mathrm{softmax}(\tau_l H H^\top) H, \qquad
        H^+ = \mathrm{soft}_{\lambda_l / c_l}\big((I - D_l^\top D_l / c_l) \tilde H + D_l^\top X / c_l\big),
        \qquad c_l = \|D_l\|_2^2,

    with codes written as columns in the second formula. What the layer puts out are the reconstructed tokens
    :math:`D_l H_l`. The measurement matrix ``A`` of [K] is the identity. Queries, keys and values are the codes
    themselves. The step is computed from the dictionary in each call, and so is valid throughout training.

    Parameters
    ----------
    n_features : int
        Width ``d`` of the tokens, as the pixels of a patch (see ``frame_patches``).
    n_layers : int, default=3
        Number of layers; the smallest depth of [K], which also takes 5 and 7.
    n_atoms : int, optional
        Number ``m`` of atoms, at least `n_features`. Default: ``4 * n_features``, twice as many frequencies along each
        side of a patch, for which the initial dictionary is a tight frame.
    shared : bool, default=False
        Whether all layers have the same dictionary; thresholds and scales are always each layer's own. [K] shares it
        in unconstrained training and not in constrained training.
    attention : bool, default=True
        Whether codes attend to one another. Without, :math:`\tilde H = H`: the layers of a shared dictionary are ISTA,
        and those of equal :math:`\lambda_l` lower the lasso's objective one after the other.
    penalty : float, default=0.1
        Initial :math:`\lambda_l` > 0, which is learnt. The default is near the standard deviations of noise that [K]
        trains with, .09 to .15 for pixels in [0, 1]; a unit atom has noise of that size in its correlation.
    attention_scale : float, default=1.0
        Initial :math:`\tau_l` > 0, which is learnt; of 1 logits are inner products.
    start : {"zero", "analysis"}, default="zero"
        Codes before the first layer: 0, with which this layer is a threshold of :math:`D^\top X / c`, or
        :math:`D^\top X / c` itself, with which also the first layer's attention acts.
    dictionary : {"dct", "random"}, default="dct"
        Initial dictionary of every layer: ``overcomplete_dct``, or unit atoms drawn with `seed`.
    seed : int, default=0
        Of a random dictionary; torch's global generators are neither used nor changed.

    Attributes
    ----------
    dictionary : Parameter of shape (n_layers, d, m)
        :math:`D_l`; one matrix, of shape (1, d, m), where it is shared.
    raw_penalty, raw_scale : Parameter of shape (n_layers,)
        Of which ``penalties`` and ``attention_scales`` are the softplus, and so positive; `raw_scale` is None without
        attention.

    Raises
    ------
    ValueError
        If an argument is not as described.

    Examples
    --------
    >>> network = DUST(16, n_layers=5, n_atoms=36)
    >>> noisy = frame_patches(torch.rand(2, 8, 8), 4)
    >>> network.layer_outputs(noisy).shape, network.layer_codes(noisy).shape
    (torch.Size([5, 2, 4, 16]), torch.Size([5, 2, 4, 36]))
    """

    def __init__(
        self,
        n_features: int,
        n_layers: int = 3,
        *,
        n_atoms: int | None = None,
        shared: bool = False,
        attention: bool = True,
        penalty: float = 0.1,
        attention_scale: float = 1.0,
        start: Start = "zero",
        dictionary: Dictionary = "dct",
        seed: int = 0,
    ) -> None:
        super().__init__(n_features, n_layers, shared)
        check_positive(penalty=penalty, attention_scale=attention_scale)
        check_one_of(STARTS, start=start)
        check_one_of(DICTIONARIES, dictionary=dictionary)
        self.n_atoms = 4 * n_features if n_atoms is None else n_atoms
        atoms = overcomplete_dct(n_features, self.n_atoms)  # checks the sizes of a random one too
        if dictionary == "random":
            with seeded(seed):
                atoms = F.normalize(torch.randn(n_features, self.n_atoms, device="cpu"), dim=0).to(atoms)
        self.start, self.attention = start, check_flag(attention, "attention")
        self.dictionary = nn.Parameter(atoms.repeat(1 if self.shared else n_layers, 1, 1))
        self.raw_penalty = nn.Parameter(_raw("penalty", penalty, n_layers))
        raw_scale = _raw("attention_scale", attention_scale, n_layers)
        self.raw_scale: Tensor | None
        self.register_parameter("raw_scale", nn.Parameter(raw_scale) if self.attention else None)

    def extra_repr(self) -> str:
        """The arguments, as ``repr`` of the module shows them."""
        return as_arguments(
            n_features=self.n_features,
            n_layers=self.n_layers,
            n_atoms=self.n_atoms,
            shared=self.shared,
            attention=self.attention,
            start=self.start,
        )

    @property
    def penalties(self) -> Tensor:
        r""":math:`\lambda_l` of each layer, of shape ``(n_layers,)``."""
        return F.softplus(self.raw_penalty)

    @property
    def attention_scales(self) -> Tensor | None:
        r""":math:`\tau_l` of each layer, of shape ``(n_layers,)``, or None without attention."""
        return None if self.raw_scale is None else F.softplus(self.raw_scale)

    def curvatures(self) -> Tensor:
        r""":math:`c_l`, the largest eigenvalue of :math:`D_l D_l^\top`, which bounds the step.

        Returns
        -------
        Tensor of shape (n_layers,), or (1,) for a shared dictionary
            With gradients; nan where a dictionary is not finite.
        """
        atoms = decomposable(self.dictionary)
        gram = atoms @ atoms.mT
        # Eigenvalues of what is not finite, of a training that diverged, would be an error.
        is_finite = gram.isfinite().all(-1).all(-1)
        largest = torch.linalg.eigvalsh(gram.where(is_finite[:, None, None], 0))[:, -1]
        return largest.where(is_finite, torch.nan).to(self.dictionary)

    def layer_codes(self, tokens: Tensor, attention_mask: Any = None, *, max_layers: int | None = None) -> Tensor:
        """Codes after every layer.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples.
        attention_mask : Tensor of shape (N, n), optional
            1 for tokens, 0 for padding. Default: no padding.
        max_layers : int, optional
            Layers to run. Default: all.

        Returns
        -------
        Tensor of shape (n_layers, N, n, n_atoms)
            What the codes of padding are means nothing.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described.
        """
        return torch.stack(list(self._running(tokens, attention_mask, max_layers)[0]))

    def states(self, tokens: Tensor, present: Tensor | None = None) -> Iterator[Tensor]:
        curvatures, penalties, scales = self.curvatures(), self.penalties, self.attention_scales
        codes = tokens.new_zeros(*tokens.shape[:-1], self.n_atoms)
        if self.start == "analysis":
            codes = tokens @ self.dictionary[0] / curvatures[0]
        for layer in range(self.n_layers):
            part = self._weights_of(layer)
            atoms, curvature = self.dictionary[part], curvatures[part]
            if scales is not None:
                codes = tied_attention(codes, codes * scales[layer].sqrt(), present)
            stepped = codes + (tokens - codes @ atoms.mT) @ atoms / curvature
            codes = soft_threshold(stepped, penalties[layer] / curvature)
            yield codes

    def decode(self, state: Tensor, layer: int) -> Tensor:
        return state @ self.dictionary[self._weights_of(layer)].mT


def _raw(name: str, value: float, n_layers: int) -> Tensor:
    """So many numbers whose softplus is a positive one, in torch's default precision."""
    exact = torch.tensor(value + math.log(-math.expm1(-value)), dtype=torch.float64)
    raw = exact.to(torch.get_default_dtype()).repeat(n_layers)
    if not 0 < F.softplus(raw[0]) < math.inf:
        raise ValueError(f"{name} must be a positive finite number in {raw.dtype}, got {value!r}")
    return raw

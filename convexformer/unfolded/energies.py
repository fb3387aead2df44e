"""Energies of the tokens of a sample: values, gradients, bounds of their curvature and majorisers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from convexformer.validation import check_positive

from .graphs import check_attention_mask, check_graph, half_squared_distances, neighbours, without_padding
from .parametrizations import decomposable
from .rho import Rho, get_rho


class Energy(ABC):
    r"""A differentiable energy :math:`E(Y)` of tokens ``Y`` of shape ``(n, d)``.

    Energies add with ``+``, and ``energy.of(W)`` is :math:`Y \mapsto E(YW)`. All methods take tokens of shape
    ``(..., n, d)`` and work sample by sample.

    Examples
    --------
    >>> energy = InteractionEnergy("exp") + SquaredDistance()
    >>> tokens = torch.tensor([[0.0], [1.0]])
    >>> energy.value(tokens)
    tensor(-0.1065)
    >>> energy.gradient(tokens)
    tensor([[-0.6065],
            [ 1.6065]])
    """

    @abstractmethod
    def value(self, tokens: Tensor) -> Tensor:
        """Energy of each sample, of shape ``(...)``."""

    @abstractmethod
    def gradient(self, tokens: Tensor) -> Tensor:
        """Gradient, of the shape of the tokens."""

    @abstractmethod
    def lipschitz(self, tokens: Tensor) -> Tensor:
        r"""Curvature ``L`` of the majoriser at given tokens, of shape ``(...)``.

        .. math:: E(Z) \le E(Y) + \langle \nabla E(Y), Z - Y \rangle + \tfrac L2 |Z - Y|^2
                  \quad \text{for all } Z,

        so that steps :math:`Y - t \nabla E(Y)` with ``t < 2 / L`` do not raise the energy. For energies whose gradient
        has a Lipschitz constant, that constant is such a bound; this one is usually smaller, as it is taken at ``Y``.
        """

    def gradient_and_lipschitz(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``gradient`` and ``lipschitz`` at the price of one where they share work."""
        return self.gradient(tokens), self.lipschitz(tokens)

    def majorizer(self, tokens: Tensor) -> Energy:
        r"""An energy that equals this one at given tokens, gradient included, and is nowhere below it.

        Parameters
        ----------
        tokens : Tensor of shape (..., n, d)
            Where it touches.

        Returns
        -------
        Energy
            The quadratic of ``lipschitz`` unless the class knows a tighter one.
        """
        return QuadraticBound(tokens, self.value(tokens), *self.gradient_and_lipschitz(tokens))

    def of(self, weight: Tensor) -> Energy:
        """The energy of ``Y @ weight`` as an energy of ``Y``, for a weight of shape ``(d, k)``."""
        return TransformedEnergy(self, weight)

    def __add__(self, other: Energy) -> Energy:
        if not isinstance(other, Energy):
            return NotImplemented
        return SumOfEnergies([self, other])


class SumOfEnergies(Energy):
    r"""Sum :math:`\sum_k E_k(Y)`; its bound and its majoriser are the sums of those of its terms.

    Parameters
    ----------
    terms : iterable of Energy
        One or more.

    Examples
    --------
    >>> energy = SumOfEnergies([SquaredDistance(), SquaredDistance(weight=3.0)])
    >>> energy.value(torch.ones(1, 1)).item(), energy.lipschitz(torch.ones(1, 1)).item()
    (2.0, 4.0)
    """

    def __init__(self, terms: Iterable[Energy]) -> None:
        self.terms = list(terms)
        if not self.terms:
            raise ValueError("terms must hold at least one energy, got none")

    def value(self, tokens: Tensor) -> Tensor:
        return reduce(add, (term.value(tokens) for term in self.terms))

    def gradient(self, tokens: Tensor) -> Tensor:
        return reduce(add, (term.gradient(tokens) for term in self.terms))

    def lipschitz(self, tokens: Tensor) -> Tensor:
        return reduce(add, (term.lipschitz(tokens) for term in self.terms))

    def gradient_and_lipschitz(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        gradients, bounds = zip(*(term.gradient_and_lipschitz(tokens) for term in self.terms), strict=True)
        return reduce(add, gradients), reduce(add, bounds)

    def majorizer(self, tokens: Tensor) -> Energy:
        return SumOfEnergies(term.majorizer(tokens) for term in self.terms)


class TransformedEnergy(Energy):
    r"""Energy of transformed tokens, :math:`Y \mapsto E(YW)` ([U] section 3.3).

    The gradient is :math:`\nabla E(YW) W^\top` and the bound :math:`L |W|_2^2`.

    Parameters
    ----------
    energy : Energy
        ``E``.
    weight : Tensor of shape (d, k)
        ``W``.

    Examples
    --------
    >>> energy = TransformedEnergy(SquaredDistance(), torch.tensor([[2.0]]))
    >>> energy.value(torch.ones(1, 1)).item(), energy.gradient(torch.ones(1, 1)).item()
    (2.0, 4.0)
    """

    def __init__(self, energy: Energy, weight: Tensor) -> None:
        self.energy, self.weight = energy, weight

    def value(self, tokens: Tensor) -> Tensor:
        return self.energy.value(tokens @ self.weight)

    def gradient(self, tokens: Tensor) -> Tensor:
        return self.energy.gradient(tokens @ self.weight) @ self.weight.mT

    def lipschitz(self, tokens: Tensor) -> Tensor:
        return self.energy.lipschitz(tokens @ self.weight) * self._squared_norm()

    def gradient_and_lipschitz(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        gradient, bound = self.energy.gradient_and_lipschitz(tokens @ self.weight)
        return gradient @ self.weight.mT, bound * self._squared_norm()

    def _squared_norm(self) -> Tensor:
        return torch.linalg.matrix_norm(decomposable(self.weight), 2).square().to(self.weight)

    def majorizer(self, tokens: Tensor) -> Energy:
        return TransformedEnergy(self.energy.majorizer(tokens @ self.weight), self.weight)


class QuadraticBound(Energy):
    r"""Quadratic :math:`E_0 + \langle G, Y - Y_0 \rangle + \tfrac L2 |Y - Y_0|^2`.

    Parameters
    ----------
    at : Tensor of shape (..., n, d)
        ``Y_0``.
    height, slope, curvature : Tensor of shape (...), (..., n, d) and (...)
        ``E_0``, ``G`` and ``L``.

    Examples
    --------
    >>> bound = CenteringEnergy().majorizer(torch.ones(1, 1))
    >>> isinstance(bound, QuadraticBound), bound.value(torch.zeros(1, 1)).item()
    (True, 0.0)
    """

    def __init__(self, at: Tensor, height: Tensor, slope: Tensor, curvature: Tensor) -> None:
        self.at, self.height, self.slope, self.curvature = at, height, slope, curvature

    def value(self, tokens: Tensor) -> Tensor:
        change = tokens - self.at
        return self.height + _total(self.slope * change) + self.curvature / 2 * _total(change.square())

    def gradient(self, tokens: Tensor) -> Tensor:
        return self.slope + self.curvature[..., None, None] * (tokens - self.at)

    def lipschitz(self, tokens: Tensor) -> Tensor:
        return self.curvature.expand(tokens.shape[:-2])


class InteractionEnergy(Energy):
    r"""Energy of pairs of tokens ([U] eq. 3 without its regulariser).

    .. math:: E_1(Y) = \sum_{\{u, v\}} \rho\big(\tfrac12 |y_u - y_v|^2\big), \qquad
              \nabla_u E_1 = \sum_{v \ne u} \gamma_{uv} (y_u - y_v), \qquad
              \gamma_{uv} = \rho'\big(\tfrac12 |y_u - y_v|^2\big),

    over the undirected edges of a graph. As :math:`\rho` is concave, the energy is majorised at ``Y`` by the quadratic
    :math:`\tfrac12 \sum_{\{u,v\}} \gamma_{uv}(Y) |z_u - z_v|^2` of ``Z``, up to a constant, whose matrix is the
    Laplacian of the weights.

    Parameters
    ----------
    rho : {"exp", "log1", "log2"} or Rho, default="exp"
        The function; ``"exp"`` is that of softmax attention.
    graph : Tensor of bool of shape (n, n), optional
        Symmetric: which tokens interact. Default: all, the complete graph.
    attention_mask : Tensor of shape (..., n), optional
        1 for tokens, 0 for padding, which interacts with nothing, whatever it holds. Default: no padding.

    Raises
    ------
    TypeError, ValueError
        If `rho` is not concave and non-decreasing, or the graph is directed; see ``get_rho`` and ``check_graph``.

    Examples
    --------
    >>> energy = InteractionEnergy("log1")
    >>> tokens = torch.tensor([[0.0], [2.0]])
    >>> energy.value(tokens)
    tensor(1.0986)
    >>> energy.weights(tokens)
    tensor([[0.0000, 0.3333],
            [0.3333, 0.0000]])
    >>> bool(energy.majorizer(tokens).value(torch.zeros(2, 1)) >= energy.value(torch.zeros(2, 1)))
    True
    """

    def __init__(self, rho: str | Rho = "exp", graph: Tensor | None = None, attention_mask: Any = None) -> None:
        self.rho, self.graph = get_rho(rho), check_graph(graph)
        self.attention_mask = _check_mask(attention_mask)

    def value(self, tokens: Tensor) -> Tensor:
        values = self.rho.value(half_squared_distances(tokens, self.attention_mask))
        return _total(values * neighbours(tokens, self.graph, self.attention_mask)) / 2

    def gradient(self, tokens: Tensor) -> Tensor:
        return laplacian_product(self.weights(tokens), without_padding(tokens, self.attention_mask))

    def weights(self, tokens: Tensor) -> Tensor:
        """Weights ``gamma_uv`` of the edges, ``(..., n, n)``, zero where there is none."""
        derivatives = self.rho.derivative(half_squared_distances(tokens, self.attention_mask))
        return derivatives * neighbours(tokens, self.graph, self.attention_mask)

    def lipschitz(self, tokens: Tensor) -> Tensor:
        r"""Bound of the largest eigenvalue of the Laplacian of the weights, of shape ``(...)``.

        It is :math:`2 \max_u D_u` with the degrees :math:`D_u = \sum_v \gamma_{uv}`. On the complete graph, where
        :math:`\rho'` is a positive definite kernel, it is :math:`\max_u D_u + \rho'(0)` if that is less.
        """
        return self._curvature(self.weights(tokens))

    def gradient_and_lipschitz(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.weights(tokens)
        return laplacian_product(weights, without_padding(tokens, self.attention_mask)), self._curvature(weights)

    def _curvature(self, weights: Tensor) -> Tensor:
        degree = weights.sum(-1).amax(-1)
        if self.graph is None and self.rho.positive_definite:
            return torch.minimum(2 * degree, degree + self.rho.derivative(degree.new_zeros(())))
        return 2 * degree

    def majorizer(self, tokens: Tensor) -> Energy:
        """The quadratic of the weights at given tokens."""
        weights = self.weights(tokens)
        return WeightedEdges(weights, self.value(tokens) - WeightedEdges(weights).value(tokens))


class WeightedEdges(Energy):
    r"""Quadratic of weighted edges, :math:`c + \tfrac12 \sum_{\{u,v\}} \gamma_{uv} |y_u - y_v|^2`.

    Parameters
    ----------
    weights : Tensor of shape (..., n, n)
        Symmetric and non-negative, zero on the diagonal.
    constant : Tensor of shape (...), optional
        ``c``. Default: 0.

    Examples
    --------
    >>> WeightedEdges(torch.tensor([[0.0, 1.0], [1.0, 0.0]])).value(torch.tensor([[0.0], [2.0]])).item()
    2.0
    """

    def __init__(self, weights: Tensor, constant: Tensor | None = None) -> None:
        self.weights = weights
        self.constant = weights.new_zeros(()) if constant is None else constant

    def value(self, tokens: Tensor) -> Tensor:
        return self.constant + _total(self.weights * half_squared_distances(tokens, self._has_edges())) / 2

    def gradient(self, tokens: Tensor) -> Tensor:
        return laplacian_product(self.weights, without_padding(tokens, self._has_edges()))

    def _has_edges(self) -> Tensor:
        """Which tokens have edges: padding has none, and may hold what is no number."""
        return self.weights.ne(0).any(-1)

    def lipschitz(self, tokens: Tensor) -> Tensor:
        return 2 * self.weights.sum(-1).amax(-1).expand(tokens.shape[:-2])


class SquaredDistance(Energy):
    r"""Regulariser :math:`R(Y) = \tfrac w2 |Y - B|_F^2`, with ``B = 0`` where no anchor is given.

    Parameters
    ----------
    anchor : Tensor of shape (..., n, d), optional
        ``B``, for example the tokens that a network starts from. Default: none, ``B = 0``.
    weight : float, default=1.0
        ``w``, positive.
    attention_mask : Tensor of shape (..., n), optional
        1 for tokens, 0 for padding, which is left out, whatever it holds. Default: no padding.

    Raises
    ------
    ValueError
        If `weight` is not positive and finite, or the mask holds anything but 0 and 1.

    Examples
    --------
    >>> SquaredDistance(torch.ones(2, 1)).gradient(torch.zeros(2, 1)).T
    tensor([[-1., -1.]])
    """

    def __init__(self, anchor: Tensor | None = None, weight: float = 1.0, attention_mask: Any = None) -> None:
        check_positive(weight=weight)
        self.anchor, self.weight = anchor, weight
        self.attention_mask = _check_mask(attention_mask)

    def value(self, tokens: Tensor) -> Tensor:
        return self.weight / 2 * _total(self._from_anchor(tokens).square())

    def gradient(self, tokens: Tensor) -> Tensor:
        return self.weight * self._from_anchor(tokens)

    def _from_anchor(self, tokens: Tensor) -> Tensor:
        return without_padding(_less(tokens, self.anchor), self.attention_mask)

    def lipschitz(self, tokens: Tensor) -> Tensor:
        return tokens.new_full(tokens.shape[:-2], self.weight)

    def majorizer(self, tokens: Tensor) -> Energy:
        """The energy itself, which is quadratic."""
        return self


class FeedForwardEnergy(Energy):
    r"""Quadratic of the feed-forward part ([U] eq. 15 and 16).

    .. math:: E_2(Y) = \tfrac12 \mathrm{tr}(Y W Y^\top) + \tfrac12 |Y - B|_F^2, \qquad
              \nabla E_2 = Y \, \mathrm{sym}(W) + Y - B, \qquad \mathrm{sym}(W) = (W + W^\top) / 2.

    It is convex where :math:`I + \mathrm{sym}(W)` is positive semidefinite, and unbounded below where that matrix has a
    negative eigenvalue. A gradient step of length ``a`` is
    :math:`Y \big((1-a) I - a\,\mathrm{sym}(W)\big) + aB`, a linear map of each token.

    Parameters
    ----------
    weight : Tensor of shape (d, d)
        ``W``.
    anchor : Tensor of shape (..., n, d), optional
        ``B``. Default: 0.

    Examples
    --------
    >>> energy = FeedForwardEnergy(torch.tensor([[0.5]]))
    >>> energy.value(torch.ones(1, 1)).item(), energy.lipschitz(torch.ones(1, 1)).item()
    (0.75, 1.5)
    """

    def __init__(self, weight: Tensor, anchor: Tensor | None = None) -> None:
        self.symmetric = (weight + weight.mT) / 2
        self.anchor = anchor

    def value(self, tokens: Tensor) -> Tensor:
        from_anchor = _less(tokens, self.anchor)
        return _total((tokens @ self.symmetric) * tokens) / 2 + _total(from_anchor.square()) / 2

    def gradient(self, tokens: Tensor) -> Tensor:
        return tokens @ self.symmetric + _less(tokens, self.anchor)

    def lipschitz(self, tokens: Tensor) -> Tensor:
        # Of a concave part, the size of its curvature: no bound would be needed, but steps stay finite.
        eigenvalues = torch.linalg.eigvalsh(decomposable(self.symmetric)).to(self.symmetric)
        return (1 + eigenvalues).abs().amax().expand(tokens.shape[:-2])


class CenteringEnergy(Energy):
    r"""Energy whose gradient step of length 1 subtracts the mean of each token, the first half of a LayerNorm.

    .. math:: E(Y) = \sum_u \frac{(1^\top y_u)^2}{2d}, \qquad \nabla_u E = \frac{1^\top y_u}{d} 1.

    Its curvature is 1, so that the step of length 1 does not raise it.

    Examples
    --------
    >>> tokens = torch.tensor([[1.0, 3.0]])
    >>> tokens - CenteringEnergy().gradient(tokens)
    tensor([[-1.,  1.]])
    """

    def value(self, tokens: Tensor) -> Tensor:
        return tokens.sum(-1).square().sum(-1) / (2 * tokens.shape[-1])

    def gradient(self, tokens: Tensor) -> Tensor:
        return tokens.mean(-1, keepdim=True).expand_as(tokens)

    def lipschitz(self, tokens: Tensor) -> Tensor:
        return tokens.new_ones(tokens.shape[:-2])


class ScalingEnergy(Energy):
    r"""Energy whose gradient step of length 1 scales each token to length :math:`\sqrt d`, the rest of a LayerNorm.

    .. math:: E(Y) = \sum_u \tfrac12 |y_u|^2 - \sqrt d \, |y_u|, \qquad
              \nabla_u E = y_u - \sqrt d \, \frac{y_u}{|y_u|}.

    It is not convex; its curvature is at most 1, so that the step of length 1 does not raise it. The gradient of a zero
    token is taken to be zero.

    Examples
    --------
    >>> tokens = torch.tensor([[3.0, -4.0]])
    >>> tokens - ScalingEnergy().gradient(tokens)
    tensor([[ 0.8485, -1.1314]])
    """

    def value(self, tokens: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(tokens, dim=-1)
        return (length.square() / 2 - math.sqrt(tokens.shape[-1]) * length).sum(-1)

    def gradient(self, tokens: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(tokens, dim=-1, keepdim=True)
        unit = tokens / torch.where(length > 0, length, 1)  # of a zero token 0, with a derivative
        return tokens - math.sqrt(tokens.shape[-1]) * unit * (length > 0)

    def lipschitz(self, tokens: Tensor) -> Tensor:
        return tokens.new_ones(tokens.shape[:-2])


class NonNegative:
    r"""Indicator :math:`\varphi(Y)` of ``Y >= 0``, whose proximal operator is the ReLU ([U] eq. 17).

    Examples
    --------
    >>> NonNegative().value(torch.tensor([[1.0], [-2.0]])), NonNegative().prox(torch.tensor([[1.0], [-2.0]])).T
    (tensor(inf), tensor([[1., 0.]]))
    """

    def value(self, tokens: Tensor) -> Tensor:
        """0 for samples without negative entries, infinity for others, of shape ``(...)``."""
        negative = (tokens < 0).flatten(-2).any(-1)
        return torch.where(negative, math.inf, 0.0).to(tokens.dtype)

    def prox(self, tokens: Tensor) -> Tensor:
        """The nearest tokens without negative entries."""
        return torch.relu(tokens)


def laplacian_product(weights: Tensor, tokens: Tensor) -> Tensor:
    """Product of the Laplacian of weighted edges with tokens: ``sum_v weights_uv (y_u - y_v)``.

    Examples
    --------
    >>> laplacian_product(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.0], [2.0]])).T
    tensor([[-2.,  2.]])
    """
    return weights.sum(-1, keepdim=True) * tokens - weights @ tokens


def _check_mask(mask: Any) -> Tensor | None:
    """A padding mask of tokens that are yet to come."""
    return check_attention_mask(mask, (*mask.shape, 1) if torch.is_tensor(mask) else ())


def _less(tokens: Tensor, anchor: Tensor | None) -> Tensor:
    """Tokens less their anchor, which is zero where there is none."""
    return tokens if anchor is None else tokens - anchor


def _total(entries: Tensor) -> Tensor:
    return entries.sum((-2, -1))

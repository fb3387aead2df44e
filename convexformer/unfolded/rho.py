"""Concave non-decreasing functions of half the squared distance of two tokens, which make interaction energies."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from convexformer.validation import check_positive


class Rho(ABC):
    r"""A concave non-decreasing function :math:`\rho` on the non-negative numbers.

    A subclass gives ``value`` and ``derivative``. :math:`\rho'(\tfrac12|y_u - y_v|^2)` is the weight that token ``u``
    gives to token ``v``, so that the attention follows from the function alone ([U] section 3).

    Attributes
    ----------
    positive_definite : bool
        Whether :math:`\rho'(\tfrac12|x - y|^2)` is a positive definite kernel, which is so for completely monotone
        :math:`\rho'` (Schoenberg 1938). Larger steps then descend on complete graphs. Default: False, which promises
        nothing.

    Examples
    --------
    >>> class SquareRoot(Rho):
    ...     def value(self, z):
    ...         return 2 * (z + 1).sqrt()
    ...
    ...     def derivative(self, z):
    ...         return (z + 1).rsqrt()
    >>> get_rho(SquareRoot()).derivative(torch.tensor([0.0, 3.0]))
    tensor([1.0000, 0.5000])
    """

    positive_definite: bool = False

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """The function, elementwise; concave and non-decreasing for ``z >= 0``."""

    @abstractmethod
    def derivative(self, z: Tensor) -> Tensor:
        """Its derivative, elementwise; non-negative and non-increasing, finite at 0."""


@dataclass(frozen=True)
class Exponential(Rho):
    r""":math:`\rho(z) = -e^{-z}`, whose attention is softmax with key weights :math:`e^{-|y_v|^2/2}` ([U] eq. 9, 10).

    Examples
    --------
    >>> Exponential().derivative(torch.tensor([0.0]))
    tensor([1.])
    """

    positive_definite = True

    def value(self, z: Tensor) -> Tensor:
        return -torch.exp(-z)

    def derivative(self, z: Tensor) -> Tensor:
        return torch.exp(-z)


@dataclass(frozen=True)
class Logarithm(Rho):
    r""":math:`\rho(z) = \log(z + s)`, whose attention is rational.

    For rows of unit length the weights are proportional to :math:`1/(1 + s - y_u^\top y_v)`: for ``s = 1`` that is
    the :math:`1/(2 - y_u^\top y_v)` which [U] prints for ``log(z + 2)``.

    Parameters
    ----------
    shift : float, default=1.0
        ``s``, positive: the smaller it is, the more of the weight goes to the nearest tokens.

    Raises
    ------
    ValueError
        If `shift` is not positive and finite, or too small for the precision of the tokens.

    Examples
    --------
    >>> Logarithm(shift=2.0).derivative(torch.tensor([0.0, 2.0]))
    tensor([0.5000, 0.2500])
    """

    shift: float = 1.0
    positive_definite = True

    def __post_init__(self) -> None:
        check_positive(shift=self.shift)

    def value(self, z: Tensor) -> Tensor:
        return torch.log(z + self.shift)

    def derivative(self, z: Tensor) -> Tensor:
        least = math.sqrt(torch.finfo(z.dtype).tiny)  # as the slope of this is the square of it, at a token's own z = 0
        if self.shift < least:
            raise ValueError(f"shift must be at least {least:.2g} for tokens of {z.dtype}, got {self.shift!r}")
        return 1 / (z + self.shift)


# Classes of which an estimator can be saved: an own one is entered here, and where it is loaded.
RHO_CLASSES: dict[str, type[Rho]] = {"exponential": Exponential, "logarithm": Logarithm}
RHOS: dict[str, Rho] = {"exp": Exponential(), "log1": Logarithm(1.0), "log2": Logarithm(2.0)}


def get_rho(rho: str | Rho) -> Rho:
    """The function of a name, or a function of the caller's own after a check that it is concave and non-decreasing.

    Parameters
    ----------
    rho : {"exp", "log1", "log2"} or Rho
        ``-exp(-z)``, ``log(z + 1)``, ``log(z + 2)``, or one's own.

    Returns
    -------
    Rho

    Raises
    ------
    TypeError
        If `rho` is neither a name nor a ``Rho``.
    ValueError
        If the name is unknown, or on a grid from 0 to 1e4 the function decreases or is not concave, its derivative is
        another one than that of its values, or it is not finite. There is then no majoriser, and the attention that
        follows from the function promises no descent ([U] Theorem 3.1). Also if the function is constant, or it and its
        derivative do not return tensors of the shape of ``z``, its values with gradients.

    Examples
    --------
    >>> get_rho("log2")
    Logarithm(shift=2.0)
    """
    if isinstance(rho, str):
        if rho not in RHOS:
            raise ValueError(f"rho must be one of {sorted(RHOS)} or a Rho, got {rho!r}")
        return RHOS[rho]
    if not isinstance(rho, Rho):
        raise TypeError(f"rho must be one of {sorted(RHOS)} or a Rho, got {rho!r}")
    if rho not in RHOS.values():
        _check(rho)
    return rho


@torch.inference_mode(False)  # with gradients
def _check(rho: Rho) -> None:
    """Raise ``ValueError`` unless a function is what majorisation needs, on a grid."""
    positive = torch.logspace(-4, 4, 161, dtype=torch.float64)
    z = torch.cat([positive.new_zeros(1), positive]).requires_grad_()
    values = rho.value(z)
    derivative = rho.derivative(z)
    if not all(torch.is_tensor(numbers) and numbers.shape == z.shape for numbers in (values, derivative)):
        raise ValueError(f"rho={rho!r} must return tensors of the shape of z from value and derivative")
    if not values.requires_grad:
        raise ValueError(f"rho={rho!r} must have a value that autograd can differentiate, without detach()")
    (slopes,) = torch.autograd.grad(values.sum(), z)
    derivative = derivative.detach()
    needs = "; attention descends its energy for concave non-decreasing functions only ([U] Theorem 3.1)"
    if not bool(torch.isfinite(torch.cat([values.detach(), derivative])).all()):
        raise ValueError(f"rho={rho!r} and its derivative must be finite for all z >= 0, 0 included")
    if not torch.allclose(slopes, derivative, rtol=1e-6, atol=1e-9):
        raise ValueError(f"rho={rho!r} must have as derivative that of its value, which autograd finds to be another")
    if bool((derivative < 0).any()):
        raise ValueError(f"rho={rho!r} must not decrease, but has a negative derivative{needs}")
    if bool((derivative.diff() > 1e-12 * derivative[0].abs()).any()):
        raise ValueError(f"rho={rho!r} must be concave, but has a derivative that increases{needs}")
    if not bool(derivative[0] > 0):
        raise ValueError(f"rho={rho!r} must increase at 0, but is constant: its attention has no weights")

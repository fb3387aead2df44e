"""Descent constraints on the losses of layers, their Lagrangian and what it makes of each loss ([K] section 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from convexformer.validation import check_flag
from convexformer_solvers.validation import is_real


@dataclass(frozen=True, kw_only=True)
class DescentConstraints:
    r"""Each layer must lower the loss of the layer before by a share, and the first must come below a reference.

    .. math:: g_1 = \ell_1 - c_{\mathrm{ref}} \le 0, \qquad
              g_l = \ell_l - (1 - \alpha) \ell_{l-1} \le 0, \quad l = 2, \dots, L

    for the mean losses :math:`\ell_1, \dots, \ell_L` of the layers' outputs.

    Parameters
    ----------
    alpha : float, default=0.1
        Share by which each layer must lower the loss, from 0 and below 1.
    c_ref : float
        Loss that the first layer must come below, positive.
    first_factor : bool, default=False
        Whether that bound is :math:`(1 - \alpha) c_{\mathrm{ref}}`; [K] can be read either way.

    Raises
    ------
    ValueError
        If a number is out of range.

    Examples
    --------
    >>> constraints = DescentConstraints(alpha=0.5, c_ref=2.0)
    >>> constraints.values(torch.tensor([3.0, 1.0]))
    tensor([ 1.0000, -0.5000])
    >>> constraints.net_weights(torch.tensor([1.0, 2.0]))
    tensor([0., 3.])
    """

    alpha: float = 0.1
    c_ref: float
    first_factor: bool = False

    def __post_init__(self) -> None:
        if not (is_real(self.alpha) and 0 <= self.alpha < 1):
            raise ValueError(f"alpha must be a number from 0 and below 1, got {self.alpha!r}")
        if not (is_real(self.c_ref) and 0 < self.c_ref < math.inf):
            raise ValueError(f"c_ref must be a positive finite number, a loss of the first layer, got {self.c_ref!r}")
        check_flag(self.first_factor, "first_factor")

    @property
    def first_bound(self) -> float:
        """Bound on the loss of the first layer."""
        return self.c_ref * (1 - self.alpha if self.first_factor else 1)

    def values(self, losses: Tensor, *, stop_gradient: bool = False) -> Tensor:
        """Values ``g`` of the constraints, which hold where none is positive.

        Parameters
        ----------
        losses : Tensor of shape (n_layers, ...)
            Mean losses, or those of each sample.
        stop_gradient : bool, default=False
            Whether the loss that a layer is compared with counts as a number: its gradient then does not ask to raise
            that loss.

        Returns
        -------
        Tensor of shape (n_layers, ...)

        Raises
        ------
        ValueError
            If there are not two layers or more.
        """
        if losses.ndim == 0 or len(losses) < 2:
            raise ValueError(f"losses must be those of two layers or more, got shape {tuple(losses.shape)}")
        before = losses[:-1].detach() if stop_gradient else losses[:-1]
        return torch.cat([losses[:1] - self.first_bound, losses[1:] - (1 - self.alpha) * before])

    def lagrangian(self, losses: Tensor, duals: Tensor, *, stop_gradient: bool = False) -> Tensor:
        r"""The Lagrangian :math:`\ell_L + \sum_l \lambda_l g_l`.

        Parameters
        ----------
        losses, duals : Tensor of shape (n_layers,)
            Mean losses and multipliers.
        stop_gradient : bool, default=False
            As in ``values``.

        Returns
        -------
        Tensor
            A scalar.
        """
        return losses[-1] + (duals * self.values(losses, stop_gradient=stop_gradient)).sum()

    def net_weights(self, duals: Tensor, *, stop_gradient: bool = False) -> Tensor:
        r"""Factors of the losses in the Lagrangian, :math:`\lambda_l - (1 - \alpha) \lambda_{l+1} + 1[l = L]`.

        A negative one asks to *raise* the loss of its layer. With ``stop_gradient`` the second term is missing, and
        none is negative.

        Parameters
        ----------
        duals : Tensor of shape (n_layers,)
            Multipliers.
        stop_gradient : bool, default=False
            As in ``values``.

        Returns
        -------
        Tensor of shape (n_layers,)
        """
        weights = duals.clone()
        if not stop_gradient:
            weights[:-1] -= (1 - self.alpha) * duals[1:]
        weights[-1] += 1
        return weights

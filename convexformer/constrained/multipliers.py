"""Multipliers of the constraints and slacks of resilience: projected ascent on the Lagrangian ([K] Algorithm 1)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .options import OPTIMIZERS


class Multipliers:
    r"""Multipliers, which start at zero, and slacks, by which the constraints may be violated.

    Slacks ``u`` of price ``b`` are either at their best value :math:`u = \lambda / b`, or they descend
    :math:`\tfrac b2 |u|^2 - \lambda^\top u` by steps of their own. Without resilience the price is infinite.

    Parameters
    ----------
    like : Tensor of shape (n_layers, ...)
        Multipliers have its precision and are on its device.
    resilience, slack_update, dual_optimizer, dual_lr
        As of ``PrimalDual``.

    Attributes
    ----------
    values : Parameter of shape (n_layers,)
        The multipliers.
    """

    def __init__(
        self, like: Tensor, resilience: float | None, slack_update: str, dual_optimizer: str, dual_lr: float
    ) -> None:
        self.values = nn.Parameter(like.new_zeros(len(like)))
        self._price = math.inf if resilience is None else resilience
        self._explicit = resilience is not None and slack_update == "explicit"
        self._explicit_slacks = like.new_zeros(len(like))
        self._lr = dual_lr
        self._optimizer = OPTIMIZERS[dual_optimizer]([self.values], lr=dual_lr, maximize=True)

    @property
    def slacks(self) -> Tensor:
        """Slacks, of shape ``(n_layers,)``."""
        return self._explicit_slacks.clone() if self._explicit else self.values.detach() / self._price

    def reset_slacks(self) -> None:
        """Set explicit slacks to zero."""
        self._explicit_slacks.zero_()

    @torch.no_grad()
    def ascend(self, constraints: Tensor) -> None:
        """Take a step by the values of the constraints, of shape ``(n_layers,)``."""
        gradient = constraints - self.slacks
        if self._explicit:
            self._explicit_slacks.sub_(self._lr * (self._price * self._explicit_slacks - self.values)).clamp_(min=0)
        self.values.grad = gradient
        self._optimizer.step()
        self.values.clamp_(min=0)

    def state_dict(self) -> dict[str, Any]:
        """What the ascent goes on from."""
        return {
            "duals": self.values.detach(),
            "slacks": self._explicit_slacks,
            "optimizer": self._optimizer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self.values.copy_(state["duals"])
        self._explicit_slacks.copy_(state["slacks"])
        self._optimizer.load_state_dict(state["optimizer"])

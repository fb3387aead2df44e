"""The Hessian of a program's mean loss in predictions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .losses import Loss
from .program import Program


class Curvature:
    """Hessian of the weighted mean loss at some predictions, as products and as a diagonal.

    Parameters
    ----------
    program : Program
        The program.
    pred : Tensor of shape (N, c)
        The predictions.
    """

    def __init__(self, program: Program, pred: Tensor) -> None:
        self._program, self._pred = program, pred

    @property
    def diagonal_is_all(self) -> bool:
        """Whether the Hessian is diagonal."""
        return self._program.loss.separable or self._pred.shape[1] == 1

    @property
    def common_is_free(self) -> bool:
        """Whether the same number in all outputs is in the null space."""
        return self._program.loss.shift_invariant

    def product(self, direction: Tensor) -> Tensor:
        """Product with a direction of shape ``(N, c)``."""
        program = self._program
        return program.weight[:, None] * program.loss.hessian_product(self._pred, program.y, direction)

    def diagonal(self) -> Tensor:
        """Diagonal, shape ``(N, c)``."""
        if self.diagonal_is_all:
            return self.product(torch.ones_like(self._pred))
        program = self._program
        columns = enumerate(hessian_columns(program.loss, self._pred, program.y))
        return program.weight[:, None] * torch.stack([column[:, output] for output, column in columns], dim=1)


def hessian_columns(loss: Loss, pred: Tensor, y: Tensor) -> Iterator[Tensor]:
    """Columns of each sample's Hessian of the loss in predictions, shape ``(N, c)``, one output after the other."""
    for output in range(pred.shape[1]):
        unit = torch.zeros_like(pred)
        unit[:, output] = 1.0
        yield loss.hessian_product(pred, y, unit)

"""The Hessian of a program's mean loss in predictions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from convexformer_solvers.losses.base import Loss, hessian_columns
from convexformer_solvers.program import Program


class Curvature:
    """Hessian of the weighted mean loss at predictions ``(N, c)``, as products and as a diagonal."""

    def __init__(self, program: Program, pred: Tensor) -> None:
        self._program, self._pred = program, pred

    @property
    def diagonal_is_all(self) -> bool:
        """Whether the Hessian is diagonal."""
        return self._program.loss.output_separable or self._pred.shape[1] == 1

    def product(self, direction: Tensor) -> Tensor:
        """Product with a direction of shape ``(N, c)``."""
        program = self._program
        return program.weight[:, None] * program.loss.hessian_product(self._pred, program.y, direction)

    def diagonal(self) -> Tensor:
        """Diagonal, shape ``(N, c)``."""
        if self.diagonal_is_all:
            return self.product(torch.ones_like(self._pred))
        return self.matrices().diagonal(dim1=1, dim2=2)

    def columns(self) -> Iterator[Tensor]:
        """Columns of each sample's weighted Hessian, shape ``(N, c)``, one output after the other."""
        columns = hessian_columns(self._program.loss, self._pred, self._program.y)
        return (self._program.weight[:, None] * column for column in columns)

    def matrices(self) -> Tensor:
        """Weighted Hessian of each sample, shape ``(N, c, c)``."""
        return torch.diag_embed(self.diagonal()) if self.diagonal_is_all else torch.stack(list(self.columns()), dim=2)

    def gram(self, images: Tensor, output: Tensor) -> Tensor:
        """Products ``a_i' H a_j``, shape ``(m, m)``, of directions ``(m, N)`` in one output each, ``(m,)``."""
        program = self._program
        of_output = [(output == k).nonzero()[:, 0] for k in range(self._pred.shape[1])]
        parts = program.loss.hessian_parts(self._pred, program.y)
        result = images.new_zeros((len(images), len(images)))
        if parts is None:
            for mine, column in zip(of_output, self.columns(), strict=True):
                result[mine] = images[mine] @ (column.T[output] * images).T
            return result
        diagonal, root = parts
        if root is not None:
            scaled = images * (program.weight.sqrt()[:, None] * root).T[output]
            result = -(scaled @ scaled.T)
        for mine, column in zip(of_output, diagonal.T, strict=True):
            result[mine[:, None], mine] += (images[mine] * (program.weight * column)) @ images[mine].T
        return result


def curvature_bounds(loss: Loss, pred: Tensor, y: Tensor) -> Tensor:
    """Diagonal matrix above each sample's Hessian in predictions, shape ``(N, c)``: sums of its rows (Gershgorin)."""
    parts = loss.hessian_parts(pred, y)
    if parts is None:
        return torch.stack([column.abs().sum(1) for column in hessian_columns(loss, pred, y)], dim=1)
    diagonal, root = parts
    if root is None:
        return diagonal.abs()
    size = root.abs()
    others = size * (size.sum(1, keepdim=True) - size)
    return (diagonal - size.square()).abs() + others

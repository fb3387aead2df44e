"""Data of one problem, and the forms in which contenders take them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from convexformer_solvers import LOSSES, PENALTIES, DenseMap, GatedMap, LinearMap, Program, get_loss, get_penalty


@dataclass(frozen=True)
class Instance:
    """Tokens, gates and targets with the name of the loss.

    Attributes
    ----------
    X : ndarray of shape (N, n_tokens, d)
    masks : ndarray of shape (N, h), bool, or None
        Gate patterns; None for a program without gates.
    y : ndarray of shape (N, c)
        As the loss wants them: real numbers, -1 and 1, or one-hot rows.
    loss : str
        A key of ``convexformer_solvers.LOSSES``.
    """

    X: NDArray
    masks: NDArray[np.bool_] | None
    y: NDArray
    loss: str

    def program(self, ratio: float, dtype: str = "float64") -> Program:
        """The program with ``alpha = ratio * alpha_max``, without an intercept, data held in ``dtype``."""
        precision = getattr(torch, dtype)
        data = torch.as_tensor(self.X).to(precision)
        linear_map: LinearMap = DenseMap(data) if self.masks is None else GatedMap(data, torch.as_tensor(self.masks))
        y = torch.as_tensor(self.y).to(precision)
        program = Program(linear_map, y, get_loss(self.loss), get_penalty("group_l2"), alpha=1.0)
        return program.with_alpha(ratio * program.alpha_max)

    def save(self, folder: Path) -> None:
        """Write the arrays, so that another process can load them without having generated them."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "X.npy", self.X)
        np.save(folder / "y.npy", self.y)
        if self.masks is not None:
            np.save(folder / "masks.npy", self.masks)
        (folder / "loss").write_text(self.loss)

    @classmethod
    def load(cls, folder: Path) -> Instance:
        """Read what ``save`` wrote."""
        masks = folder / "masks.npy"
        return cls(
            np.load(folder / "X.npy"),
            np.load(masks) if masks.exists() else None,
            np.load(folder / "y.npy"),
            (folder / "loss").read_text(),
        )


def design_matrix(program: Program) -> NDArray:
    """Materialised design in Fortran order; columns run over (gate, token, feature), groups are ``d`` consecutive."""
    return np.asfortranarray(program.map.as_matrix().numpy())


def as_coef(program: Program, columns: NDArray) -> torch.Tensor:
    """Coefficients ``(*block_shape, d, c)`` from a ``(p, c)`` array over the columns of `design_matrix`."""
    return torch.as_tensor(np.ascontiguousarray(columns)).reshape(program.coef_shape)


def loss_name(program: Program) -> str:
    """Name of the loss of a program, as in ``convexformer_solvers.LOSSES``."""
    return next(name for name, kind in LOSSES.items() if type(program.loss) is kind)


def penalty_name(program: Program) -> str:
    """Name of the penalty of a program, as in ``convexformer_solvers.PENALTIES``."""
    return next(name for name, kind in PENALTIES.items() if type(program.penalty) is kind)

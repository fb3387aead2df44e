"""Features and targets without their means, which an intercept gives back."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from convexformer_solvers.linalg.eigenvalue_ratio import sample_kernel
from convexformer_solvers.linear_maps.base import LinearMap
from convexformer_solvers.linear_maps.config import MapConfig
from convexformer_solvers.points import Point
from convexformer_solvers.program import Program
from convexformer_solvers.rounding import EPS

from .base import Reduction


@dataclasses.dataclass(frozen=True)
class Center(Reduction):
    """The program whose features, and targets of a regression, have weighted means of zero.

    With an intercept the programs are the same but for constant predictions. Products of features whose means are far
    larger than their spread lose the digits in which they differ. Features in memory are copied, so those of larger
    data keep their means unless these leave too few digits. Those that are read in passes lose them as they are read.

    Parameters
    ----------
    small : int, default=MapConfig.temporary
        Numbers of data that are always copied: two megabytes in float64.
    largest : int, default=2**26
        Numbers of data that are copied at most: half a gigabyte in float64. Between the two data are copied where
        squares of some samples about their means are lost in the rounding of the squares, but for half of the digits.
    """

    small: int = MapConfig.temporary
    largest: int = 2**26

    def accepts(self, program: Program) -> bool:
        return program.fit_intercept and (program.loss.of_residual or self._copies(program.map))

    def apply(self, program: Program) -> tuple[Program, Tensor]:
        linear_map = program.map
        if self._copies(linear_map):
            linear_map = linear_map.centered(program.weight, torch.float64)
        best = program.null_intercept
        centered = program.with_map(linear_map)
        if not program.loss.of_residual:
            return centered, torch.zeros_like(best)
        return dataclasses.replace(centered, y=program.y - best), best  # which the intercept gives back

    def _copies(self, linear_map: LinearMap) -> bool:
        if linear_map.in_memory and linear_map.n_stored > self.largest:
            return False
        if linear_map.n_stored <= self.small:
            return True
        kernel = sample_kernel(linear_map, 16)
        total = float(kernel.trace())
        return math.sqrt(EPS) * total > abs(total - float(kernel.mean()) * len(kernel))

    def restrict(self, point: Point, data: Tensor) -> Point:
        return self.invert(point, -data)

    def invert(self, point: Point, data: Tensor) -> Point:
        # The intercept goes by the features' means, too, and is left to be found.
        return point._replace(intercept=None).with_changed(("pred", "fitted"), lambda pred: pred + data)

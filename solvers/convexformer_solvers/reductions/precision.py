"""Data in single precision."""

from __future__ import annotations

import dataclasses
import math

import torch

from convexformer_solvers.linear_maps.derived import MixedMap
from convexformer_solvers.points import Point
from convexformer_solvers.program import Program

from .base import Reduction
from .center import Center


@dataclasses.dataclass(frozen=True)
class Cast(Reduction):
    """The program with map and targets in another precision; the way back is to float64."""

    dtype: torch.dtype

    def apply(self, program: Program) -> tuple[Program, None]:
        return program.to(self.dtype), None

    def restrict(self, point: Point, data: None) -> Point:
        return point.in_precision(self.dtype)

    def invert(self, point: Point, data: None) -> Point:
        return point.in_precision(torch.float64)


@dataclasses.dataclass(frozen=True)
class SinglePrecision(Reduction):
    """The program in float32, features without their means where they are copied anyway.

    Products take half the time, or less where the data are float32 and float64 would have to convert them. Data in
    float64 are copied up to ``Center.largest`` numbers; those whose squares are out of the range of float32 stay as
    they are.

    Parameters
    ----------
    least : int, default=0
        Numbers that data, coefficients or Gram matrix hold at least: with fewer there is no time to gain.
    """

    least: int = 0

    def pays(self, program: Program) -> bool:
        """Whether there is time to gain, and the data are small enough for a copy."""
        linear_map, n_stored = program.map, program.map.n_stored
        if max(n_stored, math.prod(program.coef_shape), linear_map.smaller_side**2) < self.least:
            return False
        return linear_map.dtype == torch.float32 or n_stored <= Center.largest

    def accepts(self, program: Program) -> bool:
        return self.pays(program) and squares_fit_single(program)

    def apply(self, program: Program) -> tuple[Program, None]:
        linear_map = program.map
        if program.fit_intercept and linear_map.n_stored <= Center.largest:
            linear_map = linear_map.centered(program.weight, torch.float32)
        return dataclasses.replace(program, map=linear_map.to(torch.float32)).to(torch.float32), None

    def restrict(self, point: Point, data: None) -> Point:
        return point._replace(intercept=None).in_precision(torch.float32)

    def invert(self, point: Point, data: None) -> Point:
        return point._replace(intercept=None).in_precision(torch.float64)


@dataclasses.dataclass(frozen=True)
class BothPrecisions(Reduction):
    """The program with a copy of the data in float32 beside those in float64, for algorithms that begin with it."""

    def accepts(self, program: Program) -> bool:
        linear_map = program.map
        is_copied = linear_map.dtype == torch.float64 and linear_map.n_stored <= Center.largest
        return is_copied and linear_map.in_memory and squares_fit_single(program)

    def apply(self, program: Program) -> tuple[Program, None]:
        return dataclasses.replace(program, map=MixedMap(program.map)), None


def squares_fit_single(program: Program) -> bool:
    """Whether sums of products of two squares of the data and of slopes of the loss are within the range of float32."""
    entry, slope, limit = program.map.largest(), float(program.null_dual_point.abs().max()), 1e15
    return all(1 / limit < size < limit for size in (entry**2, slope, slope * entry**2))

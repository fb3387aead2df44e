"""Samples of no weight left out, targets in double precision, and penalties in their simplest form."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from convexformer_solvers.points import Point
from convexformer_solvers.program import Program

from .base import Reduction

_OF_SAMPLES = ("dual", "pred", "fitted")  # parts of a point with a row for each sample


@dataclasses.dataclass(frozen=True)
class DropZeroWeights(Reduction):
    """The program on its samples of positive weight; others have predictions and a dual point of zero."""

    def accepts(self, program: Program) -> bool:
        return program.counted is not None

    def apply(self, program: Program) -> tuple[Program, Tensor | None]:
        return program.drop_zero_weights(), program.counted

    def restrict(self, point: Point, data: Tensor) -> Point:
        return point.with_changed(_OF_SAMPLES, lambda values: values[data])

    def invert(self, point: Point, data: Tensor) -> Point:
        shape = len(data), point.coef.shape[-1]
        return point.with_changed(_OF_SAMPLES, lambda values: values.new_zeros(shape).index_put_((data,), values))


@dataclasses.dataclass(frozen=True)
class Targets(Reduction):
    """The program with targets and weights in float64 or in the precision of its map, which stays as it is."""

    of_map: bool = False

    def _precision(self, program: Program) -> torch.dtype:
        return program.map.dtype if self.of_map else torch.float64

    def accepts(self, program: Program) -> bool:
        return program.y.dtype != self._precision(program)

    def apply(self, program: Program) -> tuple[Program, tuple[torch.dtype, torch.dtype]]:
        wanted = self._precision(program)
        reduced = program.with_float64_targets() if wanted == torch.float64 else program.to(wanted)
        return reduced, (program.y.dtype, wanted)

    def restrict(self, point: Point, data: tuple[torch.dtype, torch.dtype]) -> Point:
        return point.in_precision(data[1])

    def invert(self, point: Point, data: tuple[torch.dtype, torch.dtype]) -> Point:
        wide = point.in_precision(torch.promote_types(*data))  # what certificates go by keeps its digits
        return wide._replace(coef=point.coef.to(data[0]), correlation=None)


@dataclasses.dataclass(frozen=True)
class SimplePenalty(Reduction):
    """The program with the penalty that is the same norm for its number of outputs and lets solvers do more."""

    def accepts(self, program: Program) -> bool:
        return program.penalty.for_outputs(program.y.shape[1]) is not program.penalty

    def apply(self, program: Program) -> tuple[Program, None]:
        return program.with_penalty(program.penalty.for_outputs(program.y.shape[1])), None

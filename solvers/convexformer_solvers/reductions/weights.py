"""Samples of no weight left out, targets in double precision, and penalties in their simplest form."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.points import Point
from convexformer_solvers.program import Program

from .base import Reduction


@dataclasses.dataclass(frozen=True)
class DropZeroWeights(Reduction):
    """The program on its samples of positive weight; others have predictions and a dual point of zero."""

    def accepts(self, program: Program) -> bool:
        return not bool((program.weight > 0).all())

    def apply(self, program: Program) -> tuple[Program, Tensor]:
        return program.drop_zero_weights(), program.weight > 0

    def restrict(self, point: Point, data: Tensor) -> Point:
        return _by_samples(point, lambda values: values[data])

    def invert(self, point: Point, data: Tensor) -> Point:
        def expanded(values: Tensor) -> Tensor:
            result = values.new_zeros((len(data), *values.shape[1:]))
            result[data] = values
            return result

        return _by_samples(point, expanded)


class _Precisions(NamedTuple):
    own: torch.dtype
    reduced: torch.dtype


@dataclasses.dataclass(frozen=True)
class Targets(Reduction):
    """The program with targets and weights in another precision than the user's; the map stays as it is.

    Parameters
    ----------
    of_map : bool, default=False
        Whether that is the precision of the map, and not float64.
    """

    of_map: bool = False

    def _precision(self, program: Program) -> torch.dtype:
        return program.map.dtype if self.of_map else torch.float64

    def accepts(self, program: Program) -> bool:
        return program.y.dtype != self._precision(program)

    def apply(self, program: Program) -> tuple[Program, _Precisions]:
        own, wanted = program.y.dtype, self._precision(program)
        reduced = program.with_float64_targets() if wanted == torch.float64 else program.to(wanted)
        return reduced, _Precisions(own, wanted)

    def restrict(self, point: Point, data: _Precisions) -> Point:
        return in_precision(point, data.reduced)

    def invert(self, point: Point, data: _Precisions) -> Point:
        # What certificates go by keeps its digits.
        wide = torch.promote_types(data.own, data.reduced)
        result = in_precision(point, wide)
        return result._replace(coef=point.coef.to(data.own), correlation=None)


@dataclasses.dataclass(frozen=True)
class SimplePenalty(Reduction):
    """The program with the penalty that is the same norm for its number of outputs and lets solvers do more."""

    def accepts(self, program: Program) -> bool:
        return program.penalty.for_outputs(program.y.shape[1]) is not program.penalty

    def apply(self, program: Program) -> tuple[Program, None]:
        return dataclasses.replace(program, penalty=program.penalty.for_outputs(program.y.shape[1])), None

    def restrict(self, point: Point, data: None) -> Point:
        return point

    def invert(self, point: Point, data: None) -> Point:
        return point


def in_precision(point: Point, dtype: torch.dtype) -> Point:
    """The point with all of its parts in a precision."""
    return Point(*(None if part is None else part.to(dtype) for part in point))  # type: ignore[arg-type]


def _by_samples(point: Point, change: object) -> Point:
    """The point with its predictions and dual point changed in the axis of the samples."""
    parts = {name: getattr(point, name) for name in ("dual", "pred", "fitted")}
    changed = {name: change(part) for name, part in parts.items() if part is not None}  # type: ignore[operator]
    return point._replace(**changed)

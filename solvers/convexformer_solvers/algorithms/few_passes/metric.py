"""Metrics of variable-metric steps, without intercept."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.program import Program

from .low_rank import LowRank
from .model import Gram


class Part(NamedTuple):
    """Metric of some outputs, with the intercept eliminated.

    Coefficients are a matrix ``(p, k)`` of k outputs with one Gram matrix, or a vector where outputs are coupled.
    """

    outputs: slice
    joint: bool  # whether the outputs are coupled
    feature_shape: tuple[int, ...]  # of a column of coefficients: (*block_shape, d), or (*block_shape, c, d)
    matrix: Gram | LowRank  # of all features (p, p), or of those of all outputs (c p, c p)
    cross: Tensor  # of the features with the intercepts, (p, 1) or (c p, c)
    core: Tensor  # of the intercepts, (1, 1) or (c, c); zeros without an intercept
    inverse: Tensor  # its pseudo-inverse

    def flat(self, coef: Tensor) -> Tensor:
        """The outputs' coefficients as a matrix or a vector."""
        chosen = coef[..., self.outputs]
        return chosen.movedim(-1, -2).reshape(-1, 1) if self.joint else chosen.flatten(0, -2)

    def shaped(self, flat: Tensor) -> Tensor:
        """The outputs' coefficients of a matrix or a vector."""
        return flat.view(self.feature_shape).movedim(-1, -2) if self.joint else flat.view(*self.feature_shape, -1)

    def of_intercept(self, values: Tensor) -> Tensor:
        """Values of the outputs, as many rows as the intercepts have in the metric."""
        return values[self.outputs].view(self.core.shape[0], -1)

    def square(self, coef: Tensor, intercept: Tensor) -> float:
        """Squared norm of a move."""
        flat = self.flat(coef)
        rest = self.of_intercept(intercept) + self.inverse @ self.cross.T @ flat
        return float((flat * self.matrix.product(flat)).sum() + (rest * (self.core @ rest)).sum())


class Metric(NamedTuple):
    """Where outputs are penalised apart, each has its own part."""

    local: Tensor  # second derivatives of each sample's loss that it is made of
    parts: tuple[Part, ...]
    span: Tensor | None = None  # (p, r), of the directions that a closer metric is formed of; None where there is none

    def reduced(self, correlation: Tensor, slope: Tensor) -> Tensor:
        """Correlation of a dual point whose sum `slope` has been taken from the samples in proportion to `local`."""
        moved = [part.shaped(part.cross @ part.inverse @ part.of_intercept(slope)) for part in self.parts]
        return correlation - torch.cat(moved, dim=-1)

    def square(self, coef: Tensor, intercept: Tensor) -> float:
        """Squared norm of a move."""
        return sum(part.square(coef, intercept) for part in self.parts)


class Metrics(ABC):
    """One way to form metrics."""

    joins_outputs: ClassVar[bool]  # whether one matrix is of all outputs that the loss couples

    @property
    @abstractmethod
    def name(self) -> str:
        """What results call them."""

    @abstractmethod
    def of(self, program: Program, local: Tensor, span: Tensor | None = None) -> Metric:
        """The metric of curvatures ``(N, n)``, of all outputs, of each or of pairs of them.

        The span is that of a former one, if any.
        """


def outputs_apart(program: Program, joined: bool) -> int:
    """How many outputs have curvatures of their own in a metric; one where all have the same bound.

    That is so where the penalty couples them, and where curvatures of all pairs, which metrics of `joined` outputs
    take, need too much memory.
    """
    y, loss, n_outputs = program.y, program.loss, program.y.shape[1]
    if not program.penalty.output_separable or loss.quadratic:
        return 1
    # Of half of all pairs, four copies at once: those before, new ones, these weighted and as matrices.
    coupled = joined and not loss.output_separable
    n_bytes = 2 * (n_outputs + 1) * y.numel() * y.element_size() if coupled else 0
    return n_outputs if n_bytes <= (program.map.memory_limit or math.inf) else 1


def one_by_one(n: int) -> list[slice]:
    """The outputs of each of n parts; all of them where there is one part."""
    return [slice(None)] if n == 1 else [slice(place, place + 1) for place in range(n)]


def in_single(sizes: Tensor) -> bool:
    """Whether the largest of what was computed in float32 neither overflows nor underflows there."""
    single = torch.finfo(torch.float32)
    return single.tiny / single.eps <= float(sizes.amax()) < math.inf

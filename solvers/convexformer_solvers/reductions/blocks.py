"""Programs on some of the blocks of a larger one."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.linalg.cholesky import CholeskySolver, cholesky
from convexformer_solvers.linalg.gram import select_blocks
from convexformer_solvers.linear_maps.dense import DenseMap
from convexformer_solvers.points import Point
from convexformer_solvers.program import Program

from .base import Reduction

_OF_BLOCKS = ("coef", "correlation")  # parts of a point with a row for each block


@dataclasses.dataclass(frozen=True, eq=False)
class Restrict(Reduction):
    """The program with all but some blocks at zero, on the same samples; blocks have one axis."""

    blocks: Tensor  # (m,), positions in the flattened block axes, in any order
    gram: Tensor | None = None  # (m d, m d), weighted and, with an intercept, centred; only read

    def apply(self, program: Program) -> tuple[Program, tuple[int, ...]]:
        reduced = program.with_map(program.map.restricted(self.blocks))
        if (gram := self.gram) is not None:
            reduced.remembered("gram", lambda: gram.cpu().numpy())  # as block descent takes it
        return reduced, program.coef_shape

    def restrict(self, point: Point, data: tuple[int, ...]) -> Point:
        return point.with_changed(_OF_BLOCKS, lambda coef: coef.reshape(-1, *coef.shape[-2:])[self.blocks])

    def invert(self, point: Point, data: tuple[int, ...]) -> Point:
        def on_all(coef: Tensor) -> Tensor:
            blocks = coef.new_zeros((math.prod(data[:-2]), *data[-2:]))
            return blocks.index_copy_(0, self.blocks, coef).view(data)

        return point.with_changed(_OF_BLOCKS, on_all)


class _Root(NamedTuple):
    """What the way back from a compressed program needs."""

    program: Program  # the original
    solver: CholeskySolver  # R' R
    scale: float  # the compressed program averages over its samples
    mean: Tensor  # of the targets, (c,)


@dataclasses.dataclass(frozen=True, eq=False)
class Compress(Reduction):
    r"""One sample more than features on some blocks, for the squared loss and fewer features than samples.

    With the weighted and centred Gram matrix of the blocks, ``G = R'R``, and their products with the targets ``q``,
    the loss is :math:`\frac12 \|R z - R^{-\top} q\|^2` plus a constant: ``R`` takes the place of the data. One more
    sample, which no feature reaches, holds the constant. The intercept is gone with the means.
    """

    blocks: Tensor  # (m,), positions in the flattened block axes, in any order
    gram: Tensor  # (m d, m d), the G; only read
    target: Tensor  # (m d, c), the q
    means: Tensor | None  # (m d,), weighted means of the columns; None without an intercept

    def apply(self, program: Program) -> tuple[Program, _Root]:
        mean = program.weight @ program.y * program.fit_intercept
        root = _Root(program, CholeskySolver(cholesky(self.gram.clone()).T), math.sqrt(len(self.gram) + 1), mean)
        targets = root.scale * root.solver.solve_lower(self.target)
        unexplained = program.weight @ (program.y - mean).square() - (targets / root.scale).square().sum(0)
        constant = root.scale * unexplained.clamp(min=0).sqrt()
        data = torch.cat([root.scale * root.solver.upper, torch.zeros_like(self.gram[:1])])
        small_map = _RootMap(data.view(len(data), len(self.blocks), -1), self.gram)
        y = torch.cat([targets, constant[None]])
        reduced = dataclasses.replace(program, map=small_map, y=y, sample_weight=None, fit_intercept=False)
        return reduced, root

    def restrict(self, point: Point, data: _Root) -> Point:
        # The predictions whose dual point has the correlation of the original one.
        on_blocks = Restrict(self.blocks).restrict(point, ())
        if on_blocks.correlation is None:
            return Point(on_blocks.coef)
        theta = data.scale * data.solver.solve_lower(self.target - on_blocks.correlation.flatten(0, 1))
        return Point(on_blocks.coef, pred=torch.cat([theta, torch.zeros_like(theta[:1])]))

    def invert(self, point: Point, data: _Root) -> Point:
        program = data.program
        on_all = Restrict(self.blocks).invert(Point(point.coef, correlation=point.correlation), program.coef_shape)
        if point.pred is None or not program.map.in_memory:  # one pass then gives predictions and their correlation
            moved = 0.0 if self.means is None else self.means @ point.coef.flatten(0, 1)
            return on_all._replace(intercept=data.mean - moved)
        behind = data.solver.solve_upper(point.pred[:-1] / data.scale)
        both = torch.cat([point.coef, behind.view_as(point.coef)], dim=-1)
        pred = program.map.matvec_blocks(self.blocks, both) + data.mean.repeat(2)
        if self.means is not None:
            pred = pred - self.means @ both.flatten(0, 1)
        fitted, pred = pred.tensor_split(2, dim=1)
        return on_all._replace(pred=pred, fitted=fitted)


class _RootMap(DenseMap):
    """Map of a triangular root, whose Gram matrix under the mean over its rows is known."""

    rows_are_samples = False

    def __init__(self, data: Tensor, gram: Tensor) -> None:
        super().__init__(data)
        self._known_gram = gram

    def gram(self, left: Tensor, right: Tensor, weight: Tensor, center: Tensor | None = None) -> Tensor:
        if center is not None or bool((weight != weight[0]).any()):
            return super().gram(left, right, weight, center)
        return select_blocks(self._known_gram, left, right, self.feature_shape[-1]).mul_(weight[0] * self.n_samples)

"""The squared loss from the Gram matrix of the features: data that are not held in memory are read once."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from convexformer_solvers.points import Point
from convexformer_solvers.program import Program
from convexformer_solvers.rounding import EPS, SUM

from .base import Reduction
from .blocks import _RootMap


class MomentsOf(NamedTuple):
    """Weighted and, with an intercept, centred moments of a program's data; ``p`` is ``prod(feature_shape)``."""

    gram: Tensor  # (p, p)
    target: Tensor  # (p, c), products of the features with the targets
    means: Tensor  # of the features, (p,); zeros without an intercept
    mean: Tensor  # of the targets, (c,); zeros without an intercept


def moments_of(program: Program, single: bool = False) -> MomentsOf:
    """Moments of a program of the squared loss with float64 targets, once for all ``alpha``; the data are read once.

    They are read again, about their means, where these are so large that squares lose more than half of their digits.
    With `single` products of the Gram matrix are in single precision.
    """
    return program.remembered(f"moments, {single}", lambda: _moments(program, single))


def _moments(program: Program, single: bool) -> MomentsOf:
    weight, free = program.weight, program.fit_intercept
    mean = weight @ program.y * free
    right = torch.cat([program.y - mean, torch.ones_like(program.y[:, :1])], dim=1)
    gram, product = program.map.moments(weight, right, single)
    if single and not bool(torch.isfinite(gram).all()):  # squares overflow
        return _moments(program, single=False)
    target, means = product[:, :-1], product[:, -1] * free
    # The best constant model's dual point is the centred target.
    program.remembered("null_correlation", lambda: target.reshape(program.coef_shape).clone())
    raw = gram.diagonal().clone()
    gram = gram.sub_(torch.outer(means, means))
    rounding = torch.finfo(torch.float32).eps if single else EPS
    if lost_to_means(raw, gram.diagonal(), rounding):
        gram = program.map.full_gram(weight, means.view(-1, program.map.feature_shape[-1]))
    lost = gram.diagonal() <= SUM**2 * raw  # features that are constant but for the rounding of their means
    gram[lost], gram[:, lost] = 0.0, 0.0
    return MomentsOf(gram, target.masked_fill(lost[:, None], 0.0), means, mean)


def lost_to_means(squares: Tensor, centered: Tensor, rounding: float) -> bool:
    """Whether a sum of squares loses half of its digits or more, of that rounding, where the mean is subtracted."""
    return bool(((centered < math.sqrt(rounding) * squares) & (squares > 0)).any())


class GramRoot:
    r"""A root ``R`` of a Gram matrix ``G = R'R`` as the data of a linear map, whatever the rank of ``G``.

    ``G`` of shape ``(p, p)`` is positive semidefinite up to rounding, and `feature_shape` that of the ``p`` features.
    The samples of `map` are the rows of ``sqrt(n) R`` and a row of zeros, ``n`` in all: their mean has the Gram matrix
    ``G``.

    Examples
    --------
    >>> gram = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> root = GramRoot(gram, (1, 2)).map.as_matrix()
    >>> bool(torch.allclose(root.T @ root / len(root), gram))
    True
    """

    def __init__(self, gram: Tensor, feature_shape: tuple[int, ...]) -> None:
        size = torch.where(gram.diagonal() > 0, gram.diagonal(), 1.0).sqrt()
        unit = gram / size / size[:, None]
        lower, failed = torch.linalg.cholesky_ex(unit)
        # Below that a pivot is rounding, and what is divided by it has no digits.
        if bool(failed) or float(lower.diagonal().amin()) ** 2 <= math.sqrt(EPS):
            values, vectors = torch.linalg.eigh(unit)
            kept = values > len(values) * EPS * values[-1].clamp(min=EPS)
            values, vectors = values[kept].sqrt(), vectors[:, kept]
            root, self._inverse = values[:, None] * vectors.T * size, (vectors / values / size[:, None]).T
        else:
            root, self._inverse = lower.T * size, None
        n_rows = len(root) + 1
        self._scale = math.sqrt(n_rows)
        data = torch.cat([self._scale * root, root.new_zeros((1, root.shape[1]))])
        self._scaled = data[:-1]
        self.map = _RootMap(data.view(n_rows, *feature_shape), gram)

    def targets(self, product: Tensor, square: Tensor | None = None) -> Tensor:
        """Targets whose products with the map are `product`, ``(p, c)``; the last row has them the mean squares given.

        `square` has shape (c,). Without it that row is zero.
        """
        if self._inverse is None:
            targets = self._scale * torch.linalg.solve_triangular(self._scaled.T, product, upper=False)
        else:
            targets = self._inverse @ product
        rest = targets.new_zeros(targets.shape[1]) if square is None else square - targets.square().sum(0)
        return self._scale * torch.cat([targets, rest.clamp(min=0).sqrt()[None]])


@dataclasses.dataclass(frozen=True)
class Moments(Reduction):
    r"""A program with as few samples as features that has the same objective, for the squared loss.

    With the moments ``G`` and ``q`` of the data, ``G = R'R``, the mean loss is
    :math:`\frac12 \|R z - R^{-\top} q\|^2` plus a constant, which one more sample holds that no feature reaches. The
    intercept follows from the means. The gap of a point is that of the original program, at its own dual point.

    Parameters
    ----------
    single : bool, default=False
        Whether products of the Gram matrix are in single precision, in half of the time: the objective is then the same
        to about 1e-7.

    Examples
    --------
    >>> from convexformer_solvers import DenseMap, GroupL2, Squared
    >>> data = torch.randn(50, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> program = Program(DenseMap(data), data[:, 0, :1] + 1, Squared(), GroupL2(), alpha=0.1, fit_intercept=True)
    >>> small, _ = Moments().apply(program)
    >>> small.map.shape, abs(small.alpha_max - program.alpha_max) < 1e-12
    ((7, 2, 3), True)
    """

    single: bool = False

    def accepts(self, program: Program) -> bool:
        return program.loss.quadratic

    def apply(self, program: Program) -> tuple[Program, MomentsOf]:
        moments, name = moments_of(program, self.single), f"gram_root, {self.single}"
        root = program.remembered(name, lambda: GramRoot(moments.gram, program.map.feature_shape))
        y = root.targets(moments.target, program.weight @ (program.y - moments.mean).square())
        reduced = dataclasses.replace(program, map=root.map, y=y, sample_weight=None, fit_intercept=False)
        return reduced, moments

    def restrict(self, point: Point, data: MomentsOf) -> Point:
        return Point(point.coef)

    def invert(self, point: Point, data: MomentsOf) -> Point:
        return Point(point.coef, data.mean - data.means @ point.coef.flatten(0, -2))

"""The best constant model: the solution from ``alpha_max`` on."""

from __future__ import annotations

from .program import Program
from .solver import Point, Solver


class Constant(Solver):
    """Stays at the best constant model, whose dual point is optimal where ``alpha >= alpha_max``.

    Examples
    --------
    >>> Constant().name
    'constant'
    """

    @property
    def name(self) -> str:
        return "constant"

    def init(self, program: Program, start: Point) -> None:
        return None

    def step(self, program: Program, state: None) -> None:
        return None

    def point(self, program: Program, state: None) -> Point:
        zeros, exact = program.y.new_zeros(program.coef_shape), program.with_float64_targets()
        return Point(zeros, program.null_intercept, exact.null_dual_point, exact.null_intercept.expand_as(exact.y))

    def estimated_gap(self, state: None) -> float:
        return 0.0

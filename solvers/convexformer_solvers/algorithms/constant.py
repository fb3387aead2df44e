"""The best constant model: the solution from ``alpha_max`` on."""

from __future__ import annotations

from convexformer_solvers.points import Point
from convexformer_solvers.program import Program

from .base import Solver


class Constant(Solver):
    """Stays at the best constant model, whose dual point is optimal where ``alpha >= alpha_max``; one step is all."""

    name = "constant"

    def init(self, program: Program, start: Point) -> bool:
        return False

    def step(self, program: Program, state: bool) -> bool:
        return True

    def point(self, program: Program, state: bool) -> Point:
        zeros, exact = program.y.new_zeros(program.coef_shape), program.with_float64_targets()
        constant = exact.constant_pred(exact.null_intercept)
        return Point(zeros, program.null_intercept.clone(), exact.null_dual_point, constant)

    def gap_estimate(self, program: Program, state: bool) -> float:
        return 0.0

    def finished(self, state: bool) -> bool:
        return state

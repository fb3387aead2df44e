"""Points of a program: estimates of the gap, what a solver starts from, and what is filled in."""

import dataclasses

import numpy as np
import pytest
import torch
from solver_cases import fit, make_program, randn

from convexformer_solvers import PerTarget, Point, get_penalty
from convexformer_solvers.points import (
    as_start,
    completed,
    dual_estimate,
    dual_of,
    gap_estimate,
    own_predictions,
    point_at,
)

PENALTIES = {
    "separate": get_penalty("group_l2"),
    "joint": get_penalty("nuclear"),
    "parts": PerTarget(get_penalty("nuclear"), 2),
}


def a_program(penalty="separate", loss="squared", **options):
    program = make_program(loss, n=40, c=4, weighted=True, **options).drop_zero_weights()
    return dataclasses.replace(program, penalty=PENALTIES[penalty], y=program.y * torch.tensor([1.0, 0.5, 2.0, 3.0]))


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("coef", ["zero", "random", "of a larger alpha"])
def test_estimates_are_below_the_optimum_and_add_up_over_parts(penalty, coef):
    program = a_program(penalty)
    of_larger = fit(program.with_alpha(1.5 * program.alpha)).coef
    coefs = {"zero": 0 * of_larger, "random": randn(*program.coef_shape), "of a larger alpha": of_larger}
    point = point_at(program, coefs[coef])
    optimum = fit(program).certificate.primal
    assert dual_estimate(program, point) <= optimum * (1 + 1e-12)
    separate, expected = 0.0, 0.0
    for k in range(program.n_parts):
        part = program.part(k)
        own = point.with_changed(point._fields, lambda one, k=k: one.chunk(program.n_parts, -1)[k])
        separate += dual_estimate(part, own)
        theta = dual_of(part, own)
        sums = np.einsum("n,nkd,nc->kdc", part.weight, part.map.data, theta)
        norms = np.linalg.norm(sums, axis=1) if penalty == "separate" else np.linalg.norm(sums, 2, axis=(1, 2))
        expected += float(part.dual(min(1.0, part.alpha / norms.max()) * theta))
    assert dual_estimate(program, point) == pytest.approx(separate, rel=1e-12)
    assert dual_estimate(program, point) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_gaps_of_solutions_are_estimated_as_none(penalty):
    program = a_program(penalty)
    point = point_at(program, fit(program, tol=1e-10).coef)
    assert abs(gap_estimate(program, point)) <= 1e-5 * program.null_value


@pytest.mark.parametrize("penalty", PENALTIES)
def test_feasible_dual_points_are_taken_as_they_are(penalty):
    program = a_program(penalty)
    point = point_at(program, fit(program).coef)
    relaxed = program.with_alpha(2 * program.alpha)
    assert dual_estimate(relaxed, point) == pytest.approx(float(program.dual(dual_of(program, point))), rel=1e-12)


@pytest.mark.parametrize("intercept", [False, True])
def test_no_solver_starts_from_predictions_worse_than_constant_ones(intercept):
    program = a_program(intercept=intercept)
    coef = fit(program).coef
    good = own_predictions(program, coef)
    assert torch.equal(as_start(program, Point(coef, pred=good))[1], good)
    assert as_start(program, Point(coef, pred=10 * good))[1] is None
    assert as_start(program, Point(coef))[1] is None


@pytest.mark.parametrize("intercept", [False, True])
def test_zero_coefficients_keep_the_predictions_behind_their_dual_point(intercept):
    program = a_program(intercept=intercept)
    zero, pred = torch.zeros(program.coef_shape, dtype=torch.float64), randn(*program.y.shape, seed=3)
    for given in (None, pred):
        point = point_at(program, zero, given)
        torch.testing.assert_close(point.fitted, own_predictions(program, zero))
        torch.testing.assert_close(point.pred, point.fitted if given is None else pred)
        torch.testing.assert_close(point.correlation, program.weighted_adjoint(dual_of(program, point)))


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("loss", ["squared", "huber"])
def test_what_a_point_leaves_out_is_the_best_intercept_and_minus_the_slopes_in_double_precision(loss, intercept):
    exact = a_program(loss=loss, intercept=intercept)
    program = exact.to(torch.float32)
    coef, pred = randn(*program.coef_shape).float(), randn(*program.y.shape, seed=3).float()
    point = completed(program, Point(coef, pred=pred))
    slopes = exact.loss.gradient(exact.map.matvec(coef.double()) + point.intercept.double(), exact.y)
    assert point.intercept.any() == intercept
    if intercept:
        torch.testing.assert_close(exact.weight @ slopes, torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-6)
    dual = -exact.loss.gradient(pred.double(), program.with_float64_targets().y)
    torch.testing.assert_close(point.dual, dual, rtol=1e-13, atol=1e-13)
    own = randn(*program.y.shape, seed=4)
    assert completed(program, Point(coef, pred=pred, dual=own)).dual is own
    assert completed(program, Point(coef)).dual is None

"""Features and targets without their means, where an intercept gives these back."""

import dataclasses

import pytest
import torch
from solver_cases import LOSS_NAMES, make_program, randn

from convexformer_solvers import Admm, Auto, DenseMap, Fista, GatedMap, Point, alpha_grid, certify, iterate_path, solve
from convexformer_solvers.algorithms.stage import Stage, begun, begun_again, stepped
from convexformer_solvers.points import completed, dual_of, null_point, objective
from convexformer_solvers.reductions.base import Chain
from convexformer_solvers.reductions.center import Center
from convexformer_solvers.reductions.precision import SinglePrecision

BOUNDED = [loss for loss in LOSS_NAMES if loss != "poisson"]
CENTERED = Stage(Admm(), "on centred features", reductions=(Center(),))


@pytest.mark.parametrize("loss", BOUNDED)
@pytest.mark.parametrize("mean", [1e3, 1e5, 1e8])
def test_means_cost_auto_no_iterations(loss, mean):
    program = make_program(loss, n=100, blocks=5, d=4, ratio=0.1, intercept=True)
    far_off = dataclasses.replace(program, map=DenseMap(program.map.data + mean))
    plain, moved = (solve(each, Auto(), tol=1e-6) for each in (program, far_off))
    assert moved.certificate.relative_gap <= 1e-6
    assert moved.n_iter <= 1.5 * plain.n_iter + 2
    assert moved.certificate.primal == pytest.approx(plain.certificate.primal, rel=1e-5)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
def test_both_points_are_those_of_the_program(gated, intercept):
    program = make_program("squared", n=60, blocks=4, d=3, gated=gated, intercept=intercept)
    program = dataclasses.replace(program, y=program.y + 3.0)
    state = begun(CENTERED, program, null_point(program))
    for _ in range(20):
        state = stepped(state)
    point = state.result()
    shift = point.fitted - program.map.matvec(point.coef)
    torch.testing.assert_close(shift, shift[:1].expand_as(shift))
    assert objective(program, point) <= program.null_value
    correlation = program.weighted_adjoint(dual_of(program, point))
    torch.testing.assert_close(point.correlation, correlation, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_a_solution_on_centred_features_is_one_of_the_program(loss):
    program = make_program(loss, n=60, blocks=4, d=3, intercept=True)
    far_off = program.y + 3.0 if loss == "squared" else program.y
    program = dataclasses.replace(program, map=DenseMap(program.map.data + 3.0), y=far_off)
    centered, data = Center().apply(program)
    result = solve(centered, Fista(), tol=1e-9)
    pred = centered.map.matvec(result.coef) + result.intercept
    found = Center().invert(Point(result.coef, result.intercept, pred=pred, fitted=pred), data)
    torch.testing.assert_close(Center().restrict(found, data).pred, pred)
    point = completed(program, found)
    assert certify(program, point.coef, point.intercept, point.dual).relative_gap <= 2e-9
    torch.testing.assert_close(program.map.matvec(point.coef) + point.intercept, point.fitted)


@pytest.mark.parametrize("loss", ["squared", "huber"])
@pytest.mark.parametrize("gated", [False, True])
def test_the_mean_of_targets_costs_single_precision_no_digits(gated, loss):
    program = make_program(loss, n=60, blocks=4, d=3, gated=gated, intercept=True)
    reductions = (Center(small=0), SinglePrecision())
    plain, far_off = (
        Chain.of(dataclasses.replace(program, y=program.y + mean), reductions).program for mean in (0.0, 1e6)
    )
    assert far_off.y.dtype == torch.float32
    torch.testing.assert_close(far_off.y, plain.y)


def test_more_than_the_largest_data_are_not_copied():
    program = make_program("squared", n=60, blocks=4, d=3, intercept=True)
    assert Center(largest=719).apply(program)[0].map is program.map
    assert Center(largest=720).apply(program)[0].map is not program.map


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_nothing_is_left_of_the_means(loss, weighted):
    program = make_program(loss, n=60, blocks=4, d=3, intercept=True, weighted=weighted).drop_zero_weights()
    program = dataclasses.replace(program, map=DenseMap(program.map.data + 100.0))
    centered, _ = Center().apply(program)
    means = centered.map.rmatvec(centered.weight[:, None])
    assert float(means.abs().max()) < 1e-11
    assert centered.alpha_max == pytest.approx(program.alpha_max, rel=1e-9)
    assert centered.null_value == pytest.approx(program.null_value, rel=1e-9)
    if program.loss.of_residual:
        assert float(centered.null_intercept.abs().max()) < 1e-8


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_means_cost_paths_no_iterations(loss):
    program = make_program(loss, n=100, blocks=5, d=4, c=1, intercept=True)
    grid = alpha_grid(program.alpha_max, 10)
    far_off = dataclasses.replace(program, map=DenseMap(program.map.data + 1e6))
    n_iter = [
        sum(result.n_iter for result in iterate_path(each, Auto(), grid, tol=1e-6)) for each in (program, far_off)
    ]
    assert n_iter[1] <= 1.5 * n_iter[0]


def test_a_path_centres_once_and_large_data_only_where_means_dominate():
    program = make_program("squared", n=60, blocks=4, d=3, intercept=True)
    state = stepped(begun(CENTERED, program, null_point(program)))
    linear_map = state.chain.program.map
    assert float(linear_map.data.mean(0).abs().max()) < 1e-12
    again = begun_again(CENTERED, program.with_alpha(0.5 * program.alpha), state.result(), state)
    assert again.chain.program.map is linear_map
    large = dataclasses.replace(program, map=DenseMap(randn(60, 4, 1200)))
    assert Center().apply(large)[0].map is large.map
    dominated = dataclasses.replace(large, map=DenseMap(large.map.data + 1e5))
    assert float(Center().apply(dominated)[0].map.data.mean(0).abs().max()) < 1e-9


def test_gated_features_are_left_as_they_are():
    program = make_program("logistic", n=60, blocks=4, d=3, c=1, gated=True, intercept=True)
    assert isinstance(begun(CENTERED, program, null_point(program)).chain.program.map, GatedMap)


def test_without_an_intercept_nothing_is_taken_away():
    program = make_program("squared", n=60, blocks=4, d=3)
    assert not Center().accepts(program)
    assert begun(CENTERED, program, null_point(program)).chain.program is program

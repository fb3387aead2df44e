"""Features and targets without their means, where an intercept gives these back."""

import dataclasses

import pytest
import torch
from solver_cases import LOSS_NAMES, make_program, randn

from convexformer_solvers import Admm, Auto, DenseMap, GatedMap, alpha_grid, iterate_path, solve
from convexformer_solvers.algorithms.base import Point
from convexformer_solvers.reductions.center import Centered

BOUNDED = [loss for loss in LOSS_NAMES if loss != "poisson"]


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
    solver = Centered(Admm())
    state = solver.init(program, Point(torch.zeros(program.coef_shape, dtype=torch.float64), program.null_intercept))
    for _ in range(20):
        state = solver.step(program, state)
    iterate = solver.iterate(state)
    assert iterate.program.map is program.map
    shift = iterate.fitted - program.map.matvec(iterate.coef)
    torch.testing.assert_close(shift, shift[:1].expand_as(shift))
    assert iterate.objective <= program.null_value
    correlation = program.weighted_adjoint(iterate.dual_point())
    torch.testing.assert_close(iterate.correlation, correlation, rtol=1e-6, atol=1e-8)


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
    solver = Centered(Admm())
    program = make_program("squared", n=60, blocks=4, d=3, intercept=True)
    start = Point(torch.zeros(program.coef_shape, dtype=torch.float64), program.null_intercept)
    state = solver.step(program, solver.init(program, start))
    mean = state.own.map.data.mean(0)
    assert float(mean.abs().max()) < 1e-12
    again = solver.init_again(program.with_alpha(0.5 * program.alpha), solver.point(program, state), state)
    assert again.own.map is state.own.map
    large = dataclasses.replace(program, map=DenseMap(randn(60, 4, 1200)))
    start = Point(torch.zeros(large.coef_shape, dtype=torch.float64), large.null_intercept)
    assert solver.init(large, start).own.map is large.map
    dominated = dataclasses.replace(large, map=DenseMap(large.map.data + 1e5))
    assert float(solver.init(dominated, start).own.map.data.mean(0).abs().max()) < 1e-9


def test_gated_features_are_left_as_they_are():
    program = make_program("logistic", n=60, blocks=4, d=3, c=1, gated=True, intercept=True)
    start = Point(torch.zeros(program.coef_shape, dtype=torch.float64), program.null_intercept)
    assert isinstance(Centered(Admm()).init(program, start).own.map, GatedMap)

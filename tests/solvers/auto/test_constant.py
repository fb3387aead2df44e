"""The solution from alpha_max on."""

from __future__ import annotations

import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from solver_cases import LOSS_NAMES, make_program, randn

from convexformer_solvers import Auto, DenseMap, GroupL2, Program, Softmax, solve
from convexformer_solvers.algorithms.constant import Constant
from convexformer_solvers.points import null_point


@pytest.mark.parametrize("loss", LOSS_NAMES)
@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_is_certified_from_alpha_max_on(loss, penalty, intercept, factor):
    program = make_program(loss, penalty, n=40, c=2, intercept=intercept, weighted=True)
    program = program.with_alpha(factor * program.alpha_max)
    result = solve(program, Constant(), tol=1e-10, max_iter=1)
    assert not result.coef.any()
    # The solver sees the samples of positive weight alone, whose sums are rounded otherwise.
    torch.testing.assert_close(result.intercept, program.null_intercept, rtol=1e-12, atol=1e-12)
    assert result.certificate.primal == pytest.approx(program.null_value, rel=1e-12)


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_auto_takes_one_iteration_there_and_goes_on_below(loss):
    program = make_program(loss, n=40, c=2, intercept=True)
    largest = program.with_alpha(program.alpha_max)
    result = solve(largest, Auto(), tol=1e-10)
    assert result.n_iter == 1
    assert torch.equal(result.intercept, program.null_intercept)
    assert Auto().activity(Auto().init(largest, null_point(largest))).startswith("auto: constant")
    below = solve(program.with_alpha(0.99 * program.alpha_max), Auto(), tol=1e-10)
    assert below.coef.any()
    assert below.certificate.relative_gap <= 1e-10


@pytest.mark.parametrize("loss", ["squared", "huber", "softmax"])
@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
def test_samples_of_weight_zero_do_not_move_alpha_max(loss, penalty):
    # Without them sums are rounded otherwise, and alpha_max with them.
    for seed in range(6):
        program = make_program(loss, penalty, n=40, c=2, intercept=True, weighted=True, seed=seed)
        result = solve(program.with_alpha(program.alpha_max), Auto(), tol=1e-10)
        assert result.n_iter == 1
        assert not result.coef.any()


@pytest.mark.parametrize(("n", "classes"), [(1, 2), (300, 3), (3000, 5), (3000, 30)])
def test_a_single_class_is_told_by_the_intercept_alone(n, classes):
    # Newton steps in the intercept end where the absent classes' probabilities are rounding beside one, and a loss of
    # 1e-14 is not yet nothing: `auto` went on for thousands of iterations.
    y = torch.zeros(n, classes, dtype=torch.float64)
    y[:, classes // 2] = 1
    for seed in range(3):
        weight = randn(n, seed=seed).abs() + 0.01
        program = Program(DenseMap(randn(n, 4, 3, seed=seed)), y, Softmax(), GroupL2(), 0.1, weight, True)
        result = solve(program, Auto(), tol=1e-10)
        assert result.n_iter == 1
        assert not result.coef.any()


def test_below_it_the_run_ends_after_the_one_step():
    program = make_program("squared", n=40, c=2, ratio=0.5)
    with pytest.warns(ConvergenceWarning):
        result = solve(program, Constant(), tol=1e-3)
    assert result.n_iter == 1


def test_the_intercept_may_be_changed():
    program = make_program("squared", n=40, c=2, intercept=True)
    before = program.null_intercept.clone()
    solve(program.with_alpha(program.alpha_max), Auto(), tol=1e-6).intercept.add_(1.0)
    assert torch.equal(program.null_intercept, before)

"""Combinations of points that were read, and the conjugate gradients that metric steps are by them."""

import math

import pytest
import torch
from scipy.optimize import minimize
from solver_cases import randn, random_weight, valid_target

from convexformer_solvers import (
    DenseMap,
    GroupL2,
    GroupNuclear,
    Program,
    RowStochastic,
    SignedMap,
    Squared,
    get_loss,
    solve,
)
from convexformer_solvers.algorithms.few_passes import LowRankMetrics, MetricGradient
from convexformer_solvers.algorithms.few_passes.read import best_combination, read

SHARE = 1e-8  # of the descent, below which another Newton step is left out
LOSSES = ["squared", "huber", "logistic", "softmax"]


def program_of(loss, penalty, fit_intercept=True):
    y = valid_target(get_loss(loss), 40, 2, torch.Generator().manual_seed(2))
    data, weight = randn(40, 5, 3), random_weight(40)
    return Program(
        DenseMap(data), y, get_loss(loss), penalty, alpha=0.05, fit_intercept=fit_intercept, sample_weight=weight
    )


def points_of(program, n=3):
    """Points that were read, around a common one."""
    centre = 0.3 * randn(*program.coef_shape, seed=5)
    intercept = program.null_intercept
    coefs = [centre + 0.1 * randn(*program.coef_shape, seed=seed) for seed in range(n)]
    shifts = [0.1 * randn(program.y.shape[1], seed=10 + seed) * program.fit_intercept for seed in range(n)]
    return [read(program, coef, intercept + shift, False) for coef, shift in zip(coefs, shifts, strict=True)]


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("penalty", [GroupL2(), GroupNuclear()], ids=repr)
@pytest.mark.parametrize("loss", LOSSES)
def test_no_affine_combination_has_a_lower_objective(loss, penalty, fit_intercept):
    program = program_of(loss, penalty, fit_intercept)
    *others, first = points = points_of(program)
    best = best_combination(program, first, others, SHARE)

    def objective(shares):
        shares = [1 - sum(shares), *shares]
        coef, intercept = (
            sum(share * part for share, part in zip(shares, parts, strict=True))
            for parts in zip(*((point.at.coef, point.at.intercept) for point in points), strict=True)
        )
        return float(program.primal(coef, intercept))

    reference = minimize(objective, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-15}).fun
    assert reference < min(point.value for point in points) - 1e-4
    assert best.value == pytest.approx(reference, rel=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_combinations_have_their_own_predictions_and_slopes_of_a_quadratic_loss(loss):
    program = program_of(loss, GroupL2())
    *others, first = points_of(program)
    at = best_combination(program, first, others, SHARE).at
    own = read(program, at.coef, at.intercept, False)
    torch.testing.assert_close(at.pred, own.at.pred)
    assert own.value == pytest.approx(float(program.objective(at.coef, at.pred + at.intercept)), rel=1e-12)
    if program.loss.quadratic:
        torch.testing.assert_close(at.correlation, own.at.correlation)
        torch.testing.assert_close(at.slope, own.at.slope)


def test_a_pass_at_zero_coefficients_is_at_its_own_intercept():
    program = program_of("logistic", GroupL2())
    intercept = program.null_intercept + 0.1 * randn(2, seed=3)
    at = read(program, torch.zeros(program.coef_shape, dtype=torch.float64), intercept, False).at
    torch.testing.assert_close(at.correlation, program.map.rmatvec(program.slopes(intercept).at(at.pred)))


def test_two_equal_points_are_combined_to_themselves():
    program = program_of("logistic", GroupL2())
    first = points_of(program, 1)[0]
    assert best_combination(program, first, [first, first], SHARE).value == first.value


def test_points_on_the_boundary_of_the_feasible_ones_stay_there():
    linear_map = SignedMap(DenseMap(randn(30, 4, 2)))
    program = Program(linear_map, randn(30, 2), Squared(), RowStochastic(2), alpha=0.01)
    coefs = [program.penalty.prox(randn(*program.coef_shape, seed=seed), 0.05) for seed in range(3)]
    *others, first = (read(program, coef, program.null_intercept, False) for coef in coefs)
    assert all(math.isfinite(point.value) for point in (*others, first))
    best = best_combination(program, first, others, SHARE)
    assert best.value <= first.value


@pytest.mark.parametrize("n_different", [2, 4])
def test_steps_of_the_squared_loss_are_as_many_as_there_are_different_eigenvalues(n_different):
    basis = torch.linalg.qr(randn(200, 40)).Q * math.sqrt(200)
    sizes = 2.0 ** torch.arange(n_different, dtype=torch.float64).repeat(40 // n_different)
    program = Program(DenseMap((basis * sizes)[:, :, None]), randn(200, 1, seed=1), Squared(), GroupL2(), alpha=1.0)
    program = program.with_alpha(1e-6 * program.alpha_max)
    steps = MetricGradient(LowRankMetrics(1))  # in a multiple of the identity
    assert solve(program, steps, tol=1e-9).n_iter <= n_different + 1

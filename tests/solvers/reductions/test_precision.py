"""Iterations in single precision that end in the precision asked for."""

import dataclasses
import math

import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from solver_cases import LOSS_NAMES, make_program, randn

from convexformer_solvers import Admm, Auto, DenseMap, GatedMap, GroupL2, Program, Squared, Status, get_loss, solve
from convexformer_solvers.algorithms.admm_newton import AdmmNewton
from convexformer_solvers.algorithms.base import Point
from convexformer_solvers.algorithms.polish import Polished
from convexformer_solvers.reductions.center import Centered
from convexformer_solvers.reductions.precision import MixedPrecision

MIXED = Polished(AdmmNewton(MixedPrecision(smallest=0)))
BOUNDED = [loss for loss in LOSS_NAMES if loss != "poisson"]


def start(program):
    return Point(torch.zeros(program.coef_shape, dtype=torch.float64), program.null_intercept)


def run(program, solver, n_steps):
    """The states after each step."""
    states = [solver.init(program, start(program))]
    for _ in range(n_steps):
        states.append(solver.step(program, states[-1]))
    return states


@pytest.mark.parametrize("loss", BOUNDED)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
def test_what_single_precision_cannot_reach_double_does(loss, gated, intercept):
    program = make_program(loss, n=60, blocks=4, d=3, c=2, ratio=0.3, gated=gated, intercept=intercept, weighted=True)
    result = solve(program, MixedPrecision(smallest=0), tol=1e-11, max_iter=3000)
    assert result.certificate.relative_gap <= 1e-11


def test_polished_single_precision_is_enough_for_the_usual_tolerance():
    program = make_program("squared", n=200, blocks=40, d=8, ratio=0.05)
    solver = Polished(MixedPrecision(smallest=0))
    states = run(program, solver, 60)
    gaps = [state.gap / program.null_value for state in states if state.polished is not None]
    assert all(state.inner.is_single for state in states)
    assert min(abs(gap) for gap in gaps) < 1e-6


def test_an_earlier_state_is_carried_on_with_its_own_rho():
    # States share their factors, which have since been made for another rho.
    program = make_program("squared", n=60, blocks=30, d=20, c=1, ratio=0.01)
    admm = Admm()
    early, *_, late = run(program, admm, 60)[1:]
    assert early.rho != late.rho
    correlation = early.rho * early.multiplier
    carried = admm.carried_on(program, early, torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(carried.known.system.rho * carried.multiplier, correlation)


@pytest.mark.parametrize("loss", ["squared", "huber", "softmax", "logistic"])
def test_means_of_features_and_targets_cost_no_iterations(loss):
    program = make_program(loss, n=200, blocks=10, d=4, ratio=0.1, intercept=True)
    shifted = dataclasses.replace(program, map=DenseMap(program.map.data + 100 * randn(10, 4, seed=5).sign()))
    if program.loss.of_residual:
        shifted = dataclasses.replace(shifted, y=program.y + 1e4)
    solver = Polished(Centered(AdmmNewton(MixedPrecision(smallest=0))))
    plain, moved = (solve(one, solver, tol=1e-8) for one in (program, shifted))
    assert moved.certificate.primal == pytest.approx(plain.certificate.primal, rel=1e-6)
    assert moved.n_iter <= plain.n_iter + 10


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_data_beyond_the_range_of_single_precision(scale):
    program = make_program("squared", n=100, blocks=10, d=4, ratio=0.1)
    scaled = dataclasses.replace(program, map=DenseMap(program.map.data * scale), alpha=program.alpha * scale)
    assert solve(scaled, MIXED, tol=1e-8).certificate.primal == pytest.approx(
        solve(program, MIXED, tol=1e-8).certificate.primal, rel=1e-6
    )


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_targets_beyond_the_range_of_single_precision(scale):
    program = make_program("squared", n=100, blocks=10, d=4, ratio=0.1)
    scaled = dataclasses.replace(program, y=program.y * scale, alpha=program.alpha * scale)
    assert solve(scaled, MIXED, tol=1e-8).certificate.relative_gap <= 1e-8


@pytest.mark.parametrize("gated", [False, True])
def test_large_means_that_cannot_be_taken_out(gated):
    program = make_program("logistic", n=100, blocks=6, d=4, ratio=0.1, gated=gated)
    data = (program.map.base if gated else program.map).data + 1e4
    linear_map = GatedMap(data, program.map.masks) if gated else DenseMap(data)
    program = dataclasses.replace(program, map=linear_map)
    program = program.with_alpha(0.1 * program.alpha_max)
    assert solve(program, MixedPrecision(smallest=0), tol=1e-6, max_iter=3000).certificate.relative_gap <= 1e-6


def test_data_too_large_for_a_copy_are_solved_in_double_precision(monkeypatch):
    program = make_program("squared", n=100, blocks=10, d=4, ratio=0.1, intercept=True)
    monkeypatch.setattr("convexformer_solvers.reductions.precision._LARGEST_COPY", 10)
    mixed, double = (run(program, solver, 20)[-1] for solver in (MixedPrecision(smallest=0), Admm()))
    assert not mixed.is_single
    assert torch.equal(mixed.coef, double.coef)
    single = program.to(torch.float32)
    assert run(single, MixedPrecision(smallest=0), 20)[-1].is_single


def test_a_path_goes_on_in_the_precision_of_its_last_alpha():
    program = make_program("squared", n=100, blocks=10, d=4, ratio=0.3, intercept=True)
    solver = MixedPrecision(smallest=0)
    state = run(program, solver, 5)[-1]
    smaller = program.with_alpha(0.5 * program.alpha)
    again = solver.init_again(smaller, solver.point(program, state), state)
    assert again.is_single
    assert again.single.map is state.single.map
    for _ in range(200):
        again = solver.step(smaller, again)
    assert not again.is_single
    assert abs(again.gap) <= 1e-12 * program.null_value
    assert not solver.init_again(program, solver.point(smaller, again), again).is_single


def test_zero_solutions_are_zero_and_do_not_end_single_precision():
    program = make_program("squared", n=100, blocks=10, d=4, ratio=1.0)
    solver = MixedPrecision(smallest=0)
    state = run(program, solver, 30)[-1]
    assert not state.is_single
    assert float(state.coef.abs().max()) < 1e-14
    smaller = program.with_alpha(0.5 * program.alpha)
    assert solver.init_again(smaller, solver.point(program, state), state).is_single


def test_small_data_stay_in_double_precision():
    program = make_program("squared", n=100, blocks=10, d=4, ratio=0.1)
    assert not run(program, MixedPrecision(), 1)[-1].is_single
    assert run(program, MixedPrecision(smallest=100 * 10 * 4), 1)[-1].is_single
    many = make_program("squared", n=20, blocks=10, d=4, c=30, ratio=0.1)  # more coefficients than data
    assert run(many, MixedPrecision(smallest=10 * 4 * 30), 1)[-1].is_single
    assert not run(many, MixedPrecision(smallest=10 * 4 * 30 + 1), 1)[-1].is_single
    # Gates make a Gram matrix of side 60 of little data.
    gated = GatedMap(randn(60, 4, 4, seed=0), randn(60, 5, seed=1) > 0)
    gated = Program(gated, randn(60, 1, seed=2), Squared(), GroupL2(), alpha=0.05)
    assert run(gated, MixedPrecision(smallest=60**2), 1)[-1].is_single
    assert not run(gated, MixedPrecision(smallest=60**2 + 1), 1)[-1].is_single


@pytest.mark.parametrize("name", ["coef", "fitted"])
@pytest.mark.parametrize("failing", [1, 2, 4])
def test_a_step_that_leaves_the_range_is_taken_in_double_precision(monkeypatch, name, failing):
    class Overflowing(Admm):
        def step(self, program, state):
            state = super().step(program, state)
            return state._replace(**{name: state.coef.new_tensor(math.inf).expand_as(getattr(state, name))})

    program = make_program("squared", n=60, blocks=4, d=3, ratio=0.2)
    solver = MixedPrecision(smallest=0)
    state = solver.init(program, start(program))
    for _ in range(failing - 1):
        state = solver.step(program, state)
    assert state.is_single
    monkeypatch.setattr(MixedPrecision, "_single", Overflowing(torch.float32))
    state = solver.step(program, state._replace(solver=MixedPrecision._single))
    assert not state.is_single
    assert all(bool(torch.isfinite(part).all()) for part in solver.iterate(state)[1:])


@pytest.mark.parametrize("loss", ["squared", "huber"])
@pytest.mark.parametrize("of_targets", [torch.float32, torch.float64])  # estimators have targets in double precision
def test_points_that_single_precision_cannot_hold_end_the_run_with_advice(loss, of_targets):
    # An intercept of a million is rounded to a sixteenth: no further step helps, and ten thousand were taken.
    data, y = randn(20, 3, 2).float(), 1e6 + randn(20, 1, seed=1).to(of_targets)
    program = Program(DenseMap(data), y, get_loss(loss), GroupL2(), 1.0, None, True)
    program = program.with_alpha(0.1 * program.alpha_max)
    with pytest.warns(ConvergenceWarning, match="solve in float64"):
        result = solve(program, Auto(), tol=1e-4)
    assert result.status is Status.STALLED
    assert result.n_iter < 500
    assert solve(program, Auto(), tol=1e-4, dtype="float64").status is Status.CONVERGED

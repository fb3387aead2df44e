"""Iterations in single precision that end in the precision asked for."""

import dataclasses
import math

import pytest
import torch
from covering import covering
from sklearn.exceptions import ConvergenceWarning
from solver_cases import BOTH, LOSS_NAMES, make_program, randn

from convexformer_solvers import Admm, Auto, DenseMap, GatedMap, GroupL2, Program, Squared, Status, get_loss, solve
from convexformer_solvers.algorithms.few_passes import LowRankMetrics, MetricGradient
from convexformer_solvers.algorithms.polish import PolishConfig
from convexformer_solvers.algorithms.stage import Patience, Stage, begun, begun_again, carried, stepped
from convexformer_solvers.auto import AutoConfig, plan
from convexformer_solvers.linear_maps.base import LinearMap
from convexformer_solvers.linear_maps.derived import MixedMap
from convexformer_solvers.points import gap_estimate, null_point
from convexformer_solvers.reductions.center import Center
from convexformer_solvers.reductions.precision import BothPrecisions, SinglePrecision

# Alternating directions, polished, in single precision and then in double precision, whatever the size of the data.
ALTERNATING = AutoConfig(least_single=1, costly_gram=math.inf, newton_share=math.inf)
MIXED = Auto(ALTERNATING)
SINGLE = Stage(Admm(), "in single precision", 500, (SinglePrecision(),), patience=Patience())
DOUBLE = Stage(Admm(), "in double precision", carries=True)
BOUNDED = [loss for loss in LOSS_NAMES if loss != "poisson"]


def run(program, stage, n_steps):
    """The states of a stage after each step."""
    states = [begun(stage, program, null_point(program))]
    for _ in range(n_steps):
        states.append(stepped(states[-1]))
    return states


def precision(state):
    """That of what the algorithm of a stage sees."""
    return state.chain.program.map.dtype


@pytest.mark.parametrize(("loss", "gated", "intercept"), covering(BOUNDED, BOTH, BOTH))
def test_what_single_precision_cannot_reach_double_does(loss, gated, intercept):
    program = make_program(loss, n=60, blocks=4, d=3, c=2, ratio=0.3, gated=gated, intercept=intercept, weighted=True)
    result = solve(program, MIXED, tol=1e-11, max_iter=3000)
    assert result.certificate.relative_gap <= 1e-11


@pytest.mark.parametrize("loss", BOUNDED)
@pytest.mark.parametrize("intercept", [False, True])
def test_iterations_alone_end_in_double_precision_what_they_began_in_single(loss, intercept):
    program = make_program(loss, n=60, blocks=4, d=3, intercept=intercept, weighted=True).drop_zero_weights()
    state = begun(SINGLE, program, null_point(program))
    while not state.is_over:
        state = stepped(state)
    assert precision(state) == torch.float32
    state = carried(DOUBLE, program, state)
    for _ in range(100):
        state = stepped(state)
    assert abs(gap_estimate(program, state.result())) <= 1e-11 * program.null_value


@pytest.mark.parametrize("loss", LOSS_NAMES)
@pytest.mark.parametrize("intercept", [False, True])
def test_steps_in_a_metric_begin_in_single_precision_and_end_in_double(loss, intercept, monkeypatch):
    program = make_program(loss, n=60, blocks=8, d=3, intercept=intercept, weighted=True, ratio=0.3)
    stage = Stage(MetricGradient(LowRankMetrics(8)), "of rank 8", reductions=(BothPrecisions(),))
    solver, products = Auto(make_plan=lambda program, warm, config: (stage,)), []

    def counted(self, coef, slopes):
        products.append((coef.dtype, coef.shape[-1]))
        return LinearMap.slopes_pass(self, coef, slopes)

    monkeypatch.setattr(MixedMap, "slopes_pass", counted)
    assert solve(program, solver, tol=1e-4, max_iter=500).certificate.relative_gap <= 1e-4
    assert {dtype for dtype, _ in products} == {torch.float32}
    result = solve(program, solver, tol=1e-11, max_iter=2000)
    assert result.certificate.relative_gap <= 1e-11
    # A metric, whose products have eight columns, may be the last that is formed.
    assert [dtype for dtype, n_columns in products if n_columns == program.y.shape[1]][-1] == torch.float64
    exact = solve(program, Auto(), tol=1e-11)
    assert result.certificate.primal == pytest.approx(exact.certificate.primal, rel=1e-10)


def test_both_precisions_are_for_data_in_double_that_single_can_hold():
    program = make_program("squared", n=30, blocks=4, d=3)
    assert BothPrecisions().accepts(program)
    for other in (program.map.to(torch.float32), DenseMap(1e30 * program.map.data)):
        assert not BothPrecisions().accepts(dataclasses.replace(program, map=other))


@pytest.mark.parametrize("loss", BOUNDED)
@pytest.mark.parametrize("intercept", [False, True])
def test_single_precision_ends_as_soon_as_double_at_the_usual_tolerance(loss, intercept):
    program = make_program(loss, n=60, blocks=4, d=3, intercept=intercept, ratio=0.2)
    double, single = (solve(program, Admm(dtype), tol=1e-4, max_iter=200) for dtype in (torch.float64, torch.float32))
    assert single.certificate.relative_gap <= 1e-4
    assert single.n_iter <= 1.5 * double.n_iter + 10


def test_polished_single_precision_is_enough_for_the_usual_tolerance():
    program = make_program("squared", n=200, blocks=40, d=8, ratio=0.05)
    states = run(program, dataclasses.replace(SINGLE, polish=PolishConfig()), 60)
    gaps = [state.gap / program.null_value for state in states if state.point is not None]
    assert {precision(state) for state in states} == {torch.float32}
    assert min(abs(gap) for gap in gaps) < 1e-6


def test_an_earlier_state_is_carried_on_with_its_own_rho():
    # States share their factors, which have since been made for another rho.
    program = make_program("squared", n=60, blocks=30, d=20, c=1, ratio=0.01)
    early, *_, late = [state.inner for state in run(program, DOUBLE, 60)[1:]]
    assert early.rho != late.rho
    correlation = early.rho * early.multiplier
    state = Admm().carried_on(program, early)
    torch.testing.assert_close(state.cache.system.rho * state.multiplier, correlation)


@pytest.mark.parametrize("loss", ["squared", "huber", "softmax", "logistic"])
def test_means_of_features_and_targets_cost_no_iterations(loss):
    program = make_program(loss, n=200, blocks=10, d=4, ratio=0.1, intercept=True)
    shifted = dataclasses.replace(program, map=DenseMap(program.map.data + 100 * randn(10, 4, seed=5).sign()))
    if program.loss.of_residual:
        shifted = dataclasses.replace(shifted, y=program.y + 1e4)
    plain, moved = (solve(one, MIXED, tol=1e-8) for one in (program, shifted))
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
    assert solve(program, MIXED, tol=1e-6, max_iter=3000).certificate.relative_gap <= 1e-6


def test_data_too_large_for_a_copy_are_solved_in_double_precision(monkeypatch):
    program = make_program("squared", n=100, blocks=10, d=4, ratio=0.1, intercept=True)
    monkeypatch.setattr(Center, "largest", 10)
    small = SinglePrecision()
    states = [run(program, dataclasses.replace(DOUBLE, reductions=some), 20)[-1] for some in ((small,), ())]
    assert precision(states[0]) == torch.float64
    assert torch.equal(*(state.result().coef for state in states))
    single = program.to(torch.float32).with_float64_targets()  # needs no copy
    assert precision(run(single, dataclasses.replace(DOUBLE, reductions=(small,)), 20)[-1]) == torch.float32


def test_a_path_goes_on_in_the_precision_of_its_last_alpha():
    program = make_program("squared", n=100, blocks=10, d=4, ratio=0.3, intercept=True)
    state = run(program, SINGLE, 5)[-1]
    smaller = program.with_alpha(0.5 * program.alpha)
    again = begun_again(SINGLE, smaller, state.result(), state)
    assert precision(again) == torch.float32
    assert again.chain.program.map is state.chain.program.map
    again = carried(DOUBLE, smaller, again._replace(best=again.inner))
    for _ in range(200):
        again = stepped(again)
    assert precision(again) == torch.float64
    assert abs(again.gap) <= 1e-12 * program.null_value
    assert precision(begun_again(DOUBLE, program, again.result(), again)) == torch.float64


def test_zero_solutions_are_zero_and_do_not_end_single_precision():
    program = make_program("squared", n=100, blocks=10, d=4, ratio=1.0)

    def is_single(stage):
        return any(isinstance(reduction, SinglePrecision) for reduction in stage.reductions)

    assert not any(is_single(stage) for stage in plan(program, config=ALTERNATING))
    assert float(run(program, DOUBLE, 30)[-1].result().coef.abs().max()) < 1e-14
    smaller = program.with_alpha(0.5 * program.alpha)
    assert is_single(plan(smaller, config=ALTERNATING)[0])


def test_small_data_stay_in_double_precision():
    program = make_program("squared", n=100, blocks=10, d=4, ratio=0.1)
    assert not SinglePrecision(AutoConfig().least_single).accepts(program)
    assert SinglePrecision(100 * 10 * 4).accepts(program)
    many = make_program("squared", n=20, blocks=10, d=4, c=30, ratio=0.1)  # more coefficients than data
    assert SinglePrecision(10 * 4 * 30).accepts(many)
    assert not SinglePrecision(10 * 4 * 30 + 1).accepts(many)
    # Gates make a Gram matrix of side 60 of little data.
    gated = GatedMap(randn(60, 4, 4, seed=0), randn(60, 5, seed=1) > 0)
    gated = Program(gated, randn(60, 1, seed=2), Squared(), GroupL2(), alpha=0.05)
    assert SinglePrecision(60**2).accepts(gated)
    assert not SinglePrecision(60**2 + 1).accepts(gated)


@pytest.mark.parametrize("name", ["coef", "pred"])
@pytest.mark.parametrize("failing", [1, 2, 4])
def test_steps_that_leave_the_range_are_soon_taken_in_double_precision(monkeypatch, name, failing):
    step = Admm.step

    def overflowing(self, program, state):
        state = step(self, program, state)
        if program.map.dtype == torch.float64 or state.iteration < failing:
            return state
        return state._replace(**{name: state.coef.new_tensor(math.inf).expand_as(getattr(state, name))})

    monkeypatch.setattr(Admm, "step", overflowing)
    program = make_program("squared", n=60, blocks=4, d=3, ratio=0.2)
    state = MIXED.init(program, null_point(program))
    for _ in range(failing + 8):
        state = MIXED.step(program, state)
    assert precision(state.running) == torch.float64
    point = MIXED.point(program, state)
    assert all(bool(torch.isfinite(part).all()) for part in (point.coef, point.pred, point.fitted, point.correlation))


@pytest.mark.parametrize("loss", ["squared", "huber"])
@pytest.mark.parametrize("of_targets", [torch.float32, torch.float64])  # estimators have targets in double precision
def test_points_that_single_precision_cannot_hold_end_the_run_with_advice(loss, of_targets):
    # An intercept of a million is rounded to a sixteenth: no further step helps, and ten thousand were taken.
    data, y = randn(20, 3, 2).float(), 1e6 + randn(20, 1, seed=1).to(of_targets)
    program = Program(DenseMap(data), y, get_loss(loss), GroupL2(), 1.0, None, True)
    program = program.with_alpha(0.1 * program.alpha_max)
    with pytest.warns(ConvergenceWarning, match="solve in float64"):
        result = solve(program, Auto(), tol=1e-5)
    assert result.status is Status.STALLED
    assert result.n_iter < 500
    assert solve(program, Auto(), tol=1e-5, dtype="float64").status is Status.CONVERGED

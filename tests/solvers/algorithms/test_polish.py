"""Primal and dual points that are made consistent on the active groups."""

import dataclasses
import math

import pytest
import torch
from solver_cases import LOSS_NAMES, make_program, randn

from convexformer_solvers import (
    Admm,
    Auto,
    DenseMap,
    Fista,
    GroupL2,
    Point,
    Program,
    Softmax,
    Solver,
    Squared,
    certify,
    solve,
)
from convexformer_solvers.algorithms import stage as stage_module
from convexformer_solvers.algorithms.admm import AdmmConfig
from convexformer_solvers.algorithms.polish import PolishConfig, polished
from convexformer_solvers.algorithms.stage import Stage, begun, begun_again, stepped
from convexformer_solvers.auto import AutoConfig
from convexformer_solvers.linalg.hessian import Curvature, curvature_bounds
from convexformer_solvers.linear_maps.derived import RoundedMap
from convexformer_solvers.points import (
    completed,
    dual_of,
    gap_estimate,
    null_point,
    objective,
    own_predictions,
    with_own_correlation,
)
from convexformer_solvers.reductions.weights import Targets

SMOOTH = ["logistic", "poisson", "softmax", "squared"]
SEPARABLE = [loss for loss in LOSS_NAMES if loss != "softmax"]


class InOneStage(Solver):
    """A stage as a solver."""

    name = "in_one_stage"
    reductions = (Targets(),)

    def __init__(self, stage):
        self.stage = stage

    def init(self, program, start):
        return begun(self.stage, program, start)

    def step(self, program, state):
        return stepped(state)

    def point(self, program, state):
        return state.result()

    def gap_estimate(self, program, state):
        return state.gap


def with_polishes(algorithm, **numbers):
    return Stage(algorithm, "to be polished", polish=PolishConfig(**numbers))


def point_of(program, coef, pred):
    """Coefficients beside a dual point of other predictions."""
    return with_own_correlation(program, Point(coef, pred=pred, fitted=own_predictions(program, coef)))


def near_optimum(program, optimum, distance):
    """A point whose primal and dual parts are both off by a distance; the active groups stay the same."""
    coef = optimum + distance * randn(*optimum.shape, seed=3) * (optimum != 0)
    return point_of(program, coef, own_predictions(program, optimum + distance * randn(*optimum.shape, seed=4)))


class PlainSoftmax(Softmax):
    """A loss that couples its outputs and does not say how."""

    def hessian_parts(self, pred, y):
        return None


@pytest.mark.parametrize("loss", ["softmax", "squared", "logistic"])
def test_hessian_parts_give_what_its_columns_give(loss):
    program = make_program(loss, n=20, blocks=4, d=3, c=3, weighted=True).drop_zero_weights()
    plain = dataclasses.replace(program, loss=PlainSoftmax()) if loss == "softmax" else program
    pred, images = randn(len(program.y), 3, seed=1, scale=2.0), randn(7, len(program.y), seed=2)
    output = torch.tensor([0, 2, 1, 0, 0, 2, 2])
    unit = torch.eye(3, dtype=torch.float64)
    hessian = torch.stack([program.loss.hessian_product(pred, program.y, e.expand_as(pred)) for e in unit], dim=2)
    weighted = program.weight[:, None, None] * hessian
    wanted = torch.einsum("in,nij,jn->ij", images, weighted[:, output][:, :, output], images)
    for one in (program, plain):
        curvature = Curvature(one, pred)
        torch.testing.assert_close(curvature.gram(images, output), wanted, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(curvature.diagonal(), weighted.diagonal(dim1=1, dim2=2), rtol=1e-10, atol=1e-14)
        bound = curvature_bounds(one.loss, pred, one.y).amax(1)
        assert (bound >= torch.linalg.eigvalsh(hessian)[:, -1] * (1 - 1e-12)).all()
        torch.testing.assert_close(bound, hessian.abs().sum(1).amax(1), rtol=1e-10, atol=1e-14)


def program_and_optimum(loss, **options):
    program = make_program(loss, n=60, blocks=4, d=3, c=2, ratio=0.5, **options).drop_zero_weights()
    return program, solve(program, Auto(), tol=1e-12, max_iter=3000).coef


@pytest.mark.parametrize("loss", SMOOTH)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
def test_error_is_of_second_order(loss, gated, intercept):
    program, optimum = program_and_optimum(loss, gated=gated, intercept=intercept, weighted=True)
    gaps, scaled = [], []
    for distance in (1e-4, 1e-5):
        point = near_optimum(program, optimum, distance)
        scaled.append(gap_estimate(program, point))
        gaps.append(gap_estimate(program, polished(program, point)))
    assert 5 < scaled[0] / scaled[1] < 20  # scaling into the dual ball costs in proportion to the distance
    assert gaps[0] / gaps[1] > 50
    assert gaps[1] < 0.01 * scaled[1]


@pytest.mark.parametrize("loss", SEPARABLE)
@pytest.mark.parametrize("intercept", [False, True])
def test_all_parts_belong_together_and_the_objective_does_not_rise(loss, intercept):
    program = make_program(
        loss, n=60, blocks=4, d=3, c=2, ratio=0.5, intercept=intercept, weighted=True
    ).drop_zero_weights()
    optimum = solve(program, Fista(), tol=1e-8, max_iter=50_000).coef
    before = near_optimum(program, optimum, 1e-2)
    after = polished(program, before)
    assert objective(program, after) <= objective(program, before)
    shift = after.fitted - program.map.matvec(after.coef)
    torch.testing.assert_close(shift, shift[:1].expand_as(shift), rtol=0, atol=1e-10)
    assert intercept or float(shift.abs().max()) < 1e-10
    dual = dual_of(program, after)
    torch.testing.assert_close(after.correlation, program.weighted_adjoint(dual), rtol=1e-12, atol=1e-14)
    if intercept:
        # The dual point is as nearly centred as it is nearly feasible.
        assert float((program.weight @ dual).abs().max()) < 1e-3


def test_dual_norms_of_active_groups_become_alpha():
    program, optimum = program_and_optimum("squared")
    active = program.penalty.group_values(optimum) > 0
    assert 0 < int(active.sum()) < active.numel()
    norms = program.penalty.group_dual_norms(polished(program, near_optimum(program, optimum, 1e-3)).correlation)
    torch.testing.assert_close(norms[active], torch.full_like(norms[active], program.alpha), rtol=1e-7, atol=0)


def optimum_and_active(program, alpha):
    coef = solve(program.with_alpha(alpha), Auto(), tol=1e-13, max_iter=5000).coef
    return coef, program.penalty.group_values(coef) > 0


@pytest.mark.parametrize(("loss", "seed"), [("squared", 1), ("logistic", 2)])
def test_error_is_of_second_order_where_a_group_is_not_known_to_be_active(loss, seed):
    program = make_program(loss, n=60, blocks=12, d=3, c=2, seed=seed).drop_zero_weights()
    high, low = 0.7 * program.alpha_max, 0.5 * program.alpha_max  # between them another group enters
    before = optimum_and_active(program, high)[1]
    for _ in range(15):
        middle = 0.5 * (high + low)
        entered = int(optimum_and_active(program, middle)[1].sum()) > int(before.sum())
        high, low = (high, middle) if entered else (middle, low)
    entering = optimum_and_active(program, 0.999 * low)[1] & ~before
    assert int(entering.sum()) == 1
    worst = []
    for distance in (1e-3, 1e-4):
        here = program.with_alpha((1 - distance) * high)
        optimum = optimum_and_active(program, here.alpha)[0]
        without = torch.where(entering[..., None, :], 0.0, optimum)
        gaps = []
        for k in range(20):
            move = distance * optimum.abs().max() * randn(*optimum.shape, seed=100 + k)
            point = point_of(here, without, own_predictions(here, optimum + move))
            if float(here.penalty.group_dual_norms(point.correlation)[entering]) < here.alpha:
                gaps.append(gap_estimate(here, polished(here, point)))
        assert len(gaps) > 3
        worst.append(max(gaps))
    assert worst[0] / worst[1] > 50  # ten where the groups that are known are moved alone


def test_what_cannot_be_polished_is_left_alone():
    program = make_program("squared", "nuclear", n=40, c=3)
    coef = solve(program, Fista(), tol=1e-4).coef
    assert polished(program, near_optimum(program, coef, 1e-3)) is None
    plain, wrapped = (solve(program, solver, tol=1e-5) for solver in (Admm(), InOneStage(with_polishes(Admm()))))
    assert torch.equal(plain.coef, wrapped.coef)


def test_many_active_groups_are_not_worth_a_system_whichever_correlation_shows_them():
    # Cross-entropy has one system for all outputs; far from the optimum the own correlation may show many more groups.
    program = make_program("softmax", n=20, blocks=120, d=2, c=8, ratio=0.1).drop_zero_weights()
    pred = 3.0 * randn(20, 8, seed=5)
    few = torch.zeros(program.coef_shape, dtype=torch.float64)
    few[0, 0, 0] = 2 * program.alpha
    point = Point(torch.zeros_like(few), pred=pred, fitted=torch.zeros_like(pred), correlation=few)
    own = with_own_correlation(program, point)
    assert int((program.penalty.group_dual_norms(own.correlation) > program.alpha).sum()) > 200
    assert polished(program, point) is None
    assert polished(program, own) is None
    assert polished(program, own, patience=1e6) is not None


def test_products_of_polishes_are_exact_once_those_in_single_precision_say_too_little(monkeypatch):
    program = make_program("squared", n=200, blocks=40, d=8, ratio=0.05)
    rounded, gaps, smallest = [], [], math.inf

    def noted(program, point, patience):
        better = polished(program, point, patience)
        rounded.append(isinstance(program.map, RoundedMap))
        gaps.append(abs(gap_estimate(program, better)) / program.null_value)
        return better

    monkeypatch.setattr(stage_module, "polished", noted)
    # Alternating directions alone, first in single and then in double precision.
    numbers = AutoConfig(least_single=1, costly_gram=math.inf, newton_share=math.inf)
    result = solve(program, Auto(numbers), tol=1e-11)
    assert result.certificate.relative_gap <= 1e-11
    assert True in rounded
    for was_rounded, gap in zip(rounded, gaps, strict=True):
        assert was_rounded <= (smallest > 1e-5)
        smallest = min(smallest, gap)


def test_gaps_between_polishes_that_help_are_not_asked_for():
    program, asked = make_program("squared", n=60, blocks=8, d=3, ratio=0.2), []

    class Asked(Admm):
        def gap_estimate(self, program, state):
            asked.append(state.iteration)
            return super().gap_estimate(program, state)

    # Nobody but the stage asks where rho stays.
    state = begun(with_polishes(Asked(config=AdmmConfig(adapt_at=())), wait=4), program, null_point(program))
    for iteration in range(1, 40):
        due, helped = state.polishing.next, state.polishing.helps
        state = stepped(state)
        assert (iteration in asked) is (iteration >= due or not helped)
        assert math.isfinite(state.gap) is (iteration in asked)
    assert 0 < len(asked) < 30


class Counting(Admm):
    """Iterations whose gaps say nothing, so that polishes come by their number alone."""

    def gap_estimate(self, program, state):
        return 0.0


def test_along_a_path_the_first_polish_comes_when_the_last_alpha_ended(monkeypatch):
    program = make_program("squared", n=60, blocks=8, d=3, ratio=0.2)
    optimum, at = Point(solve(program, Auto(), tol=1e-6).coef), []
    monkeypatch.setattr(stage_module, "polished", lambda *arguments: at.append(arguments) or None)
    stage = with_polishes(Counting(), wait=4)

    def polishes(state, n_iter):
        found = []
        for iteration in range(1, n_iter + 1):
            before, state = len(at), stepped(state)
            found += [iteration] * (len(at) - before)
        return found, state

    # Twice four after one that did not help.
    assert polishes(begun(stage, program, null_point(program)), 12)[0] == [2, 10]
    found, state = polishes(begun(stage, program, optimum), 4)
    assert found == [4]
    found, state = polishes(begun_again(stage, program, optimum, state), 7)
    assert found == [3, 7]  # one earlier, as the first one was enough; the next after half as many as from scratch
    found, state = polishes(begun_again(stage, program, optimum, state), 20)
    assert found[0] == 7
    assert polishes(begun_again(stage, program, optimum, state), 8)[0] == [8]  # never later than that


def test_repeated_blocks_can_be_polished():
    data = randn(60, 2, 3, seed=1).repeat(1, 3, 1)
    program = Program(DenseMap(data), randn(60, 2, seed=2), Squared(), GroupL2(), 0.01)
    coef = 0.1 * torch.ones(program.coef_shape, dtype=torch.float64)
    after = polished(program, point_of(program, coef, own_predictions(program, coef)))
    assert bool(torch.isfinite(after.coef).all() and torch.isfinite(after.pred).all())
    assert solve(program, InOneStage(with_polishes(Admm())), tol=1e-9).certificate.relative_gap <= 1e-9


@pytest.mark.parametrize("loss", SEPARABLE)
@pytest.mark.parametrize("gated", [False, True])
def test_solvers_reach_the_same_optimum_in_no_more_iterations(loss, gated):
    program = make_program(loss, gated=gated, n=80, blocks=12, d=3, c=1, ratio=0.1, intercept=True, seed=2)
    if not math.isfinite(program.loss.smoothness):
        pytest.skip("ADMM needs bounded curvature")
    plain, wrapped = (solve(program, solver, tol=1e-7) for solver in (Admm(), InOneStage(with_polishes(Admm()))))
    assert wrapped.n_iter <= plain.n_iter + 1  # nothing ends between two polishes
    assert wrapped.certificate.primal == pytest.approx(plain.certificate.primal, rel=1e-6)


def test_fewer_iterations_to_a_tolerance_on_correlated_features():
    data = randn(100, 40, 4, seed=1)
    for token in range(1, 40):
        data[:, token] = 0.8 * data[:, token - 1] + 0.6 * data[:, token]
    data += data.mean(1, keepdim=True)
    y = data[:, :3].sum((1, 2))[:, None] + randn(100, 1, seed=2)
    program = Program(DenseMap(data), y, Squared(), GroupL2(), 1.0)
    program = program.with_alpha(0.02 * program.alpha_max)
    plain, wrapped = (solve(program, solver, tol=1e-6) for solver in (Admm(), InOneStage(with_polishes(Admm()))))
    assert wrapped.n_iter <= 0.75 * plain.n_iter


def test_the_point_handed_out_is_the_polished_one():
    program = make_program("squared", n=80, blocks=12, d=3, c=1, ratio=0.1)
    state, improved = begun(with_polishes(Admm()), program, null_point(program)), 0
    for _ in range(30):
        state = stepped(state)
        point, inner = (completed(program, each) for each in (state.result(), Admm().point(program, state.inner)))
        gap = certify(program, point.coef, point.intercept, point.dual).gap
        inner_gap = certify(program, inner.coef, inner.intercept, inner.dual).gap
        assert gap <= inner_gap * (1 + 1e-9) + 1e-12
        improved += gap < 0.5 * inner_gap
    assert improved >= 3


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("loss", ["logistic", "squared"])
def test_zeros_at_alpha_max_stay_zeros(loss, intercept):
    program = make_program(loss, n=60, blocks=4, d=3, c=2, intercept=intercept).drop_zero_weights()
    program = program.with_alpha(program.alpha_max)
    coef = 1e-6 * randn(*program.coef_shape, seed=3)
    constant = program.null_intercept.expand_as(program.y)
    after = polished(program, Point(coef, pred=constant, fitted=own_predictions(program, coef), correlation=coef))
    assert not bool(after.coef.any())

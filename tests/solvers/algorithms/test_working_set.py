"""Programs on some of the blocks, and solvers on working sets of them."""

from __future__ import annotations

import math

import pytest
import torch
from solver_cases import LOSS_NAMES, PENALTY_NAMES, accepts, make_program, randn

from convexformer_solvers import (
    Admm,
    Auto,
    DenseMap,
    Fista,
    GroupL2,
    Program,
    Squared,
    alpha_grid,
    certify,
    get_loss,
    iterate_path,
    solve,
)
from convexformer_solvers.algorithms.admm_newton import AdmmNewton
from convexformer_solvers.algorithms.base import Point
from convexformer_solvers.algorithms.primal_dual import Iterate, own_predictions
from convexformer_solvers.algorithms.working_set import WorkingSet
from convexformer_solvers.auto import plan as auto
from convexformer_solvers.linalg.gram import SupportGram
from convexformer_solvers.reductions.blocks import CompressedPart, RestrictedPart

BLOCKS = torch.tensor([0, 2, 3])


def program_and_part(kind, loss="squared", penalty="group_l2", **options):
    whole = make_program(loss, penalty, n=40, blocks=5, d=3, c=2, **options).drop_zero_weights()
    part = (
        CompressedPart(whole, BLOCKS, SupportGram(whole.map)) if kind == "compressed" else RestrictedPart(whole, BLOCKS)
    )
    return whole, part


def part_cases():
    cases = [("restricted", loss) for loss in LOSS_NAMES] + [("compressed", "squared")]
    return [
        (kind, loss, penalty, gated) for kind, loss in cases for penalty in PENALTY_NAMES for gated in (False, True)
    ]


def objective(program, coef):
    pred = own_predictions(program, coef)
    return float(program.loss_value(pred) + program.alpha * program.penalty.value(coef))


@pytest.mark.parametrize(("kind", "loss", "penalty", "gated"), part_cases())
@pytest.mark.parametrize("intercept", [False, True])
class TestParts:
    def test_objective_is_that_of_the_whole_with_the_other_blocks_at_zero(self, kind, loss, penalty, gated, intercept):
        whole, part = program_and_part(kind, loss, penalty, gated=gated, intercept=intercept, weighted=True)
        for seed in range(3):
            coef = randn(len(BLOCKS), 3, 2, seed=seed)
            everywhere = part.on_all(coef)
            assert everywhere.shape == whole.coef_shape
            assert torch.equal(part.on_blocks(everywhere), coef)
            assert objective(part.program, coef) == pytest.approx(objective(whole, everywhere), rel=1e-10)

    def test_dual_points_correspond(self, kind, loss, penalty, gated, intercept):
        whole, part = program_and_part(kind, loss, penalty, gated=gated, intercept=intercept, weighted=True)
        coef = part.on_all(randn(len(BLOCKS), 3, 2, seed=3))
        pred = own_predictions(whole, part.on_all(randn(len(BLOCKS), 3, 2, seed=4)))
        iterate = Iterate(whole, coef, pred, pred, coef).with_own_ascent()
        small_pred = part.pred_of(iterate)
        small = Iterate(part.program, part.on_blocks(coef), small_pred, small_pred, part.on_blocks(coef))
        small = small.with_own_ascent()
        torch.testing.assert_close(small.correlation, part.on_blocks(iterate.correlation), rtol=1e-9, atol=1e-11)
        back = part.iterate_of(small)
        torch.testing.assert_close(back.pred, pred, rtol=1e-8, atol=1e-9)
        assert torch.equal(back.coef, coef)
        dual, small_dual = float(whole.dual(iterate.dual_point())), float(part.program.dual(small.dual_point()))
        assert small_dual == pytest.approx(dual, rel=1e-9)


def test_collinear_blocks_compress():
    whole, _ = program_and_part("restricted", intercept=True)
    data = whole.map.as_matrix().reshape(40, 5, 3).clone()
    data[:, 2], data[:, 3, 1] = data[:, 0], 1.0  # a repeated block and a constant column
    whole = Program(DenseMap(data), whole.y, Squared(), GroupL2(), 0.05, fit_intercept=True)
    part = CompressedPart(whole, BLOCKS, SupportGram(whole.map))
    coef = randn(3, 3, 2, seed=1)
    assert objective(part.program, coef) == pytest.approx(objective(whole, part.on_all(coef)), rel=1e-7)


def sparse_program(loss, penalty, *, n=60, gated=False, intercept=False, ratio=0.75):
    """Many blocks, few of which are active."""
    c = 2 if accepts(get_loss(loss), 2) else 1
    return make_program(
        loss, penalty, gated=gated, intercept=intercept, weighted=True, n=n, blocks=24, d=2, c=c, ratio=ratio, seed=5
    )


@pytest.mark.parametrize("loss", [loss for loss in LOSS_NAMES if loss != "poisson"])
@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
def test_working_sets_reach_the_optimum_of_all_blocks(loss, penalty, gated, intercept):
    program = sparse_program(loss, penalty, n=100, gated=gated, intercept=intercept)
    solver = WorkingSet(AdmmNewton(), first_width=2)
    wanted = solve(program, Fista(), tol=1e-9, max_iter=50_000)
    result = solve(program, solver, tol=1e-8, max_iter=3000)
    assert result.certificate.primal == pytest.approx(wanted.certificate.primal, rel=1e-7)


def test_the_set_grows_to_the_active_blocks_and_stays_small():
    program = sparse_program("squared", "group_l2", ratio=0.55)
    solver = WorkingSet(Admm(), first_width=2)
    state = solver.init(program, Point(torch.zeros(program.coef_shape, dtype=torch.float64), program.null_intercept))
    sizes = []
    for _ in range(300):
        state = solver.step(program, state)
        sizes.append(len(state.part.blocks))
    active = (solver.iterate(state).coef != 0).any(-1).any(-1)
    assert sizes[0] == 1 < int(active.sum()) <= sizes[-1] < len(active)
    point = solver.point(program, state)
    assert certify(program, point.coef, point.intercept, point.dual).relative_gap < 1e-8


def test_a_set_that_gets_too_large_hands_over_its_point():
    program = sparse_program("squared", "group_l2", ratio=0.005)
    solver = WorkingSet(Admm(), first_width=4)
    state = solver.init(program, Point(torch.zeros(program.coef_shape, dtype=torch.float64), program.null_intercept))
    steps = 0
    while not solver.finished(state):
        state, steps = solver.step(program, state), steps + 1
        assert steps < 1000
    point = solver.point(program, state)
    assert steps > 0
    assert certify(program, point.coef, point.intercept).primal < program.null_value


@pytest.mark.parametrize(("ratio", "misleads"), [(0.01, True), (0.4, False)])
def test_auto_begins_anew_after_a_set_that_its_first_look_shows_to_be_one_of_many(monkeypatch, ratio, misleads):
    def started(plan, program, point, outgrown=False):
        starts.append(point.coef)
        return start_stage(plan, program, point, outgrown)

    start_stage, starts, on_set = auto._started, [], []
    monkeypatch.setattr(auto, "_PRODUCTS", 0.0)
    monkeypatch.setattr(auto, "_PRODUCTS_BEFORE", math.inf)
    monkeypatch.setattr(auto, "_started", started)
    data, y = randn(600, 100, 32, seed=1), randn(600, 1, seed=2)
    program = Program(DenseMap(data), y, Squared(), GroupL2(), 1.0)
    program = program.with_alpha(ratio * program.alpha_max)
    solver, first = Auto(), torch.zeros(program.coef_shape, dtype=torch.float64)
    first[0] = 0.01
    state = solver.init(program, Point(first, program.null_intercept))
    while len(starts) == 1:
        on_set.append(solver.point(program, state).coef)
        state = solver.step(program, state)
        assert len(on_set) < 50
    assert not torch.allclose(on_set[-1], first)
    torch.testing.assert_close(starts[1], first if misleads else on_set[-1])


@pytest.mark.parametrize(("ratio", "outgrown"), [(0.5, False), (0.01, True)])
def test_auto_takes_a_working_set_where_the_whole_gram_matrix_is_costly(ratio, outgrown):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(1650, 50, 50, generator=generator, dtype=torch.float64) * torch.arange(1, 51) ** -1.0
    y = data[:, :3].sum((1, 2))[:, None] + 3 * torch.randn(1650, 1, generator=generator, dtype=torch.float64)
    program = Program(DenseMap(data), y, Squared(), GroupL2(), 1.0)
    program = program.with_alpha(ratio * program.alpha_max)
    auto = Auto()
    state = auto.init(program, Point(torch.zeros(program.coef_shape, dtype=torch.float64), program.null_intercept))
    assert state.stage.on_working_set
    activities = []
    for _ in range(60):
        state = auto.step(program, state)
        activities.append(auto.activity(state))
        if auto.estimated_gap(state) <= 1e-9 * program.null_value:
            break
    assert state.stage.on_working_set != outgrown
    assert "of 50 blocks" in activities[0]
    assert ("of 50 blocks" in activities[-1]) != outgrown
    assert all(activity.startswith("auto: ") for activity in activities)
    assert solve(program, auto, tol=1e-7).certificate.relative_gap <= 1e-7


def test_a_rough_gap_below_zero_does_not_keep_a_set_from_looking():
    # That of a dual point whose mean is not zero: fifty iterations went by before the next look.
    program = make_program("logistic", n=100, blocks=20, d=2, c=1, ratio=0.7, intercept=True)
    solver = WorkingSet(AdmmNewton(), first_width=10)
    state = solver.init(program, Point(torch.zeros(program.coef_shape, dtype=torch.float64), program.null_intercept))
    state = state._replace(gap=-state.gap)
    for _ in range(12):
        state = solver.step(program, state)
    assert state.n_looks > 0


def test_means_of_larger_data_cost_paths_next_to_nothing():
    data = randn(1000, 10, 40)
    data = data + data[:, :1]
    y = (data[:, 0, :1] + 0.1 * randn(1000, 1, seed=1)).sign()
    n_iter = []
    for mean in (0.0, 1e2, 1e4):
        program = Program(DenseMap(data + mean), y, get_loss("logistic"), GroupL2(), 1.0, fit_intercept=True)
        grid = alpha_grid(program.alpha_max, 8)
        n_iter.append(sum(result.n_iter for result in iterate_path(program, Auto(), grid)))
    assert max(n_iter) <= 1.5 * n_iter[0]

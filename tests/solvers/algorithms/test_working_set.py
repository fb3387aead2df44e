"""Algorithms on growing sets of blocks."""

from __future__ import annotations

import math

import pytest
import torch
from covering import covering
from solver_cases import BOTH, LOSS_NAMES, PENALTY_NAMES, accepts, make_program, randn

from convexformer_solvers import (
    Admm,
    Auto,
    DenseMap,
    Fista,
    GroupL2,
    Point,
    Program,
    Squared,
    alpha_grid,
    certify,
    get_loss,
    iterate_path,
    solve,
)
from convexformer_solvers.algorithms.block_descent import BlockDescent
from convexformer_solvers.algorithms.fista import GreedyFista
from convexformer_solvers.algorithms.stage import Stage, begun, stepped
from convexformer_solvers.algorithms.working_set import WorkingSet, WorkingSetConfig
from convexformer_solvers.auto import plan
from convexformer_solvers.points import completed, gap_estimate, null_point


def working_set(algorithm, columns, form="root", **numbers):
    """The algorithm on a set that begins with so many columns, and grows by as many."""
    config = WorkingSetConfig(columns=columns, form=form, **numbers)
    return WorkingSet(Stage(algorithm, "solves the set"), config)


def sparse_program(loss, penalty, *, n=60, gated=False, intercept=False, ratio=0.75):
    """Many blocks, few of which are active."""
    c = 2 if accepts(get_loss(loss), 2) else 1
    program = make_program(
        loss, penalty, gated=gated, intercept=intercept, weighted=True, n=n, blocks=24, d=2, c=c, ratio=ratio, seed=5
    )
    return program.drop_zero_weights()


FORMS = [(loss, "samples") for loss in LOSS_NAMES if loss != "poisson"] + [("squared", "root"), ("squared", "gram")]


@pytest.mark.parametrize(("loss_and_form", "penalty", "gated", "intercept"), covering(FORMS, PENALTY_NAMES, BOTH, BOTH))
def test_working_sets_reach_the_optimum_of_all_blocks(loss_and_form, penalty, gated, intercept):
    loss, form = loss_and_form
    program = sparse_program(loss, penalty, n=100, gated=gated, intercept=intercept)
    wanted = solve(program, Auto(), tol=1e-9)
    result = solve(program, working_set(Admm(), 2, form), tol=1e-8, max_iter=3000)
    assert result.certificate.primal == pytest.approx(wanted.certificate.primal, rel=1e-7)


@pytest.mark.parametrize("loss", ["squared", "logistic", "huber"])
@pytest.mark.parametrize("gated", [False, True])
def test_sets_that_may_end_in_all_blocks_reach_the_optimum(loss, gated):
    for ratio in (0.5, 0.01):
        program = sparse_program(loss, "group_l2", n=100, gated=gated, ratio=ratio)
        solver = working_set(Fista(), 8, "samples", ends_in_all=True, widest=0.6, wait=5)
        wanted = solve(program, Auto(), tol=1e-8)
        result = solve(program, solver, tol=1e-7, max_iter=50_000)
        assert result.certificate.primal == pytest.approx(wanted.certificate.primal, rel=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "form"),
    [(Admm(), "samples"), (Admm(), "root"), (Admm(), "gram"), (Fista(), "samples")],
    ids=lambda part: getattr(part, "name", part),
)
@pytest.mark.parametrize("intercept", [False, True])
def test_what_a_look_says_is_true_of_all_blocks(algorithm, form, intercept):
    # After a look the point carries both values and the correlation of all blocks.
    program = sparse_program("squared", "group_l2", intercept=intercept, ratio=0.5)
    solver = working_set(algorithm, 8, form, wait=5)
    state, looks = solver.init(program, null_point(program)), 0
    for _ in range(30):
        state = solver.step(program, state)
        if solver.finished(state) or not solver.knows_gap(state):
            continue
        looks += 1
        point = completed(program, solver.point(program, state))
        torch.testing.assert_close(point.fitted, program.map.matvec(point.coef) + point.intercept)
        torch.testing.assert_close(point.correlation, program.weighted_adjoint(point.dual), rtol=1e-9, atol=1e-12)
        assert solver.gap_estimate(program, state) == gap_estimate(program, point)
    assert looks >= 2


@pytest.mark.parametrize("form", ["samples", "root", "gram"])
@pytest.mark.parametrize("algorithm", [BlockDescent(), GreedyFista()], ids=lambda part: part.name)
def test_states_that_are_taken_over_along_a_path_lead_to_its_optima(algorithm, form):
    # Features that are much alike, so that blocks leave the set and others take their places.
    data = (randn(60, 3, seed=4) @ randn(3, 60, seed=104) + 0.3 * randn(60, 60, seed=204)).view(60, 30, 2)
    y = DenseMap(data).matvec(randn(30, 2, 1, seed=304))
    program = Program(DenseMap(data), y, Squared(), GroupL2(), 1.0)
    alphas = [ratio * program.alpha_max for ratio in (0.2, 0.05)]
    results = iterate_path(program, working_set(algorithm, 20, form, wait=2), alphas, tol=1e-6)
    for alpha, result in zip(alphas, results, strict=True):
        wanted = solve(program.with_alpha(alpha), Admm(), tol=1e-8).certificate.primal
        assert result.certificate.primal == pytest.approx(wanted, abs=2e-6 * program.null_value)


def test_the_set_grows_to_the_active_blocks_and_stays_small():
    program = sparse_program("squared", "group_l2", ratio=0.55)
    solver = working_set(Admm(), 2)
    state = solver.init(program, null_point(program))
    sizes = []
    for _ in range(300):
        state = solver.step(program, state)
        sizes.append(len(state.blocks))
    point = completed(program, solver.point(program, state))
    active = (point.coef != 0).any(-1).any(-1)
    assert sizes[0] == 1 < int(active.sum()) <= sizes[-1] < len(active)
    assert certify(program, point.coef, point.intercept, point.dual).relative_gap < 1e-8


def test_a_set_that_gets_too_large_hands_over_its_point():
    program = sparse_program("squared", "group_l2", ratio=0.005)
    solver = working_set(Admm(), 4)
    state, steps = solver.init(program, null_point(program)), 0
    while not solver.finished(state):
        state, steps = solver.step(program, state), steps + 1
        assert steps < 1000
    point = completed(program, solver.point(program, state))
    assert steps > 0
    assert certify(program, point.coef, point.intercept).primal < program.null_value


@pytest.mark.parametrize(
    ("n", "bounds"), [(100, {"widest": 0.5}), (30, {"widest": 0.8}), (100, {"largest_width": 24})], ids=str
)
def test_sets_are_no_wider_than_asked(n, bounds):
    # Of the 48 columns no more than 24, which are half of them, 0.8 of 30 samples, or what is asked.
    program = sparse_program("squared", "group_l2", n=n, ratio=0.005)
    solver = working_set(Admm(), 8, "gram", far=math.inf, **bounds)
    state, widths = solver.init(program, null_point(program)), []
    while not solver.finished(state):
        widths.append(2 * len(state.blocks))
        state = solver.step(program, state)
        assert len(widths) < 1000
    assert state.inner is None
    assert 8 < max(widths) <= 24


@pytest.mark.parametrize("form", ["root", "gram"])
def test_losses_that_are_not_squares_see_the_samples_in_any_form(form):
    program = sparse_program("logistic", "group_l2", ratio=0.5)
    points = []
    for solver in (working_set(Admm(), 8, each, wait=5) for each in ("samples", form)):
        state = solver.init(program, null_point(program))
        for _ in range(12):
            state = solver.step(program, state)
        points.append(solver.point(program, state).coef)
    assert bool(points[0].any())
    torch.testing.assert_close(*points)


def test_a_set_without_an_active_block_grows_all_the_same():
    program = sparse_program("squared", "group_l2", ratio=0.95)
    solver = working_set(Admm(), 1, "gram")
    inactive = (~solve(program, solver, tol=1e-8).coef.any(-1).any(-1)).nonzero()[:1, 0]
    state = solver.init(program, null_point(program))._replace(blocks=inactive, inner=None)
    state = solver.init_again(program, null_point(program), state)
    while not solver.finished(state):
        state = solver.step(program, state)
        assert state.n_steps < 300
    assert state.inner is not None


@pytest.mark.parametrize(("ratio", "misleads"), [(0.01, True), (0.4, False)])
def test_a_set_that_its_first_look_shows_to_be_one_of_many_hands_over_where_it_began(ratio, misleads):
    data, y = randn(600, 100, 32, seed=1), randn(600, 1, seed=2)
    program = Program(DenseMap(data), y, Squared(), GroupL2(), 1.0)
    program = program.with_alpha(ratio * program.alpha_max)
    first, on_set = torch.zeros(program.coef_shape, dtype=torch.float64), []
    first[0] = 0.01
    solver = working_set(BlockDescent(), 128, "gram", widest=1.0)
    state = begun(Stage(solver, "the first"), program, Point(first, program.null_intercept))
    while not state.is_over:
        on_set.append(state.result().coef)
        state = stepped(state)
        assert len(on_set) < 50
    assert not torch.allclose(on_set[-1], first)
    torch.testing.assert_close(state.result().coef, first if misleads else on_set[-1])


@pytest.mark.parametrize(("ratio", "outgrown"), [(0.3, True), (0.8, False)])
def test_a_set_of_some_width_ends_where_more_blocks_violate_than_fit(ratio, outgrown):
    program = Program(DenseMap(randn(300, 80, 10, seed=1)), randn(300, 1, seed=2), Squared(), GroupL2(), 1.0)
    program = program.with_alpha(ratio * program.alpha_max)  # at .3 all dual norms are below far * alpha
    solver, widths = working_set(BlockDescent(), 10, "gram", widest=1.0), []
    state = solver.init(program, null_point(program))
    while not solver.finished(state):
        widths.append(len(state.blocks))
        state = solver.step(program, state)
    assert (state.inner is None) == outgrown
    active = (solve(program, Admm(), tol=1e-8).coef.norm(dim=(1, 2)) > 0).sum()
    assert (active > 30) == outgrown  # which is the widest set
    assert max(widths) <= 12  # of which a quarter, and a half as many more, have been tried


@pytest.mark.parametrize("form", ["samples", "root", "gram"])
def test_a_set_begins_again_with_its_blocks_and_the_active_ones_of_the_start_each_once(form):
    program = sparse_program("squared", "group_l2", ratio=0.5)
    solver = working_set(Admm(), 8, form)
    state = solver.init(program, null_point(program))
    others = [block for block in range(24) if block not in state.blocks][:10]
    coef = torch.zeros(program.coef_shape, dtype=torch.float64)
    coef[[int(state.blocks[0]), *others]] = 1e-6  # the dual norms of some are small
    again = solver.init_again(program, Point(coef, program.null_intercept), state).blocks.tolist()
    assert {*state.blocks.tolist(), *others} < set(again)
    assert len(again) == len(set(again))


@pytest.mark.parametrize("form", ["samples", "root", "gram"])
def test_a_solve_that_begins_again_where_it_ended_goes_on_on_its_set(form):
    program = sparse_program("squared", "group_l2", ratio=0.5)
    solver = working_set(Admm(), 8, form)
    state = solver.init(program, null_point(program))
    while not solver.finished(state):
        state = solver.step(program, state)
    ended = solver.point(program, state)
    again = solver.init_again(program, ended, state)
    assert again.inner is not None
    assert torch.equal(again.blocks, state.blocks)
    point = completed(program, solver.point(program, solver.step(program, again)))
    assert certify(program, point.coef, point.intercept, point.dual).relative_gap < 1e-8


def test_gram_matrices_in_single_precision_are_corrected_at_each_look():
    program = make_program("squared", n=300, blocks=24, d=4, c=1, ratio=0.05)
    solver = working_set(BlockDescent(), 400, "gram", single=True, wait=5)
    assert solve(program, solver, tol=1e-11, max_iter=50).certificate.relative_gap <= 1e-11


@pytest.mark.parametrize("most", [1, 10, 30, 100])
def test_ends_after_so_many_steps_on_blocks(most):
    program = make_program("squared", n=100, blocks=12, d=3, c=1)
    program = program.with_alpha(1e-3 * program.alpha_max)
    solver = working_set(BlockDescent(), 6, "gram", block_steps=most)
    state, taken = solver.init(program, null_point(program)), 0
    while not solver.finished(state):
        assert taken < most
        state = solver.step(program, state)
        taken += len(state.blocks)
    assert taken >= most


@pytest.mark.usefixtures("steady_rates")
@pytest.mark.parametrize(("ratio", "outgrown"), [(0.5, False), (0.01, True)])
def test_auto_takes_a_working_set_where_the_whole_gram_matrix_is_costly(ratio, outgrown):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(1650, 50, 50, generator=generator, dtype=torch.float64) * torch.arange(1, 51) ** -1.0
    y = data[:, :3].sum((1, 2))[:, None] + 3 * torch.randn(1650, 1, generator=generator, dtype=torch.float64)
    program = Program(DenseMap(data), y, Squared(), GroupL2(), 1.0)
    program = program.with_alpha(ratio * program.alpha_max)
    auto = Auto()
    state = auto.init(program, null_point(program))
    assert isinstance(state.running.stage.algorithm, WorkingSet)
    assert sum(isinstance(stage.algorithm, WorkingSet) for stage in plan(program)) == 1
    activities = []
    for _ in range(60):
        state = auto.step(program, state)
        activities.append(auto.activity(state))
        if auto.gap_estimate(program, state) <= 1e-9 * program.null_value:
            break
    assert isinstance(state.running.stage.algorithm, WorkingSet) != outgrown
    assert "of 50 blocks" in activities[0]
    assert ("of 50 blocks" in activities[-1]) != outgrown
    assert all(activity.startswith("auto: ") for activity in activities)
    assert solve(program, auto, tol=1e-7).certificate.relative_gap <= 1e-7


def test_a_rough_gap_below_zero_does_not_keep_a_set_from_looking():
    # That of a dual point whose mean is not zero: fifty iterations went by before the next look.
    program = make_program("logistic", n=100, blocks=20, d=2, c=1, ratio=0.7, intercept=True)
    solver = working_set(Admm(), 10, "samples")
    state = solver.init(program, null_point(program))
    state = state._replace(gap=-state.gap)
    for _ in range(12):
        state = solver.step(program, state)
    assert state.checked_at > 0


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

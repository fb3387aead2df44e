"""Block descent in the Gram matrix of all blocks of a small program."""

from __future__ import annotations

import contextlib
import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.linear_model import Lasso
from solver_cases import make_program, randn
from threadpoolctl import threadpool_info, threadpool_limits

from convexformer_solvers import (
    Auto,
    DenseMap,
    Fista,
    GroupL2,
    Point,
    Program,
    Squared,
    alpha_grid,
    certify,
    solve,
    solve_path,
)
from convexformer_solvers.algorithms import block_descent
from convexformer_solvers.algorithms.block_descent import BlockDescent, GramProgram
from convexformer_solvers.algorithms.stage import Stage
from convexformer_solvers.algorithms.working_set import WorkingSet, WorkingSetConfig
from convexformer_solvers.auto import AutoConfig
from convexformer_solvers.linalg.gram import SupportGram
from convexformer_solvers.linear_maps.base import LinearMap
from convexformer_solvers.points import completed, null_point
from convexformer_solvers.reductions.center import Center


def on_a_set(columns=128, **numbers):
    """Block descent on a working set that begins with so many columns, and grows by as many."""
    return WorkingSet(
        Stage(BlockDescent(), "solves the set"),
        WorkingSetConfig(columns=columns, **{"widest": 1.0} | numbers),
    )


def sparse_program(ratio=0.3, **options):
    program = make_program("squared", "group_l2", n=100, blocks=12, d=3, c=1, **options)
    return program.with_alpha(ratio * program.alpha_max)


def gram_program(n_blocks=4, width=3, alpha=0.2):
    columns, y = randn(50, n_blocks * width, seed=1).numpy(), randn(50, seed=2).numpy()
    return GramProgram(columns.T @ columns / 50, columns.T @ y / 50, y @ y / 50, width, alpha), columns, y


def gap_of(program, solver, state):
    """Certified gap of a state's point over the best constant model's objective."""
    point = completed(program, solver.point(program, state))
    return certify(program, point.coef, point.intercept, point.dual).relative_gap


def run_until_finished(program, solver, at_most, start=None):
    """The last state, and how many steps it took."""
    state, n_steps = solver.init(program, null_point(program) if start is None else start), 0
    while not solver.finished(state):
        state, n_steps = solver.step(program, state), n_steps + 1
        assert n_steps < at_most
    return state, n_steps


def test_values_from_products_are_those_of_the_samples():
    program, columns, y = gram_program()
    point = program.at(randn(columns.shape[1], seed=3).numpy())
    residual = y - columns @ point.coef
    norms = np.linalg.norm(point.coef.reshape(-1, 3), axis=1)
    assert program.primal(point) == pytest.approx(0.5 * residual @ residual / 50 + 0.2 * norms.sum(), rel=1e-10)
    scale = min(1.0, 0.2 / np.linalg.norm((columns.T @ residual / 50).reshape(-1, 3), axis=1).max())
    bound = 0.5 * y @ y / 50 - 0.5 * ((y - scale * residual) ** 2).sum() / 50
    assert program.dual(point) == pytest.approx(bound, rel=1e-10)


def test_sweeps_never_raise_the_objective_and_know_their_gradient():
    program, columns, _ = gram_program()
    start = program.at(randn(columns.shape[1], seed=4).numpy())
    points = program.swept(start, 12)
    values = [program.primal(point) for point in (start, *points)]
    assert all(after <= before + 8 * np.finfo(float).eps * program.square for before, after in pairwise(values))
    np.testing.assert_allclose(points[-1].correlation, program.at(points[-1].coef).correlation, atol=1e-12)


def test_blocks_of_the_solution_are_stationary():
    program, columns, _ = gram_program()
    point = program.at(np.zeros(columns.shape[1]))
    for _ in range(66):  # two hundred sweeps at most
        point = program.swept(point, 3)[-1]
        primal, dual = program.polished(point)
        gap = program.primal(primal) - program.dual(dual)
        if gap <= 1e-12:
            break
    # Both values are differences of terms as large as the mean square of the targets.
    rounding = 8 * np.finfo(float).eps * program.square
    assert gap <= 1e-12
    assert -rounding <= gap
    for coef, correlation in zip(primal.coef.reshape(-1, 3), primal.correlation.reshape(-1, 3), strict=True):
        size = np.linalg.norm(coef)
        if size > 0:
            np.testing.assert_allclose(correlation, 0.2 * coef / size, atol=1e-5)
        else:
            assert np.linalg.norm(correlation) <= 0.2 * (1 + 1e-5)


@pytest.mark.parametrize("solver", [BlockDescent(), on_a_set(12)], ids=lambda solver: solver.name)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_it_reaches_the_optimum_of_all_blocks(solver, gated, intercept, weighted):
    program = sparse_program(gated=gated, intercept=intercept, weighted=weighted)
    wanted = solve(program, Fista(), tol=1e-9, max_iter=50_000)
    result = solve(program, solver, tol=1e-8, max_iter=100)
    assert result.certificate.primal == pytest.approx(wanted.certificate.primal, rel=1e-7)


@pytest.mark.parametrize("solver", [BlockDescent(), on_a_set(3)], ids=lambda solver: solver.name)
def test_it_starts_from_a_given_point(solver):
    program = sparse_program()
    solution = solve(program, BlockDescent(), tol=1e-10)
    state = solver.init(program, Point(solution.coef, solution.intercept))
    assert gap_of(program, solver, solver.step(program, state)) <= 1e-8


@pytest.mark.parametrize("intercept", [False, True])
def test_all_parts_of_a_point_belong_together(intercept):
    program = sparse_program(intercept=intercept, weighted=True).drop_zero_weights()
    solver, state = BlockDescent(), BlockDescent().init(program, null_point(program))
    for _ in range(3):
        state = solver.step(program, state)
    point = completed(program, solver.point(program, state))
    torch.testing.assert_close(point.fitted, program.map.matvec(point.coef) + point.intercept)
    torch.testing.assert_close(point.correlation, program.weighted_adjoint(point.dual), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n_columns", range(1, 7))
def test_a_sweep_leaves_its_last_column_at_a_minimum(n_columns):
    program, _, _ = gram_program(n_blocks=n_columns, width=1, alpha=0.05)
    last = program.swept(program.at(randn(n_columns, seed=4).numpy()), 1)[0]
    coef, correlation = last.coef[-1], program.at(last.coef).correlation[-1]
    assert abs(correlation) <= 0.05 + 1e-12
    assert coef == 0 or correlation == pytest.approx(0.05 * np.sign(coef), abs=1e-12)


@pytest.mark.parametrize("constant", [0.0, 3.0])
def test_blocks_of_one_column_are_those_of_the_lasso(constant):
    columns, y = randn(60, 8, seed=1), randn(60, 1, seed=2)
    columns[:, 2] = constant
    program = Program(DenseMap(columns[:, :, None]), y, Squared(), GroupL2(), alpha=0.05, fit_intercept=True)
    solver, state = BlockDescent(), BlockDescent().init(program, null_point(program))
    for _ in range(20):
        state = solver.step(program, state)
    lasso = Lasso(alpha=0.05, tol=1e-12).fit(columns.numpy(), y.numpy().ravel())
    np.testing.assert_allclose(state.primal.coef, lasso.coef_, atol=1e-8)
    assert 0 < np.count_nonzero(state.primal.coef) < 7


@pytest.mark.parametrize("width", [1, 2])
def test_a_block_that_carries_nothing_but_rounding_stays_at_zero(width):
    program = GramProgram(np.zeros((width, width)), np.full(width, 1e-9), 1.0, width, 1e-10)
    assert not program.swept(program.at(np.zeros(width)), 1)[0].coef.any()


def test_the_eigenvectors_that_are_known_change_nothing():
    program, columns, _ = gram_program()
    other, _, _ = gram_program(n_blocks=3, alpha=0.1)
    known = GramProgram(program.gram, program.target, program.square, 3, 0.2, other)
    start = program.at(randn(columns.shape[1], seed=3).numpy())
    for mine, theirs in zip(program.swept(start, 4), known.swept(start, 4), strict=True):
        np.testing.assert_allclose(theirs.coef, mine.coef, rtol=1e-10, atol=1e-12)


def test_sets_grow_and_stay_small():
    program, solver = sparse_program(ratio=0.6), on_a_set(6)
    state, sizes = solver.init(program, null_point(program)), []
    while state.gap > 1e-6 * program.null_value:
        state = solver.step(program, state)
        assert not solver.finished(state)
        sizes.append(len(state.blocks))
        assert len(sizes) < 200
    assert sizes[0] == 2
    assert sizes == sorted(sizes)
    assert int((state.whole.coef != 0).any(-2).sum()) <= sizes[-1] < 12


def test_a_set_wider_than_the_samples_ends_it():
    data, y = randn(10, 8, 4, seed=1), randn(10, 1, seed=2)
    program = Program(DenseMap(data), y, Squared(), GroupL2(), 1.0)
    program, solver = program.with_alpha(0.3 * program.alpha_max), on_a_set(4)
    state, n_steps = run_until_finished(program, solver, at_most=100)
    point = completed(program, solver.point(program, state))
    assert n_steps > 0
    assert certify(program, point.coef, point.intercept).primal < program.null_value


def test_it_ends_where_rounding_keeps_the_gap_from_falling():
    program = sparse_program()
    state, _ = run_until_finished(program, on_a_set(), at_most=100)
    assert state.gap <= 1e-12 * program.null_value


@pytest.mark.parametrize("solver", [BlockDescent(), on_a_set()], ids=lambda solver: solver.name)
def test_a_gap_of_nothing_ends_it(solver):
    # Features of which none says anything of the targets: the constant model is the best, to the last digit.
    program = Program(
        DenseMap(torch.eye(8)[:, :4, None].double()), torch.eye(8)[:, 7:].double(), Squared(), GroupL2(), 0.1
    )
    result = solve(program, solver, tol=1e-14)
    assert result.n_iter < 5
    assert result.certificate.gap == 0.0
    assert bool((result.coef == 0).all())


def chained_program(correlation, ratio):
    """Sixty blocks of three features, each correlated with the next, and a hundred samples; every seventh counts."""
    data = randn(100, 60, 3)
    for block in range(1, 60):
        data[:, block] = correlation * data[:, block - 1] + (1 - correlation**2) ** 0.5 * data[:, block]
    y = data[:, ::7].sum((1, 2))[:, None] + randn(100, 1, seed=1000)
    program = Program(DenseMap(data), y, Squared(), GroupL2(), 1.0)
    return program.with_alpha(ratio * program.alpha_max)


def test_a_small_set_that_grows_is_not_given_up_for_a_gap_that_falls_slowly():
    program = chained_program(0.0, ratio=0.5)
    solver = on_a_set(3)  # a block at a time
    state = solver.init(program, null_point(program))
    gaps = [state.gap]
    while not solver.finished(state) and state.gap > 1e-9 * program.null_value:
        state = solver.step(program, state)
        gaps += [state.gap] if solver.knows_gap(state) else []
        assert state.n_steps < 1000
    slow = zip(gaps, gaps[2:], strict=False)
    assert any(later > 0.5 * gap for gap, later in slow)  # not halved in two looks
    assert state.gap <= 1e-9 * program.null_value


def test_more_blocks_far_above_alpha_than_a_set_may_have_end_it():
    program, solver = chained_program(0.9, ratio=0.1), on_a_set(3)
    state, n_steps = solver.init(program, null_point(program)), 0
    while not solver.finished(state):
        # What the last look at all blocks has shown.
        norms = program.penalty.group_dual_norms(state.whole.correlation)
        state, n_steps = solver.step(program, state), n_steps + 1
    assert n_steps == 2
    assert len(state.blocks) == 1
    assert int((norms > 4 * program.alpha).sum()) > 100 / 3
    assert bool((solver.point(program, state).coef == 0).all())  # such a set misleads


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("solver", [BlockDescent(), on_a_set(30)], ids=lambda solver: solver.name)
def test_columns_whose_products_overflow_end_it(solver, intercept):
    data, y = randn(60, 10, 3), randn(60, 1, seed=1)
    data[:, 5] *= 1e160
    program = Program(DenseMap(data), y, Squared(), GroupL2(), 0.1, fit_intercept=intercept)
    with contextlib.suppress(torch.linalg.LinAlgError):  # what `solve` has advice for, and what ends a stage
        state = solver.init(program, null_point(program))
        for _ in range(10):
            state = state if solver.finished(state) else solver.step(program, state)
        assert solver.finished(state)
        assert bool(torch.isfinite(solver.point(program, state).coef).all())


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_path_goes_on_with_the_set_and_its_gram_matrix(monkeypatch, intercept, weighted):
    formed, form = [], LinearMap.gram
    monkeypatch.setattr(LinearMap, "gram", lambda self, *args: formed.append(args) or form(self, *args))
    program = sparse_program(intercept=intercept, weighted=weighted)
    grid = alpha_grid(program.alpha_max, n_alphas=10, eps=0.3)
    path = solve_path(program, on_a_set(3), grid, tol=1e-8, max_iter=50)
    own = torch.cat([left for left, right, *_ in formed if left is right])
    assert len(own) == len(own.unique()) < 12  # no block's products with itself are formed twice
    for alpha, result in zip(grid, path.results, strict=True):
        wanted = solve(program.with_alpha(alpha), Fista(), tol=1e-9, max_iter=50_000)
        assert result.certificate.relative_gap <= 1e-8
        assert result.certificate.primal == pytest.approx(wanted.certificate.primal, rel=1e-7)


@pytest.mark.parametrize("intercept", [False, True])
def test_columns_of_a_set_are_copied_and_multiplied_anew_only_where_it_grows(monkeypatch, intercept):
    copied, multiplied = [], []
    restrict, multiply = LinearMap.restricted, SupportGram.of
    monkeypatch.setattr(
        LinearMap, "restricted", lambda self, blocks: copied.append(len(blocks)) or restrict(self, blocks)
    )
    monkeypatch.setattr(
        SupportGram,
        "of",
        lambda self, blocks, *args, **how: multiplied.append(blocks) or multiply(self, blocks, *args, **how),
    )
    program = sparse_program(intercept=intercept)
    path = solve_path(program, on_a_set(3), alpha_grid(program.alpha_max, n_alphas=20, eps=0.3), tol=1e-8, max_iter=50)
    assert max(path.gaps) <= 1e-8
    assert all(before < after for before, after in pairwise(copied))
    assert 0 < len(multiplied) == len(copied) < 12


def test_an_alpha_whose_support_is_wide_is_left_to_others():
    program, solver = sparse_program(), on_a_set()
    state = solver.step(program, solver.init(program, null_point(program)))
    wide = Point(torch.ones(program.coef_shape, dtype=torch.float64), program.null_intercept)
    half = Point(wide.coef.clone(), program.null_intercept)
    half.coef[::2] = 0.0
    assert not solver.finished(solver.init_again(program, half, state))  # 18 columns, 100 samples
    few = program.rows(torch.arange(30))
    state = solver.step(few, solver.init(few, null_point(few)))
    assert solver.finished(solver.init_again(few, wide, state))


def test_auto_takes_it_along_a_path(monkeypatch):
    previous, init_again = [], WorkingSet.init_again
    monkeypatch.setattr(WorkingSet, "init_again", lambda *args: previous.append(args[-1]) or init_again(*args))
    program, auto = sparse_program(), Auto(AutoConfig(costly_gram=0.0))  # as if that of all features were costly
    path = solve_path(program, auto, alpha_grid(program.alpha_max, n_alphas=8, eps=0.5), tol=1e-6)
    assert max(path.gaps) <= 1e-6
    # The first alpha is alpha_max, where there is nothing to do.
    assert [state is None for state in previous] == [True] + 6 * [False]


@pytest.mark.parametrize(("loss", "c"), [("logistic", 1), ("squared", 2)])
def test_other_programs_are_refused(loss, c):
    program = make_program(loss, "group_l2", n=30, blocks=3, d=2, c=c)
    with pytest.raises(
        TypeError, match="'block_descent' needs the squared loss, the group-l2 penalty and one output, not"
    ):
        solve(program, BlockDescent())


def test_numpy_works_on_one_thread_and_gets_its_others_back(monkeypatch):
    def threads():
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    seen, swept = [], GramProgram.swept
    monkeypatch.setattr(GramProgram, "swept", lambda *args: seen.append(threads()) or swept(*args))
    with threadpool_limits(2, user_api="blas"):
        before = threads()
        assert solve(sparse_program(), BlockDescent(), tol=1e-4).certificate.relative_gap <= 1e-4
        assert threads() == before
    assert seen
    assert {number for numbers in seen for number in numbers} == {1}


def test_threads_that_overlap_give_numpy_its_others_back():
    def threads():
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    limit = block_descent._numpy_on_one_thread
    with threadpool_limits(2, user_api="blas"):
        before = threads()
        limit.__enter__()
        limit.__enter__()
        limit.__exit__()  # the first to come goes first
        assert set(threads()) == {1}
        limit.__exit__()
        assert threads() == before


@pytest.mark.parametrize("shift", [0.0, 1e3])
@pytest.mark.parametrize("unit", [1.0, 1e-22, 1e22])
def test_products_in_single_precision_cost_no_digits(shift, unit):
    program = sparse_program(intercept=True)
    data = unit * (program.map.data + shift)
    program = dataclasses.replace(program, map=DenseMap(data), y=program.y + 10.0, alpha=unit * program.alpha)
    # Predictions of features with large means are rounded as coarsely as these; centred, they keep their digits.
    program, _ = Center().apply(program)
    certificate = solve(program, on_a_set(single=True), tol=1e-10).certificate
    assert abs(certificate.relative_gap) <= 1e-10

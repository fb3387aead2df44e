"""Block descent in the Gram matrix of a growing set of blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from solver_cases import make_program, randn

from convexformer_solvers import DenseMap, Fista, GroupL2, Program, Squared, certify, solve
from convexformer_solvers.block_descent import BlockDescent, GramProgram
from convexformer_solvers.solver import Point


def sparse_program(ratio=0.3, **options):
    program = make_program("squared", "group_l2", n=100, blocks=12, d=3, c=1, **options)
    return program.with_alpha(ratio * program.alpha_max)


def gram_program(n_blocks=4, width=3, alpha=0.2):
    columns, y = randn(50, n_blocks * width, seed=1).numpy(), randn(50, seed=2).numpy()
    return GramProgram(columns.T @ columns / 50, columns.T @ y / 50, y @ y / 50, width, alpha), columns, y


def start_of(program):
    return Point(torch.zeros(program.coef_shape, dtype=torch.float64), program.null_intercept)


def test_values_from_products_are_those_of_the_samples():
    program, columns, y = gram_program()
    point = program.at(randn(columns.shape[1], seed=3).numpy())
    residual = y - columns @ point.coef
    norms = np.linalg.norm(point.coef.reshape(-1, 3), axis=1)
    assert program.primal(point) == pytest.approx(0.5 * residual @ residual / 50 + 0.2 * norms.sum(), rel=1e-10)
    scale = min(1.0, 0.2 / np.linalg.norm((columns.T @ residual / 50).reshape(-1, 3), axis=1).max())
    bound = 0.5 * y @ y / 50 - 0.5 * ((y - scale * residual) ** 2).sum() / 50
    assert program.dual(point) == pytest.approx(bound, rel=1e-10)


def test_blocks_of_the_solution_are_stationary():
    program, columns, _ = gram_program()
    primal, dual, gap = program.solved(np.zeros(columns.shape[1]), 1e-12)
    assert 0 <= program.primal(primal) - program.dual(dual) <= gap <= 1e-12
    for coef, ascent in zip(primal.coef.reshape(-1, 3), primal.ascent.reshape(-1, 3), strict=True):
        size = np.linalg.norm(coef)
        if size > 0:
            np.testing.assert_allclose(ascent, 0.2 * coef / size, atol=1e-5)
        else:
            assert np.linalg.norm(ascent) <= 0.2 * (1 + 1e-5)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_it_reaches_the_optimum_of_all_blocks(gated, intercept, weighted):
    program = sparse_program(gated=gated, intercept=intercept, weighted=weighted)
    wanted = solve(program, Fista(), tol=1e-9, max_iter=50_000)
    result = solve(program, BlockDescent(width=12), tol=1e-8, max_iter=100)
    assert result.certificate.primal == pytest.approx(wanted.certificate.primal, rel=1e-7)


def test_it_starts_from_a_given_point():
    program = sparse_program()
    solution = solve(program, BlockDescent(), tol=1e-10)
    solver = BlockDescent(width=3)
    state = solver.init(program, Point(solution.coef, solution.intercept))
    point = solver.point(program, solver.step(program, state))
    assert certify(program, point.coef, point.intercept, point.dual).relative_gap <= 1e-8


def test_sets_grow_and_stay_small():
    program, solver = sparse_program(ratio=0.6), BlockDescent(width=6)
    state, sizes = solver.init(program, start_of(program)), []
    while state.gap > 1e-6 * program.null_value:
        state = solver.step(program, state)
        assert not solver.finished(state)
        sizes.append(len(state.blocks))
    assert sizes[0] == 2
    assert sizes == sorted(sizes)
    assert int((state.whole.coef != 0).any(-2).sum()) <= sizes[-1] < 12


def test_a_set_wider_than_the_samples_ends_it():
    data, y = randn(10, 8, 4, seed=1), randn(10, 1, seed=2)
    program = Program(DenseMap(data), y, Squared(), GroupL2(), 1.0)
    program = program.with_alpha(0.01 * program.alpha_max)
    solver, steps = BlockDescent(width=4), 0
    state = solver.init(program, start_of(program))
    while not solver.finished(state):
        state, steps = solver.step(program, state), steps + 1
        assert steps < 100
    point = solver.point(program, state)
    assert certify(program, point.coef, point.intercept).primal < program.null_value


@pytest.mark.parametrize(("loss", "c"), [("logistic", 1), ("squared", 2)])
def test_other_programs_are_refused(loss, c):
    program = make_program(loss, "group_l2", n=30, blocks=3, d=2, c=c)
    with pytest.raises(TypeError, match="block_descent"):
        BlockDescent().init(program, start_of(program))

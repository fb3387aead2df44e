"""Solvers on another device than the CPU: a GPU where there is one, and a stand-in."""

import dataclasses
import warnings

import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from solver_cases import make_program, many_blocks, randn

from convexformer_solvers import (
    SOLVERS,
    Admm,
    ColumnGeneration,
    DenseMap,
    GroupNuclear,
    LinearMap,
    alpha_grid,
    certify,
    check_loss,
    check_map,
    check_penalty,
    check_solver,
    get_loss,
    get_solver,
    solve,
    solve_path,
)
from convexformer_solvers.algorithms.block_descent import BlockDescent
from convexformer_solvers.algorithms.fista import GreedyFista
from convexformer_solvers.algorithms.stage import Stage
from convexformer_solvers.algorithms.working_set import WorkingSet, WorkingSetConfig

# Greedy gradient steps on a set of blocks, as for independent features.
GREEDY = WorkingSet(
    Stage(GreedyFista(power_steps=2), "takes the steps"),
    WorkingSetConfig(wait=5, widest=0.6, far=2.0, form="samples", ends_in_all=True),
)
PARTS = [BlockDescent(), WorkingSet(Stage(Admm(), "solves the set")), GREEDY]
EVERY = {solver.name: solver for solver in [*map(get_solver, sorted(SOLVERS)), *PARTS]}
SQUARED = [("squared", name) for name in EVERY]
SOFTMAX = [("softmax", name) for name in EVERY if name not in ("semismooth_newton", "block_descent")]

pytestmark = pytest.mark.usefixtures("steady_rates")


@pytest.mark.parametrize(("loss", "solver"), SQUARED + SOFTMAX)
def test_every_solver_takes_the_same_steps(loss, solver, accelerator):
    solver = EVERY[solver]
    c = 1 if isinstance(solver, BlockDescent) else 2
    ratio = 0.7 if isinstance(solver, ColumnGeneration) else 0.5  # as a smaller one takes many searches for columns
    program = make_program(loss, n=40, blocks=4, d=2, c=c, gated=True, intercept=True, weighted=True, ratio=ratio)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # some are made to be given up for others
        here = solve(program, solver, tol=1e-5, max_iter=200)
        there = solve(program, solver, tol=1e-5, max_iter=200, device=accelerator)
    assert there.coef.device.type == accelerator
    assert there.n_iter == pytest.approx(here.n_iter, abs=2)
    assert there.certificate.primal == pytest.approx(here.certificate.primal, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("loss", "c"), [("squared", 1), ("logistic", 1), ("squared", 3)])
def test_paths(loss, c, dtype, accelerator):
    program = make_program(loss, n=40, blocks=6, d=3, c=c, intercept=True)
    grid = alpha_grid(program.alpha_max, n_alphas=3, eps=0.1)
    here, there = (
        solve_path(program, get_solver("auto"), grid, tol=1e-4, dtype=dtype, device=device)
        for device in ("cpu", accelerator)
    )
    assert max(there.gaps) <= 1e-4
    assert there.coefs.device.type == accelerator
    torch.testing.assert_close(there.coefs.cpu(), here.coefs, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("gated", [False, True])
def test_sets_of_blocks(gated, accelerator):
    program = many_blocks(gated=gated, ratio=0.3)
    here, there = (solve(program, GREEDY, tol=1e-4, max_iter=200, device=device) for device in ("cpu", accelerator))
    assert there.certificate.relative_gap <= 1e-4
    assert there.n_iter == pytest.approx(here.n_iter, abs=10)
    torch.testing.assert_close(there.coef.cpu(), here.coef, atol=1e-2, rtol=1e-2)


def test_certificates_are_computed_where_the_point_is(accelerator):
    program = make_program("softmax", gated=True, intercept=True, weighted=True)
    coef, shift, hint = 0.1 * randn(*program.coef_shape), program.null_intercept, randn(*program.y.shape)
    here, there = (certify(program, coef.to(d), shift.to(d), hint) for d in ("cpu", accelerator))
    assert there.dual_point.device.type == accelerator
    assert (there.primal, there.dual) == pytest.approx((here.primal, here.dual), rel=1e-12)


def test_a_map_on_the_device_wants_targets_there_and_finds_its_largest_entry(accelerator):
    program = make_program("squared", n=20, blocks=30, d=2, c=1)
    there = program.map.to(device=accelerator)
    # The way of maps that have none of their own.
    assert LinearMap.largest(there) == program.map.largest() > 0
    with pytest.raises(ValueError, match=f"y must be on the device of the map, {accelerator}.*, got cpu"):
        dataclasses.replace(program, map=there)
    with pytest.raises(ValueError, match=f"sample_weight must be on the device of the map, {accelerator}.*, got cpu"):
        dataclasses.replace(program, map=there, y=program.y.to(accelerator), sample_weight=torch.ones(20).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 2, 6])
def test_norms_of_singular_values(dtype, rank, accelerator):
    penalty, eps = GroupNuclear(), torch.finfo(dtype).eps
    for shape in ((5, 4, 7), (5, 7, 4), (3, 2, 60, 60), (1, 1, 3)):
        *blocks, d, c = shape
        coef = (randn(*blocks, d, rank) @ (randn(*blocks, rank, c, seed=1))).to(dtype)
        coef[0] = 0.0
        values = torch.linalg.svdvals(coef.double())
        largest, total = penalty.group_dual_norms(coef.to(accelerator)), penalty.group_values(coef.to(accelerator))
        assert largest.dtype == total.dtype == dtype
        torch.testing.assert_close(largest.cpu().double(), values[..., 0], rtol=1e-13 + 4 * eps, atol=0.0)
        torch.testing.assert_close(total.cpu().double(), values.sum(-1), rtol=1e-12 + 4 * eps, atol=0.0)


def test_checks_and_their_targets_are_on_the_cpu_whatever_the_default_device():
    class Wrong(DenseMap):
        def rmatvec(self, values):
            return 2 * super().rmatvec(values)

    data = randn(12, 3, 2)
    with torch.device("meta"):
        assert get_loss("squared").example_target(3, 2, torch.Generator()).device.type == "cpu"
        check_loss(get_loss("softmax"))
        check_penalty(GroupNuclear())
        check_solver(get_solver("fista"))
        check_map(DenseMap(data))
        with pytest.raises(AssertionError, match="not the adjoint"):
            check_map(Wrong(data))

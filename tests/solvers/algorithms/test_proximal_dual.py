"""Huber's loss with targets in any units: proximal steps in the dual."""

from __future__ import annotations

import itertools

import pytest
import torch
from solver_cases import randn

from convexformer_solvers import Admm, Auto, DenseMap, Exact, Huber, Program, Status, get_penalty, solve, solve_path
from convexformer_solvers.algorithms.proximal_dual import ProximalDual
from convexformer_solvers.algorithms.stage import Stage
from convexformer_solvers.auto import plan
from convexformer_solvers.points import dual_of, null_point

STEPS = Stage(Admm(), "solves each proximal step")


def in_units(scale, ratio, n=200, blocks=8, d=8, c=1, seed=0, penalty="group_l2", weight=None, common=0.8):
    """Correlated tokens, and targets whose spread is `scale` times about the width of Huber's quadratic part."""
    data = randn(n, blocks, d, seed=seed) + common * randn(n, 1, d, seed=seed + 100)
    y = scale * (data[:, :3].sum((1, 2))[:, None] + 2 * randn(n, c, seed=seed + 50))
    program = Program(DenseMap(data), y, Huber(), get_penalty(penalty), 1.0, weight, fit_intercept=True)
    return program.with_alpha(ratio * program.alpha_max)


@pytest.mark.parametrize("ratio", [0.3, 0.1, 0.01])
@pytest.mark.parametrize("scale", [1e1, 1e3, 1e5, 1e7])
def test_targets_in_any_units(scale, ratio):
    program = in_units(scale, ratio, n=100, blocks=5, d=4, c=2)
    assert solve(program, Auto(), tol=1e-4, max_iter=1000).status is Status.CONVERGED


@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_nuclear_programs(scale):
    program = in_units(scale, 0.1, c=2, penalty="nuclear")
    assert solve(program, Auto(), tol=1e-4, max_iter=2000).status is Status.CONVERGED


@pytest.mark.parametrize("seed", range(3))
def test_few_samples(seed):
    program = in_units(1e5, 0.01, n=40, seed=seed)
    assert solve(program, Auto(), tol=1e-4, max_iter=1000).status is Status.CONVERGED


def test_high_accuracy():
    assert solve(in_units(1e5, 0.1), Auto(), tol=1e-6, max_iter=2000).status is Status.CONVERGED


def test_agrees_with_cvxpy():
    # Units in which the loss is nearly that of absolute residuals, and a program that conic solvers can still scale.
    program = in_units(1e3, 0.1, n=60, blocks=4, d=3, c=2, weight=torch.linspace(0, 2, 60, dtype=torch.float64))
    found = solve(program, Auto(), tol=5e-7, max_iter=5000)
    reference = solve(program, Exact(), tol=1e-5)
    assert found.status is Status.CONVERGED
    assert found.certificate.primal <= reference.certificate.primal * (1 + 1e-6)
    assert found.certificate.primal == pytest.approx(reference.certificate.primal, rel=1e-5)


def test_paths():
    program = in_units(1e4, 1.0)
    path = solve_path(program, Auto(), [program.alpha * 0.1 ** (k / 4) for k in range(5)], max_iter=1000)
    assert max(path.gaps) <= 1e-4


def test_taken_for_long_tails_alone():
    for scale, taken in ((1e3, True), (3.0, False)):
        algorithms = [stage.algorithm for stage in plan(in_units(scale, 0.1))]
        assert any(isinstance(algorithm, ProximalDual) for algorithm in algorithms) is taken


@pytest.mark.parametrize("ratio", [0.3, 0.03])
@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_alone_reaches_the_optimum(scale, ratio):
    program = in_units(scale, ratio, c=2)
    assert solve(program, ProximalDual(STEPS), tol=1e-4, max_iter=1000).status is Status.CONVERGED


def test_steps_end_where_the_exact_program_does():
    program, solver = in_units(1e4, 0.1), ProximalDual(STEPS)
    state = solver.init(program, null_point(program))
    bounds, widths = [], []
    for _ in range(300):
        state = solver.step(program, state)
        if state.ended is None:
            continue
        dual, of_step = dual_of(program, state.ended), state.inner.chain.original
        # The slopes of the wide loss in units of its width, within the range of the exact one's.
        torch.testing.assert_close(dual, dual_of(of_step, state.inner.result()) / state.width)
        assert dual.abs().max() <= program.loss.delta * (1 + 1e-12)
        bounds.append(float(program.dual(dual)))
        widths.append(state.width)
    assert len(bounds) >= 5
    assert all(after <= before for before, after in itertools.pairwise(widths))
    assert widths[-1] < widths[0]


def test_all_steps_share_the_gram_matrix(monkeypatch):
    calls, original = [], DenseMap.full_kernel

    def counted(self, dtype):
        calls.append(self.n_samples)
        return original(self, dtype)

    monkeypatch.setattr(DenseMap, "full_kernel", counted)
    program, solver = in_units(1e4, 0.1, n=100, blocks=80), ProximalDual(STEPS)
    state, n_steps = solver.init(program, null_point(program)), 0
    while n_steps < 4:
        state = solver.step(program, state)
        n_steps += state.ended is not None
    assert calls.count(100) == 1  # a sample of rows says how correlated features are

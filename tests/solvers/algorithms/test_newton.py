"""Semismooth Newton steps, and programs that are hard for first-order ones."""

from __future__ import annotations

import functools

import pytest
import torch
from covering import covering
from solver_cases import BOTH, randn

from convexformer_solvers import (
    Auto,
    DenseMap,
    GatedMap,
    GroupL2,
    Program,
    SemismoothNewton,
    Softmax,
    Squared,
    SquaredHinge,
    get_loss,
    solve,
)
from convexformer_solvers.linalg.newton_systems import NewtonSystem, ProxJacobian
from convexformer_solvers.points import null_point
from convexformer_solvers.reductions.base import Chain


@functools.cache  # those of a unit of one are the same for every other
def steps_in_unit(loss, unit):
    data = randn(40, 6, 3)
    y = 2 * data[:, 0, :1] + randn(40, 1, seed=1) + 1
    y = {"logistic": y.sign(), "squared_hinge": y.sign(), "poisson": y.exp().round()}.get(loss, y)
    program = Program(DenseMap(unit * data), y, get_loss(loss), GroupL2(), 1.0, fit_intercept=True)
    program = program.with_alpha(0.1 * program.alpha_max)
    return solve(program, SemismoothNewton(), tol=1e-8, max_iter=100).n_iter


class TestSemismoothNewton:
    def separable_classes(self, seed, n=40, blocks=6, d=4):
        data = randn(n, blocks, d, seed=seed)
        y = torch.where(data[:, 0, 0] + 0.5 * randn(n, seed=seed + 50) > 0, 1.0, -1.0)[:, None].double()
        return Program(DenseMap(data), y, get_loss("squared_hinge"), GroupL2(), 1e-2, None, True)

    # A few in a hundred of such programs are lost: the next test counts them.
    @pytest.mark.parametrize("seed", range(12))
    def test_ends_where_curvatures_jump(self, seed):
        # Where samples at their kinks count as flat, or a failed search ends it, half of these stay at gaps of .1 to 1.
        assert solve(self.separable_classes(seed), SemismoothNewton(), tol=1e-5, max_iter=150).certificate.gap < 1e-4

    @pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
    def test_hardly_ever_fails_to_end_where_curvatures_jump(self):
        programs = [self.separable_classes(seed) for seed in range(40)]
        gaps = [solve(one, SemismoothNewton(), tol=1e-5, max_iter=150).certificate.gap for one in programs]
        assert sum(gap < 1e-4 for gap in gaps) >= 37

    @pytest.mark.parametrize(("ratio", "gated", "c", "seed"), covering([1e-3, 1e-4], BOTH, [1, 2], range(2)))
    def test_squared_hinge_at_weak_regularisation(self, ratio, gated, c, seed):
        # Samples whose loss is flat came into the way of each other's steps: gaps of .15 to 1 after 500.
        data = randn(80, 10, 4, seed=seed)
        scores = torch.einsum("nkd,kdc->nc", data, randn(10, 4, c, seed=seed + 10))
        y = (scores / scores.std() + 0.3 * randn(80, c, seed=seed + 20)).sign()
        masks = torch.einsum("ind,dh->ih", data, randn(4, 8, seed=seed + 30)) > 0
        linear_map = GatedMap(data, masks) if gated else DenseMap(data)
        program = Program(linear_map, y, SquaredHinge(), GroupL2(), 1.0)
        program = program.with_alpha(ratio * program.alpha_max)
        assert solve(program, SemismoothNewton(), tol=1e-6, max_iter=200).certificate.relative_gap <= 1e-6
        assert solve(program, Auto(), tol=1e-6, max_iter=3000).certificate.relative_gap <= 1e-6

    @pytest.mark.parametrize("offset", [1e3, 1e6])
    def test_the_mean_of_the_targets_does_not_matter(self, offset):
        data = 1e6 * randn(40, 8, 3)
        y = data[:, :2].sum((1, 2))[:, None] / 1e6 + randn(40, 1, seed=1)
        results = []
        for shift in (0.0, offset):
            program = Program(DenseMap(data), y + shift, Squared(), GroupL2(), 1e3, None, True)
            solver = SemismoothNewton()
            reduced = Chain.of(program, solver.reductions).program
            state = solver.init(reduced, null_point(reduced))
            for _ in range(6):
                state = solver.step(reduced, state)
            results.append(solver.point(reduced, state))
        torch.testing.assert_close(results[1].coef, results[0].coef, rtol=0, atol=1e-4 * float(results[0].coef.max()))

    @pytest.mark.parametrize("unit", [1e-20, 1e-4, 1e4, 1e20])
    @pytest.mark.parametrize("loss", ["squared", "huber", "logistic", "squared_hinge", "poisson"])
    def test_the_unit_of_the_features_does_not_matter(self, loss, unit):
        # The intercept's proximal term has none of its own: at 1e-4 and 1e4 the logistic loss stayed at gaps of 0.1.
        assert abs(steps_in_unit(loss, unit) - steps_in_unit(loss, 1.0)) <= 2

    def test_no_curvature_at_all_is_no_division_by_zero(self):
        # All samples in the linear parts: the system has nothing to solve for.
        jacobian = ProxJacobian(torch.arange(9), torch.full((9,), 0.5).double(), randn(9, 100))
        system = NewtonSystem(DenseMap(randn(20, 9, 100)), intercept_scale=1.0)
        target = randn(20)
        for curvature in (torch.ones(20).double(), torch.zeros(20).double()):
            assert torch.isfinite(system.solve(jacobian, 1.0, curvature, target)).all()

    def test_curvatures_of_which_single_precision_has_no_numbers(self):
        # Logistic losses at margins of 280: the preconditioner is in single precision, the system is the identity.
        jacobian = ProxJacobian(torch.arange(9), torch.full((9,), 0.5).double(), randn(9, 100))
        system = NewtonSystem(DenseMap(randn(20, 9, 100)), intercept_scale=1.0)
        target = randn(20)
        torch.testing.assert_close(system.solve(jacobian, 1.0, torch.full((20,), 1e-122).double(), target), target)


@pytest.mark.parametrize("ratio", [0.1, 0.01])
def test_auto_is_sharp_with_cross_entropy_where_tokens_are_correlated_and_regularisation_weak(ratio):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(300, 1, 6, generator=generator, dtype=torch.float64)
    data = data + 0.5 * torch.randn(300, 8, 6, generator=generator, dtype=torch.float64) + 0.3
    scores = torch.einsum("ikd,dc->ic", data[:, :2], randn(6, 4, seed=1)) + randn(300, 4, seed=2)
    y = torch.nn.functional.one_hot(scores.argmax(1), 4).double()
    program = Program(DenseMap(data), y, Softmax(), GroupL2(), 1.0, fit_intercept=True)
    program = program.with_alpha(ratio * program.alpha_max)
    result = solve(program, Auto(), tol=1e-8, max_iter=99)
    assert result.certificate.relative_gap <= 1e-8


@pytest.mark.parametrize("intercept_scale", [0.0, 0.7])
@pytest.mark.parametrize("n_groups", [0, 1, 3])
@pytest.mark.parametrize("d", [1, 2])
def test_systems_of_few_groups_have_the_solution_of_their_matrix(d, n_groups, intercept_scale):
    data, blocks = randn(9, 4, d), torch.tensor([0, 2, 3])[:n_groups]
    units = torch.nn.functional.normalize(randn(n_groups, d, seed=1), dim=1)
    shrinkage, curvature, target = (
        torch.linspace(0.3, 1.0, 3).double()[:n_groups],
        randn(9, seed=2).abs(),
        randn(9, seed=3),
    )
    kernel = torch.full((9, 9), intercept_scale).double()
    for block, scale, unit in zip(blocks, shrinkage, units, strict=True):
        jacobian = scale * torch.eye(d) + (1 - scale) * torch.outer(unit, unit)
        kernel += data[:, block] @ jacobian @ data[:, block].T
    wanted = torch.linalg.solve(torch.eye(9) + 1.3 * kernel * curvature, target)
    found = NewtonSystem(DenseMap(data), intercept_scale).solve(
        ProxJacobian(blocks, shrinkage, units), 1.3, curvature, target
    )
    torch.testing.assert_close(found, wanted)

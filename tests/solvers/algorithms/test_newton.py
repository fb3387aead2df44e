"""Newton steps over several outputs at once."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from solver_cases import make_program, randn

from convexformer_solvers import (
    Auto,
    DenseMap,
    Fista,
    GatedMap,
    GroupL2,
    GroupNuclear,
    Program,
    SemismoothNewton,
    Softmax,
    Squared,
    SquaredHinge,
    get_loss,
    solve,
)
from convexformer_solvers.algorithms import admm_newton
from convexformer_solvers.algorithms.admm_newton import _Phase
from convexformer_solvers.algorithms.base import Point, null_point
from convexformer_solvers.algorithms.support_newton import SupportNewton
from convexformer_solvers.linalg import coupled_systems as coupled_system
from convexformer_solvers.linalg.coupled_systems import BlockTerms, CoupledSystem
from convexformer_solvers.linalg.hessian import Curvature
from convexformer_solvers.linalg.newton_systems import NewtonSystem, ProxJacobian

K, D, C = 4, 3, 3


def system_of(loss, *, gated=False, intercept=False, weak=1.0, all_active=False):
    """A program, its Newton system, terms with inactive groups, and the dense matrix of the system."""
    program = make_program(
        loss, n=40, blocks=K, d=D, c=C, gated=gated, intercept=intercept, weighted=True
    ).drop_zero_weights()
    curvature = Curvature(program, 0.5 * randn(*program.y.shape, seed=4))
    n_blocks = program.coef_shape[0] * (K if gated else 1)
    units = torch.nn.functional.normalize(randn(n_blocks, D, C, seed=2), dim=1)
    scale = weak * (0.5 + randn(n_blocks, C, seed=3).square())
    active = torch.ones(n_blocks, C, dtype=torch.bool)
    if not all_active:
        active[1, 0] = active[2] = False
    terms = BlockTerms(active, scale, -0.9 * scale, units, 0.1 * weak)
    system = CoupledSystem(program.map, program.fit_intercept)
    mask = torch.cat([active.repeat_interleave(D, 0), torch.full((1, C), intercept)])
    columns = []
    for index in range(mask.numel()):
        unit = torch.zeros(mask.numel(), dtype=torch.float64)
        unit[index] = 1.0
        unit = unit.view_as(mask) * mask
        own = torch.cat([terms.apply(unit[:-1].view(n_blocks, D, C)).flatten(0, 1), terms.intercept * unit[-1:]])
        columns.append(((own + system.adjoint(curvature.product(system.forward(unit)))) * mask).flatten())
    return program, system, terms, curvature, mask, torch.stack(columns, 1)


def exact_solution(matrix, mask, right):
    chosen = mask.flatten()
    result = torch.zeros_like(right.flatten())
    result[chosen] = torch.linalg.solve(matrix[chosen][:, chosen], right.flatten()[chosen])
    return result.view_as(right)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
class TestCoupledSystem:
    def test_forward_and_adjoint_belong_together(self, gated, intercept):
        _, system, _, _, mask, _ = system_of("squared", gated=gated, intercept=intercept)
        rows, values = randn(*mask.shape, seed=5), randn(system.map.n_samples, C, seed=6)
        assert float((system.forward(rows) * values).sum()) == pytest.approx(
            float((rows * system.adjoint(values)).sum())
        )

    @pytest.mark.parametrize("loss", ["squared", "logistic"])
    def test_one_iteration_is_exact_where_the_loss_separates(self, gated, intercept, loss):
        _, system, terms, curvature, mask, matrix = system_of(loss, gated=gated, intercept=intercept)
        right = randn(*mask.shape, seed=7)
        solution = system.solve(terms, curvature, right)
        torch.testing.assert_close(solution, exact_solution(matrix, mask, right), rtol=1e-7, atol=1e-9)
        assert bool((solution[~mask] == 0).all())

    def test_cross_entropy_is_solved_to_the_accuracy_asked_for(self, gated, intercept, monkeypatch):
        monkeypatch.setattr(coupled_system, "_ACCURACY", 1e-9)
        _, system, terms, curvature, mask, matrix = system_of("softmax", gated=gated, intercept=intercept)
        right = randn(*mask.shape, seed=8)
        solution = system.solve(terms, curvature, right)
        torch.testing.assert_close(solution, exact_solution(matrix, mask, right), rtol=1e-5, atol=1e-7)


def test_the_common_move_of_all_outputs_costs_no_iterations(monkeypatch):
    monkeypatch.setattr(coupled_system, "_ACCURACY", 1e-6)
    counts, apply = [], CoupledSystem._apply
    monkeypatch.setattr(CoupledSystem, "_apply", lambda *args: counts.append(counts.pop() + 1) or apply(*args))
    for common_part in (coupled_system._common_part, lambda terms: None):
        monkeypatch.setattr(coupled_system, "_common_part", common_part)
        _, system, terms, curvature, mask, _ = system_of("softmax", weak=1e-6, all_active=True)
        counts.append(0)
        system.solve(terms, curvature, randn(*mask.shape, seed=9))
    assert 2 * counts[0] < counts[1]


@pytest.mark.parametrize("limit", [0, 200])  # without and with the factors of the first system
@pytest.mark.parametrize("intercept", [False, True])
def test_other_active_groups_are_solved_for_with_the_factors_of_earlier_ones(monkeypatch, limit, intercept):
    monkeypatch.setattr(coupled_system, "_ACCURACY", 1e-9)
    monkeypatch.setattr(coupled_system, "_REUSE_LIMIT", limit)
    _, system, all_terms, curvature, mask, matrix = system_of("softmax", intercept=intercept, all_active=True)
    factorised, factorise = [], CoupledSystem._factorise
    monkeypatch.setattr(CoupledSystem, "_factorise", lambda *args: factorised.append(args) or factorise(*args))
    right, first, second = randn(*mask.shape, seed=9), all_terms.active.clone(), all_terms.active.clone()
    first[0], second[1, 0], second[2] = False, False, False
    for active in (first, second):
        rows = torch.cat([active.repeat_interleave(D, 0), mask[-1:]])
        solution = system.solve(all_terms._replace(active=active), curvature, right)
        torch.testing.assert_close(solution, exact_solution(matrix, rows, right), rtol=1e-5, atol=1e-7)
    assert len(factorised) == (1 if limit else 2)


@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
def test_support_newton_finishes_what_is_near(loss, gated, intercept):
    program = make_program(loss, n=80, blocks=6, d=3, c=3, gated=gated, intercept=intercept, weighted=True, ratio=0.2)
    near = solve(program, Fista(), tol=1e-4)
    result = solve(program, SupportNewton(), tol=1e-9, max_iter=25, start=(near.coef, near.intercept))
    assert result.certificate.relative_gap <= 1e-9


def test_support_newton_never_goes_uphill():
    program = make_program("softmax", n=60, blocks=8, d=2, c=3, intercept=True, ratio=0.3)
    solver = SupportNewton()
    state = solver.init(program, Point(0.3 * randn(*program.coef_shape, seed=2), program.null_intercept))
    objectives = [solver.iterate(state).objective]
    while not solver.finished(state) and len(objectives) < 60:
        state = solver.step(program, state)
        objectives.append(solver.iterate(state).objective)
    assert len(objectives) > 5
    assert all(after <= before + 1e-12 for before, after in pairwise(objectives))
    assert objectives[-1] == pytest.approx(solve(program, Fista(), tol=1e-8).certificate.primal, rel=1e-7)


def test_newton_steps_whose_rough_gaps_stay_far_below_zero_are_given_up():
    # Such gaps are those of correlations that are not the dual point's; twice one is below it.
    phase = _Phase(SemismoothNewton(), SimpleNamespace(iterates=(SimpleNamespace(finished=False),)), (-76.0,) * 30)
    assert phase.stuck
    assert not phase._replace(gaps=tuple(-76.0 * 0.5**k for k in range(30))).stuck


def test_costly_newton_steps_come_late():
    # A few more alternating steps take less than one of them, and its matrices twice the memory.
    data = randn(600, 20, 10)
    y = torch.where(data[:, 0, 0] > 0, 1.0, -1.0)[:, None].double()
    program = Program(DenseMap(data), y, get_loss("logistic"), GroupL2(), 1e-3, None, True)
    coef = torch.where(torch.arange(20)[:, None, None] < 18, randn(20, 10, 1), 0.0)
    assert 0.5 < admm_newton._newton_work(program, coef) / admm_newton.admm_work(program) < 40
    for gap, iteration, pays in ((1e-3, 45, False), (0.5, 45, False), (0.5, 150, False), (1e-3, 150, True)):
        state = admm_newton._State(SimpleNamespace(gap=gap * program.null_value, coef=coef), iteration=iteration)
        assert admm_newton._semismooth_pays(program, state) is pays


def test_costly_newton_steps_on_the_support_come_late():
    # Six outputs of 600 active columns each: a step takes as long as some eighty alternating ones.
    def pays(n, blocks, iteration):
        program = make_program("softmax", n=n, blocks=blocks, d=10, c=6)
        coef = randn(*program.coef_shape)
        n_active = (6 * blocks, 6 * blocks)
        state = admm_newton._State(SimpleNamespace(gap=1.0, coef=coef), iteration=iteration, n_active=n_active)
        return admm_newton._support_newton_pays(program, state)

    assert not pays(700, 60, 100)
    assert pays(700, 60, 1000)
    assert pays(30, 2, 10)  # what takes next to no time


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

    @pytest.mark.parametrize("c", [1, 2])
    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize("ratio", [1e-3, 1e-4])
    def test_squared_hinge_at_weak_regularisation(self, ratio, gated, c):
        # Samples whose loss is flat came into the way of each other's steps: gaps of .15 to 1 after 500.
        for seed in range(2):
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
            state = SemismoothNewton().init(program, null_point(program))
            for _ in range(6):
                state = SemismoothNewton().step(program, state)
            results.append(SemismoothNewton().iterate(state))
        torch.testing.assert_close(results[1].coef, results[0].coef, rtol=0, atol=1e-4 * float(results[0].coef.max()))

    def test_no_curvature_at_all_is_no_division_by_zero(self):
        # All samples in the linear parts: the system has nothing to solve for.
        jacobian = ProxJacobian(torch.arange(9), torch.full((9,), 0.5).double(), randn(9, 100))
        system = NewtonSystem(DenseMap(randn(20, 9, 100)), fit_intercept=True)
        target = randn(20)
        for curvature in (torch.ones(20).double(), torch.zeros(20).double()):
            assert torch.isfinite(system.solve(jacobian, 1.0, curvature, target)).all()

    def test_curvatures_of_which_single_precision_has_no_numbers(self):
        # Logistic losses at margins of 280: the preconditioner is in single precision, the system is the identity.
        jacobian = ProxJacobian(torch.arange(9), torch.full((9,), 0.5).double(), randn(9, 100))
        system = NewtonSystem(DenseMap(randn(20, 9, 100)), fit_intercept=True)
        target = randn(20)
        torch.testing.assert_close(system.solve(jacobian, 1.0, torch.full((20,), 1e-122).double(), target), target)


def test_support_newton_says_what_it_cannot_do():
    program = Program(DenseMap(randn(5, 2, 2)), randn(5, 2), Squared(), GroupNuclear(), 0.1)
    with pytest.raises(TypeError, match="needs the group-l2 penalty"):
        solve(program, SupportNewton())


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

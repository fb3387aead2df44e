"""What a path takes over from alpha to alpha."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from solver_cases import make_program, randn

from convexformer_solvers import Admm, Auto, DenseMap, Fista, alpha_grid, solve, solve_path
from convexformer_solvers.algorithms.admm import AdmmConfig
from convexformer_solvers.algorithms.admm import iteration as admm_module
from convexformer_solvers.algorithms.admm.rho import GroupSizeStepRule
from convexformer_solvers.algorithms.admm.state import End
from convexformer_solvers.algorithms.block_descent import BlockDescent
from convexformer_solvers.algorithms.polish import PolishConfig
from convexformer_solvers.algorithms.stage import Stage
from convexformer_solvers.algorithms.working_set import WorkingSet, WorkingSetConfig
from convexformer_solvers.linalg.ridge import RidgeSystem
from convexformer_solvers.path import _extrapolated
from convexformer_solvers.points import Point, completed, null_point
from convexformer_solvers.reductions.precision import SinglePrecision

pytestmark = pytest.mark.usefixtures("steady_rates")


def test_data_in_another_precision_than_that_of_the_solver_are_converted_once(monkeypatch):
    program, converted, to = make_program("squared", n=60, blocks=4, d=3), [], DenseMap.to

    def counted(self, dtype=None, device=None):
        result = to(self, dtype, device)
        converted.extend([result] if result is not self else [])
        return result

    monkeypatch.setattr(DenseMap, "to", counted)
    found = solve_path(program, Fista(), alpha_grid(program.alpha_max, 5), tol=1e-3, dtype=torch.float32)
    assert {result.coef.dtype for result in found.results} == {torch.float32}
    assert len(converted) == 1


def test_starts_are_linear_in_alpha():
    assert _extrapolated([], 1.0) is None
    generator = torch.Generator().manual_seed(0)
    slope, offset = torch.randn(2, 4, 3, 2, generator=generator, dtype=torch.float64)

    def point(alpha):
        coef = slope * alpha + offset
        return Point(coef, coef.sum((0, 1)), pred=coef[:, 0])

    assert torch.equal(_extrapolated([(1.0, point(1.0))], 0.7).coef, point(1.0).coef)
    ahead = _extrapolated([(0.7, point(0.7)), (0.5, point(0.5))], 0.35)
    for name in ("coef", "intercept", "pred"):
        torch.testing.assert_close(getattr(ahead, name), getattr(point(0.35), name))
    # The same alpha twice leads nowhere.
    assert torch.equal(_extrapolated([(0.5, point(0.5)), (0.5, point(0.5))], 0.4).coef, point(0.5).coef)


@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_path_takes_fewer_iterations_than_separate_solves(loss, gated):
    program = make_program(loss, n=60, blocks=8, d=3, c=2, gated=gated, intercept=True, weighted=True)
    grid = alpha_grid(program.alpha_max, n_alphas=6, eps=0.05)
    path = solve_path(program, Auto(), grid, tol=1e-6)
    alone = [solve(program.with_alpha(alpha), Auto(), tol=1e-6) for alpha in grid]
    assert max(path.gaps) <= 1e-6
    for result, other in zip(path.results, alone, strict=True):
        assert result.certificate.primal == pytest.approx(other.certificate.primal, rel=3e-6)
    assert sum(result.n_iter for result in path.results) < sum(result.n_iter for result in alone)


@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
@pytest.mark.parametrize("intercept", [False, True])
def test_a_path_in_float32_is_that_in_float64(loss, intercept):
    program = make_program(loss, n=60, blocks=8, d=3, c=2, intercept=intercept)
    grid = alpha_grid(program.alpha_max, n_alphas=6, eps=0.1)
    double, single = (solve_path(other, Auto(), grid, tol=1e-5) for other in (program, program.to(torch.float32)))
    assert max(single.gaps) <= 1e-5
    assert {result.coef.dtype for result in single.results} == {torch.float32}
    for result, other in zip(single.results, double.results, strict=True):
        assert result.certificate.primal == pytest.approx(other.certificate.primal, rel=3e-5)


@pytest.mark.parametrize("n", [30, 200])  # both sides of the ridge system
def test_a_path_forms_one_gram_matrix(monkeypatch, n):
    formed, factorised = [], []
    make, factorise = admm_module.ridge_system, RidgeSystem.factorise
    monkeypatch.setattr(admm_module, "ridge_system", lambda *args: formed.append(args) or make(*args))
    monkeypatch.setattr(RidgeSystem, "factorise", lambda self, *args: factorised.append(args) or factorise(self, *args))
    program = make_program("squared", n=n, blocks=12, d=8, c=2, intercept=True)
    path = solve_path(program, Admm(), alpha_grid(program.alpha_max, n_alphas=30), tol=1e-5)
    assert max(path.gaps) <= 1e-5
    assert len(formed) == 1
    assert len(factorised) < 30


def set_of_blocks(form, solver=None):
    inner = Stage(solver or Admm(), "solves the set", polish=None if solver else PolishConfig())
    return WorkingSet(inner, WorkingSetConfig(columns=2, form=form))


SOLVERS = {
    "admm": (Admm(), 2),
    "fista": (Fista(), 2),
    "auto": (Auto(), 2),
    **{f"set, {form}": (set_of_blocks(form), 2) for form in ("samples", "root", "gram")},
    "set, block descent": (set_of_blocks("gram", BlockDescent()), 1),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_any_previous_state_leads_to_the_same_optimum(name):
    solver, c = SOLVERS[name]
    program = make_program("squared", n=60, blocks=60, d=2, c=c, intercept=True, ratio=0.8)
    program = dataclasses.replace(program, map=DenseMap(program.map.data + 1))  # means that the intercept takes away
    start = null_point(program)
    state = solver.init(program.with_alpha(3 * program.alpha), start)
    for _ in range(25):
        state = solver.step(program.with_alpha(3 * program.alpha), state)
    state = solver.init_again(program, start, state)
    for _ in range(300):
        if not solver.finished(state):
            state = solver.step(program, state)
    reached = completed(program, solver.point(program, state))
    wanted = solve(program, Fista(), tol=1e-9, max_iter=20_000)
    assert float(program.primal(reached.coef, reached.intercept)) == pytest.approx(wanted.certificate.primal, rel=1e-5)


@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
@pytest.mark.parametrize(("scale", "unit"), [(2.0**33, 2.0**-37), (2.0**-20, 2.0**20)])
def test_a_path_does_not_go_by_units(penalty, scale, unit):
    program = make_program("squared", penalty, n=60, blocks=40, d=3, c=2)
    other = dataclasses.replace(program, map=DenseMap(scale * program.map.data), y=unit * program.y)
    paths = [solve_path(p, Admm(), alpha_grid(p.alpha_max, n_alphas=5, eps=0.1)) for p in (program, other)]
    assert paths[0].gaps == pytest.approx(paths[1].gaps)
    assert [result.n_iter for result in paths[0].results] == [result.n_iter for result in paths[1].results]


def test_coupled_losses_take_a_shorter_threshold_along_paths():
    program = make_program("softmax", n=80, blocks=8, d=3, c=4, ratio=0.1)
    coef, solver = solve(program, Auto(), tol=1e-4).coef, Admm()
    sizes = program.penalty.group_dual_norms(coef)
    median = float(sizes[sizes > 0].median())
    cold = solver.init(program, Point(coef))
    assert program.alpha / cold.rho == pytest.approx(cold.rule.threshold * median)
    warm = solver.init_again(program, Point(coef), cold)
    assert program.alpha / warm.rho == pytest.approx(warm.rule.threshold * median)
    assert warm.rule.threshold < cold.rule.threshold


def test_rho_is_set_anew_by_the_threshold_of_the_state():
    program, solver = make_program("squared", n=80, blocks=8, d=3, ratio=0.1), Admm()
    coef = solve(program, Auto(), tol=1e-4).coef
    sizes = program.penalty.group_dual_norms(coef)
    median = float(sizes[sizes > 0].median())
    state = solver.init(program, Point(coef))
    for factor in (10, 1, 0.1):
        before = state.rho * state.multiplier
        rule = state.rule._replace(threshold=factor * state.rule.threshold)
        state = solver._adapted(program, state._replace(rule=rule, iteration=5))
        assert program.alpha / state.rho == pytest.approx(rule.threshold * median)
        torch.testing.assert_close(state.rho * state.multiplier, before)


def test_a_path_converts_the_data_once(monkeypatch):
    converted, convert = [], SinglePrecision.apply
    monkeypatch.setattr(SinglePrecision, "apply", lambda *args: converted.append(args) or convert(*args))
    program = make_program("squared", n=300, blocks=30, d=32, ratio=0.1)
    path = solve_path(program, Auto(), alpha_grid(program.alpha_max, n_alphas=8, eps=0.05))
    assert max(path.gaps) <= 1e-4
    assert len(converted) == 1


def test_one_sample_whose_curvature_jumps_does_not_cost_a_factorisation():
    program = make_program("logistic", n=100)
    before = torch.full((100,), 0.2, dtype=torch.float64)
    after, config = before.clone(), AdmmConfig()
    after[3] = 1.0
    assert admm_module._alike(program, after, before, config)
    assert not admm_module._alike(program, 1.5 * before, before, config)
    # Of a sample that stands for many it is another matter.
    heavy = dataclasses.replace(program, sample_weight=torch.ones(100).double().index_fill(0, torch.tensor([3]), 50.0))
    assert not admm_module._alike(heavy, after, before, config)


def test_moves_that_are_rounding_do_not_take_rho_anywhere(monkeypatch):
    program, states = _states()
    state = states[-1]._replace(iteration=15)
    state = state._replace(mark=state.sides)
    monkeypatch.setattr(Admm, "gap_estimate", lambda *arguments: 0.0)
    for told, factor in ((1e-12, 1 / 30), (1e12, 30.0), (0.2, 0.2)):
        monkeypatch.setattr(admm_module, "balancing_rho", lambda before, after, told=told: told * state.rho)
        assert Admm()._with_better_rho(program, state).rho == pytest.approx(factor * state.rho)


@pytest.mark.parametrize(("told", "factor"), [(1e-9, 2.2**-2), (1e9, 2.2**2), (0.3, 0.3)])
def test_rho_of_an_extrapolated_start_is_near_the_one_before(monkeypatch, told, factor):
    program, (_, second) = _states()
    second = second._replace(cache=second.cache._replace(largest_rho=1e12 * second.rho))
    following = program.with_alpha(0.9 * program.alpha)
    monkeypatch.setattr(GroupSizeStepRule, "rho", lambda *arguments: told * second.rho)
    start = Point(second.coef, program.null_intercept, pred=second.pred)
    assert Admm().init_again(following, start, second).rho == pytest.approx(factor * second.rho)
    given = start._replace(pred=None)  # of no other alpha
    assert Admm().init_again(following, given, second).rho == pytest.approx(told * second.rho)


def test_groups_too_small_to_tell_leave_rho_of_a_path_as_it_was(monkeypatch):
    program, (_, second) = _states()
    second = second._replace(cache=second.cache._replace(largest_rho=100 * second.rho))
    following = program.with_alpha(0.9 * program.alpha)
    monkeypatch.setattr(GroupSizeStepRule, "rho", lambda rule, program, coef, largest: largest)
    start = Point(second.coef, program.null_intercept, pred=second.pred)
    again = Admm().init_again(following, start, second)
    assert again.rho == second.rho
    assert Admm()._with_better_rho(following, again).rho == again.rho
    alone = Admm().init(following, null_point(following))
    assert Admm()._with_better_rho(following, alone).rho == alone.cache.largest_rho


def _end(alpha, slope, offset):
    parts = [slope * alpha + offset, 2 * slope * alpha - offset, (slope * alpha).sum(0)]
    return End(alpha, *parts)


def test_ends_are_extrapolated_in_alpha_no_further_than_they_are_apart():
    slope, offset = randn(2, 4, 3)
    before, last = _end(1.0, slope, offset), _end(0.7, slope, offset)
    for alpha, reached in ((0.5, 0.5), (0.4, 0.4), (0.1, 0.4)):
        ahead = last.ahead(before, alpha)
        assert ahead.alpha == alpha
        for found, expected in zip(ahead[1:], _end(reached, slope, offset)[1:], strict=True):
            torch.testing.assert_close(found, expected)


def test_an_extrapolated_optimum_stays_where_it_is():
    # Each group of orthonormal features shrinks in proportion to alpha: ends at the optimum lead to the optimum.
    linear_map = DenseMap(torch.eye(12, dtype=torch.float64).view(12, 4, 3))
    program = dataclasses.replace(make_program(n=12, blocks=4, d=3, c=2), map=linear_map)
    grid = [ratio * program.alpha_max for ratio in (0.1, 0.08, 0.06)]
    admm, state = Admm(), None
    for alpha in grid:
        here = program.with_alpha(alpha)
        start = null_point(here)._replace(pred=here.null_intercept.expand_as(here.y))
        state = admm.init(here, start) if state is None else admm.init_again(here, start, state)
        first = state.coef
        for _ in range(200):
            state = admm.step(here, state)
    assert bool((program.penalty.group_values(first) > 0).all())
    torch.testing.assert_close(first, state.coef)


def _states(loss="squared", alphas=(0.5, 0.4), **options):
    """The last of some programs that differ in alpha, and the last states of alternating directions on all of them."""
    program = make_program(loss, n=60, blocks=8, d=3, c=2, intercept=True, **options)
    admm, states = Admm(), []
    for ratio in alphas:
        here = program.with_alpha(ratio * program.alpha_max)
        point = null_point(here)._replace(pred=here.null_intercept.expand_as(here.y))
        states.append(admm.init_again(here, point, states[-1]) if states else admm.init(here, point))
        for _ in range(60):
            states[-1] = admm.step(here, states[-1])
    return here, states


def test_what_is_no_end_of_the_alpha_before_is_not_extrapolated():
    program, (first, second) = _states()
    following = program.with_alpha(0.9 * program.alpha)
    assert admm_module._ahead(following, second) is not None
    assert admm_module._ahead(following, first) is None  # there is one end
    assert admm_module._ahead(program, second) is None  # the same alpha goes on from where it is


def test_across_jumps_of_the_curvature_ends_are_not_extrapolated():
    program, states = _states("squared_hinge")
    assert admm_module._ahead(program.with_alpha(0.9 * program.alpha), states[-1]) is None


def test_a_start_that_is_given_is_not_extrapolated():
    program, (_, second) = _states()
    following = program.with_alpha(0.9 * program.alpha)
    coef = randn(*program.coef_shape)
    given = Admm().init_again(following, Point(coef, program.null_intercept), second)
    assert torch.equal(given.coef, coef)
    assert given.cache.system is second.cache.system
    on_the_way = Admm().init_again(following, Point(coef, program.null_intercept, pred=second.pred), second)
    assert not torch.equal(on_the_way.coef, coef)


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_ends_of_its_own_spare_a_path_iterations(loss, monkeypatch):
    tokens = randn(120, 24, 8)
    for position in range(1, 24):
        tokens[:, position] = 0.8 * tokens[:, position - 1] + 0.6 * tokens[:, position]
    program = make_program(loss, n=120, blocks=24, d=8, c=1)
    program = dataclasses.replace(program, map=DenseMap(tokens))
    grid = alpha_grid(program.alpha_max, n_alphas=30)

    def iterations():
        path = solve_path(program, Auto(), grid, tol=1e-4)
        assert max(path.gaps) <= 1e-4
        return sum(result.n_iter for result in path.results)

    with_ends = iterations()
    monkeypatch.setattr(admm_module, "_ahead", lambda program, previous: None)
    without = iterations()
    assert with_ends < 0.9 * without

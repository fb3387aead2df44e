"""The plan of ``Auto``: what it falls back on where the first choice leads nowhere."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from covering import covering
from sklearn.exceptions import ConvergenceWarning
from solver_cases import make_program, randn

from convexformer_solvers import (
    Auto,
    DenseMap,
    Fista,
    GatedMap,
    GroupNuclear,
    Huber,
    Program,
    SmoothingNewton,
    Status,
    alpha_grid,
    get_loss,
    get_penalty,
    solve,
    solve_path,
)
from convexformer_solvers.algorithms.admm import Admm, AdmmConfig
from convexformer_solvers.algorithms.admm.rho import largest_rho
from convexformer_solvers.algorithms.base import Solver
from convexformer_solvers.algorithms.block_descent import BlockDescent
from convexformer_solvers.algorithms.polish import PolishConfig
from convexformer_solvers.algorithms.stage import Patience, Stage
from convexformer_solvers.points import Point, null_point
from convexformer_solvers.reductions.base import Chain
from convexformer_solvers.reductions.precision import SinglePrecision

pytestmark = pytest.mark.usefixtures("steady_rates")


def with_stages(*stages, kind=Auto):
    """Auto whose plan is of these stages, whatever the program."""
    return kind(make_plan=lambda program, warm, config: stages)


def signs(scores):
    """Three ordered classes of scores, one column of signs each; the middle one is no half space."""
    label = torch.bucketize(scores, torch.tensor([-0.5, 0.5], dtype=scores.dtype))
    return 2 * torch.nn.functional.one_hot(label, 3).double() - 1


def weakly_regularised(loss, penalty, alpha, n=200, blocks=8, d=8, seed=0, scale=1.0):
    data = randn(n, blocks, d, seed=seed)
    scores = data[:, 0, 0] + 0.5 * randn(n, seed=seed + 50)
    y = scale * scores[:, None] if loss == "huber" else signs(scores)
    return Program(DenseMap(data), y, get_loss(loss), get_penalty(penalty), alpha, fit_intercept=True)


class TestWeakRegularisationOfSmallData:
    """Alternating directions alone take ten thousand steps on most of these, or diverge."""

    @pytest.mark.parametrize(("seed", "penalty"), [(0, "group_l2"), (1, "nuclear"), (2, "group_l2"), (3, "nuclear")])
    def test_squared_hinge(self, penalty, seed):
        program = weakly_regularised("squared_hinge", penalty, 1e-3, seed=seed)
        assert solve(program, Auto(), tol=1e-4, max_iter=4000).status is Status.CONVERGED

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize(("shape", "alpha", "scale"), [((20, 8, 5), 1e-4, 3.0), ((100, 4, 3), 0.01, 1e3)])
    def test_huber_with_few_samples_or_targets_in_large_units(self, shape, alpha, scale, seed):
        n, blocks, d = shape
        program = weakly_regularised("huber", "group_l2", alpha, n, blocks, d, seed, scale)
        assert solve(program, Auto(), tol=1e-4, max_iter=1000).status is Status.CONVERGED

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("loss", ["logistic", "squared_hinge"])
    def test_correlated_tokens(self, loss, seed):
        data = 0.3 * randn(200, 8, 8, seed=seed) + randn(200, 1, 8, seed=seed + 10)
        data = data * torch.logspace(0, -1.3, 8, dtype=data.dtype)
        y = signs(2 * data[:, 0, 0] + 0.3 * randn(200, seed=seed + 50))
        program = Program(DenseMap(data), y, get_loss(loss), get_penalty("group_l2"), 1.0, fit_intercept=True)
        program = program.with_alpha(1e-3 * program.alpha_max)
        assert solve(program, Auto(), tol=1e-4, max_iter=400).status is Status.CONVERGED

    @pytest.mark.parametrize("seed", range(5))
    def test_poisson(self, seed):
        # Gated features of a few radial basis functions: gradient steps alone are at 1e-5 after three thousand.
        generator = torch.Generator().manual_seed(seed)
        data = torch.exp(-((randn(120, 6, 1, seed=seed) - torch.linspace(-3, 3, 4)) ** 2) / 1.28)
        masks = torch.rand(120, 6, generator=generator) < 0.5
        scores = data[:, :2].sum((1, 2))[:, None] + 10 * randn(120, 2, seed=seed + 50)
        y = 1 + torch.poisson(scores.clamp(-4, 4).exp(), generator=generator)
        program = Program(GatedMap(data, masks), y, get_loss("poisson"), get_penalty("group_l2"), 1.0, None, True)
        program = program.with_alpha(0.005 * program.alpha_max)
        assert solve(program, Auto(), tol=1e-6, max_iter=2500).status is Status.CONVERGED


class _Astray(Solver):
    """Hands over a point that is worse than the best constant model."""

    name = "astray"

    def init(self, program, start):
        return start

    def step(self, program, state):
        return Point(torch.full(program.coef_shape, 1e12, dtype=program.y.dtype), program.null_intercept)

    def point(self, program, state):
        return state


class _Kept(Solver):
    """Remembers where it was started from."""

    name = "kept"
    init = _Astray.init
    point = _Astray.point

    def step(self, program, state):
        return state


def test_a_stage_never_starts_from_worse_than_the_best_constant_model():
    program = make_program("logistic", n=40, c=2, intercept=True)
    auto = with_stages(Stage(_Astray(), "goes astray", 1), Stage(_Kept(), "stays", 1))
    state = auto.init(program, null_point(program))
    state = auto.step(program, auto.step(program, state))
    point = auto.point(program, state)
    assert isinstance(state.running.stage.algorithm, _Kept)
    assert not point.coef.any()
    assert torch.equal(point.intercept, program.null_intercept)


def test_a_stage_after_one_that_went_astray_starts_from_the_best_end_before_it():
    program = make_program("logistic", n=40, c=2, intercept=True)
    good, *others = Stage(Admm(), "leads on", 9), Stage(_Astray(), "goes astray", 1), Stage(_Kept(), "stays", 1)
    auto, first = with_stages(good, *others), with_stages(good)
    state, alone = auto.init(program, null_point(program)), first.init(program, null_point(program))
    for _ in range(11):
        state = auto.step(program, state)
    for _ in range(9):
        alone = first.step(program, alone)
    assert isinstance(state.running.stage.algorithm, _Kept)
    assert auto.point(program, state).coef.any()
    assert torch.equal(auto.point(program, state).coef, first.point(program, alone).coef)


def test_ends_of_stages_count_where_a_later_one_goes_astray():
    program = make_program("logistic", n=40, c=2, intercept=True)
    good, astray = Stage(Admm(), "leads on", 9), Stage(_Astray(), "goes astray")
    with pytest.warns(ConvergenceWarning):
        alone = solve(program, with_stages(good), tol=1e-12, max_iter=9)
    with pytest.warns(ConvergenceWarning):
        result = solve(program, with_stages(good, astray), tol=1e-12, max_iter=12)
    assert result.certificate.gap == pytest.approx(alone.certificate.gap, rel=1e-6)
    assert torch.equal(result.coef, alone.coef)


# Thresholds so small that the loss is that of absolute residuals.
@pytest.mark.parametrize(
    ("seed", "threshold", "shape", "n_outputs"),
    covering([3, 4, 5, 6], [1e-6, 1e-5, 1e-4], [(15, 4, 2), (300, 8, 4), (20, 30, 2)], [1, 2]),
)
def test_median_regression_takes_few_steps(seed, threshold, shape, n_outputs):
    n, blocks, d = shape
    data, y, loss = randn(n, blocks, d, seed=seed), randn(n, n_outputs, seed=seed + 10), Huber(threshold)
    program = Program(DenseMap(data), y, loss, get_penalty("group_l2"), 1.0, fit_intercept=True)
    program = program.with_alpha(0.2 * program.alpha_max)
    assert solve(program, Auto(), tol=1e-6, max_iter=250).status is Status.CONVERGED


def test_a_state_is_handed_to_the_solver_that_it_is_of():
    # Both solvers have the same name for display, and neither could make anything of the other's state.
    class One(_Kept):
        def init_again(self, program, start, previous):
            assert previous[0] == type(self).__name__
            taken_over.append(previous[0])
            return self.init(program, start)

        def init(self, program, start):
            return type(self).__name__, start

        def point(self, program, state):
            return state[1]

    class Other(One):
        pass

    taken_over, program, state = [], make_program(), None
    start = null_point(program)
    for kind in (One, One, Other, Other, One):
        auto = with_stages(Stage(kind(), "the only one", 9))
        state = auto.init(program, start) if state is None else auto.init_again(program, start, state)
    assert taken_over == ["One", "Other"]


class TestUnits:
    def program(self, exponent):
        data = randn(50, 6, 3)
        y = data[:, 0, :1] + 0.1 * randn(50, 1, seed=1)
        unit = 10.0**exponent
        return Program(DenseMap(data * unit), y, get_loss("squared"), get_penalty("group_l2"), 0.01 * unit)

    @pytest.mark.parametrize("exponent", [-140, -60, -20, 20, 60, 140])
    def test_of_the_data_do_not_matter(self, exponent):
        expected, found = (solve(self.program(e), Auto(), tol=1e-6) for e in (0, exponent))
        assert found.certificate.primal == pytest.approx(expected.certificate.primal, rel=1e-5)

    @pytest.mark.parametrize("exponent", [-200, -160, 160, 200])
    def test_that_no_square_can_hold_are_told(self, exponent):
        with pytest.raises(ValueError, match="scale the features"):
            solve(self.program(exponent), Auto())

    @pytest.mark.parametrize("exponent", [-140, 140])
    def test_that_no_fourth_power_can_hold_are_told(self, exponent):
        program = self.program(exponent)
        program = dataclasses.replace(program, y=program.y.repeat(1, 2))
        with pytest.raises(ValueError, match="scale the features"):
            solve(program, Auto())

    def test_are_not_blamed_for_a_start_whose_slopes_underflow(self):
        program = Program(
            DenseMap(torch.tensor([[[0.7], [0.0]]]).double()),
            torch.ones((1, 1)).double(),
            get_loss("logistic"),
            get_penalty("group_l2"),
            1e-6,
        )
        far = Point(torch.tensor([[[800.0]], [[0.0]]]).double(), pred=torch.full((1, 1), 560.0).double())
        state = Admm().init(program, far)
        assert state.cache.largest_rho == pytest.approx(0.25 * 0.7**2)
        assert solve(program, Auto(), tol=1e-6).status is Status.CONVERGED

    def test_of_a_start_take_no_product_for_the_constant_model(self, monkeypatch):
        program = make_program("logistic", "group_l2")
        correlation = program.null_correlation
        monkeypatch.delattr(Program, "null_correlation")
        assert largest_rho(program, correlation) > 0


class FailsToFactorise(Fista):
    """Fista whose third step meets a matrix without a factor."""

    def step(self, program, state):
        if state.momentum > 2.0:
            torch.linalg.cholesky(torch.full((2, 2), math.nan))
        return super().step(program, state)


def test_a_stage_that_cannot_factorise_hands_over_to_the_next():
    failing, last = FailsToFactorise(), Fista()
    program = make_program("squared", n=12, ratio=0.01, gated=True, intercept=True)
    solvers = []

    class Watched(Auto):
        def step(self, program, state):
            state = super().step(program, state)
            solvers.append(state.running.stage.algorithm)
            return state

    auto = with_stages(Stage(failing, "fails"), Stage(last, "goes on"), kind=Watched)
    assert solve(program, auto, tol=1e-6).certificate.relative_gap <= 1e-6
    assert solvers[0] is failing
    assert solvers[-1] is last


@pytest.mark.parametrize("loss", ["squared", "huber", "logistic"])
def test_the_nuclear_penalty_of_one_output_takes_the_steps_of_the_group_one(loss):
    group = make_program(loss, "group_l2", n=80, blocks=12, d=4, c=1, ratio=0.03, intercept=True)
    nuclear = dataclasses.replace(group, penalty=GroupNuclear())
    results = [solve(program, Auto(), tol=1e-6) for program in (group, nuclear)]
    assert results[0].n_iter == results[1].n_iter
    assert torch.equal(results[0].coef, results[1].coef)
    assert results[1].certificate.primal == pytest.approx(results[0].certificate.primal, rel=1e-12)
    assert results[1].certificate.relative_gap <= 1e-6
    grid = alpha_grid(group.alpha_max, n_alphas=10)
    paths = [solve_path(program, Auto(), grid, tol=1e-4) for program in (group, nuclear)]
    assert [r.n_iter for r in paths[0].results] == [r.n_iter for r in paths[1].results]


class TestPlansOfOnesOwn:
    @pytest.mark.parametrize("stages", [[], [Fista()], ["fista"], None, Stage(Fista(), "alone")])
    def test_of_anything_but_stages_is_refused(self, stages):
        program = make_program()
        with pytest.raises(TypeError, match="make_plan must return at least one Stage"):
            solve(program, Auto(make_plan=lambda program, warm, config: stages))

    def test_a_plan_is_no_config(self):
        with pytest.raises(TypeError, match="config must be a AutoConfig"):
            Auto(lambda program, warm, config: ())

    def test_a_stage_is_of_a_solver(self):
        with pytest.raises(TypeError, match="algorithm must be a Solver"):
            Stage(Fista, "a class")

    @pytest.mark.parametrize("options", [{"polish": PolishConfig()}, {"patience": Patience()}, {"carries": True}])
    def test_a_stage_has_no_option_that_its_algorithm_would_not_heed(self, options):
        Stage(Admm(), "takes all of them", **options)
        with pytest.raises(TypeError, match="algorithm of a stage"):
            Stage(Fista(), "takes none", **options)

    @pytest.mark.parametrize("algorithm", [Admm(dtype="float32"), SmoothingNewton(), Fista()])
    def test_a_stage_reduces_programs_as_its_algorithm_asks_by_default(self, algorithm):
        program = make_program(intercept=True)
        state = with_stages(Stage(algorithm, "alone")).init(program, null_point(program))
        wanted = Chain.of(program, algorithm.reductions).links
        assert [link.reduction for link in state.running.chain.links] == [link.reduction for link in wanted]


class NeverBegins(Fista):
    """Fista that meets a matrix without a factor before its first step."""

    def init(self, program, start):
        raise torch.linalg.LinAlgError("no factor")


def test_a_stage_that_cannot_begin_hands_over_to_the_next():
    program = make_program("squared", n=12, ratio=0.01, intercept=True)
    stages = Stage(Fista(), "a start", max_steps=1), Stage(NeverBegins(), "fails"), Stage(Fista(), "goes on")
    assert solve(program, with_stages(*stages), tol=1e-6).certificate.relative_gap <= 1e-6
    with pytest.warns(ConvergenceWarning, match="did not converge in 1 iterations"):
        assert solve(program, with_stages(*stages[:2]), tol=1e-6).status is Status.STALLED


def test_a_last_stage_that_carries_on_a_stage_out_of_steps_ends_the_solve():
    program = make_program("squared", n=40, ratio=0.01)
    stages = Stage(Admm(), "a start", 3, (SinglePrecision(),)), Stage(Admm(), "its last steps", 3, carries=True)
    with pytest.warns(ConvergenceWarning, match="certified relative gap"):
        assert solve(program, with_stages(*stages), tol=1e-12).n_iter <= 2 * 3


@pytest.mark.parametrize("max_steps", [1, 50])
def test_a_stage_that_carries_begins_anew_after_another_algorithm(max_steps):
    program = make_program("squared", n=40, c=1, ratio=0.01)
    first = Stage(BlockDescent(), "another algorithm", 2, patience=Patience())
    last = Stage(Fista(), "not needed")
    stages = first, Stage(Admm(), "carries nothing", max_steps, carries=True), last
    state = with_stages(*stages).init(program, null_point(program))
    for _ in range(3):
        state = with_stages(*stages).step(program, state)
    assert isinstance(state.running.stage.algorithm, Admm)
    assert solve(program, with_stages(*stages), tol=1e-8).certificate.relative_gap <= 1e-8


def test_a_path_of_admm_whose_rho_is_never_set_anew():
    program = make_program("squared", n=40, ratio=0.1)
    path = solve_path(program, Admm(config=AdmmConfig(adapt_at=())), [0.5, 0.2, 0.1], tol=1e-6)
    assert all(result.certificate.relative_gap <= 1e-6 for result in path.results)

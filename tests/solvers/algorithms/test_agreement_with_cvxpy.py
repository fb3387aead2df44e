"""Every solver against cvxpy, over every registered loss and penalty."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch
from covering import covering
from sklearn.exceptions import ConvergenceWarning
from solver_cases import BOTH, LOSS_NAMES, PENALTY_NAMES, make_program, randn, random_weight

from convexformer_solvers import (
    LOSSES,
    PENALTIES,
    SOLVERS,
    Admm,
    Auto,
    DenseMap,
    Exact,
    Fista,
    GroupL2,
    GroupNuclear,
    Logistic,
    PathInterrupted,
    Poisson,
    Program,
    SemismoothNewton,
    Softmax,
    SolverInterrupted,
    SolverUnavailableError,
    Squared,
    Status,
    alpha_grid,
    certify,
    check_loss,
    check_penalty,
    check_solver,
    get_penalty,
    get_solver,
    solve,
    solve_path,
)
from convexformer_solvers.algorithms.block_descent import BlockDescent
from convexformer_solvers.algorithms.fista import GreedyFista
from convexformer_solvers.algorithms.polish import PolishConfig
from convexformer_solvers.algorithms.proximal_dual import ProximalDual
from convexformer_solvers.algorithms.stage import Stage
from convexformer_solvers.algorithms.working_set import WorkingSet, WorkingSetConfig
from convexformer_solvers.reductions.center import Center


@pytest.mark.parametrize(("loss", "penalty", "gated", "intercept"), covering(LOSS_NAMES, PENALTY_NAMES, BOTH, BOTH))
def test_fista_agrees_with_cvxpy(loss, penalty, gated, intercept):
    program = make_program(loss, penalty, gated=gated, intercept=intercept, weighted=intercept, ratio=0.1, n=24)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # cvxpy's accuracy is its own
        reference = solve(program, Exact(), tol=1e-7).certificate
    ours = solve(program, Fista(), tol=1e-8, max_iter=100_000).certificate
    assert ours.relative_gap <= 1e-8
    assert abs(ours.primal - reference.primal) <= 1e-6 * abs(reference.primal)
    # The certificate brackets the optimum, of which cvxpy's value is an upper estimate.
    assert ours.dual <= reference.primal * (1 + 1e-9)
    assert reference.dual <= ours.primal * (1 + 1e-9)


def assert_brackets_agree(one, other):
    assert one.dual <= other.primal * (1 + 1e-9)
    assert other.dual <= one.primal * (1 + 1e-9)


@pytest.mark.parametrize(
    ("loss", "gated", "intercept", "n"),
    # Fewer and more samples than columns: both forms of the Newton system.
    covering([loss for loss in LOSSES if LOSSES[loss].output_separable], BOTH, BOTH, [12, 60]),
)
def test_semismooth_newton_agrees_with_fista(loss, gated, intercept, n):
    program = make_program(loss, "group_l2", gated=gated, intercept=intercept, weighted=True, ratio=0.1, n=n)
    newton = solve(program, SemismoothNewton(), tol=1e-9)
    fista = solve(program, Fista(), tol=1e-6, max_iter=100_000)
    assert newton.certificate.relative_gap <= 1e-9
    assert_brackets_agree(newton.certificate, fista.certificate)


@pytest.mark.parametrize(
    ("loss", "penalty", "gated", "size"),
    covering(LOSS_NAMES, PENALTY_NAMES, BOTH, [(12, True), (60, False), (60, True)]),  # both sides of the ridge system
)
def test_admm_and_auto_agree_with_fista(loss, penalty, gated, size):
    n, intercept = size
    program = make_program(loss, penalty, gated=gated, intercept=intercept, weighted=True, ratio=0.1, n=n)
    fista = solve(program, Fista(), tol=1e-6, max_iter=100_000)
    solvers = [Auto()] if loss == "poisson" else [Auto(), Admm()]
    for solver in solvers:
        result = solve(program, solver, tol=1e-8, max_iter=5_000)
        assert result.certificate.relative_gap <= 1e-8
        assert_brackets_agree(result.certificate, fista.certificate)


def test_admm_says_what_it_cannot_do():
    with pytest.raises(TypeError, match="finite smoothness"):
        solve(make_program("poisson"), Admm())


@pytest.mark.parametrize("solver", [Admm(), Auto()])
@pytest.mark.parametrize("ratio", [0.1, 0.01])
@pytest.mark.parametrize("gated", [False, True])
def test_float32_data_reach_1e_5(solver, ratio, gated):
    program = make_program("squared", gated=gated, intercept=True, ratio=ratio, n=60)
    result = solve(program, solver, tol=1e-5, dtype=torch.float32)
    assert result.coef.dtype == torch.float32
    assert result.certificate.relative_gap <= 1e-5


def test_semismooth_newton_is_sharp_where_tokens_are_correlated_and_regularisation_weak():
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn((80, 1, 8), generator=generator, dtype=torch.float64)
    data = shared + 0.2 * torch.randn((80, 20, 8), generator=generator, dtype=torch.float64) + 2.0
    y = data[:, 3] @ torch.randn((8, 2), generator=generator, dtype=torch.float64)
    y = y + 0.5 * torch.randn(y.shape, generator=generator, dtype=torch.float64)
    program = Program(DenseMap(data), y, Squared(), GroupL2(), 1.0, fit_intercept=True)
    program = program.with_alpha(0.003 * program.alpha_max)
    result = solve(program, SemismoothNewton(), tol=1e-9, max_iter=300)
    assert result.certificate.relative_gap <= 1e-9


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (make_program("squared", "nuclear"), "group-l2 penalty"),
        (make_program("softmax", "group_l2"), "separable loss"),
    ],
)
def test_semismooth_newton_says_what_it_cannot_do(program, message):
    with pytest.raises(TypeError, match=message):
        solve(program, SemismoothNewton())


@pytest.mark.parametrize("name", SOLVERS)
def test_registered_solvers_keep_the_contract(name):
    check_solver(get_solver(name))


@pytest.mark.parametrize(
    "solver",
    [
        BlockDescent(),
        ProximalDual(Stage(Admm(), "solves each proximal step", reductions=(Center(),), polish=PolishConfig())),
        WorkingSet(Stage(BlockDescent(), "solves the set")),
        WorkingSet(Stage(Admm(), "solves the set", polish=PolishConfig()), WorkingSetConfig(form="root")),
        WorkingSet(Stage(GreedyFista(), "takes the steps"), WorkingSetConfig(form="samples", ends_in_all=True)),
    ],
    ids=lambda solver: solver.name,
)
def test_those_that_auto_is_made_of_keep_it_too(solver):
    check_solver(solver)


def test_check_solver_needs_a_program_that_the_solver_applies_to():
    class NeedsMore(Fista):
        requires_of_loss = ("no_such_method",)

    with pytest.raises(AssertionError, match="applies to none of the programs here, as it needs"):
        check_solver(NeedsMore())


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_check_solver_has_squared_programs_with_and_without_an_intercept(fit_intercept):
    class OfOneKind(Fista):
        def unmet_requirement(self, program):
            is_of_kind = program.loss.quadratic and program.fit_intercept == fit_intercept
            return None if is_of_kind else "another program"

    check_solver(OfOneKind())


@pytest.mark.parametrize("kind", list(LOSSES.values()))
@pytest.mark.parametrize("seed", range(3))
def test_registered_losses_keep_the_contract(kind, seed):
    check_loss(kind(), seed=seed)


@pytest.mark.parametrize("kind", list(PENALTIES.values()))
def test_registered_penalties_keep_the_contract(kind):
    check_penalty(kind())


class WrongPoint(Fista):
    """Hands out a point that is not the one it reached."""

    def point(self, program, state):
        point = super().point(program, state)
        return point._replace(coef=point.coef * 1.01)


def test_check_solver_rejects_a_wrong_solver():
    with pytest.warns(ConvergenceWarning), pytest.raises(AssertionError, match="and fit_intercept=True: relative gap"):
        check_solver(WrongPoint())


class NoConjugate(Squared):
    def conjugate(self, u, y):
        return torch.full_like(u[:, 0], math.nan)


def test_a_loss_without_conjugate_has_no_gap_and_never_converges():
    program = make_program()
    program = Program(program.map, program.y, NoConjugate(), program.penalty, program.alpha)
    with pytest.warns(ConvergenceWarning, match="relative gap nan: the loss defines no method 'conjugate'"):
        result = solve(program, Fista(), max_iter=20)
    assert math.isnan(result.certificate.gap)
    assert math.isnan(result.certificate.relative_gap)


def test_the_warning_of_a_gap_that_is_nan_covers_a_conjugate_that_is_defined():
    program = make_program()
    program = Program(program.map, program.y, NoConjugate(), program.penalty, program.alpha)
    with pytest.warns(ConvergenceWarning, match="or one that gives nan.*inf outside its domain"):
        solve(program, Fista(), max_iter=20)


@pytest.mark.parametrize("penalty", [GroupL2(), GroupNuclear()])
@pytest.mark.parametrize("loss", [Squared(), Logistic(), Softmax(), Poisson()])
def test_alpha_max_is_the_threshold(loss, penalty):
    program = make_program(loss, penalty, intercept=True, weighted=True)
    above, below = (
        solve(program.with_alpha(factor * program.alpha_max), Fista(), tol=1e-10, max_iter=50_000)
        for factor in (1.0001, 0.99)
    )
    assert (above.coef == 0).all()
    assert (below.coef != 0).any()


def test_the_loop_stops_reports_and_keeps_the_best_point():
    program = make_program(ratio=0.01, gated=True, n=12)
    with pytest.warns(ConvergenceWarning, match=r"relative gap \S+ > tol 1.000e-09.*max_iter \(now 3\)"):
        result = solve(program, Fista(), tol=1e-9, max_iter=3)
    assert result.status is Status.MAX_ITER
    assert result.n_iter == 3
    again = certify(program, result.coef, result.intercept)
    assert again.primal == result.certificate.primal
    assert again.dual <= result.certificate.dual
    full = solve(program, Fista(), tol=1e-9, max_iter=100_000)
    assert (np.diff(full.history.primal) <= 0).all()
    assert (np.diff(full.history.dual) >= 0).all()
    assert (np.diff(full.history.iteration) > 0).all()
    warm = solve(program, Fista(), tol=1e-9, start=(full.coef, full.intercept))
    assert warm.n_iter < full.n_iter


def interrupt_at(iteration):
    def callback(progress):
        if progress.iteration >= iteration:
            raise KeyboardInterrupt

    return callback


def test_interrupts_hand_over_what_there_is():
    program = make_program(ratio=0.01, gated=True, n=12)
    with pytest.raises(SolverInterrupted) as caught:
        solve(program, Fista(), tol=1e-12, callback=interrupt_at(4))
    result = caught.value.result
    assert result.status is Status.INTERRUPTED
    assert certify(program, result.coef, result.intercept).primal == result.certificate.primal
    seen = []

    def third_alpha(progress):
        seen.append(progress)
        if progress.iteration == 1 and sum(p.iteration == 1 for p in seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(PathInterrupted) as caught:
        solve_path(program, Fista(), alpha_grid(program.alpha_max, 5), tol=1e-4, callback=third_alpha)
    assert len(caught.value.path.alphas) == len(caught.value.path.results) == 2


def test_paths_agree_with_separate_solves_and_rise_with_alpha():
    program = make_program(gated=True, intercept=True, weighted=True)
    path = solve_path(program, Fista(), alpha_grid(program.alpha_max, 6), tol=1e-8, max_iter=100_000)
    assert path.coefs.shape == (6, *program.coef_shape)
    assert max(path.gaps) <= 1e-8
    for alpha, result in zip(path.alphas, path.results, strict=True):
        alone = solve(program.with_alpha(alpha), Fista(), tol=1e-8, max_iter=100_000).certificate
        assert alone.dual <= result.certificate.primal * (1 + 1e-9)
        assert result.certificate.dual <= alone.primal * (1 + 1e-9)
    assert (np.diff([result.certificate.primal for result in path.results]) <= 1e-12).all()


@pytest.mark.parametrize("options", [{"n_alphas": 0}, {"eps": 0.0}, {"eps": 1.5}])
def test_bad_grids(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        alpha_grid(1.0, **options)


def test_float32_is_certified_in_float64_at_the_point_it_returns():
    program = make_program(ratio=0.2, intercept=True)
    result = solve(program, Fista(), tol=1e-5, dtype=torch.float32)
    assert result.coef.dtype == torch.float32
    matrix = program.map.as_matrix().numpy()
    pred = matrix @ result.coef.double().numpy().reshape(matrix.shape[1], -1) + result.intercept.double().numpy()
    decay = np.linalg.norm(result.coef.double().numpy(), axis=1).sum()
    by_hand = 0.5 * np.mean(np.sum((pred - program.y.numpy()) ** 2, axis=1)) + program.alpha * decay
    assert result.certificate.primal == pytest.approx(by_hand, rel=1e-13)


def test_invariances_of_the_optimum():
    program = make_program(weighted=True, intercept=True, ratio=0.1)

    def optimum(weight, order):
        changed = Program(
            program.map.rows(order), program.y[order], Squared(), GroupL2(), program.alpha, weight[order], True
        )
        return solve(changed, Fista(), tol=1e-10, max_iter=50_000).certificate.primal

    n = len(program.y)
    weight = random_weight(n)
    wanted = optimum(weight, torch.arange(n))
    assert optimum(weight, torch.randperm(n, generator=torch.Generator().manual_seed(0))) == pytest.approx(wanted)
    assert optimum(7.0 * weight, torch.arange(n)) == pytest.approx(wanted)
    assert optimum(weight, (weight > 0).nonzero()[:, 0]) == pytest.approx(wanted)


def test_solvers_that_are_absent_say_so():
    with pytest.raises(SolverUnavailableError, match=r"GUROBI.*not installed.*installed are"):
        solve(make_program(), get_solver("gurobi"))


def mosek_obstacle():
    try:
        solve(make_program(), Exact("MOSEK"))
    except SolverUnavailableError as error:
        return str(error)
    return None


def test_mosek_agrees_or_says_what_to_do():
    obstacle = mosek_obstacle()
    if obstacle is None:
        ours, theirs = (solve(make_program(), solver, tol=1e-6).certificate for solver in (Fista(), Exact("MOSEK")))
        assert ours.primal == pytest.approx(theirs.primal, rel=1e-5)
        return
    assert "convexformer[mosek]" in obstacle or "MOSEKLM_LICENSE_FILE" in obstacle
    pytest.skip(obstacle)


@pytest.mark.parametrize("n", [20, 700])  # few and many samples, for which `auto` has other plans
@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
@pytest.mark.parametrize("solver", ["auto", "admm", "fista", "column_generation"])
def test_a_map_without_blocks_is_one_of_a_single_block(solver, penalty, n):
    data = randn(n, 600 if n == 700 else 5)
    y = data[:, :1] + randn(n, 1, seed=1)
    program = Program(DenseMap(data), y, Squared(), get_penalty(penalty), 1.0)
    program = program.with_alpha(0.3 * program.alpha_max)
    one_block = dataclasses.replace(program, map=DenseMap(data[:, None]))
    tol = 1e-3 if solver == "column_generation" else 1e-6
    here, there = (solve(each, get_solver(solver), tol=tol) for each in (program, one_block))
    assert here.coef.shape == (data.shape[1], 1)
    assert here.certificate.relative_gap <= tol
    assert here.certificate.primal == pytest.approx(there.certificate.primal, rel=2 * tol)


def test_check_solver_rejects_one_that_changes_the_state_before():
    class InPlace(Fista):
        def init(self, program, start):
            return super().init(program, start), torch.zeros(1)

        def step(self, program, state):
            inner, n_steps = state
            n_steps += 1
            return super().step(program, inner), n_steps

        def point(self, program, state):
            return super().point(program, state[0])

        def finished(self, state):
            return super().finished(state[0])

    with pytest.raises(AssertionError, match="step changed tensors of the state before"):
        check_solver(InPlace())

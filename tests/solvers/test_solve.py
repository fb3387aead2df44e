"""The solve loop and the solvers behind it: stopping, warnings, interrupts, precision."""

import copy
import dataclasses
import functools
import itertools
import math
import pickle
import re
import sys
import warnings

import cvxpy as cp
import numpy as np
import pytest
import torch
from covering import covering
from sklearn.exceptions import ConvergenceWarning
from solver_cases import (
    BOTH,
    LOSS_NAMES,
    PENALTY_NAMES,
    cases,
    cvxpy_value,
    fit,
    in_turn,
    make_program,
    numpy_primal,
    randn,
)

from convexformer_solvers import (
    SOLVERS,
    Auto,
    DenseMap,
    Exact,
    Fista,
    GatedMap,
    GroupL2,
    PathInterrupted,
    Point,
    Program,
    Progress,
    Softmax,
    SolverInterrupted,
    Squared,
    Status,
    certify,
    check_solver,
    get_solver,
    iterate_path,
    solve,
    solve_path,
)
from convexformer_solvers.algorithms.base import Solver
from convexformer_solvers.points import point_at
from convexformer_solvers.result import History

every_penalty = pytest.mark.parametrize("penalty", PENALTY_NAMES)
may_warn = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def hard_program(**options):
    """A program on which accelerated proximal steps need dozens of iterations."""
    return make_program(**{"ratio": 0.03, "gated": True, "n": 12, "intercept": True, **options})


@functools.cache  # the same for every solver
def small_program_and_optimum(loss, penalty):
    program = make_program(loss, penalty, intercept=True, weighted=True, ratio=0.4, n=12)
    return program, fit(program, tol=1e-8).certificate


class TestAgreement:
    @pytest.mark.parametrize(("loss", "penalty"), cases())
    def test_certificate_brackets_the_value_of_an_independent_model(self, loss, penalty):
        program = make_program(loss, penalty, gated=True, intercept=True, weighted=True, ratio=0.1, n=12)
        value, certificate = cvxpy_value(program), fit(program, tol=1e-8).certificate
        assert certificate.relative_gap <= 1e-8
        assert certificate.dual <= value + 1e-7 * program.null_value  # cvxpy may end below the optimum by its accuracy
        assert certificate.primal >= value - 1e-7 * program.null_value
        assert certificate.primal == pytest.approx(value, rel=1e-6)

    @may_warn
    @pytest.mark.parametrize("name", sorted(SOLVERS))
    def test_every_solver_reaches_the_optimum_of_what_it_accepts(self, name):
        solver, accepted = get_solver(name), 0
        for loss, penalty in itertools.product(LOSS_NAMES, PENALTY_NAMES):
            program, best = small_program_and_optimum(loss, penalty)
            try:
                certificate = solve(program, solver, tol=1e-6).certificate
            except TypeError as refusal:
                if name not in str(refusal):
                    raise
                continue
            accepted += 1
            assert certificate.primal == pytest.approx(best.primal, abs=1e-5 * program.null_value)
            assert certificate.dual <= best.primal + 1e-9 * program.null_value
        assert accepted > 0

    @every_penalty
    def test_exact_hands_over_a_dual_point_as_good_as_its_primal_point(self, penalty):
        program = make_program("squared_hinge", penalty, intercept=True, weighted=True)
        state = Exact().step(program, Exact().init(program, origin(program)))
        hint = Exact().point(program, state).dual
        poor = randn(*program.coef_shape)
        helped = certify(program, poor, dual_hint=hint)
        assert helped.dual == pytest.approx(fit(program).certificate.primal, rel=1e-5)

    def test_gated_design_is_never_formed(self, monkeypatch):
        def refuse(self):
            raise AssertionError("the gated design was formed")

        monkeypatch.setattr(GatedMap, "as_matrix", refuse)
        program = make_program("logistic", "nuclear", gated=True, intercept=True, weighted=True)
        result = fit(program, tol=1e-8)
        assert result.status is Status.CONVERGED
        assert certify(program, result.coef, result.intercept).relative_gap <= 1e-7
        with pytest.raises(AssertionError, match="was formed"):
            solve(program, Exact())


def origin(program):
    return Point(torch.zeros(program.coef_shape, dtype=torch.float64), torch.zeros(program.y.shape[1]).double())


class WrongPoint(Fista):
    def point(self, program, state):
        point = super().point(program, state)
        return point._replace(coef=1.01 * point.coef)


class WrongIntercept(Fista):
    def point(self, program, state):
        point = super().point(program, state)
        return point._replace(intercept=point.intercept + 0.05 * program.fit_intercept)


class NeverMoves(Fista):
    def step(self, program, state):
        return state


class MovesOnce(Fista):
    def finished(self, state):
        return True


class NoExactZeros(Fista):
    def point(self, program, state):
        point = super().point(program, state)
        return point._replace(coef=point.coef + 1e-12)


class OverwritesTargets(Fista):
    def step(self, program, state):
        program.y.mul_(1 - 1e-9)
        return super().step(program, state)


class IgnoresTheStart(Fista):
    """Slower the better the start."""

    def init(self, program, start):
        return super().init(program, start._replace(coef=start.coef + 100.0 * (start.coef != 0)))


@may_warn
@pytest.mark.parametrize(
    "kind", [WrongPoint, WrongIntercept, NeverMoves, MovesOnce, NoExactZeros, OverwritesTargets, IgnoresTheStart]
)
def test_check_rejects_a_wrong_solver(kind):
    with pytest.raises(AssertionError):
        check_solver(kind())


def test_check_rejects_a_solver_whose_name_is_no_text():
    class Nameless(Fista):
        name = None

    with pytest.raises(AssertionError, match=r"^Nameless\.name must be a str, got None$"):
        check_solver(Nameless())


class HalfConjugate(Squared):
    def conjugate(self, u, y):
        return 0.25 * u.square().sum(1) + (u * y).sum(1)


class HalfDualNorm(GroupL2):
    def group_dual_norms(self, coef):
        return 0.5 * super().group_dual_norms(coef)


@pytest.mark.parametrize("wrong", [{"loss": HalfConjugate()}, {"penalty": HalfDualNorm()}])
def test_a_bound_above_an_objective_is_warned_of(wrong):
    program = dataclasses.replace(make_program("squared", "group_l2"), **wrong)
    with pytest.warns(ConvergenceWarning, match=r"contradicts itself.*check_loss.*check_penalty") as caught:
        certificate = solve(program, Fista()).certificate
    assert certificate.dual > certificate.primal
    assert caught[0].filename == __file__


@pytest.mark.parametrize("wrong", [lambda coef: coef, lambda coef: (coef, None), lambda coef: None])
def test_a_point_that_is_none_is_named(wrong):
    class ReturnsNoPoint(Fista):
        def point(self, program, state):
            return wrong(super().point(program, state).coef)

    with pytest.raises(TypeError, match=r"what point of solver 'fista' returns must be a Point, as Point\(coef\)"):
        solve(make_program(), ReturnsNoPoint())


def test_coefficients_that_are_no_tensor_are_named():
    class ReturnsArrays(Fista):
        def point(self, program, state):
            return Point(super().point(program, state).coef.numpy())

    with pytest.raises(TypeError, match="coef of the point of solver 'fista' must be a Tensor"):
        solve(make_program(), ReturnsArrays())


@pytest.mark.parametrize("name", ["intercept", "dual", "pred", "fitted", "correlation"])
def test_other_parts_of_a_point_that_are_no_tensor_are_named(name):
    class ReturnsArrays(Fista):
        def point(self, program, state):
            return super().point(program, state)._replace(**{name: np.zeros(program.y.shape[-1])})

    with pytest.raises(TypeError, match=f"{name} of the point of solver 'fista' must be a Tensor"):
        solve(make_program(), ReturnsArrays())


class FailsToFactorise(Fista):
    """Fista whose third step meets a matrix without a factor."""

    def step(self, program, state):
        if state.momentum > 2.0:
            torch.linalg.cholesky(torch.full((2, 2), math.nan))
        return super().step(program, state)


class NanFromTheFirst(Fista):
    def point(self, program, state):
        return Point(super().point(program, state).coef * math.nan)


class TestStopping:
    def test_points_that_are_not_finite_are_told_and_finite_ones_are_not(self):
        program = hard_program()
        with pytest.warns(ConvergenceWarning, match=r"point of iteration [1-9]\d* was NaN or infinite") as caught:
            result = solve(program, NanFromTheFirst(), max_iter=7)
        assert result.certificate.primal == pytest.approx(program.null_value, rel=1e-12)
        with pytest.warns(ConvergenceWarning) as finite:
            solve(program, Fista(), tol=1e-9, max_iter=7)
        assert "NaN" not in str(finite[0].message)
        assert len(caught) == len(finite) == 1

    def test_a_factorisation_that_fails_on_the_way_keeps_the_point_before(self):
        program = hard_program()
        with pytest.warns(ConvergenceWarning, match="certified relative gap"):
            result = solve(program, FailsToFactorise(), tol=1e-9)
        assert result.status is Status.STALLED
        assert result.n_iter > 0
        own = certify(program, result.coef, result.intercept)
        assert result.certificate.primal == pytest.approx(own.primal, rel=1e-12)
        assert result.certificate.primal < program.null_value

    def test_converged(self):
        program = make_program()
        result = solve(program, Fista(), tol=1e-6)
        assert result.status is Status.CONVERGED
        assert result.certificate.relative_gap <= 1e-6
        assert result.solver == "fista"

    @pytest.mark.parametrize("max_iter", [1, 3, 7])
    def test_out_of_iterations_says_gap_tolerance_and_remedy(self, max_iter):
        program = hard_program()
        with pytest.warns(ConvergenceWarning) as caught:
            result = solve(program, Fista(), tol=1e-9, max_iter=max_iter)
        message = str(caught[0].message)
        assert f"{result.certificate.relative_gap:.3e}" in message
        assert "1.000e-09" in message
        assert f"max_iter (now {max_iter})" in message
        assert result.status is Status.MAX_ITER
        assert result.n_iter == max_iter
        assert caught[0].filename == __file__  # points at the caller of solve

    def test_stalled_in_float32_recommends_float64(self):
        program = make_program(intercept=True)
        with pytest.warns(ConvergenceWarning, match=r"tol 0\.000e\+00.*float64"):
            result = solve(program, Fista(), tol=0, dtype=torch.float32)
        assert result.status is Status.STALLED

    def test_the_recommended_precision_is_accepted(self):
        program = make_program(intercept=True)
        with pytest.warns(ConvergenceWarning) as caught:
            solve(program, Fista(), tol=1e-10, dtype="float32")
        (name,) = re.findall(r"\(dtype='(.*)'\)", str(caught[0].message))
        assert solve(program.to(torch.float32), Fista(), tol=1e-10, dtype=name).status is Status.CONVERGED

    @may_warn
    def test_stalled_in_float64_is_as_good_as_the_precision(self):
        result = solve(make_program(), Fista(), tol=0)
        assert result.status in (Status.STALLED, Status.CONVERGED)
        assert result.certificate.relative_gap <= 1e-12

    def test_callback_sees_progress_and_stops(self):
        seen = []

        def callback(progress):
            seen.append(progress)
            return len(seen) == 3

        program = hard_program()
        result = solve(program, Fista(), tol=1e-12, callback=callback)
        assert result.status is Status.STOPPED
        assert len(seen) == 3
        assert all(isinstance(progress, Progress) for progress in seen)
        assert [progress.iteration for progress in seen] == result.history.iteration
        last = seen[-1]
        assert last.coef.shape == program.coef_shape
        assert last.intercept.shape == (2,)
        assert last.certificate == result.certificate
        assert numpy_primal(program, last.coef, last.intercept) == pytest.approx(last.certificate.primal, rel=1e-13)

    @pytest.mark.parametrize("answer", [None, False, 0])
    def test_callback_that_does_not_say_true_goes_on(self, answer):
        result = solve(hard_program(), Fista(), tol=1e-6, callback=lambda progress: answer)
        assert result.status is Status.CONVERGED

    def test_callback_may_compare_with_numpy(self):
        # numpy's comparisons give np.bool_, which is not the object True.
        target = np.float64(0.5)
        result = solve(hard_program(), Fista(), tol=1e-12, callback=lambda p: p.certificate.relative_gap < target)
        assert result.status is Status.STOPPED

    def test_convergence_counts_even_if_the_callback_stops(self):
        result = solve(make_program(), Fista(), tol=1e9, callback=lambda progress: True)
        assert result.status is Status.CONVERGED

    def test_errors_of_the_callback_are_not_swallowed(self):
        def callback(progress):
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            solve(make_program(), Fista(), callback=callback)

    @pytest.mark.parametrize("tol", [-1e-3, math.nan, "1e-3", None])
    def test_wrong_tol(self, tol):
        with pytest.raises(ValueError, match="tol must be a non-negative number"):
            solve(make_program(), Fista(), tol=tol)

    @pytest.mark.parametrize("max_iter", [0, -5, 2.5, math.inf, math.nan, "10", None])
    def test_wrong_max_iter(self, max_iter):
        with pytest.raises(ValueError, match="max_iter must be a positive integer"):
            solve(make_program(), Fista(), max_iter=max_iter)

    def test_wrong_callback(self):
        for follow in (solve, solve_path, iterate_path):
            with pytest.raises(TypeError, match="callback must be None or callable with a Progress, got 3"):
                follow(make_program(), Fista(), callback=3)

    def test_wrong_answers_of_callbacks(self):
        for answer in (np.zeros(0), np.zeros(2), torch.zeros(2)):
            for follow in (solve, solve_path):
                with pytest.raises(TypeError, match="callback must return True, False or None, got "):
                    follow(make_program(), Fista(), callback=lambda progress, answer=answer: answer)
        assert solve(make_program(), Fista(), tol=0, callback=lambda progress: np.True_).status is Status.STOPPED

    def test_numpy_integers_are_iteration_counts(self):
        assert solve(make_program(), Fista(), tol=1.0, max_iter=np.int64(5)).n_iter <= 5

    @pytest.mark.parametrize(
        "start",
        [(randn(2, 2, 2), randn(2)), (randn(3, 2, 2), randn(3)), (randn(3, 2), randn(2))],
        ids=["blocks", "intercept", "axes"],
    )
    def test_wrong_start(self, start):
        with pytest.raises(ValueError, match=r"start must be .*\(3, 2, 2\)"):
            solve(make_program(), Fista(), start=start)

    def test_a_dual_point_of_another_program_is_told(self):
        with pytest.raises(ValueError, match=r"a dual point of shape \(\d+, 2\), got .*, \(5, 2\)"):
            solve(make_program(), Fista(), start=(randn(3, 2, 2), randn(2), randn(5, 2)))

    def test_a_dual_point_of_a_start_that_is_not_finite_or_real(self):
        program = make_program("squared", "group_l2")
        start = torch.zeros(program.coef_shape), torch.zeros(program.coef_shape[-1])
        with pytest.raises(ValueError, match="start must be finite"):
            solve(program, Fista(), start=(*start, torch.full_like(program.y, torch.nan)))
        with pytest.raises(ValueError, match=r"real numbers, got .* and torch\.complex128"):
            solve(program, Fista(), start=(*start, program.y.to(torch.complex128)))

    def test_start_that_is_not_finite(self):
        start = torch.full((3, 2, 2), math.nan, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        with pytest.raises(ValueError, match="finite"):
            solve(make_program(), Fista(), start=start)

    @may_warn
    def test_start_where_the_objective_overflows_ends(self):
        calls = []

        class Counted(DenseMap):
            def matvec(self, coef):
                calls.append(1)
                if len(calls) > 20_000:
                    raise RuntimeError("the step search never ends")
                return super().matvec(coef)

        program = make_program("poisson")
        counted = Program(Counted(program.map.data), program.y, program.loss, program.penalty, program.alpha)
        start = torch.full(program.coef_shape, 1e6, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        try:
            certificate = solve(counted, Fista(), start=start, max_iter=100).certificate
        except ValueError:
            return  # a refusal is as good
        assert certificate.dual <= fit(program).certificate.primal


class TestResultsAreNobodyElses:
    @pytest.mark.parametrize("intercept", [False, True])
    @pytest.mark.parametrize("name", ["auto", "admm", "column_generation", "fista"])
    @may_warn
    def test_changing_one_changes_neither_the_program_nor_other_results(self, name, intercept):
        program = make_program("squared", "group_l2", n=20, intercept=intercept, c=1)
        before = program.null_intercept.clone()
        grid = [1.5 * program.alpha_max, 0.5 * program.alpha_max, 0.1 * program.alpha_max]
        results = []
        for result in iterate_path(program, get_solver(name), grid, tol=1e-3):
            results.append((result.coef.clone(), result.intercept.clone(), result))
            result.coef.add_(100.0)
            result.intercept.add_(100.0)
        for alpha, (coef, intercept_found, result) in zip(grid, results, strict=True):
            own = certify(program.with_alpha(alpha), coef, intercept_found)
            assert result.certificate.primal == pytest.approx(own.primal, rel=1e-12)
            assert result.certificate.relative_gap <= 1e-3
        for coef, intercept_found, result in results:
            torch.testing.assert_close(result.coef, coef + 100.0)
            torch.testing.assert_close(result.intercept, intercept_found + 100.0)
        assert torch.equal(program.null_intercept, before)


class TestHistory:
    @pytest.mark.parametrize(("loss", "penalty"), in_turn(0))
    def test_only_improves(self, loss, penalty):
        result = fit(hard_program(loss=loss, penalty=penalty), tol=1e-4)
        history = result.history
        assert (np.diff(history.iteration) > 0).all()
        assert (np.diff(history.seconds) >= 0).all()
        assert (np.diff(history.primal) <= 0).all()
        assert (np.diff(history.dual) >= 0).all()
        assert (np.diff(history.relative_gap) <= 0).all()
        assert history.iteration[-1] == result.n_iter
        assert history.primal[-1] == result.certificate.primal
        assert history.dual[-1] == result.certificate.dual
        assert len({len(column) for column in vars(history).values()}) == 1
        assert isinstance(history, History)

    @pytest.mark.parametrize(("loss", "penalty"), in_turn(1))
    def test_certificate_is_that_of_the_returned_point(self, loss, penalty):
        program = hard_program(loss=loss, penalty=penalty)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            result = solve(program, Fista(), tol=1e-10, max_iter=25)
        assert numpy_primal(program, result.coef, result.intercept) == pytest.approx(
            result.certificate.primal, rel=1e-13
        )
        assert float(program.dual(result.certificate.dual_point)) == result.certificate.dual
        assert certify(program, result.coef, result.intercept).primal == result.certificate.primal


class TestWarmStart:
    @pytest.mark.parametrize(("loss", "penalty"), in_turn(1))
    def test_start_from_the_solution_is_quicker(self, loss, penalty):
        program = hard_program(loss=loss, penalty=penalty, intercept=False)
        cold = fit(program, tol=1e-5)
        warm = fit(program, tol=1e-5, start=(cold.coef, cold.intercept))
        assert warm.n_iter < cold.n_iter
        assert warm.certificate.primal <= cold.certificate.primal + 1e-5 * program.null_value

    def test_start_is_left_alone(self):
        program = hard_program()
        coef, intercept = randn(*program.coef_shape), randn(2)
        before = coef.clone(), intercept.clone()
        fit(program, tol=1e-4, start=(coef, intercept))
        assert torch.equal(coef, before[0])
        assert torch.equal(intercept, before[1])

    @pytest.mark.parametrize("tol", [1e-4, 1e-2])
    def test_the_result_is_not_the_start_itself(self, tol):
        program = hard_program()
        cold = fit(program, tol=1e-4)
        coef, intercept = cold.coef.clone(), cold.intercept.clone()
        result = fit(program, tol=tol, start=(coef, intercept))
        assert result.n_iter == 0
        coef.zero_(), intercept.zero_()
        assert torch.equal(result.coef, cold.coef)
        assert torch.equal(result.intercept, cold.intercept)

    @pytest.mark.parametrize(("loss", "penalty"), in_turn(0))
    def test_a_start_with_the_dual_point_of_its_certificate_is_certified_as_it_was(self, loss, penalty):
        program = hard_program(loss=loss, penalty=penalty)
        cold = solve(program, get_solver("auto"), tol=1e-5)
        start = (cold.coef, cold.intercept, cold.certificate.dual_point)
        warm = solve(program, get_solver("auto"), tol=1e-5, start=start)
        assert warm.n_iter == 0
        assert warm.certificate.gap == pytest.approx(cold.certificate.gap, abs=1e-12 * program.null_value)

    def test_any_dual_point_beside_a_start_leaves_the_certificate_true(self):
        program = hard_program()
        cold = fit(program, tol=1e-4)
        dual = randn(*program.y.shape, scale=10.0)
        warm = fit(program, tol=1e-8, start=(0.5 * cold.coef, cold.intercept, dual))
        assert warm.certificate.dual <= cold.certificate.primal
        assert warm.certificate.relative_gap <= 1e-8

    def test_start_in_another_precision(self):
        program = hard_program()
        cold = fit(program, tol=1e-6)
        warm = fit(program, tol=1e-4, start=(cold.coef.float(), cold.intercept.float()))
        assert warm.coef.dtype == torch.float64
        assert warm.n_iter < cold.n_iter

    @pytest.mark.parametrize("loss", LOSS_NAMES)
    def test_any_start_leads_to_the_same_optimum(self, loss):
        program = make_program(loss, "nuclear", intercept=True)
        cold = fit(program, tol=1e-8).certificate
        far = fit(program, tol=1e-8, start=(randn(*program.coef_shape, scale=2.0), randn(2))).certificate
        assert far.primal == pytest.approx(cold.primal, abs=1e-7 * program.null_value)

    @pytest.mark.parametrize("penalty", PENALTY_NAMES)
    def test_a_start_worse_than_the_best_constant_model_is_not_started_from(self, penalty):
        # From a thousand times the solution three thousand iterations are not enough.
        program = make_program("squared", penalty, intercept=True, n=100)
        cold = solve(program, get_solver("auto"), tol=1e-6)
        far = solve(program, get_solver("auto"), tol=1e-6, start=(1e3 * cold.coef, cold.intercept))
        assert torch.equal(far.coef, cold.coef)
        assert far.n_iter == cold.n_iter


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("targets", [torch.float32, torch.float64])
def test_soft_labels_with_data_in_single_precision(targets, dtype):
    data = randn(60, 3, 2)
    y = torch.softmax(randn(60, 3, seed=1), 1)
    exact = Program(DenseMap(data), y, Softmax(), GroupL2(), 0.01, None, True)
    single = Program(DenseMap(data.float()), y.to(targets), exact.loss, exact.penalty, 0.01, None, True)
    expected = solve(exact, get_solver("auto"), tol=1e-6)
    found = solve(single, get_solver("auto"), tol=1e-5, dtype=dtype)
    assert found.certificate.primal == pytest.approx(expected.certificate.primal, rel=1e-5)
    assert found.certificate.dual <= expected.certificate.primal * (1 + 1e-6)


def test_start_intercept_of_a_program_without_one():
    program = make_program(n=10)
    coef = torch.zeros(program.coef_shape, dtype=torch.float64)
    with pytest.raises(ValueError, match="start must have an intercept of zeros, as the program has none"):
        solve(program, Fista(), start=(coef, torch.ones(2)))
    assert solve(program, Fista(), start=(coef, torch.zeros(2))).certificate.relative_gap <= 1e-4


class InterruptedStep(Fista):
    """Ctrl-C during the k-th step."""

    def __init__(self, k):
        super().__init__()
        self.left = k

    def step(self, program, state):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().step(program, state)


class FarOff(Fista):
    """Coefficients that are worse than none."""

    def point(self, program, state):
        return Point(torch.full(program.coef_shape, 1e3, dtype=torch.float64), program.null_intercept)


class InterruptedSetUp(Fista):
    """Ctrl-C before the first step."""

    def init(self, program, start):
        raise KeyboardInterrupt


def test_the_intercept_of_a_point_is_that_of_its_coefficients_from_a_start_with_predictions():
    program = hard_program()
    start = point_at(program, fit(program, tol=1e-4).coef)  # as one solver leaves it to the next
    point = Fista().point(program, Fista().init(program, start))
    torch.testing.assert_close(point.intercept, program.best_intercept(program.map.matvec(point.coef)))
    torch.testing.assert_close(point.fitted, program.map.matvec(point.coef) + point.intercept)


class TestInterrupts:
    @pytest.mark.parametrize("given", [False, True])
    def test_during_set_up(self, given):
        program = hard_program()
        start = fit(program, tol=1e-2) if given else None
        with pytest.raises(KeyboardInterrupt) as caught:
            solve(program, InterruptedSetUp(), tol=1e-12, start=start and (start.coef, start.intercept))
        self.assert_usable(caught.value, program, 0)
        if given:
            assert torch.equal(caught.value.result.coef, start.coef)

    @pytest.mark.parametrize("k", [1, 2, 4, 23])
    def test_during_a_step(self, k):
        program = hard_program()
        with pytest.raises(KeyboardInterrupt) as caught:
            solve(program, InterruptedStep(k), tol=1e-12)
        self.assert_usable(caught.value, program, k - 1)

    def test_the_last_point_is_certified(self):
        program = hard_program()
        with pytest.raises(KeyboardInterrupt) as caught:
            solve(program, InterruptedStep(29), tol=1e-12)  # the last certificate was at 20
        assert caught.value.result.history.iteration[-1] == 28

    @pytest.mark.parametrize("k", [1, 3])
    def test_during_the_callback(self, k):
        seen = []

        def callback(progress):
            seen.append(progress.iteration)
            if len(seen) == k:
                raise KeyboardInterrupt

        program = hard_program()
        with pytest.raises(KeyboardInterrupt) as caught:
            solve(program, Fista(), tol=1e-12, callback=callback)
        self.assert_usable(caught.value, program, seen[-1])

    def test_where_the_best_constant_model_would_do(self):
        # The run falls back on it, as it is within tol, and yet was interrupted.
        program = hard_program()
        program = program.with_alpha(0.9 * program.alpha_max)

        def callback(progress):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            solve(program, FarOff(), tol=0.9, callback=callback)
        with pytest.raises(PathInterrupted):
            solve_path(program, FarOff(), [program.alpha], tol=0.9, callback=callback)
        assert solve(program, FarOff(), tol=0.9, max_iter=1).status is Status.CONVERGED
        assert solve(program, FarOff(), tol=0.9, callback=lambda progress: True).status is Status.STOPPED

    def test_twice_before_the_first_certificate(self):
        # The callback runs again on the point that the first interrupt left.
        def callback(progress):
            raise KeyboardInterrupt

        program = hard_program()
        with pytest.raises(KeyboardInterrupt) as caught:
            solve(program, InterruptedStep(1), tol=1e-12, callback=callback)
        self.assert_usable(caught.value, program, 0)

    def test_of_exact_before_it_has_anything(self, monkeypatch):
        def interrupt(self, *args, **options):
            raise KeyboardInterrupt

        monkeypatch.setattr(cp.Problem, "solve", interrupt)
        program = hard_program()
        with pytest.raises(KeyboardInterrupt) as caught:
            solve(program, Exact())
        self.assert_usable(caught.value, program, 0)

    @pytest.mark.parametrize("n_times", [1, 2])
    def test_during_the_last_certificate(self, n_times, monkeypatch):
        # That of the best constant model, after the run itself; certificates of the run come after 1, 2 and 3 steps.
        n_calls = 0

        def interrupted_certify(*arguments):
            nonlocal n_calls
            n_calls += 1
            if 4 <= n_calls < 4 + n_times:
                raise KeyboardInterrupt
            return certify(*arguments)

        program = hard_program()
        monkeypatch.setattr(sys.modules["convexformer_solvers.solve"], "certify", interrupted_certify)
        with pytest.raises(KeyboardInterrupt) as caught:
            solve(program, Fista(), tol=1e-14, max_iter=3)
        assert n_calls >= 4
        monkeypatch.undo()
        self.assert_usable(caught.value, program, 3)

    @pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy])
    def test_an_interruption_can_be_sent_to_another_process(self, copied):
        program = hard_program()
        with pytest.raises(SolverInterrupted) as caught:
            solve(program, InterruptedStep(4), tol=1e-12)
        again = copied(caught.value)
        assert type(again) is SolverInterrupted
        assert str(again) == str(caught.value)
        assert torch.equal(again.result.coef, caught.value.result.coef)
        assert again.result.certificate.primal == caught.value.result.certificate.primal

    @staticmethod
    def assert_usable(interruption, program, n_iter):
        assert isinstance(interruption, SolverInterrupted)
        result = interruption.result
        assert result.status is Status.INTERRUPTED
        assert "keyboard" in str(interruption)
        assert f"after {n_iter} iterations" in str(interruption)
        assert result.n_iter == n_iter
        again = certify(program, result.coef, result.intercept)
        assert again.primal == result.certificate.primal
        assert again.dual <= result.certificate.dual <= fit(program, tol=1e-7).certificate.primal
        if n_iter:
            assert result.certificate.primal <= program.null_value


class TestPrecision:
    @pytest.mark.parametrize(("loss", "penalty", "gated"), covering(LOSS_NAMES, PENALTY_NAMES, BOTH))
    def test_float32_reaches_1e_4_and_is_certified_in_float64(self, loss, penalty, gated):
        program = make_program(loss, penalty, gated=gated, intercept=True, weighted=True, ratio=0.1)
        result = solve(program, Fista(), tol=1e-4, dtype=torch.float32)
        assert result.coef.dtype == result.intercept.dtype == torch.float32
        assert result.certificate.relative_gap <= 1e-4
        # Data in float64: the certificate speaks of them, not of their float32 copies.
        assert numpy_primal(program, result.coef, result.intercept) == pytest.approx(
            result.certificate.primal, rel=1e-13
        )
        assert result.certificate.dual <= fit(program).certificate.primal + 1e-12

    def test_default_precision_is_that_of_the_data(self):
        program = make_program("logistic", intercept=True)
        single = program.to(torch.float32)
        result = solve(single, Fista(), tol=1e-4)
        assert result.coef.dtype == torch.float32
        assert result.certificate.dual_point.dtype == torch.float64
        assert numpy_primal(single.to(torch.float64), result.coef, result.intercept) == pytest.approx(
            result.certificate.primal, rel=1e-13
        )

    @pytest.mark.parametrize(
        ("dtype", "wanted"),
        [
            ("float32", torch.float32),
            ("float64", torch.float64),
            ("torch.float32", torch.float32),
            (torch.float32, torch.float32),
            (np.float32, torch.float32),
            (np.dtype("float64"), torch.float64),
        ],
    )
    def test_names_and_types_of_precisions(self, dtype, wanted):
        program = make_program(intercept=True)
        results = [solve(program, Fista(), dtype=dtype), *solve_path(program, Fista(), [0.1], dtype=dtype).results]
        assert [result.coef.dtype for result in results] == [wanted] * 2

    @pytest.mark.parametrize(
        "dtype", ["double", "float16", torch.float16, torch.bfloat16, torch.int64, 64, np.float16, True, ["float32"]]
    )
    def test_other_precisions_are_refused(self, dtype):
        program = make_program()
        for follow in (solve, solve_path, iterate_path):
            with pytest.raises(ValueError, match="dtype must be None, 'float32' or 'float64'"):
                follow(program, Fista(), dtype=dtype)

    @pytest.mark.parametrize(("loss", "penalty"), in_turn(1))
    def test_any_device_equals_the_cpu(self, loss, penalty, accelerator):
        program = make_program(loss, penalty, gated=True, intercept=True, weighted=True, ratio=0.7)
        cpu, other = fit(program), fit(program, device=accelerator)
        assert other.coef.device.type == accelerator
        assert other.certificate.primal == pytest.approx(cpu.certificate.primal, rel=1e-8)


def test_progress_bar_shows_gap_and_objective(capsys):
    solve(hard_program(), Fista(), tol=1e-4, verbose=True)
    shown = capsys.readouterr().err
    assert "fista" in shown
    assert "gap" in shown
    assert "objective" in shown


def test_progress_bar_says_what_auto_does(capsys):
    solve(hard_program(), Auto(), tol=1e-4, verbose=True)
    assert "auto: admm" in capsys.readouterr().err


def test_silent_by_default(capsys):
    solve(hard_program(), Fista(), tol=1e-4)
    shown = capsys.readouterr()
    assert shown.out == shown.err == ""


class _AwayFromStart(Solver):
    name = "away_from_start"

    def init(self, program, start):
        return start

    def step(self, program, state):
        return state._replace(coef=state.coef + 1e3)

    def point(self, program, state):
        return state


class TestNoWorseThanTheStart:
    def test_few_steps_that_lead_away_return_the_start(self):
        program = hard_program()
        with pytest.warns(ConvergenceWarning):
            result = solve(program, _AwayFromStart(), tol=1e-8, max_iter=3)
        assert not result.coef.any()
        assert result.certificate.primal == pytest.approx(program.null_value)
        assert result.history.primal[-1] == result.certificate.primal

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_steps_that_leave_the_range_of_the_precision_return_the_start(self, value, monkeypatch):
        monkeypatch.setattr(
            _AwayFromStart, "step", lambda self, program, state: state._replace(coef=state.coef + value)
        )
        program = hard_program()
        with pytest.warns(ConvergenceWarning):
            result = solve(program, _AwayFromStart(), tol=1e-8, max_iter=3)
        assert not result.coef.any()
        assert result.certificate.primal == pytest.approx(program.null_value)

    def test_of_a_start_worse_than_the_best_constant_model_that_model_is_returned(self):
        program = hard_program()
        start = torch.full(program.coef_shape, 1e6, dtype=torch.float64), program.null_intercept
        with pytest.warns(ConvergenceWarning):
            result = solve(program, _AwayFromStart(), tol=1e-8, max_iter=3, start=start)
        assert not result.coef.any()
        assert result.certificate.primal == pytest.approx(program.null_value)

    def test_a_start_that_is_optimal_ends_the_matter(self):
        program = hard_program()
        program = program.with_alpha(2 * program.alpha_max)
        result = solve(program, _AwayFromStart(), tol=1e-8, max_iter=3)
        assert result.status is Status.CONVERGED
        assert not result.coef.any()


def test_a_name_in_place_of_a_solver_is_told():
    with pytest.raises(TypeError, match="solver must be a Solver"):
        solve(hard_program(), "auto")


class TestGradients:
    """Data that require gradients: results hold none, and no graph."""

    @staticmethod
    def program(loss="squared", penalty="group_l2", dtype=torch.float64):
        plain = make_program(loss, penalty, gated=True, intercept=True, weighted=True, n=12)
        data, y, weight = (
            part.to(dtype).requires_grad_() for part in (plain.map.base.data, plain.y, plain.sample_weight)
        )
        with torch.no_grad():  # torch warns of numbers taken from tensors that require gradients
            return Program(GatedMap(data, plain.map.masks), y, plain.loss, plain.penalty, plain.alpha, weight, True)

    @pytest.mark.parametrize("name", sorted(SOLVERS))
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_of_every_solver(self, name, dtype):
        program = self.program(dtype=dtype)
        result = solve(program, get_solver(name), tol=1e-4)
        self.assert_plain(result)
        with torch.no_grad():  # without the solver's dual point
            assert certify(program, result.coef, result.intercept).relative_gap <= 1e-3

    @pytest.mark.parametrize(("loss", "penalty"), cases())
    def test_of_every_program(self, loss, penalty):
        self.assert_plain(solve(self.program(loss, penalty), Auto(), tol=1e-3, dtype=torch.float32))

    def test_what_the_program_knows_already_may_require_them(self):
        program = self.program()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert program.null_intercept.requires_grad
            null = program.with_alpha(1e3)
        self.assert_plain(solve(null, Fista()))
        self.assert_plain(solve(program, Fista()))

    def test_of_paths(self, tmp_path):
        program = self.program()
        for _ in range(2):
            path = solve_path(program, Fista(), resume=tmp_path / "path.npz", tol=1e-2)
            assert not path.coefs.requires_grad
            for result in path.results:
                self.assert_plain(result)

    @pytest.mark.parametrize("enabled", [False, True])
    def test_callbacks_are_called_as_the_solve_is(self, enabled):
        seen = []
        with torch.set_grad_enabled(enabled):
            solve(make_program(), Fista(), callback=lambda progress: seen.append(torch.is_grad_enabled()))
        assert set(seen) == {enabled}

    @staticmethod
    def assert_plain(result):
        assert not result.coef.requires_grad
        assert not result.intercept.requires_grad
        assert not result.certificate.dual_point.requires_grad


def test_a_factorisation_that_fails_in_a_callback_is_the_callbacks_own():
    def factorises(progress):
        torch.linalg.cholesky(torch.zeros(2, 2))

    for start in (None, (torch.zeros(hard_program().coef_shape), torch.zeros(hard_program().y.shape[1]))):
        with pytest.raises(torch.linalg.LinAlgError):
            solve(hard_program(), Fista(), tol=1e-12, callback=factorises, start=start)

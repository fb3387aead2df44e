"""Regularisation paths: grids, warm starts, monotonicity, interrupts."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning
from solver_cases import PROPERTY, fit, in_turn, make_program, randn

from convexformer_solvers import (
    Exact,
    Fista,
    History,
    Path,
    PathInterrupted,
    SolverInterrupted,
    Status,
    alpha_grid,
    get_solver,
    iterate_path,
    solve,
    solve_path,
)


class TestGrid:
    @PROPERTY
    @given(alpha_max=st.floats(1e-9, 1e9), n_alphas=st.integers(2, 50), eps=st.floats(1e-6, 0.9))
    def test_geometric_between_its_ends(self, alpha_max, n_alphas, eps):
        grid = alpha_grid(alpha_max, n_alphas, eps)
        assert len(grid) == n_alphas
        assert grid[0] == alpha_max
        assert grid[-1] == pytest.approx(eps * alpha_max)
        assert all(type(alpha) is float for alpha in grid)
        ratios = np.array(grid[1:]) / np.array(grid[:-1])
        np.testing.assert_allclose(ratios, eps ** (1 / (n_alphas - 1)), rtol=1e-9)

    def test_single_alpha_is_alpha_max(self):
        assert alpha_grid(3.0, 1) == [3.0]

    def test_grid_without_a_scale_starts_at_one(self):
        assert alpha_grid(0.0, 3) == alpha_grid(1.0, 3)

    @pytest.mark.parametrize("n_alphas", [0, -1, 2.5, True, "3"])
    def test_wrong_length(self, n_alphas):
        with pytest.raises(ValueError, match="n_alphas must be a positive integer"):
            alpha_grid(1.0, n_alphas)

    @pytest.mark.parametrize("eps", [0.0, 1.0, -0.1, 2.0, math.nan])
    def test_wrong_ratio(self, eps):
        with pytest.raises(ValueError, match="eps must lie strictly between 0 and 1"):
            alpha_grid(1.0, 5, eps)

    @pytest.mark.parametrize("alpha_max", [math.nan, math.inf])
    def test_wrong_alpha_max(self, alpha_max):
        with pytest.raises(ValueError, match="alpha_max"):
            alpha_grid(alpha_max, 5)


class TestPath:
    @pytest.mark.parametrize(("loss", "penalty"), in_turn(0))
    def test_agrees_with_cold_solves(self, loss, penalty):
        program = make_program(loss, penalty, gated=True, intercept=True, weighted=True, n=40)
        path = solve_path(program, Fista(), alpha_grid(program.alpha_max, 3, 0.3), tol=1e-7)
        assert max(path.gaps) <= 1e-7
        for alpha, warm in zip(path.alphas, path.results, strict=True):
            cold = fit(program.with_alpha(alpha), tol=1e-7).certificate
            assert warm.certificate.primal == pytest.approx(cold.primal, abs=2e-7 * program.null_value)
            assert warm.certificate.dual <= cold.primal * (1 + 1e-12)

    @pytest.mark.parametrize(("loss", "penalty"), in_turn(1))
    def test_objective_falls_and_is_concave_in_alpha(self, loss, penalty):
        # The optimal value is a minimum of functions that are affine and increasing in alpha.
        program = make_program(loss, penalty, intercept=True)
        alphas = np.linspace(1.2, 0.2, 6) * program.alpha_max
        values = [result.certificate.primal for result in solve_path(program, Fista(), alphas, tol=1e-9).results]
        assert (np.diff(values) <= 1e-9 * program.null_value).all()
        assert (np.diff(values, 2) <= 1e-8 * program.null_value).all()
        assert values[0] == pytest.approx(program.null_value)

    def test_penalty_grows_and_loss_falls_along_the_path(self):
        program = make_program("logistic", "nuclear", intercept=True)
        path = solve_path(program, Fista(), alpha_grid(program.alpha_max, 6), tol=1e-9)
        norms = [float(program.penalty.value(coef)) for coef in path.coefs]
        losses = [
            result.certificate.primal - alpha * norm
            for result, alpha, norm in zip(path.results, path.alphas, norms, strict=True)
        ]
        assert (np.diff(norms) >= -1e-6).all()
        assert (np.diff(losses) <= 1e-6).all()
        assert norms[0] == pytest.approx(0.0, abs=1e-6)

    @pytest.mark.parametrize(
        "alphas",
        [[0.5, 0.1, 0.0], [0.5, math.nan], [0.1, -0.1], [math.inf], [], [True], [[1.0]], "abc", ["0.1"], [0.1 + 0j]],
    )
    def test_wrong_grid_is_named_before_anything_is_solved(self, alphas):
        program = make_program("squared", "group_l2")
        with pytest.raises(ValueError, match="alphas must be a list of at least one positive finite number"):
            solve_path(program, Fista(), alphas, callback=lambda progress: pytest.fail("solved"))

    def test_default_grid(self):
        program = make_program(n=10)
        path = solve_path(program, Fista(), tol=1e-3)
        assert path.alphas == alpha_grid(program.alpha_max)
        assert path.coefs.shape == (30, *program.coef_shape)

    def test_alphas_are_sorted_to_decrease(self):
        path = solve_path(make_program(n=10), Fista(), [0.01, 0.3, 0.1], tol=1e-4)
        assert path.alphas == [0.3, 0.1, 0.01]

    @pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
    def test_alphas_may_be_an_array_of_real_numbers(self, dtype):
        assert solve_path(make_program(n=10), Fista(), np.array([1, 2], dtype)).alphas == [2.0, 1.0]

    def test_alpha_of_the_program_is_ignored(self):
        program = make_program(n=10)
        one, other = (solve_path(program.with_alpha(alpha), Fista(), [0.1], tol=1e-8) for alpha in (0.5, 5.0))
        assert torch.equal(one.coefs, other.coefs)

    def test_warm_starts_save_iterations(self):
        program = make_program(gated=True, intercept=True, n=12)
        grid = alpha_grid(program.alpha_max, 20, 0.02)
        warm = sum(result.n_iter for result in solve_path(program, Fista(), grid, tol=1e-5).results)
        cold = sum(fit(program.with_alpha(alpha), tol=1e-5).n_iter for alpha in grid)
        assert warm < cold

    def test_start_is_that_of_the_first_alpha(self):
        program = make_program(gated=True, intercept=True, n=12, ratio=0.05)
        best = fit(program, tol=1e-9)
        path = solve_path(program, Fista(), [program.alpha], tol=1e-6, start=(best.coef, best.intercept))
        assert path.results[0].n_iter == 0  # good enough as it is

    @pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
    @pytest.mark.parametrize("loss", ["huber", "squared"])
    def test_points_that_are_not_solutions_are_no_worse_than_those_before(self, loss):
        # At a smaller alpha the point before costs less; where its extrapolation leads may cost more.
        program = make_program(loss, gated=True, intercept=True)
        grid = alpha_grid(program.alpha_max, 8, 1e-3)
        path = solve_path(program, get_solver("semismooth_newton"), grid, tol=1e-6, max_iter=1)
        values = [result.certificate.primal for result in path.results]
        assert max(path.gaps) > 1e-6
        assert (np.diff(values) <= 1e-12 * program.null_value).all()

    def test_other_solvers(self):
        program = make_program("huber", intercept=True, n=10)
        grid = alpha_grid(program.alpha_max, 3, 0.1)
        exact, fista = (solve_path(program, solver, grid, tol=1e-5) for solver in (Exact(), Fista()))
        torch.testing.assert_close(exact.coefs, fista.coefs, atol=1e-2, rtol=0)
        assert max(exact.gaps) <= 1e-5


class TestInterrupts:
    @pytest.mark.parametrize("n_finished", [0, 1, 3])
    def test_finished_part_is_handed_over(self, n_finished):
        program = make_program(gated=True, intercept=True, n=12)
        grid = alpha_grid(program.alpha_max, 5, 0.1)
        firsts = []

        def callback(progress):
            if progress.iteration == 1:
                firsts.append(progress)
            if len(firsts) > n_finished:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as caught:
            solve_path(program, Fista(), grid, tol=1e-4, callback=callback)
        assert isinstance(caught.value, PathInterrupted)
        path = caught.value.path
        assert isinstance(path, Path)
        assert path.alphas == grid[:n_finished]
        assert [result.status for result in path.results] == [Status.CONVERGED] * n_finished
        assert str(n_finished) in str(caught.value)
        # The unfinished solve is not lost either.
        assert isinstance(caught.value.__cause__, SolverInterrupted)
        assert caught.value.__cause__.result.coef.shape == program.coef_shape

    @pytest.mark.parametrize("after", [False, True])
    def test_ctrl_c_as_a_certificate_is_written_down_leaves_what_is_finished(self, monkeypatch, after):
        program, append, n_calls = make_program(intercept=True, n=12), History.append, 0
        grid = alpha_grid(program.alpha_max, 5)[1:]  # the first has no iterations

        def interrupted(history, *arguments):
            nonlocal n_calls
            n_calls += 1
            if after:
                append(history, *arguments)
            if n_calls == n_before + 1:  # of the second alpha
                raise KeyboardInterrupt
            if not after:
                append(history, *arguments)

        n_before = len(solve(program.with_alpha(grid[0]), Fista(), tol=1e-6).history.iteration)
        monkeypatch.setattr(History, "append", interrupted)
        with pytest.raises(PathInterrupted) as caught:
            solve_path(program, Fista(), grid, tol=1e-6)
        assert caught.value.path.alphas == grid[:1]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_nothing_finished_is_an_empty_path(self, dtype):
        program = make_program(gated=True, intercept=True, n=12)

        def callback(progress):
            raise KeyboardInterrupt

        with pytest.raises(PathInterrupted) as caught:
            solve_path(program, Fista(), [0.1], callback=callback, dtype=dtype)
        path = caught.value.path
        assert path.coefs.shape == (0, *program.coef_shape)
        assert path.coefs.dtype == dtype
        assert path.gaps == path.alphas == []
        assert Path([], []).coefs.shape[0] == 0

    @pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy])
    @pytest.mark.parametrize("resume", [None, "path.npz"])
    def test_an_interruption_can_be_sent_to_another_process(self, copied, resume):
        path = solve_path(make_program(n=12), Fista(), [0.2, 0.1])
        interruption = PathInterrupted(path, 5, resume)
        again = copied(interruption)
        assert type(again) is PathInterrupted
        assert str(again) == str(interruption)
        assert torch.equal(again.path.coefs, path.coefs)
        assert again.path.alphas == path.alphas

    def test_callback_that_stops_each_solve_lets_the_path_go_on(self):
        program = make_program(gated=True, intercept=True, n=12, seed=3)
        grid = [0.1 * program.alpha_max, 0.05 * program.alpha_max]
        path = solve_path(program, Fista(), grid, tol=1e-12, callback=lambda progress: True)
        assert [result.status for result in path.results] == [Status.STOPPED] * 2


def test_who_does_not_watch_pays_for_fewer_certificates():
    program = make_program("squared", n=60, blocks=12, d=3, c=1, ratio=0.02, seed=1)
    solver, grid = get_solver("admm"), [0.05 * program.alpha_max, 0.02 * program.alpha_max]
    watched = solve_path(program, solver, grid, tol=1e-9, callback=lambda progress: None)
    alone = solve_path(program, solver, grid, tol=1e-9)
    assert max(alone.gaps) <= 1e-9
    counts = [sum(len(result.history.iteration) for result in path.results) for path in (alone, watched)]
    assert counts[0] < counts[1]


def test_coefs_are_stacked_in_order_of_the_grid():
    program = make_program(n=10)
    path = solve_path(program, Fista(), [0.2, 0.02], tol=1e-6)
    assert torch.equal(path.coefs[1], path.results[1].coef)
    assert path.gaps == [result.certificate.relative_gap for result in path.results]
    assert randn(*path.coefs.shape).shape == (2, 3, 2, 2)


@pytest.mark.parametrize("follow", [solve_path, lambda *parts, **rest: list(iterate_path(*parts, **rest))])
def test_warnings_point_at_the_caller(follow):
    program = make_program(n=12, gated=True)
    with pytest.warns(ConvergenceWarning) as caught:
        follow(program, Fista(), [0.01 * program.alpha_max], tol=1e-9, max_iter=1)
    assert caught[0].filename == __file__


def test_a_negative_alpha_max_is_refused():
    with pytest.raises(ValueError, match="alpha_max must be finite and not negative"):
        alpha_grid(-1.0)


@pytest.mark.parametrize("follow", [solve_path, iterate_path])
def test_a_name_in_place_of_a_solver_is_told(follow):
    with pytest.raises(TypeError, match="solver must be a Solver"):
        list(follow(make_program(n=10), "auto", [0.1]))

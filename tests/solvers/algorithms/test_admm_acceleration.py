"""Extrapolation of fixed-point iterations, factors for few right sides, and when certificates are due."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from solver_cases import make_program, randn

from convexformer_solvers import Admm, DenseMap, Fista, GroupL2, Point, Program, Squared, get_loss, solve
from convexformer_solvers.algorithms.admm import AdmmConfig
from convexformer_solvers.algorithms.admm.rho import GroupSizeStepRule, Sides, balancing_rho
from convexformer_solvers.certificate_schedule import Schedule
from convexformer_solvers.linalg.anderson import Anderson
from convexformer_solvers.linalg.cholesky import CholeskySolver, cholesky, factorised_above, lower_rows
from convexformer_solvers.linalg.ridge import RidgeInFeatures
from convexformer_solvers.points import null_point, objective


def contraction(size, rate, seed):
    """A symmetric affine contraction of columns and its fixed point."""
    basis = torch.linalg.qr(randn(size, size, seed=seed))[0]
    matrix = basis @ torch.diag(torch.linspace(0.1, rate, size, dtype=torch.float64)) @ basis.T
    fixed = randn(size, 2, seed=seed + 1)
    return (lambda x: fixed + matrix @ (x - fixed)), fixed


def distance_after(n_steps, step, fixed, acceleration):
    x = torch.zeros_like(fixed)
    for _ in range(n_steps):
        end = step(x)
        (x,) = acceleration.next(x, (end,)) if acceleration else (end,)
    return float((x - fixed).abs().max())


class TestAnderson:
    @pytest.mark.parametrize("columns_apart", [False, True])
    def test_an_affine_map_is_solved_in_as_many_steps_as_it_has_eigenvalues(self, columns_apart):
        step, fixed = contraction(5, 0.99, seed=0)
        # Two columns together need twice the memory.
        acceleration = Anderson(12, columns_apart)
        assert distance_after(14, step, fixed, acceleration) < 1e-5
        assert distance_after(14, step, fixed, None) > 0.1

    def test_columns_apart_do_not_know_of_each_other(self):
        step, fixed = contraction(6, 0.95, seed=2)
        both, single = Anderson(4, True), Anderson(4, True)
        x, alone = torch.zeros_like(fixed), torch.zeros_like(fixed[:, :1])
        for _ in range(12):
            (x,) = both.next(x, (step(x),))
            widened = torch.cat([alone, alone], 1)
            (alone,) = single.next(alone, (step(widened)[:, :1],))
            torch.testing.assert_close(x[:, :1], alone, rtol=1e-9, atol=1e-12)

    def test_followers_stay_images(self):
        step, fixed = contraction(6, 0.95, seed=3)
        image = randn(9, 6, seed=4)
        acceleration, x, growth = Anderson(3, False), torch.zeros_like(fixed), 1.0
        for _ in range(10):
            end = step(x)
            x, follower = acceleration.next(x, (end, image @ end))
            growth *= 1 + acceleration.largest_weights
            torch.testing.assert_close(follower, image @ x, rtol=0, atol=1e-12 * growth)

    def test_steps_beyond_the_range_of_numbers_are_not_extrapolated(self):
        # Squares of differences overflow, or only their products with the residual; the last column is as any other.
        residuals = torch.tensor([[1e25, 1e25, 3.0], [2e25, 1.000001e25, 2.0], [5e25, 1.000003e25, 1.5]])
        acceleration, end = Anderson(4, True), torch.ones(1, 3)
        for residual in residuals:
            (found,) = acceleration.next(end - residual, (end,))
            end = end - 0.5 * torch.isfinite(residual)
        assert torch.equal(found[:, :2], end[:, :2] + 0.5)
        assert bool((found[:, 2] < end[:, 2]).all())

    def test_a_map_that_is_not_smooth_still_converges(self):
        # Soft-thresholding steps of a lasso: nonexpansive, with kinks on the way.
        design, target = randn(20, 30, seed=5), randn(20, 1, seed=6)
        length = 1 / float(torch.linalg.matrix_norm(design, 2)) ** 2

        def step(x):
            z = x - length * design.T @ (design @ x - target)
            return z.sign() * (z.abs() - 0.5 * length).clamp(min=0)

        def residual_after(acceleration):
            x = torch.zeros(30, 1, dtype=torch.float64)
            for _ in range(1000):
                (x,) = acceleration.next(x, (step(x),)) if acceleration else (step(x),)
            return float((step(x) - x).abs().max())

        assert residual_after(Anderson(8, False)) < 1e-3 * residual_after(None)


class TestFactors:
    @pytest.mark.parametrize("size", [1, 5, 256, 257, 600])
    @pytest.mark.parametrize("n_right", [1, 3])
    def test_solutions_are_those_of_torch(self, size, n_right):
        root = randn(size, size, seed=0)
        matrix, right = root @ root.T + size * torch.eye(size, dtype=torch.float64), randn(size, n_right, seed=1)
        factor = cholesky(matrix)
        solver, right_before = CholeskySolver(factor.T), right.clone()
        torch.testing.assert_close(solver.solve(right), torch.cholesky_solve(right, factor))
        torch.testing.assert_close(factor @ solver.solve_lower(right), right)
        torch.testing.assert_close(factor.T @ solver.solve_upper(right), right)
        assert torch.equal(right, right_before)

    @pytest.mark.parametrize("size", [1, 5, 256, 257, 600])
    def test_a_factor_above_leaves_the_triangle_below(self, size):
        root, right = randn(size, size, seed=0), randn(size, 2, seed=1)
        matrix = root @ root.T
        shared = matrix.tril()
        for shift in (size, 2.0 * size):
            shifted = matrix + shift * torch.eye(size, dtype=torch.float64)
            solver = factorised_above(shared, lambda rows, shifted=shifted: shifted[rows, rows.start :].clone())
            torch.testing.assert_close(solver.solve(right), torch.linalg.solve(shifted, right))
            assert torch.equal(shared.tril(), matrix.tril())
        for rows in (slice(0, size), slice(size // 2, size)):
            torch.testing.assert_close(lower_rows(shared, rows), matrix[rows, rows.start :])

    def test_a_matrix_without_full_rank_is_raised_by_rounding_only(self):
        root = randn(40, 3, seed=2)
        matrix, made = root @ root.T, []
        solver = factorised_above(matrix.clone(), lambda rows: made.append(1) or matrix[rows, rows.start :].clone())
        assert len(made) > 1
        right = matrix @ randn(40, 1, seed=3)
        torch.testing.assert_close(matrix @ solver.solve(right), right, rtol=1e-6, atol=1e-6)

    def test_a_matrix_that_is_not_finite_is_refused(self):
        with pytest.raises(torch.linalg.LinAlgError, match="must be finite"):
            factorised_above(torch.zeros(2, 2), lambda rows: torch.full((2, 2), math.nan))

    @pytest.mark.parametrize("intercept", [False, True])
    @pytest.mark.parametrize("loss", ["squared", "logistic"])
    def test_a_factor_in_single_precision_costs_no_accuracy(self, monkeypatch, loss, intercept):
        monkeypatch.setattr(RidgeInFeatures, "largest_double", 0)
        precisions, solved = [], RidgeInFeatures._solved
        monkeypatch.setattr(
            RidgeInFeatures,
            "_solved",
            lambda self, right: precisions.append(self._inverse.dtype) or solved(self, right),
        )
        program = make_program(loss, n=90, blocks=6, d=3, c=2, intercept=intercept, ratio=0.05)
        result = solve(program, Admm(), tol=1e-10, max_iter=2000)
        assert set(precisions) == {torch.float32}
        assert result.certificate.relative_gap <= 1e-10
        assert result.certificate.primal == pytest.approx(
            solve(program, Fista(), tol=1e-9).certificate.primal, rel=1e-8
        )


class TestSchedule:
    def iterations_due(self, estimates, gaps=None, goal=1e-4, watched=False):
        schedule, found = Schedule(goal, watched), []
        for iteration, estimate in enumerate(estimates, start=1):
            if schedule.due(iteration, estimate):
                found.append(iteration)
                gap = estimate if gaps is None else gaps[iteration - 1]
                schedule.certified(iteration, estimate, math.inf if gap is None else gap)
        return found

    def test_without_estimates_at_regular_intervals(self):
        assert self.iterations_due([None] * 30) == [1, 2, 4, 8, 16, 26]

    def test_at_the_goal_at_once(self):
        assert 7 in self.iterations_due([1.0] * 6 + [0.9e-4])

    def test_seldom_on_the_way_to_the_goal(self):
        estimates = [0.9**iteration for iteration in range(1, 120)]
        assert self.iterations_due(estimates, goal=1e-9) == [50, 100]

    def test_for_a_watcher_more_often(self):
        assert self.iterations_due([1.0] * 50, watched=True) == [10, 20, 30, 45]

    def test_an_estimate_that_was_too_low_is_corrected(self):
        # Three times too low: a third of the goal would do.
        assert self.iterations_due([1.0, 0.9e-4, 0.3e-4], [3.0, 2.7e-4, 0.9e-4]) == [2, 3]

    @pytest.mark.parametrize("factor", [1.5, 3, 10, 1000])
    def test_estimates_that_stay_too_low_cost_few_certificates(self, factor):
        estimates = [1e-4 * 0.98**iteration for iteration in range(1, 1000)]
        gaps = [factor * estimate for estimate in estimates]
        due = self.iterations_due(estimates, gaps)
        reached = next(iteration for iteration, gap in enumerate(gaps, start=1) if gap <= 1e-4)
        assert sum(iteration < reached for iteration in due) <= 1 + math.log2(reached) + reached / 25
        # And the goal is not missed for long.
        assert next(iteration for iteration in due if gaps[iteration - 1] <= 1e-4) <= 2 * reached + 50

    def test_one_that_was_too_low_once_is_not_held_against_later_ones(self):
        estimates = [1.0, 0.5e-4, *[0.9e-4] * 10]
        gaps = [1.0, 1.0, *[0.9e-4] * 10]
        assert self.iterations_due(estimates, gaps)[:2] == [2, 4]

    def test_waits_are_as_long_as_misses_in_a_row(self):
        estimates = [0.5e-4] * 7 + [1.0] * 50 + [0.9e-4]
        gaps = [1.0] * 7 + [3.0] * 50 + [0.9e-4]
        assert self.iterations_due(estimates, gaps) == [1, 3, 7, 57, 58]

    def test_gaps_above_the_goal_stand_still_after_a_long_wait_in_which_they_did_not_shrink(self):
        schedule, found = Schedule(1e-4), []
        for iteration, estimate, gap in [
            (1, 0.5e-4, 1.0),
            (60, 0.5e-4, 0.9),  # it has shrunk
            (70, 0.5e-4, 0.9),  # soon after
            (130, 2e-4, 0.9),  # as estimated, above the goal
            (190, 0.5e-4, 0.9),
            (250, 0.5e-4, 0.8),
        ]:
            schedule.certified(iteration, estimate, gap)
            found.append(schedule.stands_still)
        assert found == [False, False, False, False, True, False]

    def test_what_is_zero_but_for_rounding_is_reached(self):
        assert self.iterations_due([1.0, -1e-6]) == [2]
        assert self.iterations_due([1.0, 0.0]) == [2]
        assert self.iterations_due([1.0, 0.0], goal=0.0) == [2]

    @pytest.mark.parametrize("estimate", [0.0, -1e-6, 1e-6])
    def test_where_that_is_not_so_looks_become_rare(self, estimate):
        assert self.iterations_due([estimate] * 60, [1.0] * 60)[:5] == [1, 3, 7, 15, 25 if estimate < 0 else 31]

    def test_below_zero_by_more_is_no_sign_of_anything(self):
        assert self.iterations_due([-1e-2] * 30) == [10, 20, 30]
        assert len(self.iterations_due([-1e-2] * 3000)) < 30

    def test_never_where_the_solver_says_not_now(self):
        assert self.iterations_due([math.inf] * 100) == []

    @pytest.mark.parametrize(("watched", "longest"), [(False, 50), (True, 10)])
    @pytest.mark.parametrize("estimate", [1.0, -1.0, 0.0])
    def test_never_too_seldom(self, estimate, watched, longest):
        due = self.iterations_due([estimate] * 2000, [1.0] * 2000, watched=watched)
        assert due[0] <= longest
        assert all(after - before <= max(longest, after / 3 + 1) for before, after in pairwise(due))


@pytest.mark.parametrize("seed", [4, 8, 12, 36])
def test_extrapolations_do_not_lead_to_points_worse_than_a_constant(seed):
    # Few features and many samples ask for a larger rho than groups do: extrapolations go far before it is set anew.
    x, noise = randn(40, 6, 1, seed=seed), randn(40, 2, seed=seed + 2, scale=0.5)
    y = x[..., 0] @ randn(6, 2, seed=seed + 1, scale=0.5) + noise
    program = Program(DenseMap(x), y, Squared(), GroupL2(), 0.01, fit_intercept=True)
    solver = Admm()
    state = solver.init(program, null_point(program))
    objectives = []
    for _ in range(38):
        state = solver.step(program, state)
        objectives.append(objective(program, solver.point(program, state)))
    assert max(objectives) <= program.null_value


def correlated_program(loss, seed, ratio=0.05):
    """Tokens that share a part, with an intercept."""
    data = randn(200, 12, 6, seed=seed) + 2 * randn(200, 1, 6, seed=seed + 9)
    y = data[:, 0, :1] - data[:, 1, 1:2] + randn(200, 1, seed=seed + 2)
    y = torch.where(y > y.median(), 1.0, -1.0).double() if loss == "logistic" else y
    program = Program(DenseMap(data), y, get_loss(loss), GroupL2(), 1.0, fit_intercept=True)
    return program.with_alpha(ratio * program.alpha_max)


class TestRho:
    @pytest.mark.parametrize("factor", [0.01, 1, 100])
    @pytest.mark.parametrize("loss", ["squared", "logistic", "huber"])
    def test_a_threshold_that_is_far_off_costs_few_iterations(self, loss, factor):
        # Unless moves set rho anew, Huber's loss takes 400 to 2000, the squared loss up to 1500.
        usual = AdmmConfig()
        far_off = AdmmConfig(
            threshold=factor * usual.threshold,
            independent_threshold=factor * usual.independent_threshold,
            correlated_threshold=factor * usual.correlated_threshold,
            first_share=factor * usual.first_share,  # so that the first rho stays
        )
        for seed in range(3):
            result = solve(correlated_program(loss, seed), Admm(config=far_off), tol=1e-6, max_iter=60)
            assert result.certificate.relative_gap <= 1e-6

    @pytest.mark.parametrize(("bend", "curvature"), [(4.0, 0.25), (2.0, 18.0), (1e-12, 1e-6)])
    def test_moves_tell_the_geometric_mean_of_the_curvatures(self, bend, curvature):
        move, shift = randn(5, 3, 1, seed=1), 7 * randn(5, 3, 1, seed=2)
        before = Sides(*randn(4, 5, 3, 1, seed=0))
        after = Sides(
            before.smooth + move,
            before.correlation - bend * move,
            before.coef + shift,
            before.subgradient + curvature * shift,
        )
        assert balancing_rho(before, after) == pytest.approx(math.sqrt(bend * curvature), rel=1e-3)

    def test_where_nothing_moved_they_tell_nothing(self):
        mark = Sides(*randn(4, 5, 3, 1, seed=0))
        assert balancing_rho(mark, mark) is None
        assert balancing_rho(mark, mark._replace(smooth=mark.smooth + 1, coef=mark.coef + 1)) is None

    def test_a_path_goes_on_with_the_threshold_that_moves_told(self):
        program, solver = correlated_program("huber", seed=0), Admm()
        state = solver.init(program, null_point(program))
        state = state._replace(rule=GroupSizeStepRule(100 * state.rule.threshold))
        for _ in range(15):
            state = solver.step(program, state)
        assert state.rule.measured
        ahead = program.with_alpha(0.8 * program.alpha)
        warm = solver.init_again(ahead, Point(state.coef), state)
        assert warm.rule == state.rule
        assert warm.rho == pytest.approx(state.rho, rel=0.5)

    def test_what_moves_told_is_carried_to_other_sizes_and_alphas(self):
        program = correlated_program("squared", seed=0)
        coef = randn(*program.coef_shape, seed=3)
        rule = GroupSizeStepRule.giving(program, coef, 0.3)
        assert rule.rho(program, coef, math.inf) == pytest.approx(0.3)
        assert rule.rho(program.with_alpha(2 * program.alpha), 5 * coef, math.inf) == pytest.approx(0.3 * 2 / 5)
        assert rule.rho(program, coef, 0.2) == 0.2
        assert GroupSizeStepRule.giving(program, 0 * coef, 0.3) is None
        assert rule.rho(program, 0 * coef, math.inf) is None

    def test_sizes_whose_squares_leave_single_precision_are_carried_too(self):
        program = correlated_program("squared", seed=0)
        coef = 5e18 * randn(*program.coef_shape, seed=3)
        rule = GroupSizeStepRule.giving(program, coef.float(), 1e-20)
        assert rule.rho(program, coef, math.inf) == pytest.approx(1e-20)
        assert GroupSizeStepRule.giving(program, math.inf * coef.sign(), 1e-20) is None
        assert rule.rho(program, math.inf * coef.sign(), math.inf) is None

    def test_many_small_groups_do_not_take_it_elsewhere(self):
        program = correlated_program("squared", seed=0)
        few = randn(*program.coef_shape, seed=3)
        few[5:] = 0
        many = torch.where(few == 0, 1e-3 * randn(*program.coef_shape, seed=4), few)
        told, median = GroupSizeStepRule.giving(program, few, 0.3), GroupSizeStepRule(1.0)
        assert told.rho(program, many, math.inf) == pytest.approx(0.3, rel=0.1)
        assert median.rho(program, many, math.inf) > 100 * median.rho(program, few, math.inf)

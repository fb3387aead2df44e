"""Certificates: true at every point, however bad, and sharp at the optimum."""

import dataclasses
import functools
import math
import warnings

import numpy as np
import pytest
import torch
from covering import covering
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning
from solver_cases import (
    BOTH,
    LOSS_NAMES,
    PENALTY_NAMES,
    PROPERTY,
    cases,
    cvxpy_value,
    design,
    fit,
    make_program,
    numpy_primal,
    probabilities,
    randn,
    random_weight,
    valid_target,
)

from convexformer_solvers import (
    Certificate,
    DenseMap,
    Fista,
    GatedMap,
    GroupL2,
    GroupNuclear,
    Logistic,
    Loss,
    PerTarget,
    Poisson,
    Program,
    Softmax,
    Squared,
    certify,
    get_loss,
    get_penalty,
    get_solver,
    solve,
)
from convexformer_solvers.points import dual_estimate, point_at

every_loss = pytest.mark.parametrize("loss", LOSS_NAMES)
every_penalty = pytest.mark.parametrize("penalty", PENALTY_NAMES)


@functools.cache  # several tests look at the same solutions
def solved(loss, penalty, **flags):
    """A small program and its solution."""
    program = make_program(loss, penalty, **flags)
    return program, fit(program)


@st.composite
def points(draw, loss):
    """A small program of the loss in every variation, a point of it and dual hints."""
    loss, seed = get_loss(loss), draw(st.integers(0, 10**6))
    n, blocks, d, c = (draw(st.integers(low, high)) for low, high in ((2, 8), (1, 3), (1, 3), (2, 3)))
    data = randn(n, blocks, d, seed=seed, scale=draw(st.sampled_from([0.1, 1.0, 3.0])))
    weight = None
    if draw(st.booleans()):
        weight = torch.tensor(draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 7.0]), min_size=n, max_size=n)))
        weight[draw(st.integers(0, n - 1))] = 2.0
    y = valid_target(loss, n, c, torch.Generator().manual_seed(seed), weight)
    linear_map = DenseMap(data)
    if draw(st.booleans()):
        linear_map = GatedMap(data, randn(n, 2, seed=seed + 1) > -0.5)
    penalty, intercept = get_penalty(draw(st.sampled_from(PENALTY_NAMES))), draw(st.booleans())
    program = Program(linear_map, y, loss, penalty, 1.0, weight, intercept)
    # Relative to alpha_max, unless a handful of samples is fitted by a constant.
    reference = program.alpha_max if program.alpha_max > 1e-8 else 1.0
    program = program.with_alpha(reference * draw(st.sampled_from([0.03, 0.3, 0.9, 2.0])))
    coef = randn(*program.coef_shape, seed=seed + 2, scale=draw(st.sampled_from([0.0, 0.1, 1.0, 4.0])))
    shift = randn(c, seed=seed + 3) if intercept else None
    hints = [None, *(randn(n, c, seed=seed + 4, scale=scale) for scale in (0.01, 1.0, 100.0)), y, -y]
    return program, coef, shift, hints


def assert_feasible(program, certificate):
    """The dual point obeys its constraints, by arithmetic of this file."""
    theta = certificate.dual_point.numpy()
    weighted = probabilities(program)[:, None] * theta
    back = design(program).T @ weighted
    dual_norm = program.penalty.dual_norm(torch.as_tensor(back).reshape(program.coef_shape))
    assert float(dual_norm) <= program.alpha * (1 + 1e-12)
    if program.fit_intercept:
        assert (np.abs(weighted.sum(0)) <= 1e-12 * np.abs(weighted).sum(0)).all()
    assert float(program.dual(certificate.dual_point)) == certificate.dual


class TestWeakDuality:
    @every_loss
    @settings(PROPERTY, max_examples=16)  # of which each has six hints
    @given(data=st.data())
    def test_bound_is_below_the_optimum_from_any_point_and_hint(self, loss, data):
        program, coef, shift, hints = data.draw(points(loss))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a draw may stall; its point still bounds the optimum
            best = fit(program, tol=1e-9).certificate
        slack = 1e-9 * program.null_value + 1e-14  # rounding of the loss's terms, which are of size 1
        assert best.dual <= best.primal + slack
        for hint in hints:
            certificate = certify(program, coef, shift, hint)
            assert certificate.dual <= best.primal + slack
            assert certificate.primal >= best.dual - slack
            assert certificate.primal == pytest.approx(numpy_primal(program, coef, shift), rel=1e-10)
            assert_feasible(program, certificate)

    @pytest.mark.parametrize(("loss", "penalty", "gated", "intercept"), covering(LOSS_NAMES, PENALTY_NAMES, BOTH, BOTH))
    def test_wrong_points_get_large_gaps(self, loss, penalty, gated, intercept):
        program = make_program(loss, penalty, gated=gated, intercept=intercept, weighted=True, ratio=0.2)
        best = fit(program)
        optimum, shift = best.certificate.primal, best.intercept
        assert best.certificate.relative_gap <= 1e-9
        blocks = best.coef.reshape(-1, *best.coef.shape[-2:])
        wrong = {
            "random": randn(*program.coef_shape),
            "zero": torch.zeros_like(best.coef),
            "scaled up": 1.5 * best.coef,
            "shrunk": 0.7 * best.coef,
            "negated": -best.coef,
            "blocks permuted": blocks.roll(1, 0).reshape(best.coef.shape),
            "outputs swapped": best.coef.flip(-1),
        }
        for what, coef in wrong.items():
            certificate = certify(program, coef, shift)
            assert certificate.dual <= optimum + 1e-9 * program.null_value, what
            assert certificate.gap >= numpy_primal(program, coef, shift) - optimum - 1e-9 * program.null_value, what
            assert certificate.relative_gap > 1e-4, what

    @every_loss
    @every_penalty
    def test_wrong_intercept_costs_what_it_costs(self, loss, penalty):
        program, best = solved(loss, penalty, intercept=True)
        certificate = certify(program, best.coef, best.intercept + 0.5)
        excess = numpy_primal(program, best.coef, best.intercept + 0.5) - best.certificate.primal
        if loss == "softmax":
            assert excess == pytest.approx(0.0, abs=1e-12)  # a shift of all classes changes nothing
        else:
            assert excess > 1e-3
        assert certificate.gap == pytest.approx(excess + best.certificate.gap, abs=1e-8)

    @every_loss
    @every_penalty
    def test_every_dual_point_bounds_every_primal_point(self, loss, penalty):
        program = make_program(loss, penalty, intercept=True, weighted=True)
        certificates = [
            certify(program, randn(*program.coef_shape, seed=seed, scale=0.3**seed), randn(2, seed=seed))
            for seed in range(8)
        ]
        assert max(each.dual for each in certificates) <= min(each.primal for each in certificates)


class TestHints:
    @every_loss
    @every_penalty
    def test_good_hint_improves_a_poor_point(self, loss, penalty):
        program, best = solved(loss, penalty, intercept=True, weighted=True)
        poor = randn(*program.coef_shape)
        alone = certify(program, poor)
        helped = certify(program, poor, dual_hint=best.certificate.dual_point)
        assert helped.primal == alone.primal
        assert helped.dual == pytest.approx(best.certificate.dual, abs=1e-9)
        assert helped.dual > alone.dual + 1e-4

    @every_loss
    @every_penalty
    @pytest.mark.parametrize("intercept", [False, True])
    def test_bad_hint_costs_nothing(self, loss, penalty, intercept):
        program, best = solved(loss, penalty, intercept=intercept, weighted=True)
        without = certify(program, best.coef, best.intercept)
        for seed, scale in enumerate((0.0, 1e-3, 1.0, 1e6)):
            hint = randn(16, 2, seed=seed, scale=scale)
            certificate = certify(program, best.coef, best.intercept, hint)
            assert certificate.dual >= without.dual
            assert_feasible(program, certificate)

    @every_penalty
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    @pytest.mark.parametrize("intercept", [False, True])
    def test_hint_that_is_not_finite_is_ignored(self, penalty, value, intercept):
        program = make_program("squared", penalty, intercept=intercept)
        coef = randn(*program.coef_shape)
        hint = randn(16, 2)
        hint[3, 1] = value
        assert certify(program, coef, dual_hint=hint) == certify(program, coef)

    @every_loss
    @pytest.mark.parametrize("intercept", [False, True])
    def test_a_multiple_of_a_good_hint_is_as_good(self, loss, intercept):
        program = make_program(loss, "group_l2", intercept=intercept, ratio=0.1)  # no output without coefficients
        result, poor = fit(program), torch.zeros(program.coef_shape)
        helped = certify(program, poor, program.null_intercept, 3 * result.certificate.dual_point)
        assert helped.dual == pytest.approx(result.certificate.dual, abs=1e-6 * program.null_value)

    @pytest.mark.parametrize("intercept", [False, True])
    def test_a_hint_just_outside_the_domain_is_as_good_where_it_need_not_be_scaled(self, intercept):
        program = make_program("huber", intercept=intercept)
        program = dataclasses.replace(program, y=1e3 * program.y)  # slopes at the edge of the domain
        program = program.with_alpha(10 * program.alpha_max)
        hint, poor = (1 + 1e-9) * program.null_dual_point, randn(*program.coef_shape, scale=1e5)
        assert certify(program, poor, dual_hint=hint).dual == pytest.approx(program.null_value, rel=1e-6)


class TestFeasibility:
    @pytest.mark.parametrize(("loss", "penalty", "gated", "intercept"), cases("gated", "intercept"))
    def test_dual_point_obeys_its_constraints(self, loss, penalty, gated, intercept):
        program = make_program(loss, penalty, gated=gated, intercept=intercept, weighted=True)
        for coef in (randn(*program.coef_shape), torch.zeros(program.coef_shape, dtype=torch.float64)):
            for hint in (None, randn(16, 2, scale=3.0)):
                assert_feasible(program, certify(program, coef, dual_hint=hint))

    @every_loss
    @every_penalty
    def test_constraint_is_active_below_alpha_max(self, loss, penalty):
        program, best = solved(loss, penalty, intercept=True)
        theta = best.certificate.dual_point
        assert float(program.penalty.dual_norm(program.weighted_adjoint(theta))) == pytest.approx(
            program.alpha, rel=1e-6
        )

    def test_outputs_are_scaled_apart_where_they_separate(self):
        # One output far off must not spoil the bound of another that is solved.
        program = make_program("squared", "group_l2", n=30)
        best = fit(program, tol=1e-12)
        coef = best.coef.clone()
        coef[..., 1] += 5.0
        one = Program(program.map, program.y[:, :1], program.loss, program.penalty, program.alpha)
        other = Program(program.map, program.y[:, 1:], program.loss, program.penalty, program.alpha)
        separate = certify(one, coef[..., :1]).dual + certify(other, coef[..., 1:]).dual
        assert certify(program, coef).dual == pytest.approx(separate, rel=1e-12)

    def test_squared_loss_uses_the_best_feasible_scale(self):
        program = make_program("squared", "nuclear")
        coef = randn(*program.coef_shape)
        residual = program.y - program.map.matvec(coef)
        limit = program.alpha / float(program.penalty.dual_norm(program.weighted_adjoint(residual)))
        bounds = [float(program.dual(scale * residual)) for scale in np.linspace(0, limit, 2001)]
        dual = certify(program, coef).dual
        assert max(bounds) <= dual + 1e-15
        assert dual == pytest.approx(max(bounds), rel=1e-5)

    @every_penalty
    @pytest.mark.parametrize("share", [0.5, 3.0])
    def test_squared_loss_scales_to_the_vertex_where_that_is_feasible(self, penalty, share):
        program = make_program("squared", penalty, n=5)  # fewer samples than features: a fit without residuals
        program = program.with_alpha(100 * program.alpha_max)
        coef = share * torch.linalg.lstsq(torch.as_tensor(design(program)), program.y).solution.view(program.coef_shape)
        coef = coef + 0.1 * randn(*program.coef_shape)
        residual = program.y - program.map.matvec(coef)
        along, square = (program.weight @ (residual * other) for other in (program.y, residual))
        if penalty == "nuclear":  # one scale for all outputs
            along, square = along.sum(), square.sum()
        assert bool((along > 0).all()) == (share < 1)  # beyond the fit no positive scale is better than zero
        best = float((along.clamp(min=0).square() / (2 * square)).sum())
        assert certify(program, coef).dual == pytest.approx(best, rel=1e-12, abs=1e-15)


class TestPrecision:
    @pytest.mark.parametrize(("loss", "penalty", "gated"), cases("gated"))
    def test_float32_point_is_certified_in_float64(self, loss, penalty, gated):
        program = make_program(loss, penalty, gated=gated, intercept=True, weighted=True)
        single = program.to(torch.float32)
        coef, shift = randn(*program.coef_shape).float(), randn(2).float()
        certificate = certify(single, coef, shift)
        # The float32 data are taken as they are; only the arithmetic is float64.
        double = single.to(torch.float64)
        assert certificate.primal == pytest.approx(numpy_primal(double, coef, shift), rel=1e-13)
        assert certificate.dual_point.dtype == torch.float64
        again = certify(double, coef.double(), shift.double())
        assert certificate.primal == pytest.approx(again.primal, rel=1e-13)
        assert certificate.dual == pytest.approx(again.dual, rel=1e-10, abs=1e-13)
        assert_feasible(double, certificate)

    def test_weights_keep_their_float64_digits(self):
        # Targets in float32 must not round the weights.
        program = make_program("squared", weighted=True)
        mixed = Program(
            program.map, program.y.float(), program.loss, program.penalty, program.alpha, program.sample_weight
        )
        coef = randn(*program.coef_shape)
        expected = Program(
            program.map, program.y.float().double(), program.loss, program.penalty, program.alpha, program.sample_weight
        )
        assert certify(mixed, coef).primal == pytest.approx(numpy_primal(expected, coef), rel=1e-14)

    def test_point_is_left_alone(self):
        program = make_program("logistic", intercept=True)
        coef, shift, hint = randn(*program.coef_shape), randn(2), randn(16, 2)
        before = coef.clone(), shift.clone(), hint.clone()
        certify(program, coef, shift, hint)
        assert all(torch.equal(a, b) for a, b in zip((coef, shift, hint), before, strict=True))


class WithoutConjugate(Squared):
    conjugate = Loss.conjugate


class TestWithoutConjugate:
    @every_penalty
    @pytest.mark.parametrize("intercept", [False, True])
    def test_gap_is_nan_and_never_zero(self, penalty, intercept):
        program = make_program(WithoutConjugate(), penalty, intercept=intercept)
        for coef in (randn(*program.coef_shape), torch.zeros(program.coef_shape, dtype=torch.float64)):
            for hint in (None, randn(16, 2)):
                certificate = certify(program, coef, dual_hint=hint)
                assert math.isfinite(certificate.primal)
                assert math.isnan(certificate.dual)
                assert math.isnan(certificate.gap)
                assert math.isnan(certificate.relative_gap)

    @every_penalty
    def test_solve_warns_and_returns_the_smallest_objective(self, penalty):
        program = make_program(WithoutConjugate(), penalty)
        with pytest.warns(ConvergenceWarning, match="gap nan"):
            result = solve(program, Fista(), tol=1e-3, max_iter=500)
        squared = fit(make_program(Squared(), penalty))
        assert result.certificate.primal == pytest.approx(squared.certificate.primal, rel=1e-8)
        assert result.certificate.primal == min(result.history.primal)


class TestDegenerate:
    """Valid bounds and no nan where there is nothing to learn."""

    @staticmethod
    def assert_honest(program, gap=1e-6):
        result = fit(program, tol=gap, max_iter=2000)
        certificate = result.certificate
        slack = 1e-12 * max(abs(certificate.primal), 1e-6)
        assert -slack <= certificate.gap <= gap * max(program.null_value, 1e-12)
        assert torch.isfinite(result.coef).all()
        assert torch.isfinite(result.intercept).all()
        assert_feasible(program, certificate)
        return result

    @pytest.mark.parametrize(("loss", "penalty", "intercept"), cases("intercept"))
    def test_all_zero_data(self, loss, penalty, intercept):
        program = make_program(loss, penalty, intercept=intercept, scale=0.0)
        assert program.alpha_max == pytest.approx(0.0, abs=1e-15)
        result = self.assert_honest(program.with_alpha(0.1))
        assert (result.coef == 0).all()
        assert result.certificate.primal == pytest.approx(program.null_value, rel=1e-12)

    @pytest.mark.parametrize("n", [6, 7, 9, 11, 16])
    @pytest.mark.parametrize(("loss", "penalty"), cases())
    def test_constant_target_with_intercept(self, loss, penalty, n):
        # The constant fits exactly (or in the limit), so the optimum is 0 and the only true bound is at most 0.
        loss = get_loss(loss)
        row = loss.example_target(50, 2, torch.Generator().manual_seed(1)).double()
        row = row[row.prod(1).argmax()] if loss.targets == "real" else row[0]
        program = Program(
            DenseMap(randn(n, 3, 2)), row.expand(n, 2).clone(), loss, get_penalty(penalty), 0.1, fit_intercept=True
        )
        result = fit(program, tol=1e-2)
        assert result.certificate.primal == pytest.approx(0.0, abs=1e-12)
        assert result.certificate.dual == pytest.approx(0.0, abs=1e-12)
        assert result.certificate.dual <= 1e-12
        assert_feasible(program, result.certificate)
        poor = certify(program, randn(*program.coef_shape), torch.zeros(2, dtype=torch.float64))
        assert poor.dual <= 1e-12

    @pytest.mark.parametrize(("loss", "penalty", "intercept"), cases("intercept"))
    def test_single_sample(self, loss, penalty, intercept):
        loss = get_loss(loss)
        y = valid_target(loss, 1, 2, torch.Generator().manual_seed(0))
        program = Program(DenseMap(randn(1, 3, 2)), y, loss, get_penalty(penalty), 0.1, None, intercept)
        certificate = fit(program, tol=1e-6).certificate
        assert certificate.dual <= certificate.primal + 1e-12
        assert certificate.relative_gap <= 1e-6
        assert_feasible(program, certificate)

    @pytest.mark.parametrize(("loss", "penalty", "intercept"), cases("intercept"))
    def test_single_block_of_one_feature(self, loss, penalty, intercept):
        self.assert_honest(make_program(loss, penalty, intercept=intercept, blocks=1, d=1))

    @pytest.mark.parametrize(("loss", "penalty", "intercept"), cases("intercept"))
    def test_duplicated_columns_and_blocks(self, loss, penalty, intercept):
        program, best = solved(loss, penalty, intercept=intercept)
        data = program.map.data
        doubled = torch.cat([data, data], 1)
        twice = Program(
            DenseMap(doubled), program.y, program.loss, program.penalty, program.alpha, None, program.fit_intercept
        )
        result = self.assert_honest(twice)
        # A second copy of a block costs the same and gives nothing.
        assert result.certificate.primal == pytest.approx(best.certificate.primal, abs=2e-6)

    @pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
    @pytest.mark.parametrize(("loss", "penalty", "intercept"), covering(LOSS_NAMES, PENALTY_NAMES, BOTH))
    def test_badly_scaled_columns(self, loss, penalty, intercept):
        program = make_program(loss, penalty, intercept=intercept, blocks=4, d=2)
        scales = torch.logspace(-3, 3, 4, dtype=torch.float64)[:, None]
        bad = Program(
            DenseMap(program.map.data * scales), program.y, program.loss, program.penalty, 1.0, None, intercept
        )
        bad = bad.with_alpha(0.01 * bad.alpha_max)
        certificate = solve(bad, Fista(), tol=1e-6, max_iter=300).certificate
        value = cvxpy_value(bad)
        assert certificate.dual <= value + 1e-6 * bad.null_value
        assert certificate.primal >= value - 1e-6 * bad.null_value
        assert math.isfinite(certificate.gap)
        assert_feasible(bad, certificate)

    @every_penalty
    @pytest.mark.parametrize("loss", ["squared", "huber", "softmax"])
    @pytest.mark.parametrize("exponent", [-900, -560, 560, 900])
    def test_units_of_the_data_change_nothing(self, loss, penalty, exponent):
        """Even where squares of the data are too small or too large for float64."""
        program = make_program(loss, penalty, n=30, c=2, intercept=True)
        unit = torch.tensor(2.0, dtype=torch.float64).pow(exponent)
        other = dataclasses.replace(program, map=DenseMap(program.map.data * unit))
        assert other.alpha_max == pytest.approx(program.alpha_max * float(unit), rel=1e-12)
        program, other = (part.with_alpha(0.1 * part.alpha_max) for part in (program, other))
        for coef in (torch.zeros(program.coef_shape).double(), 0.01 * randn(*program.coef_shape)):
            expected = certify(program, coef, program.null_intercept)
            found = certify(other, coef / unit, other.null_intercept)
            assert 0 < expected.gap == pytest.approx(found.gap, rel=1e-10)

    @pytest.mark.parametrize("solver", ["fista", "smoothing_newton", "auto"])
    @pytest.mark.parametrize("unit", [1e-200, 1e-160, 1e160, 1e200])
    def test_targets_whose_squares_leave_the_range_have_no_gap_of_zero(self, unit, solver):
        program = make_program("squared", "group_l2", n=30, intercept=True)
        other = dataclasses.replace(program, y=program.y * unit, alpha=0.1 * program.alpha_max * unit)
        with pytest.raises(ValueError, match="scale the features"):
            certify(other, torch.zeros(program.coef_shape).double())
        with pytest.raises(ValueError, match="scale the features"):
            solve(other, get_solver(solver))

    def test_targets_of_zero_have_a_gap_of_zero(self):
        program = make_program("squared", "group_l2", n=30)
        other = dataclasses.replace(program, y=0 * program.y)
        assert certify(other, torch.zeros(program.coef_shape).double()).relative_gap == 0

    @pytest.mark.parametrize("exponent", [-900, 0])
    def test_units_of_one_output_change_nothing(self, exponent):
        program = make_program("squared", "group_l2", n=30, c=2)
        unit = torch.tensor(2.0, dtype=torch.float64).pow(exponent)
        y = program.y * torch.stack([torch.ones_like(unit), unit])
        alone = dataclasses.replace(program, y=y[:, 1:]).with_alpha(1e-3 * float(unit))
        theta = certify(
            dataclasses.replace(program, y=y).with_alpha(alone.alpha), torch.zeros(program.coef_shape).double()
        )
        slope = alone.weighted_adjoint(theta.dual_point[:, 1:]) / unit
        assert float(alone.penalty.dual_norm(slope)) <= 1e-3 * (1 + 1e-12)

    @every_penalty
    @pytest.mark.parametrize("offset", [1e3, 1e6])
    def test_targets_far_from_zero(self, penalty, offset):
        program = make_program("squared", penalty, intercept=True)
        far = dataclasses.replace(program, y=program.y + offset)
        near, result = fit(program), fit(far, tol=1e-6)
        slack = 1e-15 * offset * program.null_value
        assert result.certificate.dual <= near.certificate.primal + slack
        assert result.certificate.gap >= -slack
        assert result.certificate.primal >= near.certificate.dual - slack
        assert result.certificate.reference == pytest.approx(program.null_value, rel=1e-6)

    @pytest.mark.parametrize("offset", [1e4, 1e6, 1e8])
    @pytest.mark.parametrize("loss", ["squared", "huber"])
    def test_float32_data_do_not_make_targets_far_from_zero_constant(self, loss, offset):
        program = make_program(loss, "group_l2", intercept=True)
        far = Program(DenseMap(program.map.data.float()), program.y + offset, program.loss, GroupL2(), 0.01, None, True)
        assert far.null_value == pytest.approx(program.null_value, rel=1e-6)
        assert not certify(far, torch.zeros(far.coef_shape), far.null_intercept).relative_gap <= 0.1

    @pytest.mark.parametrize("offset", [0.0, 1e5, 1e8])
    def test_a_hint_with_a_mean_is_centred(self, offset):
        program = make_program("squared", "group_l2", intercept=True)
        far = dataclasses.replace(program, y=program.y + offset)
        result = fit(far, tol=1e-6)
        certificate = certify(far, result.coef, result.intercept, result.certificate.dual_point + 1e5)
        assert certificate.dual <= fit(program, tol=1e-10).certificate.primal + 1e-15 * offset * program.null_value
        assert float((program.weight @ certificate.dual_point).abs().max()) <= 1e-13

    @pytest.mark.parametrize(
        ("loss", "penalty", "intercept"),
        covering(["huber", "logistic", "softmax", "squared_hinge", "poisson"], PENALTY_NAMES, BOTH),
    )
    def test_a_hint_that_rounding_put_out_of_the_domain_is_as_good(self, loss, penalty, intercept):
        program = make_program(loss, penalty, intercept=intercept)
        if loss == "huber":  # residuals on the linear parts, whose slopes are at the edge of the domain
            program = dataclasses.replace(program, y=1e3 * program.y)
        program = program.with_alpha(1e-3 * program.alpha_max)
        result = solve(program, get_solver("auto"), tol=1e-7)
        theta = result.certificate.dual_point
        outwards = torch.where(theta == 0, 1.0, theta.sign()) + (0.5 if loss == "softmax" else 0.0)
        out = theta + 1e-9 * outwards * theta.abs().max()
        poor = torch.zeros(program.coef_shape)
        helped = certify(program, poor, program.null_intercept, out)
        assert helped.dual <= result.certificate.primal
        assert helped.dual >= result.certificate.dual - 1e-5 * program.null_value

    @pytest.mark.parametrize("in_memory", [True, False])
    @pytest.mark.parametrize("loss", ["logistic", "softmax"])
    def test_a_hint_that_scaling_brings_into_the_domain_is_as_good(self, loss, in_memory):
        program = make_program(loss, intercept=True, ratio=0.05)
        program.map.in_memory = in_memory
        best = fit(program).certificate
        hint = 10 * best.dual_point
        assert float(program.dual(hint)) == -math.inf
        found = certify(program, torch.zeros(program.coef_shape), program.null_intercept, hint)
        assert found.dual == pytest.approx(best.dual, rel=1e-9)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("solver", ["auto", "fista", "admm"])
    @pytest.mark.parametrize(("penalty", "c"), [(GroupL2(), 1), (GroupNuclear(), 2)], ids=["group_l2", "nuclear"])
    def test_data_that_are_not_finite_get_no_certificate(self, bad, solver, penalty, c):
        """Torch has no singular values of groups of these."""
        data = randn(20, 3, 2)
        data[3, 1, 0] = bad
        program = Program(DenseMap(data), randn(20, c, seed=1), get_loss("squared"), penalty, 0.01)
        with pytest.raises(ValueError, match="data of the map must be finite"):
            certify(program, torch.zeros(program.coef_shape))
        with pytest.raises(ValueError, match="data of the map must be finite"):
            program.alpha_max  # noqa: B018
        with pytest.raises(ValueError, match="data"):
            solve(program, get_solver(solver))

    def test_a_loss_cannot_scale_beyond_feasibility(self):
        class Careless(Squared):
            quadratic = False

            def best_dual_scale(self, theta, y, weight, limit):
                return torch.ones_like(limit)

        program = dataclasses.replace(make_program("squared", "group_l2"), loss=Careless())
        certificate = certify(program, torch.zeros(program.coef_shape))
        slope = program.weighted_adjoint(certificate.dual_point)
        assert float(program.penalty.dual_norm(slope)) <= program.alpha * (1 + 1e-12)
        assert certificate.dual <= fit(make_program("squared", "group_l2")).certificate.primal

    @pytest.mark.parametrize("scale", [-1.0, -100.0])
    def test_a_loss_cannot_turn_a_dual_point_round(self, scale):
        class Wrong(Squared):
            quadratic = False

            def best_dual_scale(self, theta, y, weight, limit):
                return torch.full_like(limit, scale)

        program = dataclasses.replace(make_program("squared", "group_l2"), loss=Wrong())
        assert certify(program, torch.zeros(program.coef_shape)).dual == 0

    @every_penalty
    @pytest.mark.parametrize("intercept", [False, True])
    def test_data_whose_products_overflow_give_a_bound_of_zero(self, penalty, intercept):
        data = 1e300 * torch.tensor([1.0, -1.0, 2.0, -2.0], dtype=torch.float64)[:, None, None]
        y = 1e10 * torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        program = Program(DenseMap(data), y, Squared(), get_penalty(penalty), 1.0, None, intercept)
        certificate = certify(program, torch.zeros(program.coef_shape), program.null_intercept)
        assert certificate.primal == pytest.approx(program.null_value)
        assert certificate.dual == 0

    @pytest.mark.parametrize("loss", ["squared", "huber", "poisson", "logistic"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("value", [1.0, 26.0, 1e6])
    def test_constant_targets_are_solved(self, loss, dtype, value):
        y = torch.full((29, 1), 1.0 if loss == "logistic" else value, dtype=dtype)
        program = Program(DenseMap(randn(29, 3, 2).to(dtype)), y, get_loss(loss), GroupL2(), 0.01, None, True)
        for solver in ("auto", "fista"):
            assert solve(program, get_solver(solver)).certificate.relative_gap <= 1e-4

    @every_penalty
    @pytest.mark.parametrize("size", [1e4, 1e8])
    def test_large_counts(self, penalty, size):
        # Terms of size y log y cancel; what is left keeps about ten digits of them.
        y = (size * torch.rand((20, 2), generator=torch.Generator().manual_seed(0), dtype=torch.float64)).round()
        program = Program(DenseMap(0.1 * randn(20, 3, 2)), y, Poisson(), get_penalty(penalty), 1.0, None, True)
        program = program.with_alpha(0.1 * program.alpha_max)
        certificate = fit(program, tol=1e-6).certificate
        assert -1e-9 <= certificate.relative_gap <= 1e-6
        assert certificate.dual <= cvxpy_free_bound(program)

    @every_penalty
    @pytest.mark.parametrize("intercept", [False, True])
    @pytest.mark.parametrize("size", [1e3, 1e6])
    def test_point_where_the_objective_overflows(self, penalty, intercept, size):
        program = make_program("poisson", penalty, intercept=intercept)
        coef = size * randn(*program.coef_shape)
        certificate = certify(program, coef)
        assert certificate.primal == math.inf
        assert certificate.dual <= fit(program).certificate.primal
        assert certificate.gap == math.inf

    @every_loss
    @pytest.mark.parametrize("intercept", [False, True])
    def test_one_weighted_sample(self, loss, intercept):
        loss = get_loss(loss)
        weight = torch.zeros(5, dtype=torch.float64)
        weight[2] = 3.0
        y = valid_target(loss, 5, 2, torch.Generator().manual_seed(0), weight)
        program = Program(DenseMap(randn(5, 2, 2)), y, loss, GroupL2(), 0.1, weight, intercept)
        alone = program.rows(torch.tensor([2]))
        assert certify(program, torch.zeros(program.coef_shape)).primal == pytest.approx(
            certify(alone, torch.zeros(program.coef_shape)).primal
        )
        certificate = fit(program, tol=1e-6).certificate
        assert certificate.dual <= fit(alone, tol=1e-6).certificate.primal + 1e-12
        assert_feasible(program, certificate)

    def test_class_that_never_occurs(self):
        scores = randn(12, 2).argmax(1)
        y = torch.nn.functional.one_hot(scores, 3).double()  # the third class is absent
        program = Program(DenseMap(randn(12, 2, 2)), y, Softmax(), GroupL2(), 0.02, None, True)
        two = Program(DenseMap(randn(12, 2, 2)), y[:, :2], Softmax(), GroupL2(), 0.02, None, True)
        result = self.assert_honest(program)
        assert result.certificate.primal == pytest.approx(fit(two).certificate.primal, abs=1e-6)

    def test_separable_classes(self):
        data = randn(12, 2, 2)
        y = torch.sign(data[:, 0, :1])
        program = Program(DenseMap(data), y, Logistic(), GroupL2(), 1e-4, None, True)
        self.assert_honest(program, gap=1e-4)


def cvxpy_free_bound(program):
    """Smallest objective over a few points near the optimum, each of which every dual bound must respect."""
    best = fit(program, tol=1e-6)
    values = [
        numpy_primal(program, best.coef + scale * randn(*best.coef.shape, seed=seed), best.intercept)
        for seed in range(5)
        for scale in (0.0, 1e-6, 1e-4)
    ]
    return min(values)


class TestCertificate:
    def test_figures(self):
        certificate = Certificate(primal=3.0, dual=2.5, reference=4.0)
        assert certificate.gap == 0.5
        assert certificate.relative_gap == 0.125

    def test_gap_of_zero_is_zero_whatever_the_reference(self):
        assert Certificate(1.0, 1.0, 0.0).relative_gap == 0.0
        assert Certificate(1.0, 0.5, 0.0).relative_gap == math.inf

    def test_tighten_keeps_the_point_and_takes_the_better_bound(self):
        theta, other = torch.zeros(1, 1), torch.ones(1, 1)
        loose, tight = Certificate(3.0, 1.0, 4.0, theta), Certificate(3.5, 2.0, 4.0, other)
        best = loose.tighten(tight)
        assert (best.primal, best.dual) == (3.0, 2.0)
        assert best.dual_point is other
        assert tight.tighten(loose) is tight
        without = Certificate(3.0, math.nan, 4.0)
        assert loose.tighten(without).dual == 1.0

    def test_repr_has_the_gap(self):
        assert "gap=0.5" in repr(Certificate(3.0, 2.5, 4.0))

    def test_reference_is_the_best_constant_objective(self):
        program = make_program("huber", intercept=True, weighted=True)
        assert certify(program, randn(*program.coef_shape)).reference == program.null_value

    @pytest.mark.parametrize(
        ("coef", "intercept", "message"),
        [
            (randn(2, 2, 2), None, r"coef must have shape \(3, 2, 2\)"),
            (randn(6, 2), None, "coef must have shape"),
            (randn(3, 2, 2), randn(3), r"intercept must have shape \(2,\)"),
            (torch.full((3, 2, 2), math.nan), None, "must be finite"),
            (torch.full((3, 2, 2), math.inf), None, "must be finite"),
            (randn(3, 2, 2), torch.tensor([0.0, math.nan]), "must be finite"),
            (randn(3, 2, 2) + 1j, None, "coef must hold real numbers, got torch.complex128"),
            (randn(3, 2, 2), torch.tensor([0.0, 1j]), "intercept must hold real numbers, got torch.complex64"),
        ],
        ids=range(8),
    )
    def test_wrong_points_are_refused(self, coef, intercept, message):
        with pytest.raises(ValueError, match=message):
            certify(make_program(intercept=True), coef, intercept)

    def test_intercept_of_a_program_without_one_is_refused(self):
        program = make_program()
        with pytest.raises(ValueError, match="intercept must be zero"):
            certify(program, randn(*program.coef_shape), torch.ones(2))
        certify(program, randn(*program.coef_shape), torch.zeros(2))

    @pytest.mark.parametrize("penalty", [GroupNuclear(), GroupL2()], ids=["nuclear", "group_l2"])
    @pytest.mark.parametrize("loss", ["squared", "huber", "logistic"])
    def test_bound_of_a_sequence_is_the_sum_of_those_of_its_target_rows(self, loss, penalty):
        loss, y = get_loss(loss), randn(16, 6, seed=1) * torch.tensor([1.0, 1, 1, 9, 9, 9])
        y = torch.where(y > 0, 1.0, -1.0).double() if loss == Logistic() else y.double()
        map_, coef, alpha = DenseMap(randn(16, 3, 2)), randn(3, 2, 6, seed=2), 0.02
        for intercept, weight in ((False, None), (True, random_weight(16))):
            whole = Program(map_, y, loss, PerTarget(penalty, 2), alpha, weight, intercept)
            rows = [Program(map_, part, loss, penalty, alpha, weight, intercept) for part in y.chunk(2, dim=1)]
            bounds = [certify(row, part).dual for row, part in zip(rows, coef.chunk(2, dim=-1), strict=True)]
            assert certify(whole, coef).dual == pytest.approx(sum(bounds), rel=1e-12)
            own = point_at(whole, coef)
            estimate = sum(dual_estimate(row, point_at(row, p)) for row, p in zip(rows, coef.chunk(2, -1), strict=True))
            simple = dataclasses.replace(whole, penalty=whole.penalty.for_outputs(6))
            assert dual_estimate(simple, own) == pytest.approx(estimate, rel=1e-12)

    @pytest.mark.parametrize("loss", ["squared", "huber", "logistic"])
    def test_bound_of_separate_outputs_is_the_sum_of_theirs(self, loss):
        program = make_program(loss, "group_l2", c=3, intercept=True, weighted=True)
        coef = randn(*program.coef_shape) * torch.tensor([0.1, 1.0, 4.0])
        each = [dataclasses.replace(program, y=program.y[:, [output]]) for output in range(3)]
        bounds = [certify(one, part).dual for one, part in zip(each, coef.split(1, dim=-1), strict=True)]
        assert certify(program, coef).dual == pytest.approx(sum(bounds), rel=1e-12)

    def test_weights_reach_the_certificate(self):
        program = make_program("logistic")
        weighted = Program(
            program.map, program.y, program.loss, program.penalty, program.alpha, random_weight(16), False
        )
        coef = randn(*program.coef_shape)
        assert abs(certify(weighted, coef).primal - certify(program, coef).primal) > 1e-3


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("change", [lambda back: 1.1 * back, lambda back: -back, lambda back: back.flip(0)])
@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("overflows", [True, False])
def test_no_certificate_of_a_map_with_a_wrong_adjoint(in_memory, change, fit_intercept, overflows):
    """A bound from a wrong adjoint bounds nothing, and a solver that is led astray by it ends with that error too."""

    class Wrong(DenseMap):
        def rmatvec(self, values):
            return change(super().rmatvec(values))

    program = make_program("squared", "group_l2", intercept=fit_intercept, weighted=overflows)
    coef = randn(*program.coef_shape)
    if overflows:  # a prediction that does not count switches no test off
        program.map.data[program.weight == 0] = coef.sign()[..., 0] * torch.finfo(coef.dtype).max
    linear_map = Wrong(program.map.data)
    linear_map.in_memory = in_memory
    wrong = dataclasses.replace(program, map=linear_map)
    assert certify(program, coef).gap >= 0
    with pytest.raises(ValueError, match="map must have an rmatvec that is the adjoint"):
        certify(wrong, coef)
    certify(wrong, 0 * coef)  # where nothing tells
    with pytest.raises(ValueError, match="map must have an rmatvec"):
        solve(wrong, Fista(), tol=1e-6, max_iter=100)

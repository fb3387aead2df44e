"""The program: objective, dual, alpha_max, best constants, agreement with scikit-learn, invariances, errors."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import sklearn
import torch
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import Lasso, LogisticRegression, MultiTaskLasso
from solver_cases import (
    BOTH,
    LOSS_NAMES,
    PENALTY_NAMES,
    PROPERTY,
    cases,
    design,
    fit,
    in_turn,
    make_program,
    numpy_loss,
    numpy_primal,
    probabilities,
    randn,
    random_weight,
)

from convexformer_solvers import (
    Auto,
    DenseMap,
    GatedMap,
    GroupL2,
    GroupNuclear,
    Huber,
    Logistic,
    Poisson,
    Program,
    Softmax,
    Squared,
    alpha_grid,
    get_loss,
    get_penalty,
    solve,
)

every_loss = pytest.mark.parametrize("loss", LOSS_NAMES)
every_penalty = pytest.mark.parametrize("penalty", PENALTY_NAMES)
every_case = pytest.mark.parametrize(("loss", "penalty", "gated", "intercept"), cases("gated", "intercept"))


class TestValues:
    @pytest.mark.parametrize(("loss", "penalty", "gated", "weighted"), cases("gated", "weighted"))
    def test_primal_is_mean_loss_plus_alpha_times_penalty(self, loss, penalty, gated, weighted):
        program = make_program(loss, penalty, gated=gated, weighted=weighted, intercept=True)
        coef, intercept = randn(*program.coef_shape, seed=1), randn(2, seed=2)
        assert float(program.primal(coef, intercept)) == pytest.approx(
            numpy_primal(program, coef, intercept), rel=1e-12
        )
        assert float(program.primal(coef)) == pytest.approx(numpy_primal(program, coef), rel=1e-12)

    @every_loss
    def test_weights_sum_to_one(self, loss):
        assert float(make_program(loss).weight.sum()) == pytest.approx(1.0)
        assert float(make_program(loss, weighted=True).weight.sum()) == pytest.approx(1.0)

    @every_loss
    def test_pull_back_is_minus_the_gradient_of_the_mean_loss(self, loss):
        program = make_program(loss, weighted=True, gated=True)
        coef, move = randn(*program.coef_shape, seed=1, scale=0.3), 1e-6 * randn(*program.coef_shape, seed=2)
        ends = [float(program.loss_value(program.map.matvec(coef + sign * move))) for sign in (1, -1)]
        theta = -program.loss.gradient(program.map.matvec(coef), program.y)
        slope = -float((program.weighted_adjoint(theta) * move).sum())
        assert (ends[0] - ends[1]) / 2 == pytest.approx(slope, rel=1e-5)

    @every_loss
    def test_dual_at_zero_is_the_smallest_loss(self, loss):
        # D(0) = -mean l*(0) = mean min_f l(f, y), which no objective can be below.
        program = make_program(loss, weighted=True)
        zero = float(program.dual(torch.zeros_like(program.y)))
        preds = [scale * randn(16, 2, seed=seed) for scale in (0.1, 1.0, 3.0) for seed in range(5)]
        # Predictions that are about right for every loss: large where targets are, and of the right sign.
        preds += [program.y, 30.0 * program.y, torch.log(program.y.clamp(min=1e-6))]
        values = [float(program.loss_value(pred)) for pred in preds]
        assert zero <= min(values)
        assert zero == pytest.approx(min(values), abs=1e-5)

    def test_dual_ignores_samples_without_weight(self):
        program = make_program("logistic", weighted=True)
        theta = 0.5 * program.y
        before = float(program.dual(theta))
        theta[program.weight == 0] = 100.0  # far outside the conjugate's domain
        assert (program.weight == 0).any()
        assert float(program.dual(theta)) == before > -math.inf

    def test_dual_is_minus_infinity_outside_the_domain(self):
        program = make_program("logistic")
        assert float(program.dual(2.0 * program.y)) == -math.inf

    @every_case
    def test_null_value_is_the_best_constant_objective(self, loss, penalty, gated, intercept):
        program = make_program(loss, penalty, gated=gated, intercept=intercept, weighted=True)
        zero = torch.zeros(program.coef_shape, dtype=torch.float64)
        value = numpy_primal(program, zero, program.null_intercept)
        assert program.null_value == pytest.approx(value, rel=1e-12)
        assert bool((program.null_intercept == 0).all()) is not intercept
        if intercept:
            for shift in 0.01 * torch.eye(2, dtype=torch.float64):
                for sign in (-1, 1):
                    assert numpy_primal(program, zero, program.null_intercept + sign * shift) >= value - 1e-15

    def test_null_value_of_a_constant_target_stays_above_rounding(self):
        data = DenseMap(randn(6, 2, 1))
        program = Program(data, torch.full((6, 1), 3.0).double(), Squared(), GroupL2(), 0.1, fit_intercept=True)
        assert 0 < program.null_value < 1e-8

    @every_loss
    def test_null_value_is_that_of_double_precision(self, loss):
        program = make_program(loss, weighted=True, intercept=True).to(torch.float32)
        wanted = numpy_primal(program, torch.zeros(program.coef_shape), program.with_float64_targets().null_intercept)
        assert program.null_value == pytest.approx(wanted, rel=1e-12)

    def test_null_value_of_a_rare_class_is_its_entropy_in_single_precision_too(self):
        y = -torch.ones(200, 1)
        y[0] = 1.0
        program = Program(DenseMap(randn(200, 2, 1, dtype=torch.float32)), y, Logistic(), GroupL2(), 0.1, None, True)
        share = 1 / 200
        entropy = -share * math.log(share) - (1 - share) * math.log1p(-share)
        assert program.null_value == pytest.approx(entropy, rel=1e-12)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_null_value_that_is_rounding_is_a_share_of_the_terms_in_the_precision_of_the_data(self, dtype):
        data, y = DenseMap(randn(6, 2, 1, dtype=dtype)), torch.full((6, 1), 3.0, dtype=dtype)
        program = Program(data, y, Squared(), GroupL2(), 0.1, fit_intercept=True)
        assert program.null_value == pytest.approx(1e6 * torch.finfo(dtype).eps * 4.5)

    def test_reads_as_its_sizes_and_holds_no_numbers_of_the_data(self):
        y = torch.full((40, 2), 0.125, dtype=torch.float64)
        program = Program(DenseMap(randn(40, 3, 2)), y, Squared(), GroupL2(), 0.1, torch.ones(40), fit_intercept=True)
        assert repr(program) == (
            "Program(DenseMap of 40 weighted samples, coefficients (3, 2, 2), Squared(), GroupL2(), alpha=0.1, "
            "fit_intercept=True)"
        )

    def test_with_alpha_changes_nothing_else(self):
        program = make_program("huber", "nuclear", intercept=True, weighted=True)
        other = program.with_alpha(2.5)
        assert other.alpha == 2.5
        assert program.alpha != 2.5
        assert other.map is program.map
        assert other.sample_weight is program.sample_weight
        assert other.fit_intercept
        assert other.alpha_max == program.alpha_max
        for name in ("alpha_max", "null_value", "null_intercept", "weight"):
            fresh = getattr(dataclasses.replace(program, alpha=0.7), name)
            assert torch.equal(torch.as_tensor(getattr(program.with_alpha(0.7), name)), torch.as_tensor(fresh)), name

    @every_loss
    def test_on_other_features_all_that_depends_on_them_is_computed_anew(self, loss):
        program = make_program(loss, intercept=True, weighted=True)
        names = ("weight", "null_intercept", "null_value", "alpha_max", "null_dual_norms", "coef_shape")
        for name in names:  # known before
            getattr(program, name)
        fewer = DenseMap(program.map.columns(torch.tensor([2, 0])))
        other, fresh = program.with_map(fewer), dataclasses.replace(program, map=fewer)
        assert other.null_intercept is program.null_intercept
        for name in names:
            assert torch.equal(torch.as_tensor(getattr(other, name)), torch.as_tensor(getattr(fresh, name))), name

    @pytest.mark.parametrize("name", ["weight", "null_intercept"])
    def test_what_does_not_depend_on_alpha_is_computed_once(self, name):
        program = make_program("logistic", intercept=True, weighted=True).to(torch.float32)
        found = getattr(program.with_alpha(0.7), name)  # known to all from then on
        assert getattr(program, name) is getattr(program.with_alpha(0.3), name) is found
        exact = program.with_alpha(0.7).with_float64_targets()
        other = program.with_alpha(0.3).with_float64_targets()
        assert (exact.alpha, other.alpha, program.with_float64_targets().alpha) == (0.7, 0.3, program.alpha)
        assert other.y is exact.y
        assert getattr(other, name) is getattr(exact, name)
        assert getattr(exact, name).dtype == torch.float64
        assert getattr(dataclasses.replace(program, fit_intercept=False), name) is not found

    def test_rows_are_the_program_of_those_samples(self):
        program = make_program("logistic", gated=True, intercept=True, weighted=True)
        index = torch.tensor([0, 2, 3, 9, 10])
        part = program.rows(index)
        weight = torch.zeros(16, dtype=torch.float64)
        weight[index] = program.sample_weight[index]
        same = Program(program.map, program.y, program.loss, program.penalty, program.alpha, weight, True)
        coef, intercept = randn(*program.coef_shape), randn(2)
        assert float(part.primal(coef, intercept)) == pytest.approx(float(same.primal(coef, intercept)))
        assert part.alpha_max == pytest.approx(same.alpha_max)

    def test_outputs_separate_only_if_loss_and_penalty_do(self):
        separate = {
            (loss, penalty): make_program(loss, penalty).outputs_separate
            for loss in ("squared", "softmax")
            for penalty in ("group_l2", "nuclear")
        }
        assert [key for key, value in separate.items() if value] == [("squared", "group_l2")]

    @every_penalty
    def test_separate_outputs_are_independent_programs(self, penalty):
        program = make_program("huber", penalty, intercept=True)
        if program.outputs_separate:
            apart = [
                Program(program.map, program.y[:, [k]], program.loss, program.penalty, program.alpha, None, True)
                for k in range(2)
            ]
            total = sum(fit(part).certificate.primal for part in apart)
            assert fit(program).certificate.primal == pytest.approx(total, rel=1e-8)

    def test_conversion(self):
        program = make_program("squared", weighted=True)
        assert program.to() is program
        assert program.to(torch.float64, "cpu") is program
        single = program.to(torch.float32)
        assert single.y.dtype == single.map.dtype == single.weight.dtype == torch.float32
        assert single.alpha == program.alpha
        assert program.y.dtype == torch.float64

    def test_soft_class_targets_survive_conversion_to_float32(self):
        # Exact sums in float64 are not exact sums in float32; the working copy of a valid program stays valid.
        program = soft_label_program()
        assert program.to(torch.float32).y.dtype == torch.float32

    def test_soft_class_targets_are_solved_in_float32(self):
        result = fit(soft_label_program(), tol=1e-4, dtype=torch.float32)
        assert result.coef.dtype == torch.float32
        assert result.certificate.relative_gap <= 1e-4


def soft_label_program():
    scores = torch.softmax(randn(200, 7), 1)
    labels = scores / scores.sum(1, keepdim=True)
    return Program(DenseMap(randn(200, 2, 2, seed=1)), labels, Softmax(), GroupL2(), 0.05)


class TestAlphaMax:
    @pytest.mark.parametrize("loss", ["squared", "softmax"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("n", [7, 5000])
    def test_is_zero_for_features_that_an_intercept_takes_away(self, loss, dtype, n):
        data = randn(1, 6, 3, seed=3).expand(n, 6, 3) * 1e3
        loss = get_loss(loss)
        y = loss.example_target(n, 3, torch.Generator().manual_seed(0))
        program = Program(DenseMap(data.to(dtype)), y.to(dtype), loss, GroupL2(), 1.0, fit_intercept=True)
        assert program.alpha_max == 0
        assert dataclasses.replace(program, fit_intercept=False).alpha_max > 0 or loss.shift_invariant

    def test_of_features_that_hardly_vary_is_what_they_give(self):
        data = 1e3 + 1e-4 * randn(200, 3, 2, seed=1)
        y = data[:, 0, :1] - data[:, 0, :1].mean()
        program = Program(DenseMap(data), 1e4 * y, get_loss("squared"), GroupL2(), 1.0, fit_intercept=True)
        centred = Program(DenseMap(data - data.mean(0)), 1e4 * y, get_loss("squared"), GroupL2(), 1.0)
        assert program.alpha_max == pytest.approx(centred.alpha_max, rel=1e-5)

    @pytest.mark.parametrize(("loss", "penalty", "gated", "intercept"), covering(LOSS_NAMES, PENALTY_NAMES, BOTH, BOTH))
    def test_zero_above_and_nonzero_just_below(self, loss, penalty, gated, intercept):
        program = make_program(loss, penalty, gated=gated, intercept=intercept, weighted=True)
        for ratio in (1 + 1e-9, 1.5):
            above = fit(program.with_alpha(ratio * program.alpha_max), tol=1e-10)
            assert bool((above.coef == 0).all())
            assert above.certificate.primal == pytest.approx(program.null_value, rel=1e-12)
        below = fit(program.with_alpha(0.97 * program.alpha_max), tol=1e-10)
        assert bool((below.coef != 0).any())
        assert below.certificate.primal < program.null_value

    @every_case
    def test_is_the_slope_of_the_loss_along_the_steepest_group(self, loss, penalty, gated, intercept):
        # No direction of unit penalty lowers the mean loss at a higher rate, and one of them comes close.
        program = make_program(loss, penalty, gated=gated, intercept=intercept)
        null = program.null_intercept
        gradient = program.weighted_adjoint(-program.loss.gradient(null.expand_as(program.y), program.y))
        rates = []
        for seed in range(20):
            direction = randn(*program.coef_shape, seed=seed)
            direction /= float(program.penalty.value(direction))
            rates.append(float((gradient * direction).sum()))
        assert max(map(abs, rates)) <= program.alpha_max
        best = gradient - program.penalty.prox(gradient, program.alpha_max * 0.999999)
        best = gradient - best  # what exceeds the ball of radius just below alpha_max: the steepest group alone
        assert float((gradient * best).sum() / program.penalty.value(best)) == pytest.approx(
            program.alpha_max, rel=1e-5
        )

    def test_of_lasso_is_the_textbook_formula(self):
        data, y = randn(20, 6, 1), randn(20, 1, seed=1)
        program = Program(DenseMap(data), y, Squared(), GroupL2(), 1.0)
        assert program.alpha_max == pytest.approx(float((data[:, :, 0].T @ y).abs().max()) / 20)


class TestAgainstScikitLearn:
    """Groups of width 1 are the models that scikit-learn has."""

    @pytest.mark.parametrize("penalty", [GroupL2(), GroupNuclear()], ids=repr)
    @pytest.mark.parametrize("intercept", [False, True])
    @pytest.mark.parametrize("weighted", [False, True])
    def test_lasso(self, penalty, intercept, weighted):
        data, y = randn(40, 8) + 0.5, randn(40, 1, seed=1) + 2.0
        weight = random_weight(40) if weighted else None
        program = Program(DenseMap(data[:, :, None]), y, Squared(), penalty, 0.1, weight, intercept)
        ours = fit(program, tol=1e-14)
        theirs = Lasso(alpha=0.1, fit_intercept=intercept, tol=1e-14, max_iter=100_000)
        theirs.fit(data.numpy(), y[:, 0].numpy(), sample_weight=None if weight is None else weight.numpy())
        np.testing.assert_allclose(ours.coef.flatten(), theirs.coef_, atol=1e-6)
        np.testing.assert_allclose(ours.intercept, theirs.intercept_, atol=1e-6)
        assert 0 < np.count_nonzero(theirs.coef_) < 8
        np.testing.assert_array_equal(ours.coef.flatten() != 0, theirs.coef_ != 0)

    @pytest.mark.parametrize("intercept", [False, True])
    def test_multi_task_lasso_is_the_nuclear_norm_of_one_by_c_blocks(self, intercept):
        data, y = randn(30, 7), randn(30, 3, seed=1) + 1.0
        program = Program(DenseMap(data[:, :, None]), y, Squared(), GroupNuclear(), 0.2, None, intercept)
        ours = fit(program, tol=1e-14)
        theirs = MultiTaskLasso(alpha=0.2, fit_intercept=intercept, tol=1e-14, max_iter=100_000)
        theirs.fit(data.numpy(), y.numpy())
        np.testing.assert_allclose(ours.coef[:, 0, :].T, theirs.coef_, atol=1e-6)
        np.testing.assert_allclose(ours.intercept, theirs.intercept_, atol=1e-6)
        assert 0 < np.count_nonzero(theirs.coef_.any(0)) < 7

    @pytest.mark.parametrize(("solver", "intercept"), [("liblinear", False), ("saga", True)])
    @pytest.mark.parametrize("weighted", [False, True])
    def test_logistic_regression(self, solver, intercept, weighted):
        data = randn(40, 5) + 0.3
        y = torch.sign(data[:, :1] + randn(40, 1, seed=1) + 0.2)
        weight = random_weight(40) if weighted else torch.ones(40, dtype=torch.float64)
        alpha = 0.03
        program = Program(DenseMap(data[:, :, None]), y, Logistic(), GroupL2(), alpha, weight, intercept)
        ours = fit(program, tol=1e-10)
        # Their objective is C times the summed loss plus the norm.
        strength = 1 / (alpha * float(weight.sum()))
        old = tuple(map(int, sklearn.__version__.split(".")[:2])) < (1, 8)
        kind = {"penalty": "l1"} if old else {"l1_ratio": 1.0}
        theirs = LogisticRegression(
            C=strength, solver=solver, fit_intercept=intercept, tol=1e-8, max_iter=20_000, random_state=0, **kind
        )
        theirs.fit(data.numpy(), y[:, 0].numpy(), sample_weight=weight.numpy())
        coef = torch.as_tensor(theirs.coef_).reshape(5, 1, 1)
        shift = torch.as_tensor(np.atleast_1d(theirs.intercept_)).double()
        their_value = numpy_primal(program, coef, shift)
        assert ours.certificate.primal == pytest.approx(their_value, rel=1e-6)
        assert ours.certificate.dual <= their_value
        assert ours.certificate.primal <= their_value * (1 + 1e-9)


@functools.cache  # programs compare by identity; that of `parts` is the same for several tests
def optimum(program):
    result = fit(program, tol=1e-9)
    assert result.certificate.relative_gap <= 1e-9
    return result.certificate.primal


def assert_same_program(one, other):
    assert optimum(other) == pytest.approx(optimum(one), rel=1e-8)
    assert other.alpha_max == pytest.approx(one.alpha_max, rel=1e-9)
    assert other.null_value == pytest.approx(one.null_value, rel=1e-9)


@functools.cache
def parts(loss, penalty, weighted=False, **options):
    """A program with an intercept, its data and its targets."""
    program = make_program(loss, penalty, intercept=True, weighted=weighted, **options)
    return program, program.map.data, program.y


def rebuild(program, data=None, y=None, weight=None):
    linear_map = program.map if data is None else DenseMap(data)
    y = program.y if y is None else y
    return Program(linear_map, y, program.loss, program.penalty, program.alpha, weight, program.fit_intercept)


first_turns, second_turns = (pytest.mark.parametrize(("loss", "penalty"), in_turn(first)) for first in (0, 1))


class TestInvariances:
    """Each with every loss and with every penalty; every loss with every penalty in half of them."""

    @first_turns
    def test_duplicated_row_is_weight_two(self, loss, penalty):
        program, data, y = parts(loss, penalty)
        weight = torch.ones(16, dtype=torch.float64)
        weight[5] = 2.0
        doubled = rebuild(program, torch.cat([data, data[[5]]]), torch.cat([y, y[[5]]]))
        assert_same_program(rebuild(program, weight=weight), doubled)

    @second_turns
    def test_weight_zero_is_a_removed_row(self, loss, penalty):
        program, data, y = parts(loss, penalty)
        weight = random_weight(16, zeros=False)
        weight[[0, 9]] = 0.0
        kept = weight > 0
        assert_same_program(rebuild(program, weight=weight), rebuild(program, data[kept], y[kept], weight[kept]))

    @first_turns
    def test_features_of_a_sample_without_weight_do_not_matter(self, loss, penalty):
        program, data, _ = parts(loss, penalty)
        weight = random_weight(16)
        wild = torch.where((weight == 0)[:, None, None], 1e4 * data, data)
        one, other = rebuild(program, weight=weight), rebuild(program, wild, weight=weight)
        coef = randn(*program.coef_shape)
        assert float(other.primal(coef)) == pytest.approx(float(one.primal(coef)))  # though exp may overflow
        theta = -program.loss.gradient(other.map.matvec(coef), program.y)
        assert not other.weighted_adjoint(theta).isnan().any()
        assert_same_program(one, other)

    @second_turns
    def test_only_ratios_of_weights_matter(self, loss, penalty):
        program, _, _ = parts(loss, penalty)
        weight = random_weight(16)
        assert_same_program(rebuild(program, weight=weight), rebuild(program, weight=1e-7 * weight))
        assert_same_program(rebuild(program), rebuild(program, weight=torch.full((16,), 42)))

    @first_turns
    def test_order_of_samples(self, loss, penalty):
        program, data, y = parts(loss, penalty)
        order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
        assert_same_program(program, rebuild(program, data[order], y[order]))

    @second_turns
    def test_order_of_blocks_permutes_the_solution(self, loss, penalty):
        program, data, _ = parts(loss, penalty)
        permuted = rebuild(program, data[:, [2, 0, 1]])
        assert_same_program(program, permuted)
        torch.testing.assert_close(
            fit(permuted, tol=1e-11).coef, fit(program, tol=1e-11).coef[[2, 0, 1]], atol=1e-4, rtol=0
        )

    @first_turns
    def test_order_of_outputs(self, loss, penalty):
        program, _, y = parts(loss, penalty, c=3)
        assert_same_program(program, rebuild(program, y=y[:, [2, 0, 1]]))

    @second_turns
    def test_rotation_of_features_within_blocks(self, loss, penalty):
        program, data, _ = parts(loss, penalty, d=3)
        rotations = torch.linalg.qr(randn(3, 3, 3, seed=1))[0]  # one per block
        assert_same_program(program, rebuild(program, torch.einsum("nbd,bde->nbe", data, rotations)))

    @first_turns
    def test_zero_block_and_zero_feature_change_nothing(self, loss, penalty):
        # Padding: a token of zeros is no token.
        program, data, _ = parts(loss, penalty)
        assert_same_program(program, rebuild(program, torch.nn.functional.pad(data, (0, 1, 0, 2))))

    @second_turns
    def test_one_open_gate_is_the_dense_program(self, loss, penalty):
        program, data, y = parts(loss, penalty)
        gates = GatedMap(data, torch.ones(16, 1, dtype=torch.bool))
        gated = Program(gates, y, program.loss, program.penalty, program.alpha, None, True)
        assert_same_program(program, gated)

    @first_turns
    def test_duplicated_gate_changes_nothing(self, loss, penalty):
        # A norm summed over two equal gates is the norm of one: splitting a block costs no less.
        program = make_program(loss, penalty, gated=True)
        data, masks = program.map.base.data, program.map.masks
        twice = GatedMap(data, torch.cat([masks, masks[:, :1]], 1))
        assert_same_program(program, Program(twice, program.y, program.loss, program.penalty, program.alpha))

    @second_turns
    def test_scaling_data_and_alpha(self, loss, penalty):
        # P is unchanged under X -> s X, Z -> Z / s, alpha -> s alpha.
        program, data, _ = parts(loss, penalty)
        scaled = rebuild(program, 7.0 * data).with_alpha(7.0 * program.alpha)
        assert optimum(scaled) == pytest.approx(optimum(program), rel=1e-8)
        assert scaled.alpha_max == pytest.approx(7.0 * program.alpha_max, rel=1e-9)


class TestMoreInvariances:
    def test_rotation_of_outputs_with_nuclear_norm_and_squared_loss(self):
        program, _, y = parts("squared", "nuclear", c=3)
        rotation = torch.linalg.qr(randn(3, 3, seed=1))[0]
        assert_same_program(program, rebuild(program, y=y @ rotation))

    @every_penalty
    @pytest.mark.parametrize("factor", [1e-3, 1e3])
    def test_scaling_of_squared_loss(self, penalty, factor):
        program, _, y = parts("squared", penalty)
        scaled = rebuild(program, y=factor * y).with_alpha(factor * program.alpha)
        assert optimum(scaled) == pytest.approx(factor**2 * optimum(program), rel=1e-8)

    @pytest.mark.parametrize("loss", ["squared", "huber"])
    @every_penalty
    def test_intercept_absorbs_a_shift_of_the_targets(self, loss, penalty):
        program, _, y = parts(loss, penalty)
        shifted = rebuild(program, y=y + 1e4)
        assert optimum(shifted) == pytest.approx(optimum(program), rel=1e-7)

    @every_loss
    @every_penalty
    def test_intercept_absorbs_a_shift_of_the_features(self, loss, penalty):
        program, data, _ = parts(loss, penalty, weighted=True)
        shifted = rebuild(program, data + 5.0, weight=program.sample_weight)
        assert_same_program(program, shifted)

    def test_huge_huber_threshold_is_squared_loss(self):
        program = make_program("squared", "nuclear", intercept=True)
        huber = Program(program.map, program.y, Huber(1e3), program.penalty, program.alpha, None, True)
        assert_same_program(program, huber)

    @pytest.mark.parametrize(("penalty", "factor"), [("group_l2", 1.0), ("nuclear", 1 / math.sqrt(2))])
    def test_softmax_of_two_classes_is_logistic_regression(self, penalty, factor):
        # Z enters through the difference z of its columns, and the split into halves is the cheapest:
        # 2 |z / 2| for columns apart, and sqrt(2) |z / 2| for the rank-one block (z / 2, -z / 2).
        program = make_program("softmax", penalty, intercept=True)
        sign = program.y[:, :1] - program.y[:, 1:]
        logistic = Program(
            program.map, sign, Logistic(), program.penalty, factor * program.alpha, None, fit_intercept=True
        )
        assert optimum(program) == pytest.approx(optimum(logistic), rel=1e-8)


class TestErrors:
    linear_map = DenseMap(randn(5, 2, 2))

    def build(self, **changes):
        options = {"y": randn(5, 1), "loss": Squared(), "penalty": GroupL2(), "alpha": 0.1, **changes}
        return Program(self.linear_map, **options)

    @pytest.mark.parametrize("y", [randn(5), randn(4, 1), randn(5, 1, 1)], ids=lambda y: str(tuple(y.shape)))
    def test_shape_of_y(self, y):
        with pytest.raises(ValueError, match=r"y must have shape \(5, n_outputs\)"):
            self.build(y=y)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_y_not_finite(self, value):
        with pytest.raises(ValueError, match="y must be finite"):
            self.build(y=torch.full((5, 1), value))

    def test_y_not_finite_in_the_precision_of_a_solve(self):
        program = self.build(y=torch.full((5, 1), 1e60, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"y must be finite in torch.float32"):
            solve(program, Auto(), dtype="float32")

    @pytest.mark.parametrize("alpha", [0, -1.0, math.nan, math.inf, "0.1", None, True])
    def test_alpha(self, alpha):
        with pytest.raises(ValueError, match=r"alpha must be .*positive"):
            self.build(alpha=alpha)
        with pytest.raises(ValueError, match="alpha"):
            self.build().with_alpha(alpha)

    @pytest.mark.parametrize("alpha", [1, np.float32(0.5), np.float64(0.5), np.int64(2)], ids=repr)
    def test_any_real_number_is_an_alpha(self, alpha):
        assert self.build(alpha=alpha).alpha == alpha

    @pytest.mark.parametrize(
        ("weight", "message"),
        [
            (torch.ones(4), r"shape \(5,\)"),
            (torch.ones(5, 1), r"shape \(5,\)"),
            (torch.tensor([1.0, 1, 1, 1, -1]), "non-negative.* got numbers from -1.0 to 1.0"),
            (torch.tensor([1.0, 1, 1, 1, math.nan]), "finite.* from nan to nan"),
            (torch.tensor([1.0, 1, 1, 1, math.inf]), "finite.* from 1.0 to inf"),
            (torch.zeros(5), "positive sum"),
            (torch.ones(5, dtype=torch.complex64), "real numbers, got torch.complex64"),
        ],
        ids=str,
    )
    def test_sample_weight(self, weight, message):
        with pytest.raises(ValueError, match=f"sample_weight must .*{message}"):
            self.build(sample_weight=weight)

    def test_weights_whose_sum_is_no_integer_of_their_kind(self):
        weights = self.build(sample_weight=torch.full((5,), 2**62)).weight  # the sum of the integers is negative
        torch.testing.assert_close(weights, torch.full((5,), 0.2, dtype=torch.float64))

    def test_target_of_the_wrong_kind(self):
        with pytest.raises(ValueError, match="Logistic"):
            self.build(loss=Logistic())

    @pytest.mark.parametrize("intercept", [False, True])
    def test_counts_that_are_positive_only_without_weight(self, intercept):
        # Weight zero is a removed row, and without that row the targets are refused.
        y = torch.tensor([[0.0], [0.0], [3.0], [0.0], [1.0]], dtype=torch.float64)
        weight = torch.tensor([1.0, 1.0, 0.0, 2.0, 0.0], dtype=torch.float64)
        with pytest.raises(ValueError, match="Poisson"):
            self.build(y=y, loss=Poisson(), sample_weight=weight, fit_intercept=intercept)


@every_loss
@PROPERTY
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(2, 9),
    penalty=st.sampled_from(PENALTY_NAMES),
    gated=st.booleans(),
    weighted=st.booleans(),
)
def test_primal_is_convex(loss, seed, n, penalty, gated, weighted):
    program = make_program(loss, penalty, gated=gated, weighted=weighted, intercept=True, n=n, seed=seed)
    one, other = (randn(*program.coef_shape, seed=seed + k) for k in (1, 2))
    b_one, b_other = (randn(2, seed=seed + k) for k in (3, 4))
    middle = program.primal(0.3 * one + 0.7 * other, 0.3 * b_one + 0.7 * b_other)
    ends = 0.3 * program.primal(one, b_one) + 0.7 * program.primal(other, b_other)
    assert float(middle) <= float(ends) * (1 + 1e-12)


@every_loss
def test_reference_uses_the_same_design_for_both_maps(loss):
    # Guards the helpers: masks and data give the design that unit vectors give.
    program = make_program(loss, gated=True, n=8)
    data, masks = program.map.base.data.numpy().reshape(8, -1), program.map.masks.numpy()
    expected = np.concatenate([masks[:, [g]] * data for g in range(3)], 1)
    np.testing.assert_array_equal(design(program), expected)
    assert probabilities(program).sum() == pytest.approx(1.0)
    assert numpy_loss(get_loss(loss), np.zeros((8, 2)), program.y.numpy()).shape == (8,)
    assert get_penalty("nuclear") == GroupNuclear()


def test_programs_and_results_compare_by_identity():
    # Their tensors have no single truth value.
    program = make_program("squared", "group_l2")
    result = fit(program, tol=1e-3)
    assert program == program
    assert program != dataclasses.replace(program)
    assert result == result
    assert result != dataclasses.replace(result)


@pytest.mark.parametrize("which", ["y", "map"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16, torch.bfloat16], ids=str)
def test_numbers_that_are_neither_single_nor_double_are_refused(which, dtype):
    X, y = torch.ones(5, 2, 1), torch.ones(5, 1)
    X, y = (X.to(dtype), y) if which == "map" else (X, y.to(dtype))
    with pytest.raises(ValueError, match=f"{which} must hold float32 or float64 numbers, got {dtype}"):
        Program(DenseMap(X), y, get_loss("squared"), GroupL2(), 0.1)


@pytest.mark.parametrize("shape", [(0, 3, 2), (5, 0, 2), (5, 3, 0)])
def test_maps_without_samples_blocks_or_features_are_refused(shape):
    with pytest.raises(ValueError, match="map must have at least one sample, block and feature, got shape"):
        Program(DenseMap(torch.zeros(shape)), torch.zeros(shape[0], 1), get_loss("squared"), GroupL2(), 0.1)


def test_targets_without_outputs_are_refused():
    with pytest.raises(ValueError, match=r"y must have shape .* with at least one output"):
        Program(DenseMap(torch.zeros(5, 3, 2)), torch.zeros(5, 0), get_loss("squared"), GroupL2(), 0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"map": randn(5, 3, 2)}, "map must be a LinearMap, as DenseMap"),
        ({"map": randn(5, 3, 2)}, "makes one, got Tensor$"),
        ({"y": np.ones((5, 1))}, "y must be a torch tensor, got ndarray"),
        ({"loss": "squared"}, "loss must be a Loss, as get_loss.* makes one, got 'squared'"),
        ({"loss": Squared}, "loss must be a Loss"),
        ({"penalty": "group_l2"}, "penalty must be a Penalty, as get_penalty.* makes one"),
        ({"sample_weight": [1.0] * 5}, "sample_weight must be a torch tensor, got list"),
        ({"fit_intercept": "no"}, "fit_intercept must be True or False, got 'no'"),
    ],
    ids=str,
)
def test_parts_of_another_kind_are_named(change, message):
    parts = {"map": DenseMap(randn(5, 3, 2)), "y": randn(5, 1), "loss": Squared(), "penalty": GroupL2(), "alpha": 0.1}
    with pytest.raises((TypeError, ValueError), match=message):
        Program(**{**parts, **change})


@pytest.mark.parametrize("flag", [np.True_, 1])
def test_a_flag_of_another_kind_is_the_same_program(flag):
    program = Program(DenseMap(randn(5, 3, 2)), randn(5, 1), Squared(), GroupL2(), 0.1, fit_intercept=flag)
    assert program.fit_intercept is True


@pytest.mark.parametrize("weighted", [False, True])
def test_targets_keep_their_digits_beside_data_in_single_precision_and_weights_of_zero(weighted):
    data, y, weight = randn(40, 5, 3).float(), randn(40, 2, seed=1), random_weight(40) if weighted else None
    program = Program(DenseMap(data), y, get_loss("squared"), get_penalty("group_l2"), 0.1, weight)
    single = program.to(torch.float32).drop_zero_weights().with_float64_targets()
    kept = slice(None) if weight is None else weight > 0
    assert single.map.dtype == torch.float32
    assert torch.equal(single.y, y[kept])
    torch.testing.assert_close(single.weight, program.weight[kept], rtol=1e-15, atol=0)


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_what_a_sample_of_weight_zero_holds_does_not_tell_alpha_max(loss):
    program = make_program(loss, "group_l2", n=20, intercept=True)
    weight = torch.ones(20, dtype=torch.float64)
    weight[3] = 0.0
    data = program.map.data.clone()
    data[3] = 1e30
    placed = dataclasses.replace(program, map=DenseMap(data), sample_weight=weight)
    assert placed.alpha_max > 0
    assert placed.alpha_max == pytest.approx(placed.drop_zero_weights().alpha_max, rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_data_that_are_not_finite_are_told_by_alpha_max(bad):
    data = randn(20, 3, 2)
    data[4, 1, 1] = bad
    with pytest.raises(ValueError, match="the data of the map must be finite"):
        _ = Program(DenseMap(data), randn(20, 1), Squared(), GroupL2(), 0.1).alpha_max


@pytest.mark.parametrize("unit", [1e-300, 1e39, 1e300])
def test_weights_beyond_the_range_of_the_data_count_by_their_ratios(unit):
    weight = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    X, y = randn(3, 2, 1).float(), randn(3, 1, seed=1).float()
    program = Program(DenseMap(X), y, get_loss("squared"), GroupL2(), 0.1, unit * weight)
    for other in (program, program.to(torch.float64), program.with_float64_targets(), program.to(torch.float32)):
        torch.testing.assert_close(other.weight, (weight / 8).to(other.y))


@pytest.mark.parametrize("loss", LOSS_NAMES)
@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
def test_alpha_max_is_zero_where_samples_cancel_without_an_intercept(loss, penalty):
    # What rounding leaves was taken for an alpha_max, and a path to a hundredth of it took minutes.
    data = randn(50, 6, 4, seed=1)
    y = torch.tensor(
        [[0.25, 0.75]] if loss == "softmax" else [[3.0 if loss == "poisson" else 1.0]], dtype=torch.float64
    )
    program = Program(DenseMap(data - data.mean(0)), y.repeat(50, 1), get_loss(loss), get_penalty(penalty), 0.1)
    assert program.alpha_max == 0.0
    assert dataclasses.replace(program, map=DenseMap(data)).alpha_max > 1e-3
    assert alpha_grid(program.alpha_max)[0] == 1.0
    assert not solve(program, Auto(), tol=1e-6).coef.any()


@pytest.mark.parametrize("seed", range(5))
def test_alpha_max_of_the_nuclear_penalty_of_one_output_is_the_group_l2_one_to_the_digit(seed):
    program = make_program("squared", "nuclear", c=1, intercept=True, seed=seed)
    assert program.alpha_max == dataclasses.replace(program, penalty=get_penalty("group_l2")).alpha_max
    assert not solve(program.with_alpha(program.alpha_max), Auto(), tol=1e-12).coef.any()


class OfTwoOutputs(GroupL2):
    def check_shape(self, shape):
        if shape[-1] != 2:
            raise ValueError(f"OfTwoOutputs is for two outputs, got {shape[-1]}")


def test_alpha_max_refuses_a_shape_that_the_penalty_refuses():
    X, y = torch.ones(5, 3, 2, dtype=torch.float64), torch.arange(15, dtype=torch.float64).view(5, 3)
    assert Program(DenseMap(X), y[:, :2], Squared(), OfTwoOutputs(), alpha=0.1).alpha_max > 0
    with pytest.raises(ValueError, match="two outputs, got 3"):
        _ = Program(DenseMap(X), y, Squared(), OfTwoOutputs(), alpha=0.1).alpha_max


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float16])
def test_weights_of_any_kind_are_shares_in_double_precision(dtype):
    weight = torch.tensor([1, 2, 4]).to(dtype)
    program = Program(DenseMap(randn(3, 2, 1)), randn(3, 1), Squared(), GroupL2(), 0.1, weight)
    expected = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64) / 7
    torch.testing.assert_close(program.weight, expected, rtol=1e-15, atol=0)


def test_weights_whose_sum_overflows_are_equal_shares():
    weight = torch.full((4,), 1e308, dtype=torch.float64)
    program = Program(DenseMap(randn(4, 2, 1)), randn(4, 1), Squared(), GroupL2(), 0.1, weight)
    assert program.weight.tolist() == [0.25] * 4


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("loss", ["squared", "logistic", "poisson"])
def test_lipschitz_constant_is_that_of_the_samples_with_weight(loss, intercept):
    program = make_program(loss, "group_l2", intercept=intercept, weighted=True)
    pred, share = randn(16, 2), torch.as_tensor(probabilities(program))
    pred[1] = 50.0
    assert share[1] == 0
    matrix = torch.as_tensor(design(program))
    matrix = share.sqrt()[:, None] * (matrix - share @ matrix if intercept else matrix)
    curvature = float(pred[share > 0].max().exp()) if loss == "poisson" else program.loss.smoothness
    expected = curvature * float(torch.linalg.matrix_norm(matrix, 2)) ** 2
    assert program.lipschitz(pred, power_steps=300) == pytest.approx(expected, rel=1e-6)

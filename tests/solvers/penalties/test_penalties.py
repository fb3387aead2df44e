"""Penalties: norms, proximal operators, dual norms and balanced factors."""

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from solver_cases import CVXPY_PENALTIES, NUMPY_PENALTIES, PENALTY_NAMES, PROPERTY, numpy_penalty, randn

from convexformer_solvers import (
    PENALTIES,
    Auto,
    DenseMap,
    Factors,
    Fista,
    GroupL2,
    GroupNuclear,
    Huber,
    Penalty,
    Program,
    alpha_grid,
    check_penalty,
    get_penalty,
    solve,
    solve_path,
)

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
every_penalty = pytest.mark.parametrize("penalty", [kind() for kind in PENALTIES.values()], ids=repr)


@pytest.mark.parametrize("seed", range(5))
@every_penalty
def test_every_penalty_passes_its_check(penalty, seed):
    check_penalty(penalty, seed=seed)


def test_check_rejects_a_penalty_that_is_not_the_euclidean_one_that_it_claims_to_be():
    class Nuclear(GroupNuclear):
        euclidean = True

    with pytest.raises(AssertionError, match="euclidean"):
        check_penalty(Nuclear())


def test_check_rejects_a_penalty_that_does_not_separate_as_it_claims_to():
    class Nuclear(GroupNuclear):
        output_separable = True

    with pytest.raises(AssertionError, match="separable"):
        check_penalty(Nuclear())


def test_check_rejects_weights_of_places_in_a_penalty_whose_blocks_solvers_may_leave_out():
    class Weighted(GroupNuclear):
        def weights(self, coef):
            n_blocks = coef[..., 0, 0].numel()
            return torch.arange(1, n_blocks + 1, dtype=coef.dtype).view(coef.shape[:-2])

        def group_values(self, coef):
            return self.weights(coef) * super().group_values(coef)

        def group_dual_norms(self, coef):
            return super().group_dual_norms(coef) / self.weights(coef)

        def prox(self, coef, step):
            places = zip(coef.flatten(0, -3), self.weights(coef).flatten(), strict=True)
            return torch.stack([GroupNuclear().prox(z[None], float(w) * step)[0] for z, w in places]).view_as(coef)

        factorize = Penalty.factorize  # the decay of heads is the same at all places
        smoothed_value, smoothed_derivatives = Penalty.smoothed_value, Penalty.smoothed_derivatives
        violating_atoms, active_groups = Penalty.violating_atoms, Penalty.active_groups
        for_outputs = Penalty.for_outputs

    class Whole(Weighted):
        block_separable = False

    check_penalty(Whole())
    with pytest.raises(AssertionError, match="block_separable is True"):
        check_penalty(Weighted())


@pytest.mark.parametrize("c", [1, 3])
def test_a_group_of_zeros_has_a_gradient_of_zero(c):
    coef = torch.zeros(2, 3, c, dtype=torch.float64, requires_grad=True)
    GroupL2().value(coef).backward()
    assert bool((coef.grad == 0).all())


def wrong_prox_step(kind):
    return {"prox": lambda self, coef, step: kind.prox(self, coef, 0.5 * step)}


def prox_in_double(kind):
    return {"prox": lambda self, coef, step: kind.prox(self, coef.double(), step)}


def no_prox(kind):
    return {"prox": lambda self, coef, step: coef}


def prox_of_zero(kind):
    return {"prox": lambda self, coef, step: torch.zeros_like(coef)}


def prox_without_exact_zeros(kind):
    return {"prox": lambda self, coef, step: kind.prox(self, coef, step) + 1e-13}


def hard_threshold(kind):
    def prox(self, coef, step):
        return coef * (kind.prox(self, coef, step) != 0)

    return {"prox": prox}


def small_dual_norm(kind):
    return {"group_dual_norms": lambda self, coef: 0.99 * kind.group_dual_norms(self, coef)}


def large_dual_norm(kind):
    return {"group_dual_norms": lambda self, coef: 1.01 * kind.group_dual_norms(self, coef)}


def largest_entry_as_dual_norm(kind):
    return {"group_dual_norms": lambda self, coef: coef.abs().flatten(-2).amax(-1)}


def wrong_value(kind):
    return {"group_values": lambda self, coef: 1.01 * kind.group_values(self, coef)}


def squared_value(kind):
    return {"group_values": lambda self, coef: kind.group_values(self, coef).square()}


def unbalanced_factors(kind):
    # The printed trap: w2 = z / |z|, w3 = |z| has the right product and a higher decay.
    def factorize(self, coef):
        block, left, right = kind.factorize(self, coef)
        norms = torch.linalg.vector_norm(left, dim=1, keepdim=True)
        return Factors(block, left / norms, right * norms)

    return {"factorize": factorize}


def factors_lost(kind):
    return {"factorize": lambda self, coef: Factors(*(part[1:] for part in kind.factorize(self, coef)))}


def factors_of_wrong_block(kind):
    def factorize(self, coef):
        block, left, right = kind.factorize(self, coef)
        return Factors(block.roll(1, 0), left, right)

    return {"factorize": factorize}


def factors_split_by_coordinate(kind):
    # Adds up to the same coefficients; the pieces are unbalanced and cost more.
    def factorize(self, coef):
        block, left, right = kind.factorize(self, coef)
        d = left.shape[1]
        basis = torch.eye(d, dtype=left.dtype)
        pieces = (left[:, :, None] * basis).reshape(-1, d)
        return Factors(block.repeat_interleave(d, 0), pieces, right.repeat_interleave(d, 0))

    return {"factorize": factorize}


def another_norm_for_outputs(kind):
    return {"for_outputs": lambda self, n_outputs: GroupL2() if kind is GroupNuclear else GroupNuclear()}


def wrong_right_norm(kind):
    return {"right_norm": lambda self, right: right.abs().amax(1)}


MUTATIONS = [
    wrong_prox_step,
    prox_in_double,
    no_prox,
    prox_of_zero,
    prox_without_exact_zeros,
    hard_threshold,
    small_dual_norm,
    large_dual_norm,
    largest_entry_as_dual_norm,
    wrong_value,
    squared_value,
    unbalanced_factors,
    factors_lost,
    factors_of_wrong_block,
    factors_split_by_coordinate,
    another_norm_for_outputs,
    wrong_right_norm,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
@pytest.mark.parametrize("name", PENALTY_NAMES)
def test_check_rejects_a_wrong_penalty(name, mutation):
    kind = PENALTIES[name]
    mutant = type(f"{kind.__name__}With{mutation.__name__}", (kind,), mutation(kind))()
    with pytest.raises(AssertionError):
        check_penalty(mutant)


@pytest.mark.parametrize("name", PENALTY_NAMES)
@pytest.mark.parametrize(
    ("mutation", "named"),
    [(wrong_prox_step, "Moreau|prox"), (large_dual_norm, "prox|dual norm"), (unbalanced_factors, "factors")],
)
def test_check_names_the_identity_that_fails(name, mutation, named):
    kind = PENALTIES[name]
    mutant = type("Mutant", (kind,), mutation(kind))()
    with pytest.raises(AssertionError, match=named):
        check_penalty(mutant)


@every_penalty
@PROPERTY
@given(shape=SHAPES, seed=st.integers(0, 10**6), scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e6]))
def test_value_equals_reference_formula_and_cvxpy_expression(penalty, shape, seed, scale):
    coef = randn(*shape, seed=seed, scale=scale)
    expected = numpy_penalty(penalty, coef.numpy())
    assert float(penalty.value(coef)) == pytest.approx(expected, rel=1e-12)
    stacked = cp.Constant(coef.reshape(-1, shape[-1]).numpy())
    assert float(penalty.expression(stacked, shape[0]).value) == pytest.approx(expected, rel=1e-9)


def test_reference_formulas_cover_the_penalties_of_the_package():
    assert set(PENALTIES) <= set(NUMPY_PENALTIES)
    assert set(PENALTIES) <= set(CVXPY_PENALTIES)


@pytest.mark.parametrize("largest", [3.0, 10.0, 990.0, 1.1e3, 1e5, 1e8, 1e10])
@pytest.mark.parametrize("shape", [(7, 3), (3, 7), (5, 5)])
def test_nuclear_prox_shrinks_every_singular_value_by_the_step(shape, largest):
    # A block whose singular values reach from a tenth of the step to far above it, and one that the step takes whole.
    step = 1e-4
    k = min(shape)
    wanted = step * torch.tensor([largest, *np.geomspace(2.0, 0.1, k - 1)], dtype=torch.float64)
    left, right = (torch.linalg.qr(randn(n, k, seed=n)).Q for n in shape)
    coef = torch.stack([(left * values) @ right.T for values in (wanted, 0.5 * step * torch.ones(k))])
    found = GroupNuclear().prox(coef, step)
    assert not bool(found[1].any())
    shrunk = torch.linalg.svdvals(found[0])
    accuracy = step * (1e-9 + 100 * torch.finfo(torch.float64).eps * largest)
    torch.testing.assert_close(shrunk, (wanted - step).clamp(min=0), rtol=0, atol=accuracy)
    torch.testing.assert_close(found[0], (left * (wanted - step).clamp(min=0)) @ right.T, rtol=0, atol=accuracy)


def test_nuclear_prox_of_a_block_far_above_the_step():
    values = torch.tensor([1e6, 5e5, 1e-3], dtype=torch.float64)
    left, right = (torch.linalg.qr(randn(n, 3, seed=n)).Q for n in (6, 3))
    found = torch.linalg.svdvals(GroupNuclear().prox(((left * values) @ right.T)[None], 1e-4)[0])
    assert float(found[2]) == pytest.approx(9e-4, rel=1e-5)


@every_penalty
def test_leading_axes_are_blocks(penalty):
    coef = randn(2, 3, 4, 2)
    flat = coef.reshape(6, 4, 2)
    torch.testing.assert_close(penalty.value(coef), penalty.value(flat))
    torch.testing.assert_close(penalty.dual_norm(coef), penalty.dual_norm(flat))
    torch.testing.assert_close(penalty.prox(coef, 0.7), penalty.prox(flat, 0.7).reshape(coef.shape))


@every_penalty
def test_group_values_and_dual_norms_agree_with_their_totals(penalty):
    coef = randn(5, 3, 2)
    assert float(penalty.group_values(coef).sum()) == pytest.approx(float(penalty.value(coef)))
    assert float(penalty.group_dual_norms(coef).max()) == float(penalty.dual_norm(coef))
    if penalty.output_separable:
        assert penalty.group_dual_norms(coef).shape[-1] == 2
        apart = sum(float(penalty.value(coef[..., [k]])) for k in range(2))
        assert float(penalty.value(coef)) == pytest.approx(apart)


@every_penalty
def test_dual_norm_is_the_support_function_of_the_unit_ball(penalty):
    direction = randn(2, 3, 2).numpy().reshape(6, 2)
    point = cp.Variable((6, 2))
    problem = cp.Problem(cp.Maximize(cp.sum(cp.multiply(direction, point))), [penalty.expression(point, 2) <= 1])
    support = problem.solve(solver="CLARABEL")
    dual_norm = float(penalty.dual_norm(torch.as_tensor(direction).reshape(2, 3, 2)))
    assert dual_norm == pytest.approx(support, rel=1e-6)


class TestProx:
    @every_penalty
    @PROPERTY
    @given(
        shape=SHAPES,
        seed=st.integers(0, 10**6),
        ratio=st.sampled_from([1e-6, 1e-3, 0.1, 0.5, 0.99, 1.5]),
        scale=st.sampled_from([1e-8, 1.0, 1e8]),
    )
    def test_moreau(self, penalty, shape, seed, ratio, scale):
        # coef - prox(coef) is the projection on the dual ball of radius step: feasible, and aligned with the prox.
        coef = randn(*shape, seed=seed, scale=scale)
        step = ratio * float(penalty.dual_norm(coef))
        new = penalty.prox(coef, step)
        rest = coef - new
        rounding = 1e-9 * float(penalty.dual_norm(coef))
        assert float(penalty.dual_norm(rest)) <= step + rounding
        assert float((rest * new).sum()) == pytest.approx(
            step * float(penalty.value(new)), abs=1e-9 * float(coef.square().sum())
        )

    @every_penalty
    @PROPERTY
    @given(shape=SHAPES, seed=st.integers(0, 10**6), step=st.floats(0.0, 3.0))
    def test_nonexpansive(self, penalty, shape, seed, step):
        one, other = randn(*shape, seed=seed), randn(*shape, seed=seed + 1)
        moved = torch.linalg.vector_norm(penalty.prox(one, step) - penalty.prox(other, step))
        assert float(moved) <= float(torch.linalg.vector_norm(one - other)) * (1 + 1e-12)

    @every_penalty
    @pytest.mark.parametrize("factor", [1e-6, 1e6])
    def test_scales_with_its_argument(self, penalty, factor):
        coef = randn(3, 4, 2)
        torch.testing.assert_close(
            penalty.prox(factor * coef, factor * 0.8), factor * penalty.prox(coef, 0.8), rtol=1e-10, atol=0
        )

    @every_penalty
    def test_step_of_zero_is_the_identity(self, penalty):
        coef = randn(3, 2, 2)
        coef[1] = 0.0
        torch.testing.assert_close(penalty.prox(coef, 0.0), coef, rtol=1e-12, atol=1e-12)

    @every_penalty
    def test_zero_stays_zero(self, penalty):
        zero = torch.zeros(3, 2, 2, dtype=torch.float64)
        assert torch.equal(penalty.prox(zero, 0.5), zero)

    @every_penalty
    def test_argument_is_left_alone(self, penalty):
        coef = randn(3, 2, 2)
        before = coef.clone()
        penalty.prox(coef, 0.5)
        assert torch.equal(coef, before)

    @every_penalty
    @pytest.mark.parametrize("shape", [(3, 4, 2), (3, 2, 4), (3, 1, 3), (3, 3, 1)])
    def test_float32_stays_close_to_float64(self, penalty, shape):
        coef = randn(*shape)
        new = penalty.prox(coef.float(), 0.5)
        assert new.dtype == torch.float32
        torch.testing.assert_close(new.double(), penalty.prox(coef, 0.5), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("shape", [(4, 5, 3), (4, 3, 5)])
    @pytest.mark.parametrize("ratio", [1e-7, 1e-5, 1e-2, 0.5])
    def test_nuclear_equals_thresholded_svd(self, shape, ratio):
        coef = randn(*shape)
        coef *= 10.0 ** torch.arange(0, -2 * shape[1], -2, dtype=torch.float64)[:, None]  # ill-conditioned blocks
        step = ratio * float(GroupNuclear().dual_norm(coef))
        u, s, vh = np.linalg.svd(coef.numpy(), full_matrices=False)
        expected = u * np.maximum(s - step, 0)[:, None, :] @ vh
        # The package takes eigenvalues of the Gram matrix: half the digits for values far below the largest.
        np.testing.assert_allclose(GroupNuclear().prox(coef, step), expected, rtol=0, atol=2e-8 * s.max())


class TestRelations:
    def test_groups_of_width_one_are_the_l1_norm(self):
        coef = randn(6, 1, 1)
        for penalty in (GroupL2(), GroupNuclear()):
            assert float(penalty.value(coef)) == pytest.approx(float(coef.abs().sum()))
            assert float(penalty.dual_norm(coef)) == pytest.approx(float(coef.abs().max()))

    def test_nuclear_norm_of_one_output_is_the_group_norm(self):
        coef = randn(6, 3, 1)
        torch.testing.assert_close(GroupNuclear().value(coef), GroupL2().value(coef))
        torch.testing.assert_close(GroupNuclear().prox(coef, 0.9), GroupL2().prox(coef, 0.9))
        assert GroupNuclear().for_outputs(1) == GroupL2()
        assert GroupNuclear().for_outputs(2) == GroupNuclear()

    def test_nuclear_norm_of_one_feature_is_the_l2_norm_over_outputs(self):
        coef = randn(6, 1, 3)
        expected = torch.linalg.vector_norm(coef, dim=-1).sum()
        torch.testing.assert_close(GroupNuclear().value(coef), expected)

    @PROPERTY
    @given(shape=SHAPES, seed=st.integers(0, 10**6))
    def test_nuclear_norm_is_at_most_the_group_norm(self, shape, seed):
        # Standard decay shares features between outputs; the l1 form does not.
        coef = randn(*shape, seed=seed)
        assert float(GroupNuclear().value(coef)) <= float(GroupL2().value(coef)) * (1 + 1e-12)
        assert float(GroupNuclear().dual_norm(coef)) >= float(GroupL2().dual_norm(coef)) * (1 - 1e-12)

    @every_penalty
    def test_rotating_features_within_a_block_changes_nothing(self, penalty):
        coef, rotation = randn(3, 4, 2), torch.linalg.qr(randn(4, 4, seed=1))[0]
        torch.testing.assert_close(penalty.value(rotation @ coef), penalty.value(coef))
        torch.testing.assert_close(penalty.dual_norm(rotation @ coef), penalty.dual_norm(coef))
        torch.testing.assert_close(penalty.prox(rotation @ coef, 0.8), rotation @ penalty.prox(coef, 0.8))

    def test_rotating_outputs_changes_the_group_norm_only(self):
        coef, rotation = randn(3, 2, 4), torch.linalg.qr(randn(4, 4, seed=1))[0]
        torch.testing.assert_close(GroupNuclear().value(coef @ rotation), GroupNuclear().value(coef))
        assert abs(float(GroupL2().value(coef @ rotation) - GroupL2().value(coef))) > 1e-3


class TestFactors:
    @staticmethod
    def rebuild(factors, shape):
        total = torch.zeros(shape, dtype=torch.float64)
        for block, left, right in zip(*factors, strict=True):
            total[tuple(block)] += torch.outer(left, right)
        return total

    @every_penalty
    @PROPERTY
    @given(shape=SHAPES, seed=st.integers(0, 10**6), exponent=st.integers(-30, 30))
    def test_product_and_cost(self, penalty, shape, seed, exponent):
        coef = randn(*shape, seed=seed, scale=10.0**exponent)
        factors = penalty.factorize(coef)
        torch.testing.assert_close(self.rebuild(factors, shape), coef, rtol=1e-10, atol=10.0**exponent * 1e-12)
        cost = float(penalty.factor_cost(factors.left, factors.right).sum())
        assert cost == pytest.approx(numpy_penalty(penalty, coef.numpy()), rel=1e-10)

    @every_penalty
    def test_unbalanced_split_costs_more(self, penalty):
        coef = randn(4, 3, 2)
        block, left, right = penalty.factorize(coef)
        norms = torch.linalg.vector_norm(left, dim=1, keepdim=True)
        trap = Factors(block, left / norms, right * norms)
        torch.testing.assert_close(self.rebuild(trap, coef.shape), coef)
        printed = penalty.factor_cost(trap.left, trap.right)
        assert (printed > penalty.factor_cost(left, right) + 1e-6).all()
        # (1 + |z|^2) / 2 against |z|.
        size = penalty.factor_cost(left, right)
        torch.testing.assert_close(printed, 0.5 * (1 + size.square()))

    @every_penalty
    def test_zero_blocks_have_no_factors(self, penalty):
        coef = randn(5, 3, 2)
        coef[[0, 3]] = 0.0
        assert set(penalty.factorize(coef).block[:, 0].tolist()) == {1, 2, 4}
        nothing = penalty.factorize(torch.zeros(2, 3, 2))
        assert nothing.left.shape == (0, 3)
        assert nothing.right.shape == (0, 2)
        assert nothing.block.shape == (0, 1)

    def test_as_many_factors_as_the_theory_says(self):
        coef = randn(4, 3, 2)
        coef[0, :, 1] = 0.0
        coef[1] = torch.outer(coef[1, :, 0], torch.tensor([1.0, -2.0], dtype=torch.float64))
        assert len(GroupL2().factorize(coef).left) == 7  # nonzero columns
        assert len(GroupNuclear().factorize(coef).left) == 6  # ranks 1, 1, 2, 2

    @every_penalty
    def test_dtype_is_kept(self, penalty):
        factors = penalty.factorize(randn(4, 3, 2).float())
        assert factors.left.dtype == factors.right.dtype == torch.float32

    @every_penalty
    def test_tiny_blocks_keep_their_direction(self, penalty):
        coef = randn(1, 3, 1)
        _, left, _ = penalty.factorize(1e-140 * coef)
        cosine = torch.nn.functional.cosine_similarity(left[0] * 1e70, coef[0, :, 0], dim=0)
        assert abs(float(cosine)) == pytest.approx(1.0, rel=1e-12)


class TestContract:
    @pytest.mark.parametrize("name", PENALTY_NAMES)
    def test_names(self, name):
        assert type(get_penalty(name)) is PENALTIES[name]

    def test_instances_pass_through(self):
        penalty = GroupL2()
        assert get_penalty(penalty) is penalty

    @pytest.mark.parametrize("wrong", ["l1", "", None, 3, GroupL2])
    def test_unknown_name_lists_the_choices(self, wrong):
        with pytest.raises(ValueError, match="penalty must be one of") as caught:
            get_penalty(wrong)
        assert all(name in str(caught.value) for name in PENALTIES)

    def test_missing_expression_is_named(self):
        class Bare(GroupL2):
            expression = Penalty.expression

        with pytest.raises(NotImplementedError, match=r"Bare.*'expression'"):
            Bare().expression(None, 1)

    @every_penalty
    def test_no_alpha_inside(self, penalty):
        # The weight belongs to the program: paths and set_params rely on it.
        assert not any("alpha" in name for name in dir(penalty))


class Ranked(Penalty):
    """Two groups in each block, one per output, and outputs that do not count alike."""

    weight = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def check_shape(self, shape):
        if shape[-1] != 2:
            raise ValueError(f"two outputs, got {shape[-1]}")

    def group_values(self, coef):
        return self.weight.to(coef) * GroupL2().group_values(coef)

    def group_dual_norms(self, coef):
        return GroupL2().group_values(coef) / self.weight.to(coef)

    def prox(self, coef, step):
        norms, steps = GroupL2().group_values(coef), step * self.weight.to(coef)
        return coef * torch.where(norms > steps, 1 - steps / norms, 0.0)[..., None, :]

    def right_norm(self, right):
        return right.abs() @ self.weight.to(right)


def test_a_penalty_for_two_outputs_is_checked_with_two():
    check_penalty(Ranked(), n_outputs=2)
    with pytest.raises(ValueError, match="two outputs, got 4"):
        check_penalty(Ranked())


class OfFourBlocks(Ranked):
    """Groups of each output in four blocks, each block with a weight of its own."""

    weight = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)[:, None]
    block_separable = False

    def check_shape(self, shape):
        if shape[:-2] != (4,):
            raise ValueError(f"four blocks, got {shape[:-2]}")


def test_a_penalty_of_one_shape_is_checked_at_that():
    check_penalty(OfFourBlocks(), shape=(4, 3, 2))
    with pytest.raises(ValueError, match="four blocks, got"):
        check_penalty(OfFourBlocks())

    class Wrong(OfFourBlocks):
        def group_dual_norms(self, coef):
            return super().group_dual_norms(coef) / 2

    with pytest.raises(AssertionError, match="prox must give exact zeros"):
        check_penalty(Wrong(), shape=(4, 3, 2))


def test_check_names_a_weight_of_each_block_as_the_reason_why_blocks_cannot_be_left_out():
    class Separable(OfFourBlocks):
        block_separable = True

    with pytest.raises(AssertionError, match=r"block_separable is True but .* without the first block"):
        check_penalty(Separable(), shape=(4, 3, 2))


class WithoutFirstFeature(GroupL2):
    """The first feature of each block is not penalised."""

    euclidean = False

    def group_values(self, coef):
        return super().group_values(coef[..., 1:, :])


class InfiniteDualNorm(GroupL2):
    def group_dual_norms(self, coef):
        return torch.full_like(super().group_dual_norms(coef), torch.inf)


class ProxInPlace(GroupL2):
    def prox(self, coef, step):
        return coef.copy_(super().prox(coef, step))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WithoutFirstFeature, "no norm: it is zero at coefficients that are not"),
        (InfiniteDualNorm, "the dual norm is not finite"),
        (ProxInPlace, "prox changes its argument"),
    ],
)
def test_check_names_what_is_no_norm_and_a_changed_argument(kind, message):
    with pytest.raises(AssertionError, match=message):
        check_penalty(kind())


def test_check_wants_the_blocks_first():
    class Flat(GroupL2):
        def group_values(self, coef):
            return super().group_values(coef).flatten()

    with pytest.raises(AssertionError, match="group_values must have the axes of the blocks first"):
        check_penalty(Flat())


def test_a_penalty_with_several_groups_in_a_block_has_paths():
    generator = torch.Generator().manual_seed(0)
    data = torch.randn((60, 8, 3), generator=generator, dtype=torch.float64)
    y = data[:, 0, :2] + 0.1 * torch.randn((60, 2), generator=generator, dtype=torch.float64)
    program = Program(DenseMap(data), y, Huber(0.5), Ranked(), 1.0)
    grid = alpha_grid(program.alpha_max, 5, 0.05)
    for alpha, result in zip(grid, solve_path(program, Auto(), grid, tol=1e-8).results, strict=True):
        wanted = solve(program.with_alpha(alpha), Fista(), tol=1e-8, max_iter=50_000)
        assert result.certificate.primal == pytest.approx(wanted.certificate.primal, rel=1e-7)


@pytest.mark.parametrize("size", [5e-324, 1e-310, 1e-200, 1.0, 1e200, 1e308, 1.7e308])
@pytest.mark.parametrize("penalty", [GroupL2(), GroupNuclear()], ids=repr)
def test_norms_of_one_entry_of_any_size_are_its_size(penalty, size):
    coef = torch.zeros(3, 2, 2, dtype=torch.float64)
    coef[1, 1, 0] = -size
    for norm in (penalty.value, penalty.dual_norm):
        assert float(norm(coef)) == pytest.approx(size, rel=1e-15, abs=0)


@pytest.mark.parametrize("exponent", [-900, -700, 700, 900])
@pytest.mark.parametrize("penalty", [GroupL2(), GroupNuclear()], ids=repr)
def test_norms_of_outputs_of_different_sizes(penalty, exponent):
    coef, unit = randn(3, 2, 2), 2.0**exponent
    uneven = torch.tensor([1.0, unit], dtype=torch.float64)
    values, duals = (
        norms(coef * uneven) for norms in (penalty.group_values_in_any_units, penalty.group_dual_norms_in_any_units)
    )
    if penalty.output_separable:
        torch.testing.assert_close(values, penalty.group_values(coef) * uneven, rtol=1e-14, atol=0)
    else:  # the output in the larger unit has all of the norm
        larger = coef[..., int(exponent > 0)]
        torch.testing.assert_close(
            values, torch.linalg.vector_norm(larger, dim=-1) * max(1.0, unit), rtol=1e-14, atol=0
        )
    torch.testing.assert_close(duals, values, rtol=1e-14, atol=0)  # both are the length where the rank is one

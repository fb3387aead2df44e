"""Programs for sequence targets: the gauge of row-stochastic matrices, penalties per target row, column generation."""

import itertools

import cvxpy as cp
import numpy as np
import pytest
import torch
from covering import covering
from solver_cases import BOTH, cvxpy_value, fit, make_program, randn
from torch.utils._python_dispatch import TorchDispatchMode

from convexformer_solvers import (
    ColumnGeneration,
    DenseMap,
    Exact,
    GatedMap,
    GroupL2,
    GroupNuclear,
    Huber,
    PerTarget,
    Point,
    Program,
    RowStochastic,
    SignedMap,
    certify,
    check_map,
    get_loss,
    get_solver,
    solve,
)
from convexformer_solvers.linear_maps.config import MapConfig
from convexformer_solvers.penalties import sequence as sequence_penalties
from convexformer_solvers.points import null_point


def sequence_program(n=3, d=2, c=2, n_targets=3, n_samples=10, loss="squared", intercept=False, ratio=0.1, seed=0):
    tokens = randn(n_samples, n, d, seed=seed)
    y = randn(n_samples, n_targets * c, seed=seed + 1)
    y = y.exp().round() if loss == "poisson" else y + tokens.flatten(1)[:, :1]
    linear_map = SignedMap(DenseMap(tokens))
    program = Program(linear_map, y, get_loss(loss), RowStochastic(n_targets), 1.0, fit_intercept=intercept)
    return program.with_alpha(ratio * program.alpha_max)


def every_atom(n, d, c, n_targets):
    """All extreme points: a sign, a feature, an output, and a token for every target row."""
    shape = (2, n, d, n_targets * c)
    sources = list(itertools.product(range(n), repeat=n_targets))
    for sign, feature, output in itertools.product(range(2), range(d), range(c)):
        for source in sources:
            atom = torch.zeros(shape, dtype=torch.float64)
            for target, token in enumerate(source):
                atom[sign, token, feature, target * c + output] = 1.0
            yield atom


@pytest.mark.parametrize("unsigned", [DenseMap(randn(7, 4, 3)), GatedMap(randn(7, 2, 3), randn(7, 5, seed=1) > 0)])
def test_signed_map_keeps_the_contract_and_subtracts(unsigned):
    signed = SignedMap(unsigned)
    check_map(signed)
    coef = randn(*signed.feature_shape, 2)
    torch.testing.assert_close(signed.matvec(coef), unsigned.matvec(coef[0]) - unsigned.matvec(coef[1]))


class TestRowStochastic:
    shape = (2, 3, 2, 4)  # n = 3, d = 2, T = 2, c = 2
    penalty = RowStochastic(2)

    def test_dual_norm_is_the_largest_inner_product_with_an_atom(self):
        correlation = randn(*self.shape)
        best = max(float((atom * correlation).sum()) for atom in every_atom(3, 2, 2, 2))
        assert float(self.penalty.dual_norm(correlation)) == pytest.approx(best, rel=1e-12)

    def test_violating_atoms_are_the_best_of_each_matrix(self):
        correlation, alpha = randn(*self.shape), 0.2
        found = self.penalty.violating_atoms(correlation, alpha)
        for index, value, excess in zip(*found, strict=True):
            atom = torch.zeros(self.shape, dtype=torch.float64).flatten()
            atom[index] = value
            assert float(self.penalty.value(atom.view(self.shape))) == 1.0
            assert float(atom @ correlation.flatten()) == pytest.approx(alpha * (1 + float(excess)), rel=1e-12)
        norms = self.penalty.group_dual_norms(correlation)
        assert len(found.excess) == int((norms > alpha).sum()) > 0
        torch.testing.assert_close(found.excess.sort().values, (norms[norms > alpha] / alpha - 1).sort().values)

    def test_value_is_the_sum_of_the_weights_of_atoms_and_infinite_elsewhere(self):
        atoms = list(every_atom(3, 2, 2, 2))
        weights = torch.rand(len(atoms), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        coef = sum(weight * atom for weight, atom in zip(weights, atoms, strict=True))
        assert float(self.penalty.value(coef)) == pytest.approx(float(weights.sum()), rel=1e-12)
        unequal, negative = coef.clone(), coef.clone()
        unequal[0, 0, 0, 0] += 1e-6
        negative[0] -= 2 * coef.max()
        assert self.penalty.value(unequal) == torch.inf
        assert self.penalty.value(negative) == torch.inf

    @pytest.mark.parametrize("step", [0.05, 0.5, 2.0, 50.0])
    @pytest.mark.parametrize("seed", range(3))
    def test_prox_satisfies_the_moreau_conditions(self, step, seed):
        coef = randn(*self.shape, seed=seed)
        new = self.penalty.prox(coef, step)
        assert float(self.penalty.dual_norm(coef - new)) <= step * (1 + 1e-12)
        value = float(self.penalty.value(new))
        assert float(((coef - new) * new).sum()) == pytest.approx(step * value, rel=1e-12, abs=1e-14)
        assert (value == 0) == (float(self.penalty.dual_norm(coef)) <= step)

    def test_prox_agrees_with_cvxpy(self):
        coef, step = randn(*self.shape, seed=5), 0.4
        new = self.penalty.matrices(self.penalty.prox(coef, step)).flatten(0, 2)
        for mine, matrix in zip(new, self.penalty.matrices(coef).flatten(0, 2), strict=True):
            C, s = cp.Variable(matrix.shape, nonneg=True), cp.Variable(nonneg=True)
            objective = cp.Minimize(0.5 * cp.sum_squares(C - matrix.numpy()) + step * s)
            cp.Problem(objective, [cp.sum(C, axis=1) == s]).solve(solver="CLARABEL")
            np.testing.assert_allclose(mine.numpy(), C.value, atol=1e-5)

    def test_prox_takes_some_features_at_a_time(self, monkeypatch):
        coef = randn(*self.shape, seed=6)
        whole = self.penalty.prox(coef, 0.3)
        monkeypatch.setattr(sequence_penalties, "CONFIG", MapConfig(temporary=1))
        torch.testing.assert_close(self.penalty.prox(coef, 0.3), whole, rtol=0, atol=0)

    def test_prox_of_nan_ends(self):
        assert self.penalty.prox(torch.full(self.shape, torch.nan), 0.1).shape == self.shape


@pytest.mark.parametrize(
    ("loss_and_ratio", "shape", "intercept"),
    covering(
        [("squared", 0.3), ("squared", 0.02), ("huber", 0.1), ("poisson", 0.2)],
        [(4, 3, 3, 4), (3, 2, 2, 3), (2, 3, 1, 4), (4, 1, 2, 2)],
        BOTH,
    ),
)
def test_column_generation_agrees_with_cvxpy_and_its_certificate_brackets(loss_and_ratio, shape, intercept):
    (loss, ratio), (n, d, c, n_targets) = loss_and_ratio, shape
    program = sequence_program(n, d, c, n_targets, loss=loss, ratio=ratio, intercept=intercept, seed=sum(shape))
    exact = solve(program, Exact(), tol=1e-6).certificate
    mine = solve(program, ColumnGeneration(), tol=1e-7).certificate
    assert mine.primal == pytest.approx(exact.primal, abs=1e-6 * program.null_value)
    assert mine.dual <= exact.primal + 1e-12
    assert exact.dual <= mine.primal + 1e-12
    assert mine.relative_gap <= 1e-7


def test_the_program_is_that_of_the_specification():
    # Written down independently of the penalty: two matrices of equal row sums for each feature and output.
    program = sequence_program(intercept=True, ratio=0.1)
    X, y = program.map.base.data.numpy(), program.y.numpy().reshape(10, 3, 2)
    places = list(itertools.product(range(2), range(2)))
    plus, minus = ([cp.Variable((3, 3), nonneg=True) for _ in places] for _ in range(2))
    sums = cp.Variable((2, 4), nonneg=True)
    sides = zip([*plus, *minus], [*sums[0], *sums[1]], strict=True)
    rows = [cp.sum(C, axis=1) == total for C, total in sides]
    bias = cp.Variable((3, 2))
    fit_value = 0
    for i, output in itertools.product(range(10), range(2)):
        read = sum((plus[j] - minus[j]) @ X[i, :, q] for j, (q, column) in enumerate(places) if column == output)
        fit_value += 0.5 * cp.sum_squares(read + bias[:, output] - y[i, :, output]) / 10
    value = cp.Problem(cp.Minimize(fit_value + program.alpha * cp.sum(sums)), rows).solve(solver="CLARABEL")
    assert fit(program, tol=1e-8).certificate.primal == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("name", ["auto", "fista", "column_generation"])
def test_every_solver_of_general_penalties_reaches_the_optimum(name):
    program = sequence_program(intercept=True, ratio=0.05)
    certificate = solve(program, get_solver(name), tol=1e-6).certificate
    assert certificate.relative_gap <= 1e-6
    assert certificate.primal == pytest.approx(solve(program, Exact()).certificate.primal, rel=2e-6)


@pytest.mark.parametrize("name", ["auto", "fista", "column_generation"])
def test_zero_at_alpha_max_and_not_below(name):
    program = sequence_program(intercept=True)
    at, below = (solve(program.with_alpha(k * program.alpha_max), get_solver(name), tol=1e-9) for k in (1.0, 0.99))
    assert not bool(at.coef.any())
    assert bool(below.coef.any())


def test_column_generation_lowers_the_objective_at_every_step():
    program, solver, primal = sequence_program(n=4, n_targets=4, ratio=0.01), ColumnGeneration(), []
    state = solver.init(program, null_point(program))
    for _ in range(8):
        state = solver.step(program, state)
        point = solver.point(program, state)
        primal.append(program.primal(point.coef, point.intercept))
    assert (np.diff(primal) <= 1e-12).all()
    assert primal[-1] < primal[0] - 1e-3


class LargestResult(TorchDispatchMode):
    """Numbers of the largest result of torch within."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if torch.is_tensor(result):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_column_generation_keeps_no_more_numbers_of_samples_than_gradient_steps():
    program, sizes = sequence_program(n_samples=500, intercept=True), []
    for name in ("fista", "column_generation"):
        with LargestResult() as largest:
            certificate = solve(program, get_solver(name), tol=1e-6).certificate
        assert certificate.relative_gap <= 1e-6
        sizes.append(largest.numbers)
    assert sizes[1] <= sizes[0]


@pytest.mark.parametrize("loss", ["squared", "huber", "poisson"])
@pytest.mark.parametrize("unit", [1e-6, 1e-3, 1e4, 1e6])
def test_column_generation_minds_no_units_of_the_features(loss, unit):
    program = sequence_program(loss=loss, intercept=True)
    scaled = program.with_map(SignedMap(DenseMap(unit * program.map.base.data))).with_alpha(unit * program.alpha)
    ours, theirs = (solve(each, ColumnGeneration(), tol=1e-6).certificate for each in (scaled, program))
    assert max(ours.relative_gap, theirs.relative_gap) <= 1e-6
    assert ours.dual <= theirs.primal * (1 + 1e-12)
    assert theirs.dual <= ours.primal * (1 + 1e-12)


def test_column_generation_goes_on_from_the_solution_of_a_smaller_alpha():
    """Whose dual point violates no constraint."""
    program, solver = sequence_program(ratio=0.2), ColumnGeneration()
    smaller = solve(program.with_alpha(0.2 * program.alpha), solver, tol=1e-7)
    found = solve(program, solver, tol=1e-7, start=(smaller.coef, smaller.intercept))
    assert found.n_iter > 1
    assert found.certificate.relative_gap <= 1e-7


def test_the_dual_point_of_column_generation_is_that_of_its_predictions():
    program, solver = sequence_program(ratio=0.1, intercept=True), ColumnGeneration()
    other = solve(program.with_alpha(0.5 * program.alpha), solver, tol=1e-2)
    state = solver.init(program, Point(other.coef, other.intercept))
    for at in (other, solver.point(program, solver.step(program, state))):
        pred = program.map.matvec(at.coef) + at.intercept
        torch.testing.assert_close(solver.point(program, state).dual, -program.loss.gradient(pred, program.y))
        state = solver.step(program, state)


def test_gaps_of_column_generation_are_about_those_of_certificates():
    program, solver = sequence_program(intercept=True, ratio=0.02), ColumnGeneration()
    state = solver.init(program, null_point(program))
    assert solver.gap_estimate(program, state) is None  # of no atoms
    for _ in range(5):
        state = solver.step(program, state)
        point = solver.point(program, state)
        gap = certify(program, point.coef, point.intercept, point.dual).gap
        assert 0.25 * gap <= solver.gap_estimate(program, state) <= 4 * gap


def test_column_generation_ends_by_itself_where_no_atom_is_new_and_rounds_by_little_in_single_precision():
    program, solver = sequence_program(ratio=0.1), ColumnGeneration()
    state, steps = solver.init(program, null_point(program)), 0
    while not solver.finished(state):
        state, steps = solver.step(program, state), steps + 1
        assert steps < 100
    exact, single = (solver.point(each, state) for each in (program, program.to(torch.float32)))
    assert certify(program, exact.coef, exact.intercept).relative_gap < 1e-9
    rounding = len(state.weights) * torch.finfo(torch.float32).eps * state.weights.sum()
    assert (single.coef.double() - exact.coef).abs().max() <= rounding


def test_column_generation_serves_any_penalty_with_atoms():
    program = make_program("squared", "nuclear", ratio=0.2, n=12)
    certificate = solve(program, ColumnGeneration(), tol=1e-6).certificate
    assert certificate.primal == pytest.approx(cvxpy_value(program), rel=1e-5)


def test_alternating_directions_refuse_what_their_rule_for_rho_does_not_suit():
    with pytest.raises(TypeError, match="'admm' needs a penalty that is a sum over blocks"):
        solve(sequence_program(), get_solver("admm"))


class TestPerTarget:
    def test_is_the_other_penalty_on_each_target_row(self):
        coef, penalty = randn(4, 3, 6), PerTarget(GroupNuclear(), 3)
        parts = coef.view(4, 3, 3, 2).unbind(2)
        total = sum(float(GroupNuclear().value(part)) for part in parts)
        assert float(penalty.value(coef)) == pytest.approx(total, rel=1e-12)
        largest = max(float(GroupNuclear().dual_norm(part)) for part in parts)
        assert float(penalty.dual_norm(coef)) == pytest.approx(largest, rel=1e-12)
        together = torch.stack([GroupNuclear().prox(part, 0.3) for part in parts], dim=2).flatten(-2)
        torch.testing.assert_close(penalty.prox(coef, 0.3), together)

    def test_of_one_output_a_row_is_the_group_penalty(self):
        coef, penalty = randn(4, 3, 6), PerTarget(GroupNuclear(), 6)
        assert penalty.for_outputs(6) == GroupL2()
        assert float(GroupL2().value(coef)) == pytest.approx(float(penalty.value(coef)), rel=1e-12)
        two = PerTarget(GroupNuclear(), 3)
        assert two.for_outputs(6) is two
        with pytest.raises(ValueError, match="n_targets must divide the number of outputs, got n_targets=6 and 7"):
            penalty.for_outputs(7)  # no row has a part of an output

    def test_factors_rebuild_the_coefficients_at_equal_cost(self):
        coef, penalty = randn(4, 3, 6), PerTarget(GroupNuclear(), 3)
        block, left, right = penalty.factorize(coef)
        rebuilt = torch.zeros_like(coef).index_put_((block[:, 0],), left[:, :, None] * right[:, None], accumulate=True)
        torch.testing.assert_close(rebuilt, coef)
        cost = penalty.factor_cost(left, right).sum()
        assert float(cost) == pytest.approx(float(penalty.value(coef)), rel=1e-12)

    @pytest.mark.parametrize("name", ["auto", "exact"])
    def test_the_program_separates_over_target_rows(self, name):
        tokens, y = randn(12, 3, 2), randn(12, 4, seed=1)
        data = DenseMap(tokens)
        together = Program(data, y, get_loss("squared"), PerTarget(GroupNuclear(), 2), 0.02)
        apart = [
            Program(data, part.contiguous(), get_loss("squared"), GroupNuclear(), 0.02) for part in y.split(2, dim=1)
        ]
        total = sum(fit(program, tol=1e-9).certificate.primal for program in apart)
        certificate = solve(together, get_solver(name), tol=1e-6).certificate
        assert certificate.primal == pytest.approx(total, rel=1e-5)
        assert certificate.dual <= total * (1 + 1e-9)


class TestColumnGenerationInSinglePrecision:
    """It works in float64 whatever the data are in; only the result is rounded."""

    @pytest.mark.parametrize("intercept", [False, True])
    @pytest.mark.parametrize("loss", ["squared", "logistic", "poisson"])
    @pytest.mark.parametrize("whole", [False, True])
    def test_finds_the_same_optimum_in_as_few_iterations(self, loss, intercept, whole):
        program = sequence_program(loss="squared", intercept=intercept)
        if loss != "squared":
            target = get_loss(loss).example_target(*program.y.shape, torch.Generator().manual_seed(0))
            program = Program(program.map, target, get_loss(loss), program.penalty, 1.0, fit_intercept=intercept)
            program = program.with_alpha(0.1 * program.alpha_max)
        exact = solve(program, ColumnGeneration(), tol=1e-4)
        single = solve(
            program.to(torch.float32) if whole else program, ColumnGeneration(), tol=1e-4, dtype=torch.float32
        )
        assert single.coef.dtype == single.intercept.dtype == torch.float32
        assert single.coef.any()
        assert single.certificate.relative_gap <= 1e-4
        assert single.n_iter <= exact.n_iter + 1
        assert single.certificate.primal == pytest.approx(exact.certificate.primal, rel=2e-4)

    def test_the_rounded_rows_have_equal_sums(self):
        program = sequence_program(n=5, n_targets=4, ratio=0.01).to(torch.float32)
        result = solve(program, ColumnGeneration(), tol=1e-4)
        sums = program.penalty.matrices(result.coef.double()).sum(-1)
        assert sums.any()
        assert bool((sums == sums[..., :1]).all())

    @pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
    def test_of_other_penalties(self, penalty):
        program = make_program("squared", penalty, n=12, intercept=True).to(torch.float32)
        result = solve(program, ColumnGeneration(), tol=1e-4)
        assert result.coef.dtype == torch.float32
        assert result.certificate.relative_gap <= 1e-4


def test_a_penalty_of_each_target_row_keeps_its_constraints_and_is_a_sum_over_blocks():
    class Bounded(GroupL2):
        def constraints(self, coef, n_blocks):
            return [coef <= 0.1]

    program = make_program("squared", n=20, blocks=2, d=2, c=4, ratio=0.01)
    bounded = Program(program.map, program.y, program.loss, PerTarget(Bounded(), 2), program.alpha)
    coef = cp.Variable((4, 4))
    assert len(bounded.penalty.constraints(coef, 2)) == 2
    with pytest.raises(ValueError, match="penalty must be a sum over blocks"):
        PerTarget(RowStochastic(1), 2)


@pytest.mark.parametrize("loss", ["squared", "huber", "poisson"])
def test_newton_steps_solve_the_program_of_each_target_row(loss):
    tokens, loss = randn(40, 3, 4), get_loss(loss)
    y = loss.example_target(40, 6, torch.Generator().manual_seed(0))
    program = Program(DenseMap(tokens), y, loss, PerTarget(GroupNuclear(), 3), 0.02, fit_intercept=True)
    found = solve(program, get_solver("smoothing_newton"), tol=1e-9)
    rows = [Program(program.map, part, loss, GroupNuclear(), 0.02, fit_intercept=True) for part in y.split(2, dim=1)]
    alone = [solve(row, get_solver("smoothing_newton"), tol=1e-9).certificate for row in rows]
    room = 1e-9 * program.null_value
    assert sum(each.dual for each in alone) - room <= found.certificate.primal
    assert found.certificate.primal <= sum(each.primal for each in alone) + room
    assert found.certificate.dual <= sum(each.primal for each in alone)


@pytest.mark.parametrize(
    ("n_and_shape", "threshold", "ratio"), covering([(60, (4, 3)), (30, (16, 8))], [1e-2, 1e-4], [0.1, 0.01])
)
def test_far_targets_of_sequences_take_few_steps(n_and_shape, threshold, ratio):
    """With alternating directions and gradient steps alone, gaps of 1e-5 to 3e-3 are left after 3,000 steps."""
    n, shape = n_and_shape
    tokens = randn(n, *shape)
    tokens = tokens + 0.5 * tokens[:, :1]
    penalty = PerTarget(GroupNuclear(), 2)
    program = Program(DenseMap(tokens), randn(n, 4, seed=1), Huber(threshold), penalty, 1.0, fit_intercept=True)
    program = program.with_alpha(ratio * program.alpha_max)
    assert solve(program, get_solver("auto"), tol=1e-6, max_iter=250).certificate.relative_gap <= 1e-6


def test_weight_decay_of_a_row_stochastic_pair_need_not_be_balanced():
    left, right = torch.tensor([[3.0, -1.0], [0.0, 1.0]]), torch.tensor([[0.0, -2.0], [1.0, 1.0]])
    assert RowStochastic(n_targets=1).factor_cost(left, right).tolist() == [(16 + 4) / 2, (1 + 4) / 2]

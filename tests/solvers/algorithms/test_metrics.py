"""Metrics of variable-metric steps: Gram matrices, their low-rank approximations, and minima of models."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from covering import covering
from scipy.optimize import minimize
from solver_cases import BOTH, randn, random_weight, valid_target

from convexformer_solvers import (
    Auto,
    DenseMap,
    GroupL2,
    GroupNuclear,
    Program,
    RowStochastic,
    SignedMap,
    Status,
    get_loss,
    solve,
)
from convexformer_solvers.algorithms.few_passes import Batched, GramMetrics, LowRankMetrics, MetricGradient
from convexformer_solvers.algorithms.few_passes.low_rank import LowRank
from convexformer_solvers.algorithms.few_passes.model import Gram, Model
from convexformer_solvers.algorithms.few_passes.read import best_combination, read
from convexformer_solvers.linear_maps.base import even_rows
from convexformer_solvers.points import Point

SOLVER = Batched(Auto())
GRAM = GramMetrics(SOLVER)


def decaying(p, seed=0):
    """A positive definite matrix with eigenvalues from 1 to 1e-3, and its eigenvectors."""
    basis = torch.linalg.qr(randn(p, p, seed=seed)).Q
    values = torch.logspace(0, -3, p, dtype=torch.float64)
    return basis @ torch.diag(values) @ basis.T, values


def low_rank_of(matrix, rank):
    directions = torch.linalg.qr(randn(len(matrix), rank, seed=1)).Q
    return LowRank(matrix @ directions, directions)


@pytest.mark.parametrize("rank", [1, 5, 20])
def test_a_low_rank_metric_is_exact_on_its_directions_and_the_smallest_known_elsewhere(rank):
    matrix, values = decaying(20)
    found = torch.linalg.eigvalsh(low_rank_of(matrix, rank).product(torch.eye(20).double()))
    assert bool((found <= values[0] * (1 + 1e-9)).all())  # as Nystrom approximations are at most the matrix
    assert bool((found > 0).all())
    if rank == 20:
        torch.testing.assert_close(found.flip(0), values)
    else:
        torch.testing.assert_close(found[: 20 - rank + 1], found[:1].expand(20 - rank + 1), rtol=1e-6, atol=0)


def test_a_matrix_of_low_rank_is_found():
    factor = randn(30, 3)
    matrix = factor @ factor.T
    basis, found, unit = torch.linalg.qr(factor).Q, low_rank_of(matrix, 6), torch.eye(30, dtype=torch.float64)
    expected = matrix + found.ridge * (unit - basis @ basis.T)
    torch.testing.assert_close(found.product(unit), expected, atol=1e-6, rtol=1e-6)


MODELS = {
    "group_l2": (GroupL2(), (6, 3, 2)),
    "nuclear": (GroupNuclear(), (6, 3, 2)),
    "several axes": (GroupNuclear(), (2, 3, 3, 2)),
    "row_stochastic": (RowStochastic(2), (2, 6, 1, 2)),
}


@pytest.mark.parametrize(("name", "rank", "share", "goal"), covering(list(MODELS), [2, 8], [0.5, 0.05], [1e-4, 1e-10]))
def test_models_are_minimised_to_their_goal(name, rank, share, goal):
    penalty, shape = MODELS[name]
    p, k = randn(*shape).flatten(0, -2).shape
    low_rank, q = low_rank_of(decaying(p)[0], rank), randn(p, k, seed=2)
    alpha = share * float(penalty.dual_norm(q.view(shape)))
    model = Model(penalty, alpha, shape, q, torch.zeros(p, k).double(), goal)

    def objective(coef):
        return float((0.5 * coef * low_rank.product(coef) - q * coef).sum()) + model.value(coef)

    other = Gram(low_rank.product(torch.eye(p).double()), shape[:-1], SOLVER)
    best = objective(other.minimum(model._replace(goal=1e-13)))
    found = objective(low_rank.minimum(model))
    assert best - 1e-12 <= found <= best + goal + 1e-12


def test_a_model_whose_minimum_is_zero():
    q = randn(18, 2)
    model = Model(
        GroupL2(), 2.0 * float(GroupL2().dual_norm(q.view(6, 3, 2))), (6, 3, 2), q, randn(18, 2, seed=4), 1e-12
    )
    assert not bool(low_rank_of(decaying(18)[0], 4).minimum(model).any())


def test_outputs_that_the_loss_does_not_couple_have_their_own_metrics():
    n, c, loss = 40, 3, get_loss("logistic")
    y = valid_target(loss, n, c, torch.Generator().manual_seed(0))
    program = Program(DenseMap(randn(n, 4, 2) + 1), y, loss, GroupL2(), 0.1, random_weight(n), True)
    local = MetricGradient(GRAM)._curvatures(program, randn(n, c, seed=3))
    unit = torch.eye(8, dtype=torch.float64)
    parts = LowRankMetrics(3).of(program, local).parts
    assert len(parts) == c
    for place, part in enumerate(parts):
        alone = Program(program.map, y[:, [place]], loss, GroupL2(), 0.1, program.sample_weight, True)
        (other,) = LowRankMetrics(3).of(alone, local[:, [place]]).parts
        torch.testing.assert_close(part.matrix.product(unit), other.matrix.product(unit))
        torch.testing.assert_close(part.cross, other.cross)


def with_means(loss, intercept):
    """A program of weighted samples and three outputs, of features with means."""
    loss = get_loss(loss)
    y = valid_target(loss, 60, 3, torch.Generator().manual_seed(0))
    return Program(DenseMap(randn(60, 3, 2) + 1), y, loss, GroupL2(), 0.1, random_weight(60), intercept)


def weighted_curvatures(program, local):
    """Second derivatives of each sample's loss that metrics of Gram matrices take, as matrices ``(N, c, c)``."""
    n, c = program.y.shape
    if program.loss.output_separable:
        curvature = torch.diag_embed(local.expand(n, c))
    else:
        curvature, (i, j) = torch.empty(n, c, c, dtype=torch.float64), torch.triu_indices(c, c)
        curvature[:, i, j] = curvature[:, j, i] = local
    return program.weight[:, None, None] * curvature


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
def test_a_metric_is_that_of_predictions_and_their_curvatures(loss, intercept):
    program = with_means(loss, intercept)
    n, c = program.y.shape
    local = MetricGradient(GRAM)._curvatures(program, randn(n, c, seed=3))
    metric, curvature = GRAM.of(program, local), weighted_curvatures(program, local)
    move, shift = randn(3, 2, c, seed=4), randn(c, seed=5) * intercept
    change = program.map.matvec(move) + shift
    expected = torch.einsum("ic,icd,id->", change, curvature, change)
    assert metric.square(move, shift) == pytest.approx(float(expected), rel=1e-9)
    if intercept:
        theta = program.weight[:, None] * randn(n, c, seed=6)
        centred = theta - curvature @ torch.linalg.solve(curvature.sum(0), theta.sum(0))
        reduced = metric.reduced(program.map.rmatvec(theta), theta.sum(0))
        torch.testing.assert_close(reduced, program.map.rmatvec(centred))


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("name", ["squared", "logistic", "softmax"])
def test_steps_end_at_the_minimum_of_their_model_over_coefficients_and_intercept(name, intercept):
    program, solver = with_means(name, intercept), MetricGradient(GRAM)
    program, c = program.with_alpha(0.1 * program.alpha_max), program.y.shape[1]
    start = Point(0.1 * randn(*program.coef_shape, seed=4), 0.5 * randn(c, seed=5) * intercept)
    state = solver.init(program, start)._replace(curvature=3.0, accuracy=1e-13)
    at, following = state.base.at, solver._minimised(program, state)
    change = program.map.matvec(following.coef - at.coef) + following.intercept - at.intercept
    bent = 3.0 * torch.einsum("icd,id->ic", weighted_curvatures(program, state.metric.local), change)
    theta = program.slopes(at.intercept).at(at.pred) - bent  # of the model there
    correlation, close = program.map.rmatvec(theta), 1e-6 * program.alpha
    assert float(program.penalty.dual_norm(correlation)) <= program.alpha + close
    penalty = program.alpha * float(program.penalty.value(following.coef))
    assert float((correlation * following.coef).sum()) == pytest.approx(penalty, rel=1e-6)
    assert penalty > 0
    if intercept:
        assert float(theta.sum(0).abs().max()) <= close
    else:
        assert not bool(following.intercept.any())


def state_of(name, curvature, past):
    """A program, the solver, and a state that has a point as its base, and as the one before if `past`."""
    program, solver = with_means(name, True), MetricGradient(GRAM)
    program, c = program.with_alpha(0.1 * program.alpha_max), program.y.shape[1]
    state = solver.init(program, Point(0.1 * randn(*program.coef_shape, seed=4), 0.1 * randn(c, seed=5)))
    before = read(program, 0.2 * randn(*program.coef_shape, seed=6), state.intercept, single=False)
    return program, solver, state._replace(curvature=curvature, accuracy=0.5, past=(before,) if past else ())


@pytest.mark.parametrize(
    ("name", "curvature", "past", "expected"),
    [
        ("squared", 1.0, False, 1.5),
        ("squared", 0.5, False, 1.0),  # its own is one
        ("squared", 0.5, True, 0.5),
        ("poisson", 0.5, False, 0.75),
        ("poisson", 0.5, True, 0.5),
    ],
)
def test_a_raised_objective_makes_the_model_more_curved_and_its_minimum_finer(name, curvature, past, expected):
    program, solver, state = state_of(name, curvature, past)
    far = state.base.at.coef + 30 * (state.coef - state.base.at.coef)
    assert float(program.primal(far, state.intercept)) > state.base.value
    following = solver.step(program, state._replace(coef=far))
    assert following.curvature == pytest.approx(expected, rel=1e-9)
    assert following.accuracy == (0.5 if past else 0.005)  # unless slopes of combinations have led too far
    assert following.past == ()
    assert following.read is following.base
    assert following.base is state.base or name == "poisson"
    if name == "poisson":  # whose steps are searched along
        at, start = following.base.at, state.base.at
        own = read(program, at.coef, at.intercept, single=False)
        assert own.value < state.base.value
        torch.testing.assert_close(at.correlation, own.at.correlation)
        way, moved = far - start.coef, at.coef - start.coef
        torch.testing.assert_close(moved, (moved * way).sum() / way.square().sum() * way)


@pytest.mark.parametrize(
    ("name", "curvature", "past", "expected"),
    [
        *(("squared", 3.0, past, math.sqrt(6)) for past in BOTH),  # its own is one
        *(("squared", 1.2, past, 1.2) for past in BOTH),
        *(("squared", 0.5, past, 1.0) for past in BOTH),
        ("logistic", 1e-3, True, 1e-3),  # slopes of combinations are not those of the loss
        ("logistic", 6.0, True, math.sqrt(24)),
    ],
)
def test_the_curvature_of_the_model_follows_that_of_the_loss(name, curvature, past, expected):
    program, solver, state = state_of(name, curvature, past)
    coef = solver._minimised(program, state._replace(curvature=1.0, past=(), accuracy=1e-9)).coef
    following = solver.step(program, state._replace(coef=coef))
    assert following.base.value <= following.read.value < state.base.value
    assert following.curvature == pytest.approx(expected, rel=1e-9)
    assert following.past[-1] is state.base
    assert following.accuracy == 0.5


@pytest.mark.parametrize(("past", "gap", "ends"), [(False, 0.0, True), (True, 0.0, False), (False, 1.0, False)])
def test_steps_do_not_end_where_the_next_model_is_another(past, gap, ends):
    program, solver = with_means("logistic", True), MetricGradient(GRAM)
    program = program.with_alpha(2 * program.alpha_max)  # of which the optimum is zero
    state = solver.init(program, Point(torch.zeros(program.coef_shape, dtype=torch.float64)))
    state = state._replace(past=(state.base,) if past else (), read=state.read._replace(gap=gap), cost=1.0)
    assert solver.finished(solver._minimised(program, state)) == ends


def test_the_squared_loss_has_the_curvature_of_its_metric_between_any_points():
    y = randn(60, 2, seed=2)
    program = Program(DenseMap(randn(60, 3, 2) + 1), y, get_loss("squared"), GroupL2(), 0.1, random_weight(60), True)
    metric = GRAM.of(program, MetricGradient(GRAM)._curvatures(program, y))
    points = [(randn(*program.coef_shape, seed=k), randn(2, seed=k + 10)) for k in range(2)]
    before, after = (read(program, *point, single=False).at for point in points)
    assert MetricGradient._curvature_met(metric, before, after) == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("name", ["squared", "logistic", "softmax", "poisson"])
def test_what_is_known_of_points_gives_the_best_of_their_combinations(name, intercept):
    n, c, loss = 60, 2, get_loss(name)
    y = valid_target(loss, n, c, torch.Generator().manual_seed(0))
    program = Program(DenseMap(randn(n, 3, 2)), y, loss, GroupL2(), 0.002, random_weight(n), intercept)
    points = [(0.3 * randn(*program.coef_shape, seed=k), randn(c, seed=k + 9) * intercept) for k in range(3)]
    points[1] = torch.zeros(program.coef_shape).double(), points[1][1]  # with another intercept than the best
    reads = [read(program, *point, single=False) for point in points]

    def of(weights):
        return [(1 - weights.sum()) * a + weights[0] * b + weights[1] * d for a, b, d in zip(*points, strict=True)]

    def objective(weights):
        coef, shift = of(weights)
        return float(program.objective(coef, program.map.matvec(coef) + shift))

    options = {"xatol": 1e-9, "fatol": 1e-13, "maxiter": 2000, "maxfev": 2000}
    wanted = minimize(objective, np.zeros(2), method="Nelder-Mead", options=options).fun
    found = best_combination(program, reads[2], reads[:2], 1e-12)
    assert found.value == pytest.approx(wanted, rel=1e-8)
    at = found.at
    torch.testing.assert_close(at.pred, program.map.matvec(at.coef))
    assert float(program.objective(at.coef, at.pred + at.intercept)) == pytest.approx(found.value, rel=1e-12)
    for point, known in zip(points, reads, strict=True):
        theta = program.slopes(point[1]).at(program.map.matvec(point[0]))
        torch.testing.assert_close(known.at.correlation, program.map.rmatvec(theta))
        torch.testing.assert_close(known.at.slope, theta.sum(0))


def test_means_however_large_are_part_of_a_metric_without_intercept():
    y = valid_target(get_loss("logistic"), 60, 1, torch.Generator().manual_seed(0))
    program = Program(DenseMap(randn(60, 3, 2) + 1e5), y, get_loss("logistic"), GroupL2(), 0.1)
    local, move = MetricGradient(GRAM)._curvatures(program, randn(60, 1, seed=3)), randn(3, 2, 1, seed=4)
    expected = float((program.weight @ (local * program.map.matvec(move).square())).sum())
    assert GRAM.of(program, local).square(move, torch.zeros(1).double()) == pytest.approx(expected, rel=1e-6)


def test_a_gram_matrix_of_some_samples_is_that_of_their_own_program():
    n, loss = 60, get_loss("logistic")
    y = valid_target(loss, n, 1, torch.Generator().manual_seed(0))
    program = Program(DenseMap(randn(n, 3, 2) + 1), y, loss, GroupL2(), 0.1, random_weight(n), True)
    local, index = MetricGradient(GRAM)._curvatures(program, randn(n, 1, seed=3)), even_rows(n, 6, y.device)
    of_some, alone = GramMetrics(SOLVER, sample=1).of(program, local), GRAM.of(program.rows(index), local[index])
    move, shift = randn(3, 2, 1, seed=4), randn(1, seed=5)
    assert of_some.square(move, shift) == pytest.approx(alone.square(move, shift), rel=1e-9)


@pytest.mark.parametrize("metrics", [GRAM, LowRankMetrics(3)], ids=["gram", "low rank"])
def test_data_and_targets_of_zeros(metrics):
    for data, y in ((randn(80, 5, 2), torch.zeros(80, 2).double()), (torch.zeros(80, 5, 2).double(), randn(80, 2))):
        program = Program(DenseMap(data), y, get_loss("squared"), GroupL2(), 0.05, None, True)
        result = solve(program, MetricGradient(metrics), tol=1e-8)
        assert not bool(result.coef.any())
        assert result.certificate.gap <= 1e-12


@pytest.mark.parametrize("name", ["squared", "huber"])
@pytest.mark.parametrize("metrics", [GRAM, LowRankMetrics(3)], ids=["gram", "low rank"])
def test_targets_of_zeros_in_single_precision_from_other_coefficients(metrics, name):
    data, y = randn(80, 5, 2).float(), torch.zeros(80, 1, dtype=torch.float64)
    program = Program(DenseMap(data), y, get_loss(name), GroupL2(), 0.05, None, True)
    start = torch.ones(program.coef_shape), torch.zeros(1)
    result = solve(program, MetricGradient(metrics), tol=1e-8, start=start)
    assert result.status is Status.CONVERGED
    assert not bool(result.coef.any())


@pytest.mark.parametrize("name", ["squared", "logistic", "softmax"])
def test_features_without_blocks(name):
    loss = get_loss(name)
    y = valid_target(loss, 80, 3, torch.Generator().manual_seed(0))
    program = Program(DenseMap(randn(80, 6)), y, loss, GroupL2(), 0.02, None, True)
    one, other = (solve(program, solver, tol=1e-8) for solver in (Auto(), MetricGradient(LowRankMetrics(3))))
    assert other.certificate.primal == pytest.approx(one.certificate.primal, rel=1e-7)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    ("name", "penalty"),
    [("squared", GroupL2()), ("logistic", GroupL2()), ("softmax", GroupL2()), ("softmax", GroupNuclear())],
)
def test_low_rank_metrics_of_full_rank_are_those_of_gram_matrices(name, penalty, signed, intercept):
    n, c, loss = 100, 3, get_loss(name)
    linear_map = DenseMap(randn(n, 4, 2) + 1)
    linear_map = SignedMap(linear_map) if signed else linear_map
    y = valid_target(loss, n, c, torch.Generator().manual_seed(0))
    program = Program(linear_map, y, loss, penalty, 0.1, random_weight(n), intercept)
    full = math.prod(linear_map.feature_shape)
    local = MetricGradient(LowRankMetrics(full))._curvatures(program, randn(n, c, seed=3))
    uncoupled = dataclasses.replace(program, loss=get_loss("squared"))  # whose Gram matrices are of each output, too
    exact, approximate = GRAM.of(uncoupled, local), LowRankMetrics(full).of(program, local)
    largest = max(float(part.matrix.values.max()) for part in approximate.parts)
    for one, other in zip(exact.parts, approximate.parts, strict=True):
        unit = torch.eye(len(other.matrix.factor), dtype=torch.float64)
        values, vectors = torch.linalg.eigh(one.matrix.product(unit))
        expected = vectors * values.clamp(min=other.matrix.ridge) @ vectors.T
        torch.testing.assert_close(other.matrix.product(unit), expected, atol=1e-6 * largest, rtol=0)
    for seed in range(3):
        move, shift = randn(*program.coef_shape, seed=seed), randn(c, seed=seed + 10)
        # Nearly singular matrices are given a multiple of the identity.
        identity = 1.3e-4 * largest * float(move.square().sum()) if signed else 0.0
        square = exact.square(move, shift)
        assert -1e-6 * square <= approximate.square(move, shift) - square <= identity + 1e-6 * square
        torch.testing.assert_close(approximate.reduced(move, shift), exact.reduced(move, shift))


@pytest.mark.parametrize("penalty", [GroupL2(), GroupNuclear()])
def test_low_rank_metrics_of_coupled_outputs_are_above_the_gram_matrix_of_all(penalty):
    n, c, p, loss = 100, 3, 8, get_loss("softmax")
    y = valid_target(loss, n, c, torch.Generator().manual_seed(0))
    program = Program(DenseMap(randn(n, 4, 2) + 1), y, loss, penalty, 0.1, random_weight(n), True)
    pred = 3 * randn(n, c, seed=3)
    metric = LowRankMetrics(p).of(program, MetricGradient(LowRankMetrics(p))._curvatures(program, pred))
    assert len(metric.parts) == (c if penalty.output_separable else 1)
    probability, ways = torch.softmax(pred, 1), [(randn(4, 2, c, seed=k), randn(c, seed=k + 30)) for k in range(20)]
    shares = []
    for move, shift in ways:
        change = program.map.matvec(move) + shift
        mean = (probability * change).sum(1)
        square = float(program.mean((probability * change.square()).sum(1) - mean.square()))
        shares.append(square / metric.square(move, shift))
    assert max(shares) <= 1 + 1e-9
    assert max(shares) >= 0.2


@pytest.mark.parametrize("name", ["squared", "softmax"])
def test_metrics_of_low_rank_that_follow_each_other_find_the_largest_eigenvalues(name):
    n, c, rank, loss = 120, 3, 5, get_loss(name)
    y = valid_target(loss, n, c, torch.Generator().manual_seed(0))
    data = (randn(n, 20) @ decaying(20)[0]).view(n, 10, 2)
    program = Program(DenseMap(data), y, loss, GroupL2(), 0.1, random_weight(n), True)
    local = MetricGradient(LowRankMetrics(rank))._curvatures(program, randn(n, c, seed=3))
    unit = torch.eye(20, dtype=torch.float64)
    whole = LowRankMetrics(len(unit)).of(program, local)
    assert whole.span is None
    gram = whole.parts[0].matrix.product(unit)

    best = float(torch.linalg.eigvalsh(gram)[-rank:].sum())

    def found(metric):
        matrix = metric.parts[0].matrix
        return float((matrix.values + matrix.ridge).sum())

    first = metric = LowRankMetrics(rank).of(program, local)
    for _ in range(10):
        metric = LowRankMetrics(rank).of(program, local, metric.span)
    assert found(first) <= 0.9 * best
    assert 0.95 * best <= found(metric) <= (1 + 1e-9) * best


@pytest.mark.parametrize("penalty", [GroupL2(), GroupNuclear()])
def test_singular_metrics_are_given_a_multiple_of_the_identity(penalty):
    n, loss = 30, get_loss("logistic")
    data = randn(n, 1, 1) + randn(n, 12, 7, seed=1)
    y = valid_target(loss, n, 2, torch.Generator().manual_seed(0))
    program = Program(DenseMap(data), y, loss, penalty, 1.0, None, True)
    program = program.with_alpha(0.1 * program.alpha_max)
    metric = LowRankMetrics(n).of(program, MetricGradient(GRAM)._curvatures(program, torch.zeros_like(y)))
    for part in metric.parts:
        assert part.matrix.ridge >= 0.99e-4 * float(part.matrix.values.max())
    result = solve(program, MetricGradient(LowRankMetrics(n)), tol=1e-6)
    assert result.certificate.relative_gap <= 1e-6
    assert result.n_iter <= 30

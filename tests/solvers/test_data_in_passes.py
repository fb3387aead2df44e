"""Data that are not held in memory: the same optima as in memory, and few passes over the data."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from covering import covering
from sklearn.exceptions import ConvergenceWarning
from solver_cases import BOTH, LOSS_NAMES, randn, random_weight, valid_target

from convexformer_solvers import (
    Auto,
    AutoConfig,
    ColumnGeneration,
    DenseMap,
    Fista,
    Huber,
    Program,
    StreamedMap,
    certify,
    check_solver,
    get_loss,
    get_penalty,
    solve,
    solve_path,
)
from convexformer_solvers.algorithms.few_passes import (
    Batched,
    GramMetrics,
    LowRankMetrics,
    MetricConfig,
    MetricGradient,
)
from convexformer_solvers.algorithms.stage import Stage
from convexformer_solvers.algorithms.working_set import WorkingSet, WorkingSetConfig
from convexformer_solvers.auto import plan
from convexformer_solvers.linalg.eigenvalue_ratio import eigenvalue_ratio
from convexformer_solvers.linalg.hessian import curvature_bounds
from convexformer_solvers.linear_maps.derived import DerivedMap
from convexformer_solvers.linear_maps.source import Source
from convexformer_solvers.points import Point, dual_of

PENALTIES = ("group_l2", "nuclear")
MAX = torch.finfo(torch.float64).max


class CountedMap(DerivedMap):
    """Another map as if its data were on a disk; counts passes over all of them."""

    in_memory = False

    def __init__(self, base, passes=None):
        super().__init__(base)
        self.passes = [0.0] if passes is None else passes

    def matvec(self, coef):
        self.passes[0] += 1
        return self.base.matvec(coef)

    def rmatvec(self, values):
        self.passes[0] += 1
        return self.base.rmatvec(values)

    def slopes_pass(self, coef, slopes):
        self.passes[0] += 1
        return self.base.slopes_pass(coef, slopes)

    def moments(self, weight, right, single=False):
        self.passes[0] += 1
        return self.base.moments(weight, right, single)

    def gram(self, left, right, weight, center=None):
        self.passes[0] += 1
        return self.base.gram(left, right, weight, center)

    def columns(self, blocks):
        raise AssertionError("columns of data that are not held in memory are copied")

    def largest(self):
        self.passes[0] += 1
        return self.base.largest()

    def few(self, n_blocks):
        return False

    def to(self, dtype=None, device=None):
        base = self.base.to(dtype, device)
        return self if base is self.base else CountedMap(base, self.passes)

    def rows(self, index):
        if isinstance(index, torch.Tensor):
            self.passes[0] += len(index) / self.n_samples
            return self.base.rows(index)
        return CountedMap(self.base.rows(index), self.passes)


def target(loss, n, c):
    return valid_target(loss, n, c, torch.Generator().manual_seed(1))


def program_of(name, norm, gated=False, intercept=True, weighted=False, n=60, c=2, data=None):
    data = randn(n, 3, 2) if data is None else data
    linear_map, loss = DenseMap(data), get_loss(name)
    if gated:
        linear_map = linear_map.gated(randn(n, 2, seed=3) > 0)
    weight = random_weight(n) if weighted else None
    return Program(linear_map, target(loss, n, c), loss, get_penalty(norm), 1.0, weight, intercept)


def both(program, tol, share=0.1, solver=None):
    """Results in memory and in passes, and the map of the latter."""
    program = program.with_alpha(share * program.alpha_max)
    there = on_disk(program)
    return solve(program, Auto(), tol=tol), solve(there, solver or Auto(), tol=tol), there.map


def assert_same(program, one, other, tol):
    first, second = one.certificate, other.certificate
    assert first.relative_gap <= tol
    assert second.relative_gap <= tol
    assert second.primal == pytest.approx(first.primal, rel=10 * tol)
    slack = 1e-12 * abs(first.primal)
    assert first.dual <= second.primal + slack
    assert second.dual <= first.primal + slack


@pytest.mark.parametrize(
    ("name", "norm", "gated", "intercept", "weighted"), covering(LOSS_NAMES, PENALTIES, BOTH, BOTH, BOTH)
)
def test_optima_are_those_in_memory(name, norm, gated, intercept, weighted):
    tol = 1e-10 if get_loss(name).quadratic else 1e-8
    if not math.isfinite(get_loss(name).smoothness):
        tol = 1e-6
    program = program_of(name, norm, gated, intercept, weighted)
    one, other, _ = both(program, tol)
    assert_same(program, one, other, tol)


def constant_and_repeated(n=60):
    data = randn(n, 3, 2)
    data[:, 0, 0] = 2.0
    data[:, 2] = data[:, 1]
    return data


SINGULAR = {
    "more features than samples": randn(12, 10, 3),
    "constant and repeated features": constant_and_repeated(),
    "large means": randn(60, 3, 2) + 1e4,
    "uneven scales": randn(60, 3, 2) * torch.tensor([1e-6, 1.0]),
}


@pytest.mark.parametrize("name", ["squared", "logistic", "softmax"])
@pytest.mark.parametrize("case", SINGULAR)
def test_singular_gram_matrices(case, name):
    tol = 1e-8 if name == "squared" else 1e-6
    data = SINGULAR[case]
    program = program_of(name, "group_l2", n=len(data), data=data)
    one, other, _ = both(program, tol)
    assert_same(program, one, other, tol)


@pytest.mark.parametrize(
    ("name", "mean"), [("squared", 1e9), *((name, 1e6) for name in LOSS_NAMES if name != "squared")]
)
@pytest.mark.parametrize("c", [1, 2])
def test_means_far_larger_than_the_spread_take_few_steps(name, mean, c):
    if name == "softmax":
        c += 1
    program = program_of(name, "group_l2", c=c, data=randn(60, 3, 2) + mean)
    there = on_disk(program.with_alpha(0.1 * program.alpha_max))
    assert solve(there, Auto(), tol=1e-6, max_iter=20).certificate.relative_gap <= 1e-6


def correlated(n=4000, p=60):
    factors = randn(n, 6) @ randn(6, p, seed=1)
    return (factors + randn(n, p, seed=2)).view(n, p // 3, 3)


@pytest.mark.parametrize(("name", "most"), [("squared", 3), ("logistic", 19), ("softmax", 29), ("huber", 29)])
@pytest.mark.parametrize("share", [0.1, 0.01])
def test_few_passes(name, most, share):
    data = correlated()
    program = program_of(name, "group_l2", n=len(data), c=2, data=data)
    counted = CountedMap(program.map)
    program = Program(counted, program.y, program.loss, program.penalty, 1.0, None, True)
    program = program.with_alpha(share * program.alpha_max)
    assert solve(program, Auto(), tol=1e-4).certificate.relative_gap <= 1e-4
    some_rows = 0.1  # of which alpha_max looks at the size
    assert counted.passes[0] <= most + some_rows


@pytest.mark.parametrize(("delta", "share", "most"), [(0.03, 0.1, 65), (0.03, 0.01, 130), (0.003, 0.1, 125)])
def test_far_targets_of_the_huber_loss_take_few_passes(delta, share, most):
    data = randn(1000, 16, 4)
    signal = data[:, :4].sum((1, 2))[:, None]
    y = signal / signal.std() + randn(len(data), 1, seed=3)
    program = Program(DenseMap(data), y, Huber(delta), get_penalty("group_l2"), 1.0, None, True)
    tol = 1e-5
    one, other, counted = both(program, tol, share)
    assert_same(program, one, other, tol)
    assert counted.passes[0] <= most


@pytest.mark.parametrize(("delta", "share", "most"), [(0.03, 0.1, 65), (0.003, 0.3, 60)])
def test_a_path_with_far_targets_of_the_huber_loss_takes_few_passes(delta, share, most):
    """The first program may need no smoothing where the next ones do, or less narrow smoothing than these."""
    data = randn(100, 4, 2)
    signal = data[:, :2].sum((1, 2))[:, None]
    y = signal / signal.std() + randn(len(data), 1, seed=3)
    program = on_disk(Program(DenseMap(data), y, Huber(delta), get_penalty("group_l2"), 1.0, None, True))
    alphas = [0.95 * program.alpha_max, share * program.alpha_max]
    program.map.passes[0] = 0
    found = solve_path(program, MetricGradient(GramMetrics(Batched(Auto()))), alphas, tol=1e-3, max_iter=100)
    assert max(found.gaps) <= 1e-3
    assert program.map.passes[0] <= most


def test_the_gap_of_a_smoothed_loss_is_told_as_that_of_the_loss():
    data = randn(100, 4, 2)
    program = on_disk(
        Program(DenseMap(data), data[:, :2].sum((1, 2))[:, None], Huber(0.003), get_penalty("group_l2"), 1.0)
    )
    program, solver = program.with_alpha(0.3 * program.alpha_max), MetricGradient(GramMetrics(Batched(Auto())))
    state = solver.init(program, Point(torch.zeros(program.coef_shape, dtype=torch.float64)))
    for _ in range(5):
        state = solver.step(program, state)
    point = solver.point(program, state)
    certificate = certify(program, point.coef, point.intercept, dual_of(program, point))
    assert state.cost > 0
    assert solver.gap_estimate(program, state) == pytest.approx(certificate.primal - certificate.dual, rel=1e-6)


def test_a_path_of_the_squared_loss_takes_certificates_alone():
    program = program_of("squared", "group_l2", n=4000, data=correlated())
    counted = CountedMap(program.map)
    program = Program(counted, program.y, program.loss, program.penalty, 1.0, None, True)
    alphas = [share * program.alpha_max for share in (0.5, 0.2, 0.1, 0.05, 0.02)]
    assert max(solve_path(program, Auto(), alphas, tol=1e-4).gaps) <= 1e-4
    assert counted.passes[0] <= 1.1 + 2 * len(alphas)  # alpha_max, and certificates of the start and end of each


def test_with_room_for_a_gram_matrix_no_metric_of_low_rank():
    for name in ("squared", "logistic"):
        program = on_disk(program_of(name, "group_l2").with_alpha(0.01))
        assert not any(isinstance(getattr(stage.algorithm, "metrics", None), LowRankMetrics) for stage in plan(program))


def test_without_room_for_a_gram_matrix_gradient_steps():
    program = program_of("squared", "group_l2")
    counted = CountedMap(program.map)
    counted.memory_limit = 100
    program = Program(counted, program.y, program.loss, program.penalty, 0.1)
    assert [stage.algorithm.name for stage in plan(program)] == ["fista"]


def on_disk(program):
    return dataclasses.replace(program, map=CountedMap(program.map))


def limited(program, rank):
    """The same program as if on a disk, with room for a metric of that rank, but not for Gram matrices."""
    there = on_disk(program)
    k = program.y.shape[1] if program.penalty.output_separable and not program.loss.quadratic else 1
    size = AutoConfig().gram_copies * math.prod(program.map.feature_shape) + 3 * len(program.y)
    there.map.memory_limit = int(8 * k * size * (rank + 0.5))
    return there


@pytest.mark.parametrize(("name", "norm", "gated", "full"), covering(LOSS_NAMES, PENALTIES, BOTH, BOTH))
def test_optima_are_the_same_without_room_for_gram_matrices(name, norm, gated, full):
    program = program_of(name, norm, gated, intercept=full, weighted=full, data=randn(60, 5, 2))
    program = program.with_alpha(0.1 * program.alpha_max)
    narrow = limited(program, rank=2)
    if math.isfinite(program.loss.smoothness):
        first = plan(narrow)[0].algorithm
        assert isinstance(first, MetricGradient)
        assert first.metrics == LowRankMetrics(2)
    one, other = solve(program, Auto(), tol=1e-7), solve(narrow, Auto(), tol=1e-7)
    assert_same(program, one, other, 1e-7)


def few_samples(name, norm, limit, n=50, mean=0.0, shape=(80, 8)):
    """A program of fewer samples than features as if on a disk, which may copy some columns."""
    program = program_of(name, norm, n=n, data=0.3 * randn(n, *shape) + randn(n, 1, 1, seed=2) + mean)
    program = program.with_alpha(0.05 * program.alpha_max)
    return program, with_data(program, program.map.data, limit)


def with_data(program, data, limit=700_000):
    """The program of other data as if on a disk, within a limit."""

    class Rows(Source):
        shape, dtype = tuple(data.shape), torch.float64

        def read(self, rows):
            return data[rows]

    return dataclasses.replace(program, map=StreamedMap(Rows(), memory_limit=limit))


def takes_admm(program):
    return "admm" in [stage.algorithm.name for stage in plan(program)]


@pytest.mark.parametrize("limit", [700_000, None])  # that of the features takes 3.3 MB, of the samples 20 kB
@pytest.mark.parametrize("norm", PENALTIES)
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_few_samples_take_their_own_gram_matrix(name, norm, limit):
    whole, narrow = few_samples(name, norm, limit)
    assert takes_admm(narrow) == math.isfinite(whole.loss.smoothness)
    one, other = solve(whole, Auto(), tol=1e-7), solve(narrow, Auto(), tol=1e-7)
    assert_same(whole, one, other, 1e-7)


@pytest.mark.parametrize(("limit", "takes"), [(160_000, True), (159_999, False)])
def test_few_samples_without_room_for_their_gram_matrix_take_none(limit, takes):
    assert takes_admm(few_samples("squared", "group_l2", limit)[1]) == takes  # eight matrices of 50 by 50


@pytest.mark.parametrize(("limit", "takes"), [(400_000, True), (399_999, False)])
def test_few_samples_without_room_for_the_columns_of_a_block_take_none(limit, takes):
    narrow = few_samples("squared", "group_l2", limit, shape=(1, 1000))[1]  # 50 samples of 1,000 features take 400 kB
    assert takes_admm(narrow) == takes
    assert solve(narrow, Auto(), tol=1e-4).certificate.relative_gap <= 1e-4


@pytest.mark.usefixtures("steady_rates")
@pytest.mark.parametrize("name", ["squared", "huber", "squared_hinge"])
def test_few_samples_of_independent_features_are_solved(name):
    narrow = with_data(few_samples(name, "group_l2", 700_000)[1], randn(50, 80, 8))
    assert eigenvalue_ratio(narrow) < 1.2
    found = solve(narrow.with_alpha(0.01 * narrow.alpha_max), Auto(), tol=1e-7, max_iter=100)
    assert found.certificate.relative_gap <= 1e-7
    assert narrow.map.traffic().passes <= 300


@pytest.mark.usefixtures("steady_rates")
@pytest.mark.parametrize("name", ["squared", "huber", "logistic", "softmax"])
def test_independent_features_of_few_samples_end_in_a_metric_of_the_rank_of_the_data(name):
    narrow = with_data(few_samples(name, "group_l2", None)[1], randn(50, 80, 8), None)
    found = solve(narrow.with_alpha(0.05 * narrow.alpha_max), Auto(), tol=1e-7)
    assert found.certificate.relative_gap <= 1e-7
    assert narrow.map.traffic().passes <= 40


def test_few_counts_that_no_newton_step_serves_form_one_metric():
    for norm, n_metrics in (("nuclear", 1), ("group_l2", 2)):
        stages = plan(few_samples("poisson", norm, 700_000)[1])
        assert sum("metric_gradient" in stage.algorithm.name for stage in stages) == n_metrics


@pytest.mark.usefixtures("steady_rates")
@pytest.mark.parametrize("share", [0.05, 0.01])
def test_few_counts_of_many_features_take_newton_steps(share):
    narrow = few_samples("poisson", "group_l2", 700_000, shape=(400, 8))[1]
    found = solve(narrow.with_alpha(share * narrow.alpha_max), Auto(), tol=1e-7, max_iter=100)
    assert found.certificate.relative_gap <= 1e-7
    assert narrow.map.traffic().passes <= 1000


@pytest.mark.parametrize("n_gates", [0, 3])
def test_columns_of_few_samples_are_an_eighth_of_the_limit(n_gates):
    linear_map = few_samples("squared", "group_l2", 240_000)[1].map
    linear_map = linear_map.gated(randn(50, n_gates, seed=3) > 0) if n_gates else linear_map
    assert linear_map.blocks_of_a_pass == 240_000 // 8 // (8 * 50 * 8)
    before, n_passes = linear_map.traffic().passes, math.ceil(80 / linear_map.blocks_of_a_pass)
    kernel = linear_map.full_kernel(torch.float64)
    assert linear_map.traffic().passes - before == n_passes  # for all gates together
    data, masks = linear_map._like(masks=None).tensor().flatten(1), linear_map.masks
    of_gates = 1.0 if masks is None else masks.double() @ masks.double().T
    torch.testing.assert_close(kernel.tril(), (data @ data.T * of_gates).tril())
    before, some = linear_map.traffic().passes, torch.arange(2 * linear_map.blocks_of_a_pass + 1)
    linear_map.kernel(some, torch.full((len(some),), 0.5, dtype=torch.float64), randn(len(some), 8))
    assert linear_map.traffic().passes - before == 3
    reading = n_passes * linear_map.rates.work_of_a_read * 50 * 640
    assert linear_map.gram_work() == pytest.approx(50 * 50 * (640 + n_gates) + reading, rel=1e-12)


@pytest.mark.parametrize("name", ["squared", "logistic"])
def test_few_samples_lose_their_means_as_they_are_read(name):
    without, with_means = (few_samples(name, "group_l2", 700_000, mean=mean)[1] for mean in (0.0, 1e5))
    one, other = solve(without, Auto(), tol=1e-6), solve(with_means, Auto(), tol=1e-6)
    assert_same(without, one, other, 1e-6)
    assert other.n_iter <= one.n_iter + 5
    assert with_means.map.traffic().passes <= 1.2 * without.map.traffic().passes


@pytest.mark.parametrize("rank", [49, 60])
def test_metrics_of_few_samples_with_large_means_have_a_factor(rank):
    program = few_samples("squared", "group_l2", None, mean=1e6)[0]
    metric = LowRankMetrics(rank).of(program, torch.ones(50, 1, dtype=torch.float64))
    data = (program.map.data - program.map.data.mean(0)).flatten(1)
    way = randn(640, 1)
    product = metric.parts[0].matrix.product(way)
    assert float((way * product).sum()) >= float((data @ way).square().mean()) * (1 - 1e-5)
    assert bool(torch.isfinite(product).all())


@pytest.mark.parametrize("intercept", BOTH)
@pytest.mark.parametrize("n", [2, 4])
def test_a_metric_of_few_samples_is_exact(n, intercept):
    narrow = few_samples("poisson", "group_l2", 1_000_000, n=n)[1]
    narrow = dataclasses.replace(narrow, fit_intercept=intercept)
    narrow = narrow.with_alpha(0.1 * narrow.alpha_max)
    solution = solve(narrow, Auto(), tol=1e-6)
    assert solution.certificate.relative_gap <= 1e-6
    assert solution.n_iter <= 12
    assert narrow.map.traffic().passes <= 40


def test_a_metric_has_no_higher_rank_than_the_samples():
    narrow = few_samples("poisson", "group_l2", 10_000_000)[1]
    usual = AutoConfig(usual_steps=10**9)  # which the rank of a metric grows with
    names = [stage.algorithm.name for stage in plan(narrow, config=usual)]
    assert "rank 50" in names[0], names


@pytest.mark.parametrize(("limit", "width"), [(10**7, 10 * 11 // 2), (10**5, 1)])
def test_curvatures_of_pairs_of_classes_stay_below_the_limit(limit, width):
    classes = torch.nn.functional.one_hot(randn(200, 10).argmax(1), 10).double()
    program = Program(
        CountedMap(DenseMap(randn(200, 5, 2))), classes, get_loss("softmax"), get_penalty("group_l2"), 0.01
    )
    program.map.memory_limit = limit
    for metrics, own in ((GramMetrics(Batched(Auto())), width), (LowRankMetrics(2), 10)):
        steps = MetricGradient(metrics)
        assert steps.init(program, Point(torch.zeros(program.coef_shape))).metric.local.shape == (200, own)
        assert solve(program, steps, tol=1e-4).certificate.relative_gap <= 1e-4


def dependent_blocks(name, n=1500, n_blocks=200):
    """A program of blocks that depend on their neighbours and on a common factor, three of which make targets."""
    common, data = randn(n, 1, 1, seed=5), randn(n, n_blocks, 3)
    for block in range(1, n_blocks):
        data[:, block] = 0.5 * data[:, block - 1] + data[:, block]
    signal = data[:, 17, :2] + data[:, n_blocks // 3, 1:] + data[:, 3 * n_blocks // 4, :2]
    targets = {
        "logistic": signal.sign(),
        "softmax": torch.nn.functional.one_hot(signal.argmax(1), 2).double(),
        "poisson": torch.poisson((0.3 * signal).exp(), generator=torch.Generator().manual_seed(0)),
    }
    program = program_of(name, "group_l2", n=n, data=data + common)
    return dataclasses.replace(program, y=targets.get(name, signal))


LOW_RANK = MetricGradient(LowRankMetrics(16))


def passes_of(program, solver, tol=1e-4):
    there = on_disk(program)
    assert solve(there, solver, tol=tol).certificate.relative_gap <= tol
    return there.map.passes[0]


def assert_takes_more_than(n_passes, program, solver, tol=1e-4):
    there = on_disk(program)
    with pytest.warns(ConvergenceWarning):
        solve(there, solver, tol=tol, max_iter=math.ceil(n_passes / 2))
    assert there.map.passes[0] >= n_passes  # two or more each iteration


@pytest.mark.parametrize("share", [0.3, 0.1])
@pytest.mark.parametrize("name", ["squared", "huber", "logistic", "softmax"])
def test_few_passes_without_room_for_gram_matrices(name, share):
    program = dependent_blocks(name, n=800, n_blocks=100)
    program = program.with_alpha(share * program.alpha_max)
    passes = passes_of(program, LOW_RANK)
    assert passes <= 55
    assert_takes_more_than(5 * passes, program, Fista())


@pytest.mark.parametrize(
    ("scale", "outlier", "metrics"),
    covering([0.3, 1.0], [0, 10**6], [LowRankMetrics(16), GramMetrics(Batched(Auto()))]),
)
def test_few_passes_where_curvatures_have_no_bound(scale, outlier, metrics):
    program = dependent_blocks("squared", n=800, n_blocks=40)
    counts = torch.poisson((scale * program.y).exp(), generator=torch.Generator().manual_seed(0))
    counts[0] += outlier
    program = dataclasses.replace(program, y=counts, loss=get_loss("poisson"))
    for share in (0.3, 0.05):
        program = program.with_alpha(share * program.alpha_max)
        passes = passes_of(program, MetricGradient(metrics), 1e-6)
        assert_takes_more_than(4 * passes, program, Fista(), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["squared", "huber", "logistic", "softmax", "poisson"])
def test_more_digits_without_room_for_gram_matrices_take_in_proportion_more_passes(name, dtype):
    program = dependent_blocks(name, n=600, n_blocks=60)
    program = dataclasses.replace(program, map=program.map.to(dtype))
    program = program.with_alpha(0.1 * program.alpha_max)
    assert passes_of(program, LOW_RANK, 1e-9) <= 4 * passes_of(program, LOW_RANK)


def test_a_path_without_room_for_gram_matrices_forms_few_metrics(monkeypatch):
    program, columns, original = on_disk(dependent_blocks("squared", n=800, n_blocks=100)), [], CountedMap.slopes_pass

    def counted(self, coef, slopes):
        columns.append(coef.shape[-1])
        return original(self, coef, slopes)

    monkeypatch.setattr(CountedMap, "slopes_pass", counted)
    alphas = [share * program.alpha_max for share in (0.5, 0.3, 0.2, 0.1, 0.07, 0.05, 0.03, 0.02)]
    found = solve_path(program, LOW_RANK, alphas, tol=1e-6)
    assert max(found.gaps) <= 1e-6
    places = MetricConfig().renew_at[2:]
    assert columns.count(16) <= 1 + len(places)
    # Were they counted for each alpha, there would be more.
    assert sum(result.n_iter >= places[0] for result in found.results) > len(places)


@pytest.mark.parametrize("rank", [None, 1, 3, 1000])
def test_contract_of_the_metric_steps(rank):
    check_solver(MetricGradient(GramMetrics(Batched(Auto())) if rank is None else LowRankMetrics(rank)))


@pytest.mark.parametrize("metrics", [GramMetrics(Batched(Auto())), LowRankMetrics(3)])
def test_metric_steps_end_where_the_minimum_of_the_model_is_its_base(metrics):
    program, solver = on_disk(program_of("logistic", "group_l2")), MetricGradient(metrics)
    start = Point(torch.zeros(program.coef_shape, dtype=torch.float64))
    for share, ends in ((2.0, True), (0.5, False)):  # of the first the optimum is zero
        state = solver.init(program.with_alpha(share * program.alpha_max), start)
        assert solver.finished(state) == ends


@pytest.mark.parametrize("metrics", [GramMetrics(Batched(Auto())), LowRankMetrics(3)])
def test_metric_steps_go_on_from_the_intercept_of_their_start(metrics):
    program, solver = on_disk(program_of("logistic", "group_l2", data=randn(60, 3, 2) + 10)), MetricGradient(metrics)
    program = program.with_alpha(0.1 * program.alpha_max)
    previous = solver.init(program, Point(torch.zeros(program.coef_shape, dtype=torch.float64)))
    best = solve(program, solver, tol=1e-8)
    state = solver.init_again(program, Point(best.coef, best.intercept), previous)
    assert abs(solver.gap_estimate(program, state)) <= 1e-6 * program.null_value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("metrics", [GramMetrics(Batched(Auto())), LowRankMetrics(3)])
def test_each_alpha_of_a_path_begins_in_the_precision_of_the_data(monkeypatch, metrics, dtype):
    program, solver = (
        on_disk(program_of("logistic", "group_l2", data=randn(60, 3, 2).to(dtype))),
        MetricGradient(metrics),
    )
    program = program.with_alpha(0.1 * program.alpha_max)
    best = solve(program, solver, tol=1e-9)
    previous = solver.init(program, Point(best.coef, best.intercept))
    for _ in range(3):  # at the optimum, of which single precision says too little
        previous = solver.step(program, previous)
    seen, original = [], CountedMap.slopes_pass
    monkeypatch.setattr(CountedMap, "slopes_pass", lambda *given: seen.append(given[1].dtype) or original(*given))
    solver.step(program, previous)
    assert set(seen) == {torch.float64}
    seen.clear()
    solver.init_again(program.with_alpha(0.5 * program.alpha), Point(best.coef, best.intercept), previous)
    assert seen == [dtype]


@pytest.mark.parametrize("name", ["squared", "logistic"])
def test_column_generation_takes_a_pass_for_each_evaluation_only_where_there_is_no_room_for_more(name):
    program, passes = program_of(name, "group_l2"), []
    program = program.with_alpha(0.3 * program.alpha_max)
    for limit in (None, program.y.nbytes):
        there = on_disk(program)
        there.map.memory_limit = limit
        assert solve(there, ColumnGeneration(), tol=1e-4).certificate.relative_gap <= 1e-4
        passes += there.map.passes
    assert passes[0] < passes[1] / 2


def test_curvatures_of_samples_of_weight_zero_do_not_count():
    program = program_of("poisson", "group_l2", weighted=True)
    coef = 0.3 * randn(*program.coef_shape, seed=7)
    program.map.data[1] = 20 * coef[..., 0].sign()
    program = on_disk(program.with_alpha(0.1 * program.alpha_max))
    assert program.weight[1] == 0
    solver = MetricGradient(LowRankMetrics(3))
    every, counted = (solver.init(each, Point(coef)) for each in (program, program.drop_zero_weights()))
    torch.testing.assert_close(every.coef, counted.coef, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["logistic", "softmax"])
def test_gram_matrices_of_all_outputs_take_one_pass(name, dtype):
    program = program_of(name, "group_l2", c=3, data=correlated(60, 6).to(dtype))
    counted, local = CountedMap(program.map), 0.1 + torch.rand((60, 6 if name == "softmax" else 3)).double()
    program = dataclasses.replace(program, map=counted)
    GramMetrics(Batched(Auto())).of(program, local)
    assert counted.passes[0] == 1


def test_one_fit_of_the_squared_loss_reads_the_data_twice():
    program = program_of("squared", "group_l2", n=4000, data=correlated().float())
    counted = CountedMap(program.map)
    program = Program(counted, program.y, program.loss, program.penalty, 0.1, None, True)
    assert solve(program, Auto(), tol=1e-6).certificate.relative_gap <= 1e-6
    assert program.alpha_max > 0.1
    assert counted.passes[0] <= 2.1  # moments and a certificate; alpha_max looks at the size of some rows


@pytest.mark.parametrize("tol", [1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize(("scale", "offset", "most"), [(1.0, 0.0, 2.1), (1.0, 1e4, 3.1), (1e20, 0.0, 3.1)])
def test_gram_matrices_in_single_precision_lose_nothing(tol, scale, offset, most):
    data = (scale * (correlated() + offset)).float()
    program = program_of("squared", "group_l2", n=4000, data=data)
    counted = CountedMap(program.map)
    program = Program(counted, program.y, program.loss, program.penalty, 0.1 * scale, None, True)
    found = solve(program, Auto(), tol=tol).certificate
    assert found.relative_gap <= tol
    assert counted.passes[0] <= most  # once more about means that are large, or where squares overflow
    wanted = solve(dataclasses.replace(program, map=DenseMap(data.double())), Auto(), tol=1e-10).certificate
    assert found.primal == pytest.approx(wanted.primal, rel=10 * tol)


SOON = AutoConfig(costly_gram=0.0)  # whose plan takes a working set however small the Gram matrix of all features is


def few_active(offset=0.0, n=400, n_blocks=12, c=1):
    data = randn(n, n_blocks, 3) + offset
    return data, (data - offset)[:, :2].sum(2) @ randn(2, c, seed=5) + 0.1 * randn(n, c, seed=6)


@pytest.mark.parametrize(("dtype", "tol", "most"), [(torch.float64, 1e-9, 5), (torch.float32, 1e-5, 4)])
@pytest.mark.parametrize(
    ("norm", "intercept", "weighted", "c", "offset"), covering(PENALTIES, BOTH, BOTH, (1, 3), (0.0, 1e3))
)
def test_a_working_set_of_the_squared_loss_takes_four_passes(norm, intercept, weighted, c, offset, dtype, tol, most):
    data, y = few_active(offset if intercept else 0.0, c=c)
    weight = 0.1 + random_weight(len(y)) if weighted else None
    program = Program(DenseMap(data.to(dtype)), y, get_loss("squared"), get_penalty(norm), 1.0, weight, intercept)
    program = program.with_alpha(0.5 * program.alpha_max)
    there = on_disk(program)
    assert plan(on_disk(program), config=SOON)[0].algorithm.name == "working_set(batched(auto))"
    one, other = solve(program, Auto(), tol=tol), solve(there, Auto(SOON), tol=tol)
    assert_same(program, one, other, tol)
    # The best constant model with the means, the Gram matrix, a look at all blocks, and the certificate.
    assert there.map.passes[0] <= most + 0.1  # some rows, of which alpha_max looks at the size


class SlowMap(CountedMap):
    """Data of which one pass takes longer than the Gram matrix."""

    def passes_of_gram(self, n_outputs):
        return 0.5


@pytest.mark.parametrize(("share", "widest", "stays"), [(0.1, math.inf, True), (0.001, 0.6, False)])
def test_a_working_set_in_passes_grows_or_is_given_up(share, widest, stays):
    data, y = few_active(c=2)
    data = data + 2 * randn(len(data), 1, 1, seed=7)  # so that blocks depend on each other
    program = Program(DenseMap(data), y, get_loss("squared"), get_penalty("group_l2"), 1.0, None, True)
    program, tol = program.with_alpha(share * program.alpha_max), 1e-9
    sets = WorkingSetConfig(3, widest=widest, growth=1.0, decrease=1e-3, form="root")
    first = Stage(WorkingSet(Stage(Batched(Auto()), "solves the set"), sets), "few blocks at first")
    later = () if stays else (Stage(Fista(), "ends it"),)
    solver = Auto(make_plan=lambda *arguments: (first, *later))
    one, other = solve(program, Auto(), tol=tol), solve(on_disk(program), solver, tol=tol)
    assert_same(program, one, other, tol)


def test_no_working_set_where_one_gram_matrix_serves_or_many_blocks_may_be_active():
    data, y = few_active()
    program = Program(CountedMap(DenseMap(data)), y, get_loss("squared"), get_penalty("group_l2"), 1.0)
    many = program.with_alpha(float(program.null_dual_norms.min()) / 2)
    few = program.with_alpha(0.5 * program.alpha_max)
    slow = dataclasses.replace(few, map=SlowMap(program.map.base))
    for other, warm, config in ((few, True, SOON), (many, False, SOON), (slow, False, AutoConfig(costly_gram=4.0))):
        assert plan(other, warm, config)[0].algorithm.name == "batched(auto)"


METRICS = {"gram": Auto(), "low rank": MetricGradient(LowRankMetrics(4))}


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("scale", [1e-25, 1e20])
@pytest.mark.parametrize("name", ["logistic", "softmax"])
def test_metrics_of_data_whose_squares_single_precision_does_not_hold(name, scale, metric):
    program = program_of(name, "group_l2", n=400, data=(scale * randn(400, 3, 2)).float())
    one, other, _ = both(program, 1e-6, solver=METRICS[metric])
    assert_same(program, one, other, 1e-6)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", ["logistic", "softmax"])
def test_metrics_of_single_precision_with_large_means(name, metric):
    program = program_of(name, "group_l2", n=2000, data=(1e4 + randn(2000, 3, 2)).float())
    one, other, counted = both(program, 1e-6, solver=METRICS[metric])
    assert_same(program, one, other, 1e-6)
    assert counted.passes[0] <= 80


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("name", ["logistic", "softmax", "huber"])
def test_metrics_of_low_rank_of_single_precision_are_those_of_double(name, offset):
    data = (0.3 * randn(500, 1, 1, seed=5) + randn(500, 4, 3) + offset).float()
    program = program_of(name, "group_l2", n=500, data=data, weighted=True)
    local = curvature_bounds(program.loss, torch.zeros_like(program.y), program.y).amax(1, keepdim=True).clamp(1e-3)
    single, double = (
        LowRankMetrics(5).of(dataclasses.replace(program, map=DenseMap(each)), local).parts[0].matrix
        for each in (data, data.double())
    )
    unit = torch.eye(12, dtype=torch.float64)
    wanted = double.product(unit)
    rounding = 10 * torch.finfo(torch.float32).eps * (1 + offset)  # grows with the means, not with their squares
    assert torch.allclose(single.product(unit), wanted, rtol=0, atol=rounding * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("name", "n", "n_blocks", "ratio", "rank"),
    [("logistic", 1500, 100, 0.03, 16), ("huber", 1500, 100, 0.1, 16), ("softmax", 600, 60, 0.03, 4)],
)
def test_a_raised_objective_that_curvature_explains_is_no_rounding(name, n, n_blocks, ratio, rank):
    program = dependent_blocks(name, n=n, n_blocks=n_blocks)
    data = program.map.as_matrix().view(n, n_blocks, 3).float()
    program = dataclasses.replace(program, map=DenseMap(data))
    program = program.with_alpha(ratio * program.alpha_max)
    gaps = []

    class Watched(MetricGradient):
        def step(self, program, state):
            following = super().step(program, state)
            if state.single and not following.single:
                gaps.append(abs(state.read.gap) / program.null_value)
            return following

    result = solve(program, Watched(LowRankMetrics(rank)), tol=1e-6, max_iter=200)
    assert result.certificate.relative_gap <= 1e-6
    assert len(gaps) == 1
    assert gaps[0] <= 2e-3  # 4e-3 to 2e-2 where every objective raised by 1e-5 counts as rounding


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", ["logistic", "softmax", "huber"])
def test_passes_are_in_the_precision_of_the_data_while_that_says_enough(monkeypatch, name, metric):
    program, wide, original = dependent_blocks(name, n=600, n_blocks=60), [], CountedMap.slopes_pass

    def counted(self, coef, slopes):
        wide.append(coef.dtype == torch.float64)
        pred, back = original(self, coef, slopes)
        assert {pred.dtype, back.dtype} == {coef.dtype}
        return pred, back

    monkeypatch.setattr(CountedMap, "slopes_pass", counted)
    program = dataclasses.replace(program, map=DenseMap(program.map.data.float()))
    one, other, _ = both(program, 1e-4, solver=METRICS[metric])
    assert_same(program, one, other, 1e-4)
    assert sum(wide) <= 0.5 * len(wide)
    wide.clear()
    assert_same(program, *both(program, 1e-9, solver=METRICS[metric])[:2], 1e-9)
    assert sum(wide) >= 0.2 * len(wide)


def test_large_means_take_no_more_passes():
    passes = []
    for offset in (0.0, 1e4):
        program = program_of("huber", "group_l2", n=2000, data=randn(2000, 3, 2) + offset)
        one, other, counted = both(program, 1e-6)
        assert_same(program, one, other, 1e-6)
        passes.append(counted.passes[0])
    assert passes[1] <= passes[0] + 3


def test_rounded_coefficients_have_the_certificates_of_those_in_double():
    program = program_of("huber", "group_l2", n=2000, c=2, data=randn(2000, 3, 2).float())
    one, other, counted = both(program, 1e-9)
    assert other.coef.dtype == torch.float32
    assert_same(program, one, other, 1e-9)
    assert counted.passes[0] <= 80


@pytest.mark.parametrize(
    ("offset", "intercept", "tol", "most"),
    [(0.0, True, 1e-10, 20), (1.0, True, 1e-9, 20), (30.0, True, 1e-8, 25), (30.0, False, 1e-6, 40)],
)
def test_rounded_coefficients_of_the_squared_loss_have_a_dual_point_of_their_own(offset, intercept, tol, most):
    """Predictions of rounded ones are off by 1e-7 times the features, and a gap of their dual point by as much.

    The number of passes near the precision of the coefficients depends on the processor's rounding.
    """
    data = randn(2000, 3, 3).float()
    y = data[..., 0].double() @ randn(3, 2, seed=1) + randn(2000, 2, seed=2)
    program = Program(DenseMap(data + offset), y, get_loss("squared"), get_penalty("group_l2"), 1.0, None, intercept)
    one, other, counted = both(program, tol)
    assert other.coef.dtype == torch.float32
    assert_same(program, one, other, tol)
    assert counted.passes[0] <= most


class CountedSteps(Batched):
    """Knows the largest number of steps that one solve to a gap has taken."""

    most = 0

    def until(self, program, state, goal):
        counted = []

        class Counted(Auto):
            def step(self, program, state):
                counted.append(1)
                return super().step(program, state)

        result = Batched(Counted(), self.config).until(program, state, goal)
        self.most = max(self.most, len(counted))
        return result


@pytest.mark.parametrize("share", [0.1, 0.03])
def test_models_are_minimised_to_what_rounding_leaves(share):
    data = randn(200, 6, 5) @ randn(5, 5, seed=1)
    y = data.flatten(1) @ randn(30, 1, seed=2) / 3 + randn(200, 1, seed=3)
    program = Program(CountedMap(DenseMap(data)), y, get_loss("huber"), get_penalty("group_l2"), 1.0, None, True)
    inner = CountedSteps(Auto())
    found = solve(program.with_alpha(share * program.alpha_max), MetricGradient(GramMetrics(inner)), tol=1e-8)
    assert found.certificate.relative_gap <= 1e-8
    assert inner.most < inner.config.steps  # which a goal below rounding would take


def test_singular_gram_matrices_in_single_precision():
    program = program_of("squared", "group_l2", n=60, data=constant_and_repeated().float())
    one, other, _ = both(program, 1e-6)
    assert_same(program, one, other, 1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_certificates_of_one_read(name, intercept, weighted):
    program = program_of(name, "group_l2", False, intercept, weighted)
    program = program.with_alpha(0.1 * program.alpha_max)
    counted = CountedMap(program.map)
    there = dataclasses.replace(program, map=counted)
    null_value, optimum = there.null_value, solve(program, Auto(), tol=1e-9)
    assert there.alpha_max == pytest.approx(program.alpha_max)  # which a program keeps
    for at in (optimum.coef, 0.9 * optimum.coef, randn(*program.coef_shape, seed=7)):
        counted.passes[0] = 0
        found, held = (certify(each, at, optimum.intercept) for each in (there, program))
        assert counted.passes[0] == 1
        assert found.primal == pytest.approx(held.primal, rel=1e-12)
        assert found.dual <= optimum.certificate.primal + 1e-12 * abs(null_value)
        theta = found.dual_point
        assert float(program.dual(theta)) == found.dual
        largest = program.penalty.group_dual_norms(program.weighted_adjoint(theta)).max()
        assert float(largest) <= program.alpha * (1 + 1e-10)
        if intercept:
            assert float((program.weight @ theta).abs().max()) <= 1e-13 * float(theta.abs().max())
        if at is optimum.coef:
            assert found.gap <= max(2 * held.gap, 1e-9 * null_value)


@pytest.mark.parametrize(("offset", "of_target"), [(0.0, 1e8), (1e3, 1e6), (1e4, 1e8), (1e5, 1e9)])
def test_certificates_far_from_the_best_intercept_are_feasible(offset, of_target):
    data = randn(200, 3, 2) + offset
    y = randn(200, 1, seed=1) + data[:, 0, :1] - offset + of_target
    program = Program(DenseMap(data), y, get_loss("squared"), get_penalty("group_l2"), 0.1, None, True)
    optimum = solve(program, Auto(), tol=1e-9)
    there = dataclasses.replace(program, map=CountedMap(program.map))
    found = certify(there, optimum.coef)  # of an intercept of zero
    largest = program.penalty.group_dual_norms(program.weighted_adjoint(found.dual_point)).max()
    assert float(largest) <= program.alpha * (1 + 1e-9 * max(1.0, offset))
    assert found.dual <= optimum.certificate.primal * (1 + 1e-6)


def test_a_penalty_that_is_the_same_norm_takes_no_more_passes():
    program = program_of("squared", "nuclear", n=4000, c=1, data=correlated().float())
    counted = CountedMap(program.map)
    program = Program(counted, program.y, program.loss, program.penalty, 0.1, None, True)
    assert solve(program, Auto(), tol=1e-6).certificate.relative_gap <= 1e-6
    assert counted.passes[0] <= 3.1  # alpha_max is that of the given penalty


def test_certificates_are_of_the_data():
    program = program_of("squared", "group_l2", weighted=True)
    other = both(program, 1e-8)[1]
    exact = program.with_alpha(0.1 * program.alpha_max)
    again = certify(exact, other.coef, other.intercept)
    assert again.primal == pytest.approx(other.certificate.primal, rel=1e-12)


@pytest.mark.parametrize("far", [(1e12, 1e12), (0.0, 1e12)])
@pytest.mark.parametrize("norm", PENALTIES)
def test_an_intercept_far_from_the_best_one_in_any_output_gives_a_feasible_point(norm, far):
    program = program_of("squared", norm)
    program = program.with_alpha(0.1 * program.alpha_max)
    found = certify(on_disk(program), torch.zeros(program.coef_shape), torch.tensor(far))
    largest = program.penalty.group_dual_norms(program.weighted_adjoint(found.dual_point)).max()
    assert float(largest) <= program.alpha * (1 + 1e-10)
    assert found.dual > 0


@pytest.mark.parametrize("intercept", [False, True])
def test_where_a_sample_overflows_the_constant_model_gives_the_bound(intercept):
    program = program_of("poisson", "group_l2", intercept=intercept)
    program = program.with_alpha(0.1 * program.alpha_max)
    start = certify(program, torch.zeros(program.coef_shape), program.null_intercept)
    for each in [on_disk(program)] if intercept else [on_disk(program), program]:  # else another intercept is best
        found = certify(each, 1e4 * randn(*program.coef_shape, seed=7))
        assert found.primal == math.inf
        assert found.dual == pytest.approx(start.dual, rel=1e-12)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize(("name", "size"), [("poisson", 1e6), ("poisson", MAX), ("squared", MAX), ("huber", MAX)])
def test_a_sample_of_weight_zero_may_overflow(intercept, name, size):
    program = program_of(name, "group_l2", intercept=intercept, weighted=True)
    coef, shift = 0.5 * randn(*program.coef_shape, seed=7), program.null_intercept
    program.map.data[1] = size * coef[..., 0].sign()
    program = dataclasses.replace(program, alpha=0.1 * program.alpha_max)
    assert program.weight[1] == 0
    for place in (lambda held: held, on_disk):
        found, counted = (certify(place(each), coef, shift) for each in (program, program.drop_zero_weights()))
        assert math.isfinite(found.primal)
        assert found.primal == pytest.approx(counted.primal, rel=1e-12)
        assert found.dual == pytest.approx(counted.dual, rel=1e-12)
        assert program.primal(coef, shift) == pytest.approx(counted.primal, rel=1e-12)


@pytest.mark.parametrize("shift", [0.5, 5.0])
@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_certificates_of_one_read_at_other_intercepts_than_the_best(name, scale, shift):
    program = program_of(name, "group_l2")
    if name == "huber":  # dual points at the edge of the domain leave it where they are centred
        program = dataclasses.replace(program, y=scale * program.y)
    program = program.with_alpha(0.1 * program.alpha_max)
    optimum = solve(program, Auto(), tol=1e-6).certificate.primal
    moved = program.null_intercept + shift * scale * torch.tensor([1.0, -0.3])
    found = certify(on_disk(program), torch.zeros(program.coef_shape), moved)
    theta, slack = found.dual_point, 1e-12 * program.null_value
    assert float(program.dual(theta)) == found.dual
    assert -slack <= found.dual <= optimum + slack
    norms = program.penalty.group_dual_norms(program.weighted_adjoint(theta)).amax(0)
    assert float(norms.max()) <= program.alpha * (1 + 1e-10)
    if name == "huber":
        torch.testing.assert_close(norms, torch.full_like(norms, program.alpha))  # that far from zero as is feasible
    assert float((program.weight @ theta).abs().max()) <= 1e-12 * float(theta.abs().max())


@pytest.mark.parametrize("output", [0, 1])
def test_one_intercept_far_off_leaves_a_certificate_of_one_read_its_digits(output):
    program = program_of("squared", "group_l2")
    program = program.with_alpha(0.1 * program.alpha_max)
    moved = program.null_intercept + 1e9 * torch.eye(2).double()[output]
    theta = certify(on_disk(program), torch.zeros(program.coef_shape), moved).dual_point
    norms = program.penalty.group_dual_norms(program.weighted_adjoint(theta))
    assert float(norms.max()) <= program.alpha * (1 + 1e-10)

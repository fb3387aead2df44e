"""The search for weightings: what its ascent raises, and how it sees some of the samples."""

import numpy as np
import pytest
import torch
from probe_cases import ragged_samples
from sklearn.base import BaseEstimator

from convexformer.nn import GateWeights, QueryWeights, TokenPooler
from convexformer.preprocessing.checking import check_sequences
from convexformer.preprocessing.pooling import pooled, query_temperature
from convexformer.preprocessing.sequences import PoolingConfig
from convexformer.probes import generate
from convexformer.probes.generate import DualPoint, Generation, find_weightings
from convexformer.programs.build import build_program
from convexformer.solvers import get_loss, get_penalty

N = 60


def dual_point(*, unit=1.0, shift=0.0, n_outputs=2, scaled=False):
    samples = check_sequences(BaseEstimator(), [unit * (part + shift) for part in ragged_samples(N)], reset=True)
    values = torch.as_tensor(np.random.default_rng(1).normal(size=(N, n_outputs))) / N
    return DualPoint(samples, values, torch.full((N,), 1 / N).double(), get_penalty("nuclear"), 1e-3 * unit, scaled)


def search(point, kind, **options):
    return find_weightings(point, kind, Generation(**options), 4, np.random.RandomState(0))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("kind", "unit"), [("queries", 1.0), ("gates", 1.0), ("gates", 2.0**-12), ("gates", 2.0**12)])
def test_the_ascent_raises_the_dual_norm(kind, unit, scaled):
    point = dual_point(unit=unit, scaled=scaled)
    stays = search(point, kind, step_lengths=(1e-12, 1e-12))
    assert search(point, kind).violation > 1.05 * stays.violation


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shift", [1e2, 1e4])
def test_the_ascent_of_gates_goes_by_the_spread_of_tokens_that_are_far_from_zero(shift, scaled):
    point = dual_point(shift=shift, scaled=scaled)
    stays = search(point, "gates", step_lengths=(1e-12, 1e-12))
    assert search(point, "gates").violation > 1.05 * stays.violation > 0


@pytest.mark.parametrize("kind", ["queries", "gates"])
def test_units_of_targets_change_nothing_that_is_found(kind):
    point, unit = dual_point(), 2.0**-60
    small = point._replace(values=unit * point.values, alpha=unit * point.alpha)
    found, expected = (search(each, kind) for each in (small, point))
    assert found.violation == pytest.approx(expected.violation, rel=1e-9)
    torch.testing.assert_close(found.weights.state_dict(), expected.weights.state_dict())


def test_samples_that_are_drawn_by_their_dual_values_count_by_one_over_their_odds():
    point = dual_point(n_outputs=1)
    some = torch.arange(N)[:, None] % 2  # others are not drawn
    point = point._replace(values=point.values.abs() * some)
    batch = generate._batch(point, Generation(n_samples=20), np.random.RandomState(0))
    torch.testing.assert_close(batch.values, point.values.sum().expand(20, 1) / 20)
    assert batch.weight.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("scaled", [False, True])
def test_all_samples_together_give_the_norms_that_judge(scaled):
    point = dual_point(shift=1.0, scaled=scaled)
    part = QueryWeights(np.random.default_rng(2).normal(size=(5, 4)), 1.0)
    sums, factors = generate._correlations(part, point)
    batch = generate._batch(point, Generation(), np.random.RandomState(0))
    norms = generate._norms_of(batch, point, part(batch.tokens, batch.mask))
    torch.testing.assert_close(norms, generate.largest_dual_norms(point.penalty, sums * factors[:, None, None]))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["queries", "gates"])
def test_what_is_found_violates_by_more_than_the_tolerance_and_is_not_alike(kind, scaled):
    point = dual_point(scaled=scaled)
    between = 0.01
    for similarity in (0.95, 0.5):
        for tol in (0.01, between):
            found = search(point, kind, tol=tol, similarity=similarity)
            sums, factors = generate._correlations(found.weights, point)
            excess = generate.largest_dual_norms(point.penalty, sums * factors[:, None, None]) / point.alpha - 1
            assert found.violation == pytest.approx(float(excess[0]), rel=1e-6)
            assert excess.tolist() == sorted(excess.tolist(), reverse=True)
            assert bool((excess > tol).all())
            units = torch.nn.functional.normalize(sums.flatten(1))
            assert bool(((units @ units.T).triu(1) <= similarity + 1e-9).all())
            between = float(excess[0] + excess[-1]) / 2
    assert search(point, kind, tol=1.01 * found.violation).weights is None


@pytest.mark.parametrize("name", ["tol", "temperature", "radius"])
def test_integers_that_torch_does_not_have_are_read_as_floats(name):
    with pytest.raises(ValueError, match=rf"^{name} must be a positive finite number, got 1000"):
        Generation(**{name: 10**400})
    found, expected = (search(dual_point(), "queries", **{name: size}) for size in (10**30, 1e30))
    assert found.violation == expected.violation


@pytest.mark.parametrize("name", ["step_lengths", "widths"])
def test_pairs_of_integers_that_numpy_does_not_have_are_read_as_floats(name):
    found, expected = (search(dual_point(), "gates", **{name: (size, 1)}) for size in (10**30, 1e30))
    assert found.violation == expected.violation


def test_queries_stay_in_their_ball_and_reach_its_rim():
    point = dual_point()
    for radius in (0.1, 3.0):
        queries = search(point, "queries", radius=radius, temperature=0.7).weights
        lengths = queries.queries.norm(dim=1)
        assert lengths.max().item() == pytest.approx(radius, rel=1e-6)
        assert queries.temperature == 0.7
    longest = max(float(torch.as_tensor(part).norm(dim=1).max()) for part in ragged_samples(N))
    assert search(point, "queries").weights.queries.norm(dim=1).max().item() <= longest * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["queries", "gates"])
def test_where_tokens_or_dual_values_are_zero_nothing_is_violated(kind):
    for point in (dual_point(unit=0.0), dual_point(unit=0.0, scaled=True), dual_point()):
        found = search(point._replace(values=0 * point.values, alpha=1.0), kind, n_samples=20)
        assert found.weights is None
        assert found.violation == -1.0


@pytest.mark.parametrize("scaled", [False, True])
def test_queries_ascend_the_norms_that_judge_them(monkeypatch, scaled):
    point, seen = dual_point(scaled=scaled), []
    monkeypatch.setattr(generate, "_ascend", lambda start, norms, *_: seen.append(norms(0, *start)) or start)
    part = generate._ascended_queries(point, Generation(temperature=0.7, radius=2.0), np.random.RandomState(0))
    sums, factors = generate._correlations(part, point)
    torch.testing.assert_close(seen[0], generate.largest_dual_norms(point.penalty, sums * factors[:, None, None]))


def weighted(point, weight):
    """The point with weights of samples, whose dual values are the same."""
    weight = torch.as_tensor(weight).double()
    share = weight / weight.sum()
    return point._replace(sample_weight=share, values=share[:, None] * N * point.values)


def repeated(point, counts):
    """The point with samples repeated."""
    index = torch.as_tensor(np.repeat(np.arange(N), counts))
    return point._replace(
        samples=point.samples.rows(index),
        values=N * point.values[index] / len(index),
        sample_weight=torch.full((len(index),), 1 / len(index)).double(),
    )


@pytest.mark.parametrize("scaled", [False, True])
def test_weights_of_samples_are_repetitions_of_them(scaled):
    point, counts = dual_point(scaled=scaled), np.arange(N) % 3
    both = weighted(point, counts), repeated(point, counts)
    part = QueryWeights(np.random.default_rng(2).normal(size=(5, 4)), 1.0)
    torch.testing.assert_close(*(generate._correlations(part, each) for each in both))
    starts = [generate._starts(each, 9, np.random.RandomState(0)) for each in both]
    torch.testing.assert_close(*starts)
    assert not torch.equal(starts[0], generate._starts(both[1], 9, np.random.RandomState(1)))


def test_samples_without_weight_may_be_of_any_size_and_are_not_drawn():
    point, weight = dual_point(scaled=True), np.ones(N)
    weight[:50] = 0
    far = [part * (3e307 if number < 50 else 1) for number, part in enumerate(ragged_samples(N))]
    spoiled = point._replace(samples=check_sequences(BaseEstimator(), far, reset=True))
    part = QueryWeights(np.random.default_rng(2).normal(size=(5, 4)), 1.0)
    torch.testing.assert_close(*(generate._correlations(part, weighted(each, weight)) for each in (spoiled, point)))
    for n_samples in (N, 10, 5):  # all that count, and some of them
        batch = generate._batch(weighted(spoiled, weight), Generation(n_samples=n_samples), np.random.RandomState(0))
        assert batch.tokens.abs().max() < 100
        assert len(batch.weight) == min(n_samples, 10)


def test_sums_over_samples_are_the_same_where_they_are_read_one_at_a_time(monkeypatch):
    samples, weight = ragged_samples(N), np.arange(N) % 3 + 1.0
    weight[20:30] = 0
    far = [part if own else np.full_like(part, 1e308) for part, own in zip(samples, weight, strict=True)]
    point = weighted(dual_point(scaled=True), weight)
    part = QueryWeights(np.random.default_rng(2).normal(size=(5, 4)), 1.0)
    monkeypatch.setattr("convexformer.preprocessing.sequences.CONFIG", PoolingConfig(temporary=1))
    found, expected = (
        generate._correlations(part, point._replace(samples=each.mapped(lambda tokens: 10 * tokens)))
        for each in (check_sequences(BaseEstimator(), far, reset=True), point.samples)
    )
    monkeypatch.undo()
    torch.testing.assert_close(found, expected)
    whole = generate._correlations(part, point._replace(samples=point.samples.mapped(lambda tokens: 10 * tokens)))
    torch.testing.assert_close(expected, whole)


def test_drawn_samples_weigh_by_their_weights_over_their_odds():
    point, weight = dual_point(n_outputs=1), torch.arange(N)[:, None] % 2 + 1.0
    point = weighted(point._replace(values=3 / weight / N / N), weight[:, 0])  # of odds that are all equal
    odds = torch.where(torch.arange(N)[:, None] < N // 2, 1.0, 4.0)
    point = point._replace(values=point.values * odds)
    batch = generate._batch(point, Generation(n_samples=59), np.random.RandomState(0))
    ratios = batch.weight / batch.weight.max()
    assert set(ratios.round(decimals=6).tolist()) == {1.0, 0.5, 0.25, 0.125}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["queries", "gates"])
def test_as_many_are_found_as_are_wanted_with_their_factors(kind, scaled):
    point = dual_point(scaled=scaled)
    found = search(point, kind, similarity=1.0)
    assert found.weights.n_weightings == 4
    factors = generate._correlations(found.weights, point)[1]
    assert found.factors is None if not scaled else torch.allclose(found.factors, factors)
    none = search(point._replace(alpha=1e3), kind)
    assert none.weights is None
    assert 1e3 * (none.violation + 1) == pytest.approx(point.alpha * (found.violation + 1), rel=1e-9)


def test_the_point_of_a_program_gives_the_sums_that_its_dual_norms_are_of():
    samples, theta = dual_point().samples, torch.as_tensor(np.random.default_rng(3).normal(size=(N, 2)))
    part = QueryWeights(np.random.default_rng(2).normal(size=(5, 4)), 1.0)
    pooler, parts = TokenPooler([part]), (get_loss("squared"), get_penalty("nuclear"))
    program = build_program(
        pooled(pooler, samples), torch.ones_like(theta), *parts, 0.1, torch.arange(N).double(), False
    )
    point = DualPoint.of(program, theta, pooler, samples)
    torch.testing.assert_close(generate._correlations(part, point)[0], program.weighted_adjoint(theta).reshape(5, 4, 2))
    assert (point.alpha, point.scaled) == (0.1, False)


def test_sums_and_variances_of_pooled_tokens_and_their_slopes_are_those_of_their_definition():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights, tokens, values = draw(7, 3, 4).requires_grad_(), 5 + draw(7, 4, 2), draw(7, 2)
    share = torch.softmax(draw(7), 0)
    sums, variances = generate._PooledMoments.apply(weights, tokens, values, share)
    deviations = weights @ tokens - torch.einsum("i,ihd->hd", share, weights @ tokens)
    torch.testing.assert_close(sums, torch.einsum("ihd,ic->hdc", weights @ tokens, values))
    torch.testing.assert_close(variances, torch.einsum("i,ihd->h", share, deviations.square()) / 2)
    assert torch.autograd.gradcheck(generate._PooledMoments.apply, (weights, tokens, values, share))


def test_points_of_scaled_tokens_are_scaled():
    samples, theta = dual_point().samples, torch.zeros(N, 1, dtype=torch.float64)
    part = QueryWeights(np.random.default_rng(2).normal(size=(5, 4)), 1.0)
    for factors in (None, torch.ones(5).double()):
        pooler = TokenPooler([part], factors=factors)
        program = build_program(
            pooled(pooler, samples), theta, get_loss("squared"), get_penalty("nuclear"), 0.1, None, False
        )
        assert DualPoint.of(program, theta, pooler, samples).scaled == (factors is not None)


def test_sums_of_samples_in_single_precision_are_in_double():
    token = torch.tensor([[1.0, 3.0]])
    samples = check_sequences(BaseEstimator(), [token] * 3, reset=True)
    values = torch.tensor([[2.0**30], [1.0], [-(2.0**30)]], dtype=torch.float64)
    point = dual_point()._replace(samples=samples, values=values, sample_weight=torch.full((3,), 1 / 3).double())
    sums, _ = generate._correlations(QueryWeights(np.ones((1, 2), dtype=np.float32), 1.0), point)
    assert sums.flatten().tolist() == [1.0, 3.0]


def test_as_many_samples_as_the_ascent_may_see_are_seen_once_each():
    point = dual_point()
    batch = generate._batch(point, Generation(n_samples=N), np.random.RandomState(0))
    torch.testing.assert_close(batch.values, point.values)


def test_weightings_of_opposite_correlations_are_not_alike():
    sums = torch.tensor([1.0, 1.0, -1.0]).double()[:, None, None].expand(3, 2, 1)
    assert generate._most_violating(sums, torch.tensor([3.0, 2.0, 1.0]), Generation(), 3) == [0, 2]
    assert generate._most_violating(sums, torch.tensor([3.0, 2.0, 1.0]), Generation(tol=10**30), 3) == []


@pytest.fixture
def ends_alone(monkeypatch):
    """Starts do not count beside the ends of their ascents."""
    monkeypatch.setattr(generate, "_best", lambda candidates, norms: candidates[0])


@pytest.mark.usefixtures("ends_alone")
@pytest.mark.parametrize("kind", ["queries", "gates"])
def test_the_search_starts_at_tokens(kind):
    ascended = {"queries": generate._ascended_queries, "gates": generate._ascended_gates}[kind]
    found = ascended(dual_point(shift=1.0), Generation(step_lengths=(1e-12, 1e-12)), np.random.RandomState(0))
    tokens = torch.as_tensor(np.concatenate([part + 1.0 for part in ragged_samples(N)]))
    if kind == "queries":  # none is shortened, as no token is longer than the default radius
        distances = (found.queries[:, None] - tokens).norm(dim=2)
    else:  # planes through tokens, in all directions
        distances = (found.directions @ tokens.T - found.thresholds[:, None]).abs()
        torch.testing.assert_close(found.directions.norm(dim=1), torch.ones(32).double())
        assert bool((found.directions.amin(0) < 0).all() and (found.directions.amax(0) > 0).all())
    assert distances.amin(1).max().item() < 1e-9


def test_the_default_temperature_of_queries_is_that_of_their_width():
    assert search(dual_point(), "queries").weights.temperature == query_temperature(4)


@pytest.mark.usefixtures("ends_alone")
@pytest.mark.parametrize("width", [1.0, 1e-9])
def test_gates_ascend_the_norms_of_sigmoids_whose_width_is_in_units_of_the_spread_of_tokens(monkeypatch, width):
    def noted(start, norms, limit, config):
        found = (start + torch.tensor([0.0, 0.0, 0.0, 0.0, 1e-3]),)  # off the tokens that planes go through
        seen.append(norms(config.n_steps - 1, *found))
        return found

    point, seen = dual_point(shift=1.0, unit=3.0), []
    monkeypatch.setattr(generate, "_ascend", lambda start, *rest: noted(start[0], *rest))
    part = generate._ascended_gates(point, Generation(widths=(0.5, width)), np.random.RandomState(0))
    tokens = [3 * torch.as_tensor(sample + 1.0) for sample in ragged_samples(N)]
    mean = torch.stack([sample.mean(0) for sample in tokens]).mean(0)
    spread = torch.stack([(sample - mean).square().mean() for sample in tokens]).mean().sqrt()
    pooled_tokens = [
        torch.sigmoid((part.directions @ sample.T - part.thresholds[:, None]) / (width * spread)) @ sample / len(sample)
        for sample in tokens
    ]
    sums = torch.einsum("ihd,ic->hdc", torch.stack(pooled_tokens), point.values)
    torch.testing.assert_close(seen[0], torch.linalg.matrix_norm(sums, 2))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["queries", "gates"])
def test_weights_of_samples_are_repetitions_in_the_ascent(kind, scaled):
    point, counts = dual_point(shift=1.0, scaled=scaled), np.arange(N) % 3
    found, expected = (search(each, kind, n_steps=5) for each in (weighted(point, counts), repeated(point, counts)))
    assert found.violation == pytest.approx(expected.violation, rel=1e-6)
    torch.testing.assert_close(found.weights.state_dict(), expected.weights.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "norm"), [("nuclear", 2), ("group_l2", None)])
def test_norms_of_several_outputs_are_those_of_the_penalty(name, norm):
    sums = torch.as_tensor(np.random.default_rng(0).normal(size=(5, 4, 3)))
    found = generate.largest_dual_norms(get_penalty(name), sums)
    largest = torch.linalg.vector_norm(sums, dim=1).amax(1) if norm is None else torch.linalg.matrix_norm(sums, norm)
    torch.testing.assert_close(found, largest)


def few_samples(seed, scaled):
    rng = np.random.default_rng(seed)
    samples = check_sequences(BaseEstimator(), list(rng.normal(size=(5, 3, 2))), reset=True)
    values, share = torch.as_tensor(rng.normal(size=(5, 2))), torch.full((5,), 0.2).double()
    return DualPoint(samples, values - values.mean(0), share, get_penalty("nuclear"), 1e-3, scaled)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("kind", "options"), [("gates", {}), ("queries", {"temperature": 0.02})])
@pytest.mark.parametrize("seed", [1, 2, 13, 16, 18])
def test_a_search_finds_no_less_than_where_it_begins(kind, options, seed, scaled):
    point = few_samples(seed, scaled)
    stays = search(point, kind, step_lengths=(1e-12, 1e-12), **options)
    assert search(point, kind, **options).violation >= stays.violation * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_gates_of_starts_are_as_good_as_those_on_either_side_of_their_tokens_and_leave_the_tokens(monkeypatch, seed):
    point, starts = few_samples(seed, scaled=False), []

    def far(start, *rest):
        starts.append(start[0])
        return (start[0] + torch.tensor([0.0, 0.0, 1e3]),)  # gates that let no token through

    monkeypatch.setattr(generate, "_ascend", far)
    part = generate._ascended_gates(point, Generation(), np.random.RandomState(0))
    tokens = point.samples.padded(slice(0, 5))[0].flatten(0, 1)
    unit = (tokens - tokens.mean(0)).square().mean().sqrt()
    through = unit * starts[0][:, -1] + part.directions @ tokens.mean(0)
    norms = [
        generate.largest_dual_norms(
            point.penalty, generate._correlations(GateWeights(part.directions, thresholds), point)[0]
        )
        for thresholds in (part.thresholds, through - 1e-9, through + 1e-9)
    ]
    torch.testing.assert_close(norms[0], torch.maximum(*norms[1:]))
    sides = tokens @ part.directions.mT - part.thresholds
    above, below = sides.where(sides > 0, torch.inf).amin(0), (-sides).where(sides < 0, torch.inf).amin(0)
    distances = torch.minimum(above, below)
    assert bool(torch.isclose(torch.maximum(above, below), distances).logical_or(distances >= 0.499 * unit).all())
    assert distances.min().item() > 1e-6

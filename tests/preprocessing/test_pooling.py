"""Poolings: their weightings by numpy, invariances, composition and scikit-learn's contract."""

import numpy as np
import pytest
import torch
from probe_cases import forms, padded, ragged_samples
from scipy.special import softmax
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from convexformer import ConvexProbeRegressor
from convexformer.nn import MaxWeights, MeanWeights, TokenPooler
from convexformer.preprocessing import (
    MaxPooling,
    MeanPooling,
    PoolingUnion,
    PrototypePooling,
    QueryPooling,
    RelativePositions,
    TokenGates,
    TokenStandardizer,
)
from convexformer.preprocessing.checking import check_sequences
from convexformer.preprocessing.dictionary import factors_of
from convexformer.preprocessing.moments import Moments
from convexformer.preprocessing.pooled import pooled_map
from convexformer.preprocessing.pooling import pooled
from convexformer.preprocessing.sequences import CONFIG
from convexformer.programs.temporary_file import StoredMap
from convexformer.solvers import DenseMap

SAMPLES = ragged_samples()
POOLINGS = [
    MeanPooling(),
    MaxPooling(),
    TokenGates(6, random_state=0),
    TokenGates(6, source="pairs", random_state=0),
    QueryPooling(6, random_state=0),
    QueryPooling(6, source="prototypes", random_state=0),
    QueryPooling(6, source="random", random_state=0),
    PrototypePooling(6, random_state=0),
]


def expected_tokens(pooling, sample):
    """Pooled tokens (h, d) of one sample by numpy."""
    return sample.max(0)[None] if isinstance(pooling, MaxPooling) else weightings(pooling, sample) @ sample


def weightings(pooling, sample):
    """Weights (h, length) of one sample, written down again with numpy."""
    weights = pooling.weights_
    n = len(sample)
    if isinstance(pooling, MeanPooling):
        return np.full((1, n), 1 / n)
    if isinstance(pooling, TokenGates):
        sides = weights.directions.numpy() @ sample.T
        return (sides >= weights.thresholds.numpy()[:, None]) / n
    if isinstance(pooling, QueryPooling):
        return softmax(weights.queries.numpy() @ sample.T / weights.temperature, axis=1)
    distances = ((sample[None] - weights.centers.numpy()[:, None]) ** 2).sum(2)
    return softmax(-distances / (2 * weights.temperature), axis=0) / n


@parametrize_with_checks([*POOLINGS, PoolingUnion([MeanPooling()]), RelativePositions(), TokenStandardizer()])
def test_scikit_learn_contract(estimator, check):
    check(estimator)


@pytest.mark.parametrize("pooling", POOLINGS, ids=repr)
def test_pooled_tokens_are_weighted_sums(pooling):
    found = pooling.fit(SAMPLES).transform(SAMPLES)
    expected = np.stack([expected_tokens(pooling, sample) for sample in SAMPLES])
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_a_maximum_counts_once_and_its_weights_are_shares_of_features():
    sample = torch.tensor([[[3.0, 1.0, 0.0], [3.0, 2.0, -1.0], [9.0, 9.0, 9.0]]], dtype=torch.float64)
    mask, weights = torch.tensor([[True, True, False]]), MaxPooling().fit(SAMPLES).weights_
    torch.testing.assert_close(weights(sample, mask)[0, 0].tolist(), [2 / 3, 1 / 3, 0.0])
    pooler = TokenPooler([weights, MeanWeights()], factors=[2.0, 1.0])
    torch.testing.assert_close(pooler(sample, mask)[0].tolist(), [[6.0, 4.0, 0.0], [3.0, 1.5, -0.5]])
    below = torch.full((1, 3, 2), -5.0)
    torch.testing.assert_close(TokenPooler([weights])(below, mask)[0, 0].tolist(), [-5.0, -5.0])  # not that of padding


@pytest.mark.parametrize("pooling", POOLINGS, ids=repr)
def test_forms_order_of_tokens_and_padding_change_nothing(pooling):
    expected = pooling.fit(SAMPLES).transform(SAMPLES)
    for X in forms(SAMPLES).values():
        np.testing.assert_allclose(pooling.fit(X).transform(X), expected, atol=1e-12)
    array, lengths, _ = padded(SAMPLES)
    longer = np.concatenate([array, np.ones((len(array), 9, 4))], axis=1)
    np.testing.assert_allclose(pooling.transform((longer, lengths)), expected, atol=1e-12)
    rng = np.random.default_rng(5)
    shuffled = [sample[rng.permutation(len(sample))] for sample in SAMPLES]
    np.testing.assert_allclose(pooling.fit(shuffled).transform(shuffled), expected, atol=1e-12)


@pytest.mark.parametrize("pooling", [*POOLINGS, RelativePositions([0, 2])], ids=repr)
def test_small_chunks_give_the_same(pooling, monkeypatch):
    expected = pooling.fit(SAMPLES).transform(SAMPLES)
    monkeypatch.setattr("convexformer.preprocessing.sequences.CONFIG", type(CONFIG)(temporary=1))
    np.testing.assert_allclose(pooling.fit(SAMPLES).transform(SAMPLES), expected, atol=1e-12)


@pytest.mark.parametrize("pooling", [part for part in POOLINGS if hasattr(part, "random_state")], ids=repr)
def test_weights_of_samples_stand_for_repeats_and_those_of_weight_zero_do_not_count(pooling):
    weight = np.random.default_rng(0).integers(0, 3, size=len(SAMPLES))
    repeated = [sample for sample, count in zip(SAMPLES, weight, strict=True) for _ in range(count)]
    left = pooling.fit(SAMPLES, sample_weight=weight).transform(SAMPLES)
    np.testing.assert_allclose(pooling.fit(repeated).transform(SAMPLES), left, atol=1e-9)


def test_gates_between_pairs_have_a_token_on_either_side():
    tokens = np.concatenate(SAMPLES)
    gates = TokenGates(6, source="pairs", random_state=0).fit(SAMPLES).weights_
    sides = tokens @ gates.directions.numpy().T - gates.thresholds.numpy()
    # The plane is half-way between two tokens: some pair has opposite sides of equal size.
    for column in sides.T:
        order = np.sort(np.abs(column))
        assert np.diff(order).min() < 1e-9
    with pytest.raises(ValueError, match="at least two different tokens"):
        TokenGates(source="pairs").fit(np.ones((3, 2, 1)))


def test_random_gates_pass_through_the_mean():
    gates = TokenGates(5, random_state=1).fit(SAMPLES).weights_
    mean = np.concatenate(SAMPLES).mean(0)
    np.testing.assert_allclose(gates.directions.numpy() @ mean, gates.thresholds.numpy(), atol=1e-12)


def test_queries_are_different_tokens_of_the_samples():
    queries = QueryPooling(10_000, random_state=0).fit(SAMPLES).weights_.queries.numpy()
    assert sorted(queries.tolist()) == sorted(np.concatenate(SAMPLES).tolist())


def test_positions_count_from_start_end_and_mark():
    X = [np.array([[1.0, 0], [2.0, 1], [3.0, 0], [4.0, 0]]), np.array([[5.0, 1], [6.0, 0]])]
    first = RelativePositions([0, 3]).fit_transform(X)[:, :, 0]
    last = RelativePositions([0, -1, -3], "end").fit_transform(X)[:, :, 0]
    near = RelativePositions([-1, 0, 1], "marked", mark=1).fit_transform(X)[:, :, 0]
    np.testing.assert_array_equal(first, [[1, 4], [5, 0]])
    np.testing.assert_array_equal(last, [[4, 3, 1], [6, 5, 0]])
    np.testing.assert_array_equal(near, [[1, 2, 3], [0, 5, 6]])


def test_positions_are_those_of_real_tokens_where_padding_comes_first():
    array = np.array([[[9.0], [1.0], [2.0]]])
    mask = np.array([[False, True, True]])
    assert RelativePositions([0]).fit_transform((array, mask)).item() == 1.0
    assert RelativePositions([-1], "end").fit_transform((array, mask)).item() == 1.0


def test_union_joins_poolings():
    parts = [MeanPooling(), PoolingUnion([TokenGates(4, random_state=0)]), RelativePositions([0])]
    expected = np.concatenate([part.fit_transform(SAMPLES) for part in parts], axis=1)
    np.testing.assert_array_equal(PoolingUnion(parts).fit_transform(SAMPLES), expected)


def test_parts_of_a_union_draw_in_their_order_unless_they_have_numbers_of_their_own():
    stream = np.random.RandomState(3)
    expected = [
        part.set_params(random_state=state).fit_transform(SAMPLES)
        for part, state in ((TokenGates(4), stream), (TokenGates(4), 0), (QueryPooling(3), stream))
    ]
    union = PoolingUnion([TokenGates(4), TokenGates(4, random_state=0), QueryPooling(3)], random_state=3)
    np.testing.assert_array_equal(union.fit_transform(SAMPLES), np.concatenate(expected, axis=1))


@pytest.mark.parametrize("pooling", [PrototypePooling(5), QueryPooling(5, source="prototypes")], ids=repr)
def test_there_are_no_more_clusters_than_different_tokens(pooling):
    X = np.array([[[0.0, 1.0], [4.0, 5.0]], [[4.0, 5.0], [0.0, 1.0]]])
    assert pooling.fit_transform(X).shape == (2, 2, 2)


def test_distances_from_prototypes_are_in_units_of_twice_the_root_of_the_width():
    own, given = (
        PrototypePooling(6, temperature, random_state=0) for temperature in (None, 2 * SAMPLES[0].shape[1] ** 0.5)
    )
    np.testing.assert_array_equal(own.fit_transform(SAMPLES), given.fit_transform(SAMPLES))


def test_planes_between_tokens_in_single_precision_are_those_in_double():
    samples = [(100 + sample).astype(np.float32) for sample in SAMPLES]
    pooling = TokenGates(6, source="pairs", random_state=0)
    single, double = (pooling.fit([part.astype(kind) for part in samples]).weights_ for kind in (np.float32, float))
    np.testing.assert_array_equal(single.thresholds, double.thresholds)


def test_standardizer_is_that_of_all_tokens():
    tokens = np.concatenate(SAMPLES)
    weight = np.random.default_rng(0).integers(0, 4, size=len(SAMPLES))
    repeats = np.repeat(weight, [len(sample) for sample in SAMPLES])
    expected = StandardScaler().fit(tokens, sample_weight=repeats)
    found = TokenStandardizer().fit(SAMPLES, sample_weight=weight)
    np.testing.assert_allclose(found.mean_, expected.mean_, atol=1e-12)
    np.testing.assert_allclose(found.scale_, expected.scale_, atol=1e-12)
    for sample, out in zip(SAMPLES, found.transform(SAMPLES), strict=True):
        np.testing.assert_allclose(out, expected.transform(sample), atol=1e-12)


def test_standardized_tokens_are_an_array_where_all_samples_have_as_many():
    samples = [np.random.default_rng(0).normal(size=(length, 2)) for length in (3, 1, 3)]
    assert [len(sample) for sample in TokenStandardizer().fit_transform(samples)] == [3, 1, 3]
    assert TokenStandardizer().fit_transform(samples[::2]).shape == (2, 3, 2)


@pytest.mark.parametrize("n_parts", [1, 2, 7])
def test_moments_of_parts_are_those_of_all(n_parts):
    rng = np.random.default_rng(0)
    values, weight = rng.normal(3, 2, size=(50, 4)), rng.integers(1, 2**10, size=50) / 2**10
    values[:, 1] = 2.0**20  # constant; sums of such weights are exact, else scikit-learn's variance may be negative
    weight[:10] = 0  # a part may count nothing
    expected = StandardScaler().fit(values, sample_weight=weight)
    parts = zip(*(torch.as_tensor(array).tensor_split(n_parts) for array in (values, weight)), strict=True)
    found = Moments.joined(Moments.of(*part) for part in parts)
    assert found.total == pytest.approx(weight.sum())
    np.testing.assert_allclose(found.mean, expected.mean_, rtol=1e-12)
    np.testing.assert_allclose(found.square / found.total, expected.var_, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.scale, expected.scale_, rtol=1e-12)


def test_values_without_weight_may_be_of_any_size():
    values = torch.tensor([[1.0], [3.0], [torch.inf]], dtype=torch.float64)
    found, expected = Moments.of(values, torch.tensor([1.0, 1.0, 0.0])), Moments.of(values[:2])
    assert found == expected
    none, large = Moments.of(values, torch.zeros(3)), Moments.of(torch.full((3, 1), 1e200, dtype=torch.float64))
    for parts in ([none, large], [large, none]):
        assert Moments.joined(parts) == large


def test_values_that_are_equal_but_for_rounding_are_constant():
    is_first = np.random.default_rng(0).random((37, 5, 2)) < 0.5
    X = np.where(is_first, 0.1, np.nextafter(0.1, 1))
    np.testing.assert_array_equal(TokenStandardizer().fit(X).scale_, 1.0)
    pooled = torch.as_tensor(np.where(is_first, np.float32(0.1), np.nextafter(np.float32(0.1), np.float32(1))))
    torch.testing.assert_close(factors_of(Moments.of(pooled)), torch.ones(5, dtype=torch.float64), rtol=0, atol=0)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("n_parts", [1, 2])
def test_spreads_of_as_many_roundings_as_there_are_values_are_none(n_parts, size):
    eps, sign = np.finfo(float).eps, torch.arange(100).double()[:, None] % 2 * 2 - 1
    for spread, scale in ((80 * eps, 1.0), (300 * eps, 300 * eps)):
        parts = (1 + spread * sign).tensor_split(n_parts)
        found = Moments.joined(Moments.of(part, torch.full((len(part),), size)) for part in parts)
        assert found.scale.item() == pytest.approx(scale, rel=1e-2)


@pytest.mark.parametrize("size", [1e-15, 1.0, 1e15])
def test_weights_of_any_scale_find_the_same_constant_features(size):
    X = np.random.default_rng(0).normal(3, 2, size=(30, 2, 3))
    X[:, :, 1] = 0.1  # constant but for rounding
    found = TokenStandardizer().fit(X, sample_weight=np.full(len(X), size)).scale_
    np.testing.assert_allclose(found, StandardScaler().fit(X.reshape(-1, 3)).scale_, rtol=1e-12)


def test_features_that_are_zero_stay_zero():
    X = np.random.default_rng(0).normal(size=(5, 3, 2)) * [1.0, 0.0]
    standardizer = TokenStandardizer().fit(X)
    assert standardizer.scale_[1] == 1.0
    np.testing.assert_array_equal(standardizer.transform(X)[..., 1], 0.0)


@pytest.mark.parametrize("value", [0.1, 3.3, -7.7])
def test_features_that_are_constant_become_zero(value):
    X = np.full((37, 5, 2), value)
    np.testing.assert_array_equal(TokenStandardizer().fit_transform(X), 0.0)


def test_features_whose_squares_are_too_large_are_not_taken_for_constant_ones():
    with pytest.raises(ValueError, match="squares of X are too large"):
        TokenStandardizer().fit(1e200 * np.random.default_rng(0).normal(size=(5, 3, 2)))


@pytest.mark.parametrize("unit", [1e-170, 1e-200, 1e-300])
@pytest.mark.parametrize("estimator", [TokenStandardizer(), ConvexProbeRegressor()])
def test_features_whose_squares_are_too_small_are_not_taken_for_constant_ones(unit, estimator):
    X = unit * np.random.default_rng(0).normal(size=(5, 3, 2))
    with pytest.raises(ValueError, match="squares of X are too small"):
        estimator.fit(X, np.arange(5.0))


@pytest.mark.parametrize("value", [0.0, 1e-200, 5e-324, 1.0, 1e200])
def test_samples_that_are_all_equal_stay_allowed_in_every_unit(value):
    X = np.full((5, 3, 2), value)
    np.testing.assert_array_equal(TokenStandardizer().fit_transform(X), 0.0)
    X[4] = 7.0  # which does not count
    np.testing.assert_array_equal(TokenStandardizer().fit(X, sample_weight=[1, 1, 1, 1, 0]).transform(X[:4]), 0.0)


@pytest.mark.parametrize("unit", [0.0, 1e-200])
def test_features_without_squares_beside_one_that_varies_become_zero_but_for_rounding(unit):
    X = np.random.default_rng(0).normal(size=(5, 3, 2)) * [unit, 1.0]
    standardizer = TokenStandardizer().fit(X)
    assert standardizer.scale_ == pytest.approx([1.0, X[..., 1].std()])
    np.testing.assert_allclose(standardizer.transform(X)[..., 0], 0.0, atol=1e-190)


@pytest.mark.parametrize("transformer", [MeanPooling(), TokenStandardizer()])
def test_a_first_fit_that_fails_leaves_a_transformer_that_is_not_fitted(transformer):
    X = np.ones((5, 3, 2))
    with pytest.raises(ValueError, match="sample_weight"):
        transformer.fit(X, sample_weight=[1.0])
    with pytest.raises(NotFittedError):
        transformer.transform(X)


def test_standardizer_goes_before_a_pooling_in_a_pipeline():
    X = np.random.default_rng(0).normal(3, 2, size=(20, 5, 3))
    pooled = make_pipeline(TokenStandardizer(), MeanPooling()).fit_transform(X)
    flat = StandardScaler().fit_transform(X.reshape(-1, 3)).reshape(X.shape)
    np.testing.assert_allclose(pooled[:, 0], flat.mean(1), atol=1e-12)


def test_results_keep_the_precision_and_half_gives_single():
    X = np.random.default_rng(0).normal(size=(5, 3, 2))
    for given, kept in ((np.float16, np.float32), (np.float32, np.float32), (np.float64, np.float64)):
        assert MeanPooling().fit_transform(X.astype(given)).dtype == kept
    assert isinstance(MeanPooling().fit_transform(torch.as_tensor(X)), np.ndarray)


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        (PoolingUnion([]), "parts must be a list of poolings"),
        (PoolingUnion(["mean"]), "parts must be a list of poolings"),
        (PoolingUnion([MeanPooling(), "mean"]), "parts must be a list of poolings"),
        (TokenGates(0), "n_gates"),
        (TokenGates(source="other"), "source must be 'random' or 'pairs'"),
        (QueryPooling(0), "n_queries"),
        (QueryPooling(source="other"), "source must be 'tokens', 'prototypes' or 'random'"),
        (QueryPooling(temperature=0.0), "temperature must be a positive"),
        (PrototypePooling(0), "n_prototypes"),
        (PrototypePooling(temperature=-1.0), "temperature must be a positive"),
        (RelativePositions([]), "offsets must be a sequence of integers"),
        (RelativePositions([0.5]), "offsets must be a sequence of integers"),
        (RelativePositions(3), "offsets must be a sequence of integers"),
        (RelativePositions([0, 10**30]), "offsets must lie between"),
        (RelativePositions(None), "offsets must be a sequence of integers"),
        (RelativePositions(origin="middle"), "origin must be one of"),
        (RelativePositions(origin="marked"), "mark must be the position of a feature"),
        (RelativePositions(mark=1), "mark must be the position of a feature"),
        (RelativePositions(mark=0.5), "mark must be the position of a feature"),
        (RelativePositions(mark="first"), "mark must be the position of a feature"),
        (RelativePositions(origin="marked", mark=4), "mark must be below the 4 features"),
    ],
)
def test_wrong_parameters_are_named(pooling, message):
    with pytest.raises(ValueError, match=message):
        pooling.fit(SAMPLES)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_pooled_tokens_of_as_many_bytes_as_the_limit_are_in_memory_and_of_more_in_a_file(dtype):
    samples = check_sequences(BaseEstimator(), [sample.astype(dtype) for sample in SAMPLES], reset=True)
    pooler = TokenPooler([MeanWeights(), MaxWeights()])
    expected = pooled(pooler, samples)
    for limit, kind in ((expected.nbytes, DenseMap), (expected.nbytes - 1, StoredMap)):
        found = pooled_map(samples, pooler, limit)
        assert type(found) is kind
        torch.testing.assert_close(found.data[:], expected, rtol=0, atol=0)


def test_factors_give_the_pooled_tokens_of_each_weighting_variance_one():
    weight = np.random.default_rng(0).uniform(0.5, 2, size=len(SAMPLES))
    tokens = PoolingUnion([MeanPooling(), QueryPooling(3), TokenGates(3)], random_state=0).fit_transform(SAMPLES)
    factors = factors_of(Moments.of(torch.as_tensor(tokens), torch.as_tensor(weight))).numpy()
    scaled = factors[:, None] * tokens
    variance = np.average((scaled - np.average(scaled, axis=0, weights=weight)) ** 2, axis=0, weights=weight)
    np.testing.assert_allclose(variance.mean(1), 1.0, rtol=1e-9)

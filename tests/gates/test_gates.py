"""Gates: masks by formula, sources, what is kept on a training set, and what the gated program reduces to."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convexformer import (
    ConvexAttention,
    ConvexAttentionClassifier,
    ConvexAttentionRegressor,
    Gates,
    GaussianGates,
    GivenGates,
    SparseGates,
)
from convexformer.gates import GATE_SOURCES, GateSource, TrainingData, get_gate_source

PROPERTY = settings(deadline=None, derandomize=True, max_examples=30, database=None)


def masks_by_formula(gates, X):
    return np.array([[u1 @ x @ u2 >= 0 for u1, u2 in zip(gates.u1, gates.u2, strict=True)] for x in X])


def draw(source, n=5, d=3, seed=0):
    return source.make(TrainingData(torch.zeros(1, n, d)), np.random.RandomState(seed))


@PROPERTY
@given(seed=st.integers(0, 10_000), n=st.integers(1, 5), d=st.integers(1, 4), h=st.integers(1, 6))
def test_masks_are_the_formula(seed, n, d, h):
    rng = np.random.default_rng(seed)
    gates = Gates(rng.normal(size=(h, n)), rng.normal(size=(h, d)))
    X = rng.normal(size=(20, n, d))
    masks = gates.masks(torch.as_tensor(X))
    assert masks.dtype == torch.bool
    np.testing.assert_array_equal(masks.numpy(), masks_by_formula(gates, X))


def test_a_sample_on_the_boundary_passes():
    gates = Gates([[1.0, -1.0]], [[1.0]])
    assert gates.masks(torch.zeros(1, 2, 1)).item()
    assert gates.masks(torch.ones(1, 2, 1)).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_of_samples_that_require_gradients_have_none(dtype):
    tokens = torch.ones(2, 5, 3, dtype=dtype, requires_grad=True)
    masks = draw(GaussianGates(4)).masks(tokens)
    assert not masks.requires_grad
    assert torch.equal(masks, draw(GaussianGates(4)).masks(tokens.detach()))


def test_masks_of_single_precision_data_are_formed_in_double_precision():
    # In float32 the product rounds to exactly zero, which would open a gate that is closed.
    gates = Gates([[1.0, -1.0 - 1e-9]], [[1.0]])
    assert not gates.masks(torch.ones(1, 2, 1, dtype=torch.float32)).item()


def test_scale_of_the_directions_does_not_matter():
    gates = draw(GaussianGates(20))
    X = torch.as_tensor(np.random.default_rng(0).normal(size=(30, 5, 3)))
    scaled = Gates(1e3 * gates.u1, 1e-3 * gates.u2)
    assert torch.equal(gates.masks(X), scaled.masks(X))


# Sources


@pytest.mark.parametrize("source", [GaussianGates(40), SparseGates(40), SparseGates(40, n_nonzero=1)])
def test_sources_draw_from_the_random_state_alone(source):
    first, same, other = draw(source), draw(source), draw(source, seed=1)
    np.testing.assert_array_equal(first.u1, same.u1)
    np.testing.assert_array_equal(first.u2, same.u2)
    assert not np.array_equal(first.u1, other.u1)
    assert (first.u1.shape, first.u2.shape, len(first)) == ((40, 5), (40, 3), 40)


def test_gaussian_gates_are_standard_normal_and_not_in_the_simplex():
    gates = draw(GaussianGates(4000))
    for directions in (gates.u1, gates.u2):
        # Within five standard errors.
        assert abs(directions.mean()) < 5 / np.sqrt(directions.size)
        assert abs(directions.var() - 1) < 5 * np.sqrt(2 / directions.size)
    assert (gates.u1 < 0).any()


@pytest.mark.parametrize("n_nonzero", [1, 2, 4])
def test_sparse_gates_have_few_nonzeros_and_use_every_coordinate(n_nonzero):
    gates = draw(SparseGates(300, n_nonzero))
    for directions, width in ((gates.u1, 5), (gates.u2, 3)):
        assert ((directions != 0).sum(1) == min(n_nonzero, width)).all()
        assert (directions != 0).any(axis=0).all()


def test_names_arrays_gates_and_sources_all_name_a_source():
    u1, u2 = np.ones((2, 3)), np.ones((2, 4))
    assert {name: type(get_gate_source(name, 5)) for name in GATE_SOURCES} == GATE_SOURCES
    assert get_gate_source("sparse", np.int64(5)) == SparseGates(5)
    for given_gates in ((u1, u2), [u1.tolist(), u2.tolist()], Gates(u1, u2), GivenGates(Gates(u1, u2))):
        gates = draw(get_gate_source(given_gates, 99), 3, 4)
        np.testing.assert_array_equal(gates.u1, u1)
        np.testing.assert_array_equal(gates.u2, u2)


@pytest.mark.parametrize("wrong", ["relu", None, 3, (1, 2, 3), {"u1": 1}])
def test_other_gates_are_an_error_that_names_them(wrong):
    with pytest.raises(
        ValueError, match=r"gates must be one of \['difference', 'fourier', 'gaussian', 'generated', 'sparse'\]"
    ):
        get_gate_source(wrong, 8)


@pytest.mark.parametrize("wrong", [0, -3, 2.5, "8", True, None])
def test_number_of_gates_is_a_positive_integer(wrong):
    with pytest.raises(ValueError, match="n_gates must be a positive integer"):
        get_gate_source("gaussian", wrong)


@pytest.mark.parametrize("source", [GaussianGates, SparseGates])
@pytest.mark.parametrize("wrong", [0, -3])
def test_sources_themselves_refuse_no_gates(source, wrong):
    with pytest.raises(ValueError, match="gates"):
        draw(source(wrong))


@pytest.mark.parametrize(
    ("u1", "u2", "message"),
    [
        ([1.0, 2.0], [[1.0]], "gates: u1 must be a finite array"),
        ([[1.0]], [[np.inf]], "gates: u2 must be a finite array .* with NaN or infinite values"),
        (np.zeros((0, 3)), np.zeros((0, 3)), "gates: u1"),
        (np.ones((2, 3)), np.ones((3, 3)), "gates: u1 and u2 must have equal length, got 2 and 3"),
        ([[1.0, 2.0], [3.0]], [[1.0], [1.0]], "gates: u1 must be an array of numbers"),
        (np.ma.masked_equal([[1.0, 2.0]], 2.0), [[1.0]], "gates: u1 must have no masked values"),
        ([[1.0]], [[1.0j]], "gates: u2 must hold real numbers"),
        ([[1.0]], np.array([["2020-01-01"]], "M8[D]"), "gates: u2 must hold numbers, got datetime64"),
    ],
)
def test_directions_of_other_shapes_are_an_error(u1, u2, message):
    with pytest.raises(ValueError, match=message):
        Gates(u1, u2)


@pytest.mark.parametrize("change", [torch.Tensor.bfloat16, torch.Tensor.requires_grad_])
def test_directions_may_be_any_tensors(change):
    directions = change(torch.ones(2, 3))
    gates = Gates(directions, directions)
    with torch.no_grad():
        directions.zero_()
    np.testing.assert_array_equal(gates.u1, np.ones((2, 3)))


def test_given_gates_are_gates():
    with pytest.raises(TypeError, match=r"gates must be a Gates, as Gates\(u1, u2\) makes one"):
        GivenGates((np.ones((4, 2)), np.ones((4, 3))))


def test_given_gates_must_fit_the_data(make_problem):
    X, y = make_problem()
    model = ConvexAttentionRegressor(activation="gated_relu", gates=(np.ones((4, 2)), np.ones((4, 3))))
    with pytest.raises(ValueError, match=r"gates: .*\(n_tokens, n_features\) = \(3, 2\), got \(2, 3\)"):
        model.fit(X, y)


def test_gates_cannot_be_changed_by_accident():
    gates = draw(GaussianGates(3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        gates.u1 = np.zeros((3, 5))
    directions = np.ones((2, 4))
    gates = Gates(directions, directions)
    directions[:] = -1
    assert (gates.u1 == 1).all()
    assert (gates.u2 == 1).all()


# What is kept


@PROPERTY
@given(seed=st.integers(0, 10_000), n_samples=st.integers(1, 20), h=st.integers(1, 12), weighted=st.booleans())
def test_kept_gates_are_the_distinct_patterns_that_are_not_closed(seed, n_samples, h, weighted):
    rng = np.random.default_rng(seed)
    masks = rng.integers(0, 2, size=(n_samples, h)).astype(bool)
    masks[:, rng.integers(0, 3, size=h) == 0] = False
    weight = rng.integers(0, 2, size=n_samples) if weighted else None
    counted = masks if weight is None else masks[weight > 0]
    gates = draw(GaussianGates(h))
    patterns = {tuple(column) for column in counted.T if column.any()}
    tensor = None if weight is None else torch.as_tensor(weight)
    if not patterns:
        with pytest.raises(ValueError, match="no gate lets any training sample through"):
            gates.distinct(torch.as_tensor(masks), tensor)
        return
    kept = gates.distinct(torch.as_tensor(masks), tensor)
    assert (np.diff(kept) > 0).all()
    assert {tuple(column) for column in counted[:, kept].T} == patterns
    assert len(kept) == len(patterns)
    # Of duplicates the first stays.
    for column in kept:
        assert not (counted[:, column] == counted[:, :column].T).all(axis=1).any()


def test_a_fit_keeps_what_differs_on_its_training_set(make_problem):
    X, y = make_problem(n_samples=6)
    model = ConvexAttentionRegressor(0.1, activation="gated_relu", n_gates=500, random_state=0).fit(X, y)
    drawn = draw(GaussianGates(500), 3, 2)
    patterns = np.unique(masks_by_formula(drawn, X), axis=1)
    assert len(model.gates_) == patterns.any(axis=0).sum() < 500
    kept = masks_by_formula(model.gates_, X)
    assert len(np.unique(kept, axis=1).T) == len(kept.T)
    assert model.coef_.shape[0] == len(model.gates_)


def test_samples_of_weight_zero_do_not_count(make_problem):
    X, y = make_problem(n_samples=12)
    weight = np.r_[np.ones(5), np.zeros(7)]
    options = {"activation": "gated_relu", "n_gates": 100, "random_state": 0, "tol": 1e-9}
    weighted = ConvexAttentionRegressor(0.1, **options).fit(X, y, sample_weight=weight)
    alone = ConvexAttentionRegressor(0.1, **options).fit(X[:5], y[:5])
    np.testing.assert_array_equal(weighted.gates_.u1, alone.gates_.u1)
    assert weighted.certificate_.primal == pytest.approx(alone.certificate_.primal, rel=1e-8)


@pytest.mark.parametrize("gates", ["gaussian", "sparse", SparseGates(30, n_nonzero=1)])
def test_new_data_meet_the_gates_of_the_fit(make_problem, gates):
    X, y = make_problem("softmax", n_classes=3)
    options = {"activation": "gated_relu", "gates": gates, "n_gates": 12, "random_state": 4}
    model = ConvexAttentionClassifier(0.01, **options).fit(X, y)
    new = np.random.default_rng(9).normal(size=(25, 3, 2))
    by_gate = np.einsum("ikd,hkdc->ihc", new, model.coef_)
    wanted = (by_gate * masks_by_formula(model.gates_, new)[:, :, None]).sum(1) + model.intercept_
    np.testing.assert_allclose(model.decision_function(new), wanted, atol=1e-10)
    # One sample at a time: nothing depends on which samples come together.
    np.testing.assert_allclose(model.decision_function(new[:1]), wanted[:1], atol=1e-10)


def test_random_state_decides_the_gates(make_problem):
    X, y = make_problem()
    models = [
        ConvexAttentionRegressor(0.1, activation="gated_relu", n_gates=6, random_state=state).fit(X, y)
        for state in (0, 0, np.random.RandomState(0), 1)
    ]
    for same in models[1:3]:
        np.testing.assert_array_equal(models[0].gates_.u1, same.gates_.u1)
        np.testing.assert_array_equal(models[0].coef_, same.coef_)
    assert not np.array_equal(models[0].gates_.u1, models[3].gates_.u1)


# What the gated program reduces to


@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
def test_an_always_open_gate_gives_the_linear_program(make_problem, penalty):
    X, y = make_problem(n_outputs=2)
    # The zero direction: 0 >= 0 for every sample.
    always = (np.zeros((1, 3)), np.ones((1, 2)))
    linear = ConvexAttentionRegressor(0.1, penalty=penalty, tol=1e-10).fit(X, y)
    gated = ConvexAttentionRegressor(0.1, penalty=penalty, tol=1e-10, activation="gated_relu", gates=always).fit(X, y)
    assert gated.certificate_.primal == pytest.approx(linear.certificate_.primal, rel=1e-9)
    assert gated.alpha_max_ == pytest.approx(linear.alpha_max_, rel=1e-12)
    np.testing.assert_allclose(gated.coef_[0], linear.coef_, atol=1e-4)
    # Half the mean square of the distance from the optimum's predictions is at most the gap.
    distance = np.sqrt(np.square(gated.predict(X) - linear.predict(X)).sum(1).mean())
    gaps = (max(model.certificate_.gap, 0) + 1e-15 for model in (gated, linear))
    assert distance <= sum(np.sqrt(2 * gap) for gap in gaps)


def test_a_gate_and_its_complement_without_intercept_are_two_separate_programs(make_problem):
    X, y = make_problem(n_samples=60)
    u1, u2 = np.ones((1, 3)), np.array([[1.0, 0.3]])
    options = {"fit_intercept": False, "tol": 1e-10}
    both = (np.vstack([u1, -u1]), np.vstack([u2, u2]))
    model = ConvexAttentionRegressor(0.05, activation="gated_relu", gates=both, **options).fit(X, y)
    opened = masks_by_formula(Gates(u1, u2), X)[:, 0]
    assert 10 < opened.sum() < 50
    # The mean loss of a part weighs its samples 60 / n_part times as much, and so must alpha.
    for gate, part in enumerate((opened, ~opened)):
        alone = ConvexAttentionRegressor(0.05 * 60 / part.sum(), **options).fit(X[part], y[part])
        np.testing.assert_allclose(model.coef_[gate], alone.coef_, atol=1e-4)


def test_more_gates_never_raise_the_optimum(make_problem):
    X, y = make_problem(n_samples=60)
    drawn = draw(GaussianGates(12), 3, 2)
    values = [
        ConvexAttentionRegressor(0.02, activation="gated_relu", gates=drawn.select(np.arange(h)), tol=1e-8).fit(X, y)
        for h in (1, 4, 12)
    ]
    primals = [model.certificate_.primal for model in values]
    assert primals == sorted(primals, reverse=True)
    assert primals[-1] < 0.95 * primals[0]


def test_gates_of_a_trained_network_serve_as_given_gates(make_problem):
    X, y = make_problem()
    network = ConvexAttention(3, 2, 1, n_heads=6, gates=draw(SparseGates(3), 3, 2))
    model = ConvexAttentionRegressor(0.1, activation="gated_relu", gates=network.gates).fit(X, y)
    masks = masks_by_formula(network.gates, X)
    assert len(model.gates_) == len({tuple(column) for column in masks.T if column.any()})


@pytest.mark.parametrize("estimator", [ConvexAttentionRegressor, ConvexAttentionClassifier])
def test_a_true_relu_is_refused_with_the_way_out(make_problem, estimator):
    X, y = make_problem("logistic" if estimator is ConvexAttentionClassifier else "squared")
    with pytest.raises(ValueError, match=r"activation must be one of .*gated_relu.*got 'relu'.*not cover.*fixed gates"):
        estimator(activation="relu").fit(X, y)


def test_a_source_of_ones_own(make_problem):
    class Halves(GateSource):
        def make(self, data, random_state):
            n_tokens, n_features = data.token_shape
            return Gates([[1.0] * n_tokens, [-1.0] * n_tokens], np.ones((2, n_features)))

    X, y = make_problem()
    model = ConvexAttentionRegressor(0.05, activation="gated_relu", gates=Halves()).fit(X, y)
    np.testing.assert_array_equal(model.gates_.u1, [[1.0] * 3, [-1.0] * 3])


def test_a_source_that_makes_no_gates_is_named(make_problem):
    class Pair(GateSource):
        def make(self, data, random_state):
            return np.ones((2, data.token_shape[0])), np.ones((2, data.token_shape[1]))

    with pytest.raises(TypeError, match=r"gates=.*Pair.*: make must return Gates\(u1, u2\), got tuple"):
        ConvexAttentionRegressor(0.05, activation="gated_relu", gates=Pair()).fit(*make_problem())

"""Heads: the identity with the certificate in every combination, recovery and its inverse, merging, torch."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convexformer import (
    ConvexAttentionClassifier,
    ConvexAttentionRegressor,
    Gates,
    Heads,
    SequenceHeads,
    attention_program,
)
from convexformer.nn import ConvexAttention, ReluAttention, network_from_heads, sequence_network_from_heads
from convexformer.solvers import GroupL2, get_loss, get_penalty

PENALTIES = ("group_l2", "nuclear")
ACTIVATIONS = ("linear", "gated_relu")
PROPERTY = settings(deadline=None, derandomize=True, max_examples=25, database=None)


def stop_early(progress):
    certificate = progress.certificate
    return progress.iteration >= 4 and certificate.primal < certificate.reference  # else there are no heads


# The identities hold at every point, converged or not: a few iterations keep these many fits quick.
LOOSE = {"callback": stop_early, "random_state": 0}
GATES = {"linear": {}, "gated_relu": {"n_gates": 5}}


def outputs_of(model, X):
    """Raw outputs, one column each, from the public predictions of an estimator."""
    if hasattr(model, "decision_function"):
        scores = model.decision_function(X)
    else:
        scores = model.predict(X)
        scores = np.log(scores) if model.loss == "poisson" else scores
    return scores.reshape(len(X), -1)


def two_columns_to_one(scores, model):
    """Raw outputs of heads as ``decision_function`` shows them: two softmax scores become their difference."""
    if hasattr(model, "classes_") and len(model.classes_) == 2 and scores.shape[1] == 2:
        return scores[:, 1:] - scores[:, :1]
    return scores


def assert_heads_are_the_model(model, X, y, weight):
    heads = model.heads_
    assert len(heads) > 0
    assert heads.objective(X, y, weight) == pytest.approx(model.certificate_.primal, rel=1e-9)
    np.testing.assert_allclose(two_columns_to_one(heads.predict(X), model), outputs_of(model, X), atol=1e-10)
    # Balanced: both halves of the decay are equal, head by head.
    np.testing.assert_allclose(np.linalg.norm(heads.w2, axis=1), heads.penalty.right_norm(torch.as_tensor(heads.w3)))
    # Heads sit on single tokens, those that the estimator reports as used.
    assert (np.sort(heads.w1, axis=1)[:, -1] == 1).all()
    np.testing.assert_array_equal(heads.w1.any(axis=0), model.token_norms_ > 0)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("ndim", [2, 3])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("loss", ["squared", "huber", "poisson"])
def test_objective_of_the_heads_is_the_certified_one_in_regression(
    make_problem, loss, penalty, activation, ndim, weighted
):
    for n_outputs in (1, 2):
        X, y = make_problem(loss, ndim=ndim, n_outputs=n_outputs)
        weight = np.random.default_rng(1).uniform(0, 2, len(X)) if weighted else None
        model = ConvexAttentionRegressor(
            0.02, loss=loss, penalty=penalty, activation=activation, **GATES[activation], **LOOSE
        )
        assert_heads_are_the_model(model.fit(X, y, sample_weight=weight), X, y, weight)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("ndim", [2, 3])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("loss", ["logistic", "softmax", "squared_hinge"])
def test_objective_of_the_heads_is_the_certified_one_in_classification(
    make_problem, loss, penalty, activation, ndim, weighted
):
    class_weights = (None, "balanced", {"no": 2.0, "yes": 0.3, "maybe": 1.0})
    for n_classes, class_weight in itertools.product((2, 3), class_weights):
        if isinstance(class_weight, dict) and n_classes == 2:
            class_weight = {"no": 2.0, "yes": 0.3}
        X, y = make_problem(loss, ndim=ndim, n_classes=n_classes)
        weight = np.random.default_rng(1).uniform(0, 2, len(X)) if weighted else None
        options = {
            "loss": loss,
            "penalty": penalty,
            "activation": activation,
            "class_weight": class_weight,
            **GATES[activation],
            **LOOSE,
        }
        model = ConvexAttentionClassifier(0.005, **options).fit(X, y, sample_weight=weight)
        assert_heads_are_the_model(model, X, y, weight)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_objective_of_the_heads_in_single_precision(make_problem, penalty):
    # Heads of a float32 solution are float32: equality holds to that precision, and no better.
    X, y = make_problem(n_outputs=2)
    X = X.astype(np.float32)
    model = ConvexAttentionRegressor(0.05, penalty=penalty, tol=1e-3).fit(X, y)
    assert model.heads_.w2.dtype == np.float32
    assert model.heads_.objective(X, y) == pytest.approx(model.certificate_.primal, rel=1e-6)


@pytest.mark.parametrize("size", [1e-25, 1e25])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_heads_in_single_precision_are_the_model_in_any_units(make_problem, activation, size):
    X, y = make_problem()
    X = (size * X).astype(np.float32)
    options = {"activation": activation, "random_state": 0, **GATES[activation]}
    model = ConvexAttentionRegressor(0.01 * size, **options).fit(X, y)
    np.testing.assert_allclose(model.heads_.predict(X)[:, 0], model.predict(X), rtol=1e-4, atol=1e-5)
    assert model.heads_.objective(X, y) == pytest.approx(model.certificate_.primal, rel=1e-5)
    assert model.alpha * model.token_norms_.sum() == pytest.approx(model.alpha * model.heads_.decay(), rel=1e-5)


# Recovery and its inverse


def random_coef(seed, shape):
    """A coefficient array with zero blocks, zero columns and rank-one blocks."""
    rng = np.random.default_rng(seed)
    coef = rng.normal(size=shape) * rng.integers(0, 2, size=(*shape[:-2], 1, 1)) * rng.integers(0, 2, size=shape[-1])
    flat = coef.reshape(-1, *shape[-2:])
    flat[0] = np.outer(rng.normal(size=shape[-2]), rng.normal(size=shape[-1]))
    return coef


def some_gates(n_gates, n, d, seed=0):
    rng = np.random.default_rng(seed)
    return Gates(rng.normal(size=(n_gates, n)), rng.normal(size=(n_gates, d)))


shapes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))


@PROPERTY
@given(seed=st.integers(0, 10_000), shape=shapes, penalty=st.sampled_from(PENALTIES), n_gates=st.integers(0, 3))
def test_recovery_has_the_coefficients_the_penalty_and_the_fewest_heads(seed, shape, penalty, n_gates):
    gates = some_gates(n_gates, *shape[:2]) if n_gates else None
    coef = random_coef(seed, (n_gates, *shape) if gates else shape)
    heads = Heads.from_coef(coef, alpha=0.1, penalty=penalty, gates=gates)
    np.testing.assert_allclose(heads.to_coef(), coef, atol=1e-12)
    blocks = coef.reshape(-1, *shape[1:])
    singular = np.linalg.svd(blocks, compute_uv=False)
    columns = np.linalg.norm(blocks, axis=1)
    if penalty == "nuclear":
        assert heads.decay() == pytest.approx(singular.sum(), rel=1e-12)
        assert len(heads) == sum(np.linalg.matrix_rank(block) for block in blocks)
    else:
        assert heads.decay() == pytest.approx(columns.sum(), rel=1e-12)
        assert len(heads) == np.count_nonzero(columns)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_predictions_are_the_formula(penalty, gated):
    rng = np.random.default_rng(0)
    m, n, d, c = 7, 4, 3, 2
    X = rng.normal(size=(25, n, d))
    gates = some_gates(3, n, d) if gated else None
    index = rng.integers(0, 3, m) if gated else None
    w1, w2, w3, bias = (
        rng.dirichlet(np.ones(n), m),
        rng.normal(size=(m, d)),
        rng.normal(size=(m, c)),
        rng.normal(size=c),
    )
    heads = Heads(w1, w2, w3, bias, "squared", penalty, 0.1, gates, index)
    wanted = np.tile(bias, (25, 1))
    for i, j in itertools.product(range(25), range(m)):
        is_open = not gated or gates.u1[index[j]] @ X[i] @ gates.u2[index[j]] >= 0
        wanted[i] += is_open * (w1[j] @ X[i] @ w2[j]) * w3[j]
    np.testing.assert_allclose(heads.predict(X), wanted, atol=1e-12)
    # The inverse map spreads soft heads over their tokens.
    coef = heads.to_coef().reshape(-1, n, d, c)
    opened = np.ones((25, 1)) if not gated else np.einsum("hk,ikd,hd->ih", gates.u1, X, gates.u2) >= 0
    np.testing.assert_allclose(np.einsum("ih,ikd,hkdc->ic", opened, X, coef) + bias, wanted, atol=1e-12)


def test_more_heads_than_fit_one_product():
    rng = np.random.default_rng(0)
    m = 1300
    heads = Heads(
        rng.dirichlet(np.ones(4), m), rng.normal(size=(m, 2)), rng.normal(size=(m, 3)), np.zeros(3),
        "squared", "nuclear", 0.1, some_gates(5, 4, 2), np.arange(m) % 5,
    )  # fmt: skip
    X = rng.normal(size=(6, 4, 2))
    pooled = np.einsum("mk,ikd,md->im", heads.w1, X, heads.w2)
    opened = np.einsum("hk,ikd,hd->ih", heads.gates.u1, X, heads.gates.u2) >= 0
    np.testing.assert_allclose(heads.predict(X), (pooled * opened[:, heads.gate_index]) @ heads.w3, atol=1e-9)


@PROPERTY
@given(
    seed=st.integers(0, 10_000),
    m=st.integers(1, 6),
    shape=shapes,
    penalty=st.sampled_from(PENALTIES),
    gated=st.booleans(),
)
def test_any_heads_are_a_feasible_point_of_the_program_at_no_higher_objective(seed, m, shape, penalty, gated):
    n, d, c = shape
    rng = np.random.default_rng(seed)
    X, y = rng.normal(size=(15, n, d)), rng.normal(size=(15, c))
    gates = some_gates(2, n, d) if gated else None
    index = rng.integers(0, 2, m) if gated else None
    weights = (rng.dirichlet(np.ones(n), m), rng.normal(size=(m, d)), rng.normal(size=(m, c)), rng.normal(size=c))
    program = attention_program(X, y, alpha=0.2, penalty=penalty, gates=gates, fit_intercept=True)
    heads = Heads(*weights, program.loss, program.penalty, 0.2, gates, index)
    value = float(program.primal(torch.as_tensor(heads.to_coef()), torch.as_tensor(heads.intercept)))
    assert value <= heads.objective(X, y) * (1 + 1e-12)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_printed_unbalanced_split_costs_more(make_problem, penalty):
    X, y = make_problem(n_outputs=2)
    model = ConvexAttentionRegressor(0.05, penalty=penalty).fit(X, y)
    heads = model.heads_
    size = np.linalg.norm(heads.w2, axis=1, keepdims=True)
    rest = (heads.intercept, heads.loss, heads.penalty, heads.alpha)
    printed = Heads(heads.w1, heads.w2 / size, heads.w3 * size, *rest)
    np.testing.assert_allclose(printed.predict(X), heads.predict(X), atol=1e-12)
    norms = size[:, 0] ** 2
    assert printed.decay() == pytest.approx(((1 + norms**2) / 2).sum(), rel=1e-10)
    assert printed.objective(X, y) > model.certificate_.primal * (1 + 1e-6)


# Merging


def test_heads_of_another_decay_than_the_penalty_are_refused(make_problem):
    class Unbalanced(GroupL2):
        def factorize(self, coef):
            block, left, right = super().factorize(coef)
            return block, 2 * left, right / 2

    X, y = make_problem("squared")
    with pytest.raises(ValueError, match="must factorize coefficients into heads whose decay is its value"):
        ConvexAttentionRegressor(0.01, penalty=Unbalanced()).fit(X, y)


@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1e-300, 1e-30, 1.0, 1e30, 1e150])
def test_heads_of_any_size_have_the_decay_of_the_penalty(penalty, dtype, size):
    if dtype == np.float32 and not 1e-30 <= size <= 1e30:
        pytest.skip("out of the range of float32")
    coef = (size * np.random.default_rng(0).normal(size=(3, 4, 2))).astype(dtype)
    heads = Heads.from_coef(coef, alpha=0.1, penalty=penalty)
    value = float(get_penalty(penalty).value(torch.as_tensor(coef).double()))
    assert heads.decay() == pytest.approx(value, rel=1e-6 if dtype == np.float32 else 1e-13)


def test_parallel_groups_of_several_tokens_merge_into_one_soft_head(make_problem):
    # Token k carries t_k times one direction: one head with attention t / sum(t).
    t, direction = np.array([3.0, 0.0, 1.0, 2.0]), np.array([0.6, -0.8])
    coef = np.einsum("k,d,c->kdc", t, direction, [1.0])
    heads = Heads.from_coef(coef, [0.5], alpha=0.1)
    merged = heads.merge()
    assert (len(heads), len(merged)) == (3, 1)
    np.testing.assert_allclose(merged.w1[0], t / t.sum())
    assert merged.decay() == pytest.approx(heads.decay()) == pytest.approx(6.0)
    np.testing.assert_allclose(merged.to_coef(), coef, atol=1e-12)


@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
def test_merging_unbalanced_heads_makes_the_decay_no_larger(penalty):
    rng = np.random.default_rng(0)
    left, right, size = rng.normal(size=(2, 3)), rng.normal(size=(2, 4)), rng.uniform(0.01, 100, (8, 1))
    w1 = rng.dirichlet(np.ones(5), 8)
    w2, w3 = left[[0, 1] * 4] * size, right[[0, 1] * 4] / size[::-1]
    heads = Heads(w1, w2, w3, np.zeros(4), "squared", penalty, 0.1)
    merged = heads.merge()
    assert len(merged) == 2
    assert merged.decay() <= heads.decay()
    np.testing.assert_allclose(merged.to_coef(), heads.to_coef(), rtol=1e-12)


@pytest.mark.parametrize("tol", [1e-9, 0.02])
def test_merging_moves_heads_that_resemble_the_first_by_no_more_than_is_said(tol):
    angle = np.arccos(1 - tol) * np.array([0.0, 0.9])
    heads = Heads(np.eye(2), np.c_[np.cos(angle), np.sin(angle)], np.ones((2, 1)), np.zeros(1), "squared", "nuclear", 1)
    merged = heads.merge(tol)
    assert len(merged) == 1
    moved = np.linalg.norm(merged.to_coef() - heads.to_coef())
    assert 0 < moved <= np.sqrt(2 * tol) + 1e-12  # the second head has size 1


def test_merging_leaves_out_heads_that_are_zero():
    w1, w2, w3 = np.eye(3), np.array([[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]), np.array([[1.0], [1.0], [0.0]])
    gates = some_gates(2, 3, 2)
    heads = Heads(w1, w2, w3, np.zeros(1), "squared", "group_l2", 0.1, gates, np.array([0, 1, 0]))
    merged = heads.merge()
    assert (len(merged), merged.gate_index.tolist()) == (1, [1])
    np.testing.assert_allclose(merged.to_coef(), heads.to_coef())
    assert len(dataclasses.replace(heads, w3=np.zeros((3, 1))).merge()) == 0


@pytest.mark.parametrize("alpha", [-1.0, 0.0, np.nan, "a"])
def test_an_alpha_that_no_program_has_is_refused(alpha):
    heads = Heads.from_coef(np.ones((2, 2, 1)), alpha=0.1)
    with pytest.raises(ValueError, match="alpha must be"):
        heads.replace(alpha=alpha)
    sequence = SequenceHeads(np.eye(2)[None], [[2.0]], [[2.0]], np.zeros((2, 1)), alpha=0.1, form="stochastic")
    with pytest.raises(ValueError, match="alpha must be"):
        sequence.replace(alpha=alpha)


def test_losses_of_samples_without_weight_may_be_infinite():
    rng = np.random.default_rng(0)
    X, y, weight = rng.normal(size=(8, 2, 3)), rng.normal(size=8), np.arange(8.0)
    plain = Heads.from_coef(rng.normal(size=(2, 3, 1)), alpha=0.1)
    sequence = SequenceHeads(
        np.full((1, 1, 2), 0.5), [[1.0, 2, 3]], [[2.0]], np.zeros((1, 1)), alpha=0.1, form="single_row"
    )
    filled = X.copy()
    filled[0] = 1e200
    for heads in (plain, sequence):
        assert heads.objective(filled, y, weight) == pytest.approx(heads.objective(X[1:], y[1:], weight[1:]), rel=1e-12)


def test_networks_of_another_class_are_named():
    with pytest.raises(TypeError, match="network must be a ConvexAttention, got ReluAttention"):
        Heads.from_torch(ReluAttention(3, 2, 1), alpha=0.1)
    with pytest.raises(TypeError, match="network must be a SequenceAttention, got ReluAttention"):
        SequenceHeads.from_torch(ReluAttention(3, 2, 1), alpha=0.1)


def test_coefficients_are_floating_point_numbers():
    with pytest.raises(ValueError, match="coef must hold floating-point numbers, got int64"):
        Heads.from_coef([[[1], [2]]], alpha=0.1)


def test_opposite_signs_other_outputs_and_other_gates_stay_apart():
    opposite = np.array([[[1.0], [2.0]], [[-1.0], [-2.0]]])
    assert len(Heads.from_coef(opposite, alpha=0.1).merge()) == 2
    outputs = np.zeros((2, 2, 2))
    outputs[0, :, 0] = outputs[1, :, 1] = 1.0
    assert len(Heads.from_coef(outputs, alpha=0.1).merge()) == 2
    gates = some_gates(2, 2, 2)
    gated = np.zeros((2, 2, 2, 1))
    gated[0, 0], gated[1, 1] = 1.0, 1.0
    assert len(Heads.from_coef(gated, alpha=0.1, gates=gates).merge()) == 2
    gated[0, 1] = 2.0
    merged = Heads.from_coef(gated, alpha=0.1, gates=gates).merge()
    assert len(merged) == 2
    np.testing.assert_allclose(merged.to_coef(), gated, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("loss", ["squared", "softmax"])
def test_merging_keeps_objective_and_predictions_and_saves_heads_on_tokens_of_width_one(
    make_problem, loss, penalty, activation
):
    X, y = make_problem(loss, ndim=2, n_classes=2)
    estimator = ConvexAttentionRegressor if loss == "squared" else ConvexAttentionClassifier
    options = {"loss": loss, "penalty": penalty, "activation": activation, **GATES[activation], **LOOSE}
    heads = estimator(0.005, **options).fit(X, y).heads_
    merged = heads.merge()
    # On width 1 groups of one sign are all parallel, so some must merge; two softmax columns may differ by token.
    assert len(merged) < len(heads)
    assert merged.objective(X, y) == pytest.approx(heads.objective(X, y), rel=1e-9)
    np.testing.assert_allclose(merged.predict(X), heads.predict(X), atol=1e-9)
    np.testing.assert_allclose(merged.to_coef(), heads.to_coef(), atol=1e-9)
    assert len(merged.merge()) == len(merged)


# Torch


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("loss", ["squared", "poisson", "logistic", "softmax"])
def test_round_trip_through_torch(make_problem, loss, penalty, activation):
    X, y = make_problem(loss, n_outputs=2, n_classes=3)
    estimator = ConvexAttentionRegressor if loss in ("squared", "poisson") else ConvexAttentionClassifier
    model = estimator(0.02, loss=loss, penalty=penalty, activation=activation, **GATES[activation], **LOOSE).fit(X, y)
    for heads in (model.heads_, model.heads_.merge()):
        network = heads.to_torch()
        tokens = torch.as_tensor(X)
        np.testing.assert_allclose(network(tokens).detach().numpy(), heads.predict(X), atol=1e-12)
        encoded = torch.as_tensor(heads.targets.encode(y))
        value = network.objective(tokens, encoded, loss=heads.loss, penalty=heads.penalty, alpha=heads.alpha)
        assert value.item() == pytest.approx(model.certificate_.primal, rel=1e-9)
        options = {"alpha": heads.alpha, "loss": heads.loss, "penalty": heads.penalty, "targets": heads.targets}
        again = Heads.from_torch(network, **options)
        for name in ("w1", "w2", "w3", "intercept"):
            np.testing.assert_allclose(getattr(again, name), getattr(heads, name), atol=1e-15)
        if activation == "gated_relu":
            np.testing.assert_array_equal(again.gate_index, heads.gate_index)
            np.testing.assert_array_equal(again.gates.u1, heads.gates.u1)
        assert again.objective(X, y) == pytest.approx(heads.objective(X, y), rel=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("loss", "penalty"), [("squared", "group_l2"), ("softmax", "nuclear"), ("logistic", "nuclear")]
)
def test_zero_solution_is_a_constant_network_without_heads(make_problem, loss, penalty, activation):
    X, y = make_problem(loss, n_classes=3 if loss == "softmax" else 2)
    estimator = ConvexAttentionRegressor if loss == "squared" else ConvexAttentionClassifier
    model = estimator(loss=loss, penalty=penalty, activation=activation, **GATES[activation], **LOOSE).fit(X, y)
    model.set_params(alpha=model.alpha_max_ * 1.0001).fit(X, y)
    heads = model.heads_
    assert len(heads) == len(heads.merge()) == 0
    assert (model.token_norms_ == 0).all()
    assert (heads.to_coef() == 0).all()
    assert heads.to_coef().shape == (*((len(model.gates_),) if model.gates_ else ()), 3, 2, len(heads.intercept))
    if loss == "squared":
        np.testing.assert_allclose(model.predict(X), y.mean())
    else:
        frequencies = (y[:, None] == model.classes_).mean(0)
        np.testing.assert_allclose(model.predict_proba(X), np.tile(frequencies, (len(X), 1)), atol=1e-6)
    np.testing.assert_allclose(heads.predict(X), np.tile(heads.intercept, (len(X), 1)))
    assert heads.objective(X, y) == pytest.approx(model.certificate_.primal, rel=1e-9)
    np.testing.assert_allclose(heads.to_torch()(torch.as_tensor(X)).detach().numpy(), heads.predict(X), atol=1e-12)


# Errors


def test_recovery_wants_the_right_number_of_axes():
    with pytest.raises(ValueError, match=r"coef must have shape \(n_tokens, n_features, n_outputs\)"):
        Heads.from_coef(np.zeros((2, 2)), alpha=0.1)
    with pytest.raises(ValueError, match=r"coef must have shape \(n_gates, n_tokens"):
        Heads.from_coef(np.zeros((2, 2, 1)), alpha=0.1, gates=some_gates(2, 2, 2))


@pytest.mark.parametrize("penalty", PENALTIES)
def test_coefficients_are_finite(penalty):
    with pytest.raises(ValueError, match="coef must be finite"):
        Heads.from_coef(np.full((2, 2, 1), np.nan), alpha=0.1, penalty=penalty)


def test_gates_are_gates_of_the_widths_of_the_heads():
    weights = (np.eye(2), np.ones((2, 3)), np.ones((2, 1)), np.zeros(1), "squared", "nuclear", 0.1)
    with pytest.raises(TypeError, match=r"gates must be a Gates, as Gates\(u1, u2\) makes one"):
        Heads(*weights, gates=(np.ones((2, 2)), np.ones((2, 3))), gate_index=[0, 1])
    with pytest.raises(
        ValueError, match=r"gates must have directions of the widths \(2, 3\) of w1 and w2, got \(3, 2\)"
    ):
        Heads(*weights, gates=some_gates(2, 3, 2), gate_index=[0, 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coef": np.ones((4, 3, 4), dtype=int)}, "coef must hold floating-point numbers"),
        ({"coef": np.full((4, 3, 4), np.nan)}, "coef must be finite"),
        ({"n_targets": 3}, "a last axis that is a multiple of n_targets=3, got torch.float64 of shape"),
        ({"n_targets": 2.0}, "n_targets must be a positive integer, got 2.0"),
        ({"intercept": np.zeros(3)}, r"intercept must have 4 numbers like coef, got \(3,\)"),
    ],
)
def test_coefficients_of_sequence_heads_are_checked(change, message):
    options = {"coef": np.ones((4, 3, 4)), "intercept": np.zeros(4), "n_targets": 2, "penalty": "nuclear"} | change
    with pytest.raises(ValueError, match=message):
        SequenceHeads.from_coef(**options, alpha=0.1, form="single_row")


def test_prediction_on_other_shapes_is_an_error():
    heads = Heads.from_coef(np.ones((3, 2, 1)), alpha=0.1)
    for other in (np.zeros((4, 2, 2)), np.zeros((4, 3, 1)), np.zeros((4, 3))):
        with pytest.raises(ValueError, match=r"X must have shape .*\(3, 2\)"):
            heads.predict(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w1": [[1.0, 0.0], [0.5, 0.4]]}, "rows of w1 must be non-negative and sum to 1"),
        ({"w1": np.ones(2) / 2}, r"w1, w2, w3 must be arrays of shapes \(m, n\), \(m, d\), \(m, c\), got \(2,\)"),
        ({"w2": np.ones(2)}, r"w1, w2, w3 must be .* got \(2, 2\), \(2,\), \(2, 1\)"),
        ({"w3": np.ones((2, 1, 1))}, r"w1, w2, w3 must be .* got \(2, 2\), \(2, 3\), \(2, 1, 1\)"),
        ({"w2": np.ones((1, 3))}, r"w1, w2, w3 must be .* got \(2, 2\), \(1, 3\), \(2, 1\)"),
        ({"w3": np.ones((1, 1))}, r"w1, w2, w3 must be .* got \(2, 2\), \(2, 3\), \(1, 1\)"),
        ({"intercept": np.zeros(2)}, r"intercept must have shape \(1,\), got \(2,\)"),
        ({"gates": Gates(np.eye(2), np.ones((2, 3))), "gate_index": [0, 2]}, "gate_index must hold positions of the 2"),
        (
            {"gates": Gates(np.eye(2), np.ones((2, 3))), "gate_index": [-1, 0]},
            "gate_index must hold positions of the 2",
        ),
    ],
)
def test_parts_of_heads_fit_together(change, message):
    parts = {"w1": np.eye(2), "w2": np.ones((2, 3)), "w3": np.ones((2, 1)), "intercept": np.zeros(1)} | change
    with pytest.raises(ValueError, match=message):
        Heads(**parts, loss="squared", penalty="nuclear", alpha=0.1)


def test_parts_of_sequence_heads_fit_together():
    w1, w2, w3 = np.eye(2)[None], np.ones((1, 3)), np.ones((1, 1))
    options = {"alpha": 0.1, "form": "stochastic"}
    for wrong in ((w1[0], w2, w3), (w1, w2[0], w3), (w1, w2, w3[0]), (w1, np.ones((2, 3)), w3), (w1, w2, w3[:0])):
        with pytest.raises(ValueError, match=r"w1, w2, w3 must be arrays of shapes \(m, n_targets, n_tokens\)"):
            SequenceHeads(*wrong, np.zeros((2, 1)), **options)
    with pytest.raises(ValueError, match=r"w1 must be non-negative, got -0\.5"):
        SequenceHeads([[[1.5, -0.5], [0.0, 1.0]]], w2, w3, np.zeros((2, 1)), **options)
    one_row = np.array([[[1.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
    for w1 in (one_row, one_row[::-1], 0.5 * one_row[:1]):
        with pytest.raises(ValueError, match="w1 must have one row in the simplex per head"):
            SequenceHeads(
                w1, np.ones((len(w1), 3)), np.ones((len(w1), 1)), np.zeros((2, 1)), alpha=0.1, form="single_row"
            )


def test_an_alpha_in_single_precision_leaves_the_objective_in_double():
    X, alpha = np.ones((1, 2, 3)), np.float32(0.1)
    heads = Heads(np.eye(2), np.ones((2, 3)) / 3, np.ones((2, 1)), np.zeros(1), "squared", "nuclear", alpha)
    w1, w2, w3 = np.eye(2)[None], np.ones((1, 3)) / 3, np.ones((1, 1))
    sequences = SequenceHeads(w1, w2, w3, np.zeros((2, 1)), alpha=alpha, form="stochastic")
    for part, y in ((heads, np.zeros(1)), (sequences, np.zeros((1, 2)))):
        assert float(part.objective(X, y)) == part.replace(alpha=float(alpha)).objective(X, y)


def test_gates_and_their_index_come_together():
    weights = (np.eye(2), np.ones((2, 3)), np.ones((2, 1)), np.zeros(1), "squared", "nuclear", 0.1)
    with pytest.raises(ValueError, match="gates and gate_index"):
        Heads(*weights, gates=some_gates(2, 2, 3))
    with pytest.raises(ValueError, match=r"gate_index must have shape \(2,\)"):
        Heads(*weights, gates=some_gates(2, 2, 3), gate_index=np.zeros(3, dtype=int))


@pytest.mark.parametrize("index", [np.array([True, False]), np.array([0.0, 1.0]), ["0", "1"]])
def test_gate_index_holds_integers(index):
    weights = (np.eye(2), np.ones((2, 3)), np.ones((2, 1)), np.zeros(1), "squared", "nuclear", 0.1)
    with pytest.raises(ValueError, match="gate_index must hold integers, got"):
        Heads(*weights, gates=some_gates(2, 2, 3), gate_index=index)


@pytest.mark.parametrize("wrong", [[[1.5, -0.5]], [[0.5, 0.4]], [[np.nan, 1.0]]])
def test_attention_outside_the_simplex_is_an_error(wrong):
    with pytest.raises(ValueError, match=r"rows of w1|w1 must be finite"):
        Heads(np.array(wrong), np.ones((1, 3)), np.ones((1, 1)), np.zeros(1), "squared", "nuclear", 0.1)


def test_gate_index_outside_the_gates_is_an_error():
    with pytest.raises(ValueError, match="gate_index"):
        Heads(
            np.eye(2), np.ones((2, 3)), np.ones((2, 1)), np.zeros(1), "squared", "nuclear", 0.1,
            some_gates(2, 2, 3), np.array([0, 2]),
        )  # fmt: skip


@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
def test_two_dimensional_samples_are_tokens_of_width_one_wherever_they_go(gated):
    rng = np.random.default_rng(0)
    X, y, ones = rng.normal(size=(30, 4)), rng.normal(size=30), np.ones((2, 1))
    gates, gate_index = (Gates(rng.normal(size=(2, 4)), ones), np.arange(2)) if gated else (None, None)
    heads = Heads(np.eye(4)[:2], ones, ones, np.zeros(1), "squared", "group_l2", 0.1, gates, gate_index)
    wide = X[:, :, None]
    np.testing.assert_array_equal(heads.predict(X), heads.predict(wide))
    assert heads.objective(X, y) == heads.objective(wide, y)
    for make in (heads.program, lambda X, y: attention_program(X, y, alpha=0.1, gates=gates)):
        narrow, whole = (make(samples, y) for samples in (X, wide))
        assert narrow.alpha_max == whole.alpha_max
        assert narrow.coef_shape == whole.coef_shape


def test_loss_and_penalty_may_be_names():
    ones = np.ones((1, 1))
    by_name = Heads(ones, ones, ones, np.zeros(1), "squared", "nuclear", 0.1)
    assert (by_name.loss, by_name.penalty) == (get_loss("squared"), get_penalty("nuclear"))
    with pytest.raises(ValueError, match="loss must be one of"):
        Heads(ones, ones, ones, np.zeros(1), "cubic", "nuclear", 0.1)


def test_representation_says_what_it_is():
    assert repr(Heads.from_coef(np.ones((3, 2, 1)), alpha=0.1)) == "Heads(3 heads, 3 tokens, 2 features, 1 outputs)"


@pytest.mark.parametrize(
    ("y", "weight", "message"),
    [
        (np.zeros(5), None, "y must have a row for each of the 20 samples"),
        (np.zeros((20, 2)), None, "of 1 outputs"),
        (np.full(20, np.nan), None, "y must be finite"),
        (np.zeros(20), -np.ones(20), "sample_weight"),
        (np.zeros(20), np.ones(3), "sample_weight"),
    ],
)
def test_objective_of_other_shapes_is_refused(y, weight, message):
    X = np.random.default_rng(0).normal(size=(20, 3, 2))
    heads = ConvexAttentionRegressor(alpha=0.01).fit(X, X[:, 0, 0]).heads_
    with pytest.raises(ValueError, match=message):
        heads.objective(X, y, weight)


@pytest.mark.parametrize("shape", [(4, 2, 2), (4, 3, 1), (4, 3)])
def test_sequence_heads_want_samples_of_their_shape(shape):
    w1 = np.full((1, 2, 3), 1 / 3)
    heads = SequenceHeads(w1, np.ones((1, 2)), [[1.0]], np.zeros((2, 1)), alpha=0.1, form="stochastic")
    with pytest.raises(ValueError, match=r"X must have shape .* with \(3, 2\)"):
        heads.predict(np.zeros(shape))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.zeros((4, 3)), r"y must have shape \(4, 2, 1\), got \(4, 3, 1\)"),
        (np.zeros((1, 2)), r"y must have shape \(4, 2, 1\), got \(1, 2, 1\)"),
        (np.full((4, 2), np.nan), "y must be finite"),
    ],
)
def test_objective_of_sequence_heads_wants_targets_of_their_shape(y, message):
    w1 = np.full((1, 2, 3), 1 / 3)
    heads = SequenceHeads(w1, np.ones((1, 2)), [[1.0]], np.zeros((2, 1)), alpha=0.1, form="stochastic")
    with pytest.raises(ValueError, match=message):
        heads.objective(np.zeros((4, 3, 2)), y)


@pytest.mark.parametrize("tol", [-1.0, 1.0, np.nan, "a", None])
def test_merging_refuses_a_tolerance_out_of_range(tol):
    X = np.random.default_rng(0).normal(size=(20, 3, 2))
    heads = ConvexAttentionRegressor(alpha=0.01).fit(X, X[:, 0, 0]).heads_
    with pytest.raises(ValueError, match="tol must lie in"):
        heads.merge(tol)


def test_loading_weights_leaves_the_heads_and_their_gates_alone():
    heads = Heads.from_coef(np.ones((3, 4, 3, 1)), alpha=0.1, gates=Gates(np.ones((3, 4)), np.ones((3, 3))))
    network, before = heads.to_torch(), heads.gate_index.copy()
    zeros = {key: torch.zeros_like(value) for key, value in network.state_dict().items() if torch.is_tensor(value)}
    network.load_state_dict({**network.state_dict(), **zeros})
    for part in network.get_extra_state().values():
        if torch.is_tensor(part):
            part.zero_()
    assert not network.gate_index.any()
    np.testing.assert_array_equal(heads.gate_index, before)
    assert heads.gates.u1.all()
    assert network.gates.u1.all()


def test_a_gate_index_is_copied_and_made_of_integers():
    index, gates = np.array([0, 1, 2]), Gates(np.ones((3, 4)), np.ones((3, 3)))
    network = ConvexAttention(4, 3, 1, n_heads=3, gates=gates, gate_index=index)
    index[:] = 0
    assert network.gate_index.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="gate_index must hold integers, got float64"):
        ConvexAttention(4, 3, 1, n_heads=3, gates=gates, gate_index=[0.0, 1.0, 2.0])


@pytest.mark.usefixtures("every_warning")
@pytest.mark.parametrize("view", [lambda a: a[::-1], lambda a: a[::-1][::-1]])
def test_weights_may_be_reversed_and_read_only(view):
    rng = np.random.default_rng(0)
    gates, index = Gates(rng.normal(size=(3, 2)), rng.normal(size=(3, 4))), np.array([2, 0, 1])
    X, coef = rng.normal(size=(6, 2, 4)), rng.normal(size=(2, 4, 1))
    w1, w2, w3, bias = rng.dirichlet([1, 1], 3), rng.normal(size=(3, 4)), rng.normal(size=(3, 1)), np.zeros(1)

    def outputs(coef, w1, w2, w3, bias, rows, index):
        heads = [
            Heads.from_coef(coef, bias, alpha=0.1),
            Heads(w1, w2, w3, bias, "squared", "group_l2", 0.1, gates=gates, gate_index=index),
            SequenceHeads(w1[:, None], w2, w3, rows, alpha=0.1, form="stochastic"),
        ]
        network = network_from_heads(w1, w2, w3, bias, gates, index)
        networks = [network, sequence_network_from_heads(w1[:, None], w2, w3, rows)]
        tokens = torch.as_tensor(X)
        return [h.predict(X) for h in heads] + [network(tokens).detach().numpy() for network in networks]

    arrays = [view(array) for array in (coef, w1, w2, w3, bias, bias[:, None], index)]
    wanted = outputs(*(array.copy() for array in arrays))
    for array in arrays:
        array.setflags(write=False)
    for found, values in zip(outputs(*arrays), wanted, strict=True):
        np.testing.assert_array_equal(found, values)


def test_heads_of_a_network_stay_when_it_is_trained_on():
    network = ConvexAttention(3, 2, n_heads=4, simplex="projection")
    heads = Heads.from_torch(network, alpha=0.1)
    before = heads.w2.copy()
    with torch.no_grad():
        network.w2.add_(1.0)
    np.testing.assert_array_equal(heads.w2, before)


def test_integers_become_floating_point_numbers_of_one_precision():
    heads = Heads(np.eye(2, dtype=np.float32), [[1, 2], [3, 4]], [[1], [2]], [0], "squared", "nuclear", 0.1)
    assert {part.dtype for part in (heads.w1, heads.w2, heads.w3, heads.intercept)} == {np.dtype(np.float64)}
    np.testing.assert_allclose(heads.to_torch()(torch.ones(1, 2, 2).double()).detach().numpy(), [[3 + 14]])


X_OF_NETWORKS = np.random.default_rng(0).normal(size=(60, 5, 3))


def test_weights_that_are_loaded_bring_how_attention_reads():
    X = X_OF_NETWORKS
    heads = ConvexAttentionRegressor(alpha=0.05).fit(X, X[:, 0, 0]).heads_
    network = heads.to_torch()
    other = ConvexAttention(*X.shape[1:], 1, n_heads=len(heads)).double()
    assert other.simplex != network.simplex
    other.load_state_dict(network.state_dict())
    tokens = torch.as_tensor(X)
    assert torch.equal(other(tokens), network(tokens))


def test_heads_take_tensors_with_gradients_and_refuse_masks():
    coef = np.random.default_rng(0).normal(size=(3, 2, 1))
    wanted = Heads.from_coef(coef, [1.0], alpha=0.1)
    heads = Heads.from_coef(torch.tensor(coef, requires_grad=True), torch.ones(1, requires_grad=True), alpha=0.1)
    np.testing.assert_array_equal(heads.to_coef(), wanted.to_coef())
    again = dataclasses.replace(wanted, w2=torch.tensor(wanted.w2, requires_grad=True))
    np.testing.assert_array_equal(again.w2, wanted.w2)
    with pytest.raises(ValueError, match="w1 must have no masked values"):
        dataclasses.replace(wanted, w1=np.ma.masked_equal(wanted.w1, 1.0))
    with pytest.raises(ValueError, match="coef must have no masked values"):
        Heads.from_coef(np.ma.masked_equal(coef, coef[0, 0, 0]), alpha=0.1)

"""The convex programs, the heads and trained networks: equal where the theory says so, bounded everywhere."""

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Lasso, MultiTaskLasso, QuantileRegressor

from convexformer import (
    ConvexAttention,
    ConvexAttentionClassifier,
    ConvexAttentionRegressor,
    Gates,
    Heads,
    attention_program,
)
from convexformer.nn import train
from convexformer.solvers import Fista, Huber, certify, solve

PENALTIES = ("group_l2", "nuclear")
PROPERTY = settings(deadline=None, derandomize=True, max_examples=15, database=None)


def data(n_samples=40, n=3, d=2, c=2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n_samples, n, d))
    y = X.reshape(n_samples, -1) @ rng.normal(size=(n * d, c)) + 0.3 * rng.normal(size=(n_samples, c))
    return X, y


def some_gates(n=3, d=2, h=3, seed=1):
    rng = np.random.default_rng(seed)
    return Gates(rng.normal(size=(h, n)), rng.normal(size=(h, d)))


def by_hand(X, y, alpha, penalty, gates=None, weights=None):
    """Theorems 1 to 3 with squared loss, straight from the formulas; with penalty weights of tokens."""
    n_samples, n, d = X.shape
    c = y.shape[1]
    if gates is None:
        open_ = np.ones((n_samples, 1))
    else:
        open_ = (np.einsum("hk,ikd,hd->ih", gates.u1, X, gates.u2) >= 0).astype(float)
    Z = [[cp.Variable((d, c)) for _ in range(n)] for _ in range(open_.shape[1])]
    pred = sum((open_[:, [g]] * X[:, k]) @ Z[g][k] for g in range(open_.shape[1]) for k in range(n))
    weights = np.ones(n) if weights is None else weights
    blocks = [weight * block for row in Z for weight, block in zip(weights, row, strict=True)]
    if penalty == "nuclear":
        decay = sum(cp.normNuc(block) for block in blocks)
    else:
        decay = sum(cp.norm(block[:, j], 2) for block in blocks for j in range(c))
    problem = cp.Problem(cp.Minimize(cp.sum_squares(pred - y) / (2 * n_samples) + alpha * decay))
    return problem.solve(solver="CLARABEL")


@pytest.mark.parametrize("gates", [None, some_gates()], ids=["linear", "gated"])
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("n_outputs", [1, 2])
def test_program_is_that_of_the_theorems(gates, penalty, n_outputs):
    X, y = data(c=n_outputs)
    wanted = by_hand(X, y, 0.2, penalty, gates)
    certificate = solve(attention_program(X, y, alpha=0.2, penalty=penalty, gates=gates), Fista(), tol=1e-9).certificate
    assert certificate.primal == pytest.approx(wanted, rel=1e-6)
    assert certificate.dual <= wanted * (1 + 1e-7)


@pytest.mark.parametrize("gates", [None, some_gates()], ids=["linear", "gated"])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_tokens_over_weights_are_the_program_with_penalty_weights(gates, penalty):
    X, y = data()
    weights = np.array([0.25, 1.0, 4.0])
    divided = None if gates is None else Gates(gates.u1 * weights, gates.u2)  # which open as those of X do
    program = attention_program(X / weights[:, None], y, alpha=0.2, penalty=penalty, gates=divided)
    certificate = solve(program, Fista(), tol=1e-9).certificate
    wanted = by_hand(X, y, 0.2, penalty, gates, weights)
    assert certificate.primal == pytest.approx(wanted, rel=1e-6)
    assert certificate.dual <= wanted * (1 + 1e-7)
    assert abs(certificate.primal - by_hand(X, y, 0.2, penalty, gates)) > 0.01


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.5])
def test_tokens_of_width_one_are_the_lasso(alpha, intercept):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 8)) + 3.0
    y = X @ rng.normal(size=8) + rng.normal(size=60)
    weight = rng.uniform(0.5, 2.0, 60)
    wanted = Lasso(alpha, fit_intercept=intercept, tol=1e-13, max_iter=100_000).fit(X, y, sample_weight=weight)
    model = ConvexAttentionRegressor(alpha, fit_intercept=intercept, tol=1e-12, max_iter=100_000)
    model.fit(X, y, sample_weight=weight)
    np.testing.assert_allclose(model.coef_, wanted.coef_, atol=1e-6)
    np.testing.assert_allclose(model.intercept_, wanted.intercept_, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.2])
def test_small_thresholds_of_the_huber_loss_are_the_regression_of_the_median(alpha, intercept, weighted):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(80, 6))
    y = X[:, 0] - 2 * X[:, 3] + rng.standard_t(2, size=80) + 3.0 * intercept
    weight = rng.uniform(0, 2, 80) if weighted else np.ones(80)
    wanted = QuantileRegressor(quantile=0.5, alpha=alpha, fit_intercept=intercept).fit(X, y, sample_weight=weight)
    delta = 1e-6
    # Beyond the threshold the loss is twice that times half the absolute residual, less half its square.
    model = ConvexAttentionRegressor(2 * delta * alpha, loss=Huber(delta), fit_intercept=intercept, tol=1e-8)
    model.fit(X, y, sample_weight=weight)

    def objective(fitted):
        return np.average(np.abs(y - fitted.predict(X)) / 2, weights=weight) + alpha * np.abs(fitted.coef_).sum()

    assert objective(model) == pytest.approx(objective(wanted), rel=0, abs=delta / 4 + 1e-8)
    np.testing.assert_allclose(model.coef_, wanted.coef_, atol=1e-5)


def test_nuclear_norm_of_tokens_of_width_one_is_the_multi_task_lasso():
    X, y = data(60, 5, 1, 3)
    wanted = MultiTaskLasso(0.1, tol=1e-12).fit(X[:, :, 0], y)
    model = ConvexAttentionRegressor(0.1, penalty="nuclear", tol=1e-12).fit(X[:, :, 0], y)
    np.testing.assert_allclose(model.coef_.T, wanted.coef_, atol=1e-6)
    np.testing.assert_allclose(model.intercept_, wanted.intercept_, atol=1e-6)


LABELS = np.array(["a", "b", "c"])
MODELS = {
    "squared": ConvexAttentionRegressor(),
    "huber": ConvexAttentionRegressor(loss="huber"),
    "poisson": ConvexAttentionRegressor(loss="poisson"),
    "softmax": ConvexAttentionClassifier(class_weight={"a": 2.0, "b": 1.0, "c": 0.5}),
    "logistic": ConvexAttentionClassifier(loss="logistic"),
    "one against rest": ConvexAttentionClassifier(loss="logistic", class_weight="balanced"),
    "squared hinge": ConvexAttentionClassifier(loss="squared_hinge"),
}


def targets_of(name, y):
    if name == "poisson":
        return np.random.default_rng(0).poisson(np.exp(np.clip(y, -2, 2)))
    if name in ("squared", "huber"):
        return y
    return LABELS[y.argmax(1) if name != "logistic" else (y[:, 0] > 0).astype(int)]


@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("width", [1, 2])
def test_heads_are_the_solution(name, penalty, gated, width):
    X, y = data(50, 4, width, 3)
    X = X[:, :, 0] if width == 1 else X
    y = targets_of(name, y)
    weight = np.random.default_rng(2).uniform(0.0, 2.0, len(X))
    options = {"activation": "gated_relu", "n_gates": 4} if gated else {"activation": "linear", "n_gates": 32}
    model = MODELS[name].set_params(alpha=0.02, penalty=penalty, random_state=0, **options)
    model.fit(X, y, sample_weight=weight)
    heads, primal = model.heads_, model.certificate_.primal
    assert heads.objective(X, y, weight) == pytest.approx(primal, rel=1e-9)
    outputs = model._outputs(X).numpy()
    np.testing.assert_allclose(heads.predict(X), outputs, atol=1e-10)
    np.testing.assert_allclose(heads.to_coef(), model._solution[0].numpy(), atol=1e-12)
    merged = heads.merge()
    assert len(merged) <= len(heads)
    assert merged.objective(X, y, weight) == pytest.approx(primal, rel=1e-9)
    np.testing.assert_allclose(merged.predict(X), outputs, atol=1e-9)
    network = heads.to_torch()
    tokens = torch.as_tensor(X if X.ndim == 3 else X[:, :, None])
    np.testing.assert_allclose(network(tokens).detach().numpy(), outputs, atol=1e-10)
    options = {"alpha": heads.alpha, "loss": heads.loss, "penalty": heads.penalty, "targets": heads.targets}
    assert Heads.from_torch(network, **options).objective(X, y, weight) == pytest.approx(primal, rel=1e-9)
    # Any prox-based solution has exact zeros, and every head pays for itself.
    assert (heads.penalty.factor_cost(torch.as_tensor(heads.w2), torch.as_tensor(heads.w3)) > 0).all()


def test_positive_and_negative_parts_merge_for_tokens_of_width_one():
    X, y = data(60, 6, 1, 1)
    heads = ConvexAttentionRegressor(0.01, tol=1e-8).fit(X[:, :, 0], y[:, 0]).heads_
    assert len(heads) == 6
    assert len(heads.merge()) <= 2
    np.testing.assert_allclose(heads.merge().w1.sum(1), 1.0)


@PROPERTY
@given(seed=st.integers(0, 10_000), n_heads=st.integers(1, 9), penalty=st.sampled_from(PENALTIES), gated=st.booleans())
def test_any_network_is_a_feasible_point_of_the_program(seed, n_heads, penalty, gated):
    X, y = data(30, 3, 2, 2, seed=seed)
    gates = some_gates(seed=seed) if gated else None
    network = ConvexAttention(3, 2, 2, n_heads, gates=gates, seed=seed).double()
    heads = Heads.from_torch(network, alpha=0.3, penalty=penalty)
    program = attention_program(X, y, alpha=0.3, penalty=penalty, gates=gates, fit_intercept=True)
    coef = torch.as_tensor(heads.to_coef())
    certificate = certify(program, coef, torch.as_tensor(heads.intercept))
    assert certificate.primal <= heads.objective(X, y) * (1 + 1e-12)
    assert certificate.dual <= certificate.primal
    np.testing.assert_allclose(program.map.matvec(coef).numpy() + heads.intercept, heads.predict(X), atol=1e-10)
    by_network = network.objective(torch.as_tensor(X), torch.as_tensor(y), alpha=0.3, penalty=penalty)
    assert by_network.item() == pytest.approx(heads.objective(X, y), rel=1e-12)


@pytest.mark.parametrize("simplex", ["softmax", "projection"])
@pytest.mark.parametrize("gates", [None, some_gates()], ids=["linear", "gated"])
@pytest.mark.parametrize(("loss", "penalty"), [("squared", "group_l2"), ("softmax", "nuclear")])
def test_trained_networks_never_beat_the_bound(loss, penalty, gates, simplex):
    X, y = data(30, 3, 2, 3)
    y = np.eye(3)[y.argmax(1)] if loss == "softmax" else y
    program = attention_program(X, y, alpha=0.05, loss=loss, penalty=penalty, gates=gates, fit_intercept=True)
    bound = solve(program, Fista(), tol=1e-6).certificate.dual
    tokens, targets = torch.as_tensor(X), torch.as_tensor(y)
    for seed in range(3):
        for n_heads in (1, 6):
            network = ConvexAttention(3, 2, 3, n_heads, gates=gates, simplex=simplex, seed=seed).double()
            history = train(network, tokens, targets, alpha=0.05, loss=loss, penalty=penalty, lr=0.05, n_steps=150)
            assert min(history.objective) >= bound


@pytest.mark.parametrize("penalty", PENALTIES)
def test_with_enough_heads_and_restarts_training_comes_within_a_thousandth(penalty):
    X, y = data(30, 3, 2, 2)
    certificate = solve(attention_program(X, y, alpha=0.2, penalty=penalty), Fista(), tol=1e-10).certificate
    tokens, targets = torch.as_tensor(X), torch.as_tensor(y)
    networks = [ConvexAttention(3, 2, 2, 16, bias=False, seed=seed).double() for seed in range(3)]
    best = min(
        train(network, tokens, targets, alpha=0.2, penalty=penalty, lr=0.4, n_steps=500).objective[-1]
        for network in networks
    )
    assert certificate.dual <= best <= certificate.primal * (1 + 1e-3)


def test_zero_solution_has_no_heads_and_predicts_the_best_constant():
    X, y = data(c=1)
    model = ConvexAttentionRegressor(alpha=1.0).fit(X, y[:, 0])
    model = ConvexAttentionRegressor(alpha=1.001 * model.alpha_max_).fit(X, y[:, 0])
    assert len(model.heads_) == len(model.heads_.merge()) == 0
    assert (model.coef_ == 0).all()
    np.testing.assert_allclose(model.predict(X), y.mean())
    network = model.heads_.to_torch()
    np.testing.assert_allclose(network(torch.as_tensor(X)).detach().numpy(), y.mean())
    assert len(ConvexAttentionRegressor(alpha=0.98 * model.alpha_max_).fit(X, y[:, 0]).heads_) > 0


def test_heads_refuse_weights_that_are_no_attention():
    good = {"w1": np.eye(2), "w2": np.ones((2, 3)), "w3": np.ones((2, 1)), "intercept": np.zeros(1)}
    rest = {"loss": "squared", "penalty": "nuclear", "alpha": 0.1}
    Heads(**good, **rest)
    for name, wrong in {
        "w1": np.full((2, 2), 0.7),
        "w2": np.ones((3, 3)),
        "intercept": np.zeros(2),
        "gate_index": np.zeros(2, dtype=int),
    }.items():
        with pytest.raises(ValueError, match=name):
            Heads(**{**good, name: wrong}, **rest)


def test_network_round_trips_through_state_dict_with_its_gates():
    first = ConvexAttention(3, 2, 2, 6, gates=some_gates(seed=5), seed=0)
    second = ConvexAttention(3, 2, 2, 6, gates=some_gates(seed=6), seed=1)
    second.load_state_dict(first.state_dict())
    tokens = torch.randn(20, 3, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first(tokens), second(tokens))


@PROPERTY
@given(seed=st.integers(0, 10_000), n=st.integers(1, 7))
def test_projection_is_the_nearest_point_of_the_simplex(seed, n):
    from convexformer.nn import project_to_simplex

    rng = np.random.default_rng(seed)
    rows = torch.as_tensor(3 * rng.normal(size=(4, n)))
    projected = project_to_simplex(rows)
    assert (projected >= 0).all()
    torch.testing.assert_close(projected.sum(1), torch.ones(4, dtype=torch.float64))
    others = torch.as_tensor(rng.dirichlet(np.ones(n), size=(50, 4)))
    # Variational inequality of a projection.
    assert ((others - projected) * (rows - projected)).sum(-1).max() <= 1e-12
    torch.testing.assert_close(project_to_simplex(projected), projected)

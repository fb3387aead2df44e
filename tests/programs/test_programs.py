"""The estimators solve the programs of the theorems: cvxpy on the printed maths, and the non-convex network itself."""

import cvxpy as cp
import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.sparse import csr_array
from scipy.special import xlogy

from convexformer import ConvexAttentionClassifier, ConvexAttentionRegressor
from convexformer.gates import Gates, generate_gates
from convexformer.programs import attention_map, attention_program

# One case per loss, with a Huber threshold that both sides of it are met at.
REGRESSION = ("squared", "huber", "poisson")
MARGINS = ("logistic", "squared_hinge")


def mean_loss(loss, pred, y, weight):
    """Weighted mean of the printed losses, targets as users have them (labels as signs or one-hot rows)."""
    share = (weight / weight.sum())[:, None]
    if loss == "squared":
        each = cp.square(pred - y) / 2
    elif loss == "huber":
        each = cp.huber(pred - y, 1.35) / 2
    elif loss == "poisson":
        # Deviance: zero where the mean is the count.
        each = cp.exp(pred) - cp.multiply(y, pred) + (xlogy(y, y) - y)
    elif loss == "logistic":
        each = cp.logistic(-cp.multiply(y, pred))
    elif loss == "squared_hinge":
        each = cp.square(cp.pos(1 - cp.multiply(y, pred)))
    else:
        return cp.sum(cp.multiply(share[:, 0], cp.log_sum_exp(pred, axis=1) - cp.sum(cp.multiply(y, pred), axis=1)))
    return cp.sum(cp.multiply(share, each))


def by_hand(X, y, weight, loss, penalty, alpha, gates, intercept=True):
    """Optimum of the printed program: ``Z[g][k]`` is the ``d x c`` block of gate ``g`` and token ``k``."""
    n_samples, n_tokens, n_features = X.shape
    n_outputs = y.shape[1]
    if gates is None:
        open_ = np.ones((n_samples, 1))
    else:
        open_ = np.array([[float(u1 @ x @ u2 >= 0) for u1, u2 in zip(*gates, strict=True)] for x in X])
    pred, decay = np.zeros((n_samples, n_outputs)), 0
    if intercept:
        pred = np.ones((n_samples, 1)) @ cp.Variable((1, n_outputs))
    for g in range(open_.shape[1]):
        for k in range(n_tokens):
            Z = cp.Variable((n_features, n_outputs))
            pred = pred + (open_[:, [g]] * X[:, k]) @ Z
            decay = decay + (cp.normNuc(Z) if penalty == "nuclear" else cp.sum(cp.norm(Z, 2, axis=0)))
    return cp.Problem(cp.Minimize(mean_loss(loss, pred, y, weight) + alpha * decay)).solve(solver="CLARABEL")


def gate_arrays(n_tokens, n_features, n_gates=4):
    rng = np.random.default_rng(7)
    return rng.normal(size=(n_gates, n_tokens)), rng.normal(size=(n_gates, n_features))


@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
@pytest.mark.parametrize("loss", [*REGRESSION, *MARGINS, "softmax"])
def test_estimators_attain_the_optimum_of_the_printed_program(make_problem, loss, penalty, gated):
    X, y = make_problem(loss, n_samples=30, n_outputs=2, n_classes=3)
    if loss == "huber":
        y = 4 * y
    weight = np.random.default_rng(1).uniform(0.2, 2, len(X))
    gates = gate_arrays(3, 2) if gated else None
    options = {"loss": loss, "penalty": penalty, "tol": 1e-8, "max_iter": 50_000}
    if gated:
        options |= {"activation": "gated_relu", "gates": gates}
    if loss in REGRESSION:
        model, targets = ConvexAttentionRegressor(0.04, **options), y
    else:
        model = ConvexAttentionClassifier(0.04, **options)
        targets = (y[:, None] == np.unique(y)).astype(float)
        targets = targets if loss == "softmax" else 2 * targets - 1
    model.fit(X, y, sample_weight=weight)
    wanted = by_hand(X, targets, weight, loss, penalty, 0.04, gates)
    assert model.certificate_.primal == pytest.approx(wanted, rel=1e-6)
    assert model.certificate_.dual == pytest.approx(wanted, rel=1e-6)
    assert len(model.heads_) > 0


@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_scalar_program_of_theorem_1_without_intercept(make_problem, loss, gated):
    X, y = make_problem(loss)
    gates = gate_arrays(3, 2) if gated else None
    options = {"loss": loss, "tol": 1e-8, "fit_intercept": False}
    if gated:
        options |= {"activation": "gated_relu", "gates": gates}
    if loss == "squared":
        model, targets = ConvexAttentionRegressor(0.1, **options).fit(X, y), y
    else:
        model, targets = ConvexAttentionClassifier(0.02, **options).fit(X, y), np.where(y == np.unique(y)[1], 1, -1)
    wanted = by_hand(X, targets[:, None], np.ones(len(X)), loss, "group_l2", model.alpha, gates, intercept=False)
    assert model.intercept_ == 0.0
    assert model.certificate_.primal == pytest.approx(wanted, rel=1e-6)
    # Theorem 1: no more heads than tokens (and gates).
    assert len(model.heads_) <= 3 * (len(model.gates_) if gated else 1)


@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
@pytest.mark.parametrize("n_outputs", [1, 2, 5])
def test_number_of_heads_is_within_the_bound_of_the_theorems(make_problem, penalty, n_outputs):
    X, y = make_problem(n_tokens=3, n_features=2, n_outputs=n_outputs, n_samples=60)
    heads = ConvexAttentionRegressor(0.001, penalty=penalty, tol=1e-6).fit(X, y).heads_
    # n c for the l1 norm of w3; n min(d, c) for its l2 norm. A tiny alpha uses every one of them.
    assert len(heads) == 3 * (n_outputs if penalty == "group_l2" else min(2, n_outputs))


def test_the_penalties_agree_for_one_output(make_problem):
    X, y = make_problem()
    first, second = (
        ConvexAttentionRegressor(0.1, penalty=name, tol=1e-12).fit(X, y) for name in ("group_l2", "nuclear")
    )
    np.testing.assert_allclose(first.coef_, second.coef_, atol=1e-6)


@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
@pytest.mark.parametrize("n_outputs", [1, 2])
def test_minimising_over_the_heads_themselves_attains_the_certified_optimum(make_problem, penalty, n_outputs):
    # The non-convex problem written out and handed to L-BFGS from several starts: no convexity, no package code.
    X, y = make_problem(n_samples=20, n_outputs=n_outputs)
    n_heads, alpha, targets = 8, 0.15, y.reshape(len(y), -1)
    # L-BFGS stumbles over the kinks of the l1 norm of w3; a head with one nonzero output has none, and these suffice.
    used = np.ones((n_heads, n_outputs))
    if penalty == "group_l2":
        used = np.eye(n_outputs)[np.arange(n_heads) % n_outputs]

    def objective(flat):
        free, w2, w3 = np.split(flat.reshape(n_heads, -1), [3, 5], axis=1)
        w1 = np.exp(free - free.max(1, keepdims=True))
        w1 /= w1.sum(1, keepdims=True)
        w3 = w3 * used
        pooled = np.einsum("ikd,mk,md->im", X, w1, w2)
        residual = pooled @ w3 - targets
        value = (residual**2).sum() / (2 * len(X)) + alpha * ((w2**2).sum() + (w3**2).sum()) / 2
        back = residual @ w3.T / len(X)
        by_token = np.einsum("im,ikd,md->mk", back, X, w2)
        gradient = (
            w1 * (by_token - (w1 * by_token).sum(1, keepdims=True)),
            np.einsum("im,ikd,mk->md", back, X, w1) + alpha * w2,
            used * (pooled.T @ residual / len(X) + alpha * w3),
        )
        return value, np.concatenate(gradient, axis=1).ravel()

    rng = np.random.default_rng(0)
    starts = rng.normal(size=(6, n_heads * (5 + n_outputs)))
    ends = [minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 5000}).fun for start in starts]
    model = ConvexAttentionRegressor(alpha, penalty=penalty, fit_intercept=False, tol=1e-9).fit(X, y)
    assert min(ends) >= model.certificate_.dual
    assert min(ends) == pytest.approx(model.certificate_.primal, rel=1e-3)


@pytest.mark.parametrize("solver", ["exact", "fista"])
def test_every_solver_gives_the_same_network(make_problem, solver):
    X, y = make_problem("softmax", n_classes=3)
    model = ConvexAttentionClassifier(0.03, solver=solver, tol=1e-7).fit(X, y)
    reference = ConvexAttentionClassifier(0.03, tol=1e-9).fit(X, y)
    assert model.certificate_.primal == pytest.approx(reference.certificate_.primal, rel=1e-7)
    np.testing.assert_array_equal(model.token_norms_ > 0, reference.token_norms_ > 0)


# Invariances of the programs


def rotation(width):
    return np.linalg.qr(np.random.default_rng(3).normal(size=(width, width)))[0]


@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
def test_rotating_the_features_rotates_the_coefficients(make_problem, penalty):
    X, y = make_problem(n_features=3, n_outputs=2)
    turn = rotation(3)
    first = ConvexAttentionRegressor(0.1, penalty=penalty, tol=1e-11).fit(X, y)
    second = ConvexAttentionRegressor(0.1, penalty=penalty, tol=1e-11).fit(X @ turn, y)
    np.testing.assert_allclose(turn @ second.coef_, first.coef_, atol=1e-4)
    assert second.alpha_max_ == pytest.approx(first.alpha_max_, rel=1e-10)


def test_rotating_the_outputs_is_free_for_the_nuclear_norm_and_costs_for_the_group_norm(make_problem):
    X, y = make_problem(n_outputs=3)

    def optimum(penalty, targets):
        return ConvexAttentionRegressor(0.1, penalty=penalty, tol=1e-9).fit(X, targets).certificate_.primal

    assert optimum("nuclear", y @ rotation(3)) == pytest.approx(optimum("nuclear", y), rel=1e-7)
    assert optimum("group_l2", y @ rotation(3)) != pytest.approx(optimum("group_l2", y), rel=1e-3)


def test_reordering_tokens_reorders_the_solution(make_problem):
    X, y = make_problem(n_tokens=4)
    order = [2, 0, 3, 1]
    first, second = (ConvexAttentionRegressor(0.1, tol=1e-11).fit(data, y) for data in (X, X[:, order]))
    np.testing.assert_allclose(second.coef_, first.coef_[order], atol=1e-5)
    np.testing.assert_allclose(second.token_norms_, first.token_norms_[order], atol=1e-5)


def test_units_of_data_and_targets(make_problem):
    # X -> s X needs alpha -> s alpha, y -> s y needs alpha -> s alpha: the objective is s^0 and s^2 times the old one.
    X, y = make_problem()
    model = ConvexAttentionRegressor(0.1, tol=1e-10).fit(X, y)
    scaled = ConvexAttentionRegressor(0.1 * 1000, tol=1e-10).fit(1000 * X, y)
    np.testing.assert_allclose(1000 * scaled.coef_, model.coef_, atol=1e-5)
    small = ConvexAttentionRegressor(0.1 * 1e-6, tol=1e-10).fit(X, 1e-6 * y)
    np.testing.assert_allclose(1e6 * small.coef_, model.coef_, atol=1e-5)
    assert small.certificate_.primal == pytest.approx(1e-12 * model.certificate_.primal, rel=1e-8)


def test_shifting_the_targets_moves_the_intercept_alone(make_problem):
    X, y = make_problem(n_outputs=2)
    model = ConvexAttentionRegressor(0.1, tol=1e-11).fit(X, y)
    shift = np.array([100.0, -7.0])
    shifted = ConvexAttentionRegressor(0.1, tol=1e-11).fit(X, y + shift)
    np.testing.assert_allclose(shifted.coef_, model.coef_, atol=1e-5)
    np.testing.assert_allclose(shifted.intercept_, model.intercept_ + shift, atol=1e-5)


def test_a_map_takes_gates_or_their_masks():
    tokens = torch.randn((12, 3, 2), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gates = Gates(*(np.random.RandomState(0).standard_normal((4, width)) for width in (3, 2)))
    coef = torch.randn((4, 3, 2, 1), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(
        attention_map(tokens, gates).matvec(coef), attention_map(tokens, masks=gates.masks(tokens)).matvec(coef)
    )


@pytest.mark.parametrize("build", [attention_program, generate_gates])
def test_a_pair_with_a_mask_is_no_array(make_problem, build):
    X, y = make_problem()
    with pytest.raises(ValueError, match="X must be one array, got a pair of tokens and lengths or a mask"):
        build((X, np.ones(X.shape[:2], dtype=bool)), y, alpha=0.1)


@pytest.mark.parametrize("build", [attention_program, generate_gates])
def test_none_is_no_alpha(make_problem, build):
    X, y = make_problem()
    with pytest.raises(ValueError, match="alpha must be a positive finite number, got None"):
        build(X, y, alpha=None)


@pytest.mark.parametrize("name", ["X", "y", "sample_weight"])
def test_sparse_matrices(make_problem, name):
    X, y = make_problem(ndim=2)
    given = {"X": X, "y": y, "sample_weight": np.ones(len(X))} | {name: csr_array(X)}
    with pytest.raises(ValueError, match=rf"{name} must be a dense matrix.*give {name}\.toarray\(\)"):
        attention_program(**given, alpha=0.1)

"""Errors of the printed paper as regression tests: each shows that the printed form is wrong and ours is not."""

import cvxpy as cp
import numpy as np
import pytest
import torch

from convexformer import (
    ConvexAttention,
    ConvexAttentionRegressor,
    Heads,
    attention_program,
    pad_sequences,
    sequence_program,
)
from convexformer.nn import train
from convexformer.solvers import Fista, GroupL2, get_penalty, solve


def small_problem(n_outputs=2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(40, 3, 2))
    return X, X.reshape(40, -1) @ rng.normal(size=(6, n_outputs)) + 0.1 * rng.normal(size=(40, n_outputs))


def test_unbalanced_split_has_the_same_output_and_a_higher_decay():
    X, y = small_problem()
    heads = ConvexAttentionRegressor(alpha=0.1, tol=1e-8).fit(X, y).heads_
    size = np.linalg.norm(heads.w2, axis=1, keepdims=True)
    printed = Heads(heads.w1, heads.w2 / size, heads.w3 * size, heads.intercept, heads.loss, heads.penalty, heads.alpha)
    np.testing.assert_allclose(printed.predict(X), heads.predict(X), atol=1e-12)
    assert printed.decay() > heads.decay() * 1.01
    assert printed.objective(X, y) > heads.objective(X, y)


def test_sequence_counterexample():
    # X = [1; 1], Y = [1; 0], beta = .01, loss (1/2)|.|^2: equal row sums cannot treat the two target rows apart.
    X, Y, beta = np.ones(2), np.array([1.0, 0.0]), 0.01
    plus, minus = cp.Variable((2, 2), nonneg=True), cp.Variable((2, 2), nonneg=True)
    s = cp.Variable(2, nonneg=True)
    equal_rows = [cp.sum(plus, axis=1) == s[0], cp.sum(minus, axis=1) == s[1]]
    fit = 0.5 * cp.sum_squares((plus - minus) @ X - Y)
    exact = cp.Problem(cp.Minimize(fit + beta * cp.sum(s)), equal_rows).solve(solver="CLARABEL")
    printed_decay = cp.max(cp.sum(plus + minus, axis=1))
    printed = cp.Problem(cp.Minimize(fit + beta * printed_decay)).solve(solver="CLARABEL")
    assert exact == pytest.approx(0.254975, abs=1e-7)
    assert printed == pytest.approx(0.00995, abs=1e-7)


def test_one_maximum_of_row_sums_for_both_signs_is_a_relaxation_for_substochastic_attention_too():
    # Attention is not negative: targets of either sign need a head each, which a norm of their difference does not say.
    X, Y, alpha = np.eye(2), np.array([[1.0, 0.0], [0.0, -1.0]]), 0.05
    program = sequence_program(X[:, :, None], Y[:, :, None], alpha=alpha, form="substochastic")
    certificate = solve(program, Fista(), tol=1e-9).certificate
    plus, minus = cp.Variable((2, 2), nonneg=True), cp.Variable((2, 2), nonneg=True)
    fit = cp.sum_squares(X @ (plus - minus).T - Y) / 4

    def optimum(*matrices):
        decay = sum(cp.max(cp.sum(matrix, axis=1)) for matrix in matrices)
        return cp.Problem(cp.Minimize(fit + alpha * decay)).solve(solver="CLARABEL")

    assert certificate.primal == pytest.approx(optimum(plus, minus), rel=1e-6)
    assert optimum(plus + minus) < 0.6 * certificate.dual


@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
def test_the_penalty_weighs_alpha_and_not_half_of_it(penalty):
    # Equation (24) prints beta / 2. With half the weight the convex value would lie below what any network attains.
    X, y = small_problem()
    tokens, targets = torch.as_tensor(X), torch.as_tensor(y)
    best = min(
        train(
            ConvexAttention(3, 2, 2, n_heads=12, seed=seed, bias=False).double(),
            tokens,
            targets,
            alpha=0.3,
            penalty=penalty,
            lr=0.05,
            n_steps=800,
        ).objective[-1]
        for seed in range(2)
    )
    whole = solve(attention_program(X, y, alpha=0.3, penalty=penalty), Fista(), tol=1e-9).certificate
    half = solve(attention_program(X, y, alpha=0.15, penalty=penalty), Fista(), tol=1e-9).certificate
    assert whole.dual <= best <= whole.primal * 1.01
    assert half.primal < 0.9 * best


def test_the_l1_form_decouples_outputs_and_the_standard_form_does_not():
    X, y = small_problem(n_outputs=3)
    joint = {p: ConvexAttentionRegressor(alpha=0.3, penalty=p, tol=1e-9).fit(X, y) for p in ("group_l2", "nuclear")}
    apart = [ConvexAttentionRegressor(alpha=0.3, tol=1e-9).fit(X, y[:, k]) for k in range(3)]
    total = sum(model.certificate_.primal for model in apart)
    assert joint["group_l2"].certificate_.primal == pytest.approx(total, rel=1e-7)
    # Sharing features is cheaper: nuclear <= sum of column norms, here strictly.
    assert joint["nuclear"].certificate_.primal < 0.99 * total


def test_padding_with_zero_rows_changes_nothing_and_stays_unused():
    X, y = small_problem(n_outputs=1)
    padded = pad_sequences(list(X), n_tokens=5)
    plain = ConvexAttentionRegressor(alpha=0.05, tol=1e-9).fit(X, y[:, 0])
    longer = ConvexAttentionRegressor(alpha=0.05, tol=1e-9).fit(padded, y[:, 0])
    assert longer.certificate_.primal == pytest.approx(plain.certificate_.primal, rel=1e-8)
    assert (longer.token_norms_[3:] == 0).all()


def test_adam_on_the_norms_gives_no_exact_zeros_and_proximal_steps_do():
    X, y = small_problem(n_outputs=1)
    program = attention_program(X, y, alpha=1.0)
    program = program.with_alpha(0.6 * program.alpha_max)
    coef = torch.zeros(program.coef_shape, dtype=torch.float64).add_(0.01).requires_grad_()
    optimizer = torch.optim.Adam([coef], lr=1e-2)
    for _ in range(1000):
        optimizer.zero_grad()
        program.primal(coef).backward()
        optimizer.step()
    certified = solve(program, Fista(), tol=1e-9).coef
    assert (GroupL2().group_values(coef.detach()) > 0).all()
    assert (GroupL2().group_values(certified) == 0).any()


def test_spec_check_of_standard_decay_needs_enough_heads():
    # n = 3, d = c = 2: with twelve heads the network reaches the convex optimum, with one it cannot.
    rng = np.random.default_rng(3)
    X, y = rng.normal(size=(20, 3, 2)), 2 * rng.normal(size=(20, 2))
    tokens, targets = torch.as_tensor(X), torch.as_tensor(y)
    bound = solve(attention_program(X, y, alpha=0.1, penalty="nuclear"), Fista(), tol=1e-10).certificate

    def best_of(n_heads):
        networks = (ConvexAttention(3, 2, 2, n_heads, seed=seed, bias=False).double() for seed in range(3))
        options = {"alpha": 0.1, "penalty": get_penalty("nuclear"), "lr": 0.1, "n_steps": 400}
        return min(train(network, tokens, targets, **options).objective[-1] for network in networks)

    assert bound.dual <= best_of(12) <= bound.primal * (1 + 1e-3)
    assert best_of(1) > bound.primal * 1.02

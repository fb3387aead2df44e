"""Convex-attention heads for sequence targets: their formula, their loss, and the exact convex program's bound."""

import cvxpy as cp
import numpy as np
import pytest
import torch

from convexformer import ConvexAttention
from convexformer.nn import SequenceAttention, sample_losses, train
from convexformer.solvers import get_loss

SIMPLEX = pytest.mark.parametrize("simplex", ["softmax", "projection"])


def randn(*shape, seed=0):
    return torch.as_tensor(np.random.default_rng(seed).normal(size=shape))


def exact_value(X, Y, alpha):
    """Optimum of the program with equal row sums of spec and erratum: mean squared loss, sequence targets, no bias."""
    n_samples, n, d = X.shape
    T, c = Y.shape[1:]
    pred = [[0 for _ in range(c)] for _ in range(n_samples)]
    decay, constraints = 0, []
    for q in range(d):
        for k in range(c):
            sides = [cp.Variable((T, n), nonneg=True) for _ in range(2)]
            for side in sides:
                size = cp.Variable(nonneg=True)
                constraints.append(cp.sum(side, axis=1) == size)
                decay += size
            for i in range(n_samples):
                pred[i][k] = pred[i][k] + (sides[0] - sides[1]) @ X[i, :, q]
    fit = sum(cp.sum_squares(pred[i][k] - Y[i, :, k]) for i in range(n_samples) for k in range(c))
    return cp.Problem(cp.Minimize(fit / (2 * n_samples) + alpha * decay), constraints).solve(solver="CLARABEL")


@SIMPLEX
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_targets", [None, 5])
def test_output_is_the_formula(simplex, bias, n_targets):
    network = SequenceAttention(4, 2, 3, 7, n_targets, simplex, bias, seed=1).double()
    if bias:
        torch.nn.init.normal_(network.bias, generator=torch.Generator().manual_seed(0))
    X = randn(6, 4, 2)
    wanted = torch.stack(
        [
            sum(
                network.w1[j] @ X[i] @ network.w2[j][:, None] @ network.w3[j][None]  # (T, c)
                for j in range(7)
            )
            for i in range(6)
        ]
    )
    wanted = wanted + network.bias if bias else wanted
    assert network(X).shape == (6, n_targets or 4, 3)
    torch.testing.assert_close(network(X), wanted, rtol=0, atol=1e-12)
    assert network.w1.shape == (7, n_targets or 4, 4)
    assert (network.w1 >= 0).all()
    torch.testing.assert_close(network.w1.sum(-1), torch.ones(7, n_targets or 4, dtype=torch.float64))


@SIMPLEX
def test_one_target_position_is_convex_attention(simplex):
    sequence = SequenceAttention(4, 2, 3, 5, n_targets=1, simplex=simplex, seed=3).double()
    heads = ConvexAttention(4, 2, 3, 5, simplex=simplex).double()
    with torch.no_grad():
        for name, weight in heads.named_parameters():
            weight.copy_(getattr(sequence, name).reshape(weight.shape))
    X, y = randn(6, 4, 2), randn(6, 3, seed=1)
    torch.testing.assert_close(sequence(X)[:, 0], heads(X))
    for penalty in ("group_l2", "nuclear"):
        mine, theirs = (part.objective(X, y, penalty=penalty, alpha=0.2) for part in (sequence, heads))
        torch.testing.assert_close(mine, theirs)


def test_the_default_decay_is_half_the_squared_l1_norms():
    network = SequenceAttention(3, 4, 2, 5).double()
    w2, w3 = network.w2.detach().numpy(), network.w3.detach().numpy()
    wanted = 0.5 * ((np.abs(w2).sum(1) ** 2).sum() + (np.abs(w3).sum(1) ** 2).sum())
    assert network.decay().item() == pytest.approx(wanted, rel=1e-12)
    # The l2 norm of w2 is smaller, that of w3 too.
    assert network.decay().item() > network.decay("group_l2").item() > network.decay("nuclear").item()


@pytest.mark.parametrize("loss", ["squared", "huber", "logistic"])
def test_the_loss_of_a_sequence_is_that_of_its_flattened_outputs(loss):
    pred, y = randn(6, 4, 3), randn(6, 4, 3, seed=1)
    y = y.sign() if loss == "logistic" else y
    wanted = get_loss(loss).value(pred.flatten(1), y.flatten(1))
    torch.testing.assert_close(sample_losses(pred, y, loss), wanted)
    torch.testing.assert_close(sample_losses(pred, y.flatten(1), loss), wanted)


def test_cross_entropy_of_a_sequence_is_summed_over_positions():
    pred = randn(6, 4, 3)
    labels = randn(6, 4, 3, seed=1).argmax(-1)
    wanted = torch.nn.functional.cross_entropy(pred.transpose(1, 2), labels, reduction="none").sum(1)
    one_hot = torch.nn.functional.one_hot(labels, 3).double()
    torch.testing.assert_close(sample_losses(pred, one_hot, "softmax"), wanted)


@pytest.mark.parametrize("shape", [(6,), (6, 3), (5, 4, 3)])
def test_targets_that_do_not_fit_are_named(shape):
    with pytest.raises(ValueError, match=r"y must have shape \(6, 4, 3\)"):
        sample_losses(torch.zeros(6, 4, 3), torch.zeros(shape))


def test_no_network_is_below_the_optimum_of_the_counterexample_to_the_printed_program():
    # X = [1; 1], Y = [1; 0]: the printed form would allow .00995.
    X, Y = torch.ones(1, 2, 1, dtype=torch.float64), torch.tensor([[[1.0], [0.0]]], dtype=torch.float64)
    ends = []
    for n_heads in (1, 4):
        network = SequenceAttention(2, 1, 1, n_heads, bias=False).double()
        history = train(network, X, Y, alpha=0.01, lr=0.1, n_steps=200)
        assert min(history.objective) >= 0.254975 - 1e-12
        ends.append(history.objective[-1])
    assert min(ends) == pytest.approx(0.254975, abs=1e-6)


def test_training_comes_close_to_the_exact_program_and_never_below():
    X, Y = randn(15, 3, 2), randn(15, 2, 1, seed=1)
    Y[:, 0] += X[:, 1, :1] - X[:, 0, 1:]
    Y[:, 1] += X[:, 2, :1]
    optimum = exact_value(X.numpy(), Y.numpy(), 0.1)
    best = []
    for seed in range(2):
        network = SequenceAttention(3, 2, 1, 8, n_targets=2, bias=False, seed=seed).double()
        history = train(network, X, Y, alpha=0.1, lr=0.1, n_steps=400)
        assert min(history.objective) >= optimum - 1e-8
        best.append(history.final_objective)
    assert min(best) == pytest.approx(optimum, rel=2e-3)


@SIMPLEX
@pytest.mark.parametrize("penalty", [None, "group_l2", "nuclear"])
def test_gradients_are_those_of_finite_differences(simplex, penalty):
    network = SequenceAttention(3, 2, 2, 3, simplex=simplex, seed=2).double()
    X, Y = randn(5, 3, 2), randn(5, 3, 2, seed=1)
    names, values = zip(*network.named_parameters(), strict=True)

    class Objective(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network

        def forward(self):
            return self.inner.objective(X, Y, penalty=penalty, alpha=0.1)

    def objective(*changed):
        weights = {f"inner.{name}": value for name, value in zip(names, changed, strict=True)}
        return torch.func.functional_call(Objective(), weights, ())

    assert torch.autograd.gradcheck(objective, values)


def test_state_dict_round_trip():
    first, second = (SequenceAttention(3, 2, 2, 4, seed=seed) for seed in (0, 1))
    X = randn(5, 3, 2).float()
    assert not torch.equal(first(X), second(X))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(X), second(X))


@pytest.mark.parametrize("name", ["n_tokens", "n_features", "n_outputs", "n_heads", "n_targets"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_bad_sizes_are_named(name, value):
    sizes = {"n_tokens": 3, "n_features": 2, name: value}
    with pytest.raises(ValueError, match=f"{name} must be a positive integer"):
        SequenceAttention(**sizes)


def test_bad_simplex_is_named():
    with pytest.raises(ValueError, match="simplex must be"):
        SequenceAttention(3, 2, simplex="cube")


def test_a_bias_is_true_or_false():
    with pytest.raises(ValueError, match="bias must be True or False, got 'no'"):
        SequenceAttention(3, 2, bias="no")

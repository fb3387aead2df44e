"""Softmax self-attention: its formula, its symmetries, what it decays, and that it learns."""

import math

import numpy as np
import pytest
import torch

from convexformer.nn import SoftmaxAttention, train


def randn(*shape, seed=0):
    return torch.as_tensor(np.random.default_rng(seed).normal(size=shape))


def network(**options):
    return SoftmaxAttention(4, 2, **{"n_heads": 3, "head_width": 2, **options}).double()


def same_weights(**options):
    """The same network but for an option that is no weight."""
    changed = network(**options)
    changed.load_state_dict(network().state_dict())
    return changed


@pytest.mark.parametrize("scale", [None, 1.0])
def test_output_is_the_formula(scale):
    layer, X = network(scale=scale, seed=1), randn(5, 6, 4)
    factor = 1 / math.sqrt(2) if scale is None else scale
    for i in range(5):
        wanted = layer.bias.expand(6, 2)
        for wq, wk, wv, wo in zip(layer.wq, layer.wk, layer.wv, layer.wo, strict=True):
            weights = torch.exp(factor * X[i] @ wq @ wk.T @ X[i].T)
            wanted = wanted + weights / weights.sum(1, keepdim=True) @ X[i] @ wv @ wo
        torch.testing.assert_close(layer(X)[i], wanted)


def test_it_is_the_attention_of_torch():
    layer, X = network(n_heads=1), randn(5, 6, 4)
    mixed = torch.nn.functional.scaled_dot_product_attention(X @ layer.wq[0], X @ layer.wk[0], X @ layer.wv[0])
    torch.testing.assert_close(layer(X), mixed @ layer.wo[0] + layer.bias)


def test_without_queries_it_reads_the_mean_token():
    layer, X = network(), randn(5, 6, 4)
    with torch.no_grad():
        layer.wq.zero_()
    wanted = X.mean(1) @ torch.einsum("hdw,hwc->dc", layer.wv, layer.wo) + layer.bias
    torch.testing.assert_close(layer(X), wanted[:, None].expand(5, 6, 2))


def test_permuted_tokens_give_permuted_rows():
    layer, X = network(), randn(5, 6, 4)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    torch.testing.assert_close(layer(X[:, order]), layer(X)[:, order])
    mean = same_weights(position="mean")
    torch.testing.assert_close(mean(X[:, order]), mean(X))


@pytest.mark.parametrize("position", [0, 4, -1])
def test_one_position_is_that_row(position):
    X = randn(5, 6, 4)
    torch.testing.assert_close(same_weights(position=position)(X), network()(X)[:, position])


def test_the_mean_is_the_mean_over_rows():
    X = randn(5, 6, 4)
    torch.testing.assert_close(same_weights(position="mean")(X), network()(X).mean(1))


@pytest.mark.parametrize(("position", "rows"), [(None, 6), (2, 1), ("mean", 1)])
def test_attention_is_in_the_simplex(position, rows):
    weights = network(position=position).attention(randn(5, 6, 4))
    assert weights.shape == (5, 3, rows, 6)
    assert (weights > 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(5, 3, rows, dtype=torch.float64))


def test_decay_is_half_the_squares_of_the_named_weights():
    squares = {name: (weight**2).sum().item() for name, weight in network().named_parameters()}
    wanted = {"all": ("wq", "wk", "wv", "wo"), "values": ("wv", "wo"), "none": ()}
    for decay_on, names in wanted.items():
        layer = same_weights(decay_on=decay_on)
        assert layer.decay().item() == pytest.approx(0.5 * sum(squares[name] for name in names), rel=1e-12)
        # No penalty of the convex programs changes it.
        assert torch.equal(layer.decay("nuclear"), layer.decay())


def test_scores_and_outputs_are_of_order_one_whatever_the_sizes():
    for width, heads, d in ((1, 1, 8), (16, 2, 8), (8, 8, 128)):
        layer = SoftmaxAttention(d, 3, heads, width, position=0).double()
        X = randn(200, 1, d)
        assert 0.3 < layer(X).std().item() < 3  # with one token the output is X Wv Wo
        queries, keys = X[:, 0] @ layer.wq, randn(200, d, seed=1) @ layer.wk  # (heads, 200, width)
        assert 0.3 < (layer.scale * queries @ keys.transpose(1, 2)).std().item() < 3


@pytest.mark.parametrize("position", [None, 1, "mean"])
def test_it_can_be_trained_to_the_outputs_of_another(position):
    teacher, student = (SoftmaxAttention(3, 1, 1, 3, position=position, decay_on="none", seed=seed) for seed in (1, 2))
    X = randn(60, 4, 3).float()
    y = teacher(X).detach()
    history = train(student, X, y, alpha=0.0, lr=0.05, n_steps=300)
    assert history.final_objective < 1e-2 * history.objective[0]
    assert history.final_objective < 0.02 * 0.5 * y.var(0).sum().item()


def test_decay_pulls_at_queries_only_where_it_is_on_them():
    X, y = randn(20, 4, 4), torch.zeros(20, 4, 2, dtype=torch.float64)
    shares = {}
    for decay_on in ("all", "values"):
        layer = same_weights(decay_on=decay_on)
        (layer.objective(X, y, alpha=1.0) - layer.objective(X, y, alpha=0.0)).backward()
        shares[decay_on] = layer.wq.grad.abs().max().item()
    assert shares["values"] == pytest.approx(0, abs=1e-12)
    assert shares["all"] == pytest.approx(network().wq.abs().max().item(), rel=1e-9)


def test_state_dict_round_trip_and_seeds():
    X = randn(5, 6, 4)
    first, other = network(seed=0), network(seed=1)
    assert torch.equal(first(X), network(seed=0)(X))
    assert not torch.equal(first(X), other(X))
    other.load_state_dict(first.state_dict())
    assert torch.equal(first(X), other(X))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 0}, "n_heads must be a positive integer"),
        ({"head_width": 0}, "head_width must be a positive integer"),
        ({"position": "last"}, "position must be"),
        ({"position": True}, "position must be"),
        ({"position": 1.0}, "position must be"),
        ({"decay_on": "queries"}, "decay_on must be"),
        ({"scale": 0.0}, "scale must be"),
        ({"scale": True}, "scale must be"),
        ({"scale": "sqrt"}, "scale must be"),
        ({"bias": "no"}, "bias must be True or False, got 'no'"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        network(**options)


@pytest.mark.parametrize("position", [6, -7])
def test_a_position_that_the_samples_do_not_have_is_named(position):
    with pytest.raises(ValueError, match=f"position must be one of the 6 tokens, got {position}"):
        network(position=position)(randn(5, 6, 4))

"""Counted parameters and operations against the modules, the programs and torch's own counter."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from convexformer import ConvexAttention, Gates, attention_program
from convexformer.nn import SequenceAttention, SoftmaxAttention, model_cost
from convexformer.solvers import DenseMap, Program, get_loss, get_penalty

SHAPE = {"n_tokens": 5, "n_features": 3, "n_outputs": 2}
N = 7


def tokens():
    return torch.randn(N, 5, 3, generator=torch.Generator().manual_seed(0))


def some_gates(h=4):
    rng = np.random.default_rng(0)
    return Gates(rng.normal(size=(h, 5)), rng.normal(size=(h, 3)))


def measured(compute):
    """Operations per sample that torch counts."""
    with FlopCounterMode(display=False) as counter:
        compute()
    assert counter.get_total_flops() % N == 0
    return counter.get_total_flops() // N


def n_parameters(network):
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("position", [None, 0, 3, "mean"])
def test_softmax_attention(position, bias):
    network = SoftmaxAttention(3, 2, 4, 6, position=position, bias=bias)
    cost = model_cost("softmax_attention", **SHAPE, n_heads=4, head_width=6, position=position, bias=bias)
    assert cost.parameters == n_parameters(network)
    assert cost.flops == measured(lambda: network(tokens()))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gates", [None, some_gates()], ids=["linear", "gated"])
def test_convex_attention(gates, bias):
    network = ConvexAttention(5, 3, 2, 6, gates=gates, bias=bias)
    cost = model_cost("convex_attention", **SHAPE, n_heads=6, n_gates=gates and len(gates), bias=bias)
    assert cost.parameters == n_parameters(network)
    assert cost.flops == measured(lambda: network(tokens()))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_targets", [None, 1, 4])
def test_sequence_attention(n_targets, bias):
    network = SequenceAttention(5, 3, 2, 6, n_targets, bias=bias)
    cost = model_cost("sequence_attention", **SHAPE, n_heads=6, n_targets=n_targets, bias=bias)
    assert cost.parameters == n_parameters(network)
    assert cost.flops == measured(lambda: network(tokens()))


@pytest.mark.parametrize("n_outputs", [1, 2])
@pytest.mark.parametrize("gates", [None, some_gates()], ids=["linear", "gated"])
def test_convex_program(gates, n_outputs):
    X = tokens()
    program = attention_program(X, torch.zeros(N, n_outputs), alpha=0.1, gates=gates)
    shape = {**SHAPE, "n_outputs": n_outputs}
    cost = model_cost("convex_program", **shape, n_gates=gates and len(gates), bias=False)
    assert cost.parameters == np.prod(program.coef_shape)
    with_intercept = model_cost("convex_program", **shape, n_gates=gates and len(gates))
    assert with_intercept.parameters == cost.parameters + n_outputs

    def predict():
        coef = torch.zeros(program.coef_shape)
        attention_program(X, torch.zeros(N, n_outputs), alpha=0.1, gates=gates).map.matvec(coef)

    assert cost.flops == measured(predict)


@pytest.mark.parametrize("n_targets", [None, 4])
def test_row_program_is_a_program_per_target_position(n_targets):
    y = torch.zeros(N, (n_targets or 5) * 2)
    program = Program(DenseMap(tokens()), y, get_loss("squared"), get_penalty("group_l2"), 0.1)
    cost = model_cost("row_program", **SHAPE, n_targets=n_targets, bias=False)
    assert cost.parameters == np.prod(program.coef_shape)
    assert cost.flops == measured(lambda: program.map.matvec(torch.zeros(program.coef_shape)))


@pytest.mark.parametrize("n_targets", [None, 4])
def test_sequence_program(n_targets):
    T = n_targets or 5
    plus, minus = torch.rand(2, 2, 3, T, 5)  # outputs, features, targets, tokens
    cost = model_cost("sequence_program", **SHAPE, n_targets=n_targets, bias=False)
    assert cost.parameters == plus.numel() + minus.numel()
    assert cost.flops == measured(lambda: torch.einsum("lqtk,ikq->itl", plus - minus, tokens()))


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        ("linear", {}, "model must be one of"),
        ("convex_attention", {}, "needs n_heads"),
        ("softmax_attention", {"n_heads": 2}, "needs head_width"),
        ("convex_program", {"n_heads": 2}, "has no n_heads"),
        ("convex_program", {"position": 0}, "has no position"),
        ("sequence_attention", {"n_heads": 2, "n_gates": 2}, "has no n_gates"),
        ("convex_attention", {"n_heads": 0}, "n_heads must be a positive integer"),
        ("convex_program", {"n_outputs": 0}, "n_outputs must be a positive integer"),
        ("softmax_attention", {"n_heads": 2, "head_width": 1, "position": "last"}, "position must be"),
    ],
)
def test_bad_arguments_are_named(model, sizes, message):
    with pytest.raises(ValueError, match=message):
        model_cost(model, **SHAPE | sizes)

"""Networks of symbols: embeddings, the transformer and the plain network, and their training."""

import math

import numpy as np
import pytest
import torch

from convexformer import Gates
from convexformer.nn import (
    ConvexAttention,
    DeepConvexTransformer,
    EmbeddedNetwork,
    EmbeddingMLP,
    ReluAttention,
    SoftmaxTransformer,
    TokenEmbedding,
    train,
)

V, C = 5, 3


def gates():
    rng = np.random.default_rng(0)
    return Gates(rng.normal(size=(24, 2)), rng.normal(size=(24, 6)))


def embedded(network):
    return lambda seed=0: EmbeddedNetwork(TokenEmbedding(V, 2, 6, seed=seed), network(seed))


NETWORKS = {
    "transformer": lambda seed=0: SoftmaxTransformer(V, 2, C, n_layers=2, width=8, n_heads=2, seed=seed),
    "mean": lambda seed=0: SoftmaxTransformer(V, 2, C, width=8, n_heads=2, readout="mean", seed=seed),
    "relu": lambda seed=0: EmbeddingMLP(V, 2, C, width=6, n_hidden=12, seed=seed),
    "quadratic": lambda seed=0: EmbeddingMLP(V, 2, C, 6, 12, activation="quadratic", seed=seed),
    "relu_heads": embedded(lambda seed: ReluAttention(2, 6, C, 20, seed=seed)),
    "gated_heads": embedded(lambda seed: ConvexAttention(2, 6, C, 24, gates=gates(), seed=seed)),
    "deep": embedded(lambda seed: DeepConvexTransformer(2, 6, C, n_heads=8, seed=seed)),
}
any_network = pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)


def table():
    """All pairs of symbols with one of the classes each."""
    symbols = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    return symbols, torch.eye(C)[(symbols[:, 0] * symbols[:, 1]) % V % C]


def weights(network):
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


# Every network


@any_network
def test_a_graph_of_torch_takes_symbols(make):
    network, (symbols, _) = make(), table()
    program = torch.export.export(network, (symbols[:3],), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    torch.testing.assert_close(program(symbols), network(symbols))


@any_network
def test_shapes_and_gradients_of_every_parameter(make):
    network, (symbols, y) = make(), table()
    assert network(symbols).shape == (V * V, C)
    network.objective(symbols, y, loss="softmax", alpha=0.0).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
    assert bool((network.embedding.weight.grad.flatten(0, -2).norm(dim=1) > 0).all())


@any_network
def test_weights_depend_on_the_seed_alone_and_leave_the_global_generator_alone(make):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first = weights(make(1))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(4)
    assert torch.equal(first, weights(make(1)))
    assert not torch.equal(first, weights(make(2)))


@any_network
def test_predictions_of_a_sample_do_not_depend_on_the_others(make):
    network, (symbols, _) = make().double(), table()
    torch.testing.assert_close(network(symbols[7:9]), network(symbols)[7:9], rtol=1e-10, atol=1e-12)


@any_network
def test_a_table_of_symbols_is_learned_and_its_accuracy_watched(make):
    network, (symbols, y) = make(), table()
    seen = []

    def accuracy(step, objective):
        with torch.no_grad():
            seen.append((network(symbols).argmax(1) == y.argmax(1)).float().mean().item())
        return seen[-1] == 1.0

    options = {"loss": "softmax", "optimizer": "adamw", "betas": (0.9, 0.98), "schedule": "constant", "lr": 0.03}
    history = train(
        network, symbols, y, alpha=0.0, n_steps=400, look_every=10, batch_size=25, callback=accuracy, **options
    )
    assert seen[0] < 0.8
    assert seen[-1] == 1.0
    assert history.ended_by == "callback"


@any_network
@pytest.mark.parametrize(
    ("symbols", "message"),
    [
        (torch.zeros(4, 2), "tokens must be integers, the symbols, got torch.float32"),
        (torch.zeros(4, 2, dtype=torch.bool), "tokens must be integers"),
        (torch.zeros(4, 3, dtype=torch.long), r"tokens must have shape \(n_samples, 2\)"),
        (torch.zeros(4, dtype=torch.long), "tokens must have shape"),
        (torch.zeros(0, 2, dtype=torch.long), "tokens must hold at least one sample"),
        (torch.full((4, 2), V), f"below n_symbols={V}, got {V}"),
        (torch.full((4, 2), -1), "at least 0 .* got -1"),
    ],
)
def test_what_is_not_symbols_is_refused_before_training(make, symbols, message):
    with pytest.raises(ValueError, match=message):
        train(make(), symbols, torch.zeros(len(symbols), C), alpha=0.1)


def test_symbols_in_an_array_are_refused_by_name():
    with pytest.raises(TypeError, match="tokens must be a torch tensor, got ndarray"):
        train(NETWORKS["relu"](), np.zeros((4, 2), int), torch.zeros(4, C), alpha=0.1)


def test_weights_of_samples_are_not_cut_to_integers():
    (symbols, y), ends = table(), []
    weight = torch.ones(len(y))
    weight[::2] = 0.25
    for factor in (1.0, 8.0):
        network = NETWORKS["relu"]()
        history = train(network, symbols, y, alpha=0.1, n_steps=3, sample_weight=factor * weight)
        ends.append(history.final_objective)
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)
    assert ends[0] == pytest.approx(network.objective(symbols, y, alpha=0.1, sample_weight=weight).item(), rel=1e-5)


@any_network
def test_decay_is_half_the_sum_of_squares_of_matrices(make):
    network = make().double()
    parameters = dict(network.named_parameters())
    matrices = [w for name, w in parameters.items() if w.ndim > 1 and "w1" not in name]
    # Biases and the free parameters of attention have no decay.
    expected = 0.5 * sum(w.square().sum() for w in matrices)
    assert network.decay("nuclear").item() == pytest.approx(expected.item(), rel=1e-12)


# Embeddings


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.long])
def test_tokens_are_rows_of_the_tables(shared, dtype):
    embedding = TokenEmbedding(200, 3, 4, shared=shared)
    symbols = torch.tensor([[0, 199, 7], [120, 0, 199]])
    tokens = embedding(symbols.to(dtype))
    for i in range(2):
        for k in range(3):
            rows = embedding.weight if shared else embedding.weight[k]
            assert torch.equal(tokens[i, k], rows[symbols[i, k]])


@pytest.mark.parametrize("width", [4, 64])
def test_tokens_have_norm_one_on_average(width):
    weight = TokenEmbedding(2000, 2, width).weight.detach()
    assert weight.square().sum(-1).mean().item() == pytest.approx(1, abs=4 / math.sqrt(4000 * width / 2))


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="n_symbols must be a positive integer"):
        TokenEmbedding(0, 2, 3)
    with pytest.raises(ValueError, match="activation must be one of"):
        EmbeddingMLP(3, 2, 3, activation="gelu")
    with pytest.raises(ValueError, match="width must be a multiple of n_heads=4"):
        SoftmaxTransformer(3, 2, 3, width=6)
    with pytest.raises(ValueError, match="readout must be one of"):
        SoftmaxTransformer(3, 2, 3, readout="first")
    with pytest.raises(ValueError, match="activation must be one of"):
        SoftmaxTransformer(3, 2, 3, activation="tanh")


# What kind of function each network is


def along_a_line(network, symbols, times):
    """Predictions with embeddings E0 + t E1, for each t."""
    start = network.embedding.weight.detach().clone()
    direction = torch.randn_like(start)
    values = []
    for t in times:
        with torch.no_grad():
            network.embedding.weight.copy_(start + t * direction)
            values.append(network(symbols))
    return torch.stack(values)


def test_the_quadratic_network_is_a_quadratic_function_of_its_tokens():
    torch.manual_seed(0)
    symbols, _ = table()
    values = along_a_line(NETWORKS["quadratic"]().double(), symbols, [-1.0, 0.0, 1.0, 2.0])
    third = values[3] - 3 * values[2] + 3 * values[1] - values[0]
    second = values[2] - 2 * values[1] + values[0]
    assert third.abs().max() < 1e-10
    assert second.abs().max() > 0.1


def test_the_relu_network_is_piecewise_linear_in_its_tokens():
    torch.manual_seed(0)
    values = along_a_line(NETWORKS["relu"]().double(), table()[0], torch.linspace(-1, 1, 501).tolist())
    second = (values[2:] - 2 * values[1:-1] + values[:-2]).abs().amax((1, 2))
    assert (second < 1e-12).sum() > 0.2 * len(second)
    assert second.max() > 1e-3


def test_the_transformer_is_pre_norm():
    network = NETWORKS["mean"]().double()
    layer = network.layers[0]
    tokens = torch.randn(4, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    attended = layer.self_attn(*3 * [layer.norm1(tokens)])[0]
    middle = tokens + attended
    expected = middle + layer.linear2(torch.relu(layer.linear1(layer.norm2(middle))))
    torch.testing.assert_close(layer(tokens), expected, rtol=1e-10, atol=1e-12)


def test_layers_of_the_transformer_start_from_different_weights():
    first, second = NETWORKS["transformer"]().layers[:2]
    assert not torch.equal(first.linear1.weight, second.linear1.weight)


def test_only_positions_tell_the_order_of_the_tokens():
    network, (symbols, _) = NETWORKS["mean"]().double(), table()
    swapped = symbols.flip(1)
    assert (network(symbols) - network(swapped)).abs().max() > 1e-3
    with torch.no_grad():
        network.position.copy_(network.position[:1].repeat(2, 1))
    torch.testing.assert_close(network(symbols), network(swapped), rtol=1e-10, atol=1e-12)


def test_the_last_token_is_read_unless_the_mean_is():
    network = NETWORKS["transformer"]().double()
    symbols, _ = table()
    tokens = network.embedding(symbols) + network.position
    torch.testing.assert_close(network(symbols), network.output(network.layers(tokens)[:, -1]))
    network.readout = "mean"
    torch.testing.assert_close(network(symbols), network.output(network.layers(tokens)).mean(1))


def test_an_embedded_network_is_its_network_on_the_tokens():
    network, (symbols, _) = NETWORKS["gated_heads"](), table()
    assert torch.equal(network(symbols), network.network(network.embedding(symbols)))


@any_network
def test_any_device_predicts_the_same(make, accelerator):
    network, (symbols, _) = make().double(), table()
    expected = network(symbols)
    torch.testing.assert_close(network.to(accelerator)(symbols.to(accelerator)).cpu(), expected, rtol=1e-8, atol=1e-10)


def test_whether_a_table_is_shared_is_true_or_false():
    with pytest.raises(ValueError, match="shared must be True or False, got 'no'"):
        TokenEmbedding(5, 2, 3, shared="no")

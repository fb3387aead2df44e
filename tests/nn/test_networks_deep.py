"""Heads with a true ReLU, and stacked layers of gated heads."""

import io

import numpy as np
import pytest
import torch

from convexformer import Gates, Heads
from convexformer.gates import GATE_SOURCES, GateSource, TrainingData, get_gate_source
from convexformer.heads.optimality import optimality_gap
from convexformer.nn import ConvexAttention, DeepConvexTransformer, ReluAttention, model_cost, train
from convexformer.solvers import get_solver, solve


def data(n=30, tokens=3, features=2, outputs=2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, tokens, features))
    y = np.abs(X[:, 0, :1]) - X[:, 1, 1:] @ np.ones((features - 1, 1)) + np.zeros((1, outputs))
    return torch.as_tensor(X), torch.as_tensor(y)


def gated_network():
    draw = np.random.default_rng(1)
    return ConvexAttention(3, 2, 2, 6, gates=Gates(draw.normal(size=(4, 3)), draw.normal(size=(4, 2))))


def weights(network):
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def copy_weights(source, target):
    with torch.no_grad():
        for name in ("w1_free", "w2", "w3", "bias"):
            getattr(target, name).copy_(getattr(source, name))


# ReLU heads


@pytest.mark.parametrize("simplex", ["softmax", "projection"])
def test_relu_heads_are_gated_heads_with_their_own_gates(simplex):
    network, (X, y) = ReluAttention(3, 2, 2, 6, simplex=simplex, seed=1).double(), data()
    gated = ConvexAttention(3, 2, 2, 6, gates=Gates(*network.gate_directions()), simplex=simplex).double()
    copy_weights(network, gated)
    torch.testing.assert_close(gated(X), network(X), rtol=1e-12, atol=1e-12)
    share = gated.gates.masks(X).double().mean(0)
    assert bool(((share > 0) & (share < 1)).any())  # some gate matters
    for penalty in (None, "group_l2", "nuclear"):
        assert network.decay(penalty).item() == gated.decay(penalty).item()
    # Gradients too: gates have none.
    for model in (network, gated):
        model.objective(X, y, alpha=0.1).backward()
    for name in ("w1_free", "w2", "w3", "bias"):
        torch.testing.assert_close(getattr(gated, name).grad, getattr(network, name).grad, rtol=1e-9, atol=1e-12)


def test_the_gated_program_with_its_gates_is_at_most_the_objective_of_relu_heads():
    network, (X, y) = ReluAttention(3, 2, 2, 8, simplex="projection").double(), data()
    train(network, X, y, alpha=0.05, lr=0.03, n_steps=150)
    objective = network.objective(X, y, alpha=0.05).item()
    gated = ConvexAttention(3, 2, 2, 8, gates=Gates(*network.gate_directions()), simplex="projection").double()
    copy_weights(network, gated)
    program = Heads.from_torch(gated, alpha=0.05).program(X, y.numpy())
    certificate = solve(program, get_solver("auto"), tol=1e-6).certificate
    assert certificate.dual <= certificate.primal <= objective


def test_no_bound_is_claimed_for_relu_heads_nor_for_stacked_layers():
    X, y = data()
    for network in (ReluAttention(3, 2, 2).double(), DeepConvexTransformer(3, 2, 2, n_layers=1).double()):
        with pytest.raises(TypeError, match="model must be"):
            optimality_gap(network, X.numpy(), y.numpy(), alpha=0.1)


def test_gate_directions_are_copies():
    network = ReluAttention(3, 2, simplex="projection")
    before = weights(network)
    for part in network.gate_directions():
        part += 1
    assert torch.equal(weights(network), before)


def test_gates_of_a_network_in_bfloat16_are_those_in_float32():
    network = ReluAttention(3, 2, simplex="projection").bfloat16()
    found = network.gate_directions()
    for part, wanted in zip(found, network.float().gate_directions(), strict=True):
        np.testing.assert_allclose(part, wanted, atol=0.02)


def test_bias_and_seed_of_relu_heads():
    X, _ = data()
    network = ReluAttention(3, 2, bias=False, seed=2).double()
    torch.testing.assert_close(network(2 * X), 2 * network(X), rtol=1e-12, atol=1e-12)  # positively homogeneous
    assert (network(X) + network(-X)).abs().max() > 1e-3  # and not linear
    assert torch.equal(weights(ReluAttention(3, 2, seed=5)), weights(ReluAttention(3, 2, seed=5)))
    assert not torch.equal(weights(ReluAttention(3, 2, seed=5)), weights(ReluAttention(3, 2, seed=6)))
    with pytest.raises(ValueError, match="n_heads must be a positive integer"):
        ReluAttention(3, 2, n_heads=0)


# Stacked layers


def by_the_formula(network, X):
    """Predictions sample by sample and head by head."""
    predictions = []
    for sample in X.numpy():
        tokens = sample
        for block in network.blocks:
            parts = (block.heads.w1, block.heads.w2, block.heads.w3)
            w1, w2, w3 = (part.detach().numpy() for part in parts)
            gate = block.gates.masks(torch.as_tensor(tokens[None])).numpy()[0][block.gate_index]
            change = sum(gate[j] * w1[j] @ tokens @ np.outer(w2[j], w3[j]) for j in range(len(w1)))
            tokens = tokens + change if network.residual else change
        last = network.last
        w1, w2, w3, b = (part.detach().numpy() for part in (last.w1, last.w2, last.w3, last.bias))
        gate = last.gates.masks(torch.as_tensor(tokens[None])).numpy()[0][last.gate_index]
        predictions.append(b + sum(gate[j] * (w1[j] @ tokens @ w2[j]) * w3[j] for j in range(len(w1))))
    return np.array(predictions)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("n_layers", [1, 2, 4])
@pytest.mark.parametrize("n_gates", [None, 3])
def test_predictions_are_those_of_the_formula(residual, n_layers, n_gates):
    options = {"n_layers": n_layers, "n_heads": 5, "residual": residual, "n_gates": n_gates}
    network, (X, _) = DeepConvexTransformer(3, 2, 2, **options).double(), data()
    np.testing.assert_allclose(network(X).detach().numpy(), by_the_formula(network, X), rtol=1e-10, atol=1e-12)


def test_one_layer_is_the_gated_network():
    network, (X, y) = DeepConvexTransformer(3, 2, 2, n_layers=1, n_heads=6).double(), data()
    assert isinstance(network.last, ConvexAttention)
    assert torch.equal(network(X), network.last(X))
    for penalty in (None, "nuclear"):
        assert network.decay(penalty).item() == network.last.decay(penalty).item()
    # So the program bounds it, as one-layer network.
    gap = optimality_gap(network.last, X.numpy(), y.numpy(), alpha=0.1)
    assert gap.bound <= network.objective(X, y, alpha=0.1).item()


def test_layers_that_add_nothing_leave_the_last_layer_alone():
    network, (X, _) = DeepConvexTransformer(3, 2, 2, n_layers=3).double(), data()
    with torch.no_grad():
        for block in network.blocks:
            block.heads.w3.zero_()
    assert torch.equal(network(X), network.last(X))


@pytest.mark.parametrize("n_layers", [1, 2, 4])
def test_every_parameter_has_a_gradient_and_prepared_masks_change_nothing(n_layers):
    network, (X, y) = DeepConvexTransformer(3, 2, 2, n_layers=n_layers).double(), data()
    network.objective(X, y, alpha=0.0).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in network.parameters())
    rows = torch.tensor([4, 2])
    assert torch.equal(network(*(part[rows] for part in network.prepared(X))), network(X[rows]))


def test_masks_of_tokens_are_not_taken_for_masks_of_gates():
    network = DeepConvexTransformer(4, 2, n_heads=3)
    with pytest.raises(ValueError, match=r"masks must have shape \(5, 3\), one column per gate, got \(5, 4\)"):
        network(torch.ones(5, 4, 2), torch.ones(5, 4, dtype=torch.bool))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": None}, "seed must be an integer from 0 to 4294967295, got None"),  # layers drawn anew each time
        ({"seed": -1}, "seed must be an integer from 0 to 4294967295, got -1"),
        ({"seed": 2**32}, "seed must be an integer from 0 to 4294967295"),
        ({"residual": "no"}, "residual must be True or False, got 'no'"),
    ],
)
def test_seeds_and_flags_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        DeepConvexTransformer(4, 2, **options)


@pytest.mark.parametrize("network", [DeepConvexTransformer(3, 2, 2, n_layers=2), gated_network()], ids=["deep", "one"])
def test_graphs_of_gated_networks_are_for_any_number_of_samples(network):
    network, (X, _) = network.double().requires_grad_(False), data()
    wanted = network(X)
    example, shapes = (X[:5],), ({0: torch.export.Dim("batch")},)
    saved = io.BytesIO()
    torch.export.save(torch.export.export(network, example, dynamic_shapes=shapes), saved)
    saved.seek(0)
    torch.testing.assert_close(torch.export.load(saved).module()(X), wanted)
    torch.testing.assert_close(torch.compile(network, backend="eager", fullgraph=True)(X), wanted)
    with pytest.raises(Exception, match="gates would be left out of a graph of strict=True; export with strict=False"):
        torch.export.export(network, example, strict=True)


def test_gates_pass_no_gradient():
    # Between gates opening and closing the network is linear in its tokens: their gradient is that of a gated linear
    # map, so scaling the tokens leaves it as it is.
    network, (X, _) = DeepConvexTransformer(3, 2, 1, n_layers=3).double(), data()
    gradients = []
    for scale in (1.0, 2.0):
        tokens = (scale * X).requires_grad_()
        network(tokens).sum().backward()
        gradients.append(tokens.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


def test_end_to_end_training_lowers_the_objective():
    network, (X, y) = DeepConvexTransformer(3, 2, 2, n_layers=3).double(), data()
    history = train(network, X, y, alpha=1e-3, lr=0.02, n_steps=150, penalty="nuclear")
    assert history.final_objective < 0.1 * history.objective[0]
    assert history.final_objective == pytest.approx(
        network.objective(X, y, alpha=1e-3, penalty="nuclear").item(), rel=1e-12
    )


def test_weights_and_gates_depend_on_the_seed_and_differ_between_layers():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first, same, other = (DeepConvexTransformer(3, 2, n_layers=3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(weights(first), weights(same))
    assert np.array_equal(first.last.gates.u2, same.last.gates.u2)
    assert not torch.equal(weights(first), weights(other))
    assert not np.array_equal(first.blocks[0].gates.u1, first.blocks[1].gates.u1)
    assert not torch.equal(first.blocks[0].heads.w2, first.blocks[1].heads.w2)


def test_a_state_holds_the_gates_of_all_layers():
    network, other = (DeepConvexTransformer(3, 2, n_layers=3, seed=seed) for seed in (0, 1))
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    X = data()[0].float()
    assert torch.equal(network(X), other(X))


def test_given_gates_serve_every_layer_and_must_fit():
    gates = Gates(np.eye(3), np.ones((3, 2)))
    network = DeepConvexTransformer(3, 2, gates=gates)
    assert all(part.gates is gates for part in (*network.blocks, network.last))
    with pytest.raises(ValueError, match="directions must have widths"):
        DeepConvexTransformer(3, 4, gates=gates)
    with pytest.raises(ValueError, match="n_layers must be a positive integer"):
        DeepConvexTransformer(3, 2, n_layers=0)


@pytest.mark.parametrize("name", GATE_SOURCES)
def test_sources_that_read_data_are_refused_and_no_others(name):
    if name in ("difference", "generated"):
        with pytest.raises(ValueError, match=rf"gates='{name}' are made from training data.*beforehand"):
            DeepConvexTransformer(3, 2, gates=name)
        return
    network = DeepConvexTransformer(3, 2, n_layers=1, gates=name, seed=4)
    made = get_gate_source(name, 16).make(TrainingData(data()[0]), np.random.RandomState(4))
    assert np.array_equal(network.last.gates.u1, made.u1)
    assert np.array_equal(network.last.gates.u2, made.u2)


class FirstSample(GateSource):
    """A source that reads data and does not say so."""

    def make(self, data, random_state):
        return Gates(data.tokens[0, :, :1].T.tolist(), data.tokens[0, :1].tolist())


def test_a_source_that_reads_data_secretly_fails():
    assert len(FirstSample().make(TrainingData(data()[0]), np.random.RandomState(0))) == 1
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        DeepConvexTransformer(3, 2, gates=FirstSample())


@pytest.mark.parametrize("n_layers", [1, 2, 4])
def test_costs_count_the_parameters(n_layers):
    sizes = {"n_tokens": 3, "n_features": 2, "n_outputs": 4, "n_heads": 5}
    cost = model_cost("deep_convex_transformer", **sizes, n_layers=1, n_gates=5)
    assert cost == model_cost("convex_attention", **sizes, n_gates=5)
    deep = DeepConvexTransformer(3, 2, 4, n_layers=n_layers, n_heads=5)
    cost = model_cost("deep_convex_transformer", **sizes, n_layers=n_layers, n_gates=5)
    assert cost.parameters == len(weights(deep))
    relu = model_cost("relu_attention", **sizes)
    assert relu.parameters == len(weights(ReluAttention(3, 2, 4, 5)))
    assert relu.flops == model_cost("convex_attention", **sizes).flops


@pytest.mark.parametrize("make", [ReluAttention, DeepConvexTransformer])
def test_any_device_predicts_the_same(make, accelerator):
    network, (X, _) = make(3, 2, 2).double(), data()
    expected = network(X)
    torch.testing.assert_close(network.to(accelerator)(X.to(accelerator)).cpu(), expected, rtol=1e-8, atol=1e-10)

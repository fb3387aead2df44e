"""The non-convex network: what it computes, that no training beats the certified bound, and when it comes close."""

import copy
import math
import re

import numpy as np
import pytest
import torch
from covering import covering
from hypothesis import given, settings
from hypothesis import strategies as st

from convexformer import ConvexAttention, ConvexAttentionClassifier, ConvexAttentionRegressor, Gates, Heads
from convexformer.nn import (
    AttentiveProbe,
    EmbeddingMLP,
    MeanWeights,
    ProbeNetwork,
    TokenPooler,
    network_from_heads,
    project_to_simplex,
    train,
)
from convexformer.solvers import LOSSES
from convexformer.unfolded import UnfoldedNetwork, UnrolledTransformer

PENALTIES = ("group_l2", "nuclear")
CLASSIFICATION = ("logistic", "softmax", "squared_hinge")
GATED = {"activation": "gated_relu", "n_gates": 3, "random_state": 0}


def certified(make_problem, loss, penalty, *, gated=False, alpha=0.1, tol=1e-7, weight=None, **shape):
    """A fitted estimator with its data as tensors: tokens, targets of the loss."""
    X, y = make_problem(loss, **shape)
    estimator = ConvexAttentionClassifier if loss in CLASSIFICATION else ConvexAttentionRegressor
    model = estimator(alpha, loss=loss, penalty=penalty, tol=tol, **(GATED if gated else {}))
    model.fit(X, y, sample_weight=weight)
    return model, torch.as_tensor(X), torch.as_tensor(model.heads_.targets.encode(y))


def network_for(model, targets, n_heads, **options):
    return ConvexAttention(3, 2, targets.shape[1], n_heads, gates=model.gates_, **options).double()


def train_for(model, network, tokens, targets, **options):
    problem = {"loss": model.loss_, "penalty": model.penalty_, "alpha": model.alpha}
    return train(network, tokens, targets, **problem, **options).objective


# What it computes


@pytest.mark.parametrize(
    "network",
    [
        ConvexAttention(4, 3, 2),
        AttentiveProbe(3, 2),
        ProbeNetwork(TokenPooler([MeanWeights()]), torch.ones(1, 3, 2), torch.zeros(2)),
        UnfoldedNetwork(4, 3, 2, n_layers=2, width=5),
        UnrolledTransformer(3),
    ],
    ids=lambda network: type(network).__name__,
)
def test_networks_take_tokens_in_the_precision_that_autocast_gave_them(network):
    tokens = torch.rand(5, 4, 3, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = network(tokens), network(tokens.bfloat16())
    for output in outputs:
        torch.testing.assert_close(output.float(), network(tokens), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.bfloat16)])
def test_double_precision_which_autocast_leaves_is_not_mixed_with_others(dtypes):
    network, tokens = ConvexAttention(4, 3, 2).to(dtypes[0]), torch.rand(5, 4, 3).to(dtypes[1])
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match=f"tokens must be {dtypes[0]} .*got {dtypes[1]}"),
    ):
        network(tokens)


@pytest.mark.parametrize("network", [ConvexAttention(4, 3, 2), AttentiveProbe(3, 2), UnrolledTransformer(3)])
def test_networks_on_the_meta_device_give_shapes(network):
    on_meta = copy.deepcopy(network).to("meta")
    assert on_meta(torch.rand(5, 4, 3, device="meta")).shape == network(torch.rand(5, 4, 3)).shape


@pytest.mark.parametrize("simplex", ["softmax", "projection"])
@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
@pytest.mark.parametrize("bias", [False, True])
def test_output_is_the_formula(simplex, gated, bias):
    rng = np.random.default_rng(0)
    gates = Gates(rng.normal(size=(3, 4)), rng.normal(size=(3, 2))) if gated else None
    network = ConvexAttention(4, 2, 3, 7, gates=gates, simplex=simplex, bias=bias, seed=1).double()
    if bias:
        torch.nn.init.normal_(network.bias, generator=torch.Generator().manual_seed(0))
    X = rng.normal(size=(6, 4, 2))
    w1, w2, w3 = (part.detach().numpy() for part in (network.w1, network.w2, network.w3))
    wanted = np.zeros((6, 3)) if not bias else np.tile(network.bias.detach().numpy(), (6, 1))
    for i in range(6):
        for j in range(7):
            # Heads go round the gates in turn.
            if not gated or gates.u1[j % 3] @ X[i] @ gates.u2[j % 3] >= 0:
                wanted[i] += (w1[j] @ X[i] @ w2[j]) * w3[j]
    np.testing.assert_allclose(network(torch.as_tensor(X)).detach().numpy(), wanted, atol=1e-12)
    assert (w1 >= 0).all()
    np.testing.assert_allclose(w1.sum(1), 1.0, atol=1e-12)


def test_masks_computed_before_give_the_same_output():
    rng = np.random.default_rng(0)
    gates = Gates(rng.normal(size=(3, 4)), rng.normal(size=(3, 2)))
    network = ConvexAttention(4, 2, 1, 6, gates=gates)
    tokens = torch.as_tensor(rng.normal(size=(9, 4, 2)), dtype=torch.float32)
    assert torch.equal(network(tokens), network(tokens, gates.masks(tokens)))


def test_masks_of_tokens_are_not_taken_for_masks_of_gates():
    tokens, real = torch.ones(3, 4, 2), torch.ones(3, 4, dtype=torch.bool)
    gated = ConvexAttention(4, 2, gates=Gates(np.ones((2, 4)), np.ones((2, 2))))
    with pytest.raises(ValueError, match=r"masks must have shape \(3, 2\), one column per gate, got \(3, 4\)"):
        gated(tokens, real)
    with pytest.raises(ValueError, match="masks are those of gates, which this network does not have"):
        ConvexAttention(4, 2)(tokens, real)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_decay_is_the_formula(penalty):
    network = ConvexAttention(4, 3, 2, 5).double()
    w2, w3 = network.w2.detach().numpy(), network.w3.detach().numpy()
    size = np.abs(w3).sum(1) if penalty == "group_l2" else np.linalg.norm(w3, axis=1)
    assert network.decay(penalty).item() == pytest.approx(0.5 * ((w2**2).sum() + (size**2).sum()), rel=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_objective_is_the_weighted_mean_loss_and_the_decay(weighted):
    network = ConvexAttention(4, 3, 2, 5).double()
    rng = np.random.default_rng(0)
    tokens, y = torch.as_tensor(rng.normal(size=(8, 4, 3))), torch.as_tensor(rng.normal(size=(8, 2)))
    weight = torch.as_tensor(rng.uniform(size=8)) if weighted else None
    losses = ((network(tokens) - y) ** 2).sum(1).detach().numpy() / 2
    wanted = np.average(losses, weights=weight) + 0.3 * network.decay().item()
    assert network.objective(tokens, y, alpha=0.3, sample_weight=weight).item() == pytest.approx(wanted, rel=1e-12)


def test_weights_of_an_objective_are_those_of_repeated_samples_and_may_be_arrays():
    network = ConvexAttention(4, 3, 2, 5).double()
    rng = np.random.default_rng(0)
    tokens, y = torch.as_tensor(rng.normal(size=(4, 4, 3))), torch.as_tensor(rng.normal(size=(4, 2)))
    counts = [2, 0, 1, 3]
    repeated = network.objective(*(part.repeat_interleave(torch.tensor(counts), 0) for part in (tokens, y)), alpha=0.3)
    for weight in (counts, np.array(counts) * 1e200, torch.tensor(counts)):
        value = network.objective(tokens, y, alpha=0.3, sample_weight=weight)
        assert value.item() == pytest.approx(repeated.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sample_weight": -torch.ones(4)}, ValueError, "sample_weight must be finite, non-negative and not all zero"),
        ({"sample_weight": torch.zeros(4)}, ValueError, "sample_weight must be finite, non-negative and not all zero"),
        ({"sample_weight": torch.ones(3)}, ValueError, r"sample_weight must have shape \(4,\), got \(3,\)"),
        ({"sample_weight": torch.ones(4, 1)}, ValueError, r"sample_weight must have shape \(4,\), got \(4, 1\)"),
        ({"alpha": -1.0}, ValueError, "alpha must be a number of at least 0, got -1.0"),
        ({"y": np.zeros((4, 1))}, TypeError, "y must be a torch tensor"),
    ],
)
def test_arguments_of_an_objective_are_checked(options, error, message):
    arguments = {"tokens": torch.zeros(4, 2, 2), "y": torch.zeros(4, 1), "alpha": 0.1}
    with pytest.raises(error, match=message):
        ConvexAttention(2, 2).objective(**arguments | options)


@pytest.mark.parametrize("row", [[1e7, 1e7 - 2, 0], [1e7, 1e7, 0], [1e8, 0, -1], [-1e8, -1e30, -1e8], [3e38, -3e38, 0]])
def test_projections_of_large_numbers_are_in_the_simplex(row):
    single = torch.tensor([row])
    expected = torch.tensor([[float(value == max(row)) for value in row]])
    assert torch.equal(project_to_simplex(single), expected / expected.sum())


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_projections_of_what_is_not_finite_leave_other_rows_alone(number):
    projected = project_to_simplex(torch.tensor([[number, 0.0], [2.0, 0.0]]))
    assert projected[0].isnan().all()
    assert projected[1].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("simplex", ["softmax", "projection"])
def test_gradients_are_those_of_finite_differences(make_problem, loss, penalty, simplex):
    model, tokens, targets = certified(make_problem, loss, penalty, gated=True, tol=0.1, n_outputs=2, n_classes=3)
    network = network_for(model, targets, 4, simplex=simplex, seed=2)
    names = [name for name, _ in network.named_parameters()]

    def objective(*values):
        call = (tokens, targets)
        options = {"loss": loss, "penalty": penalty, "alpha": 0.1}
        return torch.func.functional_call(
            Wrapped(network), {f"inner.{n}": v for n, v in zip(names, values, strict=True)}, call, options
        )

    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *call, **options):
            return self.inner.objective(*call, **options)

    assert torch.autograd.gradcheck(objective, tuple(network.parameters()))


def test_seeds_decide_the_weights_and_leave_the_global_generator_alone():
    state = torch.random.get_rng_state()
    first, same, other = (ConvexAttention(4, 3, 2, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.w2, same.w2)
    assert not torch.equal(first.w2, other.w2)


@pytest.mark.parametrize("kind", [ConvexAttention, EmbeddingMLP])
def test_seeds_are_integers_of_python_or_numpy(kind):
    first, same = (next(kind(4, 3, 2, seed=seed).parameters()) for seed in (7, np.int64(7)))
    assert torch.equal(first, same)
    for wrong in (None, 0.5, "1", np.random.RandomState(0)):
        with pytest.raises(ValueError, match="seed must be an integer, got"):
            kind(4, 3, 2, seed=wrong)
    with pytest.raises(ValueError, match="seed must have at most 64 bits"):
        kind(4, 3, 2, seed=2**64)


# Training


def test_training_follows_the_objective_and_ends_with_that_of_the_final_weights(make_problem):
    model, tokens, targets = certified(make_problem, "squared", "group_l2")
    network = network_for(model, targets, 4)
    before = network.objective(tokens, targets, alpha=0.1).item()
    seen = []
    history = train(network, tokens, targets, alpha=0.1, n_steps=30, callback=lambda *state: seen.append(state))
    assert len(history.objective) == len(history.seconds) == 31
    assert history.objective[0] == before
    assert history.objective[-1] == network.objective(tokens, targets, alpha=0.1).item() < before
    assert seen == list(enumerate(history.objective[:-1]))
    assert history.seconds == sorted(history.seconds)


def test_a_callback_that_returns_true_stops_training(make_problem):
    model, tokens, targets = certified(make_problem, "squared", "group_l2")
    network = network_for(model, targets, 4)
    stop = {"callback": lambda step, objective: step == 5, "n_steps": 30}
    history = train(network, tokens, targets, alpha=0.1, **stop)
    assert len(history.objective) == 6
    assert history.objective[-1] == network.objective(tokens, targets, alpha=0.1).item()


def test_training_uses_the_weights_of_the_samples(make_problem):
    # Weight two is a row given twice: the same trajectory.
    model, tokens, targets = certified(make_problem, "squared", "nuclear")
    weight = torch.ones(40, dtype=torch.float64)
    weight[:7] = 2
    rows = torch.repeat_interleave(torch.arange(40), weight.long())
    weighted, repeated = network_for(model, targets, 4), network_for(model, targets, 4)
    first = train_for(model, weighted, tokens, targets, n_steps=20, sample_weight=weight)
    np.testing.assert_allclose(first, train_for(model, repeated, tokens[rows], targets[rows], n_steps=20), rtol=1e-10)


# The bound


@pytest.mark.parametrize(("loss", "penalty", "gated"), covering(sorted(LOSSES), PENALTIES, [False, True]))
def test_no_trained_network_is_below_the_certified_bound(make_problem, loss, penalty, gated):
    weight = np.random.default_rng(0).uniform(0.5, 2, 40)
    shape = {"n_outputs": 2, "n_classes": 3}
    model, tokens, targets = certified(make_problem, loss, penalty, gated=gated, weight=weight, **shape)
    for seed in range(2):
        network = network_for(model, targets, 12, seed=seed, simplex=("softmax", "projection")[seed])
        weighted = {"lr": 0.1, "n_steps": 250, "sample_weight": torch.as_tensor(weight)}
        values = train_for(model, network, tokens, targets, **weighted)
        assert min(values) >= model.certificate_.dual
        # A bound that training comes nowhere near would hold for the wrong reason.
        assert values[-1] <= 1.1 * model.certificate_.primal
        heads = Heads.from_torch(
            network, alpha=model.alpha, loss=model.loss_, penalty=model.penalty_, targets=model.heads_.targets
        )
        X, y = make_problem(loss, **shape)
        assert heads.objective(X, y, weight) == pytest.approx(values[-1], rel=1e-12)


@pytest.mark.parametrize(
    ("loss", "penalty", "gated"),
    [("squared", "group_l2", True), ("softmax", "nuclear", False), ("logistic", "group_l2", False)],
)
def test_enough_heads_restarts_and_decaying_steps_come_within_a_thousandth(make_problem, loss, penalty, gated):
    model, tokens, targets = certified(make_problem, loss, penalty, gated=gated, alpha=0.03, n_classes=3)
    ends = [
        train_for(model, network_for(model, targets, 24, seed=seed), tokens, targets, lr=0.2, n_steps=400)[-1]
        for seed in range(2)
    ]
    assert min(ends) >= model.certificate_.dual
    assert min(ends) == pytest.approx(model.certificate_.primal, rel=1e-3)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_one_head_is_not_enough_where_the_solution_has_more(make_problem, penalty):
    model, tokens, targets = certified(make_problem, "squared", penalty, alpha=0.05, n_outputs=2)
    assert len(model.heads_) >= 4

    def best_of(n_heads):
        networks = [network_for(model, targets, n_heads, seed=seed) for seed in range(2)]
        return min(train_for(model, network, tokens, targets, lr=0.1, n_steps=300)[-1] for network in networks)

    assert best_of(1) > 1.1 * model.certificate_.primal
    assert best_of(16) < 1.02 * model.certificate_.primal


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
def test_training_from_the_certified_network_cannot_improve_it(make_problem, penalty, gated):
    model, tokens, targets = certified(make_problem, "squared", penalty, gated=gated, tol=1e-9, n_outputs=2)
    network = model.heads_.to_torch()
    start = network.objective(tokens, targets, penalty=penalty, alpha=model.alpha).item()
    assert start == pytest.approx(model.certificate_.primal, rel=1e-9)
    values = train_for(model, copy.deepcopy(network), tokens, targets, lr=1e-3, n_steps=200)
    rounding = 16 * np.finfo(float).eps * start
    assert min(values) >= model.certificate_.dual - rounding
    assert min(values) >= start - max(model.certificate_.gap, 0) - rounding


@settings(deadline=None, derandomize=True, max_examples=20, database=None)
@given(seed=st.integers(0, 10_000), n_heads=st.integers(1, 8), scale=st.floats(0.0, 3.0))
def test_no_random_network_is_below_the_bound(make_problem, seed, n_heads, scale):
    model, tokens, targets = certified(make_problem, "squared", "nuclear", tol=1e-4, n_outputs=2)
    network = network_for(model, targets, n_heads, seed=seed)
    with torch.no_grad():
        network.w3 *= scale
    value = network.objective(tokens, targets, penalty="nuclear", alpha=model.alpha).item()
    assert value >= model.certificate_.dual


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"simplex": "cube"}, "simplex must be"),
        ({"n_heads": 0}, "n_heads must be a positive integer"),
        ({"n_heads": 2, "gate_index": [0]}, "gate_index"),
        ({"n_heads": 2, "gate_index": [0, -1]}, "gate_index"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ConvexAttention(2, 2, 1, **options)


@pytest.mark.parametrize("name", ["w2", "w3", "bias"])
def test_weights_of_heads_must_have_their_shapes_as_a_single_row_would_be_repeated(name):
    weights = {"w1": np.eye(2), "w2": np.ones((2, 3)), "w3": np.ones((2, 2)), "bias": np.zeros(2)}
    weights[name] = weights[name][:1]
    wanted = (2,) if name == "bias" else (2, *weights[name].shape[1:])
    with pytest.raises(ValueError, match=re.escape(f"{name} must have shape {wanted}, got {weights[name].shape}")):
        network_from_heads(**weights, gates=None, gate_index=np.zeros(2, dtype=int))

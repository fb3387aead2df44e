"""Training of the networks: search with equal budgets, minibatches, validation, early stops, and what is refused."""

import dataclasses
import json
import math
import threading

import numpy as np
import pytest
import torch

from convexformer import ConvexAttention, Gates
from convexformer.nn import (
    AttentiveProbe,
    DeepConvexTransformer,
    SequenceAttention,
    SoftmaxAttention,
    TrainingHistory,
    train,
)
from convexformer.nn.modules.base import seeded
from convexformer.nn.training.trial import Data
from convexformer.unfolded import UnfoldedNetwork

NETWORKS = {
    "convex": lambda: ConvexAttention(3, 2, 1, 6).double(),
    "sequence": lambda: SequenceAttention(3, 2, 1, 6, n_targets=1).double(),
    "softmax": lambda: SoftmaxAttention(2, 1, 2, 2, position=0).double(),
}
any_network = pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)


def data(n=40, seed=0, noise=0.1):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 3, 2))
    y = X[:, 0, :1] - X[:, 1, 1:] + noise * rng.normal(size=(n, 1))
    return torch.as_tensor(X), torch.as_tensor(y)


def weights(network):
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


# Every network


@any_network
def test_training_lowers_the_objective_and_reports_that_of_the_final_weights(make):
    network, (X, y) = make(), data()
    history = train(network, X, y, alpha=0.05, lr=0.05, n_steps=100)
    assert history.steps == list(range(101))
    assert history.final_objective == network.objective(X, y, alpha=0.05).item() < 0.5 * history.objective[0]
    assert (history.ended_by, history.stopped_early, history.kept_step) == ("n_steps", False, 100)
    assert history.validation == history.validation_steps == []
    assert math.isnan(history.final_validation)


@any_network
def test_histories_are_plain_numbers(make):
    history = train(make(), *data(), alpha=0.05, n_steps=5, validation=data(seed=1), lr=[0.1, 0.2])
    assert len(json.loads(json.dumps(dataclasses.asdict(history)))["trials"]) == 2


def test_a_history_of_no_steps_took_no_time_and_has_no_score():
    empty = TrainingHistory()
    assert isinstance(empty.total_seconds, float)
    assert empty.total_seconds == 0.0
    assert TrainingHistory(trials=[empty, TrainingHistory(seconds=[0.0, 0.5])]).total_seconds == 0.5
    for name in ("score", "final_objective"):
        with pytest.raises(ValueError, match="a history of no steps has no objective"):
            getattr(empty, name)


# Search


@any_network
def test_the_better_learning_rate_wins_with_equal_steps(make):
    network, (X, y) = make(), data()
    rates = [1e-5, 3e-2, 1e-4]
    history = train(network, X, y, alpha=0.05, lr=rates, n_steps=60)
    alone = [train(make(), X, y, alpha=0.05, lr=rate, n_steps=60) for rate in rates]
    assert history.lr == 3e-2
    assert [trial.lr for trial in history.trials] == rates
    # Every run is the one that its learning rate gives alone: same start, same steps.
    for trial, single in zip(history.trials, alone, strict=True):
        assert trial.steps == list(range(61))
        assert trial.objective == single.objective
    assert (
        network.objective(X, y, alpha=0.05).item() == history.final_objective == min(t.final_objective for t in alone)
    )
    assert history.total_seconds == pytest.approx(sum(trial.seconds[-1] for trial in history.trials))
    assert history.total_seconds > history.seconds[-1]


def test_learning_rates_may_be_integers_beyond_64_bits():
    history = train(NETWORKS["convex"](), *data(), alpha=0.05, lr=[1e-2, 10**30], n_steps=3)
    assert [trial.lr for trial in history.trials] == [1e-2, 1e30]


def test_validation_decides_where_there_is_some():
    # Held out is the negative of the truth, so that the run which learns least is best there.
    (X, y), network = data(), NETWORKS["convex"]()
    held_out = (X, -y)
    history = train(network, X, y, alpha=0.05, lr=[1e-1, 1e-6], n_steps=60, validation=held_out)
    assert history.lr == 1e-6
    assert history.final_validation == min(trial.final_validation for trial in history.trials)
    assert network.objective(*held_out, alpha=0.0).item() == pytest.approx(history.final_validation, rel=1e-12)
    assert train(NETWORKS["convex"](), X, y, alpha=0.05, lr=[1e-1, 1e-6], n_steps=60).lr == 1e-1


def test_the_grid_is_the_product_of_both():
    history = train(
        NETWORKS["convex"](),
        *data(),
        alpha=0.05,
        optimizer="adamw",
        lr=(1e-2, 1e-3),
        weight_decay=(0.0, 1.0),
        n_steps=5,
    )
    pairs = [(trial.lr, trial.weight_decay) for trial in history.trials]
    assert pairs == [(1e-2, 0.0), (1e-2, 1.0), (1e-3, 0.0), (1e-3, 1.0)]


def test_decoupled_decay_is_that_of_adamw():
    runs = {}
    for optimizer, decay in (("adam", 0.0), ("adamw", 0.0), ("adamw", 1.0)):
        runs[optimizer, decay] = network = NETWORKS["convex"]()
        train(network, *data(), alpha=0.0, optimizer=optimizer, weight_decay=decay, lr=1e-2, n_steps=100)
    assert torch.equal(weights(runs["adam", 0.0]), weights(runs["adamw", 0.0]))
    assert weights(runs["adamw", 1.0]).norm() < 0.95 * weights(runs["adam", 0.0]).norm()


# Minibatches


def test_every_pass_over_the_samples_draws_each_at_most_once_and_batches_are_full():
    samples = Data((data(10)[0],), torch.arange(10.0)[:, None])
    batches = samples.batches(3, seed=0)
    for _ in range(5):
        drawn = torch.cat([next(batches).y[:, 0] for _ in range(3)])
        assert len(drawn) == len(set(drawn.tolist())) == 9


@any_network
def test_minibatches_reach_the_objective_of_the_full_batch(make):
    X, y = data(60)
    ends = {}
    for size in (None, 15):
        network = make()
        history = train(network, X, y, alpha=0.05, lr=0.1, n_steps=200, batch_size=size)
        ends[size] = history.final_objective
        assert history.final_objective == pytest.approx(network.objective(X, y, alpha=0.05).item(), rel=1e-12)
    assert ends[15] == pytest.approx(ends[None], rel=0.02)
    # On all samples, though only after each pass over them.
    assert history.steps == list(range(0, 201, 4))


@pytest.mark.parametrize(("n_steps", "looks"), [(200, [*range(0, 200, 7), 200]), (2000, [*range(0, 2001, 20)])])
def test_looks_are_a_pass_apart_at_least_and_a_hundred_at_most(n_steps, looks):
    history = train(NETWORKS["convex"](), *data(60), alpha=0.05, n_steps=n_steps, batch_size=8)
    assert history.steps == looks


def test_minibatches_depend_on_the_seed_alone():
    def run(seed):
        network = NETWORKS["convex"]()
        train(network, *data(), alpha=0.05, n_steps=20, batch_size=7, seed=seed)
        return weights(network)

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


def test_a_batch_of_all_samples_is_the_full_batch():
    def run(size):
        weight = torch.linspace(0.5, 2, 40, dtype=torch.float64)
        network = NETWORKS["convex"]()
        history = train(network, *data(), alpha=0.05, n_steps=50, batch_size=size, sample_weight=weight)
        wanted = network.objective(*data(), alpha=0.05, sample_weight=weight).item()
        assert history.final_objective == pytest.approx(wanted, rel=1e-12)
        return history

    np.testing.assert_allclose(run(40).objective, run(None).objective, rtol=1e-10)


def test_seeds_of_batches_may_be_integers_of_numpy():
    def run(seed):
        return train(NETWORKS["convex"](), *data(), alpha=0.05, n_steps=5, batch_size=7, seed=seed).objective

    assert run(np.uint8(3)) == run(3)


def test_memories_may_be_integers_and_in_single_precision():
    def run(betas):
        return train(NETWORKS["convex"](), *data(), alpha=0.05, n_steps=5, betas=betas).objective

    assert run((0, np.float32(0.5))) == run((0.0, 0.5))


def test_networks_train_where_gradients_are_switched_off():
    def run():
        return train(NETWORKS["convex"](), *data(), alpha=0.05, n_steps=5).objective

    with torch.no_grad():
        objective = run()
        assert not torch.is_grad_enabled()
    assert objective == run()


def test_no_gradient_passes_to_the_samples():
    X, y = data()
    wanted = train(NETWORKS["convex"](), X, y, alpha=0.05, n_steps=5).objective
    leaf = X.clone().requires_grad_()
    assert train(NETWORKS["convex"](), leaf * 1, y, alpha=0.05, n_steps=5).objective == wanted
    assert train(NETWORKS["convex"](), leaf, y, alpha=0.05, n_steps=5).objective == wanted
    weight = torch.ones(len(X), requires_grad=True)
    assert train(NETWORKS["convex"](), leaf, y, alpha=0.05, n_steps=5, sample_weight=weight).objective == wanted
    assert leaf.grad is None
    assert weight.grad is None


def test_sizes_of_batches_may_be_integers_of_numpy():
    def run(size):
        return train(NETWORKS["convex"](), *data(), alpha=0.05, n_steps=5, batch_size=size).objective

    assert run(np.int64(7)) == run(7)


def test_weights_of_samples_keep_their_scale_in_minibatches():
    # Samples that weigh nothing leave the other half with weight 2 each: the mean over all draws is the same.
    X, y = data(40)
    weight = torch.ones(40, dtype=torch.float64)
    weight[20:] = 0
    half, counted = NETWORKS["convex"](), NETWORKS["convex"]()
    train(half, X[:20], y[:20], alpha=0.05, lr=0.1, n_steps=200)
    y[20:] = 100.0
    train(counted, X, y, alpha=0.05, lr=0.1, n_steps=200, sample_weight=weight, batch_size=10)
    wanted = half.objective(X[:20], y[:20], alpha=0.05).item()
    assert counted.objective(X[:20], y[:20], alpha=0.05).item() == pytest.approx(wanted, rel=0.03)


@any_network
@pytest.mark.parametrize("batch_size", [None, 7, 40])
def test_samples_of_weight_zero_may_have_infinite_losses(make, batch_size):
    X, y = data(40)
    weight = torch.linspace(1, 2, 40, dtype=torch.float64)
    weight[::4] = 0
    counted = weight > 0
    options = {"alpha": 0.05, "n_steps": 20}
    small = None if batch_size is None else min(batch_size, 30)
    left_out = train(make(), X[counted], y[counted], sample_weight=weight[counted], batch_size=small, **options)
    X[~counted] = 1e200
    network = make()
    history = train(network, X, y, sample_weight=weight, batch_size=batch_size, **options)
    assert history.objective == left_out.objective
    assert history.ended_by == "n_steps"
    objective = network.objective(X, y, alpha=0.05, sample_weight=weight)
    assert objective.item() == pytest.approx(history.final_objective, rel=1e-12)
    gradients = torch.autograd.grad(objective, list(network.parameters()), allow_unused=True)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)


@pytest.mark.parametrize("size", [1e-60, 1e60])
def test_weights_may_be_beyond_the_numbers_of_the_network(size):
    X, y = (part.float() for part in data(12))
    weight = torch.linspace(1, 2, 12, dtype=torch.float64)

    def run(given):
        return train(NETWORKS["convex"]().float(), X, y, alpha=0.05, n_steps=5, sample_weight=given).objective

    assert run(size * weight) == pytest.approx(run(weight), rel=1e-5)


@pytest.mark.parametrize("flat", [False, True])
def test_classes_of_each_token_are_targets(flat):
    X, _ = data()
    y = torch.nn.functional.one_hot((X[:, :, 0] > 0).long(), 2).double()
    history = train(
        SequenceAttention(3, 2, 2, n_heads=6).double(),
        X,
        y.flatten(1) if flat else y,
        loss="softmax",
        alpha=0.0,
        lr=0.05,
    )
    assert history.final_objective < 0.9 * history.objective[0]


def test_gated_networks_train_on_minibatches_with_their_masks():
    rng = np.random.default_rng(0)
    gates = Gates(rng.normal(size=(4, 3)), rng.normal(size=(4, 2)))
    network, (X, y) = ConvexAttention(3, 2, 1, 8, gates=gates).double(), data()
    tokens, masks = network.prepared(X)
    assert tokens is X
    assert torch.equal(masks, gates.masks(X))
    rows = torch.tensor([5, 3])
    assert torch.equal(network(tokens[rows], masks[rows]), network(X[rows]))
    history = train(network, X, y, alpha=0.01, n_steps=100, batch_size=10, lr=0.1, validation=data(seed=1))
    assert history.final_objective == pytest.approx(network.objective(X, y, alpha=0.01).item(), rel=1e-12)
    assert history.final_objective < 0.5 * history.objective[0]


# Samples of differing lengths

LENGTHS = torch.arange(40) % 4 + 1
MASKED = {
    "probe": lambda: AttentiveProbe(2, 1, n_queries=3).double(),
    "unfolded": lambda: UnfoldedNetwork(6, 2, 1, n_layers=2, n_heads=6).double(),
}
either_masked = pytest.mark.parametrize("make", MASKED.values(), ids=MASKED)


def padded(n=40, seed=0, fill=math.nan):
    """Samples of 1 to 4 tokens, with 2 to 5 places that hold `fill`."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(6) < LENGTHS[:n, None]
    tokens = torch.randn(n, 6, 2, generator=generator, dtype=torch.float64)
    y = (tokens[..., :1] * mask[..., None]).sum(1)
    return tokens.masked_fill(~mask[..., None], fill), mask, y


@either_masked
@pytest.mark.parametrize("real", [torch.Tensor.bool, torch.Tensor.int, lambda mask: mask.sum(1), torch.Tensor.tolist])
@pytest.mark.parametrize("batch_size", [None, 16])
def test_what_padding_holds_changes_no_training(make, real, batch_size):
    options = {"alpha": 0.01, "lr": 0.05, "n_steps": 20, "batch_size": batch_size}
    ends = []
    for fill in (0.0, 7.0, math.nan):
        (tokens, mask, y), (held_out, its_mask, its_y), network = padded(fill=fill), padded(20, 1, fill), make()
        history = train(network, (tokens, real(mask)), y, validation=((held_out, real(its_mask)), its_y), **options)
        ends.append((weights(network), history.objective, history.validation))
        objective = network.objective((tokens, real(mask)), y, alpha=0.01).item()
        assert history.final_objective == pytest.approx(objective, rel=1e-12)
    for end in ends[1:]:
        assert torch.equal(end[0], ends[0][0])
        assert end[1:] == ends[0][1:]


@either_masked
def test_steps_are_those_of_samples_without_their_padding(make):
    tokens, mask, y = padded(fill=0.0)
    tokens[2, 1], mask[2, 1] = 0.0, False  # padding need not come last
    network, other = make(), make()
    train(network, (tokens, mask), y, alpha=0.01, lr=0.05, schedule="constant", n_steps=10)
    steps = torch.optim.Adam(other.parameters(), lr=0.05)
    for _ in range(10):
        rows = [part[real][None] for part, real in zip(tokens, mask, strict=True)]
        predictions = torch.cat([other(row) for row in rows])
        steps.zero_grad()
        ((predictions - y).square().sum() / 2 / len(y) + 0.01 * other.decay()).backward()
        steps.step()
    torch.testing.assert_close(weights(network), weights(other), rtol=1e-8, atol=1e-10)


def test_samples_of_weight_zero_take_their_mask_with_them():
    tokens, mask, y = padded()
    weight = torch.linspace(1, 2, 40, dtype=torch.float64)
    weight[::3] = 0
    counted = weight > 0
    every, some = MASKED["probe"](), MASKED["probe"]()
    options = {"alpha": 0.01, "n_steps": 5, "batch_size": 10}
    train(every, (tokens, mask), y, sample_weight=weight, **options)
    train(some, (tokens[counted], mask[counted]), y[counted], sample_weight=weight[counted], **options)
    assert torch.equal(weights(every), weights(some))
    wanted = some.objective((tokens[counted], mask[counted]), y[counted], alpha=0.01, sample_weight=weight[counted])
    assert torch.equal(every.objective((tokens, LENGTHS), y, alpha=0.01, sample_weight=weight), wanted)


@any_network
def test_networks_that_take_no_mask_refuse_one(make):
    X, y = data()
    pair = (X, torch.ones(40, 3, dtype=torch.bool))
    message = r"^{}tokens must be one tensor for \w+Attention, whose forward takes no mask of tokens, got a pair"
    with pytest.raises(ValueError, match=message.format("")):
        train(make(), pair, y, alpha=0.05)
    with pytest.raises(ValueError, match=message.format("validation ")):
        train(make(), X, y, alpha=0.05, validation=(pair, y))
    with pytest.raises(ValueError, match=message.format("")):
        make().objective(pair, y, alpha=0.05)


@pytest.mark.parametrize(
    ("real", "message"),
    [
        (torch.full((40,), 7), r"tokens\[1\] must hold lengths from 1 to 6, the tokens of .*tokens\[0\], got 7"),
        (torch.ones(40, 6), r"tokens\[1\] must be lengths, integers of shape \(40,\), or a mask .*got torch.float32"),
        (torch.ones(40, 5).bool(), r"tokens\[1\] must be lengths, .* got torch.bool of shape \(40, 5\)"),
        (LENGTHS - 1, r"tokens\[1\] must leave each sample at least one token that is real, got none of sample 0"),
    ],
)
def test_bad_masks_are_named(real, message):
    tokens, mask, y = padded()
    with pytest.raises(ValueError, match="^" + message):
        train(MASKED["probe"](), (tokens, real), y, alpha=0.05)
    with pytest.raises(ValueError, match="^validation " + message):
        train(MASKED["probe"](), (tokens, mask), y, alpha=0.05, validation=((tokens, real), y))


def test_tokens_of_a_pair_are_checked_where_they_are_real():
    tokens, mask, y = padded()
    with pytest.raises(ValueError, match=r"tokens\[0\] must be torch.float64 on cpu"):
        train(MASKED["probe"](), (tokens.float(), mask), y, alpha=0.05)
    with pytest.raises(ValueError, match="tokens must be finite"):
        train(MASKED["probe"](), (tokens, torch.ones_like(mask)), y, alpha=0.05)


# Optimisers, schedules and looks


def test_a_constant_rate_does_not_depend_on_how_long_the_run_is_and_a_cosine_does():
    def after_20(n_steps, schedule):
        network = NETWORKS["convex"]()
        options = {"schedule": schedule, "n_steps": n_steps, "callback": lambda step, _: step == 20}
        train(network, *data(), alpha=0.05, lr=0.05, **options)
        return weights(network)

    assert torch.equal(after_20(20, "constant"), after_20(60, "constant"))
    assert not torch.equal(after_20(20, "cosine"), after_20(60, "cosine"))


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_steps_are_those_of_torch_with_the_given_memories(optimizer):
    (X, y), network, other = data(), NETWORKS["convex"](), NETWORKS["convex"]()
    options = {"lr": 0.05, "betas": (0.5, 0.8), "weight_decay": 0.3 if optimizer == "adamw" else 0.0}
    train(network, X, y, alpha=0.05, optimizer=optimizer, schedule="constant", n_steps=15, **options)
    steps = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer](other.parameters(), **options)
    for _ in range(15):
        steps.zero_grad()
        other.objective(X, y, alpha=0.05).backward()
        steps.step()
    torch.testing.assert_close(weights(network), weights(other), rtol=1e-10, atol=1e-12)


def test_callbacks_come_at_each_look_and_see_the_weights_of_their_step():
    (X, y), network, seen = data(), NETWORKS["convex"](), []

    def watch(step, objective):
        assert objective == pytest.approx(network.objective(X, y, alpha=0.05).item(), rel=1e-12)
        seen.append(step)
        return step >= 21

    options = {"n_steps": 100, "batch_size": 10, "look_every": 7, "validation": data(seed=1)}
    history = train(network, X, y, alpha=0.05, callback=watch, **options)
    assert seen == history.steps == [0, 7, 14, 21]
    assert history.validation_steps == seen
    assert history.ended_by == "callback"


@pytest.mark.parametrize("batch_size", [None, 10])
def test_looks_leave_training_as_it_is(batch_size):
    ends = []
    for every in (None, 9):
        network = NETWORKS["convex"]()
        options = {"n_steps": 30, "batch_size": batch_size, "look_every": every, "validation": data(seed=1)}
        history = train(network, *data(), alpha=0.05, **options)
        ends.append((weights(network), history.final_validation))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    assert history.validation_steps == [0, 9, 18, 27, 30]


# Validation and early stops


def overfitting():
    """Few noisy samples, many heads: the loss on held-out data falls and rises again."""
    return ConvexAttention(3, 2, 1, 20).double(), data(6, noise=3.0), data(200, seed=1)


def test_validation_is_the_loss_without_decay_at_every_interval():
    network, train_data, held_out = overfitting()
    history = train(network, *train_data, alpha=0.3, n_steps=250, validation=held_out)
    assert history.validation_steps == [*range(0, 250, 3), 250]
    assert history.validation[-1] == pytest.approx(network.objective(*held_out, alpha=0.0).item(), rel=1e-12)
    assert history.kept_step == 250  # without patience the last weights are kept, though earlier ones were better
    assert min(history.validation) < history.validation[-1]


@pytest.mark.parametrize("batch_size", [None, 3])
def test_patience_stops_and_restores_the_best_weights(batch_size):
    network, train_data, held_out = overfitting()
    options = {"lr": 0.05, "n_steps": 1000, "validation": held_out, "patience": 3, "batch_size": batch_size}
    history = train(network, *train_data, alpha=0.0, **options)
    assert (history.ended_by, history.stopped_early) == ("patience", True)
    assert history.steps[-1] < 1000
    best = int(np.argmin(history.validation))
    assert len(history.validation) == best + 4
    assert history.kept_step == history.validation_steps[best]
    assert network.objective(*held_out, alpha=0.0).item() == pytest.approx(min(history.validation), rel=1e-12)
    assert history.final_validation == min(history.validation)
    assert network.objective(*train_data, alpha=0.0).item() == pytest.approx(history.final_objective, rel=1e-12)


def test_progress_gives_patience_back():
    # Single samples make the validation loss rise and fall on its way down.
    options = {"lr": 0.02, "n_steps": 190, "look_every": 2, "patience": 6, "batch_size": 1}
    history = train(NETWORKS["convex"](), *data(noise=0.5), alpha=0.0, validation=data(seed=1), **options)
    values = np.array(history.validation)
    best = int(values.argmin())
    rises = values[1 : best + 1] >= np.minimum.accumulate(values)[:best]
    assert rises.sum() >= 6  # more in all than patience allows in a row
    assert len(values) == best + 7


def test_patience_that_is_never_exhausted_still_keeps_the_best_weights():
    network, train_data, held_out = overfitting()
    options = {"lr": 0.05, "n_steps": 200, "validation": held_out, "patience": 1000}
    history = train(network, *train_data, alpha=0.0, **options)
    assert history.ended_by == "n_steps"
    assert history.kept_step < 200
    assert network.objective(*held_out, alpha=0.0).item() == pytest.approx(min(history.validation), rel=1e-12)


def test_a_validation_loss_that_stays_the_same_is_no_progress():
    options = {"lr": 1e-30, "n_steps": 50, "look_every": 1, "validation": data(seed=1), "patience": 3}
    history = train(NETWORKS["convex"](), *data(), alpha=0.05, **options)
    assert (history.ended_by, history.validation_steps, history.kept_step) == ("patience", [0, 1, 2, 3], 0)


def test_a_spent_budget_of_seconds_ends_every_combination():
    network, (X, y) = NETWORKS["convex"](), data()
    history = train(network, X, y, alpha=0.05, lr=[1e-2, 1e-3], n_steps=1000, seconds=1e-9)
    # A step is always taken, and the time of the budget is looked at before the next.
    assert [(trial.steps, trial.ended_by) for trial in history.trials] == [([0, 1], "seconds")] * 2
    assert history.final_objective == network.objective(X, y, alpha=0.05).item()


def test_evaluations_and_callbacks_do_not_count_as_seconds(monkeypatch):
    # A clock that only callbacks advance.
    now = [0.0]
    monkeypatch.setattr("convexformer.nn.training.stopwatch.time.perf_counter", lambda: now[0])

    def wait(step, objective):
        now[0] += 100.0

    history = train(NETWORKS["convex"](), *data(), alpha=0.05, n_steps=10, seconds=1.0, callback=wait)
    assert history.ended_by == "n_steps"
    assert history.seconds == [0.0] * 11


def test_a_callback_ends_its_combination():
    network, (X, y) = NETWORKS["convex"](), data()
    history = train(
        network, X, y, alpha=0.05, lr=[1e-2, 1e-3], n_steps=30, validation=(X, y), callback=lambda step, _: step == 5
    )
    assert [(trial.steps[-1], trial.ended_by) for trial in history.trials] == [(5, "callback")] * 2
    assert history.final_validation == pytest.approx(network.objective(X, y, alpha=0.0).item(), rel=1e-12)


@pytest.mark.parametrize("answer", [np.True_, 1])
def test_whatever_counts_as_true_ends_it(answer):
    history = train(NETWORKS["convex"](), *data(), alpha=0.05, n_steps=30, callback=lambda *_: answer)
    assert history.trials[0].ended_by == "callback"


def test_a_progress_bar_counts_the_steps_of_all_combinations(capsys):
    train(NETWORKS["convex"](), *data(), alpha=0.05, lr=[1e-2, 1e-3], n_steps=30, verbose=True)
    assert "60/60" in capsys.readouterr().err


def test_a_progress_bar_is_full_though_combinations_ended_early(capsys):
    options = {"lr": [1e-2, 1e-3], "n_steps": 30, "verbose": True, "callback": lambda step, _: step == 5}
    train(NETWORKS["convex"](), *data(), alpha=0.05, **options)
    assert "60/60" in capsys.readouterr().err


# Divergence


def test_what_diverged_has_no_further_look_and_the_warning_is_of_the_call():
    options = {"lr": 1e200, "look_every": 1, "validation": data(seed=1)}
    with pytest.warns(RuntimeWarning, match="diverged") as caught:
        history = train(ConvexAttention(3, 2, 1, 6).double(), *data(), alpha=0.05, **options)
    assert [warning.filename for warning in caught] == [__file__]
    assert history.validation_steps == history.steps[:-1]


@pytest.mark.parametrize("simplex", ["softmax", "projection"])
def test_a_combination_that_diverges_ends_at_once_and_loses(simplex):
    X, y = data()
    network = ConvexAttention(3, 2, 1, 6, simplex=simplex).double()
    history = train(network, X, 1e3 * y, alpha=0.05, lr=[1e200, 1e-2], n_steps=50)
    lost, won = history.trials
    assert (lost.ended_by, won.ended_by) == ("diverged", "n_steps")
    assert len(lost.steps) < 50
    assert not math.isfinite(lost.objective[-1])
    assert history.lr == 1e-2
    assert math.isfinite(network.objective(X, 1e3 * y, alpha=0.05).item())


@pytest.mark.parametrize("batch_size", [None, 10])
def test_divergence_everywhere_warns_and_gives_the_first_weights_back(batch_size):
    (X, y), network = data(), ConvexAttention(3, 2, 1, 6).double()
    first = weights(network)
    with pytest.warns(RuntimeWarning, match=r"diverged with every learning rate \(1e\+200\)"):
        history = train(network, X, y, alpha=0.05, lr=1e200, n_steps=50, batch_size=batch_size)
    assert torch.equal(weights(network), first)
    assert (history.ended_by, history.kept_step) == ("diverged", 0)
    assert history.final_objective == pytest.approx(network.objective(X, y, alpha=0.05).item(), rel=1e-12)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_half_precision_in_which_adam_divides_by_zero_is_refused(optimizer):
    network, (X, y) = ConvexAttention(3, 2, 1, 6), data()
    with pytest.raises(ValueError, match=r"network must have weights in float32.*got torch.float16.*network.float\(\)"):
        train(network.half(), X.half(), y.half(), alpha=0.05, optimizer=optimizer, n_steps=2)
    history = train(network.bfloat16(), X.bfloat16(), y.bfloat16(), alpha=0.05, optimizer=optimizer, n_steps=50)
    assert history.final_objective < history.objective[0]


# Devices


@any_network
@pytest.mark.parametrize("batch_size", [None, 10])
def test_any_device_trains_to_the_same_weights(make, batch_size, accelerator):
    ends = []
    for device in ("cpu", accelerator):
        network = make().to(device)
        X, y = (part.to(device) for part in data())
        history = train(network, X, y, alpha=0.05, n_steps=50, batch_size=batch_size, validation=(X, y), patience=50)
        ends.append((weights(network).cpu(), history.objective))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(ends[0][1], ends[1][1], rtol=1e-8)


def test_the_default_device_of_torch_changes_no_training(accelerator):
    def trained():
        network = ConvexAttention(3, 2, 1, 6, gates=Gates(np.eye(2, 3), np.eye(2)))
        X, y = (part.to(network.w2) for part in data())
        train(network, X, y, alpha=0.05, n_steps=5, batch_size=10)
        return network

    wanted = weights(trained())
    with torch.device(accelerator):
        network = trained()
    assert network.w2.device.type == accelerator
    torch.testing.assert_close(weights(network).cpu(), wanted)


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "sgd"}, "optimizer must be one of"),
        ({"schedule": "linear"}, "schedule must be one of"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"betas": (-0.1, 0.9)}, "betas must be two numbers"),
        ({"look_every": 0}, "look_every must be a positive integer"),
        ({"seed": "x"}, "seed must be an integer, got 'x'"),
        ({"lr": []}, "lr must be"),
        ({"lr": -0.1}, "lr must be"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": [0.0, 0.1]}, "lr must be positive"),
        ({"lr": True}, "lr must be"),
        ({"lr": [0.1, float("nan")]}, "lr must be"),
        ({"lr": [[0.1]]}, "lr must be"),
        ({"weight_decay": 0.1}, "the decay of the objective is alpha"),
        ({"weight_decay": [0.0, 0.1]}, "the decay of the objective is alpha"),
        ({"weight_decay": [], "optimizer": "adamw"}, "weight_decay must be"),
        ({"weight_decay": -1.0, "optimizer": "adamw"}, "weight_decay must be"),
        ({"alpha": -0.1}, "alpha must be"),
        ({"alpha": float("nan")}, "alpha must be"),
        ({"n_steps": 0}, "n_steps must be a positive integer"),
        ({"batch_size": 0}, "batch_size must be a positive integer"),
        ({"batch_size": 41}, "batch_size must be at most the number of samples, 40"),
        ({"patience": 0, "validation": data()}, "patience must be a positive integer"),
        ({"patience": 3}, "patience needs validation"),
        ({"validation": data()[0]}, "validation must be a pair"),
        ({"validation": data()[0][:2]}, "validation must be a pair"),
        ({"validation": (*data(), data()[1])}, "validation must be a pair"),
        ({"validation": (data()[0], data(20)[1])}, "validation y must have one row per sample"),
        ({"validation": (data()[0].float(), data()[1])}, r"validation tokens must be torch.float64"),
        ({"validation": (data()[0], data()[1].repeat(1, 2))}, r"validation y must have shape \(40, 1\)"),
        ({"validation": (data()[0], data()[1] / 0)}, "validation y must be finite"),
        ({"seconds": 0}, "seconds must be positive"),
        ({"seconds": True}, "seconds must be positive"),
        ({"alpha": True}, "alpha must be"),
        ({"loss": "logistic"}, "targets of the Logistic loss"),
        ({"loss": "nonsense"}, "loss must be"),
        ({"penalty": "nonsense"}, "penalty must be"),
        ({"sample_weight": torch.ones(39)}, "sample_weight must have shape"),
        ({"sample_weight": -torch.ones(40)}, "sample_weight must be finite, non-negative"),
        ({"sample_weight": torch.zeros(40)}, "sample_weight must be finite, non-negative and not all zero"),
    ],
)
def test_bad_arguments_are_named_and_change_nothing(options, message):
    network = NETWORKS["convex"]()
    first = weights(network)
    with pytest.raises(ValueError, match=message):
        train(network, *data(), **{"alpha": 0.1, "n_steps": 3, **options})
    assert torch.equal(weights(network), first)


@pytest.mark.parametrize(
    ("tokens", "y", "message"),
    [
        (torch.zeros(4, 3, 2), torch.zeros(4, 1), "tokens must be torch.float64"),
        (torch.zeros(4, 6).double(), torch.zeros(4, 1).double(), "tokens must have shape"),
        (torch.zeros(4, 3, 2).double(), torch.zeros(3, 1).double(), "y must have one row per sample, 4, got 3"),
        (torch.zeros(4, 3, 2).double(), torch.zeros(4).double(), r"y must have shape \(4, 1\), .* got \(4,\)"),
        (torch.zeros(4, 3, 2).double(), torch.zeros(4, 2).double(), "y must have shape"),
        (torch.zeros(4, 3, 2).double(), torch.zeros(4, 1), "y must be torch.float64"),
        (torch.full((4, 3, 2), torch.inf).double(), torch.zeros(4, 1).double(), "tokens must be finite"),
        (torch.zeros(4, 3, 2).double(), torch.full((4, 1), torch.nan).double(), "y must be finite"),
    ],
)
def test_bad_data_are_named(tokens, y, message):
    with pytest.raises(ValueError, match=message):
        train(NETWORKS["convex"](), tokens, y, alpha=0.1)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(4, 3, 5), r"tokens must have shape \(n_samples, (3|n_tokens), 2\), got \(4, 3, 5\)"),
        (torch.zeros(4, 3, 2).double(), "tokens must be torch.float32 on cpu like the network"),
        (torch.zeros(4, 3, 2).to_sparse(), r"tokens must be a dense tensor.*give tokens.to_dense\(\)"),
        (
            torch.nested.as_nested_tensor([torch.zeros(3, 2), torch.zeros(2, 2)], layout=torch.jagged),
            r"tokens must not be a nested tensor; pad it, as with torch.nested.to_padded_tensor\(tokens, 0.0\)",
        ),
    ],
    ids=["width", "precision", "sparse", "nested"],
)
@pytest.mark.parametrize("name", [*NETWORKS, "deep", "attentive"])
def test_tokens_that_a_module_does_not_read_are_named(name, tokens, message):
    others = {"attentive": lambda: AttentiveProbe(2), "deep": lambda: DeepConvexTransformer(3, 2, seed=1)}
    with pytest.raises(ValueError, match=message):
        {**NETWORKS, **others}[name]().float()(tokens)


def test_a_network_of_another_kind_or_whose_weights_are_all_frozen_is_named():
    with pytest.raises(ValueError, match=r"network must have weights to train, .*requires_grad_\(True\)"):
        train(NETWORKS["convex"]().requires_grad_(False), *data(), alpha=0.1)
    with pytest.raises(TypeError, match=r"network must be an AttentionNetwork of .*, got Linear"):
        train(torch.nn.Linear(2, 1).double(), *data(), alpha=0.1)


def test_a_thread_that_draws_from_a_seed_does_not_disturb_another():
    with seeded(0):
        alone = torch.rand(2)
    entered, drawn = threading.Event(), threading.Event()

    def draw_meanwhile():
        with seeded(1):
            entered.set()
            drawn.wait()

    other = threading.Thread(target=draw_meanwhile)
    with seeded(0):
        first = torch.rand(1)
        other.start()
        entered.wait(0.3)  # it may not enter now
        found = torch.cat([first, torch.rand(1)])
    drawn.set()
    other.join()
    assert torch.equal(found, alone)

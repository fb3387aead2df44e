"""Primal-dual training: known solutions, resilience, infeasibility, resuming bit for bit, errors."""

import contextlib
import copy
import dataclasses
import itertools
import warnings
import zipfile

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from convexformer.constrained import (
    ConstrainedHistory,
    ConstrainedTrainingInterrupted,
    DescentConstraints,
    FeasibilityReport,
    InfeasibleWarning,
    NonFiniteLossError,
    PrimalDual,
)
from convexformer.constrained.multipliers import Multipliers
from convexformer.constrained.selection import rank

ONE = [torch.zeros(1)]
PLAIN = {"optimizer": "sgd", "dual_optimizer": "sgd", "lr": 0.05, "dual_lr": 0.05, "warmup_epochs": 0}


class Point(nn.Module):
    """Coordinates as a model."""

    def __init__(self, *start):
        super().__init__()
        self.at = nn.Parameter(torch.tensor(start, dtype=torch.float64))


def point_losses(*functions):
    def layer_losses(model, batch):
        return torch.stack([function(*model.at) * torch.ones(1, dtype=torch.float64) for function in functions])

    return layer_losses


# Known solutions


def test_the_reference_bound_has_its_known_solution():
    """x^2 <= 1 while (x - 2)^2 / 4 is minimised: x = 1 with the multiplier 1/4."""
    model = Point(0.0)
    losses = point_losses(lambda x: x**2, lambda x: (x - 2) ** 2 / 4)
    trainer = PrimalDual(model, losses, alpha=0.1, c_ref=1.0, **PLAIN)
    trainer.fit(ONE, n_epochs=1000)
    assert model.at.item() == pytest.approx(1, abs=1e-3)
    assert trainer.duals_.tolist() == pytest.approx([0.25, 0], abs=1e-3)
    assert trainer.feasible_


@pytest.mark.parametrize("options", [{}, {"dual_update": "epoch"}, {"dual_optimizer": "adam", "dual_lr": 1e-3}])
def test_a_descent_constraint_has_its_known_solution(options):
    """1, x^2, (x - 2)^2 / 8 with alpha = 1/2: x = sqrt(1/2), its multiplier (2 - x) / (8 x)."""
    model = Point(0.0)
    losses = point_losses(lambda x: 1 + 0 * x, lambda x: x**2, lambda x: (x - 2) ** 2 / 8)
    trainer = PrimalDual(model, losses, alpha=0.5, c_ref=2.0, **PLAIN | options)
    trainer.fit(ONE, n_epochs=1000)
    best = 0.5**0.5
    assert model.at.item() == pytest.approx(best, abs=1e-3)
    assert trainer.duals_.tolist() == pytest.approx([0, (2 - best) / (8 * best), 0], abs=1e-3)


@pytest.mark.parametrize("slack_update", ["decay", "explicit"])
@pytest.mark.parametrize("price", [0.2, 2.0])
def test_resilience_has_its_fixed_point(slack_update, price):
    """The slack is the multiplier over the price, and the constraint is violated by just that."""
    model = Point(0.0)
    losses = point_losses(lambda x: x**2, lambda x: (x - 2) ** 2 / 4)
    trainer = PrimalDual(
        model, losses, alpha=0.1, c_ref=1.0, resilience=price, slack_update=slack_update, **PLAIN | {"lr": 0.1}
    )
    trainer.fit(ONE, n_epochs=800)
    best = brentq(lambda x: (2 - x) / (4 * x) / price - (x**2 - 1), 1, 2)
    assert model.at.item() == pytest.approx(best, abs=1e-3)
    assert trainer.duals_[0].item() == pytest.approx((2 - best) / (4 * best), abs=1e-3)
    torch.testing.assert_close(trainer.slacks_, trainer.duals_ / price, rtol=0, atol=1e-3)
    assert trainer.report_.violations[0] == pytest.approx(0, abs=1e-3)


def test_an_infeasible_problem_is_reported():
    model = Point(1.0)
    losses = point_losses(lambda x: x**2 + 2, lambda x: x**2 + 1)
    trainer = PrimalDual(model, losses, alpha=0.1, c_ref=1.0, **PLAIN)
    with pytest.warns(InfeasibleWarning, match="layer 1 is violated by 1"):
        trainer.fit(ONE, n_epochs=100)
    assert not trainer.feasible_
    assert trainer.duals_[0] > trainer.history_.duals[10][0] > 0  # it grows without end


def test_the_warning_names_a_constraint_that_does_not_hold():
    """The first layer is above its bound by .5, less than its standard error; the second by .1, without one."""

    def layer_losses(model, batch):
        (first,) = batch
        return torch.stack([first, 0.5 * first + 0.1]) + 0 * model.at

    data = [torch.tensor([0.0, 3.0], dtype=torch.float64)]
    trainer = PrimalDual(Point(0.0), layer_losses, alpha=0.5, c_ref=1.0, **PLAIN)
    with pytest.warns(InfeasibleWarning, match=r"layer 2 is violated by 0\.1 "):
        trainer.fit(data, n_epochs=1)
    assert trainer.report_.violations[0] < trainer.report_.standard_errors[0]


def test_resilience_with_validation_keeps_the_fixed_point():
    """The slacks of early epochs, which overshoot, must not make early weights look feasible."""
    for dual_lr in (0.5, 0.1):
        model = Point(0.0)
        losses = point_losses(lambda x: x**2, lambda x: (x - 2) ** 2 / 4)
        trainer = PrimalDual(model, losses, alpha=0.0, c_ref=0.05, resilience=0.5, **PLAIN | {"dual_lr": dual_lr})
        trainer.fit(ONE, n_epochs=600, validation=ONE)
        best = brentq(lambda x: (2 - x) / (4 * x) / 0.5 - (x**2 - 0.05), 0.05, 2)
        assert model.at.item() == pytest.approx(best, abs=1e-3)
        assert trainer.report_.violations[0] == pytest.approx(0, abs=2e-2)


# Negative weights


def net_weight_problem(stop_gradient):
    """The last loss cannot come below 1, so the constraint can be met by raising the first alone."""
    model = Point(0.5, 0.5)
    losses = point_losses(lambda a, b: a**2, lambda a, b: 1 + b**2)
    trainer = PrimalDual(model, losses, alpha=0.5, c_ref=10.0, stop_gradient=stop_gradient, **PLAIN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InfeasibleWarning)
        trainer.fit(ONE, n_epochs=300)
    return trainer


def test_a_negative_net_weight_raises_the_loss_of_its_layer():
    trainer = net_weight_problem(stop_gradient=False)
    weights, losses = np.array(trainer.history_.net_weights), np.array(trainer.history_.losses)
    assert (weights[:20, 0] < 0).all()
    assert losses[-1, 0] > 1.9 > losses[0, 0]
    assert trainer.feasible_


def test_without_the_gradient_of_the_reference_no_loss_is_raised():
    trainer = net_weight_problem(stop_gradient=True)
    losses = np.array(trainer.history_.losses)
    assert losses[-1, 0] == pytest.approx(losses[0, 0])
    assert not trainer.feasible_


def test_net_weights_are_the_factors_of_the_lagrangian():
    constraints = DescentConstraints(alpha=0.3, c_ref=1.5)
    losses = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64, requires_grad=True)
    duals = torch.tensor([0.5, 2.0, 0.1], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(constraints.lagrangian(losses, duals), losses)
    torch.testing.assert_close(gradient, constraints.net_weights(duals))
    stopped = constraints.lagrangian(losses, duals, stop_gradient=True)
    assert stopped.item() == pytest.approx(constraints.lagrangian(losses, duals).item())
    (gradient,) = torch.autograd.grad(stopped, losses)
    torch.testing.assert_close(gradient, constraints.net_weights(duals, stop_gradient=True))
    assert constraints.values(losses)[0].item() == 1.5
    with_factor = DescentConstraints(alpha=0.3, c_ref=1.5, first_factor=True)
    assert with_factor.values(losses)[0].item() == pytest.approx(3 - 0.7 * 1.5)


def test_constraints_are_of_two_layers_or_more_and_leave_multipliers_as_they_are():
    constraints, duals = DescentConstraints(c_ref=1.0), torch.tensor([0.5, 2.0])
    constraints.net_weights(duals)
    assert duals.tolist() == [0.5, 2.0]
    with pytest.raises(ValueError, match="losses must be those of two layers or more"):
        constraints.values(torch.ones(1))


def test_the_reference_must_be_given_by_name():
    """No loss is a reference for every problem, and two numbers without names would be mistaken for each other."""
    with pytest.raises(TypeError, match="c_ref"):
        DescentConstraints(alpha=0.1)
    with pytest.raises(TypeError, match="positional"):
        DescentConstraints(0.1, 1.0)


# A network


class Layers(nn.Module):
    """A few residual layers with dropout."""

    def __init__(self, n_layers=3, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(n_layers))
        self.dropout = nn.Dropout(0.2)

    def outputs(self, x):
        found = []
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x)))
            found.append(x)
        return torch.stack(found)


def denoising_losses(model, batch):
    clean, noisy = batch
    return (model.outputs(noisy) - clean).square().mean(-1)


def samples(count=40, seed=1):
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randn(count, 4, generator=generator)
    return clean, clean + 0.5 * torch.randn(count, 4, generator=generator)


def trainer_of(**options):
    options = {"alpha": 0.05, "c_ref": 0.5, "lr": 1e-2, "dual_lr": 0.05, "batch_size": 16, **options}
    return PrimalDual(Layers(), denoising_losses, **options)


@pytest.fixture(autouse=True)
def _allow_infeasible():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InfeasibleWarning)
        yield


def same(first, second):
    """Whether two states are equal bit for bit."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return torch.equal(first, second) if torch.is_tensor(first) else first == second


def comparable(trainer):
    state = trainer.state_dict()
    state["history"].pop("seconds")
    return state


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dual_update": "epoch", "resilience": 0.5},
        {"resilience": 0.5, "slack_update": "explicit", "reset_slacks": True, "optimizer": "adamw"},
        {"objective": "sum"},
        {"stop_gradient": True, "dual_optimizer": "sgd"},
    ],
)
def test_resumed_training_is_uninterrupted_training_bit_for_bit(options, tmp_path):
    whole = trainer_of(**options)
    whole.fit(samples(), n_epochs=6, validation=samples(20, 2))

    def interrupted(epoch):
        calls = []

        def layer_losses(model, batch):
            calls.append(1)
            if len(calls) == 3 * epoch + 2 + 2 * epoch:  # in the midst of an epoch of three batches and two looks
                raise KeyboardInterrupt
            return denoising_losses(model, batch)

        return layer_losses

    broken = trainer_of(**options)
    broken.layer_losses = interrupted(3)
    with pytest.raises(ConstrainedTrainingInterrupted) as caught:
        broken.fit(samples(), n_epochs=6, validation=samples(20, 2), checkpoint=tmp_path / "state.pt")
    assert 0 < len(caught.value.history.losses) < 6
    again = trainer_of(**options)
    torch.manual_seed(123)  # nothing depends on the global generator
    again.fit(samples(), n_epochs=6, validation=samples(20, 2), checkpoint=tmp_path / "state.pt")
    assert same(comparable(again), comparable(whole))
    broken.layer_losses = denoising_losses
    broken.fit(samples(), n_epochs=6, validation=samples(20, 2))
    assert same(comparable(broken), comparable(whole))


def test_a_break_in_the_first_epoch_leaves_the_first_weights_and_no_report():
    def interrupted(model, batch):
        if trainer.state_dict()["step"] == 1:
            raise KeyboardInterrupt
        return denoising_losses(model, batch)

    trainer = PrimalDual(Layers(), interrupted, c_ref=0.5, batch_size=16)
    with pytest.raises(ConstrainedTrainingInterrupted, match="after 0 epochs"):
        trainer.fit(samples(), n_epochs=1)
    assert same(trainer.model.state_dict(), Layers().state_dict())
    assert not hasattr(trainer, "report_")


@pytest.mark.parametrize("n_own_epochs", [0, 1])
def test_a_break_in_the_first_epoch_after_a_checkpoint_goes_back_to_the_checkpoint(n_own_epochs, tmp_path):
    stored = trainer_of()
    stored.fit(samples(), n_epochs=2, validation=samples(20, 2), checkpoint=tmp_path / "state.pt")

    def interrupted(model, batch):
        if model.training:
            raise KeyboardInterrupt
        return denoising_losses(model, batch)

    trainer = trainer_of()
    if n_own_epochs:
        trainer.fit(samples(), n_epochs=n_own_epochs, validation=samples(20, 2))
    trainer.layer_losses = interrupted
    with pytest.raises(ConstrainedTrainingInterrupted) as caught:
        trainer.fit(samples(), n_epochs=4, validation=samples(20, 2), checkpoint=tmp_path / "state.pt")
    assert caught.value.history.losses == stored.history_.losses
    assert same(trainer.model.state_dict(), stored.model.state_dict())


def test_options_that_are_numbers_of_numpy_are_those_of_python(tmp_path):
    numbers = {"alpha": np.float64(0.1), "batch_size": np.int64(16), "seed": np.int32(3), "lr": np.float64(0.02)}
    trainer = trainer_of(**numbers)
    trainer.fit(samples(), n_epochs=2, checkpoint=tmp_path / "state.pt")
    again = trainer_of(**{name: value.item() for name, value in numbers.items()})
    again.fit(samples(), n_epochs=2)
    assert same(comparable(again), comparable(trainer))
    again.fit(samples(), n_epochs=3, checkpoint=tmp_path / "state.pt")
    assert len(again.history_.losses) == 3


def test_the_global_generator_is_left_alone():
    state = torch.random.get_rng_state()
    trainer = trainer_of()
    state = torch.random.get_rng_state()
    trainer.fit(samples(), n_epochs=1)
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_best_feasible_weights_are_chosen():
    trainer = trainer_of(c_ref=0.28, lr=0.03)
    trainer.fit(samples(), n_epochs=30, validation=samples(20, 2))
    history = trainer.history_
    chosen = [loss[-1] for loss, feasible in zip(history.validation, history.feasible, strict=True) if feasible]
    assert chosen
    assert trainer.feasible_
    assert trainer.report_.losses[-1] == pytest.approx(min(chosen), rel=1e-6)


def test_without_a_feasible_epoch_the_least_violation_is_chosen():
    trainer = trainer_of(c_ref=1e-3)
    trainer.fit(samples(), n_epochs=5, validation=samples(20, 2))
    totals = [sum(max(value, 0) for value in values) for values in trainer.history_.violations]
    assert not trainer.feasible_
    assert np.maximum(trainer.report_.violations, 0).sum() <= min(totals) * (1 + 1e-2)


@pytest.mark.parametrize("objective", ["last", "sum"])
def test_the_rivals_have_no_multipliers(objective):
    trainer = trainer_of(objective=objective)
    history = trainer.fit(samples(), n_epochs=3)
    assert not trainer.duals_.any()
    assert history.losses[-1][-1] < history.losses[0][-1]


def test_the_last_objective_is_usual_training():
    trainer = trainer_of(objective="last", batch_size=40, optimizer="sgd")
    trainer.model.eval()
    model = Layers()
    trainer.model.dropout.p = model.dropout.p = 0.0
    trainer.fit(samples(), n_epochs=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        denoising_losses(model, samples())[-1].mean().backward()
        optimizer.step()
    for ours, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_multipliers_stay_at_zero_in_the_warm_up_and_never_fall_below():
    trainer = trainer_of(warmup_epochs=2, c_ref=0.01)
    history = trainer.fit(samples(), n_epochs=5)
    assert not np.any(history.duals[:2])
    assert np.all(np.array(history.duals) >= 0)
    assert np.any(history.duals[2:])


def test_a_dataset_is_taken_as_tensors_are():
    class Pairs(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return samples()[0][index], samples()[1][index]

    first, second = trainer_of(), trainer_of()
    first.fit(samples(), n_epochs=2)
    second.fit(Pairs(), n_epochs=2)
    assert same(comparable(first), comparable(second))


def test_a_callback_ends_training():
    seen = []
    trainer = trainer_of()
    trainer.fit(samples(), n_epochs=9, callback=lambda trainer: seen.append(1) or len(seen) == 2)
    assert len(trainer.history_.losses) == 2
    with pytest.raises(TypeError, match="callback must return True, False or None, got ndarray"):
        trainer.fit(samples(), n_epochs=9, callback=lambda trainer: np.zeros(2))


# Records


def held_losses(model, batch):
    """Losses that no weight changes: those of the samples, and half of them."""
    (first,) = batch
    return torch.stack([first, 0.5 * first]) + 0 * model.at


def held_trainer(layer_losses=held_losses, **options):
    return PrimalDual(Point(1.0), layer_losses, **{"alpha": 0.2, "c_ref": 1.0, "batch_size": 2} | PLAIN | options)


FIRST = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0], dtype=torch.float64)  # the last batch of two has one


def test_records_are_means_over_samples_whatever_the_batches():
    trainer = held_trainer(resilience=2.0)
    history = trainer.fit([FIRST], n_epochs=2, validation=[2 * FIRST])
    assert history.losses == [[4.0, 2.0]] * 2
    assert history.constraints[0] == pytest.approx([3.0, 2.0 - 0.8 * 4.0])
    assert history.validation == [[8.0, 4.0]] * 2
    np.testing.assert_allclose(history.slacks, np.array(history.duals) / 2)
    np.testing.assert_allclose(history.violations, [[7.0, -2.4]] - np.array(history.slacks))
    np.testing.assert_allclose(
        history.standard_errors[0], np.array([2.0, -0.6]) * FIRST.std().item() / 5**0.5 * [1, -1]
    )


def test_multipliers_of_an_epoch_move_by_its_mean_constraints():
    trainer = held_trainer(dual_update="epoch", warmup_epochs=1, dual_lr=0.1)
    history = trainer.fit([FIRST], n_epochs=2)
    assert history.duals == [[0.0, 0.0], pytest.approx([0.1 * 3.0, 0.0])]


def test_multipliers_of_a_step_move_by_the_means_of_its_batch():
    means = []

    def layer_losses(model, batch):
        if model.training:
            means.append(batch[0].mean().item())
        return held_losses(model, batch)

    trainer = held_trainer(layer_losses, first_factor=True, dual_lr=0.1)
    history = trainer.fit([FIRST], n_epochs=1)
    assert history.duals[0] == pytest.approx([0.1 * sum(mean - 0.8 for mean in means), 0.0])
    trainer.duals_.zero_()  # a copy
    assert trainer.duals_.tolist() == history.duals[0]
    assert history.constraints[0][0] == pytest.approx(4.0 - 0.8)


@pytest.mark.parametrize("stop_gradient", [False, True])
@pytest.mark.parametrize("options", [{}, {"resilience": 2.0}, {"resilience": 2.0, "slack_update": "explicit"}])
def test_a_step_descends_and_ascends_the_lagrangian_where_the_last_step_ended(options, stop_gradient):
    """Losses x^2, (x - 3)^2 and (x - 4)^2 / 2 under c_ref = 1 and alpha = 1/4."""
    losses = point_losses(lambda x: x**2, lambda x: (x - 3) ** 2, lambda x: (x - 4) ** 2 / 2)
    trainer = PrimalDual(Point(2.0), losses, alpha=0.25, c_ref=1.0, stop_gradient=stop_gradient, **PLAIN | options)
    history = trainer.fit(ONE, n_epochs=8)
    x, lr, price, n_moved = 2.0, 0.05, options.get("resilience", np.inf), 0
    duals, slacks = np.zeros(3), np.zeros(3)
    for epoch in range(8):
        found = np.array([x**2, (x - 3) ** 2, (x - 4) ** 2 / 2])
        slopes = np.array([2 * x, 2 * (x - 3), x - 4])
        before = np.append(0, slopes[:-1]) * (not stop_gradient)
        slope = slopes[-1] + duals @ (slopes - 0.75 * before)
        steps = found - np.append(1, 0.75 * found[:-1]) - (slacks if "slack_update" in options else duals / price)
        if "slack_update" in options:
            slacks = np.maximum(slacks - lr * (price * slacks - duals), 0)
        x, duals = x - lr * slope, np.maximum(duals + lr * steps, 0)
        np.testing.assert_allclose(history.losses[epoch], found, rtol=1e-12)
        np.testing.assert_allclose(history.duals[epoch], duals, rtol=1e-12, atol=1e-15)
        n_moved += np.count_nonzero(duals)
    assert trainer.model.at.item() == pytest.approx(x, rel=1e-12)
    assert n_moved > 8


def test_slacks_that_are_reset_begin_each_epoch_at_zero():
    explicit = {"resilience": 2.0, "slack_update": "explicit", "batch_size": 5}
    for reset in (True, False):
        history = held_trainer(reset_slacks=reset, **explicit).fit([FIRST], n_epochs=4)
        slacks, duals = np.array(history.slacks), np.array(history.duals)
        assert np.allclose(slacks[1:], 0.05 * duals[:-1]) == reset


def test_explicit_slacks_are_copies_never_negative_and_part_of_the_state():
    multipliers, other = (Multipliers(torch.zeros(2, 1), 1.5, "explicit", "sgd", 1.0) for _ in range(2))
    multipliers.ascend(torch.tensor([1.0, 0.0]))
    multipliers.ascend(torch.tensor([-5.0, 0.0]))
    held = multipliers.slacks
    other.load_state_dict(copy.deepcopy(multipliers.state_dict()))
    multipliers.ascend(torch.zeros(2))  # a step of the slack from 1 to -0.5, were it not for its bound
    assert multipliers.slacks.tolist() == [0.0, 0.0]
    assert held.tolist() == other.slacks.tolist() == [1.0, 0.0]
    hard = Multipliers(torch.zeros(2, 1), None, "explicit", "sgd", 1.0)
    hard.ascend(torch.ones(2))
    assert hard.slacks.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("objective", "after"), [("sum", [0.9, 0.9]), ("last", [1.0, 0.9])])
def test_the_rivals_lower_the_losses_of_all_layers_or_of_the_last(objective, after):
    model = Point(1.0, 1.0)
    trainer = PrimalDual(
        model, point_losses(lambda a, b: a**2, lambda a, b: b**2), c_ref=0.1, objective=objective, **PLAIN
    )
    with warnings.catch_warnings(action="error"):  # what is not asked for is not warned of
        trainer.fit(ONE, n_epochs=1)
    assert model.at.tolist() == pytest.approx(after)
    assert not trainer.feasible_


def moving_losses(target):
    """Each step adds the rate to the weight; held-out losses are least where it is the target."""

    def layer_losses(model, batch):
        value = -model.at if model.training else (model.at - target) ** 2 if target else 0 * model.at
        return torch.stack([value, value])

    return layer_losses


@pytest.mark.parametrize(("target", "best"), [(0.21, 0.2), (None, 0.1)], ids=["least", "first of equals"])
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_the_weights_of_the_best_epoch_are_put_back(target, best, is_interrupted):
    def callback(trainer):
        if is_interrupted and len(trainer.history_.losses) == 5:
            raise KeyboardInterrupt

    options = {"objective": "last", "c_ref": 1.0, **PLAIN, "lr": 0.1}
    trainer = PrimalDual(Point(0.0), moving_losses(target), **options)
    with pytest.raises(ConstrainedTrainingInterrupted) if is_interrupted else contextlib.nullcontext():
        trainer.fit(ONE, n_epochs=5, validation=ONE, callback=callback)
    assert trainer.model.at.item() == pytest.approx(best)
    assert trainer.report_.losses[-1] == pytest.approx((best - target) ** 2 if target else 0.0)


def test_an_epoch_is_ranked_by_its_loss_and_violations():
    violations, slacks = np.array([0.5, -0.4, 0.1]), torch.tensor([0.1, 0.3, 0.2])
    report = FeasibilityReport(np.array([3.0, 2.0, 1.0]), violations, np.zeros(3), False, 0.5, 0.5, 1.0)
    assert rank(report, slacks, objective="constrained", resilience=None) == (True, pytest.approx(0.6))
    price = 4 / 2 * (0.6**2 + 0.3**2)  # of what the constraints exceed zero by, slacks included
    assert rank(report, slacks, objective="constrained", resilience=4.0) == (False, pytest.approx(1 + price))
    for objective, resilience in itertools.product(("last", "sum"), (None, 4.0)):
        assert rank(report, slacks, objective=objective, resilience=resilience) == (False, 1.0)
    feasible = dataclasses.replace(report, feasible=True)
    assert rank(feasible, slacks, objective="constrained", resilience=None) == (False, 1.0)
    broken = dataclasses.replace(report, losses=np.array([3.0, 2.0, np.nan]))
    assert rank(broken, slacks, objective="last", resilience=None) == (False, np.inf)


def test_a_state_is_left_as_it_is_and_serves_reports_of_other_errors():
    trainer = held_trainer()
    trainer.fit([FIRST], n_epochs=2)
    state = trainer.state_dict()
    other = held_trainer(n_errors=3.0)
    other.load_state_dict(state)
    other.fit([FIRST], n_epochs=4)
    assert len(other.history_.losses) == 4
    assert len(state["history"]["losses"]) == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"objective": "last"}, lambda duals: [0, 1]),
        ({"objective": "sum"}, lambda duals: [1, 1]),
        ({"stop_gradient": True}, lambda duals: [duals[0], duals[1] + 1]),
        ({}, lambda duals: [duals[0] - 0.8 * duals[1], duals[1] + 1]),
    ],
)
def test_recorded_weights_are_those_of_what_is_minimised(options, expected):
    """The second loss violates its constraint, so that its multiplier is not zero."""

    def layer_losses(model, batch):
        return torch.stack([batch[0], 2 * batch[0]]) + 0 * model.at

    trainer = held_trainer(layer_losses, **options)
    history = trainer.fit([FIRST], n_epochs=1)
    assert history.net_weights[0] == pytest.approx(expected(trainer.duals_.tolist()))
    assert ("objective" in options) == (not trainer.duals_.all())


def test_more_standard_errors_are_forgiven_where_asked():
    """The first constraint is violated by 3, of which the standard error is 1.58."""
    for n_errors, feasible in ((1.0, False), (2.0, True)):
        trainer = held_trainer(n_errors=n_errors)
        trainer.fit([FIRST], n_epochs=1)
        assert trainer.feasible_ is trainer.evaluate([FIRST]).feasible is feasible


def test_weights_decay_as_asked():
    trainer = held_trainer(objective="last", lr=0.1, weight_decay=0.5)
    trainer.fit([FIRST], n_epochs=1)
    assert trainer.model.at.item() == pytest.approx((1 - 0.1 * 0.5) ** 3)


def test_orders_and_random_numbers_change_with_the_seed_and_from_step_to_step():
    def course(seed):
        seen = []

        def layer_losses(model, batch):
            seen.append((model.training, batch[0].tolist(), torch.rand(()).item()))
            return held_losses(model, batch)

        trainer = held_trainer(layer_losses, seed=seed)
        trainer.model.eval()
        trainer.fit([FIRST], n_epochs=2)
        return seen

    first, again, other = (course(seed) for seed in (0, 0, 1))
    assert first == again
    assert [training for training, _, _ in first] == [True] * 6 + [False] * 3
    assert [batch for _, batch, _ in first[:3]] != [batch for _, batch, _ in first[3:6]]  # of the next epoch
    assert [batch for _, batch, _ in first[:3]] != [batch for _, batch, _ in other[:3]]
    drawn = {number for seen in (first, other) for _, _, number in seen}
    assert len(drawn) == 18


@pytest.mark.parametrize("training", [False, True])
def test_a_look_leaves_the_mode_of_the_model(training):
    trainer = held_trainer()
    trainer.model.train(training)
    trainer.layer_losses_of([FIRST])
    assert trainer.model.training is training


# Reports


def test_the_report_has_standard_errors_over_samples():
    losses = torch.as_tensor(np.random.default_rng(0).exponential(size=(3, 50)))
    constraints = DescentConstraints(alpha=0.1, c_ref=1.0)
    report = FeasibilityReport.of(losses, constraints)
    values = losses[1] - 0.9 * losses[0]
    assert report.violations[1] == pytest.approx(values.mean().item())
    assert report.standard_errors[1] == pytest.approx(values.std().item() / 50**0.5)
    ratios = (losses[1:] / losses[:-1]).numpy()
    assert report.mean_ratio == pytest.approx(ratios.mean())
    assert report.median_ratio == pytest.approx(np.median(ratios))  # the mean of the middle two of 100
    assert report.descending_share == pytest.approx((ratios < 1).mean())
    assert report.feasible == bool((report.violations <= report.standard_errors).all())
    assert "layer 3: loss" in str(report)


def test_samples_without_a_loss_before_have_no_ratio_and_reports_are_in_double():
    losses = torch.tensor([[0.0, 3.0], [0.0, 1.0]], requires_grad=True)
    slacks = torch.zeros(2, requires_grad=True)  # no graph is in the way of a report
    report = FeasibilityReport.of(losses, DescentConstraints(alpha=0.0, c_ref=1.0), slacks)
    assert (report.mean_ratio, report.median_ratio, report.descending_share) == pytest.approx((1 / 3, 1 / 3, 1.0))
    assert report.losses.dtype == report.violations.dtype == report.standard_errors.dtype == np.float64


def test_one_sample_at_the_bounds_is_feasible_without_errors_and_does_not_descend():
    report = FeasibilityReport.of(torch.ones(2, 1), DescentConstraints(alpha=0.0, c_ref=1.0))
    assert report.feasible
    assert report.standard_errors.tolist() == report.violations.tolist() == [0, 0]
    assert (report.mean_ratio, report.descending_share) == (1, 0)


def test_a_course_as_lists_is_a_copy():
    history = ConstrainedHistory(losses=[[2.0, 1.0]])
    before = history.as_dict()
    history.losses.append([1.0, 0.5])
    assert before["losses"] == [[2.0, 1.0]]


def test_the_warning_names_the_largest_violation_where_no_errors_are_forgiven():
    """That of the first layer is .5, less than its standard error; that of the second .1, without one."""

    def layer_losses(model, batch):
        return torch.stack([batch[0], 0.5 * batch[0] + 0.1]) + 0 * model.at

    trainer = held_trainer(layer_losses, n_errors=0.0, alpha=0.5)
    with pytest.warns(InfeasibleWarning, match=r"layer 1 is violated by 0\.5 \(standard error 1\.5\)"):
        trainer.fit([torch.tensor([0.0, 3.0], dtype=torch.float64)], n_epochs=1)


# Errors


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_keeps_the_last_good_state(bad):
    trainer = trainer_of()
    trainer.fit(samples(), n_epochs=2)
    good = comparable(trainer)
    trainer.layer_losses = lambda model, batch: (  # in the second of the three steps of the fourth epoch
        denoising_losses(model, batch) * (bad if trainer.state_dict()["step"] == 10 else 1)
    )
    with pytest.raises(NonFiniteLossError, match="loss of layer 1 became infinite or nan"):
        trainer.fit(samples(), n_epochs=6)
    assert len(trainer.history_.losses) == len(trainer.history_.seconds) == 3
    three = trainer_of()
    three.fit(samples(), n_epochs=3)
    assert same(comparable(trainer), comparable(three))
    assert all(torch.isfinite(weight).all() for weight in trainer.model.parameters())
    trainer.layer_losses = denoising_losses
    trainer.fit(samples(), n_epochs=4)
    whole = trainer_of()
    whole.fit(samples(), n_epochs=4)
    assert same(comparable(trainer), comparable(whole))
    assert not same(comparable(trainer), good)


def test_a_validation_loss_that_is_no_number_is_never_the_best():
    looks = []

    def layer_losses(model, batch):
        losses = denoising_losses(model, batch)
        if not model.training:
            looks.append(1)
        return losses * (float("nan") if len(looks) == 1 and not model.training else 1)

    trainer = PrimalDual(Layers(), layer_losses, c_ref=1.0, objective="last", lr=1e-2, batch_size=40)
    history = trainer.fit(samples(), n_epochs=4, validation=samples(20, 2))
    best = min(losses[-1] for losses in history.validation[1:])
    assert trainer.layer_losses_of(samples(20, 2))[-1].mean().item() == pytest.approx(best, rel=1e-5)


def test_a_loss_that_is_no_number_leaves_the_weights_chosen_so_far():
    trainer = trainer_of(objective="last")
    trainer.fit(samples(), n_epochs=3, validation=samples(20, 2))
    chosen = copy.deepcopy(trainer.model.state_dict())
    trainer.layer_losses = lambda model, batch: denoising_losses(model, batch) * float("nan")
    with pytest.raises(NonFiniteLossError, match="weights chosen so far"):
        trainer.fit(samples(), n_epochs=5, validation=samples(20, 2))
    assert same(trainer.model.state_dict(), chosen)


def test_a_checkpoint_of_other_options_is_refused(tmp_path):
    trainer_of(alpha=0.1).fit(samples(), n_epochs=1, checkpoint=tmp_path / "state.pt")
    with pytest.raises(ValueError, match=r"a trainer with alpha=0\.1, not 0\.2"):
        trainer_of(alpha=0.2).fit(samples(), n_epochs=2, checkpoint=tmp_path / "state.pt")


@pytest.mark.parametrize("damage", ["text", "archive", "other state", "nothing"])
def test_a_file_that_is_no_checkpoint_is_named(damage, tmp_path):
    path = tmp_path / "state.pt"
    write = {
        "text": lambda: path.write_text("hello"),
        "archive": lambda: zipfile.ZipFile(path, "w").close(),
        "other state": lambda: torch.save(Layers().state_dict(), path),
        "nothing": lambda: path.write_bytes(b""),
    }
    write[damage]()
    with pytest.raises(ValueError, match=r"checkpoint must be a file that fit wrote, .*state\.pt' is none"):
        trainer_of().fit(samples(), n_epochs=1, checkpoint=path)


def test_whatever_byte_of_a_checkpoint_is_damaged_the_file_is_named(tmp_path):
    path = tmp_path / "state.pt"
    trainer_of().fit(samples(), n_epochs=1, checkpoint=path)
    whole, stored, refusals = path.read_bytes(), trainer_of(), []
    stored.fit(samples(), n_epochs=1, checkpoint=path)
    for place in range(0, len(whole), 17):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        trainer = trainer_of()
        first = trainer.state_dict()
        try:
            trainer.fit(samples(), n_epochs=1, checkpoint=path)
        except ValueError as error:
            refusals.append(str(error))
            assert same(trainer.state_dict(), first)
        else:  # dates and the like do not matter
            assert same(comparable(trainer), comparable(stored))
    assert len(refusals) > len(whole) / 17 / 2
    assert all(refusal.startswith("checkpoint") and repr(str(path)) in refusal for refusal in refusals)


def test_a_compressed_checkpoint_is_refused(tmp_path):
    path, other = tmp_path / "state.pt", tmp_path / "other.pt"
    trainer_of().fit(samples(), n_epochs=1, checkpoint=path)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as compressed:
        for name in archive.namelist():
            compressed.writestr(name, archive.read(name))
    with pytest.raises(ValueError, match=r"checkpoint must be a file that fit wrote, .*other\.pt' is none"):
        trainer_of().fit(samples(), n_epochs=1, checkpoint=other)


def test_a_checkpoint_of_another_model_leaves_the_trainer_as_it_was(tmp_path):
    path = tmp_path / "state.pt"
    trainer_of().fit(samples(), n_epochs=1, checkpoint=path)
    state = torch.load(path)
    state["model"] = {name: values[..., :1] for name, values in state["model"].items()}
    torch.save(state, path)
    trainer = trainer_of()
    first = trainer.state_dict()
    with pytest.raises(ValueError, match=r"state\.pt' cannot be continued: Error.*\s+size mismatch"):
        trainer.fit(samples(), n_epochs=2, checkpoint=path)
    assert same(trainer.state_dict(), first)


def test_a_checkpoint_in_a_folder_that_is_not_there_is_named_before_training(tmp_path):
    trainer = trainer_of()
    with pytest.raises(
        FileNotFoundError, match=r"checkpoint must be in a folder that exists, got '.*absent.*state\.pt'"
    ):
        trainer.fit(samples(), n_epochs=1, checkpoint=tmp_path / "absent" / "state.pt")
    assert not trainer.history_.losses


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(1, 16), r"two layers or more, got shape \(1, 16\)"),
        (torch.zeros(3), r"got shape \(3,\)"),
        ([1.0, 2.0], "got list"),
    ],
)
def test_losses_of_another_shape(returned, message):
    trainer = PrimalDual(Layers(), lambda model, batch: returned, c_ref=1.0)
    with pytest.raises(ValueError, match=message):
        trainer.fit(samples(), n_epochs=1)


@pytest.mark.parametrize("change", [lambda losses: losses.T, lambda losses: losses.mean(1, keepdim=True)])
def test_losses_that_are_not_one_for_each_sample(change):
    trainer = PrimalDual(
        Layers(), lambda model, batch: change(denoising_losses(model, batch)), c_ref=0.5, batch_size=16
    )
    with pytest.raises(ValueError, match=r"each of the 16 samples of a batch, of shape \(n_layers, 16\), got"):
        trainer.fit(samples(), n_epochs=1)


def test_losses_of_another_number_of_layers():
    trainer = trainer_of()
    trainer.fit(samples(), n_epochs=1)
    trainer.layer_losses = lambda model, batch: denoising_losses(model, batch)[:2]
    with pytest.raises(ValueError, match="losses of 3 layers as before, got 2"):
        trainer.fit(samples(), n_epochs=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.0}, "alpha must be a number from 0 and below 1"),
        ({"alpha": -0.1}, "alpha must be"),
        ({"c_ref": 0.0}, "c_ref must be a positive"),
        ({"c_ref": float("nan")}, "c_ref must be a positive"),
        ({"resilience": 0.0}, "resilience must be a positive"),
        # Slacks u of a fixed multiplier go to u + dual_lr (multiplier - price u): they leap over their best value.
        ({"resilience": 20.0, "slack_update": "explicit", "dual_lr": 0.1}, "resilience must be below 2 / dual_lr = 20"),
        ({"dual_lr": 0.0}, "dual_lr must be a positive"),
        ({"lr": float("inf")}, "lr must be a positive"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
        ({"objective": "first"}, "objective must be one of"),
        ({"optimizer": "lbfgs"}, "optimizer must be one of"),
        ({"dual_update": "never"}, "dual_update must be one of"),
        ({"warmup_epochs": -1}, "warmup_epochs must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"stop_gradient": "yes"}, "stop_gradient must be True or False"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**40}, "seed must be"),
        ({"reset_slacks": True}, "reset_slacks must be False"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(**options)


def test_bad_models_and_data():
    with pytest.raises(TypeError, match="model must be a torch Module"):
        PrimalDual("model", denoising_losses, c_ref=1.0)
    with pytest.raises(TypeError, match="layer_losses must be a function"):
        PrimalDual(Layers(), None, c_ref=1.0)
    for data, message in (
        ([torch.zeros(3), torch.zeros(4)], "as many samples each"),
        ([], "must be a Dataset or a sequence of tensors"),
        (torch.utils.data.ChainDataset([]), "got ChainDataset; a Dataset must be one of known length"),
        ([torch.zeros(0, 4), torch.zeros(0, 4)], "at least one sample"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer_of().fit(data, n_epochs=1)
    with pytest.raises(AttributeError, match="before the first step"):
        _ = trainer_of().duals_
    with pytest.raises(ValueError, match="n_epochs must be a positive integer, got 0"):
        trainer_of().fit(samples(), n_epochs=0)


def test_slacks_to_evaluate_under_are_one_a_layer():
    trainer = trainer_of()
    with pytest.raises(TypeError, match="slacks must be a torch tensor, got list"):
        trainer.evaluate(samples(), slacks=[0.0] * 3)
    with pytest.raises(ValueError, match=r"slacks must have shape \(3,\), one a layer, got \(1,\)"):
        trainer.evaluate(samples(), slacks=torch.ones(1))


def test_single_numbers_are_neither_samples_nor_losses_of_layers():
    with pytest.raises(ValueError, match="tensors with samples along the first axis"):
        trainer_of().fit([torch.tensor(1.0)], n_epochs=1)
    with pytest.raises(ValueError, match=r"two layers or more, got shape \(\)"):
        DescentConstraints(c_ref=1.0).values(torch.tensor(1.0))


@pytest.mark.parametrize("name", ["c_ref", "resilience", "weight_decay", "n_errors", "lr", "dual_lr"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_options_that_are_not_finite_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a (positive )?finite number"):
        trainer_of(**{name: value})


@pytest.mark.parametrize(
    "options",
    [{"reset_slacks": True, "resilience": 1.0}, {"reset_slacks": True, "slack_update": "explicit"}, {"seed": 2**31}],
    ids=str,
)
def test_options_that_do_not_go_together_or_are_too_large_are_named(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        trainer_of(**options)


def test_slacks_at_their_best_have_any_price_and_seeds_are_below_their_bound():
    trainer = trainer_of(resilience=1e3, dual_lr=1.0, seed=2**31 - 1)
    assert (trainer.resilience, trainer.slack_update) == (1e3, "decay")


@pytest.mark.parametrize("wrapped", [list, lambda parts: TensorDataset(*parts)])
def test_batches_of_tensors_are_tuples_of_them(wrapped):
    seen = []
    trainer = trainer_of()
    trainer.layer_losses = lambda model, batch: seen.append(batch) or denoising_losses(model, batch)
    trainer.fit(wrapped(samples()), n_epochs=1)
    assert all(type(batch) is tuple for batch in seen)
    for part, whole in zip(zip(*seen[:3], strict=True), samples(), strict=True):  # of training, then of the report
        torch.testing.assert_close(torch.cat(part).sort(0).values, whole.sort(0).values)


def test_half_precision_in_which_adam_divides_by_zero_is_refused():
    for options in ({}, {"optimizer": "sgd"}, {"dual_optimizer": "sgd"}):
        with pytest.raises(ValueError, match=r"model must have weights in float32.*got torch.float16"):
            PrimalDual(nn.Linear(2, 2).half(), lambda model, batch: None, c_ref=1.0, **options)
    PrimalDual(nn.Linear(2, 2).half(), lambda model, batch: None, c_ref=1.0, optimizer="sgd", dual_optimizer="sgd")


@pytest.mark.parametrize("model", [nn.Linear(2, 2).requires_grad_(False), nn.ReLU()])
def test_a_model_without_weights_to_train_is_named(model):
    with pytest.raises(ValueError, match="model must have weights to train"):
        PrimalDual(model, denoising_losses, c_ref=1.0)


def test_losses_without_gradients_are_named():
    trainer = trainer_of()
    trainer.layer_losses = lambda model, batch: denoising_losses(model, batch).detach()
    with pytest.raises(ValueError, match=r"layer_losses must return losses with gradients .* without detach\(\)"):
        trainer.fit(samples(), n_epochs=1)

"""Ctrl-C during the training of networks: what is kept, wherever it comes."""

import copy
import itertools
import math
import pickle
import signal
import sys

import numpy as np
import pytest
import torch

from convexformer.nn import ConvexAttention, TrainingInterrupted, train
from convexformer.nn.training import trial as trial_module
from convexformer.nn.training.trial import Trial

ALPHA = 0.05


def data(n=40, seed=0, noise=0.1):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 3, 2))
    y = X[:, 0, :1] - X[:, 1, 1:] + noise * rng.normal(size=(n, 1))
    return torch.as_tensor(X), torch.as_tensor(y)


def make_network():
    return ConvexAttention(3, 2, 1, 6).double()


def weights(network):
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def interrupted(network, **options):
    """What is left of a training in which Ctrl-C is pressed."""
    with pytest.raises(TrainingInterrupted) as caught:
        train(network, *data(), **{"alpha": ALPHA, "n_steps": 20, **options})
    assert_consistent(network, caught.value.history, options.get("validation"))
    return caught.value


def assert_consistent(network, history, validation=None):
    """The weights are those whose objective and loss are in the history, and the history is that of the best."""
    assert history.final_objective == pytest.approx(network.objective(*data(), alpha=ALPHA).item(), rel=1e-12)
    if validation is not None:
        assert history.final_validation == pytest.approx(network.objective(*validation, alpha=0.0).item(), rel=1e-12)
    assert history.score == min(trial.score for trial in history.trials)
    assert [trial.lr for trial in history.trials if trial.objective is history.objective] == [history.lr]
    for trial in history.trials:
        assert len(trial.steps) == len(trial.objective) == len(trial.seconds) > 0
        assert len(trial.validation_steps) == len(trial.validation)
        assert trial.steps == sorted(set(trial.steps))


def ctrl_c(function, *calls, after=False):
    """The function, with Ctrl-C at some of its calls or right after them."""

    def called(*arguments, **options):
        called.count += 1
        due = called.count in calls
        if due and not after:
            raise KeyboardInterrupt
        result = function(*arguments, **options)
        if due:
            raise KeyboardInterrupt
        return result

    called.count = 0
    return called


def nothing(step, objective):
    return None


# In the callback


@pytest.mark.parametrize("step", [0, 12])
def test_in_the_first_combination_what_it_had_reached_is_kept(step):
    network = make_network()
    error = interrupted(network, callback=ctrl_c(nothing, step + 1))
    history = error.history
    assert (history.ended_by, history.stopped_early, history.kept_step) == ("interrupted", True, step)
    assert history.steps == list(range(step + 1))
    assert history.trials == [history.trials[0]]
    assert str(error).startswith(f"interrupted after {step} steps of combination 1 of 1; ")
    whole = train(make_network(), *data(), alpha=ALPHA, n_steps=20)
    assert history.objective == whole.objective[: step + 1]


def test_a_finished_combination_that_is_better_is_kept_with_all_so_far():
    network, alone = make_network(), make_network()
    history = interrupted(network, lr=[1e-2, 1e-4, 1e-3], callback=ctrl_c(nothing, 51)).history
    finished = train(alone, *data(), alpha=ALPHA, lr=1e-2, n_steps=20)
    assert torch.equal(weights(network), weights(alone))
    assert [(trial.lr, trial.ended_by) for trial in history.trials] == [
        (1e-2, "n_steps"),
        (1e-4, "n_steps"),
        (1e-3, "interrupted"),
    ]
    assert (history.lr, history.ended_by) == (1e-2, "n_steps")
    assert history.objective == history.trials[0].objective == finished.objective
    # Twenty steps and the objective at the end, which asks no callback, in each of the first two.
    assert history.trials[2].steps == list(range(11))


def test_a_combination_that_is_better_already_is_kept_though_it_was_broken_off():
    network = make_network()
    history = interrupted(network, lr=[1e-6, 1e-1], callback=ctrl_c(nothing, 36)).history
    assert (history.lr, history.ended_by, history.kept_step) == (1e-1, "interrupted", 15)
    assert [trial.ended_by for trial in history.trials] == ["n_steps", "interrupted"]


def test_with_patience_the_best_by_validation_is_kept():
    few, held_out = data(6, noise=3.0), data(200, seed=1)
    options = {"alpha": 0.0, "lr": 0.05, "n_steps": 200, "validation": held_out}
    free = train(ConvexAttention(3, 2, 1, 20).double(), *few, **options)
    network = ConvexAttention(3, 2, 1, 20).double()
    with pytest.raises(TrainingInterrupted) as caught:
        train(network, *few, **options, patience=1000, callback=ctrl_c(nothing, 182))
    history = caught.value.history
    reached = free.validation[: 180 // 2 + 1]
    assert history.final_validation == min(reached) < reached[-1]
    assert history.kept_step == 2 * int(np.argmin(reached))
    assert network.objective(*held_out, alpha=0.0).item() == pytest.approx(min(reached), rel=1e-12)
    assert network.objective(*few, alpha=0.0).item() == pytest.approx(history.final_objective, rel=1e-12)


def test_between_looks_the_weights_that_there_are_are_recorded(monkeypatch):
    network, held_out = make_network(), data(seed=1)
    monkeypatch.setattr(torch.optim.Adam, "step", ctrl_c(torch.optim.Adam.step, 11, after=True))
    history = interrupted(network, batch_size=10, look_every=7, validation=held_out).history
    assert history.steps == history.validation_steps == [0, 7, 11]
    assert (history.ended_by, history.kept_step) == ("interrupted", 11)


# At other points


@pytest.mark.parametrize("batch_size", [None, 10])
def test_in_the_midst_of_a_step_the_weights_are_looked_at_anew(monkeypatch, batch_size):
    network, before = make_network(), []

    def half_a_step(self, closure=None):
        before.append(trial_module.weights_of(network))
        original(self)
        if len(before) == 6:  # all parameters but the first are where they were
            first = next(network.parameters()).detach().clone()
            trial_module.load_weights(network, [first, *before[-1][1:]])
            raise KeyboardInterrupt

    original = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", half_a_step)
    history = interrupted(network, lr=0.05, batch_size=batch_size).history
    assert history.kept_step == history.steps[-1] == 6
    moved = [not torch.equal(*pair) for pair in zip(network.parameters(), before[-1], strict=True)]
    assert moved == [True] + [False] * (len(moved) - 1)


def test_weights_that_are_not_finite_give_way_to_the_first_ones(monkeypatch):
    def broken_step(self, closure=None):
        with torch.no_grad():
            next(network.parameters()).fill_(math.nan)
        raise KeyboardInterrupt

    network = make_network()
    first = weights(network)
    monkeypatch.setattr(torch.optim.Adam, "step", broken_step)
    history = interrupted(network).history
    assert torch.equal(weights(network), first)
    assert (history.ended_by, history.kept_step, history.steps) == ("diverged", 0, [0, 1])


@pytest.mark.parametrize("call", [1, 2, 3])
def test_between_combinations(monkeypatch, call):
    # The first weights are loaded before each of the two, and the best after them.
    network = make_network()
    monkeypatch.setattr(trial_module, "load_weights", ctrl_c(trial_module.load_weights, call))
    monkeypatch.setattr("convexformer.nn.training.train.load_weights", trial_module.load_weights)
    history = interrupted(network, lr=[1e-2, 1e-6]).history
    assert history.lr == 1e-2
    assert [trial.ended_by for trial in history.trials] == [
        ["interrupted"],
        ["n_steps", "interrupted"],
        ["n_steps", "n_steps"],
    ][call - 1]
    assert history.trials[-1].steps == ([0] if call < 3 else list(range(21)))


def test_a_combination_that_has_not_begun_has_the_first_weights(monkeypatch):
    monkeypatch.setattr(trial_module, "load_weights", ctrl_c(trial_module.load_weights, 2))
    first, second = interrupted(make_network(), lr=[1e-2, 1e-6]).history.trials
    assert second.objective == first.objective[:1]


# Evaluations of ``data`` and of what is held out: two at each look, of which there are three before step 13.
@pytest.mark.parametrize(("call", "steps", "kept"), [(1, [0], 0), (2, [0], 0), (3, [0, 5], 5), (6, [0, 5, 10], 10)])
def test_in_an_evaluation_it_is_made_again(monkeypatch, call, steps, kept):
    monkeypatch.setattr(Trial, "_mean_loss_of_all", ctrl_c(Trial._mean_loss_of_all, call))
    history = interrupted(make_network(), batch_size=10, look_every=5, validation=data(seed=1)).history
    assert history.steps == history.validation_steps == steps
    assert history.kept_step == kept


@pytest.mark.parametrize("patience", [None, 100])
def test_twice_the_last_look_is_kept_without_any_other_evaluation(monkeypatch, patience):
    # The fifth evaluation is that of step 10, and the next one the last.
    network = make_network()
    evaluate = ctrl_c(Trial._mean_loss_of_all, 5, 6)
    monkeypatch.setattr(Trial, "_mean_loss_of_all", evaluate)
    held_out = data(seed=1)
    history = interrupted(network, batch_size=10, look_every=5, validation=held_out, patience=patience).history
    assert evaluate.count == 6
    assert history.steps == history.validation_steps == [0, 5]
    assert (history.ended_by, history.kept_step) == ("interrupted", 5)


def test_twice_the_last_look_is_kept_where_nothing_is_held_out(monkeypatch):
    # The third evaluation is that of step 10, and the next one the last.
    monkeypatch.setattr(Trial, "_mean_loss_of_all", ctrl_c(Trial._mean_loss_of_all, 3, 4))
    history = interrupted(make_network(), batch_size=10, look_every=5).history
    assert (history.steps, history.ended_by, history.kept_step) == ([0, 5], "interrupted", 5)


def test_twice_in_a_later_combination_before_its_first_look_leaves_the_others(monkeypatch):
    # Eleven steps have looks at 0, 5 and 10, and a last one.
    network = make_network()
    monkeypatch.setattr(Trial, "_mean_loss_of_all", ctrl_c(Trial._mean_loss_of_all, 5, 6))
    history = interrupted(network, lr=[1e-2, 1e-3], n_steps=11, batch_size=10, look_every=5).history
    assert [(trial.lr, trial.ended_by) for trial in history.trials] == [(1e-2, "n_steps")]


@pytest.mark.parametrize(("validation", "calls"), [(None, (1, 2)), (data(seed=1), (2, 3))])
def test_twice_before_anything_is_recorded_the_network_is_as_it_was(monkeypatch, validation, calls):
    network = make_network()
    first = weights(network)
    monkeypatch.setattr(Trial, "_mean_loss_of_all", ctrl_c(Trial._mean_loss_of_all, *calls))
    with pytest.raises(KeyboardInterrupt) as caught:
        train(network, *data(), alpha=ALPHA, batch_size=10, validation=validation)
    assert not isinstance(caught.value, TrainingInterrupted)
    assert torch.equal(weights(network), first)


class AtLine:
    """Ctrl-C before a line of the training, counted as lines are run."""

    def __init__(self, line):
        self.left = line

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename == trial_module.__file__ or frame.f_code.co_name in ("_search", "_load_best"):
            return self.in_frame
        return None

    def in_frame(self, frame, event, argument):
        if event == "line":
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return self.in_frame


# Lines from one to the next that is tried, and options.
OPTIONS = {
    "full": (1, {}),
    "validated": (3, {"validation": data(seed=1), "look_every": 2}),
    "patient": (5, {"batch_size": 20, "validation": data(seed=1), "look_every": 2, "patience": 5}),
}


@pytest.mark.parametrize(("stride", "options"), OPTIONS.values(), ids=OPTIONS)
def test_at_any_line_what_is_kept_fits_together(stride, options):
    first, before, kept = weights(make_network()), sys.gettrace(), []
    for line in itertools.count(step=stride):
        network = make_network()
        try:
            sys.settrace(AtLine(line))
            train(network, *data(), alpha=ALPHA, lr=[1e-2, 5e-2], n_steps=3, **options)
            break
        except TrainingInterrupted as error:
            sys.settrace(before)
            assert_consistent(network, error.history, options.get("validation"))
            kept.append(True)
        except KeyboardInterrupt:
            sys.settrace(before)
            assert torch.equal(weights(network), first)
            kept.append(False)
        finally:
            sys.settrace(before)
    assert line > 200
    assert kept == sorted(kept)  # a plain interrupt comes only before anything is done
    assert sum(kept) > 0.9 * len(kept)


@pytest.mark.usefixtures("python_takes_ctrl_c")
def test_the_signal_of_the_keyboard():
    callback = ctrl_c(lambda *_: signal.raise_signal(signal.SIGINT) if callback.count == 8 else None)
    assert interrupted(make_network(), callback=callback).history.kept_step == 7


# What is raised


@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy])
def test_an_interruption_can_be_sent_to_another_process(copied):
    error = interrupted(make_network(), lr=[1e-2, 1e-3], callback=ctrl_c(nothing, 25))
    again = copied(error)
    assert type(again) is TrainingInterrupted
    assert str(again) == str(error)
    assert again.history == error.history


def test_an_interruption_that_a_callback_passes_on_is_its_cause():
    def train_another(step, objective):
        train(make_network(), *data(), alpha=ALPHA, n_steps=5, callback=ctrl_c(nothing, 3))

    error = interrupted(make_network(), callback=train_another)
    assert error.history.kept_step == 0
    assert error.__cause__.history.kept_step == 2

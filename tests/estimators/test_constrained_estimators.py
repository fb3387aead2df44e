"""Descent-constrained estimators: constraints, early exit, weights of classes, padding, denoising."""

import dataclasses
import pickle
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from sklearn.base import clone

from convexformer import (
    DescentConstrainedClassifier,
    DescentConstrainedDenoiser,
    load_model,
    pad_sequences,
    save_model,
)
from convexformer.constrained import ConstrainedTrainingInterrupted, InfeasibleWarning, PrimalDual, exit_curve
from convexformer.constrained import early_exit as leave_early

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 5, 4))
LABELS = np.where(X[:, :, 0].mean(1) > 0, "more", "less")
QUICK = {"lr": 0.02, "n_epochs": 30, "random_state": 0}
CLEAN = RNG.uniform(size=(60, 1, 4)).repeat(6, axis=1)


def test_the_constraints_hold_and_every_layer_lowers_the_loss():
    model = DescentConstrainedClassifier(alpha=0.05, n_layers=3, **QUICK | {"n_epochs": 60}).fit(X, LABELS)
    assert model.feasible_
    assert model.layer_losses_.shape == model.duals_.shape == (3,)
    assert (np.diff(model.layer_losses_) < 0).all()
    assert model.layer_losses_[0] <= np.log(2) + model.report_.standard_errors[0]
    assert model.score(X, LABELS) > 0.7
    assert model.n_iter_ == 60


def test_an_infeasible_fit_says_so():
    with pytest.warns(InfeasibleWarning, match="do not hold") as caught:
        model = DescentConstrainedClassifier(alpha=0.9, **QUICK).fit(X, LABELS)
    assert not model.feasible_
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_report_allows_the_slacks_of_the_epoch_whose_weights_are_kept(interrupted, monkeypatch):
    if interrupted:
        interrupt_after(11, monkeypatch)
    price, options = 0.5, {"alpha": 0.5, "dual_lr": 0.05, "lr": 0.02, "random_state": 0, "n_epochs": 12}
    model = DescentConstrainedClassifier(resilience=price, **options)
    with pytest.raises(ConstrainedTrainingInterrupted) if interrupted else nullcontext():
        model.fit(X, LABELS)
    history = model.history_
    violations, slacks = np.array(history.violations), np.array(history.slacks)
    worth = np.array(history.validation)[:, -1] + price / 2 * np.square(np.maximum(violations + slacks, 0)).sum(1)
    kept = np.argmin(worth)
    assert kept < len(worth) - 1
    assert np.abs(slacks[kept] - slacks[-1]).max() > 1e-3
    np.testing.assert_allclose(model.layer_losses_, history.validation[kept])
    np.testing.assert_allclose(model.report_.violations, violations[kept])
    assert model.feasible_ == history.feasible[kept]


def test_the_default_reference_is_the_loss_of_the_best_constant():
    model = DescentConstrainedClassifier(objective="last", validation_fraction=0.0, **QUICK)
    model.fit(X, LABELS)
    share = np.mean(LABELS == "more")
    entropy = -share * np.log(share) - (1 - share) * np.log(1 - share)
    violation = model.report_.losses[0] - entropy
    assert model.report_.violations[0] == pytest.approx(violation, abs=1e-4)


def test_layers_predict_and_samples_may_leave_early():
    model = DescentConstrainedClassifier(alpha=0.05, n_layers=3, **QUICK).fit(X, LABELS)
    logits = model.layer_outputs(X)
    index = np.searchsorted(model.classes_, LABELS)
    curve = exit_curve(logits, index)
    for k in (1, 2, 3):
        assert np.mean(model.predict(X, max_layers=k) == LABELS) == pytest.approx(curve[k - 1])
        probability = model.predict_proba(X, max_layers=k)
        expected = 1 / (1 + np.exp(logits[k - 1, :, 0] - logits[k - 1, :, 1]))
        np.testing.assert_allclose(probability[:, 1], expected, rtol=1e-5)
    np.testing.assert_array_equal(model.predict(X, max_layers=3), model.predict(X))
    np.testing.assert_array_equal(model.predict_proba(X, max_layers=3), model.predict_proba(X))
    predictions, layers = leave_early(logits, 0.0)
    assert (layers == 1).all()
    np.testing.assert_array_equal(model.classes_[predictions], model.predict(X, max_layers=1))
    with pytest.raises(ValueError, match="max_layers must be an integer from 1 to 3"):
        model.predict(X, max_layers=4)


def test_weights_of_classes_move_the_decision():
    counts = {}
    for weight in ({"more": 1.0, "less": 20.0}, {"more": 20.0, "less": 1.0}):
        model = DescentConstrainedClassifier(
            objective="last", class_weight=weight, lr=0.01, n_epochs=10, random_state=0
        )
        counts[weight["more"]] = np.sum(model.fit(X, LABELS).predict(X) == "more")
    assert counts[20.0] > counts[1.0]


def test_a_fit_does_not_need_gradients_switched_on():
    model = DescentConstrainedDenoiser(objective="last", n_epochs=2, random_state=0)
    with torch.no_grad():
        without = clone(model).fit(CLEAN).layer_losses_
    np.testing.assert_array_equal(without, model.fit(CLEAN).layer_losses_)


@pytest.mark.filterwarnings("ignore::convexformer.constrained.InfeasibleWarning")
def test_classes_of_weight_zero_may_have_infinite_losses():
    labels = np.where(RNG.uniform(size=120) < 0.3, "other", LABELS)
    beyond = np.where((labels == "other")[:, None, None], 1e200, X)
    model = DescentConstrainedClassifier(class_weight={"less": 1, "more": 1, "other": 0}, **QUICK)
    given, infinite = (clone(model).fit(tokens, labels) for tokens in (X, beyond))
    np.testing.assert_array_equal(infinite.layer_losses_, given.layer_losses_)
    assert np.isfinite(infinite.layer_losses_).all()


def test_padding_changes_nothing():
    samples = [sample[:length] for sample, length in zip(X, RNG.integers(1, 6, 120), strict=True)]
    options = {"objective": "last", "dtype": "float64", "n_epochs": 3, "random_state": 0}
    models = [DescentConstrainedClassifier(**options).fit(pad_sequences(samples, n), LABELS) for n in (5, 7)]
    outputs = [m.decision_function(pad_sequences(samples, n)) for m, n in zip(models, (5, 7), strict=True)]
    np.testing.assert_allclose(*outputs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("model", ["ut", "dust"])
def test_denoising(model):
    noisy = CLEAN + 0.3 * RNG.normal(size=CLEAN.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InfeasibleWarning)
        denoiser = DescentConstrainedDenoiser(0.01, noise=0.3, model=model, n_layers=2, lr=0.01, n_epochs=120)
        denoiser.set_params(random_state=0).fit(CLEAN)
    errors = [np.square(denoiser.transform(noisy, max_layers=k) - CLEAN).mean() for k in (1, 2)]
    assert errors[-1] < np.square(noisy - CLEAN).mean()
    assert denoiser.transform(noisy).shape == noisy.shape
    assert denoiser.report_.losses.shape == (2,)


def test_the_size_of_batches_may_be_an_integer_of_numpy():
    options = {"objective": "last", "random_state": 0, "n_epochs": 2}
    models = [DescentConstrainedClassifier(batch_size=size, **options).fit(X, LABELS) for size in (50, np.int64(50))]
    np.testing.assert_array_equal(models[0].decision_function(X), models[1].decision_function(X))


def test_models_are_pickled():
    classifier = DescentConstrainedClassifier(objective="last", n_epochs=2, random_state=0).fit(X, LABELS)
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(again.predict_proba(X), classifier.predict_proba(X))


def interrupt_after(n_epochs, monkeypatch):
    run = PrimalDual._run_epoch

    def interrupted(trainer, *arguments):
        if len(trainer.history_.losses) == n_epochs:
            raise KeyboardInterrupt
        run(trainer, *arguments)

    monkeypatch.setattr(PrimalDual, "_run_epoch", interrupted)


def test_an_interrupted_fit_is_usable(monkeypatch):
    interrupt_after(2, monkeypatch)
    model = DescentConstrainedClassifier(objective="last", n_epochs=9, random_state=0)
    with pytest.raises(ConstrainedTrainingInterrupted):
        model.fit(X, LABELS)
    assert model.n_iter_ == 2
    assert model.predict(X).shape == (120,)


def test_samples_of_training_that_are_all_held_out_are_named():
    with pytest.raises(ValueError, match=r"validation_fraction=0.9 leaves no sample for training; give a smaller one"):
        DescentConstrainedDenoiser(validation_fraction=0.9).fit(CLEAN[:3])
    with pytest.raises(ValueError, match=r"validation_fraction=0.9 leaves no sample of some class for training"):
        DescentConstrainedClassifier(validation_fraction=0.9).fit(X[:4], LABELS[:4])


@pytest.mark.parametrize(
    ("estimator", "parameters", "message"),
    [
        (DescentConstrainedClassifier, {"n_layers": 1}, "n_layers must be an integer of at least 2"),
        (DescentConstrainedClassifier, {"alpha": 1.0}, "alpha must be"),
        (DescentConstrainedClassifier, {"c_ref": 0.0}, "c_ref must be"),
        (DescentConstrainedClassifier, {"validation_fraction": 1.0}, "validation_fraction must be"),
        (DescentConstrainedClassifier, {"n_epochs": 0}, "n_epochs must be"),
        (DescentConstrainedDenoiser, {"model": "vit"}, "model must be one of"),
        (DescentConstrainedDenoiser, {"noise": 0.0}, "noise must be a positive"),
        (DescentConstrainedDenoiser, {"n_layers": 1}, "n_layers must be"),
    ],
)
def test_bad_parameters(estimator, parameters, message):
    with pytest.raises(ValueError, match=message):
        estimator(**parameters).fit(X, LABELS)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_saved_classifier_comes_back_the_same(columns, shared, tmp_path):
    data, labels = (X[:, :, 0], LABELS) if columns else (X, np.where(X[:, 0, 0] > 0.5, 2, LABELS == "more"))
    model = DescentConstrainedClassifier(objective="last", shared=shared, class_weight="balanced", **QUICK)
    save_model(model.fit(data, labels), tmp_path / "model.npz")
    again = load_model(tmp_path / "model.npz")
    np.testing.assert_array_equal(again.layer_outputs(data), model.layer_outputs(data))
    np.testing.assert_array_equal(again.predict_proba(data), model.predict_proba(data))
    np.testing.assert_array_equal(again.predict(data, max_layers=1), model.predict(data, max_layers=1))
    np.testing.assert_array_equal(again.duals_, model.duals_)
    for each in dataclasses.fields(model.report_):
        np.testing.assert_array_equal(getattr(again.report_, each.name), getattr(model.report_, each.name))
    assert (again.feasible_, again.n_iter_) == (model.feasible_, model.n_iter_)
    assert again.get_params() == model.get_params()
    assert not any(weight.requires_grad for weight in again.network_.parameters())
    with pytest.raises(ValueError, match="max_layers must be an integer from 1 to 3"):
        again.predict(data, max_layers=4)


@pytest.mark.parametrize("kind", ["ut", "dust"])
def test_a_saved_denoiser_comes_back_the_same(kind, tmp_path):
    model = DescentConstrainedDenoiser(model=kind, objective="last", n_epochs=3, dtype="float32", random_state=0)
    save_model(model.fit(CLEAN), tmp_path / "model.npz")
    again = load_model(tmp_path / "model.npz")
    for max_layers in (None, 2):
        np.testing.assert_array_equal(again.transform(CLEAN, max_layers), model.transform(CLEAN, max_layers))
    np.testing.assert_array_equal(again.layer_losses_, model.layer_losses_)


def test_a_path_is_read_into_memory(tmp_path):
    np.save(tmp_path / "X.npy", X[:, :, 0])
    path, options = str(tmp_path / "X.npy"), {"objective": "last", "n_epochs": 2, "random_state": 0}
    plain, read = (DescentConstrainedClassifier(**options).fit(data, LABELS) for data in (X[:, :, 0], path))
    np.testing.assert_array_equal(read.layer_outputs(path), plain.layer_outputs(X[:, :, 0]))
    denoisers = [DescentConstrainedDenoiser(**options).fit(data) for data in (X[:, :, 0], path)]
    np.testing.assert_array_equal(denoisers[1].transform(path), denoisers[0].transform(X[:, :, 0]))

"""Unfolded transformers as estimators: their certified readout, their report, saving, padding, interrupts."""

import pickle

import numpy as np
import pytest
import torch

from convexformer import (
    UnfoldedTransformerClassifier,
    UnfoldedTransformerRegressor,
    load_model,
    optimality_gap,
    pad_sequences,
    save_model,
)
from convexformer.nn import TrainingInterrupted

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 5, 4))
Y = X[:, :, 0].mean(1) + np.abs(X[:, :, 1]).mean(1)
LABELS = np.where(np.median(Y) < Y, "more", "less")
QUICK = {"n_layers": 2, "n_steps": 30, "random_state": 0}


def test_the_readout_is_the_certified_optimum_and_the_energies_never_rise():
    model = UnfoldedTransformerRegressor(alpha=1e-3, **QUICK).fit(X, Y)
    assert model.certificate_.relative_gap <= 1e-4
    assert model.certificate_.primal <= model.optimality_gap_.objective
    assert model.optimality_gap_.objective == pytest.approx(model.history_.final_objective, rel=1e-6)
    assert model.energies_.shape == (2, 2, 60)
    assert model.descent_.guaranteed
    assert model.descent_.first_rise is None
    network = model.network_
    tokens, y = torch.as_tensor(X), torch.as_tensor(Y)[:, None]
    objective = network.objective(tokens, y, alpha=1e-3).item()
    assert objective == pytest.approx(model.certificate_.primal, rel=1e-9)
    again = optimality_gap(network.readout, network.features(tokens), y, alpha=1e-3)
    assert again.relative_gap <= 2e-4
    np.testing.assert_allclose(model.predict(X), network(tokens)[:, 0])


def test_without_a_refit_the_trained_readout_stays():
    model = UnfoldedTransformerRegressor(refit_readout=False, **QUICK).fit(X, Y)
    assert not hasattr(model, "certificate_")
    objective = model.network_.objective(torch.as_tensor(X), torch.as_tensor(Y)[:, None], alpha=1e-3).item()
    assert objective == pytest.approx(model.history_.final_objective)


def test_a_second_fit_forgets_the_first():
    model = UnfoldedTransformerRegressor(**QUICK).fit(X, Y)
    model.set_params(refit_readout=False).fit(X, Y)
    assert not hasattr(model, "certificate_")


@pytest.mark.parametrize("loss", ["logistic", "softmax", "squared_hinge"])
def test_classification(loss):
    model = UnfoldedTransformerClassifier(loss=loss, alpha=1e-3, n_layers=2, n_steps=150, random_state=0)
    labels = np.where(X[:, :, 0].mean(1) > 0, "more", "less")
    model.fit(X, labels)
    assert model.score(X, labels) > 0.9
    assert model.certificate_.primal <= model.optimality_gap_.objective
    assert list(model.classes_) == ["less", "more"]


def test_class_weights_are_those_of_the_samples():
    weight = np.where(LABELS == "more", 3.0, 1.0)
    by_class = UnfoldedTransformerClassifier(class_weight={"more": 3.0}, **QUICK).fit(X, LABELS)
    by_sample = UnfoldedTransformerClassifier(**QUICK).fit(X, LABELS, sample_weight=weight)
    np.testing.assert_allclose(by_class.decision_function(X), by_sample.decision_function(X), rtol=1e-6)


@pytest.mark.parametrize("batch_size", [None, 25, 60])
def test_samples_of_weight_zero_may_be_of_any_size(batch_size):
    weight, tokens = np.ones(60), X.astype(np.float32)
    weight[::5] = 0
    counted = weight > 0
    wanted = UnfoldedTransformerRegressor(batch_size=batch_size, **QUICK).fit(tokens[counted], Y[counted])
    filled = np.where(counted[:, None, None], tokens, np.float32(9e36))
    model = UnfoldedTransformerRegressor(batch_size=batch_size, **QUICK).fit(filled, Y, weight)
    np.testing.assert_array_equal(model.predict(tokens), wanted.predict(tokens))
    assert model.certificate_ == wanted.certificate_


def test_padding_changes_nothing():
    lengths = RNG.integers(1, 6, 60)
    samples = [sample[:length] for sample, length in zip(X, lengths, strict=True)]
    models = [UnfoldedTransformerRegressor(dtype="float64", **QUICK).fit(pad_sequences(samples, n), Y) for n in (5, 7)]
    np.testing.assert_allclose(*(m.predict(pad_sequences(samples, n)) for m, n in zip(models, (5, 7), strict=True)))


def test_the_mean_of_tokens_does_not_depend_on_their_order():
    model = UnfoldedTransformerRegressor(**QUICK).fit(X, Y)
    np.testing.assert_allclose(model.predict(X[:, ::-1]), model.predict(X))


def test_report_of_new_samples():
    model = UnfoldedTransformerRegressor(mode="aim", **QUICK).fit(X, Y)
    report = model.descent_report(X[:7])
    assert report.energies.shape == (2, 2, 7)
    assert not report.guaranteed
    np.testing.assert_allclose(report.energies, model.energies_[:, :, :7])


@pytest.mark.parametrize(
    "model",
    [
        UnfoldedTransformerRegressor(**QUICK),
        UnfoldedTransformerRegressor(mode="aim", shared=False, width=3, eigenvalue_limit=None, **QUICK),
        UnfoldedTransformerRegressor(refit_readout=False, pooling="tokens", rho="log1", **QUICK),
        UnfoldedTransformerClassifier(**QUICK),
    ],
)
def test_saved_and_pickled_models_predict_the_same(model, tmp_path):
    y = LABELS if isinstance(model, UnfoldedTransformerClassifier) else Y
    model.fit(X, y)
    save_model(model, tmp_path / "model.npz")
    for again in (load_model(tmp_path / "model.npz"), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(again.predict(X), model.predict(X))
        np.testing.assert_array_equal(again.energies_, model.energies_)
        assert str(again.descent_) == str(model.descent_)
        assert getattr(again, "certificate_", None) == getattr(model, "certificate_", None) or (
            again.certificate_.primal == model.certificate_.primal
        )


def test_an_interrupted_fit_is_usable():
    def interrupt(step, objective):
        if step == 10:
            raise KeyboardInterrupt

    model = UnfoldedTransformerRegressor(callback=interrupt, **QUICK)
    with pytest.raises(TrainingInterrupted):
        model.fit(X, Y)
    assert model.n_iter_ == 10
    assert model.predict(X).shape == (60,)
    assert not hasattr(model, "certificate_")


def test_the_size_of_batches_may_be_an_integer_of_numpy():
    models = [UnfoldedTransformerRegressor(batch_size=size, **QUICK).fit(X, Y) for size in (25, np.int64(25))]
    np.testing.assert_array_equal(models[0].predict(X), models[1].predict(X))


def test_precision():
    single = UnfoldedTransformerRegressor(**QUICK).fit(X.astype(np.float32), Y)
    assert single.predict(X.astype(np.float32)).dtype == np.float32
    assert single.energies_.dtype == np.float64
    double = UnfoldedTransformerRegressor(dtype="float64", **QUICK).fit(X.astype(np.float32), Y)
    assert next(double.network_.parameters()).dtype == torch.float64


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"mode": "exact"}, "mode must be one of"),
        ({"pooling": "max"}, "pooling must be one of"),
        ({"attention": "causal"}, "attention mode must be one of"),
        ({"eigenvalue_limit": -1.0}, "eigenvalue_limit must be a positive finite number"),
        ({"width": 0}, "width must be a positive integer"),
        ({"n_layers": 0}, "n_layers must be a positive integer"),
        ({"n_heads": 0}, "n_heads must be a positive integer"),
        ({"refit_readout": "yes"}, "refit_readout must be True or False"),
        ({"rho": "cosh"}, "rho must be one of"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"alpha": -1.0}, "alpha"),
        ({"batch_size": "a"}, "batch_size must be a positive integer or None, got 'a'"),
    ],
)
def test_bad_parameters(parameters, message):
    with pytest.raises(ValueError, match=message):
        UnfoldedTransformerRegressor(**QUICK | parameters).fit(X, Y)


def test_samples_that_are_too_large_for_the_layers_are_named():
    model = UnfoldedTransformerRegressor(**QUICK).fit(X, Y)
    message = "X is too large for the tokens of all layers to be finite; scale the features"
    with pytest.raises(ValueError, match=message):
        model.predict(1e200 * X)
    with pytest.warns(RuntimeWarning, match="training diverged"), pytest.raises(ValueError, match=message):
        model.fit(1e200 * X, Y)
    assert np.isfinite(model.predict(X)).all()


def test_a_path_is_read_into_memory(tmp_path):
    np.save(tmp_path / "X.npy", X)
    path = str(tmp_path / "X.npy")
    plain, read = (UnfoldedTransformerRegressor(**QUICK).fit(data, Y) for data in (X, path))
    np.testing.assert_array_equal(read.predict(path), plain.predict(X))
    np.testing.assert_array_equal(read.descent_report(path).energies, plain.energies_)

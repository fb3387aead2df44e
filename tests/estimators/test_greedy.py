"""Layers trained one after another: what is handed on, guaranteed and certified."""

import itertools
import pickle

import numpy as np
import pytest
import torch

from convexformer import (
    ConvexAttentionClassifier,
    ConvexAttentionRegressor,
    Gates,
    GreedyConvexTransformerClassifier,
    GreedyConvexTransformerRegressor,
    attention_program,
)
from convexformer.estimators.greedy import HandOn
from convexformer.gates import GateSource

OPTIONS = {"n_gates": 5, "random_state": 0, "alpha": 0.03}


def data(n=60, seed=0):
    """Numbers that are products of the tokens, and labels that are their signs."""
    X = np.random.default_rng(seed).normal(size=(n, 2, 3))
    y = X[:, 0, 0] * X[:, 1, 0] + 0.2 * X[:, 1, 2]
    return X, y, np.where(y > 0, "above", "below")


def labels(X):
    return np.array(["a", "b", "c"])[np.abs(X[:, 0, :]).argmax(1)]


def handed_on(X, outputs, weight=None):
    """Inputs of the next layer, by the formula."""
    centred = outputs - np.average(outputs, axis=0, weights=weight)
    size = np.sqrt(np.average((X**2).sum(2).mean(1), weights=weight))
    spread = np.sqrt(np.average((centred**2).sum(1), weights=weight))
    return np.concatenate([X, np.repeat((centred * size / spread)[:, None], X.shape[1], 1)], 2)


@pytest.mark.parametrize("shape", [(60, 2, 3), (60, 6)])
def test_one_layer_is_the_plain_estimator(shape):
    X, y, signs = data()
    X = X.reshape(shape)
    for deep, plain, target, method in (
        (GreedyConvexTransformerRegressor, ConvexAttentionRegressor, y, "predict"),
        (GreedyConvexTransformerRegressor, ConvexAttentionRegressor, np.column_stack([y, -y]), "predict"),
        (GreedyConvexTransformerClassifier, ConvexAttentionClassifier, signs, "predict_proba"),
    ):
        model = deep(n_layers=1, **OPTIONS).fit(X, target)
        alone = plain(activation="gated_relu", **OPTIONS).fit(X, target)
        assert np.array_equal(getattr(model, method)(X), getattr(alone, method)(X))
        assert [c.primal for c in model.certificates_] == [alone.certificate_.primal]


def test_predictions_are_those_of_the_last_layer_on_what_is_handed_on():
    X, y, _ = data()
    new, weight = data(seed=1)[0], np.linspace(0, 2, 60)
    model = GreedyConvexTransformerRegressor(n_layers=3, **OPTIONS).fit(X, y, sample_weight=weight)
    inputs = X
    for layer in model.layers_[:-1]:
        inputs = handed_on(inputs, layer.predict(inputs)[:, None], weight)
    np.testing.assert_allclose(model.layers_[-1].predict(inputs), model.predict(X), rtol=1e-9, atol=1e-12)
    # A sample's prediction does not depend on those beside it.
    np.testing.assert_allclose(model.predict(new[:3]), model.predict(new)[:3], rtol=1e-9, atol=1e-12)


def test_every_layer_is_trained_on_what_is_handed_on_of_several_outputs():
    X, y, _ = data()
    Y = np.column_stack([y, np.abs(X[:, 0, 1])])
    model, inputs = GreedyConvexTransformerRegressor(n_layers=3, **OPTIONS).fit(X, Y), X
    for layer in model.layers_:
        assert layer.heads_.objective(inputs, Y) == pytest.approx(layer.certificate_.primal, rel=1e-9)
        outputs = layer.predict(inputs)
        inputs = handed_on(inputs, outputs)
    np.testing.assert_allclose(model.predict(X), outputs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
def test_what_is_handed_on_is_as_large_as_the_tokens_in_any_units(unit):
    X, y, _ = data()
    tokens, outputs = torch.as_tensor(X), torch.as_tensor(unit * y[:, None])
    for weight in (None, np.linspace(0, 2, 60)):
        found = HandOn.fitted(tokens, outputs, weight)(tokens, outputs)
        np.testing.assert_allclose(found, handed_on(X, y[:, None], weight), rtol=1e-9)
    rounded = -outputs[:1] * (1 + 1e-15 * tokens[:, 0, :1])
    rounded[0] = torch.nan  # of a sample that does not count
    assert HandOn.fitted(tokens, rounded, np.arange(60.0)).factor == 0.0


@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
def test_a_layer_can_be_the_layer_before_at_the_same_objective(penalty):
    X, y, _ = data()
    Y = np.column_stack([y, np.abs(X[:, 0, 1])])
    model = GreedyConvexTransformerRegressor(penalty=penalty, **OPTIONS).fit(X, Y)
    first, second = model.layers_
    wider = ((0, len(second.gates_) - len(first.gates_)), (0, 0), (0, Y.shape[1]), (0, 0))
    assert wider[0][1] == 5
    program = attention_program(
        handed_on(X, first.predict(X)), Y, alpha=0.03, penalty=penalty, gates=second.gates_, fit_intercept=True
    )
    point = (torch.as_tensor(np.pad(first.coef_, wider)), torch.as_tensor(first.intercept_))
    assert float(program.primal(*point)) == pytest.approx(first.certificate_.primal, rel=1e-9)


@pytest.mark.parametrize("loss", ["squared", "huber", "logistic", "softmax", "squared_hinge"])
def test_objectives_rise_by_no_more_than_the_certified_gap(loss):
    X, y, signs = data()
    if loss in ("squared", "huber"):
        model = GreedyConvexTransformerRegressor(n_layers=4, loss=loss, **OPTIONS).fit(X, y)
    else:
        target = labels(X) if loss == "softmax" else signs
        model = GreedyConvexTransformerClassifier(n_layers=4, loss=loss, **OPTIONS).fit(X, target)
    certificates = model.certificates_
    assert len(certificates) == len(model.layers_) == 4
    for layer, certificate in zip(model.layers_, certificates, strict=True):
        assert layer.certificate_ is certificate
        assert 0 <= certificate.relative_gap <= 1e-4
    for before, after in itertools.pairwise(certificates):
        assert after.dual <= before.primal
        assert after.primal <= before.primal + after.gap
    # On these data the second layer is certainly better: below what any first layer reaches.
    assert certificates[1].primal < certificates[0].dual


def test_gates_of_earlier_layers_stay_and_see_no_predictions():
    X, y, _ = data()
    layers = GreedyConvexTransformerRegressor(n_layers=3, **OPTIONS).fit(X, y).layers_
    for number, (before, after) in enumerate(itertools.pairwise(layers)):
        kept = len(before.gates_)
        assert np.array_equal(after.gates_.u1[:kept], before.gates_.u1)
        assert np.array_equal(after.gates_.u2[:kept], np.pad(before.gates_.u2, ((0, 0), (0, 1))))
        assert kept == 5 * (number + 1)
        assert after.gates_.u2[kept:, -1].all()


def test_given_gates_serve_all_layers():
    X, y, _ = data()
    gates = Gates(np.eye(2), np.eye(2, 3))
    first, second = GreedyConvexTransformerRegressor(gates=gates).fit(X, y).layers_
    assert np.array_equal(first.gates_.u2, gates.u2)
    assert np.array_equal(second.gates_.u2, np.pad(gates.u2, ((0, 0), (0, 1))))
    assert second.certificate_.primal <= first.certificate_.primal + second.certificate_.gap


class FirstLayerGates(GateSource):
    """A source that knows one width."""

    def make(self, data, random_state):
        return Gates(np.eye(2), np.eye(2, 3))


def test_a_source_that_cannot_serve_later_layers_is_refused():
    X, y, _ = data()
    GreedyConvexTransformerRegressor(n_layers=1, gates=FirstLayerGates()).fit(X, y)
    with pytest.raises(ValueError, match=r"gates for the 4 features that later layers have, got .* width 3"):
        GreedyConvexTransformerRegressor(gates=FirstLayerGates()).fit(X, y)


def test_fewer_layers_are_the_first_of_more():
    X, _, _ = data()
    y = labels(X)
    model = GreedyConvexTransformerClassifier(n_layers=3, **OPTIONS).fit(X, y)
    stages = list(model.staged_predict(X))
    for n_layers in (1, 2, 3):
        shallow, alone = model.first_layers(n_layers), GreedyConvexTransformerClassifier(n_layers=n_layers, **OPTIONS)
        alone.fit(X, y)
        assert np.array_equal(shallow.predict_proba(X), alone.predict_proba(X))
        assert np.array_equal(shallow.decision_function(X), alone.decision_function(X))
        assert np.array_equal(stages[n_layers - 1], alone.predict(X))
        assert shallow.get_params() == alone.get_params()
        assert (shallow.n_iter_, len(shallow.certificates_)) == (alone.n_iter_, n_layers)
    assert len(model.layers_) == len(stages) == 3
    with pytest.raises(ValueError, match="n_layers must be at most the 3 layers"):
        model.first_layers(4)


def test_samples_without_weight_count_nowhere():
    X, y, _ = data()
    weight = np.ones(60)
    weight[40:] = 0
    far = X.copy()
    far[40:] *= 100
    options = {**OPTIONS, "tol": 1e-8}
    weighted = GreedyConvexTransformerRegressor(**options).fit(far, y, sample_weight=weight)
    alone = GreedyConvexTransformerRegressor(**options).fit(X[:40], y[:40])
    np.testing.assert_allclose(weighted.predict(X[:40]), alone.predict(X[:40]), atol=1e-4)
    assert weighted.certificates_[1].primal == pytest.approx(alone.certificates_[1].primal, rel=1e-6)


@pytest.mark.parametrize("size", [1e100, -1e100, 1e160])
def test_samples_without_weight_may_be_of_any_size(size):
    X, y, _ = data()
    far = X.copy()
    far[0] *= size
    weight = np.full(60, 1e308)  # whose sum is no number
    weight[0] = 0.0
    model = GreedyConvexTransformerRegressor(**OPTIONS).fit(far, y, weight)
    alone = GreedyConvexTransformerRegressor(**OPTIONS).fit(X[1:], y[1:])
    np.testing.assert_allclose(model.predict(X), alone.predict(X), atol=1e-3)


def test_samples_of_a_class_without_weight_change_nothing():
    X, _, _ = data()
    y, far = labels(X), X.copy()
    far[y == "c"] *= 1e3
    options = {"class_weight": {"c": 0.0}, "tol": 1e-8, **OPTIONS}
    near, alone = (GreedyConvexTransformerClassifier(**options).fit(samples, y) for samples in (far, X))
    np.testing.assert_allclose(near.predict_proba(X), alone.predict_proba(X), atol=1e-12)


def test_balanced_classes_take_weights_whose_sum_is_no_number():
    X, _, signs = data()
    options = {"class_weight": "balanced", **OPTIONS}
    huge = GreedyConvexTransformerClassifier(**options).fit(X, signs, np.full(60, 1e308))
    alone = GreedyConvexTransformerClassifier(**options).fit(X, signs)
    np.testing.assert_allclose(huge.predict_proba(X), alone.predict_proba(X), atol=1e-12)
    huge = GreedyConvexTransformerClassifier(class_weight=dict.fromkeys(signs, 1e308), **OPTIONS).fit(X, signs)
    alone = GreedyConvexTransformerClassifier(**OPTIONS).fit(X, signs)
    np.testing.assert_allclose(huge.predict_proba(X), alone.predict_proba(X), atol=1e-12)


def test_constant_predictions_hand_on_nothing():
    X, y, _ = data()
    model = GreedyConvexTransformerRegressor(alpha=1e3, n_gates=3, random_state=0).fit(X, y + 1e6)
    np.testing.assert_allclose(model.predict(X), (y + 1e6).mean(), rtol=1e-12)
    assert not any(layer.coef_.any() for layer in model.layers_)
    rounded = torch.full((60, 1), 0.1, dtype=torch.float64)  # of which the mean is not exactly 0.1
    for outputs in (rounded, 0 * rounded):
        assert HandOn.fitted(torch.as_tensor(X), outputs, None).factor == 0.0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_precision_pickles_and_tensors(dtype):
    X, y, _ = data()
    X = X.astype(dtype)
    model = GreedyConvexTransformerRegressor(**OPTIONS).fit(X, y)
    again = GreedyConvexTransformerRegressor(**OPTIONS).fit(torch.as_tensor(X), torch.as_tensor(y))
    assert model.predict(X).dtype == again.predict(X).dtype == dtype
    assert np.array_equal(model.predict(X), again.predict(X))
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict(X), model.predict(X))


class Interrupted:
    """A callback that presses Ctrl-C, or fails, in the layer number `at`, at its second certificate."""

    def __init__(self, at, error=KeyboardInterrupt):
        self.at, self.layer, self.last, self.error = at, -1, np.inf, error

    def __call__(self, progress):
        self.layer += progress.iteration <= self.last
        self.last = progress.iteration
        if self.layer == self.at:
            raise self.error


def test_ctrl_c_keeps_the_layers_that_there_are():
    X, y, _ = data()
    model = GreedyConvexTransformerRegressor(n_layers=4, solver="admm", callback=Interrupted(2), **OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, y)
    assert [certificate.relative_gap <= 1e-4 for certificate in model.certificates_] == [True, True, False]
    full = GreedyConvexTransformerRegressor(n_layers=2, solver="admm", **OPTIONS).fit(X, y)
    assert np.array_equal(model.first_layers(2).predict(X), full.predict(X))
    assert np.isfinite(model.predict(X)).all()


def test_a_later_layer_that_fails_leaves_the_model_of_the_fit_before():
    X, y, _ = data()
    model = GreedyConvexTransformerRegressor(n_layers=2, solver="admm", **OPTIONS).fit(X, y)
    before = model.predict(X)
    with pytest.raises(RuntimeError):
        model.set_params(callback=Interrupted(1, RuntimeError)).fit(X, y)
    assert len(model.layers_) == 2
    assert np.array_equal(model.predict(X), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_layers": 0}, "n_layers must be a positive integer"),
        ({"n_layers": 1.5}, "n_layers must be a positive integer"),
        ({"alpha": -1.0}, "alpha must be"),
        ({"n_gates": 0}, "n_gates must be"),
        ({"gates": "nonsense"}, "gates must be"),
        ({"loss": "logistic"}, "needs class labels"),
    ],
)
def test_bad_parameters_are_named(options, message):
    X, y, _ = data()
    with pytest.raises(ValueError, match=message):
        GreedyConvexTransformerRegressor(**options).fit(X, y)


def test_any_device_trains_to_the_same_predictions(accelerator):
    X, y, _ = data()
    options = {**OPTIONS, "tol": 1e-7}
    models = [GreedyConvexTransformerRegressor(device=device, **options).fit(X, y) for device in ("cpu", accelerator)]
    np.testing.assert_allclose(models[0].predict(X), models[1].predict(X), atol=1e-3)


def test_layers_draw_gates_of_their_own_and_their_iterations_add_up():
    X, y, _ = data()
    model = GreedyConvexTransformerRegressor(n_layers=3, **OPTIONS).fit(X, y)
    assert len(np.unique(model.layers_[-1].gates_.u1, axis=0)) == 15
    assert model.n_iter_ == sum(layer.n_iter_ for layer in model.layers_) > model.layers_[-1].n_iter_

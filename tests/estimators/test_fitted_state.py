"""What a fitted estimator predicts follows from its fit alone: not from later parameters, failed fits, or calls."""

import copy
import pickle

import numpy as np
import pytest
import torch

from convexformer import (
    ConvexAttentionRegressor,
    ConvexProbeClassifier,
    DescentConstrainedClassifier,
    DescentConstrainedDenoiser,
    GreedyConvexTransformerRegressor,
    UnfoldedTransformerRegressor,
    load_model,
    save_model,
)
from convexformer.preprocessing.pooling import MeanPooling, pooled_chunks
from convexformer.unfolded import Logarithm

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 4, 3))
LABELS = np.where(X[:, :, 0].mean(1) > 0, "more", "less")
VALUES = X[:, 0, 0]

UNFOLDED = UnfoldedTransformerRegressor(n_layers=2, n_steps=20, random_state=0)
CONSTRAINED = DescentConstrainedClassifier(objective="last", n_layers=3, n_epochs=5, lr=0.02, random_state=0)
# An estimator, targets, parameters that would make another network, and one with which no fit is possible.
CASES = {
    "attention": (ConvexAttentionRegressor(), VALUES, {"alpha": 1.0, "activation": "gated_relu"}, {"alpha": -1.0}),
    "probe": (ConvexProbeClassifier(random_state=0), LABELS, {"alpha": 1.0}, {"alpha": -1.0}),
    "greedy": (GreedyConvexTransformerRegressor(n_gates=3, random_state=0), VALUES, {"n_layers": 1}, {"alpha": -1.0}),
    "unfolded": (UNFOLDED, VALUES, {"n_layers": 5, "anchored": False, "mode": "aim"}, {"n_steps": -1}),
    "constrained": (CONSTRAINED, LABELS, {"n_layers": 2}, {"validation_fraction": 2.0}),
    "denoiser": (
        DescentConstrainedDenoiser(objective="last", n_layers=3, n_epochs=3, random_state=0),
        None,
        {"n_layers": 2},
        {"validation_fraction": 2.0},
    ),
}


def outputs(model):
    return model.transform(X) if hasattr(model, "transform") else model.predict(X)


@pytest.fixture(scope="module")
def fitted():
    return {name: model.fit(X, y) for name, (model, y, _, _) in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_later_parameters_change_no_prediction(case, fitted, tmp_path):
    model, (_, _, others, _) = copy.deepcopy(fitted[case]), CASES[case]
    before = outputs(model)
    model.set_params(**others)
    np.testing.assert_array_equal(outputs(model), before)
    np.testing.assert_array_equal(outputs(pickle.loads(pickle.dumps(model))), before)
    save_model(model, tmp_path / "model.npz")
    np.testing.assert_array_equal(outputs(load_model(tmp_path / "model.npz")), before)


@pytest.mark.parametrize("case", CASES)
def test_a_fit_that_fails_leaves_the_one_before(case, fitted):
    model, (_, y, _, wrong) = copy.deepcopy(fitted[case]), CASES[case]
    before, state = outputs(model), set(vars(model))
    others = None if y is None else np.where(y == y[0], 5, 6)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        model.set_params(**wrong).fit(X[:, :3, :2], others)
    assert set(vars(model)) == state
    np.testing.assert_array_equal(outputs(model), before)


def test_layers_may_be_as_many_as_were_fitted(fitted):
    model = copy.deepcopy(fitted["constrained"]).set_params(n_layers=5)
    with pytest.raises(ValueError, match="from 1 to 3"):
        model.predict(X, max_layers=5)


def test_samples_on_another_device_move_no_part_of_a_probe():
    model = ConvexProbeClassifier(dictionary=MeanPooling()).fit(X, LABELS)
    elsewhere = model._read_samples(X, reset=False).to(torch.device("meta"))
    with pytest.raises(RuntimeError, match="meta"):  # which has no numbers
        list(pooled_chunks(model.pooler_, elsewhere))
    assert {part.device.type for part in model.pooler_.buffers()} == {"cpu"}


def test_every_class_has_a_sample_for_training():
    labels = np.array(["rare"] + ["often", "seldom"] * 12)
    for seed in range(12):
        model = copy.deepcopy(CONSTRAINED).set_params(random_state=seed, validation_fraction=0.8, n_epochs=1)
        kept, held_out = model._split([torch.arange(25)], labels, seed)
        assert set(labels[kept[0]]) == {"rare", "often", "seldom"}
        assert len(held_out[0]) == 20
    with pytest.raises(ValueError, match=r"validation_fraction=0.9.* no sample of some class"):
        copy.deepcopy(CONSTRAINED).set_params(validation_fraction=0.9)._split([torch.arange(25)], np.arange(25) % 5, 0)


@pytest.mark.parametrize(("fraction", "count"), [(0.29, 29), (0.57, 57), (0.0, 0)])
def test_the_share_that_is_held_out_is_not_rounded_down(fraction, count):
    model = DescentConstrainedDenoiser(validation_fraction=fraction)
    _, held_out = model._split([torch.arange(100)], np.zeros(100), 0)
    assert (0 if held_out is None else len(held_out[0])) == count


@pytest.mark.parametrize("later", [{}, {"rho": "exp"}])
def test_a_rho_that_is_an_object_is_saved(later, tmp_path):
    model = copy.deepcopy(UNFOLDED).set_params(rho=Logarithm(3.0)).fit(X, VALUES)
    save_model(model.set_params(**later), tmp_path / "model.npz")
    again = load_model(tmp_path / "model.npz")
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    assert again.rho == model.rho


def test_a_rho_whose_class_is_not_registered_is_named(tmp_path):
    class Own(Logarithm):
        """One that a file cannot hold."""

    model = copy.deepcopy(UNFOLDED).set_params(rho=Own(3.0)).fit(X, VALUES)
    for later in ({}, {"rho": "exp"}):
        with pytest.raises(ValueError, match=r"Own\(shift=3.0\) cannot be saved"):
            save_model(model.set_params(**later), tmp_path / "model.npz")

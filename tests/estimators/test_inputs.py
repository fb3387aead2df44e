"""Bad input gets an error that names the argument; gates and features from helpers are what they say."""

import math
import re
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, make_scorer
from sklearn.model_selection import GroupKFold, KFold, ShuffleSplit, StratifiedKFold

import convexformer
from convexformer import (
    ConvexAttention,
    ConvexAttentionClassifier,
    ConvexAttentionClassifierCV,
    ConvexAttentionRegressor,
    ConvexAttentionRegressorCV,
    ConvexProbeClassifier,
    ConvexProbeRegressor,
    ConvexSequenceRegressor,
    DescentConstrainedDenoiser,
    Gates,
    GaussianGates,
    Heads,
    ReluAttention,
    SequenceAttention,
    SoftmaxAttention,
    SparseGates,
    attention_program,
    image_patches,
    optimality_gap,
    pad_sequences,
)
from convexformer.datasets import load_digit_tokens, make_word_vectors
from convexformer.gates import TrainingData, generate_gates
from convexformer.nn import train
from convexformer.nn.modules.token_weights import PositionWeights
from convexformer.plot import plot_attention_map, plot_convergence, plot_token_norms
from convexformer.preprocessing import MeanPooling, QueryPooling
from convexformer.probes import Generation
from convexformer.programs.sequence import Stochastic
from convexformer.solvers import Fista, GroupL2, Huber, SolverUnavailableError, Squared, get_loss, solve
from convexformer.targets import class_targets
from convexformer.validation import as_tensor, check_program_tokens, refuse_dates
from convexformer_solvers.penalties.base import Penalty

rng = np.random.default_rng(0)
X = rng.normal(size=(20, 3, 2))
y = X[:, 0, 0]
labels = np.where(y > 0, 1, 0)


def spoiled(array, value):
    copy = array.copy()
    copy.flat[3] = value
    return copy


class PenaltyWithoutHeads(GroupL2):
    factorize = Penalty.factorize


class PenaltyWithoutRightNorm(GroupL2):
    right_norm = Penalty.right_norm


def dates():
    """One a sample, and a missing one."""
    days = np.datetime64("2020-01-01") + np.arange(20)
    days[3] = "NaT"
    return days


def ragged(samples):
    """One-dimensional array of objects."""
    array = np.empty(len(samples), dtype=object)
    array[:] = samples
    return array


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((spoiled(X, np.nan), y), "Input X contains NaN"),
        ((spoiled(X, np.inf), y), "Input X contains infinity"),
        ((X, spoiled(y, np.nan)), "Input y contains NaN"),
        ((X, spoiled(y, np.inf)), "Input y contains infinity"),
        ((X[0, 0], y[:2]), "Expected 2D array, got 1D"),
        ((X[0, 0], y[:2]), "X: Expected 2D array, got 1D"),
        ((X, []), r"y: Found array with 0 sample\(s\)"),
        ((X, y, []), r"sample_weight: Found array with 0 sample\(s\)"),
        ((X, y, X), "sample_weight: Found array with dim 3"),
        (([[10**400]], [1.0]), "X must hold numbers that float64 has: int too large"),
        ((X, [10**400] * len(X)), "y must hold numbers that float64 has: int too large"),
        ((X[..., None], y), "X must have 2 or 3 dimensions"),
        (([[[1.0], [2.0]], [[3.0]]], [0.0, 1.0]), "X is ragged.*pad_sequences"),
        ((ragged([np.ones((2, 3)), np.ones((4, 3))]), [0.0, 1.0]), "X is ragged.*pad_sequences"),
        ((ragged([[1.0, 2.0], [3.0]]), [0.0, 1.0]), "X is ragged.*pad_sequences"),
        ((ragged([1.0, [3.0]]), [0.0, 1.0]), "X is ragged.*pad_sequences"),
        ((X, y[:-1]), "y must have one row per sample, 20 as X, got 19"),
        ((X, 1.0), "y must have one row per sample, got the single value 1.0"),
        ((X, np.zeros((20, 0))), r"y must have at least one output, got shape \(20, 0\)"),
        ((X, y * 1j), "Complex data not supported: y must hold real numbers"),
        ((X * 1j, y), "Complex data not supported: X must hold real numbers"),
        ((X, dates()), r"y must hold numbers, got datetime64\[D\]"),
        ((X, dates() - dates()[0]), r"y must hold numbers, got timedelta64\[D\]"),
        ((dates()[:, None], y), r"X must hold numbers, got datetime64\[D\]"),
        ((X, y, dates()), r"sample_weight must hold numbers, got datetime64\[D\]"),
        (([*X[:-1], X[-1, :, :1]], y), r"X is ragged: its samples differ in the width of tokens"),
        (((X, X[..., 0] > 0), y), r"X must be one array, got a pair of tokens and lengths or a mask, .* give X\[0\]"),
        (((torch.as_tensor(X), np.ones(20, int)), y), "X must be one array, got a pair"),
        ((X, X), r"y must have shape .*got \(20, .*ConvexSequenceRegressor"),
        ((X, None), "y"),
        ((X, y, spoiled(np.ones(20), np.nan)), "sample_weight contains NaN"),
        ((X, y, -np.ones(20)), "sample_weight must be non-negative"),
        ((X, y, np.zeros(20)), "sample_weight must not be all zero"),
        ((X, y, np.ones(3)), r"sample_weight must have shape \(20,\)"),
        ((X, y, 2.0), r"sample_weight must have shape \(20,\), got the single value 2.0"),
        ((X[:0], y[:0]), "minimum of 1 is required"),
        ((torch.nested.as_nested_tensor(list(torch.as_tensor(X)), layout=torch.jagged), y), "X must not be a nested"),
        ((torch.as_tensor(X[:, :, 0]).to_sparse(), y), r"X must be a dense tensor.*give X.to_dense\(\)"),
        ((X, torch.as_tensor(y).to_sparse()), r"y must be a dense tensor.*give y.to_dense\(\)"),
    ],
)
def test_bad_data_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ConvexAttentionRegressor().fit(*arguments)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (-np.ones(20), "sample_weight must be non-negative, got -1.0"),
        (np.ones(3), r"sample_weight must have shape \(20,\), got \(3,\)"),
        (["one"] * 20, "sample_weight must hold numbers"),
        (np.zeros(20), "sample_weight must not be all zero"),
    ],
)
@pytest.mark.parametrize("kind", [ConvexAttentionRegressor, ConvexAttentionClassifier, ConvexProbeClassifier])
def test_scores_take_the_weights_that_fits_take(kind, weight, message):
    model = kind().fit(X, labels)
    with pytest.raises(ValueError, match=message):
        model.fit(X, labels, weight)
    with pytest.raises(ValueError, match=message):
        model.score(X, labels, weight)
    assert model.score(X, labels, ["1"] * 20) == model.score(X, labels)


@pytest.mark.parametrize("kind", [ConvexAttentionRegressor, ConvexProbeRegressor, ConvexSequenceRegressor])
def test_no_samples_and_no_array_at_all_are_named(kind):
    model = kind()
    for none in ([], (), np.array([]), torch.zeros(0)):
        with pytest.raises(ValueError, match=r"^X must have at least one sample"):
            model.fit(none, [])
    for single in (None, 3.0):
        with pytest.raises(ValueError, match=r"^X must be an array or a list of samples, got a single value or None$"):
            model.fit(single, y)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"alpha": -1.0}, "alpha must be positive"),
        ({"alpha": 0.0}, "alpha must be positive"),
        ({"alpha": np.nan}, "alpha must be positive and finite"),
        ({"alpha": "big"}, "alpha must be a positive finite number"),
        ({"alpha": None}, "alpha must be a positive finite number, got None"),
        ({"alpha": 10**400}, "alpha must be a positive finite number, got 1000"),
        ({"loss": "cubic"}, "loss must be one of"),
        ({"loss": "softmax"}, "needs class labels; use ConvexAttentionClassifier"),
        ({"penalty": "l7"}, "penalty must be one of"),
        ({"solver": "magic"}, "solver must be one of"),
        ({"activation": "tanh"}, "activation must be one of"),
        ({"activation": "relu"}, "fixed gates"),
        ({"gates": "sparse"}, "gates='sparse' is for activation='gated_relu', got activation='linear'"),
        ({"gates": ([[1.0]], [[1.0]])}, "is for activation='gated_relu', got activation='linear'"),
        ({"n_gates": 8}, "n_gates=8 is for activation='gated_relu', got activation='linear'.* or leave n_gates out"),
        ({"activation": "gated_relu", "gates": "odd"}, "gates must be one of"),
        ({"activation": "gated_relu", "n_gates": 0}, "n_gates must be a positive integer"),
        ({"activation": "gated_relu", "gates": ([[1.0]], [[1.0]])}, "gates: directions must have widths"),
        ({"activation": "gated_relu", "gates": ([[np.nan]], [[1.0]])}, "gates: u1 must be a finite array"),
        ({"tol": -1.0}, "tol must be a non-negative number"),
        ({"tol": "small"}, "tol must be a non-negative number"),
        ({"tol": True}, "tol must be a non-negative number"),
        ({"tol": 10**400}, "tol must be a non-negative number, got 1000"),
        ({"max_iter": 0}, "max_iter must be a positive integer"),
        ({"max_iter": 2.5}, "max_iter must be a positive integer"),
        ({"dtype": "int8"}, "dtype must be None, 'float32' or 'float64'"),
        ({"dtype": 3}, "dtype must be None, 'float32' or 'float64', as a name or a type, got 3"),
        ({"dtype": ["float32"]}, "dtype must be None, 'float32' or 'float64'"),
        ({"fit_intercept": "False"}, "fit_intercept must be True or False, got 'False'"),
        ({"warm_start": "no"}, "warm_start must be True or False, got 'no'"),
        ({"verbose": "no"}, "verbose must be True or False, got 'no'"),
        ({"penalty": PenaltyWithoutHeads()}, "penalty=.*define its method 'factorize'"),
        ({"penalty": PenaltyWithoutRightNorm()}, "penalty=.*define its method 'right_norm'"),
        (
            {"memory_limit": "1 big"},
            "memory_limit must be None or a positive number of bytes, got '1 big'; .* '500 MB'",
        ),
        ({"memory_limit": -1}, "memory_limit must be None or a positive number of bytes, got -1"),
        ({"device": "abacus"}, "device must be"),
        ({"device": 10**30}, "device must be"),
        ({"device": "mps"}, "device must be one on which torch holds float64.*got 'mps'"),
        ({"device": "hpu"}, "device must be one on which torch holds float64.*got 'hpu'"),
        ({"device": "meta"}, "device must be one that holds numbers"),
    ],
)
def test_bad_parameters_are_named(parameters, message):
    with pytest.raises(ValueError, match=message):
        ConvexAttentionRegressor(**parameters).fit(X, y)


@pytest.mark.parametrize("kind", [ConvexAttentionRegressor, ConvexAttentionRegressorCV])
def test_a_callback_that_cannot_be_called_is_named(kind):
    with pytest.raises(TypeError, match="callback must be None or callable with a Progress, got 3"):
        kind(callback=3).fit(X, y)


def test_answers_of_callbacks_that_are_neither_true_nor_false_are_named(tmp_path):
    options = {"callback": lambda progress: np.zeros(2), "random_state": 0}
    one, chosen = ConvexAttentionRegressor(**options), ConvexAttentionRegressorCV(**options)
    for fit in (one.fit, partial(one.fit, resume=tmp_path / "fit.npz"), chosen.fit):
        with pytest.raises(TypeError, match="callback must return True, False or None, got ndarray"):
            fit(X, y)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((np.ma.masked_less(X, 0), y), "X"),
        ((np.ma.masked_less(X[:, :, 0], 0), y), "X"),
        ((list(np.ma.masked_less(X, 0)), y), "X"),
        ((ragged(list(np.ma.masked_less(X, 0))), y), "X"),
        ((X, np.ma.masked_less(y, 0)), "y"),
        ((X, list(np.ma.masked_less(y, 0))), "y"),
        ((X, y, np.ma.masked_equal(np.arange(20), 3)), "sample_weight"),
    ],
)
def test_masks_that_would_be_dropped_are_refused(arguments, name):
    with pytest.raises(ValueError, match=f"{name} must have no masked values"):
        ConvexAttentionRegressor().fit(*arguments)
    with pytest.raises(ValueError, match="y must have no masked values"):
        ConvexAttentionClassifier().fit(X, np.ma.masked_equal(labels, 1))
    assert ConvexAttentionRegressor().fit(np.ma.array(X), np.ma.array(y)).score(X, y) > 0.9  # nothing is hidden


@pytest.mark.parametrize("change", [torch.Tensor.bfloat16, torch.Tensor.requires_grad_])
def test_lists_of_tensors_that_numpy_does_not_take_are_named(change):
    tokens = torch.as_tensor(X.copy())
    model, samples = ConvexAttentionRegressor(0.1).fit(X, y), list(change(tokens))
    for call in (model.predict, model.heads_.predict, lambda some: attention_program(some, y, alpha=0.1)):
        with pytest.raises(ValueError, match=r"X must hold numbers that numpy has; .* give torch.stack\(X\)"):
            call(samples)


def test_a_series_of_token_arrays_is_read_as_an_array_of_them():
    pandas = pytest.importorskip("pandas")
    series = pandas.Series(list(X), index=np.arange(len(X))[::-1])
    model = ConvexAttentionRegressor(0.1).fit(series, y)
    plain = ConvexAttentionRegressor(0.1).fit(X, y)
    np.testing.assert_array_equal(model.predict(series), plain.predict(X))
    np.testing.assert_array_equal(model.heads_.predict(series), plain.heads_.predict(X))
    with pytest.raises(ValueError, match="X is ragged"):
        model.fit(pandas.Series([*X[1:], X[0][:1]]), y)


def test_data_whose_sum_overflows_are_finite():
    huge = torch.full((20, 3, 2), 3e38)  # in float32
    assert not bool(torch.isfinite(huge.sum()))
    assert check_program_tokens(huge) is huge
    huge[3, 1, 0] = torch.inf
    with pytest.raises(ValueError, match="X must be finite"):
        check_program_tokens(huge)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"cv": []}, r"cv=\[\] gives no folds"),
        ({"scoring": ["r2"]}, "scoring must be None, the name of one score or a scorer, got \\['r2'\\]"),
    ],
)
def test_bad_parameters_of_cross_validation_are_named(parameters, message):
    with pytest.raises(ValueError, match=message):
        ConvexAttentionRegressorCV(alphas=2, **parameters).fit(X, y)


def test_a_start_of_arrays_is_named():
    with pytest.raises(TypeError, match=r"start must be a pair of tensors.*got ndarray and ndarray"):
        solve(attention_program(X, y, alpha=0.1), Fista(), start=(np.zeros((2, 3, 1)), np.zeros(1)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_asked_for_and_absent():
    with pytest.raises(ValueError, match=r"device='cuda' was asked for.*no CUDA device"):
        ConvexAttentionRegressor(device="cuda").fit(X, y)


def test_a_cuda_device_beyond_those_that_are_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"device='cuda:2' was asked for, but .* here are 'cuda:0', 'cuda:1'$"):
        ConvexAttentionRegressor(device="cuda:2").fit(X, y)


@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
@pytest.mark.parametrize("activation", ["linear", "gated_relu"])
def test_any_device_equals_the_cpu(penalty, activation, accelerator):
    options = {"alpha": 0.05, "penalty": penalty, "activation": activation, "random_state": 0, "tol": 1e-9}
    cpu, other = (ConvexAttentionClassifier(device=device, **options).fit(X, labels) for device in ("cpu", accelerator))
    assert other.certificate_.primal == pytest.approx(cpu.certificate_.primal, rel=1e-8)
    np.testing.assert_allclose(other.predict_proba(X), cpu.predict_proba(X), atol=1e-4)


@pytest.mark.parametrize(
    ("target", "parameters", "message"),
    [
        (np.zeros(20, int), {}, "two classes with positive weight, got one class: 0$"),
        (y, {}, "Unknown label type"),
        (labels, {"loss": "squared"}, "use ConvexAttentionRegressor"),
        (labels, {"class_weight": "heavy"}, "class_weight"),
        (labels, {"class_weight": {0: -1.0, 1: 1.0}}, "class_weight must be finite and not negative"),
        (labels, {"class_weight": {0: np.nan, 1: 1.0}}, "class_weight must be finite and not negative"),
        (labels, {"class_weight": {0: 0.0, 1: 1.0}}, "class_weight must leave at least two classes"),
        (labels, {"class_weight": {0: 1e308, 1: 1e-308}}, "class_weight must have ratios that float64 can represent"),
        (labels, {"class_weight": {0: "one", 1: 1.0}}, "class_weight=.* cannot be used"),
        (np.eye(20) + 1, {}, r"y of shape \(20, 20\) must hold 0 and 1 alone"),
        (np.array(["a", 1] * 10, dtype=object), {}, "y must hold labels of one kind"),
        (["a", 1] * 10, {}, "y must hold labels of one kind"),
    ],
)
def test_bad_labels_are_named(target, parameters, message):
    with pytest.raises(ValueError, match=message):
        ConvexAttentionClassifier(**parameters).fit(X, target)


@pytest.mark.parametrize(
    "name", ["ConvexAttention{}", "ConvexAttention{}CV", "ConvexProbe{}", "ConvexProbe{}CV", "UnfoldedTransformer{}"]
)
def test_a_loss_of_other_targets_names_the_estimator_of_the_same_kind_for_them(name):
    regressor, classifier = (name.format(kind) for kind in ("Regressor", "Classifier"))
    with pytest.raises(ValueError, match=f"needs class labels; use {classifier}$"):
        getattr(convexformer, regressor)(loss="logistic").fit(X, y)
    with pytest.raises(ValueError, match=f"is for numbers, not labels; use {regressor}$"):
        getattr(convexformer, classifier)(loss=Squared()).fit(X, labels)
    own = type("Own", (getattr(convexformer, regressor),), {})
    with pytest.raises(ValueError, match=f"use {classifier}$"):
        own(loss="logistic").fit(X, y)


def test_without_such_an_estimator_the_one_of_heads_is_named():
    with pytest.raises(ValueError, match=r"is for numbers, not labels; use ConvexAttentionRegressor$"):
        convexformer.DescentConstrainedClassifier(loss=Squared()).fit(X, labels)


@pytest.mark.parametrize("kind", [ConvexAttentionClassifier, ConvexProbeClassifier])
@pytest.mark.parametrize("size", [2.0**1023, 2.0**-1020])
def test_only_ratios_of_weights_of_classes_matter(kind, size):
    weight = rng.uniform(0.5, 1.0, 20)
    model = kind(random_state=0, class_weight={0: 1.0, 1: 0.25}).fit(X, labels, weight)
    other = kind(random_state=0, class_weight={0: size, 1: size / 4}).fit(X, labels, weight)
    assert other.certificate_.primal == model.certificate_.primal
    assert other.alpha_max_ == model.alpha_max_
    np.testing.assert_array_equal(other.predict_proba(X), model.predict_proba(X))
    tokens = X if kind is ConvexAttentionClassifier else other.pool(X)
    objective = other.heads_.objective(tokens, labels, weight)
    assert objective == pytest.approx(other.certificate_.primal, rel=1e-12)


def test_one_class_left_by_the_weights_is_an_error():
    with pytest.raises(ValueError, match="two classes with positive weight"):
        ConvexAttentionClassifier().fit(X, labels, sample_weight=labels)


def test_balanced_weights_are_those_of_the_samples_of_positive_weight():
    target, weight = np.digitize(y, [-0.5, 0.5]), rng.uniform(0.5, 2, 20)
    weight[target == 1] = 0.0
    options = {"loss": "softmax", "class_weight": "balanced", "tol": 1e-9}
    model = ConvexAttentionClassifier(**options).fit(X, target, weight)
    counted = weight > 0
    alone = ConvexAttentionClassifier(**options).fit(X[counted], target[counted], weight[counted])
    assert model.classes_.tolist() == [0, 1, 2]
    assert model.certificate_.primal == pytest.approx(alone.certificate_.primal, rel=1e-6)
    np.testing.assert_allclose(model.predict_proba(X)[:, [0, 2]], alone.predict_proba(X), atol=1e-3)


def test_weights_of_classes_multiply_those_of_samples():
    target, weight = np.arange(20) % 3, rng.uniform(0.5, 2, 20)
    factor = {0: 1.0, 1: 2.0, 2: 4.0}
    found = class_targets(target, get_loss("softmax"), factor, weight).weight(target, weight)
    expected = np.array([factor[label] for label in target]) * weight
    np.testing.assert_allclose(found / found[0], expected / expected[0], rtol=1e-15)
    balanced = class_targets(target, get_loss("softmax"), "balanced", weight).weight(target, weight)
    total = np.bincount(target, balanced)
    np.testing.assert_allclose(total, total[0], rtol=1e-14)


def test_labels_unknown_to_the_heads_are_named():
    heads = ConvexAttentionClassifier().fit(X, labels).heads_
    with pytest.raises(ValueError, match=r"labels that were not seen in fit: \[7\]"):
        heads.objective(X, np.where(labels == 1, 7, 0))


@pytest.mark.parametrize("other", [None, 1])
def test_labels_of_another_kind_than_those_of_the_heads_are_named(other):
    heads = ConvexAttentionClassifier().fit(X, np.where(labels == 1, "a", "b").astype(object)).heads_
    with pytest.raises(ValueError, match=r"y must hold labels of the kind of those in fit, \['a' 'b'\]"):
        heads.objective(X, np.full(len(X), other, dtype=object))


@pytest.mark.parametrize("other", [X[:, :2], X[:, :, :1], X[:, :, 0], X[0]])
def test_other_shapes_at_prediction(other):
    model = ConvexAttentionRegressor().fit(X, y)
    with pytest.raises(ValueError, match=r"X must have shape \(n_samples, 3, 2\) as in fit"):
        model.predict(other)


def test_solvers_that_are_not_there_say_what_to_do():
    with pytest.raises(SolverUnavailableError, match=r"not installed.*installed are"):
        ConvexAttentionRegressor(solver="gurobi").fit(X, y)


def test_a_class_of_weight_zero_beside_two_others_does_not_count():
    three = np.arange(20) % 3
    model = ConvexAttentionClassifier(class_weight={0: 1.0, 1: 1.0, 2: 0.0}, tol=1e-8).fit(X, three)
    kept = ConvexAttentionClassifier(loss="softmax", tol=1e-8).fit(X[three < 2], three[three < 2])
    assert model.certificate_.primal == pytest.approx(kept.certificate_.primal, rel=1e-7)
    # Weights of samples and classes may each leave two classes and together only one.
    with pytest.raises(ValueError, match="class_weight must leave at least two classes with positive weight"):
        model.fit(X, three, sample_weight=(three > 0).astype(float))


@pytest.mark.parametrize("loss", ["softmax", "squared_hinge"])
def test_a_class_whose_samples_have_no_weight_has_scores_as_in_logistic_regression(loss):
    three = np.arange(20) % 3
    weight = (three < 2).astype(float)
    model = ConvexAttentionClassifier(loss=loss).fit(X, three, sample_weight=weight)
    usual = LogisticRegression().fit(X.reshape(20, -1), three, sample_weight=weight)
    np.testing.assert_array_equal(model.classes_, usual.classes_)
    assert model.decision_function(X).shape == usual.decision_function(X.reshape(20, -1)).shape
    assert 2 not in model.predict(X)


BAD_GRIDS = [[], [0.1, -0.1], [0.0], [np.nan], [np.inf], [[0.1]], [True], ["much"], "much", None, {"a": 1}]


@pytest.mark.parametrize("alphas", [*BAD_GRIDS, 0, -2, True, 2.5, np.True_])
def test_bad_grids_are_named(alphas):
    with pytest.raises(ValueError, match="alphas must be"):
        ConvexAttentionRegressorCV(alphas=alphas).fit(X, y)


@pytest.mark.parametrize("alphas", [grid for grid in BAD_GRIDS if grid is not None])
def test_bad_grids_of_paths_are_named(alphas):
    with pytest.raises(ValueError, match="alphas must be a list of at least one positive finite number"):
        ConvexAttentionRegressor().path(X, y, alphas=alphas)


@pytest.mark.parametrize("n_alphas", [0, 2.5, True, "3", None])
def test_bad_lengths_of_paths_are_named(n_alphas):
    with pytest.raises(ValueError, match="n_alphas must be a positive integer"):
        ConvexAttentionRegressor().path(X, y, n_alphas=n_alphas)


def test_arrays_of_equal_sequences_are_read_as_lists_of_them_are():
    wanted = ConvexAttentionRegressor().fit(X, y)
    np.testing.assert_array_equal(ConvexAttentionRegressor().fit(ragged(list(X)), y).coef_, wanted.coef_)


@pytest.mark.parametrize("view", [lambda a: a[::-1][::-1], lambda a: a[::-1]])
def test_reversed_and_read_only_arrays(view):
    arrays = [view(array) for array in (X.copy(), y.copy(), np.linspace(1, 2, 20))]
    copies = [array.copy() for array in arrays]
    for array in arrays:
        array.setflags(write=False)
    model, wanted = (ConvexAttentionRegressor().fit(*given) for given in (arrays, copies))
    np.testing.assert_array_equal(model.coef_, wanted.coef_)
    assert model.heads_.objective(*arrays) == wanted.heads_.objective(*copies)
    program = attention_program(arrays[0], arrays[1], alpha=0.1, sample_weight=arrays[2])
    assert program.alpha_max == attention_program(copies[0], copies[1], alpha=0.1, sample_weight=copies[2]).alpha_max


@pytest.mark.usefixtures("every_warning")
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64, bool])
@pytest.mark.parametrize("view", [lambda a: a, lambda a: a[:, ::2], lambda a: a.T, lambda a: a[:0], lambda a: a[2, 3]])
def test_tensors_of_read_only_arrays_share_their_memory(view, dtype):
    array = view(np.arange(48).reshape(6, 8).astype(dtype))
    read_only = np.asarray(array).view()
    read_only.setflags(write=False)
    tensor = as_tensor(read_only)
    assert tensor.data_ptr() == as_tensor(array).data_ptr() or array.ndim == 0
    np.testing.assert_array_equal(tensor.numpy(), array, strict=True)
    assert not read_only.flags.writeable


def test_tensors_of_broadcast_arrays_share_their_memory():
    array = np.broadcast_arrays(np.ones(1), np.ones(3))[0]  # numpy warns of a look at its flags
    assert as_tensor(array).stride() == (0,)


def test_tensors_of_read_only_arrays_keep_the_memory():
    array = np.arange(4.0)
    array.setflags(write=False)
    gone = weakref.ref(array)
    tensor = as_tensor(array)
    del array
    assert gone() is not None
    del tensor
    assert gone() is None


def test_threads_that_read_read_only_arrays_leave_the_warning_filters_alone():
    read_only = X.copy()
    read_only.setflags(write=False)
    before, interval = list(warnings.filters), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(as_tensor, [read_only] * 4000))
    finally:
        sys.setswitchinterval(interval)
    assert list(warnings.filters) == before


def test_held_out_samples_without_weight_are_named():
    weight = np.repeat([1.0, 1.0, 0.0, 1.0], 5)
    for scoring in (None, "r2"):
        model = ConvexAttentionRegressorCV(alphas=2, cv=4, scoring=scoring)
        with pytest.raises(ValueError, match=r"cv: every held-out sample of fold 2 has weight zero"):
            model.fit(X, y, sample_weight=weight)
    with pytest.raises(ValueError, match=r"cv: every training sample of fold 0 has weight zero"):
        model.set_params(cv=2).fit(X, y, sample_weight=np.repeat([1.0, 0.0], 10))
    # Where classes have weights, these count too.
    three = np.arange(20) % 3
    folds = [(np.flatnonzero(three < 2), np.flatnonzero(three == 2)), (np.flatnonzero(three != 1), [1, 4])]
    with pytest.raises(ValueError, match=r"cv: every held-out sample of fold 0 has weight zero"):
        ConvexAttentionClassifierCV(alphas=2, cv=folds, class_weight={0: 1, 1: 1, 2: 0}).fit(X, three)


def test_held_out_samples_without_weight_may_have_infinite_losses():
    weight, filled = np.ones(20), X.copy()
    weight[3], filled[3] = 0, 1e200
    models = [ConvexAttentionRegressorCV(alphas=3, cv=4, scoring="r2").fit(each, y, weight) for each in (X, filled)]
    np.testing.assert_allclose(models[1].score_path_, models[0].score_path_, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"X": X[0, 0], "y": y[:3]}, "X must hold real numbers, of shape"),
        ({"X": X[:0], "y": y[:0]}, "X must hold real numbers, of shape"),
        ({"X": X * 1j, "y": y}, "X must hold real numbers of at most 64 bits"),
        ({"X": spoiled(X, np.nan), "y": y}, "X must be finite"),
        ({"X": X, "y": y[:4]}, r"y must have shape \(20"),
        ({"X": X, "y": y, "loss": "logistic"}, "must be -1 or 1"),
        ({"X": X, "y": y, "sample_weight": -np.ones(20)}, "sample_weight"),
        ({"X": X, "y": y, "sample_weight": "balanced"}, "sample_weight must hold numbers"),
        ({"X": X, "y": None}, r"y must have shape \(n_samples,\) or"),
        ({"X": X, "y": 1.0}, r"y must have shape \(n_samples,\) or"),
        ({"X": X, "y": dates()}, "y must hold numbers, got datetime64"),
        ({"X": X, "y": np.where(y > 0, "a", "b")}, "y must hold numbers"),
        ({"X": X, "y": y, "fit_intercept": "no"}, "fit_intercept must be True or False"),
        ({"X": X, "y": y, "gates": Gates(np.ones((1, 2)), np.ones((1, 3)))}, r"gates .* got samples of shape \(3, 2\)"),
    ],
)
def test_attention_program_names_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        attention_program(alpha=0.1, **arguments)


@pytest.mark.parametrize("gates", ["gaussian", (np.ones((1, 2)), np.ones((1, 3)))])
def test_programs_take_gates_that_are_made(gates):
    with pytest.raises(TypeError, match="gates must be None or Gates"):
        attention_program(X, y, alpha=0.1, gates=gates)


# Gates


def test_masks_are_those_of_the_formula_and_stored_for_new_data():
    model = ConvexAttentionRegressor(alpha=0.01, activation="gated_relu", n_gates=9, random_state=3).fit(X, y)
    new = rng.normal(size=(15, 3, 2))
    masks = np.einsum("hk,ikd,hd->ih", model.gates_.u1, new, model.gates_.u2) >= 0
    np.testing.assert_array_equal(model.gates_.masks(torch.as_tensor(new)).numpy(), masks)
    wanted = np.einsum("ih,ikd,hkd->i", masks, new, model.coef_) + model.intercept_
    np.testing.assert_allclose(model.predict(new), wanted, atol=1e-10)


def test_closed_gates_are_dropped_and_duplicates_merged():
    # All entries positive: +1 everywhere opens for all samples, -1 for none, and every positive gate is the same.
    positive = np.abs(X)
    u1 = np.array([[1.0, 1, 1], [-1, -1, -1], [2, 1, 3], [1, 0, 0]])
    options = {"activation": "gated_relu", "gates": (u1, np.ones((4, 2))), "tol": 1e-12}
    model = ConvexAttentionRegressor(**options).fit(positive, y)
    np.testing.assert_array_equal(model.gates_.u1, u1[:1])
    linear = ConvexAttentionRegressor(tol=1e-12).fit(positive, y)
    np.testing.assert_allclose(model.coef_[0], linear.coef_, atol=1e-5)
    with pytest.raises(ValueError, match="no gate lets any training sample through"):
        ConvexAttentionRegressor(activation="gated_relu", gates=(u1[1:2], np.ones((1, 2)))).fit(positive, y)


def test_gates_that_differ_on_weightless_samples_alone_are_the_same():
    gates = Gates([[1.0, 0, 0], [0, 1.0, 0]], [[1.0, 0], [1.0, 0]])
    masks = gates.masks(torch.as_tensor(X))
    same = (masks[:, 0] == masks[:, 1]) & masks[:, 0]
    assert list(gates.distinct(masks)) == [0, 1]
    assert list(gates.distinct(masks, same.double())) == [0]


def test_random_gates():
    state = np.random.RandomState
    first, second = (GaussianGates(50).make(TrainingData(torch.zeros(1, 6, 4)), state(0)) for _ in range(2))
    np.testing.assert_array_equal(first.u1, second.u1)
    sparse = SparseGates(50, n_nonzero=2).make(TrainingData(torch.zeros(1, 6, 1)), state(0))
    assert ((sparse.u1 != 0).sum(1) == 2).all()
    assert ((sparse.u2 != 0).sum(1) == 1).all()
    with pytest.raises(ValueError, match="n_nonzero"):
        SparseGates(5, n_nonzero=0)


def test_network_arguments():
    with pytest.raises(ValueError, match="simplex"):
        ConvexAttention(2, 2, 1, simplex="cube")
    with pytest.raises(ValueError, match="n_heads"):
        ConvexAttention(2, 2, 1, n_heads=0)
    with pytest.raises(ValueError, match="gate_index"):
        ConvexAttention(2, 2, 1, n_heads=2, gate_index=[0, 1])
    with pytest.raises(TypeError, match="gates must be None or Gates"):
        ConvexAttention(2, 2, gates="gaussian")


@pytest.mark.parametrize("kind", [ConvexAttention, ReluAttention])
def test_networks_refuse_tokens_of_another_layout(kind):
    # The same numbers in another order would give predictions all the same.
    network = kind(5, 3)
    with pytest.raises(ValueError, match=r"tokens must have shape \(n_samples, 5, 3\), got \(4, 3, 5\)"):
        network(torch.zeros(4, 3, 5))
    with pytest.raises(ValueError, match=r"tokens must have shape \(n_samples, 5, 3\)"):
        train(network, torch.zeros(4, 3, 5), torch.zeros(4, 1), alpha=0.1, n_steps=1)


# Fits that fail


@pytest.mark.parametrize("folds", [False, True])
def test_a_fit_that_fails_leaves_the_model_of_the_one_before(folds):
    options = {"alphas": 2, "cv": 2} if folds else {"alpha": 0.05}
    model = (ConvexAttentionClassifierCV if folds else ConvexAttentionClassifier)(**options).fit(X, labels)
    before = model.predict(X)
    with pytest.raises(ValueError, match="solver must be one of"):
        model.set_params(solver="nonsense").fit(X[:, :2], np.where(labels, "no", "yes"))
    np.testing.assert_array_equal(model.predict(X), before)

    def interrupted(progress):
        raise KeyboardInterrupt

    if folds:  # nothing is stored before the folds have ended
        with pytest.raises(KeyboardInterrupt):
            model.set_params(solver="auto", callback=interrupted).fit(X[:, :2], np.where(labels, "no", "yes"))
        np.testing.assert_array_equal(model.predict(X), before)


def test_a_first_fit_that_fails_leaves_an_estimator_that_is_not_fitted():
    model = ConvexAttentionRegressor(alpha=0.1, solver="nonsense")
    with pytest.raises(ValueError, match="solver must be one of"):
        model.fit(X, y)
    with pytest.raises(NotFittedError):
        model.predict(X)


# Networks take what estimators take


def test_heads_take_lists_columns_of_labels_and_odd_arrays():
    model = ConvexAttentionClassifier(alpha=0.05).fit(X, labels[:, None].ravel())
    heads = model.heads_
    assert heads.objective(X, labels[:, None]) == heads.objective(X, labels)
    for odd in (X.astype(">f8"), X.astype(object), X.tolist()):
        np.testing.assert_array_equal(heads.predict(odd), heads.predict(X))
    lists = (part.tolist() for part in (heads.w1, heads.w2, heads.w3, heads.intercept))
    again = Heads(*lists, heads.loss, heads.penalty, heads.alpha, targets=heads.targets)
    np.testing.assert_array_equal(again.predict(X), heads.predict(X))


# Features


def test_padding_keeps_every_row_in_place():
    lengths = [3, 1, 4]
    parts = [rng.normal(size=(length, 2)).astype(np.float32) for length in lengths]
    padded = pad_sequences(parts, n_tokens=5)
    assert padded.dtype == np.float32
    for row, part in zip(padded, parts, strict=True):
        np.testing.assert_array_equal(row[: len(part)], part)
        assert (row[len(part) :] == 0).all()
    assert pad_sequences(parts).shape == (3, 4, 2)


@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        ([], {}, "at least one sequence"),
        ([[1.0, 2.0]], {}, r"sequences\[0\] must have shape"),
        ([[[1.0]], [[1.0, 2.0]]], {}, "same number of features"),
        ([[[1.0 + 1.0j]]], {}, "real numbers, got complex"),
        ([[[1.0], [2.0]]], {"n_tokens": 1}, "n_tokens=1 is less than the longest sequence"),
    ],
)
def test_padding_errors(sequences, options, message):
    with pytest.raises(ValueError, match=message):
        pad_sequences(sequences, **options)


def test_patches_hold_every_pixel_once():
    images = rng.normal(size=(2, 6, 4))
    patches = image_patches(images, 2)
    assert patches.shape == (2, 6, 4)
    np.testing.assert_array_equal(patches[1, 3].reshape(2, 2), images[1, 2:4, 2:4])
    np.testing.assert_array_equal(np.sort(patches, axis=None), np.sort(images, axis=None))
    for bad, size in ((images, 3), (images[0], 2), (images, 0)):
        with pytest.raises(ValueError, match=r"patch_size|images"):
            image_patches(bad, size)
    assert load_digit_tokens(4)[0].shape == (1797, 4, 16)


def test_lists_make_the_same_program_as_arrays():
    X = np.random.default_rng(0).normal(size=(6, 2, 3))
    y = X[:, 0, 0]
    expected = attention_program(X, y, alpha=0.1)
    found = attention_program(X.tolist(), y.tolist(), alpha=0.1)
    assert found.map.dtype == torch.float64
    assert found.alpha_max == expected.alpha_max


@pytest.mark.parametrize(
    ("X", "weight", "message"),
    [
        (np.zeros((6, 0, 3)), None, "at least one sample, token and feature"),
        (np.zeros((6, 2, 0)), None, "at least one sample, token and feature"),
        ([torch.zeros(2, 3, dtype=torch.bfloat16)] * 6, None, r"of a list of tensors give torch.stack\(X\).*BFloat16"),
        (np.ones((6, 2, 3)), "balanced", "sample_weight must hold a number per sample"),
    ],
)
def test_errors_name_the_argument(X, weight, message):
    with pytest.raises(ValueError, match=message):
        ConvexAttentionRegressor(alpha=0.1).fit(X, np.arange(6.0), sample_weight=weight)


@pytest.mark.parametrize("name", ["y", "sample_weight"])
def test_tensors_that_numpy_does_not_know_are_named(name):
    arguments = {"y": torch.arange(6.0), "sample_weight": torch.ones(6)}
    arguments[name] = arguments[name].bfloat16()
    with pytest.raises(ValueError, match=f"{name} must not be bfloat16"):
        ConvexAttentionRegressor(alpha=0.1).fit(np.ones((6, 2, 3)), **arguments)


TOKENS = torch.as_tensor(X)
UNNAMED = {
    "module that has no objective": (
        lambda: train(torch.nn.Linear(2, 1), TOKENS, TOKENS[:, :, 0], alpha=0.1),
        TypeError,
        "network must be an AttentionNetwork of convexformer.nn, got Linear",
    ),
    "alpha of training": (
        lambda: train(ConvexAttention(3, 2).double(), TOKENS, TOKENS[:, 0, :1], alpha="a"),
        ValueError,
        "alpha must be a number of at least 0, got 'a'",
    ),
    "text as numbers": (
        lambda: ConvexAttentionRegressor().fit(X, ["yes", "no"] * (len(X) // 2)),
        ValueError,
        "y must hold numbers; labels are for the classifiers: .*'yes'",
    ),
    "text as sequences": (
        lambda: ConvexSequenceRegressor().fit(X, [["a", "b"]] * len(X)),
        ValueError,
        "y must hold numbers",
    ),
    "n_jobs as text": (
        lambda: ConvexAttentionRegressorCV(alphas=2, cv=2, n_jobs="2").fit(X, y),
        ValueError,
        "n_jobs must be None or an integer other than 0, got '2'",
    ),
    "no jobs": (
        lambda: ConvexAttentionRegressorCV(alphas=2, cv=2, n_jobs=0).fit(X, y),
        ValueError,
        "n_jobs must be None or an integer other than 0, got 0",
    ),
    "flat attention map": (
        lambda: plot_attention_map([1, 2]),
        ValueError,
        r"weights must have shape \(n_targets, n_tokens\), got \(2,\)",
    ),
    "side of a patch": (lambda: load_digit_tokens(2.0), ValueError, r"patch_size must be an integer .* got 2\.0"),
    "tokens of padded sequences": (
        lambda: pad_sequences([[[1.0]]], n_tokens=3.0),
        ValueError,
        r"n_tokens must be an integer or None, got 3\.0",
    ),
}


@pytest.mark.parametrize("case", UNNAMED)
def test_what_was_wrong_is_named(case):
    call, kind, message = UNNAMED[case]
    with pytest.raises(kind, match=message):
        call()


def test_masks_of_arrays_are_those_of_tensors():
    gates = Gates(np.eye(1, X.shape[1]), np.eye(1, X.shape[2]))
    np.testing.assert_array_equal(gates.masks(X), gates.masks(TOKENS))
    with pytest.raises(ValueError, match="got samples of shape"):
        gates.masks(X[:, :1])


def test_weights_of_training_may_be_a_list():
    weights = np.linspace(0.5, 2.0, len(X))
    objectives = [
        train(ConvexAttention(3, 2).double(), TOKENS, TOKENS[:, 0, :1], alpha=0.1, n_steps=3, sample_weight=given)
        for given in (torch.as_tensor(weights), weights.tolist())
    ]
    assert objectives[0].objective == objectives[1].objective


def test_what_training_returns_and_trains_is_short_to_read():
    network = ConvexAttention(3, 2, n_heads=5, gates=Gates(np.eye(2, 3), np.eye(2))).double()
    history = train(network, TOKENS, TOKENS[:, 0, :1], alpha=0.1, lr=[0.1, 0.01], n_steps=200)
    assert len(repr(history)) < 200
    assert "200 steps" in repr(history)
    assert re.search("n_tokens=3, n_features=2, n_outputs=1, n_heads=5.*gates: 2", repr(network))
    assert "n_targets=4" in repr(SequenceAttention(3, 2, n_targets=4))
    assert "position=0" in repr(SoftmaxAttention(2, 1, position=0))


class TestWholeNumbers:
    """Tokens that an estimator takes, everything takes that speaks of its fit."""

    whole = (3 * X).astype(int)

    @pytest.mark.parametrize("dtype", [np.int64, bool, np.float16])
    def test_the_gap_of_a_fit(self, dtype):
        tokens = self.whole.astype(dtype)
        model = ConvexAttentionRegressor(alpha=0.05, tol=1e-8).fit(tokens, y)
        assert model.heads_.objective(tokens, y) == pytest.approx(model.certificate_.primal, rel=1e-9)
        assert optimality_gap(model.heads_, tokens, y, tol=1e-8).relative_gap <= 1e-7

    def test_programs_sequences_and_generated_gates(self):
        exact = self.whole.astype(float)
        programs = [attention_program(tokens, y, alpha=0.05) for tokens in (self.whole, exact)]
        assert torch.equal(*(program.map.data for program in programs))
        found = [generate_gates(tokens, y, alpha=0.2, n_restarts=2, random_state=0) for tokens in (self.whole, exact)]
        np.testing.assert_array_equal(*(result.gates.u1 for result in found))
        model = ConvexSequenceRegressor(alpha=0.05).fit(self.whole, exact)
        assert model.heads_.predict(self.whole).shape == exact.shape


class TestFolds:
    @pytest.mark.parametrize(
        ("cv", "message"),
        [
            ([(np.arange(9), [])], r"cv: both parts of fold 0 must hold positions of samples, or a mask of all 20"),
            ([(np.arange(9), [10.0])], r"cv: both parts of fold 0 must hold positions"),
            ([(np.arange(9), np.zeros(20, dtype=bool))], r"cv: both parts of fold 0 must hold positions"),
            ([(np.arange(9), [10]), ([0, 20], [3])], r"cv: fold 1 must hold positions of the 20 samples, got 0 to 20"),
            ([(np.arange(9), [10, -21])], r"cv: fold 0 must hold positions of the 20 samples, got -21 to 10"),
            ([(np.arange(9), [[10], [11]])], r"cv: both parts of fold 0 must hold positions .* of shape \(2, 1\)"),
            ([([0, 1], [2], [3])], r"cv=.* gives no folds of 20 samples"),
            pytest.param(
                SimpleNamespace(split=lambda *given: [([0, 1], [2], [3])]),
                "cv: fold 0 must be a pair of training and",
                id="three parts",
            ),
            (1, "cv=1 gives no folds of 20 samples: .*n_splits"),
            (100, "cv=100 gives no folds of 20 samples"),
            ("five", "cv='five' gives no folds"),
        ],
        ids=str,
    )
    def test_that_cannot_be(self, cv, message):
        with pytest.raises(ValueError, match=message):
            ConvexAttentionRegressorCV(alphas=2, cv=cv).fit(X, y)

    @pytest.mark.parametrize("weighted", [False, True])
    def test_whose_training_counts_are_all_zero_are_named(self, weighted):
        counts, rows = np.r_[np.zeros(10), np.arange(10.0)], np.arange(15 if weighted else 10)
        weight = np.r_[np.ones(10), np.zeros(5), np.ones(5)] if weighted else None
        model = ConvexAttentionRegressorCV(loss="poisson", alphas=2, cv=[(rows, np.arange(15, 20))])
        with pytest.raises(
            ValueError, match="training part of fold 0 is no data to fit by itself, as targets of the P"
        ):
            model.fit(X, counts, weight)

    def test_masks_unsigned_and_negative_integers_are_positions(self):
        first = np.arange(20) < 12
        scores = [
            ConvexAttentionRegressorCV(alphas=3, cv=[split]).fit(X, y).score_path_
            for split in (
                (np.arange(12), np.arange(12, 20)),
                (first, ~first),
                (np.arange(12, dtype=np.uint8), np.arange(12, 20, dtype=np.uint8)),
                (np.arange(-20, -8), np.arange(-8, 0)),
            )
        ]
        for found in scores[1:]:
            np.testing.assert_array_equal(found, scores[0])

    def test_counts_that_are_all_zero_in_one(self):
        counts = np.zeros(20)
        counts[:4] = 3.0
        with pytest.raises(ValueError, match=r"cv: the training part of fold 0 is no data .*Poisson.*shuffle"):
            ConvexAttentionRegressorCV(alphas=2, loss="poisson", cv=5).fit(X, counts)
        counts[8] = 3.0  # of a sample that does not count
        with pytest.raises(ValueError, match=r"cv: the training part of fold 0 is no data .*Poisson.*shuffle"):
            ConvexAttentionRegressorCV(alphas=2, loss="poisson", cv=5).fit(X, counts, np.arange(20) != 8)

    def test_a_score_that_is_not_there(self):
        with pytest.raises(ValueError, match="scoring='foo' is none of scikit-learn's"):
            ConvexAttentionRegressorCV(alphas=2, cv=3, scoring="foo").fit(X, y)


@pytest.mark.parametrize("bad", [None, 3, []], ids=str)
def test_samples_without_axes(bad):
    with pytest.raises(ValueError, match=r"X must have shape \(n_samples, 3, 2\) as in fit"):
        ConvexAttentionRegressor().fit(X, y).predict(bad)


def test_a_path_of_nothing():
    with pytest.raises(FileNotFoundError, match="text"):
        ConvexAttentionRegressor().fit(X, y).predict("text")


@pytest.mark.parametrize("seed", [-1, "a", np.random.default_rng(0)], ids=["negative", "text", "generator"])
def test_seeds_that_are_none(seed):
    for fit in (
        lambda: ConvexAttentionRegressor(activation="gated_relu", random_state=seed).fit(X, y),
        lambda: generate_gates(X, y, alpha=0.1, random_state=seed),
    ):
        with pytest.raises(ValueError, match="random_state must be None, an integer from 0 to 4294967295"):
            fit()


@pytest.mark.parametrize("kind", [ConvexAttentionRegressor, ConvexAttentionRegressorCV])
def test_a_random_state_of_another_kind_is_refused_where_nothing_is_drawn(kind):
    with pytest.raises(ValueError, match="random_state must be None, an integer from 0 to 4294967295"):
        kind(random_state="x").fit(X, y)


def test_text_in_place_of_numbers():
    text = np.full(20, "a")
    for arguments, name in (((np.full((20, 3), "a"), y), "X"), ((X, text), "y"), ((X, y, text), "sample_weight")):
        with pytest.raises(ValueError, match=f"{name} must hold numbers.*could not convert"):
            ConvexAttentionRegressor().fit(*arguments)


@pytest.mark.parametrize("kind", [ConvexAttentionRegressor, ConvexProbeRegressor])
def test_dates_of_python_in_place_of_numbers(kind):
    days = dates().tolist()
    for arguments, name in ((([[day] for day in days], y), "X"), ((X, days), "y"), ((X, y, days), "sample_weight")):
        with pytest.raises(TypeError, match=f"{name} must hold numbers.*'datetime.date'"):
            kind().fit(*arguments)


def test_dates_of_pyarrow_in_place_of_numbers():
    days, numbers = pa.array([*dates().tolist()[1:], None]), pa.array(y)
    model = ConvexAttentionRegressor()
    for arguments in ((pa.table({"a": numbers, "b": days}), y), (X, days), (X, y, days)):
        with pytest.raises(ValueError, match=r"must hold numbers, got date32\[day\]; convert them first"):
            model.fit(*arguments)
    assert list(model.fit(pa.table({"a": numbers}), numbers).feature_names_in_) == ["a"]


@pytest.mark.parametrize(
    "kind", ["Date", "Datetime(time_unit='us', time_zone=None)", "Duration(time_unit='us')", "Time"]
)
def test_dates_of_polars_in_place_of_numbers(kind):
    with pytest.raises(ValueError, match=rf"X must hold numbers, got {re.escape(kind)}; convert them first"):
        refuse_dates(SimpleNamespace(dtypes=["Float64", kind]), "X")  # a data frame, as far as is asked


class TestHeadsOf:
    heads = ConvexAttentionRegressor().fit(X, y).heads_

    def test_no_samples(self):
        with pytest.raises(ValueError, match=r"X must hold real numbers, .* with at least one of each"):
            self.heads.predict(X[:0])

    def test_samples_or_targets_that_are_not_finite(self):
        with pytest.raises(ValueError, match="X must be finite"):
            self.heads.predict(spoiled(X, np.nan))
        with pytest.raises(ValueError, match="y must be finite"):
            self.heads.objective(X, spoiled(y, np.inf))


class TestTraining:
    @pytest.mark.parametrize("name", ["tokens", "y"])
    def test_on_data_that_are_not_finite(self, name):
        data = {"tokens": torch.ones(5, 3, 2), "y": torch.ones(5, 1)}
        data[name].view(-1)[3] = np.nan
        with pytest.raises(ValueError, match=f"{name} must be finite"):
            train(ConvexAttention(3, 2), **data, alpha=0.1, n_steps=2)

    def test_with_a_callback_or_a_flag_of_another_kind(self):
        data = {"tokens": torch.ones(5, 3, 2), "y": torch.ones(5, 1), "alpha": 0.1, "n_steps": 2}
        with pytest.raises(
            TypeError, match="callback must be None or callable with the steps done and the objective, got 3"
        ):
            train(ConvexAttention(3, 2), **data, callback=3)
        with pytest.raises(TypeError, match="callback must return True, False or None, got Tensor"):
            train(ConvexAttention(3, 2), **data, callback=lambda step, objective: torch.zeros(2))
        with pytest.raises(ValueError, match="verbose must be True or False, got 'x'"):
            train(ConvexAttention(3, 2), **data, verbose="x")


class TestGapOfSoftmaxAttention:
    def test_takes_targets_as_for_other_networks(self):
        network = SoftmaxAttention(2, n_heads=2, position=1)
        one, other = (optimality_gap(network, X, targets, alpha=0.1) for targets in (y, y[:, None]))
        assert one.objective == other.objective

    def test_names_bad_arguments(self):
        network = SoftmaxAttention(2, n_heads=2, position=1)
        with pytest.raises(ValueError, match=r"sample_weight must have shape \(20,\), got \(19,\)"):
            optimality_gap(network, X, y, alpha=0.1, sample_weight=np.ones(19))
        with pytest.raises(ValueError, match=r"must have shape \(n_samples, n_tokens, 2\), got \(20, 3, 1\)"):
            optimality_gap(network, X[:, :, :1], y, alpha=0.1)


class TestFiguresOfZeros:
    def test_scales_begin_at_zero(self):
        for axes in (plot_token_norms(np.zeros(4), shape=(2, 2)), plot_attention_map(np.zeros((1, 4)))):
            assert axes.images[0].get_clim() == (0.0, 1.0)
            plt.close(axes.figure)


@pytest.mark.parametrize("loss", ["huber"])
def test_an_exact_solver_that_calls_a_program_infeasible_is_contradicted(loss):
    with pytest.raises(RuntimeError, match=r"without a solution: .*bring features and targets to about one.*'auto'"):
        ConvexAttentionRegressor(loss=loss, alpha=0.01, solver="exact").fit(X, 1e7 * y)


def test_labels_of_a_dtype_that_scikit_learn_does_not_have_are_not_called_missing():
    pytest.importorskip("numpy", "2.0")  # which brought the dtype
    labels = np.where(y > 0, "up", "down").astype(np.dtypes.StringDType())
    with pytest.raises(ValueError, match=r"y must hold text of a dtype .*give y\.astype\(object\)"):
        ConvexAttentionClassifier().fit(X, labels)
    assert set(ConvexAttentionClassifier().fit(X, labels.astype(object)).classes_) == {"down", "up"}


def test_labels_that_are_missing_dates_are_named():
    with pytest.raises(ValueError, match=r"y must have a label for each sample, got missing dates \(NaT\)"):
        ConvexAttentionClassifier().fit(X, dates())
    whole = np.where(y > 0, np.datetime64("2020-01-01"), np.datetime64("2021-01-01"))
    assert ConvexAttentionClassifier().fit(X, whole).classes_.dtype == whole.dtype


@pytest.mark.parametrize("dtype", [object, "string"])
def test_labels_that_are_missing_in_a_data_frame_are_named(dtype):
    target = pd.Series(np.where(labels, "yes", "no"), dtype=dtype)
    target[3] = pd.NA
    with pytest.raises(ValueError, match=r"y must have a label for each sample, got missing values \(NA\)"):
        ConvexAttentionClassifier().fit(X, target)


@pytest.mark.parametrize(
    ("missing", "message"), [(None, "y must have a label for each sample, got None"), (np.nan, "Input y contains NaN")]
)
@pytest.mark.parametrize("label", ["yes", 1])
def test_labels_that_are_missing_among_objects_are_named(label, missing, message):
    target = np.array([label, missing] * (len(X) // 2), dtype=object)
    with pytest.raises(ValueError, match=message):
        ConvexAttentionClassifier().fit(X, target)


def test_scores_take_and_refuse_the_targets_that_a_fit_does():
    model = ConvexAttentionRegressor().fit(X, y)
    assert model.score(X, torch.tensor(y, requires_grad=True)) == model.score(X, y)
    with pytest.raises(ValueError, match=r"y must not be bfloat16.*give y.float\(\)"):
        model.score(X, torch.tensor(y).bfloat16())
    with pytest.raises(ValueError, match="y must have no masked values"):
        model.score(X, np.ma.masked_less(y, 0))


def test_class_weights_of_another_kind_than_the_labels_are_named():
    whole = np.where(y > 0, np.datetime64("2020-01-01"), np.datetime64("2021-01-01"))
    with pytest.raises(ValueError, match=r"class_weight=.* cannot be used"):
        ConvexAttentionClassifier(class_weight={"2020": 2.0}).fit(X, whole)


@pytest.mark.parametrize("y", [None, 1.0])
def test_heads_name_targets_that_are_none(y):
    heads = ConvexAttentionRegressor().fit(X, X[:, 0, 0]).heads_
    with pytest.raises(ValueError, match="y must have one row per sample"):
        heads.objective(X, y)
    labels = np.where(X[:, 0, 0] > 0, "a", "b")
    with pytest.raises(ValueError, match="y must have a label for each sample"):
        ConvexAttentionClassifier().fit(X, labels).heads_.objective(X, y)


def test_a_folder_of_another_call_is_named_with_what_can_be_done(tmp_path):
    model = ConvexAttentionRegressorCV(alphas=2, cv=KFold(3), resume=tmp_path).fit(X, y)
    with pytest.raises(ValueError, match=r"Repeat the call that wrote it, or give a path where there is nothing yet$"):
        model.fit(X, 2 * y)
    drawn = [KFold(3, shuffle=True, random_state=stream) for stream in (None, np.random.RandomState(0))]
    for cv in (*drawn, ShuffleSplit(3)):
        model.set_params(cv=cv)
        with pytest.raises(
            ValueError, match="needs an int as random_state: without one a later call draws other folds"
        ):
            model.fit(X, y)
    # Folds in the order of the rows draw nothing, and a seed draws the same ones.
    model.set_params(cv=KFold(3)).fit(X, y)
    model.set_params(cv=KFold(3, shuffle=True, random_state=np.int64(0)), resume=tmp_path / "seed").fit(X, y)


@pytest.mark.filterwarnings("ignore:The least populated class")
@pytest.mark.parametrize("cv", [None, StratifiedKFold(4)])
def test_folds_are_not_blamed_for_a_class_of_one_sample(cv):
    single = np.array(["a"] * 10 + ["b"] * 9 + ["c"])
    with pytest.warns(UserWarning, match="leave it out, or get more samples of it"):
        ConvexAttentionClassifierCV(alphas=2, cv=cv).fit(X, single)
    with pytest.raises(ValueError, match="leave it out, or get more samples of it"):
        ConvexAttentionClassifierCV(alphas=2, cv=cv).fit(X, np.array(["a"] * 19 + ["b"]))


@pytest.mark.parametrize("scoring", ["accuracy", lambda *_: None])
def test_scores_that_cannot_be_are_named(scoring):
    with pytest.raises(ValueError, match=r"scoring=.* gives no score of these predictions"):
        ConvexAttentionRegressorCV(alphas=2, cv=3, scoring=scoring).fit(X, y)


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (ConvexAttentionRegressor, {"loss": Huber}),
        (ConvexAttentionRegressor, {"penalty": GroupL2}),
        (ConvexAttentionRegressor, {"solver": Fista}),
        (ConvexAttentionRegressor, {"activation": "gated_relu", "gates": GaussianGates}),
        (ConvexSequenceRegressor, {"form": Stochastic}),
        (ConvexProbeRegressor, {"dictionary": MeanPooling}),
        (ConvexProbeRegressor, {"generate": Generation}),
    ],
)
def test_a_class_in_place_of_an_object_is_told_from_one(make, parameters):
    name, kind = [*parameters.items()][-1]
    wanted = rf"{name} must be .*, got the class {kind.__name__}; is {kind.__name__}\(\) meant\?"
    with pytest.raises(ValueError, match=wanted):
        make(**parameters).fit(X, X if make is ConvexSequenceRegressor else y)


def test_no_object_of_a_class_of_python_is_meant():
    with pytest.raises(ValueError, match=r"loss must be .* or a Loss instance, got the class int$"):
        ConvexAttentionRegressor(loss=int).fit(X, y)


def test_scores_of_one_class_are_told_which_labels_there_are():
    labels = np.where(y > np.median(y), "yes", "no")
    with pytest.raises(
        ValueError, match=r"scoring='f1' gives no score .*; give a scorer .* make_scorer\(.*pos_label=\.\.\."
    ):
        ConvexAttentionClassifierCV(alphas=2, cv=3, scoring="f1").fit(X, labels)
    scoring = make_scorer(f1_score, pos_label="yes")
    text, numbers = (
        ConvexAttentionClassifierCV(alphas=2, cv=3, scoring=score).fit(X, target)
        for score, target in ((scoring, labels), ("f1", labels == "yes"))
    )
    np.testing.assert_array_equal(text.score_path_, numbers.score_path_)


def test_scores_of_probabilities_that_the_loss_does_not_have_are_named():
    model = ConvexAttentionClassifierCV(alphas=2, cv=3, loss="squared_hinge", scoring="neg_log_loss")
    with pytest.raises(ValueError, match=r"scoring='neg_log_loss' gives no score of .*predict_proba"):
        model.fit(X, y > 0)


@pytest.mark.parametrize("part", ["tokens", "y"])
@pytest.mark.parametrize("kind", [np.asarray, np.ndarray.tolist])
def test_training_wants_tensors(part, kind):
    given = {"tokens": torch.as_tensor(X), "y": torch.as_tensor(y)[:, None]}
    given[part] = kind(given[part].numpy())
    with pytest.raises(TypeError, match=f"{part} must be a torch tensor"):
        train(ConvexAttention(3, 2, n_heads=2).double(), **given, alpha=0.1)


def test_networks_name_tokens_in_another_precision():
    with pytest.raises(ValueError, match=r"tokens must be torch.float64 on cpu like the network, got torch.float32"):
        ConvexAttentionRegressor().fit(X, y).heads_.to_torch()(torch.as_tensor(X).float())


def test_networks_that_are_not_finite_have_no_gap():
    network = ConvexAttention(3, 2, n_heads=2)
    torch.nn.init.constant_(network.w2, math.nan)
    with pytest.raises(ValueError, match="w2 of the network must be finite"):
        optimality_gap(network, X, y, 0.1)
    with pytest.raises(ValueError, match="verbose must be True or False"):
        optimality_gap(ConvexAttention(3, 2, n_heads=2), X, y, 0.1, verbose="x")
    with pytest.raises(ValueError, match="coef must be finite"):
        Heads.from_coef(np.full((2, 2, 1), math.nan), alpha=0.1)


def test_a_stalled_solve_says_what_helps():
    helps = "raise tol, scale and centre the features, solve in float64 (dtype='float64'), take solver='auto'."
    with pytest.warns(ConvergenceWarning, match=re.escape(helps)):
        ConvexAttentionRegressor(alpha=1e-3, solver="fista", tol=1e-14, max_iter=300, dtype="float32").fit(X, y)


def test_data_frames_of_dates_or_vectors_are_named():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match=r"X must hold numbers, got datetime64\[.*\]; convert"):
        ConvexAttentionRegressor().fit(pandas.DataFrame({"a": y, "b": pandas.to_datetime(dates())}), y)
    with pytest.raises(ValueError, match="X must hold one number in each cell, got sequences"):
        ConvexAttentionRegressor().fit(pandas.DataFrame({"a": list(X[:, 0]), "b": list(X[:, 1])}), y)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dates()[:, None], r"X must hold numbers, got datetime64\[D\]; convert them first"),
        ([[day] for day in dates()], r"X must hold numbers, got datetime64\[D\]"),
        (pd.DataFrame({"a": y, "b": pd.to_datetime(dates())}), r"X must hold numbers, got datetime64\[.*\]; convert"),
        (pd.DataFrame({"a": list(X[:, 0])}), "X must hold one number in each cell, got sequences"),
        (X[:, 0] * 1j, "Complex data not supported: X must hold real numbers$"),
        ((X[:, 0] * 1j).tolist(), "Complex data not supported: X must hold real numbers$"),
        (labels[:, None].astype(str).astype("O") + "a", "X must hold numbers: could not convert string to float: '.a'"),
        ([[1.0, 2.0], *[[3.0]] * 19], "X must hold one number in each cell, got sequences"),
    ],
)
def test_data_of_probes_that_hold_no_numbers_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        ConvexProbeRegressor().fit(bad, y)


@pytest.mark.parametrize(
    "labels", [[[0], [1, 2]] * 10, pd.Series([[0], [1, 2]] * 10), pd.Series([(0, 1)] * 20), [{0}, {1, 2}] * 10]
)
def test_sequences_of_labels_are_answered_by_the_matrix_that_is_taken(labels):
    message = "y must hold one (number|label) in each cell, got sequences; several labels per sample are a matrix of 0"
    with pytest.raises(ValueError, match=message):
        ConvexProbeClassifier().fit(X, labels)


def test_unknown_losses_are_answered_by_those_that_suit():
    with pytest.raises(ValueError, match=r"loss must be one of \['huber', 'poisson', 'softmax', 'squared'\] or a Loss"):
        ConvexAttentionRegressor(loss="mse").fit(X, y)
    known = r"\['auto', 'logistic', 'softmax', 'squared_hinge'\]"
    with pytest.raises(ValueError, match=f"loss must be one of {known} or a Loss"):
        ConvexAttentionClassifier(loss="auot").fit(X, np.where(y > 0, "a", "b"))


def test_labels_of_a_program_are_answered_by_how_to_encode_them():
    with pytest.raises(ValueError, match=r"y = np.eye\(n_classes\)\[labels\] makes them"):
        attention_program(X, (y > 0).astype(float), alpha=0.1, loss="softmax")


def test_groups_of_another_length_are_named():
    model = ConvexAttentionRegressorCV(alphas=2, cv=GroupKFold(3))
    with pytest.raises(ValueError, match=rf"groups must have one entry per sample, {len(X)}, got shape \(5,\)"):
        model.fit(X, y, groups=np.arange(5))
    with pytest.raises(ValueError, match=rf"groups must have one entry per sample, {len(X)}, got shape \({len(X)}, 1"):
        model.fit(X, y, groups=np.arange(len(X))[:, None])
    with pytest.raises(ValueError, match="groups must have no masked values"):
        model.fit(X, y, groups=np.ma.masked_equal(np.arange(len(X)) % 4, 3))


def test_gates_that_hold_no_numbers_are_named():
    with pytest.raises(ValueError, match="gates: u1 must hold numbers"):
        ConvexAttentionRegressor(activation="gated_relu", gates=("a", "b")).fit(X, y)


def test_networks_name_gates_of_another_width():
    gates = Gates(np.ones((1, 4)), np.ones((1, 3)))
    with pytest.raises(ValueError, match=r"gates must have directions of shapes \(n_gates, 5\) and \(n_gates, 3\)"):
        ConvexAttention(5, 3, 1, n_heads=4, gates=gates)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot_token_norms(ConvexAttentionRegressor()), r"token_norms must be numbers, as model\.token_norms_"),
        (
            lambda: plot_token_norms([[1.0, 2.0], [3.0, 4.0]]),
            r"token_norms must have shape \(n_tokens,\), got \(2, 2\)",
        ),
        (lambda: plot_token_norms(np.ones(4), shape=(3, 3)), r"shape must be that of 4 tokens .*, got \(3, 3\)"),
        (
            lambda: plot_token_norms(np.ones(4), shape=(2.0, 2.0)),
            r"shape must be that of 4 tokens .*, got \(2\.0, 2\.0",
        ),
        (lambda: plot_token_norms([1.0], shape=(True, True)), r"shape must be that of 1 tokens .*, got \(True, True"),
        (lambda: plot_token_norms(np.ones(4), shape=4), "shape must be that of 4 tokens .*, got 4"),
        (lambda: plot_attention_map(-np.eye(3)), "weights must not be negative"),
        (lambda: plot_convergence([1.0], bound=0.0), "curves must map labels to pairs of seconds and objectives"),
        (lambda: plot_convergence({1: ([0.1], [2.0])}, bound=0.0), "curves must have labels that are str, got 1"),
        (lambda: plot_convergence({"a": ([], [])}, bound=0.0), r"curves\['a'\] must be seconds .* got \(\[\], \[\]\)"),
        (
            lambda: plot_convergence({"a": ([0.1, 0.2], [2.0])}, bound=0.0),
            r"curves\['a'\] must be .* as many objectives",
        ),
        (lambda: plot_convergence({"a": 3.0}, bound=0.0), r"curves\['a'\] must be seconds .* got 3\.0"),
        (lambda: plot_token_norms([]), "token_norms must hold at least one number"),
        (lambda: plot_token_norms([1.0, np.nan]), "token_norms must not be NaN"),
        (lambda: plot_token_norms([1.0, -1.0]), r"token_norms must not be negative, got -1\.0"),
        (lambda: plot_token_norms(np.ma.masked_equal([1.0, 2.0], 2)), "token_norms must have no masked values"),
        (lambda: plot_attention_map(np.zeros((0, 3))), r"weights must hold at least one number, got shape \(0, 3\)"),
        (lambda: plot_attention_map([[np.inf]]), "weights must not be NaN or infinite"),
        (lambda: plot_attention_map([["a"]]), r"weights must be numbers, as model\.attention_map_"),
        (lambda: plot_attention_map([[1.0]], first=0.5), r"first must be an integer, got 0\.5"),
        (lambda: plot_convergence({}, bound=0.0), "curves must hold at least one curve, got none"),
        (lambda: plot_convergence({"a": ([0.1], [np.nan])}, bound=0.0), r"curves\['a'\] must be .* one finite"),
        (lambda: plot_convergence({"": ([0.1], [2.0])}, bound=0.0), "curves must have labels that a legend shows"),
        (lambda: plot_convergence({"_a": ([0.1], [2.0])}, bound=0.0), "curves must have labels that a legend shows"),
        (lambda: plot_convergence({"a": ([0.1], [2.0])}, bound=np.nan), "bound must be a finite number, .* got nan"),
        (
            lambda: plot_convergence({"a": ([0.1], np.ma.masked_equal([2.0], 2))}, bound=0.0),
            r"curves\['a'\] must have no masked values",
        ),
    ],
)
def test_figures_name_what_they_cannot_draw(draw, message):
    with pytest.raises((TypeError, ValueError), match=message):
        draw()
    assert plt.get_fignums() == []


REAL = np.random.default_rng(0).normal(size=(6, 2, 2))


@pytest.mark.parametrize("dtype", [np.complex128, np.longdouble])
@pytest.mark.parametrize("name", ["y", "sample_weight"])
def test_numbers_that_torch_or_programs_do_not_have_are_refused_by_name(name, dtype):
    arguments = {"y": np.arange(6.0), "sample_weight": np.ones(6)}
    arguments[name] = arguments[name].astype(dtype)
    with pytest.raises(ValueError, match=f"{name} must hold real numbers of at most 64 bits"):
        attention_program(REAL, alpha=0.1, **arguments)


def test_heads_have_real_weights():
    with pytest.raises(ValueError, match="w2 must hold real numbers, got complex128"):
        Heads(np.ones((1, 2)) / 2, 1j * np.ones((1, 2)), np.ones((1, 1)), np.zeros(1), "squared", "group_l2", 0.1)


@pytest.mark.parametrize("lr", ["0.01", True, [0.1, None]])
def test_learning_rates_are_numbers(lr):
    network = ConvexAttention(2, 2)
    with pytest.raises(ValueError, match="lr must be a non-negative number"):
        train(network, torch.as_tensor(REAL).float(), torch.zeros(6, 1), alpha=0.1, lr=lr, n_steps=1)


def test_learning_rates_are_one_sequence():
    with pytest.raises(ValueError, match="lr must be a number or a sequence of them"):
        train(ConvexAttention(2, 2), torch.ones(6, 2, 2), torch.zeros(6, 1), alpha=0.1, lr=[[0.1], [0.1, 0.2]])


def test_a_bias_is_true_or_false():
    with pytest.raises((TypeError, ValueError), match="bias"):
        ConvexAttention(2, 2, bias="no")


def test_labels_are_one_for_each_sample():
    model = ConvexAttentionClassifier().fit(REAL, [0, 1, 0, 1, 0, 1])
    with pytest.raises(ValueError, match=r"y must have shape \(n_samples,\)"):
        model._targets.index(np.zeros((6, 2), dtype=int))


def test_offsets_of_positions_may_come_one_by_one():
    assert PositionWeights(offset for offset in [0, 1]).n_weightings == 2
    with pytest.raises(ValueError, match="offsets"):
        PositionWeights(iter([]))


@pytest.mark.parametrize("value", [np.array(["linear", "gated_relu"]), ["linear"], {"linear": 1}])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("activation", lambda value: ConvexAttentionRegressor(activation=value).fit(REAL, REAL[:, 0, 0])),
        ("source", lambda value: ConvexProbeRegressor(dictionary=[QueryPooling(source=value)]).fit(REAL, np.ones(6))),
        ("simplex", lambda value: ConvexAttention(2, 2, simplex=value)),
        ("position", lambda value: SoftmaxAttention(2, position=value)),
        ("decay_on", lambda value: SoftmaxAttention(2, decay_on=value)),
        ("origin", lambda value: PositionWeights([0], value)),
        ("objective", lambda value: DescentConstrainedDenoiser(objective=value).fit(REAL)),
        ("model", lambda value: DescentConstrainedDenoiser(model=value).fit(REAL)),
    ],
)
def test_a_choice_that_is_no_word_is_refused_by_name(name, make, value):
    with pytest.raises(ValueError, match=rf"^{name} must be "):
        make(value)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("n_gates", lambda size: ConvexAttentionRegressor(activation="gated_relu", n_gates=size).fit(REAL, np.ones(6))),
        ("n_alphas", lambda size: ConvexAttentionRegressor().path(REAL, REAL[:, 0, 0], n_alphas=size)),
        ("n_heads", lambda size: ConvexAttention(2, 2, n_heads=size)),
        ("n_tokens", lambda size: make_word_vectors(["a b"] * 9, 1).embed(["a"], size)),
    ],
)
def test_sizes_beyond_any_memory_are_refused_by_name(name, call):
    for size in (10**30, 2**63):
        with pytest.raises(ValueError, match=rf"^{name} must be at most {sys.maxsize}, got {size}"):
            call(size)


@pytest.mark.parametrize("gates", ["gaussian", "sparse", "fourier", "difference"])
@pytest.mark.parametrize("n_gates", [2**40, 2**62])
def test_gates_that_do_not_fit_into_memory_are_refused_by_name(gates, n_gates):
    model = ConvexAttentionRegressor(activation="gated_relu", gates=gates, n_gates=n_gates)
    with pytest.raises(ValueError, match=rf"^n_gates must be at most \d+, whose directions .*, got {n_gates}"):
        model.fit(np.arange(24.0).reshape(6, 2, 2), np.ones(6))


def test_a_resume_that_is_no_path_is_refused_by_name():
    with pytest.raises(ValueError, match=r"resume='3' needs an int as random_state"):
        ConvexProbeRegressor().fit(REAL, REAL[:, 0, 0], resume=3)


@pytest.mark.parametrize("form", [np.asarray, list, lambda X: (X, np.full(len(X), 2))])
def test_estimators_read_longdouble_as_float64(form):
    long, double = form(REAL.astype(np.longdouble)), form(REAL)
    of_positions = [] if isinstance(long, tuple) else [ConvexAttentionRegressor()]  # lengths are for probes
    for model in [ConvexProbeRegressor(random_state=0), *of_positions]:
        found = model.fit(long, REAL[:, 0, 0]).predict(long)
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found, model.fit(double, REAL[:, 0, 0]).predict(double))


def test_heads_have_targets_that_read_y():
    with pytest.raises(TypeError, match=r"targets must be a Targets, as RealTargets\(\) makes one, got 3"):
        Heads(np.ones((1, 2)) / 2, np.ones((1, 2)), np.ones((1, 1)), np.zeros(1), "squared", "group_l2", 0.1, targets=3)


@pytest.mark.parametrize("options", [{"simplex": "softmax"}, {"simplex": "projection", "bias": False}])
def test_weights_are_given_to_networks_that_can_hold_them(options):
    with pytest.raises(ValueError, match=f"set_weights needs .* got simplex='{options['simplex']}'"):
        ConvexAttention(2, 2, n_heads=1, **options).set_weights(np.ones((1, 2)) / 2, np.ones((1, 2)), [[1.0]], [0.0])


def test_arrays_of_records_are_refused_by_name():
    records = np.zeros(6, dtype=[("a", float), ("b", float)])
    for model in (ConvexAttentionRegressor(), ConvexProbeRegressor()):
        with pytest.raises(TypeError, match=r"^X must hold numbers: Cannot cast"):
            model.fit(records, np.ones(6))


def test_an_error_of_a_wrong_argument_names_the_method():
    X, y = np.ones((4, 2, 2)), np.arange(4.0)
    with pytest.raises(TypeError, match=r"^ConvexAttentionRegressorCV\.fit\(\): got an unexpected .* 'resume'$"):
        ConvexAttentionRegressorCV().fit(X, y, resume="folds")

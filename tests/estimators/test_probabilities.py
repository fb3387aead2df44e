"""Regressions whose targets are probabilities of classes."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax

from convexformer import (
    ConvexAttentionClassifier,
    ConvexAttentionRegressor,
    ConvexAttentionRegressorCV,
    ConvexProbeClassifier,
    ConvexProbeRegressor,
    GreedyConvexTransformerRegressor,
    UnfoldedTransformerRegressor,
    attention_program,
    load_model,
    save_model,
)
from convexformer.solvers import Exact, solve

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4, 3))
P = softmax(X[:, 1] @ RNG.normal(size=(3, 3)) + X[:, 2, :1], axis=1)
WEIGHT = RNG.uniform(0.5, 2, size=60)


def soft(**options):
    return ConvexAttentionRegressor(alpha=0.02, loss="softmax", tol=1e-9, **options)


@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
def test_objective_is_that_of_the_reference_solution(penalty):
    model = soft(penalty=penalty).fit(X, P)
    program = attention_program(X, P, loss="softmax", penalty=penalty, alpha=0.02, fit_intercept=True)
    assert model.certificate_.primal == pytest.approx(solve(program, Exact()).certificate.primal, rel=1e-7)
    scores = np.einsum("ntd,tdc->nc", X, model.coef_) + model.intercept_
    np.testing.assert_allclose(model.predict(X), softmax(scores, axis=1), rtol=1e-10)
    loss = -(P * log_softmax(scores, axis=1)).sum(1).mean()
    norms = np.linalg.norm(model.coef_, axis=1).sum()  # of a token and an output, over features
    if penalty == "nuclear":
        norms = np.linalg.norm(model.coef_, ord="nuc", axis=(1, 2)).sum()
    assert model.certificate_.primal == pytest.approx(loss + 0.02 * norms, rel=1e-10)


@pytest.mark.parametrize(
    ("regressor", "classifier"),
    [(ConvexAttentionRegressor, ConvexAttentionClassifier), (ConvexProbeRegressor, ConvexProbeClassifier)],
)
def test_rows_of_zero_and_one_give_the_classifier(regressor, classifier):
    options = {"alpha": 0.02, "loss": "softmax", "tol": 1e-9, "random_state": 0}
    labels = P.argmax(1)
    ours = regressor(**options).fit(X, np.eye(3)[labels], sample_weight=WEIGHT)
    wanted = classifier(**options).fit(X, labels, sample_weight=WEIGHT)
    assert ours.certificate_.primal == pytest.approx(wanted.certificate_.primal, rel=1e-12)
    np.testing.assert_allclose(ours.predict(X), wanted.predict_proba(X), atol=1e-9)


def test_probabilities_are_means_of_labels():
    """A sample with probabilities counts as several samples of one class each, with these as weights."""
    labels, rows = np.tile(np.arange(3), 60), np.repeat(np.arange(60), 3)
    wanted = ConvexAttentionClassifier(alpha=0.02, loss="softmax", tol=1e-9)
    wanted.fit(X[rows], labels, sample_weight=(WEIGHT[:, None] * P).ravel())
    ours = soft().fit(X, P, sample_weight=WEIGHT)
    assert ours.certificate_.primal == pytest.approx(wanted.certificate_.primal, rel=1e-8)
    np.testing.assert_allclose(ours.predict(X), wanted.predict_proba(X), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_taken_over_their_sums(dtype):
    rounded = torch.as_tensor(P).to(dtype)
    exact = rounded.double()
    exact /= exact.sum(1, keepdim=True)
    wanted = soft().fit(X, exact.numpy())
    for rows in (rounded, rounded.numpy()):
        model = soft().fit(X, rows)
        assert model.certificate_.primal == wanted.certificate_.primal
        assert model.heads_.objective(X, rows) == pytest.approx(wanted.certificate_.primal, rel=1e-12)
        assert model.score(X, rows) == pytest.approx(wanted.score(X, rows), rel=1e-12)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (2 * P, "must be class probabilities whose rows sum to 1"),
        (P.astype(np.float32) * np.float32(1.001), "must be class probabilities whose rows sum to 1"),
        (P * (1 + 1e-9), "must be class probabilities whose rows sum to 1; normalise them in float64"),
        (np.concatenate([P, 0.1 - P[:, :1], P[:, :1] - 0.1], 1), "must be class probabilities whose rows sum to 1"),
        (P[:, :1], "need at least two columns"),
        (P[:, 0], "needs class labels; use ConvexAttentionClassifier, or rows of class probabilities"),
        (P[:-1], "y must have one row per sample, 60 as X, got 59"),
        (np.where(P < 0.1, np.nan, P), "NaN"),
    ],
)
def test_what_is_no_probability_is_named(y, message):
    with pytest.raises(ValueError, match=message):
        soft().fit(X, y)


def test_one_number_a_sample_is_named_in_single_precision_too():
    heads = soft().fit(X, P).heads_
    for y in (P[:, 0], P[:, 0].astype(np.float32)):
        with pytest.raises(ValueError, match=r"y must have a row for each of the 60 samples, of 3 outputs"):
            heads.objective(X, y)


def test_folds_paths_files_and_other_estimators(tmp_path):
    model = ConvexAttentionRegressorCV(loss="softmax", alphas=6).fit(X, P.astype(np.float32))
    save_model(model, tmp_path / "model.npz")
    again = load_model(tmp_path / "model.npz")
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    assert again.heads_.objective(X, P) == pytest.approx(model.heads_.objective(X, P), rel=1e-12)
    for estimator in (
        GreedyConvexTransformerRegressor(loss="softmax", n_layers=2, n_gates=4, random_state=0),
        UnfoldedTransformerRegressor(loss="softmax", n_steps=20, random_state=0),
    ):
        predicted = estimator.fit(X, P).predict(X)
        assert (predicted >= 0).all()
        np.testing.assert_allclose(predicted.sum(1), 1, rtol=1e-5)

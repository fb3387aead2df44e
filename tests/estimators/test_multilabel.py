"""Classifiers take several labels per sample: binary problems with a penalty in common."""

import pickle

import cvxpy as cp
import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_array
from sklearn.base import clone, is_classifier
from sklearn.metrics import accuracy_score, average_precision_score
from sklearn.model_selection import GridSearchCV, KFold, cross_val_predict, cross_val_score
from sklearn.utils import get_tags

from convexformer import (
    ConvexAttentionClassifier,
    ConvexAttentionClassifierCV,
    ConvexProbeClassifier,
    ConvexProbeClassifierCV,
    DescentConstrainedClassifier,
    GreedyConvexTransformerClassifier,
    UnfoldedTransformerClassifier,
    load_model,
    save_model,
)
from convexformer.storage import write_shards

rng = np.random.default_rng(0)
X = rng.normal(size=(60, 4, 2))
noise = rng.normal(size=(3, 60))
Y = np.column_stack(
    [X[:, 1, 0] > noise[0] / 2, X[:, 2, 1] + X[:, 3, 0] > 0.5 + noise[1] / 2, X[:, 1, 0] - X[:, 0, 1] > noise[2] / 2]
).astype(int)
GATED = {"activation": "gated_relu", "n_gates": 6, "random_state": 0}
MODELS = [
    ConvexAttentionClassifier(),
    ConvexAttentionClassifier(penalty="nuclear", **GATED),
    ConvexAttentionClassifierCV(alphas=3, eps=0.1, cv=3),
    ConvexProbeClassifier(random_state=0),
    ConvexProbeClassifier(penalty="nuclear", generate=3, random_state=0),
    ConvexProbeClassifierCV(alphas=3, eps=0.1, cv=3, random_state=0),
    GreedyConvexTransformerClassifier(n_gates=4, random_state=0),
    UnfoldedTransformerClassifier(n_layers=2, width=4, n_steps=20, random_state=0),
]
names = pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)


@pytest.mark.parametrize("loss", ["auto", "squared_hinge"])
@pytest.mark.parametrize("kind", [ConvexAttentionClassifier, ConvexProbeClassifier])
def test_under_a_penalty_of_each_output_the_labels_are_binary_problems_apart(kind, loss):
    model = kind(alpha=0.02, loss=loss, tol=1e-9, random_state=0)
    together = clone(model).fit(X, Y)
    apart = [clone(model).fit(X, y) for y in Y.T]
    assert together.certificate_.relative_gap <= 1e-9
    assert together.certificate_.primal == pytest.approx(sum(one.certificate_.primal for one in apart), rel=1e-8)
    assert together.alpha_max_ == pytest.approx(max(one.alpha_max_ for one in apart), rel=1e-10)
    for label, one in enumerate(apart):
        np.testing.assert_allclose(together.decision_function(X)[:, label], one.decision_function(X), atol=1e-3)
        np.testing.assert_array_equal(together.predict(X)[:, label], one.predict(X))
        if loss == "auto":
            np.testing.assert_allclose(together.predict_proba(X)[:, label], one.predict_proba(X)[:, 1], atol=1e-3)
    assert together.loss_ == apart[0].loss_


def test_the_nuclear_penalty_solves_the_program_that_labels_share():
    tokens, target = X[:30], Y[:30]
    model = ConvexAttentionClassifier(alpha=0.03, penalty="nuclear", tol=1e-8).fit(tokens, target)
    coef, intercept = [cp.Variable((2, 3)) for _ in range(4)], cp.Variable(3)
    outputs = sum(tokens[:, k] @ coef[k] for k in range(4)) + np.ones((30, 1)) @ cp.reshape(
        intercept, (1, 3), order="C"
    )
    loss = cp.sum(cp.logistic(cp.multiply(1 - 2 * target, outputs))) / 30
    problem = cp.Problem(cp.Minimize(loss + 0.03 * sum(cp.normNuc(matrix) for matrix in coef)))
    problem.solve(solver="CLARABEL")
    assert model.certificate_.dual <= problem.value + 1e-6
    assert model.certificate_.primal == pytest.approx(problem.value, rel=1e-6)
    assert model.heads_.objective(tokens, target) == pytest.approx(model.certificate_.primal, rel=1e-9)


@names
def test_predictions_have_a_column_for_each_label(model):
    fitted = clone(model).fit(X, Y)
    scores, pred = fitted.decision_function(X), fitted.predict(X)
    np.testing.assert_array_equal(fitted.classes_, [0, 1, 2])
    assert pred.dtype == np.int64
    np.testing.assert_array_equal(pred, scores > 0)
    probability = 1 / (1 + np.exp(-scores))
    np.testing.assert_allclose(fitted.predict_proba(X), probability, rtol=1e-12)
    np.testing.assert_allclose(fitted.predict_log_proba(X), np.log(probability), rtol=1e-9)
    assert fitted.score(X, Y) == accuracy_score(Y, pred) == (pred == Y).all(1).mean()


@names
def test_a_model_of_several_labels_is_cloned_pickled_and_saved(model, tmp_path):
    fitted = clone(model).fit(X, Y)
    save_model(fitted, tmp_path / "model.npz")
    for again in (pickle.loads(pickle.dumps(fitted)), load_model(tmp_path / "model.npz")):
        np.testing.assert_array_equal(again.predict(X), fitted.predict(X))
        np.testing.assert_array_equal(again.predict_proba(X), fitted.predict_proba(X))
        np.testing.assert_array_equal(again.classes_, fitted.classes_)
        if isinstance(model, ConvexAttentionClassifier):
            assert again.heads_.objective(X, Y) == fitted.heads_.objective(X, Y)


@pytest.mark.parametrize(
    "form",
    [
        lambda y: y.astype(bool),
        lambda y: y.astype(float),
        lambda y: y.tolist(),
        lambda y: pd.DataFrame(y, columns=["a", "b", "c"]),
        torch.as_tensor,
    ],
    ids=["bool", "float", "list", "frame", "tensor"],
)
def test_a_matrix_of_labels_is_the_same_in_all_forms(form):
    model = ConvexAttentionClassifier().fit(X, form(Y))
    np.testing.assert_array_equal(model.heads_.targets.encode(form(Y)), 2 * Y - 1)
    np.testing.assert_array_equal(model.predict(X), ConvexAttentionClassifier().fit(X, Y).predict(X))
    assert model.score(X, form(Y)) == accuracy_score(Y, model.predict(X))
    assert model.heads_.objective(X, form(Y)) == pytest.approx(model.certificate_.primal, rel=1e-9)
    folds = ConvexAttentionClassifierCV(alphas=2, cv=2, scoring="f1_macro").fit(X, form(Y))
    assert np.isfinite(folds.score_path_).all()


def test_one_column_of_labels_is_a_binary_problem():
    with pytest.warns(UserWarning, match="column-vector"):
        model = ConvexAttentionClassifier().fit(X, Y[:, :1])
    assert model.predict(X).shape == (60,)


@pytest.mark.parametrize("model", [ConvexAttentionClassifier(penalty="nuclear"), ConvexProbeClassifier(random_state=0)])
def test_weights_are_repetitions(model):
    model = clone(model).set_params(tol=1e-9, alpha=0.02)
    times = np.random.default_rng(0).integers(0, 3, 60)
    rows = np.repeat(np.arange(60), times)
    weighted = clone(model).fit(X, Y, sample_weight=times)
    repeated = clone(model).fit(X[rows], Y[rows])
    assert weighted.certificate_.primal == pytest.approx(repeated.certificate_.primal, rel=1e-7)
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, atol=1e-3)
    assert weighted.score(X, Y, times) == pytest.approx(weighted.score(X[rows], Y[rows]))
    tokens = X if isinstance(model, ConvexAttentionClassifier) else weighted.pool(X)
    assert weighted.heads_.objective(tokens, Y, times) == pytest.approx(weighted.certificate_.primal, rel=1e-9)


def test_tools_of_scikit_learn_take_several_labels():
    model = ConvexProbeClassifier(random_state=0)
    assert cross_val_score(model, X, Y, cv=3, scoring="f1_micro").min() > 0.5
    by_hand = [clone(model).fit(X[a], Y[a]).predict_proba(X[b]) for a, b in KFold(3).split(X)]
    found = cross_val_predict(model, X, Y, cv=3, method="predict_proba")
    np.testing.assert_allclose(found, np.concatenate(by_hand), atol=1e-6)
    search = GridSearchCV(model, {"alpha": [0.003, 0.3]}, scoring="average_precision", cv=2).fit(X, Y)
    assert search.best_params_ == {"alpha": 0.003}


def test_cross_validation_scores_whole_rows_on_folds_in_order():
    alphas, weight = [0.1, 0.02], np.random.default_rng(0).integers(1, 4, 60)
    options = {"alphas": alphas, "cv": 3, "tol": 1e-8}
    by_scores = ConvexAttentionClassifierCV(scoring="average_precision", **options).fit(X, Y, weight)
    by_loss = ConvexAttentionClassifierCV(**options).fit(X, Y, weight)
    for row, alpha in enumerate(alphas):
        for column, (training, test) in enumerate(KFold(3).split(X)):
            one = ConvexAttentionClassifier(alpha, tol=1e-8).fit(X[training], Y[training], weight[training])
            scores = one.decision_function(X[test])
            expected = average_precision_score(Y[test], scores, sample_weight=weight[test])
            assert by_scores.score_path_[row, column] == pytest.approx(expected)
            loss = np.average(np.logaddexp(0, (1 - 2 * Y[test]) * scores).sum(1), weights=weight[test])
            assert by_loss.score_path_[row, column] == pytest.approx(-loss, rel=1e-4)


def test_a_path_has_the_solution_at_each_alpha():
    path = ConvexAttentionClassifier(penalty="nuclear", tol=1e-8).path(X, Y, n_alphas=4)
    fitted = ConvexAttentionClassifier(path.alphas[2], penalty="nuclear", tol=1e-8).fit(X, Y)
    assert path.coefs.shape == (4, 4, 2, 3)
    assert path.intercepts.shape == (4, 3)
    assert not path.coefs[0].any()
    np.testing.assert_allclose(path.intercepts[0], np.log(Y.mean(0) / (1 - Y.mean(0))), atol=1e-5)
    np.testing.assert_allclose(path.heads(2).predict(X), fitted.decision_function(X), atol=1e-3)
    assert path.heads(2).objective(X, Y) == pytest.approx(fitted.certificate_.primal, rel=1e-6)


def test_samples_on_a_disk_and_a_file_to_go_on_from(tmp_path):
    write_shards(tmp_path / "shards", lambda rows: {"X": X[rows]}, 60, shard_rows=35)
    whole = ConvexAttentionClassifier(penalty="nuclear", tol=1e-7).fit(X, Y)
    model = ConvexAttentionClassifier(penalty="nuclear", tol=1e-7, memory_limit=6000)
    for _ in range(2):
        model.fit(str(tmp_path / "shards"), Y, resume=tmp_path / "fit.npz")
        assert model.traffic_.passes > 1
        assert model.certificate_.primal == pytest.approx(whole.certificate_.primal, rel=1e-6)
    assert model.score(str(tmp_path / "shards"), Y) == whole.score(X, Y)


def test_contributions_of_tokens_add_up_to_the_score_of_each_label():
    model = ConvexProbeClassifier(random_state=0).fit(X, Y)
    explanation = model.explain(X)
    np.testing.assert_allclose(explanation.scores, model.decision_function(X), atol=1e-10)
    np.testing.assert_array_equal(explanation.of(0, 2), explanation.contributions[0][:, 2])


def test_a_warm_start_goes_on_from_labels_of_the_same_shape():
    model = ConvexAttentionClassifier(warm_start=True, tol=1e-7, penalty="nuclear").fit(X, Y)
    first = model.n_iter_
    assert model.fit(X, Y).n_iter_ < first
    swapped = model.fit(X, 1 - Y)
    np.testing.assert_array_equal(
        swapped.predict(X), 1 - ConvexAttentionClassifier(penalty="nuclear").fit(X, Y).predict(X)
    )


EMPTY = np.column_stack([Y, np.zeros(60, dtype=int)])


@pytest.mark.parametrize(
    ("target", "parameters", "message"),
    [
        (2 * Y - 1, {}, r"y of shape \(60, 3\) must hold 0 and 1 alone, got \[-1.*several labels per sample are a"),
        (3 * Y, {}, r"must hold 0 and 1 alone, got \[3"),
        (0.5 * Y, {}, r"must hold 0 and 1 alone, got \[0.5"),
        (np.where(Y, "yes", "no"), {}, "y must hold numbers; several labels per sample are a matrix of 0 and 1.*'"),
        (np.where(Y, np.nan, 0.0), {}, "y contains NaN"),
        (csr_array(Y), {}, r"y must be a dense matrix.*y.toarray\(\)"),
        (Y[:50], {}, "y must have one row per sample, 60 as X, got 50"),
        (EMPTY, {}, r"y must have both 0 and 1 in the column of each label.*in the columns \[3\]"),
        (1 - EMPTY, {}, r"in the columns \[3\]"),
        (
            Y,
            {"loss": "softmax"},
            r"loss=Softmax\(\) is for classes of which each sample has one.*'logistic'.*y.argmax\(1\)",
        ),
        (Y, {"loss": "squared"}, "loss='squared' is for numbers"),
        (Y, {"class_weight": "balanced"}, "class_weight must be None for y with several labels.*give sample_weight"),
    ],
)
def test_targets_and_parameters_that_do_not_go_together_are_named(target, parameters, message):
    with pytest.raises(ValueError, match=message):
        ConvexAttentionClassifier(**parameters).fit(X, target)


def test_a_label_that_only_samples_of_weight_zero_have_is_named():
    with pytest.raises(ValueError, match=r"in the columns \[1\]"):
        ConvexAttentionClassifier().fit(X, Y, sample_weight=1 - Y[:, 1])


def test_a_label_that_the_training_part_of_a_fold_lacks_is_named():
    late = np.column_stack([Y, np.arange(60) >= 40])
    with pytest.raises(ValueError, match=r"training part of fold 2 .* in the columns \[3\].*shuffle the folds"):
        ConvexAttentionClassifierCV(alphas=2, cv=3).fit(X, late)


def test_heads_say_what_labels_they_take():
    heads = ConvexAttentionClassifier().fit(X, Y).heads_
    with pytest.raises(ValueError, match=r"must hold 0 and 1 alone, got \[2"):
        heads.objective(X, 2 * Y)
    with pytest.raises(ValueError, match=r"60 samples, of 3 outputs as in fit; it gives \(60, 2\)"):
        heads.objective(X, Y[:, :2])


def test_a_descent_constrained_classifier_takes_one_label_per_sample():
    with pytest.raises(ValueError, match="y should be a 1d array"):
        DescentConstrainedClassifier().fit(X, Y)
    assert not get_tags(DescentConstrainedClassifier()).classifier_tags.multi_label


@names
def test_tags_tell_scikit_learn_of_several_labels(model):
    assert is_classifier(model)
    assert get_tags(model).classifier_tags.multi_label


@pytest.mark.parametrize("dtypes", ["boolean", "Int64", {0: bool}, {0: float, 1: "boolean"}], ids=str)
def test_columns_of_a_data_frame_of_any_kind_are_scored(dtypes):
    frame = pd.DataFrame(Y).astype(dtypes)
    model = ConvexAttentionClassifierCV(alphas=3, eps=0.1, cv=3, scoring="f1_macro")
    expected, found = clone(model).fit(X, Y), model.fit(X, frame)
    np.testing.assert_array_equal(found.score_path_, expected.score_path_)
    assert found.score(X, frame) == accuracy_score(Y, expected.predict(X))
    one = ConvexAttentionClassifier(alpha=expected.alpha_)
    np.testing.assert_array_equal(cross_val_score(one, X, frame, cv=3), cross_val_score(one, X, Y, cv=3))

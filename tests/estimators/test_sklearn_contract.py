"""Estimators behave as scikit-learn's do."""

import functools
import inspect
import pickle
import textwrap

import joblib
import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn import config_context, get_config
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import make_scorer, mean_poisson_deviance
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import convexformer
from convexformer import (
    ConvexAttentionClassifier,
    ConvexAttentionClassifierCV,
    ConvexAttentionRegressor,
    ConvexAttentionRegressorCV,
)
from convexformer.gates import NetworkGates

GATED = {"activation": "gated_relu", "n_gates": 6, "random_state": 0}


def sequences(n_samples=60, n=4, d=2, seed=0):
    return np.random.default_rng(seed).normal(size=(n_samples, n, d))


X = sequences()
Y = {
    "real": X[:, 1, 0] - X[:, 2, 1] + 0.1 * X[:, 0, 0] ** 2,
    "two": np.where(X[:, 1, 0] > 0, "yes", "no"),
    "three": np.digitize(X[:, 2, 1], [-0.5, 0.5]),
}
CASES = [
    (ConvexAttentionRegressor(), "real"),
    (ConvexAttentionRegressor(loss="huber", penalty="nuclear", **GATED), "real"),
    (ConvexAttentionClassifier(), "two"),
    (ConvexAttentionClassifier(penalty="nuclear"), "three"),
    (ConvexAttentionClassifier(class_weight="balanced", **GATED), "three"),
]


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_clone_and_pickle(model, kind):
    fitted = clone(model).fit(X, Y[kind])
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict(X), fitted.predict(X))
    assert again.heads_.objective(X, Y[kind]) == fitted.heads_.objective(X, Y[kind])
    assert not hasattr(clone(fitted), "coef_")


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_models_in_read_only_memory_predict_without_a_warning(model, kind, tmp_path, every_warning):
    fitted = clone(model).fit(X, Y[kind])
    joblib.dump(fitted, tmp_path / "model")
    again = joblib.load(tmp_path / "model", mmap_mode="r")
    np.testing.assert_array_equal(again.predict(X), fitted.predict(X))
    assert again.heads_.objective(X, Y[kind]) == fitted.heads_.objective(X, Y[kind])
    np.testing.assert_array_equal(again.heads_.predict(X), fitted.heads_.predict(X))


def test_memory_maps_of_booleans_are_fitted_as_arrays_of_them_are(tmp_path):
    np.save(tmp_path / "X.npy", X > 0)
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")  # as joblib gives to its workers
    model = ConvexAttentionRegressor().fit(mapped, Y["real"])
    np.testing.assert_array_equal(model.predict(mapped), model.predict(X > 0))
    np.testing.assert_array_equal(model.coef_, ConvexAttentionRegressor().fit(X > 0, Y["real"]).coef_)


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_set_params_and_refit_equals_a_fresh_fit(model, kind):
    refitted = clone(model).fit(X, Y[kind]).set_params(alpha=0.05).fit(X, Y[kind])
    fresh = clone(model).set_params(alpha=0.05).fit(X, Y[kind])
    np.testing.assert_array_equal(refitted.coef_, fresh.coef_)


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_weight_two_is_a_duplicated_row_and_weight_zero_no_row(model, kind):
    model = clone(model).set_params(tol=1e-9, alpha=0.02)
    times = np.random.default_rng(0).integers(0, 3, len(X))
    rows = np.repeat(np.arange(len(X)), times)
    weighted = clone(model).fit(X, Y[kind], sample_weight=times)
    repeated = clone(model).fit(X[rows], Y[kind][rows])
    scaled = clone(model).fit(X, Y[kind], sample_weight=0.1 * times)
    assert weighted.certificate_.primal == pytest.approx(repeated.certificate_.primal, rel=1e-7)
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, atol=1e-3)
    assert scaled.certificate_.primal == pytest.approx(weighted.certificate_.primal, rel=1e-7)
    assert weighted.alpha_max_ == pytest.approx(repeated.alpha_max_, rel=1e-10)


def test_grid_search_and_pipeline():
    search = GridSearchCV(
        ConvexAttentionClassifier(), {"alpha": [0.01, 0.1], "penalty": ["group_l2", "nuclear"]}, cv=2
    ).fit(X, Y["three"])
    assert search.best_score_ > 0.5
    flat = X.reshape(len(X), -1)
    pipeline = make_pipeline(StandardScaler(), ConvexAttentionRegressor(alpha=0.01)).fit(flat, Y["real"])
    by_hand = ConvexAttentionRegressor(alpha=0.01).fit(StandardScaler().fit_transform(flat), Y["real"])
    np.testing.assert_allclose(pipeline.predict(flat), by_hand.predict(StandardScaler().fit_transform(flat)))


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("n_outputs", [None, 1, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_shapes(dims, n_outputs, gated):
    samples = X if dims == 3 else X[:, :, 0]
    y = Y["real"] if n_outputs is None else np.outer(Y["real"], np.arange(1, n_outputs + 1))
    model = ConvexAttentionRegressor(**(GATED if gated else {})).fit(samples, y)
    gates = (len(model.gates_),) if gated else ()
    features = (2,) if dims == 3 else ()
    outputs = () if n_outputs is None else (n_outputs,)
    assert model.coef_.shape == (*gates, 4, *features, *outputs)
    assert np.shape(model.intercept_) == outputs
    assert model.predict(samples).shape == (len(X), *outputs)
    assert model.token_norms_.shape == (4,)
    assert (model.n_tokens_in_, model.n_features_in_) == (4, 2 if dims == 3 else 4)


def test_token_norms_add_up_to_the_penalty():
    model = ConvexAttentionRegressor(alpha=0.1, **GATED).fit(X, Y["real"])
    assert model.token_norms_.sum() == pytest.approx(model.heads_.decay(), rel=1e-12)
    used = model.heads_.w1.any(axis=0)
    np.testing.assert_array_equal(model.token_norms_ > 0, used)


def test_precision_of_the_data_is_kept():
    single = ConvexAttentionRegressor(alpha=0.05).fit(X.astype(np.float32), Y["real"])
    double = ConvexAttentionRegressor(alpha=0.05).fit(X, Y["real"])
    assert single.coef_.dtype == single.predict(X.astype(np.float32)).dtype == np.float32
    assert double.coef_.dtype == double.predict(X).dtype == np.float64
    assert single.certificate_.relative_gap <= 1e-4
    assert single.certificate_.primal == pytest.approx(double.certificate_.primal, rel=1e-4)
    # The certificate speaks of the float64 data even when the solver works in float32. Near the optimum the rounding of
    # the heads' weights changes the objective by its square.
    mixed = ConvexAttentionRegressor(alpha=0.05, dtype="float32", tol=1e-6).fit(X, Y["real"])
    assert mixed.coef_.dtype == np.float32
    assert mixed.heads_.objective(X, Y["real"]) == pytest.approx(mixed.certificate_.primal, rel=1e-9)


def test_warm_start_goes_on_where_the_last_fit_ended():
    model = ConvexAttentionClassifier(alpha=0.01, warm_start=True, tol=1e-7, **GATED).fit(X, Y["three"])
    first, gates = model.n_iter_, model.gates_
    model.fit(X, Y["three"])
    assert model.n_iter_ < first
    assert model.gates_ is gates
    # Asking for other gates is not overheard.
    assert len(model.set_params(n_gates=12).fit(X, Y["three"]).gates_) > len(gates)


class TurningNetwork:
    """A network with one gate, whose direction changes in training."""

    directions = np.eye(1, 4), np.eye(1, 2)

    def gate_directions(self):
        return self.directions


def turned(network):
    network.directions = -np.eye(1, 4, k=1), np.eye(1, 2)


NETWORK = TurningNetwork()


@pytest.mark.parametrize(
    ("gates", "change", "other_data"),
    [
        ("generated", {"alpha": 0.002}, False),
        ("difference", {}, True),
        ("gaussian", {"random_state": 1}, False),
        ("gaussian", {}, True),
        (NetworkGates(NETWORK), {}, False),
    ],
)
def test_a_warm_start_has_the_gates_of_a_fresh_fit(gates, change, other_data):
    options = {"activation": "gated_relu", "gates": gates, "n_gates": 6, "random_state": 0, "alpha": 0.02, "tol": 1e-6}
    NETWORK.directions = TurningNetwork.directions
    model = ConvexAttentionRegressor(warm_start=True, **options).fit(X, Y["real"])
    turned(NETWORK)
    data = (sequences(seed=1), sequences(seed=1)[:, 0, 0]) if other_data else (X, Y["real"])
    model.set_params(**change).fit(*data)
    fresh = ConvexAttentionRegressor(**options | change).fit(*data)
    np.testing.assert_array_equal(model.gates_.u1, fresh.gates_.u1)
    np.testing.assert_array_equal(model.gates_.u2, fresh.gates_.u2)
    primal, reference = fresh.certificate_.primal, fresh.certificate_.reference
    assert model.certificate_.primal == pytest.approx(primal, abs=2e-6 * reference)


@pytest.mark.parametrize("random_state", [None, np.random.RandomState(0)])
def test_a_warm_start_without_an_int_keeps_the_random_gates(random_state):
    options = GATED | {"random_state": random_state}
    model = ConvexAttentionRegressor(0.01, warm_start=True, tol=1e-7, **options).fit(X, Y["real"])
    first, gates = model.n_iter_, model.gates_
    assert model.fit(X, Y["real"]).n_iter_ < first
    np.testing.assert_array_equal(model.gates_.u1, gates.u1)


@pytest.mark.parametrize("solver", ["fista", "exact"])
def test_warm_start_without_the_intercept_of_the_last_fit(solver, monkeypatch):
    model = ConvexAttentionRegressor(solver=solver, warm_start=True).fit(X, Y["real"] + 5.0)
    assert model.intercept_ > 1
    model.set_params(fit_intercept=False)
    cold = clone(model).fit(X, Y["real"] + 5.0)
    assert model.fit(X, Y["real"] + 5.0).intercept_ == 0.0
    assert model.certificate_.primal == pytest.approx(cold.certificate_.primal, rel=1e-3)

    def interrupt(self, *args, **options):
        raise KeyboardInterrupt

    model.set_params(fit_intercept=True).fit(X, Y["real"] + 5.0).set_params(fit_intercept=False)
    monkeypatch.setattr("cvxpy.Problem.solve", interrupt)
    monkeypatch.setattr("convexformer_solvers.Fista.step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y["real"] + 5.0)
    assert model.intercept_ == 0.0


def test_callback_stops_and_interrupt_leaves_a_usable_estimator():
    seen = []
    model = ConvexAttentionRegressor(alpha=0.001, tol=0.0, callback=lambda progress: seen.append(progress) or True)
    model.fit(X, Y["real"])
    assert len(seen) == 1
    assert seen[0].iteration == model.n_iter_
    assert seen[0].certificate.primal == model.certificate_.primal

    def interrupt(progress):
        if progress.iteration >= 4:
            raise KeyboardInterrupt

    model = ConvexAttentionRegressor(alpha=0.001, solver="fista", tol=1e-12, callback=interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y["real"])
    assert np.isfinite(model.predict(X)).all()
    assert model.heads_.objective(X, Y["real"]) == pytest.approx(model.certificate_.primal, rel=1e-9)


def test_no_convergence_is_told_with_gap_tolerance_and_remedy():
    with pytest.warns(
        ConvergenceWarning, match=r"relative gap \d\.\d+e[-+]\d+ > tol 1\.000e-10.*raise max_iter"
    ) as record:
        model = ConvexAttentionRegressor(alpha=0.001, solver="fista", max_iter=2, tol=1e-10).fit(X, Y["real"])
    assert f"{model.certificate_.relative_gap:.3e}" in str(record[0].message)
    assert model.certificate_.relative_gap > 1e-10


@pytest.mark.parametrize(("model", "kind"), [CASES[0], CASES[3]])
def test_path_is_what_separate_fits_give(model, kind):
    alphas, coefs, gaps = clone(model).path(X, Y[kind], n_alphas=4)
    assert (np.diff(alphas) < 0).all()
    assert alphas[0] == pytest.approx(100 * alphas[-1])
    assert (gaps <= 1e-4).all()
    assert (coefs[0] == 0).all()
    fitted = clone(model).set_params(alpha=alphas[2]).fit(X, Y[kind])
    assert coefs.shape == (4, *fitted.coef_.shape)
    np.testing.assert_allclose(coefs[2], fitted.coef_, atol=0.05)


@pytest.mark.parametrize(("model", "kind"), CASES)
@pytest.mark.parametrize("ndim", [2, 3])
def test_a_point_of_a_path_predicts_what_a_fit_at_its_alpha_does(model, kind, ndim):
    tokens, target = X[:, :, 0] if ndim == 2 else X, Y[kind]
    target = target + 3.0 if kind == "real" else target
    path = clone(model).set_params(tol=1e-9).path(tokens, target, n_alphas=4, eps=0.03)
    fitted = clone(model).set_params(tol=1e-9, alpha=path.alphas[2]).fit(tokens, target)
    assert path.intercepts.shape == (4, *np.shape(fitted.intercept_))
    np.testing.assert_allclose(path.intercepts[2], fitted.intercept_, atol=1e-3)
    outputs = path.heads(2).predict(tokens)
    np.testing.assert_allclose(outputs, fitted.heads_.predict(tokens), atol=1e-3)
    if kind == "real":
        np.testing.assert_allclose(outputs[:, 0], fitted.predict(tokens), atol=1e-3)
    assert path.heads(2).objective(tokens, target) == pytest.approx(fitted.certificate_.primal, rel=1e-6)


@pytest.mark.parametrize(("model", "kind"), CASES)
@pytest.mark.parametrize("ndim", [2, 3])
def test_norms_of_a_path_are_what_each_network_costs_and_those_of_fits(model, kind, ndim):
    tokens = X[:, :, 0] if ndim == 2 else X
    path = clone(model).path(tokens, Y[kind], n_alphas=4, eps=0.03)
    assert path.token_norms.shape == (4, tokens.shape[1])
    costs = [path.heads(position).decay() for position in range(4)]
    np.testing.assert_allclose(path.token_norms.sum(1), costs, rtol=1e-12)
    for position in range(4):
        used = path.heads(position).w1.any(axis=0)
        np.testing.assert_array_equal(path.token_norms[position] > 0, used)
    tight = clone(model).set_params(tol=1e-9, max_iter=100_000)
    fitted = clone(tight).set_params(alpha=path.alphas[2]).fit(tokens, Y[kind])
    again = tight.path(tokens, Y[kind], alphas=path.alphas[:3])
    np.testing.assert_allclose(again.token_norms[2], fitted.token_norms_, atol=1e-3)
    assert not hasattr(path, "weighting_norms")


def test_a_path_is_short_to_read_pickles_and_names_positions_that_are_not_there():
    path = ConvexAttentionRegressor().path(X, Y["real"], n_alphas=3)
    assert len(repr(path)) < 120
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(path)).heads(2).w2, path.heads(2).w2)
    with pytest.raises(IndexError, match="position must be that of one of the 3 alphas, got 3"):
        path.heads(3)


def test_probabilities_are_those_of_the_scores():
    binary = ConvexAttentionClassifier().fit(X, Y["two"])
    positive = 1 / (1 + np.exp(-binary.decision_function(X)))
    np.testing.assert_allclose(binary.predict_proba(X), np.column_stack([1 - positive, positive]), atol=1e-12)
    for loss in ("softmax", "logistic"):
        model = ConvexAttentionClassifier(loss=loss).fit(X, Y["three"])
        np.testing.assert_allclose(model.predict_proba(X).sum(1), 1.0)
        np.testing.assert_array_equal(model.predict_proba(X).argmax(1), model.predict(X))
    two_outputs = ConvexAttentionClassifier(loss="softmax").fit(X, Y["two"])
    assert two_outputs.decision_function(X).shape == (len(X),)
    np.testing.assert_array_equal(two_outputs.decision_function(X) > 0, two_outputs.predict(X) == "yes")
    assert not hasattr(ConvexAttentionClassifier(loss="squared_hinge"), "predict_proba")


def test_logarithms_of_probabilities_are_theirs_also_where_one_is_zero():
    model = ConvexAttentionClassifier().fit(X, Y["three"])
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), model.predict_proba(X), rtol=1e-14)
    assert (model.predict_log_proba(1e9 * X) == -np.inf).any()  # and numpy warns of no division by zero
    assert not hasattr(ConvexAttentionClassifier(loss="squared_hinge"), "predict_log_proba")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_probabilities_far_from_all_classes_are_in_the_ratio_of_their_limits(dtype):
    model = ConvexAttentionClassifier(loss="logistic").fit(X, Y["three"])
    directions = sequences(2000, seed=1)
    assert model.decision_function(1e5 * directions).max(1).min() < -1000  # far from all three
    for size in (1, 1e2, 1e3, 1e4, 1e5):
        far = (size * directions).astype(dtype)
        logarithms = -np.logaddexp(0, -model.decision_function(far).astype(np.float64))
        np.testing.assert_allclose(model.predict_proba(far), softmax(logarithms, axis=1), atol=1e-4)


def test_poisson_predicts_means():
    counts = np.random.default_rng(0).poisson(np.exp(X[:, 1, 0]))
    model = ConvexAttentionRegressor(alpha=0.01, loss="poisson").fit(X, counts)
    assert (model.predict(X) > 0).all()
    # The best intercept matches the mean of the counts, whatever the coefficients.
    assert model.predict(X).mean() == pytest.approx(counts.mean(), rel=1e-6)


FOLDS = KFold(2, shuffle=True, random_state=0)
WEIGHT = np.random.default_rng(0).uniform(0.5, 2, len(X))


@functools.cache
def fitted_to_a_fold(alpha, fold):
    """A classifier of the three classes, fitted once for all ways of scoring."""
    train, _ = list(FOLDS.split(X))[fold]
    model = ConvexAttentionClassifier(alpha=alpha, tol=1e-8)
    return model.fit(X[train], Y["three"][train], sample_weight=WEIGHT[train])


@pytest.mark.parametrize("scoring", [None, "accuracy"])
def test_cross_validation_is_the_loop_over_folds(scoring):
    options = {"alphas": [0.1, 0.01], "cv": FOLDS, "tol": 1e-8, "scoring": scoring}
    model = ConvexAttentionClassifierCV(**options).fit(X, Y["three"], sample_weight=WEIGHT)
    for row, alpha in enumerate(model.alphas_):
        for column, (_, test) in enumerate(FOLDS.split(X)):
            single = fitted_to_a_fold(alpha, column)
            if scoring == "accuracy":
                wanted = single.score(X[test], Y["three"][test], sample_weight=WEIGHT[test])
            else:
                chosen = single.predict_proba(X[test])[np.arange(len(test)), Y["three"][test]]
                wanted = np.average(np.log(chosen), weights=WEIGHT[test])
            assert model.score_path_[row, column] == pytest.approx(wanted, abs=1e-3)
    assert model.alpha_ == model.alphas_[model.score_path_.mean(1).argmax()]
    threaded = ConvexAttentionClassifierCV(n_jobs=2, **options).fit(X, Y["three"], sample_weight=WEIGHT)
    np.testing.assert_allclose(threaded.score_path_, model.score_path_, atol=1e-9)
    direct = ConvexAttentionClassifier(alpha=model.alpha_, tol=1e-8).fit(X, Y["three"], sample_weight=WEIGHT)
    np.testing.assert_allclose(model.coef_, direct.coef_, atol=1e-10)


class TestScoresThatAreNotNumbers:
    def fit(self, scores):
        found = iter(scores)  # three alphas of the first fold, then of the second
        model = ConvexAttentionRegressorCV(alphas=3, cv=2, scoring=lambda *given: next(found))
        return model.fit(X, Y["real"])

    def test_are_not_chosen(self):
        with pytest.warns(UserWarning, match=r"gives NaN at 1 of 3 alphas, on folds \[1\]"):
            model = self.fit([0.5, 0.3, 0.4, np.nan, 0.3, 0.5])
        assert model.alpha_ == model.alphas_[2]

    def test_at_every_alpha_are_an_error(self):
        with pytest.raises(ValueError, match=r"gives NaN at 3 of 3 alphas, on folds \[0\]; give a score"):
            self.fit([np.nan] * 3 + [0.1, 0.2, 0.3])


def test_the_best_alpha_is_that_of_the_best_mean():
    found = iter([0.5, 0.2, 0.5, 0.2, -3.0, 0.2])  # of two alphas on the first fold, the second and the third
    model = ConvexAttentionRegressorCV(alphas=2, cv=3, scoring=lambda *given: next(found)).fit(X, Y["real"])
    assert model.alpha_ == model.alphas_[1]


def test_grids_fall_from_the_largest_alpha_to_the_share_asked_for():
    options = {"cv": 2, "scoring": lambda *given: 0.0}
    model = ConvexAttentionRegressorCV(alphas=3, eps=0.25, **options).fit(X, Y["real"])
    np.testing.assert_allclose(model.alphas_, model.alpha_max_ * np.array([1, 0.5, 0.25]), rtol=1e-12)
    assert ConvexAttentionRegressorCV(alphas=1, **options).fit(X, Y["real"]).alpha_ == model.alpha_max_
    model = ConvexAttentionRegressorCV(alphas=[0.01, 0.1], **options).fit(X, Y["real"])
    assert model.alphas_.tolist() == [0.1, 0.01]


def test_scores_are_in_double_precision():
    options = {"alphas": [0.1, 0.01], "cv": 3, "tol": 1e-10}
    near, far = (ConvexAttentionRegressorCV(**options).fit(X, Y["real"] + shift).score_path_ for shift in (0, 1e6))
    np.testing.assert_allclose(far, near, rtol=1e-4)


def test_scorers_meet_the_model_of_each_alpha():
    seen = []

    def score(model, held_out, y):
        # The objective on the training part is that of its certificate only at the alpha which it was solved for.
        fold = X[30:] if np.array_equal(held_out, X[:30]) else X[:30]
        target = Y["real"][30:] if np.array_equal(held_out, X[:30]) else Y["real"][:30]
        assert model.heads_.objective(fold, target) == pytest.approx(model.certificate_.primal, rel=1e-9)
        seen.append((model.alpha_, model.heads_.alpha))
        return 0.0

    model = ConvexAttentionRegressorCV(alphas=[0.1, 0.01], cv=2, scoring=score).fit(X, Y["real"])
    assert seen == [(alpha, alpha) for alpha in (0.1, 0.01)] * 2
    assert model.alpha_ == 0.1


def test_cross_validated_scores_of_a_data_frame_know_its_columns():
    pandas = pytest.importorskip("pandas")
    flat = X[:, :, 0]
    frame = pandas.DataFrame(flat, columns=list("abcd"), index=np.arange(60)[::-1])

    def score(model, held_out, y):
        assert isinstance(held_out, pandas.DataFrame)
        return model.score(held_out, y)

    for scoring in ("r2", score):
        model = ConvexAttentionRegressorCV(alphas=3, cv=3, scoring=scoring).fit(frame, pandas.Series(Y["real"]))
        assert list(model.feature_names_in_) == list("abcd")
        plain = ConvexAttentionRegressorCV(alphas=3, cv=3, scoring="r2").fit(flat, Y["real"])
        np.testing.assert_allclose(model.score_path_, plain.score_path_, atol=1e-12)
    # Lists and tensors too.
    for given in (flat.tolist(), torch.as_tensor(flat)):
        model = ConvexAttentionRegressorCV(alphas=3, cv=3, scoring="r2").fit(given, torch.as_tensor(Y["real"]))
        np.testing.assert_allclose(model.score_path_, plain.score_path_, atol=1e-12)


@pytest.mark.parametrize(
    "scoring",
    [make_scorer(lambda y, pred: -float(np.abs(y - pred).mean())), lambda model, X, y: model.score(X, y)],
    ids=["metric", "scorer"],
)
def test_scores_that_count_no_weights_are_named(scoring):
    model = ConvexAttentionRegressorCV(alphas=2, cv=2, scoring=scoring)
    assert model.fit(X, Y["real"]).score_path_.shape == (2, 2)
    with pytest.raises(ValueError, match=r"scoring=.* takes no sample_weight, which fit was given"):
        model.fit(X, Y["real"], sample_weight=np.linspace(0.5, 2, len(X)))


def test_a_fold_without_a_class_to_train_on_is_named():
    labels = np.repeat(["no", "yes"], 30)
    model = ConvexAttentionClassifierCV(alphas=2, cv=KFold(2))
    with pytest.raises(ValueError, match=r"no training sample of \['no'\] in fold 0, so that .*StratifiedKFold"):
        model.fit(X, labels)
    weight = np.where(labels == "no", 1.0, 0.0)
    weight[-1] = 1.0
    with pytest.raises(ValueError, match="nothing to tell apart"):
        model.set_params(cv=[(np.arange(20), np.arange(20, 60))]).fit(X, labels, weight)
    three = np.repeat(["a", "b", "c"], 20)
    with pytest.warns(UserWarning, match=r"sample of \['a'\] in fold 0, \['b'\] in fold 1, \['c'\] in fold 2, so"):
        model.set_params(cv=KFold(3)).fit(X, three)
    model.set_params(cv=3).fit(X, three)  # stratified: no warning
    even, odd = np.arange(0, 60, 2), np.arange(1, 60, 2)
    weight = np.where((three == "a") & (np.arange(60) % 2 == 0), 0.0, 1.0)  # which is all that is even in the class
    with pytest.warns(UserWarning, match=r"no training sample of \['a'\] in fold 0, so these folds"):
        model.set_params(cv=[(even, odd), (odd, even)]).fit(X, three, weight)


def test_classes_are_those_of_samples_with_weight():
    labels, split = np.repeat(["no", "yes", "none"], 20), [(np.arange(0, 60, 2), np.arange(1, 60, 2))]
    weight = np.repeat([1.0, 1.0, 0.0], 20)
    model = ConvexAttentionClassifierCV(alphas=2, cv=split)
    model.fit(X, labels, weight)  # the class without any weight is not missing: no warning
    weight[20:40:2] = 0.0
    with pytest.raises(ValueError, match=r"no training sample of \['yes'\] in fold 0, so that there is nothing"):
        model.fit(X, labels, weight)


def test_folds_in_threads_have_the_configuration_of_the_call():
    model = ConvexAttentionRegressorCV(alphas=2, cv=2, n_jobs=2, scoring=lambda *_: get_config()["working_memory"])
    with config_context(working_memory=77):
        assert (model.fit(X, Y["real"]).score_path_ == 77).all()


def test_groups_of_samples_stay_in_one_fold():
    groups = np.arange(len(X)) % 7
    splits = list(GroupKFold(3).split(X, Y["real"], groups))
    model = ConvexAttentionRegressorCV(alphas=[0.1, 0.01], cv=splits, tol=1e-8).fit(X, Y["real"])
    for fold, (train, test) in enumerate(splits):
        assert not set(groups[train]) & set(groups[test])
        alone = ConvexAttentionRegressor(alpha=0.1, tol=1e-8).fit(X[train], Y["real"][train])
        error = 0.5 * np.mean((alone.predict(X[test]) - Y["real"][test]) ** 2)
        assert model.score_path_[0, fold] == pytest.approx(-error, rel=1e-3)


def test_groups_may_be_given_to_fit():
    groups = np.arange(len(X)) % 7
    splits = list(GroupKFold(3).split(X, Y["real"], groups))
    listed = ConvexAttentionRegressorCV(alphas=[0.1, 0.01], cv=splits).fit(X, Y["real"])
    model = ConvexAttentionRegressorCV(alphas=[0.1, 0.01], cv=GroupKFold(3))
    np.testing.assert_array_equal(model.fit(X, Y["real"], groups=groups).score_path_, listed.score_path_)
    with pytest.raises(ValueError, match=r"cv=GroupKFold\(.*needs groups; give them in fit\(X, y, groups=\.\.\.\)"):
        model.fit(X, Y["real"])
    with pytest.raises(ValueError, match=rf"groups must have one entry per sample, {len(X)}, got shape"):
        model.fit(X, Y["real"], groups=groups[1:])
    with pytest.raises(
        ValueError, match=rf"gives no folds of {len(X)} samples: .*greater than the number of groups: 2"
    ):
        model.fit(X, Y["real"], groups=groups > 3)


def test_cross_validation_reads_weights_no_oftener_than_one_fit():
    class Weights:
        def __init__(self):
            self.reads = 0

        def __array__(self, dtype=None, copy=None):
            self.reads += 1
            return np.ones(60)

    once, folds = Weights(), Weights()
    ConvexAttentionRegressor().fit(X, Y["real"], sample_weight=once)
    ConvexAttentionRegressorCV(alphas=2, cv=2, scoring="r2").fit(X, Y["real"], sample_weight=folds)
    assert folds.reads == once.reads


def test_nothing_given_is_changed():
    given = (X.copy(), Y["real"].copy(), np.linspace(0.5, 2, len(X)))
    kept = tuple(array.copy() for array in given)
    model = ConvexAttentionRegressor(alpha=0.01, **GATED)
    before = model.get_params()
    model.fit(*given).predict(given[0])
    for array, copy in zip(given, kept, strict=True):
        np.testing.assert_array_equal(array, copy)
    assert model.get_params() == before


def test_tensors_come_back_as_tensors_under_array_api_dispatch(run_python):
    pytest.importorskip("scipy", "1.14", reason="scikit-learn dispatches arrays with SciPy 1.14 or newer")
    code = """
        import numpy as np, sklearn, torch
        from convexformer import ConvexAttentionClassifier, ConvexAttentionClassifierCV, ConvexAttentionRegressor
        X = torch.randn(40, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        y = X[:, 1, 0]
        model = ConvexAttentionRegressor(alpha=0.05).fit(X, y)
        assert isinstance(model.coef_, np.ndarray) and isinstance(model.predict(X), np.ndarray)
        with sklearn.config_context(array_api_dispatch=True):
            kept = ConvexAttentionRegressor(alpha=0.05).fit(X, y)
            assert torch.is_tensor(kept.coef_) and torch.is_tensor(kept.predict(X))
            np.testing.assert_array_equal(kept.coef_.numpy(), model.coef_)
            labels = ConvexAttentionClassifier().fit(X, (y > 0).long())
            assert torch.is_tensor(labels.predict_proba(X)) and torch.is_tensor(labels.decision_function(X))
            assert isinstance(labels.predict(X), np.ndarray) and isinstance(labels.heads_.w1, np.ndarray)
            assert isinstance(kept.path(X, y, n_alphas=2).coefs, np.ndarray)
            chosen = ConvexAttentionClassifierCV(alphas=2, cv=3, scoring="roc_auc")
            scores = chosen.fit(X, y > 0).score_path_
            assert torch.is_tensor(chosen.coef_)
            try:
                kept.fit(torch.full((4, 3, 2), float("nan")), y[:4])
            except ValueError as error:
                assert "X" in str(error)
            else:
                raise AssertionError("NaN was accepted")
        np.testing.assert_array_equal(scores, chosen.fit(X, y > 0).score_path_)
        print("done")
        """
    assert run_python(textwrap.dedent(code), SCIPY_ARRAY_API="1") == "done"


def test_warnings_point_at_the_line_that_fits():
    X = np.random.default_rng(0).normal(size=(30, 4, 3))
    with pytest.warns(ConvergenceWarning) as caught:
        ConvexAttentionRegressor(alpha=1e-3, solver="fista", tol=1e-12, max_iter=1).fit(X, X[:, 0, 0])
    assert caught[0].filename == __file__
    found = iter([0.5, 0.3, np.nan, 0.3])
    with pytest.warns(UserWarning, match="gives NaN") as caught:
        ConvexAttentionRegressorCV(alphas=2, cv=2, scoring=lambda *given: next(found)).fit(X, X[:, 0, 0])
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="no training sample of") as caught:
        ConvexAttentionClassifierCV(alphas=2, cv=KFold(3)).fit(X, np.repeat(["a", "b", "c"], 10))
    assert caught[0].filename == __file__


def test_a_held_out_part_need_be_no_program_by_itself():
    # Counts that are all zero have no best constant, and may be predicted all the same.
    counts = np.zeros(len(X))
    counts[[0, len(X) // 3]] = 5
    model = ConvexAttentionRegressorCV(loss="poisson", alphas=[0.1], cv=KFold(4), tol=1e-8).fit(X, counts)
    for fold, (train, test) in enumerate(KFold(4).split(X)):
        alone = ConvexAttentionRegressor(alpha=0.1, loss="poisson", tol=1e-8).fit(X[train], counts[train])
        deviance = mean_poisson_deviance(counts[test], alone.predict(X[test]))
        assert model.score_path_[0, fold] == pytest.approx(-0.5 * deviance, rel=1e-3)


def test_positions_from_the_end_are_those_of_numpy():
    ahead = [(np.arange(20, 60), np.arange(20))]
    from_the_end = [(np.arange(20, 60) - len(X), np.arange(20) - len(X))]
    assert len(X) == 60
    scores = [
        ConvexAttentionRegressorCV(alphas=[0.1], cv=cv).fit(X, Y["real"]).score_path_ for cv in (ahead, from_the_end)
    ]
    np.testing.assert_array_equal(*scores)


@pytest.mark.parametrize("module", [convexformer, convexformer.preprocessing])
def test_type_checkers_know_that_fit_returns_the_estimator(module):
    classes = [cls for name in module.__all__ if hasattr(cls := getattr(module, name), "fit")]
    assert len(classes) >= 8
    for cls in classes:
        assert inspect.signature(cls.fit).return_annotation == "Self", cls


@pytest.mark.parametrize("scoring", [None, "neg_mean_squared_error"])
def test_held_out_samples_of_weight_zero_change_no_score_whatever_their_size(scoring):
    X = np.random.default_rng(0).normal(size=(30, 3, 2))
    y, weight = X[:, 0, 0] - X[:, 1, 1], np.arange(30) % 7 != 0
    far_off = np.where(weight[:, None, None], X, 1e200)
    model = convexformer.ConvexAttentionRegressorCV(alphas=3, cv=3, scoring=scoring)
    plain, other = (clone(model).fit(samples, y, weight * 1.0).score_path_ for samples in (X, far_off))
    np.testing.assert_array_equal(other, plain)

"""Fits to data on a disk: those of the same data in memory, within the limit of memory."""

import functools
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from covering import covering
from forks import Fork
from peak_memory import PeakMemory
from sklearn.base import clone, is_classifier
from sklearn.model_selection import GroupKFold
from torch.multiprocessing.reductions import StorageWeakRef

from convexformer import (
    ConvexAttentionClassifier,
    ConvexAttentionClassifierCV,
    ConvexAttentionRegressor,
    ConvexAttentionRegressorCV,
    ConvexProbeRegressor,
    ConvexSequenceRegressor,
    GreedyConvexTransformerClassifier,
    GreedyConvexTransformerRegressor,
    load_model,
    save_model,
)
from convexformer.storage import Chunks, Source, write_shards
from convexformer_solvers.rates import machine_rates

LIMIT = 180_000  # bytes, less than twice the data of 96 kB, and enough for Gram matrices of 40 features
ESTIMATORS = {
    "regressor": ConvexAttentionRegressor(alpha=0.05, tol=1e-10),
    "classifier": ConvexAttentionClassifier(alpha=0.02, tol=1e-10, class_weight="balanced"),
    "gated": ConvexAttentionRegressor(alpha=0.1, tol=1e-10, activation="gated_relu", n_gates=2, random_state=0),
}
# Later layers are trained on predictions, which a gap determines to its square root: so there is nearly none.
DEEP = {"n_gates": 2, "tol": 1e-14, "random_state": 0}
LAYERS = {
    "squared": GreedyConvexTransformerRegressor(alpha=0.05, **DEEP),
    "logistic": GreedyConvexTransformerClassifier(alpha=0.05, **DEEP),
}
SEQUENCES = {
    (loss, form): ConvexSequenceRegressor(alpha=0.05, tol=1e-10, form=form, loss=loss)
    for loss in ("squared", "huber")
    for form in ("single_row", "stochastic", "substochastic")
}


def outputs_of(model, X):
    return model.decision_function(X) if hasattr(model, "decision_function") else model.predict(X)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(600, 5, 4))
    y = X[:, 2, 0] - X[:, 1, 1] + 0.3 * rng.normal(size=600)
    return X, y, np.where(y > 0, "up", "down"), rng.uniform(0.5, 2, 600)


@pytest.fixture(scope="module")
def in_memory(data):
    """Function that fits an estimator to the samples in memory, once for all places, and says to which targets."""
    X, y, labels, weight = data
    sequences = np.stack([X[:, ::-1, 0], X[:, :, 1] + X[:, :, 0] ** 2], 2)

    @functools.cache
    def fit(estimator):
        target = (
            sequences if isinstance(estimator, ConvexSequenceRegressor) else labels if is_classifier(estimator) else y
        )
        return clone(estimator).fit(X, target, weight), target

    return fit


@pytest.fixture
def places(data, tmp_path):
    """The samples in each kind of place."""
    X = data[0]
    np.save(tmp_path / "X.npy", X)
    write_shards(tmp_path / "shards", lambda rows: {"X": X[rows]}, len(X), shard_rows=70)
    return {
        "file": str(tmp_path / "X.npy"),
        "path": tmp_path / "X.npy",
        "memory map": np.load(tmp_path / "X.npy", mmap_mode="r"),
        "shards": tmp_path / "shards",
        "chunks": Chunks(lambda: iter(np.array_split(X, 7))),
    }


def test_what_is_kept_for_a_later_call_is_not_read_as_a_shard(data, tmp_path):
    folder, y = tmp_path / "parts", data[1]
    folder.mkdir()
    np.savez(folder / "a.npz", X=data[0], y=y)
    model, file = ConvexAttentionRegressor(), str(folder / "kept.npz")
    for call in (
        lambda *samples: model.fit(*samples, resume=file),
        lambda *samples: model.path(*samples, n_alphas=2, resume=file),
        ConvexAttentionRegressorCV(alphas=2, cv=2, resume=folder).fit,
    ):
        for samples in ((folder, y), (f"{folder}:X", y), (data[0], f"{folder}:y")):
            with pytest.raises(ValueError, match=r"resume=.* would be read as one of the shards of '.*parts"):
                call(*samples)
    assert [path.name for path in folder.iterdir()] == ["a.npz"]


@pytest.mark.parametrize(
    ("name", "limit", "place"), covering(ESTIMATORS, [None, LIMIT], ["file", "path", "memory map", "shards", "chunks"])
)
def test_fits_are_those_in_memory(name, limit, place, data, places, in_memory):
    X, _, _, weight = data
    wanted, target = in_memory(ESTIMATORS[name])
    model = clone(wanted).set_params(memory_limit=limit).fit(places[place], target, weight)
    assert model.certificate_.primal == pytest.approx(wanted.certificate_.primal, rel=1e-9)
    assert wanted.certificate_.dual <= model.certificate_.primal * (1 + 1e-13)
    np.testing.assert_allclose(model.predict(X) == wanted.predict(X) if name == "classifier" else 1, 1)
    np.testing.assert_allclose(model.coef_, wanted.coef_, atol=1e-4)
    assert model.score(places[place], target, weight) == pytest.approx(wanted.score(X, target, weight), abs=1e-4)
    assert (model.n_features_in_, model.n_tokens_in_) == (4, 5)
    assert (model.traffic_ is None) == (limit is None)


def test_passes_are_told(data, places):
    X, y, labels, _ = data
    began = time.perf_counter()
    model = clone(ESTIMATORS["regressor"]).set_params(memory_limit=LIMIT).fit(places["file"], y)
    some_rows = 0.2  # of which alpha_max looks at the size
    assert 2 <= model.traffic_.passes <= 2 + some_rows
    assert model.traffic_.total_bytes == X.nbytes
    assert model.traffic_.bytes_per_second > 0
    assert 0 < model.traffic_.waited_seconds < time.perf_counter() - began
    model = clone(ESTIMATORS["classifier"]).set_params(memory_limit=LIMIT).fit(places["file"], labels)
    assert model.traffic_.passes > 4


@pytest.mark.parametrize("kind", ["int16", "uint16", "int32"])
@pytest.mark.parametrize(
    "model", [ConvexAttentionRegressor(alpha=0.05, tol=0.1), ConvexProbeRegressor(alpha=0.5, tol=0.1, random_state=0)]
)
def test_precision_of_integers_on_a_disk_is_that_of_their_width_within_any_limit(model, kind, tmp_path):
    X = np.random.default_rng(0).integers(0, 9, (60, 3, 2)).astype(kind)
    np.save(tmp_path / "X.npy", X)
    wanted = np.float32 if X.itemsize == 2 else np.float64
    for place in (tmp_path / "X.npy", np.load(tmp_path / "X.npy", mmap_mode="r")):
        for limit in (None, LIMIT // 100):
            assert clone(model).set_params(memory_limit=limit).fit(place, X[:, 0, 0]).coef_.dtype == wanted
    assert clone(model).fit(X, X[:, 0, 0]).coef_.dtype == np.float64  # in memory


def test_paths_and_cross_validation(data, places):
    X, y, labels, _ = data
    got = ConvexAttentionRegressor(tol=1e-10, memory_limit=LIMIT).path(places["shards"], y, n_alphas=3)
    wanted = ConvexAttentionRegressor(tol=1e-10).path(X, y, n_alphas=3)
    np.testing.assert_allclose(got.coefs, wanted.coefs, atol=1e-4)
    for scoring in (None, "accuracy"):
        cv = ConvexAttentionClassifierCV(alphas=2, cv=2, tol=1e-8, scoring=scoring)
        wanted = clone(cv).fit(X, labels)
        got = cv.set_params(memory_limit=LIMIT).fit(places["shards"], labels)
        np.testing.assert_allclose(got.score_path_, wanted.score_path_, atol=1e-3)
        assert got.alpha_ == pytest.approx(wanted.alpha_)


@pytest.mark.parametrize("kind", ["shards", "npz", "npy", "safetensors", "h5", "zarr"])
@pytest.mark.parametrize("name", ["regressor", "classifier"])
def test_targets_and_weights_may_be_paths(name, kind, data, tmp_path):
    X, y, labels, weight = data
    folder, arrays = tmp_path / f"data.{kind}", {"X": X, "y": y.copy(), "w": weight}
    if name == "classifier":
        arrays["y"] = labels if kind[:2] == "np" else (y > 0).astype(np.int64)
    target, weights = arrays["y"], f"{folder}:w"
    if kind == "shards":
        write_shards(
            folder, lambda rows: {key: torch.as_tensor(a[rows]) for key, a in arrays.items()}, 600, shard_rows=70
        )
    elif kind == "npz":
        np.savez(folder, **arrays)
    elif kind == "npy":
        np.save(folder, target)
        np.save(tmp_path / "w.npy", weight)
        weights = tmp_path / "w.npy"
    elif kind == "safetensors":
        pytest.importorskip("safetensors.numpy").save_file(arrays, folder)
    elif kind == "h5":
        with pytest.importorskip("h5py").File(folder, "w") as file:
            for key, a in arrays.items():
                file[key] = a
    else:
        group = pytest.importorskip("zarr").open_group(str(folder), mode="w")
        for key, a in arrays.items():
            group[key] = a
    wanted = clone(ESTIMATORS[name]).fit(X, target, weight)
    model = clone(wanted).fit(X if kind == "npy" else folder, folder, weights)  # the array called y
    np.testing.assert_array_equal(model.coef_, wanted.coef_)
    assert model.score(X, folder, weights) == wanted.score(X, target, weight)
    if kind != "npy":
        np.testing.assert_array_equal(clone(wanted).fit(X, f"{folder}:y", weight).coef_, wanted.coef_)
        with pytest.raises(ValueError, match=rf"y='.*data\.{kind}:labels' .*no array 'labels'"):
            model.fit(X, f"{folder}:labels")


def test_targets_at_paths_in_paths_and_cross_validation(data, tmp_path):
    X, y, _, _ = data
    np.savez(tmp_path / "data.npz", X=X, y=y, which=np.arange(600) % 3)
    place = str(tmp_path / "data.npz")
    model = ConvexAttentionRegressor()
    np.testing.assert_array_equal(model.path(place, place, n_alphas=3).coefs, model.path(X, y, n_alphas=3).coefs)
    cv = ConvexAttentionRegressorCV(alphas=3, cv=GroupKFold(3))
    wanted = clone(cv).fit(X, y, groups=np.arange(600) % 3)
    np.testing.assert_array_equal(cv.fit(X, place, groups=f"{place}:which").score_path_, wanted.score_path_)


def test_targets_at_paths_that_cannot_be_read_are_named(data, tmp_path):
    X, _, labels, _ = data
    np.save(tmp_path / "objects.npy", labels.astype(object))
    for model in (ConvexAttentionClassifier(), GreedyConvexTransformerClassifier()):
        with pytest.raises(ValueError, match=r"y must hold .* or be the path .* no folder '.*nowhere\.npy'"):
            model.fit(X, tmp_path / "nowhere.npy")
        with pytest.raises(ValueError, match=r"y='.*objects\.npy' cannot be read: it holds Python objects"):
            model.fit(X, tmp_path / "objects.npy")
    np.save(tmp_path / "labels.npy", labels)
    with pytest.raises(ValueError, match=r"labels\.npy:half' holds no array 'half'"):
        model.fit(X, f"{tmp_path}/labels.npy:half")
    with pytest.importorskip("h5py").File(tmp_path / "labels.h5", "w") as file:
        file["y"] = labels.tolist()  # would be labels of bytes, other than those in memory
    with pytest.raises(ValueError, match=r"labels\.h5' holds no array 'y' that can be read .*give the array itself"):
        model.fit(X, tmp_path / "labels.h5")


@pytest.mark.parametrize(
    ("model", "dtype", "flat"),
    covering(
        [
            ConvexAttentionRegressor(alpha=0.05),
            ConvexAttentionClassifier(alpha=0.02),
            ConvexAttentionRegressor(alpha=0.1, activation="gated_relu", n_gates=2, random_state=0),
            ConvexAttentionRegressorCV(alphas=2, cv=2),
            ConvexSequenceRegressor(alpha=0.05),
            GreedyConvexTransformerRegressor(n_layers=2, alpha=0.05, random_state=0),
        ],
        [torch.float16, torch.bfloat16],
        [False, True],
    ),
    ids=lambda value: type(value).__name__ if hasattr(value, "fit") else str(value),
)
def test_half_precision_is_fitted_in_single_precision_wherever_it_is(model, dtype, flat, data, tmp_path):
    X, y, labels, _ = (array[:200] for array in data)
    tensor, target = torch.as_tensor(X).to(dtype), labels if "Classifier" in type(model).__name__ else y
    tensor = tensor.flatten(1) if flat else tensor
    write_shards(tmp_path / "shards", lambda rows: {"X": tensor[rows]}, len(X), shard_rows=120)
    places = [tensor, tmp_path / "shards"]
    if dtype == torch.float16:  # which numpy has
        np.save(tmp_path / "X.npy", tensor.numpy())
        places += [tensor.numpy(), np.load(tmp_path / "X.npy", mmap_mode="r")]
    X = tensor.float().numpy()
    single, double = (clone(model).fit(X.astype(precision), target) for precision in (np.float32, np.float64))
    for where in places:
        fitted = clone(model).fit(where, target)
        for of, wanted in ((fitted, single), (double, double)):
            outputs = outputs_of(of, where)
            assert outputs.dtype == np.float32
            np.testing.assert_allclose(outputs, outputs_of(wanted, X), rtol=1e-5, atol=1e-5)


def test_a_file_of_two_dimensions_has_tokens_of_width_one(data, tmp_path):
    X, y = data[0].reshape(600, 20), data[1]
    np.save(tmp_path / "X.npy", X)
    wanted = ConvexAttentionRegressor(alpha=0.05, tol=1e-10).fit(X, y)
    for limit in (None, LIMIT):
        model = clone(wanted).set_params(memory_limit=limit).fit(str(tmp_path / "X.npy"), y)
        assert model.coef_.shape == wanted.coef_.shape
        assert model.n_features_in_ == 20


@pytest.mark.parametrize("limit", [None, LIMIT], ids=["held", "streamed"])
def test_a_refit_on_a_file_forgets_the_names_of_columns(limit, data, tmp_path):
    X, y = data[0].reshape(600, 20), data[1]
    np.save(tmp_path / "X.npy", X)
    frame = pd.DataFrame(X, columns=[f"column {i}" for i in range(20)])
    model = ConvexAttentionRegressor(alpha=0.05, memory_limit=limit).fit(frame, y)
    assert list(model.feature_names_in_) == list(frame)
    model.fit(tmp_path / "X.npy", y)
    assert not hasattr(model, "feature_names_in_")
    model.predict(X)  # without a warning of names that are missing


@pytest.mark.parametrize("limit", [None, 20_000], ids=["held", "streamed"])
@pytest.mark.parametrize("place", ["memory", "memory map", "file"])
def test_tokens_of_one_feature_are_predicted_where_they_were_not_fitted(place, limit, data, tmp_path):
    X, y, _, _ = data
    X = X[:, :, :1]
    np.save(tmp_path / "X.npy", X)
    places = {"memory": X, "memory map": np.load(tmp_path / "X.npy", mmap_mode="r"), "file": tmp_path / "X.npy"}
    places["tensor"] = torch.as_tensor(X)
    model = ConvexAttentionRegressor(alpha=0.05, memory_limit=limit).fit(places[place], y)
    assert model.coef_.shape == ((5,) if place == "file" else (5, 1))
    for other in places.values():
        np.testing.assert_allclose(model.predict(other), model.predict(X), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("limit", [None, 20_000], ids=["held", "streamed"])
def test_scores_of_folds_of_a_file_of_two_dimensions(limit, data, tmp_path):
    X, y = data[0].reshape(600, 20), data[1]
    np.save(tmp_path / "X.npy", X)
    halves = np.arange(300), np.arange(-300, 0)
    model = ConvexAttentionRegressorCV(alphas=2, cv=[halves, halves[::-1]], scoring="r2", tol=1e-8, memory_limit=limit)
    wanted = clone(model).fit(X, y).score_path_
    np.testing.assert_allclose(model.fit(tmp_path / "X.npy", y).score_path_, wanted, atol=1e-3)


def test_a_saved_model_predicts_from_a_disk(data, places, tmp_path):
    X, y, _, _ = data
    model = ConvexAttentionRegressor(alpha=0.05, memory_limit=LIMIT).fit(places["file"], y)
    save_model(model, tmp_path / "model.npz")
    again = load_model(tmp_path / "model.npz")
    assert again.memory_limit == LIMIT
    np.testing.assert_allclose(again.predict(places["file"]), model.predict(X))


def test_resume_goes_on_and_costs_nothing_when_done(data, places, tmp_path):
    _, _, labels, _ = data
    file = tmp_path / "resume.npz"
    model = ConvexAttentionClassifier(alpha=0.02, memory_limit=LIMIT, tol=1e-2).fit(places["file"], labels, resume=file)
    finer = clone(model).set_params(tol=1e-8).fit(places["file"], labels, resume=file)
    assert finer.certificate_.primal <= model.certificate_.primal
    again = clone(finer).fit(places["file"], labels, resume=file)
    assert again.n_iter_ == 0
    assert again.certificate_.primal == finer.certificate_.primal
    with pytest.raises(ValueError, match="saved for another program"):
        clone(model).set_params(alpha=0.01, penalty="nuclear").fit(places["file"], labels[::-1], resume=file)


def test_limits_may_have_units(data, places):
    X, y, _, _ = data
    for model, number, text in (
        (ConvexAttentionRegressor(alpha=0.05), LIMIT, "180 kB"),
        (GreedyConvexTransformerRegressor(alpha=0.05, n_gates=2, random_state=0), 2**18, "256 KiB"),
        (ConvexSequenceRegressor(alpha=0.05), 2**17, "0.125 MiB"),
    ):
        target = X[:, :, :1] if isinstance(model, ConvexSequenceRegressor) else y
        wanted = clone(model).set_params(memory_limit=number).fit(places["file"], target)
        got = clone(model).set_params(memory_limit=text).fit(places["file"], target)
        assert got.memory_limit == text
        assert got.traffic_.passes > 0  # larger data than the limit
        np.testing.assert_array_equal(got.predict(places["file"]), wanted.predict(places["file"]))


@pytest.mark.parametrize("limit", [0, -5, 2.5, "much"])
def test_limits_that_are_none(limit, data, places):
    with pytest.raises(ValueError, match="memory_limit must be None or a positive number of bytes"):
        ConvexAttentionRegressor(memory_limit=limit).fit(places["file"], data[1])


def test_mistakes(data, places, tmp_path):
    X, y, _, _ = data
    with pytest.raises(FileNotFoundError, match=r"nothing\.npy"):
        ConvexAttentionRegressor().fit("nothing.npy", y)
    with pytest.raises(ValueError, match="y must have"):
        ConvexAttentionRegressor(memory_limit=LIMIT).fit(places["file"], y[:-1])
    with pytest.raises(ValueError, match="as in fit"):
        ConvexAttentionRegressor().fit(X[:, :3], y).predict(places["file"])
    bad = X.copy()
    bad[211, 0, 0] = np.nan
    write_shards(tmp_path / "bad", lambda rows: {"X": bad[rows]}, len(X), shard_rows=100)
    with pytest.raises(ValueError, match=r"NaN or infinite values in row 11 of shard 'part-00002"):
        ConvexAttentionRegressor(memory_limit=LIMIT).fit(tmp_path / "bad", y)
    with pytest.raises(ValueError, match="memory_limit"):
        ConvexAttentionRegressor(
            activation="gated_relu", gates="difference", n_gates=4, memory_limit=80_000, random_state=0
        ).fit(places["file"], y)
    with pytest.raises(ValueError, match="as in fit"):
        GreedyConvexTransformerRegressor(n_gates=2).fit(X[:, :3], y).predict(places["file"])
    with pytest.raises(ValueError, match="y must have"):
        ConvexSequenceRegressor(memory_limit=LIMIT).fit(places["file"], X[:-1])
    for estimator, target in ((GreedyConvexTransformerRegressor(n_gates=2), y), (ConvexSequenceRegressor(), X)):
        with pytest.raises(ValueError, match=r"NaN or infinite values in row 11 of shard 'part-00002"):
            estimator.set_params(memory_limit=LIMIT).fit(tmp_path / "bad", target)


@pytest.mark.parametrize(
    ("loss", "limit", "place"), covering(LAYERS, [None, LIMIT], ["file", "memory map", "shards", "chunks"])
)
def test_layers_are_those_in_memory(loss, limit, place, data, places, in_memory):
    X, _, _, weight = data
    wanted, target = in_memory(LAYERS[loss])
    model = clone(wanted).set_params(memory_limit=limit).fit(places[place], target, weight)
    assert len(model.certificates_) == 2
    for got, other in zip(model.certificates_, wanted.certificates_, strict=True):
        assert got.primal == pytest.approx(other.primal, rel=1e-9)
        assert got.dual <= got.primal * (1 + 1e-13)
    for layer, other in zip(model.layers_, wanted.layers_, strict=True):
        assert np.array_equal(layer.gates_.u1, other.gates_.u1)
        assert np.array_equal(layer.gates_.u2, other.gates_.u2)
    assert model.score(places[place], target, weight) == pytest.approx(wanted.score(X, target, weight), abs=1e-4)
    assert np.array_equal(model.predict(places[place]), model.predict(X)) or loss != "logistic"
    assert (model.traffic_ is None) == (limit is None)


@pytest.mark.parametrize("limit", [None, LIMIT], ids=["held", "streamed"])
def test_layers_of_a_file_of_two_dimensions(limit, data, tmp_path):
    X, y = data[0].reshape(600, 20), data[1]
    np.save(tmp_path / "X.npy", X)
    wanted = GreedyConvexTransformerRegressor(alpha=0.05, **DEEP).fit(X, y)
    model = clone(wanted).set_params(memory_limit=limit).fit(str(tmp_path / "X.npy"), y)
    np.testing.assert_allclose(model.predict(str(tmp_path / "X.npy")), wanted.predict(X), atol=1e-5)
    np.testing.assert_allclose(model.predict(X), wanted.predict(X), atol=1e-5)
    assert [layer.coef_.shape for layer in model.layers_] == [layer.coef_.shape for layer in wanted.layers_]
    save_model(model, tmp_path / "model.npz")
    again = load_model(tmp_path / "model.npz")
    np.testing.assert_allclose(again.predict(str(tmp_path / "X.npy")), model.predict(X), rtol=1e-9, atol=1e-9)


def test_gates_of_later_layers_are_generated_as_in_memory(data, places):
    X, y, _, _ = data
    wanted = GreedyConvexTransformerRegressor(alpha=0.1, gates="generated", **DEEP).fit(X, y)
    model = clone(wanted).set_params(memory_limit=LIMIT).fit(places["file"], y)
    assert model.traffic_ is not None
    for layer, other in zip(model.layers_, wanted.layers_, strict=True):
        assert layer.certificate_.primal == pytest.approx(other.certificate_.primal, rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "form", "limit", "place"),
    covering(
        ["squared", "huber"],
        ["single_row", "stochastic", "substochastic"],
        [None, LIMIT],
        ["file", "shards", "chunks"],
    ),
)
def test_sequences_are_those_in_memory(loss, form, limit, place, data, places, in_memory):
    X, _, _, weight = data
    wanted, Y = in_memory(SEQUENCES[loss, form])
    model = clone(wanted).set_params(memory_limit=limit).fit(places[place], Y, weight)
    assert model.certificate_.primal == pytest.approx(wanted.certificate_.primal, rel=1e-9)
    assert wanted.certificate_.dual <= model.certificate_.primal * (1 + 1e-13)
    assert model.certificate_.dual <= wanted.certificate_.primal * (1 + 1e-13)
    np.testing.assert_allclose(model.predict(places[place]), wanted.predict(X), atol=1e-3)
    assert model.score(places[place], Y, weight) == pytest.approx(wanted.score(X, Y, weight), abs=1e-4)
    assert (model.traffic_ is None) == (limit is None)


def print_peak(kind, limit, path):
    """Print the memory of a fit beyond that of the process before it."""
    memory = PeakMemory()
    X = np.load(path, mmap_mode="r")
    y = X[:, 0, 0] - X[:, 1, 1] + np.random.default_rng(0).standard_normal(len(X))
    estimator, target = {
        "squared": (ConvexAttentionRegressor(alpha=0.02), y),
        "logistic": (ConvexAttentionClassifier(alpha=0.02), y > 0),
        "poisson": (ConvexAttentionRegressor(loss="poisson", alpha=0.02), np.exp(y.clip(max=2))),
        "layers": (GreedyConvexTransformerRegressor(alpha=0.02, n_gates=1, random_state=0), y),
        "sequences": (ConvexSequenceRegressor(alpha=0.05), X[:, ::-1, :1].astype(np.float64)),
    }[kind]
    estimator.fit(X[:500], target[:500])  # what is loaded on first use
    for dtype in (torch.float32, torch.float64):  # measured once a process, on matrices of 33 MB
        machine_rates(dtype)
    with memory:
        estimator.set_params(memory_limit=limit).fit(path, target)
    certificates = getattr(estimator, "certificates_", None) or [estimator.certificate_]
    assert all(certificate.relative_gap <= 1e-4 for certificate in certificates)
    print(memory.peak)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("kind", "limit"),  # a Gram matrix and its copies take 25 MB, so that the smaller one leaves a metric of low rank
    [(kind, 40 * 2**20) for kind in ("squared", "logistic", "layers", "sequences")]
    + [(kind, 16 * 2**20) for kind in ("squared", "logistic")],
)
def test_memory_stays_below_the_limit(kind, limit, tmp_path):
    X = np.lib.format.open_memmap(tmp_path / "X.npy", "w+", np.float32, (20_000, 8, 64))  # 41 MB
    X[:] = np.random.default_rng(1).standard_normal(X.shape, dtype=np.float32)
    X.flush()
    # In its own process, and the allocator gives freed blocks back: what earlier work left would count, too.
    process = Fork(tmp_path / "printed", print_peak, kind, limit, str(X.filename))
    printed = process.output(timeout=300)
    assert not process.failed, printed
    assert 0 < int(printed.splitlines()[-1]) <= limit


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("kind", "n_tokens", "limit"),  # eight Gram matrices of the samples take 23 MB
    [("squared", 400, 36), ("logistic", 400, 36), ("poisson", 250, 36), ("logistic", 400, 24)],
)
def test_memory_of_few_samples_stays_below_the_limit_and_some_coefficients(kind, n_tokens, limit, tmp_path):
    X = np.lib.format.open_memmap(tmp_path / "X.npy", "w+", np.float32, (600, n_tokens, 64))  # 61 or 38 MB
    rng = np.random.default_rng(1)
    X[:] = rng.standard_normal(X.shape, dtype=np.float32) + rng.standard_normal((600, 1, 64), dtype=np.float32)
    X.flush()
    process = Fork(tmp_path / "printed", print_peak, kind, limit * 10**6, str(X.filename))
    printed = process.output(timeout=300)
    assert not process.failed, printed
    assert 0 < int(printed.splitlines()[-1]) <= limit * 10**6 + 26 * 8 * n_tokens * 64


@pytest.mark.parametrize("name", ESTIMATORS)
def test_streams_to_a_device(name, data, places, accelerator):
    X, y, labels, weight = data
    target = labels if name == "classifier" else y
    wanted = clone(ESTIMATORS[name]).set_params(tol=1e-6).fit(X, target, weight)
    model = clone(wanted).set_params(memory_limit=LIMIT, device=accelerator).fit(places["file"], target, weight)
    assert model.certificate_.primal == pytest.approx(wanted.certificate_.primal, rel=1e-6)


def test_rows_taken_from_chunks_do_not_keep_the_chunks_in_memory():
    held = []

    class Views(Source):
        shape, dtype = (100, 1, 1), torch.float32

        def read(self, rows):
            held[:] = [each for each in held if not each.expired()]
            assert len(held) <= 1
            chunk = torch.zeros(1000, 1, 1)
            held.append(StorageWeakRef(chunk.untyped_storage()))
            return chunk[rows]

    assert Views().take(torch.arange(0, 100, 10)).shape == (10, 1, 1)

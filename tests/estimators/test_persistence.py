"""Saved models come back the same."""

import dataclasses
import re
import signal
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import RegressorMixin
from sklearn.metrics import make_scorer, r2_score
from sklearn.model_selection import KFold

from convexformer import (
    ConvexAttentionClassifier,
    ConvexAttentionClassifierCV,
    ConvexAttentionRegressor,
    ConvexAttentionRegressorCV,
    ConvexSequenceRegressor,
    Gates,
    GaussianGates,
    GreedyConvexTransformerClassifier,
    GreedyConvexTransformerRegressor,
    load_model,
    save_model,
)
from convexformer.estimators import persistence
from convexformer.estimators.tokens import TokenEstimator
from convexformer.programs.sequence import get_form
from convexformer.solvers import LOSSES, Fista, GroupNuclear, Huber, Squared
from convexformer.validation import check_tokens
from convexformer_solvers.io.npz import read_archive, write_archive

rng = np.random.default_rng(0)
X3, X2 = rng.normal(size=(50, 4, 2)), rng.normal(size=(50, 4))
LABELS = np.where(X3[:, 1, 0] > 0, "yes", "no")
GATES = (rng.normal(size=(5, 4)), rng.normal(size=(5, 2)))

CASES = {
    "regression": (ConvexAttentionRegressor(alpha=0.05), X3, X3[:, 0, 0]),
    "two-dimensional": (ConvexAttentionRegressor(alpha=0.05), X2, X2[:, :2]),
    "nuclear": (ConvexAttentionRegressor(alpha=0.05, penalty="nuclear"), X3, X3[:, 0] @ np.ones((2, 3))),
    "huber": (ConvexAttentionRegressor(alpha=0.05, loss="huber"), X3, X3[:, 0, 0]),
    "objects": (ConvexAttentionRegressor(alpha=0.05, loss=Huber(0.5), penalty=GroupNuclear()), X3, X3[:, 0, 0]),
    "float32": (ConvexAttentionRegressor(alpha=0.05), X3.astype(np.float32), X3[:, 0, 0]),
    "labels": (ConvexAttentionClassifier(class_weight="balanced"), X3, LABELS),
    "gated": (ConvexAttentionClassifier(activation="gated_relu", n_gates=5, random_state=0), X3, LABELS),
    "given gates": (ConvexAttentionClassifier(activation="gated_relu", gates=GATES), X3, LABELS),
    "softmax": (ConvexAttentionClassifier(loss="softmax", penalty="nuclear"), X3, LABELS),
    "cv": (ConvexAttentionClassifierCV(alphas=3, cv=2), X3, LABELS),
}


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path):
    model, X, y = CASES[case]
    model.fit(X, y)
    save_model(model, tmp_path / "m.npz")
    again = load_model(tmp_path / "m.npz")
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    np.testing.assert_array_equal(again.coef_, model.coef_)
    np.testing.assert_array_equal(again.token_norms_, model.token_norms_)
    assert again.heads_.objective(X, y) == model.heads_.objective(X, y)
    assert again.certificate_ == model.certificate_
    assert (again.alpha_max_, again.n_iter_, again.status_) == (model.alpha_max_, model.n_iter_, model.status_)
    given = {"gates"} if case == "given gates" else set()
    for name in set(model.get_params()) - given:
        assert again.get_params()[name] == model.get_params()[name]
    for name in ("alphas_", "score_path_") if case == "cv" else ():
        np.testing.assert_array_equal(getattr(again, name), getattr(model, name))
    with pytest.raises(ValueError, match="X"):
        again.predict(X[:, :3])


def test_labels_of_a_data_frame_are_saved_as_text(tmp_path):
    labels = np.where(X3[:, 0, 0] > 0, "yes", "no").astype(object)
    model = ConvexAttentionClassifier(alpha=0.05).fit(X3, labels)
    save_model(model, tmp_path / "m.npz")
    again = load_model(tmp_path / "m.npz")
    np.testing.assert_array_equal(again.predict(X3), model.predict(X3))
    assert again.classes_.tolist() == ["no", "yes"]


@pytest.mark.parametrize("labels", [(-1, 1), (np.int64(3), np.int64(5)), (False, True), ("no", "yes")])
def test_weights_of_any_labels_are_kept(labels, tmp_path):
    y = np.array(labels)[(X3[:, 0, 0] > 0).astype(int)]
    model = ConvexAttentionClassifier(alpha=0.05, class_weight={labels[0]: 1.0, labels[1]: 3.0}).fit(X3, y)
    save_model(model, tmp_path / "m.npz")
    again = load_model(tmp_path / "m.npz")
    assert again.class_weight == model.class_weight
    np.testing.assert_allclose(again.fit(X3, y).coef_, model.coef_, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, torch.float32, "float32", np.dtype("float32")])
def test_precision_and_device_may_be_objects(dtype, tmp_path):
    model = ConvexAttentionRegressor(alpha=0.05, dtype=dtype, device=torch.device("cpu")).fit(X3, X3[:, 0, 0])
    save_model(model, tmp_path / "m.npz")
    again = load_model(tmp_path / "m.npz")
    assert (again.dtype, again.device) == ("float32", "cpu")
    np.testing.assert_array_equal(again.fit(X3, X3[:, 0, 0]).coef_, model.coef_)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    model = ConvexAttentionRegressor(alpha=0.05).fit(X3, X3[:, 0, 0])
    with pytest.raises(FileNotFoundError, match=r"no folder at .*absent to save m\.npz in"):
        save_model(model, tmp_path / "absent" / "m.npz")


def test_names_of_features_are_kept(tmp_path):
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(X3[:, :, 0], columns=list("abcdefgh")[: X3.shape[1]])
    model = ConvexAttentionRegressor(alpha=0.05).fit(frame, X3[:, 0, 0])
    save_model(model, tmp_path / "m.npz")
    again = load_model(tmp_path / "m.npz")
    np.testing.assert_array_equal(again.feature_names_in_, model.feature_names_in_)
    np.testing.assert_array_equal(again.predict(frame), model.predict(frame))
    with pytest.raises(ValueError, match="feature names"):
        again.predict(frame[frame.columns[::-1]])


def test_objects_are_refused_before_anything_is_written(tmp_path):
    labels = np.array([None, 3], dtype=object)[(X3[:, 0, 0] > 0).astype(int)]
    model = ConvexAttentionClassifier(alpha=0.05).fit(X3, (X3[:, 0, 0] > 0).astype(int))
    model._targets = dataclasses.replace(model._targets, classes=labels[:2])
    with pytest.raises(ValueError, match="cannot be saved, as they are objects"):
        save_model(model, tmp_path / "m.npz")
    with pytest.raises(TypeError, match=r"\['x'\] hold objects"):
        write_archive(tmp_path / "m.npz", "something", {}, {"x": labels})
    assert not list(tmp_path.iterdir())


def test_labels_that_a_file_does_not_hold_are_named(tmp_path):
    labels = np.array(["a\0", "a"], dtype=object)[(X3[:, 0, 0] > 0).astype(int)]
    model = ConvexAttentionClassifier(alpha=0.05).fit(X3, labels)
    with pytest.raises(ValueError, match=r"the labels \['a', 'a\\x00'\] cannot be saved, as text of numpy loses null"):
        save_model(model, tmp_path / "m.npz")


def test_saving_twice_replaces_the_file_and_leaves_nothing_else(tmp_path):
    model = ConvexAttentionRegressor(alpha=0.05).fit(X3, X3[:, 0, 0])
    save_model(model, tmp_path / "m.npz")
    save_model(model.set_params(alpha=0.5).fit(X3, X3[:, 0, 0]), tmp_path / "m.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["m.npz"]
    assert load_model(tmp_path / "m.npz").alpha == 0.5


@pytest.mark.parametrize(
    "parameters",
    [
        {"solver": Fista()},
        {"callback": lambda progress: False},
        {"cv": KFold(2)},
        {"scoring": make_scorer(r2_score), "random_state": np.random.RandomState(0)},
    ],
)
def test_a_model_is_saved_without_objects_that_predictions_do_not_need(parameters, tmp_path):
    model = ConvexAttentionRegressorCV(alphas=2, **{"cv": 2, **parameters}).fit(X3, X3[:, 0, 0])
    with pytest.warns(UserWarning, match=re.escape(f"saved without the parameters {sorted(parameters)}")):
        save_model(model, tmp_path / "m.npz")
    again = load_model(tmp_path / "m.npz")
    np.testing.assert_array_equal(again.predict(X3), model.predict(X3))
    defaults = ConvexAttentionRegressorCV().get_params()
    assert {name: again.get_params()[name] for name in parameters} == {name: defaults[name] for name in parameters}


@pytest.mark.parametrize("name", ["tol", "dtype"])
def test_a_parameter_that_is_needed_and_cannot_be_saved_is_named(name, tmp_path):
    model = ConvexAttentionRegressor(alpha=0.05).fit(X3, X3[:, 0, 0]).set_params(**{name: object()})
    with pytest.raises(ValueError, match=f"parameter {name}="):
        save_model(model, tmp_path / "m.npz")
    assert list(tmp_path.iterdir()) == []


class OwnHuber(Huber):
    pass


class PlainHuber(Huber):  # no dataclass of its own
    def __init__(self, delta):
        super().__init__(delta)


@pytest.mark.parametrize("kind", [OwnHuber, PlainHuber])
def test_a_loss_of_ones_own_is_saved_once_registered(kind, tmp_path, monkeypatch):
    model = ConvexAttentionRegressor(alpha=0.05, loss=kind(0.5)).fit(X3, X3[:, 0, 0])
    with pytest.raises(ValueError, match=r"Huber\(delta=0.5\) cannot be saved.*LOSSES"):
        save_model(model, tmp_path / "m.npz")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setitem(LOSSES, "own_huber", kind)
    save_model(model, tmp_path / "m.npz")
    again = load_model(tmp_path / "m.npz")
    assert (again.loss, again.loss_) == (kind(0.5), kind(0.5))
    np.testing.assert_array_equal(again.predict(X3), model.predict(X3))


@dataclasses.dataclass(frozen=True)
class TwoWidths(Huber):
    widths: tuple[float, float] = (0.5, 2.0)

    @cached_property
    def factor(self):
        return torch.tensor(self.widths)


def test_a_part_of_ones_own_comes_back_equal_with_tuples_and_without_what_it_has_cached(tmp_path, monkeypatch):
    monkeypatch.setitem(LOSSES, "two_widths", TwoWidths)
    loss = TwoWidths(0.5, widths=(0.25, 1.0))
    assert loss.factor.tolist() == [0.25, 1.0]
    model = ConvexAttentionRegressor(alpha=0.05, loss=loss).fit(X3, X3[:, 0, 0])
    save_model(model, tmp_path / "m.npz")
    again = load_model(tmp_path / "m.npz")
    assert again.loss == again.loss_ == loss
    assert hash(again.loss) == hash(loss)


def test_a_gate_source_is_saved_as_its_gates(tmp_path):
    model = ConvexAttentionRegressor(alpha=0.05, activation="gated_relu", gates=GaussianGates(6), random_state=1)
    model.fit(X3, X3[:, 0, 0])
    save_model(model, tmp_path / "m.npz")
    again = load_model(tmp_path / "m.npz")
    np.testing.assert_array_equal(again.gates.u1, model.gates_.u1)
    # A refit of the loaded model meets the same gates.
    np.testing.assert_allclose(again.fit(X3, X3[:, 0, 0]).coef_, model.coef_, atol=1e-12)


LAYERS = {
    "regression": (GreedyConvexTransformerRegressor(0.05, n_layers=3, n_gates=3, random_state=0), X3, X3[:, 0, 0]),
    "two-dimensional": (GreedyConvexTransformerRegressor(0.05, n_gates=3, random_state=0), X2, X2[:, :2]),
    "float32": (
        GreedyConvexTransformerRegressor(0.05, n_gates=3, random_state=0),
        X3.astype(np.float32),
        X3[:, 0, 0],
    ),
    "one layer": (GreedyConvexTransformerRegressor(0.05, n_layers=1, n_gates=3, random_state=0), X3, X3[:, 0, 0]),
    "labels": (
        GreedyConvexTransformerClassifier(0.05, n_gates=3, class_weight="balanced", random_state=0),
        X3,
        LABELS,
    ),
    "three classes": (
        GreedyConvexTransformerClassifier(0.05, penalty="nuclear", gates=GATES),
        X3,
        np.digitize(X3[:, 1, 0], [-0.5, 0.5]),
    ),
}


@pytest.mark.parametrize("case", LAYERS)
def test_round_trip_of_layers(case, tmp_path):
    model, X, y = LAYERS[case]
    model.fit(X, y)
    save_model(model, tmp_path / "m.npz")
    again = load_model(tmp_path / "m.npz")
    assert type(again) is type(model)
    assert again.predict(X).dtype == model.predict(X).dtype
    for before, after in zip(model.staged_predict(X), again.staged_predict(X), strict=True):
        np.testing.assert_array_equal(after, before)
    if hasattr(model, "predict_proba"):
        np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    assert again.certificates_ == model.certificates_
    assert again.n_iter_ == model.n_iter_
    for before, after in zip(model.layers_, again.layers_, strict=True):
        np.testing.assert_array_equal(after.coef_, before.coef_)
        assert (after.status_, after.alpha_max_) == (before.status_, before.alpha_max_)
    given = {"gates"} if case == "three classes" else set()
    for name in set(model.get_params()) - given:
        assert again.get_params()[name] == model.get_params()[name]
    # A refit meets the same gates.
    np.testing.assert_allclose(again.fit(X, y).layers_[-1].coef_, model.layers_[-1].coef_, atol=1e-6)
    with pytest.raises(ValueError, match="X"):
        again.predict(X[:, :3])


def test_given_gates_of_layers_are_saved(tmp_path):
    model = GreedyConvexTransformerRegressor(0.05, gates=Gates(*GATES)).fit(X3, X3[:, 0, 0])
    save_model(model, tmp_path / "m.npz")
    again = load_model(tmp_path / "m.npz")
    np.testing.assert_array_equal(again.gates.u1, GATES[0])
    np.testing.assert_array_equal(again.gates.u2, GATES[1])


def test_layers_of_another_device_are_saved(accelerator, tmp_path):
    model = GreedyConvexTransformerRegressor(0.05, n_gates=3, random_state=0, device=accelerator)
    save_model(model.fit(X3, X3[:, 0, 0]), tmp_path / "m.npz")
    np.testing.assert_allclose(load_model(tmp_path / "m.npz").predict(X3), model.predict(X3), atol=1e-6)


def test_a_gate_source_of_layers_cannot_be_saved(tmp_path):
    model = GreedyConvexTransformerRegressor(0.05, gates=GaussianGates(3), random_state=0).fit(X3, X3[:, 0, 0])
    with pytest.raises(ValueError, match=r"parameter gates=GaussianGates.*by name"):
        save_model(model, tmp_path / "m.npz")


def test_a_path_among_the_parameters_is_saved_as_text(tmp_path):
    model = ConvexAttentionClassifierCV(alphas=2, cv=2, resume=tmp_path / "folds").fit(X3, LABELS)
    save_model(model, tmp_path / "m.npz")
    assert load_model(tmp_path / "m.npz").resume == str(tmp_path / "folds")


def test_gates_that_a_model_does_not_use_keep_it_from_nothing(tmp_path):
    model = ConvexAttentionRegressor(alpha=0.05).fit(X3, X3[:, 0, 0]).set_params(gates=GaussianGates(4))
    save_model(model, tmp_path / "model.npz")
    np.testing.assert_array_equal(load_model(tmp_path / "model.npz").predict(X3), model.predict(X3))


def test_a_form_of_sequences_may_be_an_object(tmp_path):
    model = ConvexSequenceRegressor(0.05, form=get_form("stochastic")).fit(X3, X3[:, :2, :1])
    save_model(model, tmp_path / "model.npz")
    again = load_model(tmp_path / "model.npz")
    assert again.form == "stochastic"
    np.testing.assert_array_equal(again.predict(X3), model.predict(X3))


def test_other_files_are_refused(tmp_path):
    file = tmp_path / "x.npz"
    save_model(ConvexAttentionRegressor(alpha=0.05).fit(X3, X3[:, 0, 0]), file)
    whole = file.read_bytes()
    np.savez(file, X=np.ones(3))
    other = file.read_bytes()
    np.save(tmp_path / "x.npy", np.ones(3))
    bare = (tmp_path / "x.npy").read_bytes()
    for content in (other, bare, whole[: len(whole) // 2], b"", b"some text"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="not a saved convexformer model"):
            load_model(file)
    write_archive(file, "something else", {}, {})
    with pytest.raises(ValueError, match="not a saved convexformer model"):
        load_model(file)


@pytest.mark.parametrize("header", [{}, {"format": 1, "version": "0"}])
def test_an_incomplete_file_is_named(header, tmp_path):
    write_archive(tmp_path / "x.npz", "convexformer model", header, {})
    with pytest.raises(ValueError, match=r"x\.npz is no complete model of save_model: it lacks '"):
        load_model(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("estimator", "Lasso", r"estimator of .*x\.npz must be one of \['ConvexAttentionClassifier', .*, got 'Lasso'"),
        ("estimator", ["Lasso"], r"estimator of .*x\.npz must be one of .*, got \['Lasso'\]"),
        ("status", "DONE", r"status of a saved fit must be one of \['CONVERGED', 'MAX_ITER', .*, got 'DONE'"),
        ("status", None, r"status of a saved fit must be one of .*, got None"),
        ("format", "1", r"format of .*x\.npz must be a positive integer, got '1'"),
        ("format", None, r"format of .* must be a positive integer, got None"),
        ("format", float("nan"), r"format of .* must be a positive integer, got nan"),
        ("format", 2, r"x\.npz was saved by convexformer .*, which is newer than this one"),
        ("parameters", {"beta": 1.0}, r"Invalid parameter 'beta' for estimator ConvexAttentionRegressor"),
    ],
)
def test_a_header_that_does_not_read_is_named(name, value, message, tmp_path):
    file = tmp_path / "x.npz"
    save_model(ConvexAttentionRegressor(alpha=0.05).fit(X3, X3[:, 0, 0]), file)
    header, arrays = read_archive(file, "convexformer model")
    write_archive(file, "convexformer model", header | {name: value}, arrays)
    with pytest.raises(ValueError, match=message):
        load_model(file)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": None},
        {"shape": [3, 4]},
        {"certificate": [1.0, "x", 2.0]},
        {"loss": {"name": {}}},
        {"penalty": 3},
        {"parameters": None},
        {"coef": np.array("a")},
        {"coef": np.ones(3)},
        {"coef": np.full((4, 2, 1), np.nan)},
    ],
)
def test_whatever_does_not_read_the_file_is_named(change, tmp_path):
    file = tmp_path / "x.npz"
    save_model(ConvexAttentionRegressor(alpha=0.05).fit(X3, X3[:, 0, 0]), file)
    header, arrays = read_archive(file, "convexformer model")
    parts = [{name: change.get(name, value) for name, value in part.items()} for part in (header, arrays)]
    write_archive(file, "convexformer model", *parts)
    with pytest.raises(ValueError, match=r"x\.npz holds no model that can be loaded: "):
        load_model(file)


def test_a_status_of_a_layer_that_does_not_read_is_named(tmp_path):
    file = tmp_path / "x.npz"
    save_model(GreedyConvexTransformerRegressor(0.05, n_gates=3, random_state=0).fit(X3, X3[:, 0, 0]), file)
    header, arrays = read_archive(file, "convexformer model")
    header["layers"][1]["status"] = "DONE"
    write_archive(file, "convexformer model", header, arrays)
    with pytest.raises(ValueError, match=r"must be one of .*, got 'DONE'"):
        load_model(file)


class MeanOfTargets(RegressorMixin, TokenEstimator):
    """Not one of the package's families."""

    def __init__(self, shift=0.0):
        self.shift = shift

    def fit(self, X, y):
        check_tokens(self, X, reset=True)
        self.means_ = np.mean(y, axis=0, keepdims=True)
        return self

    def predict(self, X):
        return np.repeat(self.means_, len(check_tokens(self, X, reset=False)), axis=0) + self.shift

    def _saved_state(self):
        header, arrays = super()._saved_state()
        return header, arrays | {"means": self.means_}

    def _restore_state(self, header, arrays):
        super()._restore_state(header, arrays)
        self.means_ = arrays["means"]


def test_an_estimator_that_says_what_a_file_holds_takes_one_line_to_be_saved(tmp_path, monkeypatch):
    model = MeanOfTargets(shift=1.0).fit(X3, X3[:, 0])
    with pytest.raises(TypeError, match="model must be one of"):
        save_model(model, tmp_path / "m.npz")
    monkeypatch.setitem(persistence._ESTIMATORS, "MeanOfTargets", MeanOfTargets)
    save_model(model, tmp_path / "m.npz")
    np.testing.assert_array_equal(load_model(tmp_path / "m.npz").predict(X3), model.predict(X3))


def test_a_loss_that_is_registered_no_longer_is_named(tmp_path, monkeypatch):
    class Mine(Squared):
        pass

    monkeypatch.setitem(LOSSES, "mine", Mine)
    save_model(ConvexAttentionRegressor(loss="mine").fit(X2, X2[:, 0]), tmp_path / "model.npz")
    monkeypatch.delitem(LOSSES, "mine")
    with pytest.raises(ValueError, match=r"'mine', which is not registered here; enter its class in .*LOSSES"):
        load_model(tmp_path / "model.npz")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_archive(tmp_path / "m.npz", "example", {}, {"x": np.arange(3)})

    def full(file, **arrays):
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space"):
        write_archive(tmp_path / "m.npz", "example", {}, {"x": np.arange(5)})
    assert [path.name for path in tmp_path.iterdir()] == ["m.npz"]
    assert read_archive(tmp_path / "m.npz", "example")[1]["x"].tolist() == [0, 1, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    write_archive(tmp_path / "m.npz", "example", {}, {"x": np.arange(3)})
    before = (tmp_path / "m.npz").read_bytes()
    savez = np.savez

    def save_on_full_disk(file, **arrays):
        with open("/dev/full", "wb") as full:
            savez(full, **arrays)

    monkeypatch.setattr(np, "savez", save_on_full_disk)
    with pytest.raises(OSError, match=r"m\.npz' cannot be written, what was there is unchanged: .*No space left"):
        write_archive(tmp_path / "m.npz", "example", {}, {"x": np.arange(30_000)})
    assert (tmp_path / "m.npz").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["m.npz"]


@pytest.mark.usefixtures("python_takes_ctrl_c")
def test_ctrl_c_while_a_file_is_written_comes_once_it_is(tmp_path, monkeypatch):
    opened = zipfile._ZipWriteFile.__init__

    def interrupted(self, *arguments):
        signal.raise_signal(signal.SIGINT)
        opened(self, *arguments)

    monkeypatch.setattr(zipfile._ZipWriteFile, "__init__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_archive(tmp_path / "m.npz", "example", {}, {"x": np.arange(3), "y": np.arange(4)})
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [path.name for path in tmp_path.iterdir()] == ["m.npz"]
    assert read_archive(tmp_path / "m.npz", "example")[1]["y"].tolist() == [0, 1, 2, 3]


def test_files_are_written_in_other_threads(tmp_path):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(write_archive, tmp_path / "m.npz", "example", {}, {"x": np.arange(3)}).result()
    assert read_archive(tmp_path / "m.npz", "example")[1]["x"].tolist() == [0, 1, 2]


def test_a_file_of_something_else_is_refused_without_advice_to_trust_it(tmp_path):
    (tmp_path / "text.npz").write_text("X, y")
    with pytest.raises(ValueError, match=r"text\.npz is not a saved convexformer model.*no plain arrays") as refusal:
        load_model(tmp_path / "text.npz")
    assert "pickle" not in str(refusal.value)


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple], ids=["array", "tensor", "tuple"])
def test_grids_of_any_kind_are_saved(kind, tmp_path):
    model = ConvexAttentionRegressorCV(alphas=kind([0.5, 0.25])).fit(X2, X2[:, 0])
    save_model(model, tmp_path / "model.npz")
    assert load_model(tmp_path / "model.npz").get_params()["alphas"] == [0.5, 0.25]


@pytest.mark.parametrize("path", [None, 3, b"m.npz"])
def test_what_is_no_path_is_refused_by_name(path):
    model = ConvexAttentionRegressor(alpha=0.05).fit(X3, X3[:, 0, 0])
    for call in (lambda: save_model(model, path), lambda: load_model(path)):
        with pytest.raises(TypeError, match=rf"^path must be the path of a file, got {path!r}"):
            call()


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"path must be the name of a file, and .* is a folder"):
        save_model(ConvexAttentionRegressor().fit(X2, X2[:, 0]), tmp_path)

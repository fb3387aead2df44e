"""Files that version cf94d43 wrote: saved models, and what interrupted paths, fits and experiments go on from."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from convexformer import ConvexAttentionClassifierCV, ConvexAttentionRegressor, load_model
from convexformer.experiments import GrokkingSettings, run_grokking

FOLDER = Path(__file__).parents[1] / "data" / "cf94d43"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
DATA = np.load(FOLDER / "data.npz")


def never_called(progress):
    raise AssertionError("solved again what the file holds")


@pytest.mark.parametrize("name", [name for name, value in EXPECTED.items() if "predict" in value])
def test_saved_models_predict_what_they_did(name):
    model, wanted = load_model(FOLDER / f"{name}.npz"), EXPECTED[name]
    found = model.predict(DATA["X"])
    if found.dtype.kind == "f":
        np.testing.assert_allclose(found, wanted["predict"], rtol=1e-10, atol=1e-12)
    else:
        assert found.tolist() == wanted["predict"]
    certificate = model.certificate_ if hasattr(model, "certificate_") else model.certificates_[-1]
    assert certificate.primal == wanted["objective"]


def test_a_path_goes_on_from_its_file(tmp_path):
    file = shutil.copy(FOLDER / "path.npz", tmp_path)
    model = ConvexAttentionRegressor(alpha=0.02, callback=never_called)
    path = model.path(DATA["X"], DATA["y"], n_alphas=5, resume=file)
    np.testing.assert_allclose(path.alphas, EXPECTED["path"]["alphas"], rtol=1e-12)
    np.testing.assert_array_equal(path.coefs, EXPECTED["path"]["coefs"])
    assert path.gaps.max() <= 1e-4


def test_a_cross_validation_goes_on_from_its_folder(tmp_path):
    folder = shutil.copytree(FOLDER / "folds", tmp_path / "folds")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    model = ConvexAttentionClassifierCV(alphas=4, cv=2, resume=folder).fit(DATA["X"], DATA["labels"])
    assert before == {file.name: file.read_bytes() for file in folder.iterdir()}  # nothing was solved again
    assert model.alpha_ == pytest.approx(EXPECTED["folds"]["alpha"], rel=1e-12)
    np.testing.assert_allclose(model.score_path_, EXPECTED["folds"]["score_path"], rtol=1e-10)


def test_an_experiment_goes_on_from_its_report(tmp_path, monkeypatch):
    folder = shutil.copytree(FOLDER / "grokking", tmp_path / "grokking")
    saved = json.loads((folder / "grokking.json").read_text())
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in saved["settings"].items()}
    names = {field.name for field in dataclasses.fields(GrokkingSettings)}
    monkeypatch.setattr("convexformer.experiments.grokking.experiment._run", lambda *args: never_called(args))
    settings = GrokkingSettings(moduli=(7,), **{name: value for name, value in found.items() if name in names})
    report = run_grokking(folder, settings, n_seeds=1, methods=["MLP"], quiet=True)
    assert report["runs"] == saved["runs"]
    assert len(report["runs"]) == EXPECTED["grokking"]["runs"] > 0

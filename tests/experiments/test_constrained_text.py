"""The experiment on constrained training on text, on few short sentences."""

import gc
import json
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_encoders import random_sentences

from convexformer import cli
from convexformer.constrained import NonFiniteLossError
from convexformer.experiments import ConstrainedTextSettings, format_constrained_text, run_constrained_text
from convexformer.experiments.common import mean_and_error
from convexformer.experiments.constrained import common, text
from convexformer.experiments.constrained.common import METHODS, Search, paired_difference
from convexformer.experiments.constrained.text_models import constant_loss
from convexformer.experiments.constrained.text_report import summarise
from convexformer.experiments.corpora import load_corpus, with_noise


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    for number, name in enumerate("ab"):
        lines = random_sentences(30, seed=number)
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    stream = np.random.default_rng(0)
    words = sorted({word for line in random_sentences(60) for word in line.split()})
    rows = [f"{word} {' '.join(map(str, stream.normal(size=4)))}" for word in words]
    (folder / "vectors.txt").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def settings(sources):
    return ConstrainedTextSettings.small(
        corpora=(f"{sources}/a.txt,{sources}/b.txt",),
        vectors=str(sources / "vectors.txt"),
        n_sentences=40,
        n_tokens=6,
        depths=(2,),
        train_noises=(0.0, 0.5),
        test_noises=(0.0, 1.0),
        n_epochs=2,
        learning_rates=(1e-2,),
        ablation_alphas=(0.1,),
        ablation_prices=(None, 1.0),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("out") / "new"


@pytest.fixture(scope="module")
def report(settings, folder):
    return run_constrained_text(folder, settings, n_seeds=2, quiet=True)


def test_every_method_is_there_for_every_noise_and_seed(report):
    assert len(report["runs"]) == 2 * 2 * len(METHODS)
    assert len(report["ablation"]) == 2
    assert len(report["summaries"]) == 2 * len(METHODS)
    assert len(report["differences"]) == 2 * (len(METHODS) - 1)
    assert report["skipped"] == ["frozen encoder: left out as asked"]
    for run in report["runs"]:
        assert len(run["layer_losses"]) == len(run["by_layer"]) == 2
        assert run["accuracies"][0] == pytest.approx(run["by_layer"][-1])
        assert run["area"] == pytest.approx(np.mean(run["accuracies"]))  # of two noises, from 0 to 1
        assert any(run["duals"]) <= (run["method"] == "constrained")


def test_methods_try_as_many_pairs(settings):
    assert len({len(settings.search.pairs(method)) for method in METHODS}) == 1
    with pytest.raises(ValueError, match="as many values"):
        Search((1e-3,), (0.1,), (0.0, 1.0))


def test_a_second_call_runs_nothing_again(report, settings, folder, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("it was run again")

    for name in ("search", "train_once"):
        monkeypatch.setattr(text, name, refuse)
    monkeypatch.setattr(text, "draw_figures", lambda report, folder: [])
    again = run_constrained_text(folder, settings, n_seeds=2, quiet=True)
    assert again["runs"] == report["runs"]


def test_an_interrupted_call_goes_on(settings, tmp_path, monkeypatch):
    search, ran = text.search, []

    def interrupted(*arguments):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(1)
        return search(*arguments)

    monkeypatch.setattr(text, "search", interrupted)
    monkeypatch.setattr(text, "draw_figures", lambda report, folder: [])
    with pytest.raises(KeyboardInterrupt):
        run_constrained_text(tmp_path, settings, n_seeds=1, quiet=True)
    before = json.loads((tmp_path / text.FILE).read_text())["runs"]
    assert len(before) == 2
    monkeypatch.setattr(text, "search", search)
    report = run_constrained_text(tmp_path, settings, n_seeds=1, quiet=True)
    assert report["runs"][:2] == before
    assert len(report["runs"]) == 2 * len(METHODS)


def test_a_run_keeps_no_corpus_and_no_encoder_in_memory(settings, tmp_path, monkeypatch):
    loaded, load = [], text.load_corpus

    def watched(*arguments):
        corpus = load(*arguments)
        loaded.append(weakref.ref(corpus))
        return corpus

    monkeypatch.setattr(text, "load_corpus", watched)
    monkeypatch.setattr(text, "draw_figures", lambda report, folder: [])
    changed = {"train_noises": (0.0,), "n_epochs": 1}
    run_constrained_text(tmp_path, ConstrainedTextSettings(**{**vars(settings), **changed}), n_seeds=1, quiet=True)
    gc.collect()
    assert [corpus() for corpus in loaded] == [None]


def test_the_text_has_all_tables(report):
    shown = format_constrained_text(report)
    for words in ("2 seeds", "paired over seeds", "ablation", "deep supervision", "price of slacks", "left out"):
        assert words in shown


def test_the_command_line(settings, report, folder, capsys):
    arguments = ["reproduce", "constrained-text", "--small", "--quiet", "--out", str(folder)]
    own = ["--corpora", *settings.corpora, "--vectors", settings.vectors, "--n-sentences", "40"]
    assert cli.main([*arguments, *own]) != 0
    assert "holds results with" in capsys.readouterr().err


def test_a_frozen_encoder(settings, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from tiny_encoders import SIZES, save_random

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        encoder = save_random(transformers.BertModel(transformers.BertConfig(**SIZES)), tmp_path)
    monkeypatch.setattr(text, "draw_figures", lambda report, folder: [])
    changed = ConstrainedTextSettings(
        **{**vars(settings), "encoder": str(encoder), "train_noises": (0.5,), "encoder_epochs": 2, "n_epochs": 1}
    )
    report = run_constrained_text(tmp_path / "out", changed, n_seeds=1, quiet=True)
    rows = [row for row in report["runs"] if row["model"] == text.ENCODER]
    assert len(rows) == len(METHODS)
    assert all(len(row["layer_losses"]) == 3 for row in rows)
    assert report["skipped"] == []
    weights = encoder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0" * 4)
    with pytest.raises(ValueError, match="holds results with encoder_fingerprint="):
        run_constrained_text(tmp_path / "out", changed, n_seeds=1, quiet=True)


def test_constant_losses_and_noise():
    y = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert constant_loss(y) == pytest.approx(np.log(2))
    tokens, present = torch.ones(1, 3, 2), torch.tensor([[True, True, False]])
    noisy = with_noise(tokens, present, 0.5, torch.Generator().manual_seed(0))
    assert torch.equal(noisy[0, 2], tokens[0, 2])
    assert not torch.equal(noisy[0, 0], tokens[0, 0])


def test_comparisons_over_seeds():
    assert paired_difference([1.0], [0.5]) == {"difference": 0.5, "error": None, "p": None}
    compared = paired_difference([1.0, 2.0, 4.0], [0.0, 0.0, 0.0])
    assert compared["error"] == pytest.approx(np.std([1, 2, 4], ddof=1) / 3**0.5)
    assert mean_and_error([2.0]) == (2.0, None)


def test_areas_are_compared_over_the_seeds_that_both_methods_ended_in():
    def run(method, seed, area, diverged=None):
        place = {"corpus": "a", "model": "UT", "noise": 0.1, "method": method, "seed": seed, "diverged": diverged}
        curves = {name: [area, area] for name in ("by_layer", "layer_losses", "exit_layers", "exit_accuracies")}
        shares = dict.fromkeys(("seconds", "mean_ratio", "median_ratio", "descending_share"), area)
        return {**place, **curves, **shares, "area": area, "accuracies": [area / 2, 0.0], "feasible": area > 0.5}

    runs = [run("constrained", seed, area) for seed, area in ((2, 0.9), (0, 0.4), (1, 0.6))]
    runs += [run("unconstrained", seed, area) for seed, area in ((2, 0.6), (1, 0.5), (3, 0.1))]
    runs += [run("unconstrained", 0, 0.0, diverged="training"), run("deep supervision", 7, 0.2)]
    found = summarise(runs)
    constrained, unconstrained, deep = found["summaries"]
    assert [row["n_seeds"] for row in found["summaries"]] == [3, 3, 1]
    assert [row["feasible"] for row in found["summaries"]] == [2, 1, 0]
    assert constrained["area"] == pytest.approx(1.9 / 3)
    assert constrained["clean"] == pytest.approx(constrained["accuracies"][0]) == pytest.approx(0.95 / 3)
    assert unconstrained["by_layer"] == pytest.approx([0.4, 0.4])
    assert (deep["area"], deep["area_error"]) == (pytest.approx(0.2), None)
    (compared,) = found["differences"]  # neither with itself nor where no seed is that of both
    assert compared["method"] == "constrained"
    expected = paired_difference([0.6, 0.9], [0.5, 0.6])
    assert {name: compared[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depths": (1,)}, "depths must hold"),
        ({"n_sentences": 3}, "n_sentences must be"),
        ({"train_noises": (-1.0,)}, "train_noises must hold"),
        ({"c_ref_ratio": 0.0}, "c_ref_ratio must be"),
        ({"alphas": (0.1,)}, "as many values"),
        ({"weight_decays": (0.0, -1.0)}, "weight_decays must hold one or more numbers from 0"),
        ({"ablation_prices": (None, 0.0)}, "ablation_prices must hold one or more positive numbers or None"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ValueError, match=message):
        ConstrainedTextSettings(**change)


def test_a_report_is_not_gone_on_with_under_other_vectors_of_the_same_file(report, settings, tmp_path):
    """Runs under either would stand beside one another, and be compared."""
    vectors = tmp_path / "vectors.txt"
    changed = replace(settings, vectors=str(vectors))
    lines = Path(settings.vectors).read_text().splitlines()
    vectors.write_text("\n".join(lines))
    same = load_corpus(settings.corpora[0], changed).sha256
    assert same == report["data"]["corpora_read"][0]["sha256"]
    vectors.write_text("\n".join(line.replace("0.", "1.") for line in lines))
    assert load_corpus(settings.corpora[0], changed).sha256 != same


def test_runs_that_diverge_are_recorded_and_the_others_go_on(settings, tmp_path, monkeypatch):
    changed = replace(settings, train_noises=(0.0,), n_epochs=1)
    search, train_once = text.search, text.train_once

    def diverging_search(task, method, grid, seed):
        if (method.name, seed) == ("unconstrained", 1) or method.name == "deep supervision":
            raise NonFiniteLossError("the loss of layer 1 became infinite or nan")
        return search(task, method, grid, seed)

    def diverging_run(task, method, pair, seed, resilience):
        if resilience is None:
            raise NonFiniteLossError("the loss of layer 2 became infinite or nan")
        return train_once(task, method, pair, seed, resilience=resilience)

    monkeypatch.setattr(text, "search", diverging_search)
    monkeypatch.setattr(text, "train_once", diverging_run)
    report = run_constrained_text(tmp_path, changed, n_seeds=2, quiet=True)
    assert [row.get("diverged") for row in report["ablation"]] == ["the loss of layer 2 became infinite or nan", None]
    ended = {(row["method"], row["seed"]) for row in report["runs"] if "diverged" not in row}
    assert ended == {("constrained", 0), ("constrained", 1), ("unconstrained", 0)}
    runs = {(row["method"], row["seed"]): row for row in report["runs"]}
    (compared,) = report["differences"]  # over the seeds where both came to an end
    assert compared["difference"] == runs["constrained", 0]["area"] - runs["unconstrained", 0]["area"]
    assert "3 runs diverged" in format_constrained_text(report)
    monkeypatch.setattr(text, "search", None)  # none is run again
    monkeypatch.setattr(text, "train_once", None)
    assert run_constrained_text(tmp_path, changed, n_seeds=2, quiet=True)["runs"] == report["runs"]


def test_a_report_of_runs_that_all_diverge_can_be_shown(settings, tmp_path, monkeypatch):
    def diverge(*arguments, **options):
        raise NonFiniteLossError("the loss of layer 1 became infinite or nan")

    monkeypatch.setattr(text, "search", diverge)
    monkeypatch.setattr(text, "train_once", diverge)
    report = run_constrained_text(tmp_path, settings, n_seeds=1, quiet=True)
    assert report["summaries"] == report["differences"] == []
    assert f"{2 * len(METHODS)} runs diverged" in format_constrained_text(report)


def test_a_run_whose_validation_loss_is_infinite_has_diverged():
    """It could not be written as JSON."""
    model = torch.nn.Linear(1, 1)

    def layer_losses(model, batch):
        losses = model(batch[0]).squeeze(1).square()
        return torch.stack([losses, losses if model.training else losses / 0.0])

    samples = [torch.ones(4, 1)]
    task = common.Task(lambda seed: model, layer_losses, samples, samples, 1.0, {}, 1)
    with pytest.raises(NonFiniteLossError, match=r"validation losses of the layers became \[.*, inf\]"):
        common.train_once(task, METHODS[0], (1e-3, 0.1), 0)


@pytest.mark.parametrize("losses", [(np.nan, 2.0, 1.0), (2.0, np.nan, 1.0), (1.0, 2.0, np.nan)])
def test_a_search_keeps_no_run_whose_validation_loss_is_nan_where_there_is_another(losses, monkeypatch):
    runs = [SimpleNamespace(report_=SimpleNamespace(losses=np.array([3.0, loss]))) for loss in losses]
    monkeypatch.setattr(common, "train_once", lambda task, method, pair, seed: runs[int(pair[0]) - 1])
    found = common.search(None, METHODS[1], Search((1.0, 2.0, 3.0), (0.1,), (0.0,)), 0)
    assert found.trainer is runs[losses.index(1.0)]

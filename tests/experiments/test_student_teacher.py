"""The student-teacher experiment on a tiny random BERT."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tiny_encoders import SIZES, random_sentences, save_random

from convexformer import cli
from convexformer.datasets import load_attention_activations
from convexformer.experiments import (
    StudentTeacherSettings,
    finished_seeds,
    format_student_teacher,
    run_student_teacher,
)
from convexformer.experiments.student_teacher import experiment
from convexformer.experiments.student_teacher.convex_students import CLASSES
from convexformer.experiments.student_teacher.data import r2_and_error, split_activations
from convexformer.experiments.student_teacher.maps import normalise_rows, similarity

METHODS = ("convex, certified", "Adam", "Adam, seconds of convex")


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Settings of a run that takes a second per seed."""
    folder = save_random(transformers.BertModel(transformers.BertConfig(**SIZES)), tmp_path_factory.mktemp("bert"))
    (folder / "sentences.txt").write_text("\n".join(random_sentences(60)))
    return StudentTeacherSettings.small(
        model=str(folder),
        layer=1,
        sentences=str(folder / "sentences.txt"),
        n_sentences=60,
        n_tokens=6,
        n_outputs=3,
        map_outputs=2,
        n_gates=3,
        n_alphas=3,
        map_alpha_ratios=(0.3, 0.1),
        n_steps=15,
        learning_rates=(1e-2, 3e-2),
        softmax_learning_rates=(3e-3, 1e-2),
        softmax_heads=2,
        softmax_head_width=4,
    )


@pytest.fixture(scope="module")
def report(settings, tmp_path_factory):
    return run_student_teacher(tmp_path_factory.mktemp("out") / "new", settings, n_seeds=2, quiet=True)


def rows_of(report, seed):
    (run,) = (run for run in report["runs"] if run["seed"] == seed)
    return {(row["model"], row["method"]): row for row in run["rows"]}


@pytest.fixture(scope="module")
def activations(settings):
    return load_attention_activations(settings.sentences, model=settings.model, layer=1, n_tokens=6, short="drop")


# The experiment


def test_every_model_is_there_for_every_seed(report):
    wanted = {(kind.name, method) for kind in CLASSES for method in METHODS}
    wanted |= {("softmax attention", f"Adam, decay on {on}") for on in ("all", "values", "none")}
    wanted |= {("ridge regression", f"{tokens}") for tokens in ("all tokens", "own token")}
    for seed in (0, 1):
        rows = rows_of(report, seed)
        assert wanted <= set(rows)
        assert all(np.isfinite(row["test_r2"]) and row["test_error"] > 0 for row in rows.values())
    assert {(row["model"], row["method"]) for row in report["medians"]} >= wanted


def test_no_trained_network_is_below_the_bound_of_its_class(report):
    for seed in (0, 1):
        rows = rows_of(report, seed)
        for kind in CLASSES:
            certified, *trained = (rows[kind.name, method] for method in METHODS)
            assert 0 <= certified["excess"] == pytest.approx(certified["objective"] - certified["dual_bound"], abs=1e-9)
            for row in trained:
                assert row["dual_bound"] == certified["dual_bound"] < row["objective"]
                assert row["objective"] > certified["objective"]
                assert row["ratio"] == pytest.approx(row["objective"] / certified["objective"])
                assert row["alpha"] == certified["alpha"]


def test_curves_end_where_the_rows_say(report):
    for run in report["runs"]:
        rows = rows_of(report, run["seed"])
        assert len(run["curves"]) == 2 * len(CLASSES) + 3
        for curve in run["curves"]:
            row = rows[curve["model"], curve["method"]]
            assert curve["test_r2"][-1] == row["test_r2"]
            assert curve["test_seconds"] == sorted(curve["test_seconds"])
            assert len(curve["test_seconds"]) == len(curve["test_r2"]) > 1
            if row["excess"] is not None:
                # Courses of networks are recorded in float32.
                assert curve["excess"][-1] == pytest.approx(row["excess"], abs=1e-4)
                assert curve["seconds"][-1] == row["fit_seconds"]


def test_networks_that_diverge_do_not_end_the_experiment(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "CLASSES", CLASSES[:1])
    monkeypatch.setattr(experiment, "draw_figures", lambda report, folder: [])
    changed = dataclasses.replace(settings, learning_rates=(1e25,), n_steps=3)
    with pytest.warns(RuntimeWarning, match="training diverged with every learning rate"):
        report = run_student_teacher(tmp_path, changed, n_seeds=1, quiet=True)
    (curve,) = (curve for curve in report["runs"][0]["curves"] if curve["method"] == "Adam")
    assert len(curve["seconds"]) == len(curve["excess"]) >= 1
    assert np.isfinite(curve["excess"]).all()


def test_the_report_says_which_methods_diverged(settings, tmp_path):
    changed = dataclasses.replace(settings, learning_rates=(1e25,), softmax_learning_rates=(1e25,), n_steps=3)
    with pytest.warns(RuntimeWarning, match="training diverged with every learning rate"):
        report = run_student_teacher(tmp_path, changed, n_seeds=1, quiet=True)
    trained = [row for row in report["medians"] if row["method"].startswith("Adam")]
    assert len(trained) == 2 * len(CLASSES) + 3
    assert {row[name] for row in trained for name in ("objective", "ratio", "test_r2", "test_error", "heads")} == {None}
    assert all(row["test_r2"] is not None for row in report["medians"] if row not in trained)
    assert "softmax attention" not in {row["student"] for row in report["map_medians"]}
    text = format_student_teacher(report)
    for row in trained:
        assert f"{row['model']} by {row['method']} (1 seed)" in text
    assert "map of softmax attention (1 seed)" in text
    assert all(Path(figure).stat().st_size > 10_000 for figure in report["figures"])


def test_maps_are_stochastic_and_their_figures_finite(report):
    for run in report["runs"]:
        for weights in run["maps"].values():
            assert np.shape(weights) == (6, 6)
            np.testing.assert_allclose(np.sum(weights, axis=1), 1)
        rows = {row["student"]: row for row in run["map_rows"]}
        assert set(rows) == {"convex, single row", "softmax attention", "uniform", "each position itself"}
        for name in ("convex, single row", "softmax attention"):
            assert -1 <= rows[name]["pearson"] <= 1
            assert -1 <= rows[name]["pearson_off_diagonal"] <= 1
            assert rows[name]["kl"] >= 0
            assert np.isfinite(rows[name]["test_r2"])
        assert rows["uniform"]["pearson"] is None
        assert rows["convex, single row"]["relative_gap"] <= 1e-3


def test_the_softmax_student_is_chosen_by_validation(report, settings):
    for seed in (0, 1):
        for on in ("all", "values", "none"):
            row = rows_of(report, seed)["softmax attention", f"Adam, decay on {on}"]
            assert row["learning_rate"] in settings.softmax_learning_rates
            assert row["alpha"] in ([0.0] if on == "none" else [3 * alpha for alpha in settings.softmax_alphas])
            assert row["dual_bound"] is None


def test_medians_are_those_of_the_seeds(report):
    for row in report["medians"]:
        scores = [rows_of(report, seed)[row["model"], row["method"]]["test_r2"] for seed in (0, 1)]
        assert row["test_r2"] == pytest.approx(np.mean(scores))
        assert row["test_r2_range"] == [min(scores), max(scores)]


def test_everything_is_on_disk_and_in_the_text(report, settings):
    folder = Path(report["figures"][0]).parent
    stored = json.loads((folder / "student_teacher.json").read_text())
    assert stored == report
    assert stored["settings"]["n_steps"] == settings.n_steps
    assert stored["settings"]["position"] == 1
    for figure in report["figures"]:
        assert Path(figure).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(report["figures"]) == 3
    lines = format_student_teacher(report).splitlines()
    for row in report["medians"]:
        (line,) = (line for line in lines if line.startswith(f"{row['model']}  ") and f"  {row['method']}  " in line)
        assert f"{row['test_r2']:.3f}" in line
    assert all(f"skipped: {reason}" in lines for reason in report["skipped"])


# Going on


def test_an_interrupted_run_goes_on_with_the_seeds_that_are_missing(report, settings, tmp_path, monkeypatch):
    run_seed = experiment._run_seed

    def interrupted(data, settings, bar, seed):
        if seed == 1:
            raise KeyboardInterrupt
        return run_seed(data, settings, bar, seed)

    monkeypatch.setattr(experiment, "draw_figures", lambda report, folder: [])
    monkeypatch.setattr(experiment, "_run_seed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_student_teacher(tmp_path, settings, n_seeds=2, quiet=True)
    assert finished_seeds(tmp_path / experiment.FILE) == [0]
    began = []

    def counted(data, settings, bar, seed):
        began.append(seed)
        return run_seed(data, settings, bar, seed)

    monkeypatch.setattr(experiment, "_run_seed", counted)
    resumed = run_student_teacher(tmp_path, settings, n_seeds=2, quiet=True)
    assert began == [1]
    for seed in (0, 1):
        for key, row in rows_of(report, seed).items():
            if key[1] != METHODS[2]:
                assert rows_of(resumed, seed)[key]["test_r2"] == pytest.approx(row["test_r2"], abs=1e-5)
    # Runs are in the order of seeds, whichever came first.
    path = tmp_path / experiment.FILE
    path.write_text(json.dumps(resumed | {"runs": resumed["runs"][::-1]}))
    again = run_student_teacher(tmp_path, settings, n_seeds=2, quiet=True)
    assert began == [1]
    assert again == resumed


def test_results_of_other_settings_or_files_are_not_mixed(settings, report, tmp_path):
    folder = Path(report["figures"][0]).parent
    with pytest.raises(ValueError, match=r"holds results with n_steps=15, not 16; choose another folder"):
        run_student_teacher(folder, dataclasses.replace(settings, n_steps=16), quiet=True)
    (tmp_path / "student_teacher.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match="is not a report of this experiment"):
        run_student_teacher(tmp_path, settings, quiet=True)


def test_results_of_another_teacher_in_the_same_folder_are_not_mixed(settings, report):
    weights = Path(settings.model) / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-4] + b"\0" * 4)
    try:
        with pytest.raises(ValueError, match="holds results with model_fingerprint="):
            run_student_teacher(Path(report["figures"][0]).parent, settings, quiet=True)
    finally:
        weights.write_bytes(before)


def test_the_command_runs_the_experiment(settings, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(experiment, "draw_figures", lambda report, folder: [])  # those of the fixture are checked
    sizes = ("--n-sentences", 40, "--n-tokens", 5, "--n-outputs", 2, "--map-outputs", 1, "--n-gates", 2, "--n-steps", 3)
    teacher = ("--model", settings.model, "--layer", 1, "--sentences", settings.sentences)
    command = ["reproduce", "student-teacher", "--small", "--seeds", 1, "--out", tmp_path, "--json", *teacher, *sizes]
    assert cli.main([str(part) for part in command]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    shown, stored = json.loads(captured.out), json.loads((tmp_path / "student_teacher.json").read_text())
    assert shown == {name: value for name, value in stored.items() if name != "runs"}
    assert stored["settings"]["n_gates"] == 2
    assert finished_seeds(tmp_path / experiment.FILE) == [0]


# Data


def test_splits_are_disjoint_and_standardised_by_their_training_part(activations):
    split = split_activations(activations, position=2, n_outputs=4, seed=0)
    sizes = [len(part.tokens) for part in split[:3]]
    assert sum(sizes) == len(activations)
    assert sizes[0] == round(0.6 * len(activations)) == len(split.train_index)
    rows = np.concatenate([part.tokens.reshape(len(part.tokens), -1) for part in split[:3]])
    assert len(np.unique(rows, axis=0)) == len(np.unique(activations.inputs.reshape(len(rows), -1), axis=0))
    np.testing.assert_allclose(split.train.y.mean(0), 0, atol=1e-12)
    covariance = split.train.y.T @ split.train.y / len(split.train.y)
    np.testing.assert_allclose(covariance, np.diag(np.diag(covariance)), atol=1e-10)
    assert np.diag(covariance).tolist() == sorted(np.diag(covariance), reverse=True)
    assert covariance.trace() == pytest.approx(4)
    assert np.mean(np.square(split.train.tokens)) == pytest.approx(1, rel=1e-5)
    assert 0 < split.variance_kept < 1
    other = split_activations(activations, position=2, n_outputs=4, seed=1)
    assert not np.array_equal(split.train_index, other.train_index)
    whole = split_activations(activations, position=2, n_outputs=None, seed=0)
    assert whole.train.y.shape[1] == activations.outputs.shape[2]
    assert whole.variance_kept == 1


def test_targets_that_do_not_vary_are_refused(activations):
    constant = dataclasses.replace(activations, outputs=np.ones_like(activations.outputs))
    with pytest.raises(ValueError, match="the same for all training sentences"):
        split_activations(constant, position=0, n_outputs=None, seed=0)
    with pytest.raises(ValueError, match="n_outputs=17 is more than the 16 outputs of the teacher"):
        split_activations(activations, position=0, n_outputs=17, seed=0)


def test_targets_that_do_not_vary_in_a_part_are_refused(activations):
    """Scores in that part would divide by a variance of zero."""
    outputs = np.ones_like(activations.outputs)
    outputs[0] = 2  # in one part alone, whichever it is
    for seed in range(5):
        with pytest.raises(ValueError, match=f"the same for all (training|validation|test) sentences of seed {seed}; "):
            split_activations(dataclasses.replace(activations, outputs=outputs), position=0, n_outputs=None, seed=seed)


def test_scores_of_the_mean_and_of_the_truth():
    y = np.random.default_rng(0).normal(size=(30, 3))
    assert r2_and_error(y, y) == (1, 0)
    assert r2_and_error(np.zeros_like(y), y - y.mean(0)) == pytest.approx((0, 1))


def test_similarity_of_maps():
    rng = np.random.default_rng(0)
    teacher = normalise_rows(rng.uniform(size=(5, 5)))
    same = similarity(teacher, teacher)
    assert same["pearson"] == pytest.approx(1)
    assert same["kl"] < 1e-3
    ahead = similarity(teacher, np.roll(teacher, 1, axis=1))
    assert ahead["kl"] > same["kl"]
    assert ahead["pearson"] < 1
    # Where the student reads nothing the smoothed divergence is finite.
    assert np.isfinite(similarity(teacher, np.eye(5))["kl"])
    assert similarity(np.eye(5), np.full((5, 5), 0.2))["kl"] == pytest.approx(np.log(5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_steps": 0}, "n_steps must be a positive integer, got 0"),
        ({"n_sentences": 5}, "n_sentences must be an integer of at least 10"),
        ({"position": 10}, "position must be one of the n_tokens=10 tokens"),
        ({"n_outputs": 1.5}, "n_outputs must be a positive integer"),
        ({"softmax_heads": 0}, "softmax_heads must be a positive integer"),
        ({"tol": 0.0}, "^tol must be a positive"),
        ({"search_tol": -1.0}, "search_tol must be a positive"),
        ({"alpha_ratio": 1.0}, "alpha_ratio must be between 0 and 1"),
        ({"learning_rates": ()}, "learning_rates must hold one or more positive numbers"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        StudentTeacherSettings.small(**changes)


def test_seeds_must_be_a_positive_number(settings, tmp_path):
    with pytest.raises(ValueError, match="n_seeds must be a positive integer, got 0"):
        run_student_teacher(tmp_path, settings, n_seeds=0)


def test_a_device_that_is_absent_is_named(settings, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="CUDA"):
        run_student_teacher(tmp_path, dataclasses.replace(settings, device="cuda"), quiet=True)


def test_any_device_gives_the_same(settings, tmp_path, accelerator, monkeypatch):
    monkeypatch.setattr(experiment, "draw_figures", lambda report, folder: [])  # those of the fixture are checked
    fewer = {"n_outputs": 2, "n_gates": 2, "n_alphas": 2, "map_outputs": 1, "map_alpha_ratios": (0.1,), "n_steps": 3}
    rates = {"learning_rates": (1e-2,), "softmax_learning_rates": (1e-2,), "softmax_alphas": (1e-2,)}
    settings = dataclasses.replace(settings, **fewer, **rates)
    rows = []
    for device in ("cpu", accelerator):
        report = run_student_teacher(
            tmp_path / device, dataclasses.replace(settings, device=device), n_seeds=1, quiet=True
        )
        rows.append([row for row in report["runs"][0]["rows"] if "seconds" not in row["method"]])
    for here, there in zip(*rows, strict=True):
        assert (there["model"], there["method"]) == (here["model"], here["method"])
        assert there["test_r2"] == pytest.approx(here["test_r2"], abs=1e-3)

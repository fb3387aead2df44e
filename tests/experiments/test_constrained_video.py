"""The experiment on constrained denoising of video, on few small frames."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from convexformer import cli
from convexformer.constrained import NonFiniteLossError
from convexformer.experiments import ConstrainedVideoSettings, format_constrained_video, run_constrained_video
from convexformer.experiments.constrained import VIDEO_FILE, video
from convexformer.experiments.constrained.common import METHODS
from convexformer.experiments.constrained.video_report import summarise

NAMES = [method.name for method in METHODS]


@pytest.fixture(scope="module")
def settings():
    return ConstrainedVideoSettings.small(
        size=16,
        patch_size=4,
        n_frames=12,
        noises=(0.0, 0.11),
        test_noises=(0.0, 0.1),
        models=("UT", "DUST"),
        depths=(2,),
        n_atoms=16,
        n_epochs=2,
        ablation_alphas=(0.1,),
        ablation_resiliences=(None, 4.0),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("out") / "new"


@pytest.fixture(scope="module")
def report(settings, folder):
    return run_constrained_video(folder, settings, n_seeds=2, quiet=True)


@pytest.fixture
def without_figures(monkeypatch):
    monkeypatch.setattr(video, "draw_figures", lambda report, folder: [])


def test_every_model_noise_method_and_seed_is_there(report):
    assert len(report["runs"]) == 2 * 2 * 2 * len(METHODS)
    assert len(report["ablation"]) == 2
    assert len(report["summaries"]["methods"]) == 2 * 2 * len(METHODS)
    assert report["data"]["frames_read"]["test"] == 3
    assert json.dumps(report, allow_nan=False)
    for row in report["runs"]:
        assert len(row["rmse"]) == 2
        assert len(row["layer_rmse"]) == 2
        assert row["mean_rmse"] == pytest.approx(np.mean(row["rmse"]))
        assert row["seconds_per_step"] > 0


def test_the_figures_are_there(report, folder):
    names = ["rmse_by_noise", "rmse_by_layer", "training", "reconstructions", "ablation"]
    assert report["figures"] == [str(folder / f"{name}.png") for name in names]
    assert all((folder / f"{name}.png").stat().st_size > 10_000 for name in names)


def test_later_seeds_take_what_the_first_found(report):
    for row in report["runs"]:
        (first,) = (
            other
            for other in report["runs"]
            if other["seed"] == 0 and all(other[name] == row[name] for name in ("noise", "model", "depth", "method"))
        )
        assert (row["learning_rate"], row["tuned"]) == (first["learning_rate"], first["tuned"])


def test_errors_on_noisy_test_frames_do_not_depend_on_how_many_are_denoised_at_once(settings):
    frames = video.Video.load(settings)
    task = video._task(settings, frames, 0.11, "UT", 2)
    trainer = video.train_once(task, METHODS[1], (1e-3, 0.0), 0)
    found = [video._measure(trainer, replace(settings, batch_size=size), frames, 0.11)["rmse"] for size in (1, 2, 3)]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-4)


def test_each_seed_searches_where_it_is_asked_to(settings, tmp_path, monkeypatch, without_figures):
    searched = []

    def counting(task, method, grid, seed):
        searched.append(seed)
        return search(task, method, grid, seed)

    search = video.search
    monkeypatch.setattr(video, "search", counting)
    changed = replace(settings, noises=(0.11,), models=("UT",), ablation_alphas=())
    for every, times in ((False, 1), (True, 2)):
        searched.clear()
        run_constrained_video(tmp_path / str(every), replace(changed, search_every_seed=every), n_seeds=2, quiet=True)
        assert len(searched) == times * len(METHODS)


def test_the_loss_of_the_noisy_input_is_one():
    class Identity(torch.nn.Module):
        def layer_outputs(self, tokens):
            return torch.stack([tokens, tokens])

    settings = ConstrainedVideoSettings()
    clean = torch.rand(50, 10, 256)
    for noise in (0.11, 0.05):
        losses = video.denoising_losses(noise, settings.unit(noise))(Identity(), (clean,))
        assert losses.shape == (2, 50)
        assert losses.mean().item() == pytest.approx(1, abs=0.02)
    assert (video.denoising_losses(0.0, settings.unit(0.0))(Identity(), (clean,)) == 0).all()


def test_frames_are_split_by_time(settings):
    data = video.Video.load(settings)
    assert [len(part) for part in data[:3]] == [7, 2, 3]
    frames = torch.as_tensor(video.load_video_frames("synthetic", size=16, n_frames=12))
    joined = video.frames_from_patches(torch.cat(data[:3]), (16, 16), 4)
    assert torch.equal(joined, frames)


@pytest.mark.parametrize("name", ["UT", "DUST", "ViT"])
def test_models_give_every_layers_reconstruction_and_come_from_a_seed(name, settings):
    if name == "ViT":
        pytest.importorskip("transformers")
    tokens = torch.rand(2, 16, 16)
    first, same, other = (video.make_model(name, 3, settings, seed) for seed in (0, 0, 1))
    assert first.layer_outputs(tokens).shape == (3, 2, 16, 16)
    assert torch.equal(first.layer_outputs(tokens), same.layer_outputs(tokens))
    assert torch.equal(first.layer_outputs(tokens), other.layer_outputs(tokens)) == (name == "DUST")


def test_without_transformers_vit_is_left_out_with_a_reason(settings, tmp_path, monkeypatch, without_figures):
    monkeypatch.setattr(video, "find_spec", lambda name: None)
    changed = replace(settings, models=("UT", "ViT"), noises=(0.11,), ablation_alphas=())
    report = run_constrained_video(tmp_path, changed, n_seeds=1, quiet=True)
    assert {row["model"] for row in report["runs"]} == {"UT"}
    assert "ViT is left out: transformers is not installed" in format_constrained_video(report)
    with pytest.raises(ValueError, match="models must hold one that can be made here: transformers"):
        run_constrained_video(tmp_path, replace(settings, models=("ViT",)), quiet=True)


def test_a_run_that_diverges_is_left_out_of_the_means(settings, tmp_path, monkeypatch, without_figures):
    def diverging(task, method, grid, seed):
        if method.name == "deep supervision":
            raise NonFiniteLossError("the loss of layer 1 became infinite or nan")
        return search(task, method, grid, seed)

    search = video.search
    monkeypatch.setattr(video, "search", diverging)
    changed = replace(settings, models=("UT",), noises=(0.11,), ablation_alphas=())
    report = run_constrained_video(tmp_path, changed, n_seeds=2, quiet=True)
    (row,) = (row for row in report["summaries"]["methods"] if row["method"] == "deep supervision")
    assert row["n_seeds"] == 0
    assert row["mean_rmse"] is None
    assert "2 runs diverged" in format_constrained_video(report)


def test_runs_of_all_models_that_diverge_are_recorded(settings, tmp_path):
    changed = replace(settings, noises=(0.11,), learning_rates=(1e30,))
    report = run_constrained_video(tmp_path, changed, n_seeds=1, quiet=True)
    assert len(report["runs"]) == 2 * len(METHODS)
    assert all("infinite or nan" in row["diverged"] for row in [*report["runs"], *report["ablation"]])
    assert "6 runs diverged" in format_constrained_video(report)


def test_the_text_names_denoisers_that_are_no_better_than_their_input(tmp_path):
    changed = ConstrainedVideoSettings.small(
        size=8, patch_size=4, n_frames=10, models=("UT",), learning_rates=(1.0,), n_epochs=2, ablation_alphas=()
    )
    text = format_constrained_video(run_constrained_video(tmp_path, changed, n_seeds=1, quiet=True))
    noisy = 255 * np.mean(changed.test_noises)
    names = "; ".join(f"UT, 3 layers, noise 0.11, {name}" for name in NAMES)
    assert f"RMSE of the noisy frames themselves: {noisy:.2f} in expectation; no less have {names}\n" in text


def test_an_infinite_loss_of_an_epoch_that_was_not_chosen_is_left_out(settings, tmp_path, monkeypatch):
    def worse_in_the_end(*arguments):
        trained = search(*arguments)
        trained.trainer.history_.validation[-1][-1] = float("inf")
        return trained

    search = video.search
    monkeypatch.setattr(video, "search", worse_in_the_end)
    changed = replace(settings, models=("UT",), noises=(0.11,), ablation_alphas=())
    report = run_constrained_video(tmp_path, changed, n_seeds=1, quiet=True)
    for row in report["runs"]:
        first, last = row["training_curve"]
        assert (row["diverged"], last) == (None, None)
        assert first > 0


def test_a_run_whose_test_error_is_infinite_has_diverged(settings, tmp_path, monkeypatch, without_figures):
    changed = replace(settings, models=("UT",), noises=(0.11,))
    monkeypatch.setattr(video, "_noisy", lambda clean, noise: clean * float("inf"))
    report = run_constrained_video(tmp_path, changed, n_seeds=1, quiet=True)
    assert all("test frames" in row["diverged"] for row in [*report["runs"], *report["ablation"]])


def test_a_second_call_runs_nothing_again(report, settings, folder, monkeypatch, without_figures):
    def refuse(*arguments, **options):
        raise AssertionError("it was run again")

    for name in ("search", "train_once"):
        monkeypatch.setattr(video, name, refuse)
    again = run_constrained_video(folder, settings, n_seeds=2, quiet=True)
    assert again["runs"] == report["runs"]


def test_an_interrupted_call_goes_on(report, settings, tmp_path, monkeypatch, without_figures):
    ran = []

    def interrupted(task, method, grid, seed):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(method.name)
        return search(task, method, grid, seed)

    search = video.search
    monkeypatch.setattr(video, "search", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_constrained_video(tmp_path, settings, n_seeds=2, quiet=True)
    rows = json.loads((tmp_path / VIDEO_FILE).read_text())["runs"]
    assert [row["method"] for row in rows] == ran == NAMES[:2]
    monkeypatch.setattr(video, "search", search)
    again = run_constrained_video(tmp_path, settings, n_seeds=2, quiet=True)
    assert [row["rmse"] for row in again["runs"]] == [row["rmse"] for row in report["runs"]]


def test_other_settings_are_refused(report, settings, folder):
    with pytest.raises(ValueError, match="holds results with n_epochs=2"):
        run_constrained_video(folder, replace(settings, n_epochs=3), quiet=True)


def row(seed, method, error, **changes):
    cell = {"seed": seed, "noise": 0.1, "model": "UT", "depth": 3, "method": method, "diverged": None}
    numbers = {"mean_rmse": error, "rmse": [error], "layer_rmse": [2 * error, error], "seconds_per_step": error}
    return {**cell, **numbers, "test_descending_share": 1.0, "feasible": True, **changes}


def test_differences_are_taken_seed_by_seed():
    runs = [row(seed, "constrained", error) for seed, error in enumerate((1.0, 2.0, 3.5))]
    runs += [row(seed, "unconstrained", error) for seed, error in enumerate((2.0, 3.0, 4.0))]
    constrained, unconstrained = summarise({"runs": runs})["methods"]
    assert constrained["difference"] == pytest.approx(-2.5 / 3)
    assert 0 < constrained["p"] < 0.05
    assert constrained["overhead"] == pytest.approx(2 / 3)
    assert unconstrained["difference"] is None
    assert unconstrained["rmse_error"] == pytest.approx([1 / np.sqrt(3)])
    first, second = summarise({"runs": runs})["wins"]
    assert (first["n_compared"], first["n_better"], first["n_certainly_better"]) == (1, 1, 1)
    assert (second["n_compared"], second["overhead"]) == (0, None)


def test_comparisons_are_counted_over_models_by_their_sign_and_their_certainty():
    better, worse, unsure, unsure_too = (1.0, 2.0, 3.5), (3.5, 4.0, 5.5), (1.0, 3.5, 3.0), (3.0, 2.5, 5.5)
    runs = []
    for depth, errors in enumerate((better, worse, worse, unsure, unsure_too)):
        runs += [row(seed, "constrained", error, depth=depth) for seed, error in enumerate(errors)]
        runs += [row(seed, "unconstrained", error, depth=depth) for seed, error in enumerate((2.0, 3.0, 4.0))]
        runs += [
            row(3, "constrained", 9.0, depth=depth),
            row(3, "unconstrained", 1.0, depth=depth, diverged="training"),
        ]
        runs += [row(4, "deep supervision", 1.0, depth=depth)]
    found = summarise({"runs": runs})
    constrained, deep = found["wins"]
    assert [part["n_seeds"] for part in found["methods"][:3]] == [4, 3, 1]
    assert (constrained["n_compared"], constrained["n_better"]) == (5, 2)
    assert (constrained["n_certainly_better"], constrained["n_certainly_worse"]) == (1, 2)
    assert deep["n_compared"] == 0  # no seed is that of both


def test_the_text_has_a_row_for_each_method(report):
    text = format_constrained_video(report)
    for name in NAMES:
        assert text.count(f" {name} ") >= 4
    assert "2 seeds" in text
    assert "UT, 2 layers, noise 0.11, seed 0" in text


def test_the_command_line(report, settings, folder, capsys):
    arguments = ["reproduce", "constrained-video", "--small", "--quiet", "--seeds", "2", "--out", str(folder)]
    own = ["--size", "16", "--n-frames", "12", "--noises", "0", "0.11", "--n-epochs", "3", "--search-once"]
    assert cli.main([*arguments, *own]) != 0
    assert "holds results with" in capsys.readouterr().err
    assert cli.main(["reproduce", "constrained-video", "--source", "absent", "--out", str(folder.parent / "no")]) != 0
    assert "source='absent' is no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_frames": 4}, "n_frames must be an integer of at least 5"),
        ({"size": 20}, "patch_size must divide size=20"),
        ({"warmup_epochs": -1}, "warmup_epochs must be an integer from 0"),
        ({"models": ("CNN",)}, "models must hold some of"),
        ({"n_atoms": 10}, "n_atoms must be at least the 64 pixels"),
        ({"n_heads": 5}, "n_heads must divide n_hidden=64"),
        ({"depths": (1,)}, "depths must hold one or more integers of at least 2"),
        ({"noises": ()}, "^noises must hold"),
        ({"test_noises": (-0.1,)}, "test_noises must hold"),
        ({"least_noise": 0.0}, "least_noise must be a positive"),
        ({"resilience": 0.0}, "resilience must be a positive"),
        ({"learning_rates": ()}, "learning_rates must hold"),
        ({"alphas": (1.0, 0.1)}, "alphas must hold numbers from 0 and below 1"),
        ({"learning_rates": (-1e-3,)}, "learning_rates must hold one or more positive numbers"),
        ({"weight_decays": (0.0, -1.0)}, "weight_decays must hold one or more numbers from 0"),
        ({"ablation_resiliences": (None, 0.0)}, "ablation_resiliences must hold one or more positive numbers or None"),
        ({"alphas": (0.1,)}, "so that the search is equal"),
        ({"ablation_resiliences": ()}, "ablation_resiliences must hold"),
        ({"n_epochs": 0}, "n_epochs must be a positive integer"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ValueError, match=message):
        ConstrainedVideoSettings.small(**change)

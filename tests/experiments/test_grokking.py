"""The experiment on grokking, on tables that are learned in seconds."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from convexformer import cli, plot
from convexformer.experiments import GrokkingSettings, format_grokking, run_grokking
from convexformer.experiments.grokking import FILE, METHODS, experiment, learned
from convexformer.experiments.grokking.data import describe_table, make_split
from convexformer.experiments.grokking.figures import _draw_steps, _on_one_grid, draw_figures
from convexformer.experiments.grokking.methods import chosen_methods
from convexformer.experiments.grokking.report import remark, summarise
from convexformer.experiments.grokking.watch import COURSE, Watch
from convexformer_solvers import Certificate


@pytest.fixture(scope="module")
def settings():
    """Settings of a run of seconds: of the table modulo 19 most rows are for training."""
    return GrokkingSettings.small(
        moduli=(19,),
        fraction=0.8,
        n_steps=30,
        untuned_steps=20,
        tuning_steps=10,
        learning_rates=(1e-2,),
        decays=(0.0, 1.0),
        transformer_width=16,
        embedding_width=8,
        n_hidden=16,
        n_heads=8,
        n_gates=40,
        alpha_ratio=0.05,
        greedy_gates=10,
        tol=1e-3,
        greedy_tol=1e-2,
        learned_width=4,
        learned_gates=8,
        projection_steps=25,
        head_steps=5,
        joint_hold=10,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("out") / "new"


@pytest.fixture(scope="module")
def report(settings, folder):
    def draw_some(report, folder):
        runs = [run for run in report["runs"] if run["family"] == "certified convex programs"]
        return draw_figures(report | {"runs": runs}, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "draw_figures", draw_some)  # the others take seconds and are drawn alike
        return run_grokking(folder, settings, n_seeds=2, quiet=True)


def runs_of(report, method):
    return [run for run in report["runs"] if run["method"] == method]


# The experiment


def test_every_method_is_there_for_every_seed(report, settings):
    names = [method.name for method in chosen_methods(settings)]
    assert len(names) == 11
    assert [(run["method"], run["seed"]) for run in report["runs"]] == [
        (name, seed) for name in names for seed in (0, 1)
    ]
    assert [row["method"] for row in report["medians"]] == names


def test_the_search_of_every_tuned_method_has_the_same_budget(report, settings):
    for method in chosen_methods(settings):
        trials = experiment.trials_of(report, 19, method.name)
        pairs = [(trial["learning_rate"], trial["weight_decay"]) for trial in trials]
        assert pairs == (settings.grid if method.tuned else [])
        assert all(trial["steps"] <= settings.tuning_steps for trial in trials)
        for run in runs_of(report, method.name):
            assert run["tuning_steps"] == sum(trial["steps"] for trial in trials)
            if method.tuned:
                assert (run["learning_rate"], run["weight_decay"]) == experiment.best_pair(trials)


def test_convex_methods_come_with_a_certificate_and_say_what_they_were_given(report, settings):
    for method in chosen_methods(settings):
        tol = settings.tol if method.name == "fully convex" else settings.greedy_tol
        for run in runs_of(report, method.name):
            assert ("relative_gap" in run) is (method.convex or method.name == "convex block, projection")
            if method.convex:
                assert 0 <= run["relative_gap"] <= tol
                assert run["certified_steps"] == run["curve"]["step"][-1]
                assert "discrete logarithms to base 2" in run["structure"]


def test_the_fully_convex_program_learns_the_group(report):
    for run in runs_of(report, "fully convex"):
        assert run["test_step"] is not None
        assert run["test_step"] <= run["certified_steps"]
        assert run["final_test_accuracy"] >= 0.99


def test_projection_ends_with_a_certified_block_and_counts_its_work(report, settings):
    for run in runs_of(report, "convex block, projection"):
        curve = run["curve"]
        assert 0 <= run["relative_gap"] <= settings.greedy_tol
        assert curve["step"] == [8, 16, 24, 25]
        assert curve["head_steps"][-1] > 26 * settings.head_steps
        # One gradient for each step of the block and one for each of the embedding.
        differences = np.subtract(curve["gradient_evaluations"], curve["head_steps"])
        assert differences.tolist() == curve["step"]
        assert curve["train_loss"][-1] < np.log(19)  # that of guessing


def test_learned_embeddings_are_told_nothing_of_the_group(report):
    for name in ("convex block, joint", "convex block, projection"):
        assert all(run["structure"].startswith("none of the group") for run in runs_of(report, name))


def test_a_layer_more_fits_the_training_rows_better(report):
    for one, two in zip(
        runs_of(report, "layer-wise convex, L = 1"), runs_of(report, "layer-wise convex, L = 2"), strict=True
    ):
        assert len(one["curve"]["step"]) == 1
        assert len(two["curve"]["step"]) == 2
        # The first layer of both is the same program.
        assert two["curve"]["train_loss"][0] == pytest.approx(one["curve"]["train_loss"][0], rel=1e-6)
        assert two["curve"]["train_loss"][1] < two["curve"]["train_loss"][0]
        assert two["curve"]["seconds"] == sorted(two["curve"]["seconds"])


def test_curves_agree_with_the_milestones(report, settings):
    for run in report["runs"]:
        curve = run["curve"]
        assert set(curve) == set(COURSE)
        assert curve["step"] == sorted(set(curve["step"]))
        assert curve["seconds"] == sorted(curve["seconds"])
        assert curve["step"][-1] == run["steps"] <= run["n_steps"]
        for name in ("train", "test"):
            reached = [
                s for s, a in zip(curve["step"], curve[f"{name}_accuracy"], strict=True) if a >= settings.threshold
            ]
            assert run[f"{name}_step"] == (reached[0] if reached else None)
        if run["test_step"] is not None and run["train_step"] is not None:
            assert run["delay"] == run["test_step"] - run["train_step"]
        if run["test_step"] is None and not run["convex"]:
            assert run["steps"] == run["n_steps"]


def test_everything_is_on_disk_and_in_the_text(report, folder):
    assert json.loads((folder / FILE).read_text()) == report
    assert [figure.split("/")[-1] for figure in report["figures"]] == [
        "accuracy_p19.png",
        "loss_p19.png",
        "steps_p19.png",
    ]
    for figure in report["figures"]:
        assert Path(figure).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = format_grokking(report)
    for row in report["medians"]:
        (line,) = (line for line in text.splitlines() if f" {row['method']}  " in line)
        unreached = "never" if row["convex"] else f">{row['n_steps']:.0f}"
        shown = unreached if row["test_step"] is None else f"{row['test_step']:.0f}"
        assert f" {shown} " in line
        assert f" {row['n_reached']}/2 " in line
    assert "table p = 19: 342 rows, 274 to train on" in text


# Going on


def test_an_interrupted_run_goes_on_with_what_is_missing(settings, tmp_path, monkeypatch):
    began, allowed = [], 3

    def counted(unit):
        def run(p, method, which, *rest):
            if len(began) == allowed:
                raise KeyboardInterrupt
            began.append((p, method, which))
            return unit(p, method, which, *rest)

        return run

    monkeypatch.setattr(experiment, "draw_figures", lambda report, folder: [])
    for name in ("_trial", "_run"):
        monkeypatch.setattr(experiment, name, counted(getattr(experiment, name)))
    with pytest.raises(KeyboardInterrupt):
        run_grokking(tmp_path, settings, n_seeds=2, methods=["MLP"], quiet=True)
    first = json.loads((tmp_path / FILE).read_text())
    assert [len(first[name]) for name in ("trials", "runs")] == [2, 1]
    allowed = np.inf
    second = run_grokking(tmp_path, settings, n_seeds=2, methods=["MLP"], quiet=True)
    assert len(began) == len(set(began)) == 8
    assert second["trials"][:2] == first["trials"]
    assert second["runs"][:1] == first["runs"]
    # Other methods, depths and tables join the same report.
    other = dataclasses.replace(settings, moduli=(11,), layers=(1,))
    third = run_grokking(tmp_path, other, n_seeds=1, methods=["fully"], quiet=True)
    assert third["runs"][:-1] == second["runs"]
    assert (third["runs"][-1]["p"], third["runs"][-1]["method"]) == (11, "fully convex")
    with pytest.raises(ValueError, match=r"holds results with n_steps=30, not 31; choose another folder"):
        run_grokking(tmp_path, dataclasses.replace(settings, n_steps=31), quiet=True)


def test_the_command_runs_the_experiment(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(experiment, "draw_figures", lambda report, folder: [])  # those of the fixture are checked
    options = ["--moduli", 7, 15, "--methods", "fully", "MLP, quadratic", "--n-steps", 400, "--tuning-steps", 10]
    command = ["reproduce", "grokking", "--small", "--seeds", 1, "--out", tmp_path, "--json", *options]
    assert cli.main([str(part) for part in command]) == 0
    captured = capsys.readouterr()
    shown, stored = json.loads(captured.out), json.loads((tmp_path / FILE).read_text())
    assert shown == {name: value for name, value in stored.items() if name != "runs"}
    assert stored["settings"]["n_steps"] == 400
    assert [(run["p"], run["method"]) for run in stored["runs"]] == [
        (7, "MLP, quadratic"),
        (7, "fully convex"),
        (15, "MLP, quadratic"),
    ]
    assert stored["skipped"] == [
        "fully convex, p = 15: its tokens are waves over discrete logarithms, which need a prime"
    ]


# Parts


def test_a_watch_counts_the_first_look_and_ends_some_time_later():
    split = make_split(7, seed=0)
    right, wrong = (
        [torch.nn.functional.one_hot((part.labels + shift) % 7, 7).float() for part in (split.train, split.test)]
        for shift in (0, 1)
    )
    watch = Watch(split, n_steps=100, look_every=10, run_on=1.5)
    looks = [(0, wrong, wrong), (10, right, wrong), (20, right, right), (30, right, wrong), (40, right, wrong)]
    ended = [watch.look(lambda train=train, test=test: (train[0], test[1]), step=step) for step, train, test in looks]
    assert ended == [False, False, False, True, True]
    found = experiment.milestones(watch)
    assert (found["train_step"], found["test_step"], found["delay"]) == (10, 20, 10)
    assert found["final_test_accuracy"] == 0
    # Softmax of a one-hot row: the loss of the right label is log(1 + 6 / e).
    assert found["test_loss_then"] == pytest.approx(np.log1p(6 / np.e))
    assert [watch.due(step) for step in (0, 5, 10)] == [True, False, True]


def test_a_loss_that_is_not_finite_ends_a_run():
    split = make_split(7, seed=0)
    outputs = tuple(torch.full((len(part.labels), 7), torch.nan) for part in (split.train, split.test))
    watch = Watch(split, n_steps=100, look_every=10)
    assert watch.look(lambda: outputs, step=0)
    assert watch.looks == []
    assert experiment.milestones(watch)["steps"] == 0


def test_a_trial_that_needs_no_step_leaves_the_others_one(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "draw_figures", lambda report, folder: [])
    easy = dataclasses.replace(settings, threshold=1e-3)
    report = run_grokking(tmp_path, easy, n_seeds=1, methods=["MLP, ReLU"], quiet=True)
    assert [trial["test_step"] for trial in report["trials"]] == [0] * len(easy.grid)
    assert report["medians"][0]["test_step"] == 0


def test_the_report_says_which_networks_diverged(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "draw_figures", lambda report, folder: [])
    changed = dataclasses.replace(settings, learning_rates=(1e30,))
    names = ["MLP, ReLU", "transformer, L = 1", "fully"]
    with pytest.warns(RuntimeWarning, match="training diverged with every learning rate"):
        report = run_grokking(tmp_path, changed, n_seeds=2, methods=names, quiet=True)
    counts = {row["method"]: row["n_diverged"] for row in report["medians"]}
    assert counts == {"MLP, ReLU": 2, "transformer, L = 1": 2, "transformer, L = 1, untuned": 0, "fully convex": 0}
    text = format_grokking(report)
    assert text.count("diverged in 2 seeds") == 2
    assert "diverged in 2 seeds: MLP, ReLU, p = 19" in text


def test_the_median_delay_that_is_drawn_counts_seeds_without_one(tmp_path, monkeypatch):
    drawn, close = [], plot.require_matplotlib().close
    monkeypatch.setattr("convexformer.plot.save_figure", lambda figure, path: drawn.append(figure) or close(figure))
    run = {"method": "solved", "convex": True, "train_step": 10, "n_steps": 40}
    ended, failed = run | {"seed": 0, "test_step": 30, "delay": 20}, run | {"seed": 1, "test_step": None, "delay": None}
    for runs, n_bars in (([ended, ended | {"seed": 1}], 2), ([ended, failed], 0)):
        _draw_steps(runs, {"threshold": 0.99}, 5, tmp_path / "steps.png")
        assert sum(len(ax.collections) for ax in drawn.pop().axes) == n_bars
        _draw_steps(runs, {"threshold": 0.9}, 5, tmp_path / "steps.png")
        titles = [ax.get_title() for ax in drawn.pop().axes]
        assert titles == ["steps to 90% test accuracy", "delay: from 90% training to 90% test accuracy"]


def test_seeds_that_never_got_there_are_the_slowest():
    runs = [{"p": 5, "method": "m", "seed": s, "test_step": t, "n_steps": 50} for s, t in enumerate([None, 30, None])]
    (row,) = summarise(runs)["medians"]
    assert row["test_step"] is None
    assert row["n_reached"] == 1
    (row,) = summarise([*runs, *({**run, "test_step": 10} for run in runs)])["medians"]
    assert row["test_step"] == 20  # of 10, 10, 10, 30 and two that are above all


def test_the_text_says_how_far_runs_went_that_never_got_there():
    run = {"p": 5, "seed": 0, "train_step": 10, "test_step": None, "delay": None, "n_steps": 50, "steps": 50}
    runs = [run | {"method": "network", "convex": False}, run | {"method": "program", "convex": True}]
    runs += [run | {"method": "untrained", "convex": False, "train_step": None}]
    runs += [run | {"method": "there", "convex": False, "test_step": 30, "delay": 20}]
    text = format_grokking(summarise(runs) | {"tables": [], "skipped": [], "remark": "", "figures": []})
    cells = {words[1]: words[2:6] for words in (line.split() for line in text.splitlines()) if words[:1] == ["5"]}
    assert cells == {
        "network": ["10", ">50", ">40", "0/1"],
        "program": ["10", "never", "-", "0/1"],
        "untrained": [">50", ">50", "-", "0/1"],
        "there": ["10", "30", "20", "1/1"],
    }
    assert "diverged" not in text


def test_the_text_has_the_test_loss_at_the_end_beside_the_accuracy():
    run = {"p": 5, "seed": 0, "method": "network", "convex": False, "train_step": 10, "test_step": 30, "delay": 20}
    run |= {"n_steps": 50, "steps": 50, "test_loss_then": 0.75, "final_test_accuracy": 0.5, "final_test_loss": 0.125}
    text = format_grokking(summarise([run]) | {"tables": [], "skipped": [], "remark": "", "figures": []})
    titles, _, cells = (re.split(r" {2,}", line) for line in text.splitlines()[1:4])
    assert dict(zip(titles, cells, strict=False))["test loss then"] == "0.750"
    assert dict(zip(titles, cells, strict=False))["last test loss"] == "0.125"
    assert titles.index("last test loss") == titles.index("last test accuracy") + 1


def test_the_test_loss_then_is_that_of_the_seeds_that_got_there():
    run = {"p": 5, "seed": 0, "method": "network", "convex": False, "train_step": 10, "n_steps": 50, "steps": 50}
    runs = [run | {"test_step": 30, "test_loss_then": 0.75}, run | {"seed": 1, "test_step": None}]
    (row,) = summarise(runs)["medians"]
    assert (row["test_loss_then"], row["n_reached"], row["test_step"]) == (0.75, 1, None)
    assert "test loss then = that of the seeds that got there, alone." in remark(GrokkingSettings.small())


def test_bands_are_drawn_on_one_grid_and_ended_runs_keep_their_value():
    curves = [{"step": [1, 10], "value": [0.0, 1.0]}, {"step": [1, 100], "value": [0.0, 2.0]}]
    where, values = _on_one_grid(curves, "step", "value")
    assert where[0] == 1
    assert where[-1] == pytest.approx(100)
    np.testing.assert_allclose(values[0], np.minimum(np.log10(where), 1), atol=1e-12)
    np.testing.assert_allclose(values[1], np.log10(where), atol=1e-12)


def test_splits_are_the_same_for_symbols_and_waves():
    split = make_split(13, seed=3)
    waves = split.waves()
    assert waves.operands_train.tolist() == split.train.symbols.tolist()
    assert waves.y_test.tolist() == split.test.labels.tolist()
    (a, b), y = split.test.symbols.T, split.test.labels
    assert bool(((b * y - a) % 13 == 0).all())
    assert split.targets.sum(1).tolist() == [1.0] * len(split.targets)
    assert describe_table(13)["divisors"] == []


def test_names_of_methods_differ_and_unknown_ones_are_refused():
    names = [method.name for method in METHODS]
    assert len(set(names)) == len(names)
    with pytest.raises(ValueError, match=r"methods must begin like some of .*got 'perceptron'"):
        chosen_methods(GrokkingSettings(), ["perceptron"])


@pytest.mark.parametrize("name", ["layers", "transformer_layers"])
def test_depths_that_no_method_has_are_refused(name):
    with pytest.raises(ValueError, match=rf"^{name} must hold one or more of the depths \[1, 2, 4\], got \(2, 3\)"):
        chosen_methods(GrokkingSettings(**{name: (2, 3)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_steps": 0}, "n_steps must be a positive integer, got 0"),
        ({"moduli": (2,)}, "moduli must hold one or more integers of at least 3"),
        ({"layers": ()}, "layers must hold one or more integers of at least 1"),
        ({"fraction": 1.0}, "fraction must be between 0 and 1"),
        ({"joint_rate": 0.0}, "joint_rate must be a positive"),
        ({"greedy_tol": -1.0}, "greedy_tol must be a positive"),
        ({"run_on": 0.5}, "run_on must be a number of at least 1"),
        ({"decays": (-1.0,)}, "decays must hold one or more numbers of at least 0"),
        ({"learning_rates": (0.0,)}, "learning_rates must hold one or more positive numbers"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        GrokkingSettings.small(**changes)


def test_any_device_gives_the_same(settings, tmp_path, accelerator, monkeypatch):
    monkeypatch.setattr(experiment, "draw_figures", lambda report, folder: [])  # those of the fixture are checked
    settings = dataclasses.replace(
        settings,
        moduli=(11,),
        n_steps=10,
        untuned_steps=10,
        tuning_steps=5,
        decays=(0.0,),
        n_gates=4,
        greedy_gates=4,
        learned_gates=4,
        tol=1e-2,
        greedy_tol=1e-1,
        projection_steps=1,
    )
    runs = [
        run_grokking(tmp_path / device, dataclasses.replace(settings, device=device), n_seeds=1, quiet=True)["runs"]
        for device in ("cpu", accelerator)
    ]
    for here, there in zip(*runs, strict=True):
        assert there["method"] == here["method"]
        for value in ("final_train_accuracy", "final_test_accuracy", "final_test_loss"):
            assert there[value] == pytest.approx(here[value], rel=1e-2, abs=0.02), here["method"]


def test_the_certified_gap_is_the_largest_of_all_seeds():
    runs = [
        {"p": 5, "method": "m", "seed": seed, "test_step": 1, "relative_gap": gap} for seed, gap in enumerate([1, 9])
    ]
    assert summarise(runs)["medians"][0]["relative_gap"] == 9


def test_the_certified_gap_of_projection_is_the_largest_of_all_blocks(monkeypatch):
    gaps = iter([0.5, 0.1])

    class Certified:
        n_iter, coef = 1, None
        certificate = property(lambda self: Certificate(1.0 + next(gaps), 1.0, 1.0))

    monkeypatch.setattr(learned, "_look", lambda state, watch: False)
    monkeypatch.setattr(learned, "replace", lambda state, **changes: state)
    settings = GrokkingSettings.small()
    shown = learned._Shown(Watch(make_split(5, seed=0), n_steps=16, look_every=8), settings, alpha=0.1)
    state = SimpleNamespace(certified_head=lambda *arguments, **options: Certified(), head_steps=0)
    state.gradient_evaluations, state.problem, state.tables = 0, torch.zeros(1), torch.zeros(1)
    for state.step in (8, 16):
        shown(state)
    assert shown.relative_gap == pytest.approx(0.5)

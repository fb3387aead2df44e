"""What all experiments share: reports on disk, and going on with them seed by seed."""

import json
from functools import partial

import pytest
import torch
from stand_in_device import NAME, stand_in

from convexformer.experiments import finished_seeds
from convexformer.experiments.common import Unit, begin_report, medians, run_units, thinned, write_json
from convexformer.experiments.constrained.text_models import Readout
from convexformer.experiments.constrained.video import denoising_losses
from convexformer.experiments.corpora import with_noise
from convexformer.experiments.unfolded.aim import QuadraticPair
from convexformer.unfolded import UnrolledTransformer


@pytest.fixture
def path(tmp_path):
    return tmp_path / "report.json"


def fresh(**settings):
    return {"settings": {"n_steps": 3} | settings, "data": {"n_samples": 5}, "runs": [], "remark": "new"}


def squares(n_seeds, began):
    """Units that note their seed and give its square."""

    def run_seed(seed):
        began.append(seed)
        return [{"seed": seed, "value": seed**2}]

    return [Unit("runs", f"seed {seed}", {"seed": seed}, partial(run_seed, seed)) for seed in range(n_seeds)]


def drawn_numbers(network, tokens, real):
    pair, start = QuadraticPair.random(3, 2, seed=0)
    return (
        with_noise(tokens, real, 0.5, torch.Generator().manual_seed(0)),
        with_noise(tokens, real, 0.5),
        denoising_losses(noise=0.5, unit=1.0)(network, (tokens,)),
        Readout(4, 2, seed=0).linear.weight.cpu(),
        pair.b1,
        start,
    )


def test_the_default_device_of_torch_changes_no_numbers_of_experiments():
    given = UnrolledTransformer(2, n_layers=2, seed=0), torch.ones(4, 3, 2), torch.ones(4, 3)
    torch.manual_seed(0)
    wanted = drawn_numbers(*given)
    torch.manual_seed(0)
    with stand_in(), torch.device(NAME):
        found = drawn_numbers(*given)
    for one, other in zip(found, wanted, strict=True):
        assert one.device.type == "cpu"
        torch.testing.assert_close(one, other)


def test_finished_seeds_are_kept_and_the_missing_ones_run(path):
    def interrupt():
        raise KeyboardInterrupt

    units = squares(4, [])
    units[2] = units[2]._replace(run=interrupt)
    assert finished_seeds(path) == []
    with pytest.raises(KeyboardInterrupt):
        run_units(path, begin_report(path, fresh()), units, quiet=True)
    assert finished_seeds(path) == [0, 1]
    began, report = [], begin_report(path, fresh())
    run_units(path, report, squares(4, began), quiet=True)
    assert began == [2, 3]
    assert [(run["seed"], run["value"]) for run in report["runs"]] == [(0, 0), (1, 1), (2, 4), (3, 9)]
    assert json.loads(path.read_text()) == report
    # Fewer seeds than the file has: nothing is run, nothing is lost.
    again = begin_report(path, fresh())
    run_units(path, again, squares(1, began), quiet=True)
    assert again == report
    assert began == [2, 3]


def test_what_does_not_depend_on_seeds_is_that_of_this_call(path):
    write_json(path, fresh() | {"remark": "old", "runs": [{"seed": 0}]})
    report = begin_report(path, fresh())
    assert report["remark"] == "new"
    assert report["runs"] == [{"seed": 0}]


def test_reports_of_other_settings_or_data_or_other_files_are_refused(path):
    write_json(path, fresh())
    with pytest.raises(ValueError, match=r"holds results with n_steps=3, not 4; choose another folder"):
        begin_report(path, fresh(n_steps=4))
    with pytest.raises(ValueError, match=r"holds results with lr=None, not 0.1"):
        begin_report(path, fresh(lr=0.1))
    with pytest.raises(ValueError, match=r"holds results with n_samples=5, not 6"):
        begin_report(path, fresh() | {"data": {"n_samples": 6}})
    for text in ("{", "[]", '{"settings": {}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a report of this experiment"):
            begin_report(path, fresh())


@pytest.mark.parametrize("runs", [3, {"seed": 0}, [3], "deep"])
def test_a_report_without_rows_is_named(runs, path):
    path.write_text("[" * 100_000 if runs == "deep" else json.dumps(fresh() | {"runs": runs}))
    for read in (lambda: begin_report(path, fresh()), lambda: finished_seeds(path)):
        with pytest.raises(ValueError, match=r"report\.json is not a report of this experiment"):
            read()


def test_a_report_that_cannot_be_written_leaves_the_old_one(path):
    write_json(path, {"value": 1.0})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"value": float("nan")})
    assert json.loads(path.read_text()) == {"value": 1.0}


@pytest.mark.parametrize("count", [0, 1, 2, 99, 100, 101, 5000])
def test_thinned_curves_keep_first_and_last_and_order(count):
    curve = {"step": list(range(count)), "value": [step**2 for step in range(count)], "name": "x"}
    thin = thinned(curve, ["step", "value"])
    assert len(thin["step"]) <= 101
    assert thin["step"] == sorted(set(thin["step"]))
    assert [step**2 for step in thin["step"]] == thin["value"]
    assert thin["step"][:1] == curve["step"][:1]
    assert thin["step"][-1:] == curve["step"][-1:]
    assert thin["name"] == "x"


def test_medians_are_over_rows_of_the_same_keys():
    rows = [
        {"model": model, "seed": seed, "loss": loss, "test_r2": r2}
        for seed, (loss, r2) in enumerate([(1.0, 0.5), (5.0, 0.1), (3.0, 0.2)])
        for model, loss in (("a", loss), ("b", None))
    ]
    first, second = medians(rows, ("model",), ("test_r2",))
    assert first == {"model": "a", "loss": 3.0, "test_r2": 0.2, "test_r2_range": [0.1, 0.5], "n_seeds": 3}
    assert (second["model"], second["loss"]) == ("b", None)
    assert "test_r2_range" not in medians(rows, ("model",))[0]


def test_runs_that_could_not_be_told_apart_are_refused(path):
    report = {"rows": []}
    units = [Unit("rows", "", {"data": name}, lambda: [{"data": "train"}]) for name in ("train", "test", "train")]
    with pytest.raises(ValueError, match=r"files of different names; two runs have \{'data': 'train'\}"):
        run_units(path, report, units, quiet=True)
    assert report["rows"] == []

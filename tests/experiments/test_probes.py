"""The experiment on probes, on few samples whose labels the means of tokens do not tell."""

import json
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from convexformer import cli, plot
from convexformer.experiments import ProbesSettings, format_probes, run_probes
from convexformer.experiments.probes import FILE, data, experiment, methods, series
from convexformer.experiments.probes.data import load_data, stratified_order
from convexformer.experiments.probes.figures import draw_figures
from convexformer.experiments.probes.networks import GatedAttentionPooling
from convexformer.experiments.probes.report import paired_interval, remark, summarise
from convexformer.nn import AttentiveProbe

EMBEDDED = "bags"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Bags with a token far out, to the right for one label and to the left for the other, and series in a folder."""
    folder = tmp_path_factory.mktemp("sources")
    stream = np.random.default_rng(0)
    lengths = stream.integers(2, 7, size=120)
    labels = np.arange(120) % 2
    rows = []
    for length, label in zip(lengths, labels, strict=True):
        bag = stream.normal(size=(length, 3))
        bag[0, 0] = 4.0 * (2 * label - 1)
        rows.append(stream.permutation(bag))
    np.savez(folder / f"{EMBEDDED}.npz", flat=np.concatenate(rows).astype(np.float16), lengths=lengths, y=labels)
    lines = ["@classLabel true up down", "@data"]
    for number in range(30):
        trend = 1 if number % 2 else -1
        channels = [np.cumsum(trend + stream.normal(size=12 - number % 3)), stream.normal(size=12 - number % 3)]
        shown = [",".join(f"{value:.4f}" for value in channel) for channel in channels]
        lines.append(":".join([*shown, "up" if trend > 0 else "down"]))
    own = folder / "data" / "Trends"
    own.mkdir(parents=True)
    for part, chosen in (("TRAIN", lines[2:17]), ("TEST", lines[17:])):
        (own / f"Trends_{part}.ts").write_text("\n".join(["# comment", *lines[:2], *chosen]) + "\n")
    return folder


@pytest.fixture
def carried(sources, monkeypatch):
    monkeypatch.setattr(series, "carried_folder", lambda: sources / "data")


@pytest.fixture(scope="module")
def settings(sources):
    return ProbesSettings.small(
        datasets=(str(sources / f"{EMBEDDED}.npz"), "digits"),
        n_samples=120,
        budgets=(40,),
        inverse_decays=(1e-2, 1.0),
        learning_rates=(3e-2,),
        least_steps=10,
        n_epochs=1,
        n_alphas=2,
        generated=2,
        generation_steps=5,
        queries=(4,),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("out") / "new"


@pytest.fixture(scope="module")
def report(settings, folder):
    return run_probes(folder, settings, n_seeds=2, quiet=True)


def test_every_method_budget_data_set_and_seed_is_there(report):
    keys = {(row["data"], row["budget"], row["seed"], row["method"]) for row in report["results"]}
    assert len(keys) == len(report["results"])
    assert {key[:3] for key in keys} == {(d, b, s) for d in (EMBEDDED, "digits") for b in (40, None) for s in (0, 1)}
    names = {row["method"] for row in report["results"] if row["data"] == "digits"}
    assert f"{methods.CERTIFIED}, nuclear" in names
    assert methods.FIRST not in names  # no token of a digit stands for all
    assert json.dumps(report)


def test_certified_rows_have_a_gap_within_the_tolerance(report):
    rows = [row for row in report["results"] if row["method"].startswith("certified")]
    assert rows
    assert all(0 <= row["relative_gap"] <= report["settings"]["tol"] for row in rows)
    assert all(row["n_weightings"] <= row["n_dictionary"] for row in rows)
    others = [row for row in report["results"] if not row["method"].startswith("certified")]
    assert all(row["relative_gap"] is None for row in others)


def test_hits_are_those_of_the_test_samples(report):
    for row in report["summaries"]:
        if row["method"] == methods.CERTIFIED:
            own = [r for r in report["results"] if all(r[k] == row[k] for k in ("data", "budget", "method"))]
            assert row["accuracy"] == pytest.approx(np.mean([r["accuracy"] for r in own]))
            means = [
                r["accuracy"]
                for r in report["results"]
                if all(r[k] == row[k] for k in ("data", "budget")) and r["method"] == methods.MEAN
            ]
            assert row["to_mean"]["difference"] == pytest.approx(row["accuracy"] - np.mean(means))


def test_content_beats_the_mean_where_one_token_decides(report):
    (row,) = (
        r for r in report["summaries"] if (r["data"], r["budget"], r["method"]) == (EMBEDDED, None, methods.CERTIFIED)
    )
    (majority,) = (
        r for r in report["summaries"] if (r["data"], r["budget"], r["method"]) == (EMBEDDED, None, methods.MAJORITY)
    )
    assert row["accuracy"] > 0.9 > 0.6 > majority["accuracy"]
    assert majority["auroc"] == 0.5


def test_methods_of_equal_accuracy_do_not_hide_each_other_in_the_figure(report, tmp_path, monkeypatch):
    drawn, close = [], plot.require_matplotlib().close
    monkeypatch.setattr("convexformer.plot.save_figure", lambda figure, path: drawn.append(figure) or close(figure))
    same = [row | {"accuracy": 0.5} for row in report["summaries"]]
    draw_figures(report | {"summaries": same}, tmp_path)
    for ax in drawn[0].axes:
        points = [tuple(point) for line in ax.lines if line.get_marker() == "o" for point in line.get_xydata()]
        assert len(points) == len(set(points)) > 2
        assert all(abs(np.log(x / min(ax.get_xticks(), key=lambda tick: abs(tick - x)))) < 0.1 for x, _ in points)


def test_numbers_of_seconds_do_not_overlap(tmp_path, monkeypatch):
    drawn, close = [], plot.require_matplotlib().close
    monkeypatch.setattr("convexformer.plot.save_figure", lambda figure, path: drawn.append(figure) or close(figure))
    ranges = {"narrow": (3.16, 3.56), "in a decade": (3.1, 8.7), "short": (0.02, 0.09), "wide": (1.0, 2e4)}
    row = {"budget": None, "n_labels": 100, "accuracy": 0.5, "accuracy_error": None}
    rows = [
        row | {"data": name, "method": method, "seconds": seconds}
        for name, ends in ranges.items()
        for method, seconds in zip((methods.MEAN, methods.CERTIFIED), ends, strict=True)
    ]
    draw_figures({"summaries": rows, "data": {"datasets_read": [{"name": name} for name in ranges]}}, tmp_path)
    drawn[1].draw_without_rendering()
    for ax in drawn[1].axes[: len(ranges)]:
        labels = [*ax.get_xticklabels(), *ax.get_xticklabels(minor=True)]
        places = {label.get_position()[0]: label.get_window_extent() for label in labels if label.get_text()}
        low, high = ax.get_xlim()
        boxes = [places[place] for place in sorted(places) if low <= place <= high]
        assert len(boxes) >= 2
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_a_second_call_runs_nothing_again(report, settings, folder, monkeypatch):
    monkeypatch.setattr(experiment, "_measured", lambda *arguments: pytest.fail("it was run again"))
    monkeypatch.setattr(experiment, "draw_figures", lambda report, folder: [])
    assert run_probes(folder, settings, n_seeds=2, quiet=True)["results"] == report["results"]
    assert all((folder / name).stat().st_size > 10_000 for name in ("accuracy.png", "seconds.png"))


def test_an_interrupted_call_goes_on(settings, tmp_path, monkeypatch):
    ran = []

    def interrupted(key, *arguments):
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append(key["method"])
        return measured(key, *arguments)

    measured = experiment._measured
    monkeypatch.setattr(experiment, "_measured", interrupted)
    monkeypatch.setattr(experiment, "draw_figures", lambda report, folder: [])
    changed = ProbesSettings(**{**vars(settings), "datasets": settings.datasets[:1], "budgets": (200,)})
    with pytest.raises(KeyboardInterrupt):
        run_probes(tmp_path, changed, n_seeds=1, quiet=True)
    rows = json.loads((tmp_path / FILE).read_text())["results"]
    assert [row["method"] for row in rows] == ran
    monkeypatch.setattr(experiment, "_measured", measured)
    again = run_probes(tmp_path, changed, n_seeds=1, quiet=True)
    assert again["results"][:3] == rows
    assert len(again["results"]) > 3


def test_other_settings_are_refused(settings, report, folder):
    with pytest.raises(ValueError, match="holds results with window=8"):
        run_probes(folder, ProbesSettings(**{**vars(settings), "window": 5}), quiet=True)


def test_the_text_says_where_it_helps_by_the_numbers(report):
    text = format_probes(report)
    assert "2 seeds" in text
    for row in report["summaries"]:
        assert row["method"] in text
    worse = [dict(row) for row in report["summaries"]]
    for row in worse:
        row["to_mean"] = {"difference": -0.1, "low": -0.2, "high": -0.05}
    found = remark(report | {"summaries": worse, "left_out": ["aeon:X: it is absent"]})
    assert "It hurts on bags with 40 labels" in found
    assert "It helps" not in found
    assert "-10.0 points on average" in found
    assert "Left out: aeon:X: it is absent." in found


def test_the_report_says_which_probes_diverged(settings, tmp_path):
    one = replace(settings, datasets=settings.datasets[:1], learning_rates=(1e30,))
    with pytest.warns(RuntimeWarning, match="training diverged with every learning rate"):
        report = run_probes(tmp_path, one, n_seeds=1, quiet=True)
    text = " ".join(format_probes(report).split())
    trained = ("attentive probe, 1 query", methods.ATTENTIVE, "gated attention pooling (ABMIL)")
    n_labels = {row["n_labels"] for row in report["results"]}
    for method, count in product(trained, n_labels):
        assert f"{method} on bags with {count} labels, which diverged with every learning rate in 1 seed." in text
    assert not {row["method"] for row in report["summaries"]} & set(trained)
    assert all(row["to_attentive"] is None for row in report["summaries"])


def test_splits_do_not_share_samples_and_budgets_are_nested(settings):
    one = load_data(settings.datasets[0], settings, None)
    small, large = (one.split(size, 0, settings) for size in (40, None))
    np.testing.assert_array_equal(small.test.labels, large.test.labels)
    assert len(small.fit.labels) == 32
    assert len(small.validation.labels) == 8
    assert sum(len(part.labels) for part in large[:3]) == len(one.labels)
    rows = large.fit.tokens[large.fit.mask]
    torch.testing.assert_close(rows.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.std(0, correction=0), torch.ones(3), atol=1e-5, rtol=0)
    assert not large.fit.tokens[~large.fit.mask].any()


def test_every_beginning_of_an_order_has_the_shares_of_all():
    labels = np.repeat([0, 1, 2], [60, 30, 10])
    order = stratified_order(labels, 3)
    assert sorted(order.tolist()) == list(range(100))
    for size in (10, 50, 70):
        np.testing.assert_allclose(np.bincount(labels[order[:size]], minlength=3), size * np.array([0.6, 0.3, 0.1]))


def test_intervals_are_those_of_a_mean_for_one_seed_and_wider_where_seeds_differ():
    stream = np.random.default_rng(0)
    values, which = stream.normal(size=400), np.arange(400)
    found = paired_interval([values], [which])
    half = 1.96 * values.std() / 20
    assert found["high"] - found["difference"] == pytest.approx(half)
    apart = paired_interval([values + 1, values - 1], [which, which + 400])
    alike = paired_interval([values, values], [which, which + 400])
    assert alike["high"] - alike["low"] == pytest.approx(2 * half / np.sqrt(2))
    assert apart["high"] - apart["low"] > 2 * (alike["high"] - alike["low"])


def test_intervals_are_clustered_by_sample_and_by_seed():
    stream = np.random.default_rng(0)
    samples = [np.sort(stream.permutation(30)[:20]) for _ in range(4)]
    values = [stream.normal(seed, size=20) + which / 10 for seed, which in enumerate(samples)]
    found = paired_interval(values, samples)
    residuals = np.zeros((30, 4))
    for seed, which in enumerate(samples):
        residuals[which, seed] = values[seed] - np.mean(values)
    by_sample, by_seed, each = (np.square(part).sum() for part in (residuals.sum(1), residuals.sum(0), residuals))
    half = 1.96 * np.sqrt(by_sample + by_seed - each) / 80
    assert by_seed > each
    assert list(found.values()) == pytest.approx([np.mean(values), np.mean(values) - half, np.mean(values) + half])


def test_the_text_counts_intervals_without_zero_and_compares_seconds(report):
    summary = [dict(row) for row in report["summaries"]]
    cells = [row for row in summary if row["method"] == methods.CERTIFIED]
    places = [f"{row['data']} with {row['n_labels']} labels" for row in cells]
    assert len(cells) == 4
    for row, low, seconds in zip(cells, (0.1, -0.1, -0.3, -0.18), (1.0, 2.0, 4.0, 8.0), strict=True):
        row |= {"to_mean": {"difference": low + 0.15, "low": low, "high": low + 0.2}, "seconds": seconds}
    for row in summary:
        if row["method"] == methods.ATTENTIVE:
            row["seconds"] = 2.0
    found = remark(report | {"summaries": summary})
    assert "+3.0 points on average over 4 pairs of data set and budget: better in 1 and worse in 1 of them" in found
    assert f"It helps on {places[0]}." in found
    assert f"The mean suffices, by intervals that hold zero, on {places[1]}, {places[3]}." in found
    assert f"It hurts on {places[2]}." in found
    assert "takes 1.5 times the seconds of that probe's in the median, from 0.5 to 4." in found


def test_the_gap_of_a_summary_is_the_largest_of_its_seeds(report):
    for row in report["summaries"]:
        own = [r for r in report["results"] if all(r[k] == row[k] for k in ("data", "budget", "method"))]
        gaps = [r["relative_gap"] for r in own if r["relative_gap"] is not None]
        assert row["relative_gap"] == max(gaps, default=None)


def test_a_method_that_only_some_seeds_have_is_compared_on_those(report):
    rows = [row for row in report["results"] if row["seed"] == 0 or row["method"] == methods.MEAN]
    for row in summarise(report | {"results": rows}):
        assert row["method"] == methods.MEAN or row["n_seeds"] == 1
        assert (row["to_mean"] is None) == (row["method"] == methods.MEAN)


@pytest.mark.parametrize("network", [GatedAttentionPooling(3, 2), AttentiveProbe(3, 2, 4)])
def test_padding_and_order_change_no_trained_probe(network):
    tokens = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(5) < torch.tensor([[2], [3], [5], [4]])
    padded = torch.cat([tokens, torch.full((4, 2, 3), 9.0)], 1)
    longer = torch.cat([mask, torch.zeros(4, 2, dtype=torch.bool)], 1)
    with torch.no_grad():
        expected = network(tokens, mask)
        torch.testing.assert_close(network(padded, longer), expected)
        order = [1, 0, 2, 3, 4]
        torch.testing.assert_close(network(tokens[:, order], mask[:, order]), expected)


def test_series_are_read_and_stacked(settings, carried):
    found, labels = series.load_series("Trends")
    assert len(found) == len(labels) == 30
    assert found[0].shape == (12, 2)
    one = load_data("aeon:Trends", settings, None)
    assert one.classes == ["down", "up"]
    assert one.samples[0].shape == (12 - settings.window + 1, 2 * settings.window)
    np.testing.assert_allclose(one.samples[0][1], found[0][1 : 1 + settings.window].flatten(), rtol=1e-6)


def test_two_texts_are_joined_and_encoded_once(settings, tmp_path, monkeypatch):
    asked = []

    def encode(texts, **options):
        asked.extend(texts)
        shape = (len(texts), 3, 2)
        outputs = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        return type("Activations", (), {"outputs": outputs, "lengths": np.array([2] * len(texts))})

    monkeypatch.setattr(data, "load_attention_activations", encode)
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{i % 2}\tone {i}\ttwo {i}\n" for i in range(30)))
    one = load_data(str(path), settings, tmp_path)
    assert asked[3] == "one 3 [SEP] two 3"
    assert one.has_first
    assert {len(sample) for sample in one.samples} == {2}


def test_a_missing_package_is_said_and_left_out_of_the_default_list_alone(settings, tmp_path, monkeypatch):
    def absent(source, settings, cache):
        if source.startswith("digits"):
            return load_data(source, settings, cache)
        raise ModuleNotFoundError("pip install it")

    monkeypatch.setattr(data, "load_data", absent)
    found, left_out = data.load_all(ProbesSettings.small(), tmp_path)
    assert [one.name for one in found] == ["digits"]
    assert left_out[0] == "aeon:BasicMotions: pip install it"
    with pytest.raises(ModuleNotFoundError, match="pip install it"):
        data.load_all(ProbesSettings.small(datasets=("digits", "aeon:BasicMotions")), tmp_path)


def test_without_aeon_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(series, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps aeon"):
        series.load_series("BasicMotions")


def test_bad_series(carried, tmp_path):
    with pytest.raises(ValueError, match=r"no 'aeon:Trend'; it carries \['Trends'\]"):
        series.load_series("Trend")
    for line, message in (("1,2:3:a", "channels of equal length"), ("1,?:a", "not numbers"), ("nan,1:a", "finite")):
        (tmp_path / "bad.ts").write_text(f"@data\n{line}\n")
        with pytest.raises(ValueError, match=f"line 2: .*{message}"):
            series.read_ts(tmp_path / "bad.ts")
    (tmp_path / "bad.ts").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bad.ts must be text in UTF-8"):
        series.read_ts(tmp_path / "bad.ts")


def test_bad_data(settings, tmp_path):
    np.savez(tmp_path / "one.npz", X=np.zeros((30, 2, 2)), y=np.zeros(30))
    with pytest.raises(ValueError, match="two labels or more"):
        load_data(str(tmp_path / "one.npz"), settings, tmp_path)
    labels = np.zeros(400, dtype=int)
    labels[:2] = 1
    np.savez(tmp_path / "rare.npz", X=np.random.default_rng(0).normal(size=(400, 2, 2)), y=labels)
    changed = ProbesSettings(**{**vars(settings), "n_samples": 400})
    with pytest.raises(ValueError, match="budgets: 8 samples of rare to fit have one class alone"):
        load_data(str(tmp_path / "rare.npz"), changed, tmp_path).split(10, 1, changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"datasets": ()}, "datasets must hold"),
        ({"n_samples": 5}, "n_samples must be an integer of at least 20"),
        ({"test_share": 1.0}, "test_share must lie between 0 and 1"),
        ({"budgets": (5,)}, "budgets must hold one or more integers of at least 10"),
        ({"learning_rates": (0.0,)}, "learning_rates must hold"),
        ({"weight_decays": (-1.0,)}, "weight_decays must hold"),
        ({"queries": ()}, "queries must hold"),
        ({"window": 0}, "window must be a positive integer"),
        ({"layer": -1}, "layer must be an integer of at least 0"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ValueError, match=message):
        ProbesSettings(**change)


def test_the_command_line(settings, tmp_path, capsys):
    arguments = ["reproduce", "probes", "--small", "--json", "--seeds", "1", "--out", str(tmp_path)]
    own = ["--datasets", settings.datasets[0], "--n-samples", "60", "--budgets", "200", "--n-alphas", "2"]
    assert cli.main([*arguments, *own, "--queries", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert "results" not in printed
    assert printed["settings"]["queries"] == [2]
    assert "Against the mean with logistic regression" in printed["remark"]
    assert cli.main([*arguments, *own, "--queries", "3"]) != 0
    assert "holds results with queries=[2]" in capsys.readouterr().err

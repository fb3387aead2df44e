"""The experiment on unfolded transformers, on few short sentences."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from convexformer import cli
from convexformer.datasets._sentences import read_sentences
from convexformer.experiments import UnfoldedSettings, format_unfolded, run_unfolded
from convexformer.experiments.corpora import load_corpus, read_labelled_sentences
from convexformer.experiments.unfolded import FILE, descent, experiment, figures
from convexformer.experiments.unfolded.aim import draw_regions
from convexformer.experiments.unfolded.classification import METHODS
from convexformer.experiments.unfolded.report import summarise
from convexformer.experiments.unfolded.variants import VARIANTS
from convexformer.unfolded import descent_report

GUARANTEED = "joint step (guaranteed)"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A corpus of two files and one of lines with labels, with word vectors of two dimensions in a file."""
    folder = tmp_path_factory.mktemp("corpora")
    stream = np.random.default_rng(0)
    words = [f"w{i}" for i in range(30)]
    vectors = stream.normal(size=(30, 4))
    (folder / "vectors.txt").write_text(
        "\n".join(f"{word} {' '.join(map(str, row))}" for word, row in zip(words, vectors.tolist(), strict=True))
    )

    def sentence(first, last):
        return " ".join(stream.choice(words[first:last], size=stream.integers(2, 8)))

    texts = {"a": [sentence(0, 20) for _ in range(40)], "b": [sentence(10, 30) for _ in range(50)]}
    for name, lines in texts.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    rows = [f"{name}\t{line}" for name, lines in texts.items() for line in lines]
    (folder / "rows.tsv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def settings(sources):
    return UnfoldedSettings.small(
        corpora=(f"{sources}/a.txt,{sources}/b.txt", f"{sources}/rows.tsv"),
        vectors=str(sources / "vectors.txt"),
        n_sentences=60,
        n_tokens=6,
        n_layers=3,
        n_shown=8,
        train_layers=2,
        n_steps=4,
        n_looks=2,
        learning_rates=(1e-2,),
        alphas=(1e-2,),
        depths=(1, 3),
        noises=(0.0, 1.0),
        aim_tokens=20,
        aim_features=8,
        aim_iterations=5,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("out") / "new"


@pytest.fixture(scope="module", autouse=True)
def regions_drawn_once(tmp_path_factory):
    """The figure of regions is the same whatever was run, and takes seconds."""
    path = tmp_path_factory.mktemp("regions") / "regions.png"

    def draw_or_copy(wanted):
        if not path.exists():
            draw_regions(path)
        shutil.copy(path, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "draw_regions", draw_or_copy)
        yield


@pytest.fixture(scope="module")
def report(settings, folder):
    def draw_some(report, folder):
        drawn = [row for row in report["descent"] if (row["corpus"] == "rows.tsv") == (row["weights"] == "Xavier")]
        assert len({row["corpus"] for row in drawn}) == len({row["weights"] for row in drawn}) == 2
        return figures.draw_figures(report | {"descent": drawn}, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "draw_figures", draw_some)  # the other energies take seconds and are drawn alike
        return run_unfolded(folder, settings, n_seeds=2, quiet=True)


def test_every_seed_corpus_and_layer_is_there(report):
    assert len(report["aim"]) == 2 * 4
    assert len(report["descent"]) == 2 * 2 * 2 * 2 * len(VARIANTS)
    assert len(report["classification"]) == 2 * 2 * len(METHODS)
    assert json.dumps(report)
    assert all(len(row["depth"]) == 2 for row in report["classification"] if row["depth"] is not None)


def test_the_guaranteed_layer_never_rises_and_theory_says_so(report):
    for row in report["descent"]:
        assert row["guaranteed"] == (row["variant"] == GUARANTEED)
        if row["guaranteed"]:
            assert row["share"] == 0
    assert all(row["n_rises_inside"] == 0 for row in report["summaries"]["aim"])


def test_the_anchored_energies_show_the_error_of_equation_69(report):
    rows = [row for row in report["descent"] if "(69)" in row["variant"] and row["anchored"]]
    assert all(row["share"] > 0 for row in rows)


def test_iterations_are_counted_over_seeds_and_steps_are_allowed_where_all_are():
    def row(step, lipschitz, **changes):
        counts = {"n_iterations": 10, "n_outside": 3, "n_rises_inside": 2, "n_rises_outside": 1}
        return {"nonnegative": False, "step": step, "lipschitz_h": lipschitz, **counts, **changes}

    printed = [row(0.05, 10.0), row(0.05, 30.0)]
    own = [row(1 / 3, 3.0), row(0.1, 10.0), row(0.2, 5.0, n_outside=0)]
    first, second, third = summarise(
        {"aim": [*printed, *own, row(0.1, 1.0, nonnegative=True)], "descent": [], "classification": []}
    )["aim"]
    assert [part["printed"] for part in (first, second, third)] == [True, False, False]
    assert [part["nonnegative"] for part in (first, second, third)] == [False, False, True]
    assert [part["allowed"] for part in (first, second, third)] == [False, True, True]
    assert [part["step"] for part in (first, second, third)] == [0.05, 0.2, 0.1]
    names = ("n_iterations", "n_outside", "n_rises_inside", "n_rises_outside")
    assert [second[name] for name in names] == [30, 6, 6, 3]


def test_networks_are_of_about_equal_size_and_the_readouts_are_certified(report):
    for row in report["classification"]:
        others = [other["n_parameters"] for other in report["classification"] if other["corpus"] == row["corpus"]]
        assert row["n_parameters"] <= 1.35 * min(others)
        assert row["certified_bound"] <= row["certified_objective"] <= row["readout_objective"] * (1 + 1e-6)
        assert row["noise"][0] == row["accuracy"]


def test_the_report_says_which_networks_diverged(settings, tmp_path):
    changed = dataclasses.replace(settings, corpora=settings.corpora[:1], learning_rates=(1e25,))
    with pytest.warns(RuntimeWarning, match="training diverged with every learning rate"):
        report = run_unfolded(tmp_path, changed, n_seeds=1, quiet=True)
    diverged = [row for row in report["classification"] if "diverged" in row]
    assert len(diverged) == len(METHODS)
    assert report["summaries"]["classification"] == []
    assert {row["weights"] for row in report["descent"]} == {"Xavier"}
    text = format_unfolded(report)
    for name in (*(method.name for method in METHODS), "energies under trained weights"):
        assert f"diverged and left out: {report['data']['corpora_read'][0]['name']}, {name} (1 seed)" in text
    assert all(Path(figure).stat().st_size > 10_000 for figure in report["figures"])


def test_a_second_call_runs_nothing_again(report, settings, folder, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("it was run again")

    for name in ("classify", "measure_descent", "compare_steps"):
        monkeypatch.setattr(experiment, name, refuse)
    monkeypatch.setattr(experiment, "draw_figures", lambda report, folder: [])
    again = run_unfolded(folder, settings, n_seeds=2, quiet=True)
    assert again["classification"] == report["classification"]
    assert all((folder / name).stat().st_size > 10_000 for name in ("quadratics.png", "classification.png"))


def test_an_interrupted_call_goes_on(settings, tmp_path, monkeypatch):
    ran = []

    def interrupted(corpus, method, settings, seed):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(method.name)
        return classify(corpus, method, settings, seed)

    classify = experiment.classify
    monkeypatch.setattr(experiment, "classify", interrupted)
    monkeypatch.setattr(experiment, "draw_figures", lambda report, folder: [])
    with pytest.raises(KeyboardInterrupt):
        run_unfolded(tmp_path, settings, n_seeds=1, quiet=True)
    rows = json.loads((tmp_path / FILE).read_text())["classification"]
    assert [row["method"] for row in rows] == ran
    monkeypatch.setattr(experiment, "classify", classify)
    report = run_unfolded(tmp_path, settings, n_seeds=1, quiet=True)
    assert len(report["classification"]) == 2 * len(METHODS)
    assert report["classification"][:2] == rows


def test_other_settings_are_refused(report, settings, folder):
    changed = UnfoldedSettings(**{**vars(settings), "n_steps": 5})
    with pytest.raises(ValueError, match="holds results with n_steps=4"):
        run_unfolded(folder, changed, quiet=True)


def test_the_text_has_a_row_for_each_layer_and_network(report):
    text = format_unfolded(report)
    for part in (*VARIANTS, *METHODS):
        assert text.count(part.name) >= 2
    assert "2 seeds" in text


def test_the_command_line(settings, report, sources, folder, capsys):
    arguments = ["reproduce", "unfolded", "--small", "--quiet", "--seeds", "2", "--out", str(folder)]
    own = ["--corpora", *settings.corpora, "--vectors", settings.vectors, "--n-sentences", "60", "--n-steps", "5"]
    assert cli.main([*arguments, *own]) != 0
    assert "holds results with" in capsys.readouterr().err


def test_corpora(sources, settings):
    from_files, labels = read_labelled_sentences(settings.corpora[0])
    from_rows, names = read_labelled_sentences(settings.corpora[1])
    assert from_files == from_rows
    assert set(labels) == {"a.txt", "b.txt"}
    assert set(names) == {"a", "b"}
    corpus = load_corpus(settings.corpora[0], settings)
    assert np.bincount(corpus.labels).tolist() == [30, 30]
    real = (corpus.tokens != 0).any(-1)
    assert np.square(corpus.tokens[real]).sum(-1).mean() == pytest.approx(settings.token_norm**2, rel=1e-5)
    parts = corpus.split(0)
    assert [len(part.labels) for part in parts] == [36, 12, 12]
    assert load_corpus(settings.corpora[0], settings).sha256 == corpus.sha256


def test_lines_of_a_corpus_are_the_sentences_that_loaders_read(tmp_path):
    path = tmp_path / "marks.txt"
    path.write_text("\ufeffOne\u2028line.\nAnother\x85 one.\r\nLast.", encoding="utf-8", newline="")
    sentences, _ = read_labelled_sentences(str(path))
    assert sentences == read_sentences(path) == ["One\u2028line.", "Another\x85 one.", "Last."]


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("{}/a.txt", {}, "two labels or more"),
        ("{}/a.txt,{}/b.txt", {"n_sentences": 100}, "50 sentences of each label"),
        ("{}/a.txt,{}/unknown.txt", {}, "30 sentences of each label .* but one has 0"),
        ("{}/lines.tsv", {}, "a tab and a sentence on each line"),
        ("{}/a.txt,{}/latin.txt", {}, "corpora must be text files in UTF-8, and .*latin.txt is none"),
    ],
)
def test_bad_corpora(sources, settings, source, changes, message):
    (sources / "lines.tsv").write_text("no tab here\n")
    (sources / "unknown.txt").write_text("xyzzy\n" * 50)
    (sources / "latin.txt").write_text("café\n", encoding="latin-1")
    changed = UnfoldedSettings(**{**vars(settings), **changes})
    with pytest.raises(ValueError, match=message):
        load_corpus(source.format(*[sources] * 2), changed)
    with pytest.raises(
        FileNotFoundError, match=r"'absent' is no file; give text files, .* 'documentation:PACKAGE,PACKAGE'"
    ):
        load_corpus("absent", changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_sentences": 5}, "n_sentences must be an integer of at least 20"),
        ({"corpora": ()}, "corpora must hold"),
        ({"token_norm": 0.0}, "token_norm must be a positive"),
        ({"learning_rates": ()}, "learning_rates must hold"),
        ({"depths": (0,)}, "depths must hold"),
        ({"noises": (-1.0,)}, "noises must hold"),
        ({"weight_decay": -1.0}, "weight_decay must be a number from 0, got -1.0"),
        ({"n_layers": 0}, "n_layers must be a positive integer"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ValueError, match=message):
        UnfoldedSettings(**change)


def test_energies_of_any_device_are_the_same(settings, accelerator, monkeypatch):
    devices = set()

    def on_cpu(network, tokens, mask):
        devices.update(tensor.device.type for tensor in (*network.parameters(), tokens, mask))
        return descent_report(network.cpu(), tokens.cpu(), mask.cpu())  # the stand-in makes no module one of doubles

    monkeypatch.setattr(descent, "descent_report", on_cpu)
    corpus = load_corpus(settings.corpora[0], settings)
    here, there = (
        descent.measure_descent(corpus, dataclasses.replace(settings, device=device), 0)
        for device in (None, accelerator)
    )
    assert devices == {"cpu", accelerator}
    for one, other in zip(there, here, strict=True):
        np.testing.assert_allclose(one.pop("quantiles"), other.pop("quantiles"), rtol=1e-3, atol=1e-5)
        assert one == other

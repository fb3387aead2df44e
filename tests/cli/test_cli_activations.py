"""``convexformer activations``: shards that hold what ``load_attention_activations`` gives."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from tiny_encoders import SIZES, WIDTH, random_sentences, save_random

from convexformer import cli
from convexformer.datasets import load_attention_activations
from convexformer.datasets._activation_shards import ActivationShards
from convexformer.storage import open_source, read_array, read_manifest, verify_shards

N_TOKENS = 6
SENTENCES = random_sentences(20)
# float16 has 11 bits; activations of the tiny encoder are below 16.
ROUNDING = 16 * 2.0**-11


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Folder of a tiny random BERT."""
    return save_random(transformers.BertModel(transformers.BertConfig(**SIZES)), tmp_path_factory.mktemp("bert"))


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(SENTENCES) + "\n")
    return path


@pytest.fixture
def command(bert, texts, tmp_path, capsys):
    """Function that runs the command, by default with the tiny BERT, and returns folder and report."""

    def run(*options, out="shards", code=0):
        arguments = [texts, "--model", bert, "--layer", 1, "--n-tokens", N_TOKENS, "--batch-size", 3]
        arguments += ["--shard-rows", 6, "--out", tmp_path / out, "--json", *options]
        assert cli.main(["activations", *map(str, arguments)]) == code
        captured = capsys.readouterr()
        return tmp_path / out, captured.err if code else json.loads(captured.out)

    return run


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def wanted(bert, **options):
    return load_attention_activations(
        SENTENCES, **{"model": bert, "n_tokens": N_TOKENS, "layer": 1, "batch_size": 3} | options
    )


@pytest.mark.parametrize("short", ["error", "drop", "pad"])
def test_shards_hold_what_the_loader_gives(short, bert, command):
    n_tokens = 6 if short == "error" else 8
    options = {"short": short, "n_tokens": n_tokens}
    folder, report = command("--short", short, "--n-tokens", n_tokens, "--attention", "--dtype", "float32")
    computed = wanted(bert, **options)
    read = load_attention_activations(shards=folder)
    for name in ("inputs", "outputs", "attention", "lengths", "index"):
        np.testing.assert_array_equal(getattr(read, name), getattr(computed, name), err_msg=name)
        assert getattr(read, name).dtype == getattr(computed, name).dtype
    assert (read.tokens, read.sentences, repr(read)) == (computed.tokens, computed.sentences, repr(computed))
    assert report["samples"] == len(computed)
    source = open_source(folder)  # of the outputs
    np.testing.assert_array_equal(source.read(slice(2, 9)), computed.outputs[2:9])
    np.testing.assert_array_equal(open_source(f"{folder}:inputs").read(slice(2, 9)), computed.inputs[2:9])
    verify_shards(folder)


def test_shards_of_several_layers_hold_what_the_loader_gives(bert, command):
    folder, report = command("--layer", "2,0", "--attention", "--dtype", "float32", "--workers", 2)
    assert report["layer"] == [2, 0]
    computed = {layer: wanted(bert, layer=layer) for layer in (0, 2)}
    for layer, expected in (("all", [2, 0]), ([0, 2], [0, 2]), ([0], [0]), (2, [2])):  # 2 is the default
        read = load_attention_activations(shards=folder, layer=layer)
        read = read if isinstance(read, list) else [read]
        assert [own.layer for own in read] == expected
        for own in read:
            for name in ("inputs", "outputs", "attention", "lengths", "index"):
                np.testing.assert_array_equal(getattr(own, name), getattr(computed[own.layer], name), err_msg=name)
            assert repr(own) == repr(computed[own.layer])
    np.testing.assert_array_equal(open_source(folder).read(slice(2, 9)), computed[2].outputs[2:9])
    np.testing.assert_array_equal(open_source(f"{folder}:outputs_0").read(slice(2, 9)), computed[0].outputs[2:9])
    with pytest.raises(ValueError, match=r"layer=1, but shards='.*' holds layer=\[2, 0\]; ask for some of these"):
        load_attention_activations(shards=folder, layer=1)
    everything, report = command("--layer", "all", out="all")
    assert report["layer"] == [0, 1, 2]
    assert "attention_1" not in read_manifest(everything)["arrays"]
    assert len(load_attention_activations(shards=everything, layer="all")) == 3


@pytest.mark.parametrize("layer", ["first", "1,", ""])
def test_layers_that_are_none_are_named(layer, command, capsys):
    with pytest.raises(SystemExit):
        command("--layer", layer)
    assert f"--layer: must be an integer, several as 0,2,5, or all, got {layer!r}" in capsys.readouterr().err


def test_half_precision_without_attention_is_the_default(bert, command):
    folder, _ = command()
    computed, read = wanted(bert), load_attention_activations(shards=folder)
    assert read.attention is None
    assert read.outputs.dtype == np.float32
    assert open_source(folder).dtype == torch.float16
    np.testing.assert_allclose(read.outputs, computed.outputs, rtol=0, atol=ROUNDING)
    np.testing.assert_array_equal(read.inputs, computed.inputs.astype(np.float16))
    assert len(load_attention_activations(shards=folder, n_sentences=7)) == 7


def test_the_manifest_says_where_activations_come_from(bert, texts, command):
    folder, report = command("--site", "layer")
    manifest = read_manifest(folder)
    info = manifest["info"]
    assert (info["encoder"], info["layer"], info["site"], info["dtype"]) == (str(bert), 1, "layer", "float16")
    assert (info["sentences"], info["n_sentences"], manifest["n_samples"]) == (str(texts), 20, 20)
    assert len(info["fingerprint"]) == 64
    assert report["fingerprint"] == info["fingerprint"]
    assert report["finished"] is True
    assert manifest["arrays"]["outputs"] == {"dtype": "F16", "shape": [N_TOKENS, WIDTH]}
    assert read_array(folder, "index").tolist() == list(range(20))


def test_two_workers_write_what_one_writes(command):
    alone, _ = command()
    shared, report = command("--workers", 2, out="shared")
    assert report["finished"] is True
    assert contents(shared) == contents(alone)


def test_ranks_of_torchrun_write_what_one_writes(command, monkeypatch):
    alone, _ = command()
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        shared, report = command(out="shared")
        assert report["finished"] is (rank == 2)
        assert ("are left to other processes" in report.get("remark", "")) is (rank < 2)
    assert contents(shared) == contents(alone)
    assert "--workers is not for torchrun" in command("--workers", 2, code=1)[1]


def test_shards_that_are_left_are_counted_in_words_that_fit_one(command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    _, report = command("--shard-rows", 10)
    assert report["remark"] == "shards that are left to other processes, the last of which finishes: 1"


def test_targets_of_all_texts_are_refused_where_some_were_left_out(command, tmp_path, capsys):
    folder, _ = command("--short", "drop", "--n-tokens", 8)
    index, y = read_array(folder, "index"), np.arange(20) % 2
    assert 0 < len(index) < 20
    np.save(tmp_path / "y.npy", y)
    call = ["fit", str(folder), "--targets", str(tmp_path / "y.npy"), "--model", str(tmp_path / "model.npz"), "--probe"]
    assert cli.main(call) == 1
    message = f"holds targets of all 20 texts, of which {folder} has {len(index)}; take those of its array index"
    assert message in capsys.readouterr().err
    np.save(tmp_path / "y.npy", y[index])
    assert cli.main([*call, "--quiet"]) == 0
    np.save(tmp_path / "y.npy", y)
    assert cli.main(["predict", *call[1:-1]]) == 1
    assert message in capsys.readouterr().err


def test_a_killed_command_goes_on(bert, texts, command, tmp_path):
    alone, _ = command("--shard-rows", 1)
    options = ["--model", bert, "--layer", 1, "--n-tokens", N_TOKENS, "--batch-size", 3, "--shard-rows", 1]
    call = [sys.executable, "-m", "convexformer.cli", "activations", texts, *options, "--out", tmp_path / "killed"]
    process = subprocess.Popen(list(map(str, call)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.poll() is None and not list(tmp_path.glob("killed/*.safetensors")):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    killed, _ = command("--shard-rows", 1, out="killed")
    assert contents(killed) == contents(alone)


def test_interrupted_workers_end_at_once(bert, texts, tmp_path):
    texts.write_text("\n".join(SENTENCES * 200))  # for a minute
    options = ["--model", bert, "--layer", 1, "--n-tokens", N_TOKENS, "--batch-size", 1, "--shard-rows", 1]
    call = [sys.executable, "-m", "convexformer.cli", "activations", texts, *options, "--out", tmp_path / "killed"]
    call += ["--workers", 2, "--quiet"]
    process = subprocess.Popen(
        list(map(str, call)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    while process.poll() is None and not list(tmp_path.glob("killed/*.safetensors")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)  # to the first process alone
    _, shown = process.communicate(timeout=120)
    assert process.returncode == 130
    folder = tmp_path / "killed"
    assert shown == (
        f"interrupted; what is finished is in {folder}, and the same command goes on\nconvexformer: interrupted\n"
    )
    assert 0 < len(list(folder.glob("*.safetensors"))) < 4000


def test_an_interrupted_command_goes_on(bert, command, monkeypatch):
    alone, _ = command()
    forward, passes = transformers.BertModel.forward, []

    def interrupted(self, **options):
        passes.append(None)
        if len(passes) == 4:
            raise KeyboardInterrupt
        return forward(self, **options)

    monkeypatch.setattr(transformers.BertModel, "forward", interrupted)
    folder, message = command(out="interrupted", code=130)
    assert f"what is finished is in {folder}, and the same command goes on" in message
    assert len(contents(folder)) == 1
    command(out="interrupted")
    assert len(passes) == 4 + 5  # of the seven passes the first two were kept
    assert contents(folder) == contents(alone)


# What is wrong


def test_a_failure_names_shard_and_texts(command, monkeypatch):
    forward = transformers.BertModel.forward

    def failing(self, **options):
        if failing.passes == 2:
            raise RuntimeError("out of memory")
        failing.passes += 1
        return forward(self, **options)

    failing.passes = 0
    monkeypatch.setattr(transformers.BertModel, "forward", failing)
    _, message = command(code=1)
    assert "shard 'part-00001.safetensors' (samples 6 to 11) failed in worker 0 of 1: out of memory; fini" in message


def test_numbers_too_large_for_half_precision_are_refused(bert, texts, tmp_path, monkeypatch):
    job = ActivationShards(tmp_path / "x", str(texts), str(bert), 1, N_TOKENS, "error", "float16", 6, 3)
    monkeypatch.setattr(job.teacher, "run", lambda ids, mask: {"inputs": np.full((3, N_TOKENS, 2), 7e4, np.float32)})
    with pytest.raises(RuntimeError, match=r"activations up to 7e\+04 do not fit into float16; store them as float32"):
        job.write()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--n-tokens", 9), "have fewer than n_tokens=9 tokens; leave them out with short='drop'"),
        (("--n-tokens", 41), "n_tokens=41 is more than the 40 tokens"),
        (("--layer", 3), "layer must be an integer from 0 to 2"),
        (("--shard-rows", 0), "shard_rows must be a positive integer, got 0"),
        (("--workers", 0), "--workers must be 1 or more, got 0"),
        (("--n-tokens", 9, "--workers", 2), "have fewer than n_tokens=9 tokens"),
    ],
)
def test_wrong_options_are_named(options, message, command):
    folder, shown = command(*options, code=1)
    assert message in shown
    assert not list(folder.glob("*"))


def test_shards_of_other_settings_are_refused(command):
    command()
    for other in (("--layer", 0), ("--dtype", "float32"), ("--n-tokens", 5), ("--batch-size", 4)):
        assert "that was written with other data or settings" in command(*other, code=1)[1]


def test_arguments_besides_shards_must_agree(bert, command, texts, tmp_path):
    folder, _ = command()
    assert len(load_attention_activations(texts, shards=folder, model=bert, layer=1, n_tokens=N_TOKENS)) == 20
    for options, message in (
        ({"layer": 0}, r"layer=0, but shards='.*' holds layer=1; leave it out"),
        ({"layer": [0, 1]}, r"layer=\[0, 1\], but shards='.*' holds layer=1; leave it out"),
        ({"site": "layer"}, r"site='layer', but shards='.*' holds site='attention'"),
        ({"cache": "x"}, r"cache='x', but shards='.*' is read, and not computed with cache="),
        ({"n_sentences": 21}, r"n_sentences=21, but shards='.*' has 20; ask for fewer"),
        ({"sentences": SENTENCES[1:]}, r"sentences must be those of shards='.*texts.txt' as they were then"),
    ):
        with pytest.raises(ValueError, match=message):
            load_attention_activations(shards=folder, **options)
    other = shutil.copytree(bert, tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    with pytest.raises(ValueError, match=r"model must be that of shards=.* with the same files; it has others"):
        load_attention_activations(shards=folder, model=other)
    texts.write_text("other sentences\n")
    with pytest.raises(ValueError, match=r"sentences must be those of shards="):
        load_attention_activations(shards=folder)


def test_other_shards_hold_no_activations(tmp_path):
    from convexformer.storage import write_shards

    write_shards(tmp_path, lambda rows: {"X": torch.ones(4, 2)}, 4, shard_rows=4)
    with pytest.raises(ValueError, match=r"must be a folder that 'convexformer activations' wrote; open_source reads"):
        load_attention_activations(shards=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no manifest.json"):
        load_attention_activations(shards=tmp_path / "nowhere")


def test_a_killed_worker_is_noticed(bert, texts, command, monkeypatch):
    from concurrent.futures import ProcessPoolExecutor

    submit = ProcessPoolExecutor.submit
    monkeypatch.setattr(ProcessPoolExecutor, "submit", lambda pool, *_: submit(pool, os._exit, 9))
    _, message = command("--workers", 2, code=1)
    assert "a worker ended without a message" in message
    assert "unfinished: shard 'part-00000.safetensors' (samples 0 to 5) and 3 more; the same command goes on" in message

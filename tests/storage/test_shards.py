"""Folders of shards: what is written is read again, by however many processes and whatever stops them."""

import hashlib
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from forks import Fork
from safetensors.torch import load_file

from convexformer.storage import ShardWriter, open_source, read_array, read_manifest, verify_shards, write_shards

N, ROWS = 23, 4
X = torch.randn(N, 3, 2, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N)


def compute(rows):
    return {"X": X[rows], "y": Y[rows]}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def written(tmp_path):
    """A finished folder."""
    folder = tmp_path / "written"
    assert write_shards(folder, compute, N, shard_rows=ROWS, info={"encoder": "none"})
    return folder


def rewrite(folder, change):
    manifest = read_manifest(folder)
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_what_is_written_is_read(written):
    source = open_source(written)
    assert (source.shape, source.dtype) == ((N, 3, 2), torch.float32)
    for start in range(N):
        for stop in range(start, N + 1):
            assert torch.equal(source.read(slice(start, stop)), X[start:stop])
    assert source.place(18) == "row 2 of shard 'part-00004.safetensors'"
    assert torch.equal(read_array(written), X)
    assert torch.equal(read_array(written, "y"), Y)
    assert torch.equal(open_source(f"{written}:X").read(slice(3, 9)), X[3:9])
    verify_shards(written)


def test_the_manifest_describes_the_shards(written):
    manifest = read_manifest(written)
    assert manifest["format"] == "convexformer shards"
    assert (manifest["n_samples"], manifest["info"], manifest["default"]) == (N, {"encoder": "none"}, "X")
    assert manifest["arrays"] == {"X": {"dtype": "F32", "shape": [3, 2]}, "y": {"dtype": "I64", "shape": []}}
    assert [shard["rows"] for shard in manifest["shards"]] == [4, 4, 4, 4, 4, 3]
    for shard in manifest["shards"]:
        content = (written / shard["name"]).read_bytes()
        header = int.from_bytes(content[:8], "little") + 8
        assert shard["bytes"] == len(content)
        assert shard["sha256"] == hashlib.sha256(content[header:]).hexdigest()
    assert sorted(contents(written)) == ["manifest.json", *(shard["name"] for shard in manifest["shards"])]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16]
)
def test_shards_are_files_of_safetensors_in_any_precision(dtype, tmp_path):
    values = X.abs().mul(10).to(dtype)
    write_shards(tmp_path, lambda rows: {"b": values[rows].mT, "a": Y[rows]}, N, shard_rows=ROWS, default="b")
    part = load_file(tmp_path / "part-00001.safetensors")
    assert torch.equal(part["b"], values[4:8].mT)
    assert torch.equal(part["a"], Y[4:8])
    assert torch.equal(open_source(tmp_path).read(slice(0, N)), values.mT)


def test_arrays_of_numpy_are_written(tmp_path):
    write_shards(tmp_path, lambda rows: {"X": X.numpy()[rows].astype(np.float16)}, N, shard_rows=ROWS)
    assert torch.equal(read_array(tmp_path), X.half())


def test_numbers_of_samples_may_be_those_of_numpy(tmp_path):
    X = torch.ones(5, 2)
    assert write_shards(tmp_path, lambda rows: {"X": X[rows]}, np.int64(5), shard_rows=np.int32(2))
    assert not list(ShardWriter(tmp_path, 5, 2).pending())  # the same run


def test_fingerprints_are_those_of_the_manifest(written, tmp_path):
    fingerprint = open_source(written).fingerprint
    assert fingerprint == open_source(str(written)).fingerprint
    write_shards(tmp_path / "same", compute, N, shard_rows=ROWS, info={"encoder": "none"})
    assert open_source(tmp_path / "same").fingerprint == fingerprint
    write_shards(tmp_path / "other", lambda rows: {"X": -X[rows]}, N, shard_rows=ROWS, info={"encoder": "none"})
    assert open_source(tmp_path / "other").fingerprint != fingerprint


# Several workers and interruptions


def test_finished_shards_are_kept(written, tmp_path):
    computed = []

    def watched(rows):
        computed.append(rows.start)
        return compute(rows)

    before = contents(written)
    (written / "part-00002.safetensors").unlink()
    path = written / "part-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (written / "part-00005.safetensors").write_bytes(b"")
    (written / "manifest.json").unlink()
    (written / "part-00002.safetensors.123.partial").write_bytes(b"half a shard")
    assert write_shards(written, watched, N, shard_rows=ROWS, info={"encoder": "none"})
    assert computed == [8, 16, 20]
    assert contents(written) == before


@pytest.mark.parametrize("workers", [2, 3, 9])
def test_workers_write_what_one_writes(workers, written, tmp_path, monkeypatch):
    folder, options = tmp_path / "shared", {"shard_rows": ROWS, "info": {"encoder": "none"}}
    monkeypatch.setenv("WORLD_SIZE", str(workers))
    for worker in reversed(range(1, workers)):
        monkeypatch.setenv("RANK", str(worker))
        assert not write_shards(folder, compute, N, **options)
        assert "manifest.json" not in contents(folder)
    with pytest.raises(ValueError, match=r"has shards but no manifest.json, so not all are written"):
        open_source(folder)
    assert write_shards(folder, compute, N, worker=0, **options)
    assert contents(folder) == contents(written)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "", "RANK": "0"}, "variable WORLD_SIZE must be an integer"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "variable WORLD_SIZE must be an integer of at least 1"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "variable RANK must be an integer of at least 0"),
        ({"WORLD_SIZE": "2", "RANK": "first"}, "variable RANK must be an integer"),
        ({"RANK": "1"}, "got 1 from the variable RANK"),
    ],
)
def test_message_names_the_variable_that_is_no_worker(variables, message, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        write_shards(tmp_path / "shared", compute, N, shard_rows=ROWS)
    assert write_shards(tmp_path / "shared", compute, N, shard_rows=ROWS, worker=0, workers=1)


def test_threads_at_the_same_shards_do_no_damage(written, tmp_path):
    def write(_):
        return write_shards(tmp_path / "shared", compute, N, shard_rows=ROWS, info={"encoder": "none"})

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write, range(8)))
    assert contents(tmp_path / "shared") == contents(written)


def write_slowly(folder, worker, last, started):
    """Write a worker's share of the shards; the last takes so many seconds."""
    values = slow_values()

    def compute(rows):
        time.sleep(0.01 if rows.stop < 40 else last)
        return {"X": values[rows]}

    started.touch()
    write_shards(folder, compute, 40, shard_rows=1, worker=worker, workers=2)


def slow_values():
    return torch.randn(40, 50, 60, generator=torch.Generator().manual_seed(0))


def test_killed_writers_leave_nothing_that_is_not_whole(tmp_path):
    chance = random.Random(0)
    folder, wanted = tmp_path / "killed", tmp_path / "wanted"

    def start(attempt, last):
        started = [tmp_path / f"started_{attempt}_{worker}" for worker in range(2)]
        processes = [
            Fork(tmp_path / f"printed_{worker}", write_slowly, folder, worker, last, started[worker])
            for worker in range(2)
        ]
        end = time.monotonic() + 120
        while not all(path.exists() for path in started):
            assert time.monotonic() < end
            time.sleep(0.001)
        return processes

    for attempt in range(2):
        processes = start(attempt, last=60)
        time.sleep(chance.uniform(0, 0.1))
        for process in processes[:: -1 if attempt else 1]:
            process.kill()
            time.sleep(chance.uniform(0, 0.03))
    assert "manifest.json" not in contents(folder)
    for process in start("last", last=0):
        printed = process.output(timeout=120)
        assert not process.failed, printed
    values = slow_values()
    write_shards(wanted, lambda rows: {"X": values[rows]}, 40, shard_rows=1)
    assert contents(folder) == contents(wanted)
    verify_shards(folder)


def test_arrays_without_names_are_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"arrays must be a dict of arrays by name, .* got ndarray"):
        write_shards(tmp_path, lambda rows: np.ones((N, 2))[rows], N, shard_rows=ROWS)


def test_a_failure_names_shard_and_samples(tmp_path):
    def failing(rows):
        if rows.start == 8:
            raise OSError("no such text")
        return compute(rows)

    message = r"shard 'part-00002.safetensors' \(samples 8 to 11\) failed in worker 0 of 2: no such text; finished"
    with pytest.raises(RuntimeError, match=message):
        write_shards(tmp_path, failing, N, shard_rows=ROWS, worker=0, workers=2)
    assert sorted(os.listdir(tmp_path)) == ["part-00000.safetensors"]


def test_a_shard_that_cannot_be_written_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(RuntimeError, match="no space left"):
        write_shards(tmp_path, compute, N, shard_rows=ROWS)
    assert os.listdir(tmp_path) == []


# What is wrong


@pytest.mark.parametrize(
    "other", [{"info": {"encoder": "other"}}, {"shard_rows": 5}, {"n_samples": 22}, {"default": "y"}]
)
def test_shards_of_another_run_are_refused(written, other):
    options = {"n_samples": N, "shard_rows": ROWS, "info": {"encoder": "none"}} | other
    before = contents(written)
    with pytest.raises(ValueError, match=r"has a shard 'part-00000.safetensors' that was written with other data or"):
        write_shards(written, compute, **options)
    assert contents(written) == before


def test_files_of_others_are_not_replaced(tmp_path):
    from safetensors.torch import save_file

    save_file({"X": X}, tmp_path / "part-00000.safetensors")
    with pytest.raises(ValueError, match="written with other data"):
        write_shards(tmp_path, compute, N, shard_rows=ROWS)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"X": X[:3]}, r"array 'X' of shard 'part-00000.safetensors' \(samples 0 to 3\) must have 4 rows, got 3"),
        ({"X": X[:4] > 0}, "must hold floats of 16, 32 or 64 bits or integers, got bool; uint8 holds True and False"),
        ({"X": X[:4] + 1j}, "got complex64"),
        ({"X": X[:4], "__metadata__": Y[:4]}, r"text other than '__metadata__', got '__metadata__'"),
        ({"X": X[:4], 0: Y[:4]}, "must have names that are text other than .*, got 0"),
        ({"y": Y[:4]}, r"must have an array 'X', got \['y'\]"),
    ],
)
def test_wrong_arrays_are_named(arrays, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ShardWriter(tmp_path, N, ROWS).write(0, arrays)


@pytest.mark.parametrize("default", [5, {1}])
def test_a_default_that_is_no_name_is_told_from_wrong_info(default, tmp_path):
    with pytest.raises(TypeError, match=f"default must be the name of an array, got {default}"):
        ShardWriter(tmp_path / "shards", N, ROWS, default=default)
    assert not (tmp_path / "shards").exists()


def test_shards_must_agree(tmp_path):
    with pytest.raises(
        ValueError, match=r"'part-00000.safetensors' has .*\[3, 2\].*'part-00002.safetensors' has .*2, 2"
    ):
        write_shards(tmp_path, lambda rows: {"X": X[rows, : 2 if rows.start == 8 else 3]}, N, shard_rows=ROWS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_samples": 0}, "n_samples must be a positive integer, got 0"),
        ({"shard_rows": 1.5}, "shard_rows must be a positive integer, got 1.5"),
        ({"worker": 2, "workers": 2}, "worker must be an integer from 0 to workers - 1 = 1, got 2"),
    ],
)
def test_wrong_settings_are_named(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ShardWriter(tmp_path, **{"n_samples": N, "shard_rows": ROWS} | options)
    with pytest.raises(TypeError, match="info must hold what JSON has"):
        ShardWriter(tmp_path, N, ROWS, info={"X": X})
    for info in ([1], "bert"):
        with pytest.raises(TypeError, match="info must hold what JSON has, such as text and numbers, by name"):
            ShardWriter(tmp_path, N, ROWS, info=info)
    with pytest.raises(TypeError, match="compute must be callable with a slice of the samples, got dict"):
        write_shards(tmp_path, {"X": X}, N, shard_rows=ROWS)


def test_shards_that_do_not_match_the_manifest_are_named(written):
    name = "part-00003.safetensors"
    content = (written / name).read_bytes()
    (written / name).write_bytes(content[:-7])
    with pytest.raises(
        ValueError, match=f"shard '{name}' of X=.* is truncated: .* {len(content)} bytes.* {len(content) - 7}"
    ):
        open_source(written)
    (written / name).write_bytes((written / "part-00005.safetensors").read_bytes())
    with pytest.raises(ValueError, match=rf"shard '{name}' of X=.* does not match manifest.json: .* 4 rows .*got 3 of"):
        open_source(written)
    (written / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"shard '{name}' of X=.* is missing, though manifest.json lists it"):
        open_source(written)


def test_damaged_numbers_are_found_by_their_hash(written):
    path = written / "part-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    open_source(written)
    with pytest.raises(ValueError, match=r"shard 'part-00001.safetensors' of .* is damaged: its numbers have"):
        verify_shards(written)


def test_shards_and_manifests_that_lack_an_entry_are_refused(written):
    path = written / "part-00002.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"data_offsets", b"data_0ffsets"))
    writer = ShardWriter(written, N, ROWS, info={"encoder": "none"})
    for read in (lambda: open_source(written), lambda: read_array(written), lambda: list(writer.pending())):
        with pytest.raises(ValueError, match="is damaged: KeyError: 'data_offsets'"):
            read()
    path.write_bytes(content)
    rewrite(written, lambda manifest: manifest["shards"][1].pop("sha256"))
    with pytest.raises(ValueError, match="is damaged: KeyError: 'sha256'"):
        verify_shards(written)
    rewrite(written, lambda manifest: manifest.pop("shards"))
    with pytest.raises(ValueError, match="is damaged: KeyError: 'shards'"):
        open_source(written)


def with_header(path, change):
    """A file of safetensors whose header is changed, and whose numbers stay."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [24, 96]},
        {"data_offsets": [-1, 95]},
        {"data_offsets": [0.5, 96.5]},
        {"shape": {}},
        {"shape": 4},
    ],
    ids=str,
)
def test_a_shard_whose_header_does_not_read_is_named(change, written):
    with_header(written / "part-00001.safetensors", lambda header: header["X"].update(change))
    with pytest.raises(ValueError, match=r"shard 'part-00001.safetensors' of X=.* is damaged"):
        open_source(written)


@pytest.mark.parametrize("note", [3, {"convexformer": 3}, {"convexformer": "[]"}, {"convexformer": "[" * 100_000}])
def test_a_shard_whose_note_does_not_read_is_of_another_run(note, written):
    with_header(written / "part-00001.safetensors", lambda header: header.update(__metadata__=note))
    with pytest.raises(ValueError, match=r"has a shard 'part-00001.safetensors' that was written with other data"):
        write_shards(written, compute, N, shard_rows=ROWS, info={"encoder": "none"})


def test_a_manifest_that_lists_too_few_shards_is_named(written):
    rewrite(written, lambda manifest: manifest["shards"].pop(1))
    with pytest.raises(ValueError, match=r"manifest.json' is damaged: .*shards of 19 samples, and n_samples is 23"):
        open_source(written)


@pytest.mark.parametrize("name", ["n_samples", "arrays", "default", "info", "shards"])
def test_a_manifest_without_an_entry_is_named(name, written):
    rewrite(written, lambda manifest: manifest.update({name: None}))
    with pytest.raises(ValueError, match=rf"manifest.json' is damaged: TypeError: {name} must be .*, got None"):
        read_manifest(written)
    manifest = json.loads((written / "manifest.json").read_text())
    (written / "manifest.json").write_text(json.dumps({key: manifest[key] for key in manifest if key != name}))
    with pytest.raises(ValueError, match=rf"manifest.json' is damaged: KeyError: '{name}'"):
        read_manifest(written)


def test_damaged_manifests_are_named(written, tmp_path):
    with pytest.raises(ValueError, match=r"has no array 'z', but \['X', 'y'\]"):
        open_source(f"{written}:z")
    rewrite(written, lambda manifest: manifest.update(version=9))
    with pytest.raises(ValueError, match="must be of 'convexformer shards' version 1, got 'convexformer shards' 9"):
        open_source(written)
    for text in ("{", "[" * 100_000):
        (written / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=r"manifest.json' is damaged or no manifest of shards"):
            open_source(written)
    (written / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no manifest.json; if its writing was stopped"):
        read_manifest(written)
    with pytest.raises(FileNotFoundError, match=r"has no manifest.json"):
        read_array(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere' has no manifest.json, as there is no such folder"):
        read_manifest(tmp_path / "nowhere")

"""Sources of samples on a disk: each reads the numbers of the array that was stored, and names what is wrong."""

import os
import pickle
import re
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from convexformer import ConvexAttentionRegressor
from convexformer.preprocessing.stored import stored_sequences
from convexformer.storage import Chunks, ShardSource, Source, open_source, write_shards
from convexformer.storage.opening import array_of, would_be_shard
from convexformer.validation import as_tensor

N, SHAPE = 23, (4, 3)
DTYPES = ["float64", "float32", "float16", "int8", "uint8", "int16", "int32", "int64"]


def numbers(dtype="float32", n_samples=N, shape=SHAPE, seed=0):
    values = 20 * np.random.default_rng(seed).normal(size=(n_samples, *shape))
    return np.abs(values).astype(dtype) if dtype == "uint8" else values.astype(dtype)


def save_npy(folder, X):
    np.save(folder / "X.npy", X)
    return folder / "X.npy"


def save_npz(folder, X):
    np.savez(folder / "X.npz", X=X)
    return folder / "X.npz"


def save_named_npz(folder, X):
    np.savez(folder / "X.npz", text=np.array(["a"]), other=X[::-1], y=np.arange(3), a_long_name_of_an_array=X)
    return f"{folder}/X.npz:a_long_name_of_an_array"


def save_safetensors(folder, X):
    save_file({"X": torch.as_tensor(X), "y": torch.arange(3)}, folder / "X.safetensors")
    return folder / "X.safetensors"


def save_folder(folder, X):
    (folder / "shards").mkdir()
    for i, part in enumerate(np.split(X, [3, 4, 10, 19])):
        if i % 2:
            save_file({"X": torch.as_tensor(np.ascontiguousarray(part))}, folder / "shards" / f"{i}.safetensors")
        else:
            np.save(folder / "shards" / f"{i}.npy", part)
    (folder / "shards" / "README.txt").write_text("not read")
    return folder / "shards"


def save_memmap(folder, X):
    save_npy(folder, np.concatenate([X[:2], X]))
    return np.load(folder / "X.npy", mmap_mode="r")[2:]


def save_raw_memmap(folder, X):
    (folder / "X.bin").write_bytes(b"12345678" * 1000 + X.tobytes())
    return np.memmap(folder / "X.bin", X.dtype, "r+", 8000, X.shape)


def save_strided_memmap(folder, X):
    save_npy(folder, np.repeat(X, 2, axis=0))
    return np.load(folder / "X.npy", mmap_mode="r")[::2]


def save_zarr(folder, X):
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(f"{folder}/X.zarr", shape=X.shape, chunks=(5, *X.shape[1:]), dtype=X.dtype)
    array[:] = X
    return f"{folder}/X.zarr"


def zarr_array(folder, X):
    path = save_zarr(folder, X)
    return pytest.importorskip("zarr").open_array(path, mode="r")


def save_zarr_group(folder, X):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(f"{folder}/X.zarr", mode="w")
    for name in ("y", "data"):
        group.create_array(name, shape=X.shape, chunks=X.shape, dtype=X.dtype)[:] = X
    return f"{folder}/X.zarr:data"


def save_hdf5(folder, X):
    with pytest.importorskip("h5py").File(folder / "X.h5", "w") as file:
        file.create_dataset("group/X", data=X, chunks=(5, *X.shape[1:]), compression="gzip")
        file["y"] = np.arange(3)
    return f"{folder}/X.h5:group/X"


def hdf5_dataset(folder, X):
    path, _, name = save_hdf5(folder, X).rpartition(":")
    return pytest.importorskip("h5py").File(path, "r")[name]


def column(folder, X):
    datasets = pytest.importorskip("datasets")
    item = datasets.Value(X.dtype.name)
    for _ in X.shape[1:]:
        item = datasets.List(item)
    features = datasets.Features({"X": item, "y": datasets.Value("int64")})
    return datasets.Dataset.from_dict({"X": X.tolist(), "y": list(range(len(X)))}, features=features)["X"]


def data_set_of_arrays(folder, X):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"X": datasets.Array2D(X.shape[1:], X.dtype.name)})
    return datasets.Dataset.from_dict({"X": list(X)}, features=features)


def saved_data_set(folder, X):
    column(folder, X).source.save_to_disk(folder / "table")
    return folder / "table"


def chunks(folder, X):
    return Chunks(lambda: iter(np.split(X, [3, 3, 10, 19])))


def chunks_of_known_number(folder, X):
    return Chunks(list(torch.as_tensor(X).split(5)), n_samples=len(X))


def joined(folder, X):
    return ShardSource([chunks(folder, X[:7]), open_source(save_npy(folder, X[7:]))], ["a", "b"])


KINDS = [
    save_npy,
    save_npz,
    save_named_npz,
    save_safetensors,
    save_folder,
    save_memmap,
    save_raw_memmap,
    save_strided_memmap,
    save_zarr,
    zarr_array,
    save_zarr_group,
    save_hdf5,
    hdf5_dataset,
    column,
    data_set_of_arrays,
    saved_data_set,
    chunks,
    chunks_of_known_number,
    joined,
]
by_kind = pytest.mark.parametrize("store", KINDS, ids=lambda kind: kind.__name__)


def assert_reads(source, X):
    """Assert that passes, and any rows in any order, are those of the array, in the precision of storage."""
    wanted = torch.as_tensor(X)
    wanted = wanted[:, :, None] if wanted.ndim == 2 else wanted
    assert isinstance(source, Source)
    assert (source.shape, source.dtype) == (tuple(wanted.shape), wanted.dtype)
    rng = np.random.default_rng(0)
    spans = [(i, min(i + 4, N)) for i in range(0, N, 4)] * 2 + [(0, N), (5, 5)]
    spans += [tuple(sorted(rng.integers(0, N + 1, 2))) for _ in range(25)]
    for start, stop in spans:
        rows = source.read(slice(int(start), int(stop)))
        assert rows.dtype == wanted.dtype
        torch.testing.assert_close(rows, wanted[start:stop], rtol=0, atol=0)
    for size in (1, 2, 5, N, 2 * N):  # sorted positions, most of them more than once in the end
        places = torch.as_tensor(np.sort(rng.integers(0, N, size)))
        rows = source.take(places)
        assert rows.dtype == wanted.dtype
        torch.testing.assert_close(rows, wanted[places], rtol=0, atol=0)
        rows.zero_()  # a copy


@by_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_those_of_the_array(store, dtype, tmp_path):
    X = numbers(dtype)
    assert_reads(open_source(store(tmp_path, X)), X)


@by_kind
def test_two_dimensions_are_tokens_of_width_one(store, tmp_path):
    if store is data_set_of_arrays:
        pytest.skip("datasets have Array2D, Array3D, ... alone")
    X = numbers(shape=(5,))
    assert_reads(open_source(store(tmp_path, X)), X)


@by_kind
def test_sources_of_files_are_pickled_and_opened_again(store, tmp_path):
    if store in (hdf5_dataset, chunks, chunks_of_known_number, joined):
        pytest.skip("an open file or a function of the user")
    X = numbers()
    source = open_source(store(tmp_path, X))
    source.read(slice(0, 2))
    assert_reads(pickle.loads(pickle.dumps(source)), X)


@pytest.mark.parametrize("store", [save_npy, save_npz, save_safetensors, save_folder, save_hdf5, save_zarr])
def test_samples_of_a_relative_path_are_read_from_another_working_directory(store, tmp_path, monkeypatch):
    """Zarr takes chunks that are not there for zeros."""
    X = numbers()
    path = Path(store(tmp_path, X)).relative_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    source = open_source(path)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert_reads(source, X)
    assert_reads(pickle.loads(pickle.dumps(source)), X)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_headers_of_numpy_of_all_versions_are_read(version, tmp_path):
    X = numbers()
    with open(tmp_path / "X.npy", "wb") as file:
        np.lib.format.write_array(file, X, version)
    assert_reads(open_source(tmp_path / "X.npy"), X)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_narrow_numbers_are_read_as_they_are_stored(dtype, tmp_path):
    X = as_tensor(numbers()).to(dtype)
    save_file({"X": X}, tmp_path / "X.safetensors")
    assert_reads(open_source(tmp_path / "X.safetensors"), X)
    assert_reads(Chunks(X.split(5)), X)


def test_reading_maps_nothing_to_memory(tmp_path):
    X = np.ones((4096, 16, 128), np.float32)  # 32 MiB
    path = save_npy(tmp_path, X)
    del X

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    source = open_source(path)
    source.read(slice(0, 64))
    before = resident()
    for start in range(0, 4096, 64):
        source.read(slice(start, start + 64))
    assert resident() - before < 4 * 2**20


@pytest.mark.parametrize("store", [save_npy, save_npz, save_folder])
def test_single_rows_of_files_are_taken_without_those_between(store, tmp_path, monkeypatch):
    X = numbers(n_samples=400)
    source = open_source(store(tmp_path, X))
    opened, real = [], open
    monkeypatch.setattr("builtins.open", lambda *arguments, **options: opened.append(arguments) or real(*arguments))
    monkeypatch.setattr(source, "read", None)
    assert torch.equal(source.take(torch.arange(0, 400, 3)), torch.as_tensor(X[::3]))
    assert len(opened) <= 5  # once a shard


def test_anything_in_memory_is_no_source():
    for X in (np.ones((2, 3)), torch.ones(2, 3), [[1.0]], None, 3, Chunks):
        assert open_source(X) is None
    assert open_source(Chunks([np.ones((2, 3))])).shape == (2, 3, 1)


def test_a_result_computed_from_a_memory_map_is_in_memory(tmp_path):
    assert open_source(save_memmap(tmp_path, numbers()) * 2) is None


@pytest.mark.parametrize("mode", ["c", "r+"])
def test_what_is_written_to_a_memory_map_is_read(mode, tmp_path):
    X = np.load(save_npy(tmp_path, numbers()), mmap_mode=mode)
    source = open_source(X)
    X[3:] *= 2
    X.flush()
    os.utime(X.filename, ns=(0, 1))  # clocks of file systems are slow
    assert_reads(source, numbers() * np.where(np.arange(N) < 3, 1, 2).astype(np.float32)[:, None, None])


def test_places_name_shard_and_row(tmp_path):
    source = open_source(save_folder(tmp_path, numbers()))
    assert source.place(2) == "row 2 of shard '0.npy'"
    assert source.place(3) == "row 0 of shard '1.safetensors'"
    assert source.place(22) == "row 3 of shard '4.npy'"
    assert open_source(save_npy(tmp_path, numbers())).place(3) == "sample 3"


@pytest.mark.parametrize(
    "store",
    [save_npy, save_npz, save_safetensors, save_folder, save_memmap, save_hdf5, hdf5_dataset, save_zarr, column],
)
def test_fingerprints_change_with_the_data(store, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    X = numbers()
    path = store(first, X)
    assert open_source(path).fingerprint == open_source(path).fingerprint
    assert isinstance(open_source(path).fingerprint, str)
    assert open_source(path).fingerprint != open_source(store(second, X[:-1])).fingerprint


def test_fingerprints_tell_the_arrays_of_a_place_apart(tmp_path):
    h5py, zarr = pytest.importorskip("h5py"), pytest.importorskip("zarr")
    arrays = {"X": numbers(shape=(5,)), "Z": numbers(shape=(5,), seed=1)}
    np.savez(tmp_path / "X.npz", **arrays)
    write_shards(tmp_path / "shards", lambda rows: {name: each[rows] for name, each in arrays.items()}, N, shard_rows=9)
    with h5py.File(tmp_path / "X.h5", "w") as file:
        file.update(arrays)
    group = zarr.open_group(tmp_path / "X.zarr", mode="w")
    for name, each in arrays.items():
        group[name] = each
    column(tmp_path, arrays["X"]).source.add_column("Z", arrays["Z"].tolist()).save_to_disk(tmp_path / "table")
    for place in ("X.npz", "shards", "X.h5", "X.zarr", "table"):
        first, second = (open_source(f"{tmp_path / place}:{name}").fingerprint for name in arrays)
        assert first != second


def test_samples_of_which_some_are_made_anew_have_no_fingerprint(tmp_path):
    parts = [open_source(save_npy(tmp_path, numbers())), chunks(tmp_path, numbers())]
    assert ShardSource(parts[:1] * 2, ["a", "b"]).fingerprint is not None
    assert ShardSource(parts, ["a", "b"]).fingerprint is None


def test_no_sources_are_refused():
    with pytest.raises(ValueError, match="sources must hold at least one source, got none"):
        ShardSource([], [])


def test_a_memory_map_of_a_file_without_a_name_is_read():
    X = numbers()
    with tempfile.TemporaryFile() as file:
        file.write(X.tobytes())
        assert_reads(open_source(np.memmap(file, X.dtype, "r", shape=X.shape)), X)


def test_a_file_is_not_read_among_shards_that_are_listed(tmp_path):
    X = numbers()
    folder = save_folder(tmp_path, X)
    write_shards(tmp_path / "listed", lambda rows: {"X": X[rows]}, N, shard_rows=9)
    for place in (tmp_path / "listed", Path(save_zarr(tmp_path, X)), saved_data_set(tmp_path, X)):
        assert not would_be_shard(place / "kept.npz", place)
    (tmp_path / "link").symlink_to(folder)
    assert would_be_shard(folder / "kept.npz", tmp_path / "link")


def test_a_name_with_a_colon_is_a_path_where_there_is_one(tmp_path):
    X = numbers()
    np.save(tmp_path / "a:b.npy", X)
    assert_reads(open_source(tmp_path / "a:b.npy"), X)


# What is wrong with files


def refused(X, message, error=ValueError):
    with pytest.raises(error, match=message):
        open_source(X)


def test_missing_files_and_unknown_kinds_are_named(tmp_path):
    refused("nowhere.npy", "X='nowhere.npy' is no file and no folder", FileNotFoundError)
    refused("nowhere.npz:X", "X='nowhere.npz:X' is no file", FileNotFoundError)
    (tmp_path / "X.csv").write_text("1,2")
    refused(tmp_path / "X.csv", r"must be a folder or end in \.npy, \.npz, \.safetensors, \.h5, \.hdf5 or \.zarr")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"empty' must hold \.npy, \.npz, \.safetensors files, .* it has none")
    for store in (save_npy, save_zarr):
        refused(f"{store(tmp_path, numbers())}:X", "holds one array without a name; leave out ':X'")


@pytest.mark.parametrize("store", [save_npy, save_safetensors])
@pytest.mark.parametrize("left", [0.99, 0.5])
def test_truncated_files_are_named_with_their_bytes(store, left, tmp_path):
    path = store(tmp_path, numbers())
    content = path.read_bytes()
    path.write_bytes(content[: int(left * len(content))])
    refused(path, rf"{path.name}' is truncated: .* {int(left * len(content))}; copy or write it again")


@pytest.mark.parametrize("size", [0, 5, 40])
def test_files_without_a_whole_header_are_named(size, tmp_path):
    for store in (save_npy, save_safetensors, save_npz):
        path = store(tmp_path, numbers())
        path.write_bytes(path.read_bytes()[:size])
        refused(path, rf"{path.name}' is (truncated|damaged)")


@pytest.mark.parametrize(
    ("store", "part", "other"),
    [(save_npy, b"}", b"("), (save_npz, b"}", b"("), (save_safetensors, b"dtype", b"dtyqe")],
)
def test_headers_with_other_bytes_are_refused(store, part, other, tmp_path):
    path = store(tmp_path, numbers())
    path.write_bytes(path.read_bytes().replace(part, other))
    refused(path, rf"{path.name}' is damaged")


def test_a_truncated_shard_is_named(tmp_path):
    folder = save_folder(tmp_path, numbers())
    path = folder / "2.npy"
    path.write_bytes(path.read_bytes()[:-1])
    refused(folder, "shard '2.npy' of X=.* is truncated")


@pytest.mark.parametrize("store", [save_npy, save_raw_memmap])
def test_a_file_that_shrinks_is_noticed(store, tmp_path):
    source = open_source(store(tmp_path, numbers()))
    (path,) = tmp_path.iterdir()
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(OSError, match="has become shorter since it was opened"):
        source.read(slice(0, N))


@pytest.mark.parametrize("store", [save_npy, save_npz, save_safetensors, save_folder, save_memmap, save_hdf5])
def test_a_file_whose_numbers_change_is_noticed(store, tmp_path):
    source = open_source(store(tmp_path, numbers()))
    source.read(slice(0, 5))
    (path,) = {*tmp_path.glob("X.*"), *tmp_path.glob("*/4.npy")}
    with open(path, "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))
    os.utime(path, ns=(0, 1))  # clocks of file systems are slow
    with pytest.raises(OSError, match=rf"(?s){path.name}.* has changed since it was opened"):
        source.read(slice(0, N))
    with pytest.raises(OSError, match=rf"(?s){path.name}.* has changed since it was opened"):
        source.take(torch.arange(N))


def test_a_fit_whose_file_changes_between_passes_is_stopped(tmp_path):
    path = save_npy(tmp_path, numbers("float64", 400))
    y = np.arange(400.0) % 7

    def change(info):
        os.utime(path, ns=(0, info.iteration + 1))

    model = ConvexAttentionRegressor(loss="huber", alpha=1e-3, solver="fista", memory_limit=40_000, callback=change)
    with pytest.raises(OSError, match=r"X\.npy' has changed since it was opened; .* fit, again"):
        model.fit(path, y)


def test_shards_that_differ_are_named(tmp_path):
    folder = save_folder(tmp_path, numbers())
    np.save(folder / "5.npy", numbers(shape=(4, 2)))
    refused(folder, r"'0.npy' has samples of shape \(4, 3\) in torch.float32, '5.npy' of \(4, 2\) in torch.float32")
    np.save(folder / "5.npy", numbers("float64"))
    refused(folder, r"'5.npy' of \(4, 3\) in torch.float64")


def test_hidden_files_are_no_shards(tmp_path):
    folder = save_folder(tmp_path, numbers())
    (folder / "._0.npy").write_bytes(b"what macOS keeps of a file on other file systems")
    assert_reads(open_source(folder), numbers())
    for file in [*folder.glob("[!.]*")]:
        file.unlink()
    refused(folder, "must hold .npy, .npz, .safetensors files, or be a .zarr folder; it has none")


def test_arrays_are_chosen_by_name(tmp_path):
    path = tmp_path / "two.npz"
    np.savez(path, a=numbers(), b=numbers())
    refused(path, r"must hold one array or one called 'X', got \['a', 'b'\]; add ':' and a name")
    refused(f"{path}:c", r"two.npz' has no array 'c', but \['a', 'b'\]")
    np.savez(path, only=numbers())
    assert_reads(open_source(path), numbers())


def test_compressed_members_are_refused(tmp_path):
    np.savez_compressed(tmp_path / "X.npz", X=numbers())
    refused(tmp_path / "X.npz", r"is compressed, .* 'X' .*; store it with numpy\.savez in place of")


@pytest.mark.parametrize("name", ["X.npy", "X.safetensors", "X.h5"])
def test_a_folder_named_as_a_file_is_taken_as_a_folder(name, tmp_path):
    (tmp_path / name).mkdir()
    refused(tmp_path / name, r"must hold .npy, .npz, .safetensors files, or be a .zarr folder; it has none")
    save_npy(tmp_path / name, numbers())
    assert_reads(open_source(tmp_path / name), numbers())


def test_orders_of_bytes_and_axes_are_refused(tmp_path):
    refused(save_npy(tmp_path, np.asfortranarray(numbers())), "is in Fortran order.*np.ascontiguousarray")
    refused(save_npy(tmp_path, numbers().astype(">f4")), r"byte order .*; store X\.astype\('float32'\)")


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (np.ones((2, 3), complex), "got complex128"),
        (np.full((2, 3), "a"), "got str"),
        (np.full((2, 3), "2020-01-01", "datetime64[D]"), r"got datetime64\[D\]"),
        (np.ones((2, 3), bool), "got bool; uint8 holds True and False as 1 and 0"),
        (np.ones((2, 3), np.longdouble), "got (float128|longdouble|float96)"),
        (np.zeros((2, 3), "V2"), "numpy has no bfloat16: store it as .safetensors"),
        (np.array([[1, None]], object), "holds Python objects, which are not read"),
    ],
)
def test_other_things_than_numbers_are_refused_by_name(values, name, tmp_path):
    with open(tmp_path / "X.npy", "wb") as file:
        np.lib.format.write_array(file, values, allow_pickle=True)
    refused(tmp_path / "X.npy", name)
    if values.dtype.kind in "cM":
        with pytest.raises(ValueError, match=name):
            Chunks([values])


def test_other_types_of_safetensors_are_refused_by_name(tmp_path):
    save_file({"X": torch.ones(2, 3, dtype=torch.bool)}, tmp_path / "X.safetensors")
    refused(tmp_path / "X.safetensors", "array 'X' of .* must hold floats .*, got BOOL")


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2, 2), (0, 2), (2, 0, 3)])
def test_other_numbers_of_axes_and_empty_ones_are_refused(shape, tmp_path):
    wanted = "must have 2 or 3 dimensions" if len(shape) in (1, 4) else "at least one sample, token and feature"
    refused(save_npy(tmp_path, np.ones(shape)), rf"X=.*{wanted}.*got shape {re.escape(str(shape))}")


def test_damaged_archives_are_named(tmp_path):
    path = save_npz(tmp_path, numbers())
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("X.npy", b"no array")
    refused(path, "array 'X' of .*X.npz' is damaged or no array of NumPy")
    pytest.importorskip("h5py")
    (tmp_path / "X.h5").write_bytes(b"no file of HDF5")
    refused(tmp_path / "X.h5", "X.h5' is truncated, damaged or no file of HDF5")


def test_objects_of_several_arrays_are_named(tmp_path):
    arrays = {"X": np.ones((3, 2, 1)), "y": np.ones(3)}
    np.savez(tmp_path / "X.npz", **arrays)
    with np.load(tmp_path / "X.npz") as archive:
        refused(
            archive, r"X must be one array, got a NpzFile of \['X', 'y'\]; pass one of its arrays, as in X\['name'\]"
        )
    refused(arrays, "X must be one array, got a dict of")
    with pytest.importorskip("h5py").File(tmp_path / "X.h5", "w") as file:
        file.update(arrays)
        refused(file, "X must be one array, got a File of")
    refused(
        pytest.importorskip("zarr").open_group(tmp_path / "X.zarr", mode="w"), "X must be one array, got a Group of"
    )


def test_an_empty_data_set_is_named(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "X.h5", "w") as file:
        file["X"] = h5py.Empty("f8")
        refused(file["X"], r"X must have 2 or 3 dimensions .*, got shape \(\)")
    refused(tmp_path / "X.h5", r"X=.*X.h5' must have 2 or 3 dimensions .*, got shape \(\)")


@pytest.mark.parametrize("first", [2, 3])
def test_shards_of_vectors_and_of_tokens_are_no_samples_of_a_probe(first, tmp_path):
    for index, n_dims in enumerate((first, 5 - first)):
        np.save(tmp_path / f"{index}.npy", numbers(n_samples=4, shape=(5, 1)[: n_dims - 1]))
    wanted = rf"shards must agree: '0.npy' has {first} dimensions, '1.npy' {5 - first}"
    with pytest.raises(ValueError, match=wanted):
        stored_sequences(tmp_path)
    assert open_source(tmp_path).shape == (8, 5, 1)  # both are columns of width 1


def test_columns_that_differ_are_named():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"X": [[1.0, 2.0]] * 3 + [[1.0]], "text": ["a"] * 4})
    refused(table, r"X must have one column, got \['X', 'text'\]")
    refused(table["text"], "column 'text' of X must hold lists of numbers")
    refused(datasets.Dataset.from_dict({"X": [{"a": 1.0}]}), "column 'X' of X must hold lists of numbers")
    refused(datasets.Dataset.from_dict({}), r"X must have one column, got \[\]")
    with pytest.raises(
        ValueError,
        match=r"rows 2 to 3 of column 'X' of X must have the shape of row 0, \(2,\), .* \[1, 2\]; a probe takes",
    ):
        open_source(table["X"]).read(slice(2, 4))
    with pytest.raises(ValueError, match=r"rows 3 to 3 of column 'X' .*: got \(1,\)"):
        open_source(table["X"]).read(slice(3, 4))
    joined = datasets.concatenate_datasets([datasets.Dataset.from_dict({"X": [[0.0] * n] * 3}) for n in (2, 1)])
    with pytest.raises(ValueError, match=r"rows 1 to 4 of column 'X' .* row 0, \(2,\), .*: got \(1,\)"):
        open_source(joined["X"]).read(slice(1, 5))
    refused(datasets.Dataset.from_dict({"X": []}), "column 'X' of X must have at least one sample")
    refused(table.to_iterable_dataset(), r"X must tell its number of samples; give Chunks\(make\)")
    missing = datasets.Dataset.from_dict({"X": [[1, 2], [1, None]]})
    with pytest.raises(ValueError, match=r"column 'X' of X must have one shape and no missing values: there are"):
        open_source(missing).read(slice(0, 2))


def test_one_of_several_data_sets_is_asked_for(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"X": [[1.0, 2.0]] * 3, "y": ["a", "b", "b"]})
    datasets.DatasetDict(train=table, test=table).save_to_disk(tmp_path / "both")
    refused(tmp_path / "both", r"X='.*both' must hold one data set, got \['test', 'train'\]; give the folder of one")
    assert open_source(f"{tmp_path / 'both' / 'train'}:X").shape == (3, 2, 1)
    refused(f"{tmp_path / 'both' / 'train'}:Z", r"has no array 'Z', but \['X', 'y'\]")
    assert list(array_of(str(tmp_path / "both" / "train"), "y")) == ["a", "b", "b"]
    with pytest.raises(ValueError, match="holds no array 'groups' that can be read from there"):
        array_of(str(tmp_path / "both" / "train"), "groups")


def test_groups_and_texts_are_no_arrays_and_names_may_be_paths_in_a_file(tmp_path):
    h5py, zarr = pytest.importorskip("h5py"), pytest.importorskip("zarr")
    X = numbers()
    with h5py.File(tmp_path / "X.h5", "w") as file:
        file["y/X"] = X
    zarr.open_group(tmp_path / "X.zarr", mode="w").create_group("y").create_group("deep")["X"] = X
    assert_reads(open_source(f"{tmp_path}/X.h5:/y/X"), X)
    assert_reads(open_source(f"{tmp_path}/X.zarr:y/deep/X"), X)
    for place in ("X.h5:y", "X.zarr:y/deep", "X.zarr:y/Z"):
        refused(f"{tmp_path}/{place}", f"has no array '{place.rpartition(':')[2]}'")
    np.savez(tmp_path / "X.npz", X=X)
    with zipfile.ZipFile(tmp_path / "X.npz", "a") as archive:
        archive.writestr("y", "text")
    for place in ("X.h5", "X.zarr", "X.npz", save_zarr(tmp_path / "y", X)):
        with pytest.raises(ValueError, match="holds no array 'y' that can be read from there"):
            array_of(os.path.join(tmp_path, place), "y")


def test_targets_are_joined_from_the_files_of_a_folder(tmp_path):
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=count) for count in (3, 1, 2)]
    for number, part in enumerate(parts):
        np.savez(tmp_path / f"{number}.npz", X=rng.normal(size=(len(part), 2)), y=part)
    np.testing.assert_array_equal(array_of(str(tmp_path), "y"), np.concatenate(parts))
    np.testing.assert_array_equal(array_of(f"{tmp_path}:y", "sample_weight"), np.concatenate(parts))
    with pytest.raises(ValueError, match="holds no array 'groups' that can be read from there"):
        array_of(str(tmp_path), "groups")


def test_optional_packages_are_asked_for(tmp_path, monkeypatch):
    for path, package in (("X.h5", "h5py"), ("X.zarr", "zarr")):
        (tmp_path / path).write_bytes(b"")
        monkeypatch.setitem(sys.modules, package, None)
        refused(tmp_path / path, rf"need {package}: pip install 'convexformer\[disk\]'", ModuleNotFoundError)


# Chunks


def test_chunks_go_on_without_starting_again():
    starts = []

    def make():
        starts.append(None)
        return iter(np.split(numbers(), [3, 10, 19]))

    source = Chunks(make)
    for _ in range(2):
        for start in range(0, N, 6):
            source.read(slice(start, min(start + 6, N)))
    assert len(starts) == 3  # to count, and for two passes
    assert source.fingerprint is None


def test_chunks_may_be_one_array_that_is_filled_again():
    X = numbers(n_samples=24)

    def make():
        chunk = np.empty_like(X[:4])
        for start in range(0, 24, 4):
            chunk[:] = X[start : start + 4]
            yield chunk

    source = Chunks(make)
    parts = [source.read(slice(start, start + 3)) for start in range(0, 24, 3)]
    assert torch.equal(torch.cat(parts), torch.as_tensor(X))
    assert torch.equal(source.read(slice(0, 24)), torch.as_tensor(X))


def test_chunks_must_be_made_anew():
    with pytest.raises(TypeError, match=r"make must be a callable that returns a new iterator each time, .*generator"):
        Chunks(part for part in [numbers()])
    kept = iter([numbers()])
    source = Chunks(lambda: kept)
    with pytest.raises(ValueError, match="make must give 23 samples each time that it is called, got 0; it must"):
        source.read(slice(0, 4))


@pytest.mark.parametrize("n_samples", [22, 24])
def test_chunks_must_have_as_many_samples_as_is_said(n_samples):
    source = Chunks(lambda: [numbers()[:20], numbers()[20:]], n_samples=n_samples)
    source.read(slice(0, 20))
    with pytest.raises(ValueError, match=f"make must give {n_samples} samples .*, got 23"):
        source.read(slice(20, n_samples))


def test_chunks_after_the_last_sample_are_noticed():
    source = Chunks(lambda: [numbers()[:20], numbers()[20:]], n_samples=20)
    with pytest.raises(ValueError, match=r"make must give 20 samples .*, got 23 or more"):
        source.read(slice(0, 20))


def test_chunks_that_differ_are_named():
    with pytest.raises(ValueError, match=r"chunk 2 of make has samples of shape \(4, 2\) in .*before have \(4, 3\)"):
        Chunks([numbers(), numbers(), numbers(shape=(4, 2))])
    with pytest.raises(ValueError, match=r"chunk 1 of make has samples of shape \(4, 3\) in torch.float64"):
        Chunks([numbers(), numbers("float64")])
    with pytest.raises(ValueError, match="chunk 0 of make must have 2 or 3 dimensions"):
        Chunks([np.ones(3)])


def test_no_chunks_are_refused():
    for empty in ([], [np.ones((0, 2))]):
        with pytest.raises(ValueError, match="make must give at least one sample, got none"):
            Chunks(empty)
    with pytest.raises(ValueError, match="n_samples must be a positive integer or None, got 0"):
        Chunks([numbers()], n_samples=0)


def test_an_error_while_chunks_are_made_begins_the_next_pass_anew():
    failures = [True]

    def make():
        yield numbers()[:10]
        if failures:
            failures.pop()
            raise OSError("lost")
        yield numbers()[10:]

    source = Chunks(make, n_samples=N)
    with pytest.raises(OSError, match="lost"):
        source.read(slice(0, 12))
    assert_reads(source, numbers())


@pytest.mark.parametrize("returned", [None, 3.0])
def test_a_function_that_returns_no_chunks_is_named(returned):
    with pytest.raises(TypeError, match=r"make must return an iterator over arrays each time, got (NoneType|float)"):
        Chunks(lambda: returned)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize("shape", [(4, 3), (4,)])
def test_a_function_that_returns_all_samples_in_one_array_is_told_to_return_a_list(kind, shape):
    """Each sample of three dimensions could be a chunk of tokens of width 1."""
    values = kind(numbers(shape=shape))
    with pytest.raises(TypeError, match=r"got one array of shape \(.*each sample would be a chunk; return \[X\]"):
        Chunks(lambda: values)

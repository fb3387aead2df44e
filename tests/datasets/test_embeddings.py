"""Embeddings from files: every form, what is kept of their precision, and what is refused."""

import pickle
import re
import sys
import zipfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from safetensors.numpy import save_file

from convexformer import ConvexAttentionClassifier
from convexformer.datasets import Embeddings, load_embeddings

LENGTHS = [3, 1, 4, 2]
FLAT = np.random.default_rng(0).normal(size=(10, 5)).astype(np.float32)
PARTS = np.split(FLAT, np.cumsum(LENGTHS)[:-1])
PADDED = np.random.default_rng(1).normal(size=(4, 6, 5)).astype(np.float32)
Y = np.array([0, 1, 1, 0])
ARCHIVES = [".npz", ".safetensors"]


@pytest.fixture(params=ARCHIVES)
def write(request, tmp_path):
    """Function that writes an archive of arrays and returns its path."""

    def call(**arrays):
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
        path = tmp_path / f"embeddings{request.param}"
        if request.param == ".npz":
            np.savez(path, **arrays)
        else:
            save_file(arrays, path)
        return path

    return call


@pytest.fixture
def write_table(tmp_path):
    """Function that writes a table of columns and returns its path."""

    def call(row_group_size=None, **columns):
        pq.write_table(pa.table(columns), tmp_path / "embeddings.parquet", row_group_size=row_group_size)
        return tmp_path / "embeddings.parquet"

    return call


def tokens_column(parts=PARTS, kind=None):
    kind = pa.list_(pa.list_(pa.float32())) if kind is None else kind
    return pa.array([list(part) for part in parts], type=kind)


def assert_parts(sequences, parts, dtype=np.float32):
    assert isinstance(sequences, list)
    for given, wanted in zip(sequences, parts, strict=True):
        np.testing.assert_array_equal(given, wanted)
        assert given.dtype == dtype
        assert given.flags.writeable


# Archives


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_an_array_of_three_axes_is_returned_as_it_is(write, dtype):
    data = load_embeddings(write(X=PADDED.astype(dtype)))
    np.testing.assert_array_equal(data.sequences, PADDED.astype(dtype))
    assert data.sequences.dtype == dtype
    assert data.labels is None
    assert data.lengths.tolist() == [6] * 4
    assert len(data) == 4


def test_lengths_come_in_a_pair_with_the_array(write):
    data = load_embeddings(write(X=PADDED, lengths=np.array(LENGTHS, np.int32)), tokens="X")
    X, lengths = data.sequences
    np.testing.assert_array_equal(X, PADDED)
    assert lengths.tolist() == data.lengths.tolist() == LENGTHS
    assert repr(data) == "Embeddings(4 sequences, 1 to 4 tokens, 5 features, float32)"


@pytest.mark.parametrize("described", [{"lengths": LENGTHS}, {"offsets": [0, *np.cumsum(LENGTHS)]}], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_flat_arrays_are_split(write, described, dtype):
    data = load_embeddings(write(flat=FLAT.astype(dtype), y=Y, **described), labels="y")
    assert_parts(data.sequences, [part.astype(dtype) for part in PARTS], dtype)
    assert data.lengths.tolist() == LENGTHS
    np.testing.assert_array_equal(data.labels, Y)
    assert repr(data) == f"Embeddings(4 sequences, 1 to 4 tokens, 5 features, {np.dtype(dtype)}, with labels)"


def test_the_embeddings_are_the_only_floats_with_tokens_or_are_named(write):
    path = write(other=PADDED + 1, X=PADDED, y=np.ones((4, 2)))
    with pytest.raises(ValueError, match=r"one array of floats with two or three axes, got \['X', 'other', 'y'\]"):
        load_embeddings(path)
    data = load_embeddings(path, tokens="X", labels="y")
    np.testing.assert_array_equal(data.sequences, PADDED)
    assert data.labels.shape == (4, 2)
    path = write(X=PADDED, y=np.ones((4, 2)), ids=np.arange(8).reshape(4, 2), weights=np.ones(4))
    np.testing.assert_array_equal(load_embeddings(path, labels="y").sequences, PADDED)


def test_numbers_of_brain_precision_become_float32(tmp_path):
    brain = torch.as_tensor(PADDED).to(torch.bfloat16)
    safetensors.torch.save_file({"X": brain}, tmp_path / "X.safetensors")
    data = load_embeddings(tmp_path / "X.safetensors")
    assert data.sequences.dtype == np.float32
    np.testing.assert_array_equal(data.sequences, brain.float().numpy())
    safetensors.torch.save_file({"X": brain.to(torch.float8_e4m3fn)}, tmp_path / "X.safetensors")
    with pytest.raises(ValueError, match=r"entry 'X' of .* holds torch.float8_e4m3fn, which NumPy does not have"):
        load_embeddings(tmp_path / "X.safetensors", tokens="X")


def test_text_labels_of_archives_of_numpy(tmp_path):
    np.savez(tmp_path / "X.npz", X=PADDED, y=["a", "b", "b", "a"])
    assert load_embeddings(tmp_path / "X.npz", labels="y").labels.tolist() == ["a", "b", "b", "a"]


def test_sequences_of_equal_length_are_what_an_estimator_takes(write):
    data = load_embeddings(write(X=PADDED, y=Y), labels="y")
    model = ConvexAttentionClassifier(alpha=0.1, tol=1e-2).fit(data.sequences, data.labels)
    assert model.predict(data.sequences).shape == (4,)


class Harmful:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was read",))


def test_pickles_are_never_read(tmp_path):
    objects = np.empty(4, dtype=object)
    objects[:] = [Harmful() for _ in range(4)]
    np.savez(tmp_path / "X.npz", X=PADDED, bags=objects)
    np.testing.assert_array_equal(load_embeddings(tmp_path / "X.npz").sequences, PADDED)
    for options in ({"tokens": "bags"}, {"labels": "bags"}):
        with pytest.raises(ValueError, match=r"entry 'bags' of .* Arrays of Python objects are refused"):
            load_embeddings(tmp_path / "X.npz", **options)
    for kind in (*ARCHIVES, ".parquet"):
        path = tmp_path / f"pickled{kind}"
        path.write_bytes(pickle.dumps(Harmful()))
        with pytest.raises(ValueError, match="is damaged or no"):
            load_embeddings(path)


def test_damaged_entries_are_named(tmp_path):
    path = tmp_path / "X.npz"
    np.savez(path, X=PADDED)
    contents = bytearray(path.read_bytes())
    contents[300] ^= 255
    path.write_bytes(contents)
    for options in ({"tokens": "X"}, {}):
        with pytest.raises(ValueError, match=r"entry 'X' of .*X\.npz is damaged"):
            load_embeddings(path, **options)


def test_other_files_in_an_archive_are_no_embeddings(tmp_path):
    path = tmp_path / "X.npz"
    np.savez(path, X=PADDED)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("readme.txt", "Embeddings of four texts.")
    np.testing.assert_array_equal(load_embeddings(path).sequences, PADDED)
    with pytest.raises(ValueError, match=r"entry 'readme\.txt' of .*X\.npz is no array of NumPy"):
        load_embeddings(path, tokens="readme.txt")


@pytest.mark.parametrize("write_file", [np.savez, np.savez_compressed, "parquet"])
def test_files_with_any_byte_damaged_are_named_or_read(tmp_path, write_file):
    path = tmp_path / f"X.{'npz' if callable(write_file) else write_file}"
    if callable(write_file):
        write_file(path, X=PADDED)
    else:
        pq.write_table(pa.table({"X": tokens_column()}), path)
    contents = path.read_bytes()
    messages = set()
    for place in range(0, len(contents), 7):
        path.write_bytes(contents[:place] + bytes([contents[place] ^ 255]) + contents[place + 1 :])
        try:
            assert len(load_embeddings(path)) == len(PARTS)
        except ValueError as error:
            messages.add(str(error))
    assert any("damaged" in message for message in messages)
    assert all(str(path) in message and "allow_pickle" not in message for message in messages)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"X": PADDED}, {"tokens": "x"}, r"tokens='x' is no entry of .*, which has \['X'\]"),
        ({"X": PADDED}, {"labels": "y"}, r"labels='y' is no entry of .*, which has \['X'\]"),
        ({"y": Y}, {}, r"two or three axes, got none among \['y'\]; name the embeddings with tokens="),
        ({"X": Y}, {"tokens": "X"}, r"must hold floats in shape .*, got int64 in shape \(4,\)"),
        ({"X": PADDED.astype(int)}, {"tokens": "X"}, "must hold floats in shape .*, got int64"),
        ({"X": PADDED, "y": Y[:3]}, {"labels": "y"}, r"labels='y' must have one row for each of 4 .*, got \(3,\)"),
        (
            {"X": FLAT},
            {},
            r"shape \(10, 5\), so it must have an entry 'lengths' or 'offsets' .* one vector a sample",
        ),
        ({"X": FLAT, "lengths": [3, 1, 4]}, {}, "sum is the number of rows, 10, got a sum of 8"),
        ({"X": FLAT, "lengths": [11, -1]}, {}, "must hold positive integers whose sum"),
        ({"X": FLAT, "lengths": [4, 0, 6]}, {}, "sequence 1 has no tokens; leave it out of the file"),
        ({"X": FLAT, "lengths": [4.0, 6.0]}, {}, "'lengths' of .* must hold integers on one axis, got float64"),
        ({"X": FLAT, "offsets": [0, 3, 4, 8]}, {}, r"must rise from 0 to the number of rows, 10, .* got 4 .*\[8\]"),
        ({"X": FLAT, "offsets": [0, 5, 3, 10]}, {}, "must rise from 0"),
        ({"X": FLAT, "offsets": [0, 3, 3, 10]}, {}, "sequence 1 has no tokens"),
        ({"X": FLAT, "offsets": [0, 10], "lengths": [10]}, {}, "has entries 'lengths' and 'offsets'; keep one"),
        ({"X": PADDED, "offsets": [0, 4]}, {}, "which needs 'lengths' or nothing"),
        ({"X": PADDED, "lengths": [1, 2, 3]}, {}, "must hold 4 integers from 1 to 6, got 3 from 1 to 3"),
        ({"X": PADDED, "lengths": [1, 2, 3, 7]}, {}, "must hold 4 integers from 1 to 6, got 4 from 1 to 7"),
        ({"X": PADDED, "lengths": [1, 2, 0, 3]}, {}, "sequence 2 has no tokens"),
        ({"X": PADDED, "mask": PADDED[:, :, 0] > 0}, {}, "entry 'mask', which is not read; .* lengths=mask.sum"),
        ({"X": PADDED, "attention_mask": PADDED[:, :, 0] > 0}, {"tokens": "X"}, "entry 'attention_mask', which is not"),
        ({"X": PADDED[:0]}, {}, "must hold at least one sequence, got none"),
        ({"X": FLAT[:0], "lengths": np.zeros(0, int)}, {}, "must hold at least one sequence, got none"),
    ],
)
def test_what_does_not_fit_is_named(write, arrays, options, message):
    path = write(**arrays)
    with pytest.raises(ValueError, match=message):
        load_embeddings(path, **options)


# Tables


@pytest.mark.parametrize("row_group_size", [None, 1, 3])
@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.list_(pa.float32())),
        pa.large_list(pa.large_list(pa.float32())),
        pa.list_(pa.list_(pa.float32(), 5)),
    ],
    ids=str,
)
def test_columns_of_lists_of_tokens(write_table, kind, row_group_size):
    path = write_table(row_group_size, id=["a", "b", "c", "d"], bag=tokens_column(kind=kind), y=Y, z=[[1.0]] * 4)
    data = load_embeddings(path, labels="y")
    assert_parts(data.sequences, PARTS)
    np.testing.assert_array_equal(data.labels, Y)
    assert data.lengths.tolist() == LENGTHS
    assert_parts(load_embeddings(path, tokens="bag").sequences, PARTS)


def test_columns_of_arrays_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"X": datasets.Array2D((None, 5), "float32")})
    table = datasets.Dataset.from_dict({"X": [part.tolist() for part in PARTS]}, features=features)
    table.to_parquet(tmp_path / "X.parquet")
    assert_parts(load_embeddings(tmp_path / "X.parquet").sequences, PARTS)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_columns_keep_their_precision(write_table, dtype):
    parts = [part.astype(dtype) for part in PARTS]
    path = write_table(X=tokens_column(parts, pa.list_(pa.list_(pa.from_numpy_dtype(dtype)))))
    assert_parts(load_embeddings(path).sequences, parts, dtype)


def test_tables_of_pandas(tmp_path):
    frame = pd.DataFrame({"X": [list(part) for part in PARTS], "y": pd.Categorical(["a", "b", "b", "a"]), "s": 1.5})
    frame["text"] = frame["y"].astype(str)
    frame.to_parquet(tmp_path / "X.parquet")
    for name in ("y", "text"):
        data = load_embeddings(tmp_path / "X.parquet", labels=name)
        assert_parts(data.sequences, PARTS)
        assert data.labels.tolist() == ["a", "b", "b", "a"]
        assert data.labels.dtype.kind == "U"
    assert load_embeddings(tmp_path / "X.parquet", labels="s").labels.tolist() == [1.5] * 4


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"y": Y}, {}, r"one column of lists of lists of floats, got none among \['y'\]; name .* tokens="),
        ({"A": tokens_column(), "B": tokens_column()}, {}, r"got \['A', 'B'\] among \['A', 'B'\]; name"),
        ({"X": tokens_column()}, {"tokens": "x"}, r"tokens='x' is no column of .*, which has \['X'\]"),
        ({"X": tokens_column()}, {"labels": "y"}, r"labels='y' is no column of .*, which has \['X'\]"),
        ({"X": [[1.0]]}, {"tokens": "X"}, "column 'X' of .* must hold lists of lists of floats, got list<"),
        ({"X": [[[1, 2]]]}, {"tokens": "X"}, "must hold lists of lists of floats, got list<.*int64"),
        ({"X": [[[1.0, 2.0]], [[1.0]]]}, {}, r"tokens of one width, 1 or more, got widths \[1, 2\]"),
        ({"X": [[[1.0, 2.0]], []]}, {}, "sequence 1 has no tokens"),
        ({"X": [[[1.0, 2.0]], None]}, {}, "column 'X' of .* must not have missing values"),
        ({"X": [[[1.0, None]]]}, {}, "must not have missing values"),
        ({"X": [[[1.0]], [[2.0]]], "y": [1, None]}, {"labels": "y"}, "labels='y' has 1 missing values"),
        ({"X": [[[1.0]]], "y": [[1]]}, {"labels": "y"}, "labels='y' of .* must hold numbers or text, got list"),
        ({"X": tokens_column([])}, {}, "must hold at least one sequence, got none"),
    ],
)
def test_what_does_not_fit_in_a_table_is_named(write_table, columns, options, message):
    path = write_table(**columns)
    with pytest.raises(ValueError, match=message):
        load_embeddings(path, **options)


def test_columns_of_single_vectors_are_refused_with_what_makes_an_array_of_them(write_table):
    path = write_table(X=[[1.0, 2.0], [3.0, 4.0]])
    with pytest.raises(ValueError, match=r"for one vector a sample, give estimators np\.stack\(.*\)$") as caught:
        load_embeddings(path, tokens="X")
    array = eval(str(caught.value).rpartition("estimators ")[2], {"np": np, "pandas": pd, "path": path})
    np.testing.assert_array_equal(array, [[1.0, 2.0], [3.0, 4.0]])


def test_tokens_of_differing_width_in_other_row_groups_are_refused(tmp_path):
    schema = pa.schema({"X": pa.list_(pa.list_(pa.float32()))})
    with pq.ParquetWriter(tmp_path / "X.parquet", schema) as writer:
        for width in (2, 3):
            writer.write_table(pa.table({"X": [[[1.0] * width]]}, schema=schema))
    with pytest.raises(ValueError, match="must hold tokens of one width"):
        load_embeddings(tmp_path / "X.parquet")


# Arguments and packages


def test_paths_that_are_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"path must end in \.npz, \.safetensors or \.parquet, got 'X\.pkl'"):
        load_embeddings("X.pkl")
    with pytest.raises(FileNotFoundError, match=r"path='.*absent\.npz' is no file"):
        load_embeddings(tmp_path / "absent.npz")
    with pytest.raises(TypeError, match="path must be the path of a file, got int"):
        load_embeddings(3)
    for name in ("tokens", "labels"):
        np.savez(tmp_path / "X.npz", X=PADDED)
        with pytest.raises(TypeError, match=f"{name} must be None or the name of an entry of the file, got int"):
            load_embeddings(tmp_path / "X.npz", **{name: 0})


@pytest.mark.parametrize(
    ("module", "kind", "extra"), [("pyarrow", "parquet", "parquet"), ("safetensors", "safetensors", "bert")]
)
def test_what_is_not_installed_is_named(tmp_path, monkeypatch, module, kind, extra):
    (tmp_path / f"X.{kind}").write_bytes(b"")
    monkeypatch.setitem(sys.modules, module, None)
    wanted = f"need {module}: pip install {module}, or pip install 'convexformer[{extra}]'"
    with pytest.raises(ModuleNotFoundError, match=re.escape(wanted)):
        load_embeddings(tmp_path / f"X.{kind}")


def test_embeddings_describe_themselves():
    assert repr(Embeddings(PADDED)) == "Embeddings(4 sequences, 6 to 6 tokens, 5 features, float32)"
    assert Embeddings((PADDED, np.array(LENGTHS))).lengths.tolist() == LENGTHS
    assert len(Embeddings(PARTS, Y)) == 4

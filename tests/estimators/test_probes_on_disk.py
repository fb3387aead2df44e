"""Probes of tokens on a disk: those of the same tokens in memory."""

import functools
import shutil

import numpy as np
import pytest
import torch
from covering import covering
from sklearn.base import clone

from convexformer import (
    ConvexProbeClassifier,
    ConvexProbeClassifierCV,
    ConvexProbeRegressor,
)
from convexformer.nn import AttentiveProbe
from convexformer.preprocessing import MeanPooling, PrototypePooling, QueryPooling
from convexformer.preprocessing.sequences import CONFIG
from convexformer.preprocessing.stored import stored_sequences
from convexformer.probes import refit_probe
from convexformer.storage import Chunks, Source, write_shards

N, LONGEST, WIDTH = 90, 6, 5
FEW = [QueryPooling(4), PrototypePooling(4)]
PROBES = {
    "regressor": ConvexProbeRegressor(alpha=0.05, tol=1e-9, random_state=0),
    "classifier": ConvexProbeClassifier(alpha=0.02, tol=1e-9, random_state=0, dictionary=PrototypePooling(4)),
    "generated": ConvexProbeRegressor(alpha=0.05, tol=1e-6, random_state=0, generate=2, standardize=False),
    "limited": ConvexProbeRegressor(alpha=0.05, tol=1e-5, random_state=0, memory_limit=2000),
    "cv": ConvexProbeClassifierCV(alphas=2, cv=2, tol=1e-5, random_state=0, dictionary=FEW),
    "cv_accuracy": ConvexProbeClassifierCV(
        alphas=2, cv=2, tol=1e-5, random_state=0, dictionary=FEW, scoring="accuracy"
    ),
}


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N, LONGEST, WIDTH)).astype(np.float32)
    lengths = rng.integers(1, LONGEST + 1, N)
    return X, lengths, X[:, 0, 0] + np.abs(X[:, 0, 1])


@pytest.fixture
def places(data, tmp_path):
    """The tokens in each kind of place; what is beyond the lengths is not read."""
    X = data[0]
    np.save(tmp_path / "X.npy", X)
    write_shards(tmp_path / "shards", lambda rows: {"X": X[rows], "y": X[rows, 0]}, N, shard_rows=20)
    return {
        "file": str(tmp_path / "X.npy"),
        "shards": tmp_path / "shards",
        "chunks": Chunks(lambda: iter(np.array_split(X, 7))),
    }


@pytest.fixture(scope="module")
def in_memory(data):
    """Function that fits the probe of a name, once, to all tokens or to those within the lengths."""
    X, lengths, y = data

    @functools.cache
    def fit(name, pair):
        target = np.where(y > 1, "up", "down") if name.startswith("c") else y
        return clone(PROBES[name]).fit((X, lengths) if pair else X, target), target

    return fit


def same(got, wanted, X, where):
    assert got.certificate_.primal == wanted.certificate_.primal
    np.testing.assert_array_equal(got.coef_, wanted.coef_)
    np.testing.assert_array_equal(got.predict(where), wanted.predict(X))
    np.testing.assert_array_equal(got.pool(where), wanted.pool(X))


def test_tokens_lengths_and_targets_may_all_be_in_one_folder(data, tmp_path, in_memory):
    X, lengths, y = data
    write_shards(
        tmp_path / "shards", lambda rows: {"X": X[rows], "y": y[rows], "lengths": lengths[rows]}, N, shard_rows=20
    )
    place = str(tmp_path / "shards")
    wanted, _ = in_memory("regressor", True)
    for pair in ((place, f"{place}:lengths"), (place, place)):
        model = clone(PROBES["regressor"]).fit(pair, place)
        same(model, wanted, (X, lengths), pair)
        assert model.score(pair, f"{place}:y") == wanted.score((X, lengths), y)


@pytest.mark.parametrize("name", ["regressor", "cv", "cv_accuracy"])
def test_lengths_and_masks_of_tokens_in_memory_may_be_paths(name, data, tmp_path, in_memory):
    X, lengths, _ = data
    mask = np.arange(LONGEST) < lengths[:, None]
    np.save(tmp_path / "lengths.npy", lengths)
    np.savez(tmp_path / "both.npz", lengths=lengths, mask=mask)
    np.save(tmp_path / "X.npy", X)
    wanted, target = in_memory(name, True)
    tokens = {"array": X, "tensor": torch.as_tensor(X), "memory map": np.load(tmp_path / "X.npy", mmap_mode="r")}
    real = [str(tmp_path / "lengths.npy"), tmp_path / "both.npz", f"{tmp_path / 'both.npz'}:mask"]
    for pair in zip(tokens.values(), real, strict=True):
        same(clone(PROBES[name]).fit(pair, target), wanted, (X, lengths), pair)
    for wrong in ("nothing.npy", f"{tmp_path / 'both.npz'}:tokens"):
        with pytest.raises(ValueError, match=r"X\[1\]"):
            clone(PROBES[name]).fit((X, wrong), target)


# Of all tokens, or of those within the lengths.
@pytest.mark.parametrize(("name", "place", "pair"), covering(PROBES, ["file", "shards", "chunks"], [False, True]))
def test_probes_are_those_of_tokens_in_memory(name, place, pair, data, places, in_memory):
    X, lengths, _ = data
    given, where = ((X, lengths), (places[place], lengths)) if pair else (X, places[place])
    wanted, target = in_memory(name, pair)
    same(clone(PROBES[name]).fit(where, target), wanted, given, where)


@pytest.fixture(scope="module")
def of_one_feature(data):
    """Function that fits a probe to one feature of the tokens in memory, once for all places."""
    X, lengths, y = data
    # Bits are compared, which any tolerance determines.
    model = clone(PROBES["regressor"]).set_params(tol=1e-5)
    return functools.cache(lambda pair: clone(model).fit((X[:, :, :1], lengths) if pair else X[:, :, :1], y))


@pytest.mark.parametrize("pair", [False, True], ids=["all", "lengths"])
@pytest.mark.parametrize("place", ["file", "shards", "chunks"])
def test_tokens_of_one_feature_are_those_in_memory(place, pair, data, tmp_path, of_one_feature):
    X, lengths, y = data
    X = X[:, :, :1]
    np.save(tmp_path / "X.npy", X)
    write_shards(tmp_path / "shards", lambda rows: {"X": X[rows]}, N, shard_rows=20)
    where = {"file": tmp_path / "X.npy", "shards": tmp_path / "shards", "chunks": Chunks(np.array_split(X, 3))}[place]
    given, where = ((X, lengths), (where, lengths)) if pair else (X, where)
    wanted = of_one_feature(pair)
    same(clone(wanted).fit(where, y), wanted, given, where)


@pytest.mark.parametrize("name", ["lengths", "mask"])
@pytest.mark.parametrize("kind", ["npz", "shards"])
def test_lengths_beside_tokens_that_are_not_asked_for_are_told(name, kind, data, tmp_path):
    X, lengths, y = data
    real = {"lengths": lengths, "mask": (np.arange(LONGEST) < lengths[:, None]).astype(np.uint8)}[name]
    model, place = clone(PROBES["regressor"]).set_params(dictionary=MeanPooling()), str(tmp_path / f"data.{kind}")

    def write(values):
        if kind == "npz":
            np.savez(place, X=X, y=y, **{name: values})
        else:
            shutil.rmtree(place, ignore_errors=True)
            write_shards(place, lambda rows: {"X": X[rows], "y": y[rows], name: values[rows]}, N, shard_rows=20)

    write(real)
    for given in (place, f"{place}:X"):
        with pytest.warns(UserWarning, match=f"all of them count as real; for those of the {name}") as caught:
            model.fit(given, place)
        assert [warning.filename for warning in caught] == [__file__]
        # The pair that it names is taken, without a warning.
        pair = eval(str(caught[0].message).rpartition("a pair as X, ")[2])
        np.testing.assert_array_equal(model.fit(pair, place).coef_, clone(model).fit((X, real), y).coef_)
    write(np.full_like(real, LONGEST if name == "lengths" else 1))
    model.fit(place, place)


@pytest.mark.parametrize("lengths", [np.full(N, "a"), np.full(N, None), np.ones(3)], ids=["text", "objects", "three"])
def test_other_arrays_of_that_name_are_no_lengths(lengths, data, tmp_path):
    np.savez(tmp_path / "data.npz", X=data[0], y=data[2], lengths=lengths)
    path = str(tmp_path / "data.npz")
    ConvexProbeRegressor(alpha=0.05, dictionary=MeanPooling()).fit(path, path)


@pytest.fixture(scope="module")
def of_vectors(data):
    """Function that fits the probe of a name, once, to one token of each sample."""
    X, _, y = data
    return functools.cache(lambda name: clone(PROBES[name]).fit(X[:, 0], np.where(y > 1, "up", "down")))


@pytest.mark.parametrize("name", ["classifier", "cv", "cv_accuracy"])
@pytest.mark.parametrize("place", ["file", "shards", "chunks", "column"])
def test_vectors_are_samples_of_one_token(name, place, data, tmp_path, of_vectors):
    X, target = data[0][:, 0], np.where(data[2] > 1, "up", "down")
    where: object = str(tmp_path / place)
    if place == "file":
        where = f"{where}.npy"
        np.save(where, X)
    elif place == "shards":
        write_shards(where, lambda rows: {"X": X[rows]}, N, shard_rows=20)
    elif place == "chunks":
        where = Chunks(np.array_split(X, 3))
    else:
        datasets = pytest.importorskip("datasets")
        features = datasets.Features(X=datasets.Sequence(datasets.Value("float32")))
        where = datasets.Dataset.from_dict({"X": list(X)}, features=features)["X"]
    wanted = of_vectors(name)
    model = clone(PROBES[name]).fit(where, target)
    same(model, wanted, X, where)
    np.testing.assert_array_equal(model.predict(X), wanted.predict(X))
    assert model.n_features_in_ == WIDTH
    np.testing.assert_array_equal(model.explain(where).scores, wanted.explain(X).scores)


def test_masks_explanations_and_refits(data, places):
    X, lengths, y = data
    mask = np.arange(LONGEST) < lengths[:, None]
    model = ConvexProbeRegressor(alpha=0.05, random_state=0).fit((places["shards"], mask), y)
    wanted = ConvexProbeRegressor(alpha=0.05, random_state=0).fit((X, lengths), y)
    same(model, wanted, (X, lengths), (places["shards"], lengths))
    got, there = model.explain((places["file"], lengths)), wanted.explain((X, lengths))
    np.testing.assert_array_equal(np.concatenate(got.contributions), np.concatenate(there.contributions))
    for real in (mask, lengths):
        weights = model.token_weights((places["shards"], real))
        np.testing.assert_array_equal(weights, wanted.token_weights((X, lengths)))
        assert weights.shape[2] == LONGEST
    torch.manual_seed(0)
    trained = AttentiveProbe(WIDTH, 1, n_queries=2)
    found = refit_probe(trained, places["file"], y, alpha=0.05)
    assert found.gap == pytest.approx(refit_probe(trained, X, y, alpha=0.05).gap)


def test_mistakes_are_told(data, places, tmp_path):
    X, lengths, y = data
    model = PROBES["regressor"]
    bad = X.copy()
    bad[33, 2, 1] = np.nan
    write_shards(tmp_path / "bad", lambda rows: {"X": bad[rows]}, N, shard_rows=20)
    with pytest.raises(ValueError, match=r"NaN or infinity, in a token of row 13 of shard 'part-00001"):
        model.fit(tmp_path / "bad", y)
    for wrong in (lengths[:5], np.append(lengths, 1)):
        with pytest.raises(ValueError, match=r"lengths, integers of shape \(90,\)"):
            model.fit((places["file"], wrong), y)
    empty = lengths.copy()
    empty[47] = 0
    with pytest.raises(ValueError, match=r"row 7 of shard 'part-00002.*no token that is real"):
        model.fit((places["shards"], empty), y)
    np.save(tmp_path / "flat.npy", X[:, 0])
    for flat in (str(tmp_path / "flat.npy"), Chunks([X[:, 0]])):
        with pytest.raises(ValueError, match=rf"got \({N}, {WIDTH}\); give samples of one token without X\[1\]"):
            model.fit((flat, lengths), y)
    np.save(tmp_path / "narrow.npy", X[:, :, :3])
    fitted = clone(model).fit(X, y)
    with pytest.raises(ValueError, match="3 features"):
        fitted.predict(str(tmp_path / "narrow.npy"))


def test_chunks_are_small_and_folds_are_read_in_order():
    class Recorded(Source):
        shape, dtype, reads = (3000, 512, 4), torch.float32, []

        def read(self, rows):
            self.reads.append(rows)
            return torch.arange(rows.start, rows.stop)[:, None, None].expand(-1, *self.shape[1:]).float()

    source = Recorded()
    samples = stored_sequences((source, np.full(3000, 2)))
    for rows, tokens, _ in samples.chunks():
        np.testing.assert_array_equal(tokens[:, 0, 0], np.arange(rows.start, rows.stop))
    assert max(rows.stop - rows.start for rows in source.reads) * 512 * 4 <= CONFIG.temporary
    source.reads.clear()
    some = torch.tensor([2500, 7, 8, 9, 7, 1200])
    np.testing.assert_array_equal(samples.rows(some).padded(slice(0, 6))[0][:, 0, 0], some)
    assert source.reads == [slice(7, 10), slice(1200, 1201), slice(2500, 2501)]


def test_a_part_of_a_source_has_its_own_lengths_places_and_bytes():
    tokens = torch.arange(30 * 4 * 2.0).view(30, 4, 2)
    lengths = np.arange(30) % 4 + 1

    class Stored(Source):
        shape, dtype = tokens.shape, torch.float32

        def read(self, rows):
            return tokens[rows]

    source = Stored()
    for given in (lengths, lengths[5:12]):
        samples = stored_sequences((source, given), slice(5, 12))
        before = samples.traffic()
        assert before.total_bytes == tokens[5:12].nbytes
        assert samples.lengths.tolist() == lengths[5:12].tolist()
        some = samples.rows(torch.tensor([6, 0, 3]))
        assert [some.place(number) for number in range(3)] == [source.place(row) for row in (11, 5, 8)]
        assert some.lengths.tolist() == lengths[[11, 5, 8]].tolist()
        found, real = some.padded(slice(0, 3))
        for number, row in enumerate((11, 5, 8)):
            assert torch.equal(found[number][real[number]], tokens[row, : lengths[row]])
        assert (before.read_bytes, samples.traffic().read_bytes) == (0, tokens[:3].nbytes)
    np.testing.assert_array_equal(stored_sequences(source, slice(5, 12)).padded(slice(0, 7))[0], tokens[5:12])


def test_sources_of_two_dimensions_are_told():
    class Flat(Source):
        shape, dtype = (30, 4), torch.float32

        def read(self, rows):
            raise AssertionError("nothing is read")

    with pytest.raises(ValueError, match="n_samples, n_tokens, n_features"):
        PROBES["regressor"].fit(Flat(), np.zeros(30))


@pytest.mark.parametrize(
    ("dtype", "working"), [(np.float16, np.float32), (np.int8, np.float32), (np.int32, np.float64)]
)
def test_stored_precisions(dtype, working, data, tmp_path):
    X, _, y = data
    stored = np.round(10 * X).astype(dtype)
    np.save(tmp_path / "X.npy", stored)
    got = clone(PROBES["regressor"]).fit(str(tmp_path / "X.npy"), y)
    wanted = clone(PROBES["regressor"]).fit(stored.astype(working), y)
    assert got.coef_.dtype == wanted.coef_.dtype
    assert got.certificate_.primal == pytest.approx(wanted.certificate_.primal, rel=1e-9)
    np.testing.assert_allclose(got.coef_, wanted.coef_, atol=1e-5)


@pytest.mark.parametrize("name", ["regressor", "generated", "cv"])
def test_what_a_fit_has_read_is_told(name, data, in_memory):
    X, lengths, _ = data
    wanted, target = in_memory(name, True)

    class Counted(Source):
        shape, dtype, n_bytes = X.shape, torch.float32, 0

        def read(self, rows):
            Counted.n_bytes += X[rows].nbytes
            return torch.as_tensor(X[rows])

    model = clone(PROBES[name]).fit((Counted(), lengths), target)
    assert model.traffic_.read_bytes == Counted.n_bytes
    assert model.traffic_.total_bytes == X.nbytes
    assert model.traffic_.passes == Counted.n_bytes / X.nbytes > 1
    assert 0 < model.traffic_.read_seconds == model.traffic_.waited_seconds
    before = model.traffic_.read_bytes
    model.predict((Counted(), lengths))
    assert model.traffic_.read_bytes == before  # a fit's own
    assert wanted.traffic_ is None

"""Programs, gaps and re-fits of samples on a disk are those of the same samples in memory."""

import numpy as np
import pytest
import torch

from convexformer import (
    ConvexAttention,
    ConvexSequenceRegressor,
    GaussianGates,
    SequenceAttention,
    SoftmaxAttention,
    attention_program,
    optimality_gap,
    sequence_program,
)
from convexformer.gates import TrainingData
from convexformer.nn import AttentiveProbe
from convexformer.probes import refit_probe
from convexformer.solvers import StreamedMap, get_solver, solve
from convexformer.storage import Chunks, open_source, write_shards

N, TOKENS, WIDTH = 300, 4, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, TOKENS, WIDTH))
Y = X[:, 1, 0] - X[:, 2, 1] + 0.3 * RNG.normal(size=N)
GATES = GaussianGates(3).make(TrainingData(torch.zeros(1, TOKENS, WIDTH)), np.random.RandomState(0))
PLACES = ["text", "path", "memory map", "shards", "chunks", "source"]


@pytest.fixture
def places(tmp_path):
    """The samples in each kind of place."""
    np.save(tmp_path / "X.npy", X)
    write_shards(tmp_path / "shards", lambda rows: {"X": X[rows]}, N, shard_rows=70)
    return {
        "text": str(tmp_path / "X.npy"),
        "path": tmp_path / "X.npy",
        "memory map": np.load(tmp_path / "X.npy", mmap_mode="r"),
        "shards": tmp_path / "shards",
        "chunks": Chunks(lambda: iter(np.array_split(X, 7))),
        "source": open_source(tmp_path / "X.npy"),
    }


@pytest.fixture(params=["small", "large"])
def room(request, monkeypatch):
    """Room for copies of the samples in memory, or too little, so that each product reads them."""
    if request.param == "large":
        monkeypatch.setattr("convexformer.memory.free_memory", lambda device: 7 * X.nbytes)
    return request.param


def same(got, wanted):
    """Whether two certificates to a gap of 1e-10 are of one program."""
    assert got.primal == pytest.approx(wanted.primal, rel=1e-9)
    assert got.dual == pytest.approx(wanted.dual, rel=1e-9)
    assert max(got.dual, wanted.dual) <= min(got.primal, wanted.primal) * (1 + 1e-13)


@pytest.mark.parametrize("place", PLACES)
def test_programs_are_those_in_memory(place, places, room):
    weight = RNG.uniform(0.5, 2, N)
    parts = {"alpha": 0.05, "gates": GATES, "sample_weight": weight, "fit_intercept": True}
    programs = [attention_program(samples, Y, **parts) for samples in (X, places[place])]
    assert programs[1].map.in_memory == (room == "small")
    wanted, got = (solve(program, get_solver("auto"), tol=1e-10).certificate for program in programs)
    same(got, wanted)
    assert (programs[1].map.traffic() is None) == (room == "small")


def test_programs_of_arrays_of_zarr_are_those_in_memory(tmp_path, room):
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(f"{tmp_path}/X.zarr", shape=X.shape, chunks=(50, TOKENS, WIDTH), dtype=X.dtype)
    array[:] = X
    for place in (f"{tmp_path}/X.zarr", array):
        programs = [attention_program(samples, Y, alpha=0.1) for samples in (place, X)]
        assert programs[0].map.in_memory == (room == "small")
        same(*(solve(program, get_solver("auto"), tol=1e-10).certificate for program in programs))


@pytest.mark.parametrize("form", ["single_row", "stochastic"])
def test_programs_of_sequences_are_those_in_memory(form, places, room):
    targets = np.stack([X[:, ::-1, 0], X[:, :, 1]], 2)
    programs = [sequence_program(samples, targets, alpha=0.1, form=form) for samples in (X, places["shards"])]
    assert programs[1].map.in_memory == (room == "small")
    same(*(solve(program, get_solver("auto"), tol=1e-10).certificate for program in reversed(programs)))


@pytest.mark.parametrize("place", ["text", "memory map", "chunks"])
def test_gaps_are_those_in_memory(place, places, room):
    network = ConvexAttention(TOKENS, WIDTH, n_heads=6, gates=GATES, seed=0).double()
    wanted, got = (optimality_gap(network, samples, Y, alpha=0.05, tol=1e-10) for samples in (X, places[place]))
    same(got.certificate, wanted.certificate)
    assert got.objective == pytest.approx(
        network.objective(torch.as_tensor(X), torch.as_tensor(Y)[:, None], alpha=0.05).item(), rel=1e-12
    )
    assert got.gap == pytest.approx(wanted.gap, rel=1e-9)


def test_gaps_of_sequence_networks_are_those_in_memory(places, room):
    network = SequenceAttention(TOKENS, WIDTH, 1, n_heads=6, n_targets=2, seed=0).double()
    targets = X[:, :2, :1]
    wanted, got = (optimality_gap(network, data, targets, alpha=0.05, tol=1e-10) for data in (X, places["path"]))
    same(got.certificate, wanted.certificate)
    assert got.gap == pytest.approx(wanted.gap, rel=1e-9)
    heads = ConvexSequenceRegressor(alpha=0.05, tol=1e-10).fit(X, targets).heads_
    assert optimality_gap(heads, places["shards"], targets, tol=1e-10).relative_gap <= 2e-10


def test_softmax_attention_is_read_from_a_disk_where_it_fits_into_memory(places, room):
    network = SoftmaxAttention(WIDTH, 1, n_heads=2, position=0).double()
    if room == "large":
        with pytest.raises(
            ValueError, match="X must be an array, or data on a disk that fit into memory, for a Softmax"
        ):
            optimality_gap(network, places["path"], Y, alpha=0.05)
        return
    wanted, got = (optimality_gap(network, samples, Y, alpha=0.05, tol=1e-10) for samples in (X, places["path"]))
    assert got.objective == wanted.objective
    same(got.certificate, wanted.certificate)


@pytest.mark.parametrize("place", PLACES)
def test_refits_are_those_in_memory(place, places):
    probe = AttentiveProbe(WIDTH, 1, n_queries=3, seed=0).double()
    lengths = 1 + np.arange(N) % TOKENS
    for wanted, got in ((X, places[place]), ((X, lengths), (places[place], lengths))):
        wanted, got = (refit_probe(probe, samples, Y, 0.05, tol=1e-10) for samples in (wanted, got))
        same(got.certificate, wanted.certificate)
        assert got.objective == pytest.approx(wanted.objective, rel=1e-12)


def test_tokens_of_width_one_may_lack_their_axis_in_a_file(tmp_path, room):
    np.save(tmp_path / "flat.npy", X.reshape(N, -1))
    wanted, got = (attention_program(samples, Y, alpha=0.1) for samples in (X.reshape(N, -1), tmp_path / "flat.npy"))
    assert got.coef_shape == wanted.coef_shape == (TOKENS * WIDTH, 1, 1)
    same(*(solve(program, get_solver("auto"), tol=1e-10).certificate for program in (got, wanted)))


def test_a_map_of_a_file_has_a_limit_of_its_own(places):
    streamed = StreamedMap(open_source(places["shards"]), memory_limit="4 kB")
    got, wanted = (attention_program(samples, Y, alpha=0.1) for samples in (streamed, X))
    assert got.map.memory_limit == 4000
    same(*(solve(program, get_solver("auto"), tol=1e-10).certificate for program in (got, wanted)))


def test_files_that_are_none_or_hold_no_numbers_are_named(tmp_path, room):
    network = ConvexAttention(TOKENS, WIDTH, n_heads=2).double()
    bad = X.copy()
    bad[211, 0, 0] = np.nan
    np.save(tmp_path / "bad.npy", bad)
    for call in (
        lambda samples: solve(attention_program(samples, Y, alpha=0.1), get_solver("auto")),
        lambda samples: optimality_gap(network, samples, Y, alpha=0.1),
    ):
        with pytest.raises(FileNotFoundError, match=r"X='nothing.npy' is no file and no folder"):
            call("nothing.npy")
        with pytest.raises(ValueError, match="must be finite, got NaN or infinite values in sample 211"):
            call(tmp_path / "bad.npy")

"""Maps of data on a disk: the same products as in memory, in few passes, with little memory."""

import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from solver_cases import randn

from convexformer_solvers import DenseMap, GatedMap, SignedMap, get_loss
from convexformer_solvers.checks import check_map
from convexformer_solvers.linear_maps import base, streamed
from convexformer_solvers.linear_maps.config import MapConfig
from convexformer_solvers.linear_maps.derived import PaddedMap, RoundedMap
from convexformer_solvers.linear_maps.source import Source, Traffic
from convexformer_solvers.linear_maps.streamed import StreamedMap
from convexformer_solvers.program import LossSlopes

N = 23


class Rows(Source):
    """Samples of a tensor, with a record of what has been read."""

    def __init__(self, data):
        self.data, self.reads = data, []

    shape = property(lambda self: tuple(self.data.shape))
    dtype = property(lambda self: self.data.dtype)

    def read(self, rows):
        self.reads.append(rows)
        return self.data[rows]


def masks_of(n=N, h=3):
    return torch.rand((n, h), generator=torch.Generator().manual_seed(1)) > 0.4


def maps(dtype=torch.float64):
    """A streamed map of each kind with the same map in memory."""
    data, masks = randn(N, 3, 2).to(dtype), masks_of()
    plain, gated = DenseMap(data), GatedMap(data, masks)
    streamed, narrow = StreamedMap(Rows(data), chunk=48), StreamedMap(Rows(data), chunk=12)
    some = torch.tensor([20, 3, 4, 5, 11, 0, 3])
    sorted_rows = torch.arange(1, N, 7)
    further, more = randn(N, 2, seed=5).to(dtype), randn(N, 1, seed=6).to(dtype)
    mean = randn(3, 2, seed=7)
    moved, moved_in_memory = streamed.shifted(mean, torch.float64), plain.shifted(mean, torch.float64)
    twice = GatedMap(plain.widened(further).widened(more).data, masks).rows(some)
    return {
        "plain": (streamed, plain),
        "gated": (streamed.gated(masks), gated),
        "every second": (streamed.rows(slice(1, None, 2)), plain.rows(slice(1, None, 2))),
        "slice": (streamed.rows(slice(4, 19)), plain.rows(slice(4, 19))),
        "shuffled": (streamed.gated(masks).rows(some), gated.rows(some)),
        "rows of rows": (streamed.rows(some).rows(torch.tensor([5, 1, 0])), plain.rows(some[[5, 1, 0]])),
        "one sample at a time": (StreamedMap(Rows(data), chunk=5), plain),
        "in another order": (
            narrow.widened(further).gated(masks).rows(some),
            GatedMap(plain.widened(further).data, masks).rows(some),
        ),
        "slice of another order": (narrow.rows(some).rows(slice(1, 6)), plain.rows(some[1:6])),
        "order of another order": (narrow.rows(some).rows(torch.arange(1, 7)), plain.rows(some[1:])),
        "far apart": (StreamedMap(Rows(data), chunk=6).rows(sorted_rows), plain.rows(sorted_rows)),
        "wider": (streamed.widened(further), plain.widened(further)),
        "wider twice": (streamed.widened(further).gated(masks).widened(more).rows(some), twice),
        "signed": (SignedMap(streamed), SignedMap(plain)),
        "padded": (SignedMap(PaddedMap(streamed)), SignedMap(PaddedMap(plain))),
        "other precision": (streamed.to(torch.float32), plain.to(torch.float32)),
        "wider, other precision": (
            streamed.widened(further).to(torch.float32),
            plain.widened(further).to(torch.float32),
        ),
        "moved": (moved, moved_in_memory),
        "moved twice, other precision": (
            moved.shifted(mean, torch.float64).to(torch.float32),
            plain.shifted(2 * mean, torch.float32),
        ),
        "moved, wider and gated": (
            moved.widened(further).gated(masks).rows(some),
            GatedMap(moved_in_memory.widened(further).data, masks).rows(some),
        ),
    }


def test_samples_are_moved_in_the_higher_precision():
    data = (1e6 + randn(N, 3, 2)).float()
    mean = data.double().mean(0)
    for dtype, accuracy in ((torch.float64, 1e-15), (torch.float32, 1e-7)):
        moved = StreamedMap(Rows(data)).shifted(mean, dtype)
        assert moved.dtype == dtype
        torch.testing.assert_close(moved.tensor().double(), data.double() - mean, rtol=accuracy, atol=0)


def test_further_features_lose_their_means_before_they_are_rounded():
    further = 1e8 + randn(N, 2)
    streamed, plain = StreamedMap(Rows(randn(N, 3, 2))).widened(further), DenseMap(randn(N, 3, 2)).widened(further)
    mean = plain.data.mean(0)
    moved, in_memory = (each.shifted(mean, torch.float64).to(torch.float32) for each in (streamed, plain))
    torch.testing.assert_close(moved.tensor(), in_memory.data)


@pytest.mark.parametrize("name", maps())
def test_maps_keep_the_identities_and_agree_with_memory(name):
    streamed, held = maps()[name]
    check_map(streamed)
    coef = randn(*held.feature_shape, 2)
    values, weight = randn(held.n_samples, 2), randn(held.n_samples).abs()
    torch.testing.assert_close(streamed.matvec(coef), held.matvec(coef))
    torch.testing.assert_close(streamed.rmatvec(values), held.rmatvec(values))
    for got, wanted in zip(streamed.moments(weight, values), held.moments(weight, values), strict=True):
        torch.testing.assert_close(got, wanted)
    several = streamed.moments(torch.stack([weight, values[:, 0]], dim=1), values)
    for number, each in enumerate((weight, values[:, 0])):
        for got, wanted in zip(several, held.moments(each, values), strict=True):
            torch.testing.assert_close(got[number], wanted)
    assert torch.equal(streamed.nonnegative(coef), held.nonnegative(coef))
    assert streamed.largest() == held.largest()
    assert streamed.n_stored == held.n_stored
    assert streamed.columns(torch.tensor([1])).dtype == streamed.dtype == held.dtype


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.int8, torch.float32),
        (torch.uint16, torch.float32),
        (torch.int32, torch.float64),
        (torch.float64, torch.float64),
    ],
)
def test_numbers_are_converted_as_they_are_read(dtype, wanted):
    data = (3 * randn(N, 3, 2)).to(dtype)
    streamed = StreamedMap(Rows(data), chunk=24)
    assert streamed.dtype == wanted
    coef = randn(3, 2, 1)
    torch.testing.assert_close(streamed.matvec(coef), DenseMap(data.double()).matvec(coef))


def test_each_product_is_one_pass():
    data = randn(N, 3, 2)
    source = Rows(data)
    streamed, weight = StreamedMap(source, chunk=24), randn(N).abs()
    products = (
        lambda: streamed.matvec(randn(3, 2, 1)),
        lambda: streamed.rmatvec(randn(N, 1)),
        lambda: streamed.moments(weight, randn(N, 2)),
        lambda: streamed.gram(torch.arange(3), torch.arange(3), weight),
        lambda: streamed.columns(torch.arange(2)),
    )
    for number, product in enumerate(products, 1):
        product()
        assert streamed.traffic().passes == number
    assert source.reads[:6] == [slice(0, 4), slice(4, 8), slice(8, 12), slice(12, 16), slice(16, 20), slice(20, 23)]


@pytest.mark.parametrize("derived", [lambda streamed: streamed, SignedMap, PaddedMap])
def test_a_product_with_few_blocks_is_one_pass(derived):
    streamed = StreamedMap(Rows(randn(N, 40, 2)), chunk=240)
    linear_map, few = derived(streamed), torch.tensor([0, 7])
    coef = torch.zeros(*linear_map.feature_shape, 3, dtype=torch.float64)
    coef.view(-1, 2, 3)[few] = 1.0
    linear_map.sparse_matvec(coef)
    assert streamed.traffic().passes == 1
    linear_map.rmatvec_blocks(few, randn(N, 3))
    assert streamed.traffic().passes == 2


@pytest.mark.parametrize("derived", [SignedMap, PaddedMap, RoundedMap])
def test_maps_made_of_another_know_where_its_data_are(derived):
    streamed = StreamedMap(Rows(randn(N, 3, 2)), chunk=48, memory_limit=1000)
    made = derived(streamed)
    made.rmatvec(randn(N, 1))
    assert made.traffic() == streamed.traffic()
    assert made.traffic().passes == 1
    for one in (made, made.rows(slice(0, 20))):
        assert one.memory_limit == 1000
        assert not one.in_memory
    assert made.to(torch.float64) is made
    assert made.to(torch.float32).dtype == torch.float32


def test_few_samples_are_read_by_themselves():
    source = Rows(randn(1000, 3, 2))
    streamed = StreamedMap(source, chunk=60)
    few = streamed.rows(torch.tensor([0, 500, 999]))
    assert isinstance(few, DenseMap)
    assert streamed.traffic().read_bytes == 3 * 6 * 8


@pytest.mark.parametrize(
    ("places", "reads"),
    [
        ([2, 4, 6], [slice(2, 7)]),
        ([2, 5], [slice(2, 6)]),
        ([2, 4, 9], [slice(2, 3), slice(4, 5), slice(9, 10)]),
        ([0, 0, 7, 8, 20, 20], [slice(0, 1), slice(7, 9), slice(20, 21)]),
    ],
)
def test_samples_are_taken_together_where_half_of_those_between_are_wanted(places, reads):
    source = Rows(randn(N, 3, 2))
    assert torch.equal(source.take(torch.tensor(places)), source.data[places])
    assert source.reads == reads


def test_integers_are_widened_by_fractions():
    data, further = torch.arange(N * 6, dtype=torch.int8).reshape(N, 3, 2), randn(N, 2, dtype=torch.float32)
    streamed, coef = StreamedMap(Rows(data), chunk=24).widened(further), randn(3, 4, 1)
    torch.testing.assert_close(streamed.matvec(coef), DenseMap(data.float()).widened(further).matvec(coef))


def test_seconds_of_reading_are_within_those_of_the_product():
    streamed, began = StreamedMap(Rows(randn(N, 3, 2)), chunk=24), time.perf_counter()
    streamed.rmatvec(randn(N, 1))
    assert 0 < streamed.traffic().read_seconds <= time.perf_counter() - began


@pytest.mark.parametrize("derived", [lambda streamed: streamed, SignedMap, PaddedMap])
def test_the_norm_is_about_that_of_some_samples(derived, monkeypatch):
    monkeypatch.setattr(base, "CONFIG", MapConfig(chunk=600))
    streamed, weight = StreamedMap(Rows(randn(1000, 3, 2)), chunk=600), torch.full((1000,), 1e-3).double()
    norm = float(torch.linalg.matrix_norm(derived(DenseMap(streamed.tensor())).as_matrix(), 2)) ** 2 / 1000
    before = streamed.traffic()
    assert 0.5 * norm <= derived(streamed).squared_norm(weight) <= 2 * norm
    assert streamed.traffic().read_bytes - before.read_bytes == 100 * 6 * 8


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_entry_that_is_not_finite_is_named(bad):
    data = randn(N, 3, 2)
    data[17, 1, 0] = bad
    streamed = StreamedMap(Rows(data), chunk=24)
    for some in (streamed, streamed.rows(torch.arange(N - 2, 0, -2))):
        with pytest.raises(ValueError, match="NaN or infinite values in sample 17"):
            some.rmatvec(randn(some.n_samples, 1))


def test_a_sum_that_overflows_is_no_fault():
    data = torch.full((N, 3, 2), 3e38)
    assert torch.isfinite(StreamedMap(Rows(data), chunk=24).matvec(torch.zeros(3, 2, 1))).all()


def test_samples_that_a_network_makes_have_no_gradient():
    scale = torch.ones(2, dtype=torch.float64, requires_grad=True)

    class Made(Rows):
        def read(self, rows):
            return scale * super().read(rows)

    assert not StreamedMap(Made(randn(N, 3, 2)), chunk=24).matvec(randn(3, 2, 1)).requires_grad


def test_a_source_that_fails_ends_the_product_and_its_thread():
    class Broken(Rows):
        def read(self, rows):
            if rows.start > 8:
                raise OSError("the disk has gone")
            return super().read(rows)

    with pytest.raises(OSError, match="the disk has gone"):
        StreamedMap(Broken(randn(N, 3, 2)), chunk=24).matvec(randn(3, 2, 1))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader")]


@pytest.mark.parametrize(("stored", "n_bytes"), [(torch.float64, 8), (torch.float16, 4)])
def test_columns_beyond_the_limit_are_an_error_that_says_what_to_do(stored, n_bytes):
    size, source = N * 3 * 2 * n_bytes, Rows(randn(N, 3, 2).to(stored))
    StreamedMap(source, chunk=24, memory_limit=size).as_matrix()
    streamed = StreamedMap(source, chunk=24, memory_limit=size - 1)
    with pytest.raises(ValueError, match=r"memory_limit is .* raise it, or use fewer features, gates or samples"):
        streamed.as_matrix()


@pytest.mark.parametrize("masks", [torch.ones(N, 2), torch.ones(5, 2, dtype=torch.bool)], ids=["numbers", "few"])
def test_masks_that_do_not_fit(masks):
    with pytest.raises(ValueError, match="masks must be a bool array"):
        StreamedMap(Rows(randn(N, 3, 2)), masks)


def test_what_is_no_source():
    with pytest.raises(TypeError, match="source must be"):
        StreamedMap(randn(N, 3, 2))


@pytest.mark.parametrize("rows", [torch.zeros(N, dtype=torch.int64), slice(12)], ids=["repeated", "first"])
def test_some_rows_are_no_whole_pass(rows):
    data = randn(N, 3, 2)
    data[15, 1, 0] = torch.nan
    streamed = StreamedMap(Rows(data), chunk=24)
    streamed.rows(rows).matvec(randn(3, 2, 1))
    with pytest.raises(ValueError, match="sample 15"):
        streamed.matvec(randn(3, 2, 1))


def test_a_part_counts_passes_over_itself():
    data = randn(N, 3, 2)
    part = StreamedMap(Rows(data), part=slice(4, 19, 1), chunk=24)
    coef = randn(3, 2, 1)
    torch.testing.assert_close(part.matvec(coef), DenseMap(data[4:19]).matvec(coef))
    assert part.traffic().passes == 1
    assert part.traffic().total_bytes == 15 * 6 * 8
    with pytest.raises(ValueError, match="without a step"):
        StreamedMap(Rows(data), part=slice(0, 19, 2))


@pytest.mark.parametrize("name", maps())
@pytest.mark.parametrize("with_weight", [False, True])
def test_slopes_of_the_same_pass(name, with_weight):
    streamed, held = maps()[name]
    y, weight = randn(held.n_samples, 2), randn(held.n_samples).abs()
    weight[::3] = 0
    slopes = LossSlopes(get_loss("huber"), y, weight, randn(2), with_weight)
    coef = randn(*held.feature_shape, 2)
    for got, wanted in zip(streamed.slopes_pass(coef, slopes), held.slopes_pass(coef, slopes), strict=True):
        torch.testing.assert_close(got, wanted)


def test_no_samples_have_no_slopes():
    streamed = StreamedMap(Rows(randn(N, 3, 2)), part=slice(0, 0))
    slopes = LossSlopes(get_loss("squared"), randn(0, 2), randn(0), randn(2), True)
    pred, back = streamed.slopes_pass(randn(3, 2, 2), slopes)
    assert pred.shape == (0, 2)
    assert torch.equal(back, torch.zeros(3, 2, 3, dtype=torch.float64))
    assert streamed.largest() == 0.0
    assert streamed.traffic().passes == 0.0


def test_traffic_of_two_maps_is_added():
    added = Traffic(10, 20, 0.5, 0.25) + Traffic(30, 60, 1.5, 0.5)
    assert added == Traffic(40, 80, 2.0, 0.75)
    assert (added.passes, added.bytes_per_second) == (2.0, 40.0)
    assert math.isnan(Traffic(10).bytes_per_second)


class MappedFile(Rows):
    is_mapped = True


def lengthened(monkeypatch, clock, kind, **seconds):
    """Have methods of a class take so many seconds by a clock, and nothing else any."""

    def lasting(run, length):
        def method(*arguments, **options):
            clock[0] += length
            return run(*arguments, **options)

        return method

    for name, length in seconds.items():
        monkeypatch.setattr(kind, name, lasting(getattr(kind, name), length))


def test_passes_of_a_gram_matrix_are_timed_on_two_parts_of_a_large_file(monkeypatch):
    data, clock = randn(900, 8, 100), [0.0]
    small, few_features = StreamedMap(MappedFile(data), chunk=80_000), StreamedMap(MappedFile(data.view(-1, 1, 1)))
    assert small.passes_of_gram(1) == 0.0
    monkeypatch.setattr(streamed, "CONFIG", MapConfig(chunk=80_000))  # parts of a hundred samples
    monkeypatch.setattr(streamed, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    slow = StreamedMap(MappedFile(data))
    lengthened(monkeypatch, clock, MappedFile, read=4.0)
    lengthened(monkeypatch, clock, DenseMap, moments=3.0, matvec=1.0)
    lengthened(monkeypatch, clock, GatedMap, moments=3.0, matvec=8.0)
    monkeypatch.setattr(streamed, "free_memory", lambda device: data.nbytes)
    assert slow.passes_of_gram(1) == 3 / 4  # reading takes longer than products
    monkeypatch.setattr(streamed, "free_memory", lambda device: data.nbytes - 1)
    assert slow.gated(masks_of(900, 1)).passes_of_gram(2) == 3 / 8
    # What has been read is read again, or samples that have not where memory has no room for the file.
    assert slow.source.reads == [slice(400, 500), slice(400, 500), slice(400, 500), slice(500, 600)]
    for untimed in (few_features, StreamedMap(Rows(data)), DenseMap(data)):
        assert untimed.passes_of_gram(1) == 0.0
    assert not small.source.reads
    assert not few_features.source.reads

"""Linear maps: adjoints, precision, chunks, norms; the gated design as a product of masks and data."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from solver_cases import PROPERTY, randn

from convexformer_solvers import DenseMap, GatedMap, SignedMap, TableMap, check_loss, check_map, check_penalty
from convexformer_solvers.linear_maps import base as operators
from convexformer_solvers.linear_maps.config import MapConfig
from convexformer_solvers.linear_maps.derived import MixedMap, PaddedMap, RoundedMap


def random_masks(n, h, seed=0):
    return torch.rand((n, h), generator=torch.Generator().manual_seed(seed)) > 0.5


def make_map(gated, n=12, blocks=3, d=2, h=4, dtype=torch.float64, seed=0):
    data = randn(n, blocks, d, seed=seed).to(dtype)
    return GatedMap(data, random_masks(n, h, seed)) if gated else DenseMap(data)


both_maps = pytest.mark.parametrize("gated", [False, True], ids=["dense", "gated"])


@both_maps
@PROPERTY
@given(
    n=st.integers(1, 9),
    blocks=st.integers(1, 4),
    d=st.integers(1, 3),
    h=st.integers(1, 4),
    c=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    double=st.booleans(),
)
def test_every_map_passes_its_check(gated, n, blocks, d, h, c, seed, double):
    dtype = torch.float64 if double else torch.float32
    check_map(make_map(gated, n, blocks, d, h, dtype, seed), n_outputs=c, seed=seed)


def test_maps_of_many_samples_pass_theirs():
    data = randn(300, 3, 2)  # from 128 on a kernel's upper triangle is not what its lower one is
    check_map(DenseMap(data))
    check_map(GatedMap(data, random_masks(300, 2)))


@pytest.mark.parametrize("shape", [(5, 3), (5, 2, 3, 2), (5, 1, 1)])
def test_any_number_of_block_axes(shape):
    data = randn(*shape)
    check_map(DenseMap(data))
    check_map(GatedMap(data, random_masks(5, 2)))
    assert DenseMap(data).feature_shape == shape[1:]
    assert GatedMap(data, random_masks(5, 2)).feature_shape == (2, *shape[1:])


def test_a_padded_map_is_that_of_data_with_a_block_of_zeros():
    data = randn(20, 3, 2)
    padded, wanted = PaddedMap(DenseMap(data)), torch.nn.functional.pad(data, (0, 0, 0, 1))
    check_map(padded)
    check_map(SignedMap(padded))
    torch.testing.assert_close(padded.as_matrix(), wanted.flatten(1))
    weight, right = randn(20).abs(), randn(20, 2)
    for linear_map, same in (
        (padded, DenseMap(wanted)),
        (SignedMap(padded), DenseMap(torch.stack([wanted, -wanted], 1))),
    ):
        for got, moments in zip(linear_map.moments(weight, right), same.moments(weight, right), strict=True):
            torch.testing.assert_close(got, moments)


@pytest.mark.parametrize("kind", [RoundedMap, MixedMap, SignedMap, PaddedMap])
def test_maps_of_another_map_keep_within_its_memory(kind):
    base = make_map(gated=False)
    base.memory_limit = 1000
    assert kind(base).memory_limit == 1000


def test_wider_samples_have_the_same_further_features_in_every_block():
    data, further = randn(20, 3, 2), randn(20, 2, seed=1)
    wider = DenseMap(data).widened(further)
    check_map(wider)
    assert wider.feature_shape == (3, 4)
    assert torch.equal(wider.data[..., :2], data)
    assert all(torch.equal(block, further) for block in wider.data[..., 2:].unbind(1))


@both_maps
@pytest.mark.parametrize("blocks", [[4], [0, 3, 8], [9, 1, 13, 0, 5], list(range(15))])
def test_parts_pass_the_check_and_are_the_columns_of_their_blocks(gated, blocks):
    linear_map, blocks = make_map(gated, n=20, blocks=3 if gated else 15, d=4, h=5), torch.tensor(blocks)
    part = linear_map.restricted(blocks)
    check_map(part, n_outputs=3)
    torch.testing.assert_close(part.as_matrix(), linear_map.columns(blocks).flatten(1))
    coef, values = randn(*part.feature_shape, 2), randn(20, 2, seed=1)
    torch.testing.assert_close(part.matvec(coef), linear_map.matvec_blocks(blocks, coef))
    torch.testing.assert_close(part.rmatvec(values), linear_map.rmatvec_blocks(blocks, values))
    weight = torch.rand(20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weight = weight / weight.sum()
    centered = part.centered(weight, torch.float64).as_matrix()
    torch.testing.assert_close(centered, part.as_matrix() - weight @ part.as_matrix())


@both_maps
@pytest.mark.parametrize("d", [1, 5, 20])
def test_few_blocks_of_many_pass_the_check(gated, d):
    linear_map = make_map(gated, n=9, blocks=80, d=d, h=2)
    assert linear_map.few(1)
    check_map(linear_map)


@both_maps
def test_products_of_few_blocks_in_another_precision(gated):
    linear_map, blocks = make_map(gated, n=9, blocks=80, d=20, h=2, dtype=torch.float32), torch.tensor([3])
    assert linear_map.few(1)
    exact, coef, values = linear_map.to(torch.float64), randn(1, 20, 2), randn(9, 2)
    torch.testing.assert_close(linear_map.matvec_blocks(blocks, coef), exact.matvec_blocks(blocks, coef))
    torch.testing.assert_close(linear_map.rmatvec_blocks(blocks, values), exact.rmatvec_blocks(blocks, values))


def test_weighted_gram_matrices_are_those_of_their_columns():
    columns, weight = randn(9, 3), torch.arange(9.0).double()
    wanted = columns.T @ torch.diag(weight) @ columns
    torch.testing.assert_close(DenseMap(randn(9, 2)).weighted_gram(columns, weight), wanted)


@pytest.mark.parametrize("d", [1, 4, 16, 64])
def test_few_blocks_are_read_one_by_one(d):
    data = randn(9, 80, d)
    data[:, 3:] = torch.nan  # a product with zeros would show
    linear_map, blocks = DenseMap(data), torch.arange(3)
    few = linear_map.few(3)
    coef, values = randn(3, d, 2, seed=1), randn(9, 2, seed=2)
    assert bool(torch.isfinite(linear_map.matvec_blocks(blocks, coef)).all()) == few
    assert bool(torch.isfinite(linear_map.rmatvec_blocks(blocks, values)).all())
    assert few == (d > 1)  # narrow ones take longer for each of their columns


@both_maps
@pytest.mark.parametrize("n_outputs", [1, 3])
def test_products_of_several_chunks_in_another_precision(gated, n_outputs, monkeypatch):
    monkeypatch.setattr(operators, "CONFIG", MapConfig(temporary=2**8))
    linear_map = make_map(gated, n=100, blocks=5, d=3, dtype=torch.float32)
    matrix = linear_map.as_matrix().double()
    coef, values = randn(*linear_map.feature_shape, n_outputs), randn(100, n_outputs, seed=1)
    torch.testing.assert_close(linear_map.matvec(coef), matrix @ coef.reshape(-1, n_outputs))
    torch.testing.assert_close(linear_map.rmatvec(values).reshape(-1, n_outputs), matrix.T @ values)


@both_maps
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_kernel_of_several_chunks(gated, dtype, monkeypatch):
    monkeypatch.setattr(operators, "CONFIG", MapConfig(temporary=2**12))
    linear_map = make_map(gated, n=700, blocks=5, d=3, dtype=dtype)
    matrix = linear_map.as_matrix().double()
    torch.testing.assert_close(linear_map.full_kernel(torch.float64).tril(), (matrix @ matrix.T).tril())


def test_dense_products_are_inner_products():
    data, coef, values = randn(5, 3, 2), randn(3, 2, 4, seed=1), randn(5, 4, seed=2)
    torch.testing.assert_close(DenseMap(data).matvec(coef), torch.einsum("nbd,bdc->nc", data, coef))
    torch.testing.assert_close(DenseMap(data).rmatvec(values), torch.einsum("nbd,nc->bdc", data, values))


def test_gated_products_are_masked_sums():
    data, masks = randn(6, 3, 2), random_masks(6, 4)
    coef, values = randn(4, 3, 2, 5, seed=1), randn(6, 5, seed=2)
    gates = masks.double()
    linear_map = GatedMap(data, masks)
    torch.testing.assert_close(linear_map.matvec(coef), torch.einsum("ng,nbd,gbdc->nc", gates, data, coef))
    torch.testing.assert_close(linear_map.rmatvec(values), torch.einsum("ng,nbd,nc->gbdc", gates, data, values))


@pytest.mark.parametrize("n_outputs", [1, 3, 7], ids=["wide", "equal", "narrow"])
def test_gated_products_do_not_depend_on_which_is_wider_data_or_outputs(n_outputs):
    data, masks = randn(40, 2, 2), random_masks(40, 5)
    coef, values = randn(5, 2, 2, n_outputs, seed=1), randn(40, n_outputs, seed=2)
    linear_map = GatedMap(data, masks)
    *_, design = next(linear_map._chunks(n_outputs, data.dtype))
    assert (design is not None) == (n_outputs == 7)
    torch.testing.assert_close(linear_map.matvec(coef), torch.einsum("ng,nbd,gbdc->nc", masks.double(), data, coef))
    torch.testing.assert_close(
        linear_map.rmatvec(values), torch.einsum("ng,nbd,nc->gbdc", masks.double(), data, values)
    )


class TestTableMap:
    @PROPERTY
    @given(
        n=st.integers(1, 9),
        blocks=st.integers(1, 3),
        n_rows=st.integers(1, 5),
        d=st.integers(1, 3),
        h=st.integers(1, 4),
        seed=st.integers(0, 10**6),
        double=st.booleans(),
    )
    def test_passes_the_check_and_is_the_gated_map(self, n, blocks, n_rows, d, h, seed, double):
        dtype = torch.float64 if double else torch.float32
        tables = randn(blocks, n_rows, d, seed=seed).to(dtype)
        symbols = torch.randint(n_rows, (n, blocks), generator=torch.Generator().manual_seed(seed))
        masks = random_masks(n, h, seed)
        table, plain = TableMap(tables, symbols, masks), GatedMap(tables[torch.arange(blocks), symbols], masks)
        check_map(table, seed=seed)
        coef, values = randn(h, blocks, d, 2, seed=seed), randn(n, 2, seed=seed + 1)
        torch.testing.assert_close(table.matvec(coef), plain.matvec(coef))
        torch.testing.assert_close(table.rmatvec(values), plain.rmatvec(values))

    def test_gradient_of_the_tables_is_that_of_autograd(self):
        tables, symbols, masks = randn(2, 4, 3), torch.arange(20).reshape(10, 2) % 4, random_masks(10, 3)
        coef, values = randn(3, 2, 3, 5, seed=1), randn(10, 5, seed=2)
        leaf = tables.clone().requires_grad_()
        pred = torch.einsum("ng,nbd,gbdc->nc", masks.double(), leaf[torch.arange(2), symbols], coef)
        (pred * values).sum().backward()
        table = TableMap(tables, symbols, masks)
        torch.testing.assert_close(table.table_gradient(coef, values), leaf.grad)
        of_coef, of_tables = table.gradients(coef, values)
        assert torch.equal(of_coef, table.rmatvec(values))
        assert torch.equal(of_tables, table.table_gradient(coef, values))

    def test_is_found_where_rows_repeat_and_only_there(self):
        tables, symbols = randn(2, 10, 8), torch.arange(1000).reshape(500, 2) % 10
        repeated, masks = tables[torch.arange(2), symbols], random_masks(500, 6)
        found = TableMap.where_it_pays(repeated, masks, 20)
        assert isinstance(found, TableMap)
        torch.testing.assert_close(found.tables[torch.arange(2), found.symbols], repeated, rtol=0, atol=0)
        padded = torch.cat([torch.zeros(600, 2, 8, dtype=torch.float64), randn(400, 2, 8)])
        built = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TableMap, "__init__", lambda *arguments: built.append(arguments))
            found = TableMap.where_it_pays(padded, torch.ones(1000, 20, dtype=torch.bool), 1)
        assert type(found) is GatedMap
        assert not built  # it would hold 240,000 places for 1000 samples
        assert not isinstance(TableMap.where_it_pays(randn(500, 2, 8), masks, 20), TableMap)
        assert not isinstance(TableMap.where_it_pays(repeated[:100], masks[:100], 20), TableMap)

    def test_some_of_its_samples_are_a_table_map_too(self):
        tables, symbols, masks = randn(2, 4, 3), torch.arange(20).reshape(10, 2) % 4, random_masks(10, 3)
        table, index, coef = TableMap(tables, symbols, masks), torch.tensor([7, 0, 3]), randn(3, 2, 3, 2, seed=1)
        assert isinstance(table.rows(index), TableMap)
        torch.testing.assert_close(table.rows(index).matvec(coef), table.matvec(coef)[index])
        none = table.rows(index[:0])
        assert none.matvec(coef).shape == (0, 2)
        assert torch.equal(none.rmatvec(randn(0, 2)), torch.zeros_like(coef))

    def test_does_less_work_than_the_plain_map(self):
        symbols = torch.arange(2000).reshape(1000, 2) % 20
        table = TableMap(randn(2, 20, 16), symbols, random_masks(1000, 8))
        assert table.product_work(10) < GatedMap(table.tables[torch.arange(2), symbols], table.masks).product_work(10)

    @pytest.mark.parametrize(
        ("tables", "symbols", "message"),
        [
            (torch.ones(4, 2), torch.zeros(3, 1, dtype=torch.int64), "tables must have shape"),
            (torch.ones(1, 4, 2), torch.zeros(3, 2, dtype=torch.int64), "symbols must be int64 of shape"),
            (torch.ones(1, 4, 2), torch.zeros(3, dtype=torch.int64), "symbols must be int64 of shape"),
            (torch.ones(1, 4, 2), torch.zeros(3, 1), "symbols must be int64"),
            (torch.ones(1, 4, 2), torch.full((3, 1), 4), "symbols must be below the number of rows"),
            (torch.ones(1, 4, 2), torch.full((3, 1), -1), "symbols must be below the number of rows"),
        ],
    )
    def test_refuses_what_does_not_fit(self, tables, symbols, message):
        with pytest.raises(ValueError, match=message):
            TableMap(tables, symbols, torch.ones(3, 1, dtype=torch.bool))

    def test_names_what_is_no_tensor(self):
        parts = {
            "tables": randn(1, 4, 2),
            "symbols": torch.zeros((3, 1), dtype=torch.int64),
            "masks": random_masks(3, 1),
        }
        for name, part in parts.items():
            with pytest.raises(TypeError, match=f"{name} must be a torch tensor"):
                TableMap(**{**parts, name: part.numpy()})

    def test_stays_where_it_is_where_it_is_to_be_there(self):
        table = TableMap(randn(1, 4, 2), torch.zeros((3, 1), dtype=torch.int64), random_masks(3, 1))
        assert table.to(torch.float64, "cpu") is table
        assert table.to() is table


def test_one_open_gate_is_the_dense_map():
    data = randn(7, 3, 2)
    dense, gated = DenseMap(data), GatedMap(data, torch.ones(7, 1, dtype=torch.bool))
    coef, values = randn(3, 2, 2, seed=1), randn(7, 2, seed=2)
    torch.testing.assert_close(gated.matvec(coef[None]), dense.matvec(coef))
    torch.testing.assert_close(gated.rmatvec(values)[0], dense.rmatvec(values))


def test_closed_gate_gives_nothing():
    gated = GatedMap(randn(7, 3, 2), torch.zeros(7, 2, dtype=torch.bool))
    assert (gated.matvec(randn(2, 3, 2, 2)) == 0).all()
    assert (gated.rmatvec(randn(7, 2)) == 0).all()
    assert gated.squared_norm(torch.ones(7, dtype=torch.float64)) == 0.0


class TestPrecision:
    @both_maps
    def test_float32_data_times_float64_is_a_float64_product(self, gated):
        single = make_map(gated, dtype=torch.float32)
        double = single.to(torch.float64)
        coef, values = randn(*single.feature_shape, 2), randn(12, 2)
        blocks, d = torch.tensor([1]), single.feature_shape[-1]
        part, units = randn(1, d, 2), randn(1, d)
        for ours, exact in (
            (single.matvec(coef), double.matvec(coef)),
            (single.rmatvec(values), double.rmatvec(values)),
            (single.matvec_blocks(blocks, part), double.matvec_blocks(blocks, part)),
            (single.rmatvec_blocks(blocks, values), double.rmatvec_blocks(blocks, values)),
            (single.along(blocks, units), double.along(blocks, units)),
        ):
            assert ours.dtype == torch.float64
            torch.testing.assert_close(ours, exact, rtol=1e-13, atol=1e-13)

    @both_maps
    def test_float32_argument_gives_float32(self, gated):
        linear_map = make_map(gated, dtype=torch.float64)
        assert linear_map.matvec(randn(*linear_map.feature_shape, 2).float()).dtype == torch.float32
        assert linear_map.rmatvec(randn(12, 2).float()).dtype == torch.float32

    @both_maps
    def test_conversion(self, gated):
        linear_map = make_map(gated)
        assert linear_map.to() is linear_map
        assert linear_map.to(torch.float64, "cpu") is linear_map
        single = linear_map.to(torch.float32)
        assert single.dtype == torch.float32
        assert linear_map.dtype == torch.float64
        assert type(single) is type(linear_map)
        assert single.feature_shape == linear_map.feature_shape


def test_centered_columns_have_mean_zero():
    weight = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    centered = DenseMap(randn(4, 3, 2) + 1e4).centered(weight, torch.float32)
    assert centered.dtype == torch.float32
    assert float((weight @ centered.as_matrix().double()).abs().max()) < 1e-6


def test_gram_matrices_of_centred_single_columns_are_those_in_double():
    data, weight = (randn(30, 20, 2) + 1e6).float(), torch.full((30,), 1 / 30).double()
    linear_map, few = DenseMap(data), torch.arange(2)  # few enough to be converted apart from the others
    means = linear_map.rmatvec(weight[:, None])[..., 0]
    centred = (data.double() - means)[:, few].flatten(1)
    got = linear_map.gram(few, few, weight, means)
    torch.testing.assert_close(got, centred.T @ (weight[:, None] * centred), rtol=1e-12, atol=1e-12)


def test_largest_entry_and_stored_numbers():
    dense, gated = make_map(False), make_map(True)
    assert dense.largest() == float(dense.as_matrix().abs().max())
    assert dense.n_stored == dense.as_matrix().numel()
    assert gated.n_stored == gated.as_matrix().numel() // gated.feature_shape[0]


class TestChunks:
    @both_maps
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("elements", [1, 13, 30])
    def test_products_do_not_depend_on_the_chunk_size(self, monkeypatch, gated, dtype, elements):
        linear_map = make_map(gated, n=11, dtype=dtype)
        coef, values = randn(*linear_map.feature_shape, 2), randn(11, 2)
        whole = linear_map.matvec(coef), linear_map.rmatvec(values)
        monkeypatch.setattr(operators, "CONFIG", MapConfig(temporary=elements))
        torch.testing.assert_close(linear_map.matvec(coef), whole[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(linear_map.rmatvec(values), whole[1], rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("n_outputs", [1, 20])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_adjoints_of_few_rows_at_a_time_are_those_of_all(self, monkeypatch, dtype, n_outputs):
        linear_map, values = DenseMap(randn(75, 3, 400).to(dtype)), randn(75, n_outputs, seed=1).to(dtype)
        monkeypatch.setattr(operators, "CONFIG", MapConfig(temporary=2**13))
        adjoints = []
        for n_threads in (1, 2):
            monkeypatch.setattr(torch, "get_num_threads", lambda n_threads=n_threads: n_threads)
            adjoints.append(linear_map.rmatvec(values))
        torch.testing.assert_close(*adjoints)

    @pytest.mark.parametrize(("n_rows", "n_columns"), [(1, 1), (10, 3), (9, 4), (5, 100)])
    def test_chunks_cover_every_row_once_within_the_limit(self, monkeypatch, n_rows, n_columns):
        monkeypatch.setattr(operators, "CONFIG", MapConfig(temporary=12))
        chunks = [range(n_rows)[rows] for rows in operators.row_chunks(n_rows, n_columns, torch.device("cpu"))]
        assert [row for chunk in chunks for row in chunk] == list(range(n_rows))
        assert all(len(chunk) == 1 or len(chunk) * n_columns <= 12 for chunk in chunks)


@pytest.mark.parametrize("n_outputs", [1, 2, 5])
def test_products_of_small_data_do_not_wait_for_the_rates_of_the_machine(monkeypatch, n_outputs):
    def refuse(*_):
        raise AssertionError("rates are measured")

    monkeypatch.setattr(operators, "machine_rates", refuse)
    linear_map, coef = make_map(False), randn(3, 2, n_outputs)
    torch.testing.assert_close(linear_map.matvec(coef), linear_map.as_matrix() @ coef.flatten(0, 1))


class TestSquaredNorm:
    @both_maps
    @pytest.mark.parametrize("center", [False, True])
    def test_is_close_below_the_largest_eigenvalue(self, gated, center):
        linear_map = make_map(gated, n=30)
        weight = torch.rand(30, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        weight /= weight.sum()
        matrix = linear_map.as_matrix()
        if center:
            matrix = matrix - weight @ matrix
        exact = float(torch.linalg.eigvalsh(matrix.T @ (weight[:, None] * matrix))[-1])
        estimate = linear_map.squared_norm(weight, center=center)
        assert 0.9 * exact <= estimate <= exact * (1 + 1e-12)

    def test_zero_data(self):
        weight = torch.ones(4, dtype=torch.float64)
        assert DenseMap(torch.zeros(4, 2, 2, dtype=torch.float64)).squared_norm(weight) == 0.0

    def test_constant_columns_vanish_when_centred(self):
        weight = torch.full((4,), 0.25, dtype=torch.float64)
        constant = DenseMap(torch.ones(4, 2, 1, dtype=torch.float64))
        assert constant.squared_norm(weight, center=True) == 0.0
        assert constant.squared_norm(weight) == pytest.approx(2.0)


def test_data_are_shared_not_copied():
    data = randn(5, 3, 2)
    linear_map = DenseMap(data)
    data[0] = 0.0
    assert (linear_map.matvec(torch.ones(3, 2, 1, dtype=torch.float64))[0] == 0).all()


def test_transposed_data():
    data = randn(3, 2, 5).permute(2, 0, 1)
    linear_map = DenseMap(data)
    assert linear_map.data.data_ptr() == linear_map.as_matrix().data_ptr()  # one copy, not two
    check_map(DenseMap(data))
    check_map(GatedMap(data, random_masks(5, 2)))


@both_maps
def test_rows_of_a_map(gated):
    linear_map = make_map(gated)
    coef, index = randn(*linear_map.feature_shape, 2), torch.tensor([7, 0, 0, 3])
    torch.testing.assert_close(linear_map.rows(index).matvec(coef), linear_map.matvec(coef)[index])


class WrongScale(DenseMap):
    def rmatvec(self, values):
        return 1.01 * super().rmatvec(values)


class WrongOrder(DenseMap):
    def as_matrix(self):
        return super().as_matrix().flip(1)


class AlwaysSingle(DenseMap):
    def matvec(self, coef):
        return super().matvec(coef).float()


class RoundedProducts(DenseMap):
    def matvec(self, coef):
        return super().matvec(coef.float()).to(coef.dtype)


class WrongShape(DenseMap):
    def rmatvec(self, values):
        return super().rmatvec(values).flatten(0, 1)


class WrongRows(DenseMap):
    def rows(self, index):
        return DenseMap(self.data[: len(index)])


class WrongNorm(DenseMap):
    def squared_norm(self, weight, center=False, n_steps=20):
        return 1.01 * super().squared_norm(weight, center, n_steps)


class WithoutCenter(DenseMap):
    def add_gram(self, result, left, right, weight, center=None):
        super().add_gram(result, left, right, weight)


class WrongMean(DenseMap):
    def centered(self, weight, dtype):
        return self.shifted(-self.rmatvec(weight[:, None])[..., 0], dtype)


@pytest.mark.parametrize(
    "kind",
    [
        WrongScale,
        WrongOrder,
        AlwaysSingle,
        RoundedProducts,
        WrongShape,
        WrongRows,
        WrongNorm,
        WithoutCenter,
        WrongMean,
    ],
)
def test_check_rejects_a_wrong_map(kind):
    data = randn(8, 3, 2)
    check_map(DenseMap(data))
    with pytest.raises(AssertionError):
        check_map(kind(data))


class TestErrors:
    def test_data_need_a_feature_axis(self):
        with pytest.raises(ValueError, match=r"at least two dimensions.*\(5,\)"):
            DenseMap(torch.ones(5))

    @pytest.mark.parametrize(
        "masks", [torch.ones(4, 2, dtype=torch.bool), torch.ones(5, dtype=torch.bool), torch.ones(5, 2)]
    )
    def test_masks_must_be_bool_of_one_row_per_sample(self, masks):
        with pytest.raises(ValueError, match=r"bool array of shape \(5, n_gates\)"):
            GatedMap(torch.ones(5, 3, 2), masks)


@both_maps
def test_products_of_a_map_in_both_precisions_are_those_of_their_argument(gated):
    exact = make_map(gated, n=30, blocks=8, d=3)
    mixed, single = MixedMap(exact), exact.to(torch.float32)
    check_map(mixed)
    assert mixed.to(device="cpu").dtype == mixed.dtype
    coef, values = randn(*exact.feature_shape, 2, seed=1), randn(30, 2, seed=2)
    for dtype, base in ((torch.float64, exact), (torch.float32, single)):
        some = mixed.rows(slice(3, 9)).matvec(coef.to(dtype))
        torch.testing.assert_close(some, base.matvec(coef.to(dtype))[3:9], rtol=1e-5, atol=1e-5)
        for name, argument in (("matvec", coef), ("rmatvec", values)):
            found, wanted = (getattr(each, name)(argument.to(dtype)) for each in (mixed, base))
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@both_maps
def test_rounded_products_are_those_of_single_precision(gated):
    exact = make_map(gated, n=30, blocks=8, d=3)
    check_map(RoundedMap(exact))  # nothing to round
    single, rounded = exact.to(torch.float32), RoundedMap(exact.to(torch.float32))
    coef, values = randn(*exact.feature_shape, 2, seed=1), randn(30, 2, seed=2)
    blocks, units = torch.tensor([1, 4]), randn(2, 3, seed=3)
    of_blocks, scale = coef.reshape(-1, 3, 2)[blocks], torch.tensor([1.0, 0.5], dtype=torch.float64)
    products = {
        "matvec": (coef,),
        "rmatvec": (values,),
        "matvec_blocks": (blocks, of_blocks),
        "rmatvec_blocks": (blocks, values),
        "along": (blocks, units),
        "kernel": (blocks, scale, units),
    }
    assert [rounded.few(m) for m in range(33)] == [single.few(m) for m in range(33)]
    for name, arguments in products.items():
        found = getattr(rounded, name)(*arguments)
        in_single = (part.float() if part.is_floating_point() else part for part in arguments)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, getattr(single, name)(*in_single).double(), rtol=0, atol=0)
    assert rounded.to(torch.float64).matvec(coef).dtype == torch.float64
    torch.testing.assert_close(rounded.rows(slice(3, 9)).matvec(coef), rounded.matvec(coef)[3:9], rtol=1e-5, atol=1e-5)


def test_check_rejects_a_map_that_keeps_its_precision():
    class Stubborn(DenseMap):
        def to(self, dtype=None, device=None):
            return self

    with pytest.raises(AssertionError, match="to must give a map of that precision"):
        check_map(Stubborn(randn(5, 3, 2)))


@pytest.mark.parametrize(
    ("check", "name"), [(check_loss, "loss"), (check_penalty, "penalty"), (check_map, "linear_map")]
)
def test_checks_name_what_is_no_instance(check, name):
    for wrong in ("squared", DenseMap):
        with pytest.raises(TypeError, match=f"{name} must be a "):
            check(wrong)


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_an_entry_that_is_not_finite_is_found_in_any_block(block, wrong):
    class Plain(DenseMap):
        largest = operators.LinearMap.largest

    data = randn(5, 3, 2)
    data[4, block, 1] = wrong
    with pytest.raises(ValueError, match="must be finite"):
        Plain(data).check_finite()


def test_the_largest_entry_of_no_blocks_is_zero():
    assert operators.LinearMap.largest(DenseMap(torch.empty(5, 0, 2))) == 0.0


@pytest.mark.parametrize("squares", [DenseMap.weighted_squares, operators.LinearMap.weighted_squares])
def test_samples_without_weight_have_no_squares(squares):
    data, weight = randn(5, 3, 2), torch.arange(5.0).double()
    wanted = (weight[1:, None, None] * data[1:].square()).sum()
    data[0] = 1e200  # whose square is infinite
    torch.testing.assert_close(squares(DenseMap(data), weight), wanted)

"""The rates of the machine, and what goes by them."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest
import torch
from solver_cases import make_program, randn
from torch.utils.flop_counter import FlopCounterMode

from convexformer_solvers import DenseMap, GatedMap, TableMap
from convexformer_solvers import rates as rates_module
from convexformer_solvers.auto.cost import products_of_gram
from convexformer_solvers.linear_maps import base
from convexformer_solvers.rates import Rates, machine_rates

PRECISIONS = [torch.float32, torch.float64]


def numbers(rates):
    return rates.product, rates.read, rates.calls


class TestMeasured:
    @pytest.mark.parametrize("dtype", PRECISIONS)
    def test_are_positive_and_finite(self, dtype):
        rates = machine_rates(dtype)
        assert all(0 < rate < math.inf for rate in numbers(rates))
        assert rates.work_of_a_read > 0
        assert rates.work_of_a_call > 0

    def test_of_an_accelerator(self, accelerator):
        for dtype in PRECISIONS:  # anew, as those of another test may be known
            rates = rates_module._measured.__wrapped__(dtype, accelerator, 1)
            assert all(0 < rate < math.inf for rate in numbers(rates))

    @pytest.mark.parametrize("dtype", PRECISIONS)
    def test_are_powers_of_the_root_of_two(self, dtype):
        for rate in numbers(machine_rates(dtype)):
            exponent = 2 * math.log2(rate)
            assert exponent == pytest.approx(round(exponent), abs=1e-6)

    def test_are_measured_once_a_process(self, monkeypatch):
        first = {dtype: machine_rates(dtype) for dtype in PRECISIONS}

        def refuse(run):
            raise AssertionError("measured again")

        monkeypatch.setattr(rates_module, "_seconds", refuse)
        for dtype in PRECISIONS:
            assert machine_rates(dtype) is first[dtype]
            assert machine_rates(dtype, torch.device("cpu")) is first[dtype]
        assert machine_rates() is first[torch.float64]

    def test_ask_for_no_gradients_and_leave_none(self):
        with torch.enable_grad():
            rates_module._measured.__wrapped__(torch.float64, "cpu", 1)
            assert torch.is_grad_enabled()

    @pytest.mark.parametrize("seconds", [(1e-6, 1e-3, 1e-4, 0.2, 0.1), (0.2, 2.0, 3.0, 0.1, 0.2)])
    def test_are_work_over_time(self, monkeypatch, seconds):
        times = iter(seconds)
        monkeypatch.setattr(rates_module, "_seconds", lambda run: next(times))
        rates = rates_module._measured.__wrapped__(torch.float64, "cpu", 1)
        exact = (2 * 384**3 / seconds[1], 2**22 / seconds[2], 1 / seconds[0])
        for rate, wanted in zip(numbers(rates), exact, strict=True):
            assert abs(math.log2(rate / wanted)) <= 0.25 * (1 + 1e-9)  # to the nearest power
        assert rates.turns_columns == (seconds[3] < seconds[4])

    def test_products_double_until_they_take_longer_than_calls(self, monkeypatch):
        times = iter([1e-3, 1e-3, 2e-3, 0.1, 5e-3, 0.01, 0.2, 0.1])  # a call; products; reads; both orders
        monkeypatch.setattr(rates_module, "_seconds", lambda run: next(times))
        rates = rates_module._measured.__wrapped__(torch.float32, "cpu", 1)
        exact = (2 * (4 * 384) ** 3 / 0.1, (2 * 2**11) ** 2 / 0.01, 1e3)
        for rate, wanted in zip(numbers(rates), exact, strict=True):
            assert abs(math.log2(rate / wanted)) <= 0.25 * (1 + 1e-9)

    def test_processors_are_warm_before_a_run_counts(self, monkeypatch):
        began, counted = time.perf_counter(), []

        def seconds(run):
            counted.append(time.perf_counter() - began)
            return 10.0 ** len(counted)

        monkeypatch.setattr(rates_module, "_seconds", seconds)
        rates_module._measured.__wrapped__(torch.float64, "cpu", 1)
        assert min(counted) >= rates_module.WARM_UP

    def test_the_shortest_of_some_runs_counts(self, monkeypatch):
        clock = iter([0.0, 5.0, 10.0, 12.0, 20.0, 29.0, 30.0, 34.0])
        monkeypatch.setattr(rates_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
        assert rates_module._seconds(lambda: torch.zeros(1)) == 2.0

    def test_a_read_and_a_call_in_the_unit_of_products(self):
        rates = Rates(product=6e9, read=2e9, calls=3e6)
        assert rates.work_of_a_read == 3.0
        assert rates.work_of_a_call == 2000.0


@pytest.fixture
def machine(monkeypatch):
    """Function that sets the time in which a number is read, in operations of large products."""

    def set_rates(work_of_a_read):
        rates = Rates(2.0**35, 2.0**35 / work_of_a_read, 2.0**19)
        monkeypatch.setattr(base, "machine_rates", lambda dtype=None, device=None: rates)

    return set_rates


def masks(n, n_gates):
    return torch.rand((n, n_gates), generator=torch.Generator().manual_seed(1)) > 0.5


def maps(n=60, blocks=5, d=4):
    data, symbols = randn(n, blocks, d), torch.arange(n * blocks).reshape(n, blocks) % 7
    dense, gated = DenseMap(data), GatedMap(data, masks(n, 6))
    some = torch.tensor([0, 3, 4])
    table = TableMap(randn(blocks, 7, d), symbols, masks(n, 6))
    return [dense, gated, table, dense.restricted(some), gated.restricted(some)]


class TestWork:
    def test_is_asked_of_the_machine_that_holds_the_data_in_their_precision(self, monkeypatch):
        asked = []

        def recorded(dtype, device):
            asked.append((dtype, torch.device(device)))
            return Rates(1.0, 1.0, 1.0)

        monkeypatch.setattr(base, "machine_rates", recorded)
        for dtype in PRECISIONS:
            DenseMap(randn(5, 2, 3).to(dtype)).product_work(1)
        assert asked == [(dtype, torch.device("cpu")) for dtype in PRECISIONS]

    @pytest.mark.parametrize("n_outputs", [1, 2, 3, 4, 20])
    @pytest.mark.parametrize("dtype", PRECISIONS)
    def test_products_in_any_order_are_the_same(self, monkeypatch, n_outputs, dtype):
        linear_map, coef = DenseMap(randn(60, 5, 4).to(dtype)), randn(5, 4, n_outputs).to(dtype)
        for turns in (False, True):
            rates = Rates(1.0, 1.0, 1.0, turns)
            monkeypatch.setattr(base, "machine_rates", lambda dtype, device, rates=rates: rates)
            found = linear_map.matvec(coef)
            assert found.is_contiguous()
            torch.testing.assert_close(found, torch.einsum("ibd,bdc->ic", linear_map.data, coef))

    @pytest.mark.parametrize("n_outputs", [1, 4, 100])
    def test_of_a_product_is_that_of_reading_or_of_multiplying(self, machine, n_outputs):
        linear_map = DenseMap(randn(60, 5, 4))
        for work_of_a_read in (0.5, 8.0, 1000.0):
            machine(work_of_a_read)
            found = linear_map.product_work(n_outputs)
            assert found == linear_map.n_stored * max(2 * n_outputs, work_of_a_read)

    @pytest.mark.parametrize("place", range(5))
    def test_of_a_product_grows_with_the_time_of_a_read_and_with_the_outputs(self, machine, place):
        linear_map, found = maps()[place], []
        for work_of_a_read in (1.0, 8.0, 64.0, 512.0):
            machine(work_of_a_read)
            by_outputs = [linear_map.product_work(c) for c in (1, 3, 10, 1000)]
            assert 0 < by_outputs[0] <= by_outputs[1] <= by_outputs[2] < by_outputs[3]
            found.append(by_outputs[0])
        assert found == sorted(found)
        assert found[0] < found[-1]

    @pytest.mark.parametrize("place", range(5))
    @pytest.mark.parametrize("n_outputs", [1, 3, 30])
    def test_of_a_product_is_that_of_its_operations_where_reads_and_calls_cost_nothing(
        self, monkeypatch, place, n_outputs
    ):
        monkeypatch.setattr(base, "machine_rates", lambda dtype, device: Rates(1.0, math.inf, math.inf))
        *others, gated_part = maps()
        linear_map = [*others, gated_part.base.restricted(torch.arange(30))][place]  # it counts all dense blocks
        with FlopCounterMode(display=False) as counter:
            linear_map.matvec(randn(*linear_map.feature_shape, n_outputs))
        assert linear_map.product_work(n_outputs) == counter.get_total_flops()

    @pytest.mark.parametrize("n_outputs", [1, 3, 30])
    def test_of_reads_is_that_of_writing_and_reading_what_lies_between_data_and_outputs(self, machine, n_outputs):
        _, gated, table, *_ = maps()
        part = gated.restricted(torch.arange(30))
        by_gate = 60 * 6 * min(5 * 4, n_outputs)  # products of the data, or data, behind each gate
        by_row, by_place, outputs = 7 * 6 * n_outputs, 7 * 6 * 9, 60 * n_outputs  # a row occurs nine times at most
        numbers = {gated: by_gate, table: 5 * (by_row + by_place + outputs), part: 30 * 60 * n_outputs}
        for linear_map, count in numbers.items():
            machine(4.0)
            found = linear_map.product_work(n_outputs)
            machine(8.0)
            assert linear_map.product_work(n_outputs) - found == 4 * 2 * count

    def test_of_one_gate_is_no_less_than_that_of_reading_the_data(self, machine):
        machine(512.0)
        gated = GatedMap(randn(60, 5, 4), masks(60, 1))
        assert gated.product_work(1) == 60 * 5 * 4 * 512

    def test_of_calls_is_that_of_one_for_each_dense_block(self, monkeypatch):
        part = maps()[1].restricted(torch.tensor([0, 5, 3]))  # of two gates on the first dense block, and of another
        monkeypatch.setattr(base, "machine_rates", lambda dtype, device: Rates(1.0, math.inf, 1.0))
        with_calls = part.product_work(3)
        monkeypatch.setattr(base, "machine_rates", lambda dtype, device: Rates(1.0, math.inf, math.inf))
        assert with_calls - part.product_work(3) == 2

    def test_of_half_a_gated_gram_matrix_is_that_of_its_kernel_where_features_are_many(self):
        gated = GatedMap(randn(60, 5, 4), masks(60, 100))
        blocks = torch.arange(500)
        with FlopCounterMode(display=False) as counter:
            gated.kernel(blocks, torch.ones(500, dtype=torch.float64), randn(500, 4))
        assert gated.gram_work() == counter.get_total_flops() / 2
        assert GatedMap(randn(60, 5, 4), masks(60, 1)).gram_work() == DenseMap(randn(60, 5, 4)).gram_work()

    @pytest.mark.parametrize("place", range(5))
    def test_of_a_gram_matrix_does_not_go_by_reads(self, machine, place):
        linear_map, found = maps()[place], []
        for work_of_a_read in (1.0, 512.0):
            machine(work_of_a_read)
            found.append(linear_map.gram_work())
        assert found[0] == found[1] > 0

    def test_of_a_gram_matrix_is_the_same_for_the_transpose(self):
        tall, wide = DenseMap(randn(60, 20, 1)), DenseMap(randn(20, 60, 1))
        assert tall.gram_work() == wide.gram_work() == 60 * 20 * 20

    def test_of_a_gated_gram_matrix_is_no_more_than_that_of_its_columns(self):
        data = randn(60, 5, 4)
        gated = GatedMap(data, masks(60, 6))
        columns = DenseMap(gated.as_matrix().reshape(60, -1, 4))
        assert DenseMap(data).gram_work() <= gated.gram_work() <= columns.gram_work()

    def test_fast_products_make_a_gram_matrix_cheap(self, machine):
        program, found = make_program(n=400, blocks=100, d=5, c=1), []
        for work_of_a_read in (2.0, 8.0, 64.0):
            machine(work_of_a_read)
            found.append(products_of_gram(program))
        # As many products with one column as the smaller side has, in units of a read.
        assert found == pytest.approx([400 / 2, 400 / 8, 400 / 64])

    def test_tables_are_taken_where_they_do_less_work_on_every_machine(self, machine):
        tables, symbols = randn(2, 10, 8), torch.arange(1000).reshape(500, 2) % 10
        repeated, gates = tables[torch.arange(2), symbols], masks(500, 6)
        for work_of_a_read in (1.0, 8.0, 64.0, 512.0):
            machine(work_of_a_read)
            found = TableMap.where_it_pays(repeated, gates, 20)
            assert isinstance(found, TableMap)
            assert found.product_work(20) < GatedMap(repeated, gates).product_work(20)

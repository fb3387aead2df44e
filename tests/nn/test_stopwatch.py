"""Seconds of work that devices do on their own."""

import types

import pytest
import torch

from convexformer.nn.training.stopwatch import Stopwatch, finish_work


@pytest.mark.parametrize("name", ["cuda", "xpu", "stand_in"])
def test_a_stopwatch_waits_for_what_its_device_has_still_to_do(monkeypatch, name):
    waited, device = [], types.SimpleNamespace(type=name)
    module = types.SimpleNamespace(synchronize=waited.append)
    monkeypatch.setattr(torch, name, module, raising=False)
    monkeypatch.setattr(torch, "device", lambda given: given)
    stopwatch = Stopwatch(device)
    with stopwatch:
        assert waited == []
    assert waited == [device]


def test_the_cpu_and_devices_that_cannot_be_waited_for_are_done(monkeypatch):
    monkeypatch.setattr(torch.cpu, "synchronize", lambda *_: pytest.fail("nothing runs on the CPU on its own"))
    finish_work("cpu")
    finish_work(torch.device("meta"))


def test_seconds_of_several_blocks_add_up(monkeypatch):
    readings = iter([1.0, 3.0, 10.0, 10.5, 20.0, 24.0])  # of the clock, at the start and the end of each block
    monkeypatch.setattr("time.perf_counter", lambda: next(readings))
    stopwatch, seen = Stopwatch(torch.device("cpu")), []
    for _ in range(3):
        with stopwatch:
            pass
        seen.append(stopwatch.seconds)
    assert seen == [2.0, 2.5, 6.5]

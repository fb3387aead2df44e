"""Seconds of work that devices do on their own."""

import types

import pytest
import torch

from convexformer._stopwatch import Stopwatch, finish_work


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


def test_the_cpu_and_devices_that_cannot_be_waited_for_are_done():
    finish_work("cpu")
    finish_work(torch.device("meta"))


def test_seconds_of_several_blocks_add_up():
    stopwatch, seen = Stopwatch(torch.device("cpu")), [0.0]
    for _ in range(3):
        with stopwatch:
            sum(range(1000))
        seen.append(stopwatch.seconds)
    assert seen == sorted(seen)
    assert len(set(seen)) == 4

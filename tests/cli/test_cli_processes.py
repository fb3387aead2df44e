"""Devices of the processes that ``torchrun`` starts."""

import pytest

from convexformer.cli import CommandError
from convexformer.cli.processes import own_device


def test_one_process_takes_the_device_it_is_given(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert [own_device(device) for device in (None, "cpu", "cuda", "cuda:1")] == [None, "cpu", "cuda", "cuda:1"]


def test_each_process_of_a_host_has_a_device(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_device("cuda") == "cuda:3"
    assert [own_device(device) for device in (None, "cpu", "cuda:1")] == [None, "cpu", "cuda:1"]


def test_without_torchrun_the_message_says_what_to_give(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(CommandError, match=r"LOCAL_RANK.*cuda:0"):
        own_device("cuda")

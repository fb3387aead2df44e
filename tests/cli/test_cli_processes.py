"""Devices of the processes that ``torchrun`` starts, what their variables say, and what one prints."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from convexformer.cli import CommandError, main
from convexformer.cli.output import print_text
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


@pytest.mark.parametrize("given", ["", "two", "0", "-1"])
def test_message_names_the_variable_that_is_no_number_of_processes(monkeypatch, capsys, given):
    monkeypatch.setenv("WORLD_SIZE", given)
    assert main(["fit", "data.npz"]) == 1
    assert "WORLD_SIZE" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["demo"], ["reproduce", "grokking", "--small"]])
def test_what_runs_in_one_process_is_not_run_by_each_of_several(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*command, "--out", str(tmp_path / "out")]) == 1
    assert f"{command[0]} runs in one process; start it without torchrun" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_process_whose_rank_is_of_something_else_says_which_option_is_wrong(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        main(["fit", "data.npz", "--modell", "m.npz"])
    assert "--modell" in capsys.readouterr().err


def test_report_with_a_name_that_the_output_cannot_encode_is_printed(monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", output)
    print_text("model  m\u00e4rz.npz")
    assert output.buffer.getvalue().decode().split() == ["model", "m\\xe4rz.npz"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_report_that_cannot_be_written_is_an_error_of_one_line(tmp_path):
    X = np.random.default_rng(0).normal(size=(30, 2, 2))
    np.savez(tmp_path / "data.npz", X=X, y=X[:, 0, 0])
    command = [sys.executable, "-m", "convexformer", "fit", "data.npz", "--quiet"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "cannot be printed" in done.stderr
    assert (tmp_path / "model.npz").exists()

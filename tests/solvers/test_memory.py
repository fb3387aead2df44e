"""Limits of memory, and free memory of the machine and of control groups."""

import numpy as np
import pytest
import torch

from convexformer_solvers.linear_maps.source import Source
from convexformer_solvers.linear_maps.streamed import StreamedMap
from convexformer_solvers.memory import _left_by_groups, as_bytes, free_memory


class Ones(Source):
    shape, dtype = (5, 3, 2), torch.float32

    def read(self, rows):
        return torch.ones(rows.stop - rows.start, 3, 2)


GROUPS = {  # of a process with a limit on a group above its own: lines, folder of the groups, and names of the files
    "version 2": ("0::/job/step\n", "job", "memory.max", "memory.current", ""),
    "version 1": (
        "2:cpu,memory:/job/step\n0::/\n",
        "memory/job",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_",
    ),
    "a container that sees its own group alone": ("0::/../pod\n", "", "memory.max", "memory.current", ""),
}


@pytest.mark.parametrize(("lines", "folder", "limit", "usage", "prefix"), GROUPS.values(), ids=GROUPS)
def test_control_groups_leave_what_they_have_not_used_apart_from_files(tmp_path, lines, folder, limit, usage, prefix):
    (process := tmp_path / "cgroup").write_text(lines)
    (group := tmp_path / "groups" / folder).mkdir(parents=True)
    (group / limit).write_text("1000000\n")
    (group / usage).write_text("700000\n")
    (group / "memory.stat").write_text(f"{prefix}inactive_file 20000\n{prefix}active_file 3000\nanon 600000\n")
    assert _left_by_groups(process, tmp_path / "groups") == [323_000]


def test_a_control_group_without_a_limit_leaves_all(tmp_path):
    (process := tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700000\n")
    assert _left_by_groups(process, tmp_path) == []
    assert _left_by_groups(tmp_path / "not there", tmp_path) == []


def test_free_memory_is_at_most_what_the_control_groups_leave(monkeypatch):
    monkeypatch.setattr("convexformer_solvers.memory._left_by_groups", lambda: [10**6, 5 * 10**5])
    assert free_memory(torch.device("cpu")) == 5 * 10**5


@pytest.mark.parametrize(
    ("limit", "n_bytes"),
    [
        (None, None),
        (np.int64(4096), 4096),
        ("4096", 4096),
        ("12 B", 12),
        ("500 MB", 500 * 10**6),
        ("2 GiB", 2 * 2**30),
        (" 2gib ", 2 * 2**30),
        ("7.25kB", 7250),
        ("1.5 KiB", 1536),
        ("3 TB", 3 * 10**12),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_limits_are_bytes_or_text_with_a_unit(limit, n_bytes):
    assert as_bytes(limit) == n_bytes
    assert StreamedMap(Ones(), memory_limit=limit).memory_limit == n_bytes


@pytest.mark.parametrize(
    "limit",
    [0, -1, 2.0, True, "", "0 MB", "0.1 B", "-2 GB", "GB", "2 G", "2 iB", "1e3 MB", "2 GB 3", "inf", [2], b"2 GB"],
)
def test_limits_that_are_no_size_are_named(limit):
    for take in (as_bytes, lambda limit: StreamedMap(Ones(), memory_limit=limit)):
        with pytest.raises(ValueError, match=r"memory_limit must be None or a positive number of bytes, got .*'2 GiB'"):
            take(limit)

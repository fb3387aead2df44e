"""Answers of ranks to a command, in frames of one length, and what becomes of their errors."""

import threading
from types import SimpleNamespace

import pytest
import torch

from convexformer_solvers.distributed.answers import Answer, Failed, sizes_in
from convexformer_solvers.distributed.team import Command, Team

COMBINE = ("sum", "max", "min", "list", "rows", "keep")


def found(rank):
    """Results of a rank, one for each way of combining them."""
    part = torch.tensor([1.0, 3.0 - 2 * rank], dtype=torch.float64)
    return part, 0.1 + rank, (-1) ** rank * part, f"rank {rank}", part[: rank + 1], "own"


def test_frames_that_have_room_are_joined():
    answers = [Answer.of(COMBINE, found(rank), (1, 2), room=4096) for rank in range(2)]
    lengths = [length for answer in answers for length in sizes_in([answer.frame(4096)])]
    total, largest, smallest, each, rows, own = answers[0].joined([answer.frame(max(lengths)) for answer in answers])
    assert total.tolist() == [2.0, 4.0]
    assert float(largest) == 1.1
    assert smallest.tolist() == [-1.0, -1.0]
    assert each == ["rank 0", "rank 1"]
    assert [part.tolist() for part in rows] == [[1.0], [1.0, 1.0]]
    assert own == "own"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frame_without_room_says_how_much_is_needed(rank):
    whole = Answer.of(COMBINE, found(rank), (1, 2), room=4096)
    (needed,) = sizes_in([whole.frame(4096)])
    assert needed == len(whole.frame(needed).rstrip(b"\0"))
    assert sizes_in([whole.frame(needed - 1)]) == [needed]
    assert whole.frame(needed - 1)[8:].strip(b"\0") == b""
    (enough,) = sizes_in([Answer.of(COMBINE, found(rank), (1, 2), room=8).frame(64)])
    assert enough >= needed


def test_an_error_has_a_negative_size():
    assert sizes_in([Answer(failed=None).frame(64)])[0] < 0


@pytest.mark.parametrize("of_values", [(True, False), (False, True)])
def test_ranks_do_not_go_on_where_any_of_them_has_lost_values(of_values):
    team = Team(SimpleNamespace(lock=threading.RLock()), None)
    failed = [None, *(Failed(ValueError(f"fault {number}"), lost) for number, lost in enumerate(of_values))]
    with pytest.raises(ValueError, match=r"^rank 1: fault 0$"):
        team._raise_first(failed)
    with pytest.raises(RuntimeError, match=r"^the ranks cannot go on: rank 1: fault 0$"):
        team.lead(Command("largest", 0, ("max",), {}))

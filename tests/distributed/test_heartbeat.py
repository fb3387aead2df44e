"""Signs of life: which rank is named, and when, by a clock that the tests set."""

import atexit
from types import SimpleNamespace

import pytest

from convexformer_solvers.distributed import DistributedConfig, heartbeat
from convexformer_solvers.distributed.heartbeat import Heartbeats, RankError

NAMES = ["rank zero", "rank one", "rank two"]


class Group:
    """Three ranks in one process, whose counters are raised by hand after their first signs of life."""

    def __init__(self):
        self.now, self.as_they_sleep = 0.0, lambda: None
        config = DistributedConfig(timeout=60, heartbeat=10_000)
        first = Heartbeats(0, NAMES, None, config)
        self.ranks = [first, *(Heartbeats(rank, NAMES, ("127.0.0.1", first.port), config) for rank in (1, 2))]
        for rank in self.ranks:
            atexit.unregister(rank.leave)  # which ends the process after a fault
            while not first._store.get(str(rank.rank)):
                pass

    def beat(self, *ranks):
        for rank in ranks:
            self.ranks[0]._store.set(str(rank), f"at {self.now}")
        self.arrived(0)

    def arrived(self, rank):
        """Wait until the store has what a rank has set, which `set` does not."""
        self.ranks[rank]._store.get("0")

    def look(self, rank, now):
        self.now = now
        self.ranks[rank].check(at_once=True)

    def stop(self):
        for rank in self.ranks:
            rank._stopped.set()
            rank._thread.join()


@pytest.fixture
def group(monkeypatch):
    made = Group()
    clock = SimpleNamespace(monotonic=lambda: made.now, sleep=lambda seconds: made.as_they_sleep())
    monkeypatch.setattr(heartbeat, "time", clock)
    yield made
    made.stop()


def test_silence_counts_from_the_last_sign_of_life(group):
    group.look(0, 1)
    for now in (50, 100):
        group.now = now
        group.beat(0, 1, 2)
        group.look(0, now)
    group.now = 150
    group.beat(0, 2)
    group.look(0, 150)
    group.look(0, 160)
    for rank in (0, 2):  # which the first tells the other
        with pytest.raises(RankError, match=r"^rank one has shown no sign of life for 60 s$"):
            group.look(rank, 161)
        assert group.ranks[rank].failed


def test_ranks_that_have_not_begun_are_not_waited_for(group):
    alone = Heartbeats(0, NAMES, None, DistributedConfig(timeout=0.2, heartbeat=0.1))
    atexit.unregister(alone.leave)
    alone.check(at_once=True)  # looking for a counter that is not there would take the time for an answer
    alone._stopped.set()
    alone._thread.join()


def test_a_rank_that_has_left_is_not_missed(group):
    group.ranks[1].leave()
    assert not group.ranks[1]._thread.is_alive()  # another sign of life would take the place of the last one
    for now in (1, 100, 200):
        group.now = now
        group.beat(0, 2)
        group.look(0, now)


def test_what_has_failed_is_told_to_the_others_at_once(group):
    group.look(2, 1)
    error = group.ranks[1].failure("rank one was interrupted")
    group.arrived(1)
    assert str(error) == "rank one was interrupted"
    assert group.ranks[1].failed
    group.ranks[2].check()  # within a heartbeat of the last look
    group.now = 10_000
    group.ranks[2].check()
    group.now = 10_001
    with pytest.raises(RankError, match=r"^rank one was interrupted$"):
        group.ranks[2].check()
    for rank in group.ranks:
        with pytest.raises(RankError, match=r"^rank one was interrupted$"):
            rank.check(at_once=True)
        assert rank.failed


def test_of_a_broken_connection_the_ranks_without_signs_of_life_are_named(group):
    group.as_they_sleep = lambda: group.beat(0)
    error = group.ranks[2].broken(RuntimeError("closed\nby 127.0.0.1"))
    assert str(error) == "rank one has ended or does not answer, and its samples with it: closed"
    assert str(group.ranks[0].broken(RuntimeError("closed"))) == str(error)


def test_a_broken_connection_may_be_of_what_another_rank_tells(group):
    group.as_they_sleep = lambda: group.ranks[1].failure("rank one was interrupted")
    assert str(group.ranks[2].broken(RuntimeError("closed"))) == "rank one was interrupted"


def test_where_the_store_has_gone_rank_0_has(group):
    def go():
        group.ranks[2]._store = SimpleNamespace(multi_get=gone, check=gone, set=gone)

    def gone(*_):
        raise RuntimeError("Broken pipe")

    group.as_they_sleep = go
    said = str(group.ranks[2].broken(RuntimeError("closed")))
    assert said == "rank zero has ended or does not answer, and its samples with it: closed"
    with pytest.raises(RankError, match=r"^rank zero has ended or does not answer: Broken pipe$"):
        group.look(2, 1)


def test_after_a_fault_rank_0_ends_once_the_others_have_had_time_to_read_of_it(group, monkeypatch):
    events = []
    monkeypatch.setattr(heartbeat, "os", SimpleNamespace(_exit=lambda status: events.append(f"ends with {status}")))
    group.ranks[1].failure("rank one was interrupted")
    group.as_they_sleep = lambda: events.append("sleeps")
    for rank in (1, 0):
        with pytest.raises(RankError, match="interrupted"):
            group.look(rank, 1)
        group.ranks[rank].leave()
    assert events == ["ends with 1", "sleeps", "ends with 1"]

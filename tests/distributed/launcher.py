"""Starts a function of ``rank_cases`` on several processes, as ``torchrun`` does, and collects what each returns.

The processes are forked from one that has imported everything, which takes each of them seconds otherwise.
"""

import atexit
import multiprocessing
import os
import pickle
import sys
import time
import traceback
import warnings
from functools import cache
from multiprocessing import forkserver

import pytest

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["rank_cases"])


@cache
def _start_server():
    """Start the process that ranks are forked from; it imports from where this one does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()


class Rank:
    """A process of a case, whose output goes to a file."""

    def __init__(self, case, rank, n_ranks, folder):
        self._printed = folder / f"printed_{rank}"
        _start_server()
        self._process = _FORKS.Process(target=_run, args=(case, rank, n_ranks, folder, self._printed))
        self._process.start()

    @property
    def failed(self):
        """Whether it has ended otherwise than by returning."""
        return self._process.exitcode not in (None, 0)

    def output(self, timeout):
        """What it has printed, once it has ended; an error if that takes longer than so many seconds."""
        self._process.join(timeout)
        printed = self._printed.read_text() if self._printed.exists() else "no output"
        assert self._process.exitcode is not None, f"no end within {timeout} s: {printed}"
        return printed

    def kill(self):
        """End it at once, as ``kill -9`` does."""
        self._process.kill()
        self._process.join()


def _run(case, rank, n_ranks, folder, printed):
    """A rank, in a process of its own."""
    with open(printed, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {"WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    warnings.simplefilter("error")
    from rank_cases import main

    try:
        main(case, folder)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        atexit._run_exitfuncs()  # which a process of multiprocessing leaves out


def start(case, n_ranks, folder, **arguments):
    """Processes that run a case; their results will be in the folder."""
    (folder / "arguments").write_bytes(pickle.dumps(arguments))
    return [Rank(case, rank, n_ranks, folder) for rank in range(n_ranks)]


def close(processes):
    """End processes."""
    for process in processes:
        process.kill()


def run(case, n_ranks, folder, timeout=300, **arguments):
    """What a case returns on each rank."""
    folder.mkdir(exist_ok=True)
    processes = start(case, n_ranks, folder, **arguments)
    end = time.monotonic() + timeout
    try:
        printed = [process.output(max(0.0, end - time.monotonic())) for process in processes]
    finally:
        close(processes)
    failed = [text for process, text in zip(processes, printed, strict=True) if process.failed]
    assert not failed, "\n".join(failed)
    return [pickle.loads((folder / f"result_{rank}").read_bytes()) for rank in range(n_ranks)]

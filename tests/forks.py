"""Processes that are forked from one that has imported everything, which takes each of them seconds otherwise."""

import atexit
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from functools import cache
from multiprocessing import forkserver

import pytest

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["rank_cases", "torch._dynamo"])  # which the first optimizer of a process imports


@cache
def _start_server():
    """Start the process that others are forked from; it imports from where this one does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()


class Fork:
    """A process that calls a function of a module, and whose output goes to a file."""

    def __init__(self, printed, function, *arguments):
        self._printed = printed
        _start_server()
        self._process = _FORKS.Process(target=_run, args=(printed, function, *arguments))
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

    def interrupt(self):
        """Send what the keys Ctrl-C send."""
        os.kill(self._process.pid, signal.SIGINT)

    def kill(self):
        """End it at once, as ``kill -9`` does."""
        self._process.kill()
        self._process.join()


def _run(printed, function, *arguments):
    """The function, in a process of its own."""
    with open(printed, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    warnings.simplefilter("error")
    try:
        function(*arguments)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        atexit._run_exitfuncs()  # which a process of multiprocessing leaves out

"""Starts a function of ``rank_cases`` on several processes, as ``torchrun`` does, and collects what each returns."""

import os
import pickle
import time

from forks import Fork


def _run(case, rank, n_ranks, folder):
    """A rank, in a process of its own."""
    os.environ |= {"WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    from rank_cases import main

    main(case, folder)


def start(case, n_ranks, folder, **arguments):
    """Processes that run a case; their results will be in the folder."""
    (folder / "arguments").write_bytes(pickle.dumps(arguments))
    return [Fork(folder / f"printed_{rank}", _run, case, rank, n_ranks, folder) for rank in range(n_ranks)]


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

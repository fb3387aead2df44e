"""Starts a function of ``rank_cases`` on several processes, as ``torchrun`` does, and collects what each returns."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent


def start(case, n_ranks, folder, **arguments):
    """Processes that run a case; their results will be in the folder."""
    (folder / "arguments").write_bytes(pickle.dumps(arguments))
    paths = [HERE, TESTS, TESTS / "solvers", TESTS.parent, TESTS.parent / "solvers"]
    shared = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "WORLD_SIZE": str(n_ranks),
        "OMP_NUM_THREADS": "1",
        "LOCAL_WORLD_SIZE": str(n_ranks),
    }
    return [
        subprocess.Popen(
            [sys.executable, "-W", "error", HERE / "rank_cases.py", case, folder],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(n_ranks)
    ]


def outputs(processes, timeout):
    """What each process has printed, at its end."""
    try:
        return [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        close(processes)


def close(processes):
    """End processes and what they print to."""
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def run(case, n_ranks, folder, timeout=300, **arguments):
    """What a case returns on each rank."""
    folder.mkdir(exist_ok=True)
    processes = start(case, n_ranks, folder, **arguments)
    printed = outputs(processes, timeout)
    failed = [text for process, text in zip(processes, printed, strict=True) if process.returncode]
    assert not failed, "\n".join(failed)
    return [pickle.loads((folder / f"result_{rank}").read_bytes()) for rank in range(n_ranks)]

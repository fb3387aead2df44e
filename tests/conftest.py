"""Shared helpers of the tests.

One thread per test process: workers that run side by side would otherwise wait for each other's spinning threads.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import stand_in_device
import torch
from solver_cases import STEADY_RATES

from convexformer_solvers.linear_maps import base

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start
torch.set_num_threads(1)

ROOT = Path(__file__).parents[1]


def _labels(scores, n_classes):
    """String labels by quantile of a score, so that classes are alike in size and not in alphabetical order."""
    edges = np.quantile(scores, np.linspace(0, 1, n_classes + 1)[1:-1])
    return np.array(["no", "yes", "maybe", "never"])[np.digitize(scores, edges)]


@pytest.fixture(autouse=True)
def figures_closed():
    """No test sees the figures of another."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture
def python_takes_ctrl_c():
    """Python's own handler, which processes that were started in the background do not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def steady_rates(monkeypatch):
    """Plans that do not go by the machine that runs the tests, nor by what else it does."""
    monkeypatch.setattr(base, "machine_rates", lambda dtype=None, device=None: STEADY_RATES)


@pytest.fixture(scope="session")
def make_problem():
    """Function that makes a small data set ``X, y`` as users have them, for any loss."""

    def make(loss="squared", *, n_samples=40, n_tokens=3, n_features=2, n_outputs=1, n_classes=2, ndim=3, seed=0):
        rng = np.random.default_rng(seed)
        shape = (n_samples, n_tokens, n_features) if ndim == 3 else (n_samples, n_tokens * n_features)
        X = rng.normal(size=shape)
        flat = X.reshape(n_samples, -1)
        scores = flat @ rng.normal(size=(flat.shape[1], n_outputs)) / 2 + 0.5 * rng.normal(size=(n_samples, n_outputs))
        if loss in ("logistic", "softmax", "squared_hinge", "auto"):
            return X, _labels(scores[:, 0], n_classes)
        y = rng.poisson(np.exp(scores / 2)).astype(float) if loss == "poisson" else scores + 0.3
        return X, y[:, 0] if n_outputs == 1 else y

    return make


@pytest.fixture(scope="session")
def run_python():
    """Function that runs code in a fresh interpreter and returns what it printed."""

    def run(code, *arguments, **environment):
        paths = [str(ROOT), str(ROOT / "solvers"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        settings = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def pytest_addoption(parser):
    parser.addoption("--large-shapes", type=int, default=12, help="how many random large shapes the sweep takes")
    parser.addoption("--large-size", type=float, default=3e5, help="numbers in the largest array of each")


@pytest.fixture(params=[stand_in_device.NAME, "cuda"])
def accelerator(request):
    """Name of a device that is not the CPU: one that stands in for any, and a GPU where there is one."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        yield "cuda"
        return
    before = stand_in_device.Counter.n_results
    with stand_in_device.stand_in():
        yield request.param
    assert stand_in_device.Counter.n_results > before + 20, "next to nothing was computed on the device"


@pytest.fixture
def every_warning():
    """Torch warns each time of what it else warns of once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)

"""Fixtures of the tests of the solver layer."""

import pytest
from solver_cases import STEADY_RATES

from convexformer_solvers.linear_maps import base


@pytest.fixture
def steady_rates(monkeypatch):
    """Plans that do not go by the machine that runs the tests, nor by what else it does."""
    monkeypatch.setattr(base, "machine_rates", lambda dtype=None, device=None: STEADY_RATES)

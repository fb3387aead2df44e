"""pyscnn: convex two-layer networks with neuron groups; listed for its domain, but no data set here fits it."""

from __future__ import annotations

from typing import Any

import scnn  # noqa: F401 - tells benchopt whether the package is there
from benchmark_utils.ladder import LadderSolver

from convexformer_solvers import Program


class Solver(LadderSolver):
    """Says what keeps each program from pyscnn: its loss is squared and its groups are whole neurons."""

    name = "pyscnn"
    requirements = ["pip::pyscnn"]  # noqa: RUF012 - benchopt's form
    rungs = (1e-3, 1e-6)

    def skip(self, program: Program, **data: Any) -> tuple[bool, str | None]:
        lacks_loss, reason = super().skip(program)
        if lacks_loss:
            return True, reason
        return True, "pyscnn groups all tokens of a gate; one group per token and gate is not expressible"

    def set_objective(self, program: Program, **data: Any) -> None:
        raise NotImplementedError("every program is skipped")

    def run(self, stop_val: float) -> None:
        raise NotImplementedError("every program is skipped")

"""Base class of the contenders: complete runs from scratch, each to a tighter setting than the one before."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from benchopt import BaseSolver
from numpy.typing import NDArray

from convexformer_solvers import Program

from .instance import as_coef, loss_name


def n_threads() -> int:
    """Threads that every contender may use; the environment fixes it before anything is imported."""
    return int(os.environ.get("OMP_NUM_THREADS", "1"))


class LadderSolver(BaseSolver):
    """A contender whose curve is a ladder of complete runs.

    Subclasses give `rungs`, `losses` and the benchopt methods; ``run(rung)`` must leave the coefficients in
    ``self.coef``. The data come without gates or with them.

    Attributes
    ----------
    rungs : tuple of float
        Settings from loose to tight: tolerances of the package, or numbers of iterations.
    losses : tuple of str
        Losses that the package can combine with a group norm per output.
    watches_clock : bool
        Whether the contender ends its runs by itself at the limit; it then may still certify its last point.
    history : list of (seconds, value, relative gap)
        Certified progress that the contender recorded by itself in the last run, if it does.
    limit : float
        Seconds after which a contender that can stop itself should.
    """

    sampling_strategy = "tolerance"
    rungs: ClassVar[tuple[float, ...]] = ()
    losses: ClassVar[tuple[str, ...]] = ("squared",)
    watches_clock: ClassVar[bool] = False
    history: Sequence[tuple[float, float, float]] = ()
    limit: float = float("inf")
    program: Program
    coef: NDArray | torch.Tensor

    def skip(self, program: Program, **data: Any) -> tuple[bool, str | None]:
        loss = loss_name(program)
        if loss not in self.losses:
            return True, f"{self.name} has no {loss} loss with a group norm per block and output"
        return False, None

    def get_next(self, stop_val: float) -> float:
        """The next rung after ``stop_val``; the last one repeats."""
        falling = self.sampling_strategy == "tolerance"
        return next((rung for rung in self.rungs if (rung < stop_val if falling else rung > stop_val)), self.rungs[-1])

    def on_ladder(self, stop_val: float) -> float:
        """``stop_val`` itself, or the first rung for benchopt's starting values (infinity, 0)."""
        outside = stop_val > self.rungs[0] if self.sampling_strategy == "tolerance" else stop_val < self.rungs[0]
        return self.rungs[0] if outside else stop_val

    def get_result(self) -> dict[str, Any]:
        coef = self.coef
        if isinstance(coef, np.ndarray):
            coef = as_coef(self.program, coef)
        return {"coef": coef}

"""Choice of the epoch whose weights training ends with, by its report on the validation data."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor

from .reports import FeasibilityReport


class BestEpoch(NamedTuple):
    """The best epoch so far: its rank, its weights and its slacks."""

    infeasible: bool
    loss: float
    model: dict[str, Tensor]
    slacks: Tensor


def rank(report: FeasibilityReport, slacks: Tensor, *, objective: str, resilience: float | None) -> tuple[bool, float]:
    """Whether an epoch comes after all that are feasible, and what is compared next; the least rank is the best.

    ``report`` is of the epoch and under its ``slacks``; the options are those of ``PrimalDual``, whose ``fit``
    describes the choice.
    """
    infeasible, value = False, float(report.losses[-1])
    if objective == "constrained" and resilience is not None:
        excess = np.maximum(report.violations + slacks.double().cpu().numpy(), 0)
        value += resilience / 2 * float(np.square(excess).sum())
    elif objective == "constrained" and not report.feasible:
        infeasible, value = True, float(np.maximum(report.violations, 0).sum())
    return infeasible, value if math.isfinite(value) else math.inf

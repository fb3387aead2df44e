"""Backtracking line search with the sufficient decrease condition of Armijo (1966)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from convexformer_solvers.rounding import EPS

_Trial = TypeVar("_Trial")


def backtracking(
    trial: Callable[[float], _Trial], value: Callable[[_Trial], float], before: float, slope: float
) -> tuple[float, _Trial] | None:
    """First of the steps 1, 1/2, 1/4, ... that lowers an objective by a ten thousandth of what the slope promises.

    A step leads to what `trial` returns, where the objective is `value`; it is `before` at zero, with a derivative of
    at most `slope`, and may rise by rounding. Steps end at the root of machine precision. Returned is the step with its
    trial; None where the slope is positive, or where no step will do.

    Examples
    --------
    >>> backtracking(lambda step: 2 * step - 1, lambda x: x**2, 1.0, -4.0)
    (0.5, 0.0)
    """
    if not -math.inf < slope <= 0:
        return None
    step = 1.0
    while step > math.sqrt(EPS):
        found = trial(step)
        if value(found) <= before + 1e-4 * step * slope + 4 * EPS * abs(before):
            return step, found
        step *= 0.5
    return None

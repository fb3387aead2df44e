"""A search along a direction, by halving."""

from __future__ import annotations

import math
from collections.abc import Callable

# Decrease over that which the slope promises, of steps that are taken; and rounding of objectives.
_SHARE = 1e-4
_ROUNDING = 1e-15
_SHORTEST = 1e-9


def accepted_step(objective: Callable[[float], float], slope: float) -> float | None:
    """First step, halved from one on, that lowers an objective enough (Armijo), or by as much as rounding lets one see.

    Parameters
    ----------
    objective : callable
        The objective after a step of some length.
    slope : float
        Its derivative at zero, or a bound of it from above.

    Returns
    -------
    float or None
        None where the slope is no descent, or no step lowers the objective.

    Examples
    --------
    >>> accepted_step(lambda step: (2 * step - 1) ** 2, -4.0)
    0.5
    """
    if not -math.inf < slope < 0:
        return None
    before = objective(0.0)
    step = 1.0
    while step > _SHORTEST:
        if objective(step) <= before + _SHARE * step * slope + _ROUNDING * abs(before):
            return step
        step *= 0.5
    return None

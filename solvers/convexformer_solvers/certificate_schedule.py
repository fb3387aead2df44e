"""Schedule of certificates: at regular intervals, and where the estimated gap is within the tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleConfig:
    """Numbers of the schedule of certificates.

    Parameters
    ----------
    interval : int, default=10
        Iterations between certificates where the gap has no estimate, at first fewer, or a negative one, or where a
        callback or a progress bar is told of them.
    longest : int, default=50
        Iterations between certificates elsewhere, while the estimate is above the tolerance.
    growth : float, default=1/3
        Share of all iterations that takes the place of either where it is more, for a solver with an estimate.
    """

    interval: int = 10
    longest: int = 50
    growth: float = 1 / 3


class Schedule:
    """Decides after each iteration whether a certificate, at the cost of one or two iterations, is due.

    It is due where the solver's estimate of its gap is within the goal, multiplied by the ratio by which it was too
    small at the last certificate. Without that factor it counts after a wait that doubles with each miss in a row, as
    later estimates may be better. In any case a certificate is due after the intervals of ``ScheduleConfig``. `goal` is
    the gap that ends the solve; `watched` says whether a callback or a progress bar is told of each certificate.
    """

    def __init__(self, goal: float, watched: bool = False, config: ScheduleConfig = ScheduleConfig()) -> None:
        self._goal, self._watched, self._config = goal, watched, config
        self._last, self._gap = 0, math.inf  # iteration and gap of the last certificate
        self._ratio, self._misses = 1.0, 0
        self.stands_still = False  # the estimate is within the goal, and the gap is what it was an interval ago

    def due(self, iteration: int, estimate: float | None) -> bool:
        """Whether a certificate is due after so many iterations, at an estimate as of ``Solver.gap_estimate``."""
        waited, config = iteration - self._last, self._config
        if estimate is None:
            return waited >= min(self._last, config.interval)
        if not math.isfinite(estimate):
            return False
        # Below zero the estimate is rounding, or the dual point is not feasible.
        longest = config.interval if self._watched or estimate < 0 else config.longest
        size, patient = abs(estimate), waited >= 2**self._misses
        reached = size < self._ratio * self._goal or (patient and size <= self._goal)
        return reached or waited >= max(longest, config.growth * iteration)

    def certified(self, iteration: int, estimate: float | None, gap: float) -> None:
        """Learn from the gap of a certificate."""
        waited, before = iteration - self._last, self._gap
        self._last, self._gap = iteration, gap
        if estimate is None:
            return
        missed, size = gap > self._goal, abs(estimate)
        too_small = missed and size <= self._goal
        self.stands_still = too_small and waited >= self._config.longest and gap >= before
        self._misses = self._misses + 1 if too_small else 0
        self._ratio = min(1.0, size / gap) if missed else 1.0

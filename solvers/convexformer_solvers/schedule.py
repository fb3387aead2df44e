"""When a certificate is worth its cost."""

from __future__ import annotations

import math

# Iterations between certificates of a solver that has no estimate of its gap, the first ones come earlier; of one
# whose estimate does not fall; and of one whose estimate is below zero.
_INTERVAL = 10
_WITHOUT_PROGRESS = 25
_WITHOUT_SENSE = 5
_EARLY = (1, 2, 4)
# Iterations after the last certificate before which only a reached goal is worth one.
_EARLIEST = 5
# The decrease of the estimate since the last certificate, and the share of all iterations since then.
_DECREASE = 100.0
_SHARE = 1 / 3
# Iterations after a miss until an estimate is taken at its word again; to the power of the misses in a row.
_WAIT_AFTER_MISS = 2


class Schedule:
    """Decides, by the solver's own estimate of its gap, when to certify.

    A certificate costs as much as one or two iterations. It is due where the estimate says that the goal is reached,
    corrected by how far the last one was off, or without that correction after two iterations, twice as many after
    each further miss, as later points may be better known; from the fifth iteration on where the estimate has fallen to
    a hundredth; and now and then in any case.

    Parameters
    ----------
    goal : float
        The gap that ends the solve.
    """

    def __init__(self, goal: float) -> None:
        self._goal = goal
        self._iteration = 0
        self._estimate: float | None = None
        self._trust = 1.0
        self._misses = 0  # in a row

    def due(self, iteration: int, estimate: float | None) -> bool:
        """Whether a certificate is due after an iteration.

        Parameters
        ----------
        iteration : int
            Iterations done.
        estimate : float or None
            ``Solver.estimated_gap``.
        """
        if estimate is None:
            return iteration % _INTERVAL == 0 or iteration in _EARLY
        if not math.isfinite(estimate):
            return False
        waited = iteration - self._iteration
        if estimate <= 0:  # rounding, or a dual point that is not feasible
            return waited >= _WITHOUT_SENSE
        if self._estimate is None:
            self._estimate = estimate
        patient = waited >= _WAIT_AFTER_MISS**self._misses
        reached = estimate <= (1.0 if patient else self._trust) * self._goal
        fallen = estimate < self._estimate / _DECREASE and waited >= _EARLIEST
        return reached or fallen or waited >= max(_WITHOUT_PROGRESS, _SHARE * iteration)

    def certified(self, iteration: int, estimate: float | None, gap: float) -> None:
        """Learn from a certificate."""
        self._iteration = iteration
        if estimate is not None and 0 < estimate < math.inf:
            missed = gap > self._goal
            self._misses = self._misses + 1 if missed and estimate <= self._goal else 0
            self._estimate, self._trust = estimate, min(1.0, estimate / gap) if missed else 1.0

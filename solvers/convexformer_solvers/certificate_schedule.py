"""When a certificate is worth its cost."""

from __future__ import annotations

import math

# Iterations between certificates of a solver that has no estimate of its gap; the first ones come earlier.
_INTERVAL = 10
_EARLY = (1, 2, 4)
# Iterations between certificates, or that share of all iterations where it is more: while the goal is not reached, the
# same where somebody watches, and while the estimate is below zero.
_LONGEST = 50
_LONGEST_WATCHED = 25
_LONGEST_BELOW_ZERO = 10
_SHARE = 1 / 3
# For a watcher: the decrease of the estimate that is worth a certificate, from so many iterations on after the last.
_DECREASE = 100.0
_EARLIEST = 5
# Iterations after a miss until an estimate is taken at its word again; to the power of the misses in a row.
_WAIT_AFTER_MISS = 2
# Misses since the gap last fell by a tenth that say that points cannot be held precisely enough.
_MISSES = 8
_STILL = 0.9


class Schedule:
    """Decides, by the solver's own estimate of its gap, when to certify.

    A certificate costs as much as one or two iterations. It is due where the estimate says that the goal is reached,
    corrected by how far the last one was off, or without that correction after two iterations, twice as many after
    each further miss, as later points may be better known; and now and then in any case, more often where somebody
    watches: from the fifth iteration on where the estimate has fallen to a hundredth.

    Parameters
    ----------
    goal : float
        The gap that ends the solve.
    watched : bool, default=False
        Whether somebody is told of each certificate.
    """

    def __init__(self, goal: float, watched: bool = False) -> None:
        self._goal, self._watched = goal, watched
        self._iteration = 0
        self._estimate: float | None = None
        self._trust = 1.0
        self._misses = 0  # in a row
        self._misses_at_gap = 0  # since the gap last fell
        self._gap = math.inf  # of then

    @property
    def stands_still(self) -> bool:
        """Whether estimates have been within the goal many times, and the gap is what it was."""
        return self._misses_at_gap >= _MISSES

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
        patient = waited >= _WAIT_AFTER_MISS**self._misses
        size = abs(estimate)
        reached = size <= self._goal and (patient or size < self._trust * self._goal)
        if estimate < 0:  # rounding, or a dual point that is not feasible
            return reached or waited >= max(_LONGEST_BELOW_ZERO, _SHARE * iteration)
        if self._estimate is None:
            self._estimate = estimate
        fallen = self._watched and estimate < self._estimate / _DECREASE and waited >= _EARLIEST
        longest = _LONGEST_WATCHED if self._watched else _LONGEST
        return reached or fallen or waited >= max(longest, _SHARE * iteration)

    def certified(self, iteration: int, estimate: float | None, gap: float) -> None:
        """Learn from a certificate."""
        self._iteration = iteration
        if estimate is not None and abs(estimate) < math.inf:
            missed, size = gap > self._goal, abs(estimate)
            self._misses = self._misses + 1 if missed and size <= self._goal else 0
            self._misses_at_gap += missed and size <= self._goal
            if gap < _STILL * self._gap:
                self._misses_at_gap, self._gap = 0, gap
            self._estimate = size
            self._trust = min(1.0, size / gap) if missed else 1.0

"""Times of contenders that take turns, so that a slow moment of the machine meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def median_seconds(
    contenders: Mapping[str, Callable[[], Any]], repeats: int, *, n_untimed: int = 2
) -> dict[str, float]:
    """Median seconds of each contender over so many turns, after a few that are not timed as they also load."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + n_untimed):
        for name, run in contenders.items():
            began = time.perf_counter()
            run()
            if turn >= n_untimed:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in times.items()}

"""Running the folds of a cross-validation: threads, one progress bar, and an end to all when one is interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from threading import Event, Lock
from typing import Any, TypeVar

import numpy as np
from joblib import effective_n_jobs
from numpy.typing import NDArray
from sklearn import config_context, get_config
from tqdm.auto import tqdm

from convexformer.validation import is_integer
from convexformer_solvers import Callback, Progress, SolverResult, Status
from convexformer_solvers.validation import says_stop

T = TypeVar("T")
Split = tuple[NDArray[np.int64], NDArray[np.int64]]  # positions of training and of held-out samples


def checked_split(split: Any, index: int, n_samples: int) -> Split:
    """What a splitter gave as positions; `index` is that of the fold, for messages.

    ``ValueError`` if it is no pair, or a part is empty or holds anything but positions of samples or a mask of them.
    """
    if not isinstance(split, (tuple, list)) or len(split) != 2:
        raise ValueError(f"cv: fold {index} must be a pair of training and held-out rows, got {split!r}")
    training, held_out = (_rows(part, index, n_samples) for part in split)
    return training, held_out


def _rows(part: Any, index: int, n_samples: int) -> NDArray[np.int64]:
    rows = np.asarray(part)
    if rows.dtype == bool and rows.shape == (n_samples,):
        rows = rows.nonzero()[0]
    if rows.ndim != 1 or rows.size == 0 or rows.dtype.kind not in "iu":
        raise ValueError(
            f"cv: both parts of fold {index} must hold positions of samples, or a mask of all {n_samples}, "
            f"got {rows.dtype} of shape {rows.shape}"
        )
    if rows.min() < -n_samples or rows.max() >= n_samples:
        raise ValueError(
            f"cv: fold {index} must hold positions of the {n_samples} samples, got {rows.min()} to {rows.max()}"
        )
    return rows.astype(np.int64) % n_samples


class Watch:
    """What the folds have in common: progress over folds and alphas, and whether they are to stop."""

    def __init__(self, bar: tqdm) -> None:
        self.stopped = Event()
        self.n_unfinished = 0  # solves that the user's callback has stopped
        self._bar, self._lock = bar, Lock()

    def count(self, result: SolverResult) -> None:
        """Move the bar on by one alpha."""
        with self._lock:
            self.n_unfinished += result.status is Status.STOPPED
            self._bar.set_postfix_str(f"gap {result.certificate.relative_gap:.1e}", refresh=False)
            self._bar.update()

    def stopping(self, callback: Callback | None) -> Callback:
        """The user's callback, which also interrupts the solve once another fold has ended in an error."""

        def called(progress: Progress) -> bool:
            if self.stopped.is_set():
                raise KeyboardInterrupt
            return says_stop(callback, progress)

        return called


def run_folds(folds: Sequence[Callable[[], T]], n_jobs: int | None, watch: Watch) -> list[T]:
    """Results of all folds in their order, at most `n_jobs` of them running at once, as in joblib.

    When one raises, Ctrl-C included, the others are told to stop, and nothing runs any more when the error is raised.
    """
    if not (n_jobs is None or (is_integer(n_jobs) and n_jobs != 0)):
        raise ValueError(f"n_jobs must be None or an integer other than 0, got {n_jobs!r}")
    n_threads = min(effective_n_jobs(n_jobs), len(folds))
    if n_threads == 1:
        return [fold() for fold in folds]
    config = get_config()

    def configured(fold: Callable[[], T]) -> T:
        with config_context(**config):  # scikit-learn's configuration is one per thread
            return fold()

    # Not joblib's Parallel: after an interrupt it leaves threads behind that go on.
    with ThreadPoolExecutor(n_threads) as pool:
        futures = [pool.submit(configured, fold) for fold in folds]
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            watch.stopped.set()
            for future in futures:
                future.cancel()
            raise
    return [future.result() for future in futures]

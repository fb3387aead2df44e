"""Time series that the package aeon carries, read from its files, and their windows."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from convexformer.datasets._lines import text_lines


def carried_folder() -> Path:
    """The folder in which aeon keeps its data sets; aeon itself is not imported.

    Returns
    -------
    Path

    Raises
    ------
    ModuleNotFoundError
        If aeon is not installed.
    """
    found = find_spec("aeon")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(
            "data sets 'aeon:NAME' are read from the package aeon: pip install --no-deps aeon", name="aeon"
        )
    return Path(found.submodule_search_locations[0]) / "datasets" / "data"


def load_series(name: str) -> tuple[list[NDArray[np.float64]], list[str]]:
    """All series of a data set, those for training before those for testing.

    Parameters
    ----------
    name : str
        As ``JapaneseVowels``.

    Returns
    -------
    series : list of ndarray of shape (length, n_channels)
    labels : list of str

    Raises
    ------
    ModuleNotFoundError
        If aeon is not installed.
    ValueError
        If it has no such data set, or a file is not one of labelled series without missing numbers.
    """
    folder = carried_folder()
    paths = [folder / name / f"{name}_{part}.ts" for part in ("TRAIN", "TEST")]
    if not all(path.is_file() for path in paths):
        known = sorted(path.name.removesuffix("_TRAIN.ts") for path in folder.glob("*/*_TRAIN.ts"))
        raise ValueError(f"datasets: aeon carries no 'aeon:{name}'; it carries {known}")
    parts = [read_ts(path) for path in paths]
    return [item for series, _ in parts for item in series], [label for _, labels in parts for label in labels]


def read_ts(path: Path) -> tuple[list[NDArray[np.float64]], list[str]]:
    """The series of a ``.ts`` file: a line has channels between colons, numbers between commas, and last the label.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    series : list of ndarray of shape (length, n_channels)
    labels : list of str

    Raises
    ------
    ValueError
        If the file is no text, or a line is not as described.
    """
    series, labels = [], []
    for number, line in enumerate(text_lines(path, f"{path} must be text in UTF-8"), start=1):
        if not line.strip() or line[0] in "#@":
            continue
        *channels, label = line.strip().split(":")
        try:
            item = np.array([[float(value) for value in channel.split(",")] for channel in channels]).T
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not numbers in channels of equal length ({error})") from error
        if item.ndim != 2 or not np.isfinite(item).all():
            raise ValueError(f"{path}, line {number}: must hold finite numbers and a label")
        series.append(item)
        labels.append(label)
    return series, labels


def windows(series: Sequence[NDArray[np.float64]], window: int) -> list[NDArray[np.float32]]:
    """Each series as tokens of consecutive time steps, one token for each step at which a window begins.

    Parameters
    ----------
    series : sequence of ndarray of shape (length, n_channels)
        The series. Shorter ones than a window are continued by their last step.
    window : int
        Steps of a token.

    Returns
    -------
    list of ndarray of shape (length - window + 1, window * n_channels)

    Examples
    --------
    >>> windows([np.array([[1.0], [2.0], [3.0]]), np.array([[5.0]])], 2)
    [array([[1., 2.],
           [2., 3.]], dtype=float32), array([[5., 5.]], dtype=float32)]
    """
    found = []
    for item in series:
        missing = max(0, window - len(item))
        whole = np.pad(item, ((0, missing), (0, 0)), mode="edge")
        stacked = np.lib.stride_tricks.sliding_window_view(whole, window, axis=0)  # (tokens, channels, window)
        found.append(stacked.swapaxes(1, 2).reshape(len(stacked), -1).astype(np.float32))
    return found

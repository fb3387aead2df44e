"""What all figures share: matplotlib, figures without a display, and colour scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from convexformer.optional import required
from convexformer.validation import is_integer, without_tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def require_matplotlib() -> Any:
    """Import ``matplotlib.pyplot``, or say which extra is missing.

    Returns
    -------
    module
        ``matplotlib.pyplot``.

    Raises
    ------
    ModuleNotFoundError
        If matplotlib is not installed.

    Examples
    --------
    >>> require_matplotlib().__name__
    'matplotlib.pyplot'
    """
    return required("matplotlib.pyplot", "figures", "'convexformer[plot]'")


def as_numbers(values: ArrayLike, name: str, example: str) -> NDArray[np.float64]:
    """An argument of numbers as an array; a tensor may be on any device."""
    given = without_tensor(values, name)
    try:
        return np.asarray(given, dtype=float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be numbers, as {example}, got {values!r:.80}") from error


def check_drawable(array: NDArray[np.float64], name: str, least: float = -math.inf) -> None:
    """Raise ``ValueError`` unless an array holds numbers, all finite and not below `least`, which is zero or none."""
    if array.size == 0:
        raise ValueError(f"{name} must hold at least one number, got shape {array.shape}")
    if not bool(np.isfinite(array).all()):
        raise ValueError(f"{name} must not be NaN or infinite")
    if array.min() < least:
        raise ValueError(f"{name} must not be negative, got {array.min()}")


def largest(values: NDArray[np.float64]) -> float:
    """End of a colour scale that begins at zero, also where all values are zero."""
    return float(values.max(initial=0.0)) or 1.0


def is_grid(shape: Any, count: int) -> bool:
    """Whether a shape is rows and columns of so many places."""
    return np.shape(shape) == (2,) and all(is_integer(side, 1) for side in shape) and math.prod(shape) == count


def new_figure(n_rows: int, n_columns: int, figsize: tuple[float, float]) -> tuple[Figure, Sequence[Axes]]:
    """Make a figure that needs no display.

    Parameters
    ----------
    n_rows, n_columns : int
        Grid of axes.
    figsize : (float, float)
        Inches.

    Returns
    -------
    figure, axes
        The axes as a flat sequence.

    Raises
    ------
    ModuleNotFoundError
        If matplotlib is not installed.

    Examples
    --------
    >>> figure, (left, right) = new_figure(1, 2, figsize=(8.0, 3.0))
    >>> bars, line = left.bar([0, 1], [2.0, 1.0]), right.plot([0.0, 1.0])
    >>> figure.get_size_inches().tolist(), len(left.patches), len(right.lines)
    ([8.0, 3.0], 2, 1)
    """
    figure, axes = require_matplotlib().subplots(
        n_rows, n_columns, figsize=figsize, layout="constrained", squeeze=False
    )
    return figure, list(axes.flat)


def axes_for(ax: Axes | None, **options: Any) -> Axes:
    """The axes to draw into: those that were given, or those of a new figure."""
    return require_matplotlib().subplots(layout="constrained", **options)[1] if ax is None else ax


def finish_map(axes: Any, image: Any, label: str, **names: str) -> None:
    """Names of what an image of cells shows, ticks at whole numbers and a colour bar."""
    axes.set(**names)
    axes.locator_params(integer=True, min_n_ticks=1)
    axes.figure.colorbar(image, ax=axes, label=label, shrink=0.8)


def save_figure(figure: Figure, path: Any) -> None:
    """Write a figure as PNG and close it.

    Parameters
    ----------
    figure : matplotlib figure
        The figure, such as ``axes.figure``, no longer known to ``matplotlib.pyplot`` afterwards.
    path : path-like or file object
        Where to write.

    Raises
    ------
    TypeError
        If `figure` is no figure.
    OSError
        If `path` cannot be written to.

    Examples
    --------
    >>> import io
    >>> figure, axes = new_figure(1, 1, figsize=(2.0, 2.0))
    >>> file = io.BytesIO()  # or the path of a file
    >>> save_figure(figure, file)
    >>> file.getvalue()[1:4]
    b'PNG'
    """
    pyplot = require_matplotlib()
    if not isinstance(figure, pyplot.Figure):
        raise TypeError(f"figure must be a matplotlib figure, as axes.figure, got {type(figure).__name__}")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

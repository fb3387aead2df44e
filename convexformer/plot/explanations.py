"""Figures of what each token adds to a score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from convexformer.validation import without_tensor

from .common import as_numbers, axes_for, check_drawable, finish_map, is_grid, largest, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = "RdBu_r"  # red adds to the score, blue takes from it
_LABEL = "contribution to the score"
_CONTINUED = "##"  # BERT: the piece goes on with the word before
_BEGINNING = ("\u0120", "\u2581")  # GPT-2 and SentencePiece: the piece begins a word
_SIZES = range(11, 4, -1)  # of the font, in points
_PAD, _GAP, _JOINT, _LEADING = 0.25, 0.4, -0.2, 2.0  # around a piece, between words, in words, to the next line; in em


def plot_token_text(contributions: ArrayLike, words: Sequence[str], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw words on colours by what they add to a score.

    Parameters
    ----------
    contributions : array-like of shape (n_tokens,)
        What each token adds, for example ``explanation.of(sample)``.
    words : sequence of str
        The tokens as text. Word pieces are drawn joined to the piece before: those that begin with ``##``, as BERT
        writes them, and, where a tokenizer marks the first pieces of words instead, those without the mark.
    title : str, optional
        Title of the axes.
    ax : matplotlib axes, optional
        Where to draw; the words fill its width, in a smaller font where there are many. Default: a new figure that is
        as high as the text needs.

    Returns
    -------
    matplotlib axes

    Raises
    ------
    TypeError
        If `words` is one str, or holds anything else than str.
    ValueError
        If `contributions` is no vector of finite numbers, or `words` has another length.

    Examples
    --------
    >>> axes = plot_token_text([0.2, -0.1, 0.4], ["an", "unread", "##able"], title="score 0.5")
    >>> [text.get_text() for text in axes.texts]
    ['an', 'unread', 'able']
    """
    values = _checked(contributions)
    if isinstance(words, str):
        raise TypeError("words must be a sequence of str, one for each token, got one str; split it into its tokens")
    pieces = list(words)
    wrong = [type(word).__name__ for word in pieces if not isinstance(word, str)]
    if wrong:
        raise TypeError(f"words must hold str, one for each token, got {wrong[0]}")
    if len(pieces) != len(values):
        raise ValueError(
            f"words must have one entry for each of the {len(values)} contributions, got {len(pieces)}; give the "
            "tokens that the encoder read, special ones among them"
        )
    plt = require_matplotlib()
    shown = _as_shown(pieces)
    axes = axes_for(ax, figsize=(7.0, 2.0))
    axes.set(xticks=[], yticks=[], title=title, xlabel="tokens in their order")
    axes.spines[:].set_visible(False)
    scale = plt.cm.ScalarMappable(plt.Normalize(-largest(abs(values)), largest(abs(values))), _COLORS)
    axes.figure.colorbar(scale, ax=axes, label=_LABEL, orientation="horizontal", shrink=0.5, aspect=30)
    width, height = _size(axes)
    if ax is None:
        needed = _flow(shown, width, _SIZES[0]).height
        figure = _figure(axes)
        figure.set_figheight(figure.get_figheight() + (needed - height) / 72)
        height = needed
    for size in _SIZES:
        text = _flow(shown, width, size)
        if text.height <= height:
            break
    for (piece, _), place, color in zip(shown, text.places, scale.to_rgba(values), strict=True):
        axes.annotate(
            piece,
            (0, 1),
            place,
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=text.size,
            color="white" if color[:3] @ (0.299, 0.587, 0.114) < 0.5 else "black",
            bbox={"boxstyle": f"square,pad={_PAD}", "facecolor": color, "edgecolor": "none"},
            parse_math=False,
            usetex=False,
            annotation_clip=False,
        ).set_in_layout(False)  # the axes have the room
    return axes


def plot_patch_map(
    contributions: ArrayLike,
    grid: tuple[int, int],
    *,
    image: ArrayLike | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw what each patch of an image adds to a score.

    Parameters
    ----------
    contributions : array-like of shape (n_patches,)
        What each patch adds, row by row from the top left, for example ``explanation.of(sample)``.
    grid : (int, int)
        Rows and columns of patches.
    image : array-like of shape (height, width), optional
        The grey image, drawn behind the patches, which cover it the more the more they add or take.
    title : str, optional
        Title of the axes.
    ax : matplotlib axes, optional
        Where to draw. Default: a new figure.

    Returns
    -------
    matplotlib axes

    Raises
    ------
    ValueError
        If `contributions` is no vector of finite numbers, `grid` has another number of places, or `image` is not grey,
        finite pixels.

    Examples
    --------
    >>> axes = plot_patch_map([0.1, 0.0, -0.3, 0.2], (2, 2))
    >>> axes.images[0].get_array().tolist()
    [[0.1, 0.0], [-0.3, 0.2]]
    >>> axes.images[0].get_clim()
    (-0.3, 0.3)
    """
    values = _checked(contributions)
    if not is_grid(grid, len(values)):
        raise ValueError(
            f"grid must be the rows and columns of {len(values)} patches, got {grid!r:.80}; leave out contributions of "
            "tokens that are no patch, such as a class token"
        )
    picture = None if image is None else as_numbers(image, "image", "pixels")
    if picture is not None:
        if picture.ndim != 2:
            raise ValueError(f"image must be grey, of shape (height, width), got {picture.shape}; average its channels")
        check_drawable(picture, "image")
    axes = axes_for(ax)
    rows, columns = grid
    extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    if picture is not None:
        darkest = picture.min() - (float(picture.max() - picture.min()) or 1.0)  # pale, so that colours show
        axes.imshow(picture, cmap="gray", vmin=darkest, extent=extent)
    top = largest(abs(values))
    alpha = None if picture is None else abs(values).reshape(rows, columns) / top * 0.8
    shown = axes.imshow(values.reshape(rows, columns), cmap=_COLORS, vmin=-top, vmax=top, extent=extent, alpha=alpha)
    finish_map(axes, shown, _LABEL, xlabel="patch column", ylabel="patch row", title=title)
    return axes


def plot_token_curve(
    contributions: ArrayLike,
    *,
    series: ArrayLike | None = None,
    times: ArrayLike | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw what each time step or window of a series adds to a score.

    Parameters
    ----------
    contributions : array-like of shape (n_tokens,)
        What each token adds, for example ``explanation.of(sample)``.
    series : array-like of shape (n_steps,) or (n_steps, n_channels), optional
        The signal, drawn behind the contributions on an axis of its own: at `times` where there is one step for each
        token, and else at 0, 1, 2 and so on, in which unit `times` must then be.
    times : array-like of shape (n_tokens,), optional
        Time of each token, increasing, for example the middle of its window. Default: 0, 1, 2 and so on.
    title : str, optional
        Title of the axes.
    ax : matplotlib axes, optional
        Where to draw. Default: a new figure.

    Returns
    -------
    matplotlib axes
        Of the contributions.

    Raises
    ------
    ValueError
        If `contributions` is no vector of finite numbers, or `series` or `times` do not fit them.

    Examples
    --------
    >>> axes = plot_token_curve([0.0, 0.5, -0.25], series=np.sin(np.arange(9.0)), times=[1, 4, 7])
    >>> axes.lines[0].get_ydata().tolist()
    [0.0, 0.5, -0.25]
    """
    values = _checked(contributions)
    steps = np.arange(len(values)) if times is None else np.asarray(without_tensor(times, "times"))
    if steps.dtype == object and all(isinstance(step, date) for step in steps.flat):
        steps = steps.astype("datetime64[us]")
    if steps.shape != values.shape:
        raise ValueError(f"times must have shape ({len(values)},), one for each contribution, got {steps.shape}")
    if steps.dtype.kind not in "iufM" or not bool(np.isfinite(steps).all()):
        raise ValueError(f"times must be finite numbers or dates, got {times!r:.80}")
    if not bool((steps[1:] > steps[:-1]).all()):
        raise ValueError("times must increase; sort contributions and times together")
    signal = None if series is None else as_numbers(series, "series", "the steps of a signal")
    if signal is not None and (signal.ndim not in (1, 2) or signal.size == 0):
        raise ValueError(f"series must have shape (n_steps,) or (n_steps, n_channels), got {signal.shape}")
    at = steps
    if signal is not None and len(signal) != len(values):
        if times is None:
            raise ValueError(
                f"series has {len(signal)} steps and there are {len(values)} contributions; give times=, the step in "
                "the middle of each token"
            )
        if steps.dtype.kind == "M":
            raise ValueError("times must be numbers of steps, not dates, where series has another number of steps")
        at = np.arange(len(signal))
    axes = axes_for(ax, figsize=(7.0, 3.0))
    if signal is not None:
        behind = axes.twinx()
        behind.plot(at, signal, color="0.6", linewidth=1.0, marker=None if len(signal) > 1 else "o")
        behind.set_ylabel("signal", color="0.4")
        axes.set_zorder(behind.get_zorder() + 1)
        axes.patch.set_visible(False)
    for sign, color in ((1, "tab:red"), (-1, "tab:blue")):
        axes.fill_between(
            steps, values, where=sign * values >= 0, interpolate=True, color=color, alpha=0.4, linewidth=0
        )
    axes.plot(steps, values, color="black", linewidth=1.2, marker="." if len(values) <= 40 else None)
    axes.axhline(0, color="black", linewidth=0.5)
    top = 1.1 * largest(abs(values))
    axes.set(xlabel="time", ylabel=_LABEL, ylim=(-top, top), title=title)
    return axes


def _checked(contributions: ArrayLike) -> NDArray[np.float64]:
    """A vector of finite numbers."""
    values = as_numbers(contributions, "contributions", "explanation.of(0)")
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(
            f"contributions must have shape (n_tokens,), got {values.shape}; explanation.of(sample, output) chooses "
            "one score of one sample"
        )
    check_drawable(values, "contributions")
    return values


def _as_shown(words: Sequence[str]) -> list[tuple[str, bool]]:
    """Text of each token, and whether it goes on with the one before."""
    marks_beginning = any(word.startswith(_BEGINNING) for word in words)
    shown = []
    for word in words:
        if marks_beginning:
            joined, text = not word.startswith(_BEGINNING), word.lstrip("".join(_BEGINNING))
        else:
            joined = word.startswith(_CONTINUED) and word != _CONTINUED
            text = word.removeprefix(_CONTINUED) if joined else word
        written = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)  # fonts have no line feed
        shown.append((written or "\u2423", joined))
    return shown


@dataclass(frozen=True)
class _Text:
    """Where words go, in points from the top left: right and up."""

    places: list[tuple[float, float]]
    height: float
    size: int


def _flow(pieces: Sequence[tuple[str, bool]], width: float, size: int) -> _Text:
    """Words one behind the other, on a new line where the next one does not fit."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size)
    places: list[tuple[float, float]] = []
    right, line = 0.0, 0
    for text, joined in pieces:
        own = text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] + 2 * _PAD * size
        left = right + (_JOINT if joined else _GAP) * size if right else 0.0
        if left + own > width and right:
            left, line = 0.0, line + 1
        places.append((left + _PAD * size, -(line * _LEADING + 1.5) * size))
        right = left + own
    return _Text(places, ((line + 1) * _LEADING + 0.5) * size, size)


def _size(axes: Any) -> tuple[float, float]:
    """Width and height of axes in points, once the figure is laid out."""
    figure = _figure(axes)
    figure.draw_without_rendering()
    box = axes.get_window_extent()
    return box.width * 72 / figure.dpi, box.height * 72 / figure.dpi


def _figure(axes: Any) -> Any:
    """The whole figure, also where the axes are in a part of it."""
    return axes.figure.canvas.figure

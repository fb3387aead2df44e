"""Figures of solutions and of convergence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from convexformer.validation import is_integer, refuse_masked
from convexformer_solvers.validation import is_real

from .common import as_numbers, axes_for, check_drawable, finish_map, is_grid, largest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WRITTEN = 10  # rows and columns at most, beyond which numbers in the patches would cover each other
_COLOURS = [f"C{number}" for number in range(10) if number != 7]  # which is grey, as lines without a name
_SLENDER = 4  # ratio of the sides of a map above which its cells are no squares, to be seen


def plot_token_norms(
    token_norms: ArrayLike, *, shape: tuple[int, int] | None = None, title: str = "", ax: Axes | None = None
) -> Axes:
    """Draw how much of the penalty each token carries.

    Parameters
    ----------
    token_norms : array-like of shape (n_tokens,)
        ``token_norms_`` of a fitted estimator.
    shape : (int, int), optional
        Rows and columns in which the tokens are laid out, for tokens that are patches of an image. At most ten of
        either have their numbers written in them. Default: bars in sequence.
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
        If `token_norms` is no vector of finite non-negative numbers, or there is another number of tokens than places.
    ModuleNotFoundError
        If matplotlib is not installed.

    Examples
    --------
    >>> axes = plot_token_norms([0.0, 1.5, 0.5, 0.0], shape=(2, 2), title="a 2 x 2 image")
    >>> [text.get_text() for text in axes.texts]
    ['unused', '1.5', '0.5', 'unused']
    """
    norms = as_numbers(token_norms, "token_norms", "model.token_norms_")
    if norms.ndim != 1:
        raise ValueError(f"token_norms must have shape (n_tokens,), got {norms.shape}")
    check_drawable(norms, "token_norms", least=0.0)
    if shape is not None and not is_grid(shape, norms.size):
        raise ValueError(f"shape must be that of {norms.size} tokens in rows and columns, got {shape}")
    axes = axes_for(ax)
    if shape is None:
        axes.bar(np.arange(len(norms)), norms, color="tab:blue")
        axes.set(xlabel="token position", ylabel="penalty carried", title=title)
        axes.set_ylim(bottom=0)  # also where all are zero
        return axes
    grid = norms.reshape(shape)
    image = axes.imshow(grid, cmap="Blues", vmin=0, vmax=largest(grid))
    if max(shape) <= _WRITTEN:
        for (row, column), value in np.ndenumerate(grid):
            shade = "white" if value > 0.6 * grid.max() else "black"
            written = f"{value:.2g}" if value else "unused"
            axes.text(column, row, written, ha="center", va="center", color=shade, fontsize=8)
    finish_map(axes, image, "penalty carried", xlabel="patch column", ylabel="patch row", title=title)
    return axes


def plot_path(path: Any, *, alpha: float | None = None, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw how much of the penalty each token, or weighting, carries along a path, from large to small ``alpha``.

    Parameters
    ----------
    path : PathResult
        What ``path`` of an estimator returns.
    alpha : float, optional
        Where to draw a vertical line, for example ``alpha_`` of a cross-validated estimator.
    title : str, optional
        Title of the axes.
    ax : matplotlib axes, optional
        Where to draw. Default: a new figure.

    Returns
    -------
    matplotlib axes
        One line for each token in its order. The nine tokens that carry most at any ``alpha`` have colours and are in
        the legend; others are grey.

    Raises
    ------
    TypeError
        If `path` is no ``PathResult``.
    ValueError
        If `path` has no alphas, or `alpha` is no positive finite number.
    ModuleNotFoundError
        If matplotlib is not installed.

    Examples
    --------
    >>> from convexformer import ConvexAttentionRegressor
    >>> X = np.random.default_rng(0).normal(size=(50, 6, 3))
    >>> path = ConvexAttentionRegressor().path(X, X[:, 2, 0] - 0.5 * X[:, 4, 1], n_alphas=4)
    >>> axes = plot_path(path, alpha=0.1)
    >>> [text.get_text() for text in axes.get_legend().texts][:2], len(axes.lines)
    (['token 2', 'token 4'], 7)
    """
    try:
        kind, norms = ("token", path.token_norms) if path.pool is None else ("weighting", path.weighting_norms)
    except AttributeError:
        raise TypeError(f"path must be what path(X, y) of an estimator returns, got {type(path).__name__}") from None
    if len(path.alphas) == 0:
        raise ValueError("path must hold at least one alpha, got none")
    if alpha is not None and not (is_real(alpha) and 0 < alpha < math.inf):
        raise ValueError(f"alpha must be a positive finite number, got {alpha!r}")
    axes = axes_for(ax)
    marker = "o" if len(path.alphas) == 1 else None  # a line of one point is nothing to see
    lines = axes.plot(path.alphas, norms, color="0.8", linewidth=0.8, marker=marker)
    most = norms.max(0)
    handles = {}
    for token, color in zip(np.argsort(-most, kind="stable"), _COLOURS, strict=False):
        if most[token] > 0:
            lines[token].set(color=color, linewidth=1.5, zorder=2.1)
            handles[f"{kind} {token}"] = lines[token]
    if alpha is not None:
        handles[f"alpha = {alpha:.3g}"] = axes.axvline(alpha, color="black", linestyle="--", linewidth=1.0)
    axes.set(xscale="log", xlabel="alpha", ylabel="penalty carried", title=title)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_inverted(True)
    axes.grid(alpha=0.3)
    if handles:
        axes.legend(handles.values(), handles, loc="upper left", bbox_to_anchor=(1, 1))  # beside the lines
    return axes


def plot_convergence(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    bound: float,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw objectives above a certified lower bound against seconds, on logarithmic axes.

    Parameters
    ----------
    curves : mapping of str to (seconds, objective)
        One curve per label, for example ``(history_.seconds, history_.primal)`` of a fit. Labels that start with the
        same word before a colon share a colour.
    bound : float
        The dual bound: no point of the model class can be below it.
    title : str, optional
        Title of the axes.
    ax : matplotlib axes, optional
        Where to draw. Default: a new figure.

    Returns
    -------
    matplotlib axes

    Raises
    ------
    TypeError
        If `curves` is no mapping, or a label is no str.
    ValueError
        If there is no curve, `bound` is no finite number, a label is empty or begins with an underscore, which legends
        leave out, or a curve is no pair of seconds and as many objectives, one of them finite.
    ModuleNotFoundError
        If matplotlib is not installed.

    Examples
    --------
    >>> curves = {"ours": ([0.1, 0.2], [0.75, 0.5]), "Adam: 0.01": ([0.1, 1.0], [0.9, 0.6])}
    >>> axes = plot_convergence(curves, bound=0.25)
    >>> axes.lines[0].get_ydata().tolist(), [text.get_text() for text in axes.get_legend().texts]
    ([0.5, 0.25], ['ours', 'Adam'])
    """
    if not isinstance(curves, Mapping):
        raise TypeError(
            "curves must map labels to pairs of seconds and objectives, as {'ours': (history.seconds, "
            f"history.primal)}} of a history_, got {type(curves).__name__}"
        )
    if not curves:
        raise ValueError("curves must hold at least one curve, got none")
    if not (is_real(bound) and math.isfinite(bound)):
        raise ValueError(f"bound must be a finite number, as model.certificate_.dual, got {bound!r}")
    points = {label: _checked(label, curve) for label, curve in curves.items()}
    axes = axes_for(ax)
    families = list(dict.fromkeys(label.split(":")[0] for label in curves))
    seen: set[str] = set()
    for label, (seconds, objective) in points.items():
        family = label.split(":")[0]
        above = np.maximum(objective - bound, 1e-16)
        axes.plot(
            np.maximum(seconds, 1e-3),
            above,
            color=f"C{families.index(family)}",
            label=None if family in seen else family,
            alpha=0.85,
            marker="o" if len(seconds) == 1 else None,  # a line of one point is nothing to see
        )
        seen.add(family)
    axes.set(xscale="log", yscale="log", xlabel="seconds", ylabel="objective - certified bound", title=title)
    axes.grid(alpha=0.3)
    axes.legend().set_in_layout(False)  # a high one would leave no room for the axes
    return axes


def _checked(label: str, curve: ArrayLike) -> NDArray[np.float64]:
    """Seconds and objectives of a curve."""
    if not isinstance(label, str):
        raise TypeError(f"curves must have labels that are str, got {label!r}")
    family = label.split(":")[0]
    if not family.strip() or family.startswith("_"):
        raise ValueError(f"curves must have labels that a legend shows, not empty and without '_' first, got {label!r}")
    refuse_masked(curve, f"curves[{label!r}]")
    try:
        points = np.asarray(curve, dtype=float)
    except (TypeError, ValueError):
        points = np.empty(0)
    if points.ndim != 2 or len(points) != 2 or not bool(np.isfinite(points).all(0).any()):
        raise ValueError(
            f"curves[{label!r}] must be seconds and as many objectives, at least one finite, got {curve!r:.80}; they "
            "are history.seconds and history.primal of a history_"
        )
    finite = np.isfinite(points).all(0)
    return points[:, finite] if finite.sum() == 1 else points  # of one point among others no line would be seen


def plot_attention_map(weights: ArrayLike, *, first: int = 0, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw how much each target position reads from each token.

    Parameters
    ----------
    weights : array-like of shape (n_targets, n_tokens)
        Non-negative, for example ``attention_map_`` of a fitted estimator.
    first : int, default=0
        Position of the first row and the first column.
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
        If the weights are not two-dimensional, there are none, some are negative or not finite, or `first` is no
        integer.
    ModuleNotFoundError
        If matplotlib is not installed.

    Examples
    --------
    >>> axes = plot_attention_map([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], first=1)
    >>> axes.images[0].get_array().shape, axes.get_xlabel()
    ((2, 3), 'position read from')
    """
    array = as_numbers(weights, "weights", "model.attention_map_")
    if array.ndim != 2:
        raise ValueError(f"weights must have shape (n_targets, n_tokens), got {array.shape}")
    check_drawable(array, "weights", least=0.0)
    if not is_integer(first):
        raise ValueError(f"first must be an integer, got {first!r}")
    axes = axes_for(ax)
    bottom, right = array.shape[0] + first - 0.5, array.shape[1] + first - 0.5
    image = axes.imshow(
        array,
        cmap="Blues",
        vmin=0,
        vmax=largest(array),
        extent=(first - 0.5, right, bottom, first - 0.5),
        aspect="equal" if max(array.shape) <= _SLENDER * min(array.shape) else "auto",
    )
    finish_map(axes, image, "weight", xlabel="position read from", ylabel="position of the output", title=title)
    return axes

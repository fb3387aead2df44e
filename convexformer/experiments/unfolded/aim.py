r"""Alternating inexact minimisation of two quadratics, with and without ReLU, and where it is proven to descend.

The figures 1 to 4 of Yang, Huang and Wipf, "Transformers from an Optimization Perspective", NeurIPS 2022, drawn anew:
:func:`draw_regions` shows the two kinds of regions of figures 1 and 3; :func:`compare_steps` and :func:`draw_aim` run
the experiment of figures 2 and 4, and tell besides at which iterations the theorems apply.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convexformer import plot
from convexformer.unfolded.aim import DescentCondition, aim_step, descent_condition
from convexformer.unfolded.regions import DescentRegion, clipping_index
from convexformer_solvers.draws import standard_normal
from convexformer_solvers.validation import check_counts, is_real

PRINTED_STEP = 0.05
PRINTED_RATIOS = (0.7, 1.5)
PRINTED_KAPPAS = (0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True, eq=False)
class QuadraticPair:
    r"""The quadratics of the experiment.

    .. math:: f(Y) = \|Y W_1\|_F^2 + \|Y - B_1\|_F^2, \qquad g(Y) = \|W_2 Y\|_F^2 + \|Y - B_2\|_F^2

    Parameters
    ----------
    w1 : Tensor of shape (d, d)
        The weights that mix features.
    w2 : Tensor of shape (n, n)
        The weights that mix tokens.
    b1, b2 : Tensor of shape (n, d)
        The points that draw.

    Examples
    --------
    >>> pair, start = QuadraticPair.random(n=6, d=4, seed=0)
    >>> start.shape
    torch.Size([6, 4])
    >>> gradient = pair.gradient_f(start) + pair.gradient_g(start)
    >>> step = -gradient / pair.lipschitz_h
    >>> bool(torch.isclose(pair.value(start + step) - pair.value(start), pair.change(start, step)))
    True
    """

    w1: Tensor
    w2: Tensor
    b1: Tensor
    b2: Tensor

    @classmethod
    def random(cls, n: int, d: int, seed: int) -> tuple[QuadraticPair, Tensor]:
        """Draw the quadratics and the first point as the authors' published program does.

        The weights are normal of standard deviation 0.1, `b1` and `b2` uniform on [0, 1], the first point uniform on
        [0, 2].

        Parameters
        ----------
        n, d : int
            The number of tokens and of features.
        seed : int
            Of the random numbers.

        Returns
        -------
        pair, start
        """
        generator = torch.Generator().manual_seed(seed)
        w1, w2 = (0.1 * standard_normal((m, m), generator, torch.float64) for m in (d, n))
        options: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "device": generator.device}
        b1, b2, start = (torch.rand(n, d, **options) for _ in range(3))
        return cls(w1, w2, b1, b2), 2 * start

    def gradient_f(self, y: Tensor) -> Tensor:
        """Gradient of f."""
        return 2 * (y @ self.w1 @ self.w1.T + y - self.b1)

    def gradient_g(self, y: Tensor) -> Tensor:
        """Gradient of g."""
        return 2 * (self.w2.T @ (self.w2 @ y) + y - self.b2)

    def value(self, y: Tensor) -> Tensor:
        """The sum f + g."""
        parts = y @ self.w1, self.w2 @ y, y - self.b1, y - self.b2
        return torch.stack([part.square().sum() for part in parts]).sum()

    def change(self, y: Tensor, step: Tensor) -> Tensor:
        """By how much a step changes f + g, without the cancellation in the difference of two values."""
        slope = ((self.gradient_f(y) + self.gradient_g(y)) * step).sum()
        return slope + (step @ self.w1).square().sum() + (self.w2 @ step).square().sum() + 2 * step.square().sum()

    @property
    def lipschitz_g(self) -> float:
        """The Lipschitz constant of the gradient of g."""
        return 2 * (float(torch.linalg.matrix_norm(self.w2, 2)) ** 2 + 1)

    @property
    def lipschitz_h(self) -> float:
        """The Lipschitz constant of the gradient of f + g."""
        return self.lipschitz_g + 2 * (float(torch.linalg.matrix_norm(self.w1, 2)) ** 2 + 1)


def run_aim(
    n: int = 500,
    d: int = 128,
    step: float | None = PRINTED_STEP,
    n_iterations: int = 100,
    seed: int = 0,
    *,
    nonnegative: bool = False,
) -> dict[str, Any]:
    """Run alternating inexact minimisation and tell at each iteration whether its theorem applies.

    Parameters
    ----------
    n, d : int, default=500 and 128
        The number of tokens and of features; the defaults are those of the source.
    step : float, optional
        Both step lengths, by default the 0.05 of the source. None stands for the longest that the theorems allow, one
        over the Lipschitz constant of the gradient of f + g.
    n_iterations : int, default=100
        The number of steps; the default is that of the source, 200 half-steps.
    seed : int, default=0
        Of the random problem.
    nonnegative : bool, default=False
        Whether each step ends with a ReLU: Algorithm 2 and Theorem 5.1 in place of Algorithm 1 and Theorem 4.1.

    Returns
    -------
    dict
        What JSON can hold. ``n``, ``d``, ``seed``, ``n_iterations``, ``nonnegative`` and ``step`` as used;
        ``lipschitz_g`` and ``lipschitz_h``; ``minimum``, the least value of f + g, over non-negative points if
        `nonnegative`. ``energy``, the value before each iteration and after the last. Of each iteration: ``change`` of
        the value, ``rose``, whether it rose by more than the rounding error of the value, ``ratio`` of gradients,
        ``bound`` on it, and ``applies``, whether the theorem does. ``n_outside``, the number of
        iterations at which it does not, ``n_rises_inside`` and ``n_rises_outside``.

    Raises
    ------
    ValueError
        If a count is no positive integer, or the step is neither None nor positive and finite.

    Examples
    --------
    >>> report = run_aim(n=20, d=8, step=None, n_iterations=6)
    >>> report["applies"], report["n_rises_inside"]
    ([True, True, True, True, False, False], 0)
    """
    check_counts(n=n, d=d, n_iterations=n_iterations)
    if not (step is None or (is_real(step) and 0 < step < float("inf"))):
        raise ValueError(f"step must be a positive finite number or None, got {step!r}")
    pair, y = QuadraticPair.random(n, d, seed)
    constants: dict[str, Any] = {"lipschitz_g": pair.lipschitz_g, "lipschitz_h": pair.lipschitz_h}
    step = 1 / pair.lipschitz_h if step is None else step
    gradients = pair.gradient_f, pair.gradient_g
    report: dict[str, Any] = {
        "n": n,
        "d": d,
        "seed": seed,
        "n_iterations": n_iterations,
        "nonnegative": nonnegative,
        "step": step,
        **constants,
        "minimum": least_value(pair, y, nonnegative=nonnegative),
        "energy": [float(pair.value(y))],
        **{name: [] for name in ("change", "rose", "ratio", "bound", "applies")},
    }
    for _ in range(n_iterations):
        condition = descent_condition(y, *gradients, step, step, nonnegative=nonnegative, **constants)
        end = aim_step(y, *gradients, step, step, nonnegative=nonnegative)
        _record(report, condition, float(pair.change(y, end - y)), float(pair.value(end)))
        y = end
    applies, rose = np.array(report["applies"]), np.array(report["rose"])
    report["n_outside"] = int((~applies).sum())
    report["n_rises_inside"], report["n_rises_outside"] = int((rose & applies).sum()), int((rose & ~applies).sum())
    return report


def _record(report: dict[str, Any], condition: DescentCondition, change: float, energy: float) -> None:
    """Add an iteration to the report."""
    rounding = torch.finfo(torch.float64).eps * report["energy"][-1]
    row = {
        "energy": energy,
        "change": change,
        "rose": change > rounding,
        "ratio": condition.ratio,
        "bound": condition.bound,
        "applies": condition.holds,
    }
    for name, value in row.items():
        report[name].append(value)


def least_value(pair: QuadraticPair, y: Tensor, *, nonnegative: bool) -> float:
    r"""The minimum of f + g, to the rounding error of its value.

    Gradient steps of length :math:`1 / L_h`, each projected if `nonnegative`, are taken until the strong convexity of
    f + g, of constant 4, proves that a step :math:`y_+ - y` ends less than
    :math:`\|L_h (y_+ - y)\|^2 / 8` above the minimum and this is less than the rounding error.

    Parameters
    ----------
    pair : QuadraticPair
        The functions f and g.
    y : Tensor of shape (n, d)
        Where to start.
    nonnegative : bool
        Whether to minimise over non-negative points.

    Returns
    -------
    float

    Examples
    --------
    >>> pair, start = QuadraticPair.random(n=6, d=4, seed=0)
    >>> bool(least_value(pair, start, nonnegative=False) < pair.value(start))
    True
    """
    lipschitz, convexity = pair.lipschitz_h, 4.0  # each of the two squared distances adds 2 to the Hessian
    while True:
        end = y - (pair.gradient_f(y) + pair.gradient_g(y)) / lipschitz
        end = end.clamp(min=0) if nonnegative else end
        value = float(pair.value(end))
        above = float((lipschitz * (end - y)).square().sum()) / (2 * convexity)
        if above <= torch.finfo(torch.float64).eps * value:
            return value
        y = end


def compare_steps(n: int = 500, d: int = 128, n_iterations: int = 100, seed: int = 0) -> dict[str, Any]:
    """Run both algorithms with the step of the source and with the longest that the theorems allow.

    Parameters
    ----------
    n, d, n_iterations, seed : int, default=500, 128, 100 and 0
        As :func:`run_aim` takes them, with the same defaults.

    Returns
    -------
    dict
        ``runs``, a list of four reports of :func:`run_aim`: Algorithm 1 with either step, then Algorithm 2.

    Raises
    ------
    ValueError
        If a count is no positive integer.

    Examples
    --------
    >>> report = compare_steps(n=20, d=8, n_iterations=2)
    >>> [(run["nonnegative"], round(run["step"], 2)) for run in report["runs"]]
    [(False, 0.05), (False, 0.16), (True, 0.05), (True, 0.16)]
    """
    return {
        "runs": [
            run_aim(n, d, step, n_iterations, seed, nonnegative=nonnegative)
            for nonnegative in (False, True)
            for step in (PRINTED_STEP, None)
        ]
    }


_COLOURS = ("#D55E00", "#0072B2")  # vermilion and blue of Okabe and Ito, told apart by all
_BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "fontsize": 9}


def draw_aim(report: dict[str, Any], path: Path) -> None:
    """Draw the energy by iteration, where it rose, and where the theorems apply.

    Parameters
    ----------
    report : dict
        That of :func:`compare_steps`.
    path : Path
        The PNG file to write.
    """
    runs = report["runs"]
    figure, axes = plot.new_figure(2, 2, figsize=(12, 10))
    figure.suptitle(
        "A step along the gradient of f, then one along that of g: does it lower h = f + g? "
        f"({runs[0]['n']} tokens of {runs[0]['d']} features)\n"
        "It must where a theorem applies: no step longer than 1 / L (L: Lipschitz constant of the gradient of h) and "
        "the ratio below the dashed line"
    )
    for column, nonnegative in enumerate((False, True)):
        chosen = [run for run in runs if run["nonnegative"] == nonnegative]
        above, below = axes[column], axes[2 + column]
        above.set(yscale="log", ylabel="h above its least value")
        below.set(ylabel="|grad f| / |grad h|, relative to its bound")
        above.set_title("Algorithm 2: a ReLU ends each iteration" if nonnegative else "Algorithm 1: no ReLU")
        below.set_title(f"What Theorem {'5.1' if nonnegative else '4.1'} asks for")
        for run, colour in zip(chosen, _COLOURS, strict=True):
            _draw_line(above, run, np.array(run["energy"]) - run["minimum"], colour)
            _draw_line(below, run, np.array(run["ratio"]) / np.array(run["bound"]), colour)
        below.axhline(1, color="black", linestyle="--", label="largest ratio at which the theorem applies")
        below.set_ylim(bottom=0)
        for ax in (above, below):
            ax.set_xlabel("iteration (two half-steps)")
            ax.grid(alpha=0.3)
        for marker, label in (("o", "the theorem applies: h does not rise"), ("x", "h rises, however little")):
            below.plot([], [], marker, color="black", label=label)
        below.legend(**_BELOW)
    plot.save_figure(figure, path)


def _draw_line(ax: Any, run: dict[str, Any], values: NDArray[np.float64], colour: str) -> None:
    """Draw what an iteration starts with, and mark those at which the theorem applies and those that raise h."""
    applies, rose = np.array(run["applies"]), np.array(run["rose"])
    label = (
        f"step {run['step']:.3g} = {run['step'] * run['lipschitz_h']:.2g} / L: the theorem applies at {applies.sum()} "
        f"of {len(rose)} iterations, h rises at {rose.sum()}"
    )
    ax.plot(values, color=colour, label=label)
    iterations = np.arange(len(rose))
    for chosen, marker in ((applies, "o"), (rose, "x")):
        ax.plot(iterations[chosen], values[: len(rose)][chosen], marker, color=colour)


def draw_regions(path: Path) -> None:
    """Draw, in two dimensions, where the gradients are known to suit the theorems.

    Left and middle, the regions around two minimisers for ratios of 0.7 and 1.5 (figure 1 of the source); right, what
    the ReLU may cut off a gradient step on a quadratic h, for kappa from 0.2 to 0.8 (figure 3).

    Parameters
    ----------
    path : Path
        The PNG file to write.
    """
    figure, axes = plot.new_figure(1, 3, figsize=(16, 7))
    figure.suptitle(
        "Left and middle: points at which |grad f| is sure to be at most C |grad h|, where $k = c_h C / L_f$.\n"
        "Right: points from which a ReLU cuts at most the share $\\kappa$ off the squared length of a step along the "
        "gradient of a quadratic h"
    )
    for ax, ratio in zip(axes, PRINTED_RATIOS, strict=False):
        _draw_descent_region(ax, ratio)
    _draw_clipping(axes[2])
    for ax, n_columns in zip(axes, (2, 2, 3), strict=True):
        ax.set(xlabel="first coordinate of y", ylabel="second coordinate of y", aspect="equal", anchor="N")
        ax.legend(ncol=n_columns, **_BELOW)
    plot.save_figure(figure, path)


def _grid(low: float, high: float, n_ticks: int) -> tuple[NDArray[np.float64], Tensor]:
    """Ticks of a square grid, and its points of shape (n, n, 2)."""
    ticks = np.linspace(low, high, n_ticks)
    return ticks, torch.as_tensor(np.stack(np.meshgrid(ticks, ticks), axis=-1))


def _draw_descent_region(ax: Any, ratio: float) -> None:
    optimum_f, optimum_h = (torch.tensor([x, 0.0], dtype=torch.float64) for x in (-0.5, 0.5))
    region = DescentRegion(optimum_f, optimum_h, ratio)
    ticks, points = _grid(-3.5, 3.5, 501)
    inside = region.contains(points).double()
    ax.contourf(ticks, ticks, inside, levels=[0.5, 1.5], colors=["#56B4E9"], alpha=0.6)
    ax.contour(ticks, ticks, inside, levels=[0.5], colors=["#0072B2"])
    ax.plot([], [], "s", color="#56B4E9", markersize=10, label="$|y - y_f| \\leq k |y - y_h|$")
    assert region.centre is not None
    for point, marker, colour, label in (
        (optimum_f, "^", "black", "$y_f$, minimiser of f"),
        (optimum_h, "v", "#D55E00", "$y_h$, minimiser of h = f + g"),
        (region.centre, "+", "black", "centre of the disc"),
    ):
        ax.plot(*point.numpy(), marker, color=colour, markersize=9, linestyle="none", label=label)
    kind = "all but a disc, which holds $y_h$" if region.is_complement else "a disc, which holds $y_f$"
    ax.set(title=f"k = {ratio}: {kind}")


def _draw_clipping(ax: Any) -> None:
    curvature = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    optimum = torch.tensor([1.0, -0.5], dtype=torch.float64)
    step = 1 / float(torch.linalg.matrix_norm(curvature, 2))
    ticks, points = _grid(0.0, 3.0, 161)
    index = [[clipping_index(step * curvature @ (y - optimum), y) for y in row] for row in points]
    colours = ["#fde725", "#5ec962", "#21918c", "#3b528b"]  # of viridis, whose lightness falls evenly
    for kappa, colour in list(zip(PRINTED_KAPPAS, colours, strict=True))[::-1]:
        ax.contourf(ticks, ticks, index, levels=[-kappa, 0.5], colors=[colour])
    for kappa, colour in zip(PRINTED_KAPPAS, colours, strict=True):
        ax.plot([], [], "s", color=colour, markersize=10, label=rf"$\kappa$ = {kappa} will do")
    ax.plot([], [], "s", color="white", markeredgecolor="black", markersize=10, label="none of these will do")
    along_axis = float(optimum[0] + curvature[0, 1] / curvature[0, 0] * optimum[1])
    ax.plot(
        along_axis,
        0,
        "v",
        color="#D55E00",
        markersize=9,
        linestyle="none",
        clip_on=False,
        label="minimiser of h, y ≥ 0",
    )
    ax.set(title="What a ReLU may cut off: where $D(\\alpha \\nabla h(y); y) \\geq -\\kappa$")

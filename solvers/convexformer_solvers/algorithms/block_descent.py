"""Exact block coordinate descent in a Gram matrix (Qin, Scheinberg and Goldfarb 2013)."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController
from torch import Tensor

from convexformer_solvers.points import Point
from convexformer_solvers.program import Program

from .base import PrimalDualSolver


class _OneBlasThread:
    """Numpy's BLAS on one thread, as its idle threads would keep torch's from their cores.

    The limit is one of the process: threads that are in it at the same time share it, and the last takes it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_inside = 0

    @cached_property
    def _libraries(self) -> Any:
        return ThreadpoolController()  # looks for the loaded libraries

    def __enter__(self) -> None:
        with self._lock:
            if self._n_inside == 0:
                self._limit = self._libraries.limit(limits=1, user_api="blas")
            self._n_inside += 1

    def __exit__(self, kind: object = None, error: object = None, traceback: object = None) -> None:
        with self._lock:
            self._n_inside -= 1
            if self._n_inside == 0:
                self._limit.restore_original_limits()
        if isinstance(error, np.linalg.LinAlgError | FloatingPointError):  # as the rest of the package raises it
            raise torch.linalg.LinAlgError(str(error)) from error


_numpy_on_one_thread = _OneBlasThread()


class GramPoint(NamedTuple):
    """Coefficients of the set and the gradient of its loss with the opposite sign, both of shape ``(p,)``."""

    coef: NDArray
    correlation: NDArray


class GramProgram:
    r"""The program on some blocks with the squared loss and one output, known by products of their columns alone.

    .. math:: \tfrac12 (s - 2 q' z + z' G z) + \alpha \sum_g \|z_g\|_2

    `gram` is ``G`` of shape ``(p, p)``, `target` is ``q``, both averaged over the samples, `square` is ``s``; a block
    has `width` columns. Eigenvectors of blocks that another program has in the same places are taken from `known`.
    """

    def __init__(
        self, gram: NDArray, target: NDArray, square: float, width: int, alpha: float, known: GramProgram | None = None
    ) -> None:
        self.gram, self.target, self.square, self.width, self.alpha = gram, target, square, width, alpha
        self._blocks = [slice(first, first + width) for first in range(0, len(target), width)]
        self._eigen: list[tuple[NDArray, NDArray]] = []
        with _numpy_on_one_thread:
            for place, block in enumerate(self._blocks if width > 1 else []):
                own = gram[block, block]
                old = known is not None and place < len(known._blocks) and np.array_equal(known.gram[block, block], own)
                self._eigen.append(known._eigen[place] if known is not None and old else np.linalg.eigh(own))

    def at(self, coef: NDArray) -> GramPoint:
        return GramPoint(coef, self.target - self.gram @ coef)

    def norms(self, values: NDArray) -> NDArray:
        return np.linalg.norm(values.reshape(-1, self.width), axis=1)

    def primal(self, point: GramPoint) -> float:
        unexplained = self.square - point.coef @ (self.target + point.correlation)
        return float(0.5 * unexplained + self.alpha * self.norms(point.coef).sum())

    def dual(self, point: GramPoint) -> float:
        """Dual objective of the residuals, scaled until they are feasible."""
        scale = self.alpha / max(self.alpha, self.norms(point.correlation).max())
        unexplained = self.square - point.coef @ (self.target + point.correlation)
        return float(scale * (self.square - point.coef @ self.target) - 0.5 * scale**2 * unexplained)

    def swept(self, point: GramPoint, n_sweeps: int) -> list[GramPoint]:
        coef, correlation, result = point.coef.copy(), point.correlation.copy(), []
        sweep = self._soft_thresholds if self.width == 1 else self._sweep
        for _ in range(n_sweeps):
            sweep(GramPoint(coef, correlation))
            result.append(GramPoint(coef.copy(), correlation.copy()))
        return result

    def _sweep(self, point: GramPoint) -> None:
        """Minimise over one block after the other, in place."""
        for block, (spectrum, basis) in zip(self._blocks, self._eigen, strict=True):
            old, correlation = point.coef[block], point.correlation[block]
            size = math.sqrt(old @ old)
            if size == 0 and correlation @ correlation <= self.alpha**2:
                continue
            new = basis @ _minimiser(spectrum, (correlation + self.gram[block, block] @ old) @ basis, self.alpha, size)
            move = new - old
            point.coef[block] = new
            point.correlation[:] -= move @ self.gram[block]

    def _soft_thresholds(self, point: GramPoint) -> None:
        """The same where each block is one column."""
        coef, correlation = point
        for j, row in enumerate(self.gram):
            old, slope = coef[j], correlation[j] + row[j] * coef[j]
            excess = abs(slope) - self.alpha
            if excess > 0 or old != 0:
                coef[j] = math.copysign(excess, slope) / row[j] if excess > 0 < row[j] else 0.0
                correlation -= (coef[j] - old) * row

    def extrapolated(self, point: GramPoint, recent: Sequence[GramPoint]) -> GramPoint:
        """Anderson's combination of recent points, where it lowers the objective."""
        coefs, correlations = (np.stack(part) for part in zip(*recent, strict=True))
        moves = np.diff(coefs, axis=0)
        weights = _solved(moves @ moves.T, np.ones(len(moves)))
        if not weights.sum() > 0:
            return point
        weights /= weights.sum()
        better = GramPoint(weights @ coefs[1:], weights @ correlations[1:])
        return better if self.primal(better) < self.primal(point) else point

    def polished(self, point: GramPoint) -> tuple[GramPoint, GramPoint]:
        """The best primal and dual points of these and of best sizes, or norms of alpha, on the active blocks."""
        active = self.norms(point.coef).nonzero()[0]
        if len(active) == 0:
            return point, point
        units, images = np.zeros((2, len(active), len(self.target)))
        for unit, image, block in zip(units, images, (self._blocks[position] for position in active), strict=True):
            unit[block] = point.correlation[block] / np.linalg.norm(point.correlation[block])
            image[:] = unit[block] @ self.gram[block]
        system = images @ units.T
        sizes = np.maximum(_solved(system, units @ self.target - self.alpha), 0)
        move = _solved(system, self.norms(point.correlation)[active] - self.alpha)
        dual = GramPoint(point.coef + move @ units, point.correlation - move @ images)
        candidates = point, GramPoint(sizes @ units, self.target - sizes @ images), dual
        return min(candidates, key=self.primal), max(candidates, key=self.dual)


def _solved(system: NDArray, right: NDArray) -> NDArray:
    """Solution of a slightly regularised positive semidefinite system; zero where that is all zero."""
    scale = np.trace(system)
    if not scale > 0:
        return np.zeros_like(right)
    return np.linalg.solve(system + 1e-12 * scale * np.eye(len(system)), right)


def _minimiser(spectrum: NDArray, slope: NDArray, alpha: float, size: float) -> NDArray:
    """Minimiser of ``z' diag(spectrum) z / 2 - slope' z + alpha |z|``; `size` is a guess of its norm.

    Newton steps on the inverse of the stationary point's norm in units of its size converge from any side.
    """
    squares = slope * slope
    if slope @ slope <= alpha**2:
        return np.zeros_like(slope)
    for _ in range(50):
        inverse = 1 / (spectrum * size + alpha)
        terms = squares * inverse
        total = terms @ inverse
        terms *= inverse * inverse
        bend = terms @ spectrum
        if bend <= 0:  # the block carries no quadratic: nothing but rounding
            break
        step = (1 - total**-0.5) * total / bend * total**0.5
        size = max(size + step, 0.0)
        if abs(step) <= 1e-3 * size:  # the next sweep comes back to it
            break
    return slope * (size / (spectrum * size + alpha))


class State(NamedTuple):
    """What sweeps leave."""

    inner: GramProgram
    primal: GramPoint
    dual: GramPoint
    gap: float
    sweeping: GramPoint  # where the next sweep starts
    recent: tuple[GramPoint, ...] = ()  # after the sweeps since the last extrapolation


class BlockDescent(PrimalDualSolver):
    """Exact minimisation over one block after the other in the Gram matrix of the columns (Qin et al. 2013).

    Each block is minimised over in its eigenbasis by Newton steps for its length. A step takes some sweeps, on the CPU,
    and a polish; every second step extrapolates the last sweeps. Memory and time of a sweep grow with the square of the
    number of columns: this is for working sets.
    """

    name = "block_descent"

    def __init__(self, n_sweeps: int = 3) -> None:
        self.n_sweeps = n_sweeps

    def unmet_requirement(self, program: Program) -> str | None:
        n_outputs = program.y.shape[1]
        if not (program.loss.quadratic and program.penalty.euclidean and n_outputs == 1):
            found = f"{program.loss!r}, {program.penalty!r} and {n_outputs} outputs"
            return f"the squared loss, the group-l2 penalty and one output, not {found}"
        return super().unmet_requirement(program)

    def init_again(self, program: Program, start: Point, previous: State | None) -> State:
        full_gram = program.map.full_gram
        gram = program.remembered("gram", lambda: full_gram(program.weight, program.block_means).cpu().numpy())
        products = program.null_correlation.flatten().cpu().numpy()
        if previous is not None and start.correlation is not None:
            # Rounding of the Gram matrix then goes by the distance from the point whose correlation is known better.
            products = start.correlation.flatten().cpu().numpy() + gram @ previous.dual.coef
        square = float(program.mean(program.null_dual_point.square().sum(1)))
        width, known = program.coef_shape[-2], None if previous is None else previous.inner
        with _numpy_on_one_thread, np.errstate(over="raise", invalid="raise"):
            inner = GramProgram(gram, products, square, width, program.alpha, known)
            point = inner.at(start.coef.to(program.y).flatten().cpu().numpy().copy())
        return State(inner, point, point, math.inf, point)

    def on_other_blocks(self, state: State, moved: Callable[[Tensor], Tensor]) -> State | None:
        dual = state.dual
        coef = moved(torch.from_numpy(dual.coef).view(-1, state.inner.width, 1)).numpy().ravel()
        if np.count_nonzero(coef) < np.count_nonzero(dual.coef):  # the dual point needs blocks that have left
            return None
        return state._replace(dual=GramPoint(coef, dual.correlation))

    def step(self, program: Program, state: State) -> State:
        inner = state.inner
        with _numpy_on_one_thread, np.errstate(over="raise", invalid="raise"):
            swept = inner.swept(state.sweeping, self.n_sweeps)
            sweeping, recent = swept[-1], (*state.recent, *swept)
            if state.recent:
                sweeping, recent = inner.extrapolated(sweeping, recent), ()
            primal, dual = inner.polished(sweeping)
            gap = inner.primal(primal) - inner.dual(dual)
        return State(inner, primal, dual, gap, sweeping, recent)

    def point(self, program: Program, state: State) -> Point:
        coef, behind, correlation = (
            torch.as_tensor(part).to(program.y).view(program.coef_shape)
            for part in (state.primal.coef, state.dual.coef, state.dual.correlation)
        )
        both = torch.cat([coef, behind], dim=-1)
        pred = program.map.matvec(both)
        if program.fit_intercept:
            pred = pred + program.weight @ (program.y - pred)
        return Point(coef, pred=pred[:, 1:], fitted=pred[:, :1], correlation=correlation)

    def gap_estimate(self, program: Program, state: State) -> float:
        return state.gap

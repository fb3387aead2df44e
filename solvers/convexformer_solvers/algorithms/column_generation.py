"""Column generation, the fully corrective conditional gradient method (Jaggi 2013), for gauges of many atoms."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.sparse import csc_array, hstack
from torch import Tensor

from convexformer_solvers.points import Point, completed
from convexformer_solvers.program import Program
from convexformer_solvers.rounding import EPS

from .base import Solver


class _State(NamedTuple):
    atoms: csc_array  # one column of coefficients per atom
    weights: np.ndarray  # (m,)
    intercept: Tensor
    pred: Tensor  # (N, c), intercept included
    gap: float  # about: the loss of the dual bound by scaling the dual point until it is feasible
    ended: bool = False  # neither a new atom nor a smaller gap


class ColumnGeneration(Solver):
    r"""Non-negative weights on a growing list of atoms, in all of which the objective is minimised anew.

    With atoms :math:`a` of the penalty's unit ball the program is :math:`\min_{\mu \ge 0} P(\sum_a \mu_a a)` with the
    penalty :math:`\sum_a \mu_a`. Each iteration adds the atom that violates its constraint most of each violated
    group, and solves for all weights by L-BFGS-B (scipy), in float64. Finitely many atoms (``RowStochastic``) take
    finitely many steps; elsewhere the end is slow.

    Examples
    --------
    >>> ColumnGeneration().name
    'column_generation'
    """

    name = "column_generation"
    requires_of_penalty = ("violating_atoms",)

    def init(self, program: Program, start: Point) -> _State:
        # The atoms of a start are not known: it serves as a dual point alone.
        exact = program.with_float64_targets()
        coef, intercept, *_ = completed(exact, start)
        assert intercept is not None
        none, pred = csc_array((coef.numel(), 0)), exact.map.matvec(coef) + intercept
        return _with_atoms(exact, _State(none, np.zeros(0), intercept, pred, 0.0))

    def step(self, program: Program, state: _State) -> _State:
        exact = program.with_float64_targets()
        solved = _solved(exact, state)
        more = _with_atoms(exact, solved)
        # Atoms that violate their constraint by rounding come and go for ever. Where rounding ends the minimisation at
        # once, predictions stay and atoms get no weight. Neither counts; the first atoms do.
        more_than_rounding = more.gap > 8 * EPS * exact.null_value and not torch.equal(solved.pred, state.pred)
        counts = state.atoms.shape[1] == 0 or more_than_rounding
        is_new = more.atoms.shape[1] > solved.atoms.shape[1] and counts
        return more._replace(ended=not is_new and more.gap >= state.gap)

    def point(self, program: Program, state: _State) -> Point:
        exact, dtype = program.with_float64_targets(), program.y.dtype
        theta = -program.loss.gradient(state.pred, exact.y)
        weights = state.weights
        if dtype != torch.float64:  # multiples of one power of two, so that sums of them are exact in the precision
            unit = np.ldexp(torch.finfo(dtype).eps, np.frexp(weights.sum())[1])
            weights = np.rint(weights / unit) * unit
        coef = _coef(exact, state.atoms, weights)
        return Point(coef.to(dtype), state.intercept.to(dtype), theta)

    def gap_estimate(self, program: Program, state: _State) -> float | None:
        return state.gap or None

    def finished(self, state: _State) -> bool:
        return state.ended


def _coef(program: Program, atoms: csc_array, weights: np.ndarray) -> Tensor:
    return torch.as_tensor(atoms @ weights).to(program.y).reshape(program.coef_shape)


def _with_atoms(program: Program, state: _State) -> _State:
    """The state with the atoms that its predictions ask for, at weight zero."""
    correlation = program.weighted_adjoint(-program.loss.gradient(state.pred, program.y))
    found = program.penalty.violating_atoms(correlation, program.alpha)
    excess = max(float(found.excess.max()), 0.0) if len(found.excess) else 0.0
    gap = excess * program.alpha * float(state.weights.sum())
    index, value = found.position.numpy(force=True), found.value.numpy(force=True)
    pointers = np.arange(len(index) + 1) * index.shape[1]
    new = csc_array((value.ravel(), index.ravel(), pointers), shape=(correlation.numel(), len(index)))
    known = set(_keys(state.atoms))
    new = new[:, np.array([key not in known for key in _keys(new)], dtype=bool)]
    atoms = hstack([state.atoms, new], format="csc")
    weights = np.concatenate([state.weights, np.zeros(new.shape[1])])
    return state._replace(atoms=atoms, weights=weights, gap=gap)


def _keys(atoms: csc_array) -> list[bytes]:
    """What tells atoms from each other."""
    atoms.sort_indices()
    parts = zip(*(np.split(part, atoms.indptr[1:-1]) for part in (atoms.indices, atoms.data)), strict=True)
    return [index.astype(np.int64).tobytes() + value.tobytes() for index, value in parts][: atoms.shape[1]]


def _solved(program: Program, state: _State) -> _State:
    """The state with the best weights of its atoms and the best intercept; atoms of no weight are dropped."""
    if state.atoms.shape[1] == 0:
        intercept = program.null_intercept
        return state._replace(intercept=intercept, pred=program.constant_pred(intercept))
    n_atoms, scale = state.atoms.shape[1], 1 / program.null_value
    sizes, predicted, correlated = _products(program, state.atoms)
    # Predictions that change by `step` about end the descent. In such units features and targets may be in any.
    slope = float(program.mean(program.null_dual_point.abs().sum(1)))
    step = program.null_value / slope if slope > 0 else 1.0
    units = step / np.concatenate([np.where(sizes > 0, sizes, 1.0), np.ones(program.y.shape[1])])

    def objective(variables: np.ndarray) -> tuple[float, np.ndarray]:
        weights, intercept = torch.as_tensor(units * variables).to(program.y).split([n_atoms, program.y.shape[1]])
        pred = predicted(weights) + intercept
        values = program.weight[:, None] * program.loss.gradient(pred, program.y)
        slopes = torch.cat([program.alpha + correlated(values), values.sum(0)])
        value = program.loss_value(pred) + program.alpha * weights.sum()
        return scale * float(value), scale * units * slopes.numpy(force=True)

    free = (None, None) if program.fit_intercept else (0.0, 0.0)
    bounds = [(0.0, None)] * n_atoms + [free] * program.y.shape[1]
    start = np.concatenate([state.weights, state.intercept.numpy(force=True)]) / units
    options = {"ftol": 0.0, "gtol": 0.0}  # until rounding ends it: the dual bound depends on small slopes
    variables = units * minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
    weights, constant = np.split(variables, [n_atoms])
    weights[weights <= 2**12 * EPS * weights.max()] = 0.0
    intercept = torch.as_tensor(constant).to(program.y)
    pred = program.map.matvec(_coef(program, state.atoms, weights)) + intercept
    kept = np.flatnonzero(weights)
    return state._replace(atoms=state.atoms[:, kept], weights=weights[kept], intercept=intercept, pred=pred)


def _products(program: Program, atoms: csc_array) -> tuple[np.ndarray, Callable[..., Tensor], Callable[..., Tensor]]:
    """Sizes of the predictions of atoms, predictions of weights of these, and products of values with each atom's.

    Predictions of all atoms are kept where they are no more numbers than the data, or beside data on a disk than there
    is room for.
    """
    linear_map, limit, one = program.map, program.map.memory_limit or np.inf, np.ones(1)
    images = (linear_map.matvec(_coef(program, atoms[:, [k]], one)) for k in range(atoms.shape[1]))
    room = linear_map.n_stored if linear_map.in_memory else limit / program.y.element_size()
    if atoms.shape[1] * program.y.numel() <= room:
        kept = torch.stack(list(images), dim=-1)
        sizes = (program.weight @ kept.square().sum(1)).sqrt().numpy(force=True)
        return sizes, lambda weights: kept @ weights, lambda values: torch.einsum("ic,icm->m", values, kept)
    adjoint, sizes = atoms.T.tocsr(), np.array([float(program.mean(image.square().sum(1))) for image in images]) ** 0.5

    def correlated(values: Tensor) -> Tensor:
        return torch.as_tensor(adjoint @ linear_map.rmatvec(values).flatten().numpy(force=True)).to(program.y)

    return sizes, lambda weights: linear_map.matvec(_coef(program, atoms, weights.numpy(force=True))), correlated

"""Small programs, and reference values computed without the package, for the tests of the solver layer."""

from __future__ import annotations

import itertools

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import settings
from scipy.special import huber, logsumexp, xlogy

from convexformer_solvers import (
    LOSSES,
    PENALTIES,
    DenseMap,
    Fista,
    GatedMap,
    Loss,
    Program,
    SolverResult,
    get_loss,
    get_penalty,
    solve,
)
from convexformer_solvers.rates import Rates

# About those of one core; for tests that count iterations, as plans go by rates.
STEADY_RATES = Rates(product=2.0**35, read=2.0**32, calls=2.0**19)

PROPERTY = settings(deadline=None, derandomize=True, max_examples=25, database=None)

LOSS_NAMES = sorted(LOSSES)
PENALTY_NAMES = sorted(PENALTIES)
BOTH = (False, True)


def accepts(loss: Loss, n_outputs: int) -> bool:
    """Whether the loss is defined for that many outputs (cross-entropy needs two)."""
    try:
        loss.check_target(loss.example_target(20, n_outputs, torch.Generator().manual_seed(0)))
    except ValueError:
        return False
    return True


def randn(*shape, seed=0, scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=dtype)


def random_weight(n, seed=0, zeros=True):
    """Uneven weights that do not sum to one, some of them zero."""
    weight = np.random.default_rng(seed).uniform(0.2, 3.0, n)
    if zeros:
        weight[1::7] = 0.0
    return torch.as_tensor(weight)


def valid_target(loss, n, c, generator, weight=None):
    """Random targets that the loss accepts; a handful of counts may all be zero."""
    for _ in range(200):
        y = loss.example_target(n, c, generator).double()
        try:
            loss.check_target(y if weight is None else y[weight > 0])
        except ValueError:
            continue
        return y
    raise AssertionError(f"{loss} refuses its own example targets")


def make_program(
    loss="squared",
    penalty="group_l2",
    *,
    gated=False,
    intercept=False,
    weighted=False,
    n=16,
    blocks=3,
    d=2,
    c=2,
    ratio=0.3,
    seed=0,
    scale=1.0,
):
    """A random program with ``alpha = ratio * alpha_max``."""
    loss, penalty = get_loss(loss), get_penalty(penalty)
    generator = torch.Generator().manual_seed(seed)
    data = scale * torch.randn((n, blocks, d), generator=generator, dtype=torch.float64)
    linear_map = DenseMap(data)
    if gated:
        masks = torch.rand((n, 3), generator=generator) > 0.4
        masks[0] = True
        linear_map = GatedMap(data, masks)
    weight = random_weight(n, seed) if weighted else None
    y = valid_target(loss, n, c, generator, weight)
    program = Program(linear_map, y, loss, penalty, 1.0, weight, intercept)
    return program.with_alpha(ratio * program.alpha_max if program.alpha_max > 0 else ratio)


def many_blocks(loss="squared", gated=False, ratio=0.1):
    """Many more features than samples, in 160 blocks of which few matter."""
    n_samples, shape = (500, (4, 64)) if gated else (150, (160, 8))
    data = randn(n_samples, *shape)
    linear_map = GatedMap(data, randn(n_samples, 40, seed=4) > 0) if gated else DenseMap(data)
    y = DenseMap(data[:, :2]).matvec(randn(2, shape[1], 1, seed=2)) + randn(n_samples, 1, seed=3)
    y = y.sign() if loss == "logistic" else y / y.std()
    program = Program(linear_map, y, get_loss(loss), get_penalty("group_l2"), 1.0, fit_intercept=True)
    return program.with_alpha(ratio * program.alpha_max)


def cases(*flags):
    """Parameters of every loss times penalty times booleans."""
    params = []
    for loss, penalty, *values in itertools.product(LOSS_NAMES, PENALTY_NAMES, *([False, True] for _ in flags)):
        names = [flag for flag, value in zip(flags, values, strict=True) if value]
        params.append(pytest.param(loss, penalty, *values, id="-".join([loss, penalty, *names])))
    return params


def in_turn(first=0):
    """Parameters of every loss with one of the penalties, which take turns; the turns begin with that number."""
    return [(loss, PENALTY_NAMES[place % len(PENALTY_NAMES)]) for place, loss in enumerate(LOSS_NAMES, first)]


def fit(program, tol=1e-9, max_iter=10_000, **options) -> SolverResult:
    return solve(program, Fista(), tol=tol, max_iter=max_iter, **options)


def design(program):
    """Matrix of the map, whose columns are its products with unit vectors."""
    shape = program.map.feature_shape
    size = int(np.prod(shape))
    return program.map.matvec(torch.eye(size, dtype=torch.float64).reshape(*shape, size)).numpy()


def probabilities(program):
    weight = np.ones(len(program.y)) if program.sample_weight is None else program.sample_weight.double().numpy()
    return weight / weight.sum()


NUMPY_LOSSES = {
    "squared": lambda f, y: 0.5 * (f - y) ** 2,
    "huber": lambda f, y: huber(1.35, f - y),
    "logistic": lambda f, y: np.logaddexp(0, -y * f),
    "squared_hinge": lambda f, y: np.maximum(0, 1 - y * f) ** 2,
    "softmax": lambda f, y: (logsumexp(f, axis=1) - (y * f).sum(1))[:, None],
    "poisson": lambda f, y: np.exp(f) - y * f + xlogy(y, y) - y,
}
NUMPY_PENALTIES = {
    "group_l2": lambda block: np.linalg.norm(block, axis=0).sum(),
    "nuclear": lambda block: np.linalg.norm(block, "nuc"),
}
CVXPY_LOSSES = {
    "squared": lambda f, y: cp.sum(0.5 * cp.square(f - y), axis=1),
    "huber": lambda f, y: cp.sum(0.5 * cp.huber(f - y, 1.35), axis=1),
    "logistic": lambda f, y: cp.sum(cp.logistic(-cp.multiply(y, f)), axis=1),
    "squared_hinge": lambda f, y: cp.sum(cp.square(cp.pos(1 - cp.multiply(y, f))), axis=1),
    "softmax": lambda f, y: cp.log_sum_exp(f, axis=1) - cp.sum(cp.multiply(y, f), axis=1),
    "poisson": lambda f, y: cp.sum(cp.exp(f) - cp.multiply(y, f) + (xlogy(y, y) - y), axis=1),
}
CVXPY_PENALTIES = {
    "group_l2": lambda block: cp.sum(cp.norm(block, 2, axis=0)),
    "nuclear": lambda block: cp.normNuc(block),
}


def registered_name(registry, instance):
    return next(name for name, kind in registry.items() if type(instance) is kind)


def numpy_loss(loss, pred, y):
    """Losses per sample by formulas of this file, or by the cvxpy expression of a loss that this file does not know."""
    name = registered_name(LOSSES, loss)
    if name in NUMPY_LOSSES:
        return NUMPY_LOSSES[name](pred, y).sum(1)
    return np.array([float(loss.expression(cp.Constant(pred[[i]]), y[[i]], np.ones(1)).value) for i in range(len(y))])


def numpy_penalty(penalty, coef):
    """Penalty by formulas of this file, or by the cvxpy expression of a penalty that this file does not know."""
    blocks = coef.reshape(-1, *coef.shape[-2:])
    name = registered_name(PENALTIES, penalty)
    if name in NUMPY_PENALTIES:
        return sum(NUMPY_PENALTIES[name](block) for block in blocks)
    return float(penalty.expression(cp.Constant(coef.reshape(-1, coef.shape[-1])), len(blocks)).value)


def numpy_primal(program, coef, intercept=None):
    """Objective in float64 numpy."""
    coef = coef.double().numpy()
    pred = design(program) @ coef.reshape(-1, coef.shape[-1])
    if intercept is not None:
        pred = pred + intercept.double().numpy()
    loss = probabilities(program) @ numpy_loss(program.loss, pred, program.y.double().numpy())
    return loss + program.alpha * numpy_penalty(program.penalty, coef)


def cvxpy_value(program):
    """Optimal value by an interior-point solver, from a model written here.

    Losses and penalties that this file does not know have the expressions that they give themselves.
    """
    y, weight = program.y.double().numpy(), probabilities(program)
    matrix = design(program)
    coef, shift = cp.Variable((matrix.shape[1], y.shape[1])), cp.Variable((1, y.shape[1]))
    pred = matrix @ coef
    if program.fit_intercept:
        pred = pred + np.ones((len(y), 1)) @ shift
    objective = _cvxpy_loss(program.loss, pred, y, weight) + program.alpha * _cvxpy_penalty(program, coef)
    return cp.Problem(cp.Minimize(objective)).solve(solver="CLARABEL")


def _cvxpy_loss(loss, pred, y, weight):
    name = registered_name(LOSSES, loss)
    return weight @ CVXPY_LOSSES[name](pred, y) if name in CVXPY_LOSSES else loss.expression(pred, y, weight)


def _cvxpy_penalty(program, coef):
    width = program.map.feature_shape[-1]
    blocks = [coef[first : first + width] for first in range(0, coef.shape[0], width)]
    name = registered_name(PENALTIES, program.penalty)
    if name in CVXPY_PENALTIES:
        return sum(CVXPY_PENALTIES[name](block) for block in blocks)
    return program.penalty.expression(coef, len(blocks))

"""Public tests of the contracts: for people who add a loss, a penalty, a linear map or a solver of their own.

Each raises ``AssertionError`` that names the identity which failed. The package's own tests run them over every
registered class.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .algorithms.base import Solver
from .certificate import certify
from .linear_maps.base import LinearMap
from .linear_maps.dense import DenseMap
from .losses.base import Loss
from .losses.classification import Logistic
from .losses.regression import Huber, Squared
from .penalties.base import Penalty
from .penalties.group import GroupL2, GroupNuclear
from .points import Point, completed
from .program import Program
from .solve import solve
from .validation import check_kind


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _require_close(actual: Tensor, wanted: Tensor, tolerance: float, message: str) -> None:
    _require(actual.shape == wanted.shape, f"{message}: shapes {tuple(actual.shape)} and {tuple(wanted.shape)}")
    if wanted.numel() == 0:
        return
    difference = float((actual - wanted).abs().max())
    scale = 1.0 + float(wanted.abs().max())
    _require(difference <= tolerance * scale, f"{message}: they differ by {difference:.3e}")


def check_loss(loss: Loss, n_outputs: int = 3, seed: int = 0) -> None:
    """Test a loss: derivatives, smoothness, convexity, Fenchel-Young and the bookkeeping for certificates.

    Parameters
    ----------
    loss : Loss
        The instance to test, on its own ``example_target``.
    n_outputs : int, default=3
        Number of outputs to test with.
    seed : int, default=0
        Seed of targets and predictions.

    Raises
    ------
    TypeError
        If it is no instance.
    AssertionError
        With the identity that failed.

    Examples
    --------
    >>> from convexformer_solvers import Squared
    >>> check_loss(Squared())
    """
    check_kind("loss", loss, Loss, "get_loss('squared')")
    generator = torch.Generator().manual_seed(seed)
    n = 40
    y = loss.example_target(n, n_outputs, generator)
    loss.check_target(y)
    pred = torch.randn((n, n_outputs), generator=generator, dtype=torch.float64)
    move = torch.randn((n, n_outputs), generator=generator, dtype=torch.float64)
    weight = torch.full((n,), 1.0 / n, dtype=torch.float64)

    value, gradient = loss.value(pred, y), loss.gradient(pred, y)
    _require(value.shape == (n,), "value must have shape (n_samples,)")
    _require(bool((value >= 0).all()), "value must not be negative: gaps are measured by that of the best constant")
    _require(gradient.shape == pred.shape, "gradient must have the shape of the predictions")
    single = loss.gradient(pred.float(), loss.target_in(y, torch.float32))
    _require(single.dtype == torch.float32, "gradient must have the precision of its arguments")
    tracked = pred.clone().requires_grad_()
    (automatic,) = torch.autograd.grad(loss.value(tracked, y).sum(), tracked)
    _require_close(gradient, automatic, 1e-10, "gradient is not the derivative of value")

    small = 1e-6
    numeric = (loss.gradient(pred + small * move, y) - loss.gradient(pred - small * move, y)) / (2 * small)
    product = loss.hessian_product(pred, y, move)
    # A kink may lie within the difference for a few samples; a wrong Hessian is wrong for most.
    wrong = ((product - numeric).abs().amax(1) > 1e-4 * (1 + product.abs().amax(1))).double().mean()
    _require(float(wrong) < 0.1, "hessian_product is not the derivative of gradient")
    parts = loss.hessian_parts(pred, y)
    if parts is not None:
        diagonal, root = parts
        taken = 0.0 if root is None else root * (root * move).sum(1, keepdim=True)
        _require_close(diagonal * move - taken, product, 1e-10, "hessian_parts are not those of the Hessian")
    mean_hessian = torch.stack(
        [weight @ loss.hessian_product(pred, y, e.expand_as(pred)) for e in torch.eye(n_outputs).double()]
    )
    _require_close(loss.mean_hessian(pred, y, weight), mean_hessian, 1e-10, "mean_hessian is not the mean Hessian")

    excess = loss.value(pred + move, y) - value - (gradient * move).sum(1)
    _require(bool((excess >= -1e-10).all()), "the loss is not convex")
    if math.isfinite(loss.smoothness):
        bound = 0.5 * loss.smoothness * move.square().sum(1)
        _require(bool((excess <= bound + 1e-10).all()), "the curvature exceeds smoothness")

    best = loss.best_intercept(pred, y, weight)
    slope = weight @ loss.gradient(pred + best, y)
    _require(float(slope.abs().max()) <= 1e-8, "best_intercept does not minimise the loss")
    if loss.output_separable:
        apart = torch.stack([loss.gradient(pred[:, [k]], y[:, [k]])[:, 0] for k in range(n_outputs)], 1)
        _require_close(gradient, apart, 1e-12, "output_separable is True but outputs interact")
    if loss.shift_invariant:
        _require_close(loss.value(pred + 3.0, y), value, 1e-10, "shift_invariant is True but a shift changes the value")
    if loss.of_residual:
        shifted = loss.value(pred + move, y + move)
        _require_close(shifted, value, 1e-10, "of_residual is True but the value depends on more than the residual")
    if loss.quadratic:
        half_square = 0.5 * (pred - y).square().sum(1)
        _require_close(value, half_square, 1e-12, "quadratic is True but the value is not half the square")
    _check_conjugate(loss, pred, move, y, value, gradient)
    _check_dual_scale(loss, -gradient, y, weight)
    if loss.defines("widened"):
        _check_widened(loss, pred, loss.gradient(move, y), y)


def _check_dual_scale(loss: Loss, theta: Tensor, y: Tensor, weight: Tensor) -> None:
    for limit in (0.0, 0.3, 1.0, 10.0, math.inf):
        for shape in ((), (theta.shape[1],)) if loss.output_separable else ((),):
            bound = torch.full(shape, limit, dtype=theta.dtype)
            scale = loss.best_dual_scale(theta, y, weight, bound)
            _require(scale.shape == bound.shape, "best_dual_scale must have the shape of its limit")
            _require(bool((scale >= 0).all() and (scale <= bound).all()), "best_dual_scale must be between 0 and limit")


def _check_widened(loss: Loss, pred: Tensor, slope: Tensor, y: Tensor) -> None:
    width = 4.0
    wide, targets = loss.widened(y, slope, width)
    found = wide.gradient(pred, targets) / width
    optimal = loss.gradient(pred - (width - 1) * (found - slope), y)
    _require_close(found, optimal, 1e-10, "widened is not the proximal step in the dual")
    own = loss.gradient(y + (pred - targets) / width, y)
    _require_close(found, own, 1e-10, "the slope of the widened loss is not that at the residual over the width")


def _check_conjugate(loss: Loss, pred: Tensor, move: Tensor, y: Tensor, value: Tensor, gradient: Tensor) -> None:
    conjugate = loss.conjugate(gradient, y)
    if bool(conjugate.isnan().any()):
        _require(not loss.defines("conjugate"), "conjugate is nan at a gradient")
        return
    _require_close(
        value + conjugate, (gradient * pred).sum(1), 1e-9, "Fenchel-Young fails with equality at the gradient"
    )
    elsewhere = loss.gradient(pred + move, y)
    slack = value + loss.conjugate(elsewhere, y) - (elsewhere * pred).sum(1)
    _require(bool((slack >= -1e-9).all()), "Fenchel-Young inequality fails: the conjugate is too small")
    shrunk = loss.conjugate(0.5 * gradient, y)
    _require(bool(shrunk.isfinite().all()), "the conjugate's domain must hold every point between 0 and a gradient")
    # The Fenchel-Young inequality holds for slopes outside the domain too: nothing there may be finite and too small.
    steps = [torch.ones_like(pred), *(e.expand_as(pred) for e in torch.eye(pred.shape[1]).to(pred))]
    for slope in (gradient + move, gradient - 10 * move, 10 * gradient):
        bound = loss.conjugate(slope, y)
        for step in steps:
            for size in (-1000.0, -10.0, 10.0, 1000.0):
                product = (slope * (size * step)).sum(1)
                slack = loss.value(size * step, y) + bound - product
                _require(bool((slack >= -1e-9 * (1 + product.abs())).all()), "the conjugate is too small outside")


def check_penalty(penalty: Penalty, seed: int = 0, n_outputs: int | None = None) -> None:
    """Test a penalty: norm axioms, prox (Moreau identity, optimality, zeros), dual norm, atoms, balanced factors.

    Parameters
    ----------
    penalty : Penalty
        The instance to test.
    seed : int, default=0
        Seed of the coefficients.
    n_outputs : int, optional
        Outputs of the coefficients, for a penalty that is one for so many only. Default: one, two and four.

    Raises
    ------
    TypeError
        If it is no instance.
    AssertionError
        With the identity that failed.

    Examples
    --------
    >>> from convexformer_solvers import GroupL2
    >>> check_penalty(GroupL2())
    """
    check_kind("penalty", penalty, Penalty, "get_penalty('group_l2')")
    generator = torch.Generator().manual_seed(seed)
    for block_shape, d, c in (((4,), 3, 2), ((2, 3), 2, 4), ((5,), 1, 1)):
        shape = (*block_shape, d, n_outputs or c)
        penalty.check_shape(shape)
        coef = torch.randn(shape, generator=generator, dtype=torch.float64)
        other = torch.randn(shape, generator=generator, dtype=torch.float64)
        coef[0] = 0.0
        value, dual_norm = penalty.value(coef), penalty.dual_norm(other)
        has_blocks = penalty.group_values(coef).shape[: len(block_shape)] == block_shape
        _require(has_blocks or not penalty.block_separable, "group_values must have the axes of the blocks first")
        _require_close(penalty.value(-3 * coef), 3 * value, 1e-12, "the penalty is not homogeneous")
        _require(
            float(penalty.value(coef + other)) <= float(value + penalty.value(other)) + 1e-10,
            "the triangle inequality fails",
        )
        if penalty.euclidean:
            norms = torch.linalg.vector_norm(coef, dim=-2).sum()
            _require_close(value, norms, 1e-12, "euclidean is True but the penalty is not the sum of the norms")
        for_outputs = penalty.for_outputs(shape[-1])
        _require_close(for_outputs.value(coef), value, 1e-12, "for_outputs gives another norm")
        _require_close(for_outputs.dual_norm(other), dual_norm, 1e-12, "for_outputs gives another dual norm")
        _require(float((coef * other).sum()) <= float(value * dual_norm) + 1e-10, "the dual norm is too small")
        if penalty.output_separable:
            parts = [penalty.value(coef[..., [k]]) for k in range(shape[-1])]
            _require_close(torch.stack(parts).sum(), value, 1e-12, "output_separable is True but outputs interact")
        single = penalty.prox(coef.float(), 0.3)
        _require(single.dtype == torch.float32, "prox must have the precision of its argument")
        _check_prox(penalty, coef, other, 0.3 * float(penalty.dual_norm(coef)))
        if penalty.defines("factorize"):
            _check_factors(penalty, coef, generator)
        _check_active_groups(penalty, coef, other)
        if penalty.defines("smoothed_value"):
            _check_smoothed(penalty, coef, other)
    if penalty.defines("violating_atoms"):
        for *size, c in ((4, 3, 2), (2, 3, 2, 4), (3, 2)):
            shape = (*size, n_outputs or c)
            _check_atoms(penalty, torch.randn(shape, generator=generator, dtype=torch.float64))


def _check_atoms(penalty: Penalty, correlation: Tensor) -> None:
    norms, alpha = penalty.group_dual_norms(correlation), 0.5 * float(penalty.dual_norm(correlation))
    found = penalty.violating_atoms(correlation, alpha)
    excess = found.excess.sort().values
    _require_close(
        excess, (norms[norms > alpha] / alpha - 1).sort().values, 1e-10, "atoms of other groups are violating"
    )
    for position, value, more in zip(*found, strict=True):
        atom = torch.zeros_like(correlation).flatten()
        atom[position] = value
        atom = atom.view_as(correlation)
        _require_close(penalty.value(atom), torch.ones_like(more), 1e-10, "an atom is not on the unit sphere")
        _require_close(
            (atom * correlation).sum(), alpha * (1 + more), 1e-10, "an atom's excess is not its inner product"
        )


def _check_active_groups(penalty: Penalty, coef: Tensor, correlation: Tensor) -> None:
    groups = penalty.active_groups(correlation, coef, 0.5 * float(penalty.dual_norm(correlation)))
    if groups is None:
        return
    norms = penalty.group_dual_norms(correlation).reshape(-1, coef.shape[-1])
    active = torch.zeros_like(norms, dtype=torch.bool)
    active[groups.block, groups.output] = True
    wanted = (norms > 0.5 * norms.max()) | (penalty.group_values(coef).reshape(norms.shape) > 0)
    _require(bool((active == wanted).all()), "active_groups are not those that violate or are not zero")
    step = 1e-6 * torch.randn(correlation.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moved = penalty.group_dual_norms(correlation + step) - penalty.group_dual_norms(correlation - step)
    slope = (groups.unit * step.reshape(-1, *step.shape[-2:])[groups.block, :, groups.output]).sum(1)
    moved = moved.reshape(norms.shape)[groups.block, groups.output]
    _require_close(moved, 2 * slope, 1e-6, "the units of active_groups are not the gradients of the dual norms")


def _check_smoothed(penalty: Penalty, coef: Tensor, move: Tensor) -> None:
    for width in (1e-2, 1.0):
        gradient, hessian = penalty.smoothed_derivatives(coef, width)
        excess = float(penalty.smoothed_value(coef, width) - penalty.value(coef))
        at_zero = float(penalty.smoothed_value(torch.zeros_like(coef), width))
        _require(-1e-12 <= excess <= at_zero * (1 + 1e-12), "smoothed_value is not near the penalty")
        unit = float(penalty.smoothed_value(torch.zeros_like(coef), 1.0))
        _require(abs(at_zero - width * unit) <= 1e-12 * unit, "smoothed_value at zero is not proportional to its width")
        _require(float(penalty.dual_norm(gradient)) <= 1 + 1e-12, "the smoothed gradient leaves the dual ball")
        step = 1e-5 * width * move
        up, down = coef + step, coef - step
        slope = penalty.smoothed_value(up, width) - penalty.smoothed_value(down, width)
        _require_close(slope / width, 2 * (gradient * step).sum() / width, 1e-8, "the smoothed gradient is wrong")
        bend = penalty.smoothed_derivatives(up, width).gradient - penalty.smoothed_derivatives(down, width).gradient
        product = (hessian @ step.reshape(*hessian.shape[:2], 1)).reshape(step.shape)
        _require_close(0.5e5 * bend, 1e5 * product, 1e-7, "the smoothed Hessian is wrong")


def _check_prox(penalty: Penalty, coef: Tensor, other: Tensor, step: float) -> None:
    new = penalty.prox(coef, step)
    dual_part = coef - new  # Moreau: the projection of coef on the dual ball of radius step
    _require(float(penalty.dual_norm(dual_part)) <= step * (1 + 1e-9), "Moreau: coef - prox leaves the dual ball")
    _require_close(
        (dual_part * new).sum(), step * penalty.value(new), 1e-9, "prox is not optimal: dual norm or prox is wrong"
    )

    def objective(point: Tensor) -> float:
        return float(step * penalty.value(point) + 0.5 * (point - coef).square().sum())

    _require(objective(new) <= objective(new + 1e-3 * other) + 1e-12, "prox is not a minimiser")
    everything = penalty.prox(coef, float(penalty.dual_norm(coef)) * (1 + 1e-12))
    _require(bool((everything == 0).all()), "prox must give exact zeros once the step reaches the dual norm")


def _check_factors(penalty: Penalty, coef: Tensor, generator: torch.Generator) -> None:
    block, left, right = penalty.factorize(coef)
    rebuilt = torch.zeros_like(coef)
    rebuilt.index_put_(tuple(block.T), left[:, :, None] * right[:, None, :], accumulate=True)
    _require_close(rebuilt, coef, 1e-12, "the factors do not add up to the coefficients")
    _require_close(
        penalty.factor_cost(left, right).sum(), penalty.value(coef), 1e-12, "the factors do not cost the penalty"
    )
    norms = torch.linalg.vector_norm(left, dim=1)
    _require_close(norms, penalty.right_norm(right), 1e-12, "the factors are not balanced")
    u = torch.randn((6, coef.shape[-2]), generator=generator, dtype=torch.float64)
    v = torch.randn((6, coef.shape[-1]), generator=generator, dtype=torch.float64)
    pieces = penalty.group_values(u[:, :, None] * v[:, None, :]).reshape(6, -1).sum(1)
    _require(
        bool((pieces <= penalty.factor_cost(u, v) + 1e-10).all()), "factor_cost is below the penalty of its product"
    )


def check_map(linear_map: LinearMap, n_outputs: int = 3, seed: int = 0) -> None:
    """Test a linear map: adjoint, matrix, precision of its products and the norm estimate.

    Parameters
    ----------
    linear_map : LinearMap
        The instance to test; small, as its matrix is formed.
    n_outputs : int, default=3
        Number of outputs to test with.
    seed : int, default=0
        Seed of coefficients and values.

    Raises
    ------
    TypeError
        If it is no instance.
    AssertionError
        With the identity that failed.

    Examples
    --------
    >>> import torch
    >>> from convexformer_solvers import DenseMap
    >>> check_map(DenseMap(torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))))
    """
    check_kind("linear_map", linear_map, LinearMap, "DenseMap(X)")
    generator = torch.Generator().manual_seed(seed)
    shape = (*linear_map.feature_shape, n_outputs)
    coef = torch.randn(shape, generator=generator, dtype=torch.float64)
    values = torch.randn((linear_map.n_samples, n_outputs), generator=generator, dtype=torch.float64)
    pred, back = linear_map.matvec(coef), linear_map.rmatvec(values)
    _require(pred.shape == values.shape and back.shape == coef.shape, "the products have wrong shapes")
    _require(pred.dtype == back.dtype == torch.float64, "products must have the precision of their argument")
    _require_close((pred * values).sum(), (coef * back).sum(), 1e-10, "rmatvec is not the adjoint of matvec")
    for dtype in (torch.float32, torch.float64):
        _require(linear_map.to(dtype).dtype == dtype, "to must give a map of that precision")
    matrix = linear_map.as_matrix().double()
    _require_close(pred, matrix @ coef.reshape(-1, n_outputs), 1e-10, "as_matrix and matvec disagree")
    index = torch.arange(linear_map.n_samples - 1, -1, -2)
    _require_close(linear_map.rows(index).matvec(coef), pred[index], 1e-12, "rows is not the map of those samples")
    _require(linear_map.largest() >= float(matrix.abs().max()), "largest is not a bound of the entries")
    _check_map_blocks(linear_map, matrix, generator)
    weight = torch.rand(linear_map.n_samples, generator=generator, dtype=torch.float64)
    centered = linear_map.centered(weight / weight.sum(), torch.float64)
    shift = centered.matvec(coef) - pred
    _require_close(shift, shift[:1].expand_as(shift), 1e-10, "centered does not differ by a constant per output")
    weight = torch.rand(linear_map.n_samples, generator=generator, dtype=torch.float64)
    norm = float(torch.linalg.matrix_norm(weight.sqrt()[:, None] * matrix, 2)) ** 2
    estimate = linear_map.squared_norm(weight, n_steps=200)
    _require(0.9 * norm <= estimate <= norm * (1 + 1e-9), "squared_norm is not the largest eigenvalue")


def _check_map_blocks(linear_map: LinearMap, matrix: Tensor, generator: torch.Generator) -> None:
    """Products with some of the blocks, against the matrix."""
    d = linear_map.feature_shape[-1]
    by_block = matrix.reshape(linear_map.n_samples, -1, d)
    blocks = torch.arange(0, by_block.shape[1], 2)
    columns = by_block[:, blocks]
    _require_close(linear_map.columns(blocks).double(), columns, 1e-12, "columns are not those of the matrix")
    scale = torch.rand(len(blocks), generator=generator, dtype=torch.float64)
    units = torch.nn.functional.normalize(torch.randn((len(blocks), d), generator=generator, dtype=torch.float64))
    inner = scale[:, None, None] * torch.eye(d) + (1 - scale)[:, None, None] * units[:, :, None] * units[:, None, :]
    wanted = torch.einsum("ibd,bde,jbe->ij", columns, inner, columns)
    kernel = linear_map.kernel(blocks, scale, units).tril()
    _require_close(kernel, wanted.tril(), 1e-10, "kernel is not A J A' of the matrix")
    full_kernel = linear_map.full_kernel(torch.float64).tril()
    _require_close(full_kernel, (matrix @ matrix.T).tril(), 1e-10, "full_kernel is not A A' of the matrix")
    repeated = torch.arange(len(blocks)).repeat_interleave(torch.arange(len(blocks)) % 2 + 1)
    wanted = torch.einsum("ibd,bd->bi", columns[:, repeated], units[repeated])
    _require_close(linear_map.along(blocks[repeated], units[repeated]), wanted, 1e-10, "along is not A u of each block")
    few = blocks[:1]
    for chosen in (blocks, few, blocks[:0]):
        part = by_block[:, chosen].flatten(1)
        coef = torch.randn((len(chosen), d, 2), generator=generator, dtype=torch.float64)
        values = torch.randn((linear_map.n_samples, 2), generator=generator, dtype=torch.float64)
        images = part @ coef.flatten(0, 1), (part.T @ values).view(len(chosen), d, 2)
        _require_close(linear_map.matvec_blocks(chosen, coef), images[0], 1e-10, "matvec_blocks is not the product")
        _require_close(linear_map.rmatvec_blocks(chosen, values), images[1], 1e-10, "rmatvec_blocks is not the adjoint")
        full = coef.new_zeros((by_block.shape[1], d, 2)).index_copy(0, chosen, coef)
        image = linear_map.sparse_matvec(full.view(*linear_map.feature_shape, 2))
        _require_close(image, images[0], 1e-10, "sparse_matvec is not the product")
        restricted = linear_map.restricted(chosen).as_matrix().double()
        _require_close(restricted, part, 1e-12, "restricted does not hold the columns of the blocks")
    weight = torch.rand(linear_map.n_samples, generator=generator, dtype=torch.float64)
    wanted = columns.flatten(1).T @ (weight[:, None] * by_block[:, few].flatten(1))
    _require_close(linear_map.gram(blocks, few, weight), wanted, 1e-10, "gram is not A' diag(weight) A of the matrix")


# The programs that solvers are tested on: loss, penalty, number of outputs and whether there is an intercept.
_PROGRAMS: tuple[tuple[Loss, Penalty, int, bool], ...] = (
    (Squared(), GroupL2(), 2, True),
    (Logistic(), GroupNuclear(), 2, False),
    (Squared(), GroupL2(), 1, True),
    (Huber(), GroupL2(), 1, False),
)


def check_solver(solver: Solver, tol: float = 1e-6, seed: int = 0) -> None:
    """Test a solver: certified optima on small programs, zero at alpha_max, warm starts, exact zeros, no side effects.

    The programs are those that it applies to, by its ``unmet_requirement``, of four: with the squared, the logistic and
    Huber's loss, the group-l2 and the nuclear penalty, one output and two, with an intercept and without.

    Parameters
    ----------
    solver : Solver
        The instance to test.
    tol : float, default=1e-6
        Relative gap that it must reach.
    seed : int, default=0
        Seed of the programs.

    Raises
    ------
    TypeError
        If it is no instance.
    AssertionError
        With the requirement that failed.

    Examples
    --------
    >>> from convexformer_solvers import Fista
    >>> check_solver(Fista())
    """
    check_kind("solver", solver, Solver, "get_solver('auto')")
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn((30, 4, 3), generator=generator, dtype=torch.float64)
    programs = [
        Program(DenseMap(data), loss.example_target(30, n_outputs, generator), loss, penalty, 1.0, None, intercept)
        for loss, penalty, n_outputs, intercept in _PROGRAMS
    ]
    unmet = [solver.unmet_requirement(program) for program in programs]
    _require(None in unmet, f"the solver applies to none of the programs here, as it needs {unmet}")
    for program, lacks in zip(programs, unmet, strict=True):
        if lacks is None:
            _check_solver_on(program, solver, tol)


def _check_solver_on(program: Program, solver: Solver, tol: float) -> None:
    data, y = program.map.as_matrix().clone(), program.y.clone()
    result = solve(program.with_alpha(0.2 * program.alpha_max), solver, tol=tol)
    gap, of_what = result.certificate.relative_gap, f"{program.loss} with {program.penalty}"
    _require(-1e-9 <= gap <= tol, f"{of_what}: relative gap {gap:.3e} is not within {tol:.0e}")
    again = certify(program.with_alpha(0.2 * program.alpha_max), result.coef, result.intercept)
    _require(again.primal == result.certificate.primal, "the certificate is not that of the returned point")
    _require(torch.equal(program.map.as_matrix(), data) and torch.equal(program.y, y), "the solver changed the data")

    above = solve(program.with_alpha(1.05 * program.alpha_max), solver, tol=tol)
    _require(bool((above.coef == 0).all()), "the solution above alpha_max must be exactly zero")
    below_program = program.with_alpha(0.95 * program.alpha_max)
    below = solve(below_program, solver, tol=tol)
    is_nonzero = program.penalty.group_values(below.coef) > 0
    n_groups = int(is_nonzero.sum())
    _require(
        0 < n_groups < is_nonzero.numel(), f"just below alpha_max {n_groups} groups are nonzero: zeros must be exact"
    )
    warm = solve(below_program, solver, tol=tol, start=(below.coef, below.intercept))
    _require(warm.n_iter <= below.n_iter, "a start from the solution took longer than a cold one")
    _require(certify(below_program, warm.coef, warm.intercept).relative_gap <= tol, "a warm start lost the solution")
    start = Point(below.coef, below.intercept)
    state = solver.init(below_program, start)
    before = [part.clone() for part in _tensors(state)]
    point = completed(below_program, solver.point(below_program, solver.step(below_program, state)))
    same = all(torch.equal(part, old) for part, old in zip(_tensors(state), before, strict=True))
    _require(same, "step changed tensors of the state before")
    primal = certify(below_program, point.coef, point.intercept).primal
    bound = below.certificate.primal + 10 * tol * below_program.null_value
    _require(primal <= bound, "the first step from the solution lost it")


def _tensors(state: Any) -> list[Tensor]:
    """The tensors of a state that is a tensor, or a tuple of states."""
    if isinstance(state, Tensor):
        return [state]
    return [tensor for part in state for tensor in _tensors(part)] if isinstance(state, tuple) else []

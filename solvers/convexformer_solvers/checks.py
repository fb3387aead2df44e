"""Public tests of the contracts of losses, penalties, linear maps and solvers, for authors of their own.

Each lists identities, in the order in which later ones rest on earlier ones, and raises ``AssertionError`` with the
name of the first that fails. The tests of the package run them over every registered class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._pytree import tree_leaves

from .algorithms.base import Solver
from .certificate import certify
from .draws import standard_normal
from .linear_maps.base import LinearMap
from .linear_maps.dense import DenseMap
from .losses import get_loss
from .losses.base import Loss
from .penalties import get_penalty
from .penalties.base import Penalty
from .points import Point, completed
from .program import Program
from .rounding import CANCELLED
from .solve import solve
from .validation import check_kind

# What is wrong where an identity fails, and a condition; or two equal arrays, and their tolerance where it is another.
_Identities = Iterator[tuple[Any, ...]]


def _assert_all(identities: _Identities) -> None:
    for message, *values in identities:
        if len(values) == 1:
            if not bool(torch.as_tensor(values[0]).all()):
                raise AssertionError(message)
            continue
        actual, wanted, tolerance = (*values, CANCELLED)[:3]
        if actual.shape != wanted.shape:
            raise AssertionError(f"{message}: shapes {tuple(actual.shape)} and {tuple(wanted.shape)}")
        if wanted.numel() == 0:
            continue
        difference, size = (float(torch.linalg.vector_norm(part, math.inf)) for part in (actual - wanted, wanted))
        if not difference <= tolerance * (1.0 + size):
            raise AssertionError(f"{message}: they differ by {difference:.3e}")


@contextmanager
def _on_cpu() -> Iterator[None]:
    """New tensors on the CPU, whatever torch's default device is."""
    is_other = torch.get_default_device().type != "cpu"
    with torch.device("cpu") if is_other else nullcontext():  # the first lengthens each call
        yield


def _normal(generator: Generator, *shape: int) -> Tensor:
    return standard_normal(shape, generator, torch.float64)


@_on_cpu()
def check_loss(loss: Loss, n_outputs: int = 3, seed: int = 0) -> None:
    """Test a loss: derivatives, smoothness, convexity, Fenchel-Young and the bookkeeping for certificates.

    Parameters
    ----------
    loss : Loss
        The instance to test, on its own ``example_target``.
    n_outputs, seed : int, default=3, default=0
        Number of outputs, and seed of targets and predictions.

    Raises
    ------
    TypeError, AssertionError
        If it is no instance; with the identity that failed.

    Examples
    --------
    >>> from convexformer_solvers import Squared
    >>> check_loss(Squared())
    """
    check_kind("loss", loss, Loss, "get_loss('squared')")
    generator = Generator().manual_seed(seed)
    y = loss.example_target(40, n_outputs, generator)
    loss.check_target(y)
    pred, move = _normal(generator, 40, n_outputs), _normal(generator, 40, n_outputs)
    for identities in (_derivatives, _properties, _conjugate, _scaled_and_widened, _smoothed_loss):
        _assert_all(identities(loss, pred, move, y))


def _derivatives(loss: Loss, pred: Tensor, move: Tensor, y: Tensor) -> _Identities:
    given = pred.clone(), y.clone()
    value, gradient = loss.value(pred, y), loss.gradient(pred, y)
    unchanged = torch.equal(pred, given[0]) and torch.equal(y, given[1])
    yield "value or gradient changes its arguments", unchanged
    yield "value must have shape (n_samples,)", value.shape == pred.shape[:1]
    yield "value is nan at the targets of example_target: define it for the targets of the loss", ~value.isnan()
    yield "value must not be negative: gaps are measured by that of the best constant", value >= 0
    yield "gradient must have the shape of the predictions", gradient.shape == pred.shape
    single = loss.gradient(pred.float(), loss.target_in(y, torch.float32))
    yield "gradient must have the precision of its arguments", single.dtype == torch.float32
    tracked = pred.clone().requires_grad_()
    total = loss.value(tracked, y).sum()
    yield "value must be made of operations on pred that torch differentiates", total.requires_grad
    (automatic,) = torch.autograd.grad(total, tracked)
    yield "gradient is not the derivative of value", gradient, automatic
    numeric = (loss.gradient(pred + 1e-6 * move, y) - loss.gradient(pred - 1e-6 * move, y)) / 2e-6
    product = loss.hessian_product(pred, y, move)
    # A kink may lie within the difference for a few samples; a wrong Hessian is wrong for most.
    wrong = (product - numeric).abs().amax(1) > 1e-4 * (1 + product.abs().amax(1))
    yield "hessian_product is not the derivative of gradient", wrong.double().mean() < 0.1
    if (parts := loss.hessian_parts(pred, y)) is not None:
        taken = 0.0 if parts[1] is None else parts[1] * (parts[1] * move).sum(1, keepdim=True)
        yield "hessian_parts are not those of the Hessian", parts[0] * move - taken, product
    weight, units = torch.full_like(value, 1 / len(value)), torch.eye(pred.shape[1]).to(pred)
    mean = torch.stack([weight @ loss.hessian_product(pred, y, e.expand_as(pred)) for e in units])
    yield "mean_hessian is not the mean Hessian", loss.mean_hessian(pred, y, weight), mean


def _properties(loss: Loss, pred: Tensor, move: Tensor, y: Tensor) -> _Identities:
    value, gradient = loss.value(pred, y), loss.gradient(pred, y)
    excess = loss.value(pred + move, y) - value - (gradient * move).sum(1)
    yield "the loss is not convex", excess >= -CANCELLED
    bound = loss.smoothness * move.square().sum(1) / 2 + CANCELLED
    yield "the curvature exceeds smoothness", (excess <= bound) | (bound == math.inf)
    yield "the gradient jumps: the loss must be differentiable, as one with the kink smoothed is", _has_no_jump(loss, y)
    weight = torch.full_like(value, 1 / len(value))
    slope = weight @ loss.gradient(pred + loss.best_intercept(pred, y, weight), y)
    yield "best_intercept does not minimise the loss", slope.abs() <= 1e-8
    if loss.output_separable:
        apart = [loss.gradient(pred[:, [k]], y[:, [k]]) for k in range(pred.shape[1])]
        yield "output_separable is True but outputs interact", gradient, torch.cat(apart, 1)
    if loss.shift_invariant:
        yield "shift_invariant is True but a shift changes the value", loss.value(pred + 3.0, y), value
    if loss.of_residual:
        shifted = loss.value(pred + move, y + move)
        yield "of_residual is True but the value depends on more than the residual", shifted, value
    if loss.quadratic:
        yield "quadratic is True but the value is not half the square", value, 0.5 * (pred - y).square().sum(1)


def _has_no_jump(loss: Loss, y: Tensor) -> Tensor:
    """Whether each sample's gradient is continuous where it changes most on a line through 0: halving finds a jump."""
    low, high = (torch.full_like(y[:, :1], bound) for bound in (-8.0, 8.0))
    direction = torch.linspace(1.0, 0.5, y.shape[1]).to(y)
    slopes = [loss.gradient(point * direction, y) for point in (low, high)]
    whole = (slopes[1] - slopes[0]).norm(dim=1)
    for _ in range(48):
        middle = (low + high) / 2
        slope = loss.gradient(middle * direction, y)
        left = ((slope - slopes[0]).norm(dim=1) > (slopes[1] - slope).norm(dim=1))[:, None]
        low, high = torch.where(left, low, middle), torch.where(left, middle, high)
        slopes = [torch.where(left, slopes[0], slope), torch.where(left, slope, slopes[1])]
    return (slopes[1] - slopes[0]).norm(dim=1) <= 1e-6 * (1 + whole)


def _conjugate(loss: Loss, pred: Tensor, move: Tensor, y: Tensor) -> _Identities:
    value, gradient = loss.value(pred, y), loss.gradient(pred, y)
    conjugate = loss.conjugate(gradient, y)
    if bool(conjugate.isnan().any()):
        yield "conjugate is nan at a gradient", not loss.defines("conjugate")
        return
    yield "Fenchel-Young fails with equality at the gradient", value + conjugate, (gradient * pred).sum(1), 1e-9
    elsewhere = loss.gradient(pred + move, y)
    slack = value + loss.conjugate(elsewhere, y) - (elsewhere * pred).sum(1)
    yield "Fenchel-Young inequality fails: the conjugate is too small", slack >= -1e-9
    shrunk = loss.conjugate(0.5 * gradient, y)
    yield "the conjugate's domain must hold every point between 0 and a gradient", shrunk.isfinite()
    # The Fenchel-Young inequality holds for slopes outside the domain too: nothing there may be finite and too small.
    steps = [torch.ones_like(pred), *(e.expand_as(pred) for e in torch.eye(pred.shape[1]).to(pred))]
    for slope in (gradient + move, gradient - 10 * move, 10 * gradient):
        bound = loss.conjugate(slope, y)
        for point in (size * step for step in steps for size in (-1000.0, -10.0, 10.0, 1000.0)):
            product = (slope * point).sum(1)
            no_smaller = loss.value(point, y) + bound - product >= -1e-9 * (1 + product.abs())
            yield "outside its domain the conjugate must be inf, not a smaller number or nan", no_smaller


def _scaled_and_widened(loss: Loss, pred: Tensor, move: Tensor, y: Tensor) -> _Identities:
    theta, weight = -loss.gradient(pred, y), torch.full_like(pred[:, 0], 1 / len(pred))
    for limit in (0.0, 0.3, 1.0, 10.0, math.inf):
        for shape in ((), theta.shape[1:]) if loss.output_separable else ((),):
            bound = torch.full(shape, limit, dtype=theta.dtype)
            scale = loss.best_dual_scale(theta, y, weight, bound)
            yield "best_dual_scale must have the shape of its limit", scale.shape == bound.shape
            yield "best_dual_scale must be between 0 and limit", (scale >= 0) & (scale <= bound)
    if not loss.defines("widened"):
        return
    width, slope = 4.0, loss.gradient(move, y)
    wide, targets = loss.widened(y, slope, width)
    found = wide.gradient(pred, targets) / width
    optimal = loss.gradient(pred - (width - 1) * (found - slope), y)
    yield "widened is not the proximal step in the dual", found, optimal
    own = loss.gradient(y + (pred - targets) / width, y)
    yield "the slope of the widened loss is not that at the residual over the width", found, own


def _smoothed_loss(loss: Loss, pred: Tensor, move: Tensor, y: Tensor) -> _Identities:
    for cost in (1e-3, 1.0) if loss.defines("smoothed") else ():
        smooth = loss.smoothed(cost)
        for point in (pred, pred + 10 * move):
            below = loss.value(point, y) - smooth.value(point, y)
            yield "smoothed is not below the loss by the cost at most", (below >= -1e-9) & (below <= cost * y.shape[1])
            own = loss.gradient(smooth.unsmoothed(point, y), y)
            yield "unsmoothed predictions have other slopes", own, smooth.gradient(point, y)
            yield from _derivatives(smooth, point, move, y)
            yield from _conjugate(smooth, point, move, y)


@_on_cpu()
def check_penalty(
    penalty: Penalty, seed: int = 0, n_outputs: int | None = None, shape: tuple[int, ...] | None = None
) -> None:
    """Test a penalty: norm axioms, prox (Moreau identity, optimality, zeros), dual norm, atoms, balanced factors.

    Parameters
    ----------
    penalty : Penalty
        The instance to test.
    seed : int, default=0
        Seed of the coefficients.
    n_outputs : int, optional
        Outputs of the coefficients, for a penalty that is one for so many only. Default: one, two and four.
    shape : tuple of int, optional
        Shape of the coefficients, outputs last, for a penalty of one shape only. Default: three of one and two axes of
        blocks.

    Raises
    ------
    TypeError, AssertionError
        If it is no instance; with the identity that failed.

    Examples
    --------
    >>> from convexformer_solvers import GroupL2
    >>> check_penalty(GroupL2())
    """
    check_kind("penalty", penalty, Penalty, "get_penalty('group_l2')")
    generator = Generator().manual_seed(seed)

    def shapes(*usual: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [shape] if shape else [(*size, n_outputs or c) for *size, c in usual]

    for one in shapes((4, 3, 2), (2, 3, 2, 4), (5, 1, 1)):
        penalty.check_shape(one)
        coef, other = _normal(generator, *one), _normal(generator, *one)
        coef[0] = 0.0
        for identities in (_norm, _prox, _factors, _active_groups, _smoothed):
            _assert_all(identities(penalty, coef, other))
    if penalty.defines("violating_atoms"):
        for one in shapes((4, 3, 2), (2, 3, 2, 4), (3, 2)):
            _assert_all(_atoms(penalty, _normal(generator, *one)))


def _norm(penalty: Penalty, coef: Tensor, other: Tensor) -> _Identities:
    value, dual_norm, blocks = penalty.value(coef), penalty.dual_norm(other), coef.shape[:-2]
    has_blocks = penalty.group_values(coef).shape[: len(blocks)] == blocks
    yield "group_values must have the axes of the blocks first", has_blocks or not penalty.block_separable
    if penalty.block_separable:  # solvers leave blocks out
        some, own = (part.flatten(0, len(blocks) - 1)[1:] for part in (coef, penalty.group_values(coef)))
        message = "block_separable is True but a block's norm depends on its place"
        try:
            found = penalty.group_values(some)
        except (RuntimeError, ValueError, IndexError) as error:  # one weight for each block, as a rule
            raise AssertionError(f"{message}: coefficients without the first block raise {error!r}") from error
        yield message, found, own
    yield "the penalty is not homogeneous", penalty.value(-3 * coef), 3 * value
    yield "the triangle inequality fails", penalty.value(coef + other) <= value + penalty.value(other) + CANCELLED
    if penalty.euclidean:
        yield "euclidean is True but the penalty is not the sum of the norms", value, coef.norm(dim=-2).sum()
    units = torch.eye(coef.numel()).to(coef).view(-1, *coef.shape)
    positive = [penalty.value(unit) > 0 for unit in units]
    yield "the penalty is no norm: it is zero at coefficients that are not", torch.stack(positive)
    yield "the dual norm is not finite", dual_norm.isfinite()
    for_outputs = penalty.for_outputs(coef.shape[-1])
    yield "for_outputs gives another norm", for_outputs.value(coef), value
    yield "for_outputs gives another dual norm", for_outputs.dual_norm(other), dual_norm
    yield "the dual norm is too small", (coef * other).sum() <= value * dual_norm + CANCELLED
    if penalty.output_separable:
        apart = torch.stack([penalty.value(coef[..., [k]]) for k in range(coef.shape[-1])])
        yield "output_separable is True but outputs interact", apart.sum(), value
    n_parts, part = penalty.of_part(coef.shape[-1])
    parts = torch.stack([part.value(columns) for columns in coef.chunk(n_parts, dim=-1)])
    yield "the penalty is not the sum of those of its parts", parts.sum(), value


def _prox(penalty: Penalty, coef: Tensor, other: Tensor) -> _Identities:
    yield "prox must have the precision of its argument", penalty.prox(coef.float(), 0.3).dtype == torch.float32
    largest, given = float(penalty.dual_norm(coef)), coef.clone()
    step, new = 0.3 * largest, penalty.prox(given, 0.3 * largest)
    yield "prox changes its argument", torch.equal(given, coef)
    dual_part = coef - new  # Moreau: the projection of coef on the dual ball of radius step
    yield "Moreau: coef - prox leaves the dual ball", penalty.dual_norm(dual_part) <= step * (1 + 1e-9)
    product = (dual_part * new).sum()
    yield "prox is not optimal: dual norm or prox is wrong", product, step * penalty.value(new), 1e-9
    moved = new + 1e-3 * other
    before, after = (step * penalty.value(z) + 0.5 * (z - coef).square().sum() for z in (new, moved))
    yield "prox is not a minimiser", before <= after + 1e-12
    everything = penalty.prox(coef, largest * (1 + 1e-12))
    yield "prox must give exact zeros once the step reaches the dual norm", everything == 0


def _factors(penalty: Penalty, coef: Tensor, other: Tensor) -> _Identities:
    if not penalty.defines("factorize"):
        return
    block, left, right = penalty.factorize(coef)
    rebuilt = torch.zeros_like(coef)
    rebuilt.index_put_(tuple(block.T), left[:, :, None] * right[:, None, :], accumulate=True)
    yield "the factors do not add up to the coefficients", rebuilt, coef
    yield "the factors do not cost the penalty", penalty.factor_cost(left, right).sum(), penalty.value(coef)
    yield "the factors are not balanced", torch.linalg.vector_norm(left, dim=1), penalty.right_norm(right)
    u, v = (other.flatten(0, -3).sum(dim) for dim in (2, 1))
    pieces = penalty.group_values(u[:, :, None] * v[:, None, :]).reshape(len(u), -1).sum(1)
    yield "factor_cost is below the penalty of its product", pieces <= penalty.factor_cost(u, v) + CANCELLED


def _active_groups(penalty: Penalty, coef: Tensor, correlation: Tensor) -> _Identities:
    groups = penalty.active_groups(correlation, coef, 0.5 * float(penalty.dual_norm(correlation)))
    if groups is None:
        return
    norms = penalty.group_dual_norms(correlation).reshape(-1, coef.shape[-1])
    active = torch.zeros_like(norms, dtype=torch.bool)
    active[groups.block, groups.output] = True
    wanted = (norms > 0.5 * norms.max()) | (penalty.group_values(coef).reshape(norms.shape) > 0)
    yield "active_groups are not those that violate or are not zero", active == wanted
    step = 1e-6 * _normal(Generator().manual_seed(0), *correlation.shape)
    moved = penalty.group_dual_norms(correlation + step) - penalty.group_dual_norms(correlation - step)
    moved = moved.reshape(norms.shape)[groups.block, groups.output]
    slope = (groups.unit * step.reshape(-1, *step.shape[-2:])[groups.block, :, groups.output]).sum(1)
    yield "the units of active_groups are not the gradients of the dual norms", moved, 2 * slope, 1e-6


def _smoothed(penalty: Penalty, coef: Tensor, move: Tensor) -> _Identities:
    zero = torch.zeros_like(coef)
    for width in (1e-2, 1.0) if penalty.defines("smoothed_value") else ():
        gradient, hessian = penalty.smoothed_derivatives(coef, width)
        excess = float(penalty.smoothed_value(coef, width) - penalty.value(coef))
        at_zero, unit = penalty.smoothed_value(zero, width), penalty.smoothed_value(zero, 1.0)
        yield "smoothed_value is not near the penalty", -1e-12 <= excess <= float(at_zero) * (1 + 1e-12)
        yield "smoothed_value at zero is not proportional to its width", at_zero, width * unit
        yield "the smoothed gradient leaves the dual ball", penalty.dual_norm(gradient) <= 1 + 1e-12
        step = 1e-5 * width * move
        up, down = coef + step, coef - step
        slope = penalty.smoothed_value(up, width) - penalty.smoothed_value(down, width)
        yield "the smoothed gradient is wrong", slope / width, 2 * (gradient * step).sum() / width, 1e-8
        bend = penalty.smoothed_derivatives(up, width).gradient - penalty.smoothed_derivatives(down, width).gradient
        product = (hessian @ step.reshape(*hessian.shape[:2], 1)).reshape(step.shape)
        yield "the smoothed Hessian is wrong", 0.5e5 * bend, 1e5 * product, 1e-7


def _atoms(penalty: Penalty, correlation: Tensor) -> _Identities:
    norms, alpha = penalty.group_dual_norms(correlation), 0.5 * float(penalty.dual_norm(correlation))
    found = penalty.violating_atoms(correlation, alpha)
    excess = (norms[norms > alpha] / alpha - 1).sort().values
    yield "atoms of other groups are violating", found.excess.sort().values, excess
    for position, value, more in zip(*found, strict=True):
        atom = torch.zeros_like(correlation)
        atom.view(-1)[position] = value
        yield "an atom is not on the unit sphere", penalty.value(atom), torch.ones_like(more)
        yield "an atom's excess is not its inner product", (atom * correlation).sum(), alpha * (1 + more)


@_on_cpu()
def check_map(linear_map: LinearMap, n_outputs: int = 3, seed: int = 0) -> None:
    """Test a linear map: adjoint, matrix, precision of its products and the norm estimate.

    Parameters
    ----------
    linear_map : LinearMap
        The instance to test; small, as its matrix is formed.
    n_outputs, seed : int, default=3, default=0
        Number of outputs, and seed of coefficients and values.

    Raises
    ------
    TypeError, AssertionError
        If it is no instance; with the identity that failed.

    Examples
    --------
    >>> import torch
    >>> from convexformer_solvers import DenseMap
    >>> check_map(DenseMap(torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))))
    """
    check_kind("linear_map", linear_map, LinearMap, "DenseMap(X)")
    generator = Generator().manual_seed(seed)
    _assert_all(_products(linear_map, n_outputs, generator))
    matrix = linear_map.as_matrix().double().reshape(linear_map.n_samples, -1, linear_map.feature_shape[-1])
    _assert_all(_of_blocks(linear_map, matrix, generator))


def _products(linear_map: LinearMap, n_outputs: int, generator: Generator) -> _Identities:
    n = linear_map.n_samples
    coef, values = _normal(generator, *linear_map.feature_shape, n_outputs), _normal(generator, n, n_outputs)
    pred, back = linear_map.matvec(coef), linear_map.rmatvec(values)
    yield "the products have wrong shapes", pred.shape == values.shape and back.shape == coef.shape
    yield "products must have the precision of their argument", pred.dtype == back.dtype == torch.float64
    yield "rmatvec is not the adjoint of matvec", (pred * values).sum(), (coef * back).sum()
    for dtype in (torch.float32, torch.float64):
        yield "to must give a map of that precision", linear_map.to(dtype).dtype == dtype
    matrix = linear_map.as_matrix().double()
    yield "as_matrix and matvec disagree", pred, matrix @ coef.reshape(-1, n_outputs)
    index = torch.arange(n - 1, -1, -2)
    yield "rows is not the map of those samples", linear_map.rows(index).matvec(coef), pred[index]
    yield "largest is not a bound of the entries", linear_map.largest() >= float(matrix.abs().max())
    weight = torch.rand(n, generator=generator, dtype=torch.float64)
    share = weight / weight.sum()
    centered = linear_map.centered(share, torch.float64).matvec(coef)
    mean, shift = share @ centered, centered - pred
    yield "centered does not differ by a constant per output", shift, shift[:1].expand_as(shift)
    not_centered = torch.minimum(mean.abs(), shift[0].abs())  # but for a map without such a copy
    yield "centered has columns with a mean", not_centered, torch.zeros_like(mean)
    squares = (weight @ matrix.square()).sum()
    yield "weighted_squares are not those of the matrix", linear_map.weighted_squares(weight), squares
    norm = float(torch.linalg.matrix_norm(weight.sqrt()[:, None] * matrix, 2)) ** 2
    estimate = linear_map.squared_norm(weight, n_steps=200)
    yield "squared_norm is not the largest eigenvalue", 0.9 * norm <= estimate <= norm * (1 + 1e-9)


def _of_blocks(linear_map: LinearMap, matrix: Tensor, generator: Generator) -> _Identities:
    n, n_blocks, d = matrix.shape
    blocks = torch.arange(0, n_blocks, 2)
    columns, few = matrix[:, blocks], blocks[:1]
    yield "columns are not those of the matrix", linear_map.columns(blocks).double(), columns
    scale = torch.rand(len(blocks), generator=generator, dtype=torch.float64)
    units = torch.nn.functional.normalize(_normal(generator, len(blocks), d))
    inner = torch.lerp(units[:, :, None] * units[:, None, :], torch.eye(d).double(), scale[:, None, None])
    wanted = torch.einsum("ibd,bde,jbe->ij", columns, inner, columns)
    yield "kernel is not A J A' of the matrix", linear_map.kernel(blocks, scale, units).tril(), wanted.tril()
    wanted = matrix.flatten(1) @ matrix.flatten(1).T
    yield "full_kernel is not A A' of the matrix", linear_map.full_kernel(torch.float64).tril(), wanted.tril()
    repeated = torch.arange(len(blocks)).repeat_interleave(torch.arange(len(blocks)) % 2 + 1)
    wanted = torch.einsum("ibd,bd->bi", columns[:, repeated], units[repeated])
    yield "along is not A u of each block", linear_map.along(blocks[repeated], units[repeated]), wanted
    weight = torch.rand(n, generator=generator, dtype=torch.float64)
    wanted = columns.flatten(1).T @ (weight[:, None] * matrix[:, few].flatten(1))
    yield "gram is not A' diag(weight) A of the matrix", linear_map.gram(blocks, few, weight), wanted
    center = _normal(generator, n_blocks, d)
    moved = matrix - center
    wanted = moved[:, blocks].flatten(1).T @ (weight[:, None] * moved[:, few].flatten(1))
    yield "gram with a center is not that of columns less it", linear_map.gram(blocks, few, weight, center), wanted
    for chosen in (blocks, few, blocks[:0]):
        part = matrix[:, chosen].flatten(1)
        coef, values = _normal(generator, len(chosen), d, 2), _normal(generator, n, 2)
        image, back = part @ coef.flatten(0, 1), (part.T @ values).view_as(coef)
        yield "matvec_blocks is not the product", linear_map.matvec_blocks(chosen, coef), image
        yield "rmatvec_blocks is not the adjoint", linear_map.rmatvec_blocks(chosen, values), back
        full = coef.new_zeros((n_blocks, d, 2)).index_copy(0, chosen, coef).view(*linear_map.feature_shape, 2)
        yield "sparse_matvec is not the product", linear_map.sparse_matvec(full), image
        restricted = linear_map.restricted(chosen).as_matrix().double()
        yield "restricted does not hold the columns of the blocks", restricted, part


@_on_cpu()
def check_solver(solver: Solver, tol: float = 1e-6, seed: int = 0) -> None:
    """Test a solver: certified optima on small programs, zero at alpha_max, warm starts, exact zeros, no side effects.

    The programs are those of four that it applies to, by its ``unmet_requirement``.

    Parameters
    ----------
    solver : Solver
        The instance to test.
    tol, seed : float, default=1e-6, int, default=0
        Relative gap that it must reach, and seed of the programs.

    Raises
    ------
    TypeError, AssertionError
        If it is no instance; with the requirement that failed.

    Examples
    --------
    >>> from convexformer_solvers import Fista
    >>> check_solver(Fista())
    """
    check_kind("solver", solver, Solver, "get_solver('auto')")
    if not isinstance(solver.name, str):  # which progress bars, messages and plans show
        raise AssertionError(f"{type(solver).__name__}.name must be a str, got {solver.name!r}")
    generator = Generator().manual_seed(seed)
    linear_map = DenseMap(_normal(generator, 30, 4, 3))
    kinds = (
        ("squared", "group_l2", 2, True),
        ("logistic", "nuclear", 2, False),
        ("squared", "group_l2", 1, False),
        ("huber", "group_l2", 1, False),
    )
    programs = []
    for name, norm, c, fit_intercept in kinds:
        loss = get_loss(name)
        y = loss.example_target(30, c, generator)
        programs.append(Program(linear_map, y, loss, get_penalty(norm), 1.0, fit_intercept=fit_intercept))
    unmet = [solver.unmet_requirement(program) for program in programs]
    if None not in unmet:
        raise AssertionError(f"the solver applies to none of the programs here, as it needs {unmet}")
    for program, lacks in zip(programs, unmet, strict=True):
        if lacks is None:
            _assert_all(_optima(program, solver, tol))
            _assert_all(_sparsity_and_starts(program.with_alpha(0.95 * program.alpha_max), solver, tol))


def _optima(program: Program, solver: Solver, tol: float) -> _Identities:
    data, y = program.map.as_matrix().clone(), program.y.clone()
    program = program.with_alpha(0.2 * program.alpha_max)
    result = solve(program, solver, tol=tol)
    gap = result.certificate.relative_gap
    of_what = f"{program.loss} with {program.penalty} and fit_intercept={program.fit_intercept}"
    yield f"{of_what}: relative gap {gap:.3e} is not within {tol:.0e}", -1e-9 <= gap <= tol
    again = certify(program, result.coef, result.intercept)
    yield "the certificate is not that of the returned point", again.primal == result.certificate.primal
    yield "the solver changed the data", torch.equal(program.map.as_matrix(), data) and torch.equal(program.y, y)
    above = solve(program.with_alpha(1.05 * program.alpha_max), solver, tol=tol)
    yield "the solution above alpha_max must be exactly zero", above.coef == 0


def _sparsity_and_starts(program: Program, solver: Solver, tol: float) -> _Identities:
    cold = solve(program, solver, tol=tol)
    is_nonzero = program.penalty.group_values(cold.coef) > 0
    message = f"just below alpha_max {int(is_nonzero.sum())} groups are nonzero: zeros must be exact"
    yield message, bool(is_nonzero.any()) and not bool(is_nonzero.all())
    warm = solve(program, solver, tol=tol, start=(cold.coef, cold.intercept))
    yield "a start from the solution took longer than a cold one", warm.n_iter <= cold.n_iter
    yield "a warm start lost the solution", certify(program, warm.coef, warm.intercept).relative_gap <= tol
    state = solver.init(program, Point(cold.coef, cold.intercept))
    before = [part.clone() for part in _tensors(state)]
    point = completed(program, solver.point(program, solver.step(program, state)))
    same = all(torch.equal(part, old) for part, old in zip(_tensors(state), before, strict=True))
    yield "step changed tensors of the state before", same
    primal = certify(program, point.coef, point.intercept).primal
    yield "the first step from the solution lost it", primal <= cold.certificate.primal + 10 * tol * program.null_value


def _tensors(state: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]

"""Duality certificates in float64: objective of a point and lower bound on the optimum, independent of any solver."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .program import Program
from .result import Certificate
from .rounding import CANCELLED, SINGLE, SUM
from .validation import check_tensor


@torch.no_grad()
def certify(
    program: Program, coef: Tensor, intercept: Tensor | None = None, dual_hint: Tensor | None = None
) -> Certificate:
    """Bound the optimum of a program and the distance of a point from it.

    Parameters
    ----------
    program : Program
        The program in any precision; all arithmetic is float64.
    coef : Tensor of shape ``program.coef_shape``
        The point to certify.
    intercept : Tensor of shape (c,), optional
        Its intercept. Default: zeros.
    dual_hint : Tensor of shape (N, c), optional
        A dual point to try besides minus the gradient of each sample's loss at the point. It is centred, moved into the
        domain of the conjugate and scaled until feasible. The largest bound counts.

    Returns
    -------
    Certificate
        With a loss that has no conjugate ``dual``, ``gap`` and ``relative_gap`` are nan.

    Raises
    ------
    TypeError
        If one of its parts is no tensor.
    ValueError
        If the point does not have the shape of the program or is not finite, or the data of the map are not; if
        ``rmatvec`` of the map is not the adjoint of ``matvec`` at the point and a dual point, as then nothing is known.

    Notes
    -----
    By weak duality every feasible dual point bounds the optimum, whatever ``coef`` is. The dual point is that of the
    best intercept for ``coef``. For data that are not in memory, and without a ``dual_hint``, it is that of the given
    intercept, as both products then come from one read.

    Examples
    --------
    >>> import torch
    >>> from convexformer_solvers import DenseMap, GroupL2, Program, Squared
    >>> A = DenseMap(torch.eye(2, dtype=torch.float64)[:, :, None])
    >>> program = Program(A, torch.tensor([[3.0], [0.0]], dtype=torch.float64), Squared(), GroupL2(), alpha=0.5)
    >>> optimum = torch.tensor([[[2.0]], [[0.0]]])
    >>> certify(program, optimum).gap
    0.0
    >>> certify(program, 0 * optimum).gap
    1.0
    """
    _check_point(program, coef, intercept, dual_hint)
    program = program.to(device=coef.device)
    exact = program.with_float64_targets()
    coef = coef.detach().double()
    intercept = torch.zeros(coef.shape[-1]).to(coef) if intercept is None else intercept.detach().double()

    if exact.map.in_memory or dual_hint is not None:
        pred, feasible = _of_two_reads(exact, coef, intercept, dual_hint)
    else:
        pred, feasible = _of_one_read(exact, coef, intercept)
    primal = float(exact.loss_value(pred + intercept) + exact.alpha * exact.penalty.value(coef))
    dual, point = max(((float(exact.dual(theta)), theta) for theta in feasible), key=lambda pair: pair[0])
    return Certificate(primal, dual, exact.null_value, point)


def _of_two_reads(
    program: Program, coef: Tensor, intercept: Tensor, dual_hint: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Predictions without the intercept, and feasible dual points, of two reads of the data."""
    pred = program.map.sparse_matvec(coef)
    # With the best intercept, not the given one, the dual point is centred.
    best = program.best_intercept(pred, start=intercept if program.fit_intercept else None)
    candidates = [-program.loss.gradient(pred + best, program.y)]
    if dual_hint is not None:
        hint = dual_hint.detach().to(coef)
        # The conjugate of a loss without a common shift of the outputs is finite where these sum to zero.
        candidates.append(hint - hint.mean(1, keepdim=True) if program.loss.shift_invariant else hint)
    candidates = [program.of_counted(theta) for theta in candidates]
    # Where the loss overflows at the point, the best constant model gives a bound.
    usable = [theta for theta in candidates if bool(torch.isfinite(theta).all())] or [program.null_dual_point]
    return pred, _feasible_dual_points(program, usable, coef, pred)


def _of_one_read(program: Program, coef: Tensor, intercept: Tensor) -> tuple[Tensor, list[Tensor]]:
    """As ``_of_two_reads``, of data that are not in memory; the dual point is that of the given intercept.

    Its correlation after centring is ``A' diag(p) (theta - m) = A' diag(p) theta - (A' p) m``, and the weights ``p``
    are a last column of the same pass. Where ``m`` is larger than what it leaves, as of an intercept far from the best
    one, that difference is rounding, and the data are read again.
    """
    fit_intercept = program.fit_intercept
    pred, correlation = program.map.slopes_pass(coef, program.slopes(intercept, with_weight=fit_intercept))
    theta = torch.where(program.weight[:, None] > 0, -program.loss.gradient(pred + intercept, program.y), 0.0)
    if not bool(torch.isfinite(theta).all()):
        return pred, _feasible_dual_points(program, [program.null_dual_point], coef, pred)
    correlation, of_weight = correlation[..., : theta.shape[1]], correlation[..., theta.shape[1] :]
    _check_adjoint(program, coef, pred, theta, correlation)
    if not fit_intercept:
        return pred, [_scaled(program, theta, correlation)]
    centred = _centred(program, theta)
    if bool(((program.weight @ theta).abs() > program.weight @ centred.abs()).any()):
        return pred, _feasible_dual_points(program, [theta], coef, pred)

    def after_centring(point: Tensor, centred: Tensor, correlation: Tensor) -> Tensor:
        return torch.where((centred != 0).any(0), correlation - of_weight * (program.weight @ point), 0.0)

    correlation = after_centring(theta, centred, correlation)
    inside, share = _into_domain(program, centred)
    if share > 0:
        half = 0.5 * program.null_dual_point
        of_half = after_centring(half, _centred(program, half), 0.5 * program.null_correlation)
        correlation = torch.lerp(correlation, of_half, share)
    return pred, [_scaled(program, inside, correlation)]


def _check_point(program: Program, coef: Tensor, intercept: Tensor | None, dual_hint: Tensor | None) -> None:
    shapes = program.coef_shape, program.coef_shape[-1:], tuple(program.y.shape)
    given = {"coef": coef, "intercept": intercept, "dual_hint": dual_hint}
    for (name, part), shape in zip(given.items(), shapes, strict=True):
        if part is None and name != "coef":
            continue
        check_tensor(name, part)
        assert part is not None
        if tuple(part.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(part.shape)}")
        if part.is_complex():
            raise ValueError(f"{name} must hold real numbers, got {part.dtype}")
        if name != "dual_hint" and not bool(torch.isfinite(part).all()):
            raise ValueError("coef and intercept must be finite")
    if intercept is not None and not program.fit_intercept and bool((intercept != 0).any()):
        raise ValueError("intercept must be zero: the program has none")


def _feasible_dual_points(program: Program, candidates: list[Tensor], coef: Tensor, pred: Tensor) -> list[Tensor]:
    centred = [_centred(program, theta) for theta in candidates]
    moved = [_into_domain(program, theta) for theta in centred]
    # Scaling alone may move a point into the domain, too, and less far.
    candidates = centred + [point for point, share in moved if share > 0]
    if math.prod(program.coef_shape) > program.map.n_stored:  # one by one, to save memory
        correlations = map(program.weighted_adjoint, candidates)
    else:  # one product for all: the data are read once
        together = program.weighted_adjoint(torch.cat(candidates, dim=1))
        correlations = iter(together.split(program.y.shape[1], dim=-1))
    points = []
    for theta, correlation in zip(candidates, correlations, strict=True):
        _check_adjoint(program, coef, pred, theta, correlation)
        points.append(_scaled(program, theta, correlation))
    return points


def _check_adjoint(program: Program, coef: Tensor, pred: Tensor, theta: Tensor, correlation: Tensor) -> None:
    """Raise ``ValueError`` unless ``<A coef, diag(p) theta>`` and ``<coef, A' diag(p) theta>`` are the same."""
    of_samples, of_features = program.of_counted(program.weight[:, None] * theta * pred), coef * correlation
    of_samples = torch.cat([of_samples, of_samples.abs()], dim=1).sum(0)  # in one sum, which is a message to ranks
    left, size = (float(part.sum()) for part in of_samples.tensor_split(2))
    right = float(of_features.sum())
    if abs(left - right) > math.sqrt(SINGLE) * (size + float(of_features.abs().sum())):
        raise ValueError(
            f"map must have an rmatvec that is the adjoint of its matvec, got {type(program.map).__name__} with "
            f"<A coef, theta> = {left:.6g} and <coef, A' theta> = {right:.6g}; test it with check_map"
        )


def _scaled(program: Program, theta: Tensor, correlation: Tensor) -> Tensor:
    if program.n_parts > 1 and not program.outputs_separate:  # each part by itself
        parts = zip(theta.chunk(program.n_parts, dim=1), correlation.chunk(program.n_parts, dim=-1), strict=True)
        return torch.cat([_scaled(program.part(number), *part) for number, part in enumerate(parts)], dim=1)
    norms = program.penalty.group_dual_norms_in_any_units(correlation)
    largest = norms.reshape(-1, norms.shape[-1]).amax(0) if program.outputs_separate else norms.amax()
    if not bool(torch.isfinite(largest).all()):
        program.map.check_finite()
    # Where products overflow, zero is feasible.
    limit = torch.where(largest > 0, program.alpha / largest, math.inf).where(~largest.isnan(), 0.0)
    scale = program.loss.best_dual_scale(theta, program.y, program.weight, limit)
    return theta * torch.minimum(scale, limit).clamp(min=0.0)  # feasible whatever the loss returns


def _centred(program: Program, theta: Tensor) -> Tensor:
    """Subtract the weighted mean of each output, where there is an intercept.

    An output of rounding, whose mean would be scaled up, becomes zero.
    """
    if not program.fit_intercept:
        return theta
    size = program.weight @ theta.abs()
    for _ in range(2):  # the first leaves a mean of the rounding of the mean, which may be larger than the point
        theta = theta - program.weight @ theta
    remaining, centred_size = (program.weight @ theta).abs(), program.weight @ theta.abs()
    more_than_rounding = (centred_size > SUM * size) & (size > SUM * size.max())
    genuine = more_than_rounding & (remaining <= CANCELLED * centred_size)
    return torch.where(genuine, theta, 0.0)


def _into_domain(program: Program, theta: Tensor) -> tuple[Tensor, float]:
    """Mix a centred point with half the dual point of the best constant model until the conjugate is finite.

    Also returns the share of the latter.
    """

    def inside(point: Tensor) -> bool:
        return bool(program.dual(point) != -math.inf)  # or nan, of a loss without a conjugate

    if inside(theta):
        return theta, 0.0
    interior = _centred(program, 0.5 * program.null_dual_point)
    mixtures = ((torch.lerp(theta, interior, share), share) for share in (10.0**power for power in range(-17, 0)))
    return next((mixture for mixture in mixtures if inside(mixture[0])), (interior, 1.0))

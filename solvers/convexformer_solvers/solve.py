"""Outer loop of every solver: step, certify, stop."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor
from tqdm.auto import tqdm

from .algorithms.base import Solver
from .certificate import certify
from .certificate_schedule import Schedule
from .points import Point, completed, null_point
from .program import Program, out_of_range
from .reductions.base import Chain
from .reductions.weights import DropZeroWeights, SimplePenalty
from .result import History, Progress, SolverInterrupted, SolverResult, Status, check_tol
from .rounding import SINGLE
from .validation import as_dtype, check_callback, check_counts, check_device, check_kind, says_stop, warn_caller

Callback = Callable[[Progress], "bool | None"]


def solve(
    program: Program,
    solver: Solver,
    *,
    tol: float = 1e-4,
    max_iter: int = 10_000,
    start: tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor] | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    callback: Callback | None = None,
    verbose: bool = False,
) -> SolverResult:
    """Run a solver on a program until the certified relative gap is at most ``tol``.

    Parameters
    ----------
    program, solver : Program, Solver
        The program and the algorithm. The certificate is for the data of the program in their own precision.
    tol : float, default=1e-4
        Bound on the relative gap, ``(primal - dual) / (objective of the best constant model)``.
    max_iter : int, default=10000
        Iterations at most.
    start : (coef, intercept) or (coef, intercept, dual_point), optional
        Starting point, returned as it is where its gap is within ``tol``. Its certificate takes the dual point as a
        hint, as in ``certify``: with that of a certificate of the same program it is no worse. Default: the best
        constant model, which also replaces a start that is worse.
    dtype, device : torch.dtype, type of numpy or {'float32', 'float64'}, torch.device or str, optional
        Precision in which the solver works, and device of solver and certificate. Default: those of the map.
    callback : callable, optional
        Called with a ``Progress`` after each certificate, which come a little more often then; True stops the solve.
    verbose : bool, default=False
        Whether to show a progress bar with gap, objective and the solver's activity.

    Returns
    -------
    SolverResult
        The certified point with the smallest objective, without gradients, in the working precision and device.

    Raises
    ------
    SolverInterrupted
        On Ctrl-C; a ``KeyboardInterrupt`` whose ``result`` is the best point so far with its certificate.
    TypeError
        If ``solver`` is no solver or needs what the program does not have, or the callback cannot be called.
    ValueError
        If an argument is out of range, or squares of the data are out of the range of the precision.

    Warns
    -----
    ConvergenceWarning
        If ``max_iter`` or the precision ended the run with a larger gap than ``tol``, or if the lower bound is above
        the objective by more than rounding, as of a loss whose conjugate is too small.

    Examples
    --------
    >>> import torch
    >>> from convexformer_solvers import DenseMap, Fista, GroupL2, Program, Squared
    >>> A = DenseMap(torch.eye(2, dtype=torch.float64)[:, :, None])
    >>> program = Program(A, torch.tensor([[3.0], [0.0]], dtype=torch.float64), Squared(), GroupL2(), alpha=0.5)
    >>> solve(program, Fista(), tol=1e-10).coef.flatten()
    tensor([2., 0.], dtype=torch.float64)
    """
    options, (reference, chain) = Options(tol, max_iter, callback, verbose), reduced(program, solver, dtype, device)
    return solve_on(reference, chain, solver, options, starting_point(chain.original, start))[0]


@dataclasses.dataclass(frozen=True)
class Options:
    """Arguments of ``solve``, checked, and whether its callback may record gradients."""

    tol: float = 1e-4
    max_iter: int = 10_000
    callback: Callback | None = None
    verbose: bool = False
    gradients: bool = dataclasses.field(default_factory=torch.is_grad_enabled)

    def __post_init__(self) -> None:
        check_tol(self.tol)
        check_counts(max_iter=self.max_iter)
        check_callback(self.callback, "a Progress")


def reduced(
    program: Program, solver: Solver, dtype: torch.dtype | str | None, device: torch.device | str | None
) -> tuple[Program, Chain]:
    """A program on a device, and its reductions in a precision; ``TypeError`` where the solver does not apply."""
    check_kind("solver", solver, Solver, "get_solver('auto')")  # a name is not enough here
    precision, y, weight = as_dtype(dtype, program.map.dtype), program.y, program.sample_weight
    with torch.no_grad():
        if y.requires_grad or (weight is not None and weight.requires_grad):
            weight = None if weight is None else weight.detach()
            program = dataclasses.replace(program, y=y.detach(), sample_weight=weight)
        reference = program.to(device=check_device(device, program.map.device))
        working = reference.to(dtype=precision)
        simplest = Chain.of(working, (SimplePenalty(),)).program
        simplest.penalty.check_shape(working.coef_shape)
        if (unmet := solver.unmet_requirement(simplest)) is not None:
            raise TypeError(f"solver {solver.name!r} needs {unmet}")
        return reference, Chain.of(working, (DropZeroWeights(), SimplePenalty(), *solver.reductions))


def solve_on(
    reference: Program,
    chain: Chain,
    solver: Solver,
    options: Options,
    start: Point | None,
    previous: Any = None,
    known: Sequence[Point] = (),
) -> tuple[SolverResult, Point, Any]:
    """``solve`` from a point and a state of a solve on the same data; also returns those that it ends with.

    `reference` is the program of the certificates, `chain` that of the solver. A solve that does not get to ``tol`` is
    no worse than the `known` points.
    """
    with (
        torch.no_grad(),  # data that require gradients have none of the solution's
        tqdm(total=options.max_iter, disable=not options.verbose, desc=solver.name, unit="it", leave=True) as bar,
    ):
        run = _Run(reference, chain, solver, options, bar, start)
        try:
            status = run.check(run.start) if run.is_given else None
            if status is None:
                run.begin(previous)
                status = run.until_stop()
                if status is not Status.CONVERGED:
                    run.record_earlier(status, known)
                    if run.is_within_tol and status is not Status.STOPPED:  # which who stopped it expects
                        status = Status.CONVERGED
        except KeyboardInterrupt:
            status = run.interrupted()
    result = run.result(status)
    if status is Status.INTERRUPTED:
        raise SolverInterrupted(result)
    if status in (Status.MAX_ITER, Status.STALLED):
        _warn_not_converged(result, options, chain.original.map.dtype, run.first_not_finite)
    if result.certificate.relative_gap < -SINGLE:  # more than rounding
        _warn_contradiction(result, reference)
    return result, run.last, run.state


class _Run:
    """One solve: the state of the solver, certificates, best point, history."""

    best: Progress
    last: Point
    last_gap: float

    def __init__(
        self, reference: Program, chain: Chain, solver: Solver, options: Options, bar: tqdm, start: Point | None
    ) -> None:
        self.reference, self.chain, self.solver = reference, chain, solver
        self.options, self.bar, self.start = options, bar, start or null_point(chain.original)
        # What a user or a file gives has no predictions, and may be within tol; extrapolations of a path have some.
        self.is_given = start is not None and start.pred is None
        self.history, self.began = History(), time.perf_counter()
        self.iteration, self.state = 0, None
        self.first_not_finite: int | None = None  # iteration of the first point that has left the range

    def begin(self, previous: Any) -> None:
        """Set the first state: at the best constant model where a given start is worse, and so the result at worst."""
        start = self.start
        if self.is_given and not self.best.certificate.primal <= self.reference.null_value:
            start = self.record(null_point(self.chain.original))
        start = self.chain.restrict(start._replace(dual=None) if self.is_given else start)
        program, solver, known = self.chain.program, self.solver, previous is not None
        try:
            self.state = solver.init_again(program, start, previous) if known else solver.init(program, start)
        except torch.linalg.LinAlgError as error:
            raise self.factorisation_failed(error) from error

    def until_stop(self) -> Status:
        """Step until a certificate, the callback, the solver or the number of iterations ends the run."""
        options, solver, program = self.options, self.solver, self.chain.program
        watched = options.verbose or options.callback is not None
        schedule = Schedule(options.tol * self.reference.null_value, watched)
        while True:
            try:
                self.state = solver.step(program, self.state)
            except torch.linalg.LinAlgError as error:
                if self.iteration == 0:
                    raise self.factorisation_failed(error) from error
                self.record_latest()
                return Status.CONVERGED if self.is_within_tol else Status.STALLED
            self.iteration += 1
            if not self.bar.disable:
                self.bar.set_description_str(solver.activity(self.state), refresh=False)
            self.bar.update()
            finished, estimate = solver.finished(self.state), solver.gap_estimate(program, self.state)
            out_of_iterations = self.iteration == options.max_iter
            if not (finished or out_of_iterations or schedule.due(self.iteration, estimate)):
                continue
            status = self.check(self.latest())
            schedule.certified(self.iteration, estimate, self.last_gap)
            if status is not None:
                return status
            # The estimate is within the tolerance, and the gap of the rounded point is not.
            if finished or (schedule.stands_still and self.chain.original.y.dtype == torch.float32):
                return Status.STALLED
            if out_of_iterations:
                return Status.MAX_ITER

    def factorisation_failed(self, error: Exception) -> ValueError:
        """The error where matrices hold infinite numbers, or almost only zeros, from the first step on."""
        dtype = self.chain.program.y.dtype
        failed = f"a factorisation of solver {self.solver.name!r} failed in {dtype} ({error})"
        return ValueError(f"{failed}, as a rule because {out_of_range(dtype)}")

    def latest(self) -> Point:
        """The point of the state, of the program in the precision of the solve."""
        if self.iteration == 0:
            return self.start
        point = self.solver.point(self.chain.program, self.state)
        check_kind(f"what point of solver {self.solver.name!r} returns", point, Point, "Point(coef)")
        for name, part in point._asdict().items():
            if part is not None or name == "coef":
                check_kind(
                    f"{name} of the point of solver {self.solver.name!r}", part, Tensor, f"torch.as_tensor({name})"
                )
        return completed(self.chain.original, self.chain.invert(point))

    @property
    def is_within_tol(self) -> bool:
        """Whether the gap of the best point is."""
        return self.best.certificate.relative_gap <= self.options.tol

    def interrupted(self) -> Status:
        """Certify the last point, unless that has been done, and the starting point, which has been if given."""
        try:
            self.record_latest()
            self.record_earlier(Status.INTERRUPTED)
        except KeyboardInterrupt:  # again: what has been certified by now is the result
            if not self.history.iteration:
                raise
        return Status.INTERRUPTED

    def record_latest(self) -> None:
        """Certify the last point, unless that has been done."""
        if not self.history.iteration or self.history.iteration[-1] < self.iteration:
            self.last = self.record(self.latest())

    def record_earlier(self, status: Status, known: Sequence[Point] = ()) -> None:
        """Certify points that steps may have led away from: the start, unless given, those of the solver, known ones.

        All but the start cost time, which a run that a callback or Ctrl-C has ended does not take.
        """
        if status in (Status.MAX_ITER, Status.STALLED):
            points = self.solver.earlier_points(self.state)[::-1]
            if self.chain.original.y.dtype == torch.float32 and self.last.dual is None:  # else all is known of the last
                points = (self.solver.point(self.chain.program, self.state), *points)
            for point in points:
                if not self.is_within_tol:
                    self.record(self.unrounded(point), only_if_better=True)
            for point in known:
                self.record(point, only_if_better=True)
        if not self.is_given:
            self.record(self.start, only_if_better=True)

    def unrounded(self, point: Point) -> Point:
        """A point of the solver with the dual point of its coefficients before these are rounded to float32.

        The dual point of rounded coefficients is off by as much as their predictions are. Their objective is off by the
        square of that alone.
        """
        exact, point = self.chain.in_double, self.chain.point_in_double(point)
        rounded = point.coef.to(self.chain.original.y.dtype)
        if point.pred is None and point.dual is None and bool((rounded != point.coef).any()):
            pred = exact.program.map.matvec(point.coef)
            intercept = exact.program.best_intercept(pred) if point.intercept is None else point.intercept
            point = point._replace(pred=pred + intercept)
        return completed(self.chain.original, exact.invert(point))

    def check(self, point: Point) -> Status | None:
        """Certify a point and ask the callback; the status that ends the run, if it does."""
        self.last = self.record(point)
        # The convergence test comes first: a converged point is converged whatever the callback says.
        with torch.set_grad_enabled(self.options.gradients):
            stop = says_stop(self.options.callback, self.best)
        return Status.CONVERGED if self.is_within_tol else Status.STOPPED if stop else None

    def record(self, point: Point, only_if_better: bool = False) -> Point:
        """Certify a point, or the start where it has left the range, and keep the best; returns the certified one."""
        if not all(bool(torch.isfinite(part).all()) for part in point[:2] if part is not None):
            point, self.first_not_finite = self.start, self.first_not_finite or self.iteration
        coef, intercept, dual = point[:3]
        assert intercept is not None
        certificate, seconds = certify(self.reference, coef, intercept, dual), time.perf_counter() - self.began
        self.last_gap, best = certificate.gap, self.best if self.history.iteration else None
        if best is not None:
            certificate = certificate.tighten(best.certificate)
            if best.certificate.primal < certificate.primal:
                coef, intercept, certificate = best.coef, best.intercept, best.certificate.tighten(certificate)
            if only_if_better and best.certificate.gap <= certificate.gap:
                return point
        self.best = Progress(self.iteration, seconds, certificate, coef, intercept)
        self.history.append(self.iteration, seconds, certificate)
        shown = f"gap {certificate.relative_gap:.1e}, objective {certificate.primal:.6g}"
        self.bar.set_postfix_str(shown, refresh=False)
        return point

    def result(self, status: Status) -> SolverResult:
        """The best point in tensors of its own."""
        best, seconds, name = self.best, time.perf_counter() - self.began, self.solver.name
        coef, intercept, certificate = best.coef.clone(), best.intercept.clone(), best.certificate
        if certificate.dual_point is not None:
            dual_point = self.reference.map.gathered(certificate.dual_point)
            certificate = dataclasses.replace(certificate, dual_point=dual_point)
        return SolverResult(coef, intercept, certificate, status, self.iteration, seconds, self.history, name)


def starting_point(program: Program, start: Any) -> Point | None:
    """The point of a start as users give it, in copies of its tensors; ``TypeError`` or ``ValueError``."""
    if start is None:
        return None
    parts = start if isinstance(start, (tuple, list)) else ()
    if len(parts) not in (2, 3) or not all(isinstance(part, Tensor) for part in parts):
        found = " and ".join(type(part).__name__ for part in parts or (start,))
        wanted = "a pair of tensors, coefficients and intercept"
        raise TypeError(f"start must be {wanted}, got {found}; of a result that is (result.coef, result.intercept)")
    if any(part.is_complex() for part in parts):
        raise ValueError(f"start must hold real numbers, got {' and '.join(str(part.dtype) for part in parts)}")
    coef, intercept = (part.detach().to(program.y, copy=True) for part in parts[:2])
    dual = parts[2].detach().to(program.map.device, torch.float64) if len(parts) == 3 else None
    shapes = (program.coef_shape, program.coef_shape[-1:], tuple(program.y.shape))[: len(parts)]
    given = tuple(tuple(part.shape) for part in parts)
    if given != shapes:
        names = ("a coefficient array", "an intercept", "a dual point")
        wanted = ", ".join(f"{name} of shape {shape}" for name, shape in zip(names, shapes, strict=False))
        raise ValueError(f"start must be {wanted}, got {', '.join(map(str, given))}")
    if not all(bool(torch.isfinite(part).all()) for part in (coef, intercept, dual) if part is not None):
        raise ValueError("start must be finite in the precision of the solve, got NaN or infinite values")
    if not program.fit_intercept and bool((intercept != 0).any()):
        raise ValueError(f"start must have an intercept of zeros, as the program has none; got {intercept.tolist()}")
    return Point(coef, intercept, dual)


def _warn_not_converged(
    result: SolverResult, options: Options, dtype: torch.dtype, first_not_finite: int | None
) -> None:
    gap = result.certificate.relative_gap
    if math.isnan(gap):
        told = (
            f"ended after {result.n_iter} iterations with certified relative gap nan: the loss defines no method "
            "'conjugate', without which there is no bound, or one that gives nan. The result is usable and has no "
            "certificate. What helps: define it, inf outside its domain, and test it with check_loss."
        )
    else:
        raised = f"raise max_iter (now {options.max_iter}), raise tol or alpha, scale the features"
        remedies = raised if result.status is Status.MAX_ITER else "raise tol, scale and centre the features"
        remedies += "" if dtype == torch.float64 else ", solve in float64 (dtype='float64')"
        remedies += "" if result.solver == "auto" else ", take solver='auto'"
        lost = "" if first_not_finite is None else f" Its point of iteration {first_not_finite} was NaN or infinite."
        told = (
            f"did not converge in {result.n_iter} iterations: certified relative gap {gap:.3e} > tol "
            f"{options.tol:.3e}.{lost} The result is usable and its certificate is true. What helps: {remedies}."
        )
    warn_caller(f"Solver {result.solver!r} {told}", ConvergenceWarning)


def _warn_contradiction(result: SolverResult, program: Program) -> None:
    """Warn of a lower bound above the objective of a point, which methods or data that are not consistent lead to."""
    warn_caller(
        f"The certificate of solver {result.solver!r} contradicts itself: the bound {result.certificate.dual:.6g} is "
        f"above the objective {result.certificate.primal:.6g}. As a rule the conjugate of the loss or the dual norm of "
        f"the penalty is too small, or the solver changes the data. What helps: test {program.loss!r} with check_loss, "
        f"{program.penalty!r} with check_penalty, a solver of your own with check_solver.",
        ConvergenceWarning,
    )

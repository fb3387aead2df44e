"""The one loop that runs, certifies and stops every solver."""

from __future__ import annotations

import dataclasses
import inspect
import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor
from tqdm.auto import tqdm

from .algorithms.base import Solver, check_solver_type
from .certificate import certify
from .certificate_schedule import Schedule
from .points import Point, completed, null_point
from .program import Program
from .reductions.base import Chain
from .reductions.weights import DropZeroWeights, SimplePenalty
from .result import Certificate, History, Progress, SolverInterrupted, SolverResult, Status, check_tol
from .validation import as_dtype, check_callback, check_counts

Callback = Callable[[Progress], "bool | None"]


def solve(
    program: Program,
    solver: Solver,
    *,
    tol: float = 1e-4,
    max_iter: int = 10_000,
    start: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    callback: Callback | None = None,
    verbose: bool = False,
) -> SolverResult:
    """Run a solver on a program until the certified relative gap is at most ``tol``.

    Parameters
    ----------
    program : Program
        What to solve. The certificate speaks of the program in the precision given here.
    solver : Solver
        The algorithm.
    tol : float, default=1e-4
        Bound on the relative gap, ``(primal - dual) / (objective of the best constant model)``.
    max_iter : int, default=10000
        Iterations at most.
    start : (coef, intercept), optional
        Starting point, returned as it is where its certified gap is within ``tol``. Default: the best constant model,
        which also takes the place of a start that is worse.
    dtype : torch.dtype, type of numpy or {'float32', 'float64'}, optional
        Precision in which the solver works. Default: that of the program's map.
    device : torch.device or str, optional
        Device on which solver and certificate work. Default: that of the program's map.
    callback : callable, optional
        Called with a ``Progress`` after each certificate; returning True stops the solve. With a callback or a
        progress bar certificates come a little more often.
    verbose : bool, default=False
        Whether to show a progress bar with gap, objective and what the solver is doing.

    Returns
    -------
    SolverResult
        The certified point with the smallest objective, tensors in the working precision and on the working device,
        without gradients.

    Raises
    ------
    SolverInterrupted
        On Ctrl-C; a ``KeyboardInterrupt`` whose ``result`` is the best point so far with its certificate.
    TypeError
        If ``solver`` is no solver or needs what the program does not have, or the callback cannot be called.
    ValueError
        If ``tol``, ``max_iter``, ``dtype`` or ``start`` are out of range, or the data in units whose squares leave the
        precision.

    Warns
    -----
    ConvergenceWarning
        If ``max_iter`` or the precision ended the run with a larger gap than ``tol``.

    Examples
    --------
    >>> import torch
    >>> from convexformer_solvers import DenseMap, Fista, GroupL2, Program, Squared
    >>> A = DenseMap(torch.eye(2, dtype=torch.float64)[:, :, None])
    >>> program = Program(A, torch.tensor([[3.0], [0.0]], dtype=torch.float64), Squared(), GroupL2(), alpha=0.5)
    >>> solve(program, Fista(), tol=1e-10).coef.flatten()
    tensor([2., 0.], dtype=torch.float64)
    """
    options = Options(tol, max_iter, callback, verbose)
    point = as_point(start)
    return solve_on(forms_for(solver, program, dtype, device), solver, options, point)[0]


@dataclasses.dataclass(frozen=True)
class Options:
    """What ends a solve and who watches it, with or without gradients; the arguments of ``solve``, which it checks."""

    tol: float = 1e-4
    max_iter: int = 10_000
    callback: Callback | None = None
    verbose: bool = False
    gradients: bool = dataclasses.field(default_factory=torch.is_grad_enabled)

    def __post_init__(self) -> None:
        check_tol(self.tol)
        check_counts(max_iter=self.max_iter)
        check_callback(self.callback, "a Progress")


class WarmStart(NamedTuple):
    """What a solve leaves to the next one on the same data.

    Attributes
    ----------
    point : Point
        The last point of the solver.
    state : object
        Its last state.
    """

    point: Point
    state: Any


class Forms(NamedTuple):
    """The forms of a program that a solve needs.

    Attributes
    ----------
    reference : Program
        What certificates speak of, on the device of the solve.
    chain : Chain
        The program in the precision of the solve, and what reductions make of it for the solver.
    """

    reference: Program
    chain: Chain

    @property
    def working(self) -> Program:
        """The program in the precision of the solve."""
        return self.chain.original

    def with_alpha(self, alpha: float) -> Forms:
        """Those of the program with another ``alpha``."""
        return Forms(self.reference.with_alpha(alpha), self.chain.with_alpha(alpha))


def forms_for(
    solver: Solver, program: Program, dtype: torch.dtype | str | None, device: torch.device | str | None
) -> Forms:
    """The forms of a program for a solve in a precision and on a device; ``TypeError`` where it is not for the solver.

    That is the same for every ``alpha``.
    """
    check_solver_type(solver)
    precision = as_dtype(dtype, program.map.dtype)
    with torch.no_grad():
        reference = _without_gradients(program).to(device=device)
        working = reference.to(dtype=precision)
        simple = SimplePenalty()
        simplest = simple.apply(working)[0] if simple.accepts(working) else working
        simplest.penalty.check_shape(working.coef_shape)
        unmet = solver.unmet_requirement(simplest)
        if unmet is not None:
            raise TypeError(f"solver {solver.name!r} needs {unmet}")
        return Forms(reference, Chain.of(working, (DropZeroWeights(), simple, *solver.reductions)))


def _without_gradients(program: Program) -> Program:
    """The same program with targets and weights that do not require gradients."""
    y, weight = program.y, program.sample_weight
    if not (y.requires_grad or (weight is not None and weight.requires_grad)):
        return program
    return dataclasses.replace(program, y=y.detach(), sample_weight=None if weight is None else weight.detach())


def solve_on(
    forms: Forms, solver: Solver, options: Options, start: Point | None = None, previous: Any = None
) -> tuple[SolverResult, WarmStart]:
    """``solve`` from a point and a state of a solve on the same data; also returns those that it ends with."""
    with (
        torch.no_grad(),  # data that require gradients have none of the solution's
        tqdm(total=options.max_iter, disable=not options.verbose, desc=solver.name, unit="it", leave=True) as bar,
    ):
        first = _starting_point(forms.working, start)
        run = _Run(forms.reference, solver.name, options, first)
        # Predictions come with points on the way to somewhere; one without may be good enough as it is.
        given = start is not None and start.pred is None
        state: Any = previous
        within_tol = False
        try:
            status = run.check(first, bar) if given else None
            if status is None:
                origin = null_point(forms.working) if given and run.is_worse_than_constant else first
                state = _first_state(forms.chain, solver, origin, previous)
                status, state = run.until_stop(forms.chain, solver, state, bar)
            # A given start has been certified.
            within_tol = status is not Status.CONVERGED and not given and run.falls_back_on(first)
        except KeyboardInterrupt:
            status = run.interrupted(bar, None if given else first)
    # Who ended the run is not told that it ended by itself.
    if within_tol and status in (Status.MAX_ITER, Status.STALLED):
        status = Status.CONVERGED
    result = run.result(status)
    if status is Status.INTERRUPTED:
        raise SolverInterrupted(result)
    if status in (Status.MAX_ITER, Status.STALLED):
        _warn_not_converged(result, options, forms.working.map.dtype)
    return result, WarmStart(run.last, state)


def _factorisation_failed(solver: Solver, program: Program, error: Exception) -> ValueError:
    """What to say where matrices hold infinite numbers, or next to none but zeros, from the first step on."""
    return ValueError(
        f"a factorisation of solver {solver.name!r} failed in {program.y.dtype} ({error}), as a rule because squares "
        "of the data or the targets are too small or too large for it; scale the features (and alpha with them) or the "
        "targets to about one"
    )


def _first_state(chain: Chain, solver: Solver, start: Point, previous: Any) -> Any:
    program, start = chain.program, chain.restrict(start)
    try:
        return solver.init(program, start) if previous is None else solver.init_again(program, start, previous)
    except torch.linalg.LinAlgError as error:
        raise _factorisation_failed(solver, program, error) from error


def _point(chain: Chain, solver: Solver, state: Any) -> Point:
    """The point of a state, of the program in the precision of the solve."""
    return completed(chain.original, chain.invert(solver.point(chain.program, state)))


class _Run:
    """Book-keeping of one solve: certificates, best point, history."""

    def __init__(self, program: Program, solver_name: str, options: Options, start: Point) -> None:
        self.program, self.solver_name, self.options, self.start = program, solver_name, options, start
        self.latest: Callable[[], Point] = lambda: start
        self.history = History()
        self.began = time.perf_counter()
        self.iteration = 0
        self.best: tuple[Point, Certificate] | None = None
        self.last: Point
        self.last_gap: float

    def until_stop(self, chain: Chain, solver: Solver, state: Any, bar: tqdm) -> tuple[Status, Any]:
        options, program = self.options, chain.program
        watched = options.verbose or options.callback is not None
        schedule = Schedule(options.tol * self.program.null_value, watched)
        while True:
            try:
                state = solver.step(program, state)
            except torch.linalg.LinAlgError as error:
                if self.iteration == 0:
                    raise _factorisation_failed(solver, program, error) from error
                return self.stalled(bar), state
            self.latest = partial(_point, chain, solver, state)
            self.iteration += 1
            if not bar.disable:
                bar.set_description_str(solver.activity(state), refresh=False)
            bar.update()
            finished, estimate = solver.finished(state), solver.gap_estimate(program, state)
            if not (finished or self.iteration == options.max_iter or schedule.due(self.iteration, estimate)):
                continue
            status = self.check(self.latest(), bar)
            schedule.certified(self.iteration, estimate, self.last_gap)
            if status is not None:
                return status, state
            # The solver is there, and what it is rounded to is not.
            too_rough = schedule.stands_still and chain.original.y.dtype == torch.float32
            if finished or too_rough:
                return Status.STALLED, state
            if self.iteration == options.max_iter:
                return Status.MAX_ITER, state

    @property
    def is_worse_than_constant(self) -> bool:
        """Whether the best point so far is worse than the best constant model."""
        assert self.best is not None
        return not self.best[1].primal <= self.program.null_value

    def falls_back_on(self, start: Point) -> bool:
        """Take the starting point where no other is as good, as few steps may lead away; whether it is within tol."""
        assert self.best is not None
        certificate = certify(self.program, start.coef, start.intercept, start.dual).tighten(self.best[1])
        if certificate.primal >= self.best[1].primal:
            return False
        self.best = (start, certificate)
        self.history.append(self.iteration, time.perf_counter() - self.began, certificate)
        return certificate.relative_gap <= self.options.tol

    def stalled(self, bar: tqdm) -> Status:
        """How a run ended that could take no further step."""
        self.record_latest(bar)
        assert self.best is not None
        return Status.CONVERGED if self.best[1].relative_gap <= self.options.tol else Status.STALLED

    def record_latest(self, bar: tqdm) -> None:
        """Certify the last point, unless that has been done."""
        if not self.history.iteration or self.history.iteration[-1] < self.iteration:
            self.record(self.latest(), bar)

    def interrupted(self, bar: tqdm, fallback: Point | None) -> Status:
        """Certify the last point, unless that has been done, and the one to fall back on, if there is one."""
        try:
            self.record_latest(bar)
            if fallback is not None:
                self.falls_back_on(fallback)
        except KeyboardInterrupt:  # again: what has been certified by now is the result
            if self.best is None:
                raise
        return Status.INTERRUPTED

    def check(self, point: Point, bar: tqdm) -> Status | None:
        """Certify a point and ask the callback; the status that ends the run, if it does."""
        progress = self.record(point, bar)
        # The convergence test comes first: a converged point is converged whatever the callback says.
        callback = self.options.callback
        with torch.set_grad_enabled(self.options.gradients):
            stop = callback is not None and bool(callback(progress))
        if progress.certificate.relative_gap <= self.options.tol:
            return Status.CONVERGED
        return Status.STOPPED if stop else None

    def record(self, point: Point, bar: tqdm) -> Progress:
        """Certify a point and keep the best one so far; one that has left the range of its precision is the start."""
        assert point.intercept is not None
        if not bool(torch.isfinite(point.coef).all() and torch.isfinite(point.intercept).all()):
            point = self.start
        self.last = point
        certificate = certify(self.program, point.coef, point.intercept, point.dual)
        self.last_gap = certificate.gap
        if self.best is not None:
            certificate = certificate.tighten(self.best[1])
            if self.best[1].primal < certificate.primal:
                point = self.best[0]
                certificate = self.best[1].tighten(certificate)
        self.best = (point, certificate)
        assert point.intercept is not None
        seconds = time.perf_counter() - self.began
        self.history.append(self.iteration, seconds, certificate)
        bar.set_postfix_str(f"gap {certificate.relative_gap:.1e}, objective {certificate.primal:.6g}", refresh=False)
        return Progress(self.iteration, seconds, certificate, point.coef, point.intercept)

    def result(self, status: Status) -> SolverResult:
        assert self.best is not None
        (coef, intercept, *_), certificate = self.best
        assert intercept is not None
        # Results are nobody else's tensors.
        return SolverResult(
            coef.clone(),
            intercept.clone(),
            certificate,
            status,
            self.iteration,
            time.perf_counter() - self.began,
            self.history,
            self.solver_name,
        )


def as_point(start: Any) -> Point | None:
    """The point of a start as users give it, a pair; its parts are checked when the solve begins."""
    if start is None or isinstance(start, Point):
        return start
    if not isinstance(start, (tuple, list)) or len(start) != 2:
        found = f"{len(start)} of them" if isinstance(start, (tuple, list)) else type(start).__name__
        raise TypeError(
            f"start must be a pair of tensors, coefficients and intercept, got {found}; of an earlier result that is "
            "(result.coef, result.intercept)"
        )
    return Point(*start)


def _starting_point(program: Program, start: Point | None) -> Point:
    if start is None:
        return null_point(program)
    coef, intercept = start.coef, start.intercept
    if not (isinstance(coef, Tensor) and isinstance(intercept, Tensor)):
        kinds = f"{type(coef).__name__} and {type(intercept).__name__}"
        raise TypeError(f"start must be a pair of tensors, coefficients and intercept, got {kinds}")
    # Copies: results are nobody else's tensors.
    coef, intercept = coef.detach().to(program.y, copy=True), intercept.detach().to(program.y, copy=True)
    if tuple(coef.shape) != program.coef_shape or tuple(intercept.shape) != program.coef_shape[-1:]:
        raise ValueError(
            f"start must be a coefficient array of shape {program.coef_shape} and an intercept of shape "
            f"{program.coef_shape[-1:]}, got {tuple(coef.shape)} and {tuple(intercept.shape)}"
        )
    if not bool(torch.isfinite(coef).all() and torch.isfinite(intercept).all()):
        raise ValueError("start must be finite in the precision of the solve, got NaN or infinite values")
    if not program.fit_intercept and bool((intercept != 0).any()):
        raise ValueError(f"start must have an intercept of zeros, as the program has none; got {intercept.tolist()}")
    return start._replace(coef=coef, intercept=intercept)


def _warn_not_converged(result: SolverResult, options: Options, dtype: torch.dtype) -> None:
    if math.isnan(result.certificate.gap):
        warnings.warn(
            f"Solver {result.solver!r} ended after {result.n_iter} iterations with certified relative gap nan: the "
            "loss defines no method 'conjugate', without which there is no bound. The result is usable and has no "
            "certificate. What helps: define it, and test it with check_loss.",
            ConvergenceWarning,
            stacklevel=_level_of_caller(),
        )
        return
    more = "" if dtype == torch.float64 else ", solve in float64 (dtype='float64')"
    more += "" if result.solver == "auto" else ", take solver='auto'"
    remedies = {
        Status.MAX_ITER: f"raise max_iter (now {options.max_iter}), raise tol or alpha, scale the features{more}",
        Status.STALLED: f"raise tol, scale and centre the features{more}",
    }
    warnings.warn(
        f"Solver {result.solver!r} did not converge in {result.n_iter} iterations: certified relative gap "
        f"{result.certificate.relative_gap:.3e} > tol {options.tol:.3e}. The result is usable and its certificate is "
        f"true. What helps: {remedies[result.status]}.",
        ConvergenceWarning,
        stacklevel=_level_of_caller(),
    )


_OWN_PACKAGES = ("convexformer", "convexformer_solvers")


def _level_of_caller() -> int:
    """Stack level, for a warning of the calling function, of the line outside this package that led there."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OWN_PACKAGES:
        frame, level = frame.f_back, level + 1
    return level

"""What a solve returns: status, certificate, history and the solution itself."""

from __future__ import annotations

import copyreg
import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from torch import Tensor

from .validation import is_real


class Status(Enum):
    """How a solve ended; the value is the message that users read."""

    CONVERGED = "converged: the certified relative gap is within tol"
    MAX_ITER = "out of iterations before the certified relative gap was within tol"
    STALLED = "no further progress is possible in this solver and precision"
    STOPPED = "stopped by the callback"
    INTERRUPTED = "interrupted from the keyboard"


@dataclass(frozen=True, repr=False)
class Certificate:
    """Float64 bounds on the optimal value, computed by ``certify`` and by nothing else.

    Attributes
    ----------
    primal, dual : float
        Objective at the point, and lower bound on the optimal value; nan when the loss has no conjugate.
    reference : float
        ``Program.null_value``, the objective of the best constant model: the unit of the relative gap.
    dual_point : Tensor of shape (N, c) or None
        The feasible point behind `dual`, at which ``Program.dual`` gives that bound.

    Examples
    --------
    >>> Certificate(primal=1.5, dual=1.25, reference=5.0)
    Certificate(primal=1.5, dual=1.25, gap=0.25, relative_gap=0.05)
    """

    primal: float
    dual: float
    reference: float
    dual_point: Tensor | None = field(default=None, compare=False)

    @property
    def gap(self) -> float:
        """``primal - dual``, which bounds the distance from the optimum; negative at most by rounding."""
        return self.primal - self.dual

    @property
    def relative_gap(self) -> float:
        """``gap / reference``; what ``tol`` bounds."""
        if self.gap == 0.0:
            return 0.0
        return self.gap / self.reference if self.reference > 0 else math.copysign(math.inf, self.gap)

    def tighten(self, other: Certificate) -> Certificate:
        """This certificate with the better dual bound of two certificates of the same program."""
        return replace(self, dual=other.dual, dual_point=other.dual_point) if other.dual > self.dual else self

    def __repr__(self) -> str:
        gaps = f"gap={self.gap:.3g}, relative_gap={self.relative_gap:.2g}"
        return f"Certificate(primal={self.primal:.6g}, dual={self.dual:.6g}, {gaps})"


@dataclass
class History:
    """Certified progress of a solve, one entry per certificate.

    Attributes
    ----------
    iteration, seconds, primal, dual, relative_gap : list
        Iterations done, seconds since the start, and numbers of the certificate.
    """

    iteration: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    primal: list[float] = field(default_factory=list)
    dual: list[float] = field(default_factory=list)
    relative_gap: list[float] = field(default_factory=list)

    def append(self, iteration: int, seconds: float, certificate: Certificate) -> None:
        """Record one certificate."""
        entry = (iteration, seconds, certificate.primal, certificate.dual, certificate.relative_gap)
        for numbers, number in zip(vars(self).values(), entry, strict=True):
            numbers.append(number)

    def __repr__(self) -> str:
        if not self.iteration:
            return "History(no certificates)"
        gaps = f"relative gap {self.relative_gap[0]:.2g} to {self.relative_gap[-1]:.2g}"
        return f"History({len(self.iteration)} certificates, {self.iteration[-1]} iterations, {gaps})"


@dataclass(frozen=True, eq=False)  # tensors have no single truth value
class Progress:
    """What a callback sees after each certificate; returning True stops the solve.

    Attributes
    ----------
    iteration, seconds : int, float
        Iterations done and seconds since the start.
    certificate : Certificate
        Certificate of the point with the smallest objective so far.
    coef, intercept : Tensor of shape (*feature_shape, c), Tensor of shape (c,)
        That point; not to be modified.

    Examples
    --------
    >>> def callback(progress):  # solve(..., callback=callback) ends after a minute
    ...     return progress.seconds > 60
    """

    iteration: int
    seconds: float
    certificate: Certificate
    coef: Tensor = field(repr=False)
    intercept: Tensor = field(repr=False)


@dataclass(frozen=True, eq=False)  # tensors have no single truth value
class SolverResult:
    """Solution of a program with its certificate.

    Attributes
    ----------
    coef, intercept : Tensor of shape (*feature_shape, c), Tensor of shape (c,)
        The point; its intercept is zero when the program has none.
    certificate, history : Certificate, History
        Float64 bounds at exactly this point, and those on the way to it.
    status, solver : Status, str
        How the solve ended, and the name of the solver.
    n_iter, seconds : int, float
        Iterations done and wall time.
    """

    coef: Tensor = field(repr=False)
    intercept: Tensor = field(repr=False)
    certificate: Certificate
    status: Status
    n_iter: int
    seconds: float
    history: History = field(repr=False)
    solver: str


def check_tol(tol: Any) -> None:
    """Raise ``ValueError`` unless ``tol`` is a non-negative number."""
    if not (is_real(tol) and float(tol) >= 0):
        raise ValueError(f"tol must be a non-negative number, got {tol!r}")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C with what is finished by then; subclasses take other arguments than a message and can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class SolverInterrupted(Interrupted):
    """Raised on Ctrl-C during a solve; `result` holds the best point so far and its certificate."""

    def __init__(self, result: SolverResult) -> None:
        super().__init__(
            f"{result.status.value} after {result.n_iter} iterations, at a relative gap of "
            f"{result.certificate.relative_gap:.2g}; .result, or the estimator in whose fit this was, holds the best "
            "point and its certificate"
        )
        self.result = result


class SolverUnavailableError(RuntimeError):
    """A solver that was asked for is not installed or has no licence; the message says what to do."""

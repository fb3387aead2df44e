"""Gates by column generation: the gate that violates the dual constraint most is added until none is found."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor
from tqdm.auto import tqdm

from convexformer.programs.build import build_program
from convexformer.validation import as_targets, as_weight, check_flag, check_program_tokens, check_stream, check_weight
from convexformer_solvers import (
    Certificate,
    Loss,
    Penalty,
    Program,
    Solver,
    SolverInterrupted,
    SolverResult,
    get_loss,
    get_penalty,
    get_solver,
    solve,
)
from convexformer_solvers.result import check_tol
from convexformer_solvers.rounding import SUM
from convexformer_solvers.validation import check_callback, check_counts, check_kind, says_stop

from .base import Gates, GatesInterrupted, GateSource, TrainingData
from .search import DualPoint, Found, GateSearch
from .sources import GivenGates


class GenerationEnd(Enum):
    """How the generation of gates ended; the value is the message that users read.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(60, 2, 2))
    >>> y = np.where(X[:, 0, 0] >= 0, X[:, 1, 0], 0.0)
    >>> generate_gates(X, y, alpha=0.05, max_gates=2, random_state=0).end is GenerationEnd.BUDGET
    True
    >>> GenerationEnd.BUDGET.value
    'max_gates reached; there may be more gates that lower the objective'
    """

    NONE_FOUND = (
        "the search found no gate that violates its dual constraint and lowers the objective; it is heuristic: "
        "none found does not prove that none exists"
    )
    BUDGET = "max_gates reached; there may be more gates that lower the objective"
    STOPPED = "stopped by the callback"
    INTERRUPTED = "interrupted from the keyboard"


class GenerationRound(NamedTuple):
    """One round: the program with the gates so far is solved, then more gates are searched for.

    Attributes
    ----------
    n_gates : int
        Gates in the program.
    objective : float
        Objective at the solution.
    dual : float
        Certified lower bound for these gates.
    violation : float
        Largest dual norm of a gate that the search met, over ``alpha``, less 1.
    estimated_bound : float
        What the dual point would bound the optimum over **all** gates by, if no gate violated its constraint more
        than those that the search met. An estimate: it proves nothing.
    seconds : float
        Since the start.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(60, 2, 2))
    >>> y = np.where(X[:, 0, 0] >= 0, X[:, 1, 0], 0.0)
    >>> first, second = generate_gates(X, y, alpha=0.05, max_gates=2, random_state=0).rounds
    >>> first.n_gates, second.n_gates, second.objective < first.dual < first.objective
    (1, 2, True)
    >>> first.violation > 1e-4, first.estimated_bound < second.objective
    (True, True)
    """

    n_gates: int
    objective: float
    dual: float
    violation: float
    estimated_bound: float
    seconds: float


@dataclass(frozen=True)
class GeneratedGatesResult:
    """Generated gates with the certified solution of the program that has them.

    Attributes
    ----------
    gates : Gates
        The gates; they differ on the training set.
    program : Program
        The program with them.
    solution : SolverResult
        Its solution; ``certificate`` is exact for these gates and says nothing of others.
    end : GenerationEnd
        Why no more gates were added.
    rounds : list of GenerationRound
        The way there.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(60, 2, 2))
    >>> y = np.where(X[:, 0, 0] >= 0, X[:, 1, 0], 0.0)
    >>> result = generate_gates(X, y, alpha=0.05, max_gates=4, random_state=0)
    >>> result.gates, result.end.name, result.certificate.relative_gap <= 1e-4
    (Gates(4 gates, 2 tokens, 2 features), 'BUDGET', True)
    >>> result.solution.coef.shape  # gates, tokens, features, outputs
    torch.Size([4, 2, 2, 1])
    """

    gates: Gates
    program: Program = field(repr=False)
    solution: SolverResult
    end: GenerationEnd
    rounds: list[GenerationRound] = field(repr=False)

    @property
    def certificate(self) -> Certificate:
        """Certificate of the solution, for the current gates."""
        return self.solution.certificate


class GenerationInterrupted(GatesInterrupted):
    """Raised on Ctrl-C during the generation of gates; `result` holds the gates so far and their certified point.

    Attributes
    ----------
    result : GeneratedGatesResult
        The gates so far; its ``end`` is ``GenerationEnd.INTERRUPTED``.
    gates, solution : Gates, SolverResult
        Those of `result`.

    Examples
    --------
    Here a callback stands for Ctrl-C:

    >>> def press_ctrl_c(step):
    ...     if step.n_gates > 1:
    ...         raise KeyboardInterrupt
    >>> X = np.random.default_rng(0).normal(size=(60, 2, 2))
    >>> y = np.where(X[:, 0, 0] >= 0, X[:, 1, 0], 0.0)
    >>> try:
    ...     result = generate_gates(X, y, alpha=0.05, random_state=0, callback=press_ctrl_c)
    ... except GenerationInterrupted as interrupt:
    ...     result = interrupt.result
    >>> result.end.name, len(result.gates) > 1, result.certificate.relative_gap <= 1e-4
    ('INTERRUPTED', True, True)
    """

    def __init__(self, result: GeneratedGatesResult) -> None:
        super().__init__(result.gates, result.solution)
        self.result = result


GenerationCallback = Callable[[GenerationRound], "bool | None"]


def generate_gates(
    X: Any,
    y: Any,
    *,
    alpha: float,
    loss: str | Loss = "squared",
    penalty: str | Penalty = "group_l2",
    sample_weight: Any = None,
    fit_intercept: bool = True,
    start: Gates | GateSource | None = None,
    max_gates: int = 32,
    n_restarts: int = 64,
    per_round: int = 4,
    search: GateSearch | None = None,
    tol: float = 1e-4,
    solver: str | Solver = "auto",
    max_iter: int = 10_000,
    random_state: Any = None,
    callback: GenerationCallback | None = None,
    verbose: bool = False,
) -> GeneratedGatesResult:
    r"""Choose gates by column generation.

    The gated program with **all** gates has one dual constraint per mask :math:`m \in \{0, 1\}^N` that a gate can have,

    .. math:: \max_k \; \Omega^\circ\Big(\sum_i m_i \, p_i \, x_{ik} \theta_i^\top\Big) \le \alpha,

    with the weights :math:`p_i` of the samples over their sum. Each round solves the program with the gates so far,
    searches for gates whose constraint its dual point :math:`\theta` violates most, adds the best few and solves again
    from the solution so far. So the objective falls with every round. Found gates that do not lower it are dropped,
    and the program is solved to a hundredth of the gap: a dual norm is off by the root of the gap. When that has been
    done twice, the generation ends.

    The search is local, with restarts, so not finding a gate does not prove that there is none. The certificate of each
    round is exact **for the gates of that round**.

    Parameters
    ----------
    X : array-like or Tensor of shape (N, n_tokens, n_features)
        The samples, in float32 or float64; a tensor stays on its device. Two-dimensional ones are tokens of width 1.
    y : array-like or Tensor of shape (N,) or (N, n_outputs)
        Targets as the loss wants them: numbers, -1 and 1, or one-hot rows.
    alpha : float
        Weight of the decay against the mean loss; positive.
    loss, penalty : str or Loss, str or Penalty, default="squared" and "group_l2"
        By name or as instances.
    sample_weight : array-like or Tensor of shape (N,), optional
        Non-negative; only ratios matter.
    fit_intercept : bool, default=True
        Whether there is a bias per output, without decay, as in the estimators; gates that are generated for a program
        without one do worse in a program with one, and the reverse.
    start : Gates or GateSource, optional
        Gates of the first round. Default: one gate that is open for every sample, ``u1 = u2 = 0``, so that the first
        round is the network without gates and every later one is better than it.
    max_gates : int, default=32
        Gates at most, those of the start included.
    n_restarts : int, default=64
        Starting points of each search, all ascended at once: at random, between samples, and near gates in use.
    per_round : int, default=4
        Gates to add per round at most. One takes the fewest gates, more take fewer solves.
    search : GateSearch, optional
        Numbers of the search. Default: ``GateSearch()``.
    tol : float, default=1e-4
        Bound on the relative gap of a solve, and on the relative excess of a dual norm that does not count as a
        violation.
    solver : str or Solver, default="auto"
        As in the estimators.
    max_iter : int, default=10000
        Iterations of each solve at most.
    random_state : int, RandomState or None, default=None
        Draws the starting points.
    callback : callable, optional
        Called with the ``GenerationRound`` after each round; returning True ends the generation.
    verbose : bool, default=False
        Whether to show a progress bar with objective and violation.

    Returns
    -------
    GeneratedGatesResult

    Raises
    ------
    GenerationInterrupted
        On Ctrl-C; a ``KeyboardInterrupt`` whose ``result`` holds the gates so far and a certified point.
    TypeError
        If the start or the search is of another kind, or the callback cannot be called.
    ValueError
        If an argument is not as described; the message names it.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(60, 2, 2))
    >>> y = np.where(X[:, 0, 0] >= 0, X[:, 1, 0], 0.0)  # token 1 is read where feature 0 of token 0 is positive
    >>> result = generate_gates(X, y, alpha=0.05, max_gates=8, random_state=0)
    >>> values = [step.objective for step in result.rounds]
    >>> values == sorted(values, reverse=True), values[-1] < 0.5 * values[0]
    (True, True)
    """
    tokens = check_program_tokens(X)
    target = as_targets(y, tokens.device)
    weight = as_weight(check_weight(sample_weight, len(tokens)), tokens.device)
    has_intercept = check_flag(fit_intercept, "fit_intercept")
    parts = (target, get_loss(loss), get_penalty(penalty), alpha, weight, has_intercept)
    if not (start is None or isinstance(start, (Gates, GateSource))):
        raise TypeError(f"start must be None, Gates(u1, u2) or a source of gates, got {start!r}")
    check_callback(callback, "a GenerationRound")
    verbose = check_flag(verbose, "verbose")
    check_counts(max_gates=max_gates, n_restarts=n_restarts, per_round=per_round)
    check_tol(tol)
    search = GateSearch() if search is None else search
    check_kind("search", search, GateSearch, "GateSearch()")
    with tqdm(total=max_gates, disable=not verbose, desc="gates", unit="gate") as bar:
        run = _Generation(
            data=TrainingData(tokens, *parts),
            program_of=partial(build_program, tokens, *parts),
            solver=get_solver(solver),
            max_gates=max_gates,
            per_round=per_round,
            tol=tol,
            max_iter=max_iter,
            search=search,
            n_restarts=n_restarts,
            random_state=check_stream(random_state),
            callback=callback,
            bar=bar,
        )
        try:
            end = run.until_end(start)
        except KeyboardInterrupt as interruption:
            if run.solved is None:
                raise
            raise GenerationInterrupted(run.result(GenerationEnd.INTERRUPTED)) from interruption
    return run.result(end)


class _Solved(NamedTuple):
    """Gates and the program with them, solved."""

    gates: Gates
    masks: Tensor
    program: Program
    solution: SolverResult


@dataclass
class _Generation:
    """Book-keeping of one generation."""

    data: TrainingData
    program_of: Callable[..., Program]
    solver: Solver
    max_gates: int
    per_round: int
    tol: float
    max_iter: int
    search: GateSearch
    n_restarts: int
    random_state: np.random.RandomState
    callback: GenerationCallback | None
    bar: tqdm
    rounds: list[GenerationRound] = field(default_factory=list)
    solved: _Solved | None = None
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.gap = self.tol  # bound on the relative gap of the next solve

    def until_end(self, start: Gates | GateSource | None) -> GenerationEnd:
        gates, masks = self._starting_gates(start)
        self.solved = self._solve(gates, masks)
        while True:
            found = self._search(self.solved)
            stop = says_stop(self.callback, self.rounds[-1])
            if found.gates is None:
                return GenerationEnd.NONE_FOUND
            if len(self.solved.gates) == self.max_gates:
                return GenerationEnd.BUDGET
            if stop:
                return GenerationEnd.STOPPED
            extended = self._extended(self.solved, found.gates)
            before, after = (solved.solution.certificate.primal for solved in (self.solved, extended))
            if before - after > SUM * abs(before):
                self.solved = extended
            elif self.gap < self.search.least_gap * self.tol:
                return GenerationEnd.NONE_FOUND
            else:  # the violation may be what the dual point lacks of precision
                self.gap *= self.search.gap_factor
                point = (self.solved.solution.coef, self.solved.solution.intercept)
                self.solved = self._solve(self.solved.gates, self.solved.masks, point)

    def result(self, end: GenerationEnd) -> GeneratedGatesResult:
        assert self.solved is not None
        return GeneratedGatesResult(self.solved.gates, self.solved.program, self.solved.solution, end, self.rounds)

    def _starting_gates(self, start: Gates | GateSource | None) -> tuple[Gates, Tensor]:
        if start is None:
            gates = Gates(*(np.zeros((1, width)) for width in self.data.token_shape))
        else:
            source = GivenGates(start) if isinstance(start, Gates) else start
            gates = source.make(self.data, self.random_state)
        masks = gates.masks(self.data.tokens)
        distinct = gates.distinct(masks, self.data.sample_weight)
        if len(distinct) > self.max_gates:
            raise ValueError(f"max_gates={self.max_gates} is less than the {len(distinct)} gates of start")
        return gates.select(distinct), masks[:, torch.as_tensor(distinct, device=masks.device)]

    def _solve(self, gates: Gates, masks: Tensor, start: tuple[Tensor, Tensor] | None = None) -> _Solved:
        program = self.program_of(masks=masks)
        try:
            with warnings.catch_warnings():
                if self.gap < self.tol:
                    warnings.simplefilter("ignore", ConvergenceWarning)  # of a gap that nobody asked for
                solution = solve(program, self.solver, tol=self.gap, max_iter=self.max_iter, start=start)
            return _Solved(gates, masks, program, solution)
        except SolverInterrupted as interruption:
            self.solved = _Solved(gates, masks, program, interruption.result)
            raise

    def _extended(self, solved: _Solved, new: Gates) -> _Solved:
        """The program with more gates, solved from the solution with fewer."""
        gates = Gates(np.concatenate([solved.gates.u1, new.u1]), np.concatenate([solved.gates.u2, new.u2]))
        masks = torch.cat([solved.masks, new.masks(self.data.tokens)], 1)
        coef = solved.solution.coef
        coef = torch.cat([coef, coef.new_zeros((len(new), *coef.shape[1:]))])
        return self._solve(gates, masks, (coef, solved.solution.intercept))

    def _search(self, solved: _Solved) -> Found:
        """Search for violated gates and record the round."""
        program, solution = solved.program, solved.solution
        theta = solution.certificate.dual_point
        assert theta is not None
        counted = program.weight > 0
        values = (program.weight[:, None] * theta)[counted]
        tokens, weight = self.data.held_tokens()[counted], program.weight[counted]
        point = DualPoint(tokens, values, program.penalty, program.alpha, weight)
        sizes = program.penalty.group_values_in_any_units(solution.coef).flatten(1).sum(1)
        used = sizes.nonzero()[:, 0].numpy(force=True)
        found = self.search.violated(
            point,
            solved.masks[counted],
            solved.gates.select(used) if len(used) else None,
            n_wanted=max(1, min(self.per_round, self.max_gates - len(solved.gates))),
            n_restarts=self.n_restarts,
            tol=self.tol,
            random_state=self.random_state,
        )
        feasible = theta / (1 + max(found.violation, 0.0))
        bound = min(float(program.dual(feasible)), solution.certificate.dual)
        self._record(solved, found.violation, bound)
        return found

    def _record(self, solved: _Solved, violation: float, bound: float) -> None:
        certificate, n_gates = solved.solution.certificate, len(solved.gates)
        seconds = time.perf_counter() - self.began
        if self.rounds and self.rounds[-1].n_gates == n_gates:
            self.rounds.pop()  # solved again, to a smaller gap
        self.rounds.append(GenerationRound(n_gates, certificate.primal, certificate.dual, violation, bound, seconds))
        self.bar.update(n_gates - self.bar.n)
        self.bar.set_postfix_str(f"objective {certificate.primal:.6g}, violation {violation:.1e}")


@dataclass(frozen=True)
class GeneratedGates(GateSource):
    """Gates by column generation for the program that they are to serve, see ``generate_gates``.

    They depend on ``alpha``: estimators make them anew for each fit, and a grid of alphas is refused. For a grid give
    the gates of one alpha, ``generate_gates(...).gates`` with the loss, penalty and ``fit_intercept`` of the estimator.

    Parameters
    ----------
    max_gates : int, default=32
        Gates at most, those of the start included.
    start, n_restarts, per_round, tol, solver, max_iter, callback, verbose, search
        As in ``generate_gates``.

    Raises
    ------
    ValueError
        If ``max_gates`` is not a positive integer; for the others, when gates are made.

    Examples
    --------
    >>> from convexformer import ConvexAttentionRegressor
    >>> X = np.random.default_rng(0).normal(size=(60, 2, 2))
    >>> y = np.where(X[:, 0, 0] >= 0, X[:, 1, 0], 0.0)
    >>> options = {"activation": "gated_relu", "random_state": 0}
    >>> generated = ConvexAttentionRegressor(0.02, gates=GeneratedGates(8), **options).fit(X, y)
    >>> drawn = ConvexAttentionRegressor(0.02, gates="gaussian", n_gates=8, **options).fit(X, y)
    >>> bool(generated.certificate_.primal < drawn.certificate_.dual)
    True
    """

    max_gates: int = 32
    start: Gates | GateSource | None = None
    n_restarts: int = 64
    per_round: int = 4
    tol: float = 1e-4
    solver: str | Solver = "auto"
    max_iter: int = 10_000
    callback: GenerationCallback | None = None
    verbose: bool = False
    search: GateSearch | None = None

    depends_on_alpha: ClassVar[bool] = True
    needs_data: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_counts(max_gates=self.max_gates)

    def make(self, data: TrainingData, random_state: np.random.RandomState) -> Gates:
        if data.target is None or data.loss is None or data.penalty is None or data.alpha is None:
            raise ValueError("gates: generated gates need data with target, loss, penalty and alpha")
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return generate_gates(
            data.tokens,
            data.target,
            alpha=data.alpha,
            loss=data.loss,
            penalty=data.penalty,
            sample_weight=data.sample_weight,
            fit_intercept=data.fit_intercept,
            random_state=random_state,
            **options,
        ).gates

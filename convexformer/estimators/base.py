"""The base class of attention estimators, their cross-validated forms and probes: program, solution and network."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from convexformer.gates import Gates, GatesInterrupted, GateSource, TrainingData, get_gate_source
from convexformer.heads.attention import Heads
from convexformer.programs.build import attention_map, build_program
from convexformer.storage import open_source
from convexformer.targets import Targets
from convexformer.validation import (
    as_tensor,
    check_device,
    check_flag,
    check_stream,
    check_weight,
    is_integer,
    is_one_of,
    predictions,
    result_of,
)
from convexformer_solvers import (
    PENALTIES,
    LinearMap,
    Loss,
    Path,
    PathInterrupted,
    Penalty,
    Program,
    Progress,
    SolverInterrupted,
    SolverResult,
    Status,
    alpha_grid,
    get_penalty,
    get_solver,
    solve,
    solve_path,
)
from convexformer_solvers.io.checkpoint import PathFile
from convexformer_solvers.path import check_grid
from convexformer_solvers.program import check_alpha
from convexformer_solvers.validation import says_stop

from .path_result import PathResult, norms_of_tokens
from .samples import across_ranks
from .tokens import (
    CertifiedEstimator,
    SavedState,
    SolveParameters,
    TargetEstimator,
    described,
    rebuilt,
    unchanged_on_failure,
)

ACTIVATIONS = ("linear", "gated_relu")
# Where gates are unused these parameters must be what they are by default.
GATE_DEFAULTS: dict[str, Any] = {"gates": "gaussian", "n_gates": 32}


Start = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]  # as in ``solve``


class ProgramParts(NamedTuple):
    """All that a program has besides its linear map, in the order in which ``Program`` takes it."""

    target: Tensor
    loss: Loss
    penalty: Penalty
    alpha: float | None
    sample_weight: Tensor | None
    fit_intercept: bool

    @property
    def of_program(self) -> tuple[Tensor, Loss, Penalty, float, Tensor | None, bool]:
        """The parts with an ``alpha``; where a grid is to follow, that of the program means nothing."""
        alpha = 1.0 if self.alpha is None else self.alpha
        return self.target, self.loss, self.penalty, alpha, self.sample_weight, self.fit_intercept


@dataclass(frozen=True)
class Problem:
    """A program with how its targets read and which gates it has.

    Attributes
    ----------
    program : Program
        The convex program on the training data.
    targets : Targets
        How ``y`` reads.
    gates : Gates or None
        Gates behind the program's masks.
    sample_weight : ndarray of shape (N,) or None
        Weights as the user gave them, checked; those of the program have the classes' multiplied in.
    interruption : GatesInterrupted or None
        Ctrl-C while the gates were made; its solution is of this program.
    """

    program: Program
    targets: Targets
    gates: Gates | None
    sample_weight: NDArray[np.float64] | None
    interruption: GatesInterrupted | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class ProgramParameters(SolveParameters):
    """Parameters of attention and probe estimators, for one ``alpha`` and for a grid."""

    warm_start: bool = False
    random_state: Any = None


@dataclass(eq=False, repr=False, kw_only=True)
class GateParameters:
    """Parameters of estimators that may have gates."""

    activation: str = "linear"
    n_gates: int = 32
    gates: Any = "gaussian"


class ConvexAttentionBase(ProgramParameters, TargetEstimator, CertifiedEstimator):
    """All that regression and classification share: building the program, solving, reading off the network."""

    alpha: float
    activation: str
    n_gates: int
    gates: Any

    @unchanged_on_failure
    @across_ranks
    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        resume: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Train to a certified global optimum.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens), path or source
            Token sequences; each column of two-dimensional data is a token of width 1. A probe takes samples of any
            number of tokens, as ``TokenPooling.fit`` does: a list of arrays of shapes (length, n_features), or a pair
            of an array and `lengths` or a `mask`, which may be paths; two-dimensional data are samples of one token to
            it. What ``open_source`` takes, as the path of a file or a folder of shards, is read from the disk where it
            is large for `memory_limit`. Under ``torchrun`` each rank gives its own samples, or all give one path, of
            which each reads its part.
        y : array-like of shape (n_samples,) or (n_samples, n_outputs), or path
            Targets. For a classifier: labels of shape (n_samples,), or a matrix of 0 and 1 with a column for each of
            several labels that a sample may have. A path, as ``"shards"`` or ``"data.npz:y"``, is read into memory.
        sample_weight : array-like of shape (n_samples,), or path, optional
            Non-negative weights; only ratios matter.
        resume : str or path-like, optional
            An ``.npz`` file that is brought up to date at each certificate. A later call with the same file and data,
            also on another number of ranks or with another `solver`, `tol` or `max_iter`, goes on from there. Costs
            one product with the data, to tell them from others. Random gates need an int as `random_state`. A probe
            that generates weightings goes on from its last round; generated gates are generated anew.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            If an argument or a parameter is not as described; the message names it.
        TypeError
            If the solver does not take the loss or the penalty, or the callback cannot be called.
        KeyboardInterrupt
            On Ctrl-C, **after** the best point so far and its certificate are stored: the estimator is usable.

        Warns
        -----
        ConvergenceWarning
            If the certified relative gap did not come within ``tol``.
        """
        check_alpha(self.alpha)  # None would mean a grid
        problem = self._problem(X, y, sample_weight, self.alpha)
        self._check_can_resume(resume)
        file = None
        if resume is not None and problem.interruption is None:
            file = PathFile(resume, problem.program, [problem.program.alpha])
        self._fit_problem(problem, X, file)
        return self

    def path(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        alphas: ArrayLike | None = None,
        n_alphas: int = 30,
        eps: float = 1e-2,
        resume: str | os.PathLike[str] | None = None,
    ) -> PathResult:
        """Certified solutions for a decreasing grid of ``alpha``, each started from the one before.

        Leaves the estimator as it is. With ``verbose`` one progress bar runs over the alphas.

        Parameters
        ----------
        X, y, sample_weight
            As in ``fit``.
        alphas : array-like of shape (n_alphas,), optional
            The grid. Default: `n_alphas` values from ``alpha_max`` down to ``eps * alpha_max``, evenly in the
            logarithm.
        n_alphas : int, default=30
            Length of the default grid.
        eps : float, default=1e-2
            Ratio of the last to the first alpha of the default grid.
        resume : str or path-like, optional
            An ``.npz`` file that is brought up to date after each alpha and on Ctrl-C. A later call with the same
            file, data and grid goes on from it, also with another `solver`, `tol` or `max_iter`; alphas that were
            solved to a larger gap than `tol` are solved on. Random gates need an int as `random_state`.

        Returns
        -------
        PathResult
            Unpacks as ``alphas, coefs, gaps``; has ``intercepts``, ``token_norms`` (of a probe ``weighting_norms``)
            and, with ``heads(position)``, the network at each alpha, whose ``predict`` gives its outputs.

        Raises
        ------
        PathInterrupted
            On Ctrl-C; a ``KeyboardInterrupt`` that says how to go on, and whose ``path`` is the ``PathResult`` of what
            was finished.
        ValueError
            If an argument is not as described, the gates depend on ``alpha`` (``"generated"``), a probe generates
            weightings, or the file of `resume` is of other data, parameters or grid; the message says what differs.

        Examples
        --------
        >>> import os, tempfile
        >>> from convexformer import ConvexAttentionRegressor
        >>> X = np.random.default_rng(0).normal(size=(50, 6, 3))
        >>> model = ConvexAttentionRegressor(tol=1e-3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = os.path.join(folder, "path.npz")
        ...     first = model.path(X, X[:, 2, 0], n_alphas=4, resume=file)
        ...     again = model.path(X, X[:, 2, 0], n_alphas=4, resume=file)  # read from the file, certified anew
        >>> first.coefs.shape, bool((first.coefs == again.coefs).all())
        ((4, 6, 3), True)
        >>> first.heads(-1).predict(X).shape  # those of the network at the smallest alpha
        (50, 1)
        """
        clone = self.__class__(**self.get_params(deep=False))
        return clone._solve_path(X, y, sample_weight, alphas=alphas, n_alphas=n_alphas, eps=eps, resume=resume)

    @across_ranks
    def _solve_path(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None,
        *,
        alphas: ArrayLike | None,
        n_alphas: int,
        eps: float,
        resume: str | os.PathLike[str] | None,
    ) -> PathResult:
        """``path``, which changes this estimator."""
        problem = self._problem(X, y, sample_weight, alpha=None)
        program = problem.program
        grid = alpha_grid(program.alpha_max, n_alphas, eps) if alphas is None else check_grid(alphas)
        self._check_can_resume(resume)
        try:
            path = solve_path(program, get_solver(self.solver), grid, resume=resume, **self._options(program))
        except PathInterrupted as interruption:
            interruption.path = self._path_result(problem, interruption.path)
            raise
        return self._path_result(problem, path)

    def _path_result(self, problem: Problem, path: Path) -> PathResult:
        """A path of the solver layer in the shapes of this estimator."""
        program, coefs = problem.program, path.coefs
        found = [result.intercept for result in path.results]
        intercepts = torch.stack(found) if found else coefs.new_zeros((0, coefs.shape[-1]))
        return PathResult(
            np.array(path.alphas),
            self._public(coefs, problem.targets).numpy(force=True),
            np.array(path.gaps),
            (intercepts[:, 0] if problem.targets.single else intercepts).numpy(force=True),
            problem.gates,
            _program={"loss": program.loss, "penalty": program.penalty, "targets": problem.targets},
            _coef_shape=program.coef_shape,
        )

    def _check_can_resume(self, resume: Any, other: str = "") -> None:
        """Raise ``ValueError`` where a file is asked for that no later call could go on from.

        `other` names what is drawn anew besides the gates or weightings, for messages.
        """
        drawn = " and ".join(filter(None, ("" if is_integer(self.random_state) else self._drawn, other)))
        if resume is not None and drawn:
            raise ValueError(
                f"resume={str(resume)!r} needs an int as random_state: without one a later call draws other {drawn}"
            )

    # Building the program

    def _problem(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, alpha: float | None) -> Problem:
        """Check everything and build the program; without an `alpha`, for a grid, that of the program means nothing."""
        for flag in ("warm_start", "verbose"):
            check_flag(getattr(self, flag), flag)
        penalty = get_penalty(self.penalty)
        if missing := [method for method in ("factorize", "right_norm") if not penalty.defines(method)]:
            raise ValueError(
                f"penalty={penalty!r} does not say which heads coefficients are made of: define its method "
                f"{missing[0]!r}, or solve attention_program(...), which needs none"
            )
        self._check_model(is_grid=alpha is None)
        samples = self._read_samples(X, reset=True)
        device = check_device(self.device, samples.device)
        weight = check_weight(sample_weight, len(samples))
        targets, loss, labels = self._read_targets(y, len(samples), weight)
        total = targets.weight(labels, weight)
        parts = ProgramParts(
            as_tensor(targets.encode(labels), device),
            loss,
            penalty,
            alpha,
            None if total is None else as_tensor(total, device),
            check_flag(self.fit_intercept, "fit_intercept"),
        )
        return self._build(samples, parts, targets, weight)

    def _check_model(self, is_grid: bool) -> None:
        """Raise ``ValueError`` where the parameters that choose the class of networks do not go together."""
        check_stream(self.random_state)  # also where nothing is drawn
        self._gate_source(is_grid)

    def _chosen_samples(self, X: Any, index: NDArray[np.int64]) -> Any:
        """Some of the samples, of the kind of all: a data frame stays one."""
        if torch.is_tensor(X):
            return X[index]
        if open_source(X) is not None:
            return self._chosen_samples(self._read_samples(X, reset=False), index)
        return X.rows(torch.from_numpy(index)) if isinstance(X, LinearMap) else _safe_indexing(X, index)

    def _build(
        self, samples: Any, parts: ProgramParts, targets: Targets, sample_weight: NDArray[np.float64] | None
    ) -> Problem:
        """The problem of checked samples."""
        tokens = samples.to(device=parts.target.device)
        gates, masks, interruption = self._gates(TrainingData(tokens, *parts), self._gate_source(parts.alpha is None))
        program = build_program(tokens, *parts.of_program, masks=masks)
        return Problem(program, targets, gates, sample_weight, interruption)

    def _gate_source(self, is_grid: bool) -> GateSource | None:
        if not is_one_of(self.activation, ACTIVATIONS):
            hint = (
                " The theory does not cover a ReLU whose gates are trained; 'gated_relu' has fixed gates."
                if is_one_of(self.activation, ("relu",))
                else ""
            )
            raise ValueError(f"activation must be one of {ACTIVATIONS}, got {self.activation!r}.{hint}")
        if self.activation != "gated_relu":
            self._check_no_gates()
            return None
        source = get_gate_source(self.gates, self.n_gates)
        if is_grid and source.depends_on_alpha:
            raise ValueError(
                f"gates={self.gates!r} depend on alpha, so a grid of alphas has no one program; give gates that are "
                "made beforehand for the same loss, penalty and intercept, for example generate_gates(X, y, alpha=..., "
                f"loss=..., penalty=..., fit_intercept={self.fit_intercept!r}).gates, or fit each alpha by itself"
            )
        return source

    def _check_no_gates(self) -> None:
        """Raise ``ValueError`` where gates are asked for that would not be used."""
        for name, default in GATE_DEFAULTS.items():
            value = getattr(self, name)
            if not (isinstance(value, (str, int, np.integer)) and value == default):
                raise ValueError(
                    f"{name}={value!r} is for activation='gated_relu', got activation={self.activation!r}, which has "
                    f"no gates; set activation='gated_relu' or leave {name} out"
                )

    def _gates(
        self, data: TrainingData, source: GateSource | None
    ) -> tuple[Gates | None, Tensor | None, GatesInterrupted | None]:
        """Gates of this fit, their masks on the training data, and what interrupted their making."""
        self._drawn = ""
        if source is None:
            return None, None, None
        stream = self._gate_stream()
        before = stream.get_state()
        try:
            if source.needs_data:
                data = replace(data, tokens=data.held_tokens())
            made = source.make(data, stream)
        except GatesInterrupted as interruption:
            return interruption.gates, interruption.gates.masks(data.tokens), interruption
        if not isinstance(made, Gates):
            raise TypeError(f"gates={self.gates!r}: make must return Gates(u1, u2), got {type(made).__name__}")
        self._drawn = "" if all(map(np.array_equal, before, stream.get_state())) else "gates"
        masks = made.masks(data.tokens)
        distinct = made.distinct(masks, data.sample_weight)
        return self._kept(made.select(distinct)), masks[:, torch.as_tensor(distinct, device=masks.device)], None

    def _kept(self, gates: Gates) -> Gates:
        """The gates of the previous fit where a warm start made the same again."""
        previous: Gates | None = getattr(self, "gates_", None)
        if not self.warm_start or previous is None:
            return gates
        return previous if _directions(previous) == _directions(gates) else gates

    def _gate_stream(self) -> np.random.RandomState:
        """Where gates are drawn from: with a warm start and the same `random_state`, from where they last were."""
        stream = check_stream(self.random_state)
        drawn_from, state = getattr(self, "_gates_drawn", (None, None))
        if self.warm_start and state is not None and drawn_from == self.random_state:
            stream = np.random.RandomState()
            stream.set_state(state)
        self._gates_drawn = (self.random_state, stream.get_state())
        return stream

    # Solving

    def _fit_problem(self, problem: Problem, like: Any, file: PathFile | None = None) -> None:
        if problem.interruption is not None:
            # It may have converged with the gates that there are; the fit has not.
            self._store(problem, replace(problem.interruption.solution, status=Status.INTERRUPTED), like)
            raise problem.interruption
        options = self._options(problem.program) | {"start": self._start(problem)}
        if file is not None:
            options = _resuming(file, problem.program, options)
        try:
            result = solve(problem.program, get_solver(self.solver), **options)
            if file is not None:
                file.save(0, result)  # with its dual point, which tells a later call that it is a solution
        except SolverInterrupted as interruption:
            self._store(problem, interruption.result, like)
            raise
        self._store(problem, result, like)

    def _start(self, problem: Problem) -> Start | None:
        if not self.warm_start or getattr(self, "_solution", None) is None:
            return None
        program, (coef, intercept) = problem.program, self._solution
        if problem.gates is not None and self.gates_ is not None:
            coef = _on_gates(coef, self.gates_, problem.gates)
        if not program.fit_intercept:
            intercept = torch.zeros_like(intercept)  # the previous fit may have had one
        if tuple(coef.shape) != program.coef_shape:
            return None
        theta = self.certificate_.dual_point
        if theta is None or theta.shape != program.y.shape or program.alpha != self.heads_.alpha:
            return coef, intercept
        return coef, intercept, theta  # the same data may be given again: then the start is certified as it was

    def _store(self, problem: Problem, result: SolverResult, like: Any) -> None:
        program = problem.program
        trained_for: dict[str, Any] = {"alpha": program.alpha, "loss": program.loss, "penalty": program.penalty}
        trained_for |= {"targets": problem.targets, "gates": problem.gates}
        self._store_network((result.coef, result.intercept), trained_for, like)
        self._store_certificate(program, result)

    def _store_network(self, solution: tuple[Tensor, Tensor], trained_for: dict[str, Any], like: Any) -> None:
        """Set every attribute that follows from the solution alone; results are of the kind of `like`."""
        coef, intercept = solution
        self._solution = (coef.cpu(), intercept.cpu())
        self.loss_, self.penalty_ = trained_for["loss"], trained_for["penalty"]
        self._targets, self.gates_ = trained_for["targets"], trained_for["gates"]
        self.coef_ = result_of(self._public(coef, self._targets), like)
        self.intercept_ = float(intercept[0]) if self._targets.single else result_of(intercept, like)
        self.token_norms_ = result_of(norms_of_tokens(coef, self.penalty_, self.gates_), like)
        self.heads_ = Heads.from_coef(*(part.numpy() for part in self._solution), **trained_for)

    def _public(self, coef: Tensor, targets: Targets) -> Tensor:
        """Coefficients ``(..., n, d, c)`` without the axes that the user's data do not have."""
        if self._n_dims == 2:
            coef = coef.squeeze(-2)
        return coef[..., 0] if targets.single else coef

    # Saving and loading

    def _saved_state(self) -> SavedState:
        header, arrays = super()._saved_state()
        trained_for = {"penalty": described(self.penalty_, PENALTIES), "alpha": self.heads_.alpha}
        gates = {} if self.gates_ is None else {"u1": self.gates_.u1, "u2": self.gates_.u2}
        return header | trained_for, arrays | gates

    def _restore_state(self, header: dict[str, Any], arrays: dict[str, NDArray]) -> None:
        super()._restore_state(header, arrays)
        penalty = rebuilt(header["penalty"], PENALTIES)
        gates = Gates(arrays["u1"], arrays["u2"]) if "u1" in arrays else None
        trained_for: dict[str, Any] = {"alpha": header["alpha"], "loss": self.loss_, "penalty": penalty}
        trained_for |= {"targets": self._targets, "gates": gates}
        self._store_network(self._solution, trained_for, like=None)

    # Predicting

    def _outputs(self, X: ArrayLike) -> Tensor:
        """Raw outputs, shape ``(N, c)``."""
        check_is_fitted(self)
        tokens = self._placed_samples(X)
        coef, intercept = (part.to(tokens.device) for part in self._solution)
        linear_map = attention_map(tokens, self.gates_, n_outputs=coef.shape[-1])
        return predictions(linear_map, coef, intercept, tokens.dtype)


def _resuming(file: PathFile, program: Program, options: dict[str, Any]) -> dict[str, Any]:
    """Options of ``solve`` that start from the point of a file and bring it up to date at each certificate."""
    stored, callback = file.load(0, program, program.map.dtype), options["callback"]

    def saving(progress: Progress) -> bool:
        file.save_progress(0, progress)
        return says_stop(callback, progress)

    start = options["start"]
    if stored is not None:
        theta = stored.certificate.dual_point
        start = (stored.coef, stored.intercept, *([] if theta is None else [theta]))
    return options | {"start": start, "callback": saving}


def _on_gates(coef: Tensor, gates: Gates, others: Gates) -> Tensor:
    """Coefficients on other gates: those of equal gates, and zeros."""
    position = {directions: index for index, directions in enumerate(_directions(gates))}
    at = [position.get(directions, -1) for directions in _directions(others)]
    padded = torch.cat([coef, coef.new_zeros((1, *coef.shape[1:]))])
    return padded[torch.tensor(at)]


def _directions(gates: Gates) -> list[bytes]:
    return [row.tobytes() for row in np.hstack([gates.u1, gates.u2])]

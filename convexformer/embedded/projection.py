"""Variable projection: the block is solved, the embedding moves along the gradient of the optimal value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from tqdm.auto import tqdm

from convexformer.nn.training.stopwatch import Stopwatch
from convexformer.validation import check_flag
from convexformer_solvers import Fista, Point, Program, TableMap, get_solver, solve
from convexformer_solvers.validation import check_counts

from .course import Callback, MovingTables, follow
from .problem import EmbeddedProblem
from .schedule import FallingAlpha
from .state import EmbeddedState

_SOLVER = Fista()


def optimal_value(
    problem: EmbeddedProblem, tables: Tensor, alpha: float, *, tol: float = 1e-8, max_iter: int = 10_000
) -> tuple[float, Tensor]:
    r"""Optimal value of the block on an embedding, and its gradient with respect to the embedding.

    By the envelope theorem the gradient is the partial one at the optimal coefficients,

    .. math:: \nabla V(E) = \partial_E \, \frac1N \sum_i L(f_{E, Z^*}(s_i), y_i),

    wherever :math:`V` is differentiable and no gate is about to switch.

    Parameters
    ----------
    problem : EmbeddedProblem
        Symbols, targets and gates.
    tables : Tensor of shape (n_tokens, n_symbols, width)
        The embedding.
    alpha : float
        Weight of the penalty.
    tol : float, default=1e-8
        Certified relative gap of the solution. The gradient is accurate to the root of it.
    max_iter : int, default=10000
        Steps at most.

    Returns
    -------
    value : float
        Optimal objective.
    gradient : Tensor of the shape of ``tables``
        The rows' lengths are not held.

    Warns
    -----
    ConvergenceWarning
        If the gap did not come within ``tol``.

    Examples
    --------
    >>> import torch
    >>> from convexformer.embedded import random_tables
    >>> from convexformer.gates import Gates
    >>> from convexformer.solvers import get_loss, get_penalty
    >>> gates = Gates([[1.0, 0.0]], [[1.0, 0.0]])
    >>> loss, penalty = get_loss("squared"), get_penalty("nuclear")
    >>> symbols, target = torch.tensor([[0, 1], [1, 0]]), torch.eye(2, dtype=torch.float64)
    >>> problem = EmbeddedProblem(symbols, target, gates, loss, penalty, 2)
    >>> value, gradient = optimal_value(problem, random_tables(problem), alpha=0.01)
    >>> gradient.shape
    torch.Size([2, 2, 2])
    """
    problem.check_tables(tables)
    program = problem.program(tables.detach().to(problem.target), alpha)
    result = solve(program, get_solver("auto"), tol=tol, max_iter=max_iter)
    return result.certificate.primal, partial_gradient(program, result.coef)


def partial_gradient(program: Program, coef: Tensor, pred: Tensor | None = None) -> Tensor:
    """Gradient of the mean loss with respect to the tables behind a program, coefficients and gates held."""
    pred = program.map.matvec(coef) if pred is None else pred
    values = program.loss.gradient(pred, program.y) / len(pred)
    assert isinstance(program.map, TableMap)
    return program.map.table_gradient(coef, values)


def train_by_projection(
    problem: EmbeddedProblem,
    tables: Tensor | None = None,
    *,
    alpha: float,
    first_alpha: float | None = None,
    n_steps: int = 200,
    hold_steps: int = 0,
    fall_steps: int = 50,
    optimizer: str = "muon",
    lr: float = 0.3,
    schedule: str = "cosine",
    head_steps: int = 20,
    seed: int = 0,
    callback: Callback | None = None,
    verbose: bool = False,
) -> EmbeddedState:
    r"""Train an embedding by variable projection, the block on it solved anew at each step from the last solution.

    Each step takes `head_steps` accelerated proximal gradient steps on the coefficients, from those of the step before,
    and one step of an optimiser on the embedding along the gradient of the optimal value, on the unit spheres of its
    rows. **Not convex as a whole**: where the embedding ends depends on where it began. The block on the last embedding
    has a global optimum, with a certificate: ``certified_head`` of the result.

    Parameters
    ----------
    problem : EmbeddedProblem
        Symbols, targets and gates.
    tables : Tensor of shape (n_tokens, n_symbols, width), optional
        Embedding to begin with; its rows are scaled to length one. Default: ``random_tables(problem, seed)``.
    alpha : float
        Weight of the penalty at the end.
    first_alpha : float, optional
        Weight at the beginning: too little lets the block memorise the samples before the embedding has any
        structure. Default: `alpha` throughout.
    n_steps : int, default=200
        Steps of the embedding.
    hold_steps, fall_steps : int, default=0 and 50
        Steps at `first_alpha`, and steps in which it falls geometrically to `alpha`.
    optimizer : {"muon", "adam"}, default="muon"
        What moves the embedding. Muon moves all directions of a table alike, those with a small gradient too.
    lr : float, default=0.3
        Learning rate. A step moves the entries of a table by a fifth of it with Muon, by at most about all of it with
        Adam, in root mean square; rows have length one.
    schedule : {"cosine", "constant"}, default="cosine"
        How the rate goes over the steps: to zero along a cosine, or not at all.
    head_steps : int, default=20
        Steps on the coefficients between two of the embedding. With few of them the embedding follows a gradient that
        is not that of the optimal value, and takes many times as many steps.
    seed : int, default=0
        Seed of the embedding to begin with.
    callback : callable, optional
        Called with the ``EmbeddedState`` before each step and at the end; returning True stops.
    verbose : bool, default=False
        Whether to show a progress bar.

    Returns
    -------
    EmbeddedState

    Raises
    ------
    ValueError
        If an argument is not as described.
    TypeError
        If the callback cannot be called.
    EmbeddingInterrupted
        On Ctrl-C; a ``KeyboardInterrupt`` whose ``state`` is the last complete step.

    Examples
    --------
    >>> import torch
    >>> from convexformer.gates import Gates
    >>> from convexformer.solvers import get_loss, get_penalty
    >>> symbols = torch.tensor([[a, b] for a in range(3) for b in range(3)])
    >>> target = torch.eye(3)[symbols.sum(1) % 3]
    >>> gates = Gates([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.5], [-0.5, 1.0]])
    >>> problem = EmbeddedProblem(symbols, target, gates, get_loss("softmax"), get_penalty("nuclear"), 3)
    >>> state = train_by_projection(problem, alpha=1e-3, n_steps=5)
    >>> state.step, state.head_steps, bool(state.certified_head(1e-3).certificate.relative_gap <= 1e-3)
    (5, 120, True)
    """
    check_counts(n_steps=n_steps, head_steps=head_steps)
    verbose = check_flag(verbose, "verbose")
    alphas = FallingAlpha(alpha, first_alpha, hold_steps, fall_steps)
    moving = MovingTables(problem, tables, seed, optimizer, lr, schedule, n_steps)
    coef = moving.now.new_zeros(problem.coef_shape)
    start = EmbeddedState(problem, moving.now.clone(), coef, alphas(0), 0, 0, 0, 0.0)
    with tqdm(range(n_steps + 1), disable=not verbose, desc="embedding") as steps:
        return follow(start, _states(problem, moving, coef, alphas, steps, head_steps), callback)


def _states(
    problem: EmbeddedProblem,
    moving: MovingTables,
    coef: Tensor,
    alphas: FallingAlpha,
    steps: Iterable[int],
    head_steps: int,
) -> Iterator[EmbeddedState]:
    """The states of variable projection, one for each step."""
    stopwatch = Stopwatch(coef.device)
    program: Program | None = None
    pred: Tensor | None = None
    for step in steps:
        with stopwatch:
            if program is not None:
                moving.move(partial_gradient(program, coef, pred))
            program = problem.program(moving.now, alphas(step))
            coef, pred = _solved(program, coef, head_steps)
        n_head = (step + 1) * head_steps
        # A gradient of the coefficients for each of their steps, and one of the embedding for each of its own.
        yield EmbeddedState(
            problem, moving.now.clone(), coef, program.alpha, step, n_head, n_head + step, stopwatch.seconds
        )


def _solved(program: Program, coef: Tensor, n_steps: int) -> tuple[Tensor, Tensor]:
    """Coefficients after so many solver steps, and their predictions."""
    state = _SOLVER.init(program, Point(coef, coef.new_zeros(coef.shape[-1])))
    for _ in range(n_steps):
        state = _SOLVER.step(program, state)
    return state.coef, state.pred

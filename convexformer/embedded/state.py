"""Where the training of an embedding stands."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from convexformer_solvers import SolverResult, get_solver, solve
from convexformer_solvers.result import Interrupted

from .problem import EmbeddedProblem


@dataclass(frozen=True, eq=False)
class EmbeddedState:
    """An embedding with a block on it, and the work that it took.

    Attributes
    ----------
    problem : EmbeddedProblem
        What it is a solution of.
    tables : Tensor of shape (n_tokens, n_symbols, width)
        The embedding.
    coef : Tensor of shape (h, n_tokens, width, n_outputs)
        Coefficients of the block.
    alpha : float
        Weight of the penalty at this step.
    step : int
        Steps of the embedding so far.
    head_steps : int
        Steps of the coefficients so far.
    gradient_evaluations : float
        Gradients taken so far over all samples, with respect to coefficients or embedding; one over a part of the
        samples counts as that part.
    seconds : float
        Seconds of training so far, without those of the callback.

    Examples
    --------
    >>> from convexformer.embedded import train_jointly
    >>> from convexformer.gates import Gates
    >>> symbols = torch.tensor([[a, b] for a in range(3) for b in range(3)])
    >>> target, gates = torch.eye(3)[symbols.sum(1) % 3], Gates([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.5], [-0.5, 1.0]])
    >>> problem = EmbeddedProblem(symbols, target, gates, "softmax", "nuclear", 3)
    >>> state = train_jointly(problem, alpha=1e-3, n_steps=5)
    >>> state.step, state.tables.shape, state.outputs().shape
    (5, torch.Size([2, 3, 2]), torch.Size([9, 3]))
    >>> head = state.certified_head(tol=1e-3)  # at least as good as the one of the state
    >>> head.certificate.relative_gap <= 1e-3, head.certificate.primal < state.objective()
    (True, True)
    """

    problem: EmbeddedProblem = field(repr=False)
    tables: Tensor = field(repr=False)
    coef: Tensor = field(repr=False)
    alpha: float
    step: int
    head_steps: int
    gradient_evaluations: float
    seconds: float

    def outputs(self, symbols: Tensor | None = None) -> Tensor:
        """Outputs for symbols of shape ``(N, n_tokens)``; by default those trained on."""
        return self.problem.outputs(self.tables, self.coef, symbols)

    def objective(self) -> float:
        """Mean loss plus ``alpha`` times the penalty."""
        loss = self.problem.loss.value(self.outputs(), self.problem.target).mean()
        return float(loss) + self.alpha * float(self.problem.penalty.value(self.coef))

    def certified_head(
        self, tol: float = 1e-4, alpha: float | None = None, solver: str = "fista", max_iter: int = 5000
    ) -> SolverResult:
        """The best block on this embedding, with its certificate, in float64.

        Parameters
        ----------
        tol : float, default=1e-4
            Relative gap.
        alpha : float, optional
            Weight of the penalty. Default: that of this state; a structured embedding takes much less.
        solver : str, default="fista"
            Whose steps take least where symbols repeat.
        max_iter : int, default=5000
            Steps at most.

        Returns
        -------
        SolverResult
            Global in the coefficients, for this embedding; nothing is said of other embeddings.
        """
        double = self.problem.double()
        program = double.program(self.tables.double(), self.alpha if alpha is None else alpha)
        start = (self.coef, torch.zeros(self.coef.shape[-1]))
        return solve(program, get_solver(solver), tol=tol, max_iter=max_iter, start=start)


class EmbeddingInterrupted(Interrupted):
    """Raised on Ctrl-C during the training of an embedding.

    Attributes
    ----------
    state : EmbeddedState
        The last complete step.

    Examples
    --------
    Here a callback stands for Ctrl-C:

    >>> from convexformer.embedded import train_by_projection
    >>> def press_ctrl_c(state):
    ...     if state.step == 2:
    ...         raise KeyboardInterrupt
    >>> from convexformer.gates import Gates
    >>> symbols = torch.tensor([[a, b] for a in range(3) for b in range(3)])
    >>> target, gates = torch.eye(3)[symbols.sum(1) % 3], Gates([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.5], [-0.5, 1.0]])
    >>> problem = EmbeddedProblem(symbols, target, gates, "softmax", "nuclear", 3)
    >>> try:
    ...     state = train_by_projection(problem, alpha=1e-3, n_steps=5, callback=press_ctrl_c)
    ... except EmbeddingInterrupted as interrupt:
    ...     state = interrupt.state
    >>> state.step, state.coef.shape
    (2, torch.Size([2, 2, 2, 3]))
    """

    def __init__(self, state: EmbeddedState) -> None:
        super().__init__(f"interrupted after {state.step} steps of the embedding; .state holds what there is")
        self.state = state

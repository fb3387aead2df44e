"""Embedding and block trained together by a proximal variant of Adam, as in the paper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from tqdm.auto import tqdm

from convexformer.nn.modules.base import check_seed, normal_draws
from convexformer.nn.training.stopwatch import Stopwatch
from convexformer.validation import check_flag, check_optional_counts, check_positive
from convexformer_solvers import Penalty
from convexformer_solvers.validation import check_counts

from .course import Callback, MovingTables, follow
from .problem import EmbeddedProblem
from .schedule import FallingAlpha
from .state import EmbeddedState


def train_jointly(
    problem: EmbeddedProblem,
    tables: Tensor | None = None,
    *,
    alpha: float,
    first_alpha: float | None = None,
    hold_steps: int = 0,
    fall_steps: int = 50,
    n_steps: int = 2000,
    optimizer: str = "adam",
    lr: float = 0.02,
    schedule: str = "constant",
    head_lr: float = 0.01,
    batch_size: int | None = None,
    seed: int = 0,
    callback: Callback | None = None,
    look_every: int = 1,
    verbose: bool = False,
) -> EmbeddedState:
    r"""Train an embedding and the block on it together, the block by proximal Adam.

    Each step takes one step of an optimiser on the embedding, and one proximal step on the coefficients of each gate
    and token,

    .. math:: Z_{gk} \leftarrow \mathrm{prox}_{\eta_{gk} \alpha \Omega}\big(Z_{gk} - \eta_{gk} M_{gk}\big), \qquad
              \eta_{gk} = \mathtt{head\_lr} / \sqrt{V_{gk}}

    with Adam's running mean :math:`M` of the gradient and :math:`V_{gk}` that of the mean square over the whole of
    :math:`Z_{gk}`. One step size for all that the penalty ties together makes the proximal step exact: zeros are exact,
    and where nothing moves any more the conditions of an optimum at `alpha` hold. With Adam's step size for every
    single number there would be no such proximal step. **Not convex as a whole**, and no descent method.

    Parameters
    ----------
    problem, tables, alpha, first_alpha, hold_steps, fall_steps
        As in ``train_by_projection``.
    n_steps : int, default=2000
        Steps.
    optimizer : {"adam", "muon"}, default="adam"
        What moves the embedding, as in ``train_by_projection``; Adam is the paper's.
    lr : float, default=0.02
        Learning rate of the embedding, whose rows have length one.
    schedule : {"constant", "cosine"}, default="constant"
        How that rate goes over the steps.
    head_lr : float, default=0.01
        Learning rate of the coefficients.
    batch_size : int, optional
        Samples of a step, drawn anew for each. Default: all.
    seed : int, default=0
        Seed of the embedding and the coefficients to begin with, and of the batches.
    callback : callable, optional
        Called with the ``EmbeddedState`` every `look_every` steps and at the end; returning True stops.
    look_every : int, default=1
        Steps between two calls of it.
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
    >>> from convexformer.gates import Gates
    >>> from convexformer.solvers import get_loss, get_penalty
    >>> symbols = torch.tensor([[a, b] for a in range(3) for b in range(3)])
    >>> gates = Gates([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.5], [-0.5, 1.0]])
    >>> loss, penalty = get_loss("softmax"), get_penalty("nuclear")
    >>> problem = EmbeddedProblem(symbols, torch.eye(3)[symbols.sum(1) % 3], gates, loss, penalty, 3)
    >>> train_jointly(problem, alpha=1e-3, n_steps=20, batch_size=4).step
    20
    """
    check_counts(n_steps=n_steps, look_every=look_every)
    verbose = check_flag(verbose, "verbose")
    alphas = FallingAlpha(alpha, first_alpha, hold_steps, fall_steps)
    check_positive(head_lr=head_lr)
    n_samples = len(problem.symbols)
    check_optional_counts(batch_size=batch_size)
    if batch_size is not None and batch_size > n_samples:
        raise ValueError(f"batch_size must be at most the number of samples, {n_samples}, got {batch_size}")
    moving = MovingTables(problem, tables, seed, optimizer, lr, schedule, n_steps)
    coef = (normal_draws((check_seed(seed) + 1) % 2**64)(*problem.coef_shape) / n_samples).to(moving.now)
    start = EmbeddedState(problem, moving.now.clone(), coef, alphas(0), 0, 0, 0, 0.0)
    head = _ProximalAdam(coef, problem.penalty, head_lr)
    share = 1.0 if batch_size is None else batch_size / n_samples

    def states(steps: Iterable[int]) -> Iterator[EmbeddedState]:
        stopwatch, coef = Stopwatch(start.coef.device), start.coef
        parts = _parts(problem, batch_size, seed)
        for step in steps:
            # One pass over a part gives both gradients; the count is that of coefficients and embedding.
            done = (step, step, 2 * step * share, stopwatch.seconds)
            yield EmbeddedState(problem, moving.now.clone(), coef, alphas(step), *done)
            if step < n_steps:
                with stopwatch:
                    part = next(parts)
                    linear_map = part.map(moving.now)
                    values = part.loss.gradient(linear_map.matvec(coef), part.target) / len(part.target)
                    slope, of_tables = linear_map.gradients(coef, values)
                    moving.move(of_tables)
                    coef = head.step(coef, slope, alphas(step))

    with tqdm(range(n_steps + 1), disable=not verbose, desc="joint") as steps:
        return follow(start, states(steps), callback, lambda step: step % look_every == 0 or step == n_steps)


def _parts(problem: EmbeddedProblem, batch_size: int | None, seed: int) -> Iterator[EmbeddedProblem]:
    """The problem again and again, or problems of batches, each drawn anew."""
    generator = torch.Generator().manual_seed(check_seed(seed))
    while True:
        if batch_size is None:
            yield problem
        else:
            drawn = torch.randperm(len(problem.symbols), generator=generator, device=generator.device)
            yield problem.rows(drawn[:batch_size].to(problem.symbols.device))


class _ProximalAdam:
    """Adam with one step size for each block, and the proximal step of a penalty that is a sum of norms of blocks."""

    _betas, _eps = (0.9, 0.999), 1e-12

    def __init__(self, coef: Tensor, penalty: Penalty, lr: float) -> None:
        self.penalty, self.lr, self.count = penalty, lr, 0
        self.mean, self.square = torch.zeros_like(coef), coef.new_zeros((*coef.shape[:-2], 1, 1))

    def step(self, coef: Tensor, gradient: Tensor, alpha: float) -> Tensor:
        """The next coefficients."""
        first, second = self._betas
        self.count += 1
        self.mean = torch.lerp(gradient, self.mean, first)
        self.square = torch.lerp(gradient.square().mean((-2, -1), keepdim=True), self.square, second)
        root = (self.square / (1 - second**self.count)).sqrt()
        size = self.lr / (root + self._eps)
        moved = coef - size * self.mean / (1 - first**self.count)
        return size * self.penalty.prox(moved / size, alpha)  # norms are homogeneous

"""Embedding and block trained together by a proximal variant of Adam, as in the paper."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from tqdm.auto import tqdm

from convexformer.nn.base import check_sizes, normal_draws
from convexformer_solvers import Penalty

from .problem import EmbeddedProblem, along_sphere, random_tables, unit_rows
from .projection import partial_gradient
from .schedule import FallingAlpha, check_rate
from .state import Callback, EmbeddedState, EmbeddingInterrupted


def train_jointly(
    problem: EmbeddedProblem,
    tables: Tensor | None = None,
    *,
    alpha: float,
    first_alpha: float | None = None,
    hold_steps: int = 0,
    fall_steps: int = 50,
    n_steps: int = 2000,
    lr: float = 0.02,
    head_lr: float = 0.01,
    batch_size: int | None = None,
    seed: int = 0,
    callback: Callback | None = None,
    look_every: int = 1,
    verbose: bool = False,
) -> EmbeddedState:
    r"""Train an embedding and the block on it together by proximal Adam.

    Each step takes one Adam step on the embedding and one proximal step on the coefficients of each gate and token,

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
    lr, head_lr : float, default=0.02 and 0.01
        Learning rates of the embedding, whose rows have length one, and of the coefficients.
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
    check_sizes(n_steps=n_steps, look_every=look_every)
    alphas = FallingAlpha(alpha, first_alpha, hold_steps, fall_steps)
    check_rate("lr", lr)
    check_rate("head_lr", head_lr)
    n_samples = len(problem.symbols)
    if batch_size is not None:
        check_sizes(batch_size=batch_size)
        if batch_size > n_samples:
            raise ValueError(f"batch_size must be at most the number of samples, {n_samples}, got {batch_size}")
    start = time.perf_counter()
    tables = random_tables(problem, seed) if tables is None else unit_rows(tables.to(problem.target))
    coef = (normal_draws(seed + 1)(*problem.coef_shape) / n_samples).to(tables)
    optimizer, head = torch.optim.Adam([tables], lr=lr), _ProximalAdam(coef, problem.penalty, head_lr)
    generator = torch.Generator().manual_seed(seed)
    share = 1.0 if batch_size is None else batch_size / n_samples
    outside = 0.0  # seconds of the callback

    def state_at(step: int) -> EmbeddedState:
        seconds = time.perf_counter() - start - outside
        # One pass over a part gives both gradients; the count is that of the coefficients' and the embedding's.
        return EmbeddedState(problem, tables.clone(), coef, alphas(step), step, step, 2 * step * share, seconds)

    state = state_at(0)
    try:
        for step in tqdm(range(n_steps + 1), disable=not verbose, desc="joint"):
            if step % look_every == 0 or step == n_steps:
                state = state_at(step)
                before = time.perf_counter()
                stop = callback is not None and callback(state) is True
                outside += time.perf_counter() - before
                if stop or step == n_steps:
                    break
            part = problem
            if batch_size is not None:
                drawn = torch.randperm(n_samples, generator=generator)[:batch_size]
                part = problem.rows(drawn.to(tables.device))
            program = part.program(tables, alphas(step))
            pred = program.map.matvec(coef)
            slope = program.map.rmatvec(program.loss.gradient(pred, program.y) / len(pred))
            tables.grad = along_sphere(tables, partial_gradient(program, coef, pred))
            optimizer.step()
            tables.copy_(unit_rows(tables))
            coef = head.step(coef, slope, program.alpha)
    except KeyboardInterrupt as interrupt:
        raise EmbeddingInterrupted(state) from interrupt
    return state


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

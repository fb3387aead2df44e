"""Training of the non-convex networks: one function for all of them, with an equal budget for every setting tried."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from tqdm.auto import tqdm

from convexformer.nn.modules.base import (
    AttentionNetwork,
    Samples,
    check_like,
    check_not_half,
    check_target_shape,
    inputs_of,
    relative_weight,
)
from convexformer.validation import check_finite, check_flag
from convexformer_solvers import Loss, Penalty, get_loss, get_penalty
from convexformer_solvers.validation import is_real, warn_caller

from .history import TrainingHistory, TrainingInterrupted
from .trial import Data, Settings, Trial, load_weights, weights_of


def train(
    network: AttentionNetwork,
    tokens: Samples,
    y: Tensor,
    *,
    loss: str | Loss = "squared",
    penalty: str | Penalty | None = None,
    alpha: float,
    sample_weight: ArrayLike | Tensor | None = None,
    optimizer: str = "adam",
    lr: float | Sequence[float] = 1e-2,
    weight_decay: float | Sequence[float] = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    schedule: str = "cosine",
    n_steps: int = 1000,
    look_every: int | None = None,
    batch_size: int | None = None,
    validation: tuple[Samples, Tensor] | None = None,
    patience: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    callback: Callable[[int, float], bool | None] | None = None,
    verbose: bool = False,
) -> TrainingHistory:
    """Train a network in place by Adam, its learning rate falling to zero along a cosine or constant.

    The objective is ``AttentionNetwork.objective``, decay included, so that it can be compared with a certificate.
    Where ``lr`` or ``weight_decay`` are several, every combination starts from the network's initial weights, draws
    the same minibatches and gets the same budget of steps and seconds. The network ends with the weights of the best:
    that of smallest validation loss or, without ``validation``, of smallest final objective.

    Parameters
    ----------
    network : AttentionNetwork
        Changed in place; not in float16, in which Adam divides by zero.
    tokens : Tensor of shape (N, n, d) or (N, n), or pair
        The samples, in the precision and on the device of the network; what ``network.check_samples`` allows. Networks
        of symbols take integers of shape ``(N, n)``. A network whose ``forward`` takes a mask, as ``AttentiveProbe``,
        also trains on pairs of such a tensor and a mask of shape ``(N, n)``, True or 1 where a token is real, or
        lengths, integers of shape ``(N,)``. What is not real counts as zero, whatever it holds. No gradient passes to
        the samples, targets or weights.
    y : Tensor of the shape of the predictions, or (N, T * c) for predictions of shape (N, T, c)
        Targets of the loss, in the precision and on the device of the network.
    loss : str or Loss, default="squared"
        As in ``AttentionNetwork.objective``.
    penalty : str or Penalty, optional
        As in ``network.decay``. Default: the network's own, which is ``"group_l2"`` for ``ConvexAttention``.
    alpha : float
        Weight of the decay in the objective, 0 or more.
    sample_weight : array-like or Tensor of shape (N,), optional
        Non-negative weights of the training samples; only ratios matter. Samples of weight zero are left out.
    optimizer : {"adam", "adamw"}, default="adam"
        ``"adamw"`` has decoupled weight decay, which is not part of the objective: a network so trained minimises
        something else than the convex program, unless ``weight_decay`` is 0.
    lr : float or sequence of float, default=1e-2
        First learning rate, or several to choose from.
    weight_decay : float or sequence of float, default=0.0
        Decoupled decay of AdamW on all parameters, biases included, or several to choose from. Adam has none: the
        decay of the objective is ``alpha``.
    betas : pair of float, default=(0.9, 0.999)
        Adam's memories of the gradient and of its square, 0 or more and below 1; torch's defaults.
    schedule : {"cosine", "constant"}, default="cosine"
        Course of the learning rate: down to zero along a cosine over ``n_steps``, which ends in a point near to a
        stationary one, or none, under which a run does not depend on how long it was meant to be.
    n_steps : int, default=1000
        Steps of each combination.
    look_every : int, optional
        Steps between looks: what is recorded only at times is recorded before the first step, each so many steps and
        at the end. Default: ``ceil(n_steps / 100)``, and with minibatches at least as many as a pass over the samples
        has, as a look takes all of them.
    batch_size : int, optional
        Samples of a minibatch, drawn without replacement in passes over the samples that drop what does not fill a
        batch. Default: all samples in every step. With minibatches the objective on all samples is recorded only
        at looks.
    validation : pair, optional
        Held-out ``(tokens, y)``, whose unweighted mean loss without decay is recorded at looks; ``tokens`` may be a
        pair as well.
    patience : int, optional
        Number of looks in a row without progress in the validation loss after which training stops. The
        best weights by validation are then kept, whether or not it stopped. Default: train on, and keep the last.
    seconds : float, optional
        Wall time of each combination, checked before every step. Evaluations and callbacks do not count. The cosine
        is that of ``n_steps`` all the same. Default: no limit.
    seed : int, default=0
        Of the minibatches; the same on every device.
    callback : callable, optional
        Called with the steps done and the objective whenever the objective is recorded before a step: at each look
        with minibatches, before each step without. It may read the network, whose weights are those after so many
        steps; its time does not count. Returning True ends this combination.
    verbose : bool, default=False
        Whether to show a progress bar over the steps of all combinations.

    Returns
    -------
    TrainingHistory
        Of the best combination, with those of all as ``trials``.

    Raises
    ------
    TypeError
        If the network is no ``AttentionNetwork``, or the callback cannot be called.
    ValueError
        If an argument is not as described; the message names it.
    TrainingInterrupted
        On Ctrl-C; a ``KeyboardInterrupt`` whose ``history`` is that of the best combination so far. The network has its
        weights, as at a normal end: a combination that was broken off counts with what it had reached, which is
        recorded first. After another Ctrl-C meanwhile it counts with its last look; where nothing has been recorded
        yet, the network has its initial weights and a plain ``KeyboardInterrupt`` is raised.

    Warns
    -----
    RuntimeWarning
        If the objective of every combination became infinite or nan. Such a combination ends at once and loses
        against all others; the network gets its initial weights back, or the best by validation with ``patience``.

    Examples
    --------
    >>> from convexformer.nn import ConvexAttention
    >>> tokens, y = torch.ones(4, 2, 3), torch.ones(4, 1)
    >>> history = train(ConvexAttention(2, 3, 1, n_heads=4), tokens, y, alpha=0.01, lr=[1e-4, 1e-2], n_steps=50)
    >>> history.lr, history.final_objective < history.objective[0], len(history.trials)
    (0.01, True, 2)
    """
    if not isinstance(network, AttentionNetwork):
        raise TypeError(f"network must be an AttentionNetwork of convexformer.nn, got {type(network).__name__}")
    if not any(weight.requires_grad for weight in network.parameters()):
        raise ValueError(
            "network must have weights to train, but all are frozen; network.requires_grad_(True) frees them"
        )
    check_not_half("network", network.parameters())
    settings = Settings(
        loss=get_loss(loss),
        penalty=None if penalty is None else get_penalty(penalty),
        alpha=alpha,
        optimizer=optimizer,
        betas=betas,
        schedule=schedule,
        n_steps=n_steps,
        look_every=look_every,
        batch_size=batch_size,
        patience=patience,
        seconds=math.inf if seconds is None else seconds,
        seed=seed,
        callback=callback,
    )
    if validation is not None and (not isinstance(validation, (tuple, list)) or len(validation) != 2):
        raise ValueError(f"validation must be a pair (tokens, y), got {type(validation).__name__}")
    if patience is not None and validation is None:
        raise ValueError("patience needs validation=(tokens, y), whose loss it watches")
    grid = list(itertools.product(_grid("lr", lr), _grid("weight_decay", weight_decay)))
    if min(rate for rate, _ in grid) == 0:
        raise ValueError(f"lr must be positive, got {lr!r}")
    if optimizer != "adamw" and any(decay > 0 for _, decay in grid):
        raise ValueError("weight_decay is that of optimizer='adamw'; the decay of the objective is alpha")
    verbose = check_flag(verbose, "verbose")
    data, n_outputs = _data("", network, tokens, y, sample_weight)
    if batch_size is not None and batch_size > len(y):
        raise ValueError(f"batch_size must be at most the number of samples, {len(y)}, got {batch_size}")
    settings.loss.check_target(y.reshape(-1, n_outputs))
    held_out = None if validation is None else _data("validation ", network, *validation)[0]
    with tqdm(total=n_steps * len(grid), disable=not verbose, desc=optimizer) as bar:
        return _search(network, data, held_out, settings, grid, bar)


def _search(
    network: AttentionNetwork,
    data: Data,
    held_out: Data | None,
    settings: Settings,
    grid: list[tuple[float, float]],
    bar: tqdm,
) -> TrainingHistory:
    """Train with every combination from the same weights and load the best."""
    start = weights_of(network)
    trials: list[Trial] = []
    try:
        for number, (rate, decay) in enumerate(grid, start=1):
            trials.append(Trial(network, data, held_out, settings, start, rate, decay, bar))
            trials[-1].run()
            _best(trials)
            bar.update(number * settings.n_steps - bar.n)
        history = _load_best(network, trials)
        if history.diverged:
            warn_caller(
                f"training diverged with every learning rate ({', '.join(str(rate) for rate, _ in grid)}); "
                "the network was reset, try smaller ones",
                RuntimeWarning,
            )
        return history
    except KeyboardInterrupt as interruption:
        if trials:
            trials[-1].break_off()
        ended = [trial for trial in trials if trial.ended_by is not None]
        if not ended:  # no step was taken, so that the network has its first weights
            raise
        raise TrainingInterrupted(_load_best(network, ended), len(grid)) from interruption


def _best(trials: list[Trial]) -> Trial:
    """The trial of least score; the weights of the others, which may take much memory, are let go."""
    best = min(trials, key=lambda trial: trial.history.score)
    for trial in trials:
        if trial is not best:
            trial.let_weights_go()
    return best


def _load_best(network: AttentionNetwork, trials: list[Trial]) -> TrainingHistory:
    """Load the best weights; their history, with those of all."""
    best = _best(trials)
    load_weights(network, best.weights)
    histories = [trial.history for trial in trials]
    return dataclasses.replace(histories[trials.index(best)], trials=histories)


def _grid(name: str, values: float | Sequence[float]) -> list[float]:
    """The numbers to try."""
    try:
        array = np.atleast_1d(np.asarray(values))
    except ValueError as error:  # of sequences of several lengths
        raise ValueError(f"{name} must be a number or a sequence of them, got {values!r}") from error
    if array.dtype == object and all(map(is_real, array.flat)):
        array = array.astype(float)  # of integers beyond 64 bits
    is_row = array.dtype.kind in "fiu" and array.ndim == 1 and array.size > 0
    if not (is_row and ((array >= 0) & (array < math.inf)).all()):
        raise ValueError(f"{name} must be a non-negative number or a non-empty sequence of them, got {values!r}")
    return [float(value) for value in array]


def _data(
    kind: str, network: AttentionNetwork, samples: Samples, y: Tensor, weight: ArrayLike | Tensor | None = None
) -> tuple[Data, int]:
    """Checked samples, which `kind` names in messages, and how many outputs the network has."""
    inputs = inputs_of(network, samples, f"{kind}tokens")
    tokens = inputs[0]
    network.check_samples(tokens, f"{kind}tokens")
    check_like(next(network.parameters()), y, f"{kind}y")
    if len(y) != len(tokens):
        raise ValueError(f"{kind}y must have one row per sample, {len(tokens)}, got {len(y)}")
    check_finite(f"{kind}tokens", tokens)
    check_finite(f"{kind}y", y)
    inputs, y = tuple(part.detach() for part in inputs), y.detach()  # a graph behind them serves a single step
    share = None if weight is None else relative_weight(weight, y).detach()
    if share is not None and not bool(share.all()):  # the loss of what has no weight may be infinite
        counted = share > 0
        inputs, y, share = tuple(part[counted] for part in inputs), y[counted], share[counted]
    data = Data(inputs if len(inputs) == 2 else network.prepared(*inputs), y, share)
    first = data.rows(torch.arange(1, device=y.device))
    with torch.no_grad():
        prediction = network(*first.inputs)
    check_target_shape(y, (len(y), *prediction.shape[1:]), f"{kind}y")
    return data, prediction.shape[-1]

"""What the experiments on text and on video share: methods, their equal search, trials and paired comparisons."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from torch import Tensor, nn

from convexformer.constrained import InfeasibleWarning, NonFiniteLossError, PrimalDual
from convexformer.constrained.data import LayerLosses


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes
    ----------
    name : str
        What tables and figures call it.
    objective : str
        As of ``PrimalDual``.
    tuned : str
        Option, besides the learning rate, whose values are searched: as many for each method.
    """

    name: str
    objective: str
    tuned: str


METHODS = (
    Method("constrained", "constrained", "alpha"),
    Method("unconstrained", "last", "weight_decay"),
    Method("deep supervision", "sum", "weight_decay"),
)


PARTS = ("runs", "ablation")  # of the reports


@dataclass(frozen=True)
class Search:
    """Values that every method tries: all pairs of a learning rate and one of as many values of its second option.

    Parameters
    ----------
    learning_rates : tuple of float
        For all methods.
    alphas, weight_decays : tuple of float
        For constrained training, and for the other methods; of one length.

    Raises
    ------
    ValueError
        If the methods would not try as many pairs each.

    Examples
    --------
    >>> Search((1e-3,), (0.05, 0.2), (0.0, 1e-4)).pairs(METHODS[0])
    [(0.001, 0.05), (0.001, 0.2)]
    """

    learning_rates: tuple[float, ...]
    alphas: tuple[float, ...]
    weight_decays: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.alphas) != len(self.weight_decays):
            raise ValueError(
                f"alphas and weight_decays must hold as many values, so that the search is equal, got {self.alphas} "
                f"and {self.weight_decays}"
            )

    def pairs(self, method: Method) -> list[tuple[float, float]]:
        """The pairs that a method tries."""
        values = self.alphas if method.tuned == "alpha" else self.weight_decays
        return list(itertools.product(self.learning_rates, values))


@dataclass(frozen=True)
class Task:
    """What is trained, on what.

    Attributes
    ----------
    make_model : callable
        From a seed to a module.
    layer_losses : callable
        As of ``PrimalDual``.
    training, validation : sequence of Tensor
        Samples.
    c_ref : float
        Loss that the first layer must come below.
    options : dict
        Further options of ``PrimalDual``, the same for all methods where they apply.
    n_epochs : int
        Epochs of every run.
    """

    make_model: Callable[[int], nn.Module]
    layer_losses: LayerLosses
    training: Sequence[Tensor]
    validation: Sequence[Tensor]
    c_ref: float
    options: dict[str, Any]
    n_epochs: int


@dataclass(frozen=True)
class Trained:
    """The best run of a search.

    Attributes
    ----------
    trainer : PrimalDual
        Its trainer; the model has the weights that were chosen on validation samples.
    pair : tuple of float
        Learning rate and second option.
    seconds : float
        Of the whole search.
    """

    trainer: PrimalDual
    pair: tuple[float, float]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """What a report keeps of it."""
        report, history = self.trainer.report_, self.trainer.history_
        return {
            "learning_rate": self.pair[0],
            "tuned": self.pair[1],
            "seconds": self.seconds,
            "feasible": self.trainer.feasible_,
            "layer_losses": report.losses.tolist(),
            "violations": report.violations.tolist(),
            "standard_errors": report.standard_errors.tolist(),
            "mean_ratio": report.mean_ratio,
            "median_ratio": report.median_ratio,
            "descending_share": report.descending_share,
            "duals": history.duals[-1],
            "net_weights": history.net_weights[-1],
        }


def train_once(task: Task, method: Method, pair: tuple[float, float], seed: int, **changes: Any) -> PrimalDual:
    """Train with one pair of options.

    Parameters
    ----------
    task : Task
        What is trained.
    method : Method
        How.
    pair : tuple of float
        Learning rate and second option.
    seed : int
        Of the weights and the order of samples.
    **changes
        Options that are to be others, as for an ablation.

    Returns
    -------
    PrimalDual

    Raises
    ------
    NonFiniteLossError
        If a loss, also one on validation samples at the end, is infinite or nan.
    """
    options = {**task.options, "lr": pair[0], method.tuned: pair[1], "objective": method.objective, **changes}
    trainer = PrimalDual(task.make_model(seed), task.layer_losses, **{"c_ref": task.c_ref, "seed": seed, **options})
    with warnings.catch_warnings():  # feasibility is in the report
        warnings.simplefilter("ignore", InfeasibleWarning)
        trainer.fit(task.training, n_epochs=task.n_epochs, validation=task.validation)
    if not np.isfinite(trainer.report_.losses).all():
        raise NonFiniteLossError(f"validation losses of the layers became {trainer.report_.losses.tolist()}")
    return trainer


def search(task: Task, method: Method, grid: Search, seed: int) -> Trained:
    """Train with every pair and keep the run of least validation loss of the last layer.

    Constrained training is chosen among its feasible runs, where there are any. A run whose losses became infinite
    loses against all others, and one whose validation loss is nan against all that end.

    Parameters
    ----------
    task, method, grid, seed
        As of ``train_once`` and ``Search``.

    Returns
    -------
    Trained

    Raises
    ------
    NonFiniteLossError
        If every run diverged.
    """
    began = time.perf_counter()
    best: tuple[tuple[bool, bool, float], PrimalDual, tuple[float, float]] | None = None
    failure: NonFiniteLossError | None = None
    for pair in grid.pairs(method):
        try:
            trainer = train_once(task, method, pair, seed)
        except NonFiniteLossError as error:
            failure = error
            continue
        infeasible = method.objective == "constrained" and not trainer.feasible_
        loss = float(trainer.report_.losses[-1])
        worth = (math.isnan(loss), infeasible, loss)
        if best is None or worth < best[0]:
            best = (worth, trainer, pair)
    if best is None:
        assert failure is not None
        raise failure
    return Trained(best[1], best[2], time.perf_counter() - began)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> dict[str, float | None]:
    """Mean difference over seeds, its standard error and the p-value of a paired t-test.

    Parameters
    ----------
    first, second : sequence of float
        Results of two methods, seed by seed.

    Returns
    -------
    dict
        ``difference``, ``error`` and ``p``; the latter two are None with fewer than two seeds, and where all differ by
        the same.

    Examples
    --------
    >>> result = paired_difference([1.0, 2.0, 3.0], [0.5, 1.0, 2.5])
    >>> round(result["difference"], 3), round(result["error"], 3), round(result["p"], 3)
    (0.667, 0.167, 0.057)
    """
    differences = np.subtract(first, second)
    if len(differences) < 2 or np.ptp(differences) == 0:
        return {"difference": float(differences.mean()), "error": None, "p": None}
    return {
        "difference": float(differences.mean()),
        "error": float(stats.sem(differences)),
        "p": float(stats.ttest_1samp(differences, 0).pvalue),
    }

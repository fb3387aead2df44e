"""What the experiment on grokking is run with."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

from convexformer.experiments.settings import ExperimentSettings, check_each, is_nonnegative, is_positive
from convexformer.validation import check_positive, is_integer
from convexformer_solvers.validation import check_counts

_CHOICES = ("moduli", "layers", "transformer_layers")


@dataclass(frozen=True)
class GrokkingSettings(ExperimentSettings):
    """Everything that the numbers of the experiment on grokking depend on, besides versions and machine.

    The defaults are the full setting: hours on a CPU; ``small`` takes a minute and a half on two cores.

    Parameters
    ----------
    moduli : tuple of int, default=(97, 15)
        Moduli ``p`` of the tables of division, the paper's.
    layers, transformer_layers : tuple of int, default=(1, 2, 4)
        Depths of convex attention and of the transformers. Neither these nor `moduli` change the numbers of others, so
        a report can be gone on with under more of them.
    fraction : float, default=0.5
        Share of a table to train on.
    n_steps : int, default=10000
        Optimiser steps after which a method that has not generalised is given up.
    untuned_steps : int, default=100000
        The same for the row of the untuned transformer.
    tuning_steps : int, default=4000
        Steps of every pair of `learning_rates` and `decays` that is tried.
    learning_rates, decays : tuple of float
        The grid of every tuned method, all pairs of which are tried.
    batch_size : int, default=512
        Rows per step; all of them where there are fewer.
    look_every : int, default=20
        Steps between looks at accuracies and losses, and so the resolution of the steps to `threshold`; variable
        projection has its own.
    threshold : float, default=0.99
        The accuracy whose first look is counted.
    run_on : float, default=1.25
        A run ends after this many times the steps at which its test accuracy reached `threshold`.
    transformer_width, transformer_heads : int, default=128 and 4
        Size of the transformers.
    embedding_width, n_hidden : int, default=32 and 128
        Width of the embeddings of all other networks, and hidden units of the MLPs.
    n_heads : int, default=512
        Heads of each layer of convex attention trained end to end, each behind a gate of its own.
    n_gates : int, default=60
        Gates of the fully convex program.
    greedy_gates : int, default=20
        New gates of each layer of the layer-wise form; fewer than `n_gates`, so that a layer leaves something to do.
    learned_width, learned_gates : int, default=32 and 160
        Width of the learned tokens of the convex block, and its gates.
    learned_first_ratio, learned_last_ratio : float, default=0.1 and 0.003
        ``alpha`` of the convex block while the embedding is found and at the end, as parts of its ``alpha_max`` on
        random tokens.
    projection_steps : int, default=40
        Steps of the embedding by variable projection, all of which are taken while the learning rate falls to zero.
    projection_rate : float, default=0.3
        Learning rate of the embedding by variable projection at the first of them.
    projection_look_every : int, default=8
        Steps of the embedding between looks of variable projection, each at a block that is solved for it.
    head_steps : int, default=30
        Solver steps on the block for each step of the embedding.
    joint_hold : int, default=100
        Steps at the first ``alpha`` in joint training, on all rows, and steps in which it falls.
    joint_rate, joint_head_rate : float, default=0.06 and 0.03
        Learning rates of the embedding and of the block in joint training.
    alpha_ratio : float, default=0.01
        ``alpha`` of the convex programs, as part of ``alpha_max``.
    tol, greedy_tol : float, default=1e-4 and 1e-3
        Certified relative gaps of the fully convex program and of each layer of the layer-wise form.
    max_iter : int, default=10000
        Iterations of the solver at most, for each program.
    device : str, optional
        Device of everything. Default: the CPU.

    Raises
    ------
    ValueError
        If a number is out of range; the message names it.

    Examples
    --------
    >>> GrokkingSettings.small(n_steps=100).moduli, len(GrokkingSettings().grid)
    ((31,), 12)
    """

    moduli: tuple[int, ...] = (97, 15)
    layers: tuple[int, ...] = (1, 2, 4)
    transformer_layers: tuple[int, ...] = (1, 2, 4)
    fraction: float = 0.5
    n_steps: int = 10_000
    untuned_steps: int = 100_000
    tuning_steps: int = 4000
    learning_rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    decays: tuple[float, ...] = (0.0, 0.3, 1.0, 3.0)
    batch_size: int = 512
    look_every: int = 20
    threshold: float = 0.99
    run_on: float = 1.25
    transformer_width: int = 128
    transformer_heads: int = 4
    embedding_width: int = 32
    n_hidden: int = 128
    n_heads: int = 512
    n_gates: int = 60
    greedy_gates: int = 20
    learned_width: int = 32
    learned_gates: int = 160
    learned_first_ratio: float = 0.1
    learned_last_ratio: float = 0.003
    projection_steps: int = 40
    projection_rate: float = 0.3
    projection_look_every: int = 8
    head_steps: int = 30
    joint_hold: int = 100
    joint_rate: float = 0.06
    joint_head_rate: float = 0.03
    alpha_ratio: float = 0.01
    tol: float = 1e-4
    greedy_tol: float = 1e-3
    max_iter: int = 10_000
    device: str | None = None

    _SMALL: ClassVar[dict[str, Any]] = {
        "moduli": (31,),
        "layers": (1, 2),
        "transformer_layers": (1,),
        "n_steps": 500,
        "untuned_steps": 200,
        "tuning_steps": 200,
        "learning_rates": (1e-2,),
        "decays": (0.0, 1.0, 3.0),
        "look_every": 10,
        "transformer_width": 32,
        "n_heads": 32,
        "learned_width": 12,
        "learned_gates": 60,
        "projection_steps": 60,
    }

    def __post_init__(self) -> None:
        check_counts(**{name: n for name, n in asdict(self).items() if isinstance(getattr(type(self), name), int)})
        for name, least in (("moduli", 3), ("layers", 1), ("transformer_layers", 1)):
            check_each(partial(is_integer, least=least), f"integers of at least {least}", **self._named(name))
        for name in ("fraction", "threshold", "alpha_ratio", "learned_first_ratio", "learned_last_ratio"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)!r}")
        if not 1 <= self.run_on < math.inf:
            raise ValueError(f"run_on must be a number of at least 1, got {self.run_on!r}")
        check_positive(**self._named("projection_rate", "joint_rate", "joint_head_rate", "tol", "greedy_tol"))
        check_each(is_positive, "positive numbers", learning_rates=self.learning_rates)
        check_each(is_nonnegative, "numbers of at least 0", decays=self.decays)

    @property
    def grid(self) -> list[tuple[float, float]]:
        """Pairs of learning rate and decay that are tried, those first that are likely to be soon done."""
        return [(rate, decay) for rate in sorted(self.learning_rates, reverse=True) for decay in self.decays[::-1]]

    def as_json(self) -> dict[str, Any]:
        """Settings that the numbers of every method depend on, as they read back from a JSON file."""
        return {name: value for name, value in super().as_json().items() if name not in _CHOICES}

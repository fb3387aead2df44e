"""What a training run leaves behind besides the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from convexformer_solvers.result import Interrupted

End = Literal["n_steps", "patience", "seconds", "callback", "diverged", "interrupted"]


@dataclass
class TrainingHistory:
    """Course of one training run: one learning rate and one weight decay.

    Attributes
    ----------
    steps : list of int
        Steps done when each entry of ``objective`` and ``seconds`` was taken: each step on the full batch, the
        looks of ``train`` with minibatches.
    objective : list of float
        Mean loss over **all** training samples plus ``alpha`` times the decay, before the step.
    seconds : list of float
        Wall time of the steps so far, without evaluations and callbacks.
    validation_steps : list of int
        Steps done when each entry of ``validation`` was taken.
    validation : list of float
        Mean loss, without decay, on the validation data; empty without any.
    lr, weight_decay : float
        First learning rate and AdamW's decay of this run.
    ended_by : {"n_steps", "patience", "seconds", "callback", "diverged", "interrupted"}
        What ended the run; the last is Ctrl-C.
    kept_step : int
        Steps done by the weights that the run ended with: fewer than were made where the best weights by validation,
        or the initial ones after a divergence, were put back.
    trials : list of TrainingHistory
        Of what ``train`` returns: the runs of all combinations, this one among them, in the order of the grid. After
        Ctrl-C: those so far, the interrupted one as far as it got.

    Examples
    --------
    >>> history = TrainingHistory(steps=[0, 1], objective=[2.0, 1.0], seconds=[0.0, 0.5], kept_step=1)
    >>> history.final_objective, history.total_seconds, history.stopped_early
    (1.0, 0.5, False)
    >>> history.diverged
    False
    >>> history
    TrainingHistory(1 steps, objective 2 to 1, lr=nan, weight_decay=0, ended_by='n_steps', 0 trials)
    """

    steps: list[int] = field(default_factory=list)
    objective: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation_steps: list[int] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    lr: float = math.nan
    weight_decay: float = 0.0
    ended_by: End = "n_steps"
    kept_step: int = 0
    trials: list[TrainingHistory] = field(default_factory=list)

    def __repr__(self) -> str:
        if not self.steps:
            return "TrainingHistory(no steps)"
        return (
            f"TrainingHistory({self.steps[-1]} steps, objective {self.objective[0]:.4g} to {self.objective[-1]:.4g}, "
            f"lr={self.lr:.3g}, weight_decay={self.weight_decay:.3g}, ended_by={self.ended_by!r}, "
            f"{len(self.trials)} trials)"
        )

    @property
    def stopped_early(self) -> bool:
        """Whether the run ended before its last step."""
        return self.ended_by != "n_steps"

    @property
    def final_objective(self) -> float:
        """Objective of the weights that the run ended with; ``ValueError`` where there are no steps."""
        if not self.steps:
            raise ValueError("a history of no steps has no objective; train(...) returns one of a run")
        return self.objective[self.steps.index(self.kept_step)]

    @property
    def final_validation(self) -> float:
        """Validation loss of the weights that the run ended with; nan without validation data."""
        return self.validation[self.validation_steps.index(self.kept_step)] if self.validation else math.nan

    @property
    def total_seconds(self) -> float:
        """Seconds of the whole search, all combinations together; 0 of no steps."""
        return sum((trial.seconds[-1] for trial in self.trials or [self] if trial.seconds), start=0.0)

    @property
    def score(self) -> float:
        """What the best combination has the least of: final validation loss, else objective; inf if not finite."""
        value = self.final_validation if self.validation else self.final_objective
        return value if math.isfinite(value) and self.ended_by != "diverged" else math.inf

    @property
    def diverged(self) -> bool:
        """Whether the run has no finite score; of what ``train`` returns: whether all combinations diverged."""
        return math.isinf(self.score)


class TrainingInterrupted(Interrupted):
    """Raised on Ctrl-C during ``train``; the network has the best weights so far.

    Attributes
    ----------
    history : TrainingHistory
        Of the combination that is the best so far, with those of all so far as ``trials``.

    Examples
    --------
    Here a callback stands for Ctrl-C:

    >>> import torch
    >>> from convexformer.nn import ConvexAttention, train
    >>> def press_ctrl_c(step, objective):
    ...     if step == 20:
    ...         raise KeyboardInterrupt
    >>> network, tokens, y = ConvexAttention(2, 3, n_heads=4), torch.ones(4, 2, 3), torch.ones(4, 1)
    >>> try:
    ...     history = train(network, tokens, y, alpha=0.01, n_steps=50, callback=press_ctrl_c)
    ... except TrainingInterrupted as interrupt:
    ...     history = interrupt.history
    >>> history.ended_by, history.kept_step, history.final_objective < history.objective[0]
    ('interrupted', 20, True)
    """

    def __init__(self, history: TrainingHistory, n_combinations: int) -> None:
        super().__init__(
            f"interrupted after {history.trials[-1].steps[-1]} steps of combination {len(history.trials)} of "
            f"{n_combinations}; the network has the weights of step {history.kept_step} with lr={history.lr:.3g}, and "
            ".history holds what led there"
        )
        self.history = history

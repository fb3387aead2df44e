"""Rows of the experiment's tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Row:
    """One trained model of one seed; what does not apply is None.

    Attributes
    ----------
    model, method : str
        What was trained and how.
    seed : int
        Of the split and the initial weights.
    alpha, learning_rate : float
        As chosen.
    objective : float
        Training objective, decay included.
    dual_bound, ratio, excess : float
        Certified lower bound of the class, objective over that of the certified solution, and objective above the
        bound.
    choice_seconds, fit_seconds : float
        Wall time of choosing and of training with what was chosen.
    steps : int
        Steps or iterations of that training.
    heads, tokens : int
        Heads of the network, and token positions that it reads.
    validation_r2, test_r2, test_error : float
        Variance-weighted R2 on held-out sentences, and relative squared error; None where training diverged.
    """

    model: str
    method: str
    seed: int
    validation_r2: float | None
    test_r2: float | None
    test_error: float | None
    choice_seconds: float
    fit_seconds: float
    alpha: float | None = None
    learning_rate: float | None = None
    objective: float | None = None
    dual_bound: float | None = None
    ratio: float | None = None
    excess: float | None = None
    steps: int | None = None
    heads: int | None = None
    tokens: int | None = None

    def of_diverged(self) -> Row:
        """The row of a training that diverged with every learning rate: what it left is no result of the method."""
        scores, training = ("validation_r2", "test_r2", "test_error"), ("learning_rate", "objective", "ratio", "excess")
        nothing: dict[str, Any] = dict.fromkeys((*scores, *training, "steps", "heads", "tokens"))
        return replace(self, **nothing)


@dataclass(frozen=True)
class Curve:
    """Course of one training run.

    Attributes
    ----------
    model, method : str
        As in the row.
    seconds, excess : list of float
        Wall time and objective above the certified bound; empty where there is none.
    test_seconds, test_r2 : list of float
        Wall time and R2 on the test sentences.
    """

    model: str
    method: str
    seconds: list[float] = field(default_factory=list)
    excess: list[float] = field(default_factory=list)
    test_seconds: list[float] = field(default_factory=list)
    test_r2: list[float] = field(default_factory=list)

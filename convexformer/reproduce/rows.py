"""Rows of the experiment's tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


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
        Variance-weighted R2 on held-out sentences, and relative squared error.
    """

    model: str
    method: str
    seed: int
    validation_r2: float
    test_r2: float
    test_error: float
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

    def as_json(self) -> dict[str, Any]:
        """The row as a plain dictionary."""
        return asdict(self)


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

    def as_json(self) -> dict[str, Any]:
        """The curve as a plain dictionary."""
        return asdict(self)


def medians(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Medians over seeds of all numbers, and the range of the test R2.

    Parameters
    ----------
    rows : sequence of dict
        Rows of all seeds.
    keys : sequence of str
        Entries that say which rows belong together.

    Returns
    -------
    list of dict
        In the order of first appearance, with ``n_seeds`` and ``test_r2_range``.
    """
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [
        dict(zip(keys, names, strict=True)) | _median(group, {*keys, "seed"}) | {"n_seeds": len(group)}
        for names, group in groups.items()
    ]


def _median(group: list[dict[str, Any]], left_out: set[str]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for name in (name for name in group[0] if name not in left_out):
        values = [row[name] for row in group if row[name] is not None]
        summary[name] = float(np.median(values)) if values else None
        if name == "test_r2" and values:
            summary["test_r2_range"] = [min(values), max(values)]
    return summary


Column = tuple[str, str, Callable[[dict[str, Any]], str]]


def counted(number: int, noun: str) -> str:
    """A number with its noun, which has an s unless it is one."""
    return f"{number} {noun}" + "s" * (number != 1)


def shown(name: str, form: str) -> Callable[[dict[str, Any]], str]:
    """Function that shows an entry of a row in a format, and a dash where it does not apply."""
    return lambda row: "-" if row[name] is None else f"{row[name]:{form}}"

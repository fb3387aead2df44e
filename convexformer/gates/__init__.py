"""Fixed gates of the gated-ReLU layer and the sources that make them (paper [C], Thm 3).

A gate lets sample ``X`` through when ``u1' X u2 >= 0``. Gates are made or given before training and stored with the
model, so that new data meet the same gates. Training a true ReLU is not covered by the theory; ``generate_gates`` comes
closest to it: it adds gates while they lower the optimum.

A new source is one class and, where it is to have a name, one line of ``GATE_SOURCES``.
"""

from __future__ import annotations

from collections.abc import Callable

from numpy.typing import ArrayLike

from convexformer_solvers.validation import shown

from .base import Gates, GatesInterrupted, GateSource, TrainingData
from .generated import (
    GeneratedGates,
    GeneratedGatesResult,
    GenerationEnd,
    GenerationInterrupted,
    GenerationRound,
    generate_gates,
)
from .search import GateSearch
from .sources import DifferenceGates, FourierGates, GaussianGates, GivenGates, NetworkGates, SparseGates

__all__ = [
    "GATE_SOURCES",
    "DifferenceGates",
    "FourierGates",
    "GateSearch",
    "GateSource",
    "Gates",
    "GatesInterrupted",
    "GaussianGates",
    "GeneratedGates",
    "GeneratedGatesResult",
    "GenerationEnd",
    "GenerationInterrupted",
    "GenerationRound",
    "GivenGates",
    "NetworkGates",
    "SparseGates",
    "TrainingData",
    "generate_gates",
    "get_gate_source",
]

# Each is called with the number of gates, for generated ones at most.
GATE_SOURCES: dict[str, Callable[[int], GateSource]] = {
    "difference": DifferenceGates,
    "fourier": FourierGates,
    "gaussian": GaussianGates,
    "generated": GeneratedGates,
    "sparse": SparseGates,
}


def get_gate_source(gates: str | GateSource | Gates | tuple[ArrayLike, ArrayLike], n_gates: int) -> GateSource:
    """The gate source that a user's parameters mean.

    Parameters
    ----------
    gates : str, GateSource, Gates or pair of arrays
        A key of ``GATE_SOURCES``, a source, gates, or ``(u1, u2)`` of shapes ``(h, n_tokens)`` and ``(h, n_features)``.
    n_gates : int
        Number of gates to make where `gates` is a name; for ``"generated"`` at most so many.

    Returns
    -------
    GateSource

    Raises
    ------
    ValueError
        If ``gates`` is none of these or ``n_gates`` is not a positive integer.

    Examples
    --------
    >>> get_gate_source("gaussian", 8)
    GaussianGates(n_gates=8)
    """
    if isinstance(gates, GateSource):
        return gates
    if isinstance(gates, Gates):
        return GivenGates(gates)
    if isinstance(gates, str) and gates in GATE_SOURCES:
        return GATE_SOURCES[gates](n_gates)
    if isinstance(gates, (tuple, list)) and len(gates) == 2:
        return GivenGates(Gates(*gates))
    raise ValueError(
        f"gates must be one of {sorted(GATE_SOURCES)}, a pair of arrays (u1, u2), Gates or a GateSource, got "
        f"{shown(gates)}"
    )

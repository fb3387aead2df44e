"""Descent-constrained training of unrolled transformers ([K]): every layer must lower the loss."""

from .classifier import LayeredClassifier
from .constraints import DescentConstraints
from .exact import ExactReadout, exact_readout
from .primal_dual import PrimalDual
from .reports import (
    ConstrainedHistory,
    ConstrainedTrainingInterrupted,
    FeasibilityReport,
    InfeasibleWarning,
    NonFiniteLossError,
)

__all__ = [
    "ConstrainedHistory",
    "ConstrainedTrainingInterrupted",
    "DescentConstraints",
    "ExactReadout",
    "FeasibilityReport",
    "InfeasibleWarning",
    "LayeredClassifier",
    "NonFiniteLossError",
    "PrimalDual",
    "exact_readout",
]

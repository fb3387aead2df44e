"""Descent-constrained training of unrolled transformers ([K]): every layer must lower the loss."""

from .classifier import LayeredClassifier
from .constraints import DescentConstraints
from .early_exit import ExitTradeoff, early_exit, exit_curve, exit_tradeoff
from .exact import ExactReadout, exact_readout
from .primal_dual import PrimalDual
from .readouts import LayerReadouts, layer_readouts
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
    "ExitTradeoff",
    "FeasibilityReport",
    "InfeasibleWarning",
    "LayerReadouts",
    "LayeredClassifier",
    "NonFiniteLossError",
    "PrimalDual",
    "early_exit",
    "exact_readout",
    "exit_curve",
    "exit_tradeoff",
    "layer_readouts",
]

"""Networks whose targets are sequences: programs, heads and the estimator."""

from .estimators import ConvexSequenceRegressor
from .forms import FORMS, SequenceForm, SingleRow, Stochastic, Substochastic, get_form, sequence_program
from .heads import SequenceHeads

__all__ = [
    "FORMS",
    "ConvexSequenceRegressor",
    "SequenceForm",
    "SequenceHeads",
    "SingleRow",
    "Stochastic",
    "Substochastic",
    "get_form",
    "sequence_program",
]

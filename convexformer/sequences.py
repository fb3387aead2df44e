"""Networks whose targets are sequences: programs, heads and the estimator."""

from .estimators.sequence import ConvexSequenceRegressor
from .heads.sequence import SequenceHeads
from .programs.sequence import FORMS, SequenceForm, SingleRow, Stochastic, Substochastic, get_form, sequence_program

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

"""The convex programs of attention networks, built in one place."""

from .attention import attention_program
from .build import attention_map
from .sequence import FORMS, SequenceForm, SingleRow, Stochastic, Substochastic, get_form, sequence_program

__all__ = [
    "FORMS",
    "SequenceForm",
    "SingleRow",
    "Stochastic",
    "Substochastic",
    "attention_map",
    "attention_program",
    "get_form",
    "sequence_program",
]

"""Descent-constrained training on text and on video ([K]), beside unconstrained training and deep supervision."""

from .text import run_constrained_text
from .text_report import format_constrained_text
from .text_settings import ConstrainedTextSettings

__all__ = ["ConstrainedTextSettings", "format_constrained_text", "run_constrained_text"]

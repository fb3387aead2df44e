"""Unfolded transformers on quadratics and on text ([U], Figs 1 to 6), and the accuracy of their layers."""

from .experiment import FILE, run_unfolded
from .report import format_unfolded
from .settings import UnfoldedSettings

__all__ = ["FILE", "UnfoldedSettings", "format_unfolded", "run_unfolded"]

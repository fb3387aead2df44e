"""Steps that methods take to learn division modulo p, and the grokking delay (paper [C], Figs 4 to 7)."""

from .experiment import FILE, run_grokking
from .methods import METHODS, Method
from .report import format_grokking
from .settings import GrokkingSettings

__all__ = ["FILE", "METHODS", "GrokkingSettings", "Method", "format_grokking", "run_grokking"]

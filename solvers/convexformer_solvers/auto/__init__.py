"""The default solver, its plan and the numbers that it goes by."""

from .config import AutoConfig
from .plan import plan
from .solver import Auto

__all__ = ["Auto", "AutoConfig", "plan"]

"""Alternating direction method of multipliers in the metric of the data."""

from .config import AdmmConfig
from .iteration import Admm

__all__ = ["Admm", "AdmmConfig"]

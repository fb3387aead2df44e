"""Solutions read as attention heads, and networks judged against the global optimum."""

from .attention import Heads
from .optimality import OptimalityGap, optimality_gap
from .sequence import SequenceHeads

__all__ = ["Heads", "OptimalityGap", "SequenceHeads", "optimality_gap"]

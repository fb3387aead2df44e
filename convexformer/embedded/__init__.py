"""A convex block on learned embeddings of symbols: **not convex as a whole**, convex in the block alone."""

from .joint import train_jointly
from .problem import EmbeddedProblem, random_tables
from .projection import optimal_value, train_by_projection
from .state import EmbeddedState, EmbeddingInterrupted

__all__ = [
    "EmbeddedProblem",
    "EmbeddedState",
    "EmbeddingInterrupted",
    "optimal_value",
    "random_tables",
    "train_by_projection",
    "train_jointly",
]

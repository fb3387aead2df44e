"""From what users have to arrays of tokens, and dictionaries of weightings that pool them."""

from .arrays import image_patches, pad_sequences
from .pooling import (
    MaxPooling,
    MeanPooling,
    PoolingUnion,
    PrototypePooling,
    QueryPooling,
    RelativePositions,
    TokenGates,
    TokenPooling,
    TokenStandardizer,
)

__all__ = [
    "MaxPooling",
    "MeanPooling",
    "PoolingUnion",
    "PrototypePooling",
    "QueryPooling",
    "RelativePositions",
    "TokenGates",
    "TokenPooling",
    "TokenStandardizer",
    "image_patches",
    "pad_sequences",
]

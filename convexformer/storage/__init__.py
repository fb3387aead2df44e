"""Data that stay on a disk: sources of samples, and folders of shards."""

from convexformer_solvers.linear_maps.source import Source

from .chunks import Chunks
from .manifest import read_array, read_manifest, verify_shards
from .opening import open_source
from .shards import ShardWriter, write_shards
from .sources import ShardSource

__all__ = [
    "Chunks",
    "ShardSource",
    "ShardWriter",
    "Source",
    "open_source",
    "read_array",
    "read_manifest",
    "verify_shards",
    "write_shards",
]

"""Programs whose samples are spread over the ranks of a process group of ``torch.distributed``."""

from .config import DistributedConfig
from .ranks import RankError, Ranks, ranks
from .sharded import Sharded, ShardedMap, on_all_ranks

__all__ = ["DistributedConfig", "RankError", "Ranks", "Sharded", "ShardedMap", "on_all_ranks", "ranks"]

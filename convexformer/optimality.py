"""Former name of ``convexformer.heads.optimality``."""

from .heads.optimality import *  # noqa: F403

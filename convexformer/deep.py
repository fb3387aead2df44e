"""Former name of ``convexformer.estimators.greedy``."""

from .estimators.greedy import *  # noqa: F403

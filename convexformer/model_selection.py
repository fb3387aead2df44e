"""Former name of ``convexformer.estimators.cv``."""

from .estimators.cv import *  # noqa: F403

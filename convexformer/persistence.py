"""Former name of ``convexformer.estimators.persistence``."""

from .estimators.persistence import *  # noqa: F403

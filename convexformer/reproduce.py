"""Former name of ``convexformer.experiments``."""

from .experiments import *  # noqa: F403

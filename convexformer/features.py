"""Former name of ``convexformer.preprocessing``."""

from .preprocessing import *  # noqa: F403

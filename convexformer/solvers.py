"""Solvers, losses, penalties, certificates: the public names of ``convexformer_solvers``.

Examples
--------
>>> from convexformer.solvers import Huber, get_penalty
>>> Huber(delta=0.5), get_penalty("nuclear")
(Huber(delta=0.5), GroupNuclear())
"""

from convexformer_solvers import *  # noqa: F403
from convexformer_solvers import __all__ as __all__

"""Penalties by name. A new one is a class and a line of ``PENALTIES``; ``check_penalty`` tests it."""

from __future__ import annotations

from convexformer_solvers.validation import shown

from .base import Penalty
from .group import GroupL2, GroupNuclear

PENALTIES: dict[str, type[Penalty]] = {"group_l2": GroupL2, "nuclear": GroupNuclear}


def get_penalty(penalty: str | Penalty) -> Penalty:
    """The penalty of a registered name, or the instance itself.

    Parameters
    ----------
    penalty : str or Penalty
        A key of ``PENALTIES`` or an instance.

    Returns
    -------
    Penalty

    Raises
    ------
    ValueError
        If it is neither.

    Examples
    --------
    >>> get_penalty("group_l2")
    GroupL2()
    """
    if isinstance(penalty, Penalty):
        return penalty
    if isinstance(penalty, str) and penalty in PENALTIES:
        return PENALTIES[penalty]()
    raise ValueError(f"penalty must be one of {sorted(PENALTIES)} or a Penalty instance, got {shown(penalty)}")

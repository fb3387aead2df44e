"""Checks of integers that users pass; every message names the argument."""

from __future__ import annotations

from math import isqrt
from numbers import Integral
from typing import Any, TypeGuard


def is_integer(value: Any, least: int | None = None) -> TypeGuard[int]:
    """Whether a value is an integer, of numpy or Python and no truth value, and not below `least`.

    Examples
    --------
    >>> is_integer(-3), is_integer(0, least=1), is_integer(2.0), is_integer(True)
    (True, False, False, False)
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return whole and (least is None or int(value) >= least)


def check_optional_counts(**counts: Any) -> None:
    """Raise ``ValueError`` naming the first argument that is neither a positive integer nor ``None``.

    Examples
    --------
    >>> check_optional_counts(n_sentences=None)
    """
    for name, value in counts.items():
        if value is not None and not is_integer(value, 1):
            raise ValueError(f"{name} must be a positive integer or None, got {value!r}")


def is_prime(p: int) -> bool:
    """Whether a number is prime.

    Examples
    --------
    >>> [p for p in range(16) if is_prime(p)]
    [2, 3, 5, 7, 11, 13]
    """
    return p > 1 and all(p % divisor for divisor in range(2, isqrt(p) + 1))

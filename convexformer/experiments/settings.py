"""What the settings of all experiments share: their form in a report, and checks of tuples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self


@dataclass(frozen=True)
class ExperimentSettings:
    """Settings that a report keeps; the fields are those of the subclasses, dataclasses as well.

    Examples
    --------
    >>> @dataclass(frozen=True)
    ... class Mine(ExperimentSettings):
    ...     noises: tuple[float, ...] = (0.0, 0.5)
    ...     _SMALL = {"noises": (0.0,)}
    >>> Mine().as_json(), Mine.small().noises
    ({'noises': [0.0, 0.5]}, (0.0,))
    """

    _SMALL: ClassVar[dict[str, Any]] = {}  # what is other than by default in the setting for a laptop

    @classmethod
    def small(cls, **changes: Any) -> Self:
        """The setting for a laptop, which takes a minute or two.

        Parameters
        ----------
        **changes
            Settings that are to be others.

        Returns
        -------
        ExperimentSettings
            Of the same class.
        """
        return cls(**cls._SMALL | changes)

    def as_json(self) -> dict[str, Any]:
        """Settings as they read back from a JSON file."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def _named(self, *names: str) -> dict[str, Any]:
        """Some of the settings, as checks take them."""
        return {name: getattr(self, name) for name in names}


def check_each(holds: Callable[[Any], bool], what: str, **tuples: tuple[Any, ...]) -> None:
    """Raise ``ValueError`` naming the first argument that is empty or has an entry of which a condition does not hold.

    Parameters
    ----------
    holds : callable
        The condition.
    what : str
        What entries must be, in the plural.
    **tuples
        The arguments.

    Examples
    --------
    >>> check_each(lambda rate: rate > 0, "positive numbers", learning_rates=(0.1, 0.0))
    Traceback (most recent call last):
        ...
    ValueError: learning_rates must hold one or more positive numbers, got (0.1, 0.0)
    """
    for name, entries in tuples.items():
        if not entries or not all(map(holds, entries)):
            raise ValueError(f"{name} must hold one or more {what}, got {entries!r}")


def is_positive(value: float) -> bool:
    """Whether a number is positive and finite.

    Examples
    --------
    >>> is_positive(0.1), is_positive(float("inf"))
    (True, False)
    """
    return 0 < value < float("inf")


def is_price(value: float | None) -> bool:
    """Whether a price of slacks is positive and finite, or None, for none.

    Examples
    --------
    >>> is_price(None), is_price(0.1), is_price(0.0)
    (True, True, False)
    """
    return value is None or is_positive(value)


def is_nonnegative(value: float) -> bool:
    """Whether a number is finite and not negative.

    Examples
    --------
    >>> is_nonnegative(0.0), is_nonnegative(-0.1)
    (True, False)
    """
    return 0 <= value < float("inf")

"""Packages that only some functions need."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def required(module: str, purpose: str, *install: str, instead: str | None = None) -> Any:
    """Import a module, or say what needs it and how to install it.

    Parameters
    ----------
    module : str
        Its full name.
    purpose : str
        What needs it, a subject in the plural.
    *install : str
        What ``pip install`` takes, each of which is enough.
    instead : str, optional
        What to do without the module.

    Returns
    -------
    module

    Raises
    ------
    ModuleNotFoundError
        If it cannot be imported.

    Examples
    --------
    >>> required("no_such_package", "figures in colour", "no-such-package", "'convexformer[colour]'")
    Traceback (most recent call last):
    ModuleNotFoundError: figures in colour need no_such_package: pip install no-such-package, or pip install \
'convexformer[colour]'
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        ways = ", or ".join(f"pip install {name}" for name in install) + (f"; or {instead}" if instead else "")
        raise ModuleNotFoundError(f"{purpose} need {package}: {ways}", name=package) from error

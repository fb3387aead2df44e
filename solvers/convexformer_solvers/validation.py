"""Validation of arguments; every error names the argument, what is wrong and what would be right."""

from __future__ import annotations

import inspect
import sys
import warnings
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


def as_dtype(dtype: Any, default: torch.dtype | None = None) -> torch.dtype:
    """The precision of a name or a type; ``ValueError`` if it is none, as None is without a default."""
    if dtype is None and default is not None:
        return default
    try:
        return PRECISIONS[dtype_name(dtype)]
    except (TypeError, ValueError, KeyError) as error:
        none = "" if default is None else "None, "
        raise ValueError(f"dtype must be {none}'float32' or 'float64', as a name or a type, got {dtype!r}") from error


def check_device(device: Any, default: torch.device) -> torch.device:
    """The device that the parameter ``device`` means; asking for an absent one is an error."""
    if device is None:
        return default
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"device must be None or the name of a torch device such as 'cpu' or 'cuda', got {device!r}"
        ) from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={device!r} was asked for, but this torch finds no CUDA device. Use device='cpu', or install "
            "a CUDA build of torch on a machine with an NVIDIA GPU."
        )
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        found = ", ".join(f"'cuda:{index}'" for index in range(torch.cuda.device_count()))
        raise ValueError(f"device={device!r} was asked for, but the CUDA devices here are {found}")
    if resolved.type == "meta":
        raise ValueError(f"device must be one that holds numbers, such as 'cpu' or 'cuda', got {device!r}")
    try:
        torch.empty(0, dtype=torch.float64, device=resolved)
    except (RuntimeError, TypeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]  # the rest of it may be pages
        raise ValueError(
            "device must be one on which torch holds float64, which certificates need, such as 'cpu' or 'cuda', "
            f"got {device!r}: {reason}"
        ) from error
    return resolved


def dtype_name(dtype: Any) -> str:
    """Name of a precision given as text or as a type of torch or numpy; ``TypeError`` where it is none of them."""
    if dtype is None:
        raise TypeError("None, which numpy takes for float64, is no precision")
    return str(dtype).removeprefix("torch.") if isinstance(dtype, (str, torch.dtype)) else np.dtype(dtype).name


def is_real(value: Any) -> bool:
    """Whether an argument is a real number that a float can be, which True, False and huge integers are not."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def check_counts(**counts: Any) -> None:
    """Raise ``ValueError`` naming the first argument that is no positive integer."""
    for name, value in counts.items():
        if isinstance(value, bool) or not (isinstance(value, Integral) and int(value) >= 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if int(value) > sys.maxsize:  # of which numpy and torch would not say whose size it is
            raise ValueError(f"{name} must be at most {sys.maxsize}, got {value!r}")


def check_callback(callback: Any, argument: str) -> None:
    """Raise ``TypeError`` unless a callback is None or can be called with such an argument."""
    if not (callback is None or callable(callback)):
        raise TypeError(f"callback must be None or callable with {argument}, got {callback!r}")


def says_stop(callback: Any, *arguments: Any) -> bool:
    """Whether a callback, if there is one, ends what calls it; ``TypeError`` if its answer is neither true nor false.

    Examples
    --------
    >>> says_stop(None, 3), says_stop(lambda step: step > 2, 3)
    (False, True)
    """
    answer = None if callback is None else callback(*arguments)
    try:
        return bool(answer)
    except (TypeError, ValueError, RuntimeError) as error:  # of arrays, data frames and tensors
        raise TypeError(f"callback must return True, False or None, got {type(answer).__name__}: {error}") from error


def check_tensor(name: str, value: Any) -> None:
    """Raise ``TypeError`` unless the argument of that name is a tensor."""
    if not isinstance(value, Tensor):
        got = f"{type(value).__name__}; torch.as_tensor({name}) makes one of an array"
        raise TypeError(f"{name} must be a torch tensor, got {got}")


def shown(value: Any) -> str:
    """What messages call a value; of a class not of Python also what makes an object of it, as that is often meant."""
    if not isinstance(value, type):
        return repr(value)
    return f"the class {value.__name__}" + f"; is {value.__name__}() meant?" * (value.__module__ != "builtins")


def check_kind(name: str, value: Any, kind: type, example: str) -> None:
    """Raise ``TypeError`` unless the argument of that name is an object of that class."""
    if not isinstance(value, kind):
        got = shown(value)
        got = type(value).__name__ if "\n" in got else got  # as that of a tensor, which may fill pages
        raise TypeError(f"{name} must be a {kind.__name__}, as {example} makes one, got {got}")


def take_former_names(cls: type, **names: str) -> None:
    """Set the attributes of a user's class that it defines under their former names; former name to present one."""
    for former, present in names.items():
        if former in vars(cls):
            setattr(cls, present, vars(cls)[former])


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line outside of these packages that led here, through decorators and other estimators as well."""
    frame, level = inspect.currentframe(), 1
    own = ("convexformer", "convexformer_solvers")
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in own:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)

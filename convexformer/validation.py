"""Checks of what users pass to estimators; every message names the argument."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sized
from contextlib import contextmanager
from math import inf, isqrt
from numbers import Integral, Real
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import issparse
from sklearn import get_config
from sklearn.utils import check_array, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import assert_all_finite, validate_data
from torch import Tensor

from convexformer_solvers import LinearMap, Loss
from convexformer_solvers.validation import PRECISIONS, check_counts, is_real
from convexformer_solvers.validation import check_device as check_device

FLOATS = (np.float64, np.float32, np.float16)  # that scikit-learn's checks leave as they are
HALF = (torch.float16, torch.bfloat16)


def keeps_tensors(X: Any) -> bool:
    """Whether results for ``X`` are to be torch tensors: array-API dispatch is on and ``X`` is one."""
    return torch.is_tensor(X) and bool(get_config()["array_api_dispatch"])


def check_tokens(estimator: Any, X: Any, reset: bool) -> Tensor:
    """Check samples and return them as a tensor of tokens.

    Parameters
    ----------
    estimator : estimator
        Its ``n_features_in_`` and ``n_tokens_in_`` are set when `reset`, and compared otherwise.
    X : array-like of shape (N, n_tokens, n_features) or (N, n_tokens)
        Two-dimensional ``X`` is read as tokens of width 1.
    reset : bool
        Whether this is a fit.

    Returns
    -------
    Tensor of shape (N, n_tokens, n_features)
        In the floating dtype of ``X``, float32 for half precision, float64 for integers and for
        ``numpy.longdouble``; shares the memory of ``X`` where possible.

    Raises
    ------
    ValueError
        If ``X`` is ragged, not finite, of wrong dimension, or differs in shape from the data of the fit.
    """
    if reset:
        forget_names(estimator)
    if torch.is_tensor(X):
        check_strided(X, "X")
        X = as_floats(X.detach())  # before numpy, which has no bfloat16
    if not (keeps_tensors(X) or (torch.is_tensor(X) and X.device.type != "cpu")):  # not to the CPU and back
        X = without_tensor(X, "X")
    if not hasattr(X, "shape") and not hasattr(X, "__array__"):
        X = _as_array(X)
    X = _unpacked(X)
    if not reset and estimator._n_dims == 2 and getattr(X, "ndim", 2) == 3 and X.shape[2] == 1:
        X = X[:, :, 0]  # columns in the fit, as tokens of width 1 in a file are
    if torch.is_tensor(X):
        return _check_tensor(estimator, X, reset)
    refuse_dates(X, "X")
    n_dims = getattr(X, "ndim", 2)
    if n_dims > 3:
        raise ValueError(f"X must have 2 or 3 dimensions (samples, tokens[, features]), got {n_dims}")
    if n_dims == 3 and len(X):  # scikit-learn tells of no samples
        check_not_empty("X", X.shape)
    if n_dims < 3 and not reset and estimator._n_dims == 3:
        check_shape(estimator, np.shape(X), reset)
    with naming("X"):
        if n_dims == 3:
            array = check_array(X, allow_nd=True, dtype=FLOATS, estimator=estimator, input_name="X")
        else:
            array = validate_data(estimator, X, dtype=FLOATS, reset=reset)
    check_shape(estimator, array.shape, reset)
    return as_floats(as_tokens(array))


def refuse_dates(values: Any, name: str) -> None:
    """Raise ``ValueError`` where an argument holds dates or durations, which numpy converts to integers."""
    own = getattr(values, "dtype", getattr(values, "type", None))  # the second of pyarrow, as are the next
    columns = getattr(getattr(values, "schema", None), "types", ())
    kinds = [own] if own is not None else list(getattr(values, "dtypes", columns))  # one of each column
    dates = sorted({str(kind) for kind in kinds if _is_date(kind)})
    if dates:
        raise ValueError(
            f"{name} must hold numbers, got {', '.join(dates)}; convert them first, for example to numbers of days"
        )


def _is_date(kind: Any) -> bool:
    """Whether a dtype is of dates, times or durations; those of polars and pyarrow say so in their names alone."""
    names = ("date", "time", "duration")  # timestamps as well
    return getattr(kind, "kind", None) in ("m", "M") or str(kind).lower().startswith(names)


def refuse_masked(values: Any, name: str) -> None:
    """Raise ``ValueError`` where an argument, or an array of a list of them, has a mask that numpy would drop."""
    arrays = values if isinstance(values, (list, tuple)) else [values]
    if any(np.ma.is_masked(array) for array in arrays):
        raise ValueError(f"{name} must have no masked values; leave them out, or fill them in first")


def _refuse_sparse(values: Any, name: str) -> None:
    if issparse(values):
        raise ValueError(f"{name} must be a dense matrix, got a sparse one; give {name}.toarray()")


def without_tensor(values: Any, name: str) -> Any:
    """A tensor as an array; anything else as it is, unless it has a mask that numpy would drop."""
    if not torch.is_tensor(values):
        refuse_masked(values, name)
        return values
    check_strided(values, name)
    try:
        return values.numpy(force=True)
    except TypeError as error:
        dtype = str(values.dtype).removeprefix("torch.")
        raise ValueError(f"{name} must not be {dtype}, which numpy does not have; give {name}.float()") from error


def check_strided(values: Tensor, name: str) -> None:
    """Raise ``ValueError`` naming a tensor that is nested or sparse."""
    if values.is_nested:
        raise ValueError(
            f"{name} must not be a nested tensor; pad it, as with torch.nested.to_padded_tensor({name}, 0.0)"
        )
    if values.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got one of {values.layout}; give {name}.to_dense()")


def _as_array(X: Any) -> Any:
    refuse_masked(X, "X")  # of objects that an array held, too
    try:
        return np.asarray(X)
    except ValueError as error:
        _refuse_pair(X, "X")
        widths = _widths(X)
        if len(widths) > 1:
            raise ValueError(f"X is ragged: its samples differ in the width of tokens, {sorted(widths)}.") from error
        raise ValueError(
            "X is ragged: its samples differ in length. Pad them with convexformer.pad_sequences(X) first."
        ) from error
    except (TypeError, RuntimeError) as error:
        raise _refused_by_numpy("X", error) from error


def _refused_by_numpy(name: str, error: Exception) -> ValueError:
    """What to raise where numpy does not take tensors in a list, for their precision or their gradients."""
    return ValueError(
        f"{name} must hold numbers that numpy has; of a list of tensors give torch.stack({name}): {error}"
    )


def _refuse_pair(X: Any, name: str) -> None:
    """Raise ``ValueError`` for tokens in a pair with lengths or a mask."""
    if isinstance(X, tuple) and [getattr(part, "ndim", None) for part in X] in ([3, 1], [3, 2]):
        raise ValueError(
            f"{name} must be one array, got a pair of tokens and lengths or a mask, which only probes take; set tokens "
            f"that are not real to zero and give {name}[0]"
        )


def _widths(samples: Any) -> set[tuple[int, ...]]:
    """Shapes of a token, where each sample is an array by itself and all are of one length."""
    try:
        shapes = {np.shape(sample) for sample in samples}
    except ValueError:
        return set()
    return {shape[1:] for shape in shapes} if len({shape[:1] for shape in shapes}) == 1 else set()


def _unpacked(X: Any) -> Any:
    """An array or a pandas series of objects, some of which are sequences, as one array; anything else as it is."""
    if getattr(getattr(X, "dtype", None), "kind", None) != "O":
        return X
    array = np.asarray(X)
    holds = any(isinstance(item, Sized) and not isinstance(item, (str, bytes, dict)) for item in array.flat)
    return _as_array(array.tolist()) if holds else X


def _check_tensor(estimator: Any, X: Tensor, reset: bool) -> Tensor:
    if X.ndim not in (2, 3):
        raise ValueError(f"X must have 2 or 3 dimensions (samples, tokens[, features]), got {X.ndim}")
    if X.is_complex():
        raise ValueError(f"X must hold real numbers, got {X.dtype}")
    check_not_empty("X", X.shape)
    if not all_finite(X):
        raise ValueError("Input X contains NaN or infinity.")
    check_shape(estimator, tuple(X.shape), reset)
    return as_tokens(X)


def check_not_empty(name: str, shape: tuple[int, ...]) -> None:
    """Raise ``ValueError`` where samples have a dimension of zero."""
    if 0 in shape:
        raise ValueError(f"{name} must have at least one sample, token and feature, got shape {tuple(shape)}")


def forget_names(estimator: Any) -> None:
    """Leave out the names of columns of the fit before; scikit-learn sets those of a data frame."""
    vars(estimator).pop("feature_names_in_", None)


def check_shape(estimator: Any, shape: tuple[int, ...], reset: bool) -> None:
    """Record or compare the shape of a sample; ``n_features_in_`` of 2-D data is what scikit-learn defines."""
    if reset:
        estimator.n_features_in_, estimator.n_tokens_in_, estimator._n_dims = shape[-1], shape[1], len(shape)
        return
    fitted = (estimator._n_dims, estimator.n_tokens_in_, estimator.n_features_in_)
    if len(shape) < 2 or (len(shape), shape[1], shape[-1]) != fitted:
        wanted = f"(n_samples, {fitted[1]}, {fitted[2]})" if fitted[0] == 3 else f"(n_samples, {fitted[1]})"
        raise ValueError(f"X must have shape {wanted} as in fit, got {shape}")


def as_tensor(
    array: Any, device: torch.device | None = None, dtype: torch.dtype | None = None, name: str = "arrays"
) -> Tensor:
    """A tensor that shares the memory of a numpy array where possible, be the array read-only or reversed.

    Lists become what numpy makes of them, float64; torch would round them to float32. `name` is that of the argument.
    """
    if isinstance(array, torch.Tensor):
        check_strided(array, name)
    else:
        refuse_masked(array, name)
        _refuse_sparse(array, name)
        try:
            array = np.asarray(array)
        except ValueError as error:  # of sequences of several lengths
            _refuse_pair(array, name)
            raise ValueError(f"{name} must be an array of numbers: {error}") from error
        except (TypeError, RuntimeError) as error:
            raise _refused_by_numpy(name, error) from error
    if isinstance(array, np.ndarray):
        refuse_dates(array, name)
        if array.dtype.kind == "c" or (array.dtype.kind == "f" and array.dtype.itemsize > 8):
            raise ValueError(f"{name} must hold real numbers of at most 64 bits, got {array.dtype}")
        if array.dtype.kind in "OUS":
            try:
                array = array.astype(np.float64)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name} must hold numbers: {error}") from error
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        if min(array.strides, default=0) < 0:
            array = array.copy()  # torch has no negative strides
        if array.__array_interface__["data"][1]:  # read-only, of which torch warns; nothing ever writes to data
            array = np.asarray(_Writable(array))
        array = torch.from_numpy(array)
    return array.to(device=device, dtype=dtype)


class _Writable:
    """The memory of a read-only array, which numpy takes for one to write to."""

    def __init__(self, array: NDArray) -> None:
        interface = array.__array_interface__
        self._array = array  # whose memory it keeps
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}


def all_finite(values: Tensor) -> bool:
    """Whether all is finite; a sum that is says so without the copies that a look at each number takes."""
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def check_finite(name: str, values: Tensor) -> None:
    """Raise ``ValueError`` unless all numbers of the argument of that name are finite."""
    if not all_finite(values):
        raise ValueError(f"{name} must be finite, got NaN or infinite values")


def check_real(name: str, array: NDArray) -> None:
    """Raise ``ValueError`` unless the array of that name holds floats, integers or booleans."""
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name} must hold real numbers, got {array.dtype}")


def mask_of(real: Any, n_samples: int, n_tokens: int, device: torch.device, name: str = "X") -> Tensor:
    """The mask ``(N, n)`` of samples in one array, from their lengths or a mask."""
    given = as_tensor(real, device, name=f"{name}[1]")
    integers = not given.is_floating_point() and not given.is_complex() and given.dtype != torch.bool
    marks = given.long() if integers else given  # torch compares no unsigned integers of more than 8 bits
    of_tokens = given.shape == (n_samples, n_tokens)
    if of_tokens and (given.dtype == torch.bool or (integers and bool((marks == marks.bool()).all()))):
        return marks.bool()
    if not integers or given.shape != (n_samples,):
        raise ValueError(
            f"{name}[1] must be lengths, integers of shape ({n_samples},), or a mask of bool of shape "
            f"{(n_samples, n_tokens)} or of integers 0 and 1, got {given.dtype} of shape {tuple(given.shape)}"
        )
    wrong = marks[(marks < 0) | (marks > n_tokens)]
    if len(wrong):
        raise ValueError(
            f"{name}[1] must hold lengths from 1 to {n_tokens}, the tokens of {name}[0], got {int(wrong[0])}"
        )
    return torch.arange(n_tokens, device=device) < marks[:, None]


def as_tokens(X: Any) -> Tensor:
    """Samples as a tensor; two-dimensional ones are tokens of width 1."""
    tokens = as_tensor(_unpacked(X), name="X")
    return tokens[:, :, None] if tokens.ndim == 2 else tokens


def as_floats(tokens: Tensor) -> Tensor:
    """Half precision as float32, integers and booleans as float64, as in a fit; anything else as it is."""
    if tokens.dtype in HALF:  # float32 represents it exactly
        return tokens.float()
    return tokens if tokens.dtype in PRECISIONS.values() or tokens.is_complex() else tokens.double()


def check_program_tokens(X: Any, sizes: tuple[int, int] | None = None) -> Tensor:
    """Samples as a tensor of finite floats, shape (N, n, d), from such or from shape (N, n).

    `sizes` are ``(n, d)`` where they must be those of a network.
    """
    tokens = as_floats(as_tokens(X))
    tokens = tokens.detach() if tokens.requires_grad else tokens
    if tokens.ndim != 3 or tokens.dtype not in PRECISIONS.values() or 0 in tokens.shape:
        raise ValueError(
            "X must hold real numbers, of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens) with at "
            f"least one of each, got {tokens.dtype} of shape {tuple(tokens.shape)}"
        )
    check_finite("X", tokens)
    if sizes is not None and tokens.shape[1:] != sizes:
        raise ValueError(f"X must have shape (n_samples, n_tokens, n_features) with {sizes}, got {tuple(tokens.shape)}")
    return tokens


def as_targets(y: Any, device: torch.device) -> Tensor:
    """Targets as the loss wants them, shape (N, c), from such or from shape (N,)."""
    target = as_tensor(y, device, torch.float64, "y").detach()
    if target.ndim not in (1, 2):
        raise ValueError(f"y must have shape (n_samples,) or (n_samples, n_outputs), got {tuple(target.shape)}")
    return target[:, None] if target.ndim == 1 else target


def as_weight(sample_weight: Any, device: torch.device) -> Tensor | None:
    """Weights of the samples as a program takes them."""
    if sample_weight is None:
        return None
    return as_tensor(sample_weight, device, torch.float64, "sample_weight").detach()


def as_head_weights(**parts: Any) -> dict[str, NDArray[np.floating]]:
    """Weights of heads as finite arrays of one floating precision, copies that torch takes."""
    arrays = {name: np.asarray(without_tensor(part, name)) for name, part in parts.items()}
    for name, array in arrays.items():
        check_real(name, array)
        if not np.isfinite(array).all():
            raise ValueError(f"{name} must be finite, got NaN or infinite values")
    dtype = np.result_type(np.float32, *arrays.values())
    return {name: array.astype(dtype, order="C") for name, array in arrays.items()}


def check_real_target(y: Any, loss: Loss, n_samples: int, classifier: str) -> NDArray[np.float64]:
    """Check targets of a regression: finite numbers of shape (N,) or (N, c); `classifier` is for labels."""
    y = check_number_target(y)
    if y.ndim not in (1, 2):
        hint = "; ConvexSequenceRegressor fits sequences of targets" if y.ndim == 3 else ""
        raise ValueError(f"y must have shape (n_samples,) or (n_samples, n_outputs), got {y.shape}{hint}")
    check_rows(y, n_samples)
    if loss.targets != "real" and not (loss.targets == "simplex" and y.ndim == 2):
        of_rows = ", or rows of class probabilities" if loss.targets == "simplex" else ""
        raise ValueError(f"loss={loss!r} needs class labels; use {classifier}{of_rows}")
    return y


def check_number_target(y: Any) -> NDArray[np.float64]:
    """Targets as finite numbers, of any shape."""
    y = given(y)
    refuse_dates(y, "y")
    if isinstance(y, Real) or getattr(y, "ndim", 1) == 0:
        raise ValueError(f"y must have one row per sample, got the single value {y!r}")
    with naming("y", "; labels are for the classifiers"):
        return check_array(
            y,
            ensure_2d=False,
            allow_nd=True,
            dtype=np.float64,
            ensure_min_features=0,  # one too few of y would be called one of X
            input_name="y",
        )


def given(y: Any) -> Any:
    """Targets that are there, a tensor as an array."""
    if y is None:
        raise ValueError("this estimator requires y to be passed, but the target y is None")
    return without_tensor(y, "y")


def _mixes_text(labels: Iterable[Any]) -> bool:
    return len({isinstance(label, str) for label in labels}) > 1


_SEVERAL = "several labels per sample are a matrix of 0 and 1, and one label has shape (n_samples,)"


def check_label_target(y: Any) -> NDArray:
    """Check targets of a classification: one label per sample."""
    mixed = isinstance(y, (list, tuple)) and _mixes_text(y)  # an array of these makes all of them text
    with naming("y", f"; {_SEVERAL}"):
        y = column_or_1d(given(y), warn=True)
    if y.dtype.hasobject and any(isinstance(label, (list, tuple, set, np.ndarray)) for label in y):
        raise ValueError(f"y must hold one label in each cell, got sequences; {_SEVERAL}")
    if y.dtype.kind == "T":
        raise ValueError(f"y must hold text of a dtype that scikit-learn has, got {y.dtype}; give y.astype(object)")
    if y.dtype.kind in "mM" and np.isnat(y).any():
        raise ValueError("y must have a label for each sample, got missing dates (NaT)")
    if y.dtype.hasobject and any(label is None for label in y):
        raise ValueError("y must have a label for each sample, got None")
    try:
        with naming("y"):
            assert_all_finite(y, input_name="y")
    except TypeError as error:  # NA of pandas is neither equal to itself nor not
        raise ValueError("y must have a label for each sample, got missing values (NA)") from error
    if mixed or (y.dtype.hasobject and _mixes_text(y)):
        raise ValueError("y must hold labels of one kind, got text and other labels together; make all of them text")
    check_classification_targets(y)
    return y


def has_columns(y: Any) -> bool:
    """Whether targets are a matrix of two or more columns."""
    try:
        shape = np.shape(y)
    except (TypeError, ValueError, RuntimeError):  # of lists of several lengths
        return False
    return len(shape) == 2 and shape[1] > 1


def check_indicators(y: Any) -> NDArray[np.float64]:
    """Check several labels per sample: a matrix of 0 and 1."""
    y = given(y)
    _refuse_sparse(y, "y")
    refuse_dates(y, "y")
    with naming("y", f"; {_SEVERAL}"):
        y = check_array(y, dtype=np.float64, input_name="y")
    others = y[(y != 0) & (y != 1)]
    if others.size:
        raise ValueError(f"y of shape {y.shape} must hold 0 and 1 alone, got {np.unique(others)[:5]}; {_SEVERAL}")
    return y


def without_objects(y: Any) -> Any:
    """Several labels per sample of which numpy makes objects, as those of a data frame of mixed columns, as integers.

    scikit-learn's scores take no such matrix. Anything else is as it is.

    Examples
    --------
    >>> without_objects(np.array([[True, 0], [False, 1]], dtype=object))
    array([[1, 0],
           [0, 1]])
    """
    return check_indicators(y).astype(int) if has_columns(y) and np.asarray(y).dtype.hasobject else y


def check_rows(y: NDArray, n_samples: int) -> None:
    """Raise ``ValueError`` unless there is a row of targets, with something in it, for each sample."""
    if len(y) != n_samples:
        raise ValueError(f"y must have one row per sample, {n_samples} as X, got {len(y)}")
    if y.size == 0:
        raise ValueError(f"y must have at least one output, got shape {y.shape}")


def check_weight(sample_weight: Any, n_samples: int) -> NDArray[np.float64] | None:
    """Check weights: one finite non-negative number per sample, not all zero; returned with a largest of 1.

    Only ratios matter, and sums of huge weights would overflow.
    """
    if sample_weight is None:
        return None
    if isinstance(sample_weight, str):
        raise ValueError(
            f"sample_weight must hold a number per sample, got {sample_weight!r}; class_weight takes names"
        )
    if isinstance(sample_weight, Real):
        raise ValueError(f"sample_weight must have shape ({n_samples},), got the single value {sample_weight!r}")
    weight = without_tensor(sample_weight, "sample_weight")
    refuse_dates(weight, "sample_weight")
    with naming("sample_weight"):
        weight = check_array(weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight")
    if weight.shape != (n_samples,):
        raise ValueError(f"sample_weight must have shape ({n_samples},), got {weight.shape}")
    if (weight < 0).any():
        raise ValueError(f"sample_weight must be non-negative, got {weight.min()}")
    if not weight.any():
        raise ValueError("sample_weight must not be all zero: every weight is zero")
    return weight / weight.max()


def check_stream(random_state: Any) -> np.random.RandomState:
    """The generator that the parameter ``random_state`` means."""
    try:
        return check_random_state(random_state)
    except ValueError as error:
        raise ValueError(
            "random_state must be None, an integer from 0 to 4294967295 or a numpy.random.RandomState, "
            f"got {random_state!r}"
        ) from error


# What is said in place of a message that begins like a pattern, whose dot is no line feed: the first that does.
_SAID = {
    ".*setting an array element with a sequence": "{name} must hold one number in each cell, got sequences{cells}",
    ".*Complex data not supported": "Complex data not supported: {name} must hold real numbers",
    "Input contains NaN": "Input {name} contains NaN",
    # of None, too; there is nothing to reshape
    "Expected 2D array, got scalar": "{name} must be an array or a list of samples, got a single value or None",
    r"Expected 2D array(?s:.*)array=\[\]": "{name} must have at least one sample, got none",
    "Found array with|Expected 2D array": "{name}: {error}",
    ".*could not convert": "{name} must hold numbers{hint}: {text}",
}


@contextmanager
def naming(name: str, hint: str = "") -> Iterator[None]:
    """Say which argument holds what is no real number: text, sequences in the cells of a data frame, nothing."""
    try:
        yield
    except ValueError as error:
        said = next((said for pattern, said in _SAID.items() if re.match(pattern, str(error))), None)
        if said is None:
            raise
        text, tokens = str(error).partition("\n")[0], "an array of shape (n_samples, n_tokens, n_features)"
        cells = f"; tokens of several features are {tokens}" if name == "X" else hint
        raise ValueError(said.format(name=name, hint=hint, error=error, text=text, cells=cells)) from error
    except OverflowError as error:
        raise ValueError(f"{name} must hold numbers that float64 has: {error}") from error
    except TypeError as error:
        if "float() argument" not in str(error) and "Cannot cast" not in str(error):  # the second of arrays of records
            raise
        raise TypeError(f"{name} must hold numbers{hint}: {error}") from error


def check_flag(value: Any, name: str) -> bool:
    """A parameter that is True or False, or one of the numbers that equal them; text is neither."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, (int, np.integer)) and value in (0, 1)):
        return bool(value)
    raise ValueError(f"{name} must be True or False, got {value!r}")


# An array, or a tensor under array-API dispatch, for which Any stands so that callers need not tell them apart.
Result: TypeAlias = NDArray[np.floating] | Any


def result_of(tensor: Tensor, like: Any) -> Result:
    """A result as the user wants it: a tensor on the device of a kept tensor, else a numpy array."""
    return tensor.to(like.device) if keeps_tensors(like) else tensor.numpy(force=True)


def predictions(linear_map: LinearMap, coef: Tensor, intercept: Tensor, dtype: torch.dtype) -> Tensor:
    """Outputs ``(N, c)``, computed in the higher precision of data and coefficients and returned in ``dtype``."""
    working = torch.promote_types(linear_map.dtype, coef.dtype)
    return (linear_map.matvec(coef.to(working)) + intercept.to(working)).to(dtype)


def is_integer(value: Any, least: int | None = None) -> TypeGuard[int]:
    """Whether a value is an integer, of numpy or Python and no truth value, and not below `least`.

    Examples
    --------
    >>> is_integer(-3), is_integer(0, least=1), is_integer(2.0), is_integer(True)
    (True, False, False, False)
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return whole and (least is None or int(value) >= least)


def check_integers(least: int, **numbers: Any) -> None:
    """Raise ``ValueError`` naming the first argument that is no integer of at least `least`.

    Examples
    --------
    >>> check_integers(2, n_layers=2)
    """
    for name, value in numbers.items():
        if not is_integer(value, least):
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def is_one_of(value: Any, choices: Collection[str]) -> TypeGuard[str]:
    """Whether a value is one of some words; a list or an array is none, which ``in`` may not be asked.

    Examples
    --------
    >>> is_one_of("mean", ("mean", "last")), is_one_of(np.array(["mean", "last"]), ("mean", "last"))
    (True, False)
    """
    return isinstance(value, str) and value in choices


def check_one_of(choices: Collection[str], **words: Any) -> None:
    """Raise ``ValueError`` naming the first argument that is none of some words.

    Examples
    --------
    >>> check_one_of(("mean", "last"), readout="mean")
    """
    for name, value in words.items():
        if not is_one_of(value, choices):
            raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def check_optional_counts(**counts: Any) -> None:
    """Raise ``ValueError`` naming the first argument that is neither a positive integer nor ``None``.

    Examples
    --------
    >>> check_optional_counts(n_sentences=None)
    """
    for name, value in counts.items():
        if value is not None and not is_integer(value, 1):
            raise ValueError(f"{name} must be a positive integer or None, got {value!r}")
        if value is not None:
            check_counts(**{name: value})


def check_positive(**numbers: Any) -> None:
    """Raise ``ValueError`` naming the first argument that is no positive finite number.

    Examples
    --------
    >>> check_positive(step=0.5)
    """
    for name, value in numbers.items():
        if not (is_real(value) and 0 < value < inf):
            raise ValueError(f"{name} must be a positive finite number, got {value!r}")


def is_prime(p: int) -> bool:
    """Whether a number is prime.

    Examples
    --------
    >>> [p for p in range(16) if is_prime(p)]
    [2, 3, 5, 7, 11, 13]
    """
    return p > 1 and all(p % divisor for divisor in range(2, isqrt(p) + 1))

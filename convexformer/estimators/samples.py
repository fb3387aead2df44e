"""Samples that estimators are given otherwise than as one array: on a disk, and spread over the ranks of a group."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from convexformer.memory import limit_of
from convexformer.programs.build import attention_map
from convexformer.programs.samples import samples_of_source
from convexformer.storage import Source, open_source
from convexformer.storage.opening import array_of, would_be_shard
from convexformer.validation import (
    check_device,
    check_shape,
    check_tokens,
    check_weight,
    forget_names,
    keeps_tensors,
    without_tensor,
)
from convexformer_solvers import LinearMap
from convexformer_solvers.distributed import RankError, Ranks, on_all_ranks, ranks
from convexformer_solvers.distributed.ranks import named, packed, plain
from convexformer_solvers.memory import as_bytes

_Method = TypeVar("_Method", bound=Callable[..., Any])
_PER_SAMPLE = ("y", "sample_weight", "groups")  # a score has predictions in place of the last


def read_samples(estimator: Any, X: Any, reset: bool, part: slice | None = None) -> Tensor | LinearMap:
    """Checked samples: a tensor, or a map of data on a disk for whose copies the memory limit has no room.

    They are what ``fit``, with `reset`, or ``predict`` was given, a map that has been made of it, or a `part` of what
    is at a path. Errors are those of ``check_tokens`` and ``open_source``.
    """
    if isinstance(X, LinearMap):  # read before, by this fit
        return X
    if reset:
        as_bytes(estimator.memory_limit)  # also where nothing is read
    source = open_source(X)
    if source is None:
        return check_tokens(estimator, X, reset)
    if reset:
        forget_names(estimator)
    is_array = isinstance(X, np.memmap)
    shape = X.shape if is_array else source.shape
    if len(shape) == 3 and shape[2] == 1 and (not is_array if reset else estimator._n_dims == 2):
        shape = shape[:2]  # tokens of width 1 in a file are columns
    check_shape(estimator, shape, reset)
    device = check_device(estimator.device, torch.device("cpu"))
    limit = limit_of(estimator.memory_limit, device)
    return samples_of_source(X, source, limit, device, estimator._n_copies, part)


def across_ranks(method: _Method) -> _Method:
    """Decorator of a method that fits to samples ``X``: under ``torchrun`` it takes the samples of all ranks.

    Of its arguments `y`, `sample_weight` and `groups`, if it has them, each rank gives those of its samples. Rank 0
    runs the method on the samples of all ranks, and the other ranks compute for it with their own. All ranks end with
    the same attributes and return value.
    """
    signature = inspect.signature(method)

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            call = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}.{method.__name__}(): {error}") from None
        group, given = ranks(), call.arguments
        if group is None:
            _check_no_shard(self, given)
            given.update({name: array_of(given[name], name) for name in _PER_SAMPLE if name in given})
            return method(*call.args, **call.kwargs)
        X, share = _own_samples(group, self, given["X"], reset=True)

        def read() -> tuple[Any, dict[str, Any]]:
            _check_no_shard(self, given)
            return _read(self, X, reset=True), _described(self, method, given)

        local, described = _in_turn(group, read)
        _check_alike(group.all(described))
        joined = _joined_samples(group, [given.get(name) for name in _PER_SAMPLE], share, len(local))
        interrupts: list[KeyboardInterrupt] = []  # what rank 0 has of it, with the solution

        def work(samples: Any) -> tuple[Any, dict[str, Any], set[str]]:
            whole = dict(zip(_PER_SAMPLE, cast(list[Any], joined), strict=True), X=samples)
            given.update({name: values for name, values in whole.items() if name in given})
            before = dict(vars(self))
            try:
                result = method(*call.args, **call.kwargs)
            except KeyboardInterrupt as error:
                interrupts.append(error)
                result = KeyboardInterrupt(str(error))
            state = vars(self)
            changed = {name: value for name, value in state.items() if name not in before or before[name] is not value}
            return None if result is self else result, changed, before.keys() - state.keys()

        result, state, deleted = on_all_ranks(local, work, group, self._of_all_ranks)
        vars(self).update(state)
        for name in deleted:
            vars(self).pop(name, None)
        if isinstance(result, KeyboardInterrupt):
            raise interrupts[0] if interrupts else result
        return self if result is None else result

    return cast(_Method, wrapped)


def _check_no_shard(estimator: Any, arguments: dict[str, Any]) -> None:
    """Raise ``ValueError`` where what `resume` keeps, a file or those of folds, would be read among the samples."""
    resume = arguments.get("resume", getattr(estimator, "resume", None))
    if not isinstance(resume, (str, os.PathLike)):
        return
    files = Path(resume), Path(resume, "fold_0.npz")
    for path in (_path_of(arguments.get(name)) for name in ("X", *_PER_SAMPLE)):
        if path is not None and any(would_be_shard(file, Path(path)) for file in files):
            raise ValueError(
                f"resume={os.fspath(resume)!r} would be read as one of the shards of {path!r}; give a path in another "
                "folder"
            )


def predictions_of_all(
    estimator: Any, X: Any, y: Any, sample_weight: Any, method: str = "predict"
) -> tuple[Any, Any, Any]:
    """Targets, weights and predictions of the samples of all ranks, on all ranks; targets as given in one process.

    Each rank predicts for its part, by a method of that name.
    """
    group, predict = ranks(), getattr(estimator, method)
    if group is None:
        target, weight, pred = array_of(y, "y"), array_of(sample_weight, "sample_weight"), predict(X)
    else:
        X, share = _own_samples(group, estimator, X)
        pred = _in_turn(group, lambda: predict(X))
        target, weight, pred = group.broadcast(_joined_samples(group, [y, sample_weight, pred], share, len(pred)))
    return target, weight if keeps_tensors(weight) else check_weight(weight, len(pred)), pred


class Share(NamedTuple):
    """Which of how many samples at a path are those of a rank."""

    rows: slice
    n_samples: int


def _own_samples(group: Ranks, estimator: Any, X: Any, reset: bool = False) -> tuple[Any, Share | None]:
    """This rank's samples, and which of all they are where all ranks were given the same path."""
    if not _is_shared(group, X):
        return X, None
    return _in_turn(group, lambda: _part_of(estimator, X, group, reset))


def _joined_samples(group: Ranks, per_sample: Sequence[Any], share: Share | None, n_local: int) -> list[Any] | None:
    """Arrays of all ranks' samples, on rank 0; arrays of a part of them may be given whole."""
    arrays = _in_turn(group, lambda: _own(per_sample, share))
    found = group.gather([n_local, *arrays])
    return _in_turn(group, lambda: _joined(found))


def _path_of(X: Any) -> str | None:
    """The path of samples on a disk, also of a pair with lengths or a mask; None of others."""
    given = X[0] if isinstance(X, tuple) and len(X) == 2 else X
    return os.fspath(given) if isinstance(given, (str, os.PathLike)) else None


def _is_shared(group: Ranks, X: Any) -> bool:
    """Whether all ranks were given the same path."""
    path = _path_of(X)
    paths = group.all(None if path is None else os.path.abspath(path))
    return paths[0] is not None and len(set(paths)) == 1


def _part_of(estimator: Any, X: Any, group: Ranks, reset: bool) -> tuple[Any, Share]:
    """This rank's part of the samples at a path, and which of them they are."""
    path = _path_of(X)
    n_samples = cast(Source, open_source(path)).shape[0]
    if n_samples < group.size:
        raise ValueError(f"{path!r} has {n_samples} samples for {group.size} ranks; start fewer ranks")
    part = slice(group.rank * n_samples // group.size, (group.rank + 1) * n_samples // group.size)
    return _read(estimator, X, reset, part), Share(part, n_samples)


def _read(estimator: Any, X: Any, reset: bool, part: slice | None = None) -> Any:
    """Samples, or a part of those at a path, as a container that works on the device of the estimator."""
    samples = estimator._read_samples(X, reset, part)
    samples = attention_map(samples) if torch.is_tensor(samples) else samples
    return samples.to(device=check_device(estimator.device, samples.device))


def _own(per_sample: Sequence[Any], share: Share | None) -> list[Any]:
    """The arrays of this rank's samples; where the ranks share a path, those of all samples may be given."""
    pairs = zip(_PER_SAMPLE, per_sample, strict=True)
    arrays = [None if values is None else _as_array(name, values) for name, values in pairs]
    if share is None:
        return arrays
    return [a[share.rows] if a is not None and len(a) == share.n_samples else a for a in arrays]


def _joined(found: list[list[Any]] | None) -> list[Any] | None:
    """Arrays of all ranks' samples, on rank 0, from the number of samples and the arrays of each."""
    if found is None:
        return None
    counts = [of_rank[0] for of_rank in found]
    by_name = zip(_PER_SAMPLE, zip(*(of_rank[1:] for of_rank in found), strict=True), strict=True)
    return [_concatenated(name, counts, parts) for name, parts in by_name]


def _concatenated(name: str, counts: list[int], parts: Sequence[Any]) -> Any:
    if all(values is None for values in parts):
        return None
    for rank, (count, values) in enumerate(zip(counts, parts, strict=True)):
        if values is None or len(values) != count:
            got = "none" if values is None else str(len(values))
            raise ValueError(
                f"{name} must have one entry for each sample of its rank, got {got} for the {count} samples of rank "
                f"{rank}"
            )
        if values.shape[1:] != parts[0].shape[1:]:
            raise ValueError(
                f"{name} must have entries of the same shape on all ranks, got {parts[0].shape} on rank 0 and "
                f"{values.shape} on rank {rank}"
            )
        if values.dtype.hasobject or parts[0].dtype.hasobject:
            continue
        if (values.dtype.kind in "US") != (parts[0].dtype.kind in "US"):  # numpy would make text of the numbers
            raise ValueError(
                f"{name} must be text on all ranks or on none, got {parts[0].dtype} on rank 0 and {values.dtype} on "
                f"rank {rank}"
            )
    return np.concatenate(parts)


def _as_array(name: str, values: Any) -> Any:
    array = np.asarray(without_tensor(array_of(values, name), name))
    if array.ndim == 0:
        raise ValueError(f"{name} must have one entry for each sample, got the single value {values!r}")
    if array.dtype.hasobject:  # an error in a message would leave the other ranks waiting
        packed(array)
    return array


def _in_turn(group: Ranks, run: Callable[[], Any]) -> Any:
    """What `run` gives; an error on one rank is raised on all."""
    try:
        found, error = run(), None
    except RankError:  # of which the others know
        raise
    except (Exception, KeyboardInterrupt) as failure:  # of any kind, as the others wait for this rank
        found, error = None, failure
    errors = group.all(None if error is None else plain(error))
    for rank, failed in enumerate(errors):
        if failed is not None:
            raise named(rank, failed) from error
    return found


# Parameters that each rank may have its own of.
_OF_RANK = ("callback", "device", "memory_limit", "n_jobs", "resume", "verbose")


def _described(estimator: Any, method: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """What must be the same on all ranks that have it, by name: parameters, the call, and what `X` is like.

    Values other than text and numbers are compared by their ``repr``, in which an address says nothing.
    """
    call = {name: value for name, value in arguments.items() if name not in ("self", "X", *_PER_SAMPLE)}
    call["method"] = method.__name__.removeprefix("_solve_")
    of_call = estimator.get_params(deep=False) | call
    given = {name: value for name, value in of_call.items() if name not in _OF_RANK}
    described = {
        name: value if isinstance(value, (str, int, float, type(None))) else re.sub("0x[0-9a-fA-F]+", "", repr(value))
        for name, value in given.items()
    }
    described |= {"estimator": type(estimator).__name__, "dimensions of X": getattr(estimator, "_n_dims", None)}
    names = getattr(estimator, "feature_names_in_", None)
    return described if names is None else described | {"feature names of X": list(names)}


def _check_alike(of_ranks: list[dict[str, Any]]) -> None:
    """Raise ``ValueError`` where what the ranks have of the same name differs."""
    for name, first in of_ranks[0].items():
        for rank, of_rank in enumerate(of_ranks):
            own = of_rank.get(name, first)
            if own != first and repr(own) != repr(first):  # NaN is not equal to itself
                raise ValueError(
                    f"{name} must be the same on all ranks, got {first!r} on rank 0, {own!r} on rank {rank}"
                )

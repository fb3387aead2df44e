"""A device that stands in for an accelerator: its tensors live on the CPU and refuse what those of a GPU refuse.

They mix with no tensor of the CPU that has a dimension, are not converted to numpy without ``.cpu()``, and what is made
of them stays with them. So code that runs here runs on any device whose kernels exist. Names of an experimental part of
torch are used, which is why a torch without them skips the tests.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

NAME = "stand_in"
_HINT = f"can't convert a tensor of device type {NAME} to numpy; use Tensor.cpu() first"
_ops = torch.ops.aten
# What copies from device to device, and what takes indices from the CPU.
_COPIES = (_ops._to_copy.default, _ops.copy_.default)
_PLAIN = frozenset((bool, int, float, type(None), torch.dtype, torch.device, torch.layout))
_INDEXING = (_ops.index.Tensor, _ops.index_put.default, _ops.index_put_.default, _ops._index_put_impl_.default)


class StandIn(torch.Tensor):
    """A tensor on the device; `inner` is where its numbers are."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        result = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device(NAME, 0),
        )
        result.inner = inner
        return result

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return _run(operation, args, kwargs or {})

    def __getitem__(self, index):
        # Lists would be turned into tensors of the device by kernels that it has not.
        parts = index if isinstance(index, tuple) else (index,)
        return super().__getitem__(tuple(_as_index(part) for part in parts))

    def new_tensor(self, values, *, dtype=None):
        return torch.as_tensor(values, dtype=dtype or self.dtype).to(NAME)

    def tolist(self):
        return self.inner.tolist()

    def numpy(self, *, force=False):
        if not force:
            raise TypeError(_HINT)
        return self.inner.numpy(force=True)

    def __array__(self, *args, **kwargs):
        raise TypeError(_HINT)

    def __repr__(self, **kwargs):
        return f"StandIn({self.inner!r})"


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing is compiled here, and to say so for each operation takes as long as the operation

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return _run(operation, args, kwargs or {})


class Counter:
    """How many operations have given something on the device."""

    n_results = 0


@functools.cache
def _is_composed(operation):
    return operation.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


@functools.cache
def _has_aliases(operation):
    return any(part.alias_info is not None for part in operation._schema.arguments)


def _run(operation, args, kwargs):
    if not _is_composed(operation):
        return _run_kernel(operation, args, kwargs)
    with _Mode():  # in inference mode composed operations come as they are
        return operation.decompose(*args, **kwargs)


def _run_kernel(operation, args, kwargs):
    there, here = [], []

    def inner(tensor):
        if isinstance(tensor, StandIn):
            there.append(tensor)
            return tensor.inner
        if tensor.ndim > 0:
            here.append(tensor)
        return tensor

    inner_args = [_mapped(inner, value) for value in args]
    inner_kwargs = _mapped(inner, kwargs) if kwargs else {}
    on_device = bool(there)
    if operation in _INDEXING:
        on_device = isinstance(args[0], StandIn)
        if there and not on_device:
            raise RuntimeError(f"{operation}: indices of {NAME} into a tensor of the CPU")
    elif operation is _ops.copy_.default:
        on_device = isinstance(args[0], StandIn)
    elif there and here and operation not in _COPIES:
        raise RuntimeError(f"{operation}: expected all tensors to be on the same device")
    if operation not in _COPIES[1:] and kwargs.get("device") is not None:
        on_device = torch.device(kwargs["device"]).type == NAME
        if on_device and kwargs.get("generator") is not None:
            raise RuntimeError(f"{operation}: expected a generator of {NAME}, got one of the CPU")
        inner_kwargs["device"] = torch.device("cpu")
    if on_device and torch.Tag.nondeterministic_seeded in operation.tags:  # it has a generator of its own
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(Counter.n_results)
            result = operation(*inner_args, **inner_kwargs)
    else:
        result = operation(*inner_args, **inner_kwargs)
    if not on_device:
        return result
    Counter.n_results += 1
    result = _mapped(StandIn, result)
    return return_and_correct_aliasing(operation, args, kwargs, result) if _has_aliases(operation) else result


def _as_index(part):
    return torch.as_tensor(part, dtype=None if part else torch.int64) if isinstance(part, list) else part


def _mapped(function, value):
    """The function on all tensors within lists, tuples and dictionaries."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(function, item) for item in value])
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    return value


_register = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
_WITH_GPU = torch.cuda.is_available()  # whose backward passes and pinned memory fail in a process with another device
if _register is not None and not _WITH_GPU:
    # At import, as the first backward pass of a process starts the threads of all devices that there are.
    _register(NAME)


def stand_in():
    """Context in which the device is there."""
    if _WITH_GPU:
        pytest.skip("there is a GPU, which takes its place")
    if _register is None:
        pytest.skip("this torch has no devices written in Python")
    return _Mode()

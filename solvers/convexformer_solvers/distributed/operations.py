"""Operations of torch on values with a row for each sample, of which each rank has the rows of its samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of lists, tuples and dictionaries, and what puts others in their places (quicker than torch's)."""
    leaves: list[Any] = []
    return leaves, _spec(tree, leaves)


def _spec(tree: Any, leaves: list[Any]) -> Any:
    if not isinstance(tree, (tuple, list, dict)):
        leaves.append(tree)
        return None
    keys, values = (tuple(tree), tree.values()) if isinstance(tree, dict) else (None, tree)
    return type(tree), keys, tuple([_spec(value, leaves) for value in values])


def unflatten(leaves: Iterable[Any], spec: Any) -> Any:
    """The tree that ``flatten`` describes, of other leaves."""
    return _built(iter(leaves), spec)


def _built(leaves: Iterator[Any], spec: Any) -> Any:
    if spec is None:
        return next(leaves)
    kind, keys, parts = spec
    values = [_built(leaves, part) for part in parts]
    return kind(values) if keys is None else dict(zip(keys, values, strict=True))


def _named(names: str) -> set[Any]:
    """Operations of torch by their names and overloads."""
    return {attrgetter(name)(_aten) for name in names.split()}


# Letters of the axes in products.
_PRODUCTS = {
    _aten.mm.default: ("ik", "kj"),
    _aten.bmm.default: ("bik", "bkj"),
    _aten.mv.default: ("ik", "k"),
    _aten.dot.default: ("k", "k"),
    _aten.vdot.default: ("k", "k"),
}
# What the results of the ranks are combined by, where these are over the samples.
_REDUCTIONS = dict.fromkeys(_named("sum.default sum.dim_IntList"), "sum")
_REDUCTIONS |= dict.fromkeys(_named("max.default amax.default any.default any.dim"), "max")
_REDUCTIONS |= dict.fromkeys(_named("min.default amin.default all.default all.dim"), "min")
# Operations along axes, none of which may be that of the samples.
_ALONG = _named(
    """
    _log_softmax.default _softmax.default cat.default cumsum.default diagonal.default gather.default
    index_select.default slice.Tensor sort.default split.Tensor split_with_sizes.default squeeze.dim squeeze_.dim
    """
)
# Tensors that take nothing but the precision and device of another.
NEW = _named("new_empty.default new_full.default new_ones.default new_zeros.default")
_VIEWS_OF_SHAPES = _named("view.default _unsafe_view.default")
# Operations whose second argument is a shape.
_SHAPED = _VIEWS_OF_SHAPES | NEW | _named("expand.default")
# Operations that treat all rows alike, besides those of one element after the other.
_ROWWISE = {*_SHAPED, *_ALONG, *_REDUCTIONS} | _named(
    """
    _to_copy.default alias.default argmax.default copy_.default detach.default diag_embed.default empty_like.default
    fill_.Scalar full_like.default linalg_vector_norm.default log_sigmoid_forward.default logsumexp.default
    masked_fill_.Scalar max.dim mean.dim min.dim ones_like.default permute.default select.int stack.default t.default
    transpose.int unbind.int unsqueeze.default zero_.default zeros_like.default
    """
)


def _index(values: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """Indexing by one tensor of one axis alone that has all of the positions; of others nothing."""
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(given) > 1 or given[0][1].ndim != 1:
        return NotImplemented
    ((axis, index),) = given
    length = values.shape[axis]
    if index.dtype in (torch.bool, torch.uint8):
        return values.index_select(axis, index.nonzero()[:, 0]) if len(index) == length else NotImplemented
    if bool(((index < -length) | (index >= length)).any()):
        return NotImplemented
    return values.index_select(axis, index.remainder(length))


def _logsumexp(values: Any, dim: Sequence[int], keepdim: bool = False) -> Any:
    """That over the samples, by the largest and a sum."""
    axis = values.rows.axis
    if [place % values.ndim for place in dim] != [axis]:
        return NotImplemented
    largest = values.amax(axis, keepdim=True)
    largest = torch.where(largest.isfinite(), largest, 0.0)
    found = (values - largest).exp().sum(axis, keepdim=True).log() + largest
    return found if keepdim else found.squeeze(axis)


def _addmm_(result: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    result = result.mul_(beta) if beta else result.zero_()
    return result.add_(left @ right, alpha=alpha)


def _view(values: Any, shape: Sequence[int]) -> Any:
    """A view whose shape has a number in place of -1, which a rank without samples cannot tell."""
    others = math.prod(size for size in shape if size != -1)
    if shape.count(-1) != 1 or not others or values.numel() % others:
        return NotImplemented
    return values.view([values.numel() // others if size == -1 else size for size in shape])


# Operations that others stand for; NotImplemented where these cannot.
IN_TERMS_OF_OTHERS: dict[Any, Callable[..., Any]] = {
    _aten.addmm_.default: _addmm_,
    _aten.equal.default: lambda left, right: left.shape == right.shape and bool((left == right).all()),
    _aten.index.Tensor: _index,
    _aten.logsumexp.default: _logsumexp,
    _aten.view.default: _view,
}


class Part(NamedTuple):
    """The values of a rank, by the name of the whole."""

    name: int


class Height(NamedTuple):
    """The number of rows of a rank, of those of all."""

    heights: Sequence[int]


class Here(NamedTuple):
    """The device of a rank."""


class Rows(NamedTuple):
    """What is known of values with rows for each sample."""

    shape: tuple[int, ...]  # of the values of all samples
    axis: int  # of the samples
    repeat: int  # rows of each sample, which follow each other
    dtype: torch.dtype
    small_strides: tuple[tuple[int, ...], tuple[int, ...]]  # of two and three samples; those of more are in line

    def small(self, n_samples: int) -> Tensor:
        """Zeros in place of the values of two or three samples."""
        shape = [*self.shape[: self.axis], n_samples * self.repeat, *self.shape[self.axis + 1 :]]
        strides = self.small_strides[n_samples - 2]
        size = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        return torch.zeros(max(size, 0), dtype=self.dtype).as_strided(shape, strides)

    def strides(self, n_samples: int) -> list[int]:
        """Strides of the values of so many samples."""
        return [two + (three - two) * (n_samples - 2) for two, three in zip(*self.small_strides, strict=True)]


def contiguous_rows(shape: Sequence[int], axis: int, repeat: int, dtype: torch.dtype) -> Rows:
    """What is known of contiguous values."""
    strides = [
        torch.empty([*shape[:axis], n_samples * repeat, *shape[axis + 1 :]], device="meta").stride()
        for n_samples in (2, 3)
    ]
    return Rows(tuple(shape), axis, repeat, dtype, (strides[0], strides[1]))


class Plan(NamedTuple):
    """How the ranks carry out an operation."""

    rows: dict[int, Rows]  # by position, arguments that all ranks' samples share
    heights: dict[int, int]  # by position of an argument that is a number of rows: rows of each sample
    outputs: list[Rows]  # the results; none where there is one, over the samples
    spec: Any  # the tree that they make
    combine: str | None  # what makes that one of those of the ranks: "sum", "max" or "min"


class Operation(NamedTuple):
    """An operation as a message: its name, its arguments, which may be parts, and the names of its results."""

    function: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    targets: list[int]

    def run(self, parts: dict[int, Any], rank: int, device: torch.device) -> None:
        """Keep the results on a rank as parts."""

        def local(value: Any) -> Any:
            if isinstance(value, Part):
                return parts[value.name]
            if isinstance(value, Height):
                return value.heights[rank]
            if isinstance(value, Here):
                return device
            if isinstance(value, (list, tuple)):
                return [local(entry) for entry in value]
            return value.to(device) if isinstance(value, Tensor) and value.ndim else value

        kwargs = {name: local(value) for name, value in self.kwargs.items()}
        found = attrgetter(self.function)(torch.ops)(*local(self.args), **kwargs)
        parts.update(zip(self.targets, flatten(found)[0], strict=False))


def plan(function: Any, leaves: Sequence[Any], spec: Any, n_samples: int, known: dict[Any, Plan | None]) -> Plan | None:
    """How ranks carry out an operation by themselves, or None where they cannot.

    `leaves` are its arguments, with ``Rows`` for those that the ranks have, and `spec` the tree that they make. A plan
    is made once and then `known`.
    """
    kinds = (float, int) if _is_pointwise(function) else float  # of numbers whose values make no difference
    numbers = tuple(type(leaf) if isinstance(leaf, kinds) else leaf for leaf in leaves)
    described = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in numbers)
    key = function, described, spec, n_samples, torch.get_default_dtype()
    if key not in known:
        known[key] = _made(function, list(leaves), spec, n_samples)
    return known[key]


def _is_pointwise(function: Any) -> bool:
    return torch.Tag.pointwise in function.tags and torch.Tag.nondeterministic_seeded not in function.tags


def _made(function: Any, leaves: list[Any], spec: Any, n_samples: int) -> Plan | None:
    args, _ = unflatten(leaves, spec)
    if function in _PRODUCTS:
        return _product(function, args, spec, n_samples)
    if not _is_pointwise(function) and function not in _ROWWISE:
        return None
    given = {position: leaf for position, leaf in enumerate(leaves) if isinstance(leaf, Rows)}
    first = next(iter(given.values()))
    if first.axis in _axes(function, args, len(first.shape)):
        return None
    heights = {}
    if function in _SHAPED:
        repeats = (
            range(1, 1 + max(args[1], default=0) // n_samples) if function in _VIEWS_OF_SHAPES else (first.repeat, 1)
        )
        sizes = {n_samples * repeat: repeat for repeat in repeats}
        heights = {1 + place: sizes[size] for place, size in enumerate(args[1]) if size in sizes}
    from_right, height = len(first.shape) - first.axis, first.shape[first.axis]
    if function == _aten.gather.default and any(leaf.shape[-from_right:][:1] != (height,) for leaf in args[::2]):
        return None
    plain = {
        position: contiguous_rows(leaf.shape, leaf.ndim - from_right, first.repeat, leaf.dtype)
        for position, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.ndim >= from_right and leaf.shape[-from_right] == height > 1
    }
    how = Plan(given | plain, heights, [], spec, _REDUCTIONS.get(function))
    made = _with_outputs(function, leaves, n_samples, how)
    mixes = made is not None and function in _VIEWS_OF_SHAPES and not _samples_follow(first, made.outputs[0])
    return None if mixes else made


def _axes(function: Any, args: Sequence[Any], n_axes: int) -> list[int]:
    """The axes that an operation is along."""
    if function not in _ALONG:
        return []
    arguments = function._schema.arguments
    given = [*args, *(argument.default_value for argument in arguments[len(args) :])]
    pairs = zip(arguments, given, strict=True)
    return [value % n_axes for argument, value in pairs if argument.name in ("dim", "dim1", "dim2")]


def _samples_follow(before: Rows, after: Rows) -> bool:
    """Whether values in another shape have the samples one after the other along their axis."""

    def number(rows: Rows) -> Tensor:
        """Each entry's sample, of three."""
        numbers = torch.arange(3).repeat_interleave(rows.repeat)
        behind = len(rows.shape) - rows.axis - 1
        return numbers.reshape(-1, *[1] * behind).expand_as(rows.small(3))

    return torch.equal(number(before).reshape(after.small(3).shape), number(after))


def _product(function: Any, args: Sequence[Any], spec: Any, n_samples: int) -> Plan | None:
    """The plan of a product: one over the samples is a sum over the ranks."""
    letters = _PRODUCTS[function]
    given = {names[arg.axis]: arg.repeat for names, arg in zip(letters, args, strict=True) if isinstance(arg, Rows)}
    if len(given) > 1:
        return None
    ((letter, repeat),) = given.items()
    rows = {
        position: arg if isinstance(arg, Rows) else contiguous_rows(arg.shape, names.index(letter), repeat, arg.dtype)
        for position, (names, arg) in enumerate(zip(letters, args, strict=True))
        if letter in names
    }
    return _with_outputs(function, list(args), n_samples, Plan(rows, {}, [], spec, "sum"))


def _with_outputs(function: Any, leaves: list[Any], n_samples: int, how: Plan) -> Plan | None:
    """The plan with its results, of which those of two and of three samples tell; None where it makes none."""
    found = []
    for height in (2, 3):
        small = [torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for position, row in how.rows.items():
            small[position] = row.small(height)
        for position, repeat in how.heights.items():
            small[position] = height * repeat
        args, kwargs = unflatten(small, how.spec)
        kwargs = {name: "cpu" if name == "device" else value for name, value in kwargs.items()}
        try:
            found.append(flatten(function(*args, **kwargs)))
        except (RuntimeError, IndexError):  # which that of all samples raises, too, or does not
            return None
    (of_two, spec_of_two), (of_three, spec_of_three) = found
    if spec_of_two != spec_of_three:
        return None
    if len(of_two) == 1 and of_two[0].shape == of_three[0].shape:  # over the samples
        return how if how.combine is not None else None
    found_outputs = [_output(*pair, n_samples) for pair in zip(of_two, of_three, strict=True)]
    outputs = [output for output in found_outputs if output is not None]
    return how._replace(outputs=outputs, spec=spec_of_two, combine=None) if len(outputs) == len(of_two) else None


def _output(of_two: Tensor, of_three: Tensor, n_samples: int) -> Rows | None:
    """What is known of a result; None where the samples are not on one axis."""
    shapes = list(zip(of_two.shape, of_three.shape, strict=True))
    axes = [axis for axis, pair in enumerate(shapes) if pair[0] != pair[1]]
    if len(axes) != 1:
        return None
    (axis,), (two, three) = axes, shapes[axes[0]]
    if 3 * two != 2 * three:
        return None
    shape = [n_samples * (three - two) if place == axis else pair[0] for place, pair in enumerate(shapes)]
    return Rows(tuple(shape), axis, three - two, of_two.dtype, (of_two.stride(), of_three.stride()))

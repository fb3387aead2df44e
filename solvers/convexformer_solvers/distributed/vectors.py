"""Tensors with a row for each sample of all ranks, whose rows stay on the ranks of the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from .operations import (
    IN_TERMS_OF_OTHERS,
    NEW,
    Height,
    Here,
    Operation,
    Part,
    Plan,
    Rows,
    contiguous_rows,
    flatten,
    plan,
    unflatten,
)
from .team import Command, Team

_aten = torch.ops.aten
Places = Tensor | slice  # positions of a rank's samples among all


class Layout:
    """Which samples each rank has: `places` are their positions among all, `device` is that of rank 0."""

    def __init__(self, team: Team, places: list[Places], n_samples: int, device: torch.device) -> None:
        self.team, self.places, self.n_samples, self.device = team, places, n_samples, device
        self.heights = tuple(p.stop - p.start if isinstance(p, slice) else len(p) for p in places)
        self.keeps = n_samples >= cast(int, team.ranks.least_samples)  # whether values stay on their ranks

    def kept(self, name: int, part: Tensor) -> SampleTensor:
        """Values, one row a sample, that the ranks hold under a name; `part` is that of rank 0."""
        return SampleTensor(self, name, contiguous_rows((self.n_samples, *part.shape[1:]), 0, 1, part.dtype))

    def scattered(self, values: Tensor, axis: int = 0, repeat: int = 1) -> SampleTensor:
        """Values of all samples, each rank's on that rank."""
        rows, name = contiguous_rows(values.shape, axis, repeat, values.dtype), self.team.new_name()
        if values.stride(axis) == 0:  # all rows are alike
            sizes: list[Any] = list(values.shape)
            sizes[axis] = Height([height * repeat for height in self.heights])
            row = values.narrow(axis, 0, 1).clone()
            self.team.note(Operation("aten.expand.default", [row, sizes], {}, [name]))
            return SampleTensor(self, name, rows._replace(small_strides=(row.expand_as(values).stride(),) * 2))
        by_sample = values.unflatten(axis, (self.n_samples, repeat)).movedim(axis, 0)
        parts = [by_sample[places].movedim(0, axis).flatten(axis, axis + 1) for places in self.places]
        parts[0] = parts[0].clone()  # as those of the other ranks are
        self.team.lead(Command("placed", 0, ("keep",), {}, target=name), [{"values": part} for part in parts])
        return SampleTensor(self, name, rows)

    def placed(self, values: Tensor) -> SampleTensor:
        """Values of all samples, one row each, on the ranks; themselves where they are."""
        kept = isinstance(values, SampleTensor) and values.sample_layout is self
        return values if kept else self.scattered(whole(values))  # type: ignore[return-value]

    def gathered(self, values: SampleTensor) -> Tensor:
        """The values of all samples, on rank 0."""
        axis, repeat = values.rows.axis, values.rows.repeat
        move = {"source": axis, "destination": 0}
        heights = tuple(height * repeat for height in self.heights)
        parts = self.team.lead(Command("movedim", values.name_on_ranks, ("rows",), move, heights=heights))
        joined = self.joined([part.unflatten(0, (-1, repeat)) for part in parts])
        return joined.flatten(0, 1).movedim(0, axis).contiguous()  # of which all views can be made

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Rows of all samples from those of the ranks."""
        result = parts[0].new_empty((self.n_samples, *parts[0].shape[1:]))
        for places, part in zip(self.places, parts, strict=True):
            result[places] = part
        return result

    def combined(self, operation: Operation, combine: str) -> Tensor:
        """The sum or other combination of the results of an operation over the ranks."""
        name = self.team.new_name()
        self.team.note(operation._replace(targets=[name]))
        result = self.team.lead(Command("detach", name, (combine,), {}))
        self.team.forget(name)
        return result


class _Changes:
    """How often values have changed that some tensors are views of."""

    number = 0


class _Wrapper(Tensor):
    """A tensor whose values ``whole`` gives."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def whole(self) -> Tensor:
        raise NotImplementedError

    def numpy(self, *, force: bool = False) -> Any:
        array = self.whole().numpy(force=force)
        if force:
            return array.copy()
        array.flags.writeable = False  # it is one of a copy
        return array

    def tolist(self) -> Any:
        return self.whole().tolist()


class SampleTensor(_Wrapper):
    """A tensor of rank 0 with an axis for the samples of all ranks, whose values are on their ranks.

    Operations are noted. All ranks carry them out before the next sum over the samples or product with the data.
    Operations that mix the samples in other ways gather the values of all samples on rank 0. Views that result from
    these are of a copy: they refuse to change in place, and to be read after the values have changed.
    """

    sample_layout: Layout
    name_on_ranks: int  # of the parts
    rows: Rows
    changes: _Changes
    _copy: tuple[Tensor, int] | None  # on rank 0, and after which changes

    @staticmethod
    def __new__(cls, layout: Layout, name: int, rows: Rows, changes: _Changes | None = None) -> SampleTensor:
        result: Any = Tensor._make_wrapper_subclass(
            cls, rows.shape, rows.strides(layout.n_samples), dtype=rows.dtype, device=layout.device
        )
        result.sample_layout, result.name_on_ranks, result.rows = layout, name, rows
        result.changes, result._copy = changes or _Changes(), None
        return result

    def __del__(self) -> None:
        self.sample_layout.team.forget(self.name_on_ranks)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SampleTensor(shape={tuple(self.shape)}, dtype={self.dtype}, on {len(self.sample_layout.places)} ranks)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _carried_out(func, args, kwargs or {})

    def whole(self) -> Tensor:
        """The values of all samples, on rank 0, which keeps them until they change."""
        if self._copy is None or self._copy[1] != self.changes.number:
            self._copy = self.sample_layout.gathered(self), self.changes.number
        return self._copy[0]


class _ViewOfCopy(_Wrapper):
    """A view of a copy of values of the ranks.

    It is an error to change it, which would not change theirs, and to read it after theirs have changed.
    """

    _copied: Tensor
    _source: tuple[_Changes, int]  # of the values of the ranks, and how many there were

    @staticmethod
    def __new__(cls, values: Tensor, source: tuple[_Changes, int]) -> _ViewOfCopy:
        result: Any = Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=values.dtype, device=values.device
        )
        result._copied, result._source = values, source
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        source = args[0]._source if _makes_views(func) else None
        return _of_copies(func, _copies_read(func, args, kwargs), source)

    def whole(self) -> Tensor:
        """The values, where those of the ranks are still the same."""
        changes, number = self._source
        if changes.number != number:
            raise RuntimeError(
                "a view of some samples' values cannot be read where ranks have them and they have changed since; take "
                "the view after the change, or a clone of it before"
            )
        return self._copied


def _copies_read(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Arguments with copies in place of views of them, none of which the operation writes to."""
    if any(isinstance(values, _ViewOfCopy) for values in _changed(function, args, kwargs)):
        raise RuntimeError(
            "some samples' values cannot be changed in place by a view where ranks have them; write "
            "values[index] = ... with a tensor of positions, or change a clone"
        )
    return _replaced(_ViewOfCopy, _ViewOfCopy.whole, (args, kwargs))


def _replaced(kind: type, new: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with other leaves in place of those of a kind."""
    leaves, spec = flatten(tree)
    return unflatten([new(leaf) if isinstance(leaf, kind) else leaf for leaf in leaves], spec)


def _of_copies(function: Any, arguments: Any, source: tuple[_Changes, int] | None) -> Any:
    """The result of an operation on copies; of a view of them, as such."""
    result = function(*arguments[0], **arguments[1])
    return result if source is None else _replaced(Tensor, lambda values: _ViewOfCopy(values, source), result)


def _makes_views(function: Any) -> bool:
    """Whether the results share the values of the first argument, which does not change."""
    returns = function._schema.returns
    return not function._schema.is_mutable and any(result.alias_info is not None for result in returns)


def whole(values: Tensor) -> Tensor:
    """Values of all samples, on rank 0."""
    return values.whole() if isinstance(values, _Wrapper) else values


def _carried_out(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The results of an operation on tensors, of which some are on the ranks."""
    args, kwargs = _copies_read(function, args, kwargs)
    if function._can_decompose():
        return function.decompose(*args, **kwargs)
    if function in IN_TERMS_OF_OTHERS:
        result = IN_TERMS_OF_OTHERS[function](*args, **kwargs)
        if result is not NotImplemented:
            return result
    leaves, spec = flatten((args, kwargs))
    layouts = {leaf.sample_layout for leaf in leaves if isinstance(leaf, SampleTensor)}
    changed = _changed(function, args, kwargs)
    how = None
    if len(layouts) == 1 and all(isinstance(leaf, SampleTensor) for leaf in changed):
        (layout,) = layouts
        described = [leaf.rows if isinstance(leaf, SampleTensor) else leaf for leaf in leaves]
        how = plan(function, described, spec, layout.n_samples, layout.team.plans)
    if how is None and function in NEW:
        return function(torch.empty(0, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)
    if how is None or (how.combine in ("max", "min") and 0 in layout.heights):  # a part has none
        return _on_rank_0(function, leaves, spec, changed)
    return _on_ranks(function, leaves, spec, changed, how, layout)


def _on_ranks(function: Any, leaves: list[Any], spec: Any, changed: list[Any], how: Plan, layout: Layout) -> Any:
    """The operation on each rank's values."""

    def placed(position: int, leaf: Any) -> Any:
        if position not in how.rows or isinstance(leaf, SampleTensor):
            return leaf
        return layout.scattered(leaf, how.rows[position].axis, how.rows[position].repeat)

    arguments = [placed(*pair) for pair in enumerate(leaves)]  # which must live until the operation is noted
    operation = _message(function, arguments, spec, how, layout)
    if how.combine is not None:
        return layout.combined(operation, how.combine)
    if changed:
        for leaf in changed:
            leaf.changes.number += 1
        layout.team.note(operation)
        if torch.Tag.inplace_view in function.tags:  # which changes the shape
            changed[0].rows = how.outputs[0]
            args, kwargs = unflatten(leaves, spec)
            with no_dispatch():
                function(*args, **kwargs)
        return changed[0]
    names = [layout.team.new_name() for _ in how.outputs]
    layout.team.note(operation._replace(targets=names))
    changes = leaves[0].changes if _makes_views(function) else None
    results = [SampleTensor(layout, name, output, changes) for name, output in zip(names, how.outputs, strict=True)]
    return unflatten(results, how.spec)


def _message(function: Any, leaves: list[Any], spec: Any, how: Plan, layout: Layout) -> Operation:
    """The operation with parts, numbers of samples and devices of the ranks in place of those of rank 0."""

    def sent(position: int, leaf: Any) -> Any:
        if isinstance(leaf, SampleTensor):
            return Part(leaf.name_on_ranks)
        if position in how.heights:
            return Height([height * how.heights[position] for height in layout.heights])
        if isinstance(leaf, torch.device):
            return Here()
        # A copy, as it may change before it is sent, with strides that a message keeps.
        return leaf.detach().clone(memory_format=torch.contiguous_format) if isinstance(leaf, Tensor) else leaf

    args, kwargs = unflatten([sent(*pair) for pair in enumerate(leaves)], spec)
    return Operation(str(function), args, kwargs, [])


def _on_rank_0(function: Any, leaves: list[Any], spec: Any, changed: list[Any]) -> Any:
    """The operation on the values of all samples; what it changes goes back to the ranks."""
    of_ranks = [leaf for leaf in changed if isinstance(leaf, SampleTensor)]
    is_plain_copy = function == _aten.copy_.default and not isinstance(leaves[1], SampleTensor)
    share_values = len({leaf.changes for leaf in of_ranks}) < len(of_ranks)
    if of_ranks and (torch.Tag.inplace_view in function.tags or is_plain_copy or share_values):
        raise RuntimeError(f"{function} cannot change values of samples in place where ranks have them; use a clone")
    copies = {id(leaf): leaf.whole().clone() for leaf in of_ranks}
    plain = [copies.get(id(leaf), whole(leaf) if isinstance(leaf, Tensor) else leaf) for leaf in leaves]
    source = (leaves[0].changes, leaves[0].changes.number) if _makes_views(function) else None
    result = _of_copies(function, unflatten(plain, spec), source)
    for leaf in of_ranks:
        leaf.copy_(copies[id(leaf)])
    changed_copies = {id(copies[id(leaf)]): leaf for leaf in of_ranks}
    return _replaced(Tensor, lambda values: changed_copies.get(id(values), values), result)


def _changed(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments that an operation writes to."""
    if not function._schema.is_mutable:
        return []
    given = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | kwargs
    written = [a.name for a in function._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return flatten([given[name] for name in written if name in given])[0]


def places_of(counts: Sequence[int]) -> list[Places]:
    """Positions of ranks' samples that follow each other by rank."""
    return [slice(*pair) for pair in pairwise(accumulate(counts, initial=0))]

"""The linear map of samples that are spread over the ranks of a process group."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from convexformer_solvers.linear_maps.base import LinearMap, Slopes
from convexformer_solvers.linear_maps.parts import InParts
from convexformer_solvers.linear_maps.source import Traffic

from .ranks import RankError, Ranks, packed, plain, unpacked
from .team import Command, Team
from .vectors import Layout, Places, SampleTensor, places_of, whole

_T = TypeVar("_T")


class Sharded(InParts):
    """Something of which each rank has the part of its samples; its methods are commands, which all ranks carry out.

    The parts have a `name`; `local` is that of rank 0.
    """

    def __init__(self, layout: Layout, name: int, local: Any) -> None:
        self.layout, self.local, self._name, self._team = layout, local, name, layout.team

    @staticmethod
    def alike(local: Any) -> dict[str, Any]:
        """What must be the same of all ranks' parts, by name."""
        raise NotImplementedError

    def __del__(self) -> None:
        if getattr(self, "_name", 0):  # not where an error came before
            self._team.forget(self._name)

    def _all(
        self, method: str, combine: str, target: int = 0, per_sample: dict[str, Any] | None = None, **common: Any
    ) -> Any:
        """Results of a method of all ranks' parts, combined; of arguments `per_sample` each rank has its rows."""
        common = {name: whole(value) if isinstance(value, Tensor) else value for name, value in common.items()}
        command = Command(method, self._name, tuple(combine.split()), common, self.layout.heights, target)
        if per_sample is None:
            return self._team.lead(command)
        if self.layout.keeps:
            placed = {name: self.layout.placed(v) if isinstance(v, Tensor) else v for name, v in per_sample.items()}
            return self._team.lead(command._replace(common=common | placed))
        return self._team.lead(command, self._parts(per_sample))

    def _parts(self, per_sample: dict[str, Any]) -> list[dict[str, Any]]:
        """Each rank's part of values with a row for each sample."""

        def part(value: Any, places: Places) -> Any:
            return whole(value)[places] if isinstance(value, Tensor) else value.rows(places)

        return [{name: part(value, places) for name, value in per_sample.items()} for places in self.layout.places]

    def _derived(
        self, method: str, per_sample: dict[str, Any] | None = None, kind: type[Any] | None = None, **common: Any
    ) -> Any:
        """What a method makes of each rank's part, of another kind or the same."""
        name = self._team.new_name()
        local = self._all(method, "keep", name, per_sample, **common)
        return (kind or type(self))(self.layout, name, local)

    def rows(self, index: Tensor | slice) -> Any:
        n_samples, places = self.layout.n_samples, self.layout.places
        index = torch.arange(n_samples)[whole(index).cpu() if isinstance(index, Tensor) else index]
        owner, position = torch.empty((2, n_samples), dtype=torch.int64)
        for rank, of_rank in enumerate(places):
            owner[of_rank] = rank
            position[of_rank] = torch.arange(len(owner[of_rank]))
        found = [(owner[index] == rank).nonzero()[:, 0] for rank in range(len(places))]
        own = [{"index": position[index[of_rank]]} for of_rank in found]
        layout = Layout(self._team, [_as_slice(of_rank) for of_rank in found], len(index), self.layout.device)
        name = self._team.new_name()
        local = self._team.lead(Command("rows", self._name, ("keep",), {}, target=name), own)
        return type(self)(layout, name, local)

    def each_part(self, function: Callable[..., _T], own: dict[str, Any] | None = None, **common: Any) -> list[_T]:
        return [found for (found,) in self._all("each_part", "list", per_sample=own, function=function, **common)]

    def rows_made(self, function: Callable[..., Tensor], **common: Any) -> Tensor:
        return self.layout.joined(self._all("rows_made", "rows", function=function, **common))

    def traffic(self) -> Traffic | None:
        # A rank with few of the samples may hold them.
        of_ranks = [of_rank for of_rank in self._all("traffic", "list") if of_rank is not None]
        return sum(of_ranks[1:], of_ranks[0]) if of_ranks else None

    def placed(self, values: Tensor) -> Tensor:
        return self.layout.placed(values) if self.layout.keeps else whole(values)

    def gathered(self, values: Tensor) -> Tensor:
        return whole(values).clone() if isinstance(values, SampleTensor) else values  # not what is kept of it

    def map_made(self, function: Callable[..., Any], **common: Any) -> Any:
        return self._derived("map_made", kind=ShardedMap, function=function, **common).within_limits()

    def within_limits(self) -> Any:
        """This, within the least memory of the ranks."""
        return self


class ShardedMap(Sharded, LinearMap):
    """The map of all ranks' samples: products are sums, or rows, of those of the ranks' own maps.

    It exists on rank 0, within ``on_all_ranks``. Algorithms, certificates and reductions that know linear maps alone
    run on it as on any other. Predictions and targets of many samples are ``SampleTensor``: each rank holds and works
    on those of its samples. Those of few samples are on rank 0, where a command takes longer than the work on them. A
    product sends ``p c`` numbers to or from each rank.

    Parameters
    ----------
    layout, name, local : Layout, int, LinearMap
        Which samples each rank has, the name of the ranks' maps, and the map of rank 0.
    """

    device = property(lambda self: self.local.device)
    dtype = property(lambda self: self.local.dtype)
    feature_shape = property(lambda self: self.local.feature_shape)
    n_samples = property(lambda self: self.layout.n_samples)
    # As many numbers of a sample on each rank.
    n_stored = property(lambda self: self.n_samples * self.local.n_stored // max(1, self.local.n_samples))

    def __init__(self, layout: Layout, name: int, local: LinearMap) -> None:
        super().__init__(layout, name, local)
        self.in_memory, self.memory_limit = local.in_memory, local.memory_limit  # type: ignore[misc]

    @staticmethod
    def alike(local: LinearMap) -> dict[str, Any]:
        shape = tuple(local.feature_shape)
        place = "memory" if local.in_memory else "passes, for want of memory_limit"
        return {"shape of a sample": shape, "precision": local.dtype, "place of the samples": place}

    def within_limits(self) -> ShardedMap:
        held, limits = zip(*self.each_part(attrgetter("in_memory", "memory_limit")), strict=True)
        self.in_memory = all(held)  # type: ignore[misc]
        self.memory_limit = min((limit for limit in limits if limit is not None), default=None)
        return self

    def _derived(self, *arguments: Any, **options: Any) -> Any:
        return self._as_first(super()._derived(*arguments, **options))

    def rows(self, index: Tensor | slice) -> ShardedMap:
        return self._as_first(super().rows(index))

    def _as_first(self, made: Any) -> Any:
        """A map made of this one, which is in memory where this one is: of few samples a rank may hold all."""
        made.in_memory, made.memory_limit = self.in_memory, self.memory_limit
        return made

    def _rows(self, method: str, **common: Any) -> Tensor:
        """Results of a method with a row for each sample."""
        if not self.layout.keeps:
            return self.layout.joined(self._all(method, "rows", **common))
        name = self._team.new_name()
        return self.layout.kept(name, self._all(method, "keep", name, **common))

    def matvec(self, coef: Tensor) -> Tensor:
        return self._rows("matvec", coef=coef)

    def rmatvec(self, values: Tensor) -> Tensor:
        return self._all("rmatvec", "sum", per_sample={"values": values})

    def matvec_blocks(self, blocks: Tensor, coef: Tensor) -> Tensor:
        return self._rows("matvec_blocks", blocks=blocks, coef=coef)

    def rmatvec_blocks(self, blocks: Tensor, values: Tensor) -> Tensor:
        return self._all("rmatvec_blocks", "sum", per_sample={"values": values}, blocks=blocks)

    def slopes_pass(self, coef: Tensor, slopes: Slopes) -> tuple[Tensor, Tensor]:
        first = "keep" if self.layout.keeps else "rows"
        name = self._team.new_name()
        pred, back = self._all("slopes_pass", f"{first} sum", name, {"slopes": slopes}, coef=coef)
        return self.layout.kept(name, pred) if self.layout.keeps else self.layout.joined(pred), back

    def moments(self, weight: Tensor, right: Tensor, single: bool = False) -> tuple[Tensor, Tensor]:
        return self._all("moments", "sum sum", per_sample={"weight": weight, "right": right}, single=single)

    def gram(self, left: Tensor, right: Tensor, weight: Tensor, center: Tensor | None = None) -> Tensor:
        per_sample = {"weight": weight}
        return self._all("gram", "sum", per_sample=per_sample, left=left, right=right, center=center)

    def weighted_gram(self, columns: Tensor, weight: Tensor) -> Tensor:
        return self._all("weighted_gram", "sum", per_sample={"columns": columns, "weight": weight})

    def weighted_squares(self, weight: Tensor) -> Tensor:
        return self._all("weighted_squares", "sum", per_sample={"weight": weight})

    def nonnegative(self, coef: Tensor) -> Tensor:
        return self._rows("nonnegative", coef=coef)

    def columns(self, blocks: Tensor) -> Tensor:
        return self._rows("columns", blocks=blocks)

    def along(self, blocks: Tensor, units: Tensor) -> Tensor:
        return self._rows("along_rows", blocks=blocks, units=units).T.contiguous()

    def largest(self) -> float:
        return float(self._all("largest", "max"))

    def few(self, n_blocks: int) -> bool:
        return self.local.few(n_blocks)

    # Maps made of this one

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> ShardedMap:
        same = dtype in (None, self.dtype) and (device is None or torch.device(device) == self.device)
        return self if same else self._derived("to", dtype=dtype, device=device)

    def gated(self, masks: Tensor) -> ShardedMap:
        return self._derived("gated", {"masks": masks})

    def widened(self, features: Tensor) -> ShardedMap:
        return self._derived("widened", {"features": features})

    def restricted(self, blocks: Tensor) -> ShardedMap:
        return self._derived("restricted", blocks=blocks)

    def centered(self, weight: Tensor, dtype: torch.dtype) -> ShardedMap:
        mean = self.rmatvec(weight[:, None])[..., 0]
        return self._derived("shifted", mean=mean, dtype=dtype)

    # Costs

    def _work_of_messages(self, n_numbers: int) -> float:
        """Work of one command that sends so many numbers."""
        ranks = self._team.ranks
        return self.rates.product * (ranks.command_seconds + 8 * n_numbers / ranks.rate)

    def passes_of_gram(self, n_outputs: int) -> float:
        return self.local.passes_of_gram(n_outputs)

    def product_work(self, n_outputs: int) -> float:
        n_numbers = n_outputs * (math.prod(self.feature_shape) + (0 if self.layout.keeps else self.n_samples))
        return self.local.product_work(n_outputs) + self._work_of_messages(n_numbers)

    def gram_work(self) -> float:
        n, p = self.n_samples, math.prod(self.feature_shape)
        if n < p:  # rank 0 forms the kernel, of columns that the others send
            return float(n * n * p) + self._work_of_messages(n * p)
        return float(self.local.n_samples * p * p) + self._work_of_messages(p * p)


def _as_slice(places: Tensor) -> Places:
    """Positions as a slice where they follow each other: views in place of copies."""
    if len(places) and bool((places.diff() == 1).all()):
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def on_all_ranks(local: Any, work: Callable[[Any], _T], ranks: Ranks | None, kind: type[Sharded] = ShardedMap) -> _T:
    """Call `work` with the map of all ranks' samples, on rank 0; the others multiply for it. All return its result.

    Parameters
    ----------
    local : LinearMap
        The map of this rank's samples, on ranks of equal ``feature_shape`` and precision. The samples of all ranks
        follow each other by rank. Of another `kind`, what that takes as a rank's part.
    work : callable
        Called on rank 0 with a ``ShardedMap``; the other ranks' is not called. Its result is pickled to them.
    ranks : Ranks or None
        As from ``ranks()``. None: `work` is called with `local`.
    kind : type, default=ShardedMap
        What `work` is called with.

    Raises
    ------
    RankError
        Where a rank dies or does not answer; the message names it.
    ValueError
        Where the maps of the ranks do not go together. What `work` raises is raised on all ranks.

    Examples
    --------
    Under ``torchrun`` each rank has its own samples, and this is the same program in one process and in many:

    >>> from convexformer_solvers import DenseMap, GroupL2, Program, Squared, get_solver, solve
    >>> data = torch.randn(40, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> y = data[:, 0, :1]  # the targets of all ranks
    >>> def work(linear_map):
    ...     return solve(Program(linear_map, y, Squared(), GroupL2(), alpha=0.1), get_solver("auto")).coef
    >>> on_all_ranks(DenseMap(data), work, ranks=None).shape
    torch.Size([3, 2, 1])
    """
    if ranks is None:
        return work(local)
    described = ranks.all((len(local), kind.alike(local)))
    _check_alike(described)
    ranks.measure()
    team, ranks.busy = Team(ranks, local), True
    try:
        return _lead(team, [part[0] for part in described], work, kind) if ranks.rank == 0 else team.follow()
    finally:
        ranks.busy = False


def _lead(team: Team, counts: list[int], work: Callable[[Any], _T], kind: type[Sharded]) -> _T:
    try:
        team.measure()
        layout = Layout(team, places_of(counts), sum(counts), team.local.device)
        result = packed(work(kind(layout, 0, team.local).within_limits()))  # which gathers values of the ranks
    except BaseException as error:
        with suppress(RankError):  # where that is why it ends, the others know
            team.end(error=plain(error))
        raise
    team.end(result)
    return unpacked(result)  # as the others get it


def _check_alike(described: list[tuple[int, dict[str, Any]]]) -> None:
    """Raise ``ValueError`` unless the parts of the ranks go together."""
    for rank, (n_samples, _) in enumerate(described):
        if n_samples == 0:
            raise ValueError(f"rank {rank} has no samples; give each rank at least one, or start fewer ranks")
    for name, first in described[0][1].items():
        for rank, (_, own) in enumerate(described):
            if own[name] != first:
                raise ValueError(
                    f"the {name} must be the same on all ranks, got {first} on rank 0 and {own[name]} on rank {rank}"
                )

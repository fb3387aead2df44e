"""The linear map of samples that are spread over the ranks of a process group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from convexformer_solvers.linear_maps.base import LinearMap, Slopes
from convexformer_solvers.linear_maps.source import Traffic

from .ranks import Ranks, interrupts_held, interrupts_ignored

_T = TypeVar("_T")
_Places = Tensor | slice  # positions of a rank's samples among all


class _Command(NamedTuple):
    """What the ranks do with a map of theirs."""

    method: str  # of the map
    handle: int  # which map
    combine: tuple[str, ...]  # what becomes of each result
    common: dict[str, Any]  # arguments that all ranks have
    has_own: bool = False  # whether each rank has arguments of its own
    target: int = 0  # name of the map that results
    heights: tuple[int, ...] = ()  # samples of each rank
    forgotten: tuple[int, ...] = ()  # maps that are needed no more


class _End(NamedTuple):
    """The end of the work of rank 0: its result or error."""

    result: Any = None
    error: BaseException | None = None


class _Failed(NamedTuple):
    """The error of a rank, as the others get it."""

    kind: type[Exception]
    message: str


class _Team:
    """The maps of this rank by name, and the commands that all ranks carry out together."""

    def __init__(self, ranks: Ranks, local: LinearMap) -> None:
        self.ranks, self.maps, self.last = ranks, {0: local}, 0
        self.forgotten: list[int] = []

    def lead(self, command: _Command, own: Sequence[dict[str, Any]] | None = None) -> Any:
        """Carry out a command of rank 0 and return what has been combined."""
        with self.ranks.lock, interrupts_held():
            forgotten, self.forgotten = tuple(self.forgotten), []
            command = command._replace(has_own=own is not None, forgotten=forgotten)
            self.ranks.broadcast(command)
            mine = self.ranks.scatter(own) if own is not None else {}
            return self._carry_out(command, mine)

    def follow(self) -> _End:
        """Carry out the commands of rank 0 until its work is done."""
        with interrupts_ignored():
            while True:
                command = self.ranks.broadcast()
                if isinstance(command, _End):
                    return command
                own = self.ranks.scatter() if command.has_own else {}
                with suppress(_Reported):
                    self._carry_out(command, own)

    def end(self, end: _End) -> None:
        """Tell the others that the work of rank 0 is done."""
        with self.ranks.lock, interrupts_held():
            self.ranks.broadcast(end)

    def _carry_out(self, command: _Command, own: dict[str, Any]) -> Any:
        for handle in command.forgotten:
            del self.maps[handle]
        failed: _Failed | None = None
        results: tuple[Any, ...] = ()
        try:
            here = self.maps[command.handle]
            arguments = {name: _on(value, here.device) for name, value in (command.common | own).items()}
            found = getattr(here, command.method)(**arguments)
            results = found if isinstance(found, tuple) else (found,)
        except Exception as error:
            failed = _Failed(type(error), str(error))
        self._agree(failed)
        if command.combine == ("map",):
            self.maps[command.target] = results[0]
            return results[0]
        pairs = zip(command.combine, results, strict=True)
        combined = [self._combined(how, part, command.heights) for how, part in pairs]
        return combined[0] if len(combined) == 1 else tuple(combined)

    def _agree(self, failed: _Failed | None) -> None:
        """Raise the error of the first rank that has one, on rank 0; the others go on to listen."""
        any_failed = torch.tensor([failed is not None], dtype=torch.int32)
        self.ranks.all_sum(any_failed)
        if not bool(any_failed):
            return
        rank, error = next(pair for pair in enumerate(self.ranks.all(failed)) if pair[1] is not None)
        if self.ranks.rank != 0:
            raise _Reported
        raise error.kind(f"rank {rank}: {error.message}")

    def _combined(self, how: str, part: Any, heights: tuple[int, ...]) -> Any:
        if how == "sum":
            return self.ranks.reduced(part)
        if how == "none":
            return None
        if how == "list":
            return self.ranks.gather(part)
        if how == "max":
            return float(self.ranks.reduced(torch.tensor([part], dtype=torch.float64), dist.ReduceOp.MAX))
        return self.ranks.rows(part.T if how == "columns" else part, heights)


class _Reported(Exception):
    """An error that rank 0 raises for all."""


def _on(value: Any, device: torch.device) -> Any:
    """A tensor, or slopes, of a message on the device of the map."""
    return value.to(device=device) if hasattr(value, "to") else value


class ShardedMap(LinearMap):
    """The map of all ranks' samples: products are sums, or rows, of those of the ranks' own maps.

    It exists on rank 0, within ``on_all_ranks``. Algorithms, certificates and reductions that know linear maps alone
    run on it as on any other. Memory: rank 0 holds vectors with a number for each sample and output, and matrices of
    the features; every other rank holds its own samples. A product sends ``p c`` numbers to each rank and from it, and
    ``c`` numbers for each of its samples.

    Parameters
    ----------
    team : object
        The ranks with their maps.
    handle : int
        Which of the maps of each rank.
    places : list of Tensor or slice
        Positions of each rank's samples.
    local : LinearMap
        The map of rank 0's own samples.
    n_samples : int
        Samples in all.
    in_memory, memory_limit : bool, int or None
        As those of the ranks' first maps: of few samples a rank may hold what others read.
    """

    device = property(lambda self: self.local.device)
    dtype = property(lambda self: self.local.dtype)
    feature_shape = property(lambda self: self.local.feature_shape)
    n_samples = property(lambda self: self._n_samples)

    def __init__(
        self,
        team: _Team,
        handle: int,
        places: list[_Places],
        local: LinearMap,
        n_samples: int,
        in_memory: bool,
        memory_limit: int | None,
    ) -> None:
        self.local, self.places, self._team, self._handle, self._n_samples = local, places, team, handle, n_samples
        self.in_memory, self.memory_limit = in_memory, memory_limit  # type: ignore[misc]
        self._heights = tuple(p.stop - p.start if isinstance(p, slice) else len(p) for p in places)

    def __del__(self) -> None:
        if self._handle:
            self._team.forgotten.append(self._handle)

    def _all(self, method: str, combine: str, own: Sequence[dict[str, Any]] | None = None, **common: Any) -> Any:
        """Results of a method of all ranks' maps, combined."""
        return self._team.lead(
            _Command(method, self._handle, tuple(combine.split()), common, heights=self._heights), own
        )

    def _derived(
        self,
        method: str,
        own: Sequence[dict[str, Any]] | None = None,
        places: list[_Places] | None = None,
        n_samples: int | None = None,
        **common: Any,
    ) -> ShardedMap:
        """The map that a method makes of each rank's own."""
        team = self._team
        with team.ranks.lock:
            team.last += 1
            target = team.last
        local = team.lead(_Command(method, self._handle, ("map",), common, target=target), own)
        count = self._n_samples if n_samples is None else n_samples
        places = self.places if places is None else places
        return ShardedMap(team, target, places, local, count, self.in_memory, self.memory_limit)

    def _own(self, **values: Tensor | Slopes) -> list[dict[str, Any]]:
        """Each rank's part of values with a row for each sample."""

        def part(value: Any, places: _Places) -> Any:
            return value[places] if isinstance(value, Tensor) else value.rows(places)

        return [{name: part(value, places) for name, value in values.items()} for places in self.places]

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """Rows of all samples from those of the ranks."""
        result = parts[0].new_empty((self.n_samples, *parts[0].shape[1:]))
        for places, part in zip(self.places, parts, strict=True):
            result[places] = part
        return result

    def matvec(self, coef: Tensor) -> Tensor:
        return self._joined(self._all("matvec", "rows", coef=coef))

    def rmatvec(self, values: Tensor) -> Tensor:
        return self._all("rmatvec", "sum", self._own(values=values))

    def matvec_blocks(self, blocks: Tensor, coef: Tensor) -> Tensor:
        return self._joined(self._all("matvec_blocks", "rows", blocks=blocks, coef=coef))

    def rmatvec_blocks(self, blocks: Tensor, values: Tensor) -> Tensor:
        return self._all("rmatvec_blocks", "sum", self._own(values=values), blocks=blocks)

    def slopes_pass(self, coef: Tensor, slopes: Slopes) -> tuple[Tensor, Tensor]:
        pred, back = self._all("slopes_pass", "rows sum", self._own(slopes=slopes), coef=coef)
        return self._joined(pred), back

    def moments(self, weight: Tensor, right: Tensor, single: bool = False) -> tuple[Tensor, Tensor]:
        return self._all("moments", "sum sum", self._own(weight=weight, right=right), single=single)

    def gram(self, left: Tensor, right: Tensor, weight: Tensor, center: Tensor | None = None) -> Tensor:
        return self._all("gram", "sum", self._own(weight=weight), left=left, right=right, center=center)

    def nonnegative(self, coef: Tensor) -> Tensor:
        return self._joined(self._all("nonnegative", "rows", coef=coef))

    def columns(self, blocks: Tensor) -> Tensor:
        return self._joined(self._all("columns", "rows", blocks=blocks))

    def along(self, blocks: Tensor, units: Tensor) -> Tensor:
        return self._joined(self._all("along", "columns", blocks=blocks, units=units)).T.contiguous()

    def largest(self) -> float:
        return self._all("largest", "max")

    def check_finite(self) -> None:
        self._all("check_finite", "none")

    def traffic(self) -> Traffic | None:
        # A rank with few of the samples may hold them.
        of_ranks = [of_rank for of_rank in self._all("traffic", "list") if of_rank is not None]
        return sum(of_ranks[1:], of_ranks[0]) if of_ranks else None

    def few(self, n_blocks: int) -> bool:
        return self.local.few(n_blocks)

    # Maps made of this one

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> ShardedMap:
        same = dtype in (None, self.dtype) and (device is None or torch.device(device) == self.device)
        return self if same else self._derived("to", dtype=dtype, device=device)

    def gated(self, masks: Tensor) -> ShardedMap:
        return self._derived("gated", self._own(masks=masks))

    def restricted(self, blocks: Tensor) -> ShardedMap:
        return self._derived("restricted", blocks=blocks)

    def centered(self, weight: Tensor, dtype: torch.dtype) -> ShardedMap:
        if not self.in_memory:
            return self
        mean = self.rmatvec(weight[:, None])[..., 0]
        return self._derived("shifted", mean=mean, dtype=dtype)

    def rows(self, index: Tensor | slice) -> ShardedMap:
        index = torch.arange(self.n_samples)[index.cpu() if isinstance(index, Tensor) else index]
        owner, position = torch.empty(self.n_samples, dtype=torch.int64), torch.empty(self.n_samples, dtype=torch.int64)
        for rank, places in enumerate(self.places):
            owner[places] = rank
            position[places] = torch.arange(len(owner[places]))
        found = [(owner[index] == rank).nonzero()[:, 0] for rank in range(len(self.places))]
        own = [{"index": position[index[places]]} for places in found]
        return self._derived("rows", own, [_as_slice(places) for places in found], len(index))

    # Costs

    @property
    def _share(self) -> float:
        """Samples of all ranks over those of rank 0."""
        return self.n_samples / max(1, self.local.n_samples)

    @property
    def n_stored(self) -> int:
        return int(self._share * self.local.n_stored)

    def _work_of_messages(self, n_numbers: int) -> float:
        """Work of one command that sends so many numbers."""
        seconds, rate = self._team.ranks.costs
        return self.rates.product * (seconds + 8 * n_numbers / rate)

    def product_work(self, n_outputs: int) -> float:
        n_numbers = n_outputs * (math.prod(self.feature_shape) + self.n_samples)
        return self.local.product_work(n_outputs) + self._work_of_messages(n_numbers)

    def gram_work(self) -> float:
        p = math.prod(self.feature_shape)
        return float(self.local.n_samples * p * p) + self._work_of_messages(p * p)


def _as_slice(places: Tensor) -> _Places:
    """Positions as a slice where they follow each other: views in place of copies."""
    if len(places) and bool((places.diff() == 1).all()):
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def on_all_ranks(local: LinearMap, work: Callable[[LinearMap], _T], ranks: Ranks | None) -> _T:
    """Call `work` with the map of all ranks' samples, on rank 0; the others multiply for it. All return its result.

    Parameters
    ----------
    local : LinearMap
        The map of this rank's samples, on ranks of equal ``feature_shape`` and precision. The samples of all ranks
        follow each other by rank.
    work : callable
        Called on rank 0 with a ``ShardedMap``; the other ranks' is not called. Its result is pickled to them.
    ranks : Ranks or None
        As from ``ranks()``. None: `work` is called with `local`.

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
    described = ranks.all((local.n_samples, tuple(local.feature_shape), local.dtype, local.in_memory))
    _check_alike(described)
    ranks.measure()
    team, ranks.busy = _Team(ranks, local), True
    try:
        return _lead(team, described, work) if ranks.rank == 0 else _follow(team)
    finally:
        ranks.busy = False


def _follow(team: _Team) -> Any:
    end = team.follow()
    if end.error is not None:
        raise end.error
    return end.result


def _lead(team: _Team, described: list[Any], work: Callable[[LinearMap], _T]) -> _T:
    ends = torch.tensor([0, *(part[0] for part in described)]).cumsum(0).tolist()
    places: list[_Places] = [slice(*pair) for pair in pairwise(ends)]
    try:
        local = team.maps[0]
        result = work(ShardedMap(team, 0, places, local, ends[-1], local.in_memory, local.memory_limit))
    except BaseException as error:
        with suppress(RuntimeError):  # where that is why it ends, the others know
            team.end(_End(error=_plain(error)))
        raise
    team.end(_End(result))
    return result


def _plain(error: BaseException) -> BaseException:
    """An error as other ranks raise it: of its kind where that is made of a message alone."""
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt(str(error))
    for kind in (ValueError, TypeError, RuntimeError):
        if isinstance(error, kind):
            return kind(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def _check_alike(described: list[tuple[int, tuple[int, ...], torch.dtype, bool]]) -> None:
    """Raise ``ValueError`` unless the maps of the ranks go together."""
    for rank, (n_samples, *_) in enumerate(described):
        if n_samples == 0:
            raise ValueError(f"rank {rank} has no samples; give each rank at least one, or start fewer ranks")
    for position, name in ((1, "shape of a sample"), (2, "precision"), (3, "place, in memory or not,")):
        first = described[0][position]
        for rank, description in enumerate(described):
            if description[position] != first:
                raise ValueError(
                    f"the {name} must be the same on all ranks, got {first} on rank 0 and {description[position]} on "
                    f"rank {rank}"
                )

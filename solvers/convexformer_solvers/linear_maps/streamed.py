"""The linear map of samples on a disk, of which some are read ahead while others are multiplied."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from convexformer_solvers.memory import as_bytes, free_memory
from convexformer_solvers.validation import check_kind

from .base import LinearMap, Slopes, slices, widened
from .config import CONFIG
from .dense import DenseMap
from .gated import GatedMap, checked_masks, gated_kernel
from .source import Source, Traffic

Places = Tensor | slice  # positions of samples

# Integers up to two bytes and all numbers of two bytes are exact in float32.
_SINGLE = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.uint16)


class StreamedMap(LinearMap):
    """``DenseMap``, or ``GatedMap``, of samples that stay on a disk; each product is one pass over them.

    A thread reads and converts the next samples while the last ones are multiplied. ``slopes_pass`` and ``moments`` are
    two products in one pass. Entries are checked in the first whole pass.

    Parameters
    ----------
    source : Source
        The samples, in any precision.
    masks : Tensor of shape (N, h), bool, optional
        Which samples each of the ``h`` gates lets through. Default: no gates.
    dtype : torch.dtype, optional
        Precision of the map. Default: float32 for what is stored in at most two bytes or in float32, else float64.
    device : torch.device or str, default="cpu"
        Where products are computed; samples are moved there through pinned memory.
    part : slice, optional
        Which samples of the source the map has, for example those of one of several processes. Default: all.
    chunk : int, optional
        Numbers that are read at once. Default: as in ``MapConfig``, more on an accelerator.
    memory_limit : int or str, optional
        Memory that algorithms may take for matrices of the features, in bytes or as text such as ``"2 GiB"``. Default:
        no limit.

    Raises
    ------
    TypeError
        If one of them is of another kind.
    ValueError
        If ``masks`` does not fit, ``part`` has a step or ``memory_limit`` is no size; by products, if an entry is not
        finite, with its place.

    Examples
    --------
    >>> from convexformer_solvers.linear_maps.source import Source
    >>> class Ones(Source):
    ...     shape, dtype = (5, 3, 2), torch.float16
    ...     def read(self, rows):
    ...         return torch.ones(rows.stop - rows.start, 3, 2, dtype=torch.float16)
    >>> A = StreamedMap(Ones())
    >>> A.matvec(torch.ones(3, 2, 1)).shape, A.dtype, A.traffic().passes
    (torch.Size([5, 1]), torch.float32, 1.0)
    """

    in_memory = False
    n_samples = property(lambda self: len(self._index))
    feature_shape = property(lambda self: (*self._n_gates, *self._sample_shape))
    dtype = property(lambda self: self._dtype)
    device = property(lambda self: self._device)
    n_stored = property(lambda self: self.n_samples * self._width)
    _n_gates = property(lambda self: () if self.masks is None else (self.masks.shape[1],))
    _n_further = property(lambda self: 0 if self.features is None else self.features.shape[1])
    _sample_shape = property(lambda self: (*self.source.shape[1:-1], self.source.shape[-1] + self._n_further))
    _width = property(lambda self: math.prod(self._sample_shape))
    _n_bytes = property(lambda self: self.n_samples * math.prod(self.source.shape[1:]) * self.source.dtype.itemsize)

    def __init__(
        self,
        source: Source,
        masks: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        part: slice | None = None,
        chunk: int | None = None,
        memory_limit: int | str | None = None,
    ) -> None:
        check_kind("source", source, Source, "open_source('samples.npy')")
        self.source, self.memory_limit, self._device = source, as_bytes(memory_limit), torch.device(device)
        self.chunk = chunk or CONFIG.read_at_once(self._device)
        self._dtype = dtype or (torch.float32 if source.dtype in _SINGLE else torch.float64)
        if part is not None and part.step not in (None, 1):
            raise ValueError(f"part must be a slice without a step, got {part}")
        self._index: range | Tensor = range(source.shape[0])[part or slice(None)]
        self._order: Tensor | None = None  # of samples as they are read; None where that is their own
        self.features: Tensor | None = None  # (N, e), which `widened` adds to what is read
        self._read_as = self._dtype  # the precision to which numbers are rounded as they are read
        self._moves: tuple[tuple[Tensor, torch.dtype], ...] = ()  # what is then subtracted, and the precision after it
        self._traffic = Traffic(self._n_bytes)
        self.masks = None if masks is None else checked_masks(masks, self.n_samples).to(self._device)

    def _like(self, **changes: Any) -> StreamedMap:
        """The map of the same source with other attributes."""
        result = copy.copy(self)
        vars(result).update(changes)
        return result

    def gated(self, masks: Tensor) -> StreamedMap:
        return self._like(masks=checked_masks(masks, self.n_samples).to(self._device))

    def widened(self, features: Tensor) -> StreamedMap:
        features = features.to(device=self._device, dtype=self._dtype)
        moves = tuple((torch.nn.functional.pad(mean, (0, features.shape[1])), dtype) for mean, dtype in self._moves)
        features = features if self.features is None else torch.cat([self.features, features], 1)
        return self._like(features=features, _moves=moves)

    def centered(self, weight: Tensor, dtype: torch.dtype) -> StreamedMap:
        return self if self.masks is not None else self.shifted(self.rmatvec(weight[:, None])[..., 0], dtype)

    def shifted(self, mean: Tensor, dtype: torch.dtype) -> StreamedMap:
        return self if self.masks is not None else self._like(_dtype=dtype, _moves=(*self._moves, (mean, dtype)))

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> StreamedMap:
        dtype, device = dtype or self._dtype, torch.device(device or self._device)
        if (dtype, device) == (self._dtype, self._device):
            return self
        masks = None if self.masks is None else self.masks.to(device)
        read_as = self._read_as if self._moves else dtype  # means are subtracted in the higher precision
        features = None if self.features is None else self.features.to(device, read_as)
        moves = [(mean.to(device), after) for mean, after in self._moves]
        if moves:
            moves[-1] = moves[-1][0], dtype
        changes = {"_dtype": dtype, "_device": device, "_read_as": read_as, "masks": masks, "features": features}
        return self._like(_moves=tuple(moves), **changes)

    def rows(self, index: Tensor | slice) -> LinearMap:
        masks = None if self.masks is None else self.masks[index]
        features = None if self.features is None else self.features[index]
        if isinstance(index, slice) and index.step in (None, 1) and self._order is None:
            chosen: range | Tensor = self._index[index]
            order = None
        else:
            own = self._index  # of a range torch would read one number after the other
            rows = torch.arange(own.start, own.start + len(own)) if isinstance(own, range) else own
            if self._order is not None:  # samples stand elsewhere than they are read
                rows = rows[self._order.argsort()]
            chosen, order = rows[index if isinstance(index, slice) else index.cpu()].sort(stable=True)
            order = order if bool((order.diff() < 0).any()) else None
        result = self._like(_index=chosen, _order=order, masks=masks, features=features)
        if result.n_stored > self.chunk:
            return result
        return DenseMap(result.tensor()) if masks is None else GatedMap(result.tensor(), masks)

    def tensor(self) -> Tensor:
        """The samples in memory, shape ``(N, *block_shape, d)``."""
        rows = self._like(masks=None)._of_samples(lambda part: part.as_matrix(), (self._width,), self._dtype)
        return rows.view(self.n_samples, *self._sample_shape)

    # Reading

    def traffic(self) -> Traffic:
        return replace(self._traffic)

    def _plan(self, height: int) -> Iterator[tuple[Places, Places]]:
        """The samples in parts of so many at most, as they are read: their positions in the map and in the source."""
        for part in slices(self.n_samples, height):
            index = self._index[part]
            rows = slice(index.start, index.stop) if isinstance(index, range) else index
            yield part if self._order is None else self._order[part], rows

    def _read(self, rows: Places) -> Tensor:
        """Samples of the source in the precision of the map, on the device if it has streams."""
        began = time.perf_counter()
        values = self.source.read(rows) if isinstance(rows, slice) else self.source.take(rows)
        self._traffic.read_bytes += values.numel() * values.element_size()
        if self._device.type == "cuda":
            values = values.pin_memory().to(self._device, non_blocking=True)
        values = values.to(self._read_as)
        if not self._traffic.is_finite and not math.isfinite(float(values.sum())):  # a sum is fast, and may overflow
            self._check_chunk(rows, values)
        self._traffic.read_seconds += time.perf_counter() - began
        return values

    def _check_chunk(self, rows: Places, values: Tensor) -> None:
        """Raise ``ValueError`` that says where an entry is not finite, if one is."""
        bad = (~torch.isfinite(values.flatten(1)).all(1)).nonzero()[:, 0]
        if len(bad):
            first = int(bad[0])
            row = rows.start + first if isinstance(rows, slice) else int(rows[first])
            raise ValueError(f"the data must be finite, got NaN or infinite values in {self.source.place(row)}")

    def _parts(self) -> Iterator[tuple[Places, LinearMap]]:
        """One pass: positions of samples with their map, of which the next is read meanwhile."""
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

        def read(rows: Places) -> Tensor:
            with torch.no_grad(), torch.cuda.stream(stream):
                return self._read(rows)

        plan = list(self._plan(max(1, self.chunk // self._width)))
        if not plan:  # of some samples, another rank may have all
            return
        with ThreadPoolExecutor(1, "reader") as pool:
            ahead = pool.submit(read, plan[0][1])
            for (places, _), following in zip(plan, [*plan[1:], None], strict=True):
                began = time.perf_counter()
                values = ahead.result()
                self._traffic.waited_seconds += time.perf_counter() - began
                if stream is not None:
                    torch.cuda.current_stream(self._device).wait_stream(stream)
                    values.record_stream(torch.cuda.current_stream(self._device))
                if following is not None:
                    ahead = pool.submit(read, following[1])
                values = values.to(self._device)  # of a device without streams, as a thread may not know it
                yield places, self._map_of(places, values)
        if isinstance(self._index, range) and self._n_bytes == self._traffic.total_bytes:
            self._traffic.is_finite = True

    def _map_of(self, places: Places, values: Tensor) -> LinearMap:
        values = values if self.features is None else widened(values, self.features[places])
        for mean, dtype in self._moves:
            values = (values - mean).to(dtype)
        return DenseMap(values) if self.masks is None else GatedMap(values, self.masks[places])

    # Products

    def matvec(self, coef: Tensor) -> Tensor:
        return self._of_samples(lambda part: part.matvec(coef), coef.shape[-1:], coef.dtype)

    def _of_samples(self, product: Callable[[LinearMap], Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What a product gives for each sample, of that shape."""
        result = torch.empty((self.n_samples, *shape), dtype=dtype, device=self._device)
        for places, part in self._parts():
            result[places] = product(part)
        return result

    def rmatvec(self, values: Tensor) -> Tensor:
        result = values.new_zeros((*self.feature_shape, values.shape[1]))
        for places, part in self._parts():
            result += part.rmatvec(values[places])
        return result

    def slopes_pass(self, coef: Tensor, slopes: Slopes) -> tuple[Tensor, Tensor]:
        pred, back = coef.new_empty((self.n_samples, coef.shape[-1])), None
        for places, part in self._parts():
            pred[places], product = part.slopes_pass(coef, slopes.rows(places))
            back = product if back is None else back.add_(product)
        return pred, self.rmatvec(slopes.at(pred)) if back is None else back

    def moments(self, weight: Tensor, right: Tensor, single: bool = False) -> tuple[Tensor, Tensor]:
        p = math.prod(self.feature_shape)
        several = weight.shape[1:]
        gram, product = weight.new_zeros((*several, p, p)), weight.new_zeros((*several, p, right.shape[1]))
        for places, part in self._parts():
            of_part = part.moments(weight[places], right[places], single)
            gram += of_part[0]
            product += of_part[1]
        return gram, product

    def add_gram(
        self, result: Tensor, left: Tensor, right: Tensor, weight: Tensor, center: Tensor | None = None
    ) -> None:
        for places, part in self._parts():
            part.add_gram(result, left, right, weight[places], center)

    def nonnegative(self, coef: Tensor) -> Tensor:
        return self._of_samples(lambda part: part.nonnegative(coef), coef.shape[-1:], torch.bool)

    def columns(self, blocks: Tensor) -> Tensor:
        size = self.n_samples * len(blocks) * self.feature_shape[-1] * self._dtype.itemsize
        if self.memory_limit is not None and size > self.memory_limit:
            raise ValueError(
                f"{size / 1e9:.3g} GB of the data are needed in memory at once, and memory_limit is "
                f"{self.memory_limit / 1e9:.3g} GB; raise it, or use fewer features, gates or samples"
            )
        shape = (len(blocks), self.feature_shape[-1])
        return self._of_samples(lambda part: part.columns(blocks), shape, self._dtype)

    def full_kernel(self, dtype: torch.dtype) -> Tensor:
        if self.masks is None:
            return super().full_kernel(dtype)
        return gated_kernel(self._like(masks=None).full_kernel(dtype), self.masks)

    def gram_work(self) -> float:
        if self.smaller_side < self.n_samples:
            return super().gram_work()
        # The gates share the kernel of the data, of which each pass gives the part of some blocks.
        n_passes = math.ceil(math.prod(self._sample_shape[:-1]) / self.blocks_of_a_pass)
        reading = n_passes * self.rates.work_of_a_read * self.n_stored
        return float(self.n_samples**2) * (self._width + sum(self._n_gates)) + reading

    def along(self, blocks: Tensor, units: Tensor) -> Tensor:
        result = units.new_empty((len(blocks), self.n_samples))
        for places, part in self._parts():
            result[:, places] = part.along(blocks, units)
        return result

    def largest(self) -> float:
        return max((part.largest() for _, part in self._parts()), default=0.0)

    def weighted_squares(self, weight: Tensor) -> Tensor:
        return sum((part.weighted_squares(weight[places]) for places, part in self._parts()), weight.new_zeros(()))

    def passes_of_gram(self, n_outputs: int) -> float:
        # What makes samples anew may take any time, and small data or few features are not worth a trial.
        is_large = self.n_stored >= 4 * CONFIG.chunk and self.gram_work() > self.product_work(n_outputs)
        if not (is_large and self.source.is_mapped):
            return 0.0
        parts = list(self._plan(max(1, self.chunk // self._width)))
        chosen = parts[len(parts) // 2 :][:2]
        # Where there is room for the file the system holds what it has read.
        again = chosen[0 if self._n_bytes <= (free_memory(torch.device("cpu")) or 0) else -1][1]
        part = self._map_of(chosen[0][0], self._read(chosen[0][1]).to(self._device))
        ones = torch.ones((part.n_samples, n_outputs), dtype=torch.float64, device=self._device)
        coef = part.rmatvec(ones)

        def seconds(run: Callable[[], Tensor]) -> float:
            began = time.perf_counter()
            run().flatten()[0].item()  # which waits for a device
            return time.perf_counter() - began

        of_products = min(seconds(lambda: part.rmatvec(part.matvec(coef))) for _ in range(2))
        of_gram = seconds(lambda: part.moments(ones[:, 0], ones, single=self._dtype == torch.float32)[0])
        return of_gram / max(of_products, seconds(lambda: self._read(again)))  # these two go on at the same time

    def product_work(self, n_outputs: int) -> float:
        # A number from the disk is read, converted and written before it is read again.
        return 2 * self.n_stored * max(2.0 * n_outputs, 2 * self.rates.work_of_a_read)

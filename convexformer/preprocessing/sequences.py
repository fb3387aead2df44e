"""Samples of any number of tokens: arrays, ragged lists, masks, and a pass over them in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convexformer_solvers import Traffic
from convexformer_solvers.linear_maps.base import slices
from convexformer_solvers.linear_maps.parts import InParts


@dataclass(frozen=True)
class PoolingConfig:
    """Sizes that poolings of tokens go by.

    Parameters
    ----------
    temporary : int, default=2**20
        Numbers of a temporary of one chunk of samples on a CPU: 4 MiB in float32. Fewer take more calls; the memory of
        much larger ones goes back to the system after each chunk.
    temporary_on_device : int, default=2**22
        The same on an accelerator, where calls take longer: 16 MiB in float32.
    tokens_per_center : int, default=256
        Tokens that k-means sees for each of its centres; more of them hardly move the centres.
    """

    temporary: int = 2**20
    temporary_on_device: int = 2**22
    tokens_per_center: int = 256

    def limit(self, device: torch.device) -> int:
        """Numbers of a temporary on a device."""
        return self.temporary if device.type == "cpu" else self.temporary_on_device


CONFIG = PoolingConfig()


class TokenSequences(InParts, ABC):
    """Samples, each a number of tokens of one width.

    What depends on all samples is asked by ``each_part``, ``rows_made`` and ``map_made``, so that it is the same of
    samples that are spread over processes.

    Attributes
    ----------
    lengths : Tensor of int64 of shape (N,)
        Tokens of each sample; at least one.
    n_features : int
        Width of the tokens.
    dtype : torch.dtype
        Precision to compute in: that of the tokens, float32 for numbers of less than four bytes, else float64.
    device : torch.device
        Where the tokens are.
    """

    lengths: Tensor
    n_features: int
    dtype: torch.dtype
    device: torch.device

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def padded(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Tokens ``(B, n, d)`` of some samples, zero where there are none, and which are real, ``(B, n)``."""

    @abstractmethod
    def rows(self, index: Tensor) -> TokenSequences:
        """Some of the samples, by their positions."""

    @abstractmethod
    def to(self, device: torch.device) -> TokenSequences:
        """The samples on a device; themselves where they are there."""

    def chunks(self, n_weightings: int = 1) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Samples a few at a time, and what ``padded`` gives of them.

        They are so few that their tokens, and so many weights per token as the caller makes, are small temporaries.
        """
        per_sample = self.longest * (self.n_features + n_weightings) + n_weightings * self.n_features
        size = max(1, CONFIG.limit(self.device) // per_sample)
        for rows in slices(len(self), size):
            yield rows, *self.padded(rows)

    @property
    def source(self) -> TokenSequences:
        """The samples as they were given."""
        return self

    @property
    def longest(self) -> int:
        """Tokens of a sample at most, real or not, that ``padded`` reads."""
        return int(self.lengths.max()) if len(self) else 0

    @property
    def n_columns(self) -> int:
        """Tokens of each sample, real or not, in the array that was given; of a list, those of the longest sample."""
        return self.longest

    def place(self, sample: int) -> str:
        """Where a sample is, for messages."""
        return f"X[{sample}]"

    def traffic(self) -> Traffic | None:
        """What has been read of samples on a disk, by these and all that share their source; None of others."""
        return None

    def changed(self, tokens: Tensor) -> Tensor:
        """Some tokens of the source as they are here."""
        return tokens

    def mapped(self, change: Callable[[Tensor], Tensor]) -> TokenSequences:
        """The samples with their tokens changed, in the precision `dtype`; nothing is computed before it is read."""
        return _MappedSequences(self, change)


class PaddedSequences(TokenSequences):
    """Samples in one array.

    Parameters
    ----------
    tokens : Tensor of shape (N, n, d)
        The tokens; shared, not copied.
    mask : Tensor of bool of shape (N, n), optional
        Which of them are real. Default: all.
    """

    n_columns = property(lambda self: self._tokens.shape[1])

    def __init__(self, tokens: Tensor, mask: Tensor | None = None) -> None:
        self._tokens, self._mask = tokens, mask
        whole = torch.full((len(tokens),), tokens.shape[1], dtype=torch.int64, device=tokens.device)
        self.lengths = whole if mask is None else mask.sum(1)
        self.n_features, self.dtype, self.device = tokens.shape[2], working_precision(tokens.dtype), tokens.device

    def padded(self, rows: slice) -> tuple[Tensor, Tensor]:
        tokens = self._tokens[rows].to(self.dtype)
        if self._mask is None:
            return tokens, torch.ones(tokens.shape[:2], dtype=torch.bool, device=self.device)
        mask = self._mask[rows]
        longest = int(mask.any(0).nonzero().max()) + 1
        tokens, mask = tokens[:, :longest], mask[:, :longest]
        return tokens.masked_fill(~mask[..., None], 0.0), mask

    def rows(self, index: Tensor) -> PaddedSequences:
        return PaddedSequences(self._tokens[index], None if self._mask is None else self._mask[index])

    def to(self, device: torch.device) -> PaddedSequences:
        return PaddedSequences(self._tokens.to(device), None if self._mask is None else self._mask.to(device))


class RaggedSequences(TokenSequences):
    """Samples in arrays of their own.

    Parameters
    ----------
    samples : sequence of Tensor of shape (length, d)
        The tokens of each sample; shared, not copied.
    index : Tensor of int64, optional
        Positions of the samples in the sequence. Default: all, in order.
    """

    def __init__(self, samples: Sequence[Tensor], index: Tensor | None = None) -> None:
        self._samples, self.device = samples, samples[0].device
        self._index = torch.arange(len(samples)) if index is None else index.cpu()
        lengths = [len(sample) for sample in self._chosen(slice(None))]
        self.lengths = torch.tensor(lengths, dtype=torch.int64).to(self.device)
        self.n_features, self.dtype = samples[0].shape[1], working_precision(samples[0].dtype)

    def _chosen(self, rows: slice) -> list[Tensor]:
        return [self._samples[i] for i in self._index[rows].tolist()]

    def padded(self, rows: slice) -> tuple[Tensor, Tensor]:
        tokens = torch.nn.utils.rnn.pad_sequence([part.to(self.dtype) for part in self._chosen(rows)], True)
        places = torch.arange(tokens.shape[1], device=self.device)
        return tokens, places < self.lengths[rows, None]

    def rows(self, index: Tensor) -> RaggedSequences:
        return RaggedSequences(self._samples, self._index[index.cpu()])

    def to(self, device: torch.device) -> RaggedSequences:
        return RaggedSequences([sample.to(device) for sample in self._samples], self._index)


class _MappedSequences(TokenSequences):
    """Samples whose tokens go through a function when they are read."""

    source = property(lambda self: self._inner.source)

    def __init__(self, source: TokenSequences, change: Callable[[Tensor], Tensor]) -> None:
        self._inner, self._change = source, change
        self.lengths, self.n_features = source.lengths, source.n_features
        self.dtype, self.device = source.dtype, source.device

    def changed(self, tokens: Tensor) -> Tensor:
        return self._change(self._inner.changed(tokens))

    def traffic(self) -> Traffic | None:
        return self._inner.traffic()

    def padded(self, rows: slice) -> tuple[Tensor, Tensor]:
        tokens, mask = self._inner.padded(rows)
        return self._change(tokens).masked_fill(~mask[..., None], 0.0), mask

    def rows(self, index: Tensor) -> TokenSequences:
        return _MappedSequences(self._inner.rows(index), self._change)

    def to(self, device: torch.device) -> TokenSequences:
        return _MappedSequences(self._inner.to(device), self._change)


def working_precision(dtype: torch.dtype) -> torch.dtype:
    """Precision to compute in with tokens of another one: float32 for what is exact in it, as half precision."""
    return torch.float32 if dtype.itemsize < 4 or dtype == torch.float32 else torch.float64


def draw_tokens(
    samples: TokenSequences, count: int, seed: int, sample_weight: NDArray[np.float64] | None = None
) -> Tensor:
    """Distinct tokens at random, each as likely as any other.

    Neither the order of samples and tokens nor repeats nor the sizes of weights change the draw: those tokens are taken
    whose hash, which the seed chooses, is smallest. Samples of weight zero are left out. Hashes are those of tokens as
    they were given, so that standardising, whose moments depend on weights, changes no draw either. There are fewer
    than `count` where not so many differ, in the order of their hashes, which is random.

    Examples
    --------
    >>> samples = PaddedSequences(torch.tensor([[[1.0], [2.0]], [[2.0], [3.0]]]))
    >>> sorted(draw_tokens(samples, 5, seed=0).flatten().tolist())
    [1.0, 2.0, 3.0]
    """
    own = None if sample_weight is None else {"counted": torch.as_tensor(sample_weight > 0, device=samples.device)}
    of_parts = samples.each_part(_drawn, own, count=count, seed=seed)
    tokens, keys = (torch.cat(found) for found in zip(*of_parts, strict=True))
    return samples.changed(_smallest(tokens, keys, count)[0].to(samples.device))


def _drawn(samples: TokenSequences, count: int, seed: int, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The draw from one part of the samples: tokens as they were given, with their hashes."""
    stream = np.random.RandomState(seed)
    factors = stream.randint(-(2**63), 2**63 - 1, size=samples.n_features, dtype=np.int64) | 1  # odd ones lose no bit
    multipliers = torch.as_tensor(factors, device=samples.device)
    shift = int(stream.randint(-(2**63), 2**63 - 1, dtype=np.int64))  # without it a token of zeros had one hash for all
    found = torch.empty((0, samples.n_features), dtype=samples.dtype, device=samples.device)
    keys = torch.empty((0, 2), dtype=torch.int64, device=samples.device)
    for rows, tokens, mask in samples.source.chunks(samples.n_features):  # two integers of 64 bits a number
        real = mask if counted is None else mask & counted[rows, None]
        fresh, fresh_keys = _smallest(tokens[real], _hashes(tokens[real], multipliers, shift), count)
        found, keys = _smallest(torch.cat([found, fresh]), torch.cat([keys, fresh_keys]), count)
    return found, keys


def _smallest(tokens: Tensor, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The distinct tokens of the smallest hashes, in their order."""
    order = keys[:, 1].sort(stable=True).indices
    order = order[keys[order, 0].sort(stable=True).indices]
    keys = keys[order]
    first = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
    first[1:] = (keys[1:] != keys[:-1]).any(1)
    return tokens[order[first][:count]], keys[first][:count]


def _hashes(tokens: Tensor, multipliers: Tensor, shift: int) -> Tensor:
    """Two integers of 64 bits per token, shape (N, 2), in the order in which they count.

    The first is of its numbers in single precision, so that precision changes no draw. The second is of all their bits
    and tells apart tokens that are equal in single precision.
    """
    keys = _hashed((tokens.float() + 0.0).view(torch.int32).long(), multipliers, shift)  # minus zero is zero
    if tokens.dtype != torch.float64:
        return keys[:, None].expand(-1, 2)
    return torch.stack([keys, _hashed((tokens + 0.0).view(torch.int64), multipliers, shift)], 1)


def _hashed(bits: Tensor, multipliers: Tensor, shift: int) -> Tensor:
    total = (bits * multipliers).sum(-1) + shift
    for factor, places in ((-4658895280553007687, 30), (-7723592293110705685, 27)):  # the mixing steps of splitmix64
        total = (total ^ (total >> places)) * factor
    return total ^ (total >> 31)

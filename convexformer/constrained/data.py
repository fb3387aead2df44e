"""Data sets of descent-constrained training and their batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate


class Samples(Protocol):
    """A map-style dataset, whose length is known."""

    def __len__(self) -> int: ...
    def __getitem__(self, position: int, /) -> Any: ...


Data = Samples | Sequence[Tensor]


def as_dataset(data: Any, name: str) -> Samples:
    """Samples as a dataset."""
    dataset: Any
    if isinstance(data, Dataset):
        dataset = data
    else:
        tensors = tuple(data) if isinstance(data, (tuple, list)) else ()
        if not tensors or not all(torch.is_tensor(part) and part.ndim > 0 for part in tensors):
            raise ValueError(f"{name} must be a Dataset or a sequence of tensors with samples along the first axis")
        lengths = {len(part) for part in tensors}
        if len(lengths) != 1:
            raise ValueError(f"{name} must hold tensors of as many samples each, got {sorted(lengths)}")
        dataset = TensorDataset(*tensors)
    if len(dataset) == 0:
        raise ValueError(f"{name} must hold at least one sample, got none")
    samples: Samples = dataset
    return samples


def batches(count: int, batch_size: int, seeds: tuple[int, int]) -> tuple[Tensor, ...]:
    """Positions of the samples of each batch, in an order that depends on the seeds alone."""
    order = torch.as_tensor(np.random.default_rng(seeds).permutation(count))
    return order.split(batch_size)


def batch_of(dataset: Samples, index: Tensor) -> Any:
    """The samples at some positions."""
    if isinstance(dataset, TensorDataset):
        return tuple(part[index.to(part.device)] for part in dataset.tensors)
    return default_collate([dataset[i] for i in index.tolist()])

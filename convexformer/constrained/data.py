"""Data sets of descent-constrained training, their batches, and the losses of the layers on a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from .reports import NonFiniteLossError


class Samples(Protocol):
    """A map-style dataset, whose length is known."""

    def __len__(self) -> int: ...
    def __getitem__(self, position: int, /) -> Any: ...


Data = Samples | Sequence[Tensor]
LayerLosses = Callable[[nn.Module, Any], Tensor]


def as_dataset(data: Any, name: str) -> Samples:
    """Samples as a dataset."""
    dataset: Any
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        dataset = data
    else:
        tensors = tuple(data) if isinstance(data, (tuple, list)) else ()
        if not tensors or not all(torch.is_tensor(part) and part.ndim > 0 for part in tensors):
            raise ValueError(
                f"{name} must be a Dataset or a sequence of tensors with samples along the first axis, got "
                f"{type(data).__name__}; a Dataset must be one of known length"
            )
        lengths = {len(part) for part in tensors}
        if len(lengths) != 1:
            raise ValueError(f"{name} must hold tensors of as many samples each, got {sorted(lengths)}")
        dataset = TensorDataset(*tensors)
    if len(dataset) == 0:
        raise ValueError(f"{name} must hold at least one sample, got none")
    return dataset


def batches(count: int, batch_size: int, seeds: tuple[int, int]) -> tuple[Tensor, ...]:
    """Positions of the samples of each batch, in an order that depends on the seeds alone."""
    order = torch.as_tensor(np.random.default_rng(seeds).permutation(count))
    return order.split(batch_size)


def batch_of(dataset: Samples, index: Tensor) -> Any:
    """The samples at some positions."""
    if isinstance(dataset, TensorDataset):
        return tuple(part[index.to(part.device)] for part in dataset.tensors)
    return default_collate([dataset[i] for i in index.tolist()])


def check_layer_losses(losses: Any, n_layers: int | None, n_samples: int, step: int) -> None:
    """Raise unless losses are finite and of shape ``(n_layers, n_samples)``; ``n_layers`` may not be known yet."""
    if not torch.is_tensor(losses) or losses.ndim != 2 or len(losses) < 2:
        found = f"shape {tuple(losses.shape)}" if torch.is_tensor(losses) else type(losses).__name__
        raise ValueError(
            f"layer_losses must return a tensor of shape (n_layers, n_samples) with two layers or more, got {found}"
        )
    if losses.shape[1] != n_samples:
        raise ValueError(
            f"layer_losses must return one loss of each layer for each of the {n_samples} samples of a batch, of shape "
            f"(n_layers, {n_samples}), got {tuple(losses.shape)}"
        )
    if n_layers is not None and len(losses) != n_layers:
        raise ValueError(f"layer_losses must return the losses of {n_layers} layers as before, got {len(losses)}")
    if not bool(torch.isfinite(losses).all()):
        layer = int((~torch.isfinite(losses)).any(1).nonzero()[0]) + 1
        raise NonFiniteLossError(
            f"the loss of layer {layer} became infinite or nan in step {step}; the model has the weights chosen so "
            "far. Try a smaller lr or dual_lr, or stop_gradient=True"
        )

"""Learning-rate schedules."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LRScheduler

# From an optimiser and the steps that it is to take.
SCHEDULES: dict[str, Callable[[Optimizer, int], LRScheduler]] = {
    "cosine": CosineAnnealingLR,
    "constant": lambda optimizer, n_steps: ConstantLR(optimizer, factor=1.0),
}

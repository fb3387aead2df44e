"""Random numbers on the device of their generator, whatever torch's default device is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def standard_normal(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype | None = None) -> Tensor:
    """Standard normal numbers from a generator, by default in torch's default precision.

    Examples
    --------
    >>> with torch.device("meta"):
    ...     standard_normal((2, 3), torch.Generator()).device
    device(type='cpu')
    """
    return torch.randn(tuple(shape), generator=generator, dtype=dtype, device=generator.device)

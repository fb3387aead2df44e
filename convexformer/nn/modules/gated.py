"""Fixed gates as a part of torch modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from convexformer.gates import Gates


class GatedModule(nn.Module):
    """A module whose ``state_dict`` holds its gates, in float64 whatever the precision of the weights.

    Attributes
    ----------
    gates : Gates or None
        The gates, which a subclass sets.

    Examples
    --------
    >>> class Gated(GatedModule):
    ...     gates = None
    >>> loaded = Gated()
    >>> loaded.set_extra_state({"u1": torch.ones(4, 2), "u2": torch.ones(4, 3)})
    >>> len(loaded.gates)
    4
    """

    gates: Gates | None

    def get_extra_state(self) -> dict[str, Tensor]:
        """Gates for ``state_dict``; they are no parameters, but without them the weights mean nothing."""
        return {} if self.gates is None else {"u1": torch.tensor(self.gates.u1), "u2": torch.tensor(self.gates.u2)}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Gates from a ``state_dict``."""
        self.gates = Gates(*(state[name].numpy(force=True) for name in ("u1", "u2"))) if "u1" in state else None

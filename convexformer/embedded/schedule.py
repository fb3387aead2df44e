"""How the weight of the penalty changes during training."""

from __future__ import annotations

from dataclasses import dataclass

from convexformer.validation import check_integers, check_positive


@dataclass(frozen=True)
class FallingAlpha:
    """Weight of the penalty at each step: held, then falling geometrically, then held."""

    last: float
    first: float | None
    hold_steps: int
    fall_steps: int

    def __post_init__(self) -> None:
        check_positive(alpha=self.last)
        if self.first is not None:
            check_positive(first_alpha=self.first)
            if self.first < self.last:
                raise ValueError(f"first_alpha must be at least alpha={self.last}, got {self.first!r}")
        check_integers(0, hold_steps=self.hold_steps, fall_steps=self.fall_steps)

    def __call__(self, step: int) -> float:
        if self.first is None or step >= self.hold_steps + self.fall_steps:
            return self.last
        share = (step - self.hold_steps) / self.fall_steps if step > self.hold_steps else 0.0
        return self.first * (self.last / self.first) ** share

"""Checks of the options of primal-dual training."""

from __future__ import annotations

import math
from typing import Any

import torch

from convexformer.validation import check_one_of, check_positive, is_integer
from convexformer_solvers.validation import check_counts, is_real

OPTIMIZERS: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
_CHOICES = {
    "objective": ("constrained", "last", "sum"),
    "slack_update": ("decay", "explicit"),
    "dual_optimizer": ("adam", "sgd"),
    "dual_update": ("step", "epoch"),
    "optimizer": tuple(OPTIMIZERS),
}


def check_options(**options: Any) -> None:
    """Raise ``ValueError`` naming the first option that is not as described; constraints check their own."""
    for name, known in _CHOICES.items():
        check_one_of(known, **{name: options[name]})
    check_positive(dual_lr=options["dual_lr"], lr=options["lr"])
    for name in ("weight_decay", "n_errors"):
        if not (is_real(options[name]) and 0 <= options[name] < math.inf):
            raise ValueError(f"{name} must be a finite number from 0, got {options[name]!r}")
    resilience, seed = options["resilience"], options["seed"]
    if resilience is not None and not (is_real(resilience) and 0 < resilience < math.inf):
        raise ValueError(f"resilience must be a positive finite number or None, got {resilience!r}")
    has_explicit = resilience is not None and options["slack_update"] == "explicit"
    if has_explicit and resilience * options["dual_lr"] >= 2:
        raise ValueError(
            f"resilience must be below 2 / dual_lr = {2 / options['dual_lr']:g} with slack_update='explicit', whose "
            f"steps of dual_lr would not settle, got {resilience!r}; use slack_update='decay' or a smaller dual_lr"
        )
    if options["reset_slacks"] and not has_explicit:
        raise ValueError("reset_slacks must be False without resilience and slack_update='explicit', got True")
    if not is_integer(options["warmup_epochs"], 0):
        raise ValueError(f"warmup_epochs must be an integer from 0, got {options['warmup_epochs']!r}")
    if not is_integer(seed, 0) or seed >= 2**31:
        raise ValueError(f"seed must be an integer from 0 and below 2**31, got {seed!r}")
    check_counts(batch_size=options["batch_size"])

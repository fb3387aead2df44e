"""Seconds of constrained steps beside unconstrained ones. Run: python benchmarks/constrained_steps.py."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmark_utils.machine import machine
from benchmark_utils.turns import median_seconds
from torch import Tensor

from convexformer.constrained import PrimalDual
from convexformer.unfolded import DUST, UnrolledTransformer

# Samples, tokens and width of a batch, and layers: frames of 160 x 160 pixels in patches of 16 x 16, and text.
SIZES = ((8, 100, 256, 3), (8, 100, 256, 7), (64, 32, 50, 5))
MODELS = {"UT": UnrolledTransformer, "DUST": DUST}


def layer_losses(model: Any, batch: tuple[Tensor]) -> Tensor:
    """Squared error of the reconstructions of all layers, of noisy tokens."""
    (clean,) = batch
    outputs = model.layer_outputs(clean + 0.1 * torch.randn_like(clean))
    return (outputs - clean).square().mean((2, 3))


def last_losses(model: Any, batch: tuple[Tensor]) -> Tensor:
    """The same of the last layer alone, without the reconstructions of the others, twice."""
    (clean,) = batch
    loss = (model(clean + 0.1 * torch.randn_like(clean)) - clean).square().mean((1, 2))
    return torch.stack([loss.detach(), loss])


def measure(model: str, size: tuple[int, int, int, int], repeats: int) -> dict[str, float]:
    """Median seconds of a step of each objective, the objectives taking turns."""
    n_samples, n_tokens, width, n_layers = size
    batch = (torch.rand(n_samples, n_tokens, width),)
    steps = {}
    for objective, losses in OBJECTIVES.items():
        trainer = PrimalDual(MODELS[model](width, n_layers), losses, c_ref=1.0, objective=objective)
        steps[objective] = partial(trainer._take_step, batch, n_samples, ascends=objective == "constrained")
    return median_seconds(steps, repeats)


OBJECTIVES = {"last": last_losses, "constrained": layer_losses, "sum": layer_losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    records = []
    for model in MODELS:
        for size in SIZES:
            seconds = measure(model, size, options.repeats)
            records.append({"model": model, "size": list(size), "seconds": seconds})
            print(model, size, f"{seconds['constrained'] / seconds['last']:.2f}")
    if options.output:
        data = {**machine(options.threads), "repeats": options.repeats, "records": records}
        options.output.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Seconds of unfolded layers beside torch's encoder layer of equal width. Run: python benchmarks/layers.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmark_utils.machine import machine
from benchmark_utils.turns import median_seconds
from torch import Tensor, nn

from convexformer.unfolded import UnfoldedLayer

# Samples, tokens and width of a batch.
SIZES = ((32, 32, 64), (32, 64, 256), (8, 128, 512), (4, 512, 256))
N_HEADS = 4  # of torch's layer; its feed-forward part is four times as wide as its tokens, as usual


def contenders(width: int, device: str) -> dict[str, nn.Module]:
    """Layers of equal width."""
    encoder = nn.TransformerEncoderLayer(width, N_HEADS, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    layers = {
        "TransformerEncoderLayer": encoder,
        "aim": UnfoldedLayer(width, "aim"),
        "aim, jacobi": UnfoldedLayer(width, "aim", attention="jacobi"),
        "joint": UnfoldedLayer(width, "joint"),
    }
    return {name: layer.to(device) for name, layer in layers.items()}


def step(layer: nn.Module, tokens: Tensor) -> Callable[[], None]:
    """A pass forward and back."""

    def run() -> None:
        layer(tokens).square().mean().backward()
        if tokens.is_cuda:
            torch.cuda.synchronize()

    return run


def measure(size: tuple[int, int, int], repeats: int, device: str) -> dict[str, float]:
    """Median seconds of each layer, the layers taking turns."""
    n_samples, n_tokens, width = size
    torch.manual_seed(0)
    tokens = torch.randn(n_samples, n_tokens, width, device=device) / width**0.5
    steps = {name: step(layer, tokens.clone().requires_grad_()) for name, layer in contenders(width, device).items()}
    return median_seconds(steps, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    records: list[dict[str, Any]] = []
    for size in SIZES:
        seconds = measure(size, options.repeats, options.device)
        records.append({"size": list(size), "device": options.device, "seconds": seconds})
        base = seconds["TransformerEncoderLayer"]
        print(size, {name: f"{1e3 * value:.2f} ms ({value / base:.2f})" for name, value in seconds.items()})
    if options.output:
        data = {**machine(options.threads), "repeats": options.repeats, "records": records}
        options.output.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()

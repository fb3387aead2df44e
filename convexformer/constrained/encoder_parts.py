"""Parts of encoders and causal language models that readouts need, and noise on their embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from convexformer.unfolded.unrolled import UnrolledNetwork

FINAL_NORMS = ("norm", "ln_f", "layernorm", "final_layer_norm", "final_layernorm", "final_norm")


def base_of(model: Any) -> Any:
    """The model without its head."""
    return getattr(model, "base_model", model)


def sizes(model: Any) -> tuple[int, int]:
    """Width of the tokens, and number of layers."""
    if isinstance(model, UnrolledNetwork):
        return model.n_features, model.n_layers
    config = getattr(model, "config", None)
    width, n_layers = (getattr(config, name, None) for name in ("hidden_size", "num_hidden_layers"))
    if not isinstance(model, nn.Module) or width is None or n_layers is None:
        raise TypeError(
            "model must be a Hugging Face model, as AutoModel.from_pretrained(folder) loads one, with hidden_size and "
            f"num_hidden_layers in its configuration, or an UnrolledTransformer or DUST, got {type(model).__name__}"
        )
    return width, n_layers


def patch_sides(model: Any) -> tuple[int, int]:
    """Height and width of the patches of a vision model."""
    side = getattr(getattr(model, "config", None), "patch_size", None)
    if side is None:
        raise ValueError(
            f"readout='reconstruction' needs a model of image patches with patch_size in its configuration, as a ViT, "
            f"got {type(model).__name__}"
        )
    return (side, side) if isinstance(side, int) else tuple(side)


def final_norm(base: Any) -> Callable[[Tensor], Tensor] | None:
    """The normalisation after the last layer, if there is one; models as OPT have it in a part named decoder."""
    for part in (base, getattr(base, "decoder", None)):
        for name in FINAL_NORMS:
            norm = getattr(part, name, None)
            if isinstance(norm, nn.Module):
                return norm
    return None


@contextmanager
def noise_on_embeddings(base: Any, mask: Any, noise: float, generator: torch.Generator | None) -> Iterator[None]:
    """Let the embedding of the model give noisy ones; positions of tokens then stay what the ids make them."""
    if not noise:
        yield
        return
    calls = []

    def add(_module: nn.Module, _inputs: Any, embeddings: Tensor) -> Tensor:
        calls.append(1)
        return noisy(embeddings, mask, noise, generator)

    handle = base.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()
    if not calls:
        raise ValueError("embedding_noise needs a model that calls its get_input_embeddings(), which this one does not")


def noisy(embeddings: Tensor, mask: Any, noise: float, generator: torch.Generator | None) -> Tensor:
    """Embeddings with noise of a multiple of each sample's standard deviation."""
    place = embeddings.device if generator is None else generator.device
    drawn = torch.randn(embeddings.shape, generator=generator, device=place, dtype=embeddings.dtype)
    kept = torch.ones_like(embeddings[..., :1], dtype=torch.bool)
    if mask is not None and mask.shape == embeddings.shape[:-1]:
        kept = mask[..., None].bool()
    # Sums over a sample may be beyond the numbers of half precision; padding may hold what is no number.
    samples = embeddings.detach().to(torch.promote_types(embeddings.dtype, torch.float32)).masked_fill(~kept, 0)
    count = kept.sum((1, 2), keepdim=True) * embeddings.shape[-1]
    mean = samples.sum((1, 2), keepdim=True) / count
    deviation = ((samples - mean).masked_fill(~kept, 0).square().sum((1, 2), keepdim=True) / count).sqrt()
    return embeddings + noise * deviation.to(embeddings) * drawn.to(embeddings.device)

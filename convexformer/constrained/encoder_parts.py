"""Parts of encoders and causal language models that readouts need, and noise on their embeddings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from convexformer.unfolded.unrolled import UnrolledNetwork


def base_of(model: Any) -> Any:
    """The model without its head; DINOv3 names as its base what follows its embedding, and needs other inputs."""
    base, name = getattr(model, "base_model", model), getattr(model, "main_input_name", None)
    inputs = inspect.signature(base.forward).parameters  # of a compiled or wrapped base any
    needs = any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in inputs.values())
    return model if needs and name not in (None, *inputs) else base


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


class End(NamedTuple):
    """What a model does after its layers."""

    norm: str | None  # name of the normalisation that the last layer's states go through
    first: int  # position of the first layer's states among the hidden ones; 0 in Mamba, which leaves out the embedding


def first_run(base: nn.Module, n_layers: int, inputs: dict[str, Any]) -> tuple[Any, End]:
    """Output of a model, and what it does after its layers, which a run shows.

    The normalisation, if there is one, is the module outside the layers that takes the last one's states and gives some
    of their shape. Names tell too little: what is called ``layer_norm`` comes after the layers in some models, before
    them in others.
    """
    stacks = [part for part in base.modules() if isinstance(part, nn.ModuleList) and len(part) == n_layers]
    inside = {part for stack in stacks for part in stack.modules()}
    outside = {name: part for name, part in base.named_modules() if inside.isdisjoint(part.modules())}
    states: Tensor | None = None
    norm: str | None = None

    def note_states(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal states, norm
        states, norm = output if torch.is_tensor(output) else output[0], None  # not of convolutions, as many, before

    def note_norm(name: str, _module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal norm
        if norm is not None or states is None or not (inputs and all(map(torch.is_tensor, (inputs[0], output)))):
            return
        if inputs[0].data_ptr() == states.data_ptr() and output.shape == states.shape:
            norm = name

    handles = [stack[-1].register_forward_hook(note_states) for stack in stacks]
    handles += [part.register_forward_hook(partial(note_norm, name)) for name, part in outside.items()]
    try:
        output = base(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    hidden = getattr(output, "hidden_states", None) or ()
    return output, End(norm, first=0 if any(state is states for state in hidden[-2:-1]) else 1)


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

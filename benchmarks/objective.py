"""Mean loss plus group norm, valued and certified in float64 by code that no contender owns."""

from __future__ import annotations

from typing import Any

import torch
from benchmark_utils.instance import Instance
from benchopt import BaseObjective
from torch import Tensor

from convexformer_solvers import certify


class Objective(BaseObjective):
    r"""``1/N sum_i l(f_i, y_i) + alpha sum_g |z_g|_2``, with ``alpha = ratio * alpha_max``.

    The squared loss is half the squared error, the logistic one ``log(1 + exp(-y f))`` with y = -1 or 1;
    ``alpha_max`` is the smallest alpha whose solution is zero.
    """

    name = "Group-sparse attention"
    url = "https://github.com/convexformer/benchmarks"
    min_benchopt_version = "1.6"
    parameters = {"ratio": [0.1, 0.01], "dtype": ["float64"]}  # noqa: RUF012 - benchopt's form

    def set_data(self, instance: Instance) -> None:
        self.instance = instance
        self.program = instance.program(self.ratio, self.dtype)

    def get_objective(self) -> dict[str, Any]:
        return {"program": self.program, "instance": self.instance}

    def evaluate_result(self, coef: Tensor, dual: Tensor | None = None) -> dict[str, float]:
        """Objective and certified gap of a point; a dual point is only a hint, checked like any other."""
        if not bool(torch.isfinite(coef).all()):
            return {"value": float("inf"), "relative_gap": float("inf")}
        certificate = certify(self.program, coef, dual_hint=dual)
        return {"value": certificate.primal, "relative_gap": max(certificate.relative_gap, 1e-16)}

    def get_one_result(self) -> dict[str, Tensor]:
        return {"coef": self.program.y.new_zeros(self.program.coef_shape)}

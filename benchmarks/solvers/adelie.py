"""adelie: block coordinate descent in C++ with a matrix class for gated designs."""

from __future__ import annotations

import math
from typing import Any

import adelie
import numpy as np
import torch
from benchmark_utils.instance import Instance, design_matrix, loss_name
from benchmark_utils.ladder import LadderSolver, n_threads
from numpy.typing import NDArray

from convexformer_solvers import Program

STEPS_PER_DECADE = 6


class Solver(LadderSolver):
    """``adelie.grpnet`` along a path to our alpha, from scratch; one call per output, which the squared loss separates.

    It is made for paths: six steps a decade were twice as fast as alpha alone on cell A.
    """

    name = "adelie"
    requirements = ["pip::adelie"]  # noqa: RUF012 - benchopt's form
    losses = ("squared", "logistic")
    # Its tolerance is on the change of a coordinate pass, not on a gap: 1e-14 is needed for a gap of 1e-6.
    rungs = (1e-4, 1e-6, 1e-8, 1e-10, 1e-12, 1e-14, 1e-16)

    def set_objective(self, program: Program, instance: Instance) -> None:
        self.program = program
        self.matrix = _matrix(program, instance)
        n_columns = int(np.prod(program.map.feature_shape))
        self.groups = np.arange(0, n_columns, program.map.feature_shape[-1])
        n_steps = 1 + math.ceil(STEPS_PER_DECADE * math.log10(program.alpha_max / program.alpha))
        self.path = np.geomspace(program.alpha_max, program.alpha, n_steps)
        self.glms = [_glm(loss_name(program), column) for column in program.y.numpy().T]

    def run(self, stop_val: float) -> None:
        tol = self.on_ladder(stop_val)
        self.coef = np.stack([self._fit(glm, tol) for glm in self.glms], axis=1)

    def _fit(self, glm: Any, tol: float) -> NDArray:
        coefs = self.path_of(glm, tol)
        return coefs[-1] if len(coefs) else np.zeros(int(np.prod(self.program.map.feature_shape)))

    def path_of(self, glm: Any, tol: float) -> NDArray:
        """Coefficients along ``self.path``, shape (n_alphas, n_columns)."""
        state = adelie.grpnet(
            self.matrix,
            glm,
            groups=self.groups,
            penalty=np.ones(len(self.groups)),
            lmda_path=self.path,
            intercept=False,
            tol=tol,
            irls_tol=tol,
            # Its default cannot be met in float32, where the inner Newton iteration then gives up.
            newton_tol=1e-12 if self.program.map.dtype == torch.float64 else 1e-6,
            max_iters=10**6,
            early_exit=False,
            progress_bar=False,
            n_threads=n_threads(),
        )
        return state.betas.toarray()


def _matrix(program: Program, instance: Instance) -> Any:
    if instance.masks is None:
        return adelie.matrix.dense(design_matrix(program), method="naive", n_threads=n_threads())
    data = np.asfortranarray(instance.X.reshape(len(instance.X), -1), dtype=program.y.numpy().dtype)
    return adelie.matrix.convex_relu(data, np.asfortranarray(instance.masks), gated=True, n_threads=n_threads())


def _glm(loss: str, y: NDArray) -> Any:
    if loss == "squared":
        return adelie.glm.gaussian(y=np.ascontiguousarray(y), dtype=y.dtype.type)
    return adelie.glm.binomial(y=(y > 0).astype(y.dtype), dtype=y.dtype.type)

"""Adam on the coefficients, with the subgradient of the group norm."""

from __future__ import annotations

from typing import Any

import torch
from benchmark_utils.ladder import LadderSolver

from convexformer_solvers import LOSSES, Program


class Solver(LadderSolver):
    """Full-batch Adam from zero, learning rate 1e-2 with a cosine to zero over the steps of the rung."""

    name = "adam"
    parameters = {"lr": [1e-2]}  # noqa: RUF012 - benchopt's form
    sampling_strategy = "iteration"
    rungs = (30, 100, 300, 1000, 3000, 10_000, 30_000)
    losses = tuple(LOSSES)

    def set_objective(self, program: Program, **data: Any) -> None:
        self.program = program

    def warm_up(self) -> None:
        """One step: the first optimiser of a process imports seconds of code."""
        self._descend(1)

    def run(self, stop_val: float) -> None:
        self.coef = self._descend(int(self.on_ladder(stop_val)))

    def _descend(self, n_steps: int) -> torch.Tensor:
        program = self.program
        coef = program.y.new_zeros(program.coef_shape)
        optimizer = torch.optim.Adam([coef], lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
        for _ in range(n_steps):
            correlation = program.weighted_adjoint(-program.loss.gradient(program.map.matvec(coef), program.y))
            # 0 where a group is zero, which is a subgradient of the norm there.
            units = torch.nn.functional.normalize(coef, dim=-2)
            coef.grad = program.alpha * units - correlation
            optimizer.step()
            schedule.step()
        return coef

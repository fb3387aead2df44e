"""Accelerated proximal gradient steps in single precision."""

import pytest
import torch
from solver_cases import randn, valid_target

from convexformer_solvers import DenseMap, Fista, GroupL2, Program, get_loss, solve
from convexformer_solvers.algorithms.fista import GreedyFista


@pytest.mark.parametrize("solver", [Fista(), GreedyFista()], ids=lambda solver: solver.name)
@pytest.mark.parametrize("loss", ["squared", "poisson"])
def test_large_means_of_features_in_single_precision_do_not_keep_steps_from_ending(solver, loss):
    data = randn(500, 8, 16)
    loss = get_loss(loss)
    y = valid_target(loss, len(data), 1, torch.Generator().manual_seed(1))

    def solved(means):
        program = Program(DenseMap((data + means).float()), y, loss, GroupL2(), 1.0, fit_intercept=True)
        return solve(program.with_alpha(0.05 * program.alpha_max), solver, tol=1e-4, max_iter=100)

    centred, shifted = solved(0.0), solved(30 * randn(8, 16, seed=2))
    assert shifted.certificate.relative_gap <= 1e-4
    assert shifted.n_iter <= 2 * centred.n_iter

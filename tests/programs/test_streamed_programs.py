"""Programs of data on a disk have the optimum of the same data in memory."""

import numpy as np
import pytest
import torch
from solver_cases import BOTH, randn

from convexformer.storage import open_source
from convexformer_solvers import DenseMap, Program, get_loss, get_penalty, get_solver, solve
from convexformer_solvers.linear_maps.streamed import StreamedMap


@pytest.mark.parametrize("loss", ["squared", "huber", "logistic", "poisson", "softmax", "squared_hinge"])
@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
@pytest.mark.parametrize("gated", BOTH, ids=["plain", "gated"])
@pytest.mark.parametrize("intercept", BOTH, ids=["", "intercept"])
@pytest.mark.parametrize("weighted", BOTH, ids=["", "weights"])
def test_programs_have_the_objective_of_memory(loss, penalty, gated, intercept, weighted, tmp_path):
    n = 60
    data, masks = randn(n, 4, 3), torch.rand((n, 3), generator=torch.Generator().manual_seed(1)) > 0.4
    weight = randn(n).abs() if weighted else None
    np.save(tmp_path / "X.npy", data.numpy())
    of_loss = get_loss(loss)
    y = of_loss.example_target(n, 2, torch.Generator().manual_seed(1))
    results = []  # whose gaps are relative to the best constant model's objective: at most 1.4 times theirs
    for linear_map in (DenseMap(data), StreamedMap(open_source(tmp_path / "X.npy"), chunk=240)):
        linear_map = linear_map.gated(masks) if gated else linear_map
        program = Program(linear_map, y, of_loss, get_penalty(penalty), 1.0, weight, intercept)
        program = program.with_alpha(0.2 * program.alpha_max)
        results.append(solve(program, get_solver("auto"), tol=3e-10).certificate)
    held, streamed = results
    assert streamed.primal == pytest.approx(held.primal, rel=1e-9)
    assert max(held.dual, streamed.dual) <= min(held.primal, streamed.primal) * (1 + 1e-13)

"""Systems of Newton steps in either space: flat outputs, and units."""

import math

import pytest
import torch
from solver_cases import make_program, randn

from convexformer_solvers import DenseMap, StreamedMap
from convexformer_solvers.linalg.hessian import Curvature
from convexformer_solvers.linalg.newton_systems import (
    Features,
    NewtonSystem,
    ProxJacobian,
    System,
    solved_in_features,
    solved_in_samples,
)
from convexformer_solvers.linear_maps.source import Source

SIDES = pytest.mark.parametrize("solved", [solved_in_features, solved_in_samples])


def a_system(program, pred, unit=1.0):
    coef, size = randn(*program.coef_shape, seed=3), math.prod(program.coef_shape[-2:])
    root = randn(coef[..., 0, 0].numel(), size, size, seed=4)
    blocks = unit * (root @ root.mT + torch.eye(size))
    right, intercept_right = unit * coef, unit * randn(program.y.shape[1], seed=6)
    return System(Curvature(program, pred), blocks, torch.full((len(root),), unit).double(), right, intercept_right)


@SIDES
def test_an_output_whose_loss_is_flat_follows_the_penalty_alone(solved):
    program = make_program("squared_hinge", intercept=True)
    pred = torch.stack([randn(len(program.y), seed=1), 5 * program.y[:, 1]], 1)  # far on the right side
    system = a_system(program, pred)
    system.intercept_right[1] = 0.0
    features = Features(program)
    move, shift = solved(features, system)
    image = system.curvature.product(features.forward(move) + shift)
    assert bool((image[:, 1] == 0).all())
    penalty_part = (system.blocks @ move.reshape(*system.blocks.shape[:2], 1)).reshape(move.shape)
    torch.testing.assert_close(penalty_part + features.adjoint(image), system.right, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(image.sum(0), system.intercept_right, rtol=1e-8, atol=1e-8)


@SIDES
@pytest.mark.parametrize("unit", [1e-14, 1e14])
def test_the_unit_of_the_objective_does_not_matter(solved, unit):
    program = make_program("poisson", intercept=True)
    pred = 0.1 * randn(*program.y.shape, seed=1)
    plain = solved(Features(program), a_system(program, pred))
    # Curvatures of this loss are exponentials of the predictions.
    scaled = solved(Features(program), a_system(program, pred + math.log(unit), unit))
    for found, wanted in zip(scaled, plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n_gates", [0, 2])
@pytest.mark.parametrize("scale", [0.0, 0.7])
@pytest.mark.parametrize("active", [[], [1, 4], [3], list(range(6))])  # of 0 to 18 columns, for 12 samples
def test_systems_of_data_in_passes_are_those_in_memory(active, scale, n_gates):
    data = randn(12, 6, 3)

    class Rows(Source):
        shape, dtype = (12, 6, 3), torch.float64

        def read(self, rows):
            return data[rows]

    held, streamed = DenseMap(data), StreamedMap(Rows(), memory_limit=10_000)
    if n_gates:
        held, streamed = (part.gated(randn(12, n_gates, seed=3) > 0) for part in (held, streamed))
    units = torch.nn.functional.normalize(randn(len(active), 3, seed=1), dim=1)
    shrinkage = torch.linspace(0.1, 1, len(active), dtype=torch.float64)
    jacobian = ProxJacobian(torch.tensor(active, dtype=torch.long), shrinkage, units)
    curvature, target = randn(12, seed=2).square(), randn(12, seed=4)
    matrix = held.columns(jacobian.blocks)
    shrunk = torch.linalg.inv(jacobian.inverse())
    kernel = torch.einsum("ibd,bde,jbe->ij", matrix, shrunk, matrix) + scale
    system = torch.eye(12).double() + 2.5 * kernel * curvature
    for linear_map in (held, streamed):
        found = NewtonSystem(linear_map, scale).solve(jacobian, 2.5, curvature, target)
        torch.testing.assert_close(system @ found, target, rtol=1e-9, atol=1e-9)
    if matrix[0].numel() + (scale > 0) <= 12:
        assert streamed.traffic().passes == (len(active) > 0)

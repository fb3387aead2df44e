"""Systems of Newton steps in either space: flat outputs, and units."""

import math

import pytest
import torch
from solver_cases import make_program, randn

from convexformer_solvers.linalg.hessian import Curvature
from convexformer_solvers.linalg.newton_systems import Features, System, solved_in_features, solved_in_samples

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

"""Hessians of losses in predictions: as matrices, as products with images, and their bounds."""

import dataclasses

import pytest
import torch
from solver_cases import LOSS_NAMES, make_program, randn

from convexformer_solvers.linalg.hessian import Curvature, curvature_bounds


def at_a_point(loss, in_parts=True):
    """A weighted program and predictions; with or without a closed form of the Hessian."""
    program = make_program(loss, n=30, c=3, weighted=True).drop_zero_weights()
    if not in_parts:
        kind = type(program.loss)
        column_by_column = type(kind.__name__, (kind,), {"hessian_parts": lambda self, pred, y: None})
        program = dataclasses.replace(program, loss=column_by_column())
    return program, randn(len(program.y), 3, seed=7)


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_matrices_are_derivatives_of_the_weighted_slopes(loss):
    program, pred = at_a_point(loss)

    def slopes(values):
        return program.weight[:, None] * program.loss.gradient(values, program.y)

    step, found = 1e-6, Curvature(program, pred).matrices()
    for k in range(3):
        move = torch.zeros(3)
        move[k] = step
        slope = (slopes(pred + move) - slopes(pred - move)) / (2 * step)
        torch.testing.assert_close(found[:, :, k], slope, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("loss", ["softmax", "logistic"])
def test_products_of_images_are_those_in_the_whole_hessian(loss, in_parts):
    program, pred = at_a_point(loss, in_parts)
    curvature = Curvature(program, pred)
    images, output = randn(8, len(pred), seed=8), torch.tensor([0, 2, 1, 1, 0, 2, 2, 2])
    placed = torch.zeros(8, *pred.shape, dtype=torch.float64)  # each image in its output
    placed[torch.arange(8), :, output] = images
    wanted = torch.einsum("anc,ncd,bnd->ab", placed, curvature.matrices(), placed)
    torch.testing.assert_close(curvature.gram(images, output), wanted)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_bounds_are_above_eigenvalues_and_no_more_than_row_sums(loss, in_parts):
    program, pred = at_a_point(loss, in_parts)
    matrices = Curvature(program, pred).matrices() / program.weight[:, None, None]
    bound = curvature_bounds(program.loss, pred, program.y).amax(1)
    assert bool((bound >= torch.linalg.eigvalsh(matrices)[:, -1] - 1e-12).all())
    torch.testing.assert_close(bound, matrices.abs().sum(2).amax(1))
    rest = torch.diag_embed(curvature_bounds(program.loss, pred, program.y)) - matrices
    assert bool((torch.linalg.eigvalsh(rest) >= -1e-12).all())

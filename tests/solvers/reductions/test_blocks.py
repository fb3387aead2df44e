"""Programs on some of the blocks of a larger one."""

from __future__ import annotations

import pytest
import torch
from solver_cases import LOSS_NAMES, PENALTY_NAMES, make_program, randn

from convexformer_solvers import DenseMap, GroupL2, Point, Program, Squared
from convexformer_solvers.linalg.gram import SupportGram
from convexformer_solvers.points import dual_of, objective, own_predictions, point_at, with_own_correlation
from convexformer_solvers.reductions.blocks import Compress, Restrict

BLOCKS = torch.tensor([0, 2, 3])


def compression(whole):
    """The reduction to some blocks of the squared loss, from products with all samples."""
    means = whole.map.rmatvec(whole.weight[:, None])[..., 0].reshape(-1, whole.coef_shape[-2])
    means = means if whole.fit_intercept else None
    gram = SupportGram(whole.map, means).of(BLOCKS, whole.weight)
    target = whole.null_correlation.reshape(-1, *whole.coef_shape[-2:])[BLOCKS].flatten(0, 1)
    return Compress(BLOCKS, gram, target, None if means is None else means[BLOCKS].flatten())


def program_and_reduction(kind, loss="squared", penalty="group_l2", **options):
    whole = make_program(loss, penalty, n=40, blocks=5, d=3, c=2, **options).drop_zero_weights()
    return whole, compression(whole) if kind == "compressed" else Restrict(BLOCKS)


def reduction_cases():
    cases = [("restricted", loss) for loss in LOSS_NAMES] + [("compressed", "squared")]
    return [
        (kind, loss, penalty, gated) for kind, loss in cases for penalty in PENALTY_NAMES for gated in (False, True)
    ]


def on_all(whole, coef):
    """Coefficients of the blocks, and zeros elsewhere."""
    result = torch.zeros(whole.coef_shape, dtype=coef.dtype)
    result.view(-1, *coef.shape[-2:])[BLOCKS] = coef
    return result


@pytest.mark.parametrize(("kind", "loss", "penalty", "gated"), reduction_cases())
@pytest.mark.parametrize("intercept", [False, True])
class TestBlocks:
    def test_objective_is_that_of_the_whole_with_the_other_blocks_at_zero(self, kind, loss, penalty, gated, intercept):
        whole, reduction = program_and_reduction(kind, loss, penalty, gated=gated, intercept=intercept, weighted=True)
        part, data = reduction.apply(whole)
        for seed in range(3):
            coef = randn(len(BLOCKS), 3, 2, seed=seed)
            point = point_at(part, coef)
            back = reduction.invert(point, data)
            assert torch.equal(back.coef, on_all(whole, coef))
            assert objective(whole, back) == pytest.approx(objective(part, point), rel=1e-10)
            torch.testing.assert_close(back.fitted, own_predictions(whole, back.coef), rtol=1e-9, atol=1e-9)

    def test_dual_points_correspond(self, kind, loss, penalty, gated, intercept):
        whole, reduction = program_and_reduction(kind, loss, penalty, gated=gated, intercept=intercept, weighted=True)
        part, data = reduction.apply(whole)
        coef = randn(len(BLOCKS), 3, 2, seed=3)
        pred = own_predictions(whole, on_all(whole, randn(len(BLOCKS), 3, 2, seed=4)))
        point = with_own_correlation(whole, Point(on_all(whole, coef), pred=pred, fitted=pred))
        small = reduction.restrict(point, data)
        assert torch.equal(small.coef, coef)
        small = with_own_correlation(part, small)
        on_blocks = point.correlation.reshape(-1, 3, 2)[BLOCKS]
        torch.testing.assert_close(small.correlation, on_blocks, rtol=1e-9, atol=1e-11)
        back = reduction.invert(small, data)
        torch.testing.assert_close(back.pred, pred, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(back.correlation, on_all(whole, on_blocks), rtol=1e-9, atol=1e-11)
        assert torch.equal(back.coef, point.coef)
        dual, small_dual = float(whole.dual(dual_of(whole, point))), float(part.dual(dual_of(part, small)))
        assert small_dual == pytest.approx(dual, rel=1e-9)


def test_collinear_blocks_compress():
    whole, _ = program_and_reduction("restricted", intercept=True)
    data = whole.map.as_matrix().reshape(40, 5, 3).clone()
    data[:, 2], data[:, 3, 1] = data[:, 0], 1.0  # a repeated block and a constant column
    whole = Program(DenseMap(data), whole.y, Squared(), GroupL2(), 0.05, fit_intercept=True)
    reduction = compression(whole)
    part, given = reduction.apply(whole)
    point = point_at(part, randn(3, 3, 2, seed=1))
    assert objective(part, point) == pytest.approx(objective(whole, reduction.invert(point, given)), rel=1e-7)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_known_gram_matrix_is_that_of_the_blocks(gated, intercept):
    whole, reduction = program_and_reduction("compressed", gated=gated, intercept=intercept, weighted=True)
    part, _ = reduction.apply(whole)
    known, _ = Restrict(BLOCKS, reduction.gram).apply(whole)
    plain, _ = Restrict(BLOCKS).apply(whole)
    blocks, some = torch.arange(len(BLOCKS)), torch.tensor([2, 0])
    means = plain.map.rmatvec(plain.weight[:, None])[..., 0] if intercept else None
    wanted = plain.map.gram(blocks, blocks, plain.weight, means)
    torch.testing.assert_close(known.map.gram(blocks, blocks, known.weight, means), wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(part.map.gram(blocks, blocks, part.weight), wanted, rtol=1e-10, atol=1e-12)
    rows = plain.map.gram(some, blocks, plain.weight, means)
    torch.testing.assert_close(part.map.gram(some, blocks, part.weight), rows, rtol=1e-10, atol=1e-12)
    # The root is one of that matrix, and products of the other map are those of the blocks.
    root = part.map.as_matrix()
    torch.testing.assert_close(root.T @ root / len(root), wanted, rtol=1e-9, atol=1e-11)
    coef, values = randn(*known.coef_shape, seed=1), randn(*known.y.shape, seed=2)
    torch.testing.assert_close(known.map.matvec(coef), plain.map.matvec(coef))
    torch.testing.assert_close(known.map.rmatvec(values), plain.map.rmatvec(values))

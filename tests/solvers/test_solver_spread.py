"""How correlated features are, and what alternating directions make of it."""

import math

import pytest
import torch
from solver_cases import make_program, randn

from convexformer_solvers import Admm, DenseMap, GatedMap, GroupL2, Program, get_loss
from convexformer_solvers.spread import spread


def program_of(linear_map, loss="squared", intercept=False):
    loss = get_loss(loss)
    y = loss.example_target(linear_map.n_samples, 1, torch.Generator().manual_seed(0))
    return Program(linear_map, y, loss, GroupL2(), 1.0, fit_intercept=intercept)


def correlated(data, share):
    """Tokens that have this share of their variance in common."""
    return math.sqrt(1 - share) * data + math.sqrt(share) * data[:, :1]


def random_masks(n, h):
    return torch.rand((n, h), generator=torch.Generator().manual_seed(1)) > 0.5


class TestSpread:
    @pytest.mark.parametrize("shape", [(50, 20, 40), (300, 20, 40), (3000, 40, 10)])
    def test_is_about_one_for_independent_features(self, shape):
        assert spread(program_of(DenseMap(randn(*shape)))) == pytest.approx(1, abs=0.15)

    def test_is_at_most_one_for_a_single_feature(self):
        assert 0 < spread(program_of(DenseMap(randn(300, 1, 1)))) <= 1

    def test_grows_with_the_correlation(self):
        data = randn(300, 20, 40)
        found = [spread(program_of(DenseMap(correlated(data, share)))) for share in (0.0, 0.5, 0.9)]
        assert 1.2 * found[0] < found[1] < found[2] / 1.2

    def test_gates_correlate_what_they_share(self):
        data = randn(300, 5, 40)
        gated = spread(program_of(GatedMap(data, random_masks(300, 30))))
        assert 1.2 * spread(program_of(DenseMap(data))) < gated

    def test_knows_no_units_and_no_basis(self):
        data = correlated(randn(100, 6, 8), 0.5)
        basis = torch.linalg.qr(randn(48, 48, seed=1))[0]
        other = 1e3 * (data.flatten(1) @ basis).view_as(data)
        assert spread(program_of(DenseMap(other))) == pytest.approx(spread(program_of(DenseMap(data))))

    def test_an_intercept_takes_common_means_away(self):
        data = randn(100, 6, 8)
        expected = spread(program_of(DenseMap(data), intercept=True))
        assert spread(program_of(DenseMap(data + 5), intercept=True)) == pytest.approx(expected)
        assert spread(program_of(DenseMap(data + 5))) > 5

    def test_without_any_numbers_or_with_too_large_ones(self):
        assert math.isnan(spread(program_of(DenseMap(torch.zeros(10, 2, 3)))))
        assert spread(program_of(DenseMap(torch.full((10, 2, 3), 1e200, dtype=torch.float64)))) == math.inf


def threshold(program):
    zeros = torch.zeros(program.coef_shape, dtype=torch.float64)
    return Admm().init_at(program.with_alpha(0.1 * program.alpha_max), zeros, None).threshold


class TestThreshold:
    def test_is_larger_on_correlated_features(self):
        data = randn(200, 20, 8)
        for loss in ("squared", "logistic"):
            independent, common = (threshold(program_of(DenseMap(x), loss)) for x in (data, correlated(data, 0.95)))
            assert independent < common

    def test_is_smaller_where_the_loss_is_its_own_quadratic(self):
        data = randn(200, 20, 8)
        assert threshold(program_of(DenseMap(data))) < threshold(program_of(DenseMap(data), "logistic"))

    def test_without_any_numbers(self):
        program = program_of(DenseMap(torch.zeros(10, 2, 3, dtype=torch.float64)))
        assert 0 < Admm().init_at(program, torch.zeros(2, 3, 1).double(), None).threshold < math.inf

    def test_of_coupled_outputs_goes_by_the_start_alone(self):
        program = make_program("softmax", n=80, blocks=8, d=3, c=4, ratio=0.1)
        common = make_program("softmax", n=80, blocks=8, d=3, c=4, ratio=0.1, seed=1)
        assert threshold(program) == threshold(common)

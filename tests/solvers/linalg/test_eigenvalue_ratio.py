"""How correlated features are, and what alternating directions make of it."""

import dataclasses
import math

import pytest
import torch
from solver_cases import randn

from convexformer_solvers import Admm, DenseMap, GatedMap, GroupL2, Program, get_loss
from convexformer_solvers.linalg.eigenvalue_ratio import eigenvalue_ratio
from convexformer_solvers.linalg.gram import SupportGram
from convexformer_solvers.points import Point
from convexformer_solvers.reductions.blocks import Compress


def program_of(linear_map, loss="squared", intercept=False, c=1):
    loss = get_loss(loss)
    y = loss.example_target(linear_map.n_samples, c, torch.Generator().manual_seed(0))
    return Program(linear_map, y, loss, GroupL2(), 1.0, fit_intercept=intercept)


def correlated(data, share):
    """Tokens that have this share of their variance in common."""
    return math.sqrt(1 - share) * data + math.sqrt(share) * data[:, :1]


def random_masks(n, h):
    return torch.rand((n, h), generator=torch.Generator().manual_seed(1)) > 0.5


class TestRatio:
    @pytest.mark.parametrize("shape", [(50, 20, 40), (300, 20, 40), (3000, 40, 10)])
    def test_is_about_one_for_independent_features(self, shape):
        assert eigenvalue_ratio(program_of(DenseMap(randn(*shape)))) == pytest.approx(1, abs=0.15)

    @pytest.mark.parametrize("n_features", [1, 5, 30, 64])
    def test_does_not_take_few_features_for_independent_or_correlated_ones(self, n_features):
        assert 0.6 < eigenvalue_ratio(program_of(DenseMap(randn(300, n_features, 1)))) < 1.3
        if n_features > 1:
            assert eigenvalue_ratio(program_of(DenseMap(correlated(randn(300, n_features, 1), 0.99)))) > 1.6

    def test_grows_with_the_correlation(self):
        data = randn(300, 20, 40)
        found = [eigenvalue_ratio(program_of(DenseMap(correlated(data, share)))) for share in (0.0, 0.5, 0.9)]
        assert 1.2 * found[0] < found[1] < found[2] / 1.2

    def test_gates_correlate_what_they_share(self):
        data = randn(300, 5, 40)
        gated = eigenvalue_ratio(program_of(GatedMap(data, random_masks(300, 30))))
        assert 1.2 * eigenvalue_ratio(program_of(DenseMap(data))) < gated

    def test_knows_no_units_and_no_basis(self):
        data = correlated(randn(100, 6, 8), 0.5)
        basis = torch.linalg.qr(randn(48, 48, seed=1))[0]
        other = 1e3 * (data.flatten(1) @ basis).view_as(data)
        assert eigenvalue_ratio(program_of(DenseMap(other))) == pytest.approx(
            eigenvalue_ratio(program_of(DenseMap(data)))
        )

    def test_an_intercept_takes_common_means_away(self):
        data = randn(100, 6, 8)
        expected = eigenvalue_ratio(program_of(DenseMap(data), intercept=True))
        assert eigenvalue_ratio(program_of(DenseMap(data + 5), intercept=True)) == pytest.approx(expected)
        assert eigenvalue_ratio(program_of(DenseMap(data + 5))) > 5

    def test_without_any_numbers_or_with_too_large_ones(self):
        assert math.isnan(eigenvalue_ratio(program_of(DenseMap(torch.zeros(10, 2, 3)))))
        for size in (1e152, 1e200):
            data = size * randn(10, 2, 3)
            assert eigenvalue_ratio(program_of(DenseMap(data), intercept=True)) in (math.inf, pytest.approx(1, abs=0.7))
        assert eigenvalue_ratio(program_of(DenseMap(torch.full((10, 2, 3), 1e200, dtype=torch.float64)))) == math.inf

    def test_of_very_many_samples(self):
        n = 2**24 + 4
        program = program_of(DenseMap(torch.ones(1, 1, 1).expand(n, 1, 1)))
        assert 0 < eigenvalue_ratio(program) < math.inf

    def test_rows_of_a_root_say_nothing(self):
        program = program_of(DenseMap(randn(100, 6, 2)))
        blocks = torch.arange(4)
        gram = SupportGram(program.map).of(blocks, program.weight)
        target = program.null_correlation[blocks].flatten(0, 1)
        root, _ = Compress(blocks, gram, target, None).apply(program)
        assert math.isnan(eigenvalue_ratio(root))
        assert threshold(root) == threshold(program_of(DenseMap(randn(100, 6, 2)), "huber"))


def threshold(program):
    return Admm().init(program.with_alpha(0.1 * program.alpha_max), zeros(program)).rule.threshold


def zeros(program):
    return Point(torch.zeros(program.coef_shape, dtype=torch.float64))


class TestThreshold:
    def test_grows_with_the_correlation_between_bounds(self):
        data = randn(200, 80, 8)
        least, some = (threshold(program_of(DenseMap(correlated(data, share)))) for share in (0.0, 0.3))
        narrow = randn(200, 600, 1)
        most, also_most = (threshold(program_of(DenseMap(correlated(narrow, share)))) for share in (0.9, 0.99))
        assert least < some < most
        assert least == threshold(program_of(DenseMap(randn(200, 80, 8, seed=7))))
        assert most == also_most

    def test_is_larger_where_the_loss_is_not_its_own_quadratic(self):
        data = randn(200, 80, 8)
        assert threshold(program_of(DenseMap(data))) < threshold(program_of(DenseMap(data), "logistic"))
        common = correlated(randn(200, 600, 1), 0.9)
        assert threshold(program_of(DenseMap(data), "logistic")) < threshold(program_of(DenseMap(common), "logistic"))

    def test_on_few_features_a_repeated_sample_is_a_weight_of_two(self):
        data, twice = correlated(randn(100, 20, 8), 0.9), torch.arange(100) % 3 == 0
        program = program_of(DenseMap(data))
        weighted = dataclasses.replace(program, sample_weight=1.0 + twice.double())
        rows = torch.cat([torch.arange(100), twice.nonzero()[:, 0]])
        repeated = Program(DenseMap(data[rows]), program.y[rows], program.loss, program.penalty, program.alpha)
        assert threshold(weighted) == threshold(repeated)
        assert eigenvalue_ratio(weighted) != eigenvalue_ratio(repeated)

    def test_without_any_numbers(self):
        program = program_of(DenseMap(torch.zeros(10, 2, 3, dtype=torch.float64)))
        assert 0 < Admm().init(program, zeros(program)).rule.threshold < math.inf

    @pytest.mark.parametrize(("loss", "c"), [("softmax", 3), ("huber", 1), ("squared_hinge", 1)])
    def test_of_coupled_outputs_and_jumping_curvature_goes_by_the_start_alone(self, loss, c):
        data = randn(200, 80, 8)
        first, second = (threshold(program_of(DenseMap(x), loss, c=c)) for x in (data, correlated(data, 0.95)))
        assert first == second

    def test_along_paths_does_not_go_by_the_correlation(self):
        for data in (randn(200, 80, 8), correlated(randn(200, 600, 1), 0.9)):
            program = program_of(DenseMap(data))
            program = program.with_alpha(0.1 * program.alpha_max)
            cold = Admm().init(program, zeros(program))
            warm = Admm().init_again(program, zeros(program), cold)
            assert warm.rule.threshold == threshold(program_of(DenseMap(data), "huber"))
            assert warm.rule.threshold != cold.rule.threshold

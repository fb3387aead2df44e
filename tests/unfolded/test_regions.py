"""Regions of descent: spheres of Apollonius, what a ReLU may cut off, the figure."""

import math

import pytest
import torch

from convexformer.experiments.unfolded.aim import draw_regions
from convexformer.unfolded.aim import descent_constant, gradient_ratio
from convexformer.unfolded.regions import DescentRegion, clipping_index, descent_region

F64 = torch.float64


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


class TestDescentRegion:
    @pytest.mark.parametrize("ratio", [0.1, 0.7, 0.999, 1.0, 1.001, 1.5, 30.0])
    @pytest.mark.parametrize("shape", [(1,), (5,), (2, 3)])
    def test_is_the_ball_the_half_space_or_the_complement_of_the_ball(self, ratio, shape):
        optimum_f, optimum_h = randn(2, *shape)
        region = DescentRegion(optimum_f, optimum_h, ratio)
        points = optimum_f + 3 * randn(2000, *shape, seed=1)
        found = region.contains(points)
        to_f, to_h = (torch.linalg.vector_norm((points - z).flatten(1), dim=1) for z in (optimum_f, optimum_h))
        assert torch.equal(found, to_f <= ratio * to_h)
        if ratio == 1:
            assert region.centre is None
            assert region.radius == math.inf
            assert not region.is_complement
            middle = (optimum_f + optimum_h) / 2
            assert torch.equal(found, ((points - middle) * (optimum_h - optimum_f)).flatten(1).sum(1) <= 0)
            return
        assert region.is_complement == (ratio > 1)
        to_centre = torch.linalg.vector_norm((points - region.centre).flatten(1), dim=1)
        apart = (to_centre - region.radius).abs() > 1e-9 * region.radius
        assert torch.equal(found[apart], ((to_centre <= region.radius) ^ region.is_complement)[apart])
        assert int(apart.sum()) > 1900

    @pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
    def test_holds_the_minimiser_of_f_and_not_that_of_h(self, ratio):
        optimum_f, optimum_h = randn(2, 4)
        region = DescentRegion(optimum_f, optimum_h, ratio)
        assert region.contains(torch.stack([optimum_f, optimum_h])).tolist() == [True, False]

    def test_is_centred_at_neither_minimiser(self):
        optimum_f, optimum_h = randn(2, 4)
        for ratio in (0.5, 2.0):
            centre = DescentRegion(optimum_f, optimum_h, ratio).centre
            assert min((centre - point).norm() for point in (optimum_f, optimum_h)) > 0.1

    def test_of_equal_minimisers_is_that_point_or_all(self):
        point = torch.zeros(2, dtype=F64)
        both = torch.stack([point, point + 1])
        inside = {ratio: DescentRegion(point, point, ratio).contains(both).tolist() for ratio in (0.5, 1.0, 2.0)}
        assert inside == {0.5: [True, False], 1.0: [True, True], 2.0: [True, True]}

    def test_tells_of_one_point_and_of_grids_of_points(self):
        region = DescentRegion(*randn(2, 3), 0.7)
        assert region.contains(region.optimum_f).shape == ()
        assert region.contains(randn(4, 5, 3)).shape == (4, 5)

    @pytest.mark.parametrize("scale", [1e-200, 1e200])
    def test_scales_with_the_minimisers(self, scale):
        optimum_f, optimum_h, *points = randn(102, 3)
        points = torch.stack(points)
        region, scaled = (DescentRegion(size * optimum_f, size * optimum_h, 0.7) for size in (1.0, scale))
        assert scaled.radius == pytest.approx(scale * region.radius)
        assert torch.equal(scaled.contains(scale * points), region.contains(points))
        assert 0 < int(region.contains(points).sum()) < 100

    @pytest.mark.parametrize(("ratio", "near"), [(1e-200, 0), (1e200, 1), (10**200, 1)])
    def test_ratios_whose_squares_are_no_numbers(self, ratio, near):
        minimisers = randn(2, 3)
        region = DescentRegion(*minimisers, ratio)
        assert torch.equal(region.centre, minimisers[near])
        assert region.radius == pytest.approx(1e-200 * float(torch.dist(*minimisers)))
        assert region.contains(minimisers).tolist() == [True, False]

    def test_the_ratio_of_gradients_is_at_most_the_bound_in_it(self):
        n_inside = n_missed = 0
        for seed in range(60):
            factor_f, factor_g = randn(2, 4, 4, seed=seed)
            metric_f, metric_g = factor_f @ factor_f.T, factor_g @ factor_g.T + torch.eye(4, dtype=F64)
            optimum_f, optimum_g = randn(2, 4, seed=1000 + seed)
            sum_ = metric_f + metric_g
            optimum_h = torch.linalg.solve(sum_, metric_f @ optimum_f + metric_g @ optimum_g)
            eigenvalues = torch.linalg.eigvalsh(sum_)
            step, lipschitz_g, lipschitz_f = (
                1 / float(eigenvalues[-1]),
                *(float(torch.linalg.matrix_norm(metric, 2)) for metric in (metric_g, metric_f)),
            )
            bound = descent_constant(step / 2, step, lipschitz_g)
            convexity = float(eigenvalues[0])
            region = descent_region(optimum_f, optimum_h, bound, convexity_h=convexity, lipschitz_f=lipschitz_f)
            assert region.ratio == pytest.approx(convexity * bound / lipschitz_f)
            points = optimum_f + 0.3 * randn(50, 4, seed=2000 + seed)
            for y, inside in zip(points, region.contains(points), strict=True):
                ratio = gradient_ratio(
                    y,
                    lambda z, m=metric_f, at=optimum_f: m @ (z - at),
                    lambda z, m=metric_g, at=optimum_g: m @ (z - at),
                )
                n_inside += bool(inside)
                n_missed += bool(~inside) and ratio <= bound
                assert not inside or ratio <= bound
        assert min(n_inside, n_missed) > 100

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            (([0.0], torch.zeros(1), 0.5), TypeError, "optimum_f must be a torch tensor, got list"),
            ((torch.zeros(2), torch.zeros(1), 0.5), ValueError, r"optimum_h must have the shape \(2,\) of optimum_f"),
            ((torch.zeros(1), torch.zeros(1).double(), 0.5), ValueError, "optimum_h must be of torch.float32 on cpu"),
            (
                (torch.zeros(1, dtype=torch.int64),) * 2 + (0.5,),
                ValueError,
                "optimum_f must hold floating-point numbers",
            ),
            ((torch.zeros(1), torch.full((1,), math.inf), 0.5), ValueError, "optimum_h must be finite"),
            ((torch.zeros(1), torch.zeros(1), 0.0), ValueError, "ratio must be a positive finite number, got 0.0"),
            ((torch.zeros(1), torch.zeros(1), True), ValueError, "ratio must be a positive finite number, got True"),
        ],
    )
    def test_bad_input(self, arguments, error, message):
        with pytest.raises(error, match=message):
            DescentRegion(*arguments)

    def test_bad_points_and_constants(self):
        region = DescentRegion(torch.zeros(2), torch.ones(2), 0.5)
        with pytest.raises(
            ValueError, match=r"y must have the shape \(2,\) of the minimisers at its end, got \(2, 3\)"
        ):
            region.contains(torch.zeros(2, 3))
        with pytest.raises(TypeError, match="y must be a torch tensor"):
            region.contains([0.0, 0.0])
        for shape in ((), (3,), (1, 1)):
            with pytest.raises(ValueError, match="of the minimisers at its end"):
                DescentRegion(torch.zeros(2, 3), torch.ones(2, 3), 0.5).contains(torch.zeros(shape))
        constants = {"bound": 1.0, "convexity_h": 1.0, "lipschitz_f": 1.0}
        for name in constants:
            with pytest.raises(ValueError, match=f"{name} must be a positive finite number, got -1.0"):
                descent_region(torch.zeros(2), torch.ones(2), **constants | {name: -1.0})
        with pytest.raises(ValueError, match="convexity_h must be a positive finite number, got 0"):
            descent_region(torch.zeros(2), torch.ones(2), 1.0, convexity_h=0, lipschitz_f=1.0)


class TestClippingIndex:
    def test_is_the_formula_whatever_the_scale(self):
        step, y = randn(2, 3, 4)
        wanted = sum(min(b * b - a * a, 0) for a, b in zip(step.flatten().tolist(), y.flatten().tolist(), strict=True))
        wanted /= float(step.square().sum())
        for scale in (1.0, 1e-200, 1e200):
            assert clipping_index(scale * step, scale * y) == pytest.approx(wanted)

    def test_bounds_what_the_relu_cuts_off(self):
        cut_some = 0
        for seed in range(300):
            step, y = randn(2, 6, seed=seed)
            y = y.clamp(min=0)
            index = clipping_index(step, y)
            start = y - step
            end = start.clamp(min=0)
            squared = float(step.square().sum())
            assert -1 <= index <= 0
            assert float((end - start).square().sum()) <= -index * squared + 1e-12
            assert float((end - y).square().sum()) >= (1 + index) * squared - 1e-12
            cut_some += bool((end != start).any())
        assert cut_some > 200

    def test_of_no_step_and_of_steps_that_stay_inside_or_are_cut_off(self):
        y = torch.tensor([1.0, 2.0])
        assert clipping_index(torch.zeros(2), y) == 0
        assert clipping_index(torch.zeros(0), torch.zeros(0)) == 0
        assert clipping_index(torch.tensor([-1.0, 2.0]), y) == 0
        assert clipping_index(torch.tensor([3.0, 0.1]), torch.zeros(2)) == -1

    def test_bad_input(self):
        with pytest.raises(ValueError, match=r"y must have the shape \(2,\) of step, got \(3,\)"):
            clipping_index(torch.zeros(2), torch.zeros(3))
        with pytest.raises(TypeError, match="step must be a torch tensor"):
            clipping_index(0.5, torch.zeros(3))


def test_the_figure_is_drawn(tmp_path):
    draw_regions(tmp_path / "regions.png")
    assert (tmp_path / "regions.png").read_bytes().startswith(b"\x89PNG")

"""Alternating inexact minimisation: its steps, the theorems of descent and their sharpness, the experiment."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from scipy.optimize import nnls

from convexformer.experiments.unfolded.aim import QuadraticPair, compare_steps, draw_aim, least_value, run_aim
from convexformer.unfolded.aim import aim_step, descent_condition, descent_constant, gradient_ratio
from convexformer.unfolded.regions import clipping_index

F64 = torch.float64


# Random problems


@dataclasses.dataclass
class Problem:
    """Gradients of rows, the change of h from rows to rows with its rounding error, the constants, and rows to try."""

    gradient_f: Any
    gradient_g: Any
    change: Any
    lipschitz_g: float
    lipschitz_h: float
    points: torch.Tensor


class Random:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def randn(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=F64)

    def uniform(self, low=0.0, high=1.0):
        return low + (high - low) * float(torch.rand((), generator=self.generator, dtype=F64))

    def integer(self, low, high):
        return int(torch.randint(low, high, (), generator=self.generator))

    def points(self, n_points, optimum_f, optimum_h):
        """Rows around the line through two points."""
        along = torch.rand(n_points, 1, generator=self.generator, dtype=F64) * 3 - 1
        scale = 10 ** (torch.rand(n_points, 1, generator=self.generator, dtype=F64) * 3 - 2)
        around = self.randn(n_points, len(optimum_f)) * scale * (optimum_h - optimum_f).norm()
        return optimum_f + along * (optimum_h - optimum_f) + around


def spectral(matrix):
    return float(torch.linalg.matrix_norm(matrix, 2))


def quadratic(random, n_points, convex=True):
    """Half squared distances in random metrics, which are indefinite unless `convex`."""
    n = random.integer(1, 9)
    signs = [1.0, 1.0] if convex else [random.randn(n).sign() for _ in range(2)]
    factors = [random.randn(n, random.integer(1, n + 2)) * 10 ** random.uniform(-1, 1) for _ in range(2)]
    metrics = [sign * (factor @ factor.T) for sign, factor in zip(signs, factors, strict=True)]
    metrics = [(metric + metric.T) / 2 for metric in metrics]
    sum_ = metrics[0] + metrics[1]
    first, second = random.randn(2, n)
    optimum_h = torch.linalg.lstsq(sum_, metrics[0] @ first + metrics[1] @ second, driver="gelsd").solution

    def change(y, end):
        step, slope = end - y, (y - first) @ metrics[0] + (y - second) @ metrics[1]
        value = (slope * step).sum(-1) + ((step @ sum_) * step).sum(-1) / 2
        return value, 1e-12 * slope.norm(dim=-1) * step.norm(dim=-1)

    return Problem(
        lambda y: (y - first) @ metrics[0],
        lambda y: (y - second) @ metrics[1],
        change,
        spectral(metrics[1]),
        spectral(sum_),
        random.points(n_points, first, optimum_h),
    )


def indefinite(random, n_points):
    return quadratic(random, n_points, convex=False)


def log_cosh(random, n_points):
    """Sums of log cosh of random linear maps."""
    n = random.integer(1, 9)
    maps = [random.randn(n, random.integer(1, n + 2)) for _ in range(2)]
    centres = random.randn(2, n)

    def value(y):
        inner = torch.cat([(y - centre) @ factor for centre, factor in zip(centres, maps, strict=True)], dim=-1).abs()
        return (inner + torch.log1p(torch.exp(-2 * inner)) - math.log(2)).sum(-1)

    def gradient(number):
        return lambda y: torch.tanh((y - centres[number]) @ maps[number]) @ maps[number].T

    def change(y, end):
        before, after = value(y), value(end)
        return after - before, 1e-13 * (1 + before + after)

    lipschitz_g, lipschitz_h = spectral(maps[1]) ** 2, spectral(torch.cat(maps, dim=1)) ** 2
    return Problem(gradient(0), gradient(1), change, lipschitz_g, lipschitz_h, random.points(n_points, *centres))


def rows_ratio(problem, y):
    along_f = problem.gradient_f(y)
    return along_f.norm(dim=-1) / (along_f + problem.gradient_g(y)).norm(dim=-1)


def rows_clipping(step, y):
    return (y.square() - step.square()).clamp(max=0).sum(-1) / step.square().sum(-1)


def try_points(make, nonnegative, n_problems, n_points, seed, factor=1.0):
    """Which trials are inside the hypothesis, the bound times a factor, and which raise h."""
    random, inside, rises = Random(seed), [], []
    for number in range(n_problems):
        problem = make(random, n_points)
        y = problem.points.clamp(min=0) if nonnegative else problem.points
        step_g = 1 / problem.lipschitz_h
        step_f = step_g if number % 3 == 0 else step_g * random.uniform(0.01, 1)
        gradients = problem.gradient_f, problem.gradient_g
        bound = torch.full((n_points,), descent_constant(step_f, step_g, problem.lipschitz_g), dtype=F64)
        if nonnegative:
            step = step_g * (gradients[0](y) + gradients[1](y))
            bound *= (1 + rows_clipping(step, y)).clamp(min=0).sqrt()
        ratio = rows_ratio(problem, y)
        value, rounding = problem.change(y, aim_step(y, *gradients, step_f, step_g, nonnegative=nonnegative))
        inside.append(ratio <= factor * bound)
        rises.append(value > rounding)
        constants = {"lipschitz_g": problem.lipschitz_g, "lipschitz_h": problem.lipschitz_h}
        condition = descent_condition(y[0], *gradients, step_f, step_g, nonnegative=nonnegative, **constants)
        assert condition.ratio == pytest.approx(float(ratio[0]), rel=1e-9)
        assert condition.bound == pytest.approx(float(bound[0]), rel=1e-6, abs=1e-7)
        assert condition.holds == bool(condition.ratio <= condition.bound)
    return torch.cat(inside), torch.cat(rises)


class TestDescent:
    @pytest.mark.parametrize("nonnegative", [False, True], ids=["theorem_4_1", "theorem_5_1"])
    @pytest.mark.parametrize("make", [quadratic, indefinite, log_cosh])
    def test_no_step_inside_the_hypothesis_raises_h(self, make, nonnegative):
        inside, rises = try_points(make, nonnegative, n_problems=450, n_points=200, seed=0)
        assert int(inside.sum()) >= 30_000
        assert int((rises & inside).sum()) == 0
        assert int((rises & ~inside).sum()) > 500

    @pytest.mark.parametrize("nonnegative", [False, True], ids=["theorem_4_1", "theorem_5_1"])
    def test_random_trials_tell_a_larger_bound_from_the_true_one(self, nonnegative):
        inside, rises = try_points(quadratic, nonnegative, n_problems=450, n_points=200, seed=0, factor=1.5)
        assert int((rises & inside).sum()) > 0


# How sharp the bounds are


def sharp(kappa, relative, steps_ratio, curvature_g=0.7):
    """Isotropic quadratics of curvature 1 in sum, at whose point the ratio is that many times the bound."""
    step_f, curvature_f = steps_ratio, 1 - curvature_g
    step = torch.tensor([math.sqrt(kappa), math.sqrt(1 - kappa)], dtype=F64)
    y = torch.tensor([0.0, 2.0], dtype=F64)
    bound = descent_constant(step_f, 1.0, curvature_g, kappa=kappa)
    along_f = torch.tensor([0.0, relative * bound], dtype=F64)
    optimum_f = y - along_f / curvature_f
    optimum_g = (y - step - curvature_f * optimum_f) / curvature_g
    gradients = (lambda z: curvature_f * (z - optimum_f)), (lambda z: curvature_g * (z - optimum_g))
    end = aim_step(y, *gradients, step_f, 1.0, nonnegative=True)
    condition = descent_condition(
        y, *gradients, step_f, 1.0, lipschitz_g=curvature_g, lipschitz_h=1.0, nonnegative=True
    )
    above, below = ((z - (y - step)).square().sum() / 2 for z in (end, y))
    return condition, float(above - below)


class TestSharpness:
    @pytest.mark.parametrize("kappa", [0.0, 0.2, 0.5, 0.9, 0.99])
    @pytest.mark.parametrize("steps_ratio", [1.0, 0.5, 0.01])
    def test_h_rises_just_above_the_bound_and_not_just_below(self, kappa, steps_ratio):
        condition, change = sharp(kappa, 0.999, steps_ratio)
        assert condition.holds
        assert condition.clipping == pytest.approx(-kappa, abs=1e-12)
        assert -0.01 < change < 0
        condition, change = sharp(kappa, 1.001, steps_ratio)
        assert [part.split(",")[0] for part in condition.failures] == ["the ratio of gradients"]
        assert change > 0

    def test_without_relu_h_rises_just_above_the_constant(self):
        curvature_g, step_f = 0.7, 0.5
        for relative, rises in ((0.999, False), (1.001, True)):
            ratio = relative * descent_constant(step_f, 1.0, curvature_g)
            optimum_f = 1 - ratio / (1 - curvature_g)  # h is y**2 / 2, least at 0
            optimum_g = -(1 - curvature_g) * optimum_f / curvature_g
            y = torch.ones(1, dtype=F64)
            gradients = (
                lambda z, at=optimum_f: (1 - curvature_g) * (z - at),
                lambda z, at=optimum_g: curvature_g * (z - at),
            )
            assert gradient_ratio(y, *gradients) == pytest.approx(ratio)
            assert (float(aim_step(y, *gradients, step_f, 1.0)) ** 2 > 1) is rises

    @pytest.mark.parametrize("kappa", [0.2, 0.5, 0.9])
    def test_the_constant_of_steps_without_relu_is_too_large_for_steps_with_it(self, kappa):
        condition, change = sharp(kappa, 0.999 / math.sqrt(1 - kappa), 1.0)
        assert condition.ratio < descent_constant(1.0, 1.0, 0.7)
        assert not condition.holds
        assert change > 0


# Steps, ratios, constants


def pull(centre, curvature=1.0):
    return lambda y: curvature * (y - centre)


class TestStep:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
    @pytest.mark.parametrize("nonnegative", [False, True])
    def test_is_the_formula_in_any_shape_and_precision(self, dtype, shape, nonnegative):
        y = Random(0).randn(*shape).to(dtype)
        halfway = y - 0.2 * 3 * (y - 1)
        wanted = halfway - 0.3 * 2 * (halfway + 2)
        found = aim_step(y, pull(1, 3.0), pull(-2, 2.0), 0.2, 0.3, nonnegative=nonnegative)
        assert (found.dtype, found.shape) == (dtype, shape)
        torch.testing.assert_close(found, wanted.clamp(min=0) if nonnegative else wanted)

    def test_can_be_differentiated(self):
        y = torch.ones(2, dtype=F64, requires_grad=True)
        aim_step(y, pull(0), pull(0), 0.5, 0.5).sum().backward()
        assert y.grad.tolist() == [0.25, 0.25]

    def test_the_ratio_does_not_depend_on_the_shape(self):
        y = Random(1).randn(3, 4)
        along_f, along_h = y - 1, 2 * y - 3
        assert gradient_ratio(y, pull(1), pull(2)) == pytest.approx(float(along_f.norm() / along_h.norm()))
        assert gradient_ratio(y.flatten(), pull(1), pull(2)) == pytest.approx(gradient_ratio(y, pull(1), pull(2)))

    @pytest.mark.parametrize(("dtype", "scale"), [(F64, 1e-200), (F64, 1e200), (F64, 1e307), (torch.float32, 1e-30)])
    def test_the_ratio_does_not_depend_on_the_scale(self, dtype, scale):
        y = Random(2).randn(5).clamp(-0.1, 0.1).to(dtype)
        wanted = gradient_ratio(y, pull(1), pull(-1))
        assert gradient_ratio(scale * y, pull(scale), pull(-scale)) == pytest.approx(wanted)
        constants = {"lipschitz_g": 1.0, "lipschitz_h": 2.0}
        condition = descent_condition(scale * y, pull(scale), pull(-scale), 0.5, 0.5, **constants)
        assert condition.bound == 2 < wanted
        assert not condition.holds

    def test_gradients_whose_sum_is_no_number_are_named(self):
        y = torch.tensor([1.5e308], dtype=F64)
        with pytest.raises(ValueError, match="the gradient of h must be finite"):
            gradient_ratio(y, pull(0), pull(0))

    def test_the_ratio_where_the_gradient_of_h_is_zero(self):
        assert gradient_ratio(torch.zeros(2), pull(1), pull(-1)) == math.inf
        assert gradient_ratio(torch.zeros(2), pull(0), pull(0)) == 0

    def test_the_constant(self):
        assert descent_constant(0.1, 0.2, 3.0) == pytest.approx(0.2 / (0.1 + 0.06))
        assert descent_constant(0.2, 0.2, 0.0) == math.inf
        assert descent_constant(0.2, 0.2, 3.0, kappa=1.0) == 0


class TestCondition:
    def condition(self, y=3.0, step_f=0.5, step_g=0.5, nonnegative=False, kappa=None, at=0.0):
        constants = {"lipschitz_g": 1.0, "lipschitz_h": 2.0, "nonnegative": nonnegative, "kappa": kappa}
        return descent_condition(torch.tensor([y], dtype=F64), pull(at), pull(0), step_f, step_g, **constants)

    @pytest.mark.parametrize(
        ("part", "arguments"),
        [
            ("step_f, 0.5, is larger than step_g, 0.4", {"step_g": 0.4}),
            ("step_g, 0.6, is larger than 1 / lipschitz_h, 0.5", {"step_g": 0.6}),
            ("some entries of y are negative", {"y": -3.0, "nonnegative": True}),
            ("the clipping index, -0.75, is below -kappa, -0.5", {"y": 1.0, "at": -2.0, "kappa": 0.5, "step_f": 0.1}),
            ("the ratio of gradients, 3, is larger than the bound, 2", {"y": 0.4, "at": 1.0}),
        ],
    )
    def test_names_the_part_that_fails(self, part, arguments):
        arguments = {"nonnegative": "kappa" in arguments} | arguments
        condition = self.condition(**arguments)
        assert part in condition.failures
        assert not condition.holds

    def test_holds_where_nothing_fails(self):
        assert self.condition().holds
        assert self.condition(nonnegative=True).holds

    def test_holds_where_the_ratio_is_the_bound(self):
        condition = self.condition(y=1.0, at=3.0)
        assert condition.ratio == condition.bound == 2
        assert condition.holds

    def test_a_step_of_f_that_is_too_long_leaves_no_bound(self):
        condition = self.condition(step_f=0.5, step_g=0.4)
        assert math.isnan(condition.bound)
        assert not condition.holds

    def test_holds_at_a_fixed_point_and_not_where_only_h_is_least(self):
        assert self.condition(y=0.0).holds
        assert self.condition(y=0.5, at=1.0).ratio == math.inf
        assert not self.condition(y=0.5, at=1.0).holds

    def test_a_kappa_larger_than_needed_lowers_the_bound(self):
        tight, loose = (self.condition(y=1.0, nonnegative=True, kappa=kappa) for kappa in (None, 0.5))
        assert loose.bound == pytest.approx(tight.bound * math.sqrt(0.5))


class TestBadInput:
    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"y": [1.0]}, TypeError, "y must be a torch tensor, got list"),
            ({"y": torch.tensor([1])}, ValueError, "y must hold floating-point numbers, such as float64"),
            ({"y": torch.tensor([math.nan])}, ValueError, "y must be finite"),
            ({"gradient_f": 3}, TypeError, "gradient_f must be a function that takes a point"),
            ({"gradient_g": lambda y: y[:0]}, ValueError, r"what gradient_g returns must have the shape \(1,\)"),
            ({"gradient_g": lambda y: y.double()}, ValueError, "what gradient_g returns must be of torch.float32"),
            ({"gradient_f": lambda y: None}, TypeError, "what gradient_f returns must be a torch tensor"),
            ({"gradient_f": lambda y: y / 0}, ValueError, "what gradient_f returns must be finite"),
            ({"step_f": 0}, ValueError, "step_f must be a positive finite number, got 0"),
            ({"step_g": -1.0}, ValueError, "step_g must be a positive finite number, got -1.0"),
            ({"step_g": math.nan}, ValueError, "step_g must be a positive finite number, got nan"),
        ],
    )
    def test_of_a_step_and_a_condition(self, change, error, message):
        arguments = {"y": torch.ones(1), "gradient_f": pull(0), "gradient_g": pull(1), "step_f": 0.1, "step_g": 0.1}
        arguments.update(change)
        with pytest.raises(error, match=message):
            aim_step(**arguments)
        with pytest.raises(error, match=message):
            descent_condition(**arguments, lipschitz_g=1.0, lipschitz_h=2.0)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"lipschitz_g": -1.0}, "lipschitz_g must be a non-negative finite number, got -1.0"),
            ({"lipschitz_h": 0.0}, "lipschitz_h must be a positive finite number, got 0.0"),
            ({"kappa": 0.5}, "kappa must be None for Algorithm 1"),
            ({"kappa": 2, "nonnegative": True}, "kappa must be a number from 0 to 1, got 2"),
        ],
    )
    def test_of_a_condition(self, change, message):
        constants = {"lipschitz_g": 1.0, "lipschitz_h": 2.0} | change
        with pytest.raises(ValueError, match=message):
            descent_condition(torch.ones(1), pull(0), pull(1), 0.1, 0.1, **constants)

    def test_of_a_constant(self):
        with pytest.raises(ValueError, match=r"step_f must be at most step_g=0.1, got 0.2"):
            descent_constant(0.2, 0.1, 1.0)


# The experiment


class TestExperiment:
    def test_its_gradients_and_constants_are_those_of_its_energy(self):
        pair, y = QuadraticPair.random(n=7, d=4, seed=0)
        y.requires_grad_()
        wanted = torch.autograd.grad(pair.value(y), y)[0]
        y = y.detach()
        torch.testing.assert_close(pair.gradient_f(y) + pair.gradient_g(y), wanted)
        hessian = torch.autograd.functional.hessian(pair.value, y).reshape(28, 28)
        assert spectral(hessian) == pytest.approx(pair.lipschitz_h)
        of_g = torch.autograd.functional.jacobian(pair.gradient_g, y).reshape(28, 28)
        assert spectral(of_g) == pytest.approx(pair.lipschitz_g)

    def test_it_starts_from_points_between_zero_and_two(self):
        _, start = QuadraticPair.random(n=40, d=10, seed=0)
        assert 0 <= float(start.min()) < 0.1 < 1.9 < float(start.max()) <= 2

    def test_its_minimum_is_that_of_the_normal_equations(self):
        pair, y = QuadraticPair.random(n=7, d=4, seed=0)
        hessian = torch.autograd.functional.hessian(pair.value, y).reshape(28, 28)
        optimum = torch.linalg.solve(hessian, 2 * (pair.b1 + pair.b2).flatten()).reshape(7, 4)
        assert run_aim(7, 4, n_iterations=1)["minimum"] == pytest.approx(float(pair.value(optimum)), rel=1e-12)

    def test_its_minimum_over_nonnegative_points_is_that_of_an_active_set_method(self):
        pair, y = QuadraticPair.random(n=7, d=4, seed=0)
        pair = dataclasses.replace(pair, b1=pair.b1 - 0.5, b2=pair.b2 - 0.5)

        def residuals(y):
            return torch.cat([part.flatten() for part in (y @ pair.w1, pair.w2 @ y, y - pair.b1, y - pair.b2)])

        at_zero = torch.zeros_like(y)
        jacobian = torch.autograd.functional.jacobian(residuals, at_zero).flatten(1)
        point, residual = nnls(jacobian.numpy(), -residuals(at_zero).numpy())
        assert (point == 0).any()
        assert least_value(pair, y, nonnegative=True) == pytest.approx(residual**2, rel=1e-12)
        assert least_value(pair, y, nonnegative=False) < residual**2

    def test_h_rises_only_outside_the_hypothesis(self):
        runs = compare_steps(n=100, d=32)["runs"]
        assert [run["n_rises_inside"] for run in runs] == [0, 0, 0, 0]
        assert all(0 < run["n_outside"] < 100 for run in runs)
        assert sum(run["n_rises_outside"] for run in runs) > 0
        for run in runs:
            assert len(run["energy"]) == 101
            assert run["n_rises_outside"] == sum(run["rose"])
            differences = [after - before for before, after in zip(run["energy"], run["energy"][1:], strict=False)]
            assert run["change"] == pytest.approx(differences, abs=1e-10)

    def test_the_published_step_is_too_long_for_problems_of_more_tokens(self):
        run = run_aim(n=300, d=16, n_iterations=3)
        assert run["step"] == 0.05
        assert run["n_outside"] == 3

    def test_the_report_is_drawn_and_can_be_written(self, tmp_path):
        report = compare_steps(n=10, d=4, n_iterations=4)
        assert json.loads(json.dumps(report, allow_nan=False)) == report
        draw_aim(report, tmp_path / "aim.png")
        assert (tmp_path / "aim.png").read_bytes().startswith(b"\x89PNG")

    def test_bad_input(self):
        with pytest.raises(ValueError, match="n_iterations must be a positive integer, got 0"):
            run_aim(n_iterations=0)
        with pytest.raises(ValueError, match=r"step must be a positive finite number or None, got -1\.0"):
            run_aim(n=3, d=2, step=-1.0)


def test_rows_of_the_trials_agree_with_the_clipping_index():
    random = Random(0)
    steps, points = random.randn(50, 6), random.randn(50, 6).clamp(min=0)
    wanted = [clipping_index(step, y) for step, y in zip(steps, points, strict=True)]
    assert rows_clipping(steps, points).tolist() == pytest.approx(wanted)

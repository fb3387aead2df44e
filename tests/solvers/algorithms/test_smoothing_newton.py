"""Newton's method on smoothed objectives, its linear systems, and its place in the default solver."""

import dataclasses
import math

import pytest
import torch
from covering import covering
from sklearn.exceptions import ConvergenceWarning
from solver_cases import LOSS_NAMES, PENALTY_NAMES, cases, make_program, randn

from convexformer_solvers import (
    Auto,
    DenseMap,
    Exact,
    GroupL2,
    GroupNuclear,
    Huber,
    Program,
    Status,
    alpha_grid,
    check_penalty,
    get_loss,
    get_penalty,
    iterate_path,
    solve,
)
from convexformer_solvers.algorithms import smoothing_newton
from convexformer_solvers.algorithms.smoothing_newton import SmoothingNewton
from convexformer_solvers.auto import AutoConfig, plan
from convexformer_solvers.auto.cost import admm_work
from convexformer_solvers.linalg.hessian import Curvature
from convexformer_solvers.linalg.newton_systems import (
    Features,
    System,
    newton_work,
    solved_in_features,
    solved_in_samples,
)
from convexformer_solvers.penalties.base import SmoothedDerivatives
from convexformer_solvers.points import null_point
from convexformer_solvers.rounding import EPS


def correlated(loss, penalty, ratio, n=80, shape=(10, 4), c=2, seed=0, mean=0.0):
    """A program on tokens that are correlated, whose alpha is a share of alpha_max."""
    data = randn(n, *shape, seed=seed)
    for token in range(1, shape[0]):
        data[:, token] = 0.8 * data[:, token - 1] + 0.6 * data[:, token]
    score = DenseMap(data).matvec(randn(*shape, c, seed=seed + 1)) / 6 + 0.5 * randn(n, c, seed=seed + 2)
    kind = get_loss(loss)
    if kind.targets == "sign":
        y = torch.where(score > 0, 1.0, -1.0).double()
    elif kind.targets == "simplex":
        y = torch.nn.functional.one_hot(score.argmax(1), c).double()
    else:
        y = score.exp().round().clamp(max=20) if loss == "poisson" else score
    program = Program(DenseMap(data + mean), y, kind, get_penalty(penalty), 1.0, fit_intercept=True)
    return program.with_alpha(ratio * program.alpha_max)


def a_system(program, size_of_blocks=1.0):
    """A Newton system of the program at a random point."""
    coef = randn(*program.coef_shape, seed=3)
    coef[0] = 0.0
    n_blocks, size = coef[..., 0, 0].numel(), coef.shape[-2] * coef.shape[-1]
    root = randn(n_blocks, size, size, seed=4)
    blocks = size_of_blocks * (root @ root.transpose(1, 2) + torch.eye(size))
    scales = torch.full((n_blocks,), size_of_blocks, dtype=torch.float64)
    right, intercept_right = randn(*program.coef_shape, seed=5), randn(program.y.shape[1], seed=6)
    if program.loss.shift_invariant:  # as the slopes of such a loss
        intercept_right -= intercept_right.mean()
    return System(Curvature(program, program.map.matvec(coef)), blocks, scales, right, intercept_right)


# Those in the samples need their refinement: without it they fall short of either tolerance.
@pytest.mark.parametrize(("size_of_blocks", "tolerance"), [(1.0, 1e-8), (1e-8, 1e-5)])
@pytest.mark.parametrize("solved", [solved_in_features, solved_in_samples])
@pytest.mark.parametrize(("loss", "penalty", "gated", "intercept"), cases("gated", "intercept"))
def test_systems_are_solved_on_either_side(loss, penalty, gated, intercept, solved, size_of_blocks, tolerance):
    program = make_program(loss, penalty, gated=gated, intercept=intercept, weighted=True).drop_zero_weights()
    features, system = Features(program), a_system(program, size_of_blocks)
    move, shift = solved(features, system)
    image = system.curvature.product(features.forward(move) + shift)  # H (A q + 1 b)
    penalty_part = (system.blocks @ move.reshape(*system.blocks.shape[:2], 1)).reshape(move.shape)
    torch.testing.assert_close(penalty_part + features.adjoint(image), system.right, rtol=tolerance, atol=tolerance)
    if intercept:
        torch.testing.assert_close(image.sum(0), system.intercept_right, rtol=1e-5, atol=1e-5)
    else:
        assert bool((shift == 0).all())


# The hardest takes 49 steps; where curvatures jump alternating directions and gradient steps take thousands.
@pytest.mark.parametrize(("loss", "penalty", "ratio"), covering(LOSS_NAMES, PENALTY_NAMES, [0.1, 1e-2, 1e-3, 1e-4]))
def test_few_steps_reach_many_digits_be_the_regularisation_weak_or_curvatures_jump(loss, penalty, ratio):
    result = solve(correlated(loss, penalty, ratio), SmoothingNewton(), tol=1e-8, max_iter=80)
    assert result.certificate.relative_gap <= 1e-8


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_agrees_with_cvxpy(loss, penalty):
    program = correlated(loss, penalty, 0.03, n=30, shape=(4, 3))
    newton, exact = solve(program, SmoothingNewton(), tol=1e-9), solve(program, Exact(), tol=1e-5)
    assert newton.certificate.primal == pytest.approx(exact.certificate.primal, rel=2e-5)
    assert newton.certificate.relative_gap <= 1e-9


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("n", [30, 300])  # fewer and more samples than features
def test_zeros_are_exact_and_those_of_other_solvers(penalty, n):
    program = correlated("squared", penalty, 0.1, n=n, shape=(20, 4))
    newton, auto = (solve(program, solver, tol=1e-9) for solver in (SmoothingNewton(), Auto()))
    zero = (newton.coef == 0).all(-1).all(-1)
    assert 0 < int(zero.sum()) < 20
    assert torch.equal(zero, (auto.coef == 0).all(-1).all(-1))
    torch.testing.assert_close(newton.coef, auto.coef, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("unit", [1e-8, 1e8])
@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("loss", ["huber", "logistic", "softmax"])
def test_units_of_the_data_do_not_matter(loss, penalty, unit):
    program = correlated(loss, penalty, 1e-3)
    scaled = Program(DenseMap(unit * program.map.data), program.y, program.loss, program.penalty, 1.0, None, True)
    scaled = scaled.with_alpha(1e-3 * scaled.alpha_max)
    one, other = (solve(each, SmoothingNewton(), tol=1e-6, max_iter=60) for each in (program, scaled))
    assert other.certificate.relative_gap <= 1e-6
    assert abs(one.n_iter - other.n_iter) <= 2


# In the samples; with moves of few digits or first widths without bound all are left at a gap of one.
@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("shape", [(15, 80, 5), (2, 5, 3)])
def test_fewer_samples_than_features_and_next_to_no_regularisation(shape, penalty):
    y = torch.eye(2, dtype=torch.float64)[torch.arange(shape[0]) % 2]
    program = Program(DenseMap(randn(*shape)), y, get_loss("softmax"), get_penalty(penalty), 1.0, fit_intercept=True)
    program = program.with_alpha(1e-6 * program.alpha_max)
    assert solve(program, SmoothingNewton(), tol=1e-6, max_iter=60).certificate.relative_gap <= 1e-6


@pytest.mark.parametrize("size", [100.0, 1e3, 1e4])
def test_a_start_so_far_out_that_the_loss_is_flat_is_left(size):
    """All samples are on their side by far: no slope tells how far the solution is."""
    program = make_program("logistic", "group_l2", c=1)
    tokens, direction = program.map.data, torch.zeros(program.coef_shape).double()
    direction[0, 0] = 1.0
    program = dataclasses.replace(program, y=tokens[:, 0, :1].sign()).with_alpha(1e-6 * program.alpha_max)
    start = size / float(tokens[:, 0, 0].abs().min()) * direction, torch.zeros(1).double()
    result = solve(program, SmoothingNewton(), tol=1e-6, max_iter=100, start=start)
    assert result.status is Status.CONVERGED


@pytest.mark.parametrize("seed", [0, 1, 5])
@pytest.mark.parametrize("size", [100.0, 1e4])
def test_flat_starts_of_classes_are_left(size, seed):
    data = torch.randn(12, 3, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    first = data[:, 0, 0]
    y = torch.stack([first > 0, first <= 0], dim=1).double()
    program = Program(DenseMap(data), y, get_loss("softmax"), get_penalty("nuclear"), 1.0, fit_intercept=True)
    coef = torch.zeros(program.coef_shape).double()
    coef[0, 0] = size / float(first.abs().min()) * torch.tensor([1.0, -1.0])
    program = program.with_alpha(1e-5 * program.alpha_max)
    result = solve(program, SmoothingNewton(), tol=1e-6, max_iter=100, start=(coef, torch.zeros(2).double()))
    assert result.status is Status.CONVERGED


@pytest.mark.parametrize(
    ("loss", "penalty", "seed", "power", "most"),
    [
        ("softmax", "group_l2", 2, 6, 1000),  # 164 to 720 steps where the data change by rounding
        ("softmax", "group_l2", 25, 20, 200),
        ("logistic", "group_l2", 35, 20, 200),
        ("logistic", "nuclear", 20, 20, 200),
    ],
)
def test_lengths_far_beyond_the_width_are_left(loss, penalty, seed, power, most):
    """Rare samples with small tokens need large weights, at which the smoothed objective has hardly any curvature."""
    draw = torch.Generator().manual_seed(seed)
    data = torch.randn(8, 8, 2, generator=draw, dtype=torch.float64)
    data *= torch.randn(8, 1, 1, generator=draw, dtype=torch.float64) ** 4
    y = torch.eye(2).double()[torch.randint(0, 2, (8,), generator=draw)]
    y = y if loss == "softmax" else 2 * y - 1
    weight = torch.rand(8, generator=draw, dtype=torch.float64) ** power
    program = Program(DenseMap(data), y, get_loss(loss), get_penalty(penalty), 1.0, weight)
    result = solve(program.with_alpha(1e-4 * program.alpha_max), SmoothingNewton(), tol=1e-6, max_iter=most)
    assert result.status is Status.CONVERGED


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_first_points_improve_on_the_best_constant_model(seed):
    draw = torch.Generator().manual_seed(seed)
    data = torch.randn(60, 10, 2, generator=draw, dtype=torch.float64)
    data *= torch.randn(60, 1, 1, generator=draw, dtype=torch.float64) ** 4
    y = 100 * torch.randn(60, 2, generator=draw).double()
    program = Program(DenseMap(data), y, Huber(0.02), GroupL2(), 1.0)
    program = program.with_alpha(1e-3 * program.alpha_max)
    with pytest.warns(ConvergenceWarning):
        result = solve(program, SmoothingNewton(), max_iter=3)
    assert result.certificate.primal <= 0.95 * program.null_value


@pytest.mark.parametrize("n_outputs", [1, 3])
def test_separated_samples_and_next_to_no_regularisation_are_solved_in_auto(n_outputs):
    program = Program(
        DenseMap(torch.ones(1, 1, 1).double()), torch.ones(1, n_outputs).double(), get_loss("logistic"), GroupL2(), 1.0
    )
    program = program.with_alpha(1e-6 * program.alpha_max)
    assert solve(program, Auto(), tol=1e-6, max_iter=200).status is Status.CONVERGED


@pytest.mark.parametrize("seed", [8, 21, 38])
def test_classes_that_are_nearly_separated_are_solved(seed):
    """The best intercepts of predictions so far apart are found, too."""
    draw = torch.Generator().manual_seed(seed)
    data = torch.randn(20, 3, 2, generator=draw, dtype=torch.float64)
    y = torch.eye(4).double()[torch.randint(0, 4, (20,), generator=draw)]
    program = Program(DenseMap(data), y, get_loss("softmax"), get_penalty("nuclear"), 1.0, fit_intercept=True)
    result = solve(program.with_alpha(1e-4 * program.alpha_max), SmoothingNewton(), tol=1e-6, max_iter=100)
    assert result.certificate.relative_gap <= 1e-6


def test_a_system_that_overflows_ends_it(monkeypatch):
    def overflows(*arguments):
        raise torch.linalg.LinAlgError("singular")

    monkeypatch.setattr(smoothing_newton, "solved", overflows)
    with pytest.warns(ConvergenceWarning):
        assert solve(correlated("huber", "nuclear", 1e-2), SmoothingNewton()).status is Status.STALLED


# Beside products of the features over so small an alpha the identity of the system is rounding.
@pytest.mark.parametrize("fit_intercept", [False, True])
def test_a_singular_system_of_the_samples_ends_it(fit_intercept):
    data = torch.tensor([[1.0, 0.0, 1.0], [-1.0, 1.0, -1.0]]).double()[:, :, None].expand(2, 3, 2)
    program = Program(
        DenseMap(data), torch.eye(2).double(), get_loss("softmax"), GroupL2(), 1.0, fit_intercept=fit_intercept
    )
    program = program.with_alpha(1e-20 * program.alpha_max)
    with pytest.warns(ConvergenceWarning):
        result = solve(program, SmoothingNewton())
    assert result.status is Status.STALLED
    assert 0 <= result.certificate.dual <= result.certificate.primal <= program.null_value


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("loss", ["squared", "huber"])
def test_targets_of_zero_leave_no_loss(loss, penalty):
    program = Program(DenseMap(randn(6, 2, 3)), torch.zeros((6, 2)).double(), get_loss(loss), get_penalty(penalty), 0.1)
    result = solve(program, SmoothingNewton(), tol=0.0)
    assert result.certificate.primal == result.certificate.dual == 0
    assert not result.coef.any()


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
def test_means_do_not_matter(penalty):
    programs = [correlated("logistic", penalty, 1e-2, mean=mean) for mean in (0.0, 1e4)]
    small, large = (solve(program, SmoothingNewton(), tol=1e-6, max_iter=60) for program in programs)
    assert large.certificate.relative_gap <= 1e-6
    assert large.n_iter <= small.n_iter + 3


def test_starts_from_where_another_alpha_ended():
    program = correlated("squared_hinge", "nuclear", 1e-3)
    solver = SmoothingNewton()
    state = solver.init(program, null_point(program))
    for _ in range(40):
        state = solver.step(program, state)
    near = program.with_alpha(0.9 * program.alpha)
    again = solver.init_again(near, solver.point(program, state), state)
    assert again.parts[0].features is state.parts[0].features
    assert again.parts[0].width < solver.init(near, null_point(near)).parts[0].width


def test_says_which_penalties_it_cannot_smooth():
    class Plain(GroupL2):
        smoothed_value = GroupL2.__mro__[1].smoothed_value

    with pytest.raises(TypeError, match="smoothed_value"):
        solve(make_program(penalty=Plain()), SmoothingNewton())


def far_away(spread, seed):
    """Targets that lie hundreds of thresholds beyond the quadratic part of Huber's loss."""
    data = randn(60, 5, 4, seed=seed)
    y = spread * (randn(60, 3, seed=seed + 2) + data[:, 0, :1])
    program = Program(DenseMap(data), y, get_loss("huber"), GroupL2(), 1.0, fit_intercept=True)
    return program.with_alpha(0.03 * program.alpha_max)


@pytest.mark.parametrize(("seed", "spread", "tol"), covering([0, 1], [1e1, 1e3, 1e6], [1e-4, 1e-8]))
def test_long_linear_parts_of_a_loss_take_few_steps(seed, spread, tol):
    assert solve(far_away(spread, seed), SmoothingNewton(), tol=tol, max_iter=100).certificate.relative_gap <= tol


def test_smoothing_of_loss_and_penalty_costs_the_same_at_most():
    program, solver = far_away(1e3, 0), SmoothingNewton()
    state, widths = solver.init(program, null_point(program)), set()
    for _ in range(40):
        for part in state.parts:
            cost, loss = part.width * part.unit_cost, program.loss
            pred, y = part.pred, part.program.y
            value, smoothed = loss.value(pred, y), part.smooth.loss.value(pred, y)
            assert bool((value - smoothed <= cost + 4 * EPS * value).all())
            widths.add(part.width)
        state = solver.step(program, state)
    assert len(widths) > 10


class TestSmoothedPenalties:
    def wrong(self, **methods):
        return type("Wrong", (GroupL2,), methods)()

    def test_check_rejects_one_that_is_below_the_penalty(self):
        penalty = self.wrong(smoothed_value=lambda self, coef, width: 0.99 * GroupL2.smoothed_value(self, coef, width))
        with pytest.raises(AssertionError, match="smoothed_value is not near"):
            check_penalty(penalty)

    def test_check_rejects_a_wrong_gradient(self):
        def derivatives(self, coef, width):
            gradient, hessian = GroupL2.smoothed_derivatives(self, coef, width)
            return SmoothedDerivatives(0.9 * gradient, hessian)

        with pytest.raises(AssertionError, match="smoothed gradient is wrong"):
            check_penalty(self.wrong(smoothed_derivatives=derivatives))

    def test_check_rejects_a_wrong_hessian(self):
        def derivatives(self, coef, width):
            gradient, hessian = GroupL2.smoothed_derivatives(self, coef, width)
            return SmoothedDerivatives(gradient, 0.9 * hessian)

        with pytest.raises(AssertionError, match="smoothed Hessian is wrong"):
            check_penalty(self.wrong(smoothed_derivatives=derivatives))

    @pytest.mark.parametrize("penalty", PENALTY_NAMES)
    @pytest.mark.parametrize("unit", [1e-120, 1e120])
    def test_derivatives_in_any_units(self, penalty, unit):
        penalty, coef = get_penalty(penalty), randn(3, 4, 2)
        gradient, hessian = penalty.smoothed_derivatives(coef, 0.3)
        scaled = penalty.smoothed_derivatives(unit * coef, unit * 0.3)
        torch.testing.assert_close(scaled.gradient, gradient)
        torch.testing.assert_close(unit * scaled.hessian, hessian)

    @pytest.mark.parametrize("shape", [(1, 4, 3), (1, 3, 5), (1, 4, 1), (1, 1, 2)])
    def test_the_nuclear_hessian_is_that_of_automatic_differentiation(self, shape):
        penalty, coef = get_penalty("nuclear"), randn(*shape)
        automatic = torch.autograd.functional.hessian(lambda z: penalty.smoothed_value(z, 0.3), coef)
        size = coef.numel()
        found = penalty.smoothed_derivatives(coef, 0.3).hessian[0]
        torch.testing.assert_close(found, automatic.reshape(size, size), atol=1e-12, rtol=1e-12)


def turns(program, config=None):
    """The algorithms of a plan, and how many steps each takes at most."""
    return [(stage.algorithm.name, stage.max_steps) for stage in plan(program, config=config)]


class TestInAuto:
    # Without these steps half of all combinations take 500 to 7800 iterations, and some do not end at all.
    @pytest.mark.parametrize(
        ("loss", "penalty", "ratio", "seed"), covering(LOSS_NAMES, PENALTY_NAMES, [1e-3, 1e-4], [0, 10])
    )
    def test_weak_regularisation_takes_hundreds_of_iterations_at_most(self, loss, penalty, ratio, seed):
        result = solve(correlated(loss, penalty, ratio, seed=seed), Auto(), tol=1e-6, max_iter=300)
        assert result.certificate.relative_gap <= 1e-6

    @pytest.mark.usefixtures("steady_rates")
    @pytest.mark.parametrize(("n", "shape"), [(80, (10, 4)), (600, (30, 30)), (2000, (20, 100))])
    def test_comes_the_later_the_more_it_costs(self, n, shape):
        program = Program(DenseMap(torch.ones(n, *shape)), torch.ones(n, 4), get_loss("huber"), GroupL2(), 0.1)
        config = AutoConfig(costly_gram=math.inf)
        found = turns(program, config)
        place = [name for name, _ in found].index("smoothing_newton")
        alternating, n_steps = zip(*found[:place], strict=True)
        assert set(alternating) == {"admm"}
        share = config.newton_share * config.usual_steps * newton_work(program) / admm_work(program, config)
        assert min(n_steps) == max(n_steps) >= max(config.first_steps, share)

    # Alternating directions and Newton steps alone, from where proximal steps are still far, leave a gap of 4e-4.
    def test_residuals_of_which_nearly_all_are_far_out(self):
        data, noise = randn(200, 6, 8, seed=1), randn(200, 5, seed=2)
        y = data[:, 0] @ randn(8, 5, seed=3) + 10 * noise
        program = Program(DenseMap(data), y, Huber(0.001), GroupNuclear(), 1.0, fit_intercept=True)
        program = program.with_alpha(0.03 * program.alpha_max)
        assert solve(program, Auto(), tol=1e-6, max_iter=1500).certificate.relative_gap <= 1e-6

    # Newton steps on smoothed objectives stall there, and other steps leave gaps of .02 to .2.
    @pytest.mark.parametrize("seed", [0, 4, 9])
    def test_a_class_of_hardly_any_weight_is_left_to_semismooth_steps(self, seed):
        draw = torch.Generator().manual_seed(seed)
        data = torch.randn(12, 8, 4, generator=draw, dtype=torch.float64)
        y = torch.where(torch.arange(12) < 3, -1.0, 1.0).double()[:, None]
        weight = torch.rand(12, generator=draw, dtype=torch.float64) * torch.where(y[:, 0] < 0, 1e-6, 1.0)
        program = Program(DenseMap(data), y, get_loss("squared_hinge"), GroupL2(), 1.0, weight, fit_intercept=True)
        program = program.with_alpha(0.3 * program.alpha_max)
        assert solve(program, Auto(), tol=1e-6, max_iter=300).certificate.relative_gap <= 1e-6

    # More than 80 Newton steps are needed, and other steps leave a gap of .4.
    def test_half_of_the_residuals_far_out_and_next_to_no_regularisation(self):
        draw = torch.Generator().manual_seed(5)
        data, y = (torch.randn(60, *shape, generator=draw, dtype=torch.float64) for shape in ((8, 4), (4,)))
        weight = torch.rand(60, generator=draw, dtype=torch.float64)
        program = Program(DenseMap(data), y**3, Huber(0.02), GroupL2(), 1.0, weight)
        program = program.with_alpha(1e-5 * program.alpha_max)
        assert solve(program, Auto(), tol=1e-6, max_iter=400).certificate.relative_gap <= 1e-6

    def test_comes_before_a_last_stage_that_is_the_only_one(self):
        program = correlated("poisson", "nuclear", 1e-4)
        config = AutoConfig(first_steps=50, newton_share=0.0)
        assert turns(program, config)[-3:] == [
            ("fista", 50),
            ("smoothing_newton", config.few_steps),
            ("fista", math.inf),
        ]
        assert 50 < solve(program, Auto(config), tol=1e-6).n_iter < 150

    # From the second alpha that needs them on they come at once: otherwise each of these takes 75 other steps before.
    @pytest.mark.parametrize(
        ("loss", "penalty"), [("poisson", "nuclear"), ("squared_hinge", "nuclear"), ("poisson", "group_l2")]
    )
    def test_paths_go_on_with_them(self, loss, penalty):
        program = correlated(loss, penalty, 1.0)
        results = list(iterate_path(program, Auto(), alpha_grid(program.alpha_max, 8, 1e-3), tol=1e-5))
        assert all(result.certificate.relative_gap <= 1e-5 for result in results)
        assert sum(result.n_iter for result in results) < 300

    @pytest.mark.usefixtures("steady_rates")
    def test_repeated_samples_have_the_same_turns(self):
        once = correlated("logistic", "nuclear", 1e-2, n=40)
        again = Program(
            once.map.rows(torch.arange(40).repeat(3)), once.y.repeat(3, 1), once.loss, once.penalty, once.alpha
        )
        assert turns(once) == turns(again)

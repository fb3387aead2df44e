"""The steps of alternating directions on the loss: its proximal step, and what a loss feels of it."""

import pytest
import torch
from solver_cases import make_program, randn

from convexformer_solvers import Admm, Auto, DenseMap, GatedMap, GroupL2, Program, get_loss, solve
from convexformer_solvers.algorithms.admm import AdmmConfig
from convexformer_solvers.linalg.ridge import RidgeInFeatures, RidgeInSamples, ridge_system
from convexformer_solvers.points import null_point, objective, with_own_correlation

NOT_QUADRATIC = ["huber", "logistic", "softmax", "squared_hinge"]
# On the side of the samples, and of the features.
SIDES = {"samples": {"n": 30, "blocks": 60, "d": 10}, "features": {"n": 60, "blocks": 4, "d": 3}}


def after(program, n_steps, config=None):
    """The point and the state after some steps in double precision."""
    solver = Admm(config=config)
    state = solver.init(program, null_point(program))
    for _ in range(n_steps):
        state = solver.step(program, state)
    return solver.point(program, state), state


def correlated_gated(loss, n_outputs, seed, ratio=0.01):
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn((200, 1, 8), generator=generator, dtype=torch.float64)
    data = common + 0.5 * torch.randn((200, 4, 8), generator=generator, dtype=torch.float64) + 0.3
    masks = torch.einsum("nkd,dh->nh", data, torch.randn((8, 25), generator=generator, dtype=torch.float64)) > 0
    masks[0] = True
    scores = torch.einsum("ikd,dc->ic", data[:, :2].relu(), randn(8, n_outputs, seed=1))
    scores = scores + randn(200, n_outputs, seed=2)
    if loss == "softmax":
        y = torch.nn.functional.one_hot(scores.argmax(1), n_outputs).double()
    else:
        y = torch.where(scores > 0, 1.0, -1.0).double()
    program = Program(GatedMap(data, masks), y, get_loss(loss), GroupL2(), 1.0, fit_intercept=True)
    return program.with_alpha(ratio * program.alpha_max)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("side", SIDES)
def test_ridge_problems_are_solved(side, intercept, weighted):
    program = make_program("squared", c=2, weighted=weighted, **SIDES[side]).drop_zero_weights()
    system = ridge_system(program.map, intercept)
    assert isinstance(system, RidgeInSamples if side == "samples" else RidgeInFeatures)
    target, center = randn(*program.y.shape, seed=1), randn(*program.coef_shape, seed=2)
    weight, rho = program.weight * (0.5 + randn(len(target), seed=3).square()), 0.07
    system.factorise(weight, rho)
    for _ in range(2):  # the second starts from the first
        fitted = system.fit(target, center, program.map.matvec(center))
    solution = system.solution()
    shift = fitted - program.map.matvec(solution)
    torch.testing.assert_close(shift, shift[:1].expand_as(shift), rtol=0, atol=1e-9)
    residual = weight[:, None] * (target - fitted)
    slack = program.map.rmatvec(residual) - rho * (solution - center)
    assert float(slack.abs().max()) < 1e-9
    torch.testing.assert_close(
        residual.sum(0) if intercept else shift[0], torch.zeros(2, dtype=torch.float64), atol=1e-9, rtol=0
    )


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "in_samples"), [(500, True), (519, True), (520, False), (560, False), (850, False)])
def test_the_smaller_side_is_taken_where_features_are_not_few(n, gated, in_samples):
    data = randn(n, 13, 4, seed=0) if gated else randn(n, 130, 4, seed=0)  # 520 features
    linear_map = GatedMap(data, randn(n, 10, seed=1) > 0) if gated else DenseMap(data)
    system = ridge_system(linear_map, False)
    assert isinstance(system, RidgeInSamples if in_samples else RidgeInFeatures)
    target, center = randn(n, 1, seed=2), randn(*linear_map.feature_shape, 1, seed=3)
    weight, rho = (0.5 + randn(n, seed=4).square()) / n, 0.01
    system.factorise(weight, rho)
    fitted = system.fit(target, center, linear_map.matvec(center))
    slack = linear_map.rmatvec(weight[:, None] * (target - fitted)) - rho * (system.solution() - center)
    assert float(slack.abs().max()) < 1e-9
    torch.testing.assert_close(linear_map.matvec(system.solution()), fitted)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("loss", NOT_QUADRATIC)
def test_the_step_on_the_loss_is_its_proximal_step(loss, intercept):
    # There rho times the move of the coefficients is the correlation of the predictions' own dual point.
    program = make_program(
        loss, c=3, intercept=intercept, weighted=True, ratio=0.05, **SIDES["samples"]
    ).drop_zero_weights()

    def error(config):
        point, _ = after(program, 8, config)
        own = with_own_correlation(program, point).correlation
        return float(torch.linalg.vector_norm(point.correlation - own) / torch.linalg.vector_norm(own))

    assert error(AdmmConfig(loss_steps=500, loss_accuracy=1e-10)) < 1e-7
    assert error(AdmmConfig()) < 0.1


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("side", SIDES)
def test_the_same_move_in_all_outputs_is_no_matter_of_cross_entropy(side, intercept):
    # The loss does not feel it, so its proximal step leaves that part of the coefficients where it is.
    program = make_program("softmax", c=3, intercept=intercept, ratio=0.05, **SIDES[side]).drop_zero_weights()
    for n_steps in (1, 4, 9):
        correlation = after(program, n_steps)[0].correlation
        assert float(correlation.mean(-1).abs().max()) < 1e-9 * float(correlation.abs().max())


@pytest.mark.parametrize(
    ("loss", "n_outputs", "seed", "n_iter"),
    [
        ("softmax", 3, 0, 120),
        ("softmax", 8, 0, 250),
        ("squared_hinge", 1, 0, 120),
        ("squared_hinge", 2, 0, 120),
        ("squared_hinge", 2, 1, 120),
    ],
)
def test_correlated_gated_classes_take_no_hundreds_of_iterations(loss, n_outputs, seed, n_iter):
    # With one ridge problem an iteration, which also counted common moves as curved, each took 470 to 570.
    program = correlated_gated(loss, n_outputs, seed)
    assert solve(program, Auto(), tol=1e-6, max_iter=n_iter).certificate.relative_gap <= 1e-6


def test_samples_that_meet_a_jump_of_the_curvature_do_not_slow_down_the_others():
    # Those alone get another curvature: the margin stands for all and stays at that of the loss.
    program = correlated_gated("squared_hinge", 2, seed=1)
    point, state = after(program, 30)
    assert state.margin <= 1
    assert float(state.curvature.max()) <= 1.5 * program.loss.smoothness
    assert float(state.curvature.median()) < float(state.curvature.max())
    assert objective(program, point) < 0.1 * program.null_value


@pytest.mark.parametrize("seed", range(6))
def test_far_targets_of_huber_do_not_send_the_proximal_steps_in_circles(seed):
    # With extrapolations across the kinks of the slopes 37 of 40 seeds had not got anywhere after 100 iterations.
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn((100, 64, 16), generator=generator, dtype=torch.float64)
    for token in range(1, 64):
        data[:, token] = 0.5 * data[:, token - 1] + 0.75**0.5 * data[:, token]
    y = data[:, :3].flatten(1) @ torch.randn((48, 1), generator=generator, dtype=torch.float64)
    y = 4 * y / y.std() + 0.5 * torch.randn((100, 1), generator=generator, dtype=torch.float64)
    program = Program(DenseMap(data), y, get_loss("huber"), GroupL2(), 1.0, fit_intercept=False)
    result = solve(program.with_alpha(0.01 * program.alpha_max), Admm(), tol=1e-5, max_iter=120)
    assert result.certificate.relative_gap <= 1e-5

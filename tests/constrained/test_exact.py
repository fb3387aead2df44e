"""The convex case: exact readouts, their certificates, and primal-dual training beside them."""

import numpy as np
import pytest
import torch
from torch import nn

from convexformer.constrained import DescentConstraints, PrimalDual, exact_readout
from convexformer.constrained.exact import _Readout
from convexformer.solvers import get_loss

RNG = np.random.default_rng(0)
FIRST = RNG.normal(size=(60, 3))
Y = FIRST @ np.array([1.0, -1.0, 0.5]) + 0.3 * RNG.normal(size=60)
NESTED = np.stack([FIRST, 2 * FIRST, 3 * FIRST])  # curvatures grow, so that differences of losses are convex
MIXED = np.stack([FIRST + 0.5 * RNG.normal(size=(60, 3)), FIRST])
DECAY = 0.2


def train(features, *, stop_gradient, n_epochs=3000, **constraints):
    """Primal-dual training of one readout of all layers."""
    data = [torch.as_tensor(features).transpose(0, 1), torch.as_tensor(Y)[:, None]]
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)

    def layer_losses(model, batch):
        layers, y = batch
        return 0.5 * (model(layers.transpose(0, 1)) - y).square().sum(-1)

    plain = {"optimizer": "sgd", "dual_optimizer": "sgd", "lr": 0.02, "dual_lr": 0.05, "warmup_epochs": 0}
    trainer = PrimalDual(
        model, layer_losses, batch_size=60, weight_decay=DECAY, stop_gradient=stop_gradient, **plain, **constraints
    )
    trainer.fit(data, n_epochs=n_epochs)
    return trainer


def test_the_multipliers_of_training_are_the_exact_ones():
    constraints = {"alpha": 0.1, "c_ref": 0.5}
    exact = exact_readout(NESTED, Y, DescentConstraints(**constraints), decay=DECAY)
    trainer = train(NESTED, stop_gradient=False, **constraints)
    assert exact.duals.max() > 0.01
    np.testing.assert_allclose(trainer.duals_.numpy(), exact.duals, atol=1e-3)
    np.testing.assert_allclose(trainer.model.weight.detach().numpy().T, exact.weight, atol=1e-3)


def test_training_without_the_gradient_of_the_reference_settles_at_the_exact_solution_for_its_losses():
    constraints = {"alpha": 0.05, "c_ref": 0.24}
    trainer = train(MIXED, stop_gradient=True, **constraints)
    losses = trainer.layer_losses_of([torch.as_tensor(MIXED).transpose(0, 1), torch.as_tensor(Y)[:, None]]).mean(1)
    exact = exact_readout(MIXED, Y, DescentConstraints(**constraints), decay=DECAY, reference=losses)
    assert exact.duals.max() > 0.01
    np.testing.assert_allclose(trainer.duals_.numpy(), exact.duals, atol=1e-2)
    np.testing.assert_allclose(trainer.model.weight.detach().numpy().T, exact.weight, atol=1e-3)


@pytest.mark.parametrize("c_ref", [10.0, 0.5])
def test_the_bound_holds_for_feasible_readouts_and_is_nearly_attained(c_ref):
    constraints = DescentConstraints(alpha=0.1, c_ref=c_ref)
    exact = exact_readout(NESTED, Y, constraints, decay=DECAY)
    assert exact.gap + 1e-9 >= 0
    assert exact.gap <= 1e-6
    assert exact.constraints.max() <= 1e-6
    assert (exact.duals >= 0).all()
    feasible = 0
    for seed in range(2000):
        weight = exact.weight + 0.3 * np.random.default_rng(seed).normal(size=(3, 1))
        losses = torch.as_tensor([0.5 * np.square(layer @ weight - Y[:, None]).mean() for layer in NESTED])
        if bool((constraints.values(losses) <= 0).all()):
            feasible += 1
            assert losses[-1].item() + DECAY / 2 * np.square(weight).sum() >= exact.bound
    assert feasible > 10


def test_without_an_active_constraint_it_is_ridge_regression():
    exact = exact_readout(NESTED, Y, DescentConstraints(alpha=0.0, c_ref=100.0), decay=DECAY)
    last = NESTED[-1]
    ridge = np.linalg.solve(last.T @ last / 60 + DECAY * np.eye(3), last.T @ Y / 60)
    assert exact.duals.max() < 1e-6
    np.testing.assert_allclose(exact.weight[:, 0], ridge, atol=1e-5)
    loose = exact_readout(
        MIXED, Y, DescentConstraints(alpha=0.0, c_ref=100.0), decay=DECAY, reference=np.full(2, 100.0)
    )
    last = MIXED[-1]
    ridge = np.linalg.solve(last.T @ last / 60 + DECAY * np.eye(3), last.T @ Y / 60)
    np.testing.assert_allclose(loose.weight[:, 0], ridge, atol=1e-5)


def test_logistic_readouts_with_reference_losses():
    labels = np.where(Y > 0, 1.0, -1.0)
    constraints = DescentConstraints(alpha=0.1, c_ref=0.45)
    exact = exact_readout(MIXED, labels, constraints, decay=0.01, reference=[0.5, 0.4], loss="logistic")
    assert exact.gap <= 1e-5
    assert exact.losses[0] <= 0.45 + 1e-6
    assert exact.losses[1] <= 0.9 * 0.5 + 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": FIRST}, "two layers or more"),
        ({"features": NESTED[:, :0], "y": Y[:0]}, "two layers or more, a sample and a feature"),
        ({"y": Y[:5]}, "one row per sample"),
        ({"decay": 0.0}, "decay must be a positive"),
        ({"features": NESTED[::-1].copy()}, "features make no convex problem"),
        ({"loss": "logistic"}, "reference must be given"),
        ({"reference": [1.0]}, "reference must have shape"),
        ({"reference": [1.0, np.nan, 1.0]}, "reference"),
        ({"reference": ["a", "b", "c"]}, "reference must hold numbers"),
        ({"y": np.full(60, np.nan)}, "y must"),
        ({"constraints": DescentConstraints(alpha=0.1, c_ref=1e-4)}, "cannot be met by any readout"),
    ],
)
def test_bad_problems(change, message):
    problem = {"features": NESTED, "y": Y, "constraints": DescentConstraints(alpha=0.1, c_ref=1.0), "decay": DECAY}
    with pytest.raises(ValueError, match=message):
        exact_readout(**problem | change)


@pytest.mark.parametrize(
    ("loss", "y", "message"),
    [
        ("logistic", np.arange(60) % 2, "must be -1 or 1"),
        ("softmax", np.arange(60) % 3, "one per class"),
        ("poisson", Y, "must be non-negative"),
    ],
)
def test_targets_of_another_loss_are_refused(loss, y, message):
    """Labels in place of signs or one-hot rows would make another problem, and a certified solution of that."""
    constraints = DescentConstraints(alpha=0.1, c_ref=1.0)
    with pytest.raises(ValueError, match=message):
        exact_readout(NESTED, y, constraints, decay=DECAY, reference=[1.0, 1.0, 1.0], loss=loss)


@pytest.mark.parametrize("constraints", [None, {"alpha": 0.1, "c_ref": 1.0}])
def test_constraints_of_another_kind_are_named(constraints):
    with pytest.raises(TypeError, match=r"constraints must be a DescentConstraints, .* got (None|\{)"):
        exact_readout(NESTED, Y, constraints, decay=DECAY)


def test_the_bound_holds_away_from_the_optimum():
    problem = _Readout(NESTED, Y[:, None], DescentConstraints(alpha=0.1, c_ref=0.5), DECAY, get_loss("squared"), None)
    weight, duals = problem.solve()
    optimum = problem.certified(weight, duals).objective
    rng = np.random.default_rng(3)
    for _ in range(10):
        moved = problem.certified(weight + rng.normal(size=weight.shape), duals * rng.uniform(0.5, 2, size=3))
        assert moved.bound <= optimum + 1e-6
    assert problem.certified(weight, duals + 9).bound > -np.inf  # as the constraints are convex


@pytest.mark.parametrize("with_reference", [False, True])
def test_constraints_of_later_layers_may_bind(with_reference):
    features = MIXED if with_reference else NESTED[:2]
    far = {"reference": np.full(len(features), 100.0)} if with_reference else {}
    loose = exact_readout(features, Y, DescentConstraints(alpha=1e-3, c_ref=100.0), decay=5.0, **far)
    last, before = loose.losses[-1], loose.losses[-2]
    alpha = 0.3 if with_reference else 1 - 0.98 * last / before
    given = {"reference": np.full(len(features), 0.98 * last / 0.7)} if with_reference else {}
    tight = exact_readout(features, Y, DescentConstraints(alpha=alpha, c_ref=100.0), decay=5.0, **given)
    limit = 0.98 * last if with_reference else (1 - alpha) * tight.losses[-2]
    assert tight.duals[-1] > 1e-3
    assert tight.losses[-1] == pytest.approx(limit, rel=1e-5)
    assert tight.constraints[-1] == pytest.approx(0.0, abs=1e-5)
    assert tight.gap == pytest.approx(0.0, abs=1e-5)


def test_the_bound_is_what_strong_convexity_proves_and_attained_without_a_loss():
    """Where the losses do not depend on the readout, the decay alone is minimised, and the bound is its minimum."""
    problem = _Readout(
        np.zeros((2, 60, 3)), Y[:, None], DescentConstraints(alpha=0.1, c_ref=0.5), DECAY, get_loss("squared"), None
    )
    duals, loss = np.array([0.3, 2.0]), np.square(Y).mean() / 2
    found = problem.certified(np.ones((3, 1)), duals)
    assert found.objective == pytest.approx(loss + 3 * DECAY / 2)
    assert found.bound == pytest.approx(loss + duals @ [loss - 0.5, 0.1 * loss])


@pytest.mark.parametrize("sizes", [(1.0, 2.0), (1.2, 1.15)], ids=["larger", "smaller"])
@pytest.mark.parametrize("curvature", [1e-10, 1e-16])
def test_a_decay_below_the_curvature_that_is_tolerated_proves_no_bound(curvature, sizes):
    """The second feature makes the first layer worse, which the constraint of the second one asks for."""
    small, decay = curvature**0.5, curvature / 20
    layers, y = np.stack([np.diag([sizes[0], small]), np.diag([sizes[1], 0.0])]), np.array([[0.0], [1.0]])
    problem = _Readout(layers, y, DescentConstraints(alpha=0.5, c_ref=9.0), decay, get_loss("squared"), None)
    stationary = np.array([[0.0], [small / 4 / (curvature / 4 - decay)]])
    feasible = np.array([[0.0], [-0.5 / small]])
    found, other = (problem.certified(weight, np.array([0.0, 1.0])) for weight in (stationary, feasible))
    assert (other.constraints <= 0).all()
    assert found.bound <= other.objective
    assert found.gap == np.inf
    assert problem.certified(stationary, np.array([1.0, 0.0])).bound > -np.inf


def test_constraints_are_on_reference_losses_of_the_layer_before():
    constraints, reference = DescentConstraints(alpha=0.05, c_ref=0.24), [0.2, 1e-9]  # the last counts nowhere
    exact = exact_readout(MIXED, Y, constraints, decay=DECAY, reference=reference)
    np.testing.assert_allclose(exact.constraints, exact.losses - [0.24, 0.95 * 0.2])
    squares = np.square(MIXED @ exact.weight - Y[:, None]).mean((1, 2)) / 2
    np.testing.assert_allclose(exact.losses, squares)
    problem = _Readout(MIXED, Y[:, None], constraints, DECAY, get_loss("squared"), reference)
    found, weight = problem.certified(exact.weight, np.array([0.0, 9.0])), exact.weight
    slope = (1 + 9) * FIRST.T @ (FIRST @ weight - Y[:, None]) / 60 + DECAY * weight
    below = np.square(slope).sum() / (2 * DECAY)  # no constraint curves downwards
    assert found.bound == pytest.approx(exact.objective + 9 * exact.constraints[1] - below)


def test_the_bound_of_the_first_layer_may_have_the_factor():
    with_factor, plain = (
        exact_readout(NESTED, Y, DescentConstraints(alpha=0.1, **options), decay=DECAY)
        for options in ({"c_ref": 0.5, "first_factor": True}, {"c_ref": 0.45})
    )
    assert plain.duals[0] > 1e-3
    np.testing.assert_allclose(with_factor.weight, plain.weight, atol=1e-6)
    np.testing.assert_allclose(with_factor.constraints, plain.constraints, atol=1e-6)


def test_curvature_is_judged_up_to_rounding_and_the_layers_are_named():
    constraints = DescentConstraints(alpha=0.1, c_ref=10.0)
    for copies in range(1, 4):  # of features, which leave directions without any curvature
        alike = np.concatenate([NESTED, NESTED[..., :copies]], 2)
        assert exact_readout(alike, Y, constraints, decay=DECAY).gap <= 1e-6
    orthogonal = np.linalg.qr(FIRST)[0]
    almost = np.stack([orthogonal, 2 * orthogonal, 3 * orthogonal])
    almost[2, :, 0] = (0.9 * 4 - 1e-6) ** 0.5 * orthogonal[:, 0]
    with pytest.raises(ValueError, match=r"loss of layer 3 less 0\.9 times that of layer 2 has curvature -1\.67e-08"):
        exact_readout(almost, Y, constraints, decay=DECAY)


def test_one_layer_is_no_descent():
    with pytest.raises(ValueError, match=r"two layers or more, .* got \(1, 60, 3\)"):
        exact_readout(FIRST[None], Y, DescentConstraints(c_ref=1.0), decay=DECAY)

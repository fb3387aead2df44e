"""Losses: derivatives, conjugates, domains, best constants, and agreement with scikit-learn, scipy and cvxpy."""

import math

import cvxpy as cp
import mpmath
import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, mean_poisson_deviance, mean_squared_error
from solver_cases import CVXPY_LOSSES, LOSS_NAMES, NUMPY_LOSSES, PROPERTY, accepts, numpy_loss, randn, random_weight

from convexformer_solvers import (
    LOSSES,
    Huber,
    Logistic,
    Loss,
    Poisson,
    Softmax,
    Squared,
    SquaredHinge,
    check_loss,
    get_loss,
)
from convexformer_solvers.losses.intercept import LossAtIntercepts, SoftmaxAtIntercepts, best_intercept
from convexformer_solvers.losses.smoothed_huber import SmoothedHuber

INSTANCES = [*(kind() for kind in LOSSES.values()), Huber(delta=0.2), Huber(delta=20.0)]


def example_problem(loss, n=30, c=2, seed=0, scale=1.0):
    y = loss.example_target(n, c, torch.Generator().manual_seed(seed))
    return randn(n, c, seed=seed + 100, scale=scale), y


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("loss", "n_outputs"), [(loss, c) for loss in INSTANCES for c in (1, 2, 3, 6) if accepts(loss, c)], ids=repr
)
def test_every_loss_passes_its_check(loss, n_outputs, seed):
    check_loss(loss, n_outputs=n_outputs, seed=seed)


def test_only_cross_entropy_needs_two_outputs():
    assert [type(loss) for loss in INSTANCES if not accepts(loss, 1)] == [Softmax]


def wrong_gradient(kind):
    return {"gradient": lambda self, pred, y: 1.01 * kind.gradient(self, pred, y)}


def wrong_gradient_sign(kind):
    return {"gradient": lambda self, pred, y: -kind.gradient(self, pred, y)}


def wrong_value(kind):
    return {"value": lambda self, pred, y: kind.value(self, pred, y) + 0.01 * pred.sum(1)}


def wrong_value_shape(kind):
    return {"value": lambda self, pred, y: kind.value(self, pred, y)[:, None]}


def concave(kind):
    return {
        "value": lambda self, pred, y: -kind.value(self, pred, y),
        "gradient": lambda self, pred, y: -kind.gradient(self, pred, y),
        "hessian_product": lambda self, pred, y, direction: -kind.hessian_product(self, pred, y, direction),
    }


def wrong_hessian(kind):
    return {"hessian_product": lambda self, pred, y, direction: 1.1 * kind.hessian_product(self, pred, y, direction)}


def wrong_mean_hessian(kind):
    return {"mean_hessian": lambda self, pred, y, weight: 1.1 * kind.mean_hessian(self, pred, y, weight)}


def wrong_smoothness(kind):
    # Half the true constant; for a loss without one, any number.
    finite = kind().smoothness / 2
    return {"smoothness": property(lambda self: finite if math.isfinite(finite) else 1.0)}


def wrong_conjugate_factor(kind):
    return {"conjugate": lambda self, u, y: 1.01 * kind.conjugate(self, u, y)}


def wrong_conjugate_constant(kind):
    return {"conjugate": lambda self, u, y: kind.conjugate(self, u, y) - 0.01}


def gradient_in_double(kind):
    return {"gradient": lambda self, pred, y: kind.gradient(self, pred.double(), y.double())}


def zero_conjugate(kind):
    return {"conjugate": lambda self, u, y: u.new_zeros(len(u))}


def nan_conjugate(kind):
    return {"conjugate": lambda self, u, y: u.new_full((len(u),), math.nan)}


def wrong_intercept(kind):
    # In one output only: cross-entropy does not see a shift of all.
    shift = torch.tensor([0.1, 0.0, 0.0], dtype=torch.float64)
    return {"best_intercept": lambda self, *args: kind.best_intercept(self, *args) + shift}


MUTATIONS = [
    wrong_gradient,
    gradient_in_double,
    wrong_gradient_sign,
    wrong_value,
    wrong_value_shape,
    concave,
    wrong_hessian,
    wrong_mean_hessian,
    wrong_smoothness,
    wrong_conjugate_factor,
    wrong_conjugate_constant,
    zero_conjugate,
    nan_conjugate,
    wrong_intercept,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_check_rejects_a_wrong_loss(name, mutation):
    kind = LOSSES[name]
    mutant = type(f"{kind.__name__}With{mutation.__name__}", (kind,), mutation(kind))()
    with pytest.raises(AssertionError):
        check_loss(mutant)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_check_names_the_identity_that_fails(name):
    kind = LOSSES[name]
    mutant = type("Mutant", (kind,), wrong_conjugate_factor(kind))()
    with pytest.raises(AssertionError, match="Fenchel-Young"):
        check_loss(mutant)


class QuadraticOfKind(Loss):
    """Quadratic where a row of targets is of the kind, and not convex elsewhere."""

    smoothness = 1.0
    output_separable = False

    def value(self, pred, y):
        return (0.5 * self.curvature(y) * (pred - y).square()).sum(1)

    def gradient(self, pred, y):
        return self.curvature(y) * (pred - y)

    def hessian_product(self, pred, y, direction):
        return self.curvature(y) * direction

    def conjugate(self, u, y):
        return (0.5 * u.square() / self.curvature(y) + u * y).sum(1)

    def curvature(self, y):
        of_kind = (y.abs() == 1).all(1) if self.targets == "sign" else (y >= 0).all(1) & (y.sum(1) == 1)
        return torch.where(of_kind, 1.0, -1.0).to(y)[:, None]


@pytest.mark.parametrize("targets", ["sign", "simplex"])
def test_a_loss_is_checked_on_targets_of_its_kind(targets):
    check_loss(type("OfKind", (QuadraticOfKind,), {"targets": targets})())


class SeparableSoftmax(Softmax):
    output_separable = True
    mean_hessian = Loss.mean_hessian


def test_check_rejects_a_joint_loss_that_claims_to_separate():
    with pytest.raises(AssertionError):
        check_loss(SeparableSoftmax())


class HuberWithoutDomain(Huber):
    def conjugate(self, u, y):
        return (0.5 * u.square() + u * y).sum(1)


class SquaredHingeWithoutDomain(SquaredHinge):
    def conjugate(self, u, y):
        t = -u * y
        return (0.25 * t.square() - t).sum(1)


class SoftmaxWithoutDomain(Softmax):
    def conjugate(self, u, y):
        s = (u + y).clamp(min=0)
        return torch.xlogy(s, s).sum(1)


class LogisticWithoutDomain(Logistic):
    def conjugate(self, u, y):
        t = (-u * y).clamp(0, 1)
        return (torch.xlogy(t, t) + torch.xlogy(1 - t, 1 - t)).sum(1)


class PoissonWithoutDomain(Poisson):
    def conjugate(self, u, y):
        s = (u + y).clamp(min=0)
        return (torch.xlogy(s, s) - s - torch.xlogy(y, y) + y).sum(1)


@pytest.mark.parametrize(
    "kind",
    [
        HuberWithoutDomain,
        SquaredHingeWithoutDomain,
        SoftmaxWithoutDomain,
        LogisticWithoutDomain,
        PoissonWithoutDomain,
    ],
)
def test_check_rejects_a_conjugate_that_forgets_its_domain(kind):
    # Such a conjugate is right at every gradient, and makes dual bounds above the optimum from any other point.
    with pytest.raises(AssertionError):
        check_loss(kind())


class LogisticOfNanOutside(Logistic):
    def conjugate(self, u, y):
        t = -u * y
        return (torch.xlogy(t, t) + torch.xlogy(1 - t, 1 - t)).sum(1)


class Pinball(Loss):
    smoothness = math.inf
    of_residual = True

    def value(self, pred, y):
        residual = y - pred
        return torch.maximum(0.3 * residual, -0.7 * residual).sum(1)

    def gradient(self, pred, y):
        return torch.where(y > pred, -torch.full_like(pred, 0.3), torch.full_like(pred, 0.7))

    def hessian_product(self, pred, y, direction):
        return torch.zeros_like(direction)

    def conjugate(self, u, y):
        inside = ((u >= -0.3) & (u <= 0.7)).all(1)
        return torch.where(inside, (u * y).sum(1), math.inf)


def test_check_names_the_jump_of_a_loss_that_is_not_differentiable():
    # Solvers stall on it: their slopes do not tend to zero at an optimum.
    for seed in range(5):
        with pytest.raises(AssertionError, match="gradient jumps"):
            check_loss(Pinball(), seed=seed)


@pytest.mark.parametrize("kind", [LogisticOfNanOutside, HuberWithoutDomain])
def test_check_says_what_a_conjugate_is_outside_its_domain(kind):
    with pytest.raises(AssertionError, match="outside its domain the conjugate must be inf"):
        check_loss(kind())


class HuberOfWrongWidth(Huber):
    def widened(self, y, slope, width):
        return Huber((width - 1) * self.delta), y - (width - 1) * slope


class HuberOfWrongTargets(Huber):
    def widened(self, y, slope, width):
        return Huber(width * self.delta), y - width * slope


class NegativeSquared(Squared):
    quadratic = False

    def value(self, pred, y):
        return super().value(pred, y) - 10.0

    def conjugate(self, u, y):
        return super().conjugate(u, y) + 10.0


class SquaredOfTwiceTheTarget(Squared):
    quadratic = False

    def value(self, pred, y):
        return super().value(pred, 2 * y)

    def gradient(self, pred, y):
        return super().gradient(pred, 2 * y)

    def conjugate(self, u, y):
        return super().conjugate(u, 2 * y)

    def best_intercept(self, pred, y, weight, start=None):
        return super().best_intercept(pred, 2 * y, weight, start)


class SquaredOfAnyScale(Squared):
    def best_dual_scale(self, theta, y, weight, limit):
        return torch.ones_like(limit)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(NegativeSquared, "negative"), (SquaredOfTwiceTheTarget, "of_residual"), (SquaredOfAnyScale, "best_dual_scale")],
)
def test_check_rejects_what_solvers_and_gaps_rest_on(kind, message):
    with pytest.raises(AssertionError, match=message):
        check_loss(kind())


class PositiveTargets(Squared):
    """Squared distance of logarithms, with the targets of real numbers."""

    quadratic = of_residual = False

    def value(self, pred, y):
        return super().value(pred, y.log())


class SquaredInPlace(Squared):
    def gradient(self, pred, y):
        return pred.sub_(y)


class SquaredWithoutGraph(Squared):
    def value(self, pred, y):
        return super().value(pred.detach(), y)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (PositiveTargets, "nan at the targets of example_target"),
        (SquaredInPlace, "changes its arguments"),
        (SquaredWithoutGraph, "operations on pred that torch differentiates"),
    ],
)
def test_check_names_what_keeps_a_loss_from_being_tested(kind, message):
    with pytest.raises(AssertionError, match=message):
        check_loss(kind())


@pytest.mark.parametrize("kind", [HuberOfWrongWidth, HuberOfWrongTargets])
def test_check_rejects_what_is_no_proximal_step(kind):
    with pytest.raises(AssertionError, match="proximal step in the dual"):
        check_loss(kind())


class HuberThatIsSmoothedTooFar(Huber):
    def smoothed(self, cost):
        return super().smoothed(10 * cost)


class HuberOfOtherSlopes(Huber):
    def smoothed(self, cost):
        return type("_Wrong", (SmoothedHuber,), {"unsmoothed": lambda self, pred, y: pred})(self.delta, cost)


@pytest.mark.parametrize(
    ("kind", "message"), [(HuberThatIsSmoothedTooFar, "by the cost"), (HuberOfOtherSlopes, "other slopes")]
)
def test_check_rejects_a_wrong_smoothed_loss(kind, message):
    with pytest.raises(AssertionError, match=message):
        check_loss(kind())


@pytest.mark.parametrize("delta", [1e-6, 1.0, 1e3])
@pytest.mark.parametrize("width", [1e-9, 1e-4, 1.0, 1e5])
def test_smoothed_huber_in_every_digit(delta, width):
    # Far from the kinks and near them, where differences of roots and logarithms would cancel.
    residual = delta * torch.logspace(-8, 8, 33, dtype=torch.float64)
    loss, y = SmoothedHuber(delta, width), torch.zeros(33, 1, dtype=torch.float64)
    with mpmath.workdps(60):
        d, w = mpmath.mpf(delta), mpmath.mpf(width)

        def square(x):
            return x * mpmath.hypot(x, w) + w**2 * mpmath.asinh(x / w)

        exact = [mpmath.mpf(float(r)) for r in residual]
        value = [(square(r + d) - square(r - d)) / 4 - square(d) / 2 for r in exact]
        slope = [(mpmath.hypot(r + d, w) - mpmath.hypot(r - d, w)) / 2 for r in exact]
        bend = [((r + d) / mpmath.hypot(r + d, w) - (r - d) / mpmath.hypot(r - d, w)) / 2 for r in exact]
    pred = residual[:, None]
    np.testing.assert_allclose(loss.value(pred, y), np.array(value, float), rtol=1e-14)
    # Its slope is the residual, up to 1e8 delta, which multiplies the rounding of a slope.
    conjugate = [s * r - v for s, r, v in zip(slope, exact, value, strict=True)]
    np.testing.assert_allclose(loss.conjugate(loss.gradient(pred, y), y), np.array(conjugate, float), rtol=1e-7)
    np.testing.assert_allclose(loss.gradient(pred, y)[:, 0], np.array(slope, float), rtol=1e-14)
    second = loss.hessian_product(pred, y, torch.ones_like(pred))[:, 0]
    np.testing.assert_allclose(second, np.array(bend, float), rtol=1e-13)


@pytest.mark.parametrize("loss", [loss for loss in INSTANCES if math.isfinite(loss.smoothness)], ids=repr)
def test_smoothness_is_the_largest_curvature_and_not_more(loss):
    margin = 0.0 if loss.targets == "sign" else 0.5  # where a residual of zero, or even classes, bend most
    y = torch.tensor([[1.0, 0.0]], dtype=torch.float64) if loss.targets == "simplex" else torch.ones(1, 2).double()
    pred = torch.full_like(y, margin) if loss.targets != "real" else y
    direction = torch.tensor([[1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    for each in (loss, loss.smoothed(0.1), loss.smoothed(10.0)):
        curvature = float((direction * each.hessian_product(pred, y, direction)).sum())
        assert curvature == pytest.approx(each.smoothness, rel=1e-12)
    assert not isinstance(loss, Huber) or loss.smoothed(1.0).smooth_curvature


@pytest.mark.parametrize("n", [2, 50, 58, 100, 198])
def test_medians_of_even_weights_are_those_below_the_middle(n):
    y = torch.arange(1, n + 1, dtype=torch.float64)[:, None]  # sums of 1 / 50 miss a half by rounding
    weight = torch.full((n,), 1 / n, dtype=torch.float64)
    assert Huber(1.0).tail_length(torch.zeros_like(y), y, weight) == n / 2


def test_tails_are_as_long_as_half_of_the_residuals():
    y = torch.tensor([[0.5, 1.0], [20.0, 2.0], [30.0, 3.0], [-4e6, 4.0], [60.0, 50.0]], dtype=torch.float64)
    pred, weight = torch.zeros_like(y), torch.full((5,), 0.2, dtype=torch.float64)
    assert Huber(10.0).tail_length(pred, y, weight) == 3.0
    assert Huber(1e3).tail_length(pred, y, weight) == 1.0
    assert all(loss.tail_length(pred, y, weight) == 1.0 for loss in INSTANCES if not isinstance(loss, Huber))


@pytest.mark.parametrize("seed", range(5))
def test_tails_of_weighted_samples_are_those_of_repeated_ones(seed):
    y, counts = 100 * randn(9, 2, seed=seed), torch.randint(0, 4, (9,), generator=torch.Generator().manual_seed(seed))
    repeated = y.repeat_interleave(counts, dim=0)
    even = torch.full((len(repeated),), 1 / len(repeated), dtype=torch.float64)
    weighted = Huber().tail_length(torch.zeros_like(y), y, counts.double() / counts.sum())
    assert weighted == Huber().tail_length(torch.zeros_like(repeated), repeated, even)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", INSTANCES, ids=repr)
def test_fenchel_young_holds_everywhere(loss, seed):
    # Far predictions against near and far dual points: the domain of the conjugate decides.
    pred, y = example_problem(loss, n=300, c=2, seed=seed)
    u = randn(300, 2, seed=seed + 7) * 10 ** torch.linspace(-3, 2, 300, dtype=torch.float64)[:, None]
    for scale in (1e-2, 1.0, 10.0, 300.0):
        product = (u * (scale * pred)).sum(1)
        slack = loss.value(scale * pred, y) + loss.conjugate(u, y) - product
        assert (slack >= -1e-10 * (1 + product.abs())).all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("loss", INSTANCES, ids=repr)
def test_fenchel_young_is_tight_at_gradients(loss, scale):
    pred, y = example_problem(loss, n=200, scale=scale)
    gradient = loss.gradient(pred, y)
    value, product = loss.value(pred, y), (gradient * pred).sum(1)
    slack = value + loss.conjugate(gradient, y) - product
    # Poisson at exp(30 f): the terms cancel to rounding of the largest.
    magnitude = 1 + value.abs() + product.abs()
    assert (slack.abs() <= 1e-9 * magnitude).all()


@pytest.mark.parametrize("loss", INSTANCES, ids=repr)
def test_domain_of_the_conjugate_holds_zero_and_is_star_shaped(loss):
    # What lets a certificate scale any dual point towards zero.
    pred, y = example_problem(loss, scale=3.0)
    for scale in (0.0, 1e-12, 0.1, 0.5, 0.999, 1.0):
        assert torch.isfinite(loss.conjugate(scale * loss.gradient(pred, y), y)).all()


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_value_equals_reference_formula_and_cvxpy_expression(name):
    loss = get_loss(name)
    pred, y = example_problem(loss, c=3, scale=2.0)
    weight = random_weight(30).numpy()
    expected = numpy_loss(loss, pred.numpy(), y.numpy())
    np.testing.assert_allclose(loss.value(pred, y), expected, rtol=1e-12, atol=1e-13)
    expression = loss.expression(cp.Constant(pred.numpy()), y.numpy(), weight)
    assert expression.is_dcp()
    assert float(expression.value) == pytest.approx(weight @ expected, rel=1e-9)


def test_reference_formulas_cover_the_losses_of_the_package():
    assert set(LOSSES) <= set(NUMPY_LOSSES)
    assert set(LOSSES) <= set(CVXPY_LOSSES)


class TestAgainstOtherPackages:
    weight = random_weight(30)

    def mean(self, loss, pred, y):
        return float((self.weight * loss.value(pred, y)).sum() / self.weight.sum())

    def test_logistic_is_log_loss(self):
        pred, y = example_problem(Logistic(), c=1)
        probability = torch.sigmoid(pred)[:, 0]
        expected = log_loss(y[:, 0], probability, sample_weight=self.weight)
        assert self.mean(Logistic(), pred, y) == pytest.approx(expected, rel=1e-12)

    def test_softmax_is_log_loss(self):
        pred, y = example_problem(Softmax(), c=4)
        expected = log_loss(y.argmax(1), torch.softmax(pred, 1), sample_weight=self.weight, labels=range(4))
        assert self.mean(Softmax(), pred, y) == pytest.approx(expected, rel=1e-12)

    def test_softmax_of_two_classes_is_logistic_in_the_difference(self):
        pred, y = example_problem(Softmax(), c=2)
        sign = y[:, [0]] - y[:, [1]]
        torch.testing.assert_close(
            Softmax().value(pred, y), Logistic().value(pred[:, [0]] - pred[:, [1]], sign), rtol=1e-12, atol=0
        )

    def test_squared_is_half_the_mean_squared_error(self):
        pred, y = example_problem(Squared(), c=3)
        expected = 3 * mean_squared_error(y, pred, sample_weight=self.weight) / 2  # summed, not averaged, over outputs
        assert self.mean(Squared(), pred, y) == pytest.approx(expected, rel=1e-12)

    def test_poisson_is_half_the_deviance(self):
        pred, y = example_problem(Poisson(), c=1)
        expected = mean_poisson_deviance(y[:, 0], pred.exp()[:, 0], sample_weight=self.weight) / 2
        assert self.mean(Poisson(), pred, y) == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("delta", [0.1, 1.35, 10.0])
    def test_huber_is_that_of_scipy_and_half_that_of_huber_regressor(self, delta):
        pred, y = example_problem(Huber(), c=1)
        residual = (y - pred)[:, 0].numpy()
        value = Huber(delta).value(pred, y).numpy()
        np.testing.assert_allclose(value, scipy.special.huber(delta, residual), rtol=1e-12)
        # HuberRegressor's loss at scale 1: r^2 inside, 2 delta |r| - delta^2 outside.
        outside = np.abs(residual) > delta
        theirs = np.where(outside, 2 * delta * np.abs(residual) - delta**2, residual**2)
        np.testing.assert_allclose(value, theirs / 2, rtol=1e-12)

    def test_squared_hinge_is_that_of_the_margins(self):
        y = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]], dtype=torch.float64)
        pred = torch.tensor([[2.0], [0.5], [-1.0], [-1.0]], dtype=torch.float64)
        assert SquaredHinge().value(pred, y).tolist() == [0.0, 2.25, 4.0, 0.0]


class TestTargets:
    @pytest.mark.parametrize(
        ("loss", "rows"),
        [
            (Logistic(), [[0.0], [1.0]]),
            (Logistic(), [[1.0], [0.5]]),
            (SquaredHinge(), [[0.0], [1.0]]),
            (SquaredHinge(), [[-1.0], [2.0]]),
            (Softmax(), [[1.0], [1.0]]),
            (Softmax(), [[0.5, 0.4], [1.0, 0.0]]),
            (Softmax(), [[-1.0, 2.0], [1.0, 0.0]]),
            (Poisson(), [[1.0], [-1.0]]),
            (Poisson(), [[1.0, 0.0], [1.0, 0.0]]),
        ],
        ids=repr,
    )
    def test_wrong_targets_are_refused_with_the_name_of_the_loss(self, loss, rows):
        with pytest.raises(ValueError, match=f"(?i){type(loss).__name__}"):
            loss.check_target(torch.tensor(rows, dtype=torch.float64))

    @pytest.mark.parametrize("loss", INSTANCES, ids=repr)
    def test_own_examples_are_accepted_in_both_precisions(self, loss):
        _, y = example_problem(loss, c=3)
        assert y.dtype == torch.float64
        assert y.shape == (30, 3)
        loss.check_target(y)
        loss.check_target(y.float())


@pytest.mark.parametrize("scale", [1e2, 1e4])
@pytest.mark.parametrize("loss", INSTANCES, ids=repr)
def test_large_predictions_give_no_nan(loss, scale):
    pred, y = example_problem(loss, c=3, scale=scale)
    value = loss.value(pred, y)
    assert not value.isnan().any()
    assert not loss.gradient(pred, y).isnan().any()
    if math.isfinite(loss.smoothness):
        assert torch.isfinite(value).all()
        assert torch.isfinite(loss.gradient(pred, y)).all()
        assert torch.isfinite(loss.hessian_product(pred, y, torch.ones_like(pred))).all()


def test_logistic_and_softmax_are_linear_far_out():
    pred = torch.tensor([[-1000.0], [1000.0]], dtype=torch.float64)
    assert Logistic().value(pred, torch.ones_like(pred)).tolist() == [1000.0, 0.0]
    both = torch.cat([pred, -pred], 1)
    assert Softmax().value(both, torch.tensor([[1.0, 0.0]]).expand(2, 2)).tolist() == [2000.0, 0.0]


def test_logistic_keeps_digits_where_the_loss_is_tiny():
    pred = torch.tensor([[20.0], [40.0], [60.0], [300.0]], dtype=torch.float64)
    expected = np.logaddexp(0, -pred[:, 0].numpy())
    np.testing.assert_allclose(Logistic().value(pred, torch.ones_like(pred)), expected, rtol=1e-8)


@pytest.mark.parametrize("margin", [15.0, 19.0, 21.0, 25.0, 30.0, 49.0, 51.0, 700.0])
def test_logistic_keeps_every_digit_of_its_rounding(margin):
    pred = torch.tensor([[-margin]], dtype=torch.float64)
    value = float(Logistic().value(pred, torch.ones_like(pred)))
    assert value == pytest.approx(margin + math.log1p(math.exp(-margin)), rel=4e-16, abs=0)


def test_scales_of_the_squared_loss_are_never_negative():
    y, weight = randn(8, 2), torch.full((8,), 1 / 8, dtype=torch.float64)
    for limit in (torch.tensor(math.inf), torch.tensor([math.inf, math.inf])):
        for theta in (-y, 0 * y):
            assert not Squared().best_dual_scale(theta, y, weight, limit.double()).any()


@pytest.mark.parametrize(("dtype", "kept", "refused"), [(torch.float64, 1e-12, 1e-9), (torch.float32, 1e-6, 1e-4)])
def test_rows_of_probabilities_may_miss_one_by_their_rounding(dtype, kept, refused):
    for total in (1 - kept, 1.0, 1 + kept):
        Softmax().check_target((total * torch.tensor([[0.1, 0.2, 0.7]], dtype=torch.float64)).to(dtype))
    for total in (1 - refused, 1 + refused):
        with pytest.raises(ValueError, match="rows sum to 1"):
            Softmax().check_target((total * torch.tensor([[0.1, 0.2, 0.7]], dtype=torch.float64)).to(dtype))


@pytest.mark.parametrize("loss", INSTANCES, ids=repr)
def test_targets_in_another_precision_are_targets_there(loss):
    y = loss.example_target(40, 3, torch.Generator().manual_seed(0))
    single = torch.softmax(randn(40, 3), 1).float() if loss.targets == "simplex" else y.float()
    double = loss.target_in(single, torch.float64)
    loss.check_target(double)
    torch.testing.assert_close(double, single.double(), rtol=1e-6, atol=0)
    assert loss.target_in(double, torch.float64) is double
    assert loss.target_in(single, torch.float32) is single


class TestBestIntercept:
    @staticmethod
    def relative_slope(loss, pred, y, weight, intercept):
        per_sample = loss.gradient(pred + intercept, y)
        return float(((weight @ per_sample).abs() / (weight @ per_sample.abs()).clamp(min=1e-300)).max())

    @pytest.mark.parametrize("loss", INSTANCES, ids=repr)
    @PROPERTY
    @given(
        seed=st.integers(0, 10**6),
        scale=st.sampled_from([0.01, 1.0, 5.0]),
        spread=st.sampled_from([0.0, 1.0, 4.0]),
    )
    def test_slope_vanishes(self, loss, seed, scale, spread):
        pred, y = example_problem(loss, n=25, c=2, seed=seed, scale=scale)
        weight = (spread * randn(25, seed=seed + 1)).exp()
        weight[seed % 25] = 0.0
        weight /= weight.sum()
        best = loss.best_intercept(pred, y, weight)
        start = best + 3 * randn(2, seed=seed + 2)
        for candidate in (best, loss.best_intercept(pred, y, weight, start)):
            assert self.relative_slope(loss, pred, y, weight, candidate) <= 1e-9

    @pytest.mark.parametrize("unit", [0.0, 1e-30, 1e-18, 1e-12])
    def test_huber_of_residuals_far_below_its_threshold_is_their_mean(self, unit):
        pred, y, weight = randn(50, 3), unit * randn(50, 3, seed=1), random_weight(50)
        weight = weight / weight.sum()
        best = Huber().best_intercept(torch.zeros_like(pred), y, weight)
        torch.testing.assert_close(best, weight @ y, rtol=1e-9, atol=0.0)

    @pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
    @pytest.mark.parametrize("delta", [1e-3, 0.1, 1.0])
    def test_outputs_that_are_searched_together_cross_linear_parts(self, delta, scale):
        class Together(Huber):
            output_separable = False
            best_intercept = Loss.best_intercept

        pred, y, weight = randn(40, 3), scale * randn(40, 3, seed=1), random_weight(40)
        weight = weight / weight.sum()
        best, wanted = (loss.best_intercept(pred, y, weight) for loss in (Together(delta), Huber(delta)))
        values = [float(weight @ Huber(delta).value(pred + b, y)) for b in (best, wanted)]
        assert values[0] == pytest.approx(values[1], rel=1e-12)

    def test_huber_crosses_a_gap_without_curvature(self):
        # The weight sits in the far cluster, the unweighted median in the near one, nothing in between.
        y = torch.cat([torch.zeros(10, 1), torch.full((9, 1), 100.0)]).double()
        weight = torch.cat([torch.full((10,), 0.1), torch.ones(9)]).double()
        weight /= weight.sum()
        best = Huber(1.0).best_intercept(torch.zeros_like(y), y, weight)
        # 9 (b - 100) + 1 = 0: the slope of the far cluster is quadratic and that of the near one is constant.
        assert float(best) == pytest.approx(100 - 1 / 9, rel=1e-10)

    @PROPERTY
    @given(
        y=st.lists(st.sampled_from([-300.0, -20.0, -1.0, 0.0, 0.5, 1.0, 40.0, 1000.0]), min_size=1, max_size=9),
        weight=st.lists(st.sampled_from([0.01, 0.5, 1.0, 20.0]), min_size=9, max_size=9),
        delta=st.sampled_from([0.1, 1.0, 30.0]),
        start=st.sampled_from([None, 0.0, -1000.0, 35.0]),
    )
    @example(y=[0.0, 100.0, 0.0], weight=[0.5, 1.0, 0.01, *[1.0] * 6], delta=1.0, start=None)
    def test_huber_is_minimised_whatever_the_clusters(self, y, weight, delta, start):
        target = torch.tensor(y, dtype=torch.float64)[:, None]
        probability = torch.tensor(weight[: len(y)], dtype=torch.float64)
        probability /= probability.sum()
        first = None if start is None else torch.tensor([start], dtype=torch.float64)
        loss = Huber(delta)
        best = loss.best_intercept(torch.zeros_like(target), target, probability, first)
        # The minimum of a convex piecewise quadratic lies at a breakpoint or at a root between two of them.
        points = np.unique(np.concatenate([np.array(y) - delta, np.array(y) + delta]))
        slopes = np.array([float(probability @ loss.gradient(torch.full_like(target, b), target)) for b in points])
        k = int(np.searchsorted(slopes >= 0, True))
        root = points[k]
        if k and slopes[k] > 0 and slopes[k] > slopes[k - 1]:
            root = points[k] - slopes[k] * (points[k] - points[k - 1]) / (slopes[k] - slopes[k - 1])

        def value(b):
            return float(probability @ loss.value(torch.full_like(target, b), target))

        assert value(float(best)) <= value(root) * (1 + 1e-12) + 1e-12

    @pytest.mark.parametrize("n", [2, 4, 8])
    def test_huber_between_two_halves_is_any_point_of_the_gap(self, n):
        y = torch.tensor([-100.0, 100.0], dtype=torch.float64).repeat(n // 2)[:, None]
        weight = torch.full((n,), 1 / n, dtype=torch.float64)
        best = Huber().best_intercept(torch.zeros_like(y), y, weight)
        assert float(best.abs()) <= 100 - 1.35

    @pytest.mark.parametrize("far", [1e16, 1e22, 1e30, 1e150])
    def test_huber_does_not_mind_how_far_outliers_are(self, far):
        y, weight = torch.tensor([[0.0], [1.0], [3.0], [-4.0], [-1.0]]).double(), random_weight(5, seed=1)
        weight /= weight.sum()
        outliers = far * torch.tensor([[1.0], [0.6], [-0.3], [-0.9]]).double()
        half = torch.cat([0.5 * weight, torch.full((4,), 0.125).double()])

        def best(outliers):
            targets = torch.cat([y, outliers])
            return Huber().best_intercept(torch.zeros_like(targets), targets, half)

        torch.testing.assert_close(best(outliers), best(outliers.sign() * 100), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("far", [1e16, 1e22, 1e30, 1e150])
    def test_huber_takes_the_median_of_residuals_far_beyond_its_threshold(self, far):
        y, weight = torch.tensor([[1160.0], [-far]], dtype=torch.float64), torch.tensor([0.34, 0.66]).double()
        best = Huber(0.005).best_intercept(torch.zeros_like(y), y, weight)
        torch.testing.assert_close(best, y[1], rtol=1e-12, atol=0.0)

    @pytest.mark.parametrize("loss", INSTANCES, ids=repr)
    def test_samples_without_weight_take_no_part(self, loss):
        pred, y = example_problem(loss, n=20)
        weight = random_weight(20)
        weight /= weight.sum()
        kept = weight > 0
        changed = pred + 50.0 * (~kept)[:, None]
        torch.testing.assert_close(
            loss.best_intercept(changed, y, weight),
            loss.best_intercept(pred[kept], y[kept], weight[kept]),
            rtol=1e-8,
            atol=1e-8,
        )

    @pytest.mark.parametrize("loss", [Squared(), Huber(), Poisson()], ids=repr)
    def test_shift_of_predictions_shifts_it_back(self, loss):
        pred, y = example_problem(loss)
        weight = torch.full((30,), 1 / 30, dtype=torch.float64)
        torch.testing.assert_close(
            loss.best_intercept(pred + 2.5, y, weight), loss.best_intercept(pred, y, weight) - 2.5, rtol=0, atol=1e-9
        )

    @pytest.mark.parametrize("scale", [0.1, 3.0, 100.0])
    def test_softmax_is_the_same_from_exponentials_that_serve_all_intercepts(self, scale):
        pred, y = example_problem(Softmax(), n=40, c=5, seed=1, scale=scale)
        weight = random_weight(40)
        arguments = (Softmax(), pred, y, weight / weight.sum())
        plain, quick = LossAtIntercepts(*arguments), SoftmaxAtIntercepts(*arguments)
        for size in (0.0, 1.0, 15.0, 300.0, 1e-3):  # from one to the next also farther than exponentials reach
            b = size * randn(5, seed=2)
            assert quick.value(b) == pytest.approx(plain.value(b), rel=1e-10, abs=1e-12 * (scale + size))
            slope, terms = quick.slope(b)
            torch.testing.assert_close(slope, plain.slope(b)[0], rtol=0, atol=1e-14)
            assert (terms >= (1 - 1e-12) * plain.slope(b)[1]).all()
            if size <= 1.0:  # far off the loss is flat but for rounding
                fresh = SoftmaxAtIntercepts(*arguments)
                torch.testing.assert_close(fresh.direction(b, slope), plain.direction(b, slope), rtol=1e-6, atol=1e-8)
        best, wanted = (best_intercept(at) for at in (quick, plain))
        torch.testing.assert_close(best - best.mean(), wanted - wanted.mean(), rtol=1e-7, atol=1e-7)

    @pytest.mark.parametrize("size", [1.0, 30.0, 1e3, 1e5])
    def test_softmax_intercepts_leave_no_slope_be_the_predictions_far_apart(self, size):
        """Where one class has a probability of nearly 1 the curvature is zero, and the slope is not."""
        for seed in range(15):
            n_classes = 2 + seed % 5
            pred = size * randn(25, n_classes, seed=seed) * (1 + torch.arange(n_classes)) + size * torch.arange(
                n_classes
            )
            y = torch.eye(n_classes).double()[(randn(25, seed=seed + 100).abs() * 1.5).long().clamp(max=n_classes - 1)]
            weight = random_weight(25)
            weight = weight / weight.sum()
            best = Softmax().best_intercept(pred, y, weight)
            slope, _ = LossAtIntercepts(Softmax(), pred, y, weight).slope(best)
            assert float(slope.abs().max()) <= 1e-8

    def test_softmax_intercepts_do_not_drift_along_the_shift_of_all_classes(self):
        n = 20_000
        pred = 2 * randn(n, 3)
        y = torch.nn.functional.one_hot((pred + randn(n, 3, seed=1)).argmax(1), 3).double()
        pred, y, weight = (part.float() for part in (pred, y, torch.full((n,), 1 / n)))
        first = b = Softmax().best_intercept(pred, y, weight)
        for _ in range(20):
            b = Softmax().best_intercept(pred, y, weight, b)
        torch.testing.assert_close(b, first, rtol=0, atol=1e-5)

    @pytest.mark.parametrize(
        ("dtype", "size"), [(torch.float32, 1e30), (torch.float64, 1e300), (torch.float64, 1.7e308)]
    )
    def test_softmax_intercepts_of_predictions_beyond_rounding_are_finite(self, dtype, size):
        pred = size * torch.eye(3, dtype=dtype)[torch.arange(9) // 3]
        y = torch.eye(3, dtype=dtype)[torch.arange(9) % 3]
        best = Softmax().best_intercept(pred, y, torch.full((9,), 1 / 9, dtype=dtype))
        assert bool(torch.isfinite(best).all())

    def test_class_that_never_occurs_has_its_best_constant_far_below(self):
        y = torch.eye(3).double()[torch.tensor([0, 1, 1, 0, 1])]
        best = Softmax().best_intercept(torch.zeros(5, 3).double(), y, torch.full((5,), 0.2).double())
        assert float(best[1] - best[0]) == pytest.approx(np.log(1.5), abs=1e-12)
        assert float(best[2] - best[0]) < -30


class TestMean:
    @pytest.mark.parametrize("loss", [Squared(), Softmax(), Poisson()], ids=repr)
    def test_prediction_is_optimal_for_its_own_mean(self, loss):
        pred = randn(10, 3)
        assert float(loss.gradient(pred, loss.mean(pred)).abs().max()) <= 1e-14

    def test_logistic_mean_is_the_probability_of_a_positive_target(self):
        pred = randn(10, 1)
        probability, ones = Logistic().mean(pred), torch.ones(10, 1).double()
        expected = probability * Logistic().gradient(pred, ones) + (1 - probability) * Logistic().gradient(pred, -ones)
        assert float(expected.abs().max()) <= 1e-15

    @pytest.mark.parametrize("name", [name for name in LOSS_NAMES if LOSSES[name].probabilistic])
    def test_probabilistic_losses_give_probabilities(self, name):
        loss = get_loss(name)
        mean = loss.mean(randn(10, 3, scale=30.0))
        assert ((mean >= 0) & (mean <= 1)).all()
        if loss.targets == "simplex":
            torch.testing.assert_close(mean.sum(1), torch.ones(10).double())


class Bare(Loss):
    """A loss that defines only what it must."""

    smoothness = 1.0
    value = Squared.value
    gradient = Squared.gradient
    hessian_product = Squared.hessian_product


class TestContract:
    def test_loss_without_conjugate_passes_and_says_nan(self):
        check_loss(Bare())
        assert Bare().conjugate(randn(4, 2), randn(4, 2)).isnan().all()

    def test_missing_expression_is_named(self):
        with pytest.raises(NotImplementedError, match=r"Bare.*'expression'"):
            Bare().expression(None, None, None)

    @pytest.mark.parametrize("name", LOSS_NAMES)
    def test_names(self, name):
        assert type(get_loss(name)) is LOSSES[name]

    def test_instances_pass_through(self):
        loss = Huber(0.5)
        assert get_loss(loss) is loss

    @pytest.mark.parametrize("wrong", ["mse", "", None, 3, Squared])
    def test_unknown_name_lists_the_choices(self, wrong):
        with pytest.raises(ValueError, match="loss must be one of") as caught:
            get_loss(wrong)
        assert all(name in str(caught.value) for name in LOSSES)

    @pytest.mark.parametrize("delta", [0.0, -1.0, math.inf, math.nan])
    def test_huber_needs_a_positive_threshold(self, delta):
        with pytest.raises(ValueError, match="delta must be positive"):
            Huber(delta)

    @pytest.mark.parametrize("name", LOSS_NAMES)
    def test_losses_are_values(self, name):
        assert get_loss(name) == get_loss(name)
        assert hash(get_loss(name)) == hash(get_loss(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e5, 1e8])
def test_huber_intercepts_are_best_in_any_precision(dtype, size):
    loss, y = get_loss("huber"), (size * randn(60, 2, seed=3)).to(dtype)
    weight = torch.full((60,), 1 / 60, dtype=dtype)
    best = loss.best_intercept(torch.zeros_like(y), y, weight)

    def value(intercept):
        return float(loss.value(intercept.double().expand(60, 2), y.double()).mean())

    slope = loss.gradient(best.double().expand(60, 2), y.double()).mean(0)
    assert best.dtype == dtype
    assert float(slope.abs().max()) <= 2 * loss.delta / 60  # next to a kink its rounding decides on a sample's side
    assert value(best) <= value(loss.best_intercept(torch.zeros_like(y).double(), y.double(), weight.double())) * (
        1 + torch.finfo(dtype).eps * 10
    )


def test_slopes_at_predictions_of_zero_are_computed_once_for_an_intercept(monkeypatch):
    asked, gradient = [], SquaredHinge.gradient
    monkeypatch.setattr(SquaredHinge, "gradient", lambda *args: asked.append(not args[1].any()) or gradient(*args))
    y, weight = randn(30, 1).sign(), torch.full((30,), 1 / 30, dtype=torch.float64)
    best = SquaredHinge().best_intercept(randn(30, 1, seed=1), y, weight)
    assert sum(asked) == 1
    slope = weight @ gradient(SquaredHinge(), randn(30, 1, seed=1) + best, y)
    assert float(slope.abs().max()) < 1e-12

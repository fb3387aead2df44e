"""The optimality meter: bounds of trained networks."""

import copy
import re

import numpy as np
import pytest
import torch

from convexformer import (
    ConvexAttention,
    ConvexAttentionClassifier,
    ConvexAttentionRegressor,
    ConvexSequenceRegressor,
    Gates,
    GaussianGates,
    Heads,
    SequenceAttention,
    SoftmaxAttention,
    optimality_gap,
)
from convexformer.gates import TrainingData
from convexformer.nn import AttentiveProbe, train
from convexformer.solvers import get_penalty
from convexformer_solvers import DenseMap

ALPHA = 0.05


def data(n_samples=40, n=3, d=2, c=2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n_samples, n, d))
    Y = X[:, 0] @ rng.normal(size=(d, c)) - X[:, 2] @ rng.normal(size=(d, c)) + 0.3 * rng.normal(size=(n_samples, c))
    return torch.as_tensor(X), torch.as_tensor(Y)


def gates(seed=0):
    return GaussianGates(3).make(TrainingData(torch.zeros(1, 3, 2)), np.random.RandomState(seed))


CLASSES = {
    "l1 output": (lambda seed: ConvexAttention(3, 2, 2, n_heads=12, seed=seed), "group_l2", 2),
    "standard decay": (lambda seed: ConvexAttention(3, 2, 2, n_heads=12, seed=seed), "nuclear", 2),
    "no bias": (lambda seed: ConvexAttention(3, 2, 2, n_heads=12, seed=seed, bias=False), "group_l2", 2),
    "gated": (lambda seed: ConvexAttention(3, 2, 2, n_heads=36, gates=gates(), seed=seed), "group_l2", 2),
    "sequence": (lambda seed: SequenceAttention(3, 2, 1, n_heads=10, n_targets=2, seed=seed), None, 3),
}


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("seed", range(2))
def test_no_network_of_a_covered_class_is_below_its_bound_however_far_it_is_trained(kind, seed):
    make, penalty, ndim = CLASSES[kind]
    X, Y = data(seed=seed)
    Y = Y if ndim == 2 else Y[..., None]
    network = make(seed).double()
    gaps = []
    for n_steps in (1, 500):
        train(network, X, Y, alpha=ALPHA, penalty=penalty, lr=0.05, n_steps=n_steps)
        result = optimality_gap(network, X, Y, ALPHA, penalty=penalty, tol=1e-8)
        assert result.covered
        assert result.exact
        assert result.bound <= result.certificate.primal <= result.start_objective <= result.objective + 1e-12
        assert network.objective(X, Y, alpha=ALPHA, penalty=penalty).item() == pytest.approx(result.objective, rel=1e-9)
        gaps.append(result.relative_gap)
    assert gaps[1] < 0.02 < 0.2 < gaps[0]  # training closes the gap, as the class attains the bound


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("kind", CLASSES)
def test_a_refit_that_stops_early_bounds_the_optimum_all_the_same(kind):
    make, penalty, ndim = CLASSES[kind]
    X, Y = data()
    Y = Y if ndim == 2 else Y[..., None]
    rough, exact = (
        optimality_gap(make(0).double(), X, Y, ALPHA, penalty=penalty, **options, solver="fista")
        for options in ({"tol": 1e-2, "max_iter": 1}, {"tol": 1e-8})
    )
    assert rough.bound <= exact.certificate.primal
    assert rough.certificate.primal > exact.certificate.primal * (1 + 1e-6)
    assert rough.gap == rough.objective - rough.bound


def test_the_map_of_samples_stands_for_them():
    X, Y = data()
    network = ConvexAttention(3, 2, 2, n_heads=4, seed=0, gates=gates()).double()
    plain, of_map = (optimality_gap(network, samples, Y, ALPHA, tol=1e-8) for samples in (X, DenseMap(X)))
    assert of_map.certificate.primal == pytest.approx(plain.certificate.primal, rel=1e-8)
    assert of_map.objective == pytest.approx(network.objective(X, Y, alpha=ALPHA).item(), rel=1e-12)
    assert of_map.start_objective == pytest.approx(plain.start_objective, rel=1e-12)


def test_heads_of_a_solution_have_no_gap_but_the_certificate():
    X, Y = data()
    model = ConvexAttentionRegressor(ALPHA, penalty="nuclear", tol=1e-8).fit(X.numpy(), Y.numpy())
    result = optimality_gap(model.heads_, X, Y, tol=1e-8)
    assert 0 <= result.relative_gap <= 2e-8
    assert result.exact
    assert result.n_heads == len(model.heads_)


def test_an_unbalanced_split_is_seen_as_distance_of_the_heads_and_not_of_the_point():
    X, Y = data()
    heads = ConvexAttentionRegressor(ALPHA, tol=1e-8).fit(X.numpy(), Y.numpy()).heads_
    unbalanced = Heads(heads.w1, 3 * heads.w2, heads.w3 / 3, heads.intercept, heads.loss, heads.penalty, heads.alpha)
    result = optimality_gap(unbalanced, X, Y, tol=1e-8)
    extra = heads.alpha * (unbalanced.decay() - heads.decay())
    assert result.gap == pytest.approx(extra, rel=1e-5)
    assert result.start_objective == pytest.approx(heads.objective(X, Y), rel=1e-9)


@pytest.mark.parametrize("kind", CLASSES)
def test_the_refit_has_the_certified_objective(kind):
    make, penalty, ndim = CLASSES[kind]
    X, Y = data()
    Y = 1 + (Y if ndim == 2 else Y[..., None])
    result = optimality_gap(make(0).double(), X, Y, ALPHA, penalty=penalty)
    assert result.refit.objective(X, Y) == pytest.approx(result.certificate.primal, rel=1e-9)
    assert bool(result.refit.intercept.any()) == (kind != "no bias")


def test_heads_are_measured_by_the_objective_that_is_named():
    X, Y = data()
    heads = ConvexAttentionRegressor(ALPHA, tol=1e-6).fit(X.numpy(), Y.numpy()).heads_
    for name, value in (("alpha", 3 * ALPHA), ("loss", "huber"), ("penalty", "nuclear")):
        result = optimality_gap(heads, X, Y, **{name: value})
        other = heads.replace(**{name: value})
        assert result.objective == pytest.approx(other.objective(X, Y), rel=1e-12)
        assert (result.refit.alpha, result.refit.loss, result.refit.penalty) == (other.alpha, other.loss, other.penalty)


def test_networks_are_measured_by_the_loss_that_is_named():
    X, Y = data()
    network, Y = ConvexAttention(3, 2, 2, n_heads=3).double(), 3 * Y
    with torch.no_grad():
        expected = network.objective(X, Y, loss="huber", alpha=ALPHA).item()
    assert optimality_gap(network, X, Y, ALPHA, loss="huber").objective == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: ConvexAttention(3, 2, 2, n_heads=3, **options),
        lambda **options: SequenceAttention(3, 2, 2, n_heads=3, n_targets=1, **options),
        lambda **options: SoftmaxAttention(2, 2, n_heads=3, position=0, **options),
    ],
    ids=["convex", "sequence", "softmax"],
)
def test_networks_without_bias_are_compared_with_such_networks(make):
    X, Y = data()
    network = make(bias=False).double()
    Y = 1 + (Y[:, None] if isinstance(network, SequenceAttention) else Y)
    result, without, with_bias = (
        optimality_gap(network, X, Y, ALPHA, fit_intercept=flag) for flag in (None, False, True)
    )
    assert result.certificate.primal == without.certificate.primal
    assert with_bias.certificate.primal < without.certificate.dual
    assert result.n_heads == 3


def test_weights_that_are_no_numbers_are_named():
    network = ConvexAttention(3, 2, 2, n_heads=3)
    torch.nn.init.constant_(network.w2, torch.nan)
    with pytest.raises(ValueError, match="w2 of the network must be finite"):
        optimality_gap(network, *data(), ALPHA)


def test_labels_and_weights_are_read_as_in_fit():
    X, Y = data()
    labels, weight = np.where(Y[:, 0] > 0, "up", "down"), np.arange(len(X)) % 3 + 1.0
    model = ConvexAttentionClassifier(0.02, class_weight="balanced", tol=1e-7).fit(X.numpy(), labels, weight)
    result = optimality_gap(model.heads_, X, labels, sample_weight=weight, tol=1e-7)
    assert 0 <= result.relative_gap <= 2e-7
    assert result.certificate.primal == pytest.approx(model.certificate_.primal, rel=1e-6)


def test_sequence_heads_of_a_solution_have_no_gap():
    X, Y = data()
    for form in ("single_row", "stochastic", "substochastic"):
        model = ConvexSequenceRegressor(ALPHA, form=form, tol=1e-7).fit(X.numpy(), Y.numpy())
        result = optimality_gap(model.heads_, X.numpy(), Y.numpy()[..., None], tol=1e-7)
        assert -1e-12 <= result.relative_gap <= 2e-7


def test_too_few_heads_leave_the_bound_and_not_its_exactness():
    X, Y = data()
    network = ConvexAttention(3, 2, 2, n_heads=1).double()
    train(network, X, Y, alpha=ALPHA, lr=0.05, n_steps=500)
    result = optimality_gap(network, X, Y, ALPHA)
    assert result.covered
    assert not result.exact
    assert result.relative_gap > 0.05
    assert "fewer heads" in str(result)


def test_sequence_networks_with_too_few_heads_are_told_from_those_with_enough():
    X, Y = data()
    Y = Y[..., None]
    few, many = (SequenceAttention(3, 2, 1, n_heads=count, n_targets=2).double() for count in (1, 12))
    result = optimality_gap(few, X, Y, ALPHA)
    assert result.n_heads_sufficient > 1
    assert not result.exact
    assert "behind some of its gates" not in str(result)
    assert optimality_gap(many, X, Y, ALPHA).exact


def test_sequence_networks_have_the_loss_that_they_were_trained_with():
    X, Y = data()
    network, Y = SequenceAttention(3, 2, 1, n_heads=3, n_targets=2).double(), 3 * Y[..., None]
    with torch.no_grad():
        expected = network.objective(X, Y, loss="huber", alpha=ALPHA).item()
    assert optimality_gap(network, X, Y, ALPHA, loss="huber").objective == pytest.approx(expected, rel=1e-9)


def test_heads_may_be_too_few_behind_some_gates_alone():
    X = np.random.default_rng(0).normal(size=(60, 5, 3))
    y = np.abs(X[:, 1] @ [1.0, -1.0, 0.5])
    gated = ConvexAttentionRegressor(0.005, activation="gated_relu", random_state=0, n_gates=8, penalty="nuclear")
    gates, index = gated.fit(X, y).gates_, np.zeros(60, dtype=int)
    network = ConvexAttention(5, 3, 1, n_heads=60, gates=gates, gate_index=index)
    result = optimality_gap(network, X, y, 0.05)
    assert result.n_heads > result.n_heads_sufficient
    assert not result.exact
    assert "fewer heads behind some of its gates" in str(result)
    index = np.zeros(result.n_heads_sufficient, dtype=int)
    network = ConvexAttention(5, 3, 1, n_heads=len(index), gates=gates, gate_index=index)
    assert "fewer heads behind some of its gates" in str(optimality_gap(network, X, y, 0.05))


@pytest.mark.parametrize("weighted", [False, True])
def test_heads_behind_any_gate_that_selects_the_same_samples_are_enough(weighted):
    X, Y = data()
    one, weight = Gates([[1.0, 0.0, 0.0]], [[1.0, 0.0]]), torch.ones(len(X))
    two = Gates(np.repeat(one.u1, 2, axis=0), [[1.0, 0.0], [2.0, 0.0]])
    if weighted:  # the gates select the same samples of those that count
        two = Gates(two.u1, [[1.0, 0.0], [1.0, 0.5]])
        weight = (~torch.logical_xor(*two.masks(X).T)).double()
        assert 0 < weight.sum() < len(X)
    network = ConvexAttention(3, 2, 2, n_heads=20, gates=two, gate_index=np.ones(20, dtype=int)).double()
    result = optimality_gap(network, X, Y, ALPHA, sample_weight=weight)
    assert set(result.refit.gate_index.tolist()) == {0, 1}
    assert result.exact
    few = ConvexAttention(3, 2, 2, n_heads=2, gates=two, gate_index=np.array([0, 1])).double()
    assert not optimality_gap(few, X, Y, ALPHA, sample_weight=weight).exact


def test_softmax_attention_gets_no_bound():
    X, Y = data()
    network = SoftmaxAttention(2, 2, n_heads=2, position=0).double()
    result = optimality_gap(network, X, Y, ALPHA)
    assert not result.covered
    assert not result.exact
    assert np.isnan([result.bound, result.gap, result.relative_gap, result.start_objective]).all()
    assert result.objective == pytest.approx(network.objective(X, Y, alpha=ALPHA).item(), rel=1e-12)
    same = ConvexAttentionRegressor(ALPHA).fit(X.numpy(), Y.numpy())
    assert result.certificate.primal == pytest.approx(same.certificate_.primal, rel=1e-3)
    assert "another class" in str(result)
    without_heads = optimality_gap(network, X, Y, 100.0)
    assert len(without_heads.refit) == 0
    assert not without_heads.exact
    sequence = optimality_gap(SoftmaxAttention(2, 1, n_heads=2).double(), X, X[..., :1], ALPHA)
    assert not sequence.covered
    assert sequence.refit.form.name == "single_row"


def test_softmax_attention_is_read_with_loss_penalty_weights_and_targets_as_given():
    X, Y = data()
    y, weight = Y[:, 0], np.random.default_rng(1).uniform(size=len(X))
    network = SoftmaxAttention(2, 1, n_heads=2, position=0).double()
    parts = {"loss": "huber", "penalty": "nuclear", "sample_weight": weight}
    result = optimality_gap(network, X, y, ALPHA, **parts, tol=1e-8)
    own = network.objective(X, y[:, None], loss="huber", alpha=ALPHA, sample_weight=torch.as_tensor(weight))
    assert result.objective == pytest.approx(own.item(), rel=1e-12)
    same = ConvexAttentionRegressor(ALPHA, loss="huber", penalty="nuclear", tol=1e-8)
    same.fit(X.numpy(), y.numpy(), sample_weight=weight)
    assert result.certificate.primal == pytest.approx(same.certificate_.primal, rel=1e-6)
    assert result.refit.penalty == get_penalty("nuclear")


def test_the_refit_starts_from_the_network():
    X, Y = data()
    model = ConvexAttentionRegressor(ALPHA, tol=1e-9).fit(X.numpy(), Y.numpy())
    result = optimality_gap(model.heads_.to_torch(), X, Y, ALPHA, tol=1e-4, max_iter=1)
    assert result.certificate.relative_gap <= 1e-4  # no iteration is needed from there


def test_the_class_may_have_a_bias_that_the_network_does_not_use():
    X, Y = data()
    heads = ConvexAttentionRegressor(ALPHA, fit_intercept=False, tol=1e-9).fit(X.numpy(), Y.numpy() + 1.0).heads_
    without, with_bias = (optimality_gap(heads, X, Y + 1.0, tol=1e-6, fit_intercept=flag) for flag in (None, True))
    assert without.relative_gap <= 1e-6
    assert with_bias.bound < without.bound  # the larger class reaches lower
    biased = heads.replace(intercept=np.ones(2))
    with pytest.raises(ValueError, match="fit_intercept must not be False for a network whose bias is not zero"):
        optimality_gap(biased, X, Y, fit_intercept=False)


@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
def test_a_report_concerns_the_objective_that_the_network_was_trained_with(penalty):
    X, Y = data()
    network = SequenceAttention(3, 2, 1, n_heads=8, n_targets=2).double()
    Y = Y[..., None]
    train(network, X, Y, alpha=0.5, penalty=penalty, n_steps=20)
    with pytest.raises(ValueError, match=r"penalty must be None for a SequenceAttention.*own decay.*l1 norms"):
        optimality_gap(network, X, Y, alpha=0.5, penalty=penalty)
    report = optimality_gap(network, X, Y, alpha=0.5)
    assert report.objective == pytest.approx(network.objective(X, Y, alpha=0.5).item(), rel=1e-9)


def test_wrong_arguments_are_named():
    X, Y = data()
    with pytest.raises(ValueError, match="fit_intercept must be True or False"):
        optimality_gap(ConvexAttention(3, 2, 2), X, Y, ALPHA, fit_intercept="no")
    with pytest.raises(
        TypeError, match=r"model must be a ConvexAttention, .* got Linear; of an estimator give its heads_"
    ):
        optimality_gap(torch.nn.Linear(2, 2), X, Y, ALPHA)
    with pytest.raises(TypeError, match=r"of a module of your own with such heads give Heads\(w1, w2, w3, intercept,"):
        optimality_gap(torch.nn.Linear(2, 2), X, Y, ALPHA)
    with pytest.raises(
        TypeError, match=r"got AttentiveProbe; .* of an attentive probe convexformer.probes.refit_probe"
    ):
        optimality_gap(AttentiveProbe(2, 2), X, Y, ALPHA)
    with pytest.raises(ValueError, match="alpha must be given for a module"):
        optimality_gap(ConvexAttention(3, 2, 2), X, Y)
    with pytest.raises(ValueError, match="alpha must be"):
        optimality_gap(ConvexAttention(3, 2, 2), X, Y, -1.0)
    with pytest.raises(ValueError, match="y must hold numbers"):
        optimality_gap(SoftmaxAttention(2, 1, position=0), X, ["a"] * len(X), ALPHA)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", CLASSES)
def test_networks_in_half_precision_are_those_of_their_weights_in_single(kind, dtype):
    make, penalty, n_outputs = CLASSES[kind]
    (X, Y), half = data(c=n_outputs), make(0).to(dtype)
    Y = Y[:, :2, None] if kind == "sequence" else Y
    found, wanted = (
        optimality_gap(network, X, Y, ALPHA, penalty=penalty, tol=1e-3)
        for network in (half, copy.deepcopy(half).float())
    )
    assert found.objective == wanted.objective
    assert found.gap > 0


def test_targets_in_a_precision_without_an_array_are_named():
    X, Y = data()
    with pytest.raises(ValueError, match="y must not be bfloat16"):
        optimality_gap(ConvexAttention(3, 2, 2), X, Y.bfloat16(), ALPHA)


@pytest.mark.parametrize("shapes", [((40, 2, 2), (40, 2)), ((40, 3, 2), (40, 3))])
def test_other_sizes_than_those_of_the_network_are_named(shapes):
    network = ConvexAttention(3, 2, 2, n_heads=4)
    with pytest.raises(ValueError, match="X and y must be of the sizes that the network takes and gives"):
        optimality_gap(network, *map(torch.zeros, shapes), alpha=0.1)


def test_tokens_of_width_one_may_lack_their_axis():
    X, Y = data(d=1)
    model = ConvexAttentionRegressor(alpha=ALPHA, tol=1e-6).fit(X[:, :, 0], Y)
    flat, full = (optimality_gap(model.heads_, given, Y, tol=1e-6) for given in (X[:, :, 0], X))
    assert flat.objective == full.objective
    assert flat.relative_gap <= 1e-6


@pytest.mark.parametrize("kind", ["gated", "sequence"])
def test_another_device_gives_the_same_figures(kind, accelerator):
    make, penalty, ndim = CLASSES[kind]
    X, Y = data()
    Y = Y if ndim == 2 else Y[..., None]
    network = make(0).double()
    results = [
        optimality_gap(network, X, Y, ALPHA, penalty=penalty, tol=1e-7, device=device)
        for device in ("cpu", accelerator)
    ]
    assert results[1].certificate.dual_point.device.type == accelerator
    assert results[1].bound == pytest.approx(results[0].bound, rel=1e-6)
    assert results[1].objective == pytest.approx(results[0].objective, rel=1e-12)
    with pytest.raises(ValueError, match="device must be"):
        optimality_gap(network, X, Y, ALPHA, penalty=penalty, device="nowhere")


def test_targets_of_zero_have_a_gap_and_no_relative_one():
    network = ConvexAttention(3, 2, 1, n_heads=4, bias=False).double()
    report = optimality_gap(network, data()[0], np.zeros((40, 1)), ALPHA)
    assert report.gap == report.objective > 0
    assert report.relative_gap == np.inf
    with torch.no_grad():
        network.w3.zero_()
        network.w2.zero_()
    report = optimality_gap(network, data()[0], np.zeros((40, 1)), ALPHA)
    assert (report.gap, report.relative_gap) == (0, 0)


def test_the_objective_of_a_network_in_single_precision_is_computed_in_double():
    X, Y = data(c=1)
    network = SoftmaxAttention(2, 1, n_heads=2, position="mean")
    here, there = (
        optimality_gap(each, X, Y + 1e4, ALPHA).objective for each in (network, copy.deepcopy(network).double())
    )
    assert here == pytest.approx(there, rel=1e-12)
    X = X.float()
    single, double = (optimality_gap(network, tokens, Y, ALPHA).objective for tokens in (X, X.double()))
    assert single == double
    assert next(network.parameters()).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [ConvexAttention, SequenceAttention])
def test_rounding_in_single_precision_is_no_part_of_an_objective(make, dtype):
    X, Y = data(c=1)
    X, network = X.to(dtype) + 100, make(3, 2, 1, n_heads=6)
    Y = Y if make is ConvexAttention else Y[:, None].expand(-1, 3, -1)
    with torch.no_grad():
        exact = copy.deepcopy(network).double().objective(X.double(), Y, alpha=ALPHA)
    assert optimality_gap(network, X, Y, ALPHA).objective == pytest.approx(exact.item(), rel=1e-12)
    assert next(network.parameters()).dtype == torch.float32


def test_heads_in_single_precision_have_the_objective_that_they_say():
    X, Y = data(c=1)
    X = X + 100  # what the heads read from it nearly cancels
    w1, w2, w3 = np.eye(3)[[0, 0, 1]], [[1e3, 0.1], [-1e3, 0.3], [0.7, 0.1]], [[1.1], [1.1], [0.3]]
    parts = (np.array(part, dtype=np.float32) for part in (w1, w2, w3, [0.0]))
    heads = Heads(*parts, "squared", "group_l2", ALPHA)
    report = optimality_gap(heads, X, Y, fit_intercept=True)
    assert report.objective == pytest.approx(heads.objective(X, Y), rel=1e-13)


def test_the_figures_are_printed_by_their_names():
    X, Y = data()
    result = optimality_gap(ConvexAttention(3, 2, 2, n_heads=9).double(), X, Y, ALPHA, tol=1e-3)
    rows = dict(re.split(" {2,}", line) for line in str(result).splitlines()[:-1])
    assert float(rows["objective of the network"]) == pytest.approx(result.objective, rel=1e-8)
    assert float(rows["certified lower bound"]) == pytest.approx(result.bound, rel=1e-8)
    assert float(rows["objective of the re-fit"]) == pytest.approx(result.certificate.primal, rel=1e-8)
    assert result.bound < result.certificate.primal < result.objective
    gap, relative_gap = map(float, rows["gap, relative"].split(", "))
    assert gap == pytest.approx(result.objective - result.bound, rel=1e-2)
    assert relative_gap == pytest.approx(result.relative_gap, rel=1e-2)
    assert rows["heads of the network, of the re-fit"] == f"9, {len(result.refit)}"

"""Gates of one frequency, between samples and of networks: what each promises, as identities."""

import numpy as np
import pytest
import torch
from sklearn.base import clone

from convexformer import ConvexAttention, ConvexAttentionRegressor, Gates, GaussianGates, attention_program
from convexformer.gates import DifferenceGates, FourierGates, NetworkGates, TrainingData
from convexformer.gates.sources import separating_directions
from convexformer.solvers import certify


def make(source, X, seed=0, **parts):
    return source.make(TrainingData(torch.as_tensor(X), **parts), np.random.RandomState(seed))


def on_circles(p, frequencies=(1, 2, 3)):
    """All pairs of residues as two tokens of cos and sin pairs, and the residues."""
    a, b = (part.ravel() for part in np.meshgrid(np.arange(p), np.arange(p)))
    angle = 2 * np.pi / p * np.stack([a, b], 1)[:, :, None] * np.array(frequencies)
    return np.stack([np.cos(angle), np.sin(angle)], -1).reshape(p * p, 2, -1), a, b


# Fourier


@pytest.mark.parametrize("token_weights", ["one", "signs"])
def test_fourier_gates_look_at_one_frequency_each_and_at_all_in_turn(token_weights):
    gates = make(FourierGates(24, token_weights=token_weights), np.zeros((5, 2, 6)))
    by_pair = np.linalg.norm(gates.u2.reshape(24, 3, 2), axis=2)
    np.testing.assert_allclose(np.sort(by_pair, axis=1), np.tile([0, 0, 1.0], (24, 1)), atol=1e-15)
    np.testing.assert_array_equal((by_pair > 0).sum(0), [8, 8, 8])
    np.testing.assert_allclose(np.abs(gates.u1).sum(1), 1.0 if token_weights == "one" else 2.0)


@pytest.mark.parametrize("share", [1, 2, 5, 6])
def test_boundaries_of_fourier_gates_on_a_frequency_are_evenly_spread_and_their_sides_balanced(share):
    gates = make(FourierGates(2 * 3 * share), np.zeros((5, 2, 6)))
    for token in range(2):
        for pair in range(3):
            mine = (gates.u1[:, token] > 0) & gates.u2[:, 2 * pair : 2 * pair + 2].any(axis=1)
            directions = gates.u2[mine, 2 * pair : 2 * pair + 2]
            lines = np.sort(np.arctan2(directions[:, 1], directions[:, 0]) % np.pi)
            steps = np.diff([*lines, lines[0] + np.pi])
            np.testing.assert_allclose(steps, np.full(share, np.pi / share), atol=1e-12)
            assert np.linalg.norm(directions.sum(0)) < 1.5


def test_equal_tokens_are_on_the_boundary_of_no_fourier_gate():
    X, a, b = on_circles(31, frequencies=(1, 3))
    gates = make(FourierGates(40, token_weights="signs"), X)
    assert {tuple(signs) for signs in np.sign(gates.u1)} == {(1, 1), (1, -1), (-1, 1), (-1, -1)}
    assert np.abs(np.einsum("gn,ind,gd->ig", gates.u1, X[a == b], gates.u2)).min() > 1e-6


def test_fourier_gates_take_only_the_frequencies_that_they_are_given():
    gates = make(FourierGates(10, frequencies=(0, 2)), np.zeros((5, 3, 7)))
    assert not gates.u2[:, [2, 3, 6]].any()
    assert gates.u2[:, [0, 1, 4, 5]].any(axis=0).all()
    every = make(FourierGates(10), np.zeros((5, 3, 7)))
    assert not every.u2[:, 6].any()
    assert every.u2[:, :6].any(axis=0).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_gates_on_one_frequency_make_waves_in_sums_and_differences(sign):
    X, a, b = on_circles(31, frequencies=(1,))
    waves = np.stack([wave(2 * np.pi / 31 * (a + sign * b)) for wave in (np.cos, np.sin)], 1)
    design = attention_program(X, waves, alpha=1.0, gates=make(FourierGates(24), X)).map.as_matrix().numpy()

    def unexplained(columns):
        return ((waves - columns @ np.linalg.lstsq(columns, waves, rcond=None)[0]) ** 2).mean() / (waves**2).mean()

    assert design.shape == (961, 24 * 4)
    assert unexplained(design) < 0.05
    # Boundaries two by two the same would leave the third harmonic of the square wave in, a ninth.
    few = attention_program(X, waves, alpha=1.0, gates=make(FourierGates(12), X)).map.as_matrix().numpy()
    assert unexplained(few) < 0.02
    # Attention alone is a sum of functions of one token each, and such waves are orthogonal to all of them.
    assert unexplained(X.reshape(961, -1)) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "n_features", "message"),
    [
        ({}, 1, r"needs two features \(cos, sin\), got X with n_features=1"),
        ({"frequencies": (0, 3)}, 6, r"positions of the 3 pairs of features, got \[0, 3\]"),
        ({"frequencies": (-1,)}, 6, "positions of the 3 pairs"),
        ({"frequencies": (-1, 0)}, 6, "positions of the 3 pairs"),
        ({"frequencies": (2,)}, 5, r"positions of the 2 pairs of features, got \[2\]"),
        ({"frequencies": ()}, 6, "frequencies must be a sequence of integers with at least one"),
        ({"frequencies": 1}, 6, "frequencies must be a sequence of integers with at least one, got 1"),
        ({"frequencies": (0.5,)}, 6, "frequencies must be a sequence of integers"),
        ({"frequencies": (0, 1.5)}, 6, "frequencies must be a sequence of integers"),
        ({"token_weights": "all"}, 6, "token_weights must be 'one' or 'signs', got 'all'"),
    ],
)
def test_fourier_errors(options, n_features, message):
    with pytest.raises(ValueError, match=message):
        make(FourierGates(4, **options), np.zeros((5, 2, n_features)))


# Differences


@pytest.mark.parametrize("shape", [(4, 3), (2, 2), (1, 3), (5, 1)])
@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_difference_gates_have_their_pair_at_equal_distance_on_either_side(shape, offset):
    X = torch.as_tensor(np.random.default_rng(0).normal(size=(60, *shape)) + offset)
    u1, u2 = separating_directions(X[:30], X[30:])
    first, second = (torch.einsum("mk,mkd,md->m", u1, part, u2) for part in (X[:30], X[30:]))
    torch.testing.assert_close(first, -second, atol=1e-9, rtol=0)
    assert (first > 1e-3).all()


def test_without_an_offset_the_turn_falls_away():
    # The middle of X and -X is the origin: nothing to turn, so the directions are the leading singular vectors.
    X = torch.as_tensor(np.random.default_rng(0).normal(size=(5, 4, 3)))
    u1, u2 = separating_directions(X, -X)
    sides = torch.einsum("mk,mkd,md->m", torch.nn.functional.normalize(u1), X, torch.nn.functional.normalize(u2))
    torch.testing.assert_close(sides, torch.linalg.matrix_norm(X, ord=2))


def test_pairs_that_no_gate_can_part_get_the_plain_direction():
    X = torch.tensor([[[1.0]], [[3.0]]], dtype=torch.float64)
    u1, u2 = separating_directions(X[:1], X[1:])
    assert (u1 * u2).item() == pytest.approx(-1.0)
    matrix = torch.as_tensor(np.random.default_rng(0).normal(size=(1, 3, 2)))
    u1, u2 = separating_directions(matrix, 2 * matrix)
    side = torch.einsum("mk,mkd,md->m", u1, matrix, u2)
    torch.testing.assert_close(side, -torch.linalg.matrix_norm(matrix, ord=2))


def test_pairs_that_are_nearly_multiples_lie_at_equal_distance_as_well():
    first, other = torch.as_tensor(np.random.default_rng(0).normal(size=(2, 20, 4, 3)))
    second = 2 * first + 1e-6 * other
    u1, u2 = separating_directions(first, second)
    sides = [torch.einsum("mk,mkd,md->m", u1, part, u2) for part in (first, second)]
    torch.testing.assert_close(sides[0], -sides[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("unit", [2.0**-80, 2.0**80])
def test_difference_gates_are_the_same_in_any_units(unit):
    X = np.random.default_rng(0).normal(size=(30, 3, 2)) + 2
    gates, usual = make(DifferenceGates(9), unit * X), make(DifferenceGates(9), X)
    for scaled, plain in ((gates.u1, usual.u1), (gates.u2, usual.u2)):
        units = (u / np.linalg.norm(u, axis=1, keepdims=True) for u in (scaled, plain))
        np.testing.assert_allclose(*units, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_difference_gates_are_open_for_some_samples_and_closed_for_others(dtype):
    X = (np.random.default_rng(0).normal(size=(40, 3, 2)) + 20).astype(dtype)
    masks = make(DifferenceGates(30), X).masks(torch.as_tensor(X))
    assert masks.any(0).all()
    assert not masks.all(0).any()
    # Random directions, in contrast, hardly ever part samples this far from the origin.
    drawn = make(GaussianGates(30), X).masks(torch.as_tensor(X))
    assert (drawn.any(0) & ~drawn.all(0)).sum() < 15


def test_samples_of_weight_zero_are_no_part_of_a_pair():
    X = np.random.default_rng(0).normal(size=(20, 3, 2))
    weight = torch.as_tensor(np.r_[np.ones(8), np.zeros(12)])
    weighted, alone = make(DifferenceGates(9), X, sample_weight=weight), make(DifferenceGates(9), X[:8])
    np.testing.assert_array_equal(weighted.u1, alone.u1)
    np.testing.assert_array_equal(weighted.u2, alone.u2)


def test_equal_samples_have_no_difference():
    with pytest.raises(ValueError, match="two training samples that differ are needed, but all are the same"):
        make(DifferenceGates(4), np.ones((10, 3, 2)))


@pytest.mark.parametrize("source", [FourierGates, DifferenceGates])
def test_number_of_gates_is_a_positive_integer(source):
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="n_gates must be a positive integer"):
            source(wrong)


@pytest.mark.parametrize("gates", ["fourier", "difference", FourierGates(6, frequencies=(0,)), DifferenceGates(5)])
def test_estimators_take_them_by_name_or_instance(make_problem, gates):
    X, y = make_problem(n_features=4)
    model = ConvexAttentionRegressor(0.05, activation="gated_relu", gates=gates, n_gates=8, random_state=3)
    first, second = model.fit(X, y), clone(model).fit(X, y)
    assert first.certificate_.relative_gap <= 1e-4
    np.testing.assert_array_equal(first.gates_.u2, second.gates_.u2)
    path = model.path(X, y, n_alphas=2)
    assert path.coefs.shape == (2, *first.coef_.shape)


# Networks


class Relu(torch.nn.Module):
    """``f(X) = b + sum_j relu(w1_j' X w2_j) w3_j``."""

    def __init__(self, n, d, c, m, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, width in (("w1", n), ("w2", d), ("w3", c)):
            weights = torch.randn(m, width, generator=generator, dtype=torch.float64)
            setattr(self, name, torch.nn.Parameter(weights))
        self.bias = torch.nn.Parameter(torch.full((c,), 0.3, dtype=torch.float64))

    def forward(self, X):
        return torch.relu(torch.einsum("mk,ikd,md->im", self.w1, X, self.w2)) @ self.w3 + self.bias

    def gate_directions(self):
        return self.w1, self.w2


def test_the_program_with_the_gates_of_a_relu_network_contains_the_network():
    rng = np.random.default_rng(0)
    X = torch.as_tensor(rng.normal(size=(50, 4, 3)))
    y = torch.as_tensor(rng.normal(size=(50, 2)))
    network = Relu(4, 3, 2, 6)
    gates = make(NetworkGates(network), X)
    outputs = network(X).detach()
    open_for = torch.einsum("mk,ikd,md->im", network.w1, X, network.w2) >= 0
    assert torch.equal(gates.masks(X), open_for)
    program = attention_program(X, y, alpha=0.1, gates=gates, fit_intercept=True)
    coef = torch.einsum("mk,md,mc->mkdc", network.w1, network.w2, network.w3).detach()
    torch.testing.assert_close(program.map.matvec(coef) + network.bias.detach(), outputs)
    # So the certified optimum bounds what the network attains.
    model = ConvexAttentionRegressor(0.1, activation="gated_relu", gates=NetworkGates(network)).fit(X, y)
    assert model.certificate_.dual <= certify(program, coef, network.bias.detach()).primal


def test_gates_of_a_network_are_those_of_its_present_weights():
    X = torch.zeros(1, 4, 3)
    network = Relu(4, 3, 1, 5)
    source = NetworkGates(network)
    before = make(source, X)
    with torch.no_grad():
        network.w1.mul_(-1)
    np.testing.assert_array_equal(make(source, X).u1, -before.u1)
    assert isinstance(clone(ConvexAttentionRegressor(gates=source)).gates, NetworkGates)


def test_networks_with_gates_as_an_attribute_and_networks_without():
    own = Gates(np.eye(3), np.ones((3, 2)))
    assert make(NetworkGates(ConvexAttention(3, 2, 1, n_heads=4, gates=own)), np.zeros((1, 3, 2))) is own
    for wrong in (ConvexAttention(3, 2, 1, n_heads=4), torch.nn.Linear(3, 2), None):
        with pytest.raises(TypeError, match=r"network must have a method gate_directions\(\).*got \w+ with neither"):
            NetworkGates(wrong)
    with pytest.raises(ValueError, match=r"\(n_tokens, n_features\) = \(4, 2\), got \(3, 2\)"):
        make(NetworkGates(ConvexAttention(3, 2, 1, n_heads=4, gates=own)), np.zeros((1, 4, 2)))

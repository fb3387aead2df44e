"""Energies: gradients, bounds of the curvature, majorisers that touch and dominate."""

import pytest
import torch
from unfolded_cases import RHO_IDS, RHOS, autograd_gradient, draw, random_graph

from convexformer.unfolded import (
    CenteringEnergy,
    Energy,
    Exponential,
    FeedForwardEnergy,
    InteractionEnergy,
    Logarithm,
    NonNegative,
    Rho,
    ScalingEnergy,
    SquaredDistance,
    get_rho,
)

N, D, K = 6, 4, 3
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


def energies():
    """Energies of two samples of six tokens of width 4."""
    anchor = draw(90, 2, N, D)
    cases = {name: InteractionEnergy(rho) for name, rho in zip(RHO_IDS, RHOS, strict=True)}
    cases |= {
        "graph": InteractionEnergy("exp", random_graph(1, N)),
        "padded": InteractionEnergy("log1", attention_mask=MASK),
        "squared": SquaredDistance(weight=0.3),
        "anchored": SquaredDistance(anchor),
        "feedforward": FeedForwardEnergy(draw(91, D, D), anchor),
        "centering": CenteringEnergy(),
        "scaling": ScalingEnergy(),
        "transformed": InteractionEnergy("exp").of(draw(92, D, K)),
        "whole": InteractionEnergy("exp").of(draw(92, D, K)) + FeedForwardEnergy(draw(91, D, D), anchor),
        "with regulariser": (InteractionEnergy("log2") + SquaredDistance()).of(draw(93, D, K)),
    }
    return cases


CASES = energies()


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_autograd(name):
    energy, tokens = CASES[name], draw(0, 2, N, D)
    expected = autograd_gradient(energy.value, tokens)
    torch.testing.assert_close(energy.gradient(tokens), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_gradient_and_bound_are_the_same_together(name):
    energy, tokens = CASES[name], draw(0, 2, N, D)
    together = energy.gradient_and_lipschitz(tokens)
    torch.testing.assert_close(together, (energy.gradient(tokens), energy.lipschitz(tokens)))


@pytest.mark.parametrize("name", CASES)
def test_majorisers_touch_and_dominate(name):
    energy = CASES[name]
    for seed in range(20):
        at = draw(seed, 2, N, D, scale=10 ** (seed % 4 - 2.0))
        for bound in (energy.majorizer(at), Energy.majorizer(energy, at)):
            here = energy.value(at)
            slack = 1e-12 * (1 + here.abs() + N * D * at.square().amax())
            assert (bound.value(at) - here).abs().le(slack).all()
            torch.testing.assert_close(bound.gradient(at), energy.gradient(at), rtol=1e-10, atol=1e-10)
            for scale in (1e-3, 0.1, 1.0, 10.0):
                other = at + draw(100 + seed, 2, N, D, scale=scale)
                room = 1e-12 * (1 + energy.value(other).abs() + bound.value(other).abs() + at.square().sum())
                assert (bound.value(other) >= energy.value(other) - room).all()


@pytest.mark.parametrize("name", CASES)
def test_a_bound_half_as_large_is_none(name):
    """Bounds are of use: those of quadratics are attained, and half of any other is exceeded somewhere or is loose by
    a known factor of two (degrees bound a Laplacian's eigenvalues within two)."""
    energy, at = CASES[name], draw(5, 2, N, D)
    hessian = torch.autograd.functional.hessian(lambda y: energy.majorizer(at).value(y).sum(), at)
    blocks = torch.stack([hessian[i, :, :, i].reshape(N * D, N * D) for i in range(2)])
    largest = torch.linalg.eigvalsh(blocks)[:, -1]
    bound = energy.lipschitz(at)
    assert (largest <= bound * (1 + 1e-10)).all()
    assert (largest >= bound / 4).all()


@pytest.mark.parametrize("name", CASES)
def test_steps_within_the_bound_descend(name):
    energy = CASES[name]
    for seed in range(50):
        tokens = draw(seed, 2, N, D, scale=10 ** (seed % 3 - 1.0))
        step = 1.99 / energy.lipschitz(tokens)
        after = energy.value(tokens - step[:, None, None] * energy.gradient(tokens))
        assert (after <= energy.value(tokens) + 1e-12 * (1 + energy.value(tokens).abs())).all()


@pytest.mark.parametrize("name", CASES)
def test_steps_within_the_bound_of_a_majoriser_descend_it(name):
    energy, at, tokens = CASES[name], draw(5, 2, N, D), draw(8, 2, N, D)
    quadratic = Energy.majorizer(energy, at)
    torch.testing.assert_close(quadratic.lipschitz(tokens), energy.lipschitz(at))
    for bound in (energy.majorizer(at), quadratic):
        step = 1.99 / bound.lipschitz(tokens)
        after = bound.value(tokens - step[:, None, None] * bound.gradient(tokens))
        assert (after <= bound.value(tokens) + 1e-12 * (1 + bound.value(tokens).abs())).all()


@pytest.mark.parametrize(("rho", "name"), list(zip(RHOS, RHO_IDS, strict=True)))
def test_the_energy_is_the_sum_over_undirected_edges(rho, name):
    tokens, graph, rho = draw(3, N, D), random_graph(4, N), get_rho(rho)
    edges = [(u, v) for u in range(N) for v in range(u) if graph[u, v]]
    expected = sum(rho.value((tokens[u] - tokens[v]).square().sum() / 2) for u, v in edges)
    torch.testing.assert_close(InteractionEnergy(rho, graph).value(tokens), expected)


def test_padding_changes_nothing():
    tokens = draw(6, 4, D)
    padded = torch.cat([tokens, draw(7, 2, D)])[None]
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    with_padding = InteractionEnergy("exp", attention_mask=mask)
    without = InteractionEnergy("exp")
    torch.testing.assert_close(with_padding.value(padded)[0], without.value(tokens))
    torch.testing.assert_close(with_padding.gradient(padded)[0, :4], without.gradient(tokens))
    assert not with_padding.gradient(padded)[0, 4:].any()


@pytest.mark.parametrize(
    "energy", [InteractionEnergy("exp", attention_mask=MASK), SquaredDistance(attention_mask=MASK)]
)
def test_padding_may_hold_what_is_no_number(energy):
    def answers(tokens, at):
        of_both = [part for each in (energy, energy.majorizer(at)) for part in each.gradient_and_lipschitz(tokens)]
        return [*of_both, energy.value(tokens), energy.gradient(tokens), energy.majorizer(at).value(tokens)]

    given = draw(6, 2, N, D), draw(7, 2, N, D)
    holes = [tokens.masked_fill(MASK[..., None] == 0, torch.nan) for tokens in given]
    torch.testing.assert_close(answers(*holes), answers(*given))


def test_bounds_are_of_each_sample_also_where_the_energy_is_one_for_all():
    at, tokens = draw(5, N, D), draw(6, 2, N, D)
    for bound in (InteractionEnergy("exp").majorizer(at), Energy.majorizer(CenteringEnergy(), at)):
        assert bound.lipschitz(tokens).shape == (2,)


def test_the_bound_of_weak_edges_is_that_of_their_degrees():
    tokens, energy = torch.tensor([[0.0], [3.0]], dtype=torch.float64), InteractionEnergy("exp")
    weight = energy.weights(tokens)[0, 1]
    assert weight < 0.5
    assert energy.lipschitz(tokens) == 2 * weight  # the largest eigenvalue of the Laplacian


@pytest.mark.parametrize("weight", [draw(12, D, D), -0.5 * torch.eye(D), -3.0 * torch.eye(D)])
def test_the_bound_of_the_feed_forward_part_is_its_largest_curvature(weight):
    curvatures = torch.linalg.eigvalsh(torch.eye(D) + (weight + weight.mT) / 2)
    bound = FeedForwardEnergy(weight).lipschitz(torch.zeros(N, D))
    assert bound.item() == pytest.approx(curvatures.abs().max().item())


@pytest.mark.parametrize("mask", [None, MASK])
def test_a_common_shift_costs_no_digits(mask):
    tokens, energy = draw(8, 2, N, D), InteractionEnergy("exp", attention_mask=mask)
    shift = 1e6 if mask is None else 1e6 * mask[..., None]  # of the tokens alone
    torch.testing.assert_close(energy.value(tokens + shift), energy.value(tokens), rtol=1e-9, atol=0)
    shifted = energy.majorizer(tokens + shift).value(tokens.flip(0) + shift)
    torch.testing.assert_close(shifted, energy.majorizer(tokens).value(tokens.flip(0)), rtol=1e-8, atol=0)


def test_layer_norm_is_two_gradient_steps_of_length_one():
    tokens = draw(9, 3, N, D)
    centred = tokens - CenteringEnergy().gradient(tokens)
    scaled = centred - ScalingEnergy().gradient(centred)
    expected = torch.nn.functional.layer_norm(tokens, (D,), eps=0)
    torch.testing.assert_close(scaled, expected, rtol=1e-10, atol=1e-10)
    for energy, before, after in ((CenteringEnergy(), tokens, centred), (ScalingEnergy(), centred, scaled)):
        assert (energy.value(after) <= energy.value(before) + 1e-12).all()


def test_a_zero_token_stays_where_it_is_scaled():
    assert not ScalingEnergy().gradient(torch.zeros(1, 3)).any()


def test_a_step_that_scales_a_zero_token_has_finite_derivatives():
    tokens = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    (tokens - ScalingEnergy().gradient(tokens)).sum().backward()
    assert tokens.grad.isfinite().all()


def test_the_relu_is_the_proximal_operator_of_the_indicator():
    tokens, indicator = draw(10, N, D), NonNegative()
    nearest = indicator.prox(tokens)
    assert indicator.value(nearest) == 0
    assert indicator.value(tokens) == torch.inf
    for seed in range(20):
        other = draw(seed, N, D).abs()
        assert (nearest - tokens).norm() <= (other - tokens).norm()


def test_kernels_called_positive_definite_are():
    for rho in (Exponential(), Logarithm(0.5), Logarithm(2.0)):
        for seed in range(20):
            tokens = draw(seed, 8, 3, scale=10 ** (seed % 3 - 1.0))
            kernel = InteractionEnergy(rho).weights(tokens) + rho.derivative(torch.zeros(())) * torch.eye(8)
            assert torch.linalg.eigvalsh(kernel)[0] > -1e-12 * kernel.trace()


class _Own(Rho):
    def value(self, z):
        return torch.log(z + 1)

    def derivative(self, z):
        return 1 / (z + 1)


def test_the_smaller_bound_is_for_functions_that_promise_a_positive_definite_kernel():
    tokens = torch.zeros(5, 2, dtype=torch.float64)  # of degree 4, where the least bound is the number of tokens
    assert InteractionEnergy("log1").lipschitz(tokens) == 5
    assert InteractionEnergy("log1", ~torch.eye(5, dtype=torch.bool)).lipschitz(tokens) == 8
    assert InteractionEnergy(_Own()).lipschitz(tokens) == 8


class _Convex(Rho):
    def value(self, z):
        return z.square()

    def derivative(self, z):
        return 2 * z


class _SlightlyConvex(Rho):
    def value(self, z):
        return 1.001 * z - 0.001 * torch.log(z + 1)

    def derivative(self, z):
        return 1.001 - 0.001 / (z + 1)


class _InfiniteSlope(_SlightlyConvex):
    def derivative(self, z):
        return z.new_full(z.shape, torch.inf)


class _LaterDecreasing(Rho):
    def value(self, z):
        return z - z.square() / 2000

    def derivative(self, z):
        return 1 - z / 1000


class _InfiniteValue(Rho):
    def value(self, z):
        return z + torch.inf

    def derivative(self, z):
        return torch.ones_like(z)


class _AlmostDerivative(_Own):
    def derivative(self, z):
        return 0.99 / (z + 1)


class _Decreasing(Rho):
    def value(self, z):
        return -z

    def derivative(self, z):
        return -torch.ones_like(z)


class _WrongDerivative(Rho):
    def value(self, z):
        return torch.log(z + 1)

    def derivative(self, z):
        return 1 / (z + 2)


class _InfiniteAtZero(Rho):
    def value(self, z):
        return z.sqrt()

    def derivative(self, z):
        return 0.5 / z.sqrt()


class _Constant(Rho):
    def value(self, z):
        return 0 * z

    def derivative(self, z):
        return 0 * z


class _DetachedValue(_Own):
    def value(self, z):
        return super().value(z.detach())


class _NumberAsDerivative(Rho):
    def value(self, z):
        return z

    def derivative(self, z):
        return 1.0


@pytest.mark.parametrize(
    ("rho", "message"),
    [
        (_Convex(), "must be concave"),
        (_Constant(), "must increase at 0, but is constant"),
        (_DetachedValue(), "must have a value that autograd can differentiate"),
        (_NumberAsDerivative(), "must return tensors of the shape of z"),
        (_SlightlyConvex(), "must be concave"),
        (_InfiniteSlope(), "and its derivative must be finite"),
        (_Decreasing(), "must not decrease"),
        (_LaterDecreasing(), "must not decrease"),
        (_InfiniteValue(), "must be finite"),
        (_AlmostDerivative(), "autograd finds"),
        (_WrongDerivative(), "autograd finds"),
        (_InfiniteAtZero(), "must be finite"),
        ("cosh", "must be one of"),
    ],
)
def test_functions_without_a_majoriser_are_refused(rho, message):
    with pytest.raises(ValueError, match=message):
        InteractionEnergy(rho)


def test_functions_are_checked_where_gradients_are_switched_off():
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert isinstance(get_rho(_Own()), _Own)


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="must be one of"):
        get_rho(3)
    with pytest.raises(TypeError, match=r"or a Rho, got <class .*Logarithm'>"):
        get_rho(Logarithm)
    with pytest.raises(ValueError, match="shift must be a positive"):
        Logarithm(-1.0)


def test_a_shift_whose_attention_would_not_be_finite_is_refused():
    tokens, energy = draw(0, 4, 3), InteractionEnergy(Logarithm(1e-40))
    assert energy.weights(tokens).isfinite().all()
    with pytest.raises(ValueError, match=r"shift must be at least 1\.1e-19 for tokens of torch\.float32, got 1e-40"):
        energy.weights(tokens.float())
    z = torch.zeros((), requires_grad=True)
    Logarithm(1.1e-19).derivative(z).backward()
    assert z.grad.isfinite()


def test_graphs_are_undirected():
    causal = torch.ones(3, 3).tril().bool()
    with pytest.raises(ValueError, match="causal or otherwise directed mask has no such energy"):
        InteractionEnergy("exp", causal)
    with pytest.raises(TypeError, match="graph must be a boolean tensor"):
        InteractionEnergy("exp", torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"must have shape \(n_tokens, n_tokens\)"):
        InteractionEnergy("exp", torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="graph must be that of 4 tokens"):
        InteractionEnergy("exp", ~torch.eye(3, dtype=torch.bool)).value(draw(0, 4, 2))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), "1"])
def test_weights_are_positive(bad):
    with pytest.raises(ValueError, match="weight must be a positive finite number"):
        SquaredDistance(weight=bad)

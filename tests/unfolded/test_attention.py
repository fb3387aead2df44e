"""Attention that descends its energy: its steps, its fused form, and mutants that must fail."""

import pytest
import torch
from unfolded_cases import RHO_IDS, RHOS, Capped, autograd_gradient, draw, random_graph

from convexformer.unfolded import (
    DescentWarning,
    EnergyAttention,
    InteractionEnergy,
    SquaredDistance,
    UnfoldedLayer,
    get_rho,
)

N, D, K = 6, 4, 3
ROUNDING = 1e-12


def rises(energy, before, after):
    """Whether samples rise by more than rounding."""
    first, last = energy.value(before), energy.value(after)
    return last > first + ROUNDING * (1 + first.abs())


@pytest.mark.parametrize("step", [1.0, 0.3])
@pytest.mark.parametrize("graph", [None, random_graph(2, N)], ids=["complete", "graph"])
@pytest.mark.parametrize("rho", RHOS, ids=RHO_IDS)
def test_softmax_mode_is_the_preconditioned_step_of_autograd(rho, graph, step):
    tokens, weight = draw(0, 2, N, D), draw(1, D, K)
    projected = tokens @ weight
    attention = EnergyAttention(rho, step=step, graph=graph)
    gradient = autograd_gradient(attention.energy().value, projected)
    degree = InteractionEnergy(rho, graph).weights(projected).sum(-1, keepdim=True)
    expected = projected - step * gradient / (degree + get_rho(rho).derivative(torch.zeros(())))
    moved = attention(tokens, projected=projected) @ weight
    torch.testing.assert_close(moved, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("graph", [None, random_graph(2, N)], ids=["complete", "graph"])
@pytest.mark.parametrize("rho", RHOS, ids=RHO_IDS)
def test_jacobi_mode_is_the_jacobi_step_of_autograd(rho, graph, anchored):
    tokens, weight, anchor, w = draw(0, 2, N, D), draw(1, D, K), draw(2, 2, N, D), 0.7
    projected, goal = tokens @ weight, anchor @ weight if anchored else None
    attention = EnergyAttention(rho, "jacobi", step=0.6, weight=w, graph=graph)
    energy = attention.energy(goal)
    gradient = autograd_gradient(energy.value, projected)
    majoriser = energy.majorizer(projected)
    hessian = torch.autograd.functional.hessian(lambda y: majoriser.value(y).sum(), projected)
    diagonal = torch.einsum("iukiuk->iuk", hessian)
    expected = projected - 0.6 * gradient / diagonal
    moved = attention(tokens, projected=projected, anchor=anchor if anchored else None) @ weight
    torch.testing.assert_close(moved, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padded", [False, True])
def test_the_fused_form_is_the_explicit_one(dtype, padded):
    mask = torch.tensor([[1] * N, [1] * 4 + [0] * 2, [1] + [0] * 5]) if padded else None
    results = []
    for fused in (True, False):
        tokens, weight = draw(3, 3, N, D).to(dtype).requires_grad_(), draw(4, D, K).to(dtype).requires_grad_()
        out = EnergyAttention("exp", step=0.8, fused=fused)(tokens, projected=tokens @ weight, attention_mask=mask)
        (out * draw(5, 3, N, D).to(dtype)).sum().backward()
        assert out.dtype == dtype
        results.append((out.detach(), tokens.grad, weight.grad))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)


def test_a_common_shift_costs_the_fused_form_no_digits():
    tokens = draw(3, 3, N, D)
    exact = EnergyAttention("exp")(tokens) + 1000
    for fused in (True, False):
        shifted = EnergyAttention("exp", fused=fused)((tokens + 1000).float())
        torch.testing.assert_close(shifted.double(), exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize("mode", ["softmax", "jacobi"])
def test_what_padding_holds_does_not_matter(mode):
    tokens, mask = draw(3, 1, N, D), torch.tensor([[1] * 4 + [0] * 2])
    spoiled = tokens.clone()
    spoiled[0, 4:] = torch.nan
    attention = EnergyAttention("exp", mode)
    torch.testing.assert_close(
        attention(spoiled, attention_mask=mask)[:, :4], attention(tokens, attention_mask=mask)[:, :4]
    )


def test_exponential_attention_is_softmax_with_key_weights():
    tokens = draw(6, N, D)
    logits = tokens @ tokens.T - tokens.square().sum(-1) / 2
    torch.testing.assert_close(EnergyAttention("exp")(tokens), torch.softmax(logits, -1) @ tokens)


def test_rational_attention_of_unit_rows():
    """log(z + 2) gives 1 / (3 - y_i'y_j); the printed 1 / (2 - y_i'y_j) is that of log(z + 1)."""
    tokens = torch.nn.functional.normalize(draw(7, N, D), dim=-1)
    for name, constant in (("log1", 2), ("log2", 3)):
        weights = 1 / (constant - tokens @ tokens.T)
        expected = weights / weights.sum(-1, keepdim=True) @ tokens
        torch.testing.assert_close(EnergyAttention(name)(tokens), expected)


def test_the_printed_step_raises_the_regularised_energy_and_the_jacobi_step_does_not():
    """[U] Theorem 3.1 as printed: equation (10) for the energy with |Y|^2 / 2, on the tokens 5, 8, 8, 8."""
    tokens = torch.tensor([[5.0], [8.0], [8.0], [8.0]], dtype=torch.float64)
    energy = InteractionEnergy("exp") + SquaredDistance()
    printed, corrected = EnergyAttention("exp", "softmax"), EnergyAttention("exp", "jacobi")
    values = [energy.value(step).item() for step in (tokens, printed(tokens), corrected(tokens))]
    assert values[0] == pytest.approx(105.467, abs=1e-3)
    assert values[1] == pytest.approx(105.677, abs=1e-3)
    assert values[2] < values[0]


def random_tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    n, d = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((2, 12), (1, 8)))
    return draw(seed, 8, n, d, scale=10 ** (2 * torch.rand((), generator=generator).item() - 1))


@pytest.mark.parametrize("rho", RHOS, ids=RHO_IDS)
@pytest.mark.parametrize("mode", ["softmax", "jacobi"])
def test_steps_up_to_one_never_raise_the_energy(rho, mode):
    for seed in range(150):
        tokens = random_tokens(seed)
        for step, graph in ((1.0, None), (0.4, None), (1.0, random_graph(seed, tokens.shape[1]))):
            attention = EnergyAttention(rho, mode, step=step, graph=graph)
            anchor = draw(seed + 1, *tokens.shape) if mode == "jacobi" and seed % 2 else None
            assert not rises(attention.energy(anchor), tokens, attention(tokens, anchor=anchor)).any()


@pytest.mark.parametrize("rho", ["exp", "log1", "log2"])
def test_steps_below_two_descend_for_positive_definite_kernels_on_complete_graphs(rho):
    attention = EnergyAttention(rho, step=1.99)
    assert attention.descends
    for seed in range(200):
        tokens = random_tokens(seed)
        assert not rises(attention.energy(), tokens, attention(tokens)).any()


def test_steps_beyond_one_rise_on_some_graph():
    """Two tokens that share an edge overshoot: the bound of 1 for general graphs is not an accident of the proof."""
    star = torch.zeros(N, N, dtype=torch.bool)
    star[0, 1:] = star[1:, 0] = True
    with pytest.warns(DescentWarning, match="longer than the steps up to 1"):
        attention = EnergyAttention(Capped(), step=1.99, graph=star)
    assert not attention.descends
    assert any(rises(attention.energy(), 1e-2 * draw(s, N, 1), attention(1e-2 * draw(s, N, 1))) for s in range(50))


@pytest.mark.parametrize("mutant", ["no key weights", "WW' for W'W", "(10) with the regulariser", "(69)"])
def test_mutants_rise(mutant):
    """Errors that the energies would show: each raises the energy in some of the trials in which the step does not."""
    count = 0
    for seed in range(200):
        tokens, weight = random_tokens(seed)[0], None
        energy = InteractionEnergy("exp")
        if mutant == "no key weights":
            moved = torch.softmax(tokens @ tokens.T, -1) @ tokens
        elif mutant == "WW' for W'W":
            weight = draw(seed + 7, tokens.shape[1], tokens.shape[1])
            energy = energy.of(weight)
            moved = EnergyAttention("exp")(tokens, projected=tokens @ weight.T)
        elif mutant == "(10) with the regulariser":
            energy, tokens = energy + SquaredDistance(), tokens + 8  # far from zero, as the counterexample is
            moved = EnergyAttention("exp")(tokens)
        else:  # the anchored step as printed, without the division by the degrees
            energy = energy + SquaredDistance(tokens)
            moved = InteractionEnergy("exp").weights(tokens) @ tokens + tokens
        count += bool(rises(energy, tokens, moved))
    assert count > 0


def test_padding_is_neither_attended_nor_moved():
    tokens = draw(8, 2, N, D)
    mask = torch.tensor([[1] * N, [1] * 4 + [0] * 2])
    for mode in ("softmax", "jacobi"):
        attention = EnergyAttention("log1", mode)
        out = attention(tokens, attention_mask=mask)
        torch.testing.assert_close(out[1, :4], attention(tokens[1, :4]))
        assert torch.equal(out[1, 4:], tokens[1, 4:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "gauss"}, "mode must be one of"),
        ({"step": 0.0}, "step must be a positive"),
        ({"weight": -1.0}, "weight must be a positive"),
        ({"graph": torch.ones(3, 3).tril().bool()}, "causal"),
        ({"fused": "yes"}, "fused must be True or False"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        EnergyAttention("exp", **arguments)


@pytest.mark.parametrize("fill", [0.0, 1e8, torch.nan])
@pytest.mark.parametrize("mode", ["softmax", "jacobi"])
def test_what_padding_holds_does_not_matter_to_the_energy(mode, fill):
    def padded(tokens):
        return torch.cat([tokens, torch.full((2, 2, D), fill, dtype=tokens.dtype)], 1)

    attention, (tokens, other, anchor) = EnergyAttention("log1", mode), draw(3, 3, 2, 4, D)
    anchor = anchor if mode == "jacobi" else None
    alone = attention.energy(anchor)
    energy = attention.energy(None if anchor is None else padded(anchor), torch.tensor([[1] * 4 + [0] * 2] * 2))
    for with_padding, without in ((energy, alone), (energy.majorizer(padded(tokens)), alone.majorizer(tokens))):
        torch.testing.assert_close(with_padding.value(padded(other)), without.value(other))
        torch.testing.assert_close(with_padding.lipschitz(padded(other)), without.lipschitz(other))
        gradient = with_padding.gradient(padded(other))
        torch.testing.assert_close(gradient[:, :4], without.gradient(other))
        assert not gradient[:, 4:].any()


def test_bad_tokens_and_masks():
    attention, tokens = EnergyAttention("exp"), draw(9, 2, N, D)
    with pytest.raises(ValueError, match="anchor must be None in mode='softmax'"):
        attention(tokens, anchor=tokens)
    with pytest.raises(ValueError, match="a mask of pairs of tokens is the argument graph"):
        attention(tokens, attention_mask=torch.ones(2, N, N))
    with pytest.raises(ValueError, match="must hold 0 and 1"):
        attention(tokens, attention_mask=torch.full((2, N), 0.5))
    with pytest.raises(ValueError, match="at least one token"):
        attention(tokens, attention_mask=torch.zeros(2, N))
    with pytest.raises(TypeError, match="attention_mask must be a tensor"):
        attention(tokens, attention_mask=[1] * N)
    for call in (attention, attention.energy().value, UnfoldedLayer(D)):
        with pytest.raises(ValueError, match=r"tokens must hold floating-point numbers, such as .*, got torch.int64"):
            call(tokens.long())
        with pytest.raises(TypeError, match="tokens must be a torch tensor, got ndarray"):
            call(tokens.numpy())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": draw(0, D)}, r"tokens must have shape \(\.\.\., n_tokens, n_features\), got \(4,\)"),
        ({"projected": draw(0, 2, N - 1, K)}, r"projected must have shape \(\.\.\., 6, n_features\), got \(2, 5, 3\)"),
        ({"anchor": draw(0, 2, N - 1, D)}, r"anchor must have shape \(\.\.\., 6, 4\), got \(2, 5, 4\)"),
        ({"anchor": draw(0, 2, N, K)}, r"anchor must have shape \(\.\.\., 6, 4\), got \(2, 6, 3\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        EnergyAttention("exp", "jacobi")(**{"tokens": draw(0, 2, N, D)} | arguments)


def test_steps_beyond_the_bound_warn():
    with pytest.warns(DescentWarning, match="Theorem 3.1"):
        EnergyAttention("exp", "jacobi", step=1.2)
    with pytest.warns(DescentWarning, match="below 2 on this complete graph"):
        EnergyAttention("exp", step=2.5)

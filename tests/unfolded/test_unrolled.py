"""Unrolled networks: their formulas, iterative soft thresholding, padding, precision and errors."""

import copy
import pickle

import numpy as np
import pytest
import torch
from sklearn.linear_model import Lasso
from unfolded_cases import draw

import convexformer
from convexformer.unfolded.unrolled import (
    DUST,
    UnrolledTransformer,
    frame_patches,
    frames_from_patches,
    overcomplete_dct,
    soft_threshold,
    tied_attention,
)

N, TOKENS, D, LAYERS = 3, 5, 4, 3
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 0, 1]])
NETWORKS = [
    lambda **options: UnrolledTransformer(D, LAYERS, **options),
    lambda **options: DUST(D, LAYERS, n_atoms=9, dictionary="random", start="analysis", **options),
]
each_network = pytest.mark.parametrize("make", NETWORKS, ids=["ut", "dust"])
each_sharing = pytest.mark.parametrize("shared", [False, True])


def tokens_of(seed=0):
    return draw(seed, N, TOKENS, D)


def soft(values, threshold):
    return np.sign(values) * np.maximum(np.abs(values) - threshold, 0)


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@each_sharing
def test_transformer_is_its_formula(shared):
    network, tokens = UnrolledTransformer(D, LAYERS, shared=shared).double(), tokens_of()
    outputs = network.layer_outputs(tokens).numpy(force=True)
    for sample in range(N):
        Y = tokens[sample].numpy()
        for layer in range(LAYERS):
            W, V = (
                part[0 if shared else layer].numpy(force=True)
                for part in (network.attention_weight, network.feedforward_weight)
            )
            Z = softmax(Y @ W @ W.T @ Y.T) @ Y
            Y = np.maximum(Z @ (V + V.T) / 2 + Y, 0)
            np.testing.assert_allclose(outputs[layer, sample], Y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("start", ["zero", "analysis"])
@each_sharing
def test_dust_is_its_formula(shared, start, attention):
    options = {"n_atoms": 7, "penalty": 0.2, "attention_scale": 0.7, "dictionary": "random"}
    network = DUST(D, LAYERS, shared=shared, start=start, attention=attention, **options).double()
    with torch.no_grad():
        network.dictionary += 0.1 * draw(1, *network.dictionary.shape)
    tokens = tokens_of(2)
    outputs, codes = (part(tokens).numpy(force=True) for part in (network.layer_outputs, network.layer_codes))
    atoms = network.dictionary.numpy(force=True)
    for sample in range(N):
        X = tokens[sample].numpy().T
        H = np.zeros((7, TOKENS)) if start == "zero" else atoms[0].T @ X / np.linalg.norm(atoms[0], 2) ** 2
        for layer in range(LAYERS):
            A = atoms[0 if shared else layer]
            c = np.linalg.norm(A, 2) ** 2
            if attention:
                H = (softmax(0.7 * H.T @ H) @ H.T).T
            H = soft((np.eye(7) - A.T @ A / c) @ H + A.T @ X / c, 0.2 / c)
            np.testing.assert_allclose(codes[layer, sample], H.T, rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(outputs[layer, sample], (A @ H).T, rtol=1e-6, atol=1e-7)


def test_dust_without_attention_solves_the_lasso():
    d, penalty = 6, 0.15
    network = DUST(d, 4000, n_atoms=14, shared=True, attention=False, penalty=penalty, dictionary="random").double()
    tokens = draw(3, 2, 3, d)
    with torch.no_grad():
        codes, penalties = network.layer_codes(tokens), network.penalties
        residuals = tokens - codes @ network.dictionary[0].mT
    objectives = residuals.square().sum(-1) / 2 + penalties[0] * codes.abs().sum(-1)
    start = tokens.square().sum(-1) / 2
    steps = torch.cat([start[None], objectives]).diff(dim=0)
    assert (steps <= 1e-14).all()
    assert (steps[:50] < 0).all()
    atoms = network.dictionary[0].numpy(force=True)
    for place in np.ndindex(2, 3):
        lasso = Lasso(alpha=float(penalties[0]) / d, fit_intercept=False, tol=1e-13, max_iter=10**6)
        lasso.fit(atoms, tokens[place].numpy())
        np.testing.assert_allclose(codes[(-1, *place)], lasso.coef_, rtol=0, atol=1e-6)
        value = ((tokens[place].numpy() - atoms @ lasso.coef_) ** 2).sum() / 2
        value += float(penalties[0]) * np.abs(lasso.coef_).sum()
        assert objectives[(-1, *place)].item() == pytest.approx(value, abs=1e-10)


def test_attention_of_dust_is_between_tokens():
    tokens = tokens_of()
    changed = tokens.clone()
    changed[:, -1] += 1
    for attention in (False, True):
        network = DUST(D, LAYERS, penalty=0.01, attention=attention).double()
        moved = (network(changed) - network(tokens))[:, :-1].abs().max()
        assert (moved > 1e-6) == attention


def test_step_of_dust_follows_the_dictionary():
    network = DUST(D, 200, shared=True, attention=False, penalty=1e-3).double()
    with torch.no_grad():
        network.dictionary.mul_(30)
    tokens = tokens_of()
    assert torch.allclose(network.curvatures(), torch.linalg.matrix_norm(network.dictionary, 2).square())
    torch.testing.assert_close(network(tokens), tokens, rtol=1e-3, atol=1e-3)


class LayerOutputs(torch.nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, tokens):
        return self.network.layer_outputs(tokens, MASK[:2])


@each_sharing
@each_network
def test_gradients(make, shared):
    outputs, tokens = LayerOutputs(make(shared=shared).double()), tokens_of()[:2].requires_grad_()
    names = [name for name, _ in outputs.named_parameters()]

    def function(tokens, *parameters):
        return torch.func.functional_call(outputs, dict(zip(names, parameters, strict=True)), tokens)

    parameters = [parameter.detach().clone().requires_grad_() for parameter in outputs.parameters()]
    assert torch.autograd.gradcheck(function, (tokens, *parameters))


def test_gradients_of_the_initial_cosines_are_finite():
    """The largest eigenvalue of a tight frame is a multiple one."""
    network = DUST(16, 3)
    network.layer_outputs(torch.rand(2, 4, 16)).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())
    assert all(parameter.grad.abs().max() > 0 for parameter in network.parameters())


@each_sharing
@each_network
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes_and_precision(make, shared, dtype):
    network, tokens = make(shared=shared).to(dtype), tokens_of().to(dtype)
    outputs = network.layer_outputs(tokens)
    assert outputs.shape == (LAYERS, N, TOKENS, D)
    assert outputs.dtype == dtype
    assert torch.equal(network(tokens), outputs[-1])
    for count in range(1, LAYERS + 1):
        assert torch.equal(network(tokens, max_layers=count), outputs[count - 1])
        assert torch.equal(network.layer_outputs(tokens, max_layers=count), outputs[:count])


@each_sharing
@each_network
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_float32_up_to_rounding(make, shared, dtype):
    network, tokens = make(shared=shared), tokens_of().float()
    outputs = copy.deepcopy(network).to(dtype).layer_outputs(tokens.to(dtype))
    assert outputs.dtype == dtype
    expected = network.layer_outputs(tokens)
    assert (outputs.float() - expected).norm() < 10 * torch.finfo(dtype).eps * expected.norm()


@each_network
def test_later_layers_are_not_computed(make, monkeypatch):
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return tied_attention(*arguments)

    monkeypatch.setattr("convexformer.unfolded.unrolled.tied_attention", counted)
    make().double()(tokens_of(), max_layers=2)
    assert len(calls) == 2


@each_network
def test_padding_changes_nothing(make):
    network, tokens = make().double(), tokens_of()
    outputs = network.layer_outputs(tokens, MASK)
    assert not outputs[:, MASK == 0].any()
    other = torch.where(MASK[..., None] == 1, tokens, 1e3)
    assert torch.equal(network.layer_outputs(other, MASK), outputs)
    for sample, mask in enumerate(MASK.bool()):
        alone = network.layer_outputs(tokens[sample : sample + 1, mask])
        torch.testing.assert_close(outputs[:, sample, mask], alone[:, 0], rtol=1e-12, atol=1e-12)
    assert torch.equal(network(tokens, MASK.bool()), outputs[-1])


@each_network
def test_a_graph_of_torch_takes_tokens_and_a_mask(make):
    network, tokens = make(), tokens_of().float()
    program = torch.export.export(network, (tokens, torch.ones_like(MASK))).module()
    torch.testing.assert_close(program(tokens, MASK), network(tokens, MASK))


@each_network
def test_seed_makes_the_network(make):
    before = torch.random.get_rng_state()
    first, same, other = make(seed=1), make(seed=1), make(seed=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    tokens = tokens_of().float()
    assert torch.equal(first(tokens), same(tokens))
    assert not torch.equal(first(tokens), other(tokens))


@each_sharing
@each_network
def test_copies(make, shared):
    network, tokens = make(shared=shared), tokens_of().float()
    for twin in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert torch.equal(twin(tokens), network(tokens))
    assert f"shared={shared}" in repr(network)


def test_weights_are_shared_where_asked():
    assert [len(UnrolledTransformer(D, LAYERS, shared=s).attention_weight) for s in (False, True)] == [LAYERS, 1]
    network = DUST(D, LAYERS, shared=True)
    assert network.dictionary.shape == (1, D, 4 * D)
    assert network.penalties.shape == network.attention_scales.shape == (LAYERS,)
    torch.testing.assert_close(network.penalties, torch.full((LAYERS,), 0.1))
    plain = DUST(D, attention=False)
    assert plain.attention_scales is None
    assert {name for name, _ in plain.named_parameters()} == {"dictionary", "raw_penalty"}


@pytest.mark.parametrize(("d", "m"), [(4, 16), (16, 64), (6, 12), (9, 9), (5, 5), (9, 16)])
def test_cosines(d, m):
    atoms = overcomplete_dct(d, m).double()
    torch.testing.assert_close(atoms.norm(dim=0), torch.ones(m, dtype=torch.float64), rtol=0, atol=1e-6)
    assert torch.linalg.matrix_rank(atoms) == d
    assert not (torch.triu(atoms.T @ atoms, 1) > 1 - 1e-3).any()
    if (d, m) != (9, 16):
        torch.testing.assert_close(atoms @ atoms.T, m / d * torch.eye(d, dtype=torch.float64), rtol=0, atol=1e-5)


def test_cosines_of_patches_are_products():
    lines, grid = overcomplete_dct(5, 10), overcomplete_dct(25, 100)
    product = torch.outer(lines[:, 3], lines[:, 7])
    torch.testing.assert_close(grid[:, 37].reshape(5, 5), product)


def test_frames_are_cut_and_put_together():
    frames = draw(0, 2, 3, 6, 9)
    patches = frame_patches(frames, 3)
    assert patches.shape == (2, 3, 6, 9)
    torch.testing.assert_close(patches[0].numpy(), convexformer.image_patches(frames[0].numpy(), 3), rtol=0, atol=0)
    assert torch.equal(frames_from_patches(patches, (6, 9), 3), frames)
    assert torch.equal(frame_patches(frames[0, 0], 3), patches[0, 0])
    assert frame_patches(torch.ones(4, 4, dtype=torch.uint8), 2).dtype == torch.uint8


def test_parts():
    values = draw(0, 50)
    torch.testing.assert_close(soft_threshold(values, 0.3), torch.nn.functional.softshrink(values, 0.3))
    tokens, keys = draw(1, 2, TOKENS, D), draw(2, 2, TOKENS, 3)
    expected = torch.nn.functional.scaled_dot_product_attention(keys, keys, tokens, scale=1.0)
    torch.testing.assert_close(tied_attention(tokens, keys), expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UnrolledTransformer(0), "n_features must be a positive integer"),
        (lambda: UnrolledTransformer(4, 2.0), "n_layers must be a positive integer"),
        (lambda: UnrolledTransformer(4, shared="no"), "shared must be True or False"),
        (lambda: DUST(4, n_atoms=3), "n_atoms must be at least n_features=4"),
        (lambda: DUST(4, penalty=0), "penalty must be a positive finite number"),
        (lambda: DUST(4, attention_scale=float("inf")), "attention_scale must be a positive finite number"),
        (lambda: DUST(4, penalty=1e-300), "penalty must be a positive finite number in torch.float32, got 1e-300"),
        (lambda: DUST(4, attention_scale=10**39), "attention_scale must be a positive finite number in torch.float32"),
        (lambda: DUST(4, start="one"), "start must be one of"),
        (lambda: DUST(4, dictionary="wavelet"), "dictionary must be one of"),
        (lambda: DUST(4, attention="no"), "attention must be True or False"),
        (lambda: UnrolledTransformer(4)(torch.ones(2, 3, 5)), r"tokens must have shape \(n_samples, n_tokens, 4\)"),
        (lambda: UnrolledTransformer(4)(torch.ones(3, 4)), "tokens must have shape"),
        (lambda: UnrolledTransformer(4)(torch.ones(1, 3, 4).double()), "tokens must be torch.float32"),
        (lambda: UnrolledTransformer(4)(torch.ones(1, 3, 4), max_layers=4), "max_layers must be at most n_layers=3"),
        (lambda: DUST(4)(torch.ones(1, 3, 4), max_layers=0), "max_layers must be a positive integer"),
        (lambda: DUST(4)(torch.ones(1, 3, 4), torch.ones(1, 2)), "attention_mask must have shape"),
        (lambda: frame_patches(torch.ones(4), 2), "frames must have shape"),
        (lambda: frame_patches(torch.ones(4, 6), 4), "patch_size must divide 4 x 6 frames, got 4"),
        (lambda: frame_patches(torch.ones(4, 6), 0), "patch_size must be a positive integer"),
        (lambda: frames_from_patches(torch.ones(4, 4), (4, 6), 2), r"patches must have shape \(..., 6, 4\)"),
        (lambda: frames_from_patches(torch.ones(4, 4), (4,), 2), "shape must be"),
        (lambda: frames_from_patches(torch.ones(4, 4), 4, 2), r"shape must be \(height, width\), got 4"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("value", [1e-30, 1e-3, 50.0, 10**30])
def test_penalties_and_scales_are_the_given_ones(value):
    network = DUST(4, penalty=value, attention_scale=value)
    expected = torch.full((3,), float(value))
    torch.testing.assert_close(network.penalties.detach(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(network.attention_scales.detach(), expected, rtol=1e-5, atol=0)


def test_what_is_no_tensor():
    with pytest.raises(TypeError, match="tokens must be a torch tensor"):
        UnrolledTransformer(4)(np.ones((1, 3, 4)))
    with pytest.raises(TypeError, match="frames must be a torch tensor"):
        frame_patches(np.ones((4, 4)), 2)


@each_network
def test_on_another_device(make, accelerator):
    network, tokens = make(), tokens_of().float()
    expected = network.layer_outputs(tokens, MASK)
    outputs = network.to(accelerator).layer_outputs(tokens.to(accelerator), MASK.to(accelerator))
    assert outputs.device.type == torch.device(accelerator).type
    torch.testing.assert_close(outputs.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_a_dictionary_that_is_not_finite_gives_nan():
    network = DUST(D, LAYERS, n_atoms=9)
    with torch.no_grad():
        network.dictionary[0, 0, 0] = torch.inf
    assert network.layer_outputs(tokens_of().float()).isnan().all()

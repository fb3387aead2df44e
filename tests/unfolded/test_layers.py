"""Layers and transformers: which energies they lower, and under which training."""

import copy
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.nn.utils import parametrize
from unfolded_cases import RHO_IDS, RHOS, SquareRoot, autograd_gradient, draw, random_graph

from convexformer.nn.modules.base import seeded
from convexformer.unfolded import (
    DescentWarning,
    SymmetricEigenvalues,
    UnfoldedLayer,
    UnfoldedTransformer,
)

N, D = 6, 4
ROUNDING = 1e-11


def layer_of(seed, *arguments, d=D, **options):
    with seeded(seed):
        return UnfoldedLayer(d, *arguments, **options).double()


def rise(energy, before, after):
    first, last = energy.value(before), energy.value(after)
    return last - first > ROUNDING * (1 + torch.maximum(first.abs(), last.abs()))


@pytest.mark.parametrize("attention", ["softmax", "jacobi"])
@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("rho", RHOS, ids=RHO_IDS)
def test_joint_mode_is_the_proximal_step_of_autograd(rho, anchored, attention):
    layer, tokens = layer_of(0, "joint", rho=rho, attention=attention), draw(1, 2, N, D)
    anchor = draw(2, 2, N, D) if anchored else None
    smooth = layer.smooth_energy(anchor)
    gradient = autograd_gradient(smooth.value, tokens)
    step = 1 / smooth.lipschitz(tokens)
    expected = (tokens - step[:, None, None] * gradient).clamp_min(0)
    torch.testing.assert_close(layer(tokens, anchor=anchor), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attention", ["softmax", "jacobi"])
@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("graph", [None, random_graph(18, N)], ids=["complete", "graph"])
def test_the_energy_of_a_layer_is_the_written_one(graph, anchored, attention):
    """[U] section 3.3 and equations (15) and (17), from the weights alone."""
    layer = layer_of(19, attention=attention, graph=graph, eigenvalue_limit=None)
    wa, wf = layer.attention_weight.detach(), layer.feedforward_weight.detach()
    tokens, anchor = draw(20, N, D).abs(), draw(21, N, D)
    from_anchor = tokens - anchor if anchored else tokens
    edges = [(u, v) for u in range(N) for v in range(u) if graph is None or graph[u, v]]
    expected = -sum(torch.exp(-((tokens[u] - tokens[v]) @ wa).square().sum() / 2) for u, v in edges)
    expected = expected + torch.trace(tokens @ wf @ tokens.T) / 2 + from_anchor.square().sum() / 2
    if attention == "jacobi":
        expected = expected + (from_anchor @ wa).square().sum() / 2
    found = layer.energy(anchor if anchored else None).value(tokens)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("limit", [0.95, None])
@pytest.mark.parametrize("anchored", [False, True])
def test_aim_mode_is_a_jacobi_step_and_a_gradient_step(anchored, limit):
    options = {"attention": "jacobi", "attention_step": 0.7, "feedforward_step": 0.4, "eigenvalue_limit": limit}
    layer, tokens = layer_of(3, **options), draw(4, 2, N, D)
    anchor = draw(5, 2, N, D) if anchored else None
    mixed = layer.attention(tokens, projected=tokens @ layer.attention_weight, anchor=anchor)
    feedforward = layer.smooth_energy(anchor).terms[1]
    expected = (mixed - 0.4 * autograd_gradient(feedforward.value, mixed)).clamp_min(0)
    torch.testing.assert_close(layer(tokens, anchor=anchor), expected, rtol=1e-10, atol=1e-10)


def test_both_steps_one_are_the_printed_layer():
    """[U] equation (20)."""
    layer, tokens = layer_of(6), draw(7, N, D)
    keys = tokens @ layer.attention_weight
    attention = torch.softmax(keys @ keys.T - keys.square().sum(-1) / 2, -1)
    torch.testing.assert_close(layer(tokens), torch.relu(attention @ tokens @ -layer.feedforward_weight))


def test_joint_mode_never_rises_in_ten_thousand_configurations():
    """Random sizes, scales, functions, graphs, anchors, masks and weights; eight samples each."""
    count = 0
    for seed in range(1250):
        generator = torch.Generator().manual_seed(seed)

        def among(*values, generator=generator):
            return values[int(torch.randint(len(values), (), generator=generator))]

        n, d = among(*range(2, 12)), among(*range(1, 8))
        scale = 10 ** (2.5 * torch.rand((), generator=generator).item() - 1.5)
        layer = layer_of(
            seed,
            "joint",
            d=d,
            rho=among(*RHOS),
            attention=among("softmax", "jacobi"),
            eigenvalue_limit=among(0.5, 0.95, None),
            graph=among(None, random_graph(seed, n)),
        )
        with torch.no_grad():
            layer.attention_weight.mul_(among(0.3, 1.0, 3.0))
            mask = among(None, (torch.arange(n) < torch.randint(1, n + 1, (8, 1), generator=generator)).long())
            present = 1.0 if mask is None else mask[..., None].double()
            tokens = draw(seed, 8, n, d, scale=scale).abs() * present
            anchor = among(None, draw(seed + 1, 8, n, d, scale=scale) * present)
            energy = layer.energy(anchor, mask)
            after = layer(tokens, anchor=anchor, attention_mask=mask)
            assert not rise(energy, tokens, after).any()
        count += len(tokens)
    assert count == 10_000


def train_steps(network, seed, n_steps=25):
    """Steps of SGD to a target that no energy knows."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.3)
    tokens, goal = draw(seed, 8, N, D).abs(), draw(seed + 1, 8, D)
    for _ in range(n_steps):
        optimizer.zero_grad()
        (network(tokens).mean(1) - goal).square().mean().backward()
        optimizer.step()
        yield tokens


@pytest.mark.parametrize("shared", [True, False])
def test_joint_mode_never_rises_in_training(shared):
    network = UnfoldedTransformer(D, 4, "joint", shared=shared, anchored=True, seed=0).double()
    before = copy.deepcopy(network.state_dict())
    for tokens in train_steps(network, 8):
        with torch.no_grad():
            energies = network(tokens, return_energies=True).energies
        assert (energies[:, 1] <= energies[:, 0] + ROUNDING * (1 + energies[:, 0].abs())).all()
        for layer in network.layers:
            eigenvalues = torch.linalg.eigvalsh(layer.feedforward_weight.detach())
            assert eigenvalues.abs().max() <= 0.95 * (1 + 1e-12)
            assert layer.guarantee().holds
    assert any(not torch.equal(before[name], value) for name, value in network.state_dict().items())


def test_a_longer_step_rises():
    """The test of descent can fail: twice the proximal step and a bit more raises some energy."""

    class Longer(UnfoldedLayer):
        def _step(self, tokens, anchor, present):
            return tokens + 2.5 * (super()._step(tokens, anchor, present) - tokens)

    with seeded(0):
        layer = Longer(D, "joint").double()
    energy = layer.energy()
    tokens = draw(0, 500, N, D, scale=0.1).abs()
    assert rise(energy, tokens, layer(tokens)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_joint_mode_stays_finite_where_the_energy_is_concave(dtype):
    """Without interactions nor a convex part the bound of the curvature from above would be zero."""
    layer = layer_of(2, "joint", eigenvalue_limit=None).to(dtype)
    with torch.no_grad():
        layer.feedforward_weight.copy_(-3 * torch.eye(D))
    tokens = draw(0, 4, 1, D).abs().to(dtype)
    for _ in range(3):
        after = layer(tokens)
        assert torch.isfinite(after).all()
        assert (layer.energy().value(after) <= layer.energy().value(tokens)).all()
        tokens = after


@pytest.mark.parametrize("mode", ["aim", "joint"])
def test_what_padding_holds_does_not_matter(mode):
    network, mask = UnfoldedTransformer(D, 3, mode, anchored=True).double(), torch.tensor([[1] * 4 + [0] * 2])
    tokens = draw(3, 1, N, D)
    spoiled = tokens.clone()
    spoiled[0, 4:] = torch.nan
    torch.testing.assert_close(network(spoiled, mask), network(tokens, mask))
    torch.testing.assert_close(
        network.layers[0](spoiled, attention_mask=mask), network.layers[0](tokens, attention_mask=mask)
    )


def test_aim_mode_rises_somewhere_when_anchored():
    """No theorem covers the printed layer, and on anchored data it does rise."""
    network = UnfoldedTransformer(D, 12, "aim", anchored=True, seed=1).double()
    energies = network(draw(9, 200, N, D).abs(), return_energies=True).energies
    assert (energies[:, 1] > energies[:, 0] + 1e-6).any()
    assert not network.layers[0].guarantee().holds
    assert "Corollary 4.5" in network.layers[0].guarantee().reason


def test_energies_and_states_are_those_of_the_layers():
    network = UnfoldedTransformer(D, 3, "joint", shared=False, anchored=True).double()
    tokens = draw(10, 2, N, D)
    output = network(tokens, return_energies=True, return_states=True)
    assert torch.equal(output.tokens, network(tokens))
    assert torch.equal(output.states[0], tokens)
    assert torch.equal(output.states[-1], output.tokens)
    for i, layer in enumerate(network.layers):
        torch.testing.assert_close(layer(output.states[i], anchor=tokens), output.states[i + 1])
        torch.testing.assert_close(output.energies[i, 0], layer.energy(tokens).value(output.states[i]))
        torch.testing.assert_close(output.energies[i, 1], layer.energy(tokens).value(output.states[i + 1]))
    assert torch.isinf(output.energies[0, 0]).all()  # the ReLU forbids the negative entries of the input


def test_padding_changes_nothing():
    for mode in ("aim", "joint"):
        network = UnfoldedTransformer(D, 3, mode, anchored=True).double()
        tokens = draw(11, 2, N, D)
        mask = torch.tensor([[1] * N, [1] * 4 + [0] * 2])
        output = network(tokens, mask, return_energies=True)
        alone = network(tokens[1:, :4], return_energies=True)
        torch.testing.assert_close(output.tokens[1, :4], alone.tokens[0])
        torch.testing.assert_close(output.energies[:, :, 1], alone.energies[:, :, 0])
        assert not output.tokens[1, 4:].any()


def test_more_layers_need_shared_weights():
    tokens = draw(12, 2, N, D)
    shared = UnfoldedTransformer(D, 2, "joint").double()
    torch.testing.assert_close(shared(shared(tokens)), shared(tokens, n_layers=4))
    own = UnfoldedTransformer(D, 2, shared=False).double()
    torch.testing.assert_close(own(tokens, n_layers=1), own.layers[0](tokens))
    with pytest.raises(ValueError, match="n_layers must be at most 2"):
        own(tokens, n_layers=3)


@pytest.mark.parametrize("mode", ["aim", "joint"])
@pytest.mark.parametrize("attention", ["softmax", "jacobi"])
def test_gradients_are_those_of_finite_differences(mode, attention):
    layer = layer_of(13, mode, attention=attention, rho="log1")
    names = [name for name, _ in layer.named_parameters()]
    tokens = draw(14, 1, 3, D).abs() + 0.5

    def outputs(tokens, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (tokens,), {"anchor": tokens})

    parameters = [value.detach().clone().requires_grad_() for value in layer.parameters()]
    assert torch.autograd.gradcheck(outputs, (tokens.requires_grad_(), *parameters), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_precision_is_kept(dtype):
    network = UnfoldedTransformer(D, 2, "joint").to(dtype)
    assert network(draw(15, 2, N, D).to(dtype)).dtype == dtype
    with pytest.raises(ValueError, match="tokens must be"):
        network(draw(15, 2, N, D).to(torch.float16))


def test_the_same_seed_gives_the_same_network_and_leaves_torch_alone():
    state = torch.random.get_rng_state()
    first, second = (UnfoldedTransformer(D, 2, seed=3).state_dict() for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("limit", [0.5, 0.95])
def test_the_parametrisation_is_the_nearest_symmetric_matrix_within_the_limit(limit):
    project = SymmetricEigenvalues(limit)
    for seed in range(20):
        weight = draw(seed, D, D)
        clipped = project(weight)
        torch.testing.assert_close(clipped, clipped.T)
        assert torch.linalg.matrix_norm(clipped, 2) <= limit * (1 + 1e-12)
        torch.testing.assert_close(project(clipped), clipped)
        other = project(draw(100 + seed, D, D))
        assert (weight - clipped).norm() <= (weight - other).norm()


def test_the_gradient_of_the_parametrisation_stays_finite_at_equal_eigenvalues():
    weight = torch.eye(D, dtype=torch.float64).mul(0.5).requires_grad_()
    (SymmetricEigenvalues(0.95)(weight) * draw(0, D, D)).sum().backward()
    torch.testing.assert_close(weight.grad, (draw(0, D, D) + draw(0, D, D).T) / 2)
    random = draw(1, D, D).requires_grad_()
    assert torch.autograd.gradcheck(SymmetricEigenvalues(0.6), (random,))


def test_a_free_weight_is_warned_of_or_told_by_the_guarantee():
    with pytest.warns(DescentWarning, match="bounded below"):
        UnfoldedLayer(D, eigenvalue_limit=1.5)
    free = layer_of(16, "joint", eigenvalue_limit=None)
    assert not parametrize.is_parametrized(free)
    with torch.no_grad():
        free.feedforward_weight.copy_(-2 * torch.eye(D))
    assert "no lower bound" in free.guarantee().reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer_of(17, "joint")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_features": 0}, "n_features must be a positive integer"),
        ({"mode": "exact"}, "mode must be one of"),
        ({"attention": "causal"}, "mode must be one of"),
        ({"feedforward_step": 0.0}, "feedforward_step must be a positive"),
        ({"attention_step": -1.0}, "step must be a positive"),
        ({"eigenvalue_limit": 0.0}, "limit must be a positive"),
        ({"n_layers": 0}, "n_layers must be a positive integer"),
        ({"shared": 2}, "shared must be True or False"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        UnfoldedTransformer(**{"n_features": D} | arguments)


def test_bad_tokens():
    with pytest.raises(ValueError, match=r"tokens must have shape \(\.\.\., n_tokens, 4\)"):
        UnfoldedTransformer(D)(torch.zeros(2, 3, 5))


@pytest.mark.parametrize("mode", ["aim", "joint"])
def test_a_graph_of_torch_takes_tokens_and_a_mask(mode):
    network, tokens = UnfoldedTransformer(D, 2, mode, anchored=True), torch.rand(2, 5, D)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    program = torch.export.export(network, (tokens, torch.ones_like(mask))).module()
    torch.testing.assert_close(program(tokens, mask), network(tokens, mask))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch, as it compiles
def test_a_compiled_network_runs_again():
    network, tokens = UnfoldedTransformer(D, 2), torch.rand(2, N, D)
    compiled, wanted = torch.compile(network, backend="eager", fullgraph=True), network(tokens)
    with ThreadPoolExecutor(1) as pool:  # a thread that has run no network
        for _ in range(2):
            torch.testing.assert_close(pool.submit(compiled, tokens).result(), wanted)


@pytest.mark.parametrize("options", [{"rho": SquareRoot()}, {"graph": random_graph(0, N)}], ids=["rho", "graph"])
def test_functions_and_graphs_are_checked_once_and_not_in_every_run(options):
    network, tokens = UnfoldedTransformer(D, 2, "joint", **options), torch.rand(2, N, D)
    program, wanted = torch.export.export(network, (tokens,)).module(), network(tokens)
    torch.testing.assert_close(program(tokens), wanted)
    with torch.inference_mode():
        torch.testing.assert_close(network(tokens), wanted)


@pytest.mark.parametrize("mode", ["aim", "joint"])
def test_tokens_and_anchors_of_other_shapes_are_named(mode):
    layer, tokens = UnfoldedLayer(4, mode), torch.rand(2, 5, 4)
    with pytest.raises(ValueError, match=r"tokens must have shape \(\.\.\., n_tokens, 4\), got \(2, 5, 3\)"):
        layer(torch.rand(2, 5, 3))
    for shape in ((2, 6, 4), (2, 5, 3)):
        with pytest.raises(ValueError, match=r"anchor must have shape \(\.\.\., 5, 4\), got"):
            layer(tokens, anchor=torch.rand(shape))
    with pytest.raises(ValueError, match=r"anchor must have shape \(\.\.\., n_tokens, 4\), got \(2, 5, 3\)"):
        layer.energy(torch.rand(2, 5, 3))
    with pytest.raises(TypeError, match="anchor must be a torch tensor, got ndarray"):
        layer(tokens, anchor=np.zeros((2, 5, 4)))


@pytest.mark.parametrize("frozen", ["all", "attention", "none"])
def test_copies_train_what_the_layer_trains(frozen):
    layer = UnfoldedLayer(3)
    layer.requires_grad_(frozen == "none")
    if frozen == "attention":
        layer.requires_grad_(True).attention_weight.requires_grad_(False)
    wanted = {name: parameter.requires_grad for name, parameter in layer.named_parameters()}
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert {name: parameter.requires_grad for name, parameter in other.named_parameters()} == wanted


def test_limited_layers_have_jacobians_of_their_tokens_and_weights():
    layer, tokens = UnfoldedLayer(2, "aim", eigenvalue_limit=0.1).double(), draw(0, 3, 2)
    names, weights = zip(*layer.named_parameters(), strict=True)

    def output(tokens, *weights):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (tokens,))

    places = tuple(range(1 + len(names)))
    found = torch.func.jacrev(output, places)(tokens, *weights)
    for one, wanted in zip(found, torch.autograd.functional.jacobian(output, (tokens, *weights)), strict=True):
        torch.testing.assert_close(one, wanted)
    batch = draw(1, 4, 3, 2)
    torch.testing.assert_close(torch.func.vmap(layer)(batch), layer(batch))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "file"]
)
@pytest.mark.parametrize("limit", [0.95, None])
def test_copies_are_as_the_layer_is_now(copied, limit):
    layer = layer_of(0, eigenvalue_limit=limit, graph=random_graph(0, N))
    layer.feedforward_step, layer.attention.step = 0.3, 0.5
    if limit is not None:
        parametrize.remove_parametrizations(layer, "feedforward_weight")
    tokens, drawn_from = draw(1, 2, N, D), torch.random.get_rng_state()
    assert torch.equal(copied(layer)(tokens), layer(tokens))
    assert torch.equal(torch.random.get_rng_state(), drawn_from)
    assert copied(layer.to("meta")).attention.graph.device.type == "meta"


def test_copies_of_a_free_layer_keep_its_hooks():
    layer, calls = UnfoldedLayer(D, eigenvalue_limit=None), []
    layer.register_forward_hook(lambda *arguments: calls.append(arguments))
    copy.deepcopy(layer)(torch.rand(N, D))
    assert len(calls) == 1


def test_a_network_trained_while_another_thread_runs_one_has_its_weights_of_now():
    running, trained = (UnfoldedTransformer(D, 2, seed=seed).double() for seed in range(2))
    tokens, outputs = draw(0, N, D), []

    def train():
        for _ in range(2):
            with torch.no_grad():
                outputs.append((trained(tokens), copy.deepcopy(trained)(tokens)))
                trained.layers[0].parametrizations.feedforward_weight.original.mul_(0.5)

    def meanwhile(module, arguments):
        other = threading.Thread(target=train)
        other.start()
        other.join()

    running.layers[0].register_forward_pre_hook(meanwhile)
    running(tokens)
    for output, of_a_copy in outputs:
        torch.testing.assert_close(output, of_a_copy)
    assert not torch.equal(outputs[0][0], outputs[1][0])


def test_projections_of_weights_are_computed_once_a_run_and_anew_for_the_next(monkeypatch):
    network = UnfoldedTransformer(D, 4, shared=True, seed=0).double()
    tokens = draw(0, N, D)
    eigh, calls = torch.linalg.eigh, []
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: calls.append(matrix) or eigh(matrix))
    before = network(tokens, return_energies=True).tokens
    assert len(calls) == 1
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(0.5)
    after = network(tokens)
    assert len(calls) == 2
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, copy.deepcopy(network)(tokens))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["aim", "joint"])
@pytest.mark.parametrize("limit", [0.5, None])
def test_layers_in_half_precision_are_those_in_float32_up_to_rounding(dtype, mode, limit):
    half = UnfoldedTransformer(4, 2, mode, anchored=True, eigenvalue_limit=limit).to(dtype)
    single = copy.deepcopy(half).float()
    tokens = torch.rand((5, 6, 4), generator=torch.Generator().manual_seed(0)).to(dtype)
    found, wanted = half(tokens, return_energies=True), single(tokens.float(), return_energies=True)
    rounding = 50 * torch.finfo(dtype).eps
    for part, other in ((found.tokens, wanted.tokens), (found.energies, wanted.energies)):
        assert part.dtype == dtype
        torch.testing.assert_close(part.float(), other, rtol=rounding, atol=rounding)
    half(tokens).square().sum().backward()
    single(tokens.float()).square().sum().backward()
    for part, other in zip(half.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(
            part.grad.float(), other.grad, rtol=rounding, atol=rounding * float(other.grad.abs().max())
        )

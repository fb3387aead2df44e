"""Reports of descent, and networks with a readout."""

import copy
import pickle

import numpy as np
import pytest
import torch
from unfolded_cases import draw

from convexformer import optimality_gap, pad_sequences
from convexformer.nn import train
from convexformer.unfolded import UnfoldedNetwork, UnfoldedTransformer, descent_report, padding_mask

N, D = 6, 4


def test_the_report_finds_the_rises_of_the_printed_layer_and_none_of_the_joint_one():
    tokens = draw(9, 200, N, D).abs()
    printed = descent_report(UnfoldedTransformer(D, 12, "aim", anchored=True, seed=1), tokens)
    assert printed.share > 0
    assert printed.rose[printed.first_rise].any()
    assert not printed.rose[: printed.first_rise].any()
    assert not printed.guaranteed
    joint = descent_report(UnfoldedTransformer(D, 12, "joint", anchored=True, seed=1), tokens)
    assert joint.share == 0
    assert joint.first_rise is None
    assert joint.guaranteed
    assert "no sample of 200 rises in any of 12 layers; theory promises descent" in str(joint)


def test_the_report_is_in_float64_and_changes_nothing():
    model = UnfoldedTransformer(D, 3, "joint", anchored=True)
    before = copy.deepcopy(model.state_dict())
    tokens = draw(1, 5, N, D).float()
    report = descent_report(model, tokens, torch.ones(5, N), batch_size=np.int64(2))
    exact = copy.deepcopy(model).double()(tokens.double(), return_energies=True).energies
    np.testing.assert_allclose(report.energies, exact.detach().numpy(), rtol=1e-12)
    assert report.energies.shape == (3, 2, 5)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    np.testing.assert_array_equal(report.course[1:], report.energies[:, 1])


def test_layers_of_their_own_weights_have_energies_of_their_own():
    report = descent_report(UnfoldedTransformer(D, 3, "joint", shared=False), draw(2, 5, N, D))
    assert not np.allclose(report.energies[1:, 0], report.energies[:-1, 1])
    shared = descent_report(UnfoldedTransformer(D, 3, "joint"), draw(2, 5, N, D), n_layers=7)
    np.testing.assert_allclose(shared.energies[1:, 0], shared.energies[:-1, 1])
    assert len(shared.energies) == 7


def test_states_beyond_all_numbers_count_as_rises():
    model = UnfoldedTransformer(D, 400, "aim", eigenvalue_limit=None)
    with torch.no_grad():
        model.layers[0].feedforward_weight.copy_(-1e3 * torch.eye(D))
    report = descent_report(model, draw(0, 2, N, D).abs())
    assert not np.isfinite(report.energies[-1]).all()
    assert report.rose[-1].all()


def test_parts_of_a_network_draw_different_weights():
    network = UnfoldedNetwork(N, D, 2, pooling="tokens", n_heads=8)
    first, second = network.transformer.layers[0].attention_weight, network.readout.w1_free
    count = min(first.numel(), second.numel())
    both = torch.stack([first.flatten()[:count], second.flatten()[:count]]).detach()
    assert torch.corrcoef(both)[0, 1].abs() < 0.9


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": torch.nn.Linear(2, 2)}, TypeError, "model must be an UnfoldedTransformer"),
        ({"tokens": draw(0, N, D)}, ValueError, "tokens must have shape"),
        ({"tokens": draw(0, 2, N, D).numpy()}, TypeError, "tokens must be a torch tensor, got ndarray"),
        (
            {"tokens": torch.zeros(0, N, D)},
            ValueError,
            r"tokens must have shape .* at least one of each, got \(0, 6, 4\)",
        ),
        (
            {"tokens": torch.zeros(2, 0, D)},
            ValueError,
            r"tokens must have shape .* at least one of each, got \(2, 0, 4\)",
        ),
        ({"tokens": torch.full((2, N, D), torch.nan)}, ValueError, "tokens must be finite"),
        ({"rtol": -1.0}, ValueError, "rtol must be"),
        ({"batch_size": 0}, ValueError, "batch_size must be"),
    ],
)
def test_bad_arguments(change, error, message):
    with pytest.raises(error, match=message):
        descent_report(**{"model": UnfoldedTransformer(D), "tokens": draw(0, 2, N, D)} | change)


def test_padding_may_hold_anything():
    tokens, mask = draw(0, 2, N, D), torch.ones(2, N)
    mask[0, 4:] = 0
    marked = tokens.masked_fill(mask[..., None] == 0, torch.nan)
    model = UnfoldedTransformer(D, 3, "joint", anchored=True)
    np.testing.assert_array_equal(
        descent_report(model, marked, mask).energies, descent_report(model, tokens, mask).energies
    )


def test_padding_is_found_after_the_last_nonzero_token():
    tokens = torch.as_tensor(pad_sequences([np.ones((3, 2)), np.ones((1, 2)), np.zeros((2, 2))]))
    assert padding_mask(tokens).tolist() == [[True] * 3, [True, False, False], [True, False, False]]
    with pytest.raises(ValueError, match=r"tokens must have shape \(n_samples, n_tokens, n_features\), got \(3, 2\)"):
        padding_mask(tokens[0])


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("mode", ["aim", "joint"])
def test_padding_changes_no_prediction(mode, width):
    network = UnfoldedNetwork(N, D, 2, width=width, n_layers=3, mode=mode, anchored=True).double()
    short = draw(3, 1, 4, D)
    padded = torch.cat([short, torch.zeros(1, 2, D)], 1).double()
    alone = UnfoldedNetwork(4, D, 2, width=width, n_layers=3, mode=mode, anchored=True).double()
    alone.load_state_dict(network.state_dict())
    torch.testing.assert_close(network(padded), alone(short))


@pytest.mark.parametrize("pooling", ["mean", "tokens"])
def test_the_readout_is_bounded_by_its_certified_optimum_and_attains_it(pooling):
    """With the layers fixed, the readout is a network of the convex program on the tokens of the last layer."""
    network = UnfoldedNetwork(N, D, 1, pooling=pooling, n_layers=2, mode="joint", anchored=True)
    X = draw(4, 40, N, D).float()
    y = X[:, :, :1].mean(1) + X[:, 0, 1:2].abs()
    history = train(network, X, y, alpha=0.01, n_steps=60)
    result = optimality_gap(network.readout, network.features(X), y, alpha=0.01, tol=1e-6)
    assert result.objective == pytest.approx(history.final_objective, rel=1e-4)
    assert result.bound <= result.objective
    network.readout = result.refit.to_torch()
    refit = network.objective(X, y, alpha=0.01).item()
    assert refit == pytest.approx(result.certificate.primal, rel=1e-4)
    assert refit <= result.objective * (1 + 1e-6)


@pytest.mark.parametrize("options", [{}, {"shared": False, "mode": "joint", "eigenvalue_limit": None}])
def test_networks_are_copied_and_pickled(options):
    network = UnfoldedNetwork(N, D, 2, n_layers=2, **options).double().eval()
    tokens = draw(5, 3, N, D)
    for copied in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert torch.equal(copied(tokens), network(tokens))
        assert not copied.training
        copied(tokens).sum().backward()
        with torch.no_grad():
            next(copied.parameters()).add_(1)
        assert not torch.equal(copied(tokens), network(tokens))


def test_unknown_pooling():
    with pytest.raises(ValueError, match="pooling must be one of"):
        UnfoldedNetwork(N, D, pooling="max")

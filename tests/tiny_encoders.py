"""Tiny random encoders on disk, with a tokenizer of few words, and sentences of these words."""

import json

import numpy as np
import torch
import transformers

WORDS = ("the", "attention", "of", "a", "network", "is", "convex", "##ity", "token", "##s", "and", "proof", ".")
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)
WIDTH, N_HEADS = 16, 2
SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": N_HEADS,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}


def random_sentences(n_sentences, n_words=(4, 9), seed=0):
    """Sentences of whole words of the vocabulary; with [CLS] and [SEP] one of n words has n + 2 tokens."""
    rng = np.random.default_rng(seed)
    words = [word for word in WORDS if word.isalpha()]
    return [" ".join(rng.choice(words, size=rng.integers(*n_words))) for _ in range(n_sentences)]


def save_random(model, folder):
    """Save a model with weights large enough for attention far from uniform, and a tokenizer beside it."""
    save_random_weights(model, folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 40}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def save_random_vision(model, folder, **processor):
    """Save a model likewise, and the settings of an image processor beside it."""
    save_random_weights(model, folder)
    settings = {"do_normalize": True, "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.4]} | processor
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def save_random_weights(model, folder):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.5 * noise if parameter.ndim == 2 else parameter + 0.2 * noise)
    model.save_pretrained(folder)


def save_language_model(kind, folder, **options):
    """Save a tiny random causal language model; the kind is "GPT2" or that of a model built as Llama is.

    Its tokenizer is that of the encoders, but without a token for filling up, as those of language models are.
    """
    sizes = SIZES | {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, f"{kind}Config")(**sizes | options)
    save_random(transformers.AutoModelForCausalLM.from_config(config), folder)
    backend = transformers.BertTokenizerFast(str(folder / "vocab.txt")).backend_tokenizer
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", model_max_length=40)
    tokenizer.save_pretrained(folder)
    (folder / "vocab.txt").unlink()
    return folder


def assert_close(given, wanted, tolerance=1e-5):
    """Assert equality up to rounding in single precision, which is relative to the largest number."""
    np.testing.assert_allclose(given, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())

"""Tiny random encoders on disk, with a tokenizer of few words, and sentences of these words."""

import json

import numpy as np
import torch

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
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.5 * noise if parameter.ndim == 2 else parameter + 0.2 * noise)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 40}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder

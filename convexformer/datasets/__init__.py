"""Data sets as token arrays; only models and texts asked for by name at a hub are ever downloaded."""

from ._activations import Activations, load_attention_activations
from ._digits import load_digit_tokens
from ._embeddings import Embeddings, load_embeddings
from ._modular import ModularArithmetic, make_modular_arithmetic
from ._patches import PatchActivations, load_patch_activations
from ._residuals import ResidualActivations, load_residual_activations
from ._sentences import load_documentation_sentences
from ._video import load_video_frames
from ._word_vectors import WordVectors, load_word_vectors, make_word_vectors

__all__ = [
    "Activations",
    "Embeddings",
    "ModularArithmetic",
    "PatchActivations",
    "ResidualActivations",
    "WordVectors",
    "load_attention_activations",
    "load_digit_tokens",
    "load_documentation_sentences",
    "load_embeddings",
    "load_patch_activations",
    "load_residual_activations",
    "load_video_frames",
    "load_word_vectors",
    "make_modular_arithmetic",
    "make_word_vectors",
]

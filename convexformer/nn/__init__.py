"""Torch modules: the non-convex networks, those that the convex programs solve and their rivals, and their training."""

from .base import AttentionNetwork, sample_losses
from .convex_attention import ConvexAttention, network_from_heads
from .cost import ModelCost, model_cost
from .deep import DeepConvexTransformer
from .embedding import EmbeddedNetwork, SymbolNetwork, TokenEmbedding
from .history import TrainingHistory, TrainingInterrupted
from .mlp import EmbeddingMLP
from .relu_attention import ReluAttention
from .sequence_attention import SequenceAttention, sequence_network_from_heads
from .simplex import Simplex, project_to_simplex
from .softmax_attention import SoftmaxAttention
from .training import train
from .transformer import SoftmaxTransformer

__all__ = [
    "AttentionNetwork",
    "ConvexAttention",
    "DeepConvexTransformer",
    "EmbeddedNetwork",
    "EmbeddingMLP",
    "ModelCost",
    "ReluAttention",
    "SequenceAttention",
    "Simplex",
    "SoftmaxAttention",
    "SoftmaxTransformer",
    "SymbolNetwork",
    "TokenEmbedding",
    "TrainingHistory",
    "TrainingInterrupted",
    "model_cost",
    "network_from_heads",
    "project_to_simplex",
    "sample_losses",
    "sequence_network_from_heads",
    "train",
]

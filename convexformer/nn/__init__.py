"""Torch modules of the networks that the convex programs solve, other networks to compare with, and their training."""

from .cost import ModelCost, model_cost
from .modules.attentive_probe import AttentiveProbe
from .modules.base import AttentionNetwork, sample_losses
from .modules.convex_attention import ConvexAttention, network_from_heads
from .modules.deep import DeepConvexTransformer
from .modules.embedding import EmbeddedNetwork, SymbolNetwork, TokenEmbedding
from .modules.mlp import EmbeddingMLP
from .modules.probe import ProbeNetwork, TokenPooler
from .modules.relu_attention import ReluAttention
from .modules.sequence_attention import SequenceAttention, sequence_network_from_heads
from .modules.simplex import Simplex, project_to_simplex
from .modules.softmax_attention import SoftmaxAttention
from .modules.token_weights import (
    TOKEN_WEIGHTS,
    GateWeights,
    JoinedWeights,
    MaxWeights,
    MeanWeights,
    PositionWeights,
    PrototypeWeights,
    QueryWeights,
    TokenWeights,
)
from .modules.transformer import SoftmaxTransformer
from .training.history import TrainingHistory, TrainingInterrupted
from .training.train import train

__all__ = [
    "TOKEN_WEIGHTS",
    "AttentionNetwork",
    "AttentiveProbe",
    "ConvexAttention",
    "DeepConvexTransformer",
    "EmbeddedNetwork",
    "EmbeddingMLP",
    "GateWeights",
    "JoinedWeights",
    "MaxWeights",
    "MeanWeights",
    "ModelCost",
    "PositionWeights",
    "ProbeNetwork",
    "PrototypeWeights",
    "QueryWeights",
    "ReluAttention",
    "SequenceAttention",
    "Simplex",
    "SoftmaxAttention",
    "SoftmaxTransformer",
    "SymbolNetwork",
    "TokenEmbedding",
    "TokenPooler",
    "TokenWeights",
    "TrainingHistory",
    "TrainingInterrupted",
    "model_cost",
    "network_from_heads",
    "project_to_simplex",
    "sample_losses",
    "sequence_network_from_heads",
    "train",
]

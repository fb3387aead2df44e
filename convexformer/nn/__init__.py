"""Torch modules: the non-convex networks, those that the convex programs solve and their rivals, and their training."""

from .base import AttentionNetwork, sample_losses
from .convex_attention import ConvexAttention, network_from_heads
from .cost import ModelCost, model_cost
from .history import TrainingHistory
from .sequence_attention import SequenceAttention, sequence_network_from_heads
from .simplex import Simplex, project_to_simplex
from .softmax_attention import SoftmaxAttention
from .training import train

__all__ = [
    "AttentionNetwork",
    "ConvexAttention",
    "ModelCost",
    "SequenceAttention",
    "Simplex",
    "SoftmaxAttention",
    "TrainingHistory",
    "model_cost",
    "network_from_heads",
    "project_to_simplex",
    "sample_losses",
    "sequence_network_from_heads",
    "train",
]

"""Estimators with the interface of scikit-learn: fit, path, cross-validation, saving and loading."""

from .attention import ConvexAttentionClassifier, ConvexAttentionRegressor
from .constrained import DescentConstrainedClassifier, DescentConstrainedDenoiser
from .cv import ConvexAttentionClassifierCV, ConvexAttentionRegressorCV
from .greedy import GreedyConvexTransformerClassifier, GreedyConvexTransformerRegressor
from .persistence import load_model, save_model
from .probe import (
    ConvexProbeClassifier,
    ConvexProbeClassifierCV,
    ConvexProbeRegressor,
    ConvexProbeRegressorCV,
)
from .sequence import ConvexSequenceRegressor
from .unfolded import UnfoldedTransformerClassifier, UnfoldedTransformerRegressor

__all__ = [
    "ConvexAttentionClassifier",
    "ConvexAttentionClassifierCV",
    "ConvexAttentionRegressor",
    "ConvexAttentionRegressorCV",
    "ConvexProbeClassifier",
    "ConvexProbeClassifierCV",
    "ConvexProbeRegressor",
    "ConvexProbeRegressorCV",
    "ConvexSequenceRegressor",
    "DescentConstrainedClassifier",
    "DescentConstrainedDenoiser",
    "GreedyConvexTransformerClassifier",
    "GreedyConvexTransformerRegressor",
    "UnfoldedTransformerClassifier",
    "UnfoldedTransformerRegressor",
    "load_model",
    "save_model",
]

"""Certified probes: content-dependent pooling of tokens, trained to a certified global optimum."""

from .cv import ConvexProbeClassifierCV, ConvexProbeRegressorCV
from .one_alpha import ConvexProbeClassifier, ConvexProbeRegressor

__all__ = ["ConvexProbeClassifier", "ConvexProbeClassifierCV", "ConvexProbeRegressor", "ConvexProbeRegressorCV"]

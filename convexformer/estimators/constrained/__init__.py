"""Descent-constrained transformers as estimators: a classifier that may leave early, and a denoiser."""

from .classifier import DescentConstrainedClassifier
from .denoiser import DescentConstrainedDenoiser

__all__ = ["DescentConstrainedClassifier", "DescentConstrainedDenoiser"]

"""Algorithms for data of which passes are what counts."""

from .batched import BatchConfig, Batched
from .metric_gradient import MetricConfig, MetricGradient

__all__ = ["BatchConfig", "Batched", "MetricConfig", "MetricGradient"]

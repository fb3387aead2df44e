"""Algorithms for data of which passes are what counts."""

from .batched import BatchConfig, Batched
from .gram_metrics import GramMetrics
from .low_rank_metrics import LowRankMetrics
from .metric import Metrics
from .metric_gradient import MetricConfig, MetricGradient

__all__ = ["BatchConfig", "Batched", "GramMetrics", "LowRankMetrics", "MetricConfig", "MetricGradient", "Metrics"]

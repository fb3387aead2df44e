"""Certified probes of frozen encoders: generated weightings, explanations, and the re-fit of trained probes."""

from .explanation import Explanation
from .generate import Generation, GenerationReport, WeightingRound
from .refit import ProbeRefit, refit_probe

__all__ = ["Explanation", "Generation", "GenerationReport", "ProbeRefit", "WeightingRound", "refit_probe"]

"""Transformers as unfolded energy minimisation ([U]): energies, the attention that descends them, layers."""

from importlib import import_module
from typing import Any

from .attention import DescentWarning, EnergyAttention
from .descent import DescentReport, descent_report
from .energies import (
    CenteringEnergy,
    Energy,
    FeedForwardEnergy,
    InteractionEnergy,
    NonNegative,
    ScalingEnergy,
    SquaredDistance,
    SumOfEnergies,
    TransformedEnergy,
)
from .layers import Guarantee, UnfoldedLayer, UnfoldedOutput, UnfoldedTransformer
from .networks import UnfoldedNetwork, padding_mask
from .parametrizations import SymmetricEigenvalues
from .rho import Exponential, Logarithm, Rho, get_rho

__all__ = [
    "CenteringEnergy",
    "DescentReport",
    "DescentWarning",
    "Energy",
    "EnergyAttention",
    "Exponential",
    "FeedForwardEnergy",
    "Guarantee",
    "InteractionEnergy",
    "Logarithm",
    "NonNegative",
    "Rho",
    "ScalingEnergy",
    "SquaredDistance",
    "SumOfEnergies",
    "SymmetricEigenvalues",
    "TransformedEnergy",
    "UnfoldedLayer",
    "UnfoldedNetwork",
    "UnfoldedOutput",
    "UnfoldedTransformer",
    "descent_report",
    "get_rho",
    "padding_mask",
]

_ESTIMATORS = ("UnfoldedTransformerClassifier", "UnfoldedTransformerRegressor")


def __getattr__(name: str) -> Any:  # the estimators are built on this package
    if name in _ESTIMATORS:
        return getattr(import_module("convexformer.estimators"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

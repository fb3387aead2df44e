"""Transformers as unfolded energy minimisation ([U]): energies, the attention that descends them, layers."""

from .attention import DescentWarning, EnergyAttention
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
from .parametrizations import SymmetricEigenvalues
from .rho import Exponential, Logarithm, Rho, get_rho

__all__ = [
    "CenteringEnergy",
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
    "UnfoldedOutput",
    "UnfoldedTransformer",
    "get_rho",
]

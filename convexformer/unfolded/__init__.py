"""Transformers as unfolded energy minimisation ([U]): energies, the attention that descends them, layers."""

from .aim import DescentCondition, aim_step, descent_condition, descent_constant, gradient_ratio
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
from .regions import DescentRegion, clipping_index, descent_region
from .rho import Exponential, Logarithm, Rho, get_rho
from .unrolled import DUST, UnrolledTransformer, frame_patches, frames_from_patches

__all__ = [
    "DUST",
    "CenteringEnergy",
    "DescentCondition",
    "DescentRegion",
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
    "UnrolledTransformer",
    "aim_step",
    "clipping_index",
    "descent_condition",
    "descent_constant",
    "descent_region",
    "descent_report",
    "frame_patches",
    "frames_from_patches",
    "get_rho",
    "gradient_ratio",
    "padding_mask",
]

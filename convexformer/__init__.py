"""Attention networks trained to a proven global optimum.

The public names load on first use, so that ``import convexformer`` is immediate.

Examples
--------
>>> import convexformer
>>> convexformer.ConvexAttentionRegressor(alpha=0.1)
ConvexAttentionRegressor(alpha=0.1)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .estimators import ConvexAttentionClassifier as ConvexAttentionClassifier
    from .estimators import ConvexAttentionClassifierCV as ConvexAttentionClassifierCV
    from .estimators import ConvexAttentionRegressor as ConvexAttentionRegressor
    from .estimators import ConvexAttentionRegressorCV as ConvexAttentionRegressorCV
    from .estimators import ConvexProbeClassifier as ConvexProbeClassifier
    from .estimators import ConvexProbeClassifierCV as ConvexProbeClassifierCV
    from .estimators import ConvexProbeRegressor as ConvexProbeRegressor
    from .estimators import ConvexProbeRegressorCV as ConvexProbeRegressorCV
    from .estimators import ConvexSequenceRegressor as ConvexSequenceRegressor
    from .estimators import DescentConstrainedClassifier as DescentConstrainedClassifier
    from .estimators import DescentConstrainedDenoiser as DescentConstrainedDenoiser
    from .estimators import GreedyConvexTransformerClassifier as GreedyConvexTransformerClassifier
    from .estimators import GreedyConvexTransformerRegressor as GreedyConvexTransformerRegressor
    from .estimators import UnfoldedTransformerClassifier as UnfoldedTransformerClassifier
    from .estimators import UnfoldedTransformerRegressor as UnfoldedTransformerRegressor
    from .estimators import load_model as load_model
    from .estimators import save_model as save_model
    from .gates import DifferenceGates as DifferenceGates
    from .gates import FourierGates as FourierGates
    from .gates import Gates as Gates
    from .gates import GaussianGates as GaussianGates
    from .gates import GeneratedGates as GeneratedGates
    from .gates import GivenGates as GivenGates
    from .gates import NetworkGates as NetworkGates
    from .gates import SparseGates as SparseGates
    from .heads import Heads as Heads
    from .heads import OptimalityGap as OptimalityGap
    from .heads import SequenceHeads as SequenceHeads
    from .heads import optimality_gap as optimality_gap
    from .nn import ConvexAttention as ConvexAttention
    from .nn import DeepConvexTransformer as DeepConvexTransformer
    from .nn import ReluAttention as ReluAttention
    from .nn import SequenceAttention as SequenceAttention
    from .nn import SoftmaxAttention as SoftmaxAttention
    from .nn import SoftmaxTransformer as SoftmaxTransformer
    from .preprocessing import image_patches as image_patches
    from .preprocessing import pad_sequences as pad_sequences
    from .programs import attention_program as attention_program
    from .programs import sequence_program as sequence_program

__version__ = "0.1.0"

_HOME = {
    "ConvexAttention": "nn",
    "ConvexAttentionClassifier": "estimators",
    "ConvexAttentionClassifierCV": "estimators",
    "ConvexAttentionRegressor": "estimators",
    "ConvexAttentionRegressorCV": "estimators",
    "ConvexProbeClassifier": "estimators",
    "ConvexProbeClassifierCV": "estimators",
    "ConvexProbeRegressor": "estimators",
    "ConvexProbeRegressorCV": "estimators",
    "ConvexSequenceRegressor": "estimators",
    "DeepConvexTransformer": "nn",
    "DescentConstrainedClassifier": "estimators",
    "DescentConstrainedDenoiser": "estimators",
    "DifferenceGates": "gates",
    "FourierGates": "gates",
    "Gates": "gates",
    "GaussianGates": "gates",
    "GeneratedGates": "gates",
    "GivenGates": "gates",
    "GreedyConvexTransformerClassifier": "estimators",
    "GreedyConvexTransformerRegressor": "estimators",
    "Heads": "heads",
    "NetworkGates": "gates",
    "OptimalityGap": "heads",
    "ReluAttention": "nn",
    "SequenceAttention": "nn",
    "SequenceHeads": "heads",
    "SoftmaxAttention": "nn",
    "SoftmaxTransformer": "nn",
    "SparseGates": "gates",
    "UnfoldedTransformerClassifier": "estimators",
    "UnfoldedTransformerRegressor": "estimators",
    "attention_program": "programs",
    "image_patches": "preprocessing",
    "load_model": "estimators",
    "optimality_gap": "heads",
    "pad_sequences": "preprocessing",
    "save_model": "estimators",
    "sequence_program": "programs",
}
_SUBMODULES = (
    "constrained",
    "datasets",
    "embedded",
    "estimators",
    "experiments",
    "gates",
    "heads",
    "nn",
    "plot",
    "preprocessing",
    "probes",
    "programs",
    "solvers",
    "storage",
    "targets",
    "text",
    "unfolded",
    # former names
    "deep",
    "features",
    "model_selection",
    "optimality",
    "persistence",
    "reproduce",
    "sequences",
)

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_SUBMODULES])

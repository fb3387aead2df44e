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
    from .deep import GreedyConvexTransformerClassifier as GreedyConvexTransformerClassifier
    from .deep import GreedyConvexTransformerRegressor as GreedyConvexTransformerRegressor
    from .estimators import ConvexAttentionClassifier as ConvexAttentionClassifier
    from .estimators import ConvexAttentionRegressor as ConvexAttentionRegressor
    from .features import image_patches as image_patches
    from .features import pad_sequences as pad_sequences
    from .gates import DifferenceGates as DifferenceGates
    from .gates import FourierGates as FourierGates
    from .gates import Gates as Gates
    from .gates import GaussianGates as GaussianGates
    from .gates import GeneratedGates as GeneratedGates
    from .gates import GivenGates as GivenGates
    from .gates import NetworkGates as NetworkGates
    from .gates import SparseGates as SparseGates
    from .heads import Heads as Heads
    from .model_selection import ConvexAttentionClassifierCV as ConvexAttentionClassifierCV
    from .model_selection import ConvexAttentionRegressorCV as ConvexAttentionRegressorCV
    from .nn import ConvexAttention as ConvexAttention
    from .nn import DeepConvexTransformer as DeepConvexTransformer
    from .nn import ReluAttention as ReluAttention
    from .nn import SequenceAttention as SequenceAttention
    from .nn import SoftmaxAttention as SoftmaxAttention
    from .nn import SoftmaxTransformer as SoftmaxTransformer
    from .optimality import OptimalityGap as OptimalityGap
    from .optimality import optimality_gap as optimality_gap
    from .persistence import load_model as load_model
    from .persistence import save_model as save_model
    from .programs import attention_program as attention_program
    from .sequences import ConvexSequenceRegressor as ConvexSequenceRegressor
    from .sequences import SequenceHeads as SequenceHeads
    from .sequences import sequence_program as sequence_program

__version__ = "0.1.0"

_HOME = {
    "ConvexAttention": "nn",
    "ConvexAttentionClassifier": "estimators",
    "ConvexAttentionClassifierCV": "model_selection",
    "ConvexAttentionRegressor": "estimators",
    "ConvexAttentionRegressorCV": "model_selection",
    "ConvexSequenceRegressor": "sequences",
    "DeepConvexTransformer": "nn",
    "DifferenceGates": "gates",
    "FourierGates": "gates",
    "Gates": "gates",
    "GaussianGates": "gates",
    "GeneratedGates": "gates",
    "GivenGates": "gates",
    "GreedyConvexTransformerClassifier": "deep",
    "GreedyConvexTransformerRegressor": "deep",
    "Heads": "heads",
    "NetworkGates": "gates",
    "OptimalityGap": "optimality",
    "ReluAttention": "nn",
    "SequenceAttention": "nn",
    "SequenceHeads": "sequences",
    "SoftmaxAttention": "nn",
    "SoftmaxTransformer": "nn",
    "SparseGates": "gates",
    "attention_program": "programs",
    "image_patches": "features",
    "load_model": "persistence",
    "optimality_gap": "optimality",
    "pad_sequences": "features",
    "save_model": "persistence",
    "sequence_program": "sequences",
}
_SUBMODULES = (
    "datasets",
    "deep",
    "embedded",
    "estimators",
    "features",
    "gates",
    "heads",
    "model_selection",
    "nn",
    "optimality",
    "persistence",
    "plot",
    "programs",
    "reproduce",
    "sequences",
    "solvers",
    "targets",
    "text",
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

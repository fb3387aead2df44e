"""Numbers of parameters and arithmetic operations of convex and non-convex forms (paper [C], Table 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from convexformer.validation import check_one_of
from convexformer_solvers.validation import check_counts

from .modules.softmax_attention import Position, check_position


@dataclass(frozen=True)
class ModelCost:
    """What a model costs.

    Attributes
    ----------
    parameters : int
        Trainable numbers, bias included.
    flops : int
        Floating point operations of a prediction for one sample: those of its matrix products, a multiplication and
        an addition counting two. Gates included, softmax and bias not.

    Examples
    --------
    >>> heads = model_cost("convex_attention", n_tokens=16, n_features=4, n_outputs=10, n_heads=2)
    >>> program = model_cost("convex_program", n_tokens=16, n_features=4, n_outputs=10)
    >>> heads.parameters, heads.flops, heads.parameters < program.parameters
    (70, 296, True)
    """

    parameters: int
    flops: int


def model_cost(
    model: str,
    *,
    n_tokens: int,
    n_features: int,
    n_outputs: int = 1,
    n_heads: int | None = None,
    head_width: int | None = None,
    n_gates: int | None = None,
    n_targets: int | None = None,
    n_layers: int | None = None,
    position: Position = None,
    bias: bool = True,
) -> ModelCost:
    r"""Trainable parameters of a model and operations of its prediction, from its sizes alone.

    With ``n`` tokens of width ``d``, ``c`` outputs, ``h`` gates, ``T`` target positions, ``m`` heads of width ``w`` and
    ``L`` layers:

    =============================  ===========================  =======================================================
    model                          parameters, without bias     what it is
    =============================  ===========================  =======================================================
    ``"softmax_attention"``        ``m w (3 d + c)``            ``SoftmaxAttention``
    ``"convex_attention"``         ``m (n + d + c)``            ``ConvexAttention``, gated where ``n_gates`` is given
    ``"relu_attention"``           ``m (n + d + c)``            ``ReluAttention``
    ``"deep_convex_transformer"``  ``(L - 1) m (n n + 2 d)``    ``DeepConvexTransformer``
                                   ``+ m (n + d + c)``
    ``"sequence_attention"``       ``m (T n + d + c)``          ``SequenceAttention``
    ``"convex_program"``           ``n d c`` or ``h n d c``     scalar (``c = 1``), vector and gated convex programs
    ``"sequence_program"``         ``2 d c T n``                exact program of sequence targets: matrices ``C``
    ``"row_program"``              ``T n d c``                  program of heads that each serve one target position
    =============================  ===========================  =======================================================

    Parameters
    ----------
    model : str
        One of the table.
    n_tokens, n_features, n_outputs : int
        Shape of the data; outputs per target position for sequences, 1 by default.
    n_heads : int, optional
        Heads of the non-convex models, which need it.
    head_width : int, optional
        Width of the heads of ``"softmax_attention"``, which needs it.
    n_gates : int, optional
        Gates of ``"convex_attention"``, ``"convex_program"`` and each layer of ``"deep_convex_transformer"``, which
        needs them. Default: none. Gates are fixed, so they are no parameters, but evaluating them takes ``2 h n d``
        operations.
    n_targets : int, optional
        Target positions of the sequence models. Default: ``n_tokens``.
    n_layers : int, optional
        Layers of ``"deep_convex_transformer"``, which needs it.
    position : int, "mean" or None, default=None
        As in ``SoftmaxAttention``: what is predicted and so what is computed.
    bias : bool, default=True
        Whether there is a bias: per output, and for sequence models per target position and output.

    Returns
    -------
    ModelCost

    Raises
    ------
    ValueError
        If the model is unknown, lacks a size that it needs or is given one that it does not have.

    Examples
    --------
    >>> model_cost("convex_program", n_tokens=16, n_features=4, n_outputs=10)
    ModelCost(parameters=650, flops=1280)
    >>> model_cost("softmax_attention", n_tokens=16, n_features=4, n_outputs=10, n_heads=2, head_width=2, position=0)
    ModelCost(parameters=98, flops=688)
    """
    check_one_of(sorted(_MODELS), model=model)
    count, needed, allowed = _MODELS[model]
    optional = {
        "n_heads": n_heads,
        "head_width": head_width,
        "n_gates": n_gates,
        "n_targets": n_targets,
        "n_layers": n_layers,
    }
    given = {name: size for name, size in optional.items() if size is not None}
    check_counts(n_tokens=n_tokens, n_features=n_features, n_outputs=n_outputs, **given)
    check_position(position)
    if position is not None:
        given["position"] = position  # type: ignore[assignment]
    if missing := needed - given.keys():
        raise ValueError(f"model {model!r} needs {min(missing)}")
    if unknown := given.keys() - needed - allowed:
        raise ValueError(f"model {model!r} has no {min(unknown)}, leave it out")
    cost, n_biases = count(n_tokens, n_features, n_outputs, **given)
    return ModelCost(cost.parameters + n_biases * bias, cost.flops)


def _softmax_attention(
    n: int, d: int, c: int, *, n_heads: int, head_width: int, position: Position = None
) -> tuple[ModelCost, int]:
    width = n_heads * head_width
    # A single row is computed through the features of the tokens, without their keys or values.
    n_queries = n if position in (None, "mean") else 1
    n_rows = n if position is None else 1
    through_features, through_tokens = d * width + n_heads * n * d, n * d * width + n * n * width
    scores = n_queries * d * width + (through_features if n_queries == 1 else through_tokens)
    mixing = through_features if n_rows == 1 else through_tokens
    products = scores + mixing + n_rows * width * c
    return ModelCost(width * (3 * d + c), 2 * products), c


def _gates(n: int, d: int, n_gates: int | None) -> int:
    """Multiply-adds of the gates."""
    return (n_gates or 0) * n * d


def _convex_attention(n: int, d: int, c: int, *, n_heads: int, n_gates: int | None = None) -> tuple[ModelCost, int]:
    products = n_heads * (n * d + c) + _gates(n, d, n_gates)
    return ModelCost(n_heads * (n + d + c), 2 * products), c


def _deep_convex_transformer(
    n: int, d: int, c: int, *, n_heads: int, n_gates: int, n_layers: int
) -> tuple[ModelCost, int]:
    last, n_biases = _convex_attention(n, d, c, n_heads=n_heads, n_gates=n_gates)
    block, _ = _sequence_attention(n, d, d, n_heads=n_heads)
    flops = last.flops + (n_layers - 1) * (block.flops + 2 * _gates(n, d, n_gates))
    return ModelCost(last.parameters + (n_layers - 1) * block.parameters, flops), n_biases


def _convex_program(n: int, d: int, c: int, *, n_gates: int | None = None) -> tuple[ModelCost, int]:
    parameters = (n_gates or 1) * n * d * c
    return ModelCost(parameters, 2 * (parameters + _gates(n, d, n_gates))), c


def _sequence_attention(n: int, d: int, c: int, *, n_heads: int, n_targets: int | None = None) -> tuple[ModelCost, int]:
    n_targets = n_targets or n
    products = n_heads * (n * d + n_targets * n + n_targets * c)
    return ModelCost(n_heads * (n_targets * n + d + c), 2 * products), n_targets * c


def _sequence_program(n: int, d: int, c: int, *, n_targets: int | None = None) -> tuple[ModelCost, int]:
    # Both signs of a matrix are trained; a prediction needs their difference alone.
    n_targets = n_targets or n
    return ModelCost(2 * d * c * n_targets * n, 2 * d * c * n_targets * n), n_targets * c


def _row_program(n: int, d: int, c: int, *, n_targets: int | None = None) -> tuple[ModelCost, int]:
    n_targets = n_targets or n
    return ModelCost(n_targets * n * d * c, 2 * n_targets * n * d * c), n_targets * c


# What counts, the sizes it needs besides those of the data, and those it may be given.
_MODELS: dict[str, tuple[Callable[..., tuple[ModelCost, int]], set[str], set[str]]] = {
    "softmax_attention": (_softmax_attention, {"n_heads", "head_width"}, {"position"}),
    "convex_attention": (_convex_attention, {"n_heads"}, {"n_gates"}),
    "relu_attention": (_convex_attention, {"n_heads"}, set()),
    "deep_convex_transformer": (_deep_convex_transformer, {"n_heads", "n_gates", "n_layers"}, set()),
    "sequence_attention": (_sequence_attention, {"n_heads"}, {"n_targets"}),
    "convex_program": (_convex_program, set(), {"n_gates"}),
    "sequence_program": (_sequence_program, set(), {"n_targets"}),
    "row_program": (_row_program, set(), {"n_targets"}),
}

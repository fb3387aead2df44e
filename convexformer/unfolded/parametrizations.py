"""Parametrisations of weights under which a layer keeps its guarantee while it is trained."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from convexformer.validation import check_positive


class _Computed(threading.local):
    """The projections that a thread knows within ``computed_once``, by weight and limit."""

    def __init__(self) -> None:  # an attribute of the class would hide from torch.compile that it changes
        self.known: dict[tuple[int, float], tuple[Tensor, Tensor]] | None = None


_COMPUTED = _Computed()


@contextmanager
def computed_once() -> Iterator[None]:
    """Within it the projection of a weight is computed once.

    ``torch.nn.utils.parametrize.cached`` does so for all threads together, which then get one another's weights.
    """
    before, _COMPUTED.known = _COMPUTED.known, {}
    try:
        yield
    finally:
        _COMPUTED.known = before


def decomposable(matrix: Tensor) -> Tensor:
    """A matrix in a precision in which torch finds eigenvalues: at least float32."""
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32))


class SymmetricEigenvalues(nn.Module):
    r"""Projection of a square matrix to the symmetric matrices with eigenvalues in :math:`[-l, l]`.

    Used with ``torch.nn.utils.parametrize``: the layer sees :math:`U \min(\max(\Lambda, -l), l) U^\top`, where
    :math:`U \Lambda U^\top = (W + W^\top)/2` and ``W`` is what is trained. With ``l < 1`` the energy of the
    feed-forward part is strongly convex whatever the optimiser does.

    Parameters
    ----------
    limit : float, default=0.95
        ``l``, positive; the default is that of the experiments of [U].

    Raises
    ------
    ValueError
        If `limit` is not positive and finite.

    Notes
    -----
    Gradients are those of the spectral function by divided differences (Daleckii and Krein), which stay finite where
    eigenvalues are equal. The second derivative is not given. Weights in half precision are projected in float32 and
    rounded, which may leave eigenvalues beyond the limit by the rounding.

    Examples
    --------
    >>> limited = SymmetricEigenvalues(0.5)(torch.tensor([[0.0, 4.0], [0.0, 0.0]]))
    >>> torch.allclose(limited, torch.tensor([[0.0, 0.5], [0.5, 0.0]]), atol=1e-6)
    True
    """

    def __init__(self, limit: float = 0.95) -> None:
        super().__init__()
        check_positive(limit=limit)
        self.limit = limit

    def extra_repr(self) -> str:
        """The limit, as ``repr`` of the module shows it."""
        return f"limit={self.limit}"

    def forward(self, weight: Tensor) -> Tensor:
        """The projection of a matrix of shape ``(d, d)``."""
        known = {} if _COMPUTED.known is None else _COMPUTED.known
        key = (id(weight), self.limit)
        if key not in known:  # the weight is kept, too, so that no other takes its id meanwhile
            known[key] = (weight, _ClippedEigenvalues.apply((weight + weight.mT) / 2, self.limit)[0])
        return known[key][1]

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What stands for a given matrix: the matrix itself, which ``forward`` projects."""
        return weight


class _ClippedEigenvalues(torch.autograd.Function):
    """Symmetric matrix with its eigenvalues clipped, and what the derivative is made of."""

    generate_vmap_rule = True

    @staticmethod
    def forward(symmetric: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(decomposable(symmetric))
        clipped = values.clamp(-limit, limit)
        return ((vectors * clipped) @ vectors.mT).to(symmetric), values, clipped, vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, ...]) -> None:
        ctx.limit, parts = inputs[1], output[1:]
        ctx.mark_non_differentiable(*parts)
        ctx.save_for_backward(*parts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None]:
        values, clipped, vectors = ctx.saved_tensors
        distance = values[:, None] - values
        inside = (values.abs() < ctx.limit).to(values)
        slopes = (clipped[:, None] - clipped) / torch.where(distance == 0, 1, distance)
        slopes = torch.where(distance == 0, inside[:, None], slopes)
        found = vectors @ (slopes * (vectors.mT @ grad.to(vectors) @ vectors)) @ vectors.mT
        return found.to(grad), None

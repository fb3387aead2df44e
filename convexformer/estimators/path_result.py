"""What ``path`` of an estimator returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convexformer.gates import Gates
from convexformer.heads.attention import Heads
from convexformer.validation import is_integer
from convexformer_solvers import Penalty


def norms_of_tokens(coef: Tensor, penalty: Penalty, gates: Gates | None) -> Tensor:
    """Penalty that each token, or weighting, carries, of coefficients with all their axes."""
    groups = penalty.group_values_in_any_units(coef)
    # Tokens are the first axis, or the second behind that of the gates.
    by_token = groups if gates is None else groups.sum(0)
    return by_token.reshape(by_token.shape[0], -1).sum(1)


@dataclass(frozen=True, eq=False)
class PathResult:
    """Certified solutions along a grid of ``alpha``; unpacks as ``alphas, coefs, gaps``.

    Attributes
    ----------
    alphas : ndarray of shape (n_alphas,)
        The grid, decreasing.
    coefs : ndarray of shape (n_alphas, *coef_.shape)
        Coefficients.
    gaps : ndarray of shape (n_alphas,)
        Certified relative gaps.
    intercepts : ndarray of shape (n_alphas,) or (n_alphas, n_outputs)
        Biases.
    gates : Gates or None
        Gates of all points.
    pool : callable or None
        Of a probe: pooled tokens of samples, as ``pool`` of a fit, which its networks take.
    token_norms : ndarray of shape (n_alphas, n_tokens)
        Penalty, without ``alpha``, that each token carries, as ``token_norms_`` of a fit.
    weighting_norms : ndarray of shape (n_alphas, n_weightings)
        Of a probe, in place of ``token_norms``.

    See Also
    --------
    convexformer.plot.plot_path : Draws the norms against ``alpha``.

    Examples
    --------
    >>> from convexformer import ConvexAttentionRegressor
    >>> X = np.random.default_rng(0).normal(size=(50, 6, 3))
    >>> path = ConvexAttentionRegressor().path(X, X[:, 2, 0], n_alphas=4)
    >>> path
    PathResult(4 alphas from 0.732 to 0.00732, coefs of shape (4, 6, 3), gaps at most ...)
    >>> path.heads(3)
    Heads(1 heads, 6 tokens, 3 features, 1 outputs)
    >>> path.token_norms.shape, np.flatnonzero(path.token_norms[1])  # the tokens that the second network uses
    ((4, 6), array([2]))
    >>> np.allclose(path.heads(3).predict(X)[:, 0], (X * path.coefs[3]).sum((1, 2)) + path.intercepts[3])
    True
    """

    alphas: NDArray[np.float64]
    coefs: NDArray[np.floating]
    gaps: NDArray[np.float64]
    intercepts: NDArray[np.floating]
    gates: Gates | None = None
    pool: Callable[[Any], Any] | None = None
    _program: dict[str, Any] = field(default_factory=dict)
    _coef_shape: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[NDArray]:
        yield from (self.alphas, self.coefs, self.gaps)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, position: int | slice) -> Any:
        return tuple(self)[position]

    def __repr__(self) -> str:
        if len(self.alphas) == 0:
            return "PathResult(no alphas)"
        return (
            f"PathResult({len(self.alphas)} alphas from {self.alphas[0]:.3g} to {self.alphas[-1]:.3g}, "
            f"coefs of shape {self.coefs.shape}, gaps at most {self.gaps.max():.1e})"
        )

    @property
    def token_norms(self) -> NDArray[np.floating]:
        """Penalty that each token carries at each alpha."""
        if self.pool is not None:
            raise AttributeError("the path of a probe has weighting_norms and no token_norms")
        return self._norms()

    @property
    def weighting_norms(self) -> NDArray[np.floating]:
        """Penalty that each weighting of a probe carries at each alpha."""
        if self.pool is None:
            raise AttributeError("only the path of a probe has weighting_norms; this one has token_norms")
        return self._norms()

    def _norms(self) -> NDArray[np.floating]:
        coefs = torch.from_numpy(self.coefs).reshape(-1, *self._coef_shape)
        norms = [norms_of_tokens(coef, self._program["penalty"], self.gates).numpy() for coef in coefs]
        return np.stack(norms) if norms else np.empty((0, self._coef_shape[-3]))

    def heads(self, position: int) -> Heads:
        """The network at one alpha, as ``heads_`` of a fit: ``predict`` gives its outputs, scores for a classifier.

        That of a probe takes pooled tokens: ``path.heads(position).predict(path.pool(X))``.

        Parameters
        ----------
        position : int
            Of the alpha in ``alphas``; negative ones count from the end.

        Returns
        -------
        Heads

        Raises
        ------
        IndexError
            If there is no such alpha.
        """
        if not is_integer(position) or not -len(self.alphas) <= position < len(self.alphas):
            raise IndexError(f"position must be that of one of the {len(self.alphas)} alphas, got {position!r}")
        coef, bias = self.coefs[position].reshape(self._coef_shape), np.reshape(self.intercepts[position], -1)
        return Heads.from_coef(coef, bias, alpha=self.alphas[position], gates=self.gates, **self._program)

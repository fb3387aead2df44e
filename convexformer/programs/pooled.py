"""The linear map of pooled tokens that are computed anew for each product."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from convexformer.nn.modules.probe import TokenPooler
from convexformer.preprocessing.sequences import TokenSequences
from convexformer_solvers import LinearMap
from convexformer_solvers.linear_maps.base import as_rows


class PooledMap(LinearMap):
    r"""Map :math:`Z \mapsto \sum_j T_j(X_i)^\top Z_j` of samples whose pooled tokens :math:`T_j` are not held.

    Each product reads all tokens once, pools a few samples at a time and forgets them. It takes little memory and the
    time of the pooling.

    Parameters
    ----------
    pooler : TokenPooler
        Makes the pooled tokens, of ``h`` weightings.
    samples : TokenSequences
        The samples, of tokens of width ``d``.
    dtype : torch.dtype, optional
        Precision to which pooled tokens are rounded; they are computed in that of the samples. Default: that one.

    Examples
    --------
    >>> from convexformer.nn import MeanWeights
    >>> from convexformer.preprocessing.sequences import PaddedSequences
    >>> A = PooledMap(TokenPooler([MeanWeights()]), PaddedSequences(torch.ones(4, 3, 2)))
    >>> A.matvec(torch.ones(1, 2, 1)).shape, A.n_stored
    (torch.Size([4, 1]), 24)
    """

    n_samples = property(lambda self: len(self._samples))
    feature_shape = property(lambda self: (self._pooler.n_weightings, self._samples.n_features))
    dtype = property(lambda self: self._dtype)
    device = property(lambda self: self._samples.device)

    def __init__(self, pooler: TokenPooler, samples: TokenSequences, dtype: torch.dtype | None = None) -> None:
        self._pooler, self._samples = pooler.to(samples.device), samples
        self._dtype = samples.dtype if dtype is None else dtype

    @property
    def n_stored(self) -> int:
        return int(self._samples.lengths.sum()) * self._samples.n_features

    def chunks(self, blocks: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Pooled tokens ``(B, h, d)`` of a few samples at a time, of all or some weightings."""
        for rows, tokens, mask in self._samples.chunks(self.feature_shape[0]):
            with torch.no_grad():
                tokens, mask = self._pooler.prepared(tokens, mask)
                weights = self._pooler.weights(tokens, mask)
                yield rows, ((weights if blocks is None else weights[:, blocks]) @ tokens).to(self._dtype)

    def matvec(self, coef: Tensor) -> Tensor:
        columns = coef.reshape(-1, coef.shape[-1])
        result = coef.new_empty((self.n_samples, coef.shape[-1]))
        for rows, pooled in self.chunks():
            result[rows] = pooled.flatten(1).to(coef.dtype) @ columns
        return result

    def rmatvec(self, values: Tensor) -> Tensor:
        columns = as_rows(values)
        h, d = self.feature_shape
        result = values.new_zeros((values.shape[1], h * d))
        for rows, pooled in self.chunks():
            result.addmm_(columns[:, rows], pooled.flatten(1).to(values.dtype))
        return as_rows(result).reshape(h, d, -1)

    def matvec_blocks(self, blocks: Tensor, coef: Tensor) -> Tensor:
        result = coef.new_empty((self.n_samples, coef.shape[-1]))
        for rows, pooled in self.chunks(blocks):
            result[rows] = pooled.flatten(1).to(coef.dtype) @ coef.flatten(0, 1)
        return result

    def rmatvec_blocks(self, blocks: Tensor, values: Tensor) -> Tensor:
        result = values.new_zeros((len(blocks), self.feature_shape[1], values.shape[1]))
        for rows, pooled in self.chunks(blocks):
            result += torch.einsum("ibd,ic->bdc", pooled.to(values.dtype), values[rows])
        return result

    def along(self, blocks: Tensor, units: Tensor) -> Tensor:
        result = units.new_empty((len(blocks), self.n_samples))
        distinct, inverse = blocks.unique_consecutive(return_inverse=True)
        for rows, pooled in self.chunks(distinct):
            result[:, rows] = torch.einsum("ibd,bd->bi", pooled.to(units.dtype)[:, inverse], units)
        return result

    def few(self, n_blocks: int) -> bool:
        return n_blocks < self.feature_shape[0]  # pooling is most of the work, and some weightings take less of it

    def columns(self, blocks: Tensor) -> Tensor:
        shape = (self.n_samples, len(blocks), self.feature_shape[1])
        result = torch.empty(shape, dtype=self._dtype, device=self.device)
        for rows, pooled in self.chunks(blocks):
            result[rows] = pooled
        return result

    def largest(self) -> float:
        return max(float(pooled.abs().max()) for _, pooled in self.chunks())

    def rows(self, index: Tensor | slice) -> PooledMap:
        places = torch.arange(self.n_samples, device=self.device)[index]
        return PooledMap(self._pooler, self._samples.rows(places), self._dtype)

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> PooledMap:
        dtype = self._dtype if dtype is None else dtype
        place = self.device if device is None else torch.device(device)
        if dtype == self._dtype and place == self.device:
            return self
        return PooledMap(self._pooler, self._samples.to(place), dtype)

    def product_work(self, n_outputs: int) -> float:
        pooling = 4.0 * float(self._samples.lengths.sum()) * self._samples.n_features * self.feature_shape[0]
        return pooling + 2.0 * n_outputs * self.n_samples * self.feature_shape[0] * self.feature_shape[1]

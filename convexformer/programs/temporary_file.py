"""The linear map of data that are held in a temporary file instead of memory."""

from __future__ import annotations

import shutil
import tempfile

import numpy as np
import torch
from torch import Tensor

from convexformer_solvers import DenseMap
from convexformer_solvers.linear_maps.base import Slopes, row_chunks, tall_chunks


def file_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU whose numbers are in a temporary file, which goes with the tensor.

    The system keeps as much of the file in memory as is free.

    Parameters
    ----------
    shape : tuple of int
        Shape.
    dtype : torch.dtype
        Precision.

    Returns
    -------
    Tensor
        Of zeros.

    Raises
    ------
    ValueError
        If the disk of the folder for temporary files has not as much room.

    Examples
    --------
    >>> file_tensor((2, 3), torch.float32)
    tensor([[0., 0., 0.],
            [0., 0., 0.]])
    """
    size, folder = torch.Size(shape).numel() * dtype.itemsize, tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ValueError(
            f"a temporary file of {size / 1e9:.3g} GB is needed, and {free / 1e9:.3g} GB are free in {folder}; set the "
            "environment variable TMPDIR to a folder on a larger disk, raise memory_limit, or take a smaller dictionary"
        )
    if size == 0:  # of a rank without samples
        return torch.zeros(shape, dtype=dtype)
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    with tempfile.TemporaryFile() as file:  # the map outlives the handle
        return torch.from_numpy(np.memmap(file, kind, "w+", shape=shape))


class StoredMap(DenseMap):
    """``DenseMap`` of data in a file, of which no algorithm makes a copy in memory.

    Parameters
    ----------
    data : Tensor of shape (N, *block_shape, d)
        Made by ``file_tensor``.
    memory_limit : int, optional
        Bytes that algorithms may take for matrices of the features. Default: no limit.

    Examples
    --------
    >>> A = StoredMap(file_tensor((5, 3, 2), torch.float32))
    >>> A.matvec(torch.ones(3, 2, 1)).shape, A.in_memory
    (torch.Size([5, 1]), False)
    """

    in_memory = False

    def __init__(self, data: Tensor, memory_limit: int | None = None) -> None:
        super().__init__(data)
        self.memory_limit = memory_limit

    def slopes_pass(self, coef: Tensor, slopes: Slopes) -> tuple[Tensor, Tensor]:
        pred, back = coef.new_empty((self.n_samples, coef.shape[-1])), None
        # Both products of some samples while these are in memory: the file is read once.
        for rows in tall_chunks(self.n_samples, self._rows.shape[1], self.device):
            pred[rows], product = DenseMap(self.data[rows]).slopes_pass(coef, slopes.rows(rows))
            back = product if back is None else back.add_(product)
        return pred, self.rmatvec(slopes.at(pred)) if back is None else back

    def rows(self, index: Tensor | slice) -> DenseMap:
        if isinstance(index, slice):
            return StoredMap(self.data[index], self.memory_limit)
        chosen = file_tensor((len(index), *self.feature_shape), self.dtype)
        for part in row_chunks(len(index), self._rows.shape[1], self.device):
            torch.index_select(self.data, 0, index[part], out=chosen[part])
        return StoredMap(chosen, self.memory_limit)

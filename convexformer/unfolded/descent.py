"""Report of what the layers of an unfolded transformer do to their energies."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convexformer.validation import check_finite
from convexformer_solvers.validation import check_counts, check_tensor, is_real

from .graphs import check_attention_mask
from .layers import UnfoldedTransformer


@dataclass(frozen=True, eq=False)
class DescentReport:
    """Energies before and after each layer, and where they rose.

    Attributes
    ----------
    energies : ndarray of shape (n_layers, 2, n_samples)
        Before and after each layer, by the energy of that layer, in float64; infinite for tokens with negative entries,
        which only the input of the first layer may have.
    rose : ndarray of bool of shape (n_layers, n_samples)
        Whether the energy of a sample rose in a layer by more than rounding, or was no finite number after it.
    guaranteed : bool
        Whether theory promises that none does.
    reason : str
        The theorem, or the hypothesis that is not met.

    Examples
    --------
    >>> report = DescentReport(np.array([[[2.0, 1.0], [1.0, 3.0]]]), np.array([[False, True]]), False, "no theorem")
    >>> report.share, report.first_rise
    (0.5, 0)
    >>> print(report)
    1 of 2 samples rise in some of 1 layers, first in layer 0; theory does not promise descent: no theorem
    """

    energies: NDArray[np.float64] = field(repr=False)
    rose: NDArray[np.bool_] = field(repr=False)
    guaranteed: bool
    reason: str

    @property
    def share(self) -> float:
        """Share of the samples whose energy rose in any layer."""
        return float(self.rose.any(0).mean())

    @property
    def first_rise(self) -> int | None:
        """The first layer, from 0, in which the energy of any sample rose; None where there is none."""
        layers = np.flatnonzero(self.rose.any(1))
        return int(layers[0]) if len(layers) else None

    @property
    def course(self) -> NDArray[np.float64]:
        """Energies at the input and after each layer, of shape ``(n_layers + 1, n_samples)``.

        One function of the tokens only where the layers share their weights.
        """
        return np.concatenate([self.energies[:1, 0], self.energies[:, 1]])

    def __str__(self) -> str:
        n_layers, n_samples = self.rose.shape
        found = (
            f"no sample of {n_samples} rises in any of {n_layers} layers"
            if self.first_rise is None
            else f"{int(self.rose.any(0).sum())} of {n_samples} samples rise in some of {n_layers} layers, first in "
            f"layer {self.first_rise}"
        )
        return f"{found}; theory {'promises' if self.guaranteed else 'does not promise'} descent: {self.reason}"


@torch.no_grad()
def descent_report(
    model: UnfoldedTransformer,
    tokens: Tensor,
    attention_mask: Tensor | None = None,
    *,
    n_layers: int | None = None,
    rtol: float = 1e-10,
    batch_size: int = 256,
) -> DescentReport:
    """Measure in float64 where the layers of an unfolded transformer raise their energies.

    Parameters
    ----------
    model : UnfoldedTransformer
        The network, which is not changed.
    tokens : Tensor of shape (n_samples, n_tokens, n_features)
        The samples.
    attention_mask : Tensor of shape (n_samples, n_tokens), optional
        1 for tokens, 0 for padding. Default: no padding.
    n_layers : int, optional
        Layers to run, as in ``UnfoldedTransformer.forward``.
    rtol : float, default=1e-10
        A rise counts if it is larger than this times the larger of the two energies: far above rounding in float64,
        far below any rise that a plot would show.
    batch_size : int, default=256
        Samples at once.

    Returns
    -------
    DescentReport

    Raises
    ------
    TypeError
        If the model is no ``UnfoldedTransformer``.
    ValueError
        If an argument is not as described, or a token outside the padding holds NaN or an infinite number.

    Examples
    --------
    >>> report = descent_report(UnfoldedTransformer(4, 3, "joint", anchored=True), torch.rand(5, 6, 4))
    >>> report.first_rise is None, report.guaranteed
    (True, True)
    """
    if not isinstance(model, UnfoldedTransformer):
        raise TypeError(f"model must be an UnfoldedTransformer, got {type(model).__name__}")
    check_tensor("tokens", tokens)
    if tokens.ndim != 3 or 0 in tokens.shape:
        raise ValueError(
            "tokens must have shape (n_samples, n_tokens, n_features) with at least one of each, got "
            f"{tuple(tokens.shape)}"
        )
    if not (is_real(rtol) and 0 <= rtol < float("inf")):
        raise ValueError(f"rtol must be a number from 0, got {rtol!r}")
    check_counts(batch_size=batch_size)
    batch_size = int(batch_size)
    present = check_attention_mask(attention_mask, tuple(tokens.shape))
    check_finite("tokens", tokens if present is None else tokens[present.to(tokens.device)])
    exact = copy.deepcopy(model).double()
    masks = [None] * len(tokens) if present is None else present.split(batch_size)
    parts = [
        exact(part.double(), mask, n_layers=n_layers, return_energies=True).energies.cpu()
        for part, mask in zip(tokens.split(batch_size), masks, strict=False)
    ]
    energies = torch.cat(parts, 2).numpy()
    size = np.maximum(np.abs(energies[:, 0]), np.abs(energies[:, 1]))
    with np.errstate(invalid="ignore"):  # infinite before the first layer, which is no rise
        rose = energies[:, 1] - energies[:, 0] > rtol * size
    rose |= ~np.isfinite(energies[:, 1])  # of states that left the range of numbers
    guarantees = [layer.guarantee() for layer in exact.running_layers(n_layers)]
    weakest = next((guarantee for guarantee in guarantees if not guarantee.holds), guarantees[0])
    return DescentReport(energies, rose, weakest.holds, weakest.reason)

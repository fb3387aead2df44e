"""Unrolled layers with one linear readout for all of them."""

from __future__ import annotations

from torch import Tensor, nn

from convexformer.nn.modules.base import draw_seed, seeded_parts
from convexformer.unfolded.networks import padding_mask
from convexformer.unfolded.unrolled import UnrolledTransformer
from convexformer_solvers.validation import check_counts


class LayeredClassifier(nn.Module):
    r"""Layers of an unrolled transformer, each read by the same linear map of the mean over tokens.

    .. math:: f_l(X) = b + \tfrac1n \sum_u y_{l,u}^\top V, \qquad l = 1, \dots, L

    so that every layer makes a prediction, and a sample may leave after any of them.

    Parameters
    ----------
    n_features, n_outputs : int
        Width of the tokens, and outputs.
    n_layers : int, default=3
        Layers.
    shared : bool, default=False
        Whether all layers have the same weights.
    padded : bool, default=True
        Whether zero rows after the last nonzero token of a sample are padding, which the mean leaves out.
    seed : int, default=0
        Of the initial weights.

    Examples
    --------
    >>> import torch
    >>> network = LayeredClassifier(4, 2, n_layers=3)
    >>> network.layer_outputs(torch.rand(5, 6, 4)).shape, network(torch.rand(5, 6, 4), max_layers=1).shape
    (torch.Size([3, 5, 2]), torch.Size([5, 2]))
    """

    def __init__(
        self,
        n_features: int,
        n_outputs: int,
        n_layers: int = 3,
        *,
        shared: bool = False,
        padded: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_counts(n_outputs=n_outputs)
        self.padded = padded
        with seeded_parts(self, seed):
            self.layers = UnrolledTransformer(n_features, n_layers, shared=shared, seed=draw_seed())
            self.readout = nn.Linear(n_features, n_outputs)

    def layer_outputs(
        self, tokens: Tensor, attention_mask: Tensor | None = None, *, max_layers: int | None = None
    ) -> Tensor:
        """Predictions of every layer.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples.
        attention_mask : Tensor of shape (N, n), optional
            1 for tokens, 0 for padding. Default: as ``padding_mask`` finds; to be given where noise hides it.
        max_layers : int, optional
            Layers to run. Default: all.

        Returns
        -------
        Tensor of shape (n_layers, N, n_outputs)
        """
        if attention_mask is None and self.padded:
            attention_mask = padding_mask(tokens)
        outputs = self.layers.layer_outputs(tokens, attention_mask, max_layers=max_layers)
        count = tokens.shape[1] if attention_mask is None else attention_mask.sum(1)[:, None]
        return self.readout(outputs.sum(2) / count)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None, *, max_layers: int | None = None) -> Tensor:
        """Predictions of the last layer; arguments as of ``layer_outputs``."""
        return self.layer_outputs(tokens, attention_mask, max_layers=max_layers)[-1]

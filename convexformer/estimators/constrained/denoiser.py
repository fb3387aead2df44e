"""A descent-constrained transformer that removes noise from tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import TransformerMixin
from torch import Tensor, nn

from convexformer.estimators.samples import across_ranks
from convexformer.estimators.tokens import unchanged_on_failure
from convexformer.nn.modules.base import draw_seed, seeded
from convexformer.unfolded.unrolled import DUST, UnrolledTransformer
from convexformer.validation import Result, check_one_of, check_positive, result_of

from .base import DescentConstrainedBase

_MODELS: dict[str, Any] = {"ut": UnrolledTransformer, "dust": DUST}


@dataclass(eq=False, repr=False, kw_only=True)
class DescentConstrainedDenoiser(TransformerMixin, DescentConstrainedBase):
    r"""Denoising of tokens by an unrolled network each of whose layers must lower the error ([K]).

    The loss of a layer is half the mean squared error of its tokens against the clean ones, over samples that get new
    Gaussian noise in every step.

    Parameters
    ----------
    alpha
        As in ``DescentConstrainedClassifier``.
    c_ref : float, optional
        Loss that the first layer must come below. Default: that of the noisy tokens themselves, half the variance of
        the noise.
    noise : float, default=0.1
        Standard deviation of the noise in training, in the units of ``X``, positive.
    model : {"ut", "dust"}, default="ut"
        ``UnrolledTransformer``, for tokens without negative entries such as pixels, or ``DUST``, sparse coding in a
        dictionary.
    n_layers, shared, objective, resilience, dual_lr, stop_gradient, lr, weight_decay, batch_size, n_epochs
        As in ``DescentConstrainedClassifier``.
    validation_fraction, dtype, device, random_state, verbose
        As in ``DescentConstrainedClassifier``; as there are no classes, any samples may be held out.

    Attributes
    ----------
    network_ : UnrolledTransformer or DUST
        The network, frozen.
    duals_, feasible_, layer_losses_, report_, history_, n_iter_, n_features_in_, n_tokens_in_
        As in ``DescentConstrainedClassifier``.

    Examples
    --------
    >>> import numpy as np
    >>> from convexformer import DescentConstrainedDenoiser
    >>> clean = np.random.default_rng(0).uniform(size=(60, 1, 4)).repeat(6, axis=1)
    >>> noisy = clean + 0.2 * np.random.default_rng(1).normal(size=clean.shape)
    >>> model = DescentConstrainedDenoiser(alpha=0.02, noise=0.2, model="dust", n_epochs=40, random_state=1).fit(clean)
    >>> bool(np.square(model.transform(noisy) - clean).mean() < np.square(noisy - clean).mean())
    True
    """

    noise: float = 0.1
    model: str = "ut"

    @unchanged_on_failure
    @across_ranks
    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Train on clean tokens.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens), path or source
            Clean tokens; each column of two-dimensional data is a token of width 1. Zero rows are tokens like others:
            nothing is padding. What ``open_source`` takes, as the path of a file or a folder of shards, is read into
            memory. Under ``torchrun`` each rank gives its own samples, or all give one path, of which each reads its
            part.
        y : object, optional
            Not used.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            If an argument or a parameter is not as described; the message names it.
        ConstrainedTrainingInterrupted
            On Ctrl-C, a ``KeyboardInterrupt``. The estimator is usable if an epoch was finished.

        Warns
        -----
        InfeasibleWarning
            If the constraints do not hold at the end.
        """
        check_one_of(sorted(_MODELS), model=self.model)
        check_positive(noise=self.noise)
        samples = self._training_samples(X)
        seed, noise = self._seed(), self.noise
        sizes = {"n_features": samples.n_features, "n_layers": self.n_layers}
        self._options = {"model": self.model, **sizes, "shared": self.shared}
        network = self._make_network(seed).to(samples.device, samples.dtype)
        samples = samples.of(network)

        def layer_losses(network: Any, batch: tuple[Tensor]) -> Tensor:
            (index,) = batch
            options = {"noise": noise, "n_samples": len(index), "seed": draw_seed()}
            return samples.outputs(_noisy_losses, network, index, **options).T

        c_ref = noise**2 / 2 if self.c_ref is None else self.c_ref
        positions = torch.arange(len(samples), device=samples.device)
        self._train(network, layer_losses, [positions], np.zeros(len(samples)), c_ref, seed)
        return self

    def _make_network(self, seed: int = 0) -> nn.Module:
        options = dict(self._options)
        return _MODELS[options.pop("model")](**options, seed=seed)

    def transform(self, X: ArrayLike, max_layers: int | None = None) -> Result:
        """Denoise tokens.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens), path or source
            Noisy tokens, in all forms that ``fit`` takes.
        max_layers : int, optional
            Layers to run. Default: all.

        Returns
        -------
        ndarray of the shape of ``X``
        """
        tokens = self._new_tokens(X)
        with torch.no_grad():
            clean = self.network_(tokens, max_layers=self._check_max_layers(max_layers))
        return result_of(clean[..., 0] if self._n_dims == 2 else clean, X)


def _noisy_losses(network: Any, clean: Tensor, rows: Any, *, noise: float, n_samples: int, seed: int) -> Tensor:
    """Losses of every layer, shape ``(N, n_layers)``, of samples that are some rows of a batch."""
    with seeded(seed):  # the noise of the whole batch, so that a sample gets the same on any number of ranks
        drawn = torch.randn((n_samples, *clean.shape[1:]), dtype=clean.dtype, device="cpu")[rows].to(clean.device)
    return (network.layer_outputs(clean + noise * drawn) - clean).square().mean((2, 3)).T / 2

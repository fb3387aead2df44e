"""What the experiment on constrained training on text is run with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from convexformer.experiments.corpora import CorpusSettings
from convexformer.experiments.settings import check_each, is_nonnegative, is_positive, is_price
from convexformer.validation import check_positive, is_integer
from convexformer_solvers.validation import check_counts

from .common import Search


@dataclass(frozen=True)
class ConstrainedTextSettings(CorpusSettings):
    """Everything that the numbers of the experiment on text depend on, besides versions and machine.

    The defaults are the full setting, hours on two cores; ``small`` takes less than a minute.

    Parameters
    ----------
    corpora, vectors, n_features, n_sentences, n_tokens, token_norm
        As of ``UnfoldedSettings``; the default is two corpora that are always there, with vectors made of them.
    encoder : str, optional
        Frozen encoder whose layers are read: a local folder, or a name at the Hugging Face hub. Default:
        all-MiniLM-L6-v2 where its package is installed; else the encoder is left out, and the report says so.
        ``"none"`` leaves it out.
    depths : tuple of int, default=(3, 5)
        Layers of the unrolled transformers, as in [K].
    train_noises : tuple of float, default=(0.0, 0.6, 1.0)
        Standard deviations of the noise on embeddings in training, relative to that of the embeddings.
    test_noises : tuple of float, default=(0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
        The same at test time; accuracies are integrated over them.
    noise_copies : int, default=2
        Noisy copies of each training sentence that pass through the encoder; unrolled transformers get new noise in
        every step.
    n_epochs : int, default=30
        Epochs of every run.
    encoder_epochs : int, default=60
        The same for readouts of the encoder.
    batch_size : int, default=64
        Sentences of a step.
    learning_rates : tuple of float, default=(1e-3, 5e-3)
        Search of every method, together with:
    alphas : tuple of float, default=(0.05, 0.2)
        Shares by which layers must lower the loss, for constrained training.
    weight_decays : tuple of float, default=(0.0, 1e-3)
        For the other methods.
    c_ref_ratio : float, default=1.0
        ``c_ref`` as a share of the loss of the best constant prediction.
    dual_lr : float, default=1e-2
        Step of the multipliers.
    ablation_alphas : tuple of float, default=(0.0, 0.05, 0.1, 0.2, 0.4)
        Ablation on the first corpus, with the least depth and the middle noise.
    ablation_prices : tuple of float or None, default=(None, 1.0, 0.1)
        Prices of resilience of the ablation.
    thresholds : tuple of float, default=(0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
        Confidences at which sentences leave early.
    device : str, optional
        Where networks are trained. Default: the CPU.

    Raises
    ------
    ValueError
        If a number is out of range; the message names it.

    Examples
    --------
    >>> ConstrainedTextSettings.small(n_epochs=2).n_epochs
    2
    """

    n_sentences: int = 3000
    encoder: str | None = None
    depths: tuple[int, ...] = (3, 5)
    train_noises: tuple[float, ...] = (0.0, 0.6, 1.0)
    test_noises: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
    noise_copies: int = 2
    n_epochs: int = 30
    encoder_epochs: int = 60
    batch_size: int = 64
    learning_rates: tuple[float, ...] = (1e-3, 5e-3)
    alphas: tuple[float, ...] = (0.05, 0.2)
    weight_decays: tuple[float, ...] = (0.0, 1e-3)
    c_ref_ratio: float = 1.0
    dual_lr: float = 1e-2
    ablation_alphas: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2, 0.4)
    ablation_prices: tuple[float | None, ...] = (None, 1.0, 0.1)
    thresholds: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
    device: str | None = None

    _SMALL: ClassVar[dict[str, Any]] = {
        "n_features": 20,
        "n_sentences": 400,
        "n_tokens": 12,
        "encoder": "none",
        "depths": (3,),
        "train_noises": (0.0, 0.6),
        "test_noises": (0.0, 0.5, 1.0, 2.0),
        "n_epochs": 10,
        "learning_rates": (5e-3,),
        "ablation_alphas": (0.0, 0.1, 0.4),
        "ablation_prices": (None, 0.1),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(**self._named("noise_copies", "n_epochs", "encoder_epochs", "batch_size"))
        check_each(lambda depth: is_integer(depth, 2), "integers of at least 2", depths=self.depths)
        check_each(is_nonnegative, "numbers from 0", **self._named("train_noises", "test_noises", "weight_decays"))
        if self.test_noises[0] != 0 or any(np.diff(self.test_noises) <= 0):
            raise ValueError(f"test_noises must begin with 0 and increase, got {self.test_noises!r}")
        check_each(is_positive, "positive numbers", learning_rates=self.learning_rates)
        check_each(is_price, "positive numbers or None", ablation_prices=self.ablation_prices)
        alphas = self._named("alphas", "ablation_alphas")
        check_each(lambda alpha: 0 <= alpha < 1, "numbers from 0 and below 1", **alphas)
        check_each(lambda value: 0 <= value <= 1, "numbers from 0 to 1", thresholds=self.thresholds)
        check_positive(c_ref_ratio=self.c_ref_ratio, dual_lr=self.dual_lr)
        self.search  # noqa: B018 - it checks that the search is equal

    @property
    def search(self) -> Search:
        """What every method tries."""
        return Search(self.learning_rates, self.alphas, self.weight_decays)

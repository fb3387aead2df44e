"""What the experiment on unfolded transformers is run with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from convexformer.experiments.corpora import CorpusSettings
from convexformer.experiments.settings import check_each, is_nonnegative, is_positive
from convexformer.validation import check_positive, is_integer
from convexformer_solvers.validation import check_counts


@dataclass(frozen=True)
class UnfoldedSettings(CorpusSettings):
    """Everything that the numbers of the experiment on unfolded transformers depend on, besides versions and machine.

    The defaults are the full setting, an hour or two on two cores; ``small`` takes about a minute.

    Parameters
    ----------
    corpora : tuple of str
        Labelled sentences: ``"documentation:A,B"`` are sentences from the documentation of installed packages with the
        package as label; ``"PATH,PATH"`` are text files of one sentence a line, one file for each label; a path that
        ends in ``.tsv`` is a file of lines of label, tab, sentence. The default are two that are always there.
    vectors : str, optional
        File of word vectors, as in ``load_word_vectors``. Default: vectors made of each corpus itself.
    n_features : int, default=50
        Width of vectors that are made.
    n_sentences : int, default=4000
        Sentences of each corpus, as many of each label, split into 60% training, 20% validation and 20% test.
    n_tokens : int, default=32
        Longer sentences are cut to so many words.
    token_norm : float, default=2.0
        Root mean square norm of a token, to which the vectors of a corpus are scaled by one number: weights of the
        energy are of the order of ``exp(-token_norm ** 2)``, so that of raw vectors they all vanish.
    n_layers : int, default=12
        Layers of the energy plots, with shared weights, as in [U].
    n_shown : int, default=200
        Test sentences of the energy plots, as in [U].
    step : float, default=0.1
        Steps of the alternating layers that are damped.
    train_layers : int, default=6
        Layers of the networks that are trained to classify.
    n_steps : int, default=600
        Steps of AdamW at most, for each learning rate of each network.
    n_looks : int, default=20
        How often the validation loss is looked at, evenly over the steps.
    batch_size : int, default=128
        Sentences of a step.
    learning_rates : tuple of float, default=(1e-3, 3e-3, 1e-2)
        Search of every network.
    weight_decay : float, default=1e-2
        Decoupled decay of every network.
    alphas : tuple of float, default=(1e-4, 1e-3, 1e-2)
        Search for the certified readouts.
    depths : tuple of int, default=(1, 2, 3, 4, 6, 8, 12, 16, 24)
        Layers at test time of networks with shared weights.
    noises : tuple of float, default=(0.0, 0.25, 0.5, 1.0, 2.0)
        Standard deviation of Gaussian noise on each feature of the test tokens, relative to that of the features.
    aim_tokens, aim_features, aim_iterations : int, default=500, 128 and 100
        Sizes of the problem of alternating inexact minimisation, those of [U].
    device : str, optional
        Where networks are trained. Default: the CPU.

    Raises
    ------
    ValueError
        If a number is out of range; the message names it.

    Examples
    --------
    >>> UnfoldedSettings.small(n_tokens=8).n_tokens
    8
    """

    n_layers: int = 12
    n_shown: int = 200
    step: float = 0.1
    train_layers: int = 6
    n_steps: int = 600
    n_looks: int = 20
    batch_size: int = 128
    learning_rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    weight_decay: float = 1e-2
    alphas: tuple[float, ...] = (1e-4, 1e-3, 1e-2)
    depths: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24)
    noises: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 2.0)
    aim_tokens: int = 500
    aim_features: int = 128
    aim_iterations: int = 100
    device: str | None = None

    _SMALL: ClassVar[dict[str, Any]] = {
        "n_features": 20,
        "n_sentences": 600,
        "n_tokens": 16,
        "n_shown": 60,
        "train_layers": 3,
        "n_steps": 60,
        "n_looks": 6,
        "batch_size": 64,
        "learning_rates": (3e-3, 1e-2),
        "alphas": (1e-3, 1e-2),
        "depths": (1, 2, 3, 6, 12),
        "noises": (0.0, 0.5, 1.0),
        "aim_tokens": 200,
        "aim_features": 64,
        "aim_iterations": 60,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(**self._named("n_layers", "n_shown", "train_layers", "n_steps", "n_looks", "batch_size"))
        check_counts(**self._named("aim_tokens", "aim_features", "aim_iterations"))
        check_positive(step=self.step)
        check_each(is_positive, "positive numbers", learning_rates=self.learning_rates, alphas=self.alphas)
        check_each(lambda depth: is_integer(depth, 1), "positive integers", depths=self.depths)
        check_each(is_nonnegative, "numbers from 0", noises=self.noises)
        if not is_nonnegative(self.weight_decay):
            raise ValueError(f"weight_decay must be a number from 0, got {self.weight_decay!r}")

    @property
    def look_every(self) -> int:
        """Steps between looks."""
        return max(1, self.n_steps // self.n_looks)

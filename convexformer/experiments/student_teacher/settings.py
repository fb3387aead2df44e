"""What the student-teacher experiment is run with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from convexformer.experiments.settings import ExperimentSettings, check_each, is_positive
from convexformer.validation import check_optional_counts, check_positive, is_integer
from convexformer_solvers.validation import check_counts


@dataclass(frozen=True)
class StudentTeacherSettings(ExperimentSettings):
    """Everything that the numbers of the student-teacher experiment depend on, besides versions and machine.

    The defaults are the full setting, meant for a GPU; ``small`` takes about a minute on two cores.

    Parameters
    ----------
    model : str, optional
        Teacher: folder or name of an encoder, as in ``load_attention_activations``. Default: all-MiniLM-L6-v2.
    layer : int, default=2
        Layer of the teacher, from 0.
    site : {"attention", "layer"}, default="attention"
        Which outputs are the targets: those of the attention sublayer, or of the whole layer.
    sentences : str, default="documentation"
        Name or text file of the sentences; those of fewer than `n_tokens` tokens are left out, so nothing is padded.
    n_sentences : int, default=2800
        Sentences ``N``, split into 60% training, 20% validation and 20% test.
    n_tokens : int, default=32
        Tokens ``n`` of each sentence.
    position : int, optional
        Token whose output is the target. Default: ``n_tokens // 4``.
    n_outputs : int, optional
        Principal directions of the training targets that are kept. Default: all outputs.
    map_outputs : int, optional
        The same for the sequence targets of the attention maps.
    n_gates : int, default=64
        Gates of the gated class.
    n_alphas, alpha_ratio : int and float, default=10 and 0.01
        Grid of ``alpha`` of each convex program: evenly in the logarithm from ``alpha_max`` to this part of it.
    map_alpha_ratios : tuple of float
        Grid for the attention maps, as parts of ``alpha_max``.
    n_steps : int, default=3000
        Adam's full-batch steps for every combination of every network.
    learning_rates : tuple of float
        Grid for the networks of the convex programs.
    softmax_learning_rates, softmax_alphas : tuple of float
        Grids for softmax attention, every pair of which is tried. An ``alpha`` here is per output: the weight of the
        decay is `alpha` times the number of outputs that the loss sums over.
    softmax_heads, softmax_head_width : int, default=12 and 32
        Size of softmax attention; the default is that of MiniLM's own layers.
    ridge_alphas : tuple of float
        Grid for ridge regression, with the sum of squares as its loss.
    tol, search_tol : float, default=1e-4 and 1e-3
        Certified relative gap of the final convex solutions, and of those that choose ``alpha``.
    device : str, optional
        Device of everything but ridge and the certified objectives of networks. Default: the CPU.

    Raises
    ------
    ValueError
        If a number is out of range; the message names it.

    Examples
    --------
    >>> settings = StudentTeacherSettings.small(n_tokens=8)
    >>> settings.n_sentences, settings.target_position
    (300, 2)
    """

    model: str | None = None
    layer: int = 2
    site: Literal["attention", "layer"] = "attention"
    sentences: str = "documentation"
    n_sentences: int = 2800
    n_tokens: int = 32
    position: int | None = None
    n_outputs: int | None = None
    map_outputs: int | None = None
    n_gates: int = 64
    n_alphas: int = 10
    alpha_ratio: float = 0.01
    map_alpha_ratios: tuple[float, ...] = (0.3, 0.1, 0.03, 0.01)
    n_steps: int = 3000
    learning_rates: tuple[float, ...] = (3e-3, 1e-2, 3e-2)
    softmax_learning_rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    softmax_alphas: tuple[float, ...] = (3e-3, 1e-2, 3e-2)
    softmax_heads: int = 12
    softmax_head_width: int = 32
    ridge_alphas: tuple[float, ...] = tuple(10.0**power for power in range(-3, 6))
    tol: float = 1e-4
    search_tol: float = 1e-3
    device: str | None = None

    _SMALL: ClassVar[dict[str, Any]] = {
        "n_sentences": 300,
        "n_tokens": 10,
        "n_outputs": 8,
        "map_outputs": 4,
        "n_gates": 8,
        "n_alphas": 8,
        "alpha_ratio": 0.02,
        "map_alpha_ratios": (0.3, 0.1, 0.03),
        "n_steps": 100,
        "softmax_alphas": (1e-2, 3e-2),
        "softmax_heads": 4,
        "softmax_head_width": 16,
    }

    def __post_init__(self) -> None:
        check_counts(n_tokens=self.n_tokens, n_gates=self.n_gates, n_alphas=self.n_alphas, n_steps=self.n_steps)
        check_counts(**self._named("softmax_heads", "softmax_head_width"))
        check_optional_counts(n_outputs=self.n_outputs, map_outputs=self.map_outputs)
        check_positive(tol=self.tol, search_tol=self.search_tol)
        if not is_integer(self.n_sentences, 10):
            raise ValueError(
                f"n_sentences must be an integer of at least 10, to be split in three, got {self.n_sentences!r}"
            )
        if self.position is not None and not (is_integer(self.position, 0) and self.position < self.n_tokens):
            raise ValueError(
                f"position must be one of the n_tokens={self.n_tokens} tokens, from 0, got {self.position!r}"
            )
        if not 0 < self.alpha_ratio < 1:
            raise ValueError(f"alpha_ratio must be between 0 and 1, got {self.alpha_ratio!r}")
        names = ("map_alpha_ratios", "learning_rates", "softmax_learning_rates", "softmax_alphas", "ridge_alphas")
        check_each(is_positive, "positive numbers", **self._named(*names))

    @property
    def target_position(self) -> int:
        """Token whose output is the target."""
        return self.n_tokens // 4 if self.position is None else self.position

    def as_json(self) -> dict[str, Any]:
        """Settings as they read back from a JSON file."""
        return super().as_json() | {"position": self.target_position}

"""What each token adds to the scores of a probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convexformer.validation import is_integer


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """Scores of samples as sums over their tokens.

    Attributes
    ----------
    contributions : list of ndarray of shape (length,) or (length, n_outputs)
        What each real token of each sample adds. One column where there is one score, as of two classes.
    baseline : float or ndarray of shape (n_outputs,)
        The intercept, which every sample has.
    classes : ndarray of shape (n_classes,) or None
        Labels of the scores; with one score that of the second class.

    Examples
    --------
    >>> explanation = Explanation([np.array([1.0, -0.5])], 0.25, None)
    >>> explanation
    Explanation(1 samples)
    >>> explanation.scores
    array([0.75])
    """

    contributions: list[NDArray[np.floating]]
    baseline: Any
    classes: NDArray | None = None

    def __repr__(self) -> str:
        return f"Explanation({len(self)} samples)"

    def __len__(self) -> int:
        return len(self.contributions)

    @property
    def scores(self) -> NDArray[np.floating]:
        """Sums over tokens and the baseline: ``decision_function``, or the outputs of a regressor."""
        return np.stack([part.sum(0) for part in self.contributions]) + self.baseline

    def of(self, sample: int, output: Any = None) -> NDArray[np.floating]:
        """Contributions of the tokens of one sample to one score.

        Parameters
        ----------
        sample : int
            Position of the sample.
        output : label or int, optional
            Which score: a label of `classes`, or a position without classes. Default: the only one, or that with the
            largest score.

        Returns
        -------
        ndarray of shape (length,)

        Raises
        ------
        IndexError
            If there is no such sample.
        ValueError
            If there is no such score.
        """
        if not (is_integer(sample) and -len(self) <= sample < len(self)):
            raise IndexError(f"sample must be the position of one of the {len(self)} samples, got {sample!r}")
        found = self.contributions[sample]
        n_scores = 1 if found.ndim == 1 else found.shape[1]
        names = list(range(n_scores)) if self.classes is None else self.classes.tolist()
        is_array = getattr(output, "ndim", 0) > 0  # which has no single truth when it is compared
        if output is not None and (is_array or output not in names):
            raise ValueError(f"output must be one of {names}, got {output!r}")
        if found.ndim == 1:  # of two classes it is minus the score of the first
            return found if output is None or output == names[-1] else -found
        return found[:, (found.sum(0) + self.baseline).argmax() if output is None else names.index(output)]

    def plot_text(self, sample: int, words: Sequence[str], output: Any = None, **options: Any) -> Any:
        """Draw the words of a sample on colours by their contributions; see ``convexformer.plot.plot_token_text``."""
        from convexformer.plot import plot_token_text

        return plot_token_text(self.of(sample, output), words, **options)

    def plot_patches(self, sample: int, grid: tuple[int, int], output: Any = None, **options: Any) -> Any:
        """Draw contributions of patches as a heat map; see ``convexformer.plot.plot_patch_map``."""
        from convexformer.plot import plot_patch_map

        return plot_patch_map(self.of(sample, output), grid, **options)

    def plot_series(self, sample: int, output: Any = None, **options: Any) -> Any:
        """Draw contributions over time; see ``convexformer.plot.plot_token_curve``."""
        from convexformer.plot import plot_token_curve

        return plot_token_curve(self.of(sample, output), **options)

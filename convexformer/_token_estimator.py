"""The base class of estimators on tokens, and what a file holds of a fit: a header for JSON and plain arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator

# A header, of what JSON holds and numpy numbers, and arrays without objects.
SavedState = tuple[dict[str, Any], dict[str, NDArray]]


class TokenEstimator(BaseEstimator):
    """An estimator on samples of tokens, whose fit a file can hold.

    A class that keeps more of a fit extends both methods below, calling those of its parent first; one line among the
    estimators of ``persistence`` then lets it be saved and loaded.

    Attributes
    ----------
    n_features_in_ : int
        Features per token, or columns of two-dimensional ``X``.
    n_tokens_in_ : int
        Tokens per sample.
    """

    n_features_in_: int
    n_tokens_in_: int
    _n_dims: int

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags

    def _saved_state(self) -> SavedState:
        """What a file must hold of the fit, besides the parameters.

        Returns
        -------
        header : dict
            What JSON holds, and numpy numbers.
        arrays : dict of str to ndarray
            Arrays without objects, under names other than ``"header"``.

        Raises
        ------
        ValueError
            If the fit holds objects that a file without code cannot.
        """
        header: dict[str, Any] = {"shape": [self._n_dims, self.n_tokens_in_, self.n_features_in_]}
        if hasattr(self, "feature_names_in_"):
            header["feature_names"] = list(self.feature_names_in_)
        return header, {}

    def _restore_state(self, header: dict[str, Any], arrays: dict[str, NDArray]) -> None:
        """Take the fit of another estimator with these parameters.

        Parameters
        ----------
        header, arrays
            As its ``_saved_state`` returned them; there may be more in them.

        Raises
        ------
        KeyError
            If something is not there.
        ValueError
            If something does not read as ``_saved_state`` would have it.
        """
        self._n_dims, self.n_tokens_in_, self.n_features_in_ = header["shape"]
        if "feature_names" in header:
            self.feature_names_in_ = np.array(header["feature_names"], dtype=object)


def described(part: Any, registry: dict[str, type]) -> dict[str, Any]:
    """A loss or penalty of a registered class, as a header holds it.

    Examples
    --------
    >>> from convexformer.solvers import LOSSES, Huber
    >>> described(Huber(delta=0.5), LOSSES)
    {'name': 'huber', 'delta': 0.5}
    """
    name = next((name for name, cls in registry.items() if cls is type(part)), None)
    if name is None:
        raise ValueError(
            f"{part!r} cannot be saved, as its class is not registered; enter it in convexformer.solvers.LOSSES or "
            "PENALTIES, here and where it is loaded"
        )
    return {"name": name, **vars(part)}


def rebuilt(description: dict[str, Any], registry: dict[str, type]) -> Any:
    """The loss or penalty that ``described`` had.

    Examples
    --------
    >>> from convexformer.solvers import LOSSES
    >>> rebuilt({"name": "huber", "delta": 0.5}, LOSSES)
    Huber(delta=0.5)
    """
    fields = dict(description)
    name = fields.pop("name")
    if name not in registry:
        raise ValueError(
            f"the model was saved with {name!r}, which is not registered here; enter its class in "
            "convexformer.solvers.LOSSES or PENALTIES before it is loaded"
        )
    return registry[name](**fields)

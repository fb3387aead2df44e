"""Saving fitted estimators without pickles: one ``.npz`` of arrays and a JSON header."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from convexformer_solvers import LOSSES, PENALTIES
from convexformer_solvers.archive import plain, read_archive, write_archive
from convexformer_solvers.path import check_grid

from . import __version__
from ._integers import is_integer
from ._saved_state import SavableEstimator, described, rebuilt
from ._validation import dtype_name
from .deep import GreedyConvexTransformerClassifier, GreedyConvexTransformerRegressor
from .estimators import ConvexAttentionClassifier, ConvexAttentionRegressor
from .gates import Gates
from .model_selection import ConvexAttentionClassifierCV, ConvexAttentionRegressorCV
from .sequences import ConvexSequenceRegressor
from .sequences.forms import FORMS

_ESTIMATORS: dict[str, type[SavableEstimator]] = {
    cls.__name__: cls
    for cls in (
        ConvexAttentionClassifier,
        ConvexAttentionClassifierCV,
        ConvexAttentionRegressor,
        ConvexAttentionRegressorCV,
        ConvexSequenceRegressor,
        GreedyConvexTransformerClassifier,
        GreedyConvexTransformerRegressor,
    )
}
# Parameters that may be objects of registered classes.
_PARTS: dict[str, dict[str, type]] = {"loss": LOSSES, "penalty": PENALTIES}
# Parameters that may be objects of torch or numpy, and what gives their names.
_NAMED: dict[str, Callable[[Any], str]] = {"dtype": dtype_name, "device": str}
# Parameters that only a further fit would need: a model whose parameters of these names are objects is saved without.
_NOT_NEEDED = {"solver", "callback", "cv", "scoring", "random_state"}
_FORMAT = 1
_CONTENT = "convexformer model"


def save_model(model: SavableEstimator, path: str | Path) -> None:
    """Save a fitted estimator; the file holds no code and is safe to share.

    Parameters
    ----------
    model : estimator
        A fitted estimator of this package. Kept are its parameters, network, names of features, certified figures and
        the scores of a cross-validation; not kept are the training history and the dual point.
    path : str or Path
        File to write; replaced only when everything has been written.

    Raises
    ------
    TypeError
        If the model is of another class.
    NotFittedError
        If it is not fitted.
    FileNotFoundError
        If the folder of `path` is not there.
    IsADirectoryError
        If `path` is a folder.
    ValueError
        If a parameter that is needed is an object that JSON cannot hold (register losses and penalties of your own). A
        gate source is saved as the gates that it made, but that of a greedy model, which makes others for each layer,
        must be given by name. Or if labels are objects other than strings.

    Warns
    -----
    UserWarning
        If `solver`, `callback`, `cv`, `scoring` or `random_state` is an object that JSON cannot hold: the model is
        saved without it, as it predicts without it, and has the default once loaded.

    Examples
    --------
    >>> import tempfile, os
    >>> from convexformer import ConvexAttentionRegressor
    >>> model = ConvexAttentionRegressor(alpha=0.1).fit([[0.0], [1.0], [2.0]], [0.0, 1.0, 2.0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(model, os.path.join(folder, "model.npz"))
    ...     again = load_model(os.path.join(folder, "model.npz"))
    >>> bool(again.predict([[3.0]]) == model.predict([[3.0]]))
    True
    """
    if type(model).__name__ not in _ESTIMATORS:
        raise TypeError(f"model must be one of {sorted(_ESTIMATORS)}, got {type(model).__name__}")
    check_is_fitted(model)
    if Path(path).is_dir():
        raise IsADirectoryError(f"path must be the name of a file, and {os.fspath(path)!r} is a folder")
    if not Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(f"no folder at {Path(path).parent} to save {Path(path).name} in; make it first")
    parameters = model.get_params(deep=False)
    state, arrays = model._saved_state()
    if not isinstance(parameters.get("gates", ""), str):
        if "u1" in arrays:
            parameters["gates"] = None  # the fitted gates, saved as arrays, take its place
        elif parameters.get("activation") == "linear":
            del parameters["gates"]  # not used
    if parameters.get("form") in FORMS.values():
        parameters["form"] = parameters["form"].name
    for name, registry in _PARTS.items():
        if type(parameters.get(name)) in registry.values():
            parameters[name] = described(parameters[name], registry)
    for name, name_of in _NAMED.items():
        if parameters.get(name) is not None:
            parameters[name] = name_of(parameters[name])
    if "alphas" in parameters and not is_integer(parameters["alphas"]):
        parameters["alphas"] = check_grid(parameters["alphas"])
    if isinstance(parameters.get("class_weight"), dict):
        parameters["class_weight"] = _items(parameters["class_weight"])
    left_out = [name for name in _NOT_NEEDED & parameters.keys() if not _is_plain(parameters[name])]
    parameters = {name: value for name, value in parameters.items() if name not in left_out}
    for name, value in parameters.items():
        if not _is_plain(value):
            raise ValueError(f"parameter {name}={value!r} cannot be saved; give it by name or leave it out")
    header = {
        "format": _FORMAT,
        "version": __version__,
        "estimator": type(model).__name__,
        "parameters": parameters,
        **state,
    }
    write_archive(path, _CONTENT, header, arrays)
    if left_out:
        warnings.warn(
            f"saved without the parameters {sorted(left_out)}, which are objects and not needed to predict; a loaded "
            "model has their defaults, set them before it is fitted again",
            UserWarning,
            stacklevel=2,
        )


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a value."""
    try:
        json.dumps(value, default=plain)
    except TypeError:
        return False
    return True


def load_model(path: str | Path) -> SavableEstimator:
    """Load an estimator that ``save_model`` wrote.

    Parameters
    ----------
    path : str or Path
        The file.

    Returns
    -------
    estimator
        Fitted, with its network and certified figures.

    Raises
    ------
    ValueError
        If the file is not a saved model.
    """
    header, arrays = read_archive(path, _CONTENT)
    try:
        if header["format"] > _FORMAT:
            raise ValueError(f"{path} was saved by convexformer {header['version']}, which is newer than this one")
        return _loaded(header, arrays)
    except KeyError as error:
        raise ValueError(f"{path} is no complete model of save_model: it lacks {error}") from error


def _loaded(header: dict[str, Any], arrays: dict[str, NDArray]) -> SavableEstimator:
    parameters = header["parameters"]
    if "u1" in arrays and parameters["gates"] is None:
        parameters["gates"] = Gates(arrays["u1"], arrays["u2"])
    for name, registry in _PARTS.items():
        if isinstance(parameters.get(name), dict):
            parameters[name] = rebuilt(parameters[name], registry)
    if isinstance(parameters.get("class_weight"), dict):
        parameters["class_weight"] = _from_items(parameters["class_weight"])
    model = _ESTIMATORS[header["estimator"]](**parameters)
    model._restore_state(header, arrays)
    return model


def _items(mapping: dict[Any, Any]) -> dict[str, list[Any]]:
    """A dict as lists, as the keys of JSON are text and labels need not be."""
    return {"keys": list(mapping), "values": list(mapping.values())}


def _from_items(items: dict[str, list[Any]]) -> dict[Any, Any]:
    return dict(zip(items["keys"], items["values"], strict=True))

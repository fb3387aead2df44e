"""Saving fitted estimators without pickles: one ``.npz`` of arrays and a JSON header."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from sklearn.utils.validation import check_is_fitted

from convexformer import __version__
from convexformer.validation import is_integer
from convexformer_solvers.io.npz import read_archive, write_archive

from .attention import ConvexAttentionClassifier, ConvexAttentionRegressor
from .constrained import DescentConstrainedClassifier, DescentConstrainedDenoiser
from .cv import ConvexAttentionClassifierCV, ConvexAttentionRegressorCV
from .greedy import GreedyConvexTransformerClassifier, GreedyConvexTransformerRegressor
from .parameters import decode_parameters, encode_parameters
from .probe import (
    ConvexProbeClassifier,
    ConvexProbeClassifierCV,
    ConvexProbeRegressor,
    ConvexProbeRegressorCV,
)
from .sequence import ConvexSequenceRegressor
from .tokens import TokenEstimator
from .unfolded import UnfoldedTransformerClassifier, UnfoldedTransformerRegressor

# A further one is one line: a class that says what a file must hold of its fit, as ``TokenEstimator`` has it.
_ESTIMATORS: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        ConvexAttentionClassifier,
        ConvexAttentionClassifierCV,
        ConvexAttentionRegressor,
        ConvexAttentionRegressorCV,
        ConvexProbeClassifier,
        ConvexProbeClassifierCV,
        ConvexProbeRegressor,
        ConvexProbeRegressorCV,
        ConvexSequenceRegressor,
        DescentConstrainedClassifier,
        DescentConstrainedDenoiser,
        GreedyConvexTransformerClassifier,
        GreedyConvexTransformerRegressor,
        UnfoldedTransformerClassifier,
        UnfoldedTransformerRegressor,
    )
}
_FORMAT = 1
_CONTENT = "convexformer model"


def save_model(model: TokenEstimator, path: str | Path) -> None:
    """Save a fitted estimator; the file holds no code and is safe to share.

    Parameters
    ----------
    model : estimator
        A fitted estimator of this package. Kept are its parameters, network, names of features, certified figures or
        the report on its constraints, and the scores of a cross-validation; not kept are the training history, the dual
        point, ``generation_``, ``optimality_gap_`` and ``traffic_``.
    path : str or Path
        File to write; replaced only when everything has been written.

    Raises
    ------
    TypeError
        If the model is of another class, or `path` is no path.
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
        If `solver`, `callback`, `cv`, `scoring`, `dictionary`, `generate` or `random_state` is an object that JSON
        cannot hold: the model is saved without it, as it predicts without it, and has the default once loaded.

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
    _check_path(path)
    if Path(path).is_dir():
        raise IsADirectoryError(f"path must be the name of a file, and {os.fspath(path)!r} is a folder")
    if not Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(f"no folder at {Path(path).parent} to save {Path(path).name} in; make it first")
    state, arrays = model._saved_state()
    parameters, left_out = encode_parameters(model.get_params(deep=False), arrays)
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
            f"saved without the parameters {left_out}, which are objects and not needed to predict; a loaded "
            "model has their defaults, set them before it is fitted again",
            UserWarning,
            stacklevel=2,
        )


def load_model(path: str | Path) -> TokenEstimator:
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
    TypeError
        If `path` is no path.
    FileNotFoundError
        If there is no file at `path`.
    ValueError
        If the file is not a saved model, or one of a later version or of another estimator.

    Examples
    --------
    >>> import tempfile, os
    >>> from convexformer import ConvexAttentionRegressor
    >>> model = ConvexAttentionRegressor(alpha=0.1).fit([[0.0], [1.0], [2.0]], [0.0, 1.0, 2.0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(model, os.path.join(folder, "model.npz"))
    ...     again = load_model(os.path.join(folder, "model.npz"))
    >>> bool((again.predict([[3.0]]) == model.predict([[3.0]])).all())
    True
    """
    _check_path(path)
    header, arrays = read_archive(path, _CONTENT)
    try:
        _check_header(path, header)
        model = _ESTIMATORS[header["estimator"]]()
        model.set_params(**decode_parameters(header["parameters"], arrays))  # names a parameter that is not there
        model._restore_state(header, arrays)
    except KeyError as error:
        raise ValueError(f"{path} is no complete model of save_model: it lacks {error}") from error
    except Exception as error:  # what reads parts of a fit does not check each of them
        raise ValueError(f"{path} holds no model that can be loaded: {error}") from error
    return model


def _check_path(path: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be the path of a file, got {path!r}")


def _check_header(path: str | Path, header: dict[str, Any]) -> None:
    """Raise ``ValueError`` unless this version reads the format and has the estimator."""
    if not is_integer(header["format"], 1):
        raise ValueError(f"the format of {path} must be a positive integer, got {header['format']!r}")
    if header["format"] > _FORMAT:
        raise ValueError(f"{path} was saved by convexformer {header['version']}, which is newer than this one")
    known = sorted(_ESTIMATORS)
    if header["estimator"] not in known:
        raise ValueError(f"the estimator of {path} must be one of {known}, got {header['estimator']!r}")

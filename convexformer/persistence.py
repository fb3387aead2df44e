"""Saving fitted estimators without pickles: one ``.npz`` of arrays and a JSON header."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from functools import singledispatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from convexformer_solvers import LOSSES, PENALTIES, Certificate, Status
from convexformer_solvers.archive import plain, read_archive, write_archive
from convexformer_solvers.path import check_grid

from . import __version__
from ._base import ConvexAttentionBase
from ._integers import is_integer
from ._validation import dtype_name
from .deep import (
    GreedyConvexTransformerBase,
    GreedyConvexTransformerClassifier,
    GreedyConvexTransformerRegressor,
    HandOn,
)
from .estimators import ConvexAttentionClassifier, ConvexAttentionRegressor
from .gates import Gates, GivenGates, get_gate_source
from .model_selection import ConvexAttentionClassifierCV, ConvexAttentionRegressorCV, CrossValidationMixin
from .sequences import ConvexSequenceRegressor, get_form
from .sequences.forms import FORMS
from .targets import ClassTargets, RealTargets

_ESTIMATORS: dict[str, type[Any]] = {
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


_Model = ConvexAttentionBase | ConvexSequenceRegressor | GreedyConvexTransformerBase


def save_model(model: _Model, path: str | Path) -> None:
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
    contents, arrays = _contents_of(model)
    if not isinstance(parameters.get("gates", ""), str):
        if "u1" in arrays:
            parameters["gates"] = None  # the fitted gates, saved as arrays, take its place
        elif parameters.get("activation") == "linear":
            del parameters["gates"]  # not used
    if parameters.get("form") in FORMS.values():
        parameters["form"] = parameters["form"].name
    for name, registry in _PARTS.items():
        if type(parameters.get(name)) in registry.values():
            parameters[name] = _registered(parameters[name], registry)
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
        "shape": [model._n_dims, model.n_tokens_in_, model.n_features_in_],
        **contents,
    }
    if hasattr(model, "feature_names_in_"):
        header["feature_names"] = list(model.feature_names_in_)
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


def load_model(path: str | Path) -> _Model:
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


def _loaded(header: dict[str, Any], arrays: dict[str, NDArray]) -> _Model:
    parameters = header["parameters"]
    if "u1" in arrays and parameters["gates"] is None:
        parameters["gates"] = Gates(arrays["u1"], arrays["u2"])
    for name, registry in _PARTS.items():
        if isinstance(parameters.get(name), dict):
            parameters[name] = _rebuilt(parameters[name], registry)
    if isinstance(parameters.get("class_weight"), dict):
        parameters["class_weight"] = _from_items(parameters["class_weight"])
    model = _ESTIMATORS[header["estimator"]](**parameters)
    _restore(model, header, arrays)
    if "feature_names" in header:
        model.feature_names_in_ = np.array(header["feature_names"], dtype=object)
    return model


def _items(mapping: dict[Any, Any]) -> dict[str, list[Any]]:
    """A dict as lists, as the keys of JSON are text and labels need not be."""
    return {"keys": list(mapping), "values": list(mapping.values())}


def _from_items(items: dict[str, list[Any]]) -> dict[Any, Any]:
    return dict(zip(items["keys"], items["values"], strict=True))


@singledispatch
def _contents_of(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the header and the arrays of a file must hold of a fit; of all but layers one solution."""
    network, arrays = _network_of(model)
    certificate = model.certificate_
    figures = {
        "certificate": [certificate.primal, certificate.dual, certificate.reference],
        "alpha_max": model.alpha_max_,
        "n_iter": model.n_iter_,
        "status": model.status_.name,
    }
    coef, intercept = (part.numpy() for part in model._solution)
    return network | figures, arrays | {"coef": coef, "intercept": intercept}


@_contents_of.register
def _(model: GreedyConvexTransformerBase) -> tuple[dict[str, Any], dict[str, Any]]:
    first = model.layers_[0]
    given = isinstance(get_gate_source(model.gates, model.n_gates), GivenGates)
    all_arrays: dict[str, Any] = {"u1": first.gates_.u1, "u2": first.gates_.u2} if given else {}
    layers = []
    for number, layer in enumerate(model.layers_):
        header, arrays = _contents_of(layer)
        layers.append(header | {"shape": [layer._n_dims, layer.n_tokens_in_, layer.n_features_in_]})
        all_arrays |= {f"layer{number}_{name}": array for name, array in arrays.items()}
    for number, hand_on in enumerate(model._hand_on):
        all_arrays[f"centre{number}"] = hand_on.centre.numpy()
    return {"layers": layers, "factors": [hand_on.factor for hand_on in model._hand_on]}, all_arrays


@singledispatch
def _restore(model: Any, header: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Give a new estimator the fit of a file."""
    model._n_dims, model.n_tokens_in_, model.n_features_in_ = header["shape"]
    _restore_network(model, header, arrays)
    model.certificate_ = Certificate(*header["certificate"])
    model.dual_gap_ = model.certificate_.gap
    model.alpha_max_, model.n_iter_, model.status_ = header["alpha_max"], header["n_iter"], Status[header["status"]]


@_restore.register
def _(model: GreedyConvexTransformerBase, header: dict[str, Any], arrays: dict[str, Any]) -> None:
    model._n_dims, model.n_tokens_in_, model.n_features_in_ = header["shape"]
    layers = []
    for number, contents in enumerate(header["layers"]):
        prefix = f"layer{number}_"
        own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        layers.append(model._layer_with_gates(Gates(own["u1"], own["u2"])))
        _restore(layers[-1], contents, own)
    centres = (torch.as_tensor(arrays[f"centre{number}"]) for number in range(len(header["factors"])))
    model._store(layers, [HandOn(centre, factor) for centre, factor in zip(centres, header["factors"], strict=True)])


@singledispatch
def _network_of(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the header and the arrays of a file must hold of the network, besides the solution."""
    raise NotImplementedError


@_network_of.register
def _(model: ConvexAttentionBase) -> tuple[dict[str, Any], dict[str, Any]]:
    header = {
        "loss": _registered(model.loss_, LOSSES),
        "penalty": _registered(model.penalty_, PENALTIES),
        "alpha": model.heads_.alpha,
        "single": model._targets.single,
    }
    arrays: dict[str, Any] = {}
    if model.gates_ is not None:
        arrays |= {"u1": model.gates_.u1, "u2": model.gates_.u2}
    if isinstance(model._targets, ClassTargets):
        arrays["classes"] = _plain_classes(model._targets.classes)
        if model._targets.class_weight is not None:
            arrays["class_weight"] = model._targets.class_weight
    if isinstance(model, CrossValidationMixin):
        arrays |= {"alphas": model.alphas_, "score_path": model.score_path_}
    return header, arrays


def _plain_classes(classes: NDArray) -> NDArray:
    """Labels that a file without code can hold: strings that came as objects, as from data frames, become strings."""
    if not classes.dtype.hasobject:
        return classes
    if all(isinstance(label, str) for label in classes):
        return classes.astype(str)
    raise ValueError(
        f"the labels {classes.tolist()} cannot be saved, as they are objects; fit on strings, integers or booleans"
    )


@_network_of.register
def _(model: ConvexSequenceRegressor) -> tuple[dict[str, Any], dict[str, Any]]:
    trained_for = model._trained_for
    header = {
        "loss": _registered(trained_for["loss"], LOSSES),
        "penalty": _registered(trained_for["penalty"], PENALTIES),
        "alpha": trained_for["alpha"],
        "form": trained_for["form"].name,
        "targets": [model._y_ndim, *model._target_shape],
    }
    return header, {}


@singledispatch
def _restore_network(model: Any, header: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Give a new estimator the network of a file."""
    raise NotImplementedError


@_restore_network.register
def _(model: ConvexAttentionBase, header: dict[str, Any], arrays: dict[str, Any]) -> None:
    loss, penalty = _rebuilt(header["loss"], LOSSES), _rebuilt(header["penalty"], PENALTIES)
    gates = Gates(arrays["u1"], arrays["u2"]) if "u1" in arrays else None
    if "classes" in arrays:
        targets: Any = ClassTargets(arrays["classes"], loss, arrays.get("class_weight"))
        model.classes_ = targets.classes
    else:
        targets = RealTargets(header["single"])
    model._store_network(
        _solution(arrays), loss=loss, penalty=penalty, alpha=header["alpha"], targets=targets, gates=gates, like=None
    )
    if isinstance(model, CrossValidationMixin):
        model.alpha_ = header["alpha"]
        model.alphas_, model.score_path_ = arrays["alphas"], arrays["score_path"]


@_restore_network.register
def _(model: ConvexSequenceRegressor, header: dict[str, Any], arrays: dict[str, Any]) -> None:
    model._y_ndim, *target_shape = header["targets"]
    model._target_shape = tuple(target_shape)
    trained_for = {
        "alpha": header["alpha"],
        "form": get_form(header["form"]),
        "penalty": _rebuilt(header["penalty"], PENALTIES),
        "loss": _rebuilt(header["loss"], LOSSES),
    }
    model._store_network(_solution(arrays), trained_for, like=None)


def _solution(arrays: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.as_tensor(arrays["coef"]), torch.as_tensor(arrays["intercept"])


def _registered(part: Any, registry: dict[str, type]) -> dict[str, Any]:
    name = next((name for name, cls in registry.items() if cls is type(part)), None)
    if name is None:
        raise ValueError(
            f"{part!r} cannot be saved, as its class is not registered; enter it in convexformer.solvers.LOSSES or "
            "PENALTIES, here and where it is loaded"
        )
    return {"name": name, **vars(part)}


def _rebuilt(description: dict[str, Any], registry: dict[str, type]) -> Any:
    fields = dict(description)
    name = fields.pop("name")
    if name not in registry:
        raise ValueError(
            f"the model was saved with {name!r}, which is not registered here; enter its class in "
            "convexformer.solvers.LOSSES or PENALTIES before it is loaded"
        )
    return registry[name](**fields)

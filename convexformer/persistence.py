"""Saving fitted estimators without pickles: one ``.npz`` of arrays and a JSON header."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from convexformer_solvers import LOSSES, PENALTIES, Certificate, Status
from convexformer_solvers.archive import plain, read_archive, write_archive

from . import __version__
from ._base import ConvexAttentionBase
from .estimators import ConvexAttentionClassifier, ConvexAttentionRegressor
from .gates import Gates
from .model_selection import ConvexAttentionClassifierCV, ConvexAttentionRegressorCV
from .targets import ClassTargets, RealTargets

_ESTIMATORS = {
    cls.__name__: cls
    for cls in (
        ConvexAttentionClassifier,
        ConvexAttentionClassifierCV,
        ConvexAttentionRegressor,
        ConvexAttentionRegressorCV,
    )
}
_FORMAT = 1
_CONTENT = "convexformer model"


def save_model(model: ConvexAttentionBase, path: str | Path) -> None:
    """Save a fitted estimator; the file holds no code and is safe to share.

    Parameters
    ----------
    model : estimator
        A fitted estimator of this package. Kept are its parameters, network and certified figures; not kept are the
        training history and the dual point.
    path : str or Path
        File to write; replaced only when everything has been written.

    Raises
    ------
    ValueError
        If a parameter is an object that JSON cannot hold (give losses and penalties by name, drop callbacks).

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
    parameters = model.get_params(deep=False)
    if model.gates_ is not None and not isinstance(parameters["gates"], str):
        parameters["gates"] = None  # the fitted gates, saved as arrays, take its place
    for name, value in parameters.items():
        try:
            json.dumps(value, default=plain)
        except TypeError as error:
            raise ValueError(f"parameter {name}={value!r} cannot be saved; give it by name or leave it out") from error
    certificate = model.certificate_
    header = {
        "format": _FORMAT,
        "version": __version__,
        "estimator": type(model).__name__,
        "parameters": parameters,
        "loss": _registered(model.loss_, LOSSES),
        "penalty": _registered(model.penalty_, PENALTIES),
        "single": model._targets.single,
        "shape": [model._n_dims, model.n_tokens_in_, model.n_features_in_],
        "certificate": [certificate.primal, certificate.dual, certificate.reference],
        "alpha": model.heads_.alpha,
        "alpha_max": model.alpha_max_,
        "n_iter": model.n_iter_,
        "status": model.status_.name,
    }
    arrays = {"coef": model._solution[0].numpy(), "intercept": model._solution[1].numpy()}
    if model.gates_ is not None:
        arrays |= {"u1": model.gates_.u1, "u2": model.gates_.u2}
    if isinstance(model._targets, ClassTargets):
        arrays["classes"] = model._targets.classes
        if model._targets.class_weight is not None:
            arrays["class_weight"] = model._targets.class_weight
    write_archive(path, _CONTENT, header, arrays)


def load_model(path: str | Path) -> ConvexAttentionBase:
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
    if header["format"] > _FORMAT:
        raise ValueError(f"{path} was saved by convexformer {header['version']}, which is newer than this one")
    gates = Gates(arrays["u1"], arrays["u2"]) if "u1" in arrays else None
    parameters = header["parameters"]
    if parameters["gates"] is None:
        parameters["gates"] = gates
    model = _ESTIMATORS[header["estimator"]](**parameters)
    loss, penalty = _rebuilt(header["loss"], LOSSES), _rebuilt(header["penalty"], PENALTIES)
    model._n_dims, model.n_tokens_in_, model.n_features_in_ = header["shape"]
    if "classes" in arrays:
        targets: Any = ClassTargets(arrays["classes"], loss, arrays.get("class_weight"))
        model.classes_ = targets.classes
    else:
        targets = RealTargets(header["single"])
    model._store_network(
        (torch.as_tensor(arrays["coef"]), torch.as_tensor(arrays["intercept"])),
        loss=loss,
        penalty=penalty,
        alpha=header["alpha"],
        targets=targets,
        gates=gates,
        like=None,
    )
    model.certificate_ = Certificate(*header["certificate"])
    model.dual_gap_ = model.certificate_.gap
    model.alpha_max_, model.n_iter_, model.status_ = header["alpha_max"], header["n_iter"], Status[header["status"]]
    model._gate_request = (model.gates, model.n_gates)
    if isinstance(model, (ConvexAttentionClassifierCV, ConvexAttentionRegressorCV)):
        model.alpha_ = header["alpha"]
    return model


def _registered(part: Any, registry: dict[str, type]) -> dict[str, Any]:
    name = next((name for name, cls in registry.items() if cls is type(part)), None)
    if name is None:
        raise ValueError(f"{part!r} cannot be saved: its class is not registered")
    return {"name": name, **dataclasses.asdict(part)}


def _rebuilt(description: dict[str, Any], registry: dict[str, type]) -> Any:
    fields = dict(description)
    return registry[fields.pop("name")](**fields)

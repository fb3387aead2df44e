"""Parameters of estimators as a header in JSON holds them, and back: two functions for each kind that it lacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from convexformer.gates import Gates
from convexformer.programs.sequence import FORMS
from convexformer.unfolded.rho import RHO_CLASSES
from convexformer.validation import is_integer
from convexformer_solvers import LOSSES, PENALTIES
from convexformer_solvers.io.npz import plain
from convexformer_solvers.path import check_grid
from convexformer_solvers.validation import dtype_name

from .base import GATE_DEFAULTS
from .tokens import described, rebuilt

# Parameters that only a further fit would need: a model whose parameters of these names are objects is saved without.
_NOT_NEEDED = {"solver", "callback", "cv", "dictionary", "generate", "scoring", "random_state"}


def encode_parameters(parameters: Mapping[str, Any], arrays: Mapping[str, NDArray]) -> tuple[dict[str, Any], list[str]]:
    """Parameters as a header holds them: what JSON holds, numpy numbers and paths; `arrays` are those of the file.

    Also the names, sorted, of those left out: objects that only a further fit would need. ``ValueError`` if another
    parameter is an object for which JSON has nothing.

    Examples
    --------
    >>> from convexformer.solvers import Fista, Huber
    >>> encode_parameters({"alpha": 0.1, "loss": Huber(0.5), "solver": Fista()}, {})
    ({'alpha': 0.1, 'loss': {'name': 'huber', 'delta': 0.5}}, ['solver'])
    """
    encoded = {name: _encoded(name, value, parameters, arrays) for name, value in parameters.items()}
    objects = [name for name, value in encoded.items() if not _is_plain(value)]
    for name in objects:
        if name not in _NOT_NEEDED:
            raise ValueError(f"parameter {name}={encoded[name]!r} cannot be saved; give it by name or leave it out")
    return {name: value for name, value in encoded.items() if name not in objects}, sorted(objects)


def decode_parameters(encoded: Mapping[str, Any], arrays: Mapping[str, NDArray]) -> dict[str, Any]:
    """The parameters that ``encode_parameters`` had; ``ValueError`` if a loss or penalty is not registered here.

    Examples
    --------
    >>> decode_parameters({"alpha": 0.1, "loss": {"name": "huber", "delta": 0.5}}, {})
    {'alpha': 0.1, 'loss': Huber(delta=0.5)}
    """
    return {name: _CODECS.get(name, _PLAIN)[1](value, arrays) for name, value in encoded.items()}


def _encoded(name: str, value: Any, parameters: Mapping[str, Any], arrays: Mapping[str, NDArray]) -> Any:
    try:
        return _CODECS.get(name, _PLAIN)[0](value, parameters, arrays)
    except (TypeError, ValueError) as error:  # of a value that was set after the fit
        raise ValueError(f"parameter {name}={value!r} cannot be saved: {error}") from error


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a value."""
    try:
        json.dumps(value, default=plain)
    except TypeError:
        return False
    return True


# How a value goes into a header, given all parameters and what the file holds of the fit, and how it comes back.
_Encode = Callable[[Any, Mapping[str, Any], Mapping[str, NDArray]], Any]
_Decode = Callable[[Any, Mapping[str, NDArray]], Any]


def _part(registry: dict[str, type]) -> tuple[_Encode, _Decode]:
    """Objects of registered classes; names stay names."""
    return (
        lambda value, *_: described(value, registry) if type(value) in registry.values() else value,
        lambda value, _: rebuilt(value, registry) if isinstance(value, dict) else value,
    )


def _equivalent(equivalent: Callable[[Any], Any]) -> tuple[_Encode, _Decode]:
    """What has an equivalent that JSON holds, such as a name, which the loaded model goes on with."""
    return lambda value, *_: None if value is None else equivalent(value), _as_it_is


def _as_it_is(value: Any, *_: Any) -> Any:
    return value


def _encode_class_weight(value: Any, *_: Any) -> Any:
    """A dict as lists, as the keys of JSON are text and labels need not be."""
    return {"keys": list(value), "values": list(value.values())} if isinstance(value, dict) else value


def _decode_class_weight(value: Any, _: Any) -> Any:
    return dict(zip(value["keys"], value["values"], strict=True)) if isinstance(value, dict) else value


def _encode_gates(value: Any, parameters: Mapping[str, Any], arrays: Mapping[str, NDArray]) -> Any:
    """Gates and what makes them: None, for which the gates of the fit stand; names stay names."""
    if isinstance(value, str):
        return value
    if "u1" in arrays:
        return None
    # A model without gates does not use them.
    return GATE_DEFAULTS["gates"] if parameters.get("activation") == "linear" else value


def _decode_gates(value: Any, arrays: Mapping[str, NDArray]) -> Any:
    return Gates(arrays["u1"], arrays["u2"]) if value is None else value


def _form_name(form: Any) -> Any:
    return form.name if form in FORMS.values() else form


def _grid(alphas: Any) -> Any:
    return alphas if is_integer(alphas) else check_grid(alphas)


_CODECS: dict[str, tuple[_Encode, _Decode]] = {
    "alphas": _equivalent(_grid),
    "class_weight": (_encode_class_weight, _decode_class_weight),
    "device": _equivalent(str),
    "dtype": _equivalent(dtype_name),
    "form": _equivalent(_form_name),
    "gates": (_encode_gates, _decode_gates),
    "loss": _part(LOSSES),
    "penalty": _part(PENALTIES),
    "rho": _part(RHO_CLASSES),
}
_PLAIN = (_as_it_is, _as_it_is)

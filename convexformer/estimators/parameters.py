"""Parameters of estimators as a header in JSON holds them, and back: a codec for each kind that JSON does not have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    """Parameters as a header holds them.

    Parameters
    ----------
    parameters : mapping
        Those of ``get_params(deep=False)``.
    arrays : mapping of str to ndarray
        What the file holds of the fit.

    Returns
    -------
    encoded : dict
        What JSON holds, numpy numbers and paths.
    left_out : list of str
        Names of those that are objects and that only a further fit would need, sorted.

    Raises
    ------
    ValueError
        If another parameter is an object for which JSON has nothing.

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
    """The parameters that ``encode_parameters`` had.

    Parameters
    ----------
    encoded : mapping
        As it returned them.
    arrays : mapping of str to ndarray
        What the file holds of the fit.

    Returns
    -------
    dict

    Raises
    ------
    ValueError
        If a loss or penalty is not registered here.

    Examples
    --------
    >>> decode_parameters({"alpha": 0.1, "loss": {"name": "huber", "delta": 0.5}}, {})
    {'alpha': 0.1, 'loss': Huber(delta=0.5)}
    """
    return {name: _codec_of(name).decode(value, arrays) for name, value in encoded.items()}


def _encoded(name: str, value: Any, parameters: Mapping[str, Any], arrays: Mapping[str, NDArray]) -> Any:
    try:
        return _codec_of(name).encode(value, parameters, arrays)
    except (TypeError, ValueError) as error:  # of a value that was set after the fit
        raise ValueError(f"parameter {name}={value!r} cannot be saved: {error}") from error


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a value."""
    try:
        json.dumps(value, default=plain)
    except TypeError:
        return False
    return True


class _Codec:
    """How a parameter goes into a header and comes back; by default as it is."""

    def encode(self, value: Any, parameters: Mapping[str, Any], arrays: Mapping[str, NDArray]) -> Any:
        """What stands for the value, given all parameters and what the file holds of the fit."""
        return value

    def decode(self, value: Any, arrays: Mapping[str, NDArray]) -> Any:
        """The inverse."""
        return value


@dataclass(frozen=True)
class _PartCodec(_Codec):
    """Objects of registered classes; names stay names."""

    registry: dict[str, type]

    def encode(self, value: Any, parameters: Mapping[str, Any], arrays: Mapping[str, NDArray]) -> Any:
        return described(value, self.registry) if type(value) in self.registry.values() else value

    def decode(self, value: Any, arrays: Mapping[str, NDArray]) -> Any:
        return rebuilt(value, self.registry) if isinstance(value, dict) else value


@dataclass(frozen=True)
class _EquivalentCodec(_Codec):
    """What has an equivalent that JSON holds, such as a name, which the loaded model goes on with."""

    equivalent: Callable[[Any], Any]

    def encode(self, value: Any, parameters: Mapping[str, Any], arrays: Mapping[str, NDArray]) -> Any:
        return None if value is None else self.equivalent(value)


class _ClassWeightCodec(_Codec):
    """A dict as lists, as the keys of JSON are text and labels need not be."""

    def encode(self, value: Any, parameters: Mapping[str, Any], arrays: Mapping[str, NDArray]) -> Any:
        return {"keys": list(value), "values": list(value.values())} if isinstance(value, dict) else value

    def decode(self, value: Any, arrays: Mapping[str, NDArray]) -> Any:
        return dict(zip(value["keys"], value["values"], strict=True)) if isinstance(value, dict) else value


class _GatesCodec(_Codec):
    """Gates and what makes them: None, for which the gates of the fit stand; names stay names."""

    def encode(self, value: Any, parameters: Mapping[str, Any], arrays: Mapping[str, NDArray]) -> Any:
        if isinstance(value, str):
            return value
        if "u1" in arrays:
            return None
        # A model without gates does not use them.
        return GATE_DEFAULTS["gates"] if parameters.get("activation") == "linear" else value

    def decode(self, value: Any, arrays: Mapping[str, NDArray]) -> Any:
        return Gates(arrays["u1"], arrays["u2"]) if value is None else value


def _form_name(form: Any) -> Any:
    return form.name if form in FORMS.values() else form


def _grid(alphas: Any) -> Any:
    return alphas if is_integer(alphas) else check_grid(alphas)


_CODECS: dict[str, _Codec] = {
    "alphas": _EquivalentCodec(_grid),
    "class_weight": _ClassWeightCodec(),
    "device": _EquivalentCodec(str),
    "dtype": _EquivalentCodec(dtype_name),
    "form": _EquivalentCodec(_form_name),
    "gates": _GatesCodec(),
    "loss": _PartCodec(LOSSES),
    "penalty": _PartCodec(PENALTIES),
    "rho": _PartCodec(RHO_CLASSES),
}
_AS_IT_IS = _Codec()


def _codec_of(name: str) -> _Codec:
    return _CODECS.get(name, _AS_IT_IS)

"""Base classes that all estimators share: data, losses, certificates and the state of a fit that a file holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from convexformer.nn.training.samples import NetworkSamples, ShardedNetworkSamples
from convexformer.programs.samples import COPIES
from convexformer.targets import SavedState, Targets
from convexformer.validation import check_device, check_flag
from convexformer_solvers import LOSSES, Callback, Certificate, Loss, Penalty, Program, Solver, SolverResult, Status
from convexformer_solvers.distributed import Sharded, ShardedMap
from convexformer_solvers.linear_maps.parts import InParts
from convexformer_solvers.validation import as_dtype, check_callback

from .samples import read_samples


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

    _n_copies = COPIES

    n_features_in_: int
    n_tokens_in_: int
    _n_dims: int
    _of_all_ranks: type[Sharded] = ShardedMap  # what a fit gets for the samples of all ranks of a process group

    def _read_samples(self, X: Any, reset: bool, part: slice | None = None) -> Any:
        """Checked samples, or a part of those at a path; they have a length and a device."""
        return read_samples(self, X, reset, part)

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
        n_tokens = getattr(self, "n_tokens_in_", None)  # None where samples may have any number
        header: dict[str, Any] = {"shape": [self._n_dims, n_tokens, self.n_features_in_]}
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
        self._n_dims, n_tokens, self.n_features_in_ = header["shape"]
        if n_tokens is not None:
            self.n_tokens_in_ = n_tokens
        if "feature_names" in header:
            self.feature_names_in_ = np.array(header["feature_names"], dtype=object)


class TargetEstimator(TokenEstimator):
    """An estimator that is fitted to targets: a file holds how these read, and the loss.

    ``RegressionMixin`` and ``ClassificationMixin`` define the first two methods.
    """

    loss_: Loss
    _targets: Targets

    def _read_targets(
        self, y: Any, n_samples: int, sample_weight: NDArray[np.float64] | None
    ) -> tuple[Targets, Loss, NDArray]:
        """Check ``y``: how it reads, the loss, and the checked array."""
        raise NotImplementedError

    def _restored_targets(self, header: dict[str, Any], arrays: dict[str, NDArray], loss: Loss) -> Targets:
        """How ``y`` read in the fit of a file."""
        raise NotImplementedError

    def _saved_state(self) -> SavedState:
        header, arrays = super()._saved_state()
        target_header, target_arrays = self._targets._saved_state()
        return header | {"loss": described(self.loss_, LOSSES)} | target_header, arrays | target_arrays

    def _restore_state(self, header: dict[str, Any], arrays: dict[str, NDArray]) -> None:
        super()._restore_state(header, arrays)
        self.loss_ = rebuilt(header["loss"], LOSSES)
        self._targets = self._restored_targets(header, arrays, self.loss_)


class NetworkEstimator(TokenEstimator):
    """An estimator that trains a network on samples in memory."""

    memory_limit = None
    _n_copies = 0  # samples of a path are read into memory, whatever their size
    _of_all_ranks = ShardedNetworkSamples

    network_: Any
    dtype: Any
    device: Any

    def _read_samples(self, X: Any, reset: bool, part: slice | None = None) -> Any:
        if isinstance(X, InParts):  # read before, by this fit
            return X
        tokens = self._placed(cast(Tensor, read_samples(self, X, reset, part)))
        if reset:
            tokens = tokens.to(check_device(self.device, tokens.device), as_dtype(self.dtype, tokens.dtype))
        return NetworkSamples(tokens)

    def _new_tokens(self, X: Any) -> Tensor:
        """Checked tokens, in the precision and on the device of the network."""
        check_is_fitted(self)
        return self._read_samples(X, reset=False).tokens.to(next(self.network_.parameters()))

    def _placed(self, tokens: Tensor) -> Tensor:
        """Checked tokens as the network takes them."""
        return tokens


_WEIGHT = "weight:"  # before the names of a network's tensors


def saved_weights(network: nn.Module) -> dict[str, NDArray]:
    """The tensors of a network's state, under names that no other array of a file has."""
    state = network.state_dict().items()
    return {_WEIGHT + name: value.numpy(force=True) for name, value in state if torch.is_tensor(value)}


def restored_weights(arrays: dict[str, NDArray]) -> dict[str, Any]:
    """The tensors that ``saved_weights`` had, for ``load_state_dict(..., assign=True)``."""
    names = [name for name in arrays if name.startswith(_WEIGHT)]
    return {name.removeprefix(_WEIGHT): torch.as_tensor(arrays[name]) for name in names}


_Fit = TypeVar("_Fit", bound=Callable[..., Any])


def unchanged_on_failure(fit: _Fit) -> _Fit:
    """Decorator of ``fit``: one that fails leaves the estimator as it was.

    So does an interrupted one that has no certificate and no network yet; otherwise what it has stored is kept.
    """

    @wraps(fit)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = dict(vars(self))
        try:
            return fit(self, *args, **kwargs)
        except BaseException as error:
            results = ("certificate_", "certificates_", "network_")
            if isinstance(error, Exception) or all(vars(self).get(name) is before.get(name) for name in results):
                vars(self).clear()
                vars(self).update(before)
            raise

    return cast(_Fit, wrapped)


@dataclass(eq=False, repr=False, kw_only=True)
class SolveParameters:
    """Parameters of estimators that solve a program."""

    loss: str | Loss = "squared"
    penalty: str | Penalty = "group_l2"
    solver: str | Solver = "auto"
    tol: float = 1e-4
    max_iter: int = 10_000
    fit_intercept: bool = True
    dtype: Any = None
    device: Any = None
    memory_limit: int | str | None = None
    verbose: bool = False
    callback: Callback | None = None


class CertifiedEstimator(SolveParameters, TokenEstimator):
    """What every estimator asks of ``solve``, and what it keeps of the answer besides the network."""

    _solution: tuple[Tensor, Tensor]  # coefficients and intercept of the program

    def _placed_samples(self, X: Any, reset: bool = False) -> Any:
        """Checked samples on the device of the estimator."""
        samples = self._read_samples(X, reset)
        return samples.to(device=check_device(self.device, samples.device))

    def _options(self, program: Program) -> dict[str, Any]:
        """Keyword arguments of ``solve``."""
        check_callback(self.callback, "a Progress")  # which may be called by one of ours
        options = {name: getattr(self, name) for name in ("tol", "max_iter", "callback")}
        dtype, verbose = as_dtype(self.dtype, program.map.dtype), check_flag(self.verbose, "verbose")
        return options | {"dtype": dtype, "verbose": verbose}

    def _store_certificate(self, program: Program, result: SolverResult) -> None:
        dual_point = result.certificate.dual_point
        self.certificate_ = replace(result.certificate, dual_point=None if dual_point is None else dual_point.cpu())
        self.dual_gap_ = self.certificate_.gap
        self.status_, self.history_, self.n_iter_ = result.status, result.history, result.n_iter
        self.alpha_max_ = program.alpha_max
        self.traffic_ = program.map.traffic()

    def _saved_state(self) -> SavedState:
        header, arrays = super()._saved_state()
        certificate = self.certificate_
        figures = {
            "certificate": [certificate.primal, certificate.dual, certificate.reference],
            "alpha_max": self.alpha_max_,
            "n_iter": self.n_iter_,
            "status": self.status_.name,
        }
        coef, intercept = (part.numpy() for part in self._solution)
        return header | figures, arrays | {"coef": coef, "intercept": intercept}

    def _restore_state(self, header: dict[str, Any], arrays: dict[str, NDArray]) -> None:
        super()._restore_state(header, arrays)
        self.certificate_ = Certificate(*header["certificate"])
        self.dual_gap_, self.traffic_ = self.certificate_.gap, None
        self.alpha_max_, self.n_iter_, self.status_ = header["alpha_max"], header["n_iter"], _status(header["status"])
        self._solution = (torch.as_tensor(arrays["coef"]), torch.as_tensor(arrays["intercept"]))


def _status(name: Any) -> Status:
    """The status of that name."""
    known = [status.name for status in Status]
    if name not in known:
        raise ValueError(f"the status of a saved fit must be one of {known}, got {name!r}")
    return Status[name]


def described(part: Any, registry: dict[str, type]) -> dict[str, Any]:
    """A loss, penalty or rho of a registered class, as a header holds it.

    Examples
    --------
    >>> from convexformer.solvers import LOSSES, Huber
    >>> described(Huber(delta=0.5), LOSSES)
    {'name': 'huber', 'delta': 0.5}
    """
    name = next((name for name, cls in registry.items() if cls is type(part)), None)
    if name is None:
        raise ValueError(
            f"{part!r} cannot be saved, as its class is not registered; enter it in LOSSES or PENALTIES of "
            "convexformer.solvers or RHO_CLASSES of convexformer.unfolded.rho, here and where it is loaded"
        )
    # what the constructor takes, not what a part has computed and kept
    return {"name": name} | {argument: getattr(part, argument) for argument in inspect.signature(type(part)).parameters}


def rebuilt(description: dict[str, Any], registry: dict[str, type]) -> Any:
    """The loss, penalty or rho that ``described`` had.

    Examples
    --------
    >>> from convexformer.solvers import LOSSES
    >>> rebuilt({"name": "huber", "delta": 0.5}, LOSSES)
    Huber(delta=0.5)
    """
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in description.items()}
    name = fields.pop("name")
    if name not in registry:
        raise ValueError(
            f"the model was saved with {name!r}, which is not registered here; enter its class in LOSSES or PENALTIES "
            "of convexformer.solvers or RHO_CLASSES of convexformer.unfolded.rho before it is loaded"
        )
    return registry[name](**fields)

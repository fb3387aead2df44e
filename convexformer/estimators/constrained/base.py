"""What descent-constrained estimators share: training under the constraints and what is left of it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from convexformer.constrained import ConstrainedTrainingInterrupted, FeasibilityReport, PrimalDual
from convexformer.estimators.tokens import NetworkEstimator, SavedState, restored_weights, saved_weights
from convexformer.validation import check_integers, check_stream, is_integer
from convexformer_solvers.validation import is_real

# Parameters of the estimators that are options of the trainer by the same name.
_TRAINER_OPTIONS = ("alpha", "objective", "resilience", "dual_lr", "stop_gradient", "lr", "weight_decay", "batch_size")


@dataclass(eq=False, repr=False)
class DescentConstrainedBase(NetworkEstimator):
    """What the classifier and the denoiser share: training under the constraints and what is left of it."""

    alpha: float = 0.1
    _: KW_ONLY
    c_ref: float | None = None
    n_layers: int = 3
    shared: bool = False
    objective: str = "constrained"
    resilience: float | None = None
    dual_lr: float = 1e-2
    stop_gradient: bool = False
    lr: float = 1e-3
    weight_decay: float = 0.0
    batch_size: int = 32
    n_epochs: int = 50
    validation_fraction: float = 0.2
    dtype: Any = None
    device: Any = None
    random_state: Any = None
    verbose: bool = False

    def _train(
        self, network: nn.Module, layer_losses: Any, data: list[Tensor], groups: NDArray, c_ref: float, seed: int
    ) -> None:
        """Train a network and set the attributes that follow from it."""
        options = {name: getattr(self, name) for name in _TRAINER_OPTIONS}
        trainer = PrimalDual(network, layer_losses, c_ref=c_ref, seed=seed, **options)
        training, held_out = self._split(data, groups, seed)
        try:
            trainer.fit(training, n_epochs=self.n_epochs, validation=held_out, verbose=self.verbose)
        except ConstrainedTrainingInterrupted:
            if trainer.history_.losses:
                self._store(trainer)
            raise
        self._store(trainer)

    def _training_samples(self, X: Any) -> Any:
        """Checked samples, in the precision and on the device of training."""
        check_integers(2, n_layers=self.n_layers)
        return self._read_samples(X, reset=True)

    def _split(self, data: list[Tensor], groups: NDArray, seed: int) -> tuple[list[Tensor], list[Tensor] | None]:
        """Training samples, with one of each group at least, and those that are held out, if any."""
        fraction = self.validation_fraction
        if not (is_real(fraction) and 0 <= fraction < 1):
            raise ValueError(f"validation_fraction must be a number from 0 and below 1, got {fraction!r}")
        count = len(data[0])
        n_held_out = round(fraction * count)
        if n_held_out == 0:
            return data, None
        drawn = np.random.default_rng(seed).permutation(count)
        last = count - 1 - np.unique(groups[drawn][::-1], return_index=True)[1]  # of each group
        if n_held_out > count - len(last):
            of_class = " of some class" if len(last) > 1 else ""
            raise ValueError(
                f"validation_fraction={fraction} leaves no sample{of_class} for training; give a smaller one"
            )
        chosen = np.delete(np.arange(count), last)[:n_held_out]
        held_out, kept = (
            torch.as_tensor(index, device=data[0].device) for index in (drawn[chosen], np.delete(drawn, chosen))
        )
        return [part[kept] for part in data], [part[held_out] for part in data]

    def _store(self, trainer: PrimalDual) -> None:
        """Keep what training left, of weights that have been judged."""
        self.network_ = trainer.model.requires_grad_(False).eval()
        self.history_ = trainer.history_
        self.duals_ = trainer.duals_.cpu().numpy()
        self._store_report(trainer.report_)
        self.n_iter_ = len(trainer.history_.losses)

    def _store_report(self, report: FeasibilityReport) -> None:
        self.report_, self.feasible_, self.layer_losses_ = report, report.feasible, report.losses

    def _make_network(self, seed: int = 0) -> nn.Module:
        """A network with the options of the fit and the first weights of a seed."""
        raise NotImplementedError

    def _saved_state(self) -> SavedState:
        header, arrays = super()._saved_state()
        fit = {"network": self._options, "n_iter": self.n_iter_}
        report = {f"report:{each.name}": np.asarray(getattr(self.report_, each.name)) for each in fields(self.report_)}
        return header | fit, arrays | report | {"duals": self.duals_} | saved_weights(self.network_)

    def _restore_state(self, header: dict[str, Any], arrays: dict[str, NDArray]) -> None:
        super()._restore_state(header, arrays)
        self._options, self.n_iter_, self.duals_ = header["network"], header["n_iter"], arrays["duals"]
        report: dict[str, Any] = {each.name: arrays[f"report:{each.name}"] for each in fields(FeasibilityReport)}
        numbers = {name: value if value.ndim else value.item() for name, value in report.items()}
        self._store_report(FeasibilityReport(**numbers))
        self.network_ = self._make_network()
        self.network_.load_state_dict(restored_weights(arrays), assign=True)
        self.network_.requires_grad_(False).eval()

    def _seed(self) -> int:
        return int(check_stream(self.random_state).randint(2**31))

    def _check_max_layers(self, max_layers: int | None) -> int:
        n_layers = len(self.layer_losses_)  # as fitted, whatever the parameter is now
        if max_layers is None:
            return n_layers
        if not is_integer(max_layers, 1) or max_layers > n_layers:
            raise ValueError(f"max_layers must be an integer from 1 to {n_layers}, got {max_layers!r}")
        return int(max_layers)

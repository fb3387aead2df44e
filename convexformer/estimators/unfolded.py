"""Unfolded transformers as estimators: trained layers, a certified readout, and a report of their energies."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from convexformer.heads import Heads, optimality_gap
from convexformer.nn import TrainingInterrupted, train
from convexformer.nn.training.samples import NetworkSamples
from convexformer.targets import Targets
from convexformer.unfolded import DescentReport, UnfoldedNetwork, descent_report
from convexformer.unfolded.networks import POOLINGS
from convexformer.validation import (
    all_finite,
    as_tensor,
    check_flag,
    check_one_of,
    check_optional_counts,
    check_stream,
    check_weight,
)
from convexformer_solvers import PENALTIES, Certificate, DenseMap, Loss, Penalty, get_penalty

from .attention import ClassificationMixin, RegressionMixin
from .parameters import decode_parameters, encode_parameters
from .samples import across_ranks
from .tokens import (
    NetworkEstimator,
    SavedState,
    TargetEstimator,
    described,
    rebuilt,
    restored_weights,
    saved_weights,
    unchanged_on_failure,
)

# What of the parameters makes the layers of the network.
_LAYER_OPTIONS = ("n_layers", "mode", "shared", "anchored", "rho", "attention", "eigenvalue_limit")
# Parameters of the estimators that are options of ``train`` by the same name.
_TRAINING_OPTIONS = ("alpha", "lr", "n_steps", "callback", "verbose")


@dataclass(eq=False, repr=False)
class UnfoldedTransformerBase(TargetEstimator, NetworkEstimator):
    """What regression and classification share: training the layers, certifying the readout, measuring descent."""

    alpha: float = 1e-3
    _: KW_ONLY
    n_layers: int = 6
    mode: str = "joint"
    shared: bool = True
    anchored: bool = True
    rho: Any = "exp"
    attention: str = "softmax"
    eigenvalue_limit: float | None = 0.95
    width: int | None = None
    pooling: str = "auto"
    n_heads: int = 32
    refit_readout: bool = True
    loss: str | Loss = "squared"
    penalty: str | Penalty = "group_l2"
    lr: Any = 1e-2
    n_steps: int = 300
    batch_size: int | None = None
    tol: float = 1e-4
    max_iter: int = 10_000
    dtype: Any = None
    device: Any = None
    random_state: Any = None
    verbose: bool = False
    callback: Any = None

    @unchanged_on_failure
    @across_ranks
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train layers and readout by Adam, then replace the readout by its certified optimum.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens), path or source
            Token sequences; zero rows at the end of a sample are padding, as ``pad_sequences`` makes them. Each column
            of two-dimensional data is a token of width 1, and nothing is padding. What ``open_source`` takes, as the
            path of a file or a folder of shards, is read into memory. Under ``torchrun`` each rank gives its own
            samples, or all give one path, of which each reads its part.
        y : array-like of shape (n_samples,) or (n_samples, n_outputs), or path
            Targets. For a classifier: labels of shape (n_samples,), or a matrix of 0 and 1 with a column for each of
            several labels that a sample may have. A path, as ``"shards"`` or ``"data.npz:y"``, is read into memory.
        sample_weight : array-like of shape (n_samples,), or path, optional
            Non-negative weights; only ratios matter.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            If an argument or a parameter is not as described; the message names it.
        TrainingInterrupted
            On Ctrl-C, a ``KeyboardInterrupt``. The estimator is usable: it has the best weights so far, and the
            readout that was trained.

        Warns
        -----
        ConvergenceWarning
            If the certified relative gap of the readout did not come within ``tol``.
        RuntimeWarning
            If training diverged with every learning rate.
        """
        refit = check_flag(self.refit_readout, "refit_readout")
        check_optional_counts(batch_size=self.batch_size)
        penalty = get_penalty(self.penalty)
        samples = self._read_samples(X, reset=True)
        weight = check_weight(sample_weight, len(samples))
        targets, loss, labels = self._read_targets(y, len(samples), weight)
        total = targets.weight(labels, weight)
        encoded = as_tensor(targets.encode(labels), samples.device).to(samples.dtype)
        self._options = self._network_options()
        seed = int(check_stream(self.random_state).randint(2**31))
        network = UnfoldedNetwork(n_outputs=encoded.shape[1], seed=seed, **self._options).to(encoded)
        trained, inputs = samples.for_training(network)
        options = {name: getattr(self, name) for name in _TRAINING_OPTIONS}
        options["batch_size"] = None if self.batch_size is None else min(self.batch_size, len(samples))
        try:
            self.history_ = train(trained, inputs, encoded, loss=loss, penalty=penalty, sample_weight=total, **options)
        except TrainingInterrupted as interruption:
            self.history_ = interruption.history
            self._store(network, targets, loss, penalty, samples)
            raise
        self._store(network, targets, loss, penalty, samples)
        if refit:
            self._certify(samples, encoded, total)
        return self

    def _network_options(self) -> dict[str, Any]:
        """Arguments of the network that follow from the parameters and the shape of the data."""
        check_one_of(("auto", *POOLINGS), pooling=self.pooling)
        pooling = ("tokens" if self._n_dims == 2 else "mean") if self.pooling == "auto" else self.pooling
        n_features = 1 if self._n_dims == 2 else self.n_features_in_
        shape = {"n_tokens": self.n_tokens_in_, "n_features": n_features, "padded": self._n_dims == 3}
        sizes = {"width": self.width, "pooling": pooling, "n_heads": self.n_heads}
        return {**shape, **sizes, **{name: getattr(self, name) for name in _LAYER_OPTIONS}}

    def _store(self, network: UnfoldedNetwork, targets: Targets, loss: Loss, penalty: Penalty, samples: Any) -> None:
        """Set every attribute that follows from the trained network."""
        for name in ("certificate_", "optimality_gap_"):  # of an earlier fit
            self.__dict__.pop(name, None)
        self.network_, self._targets = network.requires_grad_(False), targets
        self.loss_, self.penalty_ = loss, penalty
        self.n_iter_ = self.history_.kept_step
        self.descent_ = self._descent(samples)
        self.energies_ = self.descent_.energies

    def _certify(self, samples: Any, encoded: Tensor, sample_weight: NDArray[np.float64] | None) -> None:
        """Replace the readout by the certified optimum on the tokens of the last layer."""
        if sample_weight is not None and not sample_weight.all():  # tokens of what has no weight may be infinite
            counted = torch.as_tensor(np.flatnonzero(sample_weight))
            samples, encoded, sample_weight = samples.rows(counted), encoded[counted], sample_weight[counted]
        self.optimality_gap_ = optimality_gap(
            self.network_.readout,
            samples.map_made(_features, network=self.network_, batch_size=self.batch_size),
            encoded,
            self.alpha,
            loss=self.loss_,
            penalty=self.penalty_,
            sample_weight=sample_weight,
            tol=self.tol,
            max_iter=self.max_iter,
            device=samples.device,
            verbose=self.verbose,
        )
        refit = self.optimality_gap_.refit
        assert isinstance(refit, Heads)
        self.network_.readout = refit.to_torch().to(encoded).requires_grad_(False)
        self.certificate_: Certificate = self.optimality_gap_.certificate

    def _descent(self, samples: Any) -> DescentReport:
        reports = samples.each_part(_descent, network=self.network_)
        energies = np.concatenate([report.energies for report in reports], 2)
        return replace(reports[0], energies=energies, rose=np.concatenate([report.rose for report in reports], 1))

    def descent_report(self, X: ArrayLike) -> DescentReport:
        """Energies of samples before and after each layer, and where they rose.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens), path or source
            As in ``fit``; under ``torchrun`` the report is that of the samples that the rank gives.

        Returns
        -------
        DescentReport
        """
        return self._descent(NetworkSamples(self._new_tokens(X)))

    def _outputs(self, X: ArrayLike) -> Tensor:
        """Raw outputs, shape ``(N, c)``."""
        tokens = self._new_tokens(X)
        with torch.no_grad():
            return _of_finite(torch.cat([self.network_(part) for part in _batches(tokens, self.batch_size)]))

    def _saved_state(self) -> SavedState:
        header, arrays = super()._saved_state()
        readout = self.network_.readout
        fit = {
            "penalty": described(self.penalty_, PENALTIES),
            "n_iter": self.n_iter_,
            "readout": [*readout.w3.shape, readout.simplex],
            "guarantee": [self.descent_.guaranteed, self.descent_.reason],
            "network": encode_parameters(self._options, arrays)[0],
        }
        if hasattr(self, "certificate_"):
            certificate = self.certificate_
            fit["certificate"] = [certificate.primal, certificate.dual, certificate.reference]
        descent = {"energies": self.descent_.energies, "rose": self.descent_.rose}
        return header | fit, arrays | descent | saved_weights(self.network_)

    def _restore_state(self, header: dict[str, Any], arrays: dict[str, NDArray]) -> None:
        super()._restore_state(header, arrays)
        self.penalty_ = rebuilt(header["penalty"], PENALTIES)
        n_heads, n_outputs, simplex = header["readout"]
        # Files that do not hold the options were written of fits by the parameters.
        known = header.get("network")
        self._options = self._network_options() if known is None else decode_parameters(known, arrays)
        network = UnfoldedNetwork(n_outputs=n_outputs, seed=0, **self._options)
        shape = (network.readout.w1.shape[1], network.readout.w2.shape[1], n_outputs, n_heads)
        network.readout = type(network.readout)(*shape, simplex=simplex)
        state = {"readout._extra_state": network.readout.get_extra_state()}
        network.load_state_dict(state | restored_weights(arrays), assign=True)
        self.network_ = network.requires_grad_(False)
        self.n_iter_ = header["n_iter"]
        self.descent_ = DescentReport(arrays["energies"], arrays["rose"], *header["guarantee"])
        self.energies_ = self.descent_.energies
        if "certificate" in header:
            self.certificate_ = Certificate(*header["certificate"])


def _batches(tokens: Tensor, batch_size: int | None) -> tuple[Tensor, ...]:
    return tokens.split(int(batch_size or len(tokens)))


@torch.no_grad()
def _features(samples: NetworkSamples, network: UnfoldedNetwork, batch_size: int | None) -> DenseMap:
    """What the readout sees."""
    return DenseMap(_of_finite(torch.cat([network.features(part) for part in _batches(samples.tokens, batch_size)])))


def _of_finite(values: Tensor) -> Tensor:
    """What layers make of finite samples; ``ValueError`` where it is not finite, too."""
    if not all_finite(values):
        raise ValueError("X is too large for the tokens of all layers to be finite; scale the features to about one")
    return values


@torch.no_grad()
def _descent(samples: NetworkSamples, network: UnfoldedNetwork) -> DescentReport:
    tokens = samples.tokens
    present = None if not network.padded else network.prepared(tokens)[1]
    return descent_report(network.transformer, network.embedded(tokens), present)


class UnfoldedTransformerRegressor(RegressionMixin, UnfoldedTransformerBase):
    r"""Regression by a transformer whose layers lower an energy, with a certified readout.

    Layers and readout are trained together by Adam on

    .. math:: \frac{1}{\sum_i s_i} \sum_i s_i \, L\big(\mathrm{readout}(Y^{(L)}(X_i)), y_i\big)
              + \alpha \cdot \mathrm{decay}(\mathrm{readout}),

    which is not convex. With the layers fixed the problem in the readout is: it is solved to a certified global optimum
    then, which replaces the trained readout.

    Parameters
    ----------
    alpha : float, default=1e-3
        Weight of the decay of the readout against the mean loss; positive.
    n_layers : int, default=6
        Layers.
    mode : {"joint", "aim"}, default="joint"
        ``"joint"``: each layer is a proximal gradient step of its energy and never raises it. ``"aim"``: softmax
        attention and a linear map as in [U] eq. (20), which may.
    shared : bool, default=True
        Whether all layers have the same weights, and so lower one energy.
    anchored : bool, default=True
        Whether the energy holds the tokens near to the input, without which they become equal within a few layers.
    rho : {"exp", "log1", "log2"} or Rho, default="exp"
        Function of the energy; ``"exp"`` is that of softmax attention.
    attention : {"softmax", "jacobi"}, default="softmax"
        Mode of the attention, see ``EnergyAttention``.
    eigenvalue_limit : float or None, default=0.95
        Bound of the eigenvalues of the weight of the feed-forward part, see ``UnfoldedLayer``.
    width : int, optional
        Width of the tokens in the layers, to which a trained linear map takes the input. Default: that of the data.
    pooling : {"auto", "mean", "tokens"}, default="auto"
        What the readout sees: the mean over tokens, or every token by its position. ``"auto"``: the mean for
        three-dimensional ``X``, as is usual for text, and all tokens for two-dimensional ones, whose columns differ in
        meaning.
    n_heads : int, default=32
        Heads of the readout while it is trained; the certified one has as many as it needs.
    refit_readout : bool, default=True
        Whether to replace the trained readout by its certified optimum.
    loss : {"squared", "huber", "poisson", "softmax"} or Loss, default="squared"
        As in ``ConvexAttentionRegressor``.
    penalty : {"group_l2", "nuclear"} or Penalty, default="group_l2"
        Convex form of the decay of the readout.
    lr : float or sequence of float, default=1e-2
        First learning rate of Adam, or several of which that of the least objective is kept.
    n_steps : int, default=300
        Steps of Adam with each learning rate.
    batch_size : int, optional
        Samples of a step. Default: all.
    tol, max_iter : float and int, default=1e-4 and 10000
        Certified relative gap of the readout, and iterations at most.
    dtype : {None, "float32", "float64"}, default=None
        Precision of the network. Default: that of ``X``, float32 for half precision. Energies and certificates are in
        float64.
    device : str or torch.device, optional
        Where to train. Default: that of ``X``, or the CPU.
    random_state : int, RandomState or None, default=None
        Of the initial weights.
    verbose : bool, default=False
        Whether to show progress bars.
    callback : callable, default=None
        As in ``convexformer.nn.train``: called with the steps done and the objective; returning True ends training.

    Attributes
    ----------
    network_ : UnfoldedNetwork
        The network, frozen.
    history_ : TrainingHistory
        Of the training.
    n_iter_ : int
        Steps of the weights that were kept.
    certificate_ : Certificate
        Of the readout on the tokens of the last layer; absent with ``refit_readout=False``. It says nothing of the
        layers, whose training is not convex.
    optimality_gap_ : OptimalityGap
        The readout that Adam found beside its certified optimum; absent with ``refit_readout=False``.
    descent_ : DescentReport
        Energies on the training samples before and after each layer, where they rose, and what theory promises.
    energies_ : ndarray of shape (n_layers, 2, n_samples)
        Those of ``descent_``.
    loss_, penalty_ : Loss, Penalty
        The instances used.
    n_features_in_ : int
        Features per token, or columns of two-dimensional ``X``.
    n_tokens_in_ : int
        Tokens per sample.

    Examples
    --------
    >>> import numpy as np
    >>> from convexformer import UnfoldedTransformerRegressor
    >>> X = np.random.default_rng(0).normal(size=(60, 5, 4))
    >>> y = X[:, :, 0].mean(1) + np.abs(X[:, :, 1]).mean(1)
    >>> model = UnfoldedTransformerRegressor(alpha=1e-3, n_layers=3, n_steps=100, random_state=0).fit(X, y)
    >>> model.certificate_.relative_gap <= 1e-4, model.descent_.first_rise is None
    (True, True)
    >>> model.certificate_.primal <= model.history_.final_objective
    True
    """


@dataclass(eq=False, repr=False)
class UnfoldedTransformerClassifier(ClassificationMixin, UnfoldedTransformerBase):
    r"""Classification by a transformer whose layers lower an energy, with a certified readout.

    Everything is as in ``UnfoldedTransformerRegressor``, with a loss of labels.

    Parameters
    ----------
    alpha, n_layers, mode, shared, anchored, rho, attention, eigenvalue_limit, width, pooling, n_heads, refit_readout
        As in ``UnfoldedTransformerRegressor``.
    loss : {"auto", "logistic", "softmax", "squared_hinge"} or Loss, default="auto"
        As in ``ConvexAttentionClassifier``.
    penalty, lr, n_steps, batch_size, tol, max_iter
        As in ``UnfoldedTransformerRegressor``.
    class_weight : dict, "balanced" or None, default=None
        Factors on the weights of classes, as in scikit-learn.
    dtype, device, random_state, verbose, callback
        As in ``UnfoldedTransformerRegressor``.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Sorted labels; numbers of the columns of ``y`` for several labels per sample.
    network_, history_, n_iter_, certificate_, optimality_gap_, descent_, energies_, loss_, penalty_
        As in ``UnfoldedTransformerRegressor``.
    n_features_in_, n_tokens_in_ : int
        Shape of a sample.

    Examples
    --------
    >>> import numpy as np
    >>> from convexformer import UnfoldedTransformerClassifier
    >>> X = np.random.default_rng(0).normal(size=(80, 5, 4))
    >>> y = np.where(X[:, :, 0].mean(1) > 0, "more", "less")
    >>> model = UnfoldedTransformerClassifier(alpha=1e-3, n_layers=3, n_steps=100, random_state=0).fit(X, y)
    >>> model.score(X, y) > 0.9, model.descent_.share
    (True, 0.0)
    """

    _: KW_ONLY
    loss: str | Loss = "auto"
    class_weight: Any = None

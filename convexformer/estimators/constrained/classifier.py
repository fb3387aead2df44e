"""A descent-constrained transformer that classifies and may leave early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.metaestimators import available_if
from torch import Tensor, nn

from convexformer.constrained.classifier import LayeredClassifier
from convexformer.estimators.attention import ClassificationMixin, has_probabilities
from convexformer.estimators.samples import across_ranks
from convexformer.estimators.tokens import TargetEstimator, unchanged_on_failure
from convexformer.nn import sample_losses
from convexformer.targets import LabelTargets
from convexformer.validation import Result, as_tensor, result_of
from convexformer_solvers import Loss

from .base import DescentConstrainedBase


@dataclass(eq=False, repr=False, kw_only=True)
class DescentConstrainedClassifier(ClassificationMixin, TargetEstimator, DescentConstrainedBase):
    r"""Classification by an unrolled transformer each of whose layers must lower the loss.

    .. math:: \min \; \ell_L \quad \text{subject to} \quad \ell_1 \le c_{\mathrm{ref}}, \;\;
              \ell_l \le (1 - \alpha) \ell_{l-1}

    for the mean losses of the predictions of the layers, which have one linear readout in common ([K]). As every layer
    predicts, ``predict(X, max_layers=k)`` stops after ``k`` of them.

    Training is not convex, and nothing is certified; ``feasible_`` says whether the constraints hold.

    Parameters
    ----------
    alpha : float, default=0.1
        Share by which each layer must lower the loss.
    c_ref : float, optional
        Loss that the first layer must come below. Default: that of the best constant prediction of all
        labels of ``fit``.
    n_layers : int, default=3
        Layers, two or more.
    shared : bool, default=False
        Whether all layers have the same weights.
    objective : {"constrained", "last", "sum"}, default="constrained"
        ``"last"``: usual training, of the last layer alone; ``"sum"``: the losses of all layers (deep supervision).
    resilience : float, optional
        Price of violations, see ``PrimalDual``. Default: hard constraints.
    loss : {"auto", "logistic", "softmax", "squared_hinge"} or Loss, default="auto"
        As in ``ConvexAttentionClassifier``.
    dual_lr : float, default=1e-2
        Step of the multipliers.
    stop_gradient : bool, default=False
        Whether the loss that a layer is compared with counts as a number. Otherwise the net weight of a layer's loss
        may be negative and training then raises that loss.
    lr : float, default=1e-3
        Learning rate of the weights.
    weight_decay : float, default=0.0
        Decay of the weights.
    batch_size : int, default=32
        Samples of a batch; the last of an epoch may have fewer.
    n_epochs : int, default=50
        Epochs.
    validation_fraction : float, default=0.2
        Share of the samples that is held out, never the last of a class. Feasibility is judged on it, and the epoch
        that is kept is the best by it, as in ``PrimalDual.fit``. 0: all samples are for training, feasibility is judged
        on these, and the last epoch is kept.
    class_weight : dict, "balanced" or None, default=None
        Factors on the weights of classes, as in scikit-learn.
    dtype : {None, "float32", "float64"}, default=None
        Precision of the network. Default: that of ``X``, float32 for half precision.
    device : str or torch.device, optional
        Where to train. Default: that of ``X``, or the CPU.
    random_state : int, RandomState or None, default=None
        Of the initial weights, the split and the order of the samples.
    verbose : bool, default=False
        Whether to show a progress bar.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Sorted labels.
    network_ : LayeredClassifier
        The network, frozen.
    duals_ : ndarray of shape (n_layers,)
        Multipliers at the end.
    feasible_ : bool
        Whether the constraints, less the slacks of `resilience`, hold on the held-out samples within a standard error.
    layer_losses_ : ndarray of shape (n_layers,)
        Mean losses of the layers there.
    report_ : FeasibilityReport
        The violations with their standard errors, and statistics of the layers.
    history_ : ConstrainedHistory
        Of training.
    n_iter_ : int
        Epochs.
    loss_ : Loss
        The instance used.
    n_features_in_, n_tokens_in_ : int
        Shape of a sample.

    Examples
    --------
    >>> import numpy as np
    >>> from convexformer import DescentConstrainedClassifier
    >>> X = np.random.default_rng(0).normal(size=(200, 5, 4))
    >>> y = np.where(X[:, :, 0].mean(1) > 0, "more", "less")
    >>> model = DescentConstrainedClassifier(alpha=0.05, lr=0.01, n_epochs=60, random_state=1).fit(X, y)
    >>> model.feasible_, model.score(X, y) > 0.9, model.predict(X, max_layers=1).shape
    (True, True, (200,))
    """

    _counterpart: ClassVar[str] = "ConvexAttentionRegressor"  # there is none of its own kind

    loss: str | Loss = "auto"
    class_weight: Any = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = False  # samples are held out by class
        return tags

    @unchanged_on_failure
    @across_ranks
    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens), path or source
            Token sequences; zero rows at the end of a sample are padding. Each column of two-dimensional data is a
            token of its own: with two-dimensional ``X`` a token has one coordinate for each column, its value there.
            What ``open_source`` takes, as the path of a file or a folder of shards, is read into memory. Under
            ``torchrun`` each rank gives its own samples, or all give one path, of which each reads its part.
        y : array-like of shape (n_samples,), or path
            Labels. A path, as ``"shards"`` or ``"data.npz:y"``, is read into memory.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            If an argument or a parameter is not as described; the message names it.
        ConstrainedTrainingInterrupted
            On Ctrl-C, a ``KeyboardInterrupt``. The estimator is usable if an epoch was finished.

        Warns
        -----
        InfeasibleWarning
            If the constraints do not hold at the end.
        """
        samples = self._training_samples(X)
        targets, loss, labels = self._read_targets(y, len(samples), None)
        encoded = as_tensor(targets.encode(labels), samples.device).to(samples.dtype)
        self._targets, self.loss_ = targets, loss
        total = targets.weight(labels, None)
        share = torch.ones_like(encoded[:, 0]) if total is None else as_tensor(total, samples.device).to(encoded)
        if not bool(share.all()):  # the loss of what has no weight may be infinite
            counted = share.nonzero()[:, 0]
            samples, encoded, share = samples.rows(counted), encoded[counted], share[counted]
            labels = labels[counted.numpy(force=True)]
        share = share / share.mean()
        c_ref = self._constant_loss(loss, encoded, share) if self.c_ref is None else self.c_ref
        seed = self._seed()
        sizes = {"n_features": samples.n_features, "n_outputs": encoded.shape[1], "n_layers": self.n_layers}
        self._options = {**sizes, "shared": self.shared, "padded": self._n_dims == 3}
        network = self._make_network(seed).to(encoded)
        samples = samples.of(network)

        def layer_losses(network: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            index, y, share = batch
            outputs = samples.outputs(_outputs_by_sample, network, index)
            return torch.stack([share * sample_losses(of_layer, y, loss) for of_layer in outputs.unbind(1)])

        positions = torch.arange(len(samples), device=samples.device)
        self._train(network, layer_losses, [positions, encoded, share], labels, c_ref, seed)
        return self

    def _make_network(self, seed: int = 0) -> nn.Module:
        return LayeredClassifier(**self._options, seed=seed)

    def _placed(self, tokens: Tensor) -> Tensor:
        # Columns of two-dimensional data as tokens that differ: each has its value in a coordinate of its own.
        return torch.diag_embed(tokens[..., 0]) if self._n_dims == 2 else tokens

    def _constant_loss(self, loss: Loss, encoded: Tensor, share: Tensor) -> float:
        """Mean loss of the best constant prediction."""
        constant = loss.best_intercept(torch.zeros_like(encoded), encoded, share / len(share))
        return float((share * loss.value(constant.expand_as(encoded), encoded)).mean())

    def _layer_outputs(self, X: ArrayLike, max_layers: int | None = None) -> Tensor:
        tokens = self._new_tokens(X)
        count = self._check_max_layers(max_layers)
        with torch.no_grad():
            return self.network_.layer_outputs(tokens, max_layers=count)

    def _outputs(self, X: ArrayLike) -> Tensor:
        return self._layer_outputs(X)[-1]

    def predict(self, X: ArrayLike, max_layers: int | None = None) -> NDArray[Any]:
        """Predict labels, by the first layers alone where so many are asked for.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens)
            As in ``fit``.
        max_layers : int, optional
            Layers to run. Default: all.

        Returns
        -------
        ndarray of shape (n_samples,)
        """
        outputs = self._layer_outputs(X, max_layers)[-1]
        return cast(LabelTargets, self._targets).labels(outputs)

    @available_if(has_probabilities)
    def predict_proba(self, X: ArrayLike, max_layers: int | None = None) -> Result:
        """Predict class probabilities, by the first layers alone where so many are asked for.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens)
            As in ``fit``.
        max_layers : int, optional
            Layers to run. Default: all.

        Returns
        -------
        ndarray of shape (n_samples, n_classes)
            Rows sum to 1.
        """
        outputs = self._layer_outputs(X, max_layers)[-1]
        return result_of(cast(LabelTargets, self._targets).probabilities(outputs), X)

    def layer_outputs(self, X: ArrayLike) -> Result:
        """Outputs of every layer, for ``exit_curve``, ``early_exit`` and ``exit_tradeoff``.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens)
            As in ``fit``.

        Returns
        -------
        ndarray of shape (n_layers, n_samples, n_classes)
            Logits; of two classes with one output, zero and that output.
        """
        outputs = self._layer_outputs(X)
        outputs = torch.cat([torch.zeros_like(outputs), outputs], 2) if outputs.shape[2] == 1 else outputs
        return result_of(outputs, X)


def _outputs_by_sample(network: Any, tokens: Tensor, rows: Any) -> Tensor:
    """Outputs of every layer, shape ``(N, n_layers, n_outputs)``."""
    return network.layer_outputs(tokens).transpose(0, 1)

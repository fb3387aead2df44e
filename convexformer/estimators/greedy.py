"""Depth layer by layer: each layer a certified convex program on what the layers before it hand on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from convexformer.gates import Gates, GateSource, GivenGates, TrainingData, get_gate_source
from convexformer.programs.build import attention_map
from convexformer.validation import as_tensor, check_shape, check_stream, check_weight
from convexformer_solvers import LinearMap, Loss
from convexformer_solvers.linear_maps.base import widened
from convexformer_solvers.validation import check_counts

from .attention import ClassificationMixin, ConvexAttentionClassifier, ConvexAttentionRegressor, RegressionMixin
from .samples import across_ranks, read_samples
from .tokens import SavedState, SolveParameters, TokenEstimator, unchanged_on_failure


@dataclass(frozen=True)
class HandOn:
    """Predictions as further features of every token, centred and on the whole as large as the tokens in training."""

    centre: Tensor  # (c,)
    factor: float

    @classmethod
    def fitted(cls, tokens: Tensor | LinearMap, outputs: Tensor, sample_weight: NDArray[np.float64] | None) -> HandOn:
        weight = np.ones(len(tokens)) if sample_weight is None else sample_weight
        share = as_tensor(weight / weight.sum(), tokens.device)
        outputs = outputs.double().masked_fill((share == 0.0)[:, None], 0.0)
        centre = share @ outputs
        spread = (share @ (outputs - centre).square()).sum().sqrt().item()
        size = (attention_map(tokens).weighted_squares(share) / tokens.shape[1]).sqrt().item()
        # Constant predictions tell nothing, and rounding must not be blown up.
        constant = spread <= 1e-9 * outputs.abs().max().item()
        return cls(centre.cpu(), 0.0 if constant else size / spread)

    def __call__(self, tokens: Tensor | LinearMap, outputs: Tensor) -> Tensor | LinearMap:
        features = self.factor * (outputs - self.centre.to(outputs.device))
        return tokens.widened(features) if isinstance(tokens, LinearMap) else widened(tokens, features)


@dataclass(frozen=True)
class _EarlierGates(GateSource):
    """Gates of the layer before, blind to the features that it handed on, followed by new ones."""

    earlier: Gates
    more: GateSource | None

    @property
    def needs_data(self) -> bool:  # type: ignore[override]
        return self.more is not None and self.more.needs_data

    def make(self, data: TrainingData, random_state: np.random.RandomState) -> Gates:
        n_features = data.token_shape[1]
        blind = np.pad(self.earlier.u2, ((0, 0), (0, n_features - self.earlier.u2.shape[1])))
        if self.more is None:
            return Gates(self.earlier.u1, blind)
        new = self.more.make(data, random_state)
        if new.u2.shape[1] != n_features:
            raise ValueError(
                f"gates: the source must make gates for the {n_features} features that later layers have, got "
                f"directions of width {new.u2.shape[1]}; give the gates themselves, which serve "
                "all layers, or use n_layers=1"
            )
        return Gates(np.concatenate([self.earlier.u1, new.u1]), np.concatenate([blind, new.u2]))


@dataclass(eq=False, repr=False)
class GreedyConvexTransformerBase(SolveParameters, TokenEstimator):
    """What regression and classification share: training one layer after another."""

    alpha: float = 0.01
    _: KW_ONLY
    n_layers: int = 2
    n_gates: int = 32
    gates: Any = "gaussian"
    random_state: Any = None
    _layer: ClassVar[type[ConvexAttentionRegressor | ConvexAttentionClassifier]]
    _n_copies = 4  # the samples, those of two layers while one hands on, and those of a solver

    @unchanged_on_failure
    @across_ranks
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train the layers one after another, each to its certified global optimum.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens), path or source
            Token sequences; each column of two-dimensional data is a token of width 1. What ``open_source`` takes, as
            the path of a file or a folder of shards, is read from the disk where it is large for `memory_limit`. Under
            ``torchrun`` each rank gives its own samples, or all give one path, of which each reads its part.
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
        TypeError
            If the solver does not take the loss or the penalty, or the callback cannot be called.
        KeyboardInterrupt
            On Ctrl-C. If the first layer had a point by then, the estimator is usable: its layers are those that were
            finished and the best point of the one that was not.

        Warns
        -----
        ConvergenceWarning
            If the certified relative gap of a layer did not come within ``tol``.
        """
        check_counts(n_layers=self.n_layers)
        inputs = read_samples(self, X, reset=True)
        weight = check_weight(sample_weight, len(inputs))
        random_state = check_stream(self.random_state)
        layers: list[Any] = []
        hand_on: list[HandOn] = []
        while len(layers) < self.n_layers:
            if layers:
                outputs = layers[-1]._outputs(inputs)
                inputs = inputs.to(device=outputs.device)
                targets, _, labels = layers[-1]._read_targets(y, len(inputs), weight)
                hand_on.append(HandOn.fitted(inputs, outputs, targets.weight(labels, weight)))
                inputs = hand_on[-1](inputs, outputs)
            layer = self._new_layer(layers, random_state)
            check_shape(layer, tuple(inputs.shape), reset=True)
            try:
                layer.fit(inputs, y, sample_weight)
            finally:
                if hasattr(layer, "certificate_"):  # also of an interrupted fit
                    layers.append(layer)
                    self._store(layers, hand_on)
        return self

    def _new_layer(self, layers: list[Any], random_state: np.random.RandomState) -> Any:
        """A layer to be trained next; those after the first go on with the gates that there are."""
        gates = self.gates
        if layers:
            source = get_gate_source(self.gates, self.n_gates)
            more = None if isinstance(source, GivenGates) else source
            gates = _EarlierGates(layers[-1].gates_, more)
        return self._layer_with_gates(gates).set_params(random_state=random_state)

    def _layer_with_gates(self, gates: Any) -> Any:
        """A layer that is not yet trained, with the parameters of all layers."""
        options = {name: value for name, value in self.get_params(deep=False).items() if name != "n_layers"}
        return self._layer(activation="gated_relu", **{**options, "gates": gates})

    def _store(self, layers: list[Any], hand_on: list[HandOn]) -> None:
        """Set every attribute that follows from the layers."""
        last = layers[-1]
        self.layers_, self._hand_on = list(layers), list(hand_on)
        self.certificates_ = [layer.certificate_ for layer in layers]
        self.n_iter_ = sum(layer.n_iter_ for layer in layers)
        self.traffic_ = last.traffic_  # layers read the same source, and their records go on
        self.loss_, self.penalty_, self._targets = last.loss_, last.penalty_, last._targets
        if hasattr(last, "classes_"):
            self.classes_ = last.classes_

    def _saved_state(self) -> SavedState:
        header, arrays = super()._saved_state()
        if isinstance(get_gate_source(self.gates, self.n_gates), GivenGates):
            first = self.layers_[0].gates_
            arrays |= {"u1": first.u1, "u2": first.u2}
        layers = []
        for number, layer in enumerate(self.layers_):
            layer_header, layer_arrays = layer._saved_state()
            layers.append(layer_header)
            arrays |= {f"layer{number}_{name}": array for name, array in layer_arrays.items()}
        arrays |= {f"centre{number}": hand_on.centre.numpy() for number, hand_on in enumerate(self._hand_on)}
        return header | {"layers": layers, "factors": [hand_on.factor for hand_on in self._hand_on]}, arrays

    def _restore_state(self, header: dict[str, Any], arrays: dict[str, NDArray]) -> None:
        super()._restore_state(header, arrays)
        layers = []
        for number, layer_header in enumerate(header["layers"]):
            prefix = f"layer{number}_"
            own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
            layers.append(self._layer_with_gates(Gates(own["u1"], own["u2"])))
            layers[-1]._restore_state(layer_header, own)
        factors = enumerate(header["factors"])
        self._store(layers, [HandOn(torch.as_tensor(arrays[f"centre{number}"]), factor) for number, factor in factors])

    def _outputs(self, X: ArrayLike) -> Tensor:
        """Raw outputs of the last layer, shape ``(N, c)``."""
        check_is_fitted(self)
        inputs = read_samples(self, X, reset=False)
        for layer, hand_on in zip(self.layers_[:-1], self._hand_on, strict=True):
            outputs = layer._outputs(inputs)
            inputs = hand_on(inputs.to(device=outputs.device), outputs)
        return self.layers_[-1]._outputs(inputs)

    def first_layers(self, n_layers: int) -> Self:
        """The fitted model of the first layers alone: what ``fit`` gives with that ``n_layers``.

        Parameters
        ----------
        n_layers : int
            Layers to keep, at most those that there are.

        Returns
        -------
        estimator
            Of the same class, sharing its layers with this one.

        Raises
        ------
        ValueError
            If there are not as many layers.
        """
        check_is_fitted(self)
        check_counts(n_layers=n_layers)
        if n_layers > len(self.layers_):
            raise ValueError(f"n_layers must be at most the {len(self.layers_)} layers that there are, got {n_layers}")
        shallow = copy.copy(self)
        shallow.n_layers = n_layers
        shallow._store(self.layers_[:n_layers], self._hand_on[: n_layers - 1])
        return shallow

    def staged_predict(self: Any, X: ArrayLike) -> Iterator[Any]:
        """Predictions after each layer, as ``predict`` gives them.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens), path or source
            As in ``fit``; under ``torchrun`` each rank predicts the samples that it is given.

        Yields
        ------
        ndarray of shape (n_samples,) or (n_samples, n_outputs)
        """
        check_is_fitted(self)
        for n_layers in range(1, len(self.layers_) + 1):
            yield self.first_layers(n_layers).predict(X)


class GreedyConvexTransformerRegressor(RegressionMixin, GreedyConvexTransformerBase):
    r"""Layers of gated convex attention for regression, trained one after another, each with a certificate.

    Layer :math:`l` minimises, as ``ConvexAttentionRegressor`` with ``activation="gated_relu"`` does, over any number
    of heads

    .. math:: P_l = \frac{1}{\sum_i s_i} \sum_i s_i \, L\big(f_l(X_i^{(l)}), y_i\big)
              + \alpha \sum_j \tfrac12 \big(\|w_{2j}\|_2^2 + \|w_{3j}\|^2\big)

    on the inputs :math:`X^{(1)} = X` and :math:`X^{(l+1)} = [X^{(l)}, \; 1 \, s_l (f_l - m_l)^\top]`: what is handed
    on is the layer's inputs with its predictions as further features of every token, less their training mean
    :math:`m_l` and times the number :math:`s_l` that makes them as large, in root mean square norm, as the tokens.
    Predictions are those of the last layer. This is the layer-wise form of the paper's section 4 ([C]).

    **What is certified.** Each layer on its inputs. The layers together are *not* the global optimum of a deep
    network, of which there is no certificate; nor is the estimator better on new data because of its depth.
    **What is guaranteed.** A layer has the gates of the one before it, blind to the new features, besides its own: it
    can be the layer before at the same decay. So the optimum of a layer is at most that of the layer before, and its
    objective exceeds that of the layer before by at most its own certified gap. The decay in it is that of the layer
    alone: what the layers before it cost is not counted, so objectives of different depth are no fair comparison of
    networks; held-out data are.

    Why predictions: their number is that of the outputs, whatever the number of heads, and a new gate can look at
    products of the earlier ones with tokens through them. For two symbols as tokens, every head of the first layer
    sees one of them behind a gate on both; the second layer gates functions of both. Handing on the heads would tell
    it more and cost one feature each, of which there are thousands.

    Parameters
    ----------
    alpha : float, default=0.01
        Weight of the decay of each layer against the mean loss; positive.
    n_layers : int, default=2
        Layers ``L``. Layer ``l`` has ``l`` times the gates and ``(l - 1) n_outputs`` more features than the first, so
        its time and memory grow with the square of ``l`` and faster where there are many outputs. With 1 this is
        ``ConvexAttentionRegressor(activation="gated_relu")``.
    loss : {"squared", "huber", "poisson", "softmax"} or Loss, default="squared"
        Loss of the outputs of every layer.
    penalty : {"group_l2", "nuclear"} or Penalty, default="group_l2"
        Convex form of the decay, as in ``ConvexAttentionRegressor``.
    n_gates : int, default=32
        New gates of each layer, where they are drawn.
    gates : str, pair of arrays, Gates or GateSource, default="gaussian"
        Where the gates come from. A source makes new ones for each layer, in the width of its inputs; given gates serve
        all layers and are blind to predictions.
    solver, tol, max_iter, fit_intercept, dtype, device
        As in ``ConvexAttentionRegressor``, for every layer.
    memory_limit : int or str, default=None
        As in ``ConvexAttentionRegressor``, but data of up to a quarter of it are read into memory. Of others, what a
        layer hands on is held in memory, ``n_outputs`` numbers for each sample, and joined to the tokens as they are
        read.
    random_state : int, RandomState or None, default=None
        Draws the gates of one layer after the other.
    verbose : bool, default=False
        Whether to show a progress bar for each layer.
    callback : callable, default=None
        Called with a ``Progress`` at each certificate of each layer; returning True ends the training of that layer.

    Attributes
    ----------
    layers_ : list of ConvexAttentionRegressor
        The fitted layers, all on tokens.
    certificates_ : list of Certificate
        One per layer.
    loss_, penalty_ : Loss, Penalty
        The instances used.
    n_iter_ : int
        Iterations of all layers.
    traffic_ : Traffic or None
        What all layers have read of data on a disk; None of data in memory.
    n_features_in_ : int
        Features per token, or columns of two-dimensional ``X``.
    n_tokens_in_ : int
        Tokens per sample.

    See Also
    --------
    convexformer.nn.DeepConvexTransformer : Layers trained together, which is not convex.

    Examples
    --------
    >>> import numpy as np
    >>> from convexformer import GreedyConvexTransformerRegressor
    >>> X = np.random.default_rng(0).normal(size=(50, 2, 2))
    >>> y = np.abs(X[:, 0, 0]) - np.abs(X[:, 1, 1])
    >>> model = GreedyConvexTransformerRegressor(n_layers=2, n_gates=4, random_state=0).fit(X, y)
    >>> first, second = (certificate.primal for certificate in model.certificates_)
    >>> second < first, model.predict(X).shape
    (True, (50,))
    """

    _layer = ConvexAttentionRegressor


@dataclass(eq=False, repr=False)
class GreedyConvexTransformerClassifier(ClassificationMixin, GreedyConvexTransformerBase):
    r"""Layers of gated convex attention for classification, trained one after another, each with a certificate.

    Everything is as in ``GreedyConvexTransformerRegressor``, which says what is certified and guaranteed and what is
    not, with a loss of labels. The predictions that a layer hands on are its scores.

    Parameters
    ----------
    alpha : float, default=0.01
        Weight of the decay of each layer against the mean loss; positive.
    n_layers : int, default=2
        Layers. With 1 this is ``ConvexAttentionClassifier(activation="gated_relu")``.
    loss : {"auto", "logistic", "softmax", "squared_hinge"} or Loss, default="auto"
        Loss of every layer, as in ``ConvexAttentionClassifier``.
    penalty : {"group_l2", "nuclear"} or Penalty, default="group_l2"
        Convex form of the decay, as in ``ConvexAttentionClassifier``.
    n_gates : int, default=32
        New gates of each layer, where they are drawn.
    gates : str, pair of arrays, Gates or GateSource, default="gaussian"
        As in ``GreedyConvexTransformerRegressor``.
    solver, tol, max_iter, fit_intercept, dtype, device
        As in ``ConvexAttentionClassifier``, for every layer.
    memory_limit : int or str, default=None
        As in ``GreedyConvexTransformerRegressor``.
    class_weight : dict, "balanced" or None, default=None
        Factors on the weights of classes, as in scikit-learn.
    random_state : int, RandomState or None, default=None
        Draws the gates of one layer after the other.
    verbose : bool, default=False
        Whether to show a progress bar for each layer.
    callback : callable, default=None
        Called with a ``Progress`` at each certificate of each layer; returning True ends the training of that layer.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Sorted labels; numbers of the columns of ``y`` for several labels per sample.
    layers_ : list of ConvexAttentionClassifier
        The fitted layers, all on tokens.
    certificates_ : list of Certificate
        One per layer.
    loss_, penalty_ : Loss, Penalty
        The instances used.
    n_iter_ : int
        Iterations of all layers.
    traffic_ : Traffic or None
        What all layers have read of data on a disk; None of data in memory.
    n_features_in_ : int
        Features per token, or columns of two-dimensional ``X``.
    n_tokens_in_ : int
        Tokens per sample.

    See Also
    --------
    convexformer.nn.DeepConvexTransformer : Layers trained together, which is not convex.

    Examples
    --------
    >>> import numpy as np
    >>> from convexformer import GreedyConvexTransformerClassifier
    >>> X = np.random.default_rng(0).normal(size=(60, 2, 2))
    >>> y = np.where(X[:, 0, 0] * X[:, 1, 0] > 0, "same", "other")
    >>> model = GreedyConvexTransformerClassifier(n_layers=2, n_gates=8, random_state=0).fit(X, y)
    >>> [certificate.relative_gap <= 1e-4 for certificate in model.certificates_], model.score(X, y) > 0.9
    ([True, True], True)
    """

    _layer = ConvexAttentionClassifier

    _: KW_ONLY
    loss: str | Loss = "auto"
    class_weight: Any = None

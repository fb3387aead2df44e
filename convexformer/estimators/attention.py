"""scikit-learn estimators: convex-attention networks trained to a certified global optimum."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import get_tags
from sklearn.utils.metaestimators import available_if

from convexformer.targets import (
    ClassTargets,
    LabelTargets,
    MultilabelTargets,
    ProbabilityTargets,
    RealTargets,
    Targets,
    class_targets,
    multilabel_targets,
)
from convexformer.validation import (
    Result,
    check_indicators,
    check_label_target,
    check_real_target,
    check_rows,
    given,
    has_columns,
    keeps_tensors,
    result_of,
    without_objects,
)
from convexformer_solvers import LOSSES, Loss, get_loss

from .base import ConvexAttentionBase, GateParameters
from .samples import predictions_of_all


def _check_loss_name(loss: Any, others: list[str], kinds: set[str]) -> None:
    """Raise ``ValueError`` for the name of no loss, naming those for targets of some kinds."""
    if isinstance(loss, str) and loss not in [*LOSSES, *others]:
        known = [*others, *sorted(name for name, kind in LOSSES.items() if kind.targets in kinds)]
        raise ValueError(f"loss must be one of {known} or a Loss instance, got {loss!r}")


class ScoreMixin:
    """Predictions and scores of samples that are spread over the ranks of a process group."""

    def score(self, X: Any, y: Any, sample_weight: ArrayLike | None = None) -> float:
        """Score as scikit-learn has it: R2 of a regression, accuracy of a classification (of all labels of a sample).

        Parameters
        ----------
        X, y, sample_weight
            As in ``fit``. Under ``torchrun`` the score is that of the samples of all ranks, and all get it.

        Returns
        -------
        float
        """
        y = y.detach() if keeps_tensors(y) else given(y)
        return self._score_of(*predictions_of_all(self, X, y, sample_weight))

    def _score_of(self, target: Any, weight: Any, pred: Any) -> float:
        """The score of predictions that have been made."""
        score = r2_score if isinstance(self, RegressorMixin) else accuracy_score
        return float(score(target, pred, sample_weight=weight))


class RegressionMixin(ScoreMixin, MultiOutputMixin, RegressorMixin):
    """Targets and predictions of regression."""

    def _read_targets(
        self: Any, y: Any, n_samples: int, sample_weight: NDArray[np.float64] | None
    ) -> tuple[Targets, Loss, NDArray]:
        _check_loss_name(self.loss, [], {"real", "simplex"})
        loss = get_loss(self.loss)
        numbers = check_real_target(y, loss, n_samples, _counterpart(self, "Regressor", "Classifier"))
        if loss.targets != "simplex":
            return RealTargets(single=numbers.ndim == 1), loss, numbers
        targets = ProbabilityTargets()
        return targets, loss, targets.encode(given(y))  # as given, since its precision says what rounding is

    def _restored_targets(self, header: dict[str, Any], arrays: dict[str, NDArray], loss: Loss) -> Targets:
        return ProbabilityTargets() if loss.targets == "simplex" else RealTargets(header["single"])

    def predict(self: Any, X: ArrayLike) -> Result:
        """Predict the mean of the targets: outputs of the network.

        Their exponential for the Poisson loss, and class probabilities for the softmax loss.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens)
            Samples, in all forms that ``fit`` takes: paths and sources among them for estimators that read data on a
            disk. Under ``torchrun`` each rank predicts the samples that it is given.

        Returns
        -------
        ndarray of shape (n_samples,) or (n_samples, n_outputs)
        """
        outputs = self._outputs(X)
        means = self.loss_.mean(outputs)
        return result_of(means[:, 0] if self._targets.single else means, X)


def _counterpart(estimator: Any, own: str, other: str) -> str:
    """Name of the estimator of this package for the other kind of targets; of a subclass that of its parent."""
    ours = (base.__name__ for base in type(estimator).__mro__ if base.__module__.startswith("convexformer."))
    name = next((name for name in ours if own in name), f"ConvexAttention{own}")
    return getattr(estimator, "_counterpart", name.replace(own, other))


def has_probabilities(estimator: Any) -> bool:
    """Whether the loss is that of a probability model."""
    loss = getattr(estimator, "loss_", None)
    if loss is None:
        loss = get_loss("softmax" if estimator.loss == "auto" else estimator.loss)
    if not loss.probabilistic:
        raise AttributeError(f"probabilities are not available with loss={estimator.loss!r}")
    return True


class ClassificationMixin(ScoreMixin, ClassifierMixin):
    """Targets and predictions of classification."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def _read_targets(
        self: Any, y: Any, n_samples: int, sample_weight: NDArray[np.float64] | None
    ) -> tuple[Targets, Loss, NDArray]:
        y = given(y)
        several = has_columns(y) and get_tags(self).classifier_tags.multi_label
        y = check_indicators(y) if several else check_label_target(y)
        check_rows(y, n_samples)
        name = self.loss
        _check_loss_name(name, ["auto"], {"sign", "simplex"})
        if isinstance(name, str) and name == "auto":
            name = "logistic" if several or len(np.unique(y)) <= 2 else "softmax"
        loss = get_loss(name)
        if loss.targets == "real":
            instead = _counterpart(self, "Classifier", "Regressor")
            raise ValueError(f"loss={self.loss!r} is for numbers, not labels; use {instead}")
        read = multilabel_targets if several else class_targets
        targets: LabelTargets = read(y, loss, self.class_weight, sample_weight)
        self.classes_ = targets.classes
        return targets, loss, y

    def _restored_targets(self, header: dict[str, Any], arrays: dict[str, NDArray], loss: Loss) -> Targets:
        if "n_labels" in header:
            targets: LabelTargets = MultilabelTargets(header["n_labels"], loss)
        else:
            targets = ClassTargets(arrays["classes"], loss, arrays.get("class_weight"))
        self.classes_ = targets.classes
        return targets

    def _score_of(self: Any, target: Any, weight: Any, pred: Any) -> float:
        several = isinstance(self._targets, MultilabelTargets)
        return super()._score_of(without_objects(target) if several else target, weight, pred)

    def decision_function(self: Any, X: ArrayLike) -> Result:
        """Scores of the classes, or of several labels; for two classes the score of the second against the first.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens)
            As in ``predict``.

        Returns
        -------
        ndarray of shape (n_samples,), (n_samples, n_classes) or (n_samples, n_labels)
        """
        outputs = self._outputs(X)  # first of all, as without a fit there are no targets
        scores = self._targets.scores(outputs)
        return result_of(scores[:, 0] if scores.shape[1] == 1 else scores, X)

    def predict(self: Any, X: ArrayLike) -> NDArray[Any]:
        """Predict labels.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens)
            Samples, in all forms that ``fit`` takes: paths and sources among them for estimators that read data on a
            disk. Under ``torchrun`` each rank predicts the samples that it is given.

        Returns
        -------
        ndarray of shape (n_samples,) or (n_samples, n_labels)
            Several labels per sample are zeros and ones.
        """
        outputs = self._outputs(X)
        return self._targets.labels(outputs)

    @available_if(has_probabilities)
    def predict_proba(self: Any, X: ArrayLike) -> Result:
        """Predict class probabilities; there for the logistic and softmax losses.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens)
            As in ``predict``.

        Returns
        -------
        ndarray of shape (n_samples, n_classes)
            Rows sum to 1. With one output per class against the rest, their probabilities are normalised. Where
            samples have several labels, shape (n_samples, n_labels): the probability that a sample has the label.
        """
        outputs = self._outputs(X)
        return result_of(self._targets.probabilities(outputs), X)

    @available_if(has_probabilities)
    def predict_log_proba(self: Any, X: ArrayLike) -> Result:
        """Predict logarithms of class probabilities; there for the logistic and softmax losses.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens)
            As in ``predict_proba``.

        Returns
        -------
        ndarray of shape (n_samples, n_classes) or (n_samples, n_labels)
            Minus infinity where a probability is zero in its precision.
        """
        probability = self.predict_proba(X)
        return result_of(torch.as_tensor(probability).log(), X)


@dataclass(eq=False, repr=False)
class ConvexAttentionRegressor(RegressionMixin, GateParameters, ConvexAttentionBase):
    r"""Attention network for regression, trained to a certified global optimum.

    Minimises over any number of convex-attention heads (paper [C], Thms 1 to 3)

    .. math:: \frac{1}{\sum_i s_i} \sum_i s_i \, L\Big(b + \sum_j g_j(X_i) \, (w_{1j}^\top X_i w_{2j}) w_{3j}, \;
              y_i\Big) + \alpha \sum_j \tfrac12 \big(\|w_{2j}\|_2^2 + \|w_{3j}\|^2\big),
              \qquad w_{1j} \in \Delta^n,

    by solving the equivalent convex program in the coefficients :math:`Z`. The two optima are equal when the network
    has as many heads as the solution needs (``len(heads_)``); with fewer heads the network's optimum can only be
    larger. On two-dimensional ``X`` with squared loss the program is that of scikit-learn's ``Lasso(alpha)``.

    Parameters
    ----------
    alpha : float, default=0.01
        Weight of the decay against the **mean** loss; positive. At ``alpha_max_`` the solution becomes zero.
    loss : {"squared", "huber", "poisson", "softmax"} or Loss, default="squared"
        Loss of the outputs; an instance, for example ``Huber(delta=0.5)``, sets its parameters. With ``"softmax"`` the
        rows of ``y`` are probabilities of classes, as another network gives them, and so are predictions.
    penalty : {"group_l2", "nuclear"} or Penalty, default="group_l2"
        Convex form of the decay: ``"group_l2"`` for the l1 norm of ``w3`` (Thms 1 and 2), ``"nuclear"`` for the l2
        norm, the standard weight decay, which lets outputs share features. Equal for one output.
    activation : {"linear", "gated_relu"}, default="linear"
        ``"gated_relu"`` adds fixed gates :math:`g(X) = 1[u_1^\top X u_2 \ge 0]` (Thm 3).
    n_gates : int, default=32
        Gates to make where `gates` is a name, generated ones at most; unused otherwise. With an activation that has no
        gates all but the default is refused, here and in `gates`.
    gates : str, pair of arrays, Gates or GateSource, default="gaussian"
        Where the gates come from: ``"gaussian"`` or ``"sparse"`` random directions, ``"fourier"`` (one frequency each,
        of features in pairs of cos and sin), ``"difference"`` (between pairs of samples), ``"generated"`` (added while
        they lower the objective, see ``generate_gates``). The sources of ``convexformer.gates`` have more parameters.
        Gates closed for every training sample are dropped, duplicates merged.
    solver : str or Solver, default="auto"
        ``"auto"`` (stages of the next four and of others, see ``convexformer.solvers.plan``), ``"admm"`` (alternating
        directions with a cached factorisation), ``"smoothing_newton"`` (small and medium-sized data),
        ``"semismooth_newton"`` (group-l2 with a separable loss), ``"fista"`` (first order: any loss and size),
        ``"column_generation"`` (one atom after the other, slow), ``"exact"`` (cvxpy with CLARABEL, for small data), the
        name of any cvxpy solver, or an instance.
    tol : float, default=1e-4
        Bound on the certified relative gap, ``dual_gap_ / (objective of the best constant model)``. Where the model
        explains nearly everything the gap is a larger share of its own objective: take a smaller one there.
    max_iter : int, default=10000
        Iterations at most.
    fit_intercept : bool, default=True
        Whether the network has a bias per output, without decay.
    warm_start : bool, default=False
        Whether to start from the previous solution where shapes agree, and from its dual point where ``alpha`` is the
        same, too. Gates are made anew for each fit. With an int as `random_state` random gates are the same again. The
        coefficients of gates that were there before are kept.
    dtype : {None, "float32", "float64"}, default=None
        Precision in which the solver works; that of ``X`` by default, float32 for half precision. Certificates are
        always in float64.
    device : str or torch.device, default=None
        Device to work on; that of ``X`` by default.
    memory_limit : int or str, default=None
        Memory that a fit to data on a disk takes at most, beside vectors with a number for each output and each sample
        or feature, in bytes or as text such as ``"500 MB"`` or ``"2 GiB"``. Data of up to half of the limit are read
        into memory. Each pass reads larger data in parts. Default: a quarter of the free memory.
    random_state : int, RandomState or None, default=None
        Draws the gates.
    verbose : bool, default=False
        Whether to show a progress bar with gap and objective. With it certificates come a little more often, so that a
        fit may end at an earlier point within ``tol``.
    callback : callable, default=None
        Called with a ``Progress`` at each certificate; returning True stops the fit.

    Attributes
    ----------
    coef_ : ndarray of shape ([n_gates,] n_tokens[, n_features][, n_outputs])
        Coefficients; axes in brackets are there with gates, three-dimensional ``X`` and two-dimensional ``y``.
    intercept_ : float or ndarray of shape (n_outputs,)
        Bias.
    certificate_ : Certificate
        ``primal``, ``dual``, ``gap`` and ``relative_gap`` at the returned point, in float64.
    dual_gap_ : float
        ``certificate_.gap``: the objective is at most this far above the global optimum.
    heads_ : Heads
        The network: balanced heads with ``objective``, ``predict``, ``merge`` and ``to_torch``.
    token_norms_ : ndarray of shape (n_tokens,)
        Penalty, without ``alpha``, that each token carries; their sum is that of ``coef_``. Zero for unused tokens.
    alpha_max_ : float
        Smallest ``alpha`` whose solution is zero.
    traffic_ : Traffic or None
        ``passes``, ``read_bytes`` and ``bytes_per_second`` of data on a disk; None of data in memory and after loading.
    gates_ : Gates or None
        Gates of the network.
    loss_, penalty_ : Loss, Penalty
        The instances used.
    status_ : Status
        How the solve ended.
    history_ : History
        Certified progress.
    n_iter_ : int
        Iterations done.
    n_features_in_ : int
        Features per token, or columns of two-dimensional ``X``.
    n_tokens_in_ : int
        Tokens per sample.

    See Also
    --------
    ConvexAttentionRegressorCV : Chooses ``alpha`` by cross-validation.

    Examples
    --------
    >>> import numpy as np
    >>> from convexformer import ConvexAttentionRegressor
    >>> X = np.random.default_rng(0).normal(size=(50, 6, 3))
    >>> y = X[:, 2] @ [1.0, -2.0, 0.5]
    >>> model = ConvexAttentionRegressor(alpha=0.1).fit(X, y)
    >>> bool(model.certificate_.relative_gap <= 1e-4), np.flatnonzero(model.token_norms_), len(model.heads_)
    (True, array([2]), 1)
    """

    alpha: float = 0.01


@dataclass(eq=False, repr=False)
class ConvexAttentionClassifier(ClassificationMixin, GateParameters, ConvexAttentionBase):
    r"""Attention network for classification, trained to a certified global optimum.

    The objective is that of ``ConvexAttentionRegressor`` with a loss of labels. Where a sample may have several labels,
    ``y`` is a matrix of 0 and 1 with a column for each: binary problems with a penalty in common, one output each.

    Parameters
    ----------
    alpha : float, default=0.01
        Weight of the decay against the **mean** loss; positive. At ``alpha_max_`` the solution becomes zero.
    loss : {"auto", "logistic", "softmax", "squared_hinge"} or Loss, default="auto"
        ``"auto"`` is logistic for two classes and for several labels per sample, and softmax cross-entropy for more
        classes. A loss of margins with more than two classes trains one output per class against the rest.
    penalty : {"group_l2", "nuclear"} or Penalty, default="group_l2"
        Convex form of the decay: ``"group_l2"`` for the l1 norm of ``w3`` (Thms 1 and 2), ``"nuclear"`` for the l2
        norm, the standard weight decay, which lets outputs share features, as those of several labels. Equal for one
        output. With ``"group_l2"`` the labels of a sample are problems apart.
    activation : {"linear", "gated_relu"}, default="linear"
        ``"gated_relu"`` adds fixed gates :math:`g(X) = 1[u_1^\top X u_2 \ge 0]` (Thm 3).
    n_gates : int, default=32
        Gates to make where `gates` is a name, generated ones at most; unused otherwise. With an activation that has no
        gates all but the default is refused, here and in `gates`.
    gates : str, pair of arrays, Gates or GateSource, default="gaussian"
        Where the gates come from: ``"gaussian"`` or ``"sparse"`` random directions, ``"fourier"`` (one frequency each,
        of features in pairs of cos and sin), ``"difference"`` (between pairs of samples), ``"generated"`` (added while
        they lower the objective, see ``generate_gates``). The sources of ``convexformer.gates`` have more parameters.
        Gates closed for every training sample are dropped, duplicates merged.
    solver : str or Solver, default="auto"
        ``"auto"`` (stages of the next four and of others, see ``convexformer.solvers.plan``), ``"admm"`` (alternating
        directions with a cached factorisation), ``"smoothing_newton"`` (small and medium-sized data),
        ``"semismooth_newton"`` (group-l2 with a separable loss), ``"fista"`` (first order: any loss and size),
        ``"column_generation"`` (one atom after the other, slow), ``"exact"`` (cvxpy with CLARABEL, for small data), the
        name of any cvxpy solver, or an instance.
    tol : float, default=1e-4
        Bound on the certified relative gap, ``dual_gap_ / (objective of the best constant model)``. Where the model
        explains nearly everything the gap is a larger share of its own objective: take a smaller one there.
    max_iter : int, default=10000
        Iterations at most.
    fit_intercept : bool, default=True
        Whether the network has a bias per output, without decay.
    class_weight : dict, "balanced" or None, default=None
        Factors on the weights of classes, as in scikit-learn. Not for several labels per sample.
    warm_start : bool, default=False
        Whether to start from the previous solution where shapes agree, and from its dual point where ``alpha`` is the
        same, too. Gates are made anew for each fit. With an int as `random_state` random gates are the same again. The
        coefficients of gates that were there before are kept.
    dtype : {None, "float32", "float64"}, default=None
        Precision in which the solver works; that of ``X`` by default, float32 for half precision. Certificates are
        always in float64.
    device : str or torch.device, default=None
        Device to work on; that of ``X`` by default.
    memory_limit : int or str, default=None
        Memory that a fit to data on a disk takes at most, beside vectors with a number for each output and each sample
        or feature, in bytes or as text such as ``"500 MB"`` or ``"2 GiB"``. Data of up to half of the limit are read
        into memory. Each pass reads larger data in parts. Default: a quarter of the free memory.
    random_state : int, RandomState or None, default=None
        Draws the gates.
    verbose : bool, default=False
        Whether to show a progress bar with gap and objective. With it certificates come a little more often, so that a
        fit may end at an earlier point within ``tol``.
    callback : callable, default=None
        Called with a ``Progress`` at each certificate; returning True stops the fit.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Sorted labels; numbers of the columns of ``y`` for several labels per sample.
    coef_ : ndarray of shape ([n_gates,] n_tokens[, n_features][, n_outputs])
        Coefficients; axes in brackets are there with gates, three-dimensional ``X`` and more than one output.
    intercept_ : float or ndarray of shape (n_outputs,)
        Bias.
    certificate_ : Certificate
        ``primal``, ``dual``, ``gap`` and ``relative_gap`` at the returned point, in float64.
    dual_gap_ : float
        ``certificate_.gap``: the objective is at most this far above the global optimum.
    heads_ : Heads
        The network: balanced heads with ``objective``, ``predict``, ``merge`` and ``to_torch``.
    token_norms_ : ndarray of shape (n_tokens,)
        Penalty, without ``alpha``, that each token carries; their sum is that of ``coef_``. Zero for unused tokens.
    alpha_max_ : float
        Smallest ``alpha`` whose solution is zero.
    traffic_ : Traffic or None
        ``passes``, ``read_bytes`` and ``bytes_per_second`` of data on a disk; None of data in memory and after loading.
    gates_ : Gates or None
        Gates of the network.
    loss_, penalty_ : Loss, Penalty
        The instances used.
    status_ : Status
        How the solve ended.
    history_ : History
        Certified progress.
    n_iter_ : int
        Iterations done.
    n_features_in_ : int
        Features per token, or columns of two-dimensional ``X``.
    n_tokens_in_ : int
        Tokens per sample.

    See Also
    --------
    ConvexAttentionClassifierCV : Chooses ``alpha`` by cross-validation.

    Examples
    --------
    >>> import numpy as np
    >>> from convexformer import ConvexAttentionClassifier
    >>> X = np.random.default_rng(0).normal(size=(80, 6, 3))
    >>> y = np.where(X[:, 2] @ [1.0, -2.0, 0.5] > 0, "up", "down")
    >>> model = ConvexAttentionClassifier(alpha=0.05).fit(X, y)
    >>> model.score(X, y) > 0.9, np.flatnonzero(model.token_norms_)
    (True, array([2]))
    """

    alpha: float = 0.01
    _: KW_ONLY
    loss: str | Loss = "auto"
    class_weight: dict | str | None = None

"""Estimators that choose ``alpha`` by cross-validation along warm-started, certified paths."""

from __future__ import annotations

import copy
from numbers import Integral
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed
from numpy.typing import ArrayLike, NDArray
from sklearn.base import is_classifier
from sklearn.metrics import check_scoring
from sklearn.model_selection import check_cv

from convexformer_solvers import Callback, Loss, Penalty, Solver, alpha_grid, get_solver, solve_path

from ._base import ConvexAttentionBase, Problem
from ._validation import check_weight, predictions
from .estimators import ClassificationMixin, RegressionMixin


class CrossValidationMixin(ConvexAttentionBase):
    """Choice of ``alpha``: paths on the training parts of all folds, then a fit of everything at the best alpha."""

    alphas: int | ArrayLike
    eps: float
    cv: Any
    scoring: Any
    n_jobs: int | None

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Any:
        """Choose ``alpha`` by cross-validation and train to a certified global optimum.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens)
            Token sequences; each column of two-dimensional data is a token of width 1.
        y : array-like of shape (n_samples,) or (n_samples, n_outputs)
            Targets; labels of shape (n_samples,) for a classifier.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative weights, used in training and in scoring; only ratios matter.

        Returns
        -------
        self
        """
        # The placeholder alpha is never solved for: folds and final fit set their own.
        problem = self._problem(X, y, sample_weight, alpha=1.0)
        self.alphas_ = np.array(self._grid(problem.program.alpha_max))
        weight = check_weight(sample_weight, problem.program.map.n_samples)
        labels = np.asarray(y)
        samples = np.zeros(len(labels))
        splits = list(check_cv(self.cv, labels, classifier=is_classifier(self)).split(samples, labels))
        scores = Parallel(n_jobs=self.n_jobs, prefer="threads")(
            delayed(self._fold_scores)(problem, X, labels, weight, train, test) for train, test in splits
        )
        self.score_path_ = np.column_stack(scores)
        self.alpha_ = float(self.alphas_[self.score_path_.mean(axis=1).argmax()])
        final = Problem(problem.program.with_alpha(self.alpha_), problem.targets, problem.gates)
        self._fit_problem(final, X)
        return self

    def _grid(self, alpha_max: float) -> list[float]:
        if isinstance(self.alphas, Integral):
            return alpha_grid(alpha_max, int(self.alphas), self.eps)
        grid = np.asarray(self.alphas, dtype=float)
        if grid.ndim != 1 or grid.size == 0 or not (grid > 0).all():
            raise ValueError(f"alphas must be a positive integer or a list of positive numbers, got {self.alphas!r}")
        return sorted((float(alpha) for alpha in grid), reverse=True)

    def _fold_scores(
        self,
        problem: Problem,
        X: Any,
        y: NDArray,
        weight: NDArray[np.float64] | None,
        train: NDArray[np.int64],
        test: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Score on the held-out part for every alpha of the grid."""
        device = problem.program.map.device
        train_rows, test_rows = (torch.as_tensor(rows, device=device) for rows in (train, test))
        training = Problem(problem.program.rows(train_rows), problem.targets, problem.gates)
        held_out = problem.program.rows(test_rows)
        path = solve_path(
            training.program, get_solver(self.solver), self.alphas_.tolist(), **self._options(training.program)
        )
        if self.scoring is None:
            outputs = (predictions(held_out.map, r.coef, r.intercept, torch.float64) for r in path.results)
            return np.array([-float(held_out.loss_value(pred)) for pred in outputs])
        scorer = check_scoring(self, scoring=self.scoring)
        held_out_X, held_out_y = np.asarray(X)[test], y[test]
        options = {} if weight is None else {"sample_weight": weight[test]}
        scores = []
        for result in path.results:
            fitted = copy.copy(self)
            fitted._store(training, result, X)
            scores.append(scorer(fitted, held_out_X, held_out_y, **options))
        return np.array(scores)


class ConvexAttentionRegressorCV(RegressionMixin, CrossValidationMixin):
    """``ConvexAttentionRegressor`` with ``alpha`` chosen by cross-validation.

    Parameters
    ----------
    alphas : int or array-like, default=30
        Grid of alphas, or its length from ``alpha_max_`` down to ``eps * alpha_max_``.
    eps : float, default=1e-2
        Ratio of the last to the first alpha of an automatic grid.
    cv : int, splitter, iterable or None, default=None
        Folds, as in scikit-learn; five by default.
    scoring : str or callable, default=None
        Score to maximise, as in scikit-learn. Default: minus the mean loss on the held-out samples.
    n_jobs : int, default=None
        Folds to run at once, in threads.
    loss, penalty, activation, n_gates, gates, solver, tol, max_iter, fit_intercept, warm_start, dtype, device, \
random_state, verbose, callback
        As in ``ConvexAttentionRegressor``. Gates are drawn once, on all samples.

    Attributes
    ----------
    alpha_ : float
        The best alpha.
    alphas_ : ndarray of shape (n_alphas,)
        The grid, decreasing.
    score_path_ : ndarray of shape (n_alphas, n_folds)
        Score of each alpha on each fold.
    coef_, intercept_, certificate_, heads_ and others
        As in ``ConvexAttentionRegressor``, for the fit of all samples at ``alpha_``.

    Examples
    --------
    >>> import numpy as np
    >>> from convexformer import ConvexAttentionRegressorCV
    >>> X = np.random.default_rng(0).normal(size=(60, 5, 2))
    >>> y = X[:, 2] @ [1.0, -2.0]
    >>> model = ConvexAttentionRegressorCV(alphas=5).fit(X, y)
    >>> bool(model.alpha_ == model.alphas_[-1])
    True
    """

    def __init__(
        self,
        *,
        alphas: int | ArrayLike = 30,
        eps: float = 1e-2,
        cv: Any = None,
        scoring: Any = None,
        n_jobs: int | None = None,
        loss: str | Loss = "squared",
        penalty: str | Penalty = "group_l2",
        activation: str = "linear",
        n_gates: int = 32,
        gates: Any = "gaussian",
        solver: str | Solver = "auto",
        tol: float = 1e-4,
        max_iter: int = 10_000,
        fit_intercept: bool = True,
        warm_start: bool = False,
        dtype: Any = None,
        device: Any = None,
        random_state: Any = None,
        verbose: bool = False,
        callback: Callback | None = None,
    ) -> None:
        self.alphas = alphas
        self.eps = eps
        self.cv = cv
        self.scoring = scoring
        self.n_jobs = n_jobs
        self.loss = loss
        self.penalty = penalty
        self.activation = activation
        self.n_gates = n_gates
        self.gates = gates
        self.solver = solver
        self.tol = tol
        self.max_iter = max_iter
        self.fit_intercept = fit_intercept
        self.warm_start = warm_start
        self.dtype = dtype
        self.device = device
        self.random_state = random_state
        self.verbose = verbose
        self.callback = callback


class ConvexAttentionClassifierCV(ClassificationMixin, CrossValidationMixin):
    """``ConvexAttentionClassifier`` with ``alpha`` chosen by cross-validation.

    Parameters
    ----------
    alphas : int or array-like, default=30
        Grid of alphas, or its length from ``alpha_max_`` down to ``eps * alpha_max_``.
    eps : float, default=1e-2
        Ratio of the last to the first alpha of an automatic grid.
    cv : int, splitter, iterable or None, default=None
        Folds, as in scikit-learn; five stratified ones by default.
    scoring : str or callable, default=None
        Score to maximise, as in scikit-learn. Default: minus the mean loss on the held-out samples.
    n_jobs : int, default=None
        Folds to run at once, in threads.
    loss, penalty, activation, n_gates, gates, solver, tol, max_iter, fit_intercept, class_weight, warm_start, dtype, \
device, random_state, verbose, callback
        As in ``ConvexAttentionClassifier``. Gates are drawn once, on all samples.

    Attributes
    ----------
    alpha_ : float
        The best alpha.
    alphas_ : ndarray of shape (n_alphas,)
        The grid, decreasing.
    score_path_ : ndarray of shape (n_alphas, n_folds)
        Score of each alpha on each fold.
    coef_, intercept_, certificate_, heads_ and others
        As in ``ConvexAttentionClassifier``, for the fit of all samples at ``alpha_``.

    Examples
    --------
    >>> import numpy as np
    >>> from convexformer import ConvexAttentionClassifierCV
    >>> X = np.random.default_rng(0).normal(size=(60, 5, 2))
    >>> y = X[:, 2] @ [1.0, -2.0] > 0
    >>> model = ConvexAttentionClassifierCV(alphas=5, cv=3, scoring="accuracy").fit(X, y)
    >>> model.score_path_.shape
    (5, 3)
    """

    def __init__(
        self,
        *,
        alphas: int | ArrayLike = 30,
        eps: float = 1e-2,
        cv: Any = None,
        scoring: Any = None,
        n_jobs: int | None = None,
        loss: str | Loss = "auto",
        penalty: str | Penalty = "group_l2",
        activation: str = "linear",
        n_gates: int = 32,
        gates: Any = "gaussian",
        solver: str | Solver = "auto",
        tol: float = 1e-4,
        max_iter: int = 10_000,
        fit_intercept: bool = True,
        class_weight: dict | str | None = None,
        warm_start: bool = False,
        dtype: Any = None,
        device: Any = None,
        random_state: Any = None,
        verbose: bool = False,
        callback: Callback | None = None,
    ) -> None:
        self.alphas = alphas
        self.eps = eps
        self.cv = cv
        self.scoring = scoring
        self.n_jobs = n_jobs
        self.loss = loss
        self.penalty = penalty
        self.activation = activation
        self.n_gates = n_gates
        self.gates = gates
        self.solver = solver
        self.tol = tol
        self.max_iter = max_iter
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.warm_start = warm_start
        self.dtype = dtype
        self.device = device
        self.random_state = random_state
        self.verbose = verbose
        self.callback = callback

"""Certified probes whose `alpha` is chosen by cross-validation."""

from __future__ import annotations

from dataclasses import dataclass

from convexformer.estimators.attention import ClassificationMixin, RegressionMixin
from convexformer.estimators.cv import CrossValidationMixin
from convexformer_solvers import Loss

from .base import ConvexProbeBase


@dataclass(eq=False, repr=False, kw_only=True)
class ConvexProbeRegressorCV(RegressionMixin, CrossValidationMixin, ConvexProbeBase):
    """``ConvexProbeRegressor`` with ``alpha`` chosen by cross-validation.

    Parameters
    ----------
    alphas : int or array-like, default=30
        Grid of alphas, or its length from ``alpha_max_`` down to ``eps * alpha_max_``.
    eps : float, default=1e-2
        Ratio of the last to the first alpha of an automatic grid.
    cv, scoring, n_jobs, resume
        As in ``ConvexAttentionRegressorCV``.
    dictionary : "auto", TokenPooling or list of them, default="auto"
        As in ``ConvexProbeRegressor``. It is made once, of the tokens of all samples without their labels.
    generate : int or Generation, default=None
        As in ``ConvexProbeRegressor``. ``alpha`` is chosen with the dictionary alone; weightings are generated in the
        fit of all samples at the best alpha.
    standardize, loss, penalty, solver, tol, max_iter, fit_intercept, warm_start, dtype, device, \
memory_limit, random_state, verbose, callback
        As in ``ConvexProbeRegressor``.

    Attributes
    ----------
    alpha_ : float
        The best alpha.
    alphas_ : ndarray of shape (n_alphas,)
        The grid, decreasing.
    score_path_ : ndarray of shape (n_alphas, n_folds)
        Score of each alpha on each fold.
    coef_, intercept_, certificate_, heads_ and others
        As in ``ConvexProbeRegressor``, for the fit of all samples at ``alpha_``.

    Examples
    --------
    >>> import numpy as np
    >>> from convexformer import ConvexProbeRegressorCV
    >>> X = np.random.default_rng(0).normal(size=(60, 5, 2))
    >>> model = ConvexProbeRegressorCV(alphas=5, cv=3, random_state=0).fit(X, X.max(axis=(1, 2)))
    >>> model.score_path_.shape
    (5, 3)
    """


@dataclass(eq=False, repr=False, kw_only=True)
class ConvexProbeClassifierCV(ClassificationMixin, CrossValidationMixin, ConvexProbeBase):
    """``ConvexProbeClassifier`` with ``alpha`` chosen by cross-validation.

    Parameters
    ----------
    alphas : int or array-like, default=30
        Grid of alphas, or its length from ``alpha_max_`` down to ``eps * alpha_max_``.
    eps : float, default=1e-2
        Ratio of the last to the first alpha of an automatic grid.
    cv, scoring, n_jobs, resume
        As in ``ConvexAttentionClassifierCV``.
    dictionary : "auto", TokenPooling or list of them, default="auto"
        As in ``ConvexProbeClassifier``. It is made once, of the tokens of all samples without their labels.
    generate : int or Generation, default=None
        As in ``ConvexProbeClassifier``. ``alpha`` is chosen with the dictionary alone; weightings are generated in the
        fit of all samples at the best alpha.
    standardize, loss, penalty, solver, tol, max_iter, fit_intercept, class_weight, warm_start, dtype, device, \
memory_limit, random_state, verbose, callback
        As in ``ConvexProbeClassifier``.

    Attributes
    ----------
    alpha_ : float
        The best alpha.
    alphas_ : ndarray of shape (n_alphas,)
        The grid, decreasing.
    score_path_ : ndarray of shape (n_alphas, n_folds)
        Score of each alpha on each fold.
    coef_, intercept_, certificate_, heads_ and others
        As in ``ConvexProbeClassifier``, for the fit of all samples at ``alpha_``.

    Examples
    --------
    >>> import numpy as np
    >>> from convexformer import ConvexProbeClassifierCV
    >>> X = np.random.default_rng(0).normal(size=(60, 5, 2))
    >>> model = ConvexProbeClassifierCV(alphas=5, cv=3, random_state=0).fit(X, X.max(axis=(1, 2)) > 1.5)
    >>> model.score_path_.shape
    (5, 3)
    """

    loss: str | Loss = "auto"
    class_weight: dict | str | None = None

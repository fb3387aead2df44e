"""Estimators that choose ``alpha`` by cross-validation along warm-started, certified paths."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn import config_context
from sklearn.base import is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import check_scoring
from sklearn.model_selection import check_cv
from tqdm.auto import tqdm

from convexformer.targets import ClassTargets, MultilabelTargets
from convexformer.validation import is_integer, predictions, without_objects, without_tensor
from convexformer_solvers import (
    Loss,
    Program,
    SolverResult,
    alpha_grid,
    get_solver,
    iterate_path,
)
from convexformer_solvers.path import check_grid
from convexformer_solvers.validation import warn_caller

from .attention import ClassificationMixin, RegressionMixin
from .base import ConvexAttentionBase, GateParameters, Problem
from .folds import Split, Watch, checked_split, run_folds
from .samples import across_ranks
from .tokens import SavedState, unchanged_on_failure

_STRATIFY = "stratify the folds, with cv=StratifiedKFold(...) or a number of folds, or shuffle them"
_SINGLE = "a class of one sample is missing wherever that is held out: leave it out, or get more samples of it"


@dataclass(eq=False, repr=False, kw_only=True)
class CrossValidationMixin(ConvexAttentionBase):
    """Choice of ``alpha``: paths on the training parts of all folds, then a fit of everything at the best alpha."""

    alphas: int | ArrayLike = 30
    eps: float = 1e-2
    cv: Any = None
    scoring: Any = None
    n_jobs: int | None = None
    resume: str | os.PathLike[str] | None = None

    @unchanged_on_failure
    @across_ranks
    def fit(  # type: ignore[override]  # `resume` is a parameter of the estimator
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        groups: ArrayLike | None = None,
    ) -> Self:
        """Choose ``alpha`` by cross-validation and train to a certified global optimum.

        Parameters
        ----------
        X, y
            As in ``fit`` of the estimator of one ``alpha``, such as ``ConvexAttentionRegressor``.
        sample_weight : array-like of shape (n_samples,), or path, optional
            Non-negative weights, used in training and in scoring; only ratios matter.
        groups : array-like of shape (n_samples,), or path, optional
            Groups that no fold may split, for a `cv` that takes them, such as ``GroupKFold()``.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            If an argument or a parameter is not as described, the gates depend on ``alpha``, the folder of ``resume``
            is of other data, the training part of a fold has less than two classes or one value alone of a label, or
            no alpha has a score; the message names it.
        KeyboardInterrupt
            On Ctrl-C, when no fold is running any more. With ``resume`` the folder then holds what is finished.

        Warns
        -----
        ConvergenceWarning
            If the callback has stopped fits of folds, or the certified relative gap of a fit did not come within
            ``tol``.
        UserWarning
            If the training part of a fold lacks a class, or a score is not a number.
        """
        problem = self._problem(X, y, sample_weight, alpha=None)
        self.alphas_ = np.array(self._grid(problem.program.alpha_max))
        labels = y.numpy(force=True) if torch.is_tensor(y) else np.asarray(y)
        if isinstance(problem.targets, MultilabelTargets):
            labels = without_objects(labels)
        splits = self._splits(labels, groups)
        _check_splits(splits, problem.program.weight)
        if isinstance(problem.targets, ClassTargets):
            _check_classes(splits, np.ravel(labels), problem.program.weight)
        _check_targets(splits, problem)
        self._check_can_resume(self.resume, "folds" if self._draws_folds() else "")
        files = self._resume_files(len(splits))
        total = len(splits) * len(self.alphas_)
        try:
            with tqdm(total=total, disable=not self.verbose, desc=f"{len(splits)} folds", unit="alpha") as bar:
                watch = Watch(bar)
                folds = [
                    partial(self._fold_scores, problem, X, labels, split, file, watch)
                    for split, file in zip(splits, files, strict=True)
                ]
                self.score_path_ = np.column_stack(run_folds(folds, self.n_jobs, watch))
        except KeyboardInterrupt as interruption:
            if self.resume is None:
                raise
            raise KeyboardInterrupt(
                f"interrupted; what is finished is in resume={os.fspath(self.resume)!r}, "
                "and a fit with the same parameters and data goes on from there"
            ) from interruption
        if watch.n_unfinished:
            warn_caller(
                f"callback has stopped {watch.n_unfinished} of the {total} fits that alpha is chosen by, whose scores "
                "are of unfinished fits. To choose by finished ones let it stop none of them; a larger tol or fewer "
                "alphas take less time.",
                ConvergenceWarning,
            )
        self.alpha_ = float(self.alphas_[_best(self.score_path_, self.scoring)])
        self._fit_problem(replace(problem, program=problem.program.with_alpha(self.alpha_)), X)
        return self

    def _saved_state(self) -> SavedState:
        header, arrays = super()._saved_state()
        return header, arrays | {"alphas": self.alphas_, "score_path": self.score_path_}

    def _restore_state(self, header: dict[str, Any], arrays: dict[str, NDArray]) -> None:
        super()._restore_state(header, arrays)
        self.alpha_, self.alphas_, self.score_path_ = header["alpha"], arrays["alphas"], arrays["score_path"]

    def _splits(self, labels: NDArray, groups: ArrayLike | None) -> list[Split]:
        """Training and held-out rows of each fold."""
        groups = without_tensor(groups, "groups")
        if groups is not None and np.shape(groups) != (len(labels),):
            raise ValueError(f"groups must have one entry per sample, {len(labels)}, got shape {np.shape(groups)}")
        try:
            folds = check_cv(self.cv, labels, classifier=is_classifier(self))
            splits = list(folds.split(np.zeros(len(labels)), labels, groups))
        except (ValueError, TypeError) as error:
            if groups is None and "groups" in str(error):
                raise ValueError(f"cv={self.cv!r} needs groups; give them in fit(X, y, groups=...)") from error
            raise ValueError(f"cv={self.cv!r} gives no folds of {len(labels)} samples: {error}") from error
        if not splits:
            raise ValueError(f"cv={self.cv!r} gives no folds; an iterator serves one fit, a list of splits any number")
        return [checked_split(split, index, len(labels)) for index, split in enumerate(splits)]

    def _draws_folds(self) -> bool:
        """Whether each fit draws other folds."""
        return bool(getattr(self.cv, "shuffle", True)) and not is_integer(getattr(self.cv, "random_state", 0))

    def _grid(self, alpha_max: float) -> list[float]:
        if is_integer(self.alphas):
            if self.alphas < 1:
                raise ValueError(f"alphas must be a positive integer or a list of numbers, got {self.alphas!r}")
            return alpha_grid(alpha_max, int(self.alphas), self.eps)
        return sorted(check_grid(self.alphas), reverse=True)

    def _resume_files(self, n_folds: int) -> list[Path] | list[None]:
        """The file of each fold's path."""
        if self.resume is None:
            return [None] * n_folds
        try:
            folder = Path(self.resume)
            folder.mkdir(parents=True, exist_ok=True)
        except (TypeError, ValueError, FileExistsError, NotADirectoryError) as error:
            raise ValueError(f"resume must be None or the path of a folder, got {self.resume!r}") from error
        folder = folder.absolute()  # the working folder may change before a fold begins
        return [folder / f"fold_{index}.npz" for index in range(n_folds)]

    def _fold_scores(
        self, problem: Problem, X: Any, y: NDArray, split: Split, file: Path | None, watch: Watch
    ) -> NDArray[np.float64]:
        """Score on the held-out part for every alpha of the grid."""
        train, test = (torch.as_tensor(rows, device=problem.program.map.device) for rows in split)
        training = replace(problem, program=problem.program.rows(train))
        options = self._options(training.program)
        options |= {"verbose": False, "callback": watch.stopping(self.callback)}
        if self.scoring is None:
            score = _loss_score(problem.program, test)
        else:
            score = self._scorer_score(training, X, y, split[1])
        scores, alphas = [], self.alphas_.tolist()
        results = iterate_path(training.program, get_solver(self.solver), alphas, resume=file, **options)
        for alpha, result in zip(alphas, results, strict=True):
            watch.count(result)
            scores.append(score(alpha, result))
        return np.array(scores)

    def _scorer_score(
        self, training: Problem, X: Any, y: NDArray, test: NDArray[np.int64]
    ) -> Callable[[float, SolverResult], float]:
        """Function that gives scikit-learn's score of the result at an alpha."""
        if not (isinstance(self.scoring, str) or callable(self.scoring)):
            raise ValueError(f"scoring must be None, the name of one score or a scorer, got {self.scoring!r}")
        try:
            scorer = check_scoring(self, scoring=self.scoring)
        except ValueError as error:
            if not isinstance(self.scoring, str):
                raise
            raise ValueError(
                f"scoring={self.scoring!r} is none of scikit-learn's; sklearn.metrics.get_scorer_names() lists them"
            ) from error
        weight = training.sample_weight
        if weight is not None:
            test = test[weight[test] > 0]  # as in _loss_score
        held_out_X = self._chosen_samples(X, test)
        options = {} if weight is None else {"sample_weight": weight[test]}

        def score(alpha: float, result: SolverResult) -> float:
            fitted = copy.copy(self)
            fitted.alpha_ = alpha
            fitted._store(replace(training, program=training.program.with_alpha(alpha)), result, X)
            try:
                with config_context(array_api_dispatch=False):  # predictions are arrays, as the labels are
                    return float(scorer(fitted, held_out_X, y[test], **options))
            except (AttributeError, TypeError, ValueError) as error:  # the first of probabilities that a loss has not
                fault = f"gives no score of these predictions: {error}"
                if isinstance(error, TypeError) and "sample_weight" in str(error):
                    fault = "takes no sample_weight, which fit was given; give a score that counts weights, or none"
                elif "pos_label" in str(error):
                    fault += "; give a scorer that knows it, as make_scorer(..., pos_label=...) of scikit-learn makes"
                raise ValueError(f"scoring={self.scoring!r} {fault}") from error

        return score


def _best(scores: NDArray[np.float64], scoring: Any) -> int:
    """Position of the best mean over the folds, of the first of equals; means that are not numbers come last."""
    means = scores.mean(axis=1)
    missing = np.isnan(means)
    if missing.any():
        folds = np.flatnonzero(np.isnan(scores).any(axis=0)).tolist()
        found = f"scoring={scoring!r} gives NaN at {missing.sum()} of {len(means)} alphas, on folds {folds}"
        remedy = "give a score that is defined on every fold, or larger folds"
        if missing.all():
            raise ValueError(f"{found}; {remedy}")
        warn_caller(f"{found}; these alphas are not chosen. To choose among all {remedy}.", UserWarning)
    return int(np.where(missing, -np.inf, means).argmax())


def _loss_score(program: Program, test: torch.Tensor) -> Callable[[float, SolverResult], float]:
    """Function that gives minus the mean loss of some samples, which by themselves need be no program."""
    test = test[program.weight[test] > 0]  # what does not count may have a loss that is infinite
    held_out, weight, target = program.map.rows(test), program.weight[test], program.y[test]

    def score(alpha: float, result: SolverResult) -> float:
        pred = predictions(held_out, result.coef, result.intercept, torch.float64)
        return -float(weight @ program.loss.value(pred, target) / weight.sum())

    return score


def _check_splits(splits: list[Split], weight: torch.Tensor) -> None:
    """Raise ``ValueError`` when all samples on one side of a split have weight zero."""
    for index, split in enumerate(splits):
        for rows, name in zip(split, ("training", "held-out"), strict=True):
            if not bool(weight[torch.as_tensor(rows, device=weight.device)].any()):
                raise ValueError(
                    f"cv: every {name} sample of fold {index} has weight zero, so that it cannot be used; leave "
                    "samples of weight zero out, or shuffle or stratify the folds (fewer of them help as well)"
                )


def _check_targets(splits: list[Split], problem: Problem) -> None:
    """Raise ``ValueError`` when the targets of a training part are not enough to fit, as counts all zero."""
    program = problem.program
    for index, (rows, _) in enumerate(splits):
        training = torch.as_tensor(rows, device=program.y.device)
        training = training[program.weight[training] > 0]
        try:
            program.loss.check_target(program.y[training])
            problem.targets.check_part(program.y[training].numpy(force=True))
        except ValueError as error:
            raise ValueError(
                f"cv: the training part of fold {index} is no data to fit by itself, as {error}; shuffle the folds, or "
                "take other ones"
            ) from error


def _check_classes(splits: list[Split], labels: NDArray, weight: torch.Tensor) -> None:
    """Raise ``ValueError`` when a training part has less than two classes; warn of those that lack some classes."""
    counted = weight.numpy(force=True) > 0
    classes, sizes = np.unique(labels[counted], return_counts=True)
    lacking, remedy = [], _STRATIFY
    for index, (rows, _) in enumerate(splits):
        training = np.zeros(len(labels), dtype=bool)
        training[rows] = True
        missing = np.setdiff1d(classes, labels[training & counted]).tolist()
        if missing:
            lacking.append(f"{missing} in fold {index}")
            remedy = _SINGLE if np.isin(missing, classes[sizes == 1]).any() else remedy
        if len(classes) - len(missing) < 2:
            raise ValueError(
                f"cv: there is no training sample of {lacking[-1]}, so that there is nothing to tell apart; {remedy}"
            )
    if lacking:
        found = f"cv: there is no training sample of {', '.join(lacking)}, so these folds cannot select alpha well"
        warn_caller(f"{found}; {remedy}", UserWarning)


@dataclass(eq=False, repr=False, kw_only=True)
class ConvexAttentionRegressorCV(RegressionMixin, GateParameters, CrossValidationMixin):
    """``ConvexAttentionRegressor`` with ``alpha`` chosen by cross-validation.

    Parameters
    ----------
    alphas : int or array-like, default=30
        Grid of alphas, or its length from ``alpha_max_`` down to ``eps * alpha_max_``.
    eps : float, default=1e-2
        Ratio of the last to the first alpha of an automatic grid.
    cv : int, splitter, iterable or None, default=None
        Folds, as in scikit-learn; five by default. Where samples come in groups that no fold may split:
        ``GroupKFold()``, with ``fit(X, y, groups=groups)``.
    scoring : str or callable, default=None
        Score to maximise, as in scikit-learn. Default: minus the mean loss on the held-out samples.
    n_jobs : int, default=None
        Folds to run at once, in threads; `callback` is called from all of them.
    resume : str or path-like, default=None
        A folder in which the path of each fold is kept, made if it is not there. After Ctrl-C a fit with the same
        data, folds and grid goes on from it; folds and gates that are drawn need an int as `random_state`.
    loss, penalty, activation, n_gates, gates, solver, tol, max_iter, fit_intercept, warm_start, dtype, device, \
memory_limit, random_state, verbose, callback
        As in ``ConvexAttentionRegressor``. Gates are made once, on all samples; those that depend on ``alpha``,
        ``"generated"``, are refused.

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


@dataclass(eq=False, repr=False, kw_only=True)
class ConvexAttentionClassifierCV(ClassificationMixin, GateParameters, CrossValidationMixin):
    """``ConvexAttentionClassifier`` with ``alpha`` chosen by cross-validation.

    Parameters
    ----------
    alphas : int or array-like, default=30
        Grid of alphas, or its length from ``alpha_max_`` down to ``eps * alpha_max_``.
    eps : float, default=1e-2
        Ratio of the last to the first alpha of an automatic grid.
    cv : int, splitter, iterable or None, default=None
        Folds, as in scikit-learn; five stratified ones by default, or for several labels per sample not stratified.
        Where samples come in groups that no fold may split: ``StratifiedGroupKFold()``, with
        ``fit(X, y, groups=groups)``.
    scoring : str or callable, default=None
        Score to maximise, as in scikit-learn. Default: minus the mean loss on the held-out samples.
    n_jobs : int, default=None
        Folds to run at once, in threads; `callback` is called from all of them.
    resume : str or path-like, default=None
        A folder in which the path of each fold is kept, made if it is not there. After Ctrl-C a fit with the same
        data, folds and grid goes on from it; folds and gates that are drawn need an int as `random_state`.
    loss, penalty, activation, n_gates, gates, solver, tol, max_iter, fit_intercept, class_weight, warm_start, dtype, \
device, memory_limit, random_state, verbose, callback
        As in ``ConvexAttentionClassifier``. Gates are made once, on all samples; those that depend on ``alpha``,
        ``"generated"``, are refused.

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

    loss: str | Loss = "auto"
    class_weight: dict | str | None = None

"""scikit-learn estimator for sequence targets: a network trained to a certified global optimum, with its map."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from convexformer.estimators.attention import ScoreMixin
from convexformer.estimators.samples import across_ranks
from convexformer.estimators.tokens import CertifiedEstimator, SavedState, described, rebuilt, unchanged_on_failure
from convexformer.heads.sequence import SequenceHeads
from convexformer.programs.sequence import SequenceForm, get_form, sequence_program, signed_coef
from convexformer.validation import (
    Result,
    check_flag,
    check_number_target,
    check_rows,
    check_weight,
    predictions,
    result_of,
)
from convexformer_solvers import (
    LOSSES,
    PENALTIES,
    Program,
    SolverInterrupted,
    SolverResult,
    get_solver,
    solve,
)


@dataclass(eq=False, repr=False)
class ConvexSequenceRegressor(ScoreMixin, MultiOutputMixin, RegressorMixin, CertifiedEstimator):
    r"""Attention network for sequence targets, trained to a certified global optimum.

    Minimises over any number of heads, with a bias :math:`b \in R^{T \times c}` without decay,

    .. math:: \sum_i p_i \, L\Big(b + \sum_j W_{1j} X_i w_{2j} w_{3j}^\top, \; Y_i\Big) + \alpha \sum_j \text{decay}_j

    by solving the equivalent convex program (``sequence_program``; paper [C], Theorem A.1, corrected). The :math:`p_i`
    are the weights of the samples over their sum. ``W1`` is shared by all samples, so the network shows one attention
    map, ``attention_map_``.

    Parameters
    ----------
    alpha : float, default=0.01
        Weight of the decay against the loss: mean over samples of the sum over target rows and outputs; positive.
    form : {"single_row", "stochastic", "substochastic"}, default="single_row"
        Class of networks. ``"single_row"``: each head reads for one target row; scales to the largest data.
        ``"stochastic"``: ``W1`` has rows in the simplex; ``2 c d n T`` coefficients, so for small ones.
        ``"substochastic"``: the rows may sum to less than 1.
    penalty : {"group_l2", "nuclear"}, default="group_l2"
        Decay of ``"single_row"`` heads: l1 norm of ``w3``, or standard weight decay, which lets outputs share features.
    loss : {"squared", "huber", "poisson"} or Loss, default="squared"
        Loss of each number.
    solver : str or Solver, default="auto"
        As in ``ConvexAttentionRegressor``. ``"auto"`` is ``"fista"`` for the stochastic forms, for which there are also
        ``"column_generation"`` and, on small data, ``"exact"`` (cvxpy).
    tol : float, default=1e-4
        Bound on the certified relative gap.
    max_iter : int, default=10000
        Iterations at most.
    fit_intercept : bool, default=True
        Whether there is a bias per target row and output.
    dtype : {None, "float32", "float64"}, default=None
        Precision in which the solver works; that of ``X`` by default, float32 for half precision. The stochastic forms
        need float64 and always work in it.
    device : str or torch.device, default=None
        Device to work on; that of ``X`` by default.
    memory_limit : int or str, default=None
        Memory that a fit to data on a disk takes at most, beside vectors with a number for each output and each sample
        or feature, in bytes or as text such as ``"500 MB"`` or ``"2 GiB"``. Data of up to half of the limit are read
        into memory. Each pass reads larger data in parts. Default: a quarter of the free memory.
    verbose : bool, default=False
        Whether to show a progress bar with gap and objective.
    callback : callable, default=None
        Called with a ``Progress`` at each certificate; returning True stops the fit.

    Attributes
    ----------
    coef_ : ndarray of shape (n_targets, n_tokens, n_features, n_outputs)
        Coefficients: ``pred[t] = sum_k coef_[t, k]' x_k + intercept_[t]``.
    intercept_ : ndarray of shape (n_targets, n_outputs)
        Bias.
    attention_map_ : ndarray of shape (n_targets, n_tokens)
        How much each target row reads from each token: mean ``W1`` of the heads, weighted by their decay. Rows sum to 1
        in the form ``"stochastic"``; for ``"single_row"`` the whole sums to 1. All zero without heads.
    heads_ : SequenceHeads
        The network, recovered when first asked for.
    certificate_ : Certificate
        ``primal``, ``dual``, ``gap`` and ``relative_gap`` at the returned point, in float64.
    dual_gap_ : float
        ``certificate_.gap``: the objective is at most this far above the global optimum.
    alpha_max_ : float
        Smallest ``alpha`` whose solution is zero.
    status_ : Status
        How the solve ended.
    history_ : History
        Certified progress.
    n_iter_ : int
        Iterations done.
    traffic_ : Traffic or None
        What was read of data on a disk; None of data in memory.
    n_features_in_, n_tokens_in_ : int
        Shape of a sample.

    See Also
    --------
    ConvexAttentionRegressor : One row of outputs per sample.

    Examples
    --------
    >>> import numpy as np
    >>> from convexformer import ConvexSequenceRegressor
    >>> X = np.random.default_rng(0).normal(size=(60, 4, 3))
    >>> Y = X[:, ::-1, :1]  # each row of the target is a feature of the token opposite
    >>> model = ConvexSequenceRegressor(alpha=0.1).fit(X, Y)
    >>> model.attention_map_.argmax(axis=1), len(model.heads_)
    (array([3, 2, 1, 0]), 4)
    """

    alpha: float = 0.01
    _: KW_ONLY
    form: str | SequenceForm = "single_row"

    @unchanged_on_failure
    @across_ranks
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train to a certified global optimum.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens), path or source
            Token sequences; each column of two-dimensional data is a token of width 1. What ``open_source`` takes, as
            the path of a file or a folder of shards, is read from the disk where it is large for `memory_limit`. Under
            ``torchrun`` each rank gives its own samples, or all give one path, of which each reads its part.
        y : array-like of shape (n_samples, n_targets, n_outputs), (n_samples, n_targets) or (n_samples,), or path
            Target sequences; two-dimensional ones have one output per row, one-dimensional ones one row. A path, as
            ``"shards"`` or ``"data.npz:y"``, is read into memory.
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
            On Ctrl-C, **after** the best point so far and its certificate are stored: the estimator is usable.

        Warns
        -----
        ConvergenceWarning
            If the certified relative gap did not come within ``tol``.
        """
        form = get_form(self.form)
        tokens = self._placed_samples(X, reset=True)
        weight = check_weight(sample_weight, len(tokens))
        y = _check_sequences(y, len(tokens))
        target = y.reshape(len(y), y.shape[1] if y.ndim > 1 else 1, -1)
        program = sequence_program(
            tokens,
            target,
            alpha=self.alpha,
            form=form,
            penalty=self.penalty,
            loss=self.loss,
            sample_weight=weight,
            fit_intercept=check_flag(self.fit_intercept, "fit_intercept"),
        )
        options = self._options(program)
        if form.exact_sums and options["dtype"] != torch.float64:
            raise ValueError(
                f"dtype must be None or 'float64' with form={form.name!r}: in float32 no two rows have equal sums"
            )
        self._y_ndim, self._target_shape = y.ndim, target.shape[1:]
        try:
            result = solve(program, get_solver(self.solver), **options)
        except SolverInterrupted as interruption:
            self._store(form, program, interruption.result, X)
            raise
        self._store(form, program, result, X)
        return self

    def _store(self, form: SequenceForm, program: Program, result: SolverResult, like: Any) -> None:
        penalty = form.check_penalty(self.penalty)
        trained_for = {"alpha": program.alpha, "form": form, "penalty": penalty, "loss": program.loss}
        self._store_network((result.coef, result.intercept), trained_for, like)
        self._store_certificate(program, result)

    def _store_network(self, solution: tuple[Tensor, Tensor], trained_for: dict[str, Any], like: Any) -> None:
        """Set every attribute that follows from the solution alone; results are of the kind of `like`."""
        coef, intercept = (part.cpu() for part in solution)
        form, shape = trained_for["form"], (self._target_shape[0], self.n_tokens_in_)
        self._solution, self._trained_for = (coef, intercept), trained_for
        self._heads: SequenceHeads | None = None
        self.coef_ = result_of(signed_coef(coef, form, *shape).contiguous(), like)
        self.intercept_ = result_of(intercept.view(tuple(self._target_shape)), like)
        self.attention_map_ = result_of(form.attention(coef, trained_for["penalty"], *shape), like)

    def _saved_state(self) -> SavedState:
        header, arrays = super()._saved_state()
        trained_for = self._trained_for
        network = {
            "loss": described(trained_for["loss"], LOSSES),
            "penalty": described(trained_for["penalty"], PENALTIES),
            "alpha": trained_for["alpha"],
            "form": trained_for["form"].name,
            "targets": [self._y_ndim, *self._target_shape],
        }
        return header | network, arrays

    def _restore_state(self, header: dict[str, Any], arrays: dict[str, NDArray]) -> None:
        super()._restore_state(header, arrays)
        self._y_ndim, *target_shape = header["targets"]
        self._target_shape = tuple(target_shape)
        trained_for = {
            "loss": rebuilt(header["loss"], LOSSES),
            "penalty": rebuilt(header["penalty"], PENALTIES),
            "alpha": header["alpha"],
            "form": get_form(header["form"]),
        }
        self._store_network(self._solution, trained_for, like=None)

    @property
    def heads_(self) -> SequenceHeads:
        """The network as its heads, recovered when first asked for: there may be very many."""
        check_is_fitted(self)
        if self._heads is None:
            self._heads = SequenceHeads.from_coef(*self._solution, n_targets=self._target_shape[0], **self._trained_for)
        return self._heads

    def predict(self, X: ArrayLike) -> Result:
        """Predict target sequences (their means for the Poisson loss).

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens), path or source
            As in ``fit``; under ``torchrun`` each rank predicts the samples that it is given.

        Returns
        -------
        ndarray of shape (n_samples, n_targets, n_outputs), (n_samples, n_targets) or (n_samples,)
            As ``y`` in ``fit``.
        """
        check_is_fitted(self)
        tokens = self._placed_samples(X)
        coef, intercept = (part.to(tokens.device) for part in self._solution)
        outputs = predictions(self._trained_for["form"].linear_map(tokens), coef, intercept, tokens.dtype)
        means: Tensor = self._trained_for["loss"].mean(outputs)
        shapes: dict[int, tuple[int, ...]] = {1: (), 2: (self._target_shape[0],), 3: tuple(self._target_shape)}
        return result_of(means.reshape(len(means), *shapes[self._y_ndim]), X)

    def _score_of(self, target: Any, weight: Any, pred: Any) -> float:
        """Mean over target rows and outputs of the coefficient of determination R2."""
        pred = torch.as_tensor(pred).numpy(force=True)
        target = _check_sequences(target, len(pred))
        if target.shape != pred.shape:
            raise ValueError(f"y must have shape {pred.shape} as in fit, got {target.shape}")
        flat = (np.reshape(part, (len(target), -1)) for part in (target, pred))
        return float(r2_score(*flat, sample_weight=weight))


def _check_sequences(y: Any, n_samples: int) -> NDArray[np.float64]:
    """Check target sequences: finite numbers with one to three axes."""
    y = check_number_target(y)
    if y.ndim > 3:
        raise ValueError(f"y must have shape (n_samples, n_targets, n_outputs), got {y.shape}")
    check_rows(y, n_samples)
    return y

"""scikit-learn estimators: certified probes of tokens that a dictionary of weightings pools."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import is_classifier
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from convexformer.memory import check_memory_limit
from convexformer.nn.modules.base import copied_to
from convexformer.nn.modules.probe import ProbeNetwork, TokenPooler
from convexformer.preprocessing.checking import check_sequences, choose_samples
from convexformer.preprocessing.dictionary import factors_of, get_dictionary, make_pooler
from convexformer.preprocessing.moments import Moments
from convexformer.preprocessing.pooled import block_moments, pooled_map, pooled_predictions, scale_blocks
from convexformer.preprocessing.pooling import pooled
from convexformer.preprocessing.sequences import TokenSequences
from convexformer.preprocessing.sharded import ShardedSequences
from convexformer.probes.explanation import Explanation
from convexformer.probes.generate import (
    DualPoint,
    Generation,
    GenerationReport,
    GenerationStop,
    WeightingRound,
    find_weightings,
    get_generation,
)
from convexformer.programs.build import program_of
from convexformer.targets import Targets
from convexformer.validation import check_device, check_flag, check_stream, result_of
from convexformer_solvers import Callback, LinearMap, Loss, Penalty, Solver, SolverResult

from .attention import ClassificationMixin, RegressionMixin
from .base import ConvexAttentionBase, Problem, ProgramParts
from .cv import CrossValidationMixin
from .tokens import SavedState


@dataclass(frozen=True, kw_only=True)
class ProbeProblem(Problem):
    """A program on pooled tokens.

    Attributes
    ----------
    pooler : TokenPooler
        The dictionary.
    samples : TokenSequences
        The training samples.
    start : pair of Tensor or None
        Coefficients and intercept to start from.
    """

    pooler: TokenPooler
    samples: TokenSequences
    start: tuple[Tensor, Tensor] | None = None


class ConvexProbeBase(ConvexAttentionBase):
    """What probes share: the dictionary, the program on pooled tokens, and explanations."""

    _of_all_ranks = ShardedSequences

    dictionary: Any
    generate: int | Generation | None
    standardize: bool
    memory_limit: int | None
    activation = "linear"
    _generates_after_a_grid = False
    generation_: GenerationReport | None

    # Building the program

    def _check_model(self, is_grid: bool) -> None:
        get_dictionary(self.dictionary, longest=1)
        check_flag(self.standardize, "standardize")
        check_memory_limit(self.memory_limit)
        if get_generation(self.generate) is not None and is_grid and not self._generates_after_a_grid:
            raise ValueError(
                f"generate={self.generate!r} depends on alpha, so a grid of alphas has no one program; leave it out"
            )

    def _read_samples(self, X: Any, reset: bool, part: slice | None = None) -> TokenSequences:
        samples = check_sequences(self, X, reset, part)
        self._n_dims = 3
        return samples

    def _build(
        self, samples: Any, parts: ProgramParts, targets: Targets, sample_weight: NDArray[np.float64] | None
    ) -> ProbeProblem:
        stream = check_stream(self.random_state)
        before = stream.get_state()
        pooler = make_pooler(
            get_dictionary(self.dictionary, int(samples.lengths.max())),
            samples,
            standardize=bool(self.standardize),
            random_state=stream,
            sample_weight=None if parts.sample_weight is None else parts.sample_weight.numpy(force=True),
        )
        self._drawn = "" if all(map(np.array_equal, before, stream.get_state())) else "weightings"
        samples = samples.to(parts.target.device)
        pooler, linear_map = self._scaled(pooler, samples, parts.sample_weight)
        program = program_of(linear_map, *parts)
        return ProbeProblem(program, targets, None, sample_weight, pooler=pooler, samples=samples)

    def _scaled(
        self, pooler: TokenPooler, samples: TokenSequences, weight: Tensor | None
    ) -> tuple[TokenPooler, LinearMap]:
        """The dictionary with its factors, where tokens are standardised, and the linear map of its program."""
        linear_map = self._map(pooler, samples)
        if self.standardize:
            own = None if weight is None else {"weight": weight}
            factors = factors_of(Moments.joined(linear_map.each_part(block_moments, own)))
            linear_map.each_part(scale_blocks, factors=factors)
            pooler = TokenPooler(pooler.weightings, pooler.mean, pooler.scale, factors)
        return pooler, linear_map

    def _map(self, pooler: TokenPooler, samples: TokenSequences) -> LinearMap:
        """The pooled tokens, in memory or, beyond the limit, in a file."""
        return samples.map_made(pooled_map, pooler=pooler, memory_limit=self.memory_limit)

    # Solving

    def _start(self, problem: Problem) -> tuple[Tensor, Tensor] | None:
        own = cast(ProbeProblem, problem).start
        return super()._start(problem) if own is None else own

    def _fit_problem(self, problem: Problem, like: Any, resume: Any = None) -> None:
        self.generation_ = None
        super()._fit_problem(problem, like, resume)
        generation = get_generation(self.generate)
        if generation is not None:
            self._grow(cast(ProbeProblem, problem), generation, like)

    def _grow(self, problem: ProbeProblem, generation: Generation, like: Any) -> None:
        """Add weightings while they lower the objective; after each round the estimator has the solution so far."""
        rounds: list[WeightingRound] = []
        self.generation_ = GenerationReport(rounds, generation.said(GenerationStop.INTERRUPTED))  # until it has ended
        stream = check_stream(self.random_state)
        left, end = generation.max_new, GenerationStop.BUDGET
        while left:
            n_before, certificate = problem.pooler.n_weightings, self.certificate_
            problem, violation = self._extended(problem, generation, left, stream)
            n_added = problem.pooler.n_weightings - n_before
            rounds.append(WeightingRound(n_before, certificate.primal, certificate.dual, violation, n_added))
            if n_added == 0:
                end = GenerationStop.NONE_FOUND
                break
            left -= n_added
            super()._fit_problem(problem, like)
        self.generation_ = GenerationReport(rounds, generation.said(end))

    def _extended(
        self, problem: ProbeProblem, generation: Generation, left: int, stream: np.random.RandomState
    ) -> tuple[ProbeProblem, float]:
        """The problem with weightings that violate the dual constraint of its solution, and the largest violation."""
        program, samples = problem.program.with_float64_targets(), problem.samples
        theta = cast(Tensor, self.certificate_.dual_point).to(program.y.device)
        point = DualPoint.of(program, theta, problem.pooler, samples)
        pooler, violation, n_new = problem.pooler, -np.inf, 0
        for n_kinds, kind in zip(range(len(generation.kinds), 0, -1), generation.kinds, strict=True):
            n_wanted = -(-(min(generation.per_round, left) - n_new) // n_kinds)  # an even share, rounded up
            found = find_weightings(point, kind, generation, n_wanted, stream)
            violation = max(violation, found.violation)
            if found.weights is not None:
                pooler = pooler.extended(found.weights, found.factors)
                n_new = pooler.n_weightings - problem.pooler.n_weightings
        if n_new == 0:
            return problem, violation
        linear_map = self._map(pooler, samples)
        coef, intercept = self._solution
        coef = torch.cat([coef, coef.new_zeros((n_new, *coef.shape[1:]))]).to(program.y.device)
        start = (coef, intercept.to(coef.device))
        program = replace(problem.program, map=linear_map)
        return replace(problem, program=program, pooler=pooler, start=start), violation

    def _store(self, problem: Problem, result: SolverResult, like: Any) -> None:
        own = cast(ProbeProblem, problem)
        self.pooler_ = own.pooler
        super()._store(problem, result, like)
        self.traffic_ = own.samples.traffic()

    def _store_network(self, solution: tuple[Tensor, Tensor], *, like: Any, **parts: Any) -> None:
        super()._store_network(solution, like=like, **parts)
        self.weighting_norms_ = self.token_norms_
        del self.token_norms_

    # Saving and loading

    def _saved_state(self) -> SavedState:
        header, arrays = super()._saved_state()
        state = {f"pooler.{name}": tensor.numpy(force=True) for name, tensor in self.pooler_.state_dict().items()}
        return header | {"parts": self.pooler_.described()}, arrays | state

    def _restore_state(self, header: dict[str, Any], arrays: dict[str, NDArray]) -> None:
        own = {name.removeprefix("pooler."): array for name, array in arrays.items() if name.startswith("pooler.")}
        self.pooler_ = TokenPooler.rebuilt(header["parts"], own)
        self.generation_ = None
        super()._restore_state(header, arrays)

    # Predicting

    def _outputs(self, X: Any) -> Tensor:
        check_is_fitted(self)
        samples = self._read_samples(X, reset=False)
        samples = samples.to(check_device(self.device, samples.device))
        coef, intercept = self._solution
        return samples.rows_made(pooled_predictions, pooler=self.pooler_, coef=coef, intercept=intercept)

    def _chosen_samples(self, X: Any, index: NDArray[np.int64]) -> Any:
        return choose_samples(X, index)

    def pool(self, X: Any) -> Any:
        """Pooled tokens, which the program is about: ``heads_.predict(model.pool(X))`` are the outputs.

        Parameters
        ----------
        X : array-like or pair
            As in ``fit``.

        Returns
        -------
        ndarray of shape (n_samples, n_weightings, n_features)
        """
        check_is_fitted(self)
        return result_of(pooled(self.pooler_, self._read_samples(X, reset=False)), X)

    def to_torch(self) -> ProbeNetwork:
        """The probe as a torch module, from tokens and a mask to outputs.

        Returns
        -------
        ProbeNetwork
            In the precision of the fit. It exports by ``torch.export`` and saves itself by ``save_pretrained``.
        """
        check_is_fitted(self)
        return ProbeNetwork(copied_to(self.pooler_, "cpu"), *self._solution)

    def explain(self, X: Any) -> Explanation:
        r"""What each token adds to the scores.

        .. math:: f(X) = b + \sum_k \Big( \sum_j f_j \, a_j(X)_k \, \tilde x_k^\top Z_j \Big)

        Parameters
        ----------
        X : array-like or pair
            As in ``fit``.

        Returns
        -------
        Explanation
            Contributions that sum, with the intercept, to ``decision_function`` of a classifier and to the outputs of a
            regressor: the predictions, or their logarithm for the Poisson loss.
        """
        check_is_fitted(self)
        samples = self._read_samples(X, reset=False)
        samples = samples.to(check_device(self.device, samples.device))
        network = self.to_torch().to(samples.device)
        dtype = torch.promote_types(samples.dtype, network.coef.dtype)
        network.coef.data, network.bias.data = network.coef.data.to(dtype), network.bias.data.to(dtype)
        found: list[Tensor] = []
        n_outputs = network.coef.shape[2]
        with torch.no_grad():
            for _, tokens, mask in samples.chunks(self.pooler_.n_weightings * n_outputs):
                parts = network.contributions(tokens.to(dtype), mask)
                found += [self._shown(part[real]) for part, real in zip(parts, mask, strict=True)]
            baseline = self._shown(network.bias.detach()[None])[0]
        single = baseline.shape[0] == 1 and (is_classifier(self) or self._targets.single)
        arrays = [(part[:, 0] if single else part).numpy(force=True) for part in found]
        values = float(baseline[0]) if single else baseline.numpy(force=True)
        return Explanation(arrays, values, getattr(self, "classes_", None))

    def _shown(self, outputs: Tensor) -> Tensor:
        """Outputs as ``decision_function`` has them, for a classifier."""
        return outputs


class ConvexProbeRegressor(RegressionMixin, ConvexProbeBase):
    r"""Certified probe for regression: content-dependent pooling of tokens, trained to a certified global optimum.

    A dictionary holds fixed weightings :math:`a_j(X) \in R^n` of the tokens of a sample, which depend on what the
    tokens hold. It makes each sample, of any number of tokens, :math:`h` pooled tokens :math:`T_j(X)`. The probe
    minimises, over any number of heads that each pick weightings,

    .. math:: \frac{1}{\sum_i s_i} \sum_i s_i \, L\Big(b + \sum_j T_j(X_i)^\top Z_j, \; y_i\Big)
              + \alpha \sum_j \Omega(Z_j), \qquad T_j(X) = f_j \sum_k a_j(X)_k \, \tilde x_k

    with :math:`\tilde x` the standardised tokens, :math:`f_j` factors that give the pooled tokens of each weighting
    variance one, and :math:`\Omega` the decay of the heads (paper [C], Thms 1 and 2, on :math:`T`). The certificate is
    exact for the dictionary.

    Parameters
    ----------
    alpha : float, default=0.01
        Weight of the decay against the **mean** loss; positive. At ``alpha_max_`` the solution becomes zero.
    dictionary : "auto", TokenPooling or list of them, default="auto"
        What makes the weightings: the poolings of ``convexformer.preprocessing``. ``"auto"`` is the mean, 128
        queries and 32 gates, none of which look at positions; where all samples have one token it is the mean alone.
        Draws depend neither on the order of samples and tokens nor on weights, other than those of zero.
    generate : int or Generation, default=None
        Queries and gates to add at most by column generation: those whose dual constraint the solution violates most.
        They are found by local search, so that none found does not prove that none is left.
    standardize : bool, default=True
        Whether tokens are standardised, and the pooled tokens of each weighting scaled to variance one.
    loss : {"squared", "huber", "poisson"} or Loss, default="squared"
        Loss of the outputs.
    penalty : {"group_l2", "nuclear"} or Penalty, default="group_l2"
        Convex form of the decay: ``"group_l2"`` for the l1 norm of ``w3``, ``"nuclear"`` for the l2 norm, the standard
        weight decay, which lets outputs share features. Equal for one output.
    solver : str or Solver, default="auto"
        As in ``ConvexAttentionRegressor``.
    tol : float, default=1e-4
        Bound on the certified relative gap.
    max_iter : int, default=10000
        Iterations of each solve at most.
    fit_intercept : bool, default=True
        Whether there is a bias per output, without decay.
    warm_start : bool, default=False
        Whether to start from the previous solution where shapes agree.
    dtype : {None, "float32", "float64"}, default=None
        Precision in which the solver works; that of ``X`` by default, float32 for half precision. Certificates are
        always in float64.
    device : str or torch.device, default=None
        Device to work on; that of ``X`` by default.
    memory_limit : int, default=None
        Bytes of pooled tokens to hold in memory at most. Where they take more they are in a temporary file, of which
        ``solver="auto"`` makes no copy: it then takes gradient steps alone. Default: they are in memory, and it is an
        error where they do not fit. Of each rank, under ``torchrun``.
    random_state : int, RandomState or None, default=None
        Draws what poolings draw that have no `random_state` of their own, and the starting points of `generate`.
    verbose : bool, default=False
        Whether to show a progress bar with gap and objective.
    callback : callable, default=None
        Called with a ``Progress`` at each certificate; returning True stops the solve.

    Attributes
    ----------
    coef_ : ndarray of shape (n_weightings, n_features[, n_outputs])
        The :math:`Z_j`, for pooled tokens.
    intercept_ : float or ndarray of shape (n_outputs,)
        Bias.
    certificate_ : Certificate
        ``primal``, ``dual``, ``gap`` and ``relative_gap`` at the returned point, in float64.
    dual_gap_ : float
        ``certificate_.gap``: the objective is at most this far above the optimum of the dictionary.
    heads_ : Heads
        The network on pooled tokens, ``pool(X)``.
    weighting_norms_ : ndarray of shape (n_weightings,)
        Penalty, without ``alpha``, that each weighting carries; zero where it is unused.
    pooler_ : TokenPooler
        The dictionary, a torch module.
    generation_ : GenerationReport or None
        Rounds of `generate` and how it ended.
    alpha_max_ : float
        Smallest ``alpha`` whose solution is zero, for the weightings that there are.
    traffic_ : Traffic or None
        ``passes``, ``read_bytes`` and ``bytes_per_second`` of tokens on a disk, over ranks in all; None of tokens in
        memory and after loading.
    loss_, penalty_ : Loss, Penalty
        The instances used.
    status_ : Status
        How the last solve ended.
    history_ : History
        Certified progress of the last solve.
    n_iter_ : int
        Iterations of the last solve.
    n_features_in_ : int
        Features per token.

    See Also
    --------
    ConvexProbeClassifier : For labels.
    convexformer.preprocessing : The poolings.

    Examples
    --------
    >>> import numpy as np
    >>> from convexformer import ConvexProbeRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = [rng.normal(size=(rng.integers(1, 9), 3)) for _ in range(80)]  # samples of 1 to 8 tokens
    >>> y = np.array([np.maximum(tokens[:, 0], 0).mean() for tokens in X])  # not a function of the mean token
    >>> model = ConvexProbeRegressor(alpha=0.001, random_state=0).fit(X, y)
    >>> bool(model.certificate_.relative_gap <= 1e-4), model.score(X, y) > 0.9
    (True, True)
    """

    def __init__(
        self,
        alpha: float = 0.01,
        *,
        dictionary: Any = "auto",
        generate: int | Generation | None = None,
        standardize: bool = True,
        loss: str | Loss = "squared",
        penalty: str | Penalty = "group_l2",
        solver: str | Solver = "auto",
        tol: float = 1e-4,
        max_iter: int = 10_000,
        fit_intercept: bool = True,
        warm_start: bool = False,
        dtype: Any = None,
        device: Any = None,
        memory_limit: int | None = None,
        random_state: Any = None,
        verbose: bool = False,
        callback: Callback | None = None,
    ) -> None:
        self.alpha = alpha
        self.dictionary = dictionary
        self.generate = generate
        self.standardize = standardize
        self.loss = loss
        self.penalty = penalty
        self.solver = solver
        self.tol = tol
        self.max_iter = max_iter
        self.fit_intercept = fit_intercept
        self.warm_start = warm_start
        self.dtype = dtype
        self.device = device
        self.memory_limit = memory_limit
        self.random_state = random_state
        self.verbose = verbose
        self.callback = callback


class ConvexProbeClassifier(ClassificationMixin, ConvexProbeBase):
    r"""Certified probe for classification: content-dependent pooling of tokens, trained to a certified global optimum.

    The objective is that of ``ConvexProbeRegressor`` with a loss of labels.

    Parameters
    ----------
    alpha : float, default=0.01
        Weight of the decay against the **mean** loss; positive. At ``alpha_max_`` the solution becomes zero.
    dictionary, generate, standardize
        As in ``ConvexProbeRegressor``.
    loss : {"auto", "logistic", "softmax", "squared_hinge"} or Loss, default="auto"
        ``"auto"`` is logistic for two classes and softmax cross-entropy for more. A loss of margins with more than two
        classes trains one output per class against the rest.
    penalty : {"group_l2", "nuclear"} or Penalty, default="group_l2"
        As in ``ConvexProbeRegressor``.
    solver, tol, max_iter, fit_intercept
        As in ``ConvexProbeRegressor``.
    class_weight : dict, "balanced" or None, default=None
        Factors on the weights of classes, as in scikit-learn.
    warm_start, dtype, device, memory_limit, random_state, verbose, callback
        As in ``ConvexProbeRegressor``.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Sorted labels.
    coef_, intercept_, certificate_, heads_, weighting_norms_, pooler_, generation_ and others
        As in ``ConvexProbeRegressor``.

    See Also
    --------
    ConvexProbeClassifierCV : Chooses ``alpha`` by cross-validation.

    Examples
    --------
    >>> import numpy as np
    >>> from convexformer import ConvexProbeClassifier
    >>> rng = np.random.default_rng(0)
    >>> X = [rng.normal(size=(rng.integers(1, 9), 3)) for _ in range(80)]  # samples of 1 to 8 tokens
    >>> y = np.array(["up" if tokens.max() > 1.5 else "down" for tokens in X])
    >>> model = ConvexProbeClassifier(alpha=0.005, random_state=0).fit(X, y)
    >>> bool(model.certificate_.relative_gap <= 1e-4), model.score(X, y) > 0.8
    (True, True)
    >>> explanation = model.explain(X)
    >>> bool(np.allclose(explanation.scores, model.decision_function(X)))
    True
    """

    def __init__(
        self,
        alpha: float = 0.01,
        *,
        dictionary: Any = "auto",
        generate: int | Generation | None = None,
        standardize: bool = True,
        loss: str | Loss = "auto",
        penalty: str | Penalty = "group_l2",
        solver: str | Solver = "auto",
        tol: float = 1e-4,
        max_iter: int = 10_000,
        fit_intercept: bool = True,
        class_weight: dict | str | None = None,
        warm_start: bool = False,
        dtype: Any = None,
        device: Any = None,
        memory_limit: int | None = None,
        random_state: Any = None,
        verbose: bool = False,
        callback: Callback | None = None,
    ) -> None:
        self.alpha = alpha
        self.dictionary = dictionary
        self.generate = generate
        self.standardize = standardize
        self.loss = loss
        self.penalty = penalty
        self.solver = solver
        self.tol = tol
        self.max_iter = max_iter
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.warm_start = warm_start
        self.dtype = dtype
        self.device = device
        self.memory_limit = memory_limit
        self.random_state = random_state
        self.verbose = verbose
        self.callback = callback

    def _shown(self, outputs: Tensor) -> Tensor:
        return self._scores(outputs)


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

    _generates_after_a_grid = True

    def __init__(
        self,
        *,
        alphas: int | ArrayLike = 30,
        eps: float = 1e-2,
        cv: Any = None,
        scoring: Any = None,
        n_jobs: int | None = None,
        resume: str | os.PathLike[str] | None = None,
        dictionary: Any = "auto",
        generate: int | Generation | None = None,
        standardize: bool = True,
        loss: str | Loss = "squared",
        penalty: str | Penalty = "group_l2",
        solver: str | Solver = "auto",
        tol: float = 1e-4,
        max_iter: int = 10_000,
        fit_intercept: bool = True,
        warm_start: bool = False,
        dtype: Any = None,
        device: Any = None,
        memory_limit: int | None = None,
        random_state: Any = None,
        verbose: bool = False,
        callback: Callback | None = None,
    ) -> None:
        self.alphas = alphas
        self.eps = eps
        self.cv = cv
        self.scoring = scoring
        self.n_jobs = n_jobs
        self.resume = resume
        self.dictionary = dictionary
        self.generate = generate
        self.standardize = standardize
        self.loss = loss
        self.penalty = penalty
        self.solver = solver
        self.tol = tol
        self.max_iter = max_iter
        self.fit_intercept = fit_intercept
        self.warm_start = warm_start
        self.dtype = dtype
        self.device = device
        self.memory_limit = memory_limit
        self.random_state = random_state
        self.verbose = verbose
        self.callback = callback


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

    _generates_after_a_grid = True

    def __init__(
        self,
        *,
        alphas: int | ArrayLike = 30,
        eps: float = 1e-2,
        cv: Any = None,
        scoring: Any = None,
        n_jobs: int | None = None,
        resume: str | os.PathLike[str] | None = None,
        dictionary: Any = "auto",
        generate: int | Generation | None = None,
        standardize: bool = True,
        loss: str | Loss = "auto",
        penalty: str | Penalty = "group_l2",
        solver: str | Solver = "auto",
        tol: float = 1e-4,
        max_iter: int = 10_000,
        fit_intercept: bool = True,
        class_weight: dict | str | None = None,
        warm_start: bool = False,
        dtype: Any = None,
        device: Any = None,
        memory_limit: int | None = None,
        random_state: Any = None,
        verbose: bool = False,
        callback: Callback | None = None,
    ) -> None:
        self.alphas = alphas
        self.eps = eps
        self.cv = cv
        self.scoring = scoring
        self.n_jobs = n_jobs
        self.resume = resume
        self.dictionary = dictionary
        self.generate = generate
        self.standardize = standardize
        self.loss = loss
        self.penalty = penalty
        self.solver = solver
        self.tol = tol
        self.max_iter = max_iter
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.warm_start = warm_start
        self.dtype = dtype
        self.device = device
        self.memory_limit = memory_limit
        self.random_state = random_state
        self.verbose = verbose
        self.callback = callback

    def _shown(self, outputs: Tensor) -> Tensor:
        return self._scores(outputs)

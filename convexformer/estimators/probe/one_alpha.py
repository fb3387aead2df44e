"""scikit-learn estimators: certified probes of tokens that a dictionary of weightings pools."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from convexformer.estimators.attention import ClassificationMixin, RegressionMixin
from convexformer_solvers import Loss

from .base import ConvexProbeBase


@dataclass(eq=False, repr=False)
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
    loss : {"squared", "huber", "poisson", "softmax"} or Loss, default="squared"
        Loss of the outputs. With ``"softmax"`` the rows of ``y`` and of predictions are probabilities of classes.
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
    memory_limit : int or str, default=None
        Memory that pooled tokens take at most, in bytes or as text such as ``"500 MB"`` or ``"2 GiB"``. Where they take
        more they are in a temporary file, of which ``solver="auto"`` makes no copy: it then takes steps of few passes
        over the file, with matrices of the features within the limit. Default: they are in memory, and it is an error
        where they do not fit. Of each rank, under ``torchrun``.
    random_state : int, RandomState or None, default=None
        Draws what poolings draw that have no `random_state` of their own, and the starting points of `generate`. A seed
        draws the same tokens in any order of the samples, and others where tokens are rounded otherwise.
    verbose : bool, default=False
        Whether to show a progress bar with gap and objective.
    callback : callable, default=None
        Called with a ``Progress`` at each certificate; returning True stops the solve and `generate`.

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
        Rounds of `generate` and how it ended; None without it and after loading.
    alpha_max_ : float
        Smallest ``alpha`` whose solution is zero, for the weightings that there are.
    traffic_ : Traffic or None
        ``passes``, ``read_bytes`` and ``bytes_per_second`` of tokens on a disk; None of tokens in memory and after
        loading.
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
    convexformer.preprocessing.TokenPooling : The base of poolings.

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

    alpha: float = 0.01


@dataclass(eq=False, repr=False)
class ConvexProbeClassifier(ClassificationMixin, ConvexProbeBase):
    r"""Certified probe for classification: content-dependent pooling of tokens, trained to a certified global optimum.

    The objective is that of ``ConvexProbeRegressor`` with a loss of labels. Where a sample may have several labels,
    ``y`` is a matrix of 0 and 1 with a column for each: binary problems with a penalty in common, one output each.

    Parameters
    ----------
    alpha : float, default=0.01
        Weight of the decay against the **mean** loss; positive. At ``alpha_max_`` the solution becomes zero.
    dictionary, generate, standardize
        As in ``ConvexProbeRegressor``.
    loss : {"auto", "logistic", "softmax", "squared_hinge"} or Loss, default="auto"
        ``"auto"`` is logistic for two classes and for several labels per sample, and softmax cross-entropy for more
        classes. A loss of margins with more than two classes trains one output per class against the rest.
    penalty : {"group_l2", "nuclear"} or Penalty, default="group_l2"
        As in ``ConvexProbeRegressor``. With ``"group_l2"`` the labels of a sample are problems apart; with
        ``"nuclear"`` they share features.
    solver, tol, max_iter, fit_intercept
        As in ``ConvexProbeRegressor``.
    class_weight : dict, "balanced" or None, default=None
        Factors on the weights of classes, as in scikit-learn. Not for several labels per sample.
    warm_start, dtype, device, memory_limit, random_state, verbose, callback
        As in ``ConvexProbeRegressor``.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Sorted labels; numbers of the columns of ``y`` for several labels per sample.
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

    alpha: float = 0.01
    _: KW_ONLY
    loss: str | Loss = "auto"
    class_weight: dict | str | None = None

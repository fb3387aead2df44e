"""The convex programs that are exactly equivalent to training attention networks (paper [C], Thms 1 to 3)."""

from __future__ import annotations

from typing import Any

from convexformer.gates import Gates
from convexformer.validation import as_targets, as_weight, check_flag
from convexformer_solvers import Loss, Penalty, Program, get_loss, get_penalty

from .build import build_program
from .samples import program_samples


def attention_program(
    X: Any,
    y: Any,
    *,
    alpha: float,
    loss: str | Loss = "squared",
    penalty: str | Penalty = "group_l2",
    gates: Gates | None = None,
    sample_weight: Any = None,
    fit_intercept: bool = False,
) -> Program:
    r"""Build the convex program of an attention network, for solvers, benchmarks and certificates.

    .. math:: \min_{Z, b} \; \sum_i p_i \, L\Big(b + \sum_{g, k} 1[u_{1g}^\top X_i u_{2g} \ge 0] \, Z_{gk}^\top x_{ik},
              \; y_i\Big) + \alpha \sum_{g, k} \Omega(Z_{gk})

    with :math:`\Omega(Z) = \sum_l \|z_l\|_2` for ``"group_l2"`` and :math:`\Omega(Z) = \|Z\|_*` for ``"nuclear"``. The
    :math:`p_i` are the weights of the samples over their sum.
    Its optimum is that of the non-convex network with enough heads; with too few, the network's can only be larger.

    Parameters
    ----------
    X : array-like or Tensor of shape (N, n_tokens, n_features), path, source or LinearMap
        The samples, in float32 or float64, or their map; a tensor stays on its device. Two-dimensional ones are tokens
        of width 1. What ``open_source`` takes, as the path of a file or a folder of shards, is read into memory if it
        takes at most an eighth of what is free there, else from the disk for each product. The map
        ``StreamedMap(open_source(path), memory_limit=...)`` has another limit.
    y : array-like or Tensor of shape (N,) or (N, n_outputs)
        Targets as the loss wants them: numbers, -1 and 1, or one-hot rows.
    alpha : float
        Weight of the decay against the mean loss; positive.
    loss, penalty : str or Loss, str or Penalty, default="squared" and "group_l2"
        By name or as instances.
    gates : Gates, optional
        Fixed gates. Default: none, attention only.
    sample_weight : array-like or Tensor of shape (N,), optional
        Non-negative; only ratios matter.
    fit_intercept : bool, default=False
        Whether there is a bias per output, without decay. The paper's programs, which this function builds, have none;
        estimators, ``Heads.program`` and ``generate_gates`` have one by default, so give True to compare with them.

    Returns
    -------
    Program

    Raises
    ------
    TypeError
        If `gates` are no ``Gates``.
    ValueError
        If an argument is not as described; the message names it.

    Examples
    --------
    >>> import numpy as np
    >>> from convexformer.solvers import Fista, solve
    >>> X = np.random.default_rng(0).normal(size=(40, 5, 3))
    >>> program = attention_program(X, X[:, 2, 0], alpha=0.1)
    >>> result = solve(program, Fista(), tol=1e-8)
    >>> result.certificate.relative_gap <= 1e-8, tuple(result.coef.shape)
    (True, (5, 3, 1))

    Samples may be on a disk:

    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "X.npy")
    ...     np.save(path, X)
    ...     stored = solve(attention_program(path, X[:, 2, 0], alpha=0.1), Fista(), tol=1e-8)
    >>> stored.certificate == result.certificate
    True
    """
    tokens = program_samples(X)
    if not (gates is None or isinstance(gates, Gates)):
        raise TypeError(f"gates must be None or Gates(u1, u2), which estimators make of names and pairs, got {gates!r}")
    return build_program(
        tokens,
        as_targets(y, tokens.device),
        get_loss(loss),
        get_penalty(penalty),
        alpha,
        as_weight(sample_weight, tokens.device),
        check_flag(fit_intercept, "fit_intercept"),
        masks=None if gates is None else gates.masks(tokens),
    )

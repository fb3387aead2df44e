"""The re-fit of a trained attentive probe: its queries as a dictionary, the rest trained to the certified optimum."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from sklearn.base import BaseEstimator

from convexformer.heads.attention import Heads
from convexformer.nn.modules.attentive_probe import AttentiveProbe, attentive_reading
from convexformer.nn.modules.probe import TokenPooler
from convexformer.nn.modules.token_weights import QueryWeights
from convexformer.preprocessing.checking import check_sequences
from convexformer.preprocessing.pooling import pooled
from convexformer.preprocessing.sequences import TokenSequences
from convexformer.programs.build import build_program
from convexformer.validation import as_targets, as_weight, check_device, check_flag
from convexformer_solvers import (
    Certificate,
    Loss,
    Penalty,
    Solver,
    certify,
    get_loss,
    get_penalty,
    get_solver,
    solve,
)


@dataclass(frozen=True)
class ProbeRefit:
    """A trained attentive probe beside the optimum for its queries.

    Attributes
    ----------
    objective : float
        Objective of the probe as it was trained: mean loss plus ``alpha`` times the decay of its values and outputs.
    start_objective : float
        Objective of the same function with balanced values and outputs, where the re-fit starts; at most `objective`.
    certificate : Certificate
        Of the re-fit; ``certificate.primal``, its objective, is at most `start_objective`.
    gap, relative_gap : float
        ``objective`` less the certified bound: what training has left, given the queries; and that over the objective
        of the best constant model.
    heads : Heads
        The re-fit as heads on what the queries pool.
    module : AttentiveProbe
        The re-fit as a module, with the queries of the one that was given; its objective is ``certificate.primal``.

    Examples
    --------
    >>> X = torch.randn(50, 4, 3, generator=torch.Generator().manual_seed(0))
    >>> refit = refit_probe(AttentiveProbe(3, 1, n_queries=2), X, X[:, :, 0].amax(1), alpha=0.01)
    >>> refit.certificate.primal <= refit.start_objective <= refit.objective, refit.relative_gap > 0
    (True, True)
    >>> refit.module(X).shape
    torch.Size([50, 1])
    """

    objective: float
    start_objective: float
    certificate: Certificate
    heads: Heads
    module: AttentiveProbe

    @property
    def gap(self) -> float:
        return self.objective - self.certificate.dual

    @property
    def relative_gap(self) -> float:
        return replace(self.certificate, primal=self.objective).relative_gap

    def __str__(self) -> str:
        rows = {
            "objective of the trained probe": f"{self.objective:.9g}",
            "with balanced values and outputs": f"{self.start_objective:.9g}",
            "objective of the re-fit": f"{self.certificate.primal:.9g}",
            "certified lower bound, for these queries": f"{self.certificate.dual:.9g}",
            "gap of the trained probe, relative": f"{self.gap:.3g}, {self.relative_gap:.3g}",
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def refit_probe(
    module: Any,
    X: Any,
    y: Any,
    alpha: float,
    *,
    loss: str | Loss = "squared",
    penalty: str | Penalty = "nuclear",
    sample_weight: Any = None,
    fit_intercept: bool | None = None,
    solver: str | Solver = "auto",
    tol: float = 1e-4,
    max_iter: int = 10_000,
    device: str | torch.device | None = None,
    verbose: bool = False,
) -> ProbeRefit:
    r"""Keep the queries of a trained attentive probe and train the rest to the certified optimum.

    With the queries :math:`q_j` fixed, the objective of the probe is that of

    .. math:: \min_{Z, b} \; \sum_i p_i \, L\Big(b + \sum_j T_j(X_i)^\top Z_j, \; y_i\Big) + \alpha \sum_j \|Z_j\|_*,
              \qquad T_j(X) = \sum_k \mathrm{softmax}_k(q_j^\top x_k / \tau) \, x_k

    with the weights :math:`p_i` of the samples over their sum. The values and outputs of the probe are one feasible
    point, as :math:`\|V O\|_* \le (\|V\|_F^2 + \|O\|_F^2) / 2`. So the optimum is never larger than the objective of
    the probe.

    Parameters
    ----------
    module : AttentiveProbe or Module
        The trained probe. A module of another class says by a method ``as_attentive_probe`` which one it is.
    X : array-like, path, source or pair
        The training samples, as in ``ConvexProbeClassifier.fit``, in memory or on a disk; taken as they are, without
        standardising. What the queries pool of them is held in memory.
    y : array-like of shape (N,) or (N, n_outputs)
        Training targets as the loss wants them: numbers, -1 and 1, or one-hot rows.
    alpha : float
        Weight of the decay against the mean loss; positive. That of training, for a comparison.
    loss : str or Loss, default="squared"
        Loss of the training.
    penalty : str or Penalty, default="nuclear"
        Convex form of the decay; the default is that of the standard weight decay.
    sample_weight : array-like of shape (N,), optional
        Non-negative; only ratios matter.
    fit_intercept : bool, optional
        Whether there is a bias. Default: as the probe has one.
    solver, tol, max_iter, device, verbose
        As in the estimators.

    Returns
    -------
    ProbeRefit

    Raises
    ------
    TypeError
        If the module is no attentive probe and does not say which one it is.
    ValueError
        If an argument is not as described, or the probe has a bias and `fit_intercept` is False.

    Examples
    --------
    >>> X = torch.randn(50, 4, 3, generator=torch.Generator().manual_seed(0))
    >>> probe = AttentiveProbe(3, 1, n_queries=2)
    >>> refit = refit_probe(probe, X, X[:, :, 0].amax(1), alpha=0.01)
    >>> refit.certificate.primal < refit.objective, refit.module(X).shape
    (True, torch.Size([50, 1]))
    """
    probe = attentive_reading(module)
    has_bias = probe.bias is not None
    has_intercept = has_bias if fit_intercept is None else check_flag(fit_intercept, "fit_intercept")
    if has_bias and not has_intercept:
        raise ValueError("fit_intercept=False is for a probe without bias, and this one has a bias")
    samples = _read(probe, X, device)
    with torch.no_grad():
        own_coef = probe.coef()
        coef = own_coef.to(samples.device, samples.dtype)
        bias = coef.new_zeros(coef.shape[2]) if probe.bias is None else probe.bias.detach().to(coef)
    target = as_targets(y, samples.device)
    if target.shape[1] != coef.shape[2]:
        remedy = (
            "; of labels 0, 1, ... y = np.eye(n_classes)[labels] makes one-hot rows" if target.shape[1] == 1 else ""
        )
        raise ValueError(
            f"y must have the {coef.shape[2]} outputs of the module, got shape {tuple(target.shape)}{remedy}"
        )
    pooler = TokenPooler([QueryWeights(probe.queries.detach().cpu(), probe.temperature)])
    program = build_program(
        pooled(pooler, samples),
        target,
        get_loss(loss),
        get_penalty(penalty),
        alpha,
        as_weight(sample_weight, samples.device),
        has_intercept,
    )
    start = certify(program, coef, bias)
    result = solve(program, get_solver(solver), tol=tol, max_iter=max_iter, start=(coef, bias), verbose=verbose)
    own_decay = copy.deepcopy(probe).double().decay(program.penalty).item()
    excess = own_decay - float(program.penalty.value(own_coef.to(program.y.device).double()))
    arrays = (part.numpy(force=True) for part in (result.coef, result.intercept))
    heads = Heads.from_coef(*arrays, alpha=program.alpha, loss=program.loss, penalty=program.penalty)
    intercept = result.intercept if has_intercept else None
    refit = AttentiveProbe.from_coef(probe.queries, result.coef, intercept, probe.temperature, program.penalty)
    objective = start.primal + program.alpha * excess  # the re-fit is no worse than its start
    return ProbeRefit(objective, start.primal, result.certificate, heads, refit)


def _read(probe: AttentiveProbe, X: Any, device: Any) -> TokenSequences:
    samples = check_sequences(BaseEstimator(), X, reset=True)
    if samples.n_features != probe.queries.shape[1]:
        raise ValueError(
            f"X has tokens of width {samples.n_features}, but the queries of the probe have {probe.queries.shape[1]}"
        )
    return samples.to(check_device(device, samples.device))

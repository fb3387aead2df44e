"""How far a trained attention network is from its global optimum."""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from convexformer.nn import ConvexAttention, SequenceAttention, SoftmaxAttention
from convexformer.programs.samples import program_samples
from convexformer.validation import (
    as_tensor,
    check_device,
    check_finite,
    check_flag,
    check_weight,
    without_tensor,
)
from convexformer_solvers import (
    Certificate,
    LinearMap,
    Loss,
    Penalty,
    Program,
    Solver,
    certify,
    get_penalty,
    get_solver,
    solve,
)

from .attention import Heads
from .sequence import SequenceHeads


@dataclass(frozen=True)
class OptimalityGap:
    """A trained network beside the global optimum of its class.

    Attributes
    ----------
    objective : float
        The network's own training objective, decay included, in float64.
    bound : float
        Certified lower bound of the objective of every network of its class; nan where none is known.
    gap, relative_gap : float
        ``objective - bound``, and that over the objective of the best constant model; nan where there is no bound.
    covered : bool
        Whether the convex program bounds this class of networks.
    exact : bool
        Whether a network with as many heads attains the optimum of the convex program, so that the whole gap, except
        the certificate's, is what training has left. With fewer heads the bound holds and may not be attained.
    n_heads, n_heads_sufficient : int
        Heads of the network, and of the re-fit.
    start_objective : float
        Convex objective at the network's own point, where the re-fit starts: at most `objective`, as heads that are
        unbalanced or point the same way cost more than they need; nan where the network is no such point.
    refit : Heads or SequenceHeads
        The re-fit: its network has the objective ``certificate.primal``.
    certificate : Certificate
        Of the re-fit.
    remark : str
        What the figures say of this class of networks.

    Examples
    --------
    >>> X = torch.randn(50, 4, 3, generator=torch.Generator().manual_seed(0))
    >>> y = X[:, 1, :1] - X[:, 2, :1]
    >>> result = optimality_gap(ConvexAttention(4, 3, n_heads=8), X, y, alpha=0.1)  # not trained
    >>> result.covered, result.relative_gap > 0.1
    (True, True)
    >>> bool(result.bound <= result.certificate.primal <= result.start_objective <= result.objective)
    True
    >>> len(result.refit) == result.n_heads_sufficient  # heads of the network that attains the optimum
    True
    """

    objective: float
    bound: float
    gap: float
    relative_gap: float
    covered: bool
    exact: bool
    n_heads: int
    n_heads_sufficient: int
    start_objective: float
    refit: Heads | SequenceHeads
    certificate: Certificate
    remark: str

    def __str__(self) -> str:
        rows = {
            "objective of the network": f"{self.objective:.9g}",
            "certified lower bound": f"{self.bound:.9g}",
            "gap, relative": f"{self.gap:.3g}, {self.relative_gap:.3g}",
            "objective of the re-fit": f"{self.certificate.primal:.9g}",
            "heads of the network, of the re-fit": f"{self.n_heads}, {self.n_heads_sufficient}",
        }
        width = max(map(len, rows))
        return "\n".join([*(f"{name:<{width}}  {value}" for name, value in rows.items()), self.remark])


@dataclass(frozen=True)
class _Reading:
    """A network as what the convex programs know.

    Attributes
    ----------
    heads : Heads or SequenceHeads
        The network, or one of the class that it is compared with.
    has_bias : bool
        Whether it has a bias.
    n_heads : int
        Its number of heads.
    objective : float or None
        Its objective, where that is not the one of the heads: then it is of another class.
    """

    heads: Heads | SequenceHeads
    has_bias: bool
    n_heads: int
    objective: float | None = None


def optimality_gap(
    model: Any,
    X: ArrayLike | LinearMap,
    y: ArrayLike,
    alpha: float | None = None,
    *,
    loss: str | Loss | None = None,
    penalty: str | Penalty | None = None,
    sample_weight: ArrayLike | None = None,
    fit_intercept: bool | None = None,
    solver: str | Solver = "auto",
    tol: float = 1e-4,
    max_iter: int = 10_000,
    device: str | torch.device | None = None,
    verbose: bool = False,
) -> OptimalityGap:
    r"""Measure how far a trained attention network is from the global optimum of its class.

    Any network of a covered class is a feasible point of the convex program (``Heads.to_coef``), so with a certified
    dual value :math:`D` of that program

    .. math:: D \;\le\; \min_{\text{networks}} \text{objective} \;\le\; \text{objective of this network}.

    Parameters
    ----------
    model : ConvexAttention, SequenceAttention, SoftmaxAttention, Heads or SequenceHeads
        The network. Softmax attention mixes tokens by the input and is another class: it gets no bound, and the convex
        program of the same data is reported beside it.
    X : array-like of shape (N, n_tokens, n_features), path, source or LinearMap
        The training samples, or their map; two-dimensional ones are tokens of width 1. What ``open_source`` takes, as
        the path of a file or a folder of shards, is read as in ``attention_program``. Softmax attention takes no map,
        and no data on a disk that are too large to be read into memory.
    y : array-like
        The training targets: as in ``fit`` for heads with targets of their own; for modules as the loss wants them.
    alpha : float, optional
        Weight of the decay that the network was trained with, against the mean loss. Needed for modules; that of
        ``Heads`` by default.
    loss : str or Loss, optional
        What the network was trained for. Default: that of ``Heads``, ``"squared"`` for modules.
    penalty : str or Penalty, optional
        Convex form of its decay. Default: that of ``Heads``, ``"group_l2"`` for modules. None for a
        ``SequenceAttention``: the program is that of its own decay, which ``train`` has without a penalty; named
        penalties give it another one, of which no equivalent program is known.
    sample_weight : array-like of shape (N,), optional
        Weights of the samples, as in training.
    fit_intercept : bool, optional
        Whether the networks of the class have a bias. Default: as this module has one; with ``Heads``, which do not
        say, where its intercept is not zero.
    solver : str or Solver, default="auto"
        Solver of the convex program, which starts from the network.
    tol : float, default=1e-4
        Relative gap to which the program is solved: the bound is off by at most this.
    max_iter : int, default=10000
        Iterations at most.
    device : str or torch.device, optional
        Device on which the program is solved and certified. Default: that of `X`.
    verbose : bool, default=False
        Whether to show a progress bar.

    Returns
    -------
    OptimalityGap

    Raises
    ------
    TypeError
        If `model` is none of the above.
    ValueError
        If an argument is not as described; the message names it.

    Warns
    -----
    ConvergenceWarning
        If the certified relative gap of the re-fit did not come within ``tol``; the bound still holds.

    Examples
    --------
    >>> from convexformer.nn import train
    >>> X = torch.randn(50, 4, 3, generator=torch.Generator().manual_seed(0))
    >>> y = X[:, 1, :1] - X[:, 2, :1]
    >>> network = ConvexAttention(4, 3, n_heads=8)
    >>> history = train(network, X, y, alpha=0.1, lr=0.05, n_steps=300)
    >>> result = optimality_gap(network, X, y, alpha=0.1)
    >>> result.exact, bool(0 <= result.relative_gap < 0.01)
    (True, True)
    """
    tokens: Any = program_samples(X)
    device, tokens = check_device(device, tokens.device), tokens.to(device="cpu")
    y = np.asarray(without_tensor(y, "y"))
    weight, verbose = check_weight(sample_weight, len(tokens)), check_flag(verbose, "verbose")
    if isinstance(model, torch.nn.Module):
        for name, part in model.named_parameters():
            check_finite(f"{name} of the network", part)
    reading = read_network(model, alpha, loss, penalty, tokens, y, weight)
    heads = reading.heads
    has_bias = reading.has_bias if fit_intercept is None else check_flag(fit_intercept, "fit_intercept")
    if not has_bias and bool(np.any(heads.intercept)):
        raise ValueError("fit_intercept must not be False for a network whose bias is not zero")
    program = heads.program(tokens, y, weight, fit_intercept=has_bias)
    covered = reading.objective is None
    start = (heads.program_coef(), as_tensor(heads.intercept).flatten())
    if tuple(start[0].shape) != program.coef_shape:
        raise ValueError(
            f"X and y must be of the sizes that the network takes and gives: X {tuple(tokens.shape)} and y {y.shape} "
            f"make a program with coefficients of shape {program.coef_shape}, the network has {tuple(start[0].shape)}"
        )
    options: dict[str, Any] = {"tol": tol, "max_iter": max_iter, "verbose": verbose, "device": device}
    result = solve(program, get_solver(solver), start=start if covered else None, **options)
    certificate = result.certificate
    refit = heads.with_coef(result.coef.cpu(), result.intercept.cpu())
    start_objective = certify(program, *start).primal if covered else math.nan
    excess = heads.decay() - float(program.penalty.value(start[0]))  # of the decay over the penalty
    objective = start_objective + heads.alpha * excess if reading.objective is None else reading.objective
    bound = certificate.dual if covered else math.nan
    exact = covered and _has_enough(heads, refit, tokens, program)
    return OptimalityGap(
        objective=objective,
        bound=bound,
        gap=objective - bound,
        relative_gap=replace(certificate, primal=objective).relative_gap if covered else math.nan,
        covered=covered,
        exact=exact,
        n_heads=reading.n_heads,
        n_heads_sufficient=len(refit),
        start_objective=start_objective,
        refit=refit,
        certificate=certificate,
        remark=_remark(covered, exact, len(heads) < len(refit)),
    )


@singledispatch
def read_network(
    model: Any,
    alpha: float | None,
    loss: str | Loss | None,
    penalty: str | Penalty | None,
    tokens: torch.Tensor | LinearMap,
    y: np.ndarray,
    sample_weight: Any,
) -> _Reading:
    """Read a network; classes of networks are registered here."""
    raise TypeError(
        "model must be a ConvexAttention, SequenceAttention, SoftmaxAttention, Heads or SequenceHeads, "
        f"got {type(model).__name__}; of an estimator give its heads_, of a compiled module the one within; of an "
        "attentive probe convexformer.probes.refit_probe tells the gap; of a module of your own with such heads give "
        "Heads(w1, w2, w3, intercept, loss, penalty, alpha)"
    )


@read_network.register(Heads)
@read_network.register(SequenceHeads)
def _(model: Heads | SequenceHeads, alpha: float | None, loss: Any, penalty: Any, *data: Any) -> _Reading:
    changes = {"alpha": alpha, "loss": loss, "penalty": penalty}
    heads = model.replace(**{name: value for name, value in changes.items() if value is not None})
    return _Reading(heads, bool(np.any(model.intercept)), len(model))


@read_network.register
def _(model: ConvexAttention, alpha: float | None, loss: Any, penalty: Any, *data: Any) -> _Reading:
    options: dict[str, Any] = {"alpha": _given(alpha), "loss": loss or "squared", "penalty": penalty or "group_l2"}
    heads = Heads.from_torch(copy.deepcopy(model).double(), **options)
    return _Reading(heads, model.bias is not None, len(heads))


@read_network.register
def _(model: SequenceAttention, alpha: float | None, loss: Any, penalty: Any, *data: Any) -> _Reading:
    if penalty is not None:
        raise ValueError(
            f"penalty must be None for a SequenceAttention, got {penalty!r}: covered is the network's own decay, half "
            "the sum of the squared l1 norms of w2 and w3, with which train(network, X, y, alpha=...) trains where no "
            "penalty is given; no convex program is known for the decay of a named penalty"
        )
    heads = SequenceHeads.from_torch(copy.deepcopy(model).double(), alpha=_given(alpha), loss=loss or "squared")
    return _Reading(heads, model.bias is not None, len(heads))


@read_network.register
def _(
    model: SoftmaxAttention,
    alpha: float | None,
    loss: Any,
    penalty: Any,
    tokens: torch.Tensor | LinearMap,
    y: np.ndarray,
    sample_weight: Any,
) -> _Reading:
    if isinstance(tokens, LinearMap):
        raise ValueError(
            f"X must be an array, or data on a disk that fit into memory, for a SoftmaxAttention, got {tokens!r}"
        )
    alpha, loss, penalty = _given(alpha), loss or "squared", get_penalty(penalty or "group_l2")
    y = y[:, None] if y.ndim == 1 else y
    exact = copy.deepcopy(model).double()
    parameter = next(exact.parameters())
    weight = None if sample_weight is None else torch.as_tensor(sample_weight).to(parameter)
    with torch.no_grad():
        arguments = (tokens.to(parameter), as_tensor(y, name="y").to(parameter))
        objective = float(exact.objective(*arguments, loss=loss, alpha=alpha, sample_weight=weight))
    (_, n, d), c = tokens.shape, y.shape[-1]
    options: dict[str, Any] = {"alpha": alpha, "loss": loss, "penalty": penalty}
    heads: Heads | SequenceHeads
    if y.ndim == 3:
        none = (np.zeros((0, y.shape[1], n)), np.zeros((0, d)), np.zeros((0, c)), np.zeros((y.shape[1], c)))
        heads = SequenceHeads(*none, form="single_row", **options)
    else:
        heads = Heads.from_coef(np.zeros((n, d, c)), **options)
    return _Reading(heads, model.bias is not None, len(model.wq), objective)


def _given(alpha: float | None) -> float:
    if alpha is None:
        raise ValueError("alpha must be given for a module: the weight of the decay that it was trained with")
    return alpha


def _has_enough(heads: Heads | SequenceHeads, refit: Heads | SequenceHeads, tokens: Any, program: Program) -> bool:
    """Whether there are as many heads as in the re-fit, behind each set of gates that select the same samples."""
    kinds = [0]
    if isinstance(heads, Heads) and heads.gates is not None:
        counted = heads.gates.masks(tokens)[program.weight > 0]
        kinds = torch.unique(counted, dim=1, return_inverse=True)[1].tolist()
    have, need = (Counter(kinds[gate] for gate in part.gate_of_heads()) for part in (heads, refit))
    return all(have[kind] >= count for kind, count in need.items())


def _remark(covered: bool, exact: bool, has_fewer: bool) -> str:
    if not covered:
        return (
            "Softmax attention mixes tokens by the input: it is another class of networks than the convex program's, "
            "and nothing bounds its objective. The re-fit is the best convex attention on the same data; compare both "
            "on held-out data."
        )
    if exact:
        return (
            "The bound is exact for this class: a network with as many heads attains the optimum of the convex program."
        )
    where = "" if has_fewer else " behind some of its gates"
    return (
        f"The bound holds for this class, whatever the number of heads. This network has fewer heads{where} than the "
        "re-fit needs, so part of the gap may be due to its size."
    )

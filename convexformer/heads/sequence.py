"""Attention networks for sequence targets as their heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from convexformer.nn import SequenceAttention, sequence_network_from_heads
from convexformer.nn.modules.simplex_heads import weights_of
from convexformer.programs.sequence import HeadWeights, SequenceForm, get_form, sequence_program, signed_coef
from convexformer.validation import as_head_weights, as_tensor, check_finite, check_program_tokens, check_weight
from convexformer_solvers import Loss, Penalty, Program, get_loss
from convexformer_solvers.program import check_alpha
from convexformer_solvers.validation import check_counts

# Heads per product when predicting: bounds what is held in memory.
_HEADS_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class SequenceHeads:
    r"""An attention network for sequence targets as its heads (paper [C], Theorem A.1).

    .. math:: f(X) = b + \sum_j W_{1j} \, X \, w_{2j} \, w_{3j}^\top

    Parameters
    ----------
    w1 : ndarray of shape (m, n_targets, n_tokens)
        Attention of each target row over the tokens, non-negative; which rows sum to what depends on `form`.
    w2 : ndarray of shape (m, n_features)
        Value weights.
    w3 : ndarray of shape (m, n_outputs)
        Output weights.
    intercept : ndarray of shape (n_targets, n_outputs)
        Bias.
    alpha : float
        Weight of the decay.
    form : str or SequenceForm
        Class of networks: ``"single_row"``, ``"stochastic"`` or ``"substochastic"``.
    penalty : str or Penalty, default="group_l2"
        Convex form of the decay, for ``"single_row"``.
    loss : str or Loss, default="squared"
        What the network was trained for.

    Raises
    ------
    ValueError
        If shapes disagree, `w1` is not that of the form or `alpha` is not positive.

    Examples
    --------
    >>> heads = SequenceHeads(np.eye(2)[None], [[2.0]], [[2.0]], np.zeros((2, 1)), alpha=0.1, form="stochastic")
    >>> heads.predict([[[1.0], [3.0]]])[0, :, 0], heads.decay()
    (array([ 4., 12.]), 4.0)
    """

    w1: NDArray[np.floating]
    w2: NDArray[np.floating]
    w3: NDArray[np.floating]
    intercept: NDArray[np.floating]
    alpha: float
    form: SequenceForm
    penalty: Penalty
    loss: Loss

    def __init__(
        self,
        w1: ArrayLike,
        w2: ArrayLike,
        w3: ArrayLike,
        intercept: ArrayLike,
        *,
        alpha: float,
        form: str | SequenceForm,
        penalty: str | Penalty = "group_l2",
        loss: str | Loss = "squared",
    ) -> None:
        form = get_form(form)
        parts: dict[str, Any] = as_head_weights(w1=w1, w2=w2, w3=w3, intercept=intercept)
        parts |= {"form": form, "penalty": form.check_penalty(penalty), "loss": get_loss(loss)}
        check_alpha(alpha)
        for name, part in (parts | {"alpha": float(alpha)}).items():
            object.__setattr__(self, name, part)
        dims = (self.w1.ndim, self.w2.ndim, self.w3.ndim)
        if dims != (3, 2, 2) or not len(self.w1) == len(self.w2) == len(self.w3):
            raise ValueError(
                "w1, w2, w3 must be arrays of shapes (m, n_targets, n_tokens), (m, n_features), (m, n_outputs), "
                f"got {self.w1.shape}, {self.w2.shape}, {self.w3.shape}"
            )
        if self.intercept.shape != (self.w1.shape[1], self.w3.shape[1]):
            wanted = (self.w1.shape[1], self.w3.shape[1])
            raise ValueError(f"intercept must have shape {wanted}, got {self.intercept.shape}")
        if len(self.w1) and self.w1.min() < 0:
            raise ValueError(f"w1 must be non-negative, got {self.w1.min()}")
        form.check(as_tensor(self.w1))

    def __len__(self) -> int:
        return len(self.w1)

    def __repr__(self) -> str:
        (m, n_targets, n), d, c = self.w1.shape, self.w2.shape[1], self.w3.shape[1]
        return f"SequenceHeads({m} heads, {n_targets} target rows, {n} tokens, {d} features, {c} outputs, {self.form})"

    @classmethod
    def from_coef(
        cls,
        coef: ArrayLike | Tensor,
        intercept: ArrayLike | Tensor,
        *,
        n_targets: int,
        alpha: float,
        form: str | SequenceForm,
        penalty: str | Penalty = "group_l2",
        loss: str | Loss = "squared",
    ) -> SequenceHeads:
        """Recover the heads of a solution of ``sequence_program``.

        Parameters
        ----------
        coef : array-like or Tensor of shape ``program.coef_shape``
            Coefficients.
        intercept : array-like or Tensor of shape (n_targets * n_outputs,) or (n_targets, n_outputs)
            Intercept.
        n_targets : int
            Rows of the target sequences.
        alpha, form, penalty, loss
            The program.

        Returns
        -------
        SequenceHeads
            Their objective equals that of the solution.

        Raises
        ------
        ValueError
            If `coef` or `intercept` is not as described, or `coef` is not finite.
        """
        form = get_form(form)
        check_counts(n_targets=n_targets)
        values, bias = as_tensor(coef, name="coef"), as_tensor(intercept, name="intercept")
        if not values.is_floating_point() or values.ndim == 0 or values.shape[-1] % n_targets:
            raise ValueError(
                f"coef must hold floating-point numbers, with a last axis that is a multiple of n_targets={n_targets}, "
                f"got {values.dtype} of shape {tuple(values.shape)}"
            )
        check_finite("coef", values)
        if bias.numel() != values.shape[-1]:
            raise ValueError(f"intercept must have {values.shape[-1]} numbers like coef, got {tuple(bias.shape)}")
        weights = form.heads(values, form.check_penalty(penalty), n_targets)
        bias = bias.reshape(n_targets, -1)
        arrays = (part.numpy(force=True) for part in (*weights, bias))
        return cls(*arrays, alpha=alpha, form=form, penalty=penalty, loss=loss)

    @classmethod
    def from_torch(
        cls,
        network: SequenceAttention,
        *,
        alpha: float,
        form: str | SequenceForm = "stochastic",
        penalty: str | Penalty = "group_l2",
        loss: str | Loss = "squared",
    ) -> SequenceHeads:
        """Read the heads off a trained network.

        Parameters
        ----------
        network : SequenceAttention
            The network.
        alpha, form, penalty, loss
            What it was trained for. The decay of the heads is that of the `form`: for ``"stochastic"`` it equals
            ``network.decay()``, and never that of a penalty named to the network.

        Returns
        -------
        SequenceHeads

        Raises
        ------
        TypeError
            If ``network`` is of another class.
        ValueError
            If another argument is not as described.
        """
        if not isinstance(network, SequenceAttention):
            raise TypeError(f"network must be a SequenceAttention, got {type(network).__name__}")
        w1, w2, w3, bias = weights_of(network)
        return cls(w1, w2, w3, bias, alpha=alpha, form=form, penalty=penalty, loss=loss)

    def to_torch(self) -> SequenceAttention:
        """The network as a torch module with exactly these weights; ``ValueError`` unless they are ``"stochastic"``."""
        if self.form.name != "stochastic":
            raise ValueError(f"SequenceAttention has row-stochastic attention; these heads are {self.form!r}")
        return sequence_network_from_heads(self.w1, self.w2, self.w3, self.intercept)

    def to_coef(self) -> NDArray[np.floating]:
        """Coefficients ``Z`` with ``pred[t] = sum_k Z[t, k]' x_k + intercept[t]``, shape ``(T, n, d, c)``."""
        coef = self.program_coef()
        return signed_coef(coef, self.form, self.w1.shape[1], self.w1.shape[2]).numpy()

    def program_coef(self) -> Tensor:
        """Coefficients of ``sequence_program``: a feasible point whose penalty is at most the decay of the heads."""
        return self.form.coef(self._weights())

    def gate_of_heads(self) -> list[int]:
        """Zeros: there are no gates."""
        return [0] * len(self)

    def replace(self, **changes: Any) -> SequenceHeads:
        """The same heads trained for something else: another ``alpha``, ``loss`` or ``penalty``."""
        return SequenceHeads(self.w1, self.w2, self.w3, self.intercept, **(self._trained_for() | changes))

    def with_coef(self, coef: Tensor, intercept: Tensor) -> SequenceHeads:
        """The heads of other coefficients of the same program."""
        return SequenceHeads.from_coef(coef, intercept, n_targets=self.w1.shape[1], **self._trained_for())

    def program(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None, fit_intercept: bool = True
    ) -> Program:
        """The convex program of this class of networks on some data.

        Parameters
        ----------
        X, y, sample_weight : array-like
            As in ``objective``.
        fit_intercept : bool, default=True
            Whether the networks have a bias.

        Returns
        -------
        Program
        """
        options: dict[str, Any] = {"sample_weight": sample_weight, "fit_intercept": fit_intercept}
        return sequence_program(X, _as_sequences(y), **options, **self._trained_for())

    def _trained_for(self) -> dict[str, Any]:
        return {"alpha": self.alpha, "form": self.form, "penalty": self.penalty, "loss": self.loss}

    def _weights(self, dtype: torch.dtype | None = None) -> HeadWeights:
        return HeadWeights(*(as_tensor(part, dtype=dtype) for part in (self.w1, self.w2, self.w3)))

    def decay(self) -> float:
        """Weight decay of all heads, the penalty's counterpart; float64."""
        return float(self.form.decay(self.penalty, self._weights(torch.float64)).sum())

    def predict(self, X: ArrayLike) -> NDArray[np.floating]:
        """Outputs of the network, computed head by head.

        Parameters
        ----------
        X : array-like of shape (N, n_tokens, n_features)
            Samples; two-dimensional ones are tokens of width 1.

        Returns
        -------
        ndarray of shape (N, n_targets, n_outputs)
            In float64.

        Raises
        ------
        ValueError
            If ``X`` does not hold finite numbers, or has other tokens or features than the heads.
        """
        tokens = check_program_tokens(X, (self.w1.shape[2], self.w2.shape[1])).cpu().double()
        pred = as_tensor(self.intercept).double().repeat(len(tokens), 1, 1)
        for w1, w2, w3 in zip(*(part.split(_HEADS_AT_ONCE) for part in self._weights(torch.float64)), strict=True):
            read = torch.einsum("mtk,nkm->ntm", w1, tokens @ w2.T)
            pred += read @ w3
        return pred.numpy()

    def objective(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Non-convex training objective: mean over samples of the sequence's loss plus ``alpha`` times the decay.

        Parameters
        ----------
        X : array-like of shape (N, n_tokens, n_features)
            Samples; two-dimensional ones are tokens of width 1.
        y : array-like of shape (N, n_targets, n_outputs), (N, n_targets) or (N,)
            Target sequences, as in ``fit``.
        sample_weight : array-like of shape (N,), optional
            Weights of the samples.

        Returns
        -------
        float
            In float64; for the heads of a solution it equals the certificate's ``primal``.

        Raises
        ------
        ValueError
            If ``X``, ``y`` or ``sample_weight`` are of other shapes, or weights are negative.
        """
        pred, target = as_tensor(self.predict(X)), _as_sequences(y).detach().cpu()
        if target.shape != pred.shape:
            raise ValueError(f"y must have shape {tuple(pred.shape)}, got {tuple(target.shape)}")
        check_finite("y", target)
        weight = check_weight(sample_weight, len(pred))
        losses = self.loss.value(pred.flatten(1), target.flatten(1)).numpy()
        losses = np.where(weight == 0, 0.0, losses)  # it may be infinite there
        return float(np.average(losses, weights=weight)) + self.alpha * self.decay()

    def attention_map(self) -> NDArray[np.floating]:
        """How much each target row reads from each token: mean ``W1`` of the heads, weighted by their decay.

        Returns
        -------
        ndarray of shape (n_targets, n_tokens)
            Non-negative. Rows sum to 1 for ``"stochastic"`` heads; for ``"single_row"`` ones the whole sums to 1. All
            zero without heads that cost anything.
        """
        weights = self._weights(torch.float64)
        cost = self.form.decay(self.penalty, weights)
        total = torch.einsum("m,mtk->tk", cost, weights.w1)
        return (total / cost.sum() if cost.sum() > 0 else total).numpy()


def _as_sequences(y: Any) -> Tensor:
    """Target sequences with all three axes: two have one output per row, one has one row."""
    target = as_tensor(y, dtype=torch.float64, name="y")
    return target.reshape(*target.shape, *[1] * (3 - target.ndim))

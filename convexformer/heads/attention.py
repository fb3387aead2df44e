"""Solutions as attention heads and back (paper [C], Prop. 1)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from convexformer.gates import Gates
from convexformer.gates.base import as_gate_index
from convexformer.nn import ConvexAttention, network_from_heads
from convexformer.nn.modules.simplex_heads import weights_of
from convexformer.programs.attention import attention_program
from convexformer.targets import RealTargets, Targets
from convexformer.validation import (
    as_head_weights,
    as_tensor,
    check_finite,
    check_program_tokens,
    check_weight,
    without_tensor,
)
from convexformer_solvers import DenseMap, Loss, Penalty, Program, get_loss, get_penalty
from convexformer_solvers.linear_maps.base import slices
from convexformer_solvers.program import check_alpha
from convexformer_solvers.validation import check_kind, is_real

# Heads per product when predicting: bounds the directions in memory.
_HEADS_AT_ONCE = 512


@dataclass(frozen=True, eq=False)
class Heads:
    r"""An attention network as its heads.

    .. math:: f(X) = b + \sum_j g_j(X) \; (w_{1j}^\top X w_{2j}) \, w_{3j}

    Parameters
    ----------
    w1 : ndarray of shape (m, n_tokens)
        Attention over tokens, rows in the unit simplex.
    w2 : ndarray of shape (m, n_features)
        Value weights.
    w3 : ndarray of shape (m, n_outputs)
        Output weights.
    intercept : ndarray of shape (n_outputs,)
        Bias.
    loss, penalty, alpha : str or Loss, str or Penalty, float
        What the network was trained for; `objective` uses them.
    gates : Gates, optional
        Fixed gates. Default: none.
    gate_index : ndarray of shape (m,), optional
        Gate of each head; only with `gates`.
    targets : Targets, optional
        How ``y`` reads. Default: real numbers.

    Raises
    ------
    TypeError
        If `gates` are no ``Gates``, or `targets` no ``Targets``.
    ValueError
        If shapes disagree, a row of ``w1`` is not in the simplex or ``alpha`` is not positive.

    Examples
    --------
    >>> coef = np.zeros((2, 2, 1)); coef[1] = [[3.0], [4.0]]
    >>> heads = Heads.from_coef(coef, penalty="group_l2", alpha=0.1)
    >>> heads.w1, round(heads.decay(), 12)
    (array([[0., 1.]]), 5.0)
    """

    w1: NDArray[np.floating]
    w2: NDArray[np.floating]
    w3: NDArray[np.floating]
    intercept: NDArray[np.floating]
    loss: Loss
    penalty: Penalty
    alpha: float
    gates: Gates | None = None
    gate_index: NDArray[np.int64] | None = None
    targets: Targets = field(default_factory=RealTargets)

    def __post_init__(self) -> None:
        parts: dict[str, Any] = {"loss": get_loss(self.loss), "penalty": get_penalty(self.penalty)}
        check_alpha(self.alpha)
        check_kind("targets", self.targets, Targets, "RealTargets()")
        parts |= as_head_weights(w1=self.w1, w2=self.w2, w3=self.w3, intercept=self.intercept)
        if self.gate_index is not None:
            parts["gate_index"] = as_gate_index(self.gate_index)
        for name, part in (parts | {"alpha": float(self.alpha)}).items():
            object.__setattr__(self, name, part)
        m = len(self.w1)
        if not self.w1.ndim == self.w2.ndim == self.w3.ndim == 2 or not m == len(self.w2) == len(self.w3):
            raise ValueError(
                f"w1, w2, w3 must be arrays of shapes (m, n), (m, d), (m, c), "
                f"got {self.w1.shape}, {self.w2.shape}, {self.w3.shape}"
            )
        if self.intercept.shape != (self.w3.shape[1],):
            raise ValueError(f"intercept must have shape ({self.w3.shape[1]},), got {self.intercept.shape}")
        if m and not (self.w1.min() >= 0 and np.abs(self.w1.sum(1) - 1).max() <= 1e-5):
            raise ValueError("rows of w1 must be non-negative and sum to 1")
        if (self.gates is None) != (self.gate_index is None):
            raise ValueError("gates and gate_index must be given together")
        if self.gates is None or self.gate_index is None:
            return
        check_kind("gates", self.gates, Gates, "Gates(u1, u2)")
        widths, wanted = (self.gates.u1.shape[1], self.gates.u2.shape[1]), (self.w1.shape[1], self.w2.shape[1])
        if widths != wanted:
            raise ValueError(f"gates must have directions of the widths {wanted} of w1 and w2, got {widths}")
        if self.gate_index.shape != (m,):
            raise ValueError(f"gate_index must have shape ({m},), got {self.gate_index.shape}")
        if m and not (self.gate_index.min() >= 0 and self.gate_index.max() < len(self.gates)):
            raise ValueError(f"gate_index must hold positions of the {len(self.gates)} gates, got {self.gate_index}")

    def __len__(self) -> int:
        return len(self.w1)

    def __repr__(self) -> str:
        gated = "" if self.gates is None else f", {len(self.gates)} gates"
        n, d, c = self.w1.shape[1], self.w2.shape[1], self.w3.shape[1]
        return f"Heads({len(self)} heads, {n} tokens, {d} features, {c} outputs{gated})"

    @classmethod
    def from_coef(
        cls,
        coef: ArrayLike,
        intercept: ArrayLike | None = None,
        *,
        alpha: float,
        loss: str | Loss = "squared",
        penalty: str | Penalty = "group_l2",
        gates: Gates | None = None,
        targets: Targets | None = None,
    ) -> Heads:
        """Recover the heads of a solution: balanced, each on its actual support token.

        Parameters
        ----------
        coef : array-like of shape (n, d, c), or (h, n, d, c) with gates
            Coefficients.
        intercept : array-like of shape (c,), optional
            Default: zeros.
        alpha, loss, penalty
            The program.
        gates : Gates, optional
            The gates, with a four-dimensional `coef`.
        targets : Targets, optional
            How ``y`` reads.

        Returns
        -------
        Heads
            One head per nonzero group, or per nonzero singular value of each block for the nuclear penalty; their
            objective equals that of the solution.

        Raises
        ------
        ValueError
            If `coef` has another number of dimensions or holds no finite floating-point numbers, or the penalty
            factorizes it into heads of another decay than its value.
        """
        array = np.asarray(without_tensor(coef, "coef"))
        if not np.issubdtype(array.dtype, np.floating):
            raise ValueError(f"coef must hold floating-point numbers, got {array.dtype}")
        if array.ndim != (3 if gates is None else 4):
            wanted = "(n_tokens, n_features, n_outputs)" if gates is None else "(n_gates, n_tokens, ...)"
            raise ValueError(f"coef must have shape {wanted}, got {array.shape}")
        penalty, values = get_penalty(penalty), as_tensor(array, name="coef")
        check_finite("coef", values)
        block, left, right = (part.numpy() for part in penalty.factorize(values))
        w1 = np.eye(array.shape[-3], dtype=array.dtype)[block[:, -1]]
        bias: Any = np.zeros(array.shape[-1], array.dtype) if intercept is None else intercept
        heads = cls(
            w1=w1,
            w2=left,
            w3=right,
            intercept=bias,
            loss=get_loss(loss),
            penalty=penalty,
            alpha=alpha,
            gates=gates,
            gate_index=None if gates is None else block[:, 0],
            targets=targets or RealTargets(),
        )
        decay, value, rounding = heads.decay(), float(penalty.value(values.double())), torch.finfo(values.dtype)
        if abs(decay - value) > math.sqrt(rounding.eps) * value + rounding.tiny:
            raise ValueError(
                f"penalty={penalty!r} must factorize coefficients into heads whose decay is its value, {value:.6g}, "
                f"got {decay:.6g}; only penalties that are the decay of some heads have any, as check_penalty tests"
            )
        return heads

    def to_coef(self) -> NDArray[np.floating]:
        """The convex program's coefficients of this network, shape ``(n, d, c)`` or ``(h, n, d, c)``.

        The same predictions at a penalty at most the decay of the heads: any network of this class is a feasible
        point of the program.
        """
        m, n = self.w1.shape
        gate = np.zeros(m, dtype=np.int64) if self.gate_index is None else self.gate_index
        n_gates = 1 if self.gates is None else len(self.gates)
        head, token = np.nonzero(self.w1)
        spread = csr_array((self.w1[head, token], (gate[head] * n + token, head)), shape=(n_gates * n, m))
        products = (self.w2[:, :, None] * self.w3[:, None, :]).reshape(m, self.w2.shape[1] * self.w3.shape[1])
        coef = (spread @ products).reshape(n_gates, n, self.w2.shape[1], self.w3.shape[1])
        return coef[0] if self.gates is None else coef

    def program_coef(self) -> Tensor:
        """``to_coef`` as a tensor in float64: a feasible point of ``program``."""
        return as_tensor(self.replace(w2=self.w2.astype(np.float64)).to_coef())  # takes the others along

    def gate_of_heads(self) -> list[int]:
        """Gate of each head; zeros without gates."""
        return [0] * len(self) if self.gate_index is None else self.gate_index.tolist()

    def replace(self, **changes: Any) -> Heads:
        """The same heads trained for something else: another ``alpha``, ``loss`` or ``penalty``."""
        return dataclasses.replace(self, **changes)

    def with_coef(self, coef: Tensor, intercept: Tensor) -> Heads:
        """The heads of other coefficients of the same program."""
        arrays = (part.numpy(force=True) for part in (coef, intercept))
        options: dict[str, Any] = {"alpha": self.alpha, "loss": self.loss, "penalty": self.penalty}
        return Heads.from_coef(*arrays, gates=self.gates, targets=self.targets, **options)

    def program(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None, fit_intercept: bool = True
    ) -> Program:
        """The convex program of this class of networks on some data.

        Parameters
        ----------
        X : array-like of shape (N, n_tokens, n_features)
            Samples; two-dimensional ``X`` is read as tokens of width 1.
        y, sample_weight : array-like
            As in ``objective``.
        fit_intercept : bool, default=True
            Whether the networks have a bias.

        Returns
        -------
        Program
        """
        return attention_program(
            X,
            self.targets.encode(y),
            alpha=self.alpha,
            loss=self.loss,
            penalty=self.penalty,
            gates=self.gates,
            sample_weight=self.targets.weight(y, without_tensor(sample_weight, "sample_weight")),
            fit_intercept=fit_intercept,
        )

    def decay(self) -> float:
        """Weight decay of all heads, the penalty's counterpart; float64."""
        left, right = as_tensor(self.w2).double(), as_tensor(self.w3).double()
        return float(self.penalty.factor_cost(left, right).sum())

    def predict(self, X: ArrayLike) -> NDArray[np.floating]:
        """Outputs of the network, computed head by head.

        Parameters
        ----------
        X : array-like of shape (N, n_tokens, n_features)
            Samples; two-dimensional ``X`` is read as tokens of width 1.

        Returns
        -------
        ndarray of shape (N, n_outputs)
            Raw outputs (scores for classifiers) in float64.

        Raises
        ------
        ValueError
            If ``X`` does not hold finite numbers, or has other tokens or features than the heads.
        """
        tokens = check_program_tokens(X, (self.w1.shape[1], self.w2.shape[1])).cpu()
        data = DenseMap(tokens)
        masks = None if self.gates is None else self.gates.masks(tokens)
        pred = as_tensor(self.intercept).double().repeat(len(tokens), 1)
        for part in slices(len(self), _HEADS_AT_ONCE):
            w1, w2, w3 = (as_tensor(w[part]).double() for w in (self.w1, self.w2, self.w3))
            pooled = data.matvec(torch.einsum("mk,md->kdm", w1, w2))
            if masks is not None:
                assert self.gate_index is not None
                pooled = pooled * masks[:, as_tensor(self.gate_index[part])]
            pred += pooled @ w3
        return pred.numpy()

    def objective(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Non-convex training objective of the network: mean loss plus ``alpha`` times the decay of its heads.

        Computed in float64 from the heads alone. For the heads of a solution it equals the certificate's ``primal``.

        Parameters
        ----------
        X : array-like of shape (N, n_tokens, n_features)
            Samples; two-dimensional ``X`` is read as tokens of width 1.
        y : array-like of shape (N,) or (N, n_outputs)
            Targets as given to ``fit`` (labels for a classifier).
        sample_weight : array-like of shape (N,), optional
            Weights as given to ``fit``.

        Returns
        -------
        float

        Raises
        ------
        ValueError
            If ``X``, ``y`` or ``sample_weight`` are of other shapes, or weights are negative.
        """
        pred, encoded = as_tensor(self.predict(X)), as_tensor(self.targets.encode(y))
        if encoded.shape != pred.shape:
            raise ValueError(
                f"y must have a row for each of the {len(pred)} samples, of {pred.shape[1]} outputs "
                f"as in fit; it gives {tuple(encoded.shape)}"
            )
        check_finite("y", encoded)
        weight = self.targets.weight(y, check_weight(sample_weight, len(pred)))
        losses = np.where(weight == 0, 0.0, self.loss.value(pred, encoded).numpy())  # it may be infinite there
        return float(np.average(losses, weights=weight)) + self.alpha * self.decay()

    def merge(self, tol: float = 1e-9) -> Heads:
        """Merge heads that differ in their tokens alone into one with soft attention.

        Predictions stay as they are where the directions of merged heads are equal. Others get the direction of the
        first head, which moves each head that resembles it to within `tol` by at most ``sqrt(2 tol)`` of its size, and
        the links of a chain of such heads by more: with a large `tol` compare ``predict`` before and after.

        Merged heads are balanced, so that the decay is that of the heads where these are, as those of a solution, and
        else smaller. Heads that are zero are left out.

        Parameters
        ----------
        tol : float, default=1e-9
            Heads of one gate merge when the products ``w2 w3'`` have a cosine of at least ``1 - tol``.

        Returns
        -------
        Heads

        Raises
        ------
        ValueError
            If ``tol`` is not in ``[0, 1)``.

        Notes
        -----
        Solutions of correlated tokens often use one direction at several tokens; the merged heads show that as one
        attention pattern.
        """
        if not (is_real(tol) and 0 <= tol < 1):
            raise ValueError(f"tol must lie in [0, 1), got {tol!r}")
        norms2, norms3 = np.linalg.norm(self.w2, axis=1), np.linalg.norm(self.w3, axis=1)
        sizes = norms2 * norms3
        kept = sizes > 0
        if not kept.all():
            return self._chosen(kept).merge(tol)
        if len(self) == 0:
            return self
        unit2, unit3 = self.w2 / norms2[:, None], self.w3 / norms3[:, None]
        alike = (unit2 @ unit2.T) * (unit3 @ unit3.T) >= 1 - tol
        if self.gate_index is not None:
            alike &= self.gate_index[:, None] == self.gate_index
        _, group = connected_components(csr_array(alike), directed=False)
        first = np.unique(group, return_index=True)[1]
        membership = csr_array((np.ones(len(self)), (group, np.arange(len(self)))))
        total = (membership @ sizes)[:, None]
        right_norm = self.penalty.right_norm(as_tensor(unit3[first])).numpy()[:, None]
        return self._chosen(first).replace(
            w1=(membership @ (self.w1 * sizes[:, None])) / total,
            w2=unit2[first] * np.sqrt(total * right_norm),
            w3=unit3[first] * np.sqrt(total / right_norm),
        )

    def _chosen(self, index: NDArray) -> Heads:
        """Some of the heads, by their positions or a mask."""
        gate_index = None if self.gate_index is None else self.gate_index[index]
        return self.replace(w1=self.w1[index], w2=self.w2[index], w3=self.w3[index], gate_index=gate_index)

    def to_torch(self) -> ConvexAttention:
        """The network as a torch module with exactly these weights (``simplex="projection"``)."""
        return network_from_heads(self.w1, self.w2, self.w3, self.intercept, self.gates, self.gate_index)

    @classmethod
    def from_torch(
        cls,
        network: ConvexAttention,
        *,
        alpha: float,
        loss: str | Loss = "squared",
        penalty: str | Penalty = "group_l2",
        targets: Targets | None = None,
    ) -> Heads:
        """Read the heads off a trained network.

        Parameters
        ----------
        network : ConvexAttention
            The network.
        alpha, loss, penalty
            What it was trained for.
        targets : Targets, optional
            How ``y`` reads.

        Returns
        -------
        Heads
            ``objective(X, y) - certificate.dual`` then bounds how far the network is from its global optimum.

        Raises
        ------
        TypeError
            If ``network`` is of another class.
        ValueError
            If another argument is not as described.
        """
        if not isinstance(network, ConvexAttention):
            raise TypeError(f"network must be a ConvexAttention, got {type(network).__name__}")
        w1, w2, w3, bias = weights_of(network)
        return cls(
            w1=w1,
            w2=w2,
            w3=w3,
            intercept=bias,
            loss=get_loss(loss),
            penalty=get_penalty(penalty),
            alpha=alpha,
            gates=network.gates,
            gate_index=None if network.gates is None else network.gate_index.cpu().numpy(),
            targets=targets or RealTargets(),
        )

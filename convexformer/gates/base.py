"""What a set of gates is, and the interface of what makes one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from convexformer.validation import as_tensor, as_tokens
from convexformer_solvers import DenseMap, LinearMap, Loss, Penalty, SolverResult
from convexformer_solvers.result import Interrupted


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Gates:
    """A set of ``h`` fixed gates ``1[u1' X u2 >= 0]``.

    Parameters
    ----------
    u1 : ndarray of shape (h, n_tokens)
        Token directions.
    u2 : ndarray of shape (h, n_features)
        Feature directions.

    Raises
    ------
    ValueError
        If the arrays are not two-dimensional, finite and of equal length.

    Examples
    --------
    >>> gates = Gates([[1.0, 0.0]], [[0.0, 1.0]])
    >>> gates.masks(torch.tensor([[[5.0, 1.0], [0.0, 0.0]], [[5.0, -1.0], [0.0, 0.0]]]))
    tensor([[ True],
            [False]])
    >>> gates
    Gates(1 gates, 2 tokens, 2 features)
    """

    u1: NDArray[np.float64]
    u2: NDArray[np.float64]

    def __init__(self, u1: ArrayLike, u2: ArrayLike) -> None:
        for name, values in (("u1", u1), ("u2", u2)):
            tensor = as_tensor(values, dtype=torch.float64, name=f"gates: {name}")
            array = np.array(tensor.numpy(force=True))  # a copy: the gates stay
            if array.ndim != 2 or array.size == 0 or not np.isfinite(array).all():
                got = f"shape {array.shape}" + ("" if np.isfinite(array).all() else " with NaN or infinite values")
                raise ValueError(f"gates: {name} must be a finite array of shape (n_gates, ...), got {got}")
            object.__setattr__(self, name, array)
        if len(self.u1) != len(self.u2):
            raise ValueError(f"gates: u1 and u2 must have equal length, got {len(self.u1)} and {len(self.u2)}")

    def __len__(self) -> int:
        return len(self.u1)

    def __repr__(self) -> str:
        return f"Gates({len(self)} gates, {self.u1.shape[1]} tokens, {self.u2.shape[1]} features)"

    def masks(self, tokens: ArrayLike | Tensor | LinearMap) -> Tensor:
        """Which samples each gate lets through.

        Parameters
        ----------
        tokens : array-like or Tensor of shape (N, n_tokens, n_features), or LinearMap
            The samples, or their map without gates, in any precision; the products are formed in float64.
            Two-dimensional ones are tokens of width 1.

        Returns
        -------
        Tensor of shape (N, h), bool

        Raises
        ------
        ValueError
            If the tokens are of other numbers or widths than the gates.
        """
        linear_map = tokens if isinstance(tokens, LinearMap) else DenseMap(as_tokens(tokens).detach())
        if linear_map.feature_shape != (self.u1.shape[1], self.u2.shape[1]):
            raise ValueError(
                f"gates with u1 of width {self.u1.shape[1]} and u2 of width {self.u2.shape[1]} are for so many tokens "
                f"and features, got samples of shape {linear_map.feature_shape}"
            )
        u1, u2 = (as_tensor(u, linear_map.device) for u in (self.u1, self.u2))
        directions = torch.einsum("hk,hd->kdh", u1, u2)
        return linear_map.nonnegative(directions)

    def select(self, index: NDArray[np.int64]) -> Gates:
        """The gates at the given positions."""
        return Gates(self.u1[index], self.u2[index])

    def distinct(self, masks: Tensor, sample_weight: Tensor | None = None) -> NDArray[np.int64]:
        """Positions of the gates that differ on a training set: all-closed gates dropped, duplicates merged.

        Parameters
        ----------
        masks : Tensor of shape (N, h), bool
            Masks of the training samples.
        sample_weight : Tensor of shape (N,), optional
            Samples of weight zero do not count.

        Returns
        -------
        ndarray of shape (n_distinct,)
            Increasing positions.

        Raises
        ------
        ValueError
            If no gate lets any sample through.
        """
        counted = masks if sample_weight is None else masks[sample_weight > 0]
        patterns = counted.cpu().numpy()
        _, first = np.unique(np.packbits(patterns, axis=0), axis=1, return_index=True)
        kept = np.sort(first)
        kept = kept[patterns[:, kept].any(axis=0)]
        if len(kept) == 0:
            raise ValueError("gates: no gate lets any training sample through; use more gates or other directions")
        return kept


def as_gate_index(values: ArrayLike) -> NDArray[np.int64]:
    """Positions of gates as an array of its own; ``ValueError`` where they are no integers.

    Examples
    --------
    >>> as_gate_index([0, 2])
    array([0, 2])
    """
    index = np.asarray(values)
    if index.size and index.dtype.kind not in "iu":
        raise ValueError(f"gate_index must hold integers, got {index.dtype}")
    return index.astype(np.int64)


@dataclass(frozen=True, eq=False)
class TrainingData:
    """What a gate source may look at: the training data and the program that the gates are for.

    Sources that draw at random look at the shape of `tokens` alone.

    Parameters
    ----------
    tokens : Tensor of shape (N, n_tokens, n_features) or LinearMap
        The samples, or the map without gates of those that are not in one tensor.
    target : Tensor of shape (N, n_outputs), optional
        Targets as the loss wants them: numbers, -1 and 1, or one-hot rows.
    loss : Loss, optional
        Loss of the program.
    penalty : Penalty, optional
        Penalty of the program.
    alpha : float, optional
        Its weight. None where the gates are for a whole grid of alphas.
    sample_weight : Tensor of shape (N,), optional
        Non-negative weights. Default: equal weights.
    fit_intercept : bool, default=False
        Whether the program has an intercept.

    Examples
    --------
    >>> TrainingData(torch.zeros(100, 4, 3)).token_shape
    (4, 3)
    """

    tokens: Tensor | LinearMap
    target: Tensor | None = None
    loss: Loss | None = None
    penalty: Penalty | None = None
    alpha: float | None = None
    sample_weight: Tensor | None = None
    fit_intercept: bool = False

    @property
    def token_shape(self) -> tuple[int, int]:
        """``(n_tokens, n_features)``."""
        return self.tokens.shape[1], self.tokens.shape[2]

    def counted_tokens(self) -> Tensor:
        """The samples whose weight is not zero."""
        tokens = self.held_tokens()
        return tokens if self.sample_weight is None else tokens[self.sample_weight > 0]

    def held_tokens(self) -> Tensor:
        """The samples in one tensor."""
        return self.tokens.as_matrix().view(self.tokens.shape) if isinstance(self.tokens, LinearMap) else self.tokens


class GateSource(ABC):
    """Something that makes gates for training data.

    A source of one's own is a subclass with the method ``make``, given to an estimator as ``gates=``.

    Attributes
    ----------
    depends_on_alpha : bool
        Whether the gates depend on ``alpha``, so that there is no one program for a grid of alphas.
    needs_data : bool
        Whether ``make`` reads more of its data than their shape. Networks that are built before there are any data
        refuse such sources.

    Examples
    --------
    >>> class Halves(GateSource):
    ...     def make(self, data, random_state):
    ...         n_tokens, n_features = data.token_shape
    ...         return Gates([[1.0] * n_tokens, [-1.0] * n_tokens], np.ones((2, n_features)))
    >>> len(Halves().make(TrainingData(torch.zeros(100, 4, 3)), np.random.RandomState(0)))
    2
    """

    depends_on_alpha: ClassVar[bool] = False
    needs_data: ClassVar[bool] = False

    @abstractmethod
    def make(self, data: TrainingData, random_state: np.random.RandomState) -> Gates:
        """Make gates; random sources draw from ``random_state`` alone.

        Parameters
        ----------
        data : TrainingData
            What the source may look at.
        random_state : RandomState
            Where it draws from.

        Returns
        -------
        Gates

        Raises
        ------
        GatesInterrupted
            On Ctrl-C, by a source that has gates and a certified point to keep.
        """


class GatesInterrupted(Interrupted):
    """Raised on Ctrl-C while gates are made; what there is by then is kept.

    Attributes
    ----------
    gates : Gates
        The gates so far; they differ on the training set.
    solution : SolverResult
        A certified point of the program with exactly these gates.

    Examples
    --------
    Here a callback stands for Ctrl-C:

    >>> from convexformer.gates import GeneratedGates
    >>> from convexformer.solvers import get_loss, get_penalty
    >>> def press_ctrl_c(step):
    ...     raise KeyboardInterrupt
    >>> tokens = torch.randn(60, 2, 2, generator=torch.Generator().manual_seed(0))
    >>> data = TrainingData(tokens, tokens[:, 0, :1].relu(), get_loss("squared"), get_penalty("group_l2"), alpha=0.05)
    >>> try:
    ...     gates = GeneratedGates(8, callback=press_ctrl_c).make(data, np.random.RandomState(0))
    ... except GatesInterrupted as interrupt:
    ...     gates, certificate = interrupt.gates, interrupt.solution.certificate
    >>> len(gates), certificate.relative_gap <= 1e-4
    (1, True)
    """

    def __init__(self, gates: Gates, solution: SolverResult) -> None:
        super().__init__(f"interrupted in the making of gates, with {len(gates)} made")
        self.gates, self.solution = gates, solution

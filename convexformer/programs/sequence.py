"""The convex programs of attention networks whose targets are sequences (paper [C], Theorem A.1, corrected)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from convexformer.validation import as_tensor, as_weight, check_flag
from convexformer_solvers import (
    LinearMap,
    Loss,
    Penalty,
    PerTarget,
    Program,
    RowStochastic,
    SignedMap,
    get_loss,
    get_penalty,
)
from convexformer_solvers.linear_maps.derived import PaddedMap
from convexformer_solvers.validation import shown

from .build import attention_map
from .samples import program_samples

# Sums of attention weights may differ from what they should be by this much: float32 networks are welcome.
_TOLERANCE = 1e-5


class HeadWeights(NamedTuple):
    """Weights of heads ``W1 X w2 w3'``.

    Attributes
    ----------
    w1 : Tensor of shape (m, n_targets, n_tokens)
        Attention of each target row over the tokens.
    w2 : Tensor of shape (m, n_features)
        Value weights.
    w3 : Tensor of shape (m, n_outputs)
        Output weights.
    """

    w1: Tensor
    w2: Tensor
    w3: Tensor


class SequenceForm(ABC):
    """A class of networks for sequence targets and its convex program.

    Attributes
    ----------
    name : str
        Name that users select it by.
    penalties : tuple of str
        Penalties that it has.
    exact_sums : bool
        Whether rows of coefficients must have equal sums, which takes float64.

    Examples
    --------
    >>> for form in FORMS.values():
    ...     print(f"{form.name}: {', '.join(form.penalties)}")
    single_row: group_l2, nuclear
    stochastic: group_l2
    substochastic: group_l2
    >>> get_form("stochastic").check_penalty("nuclear")
    Traceback (most recent call last):
        ...
    ValueError: penalty must be one of ['group_l2'] with form='stochastic', got 'nuclear'
    """

    name: ClassVar[str]
    penalties: ClassVar[tuple[str, ...]]
    exact_sums: ClassVar[bool]

    @abstractmethod
    def linear_map(self, tokens: Tensor | LinearMap) -> LinearMap:
        """Map from the program's coefficients to predictions ``(N, T c)``, of samples or of their map."""

    @abstractmethod
    def penalty(self, penalty: Penalty, n_targets: int) -> Penalty:
        """Penalty of the program's coefficients."""

    @abstractmethod
    def decay(self, penalty: Penalty, weights: HeadWeights) -> Tensor:
        """Weight decay of each head, shape ``(m,)``."""

    @abstractmethod
    def heads(self, coef: Tensor, penalty: Penalty, n_targets: int) -> HeadWeights:
        """Heads of the program's coefficients: the same predictions at a decay equal to the penalty."""

    @abstractmethod
    def attention(self, coef: Tensor, penalty: Penalty, n_targets: int, n_tokens: int) -> Tensor:
        """Share of the penalty with which each target row reads from each token, shape ``(T, n)``."""

    @abstractmethod
    def coef(self, weights: HeadWeights) -> Tensor:
        """The program's coefficients of heads: the same predictions at a penalty of at most the decay."""

    def signed(self, coef: Tensor) -> Tensor:
        """The program's coefficients as one array for both signs; by default they are that."""
        return coef

    @abstractmethod
    def check(self, w1: Tensor) -> None:
        """Raise ``ValueError`` unless attention weights are those of this class."""

    def check_penalty(self, penalty: str | Penalty) -> Penalty:
        """The penalty, if this form has it."""
        found = get_penalty(penalty)
        if type(found) not in {type(get_penalty(name)) for name in self.penalties}:
            raise ValueError(f"penalty must be one of {list(self.penalties)} with form={self.name!r}, got {penalty!r}")
        return found


@dataclass(frozen=True)
class SingleRow(SequenceForm):
    r"""Heads that read for one target row each: ``W1 = e_t a'`` with ``a`` in the simplex.

    The program separates into one per target row, with the penalty :math:`\sum_{t,k,l} \|z_{tkl}\|_2` (group-l2) or
    :math:`\sum_{t,k} \|Z_{tk}\|_*` (nuclear). The other rows of ``W1`` are zero, so this is another model than that of
    row-stochastic ``W1``.

    Examples
    --------
    A head that reads token 1 for target row 0, and its coefficients of shape ``(n_tokens, n_features, T c)``:

    >>> head = HeadWeights(torch.tensor([[[0.0, 1.0], [0.0, 0.0]]]), torch.tensor([[2.0]]), torch.tensor([[3.0]]))
    >>> SingleRow().coef(head)[:, 0]
    tensor([[0., 0.],
            [6., 0.]])
    """

    name: ClassVar[str] = "single_row"
    penalties: ClassVar[tuple[str, ...]] = ("group_l2", "nuclear")
    exact_sums: ClassVar[bool] = False

    def linear_map(self, tokens: Tensor | LinearMap) -> LinearMap:
        return attention_map(tokens)

    def penalty(self, penalty: Penalty, n_targets: int) -> Penalty:
        # What treats each output by itself does so with the outputs of each target row.
        return penalty if penalty.output_separable else PerTarget(penalty, n_targets)

    def decay(self, penalty: Penalty, weights: HeadWeights) -> Tensor:
        return penalty.factor_cost(weights.w2, weights.w3)

    def heads(self, coef: Tensor, penalty: Penalty, n_targets: int) -> HeadWeights:
        by_target = coef.unflatten(-1, (n_targets, -1)).movedim(-2, 0)
        block, left, right = penalty.factorize(by_target)
        w1 = left.new_zeros((len(left), n_targets, coef.shape[0]))
        w1[torch.arange(len(left), device=left.device), block[:, 0], block[:, 1]] = 1.0
        return HeadWeights(w1, left, right)

    def attention(self, coef: Tensor, penalty: Penalty, n_targets: int, n_tokens: int) -> Tensor:
        by_target = coef.unflatten(-1, (n_targets, -1)).movedim(-2, 0)
        return _shares(penalty.group_values_in_any_units(by_target).reshape(n_targets, n_tokens, -1).sum(2))

    def coef(self, weights: HeadWeights) -> Tensor:
        return _combined(weights).permute(1, 2, 0, 3).flatten(-2)

    def check(self, w1: Tensor) -> None:
        sums = w1.sum(2)
        one_row = (sums > _TOLERANCE).sum(1) == 1
        if not bool((one_row & ((sums.amax(1) - 1).abs() <= _TOLERANCE)).all()):
            raise ValueError("w1 must have one row in the simplex per head and zeros elsewhere (form='single_row')")


@dataclass(frozen=True)
class Stochastic(SequenceForm):
    r"""Heads ``W1 X w2 w3'`` with row-stochastic ``W1`` (Theorem A.1).

    Their decay is :math:`\frac12(\|w_2\|_1^2 + \|w_3\|_1^2)`. The program has a matrix :math:`C \ge 0` with equal row
    sums ``s`` for either sign, each feature and each output, and the penalty is the sum of the ``s``.

    Examples
    --------
    A head that swaps two tokens costs as much as its coefficients, of shape ``(2, n_tokens, n_features, T c)``:

    >>> head = HeadWeights(torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]), torch.tensor([[2.0]]), torch.tensor([[2.0]]))
    >>> form, penalty = Stochastic(), get_penalty("group_l2")
    >>> coef = form.coef(head)
    >>> coef.shape, form.penalty(penalty, 2).value(coef).item(), form.decay(penalty, head).item()
    (torch.Size([2, 2, 1, 2]), 4.0, 4.0)
    >>> form.attention(coef, penalty, n_targets=2, n_tokens=2).tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """

    name: ClassVar[str] = "stochastic"
    penalties: ClassVar[tuple[str, ...]] = ("group_l2",)
    exact_sums: ClassVar[bool] = True

    def linear_map(self, tokens: Tensor | LinearMap) -> LinearMap:
        return SignedMap(attention_map(tokens))

    def signed(self, coef: Tensor) -> Tensor:
        return coef[0] - coef[1]

    def penalty(self, penalty: Penalty, n_targets: int) -> Penalty:
        return RowStochastic(n_targets)

    def decay(self, penalty: Penalty, weights: HeadWeights) -> Tensor:
        return RowStochastic(weights.w1.shape[1]).factor_cost(weights.w2, weights.w3)

    def heads(self, coef: Tensor, penalty: Penalty, n_targets: int) -> HeadWeights:
        matrices = RowStochastic(n_targets).matrices(coef)  # (2, d, c, T, n)
        sums = matrices.sum(-1)
        used = (sums.mean(-1) > 0).nonzero()
        sign, feature, output = used.T
        w1 = matrices[sign, feature, output]
        w1 = w1 / w1.sum(-1, keepdim=True)
        root = sums.mean(-1)[sign, feature, output].sqrt()[:, None]
        w2 = root * torch.nn.functional.one_hot(feature, matrices.shape[1]) * (1 - 2 * sign)[:, None]
        w3 = root * torch.nn.functional.one_hot(output, matrices.shape[2])
        return HeadWeights(w1, w2, w3)

    def attention(self, coef: Tensor, penalty: Penalty, n_targets: int, n_tokens: int) -> Tensor:
        total = RowStochastic(n_targets).matrices(coef).sum((0, 1, 2))
        return _shares(total)[:, :n_tokens] * n_targets

    def coef(self, weights: HeadWeights) -> Tensor:
        w1, w2, w3 = (part.double() for part in weights)
        w1 = w1 / w1.sum(2, keepdim=True)  # sums of float32 are not exact enough
        products = w2[:, :, None] * w3[:, None, :]  # (m, d, c)
        signs = (products.clamp(min=0), -products.clamp(max=0))
        return torch.stack([torch.einsum("mtk,mdc->kdtc", w1, part).flatten(-2) for part in signs])

    def check(self, w1: Tensor) -> None:
        if bool(((w1.sum(2) - 1).abs() > _TOLERANCE).any()):
            raise ValueError("rows of w1 must sum to 1 (form='stochastic')")


@dataclass(frozen=True)
class Substochastic(Stochastic):
    r"""As ``Stochastic``, with rows of ``W1`` that sum to at most 1: a row may look away.

    The same as a further token of zeros. The penalty is :math:`\sum_{\pm, q, l} \max_t \|(C^\pm_{ql})_t\|_1` with a
    matrix :math:`C^\pm \ge 0` for either sign: the largest row sums that the theorem prints. Those of
    :math:`|C^+_{ql} - C^-_{ql}|`, one for both signs, would give no more than a lower bound.

    Examples
    --------
    >>> w1 = torch.tensor([[[0.5, 0.0], [1.0, 0.0]]])  # the first row looks half away
    >>> Substochastic().check(w1)
    >>> Stochastic().check(w1)
    Traceback (most recent call last):
        ...
    ValueError: rows of w1 must sum to 1 (form='stochastic')
    """

    name: ClassVar[str] = "substochastic"

    def linear_map(self, tokens: Tensor | LinearMap) -> LinearMap:
        return super().linear_map(PaddedMap(attention_map(tokens)))

    def heads(self, coef: Tensor, penalty: Penalty, n_targets: int) -> HeadWeights:
        weights = super().heads(coef, penalty, n_targets)
        return weights._replace(w1=weights.w1[..., :-1])

    def coef(self, weights: HeadWeights) -> Tensor:
        rest = (1 - weights.w1.sum(2, keepdim=True)).clamp(min=0)
        return super().coef(weights._replace(w1=torch.cat([weights.w1, rest], dim=2)))

    def check(self, w1: Tensor) -> None:
        if bool((w1.sum(2) > 1 + _TOLERANCE).any()):
            raise ValueError("rows of w1 must sum to at most 1 (form='substochastic')")


FORMS: dict[str, SequenceForm] = {form.name: form for form in (SingleRow(), Stochastic(), Substochastic())}


def get_form(form: str | SequenceForm) -> SequenceForm:
    """The form of a registered name, or the instance itself.

    Parameters
    ----------
    form : str or SequenceForm
        A key of ``FORMS`` or an instance.

    Returns
    -------
    SequenceForm

    Raises
    ------
    ValueError
        If the name is unknown.

    Examples
    --------
    >>> get_form("stochastic")
    Stochastic()
    """
    if isinstance(form, SequenceForm):
        return form
    if isinstance(form, str) and form in FORMS:
        return FORMS[form]
    raise ValueError(f"form must be one of {sorted(FORMS)} or a SequenceForm, got {shown(form)}")


def sequence_program(
    X: Any,
    y: Any,
    *,
    alpha: float,
    form: str | SequenceForm = "single_row",
    penalty: str | Penalty = "group_l2",
    loss: str | Loss = "squared",
    sample_weight: Any = None,
    fit_intercept: bool = False,
) -> Program:
    r"""Build the convex program of an attention network whose targets are sequences.

    .. math:: \min_{Z, b} \; \sum_i p_i \sum_{t, l} L\Big(b_{tl} + \sum_{k} Z_{tk, \cdot l}^\top x_{ik}, \; y_{itl}\Big)
              + \alpha \, \Omega(Z)

    with the weights :math:`p_i` of the samples over their sum and one of three :math:`\Omega`, that is three classes of
    networks :math:`\sum_j W_{1j} X w_{2j} w_{3j}^\top`:

    - ``"single_row"``: :math:`W_1 = e_t a^\top`; separates into a program per target row that share the data;
    - ``"stochastic"``: row-stochastic :math:`W_1`, shared by all samples (Theorem A.1, corrected): ``2 d c`` heads
      suffice;
    - ``"substochastic"``: rows of :math:`W_1` sum to at most 1 (the theorem's largest row sums, for either sign).

    Parameters
    ----------
    X : array-like or Tensor of shape (N, n_tokens, n_features), path, source or LinearMap
        The samples, in float32 or float64; two-dimensional ones are tokens of width 1. Or their map, of data that are
        not in one tensor, or what is at a path, as in ``attention_program``. The two stochastic forms are computed in
        float64 whatever the precision.
    y : array-like or Tensor of shape (N, n_targets, n_outputs)
        Target sequences; they need not be as long as the samples.
    alpha : float
        Weight of the decay against the loss: the mean over samples of the sum over target rows and outputs. The paper
        sums over samples, too: its beta is ``N alpha``.
    form : {"single_row", "stochastic", "substochastic"} or SequenceForm, default="single_row"
        Class of networks; the default is the one that scales.
    penalty : {"group_l2", "nuclear"} or Penalty, default="group_l2"
        Decay of the heads of ``"single_row"``; the others have one decay, ``(|w2|_1^2 + |w3|_1^2) / 2``.
    loss : {"squared", "huber", "poisson"} or Loss, default="squared"
        A loss of numbers that is a sum over outputs.
    sample_weight : array-like or Tensor of shape (N,), optional
        Non-negative; only ratios matter.
    fit_intercept : bool, default=False
        Whether there is a bias per target row and output, without decay. The paper's programs, which this function
        builds, have none; ``ConvexSequenceRegressor`` and ``SequenceHeads.program`` have one by default, so give True
        to compare with them.

    Returns
    -------
    Program
        Outputs are numbered ``t * n_outputs + l``.

    Raises
    ------
    ValueError
        If an argument is not as described; the message names it.

    Examples
    --------
    >>> import numpy as np
    >>> from convexformer.solvers import ColumnGeneration, solve
    >>> X, y = np.ones((1, 2, 1)), np.array([[[1.0], [0.0]]])
    >>> program = sequence_program(X, y, alpha=0.01, form="stochastic")
    >>> round(solve(program, ColumnGeneration(), tol=1e-8).certificate.primal, 6)
    0.254975
    """
    form, loss = get_form(form), get_loss(loss)
    base = form.check_penalty(penalty)
    if not loss.output_separable or loss.targets != "real":
        raise ValueError(f"loss must be a loss of numbers that is a sum over outputs, such as 'squared', got {loss!r}")
    tokens = program_samples(X)
    target = as_tensor(y, tokens.device, torch.float64, "y")
    if target.ndim != 3 or len(target) != len(tokens):
        raise ValueError(f"y must have shape ({len(tokens)}, n_targets, n_outputs), got {tuple(target.shape)}")
    tokens = tokens.to(dtype=torch.float64) if form.exact_sums else tokens
    weight = as_weight(sample_weight, tokens.device)
    has_intercept = check_flag(fit_intercept, "fit_intercept")
    linear_map, outputs = form.linear_map(tokens), target.flatten(1)
    return Program(linear_map, outputs, loss, form.penalty(base, target.shape[1]), alpha, weight, has_intercept)


def _shares(values: Tensor) -> Tensor:
    """Values over their sum, or zeros."""
    total = values.sum()
    return values / total if bool(total > 0) else values


def _combined(weights: HeadWeights) -> Tensor:
    """Coefficients ``Z[t, k] = sum_j W1_j[t, k] w2_j w3_j'``, shape ``(T, n, d, c)``."""
    products = (weights.w2[:, :, None] * weights.w3[:, None, :]).flatten(1)
    combined = weights.w1.flatten(1).T @ products
    return combined.view(*weights.w1.shape[1:], weights.w2.shape[1], weights.w3.shape[1])


def signed_coef(coef: Tensor, form: SequenceForm, n_targets: int, n_tokens: int) -> Tensor:
    """The program's coefficients as ``Z`` of shape ``(T, n, d, c)``, with ``pred[t] = sum_k Z[t, k]' x_k + b[t]``."""
    return form.signed(coef)[:n_tokens].unflatten(-1, (n_targets, -1)).permute(2, 0, 1, 3)

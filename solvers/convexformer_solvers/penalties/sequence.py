"""Penalties of programs whose outputs are a sequence: one row of outputs per target position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from convexformer_solvers.linear_maps.config import CONFIG
from convexformer_solvers.validation import check_counts, check_kind

from .base import Atoms, Factors, Penalty


def _check_outputs(n_outputs: int, n_targets: int) -> None:
    if n_outputs % n_targets:
        raise ValueError(f"n_targets must divide the number of outputs, got {n_targets=} and {n_outputs} outputs")


@dataclass(frozen=True)
class RowStochastic(Penalty):
    r"""Gauge of row-stochastic matrices: attention that is shared by all samples (paper [C], Theorem A.1, corrected).

    Coefficients of shape ``(2, n, d, T c)``, for a ``SignedMap``, are read as matrices :math:`C \in R^{T \times n}`,
    two (of either sign) for each feature :math:`q` and output :math:`l`. The penalty is

    .. math:: \Omega(C) = \sum_{\pm, q, l} s_{\pm q l} \quad \text{where } C_{\pm q l} \ge 0, \;
              C_{\pm q l} 1 = s_{\pm q l} 1,

    and infinite elsewhere. Each matrix is one head with :math:`W_1 = C / s`. The printed theorem leaves out that all
    rows have equal sums, and is only a relaxation. The dual constraint is
    :math:`\sum_t \max_k \pm (M_{ql})_{tk} \le \alpha`. Solve in float64: in float32 no two rows have equal sums.

    Parameters
    ----------
    n_targets : int
        Rows ``T`` of the target sequences; outputs are numbered ``t * c + l``.

    Raises
    ------
    ValueError
        If ``n_targets`` is no positive integer; when used, if coefficients do not have the shape above.

    Examples
    --------
    >>> coef = torch.zeros(2, 3, 1, 2)  # three tokens of width 1, two target rows of one output
    >>> coef[0, :, 0, 0], coef[0, :, 0, 1] = torch.tensor([2.0, 1, 0]), torch.tensor([0.0, 0, 3])
    >>> RowStochastic(n_targets=2).value(coef)
    tensor(3.)
    """

    block_separable: ClassVar[bool] = False
    n_targets: int

    def __post_init__(self) -> None:
        check_counts(n_targets=self.n_targets)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 4 or shape[0] != 2:
            wanted = "(2, n_tokens, n_features, n_outputs), those of a SignedMap"
            raise ValueError(f"RowStochastic needs coefficients of shape {wanted}, got {tuple(shape)}")
        _check_outputs(shape[-1], self.n_targets)

    def matrices(self, coef: Tensor) -> Tensor:
        """View of the coefficients as matrices, shape ``(2, d, c, T, n)``."""
        self.check_shape(coef.shape)
        return coef.unflatten(-1, (self.n_targets, -1)).permute(0, 2, 4, 3, 1)

    def group_values(self, coef: Tensor) -> Tensor:
        matrices = self.matrices(coef)
        sums = matrices.sum(-1)
        mean = sums.mean(-1)
        rounding = torch.finfo(torch.float64).eps ** (3 / 4) * coef.shape[1] * mean.abs()
        unequal = (sums - mean[..., None]).abs().amax(-1) > rounding
        return torch.where(unequal | (matrices.amin((-2, -1)) < 0), torch.inf, mean)

    def group_dual_norms(self, coef: Tensor) -> Tensor:
        """Support function of each matrix; over both signs of coefficients ``(M, -M)`` it is never negative."""
        return self.matrices(coef).amax(-1).sum(-1)

    def prox(self, coef: Tensor, step: float) -> Tensor:
        result = torch.empty_like(coef, memory_format=torch.contiguous_format)
        # Some features at a time, as each matrix takes ten times its own memory on the way.
        at_once = max(1, CONFIG.limit(coef.device) * coef.shape[2] // max(1, coef.numel()))
        for part, shrunk in zip(coef.split(at_once, dim=2), result.split(at_once, dim=2), strict=True):
            matrices = self._prox_of(self.matrices(part), step)
            shrunk.copy_(matrices.permute(0, 4, 1, 3, 2).flatten(-2))
        return result

    @staticmethod
    def _prox_of(matrices: Tensor, step: float) -> Tensor:
        ordered = matrices.sort(dim=-1, descending=True).values
        totals = ordered.cumsum(-1)
        counts = torch.arange(1, ordered.shape[-1] + 1, device=ordered.device, dtype=ordered.dtype)
        # Row sums at which each further entry becomes positive.
        enters = totals - counts * ordered
        size = ordered.new_zeros(matrices.shape[:3])
        # The rows' thresholds fall along a convex function of the size, so that Newton steps from zero end exactly.
        while True:
            last = (enters <= size[..., None, None]).sum(-1).clamp(min=1) - 1
            total, n_positive = totals.gather(-1, last[..., None])[..., 0], (last + 1).to(ordered.dtype)
            slope = (1 / n_positive).sum(-1)
            wanted = (((total / n_positive).sum(-1) - step) / slope).clamp(min=0)
            if not bool((wanted > size * (1 + 4 * torch.finfo(size.dtype).eps)).any()):
                break
            size = torch.maximum(size, wanted)
        threshold = (total - size[..., None]) / n_positive
        result = torch.where(size[..., None, None] > 0, (matrices - threshold[..., None]).clamp(min=0), 0.0)
        sums = result.sum(-1, keepdim=True)
        return result * torch.where(sums > 0, size[..., None, None] / sums, 0.0)

    def factor_cost(self, left: Tensor, right: Tensor) -> Tensor:
        """Weight decay ``(|left|_1^2 + |right|_1^2) / 2`` of each pair; the penalty of balanced ones."""
        return 0.5 * (left.abs().sum(1).square() + right.abs().sum(1).square())

    def violating_atoms(self, correlation: Tensor, alpha: float) -> Atoms:
        # One nonzero coefficient per target row: where the row has its maximum.
        best, source = self.matrices(correlation).max(-1)
        excess = best.sum(-1) / alpha - 1
        sign, feature, output = (excess > 0).nonzero(as_tuple=True)
        target = torch.arange(self.n_targets, device=correlation.device)
        column = target * (correlation.shape[-1] // self.n_targets) + output[:, None]
        position = sign[:, None] * correlation.shape[1] + source[sign, feature, output]
        index = (position * correlation.shape[2] + feature[:, None]) * correlation.shape[3] + column
        return Atoms(index, torch.ones_like(index, dtype=correlation.dtype), excess[sign, feature, output])

    def expression(self, coef: Any, n_blocks: int) -> Any:
        return self._row_sums(coef, n_blocks)[0].sum()  # that of the first row, as all rows have the same sum

    def constraints(self, coef: Any, n_blocks: int) -> list[Any]:
        sums = self._row_sums(coef, n_blocks)
        return [coef >= 0, *(row == sums[0] for row in sums[1:])]

    def _row_sums(self, coef: Any, n_blocks: int) -> list[Any]:
        """Per target row the sums over tokens, as expressions of shape ``(2 d, c)``."""
        d, n_outputs = coef.shape[0] // n_blocks, coef.shape[1] // self.n_targets
        over_tokens = np.kron(np.kron(np.eye(2), np.ones((1, n_blocks // 2))), np.eye(d))
        return [over_tokens @ coef[:, t * n_outputs : (t + 1) * n_outputs] for t in range(self.n_targets)]


@dataclass(frozen=True)
class PerTarget(Penalty):
    """Another penalty on the outputs of each target row by themselves, summed over the rows.

    Parameters
    ----------
    penalty : Penalty
        The penalty of one row's coefficients.
    n_targets : int
        Rows ``T`` of the target sequences; outputs are numbered ``t * c + l``.

    Raises
    ------
    TypeError
        If ``penalty`` is no penalty.
    ValueError
        If ``penalty`` is not a sum over blocks, or ``n_targets`` is no positive integer; when used, if that does not
        divide the number of outputs.

    Examples
    --------
    >>> from convexformer_solvers import GroupNuclear
    >>> coef = torch.cat([torch.eye(2), torch.eye(2)], dim=1)[None]  # one token of width 2, two rows of two outputs
    >>> PerTarget(GroupNuclear(), n_targets=2).value(coef)
    tensor(4.)
    """

    penalty: Penalty
    n_targets: int

    def __post_init__(self) -> None:
        check_kind("penalty", self.penalty, Penalty, "GroupL2()")
        if not self.penalty.block_separable:
            raise ValueError(f"penalty must be a sum over blocks, got {self.penalty!r}")
        check_counts(n_targets=self.n_targets)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        _check_outputs(shape[-1], self.n_targets)
        self.penalty.check_shape((*shape[:-1], shape[-1] // self.n_targets))

    def for_outputs(self, n_outputs: int) -> Penalty:
        _check_outputs(n_outputs, self.n_targets)
        inner = self.penalty.for_outputs(n_outputs // self.n_targets)
        if inner.output_separable or self.n_targets == 1:  # treats outputs of each target row by themselves anyway
            return inner
        return self if inner is self.penalty else PerTarget(inner, self.n_targets)

    def of_part(self, n_outputs: int) -> tuple[int, Penalty]:
        return self.n_targets, self.penalty

    def by_target(self, coef: Tensor) -> Tensor:
        """Coefficients with the target rows first, shape ``(T, *block_shape, d, c)``."""
        _check_outputs(coef.shape[-1], self.n_targets)
        return coef.unflatten(-1, (self.n_targets, -1)).movedim(-2, 0)

    def group_values(self, coef: Tensor) -> Tensor:
        values = self.penalty.group_values(self.by_target(coef)).sum(0)
        return values.sum(-1) if self.penalty.output_separable else values

    def group_dual_norms(self, coef: Tensor) -> Tensor:
        norms = self.penalty.group_dual_norms(self.by_target(coef)).amax(0)
        return norms.amax(-1) if self.penalty.output_separable else norms

    def prox(self, coef: Tensor, step: float) -> Tensor:
        return self.penalty.prox(self.by_target(coef), step).movedim(0, -2).flatten(-2).contiguous()

    def factorize(self, coef: Tensor) -> Factors:
        target, *rest = self.penalty.factorize(self.by_target(coef))
        right = torch.zeros((len(rest[1]), coef.shape[-1]), dtype=coef.dtype, device=coef.device)
        columns = self.by_target(torch.arange(coef.shape[-1], device=coef.device)[None, None])[target[:, 0], 0, 0]
        return Factors(target[:, 1:], rest[0], right.scatter_(1, columns, rest[1]))

    def right_norm(self, right: Tensor) -> Tensor:
        by_target = right.unflatten(1, (self.n_targets, -1)).flatten(0, 1)
        return self.penalty.right_norm(by_target).view(-1, self.n_targets).sum(1)

    def expression(self, coef: Any, n_blocks: int) -> Any:
        return sum(self.penalty.expression(part, n_blocks) for part in self._columns(coef))

    def constraints(self, coef: Any, n_blocks: int) -> list[Any]:
        return [each for part in self._columns(coef) for each in self.penalty.constraints(part, n_blocks)]

    def _columns(self, coef: Any) -> list[Any]:
        """Columns of each target row."""
        size = coef.shape[1] // self.n_targets
        return [coef[:, t * size : (t + 1) * size] for t in range(self.n_targets)]

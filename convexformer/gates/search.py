"""Local search for gates that violate the dual constraint of a gated program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from convexformer.validation import check_positive
from convexformer_solvers import GatedMap, Penalty
from convexformer_solvers.rounding import SUM
from convexformer_solvers.validation import check_counts

from .base import Gates
from .sources import separating_directions


class DualPoint(NamedTuple):
    """What the search sees of the program at its solution, samples of weight zero left out.

    Attributes
    ----------
    tokens : Tensor of shape (N, n_tokens, n_features)
        Samples.
    values : Tensor of shape (N, n_outputs)
        Rows of the dual point times the weights of their samples, in float64.
    penalty : Penalty
        Whose dual norm is bounded.
    alpha : float
        The bound.
    weight : Tensor of shape (N,)
        Weights of the samples, which sum to 1, in float64.
    """

    tokens: Tensor
    values: Tensor
    penalty: Penalty
    alpha: float
    weight: Tensor


class Found(NamedTuple):
    """Gates that violate the dual constraint, most violating first.

    Attributes
    ----------
    gates : Gates or None
        The gates; None where none was found.
    violation : float
        Largest dual norm of a gate that the search met, over ``alpha``, less 1; negative where none is violated.
    """

    gates: Gates | None
    violation: float


@dataclass(frozen=True)
class GateSearch:
    """Local search, with restarts, for the gates whose dual norms exceed ``alpha`` most.

    The dual norm of a gate is that of the samples it lets through, times their dual values, summed: the step in it is
    replaced by a sigmoid that narrows while all restarts ascend at once. From the better of its start and its end each
    climbs by random trials on the dual norm itself. Directions have unit length.

    Parameters
    ----------
    n_steps : int, default=40
        Steps of the ascent.
    step_lengths : tuple of two floats, default=(0.3, 0.02)
        Lengths of its first and of its last step; those between are a geometric sequence.
    widths : tuple of two floats, default=(1.0, 0.02)
        Widths of the sigmoid there, relative to the spread of the samples along the gate.
    n_trials : int, default=30
        Steps of the climb by random trials.
    trial_lengths : tuple of two floats, default=(0.5, 0.01)
        Lengths of its first and of its last step.
    perturbation : float, default=0.3
        Length of the noise on directions of gates in use, from which a third of the restarts begin.
    apart : float, default=0.05
        Share of the samples, by weight, on which gates that are added at once differ at least: nearly equal ones gain
        little together.
    temporary : int, default=2**22
        Numbers in the largest temporary of the ascent.
    gap_factor : float, default=1e-2
        Factor, below 1, on the gap of the next solve where gates that were found do not lower the objective.
    least_gap : float, default=1e-3
        Gap, relative to the `tol` of the generation, below which there is no other such solve.

    Raises
    ------
    ValueError
        If a count is no positive integer, another number is not positive, or `gap_factor` is not below 1.

    Examples
    --------
    >>> GateSearch(n_steps=80).step_lengths
    (0.3, 0.02)
    """

    n_steps: int = 40
    step_lengths: tuple[float, float] = (0.3, 0.02)
    widths: tuple[float, float] = (1.0, 0.02)
    n_trials: int = 30
    trial_lengths: tuple[float, float] = (0.5, 0.01)
    perturbation: float = 0.3
    apart: float = 0.05
    temporary: int = 2**22
    gap_factor: float = 1e-2
    least_gap: float = 1e-3

    def __post_init__(self) -> None:
        check_counts(n_steps=self.n_steps, n_trials=self.n_trials, temporary=self.temporary)
        for name in ("step_lengths", "widths", "trial_lengths"):
            pair = getattr(self, name)
            if not (isinstance(pair, tuple) and len(pair) == 2):
                raise ValueError(f"{name} must be a pair of the first and the last number, got {pair!r}")
            check_positive(**{f"{name}[{place}]": number for place, number in enumerate(pair)})
        numbers = ("perturbation", "apart", "gap_factor", "least_gap")
        check_positive(**{name: getattr(self, name) for name in numbers})
        if self.gap_factor >= 1:
            raise ValueError(f"gap_factor must be below 1, so that the gaps come to an end, got {self.gap_factor!r}")

    def violated(
        self,
        point: DualPoint,
        known: Tensor,
        in_use: Gates | None,
        *,
        n_restarts: int,
        n_wanted: int,
        tol: float,
        random_state: np.random.RandomState,
    ) -> Found:
        """Search for the gates whose dual norms exceed ``(1 + tol) alpha`` most.

        Parameters
        ----------
        point : DualPoint
            The program at its solution.
        known : Tensor of shape (N, h), bool
            Masks of the gates that the program has.
        in_use : Gates or None
            Those of them that the solution uses; some restarts begin near them.
        n_restarts : int
            Starting points.
        n_wanted : int
            Gates to return at most.
        tol : float
            Excess that does not count.
        random_state : RandomState
            Draws the starting points.

        Returns
        -------
        Found
        """
        start = self._starting_directions(point, in_use, n_restarts, random_state)
        # The smoothed dual norm may lead away from gates that violate.
        candidates = Gates(*self._climbed(point, [self._ascended(point, *start), start], random_state))
        masks = candidates.masks(point.tokens)
        excess = gate_norms(point, masks) / point.alpha - 1
        chosen = self._most_violating(point, masks, known, excess, tol, n_wanted)
        return Found(candidates.select(np.array(chosen)) if chosen else None, float(excess.max()))

    def _starting_directions(
        self, point: DualPoint, in_use: Gates | None, n_restarts: int, random_state: np.random.RandomState
    ) -> tuple[Tensor, Tensor]:
        """Directions at random, between samples with large dual values, and near the gates in use, a third each."""
        near = 0 if in_use is None else n_restarts // 3
        between = n_restarts // 3
        n_random = n_restarts - near - between
        parts = [_random_directions(point, n_random, random_state)]
        if between:
            parts.append(_directions_between(point, between, random_state))
        if in_use is not None:
            noise = _random_directions(point, near, random_state)
            index = random_state.randint(len(in_use), size=near)
            own1, own2 = (
                normalize(torch.as_tensor(u[index], device=point.tokens.device)) for u in (in_use.u1, in_use.u2)
            )
            parts.append((own1 + self.perturbation * noise[0], own2 + self.perturbation * noise[1]))
        u1, u2 = (torch.cat(directions) for directions in zip(*parts, strict=True))
        return normalize(u1), normalize(u2)

    def _ascended(self, point: DualPoint, u1: Tensor, u2: Tensor) -> tuple[Tensor, Tensor]:
        """The directions after an ascent of the smoothed dual norm."""
        size = max(1, self.temporary // max(1, point.values.numel()))
        parts = (self._ascend(point, *chunk) for chunk in zip(u1.split(int(size)), u2.split(int(size)), strict=True))
        first, second = zip(*parts, strict=True)
        return torch.cat(first), torch.cat(second)

    def _ascend(self, point: DualPoint, u1: Tensor, u2: Tensor) -> tuple[Tensor, Tensor]:
        rows, widths = point.tokens.flatten(1).double(), geometric(self.widths, self.n_steps)
        return ascended(
            (u1, u2),
            lambda step, u1, u2: _smoothed_norms(point, rows, u1, u2, float(widths[step])),
            lambda u1, u2: (normalize(u1), normalize(u2)),
            geometric(self.step_lengths, self.n_steps),
            tiny=1e-300,
        )

    def _climbed(
        self, point: DualPoint, begins: list[tuple[Tensor, Tensor]], random_state: np.random.RandomState
    ) -> tuple[Tensor, Tensor]:
        """The best of several directions and their opposites after random trials.

        Trials that raise the dual norm are kept.
        """
        count, (first, second) = len(begins[0][0]), (torch.cat(parts) for parts in zip(*begins, strict=True))
        u1, u2 = torch.cat([first, -first]), torch.cat([second, second])
        norms = gate_norms(point, Gates(u1, u2).masks(point.tokens))
        best = norms.view(-1, count).argmax(0) * count + torch.arange(count, device=u1.device)
        u1, u2, norms = u1[best], u2[best], norms[best]
        for length in geometric(self.trial_lengths, self.n_trials):
            noise = _random_directions(point, len(u1), random_state)
            trial = [normalize(u + length * v) for u, v in zip((u1, u2), noise, strict=True)]
            found = gate_norms(point, Gates(*trial).masks(point.tokens))
            better = (found > norms)[:, None]
            u1, u2 = torch.where(better, trial[0], u1), torch.where(better, trial[1], u2)
            norms = torch.maximum(found, norms)
        return u1, u2

    def _most_violating(
        self, point: DualPoint, masks: Tensor, known: Tensor, excess: Tensor, tol: float, n_wanted: int
    ) -> list[int]:
        """Positions of gates that violate most, with masks that the program does not have and that are apart."""
        taken = set(_patterns(known))
        order = [index for index in excess.argsort(descending=True).tolist() if excess[index] > tol]
        chosen: list[int] = []
        for index, pattern in zip(order, _patterns(masks[:, order]), strict=True):
            share = point.weight @ (masks[:, chosen] != masks[:, index, None]).double()
            if pattern not in taken and bool((share >= self.apart * (1 - SUM)).all()):
                chosen.append(index)
            if len(chosen) == n_wanted:
                break
        return chosen


def geometric(pair: tuple[float, float], n: int) -> NDArray[np.float64]:
    """A geometric sequence from the first of two numbers to the last.

    Examples
    --------
    >>> geometric((10**30, 1), 3)
    array([1.e+30, 1.e+15, 1.e+00])
    """
    return np.geomspace(float(pair[0]), float(pair[1]), n)


def ascended(
    start: Sequence[Tensor], norms: Callable[..., Tensor], limit: Callable[..., Any], lengths: NDArray, tiny: float
) -> Any:
    """Variables after normalised gradient steps of `lengths`; `limit` brings them back to where they may be."""
    variables = start
    for step, length in enumerate(lengths.tolist()):
        with torch.enable_grad():
            active = [variable.detach().requires_grad_() for variable in variables]
            slopes = torch.autograd.grad(norms(step, *active).sum(), active)
        steps = (length * normalize(slope, dim=-1, eps=tiny) for slope in slopes)
        variables = limit(*(variable.detach() + moved for variable, moved in zip(active, steps, strict=True)))
    return variables


def gate_norms(point: DualPoint, masks: Tensor) -> Tensor:
    """Dual norm of each of some gates at a dual point, shape ``(h,)``; the constraint is that none exceeds alpha."""
    return largest_dual_norms(point.penalty, GatedMap(point.tokens, masks).rmatvec(point.values))


def largest_dual_norms(penalty: Penalty, sums: Tensor) -> Tensor:
    """Largest dual norm of a group, for each entry of the first axis."""
    return penalty.group_dual_norms(sums).reshape(len(sums), -1).amax(1)


def _random_directions(point: DualPoint, count: int, random_state: np.random.RandomState) -> tuple[Tensor, Tensor]:
    """Directions of unit length."""
    drawn = (random_state.standard_normal((count, width)) for width in point.tokens.shape[1:])
    u1, u2 = (normalize(torch.as_tensor(u, device=point.tokens.device)) for u in drawn)
    return u1, u2


def _directions_between(point: DualPoint, count: int, random_state: np.random.RandomState) -> tuple[Tensor, Tensor]:
    size = torch.linalg.vector_norm(point.values, dim=1).numpy(force=True)
    total = size.sum()
    odds = size / total if total > 0 else None
    pairs = random_state.choice(len(size), size=(2, count), p=odds)
    first, second = (point.tokens[torch.as_tensor(index, device=point.tokens.device)] for index in pairs)
    return separating_directions(first, second)


def _smoothed_norms(point: DualPoint, rows: Tensor, u1: Tensor, u2: Tensor, width: float) -> Tensor:
    n_tokens, n_features = point.tokens.shape[1:]
    n_outputs = point.values.shape[1]
    side = rows @ torch.einsum("rk,rd->kdr", u1, u2).flatten(0, 1)
    spread = (point.weight @ side.square()).add(torch.finfo(side.dtype).tiny).sqrt()
    opened = torch.sigmoid(side / (width * spread))
    sums = rows.T @ (opened[:, :, None] * point.values[:, None, :]).flatten(1)
    return largest_dual_norms(point.penalty, sums.view(n_tokens, n_features, -1, n_outputs).permute(2, 0, 1, 3))


def _patterns(masks: Tensor) -> Iterator[bytes]:
    return (column.tobytes() for column in np.packbits(masks.numpy(force=True), axis=0).T)
